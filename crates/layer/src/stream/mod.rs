//! streamOptimized: a sparse extent of compressed grains, written sequentially and read at random.
//!
//! ```text
//! header | descriptor | grain .. grain | table | grain .. grain | table | directory | footer | end of stream
//! ```
//!
//! A marker precedes every part except the header. docs/format/stream.md describes the bytes, and the variants that
//! other programs write. Invariants:
//!
//! 1. A grain takes at most its grain size in memory when decompressed, and twice that when compressed.
//! 2. If the directory is missing, as after an incomplete transfer, the markers are walked instead, with a warning.
//!    Each step of the walk advances in the file, so the walk ends.
//! 3. Decompressed grains are kept in a cache of `CACHE_BYTES`; grains read as a whole bypass it.
//! 4. [`StreamWriter`] never seeks: its output can be a pipe.

mod deflate;
mod grains;
mod index;
mod marker;
#[cfg(test)]
mod tests;
mod writer;

pub use writer::{StreamOptions, StreamWriter};

use crate::cache::ClockCache;
use crate::extents::{Answer, check_range};
use crate::hosted::descriptor::read_descriptor;
use crate::hosted::directory::{ENTRY_ABSENT, ENTRY_BAD, ENTRY_ZERO, Warnings};
use crate::hosted::header::{FLAG_COMPRESSED, FLAG_ZERO_GRAINS, Header};
use crate::hosted::read_header;
use crate::{Content, Error, ErrorKind, Extent, IoContext, Layer, Result, SECTOR, Usage, only_file};
use backend::File;
use grains::Grains;
use index::{Index, Missing};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// Memory for decompressed grains, per image.
const CACHE_BYTES: u64 = 4 << 20;

/// An open streamOptimized extent.
pub struct Stream {
    image: String,
    file: Arc<dyn File>,
    header: Header,
    index: Index,
    grains: Grains,
    warnings: Warnings,
    cache: Mutex<ClockCache<u64, Arc<[u8]>>>,
}

impl Stream {
    /// Opens an extent; messages call it `image`. An incomplete extent, without the end-of-stream marker, is refused.
    pub fn open(file: Arc<dyn File>, image: &str) -> Result<Self> {
        Self::open_with(file, image, Missing::Refused)
    }

    /// Opens an extent even if it is incomplete: grains in the missing part read as zeros.
    pub fn salvage(file: Arc<dyn File>, image: &str) -> Result<Self> {
        Self::open_with(file, image, Missing::Zeros)
    }

    /// Opens an extent even if it is incomplete: reading grains that may be in the missing part fails.
    pub fn open_incomplete(file: Arc<dyn File>, image: &str) -> Result<Self> {
        Self::open_with(file, image, Missing::Lost)
    }

    fn open_with(file: Arc<dyn File>, image: &str, cut: Missing) -> Result<Self> {
        let context = |error: Error| error.context(image);
        let header = read_header(file.as_ref()).map_err(context)?;
        if !header.has(FLAG_COMPRESSED) {
            let what = format!("{image}: its grains are not compressed: it is no streamOptimized extent");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let warnings = Warnings::default();
        let (header, index) = Index::open(file.as_ref(), header, image, cut, &warnings).map_err(context)?;
        let grains = Grains::new(image, &header);
        let cache = Mutex::new(ClockCache::new((CACHE_BYTES / grains.size()) as usize));
        Ok(Self { image: image.to_owned(), file, header, index, grains, warnings, cache })
    }

    /// Warnings about damage that did not prevent reads, for the user.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.list()
    }

    /// The embedded descriptor; `None` where there is none.
    pub fn descriptor(&self) -> Result<Option<Vec<u8>>> {
        read_descriptor(self.file.as_ref(), &self.header, &self.image)
    }

    fn lookup(&self, grain: u64) -> Result<Content> {
        match self.index.entry(self.file.as_ref(), grain, &self.warnings)? {
            ENTRY_ABSENT => Ok(Content::Absent),
            ENTRY_ZERO if self.header.has(FLAG_ZERO_GRAINS) => Ok(Content::Zero),
            ENTRY_BAD => {
                let what = format!("{}: grain {grain} lies outside the file: the file was truncated", self.image);
                Err(Error::new(ErrorKind::Corrupt, what))
            }
            _ => Ok(Content::Encoded),
        }
    }

    /// Reads one grain, or its first bytes if the capacity cuts it.
    fn read_grain(&self, grain: u64, out: &mut [u8]) -> Result<()> {
        match self.index.entry(self.file.as_ref(), grain, &self.warnings)? {
            ENTRY_ABSENT => {
                out.fill(0);
                Ok(())
            }
            ENTRY_ZERO if self.header.has(FLAG_ZERO_GRAINS) => {
                out.fill(0);
                Ok(())
            }
            ENTRY_BAD => self.lookup(grain).map(|_| ()),
            sector => self.grains.read(self.file.as_ref(), u64::from(sector), grain, out),
        }
    }

    /// A grain from the cache. If it is not cached, it is read and inserted.
    fn cached_grain(&self, grain: u64) -> Result<Arc<[u8]>> {
        if let Some(bytes) = self.cache.lock().get(grain) {
            return Ok(Arc::clone(bytes));
        }
        let mut bytes = vec![0; self.grains.size() as usize];
        self.read_grain(grain, &mut bytes)?;
        let bytes: Arc<[u8]> = bytes.into();
        self.cache.lock().insert(grain, Arc::clone(&bytes));
        Ok(bytes)
    }
}

impl Layer for Stream {
    fn capacity(&self) -> u64 {
        self.header.capacity * SECTOR
    }

    fn grain(&self) -> u64 {
        self.grains.size()
    }

    fn format(&self) -> &'static str {
        "streamoptimized"
    }

    fn writable(&self) -> bool {
        false
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        check_range(&self.image, &range, self.capacity(), SECTOR)?;
        let size = self.grains.size();
        let mut answer = Answer::new(out, most);
        let mut start = range.start;
        while start < range.end {
            let grain = start / size;
            // The range of a missing table is skipped in one step.
            let (content, grains) = match self.index.absent_from(grain) {
                0 => match self.lookup(grain) {
                    Ok(content) => (content, 1),
                    Err(error) if answer.is_empty() => return Err(error),
                    Err(_) => return Ok(()),
                },
                grains => (Content::Absent, grains),
            };
            let end = grain.saturating_add(grains).saturating_mul(size).min(range.end);
            if !answer.say(start, end - start, content) {
                return Ok(());
            }
            start = end;
        }
        Ok(())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        only_file(index, &self.file, &self.image)
    }

    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        check_range(&self.image, &(start..start.saturating_add(out.len() as u64)), self.capacity(), SECTOR)?;
        let size = self.grains.size();
        let mut at = start;
        let mut rest = out;
        while !rest.is_empty() {
            let (grain, skip) = (at / size, (at % size) as usize);
            let length = (size as usize - skip).min(rest.len());
            let (part, after) = rest.split_at_mut(length);
            match length as u64 == size {
                true => self.read_grain(grain, part)?,
                false => part.copy_from_slice(&self.cached_grain(grain)?[skip..skip + length]),
            }
            rest = after;
            at += length as u64;
        }
        Ok(())
    }

    fn usage(&self) -> Result<Usage> {
        let allocated = self.file.allocated().during(|| format!("{}: cannot find out its size", self.image))?;
        let mapped = self.index.mapped(self.file.as_ref(), &self.warnings)? * self.grains.size();
        Ok(Usage { allocated, mapped, dead: 0 })
    }
}
