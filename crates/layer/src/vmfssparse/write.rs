//! Writes and zeros: a request looks up or allocates the grains' locations, writes the payload there, and then enters
//! new locations into the tables.
//!
//! A grain is allocated only after space is allocated for its table and for its part of the directory, so that the
//! commit that writes them cannot lack space.
//!
//! If two writes of the same grain run at once, and the grain has no location yet, each write allocates a location. The
//! location that is entered first is kept, as if that write were the later one; the other write frees its location.

use super::VmfsSparse;
use super::commit::Writer;
use super::header::{TABLE_ENTRIES, TABLE_SECTORS};
use super::space::Place;
use super::tables::{DAMAGED, DATA, PARTS_ALL, parts_of};
use crate::aligned::part_of;
use crate::extents::check_range;
use crate::runs::RunList;
use crate::{ErrorKind, IoContext, Result, SECTOR};
use std::ops::Range;

/// The length from which zeros are made by punching a hole, and below which they are written: punching costs a hundred
/// microseconds.
const PUNCH_MIN: u64 = 64 << 10;

/// Space of the directory that is allocated at a time: for the entries of the tables of 2 GiB.
const PAGE: u64 = 4096;

static ZEROS: [u8; PUNCH_MIN as usize] = [0; PUNCH_MIN as usize];

/// Consecutive grains, at consecutive locations or all without one.
#[derive(Clone, Copy, Debug)]
struct WritePiece {
    first: u64,
    count: u64,
    /// The sector of the first grain.
    place: Option<u64>,
    /// Whether the location is not entered into the table yet.
    new: bool,
}

impl VmfsSparse {
    pub(super) fn write_range(&self, writer: &Writer, start: u64, slices: &[&[u8]]) -> Result<()> {
        let open = writer.gate.read();
        self.check_open(writer, *open)?;
        let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
        let end = start.saturating_add(length);
        check_range(&self.image, &(start..end), self.header.capacity() * SECTOR, self.grain_bytes())?;
        let grains = self.grains(&(start..end));
        // The last grain of the disk is stored completely.
        let missing = (grains.end * self.grain_bytes() - end) as usize;
        let padding: Vec<u8> = vec![0; missing];
        let mut padded: Vec<&[u8]>;
        let mut slices = slices;
        if missing > 0 {
            padded = slices.to_vec();
            padded.push(&padding);
            slices = &padded;
        }
        self.write_grains(writer, grains, &Source::Bytes(slices))?;
        self.commit_if_many(writer)
    }

