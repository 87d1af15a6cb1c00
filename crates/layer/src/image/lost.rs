//! What stands in for a missing or unreadable part of a disk, so that the rest of it can be read.
//!
//! 1. A lost part refuses every read. So the data below it, which may be older, never takes its place.
//! 2. A part of a file that could not be read once is not read again: each attempt may take a storage device many
//!    seconds, and tables are read once for each grain that they map.

use super::Place;
use crate::{Error, ErrorKind, Extent, Layer, Result, Usage};
use backend::{Access, BLOCK_SIZE, Buffer, File, IoMode, LocalPart};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Whether an error means that a file, or a part of it, is missing, damaged or unreadable.
pub fn is_loss(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt | ErrorKind::Io)
}

/// A layer of which nothing can be read.
pub(super) struct Lost {
    pub(super) capacity: u64,
    /// The reason, for messages.
    pub(super) why: String,
}

impl Lost {
    fn error(&self) -> Error {
        Error::new(ErrorKind::Corrupt, self.why.clone())
    }
}

impl Layer for Lost {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn grain(&self) -> u64 {
        crate::SECTOR
    }

    fn format(&self) -> &'static str {
        "lost"
    }

    fn writable(&self) -> bool {
        false
    }

    fn map(&self, _: Range<u64>, _: usize, _: &mut Vec<Extent>) -> Result<()> {
        Err(self.error())
    }

    fn damage_end(&self, _: u64) -> u64 {
        self.capacity
    }

    fn file(&self, _: u16) -> Result<&Arc<dyn File>> {
        Err(self.error())
    }

    fn usage(&self) -> Result<Usage> {
        Ok(Usage::default())
    }
}

/// A read-only file that records which blocks of 4 KiB could not be read.
pub(super) struct Remembering {
    inner: Arc<dyn File>,
    place: Place,
    /// The same file, opened so that reads bypass the page cache; `None` if the file system does not permit this. Linux
    /// caches files in folios of up to 2 MiB: one unreadable sector makes buffered reads of all other blocks of its
    /// folio fail.
    past_cache: OnceLock<Option<Arc<dyn File>>>,
    /// Start and end of each run of unreadable blocks.
    unreadable: Mutex<BTreeMap<u64, u64>>,
}

impl Remembering {
    pub(super) fn over(inner: Arc<dyn File>, place: &Place) -> Arc<dyn File> {
        let place = place.clone();
        Arc::new(Self { inner, place, past_cache: OnceLock::new(), unreadable: Mutex::default() })
    }

    fn is_known(&self, range: &Range<u64>) -> bool {
        let known = self.unreadable.lock();
        known.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start)
    }

    /// Reads a part of one block.
    fn read_part(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let past_cache = self.past_cache.get_or_init(|| self.place.open(IoMode::Direct, Access::Read).ok());
        let Some(file) = past_cache else { return self.inner.read_at(buffer, offset) };
        let mut block = Buffer::zeroed(1);
        file.read_at(&mut block, offset / BLOCK * BLOCK)?;
        buffer.copy_from_slice(&block[(offset % BLOCK) as usize..][..buffer.len()]);
        Ok(())
    }

    fn note(&self, block: u64) {
        let mut known = self.unreadable.lock();
        let (start, end) = (block, block + BLOCK);
        let start = match known.range(..start).next_back() {
            Some((before, reached)) if *reached >= start => *before,
            _ => start,
        };
        let end = known.remove(&end).unwrap_or(end);
        known.insert(start, end);
    }
}

impl File for Remembering {
    backend::forward_file!(inner: len);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.saturating_add(buffer.len() as u64);
        let blocks = offset / BLOCK * BLOCK..end.next_multiple_of(BLOCK);
        if self.is_known(&blocks) {
            return Err(io::Error::other("a part of the file could not be read before"));
        }
        let Err(error) = self.inner.read_at(buffer, offset) else { return Ok(()) };
        let mut failed = false;
        for block in blocks.step_by(BLOCK_SIZE) {
            let part = (block.max(offset) - offset) as usize..((block + BLOCK).min(end) - offset) as usize;
            // Other blocks may be readable even if a read of several blocks fails.
            if self.read_part(&mut buffer[part], block.max(offset)).is_err() {
                self.note(block);
                failed = true;
            }
        }
        if failed { Err(error) } else { Ok(()) }
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn write_at(&self, _: &[&[u8]], _: u64, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn local(&self) -> Option<LocalPart<'_>> {
        // Without the descriptor, every read passes through `read_at`.
        self.inner.local().map(|local| LocalPart { descriptor: None, ..local })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use backend::simulated::{SimulatedDisk, SimulatedOptions};

    #[test]
    fn readable_blocks_are_read_around_unreadable_ones_and_these_are_tried_once() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let place = Place::plain(disk.directory(), "image");
        let file = disk.directory().create("image", IoMode::Buffered).unwrap();
        let content: Vec<u8> = (0..16 * BLOCK_SIZE).map(|at| (at / 512) as u8 | 1).collect();
        file.write_at(&[&content], 0, false).unwrap();
        disk.fail_reads("image", 5 * BLOCK..7 * BLOCK).unwrap();
        let file = Remembering::over(file, &place);
        let mut all = vec![0; content.len()];
        assert!(file.read_at(&mut all, 0).is_err());
        for block in 0..16 {
            let mut bytes = vec![0; BLOCK_SIZE];
            let read = file.read_at(&mut bytes, block * BLOCK);
            assert_eq!(read.is_ok(), !(5..7).contains(&block), "block {block}");
            assert!(read.is_err() || bytes == content[(block * BLOCK) as usize..][..BLOCK_SIZE], "block {block}");
        }
        let mut sectors = [0; 1024];
        assert!(file.read_at(&mut sectors, 5 * BLOCK - 1024).is_ok());
        assert!(file.read_at(&mut sectors, 5 * BLOCK - 512).is_err());
        assert!(file.write_at(&[&content], 0, false).is_err() && file.punch(0, 512).is_err());
    }
}
