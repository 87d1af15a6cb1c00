//! A disk with snapshots and linked clones under random load, and checks of their content after a kill of the server.
//!
//! 1. Every write has a unique number, so that a read of another disk's or snapshot's content is always detected.
//! 2. For each sector the model has the numbers that a crash may leave: the last write that was made durable by FUA or
//!    by a flush of the same disk, and all later writes. After a crash, the number that is found counts as durable.
//! 3. A snapshot has the content of its disk when it was taken, a clone the content of its snapshot.
//! 4. A command that the kill interrupted has taken effect completely or not at all. All other disks and snapshots
//!    exist.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use testkit::Random;
use testkit::nbd::{Client, Command, Failure};
use testkit::pattern::{self, SECTOR};
use testkit::process::{self, Done, Store};

/// Requests per round, and sectors of the largest request (128 KiB).
const ROUND_REQUESTS: u64 = 16;
const REQUEST_SECTORS_MAX: u64 = 256;
/// Disks up to this size are read completely. Of larger disks only the written ranges are read.
const READ_WHOLE_MAX: u64 = 8 << 20;
/// Number of written locations on a larger disk, and blocks at each.
const PLACES: u64 = 600;
const PLACE_BLOCKS: u64 = 4;
const BLOCK_SECTORS: u64 = 8;
/// Most bytes of one read.
const READ_MAX: u64 = 1 << 20;
const DISKS_MAX: usize = 4;
const SNAPSHOTS_MAX: usize = 4;

/// For each written sector the numbers of the writes that a crash may leave, the durable one first.
#[derive(Clone, Default)]
struct Content(BTreeMap<u64, Vec<u64>>);

struct Disk {
    content: Content,
    snapshots: BTreeMap<String, Content>,
    /// The disk and snapshot from which the disk was cloned.
    origin: Option<(String, String)>,
}

/// A command that was sent but not answered.
enum Change {
    Snapshot { disk: String, name: String },
    DeleteSnapshot { disk: String, name: String },
    Clone { of: (String, String), name: String },
    Detach { disk: String },
    Delete { disk: String },
}

/// Statistics of the requests.
#[derive(Default)]
pub struct Tally {
    pub requests: u64,
    pub flushes: u64,
    pub snapshots: u64,
    pub clones: u64,
    pub deletions: u64,
    /// Sectors in which a version newer than the durable one was found.
    pub younger: u64,
}

pub struct Family {
    number: u64,
    capacity: u64,
    disks: BTreeMap<String, Disk>,
    clients: BTreeMap<String, Client>,
    random: Random,
    version: u64,
    next_name: u64,
    cut_off: Option<Change>,
    pub tally: Tally,
}

struct Sent {
    cookie: u64,
    sectors: std::ops::Range<u64>,
    fua: bool,
}

impl Content {
    fn push(&mut self, sectors: std::ops::Range<u64>, version: u64) {
        sectors.for_each(|sector| self.0.entry(sector).or_insert_with(|| vec![0]).push(version));
    }

    fn settle(&mut self, sectors: impl std::ops::RangeBounds<u64>) {
        self.0.range_mut(sectors).for_each(|(_, versions)| drop(versions.drain(..versions.len() - 1)));
    }

    fn newest(&self, sector: u64) -> u64 {
        self.0.get(&sector).and_then(|versions| versions.last().copied()).unwrap_or(0)
    }

    /// Ranges of sectors to read: the whole disk, or the written sectors.
    fn runs(&self, capacity: u64) -> Vec<std::ops::Range<u64>> {
        let sectors = capacity / SECTOR as u64;
        let most = READ_MAX / SECTOR as u64;
        if capacity <= READ_WHOLE_MAX {
            return (0..sectors).step_by(most as usize).map(|start| start..(start + most).min(sectors)).collect();
        }
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for sector in self.0.keys().copied() {
            match runs.last_mut() {
                Some(run) if run.end == sector && run.end - run.start < most => run.end += 1,
                _ => runs.push(sector..sector + 1),
            }
        }
        runs
    }

