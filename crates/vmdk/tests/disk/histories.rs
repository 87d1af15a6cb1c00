//! Random histories of one disk against plain arrays: writes, discards, snapshots in every delta format, reverts,
//! deletions in both directions, consolidation, while a guest writes. The disk is reopened now and then, and read by
//! QEMU where QEMU supports the formats.

use crate::world::{Busy, DELTAS, Guest, OTHER_BASES, Random, leaked, local, options, qemu_read, read, scratch};
use error::ErrorKind;
use layer::descriptor::Adapter;
use layer::image::ImageKind;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use vmdk::{DeltaFormat, Direction, Disk, NewDisk, NewSnapshot, Options};
use work::NoProgress;
use work::Progress;

struct History {
    seed: u64,
    random: Random,
    guest: Mutex<Guest>,
    snapshots: BTreeMap<String, Vec<u8>>,
    disk: Arc<Disk>,
    named: u32,
    formats: Vec<DeltaFormat>,
    /// Whether the base has no descriptor.
    raw: bool,
    compared: u32,
}

/// Options for split disks with a few extents.
fn split(seed: u64) -> Options {
    Options { piece: Some(1024), ..options(seed) }
}

impl History {
    fn new(seed: u64, folder: &Path, formats: &[DeltaFormat], kind: ImageKind) -> Self {
        let mut random = Random::new(seed);
        let capacity = (1 << 20) + random.below(2048) * 512;
        // A multiple of 4 KiB: the test compares the content with what QEMU reads, and QEMU reads a partial last grain
        // differently from lamina.
        let capacity = capacity / 4096 * 4096;
        let new =
            NewDisk { name: "vm".to_owned(), capacity, kind, delta: Some(formats[0]), adapter: Adapter::LsiLogic };
        let disk = Disk::create(local(folder), &new, &split(seed), &NoProgress).unwrap();
        let guest = Guest { random: Random::new(seed ^ 1), content: vec![0; capacity as usize] };
        Self {
            seed,
            random,
            guest: Mutex::new(guest),
            snapshots: BTreeMap::new(),
            disk,
            named: 0,
            formats: formats.to_vec(),
            raw: kind == ImageKind::Raw,
            compared: 0,
        }
    }

    fn content(&self) -> Vec<u8> {
        self.guest.lock().content.clone()
    }

    fn write(&mut self, times: u64) {
        let chain = self.disk.chain().unwrap();
        for _ in 0..times {
            self.guest.lock().act(&chain);
        }
    }

    fn snapshot(&mut self) {
        self.named += 1;
        let name = format!("s{}", self.named);
        let delta = Some(*self.random.pick(&self.formats));
        let description =
            if self.random.percent(30) { "a \"quoted\" | word\nand a line".to_owned() } else { String::new() };
        match self.disk.snapshot(&NewSnapshot { name: name.clone(), description, delta, ..NewSnapshot::default() }) {
            Ok(_) => drop(self.snapshots.insert(name, self.content())),
            Err(error) => assert!(error.to_string().contains("levels"), "{error}"),
        }
    }

    fn some_snapshot(&mut self) -> Option<String> {
        let names: Vec<&String> = self.snapshots.keys().collect();
        let index = self.random.below(names.len() as u64) as usize;
        names.get(index).map(|name| (*name).clone())
    }

