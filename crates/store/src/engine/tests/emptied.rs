//! Pages of tables that have lost all their entries: they are damage as a wrong checksum is, and a repair restores what
//! can be proven.

use super::packed::{holds, mixed, pack, place, quiet, references};
use super::shared::share;
use super::*;
use crate::engine::log::IMAGES_FILE;
use crate::space::TABLE_ENTRIES;
use backend::IoMode;

/// Blocks written to disk 1, with a page of `data.table` in the middle of their places.
const WRITTEN: u64 = 1400;
/// That page.
const PAGE: u64 = 1;

/// How a page of a table is damaged.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Zeros,
    Noise,
}

/// A closed store with disk `vm` and its snapshot `s`, which share all blocks, and disk `other`, which has none of the
/// page.
fn plain() -> SimulatedDisk {
    let (disk, engine) = made();
    (0..WRITTEN).for_each(|block| write(&engine, block, content(block)));
    quiet(&engine);
    take(&engine, 1, "s");
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    engine.write_blocks(&engine.head(other), 0, slice(9, 8)).unwrap();
    engine.close().unwrap();
    disk
}

fn content(block: u64) -> u8 {
    (block % 251) as u8 + 1
}

/// Damages a page of a closed store, and the images of the last checkpoint, from which it could be restored.
fn damage(disk: &SimulatedDisk, name: &str, page: u64, damage: Damage) {
    let file = |name: &str| disk.directory().open(name, IoMode::Buffered).unwrap();
    file(IMAGES_FILE).write_at(&[&Buffer::zeroed(1)], 0, true).unwrap();
    let mut bytes = Buffer::zeroed(1);
    if matches!(damage, Damage::Noise) {
        bytes.copy_from_slice(&Random(5).bytes(BLOCK_SIZE));
    }
    file(name).write_at(&[&bytes], page * BLOCK_SIZE as u64, true).unwrap();
}

fn check(engine: &Engine, data: bool, repair: bool) -> Vec<Finding> {
    engine.check(CheckOptions { data, repair }, &|_, _| true).unwrap().findings
}

fn repairing(disk: &SimulatedDisk) -> Arc<Engine> {
    Engine::open_repairing(disk.directory(), options(), None).unwrap()
}

/// The blocks of disk 1 that cannot be read. The others must have their content.
fn unreadable(engine: &Engine, blocks: u64, content: impl Fn(u64) -> u8) -> Vec<u64> {
    let is_lost = |block: &u64| match holds(engine, 1, *block) {
        Ok(found) => {
            assert_eq!(found, content(*block), "block {block}");
            false
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            true
        }
    };
    (0..blocks).filter(is_lost).collect()
}

/// The blocks of disk 1 of which a page of the table has the checksums.
fn described(engine: &Engine, blocks: u64) -> Vec<u64> {
    (0..blocks).filter(|block| place(engine, 1, *block).0.start / TABLE_ENTRIES == PAGE).collect()
}

fn scrub(engine: &Engine) -> Vec<crate::engine::Damage> {
    let (scrubber, mut at, mut found) = (engine.scrubber(), Some(ScrubPosition::START), Vec::new());
    while let Some(position) = at {
        let step = scrubber.step(position).unwrap();
        found.extend(step.damage);
        at = step.next;
    }
    found
}

#[test]
fn a_page_of_zeros_is_one_finding_that_names_every_disk_and_snapshot() {
    let disk = plain();
    damage(&disk, "data.table", PAGE, Damage::Zeros);
    let engine = open(&disk).unwrap();
    let findings = check(&engine, false, false);
    let [Finding { problem, repaired: None, places, unlisted: 0 }] = &findings[..] else { panic!("{findings:?}") };
    assert!(problem.starts_with("page 1 of data.table is damaged"), "{problem}");
    assert!(problem.contains("disk 'vm' bytes") && problem.contains("snapshot 'vm@s' bytes"), "{problem}");
    assert!(problem.contains("page 1 of data.table has no entries, although blocks"), "{problem}");
    let named: Vec<&str> = places.iter().map(|place| place.name.as_str()).collect();
    assert_eq!(named, ["vm", "vm@s"], "not the disk that has no block there");
    // The same with all data, and in a store that has used the page.
    assert_eq!(check(&engine, true, false), findings);
    let lost = unreadable(&engine, WRITTEN, content);
    assert_eq!(lost, described(&engine, WRITTEN));
    let error = value(&engine, lost[0]).unwrap_err().to_string();
    assert!(error.contains("page 1 of data.table has no entries") && error.contains("check --repair"), "{error}");
    // Writes and discards there fail, and nothing else does.
    write(&engine, lost[0], 7);
    assert!(engine.flush_head(&engine.head(1), engine.acknowledged()).is_err());
    assert!(engine.write_blocks(&engine.head(1), lost[0], slice(7, 1)).is_err());
    let other = engine.with_catalog(|catalog| catalog.disk("other").unwrap().id);
    engine.write_blocks(&engine.head(other), 0, slice(77, 1)).unwrap();
    engine.flush_head(&engine.head(other), engine.acknowledged()).unwrap();
    assert_eq!(holds(&engine, other, 0).unwrap(), 77);
}

