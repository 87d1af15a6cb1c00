//! Hints: where a block with a checksum may be stored. With them, new data is found that is stored already.
//!
//! A hint has the checksum, the disk and the logical block. It was right when it was noted, and is not kept up to date:
//! each use looks the block up in the map, and compares the content. So hints need no recovery, and may be lost
//! at any time. They are in memory only, in a table of a fixed size. A new hint replaces an arbitrary one when there is
//! no room.
//!
//! A hint is of use only to disks that belong to the same domain as its disk. A disk that leaves its domain and returns
//! gets another number, so its earlier hints are not used again.
//!
//! The code in this file is pure: no I/O, no locks.

use rustc_hash::{FxHashMap, FxHashSet};

/// Hints with the same place in the table.
const SLOTS: usize = 4;
/// Memory of a hint: three words.
const WORDS: usize = 3;
/// Memory of a hint in bytes.
pub const HINT_BYTES: usize = 4 * WORDS;
/// Checksums whose groups are fetched from memory together.
const FETCHED: usize = 32;
/// Bits of a place that hold the logical block. The other ones hold the number of the disk.
const LOGICAL_BITS: u32 = 40;
/// The most numbers of disks. When they are used up, all hints are dropped.
const NUMBERS_MAX: usize = if cfg!(test) { 100 } else { (1 << (64 - LOGICAL_BITS)) - 1 };

/// A disk that belongs to a domain.
#[derive(Clone, Copy)]
struct Member {
    disk: u64,
    domain: u32,
}

/// Where a block may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The number of the disk among the members.
    pub number: u32,
    pub disk: u64,
    pub logical: u64,
}

/// The hints of all domains, and the disks that belong to them.
#[derive(Default)]
pub struct Hints {
    /// Groups of [`SLOTS`] hints: the checksum, and the place in two halves. The place 0 marks a free slot.
    words: Vec<u32>,
    /// The limit of the memory for which the table was made.
    limit: usize,
    /// The disk with each number, from 1 on; `None` if it has left its domain.
    members: Vec<Option<Member>>,
    /// The domains in use, by name.
    domains: FxHashMap<String, u32>,
    /// The number of each disk.
    numbers: FxHashMap<u64, u32>,
    domains_made: u32,
}

impl Hints {
    /// Limits the memory of the table. A new limit drops all hints.
    pub fn resize(&mut self, bytes: usize) {
        if self.limit == bytes && !self.words.is_empty() {
            return;
        }
        self.limit = bytes;
        let mut groups = (bytes / (SLOTS * HINT_BYTES)).clamp(1, u32::MAX as usize);
        // An allocation that fails would end the process. What the machine cannot have is found by reserving it first.
        let is_available =
            |groups: usize| std::hint::black_box(Vec::<u32>::new()).try_reserve_exact(groups * SLOTS * WORDS).is_ok();
        while groups > 1 && !is_available(groups) {
            let bytes = groups * SLOTS * HINT_BYTES;
            tracing::warn!(bytes, "the memory for deduplication is not available: half of it is used");
            groups /= 2;
        }
        if self.words.len() != groups * SLOTS * WORDS {
            // The pages of the table take memory only once they are used. Each write uses many of them, so pages of
            // 4 KiB would cost a page fault for every few blocks of a new datastore, and more than the lookup itself
            // for the translation of their addresses.
            self.words = vec![0; groups * SLOTS * WORDS];
            backend::prefer_huge_pages(&mut self.words);
        }
    }

    /// Frees the table.
    pub fn clear(&mut self) {
        *self = Self { domains_made: self.domains_made, ..Self::default() };
    }

    /// Lets a disk belong to a domain.
    pub fn join(&mut self, disk: u64, domain: &str) {
        let domain = match self.domains.get(domain) {
            Some(known) => *known,
            None => {
                self.domains_made = self.domains_made.wrapping_add(1);
                self.domains.insert(domain.to_owned(), self.domains_made);
                self.domains_made
            }
        };
        if self.number_of(disk).is_some_and(|number| self.member(number).is_some_and(|known| known.domain == domain)) {
            return;
        }
        self.leave(disk);
        if self.members.len() >= NUMBERS_MAX {
            self.number_again();
        }
        self.members.push(Some(Member { disk, domain }));
        self.numbers.insert(disk, self.members.len() as u32);
    }

