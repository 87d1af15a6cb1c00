//! The fill and depth of trees, and the cost of operations.

use super::Random;
use super::memory::{Memory, content};
use crate::FILE_BLOCKS;
use crate::tree::page::{self, ENTRIES_MAX};
use crate::tree::{LOGICAL_LIMIT, NodeId, NodeStore, Visit, create, diff, drop_step, lookup, replace, walk};

const MILLION: u64 = 1_000_000;

/// The average fill of the leaves, and the level of the root.
fn shape(store: &mut Memory, root: NodeId) -> (f64, u8) {
    let (mut leaves, mut extents) = (0, 0);
    walk(store, root, &mut |visit| {
        match visit {
            Visit::Node { level: 0, .. } => leaves += 1,
            Visit::Node { .. } => {}
            Visit::Extent(_) => extents += 1,
        }
        Ok(true)
    })
    .unwrap();
    (f64::from(extents) / (f64::from(leaves) * ENTRIES_MAX as f64), page::level(store.page(root)))
}

/// A tree of single blocks that are mapped in the given order and are not adjacent on the medium.
fn fill(store: &mut Memory, blocks: impl Iterator<Item = u64>) -> NodeId {
    let mut root = create(store).unwrap();
    for block in blocks {
        store.skip_data();
        let physical = store.allocate_data(1);
        root = replace(store, root, block..block + 1, Some((physical, false))).unwrap();
    }
    root
}

fn shuffled(count: u64) -> Vec<u64> {
    let mut random = Random(1);
    let mut order: Vec<u64> = (0..count).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    order
}

#[test]
fn a_sequential_fill_packs_its_nodes() {
    let mut store = Memory::new();
    let root = fill(&mut store, 0..MILLION);
    let (fill, level) = shape(&mut store, root);
    assert!(fill >= 0.99, "leaves are {fill} full");
    assert_eq!(level, 2);
    assert!(store.live_pages() <= 3970, "{} nodes", store.live_pages());
    store.verify(&[root]);
}

/// Models a guest that writes several files at once: each stream fills its own leaves.
#[test]
fn interleaved_sequential_streams_pack_their_nodes() {
    let mut store = Memory::new();
    let root = fill(&mut store, (0..400_000).map(|i| (i % 4) * MILLION + i / 4));
    let (fill, _) = shape(&mut store, root);
    assert!(fill >= 0.90, "leaves are {fill} full");
}

#[test]
fn a_random_fill_leaves_nodes_two_thirds_full() {
    let mut store = Memory::new();
    let root = fill(&mut store, shuffled(MILLION).into_iter());
    let (fill, level) = shape(&mut store, root);
    assert!(fill >= 0.60, "leaves are {fill} full");
    assert_eq!(level, 2);
    store.verify(&[root]);
}

/// Nodes that lose entries are merged, so discards also make the map smaller.
#[test]
fn removals_free_nodes_of_a_tree() {
    let mut store = Memory::new();
    let order = shuffled(300_000);
    let mut root = fill(&mut store, order.iter().copied());
    let before = store.live_pages();
    let mut left = order.len();
    for (until, level_expected) in [(30_000, 2), (3000, 1), (100, 0)] {
        for block in &order[until..left] {
            root = replace(&mut store, root, *block..*block + 1, None).unwrap();
        }
        left = until;
        let (fill, level) = shape(&mut store, root);
        assert!(fill >= 0.39, "leaves are {fill} full");
        assert_eq!(level, level_expected, "level of the root over {left} blocks");
        store.verify(&[root]);
    }
    assert_eq!(store.live_pages(), 1, "of {before} pages");
}

#[test]
fn consecutive_blocks_become_long_extents() {
    let mut store = Memory::new();
    let mut root = create(&mut store).unwrap();
    for block in 0..MILLION {
        let physical = store.allocate_data(1);
        root = replace(&mut store, root, block..block + 1, Some((physical, false))).unwrap();
    }
    let mut extents = Vec::new();
    lookup(&mut store, root, 0..LOGICAL_LIMIT, &mut extents).unwrap();
    let last = (MILLION % FILE_BLOCKS).div_ceil(page::EXTENT_BLOCKS_MAX);
    assert_eq!(extents.len() as u64, MILLION / FILE_BLOCKS * FILE_BLOCKS.div_ceil(page::EXTENT_BLOCKS_MAX) + last);
    assert_eq!(content(&mut store, root).len() as u64, MILLION);
}

/// The entry of a leaf that reaches into the next data file was written by version 0.1.0.
#[test]
fn no_extent_reaches_into_the_next_data_file() {
    let mut store = Memory::new();
    // Eight blocks, of which four are in the next file.
    let allocate = |store: &mut Memory| {
        while store.allocate_data(0) % FILE_BLOCKS != FILE_BLOCKS - 4 {
            store.skip_data();
        }
        let physical = store.allocate_data(4);
        assert_eq!(store.allocate_data(4), physical + 4);
        physical
    };
    let physical = allocate(&mut store);
    let mut root = create(&mut store).unwrap();
    for i in 0..8 {
        root = replace(&mut store, root, i..i + 1, Some((physical + i, false))).unwrap();
    }
    let found = |store: &mut Memory, root: NodeId, physical: u64| {
        let mut extents = Vec::new();
        lookup(store, root, 0..8, &mut extents).unwrap();
        let found: Vec<_> = extents.iter().map(|extent| (extent.logical, extent.physical, extent.blocks)).collect();
        assert_eq!(found, [(0, physical, 4), (4, physical + 4, 4)]);
    };
    assert_eq!(page::mappings_from(store.page(root), 0).count(), 2);
    found(&mut store, root, physical);
    store.verify(&[root]);
    let physical = allocate(&mut store);
    let root = replace(&mut store, root, 0..8, Some((physical, false))).unwrap();
    assert_eq!(page::mappings_from(store.page(root), 0).count(), 1);
    found(&mut store, root, physical);
    store.verify(&[root]);
}