    /// Zeroes grains as far as that needs no space: see [`crate::Layer::discard`].
    pub(super) fn discard_range(&self, writer: &Writer, range: Range<u64>) -> Result<bool> {
        let open = writer.gate.read();
        self.check_open(writer, *open)?;
        check_range(&self.image, &range, self.header.capacity() * SECTOR, self.grain_bytes())?;
        let mut whole = true;
        for (index, entries) in self.tables.split(self.grains(&range)) {
            let base = self.tables.first_grain(index);
            let grains = base + u64::from(entries.start)..base + u64::from(entries.end);
            if !writer.parent && self.tables.place(index) == 0 {
                continue;
            }
            match self.write_grains(writer, grains.clone(), &Source::Zeros { keep: false }) {
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    whole = false;
                    // Punching the allocated grains needs no space.
                    self.write_grains(writer, grains, &Source::Holes)?;
                }
                other => other?,
            }
            self.commit_if_many(writer)?;
        }
        Ok(whole)
    }

    pub(super) fn zero_range(&self, writer: &Writer, range: Range<u64>, keep: bool) -> Result<()> {
        let open = writer.gate.read();
        self.check_open(writer, *open)?;
        check_range(&self.image, &range, self.header.capacity() * SECTOR, self.grain_bytes())?;
        // The range is processed table by table, to limit the memory for a large range.
        for (index, entries) in self.tables.split(self.grains(&range)) {
            let base = self.tables.first_grain(index);
            let grains = base + u64::from(entries.start)..base + u64::from(entries.end);
            if !writer.parent && self.tables.place(index) == 0 {
                continue;
            }
            self.write_grains(writer, grains, &Source::Zeros { keep })?;
            self.commit_if_many(writer)?;
        }
        Ok(())
    }

    fn write_grains(&self, writer: &Writer, grains: Range<u64>, source: &Source<'_>) -> Result<()> {
        let mut pieces = self.plan(grains.clone())?;
        if matches!(source, Source::Holes) || (matches!(source, Source::Zeros { .. }) && !writer.parent) {
            // Without a parent, unallocated grains read as zeros already.
            pieces.retain(|piece| piece.place.is_some());
        }
        self.take_places(writer, &mut pieces)?;
        let written = self.write_pieces(grains.start, &pieces, source);
        let new = pieces.iter().filter(|piece| piece.new);
        if let Err(error) = written {
            let mut space = writer.space.lock();
            new.for_each(|piece| space.give_back(self.place_of(piece)));
            return Err(error);
        }
        for piece in new {
            self.enter(writer, piece)?;
        }
        Ok(())
    }

    fn place_of(&self, piece: &WritePiece) -> Place {
        Place { start: piece.place.unwrap_or(0), sectors: piece.count * self.header.grain() }
    }

    /// The present locations of grains.
    fn plan(&self, grains: Range<u64>) -> Result<Vec<WritePiece>> {
        let stride = self.header.grain();
        let mut pieces: Vec<WritePiece> = Vec::new();
        let mut say = |first: u64, count: u64, place: Option<u64>| match pieces.last_mut() {
            Some(last) if last.place.map(|at| at + last.count * stride) == place => last.count += count,
            _ => pieces.push(WritePiece { first, count, place, new: place.is_none() }),
        };
        for (index, entries) in self.tables.split(grains) {
            let base = self.tables.first_grain(index);
            if self.tables.place(index) == 0 {
                say(base + u64::from(entries.start), entries.len() as u64, None);
                continue;
            }
            let load = || self.tables.load(&self.file, index);
            self.tables.cache.read(index, load, |table| {
                for piece in table.pieces(entries) {
                    let first = base + u64::from(piece.first);
                    let place = match piece.what {
                        Some((DATA, place)) => Some(place),
                        Some((DAMAGED, _)) => return Err(self.damaged_entry(first)),
                        _ => None,
                    };
                    say(first, u64::from(piece.count), place);
                }
                Ok(())
            })??;
        }
        Ok(pieces)
    }

    /// Allocates a location for each piece without one. New tables are allocated before the grains, which then are
    /// adjacent.
    fn take_places(&self, writer: &Writer, pieces: &mut [WritePiece]) -> Result<()> {
        if pieces.iter().all(|piece| !piece.new) {
            return Ok(());
        }
        for piece in pieces.iter().filter(|piece| piece.new) {
            for (index, _) in self.tables.split(piece.first..piece.first + piece.count) {
                if self.tables.place(index) == 0 {
                    self.add_table(writer, index)?;
                }
                self.back_table(writer, index)?;
            }
        }
        let mut space = writer.space.lock();
        let mut taken: Result<()> = Ok(());
        let mut count = 0;
        for piece in pieces.iter_mut() {
            if piece.new {
                let sectors = piece.count * self.header.grain();
                match space.take(self.file.file().as_ref(), sectors, piece.first * self.header.grain()) {
                    Ok(start) => piece.place = Some(start),
                    Err(error) => {
                        taken = Err(error.context(&self.image));
                        break;
                    }
                }
            }
            count += 1;
        }
        if taken.is_err() {
            let taken = pieces[..count].iter().filter(|piece| piece.new);
            taken.for_each(|piece| space.give_back(self.place_of(piece)));
        }
        self.tables.raise_limit(space.free());
        taken
    }

    fn add_table(&self, writer: &Writer, index: u32) -> Result<()> {
        let mut unnamed = writer.unnamed.lock();
        if self.tables.place(index) != 0 {
            return Ok(());
        }
        let mut space = writer.space.lock();
        let place = space.take_pages(self.file.file().as_ref(), TABLE_SECTORS);
        let place = place.map_err(|error| error.context(&self.image))?;
        let sector = self.tables.directory_sector(index) * SECTOR;
        let named = writer.backing.take(self.file.file().as_ref(), sector..sector + SECTOR, PAGE);
        let named = named.during(|| format!("{}: cannot allocate space for its tables", self.image));
        if let Err(error) = named.and_then(|()| self.back(writer, place, TABLE_SECTORS)) {
            space.give_back(Place { start: place, sectors: TABLE_SECTORS });
            return Err(error);
        }
        self.tables.raise_limit(space.free());
        unnamed.insert(index, 0);
        // The table is inserted into the cache before the directory names it, so that no reader looks for it in the
        // file.
        self.tables.cache.insert_new(index, RunList::new(self.header.grain() as u32), PARTS_ALL);
        self.tables.set_place(index, place);
        Ok(())
    }

    /// Allocates the space of a table that will change: the table may be a hole, if the file was copied sparsely.
    pub(super) fn back_table(&self, writer: &Writer, index: u32) -> Result<()> {
        self.back(writer, self.tables.place(index), TABLE_SECTORS)
    }

    pub(super) fn back(&self, writer: &Writer, place: u64, sectors: u64) -> Result<()> {
        let bytes = place * SECTOR..(place + sectors) * SECTOR;
        let taken = writer.backing.take(self.file.file().as_ref(), bytes, 1);
        taken.during(|| format!("{}: cannot allocate space for its tables", self.image))
    }

    /// Writes the pieces; pieces adjacent in the file are written by one call.
    fn write_pieces(&self, first: u64, pieces: &[WritePiece], source: &Source<'_>) -> Result<()> {
        let grain = self.header.grain();
        let size = self.grain_bytes();
        let mut rest = pieces;
        while let Some(piece) = rest.first() {
            let Some(place) = piece.place else { return Err(self.damaged_entry(piece.first)) };
            let mut count = piece.count;
            let mut together = 1;
            let mut new = piece.new;
            for next in &rest[1..] {
                if next.place != Some(place + count * grain) || next.first != piece.first + count {
                    break;
                }
                count += next.count;
                together += 1;
                new |= next.new;
            }
            rest = &rest[together..];
            let offset = place * SECTOR;
            let written = match source {
                Source::Bytes(slices) if piece.first == first && rest.is_empty() && together == pieces.len() => {
                    self.file.write_at(slices, offset, false)
                }
                Source::Bytes(slices) => {
                    let part = part_of(slices, ((piece.first - first) * size) as usize, (count * size) as usize);
                    self.file.write_at(&part, offset, false)
                }
                Source::Zeros { keep } => self.write_zeros(offset, count * size, *keep, new),
                Source::Holes => self.file.punch(offset, count * size),
            };
            written.during(|| format!("{}: cannot write grain {}", self.image, piece.first))?;
        }
        Ok(())
    }

    fn write_zeros(&self, offset: u64, length: u64, keep: bool, new: bool) -> std::io::Result<()> {
        if length >= PUNCH_MIN && !keep {
            // Writes the last sector, in case the file ends before it: setting the length instead would race with
            // writes that extend the file. An old location lies within the file already.
            if new {
                self.file.write_at(&[&ZEROS[..SECTOR as usize]], offset + length - SECTOR, false)?;
            }
            return self.file.punch(offset, length);
        }
        let mut done = 0;
        while done < length {
            let part = (length - done).min(PUNCH_MIN);
            self.file.write_at(&[&ZEROS[..part as usize]], offset + done, false)?;
            done += part;
        }
        Ok(())
    }

    /// Enters the locations of a piece after its payload was written.
    fn enter(&self, writer: &Writer, piece: &WritePiece) -> Result<()> {
        let grain = self.header.grain();
        let Some(place) = piece.place else { return Ok(()) };
        let mut lost: Vec<Place> = Vec::new();
        for (index, entries) in self.tables.split(piece.first..piece.first + piece.count) {
            let base = self.tables.first_grain(index);
            let at = |entry: u32| place + (base + u64::from(entry) - piece.first) * grain;
            let load = || self.tables.load(&self.file, index);
            self.tables.cache.change(index, load, |table| {
                let mut free: Vec<Range<u32>> = Vec::new();
                for other in table.pieces(entries.clone()) {
                    match other.what {
                        Some((DATA, _)) => {
                            lost.push(Place { start: at(other.first), sectors: u64::from(other.count) * grain });
                        }
                        _ => free.push(other.first..other.first + other.count),
                    }
                }
                let mut parts = 0;
                for range in free {
                    parts |= parts_of(&range);
                    table.set(range.clone(), DATA, at(range.start));
                }
                ((), parts)
            })?;
        }
        if !lost.is_empty() {
            let mut space = writer.space.lock();
            lost.into_iter().for_each(|place| space.give_back(place));
        }
        Ok(())
    }
}

/// The source of the bytes of a write.
enum Source<'a> {
    Bytes(&'a [&'a [u8]]),
    Zeros {
        keep: bool,
    },
    /// Zeros that need no space: allocated grains are punched, unallocated ones are left unchanged.
    Holes,
}

const _: () = assert!(TABLE_ENTRIES <= crate::runs::ENTRIES_MAX);
const _: () = assert!(super::header::SECTORS_END <= crate::runs::PLACE_MAX);
