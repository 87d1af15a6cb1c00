//! The locks of the process that has a disk open.

use crate::{Error, ErrorKind, Result};
use backend::Lock;
use layer::image::Folder;

/// The file that the owner of a disk has locked.
pub(crate) const LOCK_NAME: &str = "lamina.lock";

/// The locks on a disk's folder: on the file that every version of lamina locks, and on the folder itself, if the file
/// system supports that. The lock on the folder excludes other owners even if the file is removed or replaced.
pub(crate) struct Owner {
    file: Box<dyn Lock>,
    _folder: Option<Box<dyn Lock>>,
}

impl Owner {
    /// Locks a folder: `Busy` when another owner holds the lock.
    pub fn lock(home: &Folder) -> Result<Self> {
        let directory = home.directory();
        let both = directory.lock(LOCK_NAME).and_then(|file| Ok(Self { file, _folder: directory.lock_folder()? }));
        both.map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Error::new(ErrorKind::Busy, "the disk of this folder is open elsewhere"),
            _ => Error::io("locking the disk's folder", error),
        })
    }

    /// Whether the lock is still held: other processes would lock the same file.
    pub fn holds(&self) -> bool {
        // If the check itself fails, the lock counts as held.
        self.file.loss().map_or(true, |lost| lost.is_none())
    }
}

/// Whether no process has the disk of a folder open.
pub(crate) fn lock_is_free(home: &Folder) -> bool {
    home.directory().lock(LOCK_NAME).is_ok()
}
