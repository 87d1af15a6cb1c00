//! The effects of each operation, and what it refuses.

use crate::world::{Busy, DELTAS, Guest, Random, leaked, local, options, read, scratch};
use backend::simulated::SimulatedDisk;
use error::{Error, ErrorKind};
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vmdk::{DeltaFormat, Direction, Disk, NewDisk, NewSnapshot, Tuning, snapshot_group};
use work::NoProgress;

const MIB: u64 = 1 << 20;

fn new(name: &str, capacity: u64, kind: ImageKind, delta: DeltaFormat) -> NewDisk {
    NewDisk { name: name.to_owned(), capacity, kind, delta: Some(delta), adapter: Adapter::LsiLogic }
}

fn make(folder: &Path, delta: DeltaFormat) -> Arc<Disk> {
    Disk::create(local(folder), &new("vm", 4 * MIB, ImageKind::Thin, delta), &options(1), &NoProgress).unwrap()
}

fn snapshot(disk: &Disk, name: &str) {
    disk.snapshot(&NewSnapshot::named(name)).unwrap();
}

fn write(disk: &Disk, at: u64, byte: u8, length: usize) {
    disk.chain().unwrap().write(at, &vec![byte; length]).unwrap();
}

fn byte(disk: &Disk, at: u64) -> u8 {
    let mut out = [0];
    disk.chain().unwrap().read(at, &mut out).unwrap();
    out[0]
}

