//! Simulated storage for tests: keeps what is flushed, and may lose, tear or reorder everything else.
//!
//! Faults that the simulation can cause:
//!
//! 1. **Power cut** ([`SimulatedDisk::crash`]). Each unflushed write is kept, lost, or torn at 512-byte sectors (any
//!    subset of them), independently of all others, so a later write may survive and an earlier one not. An unflushed
//!    length change, reservation, punch or zeroed range is kept or lost; a punch or zeroed range may also be half done.
//!    The growth of a file by a write may be lost although its bytes were written: then the bytes vanish. Names
//!    created, renamed or removed since the last [`Directory::sync`] may be lost, later ones before earlier ones.
//! 2. **Unrequested write-back.** When a file has more unflushed changes than a bound, its oldest changes become
//!    durable, although newer ones may still be lost.
//! 3. **Errors.** Any operation can be made to fail. A failed write leaves any subset of its sectors written. A failed
//!    flush loses some of the writes before it for good, though reads may still return them until a power cut. The next
//!    flush succeeds and does not write them, as on Linux.
//! 4. **Full.** Space is counted in units of 4 KiB: reservations and writes into holes allocate it; punching,
//!    truncating and removing free it. An operation without enough space is refused before anything is written: with
//!    ENOSPC, or, if the seed is odd, with EDQUOT, as at a quota.
//! 5. **Bit rot and unreadable sectors**, where a test requests them.
//! 6. **Delay.** A medium can be made slow: every request then waits before it takes effect.
//! 7. **Order.** Operations in a queue are performed in any order, at any time until they complete, and complete in any
//!    order. The page cache may evict clean pages at any time.
//!
//! Assumptions about a real disk and file system:
//!
//! 1. A sector is written whole or not at all, and a sector changes only by a write to it.
//! 2. Data that a successful flush or durable write made durable stays durable, and no older write overwrites it later.
//! 3. Changes of names become durable in the order in which they were made, each completely (any journalling file
//!    system).
//! 4. A file's contents do not depend on its name being durable, nor on other files.
//!
//! The seed and the sequence of calls determine every result. Contents are kept in pages of 4 KiB, shared between the
//! live and the durable state.

mod content;
mod file;
mod queue;
mod unflushed;
mod world;

use crate::directory::renamed;
use crate::{Directory, File, IoMode, Lock, Queue, QueueKind, Room};
use file::SimulatedFile;
use parking_lot::Mutex;
use queue::SimulatedQueue;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use world::{FileId, World};

/// How a simulated disk is made.
#[derive(Clone, Debug)]
pub struct SimulatedOptions {
    /// Size of the file system in bytes.
    pub capacity: u64,
    /// Whether queues perform and complete operations in random order; otherwise at once, in the order of pushing.
    pub reorder: bool,
    /// Unflushed changes per file beyond which the oldest are written back.
    pub unflushed_max: usize,
}

impl Default for SimulatedOptions {
    fn default() -> Self {
        Self { capacity: 1 << 40, reorder: true, unflushed_max: 4096 }
    }
}

/// The kinds of requests that a slow medium delays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A read that the page cache does not answer.
    Read,
    /// A write.
    Write,
    /// A flush of a file or of the folder.
    Sync,
    /// A reservation, a punch, a zeroed range, a change of a length.
    Space,
}

/// The kinds of requests that can be made to fail, each separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes of files and of the folder.
    Sync,
    /// Reservations.
    Reserve,
    /// Punches and zeroed ranges.
    Punch,
}

/// The number of kinds of [`Fault`].
const FAULTS: usize = 5;

impl Fault {
    /// All kinds of faults.
    pub const ALL: [Self; FAULTS] = [Self::Read, Self::Write, Self::Sync, Self::Reserve, Self::Punch];
}

/// A function that waits for the duration of a request, on the thread that makes it.
pub type Pace = Arc<dyn Fn(Request) + Send + Sync>;

