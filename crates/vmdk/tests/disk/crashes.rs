//! Power cuts at random writes of every operation, in all delta formats. Afterwards the disk opens, every flushed byte
//! is there, every other sector has its old content or that of a later write, snapshots are unchanged, the operation is
//! complete or undone, and the record names every file.
//!
//! A seed determines a history: a disk with some snapshots, operations until the power is cut, then operations on the
//! disk as it was left. A guest's writes are made when a long operation reports progress.

use crate::world::{DELTAS, OTHER_BASES, Random, Sub, leaked, options};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use chain::Chain;
use error::{Error, ErrorKind};
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use vmdk::{DeltaFormat, Direction, Disk, NewDisk, NewSnapshot, Options};
use work::NoProgress;
use work::Progress;

const SECTOR: usize = 512;
/// Power cuts per history.
const CUTS: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Create,
    Snapshot,
    Revert,
    DeleteUp,
    DeleteDown,
    Delete,
    Consolidate,
    Inflate,
    PunchZeros,
    Wipe,
    Shrink,
    Clone,
    DeleteClone,
    Rename,
}

const ALL: [Operation; 14] = [
    Operation::Create,
    Operation::Snapshot,
    Operation::Revert,
    Operation::DeleteUp,
    Operation::DeleteDown,
    Operation::Delete,
    Operation::Consolidate,
    Operation::Inflate,
    Operation::PunchZeros,
    Operation::Wipe,
    Operation::Shrink,
    Operation::Clone,
    Operation::DeleteClone,
    Operation::Rename,
];

/// The state of the disk, and the states that are permitted after a cut.
struct World {
    random: Random,
    machine: SimulatedDisk,
    formats: Vec<DeltaFormat>,
    dead: bool,
    content: Vec<u8>,
    flushed: Vec<u8>,
    since: BTreeMap<usize, Vec<Vec<u8>>>,
    snapshots: BTreeMap<String, Vec<u8>>,
    /// Folders of clones, and the clones' content.
    clones: BTreeMap<String, Vec<u8>>,
    name: String,
    numbers: u32,
    // Possible results of the operation during which the power was cut.
    maybe_new: Option<String>,
    maybe_gone: BTreeSet<String>,
    maybe_head: Option<Vec<u8>>,
    maybe_clone: Option<(String, Vec<u8>)>,
    maybe_clone_gone: Option<String>,
    maybe_disk: Option<String>,
    maybe_name: Option<String>,
    cut_in: BTreeMap<Operation, u32>,
}

impl World {
    fn folder(&self, name: &str) -> Folder {
        Sub::folder(&self.machine.directory(), name)
    }

    /// Options that find a folder by the identity of the disk in it.
    fn options(&mut self) -> Options {
        let directory = self.machine.directory();
        let find = move |uuid: &str| {
            for prefix in prefixes(&directory.list().unwrap_or_default()) {
                let folder = Sub::folder(&directory, &prefix);
                let Ok(file) = folder.directory().open("lamina.disk", backend::IoMode::Buffered) else { continue };
                let mut text = vec![0; file.len().unwrap_or(0) as usize];
                if file.read_at(&mut text, 0).is_err() {
                    continue;
                }
                if String::from_utf8_lossy(&text).contains(&format!("\"uuid\": \"{uuid}\"")) {
                    // The first UUID in a record is the disk's own; those of other disks come later.
                    let text = String::from_utf8_lossy(&text).into_owned();
                    if text.find("\"uuid\"") == text.find(&format!("\"uuid\": \"{uuid}\"")) {
                        return Ok(folder);
                    }
                }
            }
            Err(Error::new(ErrorKind::NotFound, format!("no folder of {uuid}")))
        };
        Options { folders: Some(Arc::new(find)), ..options(self.random.next()) }
    }

    fn number(&mut self, prefix: &str) -> String {
        self.numbers += 1;
        format!("{prefix}{}", self.numbers)
    }

