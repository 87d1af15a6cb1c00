//! A disk on storage that fails, with a model of each sector: the versions that may remain after unflushed writes were
//! lost, and which of them was acknowledged last.
//!
//! A read fails with EIO, or returns the version acknowledged last or the version of a later write that failed. A read
//! never returns an older version. After the disk was opened again, the first read may return any of these versions;
//! later reads must return the same version.

#![allow(dead_code, reason = "each test file uses only a part")]
#![allow(clippy::unwrap_used)]

use testkit::Random;
use testkit::nbd::{Client, Command, EIO, Failure};
use testkit::pattern::{self, SECTOR};

const ROUND_REQUESTS: u64 = 16;
const READ_BYTES: usize = 1 << 20;
/// A read that returns uncertain content is repeated in parts of this size.
const PIECE_BYTES: usize = 4096;

#[derive(Clone)]
pub struct Sector {
    versions: Vec<u64>,
    /// Index of the version that was acknowledged last.
    acknowledged: usize,
}

impl Sector {
    fn settle(&mut self, found: u64) {
        *self = Self { versions: vec![found], acknowledged: 0 };
    }

    fn flushed(&mut self) {
        self.versions.drain(..self.acknowledged);
        self.acknowledged = 0;
    }
}

pub struct Snapshot {
    pub name: String,
    pub sectors: Vec<Sector>,
    /// Whether the creation of the snapshot was acknowledged and its deletion was not requested.
    pub certain: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Trim,
    Zero,
}

/// Statistics.
#[derive(Default, Debug)]
pub struct Counted {
    pub requests: u64,
    pub refused: u64,
    pub flushes_failed: u64,
    pub sectors_unread: u64,
    pub sectors_lost: u64,
}

pub struct Doubted {
    pub name: String,
    number: u64,
    pub sectors: Vec<Sector>,
    pub snapshots: Vec<Snapshot>,
    random: Random,
    version: u64,
    /// Whether requests may fail with EIO.
    pub fails: bool,
    /// Whether some writes use FUA, so that they are durable when they are acknowledged.
    pub fua: bool,
    pub counted: Counted,
}

impl Doubted {
    pub fn new(name: &str, number: u64, bytes: usize, seed: u64) -> Self {
        Self {
            name: name.into(),
            number,
            sectors: vec![Sector { versions: vec![0], acknowledged: 0 }; bytes / SECTOR],
            snapshots: Vec::new(),
            random: Random(seed << 8 | number),
            version: 0,
            fails: false,
            fua: true,
            counted: Counted::default(),
        }
    }

    fn request(&mut self) -> (std::ops::Range<usize>, Kind) {
        let all = self.sectors.len() as u64;
        let (align, length) = match self.random.below(8) {
            0 => (1, 1 + self.random.below(24)),
            1 => (8, 8 * (1 + self.random.below(32))),
            _ => (8, 8),
        };
        let space = if self.random.once_in(2) { all } else { all / 16 };
        let start = (self.random.below((space - length) / align) * align) as usize;
        let kind = [Kind::Trim, Kind::Zero, Kind::Write][self.random.below(16).min(2) as usize];
        (start..start + length as usize, kind)
    }