    /// Ends that a disk belongs to a domain.
    fn leave(&mut self, disk: u64) {
        if let Some(number) = self.numbers.remove(&disk) {
            self.members[number as usize - 1] = None;
        }
    }

    /// Ends that other disks than those that are `wanted` belong to a domain.
    pub fn retain(&mut self, wanted: impl Fn(u64) -> bool) {
        let gone: Vec<u64> = self.numbers.keys().copied().filter(|disk| !wanted(*disk)).collect();
        gone.into_iter().for_each(|disk| self.leave(disk));
        let used: FxHashSet<u32> = self.members.iter().flatten().map(|member| member.domain).collect();
        self.domains.retain(|_, domain| used.contains(domain));
    }

    /// Whether no disk belongs to a domain.
    pub fn is_unused(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Drops all hints, and numbers the disks from 1 on.
    fn number_again(&mut self) {
        self.words.fill(0);
        self.members.retain(Option::is_some);
        let numbered = self.members.iter().flatten().zip(1..);
        self.numbers = numbered.map(|(member, number)| (member.disk, number)).collect();
    }

    /// The number of a disk, if it belongs to a domain.
    pub fn number_of(&self, disk: u64) -> Option<u32> {
        self.numbers.get(&disk).copied()
    }

    fn member(&self, number: u32) -> Option<Member> {
        *self.members.get((number as usize).checked_sub(1)?)?
    }

    /// Whether both disks belong to one domain, and did so since they got these numbers.
    pub fn belong_together(&self, number: u32, other: u32) -> bool {
        let domain = |number| self.member(number).map(|member| member.domain);
        domain(number).is_some_and(|one| domain(other) == Some(one))
    }

    /// The first word of the group for a checksum in a domain.
    fn group(&self, domain: u32, sum: u32) -> usize {
        let groups = (self.words.len() / (SLOTS * WORDS)) as u64;
        let mixed = (u64::from(sum) << 32 | u64::from(domain)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed >> 32).wrapping_mul(groups) >> 32) as usize * SLOTS * WORDS
    }

    /// Reads the groups for these checksums. The reads do not depend on each other, so the processor fetches the groups
    /// concurrently. Lookups one by one would wait for the memory each time.
    fn fetch(&self, domain: u32, sums: &[u32]) {
        if !self.words.is_empty() {
            let first_and_last = |group: usize| self.words[group] ^ self.words[group + SLOTS * WORDS - 1];
            let read = sums.iter().fold(0, |read, sum| read ^ first_and_last(self.group(domain, *sum)));
            std::hint::black_box(read);
        }
    }

    fn place(&self, at: usize) -> u64 {
        u64::from(self.words[at + 1]) << 32 | u64::from(self.words[at + 2])
    }

    /// The slot with the hint for a checksum in a domain.
    fn slot(&self, domain: u32, sum: u32) -> Option<usize> {
        if self.words.is_empty() {
            return None;
        }
        let group = self.group(domain, sum);
        let slots = (group..group + SLOTS * WORDS).step_by(WORDS);
        let mut of_sum = slots.filter(|at| self.words[*at] == sum && self.place(*at) != 0);
        of_sum.find(|at| self.member_at(*at).is_some_and(|member| member.domain == domain))
    }

    fn member_at(&self, at: usize) -> Option<Member> {
        self.member((self.place(at) >> LOGICAL_BITS) as u32)
    }

    /// Notes that the disk with this number has a block with a checksum. A hint for the same checksum stays: its block
    /// is more likely to be settled. With `into_free` no other hint is replaced.
    pub fn note(&mut self, number: u32, sum: u32, logical: u64, into_free: bool) {
        let Some(Member { domain, .. }) = self.member(number) else { return };
        if self.words.is_empty() || self.slot(domain, sum).is_some() {
            return;
        }
        let group = self.group(domain, sum);
        let mut slots = (group..group + SLOTS * WORDS).step_by(WORDS);
        let free = slots.find(|at| self.place(*at) == 0 || self.member_at(*at).is_none());
        let any = group + (sum as usize ^ logical as usize) % SLOTS * WORDS;
        let Some(at) = free.or((!into_free).then_some(any)) else { return };
        let place = u64::from(number) << LOGICAL_BITS | logical;
        self.words[at] = sum;
        self.words[at + 1] = (place >> 32) as u32;
        self.words[at + 2] = place as u32;
    }

