//! Lets a read of metadata fail once, at every possible point. The operation that needs the page fails or is retried,
//! no other data is lost, and no reservation is left behind.

use super::*;
use backend::simulated::SimulatedOptions;

/// Blocks of a disk with a map that does not fit into the smallest cache.
const WIDE: u64 = 100_000;
/// The number of blocks that the workload changes, and the distance between them, so that each is in another leaf.
const CHANGED: u64 = 250;
const APART: u64 = 390;

fn opened(disk: &SimulatedDisk) -> Arc<Engine> {
    Engine::open(disk.directory(), EngineOptions { metadata_cache: 0, ..options() }).unwrap()
}

/// A store in which every second block holds 1. Everything is written back and durable.
fn wide() -> SimulatedDisk {
    let disk = formatted();
    let engine = opened(&disk);
    assert_eq!(add_disk(&engine, "vm", WIDE, Provisioning::Thin), 1);
    (0..WIDE).step_by(2).for_each(|block| write(&engine, block, 1));
    engine.settle(&engine.head(1)).unwrap();
    engine.close().unwrap();
    disk
}

/// The content of a block after the workload.
fn expected(block: u64) -> u8 {
    match (block % APART, block / APART < CHANGED) {
        (0, true) => 2,
        (1, true) => 3,
        (2..7, true) => 0,
        _ => block.is_multiple_of(2).into(),
    }
}

/// Overwrites blocks, writes new ones and discards some, and writes all of it back. Retries after a read error.
fn change(engine: &Engine, by_journal: bool) -> Result<()> {
    let again = |act: &dyn Fn() -> Result<()>| loop {
        match act() {
            Err(error) if error.kind() == ErrorKind::Io => {}
            done => return done,
        }
    };
    let head = engine.head(1);
    for i in 0..CHANGED {
        for (at, value) in [(0, 2), (1, 3)] {
            again(&|| engine.write_blocks(&head, i * APART + at, slice(value, 1)))?;
        }
        again(&|| engine.discard_blocks(&head, i * APART + 2..i * APART + 7))?;
    }
    if by_journal {
        again(&|| engine.flush())
    } else {
        again(&|| engine.settle(&head))?;
        again(&|| engine.flush())
    }
}

fn nothing_stays_taken(engine: &Engine) {
    let meta = engine.meta.lock();
    assert!(meta.in_flight.is_empty());
    assert_eq!((engine.buffers.blocks(), engine.reserves.changes(), engine.reserves.claims()), (0, 0, 0));
}

#[test]
fn one_failed_read_of_metadata_loses_nothing() {
    let original = wide();
    for (by_journal, times) in [(false, 1), (false, 2), (true, 2), (false, 3)] {
        let (mut late, mut stopped, mut number) = (0, 0, 0);
        loop {
            let disk = original.copy_of_durable(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
            let mut engine = opened(&disk);
            disk.fail_reads_after(number, times);
            let done = change(&engine, by_journal);
            if disk.reads_to_fail() > 0 {
                break;
            }
            match done {
                Ok(()) => nothing_stays_taken(&engine),
                // If metadata cannot be read after an in-place overwrite, its result cannot be recorded, and the store
                // stops. The journal has the announcement.
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Stopped, "read {number}: {error}");
                    stopped += 1;
                    engine = opened(&disk.crash());
                    change(&engine, by_journal).unwrap();
                }
            }
            for block in (0..CHANGED * APART).step_by(131).chain((0..CHANGED).map(|i| i * APART + number % 8)) {
                assert_eq!(value(&engine, block).unwrap(), expected(block), "read {number}, block {block}");
            }
            is_whole(&engine);
            late += 1;
            number += 1 + number / 12;
        }
        eprintln!("{late} runs with {times} failing reads each; {stopped} runs stopped the datastore");
        assert!(
            late > 10 && stopped < late / 4,
            "{late} runs with {times} failing reads each; {stopped} runs stopped the datastore"
        );
    }
}

