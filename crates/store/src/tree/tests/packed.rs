//! Random changes of several trees, in which blocks are packed again and again. A model knows the content of each block
//! of each tree, of each plain block, and of each index of each pack.

use super::Random;
use super::memory::Memory;
use crate::tree::{
    Extent, LOGICAL_LIMIT, MappedCounter, NodeId, NodeStore, Packed, PhysicalRun, Source, create, drop_step, leaf_of,
    lookup, pack, page, replace,
};
use std::collections::{BTreeMap, BTreeSet};

/// Logical blocks of a tree.
const BLOCKS: u64 = 3000;

struct World {
    random: Random,
    store: Memory,
    /// Roots, each with the content of its blocks.
    trees: Vec<(NodeId, BTreeMap<u64, u64>)>,
    /// Content of plain blocks, by block.
    plain: BTreeMap<u64, u64>,
    /// Content of packs, by first block.
    packs: BTreeMap<u64, Vec<u64>>,
    contents: u64,
    packed: u64,
    repacked: u64,
}

impl World {
    fn write(&mut self, tree: usize, start: u64, length: u64) {
        let physical = self.store.allocate_data(length);
        let (root, model) = &mut self.trees[tree];
        for i in 0..length {
            self.contents += 1;
            self.plain.insert(physical + i, self.contents);
            model.insert(start + i, self.contents);
        }
        *root = replace(&mut self.store, *root, start..start + length, Some((physical, false))).unwrap();
    }

    /// Packs blocks of a tree in some or all trees: plain ones, and often parts of other packs.
    fn pack(&mut self, tree: usize, start: u64, length: u64) {
        let mut extents = Vec::new();
        lookup(&mut self.store, self.trees[tree].0, start..start + length, &mut extents).unwrap();
        let (mut sources, mut content) = (Vec::new(), vec![0; length as usize]);
        for extent in &extents {
            if extent.packed.is_some() && self.random.percent(30) {
                continue;
            }
            for i in 0..extent.blocks {
                content[(extent.logical + i - start) as usize] = match extent.packed {
                    None => self.plain[&(extent.physical + i)],
                    Some(Packed { index, .. }) => self.packs[&extent.physical][usize::from(index) + i as usize],
                };
            }
            self.repacked += u64::from(extent.packed.is_some());
            let run = PhysicalRun { physical: extent.physical, blocks: extent.blocks };
            sources.push(Source { index: (extent.logical - start) as u8, run, packed: extent.packed });
        }
        if sources.is_empty() {
            return;
        }
        let stored = 1 + self.random.below(4);
        let run = PhysicalRun { physical: self.store.allocate_data(stored), blocks: stored };
        self.packs.insert(run.physical, content);
        self.store.packing = true;
        for at in 0..self.trees.len() {
            if at == tree || self.random.percent(80) {
                let root = self.trees[at].0;
                self.trees[at].0 = pack(&mut self.store, root, start..start + length, start, run, &sources).unwrap();
            }
        }
        self.store.packing = false;
        // The reference that kept the pack allocated.
        self.store.drop_data_references(run.physical, run.blocks).unwrap();
        self.packed += 1;
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
                while root.is_some() {
                    drop_step(&mut self.store, &mut root, 3).unwrap();
                }
            }
            7..=30 => {
                let (root, model) = &mut self.trees[tree];
                *root = replace(&mut self.store, *root, start..start + length, None).unwrap();
                model.retain(|block, _| !(start..start + length).contains(block));
            }
            31..=50 => self.pack(tree, start, (1 + self.random.clone().below(256)).min(BLOCKS - start)),
            _ => self.write(tree, start, length),
        }
    }

    fn verify(&mut self) {
        let roots: Vec<NodeId> = self.trees.iter().map(|(root, _)| *root).collect();
        self.store.verify(&roots);
        super::distinct::is_exact(&mut self.store, &roots);
        super::distinct::is_exact(&mut self.store, &roots[..roots.len().div_ceil(2)]);
        let mut counter = MappedCounter::default();
        for (root, model) in &self.trees {
            let (mut extents, mut found) = (Vec::new(), BTreeMap::new());
            lookup(&mut self.store, *root, 0..LOGICAL_LIMIT, &mut extents).unwrap();
            for extent in &extents {
                for i in 0..extent.blocks {
                    let content = match extent.packed {
                        None => self.plain[&(extent.physical + i)],
                        Some(packed) => self.packs[&extent.physical][usize::from(packed.index) + i as usize],
                    };
                    found.insert(extent.logical + i, content);
                }
            }
            assert!(found == *model);
            let counted = counter.count(&mut self.store, *root, &mut || Ok(())).unwrap();
            let packed = extents.iter().filter(|extent| extent.packed.is_some());
            let packs: BTreeSet<(u64, u64)> =
                packed.clone().map(|extent| (extent.physical, extent.stored().blocks)).collect();
            assert_eq!(
                (counted.all, counted.packed),
                (model.len() as u64, packed.map(|extent| extent.blocks).sum::<u64>())
            );
            assert_eq!(counted.packs, packs.iter().map(|(_, blocks)| blocks).sum::<u64>());
        }
    }
}

