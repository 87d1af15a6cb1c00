//! Reclaiming of disks in a real datastore.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::datastore::{Datastore, InitOptions, QueueChoice};
use crate::info::{DiskFormat, NewDisk, Provisioning, SnapshotOptions};
use crate::testbed::options;
use backend::SharedSlice;
use layer::image::ImageKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use work::NoProgress;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn datastore(folder: &std::path::Path) -> Arc<Datastore> {
    let path = folder.join("ds");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    Datastore::open(&path, options(QueueChoice::Threads)).unwrap()
}

fn create(datastore: &Datastore, name: &str, format: DiskFormat) {
    let new = NewDisk { capacity: 64 * MIB, provisioning: Provisioning::Thin, format, delta: None };
    datastore.create_disk(name, &new, &NoProgress).unwrap();
}

fn write(datastore: &Datastore, name: &str, pieces: &[(u64, u64, u8)]) {
    let device = datastore.device(name, false).unwrap();
    for (offset, length, byte) in pieces {
        device.write(*offset, SharedSlice::copy_of(&vec![*byte; *length as usize]), false).unwrap();
    }
    device.flush().unwrap();
}

fn content(datastore: &Datastore, name: &str) -> Vec<u8> {
    let device = datastore.device(name, true).unwrap();
    (0..64).flat_map(|piece| device.read(piece * MIB, MIB as usize).unwrap()).collect()
}

fn mapped(datastore: &Datastore, name: &str) -> u64 {
    crate::quota::mapped(&*datastore.device(name, true).unwrap()).unwrap()
}

fn reclaim(datastore: &Datastore, name: &str, dry_run: bool) -> Result<ReclaimReport> {
    datastore.reclaim(name, dry_run, &|| Ok(()), &NoProgress)
}

/// Data with zeros between, which do not begin with a block.
const PIECES: [(u64, u64, u8); 4] = [
    (0, 3 * MIB, 0),
    (MIB, 64 << 10, 7),
    (5 * MIB, 2 * MIB, 9),
    // All of these blocks but the first and the last are zero.
    (5 * MIB + 1000, MIB, 0),
];

#[test]
fn blocks_of_zeros_are_given_back_and_the_content_stays() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = datastore(folder.path());
    for (name, format, unit) in [
        ("native", DiskFormat::Native, BLOCK),
        ("sesparse", DiskFormat::Image(ImageKind::SeSparse), BLOCK),
        ("sparse", DiskFormat::Image(ImageKind::MonolithicSparse), 65_536),
    ] {
        create(&datastore, name, format);
        write(&datastore, name, &PIECES);
        let (before, bytes) = (mapped(&datastore, name), content(&datastore, name));
        let expected: u64 = bytes.chunks(unit as usize).filter(|chunk| is_zero(chunk)).count() as u64 * unit;
        let expected = expected - (64 * MIB - before);
        let is_no_client = || {
            assert_eq!(datastore.disk(name)?.clients, 0, "{name}: no machine could start during a dry run");
            Ok(())
        };
        let would = datastore.reclaim(name, true, &is_no_client, &NoProgress).unwrap();
        assert_eq!((would.reclaimed, would.mapped, would.dry_run), (expected, before, true), "{name}");
        assert_eq!(mapped(&datastore, name), before, "{name}: a dry run changes nothing");
        let [part] = &would.parts[..] else { panic!("{would:?}") };
        assert_eq!((part.partition, part.method, part.length), (Some(0), ReclaimMethod::Zeros, 64 * MIB));
        assert!(part.reason.as_ref().unwrap().contains("no file system"));

        let did = reclaim(&datastore, name, false).unwrap();
        assert_eq!((did.reclaimed, did.parts), (would.reclaimed, would.parts), "{name}");
        assert_eq!(mapped(&datastore, name), before - expected, "{name}");
        assert!(content(&datastore, name) == bytes, "{name}");
        assert_eq!(reclaim(&datastore, name, false).unwrap().reclaimed, 0, "{name}");
    }
    datastore.close().unwrap();
}

#[test]
fn clients_and_reclaiming_exclude_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = datastore(folder.path());
    for (name, format) in [("native", DiskFormat::Native), ("image", DiskFormat::Image(ImageKind::SeSparse))] {
        create(&datastore, name, format);
        write(&datastore, name, &[(0, MIB, 0)]);
        let client = datastore.device(name, false).unwrap();
        for dry_run in [true, false] {
            let error = reclaim(&datastore, name, dry_run).unwrap_err();
            assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("in use"), "{error}");
        }
        drop(client);
        // Until it ends, no client can open the disk, and no operation on it begins.
        let tried = AtomicU64::new(0);
        let refuse = || {
            tried.fetch_add(1, Ordering::Relaxed);
            let of = [(name.to_owned(), "s".to_owned())];
            let snapshot = datastore.create_snapshots(&of, &SnapshotOptions::default()).err().unwrap();
            let open = datastore.device(name, false).err().unwrap();
            assert_eq!((open.kind(), snapshot.kind()), (ErrorKind::Busy, ErrorKind::Busy), "{open}, {snapshot}");
            assert!(open.to_string().contains("being reclaimed"), "{open}");
            Ok(())
        };
        assert_eq!(datastore.reclaim(name, false, &refuse, &NoProgress).unwrap().reclaimed, MIB);
        assert_eq!(tried.load(Ordering::Relaxed), 1);
        let refuse = || Err(Error::new(ErrorKind::Busy, "a machine runs"));
        assert!(datastore.reclaim(name, false, &refuse, &NoProgress).is_err());
        datastore.device(name, false).unwrap();
    }
    datastore.close().unwrap();
}

