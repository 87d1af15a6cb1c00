//! The owner of what root creates in a folder of another user.
//!
//! A datastore belongs to the owner of its folder. If root created files of its own in the datastore, the owner could
//! no longer open the datastore. So each file and folder that root creates gets the owner of the folder that contains
//! it.
//!
//! 1. Only a file that the call itself has created gets another owner. A file that existed may be a link to a file
//!    elsewhere, made by the owner of the folder. The owner of the folder can put another folder at its path at any
//!    time, so root opens the folder once, and uses this handle to determine the owner and to create the file. A new
//!    folder could be replaced before root has opened it, so root does not change the owner of a new folder: the thread
//!    creates the folder with the owner's user id.
//! 2. A process that is not root changes no owner, and neither does root in its own folders.
//! 3. If the file system or a user namespace refuses the change, the file belongs to root, and [`misowned`] finds it.
//! 4. [`misowned`] and [`give_back`] concern only what is in the folder itself ([`crate::searched`]). [`give_back`]
//!    changes no file with several names, because one of the names may be outside the folder.

use crate::replace::folder_of;
use crate::searched::SearchedFolder;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::{Errno, retry_on_intr};
use rustix::path::Arg;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// How often creating and opening a file are tried while other processes create and remove the file.
const ATTEMPTS: usize = 16;

/// The error of root that meets a symbolic link in place of a file in a folder of another user.
const LINK_OF_ANOTHER: &str =
    "it is a symbolic link of another user, which root does not follow: run the command as the owner of the folder";

/// The user and group to which a new file is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(Uid, Gid);

impl Owner {
    /// The owner of new files in a folder; `None` if this process creates them with the right owner.
    pub(crate) fn of(folder: impl AsFd) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let stat = rustix::fs::fstat(folder).ok()?;
        (stat.st_uid != 0).then(|| Self(Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid)))
    }

    /// Gives a file that this process has created to the owner.
    pub(crate) fn receives(self, created: impl AsFd) {
        let _ = rustix::fs::fchown(created, Some(self.0), Some(self.1));
    }

    /// Makes a call with the user and group of the owner, so that what the call creates belongs to the owner. If the
    /// system refuses this user or group, the call is made with that of root. Only this thread changes its user. From
    /// then on, the kernel takes no core dump of the process.
    #[cfg(target_os = "linux")]
    fn acts<T>(self, call: impl FnOnce() -> T) -> T {
        // SAFETY: the calls take and return numbers, and access no memory.
        let (group, user) = unsafe { (libc::setfsgid(self.1.as_raw()), libc::setfsuid(self.0.as_raw())) };
        let result = call();
        // SAFETY: as above. The real user of the thread is unchanged, so the kernel permits the change back to it.
        unsafe {
            libc::setfsuid(user.cast_unsigned());
            libc::setfsgid(group.cast_unsigned());
        }
        result
    }

    #[cfg(not(target_os = "linux"))]
    fn acts<T>(self, call: impl FnOnce() -> T) -> T {
        call()
    }
}

/// The folder in which root creates something, held by a handle, and the name of what it creates.
pub(crate) struct Place<'a> {
    folder: OwnedFd,
    name: &'a OsStr,
    owner: Option<Owner>,
}

impl<'a> Place<'a> {
    /// The place that a path names; `None` if this process is not root, and for a path that can only be a folder.
    pub(crate) fn of_root(path: &'a Path) -> io::Result<Option<Self>> {
        let Some(name) = path.file_name().filter(|_| rustix::process::geteuid().is_root()) else { return Ok(None) };
        let folder = folder_of(path);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = retry_on_intr(|| rustix::fs::open(folder, flags, Mode::empty()))?;
        let owner = Owner::of(&folder);
        Ok(Some(Self { folder, name, owner }))
    }

    /// Creates a folder.
    pub(crate) fn create_folder(&self) -> io::Result<()> {
        create_folder_in(self.folder.as_fd(), self.owner, self.name)
    }

    /// Opens or creates a file, as the flags say.
    pub(crate) fn open(&self, flags: OFlags) -> io::Result<fs::File> {
        let opened = open_in(self.folder.as_fd(), self.owner, self.name, flags);
        opened.map(fs::File::from).map_err(|error| explained(error, self.owner))
    }
}

/// Creates a folder in a folder, with access for its owner only. With `owner`, it belongs to the owner.
pub(crate) fn create_folder_in(folder: BorrowedFd<'_>, owner: Option<Owner>, name: impl Arg + Copy) -> io::Result<()> {
    let create = || rustix::fs::mkdirat(folder, name, Mode::RWXU);
    let Some(owner) = owner else { return Ok(create()?) };
    Ok(match owner.acts(create) {
        // The owner has no permission to write to the folder, or has no number in this user namespace.
        Err(Errno::ACCESS | Errno::PERM | Errno::OVERFLOW) => create(),
        created => created,
    }?)
}

/// The error of [`open_in`], with the reason if it is a symbolic link that root does not follow.
pub(crate) fn explained(error: io::Error, owner: Option<Owner>) -> io::Error {
    match error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) && owner.is_some() {
        true => io::Error::new(io::ErrorKind::InvalidInput, LINK_OF_ANOTHER),
        false => error,
    }
}

