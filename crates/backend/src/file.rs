//! Files: the operations of every medium, and those of local file systems only.

use crate::BLOCK_SIZE;
use crate::validate::check_range;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

/// The most bytes of one write in `write_zeros`.
const ZEROS_LENGTH: u64 = 256 << 10;

/// The most blocks that [`File::read_readable_at`] does without. A damaged sector takes one or two, and a device may
/// need many seconds to fail each.
const UNREADABLE_MAX: usize = 2;

/// How file contents are cached by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// Through the page cache.
    Buffered,
    /// Past the page cache (`O_DIRECT`): offsets, lengths and memory must be multiples of 4 KiB.
    Direct,
}

/// An allocated range of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Byte offsets in the file.
    pub range: Range<u64>,
    /// Byte address of the range on the block device; `None` where the file system does not report it.
    pub physical: Option<u64>,
    /// False while the space is only reserved: the range reads as zeros.
    pub written: bool,
}

impl Placement {
    /// For media that report only allocated ranges: such a range counts as written.
    pub(crate) fn of_run(run: Option<Range<u64>>) -> Vec<Self> {
        run.map(|range| Self { range, physical: None, written: true }).into_iter().collect()
    }
}

/// One file of a datastore, on any medium. All methods may be called from any thread at once.
pub trait File: Send + Sync {
    /// How the file was opened. A file without a page cache accepts reads and writes at any offset, as `Buffered` does.
    fn mode(&self) -> IoMode {
        self.local().map_or(IoMode::Buffered, |local| local.mode)
    }

    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// True when the file has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Truncates or extends (with zeros) the file to `length` bytes. On a local file the added zeros take no space.
    fn set_len(&self, length: u64) -> io::Result<()>;

    /// Fills `buffer` from `offset`; bytes past the end of the file read as zeros.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// As [`File::read_at`], but block by block, and up to [`UNREADABLE_MAX`] blocks of 4 KiB that cannot be read
    /// become zeros: for a caller that verifies each block, and may not need all of them.
    fn read_readable_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut unreadable = 0;
        for (number, block) in buffer.chunks_mut(BLOCK_SIZE).enumerate() {
            if let Err(error) = self.read_at(block, offset + (number * BLOCK_SIZE) as u64) {
                unreadable += 1;
                if unreadable > UNREADABLE_MAX {
                    return Err(error);
                }
                block.fill(0);
            }
        }
        Ok(())
    }

    /// As [`File::read_at`], but only if the page cache has the whole range. `Ok(false)` means that it does not, and
    /// that the content of `buffer` is undefined. A medium without a cache, or without knowledge of it, always returns
    /// `Ok(false)`. The method is part of this trait because most reads of a client begin with it.
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        let _ = (buffer, offset);
        Ok(false)
    }

    /// Writes the slices one after another at `offset`. With `durable`, the written bytes survive power loss once this
    /// call returns (`RWF_DSYNC`); earlier writes may still be lost.
    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()>;

    /// Makes every write, reservation and length change that completed before this call durable (`fdatasync`). A
    /// failure means that data is lost, whatever the cause. So the error never has a kind that means lack of space,
    /// after which a caller would free space and continue.
    fn sync(&self) -> io::Result<()>;

    /// Punches a hole: the range reads as zeros afterwards, and its space is freed if the medium supports that. The
    /// length of the file does not change.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;

    /// The operations that only a local file has; `None` on other media, for which the methods of `dyn File` have
    /// substitutes.
    fn local(&self) -> Option<LocalPart<'_>> {
        None
    }
}

/// Implements methods of [`File`] by those of another file, for types that change only some methods:
/// `forward_file!(inner: len, sync);` in the implementation calls `self.inner.len()` and `self.inner.sync()`.
#[macro_export]
macro_rules! forward_file {
    ($inner:tt: $($method:ident),+) => { $($crate::forward_file!(@$method $inner);)+ };
    (@len $inner:tt) => {
        fn len(&self) -> std::io::Result<u64> {
            self.$inner.len()
        }
    };
    (@set_len $inner:tt) => {
        fn set_len(&self, length: u64) -> std::io::Result<()> {
            self.$inner.set_len(length)
        }
    };
    (@read_at $inner:tt) => {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
            self.$inner.read_at(buffer, offset)
        }
    };
    (@read_cached_at $inner:tt) => {
        fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<bool> {
            self.$inner.read_cached_at(buffer, offset)
        }
    };
    (@write_at $inner:tt) => {
        fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> std::io::Result<()> {
            self.$inner.write_at(slices, offset, durable)
        }
    };
    (@sync $inner:tt) => {
        fn sync(&self) -> std::io::Result<()> {
            self.$inner.sync()
        }
    };
    (@punch $inner:tt) => {
        fn punch(&self, offset: u64, length: u64) -> std::io::Result<()> {
            self.$inner.punch(offset, length)
        }
    };
    (@local $inner:tt) => {
        fn local(&self) -> Option<$crate::LocalPart<'_>> {
            self.$inner.local()
        }
    };
}

