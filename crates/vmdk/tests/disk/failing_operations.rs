//! Operations on failing media: snapshots, reverts, merges on the head's branch and on other branches, wiping,
//! shrinking. Afterwards any part of the page cache may be evicted. A read of a block of the head or of a snapshot
//! returns its content or fails. When the device works again, and after a power cut, every read returns the content.

use crate::world::{DELTAS, Random, leaked, options};
use backend::IoMode;
use backend::simulated::{Fault, SimulatedDisk, SimulatedOptions};
use chain::Chain;
use error::{Error, ErrorKind};
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use std::collections::BTreeMap;
use std::sync::Arc;
use testkit::environment::number;
use vmdk::{DeltaFormat, Direction, Disk, NewDisk, NewSnapshot, snapshot_group};
use work::NoProgress;

const BLOCK: usize = 4096;
const BLOCKS: usize = 512;

/// Further seeds: they detect mutants that the first seeds do not detect.
const SEEDS: [u64; 3] = [172, 376, 651];

/// The value of each block that a chain shows.
type Blocks = Vec<u8>;

struct World {
    machine: SimulatedDisk,
    disk: Arc<Disk>,
    random: Random,
    /// The contents that the head may have: one, or two after a failed revert.
    head: Vec<Blocks>,
    snapshots: BTreeMap<String, Blocks>,
    numbers: u32,
    what: String,
    trace: Vec<String>,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}:\n  {}", self.what, self.trace.join("\n  "));
        }
    }
}

/// The bytes of each block of a chain; `None` for a block that cannot be read.
fn read_bytes(chain: &Chain) -> Vec<Option<Vec<u8>>> {
    let mut all = vec![0xee; BLOCKS * BLOCK];
    let whole = chain.read(0, &mut all).is_ok();
    let bytes = |(block, bytes): (usize, &mut [u8])| {
        let done = whole || chain.read((block * BLOCK) as u64, bytes).is_ok();
        done.then(|| bytes.to_vec())
    };
    all.chunks_exact_mut(BLOCK).enumerate().map(bytes).collect()
}

/// The value of each block, of which all bytes are equal; `None` for a block that cannot be read.
fn read(chain: &Chain) -> Vec<Option<u8>> {
    let value = |bytes: Vec<u8>| {
        assert!(bytes == [bytes[0]; BLOCK], "a block is torn");
        bytes[0]
    };
    read_bytes(chain).into_iter().map(|bytes| bytes.map(value)).collect()
}

/// Whether the blocks have their expected values; with `whole`, each of them must have been read.
fn fits(found: &[Option<u8>], expected: &Blocks, whole: bool) -> bool {
    found.iter().zip(expected).all(|(found, expected)| found.map_or(!whole, |found| found == *expected))
}

