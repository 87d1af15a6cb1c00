//! One file of a local file system, by ordinary positional system calls.
//!
//! Interrupted calls and short transfers are continued here, so that callers get the whole transfer or an error. Errors
//! keep the kernel's code: the crates above add which disk they concern.

use super::{extents, kept, retry};
use crate::dirty::{self, DirtyFile, WriteOut};
use crate::file::flush_failed;
use crate::queue::resume_short_read;
use crate::validate::{check_alignment, check_range, check_slices};
use crate::{BLOCK_SIZE, File, IoMode, LocalFile, LocalPart, Placement};
use kept::has_space;
use parking_lot::RwLock;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

/// The most slices in one system call (`IOV_MAX` of Linux and the BSDs).
pub(crate) const VECTORS_MAX: usize = 1024;

/// The most bytes of one write into the page cache; larger writes are cut at multiples of it. Linux keeps a fresh file
/// in folios as large as the writes that made it, and ext4 examines every block of a folio at each later write into it.
/// After writes of 1 MiB, random writes of 4 KiB ran at 180 MiB/s; after writes of 64 KiB, at 810 MiB/s. The large
/// writes became no slower.
const CACHED_WRITE_MAX: u64 = 64 << 10;

/// A file of a [`super::LocalDirectory`].
pub struct OpenFile {
    file: Arc<Descriptor>,
    mode: IoMode,
    /// The account of what buffered writes have left dirty; made at the first one, `None` if nothing is limited.
    dirty: OnceLock<Option<Arc<DirtyFile>>>,
}

/// The descriptor, which the thread that writes out dirty data uses too.
struct Descriptor {
    file: std::fs::File,
    written_out: WrittenOut,
}

impl std::ops::Deref for Descriptor {
    type Target = std::fs::File;

    fn deref(&self) -> &std::fs::File {
        &self.file
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl WriteOut for Descriptor {
    fn write_out(&self, offset: u64, length: u64, wait: bool) {
        // A failure is kept, and the next flush reports it.
        let _ = self.written_out.run(|| write_out_call(&self.file, offset, length, wait));
    }
}

/// Failures of write-back, kept for the next flush.
///
/// Linux reports a lost write once to each open file, and `sync_file_range` counts as a report: `fdatasync` succeeds
/// afterwards. A failed allocation (ext4 with delayed allocation) is reported only to the call that caused it.
#[derive(Default)]
struct WrittenOut {
    /// Held shared during write-back, and exclusively by a flush. Otherwise the flush could run between the kernel's
    /// report to the write-back and the store to `failed`, and succeed.
    running: RwLock<()>,
    /// The last failure since the last flush as an error number, or 0.
    failed: AtomicI32,
}

impl WrittenOut {
    fn run(&self, write_out: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _running = self.running.read();
        let outcome = write_out();
        if let Err(error) = &outcome
            && error.kind() != io::ErrorKind::Unsupported
        {
            let code = error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error());
            self.failed.store(code, Ordering::Release);
        }
        outcome
    }

    /// Called after a flush: returns the failure that the kernel did not report to it.
    fn take(&self) -> io::Result<()> {
        drop(self.running.write());
        match self.failed.swap(0, Ordering::AcqRel) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }
}

/// A removed file with at least this many allocated bytes is closed by a thread of its own.
const CLOSED_ELSEWHERE: u64 = 16 << 20;

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(Some(dirty)) = self.dirty.get() {
            dirty.close();
        }
    }
}

impl Drop for Descriptor {
    /// The last close of a removed file frees its space, which may take long: two thirds of a second for 2 GiB on a
    /// file system mounted with `discard`. If the thread of a request held the last handle, all requests of its
    /// connection would wait.
    fn drop(&mut self) {
        let long = rustix::fs::fstat(&self.file)
            .is_ok_and(|stat| stat.st_nlink == 0 && stat.st_blocks as u64 * 512 >= CLOSED_ELSEWHERE);
        if long && let Ok(file) = self.file.try_clone() {
            // If no thread can be started, the file is closed on this one.
            let _ = std::thread::Builder::new().name("closing a removed file".into()).spawn(move || drop(file));
        }
    }
}

impl OpenFile {
    pub(crate) fn new(file: std::fs::File, mode: IoMode) -> Self {
        let file = Arc::new(Descriptor { file, written_out: WrittenOut::default() });
        Self { file, mode, dirty: OnceLock::new() }
    }

    /// The account for a write.
    fn account(&self) -> Option<&DirtyFile> {
        let account = self.dirty.get_or_init(|| {
            let device = rustix::fs::fstat(&self.file).ok()?.st_dev;
            let target: Arc<dyn WriteOut> = Arc::clone(&self.file) as _;
            Some(DirtyFile::new(dirty::medium_of(device)?, target))
        });
        account.as_deref()
    }

