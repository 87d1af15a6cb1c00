//! Openings after a kill, with a page or a block that the medium has lost: each loses no more than its own content.

use super::between::lose_page;
use super::unreadable::grown;
use super::*;

fn get(engine: &Engine, disk: u64, logical: u64) -> Result<u8> {
    let head = engine.head(disk);
    let block = engine.read_blocks("disk", logical..logical + 1, &|range| engine.plan_head(&head, range))?;
    Ok(block[0])
}

/// Makes a page of a file unreadable, or gives it a wrong checksum. The returned function undoes that.
fn spoil(disk: &SimulatedDisk, name: &'static str, page: u64, corrupt: bool) -> Box<dyn Fn()> {
    if !corrupt {
        return Box::new(lose_page(disk, name, page));
    }
    let disk = disk.clone();
    let flip = move || disk.flip_bit(name, page * BLOCK_SIZE as u64 + 100, 1).unwrap();
    flip();
    Box::new(flip)
}

#[test]
fn a_lost_root_does_not_prevent_the_opening_after_a_kill() {
    for corrupt in [false, true] {
        let disk = grown();
        let engine = open(&disk).unwrap();
        let root = engine.with_catalog(|catalog| catalog.get(1).unwrap().root.unwrap());
        engine.write_blocks(&engine.head(2), 5, slice(7, 1)).unwrap();
        engine.flush().unwrap();
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        let mend = spoil(&disk, "map", root.0, corrupt);
        // The opening looks for blocks past the ends of all disks.
        let engine = open(&disk).unwrap();
        assert_eq!(get(&engine, 2, 5).unwrap(), 7);
        let expected = if corrupt { ErrorKind::Corrupt } else { ErrorKind::Io };
        assert_eq!(get(&engine, 1, 0).unwrap_err().kind(), expected);
        mend();
        assert_eq!(get(&engine, 1, 0).unwrap(), 1);
        is_whole(&engine);
    }
}

#[test]
fn an_unreadable_block_that_was_being_overwritten_gets_its_journalled_content() {
    let (disk, engine) = made();
    // Reserves enough space first, so that the steps below reserve none.
    drop(engine.claim_blocks(1024).unwrap());
    // Puts payload of the block into the journal.
    write(&engine, 0, 1);
    engine.flush().unwrap();
    // Overwrites the block in place, after an announcement.
    write(&engine, 0, 2);
    engine.settle(&engine.head(1)).unwrap();
    let (_, offset) = engine.files.locate(own_block(&engine, 1, 0)).unwrap();
    drop(engine);
    disk.fail_reads("data.0000", offset..offset + BLOCK_SIZE as u64).unwrap();
    let engine = open(&disk).unwrap();
    assert_eq!(value(&engine, 0).unwrap(), 1);
    is_whole(&engine);
}
