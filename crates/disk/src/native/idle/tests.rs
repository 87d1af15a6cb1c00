//! What passes over disks with a setting of compression process, and when.

#![allow(clippy::unwrap_used)]

use crate::testbed::options;
use crate::{
    CheckOptions, Compression, Datastore, DefaultsChange, DiskFormat, IdlePass, ImageKind, InitOptions, NewDisk,
    NoProgress, Point, Progress, Provisioning, QueueChoice, ReduceAt, SettingsChange, SnapshotOptions,
};
use backend::{BLOCK_SIZE, SharedSlice};
use error::ErrorKind;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const BLOCKS: usize = MIB / BLOCK_SIZE;
const NOW: Duration = Duration::ZERO;
const LATER: Duration = Duration::from_secs(3600);

struct Bed {
    /// Removed with this value.
    folder: tempfile::TempDir,
    path: PathBuf,
    datastore: Arc<Datastore>,
}

fn open(path: &Path) -> Arc<Datastore> {
    Datastore::open(path, options(QueueChoice::Threads)).unwrap()
}

fn set(compression: Compression) -> SettingsChange {
    let compress_at = (!compression.is_off()).then_some(ReduceAt::Idle);
    SettingsChange { compression: Some(compression), compress_at, ..SettingsChange::default() }
}

fn set_at(compression: Compression, at: ReduceAt) -> SettingsChange {
    SettingsChange { compression: Some(compression), compress_at: Some(at), ..SettingsChange::default() }
}

/// A datastore with the disk `a` of 8 MiB.
fn bed(compression: Compression) -> Bed {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let datastore = open(&path);
    let new = NewDisk::native(8 * MIB as u64, Provisioning::Thin);
    datastore.create_disk_with("a", &new, &set(compression), &NoProgress).unwrap();
    Bed { folder, path, datastore }
}

/// Content of which half can be compressed.
fn content(seed: u8, length: usize) -> Vec<u8> {
    let byte = |at: usize| match at % BLOCK_SIZE {
        inside if inside < BLOCK_SIZE / 2 => {
            let mixed = (at as u64 + u64::from(seed)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 32) as u8
        }
        _ => seed,
    };
    (0..length).map(byte).collect()
}

impl Bed {
    /// Writes so little at a time that it is buffered.
    fn write(&self, disk: &str, mib: usize, seed: u8, length: usize) {
        let device = self.datastore.device(disk, false).unwrap();
        for (number, part) in content(seed, length).chunks(BLOCK_SIZE).enumerate() {
            let offset = (mib * MIB + number * BLOCK_SIZE) as u64;
            device.write(offset, SharedSlice::copy_of(part), false).unwrap();
        }
    }

    #[track_caller]
    fn reads(&self, export: &str, mib: usize, seed: u8, length: usize) {
        let device = self.datastore.device(export, true).unwrap();
        assert!(device.read((mib * MIB) as u64, length).unwrap() == content(seed, length), "{export}");
    }

    fn next(&self, after: Duration) -> Option<IdlePass> {
        self.datastore.next_idle(after).unwrap()
    }

    /// Runs passes without rests. Returns the blocks that were compressed.
    fn pass(&self) -> usize {
        let Some(disk) = self.next(NOW) else { return 0 };
        let reclaimed = self.datastore.pass_idle(&disk, NOW, &NoProgress).unwrap();
        reclaimed.moved as usize / BLOCK_SIZE
    }

    fn is_clean(&self) {
        let report = self.datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert_eq!(report.findings, []);
    }
}

#[test]
fn each_part_is_compressed_once_after_it_was_written() {
    let bed = bed(Compression::Lz4);
    bed.write("a", 1, 1, 2 * MIB);
    assert_eq!(bed.next(LATER), None, "the disk was just made");
    assert_eq!(bed.pass(), 2 * BLOCKS);
    assert_eq!(bed.next(NOW), None, "everything was processed");
    bed.write("a", 2, 2, MIB / 2);
    assert_eq!(bed.next(LATER), None, "the part was just written");
    let state = bed.datastore.disk("a").unwrap().compression.unwrap();
    assert_eq!((state.pending, state.compressed), (MIB as u64, 2 * MIB as u64));
    assert!(state.ended.is_some() && state.saved > MIB as u64 / 2);
    assert_eq!(bed.pass(), BLOCKS / 2);
    let status = bed.datastore.status().unwrap().compression;
    assert_eq!((status.disks, status.pending, status.running), (1, 0, None));
    assert_eq!(status.compressed, 5 * MIB as u64 / 2);
    bed.reads("a", 1, 1, MIB);
    bed.reads("a", 2, 2, MIB / 2);
    bed.is_clean();
}

