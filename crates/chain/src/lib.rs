//! Chains: layers of any formats, newest first, seen as one range of bytes.
//!
//! ```text
//! chain        what is open: levels, caches, counters; reads, writes, discards, flushes at any byte
//! levels       the stack at one point in time; writers enter by its gate, snapshots swap it
//! walk         the resolver: down the levels once, each asked only for what those above left absent
//! metadata     resolved extents, 16 bytes each, evicted by recency; and a byte a block that says which level to ask
//! data         blocks that were read, where a disk has a read cache
//! changes      cache-fill invalidation: a look-up that a write overtook does not fill a cache
//! ranges       byte ranges that one change at a time may touch
//! unflushed    what was changed since the last flush: not read any more once one has failed
//! consolidate  layers merged into the one below or above while the disk is in use
//! ```
//!
//! The crate knows [`layer::Layer`] and nothing of formats, names and descriptors: the owner that opens a chain keeps
//! those, and makes its own record durable at the one moment where it matters (`commit` of a merge, before
//! [`Chain::push`]). What holds:
//!
//! 1. **Ask, then read.** A plan is made under short locks; data moves without any. A plan holds the levels it was made
//!    from and the epoch of every layer that may give places to others, so what it names stays what it was.
//! 2. **Depth is paid once.** What a walk finds is cached under its address, wherever it lay; a cached read costs the
//!    same at depth 1 and 32. Where more is read at random than is cached, one level is asked instead of half of them.
//! 3. **No old answer after a new one** (`changes`): a cache takes what was found only if nothing there has
//!    begun to change since before it was looked for.
//! 4. **Changes of one place come one after another** (range locks, in order of arrival); nothing else waits.
//! 5. **A snapshot is a new stack.** Writes acknowledged before it are below, those begun after it above, and no write
//!    waits for another disk's I/O.
//! 6. **A merge changes nothing that can be seen** until its commit: a crash or an interruption before leaves the chain
//!    as it was, one after leaves it merged.
//! 7. **After a failed flush nothing is written**, and what was changed since the one before is not read, until the
//!    chain is opened again: the medium may show what was there before.
//!
//! Locks, in the order in which they are taken: operation (one merge), control (one change of the stack), range, gate,
//! then one leaf at a time: a shard of a cache, the current stack, the flush state.

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
