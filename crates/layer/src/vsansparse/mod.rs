//! vsanSparse: a delta object with its own extent map, in which space is allocated in units of 4 MiB.
//!
//! ```text
//! header, twice | log (1 MiB) | root | map pages | units of 4 MiB, filled in the order of first writes
//! ```
//!
//! vSAN keeps its deltas as objects in its store, and no file format for them exists. This format is lamina's own, with
//! the same behaviour; docs/format/vsansparse.md describes its bytes. Invariants:
//!
//! 1. An allocated grain (4 KiB) keeps its location. Later writes overwrite that location, a discard punches it, and
//!    writes after the discard use it again. So locations are never freed, there is no need to wait for readers, and
//!    the file never becomes longer than the disk, its map and the few blocks lost in crashes.
//! 2. A change of the map is logged before it can appear in a map page of the file, and its payload is durable before
//!    it is logged. A flush is one flush of the file, and one append to the log if the map changed.
//! 3. A checkpoint writes pages over the older of their two copies, after all changes in them are logged; then the
//!    root; then the header, which frees the log up to the captured changes. So after a power cut at any moment, every
//!    change is in the log or in a valid copy.
//! 4. Recovery reads only the log, at most 1 MiB, whatever the size of the disk.
//! 5. After a failed write of the map or a failed flush nothing more is written: the layer returns
//!    [`ErrorKind::Stopped`] until it is opened again. Metadata with a wrong checksum is an error, and is never used.
//!
//! Locks, outermost first: the gate (shared by changes, exclusive for closing), `checkpoint`, `commits`, `order`
//! (shared by changes of the map, exclusive for captures), `births` and the locks of the cache, `pending`, `space`.
//! Only the gate is held while payload is read or written. `flushing` is the innermost lock; those from `order` on are
//! not held with it.

mod check;
mod commit;
mod create;
pub mod header;
mod layout;
mod log;
mod map;
mod page;
mod recover;
#[cfg(test)]
mod tests;
mod write;

pub use crate::runs::options::{CACHE_BYTES, OpenOptions};
pub use check::Check;
pub use create::{CreateOptions, create};
pub use layout::{BLOCK, UNIT};

use crate::aligned::AlignedFile;
use crate::extents::{Answer, check_range};
use crate::{Content, Extent, IoContext, Layer, Result, SECTOR, Usage, only_file, read_only};
use backend::File;
use commit::Writer;
use header::Header;
use map::{Map, PageState};
use page::{DATA, ZERO, ZERO_RESERVED};
use std::ops::Range;
use std::sync::Arc;

/// An open delta object.
pub struct VsanSparse {
    image: String,
    file: AlignedFile,
    header: Header,
    map: Map,
    writer: Option<Writer>,
}

impl VsanSparse {
    /// Opens an object. After a crash the log is replayed, in memory only if the object is opened for reading.
    pub fn open(file: Arc<dyn File>, options: &OpenOptions) -> Result<Self> {
        let image = options.image.clone();
        let file = AlignedFile::new(file);
        let header = Header::read(&file).map_err(|error| error.context(&image))?;
        let map = Map::open(&file, &header, options)?;
        let mut layer = Self { image, file, header, map, writer: None };
        let log = layer.recover(options.salvage)?;
        if options.writable {
            layer.begin_writing(log, options.parent)?;
        }
        Ok(layer)
    }

    /// The header as it was when the object was opened.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The grains that a range of bytes touches.
    fn grains(range: &Range<u64>) -> Range<u64> {
        range.start / BLOCK..range.end.div_ceil(BLOCK)
    }

    fn writer(&self) -> Result<&Writer> {
        self.writer.as_ref().ok_or_else(|| read_only(self.format()).context(&self.image))
    }
}

impl Layer for VsanSparse {
    fn capacity(&self) -> u64 {
        self.header.capacity
    }

    fn grain(&self) -> u64 {
        BLOCK
    }

    fn table_size(&self) -> (u64, u64) {
        // A new page occupies the space of its two copies.
        (layout::PAGE_GRAINS * BLOCK, 2 * BLOCK)
    }

    fn format(&self) -> &'static str {
        "vsansparse"
    }

    fn writable(&self) -> bool {
        self.writer.is_some()
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        check_range(&self.image, &range, self.capacity(), SECTOR)?;
        let mut answer = Answer::new(out, most);
        for (index, entries) in self.map.layout.split(Self::grains(&range)) {
            let base = u64::from(index) * layout::PAGE_GRAINS;
            let clip = |first: u64, count: u64| {
                let start = (first * BLOCK).max(range.start);
                (start, ((first + count) * BLOCK).min(range.end) - start)
            };
            let whole = match self.map.state(index) {
                PageState::Absent => Some(Content::Absent),
                PageState::Zero => Some(Content::Zero),
                PageState::Stored => None,
                PageState::Lost if answer.is_empty() => {
                    return Err(self.map.corrupt(format!("the state of page {index} of the map is lost")));
                }
                PageState::Lost => return Ok(()),
            };
            if let Some(content) = whole {
                let (start, length) = clip(base + u64::from(entries.start), entries.len() as u64);
                if !answer.say(start, length, content) {
                    return Ok(());
                }
                continue;
            }
            let load = || self.map.load(&self.file, index);
            let told = self.map.pages.read(index, load, |page| {
                page.pieces(entries).all(|piece| {
                    let first = base + u64::from(piece.first);
                    let (start, length) = clip(first, u64::from(piece.count));
                    let content = match piece.what {
                        Some((DATA, place)) => {
                            Content::Data { file: 0, offset: place * BLOCK + (start - first * BLOCK) }
                        }
                        Some((ZERO | ZERO_RESERVED, _)) => Content::Zero,
                        _ => Content::Absent,
                    };
                    answer.say(start, length, content)
                })
            });
            match told {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) if answer.is_empty() => return Err(error),
                // The extents before the damage are returned; a request that begins with the damaged grain gets the
                // error.
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    fn damage_end(&self, at: u64) -> u64 {
        // A page of the map is read as a whole.
        let span = layout::PAGE_GRAINS * BLOCK;
        ((at / span + 1) * span).min(self.capacity())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        only_file(index, self.file.file(), &self.image)
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        self.write_range(self.writer()?, start, slices)
    }

    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        self.zero_range(self.writer()?, range, keep)
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
        Ok(Usage { allocated, mapped: survey.grains * BLOCK, dead: survey.dead * BLOCK })
    }
}
