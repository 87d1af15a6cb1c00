//! Readers: disks that are used while they are restored from backups of a repository. A record in the repository names
//! the backups of each, so that no command deletes them meanwhile, on any host.
//!
//! 1. The record is durable before the disk exists, and is removed after the disk has all content or is deleted.
//! 2. A reader that ended without removing its record, because the repository could not be written or the datastore is
//!    gone, is removed by a user ([`Repository::forget_readers`]).
//! 3. A record that cannot be read protects all backups.

use crate::manifest::parse_id;
use crate::repository::Repository;
use backend::clock;
use disk::sealed::Kind;
use disk::transfer::new_identity;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Prefix of the objects' names.
pub(crate) const READER: &str = "reader-";
const KIND: Kind = Kind { word: "backup reader", version: 1, length_max: 1 << 20 };

/// A disk that is being restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReaderRecord {
    /// Identity of the record, a UUID.
    pub id: String,
    /// Identities of the backup and those on which it is based, the newest first.
    pub backups: Vec<String>,
    /// The disk.
    pub disk: String,
    /// The datastore of the disk.
    pub datastore: String,
    /// When the restore began, in seconds since 1970.
    pub begun: u64,
}

impl ReaderRecord {
    /// The encoded record.
    pub fn encode(&self) -> Result<Vec<u8>> {
        KIND.encode(self)
    }

    /// Decodes and checks a record. Any input gives a consistent record or an error.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let record: Self = KIND.decode(bytes)?;
        let ids = record.backups.iter().chain([&record.id]);
        match ids.into_iter().all(|id| parse_id(id).is_some()) && !record.backups.is_empty() {
            true => Ok(record),
            false => Err(KIND.corrupt("contradicts itself")),
        }
    }
}

/// Why backups are not deleted.
enum Protection {
    /// Identities of the backups, and the disk that is restored from them.
    Some(BTreeMap<String, String>),
    /// All backups, because a record cannot be read.
    All(Error),
}

impl Repository {
    /// Protects backups from deletion, for a disk that is restored from them; returns the identity of the record.
    ///
    /// # Errors
    /// `Busy` while another command changes the repository, `NotFound` if a backup is gone.
    pub(crate) fn add_reader(&self, backups: &[&str], disk: &str, datastore: &str) -> Result<String> {
        let _lock = self.lock()?;
        for id in backups {
            self.find(id)?;
        }
        let record = ReaderRecord {
            id: new_identity()?,
            backups: backups.iter().map(|id| (*id).to_owned()).collect(),
            disk: disk.to_owned(),
            datastore: datastore.to_owned(),
            begun: clock::seconds(),
        };
        self.objects().put(&format!("{READER}{}", record.id), &record.encode()?)?;
        Ok(record.id)
    }

    /// Whether the repository has the record of a reader. False if that cannot be found out.
    pub(crate) fn has_reader(&self, id: &str) -> bool {
        parse_id(id).is_some() && self.objects().length(&format!("{READER}{id}")).is_ok_and(|found| found.is_some())
    }

    /// Removes the record of a reader, which may be gone.
    pub(crate) fn remove_reader(&self, id: &str) -> Result<()> {
        if parse_id(id).is_none() {
            return Err(Error::new(ErrorKind::Corrupt, format!("'{}' is not a UUID", id.escape_debug())));
        }
        self.objects().remove(&format!("{READER}{id}"))?;
        self.objects().settle()
    }

    /// The readers, by the names of their objects.
    fn readers(&self) -> Result<Vec<(String, Result<ReaderRecord>)>> {
        let names = self.objects().list()?.into_iter().filter(|name| name.starts_with(READER));
        let mut readers = Vec::new();
        for name in names {
            match self.record(&name, KIND.length_max) {
                Ok(bytes) => {
                    let record = ReaderRecord::decode(&bytes);
                    readers.push((name.clone(), record.map_err(|error| error.context(format!("'{name}'")))));
                }
                // The restore ended after the objects were listed.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(readers)
    }

    fn protection(&self) -> Result<Protection> {
        let mut backups = BTreeMap::new();
        for (_, record) in self.readers()? {
            match record {
                Ok(record) => {
                    let reader = format!("disk '{}' of the datastore '{}'", record.disk, record.datastore);
                    backups.extend(record.backups.into_iter().map(|id| (id, reader.clone())));
                }
                Err(error) => return Ok(Protection::All(error)),
            }
        }
        Ok(Protection::Some(backups))
    }

    /// `Busy` if a disk is being restored from one of the backups. The caller holds the lock.
    pub(crate) fn refuse_read<'a>(&self, backups: impl IntoIterator<Item = &'a String>) -> Result<()> {
        let mut backups = backups.into_iter().peekable();
        if backups.peek().is_none() {
            return Ok(());
        }
        let text = match self.protection()? {
            Protection::All(error) => format!("{error}: a disk may be being restored from any backup"),
            Protection::Some(read) => {
                let found = backups.find_map(|id| Some((id, read.get(id)?)));
                let Some((id, reader)) = found else { return Ok(()) };
                format!("backup {id} cannot be deleted: {reader} is being restored from it")
            }
        };
        let remedy = "wait until the restore is complete; if that disk does not exist any more, 'lamina backup delete \
                      --force' deletes the backup";
        Err(Error::new(ErrorKind::Busy, format!("{text}; {remedy}")))
    }

    /// The backups from which disks are being restored.
    ///
    /// # Errors
    /// The error of a record that cannot be read.
    pub(crate) fn read_backups(&self) -> Result<Vec<String>> {
        match self.protection()? {
            Protection::Some(backups) => Ok(backups.into_keys().collect()),
            Protection::All(error) => Err(error),
        }
    }

    /// Removes the records of readers of the backups for which `is_one` is true, and records that cannot be read. The
    /// caller holds the lock.
    pub fn forget_readers(&self, is_one: &dyn Fn(&str) -> bool) -> Result<()> {
        for (name, record) in self.readers()? {
            if record.is_ok_and(|record| !record.backups.iter().any(|id| is_one(id))) {
                continue;
            }
            self.objects().remove(&name)?;
        }
        self.objects().settle()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record() -> ReaderRecord {
        ReaderRecord {
            id: "0f0e0d0c-0b0a-4908-8706-050403020105".into(),
            backups: vec!["0f0e0d0c-0b0a-4908-8706-050403020101".into()],
            disk: "größe".into(),
            datastore: "/srv/store".into(),
            begun: 1_794_900_090,
        }
    }

    #[test]
    fn the_format_page_shows_the_encoded_record() {
        let page = include_str!("../../../docs/format/backup.md");
        let example = String::from_utf8(record().encode().unwrap()).unwrap();
        assert!(page.contains(&example), "docs/format/backup.md should show:\n{example}");
    }

    #[test]
    fn damage_and_contradictions_are_found() {
        let good = record().encode().unwrap();
        assert_eq!(ReaderRecord::decode(&good).unwrap(), record());
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x04;
            assert!(ReaderRecord::decode(&bad).is_err(), "byte {at}");
            assert!(ReaderRecord::decode(&good[..at]).is_err());
        }
        let changes: [&dyn Fn(&mut ReaderRecord); 3] =
            [&|r| r.backups.clear(), &|r| r.backups[0].push('x'), &|r| r.id.clear()];
        for change in changes {
            let mut bad = record();
            change(&mut bad);
            assert_eq!(ReaderRecord::decode(&bad.encode().unwrap()).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }
}
