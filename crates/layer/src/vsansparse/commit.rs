//! Commits and checkpoints: the order in which things become durable.
//!
//! ```text
//! begin       the header: open, of the next incarnation; what was replayed is checkpointed
//! commit      payload is in the file already                                       flush
//!             the changes of the map, into the log                                 durable write
//! checkpoint  a commit of everything that the captured pages hold
//!             pages over their older copies                                        flush
//!             root blocks over theirs, if any changed                              flush
//!             the header: the log is needed from here on                           durable write
//! end         a checkpoint; the header, both copies: closed                        durable writes
//! ```
//!
//! What a commit logs and what a checkpoint writes is taken in one moment, with `order` held alone: no change is in
//! the one and not in the other. The log goes on while a checkpoint writes.
//!
//! Whatever a commit takes fits into the log: commits that need no checkpoint leave [`LOG_KEPT`] blocks of it, and no
//! more changes than these hold ever wait, since each change reserves its room first ([`VsanSparse::reserve_room`]).

use super::VsanSparse;
use super::header::Header;
use super::layout::{BLOCK, LOG_BLOCKS, UNIT_BLOCKS};
use super::log::{Log, Pending, Record, blocks_of};
use super::map::CapturedRoot;
use super::page::{self, Kind};
use crate::aligned::AlignedFile;
use crate::backing::Backing;
use crate::group_commit::{GroupCommit, Turn};
use crate::runs::cache::Captured;
use crate::{IoContext, Result};
use parking_lot::{Mutex, MutexGuard, RwLock};

/// Changes that may wait to be logged; beyond it a write commits.
const PENDING_MAX: usize = 4096;

/// Changes that wait to be logged at the most, those included that have only reserved room.
pub(super) const PENDING_LIMIT: usize = 15_000;

/// Map pages that may wait for a checkpoint: 4 MiB to be written, and what recovery has to read.
const CHANGED_PAGES_MAX: usize = 1024;

/// Blocks of the log from which on a checkpoint is due.
const LOG_DUE: u64 = LOG_BLOCKS / 2;

/// Blocks of the log that commits leave to the checkpoint that makes room.
const LOG_KEPT: u64 = LOG_BLOCKS / 4;

const _: () = assert!(blocks_of(PENDING_LIMIT) <= LOG_KEPT);

/// What an object has when it is open for writing.
pub(super) struct Writer {
    /// True while it is open.
    pub(super) gate: RwLock<bool>,
    checkpoint: Mutex<Checkpoint>,
    /// Changes go to the log under its turn. What comes behind that, a checkpoint, needs `checkpoint` alone.
    pub(super) commits: GroupCommit<Log>,
    pub(super) order: RwLock<()>,
    pub(super) pending: Mutex<Pending>,
    pub(super) space: Mutex<Space>,
    /// Log, root and pages that have their space.
    pub(super) backing: Backing,
    pub(super) parent: bool,
}

/// Room for changes among those that wait to be logged. Dropped when they are there.
pub(super) struct LogRoom<'a> {
    pending: &'a Mutex<Pending>,
    changes: usize,
}

impl Drop for LogRoom<'_> {
    fn drop(&mut self) {
        self.pending.lock().reserved -= self.changes;
    }
}

/// The header as it was written last, and how many checkpoints this incarnation made.
struct Checkpoint {
    header: Header,
    count: u64,
}

/// What a checkpoint writes.
struct Job<'a> {
    checkpoint: MutexGuard<'a, Checkpoint>,
    pages: Vec<Captured>,
    root: Vec<CapturedRoot>,
    next: u64,
}

/// Where new grains go: one behind the other, in units that are taken from the file system when they are begun.
pub(super) struct Space {
    /// First block that was not handed out.
    next: u64,
    /// First block of the next unit.
    reserved: u64,
}

impl Space {
    /// Takes units so that `blocks` more blocks have room.
    pub(super) fn prepare(&mut self, file: &AlignedFile, blocks: u64) -> Result<()> {
        let end = self.next + blocks;
        if end > self.reserved {
            let end = end.next_multiple_of(UNIT_BLOCKS);
            let reserved = file.file().reserve(self.reserved * BLOCK, (end - self.reserved) * BLOCK);
            reserved.during(|| "cannot take a unit of 4 MiB".to_owned())?;
            self.reserved = end;
        }
        Ok(())
    }

    /// Hands out blocks that follow each other.
    pub(super) fn take(&mut self, blocks: u64) -> u64 {
        self.next += blocks;
        self.next - blocks
    }

    /// First block that was not handed out.
    pub(super) fn next(&self) -> u64 {
        self.next
    }
}

impl VsanSparse {
    pub(super) fn begin_writing(&mut self, mut log: Log, parent: bool) -> Result<()> {
        let mut header = self.header.clone();
        header.incarnation += 1;
        header.clean = false;
        log.incarnation = header.incarnation;
        // Both copies: either of them may be the one that is left.
        for _ in 0..2 {
            header.write(&self.file).map_err(|error| error.context(&self.image))?;
        }
        let next = header.next;
        // Units begin on multiples of their size; the last one may have been begun.
        let reserved = next.next_multiple_of(UNIT_BLOCKS).min(self.map.limit()).max(next);
        let changed = self.map.pages.changed() > 0 || log.used() > 0;
        self.writer = Some(Writer {
            gate: RwLock::new(true),
            checkpoint: Mutex::new(Checkpoint { header, count: 0 }),
            commits: GroupCommit::new(log),
            order: RwLock::new(()),
            pending: Mutex::new(Pending::default()),
            space: Mutex::new(Space { next, reserved }),
            backing: Backing::default(),
            parent,
        });
        match (&self.writer, changed) {
            (Some(writer), true) => self.commit(writer, true),
            _ => Ok(()),
        }
    }