fn evict(machine: &SimulatedDisk, mut which: impl FnMut(&str) -> bool) {
    let directory = machine.directory();
    for name in directory.list().unwrap().into_iter().filter(|name| which(name)) {
        directory.open(&name, IoMode::Buffered).unwrap().forget_cached().unwrap();
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let kinds = [ImageKind::Thin, ImageKind::ZeroedThick, ImageKind::MonolithicSparse];
        let (kind, delta) = (kinds[(seed / 3 % 3) as usize], DELTAS[(seed % 3) as usize]);
        let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
        let new = NewDisk {
            name: "vm".into(),
            capacity: (BLOCKS * BLOCK) as u64,
            kind,
            delta: Some(delta),
            adapter: Adapter::LsiLogic,
        };
        let disk = Disk::create(Folder::plain(machine.directory()), &new, &options(seed), &NoProgress).unwrap();
        let what = format!("seed {seed}, {kind:?}, {delta:?}");
        let (random, head) = (Random::new(seed), vec![vec![0; BLOCKS]]);
        let mut world =
            Self { machine, disk, random, head, snapshots: BTreeMap::new(), numbers: 0, what, trace: Vec::new() };
        for _ in 0..3 {
            world.write("the beginning");
            world.snapshot();
        }
        world.write("the beginning");
        world
    }

    /// Writes and zeros, and a flush.
    fn write(&mut self, after: &str) {
        let context = format!("{}, {after}", self.what);
        let chain = self.disk.chain().unwrap();
        let mut head = self.head.pop().unwrap();
        for _ in 0..1 + self.random.below(6) {
            let start = self.random.below(BLOCKS as u64) as usize;
            let end = (start + 1 + self.random.below(40) as usize).min(BLOCKS);
            let value = if self.random.percent(80) { 1 + self.random.below(255) as u8 } else { 0 };
            let (offset, length) = ((start * BLOCK) as u64, (end - start) * BLOCK);
            match value {
                0 => chain.zero(offset, length as u64, false),
                _ => chain.write(offset, &vec![value; length]),
            }
            .unwrap_or_else(|error| panic!("{context}: {error}"));
            head[start..end].fill(value);
        }
        chain.flush().unwrap_or_else(|error| panic!("{context}: {error}"));
        self.head = vec![head];
    }

    fn name(&mut self) -> String {
        self.numbers += 1;
        format!("s{}", self.numbers)
    }

    fn snapshot(&mut self) {
        let name = self.name();
        self.disk.snapshot(&NewSnapshot::named(&name)).unwrap();
        self.snapshots.insert(name, self.head[0].clone());
    }

    fn some_snapshot(&mut self) -> Option<String> {
        let names: Vec<String> = self.snapshots.keys().cloned().collect();
        names.get(self.random.below(names.len() as u64) as usize).cloned()
    }

    /// One operation, which may fail.
    fn operate(&mut self) -> String {
        let (name, choice) = match self.some_snapshot() {
            Some(name) => (name, self.random.below(10)),
            None => (String::new(), 0),
        };
        let (operation, done) = match choice {
            0 => {
                let name = self.name();
                self.snapshots.insert(name.clone(), self.head[0].clone());
                ("snapshot", self.disk.snapshot(&NewSnapshot::named(&name)).map(drop))
            }
            1 => {
                self.head.push(self.snapshots[&name].clone());
                let done = self.disk.revert(&name);
                if done.is_ok() {
                    self.head.remove(0);
                }
                ("revert", done)
            }
            2..5 => ("delete up", self.disk.delete_snapshot(&name, Some(Direction::Up), &NoProgress)),
            5..8 => ("delete down", self.disk.delete_snapshot(&name, Some(Direction::Down), &NoProgress)),
            8 => ("wipe", self.disk.wipe(&NoProgress).and_then(|_| self.disk.shrink(&NoProgress)).map(drop)),
            _ => ("consolidate", self.disk.consolidate(&NoProgress)),
        };
        let after = format!("{operation} {name}: {done:?}");
        self.trace.push(after.clone());
        after
    }

    fn fail(&mut self) {
        let times = *self.random.pick(&[1, 1, 2, 5, 1 << 40]);
        let soon = self.random.below(30);
        let fault = if self.random.percent(70) { Fault::Sync } else { *self.random.pick(&Fault::ALL) };
        match self.random.below(8) {
            0 => {
                self.trace.push(format!("operation {soon} fails"));
                self.machine.fail_operation(self.machine.operations() + soon);
            }
            _ => {
                self.trace.push(format!("{fault:?} fails after {soon}, {times} times"));
                self.machine.fail_requests(fault, soon, times);
            }
        }
    }

    /// Evicts parts of the page cache, as the kernel does when it needs memory.
    fn evict(&mut self) {
        let random = &mut self.random;
        evict(&self.machine, |_| random.percent(50));
    }

    /// Compares all blocks; with `whole`, each of them must be readable.
    fn verify(&mut self, whole: bool, after: &str) {
        let context = format!("{}, {after}, whole {whole}", self.what);
        let listed: Vec<String> = self.disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
        match self.disk.chain() {
            Ok(chain) => {
                let found = read(&chain);
                self.head.retain(|head| fits(&found, head, whole));
                assert!(!self.head.is_empty(), "{context}: the head");
                if whole {
                    self.head.truncate(1);
                }
            }
            Err(error) => assert!(!whole, "{context}: the head: {error}"),
        }
        for (name, expected) in self.snapshots.iter().filter(|(name, _)| listed.contains(name)) {
            match self.disk.snapshot_chain(name) {
                Ok(chain) => {
                    let found = read(&chain);
                    let differ = found.iter().zip(expected).enumerate();
                    let differ = differ.filter(|(_, (found, expected))| **found != Some(**expected));
                    let differ: Vec<_> = differ.take(4).collect();
                    assert!(fits(&found, expected, whole), "{context}: snapshot {name}: {differ:?}");
                }
                Err(error) => assert!(!whole, "{context}: snapshot {name}: {error}"),
            }
        }
        if whole {
            self.snapshots.retain(|name, _| listed.contains(name));
            assert_eq!(self.snapshots.len(), listed.len(), "{context}: {listed:?}");
        }
    }

    fn crash(&mut self) {
        self.trace.push("a power cut".into());
        self.machine = self.machine.crash();
        let disk = Disk::open(Folder::plain(self.machine.directory()), &options(2));
        self.disk = disk.unwrap_or_else(|error| panic!("{}: {error}", self.what));
    }
}

