//! Damage to stored blocks of packs: reads fail, and reports name places, only where a content lies in the damaged
//! part.

use super::super::between::lose_page;
use super::super::unreadable::try_write;
use super::{mixed, pack, place, quiet};
use crate::engine::check::Finding;
use crate::engine::scrub::DamagedPlace;
use crate::engine::tests::*;

/// A store with a pack of 32 blocks in many stored blocks, the content of the blocks, and where the pack is.
fn with_a_pack() -> (SimulatedDisk, Arc<Engine>, Vec<Vec<u8>>, Run) {
    let (disk, engine) = made();
    let mut random = Random(1);
    let mut expected = Vec::new();
    for block in 0..32 {
        let mut buffer = Buffer::zeroed(1);
        buffer[..2124].copy_from_slice(&random.bytes(2124));
        expected.push(buffer.to_vec());
        let data = SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE);
        engine.write_blocks(&engine.head(1), block, data).unwrap();
    }
    quiet(&engine);
    let (packed, stored) = pack(&engine, 1, 0..32);
    assert!(packed == 32 && stored > 8);
    quiet(&engine);
    let run = place(&engine, 1, 0).0;
    (disk, engine, expected, run)
}

#[test]
fn damage_to_a_pack_affects_only_the_blocks_in_the_damaged_part() {
    let (disk, engine, expected, run) = with_a_pack();
    engine.close().unwrap();
    for damaged in run.start..run.start + run.blocks {
        let at = damaged * BLOCK_SIZE as u64 + 2000;
        disk.flip_bit("data.0000", at, 3).unwrap();
        // The index of the pack is not in memory.
        let engine = open(&disk).unwrap();
        let head = engine.head(1);
        let read = |block: u64| engine.read_blocks("vm", block..block + 1, &|range| engine.plan_head(&head, range));
        let failed: Vec<u64> = (0..32).filter(|block| read(*block).is_err()).collect();
        let is_first = damaged == run.start;
        assert!(
            if is_first { failed.len() == 32 } else { (1..=3).contains(&failed.len()) },
            "block {damaged}: {failed:?}"
        );
        for block in (0..32).filter(|block| !failed.contains(block)) {
            assert!(read(block).unwrap()[..] == expected[block as usize][..]);
        }
        let report = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap();
        let located = engine.locate_damage(&[DamagedPlace::Block(damaged)], &|| true).unwrap();
        let named = |offset: u64, length: u64| offset / BLOCK_SIZE as u64..(offset + length) / BLOCK_SIZE as u64;
        let spans: Vec<_> = located.references[0].iter().map(|found| named(found.offset, found.length)).collect();
        let places = report.findings.iter().flat_map(|finding| &finding.places);
        assert_eq!(places.map(|place| named(place.offset, place.length)).collect::<Vec<_>>(), spans);
        // Other contents in the damaged block may be proved by their own checksums.
        let named: Vec<u64> = spans.iter().cloned().flatten().collect();
        assert!(failed.iter().all(|block| named.contains(block)), "block {damaged}: {failed:?} of {named:?}");
        assert!(if is_first { named.len() == 32 } else { named.len() <= 4 }, "block {damaged}: {named:?}");
        assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
        drop(engine);
        let salvage = Salvage::open(disk.directory()).unwrap();
        for (block, content) in salvage.contents(1, 0..32).unwrap().into_iter().enumerate() {
            assert_eq!(content, (!failed.contains(&(block as u64))).then(|| expected[block].clone()), "block {block}");
        }
        disk.flip_bit("data.0000", at, 3).unwrap();
    }
}