/// Waits as a slow medium does, before a request takes effect.
fn take_time(world: &Mutex<World>, request: Request) {
    let pace = world.lock().pace.clone();
    if let Some(pace) = pace {
        pace(request);
    }
}

/// A simulated disk with one folder. Clones are handles of the same disk.
#[derive(Clone)]
pub struct SimulatedDisk {
    world: Arc<Mutex<World>>,
}

impl SimulatedDisk {
    /// An empty disk. `seed` determines all random decisions.
    pub fn new(seed: u64, options: SimulatedOptions) -> Self {
        Self { world: Arc::new(Mutex::new(World::new(seed, options))) }
    }

    /// The folder of the disk.
    pub fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(SimulatedDirectory { world: Arc::clone(&self.world) })
    }

    /// Cuts the power and returns the disk as it is afterwards. All handles of the old disk fail from then on; another
    /// call returns another possible outcome of the same cut. The new disk has the same capacity and no requested
    /// faults.
    pub fn crash(&self) -> SimulatedDisk {
        SimulatedDisk { world: Arc::new(Mutex::new(self.world.lock().crash())) }
    }

    /// Kills the process that uses this disk, and returns the disk for the next one. Requests that wait in a queue are
    /// never carried out.
    pub fn kill(&self) -> SimulatedDisk {
        SimulatedDisk { world: Arc::new(Mutex::new(self.world.lock().kill())) }
    }

    /// A disk with the durable contents of this one, and its own seed and options. Everything on this disk must be
    /// durable, so that the new disk depends neither on the history of this disk nor on earlier calls.
    pub fn copy_of_durable(&self, seed: u64, options: SimulatedOptions) -> SimulatedDisk {
        SimulatedDisk { world: Arc::new(Mutex::new(self.world.lock().crash().reseeded(seed, options))) }
    }

    /// The number of operations so far that change something or make it durable. The number of an operation is this
    /// count before the operation.
    pub fn operations(&self) -> u64 {
        self.world.lock().operations
    }

    /// Lets `count` operations (as [`SimulatedDisk::operations`] counts) succeed, and cuts the power during the next
    /// one. That operation fails, with the effect of an unflushed operation. Every later operation fails, reads
    /// included, until [`SimulatedDisk::crash`].
    pub fn cut_after(&self, count: u64) {
        self.world.lock().cut_after = Some(count);
    }

    /// As [`SimulatedDisk::cut_after`], but operations that change nothing still succeed: threads that only read, and
    /// retry when that fails, do not end before a change reports the cut.
    pub fn cut_changes_after(&self, count: u64) {
        let mut world = self.world.lock();
        (world.cut_after, world.readable) = (Some(count), true);
    }

    /// Whether the cut requested by [`SimulatedDisk::cut_after`] has happened, or the disk has crashed.
    pub fn is_off(&self) -> bool {
        self.world.lock().off
    }

    /// Makes operation `number` fail with EIO.
    pub fn fail_operation(&self, number: u64) {
        self.world.lock().failing.insert(number);
    }

    /// Makes the next `count` flushes, of files or of the folder, fail with EIO.
    pub fn fail_syncs(&self, count: u32) {
        self.fail_syncs_with(count, Errno::IO);
    }

    /// Makes the next `count` flushes, of files or of the folder, fail with ENOSPC.
    pub fn fail_syncs_for_room(&self, count: u32) {
        self.fail_syncs_with(count, Errno::NOSPC);
    }

    fn fail_syncs_with(&self, count: u32, error: Errno) {
        let mut world = self.world.lock();
        (world.failing_syncs, world.sync_error) = (count, error);
    }

    /// Reads that touch the range of file `name` fail with EIO until the range is written again.
    pub fn fail_reads(&self, name: &str, range: Range<u64>) -> io::Result<()> {
        let mut world = self.world.lock();
        world.named(name)?.unreadable.insert(range);
        Ok(())
    }

    /// Makes `times` reads fail with EIO: those after `count` others that succeed.
    pub fn fail_reads_after(&self, count: u64, times: u64) {
        self.fail_requests(Fault::Read, count, times);
    }

    /// Makes `times` requests of one kind fail with EIO: those after `count` others that succeed.
    pub fn fail_requests(&self, fault: Fault, count: u64, times: u64) {
        self.world.lock().failing_requests[fault as usize] = count..count.saturating_add(times);
    }

    /// Loses the unflushed changes of a file, which no flush writes from now on. Reads return them nevertheless until a
    /// power cut, because another process has the file mapped, and the kernel keeps mapped pages.
    pub fn lose_writes(&self, name: &str) -> io::Result<()> {
        self.world.lock().lose_writes(name)
    }

    /// Ends all requested failures, except unreadable sectors.
    pub fn mend(&self) {
        let mut world = self.world.lock();
        world.failing.clear();
        (world.failing_syncs, world.failing_requests) = (0, Default::default());
    }

    /// How many of the failures requested by [`SimulatedDisk::fail_reads_after`] have not occurred yet.
    pub fn reads_to_fail(&self) -> u64 {
        let failing = &self.world.lock().failing_requests[Fault::Read as usize];
        failing.end - failing.start
    }

    /// Inverts bit `bit` (0 to 7) of the byte at `offset` of file `name`, in every version of that byte.
    pub fn flip_bit(&self, name: &str, offset: u64, bit: u8) -> io::Result<()> {
        let mut world = self.world.lock();
        world.named(name)?.flip_bit(offset, bit);
        Ok(())
    }

    /// Makes the medium slow. The disk after a crash is not slow.
    pub fn set_pace(&self, pace: Pace) {
        self.world.lock().pace = Some(pace);
    }

    /// Changes the size of the file system. A size below the used space leaves no free space.
    pub fn set_capacity(&self, bytes: u64) {
        self.world.lock().options.capacity = bytes;
    }

    /// Makes the file system report `bytes` more free space than it has, as btrfs does.
    pub fn overstate_room(&self, bytes: u64) {
        self.world.lock().overstated = bytes;
    }
}

