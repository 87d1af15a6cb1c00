//! QEMU's qcow2, versions 2 and 3, read only: for bases in imported folders, and images to import.
//!
//! Existing crates for qcow2 have their own I/O and chains, so lamina has its own reader: see
//! docs/adr/0010-qcow2-reader.md. The bytes are described in docs/format/qcow2.md. Invariants:
//!
//! 1. The image is never written or repaired: the dirty bit concerns reference counts, which this reader does not use.
//! 2. Only the L1 table is loaded completely, with at most `L1_ENTRIES_MAX` entries. Slices of L2 tables, of
//!    `SLICE_BYTES` each, and decompressed clusters are kept in two bounded caches.
//! 3. A compressed cluster takes at most one cluster of memory decompressed, and two clusters compressed.
//! 4. The caller opens the backing file and the data file by the names in the header, and refuses a cycle of backing
//!    files. Internal snapshots are not read; the caller reports their number.

mod compressed;
mod entry;
mod header;
#[cfg(test)]
mod tests;

pub use header::{Backing, Header};

use crate::cache::ClockCache;
use crate::extents::{Answer, check_range};
use crate::inflate::Inflaters;
use crate::{Content, Error, ErrorKind, Extent, IoContext, Layer, Result, SECTOR, Usage};
use backend::File;
use entry::{Cluster, Entries};
use parking_lot::{Mutex, RwLock};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of L2 tables that are read and cached at a time.
const SLICE_BYTES: u64 = 4096;
/// Memory for slices of L2 tables, per image.
const TABLE_CACHE_BYTES: u64 = 8 << 20;
/// Memory for decompressed clusters, per image.
const CLUSTER_CACHE_BYTES: u64 = 4 << 20;

/// Bits 9 to 55 of an entry: an offset in the file.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// An open qcow2 image.
pub struct Qcow2 {
    image: String,
    /// The image, and the external data file, if it has one.
    files: Vec<Arc<dyn File>>,
    header: Header,
    l1: Vec<u64>,
    entries: Entries,
    slices: RwLock<ClockCache<u64, Arc<[u64]>>>,
    clusters: Mutex<ClockCache<u64, Arc<[u8]>>>,
    inflaters: Inflaters,
}

impl Qcow2 {
    /// Opens an image. `data` is its external data file, required if [`Header::external_data`] is true.
    pub fn open(file: Arc<dyn File>, data: Option<Arc<dyn File>>, image: &str) -> Result<Self> {
        let header = Header::read(file.as_ref()).map_err(|error| error.context(image))?;
        if header.external_data() != data.is_some() {
            let what = match data.is_some() {
                true => "it has no external data file, and one was given",
                false => "its data are in an external data file, which was not given",
            };
            return Err(Error::new(ErrorKind::Invalid, format!("{image}: {what}")));
        }
        let mut bytes = vec![0; header.l1_entries() as usize * 8];
        file.read_at(&mut bytes, header.l1_offset()).during(|| format!("{image}: cannot read the L1 table"))?;
        let l1 = big_endian(&bytes);
        let entries = Entries::new(&header);
        let slices = ClockCache::new((TABLE_CACHE_BYTES / entries.slice_bytes()) as usize);
        let clusters = ClockCache::new((CLUSTER_CACHE_BYTES / header.cluster_size()) as usize);
        let mut files = vec![file];
        files.extend(data);
        Ok(Self {
            image: image.to_owned(),
            files,
            header,
            l1,
            entries,
            slices: RwLock::new(slices),
            clusters: Mutex::new(clusters),
            inflaters: Inflaters::new(false),
        })
    }

    /// The header of the image.
    pub fn header(&self) -> &Header {
        &self.header
    }

    fn corrupt(&self, what: impl std::fmt::Display) -> Error {
        Error::new(ErrorKind::Corrupt, format!("{}: {what}", self.image))
    }

    /// The slice with the entry of `cluster`, and the index of the entry in it; `None` if there is no table.
    fn slice(&self, cluster: u64) -> Result<Option<(Arc<[u64]>, usize)>> {
        let per_table = self.entries.per_table();
        let (index, entry) = (cluster / per_table, cluster % per_table);
        let Some(&l1_entry) = self.l1.get(index as usize) else { return Ok(None) };
        let table = l1_entry & OFFSET_MASK;
        if table == 0 {
            return Ok(None);
        }
        if !table.is_multiple_of(self.header.cluster_size()) {
            return Err(self.corrupt(format_args!("entry {index} of the L1 table is damaged")));
        }
        let (offset, word) = self.entries.slice_of(table, entry);
        if let Some(slice) = self.slices.read().get(offset) {
            return Ok(Some((Arc::clone(slice), word)));
        }
        let length = self.files[0].len().during(|| format!("{}: cannot find out the length", self.image))?;
        if offset + self.entries.slice_bytes() > length {
            return Err(self.corrupt(format_args!("L2 table {index} lies outside the file")));
        }
        let mut bytes = vec![0; self.entries.slice_bytes() as usize];
        self.files[0].read_at(&mut bytes, offset).during(|| format!("{}: cannot read L2 table {index}", self.image))?;
        let slice: Arc<[u64]> = big_endian(&bytes).into();
        self.slices.write().insert(offset, Arc::clone(&slice));
        Ok(Some((slice, word)))
    }

    /// The state of a cluster.
    fn cluster(&self, cluster: u64) -> Result<Cluster> {
        match self.slice(cluster)? {
            None => Ok(Cluster::Absent),
            Some((slice, word)) => {
                let damaged = |what| self.corrupt(format_args!("the entry of cluster {cluster} is damaged: {what}"));
                self.entries.decode(&slice, word).map_err(damaged)
            }
        }
    }

