//! Random changes of several trees, in which blocks are replaced by others with the same content again and again, so
//! that a tree maps one block at several places. A model knows the content of each block of each tree, and of each
//! physical block.

use super::Random;
use super::memory::Memory;
use crate::tree::{
    EXTENT_BLOCKS_MAX, LOGICAL_LIMIT, NodeId, NodeStore, Repeats, Share, create, drop_step, freed, leaf_of, lookup,
    page, replace, share, share_fits,
};
use std::collections::BTreeMap;

/// Logical blocks of a tree.
const BLOCKS: u64 = 3000;

struct World {
    random: Random,
    store: Memory,
    /// Roots, each with the content of its blocks.
    trees: Vec<(NodeId, BTreeMap<u64, u64>)>,
    /// Content of physical blocks.
    contents: BTreeMap<u64, u64>,
    last: u64,
    shared: u64,
}

impl World {
    fn write(&mut self, tree: usize, start: u64, length: u64) {
        let physical = self.store.allocate_data(length);
        let (root, model) = &mut self.trees[tree];
        for i in 0..length {
            self.last += 1;
            self.contents.insert(physical + i, self.last);
            model.insert(start + i, self.last);
        }
        *root = replace(&mut self.store, *root, start..start + length, Some((physical, false))).unwrap();
    }

    /// Maps the first extent of a range to other blocks with the same content, in some or all trees. Those blocks may
    /// be mapped elsewhere too.
    fn share(&mut self, tree: usize, start: u64, length: u64) {
        let mut extents = Vec::new();
        lookup(&mut self.store, self.trees[tree].0, start..start + length, &mut extents).unwrap();
        let Some(extent) = extents.first().copied() else { return };
        let blocks = extent.blocks.min(EXTENT_BLOCKS_MAX);
        let to = self.store.allocate_data(blocks);
        (0..blocks).for_each(|at| {
            self.contents.insert(to + at, self.contents[&(extent.physical + at)]);
        });
        if self.random.percent(50) {
            let (other, at) = (self.random.index(self.trees.len()), self.random.below(BLOCKS - blocks));
            self.store.add_data_references(to, blocks).unwrap();
            let (root, model) = &mut self.trees[other];
            *root = replace(&mut self.store, *root, at..at + blocks, Some((to, false))).unwrap();
            (0..blocks).for_each(|i| {
                model.insert(at + i, self.contents[&(to + i)]);
            });
        }
        let what = Share { logical: extent.logical, blocks, from: extent.physical, to };
        self.store.packing = true;
        for at in 0..self.trees.len() {
            if at == tree || self.random.percent(80) {
                let root = self.trees[at].0;
                let range = what.logical..what.logical + blocks;
                self.trees[at].0 = share(&mut self.store, root, range, &what).unwrap();
            }
        }
        self.store.packing = false;
        // The reference that kept the blocks allocated.
        self.store.drop_data_references(to, blocks).unwrap();
        self.shared += 1;
    }

    fn step(&mut self) {
        let tree = self.random.index(self.trees.len());
        let start = self.random.below(BLOCKS);
        let long = self.random.percent(20);
        let length = (1 + self.random.below(if long { 250 } else { 6 })).min(BLOCKS - start);
        match self.random.below(100) {
            0..=3 if self.trees.len() < 6 => {
                let (root, model) = self.trees[tree].clone();
                self.store.add_reference(root).unwrap();
                self.trees.push((root, model));
            }
            4..=6 if self.trees.len() > 1 => {
                let mut root = Some(self.trees.swap_remove(tree).0);
                let counted = freed(&mut self.store, &[root.unwrap()], Repeats::Possible, &mut || Ok(())).unwrap();
                let before = (self.store.live_data(), self.store.live_pages());
                while root.is_some() {
                    drop_step(&mut self.store, &mut root, 3).unwrap();
                }
                let after = (self.store.live_data(), self.store.live_pages());
                assert_eq!((counted.data, counted.nodes), ((before.0 - after.0) as u64, (before.1 - after.1) as u64));
            }
            7..=30 => {
                let (root, model) = &mut self.trees[tree];
                *root = replace(&mut self.store, *root, start..start + length, None).unwrap();
                model.retain(|block, _| !(start..start + length).contains(block));
            }
            31..=55 => self.share(tree, start, length),
            _ => self.write(tree, start, length),
        }
    }