#[test]
fn an_extent_joins_both_neighbours() {
    let mut store = Memory::new();
    let physical = store.allocate_data(3);
    let mut root = create(&mut store).unwrap();
    for block in [0, 2, 1] {
        root = replace(&mut store, root, 10 + block..11 + block, Some((physical + block, true))).unwrap();
    }
    let mut extents = Vec::new();
    lookup(&mut store, root, 0..100, &mut extents).unwrap();
    assert_eq!(extents.iter().map(|e| (e.logical, e.blocks)).collect::<Vec<_>>(), [(10, 3)]);
}

#[test]
fn moving_one_block_of_an_exclusive_tree_touches_its_path_only() {
    let mut store = Memory::new();
    let root = fill(&mut store, shuffled(200_000).into_iter());
    let (loads, allocations) = (store.loads, store.allocations);
    store.skip_data();
    let physical = store.allocate_data(1);
    assert_eq!(replace(&mut store, root, 77_777..77_778, Some((physical, false))).unwrap(), root);
    assert_eq!(store.allocations, allocations);
    assert!(store.loads - loads <= 4, "{} loads", store.loads - loads);
}

#[test]
fn a_write_after_a_snapshot_copies_one_path() {
    let mut store = Memory::new();
    let root = fill(&mut store, shuffled(200_000).into_iter());
    store.add_reference(root).unwrap();
    let allocations = store.allocations;
    let physical = store.allocate_data(1);
    let head = replace(&mut store, root, 5..6, Some((physical, false))).unwrap();
    assert_eq!(store.allocations - allocations, 3);
    store.verify(&[root, head]);
}

#[test]
fn a_diff_visits_only_differing_nodes() {
    let mut store = Memory::new();
    let root = fill(&mut store, shuffled(MILLION).into_iter());
    store.add_reference(root).unwrap();
    let mut head = root;
    for block in [3, 500_000, 500_001, 999_999] {
        let physical = store.allocate_data(1);
        head = replace(&mut store, head, block..block + 1, Some((physical, false))).unwrap();
    }
    let loads = store.loads;
    let mut found = Vec::new();
    diff(&mut store, Some(root), Some(head), 0..LOGICAL_LIMIT, &mut |e| {
        found.push((e.logical, e.blocks, e.in_b));
        Ok(())
    })
    .unwrap();
    assert_eq!(found, [(3, 1, true), (500_000, 2, true), (999_999, 1, true)]);
    // In each tree, the cursor passes the entries of the root, of up to three nodes below it, and of three leaves. Each
    // node is two thirds full.
    let loads = store.loads - loads;
    assert!(loads <= 2 * 5 * ENTRIES_MAX as u64, "{loads} loads in trees with {} nodes", store.live_pages());
}

#[test]
fn unmapping_all_of_a_shared_tree_does_not_visit_it() {
    let mut store = Memory::new();
    let root = fill(&mut store, shuffled(200_000).into_iter());
    store.add_reference(root).unwrap();
    let loads = store.loads;
    let head = replace(&mut store, root, 0..LOGICAL_LIMIT, None).unwrap();
    assert!(store.loads - loads < 20, "{} loads", store.loads - loads);
    assert!(content(&mut store, head).is_empty());
    store.verify(&[root, head]);
}

#[test]
fn a_step_of_dropping_a_tree_frees_a_limited_number_of_nodes() {
    let mut store = Memory::new();
    let mut root = Some(fill(&mut store, shuffled(200_000).into_iter()));
    let mut steps = 0;
    while root.is_some() {
        let before = store.live_pages();
        drop_step(&mut store, &mut root, 10).unwrap();
        assert!(before - store.live_pages() <= 10 + 2, "ten leaves, and parents that became empty");
        steps += 1;
    }
    assert!(steps > 100);
    assert_eq!((store.live_pages(), store.live_data()), (0, 0));
}

#[test]
fn ranges_past_the_address_space_are_refused() {
    let mut store = Memory::new();
    let root = create(&mut store).unwrap();
    let before = store.fingerprint();
    for (range, with) in [
        (LOGICAL_LIMIT - 1..LOGICAL_LIMIT + 1, None),
        (LOGICAL_LIMIT..u64::MAX, Some((0, false))),
        (0..2, Some((page::PHYSICAL_LIMIT - 1, false))),
        (0..1, Some((u64::MAX, true))),
    ] {
        let error = replace(&mut store, root, range, with).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid);
    }
    assert_eq!(store.fingerprint(), before);
    let physical = store.allocate_data(1);
    let root = replace(&mut store, root, LOGICAL_LIMIT - 1..LOGICAL_LIMIT, Some((physical, false))).unwrap();
    let mut found = Vec::new();
    lookup(&mut store, root, 0..u64::MAX, &mut found).unwrap();
    assert_eq!(found.len(), 1);
    lookup(&mut store, root, LOGICAL_LIMIT..u64::MAX, &mut found).unwrap();
    assert_eq!(found.len(), 1);
}
