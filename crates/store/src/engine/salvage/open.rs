//! Finds the newest state of a damaged store that can be proven, in memory.
//!
//! 1. The superblock: the newer copy that is undamaged, or undamaged after one inverted bit is corrected. If both are
//!    lost, the record in the images of the last checkpoint is used, whether or not a superblock named these images.
//! 2. The images of the last checkpoint, if they have to be written to their places. If an image is damaged, its place
//!    is invalidated, because it may hold a page of the previous checkpoint.
//! 3. The pages. Pages that can be derived from others are rebuilt if they are damaged.
//! 4. The journal, up to the first damage. Blocks that later batches name count as lost.

use super::super::check::{Report, Window, count_trees};
use super::super::files::{DataFiles, JOURNAL_FILE, SUPERBLOCK_FILE};
use super::super::left_out::{LeftOut, Tolerance};
use super::super::log::{IMAGES_FILE, Images, Superblock};
use super::super::metadata::{Meta, Metadata};
use super::super::read_cache::{Kept, ReadCache};
use super::super::recover::{Parts, Survey, collect_images, survey};
use super::super::{Engine, EngineOptions};
use super::{EVERYTHING, Salvage, is_readable};
use crate::catalog::{Catalog, ObjectState};
use crate::journal::{BatchKind, Journal, Operation, Place, Reader};
use crate::pages::{Mender, PageFile, Pages, write_home};
use crate::space::{Run, Space, SpaceKind};
use crate::{Error, ErrorKind, IoContext, Result, is_lost};
use backend::overlay::Overlay;
use backend::{BLOCK_SIZE, Directory, File, IoMode};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Limit of the metadata cache (64 MiB): there is one reader.
const METADATA_CACHE: usize = 64 << 20;