    fn busy(&self, patience: u32) -> Busy<'_> {
        Busy { guest: &self.guest, chain: self.disk.chain().unwrap(), patience: Mutex::new(patience) }
    }

    fn delete(&mut self) {
        let Some(name) = self.some_snapshot() else { return };
        let direction = *self.random.pick(&[None, Some(Direction::Down), Some(Direction::Up)]);
        let patience = if self.random.percent(20) { 1 + self.random.below(3) as u32 } else { 0 };
        let mut deleted = self.disk.delete_snapshot(&name, direction, &self.busy(patience));
        // A process that another test has forked holds copies of this process's locks until it executes QEMU.
        while deleted.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy) {
            std::thread::sleep(std::time::Duration::from_millis(5));
            assert!(self.disk.snapshots().iter().any(|snapshot| snapshot.name == name), "Busy, and gone");
            deleted = self.disk.delete_snapshot(&name, direction, &self.busy(patience));
        }
        if let Err(error) = deleted {
            assert!(error.kind() == ErrorKind::Interrupted && patience > 0, "{name} {direction:?}: {error}");
        }
        // If the deletion was interrupted, the snapshot is complete or gone.
        if !self.disk.snapshots().iter().any(|snapshot| snapshot.name == name) {
            self.snapshots.remove(&name);
        }
    }

    fn revert(&mut self) {
        let Some(name) = self.some_snapshot() else { return };
        self.disk.revert(&name).unwrap();
        self.guest.lock().content = self.snapshots[&name].clone();
    }

    fn consolidate(&mut self) {
        match self.disk.consolidate(&self.busy(0)) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
        }
        let left = self.disk.snapshots();
        self.snapshots.retain(|name, _| left.iter().any(|snapshot| snapshot.name == *name));
    }

    fn maintain(&mut self) {
        let watch: &dyn Progress = &NoProgress;
        for freed in [self.disk.wipe(watch), self.disk.shrink(watch)] {
            match freed {
                Ok(_) => {}
                Err(error) => assert!(matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Busy), "{error}"),
            }
        }
        let outcome = match self.random.below(3) {
            0 => self.disk.punch_zeros(watch).map(drop),
            1 => self.disk.inflate(watch),
            _ => Ok(()),
        };
        if let Err(error) = outcome {
            assert!(matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Busy), "{error}");
        }
    }

    fn reopen(&mut self) {
        self.disk.close().unwrap();
        let home = self.disk.home().clone();
        let seed = self.random.next();
        // The old disk has to be dropped first: it holds the lock.
        let stand_in = Self::scratch_disk();
        drop(std::mem::replace(&mut self.disk, stand_in));
        self.disk = open_when_free(home, seed);
    }

    /// A placeholder while the disk is reopened.
    fn scratch_disk() -> Arc<Disk> {
        let folder = backend::simulated::SimulatedDisk::new(0, Default::default()).directory();
        let home = layer::image::Folder::plain(folder);
        let new =
            NewDisk { name: "x".to_owned(), capacity: 4096, kind: ImageKind::Thin, delta: None, adapter: Adapter::Ide };
        Disk::create(home, &new, &options(0), &NoProgress).unwrap()
    }

    fn verify(&mut self, folder: &Path) {
        let seed = self.seed;
        let found = read(&self.disk.chain().unwrap());
        assert!(found == self.content(), "seed {seed}: content of the head");
        for (name, content) in &self.snapshots {
            assert!(
                read(&self.disk.snapshot_chain(name).unwrap()) == *content,
                "seed {seed}: content of snapshot {name}"
            );
        }
        let mut names: Vec<String> = self.disk.snapshots().into_iter().map(|snapshot| snapshot.name).collect();
        names.sort();
        let mut wanted: Vec<String> = self.snapshots.keys().cloned().collect();
        wanted.sort();
        assert_eq!(names, wanted, "seed {seed}");
        assert_eq!(leaked(&self.disk), Vec::<String>::new(), "seed {seed}");
        let checked = self.disk.check(false, &NoProgress).unwrap();
        assert_eq!(checked.problems, Vec::<String>::new(), "seed {seed}");
        // QEMU cannot read vsanSparse; the test passes it the format of the head, VMDK.
        if self.formats.contains(&DeltaFormat::VsanSparse) || self.raw {
            return;
        }
        // QEMU reads closed images only.
        self.reopen();
        let record = self.disk.record();
        let content = self.content();
        let head = record.nodes.iter().find(|node| node.id == record.head).unwrap();
        assert!(
            qemu_read(folder, &head.descriptor, content.len()) == content,
            "seed {seed}: content of the head, read by QEMU"
        );
        for snapshot in &record.snapshots {
            let node = record.nodes.iter().find(|node| node.id == snapshot.node).unwrap();
            let found = qemu_read(folder, &node.descriptor, content.len());
            assert!(found == self.snapshots[&snapshot.name], "seed {seed}: QEMU's {}", snapshot.name);
            self.compared += 1;
        }
    }

    fn step(&mut self, folder: &Path) {
        match self.random.below(100) {
            0..40 => {
                let times = 1 + self.random.below(6);
                self.write(times);
            }
            40..60 => self.snapshot(),
            60..74 => self.delete(),
            74..82 => self.revert(),
            82..85 => self.consolidate(),
            85..89 => self.reopen(),
            89..93 => self.maintain(),
            93..96 => self.disk.chain().unwrap().flush().unwrap(),
            _ => self.verify(folder),
        }
    }
}

/// Opens a disk, and retries while a forked process still holds its lock: see [`History::delete`].
fn open_when_free(home: layer::image::Folder, seed: u64) -> Arc<Disk> {
    for _ in 0..1000 {
        match Disk::open(home.clone(), &options(seed)) {
            Err(error) if error.kind() == ErrorKind::Busy => std::thread::sleep(std::time::Duration::from_millis(5)),
            other => return other.unwrap(),
        }
    }
    panic!("another process keeps the disk open")
}

fn histories(seeds: std::ops::Range<u64>, steps: usize, formats: &[DeltaFormat]) {
    let kinds = [ImageKind::Thin, ImageKind::ZeroedThick, ImageKind::EagerZeroedThick, ImageKind::MonolithicSparse];
    let kinds = [kinds, OTHER_BASES].concat();
    for seed in seeds {
        let folder = scratch();
        let kind = kinds[seed as usize % kinds.len()];
        let run = std::panic::AssertUnwindSafe(|| {
            let mut history = History::new(seed, folder.path(), formats, kind);
            for _ in 0..steps {
                history.step(folder.path());
            }
            history.verify(folder.path());
        });
        std::panic::catch_unwind(run).unwrap_or_else(|_| panic!("seed {seed}, {formats:?}, {kind}"));
    }
}

#[test]
fn vmfssparse_histories_read_as_the_model_and_in_qemu() {
    histories(0..8, 60, &DELTAS[..1]);
}

#[test]
fn sesparse_histories_read_as_the_model_and_in_qemu() {
    histories(100..108, 60, &DELTAS[1..2]);
}

#[test]
fn vsansparse_histories_read_as_the_model() {
    histories(200..210, 60, &DELTAS[2..]);
}

#[test]
fn mixed_histories_read_as_the_model() {
    histories(300..310, 80, &DELTAS);
    histories(400..404, 60, &DELTAS[..2]);
}

#[test]
fn thirty_two_levels_of_every_format_read_as_the_model() {
    for (seed, formats) in [(1, &DELTAS[..1]), (2, &DELTAS[1..2]), (3, &DELTAS[2..]), (4, &DELTAS[..])] {
        let folder = scratch();
        let mut history = History::new(seed, folder.path(), formats, ImageKind::Thin);
        for _ in 0..31 {
            history.write(4);
            history.snapshot();
        }
        history.write(4);
        assert_eq!(history.disk.info().unwrap().levels, 32);
        history.verify(folder.path());
        history.reopen();
        for _ in 0..12 {
            history.delete();
        }
        history.verify(folder.path());
        let busy = history.busy(0);
        history.disk.consolidate(&busy).unwrap();
        drop(busy);
        history.snapshots.clear();
        assert_eq!(history.disk.info().unwrap().levels, 1);
        history.verify(folder.path());
    }
}
