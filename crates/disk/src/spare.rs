//! Space that a datastore reserves for actions of its owner that need space on a full file system: for the sockets of a
//! server, for which XFS allocates inodes, and for the names that the deletion of a disk needs. The space is allocated
//! to a file without content, which is removed to release the space.

use backend::local::HeldSpace;
use backend::{Directory, File, IoMode};
use error::{ErrorKind, Result};
use std::io;
use std::sync::Arc;

/// The file that reserves the space, in the datastore's folder.
const FILE: &str = "spare";
/// Prefix of the file names that are created and removed to test whether there is space for names.
const PROBE: &str = "spare.lamina-new";
const PROBE_RENAMED: &str = "spare.lamina-old";
/// Bytes to reserve (1 MiB): XFS allocates inodes in pieces of 32 KiB, each of which must be contiguous.
const ROOM: u64 = 1 << 20;
/// Number of files of kept space that are removed in addition to those whose space the names need.
const STEPS_MORE: usize = 4;
/// The smallest reservation that is useful.
const ROOM_MIN: u64 = 64 << 10;
/// Bytes of the reservation that are released first for work that needs little space (128 KiB).
const LENT: u64 = 128 << 10;

/// The reserved space of a datastore, for use by its owner.
pub struct Spare {
    directory: Arc<dyn Directory>,
}

impl Spare {
    /// The reserved space of the datastore in a folder.
    pub(crate) fn of(directory: Arc<dyn Directory>) -> Self {
        Self { directory }
    }

    /// Releases the reserved space; false if there is none.
    pub fn give_up(&self) -> bool {
        let given = self.directory.remove(FILE).is_ok();
        if given {
            tracing::warn!("the file system is full: reserved space is used");
        }
        given
    }

    /// Runs work that needs little space. If there is none, releases a part of the reserved space and repeats the work,
    /// then does the same with all of it, and reserves space again. The part comes first, because writes of disks that
    /// wait for space take what is released meanwhile.
    pub(crate) fn lend<T>(&self, work: impl Fn() -> Result<T>) -> Result<T> {
        let lacks_space = |outcome: &Result<T>| outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoSpace);
        let mut outcome = work();
        if !lacks_space(&outcome) {
            return outcome;
        }
        let mut given_up = self.give_up_part();
        if given_up {
            outcome = work();
        }
        if lacks_space(&outcome) && self.give_up() {
            given_up = true;
            outcome = work();
        }
        if given_up {
            self.keep();
        }
        outcome
    }

    /// Releases a part of the reserved space; false if there is no more than that part.
    fn give_up_part(&self) -> bool {
        let given = self.directory.open(FILE, IoMode::Buffered).and_then(|file| {
            let left = file.len()?.saturating_sub(LENT);
            if left > 0 {
                file.set_len(left)?;
            }
            Ok(left > 0)
        });
        let given = given.unwrap_or(false);
        if given {
            tracing::warn!("the file system is full: a part of the reserved space is used");
        }
        given
    }

    /// If the file system or its quota has less available space than the reservation, releases it. Then removes files
    /// of the kept space until there is space for names.
    pub fn give_up_if_full(&self, held: Option<&HeldSpace<'_>>) {
        let mut given_up = self.is_full() && self.directory.remove(FILE).is_ok();
        let mut steps = 0;
        if let Some(held) = held {
            while !self.takes_names() && held.give_up() {
                (given_up, steps) = (true, steps + 1);
            }
            if given_up {
                // More files are removed than needed, because overwrites by other threads occupy some of the space for
                // a short time.
                steps += (0..STEPS_MORE).take_while(|_| held.give_up()).count();
            }
        }
        if given_up {
            tracing::warn!(steps, "the file system or its quota is full: reserved space is used");
        }
    }

    /// Whether there is space for the names of sockets. The test renames a file, because a rename needs more space than
    /// a new name.
    fn takes_names(&self) -> bool {
        let made = self.directory.create(PROBE, IoMode::Buffered).map(drop);
        let made = made.and_then(|()| self.directory.rename(PROBE, PROBE_RENAMED));
        for name in [PROBE, PROBE_RENAMED] {
            let _ = self.directory.remove(name);
        }
        !made.is_err_and(|error| error::lacks_space(&error))
    }

    /// Whether there is too little space. The free space of the file system does not show the limit of a quota, so the
    /// test allocates a small range and frees it again.
    fn is_full(&self) -> bool {
        if self.directory.room().is_ok_and(|room| room.available < ROOM) {
            return true;
        }
        let reserve = || {
            let file = self.open()?;
            let length = file.len()?;
            let reserved = file.reserve(length, ROOM_MIN);
            let _ = file.set_len(length);
            reserved
        };
        reserve().is_err_and(|error| error::lacks_space(&error))
    }

    /// Reserves the space, or as much of it as is available. Without a reservation, the next server may fail to start
    /// on a full file system.
    pub fn keep(&self) {
        match self.take() {
            Ok(room) if room >= ROOM_MIN => {}
            Ok(_) => tracing::warn!("no space can be reserved: the file system is full"),
            Err(error) => tracing::warn!(%error, "no space can be reserved"),
        }
    }

    fn open(&self) -> io::Result<Arc<dyn File>> {
        match self.directory.open(FILE, IoMode::Buffered) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.directory.create(FILE, IoMode::Buffered),
            opened => opened,
        }
    }

    fn take(&self) -> io::Result<u64> {
        let file = self.open()?;
        let mut room = file.len()?.min(ROOM);
        let mut more = ROOM;
        while room < ROOM && more >= ROOM_MIN {
            let by = more.min(ROOM - room);
            match file.reserve(room, by) {
                Ok(()) => room += by,
                Err(error) => {
                    // Frees the space that a failed reservation has allocated.
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
        spare.give_up_if_full(None);
        assert_eq!(path.exists(), spare.directory.room().unwrap().available >= ROOM);
    }

    #[test]
    fn work_that_lacks_space_gets_a_part_of_the_reserved_space_and_then_all_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
        let (spare, path) = (Spare::of(Arc::new(directory)), folder.path().join(FILE));
        let reserved = || std::fs::metadata(&path).map_or(0, |file| file.len());
        for enough in [ROOM, ROOM - LENT, 0] {
            spare.keep();
            let seen = std::cell::RefCell::new(Vec::new());
            let work = || {
                seen.borrow_mut().push(reserved());
                let lacks = reserved() > enough;
                if lacks { Err(error::Error::new(ErrorKind::NoSpace, "full")) } else { Ok(()) }
            };
            spare.lend(work).unwrap();
            let steps = [ROOM, ROOM - LENT, 0].into_iter().take_while(|left| *left > enough).chain([enough]);
            assert_eq!(seen.into_inner(), steps.collect::<Vec<_>>());
            assert_eq!(reserved(), ROOM, "the space is reserved again");
        }
        std::fs::remove_file(&path).unwrap();
        let full = spare.lend(|| Err::<(), _>(error::Error::new(ErrorKind::NoSpace, "full")));
        assert!(full.is_err() && !path.exists(), "nothing was reserved, so the work is not repeated");
    }
}
