//! Full file systems: a disk can be deleted without free space, also after an operation that failed for lack of space,
//! and through power cuts at every step. A snapshot can be deleted if its data already has space in the target.

use crate::world::{DELTAS, OTHER_BASES, Sub, leaked, options, read};
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use error::{Error, ErrorKind};
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use std::sync::{Arc, OnceLock};
use vmdk::{DeltaFormat, Direction, Disk, NewDisk, NewSnapshot, Options};
use work::NoProgress;
use work::Progress;

const PAGE: u64 = 4096;
const CAPACITY: u64 = 256 << 10;
const KINDS: [ImageKind; 3] = [ImageKind::Thin, ImageKind::EagerZeroedThick, ImageKind::MonolithicSparse];

/// A machine with little storage, and a disk with two snapshots and data in each level.
struct Machine {
    storage: SimulatedDisk,
    disk: Arc<Disk>,
    options: Options,
}

impl Machine {
    fn new(kind: ImageKind, delta: DeltaFormat, seed: u64) -> Self {
        let simulated = SimulatedOptions { capacity: 64 << 20, ..SimulatedOptions::default() };
        let storage = SimulatedDisk::new(seed, simulated);
        let new =
            NewDisk { name: "vm".into(), capacity: CAPACITY, kind, delta: Some(delta), adapter: Adapter::LsiLogic };
        let mut options = options(1);
        let (known, found) = (Arc::new(OnceLock::new()), storage.directory());
        let own = Arc::clone(&known);
        // Any other UUID is that of the clone.
        options.folders = Some(Arc::new(move |uuid: &str| {
            Ok(Sub::folder(&found, if own.get().unwrap() == uuid { "a" } else { "c" }))
        }));
        let disk = Disk::create(folder(&storage, "a"), &new, &options, &NoProgress).unwrap();
        known.set(disk.uuid()).unwrap();
        let machine = Self { storage, disk, options };
        for (index, name) in ["first", "second"].into_iter().enumerate() {
            machine.write(index as u64 * 5, 1 + index as u8);
            machine.disk.snapshot(&NewSnapshot::named(name)).unwrap();
        }
        machine.write(7, 3);
        machine
    }

    fn write(&self, page: u64, byte: u8) {
        let chain = self.disk.chain().unwrap();
        chain.write(page * PAGE, &[byte; 4 * PAGE as usize]).unwrap();
        chain.flush().unwrap();
    }

    /// Overwrites pages that already have grains, without a flush.
    fn write_where_it_was(&self, byte: u8, content: &mut [u8]) {
        let chain = self.disk.chain().unwrap();
        chain.write(7 * PAGE, &[byte; 4 * PAGE as usize]).unwrap();
        content[7 * PAGE as usize..11 * PAGE as usize].fill(byte);
    }

    /// Fills the file system until only `free` pages are free.
    fn fill(&self, free: u64) {
        let directory = self.storage.directory();
        let name = format!("filler-{}", self.storage.operations());
        let filler = directory.create(&name, IoMode::Buffered).unwrap();
        let room = directory.room().unwrap().available;
        if room > free * PAGE {
            filler.reserve(0, room - free * PAGE).unwrap();
            filler.sync().unwrap();
        }
        directory.sync().unwrap();
        assert_eq!(directory.room().unwrap().available, (free * PAGE).min(room));
    }

    /// The names of the files in the disk's folder.
    fn names(storage: &SimulatedDisk) -> Vec<String> {
        folder(storage, "a").directory().list().unwrap()
    }
}

fn folder(storage: &SimulatedDisk, name: &str) -> Folder {
    Sub::folder(&storage.directory(), name)
}

/// Simulates another program that takes all free space during long operations.
impl Progress for Machine {
    fn update(&self, _: u64, _: u64) {
        // Removing the list of snapshots would free space for a record.
        let _ = folder(&self.storage, "a").directory().remove("vm.vmsd");
        self.fill(0);
    }
}

/// Another program that also takes the space reserved for a record, so that the reservation has no effect.
struct Greedy<'a>(&'a Machine);