#[test]
fn a_snapshot_keeps_what_its_disk_gives_back() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = datastore(folder.path());
    create(&datastore, "vm", DiskFormat::Native);
    write(&datastore, "vm", &PIECES);
    datastore.create_snapshots(&[("vm".into(), "s".into())], &SnapshotOptions::default()).unwrap();
    let (before, bytes) = (mapped(&datastore, "vm"), content(&datastore, "vm"));
    let report = reclaim(&datastore, "vm", false).unwrap();
    assert!(report.snapshots == 1 && report.reclaimed > 0);
    assert_eq!(mapped(&datastore, "vm"), before - report.reclaimed);
    assert_eq!(mapped(&datastore, "vm@s"), before);
    assert!(content(&datastore, "vm@s") == bytes && content(&datastore, "vm") == bytes);
    datastore.close().unwrap();
}

#[test]
fn thick_disks_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = datastore(folder.path());
    let new = NewDisk::native(8 * MIB, Provisioning::ZeroedThick);
    datastore.create_disk("thick", &new, &NoProgress).unwrap();
    let error = reclaim(&datastore, "thick", true).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("thick"), "{error}");
    datastore.close().unwrap();
}

/// Cancels at the given call.
struct Cancel {
    calls: AtomicU64,
    at: u64,
}

impl Progress for Cancel {
    fn cancelled(&self) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed) >= self.at
    }
}

#[test]
fn interrupted_reclaiming_keeps_the_content_and_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    let datastore = datastore(folder.path());
    create(&datastore, "vm", DiskFormat::Native);
    write(&datastore, "vm", &PIECES);
    let bytes = content(&datastore, "vm");
    let all = reclaim(&datastore, "vm", true).unwrap().reclaimed;
    let before = mapped(&datastore, "vm");
    let mut interrupted = 0;
    for at in 0.. {
        let cancel = Cancel { calls: AtomicU64::new(0), at };
        match datastore.reclaim("vm", false, &|| Ok(()), &cancel) {
            Ok(_) => break,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Interrupted, "{error}"),
        }
        interrupted += 1;
        assert!(content(&datastore, "vm") == bytes);
    }
    assert!(interrupted > 3);
    assert_eq!(mapped(&datastore, "vm"), before - all);
    datastore.close().unwrap();
}

#[test]
fn ranges_are_aligned_inwards() {
    assert_eq!(inwards(0..8192, 4096), 0..8192);
    assert_eq!(inwards(1..8192, 4096), 4096..8192);
    assert_eq!(inwards(0..8191, 4096), 0..4096);
    assert!(inwards(1..4096, 4096).is_empty() && inwards(4097..8191, 4096).is_empty());
    assert!(inwards(u64::MAX - 5..u64::MAX, 4096).is_empty());
}

#[test]
fn a_hibernated_system_keeps_all_maps_from_being_used() {
    let mut bytes = vec![0; 3 << 20];
    // Two partitions: swap space with a hibernated system, and the superblock of a file system that would be refused.
    bytes[510..512].copy_from_slice(&[0x55, 0xAA]);
    for (index, (first, count)) in [(2048_u32, 1024_u32), (3072, 1024)].into_iter().enumerate() {
        let at = 446 + index * 16;
        bytes[at + 4] = 0x83;
        bytes[at + 8..at + 12].copy_from_slice(&first.to_le_bytes());
        bytes[at + 12..at + 16].copy_from_slice(&count.to_le_bytes());
    }
    let swap = 2048 * 512 + 4086;
    bytes[swap..swap + 9].copy_from_slice(b"S1SUSPEND");
    let folder = tempfile::tempdir().unwrap();
    let datastore = datastore(folder.path());
    create(&datastore, "vm", DiskFormat::Native);
    let device = datastore.device("vm", false).unwrap();
    device.write(0, SharedSlice::copy_of(&bytes), false).unwrap();
    drop(device);
    let report = reclaim(&datastore, "vm", true).unwrap();
    let names: Vec<(Option<u32>, Option<&str>)> =
        report.parts.iter().map(|part| (part.partition, part.content.as_deref())).collect();
    let expected =
        [(None, None), (Some(1), Some("swap space with a hibernated system")), (Some(2), None), (None, None)];
    assert_eq!(names, expected);
    assert_eq!(report.scheme, "mbr");
    datastore.close().unwrap();
}
