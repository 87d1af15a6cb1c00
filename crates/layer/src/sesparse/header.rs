//! The headers in the first 4 KiB of the file, and the locations of the areas.
//!
//! ```text
//! sector 0   constant header: capacity and the locations of all areas, never changed after creation
//! sector 1   volatile header: number of tables allocated, journal sequence, whether the journal has to be replayed
//! sector 2   journal header; after its 24 known bytes, the mark of `touched`
//! sector 3   bits of `touched`; uninitialised memory in files of ESXi
//! ```
//!
//! 1. A [`Layout`] is created only by [`Layout::decode`] or [`Layout::for_capacity`]: its areas do not overlap, end
//!    below 2^54 sectors, and have at least the directory and tables that the capacity needs.
//! 2. All fields that change are in the first block, and each of its sectors is valid by itself. So the block is
//!    written as a whole, and a torn write leaves each header old or new.

use super::entry::{GRAIN, TABLE_ENTRIES};
use crate::{CAPACITY_MAX, Error, ErrorKind, Result, SECTOR};
use backend::BLOCK_SIZE;
use std::ops::Range;

const CONSTANT_MAGIC: u64 = 0xcafe_babe;
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const JOURNAL_MAGIC: u64 = 0xdead_c0de;
/// Version 2.1, with the major number in the high half.
const VERSION: u64 = 0x0000_0002_0000_0001;
const GRAIN_SECTORS: u64 = GRAIN / SECTOR;
const TABLE_SECTORS: u64 = TABLE_ENTRIES * 8 / SECTOR;
/// Alignment of all areas, in sectors: 1 MiB.
const AREA_STEP: u64 = 2048;
/// Larger sector numbers have no byte offset that a kernel accepts.
const SECTOR_MAX: u64 = 1 << 54;
/// Sectors per page of metadata, the unit of reads and writes.
pub(super) const PAGE_SECTORS: u64 = BLOCK_SIZE as u64 / SECTOR;
/// Entries per page of metadata.
pub(super) const PAGE_ENTRIES: u64 = BLOCK_SIZE as u64 / 8;
/// Grains per page of the bitmap.
pub(super) const PAGE_BITS: u64 = BLOCK_SIZE as u64 * 8;
/// Pages per table.
pub(super) const TABLE_PAGES: u64 = TABLE_ENTRIES / PAGE_ENTRIES;

/// An area of the file, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Area {
    pub offset: u64,
    pub size: u64,
}

impl Area {
    pub(super) const fn new(offset: u64, size: u64) -> Self {
        Self { offset, size }
    }

    pub(super) fn end(self) -> u64 {
        self.offset + self.size
    }

    /// Byte offset of the area.
    pub(super) fn start(self) -> u64 {
        self.offset * SECTOR
    }

    /// Bytes of the area.
    pub(super) fn bytes(self) -> Range<u64> {
        self.start()..self.end() * SECTOR
    }
}

/// The locations of all areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Capacity in sectors.
    pub capacity: u64,
    pub volatile: Area,
    pub journal_header: Area,
    pub journal: Area,
    pub directory: Area,
    pub tables: Area,
    pub bitmap: Area,
    pub backmap: Area,
    pub grains: Area,
}

impl Layout {
    /// The layout that ESXi uses for a disk of `capacity` sectors.
    pub(super) fn for_capacity(capacity: u64) -> Self {
        let slots = capacity.div_ceil(TABLE_ENTRIES * GRAIN_SECTORS);
        let grains = capacity.div_ceil(GRAIN_SECTORS);
        let step = |sectors: u64| sectors.next_multiple_of(AREA_STEP);
        let journal = Area::new(AREA_STEP, AREA_STEP);
        let directory = Area::new(journal.end(), step((slots * 8).div_ceil(SECTOR)));
        let tables = Area::new(directory.end(), step(slots * TABLE_SECTORS));
        let bitmap = Area::new(tables.end(), step(grains.div_ceil(8).div_ceil(SECTOR)));
        let backmap = Area::new(bitmap.end(), tables.size);
        let grains = Area::new(backmap.end(), capacity);
        let (volatile, journal_header) = (Area::new(1, 1), Area::new(2, 2));
        Self { capacity, volatile, journal_header, journal, directory, tables, bitmap, backmap, grains }
    }

