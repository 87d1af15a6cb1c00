//! Which level stores a block of which no extent is cached any more: one byte per 4 KiB block. A random load may use
//! far more extents than the cache can have: with this table, a miss in a deep chain then queries one level, not half
//! of the levels.
//!
//! ```text
//! span   256 KiB of addresses: its number, how often it was used, and for each of its 64 blocks the number of a level,
//!        NO_LEVEL or UNKNOWN
//! set    four spans; a new span replaces the one used least
//! ```
//!
//! 1. A block's byte is the number of the newest level that stores any of the block, if that level stores all of it.
//!    The byte gives no file location: a lookup queries the level for it, so changes within a level do not make the
//!    byte stale.
//! 2. A block that is changed, or copied by a merge, becomes UNKNOWN. A lookup also treats a number as UNKNOWN if its
//!    stack has no such level.
//! 3. Memory is a fixed share of the memory that the extents may use ([`BYTES_PER_ENTRY`]), allocated at first use.

use super::SPAN;
use layer::SECTOR;

/// Bytes per block.
pub(crate) const BLOCK: u64 = 4096;
const BLOCK_SECTORS: u64 = BLOCK / SECTOR;
/// Blocks per span.
pub(crate) const SPAN_BLOCKS: usize = (SPAN / BLOCK) as usize;
const SPAN_SECTORS: u64 = SPAN / SECTOR;
/// Bytes of memory for each extent that the cache may have.
const BYTES_PER_ENTRY: usize = 10;
/// Spans per set.
const WAYS: usize = 4;
/// The number of uses from which on the survey of a span counts as useful.
const HELPS_TO_PAY: u8 = 3;

/// No level stores any part of the block.
pub(crate) const NO_LEVEL: u8 = 254;
/// The level is not known, or several levels store parts of the block.
pub(crate) const UNKNOWN: u8 = 255;

/// What is known about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// This level is the newest that stores any part of the range, and it stores the whole range.
    Level(u8),
    /// No level stores any part of the range.
    NoLevel,
    /// Only a walk can determine which level stores the range.
    Unknown,
    /// The span is not in the table; a survey of it may be useful.
    Missing,
}

#[derive(Clone)]
struct Span {
    /// Number of the span, counted from 1; 0 for an unused entry.
    number: u32,
    helped: u8,
    levels: [u8; SPAN_BLOCKS],
}

const EMPTY: Span = Span { number: 0, helped: 0, levels: [UNKNOWN; SPAN_BLOCKS] };

/// The spans of one shard.
#[derive(Clone, Default)]
pub(super) struct Holders {
    spans: Vec<Span>,
    sets: usize,
    /// The numbers of evicted spans with a useful survey, and of other evicted spans.
    pub(super) paid: u64,
    pub(super) wasted: u64,
}

fn number_of(sector: u64) -> u32 {
    (sector / SPAN_SECTORS) as u32 + 1
}

/// The blocks that a range of sectors within one span touches.
fn blocks(from: u64, to: u64) -> std::ops::Range<usize> {
    let first = from % SPAN_SECTORS;
    let last = (first + (to - from)).div_ceil(BLOCK_SECTORS);
    (first / BLOCK_SECTORS) as usize..(last as usize).min(SPAN_BLOCKS)
}

impl Holders {
    /// Sets the limit on extents of the whole cache of `shards` shards; drops everything.
    pub fn set_size(&mut self, entries: usize, shards: usize) {
        let spans = entries * BYTES_PER_ENTRY / size_of::<Span>() / shards;
        *self = Self { sets: spans / WAYS, paid: self.paid, wasted: self.wasted, ..Self::default() };
    }

    fn set_of(&self, number: u32) -> std::ops::Range<usize> {
        let hash = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let first = (hash as usize % self.sets.max(1)) * WAYS;
        first..first + WAYS
    }

    fn span_mut(&mut self, number: u32) -> Option<&mut Span> {
        if self.spans.is_empty() {
            return None;
        }
        let set = self.set_of(number);
        self.spans[set].iter_mut().find(|span| span.number == number)
    }

    /// Which level stores sectors `from..to`, which are in one span.
    pub fn get(&mut self, from: u64, to: u64) -> Holder {
        if self.sets == 0 {
            return Holder::Unknown;
        }
        let Some(span) = self.span_mut(number_of(from)) else { return Holder::Missing };
        let levels = &span.levels[blocks(from, to)];
        match levels.first() {
            Some(first) if *first != UNKNOWN && levels.iter().all(|level| level == first) => {
                span.helped = span.helped.saturating_add(1);
                if *first == NO_LEVEL { Holder::NoLevel } else { Holder::Level(*first) }
            }
            _ => Holder::Unknown,
        }
    }

    /// Inserts the result of a survey of the span of sector `from`.
    pub fn put(&mut self, from: u64, levels: &[u8; SPAN_BLOCKS]) {
        if self.sets == 0 {
            return;
        }
        if self.spans.is_empty() {
            self.spans = vec![EMPTY; self.sets * WAYS];
        }
        let number = number_of(from);
        let set = self.set_of(number);
        let set = &mut self.spans[set];
        let at = set.iter().position(|span| span.number == number);
        let at = at.or_else(|| (0..WAYS).min_by_key(|at| (set[*at].number != 0, set[*at].helped))).unwrap_or(0);
        let gone = &set[at];
        if gone.number != 0 && gone.number != number {
            if gone.helped >= HELPS_TO_PAY {
                self.paid += 1
            } else {
                self.wasted += 1
            }
            // Use counts are halved, so that a span used long ago can be evicted.
            set.iter_mut().for_each(|span| span.helped /= 2);
        }
        set[at] = Span { number, helped: 0, levels: *levels };
    }