fn names(disk: &Disk) -> Vec<String> {
    disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect()
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn kind<T>(outcome: Result<T, Error>) -> (ErrorKind, String) {
    let error = outcome.err().unwrap();
    (error.kind(), error.to_string())
}

#[test]
fn files_have_the_names_that_esxi_uses() {
    for (delta, extent) in [(DELTAS[0], "delta"), (DELTAS[1], "sesparse"), (DELTAS[2], "vsan")] {
        let folder = scratch();
        let disk = make(folder.path(), delta);
        snapshot(&disk, "first");
        disk.snapshot(&NewSnapshot { description: "two\nlines".to_owned(), ..NewSnapshot::named("second") }).unwrap();
        let wanted = [
            "lamina.disk".to_owned(),
            "lamina.lock".to_owned(),
            format!("vm-000001-{extent}.vmdk"),
            "vm-000001.vmdk".to_owned(),
            format!("vm-000002-{extent}.vmdk"),
            "vm-000002.vmdk".to_owned(),
            "vm-flat.vmdk".to_owned(),
            "vm.vmdk".to_owned(),
            "vm.vmsd".to_owned(),
        ];
        assert_eq!(files(folder.path()), wanted);
        let text = std::fs::read_to_string(folder.path().join("vm.vmsd")).unwrap();
        let without_time: Vec<&str> = text.lines().filter(|line| !line.contains("createTime")).collect();
        let wanted = [
            ".encoding = \"UTF-8\"",
            "snapshot.lastUID = \"2\"",
            "snapshot.current = \"2\"",
            "snapshot0.uid = \"1\"",
            "snapshot0.filename = \"vm-Snapshot1.vmsn\"",
            "snapshot0.displayName = \"first\"",
            "snapshot0.numDisks = \"1\"",
            "snapshot0.disk0.fileName = \"vm.vmdk\"",
            "snapshot0.disk0.node = \"scsi0:0\"",
            "snapshot.numSnapshots = \"2\"",
            "snapshot1.uid = \"2\"",
            "snapshot1.filename = \"vm-Snapshot2.vmsn\"",
            "snapshot1.parent = \"1\"",
            "snapshot1.displayName = \"second\"",
            "snapshot1.description = \"two|0Alines\"",
            "snapshot1.numDisks = \"1\"",
            "snapshot1.disk0.fileName = \"vm-000001.vmdk\"",
            "snapshot1.disk0.node = \"scsi0:0\"",
        ];
        assert_eq!(without_time, wanted);
        // The lowest free number is used again.
        disk.delete_snapshot("second", Some(Direction::Up), &NoProgress).unwrap();
        snapshot(&disk, "third");
        assert!(files(folder.path()).contains(&"vm-000001.vmdk".to_owned()));
        disk.delete().unwrap();
        assert_eq!(files(folder.path()), Vec::<String>::new());
    }
}

#[test]
fn an_image_is_merged_only_when_it_has_one_child() {
    for delta in DELTAS {
        let folder = scratch();
        let disk = make(folder.path(), delta);
        write(&disk, 0, 1, 4096);
        snapshot(&disk, "root");
        write(&disk, 4096, 2, 4096);
        snapshot(&disk, "left");
        disk.revert("root").unwrap();
        assert_eq!((byte(&disk, 0), byte(&disk, 4096)), (1, 0));
        write(&disk, 8192, 3, 4096);
        snapshot(&disk, "right");
        disk.delete_snapshot("root", None, &NoProgress).unwrap();
        assert_eq!(names(&disk), ["left", "right"]);
        assert_eq!(disk.record().nodes.len(), 4);
        // The image has no children, so it is removed. The image below, which was kept for its two children, now has
        // one and is merged.
        disk.delete_snapshot("left", None, &NoProgress).unwrap();
        assert_eq!(disk.record().nodes.len(), 2);
        assert_eq!((byte(&disk, 0), byte(&disk, 4096), byte(&disk, 8192)), (1, 0, 3));
        assert_eq!(leaked(&disk), Vec::<String>::new());
        disk.delete_snapshot("right", None, &NoProgress).unwrap();
        assert_eq!(files(folder.path()), ["lamina.disk", "lamina.lock", "vm-flat.vmdk", "vm.vmdk", "vm.vmsd"]);
    }
}

#[test]
fn branches_without_the_head_are_merged() {
    for (direction, delta) in [Direction::Up, Direction::Down].into_iter().zip([DELTAS[0], DELTAS[1]]) {
        let folder = scratch();
        let disk = make(folder.path(), delta);
        snapshot(&disk, "root");
        write(&disk, 0, 1, 4096);
        snapshot(&disk, "a");
        write(&disk, 4096, 2, 4096);
        snapshot(&disk, "b");
        write(&disk, 8192, 3, 4096);
        snapshot(&disk, "c");
        disk.revert("root").unwrap();
        write(&disk, 0, 9, 512);
        disk.delete_snapshot("b", Some(direction), &NoProgress).unwrap();
        disk.delete_snapshot("a", Some(direction), &NoProgress).unwrap();
        assert_eq!(names(&disk), ["root", "c"]);
        let chain = disk.snapshot_chain("c").unwrap();
        let found = read(&chain);
        assert_eq!((found[0], found[4096], found[8192], found[12288]), (1, 2, 3, 0));
        assert_eq!(byte(&disk, 0), 9);
        assert_eq!(leaked(&disk), Vec::<String>::new());
        // While its chain is open, the snapshot cannot be deleted, and the images below are not merged.
        let refused = kind(disk.delete_snapshot("c", None, &NoProgress));
        assert_eq!(refused.0, ErrorKind::Busy);
        drop(chain);
        disk.delete_snapshot("c", None, &NoProgress).unwrap();
    }
}

#[test]
fn refusals_state_their_reason() {
    let folder = scratch();
    let disk = make(folder.path(), DELTAS[0]);
    assert_eq!(kind(Disk::open(local(folder.path()), &options(2))).0, ErrorKind::Busy);
    for name in ["", "a/b", "a\"b", "-x", "a@b", "a\nb"] {
        assert_eq!(kind(disk.snapshot(&NewSnapshot::named(name))).0, ErrorKind::Invalid, "{name}");
    }
    snapshot(&disk, "one");
    assert_eq!(kind(disk.snapshot(&NewSnapshot::named("one"))).0, ErrorKind::Exists);
    assert_eq!(kind(disk.revert("two")).0, ErrorKind::NotFound);
    assert_eq!(kind(disk.delete_snapshot("two", None, &NoProgress)).0, ErrorKind::NotFound);
    disk.tune(&Tuning { levels_max: Some(3), ..Tuning::default() }).unwrap();
    snapshot(&disk, "two");
    let refused = kind(disk.snapshot(&NewSnapshot::named("three")));
    assert!(
        refused.0 == ErrorKind::Invalid && refused.1.contains("3 levels") && refused.1.contains("limit is 3"),
        "{refused:?}"
    );
    assert!(kind(disk.tune(&Tuning { levels_max: Some(0), ..Tuning::default() })).1.contains("levels"));
    assert_eq!(kind(disk.wipe(&NoProgress)).0, ErrorKind::Unsupported);
    disk.tune(&Tuning { levels_max: Some(32), ..Tuning::default() }).unwrap();
    snapshot(&disk, "three");
    assert_eq!(disk.info().unwrap().levels, 4);
    disk.close().unwrap();
    assert_eq!(kind(disk.snapshot(&NewSnapshot::named("late"))).0, ErrorKind::Stopped);
    assert_eq!(
        kind(Disk::create(local(folder.path()), &new("b", MIB, ImageKind::Thin, DELTAS[0]), &options(1), &NoProgress))
            .0,
        ErrorKind::Busy
    );
    drop(disk);
    assert_eq!(
        kind(Disk::create(local(folder.path()), &new("b", MIB, ImageKind::Thin, DELTAS[0]), &options(1), &NoProgress))
            .0,
        ErrorKind::Exists
    );
}

#[test]
fn tunables_and_names_survive_reopening() {
    let folder = scratch();
    let disk = make(folder.path(), DELTAS[2]);
    let tuning = Tuning {
        metadata_entries: Some(1000),
        prefetch: Some(MIB),
        prefetch_extents: Some(7),
        read_cache: Some(MIB),
        levels_max: Some(40),
    };
    disk.tune(&tuning).unwrap();
    assert_eq!(disk.chain().unwrap().tunables().entries, 1000);
    disk.rename("other").unwrap();
    disk.set_overlay(Some("{\"x\":1}".to_owned())).unwrap();
    let uuid = disk.uuid();
    disk.close().unwrap();
    drop(disk);
    let disk = Disk::open(local(folder.path()), &options(3)).unwrap();
    assert_eq!((disk.name().as_str(), disk.uuid()), ("other", uuid));
    assert_eq!(disk.record().overlay.as_deref(), Some("{\"x\":1}"));
    let tunables = disk.chain().unwrap().tunables();
    assert_eq!((tunables.entries, tunables.prefetch_bytes, tunables.prefetch_extents), (1000, MIB, 7));
    assert_eq!(disk.statistics().data.memory_max, MIB);
    assert_eq!(disk.info().unwrap().levels_max, 40);
    // New files keep the old name of the disk.
    snapshot(&disk, "s");
    assert!(files(folder.path()).contains(&"vm-000001-vsan.vmdk".to_owned()));
}

#[test]
fn images_below_a_clone_are_not_removed() {
    let (here, there) = (scratch(), scratch());
    let disk = make(here.path(), DELTAS[1]);
    write(&disk, 0, 1, 8192);
    snapshot(&disk, "below");
    write(&disk, 4096, 2, 4096);
    snapshot(&disk, "gold");
    write(&disk, 0, 3, 512);
    let clone = disk.linked_clone("gold", local(there.path()), "child", &options(5)).unwrap();
    assert_eq!((byte(&clone, 0), byte(&clone, 4096)), (1, 2));
    write(&clone, 0, 7, 4096);
    snapshot(&clone, "own");
    assert_eq!(clone.origin().unwrap().snapshot, "gold");
    assert_eq!(disk.snapshots()[1].clones, ["child"]);
    let refused = kind(disk.delete_snapshot("gold", None, &NoProgress));
    assert!(refused.0 == ErrorKind::Busy && refused.1.contains("child"), "{refused:?}");
    // An image between the clone and the base loses its snapshot's name, and keeps its file.
    disk.delete_snapshot("below", None, &NoProgress).unwrap();
    assert_eq!(disk.record().nodes.len(), 3);
    assert_eq!(kind(disk.consolidate(&NoProgress)).0, ErrorKind::Busy);
    assert_eq!(kind(Arc::clone(&disk).delete()).0, ErrorKind::Busy);
    clone.close().unwrap();
    drop(clone);
    let clone = Disk::open(local(there.path()), &options(6)).unwrap();
    assert_eq!((byte(&clone, 0), byte(&clone, 4096)), (7, 2));
    clone.consolidate(&NoProgress).unwrap();
    assert_eq!((byte(&clone, 0), byte(&clone, 4096), clone.info().unwrap().levels), (7, 2, 3));
    clone.delete().unwrap();
    assert_eq!(files(there.path()), Vec::<String>::new());
    assert_eq!((disk.clones().len(), disk.snapshots()[0].clones.len()), (0, 0));
    disk.delete_snapshot("gold", None, &NoProgress).unwrap();
    disk.consolidate(&NoProgress).unwrap();
    assert_eq!((byte(&disk, 0), byte(&disk, 4096), disk.info().unwrap().levels), (3, 2, 1));
}

#[test]
fn a_snapshot_of_several_disks_is_of_one_point_in_time() {
    let (one, two) = (scratch(), scratch());
    let disks = [make(one.path(), DELTAS[0]), make(two.path(), DELTAS[1])];
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let chains = [disks[0].chain().unwrap(), disks[1].chain().unwrap()];
            let mut number = 0u64;
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                for chain in &chains {
                    chain.write(0, &number.to_le_bytes()).unwrap();
                }
            }
        });
        for round in 0..10 {
            let mut between = 0;
            let of: Vec<_> =
                disks.iter().map(|disk| (Arc::clone(disk), NewSnapshot::named(format!("s{round}")))).collect();
            snapshot_group(&of, &mut || {
                between += 1;
                Ok(())
            })
            .unwrap();
            assert_eq!(between, 1);
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    });
    for round in 0..10 {
        let number = |disk: &Arc<Disk>| {
            let mut bytes = [0; 8];
            disk.snapshot_chain(&format!("s{round}")).unwrap().read(0, &mut bytes).unwrap();
            u64::from_le_bytes(bytes)
        };
        let (first, second) = (number(&disks[0]), number(&disks[1]));
        assert!(first == second || first == second + 1, "{first} and {second}");
    }
    // A failure at the point in time leaves no snapshot on any of the disks.
    let of: Vec<_> = disks.iter().map(|disk| (Arc::clone(disk), NewSnapshot::named("no"))).collect();
    let refused = snapshot_group(&of, &mut || Err(Error::new(ErrorKind::Interrupted, "not now")));
    assert_eq!(kind(refused).0, ErrorKind::Interrupted);
    for disk in &disks {
        assert_eq!(names(disk).len(), 10);
        assert_eq!(leaked(disk), Vec::<String>::new());
        write(disk, 0, 1, 512);
        assert_eq!(disk.info().unwrap().levels, 11);
    }
    let taken = [(Arc::clone(&disks[0]), NewSnapshot::named("yes")), (Arc::clone(&disks[1]), NewSnapshot::named("s1"))];
    assert_eq!(kind(snapshot_group(&taken, &mut || Ok(()))).0, ErrorKind::Exists);
    assert_eq!((names(&disks[0]).len(), leaked(&disks[0])), (10, Vec::new()));
}

