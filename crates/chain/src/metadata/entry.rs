//! One cached extent in 16 bytes.
//!
//! ```text
//! key    63..27  first sector (37 bits: 64 TiB)     26..0   sectors (27 bits)
//! place  63..62  kind     61  used since the last sweep     60  prefetched and not used yet
//!        59..52  level    51..39  file (13 bits)              38..0   sector in the file (39 bits: 256 TiB)
//! ```
//!
//! An extent that does not fit (a higher file number, or an offset that is no multiple of a sector) is not cached.

use crate::mapping::{Mapping, To};
use layer::SECTOR;

const LENGTH_BITS: u32 = 27;
const LENGTH_MAX: u64 = (1 << LENGTH_BITS) - 1;
const START_MAX: u64 = (1 << 37) - 1;
const KIND_SHIFT: u32 = 62;
const SEEN: u64 = 1 << 61;
const PREFETCHED: u64 = 1 << 60;
const LEVEL_SHIFT: u32 = 52;
const FILE_SHIFT: u32 = 39;
const FILE_MAX: u16 = (1 << 13) - 1;
const SECTOR_MASK: u64 = (1 << FILE_SHIFT) - 1;

const ABSENT: u64 = 0;
const ZERO: u64 = 1;
const DATA: u64 = 2;
const ENCODED: u64 = 3;

/// A resolved extent. Starts and lengths are in sectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CachedExtent {
    key: u64,
    place: u64,
}

const _: () = assert!(size_of::<CachedExtent>() == 16);

impl CachedExtent {
    /// The entry for an extent that begins at a sector; an incomplete last sector counts as one.
    pub fn new(mapping: &Mapping) -> Option<Self> {
        let (start, length) = (mapping.start / SECTOR, mapping.length.div_ceil(SECTOR));
        if !mapping.start.is_multiple_of(SECTOR) || start > START_MAX || length == 0 || length > LENGTH_MAX {
            return None;
        }
        let place = match mapping.to {
            To::Absent => ABSENT << KIND_SHIFT,
            To::Zero => ZERO << KIND_SHIFT,
            To::Encoded { level } => ENCODED << KIND_SHIFT | u64::from(level) << LEVEL_SHIFT,
            To::Data { level, file, offset } => {
                let sector = offset / SECTOR;
                if !offset.is_multiple_of(SECTOR) || sector + length > SECTOR_MASK || file > FILE_MAX {
                    return None;
                }
                DATA << KIND_SHIFT | u64::from(level) << LEVEL_SHIFT | u64::from(file) << FILE_SHIFT | sector
            }
        };
        Some(Self { key: start << LENGTH_BITS | length, place })
    }

    pub fn start(self) -> u64 {
        self.key >> LENGTH_BITS
    }

    pub fn length(self) -> u64 {
        self.key & LENGTH_MAX
    }

    pub fn end(self) -> u64 {
        self.start() + self.length()
    }

    fn kind(self) -> u64 {
        self.place >> KIND_SHIFT
    }

    /// The number of the level that stores the extent.
    pub fn level(self) -> Option<u8> {
        (self.kind() >= DATA).then_some((self.place >> LEVEL_SHIFT) as u8)
    }

    /// The extent, in bytes.
    pub fn mapping(self) -> Mapping {
        let level = (self.place >> LEVEL_SHIFT) as u8;
        let to = match self.kind() {
            ABSENT => To::Absent,
            ZERO => To::Zero,
            DATA => {
                let file = (self.place >> FILE_SHIFT) as u16 & FILE_MAX;
                To::Data { level, file, offset: (self.place & SECTOR_MASK) * SECTOR }
            }
            _ => To::Encoded { level },
        };
        Mapping { start: self.start() * SECTOR, length: self.length() * SECTOR, to }
    }

    /// The part of the entry from sector `from` up to `to`. The entry must contain all these sectors.
    pub fn part(self, from: u64, to: u64) -> Self {
        let by = if self.kind() == DATA { from - self.start() } else { 0 };
        Self { key: from << LENGTH_BITS | (to - from), place: self.place + by }
    }

    /// Both entries as one, if `next` continues this one. The use of either counts as a use of the joined entry.
    pub fn joined(self, next: Self) -> Option<Self> {
        let flags = SEEN | PREFETCHED;
        let length = self.length() + next.length();
        let by = if self.kind() == DATA { self.length() } else { 0 };
        if self.end() != next.start() || length > LENGTH_MAX || (self.place & !flags) + by != next.place & !flags {
            return None;
        }
        Some(Self { key: self.start() << LENGTH_BITS | length, place: self.place | (next.place & flags) })
    }

    pub fn seen(self) -> bool {
        self.place & SEEN != 0
    }

    pub fn set_seen(&mut self, seen: bool) {
        self.place = if seen { self.place | SEEN } else { self.place & !SEEN };
    }

    pub fn prefetched(self) -> bool {
        self.place & PREFETCHED != 0
    }

    pub fn set_prefetched(&mut self, prefetched: bool) {
        self.place = if prefetched { self.place | PREFETCHED } else { self.place & !PREFETCHED };
    }
}
