//! Directories: names, ownership, room, queues.

use crate::{File, IoMode, Queue, QueueKind};
use std::io;
use std::sync::Arc;

/// What a file of another maker is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading: the medium is not changed whatever happens, and a file that may not be written can be opened.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// Room in the file system that holds a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Size of the file system in bytes.
    pub total: u64,
    /// Bytes an unprivileged process may still take.
    pub available: u64,
}

/// Ownership of a name, exclusive until it is given back or lost. It is given back when this is dropped or the process
/// ends, however it ends.
///
/// It is lost when the medium lets another owner in: a lease has expired or was revoked, or the locked name no longer
/// leads to the locked file. It does not come back. A medium that revokes ownership fences: from then on it refuses
/// everything that would change it through the directory that took the lock and the files opened there. A local file
/// system cannot fence, so the owner looks before it writes.
pub trait Lock: Send + Sync {
    /// Why the ownership is lost; `None` while it is held. An error says that this cannot be seen now.
    fn loss(&self) -> io::Result<Option<String>>;

    /// Has `lost` called once when the medium learns that the ownership is lost, at once if it is lost already. The
    /// thread that calls it serves no operation of a queue. A medium that learns of it only by looking never calls.
    fn on_loss(&self, lost: Box<dyn FnOnce() + Send>) {
        drop(lost);
    }
}

/// Why the ownership of a name is lost that leads elsewhere, or nowhere.
pub(crate) fn renamed(name: &str) -> String {
    format!("its file '{name}' was removed or replaced while it was open")
}

/// The files of a datastore under their names, on any medium.
pub trait Directory: Send + Sync {
    /// Opens a file that exists (`NotFound` otherwise).
    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>>;

    /// Creates a file that must not exist yet. Durable only after [`Directory::sync`].
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>>;

    /// As [`Directory::create`], and the lock on it: `WouldBlock` when another process locked the new file first; that
    /// process may have removed it.
    fn create_locked(&self, name: &str, mode: IoMode) -> io::Result<(Arc<dyn File>, Box<dyn Lock>)> {
        let file = self.create(name, mode)?;
        Ok((file, self.lock(name)?))
    }

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Renames a file over whatever bore the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Names of all files, sorted.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes creations, removals and renames durable.
    fn sync(&self) -> io::Result<()>;

    /// Takes the exclusive lock on file `name` (created when missing): `WouldBlock` when another process, or another
    /// opener in this one, holds it. The name leads to the locked file on return. How it can be lost: [`Lock`].
    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>>;

    /// As [`Directory::lock`], of a file that exists (`NotFound` otherwise).
    fn lock_existing(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        drop(self.open(name, IoMode::Buffered)?);
        self.lock(name)
    }

    /// Room in the file system.
    fn room(&self) -> io::Result<Room>;

    /// A new queue of at most `depth` operations in flight, for one thread.
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>>;

    /// What [`Directory::queue`] makes, for the user to see.
    fn queue_kind(&self) -> QueueKind;

    /// What only a folder of a local file system can do; `None` on other media. The methods of `dyn Directory` use it
    /// where it is there, and do what takes its place where it is not.
    fn local(&self) -> Option<&dyn LocalFolder> {
        None
    }
}

/// What only a folder of a local file system can do: other programs put files there, and files have permissions.
pub trait LocalFolder: Send + Sync {
    /// Opens a file that another program may have put there: only a regular file, never through a symbolic link, and
    /// with no more rights than `access` asks for.
    fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>>;

    /// Gives file `to` the owner and permissions of file `from`, as far as this process may.
    fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()>;

    /// Takes the exclusive lock on the folder itself, which no file put in another's place gives free: `WouldBlock`
    /// when another opener holds it, `None` where the file system locks no folders.
    fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>>;
}

/// The abilities of [`LocalFolder`] on any directory. Where it has no local part, no other program puts files there,
/// and there are no permissions.
impl dyn Directory + '_ {
    /// As [`LocalFolder::open_foreign`]; without a local part as [`Directory::open`].
    pub fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>> {
        match self.local() {
            Some(local) => local.open_foreign(name, mode, access),
            None => self.open(name, mode),
        }
    }

    /// As [`LocalFolder::copy_permissions`]; nothing to do without a local part.
    pub fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()> {
        self.local().map_or(Ok(()), |local| local.copy_permissions(from, to))
    }

    /// As [`LocalFolder::lock_folder`]; without a local part no folder has to be locked.
    pub fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>> {
        self.local().map_or(Ok(None), |local| local.lock_folder())
    }
}