    /// The areas in the order of the header, from byte 80 on.
    fn areas(&self) -> [Area; 8] {
        let Self { volatile, journal_header, journal, directory, tables, bitmap, backmap, grains, .. } = *self;
        [volatile, journal_header, journal, directory, tables, bitmap, backmap, grains]
    }

    /// Slots of the directory that the capacity needs: one for each 16 MiB.
    pub(super) fn slots(&self) -> u64 {
        self.capacity.div_ceil(TABLE_ENTRIES * GRAIN_SECTORS)
    }

    /// The number of tables for which the table area has room.
    pub(super) fn tables_max(&self) -> u64 {
        self.tables.size / TABLE_SECTORS
    }

    /// The number of grains that may be allocated: what the capacity needs, limited by bitmap and backmap.
    pub(super) fn grains_max(&self) -> u64 {
        let by_bitmap = self.bitmap.size * SECTOR * 8;
        let by_backmap = self.backmap.size * SECTOR / 8;
        self.capacity.div_ceil(GRAIN_SECTORS).min(by_bitmap).min(by_backmap)
    }

    /// Byte offset of a grain in the file; `None` if it exceeds the greatest possible offset.
    pub(super) fn grain_offset(&self, grain: u64) -> Option<u64> {
        let end = grain.checked_add(1)?.checked_mul(GRAIN)?.checked_add(self.grains.start())?;
        (end <= SECTOR_MAX * SECTOR).then(|| end - GRAIN)
    }

    /// The number of grains in a file of `length` bytes, including a partial last one.
    pub(super) fn grains_in(&self, length: u64) -> u64 {
        length.saturating_sub(self.grains.start()).div_ceil(GRAIN)
    }

    /// Refuses a layout in which metadata cannot be written in whole pages, or the headers not in one block.
    pub(super) fn check_writable(&self) -> std::result::Result<(), String> {
        let standard = Self::for_capacity(self.capacity);
        if self.volatile != standard.volatile || self.journal_header != standard.journal_header {
            return Err("its headers are not where ESXi puts them".to_owned());
        }
        let paged = [self.directory, self.tables, self.bitmap, self.backmap];
        let in_pages = |area: &Area| {
            area.offset.is_multiple_of(PAGE_SECTORS)
                && area.size.is_multiple_of(PAGE_SECTORS)
                && area.offset >= PAGE_SECTORS
        };
        if !paged.iter().all(in_pages) || !self.grains.offset.is_multiple_of(PAGE_SECTORS) {
            return Err("its areas are not in whole 4 KiB pages".to_owned());
        }
        if self.tables_max() < self.slots() || self.grains_max() < self.capacity.div_ceil(GRAIN_SECTORS) {
            return Err("its tables, bitmap or backmap are too small for its capacity".to_owned());
        }
        Ok(())
    }

    /// Decodes and checks the constant header.
    pub(super) fn decode(sector: &[u8]) -> std::result::Result<Self, String> {
        let words = Words(sector);
        let expected = [
            (0, CONSTANT_MAGIC, "the magic number"),
            (8, VERSION, "the version"),
            (24, GRAIN_SECTORS, "the grain size"),
            (32, TABLE_SECTORS, "the size of a grain table"),
            (40, 0, "the flags"),
            (48, 0, "a reserved field"),
            (56, 0, "a reserved field"),
            (64, 0, "a reserved field"),
            (72, 0, "a reserved field"),
        ];
        for (at, value, what) in expected {
            if words.get(at) != value {
                return Err(format!("{what} of the constant header is {:#x}, not {value:#x}", words.get(at)));
            }
        }
        if sector.get(208..SECTOR as usize).is_none_or(|padding| padding.iter().any(|byte| *byte != 0)) {
            return Err("the padding of the constant header is not zero".to_owned());
        }
        let area = |index: usize| Area::new(words.get(80 + 16 * index), words.get(88 + 16 * index));
        let layout = Self {
            capacity: words.get(16),
            volatile: area(0),
            journal_header: area(1),
            journal: area(2),
            directory: area(3),
            tables: area(4),
            bitmap: area(5),
            backmap: area(6),
            grains: area(7),
        };
        layout.check()?;
        Ok(layout)
    }