    /// Reads an export and checks each sector against the allowed versions; from then on, the version that is found
    /// counts as durable. Returns the number of sectors that were newer than the durable version.
    fn verify(&mut self, store: &Store, export: &str, family: u64, capacity: u64) -> u64 {
        let mut client = Client::connect(&store.socket(), export).unwrap();
        assert_eq!(client.size, capacity, "{export}");
        let mut younger = 0;
        let runs = self.runs(capacity);
        let mut waiting: BTreeMap<u64, std::ops::Range<u64>> = BTreeMap::new();
        let mut next = runs.into_iter();
        loop {
            while waiting.len() < ROUND_REQUESTS as usize
                && let Some(run) = next.next()
            {
                let (offset, length) = (run.start * SECTOR as u64, (run.end - run.start) as usize * SECTOR);
                waiting.insert(client.submit(Command::Read { offset, length: length as u32 }).unwrap(), run);
            }
            if waiting.is_empty() {
                return younger;
            }
            let (cookie, bytes) = client.complete().unwrap();
            let bytes = bytes.unwrap_or_else(|errno| panic!("{export}: a read failed with {errno}"));
            let run = waiting.remove(&cookie).unwrap();
            for (sector, bytes) in run.zip(bytes.chunks_exact(SECTOR)) {
                let found = pattern::version(bytes, family, sector).unwrap_or_else(|e| panic!("{export}: {e}"));
                let Some(versions) = self.0.get_mut(&sector) else {
                    assert_eq!(found, 0, "{export}: sector {sector} was never written");
                    continue;
                };
                assert!(versions.contains(&found), "{export} sector {sector}: {found} is none of {versions:?}");
                younger += u64::from(versions.len() > 1 && found != versions[0]);
                *versions = vec![found];
            }
        }
    }
}

