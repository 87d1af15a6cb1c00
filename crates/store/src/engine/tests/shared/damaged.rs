//! Damage of shared blocks: a check names every disk and snapshot that has them, and each place in it.

use super::*;
use crate::engine::{Affected, Finding};

const BLOCK: u64 = BLOCK_SIZE as u64;

fn check(engine: &Engine, repair: bool) -> Vec<Finding> {
    engine.check(CheckOptions { data: true, repair }, &|_, _| true).unwrap().findings
}

fn place(name: &str, block: u64, blocks: u64) -> Affected {
    Affected { name: name.into(), offset: block * BLOCK, length: blocks * BLOCK }
}

fn damage(disk: &SimulatedDisk, engine: &Engine, object: u64, logical: u64) {
    let (run, _) = super::super::packed::place(engine, object, logical);
    let (_, offset) = engine.files.locate(Run { blocks: 1, ..run }).unwrap();
    disk.flip_bit("data.0000", offset + 100, 1).unwrap();
}

/// A store of which block 5 of a disk is stored once for several places of it, and for other disks and a snapshot.
fn shared_by(others: u64) -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = filled((0..20).map(|block| if block % 5 == 0 { 7 } else { 100 + block as u8 }));
    let ids: Vec<u64> =
        (0..others).map(|number| add_disk(&engine, &format!("other{number}"), BLOCKS, Provisioning::Thin)).collect();
    for id in &ids {
        put(&engine, *id, 100, 7);
        put(&engine, *id, 101, 7);
    }
    quiet(&engine);
    take(&engine, 1, "s");
    share(&engine, &[[1].as_slice(), &ids].concat());
    quiet(&engine);
    (disk, engine)
}

#[test]
fn a_check_names_every_place_of_every_disk_that_has_a_damaged_block() {
    const OTHERS: u64 = 12;
    for repair in [false, true] {
        let (disk, engine) = shared_by(OTHERS);
        damage(&disk, &engine, 1, 5);
        let findings = check(&engine, repair);
        let [Finding { problem, repaired: None, places, unlisted: 0 }] = &findings[..] else { panic!("{findings:?}") };
        let mut expected: Vec<Affected> = (0..OTHERS).map(|number| place(&format!("other{number}"), 100, 2)).collect();
        for block in [0, 5, 10, 15] {
            expected.extend(["vm", "vm@s"].map(|name| place(name, block, 1)));
        }
        let sorted = |places: &[Affected]| {
            let mut places: Vec<(String, u64, u64)> =
                places.iter().map(|place| (place.name.clone(), place.offset, place.length)).collect();
            places.sort_unstable();
            places
        };
        assert_eq!(sorted(places), sorted(&expected));
        // The text has a limited length.
        assert!(problem.contains("disk 'other0' at offset 409600, disk 'other1'"), "{problem}");
        assert!(problem.ends_with(", and 6 more disks and snapshots") && problem.len() < 600, "{problem}");
    }
}

#[test]
fn a_check_lists_the_places_of_a_block_of_many_places_up_to_a_limit() {
    let (disk, engine) = filled((0..120).map(|block| if block % 2 == 0 { 7 } else { 100 + block as u8 }));
    assert_eq!(share(&engine, &[1]), 59);
    quiet(&engine);
    damage(&disk, &engine, 1, 0);
    let findings = check(&engine, false);
    let places = &findings[0].places;
    assert_eq!(places.len(), 16);
    assert_eq!((&places[0], &places[14]), (&place("vm", 0, 1), &place("vm", 28, 1)));
    assert_eq!(places[15], place("vm", 30, 89), "the last one contains the others");
    assert!(
        findings[0]
            .problem
            .ends_with("disk 'vm' at offsets 0, 8192, 16384, 24576, 32768, 40960, 49152, 57344 and 8 more")
    );
}

#[test]
fn the_number_of_places_of_all_findings_is_limited() {
    let (disk, engine) = filled(0..100);
    for number in 0..5 {
        let snapshot = take(&engine, 1, &format!("s{number}"));
        assert!(snapshot > 0);
    }
    quiet(&engine);
    (0..60).for_each(|block| damage(&disk, &engine, 1, block));
    let findings = check(&engine, false);
    assert_eq!(findings.len(), 60);
    let listed: usize = findings.iter().map(|finding| finding.places.len()).sum();
    let unlisted: u64 = findings.iter().map(|finding| finding.unlisted).sum();
    assert_eq!((listed, unlisted), (256, 6 * 60 - 256));
    assert!(findings.iter().all(|finding| finding.problem.contains("snapshot 'vm@s4' at offset")));
}
