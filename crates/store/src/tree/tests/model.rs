//! Compares random operations on several trees with one ordered map per tree.

use super::Random;
use super::memory::{Memory, content};
use crate::tree::{
    LOGICAL_LIMIT, NodeId, NodeStore, Visit, create, diff, drop_step, lookup_exclusive, page, replace, walk,
};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

type Model = BTreeMap<u64, (u64, bool)>;

/// The parameters of one run.
struct Scenario {
    seed: u64,
    /// Number of logical blocks used.
    blocks: u64,
    /// Single blocks that are mapped at random places before the operations.
    prefill: u64,
    operations: u64,
    /// Number of operations between two complete comparisons.
    compare_every: u64,
    /// The most trees that exist at the same time.
    trees_max: usize,
}

struct World {
    random: Random,
    store: Memory,
    trees: Vec<(NodeId, Model)>,
    /// Trees that are being dropped in steps.
    dying: Vec<Option<NodeId>>,
    blocks: u64,
    trees_max: usize,
    /// Whether the operations alternate between growing and shrinking, so that nodes split and merge on every level.
    shrinking: bool,
}

impl World {
    fn new(scenario: &Scenario) -> Self {
        let mut world = Self {
            random: Random(scenario.seed),
            store: Memory::new(),
            trees: Vec::new(),
            dying: Vec::new(),
            blocks: scenario.blocks,
            trees_max: scenario.trees_max,
            shrinking: false,
        };
        let root = create(&mut world.store).unwrap();
        world.trees.push((root, Model::new()));
        for _ in 0..scenario.prefill {
            let start = world.random.below(world.blocks);
            world.map(0, start, 1);
        }
        world
    }

    fn step(&mut self) {
        let tree = self.random.below(self.trees.len() as u64) as usize;
        let start = self.random.below(self.blocks);
        let length = match self.random.below(20) {
            0 => 1 + self.random.below(self.blocks / 4),
            1..=3 => 1 + self.random.below(600),
            4..=9 => 1 + self.random.below(20),
            _ => 1,
        };
        let (start, length) = match self.bounds(tree) {
            Some(range) if self.random.percent(20) => (range.start, range.end - range.start),
            _ => (start, length.min(self.blocks - start)),
        };
        match self.random.below(100) {
            0..=1 if self.trees.len() < self.trees_max => self.snapshot(tree),
            2..=3 if self.trees.len() > 1 => self.begin_drop(tree),
            4..=12 => self.continue_drop(),
            13..=15 => self.check_diff(),
            16..=25 => self.check_lookup(tree, start, length),
            26..=27 => self.shrinking = !self.shrinking,
            _ if self.random.percent(if self.shrinking { 75 } else { 20 }) => self.unmap(tree, start, length),
            _ => self.map(tree, start, length.min(700)),
        }
    }

    /// A range that begins and ends at bounds of nodes, or one block beside them, to find off-by-one errors.
    fn bounds(&mut self, tree: usize) -> Option<Range<u64>> {
        let node = self.store.page(self.trees[tree].0);
        if page::level(node) == 0 {
            return None;
        }
        let mut bound = || {
            let index = self.random.below(page::count(node) as u64) as usize;
            let key = page::slot(node, index).and_then(|slot| slot.lower).unwrap_or(0);
            (key + self.random.below(3)).saturating_sub(1)
        };
        let (one, other) = (bound(), bound());
        (one != other).then(|| one.min(other)..one.max(other).min(self.blocks))
    }

    fn map(&mut self, tree: usize, start: u64, length: u64) {
        if self.random.percent(50) {
            self.store.skip_data();
        }
        // Sometimes the range is mapped in two calls, so that adjacent extents are joined, with equal or different
        // flags.
        let cut = if self.random.percent(30) { self.random.below(length) } else { 0 };
        let physical = self.store.allocate_data(length);
        let (root, model) = &mut self.trees[tree];
        for part in [0..cut, cut..length].into_iter().filter(|part| !part.is_empty()) {
            let with = (physical + part.start, self.random.percent(25));
            *root = replace(&mut self.store, *root, start + part.start..start + part.end, Some(with)).unwrap();
            model.extend(part.map(|i| (start + i, (physical + i, with.1))));
        }
    }

