//! Reads of a disk's files return what the storage device holds.
//!
//! After a failed flush the page cache may contain data that was never written to the device, until the kernel evicts
//! it. A disk that relied on the page cache would read older data after the kernel has evicted it.
//!
//! 1. The file [`CLOSED_NAME`] means that the last owner closed the disk, and that no flush of it can have failed.
//!    Opening the disk removes this mark; closing the disk without a failure creates it. If it is missing, every file
//!    of the disk's own images is flushed and evicted from the page cache before it is read.
//! 2. Changes of the mark are not flushed: a power cut that reverts such a change also empties the page cache. The mark
//!    costs no flush, and a disk can be closed without it on a full file system: then the next opening takes longer.
//! 3. An error that may come from the device makes the disk doubtful ([`Disk::noting`]): closing the disk then creates
//!    no mark. A failure in the head's chain is recorded in the chain until it is closed
//!    ([`Disk::close_dropped_head`]).
//! 4. After a failed write to an image, the process flushes the image's files and evicts them from the page cache
//!    before it opens the image again ([`Disk::show_stale`]).

use crate::disk::{Disk, DiskState};
use crate::images::remove;
use crate::line::Line;
use crate::record::{Node, Record};
use crate::{Error, ErrorKind, Result};
use backend::{Access, Directory, File, IoMode};
use layer::image::{Folder, Place};
use std::sync::Arc;

/// Marks a disk that was closed without a failure.
pub(crate) const CLOSED_NAME: &str = "lamina.closed";

/// Opens a file of an image; `None` skips it.
type Opener<'a> = &'a dyn Fn(&Node, &Place) -> Result<Option<Arc<dyn File>>>;

/// The failure of a chain.
pub(crate) struct Failed {
    why: String,
    /// Whether anything was changed since the last successful flush.
    lost: bool,
}

/// Removes the mark of a clean close before anything is read; returns whether there was one.
pub(crate) fn take_mark(directory: &dyn Directory) -> Result<bool> {
    match directory.remove(CLOSED_NAME) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io(format!("removing '{CLOSED_NAME}'"), error)),
    }
}

/// Makes the names of the files in a folder durable.
pub(crate) fn sync_folder(folder: &Folder, of: &str) -> Result<()> {
    folder.directory().sync().map_err(|error| {
        let text = format!(
            "the folder of '{of}' still cannot be flushed; mend the medium first, or read the disk with 'lamina salvage'"
        );
        Error::io(text, error)
    })
}

/// What a failed flush means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failing {
    /// The error may belong to writes of an earlier process, and the loss of these no longer matters. So the flush is
    /// tried again.
    Before,
    /// The error shows that the device fails now.
    Now,
}