impl Progress for Greedy<'_> {
    fn update(&self, done: u64, total: u64) {
        let _ = folder(&self.0.storage, "a").directory().remove("lamina.spare.lamina-new");
        self.0.update(done, total);
    }
}

/// Attempts merges and a snapshot. Each has `free` pages of space at its beginning and none later. The merge down can
/// use the space that it reserved for its record; the merge up has lost that space.
fn half_done(machine: &Machine, free: u64) {
    let merge = || machine.disk.delete_snapshot("second", Some(Direction::Down), machine);
    let fill_up = || machine.disk.delete_snapshot("first", Some(Direction::Up), &Greedy(machine));
    let snapshot = || machine.disk.snapshot(&NewSnapshot::named("late")).map(drop);
    let attempts: [&dyn Fn() -> Result<(), Error>; 3] =
        if free.is_multiple_of(2) { [&merge, &fill_up, &snapshot] } else { [&snapshot, &fill_up, &merge] };
    for attempt in attempts {
        machine.fill(free);
        let outcome = attempt();
        assert!(outcome.is_ok() || outcome.is_err_and(|error| error.kind() == ErrorKind::NoSpace));
        machine.fill(0);
    }
}

#[test]
fn a_disk_is_deleted_on_a_full_file_system() {
    let mut left_something = 0;
    for delta in DELTAS {
        for kind in KINDS.into_iter().chain(OTHER_BASES) {
            for free in 0..20 {
                let machine = Machine::new(kind, delta, 11);
                half_done(&machine, free);
                left_something += u32::from(machine.disk.record().pending.is_some());
                machine.disk.delete().unwrap();
                assert_eq!(Machine::names(&machine.storage), Vec::<String>::new(), "{kind:?} {delta:?}, {free}");
            }
        }
    }
    println!("{left_something} deletions of disks with a pending operation");
    assert!(left_something > 0, "no operation failed for lack of space and stayed pending");
}

#[test]
fn a_deletion_on_a_full_file_system_survives_power_cuts() {
    let (mut kept, mut unfinished, mut finished) = (0, 0, 0);
    let histories = DELTAS.into_iter().flat_map(|delta| [0, 8, 12, 0, 8, 12].map(|free| (delta, free)));
    for ((delta, free), seed) in histories.zip((0..).step_by(100)) {
        for cut in 0.. {
            let machine = Machine::new(ImageKind::Thin, delta, seed + cut);
            half_done(&machine, free);
            let content = read(&machine.disk.chain().unwrap());
            machine.storage.cut_after(machine.storage.operations() + cut);
            let outcome = machine.disk.delete();
            if !machine.storage.is_off() {
                outcome.unwrap();
                break;
            }
            let storage = machine.storage.crash();
            match Disk::open(folder(&storage, "a"), &options(2)) {
                Ok(disk) => {
                    kept += 1;
                    // Without space, the pending operation stays pending, and the disk can be read meanwhile.
                    assert!(read(&disk.chain().unwrap()) == content, "{delta:?}, cut {cut}");
                    unfinished += u32::from(disk.record().pending.is_some());
                    if cut % 2 == 1 {
                        let directory = storage.directory();
                        for name in directory.list().unwrap().iter().filter(|name| name.starts_with("filler")) {
                            directory.remove(name).unwrap();
                        }
                        assert!(read(&disk.chain().unwrap()) == content, "{delta:?}, cut {cut}");
                        assert_eq!(leaked(&disk), Vec::<String>::new());
                    }
                    disk.delete().unwrap();
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                    finished += 1;
                }
            }
            let names = Machine::names(&storage);
            assert!(names.is_empty() || names == ["lamina.lock"], "{delta:?}, cut {cut}: {names:?}");
        }
    }
    println!("{kept} disks kept, {unfinished} of them with a pending operation, {finished} deleted");
    assert!(kept > 10 && unfinished > 3 && finished > 100, "{kept} kept, {unfinished} unfinished, {finished} deleted");
}

