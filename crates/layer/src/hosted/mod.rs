//! Sparse extents of VMware Workstation (`KDMV`): monolithicSparse, and the files of a twoGbMaxExtentSparse disk.
//!
//! ```text
//! header | descriptor | redundant directory, its tables | directory, its tables | grains ...
//! ```
//!
//! A grain directory names grain tables; a grain table names 512 grains of 64 KiB. There are two copies of directory
//! and tables, which name the same grains. Both are written; the primary is read, or the redundant one if the primary
//! is damaged. docs/format/hosted.md describes the bytes, and the order in which they become durable. Invariants:
//!
//! 1. Payload is durable before an entry that names it is written; a new table is durable before a directory names it.
//!    So at worst a crash leaves grains that no table names.
//! 2. Between two commits both copies of a table on the device are equal. A crash within a commit may leave them
//!    different, each entry old or new; opening for writing makes them equal before any other change. In a file that
//!    was closed, differing copies are damage: lamina repairs entries that one copy proves, and does not change the
//!    rest.
//! 3. The unclean mark is durable before the first change. It is removed after the last change, when the file is
//!    truncated to its used part.
//! 4. At most one entry names a sector (a file that violates this is not opened for writing). A sector is reused only
//!    when no reader can still use the old entry that named it: see `space.rs`.
//! 5. After a failed write or flush nothing more is written: the layer returns [`ErrorKind::Stopped`] until it is
//!    opened again.
//!
//! Locks, outermost first: the gate (shared by changes, exclusive for closing), the commit, `loading`, the state of the
//! tables and the directories, the space. Only the gate is held while payload is read or written.

mod check;
mod copies;
mod create;
pub(crate) mod descriptor;
pub(crate) mod directory;
pub mod header;
mod mend;
mod space;
pub(crate) mod tables;
#[cfg(test)]
mod tests;
mod write;

pub use check::Check;
pub(crate) use create::GRAIN_SECTORS;
pub use create::{CreateOptions, create};

use crate::extents::{Answer, check_range};
use crate::{
    Content, Error, ErrorKind, Extent, IoContext, Layer, Result, SECTOR, Usage, grain_end, only_file, read_only,
};
use backend::File;
use directory::{Directories, ENTRY_ABSENT, ENTRY_BAD, ENTRY_ZERO, Warnings};
use header::{FLAG_COMPRESSED, FLAG_ZERO_GRAINS, HEADER_SIZE, Header};
use mend::Mended;
use parking_lot::Mutex;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use tables::Tables;
use write::Writer;

/// How an extent is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The name of the image in messages.
    pub image: String,
    /// Whether the extent is opened for writing.
    pub writable: bool,
    /// Whether absent grains are read from a parent. Without a parent, zeros need no entry.
    pub parent: bool,
    /// Whether to use the primary copy of a table if the copies differ and neither is provably wrong.
    pub force: bool,
}

/// An open sparse extent.
pub struct Hosted {
    image: String,
    file: Arc<dyn File>,
    header: Header,
    tables: Tables,
    warnings: Warnings,
    writer: Option<Writer>,
    mended: Mutex<Mended>,
}

impl Hosted {
    /// Opens an extent.
    pub fn open(file: Arc<dyn File>, options: &OpenOptions) -> Result<Self> {
        let image = options.image.clone();
        let context = |error: Error| error.context(&image);
        let header = read_header(file.as_ref()).map_err(context)?;
        if header.has(FLAG_COMPRESSED) {
            let what = format!("{image}: its grains are compressed: it is streamOptimized and opened as such");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if header.version == 3 && options.writable {
            let what = format!("{image}: uncompressed extents of version 3 are only read, convert it for writing");
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let sectors = file.len().during(|| format!("{image}: cannot find out the length"))? / SECTOR;
        if header.overhead > sectors {
            let what = format!("{image}: its metadata take {} sectors and the file has {sectors}", header.overhead);
            return Err(Error::new(ErrorKind::Corrupt, format!("{what}: the file was truncated")));
        }
        let warnings = Warnings::default();
        let mut directories =
            Directories::read(file.as_ref(), &header, options.writable, &image, &warnings).map_err(context)?;
        directories.set_rules(options.parent, options.force);
        let tables = Tables::new(&image, directories, header.table_entries);
        let mended = Mutex::default();
        let mut layer = Self { image: options.image.clone(), file, header, tables, warnings, writer: None, mended };
        match options.writable {
            true => layer.begin_writing(options.parent, options.force)?,
            false if layer.header.unclean => {
                let sentence = "it was not closed properly; flushed data is complete".to_owned();
                layer.warnings.add(&layer.image, sentence);
            }
            false => {}
        }
        Ok(layer)
    }

    /// Warnings about damage that did not prevent reads, for the user.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.list()
    }

    /// The header as it was when the extent was opened.
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn grain_bytes(&self) -> u64 {
        self.header.grain * SECTOR
    }

    /// The tables that a range of grains touches: index of the table, first entry, number of entries.
    fn by_table(&self, first: u64, count: u64) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let per_table = u64::from(self.header.table_entries);
        let end = first + count;
        let mut at = first;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (index, entry) = (at / per_table, at % per_table);
            let entries = (per_table - entry).min(end - at);
            at += entries;
            Some((index as usize, entry as usize, entries as usize))
        })
    }

    fn damaged_entry(&self, grain: u64) -> Error {
        let what = format!(
            "{}: grain {grain} has no valid sector: its tables are damaged or the file was truncated",
            self.image
        );
        Error::new(ErrorKind::Corrupt, format!("{what}; check the image, with --repair to correct what can be proven"))
    }
}

