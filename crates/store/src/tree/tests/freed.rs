//! The count of what dropping trees would free equals what dropping them frees, on trees of up to three levels, with so
//! many shared nodes and blocks that several passes count them.

use super::Random;
use super::memory::{Memory, content};
use crate::Result;
use crate::tree::{
    DataReferences, Freed, MappedCounter, NodeId, NodeStore, PhysicalRun, Repeats, Source, create, drop_step, freed,
    freed_after, freed_and_left, levels, pack, replace,
};

impl DataReferences for Memory {
    fn data_references(&mut self, physical: u64, blocks: u64, each: &mut dyn FnMut(u64, u32)) -> Result<()> {
        let counts = self.data(physical..physical + blocks)?;
        (physical..).zip(counts).for_each(|(block, references)| each(block, *references));
        Ok(())
    }
}

fn ask() -> impl FnMut() -> Result<()> {
    || Ok(())
}

/// Blocks and nodes in use.
fn used(store: &Memory) -> Freed {
    Freed { data: store.live_data() as u64, nodes: store.live_pages() as u64 }
}

/// Maps single blocks at random places of a tree.
fn scatter(store: &mut Memory, random: &mut Random, root: &mut NodeId, writes: u64, blocks: u64) {
    for _ in 0..writes {
        let start = random.below(blocks);
        let length = if random.percent(10) { 1 + random.below(300).min(blocks - start - 1) } else { 1 };
        store.skip_data();
        let with = random.percent(90).then(|| (store.allocate_data(length), random.percent(20)));
        *root = replace(store, *root, start..start + length, with).unwrap();
    }
}

fn share(store: &mut Memory, root: NodeId) -> NodeId {
    store.add_reference(root).unwrap();
    root
}

/// Makes trees that share parts, and drops random sets of them. Returns how often one part of a set was counted after
/// another part.
fn drop_sets(seed: u64, prefill: u64, sets: u64, high: u64) -> u32 {
    let mut parts = 0;
    let mut random = Random(seed);
    let mut store = Memory::new();
    let blocks = (prefill * 8).max(2000);
    let mut first = create(&mut store).unwrap();
    scatter(&mut store, &mut random, &mut first, prefill, blocks);
    assert!(levels(&mut store, first).unwrap() >= high);
    let mut trees = vec![first];
    for _ in 0..sets {
        while trees.len() < 6 {
            let of = random.below(trees.len() as u64) as usize;
            let copy = share(&mut store, trees[of]);
            trees.push(copy);
            let changed = random.below(trees.len() as u64) as usize;
            let writes = 1 + random.below(60);
            scatter(&mut store, &mut random, &mut trees[changed], writes, blocks);
        }
        let mut mapped = MappedCounter::default();
        let of = trees[random.below(trees.len() as u64) as usize];
        let known = content(&mut store, of);
        let counted = mapped.count(&mut store, of, &mut ask()).unwrap();
        let unwritten = known.iter().filter(|(_, (_, unwritten))| *unwritten).count() as u64;
        assert_eq!((counted.all, counted.unwritten), (known.len() as u64, unwritten));
        for tree in &trees {
            let whole = content(&mut store, *tree).len() as u64;
            assert_eq!(mapped.count(&mut store, *tree, &mut ask()).unwrap().all, whole, "shared nodes are remembered");
        }
        let count = 1 + random.below(trees.len() as u64 - 1);
        let set: Vec<NodeId> =
            (0..count).map(|_| trees.swap_remove(random.below(trees.len() as u64) as usize)).collect();
        super::distinct::is_exact(&mut store, &set);
        let before = (used(&store), store.fingerprint());
        let expected = freed(&mut store, &set, Repeats::Never, &mut ask()).unwrap();
        let (first, second) = set.split_at(random.below(set.len() as u64 + 1) as usize);
        let (of_first, left) = freed_and_left(&mut store, first, Repeats::Never, &mut ask()).unwrap();
        if let Some(left) = left {
            let of_second = freed_after(&mut store, &left, second, Repeats::Never, &mut ask()).unwrap();
            let of_both = Freed { data: of_first.data + of_second.data, nodes: of_first.nodes + of_second.nodes };
            assert_eq!(of_both, expected, "seed {seed}: {first:?}, then {second:?}");
            parts += 1;
        }
        assert_eq!(store.fingerprint(), before.1, "counting changes nothing");
        for root in set {
            let mut root = Some(root);
            while root.is_some() {
                drop_step(&mut store, &mut root, 1000).unwrap();
            }
        }
        let after = used(&store);
        let really = Freed { data: before.0.data - after.data, nodes: before.0.nodes - after.nodes };
        assert_eq!(expected, really, "seed {seed}");
    }
    store.verify(&trees);
    parts
}

