//! New data that is stored already: at write-back, and by writes that bypass the buffer, the stored blocks are mapped.

use super::super::cut::{Features, Histories, cut_histories};
use super::super::replayed::checkpoints;
use super::super::unreadable::{grown, leaves};
use super::*;
use crate::engine::IMAGES_FILE;
use crate::engine::log::VERSION_SHARED_WRITES;

const MEMORY: usize = 1 << 20;

/// Lets writes bypass the buffer: they do if there are free blocks, and after the height of the tree was read.
fn make_room(engine: &Engine, disk: u64) {
    drop(engine.claim_blocks(512).unwrap());
    put(engine, disk, BLOCKS - 1, 251);
    engine.settle(&engine.head(disk)).unwrap();
}

/// A store with two disks of a domain. The first one has blocks with the values 1, 2, 3 ...
fn stored(blocks: u64) -> (SimulatedDisk, Arc<Engine>, u64) {
    stored_on(super::super::plain_disk(), blocks)
}

fn stored_on(disk: SimulatedDisk, blocks: u64) -> (SimulatedDisk, Arc<Engine>, u64) {
    let (disk, engine) = made_on(disk);
    let other = add_disk(&engine, "other", BLOCKS, Provisioning::Thin);
    [1, other].into_iter().for_each(|disk| make_room(&engine, disk));
    of_one_domain(&engine, other);
    fill(&engine, 1, 0, blocks, false).unwrap();
    quiet(&engine);
    (disk, engine, other)
}

fn of_one_domain(engine: &Engine, other: u64) {
    engine.share_writes_of(&[(1, "d".into()), (other, "d".into())], MEMORY);
}

/// Writes the values 1, 2, 3 ... to the blocks from `first` on.
fn fill(engine: &Engine, disk: u64, first: u64, blocks: u64, through: bool) -> Result<()> {
    let head = engine.head(disk);
    if through {
        let mut data = Buffer::zeroed(blocks as usize);
        data.chunks_exact_mut(BLOCK_SIZE).zip(1..).for_each(|(block, value)| block.fill(value));
        return engine.write_blocks(&head, first, SharedSlice::new(Arc::new(data), 0..blocks as usize * BLOCK_SIZE));
    }
    (0..blocks).try_for_each(|block| engine.write_blocks(&head, first + block, slice(1 + block as u8, 1)))?;
    engine.settle(&head)
}

fn has_values(engine: &Engine, disk: u64, first: u64, blocks: u64) {
    (0..blocks).for_each(|block| assert_eq!(holds(engine, disk, first + block).unwrap(), 1 + block as u8));
}

fn version(disk: &SimulatedDisk, copy: u64) -> u32 {
    let file = disk.directory().open("superblock", backend::IoMode::Buffered).unwrap();
    let mut bytes = Buffer::zeroed(1);
    file.read_at(&mut bytes, copy * BLOCK_SIZE as u64).unwrap();
    u32::from_le_bytes(bytes[8..12].try_into().unwrap())
}

#[test]
fn new_data_that_is_stored_already_takes_no_blocks() {
    for through in [false, true] {
        let (disk, engine, other) = stored(64);
        let before = used(&engine);
        assert_eq!(version(&disk, 0).max(version(&disk, 1)), FORMAT_VERSION, "nothing was mapped yet");
        fill(&engine, other, 100, 64, through).unwrap();
        assert_eq!((used(&engine), engine.shared_writes()), (before, 64), "through {through}");
        assert_eq!([version(&disk, 0), version(&disk, 1)], [VERSION_SHARED_WRITES; 2]);
        assert_eq!(engine.count_blocks(other).unwrap().extents, 2, "a copy of a file stays one extent");
        quiet(&engine);
        is_whole(&engine);
        // Both disks go on with blocks of their own.
        put(&engine, 1, 5, 200);
        put(&engine, other, 106, 201);
        quiet(&engine);
        assert_eq!(used(&engine), before + 2);
        let is_kept = |engine: &Engine| {
            has_values(engine, 1, 0, 5);
            has_values(engine, other, 100, 6);
            assert_eq!([holds(engine, 1, 5).unwrap(), holds(engine, other, 106).unwrap()], [200, 201]);
            assert_eq!([holds(engine, 1, 6).unwrap(), holds(engine, other, 105).unwrap()], [7, 6]);
            is_whole(engine);
        };
        is_kept(&engine);
        engine.close().unwrap();
        is_kept(&open(&disk).unwrap());
    }
}

