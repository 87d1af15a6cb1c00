//! A part of a file, presented as a read-only file.

use backend::{File, IoMode, LocalFile, LocalPart};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// `length` bytes of a file from `start` on. Operations that would change the file fail.
pub struct Section {
    file: Arc<dyn File>,
    start: u64,
    length: u64,
}

impl Section {
    /// A part, which must lie within the file.
    pub(super) fn new(file: Arc<dyn File>, start: u64, length: u64) -> Self {
        Self { file, start, length }
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Reads the bytes before the end of the part through `read`; bytes past the end are zeros.
    fn inside<T>(
        &self,
        buffer: &mut [u8],
        offset: u64,
        read: impl FnOnce(&mut [u8], u64) -> io::Result<T>,
    ) -> io::Result<T> {
        let inside = self.length.saturating_sub(offset).min(buffer.len() as u64) as usize;
        buffer[inside..].fill(0);
        read(&mut buffer[..inside], self.start + offset.min(self.length))
    }
}

fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a part of an archive is only read")
}

impl File for Section {
    fn len(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(refused())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.inside(buffer, offset, |inside, offset| self.file.read_at(inside, offset))
    }

    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.inside(buffer, offset, |inside, offset| self.file.read_cached_at(inside, offset))
    }

    fn write_at(&self, _: &[&[u8]], _: u64, _: bool) -> io::Result<()> {
        Err(refused())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, _: u64, _: u64) -> io::Result<()> {
        Err(refused())
    }

    fn local(&self) -> Option<LocalPart<'_>> {
        // Offsets in this part differ from those in the file, so queues must not use the file's descriptor.
        self.file.local().map(|_| LocalPart { file: self, descriptor: None, mode: IoMode::Buffered })
    }
}

impl LocalFile for Section {
    fn reserve(&self, _: u64, _: u64) -> io::Result<()> {
        Err(refused())
    }

    fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        if offset >= self.length {
            return Ok(None);
        }
        let end = self.start + self.length;
        let found = self.file.next_allocated(self.start + offset)?.filter(|range| range.start < end);
        Ok(found.map(|range| range.start - self.start..range.end.min(end) - self.start))
    }

    fn allocated(&self) -> io::Result<u64> {
        // The file system counts space for whole files; for this part, its length is an upper limit.
        Ok(self.length.min(self.file.allocated()?))
    }
}
