//! Unflushed changes of a simulated file, and which of them a power cut keeps.
//!
//! 1. Changes are kept, and become durable, in the order in which they were made.
//! 2. A durable write that overlaps unflushed changes is queued behind them, marked `forced`: a power cut always
//!    applies it, after the earlier changes that it keeps, so that no older data overwrites it. If the write were
//!    applied to the durable content at once, an earlier change that the cut keeps would overwrite it.

use super::content::{Content, PAGE};
use std::collections::VecDeque;
use std::sync::Arc;

/// The unit that a disk writes completely or not at all.
pub(super) const SECTOR: u64 = 512;

/// Bytes of unflushed writes per file beyond which the oldest are written back.
const UNFLUSHED_BYTES_MAX: usize = 64 << 20;

/// A small seeded generator (splitmix64).
#[derive(Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, or zero.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub(super) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// A second generator. Numbers drawn from one generator do not change the sequence of the other.
    pub(super) fn fork(&mut self) -> Self {
        Self(self.next())
    }
}

/// The probabilities, in percent, with which a power cut keeps unflushed changes. They are drawn anew for each cut,
/// because cuts that keep all changes, or none, reveal other faults than cuts that keep some.
#[derive(Clone, Copy)]
pub(super) struct Fate {
    pub(super) keep: u64,
    pub(super) tear: u64,
}

impl Fate {
    pub(super) fn draw(random: &mut Random) -> Self {
        let (keep, tear) = match random.below(8) {
            0 => (0, 0),
            1 => (100, 0),
            2 => (50, 0),
            3 => (95, 0),
            4 => (5, 0),
            5 => (0, 100),
            _ => (random.below(101), random.below(101)),
        };
        Self { keep, tear }
    }
}

/// One change of a file.
#[derive(Clone)]
pub(super) enum Change {
    Write { offset: u64, bytes: Arc<[u8]>, forced: bool },
    SetLength(u64),
    Reserve { offset: u64, length: u64 },
    Punch { offset: u64, length: u64 },
    ZeroRange { offset: u64, length: u64 },
}

impl Change {
    /// Applies the complete change.
    pub(super) fn apply(&self, content: &mut Content) {
        match self {
            Self::Write { offset, bytes, .. } => content.write(*offset, bytes),
            Self::SetLength(length) => content.set_length(*length),
            Self::Reserve { offset, length } => content.reserve(*offset, *length),
            Self::Punch { offset, length } => content.punch(*offset, *length),
            Self::ZeroRange { offset, length } => content.zero_range(*offset, *length),
        }
    }

    /// Applies the part of the change that a power cut keeps. [`Content::settle`] has to follow the last change.
    fn apply_cut(&self, content: &mut Content, fate: Fate, random: &mut Random) {
        match self {
            Self::Write { forced: true, .. } => self.apply(content),
            Self::Write { offset, bytes, .. } => {
                for (at, part) in self.survivors(fate, random) {
                    content.write_within(at, part);
                }
                // The new length is metadata, which is kept or lost separately.
                if random.percent(fate.keep.max(fate.tear)) {
                    content.grow(*offset + bytes.len() as u64);
                }
            }
            Self::Punch { offset, length } if random.percent(fate.tear) => {
                // Up to a random page: file systems free whole pages, and do a long punch in several steps.
                let reached = (*offset + random.below(*length + 1)) / PAGE * PAGE;
                content.punch(*offset, reached.saturating_sub(*offset));
            }
            Self::ZeroRange { offset, length } if random.percent(fate.tear) => {
                let reached = (*offset + random.below(*length + 1)) / PAGE * PAGE;
                content.zero_range(*offset, reached.saturating_sub(*offset));
            }
            _ if random.percent(fate.keep) => self.apply(content),
            _ => {}
        }
    }