    fn verify(&mut self) {
        let roots: Vec<NodeId> = self.trees.iter().map(|(root, _)| *root).collect();
        self.store.verify(&roots);
        for (root, model) in &self.trees {
            let (mut extents, mut found) = (Vec::new(), BTreeMap::new());
            lookup(&mut self.store, *root, 0..LOGICAL_LIMIT, &mut extents).unwrap();
            for extent in &extents {
                (0..extent.blocks).for_each(|i| {
                    found.insert(extent.logical + i, self.contents[&(extent.physical + i)]);
                });
            }
            assert!(found == *model);
        }
    }
}

#[test]
fn sharing_changes_no_content_and_no_reference_is_lost() {
    for seed in 0..8 {
        let mut store = Memory::new();
        let root = create(&mut store).unwrap();
        let (trees, random) = (vec![(root, BTreeMap::new())], Random(seed));
        let mut world = World { random, store, trees, contents: BTreeMap::new(), last: 0, shared: 0 };
        for step in 0..1500 {
            world.step();
            if step % 50 == 0 {
                world.verify();
            }
        }
        world.verify();
        assert!(world.shared > 100);
    }
}

/// Only replay shares blocks in such a leaf.
#[test]
fn a_shared_leaf_without_room_is_copied_and_split() {
    let mut store = Memory::new();
    let mut root = create(&mut store).unwrap();
    let mut first = 0;
    for extent in 0..page::ENTRIES_MAX as u64 {
        store.skip_data();
        let physical = store.allocate_data(64);
        first = if extent == 0 { physical } else { first };
        root = replace(&mut store, root, extent * 64..(extent + 1) * 64, Some((physical, false))).unwrap();
    }
    store.add_reference(root).unwrap();
    store.skip_data();
    let share_of = |to: u64, blocks: u64| Share { logical: 8, blocks, from: first + 8, to };
    let to = store.allocate_data(16);
    let leaf = leaf_of(&mut store, root, 0..1).unwrap().id;
    assert!(!share_fits(&mut store, leaf, &share_of(to, 16)).unwrap());
    store.packing = true;
    let copied = share(&mut store, root, 8..24, &share_of(to, 16)).unwrap();
    store.drop_data_references(to, 16).unwrap();
    store.verify(&[root, copied]);
    let leaf = leaf_of(&mut store, copied, 8..24).unwrap();
    assert!(leaf.mappings[0].physical == to && leaf.upper < LOGICAL_LIMIT && !leaf.shared);
    // The other tree has the leaf alone now, and it is split in place.
    let leaf = leaf_of(&mut store, root, 8..24).unwrap();
    assert!(leaf.mappings[0].physical == first + 8 && leaf.upper == LOGICAL_LIMIT && !leaf.shared);
    let to = store.allocate_data(16);
    let root = share(&mut store, root, 8..24, &share_of(to, 16)).unwrap();
    store.packing = false;
    store.drop_data_references(to, 16).unwrap();
    store.verify(&[root, copied]);
    let leaf = leaf_of(&mut store, root, 8..24).unwrap();
    assert!(leaf.upper < LOGICAL_LIMIT && leaf.mappings[0].physical == to && leaf.mappings[0].blocks == 16);
}

/// The blocks of a run are shared one after the other. The entries grow together again.
#[test]
fn adjacent_blocks_that_are_shared_one_by_one_become_one_entry() {
    let mut store = Memory::new();
    let root = create(&mut store).unwrap();
    let from = store.allocate_data(100);
    let mut root = replace(&mut store, root, 0..100, Some((from, false))).unwrap();
    store.skip_data();
    let to = store.allocate_data(100);
    for at in (0..100).step_by(2).chain((1..100).step_by(2)) {
        let one = Share { logical: at, blocks: 1, from: from + at, to: to + at };
        root = share(&mut store, root, at..at + 1, &one).unwrap();
    }
    store.drop_data_references(to, 100).unwrap();
    store.verify(&[root]);
    let mut extents = Vec::new();
    lookup(&mut store, root, 0..LOGICAL_LIMIT, &mut extents).unwrap();
    assert_eq!(extents.iter().map(|extent| (extent.physical, extent.blocks)).collect::<Vec<_>>(), [(to, 100)]);
}