/// Opens a file in a folder, or creates it with access for its owner only, as the flags say. With `owner`, a file that
/// this call creates is given to the owner, and a symbolic link is not followed.
pub(crate) fn open_in(
    folder: BorrowedFd<'_>,
    owner: Option<Owner>,
    name: impl Arg + Copy,
    flags: OFlags,
) -> io::Result<OwnedFd> {
    let open = |flags: OFlags| -> io::Result<OwnedFd> {
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(retry_on_intr(|| rustix::fs::openat(folder, name, flags | OFlags::CLOEXEC, mode))?)
    };
    let Some(owner) = owner else { return open(flags) };
    let existing = (flags | OFlags::NOFOLLOW).difference(OFlags::CREATE | OFlags::EXCL);
    let create = || open(flags | OFlags::EXCL);
    let (file, created) = match (flags.contains(OFlags::CREATE), flags.contains(OFlags::EXCL)) {
        (false, _) => (open(existing)?, false),
        (true, true) => (create()?, true),
        (true, false) => create_or_open(create, || open(existing))?,
    };
    if created {
        owner.receives(&file);
    }
    Ok(file)
}

/// Creates a file by `create`, which fails if the file exists, or opens the existing one by `open`. Returns also
/// whether it was created.
fn create_or_open<T>(create: impl Fn() -> io::Result<T>, open: impl Fn() -> io::Result<T>) -> io::Result<(T, bool)> {
    let mut attempts = 0;
    loop {
        match create() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (file, true)),
        }
        attempts += 1;
        match open() {
            // The file was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound && attempts < ATTEMPTS => {}
            opened => return opened.map(|file| (file, false)),
        }
    }
}

/// A file or folder whose owner is not the owner of the folder that was searched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misowned {
    /// The path below the folder that was searched.
    pub path: PathBuf,
    /// The user to whom it belongs.
    pub user: u32,
    /// The user to whom the folder belongs.
    pub wanted: u32,
    /// Whether the file has several names (hard links), so that [`give_back`] does not change it.
    pub linked: bool,
}

