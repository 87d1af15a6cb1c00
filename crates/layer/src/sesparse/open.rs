//! Opening and creating images.
//!
//! All headers pass the checks here before they are used: they decode into types with valid values, and their areas lie
//! within the file where necessary. Entries of tables, bitmap and backmap are checked when they are read.

use super::cache::{Cache, Kind};
use super::entry::GRAIN;
use super::header::{Layout, Volatile, capacity_to_create, put_journal_header};
use super::heads;
use super::journal::{self, Overlay, Replayed};
use super::read::read_sectors;
use super::recover::NamedTables;
use super::space::Space;
use super::state::{LayerState, RETIRED_RUNS_MAX};
use super::touched::Touched;
use super::{DirtyJournal, Options, SeSparse};
use crate::epochs::Epochs;
use crate::group_commit::GroupCommit;
use crate::retirement::Retirement;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::{BLOCK_SIZE, Buffer, File, IoMode};
use parking_lot::{Condvar, Mutex, RwLock};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// The least number of pages in memory: one step of the largest operation needs some two hundred.
const CACHE_PAGES_MIN: usize = 512;

/// Repairs words of the headers that are proven wrong, in memory, and with `write` also in the file; returns what was
/// wrong.
fn mend_headers(file: &Arc<dyn File>, name: &str, block: &mut Buffer, write: bool) -> Result<Vec<String>> {
    let failed = || format!("opening {name}");
    let journal = Layout::for_capacity(1).journal;
    let beginning = read_sectors(file, journal.offset, BLOCK_SIZE / SECTOR as usize).during(failed)?;
    let mended = heads::mend(block, &beginning);
    if !mended.is_empty() && write {
        file.write_at(&[&block[..]], 0, true).during(|| format!("repairing the headers of {name}"))?;
    }
    Ok(mended)
}

impl SeSparse {
    /// Opens an image. `name` is for messages. For writing, the caller holds the image's lock.
    pub fn open(file: Arc<dyn File>, name: &str, options: Options) -> Result<Self> {
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, format!("{name}: {what}"));
        let failed = || format!("opening {name}");
        let length = file.len().during(failed)?;
        if length < SECTOR {
            return Err(corrupt(format!("{length} bytes are no SEsparse image")));
        }
        let mut block = Buffer::zeroed(1);
        file.read_at(&mut block, 0).during(failed)?;
        let mended = match options.repair {
            true => mend_headers(&file, name, &mut block, options.write)?,
            false => Vec::new(),
        };
        let layout = Layout::decode(&block[..SECTOR as usize]).map_err(corrupt)?;
        if !heads::is_believable(&layout, &block) {
            let text = "its constant header is damaged: the locations of its areas do not follow from the capacity";
            return Err(corrupt(format!("{text}; check the image with --repair")));
        }
        if length < layout.grains.start() {
            let needed = layout.grains.start();
            return Err(corrupt(format!(
                "the file was truncated: it has {length} bytes, and its tables alone end at {needed}"
            )));
        }
        if file.mode() == IoMode::Direct && !layout.grains.start().is_multiple_of(BLOCK_SIZE as u64) {
            let text = format!("{name}: its grains do not begin at a multiple of 4 KiB; use buffered I/O");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if options.write {
            layout.check_writable().map_err(|what| {
                Error::new(ErrorKind::Unsupported, format!("{name}: {what}; it can only be opened for reading"))
            })?;
        }
        let read_volatile = || {
            let sector = read_sectors(&file, layout.volatile.offset, 1).during(failed)?;
            Volatile::decode(&sector).map_err(corrupt)
        };
        let mut header = match mended.is_empty() {
            true => read_volatile()?,
            // The repaired headers are in the first block, because only headers of lamina are repaired.
            false => {
                Volatile::decode(&block[layout.volatile.start() as usize..][..SECTOR as usize]).map_err(corrupt)?
            }
        };
        let (mut overlay, mut replayed) = (Overlay::default(), None);
        if header.replay != 0 {
            if options.journal == DirtyJournal::Refuse {
                return Err(journal::refuse(name));
            }
            let (sectors, report) = journal::read(&file, name, &layout, &header)?;
            tracing::warn!(image = name, %report, "its journal was dirty");
            replayed = Some(report);
            if options.write {
                journal::apply(&file, name, &layout, &sectors, &report)?;
                header = read_volatile()?;
                file.read_at(&mut block, 0).during(failed)?;
            } else {
                if let Some(sector) = sectors.get(&layout.volatile.offset) {
                    header = Volatile::decode(&sector[..]).map_err(corrupt)?;
                }
                overlay = sectors;
            }
        }
        if header.free_table > layout.tables_max() && options.repair {
            heads::recount_tables(&mut block);
            header.free_table = 0;
        }
        if header.free_table > layout.tables_max() {
            return Err(corrupt(format!("its header counts {} allocated tables, more than fit", header.free_table)));
        }
        if options.write {
            journal::clear(&file, name, &layout)?;
        }
        let layer = Self::assemble(file, name, options, layout, header, block, (overlay, replayed), length);
        *layer.mended.lock() = mended;
        match options.write {
            true => {
                // The recovery reads the page cache. If the last writer was killed before a flush, the device may have
                // older tables, which name grains that are about to be freed. A closed image has an empty mark.
                let marked =
                    |state: &LayerState| state.suspect.as_ref().is_some_and(|mark| mark.regions().next().is_some());
                if marked(&layer.state.lock()) {
                    layer.sync()?;
                }
                layer.recover()?;
            }
            // Slots that name the same table are found now, so that reads do not return data of another part of the
            // disk.
            false => layer.find_shared_tables(),
        }
        Ok(layer)
    }

