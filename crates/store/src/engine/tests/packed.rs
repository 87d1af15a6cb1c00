//! Packs: the content of disks, snapshots and clones stays the same whatever is packed, overwritten, deleted or cut off
//! in between, and the space of a pack is free when nothing maps it any more.

mod damaged;
mod fragmented;
pub(super) mod histories;
mod written;

use super::between::before_next;
use super::*;
use crate::engine::log::VERSION_PACKS;
use crate::pack::{Codec, Packer};
use crate::sync::atomic::{AtomicU64, Ordering};
use backend::simulated::{Request, SimulatedOptions};
use std::time::Duration;

pub(super) fn packing(codec: Codec) -> PackPass {
    PackPass::new(Packer::new(codec).unwrap(), 1 << 20, Vec::new())
}

pub(super) fn packer() -> PackPass {
    packing(Codec::Lz4)
}

/// Packs a range of an object. Returns how many blocks were packed, and into how many.
pub(super) fn pack(engine: &Engine, object: u64, range: std::ops::Range<u64>) -> (u64, u64) {
    let (mut packed, mut stored, mut at) = (0, 0, range.start);
    let mut packer = packer();
    while at < range.end {
        let step = engine.pack_step(object, at..range.end, &mut packer).unwrap();
        (packed, stored, at) = (packed + step.packed, stored + step.stored, step.next);
    }
    (packed, stored)
}

/// Makes everything that was written durable, and the freed blocks reusable.
pub(super) fn quiet(engine: &Engine) {
    for disk in engine.with_catalog(|catalog| catalog.disks().map(|disk| disk.id).collect::<Vec<u64>>()) {
        engine.settle(&engine.head(disk)).unwrap();
    }
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
}

/// A store with one disk, of which the first blocks are written.
fn filled(blocks: u64) -> (SimulatedDisk, Arc<Engine>) {
    let (disk, engine) = made();
    (0..blocks).for_each(|block| write(&engine, block, block as u8));
    quiet(&engine);
    (disk, engine)
}

/// Blocks of which half can be compressed. The last byte of a block is its value.
pub(super) fn mixed(values: impl Iterator<Item = u8>) -> SharedSlice {
    // Compressed, 32 of them and their index fill 17 blocks, so a pack ends where its window does.
    const RANDOM: usize = 2124;
    let mut bytes = Vec::new();
    for value in values {
        bytes.extend(Random(u64::from(value)).bytes(RANDOM));
        bytes.extend([value; BLOCK_SIZE - RANDOM]);
    }
    let length = bytes.len();
    SharedSlice::new(Arc::new(Buffer::copy_of(&bytes)), 0..length)
}

/// The value of a block of an object, all bytes of which have the value, or which is [`mixed`].
pub(super) fn holds(engine: &Engine, object: u64, logical: u64) -> Result<u8> {
    let snapshot = engine.with_catalog(|catalog| catalog.get(object).unwrap().is_snapshot());
    let plan = |range| match snapshot {
        true => engine.plan_snapshot(object, range),
        false => engine.plan_head(&engine.head(object), range),
    };
    let block = engine.read_blocks("object", logical..logical + 1, &plan)?;
    let value = block[BLOCK_SIZE - 1];
    assert!(block.iter().all(|byte| *byte == value) || block[..] == mixed(std::iter::once(value))[..]);
    Ok(value)
}

/// The stored run of the extent of a block, and whether it is a pack.
pub(super) fn place(engine: &Engine, object: u64, logical: u64) -> (Run, bool) {
    let mut meta = engine.meta.lock();
    let root = meta.catalog.get(object).unwrap().root.unwrap();
    let mut extents = Vec::new();
    crate::tree::lookup(&mut meta.nodes(&mut Default::default()), root, logical..logical + 1, &mut extents).unwrap();
    let stored = extents[0].stored();
    (Run { start: stored.physical, blocks: stored.blocks }, extents[0].packed.is_some())
}