/// Returns whether the disk stopped, and whether the operation failed.
fn round(world: &mut World) -> (bool, bool, String) {
    world.fail();
    let after = world.operate();
    world.evict();
    world.verify(false, &after);
    world.machine.mend();
    let stopped = world.disk.stopped().is_some();
    if stopped {
        world.trace.push(format!("stopped: {:?}", world.disk.stopped()));
        world.disk.reopen().unwrap_or_else(|error| panic!("{}, {after}: {error}", world.what));
    }
    world.evict();
    world.verify(true, &after);
    (stopped, after.contains("Err"), after)
}

fn case(seed: u64) -> (u32, u32) {
    let mut world = World::new(seed);
    let (mut stopped, mut failed) = (0, 0);
    // After this revert, most of the snapshots are on other branches than the head.
    let first = world.snapshots.keys().next().cloned().unwrap();
    if !seed.is_multiple_of(4) {
        world.disk.revert(&first).unwrap();
        world.head = vec![world.snapshots[&first].clone()];
    }
    for _ in 0..6 {
        let (stop, fail, after) = round(&mut world);
        (stopped, failed) = (stopped + u32::from(stop), failed + u32::from(fail));
        if world.random.percent(40) {
            world.crash();
            world.verify(true, "a power cut");
        }
        world.write(&after);
        if world.random.percent(40) {
            world.snapshot();
        }
    }
    // The next operation finishes interrupted ones.
    world.operate();
    world.evict();
    world.verify(true, "operations");
    world.crash();
    world.verify(true, "the last power cut");
    (stopped, failed)
}

#[test]
fn after_failed_flushes_reads_return_data_of_the_medium_on_every_branch() {
    let (cases, first) = (number("LAMINA_CASES", 150), number("LAMINA_CASES_FROM", 0));
    let (mut stopped, mut failed) = (0, 0);
    for seed in SEEDS.into_iter().chain(first..first + cases) {
        let (stop, fail) = case(seed);
        (stopped, failed) = (stopped + stop, failed + fail);
    }
    println!("{cases} cases: {failed} operations failed, {stopped} stopped the disk");
    assert!(u64::from(failed) > cases && u64::from(stopped) > cases / 4, "{failed} {stopped}");
}