    /// Adds one cluster to the result; returns false if the result is full.
    fn say_cluster(&self, cluster: u64, range: &Range<u64>, answer: &mut Answer<'_>) -> Result<bool> {
        let size = self.header.cluster_size();
        let base = cluster * size;
        let (start, end) = (base.max(range.start), base.saturating_add(size).min(range.end));
        let data = (self.files.len() - 1) as u16;
        let content = match self.cluster(cluster)? {
            Cluster::Absent => Content::Absent,
            Cluster::Zero => Content::Zero,
            Cluster::Compressed { .. } => Content::Encoded,
            Cluster::Data { offset } => {
                self.check_place(cluster, offset)?;
                Content::Data { file: data, offset: offset + (start - base) }
            }
            Cluster::Parts { offset, data: allocated, zero } => {
                if allocated != 0 {
                    self.check_place(cluster, offset)?;
                }
                let part = size / 32;
                for number in (start - base) / part..(end - base).div_ceil(part) {
                    let at = (base + number * part).max(start);
                    let length = (base + (number + 1) * part).min(end) - at;
                    let content = match (allocated >> number & 1, zero >> number & 1) {
                        (1, _) => Content::Data { file: data, offset: offset + (at - base) },
                        (_, 1) => Content::Zero,
                        _ => Content::Absent,
                    };
                    if !answer.say(at, length, content) {
                        return Ok(false);
                    }
                }
                return Ok(true);
            }
        };
        Ok(answer.say(start, end - start, content))
    }

    /// The last cluster of a file may be short: the missing part reads as zeros. A cluster that begins past the end is
    /// an error.
    fn check_place(&self, cluster: u64, offset: u64) -> Result<()> {
        let file = &self.files[self.files.len() - 1];
        let length = file.len().during(|| format!("{}: cannot find out the length", self.image))?;
        // A data file may be shorter than the disk.
        if offset < length || self.files.len() > 1 {
            return Ok(());
        }
        Err(self.corrupt(format_args!(
            "cluster {cluster} lies outside the file, which was truncated, or its tables are damaged"
        )))
    }

    fn read_cluster(&self, cluster: u64) -> Result<Arc<[u8]>> {
        if let Some(bytes) = self.clusters.lock().get(cluster) {
            return Ok(Arc::clone(bytes));
        }
        let mut bytes = vec![0; self.header.cluster_size() as usize];
        match self.cluster(cluster)? {
            Cluster::Compressed { offset, size } => self.inflate(cluster, offset, size, &mut bytes)?,
            _ => return Err(self.corrupt(format_args!("cluster {cluster} is not compressed"))),
        }
        let bytes: Arc<[u8]> = bytes.into();
        self.clusters.lock().insert(cluster, Arc::clone(&bytes));
        Ok(bytes)
    }
}

impl Layer for Qcow2 {
    fn capacity(&self) -> u64 {
        self.header.capacity()
    }

    fn grain(&self) -> u64 {
        self.header.cluster_size()
    }

    fn format(&self) -> &'static str {
        "qcow2"
    }

    fn writable(&self) -> bool {
        false
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        check_range(&self.image, &range, self.capacity(), SECTOR)?;
        let size = self.header.cluster_size();
        let mut answer = Answer::new(out, most);
        let mut cluster = range.start / size;
        while cluster * size < range.end {
            // An empty L1 entry covers the whole range of its table in one step.
            let per_table = self.entries.per_table();
            if self.l1.get((cluster / per_table) as usize).is_none_or(|entry| entry & OFFSET_MASK == 0) {
                let next = (cluster / per_table + 1) * per_table;
                let start = (cluster * size).max(range.start);
                let end = next.saturating_mul(size).min(range.end);
                if !answer.say(start, end - start, Content::Absent) {
                    return Ok(());
                }
                cluster = next;
                continue;
            }
            match self.say_cluster(cluster, &range, &mut answer) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                // The extents before the damage are returned; a request that begins with the damaged cluster gets the
                // error.
                Err(_) if !answer.is_empty() => return Ok(()),
                Err(error) => return Err(error),
            }
            cluster += 1;
        }
        Ok(())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        let none = || Error::new(ErrorKind::Invalid, format!("{}: it has no file {index}", self.image));
        self.files.get(usize::from(index)).ok_or_else(none)
    }

    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        check_range(&self.image, &(start..start.saturating_add(out.len() as u64)), self.capacity(), SECTOR)?;
        let size = self.header.cluster_size();
        let mut at = start;
        let mut rest = out;
        while !rest.is_empty() {
            let (cluster, skip) = (at / size, (at % size) as usize);
            let length = (size as usize - skip).min(rest.len());
            let (part, after) = rest.split_at_mut(length);
            part.copy_from_slice(&self.read_cluster(cluster)?[skip..skip + length]);
            rest = after;
            at += length as u64;
        }
        Ok(())
    }

    fn usage(&self) -> Result<Usage> {
        let context = || format!("{}: cannot find out its size", self.image);
        let mut usage = Usage::default();
        for file in &self.files {
            usage.allocated += file.allocated().during(context)?;
        }
        let per_table = self.entries.per_table();
        for index in (0..self.l1.len() as u64).filter(|index| self.l1[*index as usize] & OFFSET_MASK != 0) {
            for cluster in index * per_table..(index + 1) * per_table {
                usage.mapped += self.cluster(cluster)?.mapped(self.header.cluster_size());
            }
        }
        Ok(usage)
    }
}

/// Decodes the big-endian words of qcow2.
fn big_endian(bytes: &[u8]) -> Vec<u64> {
    let word = |word: &[u8]| word.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    bytes.chunks_exact(8).map(word).collect()
}