pub(super) fn references(engine: &Engine, block: u64) -> u32 {
    engine.meta.lock().entry(block).unwrap().references
}

#[test]
fn packed_blocks_take_less_space_and_are_read_as_before() {
    for codec in [Codec::Lz4, Codec::Zstd(3)] {
        let (disk, engine) = filled(100);
        let before = engine.counts().data.used;
        let mut packer = packing(codec);
        let mut at = 0;
        while at < BLOCKS {
            at = engine.pack_step(1, at..BLOCKS, &mut packer).unwrap().next;
        }
        quiet(&engine);
        assert!(engine.counts().data.used < before / 10, "{} of {before}", engine.counts().data.used);
        (0..100).for_each(|block| assert_eq!(value(&engine, block).unwrap(), block as u8));
        is_whole(&engine);
        // A second pass finds nothing to do.
        assert_eq!(pack(&engine, 1, 0..BLOCKS), (0, 0));
        engine.close().unwrap();
        let engine = open(&disk).unwrap();
        (0..100).for_each(|block| assert_eq!(value(&engine, block).unwrap(), block as u8));
        is_whole(&engine);
    }
}

#[test]
fn a_pack_is_found_by_replay_after_a_kill() {
    let (disk, engine) = filled(64);
    assert_eq!(pack(&engine, 1, 0..64), (64, 2));
    write(&engine, 5, 200);
    engine.flush().unwrap();
    // The engine is dropped without closing, as by a kill.
    drop(engine);
    let engine = open(&disk).unwrap();
    assert!(place(&engine, 1, 40).1);
    (0..64).for_each(|block| assert_eq!(value(&engine, block).unwrap(), if block == 5 { 200 } else { block as u8 }));
    is_whole(&engine);
}

/// Calls `cut_off` with seeds, and for each with every number of operations before the power cut, until it returns
/// true.
pub(super) fn cut_at_each_operation(cut_off: fn(u64, u64) -> bool) {
    for seed in 0..3 {
        for cut in 0.. {
            if cut_off(seed, cut) {
                break;
            }
        }
    }
}

#[test]
fn a_power_cut_at_any_operation_of_packing_loses_nothing() {
    cut_at_each_operation(cut_off);
}

/// Packs blocks, flushes, and cuts the power after `cut` operations of the medium. True if everything was done before.
fn cut_off(seed: u64, cut: u64) -> bool {
    let (disk, engine) = made_on(SimulatedDisk::new(seed, SimulatedOptions::default()));
    (0..40).for_each(|block| write(&engine, block, block as u8));
    quiet(&engine);
    disk.cut_after(disk.operations() + cut);
    let done = engine.pack_step(1, 0..40, &mut packer()).and_then(|_| engine.commit_changes()).is_ok();
    let ended = !disk.is_off();
    let engine = open(&disk.crash()).unwrap();
    (0..40).for_each(|block| assert_eq!(value(&engine, block).unwrap(), block as u8, "cut {cut}"));
    is_whole(&engine);
    assert!(!ended || done && place(&engine, 1, 0).1);
    ended
}

#[test]
fn an_overwritten_block_of_a_pack_gets_a_place_of_its_own() {
    let (_disk, engine) = filled(32);
    assert_eq!(pack(&engine, 1, 0..32), (32, 1));
    quiet(&engine);
    let (run, packed) = place(&engine, 1, 0);
    assert!(packed && references(&engine, run.start) == 1);
    write(&engine, 10, 200);
    quiet(&engine);
    let (own, packed) = place(&engine, 1, 10);
    assert!(!packed && own != run);
    // Two entries map the rest of the pack.
    assert_eq!(references(&engine, run.start), 2);
    (0..32).for_each(|block| assert_eq!(value(&engine, block).unwrap(), if block == 10 { 200 } else { block as u8 }));
    // The plain block is overwritten in place from now on.
    write(&engine, 10, 201);
    quiet(&engine);
    assert_eq!(place(&engine, 1, 10).0, own);
    is_whole(&engine);
    // The pack is free when its last block is gone.
    engine.discard_blocks(&engine.head(1), 0..10).unwrap();
    quiet(&engine);
    assert_eq!(references(&engine, run.start), 1);
    engine.discard_blocks(&engine.head(1), 11..32).unwrap();
    quiet(&engine);
    assert_eq!((references(&engine, run.start), engine.counts().data.used), (0, 1));
    is_whole(&engine);
}

