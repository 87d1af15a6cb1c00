//! Doubt: during replay, the content of some blocks is unknown, because a write of them was announced and may have been
//! cut off.
//!
//! Two kinds of records put a block in doubt. An *announced overwrite* has the checksum of the content that was to be
//! written. A *permit* allows any content from then on. Other records are in the order in which the changes were made.
//! Announcements overtake pending changes, so a block may be announced before the journal has the checksum of an
//! earlier write. Therefore a block stays in doubt until a record says that a flush of the data files has settled its
//! overwrite. A later record with the checksum of the block's content also ends the doubt of an announced overwrite.
//!
//! The code in this file is pure: no I/O, no metadata. The caller marks the table entries.
//!
//! Memory: a block takes 33 bytes of a hash table for its announced overwrites, 17 for a permit, and 9 if an earlier
//! crash had left it suspect. A table has at most 16 places for each 7 blocks. Admission limits the table pages of the
//! announced blocks to 15/32 of the metadata cache (`log/admission.rs`), so with default options at most 7.8 million
//! blocks are in doubt: 528 MiB if all of them were announced one by one, 272 MiB if all have permits. A flush of the
//! data files settles announcements, so usually far fewer blocks are in doubt.

use rustc_hash::{FxHashMap, FxHashSet};

/// Blocks in doubt at one moment of replay.
#[derive(Clone, Default)]
pub struct Doubts {
    /// Overwrites that were announced.
    overwritten: FxHashMap<u64, Overwritten>,
    /// Of blocks for which payload waits: the checksums of the announced overwrites before the last one.
    earlier: FxHashMap<u64, Vec<u32>>,
    /// Blocks with a permit, and so with unknown content: journal position of the permit.
    permitted: FxHashMap<u64, u64>,
    /// Blocks with a permit that an earlier crash had already left suspect.
    inherited: FxHashSet<u64>,
}

/// Announced overwrites of a block that are not settled.
#[derive(Clone, Copy)]
struct Overwritten {
    /// Journal position of the first of these overwrites. Once the first overwrite is settled, payload that was
    /// journalled before it is out of date, even if later overwrites are not settled.
    first: u64,
    /// Journal position of the last of these overwrites.
    last: u64,
    /// Checksum of the content that the last of these overwrites was to write.
    checksum: u32,
}

/// What a flush of the data files settled for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Settled {
    /// The block whose doubt a flush has settled.
    pub block: u64,
    /// Whether an announced overwrite of the block is durable in the data file. Then payload that was journalled before
    /// the announcement must not be written over it. False if there was only a permit: then the journal has a checksum
    /// of the block if the block was written.
    pub overwritten: bool,
    /// Whether no other record keeps the block in doubt.
    pub certain: bool,
}

impl Doubts {
    /// Adds an overwrite of a block, announced at a journal position. `has_payload` says whether journalled payload
    /// for the block waits: only then the checksums of earlier overwrites matter.
    pub fn announced(&mut self, block: u64, position: u64, checksum: u32, has_payload: bool) {
        let before = self.overwritten.get(&block).copied();
        let first = before.map_or(position, |before| before.first);
        if let Some(before) = before.filter(|before| has_payload && before.checksum != checksum) {
            let earlier = self.earlier.entry(block).or_default();
            if !earlier.contains(&before.checksum) {
                earlier.push(before.checksum);
            }
        }
        self.overwritten.insert(block, Overwritten { first, last: position, checksum });
    }

    /// Adds a permit for a block, given at a journal position. `suspect` says whether the table entry of the block was
    /// marked as suspect before.
    pub fn permitted(&mut self, block: u64, position: u64, suspect: bool) {
        if suspect && !self.contains(block) {
            self.inherited.insert(block);
        }
        self.permitted.insert(block, position);
    }

    /// Called when the journal has a checksum of the block that is newer than its announced overwrites, or when the
    /// block was freed. Permits stay: only a flush ends them.
    pub fn told(&mut self, block: u64) {
        self.overwritten.remove(&block);
        self.earlier.remove(&block);
        self.inherited.remove(&block);
    }

    /// Called when a read has determined the content of a suspect block: the state left by the earlier crash is known.
    pub fn resolved(&mut self, block: u64) {
        self.inherited.remove(&block);
    }

    /// True while the content of the block may differ from its checksum.
    pub fn contains(&self, block: u64) -> bool {
        self.overwritten.contains_key(&block) || self.permitted.contains_key(&block) || self.inherited.contains(&block)
    }

    /// The checksums of the announced overwrites that are not settled. All but the last are known only of blocks for
    /// which payload waited when it was announced.
    pub fn awaited(&self, block: u64) -> Vec<u32> {
        let earlier = self.earlier.get(&block).into_iter().flatten().copied();
        self.overwritten.get(&block).map(|announced| announced.checksum).into_iter().chain(earlier).collect()
    }

