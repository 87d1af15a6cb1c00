//! A model of a disk that is written to: for each sector of the disk and of its snapshots, the versions that a crash
//! may leave.
//!
//! The requests of a round do not overlap, are sent together, and are answered before the next round. The first version
//! in the list of a sector is the last version that a flush or FUA made durable, the last version is the newest.
//! Without a crash a read must return the newest version; after a crash it may return any of the versions, and later
//! reads must return the same version.

use crate::Random;
use crate::nbd::{Client, Command, Failure};
use crate::pattern::{self, SECTOR};
use crate::process::Store;

/// Requests per round, and sectors of the largest request (128 KiB).
const ROUND_REQUESTS: u64 = 16;
const REQUEST_SECTORS_MAX: u64 = 256;
const READ_BYTES: usize = 1 << 20;

/// For each sector the versions that a crash may leave.
pub type Sectors = Vec<Vec<u64>>;

/// The model of one disk.
pub struct History {
    pub name: String,
    pub number: u64,
    pub sectors: Sectors,
    pub snapshots: Vec<(String, Sectors)>,
    pub random: Random,
    pub version: u64,
    pub flushes: u64,
}

impl History {
    /// A new disk, all zeros.
    pub fn new(name: &str, number: u64, bytes: usize) -> Self {
        Self {
            name: name.into(),
            number,
            sectors: vec![vec![0]; bytes / SECTOR],
            snapshots: Vec::new(),
            random: Random(0xfeed_0000 + number),
            version: 0,
            flushes: 0,
        }
    }

    /// Sends requests that do not overlap, with all in flight at once.
    pub fn round(&mut self, client: &mut Client) -> Result<(), Failure> {
        let all = self.sectors.len() as u64;
        let mut sent: Vec<(u64, std::ops::Range<usize>, bool)> = Vec::new();
        for _ in 0..1 + self.random.below(ROUND_REQUESTS) {
            // Chooses a range: mostly single blocks, some larger, some not aligned to blocks, often in one small area
            // of the disk.
            let (align, length) = match self.random.below(8) {
                0 => (1, 1 + self.random.below(24)),
                1 => (8, 8 * (1 + self.random.below(REQUEST_SECTORS_MAX / 8))),
                _ => (8, 8),
            };
            let space = if self.random.once_in(2) { all } else { all / 16 };
            let start = self.random.below((space - length) / align) * align;
            let range = start as usize..(start + length) as usize;
            if sent.iter().any(|(_, other, _)| other.start < range.end && range.start < other.end) {
                continue;
            }
            let fua = self.random.once_in(16);
            let zeroes = self.random.once_in(8);
            self.version += 1;
            let version = if zeroes { 0 } else { self.version };
            range.clone().for_each(|sector| self.sectors[sector].push(version));
            let (offset, bytes) = ((range.start * SECTOR) as u64, range.len() * SECTOR);
            let mut data = vec![0; if zeroes { 0 } else { bytes }];
            for (sector, content) in range.clone().zip(data.chunks_exact_mut(SECTOR)) {
                pattern::fill(content, self.number, sector as u64, version);
            }
            let command = match zeroes {
                true if self.version.is_multiple_of(2) => Command::Trim { offset, length: bytes as u32, fua },
                true => Command::Zero { offset, length: bytes as u32, fua },
                false => Command::Write { offset, data: &data, fua },
            };
            sent.push((client.submit(command)?, range, fua));
        }
        for _ in 0..sent.len() {
            let (cookie, outcome) = client.complete()?;
            outcome.map_err(Failure::Errno)?;
            let (_, range, fua) = sent.iter().find(|(sent, _, _)| *sent == cookie).unwrap();
            if *fua {
                self.sectors[range.clone()].iter_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
            }
        }
        Ok(())
    }

    /// Sends a flush, after which everything sent so far is durable.
    pub fn flush(&mut self, client: &mut Client) -> Result<(), Failure> {
        client.flush()?;
        let snapshots = self.snapshots.iter_mut().map(|(_, sectors)| sectors);
        for versions in snapshots.chain([&mut self.sectors]).flatten() {
            versions.drain(..versions.len() - 1);
        }
        self.flushes += 1;
        Ok(())
    }

    /// Sends a round or a flush.
    pub fn step(&mut self, client: &mut Client) -> Result<(), Failure> {
        if self.random.once_in(5) { self.flush(client) } else { self.round(client) }
    }

    /// Records a snapshot of the current state.
    pub fn snapshot_taken(&mut self, name: &str) {
        self.snapshots.push((name.to_owned(), self.sectors.clone()));
    }

    /// After a crash: checks each sector against the allowed versions. Returns the number of sectors with a version
    /// newer than the durable one.
    pub fn verify(&mut self, store: &Store) -> usize {
        verify(&read_export(store, &self.name), &self.name, self.number, &mut self.sectors)
    }

    /// Compares the disk's snapshots that still exist with their models.
    pub fn verify_snapshots(&mut self, store: &Store) {
        let listed = store.run(&format!("snapshot list {} --json", self.name)).json();
        let listed = listed["snapshots"].as_array().unwrap().clone();
        self.snapshots.retain(|(name, _)| listed.iter().any(|snapshot| snapshot["name"] == name.as_str()));
        for (name, sectors) in &mut self.snapshots {
            let export = format!("{}@{name}", self.name);
            verify(&read_export(store, &export), &export, self.number, sectors);
        }
    }

    /// Without a crash: checks that the bytes of a read have the newest versions.
    #[track_caller]
    pub fn is(&self, bytes: &[u8], what: &str) {
        is(bytes, what, self.number, &self.sectors);
    }

    /// Without a crash: checks that the bytes of a read of a snapshot have the snapshot's versions.
    #[track_caller]
    pub fn snapshot_is(&self, snapshot: &str, bytes: &[u8], what: &str) {
        let (_, sectors) = self.snapshots.iter().find(|(name, _)| name == snapshot).unwrap();
        is(bytes, what, self.number, sectors);
    }
}

#[track_caller]
fn is(bytes: &[u8], what: &str, number: u64, sectors: &Sectors) {
    assert_eq!(bytes.len(), sectors.len() * SECTOR, "{what}");
    for (at, (sector, versions)) in bytes.chunks_exact(SECTOR).zip(sectors).enumerate() {
        let found = pattern::version(sector, number, at as u64).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(Some(&found), versions.last(), "{what}: sector {at} of {versions:?}");
    }
}

fn verify(content: &[u8], export: &str, number: u64, sectors: &mut Sectors) -> usize {
    assert_eq!(content.len(), sectors.len() * SECTOR, "{export}");
    let mut younger = 0;
    for (at, (sector, versions)) in content.chunks_exact(SECTOR).zip(sectors).enumerate() {
        let found = pattern::version(sector, number, at as u64).unwrap_or_else(|e| panic!("{export}: {e}"));
        assert!(versions.contains(&found), "{export} sector {at}: {found} is none of {versions:?}");
        younger += usize::from(versions.len() > 1 && found != versions[0]);
        versions.clear();
        versions.push(found);
    }
    younger
}

/// The content of an export of a running server.
pub fn read_export(store: &Store, export: &str) -> Vec<u8> {
    let mut client = Client::connect(&store.socket(), export).unwrap();
    let mut content = Vec::with_capacity(client.size as usize);
    for offset in (0..client.size).step_by(READ_BYTES) {
        let length = READ_BYTES.min((client.size - offset) as usize);
        content.extend(client.read(offset, length as u32).unwrap());
    }
    content
}
