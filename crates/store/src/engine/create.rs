//! Creates a store.

use super::Engine;
use super::files::{JOURNAL_FILE, LOCK_FILE, SUPERBLOCK_FILE};
use super::log::{CheckpointRecord, FORMAT_VERSION, IMAGES_FILE, INITIAL_PAGES, Images, Superblock, Unreported};
use super::reserve::{CATALOG_AHEAD, KEPT, table_bytes};
use crate::journal::Place;
use crate::pages::PageFile;
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Buffer, Directory, IoMode};
use std::sync::Arc;

/// The smallest journal: 4 MiB.
pub const JOURNAL_SIZE_MIN: u64 = 4 << 20;
/// The largest journal: 4 GiB.
pub const JOURNAL_SIZE_MAX: u64 = 4 << 30;
/// The journal of a datastore made without `--journal-size`: 128 MiB.
pub const JOURNAL_SIZE_DEFAULT: u64 = 128 << 20;
/// Map nodes reserved in a new datastore (2 MiB): half of them are kept free, the others are for writes.
const MAP_RESERVE: u64 = 2 * KEPT;
/// Parameters of a new store.
#[derive(Clone, Copy, Debug)]
pub struct InitParameters {
    /// UUID of the datastore.
    pub uuid: [u8; 16],
    /// Size of the journal ring in bytes.
    pub journal_size: u64,
}

impl Engine {
    /// Creates a store in an empty directory. The superblock is written last: without it the directory is no datastore.
    pub fn init(directory: &Arc<dyn Directory>, parameters: InitParameters) -> Result<()> {
        let size = parameters.journal_size;
        if !(JOURNAL_SIZE_MIN..=JOURNAL_SIZE_MAX).contains(&size) || !size.is_multiple_of(BLOCK_SIZE as u64) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a journal of {size} bytes: it must be a multiple of 4 KiB from 4 MiB to 4 GiB"),
            ));
        }
        let _lock = directory.lock(LOCK_FILE).during(|| "taking the lock of the new datastore".into())?;
        let names = directory.list().during(|| "listing the new datastore".into())?;
        if names.iter().any(|name| name == SUPERBLOCK_FILE) {
            return Err(Error::new(ErrorKind::Exists, "there is a datastore already"));
        }
        let known = |name: &String| {
            [JOURNAL_FILE, LOCK_FILE, IMAGES_FILE].contains(&name.as_str())
                || PageFile::ALL.iter().any(|file| file.name() == name)
        };
        if let Some(foreign) = names.iter().find(|name| !known(name)) {
            return Err(Error::new(
                ErrorKind::Exists,
                format!("the folder is not empty (it holds {foreign}); a datastore needs a folder of its own"),
            ));
        }
        // All files are remains of an interrupted `init`.
        for name in names.iter().filter(|name| *name != LOCK_FILE) {
            directory.remove(name).during(|| format!("removing {name}"))?;
        }
        let create = |name: &str| directory.create(name, IoMode::Buffered).during(|| format!("creating {name}"));
        let journal = create(JOURNAL_FILE)?;
        // The journal is filled with zeros now, so that later appends do not change the metadata of the file system.
        let zeros = Buffer::zeroed(1 << 20 >> 12);
        journal.reserve(0, size).during(|| "reserving the journal".into())?;
        let mut at = 0;
        while at < size {
            let length = (size - at).min(zeros.len() as u64) as usize;
            journal.write_at(&[&zeros[..length]], at, false).during(|| "writing the journal".into())?;
            at += length as u64;
        }
        journal.sync().during(|| "flushing the journal".into())?;
        // Reserves room for the first changes, so that other programs cannot take it.
        let map = (PageFile::Map, MAP_RESERVE * BLOCK_SIZE as u64);
        for (file, room) in std::iter::once(map).chain(table_bytes(1, 1, 0, CATALOG_AHEAD)) {
            let pages = create(file.name())?;
            pages.reserve(0, room).during(|| format!("reserving {}", file.name()))?;
            pages.sync().during(|| format!("flushing {}", file.name()))?;
        }
        Images::create(&**directory, INITIAL_PAGES)?;
        directory.sync().during(|| "flushing the new datastore".into())?;
        let start = Place { position: 0, sequence: 1 };
        let mut superblock = Superblock {
            version: FORMAT_VERSION,
            uuid: parameters.uuid,
            sequence: 0,
            journal_size: size,
            record: CheckpointRecord {
                tail: start,
                ordered: start,
                data_regions: 0,
                map_regions: 0,
                map_length: MAP_RESERVE,
                catalog_slots: 0,
                next_id: 1,
            },
            created: backend::clock::seconds(),
            clean: true,
            incarnation: 0,
            checkpoint: 0,
            images: None,
            unreported: Unreported::default(),
        };
        let file = create(SUPERBLOCK_FILE)?;
        file.reserve(0, 2 * BLOCK_SIZE as u64).during(|| "reserving the superblock".into())?;
        superblock.write(&*file)?;
        file.sync().during(|| "flushing the superblock".into())?;
        directory.sync().during(|| "flushing the new datastore".into())
    }
}
