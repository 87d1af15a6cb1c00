//! Opens, recovers and closes a store.
//!
//! Opening reads the superblock. If it names images of a checkpoint, they are written to their places. Then opening
//! replays the journal from its tail, writes journalled payload to its blocks, and seals snapshots that lost their last
//! writes with the buffer. Finally it makes a checkpoint, which is the new starting point.
//!
//! What must hold:
//!
//! 1. Nothing is appended to the journal before the final checkpoint, so a full ring needs no special case. Changes
//!    that recovery makes after replay are in the pages that this checkpoint captures.
//! 2. Recovery can be interrupted anywhere and begin again. Until the checkpoint is committed, the superblock describes
//!    the state from which replay starts, and everything that recovery writes in place would be written again by the
//!    next recovery.
//! 3. Unbounded work, such as clearing the blocks past the end of a disk that shrank, comes after the checkpoint and
//!    is admitted step by step.

mod survey;

pub(super) use self::survey::{Survey, collect_images, survey};

use super::buffers::Buffers;
use super::check::Report;
use super::checkpoint::Purpose;
use super::files::{self, DataFiles, JOURNAL_FILE, SUPERBLOCK_FILE, ShowingData};
use super::flush::payload_max;
use super::left_out::{LeftOut, Tolerance};
use super::log::{CheckpointRecord, CommitLog, Images, Superblock};
use super::metadata::{Meta, Metadata};
use super::read_cache::{Kept, ReadCache};
use super::rebuild::{damaged_page, damaged_superblock, note_unreported};
use super::replay::Replayed;
use super::reserve::{Reserves, unless_full};
use super::running::Running;
use super::writeback::{LANE_DEPTH, WriteBack};
use super::{Counters, Engine, EngineOptions, Owner};
use crate::catalog::{Catalog, Object, ObjectState, Provisioning};
use crate::journal::{Journal, Operation};
use crate::pages::{Mender, PageFile, Pages, write_home};
use crate::space::{Space, SpaceKind};
use crate::sync::Mutex;
use crate::sync::time::Instant;
use crate::{Error, ErrorKind, IoContext, Result, is_lost};
use backend::{BLOCK_SIZE, Directory, File, IoMode};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Pages that recovery may change in addition to those of replay: for the snapshots that it seals.
const PAGES_AHEAD: u64 = 64;
/// How many regions of data a superblock may count beyond the length of the data files.
const REGIONS_AHEAD: u64 = 1024;

/// How long a close continues the search for unclaimed space. If the search is not complete then, the next opening
/// begins it again.
const SEARCH_TIME: Duration = Duration::from_secs(2);

/// The purpose of an opening.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Opening {
    /// An opening for ordinary use. It is refused if damage affects more than the content of the damaged page itself.
    Ordinary,
    /// An opening for a check with repair.
    Repair,
}

impl Opening {
    /// What a user can do when damage makes this kind of opening fail.
    fn advice(self) -> &'static str {
        match self {
            Self::Ordinary => "run 'lamina check --repair', or read out the undamaged data with 'lamina salvage'",
            Self::Repair => "this cannot be repaired; read out the undamaged data with 'lamina salvage'",
        }
    }

    fn unrecovered(self, error: Error) -> Error {
        match is_lost(&error) {
            true => error.context(format!("the datastore cannot be recovered; {}", self.advice())),
            false => error,
        }
    }
}

/// The parts of a store, as the opening has read them.
pub(super) struct Parts<'a> {
    pub meta: Metadata,
    pub directory: Arc<dyn Directory>,
    pub options: EngineOptions,
    pub superblock: Superblock,
    pub superblock_file: Arc<dyn File>,
    pub journal: Journal,
    pub images: Images,
    pub files: DataFiles,
    pub found_first: Report,
    pub owner: Option<&'a Arc<Owner>>,
}

impl Engine {
    /// Opens a store, and recovers it if it was not closed. Starts its threads if the options say so. The caller
    /// ensures that no other process has the store open.
    pub fn open(directory: Arc<dyn Directory>, options: EngineOptions) -> Result<Arc<Self>> {
        Self::open_owned(directory, options, None)
    }

    /// Like [`Engine::open`], but the store is written only while `owner` exists and holds its locks.
    pub fn open_owned(
        directory: Arc<dyn Directory>,
        options: EngineOptions,
        owner: Option<&Arc<Owner>>,
    ) -> Result<Arc<Self>> {
        Self::open_for(directory, options, owner, Opening::Ordinary)
    }