    /// Creates an empty image of `capacity` bytes in an empty file, durable except for the file's name, and opens it
    /// for writing.
    pub fn create(file: Arc<dyn File>, name: &str, capacity: u64, options: Options) -> Result<Self> {
        let failed = || format!("making {name}");
        let layout = Layout::for_capacity(capacity_to_create(capacity)?);
        if !file.is_empty().during(failed)? {
            return Err(Error::new(ErrorKind::Exists, format!("{name} is not empty")));
        }
        let mut block = Buffer::zeroed(1);
        layout.encode(&mut block);
        let header = Volatile { free_table: 0, next_sequence: 0, replay: 0 };
        header.encode(&mut block[layout.volatile.start() as usize..]);
        put_journal_header(&mut block[layout.journal_header.start() as usize..], header.next_sequence);
        Touched::new(layout.grains_max()).encode(&mut block, header.next_sequence);
        file.set_len(layout.grains.start()).during(failed)?;
        file.write_at(&[&block], 0, false).during(failed)?;
        file.sync().during(failed)?;
        Self::open(file, name, Options { write: true, ..options })
    }

    #[expect(clippy::too_many_arguments, reason = "the one place where all parts come together")]
    fn assemble(
        file: Arc<dyn File>,
        name: &str,
        options: Options,
        layout: Layout,
        header: Volatile,
        block: Buffer,
        (overlay, replayed): (Overlay, Option<Replayed>),
        length: u64,
    ) -> Self {
        let name: Arc<str> = name.into();
        let grains = layout.grains_max();
        let mark = Touched::decode(&block, grains, header.next_sequence);
        let ours = mark.is_some();
        let touched = mark.clone().filter(|_| options.write);
        let held = match ours {
            // The last grain in use is whole in a file of lamina, unless the file was truncated.
            true => length.saturating_sub(layout.grains.start()) / GRAIN,
            false => layout.grains_in(length),
        };
        let state = LayerState {
            name: Arc::clone(&name),
            layout,
            cache: Cache::new((options.cache / BLOCK_SIZE).max(CACHE_PAGES_MIN)),
            space: Space::new(held, grains, touched.is_some()),
            header,
            header_dirty: false,
            spare_tables: Vec::new(),
            table_room: 0..0,
            suspect: mark,
            touched,
            mark_dirty: false,
            retirement: Retirement::new(RETIRED_RUNS_MAX),
            moving: FxHashMap::default(),
            census: None,
            readable: if options.write { held.min(grains) } else { held },
            loading: FxHashMap::default(),
            loads: 0,
            holes: [const { 0..0 }; Kind::ALL],
            settled: 0,
            shared_tables: FxHashSet::default(),
            named_tables: NamedTables::default(),
            uncounted_tables: FxHashSet::default(),
        };
        Self {
            name,
            file,
            layout,
            options,
            state: Mutex::new(state),
            loaded: Condvar::new(),
            epochs: Epochs::new(),
            commits: GroupCommit::new(block),
            length: Mutex::new(()),
            gate: RwLock::new(()),
            maintenance: Mutex::new(()),
            unsynced: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            overlay,
            replayed,
            ours,
            mended: Mutex::default(),
        }
    }
}
