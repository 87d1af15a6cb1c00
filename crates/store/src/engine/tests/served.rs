//! Requests of a disk do not wait for reads of metadata that a scrub, or the write of another disk, needs.

use super::between::{before_next, lose_page};
use super::unreadable::{flush_disk, grown, leaves, try_write};
use super::*;
use crate::pages::PageKey;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::time::Instant;
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

/// Scrubs the map. Returns the damage.
fn scrub_map(engine: &Engine) -> Vec<Damage> {
    let scrubber = engine.scrubber();
    let mut at = ScrubPosition { part: ScrubPart::Pages(PageFile::Map), next: 0 };
    let mut damage = Vec::new();
    while at.part == ScrubPart::Pages(PageFile::Map) {
        let step = scrubber.step(at).unwrap();
        damage.extend(step.damage);
        at = step.next.unwrap();
    }
    damage
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
    let reads = serve_during_reads(&disk, &engine);
    let damage = scrub_map(&engine);
    disk.set_pace(Arc::new(|_| {}));
    assert!(damage.len() == 1 && damage[0].repaired.is_some(), "{damage:?}");
    assert!(reads.load(Ordering::SeqCst) >= 3, "{reads:?}");
}

#[test]
fn other_disks_are_served_while_the_medium_is_read_for_a_lost_write() {
    let (disk, engine) = damaged();
    write(&engine, leaves(&disk)[2].0, 9);
    let reads = serve_during_reads(&disk, &engine);
    let told = flush_disk(&engine, 1).unwrap_err();
    disk.set_pace(Arc::new(|_| {}));
    assert!(told.to_string().contains("are lost"), "{told}");
    assert!(reads.load(Ordering::SeqCst) >= 3, "{reads:?}");
    flush_disk(&engine, 1).unwrap();
}

/// No survey reads this page in advance, because it cannot be read.
#[test]
fn no_flush_holds_locks_while_the_medium_fails_to_read_what_the_sealing_of_a_snapshot_needs() {
    let (disk, engine) = with_a_block(256);
    engine.discard_blocks(&engine.head(1), 100..101).unwrap();
    take(&engine, 1, "s");
    let _mend = lose_page(&disk, "map.table", 0);
    engine.meta.lock().pages.drop_clean();
    let (other, reads) = (Arc::clone(&engine), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&reads);
    disk.set_pace(Arc::new(move |request| {
        if request != Request::Read {
            return;
        }
        let (engine, (done, wait)) = (Arc::clone(&other), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            drop(engine.log.lock());
            drop(engine.meta.lock());
            let _ = done.send(());
        });
        assert!(wait.recv_timeout(Duration::from_secs(10)).is_ok(), "locks are held during a read");
        counted.fetch_add(1, Ordering::SeqCst);
    }));
    engine.flush().unwrap();
    disk.set_pace(Arc::new(|_| {}));
    assert!(reads.load(Ordering::SeqCst) >= 1, "{reads:?}");
}

/// After many hits, changes are not surveyed.
#[test]
fn other_disks_are_served_while_a_write_that_was_not_surveyed_reads_metadata() {
    let disk = grown();
    let engine = open(&disk).unwrap();
    try_write(&engine, 2, 0, 1).unwrap();
    engine.settle(&engine.head(2)).unwrap();
    for (number, (block, _)) in leaves(&disk)[2..4].iter().enumerate() {
        write(&engine, *block, 9);
        {
            let mut meta = engine.meta.lock();
            while !meta.pages.is_warm() {
                meta.entry(0).unwrap();
            }
        }
        let reads = serve_during_reads(&disk, &engine);
        match number {
            0 => engine.settle(&engine.head(1)).unwrap(),
            _ => engine.flush().unwrap(),
        }
        disk.set_pace(Arc::new(|_| {}));
        assert!(reads.load(Ordering::SeqCst) >= 1, "{reads:?}");
        assert_eq!(value(&engine, *block).unwrap(), 9);
    }
    is_whole(&engine);
}

#[test]
fn a_write_is_kept_if_its_page_was_restored_after_the_read_of_it_failed() {
    let (disk, engine) = damaged();
    let ((block, leaf), head, mut fetch) = (leaves(&disk)[2], engine.head(1), metadata::Fetch::default());
    write(&engine, block, 9);
    let replaced = engine.meta.lock().pages.replaced();
    let part = block..block + 1;
    assert!(!engine.read_lost(&head, &part, false, false, &mut fetch).is_empty());
    assert!(scrub_map(&engine)[0].repaired.is_some());
    engine.checkpoint().unwrap();
    // As if the page was evicted.
    engine.meta.lock().pages.forget(PageKey::new(PageFile::Map, leaf));
    let removal = engine.remove_lost(&head, part, false, None, replaced, &mut fetch);
    assert!(matches!(removal, isolate::Removal::Changed));
    flush_disk(&engine, 1).unwrap();
    assert_eq!(value(&engine, block).unwrap(), 9);
    is_whole(&engine);
}

/// The medium may take longer to fail a read than two failures of one event may be apart.
#[test]
fn a_change_that_reads_what_it_misses_is_still_the_same_attempt() {
    let ways: [fn(&Engine); 3] = [
        |engine| engine.flush().unwrap(),
        |engine| engine.settle(&engine.head(1)).unwrap(),
        |engine| assert!(engine.write_back_once().unwrap()),
    ];
    for (number, way) in ways.into_iter().enumerate() {
        let disk = grown();
        let (block, leaf) = leaves(&disk)[2];
        let _mend = lose_page(&disk, "map", leaf);
        let engine = open(&disk).unwrap();
        write(&engine, block, 9);
        let since = Instant::now().checked_sub(2 * isolate::APART).unwrap();
        let other = Arc::clone(&engine);
        // The attempt has begun before the limit, and starts again after it.
        before_next(&disk, Request::Read, move || {
            let last = Instant::now().checked_sub(isolate::APART).unwrap();
            other.isolation.failing.lock().insert(isolate::ANY_PAGE.to_owned(), (since, last));
        });
        way(&engine);
        assert_eq!(engine.isolation.failing.lock()[isolate::ANY_PAGE].0, since, "way {number}");
    }
}

#[test]
fn a_change_that_waits_for_a_failing_read_of_another_thread_does_not_repeat_it() {
    let disk = grown();
    let engine = open(&disk).unwrap();
    let key = PageKey::new(PageFile::Map, leaves(&disk)[2].1);
    let mut fetch = metadata::Fetch::default();
    let load = {
        let mut meta = engine.meta.lock();
        meta.pages.drop_clean();
        let missed = fetch.require(&mut meta, |meta| meta.pages.get(key).map(|_| ()));
        assert_eq!(missed.unwrap_err().kind(), ErrorKind::Busy);
        meta.pages.begin_load(key).unwrap().1
    };
    let other = Arc::clone(&engine);
    let reader = std::thread::spawn(move || {
        // This thread and the page cache refer to the read, and then the thread that waits for it.
        while Arc::strong_count(&load) < 3 {
            std::thread::yield_now();
        }
        let failed = crate::Error::new(ErrorKind::Io, "the medium cannot read the page");
        assert!(other.meta.lock().pages.end_load(key, &load, Err(failed)).is_err());
    });
    assert!(engine.meta.load_missing(&mut fetch).unwrap());
    reader.join().unwrap();
    assert!(fetch.has_lost());
    let failed = fetch.require(&mut engine.meta.lock(), |meta| meta.pages.get(key).map(|_| ()));
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
}