/// Opens a damaged store in the steps described at the head of the file.
pub fn open(below: Arc<dyn Directory>) -> Result<Salvage> {
    let directory: Arc<dyn Directory> = Arc::new(Overlay::over(below));
    let mut notes = Vec::new();
    complete(&*directory, &mut notes)?;
    let open = |name: &str| directory.open(name, IoMode::Buffered).during(|| format!("opening {name}"));
    let superblock_file = open(SUPERBLOCK_FILE)?;
    let journal_file = open(JOURNAL_FILE)?;
    let mut files: Vec<Arc<dyn File>> = Vec::new();
    for file in PageFile::ALL {
        files.push(open(file.name())?);
    }
    let files: [Arc<dyn File>; PageFile::COUNT] =
        files.try_into().map_err(|_| Error::new(ErrorKind::Invalid, "page files"))?;
    let (mut superblock, images, named) = find_state(&*directory, &*superblock_file, &*journal_file, &mut notes)?;
    let tells_settled = superblock.tells_settled_overwrites();
    if superblock.checkpoint == 0 && superblock.record.map_length == 0 {
        superblock.record.map_length =
            files[PageFile::Map as usize].len().during(|| "measuring map".into())? / BLOCK_SIZE as u64;
    }
    take_images_home(&mut superblock, &images, named, &files, &mut notes)?;

    let salt = u64::from_le_bytes(superblock.uuid[..8].try_into().expect("eight bytes"));
    let length = journal_file.len().during(|| "measuring the journal".into())?;
    if length < superblock.journal_size {
        notes.push(format!("the journal has {length} bytes and should have {}", superblock.journal_size));
    }
    let mut journal = Journal::new(journal_file, superblock.journal_size, salt, superblock.record.tail);
    journal.mend();
    journal.pass_over_unreadable();
    let found = survey(&journal, superblock.incarnation)?;
    let ends_unread = !superblock.clean && journal.unreadable(found.end, found.incarnation).is_some();
    if let Some(checkpoint) = &found.checkpoint {
        // Version 1 kept the images in the ring.
        let mut pages = Vec::new();
        collect_images(&journal, superblock.record.tail, checkpoint, &mut pages)?;
        write_home(&files, &pages)?;
        superblock.record = checkpoint.record();
    }
    // A truncated journal has lost appends, because all of them lie after the tail.
    let behind = found.beyond.is_some() || ends_unread || length < superblock.journal_size && !superblock.clean;

    let mut pages = Pages::new(files.clone(), METADATA_CACHE);
    pages.set_mender(Some(Arc::new(Mender::new(images.index(superblock.checkpoint)))));
    let map = Space::open(SpaceKind::Map, superblock.record.map_regions, superblock.record.map_length, &mut pages)?;
    let data = Space::open(SpaceKind::Data, superblock.record.data_regions, 0, &mut pages)?;
    let catalog = Catalog::open(&mut pages, superblock.record.catalog_slots, superblock.record.next_id)?;
    notes.extend(catalog.lost().values().cloned());
    let mut beyond = Beyond::default();
    if behind {
        notes.push(format!(
            "the journal is damaged at position {}: changes acknowledged after it are lost, and disks have their state \
             from before; blocks that are known to have changed since are named",
            found.end.position
        ));
        beyond.read(&journal, &found)?;
    }
    journal.resume(found.end, found.incarnation + 1);
    let options = EngineOptions { metadata_cache: METADATA_CACHE, threads: false, ..EngineOptions::default() };
    let engine = Engine::assemble(Parts {
        meta: Metadata::new(Arc::clone(&directory), files, pages, map, data, catalog, ReadCache::new(0, Kept::All)),
        files: DataFiles::open(Arc::clone(&directory), IoMode::Buffered)?,
        directory,
        options,
        superblock,
        superblock_file,
        journal,
        images,
        found_first: Report::default(),
        owner: None,
    })?;
    let mut left_out = LeftOut::new(Tolerance::Everything, superblock.record.next_id);
    let unproven = renew(&engine, &mut notes)?;
    if !superblock.clean || found.end != superblock.record.tail {
        complete_data_files(&engine)?;
        engine.log.settle_nothing();
        let replayed = engine.replay(superblock.record.tail, superblock.record.ordered, found.end, &mut left_out)?;
        engine.put_payload_home((behind || !tells_settled).then_some(&replayed.doubts))?;
        seal(&engine, &mut left_out);
    }
    let mut left_out = left_out.ranges;
    for (disk, ranges) in beyond.ranges {
        left_out.entry(disk).or_default().extend(ranges);
    }
    // Objects from lost pages of the catalog have the state of the last checkpoint: their later changes are missing.
    if found.end != superblock.record.tail {
        unproven.iter().for_each(|id| note_changes(&engine, *id, &superblock, found.end, &mut left_out));
    }
    Ok(Salvage { engine, notes, left_out, unproven, behind, outdated: beyond.blocks })
}

/// Creates missing files, in memory.
fn complete(directory: &dyn Directory, notes: &mut Vec<String>) -> Result<()> {
    let names = directory.list().during(|| "listing the datastore".into())?;
    let known = PageFile::ALL.map(PageFile::name);
    let mut missing = 0;
    for name in known.into_iter().chain([JOURNAL_FILE, SUPERBLOCK_FILE, IMAGES_FILE]) {
        if !names.iter().any(|found| found == name) {
            notes.push(format!("'{name}' is missing"));
            directory.create(name, IoMode::Buffered).during(|| format!("replacing {name}"))?;
            missing += 1;
        }
    }
    match missing > known.len() {
        true => Err(Error::new(ErrorKind::NotFound, "this is not a datastore: its files are missing")),
        false => Ok(()),
    }
}