#[test]
fn shared_blocks_are_packed_for_all_that_share_them() {
    let (disk, engine) = filled(64);
    let snapshot = take(&engine, 1, "s");
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", BLOCKS)]).unwrap()[0];
    // The disk gets a leaf of its own, which refers to the same blocks.
    write(&engine, 3, 200);
    quiet(&engine);
    assert_eq!(pack(&engine, clone, 0..64), (64, 2));
    quiet(&engine);
    let expected = |object: u64, block: u64| if object == 1 && block == 3 { 200 } else { block as u8 };
    for object in [1, snapshot, clone] {
        (0..64).for_each(|block| assert_eq!(holds(&engine, object, block).unwrap(), expected(object, block)));
    }
    // Two packs, and the block that the disk has overwritten.
    assert_eq!(engine.counts().data.used, 3);
    is_whole(&engine);
    drop(engine);
    let engine = open(&disk).unwrap();
    // The snapshot is deleted with its disk.
    engine.detach(clone).unwrap();
    engine.delete_disk(1, &[]).unwrap();
    while engine.drop_all_trash().unwrap() {}
    quiet(&engine);
    (0..64).for_each(|block| assert_eq!(holds(&engine, clone, block).unwrap(), block as u8));
    assert_eq!(engine.counts().data.used, 2);
    is_whole(&engine);
}