/// A read of many blocks, or without the index in memory, fetches the whole pack at once.
#[test]
fn a_block_of_a_pack_that_cannot_be_read_affects_only_the_blocks_in_it() {
    let (disk, engine, mut expected, run) = with_a_pack();
    engine.close().unwrap();
    let damaged = run.start + 5;
    let at = damaged * BLOCK_SIZE as u64;
    disk.fail_reads("data.0000", at..at + BLOCK_SIZE as u64).unwrap();
    for read_cache in [0, 1 << 20] {
        let engine = Engine::open(disk.directory(), EngineOptions { read_cache, ..options() }).unwrap();
        let head = engine.head(1);
        let read = |range| engine.read_blocks("vm", range, &|range| engine.plan_head(&head, range));
        assert_eq!(read(0..32).unwrap_err().kind(), ErrorKind::Io);
        let located = engine.locate_damage(&[DamagedPlace::Block(damaged)], &|| true).unwrap();
        let [found] = located.references[0][..] else { panic!("{located:?}") };
        let (first, end) = (found.offset / BLOCK_SIZE as u64, (found.offset + found.length) / BLOCK_SIZE as u64);
        // The content of the damaged block cannot be read, however many blocks are asked for.
        assert!((first..end).any(|block| read(block..block + 1).is_err()));
        for range in [0..first, end..32] {
            let content = expected[range.start as usize..range.end as usize].concat();
            assert!(read(range.clone()).unwrap()[..] == content[..], "{range:?}");
        }
        if read_cache > 0 {
            // When what was lost is written again, nothing is lost any more.
            engine.write_blocks(&head, first, slice(9, (end - first) as usize)).unwrap();
            (first..end).for_each(|block| expected[block as usize] = vec![9; BLOCK_SIZE]);
            quiet(&engine);
            assert!(read(0..32).unwrap()[..] == expected.concat()[..]);
        }
    }
}

/// Of two damaged blocks, the error is about the one that the read needs.
#[test]
fn a_read_reports_the_damaged_block_of_a_pack_that_it_needs() {
    let (disk, engine, _, run) = with_a_pack();
    engine.close().unwrap();
    let (unreadable, corrupt) = (run.start + 3, run.start + 9);
    let at = |block: u64| block * BLOCK_SIZE as u64;
    disk.fail_reads("data.0000", at(unreadable)..at(unreadable + 1)).unwrap();
    disk.flip_bit("data.0000", at(corrupt) + 2000, 3).unwrap();
    let engine = Engine::open(disk.directory(), EngineOptions { read_cache: 0, ..options() }).unwrap();
    let head = engine.head(1);
    let located = engine.locate_damage(&[DamagedPlace::Block(corrupt)], &|| true).unwrap();
    let [found] = located.references[0][..] else { panic!("{located:?}") };
    let (first, end) = (found.offset / BLOCK_SIZE as u64, (found.offset + found.length) / BLOCK_SIZE as u64);
    let read = |block: u64| engine.read_blocks("vm", block..block + 1, &|range| engine.plan_head(&head, range));
    let kinds: Vec<ErrorKind> = (first..end).filter_map(|block| read(block).err()).map(|error| error.kind()).collect();
    assert!(!kinds.is_empty() && kinds.iter().all(|kind| *kind == ErrorKind::Corrupt), "{kinds:?}");
}

#[test]
fn damage_in_a_part_of_a_pack_that_was_replaced_is_no_finding_unless_a_map_is_lost() {
    let (disk, engine) = made();
    add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    write(&engine, 0, 1);
    try_write(&engine, 2, 0, 1).unwrap();
    engine.write_blocks(&engine.head(1), 0, mixed(1..33)).unwrap();
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 0..32).0, 32);
    quiet(&engine);
    let damaged = place(&engine, 1, 0).0.start + 5;
    disk.flip_bit("data.0000", damaged * BLOCK_SIZE as u64 + 2000, 3).unwrap();
    let check = || engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap().findings;
    let findings = check();
    let [Finding { places, .. }] = &findings[..] else { panic!("{findings:?}") };
    let [place] = &places[..] else { panic!("{places:?}") };
    let (first, blocks) = (place.offset / BLOCK_SIZE as u64, place.length / BLOCK_SIZE as u64);
    engine.write_blocks(&engine.head(1), first, mixed(100..100 + blocks as u8)).unwrap();
    quiet(&engine);
    assert_eq!(check(), []);
    assert_eq!(engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap().findings, []);
    let located = engine.locate_damage(&[DamagedPlace::Block(damaged)], &|| true).unwrap();
    assert!(located.is_whole && located.references == [vec![]]);
    // The map of the other disk may refer to the block.
    let root = engine.with_catalog(|catalog| catalog.get(2).unwrap().root.unwrap());
    engine.close().unwrap();
    drop(engine);
    let _mend = lose_page(&disk, "map", root.0);
    let engine = open(&disk).unwrap();
    let located = engine.locate_damage(&[DamagedPlace::Block(damaged)], &|| true).unwrap();
    assert!(!located.is_whole);
    let findings = engine.check(CheckOptions { data: true, repair: false }, &|_, _| true).unwrap().findings;
    let named = format!("data block {damaged} ");
    assert!(findings.iter().any(|finding| finding.problem.starts_with(&named)), "{findings:?}");
}