/// The files and folders in `folder` that do not belong to its owner, sorted by path. Sockets and symbolic links are
/// left out, because access to a datastore does not depend on their owner.
pub fn misowned(folder: &SearchedFolder) -> io::Result<Vec<Misowned>> {
    let wanted = folder.stat().st_uid;
    let mut found = Vec::new();
    folder.walk(&mut |path, stat| {
        let kind = FileType::from_raw_mode(stat.st_mode);
        if stat.st_uid != wanted && (kind.is_dir() || kind.is_file()) {
            found.push(Misowned { path, user: stat.st_uid, wanted, linked: kind.is_file() && stat.st_nlink > 1 });
        }
    })?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Whether this process is root, and so may change owners where the file system permits it.
pub fn may_give() -> bool {
    rustix::process::geteuid().is_root()
}

/// Gives a file or folder in `folder` to the folder's owner. Returns false if it no longer exists, or is something else
/// now.
///
/// # Errors
/// `Unsupported` if the file has several names.
pub fn give_back(folder: &SearchedFolder, misowned: &Misowned) -> io::Result<bool> {
    let Some((file, stat)) = folder.open_below(&misowned.path)? else { return Ok(false) };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {}
        FileType::RegularFile if stat.st_nlink > 1 => {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the file has several names"));
        }
        FileType::RegularFile => {}
        _ => return Ok(false),
    }
    let top = folder.stat();
    let (user, group) = (Uid::from_raw(top.st_uid), Gid::from_raw(top.st_gid));
    // The handle may have been opened without access, which `fchown` refuses.
    rustix::fs::chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::local::{LocalDirectory, LocalQueues};
    use crate::{Directory, IoMode, private, replace};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    const USER: u32 = 1234;
    const GROUP: u32 = 1235;

    /// A folder of another user. The tests of this module run as root.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        chown(folder.path(), Some(USER), Some(GROUP)).unwrap();
        folder
    }

    fn owner(path: &Path) -> (u32, u32) {
        let metadata = fs::symlink_metadata(path).unwrap();
        (metadata.uid(), metadata.gid())
    }

    #[test]
    fn what_root_creates_in_a_folder_of_another_user_belongs_to_that_user() {
        let folder = folder();
        let path = |name: &str| folder.path().join(name);
        private::create_folder(&path("a")).unwrap();
        private::create_folders(&path("b/c")).unwrap();
        private::write(&path("b/c/d"), b"d").unwrap();
        drop(private::create_new(&path("e")).unwrap());
        drop(private::open_or_create(&path("f")).unwrap());
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap().keep_owner();
        directory.create("g", IoMode::Buffered).unwrap();
        drop(directory.lock("h").unwrap());
        replace::durably(&directory, "i", "i.new", b"content").unwrap();
        for name in ["a", "b", "b/c", "b/c/d", "e", "f", "g", "h", "i"] {
            assert_eq!(owner(&path(name)), (USER, GROUP), "{name}");
        }
        // A folder that the caller owns, and a directory whose files belong to the caller.
        private::create_folder_of_caller(&path("j")).unwrap();
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
        directory.create("k", IoMode::Buffered).unwrap();
        assert_eq!((owner(&path("j")), owner(&path("k"))), ((0, 0), (0, 0)));
        private::write(&path("j/l"), b"l").unwrap();
        assert_eq!(owner(&path("j/l")), (0, 0));
    }

    #[test]
    fn root_gives_nothing_away_in_a_folder_that_was_put_at_the_path() {
        let (folder, outside) = (folder(), tempfile::tempdir().unwrap());
        let path = |name: &str| folder.path().join(name);
        private::create_folder(&path("images")).unwrap();
        fs::create_dir(outside.path().join("disk")).unwrap();
        let paths = [path("images/disk"), path("images/new"), path("images/file")];
        let [disk, new, file] = paths.each_ref().map(|path| Place::of_root(path).unwrap().unwrap());
        fs::rename(path("images"), path("moved")).unwrap();
        symlink(outside.path(), path("images")).unwrap();
        disk.create_folder().unwrap();
        new.create_folder().unwrap();
        drop(file.open(OFlags::WRONLY | OFlags::CREATE).unwrap());
        for name in ["moved/disk", "moved/new", "moved/file"] {
            assert_eq!(owner(&path(name)), (USER, GROUP), "{name}");
        }
        assert_eq!(owner(&outside.path().join("disk")), (0, 0));
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
        // In the folder of root, everything belongs to root, and the thread has the rights of root again.
        private::create_folder(&path("images/root")).unwrap();
        private::write(&path("images/root/file"), b"").unwrap();
        for name in ["root", "root/file"] {
            assert_eq!(owner(&outside.path().join(name)), (0, 0), "{name}");
        }
    }

    #[test]
    fn a_folder_is_created_with_the_rights_of_its_owner_and_otherwise_stays_roots() {
        let folder = folder();
        let path = |name: &str| folder.path().join(name);
        // The process could not create the second folder if it still had the owner's user id.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        private::create_folder(&path("a")).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o500)).unwrap();
        private::create_folder(&path("b")).unwrap();
        assert_eq!((owner(&path("a")), owner(&path("b"))), ((USER, GROUP), (0, 0)));
        let again = private::create_folder(&path("a")).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn files_that_existed_keep_their_owner_and_links_are_not_followed() {
        let (folder, outside) = (folder(), tempfile::tempdir().unwrap());
        let path = |name: &str| folder.path().join(name);
        let (secret, other) = (outside.path().join("secret"), outside.path().join("other"));
        fs::write(&secret, b"secret").unwrap();
        fs::hard_link(&secret, path("hard")).unwrap();
        for (target, name) in [(&secret, "soft"), (&other, "dangling")] {
            symlink(target, path(name)).unwrap();
        }
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap().keep_owner();
        drop(private::open_or_create(&path("hard")).unwrap());
        drop(directory.lock("hard").unwrap());
        for name in ["soft", "dangling"] {
            private::create(&path(name)).unwrap_err();
            private::open_or_create(&path(name)).unwrap_err();
            assert!(directory.lock(name).is_err() && directory.open(name, IoMode::Buffered).is_err(), "{name}");
        }
        assert!(!other.exists());
        assert_eq!((owner(&secret), fs::read(&secret).unwrap()), ((0, 0), b"secret".to_vec()));
    }

    #[test]
    fn files_of_another_owner_are_found_and_given_back() {
        let (folder, outside) = (folder(), tempfile::tempdir().unwrap());
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("images")).unwrap();
        fs::write(path("images/disk"), b"").unwrap();
        fs::write(path("own"), b"").unwrap();
        chown(path("own"), Some(USER), None).unwrap();
        let secret = outside.path().join("secret");
        fs::write(&secret, b"secret").unwrap();
        fs::hard_link(&secret, path("hard")).unwrap();
        symlink(&secret, path("soft")).unwrap();
        let searched = SearchedFolder::open(folder.path()).unwrap();
        let found = misowned(&searched).unwrap();
        let told: Vec<_> = found.iter().map(|one| (one.path.to_str().unwrap(), one.user, one.linked)).collect();
        assert_eq!(told, [("hard", 0, true), ("images", 0, false), ("images/disk", 0, false)]);
        assert!(give_back(&searched, &found[0]).is_err());
        found[1..].iter().for_each(|one| assert!(give_back(&searched, one).unwrap()));
        for name in ["images", "images/disk"] {
            assert_eq!(owner(&path(name)), (USER, GROUP), "{name}");
        }
        // The file was replaced by a link after the search.
        fs::remove_file(path("images/disk")).unwrap();
        symlink(&secret, path("images/disk")).unwrap();
        assert!(!give_back(&searched, &found[2]).unwrap());
        assert_eq!(owner(&secret), (0, 0));
        assert_eq!(misowned(&searched).unwrap().len(), 1);
    }
}