#[test]
fn a_block_that_a_thick_disk_maps_is_not_packed() {
    let (_disk, engine) = made();
    let thick = add_disk(&engine, "thick", 64, Provisioning::ZeroedThick);
    (0..64).for_each(|block| engine.write_blocks(&engine.head(thick), block, slice(block as u8, 1)).unwrap());
    quiet(&engine);
    let refused = engine.pack_step(thick, 0..64, &mut packer()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let snapshot = take(&engine, thick, "s");
    quiet(&engine);
    assert_eq!(pack(&engine, snapshot, 0..64), (0, 0));
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", 64)]).unwrap()[0];
    assert_eq!(pack(&engine, clone, 0..64), (0, 0));
}

/// Otherwise each step would look at the trees of all disks under the metadata lock.
#[test]
fn a_step_looks_only_at_trees_that_may_share_the_blocks() {
    let (_disk, engine) = filled(64);
    let step = |range: std::ops::Range<u64>| {
        let before = engine.meta.statistics().hits;
        assert_eq!(engine.pack_step(1, range, &mut packer()).unwrap().packed, 32);
        engine.meta.statistics().hits - before
    };
    let alone = step(0..32);
    for number in 0..100 {
        let provisioning = if number == 0 { Provisioning::ZeroedThick } else { Provisioning::Thin };
        let other = add_disk(&engine, &format!("other-{number}"), 64, provisioning);
        engine.write_blocks(&engine.head(other), 0, slice(1, 1)).unwrap();
    }
    quiet(&engine);
    let beside_others = step(32..64);
    // Each of three plans would look up several pages of each other disk.
    assert!(beside_others < alone + 300, "{beside_others} lookups of pages instead of {alone}");
}

#[test]
fn content_that_is_not_settled_is_not_packed() {
    let (_disk, engine) = filled(32);
    // Journalled payload that is not written to its block.
    write(&engine, 1, 100);
    engine.flush().unwrap();
    assert!(!engine.meta.lock().logged.is_empty());
    assert_eq!(pack(&engine, 1, 0..32).0, 31);
    (0..32).for_each(|block| assert_eq!(value(&engine, block).unwrap(), if block == 1 { 100 } else { block as u8 }));
    quiet(&engine);
    is_whole(&engine);
}

#[test]
fn a_block_with_a_buffered_write_is_not_packed() {
    let (_disk, engine) = filled(64);
    write(&engine, 7, 200);
    // The write may have been acknowledged without a claim on a free block.
    assert_eq!(pack(&engine, 1, 0..64), (32, 1));
    assert!(!place(&engine, 1, 7).1 && place(&engine, 1, 40).1);
    quiet(&engine);
    assert_eq!(value(&engine, 7).unwrap(), 200);
    is_whole(&engine);
}

/// A step locks the buffers of all disks that it changes. Here one of these disks is opened and written while the step
/// waits for the buffer of another.
#[test]
fn a_block_with_a_write_to_a_disk_opened_during_the_step_is_not_packed() {
    let (disk, engine) = filled(64);
    let snapshot = take(&engine, 1, "s");
    let clone = engine.clone_snapshot(snapshot, &[new_disk("clone", BLOCKS)]).unwrap()[0];
    // The clone gets a leaf of its own, which refers to the same blocks. The first step also writes the superblock.
    engine.write_blocks(&engine.head(clone), 40, slice(200, 1)).unwrap();
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 32..64).0, 32);
    quiet(&engine);
    engine.close().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    let head = engine.head(1);
    let (written, wait) = std::sync::mpsc::channel();
    before_next(&disk, Request::Write, move || written.send(()).unwrap());
    std::thread::scope(|scope| {
        let buffer = head.lock();
        let step = scope.spawn(|| engine.pack_step(1, 0..32, &mut packer()).unwrap());
        wait.recv_timeout(Duration::from_secs(60)).unwrap();
        // The pack is being written. The step then waits for the buffer of the first disk.
        std::thread::sleep(Duration::from_millis(100));
        engine.write_blocks(&engine.head(clone), 7, slice(201, 1)).unwrap();
        drop(buffer);
        assert_eq!(step.join().unwrap().packed, 0);
    });
    assert!(!place(&engine, clone, 7).1);
    quiet(&engine);
    assert_eq!((holds(&engine, clone, 7).unwrap(), value(&engine, 7).unwrap()), (201, 7));
    is_whole(&engine);
}

/// Otherwise the leaves of most trees would be read under the lock, one after another.
#[test]
fn the_leaves_of_many_trees_are_read_without_the_metadata_lock() {
    let (_disk, engine) = filled(32);
    for number in 0..400 {
        take(&engine, 1, &format!("s{number}"));
        // The disk gets a leaf of its own.
        write(&engine, number % 2, 1 + (number % 100) as u8);
        engine.settle(&engine.head(1)).unwrap();
    }
    quiet(&engine);
    engine.meta.lock().pages.drop_clean();
    let before = engine.meta.statistics();
    assert_eq!(pack(&engine, 1, 0..32).0, 32);
    let now = engine.meta.statistics();
    let (read, locked) = (now.misses - before.misses, now.locked - before.locked);
    assert!(read > 400 && locked < 20, "{locked} of {read} pages were read under the lock");
    is_whole(&engine);
}