#[test]
fn a_snapshot_is_deleted_if_the_target_has_space_for_its_data() {
    for delta in DELTAS {
        let machine = Machine::new(ImageKind::EagerZeroedThick, delta, 11);
        let content = read(&machine.disk.chain().unwrap());
        machine.fill(0);
        // The data is merged down into a thick base, which has the space.
        machine.disk.delete_snapshot("first", Some(Direction::Down), &NoProgress).unwrap();
        assert!(machine.storage.directory().room().unwrap().available > 0);
        assert!(Machine::names(&machine.storage).contains(&"vm.vmsd".to_owned()), "VMware's list was written again");
        assert_eq!(leaked(&machine.disk), Vec::<String>::new());
        machine.fill(0);
        machine.disk.consolidate(&NoProgress).unwrap();
        assert!(read(&machine.disk.chain().unwrap()) == content, "{delta:?}");
        assert_eq!(machine.disk.snapshots().len(), 0);
        assert_eq!(machine.disk.check(false, &NoProgress).unwrap().problems, Vec::<String>::new());
    }
}

/// A merge that was announced finds no free space at its end, and succeeds, because it has reserved the space for its
/// record.
#[test]
fn a_merge_reserves_space_for_its_record_before_it_begins() {
    for (delta, seed) in DELTAS.into_iter().zip(11..) {
        let (mut merged, mut refused) = (0, 0);
        for free in 0..6 {
            for with_list in [true, false] {
                let machine = Machine::new(ImageKind::EagerZeroedThick, delta, seed);
                let content = read(&machine.disk.chain().unwrap());
                if !with_list {
                    folder(&machine.storage, "a").directory().remove("vm.vmsd").unwrap();
                }
                machine.fill(free);
                // The data is merged down into a thick base; another program takes all other space meanwhile.
                let outcome = machine.disk.delete_snapshot("first", Some(Direction::Down), &machine);
                let names: Vec<String> = machine.disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
                match outcome {
                    Ok(()) => {
                        merged += 1;
                        assert_eq!(names, ["second"], "{delta:?}, {free}");
                        assert_eq!(machine.disk.record().nodes.len(), 2, "{delta:?}, {free}");
                    }
                    Err(error) => {
                        refused += 1;
                        assert_eq!(error.kind(), ErrorKind::NoSpace, "{delta:?}, {free}: {error}");
                        assert_eq!(names, ["first", "second"], "{delta:?}, {free}: {error}");
                    }
                }
                assert!(read(&machine.disk.chain().unwrap()) == content, "{delta:?}, {free}");
                assert_eq!(leaked(&machine.disk), Vec::<String>::new(), "{delta:?}, {free}");
            }
        }
        assert!(merged > 4 && refused > 0, "{delta:?}: {merged} {refused}");
    }
}

/// A merge up into a target that already has space for the data finds no free space at its end, and succeeds, because
/// it has reserved the space for its record.
#[test]
fn a_merge_up_reserves_space_for_its_record_before_it_begins() {
    for (delta, seed) in DELTAS.into_iter().zip(11..) {
        let (mut merged, mut refused) = (0, 0);
        for free in 0..6 {
            for with_list in [true, false] {
                let machine = Machine::new(ImageKind::EagerZeroedThick, delta, seed);
                // The write hides all data of the snapshot's image, so nothing has to be copied.
                machine.write(5, 4);
                let content = read(&machine.disk.chain().unwrap());
                if !with_list {
                    folder(&machine.storage, "a").directory().remove("vm.vmsd").unwrap();
                }
                machine.fill(free);
                let outcome = machine.disk.delete_snapshot("second", Some(Direction::Up), &machine);
                let names: Vec<String> = machine.disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
                match outcome {
                    Ok(()) => {
                        merged += 1;
                        assert_eq!(names, ["first"], "{delta:?}, {free}");
                        assert_eq!(machine.disk.record().nodes.len(), 2, "{delta:?}, {free}");
                    }
                    Err(error) => {
                        refused += 1;
                        assert_eq!(error.kind(), ErrorKind::NoSpace, "{delta:?}, {free}: {error}");
                        assert_eq!(names, ["first", "second"], "{delta:?}, {free}: {error}");
                        assert_eq!(machine.disk.record().pending, None, "{delta:?}, {free}: {error}");
                    }
                }
                assert!(read(&machine.disk.chain().unwrap()) == content, "{delta:?}, {free}");
                assert_eq!(leaked(&machine.disk), Vec::<String>::new(), "{delta:?}, {free}");
            }
        }
        assert!(merged > 4 && refused > 0, "{delta:?}: {merged} {refused}");
    }
}