    fn write_vectors(&self, mut vectors: &mut [IoSlice<'_>], mut offset: u64, durable: bool) -> io::Result<()> {
        IoSlice::advance_slices(&mut vectors, 0); // skips empty slices
        let mut flush_after = false;
        while !vectors.is_empty() {
            let part = &vectors[..vectors.len().min(VECTORS_MAX)];
            let written = match write_call(&self.file, part, offset, durable && !flush_after) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => written,
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::OPNOTSUPP) if durable && !flush_after => {
                    flush_after = true;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            IoSlice::advance_slices(&mut vectors, written);
            offset = offset.saturating_add(written as u64);
        }
        match flush_after {
            true => self.sync(),
            false => Ok(()),
        }
    }

    /// Writes all slices, with one call or several.
    fn write_all(&self, slices: &[&[u8]], offset: u64, total: u64, durable: bool) -> io::Result<()> {
        if self.mode == IoMode::Buffered && !durable && total > CACHED_WRITE_MAX {
            return self.write_pieces(slices, offset);
        }
        let written = match slices {
            [slice] => self.write_vectors(&mut [IoSlice::new(slice)], offset, durable),
            _ => {
                let mut vectors: Vec<_> = slices.iter().map(|slice| IoSlice::new(slice)).collect();
                self.write_vectors(&mut vectors, offset, durable)
            }
        };
        match written {
            Err(error) if self.mode == IoMode::Direct && error::lacks_space(&error) => {
                self.write_around_holes(slices, offset, error)?;
                if durable { self.sync() } else { Ok(()) }
            }
            other => other,
        }
    }

    /// Writes through the page cache in pieces that end at multiples of [`CACHED_WRITE_MAX`] in the file.
    fn write_pieces(&self, slices: &[&[u8]], mut offset: u64) -> io::Result<()> {
        let to_border = |offset: u64| (CACHED_WRITE_MAX - offset % CACHED_WRITE_MAX) as usize;
        let mut piece: Vec<IoSlice<'_>> = Vec::with_capacity(slices.len());
        let (mut gathered, mut left) = (0, to_border(offset));
        for slice in slices {
            let mut rest = *slice;
            while !rest.is_empty() {
                let (part, behind) = rest.split_at(rest.len().min(left));
                piece.push(IoSlice::new(part));
                rest = behind;
                gathered += part.len() as u64;
                left -= part.len();
                if left == 0 {
                    self.write_vectors(&mut piece, offset, false)?;
                    offset += gathered;
                    piece.clear();
                    (gathered, left) = (0, to_border(offset));
                }
            }
        }
        self.write_vectors(&mut piece, offset, false)
    }

    /// Continues a direct write that failed with ENOSPC. If the file system's blocks are smaller than 4 KiB, an
    /// overwritten 4 KiB block may contain holes, left by writes through the page cache. Zeros for such a hole need no
    /// space and are skipped.
    fn write_around_holes(&self, slices: &[&[u8]], offset: u64, full: io::Error) -> io::Result<()> {
        let small = rustix::fs::fstat(&self.file).is_ok_and(|stat| (stat.st_blksize as u64) < BLOCK_SIZE as u64);
        let end = offset + slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
        if !small || end > self.len()? {
            return Err(full);
        }
        let mut pieces: Vec<Range<u64>> = Vec::new();
        let mut at = offset;
        while at < end {
            let placements = self.placements(at)?;
            let Some(last) = placements.last() else { break };
            at = last.range.end.max(at + 1);
            pieces.extend(placements.into_iter().map(|placement| placement.range.start..placement.range.end.min(end)));
        }
        let mut start = offset;
        for slice in slices {
            let stop = start + slice.len() as u64;
            let part = |range: Range<u64>| &slice[(range.start - start) as usize..(range.end - start) as usize];
            let mut done = start;
            for piece in pieces.iter().filter(|piece| piece.start < stop && start < piece.end) {
                let piece = piece.start.max(start)..piece.end.min(stop);
                if part(done..piece.start).iter().any(|byte| *byte != 0) {
                    return Err(full);
                }
                self.write_vectors(&mut [IoSlice::new(part(piece.clone()))], piece.start, false)?;
                done = piece.end;
            }
            if part(done..stop).iter().any(|byte| *byte != 0) {
                return Err(full);
            }
            start = stop;
        }
        Ok(())
    }

    /// The punch for file systems without holes.
    fn punch_by_writing(&self, offset: u64, length: u64) -> io::Result<()> {
        let end = offset.saturating_add(length).min(self.len()?);
        (self as &dyn File).write_zeros(offset, end.saturating_sub(offset))
    }
}

impl File for OpenFile {
    fn len(&self) -> io::Result<u64> {
        let stat = rustix::fs::fstat(&self.file)?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        kept::without_new_space(&self.file, || self.file.set_len(length))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        check_alignment(self.mode, offset, buffer)?;
        check_range(offset, buffer.len() as u64)?;
        let mut done = 0;
        while done < buffer.len() {
            match rustix::io::pread(&self.file, &mut buffer[done..], offset + done as u64) {
                Ok(0) => {
                    buffer[done..].fill(0);
                    break;
                }
                Ok(read) if done + read == buffer.len() => break,
                Ok(read) => match resume_short_read(self, offset, done + read)? {
                    Some(resume) => done = resume,
                    None => {
                        buffer[done + read..].fill(0);
                        break;
                    }
                },
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        if self.mode == IoMode::Direct {
            return Ok(false);
        }
        check_range(offset, buffer.len() as u64)?;
        let mut done = 0;
        while done < buffer.len() {
            match read_cached_call(&self.file, &mut buffer[done..], offset + done as u64) {
                // Linux 5.9 and 5.10 return 0 also inside the file, if a page is being read ahead.
                Ok(0) if self.len()? > offset + done as u64 => return Ok(false),
                Ok(0) => {
                    buffer[done..].fill(0);
                    break;
                }
                Ok(read) => done += read,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::OPNOTSUPP) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        let total = check_slices(self.mode, slices, offset)?;
        let outcome =
            kept::in_range(&self.file, offset..offset + total, || self.write_all(slices, offset, total, durable));
        if !durable {
            self.wrote(offset, total);
        }
        outcome
    }

    fn sync(&self) -> io::Result<()> {
        // The flush is never retried after a failure: the kernel reports a lost write once, and a second flush would
        // succeed.
        let flushed = match self.dirty.get() {
            Some(Some(dirty)) => dirty.flushed_by(|| self.file.sync_data()),
            _ => self.file.sync_data(),
        };
        let written_out = self.file.written_out.take();
        flushed.and(written_out).map_err(flush_failed)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        check_range(offset, length)?;
        match kept::without_new_space(&self.file, || punch_call(&self.file, offset, length)) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => self.punch_by_writing(offset, length),
            other => other,
        }
    }

    fn local(&self) -> Option<LocalPart<'_>> {
        Some(LocalPart { file: self, descriptor: Some(self.file.as_raw_fd()), mode: self.mode })
    }
}

impl LocalFile for OpenFile {
    fn write_out(&self, offset: u64, length: u64, wait: bool) {
        if self.mode == IoMode::Buffered {
            self.file.write_out(offset, length, wait);
        }
    }

