//! Room that a datastore keeps back for what its owner has to do on a full file system and what wants room there: the
//! sockets of a server, for which XFS takes new inodes, and the names that deleting a disk needs. It lies in a file
//! that means nothing, and is given up meanwhile.

use backend::{Directory, IoMode};
use std::io;
use std::sync::Arc;

/// The file, in the datastore's folder.
const FILE: &str = "spare";
/// Reserved bytes (1 MiB): XFS allocates inodes in chunks of 32 KiB, which must be contiguous.
const ROOM: u64 = 1 << 20;
/// Least number of bytes worth reserving.
const ROOM_MIN: u64 = 64 << 10;

/// The reserved space of a datastore, for use by its owner.
pub struct Spare {
    directory: Arc<dyn Directory>,
}

impl Spare {
    /// Of the datastore in a folder.
    pub(crate) fn of(directory: Arc<dyn Directory>) -> Self {
        Self { directory }
    }

    /// Releases the reserved space; false if there is none.
    pub fn give_up(&self) -> bool {
        let given = self.directory.remove(FILE).is_ok();
        if given {
            tracing::warn!("the file system is full: the space that the datastore keeps back is used");
        }
        given
    }

    /// Releases the reserved space if the file system has less than that available.
    pub fn give_up_if_full(&self) {
        if self.directory.room().is_ok_and(|room| room.available < ROOM) {
            self.give_up();
        }
    }

    /// Reserves the space, or as much of it as available. Without any, the next server may fail to start on a full file
    /// system.
    pub fn keep(&self) {
        match self.take() {
            Ok(room) if room >= ROOM_MIN => {}
            Ok(_) => tracing::warn!("no space can be kept back for a full file system: it is full"),
            Err(error) => tracing::warn!(%error, "no space can be kept back for a full file system"),
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
        let (spare, path) = (Spare::of(Arc::new(directory)), folder.path().join(FILE));
        spare.keep();
        spare.keep();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), ROOM);
        spare.give_up_if_full();
        assert_eq!(path.exists(), spare.directory.room().unwrap().available >= ROOM);
    }
}
