//! Deletions of disks whose content arrives from a source outside the datastore.
//!
//! 1. The source is released before the record that names it is removed: after a kill in between, nothing else knows
//!    the source.
//! 2. A source may not answer for minutes. So it is released without any lock, and never in an opening: the opening
//!    leaves the folder ([`Foreign::take_unreleased`]), and the process that serves the datastore completes the
//!    deletion.

use super::{Folder, Foreign};
use crate::migrate::Overlay;
use error::Result;

/// Releases the source of a disk that was given up, if it has one.
///
/// # Errors
/// `Unsupported` if this process does not know the kind of source. The record must stay then.
pub(crate) fn release(record: &vmdk::Record) -> Result<()> {
    // Without a readable description there is nothing to release.
    match Overlay::of(record) {
        Ok(Some(overlay)) => overlay.release(&record.name),
        _ => Ok(()),
    }
}

/// Whether the record of a disk that is removed names a source.
fn names_source(record: &vmdk::Record) -> bool {
    Overlay::of(record).is_ok_and(|overlay| overlay.is_some_and(|overlay| overlay.source().is_some()))
}

impl Foreign {
    /// Removes the files of a disk that was given up, and its folder.
    pub(super) fn remove_given_up(&self, folder: &str, disk: &vmdk::Disk) -> Result<()> {
        release(&disk.record())?;
        disk.remove()?;
        self.remove_folder(folder)
    }

    /// Notes a folder whose disk is removed once its source is released; false if nothing has to be released before.
    pub(super) fn leave_unreleased(&self, folder: &str, home: &Folder, incomplete: bool) -> bool {
        let Ok(record) = vmdk::Disk::recorded(home) else { return false };
        let left = (incomplete || record.is_going()) && names_source(&record);
        if left {
            self.unreleased.lock().push((folder.to_owned(), record));
        }
        left
    }

    /// The folders that the opening has left because of their sources, with the records of their disks. A second call
    /// returns none of them.
    pub fn take_unreleased(&self) -> Vec<(String, vmdk::Record)> {
        std::mem::take(&mut *self.unreleased.lock())
    }
}
