//! The locks of the process that has a disk open.

use crate::{Error, ErrorKind, Result};
use backend::Lock;
use layer::image::Folder;

/// The file whose lock the owner of a disk holds.
pub(crate) const LOCK_NAME: &str = "lamina.lock";

/// What the owner of a folder has locked: the file that every version locks, and the folder itself where the file
/// system does that, so that a file removed or replaced lets no second owner in.
pub(crate) struct Owner {
    file: Box<dyn Lock>,
    _folder: Option<Box<dyn Lock>>,
}

impl Owner {
    /// Locks a folder: `Busy` when another owner has.
    pub fn lock(home: &Folder) -> Result<Self> {
        let directory = home.directory();
        let both = directory.lock(LOCK_NAME).and_then(|file| Ok(Self { file, _folder: directory.lock_folder()? }));
        both.map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => Error::new(ErrorKind::Busy, "the disk of this folder is open elsewhere"),
            _ => Error::io("locking the disk's folder", error),
        })
    }

    /// Whether the lock is still what others would lock.
    pub fn holds(&self) -> bool {
        // A look that fails says nothing: the lock is held all the same.
        self.file.loss().map_or(true, |lost| lost.is_none())
    }
}

/// Whether no process has the disk of a folder open.
pub(crate) fn lock_is_free(home: &Folder) -> bool {
    home.directory().lock(LOCK_NAME).is_ok()
}