#[test]
fn a_merge_without_space_for_the_data_leaves_the_disk_unchanged() {
    for delta in &DELTAS[..2] {
        let machine = Machine::new(ImageKind::Thin, *delta, 11);
        let content = read(&machine.disk.chain().unwrap());
        machine.fill(0);
        let refused = machine.disk.delete_snapshot("second", Some(Direction::Down), &NoProgress).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
        let names: Vec<String> = machine.disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
        assert_eq!(names, ["first", "second"], "{delta:?}");
        assert_eq!(machine.disk.record().pending, None);
        assert!(read(&machine.disk.chain().unwrap()) == content, "{delta:?}");
        let Machine { storage, disk, options } = machine;
        disk.close().unwrap();
        drop(disk);
        let disk = Disk::open(folder(&storage, "a"), &options).unwrap();
        assert!(read(&disk.chain().unwrap()) == content, "{delta:?}");
        disk.delete().unwrap();
        assert_eq!(Machine::names(&storage), Vec::<String>::new());
    }
}

/// The free space is little more than the data needs. The check before a merge also counts the metadata that the merge
/// writes.
#[test]
fn with_any_free_space_a_snapshot_is_deleted_or_unchanged() {
    let (mut deleted, mut left) = (0, 0);
    for (delta, seed) in DELTAS.into_iter().zip(11..) {
        for free in 0..48 {
            let machine = Machine::new(ImageKind::Thin, delta, seed);
            let content = read(&machine.disk.chain().unwrap());
            machine.fill(free);
            let outcome = machine.disk.delete_snapshot("second", Some(Direction::Down), &NoProgress);
            let names: Vec<String> = machine.disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
            match outcome {
                Ok(()) => {
                    deleted += 1;
                    assert_eq!(names, ["first"], "{delta:?}, {free}");
                }
                Err(error) => {
                    left += 1;
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{delta:?}, {free}: {error}");
                    assert_eq!(names, ["first", "second"], "{delta:?}, {free}: {error}");
                }
            }
            assert!(read(&machine.disk.chain().unwrap()) == content, "{delta:?}, {free}");
        }
    }
    assert!(deleted > 10 && left > 10, "{deleted} {left}");
}

/// The file system reports more free space than it really has.
#[test]
fn a_merge_into_overstated_free_space_leaves_the_disk_unchanged() {
    for delta in &DELTAS[..2] {
        let machine = Machine::new(ImageKind::Thin, *delta, 12);
        (5..10).for_each(|piece| machine.write(piece * 4, 5));
        let content = read(&machine.disk.chain().unwrap());
        machine.fill(6);
        machine.storage.overstate_room(32 << 20);
        let refused = machine.disk.delete_snapshot("second", Some(Direction::Down), &NoProgress).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace, "{delta:?}: {refused}");
        let names: Vec<String> = machine.disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
        assert_eq!(names, ["first", "second"], "{delta:?}: {refused}");
        assert_eq!(leaked(&machine.disk), Vec::<String>::new());
        machine.storage.set_capacity(128 << 20);
        machine.disk.delete_snapshot("second", Some(Direction::Down), &NoProgress).unwrap();
        assert!(read(&machine.disk.chain().unwrap()) == content, "{delta:?}");
        assert_eq!(machine.disk.check(false, &NoProgress).unwrap().problems, Vec::<String>::new());
    }
}

