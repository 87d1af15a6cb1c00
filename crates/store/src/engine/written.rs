//! When the parts of a disk were last written, for passes that process a part once it has not been written for a while.
//!
//! ```text
//!            write                   a pass takes it          the pass has processed it
//!  (clean) ---------> written, a stamp ---------------> (clean) ------------------------->
//!                          ^                               |
//!                          +-------------------------------+  the pass ends before, or another write
//! ```
//!
//! 1. A write sets the stamp of its parts after its data is in the buffer or in the map. A pass takes parts first, and
//!    then brings what is buffered into the map. So every write is in the map that the pass processes, or its part has
//!    a stamp when the pass has ended.
//! 2. A part that was taken and not processed gets its stamp back.
//! 3. The record is in memory only. In a new one all parts count as written at its beginning.
//! 4. Each [`Purpose`] has a record of its own, so passes for one of them take nothing from those for the other. Passes
//!    for one may leave the parts that those for the other have not processed yet.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::time::Instant;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Blocks of the smallest part (1 MiB): a multiple of the blocks that are packed together.
const PART_MIN: u64 = 256;
/// Most parts of a disk (256 KiB of stamps).
const PARTS_MAX: u64 = 1 << 15;

/// For what a pass needs to know which parts were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To store equal blocks once.
    Sharing,
    /// To compress blocks.
    Packing,
}

impl Purpose {
    /// The number of purposes.
    pub(super) const COUNT: usize = 2;
}

/// The record for one disk and one purpose.
pub struct Written {
    began: Instant,
    /// Blocks of the disk.
    blocks: u64,
    /// Blocks of a part.
    part: u64,
    /// For each part 0, or the time of the last write in milliseconds since `began`, from 1 on. The last part reaches
    /// to the end of the disk, also if the disk has grown.
    stamps: Vec<AtomicU64>,
}

impl Written {
    /// A record for a disk of that many blocks.
    pub(super) fn new(blocks: u64) -> Arc<Self> {
        let part = blocks.div_ceil(PARTS_MAX).next_power_of_two().max(PART_MIN);
        let stamps = (0..blocks.div_ceil(part).max(1)).map(|_| AtomicU64::new(1)).collect();
        Arc::new(Self { began: Instant::now(), blocks, part, stamps })
    }

    /// Whether the parts are small enough for a disk of that many blocks.
    pub(super) fn is_for(&self, blocks: u64) -> bool {
        blocks <= self.blocks
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
    }

    /// Records that a write of these blocks has ended.
    pub(super) fn note(&self, blocks: &Range<u64>) {
        let Some(last) = blocks.end.checked_sub(1).filter(|last| *last >= blocks.start) else { return };
        let index = |block: u64| ((block / self.part) as usize).min(self.stamps.len() - 1);
        let now = self.now();
        self.stamps[index(blocks.start)..=index(last)].iter().for_each(|stamp| stamp.store(now, Ordering::Release));
    }

    /// Whether the stamp is that of a part that was written at least `age` before `now`.
    fn is_cold(stamp: u64, now: u64, age: Duration) -> bool {
        stamp > 0 && u128::from(now.saturating_sub(stamp)) >= age.as_millis()
    }

    /// Takes the parts that were written, but not in the last `age`, and that the record `first` does not have.
    pub fn take_cold(self: &Arc<Self>, age: Duration, first: Option<&Self>) -> ColdParts {
        let now = self.now();
        let mut parts = VecDeque::new();
        for (index, stamp) in self.stamps.iter().enumerate() {
            if !Self::is_cold(stamp.load(Ordering::Acquire), now, age) || self.is_in(index, first) {
                continue;
            }
            match stamp.swap(0, Ordering::AcqRel) {
                taken if Self::is_cold(taken, now, age) => parts.push_back((index, taken)),
                newer => drop(stamp.fetch_max(newer, Ordering::AcqRel)),
            }
        }
        ColdParts { written: Arc::clone(self), parts }
    }

    /// Whether [`Written::take_cold`] would take a part.
    pub fn has_cold(&self, age: Duration, first: Option<&Self>) -> bool {
        let now = self.now();
        let is_cold = |stamp: &AtomicU64| Self::is_cold(stamp.load(Ordering::Relaxed), now, age);
        self.stamps.iter().enumerate().any(|(index, stamp)| is_cold(stamp) && !self.is_in(index, first))
    }

    /// Whether the other record has a stamp within this part. The parts of the two records may have other sizes.
    fn is_in(&self, index: usize, other: Option<&Self>) -> bool {
        let Some(other) = other else { return false };
        let Range { start, end } = self.range(index, u64::MAX);
        let of_block = |block: u64| ((block / other.part) as usize).min(other.stamps.len() - 1);
        let stamps = &other.stamps[of_block(start)..=of_block(end - 1)];
        stamps.iter().any(|stamp| stamp.load(Ordering::Acquire) > 0)
    }

    /// Blocks of the parts that were written and not processed since, of a disk of that many blocks.
    pub fn unprocessed(&self, blocks: u64) -> u64 {
        let written = self.stamps.iter().enumerate().filter(|(_, stamp)| stamp.load(Ordering::Relaxed) > 0);
        written.map(|(index, _)| self.range(index, blocks)).map(|range| range.end - range.start).sum()
    }

