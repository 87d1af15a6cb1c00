//! The locations of all areas in the file. They follow from the capacity, so there are no pointers that could be wrong.

use crate::{CAPACITY_MAX, Error, ErrorKind, Result, SECTOR};
use std::ops::Range;

/// Bytes of a block, the unit of the file; also the grain of the map.
pub const BLOCK: u64 = 4096;

/// Bytes of a unit, in which space is allocated in the file system.
pub const UNIT: u64 = 4 << 20;

/// Blocks per unit.
pub(super) const UNIT_BLOCKS: u64 = UNIT / BLOCK;

/// Grains per map page: 2 MiB of the disk.
pub(super) const PAGE_GRAINS: u64 = 512;

/// Map pages per root block: 16 GiB of the disk.
pub(super) const ROOT_PAGES: u32 = 8192;

/// Copies of the header, and of each root block and map page, which are written in turn.
pub(super) const COPIES: u64 = 2;

/// Blocks of the log: 1 MiB.
pub(super) const LOG_BLOCKS: u64 = 256;

/// First block of the log, after the header's copies.
pub(super) const LOG_START: u64 = COPIES;

/// First block of the root.
const ROOT_START: u64 = LOG_START + LOG_BLOCKS;

/// The areas of a file, in blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Capacity of the disk in bytes.
    pub(super) capacity: u64,
    /// Number of grains of the disk.
    pub(super) grains: u64,
    /// Number of map pages, at most 2^25.
    pub(super) pages: u32,
    /// Number of root blocks, at most 4,096.
    pub(super) root_blocks: u32,
    /// First block of the map pages.
    map: u64,
    /// First block of the units.
    pub(super) data: u64,
}

impl Layout {
    /// The layout of a disk of `capacity` bytes.
    pub(super) fn new(capacity: u64) -> Result<Self> {
        if capacity == 0 || !capacity.is_multiple_of(SECTOR) || capacity > CAPACITY_MAX {
            let what = format!("a capacity of {capacity} bytes is invalid: whole sectors, and 64 TiB at the most");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let grains = capacity.div_ceil(BLOCK);
        let pages = grains.div_ceil(PAGE_GRAINS);
        let root_blocks = pages.div_ceil(u64::from(ROOT_PAGES));
        let map = ROOT_START + root_blocks * COPIES;
        let data = (map + pages * COPIES).next_multiple_of(UNIT_BLOCKS);
        Ok(Self { capacity, grains, pages: pages as u32, root_blocks: root_blocks as u32, map, data })
    }

    /// The first block of the copies of root block `index`.
    pub(super) fn root_copies(&self, index: u32) -> u64 {
        ROOT_START + u64::from(index) * COPIES
    }

    /// The first block of the copies of map page `index`.
    pub(super) fn page_copies(&self, index: u32) -> u64 {
        self.map + u64::from(index) * COPIES
    }

    /// The number of grains of map page `index`: fewer in the last page.
    pub(super) fn page_grains(&self, index: u32) -> u32 {
        (self.grains - u64::from(index) * PAGE_GRAINS).min(PAGE_GRAINS) as u32
    }

    /// The map pages that a range of grains touches, with their entries.
    pub(super) fn split(&self, grains: Range<u64>) -> impl Iterator<Item = (u32, Range<u32>)> + use<> {
        let mut at = grains.start;
        std::iter::from_fn(move || {
            if at >= grains.end {
                return None;
            }
            let first = at % PAGE_GRAINS;
            let count = (PAGE_GRAINS - first).min(grains.end - at);
            let index = (at / PAGE_GRAINS) as u32;
            at += count;
            Some((index, first as u32..(first + count) as u32))
        })
    }
}

const _: () = assert!(CAPACITY_MAX / BLOCK / PAGE_GRAINS <= u32::MAX as u64);
