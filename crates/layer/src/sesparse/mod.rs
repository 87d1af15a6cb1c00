//! SEsparse: ESXi's space-efficient redo logs, read and written in place.
//!
//! ```text
//! sector 0     constant header | volatile header | journal header and lamina's mark   header, touched
//! 1 MiB        journal: ESXi's transactions, which lamina reads and never writes      journal
//! 2 MiB        grain directory: a slot for each 16 MiB of the disk                    entry, state
//!              grain tables: 4,096 entries each, in the order of first use
//!              free bitmap: a bit for each grain of the grain area
//!              backmap: the table entry that names each grain
//!              grains: 4 KiB each, in the order of first use                          space
//! ```
//!
//! `docs/format/sesparse.md` describes the bytes. Modules: `state` has the state in memory behind one lock, `cache` the
//! pages of metadata, and `supply` fetches missing pages for work on the state. `read` and `write` serve guests;
//! `commit` makes changes durable; `recover` opens for writing; `wipe`, `shrink` and `check` are maintenance.
//!
//! Invariants:
//!
//! 1. A table in memory names a grain only after its data is in the file; a table on the device names it only after the
//!    data is durable.
//! 2. At every instant the file is valid for every other reader, with an empty journal: a grain that a table on the
//!    device names is allocated in the bitmap and has its owner in the backmap; a table that a directory slot names is
//!    below the number of allocated tables, and written. A crash leaves only unused grains and tables.
//! 3. A grain is reused only after no table on the device names it, and after every reader that looked it up has ended
//!    ([`crate::retirement`]).
//! 4. An allocated grain is overwritten in place. A move announces the grain first, waits for writes already under way,
//!    and skips the grain if it is written meanwhile (`relocate`).
//! 5. After a failed metadata write or flush, all changes are refused until the image is opened again.
//!
//! Locks, in the order in which they are taken: `maintenance`, `gate` (shared by every change, exclusive for a repair
//! and `close`), `commits`, `length`, `state`, `epochs`. No I/O is done while one of the last two is held.

mod cache;
mod check;
mod commit;
mod entry;
mod header;
mod heads;
mod journal;
mod maintain;
mod open;
mod proof;
mod read;
mod recover;
mod relocate;
mod shrink;
mod space;
mod state;
mod supply;
#[cfg(test)]
mod tests;
mod touched;
mod wipe;
mod write;

pub use check::CheckReport;
pub use journal::Replayed;
pub use shrink::ShrinkReport;
pub use wipe::WipeReport;

use crate::epochs::Epochs;
use crate::group_commit::GroupCommit;
use crate::{Error, ErrorKind, Extent, Layer, Result, Usage};
use backend::{Buffer, File};
use entry::Grain;
use header::Layout;
use journal::Overlay;
use parking_lot::{Condvar, Mutex, RwLock};
use state::LayerState;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How to treat an image whose journal was not replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirtyJournal {
    /// Refuse to open the image.
    #[default]
    Refuse,
    /// Replay the proven transactions: in memory if opened for reading, into the file if opened for writing.
    Replay,
}

/// Options for opening an image.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the image is opened for writing.
    pub write: bool,
    /// How to treat a journal that was not replayed.
    pub journal: DirtyJournal,
    /// Bytes of memory for metadata pages. A 4 KiB page of a table maps 2 MiB of disk.
    pub cache: usize,
    /// Freed runs of at least this many bytes are punched at once; `None` keeps them for new grains.
    pub punch: Option<u64>,
    /// Whether the image is opened although its directory is damaged, for a check with repair, or to read what is left
    /// of an image that is opened for reading. Reads of damaged parts still fail. Headers are repaired, for reading in
    /// memory only.
    pub repair: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { write: false, journal: DirtyJournal::Refuse, cache: 64 << 20, punch: None, repair: false }
    }
}