/// In the target, each range needs a new table, which is larger than the range.
#[test]
fn a_merge_without_space_for_tables_leaves_the_disk_unchanged() {
    const PIECES: u64 = 20;
    for delta in [DeltaFormat::VmfsSparse, DeltaFormat::SeSparse, DeltaFormat::VsanSparse] {
        let storage = SimulatedDisk::new(3, SimulatedOptions { capacity: 64 << 20, ..SimulatedOptions::default() });
        let adapter = Adapter::LsiLogic;
        let new = NewDisk { name: "vm".into(), capacity: 1 << 30, kind: ImageKind::Thin, delta: Some(delta), adapter };
        let disk = Disk::create(folder(&storage, "a"), &new, &options(1), &NoProgress).unwrap();
        for name in ["first", "second"] {
            disk.snapshot(&NewSnapshot::named(name)).unwrap();
        }
        let chain = disk.chain().unwrap();
        (0..PIECES).for_each(|piece| chain.write(piece << 25, &[7; PAGE as usize]).unwrap());
        chain.flush().unwrap();
        // The free space is one and a half times the payload.
        let directory = storage.directory();
        let filler = directory.create("filler", IoMode::Buffered).unwrap();
        filler.reserve(0, directory.room().unwrap().available - PIECES * PAGE * 3 / 2).unwrap();
        let refused = disk.delete_snapshot("second", Some(Direction::Down), &NoProgress).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
        let names: Vec<String> = disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
        assert_eq!(names, ["first", "second"], "{delta:?}: {refused}");
        filler.set_len(0).unwrap();
        filler.sync().unwrap();
        disk.delete_snapshot("second", Some(Direction::Down), &NoProgress).unwrap();
        let mut found = [0; PAGE as usize];
        for piece in 0..PIECES {
            chain.read(piece << 25, &mut found).unwrap();
            assert_eq!(found, [7; PAGE as usize], "{delta:?}");
        }
    }
}

#[test]
fn a_clone_and_its_parent_are_deleted_on_a_full_file_system() {
    let machine = Machine::new(ImageKind::Thin, DELTAS[1], 11);
    let clone = machine.disk.linked_clone("first", folder(&machine.storage, "c"), "copy", &machine.options).unwrap();
    machine.fill(0);
    let refused = Arc::clone(&machine.disk).delete().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    clone.delete().unwrap();
    machine.fill(0);
    machine.disk.delete().unwrap();
    let names = machine.storage.directory().list().unwrap();
    assert!(names.iter().all(|name| name.starts_with("filler")), "{names:?}");
}

/// Checks that a chain can be used without free space. Pages 7 to 10 already have grains, so they can be written.
fn goes_on_without_room(disk: &Disk, content: &mut [u8], byte: u8) {
    let chain = disk.chain().unwrap();
    chain.write(7 * PAGE, &[byte; 4 * PAGE as usize]).unwrap();
    content[7 * PAGE as usize..11 * PAGE as usize].fill(byte);
    chain.flush().unwrap();
    // The write may use space that was reserved before.
    let range = 40 * PAGE as usize..44 * PAGE as usize;
    match chain.write(40 * PAGE, &[byte; 4 * PAGE as usize]) {
        Ok(()) => content[range].fill(byte),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            chain.read(40 * PAGE, &mut content[range]).unwrap();
        }
    }
    chain.discard(0, 7 * PAGE).unwrap();
    chain.discard(11 * PAGE, CAPACITY - 11 * PAGE).unwrap();
    chain.flush().unwrap();
    let found = read(&chain);
    assert!(found.iter().zip(&*content).all(|(found, before)| found == before || *found == 0));
    content.copy_from_slice(&found);
}

#[test]
fn a_disk_is_written_opened_and_closed_on_a_full_file_system() {
    for delta in DELTAS {
        for kind in KINDS.into_iter().chain(OTHER_BASES) {
            let machine = Machine::new(kind, delta, 11);
            let mut content = read(&machine.disk.chain().unwrap());
            machine.fill(0);
            goes_on_without_room(&machine.disk, &mut content, 5);
            machine.write_where_it_was(6, &mut content);
            machine.fill(0);
            let Machine { storage, mut disk, options } = machine;
            for byte in 10..14 {
                disk.close().unwrap();
                drop(disk);
                let machine = Machine {
                    storage: storage.clone(),
                    disk: Disk::open(folder(&storage, "a"), &options).unwrap(),
                    options: options.clone(),
                };
                assert!(read(&machine.disk.chain().unwrap()) == content, "{kind:?} {delta:?}");
                machine.fill(0);
                machine.write_where_it_was(byte, &mut content);
                disk = machine.disk;
            }
            let names = storage.directory().list().unwrap();
            for name in names.iter().filter(|name| name.starts_with("filler")) {
                storage.directory().remove(name).unwrap();
            }
            storage.directory().sync().unwrap();
            let chain = disk.chain().unwrap();
            chain.write(20 * PAGE, &[99; PAGE as usize]).unwrap();
            content[20 * PAGE as usize..21 * PAGE as usize].fill(99);
            disk.delete_snapshot("first", None, &NoProgress).unwrap();
            disk.delete_snapshot("second", None, &NoProgress).unwrap();
            assert!(read(&chain) == content, "{kind:?} {delta:?}");
            assert_eq!(disk.check(false, &NoProgress).unwrap().problems, Vec::<String>::new());
            disk.delete().unwrap();
        }
    }
}

