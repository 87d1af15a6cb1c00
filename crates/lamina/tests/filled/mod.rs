//! A disk on a file system that may be full: a model of the allowed content of each sector, and of the requests that
//! need no space.
//!
//! A refused request, and a discard that finds no space to record its zeros, leaves each sector with its old or its new
//! content. The test reads the sector at once, and from then on the content must not change.

#![allow(clippy::unwrap_used)]

use std::ops::Range;
use testkit::history::{History, read_export};
use testkit::nbd::{Client, Command, ENOSPC, Failure};
use testkit::pattern::{self, SECTOR};
use testkit::process::Store;

/// Requests per round, and blocks of the largest request.
const ROUND_REQUESTS: u64 = 16;
const REQUEST_BLOCKS_MAX: u64 = 32;
const BLOCK_SECTORS: u64 = 8;
/// Different contents of a sector of a disk that is deduplicated.
const CONTENTS: u64 = 4;

/// Kind of requests in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Requests of all kinds.
    Any,
    /// Mostly writes of new blocks.
    Fill,
    /// Requests that need no space, so that none may be refused.
    Overwrite,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Trim,
    Zero,
}

struct Sent {
    cookie: u64,
    range: Range<usize>,
    kind: Kind,
    fua: bool,
    /// Whether every block of the range has allocated space that no snapshot or clone shares.
    placed: bool,
}

/// A disk and its model.
pub struct Filled {
    pub history: History,
    /// Sectors with space of their own, according to acknowledged requests.
    placed: Vec<bool>,
    /// Sectors with space of their own, according to durable requests.
    placed_durably: Vec<bool>,
    /// Whether the server compresses and deduplicates the disk, so that any overwrite may need space. Then few contents
    /// are written, so that disks with the same number have equal blocks.
    reduced: bool,
    /// Whether the file system may be full.
    pub full: bool,
    pub refused: u64,
    pub overwritten: u64,
}

impl Filled {
    /// A new disk; if `thick`, all its space is allocated.
    pub fn new(name: &str, number: u64, bytes: usize, seed: u64, thick: bool) -> Self {
        let mut history = History::new(name, number, bytes);
        history.random.0 ^= seed << 32;
        let placed = vec![thick; bytes / SECTOR];
        let placed_durably = placed.clone();
        Self { history, placed_durably, placed, reduced: false, full: false, refused: 0, overwritten: 0 }
    }

    /// A new disk that the server compresses and deduplicates.
    pub fn reduced(name: &str, number: u64, bytes: usize, seed: u64) -> Self {
        Self { reduced: true, ..Self::new(name, number, bytes, seed, false) }
    }

    fn request(&mut self, mix: Mix) -> Option<(Range<usize>, Kind)> {
        let random = &mut self.history.random;
        let all = self.history.sectors.len() as u64;
        let kind = match (mix, random.below(100)) {
            (Mix::Any, 0..12) => Kind::Trim,
            (Mix::Any, 12..20) | (Mix::Overwrite, 0..6) => Kind::Zero,
            _ => Kind::Write,
        };
        let (align, length) = match random.below(10) {
            0 if mix != Mix::Fill => (1, 1 + random.below(24)),
            0..3 => (BLOCK_SECTORS, BLOCK_SECTORS * (1 + random.below(REQUEST_BLOCKS_MAX))),
            _ => (BLOCK_SECTORS, BLOCK_SECTORS),
        };
        let start = random.below(all - length) / align * align;
        if mix != Mix::Overwrite {
            return Some((start as usize..(start + length) as usize, kind));
        }
        // The range begins at the next sector that has space, and ends where the space ends.
        let start = (start as usize..all as usize).find(|sector| self.placed[*sector])?;
        let end =
            (start..start + length as usize).take_while(|sector| self.placed.get(*sector) == Some(&true)).last()?;
        Some((start..end + 1, kind))
    }