#[test]
fn consolidation_ends_under_continuous_writes() {
    for delta in DELTAS {
        let folder = scratch();
        let capacity = 32 * MIB;
        let disk =
            Disk::create(local(folder.path()), &new("vm", capacity, ImageKind::Thin, delta), &options(1), &NoProgress)
                .unwrap();
        let guest = Mutex::new(Guest { random: Random::new(9), content: vec![0; capacity as usize] });
        let chain = disk.chain().unwrap();
        for round in 0..6 {
            for _ in 0..100 {
                guest.lock().act(&chain);
            }
            snapshot(&disk, &format!("s{round}"));
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    guest.lock().act(&chain);
                }
            });
            let outcome = disk.consolidate(&NoProgress);
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            outcome.unwrap();
        });
        assert!(read(&chain) == guest.lock().content);
        assert_eq!((disk.info().unwrap().levels, names(&disk).len()), (1, 0));
        assert_eq!(leaked(&disk), Vec::<String>::new());
        disk.close().unwrap();
        drop(disk);
        let disk = Disk::open(local(folder.path()), &options(2)).unwrap();
        assert!(read(&disk.chain().unwrap()) == guest.lock().content);
    }
}

#[test]
fn an_interrupted_merge_can_be_continued() {
    for (delta, direction) in [(DELTAS[0], Direction::Up), (DELTAS[1], Direction::Down), (DELTAS[2], Direction::Down)] {
        let folder = scratch();
        let disk = make(folder.path(), delta);
        write(&disk, 0, 1, 2 << 20);
        snapshot(&disk, "a");
        write(&disk, 0, 2, 1 << 20);
        snapshot(&disk, "b");
        write(&disk, 0, 3, 4096);
        let guest = Mutex::new(Guest { random: Random::new(1), content: read(&disk.chain().unwrap()) });
        let busy = Busy { guest: &guest, chain: disk.chain().unwrap(), patience: Mutex::new(3) };
        assert_eq!(kind(disk.delete_snapshot("b", Some(direction), &busy)).0, ErrorKind::Interrupted);
        assert_eq!(names(&disk).len(), if direction == Direction::Up { 2 } else { 1 });
        disk.close().unwrap();
        drop((busy, disk));
        let disk = Disk::open(local(folder.path()), &options(2)).unwrap();
        assert!(read(&disk.chain().unwrap()) == guest.lock().content);
        if direction == Direction::Up {
            disk.delete_snapshot("b", None, &NoProgress).unwrap();
        }
        disk.delete_snapshot("a", None, &NoProgress).unwrap();
        assert_eq!(disk.info().unwrap().levels, 1);
        assert!(read(&disk.chain().unwrap()) == guest.lock().content);
        assert_eq!(leaked(&disk), Vec::<String>::new());
    }
}

