//! Entries of the L2 tables: the locations of clusters.

use super::OFFSET_MASK;
use super::header::Header;

const COMPRESSED: u64 = 1 << 62;
const COPIED: u64 = 1 << 63;
/// In version 3 without extended entries: the cluster reads as zeros.
const ZERO: u64 = 1;
/// Bits of a standard entry that are reserved.
const RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// The state of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cluster {
    /// The cluster is not allocated in this image.
    Absent,
    /// The cluster reads as zeros.
    Zero,
    /// The cluster has data at an offset of the file.
    Data {
        /// The offset of the data in the file.
        offset: u64,
    },
    /// The cluster is divided into 32 subclusters, each of which is data, zeros or absent.
    Parts {
        /// The offset of the whole cluster.
        offset: u64,
        /// A bit for each subcluster with data.
        data: u32,
        /// A bit for each subcluster of zeros.
        zero: u32,
    },
    /// Compressed data at any offset.
    Compressed {
        /// The offset of the data in the file.
        offset: u64,
        /// The most bytes that the data can have.
        size: u64,
    },
}

impl Cluster {
    /// Bytes of the cluster that are in the file.
    pub(super) fn mapped(&self, cluster_size: u64) -> u64 {
        match self {
            Self::Absent | Self::Zero => 0,
            Self::Data { .. } | Self::Compressed { .. } => cluster_size,
            Self::Parts { data, .. } => u64::from(data.count_ones()) * (cluster_size / 32),
        }
    }
}

/// The format of entries in an image.
pub(super) struct Entries {
    cluster_bits: u32,
    words: u64,
    zero_flag: bool,
    external: bool,
}

impl Entries {
    pub(super) fn new(header: &Header) -> Self {
        Self {
            cluster_bits: header.cluster_bits(),
            words: if header.extended() { 2 } else { 1 },
            zero_flag: header.version() >= 3 && !header.extended(),
            external: header.external_data(),
        }
    }

    /// The number of entries of a table, which takes one cluster.
    pub(super) fn per_table(&self) -> u64 {
        (1 << self.cluster_bits) / (8 * self.words)
    }

    /// Bytes of a table that are cached together.
    pub(super) fn slice_bytes(&self) -> u64 {
        super::SLICE_BYTES.min(1 << self.cluster_bits)
    }

    /// Offset in the file of the slice with entry `entry` of the table at `table`, and the index of the entry's first
    /// word in the slice.
    pub(super) fn slice_of(&self, table: u64, entry: u64) -> (u64, usize) {
        let byte = entry * 8 * self.words;
        let within = byte % self.slice_bytes();
        (table + byte - within, (within / 8) as usize)
    }

    /// Decodes the entry at index `word` of a slice; the error says what is invalid.
    pub(super) fn decode(&self, slice: &[u64], word: usize) -> Result<Cluster, &'static str> {
        let entry = slice.get(word).copied().ok_or("it lies outside its table")?;
        if entry & COMPRESSED != 0 {
            if self.external {
                return Err("it is compressed, and the data are in another file");
            }
            // The bits above the offset count the data's sectors; their number depends on the cluster size.
            let offset_bits = 62 - (self.cluster_bits - 8);
            let offset = entry & ((1 << offset_bits) - 1);
            let sectors = (entry & (COMPRESSED - 1)) >> offset_bits;
            return Ok(Cluster::Compressed { offset, size: (sectors + 1) * 512 - offset % 512 });
        }
        if entry & RESERVED != 0 || (entry & ZERO != 0 && !self.zero_flag) {
            return Err("reserved bits are set");
        }
        let offset = entry & OFFSET_MASK;
        if !offset.is_multiple_of(1 << self.cluster_bits) {
            return Err("its offset is no multiple of the cluster size");
        }
        // In an external data file a cluster may be at offset 0: there the COPIED bit means that it is allocated.
        let present = offset != 0 || (self.external && entry & COPIED != 0);
        if self.words == 2 {
            let parts = slice.get(word + 1).copied().ok_or("it lies outside its table")?;
            let (data, zero) = (parts as u32, (parts >> 32) as u32);
            if data & zero != 0 || (data != 0 && !present) {
                return Err("a subcluster is both data and zeros");
            }
            return Ok(match (data, zero) {
                (u32::MAX, _) => Cluster::Data { offset },
                (_, u32::MAX) => Cluster::Zero,
                (0, 0) => Cluster::Absent,
                _ => Cluster::Parts { offset, data, zero },
            });
        }
        Ok(match (entry & ZERO != 0, present) {
            (true, _) => Cluster::Zero,
            (false, true) => Cluster::Data { offset },
            (false, false) => Cluster::Absent,
        })
    }
}