/// After many hits, changes are not surveyed. The pages that the next change misses are read without locks.
#[test]
fn the_first_cold_change_after_many_hits_reads_nothing_under_the_metadata_lock() {
    let engine = open(&wide()).unwrap();
    let head = engine.head(1);
    let settle = || engine.settle(&head).unwrap();
    let flush = || engine.flush().unwrap();
    // Loads the pages that every change needs: an overwrite, a discard, and a write to a new block.
    write(&engine, 0, 2);
    settle();
    engine.discard_blocks(&head, 2..3).unwrap();
    settle();
    write(&engine, 2, 2);
    settle();
    flush();
    let overwrite = |block: u64| write(&engine, block, 2);
    let discard = |block: u64| engine.discard_blocks(&head, block..block + 1).unwrap();
    let buffers: [&dyn Fn(u64); 2] = [&overwrite, &discard];
    let carry_outs: [&dyn Fn(); 2] = [&settle, &flush];
    let changes = buffers.into_iter().flat_map(|buffer| carry_outs.map(|carry_out| (buffer, carry_out)));
    for (number, (buffer, carry_out)) in (1u64..).zip(changes) {
        buffer(number * 20 * APART);
        engine.meta.look(|meta| meta.entry(0)).unwrap();
        let before = {
            let mut meta = engine.meta.lock();
            while !meta.pages.is_warm() {
                meta.entry(0).unwrap();
            }
            meta.pages.statistics()
        };
        carry_out();
        let after = engine.meta.lock().pages.statistics();
        assert!(after.misses > before.misses, "change {number} needed no page");
        assert_eq!(after.locked, before.locked, "change {number} read pages under the lock");
    }
    is_whole(&engine);
}

/// After many hits, the first attempt of a write that bypasses the buffer is not surveyed. It needs more pages than it
/// may start again.
#[test]
fn a_large_write_to_a_cold_part_after_many_hits_reads_nothing_under_the_metadata_lock() {
    let (disk, cold) = (wide(), 20 * APART);
    let engine = open(&disk).unwrap();
    // The blocks are mapped, so that the write below overwrites them in place.
    engine.write_blocks(&engine.head(1), cold, slice(2, 64)).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    let before = {
        let mut meta = engine.meta.lock();
        while !meta.pages.is_warm() {
            meta.entry(0).unwrap();
        }
        meta.pages.statistics()
    };
    engine.write_blocks(&engine.head(1), cold, slice(3, 64)).unwrap();
    let after = engine.meta.lock().pages.statistics();
    assert_eq!(engine.buffers.blocks(), 0, "the write was buffered");
    assert!(after.misses > before.misses + 20, "{before:?} {after:?}");
    assert_eq!(after.locked, before.locked, "the write read pages under the lock");
    assert_eq!(value(&engine, cold + 1).unwrap(), 3);
    is_whole(&engine);
}

#[test]
fn a_survey_under_the_metadata_lock_records_no_page_for_later_lookups() {
    let (_disk, engine) = with_a_block(64);
    let mut meta = engine.meta.lock();
    // As if no page were dirty.
    drop(meta.pages.capture_now());
    meta.pages.drop_clean();
    let survey = |meta: &mut Meta| {
        meta.survey_run(Run { start: 0, blocks: 1 });
        assert_eq!(meta.pages.absent(), 1);
        Ok(())
    };
    metadata::Fetch::under_the_lock().require(&mut meta, survey).unwrap();
    assert_eq!(meta.pages.absent(), 0);
}

#[test]
fn a_plan_at_once_reads_nothing_and_succeeds_once_its_metadata_is_loaded() {
    let engine = opened(&wide());
    let head = engine.head(1);
    let (mut missed, mut loads) = (0, 0);
    for block in (0..WIDE - 1).step_by(APART as usize) {
        let before = engine.meta.lock().pages.statistics();
        let mut planned = engine.plan_head_at_once(&head, block..block + 1).unwrap();
        assert_eq!(engine.meta.lock().pages.statistics().misses, before.misses, "a page was read");
        missed += u32::from(planned.is_none());
        while planned.is_none() {
            engine.load_for_head(&head, block..block + 1).unwrap();
            loads += 1;
            planned = engine.plan_head_at_once(&head, block..block + 1).unwrap();
        }
    }
    assert!(missed > 50 && loads >= missed && loads < 4 * missed, "{missed} reads missed metadata, {loads} loads");
}