#[test]
fn what_dropping_trees_would_free_is_what_dropping_them_frees() {
    let parts: u32 = (0..40).map(|seed| drop_sets(seed, 20 + seed * 100, 12, 1)).sum();
    drop_sets(1000, 75_000, 6, 3);
    assert!(parts > 10, "{parts}");
}

/// Maps every second block of a tree to a new block.
fn fill(store: &mut Memory, mut root: NodeId, blocks: impl Iterator<Item = u64>) -> NodeId {
    for block in blocks {
        store.skip_data();
        let with = Some((store.allocate_data(1), false));
        root = replace(store, root, 2 * block..2 * block + 1, with).unwrap();
    }
    root
}

#[test]
fn trees_are_counted_after_others_without_walking_those_again() {
    let mut store = Memory::new();
    let root = create(&mut store).unwrap();
    let shared = fill(&mut store, root, 0..400);
    let copy = share(&mut store, shared);
    let copy = fill(&mut store, copy, [0, 200, 399].into_iter());
    let root = create(&mut store).unwrap();
    let large = fill(&mut store, root, 0..10_000);
    let visits = std::cell::Cell::new(0);
    let mut visit = || -> Result<()> {
        visits.set(visits.get() + 1);
        Ok(())
    };
    let (of_first, left) = freed_and_left(&mut store, &[shared, large], Repeats::Never, &mut visit).unwrap();
    let (before, left) = (visits.take(), left.unwrap());
    let of_copy = freed_after(&mut store, &left, &[copy], Repeats::Never, &mut visit).unwrap();
    assert!(before > 40 && visits.get() < 20, "{before} and {} visits", visits.get());
    assert_eq!(of_first.data, 3 + 10_000);
    let all = Freed { data: of_first.data + of_copy.data, nodes: of_first.nodes + of_copy.nodes };
    assert_eq!(all, used(&store));
}

fn scattered(seed: u64) -> (Memory, NodeId) {
    let mut store = Memory::new();
    let mut root = create(&mut store).unwrap();
    scatter(&mut store, &mut Random(seed), &mut root, 3000, 100_000);
    (store, root)
}

#[test]
fn all_trees_together_free_everything_and_one_of_several_equal_trees_frees_nothing() {
    let (mut store, root) = scattered(3);
    let copies = [root, share(&mut store, root), share(&mut store, root)];
    assert_eq!(freed(&mut store, &copies[..2], Repeats::Never, &mut ask()).unwrap(), Freed::default());
    let all = used(&store);
    assert_eq!(freed(&mut store, &copies, Repeats::Never, &mut ask()).unwrap(), all);
    assert_eq!(freed(&mut store, &[], Repeats::Never, &mut ask()).unwrap(), Freed::default());
}

#[test]
fn a_pack_that_one_tree_maps_by_several_entries_is_freed_with_the_tree() {
    let mut store = Memory::new();
    let root = create(&mut store).unwrap();
    let plain = PhysicalRun { physical: store.allocate_data(8), blocks: 8 };
    let root = replace(&mut store, root, 0..8, Some((plain.physical, false))).unwrap();
    let run = PhysicalRun { physical: store.allocate_data(2), blocks: 2 };
    store.packing = true;
    let sources = [Source { index: 0, run: plain, packed: None }];
    let root = pack(&mut store, root, 0..8, 0, run, &sources).unwrap();
    store.packing = false;
    store.drop_data_references(run.physical, run.blocks).unwrap();
    // Without the block in the middle, two entries map the pack.
    let root = replace(&mut store, root, 3..4, None).unwrap();
    store.verify(&[root]);
    assert_eq!(freed(&mut store, &[root], Repeats::Never, &mut ask()).unwrap(), Freed { data: 2, nodes: 1 });
}

#[test]
fn a_count_ends_when_it_is_asked_to() {
    let (mut store, root) = scattered(4);
    let mut visited = 0;
    let stopped = freed(&mut store, &[root], Repeats::Never, &mut || {
        visited += 1;
        if visited < 5 { Ok(()) } else { Err(crate::Error::new(crate::ErrorKind::Interrupted, "stopped")) }
    });
    assert_eq!((stopped.unwrap_err().kind(), visited), (crate::ErrorKind::Interrupted, 5));
}