impl Family {
    /// Creates a disk of this size.
    pub fn new(store: &Store, number: u64, capacity: u64, seed: u64) -> Self {
        let name = format!("f{number}n0");
        store.run(&format!("disk create {name} --size {capacity}")).ok();
        let disk = Disk { content: Content::default(), snapshots: BTreeMap::new(), origin: None };
        Self {
            number,
            capacity,
            disks: BTreeMap::from([(name, disk)]),
            clients: BTreeMap::new(),
            random: Random(seed ^ (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            version: 0,
            next_name: 1,
            cut_off: None,
            tally: Tally::default(),
        }
    }

    /// Sends requests until the server is killed. `killed` is set before the kill.
    pub fn work(&mut self, store: &Store, killed: &AtomicBool) {
        loop {
            match self.step(store, killed) {
                Ok(()) => {}
                Err(Failure::Gone(error)) => {
                    assert!(killed.load(Ordering::Acquire), "the server ended a connection: {error}");
                    break;
                }
                Err(Failure::Errno(errno)) => panic!("a request failed with {errno}"),
            }
        }
        self.clients.clear();
    }

    fn step(&mut self, store: &Store, killed: &AtomicBool) -> Result<(), Failure> {
        let names: Vec<String> = self.disks.keys().cloned().collect();
        let name = names[self.random.below(names.len() as u64) as usize].clone();
        match self.random.below(24) {
            0..4 => self.flush(store, &name),
            4..6 => self.read(store, &name),
            6..8 => self.change(store, &name, killed),
            _ => self.round(store, &name),
        }
    }

    fn client(&mut self, store: &Store, name: &str) -> Result<&mut Client, Failure> {
        if !self.clients.contains_key(name) {
            self.clients.insert(name.to_owned(), Client::connect(&store.socket(), name)?);
        }
        Ok(self.clients.get_mut(name).unwrap())
    }

    /// A random range: mostly single blocks, some larger, some not aligned to blocks, often in one small area. On a
    /// large disk, the range is at one of a fixed number of locations.
    fn place(&mut self) -> std::ops::Range<u64> {
        let sectors = self.capacity / SECTOR as u64;
        let (align, length) = match self.random.below(8) {
            0 => (1, 1 + self.random.below(24)),
            1 => (8, 8 * (1 + self.random.below(REQUEST_SECTORS_MAX / 8))),
            _ => (8, 8),
        };
        if self.capacity > READ_WHOLE_MAX && !self.random.once_in(8) {
            let place = Random(self.random.below(PLACES)).below(sectors / BLOCK_SECTORS - PLACE_BLOCKS);
            let start = (place + self.random.below(PLACE_BLOCKS)) * BLOCK_SECTORS;
            return start..start + BLOCK_SECTORS;
        }
        let whole = sectors.min(READ_WHOLE_MAX / SECTOR as u64);
        let space = if self.random.once_in(2) { whole } else { whole / 16 };
        let start = self.random.below((space - length) / align) * align;
        start..start + length
    }

    /// Sends requests that do not overlap, with all in flight at once.
    fn round(&mut self, store: &Store, name: &str) -> Result<(), Failure> {
        self.client(store, name)?;
        let mut sent: Vec<Sent> = Vec::new();
        for _ in 0..1 + self.random.below(ROUND_REQUESTS) {
            let sectors = self.place();
            if sent.iter().any(|other| other.sectors.start < sectors.end && sectors.start < other.sectors.end) {
                continue;
            }
            let fua = self.random.once_in(8);
            let zeroes = self.random.once_in(8);
            self.version += 1;
            let version = if zeroes { 0 } else { self.version };
            self.disks.get_mut(name).unwrap().content.push(sectors.clone(), version);
            let (offset, bytes) = (sectors.start * SECTOR as u64, (sectors.end - sectors.start) as usize * SECTOR);
            let mut data = vec![0; if zeroes { 0 } else { bytes }];
            for (sector, content) in sectors.clone().zip(data.chunks_exact_mut(SECTOR)) {
                pattern::fill(content, self.number, sector, version);
            }
            let command = match zeroes {
                true if self.version.is_multiple_of(2) => Command::Trim { offset, length: bytes as u32, fua },
                true => Command::Zero { offset, length: bytes as u32, fua },
                false => Command::Write { offset, data: &data, fua },
            };
            let cookie = self.client(store, name)?.submit(command)?;
            sent.push(Sent { cookie, sectors, fua });
            self.tally.requests += 1;
        }
        for _ in 0..sent.len() {
            let (cookie, outcome) = self.client(store, name)?.complete()?;
            outcome.map_err(Failure::Errno)?;
            let done = sent.iter().find(|other| other.cookie == cookie).unwrap();
            if done.fua {
                self.disks.get_mut(name).unwrap().content.settle(done.sectors.clone());
            }
        }
        Ok(())
    }

    fn flush(&mut self, store: &Store, name: &str) -> Result<(), Failure> {
        self.client(store, name)?.flush()?;
        let disk = self.disks.get_mut(name).unwrap();
        disk.content.settle(..);
        disk.snapshots.values_mut().for_each(|content| content.settle(..));
        self.tally.flushes += 1;
        Ok(())
    }

    /// While the server runs, a read must return the last write.
    fn read(&mut self, store: &Store, name: &str) -> Result<(), Failure> {
        let sectors = self.place();
        let (offset, length) = (sectors.start * SECTOR as u64, (sectors.end - sectors.start) as usize * SECTOR);
        let bytes = self.client(store, name)?.read(offset, length as u32)?;
        let content = &self.disks[name].content;
        for (sector, bytes) in sectors.zip(bytes.chunks_exact(SECTOR)) {
            let found = pattern::version(bytes, self.number, sector).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(found, content.newest(sector), "{name} sector {sector}, read without a crash");
        }
        Ok(())
    }

    /// Takes or deletes a snapshot or a clone, with the command line.
    fn change(&mut self, store: &Store, name: &str, killed: &AtomicBool) -> Result<(), Failure> {
        let Some(change) = self.choose(name) else { return Ok(()) };
        let arguments = match &change {
            Change::Snapshot { disk, name } => format!("snapshot create {disk}@{name}"),
            Change::DeleteSnapshot { disk, name } => format!("snapshot delete {disk}@{name}"),
            Change::Clone { of: (disk, snapshot), name } => format!("clone {disk}@{snapshot} {name}"),
            Change::Detach { disk } => format!("disk detach {disk}"),
            Change::Delete { disk } => {
                self.clients.remove(disk);
                format!("disk delete {disk}")
            }
        };
        self.cut_off = Some(change);
        let mut last = None;
        process::until("the command is done or the server killed", || {
            let done: Done = match process::output(&mut store.command(&arguments)) {
                output if output.status.code().is_some() => output.into(),
                output => panic!("{arguments}: {output:?}"),
            };
            // The server may not have detected yet that the test's client has disconnected.
            let again = done.code == 4 && !killed.load(Ordering::Acquire);
            last = Some(done);
            !again
        });
        let done = last.unwrap();
        if done.code != 0 {
            assert!(killed.load(Ordering::Acquire), "{arguments}: {done:?}");
            return Err(Failure::Gone(std::io::Error::other(done.stderr)));
        }
        if let Some(change) = self.cut_off.take() {
            self.take_effect(change);
        }
        Ok(())
    }

    fn has_clones(&self, disk: &str, snapshot: Option<&str>) -> bool {
        let stands = |origin: &(String, String)| origin.0 == disk && snapshot.is_none_or(|name| origin.1 == name);
        self.disks.values().any(|other| other.origin.as_ref().is_some_and(stands))
    }

    /// A random command on this disk that the server does not refuse, if there is one.
    fn choose(&mut self, name: &str) -> Option<Change> {
        let disk = name.to_owned();
        let snapshots: Vec<String> = self.disks[name].snapshots.keys().cloned().collect();
        let count = snapshots.len() as u64;
        let chosen = (count > 0).then(|| snapshots[self.random.below(count) as usize].clone());
        let new_name = |next: &mut u64, kind: &str| {
            *next += 1;
            format!("{kind}{next}")
        };
        match self.random.below(8) {
            0..3 if snapshots.len() < SNAPSHOTS_MAX => {
                Some(Change::Snapshot { disk, name: new_name(&mut self.next_name, "s") })
            }
            3..5 if self.disks.len() < DISKS_MAX => {
                let name = new_name(&mut self.next_name, &format!("f{}n", self.number));
                chosen.map(|snapshot| Change::Clone { of: (disk, snapshot), name })
            }
            5 if self.disks[name].origin.is_some() => Some(Change::Detach { disk }),
            6 if self.disks.len() > 1 && !self.has_clones(name, None) => Some(Change::Delete { disk }),
            _ => {
                let snapshot = chosen.filter(|snapshot| !self.has_clones(name, Some(snapshot)))?;
                Some(Change::DeleteSnapshot { disk, name: snapshot })
            }
        }
    }

    fn take_effect(&mut self, change: Change) {
        match change {
            Change::Snapshot { disk, name } => {
                let disk = self.disks.get_mut(&disk).unwrap();
                disk.snapshots.insert(name, disk.content.clone());
                self.tally.snapshots += 1;
            }
            Change::DeleteSnapshot { disk, name } => {
                self.disks.get_mut(&disk).unwrap().snapshots.remove(&name);
                self.tally.deletions += 1;
            }
            Change::Clone { of, name } => {
                let content = self.disks[&of.0].snapshots[&of.1].clone();
                self.disks.insert(name, Disk { content, snapshots: BTreeMap::new(), origin: Some(of) });
                self.tally.clones += 1;
            }
            Change::Detach { disk } => self.disks.get_mut(&disk).unwrap().origin = None,
            Change::Delete { disk } => {
                self.disks.remove(&disk);
                self.tally.deletions += 1;
            }
        }
    }

    /// After a crash: checks whether the interrupted command took effect, then every disk and every snapshot.
    pub fn verify(&mut self, store: &Store) {
        let disks = store.run("disk list --json").json();
        let mine = |name: &str| name.starts_with(&format!("f{}n", self.number));
        let origins: BTreeMap<String, bool> =
            disks["disks"].as_array().unwrap().iter().fold(BTreeMap::new(), |mut all: BTreeMap<String, bool>, disk| {
                all.insert(disk["name"].as_str().unwrap().into(), !disk["origin"].is_null());
                all
            });
        let origins: BTreeMap<String, bool> = origins.into_iter().filter(|(name, _)| mine(name)).collect();
        let listed = store.run("snapshot list --json").json();
        let snapshots: BTreeSet<(String, String)> = listed["snapshots"]
            .as_array()
            .unwrap()
            .iter()
            .map(|of| (of["disk"].as_str().unwrap().to_owned(), of["name"].as_str().unwrap().to_owned()))
            .filter(|(disk, _)| mine(disk))
            .collect();
        if let Some(change) = self.cut_off.take() {
            let has = |disk: &String, name: &String| snapshots.contains(&(disk.clone(), name.clone()));
            let done = match &change {
                Change::Snapshot { disk, name } => has(disk, name),
                Change::DeleteSnapshot { disk, name } => !has(disk, name),
                Change::Clone { name, .. } => origins.contains_key(name),
                Change::Detach { disk } => origins.get(disk) == Some(&false),
                Change::Delete { disk } => !origins.contains_key(disk),
            };
            if done {
                self.take_effect(change);
            }
        }
        let expected: BTreeMap<String, bool> =
            self.disks.iter().map(|(name, disk)| (name.clone(), disk.origin.is_some())).collect();
        assert_eq!(origins, expected, "disks, and whether each is a clone");
        let expected = |(name, disk): (&String, &Disk)| -> Vec<(String, String)> {
            disk.snapshots.keys().map(|snapshot| (name.clone(), snapshot.clone())).collect()
        };
        assert_eq!(snapshots, self.disks.iter().flat_map(expected).collect(), "snapshots");
        for (name, disk) in &mut self.disks {
            self.tally.younger += disk.content.verify(store, name, self.number, self.capacity);
            for (snapshot, content) in &mut disk.snapshots {
                content.verify(store, &format!("{name}@{snapshot}"), self.number, self.capacity);
            }
        }
    }
}