/// A comparison takes long and holds no lock between its strides. A part that is not compared yet may be deleted
/// between two strides.
#[test]
fn a_comparison_with_a_deleted_snapshot_fails_instead_of_reporting_dropped_blocks() {
    let (_disk, engine) = made();
    let far = 1 << 18;
    engine.set_capacity(1, 2 * far * BLOCK_SIZE as u64).unwrap();
    for block in 0..300 {
        write(&engine, 2 * block, 1);
        write(&engine, far + 2 * block, 1);
    }
    let (from, to) = (take(&engine, 1, "from"), take(&engine, 1, "to"));
    write(&engine, 0, 2);
    write(&engine, far, 2);
    engine.flush().unwrap();
    let diff = |each: &mut dyn FnMut(Changed) -> Result<bool>| engine.diff(from, 1, 0..2 * far, each);
    let mut found = Vec::new();
    diff(&mut |changed| {
        found.push(changed.logical);
        Ok(true)
    })
    .unwrap();
    assert_eq!(found, [0, far]);
    engine.delete_disk(1, &[]).unwrap();
    // From now on maintenance drops the trees, leaf by leaf.
    for object in [from, to, 1] {
        let gone = [
            engine.diff(object, to, 0..far, &mut |_| Ok(true)).map_err(|error| error.kind()),
            engine.spans_snapshot(object, 0..far, 9).map(drop).map_err(|error| error.kind()),
            engine.plan_snapshot(object, 0..1).map(drop).map_err(|error| error.kind()),
            engine.count_blocks(object).map(drop).map_err(|error| error.kind()),
        ];
        assert_eq!(gone, [Err(ErrorKind::NotFound); 4], "object {object}");
    }
}

/// Two snapshots have the same tree, but a shrink that a crash cut off lies between them.
#[test]
fn a_comparison_of_one_tree_with_two_ends_reports_the_blocks_past_the_smaller_end() {
    let (_disk, engine) = made();
    // Beyond the part that one step of a comparison examines.
    let far = 3 << 18;
    let resize = |blocks: u64| engine.set_capacity(1, blocks * BLOCK_SIZE as u64).unwrap();
    resize(far + 10);
    write(&engine, far, 1);
    engine.flush().unwrap();
    let whole = take(&engine, 1, "whole");
    resize(10);
    let cut = take(&engine, 1, "cut");
    let changes = |from: u64, to: u64| {
        let mut found = Vec::new();
        let mut each = |changed: Changed| {
            found.push((changed.logical, changed.blocks, changed.zero));
            Ok(true)
        };
        engine.diff(from, to, 0..far + 10, &mut each).unwrap();
        found
    };
    assert_eq!((changes(cut, whole), changes(whole, cut)), (vec![(far, 1, false)], vec![(far, 1, true)]));
}

/// A crash between the two steps of a shrink leaves blocks past the end, which the next growth discards.
#[test]
fn a_comparison_reports_no_block_past_the_end_of_a_disk() {
    let (_disk, engine) = made();
    (0..20).for_each(|block| write(&engine, block, 1));
    engine.flush().unwrap();
    let resize = |blocks: u64| engine.set_capacity(1, blocks * BLOCK_SIZE as u64).unwrap();
    resize(10);
    let snapshot = take(&engine, 1, "s");
    engine.discard_blocks(&engine.head(1), 10..20).unwrap();
    engine.flush().unwrap();
    resize(30);
    let changes = |from: u64, to: u64| {
        let mut found = Vec::new();
        let mut each = |changed: Changed| {
            found.push((changed.logical, changed.blocks, changed.zero));
            Ok(true)
        };
        engine.diff(from, to, 0..30, &mut each).unwrap();
        found
    };
    assert_eq!((changes(snapshot, 1), changes(1, snapshot)), (vec![], vec![]));
    write(&engine, 12, 2);
    write(&engine, 3, 2);
    assert_eq!(changes(snapshot, 1), [(3, 1, false), (12, 1, false)]);
    assert_eq!(changes(1, snapshot), [(3, 1, false), (12, 1, true)]);
}