    /// Sends requests that do not overlap, with all in flight at once.
    pub fn round(&mut self, client: &mut Client) -> Result<(), Failure> {
        let mut sent: Vec<(u64, std::ops::Range<usize>, Kind, bool)> = Vec::new();
        for _ in 0..1 + self.random.below(ROUND_REQUESTS) {
            let (range, kind) = self.request();
            if sent.iter().any(|(_, other, ..)| other.start < range.end && range.start < other.end) {
                continue;
            }
            let fua = self.random.once_in(24) && self.fua;
            self.version += 1;
            let version = if kind == Kind::Write { self.version } else { 0 };
            range.clone().for_each(|sector| self.sectors[sector].versions.push(version));
            let (offset, length) = ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u32);
            let mut data = vec![0; if kind == Kind::Write { length as usize } else { 0 }];
            for (sector, content) in range.clone().zip(data.chunks_exact_mut(SECTOR)) {
                pattern::fill(content, self.number, sector as u64, version);
            }
            let command = match kind {
                Kind::Write => Command::Write { offset, data: &data, fua },
                Kind::Trim => Command::Trim { offset, length, fua },
                Kind::Zero => Command::Zero { offset, length, fua },
            };
            sent.push((client.submit(command)?, range, kind, fua));
        }
        for _ in 0..sent.len() {
            let (cookie, outcome) = client.complete()?;
            let (_, range, kind, fua) = sent.iter().find(|(asked, ..)| *asked == cookie).unwrap();
            self.counted.requests += 1;
            match outcome {
                // On failing storage a discard may leave the old content.
                Ok(_) if *kind == Kind::Trim && self.fails => {}
                Ok(_) => self.sectors[range.clone()].iter_mut().for_each(|sector| {
                    sector.acknowledged = sector.versions.len() - 1;
                    if *fua {
                        sector.flushed();
                    }
                }),
                Err(EIO) if self.fails => self.counted.refused += 1,
                Err(errno) => return Err(Failure::Errno(errno)),
            }
        }
        Ok(())
    }

    /// Sends a flush; returns whether it succeeded.
    pub fn flush(&mut self, client: &mut Client) -> Result<bool, Failure> {
        match client.flush() {
            Ok(()) => {
                self.flushed();
                Ok(true)
            }
            Err(Failure::Errno(EIO)) if self.fails => {
                self.counted.flushes_failed += 1;
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Records that all acknowledged writes are durable.
    pub fn flushed(&mut self) {
        let snapshots = self.snapshots.iter_mut().flat_map(|snapshot| &mut snapshot.sectors);
        snapshots.chain(&mut self.sectors).for_each(Sector::flushed);
    }

    /// Reads some of the disk and checks that no sector has an older or wrong version.
    pub fn look(&mut self, client: &mut Client) -> Result<(), Failure> {
        let start = self.random.below(self.sectors.len() as u64 / 8 - 64) as usize * 8;
        for piece in (start..start + 512).step_by(PIECE_BYTES / SECTOR) {
            match client.read((piece * SECTOR) as u64, PIECE_BYTES as u32) {
                Ok(bytes) => self.is_new(&bytes, piece),
                Err(Failure::Errno(EIO)) if self.fails => self.counted.sectors_unread += 8,
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    fn is_new(&self, bytes: &[u8], start: usize) {
        for (at, bytes) in bytes.chunks_exact(SECTOR).enumerate().map(|(at, bytes)| (start + at, bytes)) {
            let name = &self.name;
            let found = pattern::version(bytes, self.number, at as u64).unwrap_or_else(|e| panic!("{name}: {e}"));
            let Sector { versions, acknowledged } = &self.sectors[at];
            let allowed = &versions[*acknowledged..];
            assert!(allowed.contains(&found), "{name} sector {at}: {found} of {versions:?} is none of {allowed:?}");
        }
    }

    /// After the disk was opened again: checks that every sector can be read and has an allowed version, which must not
    /// change from then on.
    pub fn settle(&mut self, socket: &std::path::Path) {
        settle(socket, &self.name, self.number, &mut self.sectors, &mut self.counted);
    }

    pub fn settle_snapshots(&mut self, socket: &std::path::Path, listed: &[String]) {
        self.snapshots.retain(|snapshot| {
            let there = listed.contains(&snapshot.name);
            assert!(there || !snapshot.certain, "{}@{} is gone", self.name, snapshot.name);
            there
        });
        for Snapshot { name, sectors, certain } in &mut self.snapshots {
            settle(socket, &format!("{}@{name}", self.name), self.number, sectors, &mut self.counted);
            *certain = true;
        }
    }
}

fn settle(socket: &std::path::Path, export: &str, number: u64, sectors: &mut [Sector], counted: &mut Counted) {
    let mut client = Client::connect(socket, export).unwrap();
    let each = READ_BYTES / SECTOR;
    for (piece, sectors) in sectors.chunks_mut(each).enumerate() {
        let offset = (piece * READ_BYTES) as u64;
        let length = (sectors.len() * SECTOR) as u32;
        let bytes = client.read(offset, length).unwrap_or_else(|e| panic!("{export} at {offset}: {e:?}"));
        for (at, (bytes, sector)) in bytes.chunks_exact(SECTOR).zip(sectors).enumerate() {
            let at = piece * each + at;
            let found = pattern::version(bytes, number, at as u64).unwrap_or_else(|e| panic!("{export}: {e}"));
            let versions = &sector.versions;
            assert!(versions.contains(&found), "{export} sector {at}: {found} is none of {versions:?}");
            counted.sectors_lost += u64::from(!versions[sector.acknowledged..].contains(&found));
            sector.settle(found);
        }
    }
}