    /// Where a block with a checksum may be stored, for the disk with this number.
    pub fn find(&self, number: u32, sum: u32) -> Option<Hint> {
        let at = self.slot(self.member(number)?.domain, sum)?;
        let place = self.place(at);
        let (number, logical) = ((place >> LOGICAL_BITS) as u32, place & ((1 << LOGICAL_BITS) - 1));
        Some(Hint { number, disk: self.member(number)?.disk, logical })
    }

    /// As [`Hints::note`], for adjacent blocks with these checksums.
    pub fn note_all(&mut self, number: u32, sums: &[u32], first: u64, into_free: bool) {
        let Some(Member { domain, .. }) = self.member(number) else { return };
        for (sums, first) in sums.chunks(FETCHED).zip((first..).step_by(FETCHED)) {
            self.fetch(domain, sums);
            sums.iter().zip(first..).for_each(|(sum, logical)| self.note(number, *sum, logical, into_free));
        }
    }

    /// As [`Hints::find`], for blocks with these checksums: the index of each block with a hint, and its hint.
    pub fn find_all(&self, number: u32, sums: &[u32]) -> impl Iterator<Item = (usize, Hint)> {
        let domain = self.member(number).map(|member| member.domain);
        sums.chunks(FETCHED).enumerate().flat_map(move |(chunk, sums)| {
            domain.iter().for_each(|domain| self.fetch(*domain, sums));
            let found = move |(at, sum): (usize, &u32)| Some((chunk * FETCHED + at, self.find(number, *sum)?));
            sums.iter().enumerate().filter_map(found)
        })
    }

