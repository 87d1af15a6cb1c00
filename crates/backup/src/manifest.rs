//! What a backup is: its description, which is known when it begins, and its manifest, which is written when it is
//! complete. Both are records with a version and a checksum ([`disk::sealed`]); `docs/format/backup.md` lists the
//! members.
//!
//! The records of a machine's backup have version 2, those of a disk's backup version 1. A program that reads version 1
//! only does not delete what the backup of a machine needs: it deletes no backup as long as there is a manifest that it
//! cannot read.

use crate::machine::{MachineDescription, MachineDisk};
use crate::pack::{BODY_MAX, HEAD};
use crate::seal::Key;
use disk::Provisioning;
use disk::sealed::Kind;
use disk::transfer::{SEGMENT, SnapshotIdentity};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use uuid::Uuid;

const DESCRIPTION: Kind = Kind { word: "backup description", version: 1, length_max: 64 << 10 };
const MANIFEST: Kind = Kind { word: "backup", version: 1, length_max: 512 << 20 };
/// The description of a machine's backup.
const MACHINE_DESCRIPTION: Kind = Kind { version: 2, ..DESCRIPTION };
/// The manifest of a machine's backup.
const MACHINE_MANIFEST: Kind = Kind { version: 2, ..MANIFEST };
/// Prefix of the name of a machine's backup. The name of a disk has no colon.
pub(crate) const MACHINE: &str = "machine:";
const REPOSITORY: Kind = Kind { word: "backup repository", version: 1, length_max: 4096 };
/// Longest name in a record, in bytes.
pub(crate) const NAME_MAX: usize = 512;

/// The record of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepositoryRecord {
    /// The repository's identity, a UUID.
    pub id: String,
    /// When the repository was created, in seconds since 1970.
    pub created: u64,
}

/// The state on which an increment is based.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// The backup of that state in the same repository; `None` in a file or stream.
    pub backup: Option<String>,
    /// The snapshot.
    pub point: SnapshotIdentity,
}

/// The description of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The backup's identity, a UUID.
    pub id: String,
    /// Name of the disk, or of the machine.
    pub disk: String,
    /// Capacity of the disk in bytes; for a machine, the bytes of its files.
    pub capacity: u64,
    /// The disk's provisioning type.
    pub provisioning: Provisioning,
    /// The snapshot whose content the backup has. The snapshots of machines have no identity, so the one of a machine
    /// here is that of the attempt.
    pub point: SnapshotIdentity,
    /// The state on which the backup is based; `None` for a backup of all data.
    pub parent: Option<Parent>,
    /// Identity of the key with which the data is encrypted; `None` without encryption.
    pub key: Option<String>,
    /// When the backup began, in seconds since 1970.
    pub begun: u64,
    /// The number of the backup in its repository, from 1 on; 0 in a file or stream.
    pub number: u64,
    /// The program that made the backup.
    pub program: String,
    /// The machine; `None` for the backup of a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineDescription>,
}

/// A pack of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackRecord {
    /// The segment after the last segment of the pack. The pack begins where the previous pack ends.
    pub end: u32,
    /// Bytes of the pack.
    pub length: u64,
    /// CRC32C of the pack's head.
    pub sum: u32,
}

/// A complete backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The description.
    pub backup: Description,
    /// When the backup was complete, in seconds since 1970.
    pub finished: u64,
    /// Bytes of data before compression.
    pub data: u64,
    /// Bytes that are zero in the snapshot, but not in the parent.
    pub zeros: u64,
    /// The packs.
    pub packs: Vec<PackRecord>,
    /// The disks of the machine with their backups; empty for the backup of a disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<MachineDisk>,
}

/// The kind of a record that has one version for disks and another one for machines, by its first line.
fn kind_of(bytes: &[u8], of_disk: &'static Kind, of_machine: &'static Kind) -> &'static Kind {
    let first = format!("lamina {} {} ", of_disk.word, of_disk.version);
    if bytes.starts_with(first.as_bytes()) { of_disk } else { of_machine }
}

/// Whether a text can be a name in a record.
pub(crate) fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= NAME_MAX && !text.chars().any(char::is_control)
}

/// The bytes of a UUID in its usual text form.
pub(crate) fn parse_id(text: &str) -> Option<[u8; 16]> {
    let uuid = Uuid::try_parse(text).ok()?;
    (uuid.hyphenated().to_string() == text).then(|| *uuid.as_bytes())
}

/// Number of segments of a disk.
pub(crate) fn segments(capacity: u64) -> u32 {
    u32::try_from(capacity.div_ceil(SEGMENT)).unwrap_or(u32::MAX)
}

fn contradiction(kind: &Kind) -> Error {
    kind.corrupt("contradicts itself")
}

