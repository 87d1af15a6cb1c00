//! Reserves space in the file system: data blocks ahead of the writes that need them, and room for metadata ahead of
//! both.
//!
//! A reservation can wait for the file system's own journal for a long time, so it is made without the metadata lock:
//! by maintenance ahead of need, otherwise by the writer that finds no free blocks. Only if neither came in time is it
//! made under the lock.

use super::unless_full;
use crate::catalog::SLOTS_PER_PAGE;
use crate::engine::log::Cost;
use crate::engine::{Engine, Meta};
use crate::journal::Operation;
use crate::pages::PageFile;
use crate::space::{REGION_BLOCKS, REGION_PAGES, Run, SUMMARY_ENTRIES};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::BLOCK_SIZE;

/// Reservations of data are made in pieces of at least this many blocks (1 MiB) ...
const EXTENSION_MIN: u64 = 256;
/// ... and at most this many (4 MiB).
pub(super) const EXTENSION_MAX: u64 = 1024;
/// One part in this many of the used blocks is reserved ahead.
const EXTENSION_SHARE: u64 = 128;
/// The smallest reservation tried when the file system is nearly full, in blocks.
const EXTENSION_LEAST: u64 = 16;

/// Pages of the catalog for which room is kept beyond those in use.
const CATALOG_AHEAD: u64 = 64;

/// The highest cost of describing one more part of reserved space.
const EXTENSION_COST: Cost = Cost { bytes: 32, pages: 8 };

/// The room that metadata needs in the file system.
pub(crate) struct Needs {
    /// Lengths to which the files have to grow, in bytes.
    files: [(PageFile, u64); 5],
    /// Images of a checkpoint.
    images: u64,
}

impl Engine {
    /// Reserves more space until `claims` blocks fit into the free ones. Not to be called under a lock that a
    /// checkpoint takes.
    pub(crate) fn extend(&self, claims: u64) -> Result<()> {
        let mut largest = EXTENSION_MAX;
        while self.headroom_now() < claims {
            // Each part by itself, because a thick disk may need any number of them.
            let _grant = self.admit(EXTENSION_COST)?;
            self.extend_once(claims, &mut largest)?;
        }
        Ok(())
    }

    /// Free blocks on which writes may rely, including freed ones that no read names any more.
    pub(super) fn headroom_now(&self) -> u64 {
        let mut meta = self.meta.lock();
        meta.release_freed();
        self.update_headroom(&meta);
        self.reserves.headroom()
    }

