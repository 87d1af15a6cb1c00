//! Grain directory and grain tables: checked, and kept in memory.
//!
//! 1. The whole directory is in memory (4 MiB for 2 TiB). It may have tables that the directory in the file does not
//!    name yet; these are in the cache, marked as changed, until a commit has written them.
//! 2. Tables are read on demand and kept as runs. An invalid entry is kept unchanged; a read or write of its grain
//!    fails.

use super::header::{HEADER_SECTORS, Header, TABLE_ENTRIES, TABLE_SECTORS, TABLE_SIZE};
use crate::aligned::{AlignedFile, read_sectors};
use crate::runs::cache::RunCache;
use crate::runs::options::OpenOptions;
use crate::runs::{EntryRun, RunList};
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Run kind: entries that name a grain.
pub(super) const DATA: u8 = 1;
/// Run kind: entries with the value 1, which are zeros for readers that support them. lamina never writes them.
pub(super) const ZERO: u8 = 2;
/// Run kind: entries that name no sector of the file; the value is kept as the location.
pub(super) const DAMAGED: u8 = 3;

/// The value of a zero entry.
const VALUE_ZERO: u32 = 1;

/// Entries per sector of a table, the unit in which changes are tracked.
const PART_ENTRIES: u32 = SECTOR as u32 / 4;

/// All parts of a table.
pub(super) const PARTS_ALL: u64 = (1 << TABLE_SECTORS) - 1;

/// The parts that contain a range of entries.
pub(super) fn parts_of(entries: &Range<u32>) -> u64 {
    let (first, last) = (entries.start / PART_ENTRIES, entries.end.div_ceil(PART_ENTRIES));
    ((1u64 << last) - 1) & !((1u64 << first) - 1)
}

/// Directory and tables of an extent.
pub(super) struct Tables {
    image: String,
    capacity: u64,
    grain: u64,
    /// Location of the directory in the file, in sectors.
    directory_place: Range<u64>,
    directory: Box<[AtomicU32]>,
    /// The first sector after the part of the file that entries may name.
    limit: AtomicU64,
    pub(super) cache: RunCache,
}

impl Tables {
    /// Reads the directory.
    pub(super) fn open(file: &AlignedFile, header: &Header, options: &OpenOptions) -> Result<Self> {
        let image = &options.image;
        let limit = file.file().len().during(|| format!("{image}: cannot find out its length"))?.div_ceil(SECTOR);
        let start = header.directory_offset();
        let place = start..start + header.directory_sectors();
        if place.end > limit {
            let what = format!("{image}: its grain directory ends at sector {}, the file at {limit}", place.end);
            return Err(Error::new(ErrorKind::Corrupt, format!("{what}: the file was truncated")));
        }
        let mut bytes = vec![0; header.directory_entries() as usize * 4];
        let context = || format!("{image}: cannot read the grain directory");
        let read = file.read_at(&mut bytes, place.start * SECTOR);
        // Entries that cannot be read get all bits set, and so name a sector outside the file.
        if !(read.is_err() && options.salvage && read_sectors(&**file.file(), &mut bytes, place.start * SECTOR)) {
            read.during(context)?;
        }
        let directory = bytes.chunks_exact(4).map(|entry| AtomicU32::new(value_of(entry))).collect();
        Ok(Self {
            image: image.clone(),
            capacity: header.capacity(),
            grain: header.grain(),
            directory_place: place,
            directory,
            limit: AtomicU64::new(limit),
            cache: RunCache::new(options.cache_bytes),
        })
    }

    /// Number of tables that the capacity needs.
    pub(super) fn count(&self) -> u32 {
        self.directory.len() as u32
    }

    /// The sector of table `index`; 0 if there is none.
    pub(super) fn place(&self, index: u32) -> u64 {
        self.directory.get(index as usize).map_or(0, |entry| u64::from(entry.load(Ordering::Acquire)))
    }

    /// Sets the sector of a table.
    pub(super) fn set_place(&self, index: u32, sector: u64) {
        if let Some(entry) = self.directory.get(index as usize) {
            entry.store(sector as u32, Ordering::Release);
        }
    }

    /// The first sector after the part of the file that entries may name.
    pub(super) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    /// Sets the limit to at least `sector`, because the file is used up to there.
    pub(super) fn raise_limit(&self, sector: u64) {
        self.limit.fetch_max(sector, Ordering::AcqRel);
    }

    pub(super) fn set_limit(&self, sector: u64) {
        self.limit.store(sector, Ordering::Release);
    }

    /// The first sector after header and directory, if they have their usual locations.
    pub(super) fn data_start(&self) -> u64 {
        self.directory_place.end
    }

