//! The native store: block maps, checksums, allocation, journal and recovery behind lamina's own disk format.
//!
//! ```text
//! engine    write buffer in, journal and data files out; flush, snapshot, clone, delete, checkpoint, recovery
//! buffer    what was written and is not in the map yet, per disk, in layers cut by snapshots
//! catalog   disks and snapshots: names, capacities, roots
//! tree      logical block -> physical block, shared between disks by reference counts
//! space     physical blocks: reference counts, checksums, free runs, what the file system has given
//! pages     4 KiB metadata pages, cached, written home only by checkpoints
//! journal   the ring: operations, payload of small flushed writes, page images of a checkpoint
//! sync      locks, atomics and threads, or a scheduler that decides their order
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
mod sync;
pub mod tree;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testbed;

pub(crate) use checksums::checksum;
pub use engine::{Engine, EngineOptions};
pub(crate) use error::{Error, ErrorKind, IoContext, Result};