    /// The runs of sectors of a write that survive a power cut: all, none, or any.
    pub(super) fn survivors(&self, fate: Fate, random: &mut Random) -> Vec<(u64, &[u8])> {
        let Self::Write { offset, bytes, .. } = self else { return Vec::new() };
        if !random.percent(fate.tear) {
            return if random.percent(fate.keep) { vec![(*offset, bytes)] } else { Vec::new() };
        }
        let mut parts = Vec::new();
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let part = ((SECTOR - at % SECTOR) as usize).min(bytes.len() - done);
            if random.percent(50) {
                parts.push((at, &bytes[done..done + part]));
            }
            done += part;
        }
        parts
    }

    /// Whether a write of the range gives the same outcome before this change and after it.
    fn commutes_with_write(&self, start: u64, end: u64) -> bool {
        let apart = |offset: u64, length: u64| end <= offset || offset + length <= start;
        match self {
            Self::Write { offset, bytes, .. } => apart(*offset, bytes.len() as u64),
            Self::Punch { offset, length } | Self::ZeroRange { offset, length } => apart(*offset, *length),
            Self::Reserve { .. } => true,
            Self::SetLength(_) => false,
        }
    }

    fn weight(&self) -> usize {
        match self {
            Self::Write { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }
}

/// The durable content of a file, with the unflushed changes that a power cut may keep or lose.
#[derive(Clone, Default)]
pub(super) struct Persistence {
    durable: Content,
    unflushed: VecDeque<Change>,
    unflushed_bytes: usize,
}

impl Persistence {
    /// A file of which everything is durable.
    pub(super) fn settled(durable: Content) -> Self {
        Self { durable, ..Self::default() }
    }

    /// Adds a change; beyond `max` changes the oldest become durable.
    pub(super) fn push(&mut self, change: Change, max: usize) {
        self.unflushed_bytes += change.weight();
        self.unflushed.push_back(change);
        while self.unflushed.len() > max || self.unflushed_bytes > UNFLUSHED_BYTES_MAX {
            let Some(oldest) = self.unflushed.pop_front() else { return };
            self.unflushed_bytes -= oldest.weight();
            oldest.apply(&mut self.durable);
        }
    }

    /// Adds a write that is durable at once.
    pub(super) fn push_durable(&mut self, offset: u64, bytes: Arc<[u8]>, max: usize) {
        let end = offset + bytes.len() as u64;
        if self.unflushed.iter().all(|change| change.commutes_with_write(offset, end)) {
            self.durable.write(offset, &bytes);
        } else {
            self.push(Change::Write { offset, bytes, forced: true }, max);
        }
    }

    /// Makes everything durable.
    pub(super) fn flush(&mut self) {
        for change in self.unflushed.drain(..) {
            change.apply(&mut self.durable);
        }
        self.unflushed_bytes = 0;
    }

    /// A failed flush: some changes become durable at random, and no later flush writes the others.
    pub(super) fn flush_failed(&mut self, fate: Fate, random: &mut Random) {
        self.durable = self.after_cut(fate, random);
        self.unflushed.clear();
        self.unflushed_bytes = 0;
    }

    /// The content that survives every power cut.
    pub(super) fn durable(&self) -> &Content {
        &self.durable
    }

    /// What reads see when the page cache holds only unflushed data.
    pub(super) fn with_unflushed(&self) -> Content {
        let mut content = self.durable.clone();
        self.unflushed.iter().for_each(|change| change.apply(&mut content));
        content
    }

    /// One outcome of a power cut now.
    pub(super) fn after_cut(&self, fate: Fate, random: &mut Random) -> Content {
        let mut content = self.durable.clone();
        for change in &self.unflushed {
            change.apply_cut(&mut content, fate, random);
        }
        content.settle();
        content
    }

    /// Inverts a bit in the durable content and in every unflushed change.
    pub(super) fn flip_bit(&mut self, at: u64, bit: u8) {
        self.durable.flip_bit(at, bit);
        for change in &mut self.unflushed {
            if let Change::Write { offset, bytes, .. } = change
                && let Some(within) = at.checked_sub(*offset)
                && within < bytes.len() as u64
            {
                Arc::make_mut(bytes)[within as usize] ^= 1 << (bit % 8);
            }
        }
    }
}
