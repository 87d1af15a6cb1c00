//! The headers in the first 4 KiB of the file, and where the areas lie.
//!
//! ```text
//! sector 0   constant header: capacity and the places of all areas, never changed after creation
//! sector 1   volatile header: tables handed out, journal sequence, whether the journal has to be replayed
//! sector 2   journal header, and behind its 24 known bytes the mark of `touched`
//! sector 3   bits of `touched`; uninitialised memory in files of ESXi
//! ```
//!
//! 1. A [`Layout`] only comes from [`Layout::decode`] or [`Layout::for_capacity`]: its areas do not overlap, end below
//!    2^54 sectors, and hold at least what the capacity asks of directory and tables.
//! 2. Everything that changes lies in the first block, and each sector of it means something by itself, so the
//!    block is written whole: a torn write leaves each header as it was or as it is to be.

use super::entry::{GRAIN, TABLE_ENTRIES};
use crate::{CAPACITY_MAX, Error, ErrorKind, Result, SECTOR};
use backend::BLOCK_SIZE;
use std::ops::Range;

const CONSTANT_MAGIC: u64 = 0xcafe_babe;
const VOLATILE_MAGIC: u64 = 0xcafe_cafe;
const JOURNAL_MAGIC: u64 = 0xdead_c0de;
/// 2.1, the major number in the high half.
const VERSION: u64 = 0x0000_0002_0000_0001;
const GRAIN_SECTORS: u64 = GRAIN / SECTOR;
const TABLE_SECTORS: u64 = TABLE_ENTRIES * 8 / SECTOR;
/// All areas begin at multiples of it, in sectors: 1 MiB.
const AREA_STEP: u64 = 2048;
/// Places beyond it have no byte offset that a kernel takes.
const SECTOR_MAX: u64 = 1 << 54;
/// Sectors of a page of metadata, the unit in which it is read and written.
pub(super) const PAGE_SECTORS: u64 = BLOCK_SIZE as u64 / SECTOR;
/// Entries of a page of metadata.
pub(super) const PAGE_ENTRIES: u64 = BLOCK_SIZE as u64 / 8;
/// Grains of a page of the bitmap.
pub(super) const PAGE_BITS: u64 = BLOCK_SIZE as u64 * 8;
/// Pages of a table.
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

/// Where everything is.
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
    /// The places that ESXi gives a disk of `capacity` sectors.
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

    /// Areas as they stand in the header, from byte 80.
    fn areas(&self) -> [Area; 8] {
        let Self { volatile, journal_header, journal, directory, tables, bitmap, backmap, grains, .. } = *self;
        [volatile, journal_header, journal, directory, tables, bitmap, backmap, grains]
    }

    /// Slots of the directory that the capacity needs: 16 MiB each.
    pub(super) fn slots(&self) -> u64 {
        self.capacity.div_ceil(TABLE_ENTRIES * GRAIN_SECTORS)
    }

    /// Tables that the area of tables has room for.
    pub(super) fn tables_max(&self) -> u64 {
        self.tables.size / TABLE_SECTORS
    }

    /// Grains that may be handed out: what the capacity needs, as far as bitmap and backmap can tell of them.
    pub(super) fn grains_max(&self) -> u64 {
        let by_bitmap = self.bitmap.size * SECTOR * 8;
        let by_backmap = self.backmap.size * SECTOR / 8;
        self.capacity.div_ceil(GRAIN_SECTORS).min(by_bitmap).min(by_backmap)
    }

    /// Byte offset of a grain; `None` for a place that no file has.
    pub(super) fn grain_offset(&self, grain: u64) -> Option<u64> {
        let end = grain.checked_add(1)?.checked_mul(GRAIN)?.checked_add(self.grains.start())?;
        (end <= SECTOR_MAX * SECTOR).then(|| end - GRAIN)
    }

    /// How many grains a file of `length` bytes holds, a cut one counted.
    pub(super) fn grains_in(&self, length: u64) -> u64 {
        length.saturating_sub(self.grains.start()).div_ceil(GRAIN)
    }

    /// Whether metadata can be written in whole pages, and the headers with the first block.
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

    /// Reads the constant header.
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
            return Err(format!("a capacity of {} sectors is none or beyond 64 TiB", self.capacity));
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
        // QEMU counts sectors of tables in 32 bits; nothing of 64 TiB comes near.
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
    /// Tables handed out: the number of the next.
    pub free_table: u64,
    /// The sequence number that the journal's next transaction gets. We write no transactions, so it stays.
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

/// What the first 24 bytes of a journal header say: its next sequence number. `None` without the magic number.
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

/// The little-endian 64-bit words of some bytes; zero past their end.
pub(super) struct Words<'a>(pub &'a [u8]);

impl Words<'_> {
    /// The word at byte `at`.
    pub(super) fn get(&self, at: usize) -> u64 {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// Puts a word at byte `at`.
pub(super) fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Capacity in sectors, if a disk of `bytes` can be made.
pub(super) fn capacity_to_create(bytes: u64) -> Result<u64> {
    // What vSphere allows; the format itself ends at 64 TiB.
    const CREATE_MAX: u64 = 62 << 40;
    if bytes == 0 || bytes > CREATE_MAX || !bytes.is_multiple_of(SECTOR) {
        let text = format!("{bytes} bytes: the capacity of a SEsparse disk is a multiple of 512 up to 62 TiB");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(bytes / SECTOR)
}
