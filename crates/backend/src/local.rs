//! Files in a folder of a local file system.
//!
//! 1. A name is one component of a path, so that no name from the crates above reaches outside the folder. Files that
//!    other programs may have put there are opened without following a symbolic link ([`LocalFolder::open_foreign`]),
//!    and so is a folder that an image names ([`LocalDirectory::open_resolved`]).
//! 2. A created, renamed or removed name is durable after [`Directory::sync`], which is an fsync of the folder. A file
//!    created for direct I/O on a file system that refuses direct I/O is removed again.
//! 3. The lock is an advisory lock of the open file description (`flock`). The kernel releases it when the process
//!    ends, however it ends, and two openers in one process exclude each other too. After the end of a process, the
//!    kernel still carries out the direct writes of its rings. So a ring for writes holds the description of
//!    the locks of [`Directory::lock_until_idle`], and the kernel releases these after the last request of the ring.
//! 4. In a directory with [`LocalDirectory::keep_owner`], files that root creates belong to the owner of the folder.
//!    Root follows no symbolic links there, because another user may have made them.
//! 5. The kind of queues is probed once, at the start; [`Directory::queue_kind`] reports it.

mod extents;
mod file;
mod file_system;
mod kept;
mod scheduling;

pub use file::OpenFile;
#[cfg(target_os = "linux")]
pub(crate) use file::VECTORS_MAX;
pub use file_system::{FileSystem, copied_on_write};
#[cfg(target_os = "linux")]
pub(crate) use kept::is_missing as is_kept_space_missing;
pub use kept::{HeldSpace, KeptSpace};

pub use scheduling::{Slice, Thread};

use crate::directory::renamed;
use crate::dirty::{DirtyMedium, medium_of};
use crate::file::flush_failed;
use crate::owner::{Owner, create_folder_in, explained, open_in};
use crate::portable::{PortableQueue, Workers};
use crate::searched::SearchedFolder;
use crate::validate::check_name;
use crate::{Access, Directory, File, IoMode, LocalFolder, Lock, Queue, QueueKind, Room};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Which queues a directory makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalQueues {
    /// io_uring where it works, threads where it does not.
    Auto,
    /// io_uring, or an error.
    Uring,
    /// A pool of threads.
    Threads,
}

/// A folder of a local file system.
pub struct LocalDirectory {
    path: PathBuf,
    folder: Arc<OwnedFd>,
    /// Whether files that root creates are given to the owner of the folder, see [`Self::keep_owner`].
    keeps_owner: bool,
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only io_uring can be required or excluded"))]
    queues: LocalQueues,
    uring: AtomicBool,
    workers: Arc<Workers>,
    /// The files that new rings keep locked.
    kept_locked: Mutex<Vec<Weak<std::fs::File>>>,
}

