//! Combining the two copies of a grain table: which entries agree, which copy is provably wrong, and what stays in
//! doubt.
//!
//! An entry is provably wrong if no grain can be at its sector: outside the file, among the metadata, not aligned like
//! all other grains of the table, or at a sector that both copies give to another grain of the table. Then the other
//! copy's entry is right. If neither entry is provably wrong, neither is chosen: reading such a grain is an error,
//! because a guess would return wrong data in half of the cases. Two cases need no choice: both entries mean zeros and
//! the image has no parent; and an image that was not closed, in which a crash may have left each entry old or new.

use super::directory::{ENTRY_ABSENT, ENTRY_BAD, ENTRY_ZERO};
use rustc_hash::FxHashSet;

/// Which entries of a grain table are possible, and how differing copies are treated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// The first sector at which a grain can be.
    pub(super) first: u64,
    pub(super) zero_grains: bool,
    /// Alignment of the grains in sectors, as far as known.
    pub(super) alignment: u64,
    /// Whether both copies are read and compared. In a stream the primary is used unless it is damaged.
    pub(super) compare: bool,
    /// Whether absent grains are read from a parent.
    pub(super) parent: bool,
    /// Whether one of two differing possible entries is chosen: after a crash, or because the caller forces the
    /// primary.
    pub(super) lenient: bool,
}

impl Rules {
    pub(super) fn allow(&self, entry: u32, file_sectors: u64) -> bool {
        match entry {
            ENTRY_ABSENT => true,
            ENTRY_ZERO if self.zero_grains => true,
            ENTRY_BAD => false,
            // The last grain may be cut at the end of the file: the missing part reads as zeros.
            place => u64::from(place) >= self.first && u64::from(place) < file_sectors,
        }
    }

    /// Whether an entry names a sector in the file.
    pub(super) fn is_place(&self, entry: u32) -> bool {
        entry != ENTRY_ABSENT && entry != ENTRY_BAD && !(entry == ENTRY_ZERO && self.zero_grains)
    }
}

/// An entry for which neither copy is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Doubt {
    pub(super) at: usize,
    /// The entry of each copy, primary first.
    pub(super) entries: [u32; 2],
    /// Whether the entry of each copy is possible: not provably wrong.
    pub(super) possible: [bool; 2],
}

/// The combined copies of a table.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    /// The right entries; [`ENTRY_BAD`] for those in doubt.
    pub(super) entries: Vec<u32>,
    pub(super) doubts: Vec<Doubt>,
    /// Number of entries that are provably wrong in each copy, while the other copy is right.
    pub(super) wrong: [usize; 2],
    /// Number of entries that were chosen although both copies are possible.
    pub(super) taken: usize,
}

/// The entry to use if the copies differ and both entries are possible; `None` if the right entry is in doubt.
pub(super) fn same_or_lenient(rules: &Rules, [primary, redundant]: [u32; 2]) -> Option<u32> {
    let (placed, other) = (rules.is_place(primary), rules.is_place(redundant));
    match (placed, other) {
        (false, false) if !rules.parent => Some(primary),
        // After a crash both the old and the new entry are right. If there was no crash, an entry that names data is
        // the safer choice: dropping it would lose data.
        (false, true) if rules.lenient => Some(redundant),
        _ if rules.lenient => Some(primary),
        _ => None,
    }
}

/// Combines two copies that were both read.
pub(super) fn merge(rules: &Rules, primary: &[u32], redundant: &[u32], file_sectors: u64) -> Merged {
    let allow = |entry| rules.allow(entry, file_sectors);
    if primary == redundant && primary.iter().all(|entry| allow(*entry)) {
        return Merged { entries: primary.to_vec(), ..Merged::default() };
    }
    let pairs = || primary.iter().copied().zip(redundant.iter().copied());
    let agreed = || pairs().filter(|(one, other)| one == other && rules.is_place(*one) && allow(*one));
    let aligned = |entry: u32| u64::from(entry).is_multiple_of(rules.alignment);
    let all_aligned = agreed().all(|(place, _)| aligned(place));
    let taken: FxHashSet<u32> = agreed().map(|(place, _)| place).collect();
    let possible = |entry: u32| {
        allow(entry) && (!rules.is_place(entry) || ((!all_aligned || aligned(entry)) && !taken.contains(&entry)))
    };
    let mut merged = Merged::default();
    for (at, (one, other)) in pairs().enumerate() {
        let can = match one == other {
            true => [allow(one); 2],
            false => [possible(one), possible(other)],
        };
        let entry = match can {
            [true, true] if one == other => Some(one),
            [true, true] => {
                let entry = same_or_lenient(rules, [one, other]);
                merged.taken += usize::from(entry.is_some());
                entry
            }
            [true, false] => {
                merged.wrong[1] += 1;
                Some(one)
            }
            [false, true] => {
                merged.wrong[0] += 1;
                Some(other)
            }
            [false, false] => None,
        };
        if entry.is_none() {
            merged.doubts.push(Doubt { at, entries: [one, other], possible: can });
        }
        merged.entries.push(entry.unwrap_or(ENTRY_BAD));
    }
    merged
}

/// A table of which only one copy could be read.
pub(super) fn alone(rules: &Rules, entries: Vec<u32>, file_sectors: u64) -> Merged {
    let mut merged = Merged { entries, ..Merged::default() };
    for (at, entry) in merged.entries.iter_mut().enumerate() {
        if !rules.allow(*entry, file_sectors) {
            merged.doubts.push(Doubt { at, entries: [*entry; 2], possible: [false; 2] });
            *entry = ENTRY_BAD;
        }
    }
    merged
}
