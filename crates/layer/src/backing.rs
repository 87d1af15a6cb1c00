//! File space for later writes of tables and directories. A commit writes tables and directories long after the writes
//! that changed them were acknowledged.
//!
//! 1. Before a format writes the payload of a change, it allocates the space of every table, bitmap or directory sector
//!    that the change will write. So a full file system refuses the write, and never the flush after it.
//! 2. Allocated ranges are remembered, and a repeated request costs a lookup. Code that frees space reports it
//!    ([`Backing::forget`]).
//! 3. Space is allocated in larger pieces around the requested range, where the format allows it. If the file system
//!    lacks the space for a piece, only the range is allocated.

use backend::File;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// The most ranges remembered, in 3 MiB of memory. When the limit is reached, all ranges are dropped; the space of a
/// dropped range is allocated again when the range is next requested.
const RANGES_MAX: usize = 1 << 16;

/// The ranges of one file that have space for certain.
#[derive(Default)]
pub(crate) struct Backing {
    /// The end of each range by its start; disjoint, never adjacent.
    known: Mutex<BTreeMap<u64, u64>>,
}

impl Backing {
    /// Allocates the space of `range`, and of all pieces of `piece` bytes that it touches if there is space for them.
    pub(crate) fn take(&self, file: &dyn File, range: Range<u64>, piece: u64) -> io::Result<()> {
        if range.is_empty() || self.has(&range) {
            return Ok(());
        }
        let wide = range.start / piece * piece..range.end.next_multiple_of(piece);
        let taken = match reserve(file, &wide) {
            Err(error) if error::lacks_space(&error) && wide != range => {
                reserve(file, &range)?;
                range
            }
            other => other.map(|()| wide)?,
        };
        self.note(taken);
        Ok(())
    }

    /// Drops `range`: its space was freed.
    pub(crate) fn forget(&self, range: Range<u64>) {
        let mut known = self.known.lock();
        let touched = known.range(..range.end).filter(|(_, end)| **end > range.start);
        let touched: Vec<(u64, u64)> = touched.map(|(start, end)| (*start, *end)).collect();
        for (start, end) in touched {
            known.remove(&start);
            if start < range.start {
                known.insert(start, range.start);
            }
            if end > range.end {
                known.insert(range.end, end);
            }
        }
    }

    fn has(&self, range: &Range<u64>) -> bool {
        let known = self.known.lock();
        known.range(..=range.start).next_back().is_some_and(|(_, end)| *end >= range.end)
    }

    fn note(&self, range: Range<u64>) {
        let mut known = self.known.lock();
        if known.len() >= RANGES_MAX {
            known.clear();
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&other, &other_end)) = known.range(..=end).next_back().filter(|(_, other)| **other >= start) {
            known.remove(&other);
            start = start.min(other);
            end = end.max(other_end);
        }
        known.insert(start, end);
    }
}

/// As [`File::reserve`]. On a file system that does not support reservations, success is returned, and a later write
/// may fail for lack of space.
fn reserve(file: &dyn File, range: &Range<u64>) -> io::Result<()> {
    match file.reserve(range.start, range.end - range.start) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::IoMode;
    use backend::simulated::{SimulatedDisk, SimulatedOptions};

    #[test]
    fn space_is_reserved_in_pieces_and_exactly_when_little_is_free() {
        let disk = SimulatedDisk::new(1, SimulatedOptions { capacity: 64 << 10, ..SimulatedOptions::default() });
        let file = disk.directory().create("f", IoMode::Buffered).unwrap();
        let backing = Backing::default();
        backing.take(&*file, 5000..6000, 16 << 10).unwrap();
        assert_eq!(file.allocated().unwrap(), 16 << 10);
        let operations = disk.operations();
        backing.take(&*file, 0..16 << 10, 1).unwrap();
        assert_eq!(disk.operations(), operations, "the page is known to have space");
        backing.take(&*file, 40 << 10..44 << 10, 32 << 10).unwrap();
        assert_eq!(file.allocated().unwrap(), 48 << 10);
        backing.take(&*file, 70 << 10..71 << 10, 64 << 10).unwrap();
        assert_eq!(file.allocated().unwrap(), 52 << 10, "only the requested page is reserved");
        let refused = backing.take(&*file, 128 << 10..256 << 10, 1).unwrap_err();
        assert!(error::lacks_space(&refused), "{refused}");
        // Space that was freed, and reported by `forget`, is allocated again.
        file.punch(0, 16 << 10).unwrap();
        backing.forget(0..16 << 10);
        backing.take(&*file, 0..4096, 1).unwrap();
        assert_eq!(file.allocated().unwrap(), 40 << 10);
        assert!(backing.has(&(32 << 10..64 << 10)) && !backing.has(&(4096..8192)));
    }

    #[test]
    fn adjacent_ranges_are_joined() {
        let backing = Backing::default();
        for (start, end) in [(10, 20), (30, 40), (20, 30), (5, 12), (100, 110)] {
            backing.note(start..end);
        }
        assert_eq!(*backing.known.lock(), BTreeMap::from([(5, 40), (100, 110)]));
        backing.forget(8..104);
        assert_eq!(*backing.known.lock(), BTreeMap::from([(5, 8), (104, 110)]));
    }
}