    fn wrote(&self, offset: u64, length: u64) {
        if self.mode == IoMode::Buffered
            && let Some(account) = self.account()
        {
            account.wrote(offset, length);
        }
    }

    fn end_flush(&self) -> io::Result<()> {
        self.file.written_out.take().map_err(flush_failed)
    }

    fn will_need(&self, offset: u64, length: u64) {
        if self.mode == IoMode::Buffered {
            will_need_call(&self.file, offset, length);
        }
    }

    fn forget_cached(&self) -> io::Result<()> {
        forget_cached_call(&self.file)
    }

    fn reserve(&self, offset: u64, length: u64) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        check_range(offset, length)?;
        let range = offset..offset + length;
        match kept::in_range(&self.file, range.clone(), || reserve_call(&self.file, offset, length)) {
            // XFS requires free space for the whole range, even if parts of the range have space already.
            Err(error) if error::lacks_space(&error) && self.len()? >= range.end && has_space(&self.file, &range) => {
                Ok(())
            }
            outcome => outcome,
        }
    }

    fn zero_range(&self, offset: u64, length: u64) -> io::Result<()> {
        if length == 0 {
            return Ok(());
        }
        check_range(offset, length)?;
        kept::in_range(&self.file, offset..offset + length, || zero_range_call(&self.file, offset, length))
    }

    fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let length = self.len()?;
        if offset >= length {
            return Ok(None);
        }
        let found = extents::next_allocated(&self.file, offset)?;
        Ok(found.and_then(|range| {
            let clipped = range.start.max(offset)..range.end.min(length);
            (!clipped.is_empty()).then_some(clipped)
        }))
    }

