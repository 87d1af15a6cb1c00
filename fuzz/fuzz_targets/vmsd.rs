//! VMware's list of snapshots: a text that parses can be written, and parses to the same list.

#![no_main]

use libfuzzer_sys::fuzz_target;
use vmdk::vmsd::{DISKS_MAX, SNAPSHOTS_MAX, Vmsd};

fuzz_target!(|data: &[u8]| {
    let Ok(list) = Vmsd::parse(data) else { return };
    assert!(list.snapshots.len() <= SNAPSHOTS_MAX);
    assert!(list.snapshots.iter().all(|snapshot| snapshot.disks.len() <= DISKS_MAX));
    assert_eq!(Vmsd::parse(&list.to_bytes()).expect("a written list can be parsed"), list);
});