    fn unmap(&mut self, tree: usize, start: u64, length: u64) {
        let (root, model) = &mut self.trees[tree];
        let before = self.store.allocations;
        *root = replace(&mut self.store, *root, start..start + length, None).unwrap();
        let gone: Vec<u64> = model.range(start..start + length).map(|(block, _)| *block).collect();
        assert!(!gone.is_empty() || self.store.allocations == before, "unmapping nothing changed the tree");
        for block in gone {
            model.remove(&block);
        }
    }

    fn snapshot(&mut self, tree: usize) {
        let (root, model) = self.trees[tree].clone();
        self.store.add_reference(root).unwrap();
        self.trees.push((root, model));
    }

    fn begin_drop(&mut self, tree: usize) {
        let (root, _) = self.trees.swap_remove(tree);
        self.dying.push(Some(root));
    }

    fn continue_drop(&mut self) {
        let budget = self.random.below(4) as usize * self.random.below(40) as usize;
        if let Some(root) = self.dying.last_mut() {
            drop_step(&mut self.store, root, budget).unwrap();
            if root.is_none() {
                self.dying.pop();
            }
        }
    }

    fn check_lookup(&mut self, tree: usize, start: u64, length: u64) {
        let (root, model) = &self.trees[tree];
        let mut found = Vec::new();
        lookup_exclusive(&mut self.store, *root, start..start + length, &mut found).unwrap();
        let found: Vec<(u64, (u64, bool))> = found
            .iter()
            .flat_map(|e| (0..e.blocks).map(move |i| (e.logical + i, (e.physical + i, e.unwritten))))
            .collect();
        let expected: Vec<_> = model.range(start..start + length).map(|(k, v)| (*k, *v)).collect();
        assert_eq!(found, expected);
    }

    fn check_diff(&mut self) {
        let empty = Model::new();
        let pick = |random: &mut Random| {
            let index = random.below(self.trees.len() as u64 + 1) as usize;
            self.trees.get(index).map_or((None, &empty), |(root, model)| (Some(*root), model))
        };
        let (a, old) = pick(&mut self.random);
        let (b, new) = pick(&mut self.random);
        let start = if self.random.percent(50) { 0 } else { self.random.below(self.blocks) };
        let end = if self.random.percent(50) { LOGICAL_LIMIT } else { start + self.random.below(self.blocks) };
        let mut found = Vec::new();
        let mut previous: Option<(u64, bool)> = None;
        diff(&mut self.store, a, b, start..end, &mut |extent| {
            let joins = |(upto, in_b)| upto > extent.logical || (upto == extent.logical && in_b == extent.in_b);
            assert!(!previous.is_some_and(joins), "in order, and joined where they follow each other");
            previous = Some((extent.logical + extent.blocks, extent.in_b));
            found.extend((extent.logical..extent.logical + extent.blocks).map(|block| (block, extent.in_b)));
            Ok(())
        })
        .unwrap();
        let mut expected: BTreeMap<u64, bool> = BTreeMap::new();
        for (block, target) in old.range(start..end) {
            if new.get(block) != Some(target) {
                expected.insert(*block, false);
            }
        }
        for (block, target) in new.range(start..end) {
            if old.get(block) != Some(target) {
                expected.insert(*block, !target.1);
            }
        }
        assert!(found.iter().copied().eq(expected), "difference of {a:?} and {b:?} in {start}..{end}");
    }

    /// Compares all trees with the model, and all counts with the trees.
    fn compare(&mut self) {
        for (root, model) in &self.trees {
            let found = content(&mut self.store, *root);
            assert!(found.into_iter().eq(model.iter().map(|(k, v)| (*k, *v))), "content of tree {root}");
        }
        let roots: Vec<NodeId> =
            self.trees.iter().map(|(root, _)| *root).chain(self.dying.iter().flatten().copied()).collect();
        self.store.verify(&roots);
    }

