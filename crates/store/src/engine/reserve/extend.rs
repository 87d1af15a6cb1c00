//! Reserves space in the file system, ahead of the writes that need it: data blocks, and before them the metadata that
//! will describe them.
//!
//! A reservation may wait for the journal of the file system for a long time, so it is made without the metadata lock:
//! by maintenance ahead of need, otherwise by the writer that finds no free blocks. It is made under the metadata lock
//! only if neither maintenance nor the writer has made it in time.

use super::{is_full, unless_full};
use crate::catalog::SLOTS_PER_PAGE;
use crate::engine::log::Cost;
use crate::engine::{Engine, Meta};
use crate::journal::Operation;
use crate::pages::PageFile;
use crate::space::{ExtensionSearch, REGION_BLOCKS, REGION_PAGES, Run, SUMMARY_ENTRIES};
use crate::{Error, ErrorKind, IoContext, Result, is_lost};
use backend::BLOCK_SIZE;

/// One reservation takes at least this many data blocks (1 MiB).
const EXTENSION_MIN: u64 = 256;
/// One reservation takes at most this many data blocks (4 MiB).
pub(super) const EXTENSION_MAX: u64 = 1024;
/// The number of used blocks, divided by this number, is reserved ahead.
const EXTENSION_SHARE: u64 = 128;
/// The smallest reservation tried when the file system is nearly full, in blocks.
const EXTENSION_LEAST: u64 = 16;

/// Consecutive attempts to reserve space that fail because a region is lost, before the reservation fails.
const LOST_MAX: u64 = 8;

/// Catalog pages for which space is reserved beyond the full pages.
pub(crate) const CATALOG_AHEAD: u64 = 64;
/// Catalog pages beyond the full pages without whose space an operation is refused: the page that the next record
/// needs.
const CATALOG_NEXT: u64 = 1;
/// If the reserved space does not suffice for this many new records, more is reserved before the next change of the
/// catalog.
const RECORDS_SOON: u64 = 256;
/// New records for which space is reserved if it does not suffice for [`RECORDS_SOON`].
const RECORDS_AHEAD: u64 = 512;

/// The highest cost of recording one reservation.
const EXTENSION_COST: Cost = Cost { bytes: 32, pages: 8 };

/// The space that metadata needs in the file system.
pub(crate) struct Needs {
    /// Lengths to which the files have to grow, in bytes.
    files: [(PageFile, u64); 5],
    /// Images of a checkpoint.
    images: u64,
}