/// As when recovery has written to a page that the medium returned as zeros.
#[test]
fn a_page_that_has_few_of_its_entries_left_is_one_finding_that_names_every_disk_and_snapshot() {
    let disk = plain();
    let table = disk.directory().open("data.table", IoMode::Buffered).unwrap();
    let mut page = backend::Block([0; BLOCK_SIZE]);
    table.read_at(&mut page.0, PAGE * BLOCK_SIZE as u64).unwrap();
    page.0[crate::pages::HEADER_SIZE + 8 * 40..].fill(0);
    damage(&disk, "data.table", PAGE, Damage::Zeros);
    let mut bytes = Buffer::zeroed(1);
    bytes.copy_from_slice(&crate::pages::sealed(&page).0);
    table.write_at(&[&bytes], PAGE * BLOCK_SIZE as u64, true).unwrap();

    let findings = check(&open(&disk).unwrap(), false, false);
    let [Finding { problem, repaired: None, places, unlisted: 0 }] = &findings[..] else { panic!("{findings:?}") };
    assert!(problem.contains("have no references in data.table (1 of its pages, from 1 on)"), "{problem}");
    assert!(problem.contains(" of disk 'vm'") && problem.contains(" of snapshot 'vm@s'"), "{problem}");
    assert!(places.iter().all(|place| ["vm", "vm@s"].contains(&place.name.as_str())), "{places:?}");
    let engine = repairing(&disk);
    let findings = check(&engine, false, true);
    assert!(findings.iter().any(|one| one.repaired.as_deref() == Some("counted from the trees")), "{findings:?}");
    assert!(!unreadable(&engine, WRITTEN, content).is_empty(), "their checksums are lost");
}

#[test]
fn blocks_whose_content_nothing_proves_are_counted_by_disk_and_fail_until_they_are_written() {
    for kind in [Damage::Zeros, Damage::Noise] {
        let disk = plain();
        let lost = described(&open(&disk).unwrap(), WRITTEN);
        damage(&disk, "data.table", PAGE, kind);
        let engine = repairing(&disk);
        let findings = check(&engine, false, true);
        let [page, blocks] = &findings[..] else { panic!("{kind:?}: {findings:?}") };
        assert_eq!(page.repaired.as_deref(), Some("recounted from the trees"), "{page:?}");
        assert_eq!(blocks.repaired, None);
        for words in ["508 data blocks between 508 and 1015", "508 of disk 'vm', 508 of snapshot 'vm@s'"] {
            assert!(blocks.problem.contains(words), "{kind:?}: {blocks:?}");
        }
        assert_eq!(check(&engine, false, false), []);
        assert_eq!(unreadable(&engine, WRITTEN, content), lost, "{kind:?}");
        assert!(lost.iter().all(|block| references(&engine, place(&engine, 1, *block).0.start) == 1));
        // Later scrubs and checks of all data find these blocks too.
        assert_eq!(check(&engine, true, false).len(), lost.len());
        assert_eq!(scrub(&engine).len(), lost.len());
        lost.iter().for_each(|block| write(&engine, *block, content(*block)));
        engine.flush().unwrap();
        let snapshot = engine.with_catalog(|catalog| catalog.snapshot(1, "s").unwrap().id);
        engine.delete_snapshot(snapshot).unwrap();
        engine.close().unwrap();
        let engine = open(&disk).unwrap();
        assert_eq!(unreadable(&engine, WRITTEN, content), Vec::<u64>::new(), "{kind:?}");
        is_whole(&engine);
    }
}

