//! What keeps some blocks where they are does not keep the others.

use super::super::unreadable::lose_entries;
use super::*;

const VALUES: std::ops::RangeInclusive<u8> = 1..=32;

/// A store with these values on disk 1, twice and shared, and once on a thick disk, with a snapshot of that disk and a
/// linked clone. A pass keeps the blocks of disk 1, because they have several references already. Returns the ids of
/// the thick disk, the snapshot and the clone.
fn cloned_from_thick() -> (Arc<Engine>, u64, u64, u64) {
    let (_disk, engine) = filled(VALUES.chain(VALUES));
    assert_eq!(share(&engine, &[1]), 32);
    let thick = add_disk(&engine, "thick", 64, Provisioning::ZeroedThick);
    VALUES.for_each(|value| put(&engine, thick, u64::from(value) - 1, value));
    quiet(&engine);
    let snapshot = take(&engine, thick, "s");
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", 64)]).unwrap()[0];
    (engine, thick, snapshot, clone)
}

#[test]
fn a_block_that_a_thick_disk_maps_does_not_keep_its_neighbours() {
    let (engine, thick, _, clone) = cloned_from_thick();
    VALUES.filter(|value| *value != 17).for_each(|value| put(&engine, clone, u64::from(value) - 1, value));
    quiet(&engine);
    assert_eq!(place(&engine, clone, 16), place(&engine, thick, 16));
    assert_eq!(share(&engine, &[1, clone]), 31);
    assert_eq!(place(&engine, clone, 16), place(&engine, thick, 16));
    VALUES.for_each(|value| assert_eq!(holds(&engine, clone, u64::from(value) - 1).unwrap(), value));
    is_whole(&engine);
}

/// The blocks of the clone are adjacent, and those around the one that the thick disk maps too are shared.
#[test]
fn a_block_that_a_clone_has_in_common_with_a_thick_disk_does_not_keep_its_neighbours() {
    let (engine, thick, snapshot, clone) = cloned_from_thick();
    VALUES.filter(|value| *value != 17).for_each(|value| put(&engine, thick, u64::from(value) - 1, 100 + value));
    quiet(&engine);
    engine.detach(clone).unwrap();
    engine.delete_snapshot(snapshot).unwrap();
    quiet(&engine);
    let first = place(&engine, clone, 0);
    (0..32).for_each(|block| assert_eq!(place(&engine, clone, block), first + block));
    assert_eq!(share(&engine, &[1, clone]), 31);
    assert_eq!(place(&engine, clone, 16), place(&engine, thick, 16));
    VALUES.for_each(|value| assert_eq!(holds(&engine, clone, u64::from(value) - 1).unwrap(), value));
    is_whole(&engine);
}

#[test]
fn blocks_with_lost_entries_are_left_and_the_others_are_shared_and_packed() {
    // More than the entries of a page of the table.
    let (disk, engine) = filled((0..600).map(|block| (block % 7) as u8));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..100).for_each(|block| put(&engine, other, block, 50 + (block % 50) as u8));
    quiet(&engine);
    assert!((place(&engine, other, 0)..place(&engine, other, 99)).all(|block| block >= 512), "another page");
    let mend = lose_entries(&disk, &engine, 0);
    let mut pass = SharePass::new(vec![(1, BLOCKS), (other, BLOCKS)], PRINTS_MAX);
    let (mut shared, mut lost) = (0, 0);
    loop {
        let step = engine.share_step(&mut pass).unwrap();
        (shared, lost) = (shared + step.shared, lost + step.lost);
        if step.ended {
            break;
        }
    }
    assert!(shared >= 50 && (512..600).contains(&lost), "{shared} {lost}");
    // The lost blocks do not end the packing of the disk either.
    let (mut at, mut lost, mut packing) = (0, 0, packer());
    while at < BLOCKS {
        let step = engine.pack_step(1, at..BLOCKS, &mut packing).unwrap();
        (at, lost) = (step.next, lost + step.lost);
    }
    assert!(lost >= 512, "{lost}");
    mend();
    (0..100).for_each(|block| assert_eq!(holds(&engine, other, block).unwrap(), 50 + (block % 50) as u8));
    assert!(pack(&engine, 1, 0..BLOCKS).0 > 0);
}