impl Engine {
    /// Reserves space until the free blocks suffice for `claims` claimed blocks. Must not be called under a lock that a
    /// checkpoint takes.
    pub(crate) fn extend(&self, claims: u64) -> Result<()> {
        let mut largest = EXTENSION_MAX;
        let (mut searched, mut lost) = (false, 0);
        while self.headroom_now() < claims {
            // One grant for each reservation, because a thick disk may need any number of reservations.
            let _grant = self.admit(EXTENSION_COST)?;
            // A region that is reserved now would be lost too, and the list of regions would grow with each write.
            if self.reserves.lost_in_a_row() >= LOST_MAX && !self.log.is_medium_readable() {
                return Err(Error::new(ErrorKind::Io, "no space is reserved while the medium cannot be read"));
            }
            let losses = self.losses();
            let reserved = self.extend_once(claims, &mut largest);
            let is_region_lost = reserved.as_ref().is_err_and(is_lost) && self.losses() > losses;
            self.reserves.note_lost(is_region_lost);
            lost = if is_region_lost { lost + 1 } else { 0 };
            match reserved {
                // The space that a crash left may be enough.
                Err(error) if is_full(&error) && !searched && self.reserves.is_search_open() => {
                    searched = true;
                    self.return_unclaimed_room(true, || self.running.goes_on());
                }
                // The table of the region for the new space was lost meanwhile. The next attempt uses another region.
                Err(_) if is_region_lost && lost <= LOST_MAX => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// The free blocks on which writes may rely, including freed blocks to which no read refers any more.
    pub(super) fn headroom_now(&self) -> u64 {
        let mut meta = self.meta.lock();
        meta.release_freed();
        self.update_headroom(&meta);
        self.reserves.headroom()
    }

    /// Makes one reservation of at most `largest` blocks, if the free blocks do not suffice for `claims` yet.
    fn extend_once(&self, claims: u64, largest: &mut u64) -> Result<()> {
        let _extending = self.reserves.lock_extending();
        let mut search = ExtensionSearch::default();
        let plan = |meta: &mut Meta| {
            meta.release_freed();
            self.update_headroom(meta);
            let free = self.reserves.headroom();
            if claims <= free {
                return Ok(None);
            }
            let want = extension(meta).max((claims - free).min(EXTENSION_MAX)).min(*largest);
            let Meta { data, pages, .. } = &mut *meta;
            let run = data.plan_extension(pages, want, &mut search)?;
            Ok(Some((run, needs(meta, 0, 0))))
        };
        let Some((run, needs)) = self.meta.look(plan)? else { return Ok(()) };
        match self.reserve_run(run, &needs) {
            Ok(()) => {
                let _fetch = self.meta.bring_in(|meta| meta.survey_run(run));
                let noted = self.note_backed(&mut self.meta.lock(), run);
                // A hole is punched without the metadata lock. The lock on extending is held, so no other reservation
                // chooses the run meanwhile.
                self.return_unrecorded(run, noted)
            }
            Err(error) if error.kind() == ErrorKind::NoSpace && *largest > EXTENSION_LEAST => {
                *largest = (run.blocks.min(*largest) / 2).max(EXTENSION_LEAST);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Like [`Engine::extend`], but under the metadata lock and for `want` blocks: for a batch that finds fewer free
    /// blocks than it had claimed. Returns the new free blocks, or `None` if another thread makes a reservation.
    pub(crate) fn extend_locked(&self, meta: &mut Meta, want: u64) -> Result<Option<Run>> {
        let Some(_extending) = self.reserves.try_extending() else { return Ok(None) };
        let mut want = extension(meta).max(want.min(EXTENSION_MAX));
        loop {
            let run = meta.data.plan_extension(&mut meta.pages, want, &mut ExtensionSearch::default())?;
            match self.reserve_run(run, &needs(meta, 0, 0)) {
                Ok(()) => {
                    let noted = self.note_backed(meta, run);
                    return self.return_unrecorded(run, noted).map(|()| Some(run));
                }
                Err(error) if error.kind() == ErrorKind::NoSpace && want > EXTENSION_LEAST => {
                    want = (want / 2).max(EXTENSION_LEAST);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Allocates up to `want` free blocks, and reserves more in the file system if none are free.
    pub(in crate::engine) fn allocate(&self, meta: &mut Meta, want: u64) -> Result<Run> {
        for attempt in 0..3 {
            if let Some(run) = meta.data.allocate(&mut meta.pages, want)? {
                return Ok(run);
            }
            if attempt == 0 && meta.release_freed() {
                continue;
            }
            self.extend_locked(meta, want)?;
        }
        Err(Error::new(ErrorKind::NoSpace, "no free blocks although space was reserved for some; run 'lamina check'"))
    }

    /// Allocates one run of `blocks` free blocks, and reserves more in the file system if the search finds none. `None`
    /// if the file system is full.
    pub(in crate::engine) fn allocate_whole(&self, meta: &mut Meta, blocks: u64) -> Result<Option<Run>> {
        let found = self.allocate_adjacent(meta, blocks)?;
        if found.is_some() {
            return Ok(found);
        }
        match self.extend_locked(meta, blocks) {
            Ok(Some(new)) => meta.data.search_from(new.start),
            Ok(None) => return Ok(None),
            Err(error) if is_full(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        meta.data.allocate_whole(&mut meta.pages, blocks)
    }

    /// Allocates one run of `blocks` blocks that are free now. `None` if a short search finds none.
    pub(in crate::engine) fn allocate_adjacent(&self, meta: &mut Meta, blocks: u64) -> Result<Option<Run>> {
        let mut found = meta.data.allocate_whole(&mut meta.pages, blocks)?;
        if found.is_none() && meta.release_freed() {
            found = meta.data.allocate_whole(&mut meta.pages, blocks)?;
        }
        Ok(found)
    }

    fn reserve_run(&self, run: Run, needs: &Needs) -> Result<()> {
        self.files.ensure(run, &|error| self.stop(error))?;
        self.reserve_needs(needs)?;
        let (file, offset) = self.files.locate(run)?;
        let length = run.blocks * BLOCK_SIZE as u64;
        self.check_room(length, "data")?;
        if let Err(error) = file.reserve(offset, length) {
            // If the file system runs full during the reservation, the file keeps the blocks allocated so far, and no
            // record describes them.
            self.return_run(run)?;
            return Err(error).during(|| format!("reserving {length} bytes for data"));
        }
        self.files.touch(run);
        Ok(())
    }

    /// Returns the reserved space of a run to the file system. No record describes this space.
    fn return_run(&self, run: Run) -> Result<()> {
        let (file, offset) = self.files.locate(run)?;
        // On some file systems, punching a hole needs free space. If it fails, the run is noted for a later attempt.
        if file.punch(offset, run.blocks * BLOCK_SIZE as u64).is_err() {
            self.reserves.note_unreturned(run);
        }
        Ok(())
    }

    /// Fails if the file system has no room for this many bytes. Checked before a reservation, because a file system
    /// that runs full during one searches for a long time and keeps a part of the space.
    pub(super) fn check_room(&self, length: u64, what: &str) -> Result<()> {
        let room = self.directory.room().during(|| "querying the free space of the file system".into())?;
        if room.available >= length {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "the file system of the datastore is full: {length} bytes for {what} are needed, and {} are left",
                room.available
            ),
        ))
    }

    /// If the recording of a reservation failed, returns the space to the file system. `noted`, the result of the
    /// recording, is returned.
    fn return_unrecorded(&self, run: Run, noted: Result<()>) -> Result<()> {
        if noted.is_err() && !self.running.is_stopped() {
            self.return_run(run)?;
        }
        noted
    }

    /// Records a reservation. If that fails, the caller returns the space.
    fn note_backed(&self, meta: &mut Meta, run: Run) -> Result<()> {
        let Meta { data, pages, .. } = &mut *meta;
        // If an entry is lost, this excludes the region from further reservations.
        data.check_entries(pages, run)?;
        // The reservation must be durable before the journal describes it.
        let gate = self.log.clocks.wrote_home();
        let operation = Operation::Backed { run, backed: true };
        meta.enqueue(operation, gate).map_err(|error| self.stop(error))?;
        self.update_headroom(meta);
        self.count_changes(meta);
        Ok(())
    }

    /// Reserves data blocks and map nodes ahead of writes.
    pub(crate) fn extend_ahead(&self) -> Result<()> {
        let short = {
            let meta = self.meta.lock();
            let claims = self.reserves.claims();
            let ahead = claims + extension(&meta) / 2;
            (ahead > self.reserves.headroom()).then_some(ahead)
        };
        if let Some(claims) = short {
            // A full file system is no failure here: the write that needs more blocks reports it.
            unless_full(self.extend(claims))?;
        }
        self.extend_map_ahead()
    }

    /// Reserves space for the tables, the summaries, and the catalog with `records` new records, so that no checkpoint
    /// finds the file system full. Usually [`Engine::reserve_records_ahead`] has reserved it, so that the medium is not
    /// accessed under the metadata lock.
    pub(crate) fn reserve_metadata(&self, meta: &Meta, records: u64) -> Result<()> {
        self.reserve_needs(&needs_now(meta, records))
    }

    /// Reserves space for `records` new records and for further ones, if too little is reserved. If the file system is
    /// full, changes of the catalog use the space that was reserved before. Must be called without the metadata lock.
    pub(crate) fn reserve_records_ahead(&self, records: u64) -> Result<()> {
        let lacks = |needs: &Needs| -> u64 {
            needs.files.iter().map(|(file, bytes)| bytes.saturating_sub(self.reserves.metadata(*file))).sum()
        };
        let ahead = {
            let meta = self.meta.lock();
            let soon = needs_now(&meta, records + RECORDS_SOON);
            if soon.images <= self.log.admission.capacity() && lacks(&soon) == 0 {
                return Ok(());
            }
            needs(&meta, records + RECORDS_AHEAD, 0)
        };
        unless_full(self.check_room(lacks(&ahead), "metadata").and_then(|()| self.reserve_needs(&ahead)))
    }

    /// Reserves space for the tables at their present size, before any change is made. Must be called without locks.
    pub(crate) fn reserve_tables(&self) -> Result<()> {
        let needs = needs(&self.meta.lock(), 0, 0);
        self.reserve_needs(&needs)
    }

    /// Makes a reservation of metadata durable. Otherwise a power cut would undo the reservation, and another program
    /// might use the space before recovery needs it.
    pub(super) fn keep_reserved(&self, file: PageFile) -> Result<()> {
        let synced = self.meta.file(file).sync().during(|| format!("flushing {}", file.name()));
        // Pages written before may be lost with the failed flush, so the store stops.
        synced.map_err(|error| self.stop(error))
    }

    pub(super) fn reserve_needs(&self, needs: &Needs) -> Result<()> {
        self.reserve_images(needs.images)?;
        for (file, bytes) in needs.files {
            let from = self.reserves.metadata(file);
            if bytes > from {
                self.meta
                    .file(file)
                    .reserve(from, bytes - from)
                    .during(|| format!("reserving {bytes} bytes for {}", file.name()))?;
                self.keep_reserved(file)?;
                self.reserves.note_metadata(file, bytes);
            }
        }
        Ok(())
    }
}

fn extension(meta: &Meta) -> u64 {
    (meta.data.counts().used / EXTENSION_SHARE).clamp(EXTENSION_MIN, EXTENSION_MAX)
}

/// The lengths of the files that describe this many regions of map and data, and a catalog with this many slots and
/// `ahead` pages beyond those that they fill.
pub(crate) fn table_bytes(map_regions: u64, data_regions: u64, slots: u64, ahead: u64) -> [(PageFile, u64); 5] {
    let table = |regions: u64| regions * REGION_PAGES;
    let summary = |regions: u64| regions / SUMMARY_ENTRIES + 1;
    [
        (PageFile::MapTable, table(map_regions)),
        (PageFile::MapSummary, summary(map_regions)),
        (PageFile::DataTable, table(data_regions)),
        (PageFile::DataSummary, summary(data_regions)),
        (PageFile::Catalog, slots / SLOTS_PER_PAGE as u64 + ahead),
    ]
    .map(|(file, pages)| (file, pages * BLOCK_SIZE as u64))
}

/// The space for metadata with this many new records and a map of at least `nodes` nodes.
pub(super) fn needs(meta: &Meta, records: u64, nodes: u64) -> Needs {
    needs_with(meta, records, nodes, CATALOG_AHEAD)
}

/// As [`needs`], without space for later records.
fn needs_now(meta: &Meta, records: u64) -> Needs {
    needs_with(meta, records, 0, CATALOG_NEXT)
}

fn needs_with(meta: &Meta, records: u64, nodes: u64, ahead: u64) -> Needs {
    let map_regions = meta.map.regions().max(nodes.div_ceil(REGION_BLOCKS));
    let files = table_bytes(map_regions, meta.data.regions(), meta.catalog.slots() + records, ahead);
    Needs { files, images: meta.images_needed(records, map_regions) }
}