#[test]
fn a_damaged_block_is_not_packed() {
    let (disk, engine) = filled(32);
    let (_, offset) = engine.files.locate(own_block(&engine, 1, 5)).unwrap();
    disk.flip_bit("data.0000", offset + 100, 1).unwrap();
    assert_eq!(pack(&engine, 1, 0..32), (0, 0));
    assert_eq!(value(&engine, 5).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(value(&engine, 6).unwrap(), 6);
}

#[test]
fn a_write_during_packing_is_kept() {
    for request in [Request::Read, Request::Write] {
        for flushed in [false, true] {
            let (disk, engine) = filled(64);
            // The first step also writes the superblock.
            assert_eq!(pack(&engine, 1, 32..64).0, 32);
            let other = Arc::clone(&engine);
            before_next(&disk, request, move || {
                write(&other, 7, 200);
                if flushed {
                    other.flush().unwrap();
                } else {
                    other.settle(&other.head(1)).unwrap();
                }
            });
            pack(&engine, 1, 0..32);
            let is_kept = |engine: &Engine| {
                for block in 0..32 {
                    assert_eq!(value(engine, block).unwrap(), if block == 7 { 200 } else { block as u8 });
                }
            };
            is_kept(&engine);
            quiet(&engine);
            is_kept(&engine);
            is_whole(&engine);
            drop(engine);
            is_kept(&open(&disk).unwrap());
        }
    }
}

#[test]
fn the_superblock_has_the_version_of_packs_from_the_first_pack_on() {
    let (disk, engine) = made();
    let version = |disk: &SimulatedDisk| {
        let file = disk.directory().open("superblock", backend::IoMode::Buffered).unwrap();
        Superblock::read(&*file).unwrap().0.version
    };
    assert_eq!(version(&disk), FORMAT_VERSION);
    // Nothing to pack.
    pack(&engine, 1, 0..BLOCKS);
    quiet(&engine);
    assert_eq!(version(&disk), FORMAT_VERSION);
    (0..32).for_each(|block| write(&engine, block, 1));
    quiet(&engine);
    pack(&engine, 1, 0..BLOCKS);
    assert_eq!(version(&disk), VERSION_PACKS);
    quiet(&engine);
    engine.close().unwrap();
    assert_eq!(version(&disk), VERSION_PACKS);
    drop(open(&disk).unwrap());
    assert_eq!(version(&disk), VERSION_PACKS);
}

/// Writes blocks that cannot be compressed. Returns their content.
fn write_noise(engine: &Engine, object: u64, blocks: std::ops::Range<u64>, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut buffer = Buffer::zeroed((blocks.end - blocks.start) as usize);
    let bytes = random.bytes(buffer.len());
    buffer.copy_from_slice(&bytes);
    let length = buffer.len();
    let data = SharedSlice::new(Arc::new(buffer), 0..length);
    engine.write_blocks(&engine.head(object), blocks.start, data).unwrap();
    bytes
}

#[test]
fn data_that_cannot_be_compressed_leaves_the_version() {
    let (disk, engine) = made();
    let content = write_noise(&engine, 1, 0..64, 5);
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 0..BLOCKS), (0, 0));
    quiet(&engine);
    let file = disk.directory().open("superblock", backend::IoMode::Buffered).unwrap();
    assert_eq!(Superblock::read(&*file).unwrap().0.version, FORMAT_VERSION);
    let head = engine.head(1);
    let read = engine.read_blocks("vm", 0..64, &|range| engine.plan_head(&head, range)).unwrap();
    assert!(read[..] == content[..]);
    is_whole(&engine);
}

/// One copy of the superblock may be lost before the next checkpoint.
#[test]
fn both_copies_of_the_superblock_have_the_version_of_packs() {
    let (disk, engine) = filled(32);
    assert_eq!(pack(&engine, 1, 0..32).0, 32);
    let file = disk.directory().open("superblock", backend::IoMode::Buffered).unwrap();
    for copy in 0..2 {
        let mut bytes = Buffer::zeroed(1);
        file.read_at(&mut bytes, copy * BLOCK_SIZE as u64).unwrap();
        assert_eq!(bytes[8..12], VERSION_PACKS.to_le_bytes(), "copy {copy}");
    }
}

/// Counts the reads of the medium from now on.
pub(super) fn count_reads(disk: &SimulatedDisk) -> Arc<AtomicU64> {
    let reads = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&reads);
    disk.set_pace(Arc::new(move |request| {
        if request == Request::Read {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    }));
    reads
}