    /// The tables that a range of grains touches, with their entries.
    pub(super) fn split(&self, grains: Range<u64>) -> impl Iterator<Item = (u32, Range<u32>)> + use<> {
        let size = u64::from(TABLE_ENTRIES);
        let mut at = grains.start;
        std::iter::from_fn(move || {
            if at >= grains.end {
                return None;
            }
            let first = at % size;
            let count = (size - first).min(grains.end - at);
            let index = (at / size) as u32;
            at += count;
            Some((index, first as u32..(first + count) as u32))
        })
    }

    /// The first grain of table `index`.
    pub(super) fn first_grain(&self, index: u32) -> u64 {
        u64::from(index) * u64::from(TABLE_ENTRIES)
    }

    /// The number of entries of table `index` within the capacity: fewer in the last table.
    fn entries(&self, index: u32) -> u32 {
        let grains = self.capacity.div_ceil(self.grain) - self.first_grain(index);
        grains.min(u64::from(TABLE_ENTRIES)) as u32
    }

    /// Whether an entry may name `sectors` sectors at `start`.
    fn may_be_named(&self, start: u64, sectors: u64, limit: u64) -> bool {
        let in_directory = start < self.directory_place.end && start + sectors > self.directory_place.start;
        start >= HEADER_SECTORS && start < limit && !in_directory
    }

    /// Whether a table at sector `place` lies within the file.
    pub(super) fn is_in_file(&self, place: u64) -> bool {
        let limit = self.limit();
        self.may_be_named(place, TABLE_SECTORS, limit) && place + TABLE_SECTORS <= limit
    }

    /// Reads table `index`, which must exist.
    pub(super) fn load(&self, file: &AlignedFile, index: u32) -> Result<RunList> {
        let place = self.place(index);
        if !self.is_in_file(place) {
            let what = format!("{}: grain table {index} at sector {place} lies outside the file", self.image);
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{what}: the file was truncated, or its directory is damaged"),
            ));
        }
        let mut bytes = [0; TABLE_SIZE];
        let context = || format!("{}: cannot read grain table {index}", self.image);
        file.read_at(&mut bytes, place * SECTOR).during(context)?;
        Ok(self.decode(&bytes, self.entries(index)))
    }

    /// Table `index` for a scan of all tables, bypassing the cache; `None` if it does not exist.
    pub(super) fn survey(&self, file: &AlignedFile, index: u32) -> Result<Option<Arc<RunList>>> {
        if self.place(index) == 0 {
            return Ok(None);
        }
        match self.cache.peek(index) {
            Some(list) => Ok(Some(list)),
            None => Ok(Some(Arc::new(self.load(file, index)?))),
        }
    }

    fn decode(&self, bytes: &[u8; TABLE_SIZE], entries: u32) -> RunList {
        let limit = self.limit();
        let mut list = RunList::new(self.grain as u32);
        let values = bytes.chunks_exact(4).map(value_of);
        for (at, value) in (0..entries).zip(values) {
            if value == 0 {
                continue;
            }
            let place = u64::from(value);
            let (kind, place) = match value {
                VALUE_ZERO => (ZERO, 0),
                // The last grain of a file may be partial: the missing part reads as zeros.
                _ if self.may_be_named(place, self.grain, limit) => (DATA, place),
                _ => (DAMAGED, place),
            };
            list.push(EntryRun { first: at, count: 1, kind, place });
        }
        list.shrink_to_fit();
        list
    }

    /// Encodes some parts of a table.
    pub(super) fn encode(&self, list: &RunList, parts: Range<u32>) -> Vec<u8> {
        let entries = parts.start * PART_ENTRIES..parts.end * PART_ENTRIES;
        let mut bytes = vec![0; entries.len() * 4];
        for piece in list.pieces(entries.clone()) {
            let Some((kind, place)) = piece.what else { continue };
            let first = (piece.first - entries.start) as usize * 4;
            let out = bytes[first..first + piece.count as usize * 4].chunks_exact_mut(4);
            for (at, entry) in (0..).zip(out) {
                let value = match kind {
                    ZERO => VALUE_ZERO,
                    _ => (place + at * self.grain) as u32,
                };
                entry.copy_from_slice(&value.to_le_bytes());
            }
        }
        bytes
    }

    /// The sector of the file with the directory entry for table `index`.
    pub(super) fn directory_sector(&self, index: u32) -> u64 {
        self.directory_place.start + u64::from(index / PART_ENTRIES)
    }

    /// Encodes the directory sectors in `sectors`. Tables in `unnamed`, which are not in the file yet, get their old
    /// entries.
    pub(super) fn encode_directory(&self, sectors: Range<u64>, unnamed: &FxHashMap<u32, u32>) -> Vec<u8> {
        let first = (sectors.start - self.directory_place.start) as u32 * PART_ENTRIES;
        let last = (sectors.end - self.directory_place.start) as u32 * PART_ENTRIES;
        let value = |index: u32| unnamed.get(&index).copied().unwrap_or_else(|| self.place(index) as u32);
        (first..last).flat_map(|index| value(index).to_le_bytes()).collect()
    }
}

fn value_of(entry: &[u8]) -> u32 {
    u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]])
}
