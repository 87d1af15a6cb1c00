//! Parts of packs in use that are mapped at any logical blocks, beside other changes of several trees.

use super::Random;
use super::memory::Memory;
use crate::tree::{LOGICAL_LIMIT, NodeId, NodeStore, PhysicalRun, create, drop_step, lookup, map_pack, replace};
use std::collections::BTreeMap;

/// Logical blocks of a tree.
const BLOCKS: u64 = 1500;
/// Indexes of each pack.
const INDEXES: u64 = 40;

/// The physical block, and the index of a block in a pack.
type Place = (u64, Option<u64>);

struct World {
    random: Random,
    store: Memory,
    /// Roots, each with the place of each block.
    trees: Vec<(NodeId, BTreeMap<u64, Place>)>,
    packs: Vec<PhysicalRun>,
    /// How often a part was mapped that continues another one.
    joined: u64,
}

impl World {
    /// Maps a part of a pack at blocks from `start` on.
    fn map(&mut self, tree: usize, start: u64, pack: PhysicalRun) {
        let first = self.random.below(INDEXES);
        let model = &self.trees[tree].1;
        // Often the part that follows that of the block before.
        let before = start.checked_sub(1).and_then(|before| model.get(&before));
        let next = match before {
            Some((physical, Some(index))) if *physical == pack.physical && index + 1 < INDEXES => Some(index + 1),
            _ => None,
        };
        self.joined += u64::from(next.is_some());
        let first = next.unwrap_or(first);
        let length = (1 + self.random.below(INDEXES)).min(INDEXES - first).min(BLOCKS - start);
        let (root, model) = &mut self.trees[tree];
        let range = start..start + length;
        *root = map_pack(&mut self.store, *root, range, pack, first as u8).unwrap();
        model.extend((0..length).map(|at| (start + at, (pack.physical, Some(first + at)))));
    }

    fn step(&mut self) {
        let tree = self.random.index(self.trees.len());
        let start = self.random.below(BLOCKS);
        let length = (1 + self.random.below(8)).min(BLOCKS - start);
        match self.random.below(100) {
            0..=2 if self.trees.len() < 5 => {
                let (root, model) = self.trees[tree].clone();
                self.store.add_reference(root).unwrap();
                self.trees.push((root, model));
            }
            3..=4 if self.trees.len() > 1 => {
                let mut root = Some(self.trees.swap_remove(tree).0);
                while root.is_some() {
                    drop_step(&mut self.store, &mut root, 3).unwrap();
                }
            }
            5..=14 => {
                let (root, model) = &mut self.trees[tree];
                *root = replace(&mut self.store, *root, start..start + length, None).unwrap();
                model.retain(|block, _| !(start..start + length).contains(block));
            }
            15..=29 => {
                let physical = self.store.allocate_data(length);
                let (root, model) = &mut self.trees[tree];
                *root = replace(&mut self.store, *root, start..start + length, Some((physical, false))).unwrap();
                model.extend((0..length).map(|at| (start + at, (physical + at, None))));
            }
            30..=34 => {
                let blocks = 1 + self.random.below(5);
                let pack = PhysicalRun { physical: self.store.allocate_data(blocks), blocks };
                self.map(tree, start, pack);
                // The reference that kept the new pack allocated.
                self.store.drop_data_references(pack.physical, pack.blocks).unwrap();
                self.packs.push(pack);
            }
            choice if !self.packs.is_empty() => {
                let pack = match self.trees[tree].1.range(..start).next_back() {
                    Some((before, (physical, Some(_)))) if choice < 80 => Some((before + 1, *physical)),
                    _ => None,
                };
                let at = pack.map_or(start, |(at, _)| at.min(BLOCKS - 1));
                let number = self.random.index(self.packs.len());
                let known = self.packs.iter().find(|one| pack.is_some_and(|(_, physical)| one.physical == physical));
                let pack = known.copied().unwrap_or(self.packs[number]);
                let references = self.store.data(pack.physical..pack.physical + pack.blocks).unwrap()[0];
                match references {
                    0 => self.packs.retain(|one| *one != pack),
                    _ => self.map(tree, at, pack),
                }
            }
            _ => {}
        }
    }

    fn verify(&mut self) {
        let roots: Vec<NodeId> = self.trees.iter().map(|(root, _)| *root).collect();
        self.store.verify(&roots);
        for (root, model) in &self.trees {
            let (mut extents, mut found) = (Vec::new(), BTreeMap::new());
            lookup(&mut self.store, *root, 0..LOGICAL_LIMIT, &mut extents).unwrap();
            for extent in &extents {
                found.extend((0..extent.blocks).map(|at| {
                    let place = match extent.packed {
                        None => (extent.physical + at, None),
                        Some(packed) => (extent.physical, Some(u64::from(packed.index) + at)),
                    };
                    (extent.logical + at, place)
                }));
            }
            assert!(found == *model);
        }
    }
}

#[test]
fn parts_of_packs_are_mapped_anywhere_and_no_reference_is_lost() {
    for seed in 0..8 {
        let mut store = Memory::new();
        let root = create(&mut store).unwrap();
        let trees = vec![(root, BTreeMap::new())];
        let mut world = World { random: Random(seed), store, trees, packs: Vec::new(), joined: 0 };
        for step in 0..3000 {
            world.step();
            if step % 20 == 0 {
                world.verify();
            }
        }
        world.verify();
        assert!(world.joined > 100, "{}", world.joined);
    }
}

/// A part between two others, and the middle of an entry again.
#[test]
fn parts_that_follow_each_other_become_one_entry() {
    let mut store = Memory::new();
    let mut root = create(&mut store).unwrap();
    let pack = PhysicalRun { physical: store.allocate_data(2), blocks: 2 };
    let references = |store: &mut Memory| store.data(pack.physical..pack.physical + 1).unwrap()[0];
    for (range, first, entries) in [(10..13, 0, 1), (16..20, 6, 2), (13..16, 3, 1), (12..15, 2, 1), (30..31, 10, 2)] {
        root = map_pack(&mut store, root, range, pack, first).unwrap();
        let mut extents = Vec::new();
        lookup(&mut store, root, 0..LOGICAL_LIMIT, &mut extents).unwrap();
        assert_eq!((extents.len() as u32, references(&mut store)), (entries, 1 + entries));
    }
    // Not the next index, and not the next block.
    root = map_pack(&mut store, root, 31..32, pack, 12).unwrap();
    root = map_pack(&mut store, root, 33..34, pack, 13).unwrap();
    assert_eq!(references(&mut store), 5);
    store.drop_data_references(pack.physical, pack.blocks).unwrap();
    store.verify(&[root]);
}
