//! Invalid bytes in nodes, and stores that return errors.

use super::Random;
use super::memory::Memory;
use crate::ErrorKind;
use crate::tree::{
    LOGICAL_LIMIT, NodeId, NodeStore, create, diff, drop_step, lookup, lookup_exclusive, page, replace, validate, walk,
};
use backend::{BLOCK_SIZE, Block};

/// Two trees that share nodes, of three levels.
fn two_trees() -> (Memory, NodeId, NodeId) {
    let mut store = Memory::new();
    let mut random = Random(7);
    let mut root = create(&mut store).unwrap();
    for _ in 0..60_000 {
        let block = random.below(1 << 22);
        store.skip_data();
        let physical = store.allocate_data(1);
        root = replace(&mut store, root, block..block + 1, Some((physical, random.percent(10)))).unwrap();
    }
    store.add_reference(root).unwrap();
    let mut head = root;
    for _ in 0..40 {
        let block = random.below(1 << 22);
        let physical = store.allocate_data(5);
        head = replace(&mut store, head, block..block + 5, Some((physical, false))).unwrap();
    }
    store.verify(&[root, head]);
    assert_eq!(page::level(store.page(root)), 2);
    (store, root, head)
}

/// A root and a leaf of a real tree.
fn samples() -> Vec<(NodeId, Block)> {
    let (store, root, _) = two_trees();
    let leaf = store.live_ids().into_iter().find(|id| page::level(store.page(*id)) == 0).unwrap();
    vec![(root, *store.page(root)), (leaf, *store.page(leaf))]
}

#[test]
fn each_field_of_a_node_is_checked() {
    for (id, node) in samples() {
        validate(&node, id).unwrap();
        assert_eq!(validate(&node, NodeId(id.0 + 1)).unwrap_err().kind(), ErrorKind::Corrupt, "wrong place");
        let last = 32 + 16 * (page::count(&node) - 1);
        let second = 32 + 16;
        let cases: [(&str, usize, &[u8], ErrorKind); 11] = [
            ("magic", 0, b"LMNE", ErrorKind::Corrupt),
            ("version", 4, &[2, 0], ErrorKind::Unsupported),
            ("level", 6, &[16], ErrorKind::Corrupt),
            ("reserved byte", 7, &[1], ErrorKind::Corrupt),
            ("count too large", 8, &[255, 0], ErrorKind::Corrupt),
            ("count too small", 8, &[1, 0], ErrorKind::Corrupt),
            ("reserved bytes", 10, &[0, 1], ErrorKind::Corrupt),
            ("reserved word", 24, &[0, 0, 0, 0, 0, 0, 0, 1], ErrorKind::Corrupt),
            ("unknown high bits", second + 7, &[1], ErrorKind::Corrupt),
            ("order", second, &[0; 8], ErrorKind::Corrupt),
            ("past the address space", last, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0], ErrorKind::Corrupt),
        ];
        for (what, offset, bytes, kind) in cases {
            let mut damaged = node;
            damaged.0[offset..offset + bytes.len()].copy_from_slice(bytes);
            let error = validate(&damaged, id).map(|()| what).unwrap_err();
            assert_eq!(error.kind(), kind, "{what}: {error}");
            assert!(error.to_string().contains(&format!("node {id}")), "{error}");
        }
        let mut checksum = node;
        checksum.0[12..16].fill(0xa5);
        validate(&checksum, id).unwrap();
    }
}

#[test]
fn validation_of_random_nodes_never_panics() {
    let mut random = Random(8);
    let samples = samples();
    let mut passed = 0;
    for _ in 0..200_000 {
        let (id, mut node) = samples[random.below(2) as usize];
        for _ in 0..1 + random.below(3) {
            let limit = if random.percent(50) { 64 } else { BLOCK_SIZE as u64 };
            let at = random.below(limit) as usize;
            node.0[at] ^= 1 << random.below(8);
        }
        passed += u32::from(validate(&node, id).is_ok());
    }
    assert!(passed > 0, "some flips (targets, checksum) cannot be seen here");
}

/// Runs every operation. Each may fail, but none may panic or run endlessly.
fn exercise(store: &mut Memory, random: &mut Random, root: NodeId, head: NodeId) {
    let mut root = root;
    let mut head = head;
    for _ in 0..12 {
        let start = random.below(1 << 22);
        let bits = random.below(20);
        let length = 1 + random.below(1 << bits);
        let range = start..start + length;
        let mut out = Vec::new();
        let _ = lookup(store, root, range.clone(), &mut out);
        let _ = lookup_exclusive(store, head, range.clone(), &mut out);
        let _ = diff(store, Some(root), Some(head), range.clone(), &mut |_| Ok(()));
        let with = (length < 5000).then(|| (store.allocate_data(length), false));
        head = replace(store, head, range.clone(), with).unwrap_or(head);
        root = replace(store, root, range.start..range.start + 1, None).unwrap_or(root);
    }
    let mut visited = 0;
    let _ = walk(store, root, &mut |_| {
        visited += 1;
        Ok(visited < 1_000_000)
    });
    let _ = diff(store, Some(root), Some(head), 0..LOGICAL_LIMIT, &mut |_| Ok(()));
    for root in [root, head] {
        let mut rest = Some(root);
        for _ in 0..100 {
            let _ = drop_step(store, &mut rest, 100);
        }
    }
}

#[test]
fn inconsistent_trees_cause_errors() {
    let (sound, root, head) = two_trees();
    let ids = sound.live_ids();
    for seed in 0..60 {
        let mut random = Random(seed);
        let mut store = sound.clone();
        store.strict = false;
        for _ in 0..1 + random.below(40) {
            let id = if random.percent(20) { head } else { ids[random.below(ids.len() as u64) as usize] };
            let other = ids[random.below(ids.len() as u64) as usize];
            match random.below(4) {
                0 => {
                    // Redirects a child pointer or a physical address.
                    let count = page::count(store.page(id)) as u64;
                    let at = 32 + 16 * random.below(count.max(1)) as usize + 8;
                    store.page_mut(id).0[at..at + 8].copy_from_slice(&other.0.to_le_bytes());
                }
                1 => {
                    // Replaces the node by the content of another node, under its own number.
                    *store.page_mut(id) = *sound.page(other);
                    page::set_id(store.page_mut(id), id);
                }
                2 => store.page_mut(id).0[6] = random.below(17) as u8,
                _ => store.page_mut(id).0[random.below(BLOCK_SIZE as u64) as usize] ^= 1 << random.below(8),
            }
        }
        exercise(&mut store, &mut random, root, head);
    }
}

#[test]
fn a_failing_store_fails_only_the_operation() {
    let (sound, root, head) = two_trees();
    for seed in 0..60 {
        let mut random = Random(seed);
        let mut store = sound.clone();
        store.strict = false;
        let bits = random.below(14);
        store.fail_in = Some(random.below(1 << bits));
        exercise(&mut store, &mut random, root, head);
        let mut out = Vec::new();
        if store.fail_in == Some(0) {
            assert_eq!(lookup(&mut store, root, 0..1, &mut out).unwrap_err().kind(), ErrorKind::Io);
        }
    }
}
