//! Changing a sparse extent: opening and closing for writing, writing and zeroing whole grains, and the commit that
//! makes them durable.
//!
//! Before a new grain is written, space is allocated for both copies of its table and for the directory sectors that
//! name a new table, so that the commit cannot lack space. An allocated grain is overwritten in place. The payload of a
//! new grain is written first, and then its location is entered in the table in memory, so the map never names bytes
//! that are not in the file. The commit writes the tables:
//!
//! ```text
//! take the changed tables as they are -> write new tables -> flush (payload and new tables are durable)
//!   -> write changed sectors of tables, and directories that name new tables, both copies -> flush
//! ```

use super::directory::{ENTRY_ABSENT, ENTRY_BAD, ENTRY_ZERO, Places};
use super::header::{FLAG_ZERO_GRAINS, UNCLEAN_OFFSET};
use super::space::{SectorRun, Space};
use super::tables::Table;
use super::{Hosted, check_range};
use crate::backing::Backing;
use crate::epochs::Epoch;
use crate::group_commit::{GroupCommit, Turn};
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use parking_lot::{RwLock, RwLockWriteGuard};
use std::ops::Range;
use std::sync::Arc;

/// The number of changed tables from which a commit is due.
const CHANGED_TABLES_DUE: usize = 1024;

/// Space of tables that is allocated at a time: the tables of 1 GiB.
const TABLES_PIECE: u64 = 64 << 10;

/// The most runs of dead grains that are freed when an image is opened; others stay dead.
const RECLAIMED_RUNS_MAX: usize = 4096;

/// Additional state of an extent opened for writing.
pub(super) struct Writer {
    pub(super) space: Space,
    parent: bool,
    gate: RwLock<bool>,
    commits: GroupCommit<()>,
    /// The tables and the parts of the directories that have space in the file system.
    backing: Backing,
}

impl Writer {
    /// Whether the image was stopped after a failure of the device.
    pub(super) fn has_stopped(&self) -> bool {
        self.commits.has_stopped()
    }

    pub(super) fn is_commit_due(&self) -> bool {
        self.commits.is_due()
    }

    /// Waits for the commit under way, and prevents others while the result is held.
    pub(super) fn between_commits(&self) -> Turn<'_, ()> {
        self.commits.turn()
    }

    pub(super) fn epoch(&self) -> Arc<Epoch> {
        self.space.epochs.enter()
    }
}

/// Consecutive grains at consecutive locations in the file.
#[derive(Clone, Copy)]
struct WritePiece {
    first: u64,
    count: u64,
    /// Sector of the first grain; `None` while it has none.
    place: Option<u64>,
    fresh: bool,
}

