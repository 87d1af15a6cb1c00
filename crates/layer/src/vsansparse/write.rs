//! Writes and zeros.
//!
//! A write first reserves a location in the map page for every grain without one. A reserved location is not visible to
//! reads. Then it writes the payload to the file without a lock. Then the location is made visible in the map page, and
//! the change is added to the log. Two writes of one grain use the same location.

use super::VsanSparse;
use super::commit::Writer;
use super::layout::{BLOCK, COPIES, LOG_BLOCKS, LOG_START, PAGE_GRAINS, ROOT_PAGES};
use super::log::Record;
use super::map::PageState;
use super::page::{DATA, Kind, RESERVED, ZERO_RESERVED};
use super::recover::zero_entries;
use crate::aligned::part_of;
use crate::extents::check_range;
use crate::{IoContext, Result};
use std::ops::Range;

/// The length from which discarded space is punched: a punch costs a hundred microseconds.
const PUNCH_MIN: u64 = 32 << 10;

/// Space of map pages that is allocated at a time: the pages of 16 MiB of the disk.
const PAGES_PIECE: u64 = 64 << 10;

static ZEROS: [u8; BLOCK as usize] = [0; BLOCK as usize];

/// Consecutive grains at consecutive locations.
#[derive(Clone, Copy, Debug)]
struct WritePiece {
    first: u64,
    count: u64,
    place: u64,
    /// Whether the location is still reserved only.
    new: bool,
}

impl VsanSparse {
    pub(super) fn write_range(&self, writer: &Writer, start: u64, slices: &[&[u8]]) -> Result<()> {
        let open = writer.gate.read();
        self.check_open(writer, *open)?;
        let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
        let end = start.saturating_add(length);
        check_range(&self.image, &(start..end), self.header.capacity, BLOCK)?;
        let grains = Self::grains(&(start..end));
        // The last grain of the disk is stored completely.
        let missing = (grains.end * BLOCK - end) as usize;
        let mut padded: Vec<&[u8]>;
        let mut slices = slices;
        if missing > 0 {
            padded = slices.to_vec();
            padded.push(&ZEROS[..missing]);
            slices = &padded;
        }
        let pieces = self.plan(writer, grains.clone())?;
        self.write_pieces(grains.start, &pieces, slices)?;
        for piece in pieces.iter().filter(|piece| piece.new) {
            self.show(writer, piece)?;
        }
        self.commit_if_many(writer)
    }

    /// Looks up the location of each grain, and allocates one where there is none.
    fn plan(&self, writer: &Writer, grains: Range<u64>) -> Result<Vec<WritePiece>> {
        let mut pieces: Vec<WritePiece> = Vec::new();
        let mut say = |piece: WritePiece| match pieces.last_mut() {
            Some(last) if last.place + last.count == piece.place && last.new == piece.new => last.count += piece.count,
            _ => pieces.push(piece),
        };
        for (index, entries) in self.map.layout.split(grains) {
            let base = u64::from(index) * PAGE_GRAINS;
            let is_written = self.map.state(index) == PageState::Stored && {
                let load = || self.map.load(&self.file, index);
                let mut found: Vec<WritePiece> = Vec::new();
                let all = self.map.pages.read(index, load, |page| {
                    page.pieces(entries.clone()).all(|piece| match piece.what {
                        Some((DATA, place)) => {
                            let (first, count) = (base + u64::from(piece.first), u64::from(piece.count));
                            found.push(WritePiece { first, count, place, new: false });
                            true
                        }
                        _ => false,
                    })
                })?;
                if all {
                    found.into_iter().for_each(&mut say);
                }
                all
            };
            if !is_written {
                self.reserve(writer, index, entries, &mut say)?;
            }
        }
        Ok(pieces)
    }

    fn reserve(
        &self,
        writer: &Writer,
        index: u32,
        entries: Range<u32>,
        say: &mut impl FnMut(WritePiece),
    ) -> Result<()> {
        let base = u64::from(index) * PAGE_GRAINS;
        // Space for payload and map is allocated first, so that a full file system is detected before any change.
        let missing = self.without_place(index, entries.clone())?;
        let prepared = writer.space.lock().prepare(&self.file, missing);
        prepared.map_err(|error| error.context(&self.image))?;
        self.reserve_map(writer, index, Kind::Page)?;
        let _order = writer.order.read();
        self.map.change(&self.file, index, |page| {
            let found: Vec<_> = page.pieces(entries).collect();
            for piece in found {
                let (kind, place) = match piece.what {
                    Some((kind, place)) if place != 0 => (kind, place),
                    other => {
                        let mut space = writer.space.lock();
                        let place = space.take(u64::from(piece.count));
                        self.map.raise_limit(space.next());
                        let kind = if other.is_some() { ZERO_RESERVED } else { RESERVED };
                        page.set(piece.first..piece.first + piece.count, kind, place);
                        (kind, place)
                    }
                };
                let (first, count) = (base + u64::from(piece.first), u64::from(piece.count));
                say(WritePiece { first, count, place, new: kind != DATA });
            }
            ((), 0)
        })
    }

