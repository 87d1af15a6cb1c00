//! Taking space from the file system: data blocks ahead of the writes that need them, room for metadata ahead of both.
//!
//! A reservation can wait for the file system's own journal for a long time, so it is made without the metadata lock:
//! by maintenance ahead of need, else by the writer that finds nothing left. Only where neither came in time does it
//! happen under the lock.

use crate::catalog::SLOTS_PER_PAGE;
use crate::engine::log::Cost;
use crate::engine::{Engine, Meta};
use crate::journal::Operation;
use crate::pages::PageFile;
use crate::space::{REGION_PAGES, Run, SUMMARY_ENTRIES};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::BLOCK_SIZE;

/// Reservations of data are made in pieces of at least this many blocks (1 MiB) ...
const EXTENSION_MIN: u64 = 256;
/// ... and at most this many (4 MiB).
const EXTENSION_MAX: u64 = 1024;
/// One part in so many of what is used is reserved ahead.
const EXTENSION_SHARE: u64 = 128;
/// The smallest reservation tried when the file system is nearly full, in blocks.
const EXTENSION_LEAST: u64 = 16;
/// Map nodes reserved at a time: one part in 16 of what is used, within these bounds.
const NODES: std::ops::RangeInclusive<u64> = 256..=4096;
/// Free map nodes that maintenance keeps while writes come in.
const NODES_AHEAD: u64 = 1024;

/// What describing one more piece of reserved space costs at most.
const EXTENSION_COST: Cost = Cost { bytes: 32, pages: 8 };

/// What metadata has to have room for in the file system.
pub(crate) struct Needs {
    /// Bytes that each file has to grow to.
    files: [(PageFile, u64); 5],
    /// Images of a checkpoint.
    images: u64,
}

impl Engine {
    /// Reserves more space until `claims` blocks fit into what is free. Under no lock that a checkpoint takes.
    pub(crate) fn extend(&self, claims: u64) -> Result<()> {
        let mut largest = EXTENSION_MAX;
        while self.headroom_now() < claims {
            // Each piece on its own: a thick disk takes any number of them.
            let _grant = self.admit(EXTENSION_COST)?;
            self.extend_once(claims, &mut largest)?;
        }
        Ok(())
    }

    /// Free blocks that writes may count on, what no read names any more among them.
    fn headroom_now(&self) -> u64 {
        let mut meta = self.meta.lock();
        meta.release_freed();
        self.update_headroom(&meta);
        self.reserves.headroom()
    }

    /// Reserves one piece, of at most `largest` blocks, if `claims` blocks do not fit yet.
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
            Ok(Some((run, needs(meta, 0))))
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

