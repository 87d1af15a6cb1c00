//! Changes that begin while a repair waits for the medium, after it has corrected the counts in memory.

use super::replayed::share_equal;
use super::*;
use backend::IoMode;
use std::time::Duration;

/// A store that may have shared blocks. Blocks 2 and 3 of disk 1 are equal, and the table has no reference for the
/// second of them. The data file has space that a repair returns.
fn miscounted() -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = filled([4, 4, 5, 5]);
    assert_eq!(share_equal(&engine, [(1, 1), (1, 2)]), 1);
    let block = place(&engine, 1, 3);
    {
        let mut meta = engine.meta.lock();
        let Meta { data, pages, .. } = &mut *meta;
        data.repair_references(pages, block, 0).unwrap();
    }
    quiet(&engine);
    let file = disk.directory().open("data.0000", IoMode::Buffered).unwrap();
    let offset = (engine.counts().data.backed + 4096) * BLOCK_SIZE as u64;
    file.reserve(offset, 16 * BLOCK_SIZE as u64).unwrap();
    (disk, engine)
}

/// Shares the equal blocks with the counts that the repair has corrected.
fn share_repaired(engine: &Engine) -> Result<()> {
    let mut pass = SharePass::new(vec![(1, BLOCKS)], PRINTS_MAX);
    while !engine.share_step(&mut pass)?.ended {}
    Ok(())
}

fn discard_repaired(engine: &Engine) -> Result<()> {
    BulkWriter::new(engine, 1).discard(3..4)
}

/// No lock prevents these changes. If one of them were in the journal before the checkpoint of the repair, no ordinary
/// opening would succeed after a crash, because a block would lose a reference that the table does not have.
#[test]
fn a_change_that_relies_on_a_repaired_count_is_not_durable_before_the_repair() {
    for change in [share_repaired, discard_repaired] {
        let (mut cut, mut ended) = (0, false);
        while !ended {
            let (disk, engine) = miscounted();
            let (other, medium) = (Arc::clone(&engine), disk.clone());
            let (begun, begins) = std::sync::mpsc::channel();
            // The first request that changes the space of a file returns space that the table does not count.
            before_next(&disk, Request::Space, move || {
                let (engine, (done, wait)) = (Arc::clone(&other), std::sync::mpsc::channel());
                let thread = std::thread::spawn(move || {
                    let changed = change(&engine);
                    let _ = done.send(());
                    changed
                });
                // The change waits for the repair.
                let _ = wait.recv_timeout(Duration::from_millis(100));
                medium.cut_after(medium.operations() + cut);
                begun.send(thread).unwrap();
            });
            ended = engine.check(CheckOptions { data: false, repair: true }, &|_, _| true).is_ok();
            let thread = begins.recv().unwrap();
            let image = disk.crash();
            // After the cut the change may fail.
            let _ = thread.join().unwrap();
            let opened = open(&image);
            assert!(opened.is_ok(), "after {cut} operations: {:?}", opened.err());
            cut += 1;
        }
        assert!(cut > 4, "{cut} operations");
        let (disk, engine) = miscounted();
        engine.check(CheckOptions { data: false, repair: true }, &|_, _| true).unwrap();
        change(&engine).unwrap();
        quiet(&engine);
        assert_eq!(used(&engine), 2, "the change was made");
        is_whole(&engine);
        engine.close().unwrap();
        drop(engine);
        is_whole(&open(&disk).unwrap());
    }
}