/// A closed store with disk 1 in packs, some of which the page describes.
fn packed() -> (SimulatedDisk, u64) {
    let (disk, engine) = made();
    let blocks = 1100;
    for first in (0..blocks).step_by(100) {
        engine.write_blocks(&engine.head(1), first, mixed((first..first + 100).map(content))).unwrap();
    }
    quiet(&engine);
    pack(&engine, 1, 0..blocks);
    quiet(&engine);
    engine.close().unwrap();
    (disk, blocks)
}

/// The page that describes the pack of a block.
fn page_of(disk: &SimulatedDisk, block: u64) -> (u64, Run) {
    let (run, is_packed) = place(&open(disk).unwrap(), 1, block);
    assert!(is_packed);
    (run.start / TABLE_ENTRIES, run)
}

#[test]
fn the_checksums_of_packs_are_restored_from_their_indexes() {
    for kind in [Damage::Zeros, Damage::Noise] {
        let (disk, blocks) = packed();
        let (page, _) = page_of(&disk, 500);
        damage(&disk, "data.table", page, kind);
        let engine = repairing(&disk);
        let findings = check(&engine, false, true);
        assert!(findings.iter().all(|finding| finding.repaired.is_some()), "{kind:?}: {findings:?}");
        let restored = |finding: &&Finding| finding.problem.contains("data blocks of packs have lost their checksums");
        assert_eq!(findings.iter().filter(restored).count(), 1, "{kind:?}: {findings:?}");
        is_whole(&engine);
        assert_eq!(unreadable(&engine, blocks, content), Vec::<u64>::new());
        assert_eq!(scrub(&engine), []);
        engine.close().unwrap();
        is_whole(&open(&disk).unwrap());
    }
}

#[test]
fn a_damaged_block_of_a_pack_gets_no_checksum_from_the_index() {
    let (disk, blocks) = packed();
    let (page, pack) = page_of(&disk, 500);
    damage(&disk, "data.table", page, Damage::Zeros);
    disk.flip_bit("data.0000", (pack.start + pack.blocks / 2) * BLOCK_SIZE as u64 + 99, 3).unwrap();
    let engine = repairing(&disk);
    let findings = check(&engine, false, true);
    let open: Vec<&Finding> = findings.iter().filter(|finding| finding.repaired.is_none()).collect();
    let [Finding { problem, .. }] = open[..] else { panic!("{findings:?}") };
    // A content may lie in two blocks.
    assert!(problem.contains("of 2 data blocks between") && problem.contains("32 of disk 'vm'"), "{problem}");
    // The index proves the contents in the other blocks of the pack.
    let lost = unreadable(&engine, blocks, content);
    assert!((1..=3).contains(&lost.len()), "{lost:?}");
    assert_eq!(check(&engine, true, false).len(), 2);
}

#[test]
fn the_references_of_shared_blocks_are_counted_again() {
    let (disk, engine) = made();
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    (0..WRITTEN).for_each(|block| write(&engine, block, content(block)));
    for block in 0..4 {
        engine.write_blocks(&engine.head(other), block, slice(content(700 + block), 1)).unwrap();
    }
    quiet(&engine);
    share(&engine, &[1, other]);
    quiet(&engine);
    let shared = place(&engine, other, 0).0.start;
    let page = shared / TABLE_ENTRIES;
    let before: Vec<u32> = (0..2 * TABLE_ENTRIES).map(|block| references(&engine, block)).collect();
    assert!(before[shared as usize] > 2);
    engine.close().unwrap();
    drop(engine);
    damage(&disk, "data.table", page, Damage::Zeros);
    let engine = repairing(&disk);
    let findings = check(&engine, false, true);
    let named = |finding: &Finding| ["vm", "other"].map(|name| finding.places.iter().any(|place| place.name == name));
    let [page, blocks, _space] = &findings[..] else { panic!("{findings:?}") };
    assert!(named(page) == [true; 2] && named(blocks) == [true; 2], "{findings:?}");
    assert!(blocks.problem.contains("4 of disk 'other', 1400 of disk 'vm'"), "{blocks:?}");
    assert_eq!((0..2 * TABLE_ENTRIES).map(|block| references(&engine, block)).collect::<Vec<u32>>(), before);
}

