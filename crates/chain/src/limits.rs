//! All limits of a chain.

/// The most levels of one chain, whatever its configuration. The caches have 256 level numbers, and a removed level
/// occupies a number until its last reader ends.
pub const LEVELS_MAX: usize = 128;

/// The default limit on levels.
pub const LEVELS_DEFAULT: usize = 64;

/// The default limit on extents in the metadata cache.
pub const ENTRIES_DEFAULT: usize = 65_536;

/// The greatest limit on extents in a metadata cache: 16 Mi, some 300 MB.
pub const ENTRIES_MAX: usize = 16 << 20;

/// Bytes around a cache miss that are looked up with it, by default.
pub const PREFETCH_BYTES_DEFAULT: u64 = 4 << 20;

/// The most bytes around a cache miss that are looked up with it.
pub const PREFETCH_BYTES_MAX: u64 = 1 << 30;

/// The most extents that a prefetch inserts into the metadata cache, by default.
pub const PREFETCH_EXTENTS_DEFAULT: usize = 64;

/// The greatest limit on the extents that a prefetch inserts into the metadata cache.
pub const PREFETCH_EXTENTS_MAX: usize = 128;

/// Largest data cache: 1 TiB.
pub const DATA_CACHE_MAX: u64 = 1 << 40;

/// Largest request that is read or written at once.
pub const REQUEST_MAX: u64 = 1 << 30;

/// The largest changed range of which the new extents are inserted into the metadata cache; extents of larger ranges
/// are looked up when needed.
pub const UPDATE_BYTES_MAX: u64 = 256 << 20;

/// Largest range that one step of a discard locks.
pub const DISCARD_STEP: u64 = 16 << 20;

/// Bytes that one step of a merge copies. The step locks their range, so a write to the range waits for the step.
pub const COPY_STEP: u64 = 256 << 10;

/// Bytes after which a merge flushes its copies and reports a checkpoint. A flush of the disk may have to wait for the
/// flush of these bytes.
pub const COPY_CHECKPOINT: u64 = 16 << 20;

/// The most passes of a merge over its dirty log before every write is made in top and target.
pub const COPY_PASSES_MAX: u32 = 8;

/// If no more than these bytes are left to copy, the next pass is the last.
pub const COPY_REST: u64 = 8 << 20;

/// The least bytes per bit of a merge's dirty log.
pub const DIRTY_UNIT_MIN: u64 = 64 << 10;

/// The most bits in a merge's dirty log: 1 MiB of memory.
pub const DIRTY_UNITS_MAX: u64 = 8 << 20;

/// The largest grain of a layer; grains may have 1 byte to 64 MiB.
pub const GRAIN_MAX: u64 = 64 << 20;