    /// The number of grains of a page that have no location. Locations are never freed, so this number can only
    /// decrease.
    fn without_place(&self, index: u32, entries: Range<u32>) -> Result<u64> {
        if self.map.state(index) != PageState::Stored {
            return Ok(entries.len() as u64);
        }
        let load = || self.map.load(&self.file, index);
        self.map.pages.read(index, load, |page| {
            let has_none = |what: Option<(u8, u64)>| what.is_none_or(|(_, place)| place == 0);
            let pieces = page.pieces(entries).filter(|piece| has_none(piece.what));
            pieces.map(|piece| u64::from(piece.count)).sum()
        })
    }

    /// Allocates the space of all blocks that a change of page `index`, or of its state in the root, will write: a new
    /// page has no space yet, and a file that was copied sparsely may lack space anywhere.
    fn reserve_map(&self, writer: &Writer, index: u32, what: Kind) -> Result<()> {
        let layout = &self.map.layout;
        let take = |first: u64, blocks: u64, piece: u64| {
            let taken = writer.backing.take(self.file.file().as_ref(), first * BLOCK..(first + blocks) * BLOCK, piece);
            taken.during(|| format!("{}: cannot allocate space for its map", self.image))
        };
        take(LOG_START, LOG_BLOCKS, 1)?;
        take(layout.root_copies(index / ROOT_PAGES), COPIES, 1)?;
        match what {
            Kind::Page => take(layout.page_copies(index), COPIES, PAGES_PIECE),
            Kind::Root => Ok(()),
        }
    }

    /// Writes the pieces; pieces adjacent in the file are written by one call.
    fn write_pieces(&self, first: u64, pieces: &[WritePiece], slices: &[&[u8]]) -> Result<()> {
        let mut rest = pieces;
        while let Some(piece) = rest.first() {
            let mut count = piece.count;
            let mut together = 1;
            for next in &rest[1..] {
                if next.place != piece.place + count {
                    break;
                }
                count += next.count;
                together += 1;
            }
            rest = &rest[together..];
            let offset = piece.place * BLOCK;
            let written = match together == pieces.len() {
                true => self.file.write_at(slices, offset, false),
                false => {
                    let part = part_of(slices, ((piece.first - first) * BLOCK) as usize, (count * BLOCK) as usize);
                    self.file.write_at(&part, offset, false)
                }
            };
            written.during(|| format!("{}: cannot write grain {}", self.image, piece.first))?;
        }
        Ok(())
    }

    /// Makes the location of a piece visible to reads after its payload is written.
    fn show(&self, writer: &Writer, piece: &WritePiece) -> Result<()> {
        for (index, entries) in self.map.layout.split(piece.first..piece.first + piece.count) {
            let grain = u64::from(index) * PAGE_GRAINS + u64::from(entries.start);
            let place = piece.place + (grain - piece.first);
            let count = entries.len() as u64;
            let _room = self.reserve_room(writer, 1)?;
            let _order = writer.order.read();
            self.map.change(&self.file, index, |page| {
                page.set(entries, DATA, place);
                writer.pending.lock().push(Record { grain, count, place: Some(place) });
                ((), 1)
            })?;
        }
        Ok(())
    }

    pub(super) fn zero_range(&self, writer: &Writer, range: Range<u64>, keep: bool) -> Result<()> {
        let open = writer.gate.read();
        self.check_open(writer, *open)?;
        check_range(&self.image, &range, self.header.capacity, BLOCK)?;
        for (index, entries) in self.map.layout.split(Self::grains(&range)) {
            let state = self.map.state(index);
            if state == PageState::Zero || state == PageState::Absent && !writer.parent {
                continue;
            }
            let grain = u64::from(index) * PAGE_GRAINS + u64::from(entries.start);
            let log = |grain: u64, count: u64| writer.pending.lock().push(Record { grain, count, place: None });
            if entries.len() as u32 == self.map.layout.page_grains(index) && state == PageState::Absent {
                self.reserve_map(writer, index, Kind::Root)?;
                let _room = self.reserve_room(writer, 1)?;
                let _order = writer.order.read();
                if self.map.zero_whole(index, || log(grain, entries.len() as u64)) {
                    continue;
                }
            }
            self.reserve_map(writer, index, Kind::Page)?;
            let places = {
                // Changed ranges of one page are never adjacent, so their number is at most half the number of entries,
                // rounded up.
                let _room = self.reserve_room(writer, entries.len().div_ceil(2))?;
                let _order = writer.order.read();
                self.map.change(&self.file, index, |page| {
                    let zeroed = zero_entries(page, entries, writer.parent);
                    for range in &zeroed.changed {
                        log(u64::from(index) * PAGE_GRAINS + u64::from(range.start), range.len() as u64);
                    }
                    (zeroed.places, u64::from(!zeroed.changed.is_empty()))
                })?
            };
            for (place, count) in places {
                if count * BLOCK >= PUNCH_MIN && !keep {
                    match self.file.punch(place * BLOCK, count * BLOCK) {
                        // The punch lacks space: the grains are zeros by the map already, and only keep their space.
                        Err(error) if error::lacks_space(&error) => {}
                        punched => punched.during(|| format!("{}: cannot give back grain {grain}", self.image))?,
                    }
                }
            }
            self.commit_if_many(writer)?;
        }
        Ok(())
    }
}