#[test]
fn data_that_is_not_worth_packing_is_read_by_one_pass_only() {
    let (disk, engine) = made();
    write_noise(&engine, 1, 0..128, 5);
    quiet(&engine);
    let reads = count_reads(&disk);
    let pass = |packer: &mut PackPass| {
        let before = reads.load(Ordering::SeqCst);
        let mut at = 0;
        while at < 128 {
            at = engine.pack_step(1, at..128, packer).unwrap().next;
        }
        reads.load(Ordering::SeqCst) - before
    };
    assert_eq!(pass(&mut packer()), 4);
    assert_eq!(pass(&mut packer()), 0);
    // Another method may be worth it, and so may other content.
    assert_eq!(pass(&mut packing(Codec::Zstd(3))), 4);
    write_noise(&engine, 1, 40..41, 6);
    quiet(&engine);
    assert!((1..=2).contains(&pass(&mut packer())));
    // What can be compressed now is found.
    (64..96).for_each(|block| write(&engine, block, 7));
    quiet(&engine);
    pass(&mut packer());
    assert!(place(&engine, 1, 64).1 && !place(&engine, 1, 0).1);
    is_whole(&engine);
}

#[test]
fn a_pack_is_read_once_although_a_read_has_many_parts_in_it() {
    let (disk, engine) = filled(32);
    assert_eq!(pack(&engine, 1, 0..32).0, 32);
    (0..32).step_by(2).for_each(|block| write(&engine, block, 200));
    let reads = count_reads(&disk);
    let head = engine.head(1);
    let read = engine.read_blocks("vm", 0..32, &|range| engine.plan_head(&head, range)).unwrap();
    for (number, block) in read.chunks_exact(BLOCK_SIZE).enumerate() {
        let expected = if number % 2 == 0 { 200 } else { number as u8 };
        assert!(block.iter().all(|byte| *byte == expected), "block {number}");
    }
    assert_eq!(reads.load(Ordering::SeqCst), 1);
}

#[test]
fn full_leaves_are_split_or_get_wide_packs() {
    for shared in [false, true] {
        let (_disk, engine) = made();
        let big = add_disk(&engine, "big", 1 << 20, Provisioning::Thin);
        let blocks = 300 * 256;
        let bulk = BulkWriter::new(&engine, big);
        let content = |at: u64| -> Vec<u8> { (at..at + 256).flat_map(|block| vec![block as u8; BLOCK_SIZE]).collect() };
        (0..300).for_each(|extent| bulk.write(extent * 256, &content(extent * 256)).unwrap());
        quiet(&engine);
        if shared {
            take(&engine, big, "s");
            quiet(&engine);
        }
        let (packed, stored) = pack(&engine, big, 0..blocks);
        assert!(packed == blocks && stored <= blocks / 16, "{packed} {stored}");
        quiet(&engine);
        for block in (0..blocks).step_by(97) {
            assert_eq!(holds(&engine, big, block).unwrap(), block as u8);
        }
        is_whole(&engine);
    }
}

#[test]
fn the_accounts_show_the_stored_blocks() {
    let (_disk, engine) = filled(64);
    let space = |engine: &Engine| engine.accounts(&[1], &|| true).unwrap().space_of(1).unwrap();
    let before = space(&engine);
    assert_eq!((before.mapped, before.packed, before.stored), (64, 0, 64));
    pack(&engine, 1, 0..64);
    let after = space(&engine);
    assert_eq!((after.mapped, after.packed, after.stored, after.exclusive), (64, 64, 2, 2));
    assert_eq!(after.packs, 2);
    write(&engine, 3, 100);
    write(&engine, 9, 100);
    let after = space(&engine);
    assert_eq!((after.mapped, after.packed, after.packs, after.stored, after.exclusive), (64, 62, 2, 4, 4));
    // The overwritten blocks get a pack of their own, between the parts of the first one.
    quiet(&engine);
    assert_eq!(pack(&engine, 1, 0..64), (2, 1));
    let after = space(&engine);
    assert_eq!((after.mapped, after.packed, after.packs, after.stored, after.exclusive), (64, 64, 3, 3, 3));
}