#[test]
fn a_repair_of_a_store_that_lost_checksums_before_restores_those_of_packs() {
    let (disk, _) = packed();
    let engine = open(&disk).unwrap();
    let (run, _) = place(&engine, 1, 500);
    {
        let mut guard = engine.meta.lock();
        let Meta { data, pages, .. } = &mut *guard;
        data.annotate(pages, run, |_, entry| entry.checksum = 0).unwrap();
    }
    engine.checkpoint().unwrap();
    let findings = check(&engine, false, true);
    assert!(findings.len() == 1 && findings[0].repaired.is_some(), "{findings:?}");
    is_whole(&engine);
}

#[test]
fn a_scrub_finds_a_page_of_zeros_and_restores_it_from_memory() {
    for name in ["data.table", "map.table"] {
        let page = if name == "data.table" { PAGE } else { 0 };
        let disk = plain();
        let engine = open(&disk).unwrap();
        assert_eq!(scrub(&engine), [], "the pages of the table that were never written are no damage");
        // The page is in memory.
        assert_eq!(unreadable(&engine, WRITTEN, content), Vec::<u64>::new());
        check(&engine, true, true);
        damage(&disk, name, page, Damage::Zeros);
        let found = scrub(&engine);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].repaired.as_deref(), Some("written again from memory"), "{name}");
        assert!(!engine.scrubber().is_still_damaged(found[0].place).unwrap() || engine.checkpoint().is_ok());
        assert_eq!(scrub(&engine), []);
        is_whole(&engine);
        drop(engine);
        damage(&disk, name, page, Damage::Zeros);
        let engine = open(&disk).unwrap();
        let found = scrub(&engine);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].repaired.is_none() && found[0].problem.contains("has no entries"), "{found:?}");
        assert!(engine.scrubber().is_still_damaged(found[0].place).unwrap());
        let located = engine.locate_damage(&[found[0].place], &|| true).unwrap();
        assert_eq!(located.objects.len(), if name == "data.table" { 2 } else { 3 });
        // The page is still damage after a scrub has found it.
        assert_eq!(scrub(&engine).len(), 1);
    }
}

#[test]
fn a_page_of_the_table_of_nodes_is_counted_again() {
    let disk = plain();
    damage(&disk, "map.table", 0, Damage::Zeros);
    let engine = repairing(&disk);
    let findings = check(&engine, false, true);
    let [Finding { problem, repaired: Some(_), .. }] = &findings[..] else { panic!("{findings:?}") };
    assert!(problem.starts_with("page 0 of map.table is damaged") && problem.contains("disk 'vm'"), "{problem}");
    is_whole(&engine);
    assert_eq!(unreadable(&engine, WRITTEN, content), Vec::<u64>::new());
}

#[test]
fn a_repair_that_cannot_read_a_tree_returns_no_space_of_a_page_of_zeros() {
    let disk = plain();
    let data = |disk: &SimulatedDisk| {
        let file = disk.directory().open("data.0000", IoMode::Buffered).unwrap();
        let mut bytes = Buffer::zeroed(WRITTEN as usize);
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    };
    let before = data(&disk);
    damage(&disk, "data.table", PAGE, Damage::Zeros);
    let node = open(&disk).unwrap().with_catalog(|catalog| catalog.disk("other").unwrap().root.unwrap());
    damage(&disk, "map", node.0, Damage::Noise);
    let engine = repairing(&disk);
    let findings = check(&engine, false, true);
    assert!(findings.iter().any(|finding| finding.problem.contains("page 1 of data.table")), "{findings:?}");
    engine.close().unwrap();
    assert!(data(&disk)[..] == before[..]);
}

#[test]
fn a_page_of_zeros_without_blocks_in_use_is_counted_again() {
    let (disk, engine) = with_a_block(2000);
    engine.close().unwrap();
    drop(engine);
    damage(&disk, "data.table", 2, Damage::Zeros);
    let engine = open(&disk).unwrap();
    let findings = check(&engine, false, true);
    let [Finding { problem, repaired: Some(_), .. }, space] = &findings[..] else { panic!("{findings:?}") };
    assert!(space.problem.contains("2080768 bytes of the file system") && space.repaired.is_some(), "{space:?}");
    assert!(problem.contains("data.table has lost 508 blocks of region 0 that nothing uses"), "{problem}");
    is_whole(&engine);
    (0..600).for_each(|block| write(&engine, block, 3));
    engine.flush().unwrap();
    is_whole(&engine);
}