    fn check(&self) -> std::result::Result<(), String> {
        if self.capacity == 0 || self.capacity > CAPACITY_MAX / SECTOR {
            return Err(format!("its capacity of {} sectors is 0 or beyond 64 TiB", self.capacity));
        }
        let mut areas = self.areas();
        for area in areas {
            let end = area.offset.checked_add(area.size);
            if area.offset == 0 || area.size == 0 || end.is_none_or(|end| end > SECTOR_MAX) {
                return Err(format!("an area of {} sectors at sector {} is invalid", area.size, area.offset));
            }
        }
        areas.sort_unstable_by_key(|area| area.offset);
        if let Some(pair) = areas.windows(2).find(|pair| pair[0].end() > pair[1].offset) {
            return Err(format!("the areas at sectors {} and {} overlap", pair[0].offset, pair[1].offset));
        }
        if self.directory.size * (SECTOR / 8) < self.slots() {
            return Err("the grain directory is too small for the capacity".to_owned());
        }
        if self.tables.size < TABLE_SECTORS {
            return Err("the area of grain tables holds no table".to_owned());
        }
        // QEMU counts sectors of tables in 32 bits; even an image of 64 TiB has far fewer.
        if self.tables.end() > 1 << 32 {
            return Err("the grain tables reach beyond 2 TiB of the file".to_owned());
        }
        Ok(())
    }

    /// Writes the constant header into the first block.
    pub(super) fn encode(&self, block: &mut [u8]) {
        block[..SECTOR as usize].fill(0);
        put(block, 0, CONSTANT_MAGIC);
        put(block, 8, VERSION);
        put(block, 16, self.capacity);
        put(block, 24, GRAIN_SECTORS);
        put(block, 32, TABLE_SECTORS);
        for (index, area) in self.areas().iter().enumerate() {
            put(block, 80 + 16 * index, area.offset);
            put(block, 88 + 16 * index, area.size);
        }
    }
}

/// The volatile header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Volatile {
    /// The number of tables allocated; also the number of the next table.
    pub free_table: u64,
    /// The sequence number of the journal's next transaction. lamina writes no transactions, so it stays the same.
    pub next_sequence: u64,
    /// Not zero: the journal has to be replayed before any metadata is used.
    pub replay: u64,
}

impl Volatile {
    pub(super) fn decode(sector: &[u8]) -> std::result::Result<Self, String> {
        let words = Words(sector);
        if words.get(0) != VOLATILE_MAGIC {
            return Err(format!("the magic number of the volatile header is {:#x}", words.get(0)));
        }
        if sector.get(32..SECTOR as usize).is_none_or(|padding| padding.iter().any(|byte| *byte != 0)) {
            return Err("the padding of the volatile header is not zero".to_owned());
        }
        Ok(Self { free_table: words.get(8), next_sequence: words.get(16), replay: words.get(24) })
    }

    /// Writes the volatile header into its sector.
    pub(super) fn encode(&self, sector: &mut [u8]) {
        sector[..SECTOR as usize].fill(0);
        put(sector, 0, VOLATILE_MAGIC);
        put(sector, 8, self.free_table);
        put(sector, 16, self.next_sequence);
        put(sector, 24, self.replay);
    }
}

/// The next sequence number in a journal header, from its first 24 bytes; `None` without the magic number.
pub(super) fn journal_sequence(sector: &[u8]) -> Option<u64> {
    let words = Words(sector);
    (words.get(0) == JOURNAL_MAGIC).then(|| words.get(8))
}

/// Writes the known part of a journal header.
pub(super) fn put_journal_header(sector: &mut [u8], sequence: u64) {
    put(sector, 0, JOURNAL_MAGIC);
    put(sector, 8, sequence);
    put(sector, 16, 1);
}

/// The little-endian 64-bit words in a byte slice; words past its end are zero.
pub(super) struct Words<'a>(pub &'a [u8]);

impl Words<'_> {
    /// The word at byte `at`.
    pub(super) fn get(&self, at: usize) -> u64 {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// Sets the word at byte `at`.
pub(super) fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// The capacity in sectors, if a disk of `bytes` can be created.
pub(super) fn capacity_to_create(bytes: u64) -> Result<u64> {
    // The limit of vSphere; that of the format is 64 TiB.
    const CREATE_MAX: u64 = 62 << 40;
    if bytes == 0 || bytes > CREATE_MAX || !bytes.is_multiple_of(SECTOR) {
        let text = format!("{bytes} bytes: the capacity of a SEsparse disk is a multiple of 512 up to 62 TiB");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(bytes / SECTOR)
}