    fn placements(&self, offset: u64) -> io::Result<Vec<Placement>> {
        let length = self.len()?;
        if offset >= length {
            return Ok(Vec::new());
        }
        let mut placed = extents::places_by_writing_out(&self.file);
        if placed {
            // A length of 0 means: to the end of the file, at the time of the call.
            match self.file.written_out.run(|| write_out_call(&self.file, offset, 0, true)) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => placed = false,
                outcome => outcome?,
            }
        }
        let mut found = extents::placements(&self.file, offset, !placed)?;
        for placement in &mut found {
            let start = placement.range.start.max(offset);
            placement.physical = placement.physical.map(|at| at.saturating_add(start - placement.range.start));
            placement.range = start..placement.range.end.min(length);
        }
        found.retain(|placement| !placement.range.is_empty());
        Ok(found)
    }

    fn allocated(&self) -> io::Result<u64> {
        let stat = rustix::fs::fstat(&self.file)?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
    }
}

#[cfg(target_os = "linux")]
fn write_call(file: &std::fs::File, vectors: &[IoSlice<'_>], offset: u64, durable: bool) -> rustix::io::Result<usize> {
    use rustix::io::ReadWriteFlags;
    let flags = if durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
    rustix::io::pwritev2(file, vectors, offset, flags)
}

/// `OPNOTSUPP` for a durable write makes the caller flush afterwards.
#[cfg(not(target_os = "linux"))]
fn write_call(file: &std::fs::File, vectors: &[IoSlice<'_>], offset: u64, durable: bool) -> rustix::io::Result<usize> {
    if durable {
        return Err(rustix::io::Errno::OPNOTSUPP);
    }
    rustix::io::pwrite(file, &vectors[0], offset)
}

#[cfg(target_os = "linux")]
fn read_cached_call(file: &std::fs::File, buffer: &mut [u8], offset: u64) -> rustix::io::Result<usize> {
    let mut vectors = [io::IoSliceMut::new(buffer)];
    rustix::io::preadv2(file, &mut vectors, offset, rustix::io::ReadWriteFlags::NOWAIT)
}

#[cfg(not(target_os = "linux"))]
fn read_cached_call(_file: &std::fs::File, _buffer: &mut [u8], _offset: u64) -> rustix::io::Result<usize> {
    Err(rustix::io::Errno::AGAIN)
}

#[cfg(target_os = "linux")]
fn write_out_call(file: &std::fs::File, offset: u64, length: u64, wait: bool) -> io::Result<()> {
    let flags = match wait {
        true => libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER,
        false => libc::SYNC_FILE_RANGE_WRITE,
    };
    let (Ok(offset), Ok(length)) = (i64::try_from(offset), i64::try_from(length)) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: a system call on a descriptor that is open for as long as `file` is borrowed; it touches no memory.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(not(target_os = "linux"))]
fn write_out_call(_file: &std::fs::File, _offset: u64, _length: u64, _wait: bool) -> io::Result<()> {
    Ok(())
}

/// A hint: errors are ignored, because a read of the range returns them.
#[cfg(target_os = "linux")]
fn will_need_call(file: &std::fs::File, offset: u64, length: u64) {
    // A length of 0 would mean the rest of the file.
    let Some(length) = std::num::NonZeroU64::new(length) else { return };
    let _ = rustix::fs::fadvise(file, offset, Some(length), rustix::fs::Advice::WillNeed);
}

#[cfg(not(target_os = "linux"))]
fn will_need_call(_file: &std::fs::File, _offset: u64, _length: u64) {}

#[cfg(target_os = "linux")]
fn forget_cached_call(file: &std::fs::File) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?)
}

#[cfg(not(target_os = "linux"))]
fn forget_cached_call(_file: &std::fs::File) -> io::Result<()> {
    Ok(())
}

#[cfg(any(target_os = "linux", target_os = "freebsd", target_vendor = "apple"))]
fn reserve_call(file: &std::fs::File, offset: u64, length: u64) -> io::Result<()> {
    retry(|| rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), offset, length))
}

#[cfg(not(any(target_os = "linux", target_os = "freebsd", target_vendor = "apple")))]
fn reserve_call(_file: &std::fs::File, _offset: u64, _length: u64) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this operating system cannot reserve space in a file"))
}

#[cfg(target_os = "linux")]
fn punch_call(file: &std::fs::File, offset: u64, length: u64) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    retry(|| rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length))
}

#[cfg(target_os = "linux")]
fn zero_range_call(file: &std::fs::File, offset: u64, length: u64) -> io::Result<()> {
    use rustix::fs::FallocateFlags;
    retry(|| rustix::fs::fallocate(file, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, offset, length))
}

#[cfg(not(target_os = "linux"))]
fn zero_range_call(_file: &std::fs::File, _offset: u64, _length: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// On other systems the caller writes zeros instead: the range reads correctly and keeps its space.
#[cfg(not(target_os = "linux"))]
fn punch_call(_file: &std::fs::File, _offset: u64, _length: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests;
