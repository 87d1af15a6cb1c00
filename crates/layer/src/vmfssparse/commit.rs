//! Opening for writing, commits, closing: the order in which changes become durable.
//!
//! ```text
//! begin    earlier data is flushed; the end of the used part is found; the unclean mark is set         flush
//! commit   payload was written before, unflushed; new tables are written                              flush
//!          entries in old tables and directory entries of new tables are written                     flush
//! end      a commit; the file is truncated to its used part, the header gets the end of the file     flush
//!          the unclean mark is cleared                                                               flush
//! ```
//!
//! A commit captures the tables when it begins. Entries set later belong to the next commit, so no entry becomes
//! durable before its payload. If a commit fails for lack of space after its first flush, the directory in the file may
//! name some of the new tables. So the next commit writes these tables as old ones, after the flush of the payload.

use super::VmfsSparse;
use super::header::{GRAIN_SECTORS_WRITTEN_MAX, HEADER_SECTORS, Header, TABLE_SECTORS};
use super::space::{ALIGNMENT, Space};
use super::tables::PARTS_ALL;
use crate::backing::Backing;
use crate::epochs::Epochs;
use crate::group_commit::{GroupCommit, Turn};
use crate::runs::cache::Captured;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use parking_lot::{Mutex, RwLock};
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// The number of changed tables from which a commit is due. A table usually needs a few hundred bytes of memory, but 32
/// KiB if it was written at random, sector by sector.
const CHANGED_TABLES_DUE: usize = 2048;

/// The most tables read to find the end of a file that was not closed properly: 8 GiB of written guest data, or more if
/// tables are not full. A file with more tables counts as used to its end, unless it is shorter than its header says.
const SURVEYED_TABLES_MAX: u64 = 4096;

/// Additional state of an extent open for writing.
pub(super) struct Writer {
    /// True while the extent is open.
    pub(super) gate: RwLock<bool>,
    /// Guards the tables in `unnamed` that are durable at their present location, because a commit has flushed them and
    /// has then failed for lack of space.
    pub(super) commits: GroupCommit<FxHashSet<u32>>,
    pub(super) space: Mutex<Space>,
    /// Tables that the directory in the file does not certainly name at their present location, with their old entries.
    pub(super) unnamed: Mutex<FxHashMap<u32, u32>>,
    /// The tables and the parts of the directory that have space in the file system.
    pub(super) backing: Backing,
    header: Mutex<Header>,
    pub(super) epochs: Epochs,
    pub(super) parent: bool,
    pub(super) shrinking: Mutex<()>,
}