impl Hosted {
    /// Prepares a just opened extent for changes; see the invariants of the module.
    pub(super) fn begin_writing(&mut self, parent: bool, force: bool) -> Result<()> {
        let scan = self.scan()?;
        if let Some(problem) = scan.check.unwritable() {
            let way = if scan.check.outside > 0 { " with --skip-damaged, which lists the lost parts" } else { "" };
            let what = format!("{}: {problem}; it can be read, and converted to a new image{way}", self.image);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let space = Space::new(&self.image, self.header.grain, scan.used());
        // The scan has read the page cache. If the last writer was killed before a flush, the device may have older
        // tables, which name grains that are about to be punched or used again.
        self.file.sync().during(|| format!("{}: cannot flush", self.image))?;
        self.mark(true)?;
        if !scan.differing.is_empty() {
            self.mend(&scan, &space)?;
        }
        self.tables.judge_strictly(force);
        if scan.in_doubt {
            let sentence = "free grains are not used again, since some of its tables are damaged".to_owned();
            self.warnings.add(&self.image, sentence);
        } else {
            space.cut(self.file.as_ref())?;
            for run in scan.dead_runs().take(RECLAIMED_RUNS_MAX) {
                space.free_run(run, self.file.as_ref());
            }
        }
        let (gate, commits, backing) = (RwLock::new(true), GroupCommit::new(()), Backing::default());
        self.writer = Some(Writer { space, parent, gate, commits, backing });
        Ok(())
    }

    /// Sets or clears the unclean mark, durably. The mark is one byte of a sector, so it is old or new after any crash.
    fn mark(&self, unclean: bool) -> Result<()> {
        self.file
            .write_at(&[&[u8::from(unclean)]], UNCLEAN_OFFSET as u64, true)
            .during(|| format!("{}: cannot mark it as in use or closed", self.image))
    }

    /// Commits, truncates the file to its used part, and clears the mark. Later changes fail.
    pub(super) fn end_writing(&self, writer: &Writer) -> Result<()> {
        let mut open = writer.gate.write();
        if !*open {
            return self.check_open(writer, true);
        }
        self.commit(writer)?;
        let _between = writer.between_commits();
        let closed = || {
            writer.space.cut(self.file.as_ref())?;
            self.file.sync().during(|| format!("{}: cannot flush", self.image))?;
            self.mark(false)
        };
        *open = false;
        closed().inspect_err(|_| writer.commits.stop())
    }

    /// Makes all changes durable, and keeps new ones from beginning.
    pub(super) fn hold_changes<'a>(&self, writer: &'a Writer) -> Result<RwLockWriteGuard<'a, bool>> {
        let open = writer.gate.write();
        self.check_open(writer, *open)?;
        self.commit(writer)?;
        Ok(open)
    }

    /// Refuses changes of an image that was closed, or that an I/O failure stopped.
    pub(super) fn check_changeable(&self, writer: &Writer) -> Result<()> {
        self.check_open(writer, *writer.gate.read())
    }

    fn check_open(&self, writer: &Writer, open: bool) -> Result<()> {
        writer.commits.check_changeable(&self.image, open)
    }

    /// After an I/O error no more is written. A full file system or damaged tables are no I/O errors.
    pub(super) fn stop_after(&self, writer: &Writer, error: Error) -> Error {
        if !matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Corrupt | ErrorKind::Invalid) {
            writer.commits.stop();
        }
        error
    }

    pub(super) fn write_grains(&self, writer: &Writer, start: u64, slices: &[&[u8]]) -> Result<()> {
        let open = writer.gate.read();
        self.check_open(writer, *open)?;
        let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
        let range = start..start.saturating_add(length);
        check_range(&self.image, &range, self.header.capacity * SECTOR, self.grain_bytes())?;
        if range.is_empty() {
            return Ok(());
        }
        // The epoch is held to the end of the write: a grain that is overwritten in place must not be reused meanwhile.
        let _epoch = writer.epoch();
        let first = start / self.grain_bytes();
        let planned = self.plan(first, range.end.div_ceil(self.grain_bytes()) - first)?;
        let fresh = planned.iter().filter(|piece| piece.fresh);
        for piece in fresh {
            self.back_tables(writer, piece.first, piece.count).map_err(|error| self.stop_after(writer, error))?;
        }
        let mut runs = Vec::new();
        let pieces = self.place(writer, planned, &mut runs).map_err(|error| self.stop_after(writer, error))?;
        if let Err(error) = self.write_pieces(&pieces, slices, length) {
            writer.space.give_back(&runs);
            return Err(self.stop_after(writer, error));
        }
        for piece in pieces.iter().filter(|piece| piece.fresh) {
            // If this fails, the new grains stay allocated until the image is opened again, because a table may name
            // some of them already.
            let place = piece.place.unwrap_or(0);
            self.enter(writer, piece.first, piece.count, |at| (place + at * self.header.grain) as u32)
                .map_err(|error| self.stop_after(writer, error))?;
        }
        self.commit_if_many(writer)
    }

    /// The present locations of grains.
    fn plan(&self, first: u64, count: u64) -> Result<Vec<WritePiece>> {
        let mut pieces: Vec<WritePiece> = Vec::new();
        let mut number = first;
        for (index, entry, entries) in self.by_table(first, count) {
            let table = self.tables.get(self.file.as_ref(), index, &self.warnings)?;
            for at in entry..entry + entries {
                let place = match table.as_ref().map_or(ENTRY_ABSENT, |table| table.entry(at)) {
                    ENTRY_ABSENT => None,
                    ENTRY_ZERO if self.header.has(FLAG_ZERO_GRAINS) => None,
                    ENTRY_BAD => return Err(self.damaged_entry(number)),
                    place => Some(u64::from(place)),
                };
                if place.is_none() {
                    table.as_deref().map_or(Ok(()), |table| self.tables.check_changeable(index, table))?;
                }
                match pieces.last_mut() {
                    Some(last) if follows(last, place, self.header.grain) => last.count += 1,
                    _ => pieces.push(WritePiece { first: number, count: 1, place, fresh: place.is_none() }),
                }
                number += 1;
            }
        }
        Ok(pieces)
    }

    /// Allocates locations for grains that have none, and appends the allocated runs to `runs`.
    fn place(&self, writer: &Writer, planned: Vec<WritePiece>, runs: &mut Vec<SectorRun>) -> Result<Vec<WritePiece>> {
        let missing: u64 = planned.iter().filter(|piece| piece.fresh).map(|piece| piece.count).sum();
        if missing == 0 {
            return Ok(planned);
        }
        writer.space.allocate(self.file.as_ref(), missing, runs)?;
        let grain = self.header.grain;
        let mut supply = runs.iter().map(|run| (run.start, run.sectors / grain));
        let (mut place, mut left) = (0, 0);
        let mut pieces = Vec::with_capacity(planned.len());
        for mut piece in planned {
            while piece.fresh && piece.count > 0 {
                if left == 0 {
                    (place, left) = supply.next().unwrap_or((0, u64::MAX));
                }
                let count = piece.count.min(left);
                pieces.push(WritePiece { first: piece.first, count, place: Some(place), fresh: true });
                piece.first += count;
                piece.count -= count;
                place += count * grain;
                left -= count;
            }
            if piece.count > 0 {
                pieces.push(piece);
            }
        }
        Ok(pieces)
    }

    /// Writes the payload; pieces adjacent in the file are written by one call.
    fn write_pieces(&self, pieces: &[WritePiece], slices: &[&[u8]], length: u64) -> Result<()> {
        let grain = self.grain_bytes();
        let mut source = Source { slices, at: 0 };
        let mut left = length;
        let mut pieces = pieces.iter().peekable();
        while let Some(piece) = pieces.next() {
            let start = piece.place.unwrap_or(0) * SECTOR;
            let mut bytes = piece.count * grain;
            while let Some(next) = pieces.next_if(|next| next.place.map(|place| place * SECTOR) == Some(start + bytes))
            {
                bytes += next.count * grain;
            }
            // The last grain ends with the capacity; the rest of it is a hole.
            let bytes = bytes.min(left);
            left -= bytes;
            let parts = source.take(bytes as usize);
            self.file
                .write_at(&parts, start, false)
                .during(|| format!("{}: cannot write grain {}", self.image, piece.first))?;
        }
        Ok(())
    }

    /// Sets the entries of consecutive grains, and retires their old locations.
    fn enter(&self, writer: &Writer, first: u64, count: u64, value: impl Fn(u64) -> u32) -> Result<()> {
        let per_table = u64::from(self.header.table_entries);
        let mut old: Vec<u32> = Vec::new();
        for (index, entry, entries) in self.by_table(first, count) {
            let table = self.table_for_change(writer, index)?;
            self.back_table(writer, &table)?;
            let base = index as u64 * per_table + entry as u64 - first;
            let values = (0..entries as u64).map(|at| value(base + at));
            let zero_grains = self.header.has(FLAG_ZERO_GRAINS);
            self.tables.set(self.file.as_ref(), index, &self.warnings, entry, values, |entry| match entry {
                ENTRY_ABSENT | ENTRY_BAD => {}
                ENTRY_ZERO if zero_grains => {}
                place => old.push(place),
            })?;
        }
        if !old.is_empty() {
            writer.space.retire(old.into_iter());
        }
        Ok(())
    }

    /// Table `index`, which is created if missing.
    fn table_for_change(&self, writer: &Writer, index: usize) -> Result<Arc<Table>> {
        for _ in 0..2 {
            if let Some(table) = self.tables.get(self.file.as_ref(), index, &self.warnings)? {
                return Ok(table);
            }
            let mut places = [0, 0];
            let placed = self.place_table(writer, index, &mut places);
            placed.inspect_err(|_| {
                // In the reverse order, because only the sectors allocated last can be given back.
                for place in places.into_iter().rev().filter(|place| *place != 0) {
                    writer.space.give_table_back(place, self.header.table_sectors());
                }
            })?;
            self.tables.add(index, places);
        }
        let what = format!("{}: grain table {index} could not be made", self.image);
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    /// Allocates the sectors of a new table's copies, and their space. After an error, `places` has the sectors that
    /// were allocated.
    fn place_table(&self, writer: &Writer, index: usize, places: &mut Places) -> Result<()> {
        let sectors = self.header.table_sectors();
        for (copy, place) in places.iter_mut().enumerate() {
            if self.tables.has_copy(copy) {
                self.back_directory(writer, copy, index)?;
                *place = writer.space.allocate_table(self.file.as_ref(), sectors)?;
                self.back(writer, u64::from(*place), sectors, TABLES_PIECE)?;
            }
        }
        Ok(())
    }

    /// Creates the missing tables of a range of grains, and allocates the space of all its tables, before the grains
    /// are allocated.
    fn back_tables(&self, writer: &Writer, first: u64, count: u64) -> Result<()> {
        for (index, _, _) in self.by_table(first, count) {
            let table = self.table_for_change(writer, index)?;
            self.back_table(writer, &table)?;
        }
        Ok(())
    }

    /// Allocates the space of both copies of a table. The copies may be holes: in a new image, and in one that was
    /// copied sparsely.
    fn back_table(&self, writer: &Writer, table: &Table) -> Result<()> {
        let places = table.places().into_iter().filter(|place| *place != 0);
        let sectors = self.header.table_sectors();
        places.map(u64::from).try_for_each(|place| self.back(writer, place, sectors, TABLES_PIECE))
    }

    fn back_directory(&self, writer: &Writer, copy: usize, index: usize) -> Result<()> {
        self.back(writer, self.directory_offsets()[copy] + index as u64 * 4 / SECTOR, 1, 1)
    }

    fn back(&self, writer: &Writer, sector: u64, sectors: u64, piece: u64) -> Result<()> {
        let bytes = sector * SECTOR..(sector + sectors) * SECTOR;
        let taken = writer.backing.take(self.file.as_ref(), bytes, piece);
        taken.during(|| format!("{}: cannot allocate space for its tables", self.image))
    }

    pub(super) fn zero_grains(&self, writer: &Writer, range: Range<u64>, keep: bool) -> Result<()> {
        let open = writer.gate.read();
        self.check_open(writer, *open)?;
        check_range(&self.image, &range, self.header.capacity * SECTOR, self.grain_bytes())?;
        let _epoch = writer.epoch();
        let first = range.start / self.grain_bytes();
        let count = range.end.div_ceil(self.grain_bytes()) - first;
        let mut number = first;
        for (_, _, entries) in self.by_table(first, count) {
            // A table that cannot be read has no effect on writes elsewhere.
            let planned = self.plan(number, entries as u64)?;
            self.zero_part(writer, planned, keep).map_err(|error| self.stop_after(writer, error))?;
            number += entries as u64;
            self.commit_if_many(writer)?;
        }
        Ok(())
    }

    /// Zeroes grains of one table.
    fn zero_part(&self, writer: &Writer, planned: Vec<WritePiece>, keep: bool) -> Result<()> {
        // A grain without a location is zeroed by the zero entry, or by an absent entry if the image has no parent. If
        // neither is possible, a hole is allocated for the grain.
        let nowhere = match (writer.parent, self.header.has(FLAG_ZERO_GRAINS)) {
            (false, _) => Some(ENTRY_ABSENT),
            (true, true) => Some(ENTRY_ZERO),
            (true, false) => None,
        };
        let mut holes: Vec<WritePiece> = Vec::new();
        for piece in planned {
            match (piece.place, nowhere) {
                (Some(place), _) if keep || nowhere.is_none() => {
                    let length = piece.count * self.grain_bytes();
                    let done = match keep {
                        // The space must stay allocated throughout: if it were freed for a moment, another program
                        // could take it.
                        true => self.file.write_zeros(place * SECTOR, length),
                        false => self.file.punch(place * SECTOR, length),
                    };
                    done.during(|| format!("{}: cannot zero grain {}", self.image, piece.first))?;
                }
                (None, Some(ENTRY_ABSENT)) => {}
                (_, Some(entry)) => self.enter(writer, piece.first, piece.count, |_| entry)?,
                (_, None) => holes.push(piece),
            }
        }
        for piece in &holes {
            self.back_tables(writer, piece.first, piece.count)?;
        }
        let mut runs = Vec::new();
        for piece in self.place(writer, holes, &mut runs)? {
            let place = piece.place.unwrap_or(0);
            self.enter(writer, piece.first, piece.count, |at| (place + at * self.header.grain) as u32)?;
        }
        Ok(())
    }

    /// Notes that a commit is due when many tables have changed, and makes it when twice as many have.
    fn commit_if_many(&self, writer: &Writer) -> Result<()> {
        let changed = self.tables.changed();
        if changed > CHANGED_TABLES_DUE {
            writer.commits.note_due();
        }
        if changed > 2 * CHANGED_TABLES_DUE { self.commit(writer) } else { Ok(()) }
    }

    /// Makes a commit. On a closed image nothing is written, because its sectors may belong to another writer by now.
    pub(super) fn flush_open(&self, writer: &Writer) -> Result<()> {
        match *writer.gate.read() {
            true => self.commit(writer),
            false => self.check_open(writer, true),
        }
    }

    /// Makes everything written before this call durable.
    fn commit(&self, writer: &Writer) -> Result<()> {
        let turn = writer.commits.turn_for(writer.commits.call());
        self.check_open(writer, true)?;
        let Some(mut turn) = turn else { return Ok(()) };
        self.commit_alone(writer, &mut turn).map_err(|error| writer.commits.stop_after(error))
    }

    fn commit_alone(&self, writer: &Writer, turn: &mut Turn<'_, ()>) -> Result<()> {
        let flush = || self.file.sync().during(|| format!("{}: cannot flush", self.image));
        let what = || format!("{}: cannot write grain tables", self.image);
        turn.begin();
        // Called before the tables are captured, so that the captured tables name no grain that was retired before.
        writer.space.begin_commit();
        let mut batch = self.tables.take_changes();
        for (_, places, bytes) in &batch.fresh {
            for place in places.iter().filter(|place| **place != 0) {
                self.file.write_at(&[bytes], u64::from(*place) * SECTOR, false).during(what)?;
            }
        }
        flush()?;
        if !batch.is_empty() {
            self.write_directories(batch.fresh.iter().map(|(index, places, _)| (*index, *places)))?;
            batch.sectors.sort_unstable_by_key(|(sector, _)| *sector);
            for run in batch.sectors.chunk_by(|a, b| a.0 + 1 == b.0) {
                let slices: Vec<&[u8]> = run.iter().map(|(_, bytes)| &bytes[..]).collect();
                self.file.write_at(&slices, run[0].0 * SECTOR, false).during(what)?;
            }
            flush()?;
        }
        self.tables.written();
        turn.complete();
        writer.space.complete_commit(self.file.as_ref());
        Ok(())
    }
}