/// What is overwritten in place stays where it is, so that random writes of a guest keep their rate.
#[test]
fn data_that_needs_no_new_block_is_not_compared() {
    let (_disk, engine, other) = stored(10);
    put(&engine, other, 0, 77);
    quiet(&engine);
    let before = (place(&engine, other, 0), used(&engine));
    put(&engine, other, 0, 3);
    quiet(&engine);
    assert_eq!((place(&engine, other, 0), used(&engine), engine.shared_writes()), (before.0, before.1, 0));
    assert_eq!(holds(&engine, other, 0).unwrap(), 3);
}

#[test]
fn disks_of_different_domains_share_nothing() {
    for through in [false, true] {
        let (_disk, engine, other) = stored(40);
        engine.share_writes_of(&[(1, "d".into()), (other, "e".into())], MEMORY);
        let before = used(&engine);
        fill(&engine, other, 100, 40, through).unwrap();
        assert_eq!((used(&engine), engine.shared_writes()), (before + 40, 0));
        // A disk that returns is found by what it writes from then on.
        engine.share_writes_of(&[(1, "e".into()), (other, "d".into())], MEMORY);
        fill(&engine, 1, 300, 40, through).unwrap();
        assert_eq!((used(&engine), engine.shared_writes()), (before + 80, 0), "through {through}");
        quiet(&engine);
        of_one_domain(&engine, other);
        fill(&engine, other, 200, 40, through).unwrap();
        assert_eq!((used(&engine), engine.shared_writes()), (before + 120, 0), "all hints are of another domain");
        quiet(&engine);
        fill(&engine, 1, 600, 40, through).unwrap();
        assert_eq!((used(&engine), engine.shared_writes()), (before + 120, 40));
        // Without any disk, there are no hints.
        engine.share_writes_of(&[], MEMORY);
        fill(&engine, 1, 400, 40, through).unwrap();
        assert_eq!(engine.shared_writes(), 40);
        of_one_domain(&engine, other);
        fill(&engine, 1, 500, 40, through).unwrap();
        assert_eq!(engine.shared_writes(), 40);
        is_whole(&engine);
    }
}

/// A disk leaves its domain after its block was compared.
#[test]
fn a_disk_that_has_left_its_domain_is_no_source() {
    let (_disk, engine, other) = stored(1);
    put(&engine, other, 7, 1);
    let head = engine.head(other);
    let equal = engine.equal_runs_of_batch(&head);
    assert_eq!(equal.runs.len(), 1);
    engine.share_writes_of(&[(1, "e".into()), (other, "d".into())], MEMORY);
    assert!(!engine.map_equal_runs(&head, &equal).unwrap());
    of_one_domain(&engine, other);
    assert!(!engine.map_equal_runs(&head, &equal).unwrap(), "it has a new number");
}

#[test]
fn thick_disks_neither_give_nor_get_blocks() {
    for through in [false, true] {
        let (_disk, engine, other) = stored(40);
        let thick = add_disk(&engine, "thick", 64, Provisioning::ZeroedThick);
        engine.share_writes_of(&[1, other, thick].map(|disk| (disk, "d".into())), MEMORY);
        fill(&engine, thick, 0, 40, through).unwrap();
        quiet(&engine);
        assert_eq!(engine.shared_writes(), 0);
        (0..40).for_each(|block| assert_ne!(place(&engine, thick, block), place(&engine, 1, block)));
        // The only hint is for a block of the thick disk.
        put(&engine, thick, 50, 99);
        quiet(&engine);
        put(&engine, other, 3, 99);
        quiet(&engine);
        assert_ne!(place(&engine, thick, 50), place(&engine, other, 3));
        is_whole(&engine);
    }
}

/// The stored block is overwritten in place while it is compared, or after that.
#[test]
fn a_block_that_is_overwritten_meanwhile_is_not_mapped() {
    for through in [false, true] {
        for after in [false, true] {
            let (disk, engine, other) = stored(40);
            let kept = place(&engine, 1, 9);
            let writer = Arc::downgrade(&engine);
            let overwrite = move || {
                let engine = writer.upgrade().unwrap();
                put(&engine, 1, 9, 222);
                engine.settle(&engine.head(1)).unwrap();
                assert_eq!(place(&engine, 1, 9), kept, "in place");
            };
            if after && !through {
                (0..40).for_each(|block| put(&engine, other, 100 + block, 1 + block as u8));
                let head = engine.head(other);
                let equal = engine.equal_runs_of_batch(&head);
                assert_eq!(equal.runs.len(), 1);
                overwrite();
                assert!(!engine.map_equal_runs(&head, &equal).unwrap());
                drop(equal);
                engine.settle(&head).unwrap();
            } else {
                before_next(&disk, Request::Read, overwrite);
                fill(&engine, other, 100, 40, through).unwrap();
            }
            assert_ne!(place(&engine, other, 109), kept);
            has_values(&engine, other, 100, 40);
            assert_eq!(holds(&engine, 1, 9).unwrap(), 222);
            quiet(&engine);
            is_whole(&engine);
            assert!(engine.meta.lock().in_flight.watches_nothing());
        }
    }
}

