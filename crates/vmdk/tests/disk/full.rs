//! A file system without a free block: a disk can be deleted, also when an operation that found no room has left
//! something, and through power cuts at every step; so can its snapshots, where their data has room already.

use crate::world::{DELTAS, Sub, leaked, options, read};
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use chain::Watch;
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use std::sync::{Arc, OnceLock};
use vmdk::{DeltaFormat, Direction, Disk, Error, ErrorKind, NewDisk, NewSnapshot, Options};

const PAGE: u64 = 4096;
const CAPACITY: u64 = 256 << 10;

/// A machine with little room, and a disk on it with two snapshots and data in each level.
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
        // The other disk is a clone.
        options.folders = Some(Arc::new(move |uuid: &str| {
            Ok(Sub::folder(&found, if own.get().unwrap() == uuid { "a" } else { "c" }))
        }));
        let disk = Disk::create(folder(&storage, "a"), &new, &options, &()).unwrap();
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

    /// Leaves that many free pages.
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

    /// Names of what is in the disk's folder.
    fn names(storage: &SimulatedDisk) -> Vec<String> {
        folder(storage, "a").directory().list().unwrap()
    }
}

fn folder(storage: &SimulatedDisk, name: &str) -> Folder {
    Sub::folder(&storage.directory(), name)
}

/// Somebody else who takes all room that there is during long work.
impl Watch for Machine {
    fn progress(&self, _: u64, _: u64) {
        self.fill(0);
    }
}

/// A snapshot and a merge that find `free` pages, then nothing more: what do they leave?
fn half_done(machine: &Machine, free: u64) {
    let attempts: [&dyn Fn() -> Result<(), Error>; 2] =
        [&|| machine.disk.snapshot(&NewSnapshot::named("late")).map(drop), &|| {
            machine.disk.delete_snapshot("second", Some(Direction::Down), machine)
        }];
    for attempt in attempts {
        machine.fill(free);
        let outcome = attempt();
        assert!(outcome.is_ok() || outcome.is_err_and(|error| error.kind() == ErrorKind::NoSpace));
        machine.fill(0);
    }
}

#[test]
fn a_disk_is_deleted_where_there_is_no_room() {
    let mut left_something = 0;
    for delta in DELTAS {
        for kind in [ImageKind::Thin, ImageKind::EagerZeroedThick, ImageKind::MonolithicSparse] {
            for free in 0..8 {
                let machine = Machine::new(kind, delta, 11);
                half_done(&machine, free);
                left_something += u32::from(machine.disk.record().pending.is_some());
                machine.disk.delete().unwrap();
                assert_eq!(Machine::names(&machine.storage), Vec::<String>::new(), "{kind:?} {delta:?}, {free}");
            }
        }
    }
    println!("{left_something} deletions of what an operation had left");
    assert!(left_something > 0, "nothing ran out of room half way");
}

#[test]
fn a_deletion_without_room_survives_power_cuts() {
    let (mut kept, mut unsettled, mut finished) = (0, 0, 0);
    let histories = DELTAS.into_iter().flat_map(|delta| [0, 1, 3, 0, 1, 3].map(|free| (delta, free)));
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
                    if let Err(error) = disk.chain() {
                        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                        unsettled += 1;
                    }
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
    println!("{kept} kept, {unsettled} of them unsettled, {finished} deleted");
    assert!(kept > 10 && unsettled > 3 && finished > 100, "{kept} kept, {unsettled} unsettled, {finished} deleted");
}

#[test]
fn a_snapshot_is_deleted_where_its_data_has_room() {
    for delta in DELTAS {
        let machine = Machine::new(ImageKind::EagerZeroedThick, delta, 11);
        let content = read(&machine.disk.chain().unwrap());
        machine.fill(0);
        // Its data goes down into a base that is thick.
        machine.disk.delete_snapshot("first", Some(Direction::Down), &()).unwrap();
        assert!(machine.storage.directory().room().unwrap().available > 0);
        assert!(Machine::names(&machine.storage).contains(&"vm.vmsd".to_owned()), "the list is back");
        assert_eq!(leaked(&machine.disk), Vec::<String>::new());
        machine.fill(0);
        machine.disk.consolidate(&()).unwrap();
        assert!(read(&machine.disk.chain().unwrap()) == content, "{delta:?}");
        assert_eq!(machine.disk.snapshots().len(), 0);
        assert_eq!(machine.disk.check(false, &()).unwrap().problems, Vec::<String>::new());
    }
}

#[test]
fn a_snapshot_whose_data_has_no_room_leaves_the_disk_as_it_is() {
    for delta in &DELTAS[..2] {
        let machine = Machine::new(ImageKind::Thin, *delta, 11);
        let content = read(&machine.disk.chain().unwrap());
        machine.fill(0);
        let refused = machine.disk.delete_snapshot("second", Some(Direction::Down), &()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
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

#[test]
fn a_clone_and_its_parent_are_deleted_where_there_is_no_room() {
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
