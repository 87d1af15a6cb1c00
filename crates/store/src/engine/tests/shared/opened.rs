//! Shares while other disks are opened, and with many trees.

use super::*;
use std::time::Duration;

/// A step locks the buffers of the disks that it changes. Here one of these disks gets a buffer while the step waits
/// for the buffer of another: because it is opened, or because it was reverted and is opened again.
#[test]
fn blocks_with_a_write_to_a_disk_that_got_a_buffer_during_the_step_are_not_shared() {
    for reverted in [false, true] {
        let (disk, engine) = filled([4]);
        let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
        put(&engine, other, 0, 4);
        quiet(&engine);
        engine.close().unwrap();
        drop(engine);
        let engine = open(&disk).unwrap();
        let head = engine.head(1);
        let old = reverted.then(|| engine.head(other));
        let (read, wait) = std::sync::mpsc::channel();
        before_next(&disk, Request::Read, move || read.send(()).unwrap());
        std::thread::scope(|scope| {
            let buffer = head.lock();
            let pass = scope.spawn(|| share(&engine, &[1, other]));
            wait.recv_timeout(Duration::from_secs(60)).unwrap();
            // The blocks are being read. The step then waits for the buffer of the first disk.
            std::thread::sleep(Duration::from_millis(100));
            if let Some(old) = old {
                engine.buffers.forget(&[old]);
            }
            put(&engine, other, 0, 200);
            drop(buffer);
            assert_eq!(pass.join().unwrap(), 0);
        });
        quiet(&engine);
        assert_eq!((value(&engine, 0).unwrap(), holds(&engine, other, 0).unwrap()), (4, 200));
        is_whole(&engine);
    }
}

/// Otherwise the leaves of most trees would be read under the lock, one after another.
#[test]
fn the_leaves_of_many_trees_are_read_without_the_metadata_lock() {
    const TREES: u32 = 100;
    let (_disk, engine) = filled((0..32).map(|block| 150 + block));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    // The block with the most references is kept.
    (0..TREES + 20).for_each(|block| put(&engine, other, u64::from(block), 161));
    quiet(&engine);
    share(&engine, &[other]);
    for number in 1..TREES {
        take(&engine, 1, &format!("s{number}"));
        // The disk gets a leaf of its own.
        write(&engine, u64::from(number % 2), number as u8);
        engine.settle(&engine.head(1)).unwrap();
    }
    quiet(&engine);
    engine.meta.lock().pages.drop_clean();
    let before = engine.meta.statistics();
    assert_eq!(share(&engine, &[other, 1]), 1);
    assert_eq!(references(&engine, place(&engine, other, 0)), 2 * TREES + 20);
    let now = engine.meta.statistics();
    let (read, locked) = (now.misses - before.misses, now.locked - before.locked);
    assert!(read > u64::from(TREES) && locked < 20, "{locked} of {read} pages were read under the lock");
    // If each search ended at the first missing leaf, all leaves before it would be searched again for each leaf.
    let found = now.hits - before.hits;
    assert!(found < u64::from(50 * TREES), "{found} pages were looked up");
    is_whole(&engine);
}

/// One share replaces the duplicate in the leaves of all trees that map it at the same place.
#[test]
fn a_block_gets_no_more_references_than_the_limit_from_a_share_in_many_trees() {
    // 256 references are allowed in tests.
    const REFERENCES: u32 = 250;
    const TREES: u32 = 10;
    let (_disk, engine) = filled((0..32).map(|block| 150 + block));
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..REFERENCES).for_each(|block| put(&engine, other, u64::from(block), 161));
    quiet(&engine);
    assert_eq!(share(&engine, &[other]), u64::from(REFERENCES - 1));
    for number in 1..TREES {
        take(&engine, 1, &format!("s{number}"));
        // The disk gets a leaf of its own.
        write(&engine, u64::from(number % 2), number as u8);
        engine.settle(&engine.head(1)).unwrap();
    }
    quiet(&engine);
    let (kept, duplicate) = (place(&engine, other, 0), place(&engine, 1, 11));
    assert_eq!(share(&engine, &[other, 1]), 0);
    assert_eq!([kept, duplicate].map(|block| references(&engine, block)), [REFERENCES, TREES]);
    is_whole(&engine);
}