/// The block is freed, and gets other content of another disk.
#[test]
fn a_block_that_is_freed_meanwhile_is_not_mapped() {
    let (_disk, engine, other) = stored(10);
    put(&engine, other, 100, 4);
    let head = engine.head(other);
    let equal = engine.equal_runs_of_batch(&head);
    assert_eq!(equal.runs.len(), 1);
    engine.discard_blocks(&engine.head(1), 0..10).unwrap();
    engine.settle(&engine.head(1)).unwrap();
    // The block is mapped again at its place.
    fill(&engine, 1, 0, 10, false).unwrap();
    engine.commit_changes().unwrap();
    assert!(!engine.map_equal_runs(&head, &equal).unwrap());
    drop(equal);
    quiet(&engine);
    has_values(&engine, 1, 0, 10);
    assert_eq!(holds(&engine, other, 100).unwrap(), 4);
    is_whole(&engine);
}

/// Such a write may have been acknowledged without a claim on a free block.
#[test]
fn a_block_that_a_buffered_write_overwrites_in_place_is_not_mapped() {
    for through in [false, true] {
        let (_disk, engine, other) = stored(40);
        put(&engine, 1, 9, 222);
        fill(&engine, other, 100, 40, through).unwrap();
        assert_ne!(place(&engine, other, 109), place(&engine, 1, 9));
        has_values(&engine, other, 100, 40);
        quiet(&engine);
        is_whole(&engine);
        // A block of several owners is not overwritten in place.
        fill(&engine, 1, 0, 40, false).unwrap();
        quiet(&engine);
        fill(&engine, other, 200, 40, through).unwrap();
        assert_eq!(place(&engine, other, 210), place(&engine, 1, 10));
        put(&engine, 1, 10, 223);
        fill(&engine, other, 300, 40, through).unwrap();
        assert_eq!(place(&engine, other, 310), place(&engine, other, 210));
        quiet(&engine);
        is_whole(&engine);
    }
}

/// A write that comes after the comparison may have no claim on a free block, because it would overwrite its block in
/// place. Then this block must not be replaced by a shared one.
#[test]
fn data_beside_which_a_write_without_a_claim_is_buffered_is_written() {
    let (disk, engine, other) = stored(10);
    // The change that maps the block is pending, so the block is held, and new content needs a new one.
    put(&engine, other, 100, 77);
    let head = engine.head(other);
    engine.settle(&head).unwrap();
    put(&engine, other, 100, 4);
    let taken = take(&engine, other, "s");
    let equal = engine.equal_runs_of_batch(&head);
    assert_eq!(equal.runs.len(), 1);
    // Ends the hold.
    engine.commit_changes().unwrap();
    fill_up(&disk);
    let all = engine.claim_blocks(engine.reserves.headroom() - engine.reserves.claims()).unwrap();
    if engine.write_blocks(&head, 100, slice(5, 1)).is_ok() {
        assert!(!engine.map_equal_runs(&head, &equal).unwrap());
    }
    drop((all, equal));
    engine.settle(&head).unwrap();
    assert_eq!(holds(&engine, taken, 100).unwrap(), 4);
    is_whole(&engine);
}

/// The content is in the journal, or the change that maps the block is not.
#[test]
fn blocks_that_pending_operations_concern_are_not_mapped() {
    let (_disk, engine, other) = stored(0);
    fill(&engine, 1, 0, 4, false).unwrap();
    fill(&engine, other, 100, 4, false).unwrap();
    assert_eq!(engine.shared_writes(), 0, "the blocks are held");
    put(&engine, 1, 50, 90);
    engine.flush().unwrap();
    put(&engine, other, 150, 90);
    engine.settle(&engine.head(other)).unwrap();
    assert_eq!(engine.shared_writes(), 0, "the payload is not written");
    quiet(&engine);
    fill(&engine, other, 200, 4, false).unwrap();
    put(&engine, other, 250, 90);
    engine.settle(&engine.head(other)).unwrap();
    assert_eq!(engine.shared_writes(), 5);
    quiet(&engine);
    is_whole(&engine);
}

