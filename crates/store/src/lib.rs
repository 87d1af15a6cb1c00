//! The native store: block maps, checksums, allocation, journal and recovery behind lamina's own disk format.
//!
//! ```text
//! engine    write buffer in, journal and home writes out; flush, snapshot, clone, delete, checkpoint, recovery
//! buffer    what was written and is not in the map yet, per disk, in layers cut by snapshots
//! catalog   disks and snapshots: names, capacities, roots
//! tree      logical block -> physical block, shared between disks by reference counts
//! space     physical blocks: reference counts, checksums, free runs, what the file system has given
//! pages     4 KiB metadata pages, cached, written home only by checkpoints
//! journal   the ring: operations, payload of small flushed writes, page images of a checkpoint
//! engine::check  walks everything and compares
//! ```
//!
//! The format is described in `docs/format/native.md`.

#![forbid(unsafe_code)]

pub mod buffer;
pub mod catalog;
pub mod engine;
pub mod journal;
pub mod pages;
pub mod space;
pub mod tree;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testbed;

pub use backend::{Error, ErrorKind, IoContext, Result};
pub use engine::{Engine, EngineOptions};

/// CRC32C (Castagnoli), the checksum of every structure and every block.
pub fn checksum(bytes: &[u8]) -> u32 {
    // The width of CRC-32/ISCSI is 32 bits: the upper half of the answer is always zero.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The checksum of bytes that lie in several places.
pub fn checksum_of(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}
