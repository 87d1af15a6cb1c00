//! Compares the nodes that changes allocate with the computed limit: for random changes, and for the most expensive
//! ones.

use super::memory::Memory;
use crate::testbed::Random;
use crate::tree::page::{self, ENTRIES_MAX};
use crate::tree::{
    Forest, NODES_PER_STEP, NodeId, NodeStore, Share, create, leaf_of, levels, lookup, nodes_needed, replace, share,
};

/// The changes that a discard counts as, see `crate::buffer::DISCARD_CHANGES`.
const DISCARD: u64 = 3;

/// Trees, and the changes made to them since the last `begin`.
struct TreeTrial {
    store: Memory,
    roots: Vec<NodeId>,
    /// Other roots that share nodes with the trees.
    others: Vec<NodeId>,
    before: usize,
    forest: Forest,
    changes: u64,
    highest: u64,
}

impl TreeTrial {
    fn new(trees: usize) -> Self {
        let mut store = Memory::new();
        let roots = (0..trees).map(|_| create(&mut store).unwrap()).collect();
        let forest = Forest::default();
        Self { store, roots, others: Vec::new(), before: 0, forest, changes: 0, highest: 0 }
    }

    /// Starts counting changes. Snapshots will separate them into `layers` groups.
    fn begin(&mut self, layers: u64) {
        self.before = self.store.live_pages();
        let highest = self.roots.clone().into_iter().map(|root| levels(&mut self.store, root).unwrap()).max().unwrap();
        let (trees, used) = (self.roots.len() as u64, self.before as u64);
        self.forest = Forest { trees, levels: highest, layers, used };
        self.changes = 0;
    }

    fn map(&mut self, tree: usize, block: u64, blocks: u64) {
        self.store.skip_data();
        let physical = self.store.allocate_data(blocks);
        let range = block..block + blocks;
        self.roots[tree] = replace(&mut self.store, self.roots[tree], range, Some((physical, false))).unwrap();
        self.count(blocks);
    }

    fn unmap(&mut self, tree: usize, block: u64, blocks: u64) {
        // The engine unmaps in steps of varying length.
        let mut at = block;
        let step = blocks.div_ceil(5).max(1);
        self.changes += DISCARD;
        while at < block + blocks {
            let end = (at + step).min(block + blocks);
            self.roots[tree] = replace(&mut self.store, self.roots[tree], at..end, None).unwrap();
            self.count(0);
            at = end;
        }
    }

    fn count(&mut self, changes: u64) {
        self.changes += changes;
        let more = (self.store.live_pages() as u64).saturating_sub(self.before as u64);
        let bound = nodes_needed(&self.forest, self.changes);
        assert!(more <= bound, "{more} nodes for {} changes of {:?}: {bound} at most", self.changes, self.forest);
        self.highest = self.highest.max((more * 100).checked_div(bound).unwrap_or(0));
    }

    fn share(&mut self, tree: usize) {
        self.store.add_reference(self.roots[tree]).unwrap();
        self.others.push(self.roots[tree]);
    }

    /// Maps one block of the first tree to another one with the same content, as deduplication does.
    fn redirect(&mut self, block: u64) {
        let mut extents = Vec::new();
        lookup(&mut self.store, self.roots[0], block..block + 1, &mut extents).unwrap();
        let Some(extent) = extents.first() else { return };
        self.store.skip_data();
        let to = self.store.allocate_data(1);
        let what = Share { logical: block, blocks: 1, from: extent.physical, to };
        self.store.packing = true;
        self.roots[0] = share(&mut self.store, self.roots[0], block..block + 1, &what).unwrap();
        self.store.packing = false;
        self.store.drop_data_references(to, 1).unwrap();
    }

    /// The number of entries in the leaf of a block of the first tree, if the other block is in the same leaf.
    fn entries_beside(&mut self, block: u64, other: u64) -> Option<usize> {
        let [leaf, same] = [block, other].map(|at| leaf_of(&mut self.store, self.roots[0], at..at + 1).unwrap().id);
        (leaf == same).then(|| page::count(self.store.page(leaf)))
    }

    /// Nodes that the engine requires to be free before a share, with this number of counted changes.
    fn spare(&mut self, changes: u64) -> u64 {
        self.begin(1);
        4 * NODES_PER_STEP as u64 + nodes_needed(&self.forest, changes)
    }

    /// Adds a tree that begins as a copy of another.
    fn copy(&mut self, tree: usize) {
        self.store.add_reference(self.roots[tree]).unwrap();
        self.roots.push(self.roots[tree]);
    }
}

/// Fills a tree with single blocks at a distance, in ascending order, so that all its nodes are full.
fn packed(run: &mut TreeTrial, tree: usize, leaves: u64, apart: u64) {
    for i in 0..leaves * ENTRIES_MAX as u64 {
        run.map(tree, i * apart, 1);
    }
}

