//! Room that a datastore keeps back for what a server needs to start on a full file system: the names of its sockets,
//! which on XFS want new inodes. It lies in a file that means nothing, and is given up while the sockets are made.

use backend::{Directory, IoMode};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file, in the datastore's folder.
const FILE: &str = "spare";
/// What is kept back (1 MiB): inodes of XFS come in pieces of 32 KiB, which want to lie in one.
const ROOM: u64 = 1 << 20;
/// The least that is worth keeping.
const ROOM_MIN: u64 = 64 << 10;

/// The room of one datastore. For its owner.
pub struct Spare {
    path: PathBuf,
    directory: Arc<dyn Directory>,
}

impl Spare {
    /// Of the datastore in a folder.
    pub fn of(datastore: &Path, directory: Arc<dyn Directory>) -> Self {
        Self { path: datastore.join(FILE), directory }
    }

    /// Releases the reserved space if the file system has less than that available.
    pub fn give_up_if_full(&self) {
        if self.directory.room().is_ok_and(|room| room.available < ROOM) && self.directory.remove(FILE).is_ok() {
            tracing::warn!(path = %self.path.display(), "the file system is full: reserved space is used");
        }
    }

    /// Takes the room, or what there is of it. Without any the next server may not start on a full file system.
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
                    // Returns what a reservation that failed half way has allocated.
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
    fn room_is_taken_once_and_given_up_where_there_is_no_other() {
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