impl LocalDirectory {
    /// Opens a folder that exists.
    ///
    /// # Errors
    /// `Unsupported` when io_uring was demanded and the kernel, or the container around this process, forbids it.
    pub fn open(path: impl AsRef<Path>, queues: LocalQueues) -> io::Result<Self> {
        let path = path.as_ref().to_path_buf();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder =
            rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| named(e.into(), "open folder", &path))?;
        let uring = match queues {
            LocalQueues::Threads => false,
            LocalQueues::Auto => probe_uring().is_ok(),
            LocalQueues::Uring => probe_uring().map(|()| true).map_err(|e| {
                let text = format!("io_uring does not work here ({e}); use queues of threads");
                io::Error::new(io::ErrorKind::Unsupported, text)
            })?,
        };
        Ok(Self::of(path, folder, queues, uring))
    }

    /// Opens a folder by its canonical path (as [`std::fs::canonicalize`] gives it), component by component, and
    /// follows no symbolic link: a link that was put there after the path was resolved and permitted is refused.
    pub fn open_resolved(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref().to_path_buf();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let step = if cfg!(target_os = "linux") { flags | OFlags::PATH } else { flags };
        let fail = |e: rustix::io::Errno| named(e.into(), "open folder", &path);
        let mut folder = rustix::fs::open("/", step, Mode::empty()).map_err(fail)?;
        for component in path.components() {
            match component {
                Component::RootDir => {}
                Component::Normal(name) => {
                    folder = rustix::fs::openat(&folder, name, step, Mode::empty()).map_err(fail)?;
                }
                _ => {
                    let text = format!("{} is no canonical path", path.display());
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
                }
            }
        }
        // Opening the components needs no right to list them. The folder itself is listed and flushed, so it is opened
        // again.
        let folder = rustix::fs::openat(&folder, ".", flags, Mode::empty()).map_err(fail)?;
        Ok(Self::of(path, folder, LocalQueues::Auto, probe_uring().is_ok()))
    }

    fn of(path: PathBuf, folder: OwnedFd, queues: LocalQueues, uring: bool) -> Self {
        Self {
            path,
            folder: Arc::new(folder),
            keeps_owner: false,
            queues,
            uring: AtomicBool::new(uring),
            workers: Workers::new(),
            kept_locked: Mutex::default(),
        }
    }

    /// From now on, files that root creates in this directory belong to the owner of the folder. For the folders of a
    /// datastore only: in other folders, root may write what the owner of the folder must not read.
    pub fn keep_owner(mut self) -> Self {
        self.keeps_owner = true;
        self
    }

    /// The owner to set on new files; `None` if none has to be set. Determined at each use, because a repair may change
    /// the owner of the folder.
    fn owner(&self) -> Option<Owner> {
        self.keeps_owner.then(|| Owner::of(&self.folder)).flatten()
    }

    /// The open folder.
    pub(crate) fn handle(&self) -> &OwnedFd {
        &self.folder
    }

    /// The path of the folder, as the caller gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn open_with(&self, name: &str, mode: IoMode, flags: OFlags) -> io::Result<std::fs::File> {
        self.open_flags(name, mode, flags | OFlags::RDWR)
    }

    fn open_flags(&self, name: &str, mode: IoMode, flags: OFlags) -> io::Result<std::fs::File> {
        self.open_unnamed(name, mode, flags).map_err(|error| named(error, "open", &self.path.join(name)))
    }

    /// Opens a file. Errors do not contain its name.
    fn open_unnamed(&self, name: &str, mode: IoMode, flags: OFlags) -> io::Result<std::fs::File> {
        check_name(name)?;
        let opened = open_in(self.folder.as_fd(), self.owner(), name, flags);
        let file = opened.map_err(|error| explained(error, self.owner()))?;
        let file = std::fs::File::from(file);
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        if mode == IoMode::Direct {
            set_direct(&file).map_err(|e| {
                let text = format!("its file system refuses direct I/O ({e}); use buffered I/O");
                io::Error::new(io::ErrorKind::Unsupported, text)
            })?;
        }
        Ok(file)
    }

    fn create_file(&self, name: &str, mode: IoMode) -> io::Result<std::fs::File> {
        let file = self.open_with(name, mode, OFlags::CREATE | OFlags::EXCL).inspect_err(|error| {
            // With EXCL, `Unsupported` is the only error that is returned after the file was created.
            if error.kind() == io::ErrorKind::Unsupported {
                let _ = self.remove(name);
            }
        })?;
        #[cfg(target_os = "linux")]
        overwrite_in_place(&file);
        Ok(file)
    }

    #[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "only rings outlive their process"))]
    fn queue_with(&self, depth: u32, locked: &[Arc<std::fs::File>]) -> io::Result<Box<dyn Queue>> {
        #[cfg(target_os = "linux")]
        if self.uring.load(Ordering::Relaxed) {
            match crate::uring::UringQueue::new(depth, locked) {
                Ok(queue) => return Ok(Box::new(queue)),
                Err(error) if self.queues == LocalQueues::Uring => return Err(error),
                // Probing found io_uring, but the limit on rings or locked memory is reached: from now on queues use
                // threads.
                Err(_) => self.uring.store(false, Ordering::Relaxed),
            }
        }
        Ok(Box::new(PortableQueue::new(Arc::clone(&self.workers), depth)?))
    }

    fn take_lock(&self, name: &str, file: &std::fs::File) -> io::Result<()> {
        retry(|| rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)).map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => self.is_locked(name),
            _ => named(e, "lock", &self.path.join(name)),
        })
    }

    fn is_locked(&self, name: &str) -> io::Error {
        let text = format!("{} is locked by another owner", self.path.join(name).display());
        io::Error::new(io::ErrorKind::WouldBlock, text)
    }

    /// Whether the name still refers to the file with this identity.
    fn leads_to(&self, name: &str, identity: Identity) -> io::Result<bool> {
        leads_to(&self.folder, name, identity).map_err(|error| named(error, "look at", &self.path.join(name)))
    }

    fn locked(&self, name: &str, file: std::fs::File, identity: Identity) -> LocalLock {
        LocalLock { file: Arc::new(file), place: Some((Arc::clone(&self.folder), name.to_owned(), identity)) }
    }

    fn lock_with(&self, name: &str, flags: OFlags) -> io::Result<LocalLock> {
        loop {
            let file = self.open_with(name, IoMode::Buffered, flags)?;
            self.take_lock(name, &file)?;
            // The previous owner may have removed or renamed the file since it was opened here.
            let identity = Identity::of(&file)?;
            if self.leads_to(name, identity)? {
                return Ok(self.locked(name, file, identity));
            }
        }
    }
}