#[test]
fn nothing_is_compared_while_clients_wait_for_room_in_the_buffers() {
    let (_disk, engine, other) = stored(10);
    let half = engine.buffers.limit() / 2;
    (0..=half).for_each(|block| put(&engine, other, 100 + block, 1 + (block % 10) as u8));
    assert!(engine.equal_runs_of_batch(&engine.head(other)).runs.is_empty());
    quiet(&engine);
    assert!(engine.shared_writes() < half / 2);
    is_whole(&engine);
}

#[test]
fn a_small_table_finds_less_and_loses_nothing() {
    let (_disk, engine, other) = stored(0);
    engine.share_writes_of(&[(1, "d".into()), (other, "d".into())], 48);
    fill(&engine, 1, 0, 100, false).unwrap();
    quiet(&engine);
    fill(&engine, other, 100, 100, false).unwrap();
    assert!((1..=4).contains(&engine.shared_writes()), "{}", engine.shared_writes());
    has_values(&engine, other, 100, 100);
    quiet(&engine);
    is_whole(&engine);
}

#[test]
fn a_block_gets_a_limited_number_of_references() {
    let (_disk, engine, other) = stored(1);
    for block in 0..600 {
        put(&engine, other, block, 1);
        engine.settle(&engine.head(other)).unwrap();
        if block % 50 == 0 {
            quiet(&engine);
        }
    }
    quiet(&engine);
    assert!(engine.shared_writes() > 400, "{}", engine.shared_writes());
    let most = (0..600).map(|block| super::super::packed::references(&engine, place(&engine, other, block))).max();
    assert_eq!(most, Some(256));
    (0..600).for_each(|block| assert_eq!(holds(&engine, other, block).unwrap(), 1));
    is_whole(&engine);
}

/// After a start there are no hints: a pass over the disks finds blocks, for itself and for writes.
#[test]
fn a_pass_makes_hints() {
    let (disk, engine, other) = stored(10);
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    of_one_domain(&engine, other);
    fill(&engine, other, 100, 10, false).unwrap();
    assert_eq!(engine.shared_writes(), 0);
    quiet(&engine);
    assert_eq!(share(&engine, &[1, other]), 11);
    quiet(&engine);
    fill(&engine, other, 200, 10, false).unwrap();
    assert_eq!(engine.shared_writes(), 10);
}

#[test]
fn data_that_is_replaced_after_it_was_compared_is_not_mapped() {
    let (_disk, engine, other) = stored(10);
    let head = engine.head(other);
    (0..10).for_each(|block| put(&engine, other, 100 + block, 1 + block as u8));
    let equal = engine.equal_runs_of_batch(&head);
    put(&engine, other, 103, 99);
    assert!(!engine.map_equal_runs(&head, &equal).unwrap());
    drop(equal);
    quiet(&engine);
    assert_eq!([103, 104].map(|block| holds(&engine, other, block).unwrap()), [99, 5]);
    is_whole(&engine);
}

/// Also when leaves are split, and blocks of a snapshot are replaced.
#[test]
fn mapping_changes_no_more_pages_than_it_was_admitted_for() {
    let (_disk, engine, other) = stored(200);
    (0..600).for_each(|block| put(&engine, other, 2 * block, 201 + (block % 40) as u8));
    quiet(&engine);
    let head = engine.head(other);
    let mut most = 0;
    for round in 0..150 {
        if round % 30 == 0 {
            take(&engine, other, &format!("s{round}"));
        }
        quiet(&engine);
        put(&engine, other, (round * 37) % 1200, 1 + round as u8);
        let equal = engine.equal_runs_of_batch(&head);
        assert_eq!(equal.runs.len(), 1);
        let before = engine.meta.lock().dirty_pages();
        let cost = engine.meta.lock().cost(&equal.runs[0].operation(other)).unwrap().pages;
        assert!(engine.map_equal_runs(&head, &equal).unwrap());
        let dirty = engine.meta.lock().dirty_pages() - before;
        assert!(dirty <= cost, "{dirty} pages instead of {cost}");
        most = most.max(dirty);
    }
    assert!(most > 3, "{most}");
    is_whole(&engine);
}

#[test]
fn mapped_writes_are_found_by_replay_after_a_kill() {
    for through in [false, true] {
        let (disk, engine, other) = stored(40);
        let before = checkpoints(&engine);
        fill(&engine, other, 100, 40, through).unwrap();
        engine.flush().unwrap();
        put(&engine, 1, 3, 111);
        engine.flush().unwrap();
        assert_eq!(checkpoints(&engine), before);
        // The engine is dropped without closing, as by a kill.
        drop(engine);
        let engine = open(&disk).unwrap();
        has_values(&engine, other, 100, 40);
        assert_eq!(holds(&engine, 1, 3).unwrap(), 111);
        assert_eq!(place(&engine, other, 104), place(&engine, 1, 4));
        is_whole(&engine);
    }
}