/// Reads and checks the header of a file.
pub(crate) fn read_header(file: &dyn File) -> Result<Header> {
    let mut bytes = [0; HEADER_SIZE];
    file.read_at(&mut bytes, 0).during(|| "cannot read the header".to_owned())?;
    Header::decode(&bytes)
}

impl Layer for Hosted {
    fn capacity(&self) -> u64 {
        self.header.capacity * SECTOR
    }

    fn grain(&self) -> u64 {
        self.grain_bytes()
    }

    fn table_size(&self) -> (u64, u64) {
        // The size of both copies: in the worst case each begins a new page.
        let table = (self.header.table_sectors() * SECTOR).next_multiple_of(backend::BLOCK_SIZE as u64);
        (u64::from(self.header.table_entries) * self.grain_bytes(), 2 * table)
    }

    fn format(&self) -> &'static str {
        "monolithicsparse"
    }

    fn writable(&self) -> bool {
        self.writer.is_some()
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        check_range(&self.image, &range, self.capacity(), SECTOR)?;
        let grain = self.grain_bytes();
        let mut answer = Answer::new(out, most);
        let grains = range.end.div_ceil(grain) - range.start / grain;
        for (index, first, count) in self.by_table(range.start / grain, grains) {
            let base = (index * self.header.table_entries as usize + first) as u64;
            let table = match self.tables.get(self.file.as_ref(), index, &self.warnings) {
                Ok(table) => table,
                Err(error) if answer.is_empty() => return Err(error),
                Err(_) => return Ok(()),
            };
            let Some(table) = table else {
                let start = (base * grain).max(range.start);
                let end = ((base + count as u64) * grain).min(range.end);
                if !answer.say(start, end - start, Content::Absent) {
                    return Ok(());
                }
                continue;
            };
            for at in 0..count {
                let number = base + at as u64;
                let start = (number * grain).max(range.start);
                let end = ((number + 1) * grain).min(range.end);
                let content = match table.entry(first + at) {
                    ENTRY_ABSENT => Content::Absent,
                    ENTRY_ZERO if self.header.has(FLAG_ZERO_GRAINS) => Content::Zero,
                    // The extents before the damage are returned; a request that begins with the damaged grain gets the
                    // error.
                    ENTRY_BAD if !answer.is_empty() => return Ok(()),
                    ENTRY_BAD => return Err(self.damaged_entry(number)),
                    place => Content::Data { file: 0, offset: u64::from(place) * SECTOR + (start - number * grain) },
                };
                if !answer.say(start, end - start, content) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn damage_end(&self, at: u64) -> u64 {
        let table = at / self.grain_bytes() / u64::from(self.header.table_entries);
        match self.tables.get(self.file.as_ref(), table as usize, &self.warnings) {
            Ok(_) => grain_end(self, at),
            Err(_) => ((table + 1) * u64::from(self.header.table_entries) * self.grain_bytes()).min(self.capacity()),
        }
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        only_file(index, &self.file, &self.image)
    }

    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.writer.as_ref().map(|writer| writer.epoch() as _)
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        self.write_grains(self.writer()?, start, slices)
    }

    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        self.zero_grains(self.writer()?, range, keep)
    }

    fn flush(&self) -> Result<()> {
        self.writer.as_ref().map_or(Ok(()), |writer| self.flush_open(writer))
    }

    fn is_commit_due(&self) -> bool {
        self.writer.as_ref().is_some_and(Writer::is_commit_due)
    }

    fn has_stopped(&self) -> bool {
        self.writer.as_ref().is_some_and(Writer::has_stopped)
    }

    fn close(&self) -> Result<()> {
        self.writer.as_ref().map_or(Ok(()), |writer| self.end_writing(writer))
    }

    fn usage(&self) -> Result<Usage> {
        let check = self.examine()?;
        let allocated = self.file.allocated().during(|| format!("{}: cannot find out its size", self.image))?;
        Ok(Usage { allocated, mapped: check.grains * self.grain_bytes(), dead: check.dead })
    }
}

impl Hosted {
    fn writer(&self) -> Result<&Writer> {
        self.writer.as_ref().ok_or_else(|| read_only(self.format()).context(&self.image))
    }
}
