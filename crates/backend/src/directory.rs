//! Directories: names, ownership, free space, queues.

use crate::dirty::DirtyMedium;
use crate::searched::SearchedFolder;
use crate::{File, IoMode, Queue, QueueKind};
use error::{Error, ErrorKind};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The access for which a file of another program is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only: the handle cannot change the file, and a file without write permission can be opened.
    Read,
    /// Reading and writing.
    ReadWrite,
}

/// Space in the file system that holds a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Size of the file system in bytes.
    pub total: u64,
    /// Bytes that an unprivileged process can still allocate.
    pub available: u64,
}

/// Exclusive ownership of a name, until the ownership is released or lost. Dropping this value, or the end of the
/// process, releases the ownership.
///
/// Ownership is lost when the medium admits another owner: a lease has expired or was revoked, or the locked name no
/// longer refers to the locked file. Lost ownership never returns. A medium that revokes ownership fences the former
/// owner: it refuses every change through the directory that acquired the lock and through the files opened there. A
/// local file system cannot fence, so the owner calls [`Lock::loss`] before it writes.
pub trait Lock: Send + Sync {
    /// Why the ownership is lost; `None` while it is held. An error means that this could not be determined.
    fn loss(&self) -> io::Result<Option<String>>;

    /// Registers `lost`, which the medium calls once when the ownership is lost, or immediately if it is lost already.
    /// The medium calls it on a thread that serves no operation of a queue. A medium that notices a loss only in
    /// [`Lock::loss`] never calls `lost`.
    fn on_loss(&self, lost: Box<dyn FnOnce() + Send>) {
        drop(lost);
    }
}

/// The reason for a loss: the locked name refers to another file, or to none.
pub(crate) fn renamed(name: &str) -> String {
    format!("its file '{name}' was removed or replaced while it was open")
}

/// The files of a datastore under their names, on any medium.
pub trait Directory: Send + Sync {
    /// Opens a file that exists (`NotFound` otherwise).
    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>>;

    /// Creates a file that must not exist yet. Durable only after [`Directory::sync`].
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>>;

    /// As [`Directory::create`], and locks the new file. `WouldBlock` when another process locked the file first; that
    /// process may have removed it.
    fn create_locked(&self, name: &str, mode: IoMode) -> io::Result<(Arc<dyn File>, Box<dyn Lock>)> {
        let file = self.create(name, mode)?;
        Ok((file, self.lock(name)?))
    }

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Renames a file, and replaces the file that has the new name, if any.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Names of all files, sorted.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes creations, removals and renames durable.
    fn sync(&self) -> io::Result<()>;

    /// Acquires the exclusive lock on file `name`, and creates the file if it is missing. `WouldBlock` when another
    /// process, or another opener in this process, holds the lock. On return the name refers to the locked file.
    /// [`Lock`] describes how the lock can be lost.
    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>>;

    /// As [`Directory::lock`], for a file that exists (`NotFound` otherwise). When the process ends without dropping
    /// the lock, the file stays locked until the medium has completed all requests of the write queues that this
    /// directory has made since: a request can be carried out after its process has ended.
    fn lock_until_idle(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        drop(self.open(name, IoMode::Buffered)?);
        self.lock(name)
    }

    /// Space in the file system.
    fn room(&self) -> io::Result<Room>;

    /// A new queue of at most `depth` operations in flight, for one thread. For reads, if there is a lock that
    /// [write queues](Directory::write_queue) keep.
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>>;

    /// As [`Directory::queue`], for writes too: see [`Directory::lock_until_idle`].
    fn write_queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        self.queue(depth)
    }

    /// The kind of queues that [`Directory::queue`] makes, for messages to users.
    fn queue_kind(&self) -> QueueKind;

    /// The operations that only a folder of a local file system has; `None` on other media, for which the methods of
    /// `dyn Directory` have substitutes.
    fn local(&self) -> Option<&dyn LocalFolder> {
        None
    }
}

