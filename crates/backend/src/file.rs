//! Files: what every medium does with one, and what only a local file system does.

use crate::validate::check_range;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

/// How file contents are cached by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// Through the page cache.
    Buffered,
    /// Past the page cache (`O_DIRECT`): offsets, lengths and memory must be multiples of 4 KiB.
    Direct,
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

impl Placement {
    /// What is known where only runs are: it has its space and counts as written.
    pub(crate) fn of_run(run: Option<Range<u64>>) -> Vec<Self> {
        run.map(|range| Self { range, physical: None, written: true }).into_iter().collect()
    }
}

/// One file of a datastore, on any medium. All methods may be called from any thread at once.
pub trait File: Send + Sync {
    /// How the file was opened. What has no page cache takes reads and writes at any offset, as `Buffered` does.
    fn mode(&self) -> IoMode {
        self.local().map_or(IoMode::Buffered, |local| local.mode)
    }

    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// True when the file has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Cuts or extends (with zeros) the file to `length` bytes. On a local file the zeros take no space.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Fills `buffer` from `offset`; bytes past the end of the file read as zeros.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// As [`File::read_at`] but only if no medium has to be waited for (a page cache has it all): `Ok(false)` means
    /// nothing useful is in `buffer`. Always `Ok(false)` where there is no cache, or no telling what it has. It stands
    /// here because most reads of a client begin with it.
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        let _ = (buffer, offset);
        Ok(false)
    }

    /// Writes the slices one after another at `offset`. When `durable`, they survive power loss once this returns
    /// (`RWF_DSYNC`); nothing is said about earlier writes then.
    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()>;

    /// Makes every write, reservation and length change that completed before this call durable (`fdatasync`). What
    /// fails is lost, whatever the reason: no error of a flush has the kind of a lack of room, after which a caller
    /// goes on.
    fn sync(&self) -> io::Result<()>;

    /// Discards a range: it reads as zeros afterwards, and a medium that can takes its space back. The length stays.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;

    /// What only a file of a local file system can do; `None` on other media. The methods of `dyn File` use it where it
    /// is there, and do what takes its place where it is not.
    fn local(&self) -> Option<LocalPart<'_>> {
        None
    }
}

/// The error of a flush. A medium that runs out of room below the file system, as a thin pool does, fails writes of the
/// page cache that were acknowledged long before.
pub(crate) fn flush_failed(error: io::Error) -> io::Error {
    match error::lacks_space(&error) {
        true => io::Error::other(format!("{error}; writes that were acknowledged are lost")),
        false => error,
    }
}

/// The local part of a file, as [`File::local`] answers it: one call tells a queue all that it needs of a file.
#[derive(Clone, Copy)]
pub struct LocalPart<'a> {
    /// The rest of what the file can do.
    pub file: &'a dyn LocalFile,
    /// For queues that hand work to the kernel; `None` where reads and writes have to pass through [`File`].
    pub descriptor: Option<RawFd>,
    /// How the file was opened.
    pub mode: IoMode,
}

/// What only a file of a local file system can do: its space, and the page cache above it.
pub trait LocalFile: Send + Sync {
    /// Has the operating system begin to write what it caches of a range to the medium, and with `wait` waits for that:
    /// so that a later [`File::sync`] finds little left to do. Nothing is durable for it, and the next flush fails if
    /// it has failed.
    fn write_out(&self, offset: u64, length: u64, wait: bool) {
        let _ = (offset, length, wait);
    }

    /// The end of a flush that a queue has had carried out on the descriptor and that succeeded: fails if
    /// [`LocalFile::write_out`] has failed since the last flush.
    fn end_flush(&self) -> io::Result<()> {
        Ok(())
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

    /// Takes space from the file system for a range, growing the file if it ends before it: later writes there cannot
    /// fail with ENOSPC. Contents are kept; what was a hole reads as zeros.
    fn reserve(&self, offset: u64, length: u64) -> io::Result<()>;

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
        self.next_allocated(offset).map(Placement::of_run)
    }

    /// Bytes this file takes in the file system.
    fn allocated(&self) -> io::Result<u64>;
}

/// The abilities of [`LocalFile`] on any file. A file without a local part takes space by its length: all of it has
/// its space and counts as written, and there is no page cache.
impl dyn File + '_ {
    /// As [`LocalFile::write_out`]; nothing to do without a page cache.
    pub fn write_out(&self, offset: u64, length: u64, wait: bool) {
        if let Some(local) = self.local() {
            local.file.write_out(offset, length, wait);
        }
    }

    /// As [`LocalFile::will_need`]; nothing to do without a page cache.
    pub fn will_need(&self, offset: u64, length: u64) {
        if let Some(local) = self.local() {
            local.file.will_need(offset, length);
        }
    }

    /// As [`LocalFile::forget_cached`]; nothing to do without a page cache.
    pub fn forget_cached(&self) -> io::Result<()> {
        self.local().map_or(Ok(()), |local| local.file.forget_cached())
    }

    /// As [`LocalFile::reserve`]; without a local part the file grows to the end of the range. Nothing else may change
    /// its length meanwhile.
    pub fn reserve(&self, offset: u64, length: u64) -> io::Result<()> {
        if let Some(local) = self.local() {
            return local.file.reserve(offset, length);
        }
        check_range(offset, length)?;
        match length > 0 && self.len()? < offset + length {
            true => self.set_len(offset + length),
            false => Ok(()),
        }
    }

    /// As [`LocalFile::zero_range`]; without a local part the range is punched, which leaves it its space.
    pub fn zero_range(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.local() {
            Some(local) => local.file.zero_range(offset, length),
            None => self.punch(offset, length),
        }
    }

    /// As [`LocalFile::next_allocated`]; without a local part all up to the end of the file.
    pub fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        if let Some(local) = self.local() {
            return local.file.next_allocated(offset);
        }
        let length = self.len()?;
        Ok((offset < length).then_some(offset..length))
    }

    /// As [`LocalFile::placements`]; without a local part all up to the end of the file, as written.
    pub fn placements(&self, offset: u64) -> io::Result<Vec<Placement>> {
        if let Some(local) = self.local() {
            return local.file.placements(offset);
        }
        self.next_allocated(offset).map(Placement::of_run)
    }

    /// As [`LocalFile::allocated`]; without a local part the length.
    pub fn allocated(&self) -> io::Result<u64> {
        match self.local() {
            Some(local) => local.file.allocated(),
            None => self.len(),
        }
    }
}