/// The newest superblock that can be proven, the images file, and the images that have to be written to their places.
fn find_state(
    directory: &dyn Directory,
    superblock_file: &dyn File,
    journal: &dyn File,
    notes: &mut Vec<String>,
) -> Result<(Superblock, Images, bool)> {
    let salt_of = |superblock: &Superblock| u64::from_le_bytes(superblock.uuid[..8].try_into().expect("eight bytes"));
    match Superblock::read_mended(superblock_file) {
        Ok((superblock, other_lost)) => {
            if let Some(copy) = superblock.damaged_copy(superblock_file)? {
                notes.push(super::super::rebuild::damaged_superblock(copy));
            }
            let mut images = Images::open(directory, &superblock, salt_of(&superblock))?;
            images.mend();
            Ok((superblock, images, other_lost))
        }
        Err(error) if is_lost(&error) => {
            notes.push(
                "neither copy of the superblock can be read; the record of the last checkpoint is used".to_owned(),
            );
            let salt = Images::lost_salt(directory).or_else(|| Journal::first_salt(journal)).unwrap_or(0);
            let mut images = Images::of_lost(directory, salt)?;
            images.mend();
            let length = journal.len().during(|| "measuring the journal".into())?;
            match images.lost_superblock(length)? {
                Some(superblock) => Ok((superblock, images, false)),
                None => Err(Error::new(
                    ErrorKind::Corrupt,
                    "neither copy of the superblock can be read, and the images of the last checkpoint are not whole: \
                     nothing proves which state is the newest",
                )),
            }
        }
        Err(error) => Err(error),
    }
}

/// Writes the images of the last checkpoint to their places, if these writes may be missing.
fn take_images_home(
    superblock: &mut Superblock,
    images: &Images,
    other_lost: bool,
    files: &[Arc<dyn File>; PageFile::COUNT],
    notes: &mut Vec<String>,
) -> Result<()> {
    let head = match images.outstanding(superblock, other_lost) {
        Ok(None) => return Ok(()),
        Ok(Some(head)) => {
            images.take_home(&head, files)?;
            head
        }
        Err(error) if is_lost(&error) => {
            let Some((head, lost)) = images.take_whole_home(files)? else { return Err(error) };
            if head.number != superblock.checkpoint {
                return Err(error);
            }
            notes.push(format!("{lost} pages of the last checkpoint are lost: {error}"));
            head
        }
        Err(error) => return Err(error),
    };
    superblock.record = head.record;
    superblock.checkpoint = head.number;
    superblock.incarnation = superblock.incarnation.max(head.incarnation);
    superblock.images = None;
    superblock.clean = false;
    Ok(())
}

/// Rebuilds damaged pages that can be derived from others. Returns the objects with records on damaged pages.
fn renew(engine: &Engine, notes: &mut Vec<String>) -> Result<BTreeSet<u64>> {
    let mut guard = engine.meta.lock();
    let meta = &mut *guard;
    let blanked = meta.blank_unused()?;
    notes.extend(blanked.iter().map(|key| format!("{key} is damaged; it had no entries at the last checkpoint")));
    let damaged = meta.sight().find_damaged();
    let texts = damaged.map_tables.values().chain(damaged.data_tables.values());
    notes.extend(texts.cloned());
    let unproven = admit_unproven(meta)?;
    if damaged.map_tables.is_empty() && damaged.data_tables.is_empty() {
        return Ok(unproven);
    }
    let mut nodes = vec![0; meta.map.blocks() as usize];
    for range in Window::all(meta.data.blocks()) {
        let window = count_trees(&mut meta.sight(), range, &mut nodes)?;
        for page in damaged.data_tables.keys() {
            meta.sight().renew_blocks(*page, &window);
        }
    }
    for page in damaged.map_tables.keys() {
        meta.sight().renew_nodes(*page, &nodes);
    }
    meta.map.recount(&mut meta.pages, std::iter::empty())?;
    meta.data.recount(&mut meta.pages, std::iter::empty())?;
    Ok(unproven)
}

