//! Checkpoints that cannot read a page of the catalog or of the summaries: no change is lost with it.

use super::between::lose_page;
use super::*;
use crate::engine::checkpoint::held_pages;
use crate::pages::{PageKey, sealed};
use crate::space::REGION_BLOCKS;
use crate::sync::MutexGuard;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use backend::Block;

#[test]
fn one_failed_read_of_a_catalog_page_delays_only_the_checkpoint() {
    for failing in 1..16 {
        let (disk, engine) = made();
        engine.checkpoint().unwrap();
        write(&engine, 0, 7);
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        engine.meta.lock().pages.drop_clean();
        disk.fail_reads_after(0, failing);
        let failed = engine.checkpoint().is_err();
        disk.fail_reads_after(0, 0);
        engine.check_running().unwrap();
        engine.checkpoint().unwrap();
        engine.close().unwrap();
        drop(engine);
        let engine = open(&disk).unwrap();
        assert_eq!(value(&engine, 0).unwrap(), 7, "{failing} reads failed, the checkpoint too: {failed}");
        is_whole(&engine);
    }
}

#[test]
fn a_summary_page_that_cannot_be_read_delays_no_checkpoint() {
    let (disk, engine) = made();
    (0..200).for_each(|block| write(&engine, block, 7));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    engine.discard_blocks(&engine.head(1), 0..200).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    engine.meta.lock().pages.drop_clean();
    let _mend = lose_page(&disk, "data.summary", 0);
    // All counts of the page are in memory. The checkpoint writes the page, so that it can be read again.
    engine.checkpoint().unwrap();
    let before = engine.counts();
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    let after = engine.counts();
    assert_eq!((before.data.used, before.map.used), (after.data.used, after.map.used));
    write(&engine, 3000, 1);
    engine.flush().unwrap();
    is_whole(&engine);
}

/// Pages of the catalog and of the summaries that are lost are written from memory. After a crash, they have all their
/// records and counts, and not only those that changed since the checkpoint before.
#[test]
fn a_page_that_a_checkpoint_writes_from_memory_is_complete() {
    let (disk, engine) = with_a_block(REGION_BLOCKS + 100);
    add_disk(&engine, "second", BLOCKS, Provisioning::Thin);
    engine.checkpoint().unwrap();
    // Changes one record, and the counts of one region.
    add_disk(&engine, "third", BLOCKS, Provisioning::Thin);
    engine.extend(REGION_BLOCKS + 2000).unwrap();
    {
        let mut meta = engine.meta.lock();
        assert_eq!((meta.catalog.changed(), meta.data.changed_regions()), (1, 1));
        meta.pages.drop_clean();
    }
    for name in ["catalog", "data.summary"] {
        let _mend = lose_page(&disk, name, 0);
    }
    engine.checkpoint().unwrap();
    let before = engine.counts().data;
    // The engine is dropped without closing, as by a kill. The journal after the checkpoint is empty.
    drop(engine);
    let engine = open(&disk).unwrap();
    let disks = engine.with_catalog(|catalog| catalog.disks().map(|disk| disk.name.clone()).collect::<Vec<_>>());
    assert_eq!(disks, ["second", "third", "vm"]);
    let after = engine.counts().data;
    assert_eq!((after.used, after.free, after.backed), (before.used, before.free, before.backed));
    is_whole(&engine);
}

/// Gives a page the version of a later program, with a correct checksum. The returned function restores the page.
fn set_version(disk: &SimulatedDisk, key: PageKey) -> impl Fn() + use<> {
    let file = disk.directory().open(key.file().name(), IoMode::Buffered).unwrap();
    let mut page = Block([0; BLOCK_SIZE]);
    file.read_at(&mut page.0, key.offset()).unwrap();
    let mut later = page;
    later.0[4] += 1;
    file.write_at(&[&sealed(&later).0], key.offset(), true).unwrap();
    move || file.write_at(&[&page.0], key.offset(), true).unwrap()
}

/// A page of another version is not overwritten, so the checkpoint fails. The next one that finds the right page stores
/// all changes.
#[test]
fn a_page_of_another_version_delays_only_the_checkpoint() {
    for file in [PageFile::Catalog, PageFile::DataSummary, PageFile::MapSummary] {
        let (disk, engine) = with_a_block(2048);
        // Every second block is written, so that each needs an extent of its own and the tree gets further nodes.
        (1..300).for_each(|block| write(&engine, 2 * block, 7));
        engine.settle(&engine.head(1)).unwrap();
        engine.flush().unwrap();
        add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
        engine.meta.lock().pages.drop_clean();
        let restore = set_version(&disk, PageKey::new(file, 0));
        let refused = engine.checkpoint().unwrap_err();
        assert_eq!((refused.kind(), engine.failure()), (ErrorKind::Unsupported, None), "{refused}");
        restore();
        engine.checkpoint().unwrap();
        let before = engine.counts();
        // The engine is dropped without closing, as by a kill. The journal after the checkpoint is empty.
        drop(engine);
        let engine = open(&disk).unwrap();
        assert!(engine.with_catalog(|catalog| catalog.disk("other").is_some()));
        let after = engine.counts();
        assert_eq!((after.data.used, after.map.used), (before.data.used, before.map.used), "{file:?}");
        assert_eq!(value(&engine, 598).unwrap(), 7);
        is_whole(&engine);
    }
}

/// A region that is regained meanwhile must know all blocks that cannot be reused yet.
#[test]
fn changes_count_as_being_appended_until_the_last_part_of_them_is_retired() {
    let (_disk, engine) = with_a_block(3000);
    let (ended, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                let meta = engine.meta.lock();
                let pending: u64 = meta.pending.iter().flat_map(|one| one.freed.iter()).map(|run| run.blocks).sum();
                let freeing = meta.freed.freeing();
                if meta.pending.is_appending() {
                    seen.fetch_add(u64::from(freeing > pending), Ordering::AcqRel);
                } else if freeing != pending {
                    return Err((freeing, pending));
                }
                MutexGuard::unlock_fair(meta);
            }
            Ok(())
        });
        while seen.load(Ordering::Acquire) < 20 && !watcher.is_finished() {
            (0..40).for_each(|logical| write(&engine, 2 * logical, 1));
            engine.settle(&engine.head(1)).unwrap();
            engine.commit_changes().unwrap();
            for logical in 0..40 {
                engine.discard_blocks(&engine.head(1), 2 * logical..2 * logical + 1).unwrap();
            }
            engine.settle(&engine.head(1)).unwrap();
            engine.commit_changes().unwrap();
        }
        ended.store(true, Ordering::Release);
        assert_eq!(watcher.join().unwrap(), Ok(()));
    });
}

/// Otherwise scattered changes would use up the budget of pages, and clients would wait for the checkpoint.
#[test]
fn a_page_of_the_table_counts_once_for_all_pending_changes() {
    let (_disk, engine) = with_a_block(3000);
    (0..40).for_each(|logical| write(&engine, 2 * logical, 1));
    engine.settle(&engine.head(1)).unwrap();
    let meta = engine.meta.lock();
    assert!(meta.pending.table_pages() >= 10, "{} pages", meta.pending.table_pages());
    assert_eq!(held_pages(&meta), 1);
}