impl RepositoryRecord {
    /// The encoded record.
    pub fn encode(&self) -> Result<Vec<u8>> {
        REPOSITORY.encode(self)
    }

    /// Decodes and checks a record.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let record: Self = REPOSITORY.decode(bytes)?;
        if parse_id(&record.id).is_some() { Ok(record) } else { Err(contradiction(&REPOSITORY)) }
    }

    /// Most bytes of an encoded record.
    pub const LENGTH_MAX: u64 = REPOSITORY.length_max;
}

impl Description {
    /// The name `disk@snapshot`, or `machine:machine@snapshot`.
    pub fn source(&self) -> String {
        let prefix = if self.machine.is_some() { MACHINE } else { "" };
        format!("{prefix}{}@{}", self.disk, self.point.name)
    }

    fn kind(&self) -> &'static Kind {
        if self.machine.is_some() { &MACHINE_DESCRIPTION } else { &DESCRIPTION }
    }

    /// The key for reading the backup, if it needs one.
    ///
    /// # Errors
    /// `Invalid` without the right key.
    pub fn choose_key(&self, given: Option<&Arc<Key>>) -> Result<Option<Arc<Key>>> {
        let Some(id) = &self.key else { return Ok(None) };
        if let Some(key) = given.filter(|key| key.id() == id) {
            return Ok(Some(Arc::clone(key)));
        }
        let why = match given {
            Some(key) => format!("the given file has the key {}", key.id()),
            None => "give the file of that key with --key-file".to_owned(),
        };
        let text = format!("the backup of '{}' is encrypted with the key {id}: {why}", self.source());
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// The bytes of the identity.
    pub fn id_bytes(&self) -> Result<[u8; 16]> {
        parse_id(&self.id).ok_or_else(|| contradiction(&DESCRIPTION))
    }

    fn holds(&self) -> bool {
        let point = |point: &SnapshotIdentity| parse_id(&point.uuid).is_some() && is_name(&point.name);
        let parent = |parent: &Parent| {
            point(&parent.point) && parent.backup.as_deref().is_none_or(|id| parse_id(id).is_some() && id != self.id)
        };
        parse_id(&self.id).is_some()
            && is_name(&self.disk)
            && point(&self.point)
            && self.parent.as_ref().is_none_or(parent)
            && (1..=u64::from(u32::MAX) * SEGMENT).contains(&self.capacity)
            && self.program.len() <= NAME_MAX
            && self.machine.as_ref().is_none_or(|machine| self.parent.is_none() && machine.holds(self.capacity))
            && self
                .key
                .as_deref()
                .is_none_or(|key| key.len() == 16 && key.bytes().all(|digit| digit.is_ascii_hexdigit()))
    }

    /// The encoded record.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.kind().encode(self)
    }

    /// Decodes and checks a record. Any input gives a consistent description or an error.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let kind = kind_of(bytes, &DESCRIPTION, &MACHINE_DESCRIPTION);
        let description: Self = kind.decode(bytes)?;
        let right = description.holds() && description.kind().version == kind.version;
        if right { Ok(description) } else { Err(contradiction(kind)) }
    }

    /// Most bytes of an encoded record.
    pub const LENGTH_MAX: u64 = DESCRIPTION.length_max;
}

impl Manifest {
    fn holds(&self) -> bool {
        let mut last = 0;
        let ordered = self.packs.iter().all(|pack| {
            let fits = pack.end > last && (HEAD as u64..=(HEAD + BODY_MAX) as u64).contains(&pack.length);
            last = pack.end;
            fits
        });
        let disks = match &self.backup.machine {
            Some(_) => MachineDisk::hold(&self.disks, &self.backup.id),
            None => self.disks.is_empty(),
        };
        self.backup.holds() && ordered && last == segments(self.backup.capacity) && disks
    }