#[test]
fn flat_bases_below_snapshots_can_be_inflated_and_punched() {
    let folder = scratch();
    let disk = make(folder.path(), DELTAS[0]);
    write(&disk, 0, 1, 4096);
    write(&disk, MIB, 0, 4096);
    let counters = disk.info().unwrap().counters.unwrap();
    assert_eq!((counters.blocks, counters.nb), (4, 2));
    snapshot(&disk, "s");
    disk.inflate(&NoProgress).unwrap();
    let info = disk.info().unwrap();
    assert_eq!((info.counters.unwrap().nb, info.counters.unwrap().tbz, info.kind.as_str()), (4, 0, "eagerzeroedthick"));
    disk.punch_zeros(&NoProgress).unwrap();
    let info = disk.info().unwrap();
    assert_eq!((info.counters.unwrap().nb, info.kind.as_str()), (1, "thin"));
    assert_eq!(byte(&disk, 0), 1);
    disk.close().unwrap();
    drop(disk);
    assert_eq!(byte(&Disk::open(local(folder.path()), &options(1)).unwrap(), 0), 1);
}

#[test]
fn dead_grains_are_freed_at_every_level() {
    for (delta, extent) in [(DELTAS[0], "delta"), (DELTAS[1], "sesparse")] {
        let folder = scratch();
        let disk = make(folder.path(), delta);
        let mut random = Random::new(1);
        let mut content = vec![0; 4 << 20];
        random.fill(&mut content);
        for level in 1..=2u64 {
            snapshot(&disk, &format!("s{level}"));
            for at in (0..4 << 20).step_by(65536) {
                disk.chain().unwrap().write(at as u64, &content[at..at + 65536]).unwrap();
            }
            for at in (0..4 << 20).step_by(8192) {
                content[at..at + 4096].fill(0);
                disk.chain().unwrap().zero(at as u64, 4096, false).unwrap();
            }
            disk.chain().unwrap().flush().unwrap();
        }
        let length =
            |number: u32| std::fs::metadata(folder.path().join(format!("vm-{number:06}-{extent}.vmdk"))).unwrap().len();
        let before = (length(1), length(2));
        if delta == DeltaFormat::SeSparse {
            disk.wipe(&NoProgress).unwrap();
        }
        let freed = disk.shrink(&NoProgress).unwrap();
        if delta == DeltaFormat::SeSparse {
            assert!(freed.returned >= 4 << 20, "{freed:?}");
            assert!(length(1) + (3 << 19) < before.0 && length(2) + (3 << 19) < before.1);
        }
        assert!(read(&disk.chain().unwrap()) == content);
        let checked = disk.check(true, &NoProgress).unwrap();
        assert_eq!((checked.problems.len(), checked.images), (0, 3));
    }
}