#[test]
fn every_kind_of_write_makes_its_part_count_as_written() {
    let bed = bed(Compression::Lz4);
    bed.pass();
    let device = bed.datastore.device("a", false).unwrap();
    let block = BLOCK_SIZE as u64;
    let pending = || bed.datastore.disk("a").unwrap().compression.unwrap().pending / MIB as u64;
    assert_eq!(pending(), 0);
    // Small and large writes, a part of a block, zeros and a discard.
    device.write(0, SharedSlice::copy_of(&content(1, BLOCK_SIZE)), false).unwrap();
    assert_eq!(pending(), 1);
    device.write(MIB as u64, SharedSlice::copy_of(&content(2, MIB)), false).unwrap();
    assert_eq!(pending(), 2);
    device.write(2 * MIB as u64 + 100, SharedSlice::copy_of(&[7; 50]), false).unwrap();
    assert_eq!(pending(), 3);
    device.write_zeroes(3 * MIB as u64, block, true, false).unwrap();
    assert_eq!(pending(), 4);
    device.discard(4 * MIB as u64, 4 * MIB as u64, false).unwrap();
    assert_eq!(pending(), 8);
}

#[test]
fn snapshots_and_what_a_revert_brings_back_are_compressed_too() {
    let bed = bed(Compression::Zstd(3));
    bed.write("a", 0, 1, MIB);
    bed.datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    bed.write("a", 0, 2, MIB);
    assert_eq!(bed.pass(), 2 * BLOCKS);
    bed.reads("a@s", 0, 1, MIB);
    bed.reads("a", 0, 2, MIB);
    bed.datastore.revert("a", "s").unwrap();
    assert_eq!(bed.next(LATER), None);
    assert_eq!((bed.next(NOW).map(|pass| pass.title()), bed.pass()), (Some("a".into()), 0));
    bed.write("a", 3, 3, MIB);
    assert_eq!(bed.pass(), BLOCKS);
    bed.datastore.delete_snapshot("a", "s", None, &NoProgress).unwrap();
    bed.reads("a", 0, 1, MIB);
    bed.is_clean();
}

#[test]
fn a_write_while_its_part_is_processed_makes_it_count_as_written() {
    let bed = bed(Compression::Lz4);
    bed.write("a", 0, 1, 2 * MIB);
    let disk = bed.next(NOW).unwrap();
    let written = Cell::new(false);
    let write_once = |_: &str| {
        if !written.replace(true) {
            bed.write("a", 0, 2, BLOCK_SIZE);
        }
        true
    };
    bed.datastore.native.pass_idle(&disk, NOW, write_once, &NoProgress).unwrap();
    assert_eq!(bed.datastore.disk("a").unwrap().compression.unwrap().pending, MIB as u64);
    bed.reads("a", 0, 2, BLOCK_SIZE);
}

#[test]
fn a_disk_that_has_grown_is_examined_from_the_beginning() {
    let bed = bed(Compression::Lz4);
    bed.pass();
    bed.datastore.resize_disk("a", 16 * MIB as u64, false).unwrap();
    assert_eq!(bed.next(LATER), None);
    assert_eq!(bed.datastore.disk("a").unwrap().compression.unwrap().pending, 16 * MIB as u64);
    bed.write("a", 12, 1, MIB);
    assert_eq!((bed.pass(), bed.next(NOW)), (BLOCKS, None));
}

/// Cancels a pass when it has processed more than 2 MiB.
struct Impatient(AtomicU64);