    /// The same as [`Engine::extend`] under the metadata lock, for `want` blocks: when a write has to go home and
    /// finds less than it set aside.
    pub(crate) fn extend_locked(&self, meta: &mut Meta, want: u64) -> Result<()> {
        let Some(_extending) = self.reserves.try_extending() else { return Ok(()) };
        let mut want = extension(meta).max(want.min(EXTENSION_MAX));
        loop {
            let run = meta.data.plan_extension(&mut meta.pages, want)?;
            match self.reserve_run(run, &needs(meta, 0)) {
                Ok(()) => return self.note_backed(meta, run),
                Err(error) if error.kind() == ErrorKind::NoSpace && want > EXTENSION_LEAST => {
                    want = (want / 2).max(EXTENSION_LEAST);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes up to `want` free blocks, reserving more from the file system if need be.
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
        self.files.ensure(run)?;
        self.reserve_needs(needs)?;
        let (file, offset) = self.files.locate(run)?;
        let length = run.blocks * BLOCK_SIZE as u64;
        // Asked first: a file system that runs full on the way searches long, and takes what it found in part.
        let room = self.directory.room().during(|| "asking for the room of the file system".into())?;
        if room.available < length {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("the file system of the datastore is full: {length} bytes for data cannot be reserved"),
            ));
        }
        if let Err(error) = file.reserve(offset, length) {
            // A file system that runs full on the way keeps what it had found, without a record of it.
            let _ = file.punch(offset, length);
            return Err(error).during(|| format!("reserving {length} bytes for data"));
        }
        self.files.touch(run);
        Ok(())
    }

    fn note_backed(&self, meta: &mut Meta, run: Run) -> Result<()> {
        // The reservation itself must be durable before the journal says so.
        let gate = self.log.clocks.wrote_home();
        let operation = Operation::Backed { run, backed: true };
        meta.enqueue(operation, gate)?;
        self.update_headroom(meta);
        self.count_changes(meta);
        Ok(())
    }

    /// Keeps some space ahead of writes that come in.
    pub(crate) fn extend_ahead(&self) -> Result<()> {
        let (short, length) = {
            let meta = self.meta.lock();
            let claims = self.reserves.claims();
            let ahead = claims + extension(&meta) / 2;
            let short = (ahead > self.reserves.headroom()).then_some(ahead);
            let counts = meta.map.counts();
            let length = (counts.free < NODES_AHEAD && counts.used > NODES_AHEAD / 2)
                .then(|| (counts.backed, counts.backed + nodes_more(counts.used)));
            (short, length)
        };
        let full = |error: &crate::Error| error.kind() == ErrorKind::NoSpace;
        if let Some(claims) = short {
            // Nobody asked yet: a full file system is told to who does.
            self.extend(claims).or_else(|error| if full(&error) { Ok(()) } else { Err(error) })?;
        }
        if let Some((from, to)) = length {
            let size = BLOCK_SIZE as u64;
            if self.meta.file(PageFile::Map).reserve(from * size, (to - from) * size).is_ok() {
                let needs = {
                    let mut meta = self.meta.lock();
                    meta.map.set_backed_length(to);
                    needs(&meta, 0)
                };
                self.reserve_needs(&needs).or_else(|error| if full(&error) { Ok(()) } else { Err(error) })?;
            }
        }
        Ok(())
    }

    /// Makes sure that the next operation finds enough nodes.
    pub(crate) fn ensure_nodes(&self, meta: &mut Meta, nodes: u64) -> Result<()> {
        while meta.map.counts().free < nodes {
            let counts = meta.map.counts();
            let more = nodes_more(counts.used).max(nodes - counts.free);
            let length = counts.backed + more;
            let bytes = length * BLOCK_SIZE as u64;
            self.meta
                .file(PageFile::Map)
                .reserve(counts.backed * BLOCK_SIZE as u64, more * BLOCK_SIZE as u64)
                .during(|| format!("reserving {bytes} bytes for metadata"))?;
            meta.map.set_backed_length(length);
            self.reserve_metadata(meta, 0)?;
        }
        Ok(())
    }

    /// Takes the room that the tables, summaries and the catalog with `records` new records will need from the file
    /// system: a checkpoint must not find it full.
    pub(crate) fn reserve_metadata(&self, meta: &Meta, records: u64) -> Result<()> {
        self.reserve_needs(&needs(meta, records))
    }

    fn reserve_needs(&self, needs: &Needs) -> Result<()> {
        self.reserve_images(needs.images)?;
        for (file, bytes) in needs.files {
            let from = self.reserves.metadata(file);
            if bytes > from {
                self.meta
                    .file(file)
                    .reserve(from, bytes - from)
                    .during(|| format!("reserving {bytes} bytes for {}", file.name()))?;
                self.reserves.note_metadata(file, bytes);
            }
        }
        Ok(())
    }
}

fn extension(meta: &Meta) -> u64 {
    (meta.data.counts().used / EXTENSION_SHARE).clamp(EXTENSION_MIN, EXTENSION_MAX)
}

fn nodes_more(used: u64) -> u64 {
    (used / 16).clamp(*NODES.start(), *NODES.end())
}

fn needs(meta: &Meta, records: u64) -> Needs {
    let table = |regions: u64| regions * REGION_PAGES;
    let summary = |regions: u64| regions / SUMMARY_ENTRIES + 1;
    let files = [
        (PageFile::MapTable, table(meta.map.regions())),
        (PageFile::MapSummary, summary(meta.map.regions())),
        (PageFile::DataTable, table(meta.data.regions())),
        (PageFile::DataSummary, summary(meta.data.regions())),
        (PageFile::Catalog, (meta.catalog.slots() + records) / SLOTS_PER_PAGE as u64 + 64),
    ]
    .map(|(file, pages)| (file, pages * BLOCK_SIZE as u64));
    Needs { files, images: meta.images_needed(records) }
}