    fn send(&mut self, client: &mut Client, mix: Mix) -> Result<Vec<Sent>, Failure> {
        let mut sent: Vec<Sent> = Vec::new();
        for _ in 0..1 + self.history.random.below(ROUND_REQUESTS) {
            let Some((range, kind)) = self.request(mix) else { continue };
            if sent.iter().any(|other| other.range.start < range.end && range.start < other.range.end) {
                continue;
            }
            let fua = self.history.random.once_in(24);
            self.history.version += 1;
            let version = match kind {
                Kind::Write if self.reduced => 1 + self.history.random.below(CONTENTS),
                Kind::Write => self.history.version,
                _ => 0,
            };
            range.clone().for_each(|sector| self.history.sectors[sector].push(version));
            let (offset, length) = ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u32);
            let mut data = vec![0; if kind == Kind::Write { range.len() * SECTOR } else { 0 }];
            for (sector, content) in range.clone().zip(data.chunks_exact_mut(SECTOR)) {
                pattern::fill(content, self.history.number, sector as u64, version);
            }
            let command = match kind {
                Kind::Write => Command::Write { offset, data: &data, fua },
                Kind::Trim => Command::Trim { offset, length, fua },
                Kind::Zero => Command::Zero { offset, length, fua },
            };
            let placed = self.placed[range.clone()].iter().all(|placed| *placed);
            if kind != Kind::Write {
                // Even if the connection ends before the reply, the discard may have freed the space.
                self.placed[range.clone()].fill(false);
                self.placed_durably[range.clone()].fill(false);
            }
            sent.push(Sent { cookie: client.submit(command)?, range, kind, fua, placed });
        }
        Ok(sent)
    }

    /// Sends requests that do not overlap, with all in flight at once; returns the number of refused ones.
    pub fn round(&mut self, client: &mut Client, mix: Mix) -> Result<u64, Failure> {
        let sent = self.send(client, mix)?;
        let mut in_doubt = Vec::new();
        let mut refused = 0;
        for _ in 0..sent.len() {
            let (cookie, outcome) = client.complete()?;
            let Sent { range, kind, fua, placed, .. } = sent.iter().find(|sent| sent.cookie == cookie).unwrap();
            let name = &self.history.name;
            match outcome {
                Ok(_) => self.took_effect(range.clone(), *kind, *fua),
                Err(ENOSPC) => {
                    assert!(*kind != Kind::Trim, "{name}: a discard of {range:?} was refused");
                    assert!(!*placed, "{name}: an overwrite of {range:?} was refused");
                    assert!(self.full, "{name}: {range:?} was refused although there is space");
                    refused += 1;
                }
                Err(errno) => return Err(Failure::Errno(errno)),
            }
            self.overwritten += u64::from(outcome.is_ok() && *kind == Kind::Write && *placed);
            if outcome.is_err() || *kind == Kind::Trim && self.full {
                in_doubt.push(range.clone());
            }
        }
        in_doubt.into_iter().try_for_each(|range| self.look(client, range))?;
        self.refused += refused;
        Ok(refused)
    }

    fn took_effect(&mut self, range: Range<usize>, kind: Kind, fua: bool) {
        if kind == Kind::Write && !self.reduced {
            self.placed[range.clone()].fill(true);
            self.placed_durably[range.clone()].iter_mut().for_each(|placed| *placed |= fua);
        }
        if fua && !(kind == Kind::Trim && self.full) {
            self.history.sectors[range].iter_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1)));
        }
    }

    /// Reads the content that a request has left. From then on, it must not change.
    fn look(&mut self, client: &mut Client, range: Range<usize>) -> Result<(), Failure> {
        let found = client.read((range.start * SECTOR) as u64, (range.len() * SECTOR) as u32)?;
        let History { name, number, sectors, .. } = &mut self.history;
        for (sector, bytes) in range.zip(found.chunks_exact(SECTOR)) {
            let version = pattern::version(bytes, *number, sector as u64).unwrap_or_else(|e| panic!("{name}: {e}"));
            let versions = &mut sectors[sector];
            let allowed = &versions[versions.len().saturating_sub(2)..];
            assert!(allowed.contains(&version), "{name} sector {sector}: {version} is none of {allowed:?}");
            versions.push(version);
        }
        Ok(())
    }

    /// Flushes the disk, which must never fail for lack of space.
    pub fn flush(&mut self, client: &mut Client) -> Result<(), Failure> {
        self.history.flush(client)?;
        self.placed_durably.clone_from(&self.placed);
        Ok(())
    }

    /// Discards a large range.
    pub fn discard(&mut self, client: &mut Client) -> Result<(), Failure> {
        let all = self.history.sectors.len();
        let start = self.history.random.below(all as u64) as usize / 8 * 8;
        let range = start..(start + all / 4).min(all);
        let done = client.trim((range.start * SECTOR) as u64, (range.len() * SECTOR) as u32);
        range.clone().for_each(|sector| self.history.sectors[sector].push(0));
        self.placed[range.clone()].fill(false);
        self.placed_durably[range.clone()].fill(false);
        done?;
        self.look(client, range)
    }

    /// A snapshot was requested. Whether it exists or not, all blocks of the disk may be shared now.
    pub fn share(&mut self) {
        self.placed.fill(false);
        self.placed_durably.fill(false);
    }

    /// Checks that disk and snapshots have the acknowledged content.
    pub fn is_whole(&self, store: &Store) {
        let history = &self.history;
        history.is(&read_export(store, &history.name), &history.name);
        for (snapshot, _) in &history.snapshots {
            let export = format!("{}@{snapshot}", history.name);
            history.snapshot_is(snapshot, &read_export(store, &export), &export);
        }
    }

    /// After a kill: flushed data must exist, and the content found must not change from then on.
    pub fn settle(&mut self, store: &Store) {
        self.history.verify(store);
        self.history.verify_snapshots(store);
        self.placed.clone_from(&self.placed_durably);
    }
}