    /// The part of a disk of that many blocks. A part past the end is empty.
    fn range(&self, index: usize, blocks: u64) -> Range<u64> {
        let start = (index as u64 * self.part).min(blocks);
        let end = if index + 1 == self.stamps.len() { blocks } else { (start + self.part).min(blocks) };
        start..end
    }
}

/// Parts that a pass has taken. When this value is dropped, those that were not processed get their stamps back.
pub struct ColdParts {
    written: Arc<Written>,
    parts: VecDeque<(usize, u64)>,
}

impl ColdParts {
    /// The next part, of a disk of that many blocks.
    pub fn first(&self, blocks: u64) -> Option<Range<u64>> {
        self.parts.front().map(|(index, _)| self.written.range(*index, blocks))
    }

    /// Called when the next part was processed.
    pub fn processed(&mut self) {
        self.parts.pop_front();
    }

    /// Called when all parts were processed.
    pub fn all_processed(mut self) {
        self.parts.clear();
    }

    /// The parts that remain, of a disk of that many blocks.
    pub fn all(&self, blocks: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        self.parts.iter().map(move |(index, _)| self.written.range(*index, blocks))
    }

    /// Blocks of the parts that remain, of a disk of that many blocks.
    pub fn blocks(&self, blocks: u64) -> u64 {
        self.all(blocks).map(|range| range.end - range.start).sum()
    }
}

impl Drop for ColdParts {
    fn drop(&mut self) {
        for (index, stamp) in &self.parts {
            self.written.stamps[*index].fetch_max(*stamp, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const NONE: Duration = Duration::ZERO;

    fn taken(parts: &mut ColdParts, blocks: u64) -> Vec<Range<u64>> {
        std::iter::from_fn(|| {
            let part = parts.first(blocks)?;
            parts.processed();
            Some(part)
        })
        .collect()
    }

    #[test]
    fn a_part_is_taken_once_after_each_write() {
        let blocks = 3 * PART_MIN + 7;
        let written = Written::new(blocks);
        let whole = [0..256, 256..512, 512..768, 768..775];
        assert_eq!(written.unprocessed(blocks), blocks);
        let mut parts = written.take_cold(NONE, None);
        assert_eq!((parts.blocks(blocks), taken(&mut parts, blocks)), (blocks, whole.to_vec()));
        assert!(!written.has_cold(NONE, None) && written.unprocessed(blocks) == 0);
        written.note(&(255..257));
        written.note(&(300..300));
        assert!(written.has_cold(NONE, None) && !written.has_cold(Duration::from_secs(3600), None));
        assert_eq!(written.take_cold(Duration::from_secs(3600), None).first(blocks), None);
        assert_eq!(taken(&mut written.take_cold(NONE, None), blocks), whole[..2]);
        // What is past the end counts as a part of the last one, for a disk that has grown.
        written.note(&(blocks + 1000..blocks + 1001));
        assert_eq!(taken(&mut written.take_cold(NONE, None), blocks + 2000), [Range { start: 768, end: 2775 }]);
    }

    #[test]
    fn parts_that_were_not_processed_are_taken_again() {
        let blocks = 4 * PART_MIN;
        let written = Written::new(blocks);
        let mut parts = written.take_cold(NONE, None);
        parts.processed();
        // A write while the pass runs.
        written.note(&(0..1));
        drop(parts);
        assert_eq!(taken(&mut written.take_cold(NONE, None), blocks), [0..256, 256..512, 512..768, 768..1024]);
    }

    #[test]
    fn parts_that_another_record_has_are_left_to_its_passes() {
        let blocks = 4 * PART_MIN;
        // The other record was made for a larger disk, so its parts are larger.
        let (packing, sharing) = (Written::new(blocks), Written::new(PARTS_MAX * PART_MIN * 2));
        assert!(packing.has_cold(NONE, None) && !packing.has_cold(NONE, Some(&sharing)));
        assert_eq!(packing.take_cold(NONE, Some(&sharing)).first(blocks), None);
        sharing.take_cold(NONE, None).all_processed();
        sharing.note(&(600..601));
        assert!(packing.has_cold(NONE, Some(&sharing)));
        assert_eq!(taken(&mut packing.take_cold(NONE, Some(&sharing)), blocks), [0..256, 256..512]);
        assert!(!packing.has_cold(NONE, Some(&sharing)) && packing.has_cold(NONE, None));
        // The last part of a record reaches to the end of the disk.
        sharing.take_cold(NONE, None).all_processed();
        packing.take_cold(NONE, Some(&sharing)).all_processed();
        packing.note(&(1023..1024));
        sharing.note(&(5000..5001));
        assert!(!packing.has_cold(NONE, Some(&sharing)));
        drop(sharing.take_cold(NONE, None));
        assert!(!packing.has_cold(NONE, Some(&sharing)), "a pass that processed nothing");
    }

    #[test]
    fn the_memory_for_a_large_disk_is_limited() {
        let blocks = (64 << 40) / 4096;
        let written = Written::new(blocks);
        assert_eq!((written.stamps.len() as u64, written.part % PART_MIN), (PARTS_MAX, 0));
        assert_eq!(written.unprocessed(blocks), blocks);
        assert_eq!(written.unprocessed(blocks / 2), blocks / 2, "the disk was made smaller");
        assert_eq!(Written::new(0).unprocessed(0), 0);
    }
}
