//! New data that is stored already: at write-back, and by writes that bypass the buffer, the stored blocks are mapped.

mod batches;
mod packed;
mod recovered;
mod repeated;

use super::unequal::colliding;
use super::*;
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
    let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
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
        // After a snapshot its writes need new blocks, which are reserved.
        take(&engine, thick, "s");
        quiet(&engine);
        fill(&engine, thick, 10, 40, through).unwrap();
        quiet(&engine);
        assert_eq!(engine.shared_writes(), 0);
        has_values(&engine, thick, 10, 40);
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
                let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
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

/// Everything that ends the content of a stored block, or writes it again.
#[test]
fn a_block_is_not_mapped_after_it_was_changed_in_any_way() {
    type Change = fn(&Engine);
    let changes: [(&str, Change); 5] = [
        ("freed", |engine| engine.discard_blocks(&engine.head(1), 0..10).unwrap()),
        ("zeroed", |engine| engine.zero_blocks(&engine.head(1), 0..10).unwrap()),
        ("written", |engine| put(engine, 1, 3, 77)),
        ("journalled", |engine| {
            put(engine, 1, 3, 77);
            engine.flush().unwrap();
        }),
        ("written at once", |engine| fill(engine, 1, 0, 60, true).unwrap()),
    ];
    for (what, change) in changes {
        let (_disk, engine, other) = stored(60);
        put(&engine, other, 100, 4);
        let head = engine.head(other);
        let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
        assert_eq!(equal.runs.len(), 1);
        assert!(!engine.meta.lock().in_flight.watches_nothing());
        change(&engine);
        engine.settle(&engine.head(1)).unwrap();
        assert!(engine.meta.lock().in_flight.watches_nothing(), "{what}");
        assert!(!engine.map_equal_runs(&head, &equal).unwrap(), "{what}");
        drop(equal);
        quiet(&engine);
        assert_eq!(holds(&engine, other, 100).unwrap(), 4, "{what}");
        is_whole(&engine);
    }
}

