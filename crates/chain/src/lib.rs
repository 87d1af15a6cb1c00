//! Chains: layers of any formats, newest first, seen as one range of bytes.
//!
//! ```text
//! chain        an open chain: levels, caches, counters; reads, writes, discards, flushes at any byte offset
//! levels       the stack at one point in time; writers enter through its gate, snapshots and merges replace it
//! walk         lookup: one walk down the levels, each queried only for ranges that the levels above lack
//! metadata     cached extents, 16 bytes each, evicted by recency; and for each block a byte: the level that stores it
//! data         cached blocks, for disks with a read cache
//! changes      cache-fill invalidation: a lookup during which a write began does not fill a cache
//! ranges       locks on byte ranges: one change of a range at a time
//! unflushed    ranges changed since the last flush, which are not read any more after a failed flush
//! consolidate  merges of layers into the layer below or above while the disk is in use
//! ```
//!
//! The crate uses only the trait [`layer::Layer`]; formats, names and descriptors are the concern of the chain's owner,
//! which opens the layers. The owner keeps a durable record of the levels. It replaces the record in `commit` of a
//! merge, and before [`Chain::push`]. Invariants:
//!
//! 1. **Plan, then read.** A plan is made under short locks; data moves without locks. A plan holds the levels from
//!    which it was made and the epoch of every layer that may reuse grains, so its file locations keep their content.
//! 2. **A cached read costs the same at any depth.** The extents that a walk finds are cached by guest address,
//!    whichever level stores them. If a random load uses more extents than the cache can have, each miss queries one
//!    level, not half of the levels.
//! 3. **No stale answers** (`changes`): a lookup result is inserted into a cache only if no change of its range was
//!    under way when the lookup began, and none has begun since.
//! 4. **Changes of one range are made one after another** (range locks, in order of arrival); other requests do not
//!    wait.
//! 5. **A snapshot is a new stack.** Writes acknowledged before it are below, writes that begin after it are above, and
//!    no write waits for another disk's I/O.
//! 6. **A merge changes nothing visible** until its commit: a crash or an interruption before the commit leaves the
//!    chain unmerged, and a crash after the commit leaves it merged.
//! 7. **After a failed flush nothing is written**, and ranges changed since the last successful flush are not read,
//!    until the chain is opened again: the device may have their old content.
//!
//! Locks, in the order in which they are taken: operation (one merge), control (one change of the stack), range, gate,
//! then one of these at a time: a shard of a cache, the current stack, the flush state.

#![forbid(unsafe_code)]

mod chain;
mod changes;
mod consolidate;
mod data;
mod flush;
mod gate;
mod levels;
pub mod limits;
mod mapping;
mod metadata;
mod ranges;
mod read;
mod snapshot;
mod statistics;
mod status;
mod unflushed;
mod walk;
mod write;

pub use chain::{Chain, Options};
pub use consolidate::Merged;
pub use levels::LevelKey;
pub use metadata::Tunables;
pub use ranges::{Held, Ranges};
pub use read::{Part, Place, Plan};
pub use snapshot::Frozen;
pub use statistics::{DataStatistics, LevelStatistics, MetadataStatistics, Statistics};
pub use status::{Condition, Span};

pub(crate) use error::{Error, ErrorKind, Result};