    /// Records that `level` stores sectors `from..to`, if their span is in the table.
    pub fn learn(&mut self, from: u64, to: u64, level: u8) {
        if to - from > SPAN_SECTORS || !from.is_multiple_of(BLOCK_SECTORS) || number_of(from) != number_of(to - 1) {
            return;
        }
        let whole = from..to / BLOCK_SECTORS * BLOCK_SECTORS;
        if let Some(span) = self.span_mut(number_of(from))
            && !whole.is_empty()
        {
            span.levels[blocks(whole.start, whole.end)].fill(level);
        }
    }

    /// Makes sectors `from..to` unknown.
    pub fn forget(&mut self, from: u64, to: u64) {
        self.forget_where(from, to, |_| true);
    }

    /// Makes the blocks of sectors `from..to` whose level `wanted` selects unknown.
    pub fn forget_where(&mut self, from: u64, to: u64, wanted: impl Fn(u8) -> bool) {
        if self.spans.is_empty() || from >= to {
            return;
        }
        let forget = |span: &mut Span, from: u64, to: u64| {
            let levels = &mut span.levels[blocks(from, to)];
            levels.iter_mut().filter(|level| wanted(**level)).for_each(|level| *level = UNKNOWN);
        };
        if (to - from) / SPAN_SECTORS > self.spans.len() as u64 {
            for span in self.spans.iter_mut().filter(|span| span.number != 0) {
                let start = u64::from(span.number - 1) * SPAN_SECTORS;
                let (from, to) = (from.max(start), to.min(start + SPAN_SECTORS));
                if from < to {
                    forget(span, from, to);
                }
            }
            return;
        }
        let mut at = from;
        while at < to {
            let end = ((at / SPAN_SECTORS + 1) * SPAN_SECTORS).min(to);
            if let Some(span) = self.span_mut(number_of(at)) {
                forget(span, at, end);
            }
            at = end;
        }
    }

    /// Makes all blocks of level `number` unknown.
    pub fn purge(&mut self, number: u8) {
        let levels = self.spans.iter_mut().flat_map(|span| &mut span.levels);
        levels.filter(|level| **level == number).for_each(|level| *level = UNKNOWN);
    }

    /// Bytes of memory in use.
    pub fn memory(&self) -> usize {
        self.spans.capacity() * size_of::<Span>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holders() -> Holders {
        let mut holders = Holders::default();
        holders.set_size(65_536, 16);
        holders
    }

    #[test]
    fn holders_keep_survey_results_until_a_change() {
        let mut holders = holders();
        assert_eq!(holders.get(0, 8), Holder::Missing);
        let mut levels = [7; SPAN_BLOCKS];
        (levels[1], levels[2], levels[63]) = (UNKNOWN, NO_LEVEL, 9);
        holders.put(3 * SPAN_SECTORS + 17, &levels);
        let first = 3 * SPAN_SECTORS;
        assert_eq!(holders.get(first, first + 8), Holder::Level(7));
        assert_eq!(holders.get(first + 1, first + 2), Holder::Level(7), "a part of a block");
        assert_eq!(holders.get(first + 4, first + 12), Holder::Unknown, "two blocks, one of them unknown");
        assert_eq!(holders.get(first + 16, first + 24), Holder::NoLevel);
        assert_eq!(holders.get(first + 496, first + 512), Holder::Unknown, "two levels");
        assert_eq!(holders.get(first + 504, first + 512), Holder::Level(9));
        holders.learn(first + 8, first + 20, 5);
        assert_eq!(holders.get(first + 8, first + 16), Holder::Level(5));
        assert_eq!(holders.get(first + 16, first + 24), Holder::NoLevel, "not recorded from a part of a block");
        holders.forget(first + 511, first + 5000);
        assert_eq!(holders.get(first + 504, first + 512), Holder::Unknown);
        assert_eq!(holders.get(first + 496, first + 504), Holder::Level(7));
        holders.forget_where(first, first + 512, |level| level == 5);
        assert_eq!(holders.get(first + 8, first + 16), Holder::Unknown);
        let (mut wide, mut narrow) = (holders.clone(), holders.clone());
        wide.forget(first + 100, 1 << 37);
        narrow.forget(first + 100, first + 1000);
        for block in 0..SPAN_BLOCKS as u64 {
            let at = first + block * 8;
            assert_eq!(wide.get(at, at + 8), narrow.get(at, at + 8));
            assert_eq!(
                wide.get(at, at + 8) == holders.get(at, at + 8),
                at + 8 <= first + 100 || [1, 63].contains(&block),
                "{block}"
            );
        }
        holders.purge(7);
        assert_eq!(holders.get(first, first + 8), Holder::Unknown);
        assert_eq!(holders.get(first + 16, first + 24), Holder::NoLevel);
        assert_eq!(holders.get(first + 512, first + 520), Holder::Missing, "another span");
    }

    #[test]
    fn memory_is_bounded_and_used_entries_stay() {
        let mut holders = holders();
        holders.put(0, &[1; SPAN_BLOCKS]);
        for span in 1..100_000 {
            holders.put(span * SPAN_SECTORS, &[2; SPAN_BLOCKS]);
            assert_eq!(holders.get(0, 8), Holder::Level(1), "used between any two others");
        }
        assert!(holders.memory() <= 65_536 * BYTES_PER_ENTRY / 16);
        assert!(holders.wasted > 90_000 && holders.paid == 0);
        holders.set_size(0, 16);
        holders.put(0, &[1; SPAN_BLOCKS]);
        assert_eq!((holders.get(0, 8), holders.memory()), (Holder::Unknown, 0));
    }
}
