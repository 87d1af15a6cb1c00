//! VMFSsparse (`COWD`): the redo logs of ESX, one file per snapshot, in grains of 512 bytes.
//!
//! ```text
//! header (4 sectors) | grain directory | grains and grain tables, in the order of first writes
//! ```
//!
//! The directory names tables; a table names 4,096 grains. docs/format/vmfssparse.md describes the bytes. Invariants:
//!
//! 1. Payload is written to the file by the request itself, tables later by a commit. A commit first makes the payload
//!    and new tables durable, and then writes the entries that name them. So a crash leaves at worst grains and tables
//!    that no entry names. The end of the file in the header is written last, and is not used after a crash.
//! 2. The unclean mark is durable before the first change, and is cleared after the last.
//! 3. A grain keeps its location: later writes overwrite it in place. Only shrinking moves grains, and it truncates old
//!    locations only after all operations that may use them have ended ([`Layer::epoch`]).
//! 4. The format has no entry for zeros. Zeros over a parent are stored as grains, long runs of them as holes of the
//!    file. The value 1, which some readers take for zeros and others do not, is read as zeros and never written.
//! 5. After a failed write or flush nothing more is written: the layer returns [`ErrorKind::Stopped`] until it is
//!    opened again.
//!
//! Locks, outermost first: `shrinking`, the gate (shared by changes, exclusive for closing and for the steps of
//! shrinking), `commits`, `unnamed`, `space`, the locks of the cache. Only the gate is held while payload is read or
//! written.

mod check;
mod commit;
mod create;
pub mod header;
mod shrink;
mod space;
mod tables;
#[cfg(test)]
mod tests;
mod write;

pub use crate::runs::options::{CACHE_BYTES, OpenOptions};
pub use check::Check;
pub use create::{CreateOptions, create};
pub use shrink::Shrunk;

use crate::aligned::AlignedFile;
use crate::extents::{Answer, check_range};
use crate::{
    Content, Error, ErrorKind, Extent, IoContext, Layer, Result, SECTOR, Usage, grain_end, only_file, read_only,
};
use backend::File;
use commit::Writer;
use header::{HEADER_SIZE, Header};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use tables::{DATA, Tables, ZERO};

/// An open redo log.
pub struct VmfsSparse {
    image: String,
    file: AlignedFile,
    header: Header,
    tables: Tables,
    writer: Option<Writer>,
}

impl VmfsSparse {
    /// Opens an extent.
    pub fn open(file: Arc<dyn File>, options: &OpenOptions) -> Result<Self> {
        let image = options.image.clone();
        let file = AlignedFile::new(file);
        let mut bytes = [0; HEADER_SIZE];
        file.read_at(&mut bytes, 0).during(|| format!("{image}: cannot read the header"))?;
        let header = Header::decode(&bytes).map_err(|error| error.context(&image))?;
        let tables = Tables::open(&file, &header, options)?;
        let mut layer = Self { image, file, header, tables, writer: None };
        if options.writable {
            layer.begin_writing(options.parent)?;
        }
        Ok(layer)
    }

    /// The header as it was when the extent was opened.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Warnings about damage that did not prevent reads, for the user.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.header.unclean() {
            warnings.push(format!("{}: it was not closed properly; flushed data is complete", self.image));
        }
        warnings
    }

    fn grain_bytes(&self) -> u64 {
        self.header.grain() * SECTOR
    }

    /// The grains that a range of bytes touches.
    fn grains(&self, range: &Range<u64>) -> Range<u64> {
        range.start / self.grain_bytes()..range.end.div_ceil(self.grain_bytes())
    }

    fn damaged_entry(&self, grain: u64) -> Error {
        let what = format!("{}: grain {grain} lies outside the file", self.image);
        Error::new(ErrorKind::Corrupt, format!("{what}: the file was truncated, or its tables are damaged"))
    }

    fn writer(&self) -> Result<&Writer> {
        self.writer.as_ref().ok_or_else(|| read_only(self.format()).context(&self.image))
    }
}

impl Layer for VmfsSparse {
    fn capacity(&self) -> u64 {
        self.header.capacity() * SECTOR
    }

    fn grain(&self) -> u64 {
        self.grain_bytes()
    }

    fn table_size(&self) -> (u64, u64) {
        (u64::from(header::TABLE_ENTRIES) * self.grain_bytes(), header::TABLE_SECTORS * SECTOR)
    }

    fn format(&self) -> &'static str {
        "vmfssparse"
    }

    fn writable(&self) -> bool {
        self.writer.is_some()
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        check_range(&self.image, &range, self.capacity(), SECTOR)?;
        let size = self.grain_bytes();
        let mut answer = Answer::new(out, most);
        for (index, entries) in self.tables.split(self.grains(&range)) {
            let base = self.tables.first_grain(index);
            let clip = |first: u64, count: u64| {
                let start = (first * size).max(range.start);
                (start, ((first + count) * size).min(range.end) - start)
            };
            if self.tables.place(index) == 0 {
                let (start, length) = clip(base + u64::from(entries.start), entries.len() as u64);
                if !answer.say(start, length, Content::Absent) {
                    return Ok(());
                }
                continue;
            }
            let load = || self.tables.load(&self.file, index);
            let told = self.tables.cache.read(index, load, |table| {
                for piece in table.pieces(entries) {
                    let first = base + u64::from(piece.first);
                    let (start, length) = clip(first, u64::from(piece.count));
                    let content = match piece.what {
                        None => Content::Absent,
                        Some((ZERO, _)) => Content::Zero,
                        Some((DATA, place)) => {
                            Content::Data { file: 0, offset: place * SECTOR + (start - first * size) }
                        }
                        // The extents before the damage are returned; a request that begins with the damaged grain gets
                        // the error.
                        Some(_) if !answer.is_empty() => return Ok(false),
                        Some(_) => return Err(self.damaged_entry(first)),
                    };
                    if !answer.say(start, length, content) {
                        return Ok(false);
                    }
                }
                Ok(true)
            });
            match told {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => return Ok(()),
                Ok(Err(error)) | Err(error) if answer.is_empty() => return Err(error),
                Ok(Err(_)) | Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    fn damage_end(&self, at: u64) -> u64 {
        let span = u64::from(header::TABLE_ENTRIES) * self.grain_bytes();
        let index = (at / span) as u32;
        match self.tables.cache.read(index, || self.tables.load(&self.file, index), |_| ()) {
            Ok(()) => grain_end(self, at),
            Err(_) => ((at / span + 1) * span).min(self.capacity()),
        }
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        only_file(index, self.file.file(), &self.image)
    }

    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.writer.as_ref().map(|writer| writer.epochs.enter() as _)
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        self.write_range(self.writer()?, start, slices)
    }

    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        self.zero_range(self.writer()?, range, keep)
    }

    fn discard(&self, range: Range<u64>) -> Result<bool> {
        self.discard_range(self.writer()?, range)
    }

    fn flush(&self) -> Result<()> {
        self.writer.as_ref().map_or(Ok(()), |writer| self.flush_writes(writer))
    }

    fn is_commit_due(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.commits.is_due())
    }

    fn has_stopped(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.commits.has_stopped())
    }

    fn close(&self) -> Result<()> {
        self.writer.as_ref().map_or(Ok(()), |writer| self.end_writing(writer))
    }

    fn usage(&self) -> Result<Usage> {
        let survey = self.survey()?;
        let allocated = self.file.file().allocated().during(|| format!("{}: cannot find out its size", self.image))?;
        Ok(Usage { allocated, mapped: survey.grains * self.grain_bytes(), dead: survey.dead * SECTOR })
    }
}