#[test]
fn a_power_cut_at_any_operation_of_mapped_writes_loses_nothing() {
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, false));
    cut_at_each_operation(|seed, cut| cut_off(seed, cut, true));
}

/// Overwrites blocks in place, writes the same content to another disk, and cuts the power after `cut` operations of
/// the medium.
fn cut_off(seed: u64, cut: u64, through: bool) -> bool {
    let medium = SimulatedDisk::new(seed, SimulatedOptions::default());
    let (disk, engine, other) = stored_on(medium, 40);
    fill(&engine, 1, 60, 40, false).unwrap();
    quiet(&engine);
    // The blocks have these contents without a pending operation or a flush.
    (0..40).for_each(|block| put(&engine, 1, block, 101 + block as u8));
    engine.settle(&engine.head(1)).unwrap();
    disk.cut_after(disk.operations() + cut);
    let head = engine.head(other);
    let mut data = Buffer::zeroed(40);
    data.chunks_exact_mut(BLOCK_SIZE).zip(101..).for_each(|(block, value)| block.fill(value));
    let data = SharedSlice::new(Arc::new(data), 0..40 * BLOCK_SIZE);
    let part = |block: usize| data.slice(block * BLOCK_SIZE..(block + 1) * BLOCK_SIZE);
    let written = match through {
        true => engine.write_blocks(&head, 100, data),
        false => (0..40)
            .try_for_each(|block| engine.write_blocks(&head, 100 + block, part(block as usize)))
            .and_then(|()| engine.settle(&head)),
    };
    let mapped = engine.shared_writes();
    let done = written.and_then(|()| engine.flush()).is_ok();
    let ended = !disk.is_off();
    let engine = open(&disk.crash()).unwrap();
    for block in 0..40 {
        let found = holds(&engine, other, 100 + block).unwrap();
        assert!(found == 101 + block as u8 || !done && found == 0, "cut {cut}, block {block}: {found}");
    }
    is_whole(&engine);
    assert!(!ended || done && mapped == 40, "{mapped}");
    ended
}

/// The map of the disk that wrote the blocks is lost, and with it the operation that mapped them.
#[test]
fn a_repair_keeps_mapped_blocks_whose_first_owner_is_lost() {
    let disk = grown();
    let leaves = leaves(&disk);
    let (first, page) = leaves[1];
    let engine = open(&disk).unwrap();
    let other = add_disk(&engine, "second", BLOCKS, Provisioning::Thin);
    engine.checkpoint().unwrap();
    let before = checkpoints(&engine);
    of_one_domain(&engine, other);
    take(&engine, 1, "s");
    (0..8).for_each(|block| put(&engine, 1, first + block, 171 + block as u8));
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    (0..8).for_each(|block| put(&engine, other, block, 171 + block as u8));
    engine.settle(&engine.head(other)).unwrap();
    engine.flush().unwrap();
    assert_eq!((engine.shared_writes(), checkpoints(&engine)), (8, before));
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    // More than a repair can correct.
    for (name, at) in [("map", page * BLOCK_SIZE as u64), (IMAGES_FILE, 0)] {
        (0..9).for_each(|bit| disk.flip_bit(name, at + 100 + 7 * bit, (bit % 8) as u8).unwrap());
    }
    assert!(open(&disk).is_err());
    let engine = Engine::open_repairing(disk.directory(), options(), None).unwrap();
    engine.check(CheckOptions { data: true, repair: true }, &|_, _| true).unwrap();
    (0..8).for_each(|block| assert_eq!(holds(&engine, other, block).unwrap(), 171 + block as u8));
    assert_eq!(holds(&engine, 1, first).unwrap_err().kind(), ErrorKind::Corrupt);
}

/// The power is cut at any operation of the medium, with writes of few contents.
#[test]
fn power_cuts_between_mapped_writes_lose_nothing_durable() {
    let number = |name: &str, default| std::env::var(name).map_or(default, |value| value.parse().unwrap());
    let from = number("LAMINA_CUT_FROM", 0);
    let seeds = from..from + number("LAMINA_CUT", 3);
    for shares in [false, true] {
        let features = Features { maps_writes: true, shares, ..Features::default() };
        let Histories { mapped, .. } = cut_histories(seeds.clone(), features);
        assert!(mapped > 300, "{mapped}");
    }
}
