//! The log is bounded, wraps around, and is replayed; valid copies are distinguished from damage.

use super::super::commit::PENDING_LIMIT;
use super::super::layout::LOG_BLOCKS;
use super::super::log::Record;
use super::*;
use crate::model::Random;
use rustc_hash::FxHashMap;

/// Many more changes than fit into the ring are made, with power cuts in between.
#[test]
fn more_changes_than_the_ring_holds_survive_power_cuts() {
    let (mut disk, _, mut layer) = object(40 << 30);
    let mut random = Random::new(4);
    let mut flushed: FxHashMap<u64, u8> = FxHashMap::default();
    for round in 0..12u64 {
        for step in 0..3000u64 {
            let block = random.below(10 << 20);
            let value = (round * 31 + step) as u8;
            layer.write(block * BLOCK, &[&[value; 4096]]).unwrap();
            flushed.insert(block, value);
            if step % 40 == 0 {
                layer.flush().unwrap();
            }
            assert!(layer.map.pages.changed() <= 1100, "writes cause checkpoints");
        }
        layer.flush().unwrap();
        if round % 3 == 1 {
            layer.close().unwrap();
        }
        drop(layer);
        disk = disk.crash();
        let file = disk.directory().open("image", IoMode::Buffered).unwrap();
        let options = OpenOptions { cache_bytes: 0, ..OpenOptions::writing("image") };
        layer = VsanSparse::open(file, &options).unwrap();
        for (block, value) in &flushed {
            assert_eq!(read(&layer, block * BLOCK), Some([*value; 4096]), "round {round}, block {block}");
        }
    }
    let check = layer.check().unwrap();
    assert_eq!((check.problem_count, check.grains), (0, flushed.len() as u64));
    // Crashes leave no blocks unreferenced except those that were allocated and not logged.
    assert!(check.dead < 12 * 64, "{check:?}");
}

/// A damaged page or root block is an error: the older copy must not be used as the current one.
#[test]
fn a_damaged_page_is_an_error_and_the_older_copy_is_not_used() {
    for block in [258, 260] {
        let (disk, file, layer) = object(10 << 20);
        layer.write(0, &[&[1; 4096]]).unwrap();
        layer.checkpoint().unwrap();
        // Changes another page too, so that the root changes.
        layer.write(4096, &[&[2; 4096]]).unwrap();
        layer.write(5 << 20, &[&[2; 4096]]).unwrap();
        layer.close().unwrap();
        assert_eq!(
            read(&VsanSparse::open(Arc::clone(&file), &OpenOptions::reading("image")).unwrap(), 4096),
            Some([2; 4096])
        );
        // The second copy is the newer one now.
        disk.flip_bit("image", (block + 1) * BLOCK + 100, 3).unwrap();
        match VsanSparse::open(file, &OpenOptions::reading("image")) {
            Err(error) => assert_eq!((error.kind(), block), (ErrorKind::Corrupt, 258)),
            Ok(layer) => {
                assert_eq!(layer.map(4096..8192, 1, &mut Vec::new()).unwrap_err().kind(), ErrorKind::Corrupt);
                assert_eq!(layer.check().unwrap().problem_count, 1);
            }
        }
    }
}

#[test]
fn an_object_opens_with_one_valid_header() {
    for copy in 0..2u64 {
        let (disk, file, layer) = object(10 << 20);
        layer.write(0, &[&[1; 4096]]).unwrap();
        layer.close().unwrap();
        disk.flip_bit("image", copy * BLOCK + 40, 0).unwrap();
        let layer = VsanSparse::open(Arc::clone(&file), &OpenOptions::reading("image")).unwrap();
        assert_eq!(read(&layer, 0), Some([1; 4096]));
        disk.flip_bit("image", (1 - copy) * BLOCK + 40, 0).unwrap();
        let refused = VsanSparse::open(file, &OpenOptions::reading("image")).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    }
}

/// An image opened for reading is not changed, also when a log was replayed.
#[test]
fn opening_for_reading_changes_nothing() {
    let (disk, _, layer) = object(10 << 20);
    layer.write(0, &[&[1; 8192]]).unwrap();
    layer.zero(4 << 20..8 << 20, false).unwrap();
    layer.flush().unwrap();
    drop(layer);
    let disk = disk.crash();
    let file = disk.directory().open("image", IoMode::Buffered).unwrap();
    let bytes = || {
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    };
    let (before, operations) = (bytes(), disk.operations());
    let layer = VsanSparse::open(Arc::clone(&file), &OpenOptions::reading("image")).unwrap();
    assert_eq!(read(&layer, 4096), Some([1; 4096]));
    assert_eq!(content(&layer, 5 << 20), Content::Zero);
    layer.check().unwrap();
    layer.checkpoint().unwrap();
    layer.flush().unwrap();
    layer.close().unwrap();
    assert!(bytes() == before && disk.operations() == operations);
}

/// Threads that flush at once share a flush.
#[test]
fn concurrent_flushes_share_a_commit() {
    let (disk, _, layer) = object(1 << 30);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let layer = &layer;
            scope.spawn(move || {
                for step in 0..200u64 {
                    layer.write((thread * 1000 + step) * BLOCK, &[&[step as u8; 4096]]).unwrap();
                    layer.flush().unwrap();
                }
            });
        }
    });
    drop(layer);
    let layer = after_cut(&disk, false).unwrap();
    for thread in 0..4u64 {
        for step in 0..200u64 {
            assert_eq!(read(&layer, (thread * 1000 + step) * BLOCK), Some([step as u8; 4096]));
        }
    }
}

/// Threads may make more changes at once than fit into the ring: a thread that finds no room makes a commit, and no
/// flushed data is lost.
#[test]
fn pending_changes_are_limited_to_the_size_of_the_log() {
    let (disk, _, layer) = object(64 << 20);
    let write = |grain: u64, value: u8| layer.write(grain * BLOCK, &[&[value; 4096]]).unwrap();
    (0..1000).step_by(2).for_each(|grain| write(grain, 1));
    layer.flush().unwrap();
    let writer = layer.writer().unwrap();
    assert!(writer.commits.turn().used() > 0, "flushed changes are only in the log");
    let record = |grain: u64| {
        let Content::Data { offset, .. } = content(&layer, grain * BLOCK) else { panic!("the page was written") };
        Record { grain, count: 1, place: Some(offset / BLOCK) }
    };
    let records: Vec<Record> = (0..1000).step_by(2).map(record).collect();
    for round in 0..60 {
        // Simulates changes of other threads.
        let mut pending = writer.pending.lock();
        let room = PENDING_LIMIT.saturating_sub(pending.len() + round % 3);
        records.iter().cycle().take(room).for_each(|record| pending.push(*record));
        drop(pending);
        match round % 2 {
            0 => write(1001 + 2 * round as u64, 2),
            _ => layer.zero(1001 * BLOCK..1500 * BLOCK, false).unwrap(),
        }
        assert!(writer.pending.lock().len() <= PENDING_LIMIT && writer.commits.turn().used() <= LOG_BLOCKS);
        assert_eq!(writer.pending.lock().reserved, 0);
    }
    assert_eq!(layer.check().unwrap().problems, Vec::<String>::new());
    let seen = after_cut(&disk, false).unwrap();
    for grain in (0..1000).step_by(2) {
        assert_eq!(read(&seen, grain * BLOCK), Some([1; 4096]), "grain {grain}");
    }
}
