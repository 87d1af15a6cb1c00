//! Every bound of a chain in one place.

/// Most levels of one chain, whatever is asked for. The caches tell 256 apart, those on their way out included.
pub const LEVELS_MAX: usize = 128;

/// Levels of a chain unless asked otherwise.
pub const LEVELS_DEFAULT: usize = 64;

/// Extents in the metadata cache unless asked otherwise.
pub const ENTRIES_DEFAULT: usize = 65_536;

/// Most extents in a metadata cache: 16 Mi, some 300 MB.
pub const ENTRIES_MAX: usize = 16 << 20;

/// Bytes around a miss that are resolved with it, unless asked otherwise.
pub const PREFETCH_BYTES_DEFAULT: u64 = 4 << 20;

/// Most bytes around a miss that are resolved with it.
pub const PREFETCH_BYTES_MAX: u64 = 1 << 30;

/// Extents that a prefetch brings at most, unless asked otherwise.
pub const PREFETCH_EXTENTS_DEFAULT: usize = 64;

/// Most extents that a prefetch may be allowed to bring.
pub const PREFETCH_EXTENTS_MAX: usize = 128;

/// Largest data cache: 1 TiB.
pub const DATA_CACHE_MAX: u64 = 1 << 40;

/// Largest request that is read or written at once.
pub const REQUEST_MAX: u64 = 1 << 30;

/// Largest change of a range that enters the metadata cache; what a larger one did is asked for when it is needed.
pub const UPDATE_BYTES_MAX: u64 = 256 << 20;

/// Largest range that one step of a discard locks.
pub const DISCARD_STEP: u64 = 16 << 20;

/// Bytes that one step of a merge copies, with that range locked: a write to it waits for this much.
pub const COPY_STEP: u64 = 256 << 10;

/// Bytes after which a merge makes its copies durable and says so. A flush of the disk may have to wait for this much.
pub const COPY_CHECKPOINT: u64 = 16 << 20;

/// Passes over what was written during a merge before writes go to both sides.
pub const COPY_PASSES_MAX: u32 = 8;

/// A pass over no more than this is the last one.
pub const COPY_REST: u64 = 8 << 20;

/// Bytes one bit of a merge's log of writes stands for, at the least.
pub const DIRTY_UNIT_MIN: u64 = 64 << 10;

/// Bits in a merge's log of writes, at the most: 1 MiB of memory.
pub const DIRTY_UNITS_MAX: u64 = 8 << 20;

/// Grains a layer may be made of: 1 byte to 64 MiB.
pub const GRAIN_MAX: u64 = 64 << 20;
