//! The 8-byte entries of grain directory, grain tables and backmap, and types for the grains and tables that they name.
//!
//! A number from a file becomes one of these types only through `decode`, which refuses invalid values. The caller
//! checks that the grain or table lies within its area.

use std::ops::Range;

/// Bytes of a grain.
pub(super) const GRAIN: u64 = 4096;
/// Entries of a grain table.
pub(super) const TABLE_ENTRIES: u64 = 4096;
/// Bytes of guest data that a table maps: 16 MiB.
pub(super) const TABLE_SPAN: u64 = TABLE_ENTRIES * GRAIN;

const KIND_SHIFT: u32 = 60;
const IN_USE: u64 = 1 << KIND_SHIFT;
/// Shift of the low twelve bits of a grain's number in a table entry, and of an entry's number in the backmap.
const TWELVE_SHIFT: u32 = 48;
const TWELVE: u64 = 0xfff;
const LOW: u64 = (1 << TWELVE_SHIFT) - 1;

/// Number of a grain in the grain area, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Grain(pub u64);

/// Number of a grain table in the table area, counted from 0. Not the directory slot that names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Table(pub u32);

/// Adjacent grains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GrainRun {
    pub start: u64,
    pub count: u64,
}

impl GrainRun {
    pub(super) fn end(self) -> u64 {
        self.start + self.count
    }
}

impl From<Range<u64>> for GrainRun {
    fn from(grains: Range<u64>) -> Self {
        Self { start: grains.start, count: grains.end - grains.start }
    }
}

/// A table entry: the state of a grain of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Absent: the parent's content.
    Absent,
    /// Discarded by the guest: reads as zeros. lamina never writes such entries; other bits in them may name an earlier
    /// grain and have no meaning.
    Unmapped,
    /// Zeros that hide the parent.
    Zero,
    /// Stored in a grain of the file.
    Data(Grain),
}

impl Entry {
    /// Returns `None` for an invalid value.
    #[inline]
    pub(super) fn decode(raw: u64) -> Option<Self> {
        match raw >> KIND_SHIFT {
            0 if raw == 0 => Some(Self::Absent),
            1 => Some(Self::Unmapped),
            2 => Some(Self::Zero),
            3 => Some(Self::Data(Grain((raw >> TWELVE_SHIFT & TWELVE) | (raw & LOW) << 12))),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn encode(self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Unmapped => 1 << KIND_SHIFT,
            Self::Zero => 2 << KIND_SHIFT,
            Self::Data(Grain(grain)) => 3 << KIND_SHIFT | (grain & TWELVE) << TWELVE_SHIFT | grain >> 12,
        }
    }
}

/// Decodes a slot of the grain directory: the table that maps its 16 MiB, if any. The outer `None` is for invalid
/// values.
pub(super) fn decode_slot(raw: u64) -> Option<Option<Table>> {
    match raw {
        0 => Some(None),
        _ if raw >> 32 == IN_USE >> 32 => Some(Some(Table(raw as u32))),
        _ => None,
    }
}

pub(super) fn encode_slot(table: Table) -> u64 {
    IN_USE | u64::from(table.0)
}

/// The table entry that names a grain, according to the backmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Owner {
    pub table: Table,
    /// The number of the entry in its table, below 4,096.
    pub entry: u16,
}

impl Owner {
    /// Returns `None` for a grain without an owner, and for an invalid value.
    pub(super) fn decode(raw: u64) -> Option<Self> {
        let table = u32::try_from(raw & LOW).ok()?;
        let entry = (raw >> TWELVE_SHIFT & TWELVE) as u16;
        (raw >> KIND_SHIFT == 1).then_some(Self { table: Table(table), entry })
    }

    pub(super) fn encode(self) -> u64 {
        IN_USE | u64::from(self.entry) << TWELVE_SHIFT | u64::from(self.table.0)
    }
}
