//! Reserved space that a server needs to start on a full file system: its sockets need directory entries, and on XFS
//! new inodes. The space is held by a file without content of its own, which is deleted while the sockets are created.

use backend::{Directory, IoMode};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file, in the datastore's folder.
const FILE: &str = "spare";
/// Reserved bytes (1 MiB): XFS allocates inodes in chunks of 32 KiB, which must be contiguous.
const ROOM: u64 = 1 << 20;
/// Least number of bytes worth reserving.
const ROOM_MIN: u64 = 64 << 10;

/// The reserved space of a datastore, for use by its owner.
pub struct Spare {
    path: PathBuf,
    directory: Arc<dyn Directory>,
}

impl Spare {
    /// The reserved space of the datastore in a folder.
    pub fn of(datastore: &Path, directory: Arc<dyn Directory>) -> Self {
        Self { path: datastore.join(FILE), directory }
    }

    /// Releases the reserved space if the file system has less than that available.
    pub fn give_up_if_full(&self) {
        if self.directory.room().is_ok_and(|room| room.available < ROOM) && self.directory.remove(FILE).is_ok() {
            tracing::warn!(path = %self.path.display(), "the file system is full: reserved space is used");
        }
    }

    /// Reserves the space, or as much of it as available. Without any, the next server may fail to start on a full file
    /// system.
    pub fn keep(&self) {
        match self.take() {
            Ok(room) if room >= ROOM_MIN => {}
            Ok(_) => tracing::warn!(path = %self.path.display(), "no space can be reserved: the file system is full"),
            Err(error) => tracing::warn!(path = %self.path.display(), %error, "no space can be reserved"),
        }
    }

    fn take(&self) -> io::Result<u64> {
        let file = match self.directory.open(FILE, IoMode::Buffered) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.directory.create(FILE, IoMode::Buffered)?,
            opened => opened?,
        };
        let mut room = file.len()?.min(ROOM);
        let mut more = ROOM;
        while room < ROOM && more >= ROOM_MIN {
            let by = more.min(ROOM - room);
            match file.reserve(room, by) {
                Ok(()) => room += by,
                Err(error) => {
                    // Frees what a failed reservation has allocated.
                    let _ = file.set_len(room);
                    if !error::lacks_space(&error) {
                        return Err(error);
                    }
                    more /= 2;
                }
            }
        }
        Ok(room)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use backend::local::{LocalDirectory, LocalQueues};

    #[test]
    fn space_is_reserved_once_and_released_on_a_full_file_system() {
        let folder = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
        let spare = Spare::of(folder.path(), Arc::new(directory));
        spare.keep();
        spare.keep();
        assert_eq!(std::fs::metadata(&spare.path).unwrap().len(), ROOM);
        spare.give_up_if_full();
        assert_eq!(spare.path.exists(), spare.directory.room().unwrap().available >= ROOM);
    }
}
