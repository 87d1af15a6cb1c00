//! Requests of a disk do not wait for reads of metadata that a scrub needs.

use super::unreadable::{grown, leaves, try_write};
use super::*;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use backend::simulated::Request;
use std::time::Duration;

/// A store in which a leaf of disk 1 has a wrong bit; disk 2 has a block.
fn damaged() -> (SimulatedDisk, Arc<Engine>) {
    let disk = grown();
    let (_, leaf) = leaves(&disk)[2];
    disk.flip_bit("map", leaf * BLOCK_SIZE as u64 + 100, 1).unwrap();
    let engine = open(&disk).unwrap();
    try_write(&engine, 2, 0, 1).unwrap();
    engine.settle(&engine.head(2)).unwrap();
    (disk, engine)
}

/// From now on, each read of the medium lasts until disk 2 was written and written back. Returns the number of reads.
fn serve_during_reads(disk: &SimulatedDisk, engine: &Arc<Engine>) -> Arc<AtomicU64> {
    let (other, busy, reads) = (Arc::clone(engine), AtomicBool::new(false), Arc::new(AtomicU64::new(0)));
    let served = Arc::clone(&reads);
    disk.set_pace(Arc::new(move |request| {
        // The thread of disk 2 may read, too.
        if request != Request::Read || busy.swap(true, Ordering::SeqCst) {
            return;
        }
        let (engine, (done, wait)) = (Arc::clone(&other), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            try_write(&engine, 2, 0, 2).unwrap();
            engine.settle(&engine.head(2)).unwrap();
            let _ = done.send(());
        });
        assert!(wait.recv_timeout(Duration::from_secs(10)).is_ok(), "another disk waits for the medium");
        served.fetch_add(1, Ordering::SeqCst);
        busy.store(false, Ordering::SeqCst);
    }));
    reads
}

#[test]
fn other_disks_are_served_while_a_scrub_reads_a_damaged_page() {
    let (disk, engine) = damaged();
    let scrubber = engine.scrubber();
    let mut at = ScrubPosition { part: ScrubPart::Pages(PageFile::Map), next: 0 };
    let mut damage = Vec::new();
    let reads = serve_during_reads(&disk, &engine);
    while at.part == ScrubPart::Pages(PageFile::Map) {
        let step = scrubber.step(at).unwrap();
        damage.extend(step.damage);
        at = step.next.unwrap();
    }
    disk.set_pace(Arc::new(|_| {}));
    assert!(damage.len() == 1 && damage[0].repaired.is_some(), "{damage:?}");
    assert!(reads.load(Ordering::SeqCst) >= 3, "{reads:?}");
}
