//! Bytes at offsets: the only part of lamina that touches a medium.
//!
//! Everything above asks for files of a [`Directory`] and reads, writes, flushes, reserves and punches them through
//! [`File`]; work that must overlap goes through a per-thread [`Queue`]. Three implementations stand behind these
//! traits: local files ([`local`]), with queues over io_uring ([`uring`]) or over a thread pool where the kernel or a
//! container forbids io_uring ([`portable`]); and a simulated device for tests ([`simulated`]) that drops, tears and
//! reorders what was not flushed. An [`overlay`] keeps what changes in memory and leaves the folder below alone.
//!
//! What every implementation guarantees; code above may rely on no more:
//!
//! 1. A byte written is visible to later reads of the same process at once; it survives power loss only after
//!    [`File::sync`] returned, or when it was written with `durable`.
//! 2. A write interrupted by power loss may persist whole, not at all, or by any subset of its 512-byte sectors.
//! 3. Bytes never written, punched or only reserved read as zeros.
//! 4. After a failed flush nothing is known of the writes before it; the caller must stop, not retry.

mod buffer;
pub mod clock;
pub mod local;
pub mod overlay;
#[cfg(target_os = "linux")]
pub mod pagemap;
pub mod portable;
mod queue;
pub mod random;
mod readiness;
pub mod simulated;
#[cfg(target_os = "linux")]
pub mod uring;
mod validate;

pub use buffer::{BLOCK_SIZE, Block, Buffer, SharedSlice, release_idle};
pub use queue::{Completion, QUEUE_DEPTH_MAX, QUEUE_POLLS_MAX, Queue, QueueKind};

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

/// How file contents are cached by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// Through the page cache.
    Buffered,
    /// Past the page cache (`O_DIRECT`): offsets, lengths and memory must be multiples of 4 KiB.
    Direct,
}

/// What a file of another maker is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading: the medium is not changed whatever happens, and a file that may not be written can be opened.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// A run of a file that takes space in the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The bytes of the file.
    pub range: Range<u64>,
    /// Byte address of the run on the medium; `None` where the file system does not say.
    pub physical: Option<u64>,
    /// False while the space is only reserved: it reads as zeros.
    pub written: bool,
}

/// One file of a datastore. All methods may be called from any thread at once.
pub trait File: Send + Sync {
    /// How the file was opened.
    fn mode(&self) -> IoMode {
        IoMode::Buffered
    }

    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// True when the file has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Cuts or extends (with zeros that take no space) the file to `length` bytes.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Fills `buffer` from `offset`; bytes past the end of the file read as zeros.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// As [`File::read_at`] but only if no medium has to be waited for (page cache hit): `Ok(false)` means nothing
    /// useful is in `buffer`. Always `Ok(false)` where the platform cannot tell.
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool>;

    /// Writes the slices one after another at `offset`. When `durable`, they survive power loss once this returns
    /// (`RWF_DSYNC`); nothing is said about earlier writes then.
    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()>;

    /// Has the operating system begin to write what it caches of a range to the medium, and with `wait` waits for that:
    /// so that a later [`File::sync`] finds little left to do. Nothing is durable for it.
    fn write_out(&self, offset: u64, length: u64, wait: bool) {
        let _ = (offset, length, wait);
    }

    /// Has the operating system begin to bring a range into its cache, if it caches this file.
    fn will_need(&self, offset: u64, length: u64) {
        let _ = (offset, length);
    }

    /// Has the operating system forget what it caches of the file and need not write any more, so that reads show what
    /// the medium has: after a failed flush the cache may hold what was never written.
    fn forget_cached(&self) -> io::Result<()> {
        Ok(())
    }

    /// Makes every write, reservation and length change that completed before this call durable (`fdatasync`).
    fn sync(&self) -> io::Result<()>;

    /// Takes space from the file system for a range, growing the file if it ends before it: later writes there cannot
    /// fail with ENOSPC. Contents are kept; what was a hole reads as zeros.
    fn reserve(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Gives a range back to the file system; it reads as zeros afterwards. The length stays.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes a range within the file read as zeros without giving its space back; where it had none, space is taken.
    /// The medium need not be written for it. `Unsupported` where that cannot be had: the caller writes zeros then.
    fn zero_range(&self, offset: u64, length: u64) -> io::Result<()> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The first range at or after `offset` that takes space in the file system, up to the end of the file. A long
    /// range may be answered in parts: ask again from its end.
    fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>>;

    /// What takes space at and after `offset` up to the end of the file, in order, neighbours not merged. A long answer
    /// comes in parts: ask again from the end of the last; empty when there is no more. What was written before the
    /// call counts as written, also while it waits in the page cache.
    fn placements(&self, offset: u64) -> io::Result<Vec<Placement>> {
        let found = self.next_allocated(offset)?;
        Ok(found.map(|range| Placement { range, physical: None, written: true }).into_iter().collect())
    }

    /// Bytes this file takes in the file system.
    fn allocated(&self) -> io::Result<u64>;

    /// The descriptor for queues that hand work to the kernel; `None` for simulated files.
    fn descriptor(&self) -> Option<RawFd>;
}

/// Room in the file system that holds a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Size of the file system in bytes.
    pub total: u64,
    /// Bytes an unprivileged process may still take.
    pub available: u64,
}

/// Proof of being the one owner; the lock goes when this is dropped or the process ends, however it ends.
pub trait Lock: Send + Sync {
    /// Whether the name that was locked still leads to the locked file. Once it does not, another process that locks
    /// the name is not excluded.
    fn is_named(&self) -> io::Result<bool>;
}

/// The folder of a datastore.
pub trait Directory: Send + Sync {
    /// Opens a file that exists (`NotFound` otherwise).
    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>>;

    /// Opens a file that another program may have put there: only a regular file, never through a symbolic link, and
    /// with no more rights than `access` asks for.
    fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>> {
        let _ = access;
        self.open(name, mode)
    }

    /// Gives file `to` the owner and permissions of file `from`, as far as this process may.
    fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()> {
        let _ = (from, to);
        Ok(())
    }

    /// Creates a file that must not exist yet. Durable only after [`Directory::sync`].
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>>;

    /// As [`Directory::create`], and the lock on it: `WouldBlock` when another process locked the new file first; that
    /// process may have removed it.
    fn create_locked(&self, name: &str, mode: IoMode) -> io::Result<(Arc<dyn File>, Box<dyn Lock>)> {
        let file = self.create(name, mode)?;
        Ok((file, self.lock(name)?))
    }

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Renames a file over whatever bore the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Names of all files, sorted.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes creations, removals and renames durable.
    fn sync(&self) -> io::Result<()>;

    /// Takes the exclusive lock on file `name` (created when missing): `WouldBlock` when another process, or another
    /// opener in this one, holds it. The name leads to the locked file on return.
    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>>;

    /// As [`Directory::lock`], of a file that exists (`NotFound` otherwise).
    fn lock_existing(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        drop(self.open(name, IoMode::Buffered)?);
        self.lock(name)
    }

    /// Takes the exclusive lock on the folder itself, which no file put in another's place gives free: `WouldBlock`
    /// when another opener holds it, `None` where the file system locks no folders.
    fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>> {
        Ok(None)
    }

    /// Room in the file system.
    fn room(&self) -> io::Result<Room>;

    /// A new queue of at most `depth` operations in flight, for one thread.
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>>;

    /// What [`Directory::queue`] makes, for the user to see.
    fn queue_kind(&self) -> QueueKind;
}