    /// Reserves one part, of at most `largest` blocks, if `claims` blocks do not fit yet.
    fn extend_once(&self, claims: u64, largest: &mut u64) -> Result<()> {
        let _extending = self.reserves.lock_extending();
        let planned = self.meta.look(|meta| {
            meta.release_freed();
            self.update_headroom(meta);
            let free = self.reserves.headroom();
            if claims <= free {
                return Ok(None);
            }
            let want = extension(meta).max((claims - free).min(EXTENSION_MAX)).min(*largest);
            let Meta { data, pages, .. } = &mut *meta;
            let run = data.plan_extension(pages, want)?;
            Ok(Some((run, needs(meta, 0, 0))))
        })?;
        let Some((run, needs)) = planned else { return Ok(()) };
        match self.reserve_run(run, &needs) {
            Ok(()) => {
                let _fetch = self.meta.bring_in(|meta| meta.survey_run(run));
                self.note_backed(&mut self.meta.lock(), run)
            }
            Err(error) if error.kind() == ErrorKind::NoSpace && *largest > EXTENSION_LEAST => {
                *largest = (run.blocks.min(*largest) / 2).max(EXTENSION_LEAST);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// The same as [`Engine::extend`] under the metadata lock, for `want` blocks: when a batch finds fewer free blocks
    /// than it set aside.
    pub(crate) fn extend_locked(&self, meta: &mut Meta, want: u64) -> Result<()> {
        let Some(_extending) = self.reserves.try_extending() else { return Ok(()) };
        let mut want = extension(meta).max(want.min(EXTENSION_MAX));
        loop {
            let run = meta.data.plan_extension(&mut meta.pages, want)?;
            match self.reserve_run(run, &needs(meta, 0, 0)) {
                Ok(()) => return self.note_backed(meta, run),
                Err(error) if error.kind() == ErrorKind::NoSpace && want > EXTENSION_LEAST => {
                    want = (want / 2).max(EXTENSION_LEAST);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes up to `want` free blocks, reserving more in the file system if necessary.
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
        Err(Error::new(ErrorKind::NoSpace, "no free blocks although the file system gave some; run 'lamina check'"))
    }

    fn reserve_run(&self, run: Run, needs: &Needs) -> Result<()> {
        self.files.ensure(run, &|error| self.stop(error))?;
        self.reserve_needs(needs)?;
        let (file, offset) = self.files.locate(run)?;
        let length = run.blocks * BLOCK_SIZE as u64;
        self.check_room(length, "data")?;
        if let Err(error) = file.reserve(offset, length) {
            // A file system that runs full meanwhile keeps the blocks that it had found, and no record describes them.
            // On some file systems punching a hole needs room too.
            if file.punch(offset, length).is_err() {
                self.reserves.note_unreturned(run);
            }
            return Err(error).during(|| format!("reserving {length} bytes for data"));
        }
        self.files.touch(run);
        Ok(())
    }

    /// Fails if the file system has no room for this many bytes. Asked first, because a file system that runs full
    /// during a reservation searches for a long time, and keeps a part of what it found.
    pub(super) fn check_room(&self, length: u64, what: &str) -> Result<()> {
        let room = self.directory.room().during(|| "asking for the room of the file system".into())?;
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

    fn note_backed(&self, meta: &mut Meta, run: Run) -> Result<()> {
        // The reservation itself must be durable before the journal describes it.
        let gate = self.log.clocks.wrote_home();
        let operation = Operation::Backed { run, backed: true };
        meta.enqueue(operation, gate).map_err(|error| self.stop(error))?;
        self.update_headroom(meta);
        self.count_changes(meta);
        Ok(())
    }

    /// Keeps some space reserved ahead of writes.
    pub(crate) fn extend_ahead(&self) -> Result<()> {
        let short = {
            let meta = self.meta.lock();
            let claims = self.reserves.claims();
            let ahead = claims + extension(&meta) / 2;
            (ahead > self.reserves.headroom()).then_some(ahead)
        };
        if let Some(claims) = short {
            // A full file system is reported by the write that needs more.
            unless_full(self.extend(claims))?;
        }
        self.extend_map_ahead()
    }

    /// Reserves the room that the tables, the summaries and the catalog with `records` new records will need, so that
    /// no checkpoint finds the file system full.
    pub(crate) fn reserve_metadata(&self, meta: &Meta, records: u64) -> Result<()> {
        self.reserve_needs(&needs(meta, records, 0))
    }

    /// Reserves what the tables of the present size need before any change is made. Under no lock.
    pub(crate) fn reserve_tables(&self) -> Result<()> {
        let needs = needs(&self.meta.lock(), 0, 0);
        self.reserve_needs(&needs)
    }

    /// Makes a reservation of metadata durable. A power cut would undo it, and recovery would find that another program
    /// has taken the room.
    pub(super) fn keep_reserved(&self, file: PageFile) -> Result<()> {
        let synced = self.meta.file(file).sync().during(|| format!("flushing {}", file.name()));
        // Pages written before may be lost with the failed flush.
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

/// Lengths of the files that describe this many regions of map and data, and hold a catalog with this many slots.
pub(crate) fn table_bytes(map_regions: u64, data_regions: u64, slots: u64) -> [(PageFile, u64); 5] {
    let table = |regions: u64| regions * REGION_PAGES;
    let summary = |regions: u64| regions / SUMMARY_ENTRIES + 1;
    [
        (PageFile::MapTable, table(map_regions)),
        (PageFile::MapSummary, summary(map_regions)),
        (PageFile::DataTable, table(data_regions)),
        (PageFile::DataSummary, summary(data_regions)),
        (PageFile::Catalog, slots / SLOTS_PER_PAGE as u64 + CATALOG_AHEAD),
    ]
    .map(|(file, pages)| (file, pages * BLOCK_SIZE as u64))
}

/// The room for metadata with this many new records, and with a map of at least `nodes`.
pub(super) fn needs(meta: &Meta, records: u64, nodes: u64) -> Needs {
    let map_regions = meta.map.regions().max(nodes.div_ceil(REGION_BLOCKS));
    let files = table_bytes(map_regions, meta.data.regions(), meta.catalog.slots() + records);
    Needs { files, images: meta.images_needed(records, map_regions) }
}