impl VmfsSparse {
    pub(super) fn begin_writing(&mut self, parent: bool) -> Result<()> {
        let context = |what: &str| format!("{}: cannot {what}", self.image);
        if self.header.grain() > u64::from(GRAIN_SECTORS_WRITTEN_MAX) {
            let what = format!("{}: grains of {} bytes are only read", self.image, self.grain_bytes());
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let tables = self.check_table_places()?;
        let length = self.file.file().len().during(|| context("find out its length"))?;
        // A file that ends where its header says was closed by its last writer. QEMU appends without updating the
        // header.
        let closed = !self.header.unclean() && self.header.free_sector() * SECTOR == length;
        let mut free = self.tables.limit();
        if !closed {
            self.file.file().sync().during(|| context("flush"))?;
            // Of a file that is shorter than its header says, all tables are read: if it was truncated, entries name
            // sectors after its end, which new grains would get.
            let short = length < self.header.free_sector() * SECTOR;
            if short || tables <= SURVEYED_TABLES_MAX {
                let survey = self.survey()?;
                self.refuse_damage(&survey)?;
                free = survey.end.max(self.tables.data_start());
            }
        }
        let mut header = self.header.clone();
        header.set_unclean(true);
        // The mark is in the last sector of the header.
        let place = (HEADER_SECTORS - 1) * SECTOR;
        let mark = &header.bytes()[place as usize..];
        self.file.write_at(&[mark], place, true).during(|| context("mark it as open"))?;
        self.writer = Some(Writer {
            gate: RwLock::new(true),
            commits: GroupCommit::new(FxHashSet::default()),
            space: Mutex::new(Space::new(free, self.file.is_direct())),
            unnamed: Mutex::new(FxHashMap::default()),
            backing: Backing::default(),
            header: Mutex::new(header),
            epochs: Epochs::new(),
            parent,
            shrinking: Mutex::new(()),
        });
        Ok(())
    }

    pub(super) fn check_open(&self, writer: &Writer, open: bool) -> Result<()> {
        writer.commits.check_changeable(&self.image, open)
    }

    pub(super) fn flush_writes(&self, writer: &Writer) -> Result<()> {
        let _gate = writer.gate.read();
        self.commit(writer)
    }

    /// Notes that a commit is due when many tables have changed, and makes it when twice as many have; the caller holds
    /// the gate.
    pub(super) fn commit_if_many(&self, writer: &Writer) -> Result<()> {
        let changed = self.tables.cache.changed();
        if changed > CHANGED_TABLES_DUE {
            writer.commits.note_due();
        }
        if changed > 2 * CHANGED_TABLES_DUE { self.commit(writer) } else { Ok(()) }
    }

    /// Makes everything written before this call durable; the caller holds the gate.
    pub(super) fn commit(&self, writer: &Writer) -> Result<()> {
        match writer.commits.turn_for(writer.commits.call()) {
            Some(mut turn) => self.commit_alone(writer, &mut turn),
            None => self.check_open(writer, true),
        }
    }

    fn commit_alone(&self, writer: &Writer, turn: &mut Turn<'_, FxHashSet<u32>>) -> Result<()> {
        self.check_open(writer, true)?;
        turn.begin();
        let mut captured = self.tables.cache.capture();
        let result = self.write_tables(writer, &mut captured, turn);
        match &result {
            Ok(()) => {
                self.tables.cache.release(&captured);
                turn.complete();
            }
            // After a lack of space no change is lost: the next commit writes the tables again.
            Err((error, false)) if error.kind() == ErrorKind::NoSpace => self.tables.cache.restore(&captured),
            Err(_) => writer.commits.stop(),
        }
        result.map_err(|(error, _)| error)
    }

    /// Writes captured tables; `durable` are those that an earlier commit has flushed, and maybe named. The flag in the
    /// error says whether a flush failed.
    fn write_tables(
        &self,
        writer: &Writer,
        captured: &mut [Captured],
        durable: &mut FxHashSet<u32>,
    ) -> std::result::Result<(), (Error, bool)> {
        let flush = || {
            let context = || format!("{}: cannot flush", self.image);
            self.file.file().sync().during(context).map_err(|error| (error, true))
        };
        let write = |bytes: &[u8], sector: u64| {
            let context = || format!("{}: cannot write grain tables", self.image);
            self.file.write_at(&[bytes], sector * SECTOR, false).during(context).map_err(|error| (error, false))
        };
        let (new, old, mut named): (Vec<&Captured>, Vec<&Captured>, Vec<u32>) = {
            let unnamed = writer.unnamed.lock();
            // A captured table gets its location under this lock. A sort during that change may panic.
            captured.sort_unstable_by_key(|table| self.tables.place(table.index));
            let named = captured.iter().map(|table| table.index).filter(|index| unnamed.contains_key(index)).collect();
            let is_new = |index: &u32| unnamed.contains_key(index) && !durable.contains(index);
            let (new, old) = captured.iter().partition(|table| is_new(&table.index));
            (new, old, named)
        };
        for table in &new {
            write(&self.tables.encode(&table.list, 0..TABLE_SECTORS as u32), self.tables.place(table.index))?;
        }
        flush()?;
        durable.extend(new.iter().map(|table| table.index));
        if captured.is_empty() {
            return Ok(());
        }
        for table in old {
            let place = self.tables.place(table.index);
            for parts in runs_of_parts(table.parts, place) {
                write(&self.tables.encode(&table.list, parts.clone()), place + u64::from(parts.start))?;
            }
        }
        let mut sectors: Vec<u64> = named.iter().map(|index| self.tables.directory_sector(*index)).collect();
        sectors.sort_unstable();
        sectors.dedup();
        named.sort_unstable();
        // The sectors are encoded under the lock, because a table that is added meanwhile is not in the file yet.
        let directory: Vec<(u64, Vec<u8>)> = {
            let unnamed = writer.unnamed.lock();
            let mut others = unnamed.clone();
            others.retain(|index, _| named.binary_search(index).is_err());
            let encode = |run: &[u64]| self.tables.encode_directory(run[0]..run[0] + run.len() as u64, &others);
            sectors.chunk_by(|a, b| a + 1 == *b).map(|run| (run[0], encode(run))).collect()
        };
        for (sector, bytes) in directory {
            write(&bytes, sector)?;
        }
        flush()?;
        let mut unnamed = writer.unnamed.lock();
        unnamed.retain(|index, _| named.binary_search(index).is_err());
        durable.clear();
        Ok(())
    }

    /// Writes the end of the file into the header, without a flush.
    pub(super) fn write_end(&self, writer: &Writer, sector: u64) -> Result<()> {
        let mut header = writer.header.lock();
        header.set_free_sector(sector);
        let first = &header.bytes()[..SECTOR as usize];
        self.file.write_at(&[first], 0, false).during(|| format!("{}: cannot write the header", self.image))
    }

    pub(super) fn end_writing(&self, writer: &Writer) -> Result<()> {
        let mut open = writer.gate.write();
        if !*open {
            return Ok(());
        }
        // After a lack of space the image stays open, so that it can be closed later.
        self.commit(writer)?;
        *open = false;
        let closed = self.mark_closed(writer);
        closed.inspect_err(|_| writer.commits.stop())
    }

    fn mark_closed(&self, writer: &Writer) -> Result<()> {
        let context = || format!("{}: cannot close it", self.image);
        let free = writer.space.lock().free();
        self.file.file().set_len(free * SECTOR).during(context)?;
        self.write_end(writer, free)?;
        self.file.file().sync().during(context)?;
        let mut header = writer.header.lock();
        header.set_unclean(false);
        // The flags are in the first sector of the header, the mark is in the last; each is valid by itself.
        let (first, rest) = header.bytes().split_at(SECTOR as usize);
        self.file.write_at(&[first, rest], 0, false).during(context)?;
        self.file.file().sync().during(context)
    }
}

/// The changed parts of a table as runs to write, in whole pages if the table begins at a page: a page written as a
/// whole need not be read first.
fn runs_of_parts(parts: u64, place: u64) -> Vec<Range<u32>> {
    let page = match place.is_multiple_of(ALIGNMENT) {
        true => ALIGNMENT as u32,
        false => 1,
    };
    let mut runs: Vec<Range<u32>> = Vec::new();
    for first in (0..TABLE_SECTORS as u32).step_by(page as usize) {
        let mask = ((1 << page) - 1) << first;
        if parts & PARTS_ALL & mask == 0 {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.end == first => run.end = first + page,
            _ => runs.push(first..first + page),
        }
    }
    runs
}