/// Opens a file for a flush; `None` if it is missing, which is reported when the chain is opened.
fn open_found(_: &Node, place: &Place) -> Result<Option<Arc<dyn File>>> {
    match place.open(IoMode::Buffered, Access::Read) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Flushes a file, and evicts it from the page cache, so that reads come from the device.
fn show(file: &dyn File, place: &Place, failing: Failing) -> Result<()> {
    let synced = match file.sync() {
        Err(_) if failing == Failing::Before => file.sync(),
        synced => synced,
    };
    synced.and_then(|()| file.forget_cached()).map_err(|error| {
        let text = format!(
            "'{}' still cannot be flushed; mend the medium first, or read the disk with 'lamina salvage'",
            place.label()
        );
        Error::io(text, error)
    })
}

impl Disk {
    /// Flushes the files of those images in `nodes` that are the disk's own, and evicts them from the page cache.
    pub(crate) fn show_media<'a>(
        &self,
        record: &Record,
        nodes: impl Iterator<Item = &'a Node>,
        failing: Failing,
        open: Opener<'_>,
    ) -> Result<()> {
        let show = |node: &Node, place: &Place| match open(node, place)? {
            Some(file) => show(&*file, place, failing),
            None => Ok(()),
        };
        for node in nodes.filter(|node| node.is_own()) {
            let folder = match self.folder(record, node.folder.as_deref()) {
                // A missing folder is reported when the chain is opened.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                folder => folder?,
            };
            sync_folder(&folder, &node.descriptor)?;
            // The descriptor is the first file, because it names the other files.
            show(node, &Place { folder, name: node.descriptor.clone() })?;
            for file in self.files(record, node).into_iter().filter(|file| file.name != node.descriptor) {
                show(node, &Place { folder: self.folder(record, file.folder.as_deref())?, name: file.name })?;
            }
        }
        Ok(())
    }

    /// Called when the disk is opened without a mark. If a flush fails, the disk is stopped.
    pub(crate) fn show_found(&self) {
        let record = self.record();
        let shown = self.show_media(&record, record.nodes.iter(), Failing::Before, &open_found);
        if let Err(error) = shown {
            tracing::error!(%error, disk = record.name, "the disk takes no writes until it is opened again");
            self.mistrust();
            self.state.lock().stopped = Some(error.to_string());
        }
    }

    /// Flushes the files of images that an operation failed to write, or that a stopped chain wrote, and evicts them
    /// from the page cache. Called before images are opened, and before an operation relies on their files. No other
    /// code may write these files meanwhile. `head` is the head's line, if it is open: images that the line has open
    /// for writing are skipped, unless its chain has stopped.
    ///
    /// # Errors
    /// The device still fails; then nothing may be read.
    pub(crate) fn show_stale(&self, head: Option<&Line>, nodes: &[u32]) -> Result<()> {
        let has_stopped = head.is_some_and(|line| line.chain.failure().is_some());
        let (record, stale) = {
            let state = self.state.lock();
            if state.stale.is_empty() && !has_stopped {
                return Ok(());
            }
            (state.record.clone(), state.stale.clone())
        };
        let is_stale = |node: &&Node| match head.and_then(|line| line.level(node.id)) {
            Some(level) => has_stopped || !level.is_writing() && stale.contains(&node.id),
            None => stale.contains(&node.id),
        };
        let shown: Vec<&Node> = record.nodes.iter().filter(|node| nodes.contains(&node.id)).filter(is_stale).collect();
        self.show_media(&record, shown.iter().copied(), Failing::Before, &open_found)?;
        let mut state = self.state.lock();
        shown.iter().for_each(|node| _ = state.stale.remove(&node.id));
        Ok(())
    }

    /// Makes reads of every image return data of the device. The caller holds the right to change the tree.
    pub(crate) fn show_all_stale(&self) -> Result<()> {
        let nodes: Vec<u32> = self.record().nodes.iter().map(|node| node.id).collect();
        self.show_stale(self.open_head().as_deref(), &nodes)
    }

    /// Runs work that may fail on I/O, and notes such failures.
    pub(crate) fn noting<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        work().inspect_err(|error| self.doubt(error))
    }

    /// Notes an error after which the page cache may differ from the device. Stops the head's chain if an image in it
    /// has stopped.
    pub(crate) fn doubt(&self, error: &Error) {
        self.doubt_files(error);
        if let Some(line) = self.open_head()
            && line.levels().iter().any(|level| level.image.layer().has_stopped())
        {
            line.chain.stop(error);
        }
    }

    /// As [`Self::doubt`], when no image of the head is open, so that no chain has to be stopped.
    pub(crate) fn doubt_files(&self, error: &Error) {
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::Exists | ErrorKind::Invalid | ErrorKind::Busy => {}
            ErrorKind::ReadOnly | ErrorKind::Unsupported | ErrorKind::Interrupted | ErrorKind::WrongState => {}
            ErrorKind::NoSpace | ErrorKind::Corrupt => self.state.lock().doubtful = true,
            ErrorKind::Io | ErrorKind::Stopped => {
                self.state.lock().doubtful = true;
                self.mistrust();
            }
        }
    }

    /// Notes that the page cache may differ from the device for every image.
    pub(crate) fn mistrust(&self) {
        let DiskState { record, stale, .. } = &mut *self.state.lock();
        stale.extend(record.nodes.iter().map(|node| node.id));
    }

    /// Closes a chain that was the head's and was removed from the disk, with a flush if possible. Returns the chain's
    /// failure, if any.
    pub(crate) fn close_dropped_head(&self, line: &Line) -> Option<Failed> {
        line.end();
        let why = line.chain.failure()?;
        let mut state = self.state.lock();
        state.doubtful = true;
        state.stale.extend(line.levels().iter().map(|level| level.node));
        drop(state);
        Some(Failed { why, lost: line.chain.abandon() })
    }

    /// Called if a chain was closed and its images still are the head: after a failure of the chain, the head cannot be
    /// opened.
    pub(crate) fn stay_stopped(&self, failed: Option<Failed>) {
        let Some(failed) = failed else { return };
        let mut state = self.state.lock();
        state.lost |= failed.lost;
        state.stopped.get_or_insert(failed.why);
    }

    /// Creates the mark of a clean close, if no flush can have failed. Called after the last write.
    pub(crate) fn mark_closed(&self, line: Option<&Line>) {
        let failed = line.is_some_and(|line| line.chain.failure().is_some());
        let state = self.state.lock();
        let trusted = !failed && !state.doubtful && !state.failed && state.stopped.is_none();
        drop(state);
        if trusted && self.is_owner() {
            // If the mark cannot be created, the next opening only makes an unnecessary flush.
            let _ = self.home.directory().create(CLOSED_NAME, IoMode::Buffered);
        }
    }

    /// Removes the mark of a disk that is being deleted.
    pub(crate) fn remove_mark(&self) -> Result<()> {
        remove(&**self.home.directory(), CLOSED_NAME)
    }
}
