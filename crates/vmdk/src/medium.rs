//! Reads of a disk's files return what the storage device holds.
//!
//! After a failed flush the page cache may hold data that was never written, until the kernel needs the memory. A disk
//! that relied on it would read older data some time later.
//!
//! 1. The file [`CLOSED_NAME`] means that the last owner closed the disk, and that no flush of it can have failed.
//!    Opening the disk removes this mark; closing the disk without a failure creates it. If it is missing, every file
//!    of the disk is flushed and evicted from the page cache before it is read.
//! 2. Changes of the mark are not flushed: a power cut that reverts one empties the page cache, too. The mark costs no
//!    flush, and a disk can be closed without it on a full file system: then the next opening takes longer.
//! 3. An error that may come from the device makes the disk doubtful ([`Disk::noting`]): closing it leaves no mark. A
//!    failure in the head's chain is kept there until the chain is closed ([`Disk::close_dropped_head`]).

use crate::disk::Disk;
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

/// Makes the names of a folder durable.
pub(crate) fn sync_folder(folder: &Folder, of: &str) -> Result<()> {
    folder.directory().sync().map_err(|error| {
        let text = format!("the folder of '{of}' still cannot be flushed; mend the medium first");
        Error::io(text, error)
    })
}

/// The meaning of a failed flush.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failing {
    /// It may report a failure of an earlier process, whose lost writes do not matter any more; a second flush decides.
    Before,
    /// The device still fails.
    Now,
}

/// Flushes a file, and evicts it from the page cache, so that reads come from the device.
fn show(file: &dyn File, place: &Place, failing: Failing) -> Result<()> {
    let synced = match file.sync() {
        Err(_) if failing == Failing::Before => file.sync(),
        synced => synced,
    };
    synced.and_then(|()| file.forget_cached()).map_err(|error| {
        let text = format!("'{}' still cannot be flushed; mend the medium first", place.label());
        Error::io(text, error)
    })
}

impl Disk {
    /// Flushes the files of the disk's own images, and evicts them from the page cache.
    pub(crate) fn show_media(&self, record: &Record, failing: Failing, open: Opener<'_>) -> Result<()> {
        let show = |node: &Node, place: &Place| match open(node, place)? {
            Some(file) => show(&*file, place, failing),
            None => Ok(()),
        };
        for node in record.nodes.iter().filter(|node| node.is_own()) {
            let folder = match self.folder(record, node.folder.as_deref()) {
                // Reported when the chain is opened.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                folder => folder?,
            };
            sync_folder(&folder, &node.descriptor)?;
            // The descriptor is first, because it names the other files.
            show(node, &Place { folder, name: node.descriptor.clone() })?;
            for file in self.files(record, node).into_iter().filter(|file| file.name != node.descriptor) {
                show(node, &Place { folder: self.folder(record, file.folder.as_deref())?, name: file.name })?;
            }
        }
        Ok(())
    }

    /// Called when the disk is opened without a mark. If the device still fails, the disk is stopped.
    pub(crate) fn show_found(&self) {
        let record = self.record();
        let open = |_: &Node, place: &Place| match place.open(IoMode::Buffered, Access::Read) {
            // Reported when the chain is opened.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        };
        let shown = self.show_media(&record, Failing::Before, &open);
        if let Err(error) = shown {
            tracing::error!(%error, disk = record.name, "the disk takes no writes until it is opened again");
            self.state.lock().stopped = Some(error.to_string());
        }
    }

    /// Runs work that may fail on I/O, and notes such failures.
    pub(crate) fn noting<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        work().inspect_err(|error| self.doubt(error))
    }

    /// Notes an error after which the page cache may differ from the device.
    pub(crate) fn doubt(&self, error: &Error) {
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::Exists | ErrorKind::Invalid | ErrorKind::Busy => {}
            ErrorKind::ReadOnly | ErrorKind::Unsupported | ErrorKind::Interrupted => {}
            ErrorKind::NoSpace | ErrorKind::Corrupt | ErrorKind::Io | ErrorKind::Stopped => {
                self.state.lock().doubtful = true;
            }
        }
    }

    /// Closes the head's chain after it was taken out of the disk, with a flush if possible. Returns its failure, if
    /// any.
    pub(crate) fn close_dropped_head(&self, line: &Line) -> Option<Failed> {
        let _ = line.chain.close();
        let why = line.chain.failure()?;
        self.state.lock().doubtful = true;
        Some(Failed { why, lost: line.chain.abandon() })
    }

    /// For a chain that was closed and is still the head's: its failure keeps the head from being opened.
    pub(crate) fn stay_stopped(&self, failed: Option<Failed>) {
        let Some(failed) = failed else { return };
        let mut state = self.state.lock();
        state.lost |= failed.lost;
        state.stopped.get_or_insert(failed.why);
    }

    /// Creates the mark if no flush can have failed. To be called after the last write.
    pub(crate) fn mark_closed(&self, line: Option<&Line>) {
        let failed = line.is_some_and(|line| line.chain.failure().is_some());
        let state = self.state.lock();
        let trusted = !failed && !state.doubtful && !state.failed && state.stopped.is_none();
        drop(state);
        if trusted && self.is_owner() {
            // Without the mark, the next opening only does a flush that was not needed.
            let _ = self.home.directory().create(CLOSED_NAME, IoMode::Buffered);
        }
    }

    /// Removes the mark of a disk that is being deleted.
    pub(crate) fn remove_mark(&self) -> Result<()> {
        remove(&**self.home.directory(), CLOSED_NAME)
    }
}