#[test]
fn deltas_can_be_in_other_folders_and_formats() {
    let (here, there) = (scratch(), scratch());
    let disk = make(here.path(), DELTAS[0]);
    write(&disk, 0, 1, 512);
    let elsewhere =
        NewSnapshot { folder: Some(there.path().to_owned()), delta: Some(DELTAS[2]), ..NewSnapshot::named("s") };
    disk.snapshot(&elsewhere).unwrap();
    write(&disk, 512, 2, 512);
    snapshot(&disk, "t");
    write(&disk, 1024, 3, 512);
    assert_eq!(files(there.path()), ["vm-000001-vsan.vmdk", "vm-000001.vmdk"]);
    disk.close().unwrap();
    drop(disk);
    let disk = Disk::open(local(here.path()), &options(1)).unwrap();
    assert_eq!((byte(&disk, 0), byte(&disk, 512), byte(&disk, 1024)), (1, 2, 3));
    disk.delete_snapshot("s", Some(Direction::Down), &NoProgress).unwrap();
    assert_eq!(files(there.path()), Vec::<String>::new());
    disk.delete_snapshot("t", Some(Direction::Down), &NoProgress).unwrap();
    assert_eq!((byte(&disk, 0), byte(&disk, 512), byte(&disk, 1024)), (1, 2, 3));
}

