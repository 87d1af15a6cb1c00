//! A disk: opening and removing it; the chain of its head; its locks and its record.

use crate::create::check_name;
use crate::images::remove;
use crate::line::Line;
use crate::medium;
use crate::owner::{LOCK_NAME, Owner};
use crate::record::{Fate, FileRecord, ImageOwnership, Pending, Record};
use crate::stored::{self, NotStored, RECORD_GONE, RECORD_NAME, RECORD_NEW};
use crate::{Error, ErrorKind, Result};
use backend::IoMode;
use chain::Chain;
use layer::Layer;
use layer::descriptor::storage::NEW_SUFFIX;
use layer::image::{Entropy, Folder, Format, system_entropy};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

/// Finds a folder by its path in a record.
pub type FolderFinder = Arc<dyn Fn(&str) -> Result<Folder> + Send + Sync>;

/// Options for opening disks.
#[derive(Clone)]
pub struct Options {
    /// The I/O mode of flat images.
    pub mode: IoMode,
    /// The source of random identities.
    pub random: Entropy,
    /// Folders that images may refer to, besides their own.
    pub permitted: Vec<PathBuf>,
    /// Whether to accept a parent that was changed after its child was made.
    pub force_parent: bool,
    /// Whether to replay the journal of a SEsparse image that was not closed properly, as far as its transactions can
    /// be proven complete.
    pub replay_journal: bool,
    /// The format of the image given to [`Disk::adopt`]; if unset, the format is recognised by the first bytes, or by
    /// the name of a raw file.
    pub adopted: Option<Format>,
    /// Layers above the head, newest first; empty for none. All writes go to the first one, and the others are only
    /// read.
    pub overlay: Vec<Arc<dyn Layer>>,
    /// Finds the folders of other images; if unset, folders are opened by their path.
    pub folders: Option<FolderFinder>,
    /// The most sectors of an extent of a new split disk; `None` for those of VMware's products (2047 MiB).
    pub piece: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mode: IoMode::Buffered,
            random: system_entropy(),
            permitted: Vec::new(),
            force_parent: false,
            replay_journal: false,
            adopted: None,
            overlay: Vec::new(),
            folders: None,
            piece: None,
        }
    }
}

/// A snapshot's chain that a caller has received for reading.
struct Issued {
    chain: Weak<Chain>,
    nodes: Vec<u32>,
}

/// The state of an open disk in memory.
pub(crate) struct DiskState {
    pub record: Record,
    issued: Vec<Issued>,
    /// Images that an operation is writing.
    pub changing: Vec<u32>,
    pub closed: bool,
    /// Why the head cannot be opened: its chain stopped, and reopening has not succeeded yet.
    pub stopped: Option<String>,
    /// Whether acknowledged writes may have been lost with a chain that was dropped since the last opening.
    pub lost: bool,
    /// Whether a flush may have failed, so that the next opening must not rely on the page cache.
    pub doubtful: bool,
    /// Images for which the page cache may differ from the device: see [`Disk::show_stale`].
    pub stale: BTreeSet<u32>,
    /// Whether an interrupted operation has to be finished before images are opened. It could not be finished for lack
    /// of space, or because the device failed.
    pub unsettled: bool,
    /// Whether the durable record still names a snapshot that was undone: `record` replaces it before anything else.
    pub unrecorded: bool,
    /// Whether the last replacement of the record failed in its last step, so that either record may be durable.
    pub failed: bool,
    /// Whether the opening has corrected a damaged byte of the record, and no check has reported that yet.
    pub mended: bool,
}

/// A disk made of images in VMware's formats.
pub struct Disk {
    pub(crate) home: Folder,
    pub(crate) options: Options,
    operation: Mutex<()>,
    head: Mutex<Option<Arc<Line>>>,
    pub(crate) state: Mutex<DiskState>,
    owner: Owner,
}

/// The right to change the image tree, held by one operation at a time.
pub(crate) struct Operation<'a>(#[expect(dead_code, reason = "held, not used")] MutexGuard<'a, ()>);