impl Hosted {
    fn directory_offsets(&self) -> [u64; 2] {
        [self.header.directory_offset, self.header.redundant_offset]
    }

    /// Sets the locations of tables in the directories, in memory and in the file, without a flush.
    pub(super) fn write_directories(&self, tables: impl Iterator<Item = (usize, Places)>) -> Result<()> {
        let offsets = self.directory_offsets();
        for (copy, sector, bytes) in self.tables.enter_places(tables) {
            self.file
                .write_at(&[&bytes], (offsets[copy] + sector) * SECTOR, false)
                .during(|| format!("{}: cannot write a grain directory", self.image))?;
        }
        Ok(())
    }
}

/// Whether a grain at sector `place` can be appended to a piece of a write.
fn follows(last: &WritePiece, place: Option<u64>, grain: u64) -> bool {
    match (last.place, place) {
        (None, None) => true,
        (Some(first), Some(place)) => first + last.count * grain == place,
        _ => false,
    }
}

/// The bytes of a write, taken from its slices in order.
struct Source<'a> {
    slices: &'a [&'a [u8]],
    at: usize,
}

impl<'a> Source<'a> {
    /// The next `length` bytes of the write.
    fn take(&mut self, mut length: usize) -> Vec<&'a [u8]> {
        let mut parts = Vec::new();
        while length > 0 {
            let Some((first, rest)) = self.slices.split_first() else { break };
            let part = &first[self.at..first.len().min(self.at + length)];
            length -= part.len();
            self.at += part.len();
            if self.at == first.len() {
                self.slices = rest;
                self.at = 0;
            }
            if !part.is_empty() {
                parts.push(part);
            }
        }
        parts
    }
}