#[test]
fn deltas_of_large_disks_are_sesparse() {
    let folder = scratch();
    let new = NewDisk { delta: None, ..new("vm", 3 << 40, ImageKind::Thin, DELTAS[0]) };
    let disk = Disk::create(local(folder.path()), &new, &options(1), &NoProgress).unwrap();
    snapshot(&disk, "s");
    write(&disk, (3 << 40) - 4096, 5, 4096);
    assert_eq!(disk.info().unwrap().formats[0], "sesparse");
    assert_eq!(byte(&disk, (3 << 40) - 1), 5);
}

#[test]
fn one_damaged_byte_of_a_record_is_corrected_and_more_are_refused() {
    let folder = scratch();
    drop(make(folder.path(), DELTAS[0]));
    let path = folder.path().join("lamina.disk");
    let good = std::fs::read(&path).unwrap();
    assert!(good.starts_with(b"lamina disk 1 crc32c="));
    let mut random = Random::new(1);
    // With other bytes here, the record is one of another version.
    let version = b"lamina disk ".len()..b"lamina disk 1 crc32c=".len();
    for _ in 0..60 {
        let mut bad = good.clone();
        let at = random.below(bad.len() as u64) as usize;
        bad[at] ^= 1 << random.below(8);
        std::fs::write(&path, &bad).unwrap();
        if version.contains(&at) {
            let refused = kind(Disk::open(local(folder.path()), &options(1)));
            assert_eq!(refused.0, ErrorKind::Unsupported, "{refused:?}");
            continue;
        }
        let disk = Disk::open(local(folder.path()), &options(1)).unwrap();
        assert!(std::fs::read(&path).unwrap() == good, "byte {at} of the file is not corrected");
        let reported = || disk.check(false, &NoProgress).unwrap().record_mended;
        assert_eq!((reported(), reported()), (true, false));
        disk.close().unwrap();
    }
    for _ in 0..100 {
        let mut bad = good.clone();
        let (first, second) = (random.below(bad.len() as u64) as usize, random.below(bad.len() as u64) as usize);
        bad[first] ^= 1 << random.below(8);
        bad[second] ^= 1 << random.below(8);
        if first == second {
            continue;
        }
        std::fs::write(&path, &bad).unwrap();
        let refused = kind(Disk::open(local(folder.path()), &options(1)));
        assert!(matches!(refused.0, ErrorKind::Corrupt | ErrorKind::Unsupported), "{refused:?}");
    }
    for bad in [&b""[..], b"lamina disk 2 crc32c=00000000\n{}", b"\0\0\0\0", &good[..good.len() / 2]] {
        std::fs::write(&path, bad).unwrap();
        let refused = kind(Disk::open(local(folder.path()), &options(1)));
        assert!(matches!(refused.0, ErrorKind::Corrupt | ErrorKind::Unsupported), "{refused:?}");
    }
    std::fs::write(&path, &good).unwrap();
    Disk::open(local(folder.path()), &options(1)).unwrap().chain().unwrap();
}