/// Uses records from damaged pages of the catalog. A record is used if the table has a reference to its root for which
/// no other tree accounts. Returns the objects of these records.
fn admit_unproven(meta: &mut Meta) -> Result<BTreeSet<u64>> {
    let mut unproven = BTreeSet::new();
    if meta.catalog.unproven().next().is_none() {
        return Ok(unproven);
    }
    let mut nodes = vec![0; meta.map.blocks() as usize];
    count_trees(&mut meta.sight(), 0..0, &mut nodes)?;
    let seen: Vec<_> = meta.catalog.unproven().filter(|object| is_readable(object)).cloned().collect();
    for object in seen {
        let orphan = match object.root {
            None => true,
            Some(root) => {
                let counted = nodes.get(root.0 as usize).copied();
                let known = meta.map.entry(&mut meta.pages, root.0).map_or(0, |entry| entry.references);
                counted.is_some_and(|counted| known > counted)
            }
        };
        if orphan && meta.catalog.admit_unproven(object.id) {
            unproven.insert(object.id);
        }
    }
    Ok(unproven)
}

/// Creates missing data files, because payload is written to them.
fn complete_data_files(engine: &Engine) -> Result<()> {
    let blocks = engine.meta.lock().data.blocks();
    if blocks > 0 {
        engine.files.ensure(Run { start: blocks - 1, blocks: 1 }, &|error| error)?;
    }
    Ok(())
}

/// Seals the snapshots that lost their last writes with the buffer.
fn seal(engine: &Engine, left_out: &mut LeftOut) {
    let mut meta = engine.meta.lock();
    let waiting = |object: &&crate::catalog::Object| object.state == ObjectState::Unsealed;
    let mut unsealed: Vec<u64> = meta.catalog.objects().filter(waiting).map(|object| object.id).collect();
    unsealed.sort_unstable();
    for snapshot in unsealed {
        let operation = Operation::Seal { snapshot };
        let sealed = left_out.leaves_out(&mut meta, &operation).and_then(|out| match out {
            true => Ok(()),
            false => meta.apply(&operation, &mut super::super::metadata::Effects::default()),
        });
        if let Err(error) = sealed {
            left_out.tolerates(&meta, &operation, &error);
        }
    }
}

/// Marks the ranges of an object that operations since the checkpoint change, because they were not applied.
fn note_changes(
    engine: &Engine,
    id: u64,
    superblock: &Superblock,
    end: Place,
    ranges: &mut std::collections::BTreeMap<u64, Vec<Range<u64>>>,
) {
    let mut place = superblock.record.tail;
    while place != end {
        let Ok(Some(batch)) = engine.log.lock().read(place) else { return };
        let mut reader = Reader::new(&batch.body);
        while let Ok(Some(operation)) = reader.next_operation() {
            if let Some((changed, range)) = super::super::left_out::target(&operation)
                && changed == id
            {
                ranges.entry(id).or_default().push(if range.is_empty() { EVERYTHING } else { range });
            }
        }
        place = batch.next;
    }
}

/// The changes in batches that follow damage in the journal.
#[derive(Default)]
struct Beyond {
    ranges: std::collections::BTreeMap<u64, Vec<Range<u64>>>,
    blocks: BTreeSet<u64>,
}

impl Beyond {
    fn read(&mut self, journal: &Journal, found: &Survey) -> Result<()> {
        let mut next = found.beyond;
        while let Some(place) = next {
            let Some(batch) = journal.read(place, found.incarnation)? else {
                next = journal.continuation(place, found.incarnation)?.filter(|further| *further > place);
                continue;
            };
            if matches!(batch.kind, BatchKind::Operations | BatchKind::Urgent) {
                let mut reader = Reader::new(&batch.body);
                while let Some(operation) = reader.next_operation()? {
                    self.note(&operation);
                }
            }
            next = Some(batch.next);
        }
        Ok(())
    }

    fn note(&mut self, operation: &Operation) {
        if let Some((id, range)) = super::super::left_out::target(operation)
            && !range.is_empty()
        {
            self.ranges.entry(id).or_default().push(range);
        }
        match operation {
            Operation::Overwrite { run, .. }
            | Operation::OverwriteData { run, .. }
            | Operation::Checksums { run, .. } => self.blocks.extend(run.start..run.start + run.blocks),
            Operation::Revert { disk, .. } => self.ranges.entry(*disk).or_default().push(EVERYTHING),
            _ => {}
        }
    }
}
