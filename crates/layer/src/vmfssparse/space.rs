//! Allocation of sectors for new grains and tables.
//!
//! 1. New grains are allocated at the end, so that data written together is adjacent. Where the grain size allows it, a
//!    grain has the same distance from a 4 KiB boundary of the file as from one of the disk; for a large write, the
//!    boundary is one of up to 64 KiB. So aligned blocks of the guest stay aligned. A read or an overwrite of such a
//!    block touches one page of the file, and large blocks are cached in large folios. Sectors skipped for this are
//!    used by the next tables and small writes.
//! 2. A sector is allocated once, except for *holes*, which no table on the device names and no reader can use: sectors
//!    skipped for alignment, allocations that were not used, and dead space that shrinking found.
//! 3. With direct I/O the file grows ahead of its use, because each write that extends a file waits for all others.

use super::header::SECTORS_END;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;
use std::collections::BTreeMap;

/// Sectors per page.
pub(super) const ALIGNMENT: u64 = 8;

/// The largest alignment in sectors: larger writes are split by the layers below.
const ALIGNMENT_MAX: u64 = 128;

/// Sectors by which a file opened for direct I/O grows at a time: 16 MiB.
const GROWTH: u64 = 32 << 10;

/// The most holes remembered; others stay dead until the extent is shrunk.
const HOLES_MAX: usize = 1 << 18;

/// The most holes examined before sectors are allocated at the end.
const PROBES_MAX: usize = 32;

/// The alignment for an allocation of this many sectors.
fn alignment(sectors: u64) -> u64 {
    1 << sectors.clamp(ALIGNMENT, ALIGNMENT_MAX).ilog2()
}

/// Consecutive sectors of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) start: u64,
    pub(super) sectors: u64,
}

/// The allocation state of one file.
pub(super) struct Space {
    /// The first sector that was never used.
    free: u64,
    /// The end of the file, if it grows ahead of its use.
    grown: u64,
    grows_ahead: bool,
    holes: BTreeMap<u64, u64>,
}

impl Space {
    /// The state for a file that is used up to sector `free`.
    pub(super) fn new(free: u64, grows_ahead: bool) -> Self {
        Self { free, grown: free, grows_ahead, holes: BTreeMap::new() }
    }

    /// The first sector that was never used.
    pub(super) fn free(&self) -> u64 {
        self.free
    }

    /// Allocates `sectors` contiguous sectors for data at sector `lba` of the disk.
    pub(super) fn take(&mut self, file: &dyn File, sectors: u64, lba: u64) -> Result<u64> {
        self.take_at(file, sectors, lba, alignment(sectors))
    }

    /// Allocates `sectors` sectors at a page boundary, for a table.
    pub(super) fn take_pages(&mut self, file: &dyn File, sectors: u64) -> Result<u64> {
        self.take_at(file, sectors, 0, ALIGNMENT)
    }

    fn take_at(&mut self, file: &dyn File, sectors: u64, lba: u64, alignment: u64) -> Result<u64> {
        let skip = lba.wrapping_sub(self.free) % alignment;
        if !self.holes.is_empty()
            && (sectors >= ALIGNMENT || skip != 0)
            && let Some(place) = self.take_hole_at(sectors, lba, alignment)
        {
            return Ok(place);
        }
        // An allocation smaller than a page is not aligned.
        let skip = if sectors < ALIGNMENT { 0 } else { skip };
        let start = self.free + skip;
        let end = start + sectors;
        if end > SECTORS_END {
            let what = "the redo log has reached 2 TiB, where its format ends: consolidate it, or convert to SEsparse";
            return Err(Error::new(ErrorKind::NoSpace, what));
        }
        if self.grows_ahead && end > self.grown {
            self.grow(file, end)?;
        }
        self.give_back(Place { start: self.free, sectors: skip });
        self.free = end;
        Ok(start)
    }

    fn grow(&mut self, file: &dyn File, end: u64) -> Result<()> {
        let context = || "cannot make the redo log longer".to_owned();
        let far = (end + GROWTH).next_multiple_of(GROWTH);
        let reserve = |to: u64| file.reserve(self.grown * SECTOR, (to - self.grown) * SECTOR);
        self.grown = match reserve(far) {
            Ok(()) => far,
            // If the file system is nearly full, growing the file by the exact size may still succeed.
            Err(error) if error::lacks_space(&error) => {
                reserve(end).during(context)?;
                end
            }
            Err(error) => return Err(Error::io(context(), error)),
        };
        Ok(())
    }

    /// Allocates `sectors` sectors in the lowest hole that is large enough; only the lowest [`PROBES_MAX`] holes are
    /// examined. The result is as far from a page boundary of the file as sector `lba` is from a page boundary of the
    /// disk.
    pub(super) fn take_hole(&mut self, sectors: u64, lba: u64) -> Option<u64> {
        self.take_hole_at(sectors, lba, ALIGNMENT)
    }

    fn take_hole_at(&mut self, sectors: u64, lba: u64, alignment: u64) -> Option<u64> {
        let fitting = self.holes.iter().take(PROBES_MAX).find_map(|(&start, &length)| {
            let skip = if sectors < ALIGNMENT { 0 } else { lba.wrapping_sub(start) % alignment };
            (length >= skip + sectors).then_some((start, length, skip))
        });
        let (start, length, skip) = fitting?;
        self.holes.remove(&start);
        self.give_back(Place { start, sectors: skip });
        self.give_back(Place { start: start + skip + sectors, sectors: length - skip - sectors });
        Some(start + skip)
    }

    /// Allocates the lowest hole, or a part of it: a multiple of `unit` sectors, at most `sectors`.
    pub(super) fn take_part(&mut self, sectors: u64, unit: u64) -> Option<Place> {
        let (start, length) = loop {
            // Holes smaller than one grain are dropped, because no caller can use them.
            let (start, length) = self.holes.pop_first()?;
            if length >= unit {
                break (start, length);
            }
        };
        let taken = sectors.min(length) / unit * unit;
        self.give_back(Place { start: start + taken, sectors: length - taken });
        Some(Place { start, sectors: taken })
    }

    /// Adds sectors that no reader uses to the holes.
    pub(super) fn give_back(&mut self, place: Place) {
        if place.sectors > 0 && self.holes.len() < HOLES_MAX {
            self.holes.insert(place.start, place.sectors);
        }
    }

    /// Whether the limit on remembered holes is reached.
    pub(super) fn is_full(&self) -> bool {
        self.holes.len() >= HOLES_MAX
    }

    /// Drops all holes.
    pub(super) fn forget_holes(&mut self) {
        self.holes.clear();
    }

    /// Records that the file was truncated to `sectors`.
    pub(super) fn cut(&mut self, sectors: u64) {
        self.free = sectors;
        self.grown = sectors;
        self.holes.split_off(&sectors);
    }
}
