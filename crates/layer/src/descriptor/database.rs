//! The disk data base: `ddb.key = "value"` lines, most of which only VMware's software uses.
//!
//! Entries keep their order and their bytes in any encoding, and keys compare without regard to case.

use super::{Adapter, ContentId, DATABASE_MAX, Geometry, Result, Uuid, corrupt, identity};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DatabaseEntry {
    pub(super) key: String,
    pub(super) value: Vec<u8>,
}

/// The entries of a descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Database {
    entries: Vec<DatabaseEntry>,
}

impl Database {
    /// Adds an entry with the key and the bytes that were read.
    pub(super) fn push(&mut self, key: String, value: Vec<u8>) -> Result<()> {
        if self.entries.len() >= DATABASE_MAX {
            return Err(corrupt(format!("the descriptor has more than {DATABASE_MAX} ddb entries")));
        }
        self.entries.push(DatabaseEntry { key, value });
        Ok(())
    }

    pub(super) fn entries(&self) -> &[DatabaseEntry] {
        &self.entries
    }

    /// The value of `key`, the first if there are several; `None` also if it is not plain text.
    pub fn get(&self, key: &str) -> Option<&str> {
        let entry = self.entries.iter().find(|entry| entry.key.eq_ignore_ascii_case(key))?;
        std::str::from_utf8(&entry.value).ok()
    }

    /// Replaces the value of `key`, or inserts the entry at VMware's alphabetical position. Key and value are set by
    /// lamina's code: a quote or control character in them is a bug, and is not written.
    pub fn set(&mut self, key: &str, value: &str) {
        let clean = |text: &str| text.chars().filter(|c| !c.is_control() && *c != '"').collect::<String>();
        let (key, value) = (clean(key), clean(value).into_bytes());
        match self.entries.iter_mut().find(|entry| entry.key.eq_ignore_ascii_case(&key)) {
            Some(entry) => entry.value = value,
            None => {
                let place = self.entries.iter().position(|entry| entry.key > key).unwrap_or(self.entries.len());
                self.entries.insert(place, DatabaseEntry { key, value });
            }
        }
    }

    /// Removes every entry with that key.
    pub fn remove(&mut self, key: &str) {
        self.entries.retain(|entry| !entry.key.eq_ignore_ascii_case(key));
    }

    /// Keys and values in order; bytes of a value that are not UTF-8 become replacement characters.
    pub fn iter(&self) -> impl Iterator<Item = (&str, std::borrow::Cow<'_, str>)> {
        self.entries.iter().map(|entry| (entry.key.as_str(), String::from_utf8_lossy(&entry.value)))
    }

    /// Adds the entries of a base disk: adapter, geometry, hardware version, UUID.
    pub fn set_disk(&mut self, adapter: Adapter, sectors: u64, uuid: Uuid) {
        let geometry = Geometry::of(adapter, sectors);
        self.set("ddb.adapterType", adapter.name());
        self.set("ddb.uuid", &uuid.to_string());
        self.set("ddb.virtualHWVersion", HARDWARE_VERSION);
        self.set_geometry(geometry);
    }

    /// Sets the geometry, which depends on the capacity.
    pub fn set_geometry(&mut self, geometry: Geometry) {
        self.set("ddb.geometry.cylinders", &geometry.cylinders.to_string());
        self.set("ddb.geometry.heads", &geometry.heads.to_string());
        self.set("ddb.geometry.sectors", &geometry.sectors.to_string());
    }

    /// Sets `longContentID`, which ends with the CID.
    pub fn set_long_content(&mut self, content: ContentId, random: &mut dyn FnMut() -> u64) {
        self.set("ddb.longContentID", &identity::long_content(content, random));
    }

    /// Whether two data bases are equal except for `longContentID`.
    pub(super) fn differs_only_in_long_content(&self, other: &Self) -> bool {
        let rest = |of: &Self| {
            let mut of = of.clone();
            of.remove("ddb.longContentID");
            of
        };
        rest(self) == rest(other)
    }

    /// The UUID of the disk.
    pub fn uuid(&self) -> Option<Uuid> {
        Uuid::parse(self.get("ddb.uuid")?)
    }
}

/// Virtual hardware version of new disks: that of ESXi 6.7, which every later version accepts.
const HARDWARE_VERSION: &str = "14";