/// An open image.
pub struct SeSparse {
    name: Arc<str>,
    file: Arc<dyn File>,
    layout: Layout,
    options: Options,
    state: Mutex<LayerState>,
    /// Signalled when a page has been read.
    loaded: Condvar,
    epochs: Epochs,
    /// Lets one thread commit at a time; the committing thread owns a copy of the file's first block.
    commits: GroupCommit<Buffer>,
    /// Held while the length of the file changes.
    length: Mutex<()>,
    gate: RwLock<()>,
    /// Held by wiping, shrinking and checking: one of these operations at a time.
    maintenance: Mutex<()>,
    /// Whether grains were written since the last flush of the file.
    unsynced: AtomicBool,
    /// Whether `close` has begun. `close` itself still changes the image afterwards.
    closing: AtomicBool,
    closed: AtomicBool,
    /// Counts requests of guests, so that maintenance can detect activity.
    requests: AtomicU64,
    /// Sectors of a journal replayed in memory, which replace those of the file.
    overlay: Overlay,
    replayed: Option<Replayed>,
    /// Whether the image had lamina's mark when it was opened: then lamina wrote bitmap and backmap.
    ours: bool,
    /// Damage of the headers that was repaired at the opening and is not reported yet.
    mended: Mutex<Vec<String>>,
}

impl SeSparse {
    /// The name of the image, as it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The result of the replay, if the image was opened with a dirty journal.
    pub fn replayed(&self) -> Option<&Replayed> {
        self.replayed.as_ref()
    }

    /// Bytes of memory in metadata pages.
    pub fn memory(&self) -> u64 {
        self.state.lock().cache.memory()
    }

    /// Refuses changes of an image that is read only, closed or stopped.
    fn check_changeable(&self) -> Result<()> {
        if !self.options.write {
            return Err(crate::read_only(self.format()));
        }
        self.commits.check_changeable(&self.name, !self.closed.load(Ordering::Acquire))
    }

    /// Refuses a range past the end, or one that is not in whole units.
    fn check_range(&self, range: &Range<u64>, unit: u64) -> Result<()> {
        let capacity = self.capacity();
        let whole = range.start.is_multiple_of(unit) && (range.end.is_multiple_of(unit) || range.end == capacity);
        if range.start <= range.end && range.end <= capacity && whole {
            return Ok(());
        }
        let Range { start, end } = range;
        let text = format!("{}: {start} to {end} is not within {capacity} bytes, or not in units of {unit}", self.name);
        Err(Error::new(ErrorKind::Invalid, text))
    }

    fn grain_offset(&self, grain: Grain) -> Result<u64> {
        self.layout.grain_offset(grain.0).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format!("{}: grain {} is too high for any file", self.name, grain.0))
        })
    }

    /// A counter that grows with requests, approximately.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Counts a request. Two requests at once may count as one: the counter only shows that guests are active, and must
    /// be cheap for every read.
    fn count_request(&self) {
        self.requests.store(self.requests.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

impl Layer for SeSparse {
    fn capacity(&self) -> u64 {
        self.layout.capacity * crate::SECTOR
    }

    fn grain(&self) -> u64 {
        entry::GRAIN
    }

    fn table_size(&self) -> (u64, u64) {
        (entry::TABLE_SPAN, header::TABLE_PAGES * backend::BLOCK_SIZE as u64)
    }

    fn format(&self) -> &'static str {
        "sesparse"
    }

    fn writable(&self) -> bool {
        self.options.write
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        self.check_range(&range, 1)?;
        self.count_request();
        self.map_range(range, most, out)
    }

    fn damage_end(&self, at: u64) -> u64 {
        self.damage_around(at).min(self.capacity())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        match index {
            0 => Ok(&self.file),
            _ => Err(Error::new(ErrorKind::Invalid, format!("{} has one file, and no number {index}", self.name))),
        }
    }

    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        // The chain calls `map` only for extents that it has not cached; this call makes all other reads visible to
        // maintenance, too.
        self.count_request();
        self.options.write.then(|| self.epochs.enter() as _)
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        let length = slices.iter().fold(0u64, |sum, slice| sum.saturating_add(slice.len() as u64));
        self.check_range(&(start..start.saturating_add(length)), entry::GRAIN)?;
        let _changing = self.gate.read();
        self.check_changeable()?;
        self.count_request();
        self.write_range(start, slices)
    }

    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        self.check_range(&range, entry::GRAIN)?;
        let _changing = self.gate.read();
        self.check_changeable()?;
        self.count_request();
        self.zero_range(range, keep)
    }

    fn flush(&self) -> Result<()> {
        if !self.options.write {
            return Ok(());
        }
        self.commits.check_changeable(&self.name, true)?;
        self.count_request();
        self.commit_for_flush()
    }

    fn has_stopped(&self) -> bool {
        self.commits.has_stopped()
    }

    fn close(&self) -> Result<()> {
        if !self.options.write {
            return Ok(());
        }
        self.close_clean()
    }

    fn usage(&self) -> Result<Usage> {
        self.count_usage()
    }
}
