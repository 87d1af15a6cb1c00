//! The persistent record of a reception: which disks are being received, and which of their segments are complete.
//!
//! 1. The file is durable before the hidden disks are created. It is removed after the disks have become visible, or
//!    after the received data was removed.
//! 2. The file is replaced atomically (temporary name, flush, rename, flush of the folder).
//! 3. Segments are durable before the file lists them.
//! 4. Other threads may list the records while a record is replaced or removed: a listing changes no file.
//!
//! The layout is in `docs/format/reception.md`.

use super::DISKS_MAX;
use crate::info::Provisioning;
use crate::names;
use crate::sealed::{self, Kind, TEMPORARY};
use backend::Directory;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Prefix of the files' names.
const PREFIX: &str = "reception-";
/// Kind of the files.
const KIND: Kind = Kind { word: "reception", version: 1, length_max: 4 << 20 };
/// Most receptions that a datastore keeps.
pub(crate) const RECEPTIONS_MAX: usize = 256;
/// Most ranges of received segments that are recorded per disk. After an interruption, segments in further ranges are
/// received again.
pub(crate) const RANGES_MAX: usize = 1024;

/// A snapshot. Its identity is the same in every datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotIdentity {
    /// UUID of the snapshot.
    pub uuid: String,
    /// Name of the snapshot.
    pub name: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
}

/// One disk that is being received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Arriving {
    /// The name that the disk will have, or the name of the disk that it updates.
    pub name: String,
    /// The identity of the received disk.
    pub uuid: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// The disk's provisioning type.
    pub provisioning: Provisioning,
    /// The snapshot that is sent.
    pub point: SnapshotIdentity,
    /// Whether a snapshot with that identity is taken of the received disk.
    pub keep: bool,
    /// Identity of the snapshot on which the hidden disk is based, and which both datastores have.
    pub base: Option<String>,
    /// Whether the received disk updates an existing disk; otherwise it becomes a new disk.
    pub update: bool,
    /// Ranges of received segments: the first segment, and the first segment after the range.
    pub done: Vec<(u64, u64)>,
    /// Bytes of data in the segments of `done`.
    pub bytes: u64,
    /// Received segments that are not recorded.
    #[serde(skip)]
    pub unlisted: Unlisted,
}

/// Received segments that the record does not list, because it has [`RANGES_MAX`] ranges already.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unlisted {
    /// One bit for each segment of the disk; empty if there is no such segment.
    bits: Vec<u64>,
    /// Number of these segments.
    pub segments: u64,
    /// Bytes of data in these segments.
    pub bytes: u64,
}

impl Unlisted {
    /// Whether a segment is one of them.
    pub fn has(&self, segment: u64) -> bool {
        self.bits.get((segment / 64) as usize).is_some_and(|word| (word >> (segment % 64)) & 1 == 1)
    }

    /// Adds a segment with `bytes` of data, of a disk that has `all` segments.
    pub fn add(&mut self, segment: u64, bytes: u64, all: u64) {
        self.bits.resize(all.div_ceil(64) as usize, 0);
        self.bits[(segment / 64) as usize] |= 1 << (segment % 64);
        self.segments += 1;
        self.bytes += bytes;
    }
}

/// The record of a reception.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    /// Identity of the reception, part of the file's name.
    pub id: String,
    /// The name that the sender has given for itself.
    pub sender: String,
    /// When the reception began, in seconds since 1970.
    pub begun: u64,
    /// The disks that are received.
    pub disks: Vec<Arriving>,
    /// The definition of a virtual machine that is received with the disks.
    pub attachment: Option<String>,
}

impl Record {
    /// The hidden name of a disk, which cannot be the name of a user's disk.
    pub fn hidden(&self, disk: usize) -> String {
        hidden_name(&self.id, disk)
    }
}

pub(crate) fn hidden_name(id: &str, disk: usize) -> String {
    format!("{}{disk}", hidden_prefix(id))
}

/// Prefix of the hidden names of a reception's disks.
pub(crate) fn hidden_prefix(id: &str) -> String {
    format!(".receiving-{id}-")
}

/// The reception records of one datastore.
pub(crate) struct Records {
    directory: Arc<dyn Directory>,
}

/// A record file.
pub(crate) enum Found {
    /// A valid record.
    Record(Box<Record>),
    /// A record of a later version of lamina, with the reception's identity.
    Newer(String),
    /// A record that cannot be read, with the reception's identity.
    Damaged(String, Error),
}