#[test]
fn packing_changes_no_content_and_no_reference_is_lost() {
    for seed in 0..8 {
        let mut store = Memory::new();
        let root = create(&mut store).unwrap();
        let (trees, random) = (vec![(root, BTreeMap::new())], Random(seed));
        let (plain, packs) = Default::default();
        let mut world = World { random, store, trees, plain, packs, contents: 0, packed: 0, repacked: 0 };
        for step in 0..1500 {
            world.step();
            if step % 50 == 0 {
                world.verify();
            }
        }
        world.verify();
        assert!(world.packed > 100 && world.repacked > 100);
    }
}

/// Only replay packs blocks in such a leaf.
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
    let leaf = leaf_of(&mut store, root, 0..1).unwrap();
    assert!(!leaf.shared && leaf.upper == LOGICAL_LIMIT);
    store.add_reference(root).unwrap();
    let sources = [Source { index: 0, run: PhysicalRun { physical: first + 8, blocks: 16 }, packed: None }];
    let run = PhysicalRun { physical: store.allocate_data(1), blocks: 1 };
    store.packing = true;
    let copied = pack(&mut store, root, 8..24, 8, run, &sources).unwrap();
    store.drop_data_references(run.physical, 1).unwrap();
    store.verify(&[root, copied]);
    let leaf = leaf_of(&mut store, copied, 10..11).unwrap();
    assert!(leaf.mappings[0].packed.is_some() && leaf.upper < LOGICAL_LIMIT && !leaf.shared);
    // The other tree has the leaf alone now, and it is split in place.
    let leaf = leaf_of(&mut store, root, 10..11).unwrap();
    assert!(leaf.mappings[0].packed.is_none() && leaf.upper == LOGICAL_LIMIT && !leaf.shared);
    let run = PhysicalRun { physical: store.allocate_data(1), blocks: 1 };
    let root = pack(&mut store, root, 8..24, 8, run, &sources).unwrap();
    store.drop_data_references(run.physical, 1).unwrap();
    store.verify(&[root, copied]);
    let leaf = leaf_of(&mut store, root, 10..11).unwrap();
    assert!(leaf.mappings[0].packed.is_some() && leaf.upper < LOGICAL_LIMIT);
}

/// The later leaf does not count the pack again.
#[test]
fn a_pack_that_two_leaves_map_counts_once() {
    const BLOCKS: u64 = 400;
    let mut store = Memory::new();
    let mut root = create(&mut store).unwrap();
    for block in 0..BLOCKS {
        store.skip_data();
        let physical = store.allocate_data(1);
        root = replace(&mut store, root, block..block + 1, Some((physical, false))).unwrap();
    }
    let border = leaf_of(&mut store, root, 0..1).unwrap().upper;
    let range = border - 4..border + 4;
    let mut extents = Vec::new();
    lookup(&mut store, root, range.clone(), &mut extents).unwrap();
    let source = |extent: &Extent| {
        let run = PhysicalRun { physical: extent.physical, blocks: extent.blocks };
        Source { index: (extent.logical - range.start) as u8, run, packed: None }
    };
    let sources: Vec<Source> = extents.iter().map(source).collect();
    let run = PhysicalRun { physical: store.allocate_data(2), blocks: 2 };
    store.packing = true;
    root = pack(&mut store, root, range.clone(), range.start, run, &sources).unwrap();
    store.drop_data_references(run.physical, run.blocks).unwrap();
    store.verify(&[root]);
    for block in [range.start, border] {
        let leaf = leaf_of(&mut store, root, block..block + 1).unwrap();
        assert!(leaf.mappings[0].packed.is_some() && (leaf.upper == border) == (block < border));
    }
    let counted = MappedCounter::default().count(&mut store, root, &mut || Ok(())).unwrap();
    assert_eq!((counted.all, counted.packed, counted.packs), (BLOCKS, 8, 2));
}