    /// Like [`Engine::open_owned`], for a check with repair: pages that can be restored are restored before recovery
    /// needs them. The next check reports the findings.
    pub fn open_repairing(
        directory: Arc<dyn Directory>,
        options: EngineOptions,
        owner: Option<&Arc<Owner>>,
    ) -> Result<Arc<Self>> {
        Self::open_for(directory, options, owner, Opening::Repair)
    }

    fn open_for(
        directory: Arc<dyn Directory>,
        options: EngineOptions,
        owner: Option<&Arc<Owner>>,
        opening: Opening,
    ) -> Result<Arc<Self>> {
        let open = |name: &str, mode| files::open_present(&*directory, name, mode);
        let mut found_first = Report::default();
        let superblock_file = open(SUPERBLOCK_FILE, IoMode::Buffered)?;
        // After a failed write, the page cache may have a copy that never reached the medium.
        files::show(&*superblock_file, SUPERBLOCK_FILE)?;
        let (mut superblock, other_copy_lost) = match opening {
            Opening::Ordinary => Superblock::read(&*superblock_file)?,
            Opening::Repair => Superblock::read_mended(&*superblock_file)?,
        };
        let tells_settled = superblock.tells_settled_overwrites();
        note_unreported(&superblock.unreported, &mut found_first);
        if let Some(copy) = superblock.damaged_copy(&*superblock_file)? {
            // Every opening writes the superblock, beginning with the damaged copy.
            tracing::error!(copy, "a copy of the superblock is damaged; the other one is used");
            found_first.add(damaged_superblock(copy), Some("rewritten when the datastore was opened".to_owned()));
            // The superblocks that this opening writes keep the finding until a check has reported it.
            superblock.unreported.copies |= 1 << copy;
        }
        let files = DataFiles::open(Arc::clone(&directory), options.mode)?;
        let mut showing = None;
        if !superblock.clean {
            showing = Some(ShowingData::begin(files.all(), options.threads && opening == Opening::Ordinary)?);
            files::show_metadata(&*directory)?;
        }
        // The journal bypasses the page cache if the file system allows that, because only recovery reads it.
        let journal_file = match directory.open(JOURNAL_FILE, IoMode::Direct) {
            Ok(file) => file,
            Err(_) => open(JOURNAL_FILE, IoMode::Buffered)?,
        };
        if journal_file.len().during(|| "measuring the journal".into())? < superblock.journal_size {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "the journal is shorter than the superblock says: it was truncated; restore the file from a backup, or \
                 read out the undamaged data with 'lamina salvage'",
            ));
        }
        let mut page_files: Vec<Arc<dyn File>> = Vec::new();
        for file in PageFile::ALL {
            page_files.push(open(file.name(), IoMode::Buffered)?);
        }
        let page_files: [Arc<dyn File>; PageFile::COUNT] =
            page_files.try_into().map_err(|_| Error::new(ErrorKind::Invalid, "page files"))?;
        let salt = u64::from_le_bytes(superblock.uuid[..8].try_into().expect("eight bytes"));
        let mut images = Images::open(&*directory, &superblock, salt)?;
        if opening == Opening::Repair {
            images.mend();
        }
        if let Some(head) = images.outstanding(&superblock, other_copy_lost)? {
            images.take_home(&head, &page_files)?;
            superblock.record = head.record;
            superblock.checkpoint = head.number;
            superblock.incarnation = superblock.incarnation.max(head.incarnation);
            superblock.images = None;
            superblock.clean = false;
            // The images file may be overwritten from here on.
            superblock.write(&*superblock_file)?;
        }
        let mut journal = Journal::new(journal_file, superblock.journal_size, salt, superblock.record.tail);
        if opening == Opening::Repair {
            journal.mend();
        }
        // Nothing was appended after the tail of a store that was closed. If a copy of the superblock is lost, the
        // store may have been opened since.
        let closed = superblock.clean && !other_copy_lost;
        if opening == Opening::Repair || closed {
            journal.pass_over_unreadable();
        }
        journal.read_ahead();
        let began = Instant::now();
        let found = survey(&journal, superblock.incarnation).map_err(|error| opening.unrecovered(error))?;
        let surveyed = began.elapsed();
        let unreadable = match opening == Opening::Repair && !closed {
            true => journal.unreadable(found.end, found.incarnation),
            false => None,
        };
        if let Some(error) = &unreadable {
            let at = found.end.position;
            let problem = format!(
                "the journal cannot be read at position {at}; changes that only this part has are lost: {error}"
            );
            found_first.add(problem, Some("the journal ends before this part".to_owned()));
        }
        found.check_whole(opening)?;
        let (mut replay_from, mut ordered_from) = (superblock.record.tail, superblock.record.ordered);
        if let Some(checkpoint) = &found.checkpoint {
            // Version 1 kept images in the ring. They stay there until this recovery has committed a checkpoint.
            let mut images = Vec::new();
            collect_images(&journal, superblock.record.tail, checkpoint, &mut images)?;
            write_home(&page_files, &images)?;
            let CheckpointRecord { tail, ordered, .. } = superblock.record;
            superblock.record = checkpoint.record();
            (replay_from, ordered_from) = (superblock.record.tail, superblock.record.ordered);
            (superblock.record.tail, superblock.record.ordered) = (tail, ordered);
        }
        check_lengths(&page_files, &files.all(), &superblock)?;
        let mut pages = Pages::new(page_files.clone(), options.metadata_cache);
        if opening == Opening::Repair {
            pages.set_mender(Some(Arc::new(Mender::new(images.index(superblock.checkpoint)))));
        }
        let mut map =
            Space::open(SpaceKind::Map, superblock.record.map_regions, superblock.record.map_length, &mut pages)?;
        let mut data = Space::open(SpaceKind::Data, superblock.record.data_regions, 0, &mut pages)?;
        let catalog = Catalog::open(&mut pages, superblock.record.catalog_slots, superblock.record.next_id)?;
        if !catalog.lost().is_empty() {
            // Pages count as lost only if the medium can be read elsewhere. The superblock is read again to prove this.
            superblock_file.forget_cached().during(|| "reading the superblock again".into())?;
            Superblock::read(&*superblock_file)?;
        }
        for (key, error) in map.take_derived().into_iter().chain(data.take_derived()) {
            tracing::error!(%error, "a damaged page of summaries is recounted from its table");
            found_first.add(damaged_page(key, &error), Some("recounted from the table".to_owned()));
            superblock.unreported.summaries = superblock.unreported.summaries.saturating_add(1);
        }
        journal.resume(found.end, found.incarnation + 1);
        let kept = match options.mode {
            IoMode::Buffered => Kept::PackedAgain,
            IoMode::Direct if options.cache_plain => Kept::All,
            IoMode::Direct => Kept::Packed,
        };
        let read_cache = ReadCache::new(options.read_cache, kept);
        let engine = Self::assemble(Parts {
            meta: Metadata::new(Arc::clone(&directory), page_files, pages, map, data, catalog, read_cache),
            directory,
            options,
            superblock,
            superblock_file,
            journal,
            images,
            files,
            found_first,
            owner,
        })?;
        if opening == Opening::Repair {
            engine.repair_before_replay()?;
        }
        let crashed = !superblock.clean || found.end != superblock.record.tail;
        if crashed {
            // Until the checkpoint that ends recovery, a flush must not settle overwrites that an earlier process
            // announced and did not write: if recovery begins again, these blocks must still be suspect.
            engine.log.settle_nothing();
            let tolerance = match opening {
                Opening::Ordinary => Tolerance::Nothing,
                Opening::Repair => Tolerance::LostObjects,
            };
            let mut left_out = LeftOut::new(tolerance, superblock.record.next_id);
            let began = Instant::now();
            let replayed = engine.replay(replay_from, ordered_from, found.end, &mut left_out);
            let Replayed { operations, doubts } = replayed.map_err(|error| opening.unrecovered(error))?;
            let replayed = began.elapsed();
            showing.map_or(Ok(()), ShowingData::wait)?;
            let shown = began.elapsed();
            let unsettled = (unreadable.is_some() || !tells_settled).then_some(&doubts);
            engine.put_payload_home(unsettled).map_err(|error| opening.unrecovered(error))?;
            tracing::info!(
                operations,
                ?surveyed,
                ?replayed,
                waited_for_data = ?(shown - replayed),
                payload_written = ?(began.elapsed() - shown),
                "recovered the datastore from its journal"
            );
        }
        engine.end_mending()?;
        engine.update_headroom(&engine.meta.lock());
        engine.reserve_for_checkpoints()?;
        engine.start(crashed, opening)?;
        Ok(engine)
    }

    /// Combines the parts of a store into an engine.
    pub(super) fn assemble(parts: Parts<'_>) -> Result<Arc<Self>> {
        let Parts { meta, directory, options, superblock, superblock_file, journal, images, files, .. } = parts;
        let queue = || directory.write_queue(LANE_DEPTH).during(|| "starting an I/O queue".into());
        let writeback = WriteBack::new(queue()?, queue()?);
        let cache = (options.metadata_cache / BLOCK_SIZE) as u64;
        Ok(Arc::new(Self {
            meta,
            log: CommitLog::new(journal, superblock, superblock_file, images, cache)?,
            buffers: Buffers::new(
                (options.write_buffer / BLOCK_SIZE) as u64,
                payload_max(superblock.journal_size) / BLOCK_SIZE as u64,
            ),
            writeback,
            reserves: Reserves::default(),
            files,
            directory,
            options,
            owner: parts.owner.map(Arc::downgrade),
            uuid: superblock.uuid,
            checking: Mutex::default(),
            counting: Mutex::default(),
            packing: Mutex::default(),
            control: Mutex::default(),
            running: Running::default(),
            counters: Counters::default(),
            found_first: Mutex::new(parts.found_first),
            isolation: Default::default(),
        }))
    }

    /// Finishes an opening: completes operations that a crash interrupted, and starts the threads.
    fn start(self: &Arc<Self>, crashed: bool, opening: Opening) -> Result<()> {
        self.stop_on_loss();
        if crashed {
            let mut meta = self.meta.lock();
            let mut unsealed: Vec<u64> = meta
                .catalog
                .objects()
                .filter(|object| object.state == ObjectState::Unsealed && meta.catalog.find(object.disk).is_some())
                .map(|object| object.id)
                .collect();
            unsealed.sort_unstable();
            for snapshot in unsealed {
                // The number of references of the root may be lost.
                let sealed = self.carry_out(&mut meta, Operation::Seal { snapshot }, 0);
                sealed.map_err(|error| opening.unrecovered(error))?;
            }
            // Incomplete disks are left to the caller, because the record of a migration may name one of them as the
            // complete disk. Otherwise the caller deletes them with their snapshots.
            let mut incomplete: Vec<u64> = meta
                .catalog
                .objects()
                .filter(|object| object.incomplete && object.is_snapshot())
                .map(|object| object.id)
                .collect();
            incomplete.sort_unstable();
            for object in incomplete {
                self.carry_out(&mut meta, Operation::Trash { object }, 0)?;
            }
            self.restore_reserves(&mut meta)?;
            drop(meta);
            self.reserves.begin_search();
            if !self.options.threads {
                self.return_unclaimed_room(false, || true);
            }
            let guard = self.log.lock_checkpoints();
            self.checkpoint_locked(Purpose::Recover)?;
            drop(guard);
            self.log.end_announced();
            self.clear_behind_ends()?;
        }
        // The files of the store change from here on, because space is reserved before the journal describes it.
        self.log.note_open()?;
        unless_full(self.extend_map(0))?;
        if self.options.threads {
            self.start_threads()?;
        }
        Ok(())
    }

    /// Reserves space for the images of any single change, and of all pages that are dirty already.
    fn reserve_for_checkpoints(&self) -> Result<()> {
        let needed = {
            let meta = self.meta.lock();
            self.count_changes(&meta);
            meta.images_needed(0, meta.map.regions()).max(meta.pages.dirty() as u64 + PAGES_AHEAD)
        };
        let reserved = self.reserve_images(needed);
        reserved.map_err(|error| error.context("the datastore cannot be opened without room for its metadata"))?;
        // Table pages of regions in use have space in the file system. Table pages of other regions may lack it; a
        // change that uses such a region reserves it.
        unless_full(self.reserve_tables())
    }

    /// Unmaps blocks past the ends of disks: a crash during a shrink leaves the new capacity and the old blocks.
    fn clear_behind_ends(&self) -> Result<()> {
        let disks: Vec<(u64, u64)> =
            self.with_catalog(|catalog| catalog.disks().map(|disk| (disk.id, disk.size_in_blocks())).collect());
        for (disk, end) in disks {
            // If the file system is too full to unmap the blocks, or the disk's map cannot be read, they stay mapped.
            // Clients cannot read them, and they are unmapped before the disk grows.
            match unless_full(self.unmap_waiting(disk, end..crate::tree::LOGICAL_LIMIT)) {
                Err(error) if is_lost(&error) => {
                    self.check_running()?;
                    tracing::error!(%error, disk, "blocks past the end of a disk cannot be unmapped");
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Restores the reservation of thick disks with snapshots to their size, as far as free blocks allow. Writes reduce
    /// the reservation, and the replay after a crash may have counted some of them twice, until nothing was reserved
    /// any more. After a crash, too much may also be reserved, for buffered writes of a snapshot or for a resize. The
    /// reserved blocks are among the free ones.
    fn restore_reserves(&self, meta: &mut Meta) -> Result<()> {
        let snapshots = meta.catalog.objects().filter(|object| object.is_snapshot());
        let with_snapshots: BTreeSet<u64> = snapshots.map(|snapshot| snapshot.disk).collect();
        let thick = |disk: &&Object| {
            disk.provisioning != Provisioning::Thin && (disk.reserved > 0 || with_snapshots.contains(&disk.id))
        };
        let mut disks: Vec<Object> = meta.catalog.disks().filter(thick).cloned().collect();
        disks.iter_mut().for_each(|disk| disk.reserved = disk.reserved.min(disk.size_in_blocks()));
        let mut spare = meta.data.counts().free.saturating_sub(disks.iter().map(|disk| disk.reserved).sum());
        for mut object in disks {
            let more = object.size_in_blocks().saturating_sub(object.reserved).min(spare);
            spare -= more;
            object.reserved += more;
            self.carry_out(meta, Operation::Put { record: object.encode() }, 0)?;
        }
        Ok(())
    }

    /// Writes all data and metadata in place, and ends the threads. Afterwards the store can only be dropped or, after
    /// an error, closed again.
    pub fn close(&self) -> Result<()> {
        let mut closed = self.running.begin_closing();
        if *closed {
            return Ok(());
        }
        self.running.end_threads();
        self.flush()?;
        // Commits changes that no write caused, which the flush does not append. The checkpoint then has nothing to
        // append.
        self.commit_changes()?;
        // If some space could not be returned, the datastore is not marked as cleanly closed, so that the next opening
        // searches for it.
        let began = Instant::now();
        self.return_unclaimed_room(false, || began.elapsed() < SEARCH_TIME);
        let returned = self.return_rest() && !self.reserves.is_search_open();
        let purpose = if returned { Purpose::Close } else { Purpose::GoOn };
        let _guard = self.log.lock_checkpoints();
        self.checkpoint_locked(purpose)?;
        self.running.stop("it was closed");
        *closed = true;
        Ok(())
    }
}

/// Checks the lengths of the metadata files, so that a truncated file is found now, not by a later read. Refuses sizes
/// in the superblock that exceed the files.
fn check_lengths(
    files: &[Arc<dyn File>; PageFile::COUNT],
    data_files: &[Arc<dyn File>],
    superblock: &Superblock,
) -> Result<()> {
    let slots_per_page = crate::catalog::SLOTS_PER_PAGE as u64;
    for (file, pages) in [
        (PageFile::Map, superblock.record.map_length),
        (PageFile::Catalog, superblock.record.catalog_slots.div_ceil(slots_per_page)),
    ] {
        let length = files[file as usize].len().during(|| format!("measuring {}", file.name()))?;
        if length < pages * BLOCK_SIZE as u64 {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "{} has {length} bytes and should have {}: it was truncated; restore the file from a backup, or read out \
                     the undamaged data with 'lamina salvage'",
                    file.name(),
                    pages * BLOCK_SIZE as u64
                ),
            ));
        }
    }
    // A region is described before its space is reserved, so some regions may lie past the end of the last file.
    let mut regions_max = (data_files.len() as u64).saturating_sub(1) * crate::space::FILE_REGIONS + REGIONS_AHEAD;
    if let Some(last) = data_files.last() {
        let length = last.len().during(|| "measuring the last data file".into())?;
        regions_max += length.div_ceil(crate::space::REGION_BLOCKS * BLOCK_SIZE as u64);
    }
    if superblock.record.data_regions > regions_max
        || superblock.record.map_regions > superblock.record.map_length.div_ceil(crate::space::REGION_BLOCKS)
    {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "the superblock names {} regions of data and {} of the map, more than the {} data files and the \
                 map can hold: data files are missing or truncated, or the superblock is damaged",
                superblock.record.data_regions,
                superblock.record.map_regions,
                data_files.len()
            ),
        ));
    }
    Ok(())
}
