//! Requests of a disk do not wait for reads of metadata that another disk needs.

use super::unreadable::{flush_disk, grown, leaves, try_write};
use super::*;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use backend::simulated::Request;
use std::time::Duration;

/// During each read of the medium for a write that cannot enter the map, another disk is written and written back.
#[test]
fn other_disks_are_served_while_the_medium_is_read_for_a_lost_write() {
    let disk = grown();
    let (block, leaf) = leaves(&disk)[2];
    disk.flip_bit("map", leaf * BLOCK_SIZE as u64 + 100, 1).unwrap();
    let engine = open(&disk).unwrap();
    try_write(&engine, 2, 0, 1).unwrap();
    engine.settle(&engine.head(2)).unwrap();
    write(&engine, block, 9);
    let (other, busy, reads) = (Arc::clone(&engine), AtomicBool::new(false), Arc::new(AtomicU64::new(0)));
    let served = Arc::clone(&reads);
    disk.set_pace(Arc::new(move |request| {
        // The other disk's thread may read, too.
        if request != Request::Read || busy.swap(true, Ordering::SeqCst) {
            return;
        }
        let (engine, (done, wait)) = (Arc::clone(&other), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            try_write(&engine, 2, 0, 2).unwrap();
            engine.settle(&engine.head(2)).unwrap();
            let _ = done.send(());
        });
        let waited = wait.recv_timeout(Duration::from_secs(10));
        served.fetch_add(u64::from(waited.is_ok()), Ordering::SeqCst);
        assert!(waited.is_ok(), "another disk waits for the medium");
        busy.store(false, Ordering::SeqCst);
    }));
    let told = flush_disk(&engine, 1).unwrap_err();
    disk.set_pace(Arc::new(|_| {}));
    assert!(told.to_string().contains("are lost"), "{told}");
    assert!(reads.load(Ordering::SeqCst) >= 2, "{reads:?}");
    flush_disk(&engine, 1).unwrap();
}
