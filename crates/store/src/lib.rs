//! The native store: block maps, checksums, allocation, journal and recovery behind lamina's own disk format.
//!
//! ```text
//! engine    connects the other modules: flush, snapshot, clone, delete, checkpoint, recovery
//! buffer    writes that are not in the map yet, per disk, in layers separated by snapshots
//! catalog   disks and snapshots: names, capacities, roots
//! tree      maps logical to physical blocks; nodes are shared between disks and reference-counted
//! space     physical blocks: reference counts, checksums, free runs, space allocated in the file system
//! pack      blocks that are compressed and stored together
//! pages     4 KiB metadata pages, cached, written in place only by checkpoints
//! journal   a ring: operations, and payload of small flushed writes
//! sync      locks, atomics and threads, or a scheduler that decides their order
//! engine::check  walks all metadata and compares it
//! ```
//!
//! The format is described in `docs/format/native.md`.

#![forbid(unsafe_code)]

pub mod buffer;
pub mod catalog;
pub mod engine;
pub mod journal;
pub mod pack;
pub mod pages;
pub mod space;
mod sync;
pub mod tree;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testbed;

pub(crate) use checksums::checksum;
pub use engine::{Engine, EngineOptions};
pub(crate) use error::{Error, ErrorKind, IoContext, Result};

/// Physical blocks per data file: just under 1 TiB, below the file size limit of common file systems. An extent is read
/// and written by requests to one file, so none reaches from one file into the next. The files of unit tests are small,
/// so that each test that writes much uses several.
pub(crate) const FILE_BLOCKS: u64 = space::REGION_BLOCKS * if cfg!(test) { 1 } else { 16_384 };

/// Whether an error means that bytes on the medium are lost: they are wrong, or the medium cannot read them.
pub(crate) fn is_lost(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Io)
}
