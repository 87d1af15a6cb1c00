//! Damage to stored blocks of packs: reads fail, and reports name places, only where a content lies in the damaged
//! part.

use super::{mixed, pack, place, quiet};
use crate::engine::check::Finding;
use crate::engine::scrub::DamagedPlace;
use crate::engine::tests::*;

#[test]
fn damage_to_a_pack_affects_only_the_blocks_in_the_damaged_part() {
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

#[test]
fn damage_in_a_part_of_a_pack_that_was_replaced_is_no_finding() {
    let (disk, engine) = made();
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
    assert_eq!(engine.locate_damage(&[DamagedPlace::Block(damaged)], &|| true).unwrap().references, [vec![]]);
}