/// For any single I/O failure: the operation fails or succeeds, the disk continues or has to be reopened, and
/// afterwards no data is lost.
#[test]
fn one_failed_io_leaves_the_disk_consistent() {
    for (which, count) in [(0u64, 40u64), (1, 60), (2, 80), (3, 60)] {
        for number in 0..count {
            let machine = SimulatedDisk::new(number, Default::default());
            let home = || Folder::plain(machine.directory());
            let disk = Disk::create(
                home(),
                &new("vm", 256 << 10, ImageKind::Thin, DELTAS[number as usize % 3]),
                &options(1),
                &NoProgress,
            )
            .unwrap();
            write(&disk, 0, 1, 8192);
            snapshot(&disk, "a");
            write(&disk, 4096, 2, 8192);
            snapshot(&disk, "b");
            write(&disk, 65536, 3, 8192);
            disk.chain().unwrap().flush().unwrap();
            let chain = disk.chain().unwrap();
            let content = read(&chain);
            let snapshot_b = read(&disk.snapshot_chain("b").unwrap());
            machine.fail_operation(machine.operations() + number);
            let outcome = match which {
                0 => disk.snapshot(&NewSnapshot::named("c")).map(drop),
                1 => disk.delete_snapshot("b", Some(Direction::Up), &NoProgress),
                2 => disk.delete_snapshot("a", Some(Direction::Down), &NoProgress),
                _ => disk.consolidate(&NoProgress),
            };
            let what = format!("operation {which}, failure {number}: {outcome:?}");
            // Reads are also checked after a failed flush of metadata, after which cached pages may be lost.
            let mut found = vec![0xee; content.len()];
            match chain.read(0, &mut found) {
                Ok(()) => assert!(found == content, "{what}"),
                Err(error) => assert!(outcome.is_err(), "{what}, and then {error}"),
            }
            drop((chain, disk));
            // The restart of the machine cancels a requested failure that has not occurred yet.
            let machine = machine.crash();
            let disk = Disk::open(Folder::plain(machine.directory()), &options(2)).unwrap();
            assert!(read(&disk.chain().unwrap()) == content, "{what}");
            if names(&disk).contains(&"b".to_owned()) {
                assert!(read(&disk.snapshot_chain("b").unwrap()) == snapshot_b, "{what}");
            }
            assert_eq!(leaked(&disk), Vec::<String>::new(), "{what}");
            disk.consolidate(&NoProgress).unwrap();
            assert!(read(&disk.chain().unwrap()) == content, "{what}");
        }
    }
}