    pub(super) fn check_open(&self, writer: &Writer, open: bool) -> Result<()> {
        writer.commits.check_changeable(&self.image, open)
    }

    pub(super) fn flush_writes(&self, writer: &Writer) -> Result<()> {
        let _gate = writer.gate.read();
        self.commit(writer, false)
    }

    /// Writes changed pages back, so that the next flush and recovery are quick. Called while the disk is idle.
    pub fn checkpoint(&self) -> Result<()> {
        match &self.writer {
            Some(writer) => {
                let _gate = writer.gate.read();
                self.commit(writer, true)
            }
            None => Ok(()),
        }
    }

    /// Commits when much waits for it; the caller holds the gate.
    pub(super) fn commit_if_many(&self, writer: &Writer) -> Result<()> {
        let pending = writer.pending.lock().len();
        let changed = self.map.pages.changed();
        match pending > PENDING_MAX || changed > CHANGED_PAGES_MAX {
            // Twice as much means that write-back does not keep up.
            true => self.commit(writer, changed > 2 * CHANGED_PAGES_MAX),
            false => Ok(()),
        }
    }

    /// Waits until so many changes have room among those that wait to be logged; the caller holds the gate and nothing
    /// else.
    pub(super) fn reserve_room<'a>(&self, writer: &'a Writer, changes: usize) -> Result<LogRoom<'a>> {
        loop {
            {
                let mut pending = writer.pending.lock();
                if pending.len() + pending.reserved + changes <= PENDING_LIMIT {
                    pending.reserved += changes;
                    return Ok(LogRoom { pending: &writer.pending, changes });
                }
            }
            self.commit(writer, false)?;
            // Other writers have reserved the rest and are about to use it.
            std::thread::yield_now();
        }
    }

    /// Makes everything written before durable; the caller holds the gate. With `full`, the log is emptied as well.
    pub(super) fn commit(&self, writer: &Writer, mut full: bool) -> Result<()> {
        let call = writer.commits.call();
        loop {
            let held = full.then(|| writer.checkpoint.lock());
            let turn = match full {
                true => Some(writer.commits.turn()),
                false => writer.commits.turn_for(call),
            };
            self.check_open(writer, true)?;
            let Some(mut turn) = turn else { return Ok(()) };
            // From here on no thread changes the map: what is counted now is what is taken.
            let order = writer.order.write();
            let needed = blocks_of(writer.pending.lock().len());
            if !full && turn.used() + needed > LOG_BLOCKS - LOG_KEPT {
                full = true;
                continue;
            }
            let is_due = turn.used() + needed > LOG_DUE || self.map.pages.changed() > CHANGED_PAGES_MAX;
            let held = match held {
                None if is_due => writer.checkpoint.try_lock(),
                held => held,
            };
            turn.begin();
            let records = writer.pending.lock().take();
            let job = held.map(|checkpoint| Job {
                checkpoint,
                pages: self.map.pages.capture(),
                root: self.map.capture_root(),
                next: writer.space.lock().next(),
            });
            drop(order);
            let done = self.commit_captured(writer, turn, &records, job);
            return done.inspect_err(|_| writer.commits.stop());
        }
    }

    fn commit_captured(
        &self,
        writer: &Writer,
        mut turn: Turn<'_, Log>,
        records: &[Record],
        job: Option<Job<'_>>,
    ) -> Result<()> {
        self.sync()?;
        turn.append(&self.file, records).map_err(|error| error.context(&self.image))?;
        turn.complete();
        let end = *turn;
        drop(turn);
        match job {
            Some(job) => self.write_checkpoint(writer, job, end),
            None => Ok(()),
        }
    }

    fn sync(&self) -> Result<()> {
        self.file.file().sync().during(|| format!("{}: cannot flush", self.image))
    }

    /// Writes what was captured when the log ended at `end`.
    fn write_checkpoint(&self, writer: &Writer, mut job: Job<'_>, end: Log) -> Result<()> {
        job.checkpoint.count += 1;
        let sequence = job.checkpoint.header.incarnation << 32 | job.checkpoint.count;
        job.pages.sort_unstable_by_key(|page| page.index);
        let mut copies = Vec::with_capacity(job.pages.len());
        for captured in &job.pages {
            let identity = self.map.identity(Kind::Page, captured.index);
            let body = page::encode_entries(&captured.list);
            copies.push(self.map.write_copy(&self.file, identity, sequence, captured.list.note, &body)?);
        }
        if !job.pages.is_empty() {
            self.sync()?;
        }
        for (captured, copy) in job.pages.iter().zip(copies) {
            self.map.change(&self.file, captured.index, |list| (list.note = copy, 0))?;
        }
        for root in &job.root {
            self.map.write_root(&self.file, root, sequence)?;
        }
        if !job.root.is_empty() {
            self.sync()?;
        }
        let header = &mut job.checkpoint.header;
        header.tail = end.head;
        header.tail_number = end.number;
        header.next = job.next;
        header.write(&self.file).map_err(|error| error.context(&self.image))?;
        self.map.pages.release(&job.pages);
        writer.commits.turn().tail = end.head;
        Ok(())
    }

    pub(super) fn end_writing(&self, writer: &Writer) -> Result<()> {
        let mut open = writer.gate.write();
        if !*open {
            return Ok(());
        }
        *open = false;
        self.commit(writer, true)?;
        let mut checkpoint = writer.checkpoint.lock();
        checkpoint.header.clean = true;
        for _ in 0..2 {
            let written = checkpoint.header.write(&self.file);
            written.inspect_err(|_| writer.commits.stop())?;
        }
        Ok(())
    }
}