impl Progress for Impatient {
    fn update(&self, done: u64, _total: u64) {
        self.0.store(done, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 2 * MIB as u64
    }
}

#[test]
fn an_interrupted_pass_is_continued() {
    let bed = bed(Compression::Lz4);
    bed.write("a", 0, 1, 6 * MIB);
    let disk = bed.next(NOW).unwrap();
    let stopped = bed.datastore.pass_idle(&disk, NOW, &Impatient(AtomicU64::new(0))).unwrap_err();
    assert_eq!(stopped.kind(), ErrorKind::Interrupted);
    let state = bed.datastore.disk("a").unwrap().compression.unwrap();
    // A part that was processed in part is processed again, and what is compressed there is skipped.
    let begun = state.compressed - 2 * MIB as u64;
    assert!(state.pending == 6 * MIB as u64 && (24..=32).contains(&(begun / BLOCK_SIZE as u64)), "{state:?}");
    assert_eq!(bed.pass() * BLOCK_SIZE, 6 * MIB - state.compressed as usize);
    bed.reads("a", 0, 1, 6 * MIB);
}

#[test]
fn a_pass_ends_for_other_operations_and_when_the_setting_changes() {
    let bed = bed(Compression::Lz4);
    bed.write("a", 0, 1, MIB);
    let disk = bed.next(NOW).unwrap();
    {
        let _alone = bed.datastore.uses.alone("a", "migrated").unwrap();
        assert_eq!(bed.next(NOW), None);
        assert_eq!(bed.datastore.pass_idle(&disk, NOW, &NoProgress).unwrap().moved, 0);
    }
    bed.datastore.edit_disk("a", &set(Compression::Zstd(1))).unwrap();
    assert_eq!(bed.datastore.pass_idle(&disk, NOW, &NoProgress).unwrap().moved, 0);
    bed.datastore.edit_disk("a", &set(Compression::Off)).unwrap();
    assert_eq!((bed.next(NOW), bed.datastore.disk("a").unwrap().compression), (None, None));
    // A pass does not prevent other operations, and ends when the disk is deleted.
    bed.datastore.edit_disk("a", &set(Compression::Lz4)).unwrap();
    let disk = bed.next(NOW).unwrap();
    bed.datastore.delete_disk("a", false).unwrap();
    assert_eq!(bed.datastore.pass_idle(&disk, NOW, &NoProgress).unwrap().moved, 0);
    assert_eq!(bed.next(NOW), None);
}

#[test]
fn a_disk_rests_after_a_pass() {
    let bed = bed(Compression::Lz4);
    let (after, begun) = (Duration::from_millis(300), Instant::now());
    bed.pass();
    bed.write("a", 0, 1, MIB);
    std::thread::sleep(after + Duration::from_millis(50));
    let next = bed.next(after);
    assert!(next.is_none() || begun.elapsed() > 6 * after);
    while bed.next(after).is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(begun.elapsed() > 6 * after);
}

#[test]
fn a_restart_begins_again_and_skips_what_is_compressed() {
    let before = bed(Compression::Lz4);
    before.write("a", 0, 1, 2 * MIB);
    assert_eq!(before.pass(), 2 * BLOCKS);
    before.write("a", 5, 2, MIB);
    before.datastore.close().unwrap();
    let Bed { folder, path, datastore } = before;
    drop(datastore);
    let bed = Bed { datastore: open(&path), folder, path };
    assert_eq!(bed.pass(), BLOCKS, "what was written after the last pass");
    assert_eq!(bed.pass(), 0);
    bed.reads("a", 0, 1, 2 * MIB);
    bed.is_clean();
}

#[test]
fn only_thin_native_disks_get_the_setting() {
    let bed = bed(Compression::Off);
    let (datastore, size) = (&bed.datastore, 8 * MIB as u64);
    let thin = NewDisk::native(size, Provisioning::Thin);
    let thick = NewDisk::native(size, Provisioning::ZeroedThick);
    let image = NewDisk { format: DiskFormat::Image(ImageKind::SeSparse), ..thin };
    let time = SettingsChange { compress_at: Some(ReduceAt::Idle), ..SettingsChange::default() };
    for (new, why) in [(&thick, "never need new space"), (&image, "not a native one")] {
        for change in [&set(Compression::Lz4), &time] {
            let refused = datastore.create_disk_with("t", new, change, &NoProgress).unwrap_err();
            let text = refused.to_string();
            assert!(refused.kind() == ErrorKind::Unsupported && text.contains(why), "{text}");
            assert!(text.contains("leave out --compression and --compress-at"), "{text}");
        }
        datastore.create_disk_with("t", new, &set(Compression::Off), &NoProgress).unwrap();
        for change in [&set(Compression::Lz4), &time] {
            let refused = datastore.edit_disk("t", change).unwrap_err();
            assert!(refused.kind() == ErrorKind::Unsupported && refused.to_string().contains(why), "{refused}");
        }
        datastore.edit_disk("t", &set(Compression::Off)).unwrap();
        datastore.delete_disk("t", false).unwrap();
    }
    let defaults = DefaultsChange { compression: Some(Compression::Zstd(9)), ..DefaultsChange::default() };
    datastore.change_defaults(&defaults).unwrap();
    let of = |name: &str| datastore.disk(name).unwrap().settings.compression;
    let made = [("thin", &thin, Compression::Zstd(9)), ("thick", &thick, Compression::Off)];
    for (name, new, compression) in made.into_iter().chain([("image", &image, Compression::Off)]) {
        datastore.create_disk(name, new, &NoProgress).unwrap();
        assert_eq!(of(name), compression, "{name}");
    }
    datastore.create_disk_with("other", &thin, &set(Compression::Lz4), &NoProgress).unwrap();
    datastore.create_disk_with("plain", &thin, &set(Compression::Off), &NoProgress).unwrap();
    // Clones have the setting of their source.
    for (source, clone) in [("a", "b"), ("other", "c")] {
        datastore.clone_linked(source, &Point::Head, &[clone.into()], &NoProgress).unwrap();
    }
    assert_eq!(
        ["a", "b", "plain", "other", "c"].map(of),
        [Compression::Off, Compression::Off, Compression::Off, Compression::Lz4, Compression::Lz4]
    );
}

/// Bytes of a disk that are in packs.
fn packed(datastore: &Datastore, disk: &str) -> u64 {
    let space = datastore.space(Some(disk), &NoProgress).unwrap();
    space.disks[0].space.compressed.packed
}

#[test]
fn new_data_is_compressed_when_it_is_written_unless_the_setting_says_idle() {
    let bed = bed(Compression::Lz4);
    let (datastore, at) = (&bed.datastore, |at| set_at(Compression::Lz4, at));
    bed.write("a", 0, 1, MIB);
    assert_eq!(packed(datastore, "a"), 0);
    datastore.edit_disk("a", &at(ReduceAt::WriteBack)).unwrap();
    // More than a flush appends to the journal.
    let device = datastore.device("a", false).unwrap();
    let long = |mib: usize, seed: u8| {
        let data = SharedSlice::copy_of(&content(seed, MIB));
        device.write((mib * MIB) as u64, data, false).unwrap();
    };
    (1..3).for_each(|mib| long(mib, 2));
    device.flush().unwrap();
    assert_eq!(packed(datastore, "a"), 2 * MIB as u64);
    bed.reads("a", 1, 2, MIB);
    // A clone has the setting, and so has the disk after a restart.
    datastore.clone_linked("a", &Point::Head, &["b".into()], &NoProgress).unwrap();
    drop(device);
    datastore.close().unwrap();
    let Bed { folder: _folder, path, datastore } = bed;
    drop(datastore);
    let again = open(&path);
    for disk in ["a", "b"] {
        let before = packed(&again, disk);
        let device = again.device(disk, false).unwrap();
        device.write(4 * MIB as u64, SharedSlice::copy_of(&content(3, MIB)), false).unwrap();
        device.flush().unwrap();
        assert_eq!(packed(&again, disk) - before, MIB as u64, "{disk}");
    }
    again.edit_disk("a", &at(ReduceAt::Idle)).unwrap();
    let before = packed(&again, "a");
    again.device("a", false).unwrap().write(6 * MIB as u64, SharedSlice::copy_of(&content(4, MIB)), false).unwrap();
    assert_eq!(packed(&again, "a"), before);
    let report = again.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn compression_that_is_switched_on_is_at_write_back() {
    let bed = bed(Compression::Off);
    let datastore = &bed.datastore;
    let edit = |compression, compress_at| {
        datastore.edit_disk("a", &SettingsChange { compression, compress_at, ..SettingsChange::default() })
    };
    let at = || datastore.disk("a").unwrap().settings.compress_at;
    let thin = NewDisk::native(8 * MIB as u64, Provisioning::Thin);
    for time in [ReduceAt::WriteBack, ReduceAt::Idle] {
        let alone = SettingsChange { compress_at: Some(time), ..SettingsChange::default() };
        let defaults = DefaultsChange { compress_at: Some(time), ..DefaultsChange::default() };
        let made = datastore.create_disk_with("x", &thin, &alone, &NoProgress).map(drop);
        for refused in [edit(None, Some(time)).map(drop), made, datastore.change_defaults(&defaults)] {
            let refused = refused.unwrap_err();
            assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains("is off"), "{refused}");
        }
    }
    assert!(datastore.disk("x").is_err());
    edit(Some(Compression::Lz4), None).unwrap();
    assert_eq!(at(), ReduceAt::WriteBack);
    edit(None, Some(ReduceAt::Idle)).unwrap();
    edit(Some(Compression::Zstd(3)), None).unwrap();
    assert_eq!(at(), ReduceAt::Idle, "another method leaves the time as it is");
    edit(Some(Compression::Off), None).unwrap();
    edit(Some(Compression::Lz4), Some(ReduceAt::Idle)).unwrap();
    assert_eq!(at(), ReduceAt::Idle);
    let change = DefaultsChange { compression: Some(Compression::Lz4), ..DefaultsChange::default() };
    datastore.change_defaults(&change).unwrap();
    datastore.create_disk("new", &thin, &NoProgress).unwrap();
    assert_eq!(datastore.disk("new").unwrap().settings.compress_at, ReduceAt::WriteBack);
    datastore.create_disk_with("other", &thin, &set_at(Compression::Lz4, ReduceAt::Idle), &NoProgress).unwrap();
    assert_eq!(datastore.disk("other").unwrap().settings.compress_at, ReduceAt::Idle);
}