struct SimulatedDirectory {
    world: Arc<Mutex<World>>,
}

impl SimulatedDirectory {
    fn handle(&self, id: FileId, mode: IoMode) -> Arc<dyn File> {
        Arc::new(SimulatedFile::new(Arc::clone(&self.world), id, mode))
    }
}

impl Directory for SimulatedDirectory {
    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let id = self.world.lock().open(name)?;
        Ok(self.handle(id, mode))
    }

    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let id = self.world.lock().create(name)?;
        Ok(self.handle(id, mode))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.world.lock().remove(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.world.lock().rename(from, to)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.world.lock().list()
    }

    fn sync(&self) -> io::Result<()> {
        take_time(&self.world, Request::Sync);
        self.world.lock().sync_names()
    }

    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        let id = self.world.lock().lock(name)?;
        Ok(Box::new(SimulatedLock { world: Arc::clone(&self.world), id, name: name.to_owned() }))
    }

    fn room(&self) -> io::Result<Room> {
        self.world.lock().room()
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        let mut world = self.world.lock();
        let random = world.options.reorder.then(|| world.random.fork());
        Ok(Box::new(SimulatedQueue::new(depth, random)))
    }

    fn queue_kind(&self) -> QueueKind {
        QueueKind::Inline
    }
}

struct SimulatedLock {
    world: Arc<Mutex<World>>,
    id: FileId,
    name: String,
}

impl Lock for SimulatedLock {
    fn loss(&self) -> io::Result<Option<String>> {
        Ok((!self.world.lock().leads_to(&self.name, self.id)?).then(|| renamed(&self.name)))
    }
}

impl Drop for SimulatedLock {
    fn drop(&mut self) {
        self.world.lock().unlock(self.id);
    }
}
