//! Which disks passes with a setting of deduplication share blocks of, and when.

#![allow(clippy::unwrap_used)]

use super::LOOK_INTERVAL;
use crate::testbed::options;
use crate::{
    CheckOptions, Compression, Datastore, Deduplication, DefaultsChange, DiskFormat, IdlePass, ImageKind, InitOptions,
    NewDisk, NoProgress, Point, Progress, Provisioning, QueueChoice, Reclaimed, ReduceAt, SettingsChange,
    SnapshotOptions,
};
use backend::{BLOCK_SIZE, SharedSlice};
use error::{Error, ErrorKind};
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

fn tenant() -> Deduplication {
    Deduplication::Label("tenant".into())
}

/// The setting, with which only passes find equal blocks.
fn set(dedup: Deduplication) -> SettingsChange {
    let dedup_at = (!dedup.is_off()).then_some(ReduceAt::Idle);
    SettingsChange { dedup: Some(dedup), dedup_at, ..SettingsChange::default() }
}

fn labelled(dedup: Deduplication, tenant: &str) -> SettingsChange {
    SettingsChange { labels: [("tenant".to_owned(), tenant.to_owned())].into(), ..set(dedup) }
}

fn content(seed: u8, length: usize) -> Vec<u8> {
    let byte = |at: usize| match at % BLOCK_SIZE {
        inside if inside < BLOCK_SIZE / 2 => {
            let mixed = (at as u64 + (u64::from(seed) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 32) as u8
        }
        _ => seed,
    };
    (0..length).map(byte).collect()
}

/// A datastore with disks of 8 MiB that have these settings.
fn bed(disks: &[(&str, SettingsChange)]) -> Bed {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    let bed = Bed { datastore: open(&path), folder, path };
    disks.iter().for_each(|(name, settings)| bed.create(name, settings));
    bed
}

impl Bed {
    fn create(&self, name: &str, settings: &SettingsChange) {
        let new = NewDisk::native(8 * MIB as u64, Provisioning::Thin);
        self.datastore.create_disk_with(name, &new, settings, &NoProgress).unwrap();
    }

    fn write(&self, disk: &str, mib: usize, seed: u8, length: usize) {
        let device = self.datastore.device(disk, false).unwrap();
        device.write((mib * MIB) as u64, SharedSlice::copy_of(&content(seed, length)), false).unwrap();
    }

    #[track_caller]
    fn reads(&self, export: &str, mib: usize, seed: u8, length: usize) {
        let device = self.datastore.device(export, true).unwrap();
        assert!(device.read((mib * MIB) as u64, length).unwrap() == content(seed, length), "{export}");
    }

    fn next(&self, after: Duration) -> Option<IdlePass> {
        self.datastore.next_idle(after).unwrap()
    }

    /// Runs passes without rests until none is due. Returns what each has processed, and the blocks that it has shared
    /// and compressed.
    fn passes(&self) -> Vec<(String, usize, usize)> {
        std::iter::from_fn(|| {
            let pass = self.next(NOW)?;
            let of = self.datastore.pass_idle(&pass, NOW, &NoProgress).unwrap();
            Some((pass.title(), of.shared as usize / BLOCK_SIZE, of.moved as usize / BLOCK_SIZE))
        })
        .collect()
    }

    /// Bytes of a disk that passes have still to compare.
    fn pending(&self, disk: &str) -> u64 {
        self.datastore.disk(disk).unwrap().deduplication.unwrap().pending
    }

    /// Bytes of the disk that no other disk or place shares.
    fn exclusive(&self, disk: &str) -> usize {
        self.datastore.disk(disk).unwrap().exclusive.unwrap() as usize
    }

    fn edit(&self, disk: &str, change: &SettingsChange) {
        self.datastore.edit_disk(disk, change).unwrap();
    }

    fn reopened(self) -> Self {
        self.datastore.close().unwrap();
        let Self { folder, path, datastore } = self;
        drop(datastore);
        Self { datastore: open(&path), folder, path }
    }

    fn is_clean(&self) {
        let report = self.datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
        assert_eq!(report.findings, []);
    }
}

#[test]
fn equal_blocks_of_a_disk_and_its_snapshots_are_shared_once_they_are_cold() {
    let bed = bed(&[("a", set(Deduplication::Disk)), ("b", set(Deduplication::Disk))]);
    bed.write("a", 0, 1, MIB);
    bed.write("a", 4, 1, MIB);
    bed.write("b", 0, 1, MIB);
    bed.datastore.create_snapshots(&[("a".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    bed.write("a", 0, 2, MIB);
    bed.write("a", 6, 2, MIB);
    assert_eq!(bed.next(LATER), None, "the disks were just made");
    let mut passes = bed.passes();
    passes.sort_unstable();
    assert_eq!(passes, [("a".into(), 2 * BLOCKS, 0), ("b".into(), 0, 0)]);
    assert_eq!(bed.next(NOW), None, "everything was compared");
    assert_eq!(bed.exclusive("b"), MIB, "the disks do not share with each other");
    bed.write("a", 2, 1, MIB / 2);
    assert_eq!((bed.next(LATER), bed.pending("a"), bed.pending("b")), (None, MIB as u64, 0));
    assert_eq!(bed.passes(), [("a".into(), BLOCKS / 2, 0)]);
    let state = bed.datastore.disk("a").unwrap().deduplication.unwrap();
    assert_eq!((state.pending, state.shared), (0, 5 * MIB as u64 / 2));
    assert!(state.ended.is_some());
    let status = bed.datastore.status().unwrap().deduplication;
    assert_eq!((status.disks, status.domains, status.pending, status.running), (2, 2, 0, None));
    assert_eq!((status.shared, status.new_disks), (5 * MIB as u64 / 2, Deduplication::Off));
    for (export, mib, seed) in [("a", 0, 2), ("a", 4, 1), ("a", 6, 2), ("a@s", 0, 1), ("a@s", 4, 1), ("b", 0, 1)] {
        bed.reads(export, mib, seed, MIB);
    }
    bed.is_clean();
}

#[test]
fn a_disk_is_shared_only_with_disks_that_have_the_setting_themselves() {
    let bed = bed(&[
        ("one", labelled(tenant(), "x")),
        ("two", labelled(tenant(), "x")),
        ("other", labelled(tenant(), "y")),
        ("whole", labelled(Deduplication::Datastore, "x")),
        ("rest", set(Deduplication::Datastore)),
        ("alone", labelled(Deduplication::Disk, "x")),
        ("off", labelled(Deduplication::Off, "x")),
        ("unlabelled", set(tenant())),
    ]);
    let disks = ["one", "two", "other", "whole", "rest", "alone", "off", "unlabelled"];
    disks.iter().for_each(|disk| bed.write(disk, 0, 1, MIB));
    let passes = bed.passes();
    let of = |title: &str| passes.iter().find(|(of, ..)| of == title).map(|(_, shared, _)| *shared);
    let titles = ["label:tenant=x", "label:tenant=y", "datastore", "alone"].map(of);
    assert_eq!((passes.len(), titles), (4, [Some(BLOCKS), Some(0), Some(BLOCKS), Some(0)]));
    let exclusive =
        ["one", "two", "other", "whole", "rest", "alone", "off", "unlabelled"].map(|disk| bed.exclusive(disk));
    assert_eq!(exclusive, [0, 0, MIB, 0, 0, MIB, MIB, MIB]);
    let state = |disk: &str| bed.datastore.disk(disk).unwrap().deduplication;
    assert_eq!([state("off"), state("unlabelled")], [None, None]);
    assert_eq!(bed.datastore.status().unwrap().deduplication.disks, 6);
    // A label makes a disk belong to the others with it, and its removal ends that.
    bed.edit("unlabelled", &labelled(tenant(), "y"));
    bed.edit("one", &SettingsChange { remove_labels: vec!["tenant".into()], ..SettingsChange::default() });
    bed.write("two", 0, 2, MIB);
    bed.write("one", 0, 2, MIB);
    assert_eq!(bed.passes(), [("label:tenant=x".into(), 0, 0), ("label:tenant=y".into(), BLOCKS, 0)]);
    assert_eq!(["one", "two", "other", "off"].map(|disk| bed.exclusive(disk)), [MIB, MIB, 0, MIB]);
    disks[2..].iter().for_each(|disk| bed.reads(disk, 0, 1, MIB));
    bed.is_clean();
}

#[test]
fn data_of_a_disk_with_both_settings_is_compressed_after_it_was_compared() {
    let both = SettingsChange { compression: Some(Compression::Lz4), ..set(Deduplication::Datastore) };
    let bed = bed(&[("a", both), ("b", set(Deduplication::Datastore))]);
    let compressed = |bed: &Bed| bed.datastore.disk("a").unwrap().compression.unwrap();
    for (round, seed) in [1, 3].into_iter().enumerate() {
        let mib = 2 * round;
        bed.write("a", mib, seed, MIB);
        bed.write("b", mib, seed, MIB);
        bed.write("a", mib + 1, seed + 1, MIB);
        // Neither pass takes what the other one has to process. Shared blocks are compressed too, because both disks
        // have them at the same place.
        let passes = [("datastore".into(), BLOCKS, 0), ("a".into(), 0, 2 * BLOCKS)];
        assert_eq!(bed.passes(), passes);
        assert_eq!((bed.pending("a"), compressed(&bed).pending), (0, 0));
        assert_eq!(compressed(&bed).compressed, (2 * (round + 1) * MIB) as u64);
    }
    // A pass of deduplication that has not ended keeps compression from what was not compared.
    bed.write("a", 5, 5, MIB);
    bed.write("b", 5, 5, MIB);
    {
        let _uses = ["a", "b"].map(|disk| bed.datastore.uses.alone(disk, "migrated").unwrap());
        assert_eq!(bed.next(NOW), None);
    }
    {
        let _alone = bed.datastore.uses.alone("b", "migrated").unwrap();
        assert_eq!(bed.passes(), [("datastore".into(), 0, 0), ("a".into(), 0, BLOCKS)], "a part of the domain");
    }
    // Without the setting of deduplication, compression does not wait.
    bed.write("a", 6, 6, MIB);
    bed.edit("a", &set(Deduplication::Off));
    let pass = bed.passes().into_iter().find(|(title, ..)| title == "a");
    assert_eq!(pass, Some(("a".into(), 0, BLOCKS)));
    for (mib, seed) in [(0, 1), (1, 2), (2, 3), (3, 4), (5, 5), (6, 6)] {
        bed.reads("a", mib, seed, MIB);
    }
    bed.is_clean();
}

#[test]
fn a_disk_that_is_used_exclusively_is_left_out_and_compared_later() {
    let bed = bed(&[
        ("a", set(Deduplication::Datastore)),
        ("b", set(Deduplication::Datastore)),
        ("c", set(Deduplication::Datastore)),
    ]);
    ["a", "b", "c"].iter().for_each(|disk| bed.write(disk, 0, 1, MIB));
    {
        let _alone = bed.datastore.uses.alone("a", "migrated").unwrap();
        assert_eq!(bed.passes(), [("datastore".into(), BLOCKS, 0)]);
        assert_eq!((bed.exclusive("a"), bed.pending("a")), (MIB, 8 * MIB as u64));
        assert_eq!(bed.next(NOW), None, "only the disk that is left out has to be compared");
    }
    assert_eq!(bed.passes(), [("datastore".into(), BLOCKS, 0)]);
    assert_eq!(["a", "b", "c"].map(|disk| bed.exclusive(disk)), [0; 3]);
}

/// Does something at the first progress of a pass, and then lets it look at its disks after each step.
struct Meanwhile<'a>(&'a (dyn Fn() + Sync), AtomicU64);

impl Progress for Meanwhile<'_> {
    fn update(&self, _done: u64, _total: u64) {
        if self.1.fetch_add(1, Ordering::Relaxed) == 0 {
            (self.0)();
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

#[test]
fn a_pass_ends_without_an_error_when_a_disk_leaves_the_domain_or_is_used_exclusively() {
    let held = parking_lot::Mutex::new(None);
    let bed = bed(&[("a", labelled(tenant(), "x")), ("b", labelled(tenant(), "x"))]);
    ["a", "b"].iter().for_each(|disk| bed.write(disk, 0, 1, 4 * MIB));
    let leave: [&(dyn Fn() + Sync); 3] =
        [&|| bed.edit("a", &set(Deduplication::Off)), &|| bed.edit("a", &labelled(tenant(), "y")), &|| {
            *held.lock() = Some(bed.datastore.uses.alone("a", "migrated").unwrap())
        }];
    for change in leave {
        bed.edit("a", &labelled(tenant(), "x"));
        let pass = bed.next(NOW).unwrap();
        assert_eq!(pass.title(), "label:tenant=x");
        let meanwhile = Meanwhile(change, AtomicU64::new(0));
        let of = bed.datastore.pass_idle(&pass, NOW, &meanwhile).unwrap();
        assert!((of.shared as usize) < MIB && bed.exclusive("a") > 3 * MIB, "{of:?}");
        assert_eq!(bed.pending("b"), 8 * MIB as u64, "parts that were not processed stay recorded");
    }
    held.lock().take();
    // A deleted disk does not end the pass over the others.
    bed.create("c", &labelled(tenant(), "x"));
    let pass = bed.next(NOW).unwrap();
    let meanwhile = Meanwhile(&|| bed.datastore.delete_disk("c", false).unwrap(), AtomicU64::new(0));
    bed.datastore.pass_idle(&pass, NOW, &meanwhile).unwrap();
    assert_eq!((bed.exclusive("a"), bed.pending("b")), (0, 0));
    assert_eq!(bed.next(NOW), None);
    ["a", "b"].iter().for_each(|disk| bed.reads(disk, 0, 1, 4 * MIB));
    bed.is_clean();
}

/// Cancels a pass at once.
struct Cancelled;

impl Progress for Cancelled {
    fn cancelled(&self) -> bool {
        true
    }
}

/// Cancels a pass after this many steps.
struct After(AtomicU64);

impl Progress for After {
    fn update(&self, _done: u64, _total: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

/// A block that ends with its own checksum, as those of some file systems do: all such blocks have one checksum.
fn with_checksum(number: usize) -> Vec<u8> {
    let mut block = content(7, BLOCK_SIZE - 4);
    block[..8].copy_from_slice(&(number as u64).to_le_bytes());
    block.extend(checksums::checksum(&block).to_le_bytes());
    block
}

#[test]
fn a_pass_that_ends_while_it_groups_blocks_with_one_checksum_is_repeated_and_finds_all() {
    const CONTENTS: usize = 500;
    assert_eq!(checksums::checksum(&with_checksum(1)), checksums::checksum(&with_checksum(2)));
    let bed = bed(&[("a", set(Deduplication::Disk))]);
    // No two blocks follow each other in the same way, so the pairs are shared one by one.
    let number = |block: usize| ((block as u32).wrapping_mul(0x9e37_79b1) >> 12) as usize % CONTENTS;
    let contents = (0..8 * BLOCKS).map(number).collect::<std::collections::BTreeSet<_>>().len();
    let data: Vec<u8> = (0..8 * BLOCKS).flat_map(|block| with_checksum(number(block))).collect();
    let device = bed.datastore.device("a", false).unwrap();
    for (at, part) in (0..).zip(data.chunks(MIB)) {
        device.write(at * MIB as u64, SharedSlice::copy_of(part), false).unwrap();
    }
    device.flush().unwrap();
    let pass = bed.next(NOW).unwrap();
    let shared = || bed.datastore.disk("a").unwrap().deduplication.unwrap().shared as usize / BLOCK_SIZE;
    // As many steps as comparisons with the first block, and some more.
    let stopped = bed.datastore.pass_idle(&pass, NOW, &After(AtomicU64::new(8 * BLOCKS as u64 + 300))).unwrap_err();
    assert_eq!(stopped.kind(), ErrorKind::Interrupted);
    let first = shared();
    assert!(first > 10 && first < 8 * BLOCKS - contents, "{first}");
    assert_eq!(bed.passes(), [("a".into(), 8 * BLOCKS - contents - first, 0)]);
    assert!(device.read(0, data.len()).unwrap() == data);
    bed.is_clean();
}

#[test]
fn a_cancelled_or_failed_pass_is_repeated_and_others_wait_for_it() {
    let bed = bed(&[("a", set(Deduplication::Disk))]);
    bed.write("a", 0, 1, MIB);
    bed.write("a", 1, 1, MIB);
    let pass = bed.next(NOW).unwrap();
    let stopped = bed.datastore.pass_idle(&pass, NOW, &Cancelled).unwrap_err();
    assert!(stopped.kind() == ErrorKind::Interrupted && stopped.to_string().contains("continues later"), "{stopped}");
    assert_eq!(bed.pending("a"), 8 * MIB as u64);
    let other = parking_lot::Mutex::new(None::<(Option<IdlePass>, Error, Option<String>)>);
    let meanwhile = Meanwhile(
        &|| {
            let busy = bed.datastore.pass_idle(&pass, NOW, &NoProgress).unwrap_err();
            let running = bed.datastore.status().unwrap().deduplication.running;
            *other.lock() = Some((bed.next(NOW), busy, running));
        },
        AtomicU64::new(0),
    );
    assert_eq!(bed.datastore.pass_idle(&pass, NOW, &meanwhile).unwrap().shared, MIB as u64);
    let (next, busy, running) = other.lock().take().unwrap();
    assert_eq!((next, busy.kind(), running.as_deref()), (None, ErrorKind::Busy, Some("a")));
}

#[test]
fn a_write_while_a_pass_runs_makes_its_part_count_as_written() {
    let bed = bed(&[("a", set(Deduplication::Disk))]);
    bed.write("a", 0, 1, 2 * MIB);
    let pass = bed.next(NOW).unwrap();
    let meanwhile = Meanwhile(&|| bed.write("a", 0, 2, BLOCK_SIZE), AtomicU64::new(0));
    bed.datastore.pass_idle(&pass, NOW, &meanwhile).unwrap();
    assert_eq!(bed.pending("a"), MIB as u64);
    bed.reads("a", 0, 2, BLOCK_SIZE);
}

#[test]
fn a_domain_rests_after_a_pass_also_when_a_disk_joins() {
    let bed = bed(&[("a", set(Deduplication::Datastore))]);
    let (after, begun) = (Duration::from_millis(300), Instant::now());
    assert_eq!(bed.passes(), [("datastore".into(), 0, 0)]);
    bed.create("b", &set(Deduplication::Datastore));
    assert!(bed.next(after).is_none() || begun.elapsed() > 6 * after);
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
fn a_restart_compares_everything_again_and_skips_what_is_shared() {
    let before = bed(&[("a", set(Deduplication::Datastore)), ("b", set(Deduplication::Datastore))]);
    ["a", "b"].iter().for_each(|disk| before.write(disk, 0, 1, MIB));
    assert_eq!(before.passes(), [("datastore".into(), BLOCKS, 0)]);
    before.write("b", 4, 1, MIB);
    let bed = before.reopened();
    assert_eq!(bed.datastore.disk("a").unwrap().deduplication, None, "no pass was requested yet");
    assert_eq!(bed.passes(), [("datastore".into(), BLOCKS, 0)]);
    assert_eq!(bed.passes(), []);
    let bed = bed.reopened();
    assert_eq!(bed.passes(), [("datastore".into(), 0, 0)]);
    bed.reads("b", 4, 1, MIB);
    bed.is_clean();
}

#[test]
fn a_small_memory_finds_the_same() {
    // More blocks than have room in the smallest memory.
    const LARGE: usize = 24 * MIB;
    let found = |memory: Option<usize>, by_setting: bool| {
        let bed = bed(&[]);
        for disk in ["a", "b"] {
            let new = NewDisk::native(LARGE as u64, Provisioning::Thin);
            let settings = set(if by_setting { Deduplication::Datastore } else { Deduplication::Off });
            bed.datastore.create_disk_with(disk, &new, &settings, &NoProgress).unwrap();
            bed.write(disk, 0, 1, LARGE);
        }
        let shared = if by_setting {
            memory.into_iter().for_each(|memory| bed.datastore.set_dedup_memory(memory));
            bed.passes().iter().map(|(_, shared, _)| shared).sum()
        } else {
            let domain = Deduplication::Datastore;
            let done = bed.datastore.optimize_disk("a", Compression::Off, domain, memory, &NoProgress);
            let Reclaimed { shared, .. } = done.unwrap();
            shared as usize / BLOCK_SIZE
        };
        ["a", "b"].iter().for_each(|disk| bed.reads(disk, 0, 1, LARGE));
        bed.is_clean();
        shared
    };
    let all = LARGE / BLOCK_SIZE;
    assert!(2 * all * 36 > 2 * crate::DEDUP_MEMORY_MIN);
    for memory in [None, Some(crate::DEDUP_MEMORY_MIN), Some(0)] {
        assert_eq!((found(memory, true), found(memory, false)), (all, all), "{memory:?}");
    }
}

#[test]
fn only_thin_native_disks_get_the_setting() {
    let bed = bed(&[]);
    let (datastore, size) = (&bed.datastore, 8 * MIB as u64);
    let thin = NewDisk::native(size, Provisioning::Thin);
    let thick = NewDisk::native(size, Provisioning::ZeroedThick);
    let image = NewDisk { format: DiskFormat::Image(ImageKind::SeSparse), ..thin };
    // A time alone must not advise a setting that is then refused.
    let time = SettingsChange { dedup_at: Some(ReduceAt::Idle), ..SettingsChange::default() };
    let advice = "; leave out --dedup and --dedup-at, or ";
    for (new, why, of_new) in [
        (&thick, "thick, and is not deduplicated", "a thick disk is not deduplicated, because"),
        (&image, "native one, so it is not deduplicated: 'lamina disk migrate'", "only native disks are deduplicated"),
    ] {
        for change in [&set(tenant()), &time] {
            let refused = datastore.create_disk_with("t", new, change, &NoProgress).unwrap_err();
            let text = refused.to_string();
            assert!(
                refused.kind() == ErrorKind::Unsupported && text.contains(of_new) && text.contains(advice),
                "{text}"
            );
            assert!(!text.contains("migrate") && text.contains("'t' was not made"), "{text}");
        }
        datastore.create_disk_with("t", new, &set(Deduplication::Off), &NoProgress).unwrap();
        for change in [&set(Deduplication::Disk), &time] {
            let refused = datastore.edit_disk("t", change).unwrap_err();
            assert!(refused.kind() == ErrorKind::Unsupported && refused.to_string().contains(why), "{refused}");
        }
        bed.edit("t", &set(Deduplication::Off));
        datastore.delete_disk("t", false).unwrap();
    }
    bed.create("old", &SettingsChange::default());
    let defaults = DefaultsChange { dedup: Some(tenant()), ..DefaultsChange::default() };
    datastore.change_defaults(&defaults).unwrap();
    let of = |name: &str| datastore.disk(name).unwrap().settings.dedup;
    for (name, new, dedup) in
        [("thin", &thin, tenant()), ("thick", &thick, Deduplication::Off), ("image", &image, Deduplication::Off)]
    {
        datastore.create_disk(name, new, &NoProgress).unwrap();
        assert_eq!(of(name), dedup, "{name}");
    }
    bed.create("other", &set(Deduplication::Disk));
    bed.create("plain", &set(Deduplication::Off));
    // Clones have the setting of their source.
    for (source, clone) in [("old", "b"), ("other", "c")] {
        datastore.clone_linked(source, &Point::Head, &[clone.into()], &NoProgress).unwrap();
    }
    assert_eq!(
        ["old", "b", "plain", "other", "c"].map(of),
        [Deduplication::Off, Deduplication::Off, Deduplication::Off, Deduplication::Disk, Deduplication::Disk]
    );
}

fn at_write_back(dedup: Deduplication) -> SettingsChange {
    SettingsChange { dedup: Some(dedup), ..SettingsChange::default() }
}

#[test]
fn new_data_that_is_stored_already_takes_no_space_unless_the_setting_says_idle() {
    let bed = bed(&[("a", at_write_back(tenant())), ("b", at_write_back(tenant())), ("c", set(tenant()))]);
    let label = |value: &str| SettingsChange {
        labels: [("tenant".to_owned(), value.to_owned())].into(),
        ..SettingsChange::default()
    };
    // Long writes bypass the buffer after a first one, so they are not appended to the journal by a flush.
    let begin = |bed: &Bed, disks: &[&str]| {
        disks.iter().zip(100..).for_each(|(disk, seed)| bed.write(disk, 7, seed, BLOCK_SIZE));
        bed.datastore.device(disks[0], false).unwrap().flush().unwrap();
    };
    ["a", "b", "c"].iter().for_each(|disk| bed.edit(disk, &label("x")));
    begin(&bed, &["a", "b", "c"]);
    bed.write("a", 0, 1, MIB);
    bed.datastore.device("a", false).unwrap().flush().unwrap();
    bed.write("b", 2, 1, MIB);
    assert_eq!([bed.exclusive("a"), bed.exclusive("b")], [BLOCK_SIZE; 2]);
    assert_eq!(bed.datastore.status().unwrap().deduplication.shared, MIB as u64);
    bed.write("c", 0, 1, MIB);
    assert_eq!(bed.exclusive("c"), MIB + BLOCK_SIZE, "idle");
    // A disk of another tenant shares nothing.
    bed.edit("b", &label("y"));
    bed.write("b", 4, 1, MIB);
    assert_eq!(bed.exclusive("b"), MIB + BLOCK_SIZE);
    bed.edit("b", &label("x"));
    // A clone has the setting, and so has the disk after a restart.
    let datastore = &bed.datastore;
    datastore.clone_linked("b", &Point::Head, &["d".into()], &NoProgress).unwrap();
    let bed = bed.reopened();
    begin(&bed, &["a", "d"]);
    bed.write("a", 1, 2, MIB);
    bed.datastore.device("a", false).unwrap().flush().unwrap();
    let before = [bed.exclusive("a"), bed.exclusive("d")];
    bed.write("d", 6, 2, MIB);
    assert_eq!([bed.exclusive("a") + MIB, bed.exclusive("d")], before);
    // Passes find what writes have not found.
    bed.passes();
    assert_eq!(bed.exclusive("c"), BLOCK_SIZE);
    [("a", 0, 1), ("b", 2, 1), ("b", 4, 1), ("c", 0, 1), ("d", 6, 2), ("a", 1, 2)]
        .into_iter()
        .for_each(|(disk, mib, seed)| bed.reads(disk, mib, seed, MIB));
    bed.is_clean();
}

#[test]
fn deduplication_that_is_switched_on_is_at_write_back() {
    let bed = bed(&[("a", SettingsChange::default())]);
    let datastore = &bed.datastore;
    let edit =
        |dedup, dedup_at| datastore.edit_disk("a", &SettingsChange { dedup, dedup_at, ..SettingsChange::default() });
    let at = || datastore.disk("a").unwrap().settings.dedup_at;
    let thin = NewDisk::native(8 * MIB as u64, Provisioning::Thin);
    for time in [ReduceAt::WriteBack, ReduceAt::Idle] {
        let alone = SettingsChange { dedup_at: Some(time), ..SettingsChange::default() };
        let defaults = DefaultsChange { dedup_at: Some(time), ..DefaultsChange::default() };
        let made = datastore.create_disk_with("x", &thin, &alone, &NoProgress).map(drop);
        for refused in [edit(None, Some(time)).map(drop), made, datastore.change_defaults(&defaults)] {
            let refused = refused.unwrap_err();
            assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains("is off"), "{refused}");
        }
    }
    assert!(datastore.disk("x").is_err());
    edit(Some(Deduplication::Disk), None).unwrap();
    assert_eq!(at(), ReduceAt::WriteBack);
    edit(None, Some(ReduceAt::Idle)).unwrap();
    edit(Some(Deduplication::Datastore), None).unwrap();
    assert_eq!(at(), ReduceAt::Idle, "another domain leaves the time as it is");
    edit(Some(Deduplication::Off), None).unwrap();
    edit(Some(Deduplication::Disk), Some(ReduceAt::Idle)).unwrap();
    assert_eq!(at(), ReduceAt::Idle);
    let change = DefaultsChange { dedup: Some(Deduplication::Disk), ..DefaultsChange::default() };
    datastore.change_defaults(&change).unwrap();
    datastore.create_disk("new", &thin, &NoProgress).unwrap();
    assert_eq!(datastore.disk("new").unwrap().settings.dedup_at, ReduceAt::WriteBack);
    datastore.create_disk_with("other", &thin, &set(Deduplication::Disk), &NoProgress).unwrap();
    assert_eq!(datastore.disk("other").unwrap().settings.dedup_at, ReduceAt::Idle);
    datastore.create_disk_with("off", &thin, &set(Deduplication::Off), &NoProgress).unwrap();
    assert_eq!(datastore.disk("off").unwrap().settings.dedup_at, ReduceAt::Idle);
}