    /// Called when a flush of the data files covers the overwrites announced before `settled`. Returns the blocks with
    /// overwrites or permits that the flush settles.
    pub fn settle(&mut self, settled: u64) -> Vec<Settled> {
        let mut done = Vec::new();
        self.overwritten.retain(|block, announced| {
            if announced.first < settled {
                done.push(Settled { block: *block, overwritten: true, certain: false });
                announced.first = announced.last;
            }
            announced.last >= settled
        });
        self.permitted.retain(|block, at| {
            let keep = *at >= settled;
            if !keep {
                done.push(Settled { block: *block, overwritten: false, certain: false });
            }
            keep
        });
        done.iter().filter(|one| one.overwritten).for_each(|one| {
            self.inherited.remove(&one.block);
            // The payload that waits is out of date.
            self.earlier.remove(&one.block);
        });
        // Sorted so that every run handles the blocks in the same order.
        done.sort_unstable();
        done.iter_mut().for_each(|one| one.certain = !self.contains(one.block));
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineOptions;
    use crate::space::TABLE_ENTRIES;

    /// The figure holds for the default size of the metadata cache, of which admission gives 15/32 to pages that
    /// recovery changes.
    #[test]
    fn the_manual_states_the_most_memory_of_a_recovery() {
        let pages = EngineOptions::default().metadata_cache as u64 / backend::BLOCK_SIZE as u64 * 15 / 32;
        let places = (pages * TABLE_ENTRIES * 8 / 7).next_power_of_two();
        let table = |entry: usize| (places * (entry as u64 + 1)) >> 20;
        let (overwritten, permitted) = (table(size_of::<(u64, Overwritten)>()), table(size_of::<(u64, u64)>()));
        let manual = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/manual/serving.md");
        let manual = std::fs::read_to_string(manual).unwrap().replace('\n', " ");
        for stated in [format!("{overwritten} MiB for announced"), format!("{permitted} MiB for permitted")] {
            assert!(manual.contains(&stated), "the manual does not say '{stated}'");
        }
    }

    #[test]
    fn an_announced_overwrite_is_in_doubt_until_read_or_settled() {
        let mut doubts = Doubts::default();
        doubts.announced(3, 10, 0xaa, false);
        assert!(doubts.contains(3) && !doubts.contains(4));
        assert_eq!(doubts.awaited(3), [0xaa]);
        assert!(doubts.settle(10).is_empty(), "a flush up to its position does not cover it");
        assert_eq!(doubts.settle(11), [Settled { block: 3, overwritten: true, certain: true }]);
        assert!(!doubts.contains(3));
        doubts.announced(3, 20, 0xbb, false);
        doubts.told(3);
        assert!(!doubts.contains(3));
    }

    #[test]
    fn older_payload_is_outdated_when_the_first_of_several_overwrites_is_settled() {
        let mut doubts = Doubts::default();
        doubts.announced(3, 10, 0xaa, false);
        doubts.announced(3, 20, 0xbb, false);
        assert_eq!(doubts.settle(15), [Settled { block: 3, overwritten: true, certain: false }]);
        assert_eq!(doubts.awaited(3), [0xbb]);
        assert!(doubts.settle(20).is_empty());
        assert_eq!(doubts.settle(21), [Settled { block: 3, overwritten: true, certain: true }]);
    }

    #[test]
    fn all_overwrites_of_a_block_with_payload_are_awaited() {
        let mut doubts = Doubts::default();
        for (position, checksum) in [(10, 0xaa), (20, 0xbb), (30, 0xaa), (40, 0xbb), (50, 0xcc)] {
            doubts.announced(3, position, checksum, true);
            doubts.announced(4, position, checksum, false);
        }
        assert_eq!((doubts.awaited(3), doubts.awaited(4)), (vec![0xcc, 0xaa, 0xbb], vec![0xcc]));
        let settled = doubts.clone().settle(15);
        assert!(settled.iter().all(|one| one.overwritten));
        doubts.settle(15);
        assert_eq!(doubts.awaited(3), [0xcc], "the payload is out of date");
        doubts.told(3);
        assert!(doubts.awaited(3).is_empty());
    }

    #[test]
    fn a_permit_stays_valid_after_the_state_of_its_block_is_known() {
        let mut doubts = Doubts::default();
        doubts.permitted(3, 10, false);
        assert!(doubts.settle(10).is_empty(), "a flush up to its position does not cover it");
        doubts.told(3);
        assert!(doubts.contains(3));
        assert!(doubts.awaited(3).is_empty());
        doubts.announced(3, 12, 0xaa, false);
        assert_eq!(doubts.settle(11), [Settled { block: 3, overwritten: false, certain: false }]);
        assert_eq!(doubts.settle(13), [Settled { block: 3, overwritten: true, certain: true }]);
    }

    #[test]
    fn a_permit_does_not_settle_a_doubt_from_an_earlier_crash() {
        let mut doubts = Doubts::default();
        doubts.permitted(3, 10, true);
        assert_eq!(doubts.settle(11), [Settled { block: 3, overwritten: false, certain: false }]);
        assert!(doubts.contains(3));
        for known in [|doubts: &mut Doubts| doubts.told(3), |doubts: &mut Doubts| doubts.resolved(3)] {
            let mut doubts = doubts.clone();
            doubts.permitted(3, 12, true);
            known(&mut doubts);
            assert_eq!(doubts.settle(13), [Settled { block: 3, overwritten: false, certain: true }]);
        }
        doubts.announced(3, 14, 0xaa, false);
        assert_eq!(doubts.settle(15), [Settled { block: 3, overwritten: true, certain: true }]);
    }
}