#[test]
fn random_changes_need_no_more_nodes_than_the_bound_says() {
    let mut highest = 0;
    for seed in 0..60 {
        let mut random = Random(seed);
        let mut run = TreeTrial::new(1 + random.below(3) as usize);
        let space = *random.pick(&[600, 20_000, 400_000]);
        run.begin(1);
        run.forest.used = u64::MAX >> 20;
        run.forest.levels = 9;
        for _ in 0..random.below(3000) {
            let (tree, block) = (random.below(run.roots.len() as u64) as usize, random.below(space));
            run.map(tree, block, 1 + random.scaled(300));
        }
        if random.percent(70) {
            for tree in 0..run.roots.len() {
                run.share(tree);
            }
        }
        if random.percent(50) {
            run.copy(0);
        }
        let layers = 1 + random.below(3);
        run.begin(layers);
        for layer in 0..layers {
            if layer > 0 {
                for tree in 0..run.roots.len() {
                    run.share(tree);
                }
            }
            for _ in 0..random.below(400) {
                let (tree, block) = (random.below(run.roots.len() as u64) as usize, random.below(space));
                match random.below(5) {
                    0 => run.unmap(tree, block, 1 + random.scaled(space)),
                    1 => run.map(tree, block, 1 + random.scaled(600)),
                    _ => run.map(tree, block, 1),
                }
            }
        }
        highest = highest.max(run.highest);
        let all: Vec<NodeId> = run.roots.iter().chain(&run.others).copied().collect();
        run.store.verify(&all);
    }
    assert!(highest >= 20, "changes never use more than {highest} percent of the limit");
}

#[test]
fn a_change_of_every_full_leaf_splits_and_copies_each_node_once() {
    let mut run = TreeTrial::new(1);
    run.begin(1);
    (run.forest.used, run.forest.levels) = (1 << 20, 3);
    packed(&mut run, 0, 300, 600);
    run.share(0);
    run.begin(1);
    run.highest = 0;
    for leaf in 0..300 {
        run.map(0, leaf * 254 * 600 + 100, 1);
    }
    assert!(run.highest >= 80, "{} percent of the limit", run.highest);
}

#[test]
fn streams_with_any_end_split_at_most_the_counted_nodes() {
    // Begins a stream after every extent of full leaves, in ascending and in descending order.
    for descending in [false, true] {
        let mut run = TreeTrial::new(1);
        run.begin(1);
        (run.forest.used, run.forest.levels) = (1 << 20, 3);
        packed(&mut run, 0, 4, 600);
        run.begin(1);
        for i in 0..4 * 254 {
            let i = if descending { 4 * 254 - 1 - i } else { i };
            run.map(0, i * 600 + 1, 1);
        }
    }
}

#[test]
fn a_descending_fill_behind_a_full_leaf_fills_leaves() {
    let mut run = TreeTrial::new(1);
    run.begin(1);
    packed(&mut run, 0, 1, 1);
    run.begin(1);
    for i in 0..4000 {
        run.map(0, 1_000_000 - 2 * i, 1);
    }
    let root = run.roots[0];
    assert!(run.store.live_pages() < 60, "{} nodes", run.store.live_pages());
    assert_eq!(page::level(run.store.page(root)), 1);
}

/// Shares fill the leaf of each change before it. The free nodes are compared with the limit before each share, so they
/// suffice for the changes after it. Without this comparison they do not.
#[test]
fn shares_between_changes_leave_enough_nodes_for_the_changes() {
    const EXTENTS: u64 = 100;
    let mut short = 0;
    for seed in 0..4 {
        let mut random = Random(seed);
        let mut run = TreeTrial::new(1);
        run.begin(1);
        (run.forest.used, run.forest.levels) = (1 << 20, 9);
        (0..EXTENTS).for_each(|i| run.map(0, i * 300, 250));
        let mut changes = 60;
        let mut free = run.spare(changes) as i64;
        // The free nodes if those for the counted changes are compared with the limit at the beginning only.
        let mut once = nodes_needed(&run.forest, changes) as i64;
        while changes > 0 {
            let at = 200 + random.below(EXTENTS * 300 - 400);
            for _ in 0..1000 {
                if run.entries_beside(at, at) >= Some(ENTRIES_MAX - 1) {
                    break;
                }
                let block = at - 200 + random.below(400);
                if run.entries_beside(at, block).is_some() {
                    free = free.max(run.spare(changes) as i64);
                    run.redirect(block);
                    free -= run.store.live_pages() as i64 - run.before as i64;
                }
            }
            run.begin(1);
            run.map(0, at, 1);
            changes -= 1;
            let used = run.store.live_pages() as i64 - run.before as i64;
            (free, once) = (free - used, once - used);
            assert!(free >= 0, "seed {seed}, {changes} changes are left");
        }
        short += u32::from(once < 0);
    }
    assert!(short > 0, "the shares have not filled the leaves");
}