    fn act(&mut self, chain: &Chain) {
        if self.dead {
            return;
        }
        let capacity = self.content.len() as u64;
        let unit = *self.random.pick(&[1, 512, 4096]);
        let start = (self.random.below(capacity) / unit * unit) as usize;
        let end = ((start as u64 + unit + self.random.below(24_000) / unit * unit).min(capacity)) as usize;
        match self.random.below(10) {
            0..5 => {
                let mut bytes = vec![0; end - start];
                self.random.fill(&mut bytes);
                self.changed(start, &bytes);
                self.dead |= chain.write(start as u64, &bytes).is_err();
            }
            5..7 => {
                self.changed(start, &vec![0; end - start]);
                self.dead |= chain.zero(start as u64, (end - start) as u64, false).is_err();
            }
            7..9 => self.flush(chain),
            _ => {
                let mut out = vec![0xee; end - start];
                match chain.read(start as u64, &mut out) {
                    Ok(()) => assert!(out == self.content[start..end], "{start}..{end}"),
                    Err(_) => self.dead = true,
                }
            }
        }
    }

    fn flush(&mut self, chain: &Chain) {
        match chain.flush() {
            Ok(()) => self.settled(),
            Err(_) => self.dead = true,
        }
    }

    fn settled(&mut self) {
        self.flushed = self.content.clone();
        self.since.clear();
    }

    fn changed(&mut self, start: usize, bytes: &[u8]) {
        self.content[start..start + bytes.len()].copy_from_slice(bytes);
        for sector in start / SECTOR..(start + bytes.len()).div_ceil(SECTOR) {
            let now = self.content[sector * SECTOR..][..SECTOR].to_vec();
            self.since.entry(sector).or_default().push(now);
        }
    }

    /// Whether every sector has its flushed content or that of a later write.
    fn explains(&self, found: &[u8]) -> bool {
        found.chunks_exact(SECTOR).enumerate().all(|(sector, bytes)| {
            let old = &self.flushed[sector * SECTOR..][..SECTOR];
            bytes == old || self.since.get(&sector).is_some_and(|all| all.iter().any(|now| now == bytes))
        })
    }

    fn some_snapshot(&mut self) -> Option<String> {
        let index = self.random.below(self.snapshots.len() as u64) as usize;
        self.snapshots.keys().nth(index).cloned()
    }

    fn forget_maybes(&mut self) {
        self.maybe_new = None;
        self.maybe_gone.clear();
        self.maybe_head = None;
        self.maybe_clone = None;
        self.maybe_clone_gone = None;
        self.maybe_disk = None;
        self.maybe_name = None;
    }