/// A merge up on another branch than the head's. After its flush has failed, the target looks complete in the page
/// cache, and another merge that relied on the page cache would remove the only copy.
#[test]
fn a_merge_on_another_branch_is_repeated_from_the_medium_after_a_failed_flush() {
    let mut failed = 0;
    for (seed, step) in (0..9).flat_map(|seed| (0..16).map(move |step| (seed, step))) {
        for direction in [Direction::Up, Direction::Down] {
            let delta: DeltaFormat = DELTAS[(seed % 3) as usize];
            let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
            let new = NewDisk {
                name: "vm".into(),
                capacity: (BLOCKS * BLOCK) as u64,
                kind: ImageKind::Thin,
                delta: Some(delta),
                adapter: Adapter::LsiLogic,
            };
            let disk = Disk::create(Folder::plain(machine.directory()), &new, &options(seed), &NoProgress).unwrap();
            let mut expected = vec![0; BLOCKS];
            for (value, name) in [(1, "a"), (2, "b"), (3, "c")] {
                let chain = disk.chain().unwrap();
                let range = 100 * usize::from(value)..100 * usize::from(value) + 60;
                chain.write((range.start * BLOCK) as u64, &vec![value; range.len() * BLOCK]).unwrap();
                expected[range].fill(value);
                disk.snapshot(&NewSnapshot::named(name)).unwrap();
            }
            disk.revert("a").unwrap();
            disk.chain().unwrap().flush().unwrap();
            machine.fail_requests(Fault::Sync, step, 1);
            let done = disk.delete_snapshot("b", Some(direction), &NoProgress);
            failed += u32::from(done.is_err());
            machine.mend();
            if disk.stopped().is_some() {
                disk.reopen().unwrap();
            }
            let context = format!("seed {seed}, {delta:?}, {direction:?}, flush {step}: {done:?}");
            // If the snapshot still exists, its deletion is repeated; otherwise another deletion finishes the pending
            // operation.
            match disk.snapshots().iter().any(|snapshot| snapshot.name == "b") {
                true => disk.delete_snapshot("b", Some(direction), &NoProgress).unwrap(),
                false => {
                    disk.snapshot(&NewSnapshot::named("d")).unwrap();
                    disk.delete_snapshot("d", None, &NoProgress).unwrap();
                }
            }
            drop(disk);
            let machine = machine.crash();
            let disk = Disk::open(Folder::plain(machine.directory()), &options(2)).unwrap();
            let chain = disk.snapshot_chain("c").unwrap_or_else(|error| panic!("{context}: {error}"));
            assert!(fits(&read(&chain), &expected, true), "{context}");
        }
    }
    assert!(failed > 60, "{failed}");
}

/// Wipes and shrinks change the tables of a level. After a failed flush, these tables may refer to grains that the
/// device does not have.
#[test]
fn after_a_failed_flush_of_work_on_a_level_reads_return_data_of_the_medium() {
    let cases = [DeltaFormat::VmfsSparse, DeltaFormat::SeSparse].into_iter().flat_map(|delta| {
        [false, true].into_iter().flat_map(move |below| (0..12).map(move |step| (delta, below, step)))
    });
    let mut failed = [0; 2];
    for (delta, below, step) in cases {
        let machine = SimulatedDisk::new(step, SimulatedOptions::default());
        let (kind, capacity) = (ImageKind::Thin, (BLOCKS * BLOCK) as u64);
        let new = NewDisk { name: "vm".into(), capacity, kind, delta: Some(delta), adapter: Adapter::LsiLogic };
        let disk = Disk::create(Folder::plain(machine.directory()), &new, &options(step), &NoProgress).unwrap();
        disk.snapshot(&NewSnapshot::named("first")).unwrap();
        let chain = disk.chain().unwrap();
        let mut expected = vec![0; BLOCKS];
        for (block, value) in (1..=200).enumerate() {
            chain.write((block * BLOCK) as u64, &[value; BLOCK]).unwrap();
            expected[block] = value;
        }
        chain.flush().unwrap();
        // Dead grains before live ones, and grains that contain only zeros.
        chain.zero(0, (80 * BLOCK) as u64, false).unwrap();
        chain.write((100 * BLOCK) as u64, &[0; 20 * BLOCK]).unwrap();
        expected[..80].fill(0);
        expected[100..120].fill(0);
        chain.flush().unwrap();
        drop(chain);
        if below {
            disk.snapshot(&NewSnapshot::named("second")).unwrap();
        }
        machine.fail_requests(Fault::Sync, step, 1);
        let wiped = if delta == DeltaFormat::SeSparse { disk.wipe(&NoProgress).map(drop) } else { Ok(()) };
        let done = wiped.and_then(|()| disk.shrink(&NoProgress).map(drop));
        let context = format!("{delta:?}, below {below}, flush {step}: {done:?}");
        failed[usize::from(below)] += u32::from(done.is_err());
        evict(&machine, |_| true);
        if let Ok(chain) = disk.chain() {
            assert!(fits(&read(&chain), &expected, false), "{context}");
        }
        machine.mend();
        if disk.stopped().is_some() {
            disk.reopen().unwrap();
        }
        evict(&machine, |_| true);
        assert!(fits(&read(&disk.chain().unwrap()), &expected, true), "{context}");
    }
    assert!(failed.iter().all(|failed| *failed > 3), "{failed:?}");
}

