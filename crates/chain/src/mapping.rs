//! Where a range of bytes of the chain is stored.

use layer::Content;

/// The content of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    /// No level stores the range: it reads as zeros.
    Absent,
    /// A level records zeros.
    Zero,
    /// Stored data.
    Data {
        /// Number of the level, see [`crate::levels::Identity`].
        level: u8,
        /// Index of the file in that level.
        file: u16,
        /// Byte offset in the file.
        offset: u64,
    },
    /// Data that the level has to decode.
    Encoded {
        /// Number of the level.
        level: u8,
    },
}

impl To {
    /// Translates a level's answer; `None` for a range that the level does not store.
    pub fn of(content: Content, level: u8) -> Option<Self> {
        match content {
            Content::Absent => None,
            Content::Zero => Some(Self::Zero),
            Content::Data { file, offset } => Some(Self::Data { level, file, offset }),
            Content::Encoded => Some(Self::Encoded { level }),
        }
    }

    /// The number of the level to which the mapping refers.
    pub fn level(self) -> Option<u8> {
        match self {
            Self::Absent | Self::Zero => None,
            Self::Data { level, .. } | Self::Encoded { level } => Some(level),
        }
    }

    /// The mapping of the byte that is `by` bytes after the first one.
    pub fn advanced(self, by: u64) -> Self {
        match self {
            Self::Data { level, file, offset } => Self::Data { level, file, offset: offset.saturating_add(by) },
            other => other,
        }
    }

    /// True when the range reads as zeros without I/O.
    pub fn is_zero(self) -> bool {
        matches!(self, Self::Absent | Self::Zero)
    }
}

/// A range of bytes with its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub start: u64,
    pub length: u64,
    pub to: To,
}

impl Mapping {
    pub fn end(&self) -> u64 {
        self.start + self.length
    }

    /// True when `next` continues this range without a break.
    pub fn continues(&self, next: &Mapping) -> bool {
        self.end() == next.start && self.to.advanced(self.length) == next.to
    }

    /// The part within `start..end`, which must overlap this range.
    pub fn clipped(&self, start: u64, end: u64) -> Self {
        let from = self.start.max(start);
        Self { start: from, length: self.end().min(end) - from, to: self.to.advanced(from - self.start) }
    }
}

/// Appends a range, joined with the last range if the new range continues it.
pub(crate) fn push(out: &mut Vec<Mapping>, next: Mapping) {
    match out.last_mut() {
        Some(last) if last.continues(&next) => last.length += next.length,
        _ => out.push(next),
    }
}

/// A set of level numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Numbers([u64; 4]);

impl Numbers {
    pub fn insert(&mut self, number: u8) {
        self.0[number as usize / 64] |= 1 << (number % 64);
    }

    pub fn contains(&self, number: u8) -> bool {
        self.0[number as usize / 64] >> (number % 64) & 1 == 1
    }
}
