//! Requests for more changes than one batch of the journal holds.

use super::*;

#[test]
fn snapshots_of_too_many_disks_in_one_request_are_refused_before_the_first_is_taken() {
    const DISKS: usize = 1200;
    let (disk, engine) = made();
    let base = take(&engine, 1, "base");
    let clones: Vec<NewDisk> = (0..DISKS).map(|i| new_disk(&format!("clone-{i}"), BLOCKS)).collect();
    let clones = engine.clone_snapshot(base, &clones).unwrap();
    let wanted: Vec<NewSnapshot> = clones
        .iter()
        .map(|clone| NewSnapshot { disk: *clone, name: "s".into(), uuid: [2; 16], incomplete: false })
        .collect();
    let refused = engine.snapshot(&wanted).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    assert!(refused.to_string().contains("1200 changes in one request do not fit"), "{refused}");
    assert_eq!(engine.failure(), None);
    assert!(engine.with_catalog(|catalog| clones.iter().all(|clone| catalog.snapshot(*clone, "s").is_none())));
    // Fewer at a time fit.
    engine.snapshot(&wanted[..DISKS / 2]).unwrap();
    engine.snapshot(&wanted[DISKS / 2..]).unwrap();
    write(&engine, 0, 1);
    engine.flush().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert!(engine.with_catalog(|catalog| clones.iter().all(|clone| catalog.snapshot(*clone, "s").is_some())));
    is_whole(&engine);
}