    /// Restarts the machine with the storage after the cut, and checks everything.
    fn restart(&mut self) -> Arc<Disk> {
        self.machine = self.machine.crash();
        self.dead = false;
        let options = self.options();
        let disk = Disk::open(self.folder("a"), &options).unwrap();
        let chain = disk.chain().unwrap();
        let found = read_quiet(&chain);
        let reverted = self.maybe_head.as_ref().is_some_and(|head| *head == found);
        assert!(reverted || self.explains(&found), "the head has neither the flushed content nor one written after it");
        let names: BTreeSet<String> = disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
        for name in &names {
            let found = read_quiet(&disk.snapshot_chain(name).unwrap());
            match self.snapshots.get(name) {
                Some(content) => assert!(found == *content, "the content of snapshot {name} has changed"),
                None => assert!(self.maybe_new.as_ref() == Some(name) && self.explains(&found), "snapshot {name}"),
            }
            self.snapshots.insert(name.clone(), found);
        }
        for name in self.snapshots.keys() {
            assert!(names.contains(name) || self.maybe_gone.contains(name), "snapshot {name} is lost");
        }
        self.snapshots.retain(|name, _| names.contains(name));
        assert!(disk.name() == self.name || Some(disk.name()) == self.maybe_name);
        self.name = disk.name();
        assert_eq!(leaked(&disk), Vec::<String>::new());
        let checked = disk.check(false, &NoProgress).unwrap();
        // A hosted sparse table has a second copy, which may be older after a crash. The difference is no damage.
        let problems: Vec<_> =
            checked.problems.iter().filter(|problem| !problem.contains("from their copies")).collect();
        assert_eq!(problems, Vec::<&String>::new());
        // Next, the clones are checked.
        if let Some((folder, content)) = self.maybe_clone.take() {
            self.clones.insert(folder.clone(), content);
            self.maybe_clone_gone = Some(folder);
        }
        let expected: Vec<(String, Vec<u8>)> = self.clones.clone().into_iter().collect();
        for (folder, content) in expected {
            match Disk::open(self.folder(&folder), &options) {
                Ok(clone) => {
                    assert!(read_quiet(&clone.chain().unwrap()) == content, "clone {folder}");
                    assert_eq!(leaked(&clone), Vec::<String>::new());
                    clone.close().unwrap();
                }
                Err(error) => {
                    assert!(
                        error.kind() == ErrorKind::NotFound && self.maybe_clone_gone == Some(folder.clone()),
                        "{error}"
                    );
                    self.clones.remove(&folder);
                }
            }
        }
        if let Some(folder) = self.maybe_disk.take() {
            match Disk::open(self.folder(&folder), &options) {
                Ok(new) => {
                    assert!(read_quiet(&new.chain().unwrap()).iter().all(|byte| *byte == 0));
                    assert_eq!(leaked(&new), Vec::<String>::new());
                    new.delete().unwrap();
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
            }
        }
        let names = self.machine.directory().list().unwrap();
        for name in &names {
            let (prefix, file) = name.split_once(':').unwrap();
            let known = prefix == "a" || self.clones.contains_key(prefix) || file == "lamina.lock";
            assert!(known, "file '{name}' was not removed");
        }
        self.content = found;
        self.forget_maybes();
        self.flush(&chain);
        assert!(!self.dead);
        disk
    }
}

fn prefixes(names: &[String]) -> BTreeSet<String> {
    names.iter().filter_map(|name| Some(name.split_once(':')?.0.to_owned())).collect()
}

fn read_quiet(chain: &Chain) -> Vec<u8> {
    crate::world::read(chain)
}

/// A guest that writes during long operations.
struct Guest<'a> {
    world: &'a Mutex<World>,
    chain: Arc<Chain>,
    patience: Mutex<u32>,
}

impl Progress for Guest<'_> {
    fn update(&self, _done: u64, _total: u64) {
        let mut world = self.world.lock();
        if world.random.percent(50) {
            world.act(&self.chain);
        }
    }

    fn cancelled(&self) -> bool {
        if self.world.lock().dead {
            return true;
        }
        let mut patience = self.patience.lock();
        match *patience {
            0 => false,
            1 => true,
            _ => {
                *patience -= 1;
                false
            }
        }
    }
}