/// Implements methods of [`Directory`] by those of another directory, for types that change only some methods:
/// `forward_directory!(inner: remove, list);` in the implementation calls `self.inner.remove(…)` and
/// `self.inner.list()`.
#[macro_export]
macro_rules! forward_directory {
    ($inner:tt: $($method:ident),+) => { $($crate::forward_directory!(@$method $inner);)+ };
    (@remove $inner:tt) => {
        fn remove(&self, name: &str) -> std::io::Result<()> {
            self.$inner.remove(name)
        }
    };
    (@rename $inner:tt) => {
        fn rename(&self, from: &str, to: &str) -> std::io::Result<()> {
            self.$inner.rename(from, to)
        }
    };
    (@list $inner:tt) => {
        fn list(&self) -> std::io::Result<Vec<String>> {
            self.$inner.list()
        }
    };
    (@sync $inner:tt) => {
        fn sync(&self) -> std::io::Result<()> {
            self.$inner.sync()
        }
    };
    (@lock $inner:tt) => {
        fn lock(&self, name: &str) -> std::io::Result<Box<dyn $crate::Lock>> {
            self.$inner.lock(name)
        }
    };
    (@room $inner:tt) => {
        fn room(&self) -> std::io::Result<$crate::Room> {
            self.$inner.room()
        }
    };
    (@queue $inner:tt) => {
        fn queue(&self, depth: u32) -> std::io::Result<Box<dyn $crate::Queue>> {
            self.$inner.queue(depth)
        }

        fn write_queue(&self, depth: u32) -> std::io::Result<Box<dyn $crate::Queue>> {
            self.$inner.write_queue(depth)
        }
    };
    (@queue_kind $inner:tt) => {
        fn queue_kind(&self) -> $crate::QueueKind {
            self.$inner.queue_kind()
        }
    };
}

/// Operations that only a folder of a local file system has: other programs put files there, and files have
/// permissions.
pub trait LocalFolder: Send + Sync {
    /// Opens a file that another program may have put there: only a regular file, never through a symbolic link, and
    /// with no more rights than `access` states. Errors do not contain the name of the file; the caller adds it.
    fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>>;

    /// Gives file `to` the owner and permissions of file `from`, as far as this process may.
    fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()>;

    /// Acquires the exclusive lock on the folder itself, which stays locked when a file in the folder is replaced.
    /// `WouldBlock` when another opener holds the lock, `None` where the file system cannot lock folders.
    fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>>;

    /// Whether a path leads to this folder; false after the folder was moved.
    fn is_at(&self, path: &Path) -> io::Result<bool>;

    /// Creates a folder in this folder, with access for its owner only.
    fn create_folder(&self, name: &str) -> io::Result<()> {
        Err(has_no_folders(name))
    }

    /// Removes an empty folder in this folder.
    fn remove_folder(&self, name: &str) -> io::Result<()> {
        Err(has_no_folders(name))
    }

    /// What this process has left dirty in the page cache of the folder's file system; `None` if it is not limited.
    fn dirty(&self) -> Option<Arc<DirtyMedium>> {
        None
    }

    /// A handle for a search for files with wrong permissions or owners; `None` if the folder has no permissions.
    fn searched(&self) -> io::Result<Option<SearchedFolder>> {
        Ok(None)
    }
}

fn has_no_folders(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, format!("'{name}' cannot be a folder here"))
}

/// The operations of [`LocalFolder`] for any directory. A directory without a local part contains no files of other
/// programs, and has no permissions.
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

    /// As [`LocalFolder::lock_folder`]; a directory without a local part needs no lock on its folder.
    pub fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>> {
        self.local().map_or(Ok(None), |local| local.lock_folder())
    }

    /// As [`LocalFolder::is_at`]; a directory without a local part is not moved.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        self.local().map_or(Ok(true), |local| local.is_at(path))
    }

    /// Fails with `Stopped` if the directory is a folder that is no longer at `path`, which may lead to another folder
    /// by now. Called before files are found by the path. `what` names the folder in the error.
    pub fn check_not_moved(&self, path: &Path, what: &str) -> error::Result<()> {
        if self.is_at(path).map_err(|error| Error::io(format!("looking for {what}"), error))? {
            return Ok(());
        }
        let text = format!(
            "{what} was moved while it was open; move it back, or stop the server that has it open and start the \
             server at the new path"
        );
        Err(Error::new(ErrorKind::Stopped, text))
    }

    /// As [`LocalFolder::create_folder`]; `Unsupported` without a local part.
    pub fn create_folder(&self, name: &str) -> io::Result<()> {
        self.local().map_or_else(|| Err(has_no_folders(name)), |local| local.create_folder(name))
    }

    /// As [`LocalFolder::remove_folder`]; `Unsupported` without a local part.
    pub fn remove_folder(&self, name: &str) -> io::Result<()> {
        self.local().map_or_else(|| Err(has_no_folders(name)), |local| local.remove_folder(name))
    }

    /// As [`LocalFolder::dirty`]; `None` without a local part.
    pub fn dirty(&self) -> Option<Arc<DirtyMedium>> {
        self.local().and_then(|local| local.dirty())
    }

    /// As [`LocalFolder::searched`]; a directory without a local part has no permissions.
    pub fn searched(&self) -> io::Result<Option<SearchedFolder>> {
        self.local().map_or(Ok(None), |local| local.searched())
    }
}
