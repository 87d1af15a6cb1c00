//! SEsparse: ESXi's space-efficient redo logs, read and written in place.
//!
//! ```text
//! sector 0     constant header | volatile header | journal header and our mark        header, touched
//! 1 MiB        journal: transactions of ESXi's; we read them and write none           journal
//! 2 MiB        grain directory: a slot for each 16 MiB of the disk                    entry, state
//!              grain tables: 4,096 entries each, in the order of first use
//!              free bitmap: a bit for each grain of the grain area
//!              backmap: the table entry that names each grain
//!              grains: 4 KiB each, in the order of first use                          space
//! ```
//!
//! The bytes are in `docs/format/sesparse.md`. The modules: `state` is the state in memory, behind one lock, with the
//! pages of metadata in `cache`, and `supply` fetches what work on it lacks; `read` and `write` serve guests; `commit`
//! makes changes durable; `recover` opens for writing; `wipe`, `shrink` and `check` are long work.
//!
//! What must hold:
//!
//! 1. A table names a grain only after its bytes are in the file, on the medium only after they are durable there.
//! 2. At every instant the file is valid for every other reader, with an empty journal: what a table on the medium
//!    names is allocated in the bitmap and owned in the backmap; what a slot of the directory names is below the number
//!    of tables handed out, and written. A crash leaves only grains and tables that nothing names.
//! 3. A grain is given to a new owner only after no table on the medium names it and every reader that saw it there is
//!    done ([`crate::retirement`]).
//! 4. An allocated grain is overwritten in place. A move announces the grain first, waits for the writes that were
//!    under way already, and skips the grain if a write comes meanwhile (`relocate`).
//! 5. After a failed write of metadata or a failed flush nothing is changed until the image is opened again.
//!
//! Locks, in the order in which they are taken: `maintenance`, `gate` (shared by every change, exclusive for a repair
//! and `close`), `commits`, `length`, `state`, `epochs`. No I/O happens under the last two.

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

/// What to do with an image whose journal was not replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirtyJournal {
    /// Do not open it, and say why.
    #[default]
    Refuse,
    /// Replay what can be proven: in memory if opened for reading, into the file if opened for writing.
    Replay,
}

/// How an image is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// For writing too.
    pub write: bool,
    /// What to do with a journal that was not replayed.
    pub journal: DirtyJournal,
    /// Memory for tables in bytes. A page of 4 KiB maps 2 MiB of disk.
    pub cache: usize,
    /// Freed runs of at least this many bytes are punched into the file at once; `None` keeps them for new grains.
    pub punch: Option<u64>,
    /// Open it for writing although its directory is damaged, for a check with repair. Damaged parts stay errors.
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
    /// With the first block of the file.
    commits: GroupCommit<Buffer>,
    /// Held while the file's length changes.
    length: Mutex<()>,
    gate: RwLock<()>,
    /// Held by long work: one at a time.
    maintenance: Mutex<()>,
    /// Grains were written since the last flush of the file.
    unsynced: AtomicBool,
    /// `close` has begun; it still changes the image.
    closing: AtomicBool,
    closed: AtomicBool,
    /// Requests of guests: lets long work detect activity.
    requests: AtomicU64,
    /// Sectors of a journal replayed in memory, over those of the file.
    overlay: Overlay,
    replayed: Option<Replayed>,
    /// True if the image had lamina's mark when it was opened: bitmap and backmap are lamina's.
    ours: bool,
    /// Damage of its headers that was repaired at the opening, and is not reported yet.
    mended: Mutex<Vec<String>>,
}

impl SeSparse {
    /// The name of the image, as it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What was replayed when the image was opened with a dirty journal.
    pub fn replayed(&self) -> Option<&Replayed> {
        self.replayed.as_ref()
    }

    /// Memory used by tables, in bytes.
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

    /// Refuses a range beyond the end, or not in whole grains.
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
            Error::new(ErrorKind::Corrupt, format!("{}: grain {} has no place in a file", self.name, grain.0))
        })
    }

    /// Changes with every request, approximately.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Two requests at once may count as one: the counter shows activity only, and every read passes here.
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

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        match index {
            0 => Ok(&self.file),
            _ => Err(Error::new(ErrorKind::Invalid, format!("{} has one file, not {index} more", self.name))),
        }
    }

    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        // The chain calls the map only for what it does not know; long work has to notice the other reads too.
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
        self.check_changeable()?;
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