/// Performs one operation, and notes the states that are permitted after a cut in it.
fn perform(world: &Mutex<World>, disk: &Arc<Disk>, operation: Operation) -> Result<(), Error> {
    let chain = disk.chain()?;
    let patience = {
        let mut world = world.lock();
        if world.random.percent(15) { 1 + world.random.below(3) as u32 } else { 0 }
    };
    let guest = Guest { world, chain: Arc::clone(&chain), patience: Mutex::new(patience) };
    let pick = || world.lock().some_snapshot();
    match operation {
        Operation::Create => {
            let (folder, options, kind) = {
                let mut world = world.lock();
                let folder = world.number("n");
                world.maybe_disk = Some(folder.clone());
                let kind = *world.random.pick(&ImageKind::ALL);
                (folder, world.options(), kind)
            };
            let new =
                NewDisk { name: folder.clone(), capacity: 128 << 10, kind, delta: None, adapter: Adapter::LsiLogic };
            let home = world.lock().folder(&folder);
            let made = Disk::create(home, &new, &options, &NoProgress)?;
            made.delete()
        }
        Operation::Snapshot => {
            let (name, delta) = {
                let mut world = world.lock();
                let name = world.number("s");
                world.maybe_new = Some(name.clone());
                let formats = world.formats.clone();
                (name, *world.random.pick(&formats))
            };
            disk.snapshot(&NewSnapshot { delta: Some(delta), ..NewSnapshot::named(&name) })?;
            let mut world = world.lock();
            world.settled();
            let content = world.content.clone();
            world.snapshots.insert(name, content);
            Ok(())
        }
        Operation::Revert => {
            let Some(name) = pick() else { return Ok(()) };
            let content = world.lock().snapshots[&name].clone();
            world.lock().maybe_head = Some(content.clone());
            disk.revert(&name)?;
            let mut world = world.lock();
            world.content = content;
            world.settled();
            Ok(())
        }
        Operation::Delete | Operation::DeleteUp | Operation::DeleteDown => {
            let Some(name) = pick() else { return Ok(()) };
            world.lock().maybe_gone.insert(name.clone());
            let direction = match operation {
                Operation::DeleteUp => Some(Direction::Up),
                Operation::DeleteDown => Some(Direction::Down),
                _ => None,
            };
            let deleted = disk.delete_snapshot(&name, direction, &guest);
            let there = disk.snapshots().iter().any(|snapshot| snapshot.name == name);
            if deleted.is_ok() {
                assert!(!there);
            }
            if !world.lock().machine.is_off() && !there {
                world.lock().snapshots.remove(&name);
            }
            deleted
        }
        Operation::Consolidate => {
            let all: BTreeSet<String> = world.lock().snapshots.keys().cloned().collect();
            world.lock().maybe_gone = all;
            let merged = disk.consolidate(&guest);
            let names: BTreeSet<String> = disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
            if !world.lock().machine.is_off() {
                world.lock().snapshots.retain(|name, _| names.contains(name));
            }
            merged
        }
        Operation::Inflate => disk.inflate(&guest),
        Operation::PunchZeros => disk.punch_zeros(&guest).map(drop),
        Operation::Wipe => disk.wipe(&guest).map(drop),
        Operation::Shrink => disk.shrink(&guest).map(drop),
        Operation::Clone => {
            let Some(name) = pick() else { return Ok(()) };
            let (folder, options, content) = {
                let mut world = world.lock();
                if world.clones.len() >= 2 {
                    return Ok(());
                }
                let folder = world.number("c");
                let content = world.snapshots[&name].clone();
                world.maybe_clone = Some((folder.clone(), content.clone()));
                (folder, world.options(), content)
            };
            let home = world.lock().folder(&folder);
            let clone = disk.linked_clone(&name, home, &folder, &options)?;
            let chain = clone.chain()?;
            assert!(crate::world::read(&chain) == content);
            drop(chain);
            clone.close()?;
            world.lock().clones.insert(folder, content);
            Ok(())
        }
        Operation::DeleteClone => {
            let (folder, options) = {
                let mut world = world.lock();
                let Some(folder) = world.clones.keys().next().cloned() else { return Ok(()) };
                world.maybe_clone_gone = Some(folder.clone());
                (folder, world.options())
            };
            let home = world.lock().folder(&folder);
            Disk::open(home, &options)?.delete()?;
            world.lock().clones.remove(&folder);
            Ok(())
        }
        Operation::Rename => {
            let name = world.lock().number("name");
            world.lock().maybe_name = Some(name.clone());
            disk.rename(&name)?;
            world.lock().name = name;
            Ok(())
        }
    }
}