impl Disk {
    /// Opens the disk of a folder. Interrupted operations are finished or undone first.
    ///
    /// # Errors
    /// `NotFound` if the folder has no disk, or if the disk's creation or deletion was interrupted.
    pub fn open(home: Folder, options: &Options) -> Result<Arc<Self>> {
        let owner = Owner::lock(&home)?;
        let directory = &**home.directory();
        let was_closed = medium::take_mark(directory)?;
        if !was_closed {
            // Makes the file name of the record durable: the last process may have been killed before its flush.
            medium::sync_folder(&home, RECORD_NAME)?;
        }
        let loaded = stored::load_mending(directory);
        if loaded.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            // If a creation was interrupted before its record was durable, the temporary file of the record is the only
            // file that it left.
            remove(directory, RECORD_NEW)?;
            directory.sync().map_err(|error| Error::io("making removals durable", error))?;
        }
        let (record, mended) = loaded?;
        let disk = Self::assemble(home, record, options, owner);
        disk.state.lock().mended = mended;
        if !was_closed {
            disk.show_found();
        }
        if disk.state.lock().stopped.is_none() {
            disk.noting(|| disk.recover())?;
            if mended && let Err(error) = disk.noting(|| disk.commit(disk.record())) {
                tracing::warn!(%error, disk = disk.name(), "the corrected record is written with its next change only");
            }
        }
        Ok(Arc::new(disk))
    }

    pub(crate) fn assemble(home: Folder, record: Record, options: &Options, owner: Owner) -> Self {
        let state = DiskState {
            record,
            issued: Vec::new(),
            changing: Vec::new(),
            closed: false,
            stopped: None,
            lost: false,
            doubtful: false,
            stale: BTreeSet::new(),
            unsettled: false,
            unrecorded: false,
            failed: false,
            mended: false,
        };
        Self {
            home,
            options: options.clone(),
            operation: Mutex::new(()),
            head: Mutex::new(None),
            state: Mutex::new(state),
            owner,
        }
    }

    /// Removes the files of a disk after a failed creation or for a deletion, the record last.
    pub(crate) fn forget(&self) -> Result<()> {
        let record = self.record();
        let pending = record.pending.iter();
        let mut files: Vec<FileRecord> =
            pending.flat_map(|pending| pending.made.iter().chain(&pending.gone)).cloned().collect();
        if record.is_going() {
            // A descriptor is removed after its extents, so that after a crash the extents can still be found by it.
            let made = record.nodes.iter().filter(|node| node.standing == ImageOwnership::Made);
            files.extend(made.flat_map(|node| self.files(&record, node).into_iter().rev()));
        }
        self.remove_files(&record, &files)?;
        let directory = &**self.home.directory();
        let list = self.vmsd_name(&record);
        let sync = || directory.sync().map_err(|error| Error::io("making removals durable", error));
        if record.vmsd {
            remove(directory, &list)?;
        }
        remove(directory, &format!("{list}{NEW_SUFFIX}"))?;
        self.remove_mark()?;
        sync()?;
        for name in [RECORD_NAME, RECORD_GONE, RECORD_NEW] {
            remove(directory, name)?;
        }
        remove(directory, LOCK_NAME)?;
        sync()
    }

    /// Acquires the right to change the image tree, and finishes a pending operation.
    pub(crate) fn begin(&self, what: &str) -> Result<Operation<'_>> {
        let operation = self.begin_over(what)?;
        self.check_not_stopped()?;
        self.show_all_stale()?;
        self.finish_pending()?;
        Ok(operation)
    }

    /// Acquires the right to change the image tree, without finishing a pending operation.
    pub(crate) fn begin_over(&self, what: &str) -> Result<Operation<'_>> {
        let operation = self.begin_alone(what)?;
        self.check_usable()?;
        Ok(operation)
    }

    /// Acquires the right to open a stopped disk again.
    pub(crate) fn begin_reopening(&self) -> Result<Operation<'_>> {
        self.begin_alone("opening it again")
    }

    fn begin_alone(&self, what: &str) -> Result<Operation<'_>> {
        self.operation.try_lock().map(Operation).ok_or_else(|| self.in_operation(what))
    }

    fn in_operation(&self, what: &str) -> Error {
        let text = format!("disk '{}': {what} has to wait until another operation is done", self.name());
        Error::new(ErrorKind::Busy, text)
    }

    /// Fails if [`Disk::begin`] would fail, or would first have to finish an interrupted operation. Acquires nothing
    /// and writes nothing, so no other operation fails because of this call.
    pub(crate) fn could_begin(&self, what: &str) -> Result<()> {
        self.could_begin_over(what)?;
        self.check_not_stopped()?;
        let state = self.state.lock();
        let cause = match &state.record.pending {
            Some(pending) => format!("an interrupted operation is finished ({})", pending.operation),
            None if !state.stale.is_empty() => "images are read again after a failed flush".to_owned(),
            None => return Ok(()),
        };
        let text = format!(
            "disk '{}': {what} has to wait until {cause}: the next snapshot, deletion or opening of the disk does that",
            state.record.name
        );
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Fails if [`Disk::begin_over`] would fail. Acquires nothing.
    pub(crate) fn could_begin_over(&self, what: &str) -> Result<()> {
        if self.operation.is_locked() {
            return Err(self.in_operation(what));
        }
        self.check_usable()
    }

    /// Fails while the disk is stopped and reopening has not succeeded.
    fn check_not_stopped(&self) -> Result<()> {
        let state = self.state.lock();
        let Some(why) = &state.stopped else { return Ok(()) };
        let text = format!("disk '{}' has stopped ({why}) and was not opened again yet", state.record.name);
        Err(Error::new(ErrorKind::Stopped, text))
    }

    pub(crate) fn check_usable(&self) -> Result<()> {
        let state = self.state.lock();
        if state.failed || state.closed {
            let why = if state.failed { "its record could not be written" } else { "it was closed" };
            let text = format!("disk '{}': {why}; open it again", state.record.name);
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        Ok(())
    }

    /// Fails if the head is read only, or if an overlay is above it.
    pub(crate) fn check_writable(&self, record: &Record, what: &str) -> Result<()> {
        if !self.options.overlay.is_empty() {
            let text = format!("disk '{}' is being imported: {what} has to wait until that is done", record.name);
            return Err(Error::new(ErrorKind::Busy, text));
        }
        if record.read_only {
            let text = format!("disk '{}' is only read: no {what}", record.name);
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        Ok(())
    }

    /// Replaces the record. If an error leaves unknown which record is durable, nothing more is written.
    pub(crate) fn commit(&self, record: Record) -> Result<()> {
        self.check_owner()?;
        let bytes = record.encode()?;
        let directory = &**self.home.directory();
        self.with_room(&record, || stored::prepare(directory, &bytes))?;
        self.committed(record, stored::replace(directory))
    }

    /// Whether the lock is still held, on the file that other processes would lock.
    pub(crate) fn is_owner(&self) -> bool {
        self.owner.holds()
    }

    /// Stops the disk if its lock is no longer held.
    fn check_owner(&self) -> Result<()> {
        if self.is_owner() {
            return Ok(());
        }
        self.state.lock().failed = true;
        if let Some(line) = &*self.head.lock() {
            line.end();
        }
        let text = format!(
            "disk '{}': its file '{LOCK_NAME}' was removed or replaced while it was open, and another process may have \
             opened it since; nothing is written any more until it is opened again",
            self.name()
        );
        Err(Error::new(ErrorKind::Stopped, text))
    }

    /// Updates the state after an attempt to replace the record.
    fn committed(&self, record: Record, outcome: std::result::Result<(), NotStored>) -> Result<()> {
        match outcome {
            Ok(()) => {
                let mut state = self.state.lock();
                state.record = record;
                state.unrecorded = false;
                Ok(())
            }
            Err(failed) => {
                if failed.uncertain {
                    self.state.lock().failed = true;
                    if let Some(line) = &*self.head.lock() {
                        // A write that is acknowledged now might be made in an image that only one of the two records
                        // names.
                        line.end();
                    }
                }
                Err(failed.error)
            }
        }
    }

    /// Makes `record` the current one although it could not be written. The durable record remains valid, and every
    /// later operation writes `record` first.
    pub(crate) fn leave_unrecorded(&self, record: Record) {
        let mut state = self.state.lock();
        if !state.failed {
            state.record = record;
            state.unrecorded = true;
        }
    }

    /// The current record.
    pub fn record(&self) -> Record {
        self.state.lock().record.clone()
    }

    /// The name of the disk.
    pub fn name(&self) -> String {
        self.state.lock().record.name.clone()
    }

    /// The UUID of the disk.
    pub fn uuid(&self) -> String {
        self.state.lock().record.uuid.clone()
    }

    /// The folder with the record.
    pub fn home(&self) -> &Folder {
        &self.home
    }

    /// The chain of the head with its images, opened if necessary.
    pub(crate) fn head_line(&self) -> Result<Arc<Line>> {
        self.check_usable()?;
        self.check_not_stopped()?;
        self.settled()?;
        let mut head = self.head.lock();
        // These conditions are checked again under the lock: another thread may have closed or stopped the disk
        // meanwhile, and then no line may be opened.
        self.check_usable()?;
        self.check_not_stopped()?;
        if let Some(line) = &*head {
            return Ok(Arc::clone(line));
        }
        let record = self.record();
        self.show_stale(None, &record.line(record.head)?)?;
        let writable = self.writes_head(&record);
        let line = self.open_line(&record, record.head, writable, &self.options.overlay);
        let line = Arc::new(line.inspect_err(|error| self.doubt_files(error))?);
        *head = Some(Arc::clone(&line));
        Ok(line)
    }

    /// Whether the images of the head are open.
    pub fn is_head_open(&self) -> bool {
        self.head.lock().is_some()
    }

    /// The chain of the head with its images, if it is open.
    pub(crate) fn open_head(&self) -> Option<Arc<Line>> {
        self.head.lock().clone()
    }

    /// Removes the head's chain from this disk, and returns it. The next caller opens a new one.
    pub(crate) fn drop_head(&self) -> Option<Arc<Line>> {
        self.head.lock().take()
    }

    /// Sets the head's chain after reopening.
    pub(crate) fn set_head(&self, line: Arc<Line>) {
        *self.head.lock() = Some(line);
    }

    /// Whether the image of the head is open for writing.
    pub(crate) fn writes_head(&self, record: &Record) -> bool {
        !record.read_only && self.options.overlay.is_empty()
    }

    /// The chain of the head. [`Disk::revert`] and [`Disk::reopen`] replace it.
    pub fn chain(&self) -> Result<Arc<Chain>> {
        Ok(Arc::clone(&self.head_line()?.chain))
    }

    /// The levels of the head's chain that snapshots name, newest first. The levels above such a level contain the
    /// changes since that snapshot.
    pub fn bases(&self) -> Result<Vec<(String, chain::LevelKey)>> {
        let line = self.head_line()?;
        let record = self.record();
        let names = record.snapshots.iter().rev();
        let keyed = names.filter_map(|snapshot| Some((snapshot.name.clone(), line.level(snapshot.node)?.key)));
        Ok(keyed.collect())
    }

    /// The level that a snapshot has now in `chain`; `None` if there is no such snapshot, or if `chain` is not the open
    /// chain of the head. A snapshot that loses its state in a merge has no level before the merge writes its first
    /// byte.
    pub fn base_in(&self, chain: &Arc<Chain>, snapshot: &str) -> Option<chain::LevelKey> {
        let line = self.open_head().filter(|line| Arc::ptr_eq(&line.chain, chain))?;
        let node = self.state.lock().record.snapshot(snapshot).ok()?.node;
        Some(line.level(node)?.key)
    }

    /// The UID of a snapshot, and when it was taken, in microseconds since 1970; `None` if there is no such snapshot.
    /// UIDs are used again only after the largest one was used.
    pub fn snapshot_identity(&self, snapshot: &str) -> Option<(u32, u64)> {
        let state = self.state.lock();
        let snapshot = state.record.snapshot(snapshot).ok()?;
        Some((snapshot.uid, snapshot.created))
    }

    /// The chain of a snapshot, for reading. While the caller holds it, none of its images is merged.
    pub fn snapshot_chain(&self, name: &str) -> Result<Arc<Chain>> {
        self.check_usable()?;
        self.settled()?;
        // The lock is held while the images are opened, so that no merge of these images begins in that time.
        let head = self.head.lock();
        let record = self.record();
        let node = record.snapshot(name)?.node;
        let nodes = record.line(node)?;
        if self.state.lock().changing.iter().any(|node| nodes.contains(node)) {
            let text = format!("snapshot '{name}' of '{}' is being merged; try again when that is done", record.name);
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.are_flushed(head.as_deref(), &nodes).map_err(|error| error.context(format!("snapshot '{name}'")))?;
        self.show_stale(head.as_deref(), &nodes)?;
        let line = self.open_line(&record, node, false, &[])?;
        let chain = line.chain;
        let mut state = self.state.lock();
        state.issued.retain(|issued| issued.chain.strong_count() > 0);
        state.issued.push(Issued { chain: Arc::downgrade(&chain), nodes });
        Ok(chain)
    }

    /// Makes sure that the files of a snapshot have its content. They may lack a part of it if the flush of the
    /// snapshot has failed: the image is then still open for writing, below the top of the head's chain.
    ///
    /// # Errors
    /// The flush fails again, or the chain has stopped: the files have older content.
    pub(crate) fn are_flushed(&self, head: Option<&Line>, nodes: &[u32]) -> Result<()> {
        let Some(line) = head else { return Ok(()) };
        let is_unflushed = |node: &u32| line.level(*node).is_some_and(|level| level.is_writing());
        if nodes.iter().any(is_unflushed) { line.chain.flush() } else { Ok(()) }
    }

    /// Claims images for an operation that writes them, so that no chain of a snapshot with one of them is opened
    /// meanwhile.
    ///
    /// # Errors
    /// `Busy` while a caller holds a snapshot's chain that contains one of them.
    pub(crate) fn claim(&self, nodes: &[u32]) -> Result<Claim<'_>> {
        let _head = self.head.lock();
        let mut state = self.state.lock();
        state.issued.retain(|issued| issued.chain.strong_count() > 0);
        if state.issued.iter().any(|issued| issued.nodes.iter().any(|node| nodes.contains(node))) {
            let text = format!("disk '{}': an open snapshot depends on the image to be merged", state.record.name);
            return Err(Error::new(ErrorKind::Busy, text));
        }
        state.changing = nodes.to_vec();
        Ok(Claim(self))
    }

    /// Changes the name of the disk. The names of its files stay the same.
    pub fn rename(&self, name: &str) -> Result<()> {
        self.noting(|| {
            check_name("disk", name)?;
            let _operation = self.begin("renaming")?;
            let mut record = self.record();
            record.name = name.to_owned();
            self.commit(record)
        })
    }

    /// Records the overlay above the head, on behalf of the caller that placed it there.
    pub fn set_overlay(&self, overlay: Option<String>) -> Result<()> {
        self.noting(|| {
            let _operation = self.begin("noting the overlay")?;
            let mut record = self.record();
            record.overlay = overlay;
            self.commit(record)
        })
    }

    /// Flushes and closes the disk. Later changes fail. If a flush fails for lack of space, the disk stays open, and
    /// can be closed later.
    pub fn close(&self) -> Result<()> {
        let Some(_operation) = self.operation.try_lock() else {
            let text = format!("disk '{}' cannot be closed while an operation is under way", self.name());
            return Err(Error::new(ErrorKind::Busy, text));
        };
        let unrecorded = self.state.lock().unrecorded;
        if unrecorded && let Err(error) = self.noting(|| self.finish_pending()) {
            tracing::warn!(%error, disk = self.name(), "a failed snapshot is not undone, and its name stays");
        }
        let mut head = self.head.lock();
        if let Some(line) = &*head {
            let closed = line.chain.close();
            if closed.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace) {
                return closed;
            }
            self.state.lock().closed = true;
            if closed.is_ok() {
                self.mark_closed(Some(line));
            }
            *head = None;
            return closed;
        }
        if !std::mem::replace(&mut self.state.lock().closed, true) {
            self.mark_closed(None);
        }
        Ok(())
    }

    /// Deletes the disk: its record and the files that it created. Needs no free space, whatever operation was pending.
    ///
    /// # Errors
    /// `Busy` while linked clones depend on it.
    pub fn delete(self: Arc<Self>) -> Result<()> {
        self.give_up()?;
        self.remove()
    }

    /// The first step of a deletion, which makes it certain: the next opening of the folder would finish it.
    ///
    /// # Errors
    /// As [`Disk::delete`]. The disk stays unless its record [is going](Record::is_going).
    pub fn give_up(&self) -> Result<()> {
        self.noting(|| {
            let _operation = self.begin_over("deleting")?;
            let mut record = self.record();
            let clones: Vec<&str> = self.live_clones(&record).map(|clone| clone.name.as_str()).collect();
            if !clones.is_empty() {
                let text = format!(
                    "disk '{}' cannot be deleted: linked clones depend on it: {}",
                    record.name,
                    clones.join(", ")
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
            match self.carry_out(&mut record) {
                // Such a failure does not matter: the files of the pending operation are removed with the disk. But
                // adopted images are kept, so their descriptors have to be corrected first.
                Err(error)
                    if matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Io | ErrorKind::Corrupt)
                        && !record.has_adopted() => {}
                other => other?,
            }
            record.pending.get_or_insert_with(|| Pending::new("delete")).fate = Some(Fate::Deleting);
            let line = self.drop_head();
            let committed = self.committed(record, stored::give_up(&**self.home.directory()));
            self.state.lock().closed = committed.is_ok();
            // Writes that cannot be flushed are dropped with the disk: a failed flush must not prevent its removal.
            let failed = line.and_then(|line| self.close_dropped_head(&line));
            committed.inspect_err(|_| self.stay_stopped(failed))
        })
    }

    /// The second step of a deletion: removes the files, and the record last.
    pub fn remove(&self) -> Result<()> {
        self.noting(|| self.forget())
    }

    /// The record of the disk in a folder, which is not opened.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn recorded(home: &Folder) -> Result<Record> {
        stored::load(&**home.directory())
    }
}

/// Images claimed by an operation, until this value is dropped.
pub(crate) struct Claim<'a>(&'a Disk);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.state.lock().changing.clear();
    }
}