fn file_name(id: &str) -> Result<String> {
    match names::parse_uuid(id).filter(|uuid| names::uuid_text(uuid) == id) {
        Some(_) => Ok(format!("{PREFIX}{id}")),
        None => {
            let text = format!("'{}' is not the id of a reception", id.escape_debug());
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

impl Records {
    /// The records in the folder of a datastore.
    pub fn new(directory: Arc<dyn Directory>) -> Self {
        Self { directory }
    }

    /// Writes a record durably, replacing an earlier one with the same identity.
    pub fn put(&self, record: &Record) -> Result<()> {
        let name = file_name(&record.id)?;
        sealed::put(&*self.directory, &name, &encode(record)?)
            .during(|| format!("recording what was received of disk '{}'", title(record)))
    }

    /// Removes a record durably.
    pub fn remove(&self, id: &str) -> Result<()> {
        KIND.remove(&*self.directory, &file_name(id)?)
    }

    /// Removes temporary files, which interrupted writes have left. The caller ensures that no record is being written.
    pub fn sweep(&self) -> Result<()> {
        let names = self.directory.list().during(|| "looking for receptions".into())?;
        let temporary = |name: &&String| name.starts_with(PREFIX) && name.ends_with(TEMPORARY);
        names.iter().filter(temporary).try_for_each(|name| {
            sealed::remove_if_there(&*self.directory, name).during(|| format!("removing '{name}'"))
        })
    }

    /// All records.
    pub fn all(&self) -> Result<Vec<Found>> {
        let names = self.directory.list().during(|| "looking for receptions".into())?;
        self.found(&names)
    }

    fn found(&self, names: &[String]) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        for name in names {
            let Some(id) = name.strip_prefix(PREFIX) else { continue };
            if found.len() >= RECEPTIONS_MAX || file_name(id).is_err() {
                continue;
            }
            found.push(match self.read(name) {
                // The reception was completed or deleted after the files were listed.
                Ok(None) => continue,
                Ok(Some(record)) if record.id == id => Found::Record(Box::new(record)),
                Ok(Some(_)) => {
                    let text = format!("'{name}' is the record of another reception");
                    Found::Damaged(id.to_owned(), Error::new(ErrorKind::Corrupt, text))
                }
                Err(error) if error.kind() == ErrorKind::Unsupported => Found::Newer(id.to_owned()),
                Err(error) if error.kind() == ErrorKind::Corrupt => Found::Damaged(id.to_owned(), error),
                Err(error) => return Err(error),
            });
        }
        Ok(found)
    }

    fn read(&self, name: &str) -> Result<Option<Record>> {
        let Some(bytes) = KIND.read(&*self.directory, name)? else { return Ok(None) };
        decode(&bytes).map(Some).map_err(|error| error.context(name))
    }
}

/// The disks of a record, for messages.
pub(crate) fn title(record: &Record) -> String {
    crate::native::list(record.disks.iter().map(|disk| disk.name.as_str()))
}

fn encode(record: &Record) -> Result<Vec<u8>> {
    let bytes = KIND.encode(record)?;
    if bytes.len() as u64 > KIND.length_max {
        let text = format!("a record of a reception of {} bytes is too long", bytes.len());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(bytes)
}

/// Decodes and checks a record. Any input gives a consistent record or an error.
pub(crate) fn decode(bytes: &[u8]) -> Result<Record> {
    let record: Record = KIND.decode(bytes)?;
    let identity = |text: &str| names::parse_uuid(text).is_some();
    let holds = |disk: &Arriving| {
        let segments = disk.capacity.div_ceil(super::SEGMENT);
        // Ranges must be in order, not adjacent, not empty, and within the disk.
        let mut last = None;
        let ranges = disk.done.iter().all(|(from, to)| {
            let fits = from < to && *to <= segments && last.is_none_or(|last| last < *from);
            last = Some(*to);
            fits
        });
        ranges
            && disk.done.len() <= RANGES_MAX
            && identity(&disk.uuid)
            && identity(&disk.point.uuid)
            && disk.base.as_deref().is_none_or(identity)
            && (!disk.update || disk.base.is_some() && disk.keep)
            && names::check_existing("disk", &disk.name).is_ok()
            && names::check_existing("snapshot", &disk.point.name).is_ok()
            && crate::native::check_capacity(&disk.name, disk.capacity).is_ok()
    };
    let some = !record.disks.is_empty() && record.disks.len() <= DISKS_MAX;
    match some && record.disks.iter().all(holds) && file_name(&record.id).is_ok() {
        true => Ok(record),
        false => Err(KIND.corrupt("contradicts itself")),
    }
}

/// Decodes bytes and encodes the record again, for fuzz tests.
#[doc(hidden)]
pub fn recode(bytes: &[u8]) -> Option<Vec<u8>> {
    decode(bytes).ok().and_then(|record| encode(&record).ok())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use backend::simulated::{SimulatedDisk, SimulatedOptions};

    fn record(done: &[(u64, u64)]) -> Record {
        Record {
            id: "0f0e0d0c-0b0a-4908-8706-050403020100".into(),
            sender: "lamina 0.1.0 on 192.0.2.7".into(),
            begun: 1_795_000_000,
            disks: vec![Arriving {
                name: "größe".into(),
                uuid: "0f0e0d0c-0b0a-4908-8706-050403020101".into(),
                capacity: 1 << 30,
                provisioning: Provisioning::Thin,
                point: SnapshotIdentity {
                    uuid: "0f0e0d0c-0b0a-4908-8706-050403020102".into(),
                    name: "monday".into(),
                    created: 1_794_900_000,
                },
                keep: true,
                base: None,
                update: false,
                done: done.to_vec(),
                bytes: 47 << 20,
                unlisted: Unlisted::default(),
            }],
            attachment: None,
        }
    }

    #[test]
    fn records_are_listed_while_another_thread_writes_and_removes_one() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let records = Records::new(disk.directory());
        records.put(&record(&[])).unwrap();
        let name = file_name(&record(&[]).id).unwrap();
        let temporary = format!("{name}{TEMPORARY}");
        backend::replace::prepare(&*disk.directory(), &temporary, &[7; 100]).unwrap();
        assert_eq!(records.all().unwrap().len(), 1);
        assert!(disk.directory().list().unwrap().contains(&temporary), "a file that is being written was removed");
        records.remove(&record(&[]).id).unwrap();
        assert!(records.found(&[name, temporary]).unwrap().is_empty());
        records.sweep().unwrap();
        assert!(disk.directory().list().unwrap().is_empty());
    }

    #[test]
    fn the_format_page_shows_the_encoded_record() {
        let page = include_str!("../../../../docs/format/reception.md");
        let example = String::from_utf8(encode(&record(&[(0, 2), (4, 5)])).unwrap()).unwrap();
        assert!(page.contains(&example), "docs/format/reception.md should show:\n{example}");
    }

    #[test]
    fn after_any_power_cut_the_record_is_the_old_or_the_new_one() {
        for cut in 0..40 {
            for seed in 0..8 {
                let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
                disk.cut_after(cut);
                let records = Records::new(disk.directory());
                let steps = [record(&[]), record(&[(0, 1)])];
                let mut reached = 0;
                for step in 0..3 {
                    let done = match steps.get(step) {
                        Some(record) => records.put(record),
                        None => records.remove(&steps[0].id),
                    };
                    if done.is_err() {
                        break;
                    }
                    reached += 1;
                }
                let disk = disk.crash();
                let all = Records::new(disk.directory()).all().unwrap();
                let seen: Vec<Record> = all
                    .into_iter()
                    .map(|found| match found {
                        Found::Record(record) => *record,
                        _ => panic!("cut {cut} seed {seed}: damaged"),
                    })
                    .collect();
                let expected: [&[Record]; 4] = [&[], &steps[..1], &steps[1..], &[]];
                let allowed = [expected[reached], expected[(reached + 1).min(3)]];
                assert!(allowed.contains(&&seen[..]), "cut {cut} seed {seed}: {seen:?} after {reached} steps");
            }
        }
    }

    #[test]
    fn damage_is_found() {
        let good = encode(&record(&[(3, 9)])).unwrap();
        assert_eq!(decode(&good).unwrap(), record(&[(3, 9)]));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x04;
            assert!(decode(&bad).is_err(), "byte {at}");
            assert!(decode(&good[..at]).is_err());
        }
        let newer = String::from_utf8(good).unwrap().replace("reception 1", "reception 2");
        assert_eq!(decode(newer.as_bytes()).unwrap_err().kind(), ErrorKind::Unsupported);
        for done in [&[(1, 1)][..], &[(2, 1)], &[(0, 65)], &[(0, 2), (2, 3)], &[(5, 6), (0, 1)]] {
            assert!(decode(&encode(&record(done)).unwrap()).is_err(), "{done:?}");
        }
        assert!(file_name("../../etc/passwd").is_err());
    }
}