    /// Checks that `shared_path` is true exactly if more than one path leads to the leaf.
    fn check_sharing(&mut self) {
        let mut ways: HashMap<NodeId, u32> = HashMap::new();
        let mut leaf_of: HashMap<(usize, u64), NodeId> = HashMap::new();
        let roots = self.trees.iter().map(|(root, _)| *root).chain(self.dying.iter().flatten().copied());
        for (tree, root) in roots.enumerate() {
            let mut leaf = root;
            walk(&mut self.store, root, &mut |visit| {
                match visit {
                    Visit::Node { id, level: 0 } => {
                        leaf = id;
                        *ways.entry(id).or_default() += 1;
                    }
                    Visit::Node { .. } => {}
                    Visit::Extent(extent) => {
                        leaf_of.insert((tree, extent.logical), leaf);
                    }
                }
                Ok(true)
            })
            .unwrap();
        }
        for (tree, (root, _)) in self.trees.iter().enumerate() {
            let mut found = Vec::new();
            lookup_exclusive(&mut self.store, *root, 0..LOGICAL_LIMIT, &mut found).unwrap();
            for extent in found {
                assert_eq!(extent.shared_path, ways[&leaf_of[&(tree, extent.logical)]] > 1);
            }
        }
    }

    /// Drops all trees, and checks that no page remains.
    fn finish(mut self) {
        let mut roots: Vec<Option<NodeId>> = self.trees.iter().map(|(root, _)| Some(*root)).collect();
        roots.append(&mut self.dying);
        while let Some(root) = roots.last_mut() {
            drop_step(&mut self.store, root, 1 + self.random.below(100) as usize).unwrap();
            if root.is_none() {
                roots.pop();
            }
        }
        assert_eq!((self.store.live_pages(), self.store.live_data()), (0, 0), "pages and data blocks that leaked");
    }
}

/// Runs a scenario and returns the fingerprint of the last state before all trees are dropped.
fn run(scenario: &Scenario) -> u64 {
    println!("seed {}", scenario.seed);
    let mut world = World::new(scenario);
    for operation in 0..scenario.operations {
        world.step();
        if operation % scenario.compare_every == 0 {
            world.compare();
        }
    }
    world.compare();
    world.check_sharing();
    let fingerprint = world.store.fingerprint();
    world.finish();
    fingerprint
}

#[test]
fn small_trees_equal_a_model() {
    for seed in 0..40 {
        run(&Scenario { seed, blocks: 3000, prefill: 0, operations: 1500, compare_every: 10, trees_max: 6 });
    }
}

#[test]
fn trees_of_two_levels_equal_a_model() {
    for seed in 100..108 {
        run(&Scenario { seed, blocks: 30_000, prefill: 5000, operations: 3000, compare_every: 60, trees_max: 5 });
    }
}

#[test]
fn trees_of_three_levels_equal_a_model() {
    for seed in 200..203 {
        run(&Scenario { seed, blocks: 400_000, prefill: 120_000, operations: 2500, compare_every: 400, trees_max: 3 });
    }
}

#[test]
fn equal_operations_produce_equal_pages() {
    let scenario =
        Scenario { seed: 300, blocks: 30_000, prefill: 8000, operations: 2000, compare_every: u64::MAX, trees_max: 4 };
    assert_eq!(run(&scenario), run(&scenario));
}

/// A large tree loses its blocks one by one, so that it takes every shape until it is empty.
#[test]
fn a_tree_with_random_removals_shrinks_to_an_empty_leaf() {
    for shared in [false, true] {
        let mut random = Random(400);
        let mut store = Memory::new();
        let mut root = create(&mut store).unwrap();
        let mut blocks: Vec<u64> = (0..100_000).map(|i| i * 3).collect();
        for block in &blocks {
            let physical = store.allocate_data(1);
            root = replace(&mut store, root, *block..*block + 1, Some((physical, false))).unwrap();
        }
        let snapshot = root;
        if shared {
            store.add_reference(root).unwrap();
        }
        for last in (0..blocks.len()).rev() {
            blocks.swap(last, random.below(last as u64 + 1) as usize);
            let block = blocks[last];
            root = replace(&mut store, root, block..block + 1, None).unwrap();
            if last % 20_000 == 0 {
                store.verify(&[root, snapshot][..if shared { 2 } else { 1 }]);
            }
        }
        let pages = store.live_pages();
        drop_step(&mut store, &mut Some(root), 1).unwrap();
        assert_eq!(store.live_pages(), pages - 1, "an empty tree is one leaf");
        if shared {
            assert_eq!(content(&mut store, snapshot).len(), 100_000);
            let mut rest = Some(snapshot);
            drop_step(&mut store, &mut rest, usize::MAX).unwrap();
        }
        assert_eq!((store.live_pages(), store.live_data()), (0, 0));
    }
}