/// A snapshot of data that a failed flush has lost: the page cache may still have it. Reads of the snapshot always
/// return the same content: while `disk reopen` fails, and in a restarted process.
#[test]
fn a_snapshot_whose_flush_failed_reads_data_of_the_medium() {
    let (mut read_ones, mut lost) = (0, 0);
    for (seed, step) in (0..30).flat_map(|seed| (0..12).map(move |step| (seed, step))) {
        let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
        let delta: DeltaFormat = DELTAS[(seed % 3) as usize];
        let new = NewDisk {
            name: "vm".into(),
            capacity: (BLOCKS * BLOCK) as u64,
            kind: ImageKind::Thin,
            delta: Some(delta),
            adapter: Adapter::LsiLogic,
        };
        let disk = Disk::create(Folder::plain(machine.directory()), &new, &options(seed), &NoProgress).unwrap();
        disk.snapshot(&NewSnapshot::named("first")).unwrap();
        let chain = disk.chain().unwrap();
        chain.write(0, &vec![1; 8 * BLOCK]).unwrap();
        chain.flush().unwrap();
        chain.write(0, &vec![2; 4 * BLOCK]).unwrap();
        chain.write((20 * BLOCK) as u64, &vec![2; 4 * BLOCK]).unwrap();
        drop(chain);
        machine.fail_requests(Fault::Sync, step, if seed.is_multiple_of(2) { 1 } else { 1 << 40 });
        let done = disk.snapshot(&NewSnapshot::named("s"));
        let context = format!("seed {seed}, {delta:?}, flush {step}: {done:?}");
        if done.is_ok() || !disk.snapshots().iter().any(|snapshot| snapshot.name == "s") {
            continue;
        }
        let mut shown = None;
        let mut look = |disk: &Disk, when: &str| {
            let Ok(chain) = disk.snapshot_chain("s") else { return };
            let found = read_bytes(&chain);
            let before = shown.get_or_insert_with(|| found.clone());
            assert!(*before == found, "{context}: {when}");
            read_ones += 1;
            lost += u32::from(found[20].as_ref().is_none_or(|bytes| bytes[..] != [2; BLOCK]));
        };
        look(&disk, "after the failure");
        evict(&machine, |_| true);
        look(&disk, "later");
        let disk = match seed % 3 {
            0 => {
                let _ = disk.reopen();
                disk
            }
            1 => {
                drop(disk);
                let open = || Disk::open(Folder::plain(machine.directory()), &options(2));
                // The opening may need to flush the folder of its record.
                open()
                    .or_else(|_| {
                        machine.mend();
                        open()
                    })
                    .unwrap_or_else(|error| panic!("{context}: {error}"))
            }
            _ => disk,
        };
        look(&disk, "after another opening");
        machine.mend();
        look(&disk, "with a medium that works");
        evict(&machine, |_| true);
        look(&disk, "later again");
        if disk.stopped().is_some() {
            disk.reopen().unwrap();
        }
        look(&disk, "after the disk was opened again");
        drop(disk);
        let machine = machine.crash();
        look(&Disk::open(Folder::plain(machine.directory()), &options(2)).unwrap(), "after a power cut");
    }
    assert!(read_ones > 100 && lost > 20, "{read_ones} {lost}");
}

