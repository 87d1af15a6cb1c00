//! The owner of what root creates in a folder of another user.
//!
//! A datastore belongs to the owner of its folder. If a command of root created files of root in it, its owner could
//! no longer open it. So root gives what it creates the owner of the folder in which it creates it.
//!
//! 1. Only a file that the call itself has created gets another owner. A file that existed may be a link to a file
//!    elsewhere, made by the owner of the folder.
//! 2. A process that is not root changes no owner, and neither does root in its own folders.
//! 3. If the file system or a user namespace refuses the change, the file stays root's, and [`misowned`] finds it.
//! 4. [`misowned`] and [`give_back`] follow no symbolic link, and change no file with several names: one of the names
//!    may be outside the folder.

use crate::private::{open_below, walk};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How often a file that is created and removed by others meanwhile is looked for.
const ATTEMPTS: usize = 16;

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

    /// As [`Owner::of`], for the folder of a path.
    pub(crate) fn of_folder_of(path: &Path) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::of(rustix::fs::open(folder, flags, Mode::empty()).ok()?)
    }

    /// Gives a file or folder that this process has created to the owner.
    pub(crate) fn receives(self, created: impl AsFd) {
        let _ = rustix::fs::fchown(created, Some(self.0), Some(self.1));
    }

    /// Gives a folder that this process has created to the owner. If another process has put something else at the
    /// path, that keeps its owner.
    pub(crate) fn receives_folder(self, path: &Path) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if let Ok(folder) = rustix::fs::open(path, flags, Mode::empty()) {
            self.receives(folder);
        }
    }
}

/// Creates a file by `create`, which fails if the file exists, or opens the existing one by `open`. Returns also
/// whether it was created.
pub(crate) fn create_or_open<T>(
    create: impl Fn() -> io::Result<T>,
    open: impl Fn() -> io::Result<T>,
) -> io::Result<(T, bool)> {
    let mut attempts = 0;
    loop {
        match create() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (file, true)),
        }
        attempts += 1;
        match open() {
            // The file was removed meanwhile. A dangling symbolic link is never created nor found.
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
    /// Whether the file has other names, so that [`give_back`] does not change it.
    pub linked: bool,
}

/// The files and folders in `folder` that do not belong to its owner, sorted by path. Sockets and symbolic links are
/// left out, because access does not depend on their owner.
pub fn misowned(folder: &Path) -> io::Result<Vec<Misowned>> {
    let wanted = fs::metadata(folder)?.uid();
    let mut found = Vec::new();
    let walked = walk(folder, &mut |path, metadata| {
        let (user, folder) = (metadata.uid(), metadata.is_dir());
        if user != wanted && (folder || metadata.is_file()) {
            found.push(Misowned { path, user, wanted, linked: !folder && metadata.nlink() > 1 });
        }
    });
    match walked {
        // A folder of another owner was found, and only that owner can search it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !found.is_empty() => {}
        walked => walked?,
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Whether this process may change owners, as far as the file systems permit it.
pub fn may_give() -> bool {
    rustix::process::geteuid().is_root()
}

/// Gives a file or folder in `folder` to the folder's owner. What no longer exists, or is something else now, is not an
/// error.
///
/// # Errors
/// `Unsupported` if the file has several names.
pub fn give_back(folder: &Path, misowned: &Misowned) -> io::Result<()> {
    let top = fs::metadata(folder)?;
    let file = match open_below(folder, &misowned.path) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let stat = rustix::fs::fstat(&file)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {}
        FileType::RegularFile if stat.st_nlink > 1 => {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the file has several names"));
        }
        FileType::RegularFile => {}
        _ => return Ok(()),
    }
    let (user, group) = (Uid::from_raw(top.uid()), Gid::from_raw(top.gid()));
    // The handle may have been opened without access, which `fchown` refuses.
    Ok(rustix::fs::chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::local::{LocalDirectory, LocalQueues};
    use crate::{Directory, IoMode, private, replace};
    use std::os::unix::fs::{chown, symlink};

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
        let found = misowned(folder.path()).unwrap();
        let told: Vec<_> = found.iter().map(|one| (one.path.to_str().unwrap(), one.user, one.linked)).collect();
        assert_eq!(told, [("hard", 0, true), ("images", 0, false), ("images/disk", 0, false)]);
        assert!(give_back(folder.path(), &found[0]).is_err());
        found[1..].iter().for_each(|one| give_back(folder.path(), one).unwrap());
        for name in ["images", "images/disk"] {
            assert_eq!(owner(&path(name)), (USER, GROUP), "{name}");
        }
        // The file was replaced by a link after the search.
        fs::remove_file(path("images/disk")).unwrap();
        symlink(&secret, path("images/disk")).unwrap();
        give_back(folder.path(), &found[2]).unwrap();
        assert_eq!(owner(&secret), (0, 0));
        assert_eq!(misowned(folder.path()).unwrap().len(), 1);
    }
}
