//! What a set of trees maps: compared with all extents of these trees, in the random trees of the other files.

use super::memory::Memory;
use crate::tree::{DistinctBlocks, LOGICAL_LIMIT, NodeId, NodeStore, create, distinct, lookup_exclusive, replace};
use std::collections::{BTreeMap, BTreeSet};

/// Counts what trees map, and compares the count with their extents.
pub fn is_exact(store: &mut Memory, roots: &[NodeId]) {
    let (mut written, mut unwritten, mut own) = (BTreeSet::new(), BTreeSet::new(), 0);
    let mut packs: BTreeMap<u64, (u64, BTreeSet<usize>)> = BTreeMap::new();
    for root in roots {
        let mut extents = Vec::new();
        lookup_exclusive(store, *root, 0..LOGICAL_LIMIT, &mut extents).unwrap();
        for extent in extents {
            if let Some(packed) = extent.packed {
                let (stored, used) = packs.entry(extent.physical).or_default();
                *stored = u64::from(packed.stored);
                used.extend((usize::from(packed.index)..).take(extent.blocks as usize));
                continue;
            }
            let blocks = extent.physical..extent.physical + extent.blocks;
            if extent.unwritten { &mut unwritten } else { &mut written }.extend(blocks.clone());
            let single = store.data(blocks).unwrap().iter().filter(|references| **references == 1).count();
            own += if extent.shared_path { 0 } else { single as u64 };
        }
    }
    let before = store.fingerprint();
    let mut found = BTreeMap::new();
    let counted = distinct(store, roots, &mut || Ok(()), &mut |pack| {
        let used = (0..256).filter(|index| pack.has(*index)).collect();
        assert!(found.insert(pack.run.physical, (pack.run.blocks, used)).is_none(), "a pack is found twice");
    });
    assert_eq!(store.fingerprint(), before, "counting changes nothing");
    let expected = DistinctBlocks {
        written: written.len() as u64,
        unwritten: unwritten.len() as u64,
        packed: packs.values().map(|(_, used)| used.len() as u64).sum(),
        packs: packs.values().map(|(stored, _)| stored).sum(),
        own,
    };
    assert_eq!(counted.unwrap(), expected);
    assert!(found == packs);
}

#[test]
fn blocks_that_several_trees_map_count_once() {
    let mut store = Memory::new();
    let root = create(&mut store).unwrap();
    let old = store.allocate_data(100);
    let first = replace(&mut store, root, 0..100, Some((old, false))).unwrap();
    let count = |store: &mut Memory, roots: &[NodeId]| {
        distinct(store, roots, &mut || Ok(()), &mut |_| panic!("there are no packs")).unwrap()
    };
    assert_eq!(count(&mut store, &[first]), DistinctBlocks { written: 100, own: 100, ..DistinctBlocks::default() });
    store.add_reference(first).unwrap();
    store.skip_data();
    let new = store.allocate_data(10);
    let second = replace(&mut store, first, 95..105, Some((new, true))).unwrap();
    for roots in [[first, second], [second, first]] {
        let both = count(&mut store, &roots);
        // The first tree has five blocks alone, the second all of its new ones.
        assert_eq!(both, DistinctBlocks { written: 100, unwritten: 10, own: 15, ..DistinctBlocks::default() });
        assert_eq!((both.mapped(), both.stored()), (110, 110));
    }
    assert_eq!(count(&mut store, &[]), DistinctBlocks::default());
}