/// The error of a failed flush. A lack of space that only the flush reports is in the storage below the file system,
/// such as a thin pool: then writes that the page cache has acknowledged are lost.
pub(crate) fn flush_failed(error: io::Error) -> io::Error {
    match error::lacks_space(&error) {
        true => io::Error::other(format!("{error}; writes that were acknowledged are lost")),
        false => error,
    }
}

/// The local part of a file. [`File::local`] returns everything that a queue needs in one call.
#[derive(Clone, Copy)]
pub struct LocalPart<'a> {
    /// The operations of a local file.
    pub file: &'a dyn LocalFile,
    /// For queues that submit to the kernel; `None` where reads and writes have to pass through [`File`].
    pub descriptor: Option<RawFd>,
    /// How the file was opened.
    pub mode: IoMode,
}

/// Operations that only a local file has: on its space, and on the page cache above it.
pub trait LocalFile: Send + Sync {
    /// Starts write-back of the dirty pages of a range, and with `wait` waits for its end, so that a later
    /// [`File::sync`] has less to write. Nothing becomes durable by this call. If write-back fails, the next flush
    /// fails.
    fn write_out(&self, offset: u64, length: u64, wait: bool) {
        let _ = (offset, length, wait);
    }

    /// Must be called after a queue has flushed the descriptor successfully: fails if [`LocalFile::write_out`] has
    /// failed since the last flush.
    fn end_flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Must be called after a queue has written a range through the descriptor, without `durable`: counts what is dirty
    /// in the page cache, and waits if the medium cannot keep up ([`crate::dirty`]).
    fn wrote(&self, offset: u64, length: u64) {
        let _ = (offset, length);
    }

    /// Starts reading a range into the page cache, if the file is buffered.
    fn will_need(&self, offset: u64, length: u64) {
        let _ = (offset, length);
    }

    /// Drops the clean pages of the file from the page cache, so that reads show what the device holds. After a failed
    /// flush, clean pages may hold data that was never written.
    fn forget_cached(&self) -> io::Result<()> {
        Ok(())
    }

    /// Allocates space for a range, growing the file if it ends before the range: later writes there cannot fail with
    /// ENOSPC. Contents are kept; holes read as zeros.
    fn reserve(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes a range within the file read as zeros and keeps its space allocated; holes get space. The device need not
    /// be written. `Unsupported` where the file system cannot do this: the caller then writes zeros.
    fn zero_range(&self, offset: u64, length: u64) -> io::Result<()> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The first allocated range at or after `offset`, up to the end of the file. A long range may be returned in
    /// parts: the caller then repeats the call from the end of the part.
    fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>>;

    /// All allocated ranges from `offset` to the end of the file, in order. Adjacent ranges are not merged. A long list
    /// is returned in parts: the caller repeats the call from the end of the last range, until the list is empty. Data
    /// written before the call counts as written, even while it is only in the page cache.
    fn placements(&self, offset: u64) -> io::Result<Vec<Placement>> {
        self.next_allocated(offset).map(Placement::of_run)
    }

    /// Bytes allocated to this file in the file system.
    fn allocated(&self) -> io::Result<u64>;
}

/// The operations of [`LocalFile`] for any file. A file without a local part is allocated by its length: every byte of
/// it has space and counts as written. Such a file has no page cache.
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

    /// As [`LocalFile::reserve`]; without a local part the file grows to the end of the range. No other call may change
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

    /// As [`LocalFile::zero_range`]; without a local part the range is punched. It keeps its space, because such a file
    /// is allocated by its length.
    pub fn zero_range(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.local() {
            Some(local) => local.file.zero_range(offset, length),
            None => self.punch(offset, length),
        }
    }

    /// Writes zeros over a range, in as many writes as needed. Blocks that have space keep it.
    pub fn write_zeros(&self, offset: u64, length: u64) -> io::Result<()> {
        let end = offset.saturating_add(length);
        let zeros = crate::Buffer::with_bytes(length.min(ZEROS_LENGTH) as usize);
        let mut at = offset;
        while at < end {
            let part = (end - at).min(ZEROS_LENGTH) as usize;
            self.write_at(&[&zeros[..part]], at, false)?;
            at += part as u64;
        }
        Ok(())
    }

    /// As [`LocalFile::next_allocated`]; without a local part, the result is everything from `offset` to the end of the
    /// file.
    pub fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        if let Some(local) = self.local() {
            return local.file.next_allocated(offset);
        }
        let length = self.len()?;
        Ok((offset < length).then_some(offset..length))
    }

    /// As [`LocalFile::placements`]; without a local part, the result is one placement, marked as written, up to the
    /// end of the file.
    pub fn placements(&self, offset: u64) -> io::Result<Vec<Placement>> {
        if let Some(local) = self.local() {
            return local.file.placements(offset);
        }
        self.next_allocated(offset).map(Placement::of_run)
    }

    /// As [`LocalFile::allocated`]; without a local part, the result is the length of the file.
    pub fn allocated(&self) -> io::Result<u64> {
        match self.local() {
            Some(local) => local.file.allocated(),
            None => self.len(),
        }
    }
}