/// The reopening has flushed and evicted every file before it fails. What it has written after that may be in the page
/// cache only, so a reader of a snapshot flushes and evicts the files again.
#[test]
fn readers_of_a_snapshot_do_not_rely_on_the_page_cache_after_a_failed_reopening() {
    let machine = SimulatedDisk::new(1, SimulatedOptions::default());
    let (kind, delta) = (ImageKind::Thin, Some(DeltaFormat::VmfsSparse));
    let new = NewDisk { name: "vm".into(), capacity: 1 << 20, kind, delta, adapter: Adapter::LsiLogic };
    let disk = Disk::create(Folder::plain(machine.directory()), &new, &options(1), &NoProgress).unwrap();
    disk.snapshot(&NewSnapshot::named("s")).unwrap();
    let chain = disk.chain().unwrap();
    chain.write(0, &[1; 4096]).unwrap();
    machine.fail_syncs(1);
    chain.flush().unwrap_err();
    drop(chain);
    // After the record was read, the write that marks the head as in use fails.
    machine.fail_requests(Fault::Write, 0, 1);
    assert_eq!(disk.reopen().unwrap_err().kind(), ErrorKind::Io);
    let before = machine.operations();
    drop(disk.snapshot_chain("s").unwrap());
    assert!(machine.operations() > before, "no file was flushed");
    disk.reopen().unwrap();
}

/// The snapshot is in the record, the group fails, and the record cannot be written to undo the snapshot. Writes go on
/// in the old head, so the disk shows no snapshot. The next operation, or closing the disk, removes it from the record;
/// after a power cut, the opened disk has a complete snapshot of its last content.
#[test]
fn a_failed_snapshot_that_cannot_be_undone_is_undone_later() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Next {
        Operation,
        Close,
        PowerCut,
    }
    let names = |disk: &Disk| disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect::<Vec<_>>();
    let content = |chain: &Chain| read(chain)[0];
    let none = Vec::<String>::new();
    for (seed, next) in (0..9).flat_map(|seed| [Next::Operation, Next::Close, Next::PowerCut].map(|next| (seed, next)))
    {
        let context = format!("seed {seed}, {next:?}");
        let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
        let (kind, delta) = (ImageKind::Thin, Some(DELTAS[(seed % 3) as usize]));
        let capacity = (BLOCKS * BLOCK) as u64;
        let new = NewDisk { name: "vm".into(), capacity, kind, delta, adapter: Adapter::LsiLogic };
        let disk = Disk::create(Folder::plain(machine.directory()), &new, &options(seed), &NoProgress).unwrap();
        let chain = disk.chain().unwrap();
        chain.write(0, &[1; BLOCK]).unwrap();
        let failed = snapshot_group(&[(Arc::clone(&disk), NewSnapshot::named("no"))], &mut || {
            machine.fail_requests(Fault::Write, 0, 1 << 40);
            Err(Error::new(ErrorKind::Interrupted, "not now"))
        });
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Interrupted, "{context}");
        assert_eq!(names(&disk), none, "{context}");
        machine.mend();
        chain.write(0, &[2; BLOCK]).unwrap();
        chain.flush().unwrap();
        let mut expected = (none.clone(), 2);
        match next {
            Next::Operation => {
                disk.snapshot(&NewSnapshot::named("yes")).unwrap();
                chain.write(0, &[3; BLOCK]).unwrap();
                chain.flush().unwrap();
                expected = (vec!["yes".to_owned()], 3);
            }
            Next::Close => disk.close().unwrap(),
            Next::PowerCut => expected.0.push("no".to_owned()),
        }
        drop((chain, disk));
        let machine = if next == Next::Close { machine } else { machine.crash() };
        let disk = Disk::open(Folder::plain(machine.directory()), &options(2)).unwrap();
        let chain = disk.chain().unwrap();
        assert_eq!((names(&disk), content(&chain)), (expected.0.clone(), Some(expected.1)), "{context}");
        assert_eq!(leaked(&disk), none, "{context}");
        for name in &expected.0 {
            assert_eq!(content(&disk.snapshot_chain(name).unwrap()), Some(2), "{context}");
            disk.delete_snapshot(name, None, &NoProgress).unwrap();
        }
        assert_eq!(content(&chain), Some(expected.1), "{context}");
    }
}