fn history(seed: u64, formats: &[DeltaFormat], counts: &mut BTreeMap<Operation, u32>) {
    let mut random = Random::new(seed);
    let machine = SimulatedDisk::new(random.next(), SimulatedOptions { unflushed_max: 256, ..Default::default() });
    let capacity = (64 << 10) + random.below(48) as usize * 4096;
    let kind = match random.below(5) {
        0 => ImageKind::Thin,
        1 => *random.pick(&[ImageKind::ZeroedThick, ImageKind::EagerZeroedThick]),
        2 => ImageKind::MonolithicSparse,
        _ => *random.pick(&OTHER_BASES),
    };
    let mut world = World {
        random,
        machine,
        formats: formats.to_vec(),
        dead: false,
        content: vec![0; capacity],
        flushed: vec![0; capacity],
        since: BTreeMap::new(),
        snapshots: BTreeMap::new(),
        clones: BTreeMap::new(),
        name: "vm".to_owned(),
        numbers: 0,
        maybe_new: None,
        maybe_gone: BTreeSet::new(),
        maybe_head: None,
        maybe_clone: None,
        maybe_clone_gone: None,
        maybe_disk: None,
        maybe_name: None,
        cut_in: BTreeMap::new(),
    };
    let new = NewDisk {
        name: "vm".to_owned(),
        capacity: capacity as u64,
        kind,
        delta: Some(formats[0]),
        adapter: Adapter::LsiLogic,
    };
    let options = world.options();
    let mut disk = Disk::create(world.folder("a"), &new, &options, &NoProgress).unwrap();
    for _ in 0..CUTS {
        let mut world_shared = Mutex::new(world);
        // The history begins with a chain of several levels.
        for _ in 0..world_shared.get_mut().random.below(3) {
            let chain = disk.chain().unwrap();
            for _ in 0..3 {
                world_shared.get_mut().act(&chain);
            }
            perform(&world_shared, &disk, Operation::Snapshot).unwrap();
            world_shared.get_mut().forget_maybes();
        }
        let inner = world_shared.get_mut();
        let within = *inner.random.pick(&[10, 30, 80, 200]);
        let count = inner.machine.operations() + inner.random.below(within);
        inner.machine.cut_after(count);
        while !world_shared.get_mut().machine.is_off() {
            let Ok(chain) = disk.chain() else { break };
            for _ in 0..world_shared.get_mut().random.below(4) {
                world_shared.get_mut().act(&chain);
            }
            drop(chain);
            if world_shared.get_mut().machine.is_off() {
                break;
            }
            world_shared.get_mut().forget_maybes();
            let operation = *world_shared.get_mut().random.pick(&ALL);
            let outcome = perform(&world_shared, &disk, operation);
            let inner = world_shared.get_mut();
            if inner.machine.is_off() {
                *inner.cut_in.entry(operation).or_default() += 1;
            } else if let Err(error) = outcome {
                let usual = [ErrorKind::Busy, ErrorKind::Unsupported, ErrorKind::Interrupted, ErrorKind::ReadOnly];
                assert!(usual.contains(&error.kind()), "{operation:?}: {error}");
            }
        }
        world = world_shared.into_inner();
        drop(disk);
        disk = world.restart();
    }
    for (operation, count) in world.cut_in {
        *counts.entry(operation).or_default() += count;
    }
}

fn histories(seeds: std::ops::Range<u64>, formats: &[DeltaFormat]) {
    let mut counts = BTreeMap::new();
    for seed in seeds {
        let run = std::panic::AssertUnwindSafe(|| history(seed, formats, &mut counts));
        std::panic::catch_unwind(run).unwrap_or_else(|_| panic!("seed {seed}, {formats:?}"));
    }
    println!("power cuts by operation: {counts:?}");
    for operation in
        [Operation::Snapshot, Operation::DeleteUp, Operation::DeleteDown, Operation::Revert, Operation::Consolidate]
    {
        assert!(
            counts.get(&operation).is_some_and(|count| *count > 3),
            "too few power cuts during {operation:?}: {counts:?}"
        );
    }
}

#[test]
fn vmfssparse_survives_power_cuts() {
    histories(0..350, &DELTAS[..1]);
}

#[test]
fn sesparse_survives_power_cuts() {
    histories(1000..1350, &DELTAS[1..2]);
}

#[test]
fn vsansparse_survives_power_cuts() {
    histories(2000..2350, &DELTAS[2..]);
}

#[test]
fn mixed_deltas_survive_power_cuts() {
    histories(3000..3100, &DELTAS);
}
