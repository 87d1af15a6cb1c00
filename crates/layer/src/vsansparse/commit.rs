//! Commits and checkpoints: the order in which changes become durable.
//!
//! ```text
//! begin       the header is marked as open; replayed changes are checkpointed
//! commit      payload was written before                                           flush
//!             the changes of the map are appended to the log                       durable write
//! checkpoint  a commit of all changes that the captured pages contain
//!             the pages replace their older copies                                 flush
//!             the changed root blocks replace their older copies                   flush
//!             the header states the new beginning of the log                       durable write
//! end         a checkpoint; both copies of the header are marked as closed         durable writes
//! ```
//!
//! A checkpoint captures the map at the moment when its commit takes the changes for the log, with `order` held
//! exclusively: so a captured page contains only logged changes. Further commits can append to the log while the
//! checkpoint writes pages.
//!
//! A commit always fits into the log. Commits without a checkpoint leave [`LOG_KEPT`] blocks free, and the waiting
//! changes never need more blocks, because each change reserves its room first ([`VsanSparse::reserve_room`]).

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
use crate::{ErrorKind, IoContext, Result};
use parking_lot::{Mutex, MutexGuard, RwLock};

/// The number of waiting changes from which a commit is due.
const PENDING_DUE: usize = 4096;

/// The most changes that wait to be logged. Changes for which only room is reserved are included.
pub(super) const PENDING_LIMIT: usize = 15_000;

/// The most changed map pages before a checkpoint: a checkpoint then writes 4 MiB, and recovery has to read as much.
const CHANGED_PAGES_MAX: usize = 1024;

/// Used blocks of the log from which a checkpoint is due.
const LOG_DUE: u64 = LOG_BLOCKS / 2;

/// Blocks of the log that commits leave free for the changes until the next checkpoint.
const LOG_KEPT: u64 = LOG_BLOCKS / 4;

const _: () = assert!(blocks_of(PENDING_LIMIT) <= LOG_KEPT);

/// Additional state of an object open for writing.
pub(super) struct Writer {
    /// True while the object is open.
    pub(super) gate: RwLock<bool>,
    checkpoint: Mutex<Checkpoint>,
    /// Guards the log. Writing a checkpoint after its commit is guarded by `checkpoint` instead.
    pub(super) commits: GroupCommit<Log>,
    pub(super) order: RwLock<()>,
    pub(super) pending: Mutex<Pending>,
    pub(super) space: Mutex<Space>,
    /// The parts of log, root and map that have space in the file system.
    pub(super) backing: Backing,
    /// Held while the file is flushed or written durably.
    flushing: Mutex<()>,
    pub(super) parent: bool,
}

/// Reserves room for changes in the list of changes that wait to be logged, until the changes are added to it.
pub(super) struct LogRoom<'a> {
    pending: &'a Mutex<Pending>,
    changes: usize,
}

impl Drop for LogRoom<'_> {
    fn drop(&mut self) {
        self.pending.lock().reserved -= self.changes;
    }
}

/// The last written header, and the number of checkpoints of this incarnation.
struct Checkpoint {
    header: Header,
    count: u64,
}

/// The writes of a checkpoint.
struct Job<'a> {
    checkpoint: MutexGuard<'a, Checkpoint>,
    pages: Vec<Captured>,
    root: Vec<CapturedRoot>,
    next: u64,
}

/// Allocation of new grains: sequentially, in units. The space of a unit is allocated in the file system when its first
/// grain is.
pub(super) struct Space {
    /// The first block that was never allocated.
    next: u64,
    /// The first block of the next unit.
    reserved: u64,
}

impl Space {
    /// Allocates the space of units, so that `blocks` more blocks fit.
    pub(super) fn prepare(&mut self, file: &AlignedFile, blocks: u64) -> Result<()> {
        let end = self.next + blocks;
        if end > self.reserved {
            let end = end.next_multiple_of(UNIT_BLOCKS);
            let reserved = file.file().reserve(self.reserved * BLOCK, (end - self.reserved) * BLOCK);
            reserved.during(|| "cannot allocate a unit of 4 MiB".to_owned())?;
            self.reserved = end;
        }
        Ok(())
    }

    /// Allocates consecutive blocks.
    pub(super) fn take(&mut self, blocks: u64) -> u64 {
        self.next += blocks;
        self.next - blocks
    }

    /// The first block that was never allocated.
    pub(super) fn next(&self) -> u64 {
        self.next
    }
}