/// Device and inode number, which identify a file for as long as it is open.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity(u64, u64);

impl Identity {
    fn of(file: &std::fs::File) -> io::Result<Self> {
        Ok(Self::from(rustix::fs::fstat(file)?))
    }
}

impl From<rustix::fs::Stat> for Identity {
    fn from(stat: rustix::fs::Stat) -> Self {
        Self(stat.st_dev, stat.st_ino)
    }
}

/// Whether the name in a folder refers to the file with this identity.
fn leads_to(folder: &OwnedFd, name: &str, identity: Identity) -> io::Result<bool> {
    match rustix::fs::statat(folder, name, rustix::fs::AtFlags::empty()) {
        Ok(found) => Ok(Identity::from(found) == identity),
        Err(rustix::io::Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl Directory for LocalDirectory {
    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let file = self.open_with(name, mode, OFlags::empty())?;
        Ok(Arc::new(OpenFile::new(file, mode)))
    }

    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(Arc::new(OpenFile::new(self.create_file(name, mode)?, mode)))
    }

    fn create_locked(&self, name: &str, mode: IoMode) -> io::Result<(Arc<dyn File>, Box<dyn Lock>)> {
        let file = self.create_file(name, mode)?;
        let lock = file.try_clone().and_then(|lock| {
            self.take_lock(name, &lock)?;
            let identity = Identity::of(&lock)?;
            match self.leads_to(name, identity)? {
                true => Ok((lock, identity)),
                false => Err(self.is_locked(name)),
            }
        });
        match lock {
            Ok((lock, identity)) => {
                Ok((Arc::new(OpenFile::new(file, mode)), Box::new(self.locked(name, lock, identity))))
            }
            Err(error) => {
                // If another process has locked the new file first, only that process may remove it.
                if error.kind() != io::ErrorKind::WouldBlock {
                    let _ = self.remove(name);
                }
                Err(error)
            }
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        retry(|| rustix::fs::unlinkat(&self.folder, name, rustix::fs::AtFlags::empty()))
            .map_err(|e| named(e, "remove", &self.path.join(name)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(to)?;
        kept::rename(&self.folder, || retry(|| rustix::fs::renameat(&self.folder, from, &self.folder, to)))
            .map_err(|e| named(e, "rename", &self.path.join(from)))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.folder)? {
            let entry = entry?;
            // lamina gives no file a name that is not UTF-8.
            let Ok(name) = entry.file_name().to_str() else { continue };
            let regular = match entry.file_type() {
                rustix::fs::FileType::Unknown => {
                    let found = rustix::fs::statat(&self.folder, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
                    found.is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file())
                }
                kind => kind.is_file(),
            };
            if regular {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn sync(&self) -> io::Result<()> {
        retry(|| rustix::fs::fsync(&self.folder)).map_err(flush_failed)
    }

    fn lock(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        Ok(Box::new(self.lock_with(name, OFlags::CREATE)?))
    }

    fn lock_until_idle(&self, name: &str) -> io::Result<Box<dyn Lock>> {
        let lock = self.lock_with(name, OFlags::empty())?;
        let mut kept = self.kept_locked.lock();
        kept.retain(|file| file.strong_count() > 0);
        kept.push(Arc::downgrade(&lock.file));
        Ok(Box::new(lock))
    }

    fn room(&self) -> io::Result<Room> {
        let stat = rustix::fs::fstatvfs(&self.folder)?;
        Ok(Room {
            total: stat.f_blocks.saturating_mul(stat.f_frsize),
            available: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }

    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        self.queue_with(depth, &[])
    }

    fn write_queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        let locked: Vec<_> = self.kept_locked.lock().iter().filter_map(Weak::upgrade).collect();
        self.queue_with(depth, &locked)
    }

    fn queue_kind(&self) -> QueueKind {
        match self.uring.load(Ordering::Relaxed) {
            true => QueueKind::Uring,
            false => QueueKind::Threads,
        }
    }

    fn local(&self) -> Option<&dyn LocalFolder> {
        Some(self)
    }
}

impl LocalFolder for LocalDirectory {
    fn open_foreign(&self, name: &str, mode: IoMode, access: Access) -> io::Result<Arc<dyn File>> {
        let rights = match access {
            Access::Read => OFlags::RDONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        // Without NONBLOCK, opening a FIFO would block. The flag has no effect on a regular file.
        let file = self.open_unnamed(name, mode, rights | OFlags::NOFOLLOW | OFlags::NONBLOCK)?;
        Ok(Arc::new(OpenFile::new(file, mode)))
    }

    fn copy_permissions(&self, from: &str, to: &str) -> io::Result<()> {
        check_name(from)?;
        check_name(to)?;
        let like = rustix::fs::statat(&self.folder, from, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?;
        let file = self.open_flags(to, IoMode::Buffered, OFlags::RDWR | OFlags::NOFOLLOW)?;
        // Only root may change the owner of a file; for other users the new file keeps its owner.
        let owner = rustix::fs::Uid::from_raw(like.st_uid);
        let group = rustix::fs::Gid::from_raw(like.st_gid);
        let _ = rustix::fs::fchown(&file, Some(owner), Some(group));
        Ok(rustix::fs::fchmod(&file, Mode::from_raw_mode(like.st_mode & 0o777))?)
    }

    fn lock_folder(&self) -> io::Result<Option<Box<dyn Lock>>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = retry(|| rustix::fs::openat(&self.folder, ".", flags, Mode::empty()))?;
        match retry(|| rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => Ok(Some(Box::new(LocalLock { file: Arc::new(folder.into()), place: None }))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let text = format!("{} is locked by another owner", self.path.display());
                Err(io::Error::new(io::ErrorKind::WouldBlock, text))
            }
            // Some file systems lock no folder: NFS locks only what is open for writing.
            Err(_) => Ok(None),
        }
    }

    fn is_at(&self, path: &Path) -> io::Result<bool> {
        let own = Identity::from(rustix::fs::fstat(&self.folder)?);
        match retry(|| rustix::fs::stat(path)) {
            Ok(found) => Ok(Identity::from(found) == own),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn create_folder(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        create_folder_in(self.folder.as_fd(), self.owner(), name)
            .map_err(|error| named(error, "create folder", &self.path.join(name)))
    }

    fn remove_folder(&self, name: &str) -> io::Result<()> {
        check_name(name)?;
        retry(|| rustix::fs::unlinkat(&self.folder, name, rustix::fs::AtFlags::REMOVEDIR))
            .map_err(|error| named(error, "remove folder", &self.path.join(name)))
    }

    fn dirty(&self) -> Option<Arc<DirtyMedium>> {
        medium_of(rustix::fs::fstat(&*self.folder).ok()?.st_dev)
    }

    fn searched(&self) -> io::Result<Option<SearchedFolder>> {
        SearchedFolder::of(&*self.folder).map(Some)
    }
}

/// Makes btrfs overwrite a new file in place (NOCOW). With copy-on-write each write allocates new space, so that a
/// write into reserved space could fail on a full file system. If the flag cannot be set, the file stays copy-on-write,
/// and [`copied_on_write`] reports it.
#[cfg(target_os = "linux")]
fn overwrite_in_place(file: &std::fs::File) {
    let kind = |found: rustix::fs::StatFs| FileSystem::of_magic(found.f_type as u64 & 0xffff_ffff);
    if rustix::fs::fstatfs(file).is_ok_and(|found| kind(found) == FileSystem::Btrfs)
        && let Ok(flags) = rustix::fs::ioctl_getflags(file)
    {
        let _ = rustix::fs::ioctl_setflags(file, flags | rustix::fs::IFlags::NOCOW);
    }
}

/// Contains the open file description to which the lock belongs.
struct LocalLock {
    file: Arc<std::fs::File>,
    /// The folder, the name in it, and the identity of the locked file; none when the folder itself is locked.
    place: Option<(Arc<OwnedFd>, String, Identity)>,
}

impl Lock for LocalLock {
    fn loss(&self) -> io::Result<Option<String>> {
        let Some((folder, name, identity)) = &self.place else { return Ok(None) };
        Ok((!leads_to(folder, name, *identity)?).then(|| renamed(name)))
    }
}

impl Drop for LocalLock {
    /// Closing the file is not enough: a forked process shares every open file description until it executes its
    /// program, and would hold the lock until then.
    fn drop(&mut self) {
        let _ = retry(|| rustix::fs::flock(&*self.file, FlockOperation::Unlock));
    }
}

fn probe_uring() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    return crate::uring::probe();
    #[cfg(not(target_os = "linux"))]
    return Err(io::Error::new(io::ErrorKind::Unsupported, "not on this operating system"));
}

#[cfg(target_os = "linux")]
fn set_direct(file: &std::fs::File) -> io::Result<()> {
    // O_DIRECT is set after opening: an open with O_DIRECT that creates the file would leave it behind when the file
    // system refuses the flag.
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT)?;
    // A device with larger blocks refuses only the requests.
    retry(|| rustix::io::pread(file, &mut crate::Buffer::zeroed(1)[..], 0)).map(drop)
}

#[cfg(not(target_os = "linux"))]
fn set_direct(_file: &std::fs::File) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "not on this operating system"))
}

fn named(error: io::Error, what: &str, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

/// Repeats a system call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    Ok(rustix::io::retry_on_intr(&mut call)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_lock_is_free_while_a_starting_process_still_holds_its_descriptor() {
        let path = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open_resolved(path.path()).unwrap();
        let file = directory.open_with("lock", IoMode::Buffered, OFlags::CREATE).unwrap();
        directory.take_lock("lock", &file).unwrap();
        let inherited = file.try_clone().unwrap();
        drop(LocalLock { file: Arc::new(file), place: None });
        drop(directory.lock("lock").unwrap());
        drop(inherited);
    }

    #[test]
    fn a_directory_notices_that_its_folder_was_moved_and_the_path_leads_elsewhere() {
        let top = tempfile::tempdir().unwrap();
        let (path, moved) = (top.path().join("store"), top.path().join("moved"));
        std::fs::create_dir(&path).unwrap();
        let directory = LocalDirectory::open(&path, LocalQueues::Threads).unwrap();
        assert!(directory.is_at(&path).unwrap());
        std::fs::rename(&path, &moved).unwrap();
        assert!(!directory.is_at(&path).unwrap() && directory.is_at(&moved).unwrap());
        std::os::unix::fs::symlink(&moved, &path).unwrap();
        assert!(directory.is_at(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(!directory.is_at(&path).unwrap());
    }

    #[test]
    fn a_folder_has_one_lock_at_a_time() {
        let path = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open_resolved(path.path()).unwrap();
        let other = LocalDirectory::open_resolved(path.path()).unwrap();
        let lock = directory.lock_folder().unwrap().unwrap();
        assert_eq!(other.lock_folder().err().unwrap().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(lock.loss().unwrap(), None);
        drop(lock);
        assert!(other.lock_folder().unwrap().is_some());
    }

    /// As the end of the process does it, which closes the file of the lock before the last request is done.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_ring_keeps_its_directory_locked() {
        let path = tempfile::tempdir().unwrap();
        let open = || LocalDirectory::open(path.path(), LocalQueues::Uring).unwrap();
        let (directory, other) = (open(), open());
        directory.create("file", IoMode::Buffered).unwrap();
        drop(directory.lock_until_idle("file").unwrap());
        assert_eq!(directory.kept_locked.lock().len(), 1);
        let file = Arc::new(directory.open_with("file", IoMode::Buffered, OFlags::empty()).unwrap());
        directory.take_lock("file", &file).unwrap();
        directory.kept_locked.lock().push(Arc::downgrade(&file));
        let (queue, reads) = (directory.write_queue(4).unwrap(), directory.queue(4).unwrap());
        drop(file);
        for _ in 0..20 {
            assert_eq!(other.lock("file").err().unwrap().kind(), io::ErrorKind::WouldBlock);
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        drop(queue);
        let begin = std::time::Instant::now();
        while let Err(error) = other.lock_until_idle("file") {
            assert!(error.kind() == io::ErrorKind::WouldBlock && begin.elapsed().as_secs() < 30, "{error}");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        // Reads of a medium that does not answer do not delay the next owner.
        drop(reads);
    }
}