    /// Removes a hint that is not right any more.
    pub fn forget(&mut self, hint: Hint, sum: u32) {
        let Some(Member { domain, .. }) = self.member(hint.number) else { return };
        if let Some(at) = self.slot(domain, sum)
            && self.place(at) == u64::from(hint.number) << LOGICAL_BITS | hint.logical
        {
            self.words[at..at + WORDS].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hints(groups: usize) -> Hints {
        let mut hints = Hints::default();
        hints.resize(groups * SLOTS * HINT_BYTES);
        [(1, "a"), (2, "a"), (3, "b")].into_iter().for_each(|(disk, domain)| hints.join(disk, domain));
        hints
    }

    fn number(hints: &Hints, disk: u64) -> u32 {
        hints.number_of(disk).unwrap()
    }

    #[test]
    fn a_hint_is_found_by_the_disks_of_its_domain_until_its_disk_leaves() {
        let mut hints = hints(8);
        let [one, two, three] = [1, 2, 3].map(|disk| number(&hints, disk));
        let last = (1 << LOGICAL_BITS) - 1;
        hints.note(one, u32::MAX, last, false);
        hints.note(two, 0, 0, false);
        let hint = Hint { number: one, disk: 1, logical: last };
        assert_eq!((hints.find(one, u32::MAX), hints.find(two, u32::MAX)), (Some(hint), Some(hint)));
        assert_eq!(hints.find(one, 0), Some(Hint { number: two, disk: 2, logical: 0 }));
        assert_eq!((hints.find(three, u32::MAX), hints.find(three, 0), hints.find(one, 5)), (None, None, None));
        assert!(hints.belong_together(one, two) && !hints.belong_together(one, three));
        hints.join(1, "a");
        assert_eq!(number(&hints, 1), one, "nothing has changed");
        hints.join(1, "b");
        assert_eq!((hints.find(two, u32::MAX), hints.find(number(&hints, 1), u32::MAX)), (None, None));
        assert!(!hints.belong_together(one, two) && hints.belong_together(number(&hints, 1), three));
        hints.join(1, "a");
        assert_eq!(hints.find(two, u32::MAX), None, "the disk was in another domain meanwhile");
        hints.retain(|disk| disk == 2);
        assert_eq!((hints.number_of(1), hints.number_of(2), hints.number_of(3)), (None, Some(two), None));
        assert!(!hints.is_unused());
        hints.clear();
        assert!(hints.is_unused() && hints.find(two, 0).is_none());
    }

    #[test]
    fn adjacent_blocks_are_noted_and_found_as_single_ones() {
        let mut hints = hints(1 << 14);
        let [one, two, three] = [1, 2, 3].map(|disk| number(&hints, disk));
        let sums: Vec<u32> = (0..2 * FETCHED as u32 + 5).map(|at| at.wrapping_mul(0x9e37_79b9)).collect();
        hints.note_all(one, &sums, 700, false);
        let found: Vec<(usize, Hint)> = hints.find_all(two, &sums).collect();
        let expected = (0..sums.len()).map(|at| (at, Hint { number: one, disk: 1, logical: 700 + at as u64 }));
        assert_eq!(found, expected.collect::<Vec<_>>());
        assert!(sums.iter().zip(&found).all(|(sum, (_, hint))| hints.find(two, *sum) == Some(*hint)));
        assert_eq!((hints.find_all(three, &sums).count(), hints.find_all(two, &[1, 2, 3]).count()), (0, 0));
        hints.clear();
        assert_eq!(hints.find_all(two, &sums).count(), 0);
    }

    #[test]
    fn a_first_hint_stays_until_it_is_forgotten() {
        let mut hints = hints(8);
        let [one, two] = [1, 2].map(|disk| number(&hints, disk));
        hints.note(one, 7, 10, false);
        hints.note(two, 7, 20, false);
        let first = hints.find(two, 7).unwrap();
        assert_eq!((first.disk, first.logical), (1, 10));
        hints.forget(Hint { logical: 11, ..first }, 7);
        assert_eq!(hints.find(two, 7), Some(first));
        hints.forget(first, 7);
        assert_eq!(hints.find(two, 7), None);
        hints.note(two, 7, 20, false);
        assert_eq!(hints.find(one, 7).map(|hint| (hint.disk, hint.logical)), Some((2, 20)));
    }

    #[test]
    fn a_full_table_replaces_hints_and_stays_right() {
        let mut hints = hints(4);
        let one = number(&hints, 1);
        (0..1000).for_each(|at| hints.note(one, at, u64::from(at), false));
        let found = |hints: &Hints| (0..1000).filter_map(|sum| Some((sum, hints.find(one, sum)?))).collect::<Vec<_>>();
        let known = found(&hints);
        assert_eq!(known.len(), 4 * SLOTS);
        assert!(known.iter().all(|(sum, hint)| hint.logical == u64::from(*sum)));
        // What a scan finds replaces nothing.
        (1000..2000).for_each(|at| hints.note(one, at, u64::from(at), true));
        assert_eq!(found(&hints), known);
        // The hints of disks that have left are replaced first.
        hints.join(4, "a");
        hints.retain(|disk| disk == 4);
        let four = number(&hints, 4);
        (1000..2000).for_each(|at| hints.note(four, at, 1, true));
        assert_eq!((1000..2000).filter(|sum| hints.find(four, *sum).is_some()).count(), 4 * SLOTS);
    }

    #[test]
    fn numbers_that_are_used_up_begin_again_without_hints() {
        let mut hints = hints(8);
        hints.note(number(&hints, 2), 9, 3, false);
        for round in 0..3 * NUMBERS_MAX {
            hints.join(1, if round % 2 == 0 { "b" } else { "a" });
            assert!(hints.members.len() <= NUMBERS_MAX);
        }
        let [one, two, three] = [1, 2, 3].map(|disk| number(&hints, disk));
        assert_eq!(hints.find(two, 9), None);
        assert!(hints.belong_together(one, two) && !hints.belong_together(two, three));
        hints.note(one, 9, 3, false);
        assert_eq!(hints.find(two, 9).map(|hint| hint.disk), Some(1));
    }
}