impl VsanSparse {
    pub(super) fn begin_writing(&mut self, mut log: Log, parent: bool) -> Result<()> {
        if self.map.limit() < self.header.next {
            self.refuse_truncated()?;
        }
        let mut header = self.header.clone();
        header.incarnation += 1;
        header.clean = false;
        log.incarnation = header.incarnation;
        // Both copies get the new incarnation, because a crash may damage either one.
        for _ in 0..2 {
            header.write(&self.file).map_err(|error| error.context(&self.image))?;
        }
        let next = header.next;
        // Units begin at multiples of their size; the last one may be partly used.
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
            flushing: Mutex::new(()),
            parent,
        });
        match (&self.writer, changed) {
            (Some(writer), true) => self.commit(writer, true),
            _ => Ok(()),
        }
    }

    /// Reads all pages of an object whose file ends before its allocated part, and refuses the object if an entry names
    /// a block after the end. Once the file has grown, lost grains would read as zeros. A power cut leaves no such
    /// entry: only blocks that were allocated and not written may lie after the end.
    fn refuse_truncated(&self) -> Result<()> {
        for index in 0..self.map.layout.pages {
            match self.map.survey(&self.file, index) {
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    let text = "its file was truncated; it can be read, and converted to a new image with \
                                --skip-damaged, which lists the lost parts";
                    return Err(error.context(format!("{}: {text}", self.image)));
                }
                page => page.map(drop)?,
            }
        }
        Ok(())
    }

    pub(super) fn check_open(&self, writer: &Writer, open: bool) -> Result<()> {
        writer.commits.check_changeable(&self.image, open)
    }

    pub(super) fn flush_writes(&self, writer: &Writer) -> Result<()> {
        let _gate = writer.gate.read();
        self.commit(writer, false)
    }

    /// Writes changed pages, so that the next flush and recovery are fast. Called while the disk is idle.
    pub fn checkpoint(&self) -> Result<()> {
        match &self.writer {
            Some(writer) => {
                let _gate = writer.gate.read();
                self.commit(writer, true)
            }
            None => Ok(()),
        }
    }

    /// Notes that a commit is due when many changes wait or many pages have changed; the caller holds the gate.
    pub(super) fn commit_if_many(&self, writer: &Writer) -> Result<()> {
        let changed = self.map.pages.changed();
        if changed > CHANGED_PAGES_MAX || writer.pending.lock().len() > PENDING_DUE {
            writer.commits.note_due();
        }
        // At twice the limit of changed pages, the checkpoint under way is too slow: this commit waits for it, and
        // includes the next one.
        if changed > 2 * CHANGED_PAGES_MAX { self.commit(writer, true) } else { Ok(()) }
    }

    /// Waits until `changes` more changes can be added to those that wait to be logged. The caller holds the gate and
    /// no other lock.
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
            // Nothing waits yet: other writers have reserved all room and are about to add their changes.
            std::thread::yield_now();
        }
    }

    /// Makes everything written before durable; the caller holds the gate. With `full`, a checkpoint follows, which
    /// empties the log.
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
            // While `order` is held no thread changes the map, so the changes counted here are the changes that are
            // taken below.
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
            return self.commit_captured(writer, turn, &records, job);
        }
    }

    fn commit_captured(
        &self,
        writer: &Writer,
        mut turn: Turn<'_, Log>,
        records: &[Record],
        job: Option<Job<'_>>,
    ) -> Result<()> {
        self.sync(writer)?;
        let append = || turn.append(&self.file, records).map_err(|error| error.context(&self.image));
        self.make_durable(writer, append)?;
        turn.complete();
        let end = *turn;
        drop(turn);
        match job {
            Some(job) => {
                let written = self.write_checkpoint(writer, job, end);
                written.map_err(|error| writer.commits.stop_after(error))
            }
            None => Ok(()),
        }
    }

    fn sync(&self, writer: &Writer) -> Result<()> {
        self.make_durable(writer, || self.file.file().sync().during(|| format!("{}: cannot flush", self.image)))
    }

    /// Does a flush or a durable write. A commit and a checkpoint may do so at the same time, and the file system
    /// reports a failed write-back once: so the one that gets the report stops the image before the other can succeed.
    fn make_durable(&self, writer: &Writer, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let _alone = writer.flushing.lock();
        self.check_open(writer, true)?;
        work().map_err(|error| writer.commits.stop_after(error))
    }

    /// Writes the captured pages and root blocks; the log ended at `end` when they were captured.
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
            self.sync(writer)?;
        }
        for (captured, copy) in job.pages.iter().zip(copies) {
            self.map.change(&self.file, captured.index, |list| (list.note = copy, 0))?;
        }
        for root in &job.root {
            self.map.write_root(&self.file, root, sequence)?;
        }
        if !job.root.is_empty() {
            self.sync(writer)?;
        }
        let header = &mut job.checkpoint.header;
        header.tail = end.head;
        header.tail_number = end.number;
        header.next = job.next;
        self.make_durable(writer, || header.write(&self.file).map_err(|error| error.context(&self.image)))?;
        self.map.pages.release(&job.pages);
        writer.commits.turn().tail = end.head;
        Ok(())
    }

    pub(super) fn end_writing(&self, writer: &Writer) -> Result<()> {
        let mut open = writer.gate.write();
        if !*open {
            return Ok(());
        }
        // After a lack of space the image stays open, so that it can be closed later.
        self.commit(writer, true)?;
        *open = false;
        let mut checkpoint = writer.checkpoint.lock();
        checkpoint.header.clean = true;
        for _ in 0..2 {
            let written = checkpoint.header.write(&self.file);
            written.inspect_err(|_| writer.commits.stop())?;
        }
        Ok(())
    }
}