type Operation = fn(&Disk) -> Result<(), Error>;

/// Merges and snapshots that a power cut interrupts on a file system with free space. The file system is full when the
/// disk is opened again.
#[test]
fn a_disk_with_an_interrupted_operation_opens_on_a_full_file_system() {
    let operations: [Operation; 4] = [
        |disk| disk.snapshot(&NewSnapshot::named("late")).map(drop),
        |disk| disk.delete_snapshot("second", Some(Direction::Down), &NoProgress),
        |disk| disk.delete_snapshot("first", Some(Direction::Up), &NoProgress),
        |disk| disk.consolidate(&NoProgress),
    ];
    let (mut opened, mut unfinished) = (0, 0);
    for (delta, kind) in DELTAS.into_iter().zip([ImageKind::Thin, ImageKind::MonolithicSparse, ImageKind::SplitSparse])
    {
        for operation in operations {
            for cut in 0.. {
                let machine = Machine::new(kind, delta, 300 + cut);
                let mut content = read(&machine.disk.chain().unwrap());
                machine.storage.cut_after(machine.storage.operations() + cut);
                let outcome = operation(&machine.disk);
                if !machine.storage.is_off() {
                    outcome.unwrap();
                    break;
                }
                let storage = machine.storage.crash();
                let directory = storage.directory();
                if cut % 2 == 0 {
                    // The removal of either file would free space for a record.
                    for name in ["vm.vmsd", "lamina.spare.lamina-new"] {
                        let _ = folder(&storage, "a").directory().remove(name);
                    }
                }
                let filler = directory.create("filler", IoMode::Buffered).unwrap();
                filler.reserve(0, directory.room().unwrap().available).unwrap();
                directory.sync().unwrap();
                let disk = Disk::open(folder(&storage, "a"), &options(2)).unwrap();
                let chain = disk.chain().unwrap_or_else(|error| panic!("{delta:?}, cut {cut}: {error}"));
                assert!(read(&chain) == content, "{delta:?}, cut {cut}");
                (opened, unfinished) = (opened + 1, unfinished + u32::from(disk.record().pending.is_some()));
                // The top level has grains for these pages, so this write needs no space. Only an interrupted snapshot
                // may have made a new top level, which has no grains: then the write may fail.
                match chain.write(7 * PAGE, &[77; 4 * PAGE as usize]).and_then(|()| chain.flush()) {
                    Ok(()) => content[7 * PAGE as usize..11 * PAGE as usize].fill(77),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}"),
                }
                assert!(read(&chain) == content, "{delta:?}, cut {cut}");
                drop(chain);
                disk.close().unwrap();
                drop((disk, filler));
                directory.remove("filler").unwrap();
                directory.sync().unwrap();
                let disk = Disk::open(folder(&storage, "a"), &options(3)).unwrap();
                assert!(read(&disk.chain().unwrap()) == content, "{delta:?}, cut {cut}");
                assert_eq!(disk.record().pending, None);
                assert_eq!(disk.check(false, &NoProgress).unwrap().problems, Vec::<String>::new());
                assert_eq!(leaked(&disk), Vec::<String>::new());
                disk.consolidate(&NoProgress).unwrap();
                assert!(read(&disk.chain().unwrap()) == content, "{delta:?}, cut {cut}");
            }
        }
    }
    println!("{opened} disks opened, {unfinished} of them with a pending operation");
    assert!(opened > 100 && unfinished > 10, "{opened} opened, {unfinished} unfinished");
}