/// Such a block has the checksum that was expected, also under the locks.
#[test]
fn other_content_with_the_same_checksum_is_not_mapped() {
    let colliding = |word| SharedSlice::copy_of(&colliding(word));
    for through in [false, true] {
        let (disk, engine, other) = stored(0);
        let write = |disk: u64, first: u64, words: std::ops::Range<u32>| {
            let data: Vec<u8> = words.flat_map(|word| colliding(word).to_vec()).collect();
            engine.write_blocks(&engine.head(disk), first, SharedSlice::copy_of(&data)).unwrap();
        };
        write(1, 0, 1..2);
        quiet(&engine);
        match through {
            true => write(other, 100, 10..50),
            false => write(other, 100, 10..12),
        }
        quiet(&engine);
        assert_eq!(engine.shared_writes(), 0, "through {through}");
        // The stored block is overwritten in place after it was compared.
        write(other, 200, 1..2);
        let head = engine.head(other);
        let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
        assert_eq!(equal.runs.len(), 1);
        write(1, 0, 5..6);
        engine.settle(&engine.head(1)).unwrap();
        assert!(!engine.map_equal_runs(&head, &equal).unwrap());
        drop((equal, head));
        quiet(&engine);
        let read = |disk: u64, block: u64| {
            let head = engine.head(disk);
            engine.read_blocks("d", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap()
        };
        assert!(read(1, 0)[..] == colliding(5)[..] && read(other, 200)[..] == colliding(1)[..]);
        assert!(read(other, 100)[..] == colliding(10)[..] && read(other, 101)[..] == colliding(11)[..]);
        is_whole(&engine);
        drop(disk);
    }
}

/// The block is freed, and gets the same content again.
#[test]
fn a_block_that_is_freed_meanwhile_is_not_mapped() {
    let (_disk, engine, other) = stored(10);
    put(&engine, other, 100, 4);
    let head = engine.head(other);
    let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
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

/// One part of a long write has the content of a block that another part overwrites in place.
#[test]
fn a_block_that_the_same_write_overwrites_is_not_mapped() {
    for through in [false, true] {
        let (_disk, engine, _other) = stored(40);
        fill(&engine, 1, 4, 60, through).unwrap();
        has_values(&engine, 1, 4, 60);
        has_values(&engine, 1, 0, 4);
        quiet(&engine);
        has_values(&engine, 1, 4, 60);
        is_whole(&engine);
    }
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

/// Such a write may have no claim on a free block, because it would overwrite the block that is mapped now in place.
#[test]
fn data_over_which_another_write_is_buffered_is_written() {
    let (_disk, engine, other) = stored(10);
    let head = engine.head(other);
    put(&engine, other, 100, 4);
    let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
    assert_eq!(equal.runs.len(), 1);
    let taken = take(&engine, other, "s");
    put(&engine, other, 100, 5);
    assert!(!engine.map_equal_runs(&head, &equal).unwrap());
    drop(equal);
    quiet(&engine);
    assert_eq!([holds(&engine, taken, 100).unwrap(), holds(&engine, other, 100).unwrap()], [4, 5]);
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
    let head = engine.head(other);
    assert!(engine.equal_runs_of_batch(&head, &oldest(&head)).runs.is_empty());
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
    let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
    put(&engine, other, 103, 99);
    assert!(!engine.map_equal_runs(&head, &equal).unwrap());
    drop(equal);
    quiet(&engine);
    assert_eq!([103, 104].map(|block| holds(&engine, other, block).unwrap()), [99, 5]);
    is_whole(&engine);
}

/// Maps stored blocks for writes, also when leaves are split, and when blocks of a snapshot are replaced.
fn changes_no_more_pages_than_admitted(engine: &Engine, other: u64, write: impl Fn(u64, u64)) {
    (0..600).for_each(|block| put(engine, other, 2 * block, 201 + (block % 40) as u8));
    quiet(engine);
    let head = engine.head(other);
    let mut most = 0;
    for round in 0..150 {
        if round % 30 == 0 {
            take(engine, other, &format!("s{round}"));
        }
        quiet(engine);
        write(round, (round * 37) % 1200);
        let equal = engine.equal_runs_of_batch(&head, &oldest(&head));
        assert!(!equal.runs.is_empty());
        let before = engine.meta.lock().dirty_pages();
        let cost = equal.runs.iter().map(|run| engine.meta.lock().cost(&run.operation(other)).unwrap().pages);
        let cost: u64 = cost.sum();
        assert!(engine.map_equal_runs(&head, &equal).unwrap());
        let dirty = engine.meta.lock().dirty_pages() - before;
        assert!(dirty <= cost, "{dirty} pages instead of {cost}");
        most = most.max(dirty);
    }
    assert!(most > 3, "{most}");
    is_whole(engine);
}

#[test]
fn mapping_changes_no_more_pages_than_it_was_admitted_for() {
    let (_disk, engine, other) = stored(200);
    changes_no_more_pages_than_admitted(&engine, other, |round, at| {
        put(&engine, other, at, 1 + round as u8);
        let head = engine.head(other);
        assert_eq!(engine.equal_runs_of_batch(&head, &oldest(&head)).runs.len(), 1);
    });
}

#[test]
fn a_hint_that_is_wrong_is_replaced_by_a_right_one() {
    let (_disk, engine, other) = stored(1);
    put(&engine, 1, 0, 77);
    quiet(&engine);
    // The hint for the value 1 is wrong now, and is replaced when this block is written.
    put(&engine, other, 100, 1);
    quiet(&engine);
    assert_eq!(engine.shared_writes(), 0);
    put(&engine, 1, 50, 1);
    quiet(&engine);
    assert_eq!((engine.shared_writes(), place(&engine, 1, 50)), (1, place(&engine, other, 100)));
}