    fn kind(&self) -> &'static Kind {
        if self.backup.machine.is_some() { &MACHINE_MANIFEST } else { &MANIFEST }
    }

    /// Identities of the backups without which this one is of no use: the one on which it is based, and those of a
    /// machine's disks.
    pub(crate) fn needs(&self) -> impl Iterator<Item = &String> {
        let parent = self.backup.parent.as_ref().and_then(|parent| parent.backup.as_ref());
        parent.into_iter().chain(self.disks.iter().map(|disk| &disk.backup))
    }

    /// Bytes of all packs.
    pub fn stored(&self) -> u64 {
        self.packs.iter().map(|pack| pack.length).sum()
    }

    /// The pack that covers a segment of the disk.
    pub(crate) fn pack_of(&self, segment: u32) -> Option<usize> {
        let place = self.packs.partition_point(|pack| pack.end <= segment);
        (place < self.packs.len()).then_some(place)
    }

    /// The encoded record.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let bytes = self.kind().encode(self)?;
        if bytes.len() as u64 > Self::LENGTH_MAX {
            let text = format!("the manifest of the backup of '{}' is too long", self.backup.source());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(bytes)
    }

    /// Decodes and checks a record. Any input gives a consistent manifest or an error.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let kind = kind_of(bytes, &MANIFEST, &MACHINE_MANIFEST);
        let manifest: Self = kind.decode(bytes)?;
        let right = manifest.holds() && manifest.kind().version == kind.version;
        if right { Ok(manifest) } else { Err(contradiction(kind)) }
    }

    /// Most bytes of an encoded record.
    pub const LENGTH_MAX: u64 = MANIFEST.length_max;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::testbed;

    #[test]
    fn the_format_page_shows_the_encoded_records() {
        let page = include_str!("../../../docs/format/backup.md");
        let manifest = testbed::manifest(40 << 20);
        let repository = RepositoryRecord { id: manifest.backup.id.clone(), created: 1_794_800_000 };
        let machine = testbed::machine_manifest();
        let records = [manifest.backup.encode(), manifest.encode(), repository.encode(), machine.encode()];
        for bytes in records.map(Result::unwrap) {
            let example = String::from_utf8(bytes).unwrap();
            assert!(page.contains(&example), "docs/format/backup.md should show:\n{example}");
        }
    }

    #[test]
    fn damage_and_contradictions_are_found() {
        let manifest = testbed::manifest(40 << 20);
        let good = manifest.encode().unwrap();
        assert_eq!(Manifest::decode(&good).unwrap(), manifest);
        assert_eq!(Description::decode(&manifest.backup.encode().unwrap()).unwrap(), manifest.backup);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x04;
            assert!(Manifest::decode(&bad).is_err(), "byte {at}");
            assert!(Manifest::decode(&good[..at]).is_err());
        }
        let changes: [&dyn Fn(&mut Manifest); 7] = [
            &|m| m.packs.clear(),
            &|m| m.packs[0].end = 0,
            &|m| m.packs[1].end = 2,
            &|m| m.packs[1].length = 63,
            &|m| m.backup.capacity = 0,
            &|m| m.backup.disk = "a\nb".into(),
            &|m| m.backup.id = m.backup.id.to_uppercase(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut bad = manifest.clone();
            change(&mut bad);
            assert_eq!(Manifest::decode(&bad.encode().unwrap()).unwrap_err().kind(), ErrorKind::Corrupt, "{number}");
        }
    }

    #[test]
    fn the_records_of_a_machine_have_a_version_of_their_own_and_contradictions_are_found() {
        let machine = testbed::machine_manifest();
        let good = machine.encode().unwrap();
        assert_eq!(Manifest::decode(&good).unwrap(), machine);
        assert_eq!(Description::decode(&machine.backup.encode().unwrap()).unwrap(), machine.backup);
        // A program that knows version 1 only refuses the record.
        assert_eq!(MANIFEST.decode::<Manifest>(&good).unwrap_err().kind(), ErrorKind::Unsupported);
        let later = String::from_utf8(good.clone()).unwrap().replacen("backup 2", "backup 3", 1);
        let error = Manifest::decode(later.as_bytes()).unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("reads 2"), "{error}");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x04;
            assert!(Manifest::decode(&bad).is_err(), "byte {at}");
        }
        // The version of the one with the members of the other.
        for (kind, record) in [(&MANIFEST, &machine), (&MACHINE_MANIFEST, &testbed::manifest(40 << 20))] {
            assert!(Manifest::decode(&kind.encode(record).unwrap()).is_err());
        }
        let parent = testbed::manifest(40 << 20).backup.parent;
        let changes: [&dyn Fn(&mut Manifest); 9] = [
            &|m| m.disks[1].disk = m.disks[0].disk.clone(),
            &|m| m.disks[0].backup = m.backup.id.clone(),
            &|m| m.disks[0].backup.push('x'),
            &|m| m.backup.capacity += 1,
            &|m| m.backup.parent = parent.clone(),
            &|m| m.backup.machine.as_mut().unwrap().uuid.clear(),
            &|m| m.backup.machine.as_mut().unwrap().files[0].length = u64::MAX,
            &|m| m.backup.machine.as_mut().unwrap().files[1].name = "machine.toml".into(),
            &|m| m.backup.machine.as_mut().unwrap().files.clear(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut bad = machine.clone();
            change(&mut bad);
            assert_eq!(Manifest::decode(&bad.encode().unwrap()).unwrap_err().kind(), ErrorKind::Corrupt, "{number}");
        }
    }
}
