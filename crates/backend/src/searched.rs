//! Searches a local folder for files with wrong permissions or owners, and opens the found files to change them.
//!
//! 1. The folder is open from the search to the last change, because another user who can write to a folder above it
//!    may put another folder at its path at any time.
//! 2. No symbolic link in the folder is followed, and no folder of another file system is entered: what is mounted
//!    there does not belong to the folder.
//! 3. A change concerns what was opened, not what a path leads to.

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// The deepest folder that [`SearchedFolder::walk`] looks into.
const DEPTH_MAX: usize = 16;
/// How folders are opened to list them.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// How [`SearchedFolder::open_below`] opens files. On Linux the handle permits neither reads nor writes. So sockets,
/// and files without permissions for their owner, can be opened, and opening has no effect on devices and pipes.
#[cfg(target_os = "linux")]
const HANDLE: OFlags = OFlags::PATH;
#[cfg(not(target_os = "linux"))]
const HANDLE: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK);

/// An open folder for [`crate::private::exposed`] and [`crate::owner::misowned`], and for checks of its owner.
pub struct SearchedFolder {
    handle: OwnedFd,
    stat: Stat,
}

impl SearchedFolder {
    /// Opens a folder by its path.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(rustix::fs::open(path, FOLDER, Mode::empty())?)
    }

    /// Opens the folder of an open handle once more.
    pub(crate) fn of(folder: impl AsFd) -> io::Result<Self> {
        let handle = rustix::fs::openat(folder, ".", FOLDER, Mode::empty())?;
        let stat = rustix::fs::fstat(&handle)?;
        Ok(Self { handle, stat })
    }

    /// The user who owns the folder, if this process is root and the owner is another user. The owner can replace what
    /// the folder contains.
    pub fn other_owner(&self) -> Option<u32> {
        (rustix::process::geteuid().is_root() && self.stat.st_uid != 0).then_some(self.stat.st_uid)
    }

    /// Whether a relative path leads to the folder `other`, and passes no symbolic link and no other file system.
    pub fn contains(&self, path: &Path, other: &Self) -> bool {
        let identity = |stat: &Stat| (stat.st_dev, stat.st_ino);
        let found = self.open_below(path);
        found.is_ok_and(|found| found.is_some_and(|(_, stat)| identity(&stat) == identity(&other.stat)))
    }

    /// Owner and permissions of the folder when it was opened.
    pub(crate) fn stat(&self) -> &Stat {
        &self.stat
    }

    /// Visits all files and folders below the folder, with their relative paths. Leaves out symbolic links, folders of
    /// other file systems, sockets that are directly in the folder, what is removed meanwhile, and the content of
    /// folders that only another user can list.
    pub(crate) fn walk(&self, visit: &mut dyn FnMut(PathBuf, &Stat)) -> io::Result<()> {
        self.walk_in(self.handle.as_fd(), Path::new(""), 0, visit)
    }

    fn walk_in(
        &self,
        folder: BorrowedFd<'_>,
        below: &Path,
        depth: usize,
        visit: &mut dyn FnMut(PathBuf, &Stat),
    ) -> io::Result<()> {
        for entry in Dir::read_from(folder)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let stat = match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat?,
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            if kind == FileType::Symlink || (kind == FileType::Socket && depth == 0) || self.is_mounted(&stat) {
                continue;
            }
            let path = below.join(name);
            visit(path.clone(), &stat);
            if kind != FileType::Directory || depth == DEPTH_MAX {
                continue;
            }
            let inner = match rustix::fs::openat(folder, name, FOLDER | OFlags::NOFOLLOW, Mode::empty()) {
                // The folder was removed or replaced meanwhile.
                Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => continue,
                // Only the owner of the folder can list it.
                Err(Errno::ACCESS) if stat.st_uid != rustix::process::geteuid().as_raw() => continue,
                inner => inner?,
            };
            if !self.is_mounted(&rustix::fs::fstat(&inner)?) {
                self.walk_in(inner.as_fd(), &path, depth + 1, visit)?;
            }
        }
        Ok(())
    }

    /// Opens the file or folder at a relative path; `None` if it does not exist, or if it or a folder above it is a
    /// symbolic link.
    pub(crate) fn open_below(&self, path: &Path) -> io::Result<Option<(OwnedFd, Stat)>> {
        match self.descend(path) {
            Ok((_, stat)) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => Ok(None),
            Ok(opened) => Ok(Some(opened)),
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn descend(&self, path: &Path) -> rustix::io::Result<(OwnedFd, Stat)> {
        let flags = HANDLE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut opened = rustix::fs::openat(&self.handle, ".", flags | OFlags::DIRECTORY, Mode::empty())?;
        let mut stat = rustix::fs::fstat(&opened)?;
        let mut parts = path.components().peekable();
        while let Some(part) = parts.next() {
            let Component::Normal(name) = part else { return Err(Errno::INVAL) };
            let folder = if parts.peek().is_some() { OFlags::DIRECTORY } else { OFlags::empty() };
            opened = rustix::fs::openat(&opened, name, flags | folder, Mode::empty())?;
            stat = rustix::fs::fstat(&opened)?;
            if self.is_mounted(&stat) {
                return Err(Errno::XDEV);
            }
        }
        Ok((opened, stat))
    }

    /// Whether `stat` belongs to a folder of another file system. Only folders are compared: on overlayfs, a file may
    /// have the device of the layer that contains it.
    fn is_mounted(&self, stat: &Stat) -> bool {
        FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_dev != self.stat.st_dev
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{owner, private};
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    const USER: u32 = 1234;

    #[test]
    fn changes_concern_the_folder_that_was_searched_when_its_path_leads_elsewhere() {
        let top = tempfile::tempdir().unwrap();
        let path = |name: &str| top.path().join(name);
        for name in ["store", "victim"] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join("file"), b"").unwrap();
            fs::set_permissions(path(name).join("file"), Permissions::from_mode(0o644)).unwrap();
        }
        chown(path("store"), Some(USER), Some(USER)).unwrap();
        let folder = SearchedFolder::open(&path("store")).unwrap();
        let (exposed, misowned) = (private::exposed(&folder).unwrap(), owner::misowned(&folder).unwrap());
        fs::rename(path("store"), path("moved")).unwrap();
        symlink(path("victim"), path("store")).unwrap();
        let file = exposed.iter().find(|one| one.path == Path::new("file")).unwrap();
        assert!(private::close(&folder, file).unwrap());
        assert!(owner::give_back(&folder, &misowned[0]).unwrap());
        let state = |name: &str| {
            let metadata = fs::metadata(path(name).join("file")).unwrap();
            (metadata.uid(), metadata.mode() & 0o777)
        };
        assert_eq!((state("moved"), state("victim")), ((USER, 0o600), (0, 0o644)));
        assert!(owner::misowned(&folder).unwrap().is_empty());
    }

    #[test]
    fn folders_of_other_file_systems_are_left_alone() {
        let folder = SearchedFolder::open(Path::new("/")).unwrap();
        let proc = rustix::fs::stat("/proc/self").unwrap();
        assert!(folder.is_mounted(&proc), "procfs is another file system");
        assert_eq!(folder.open_below(Path::new("proc")).err().and_then(|e| e.raw_os_error()), Some(18));
        assert!(folder.open_below(Path::new("proc/self")).is_err());
        // In the folder itself, all files are found.
        let own = tempfile::tempdir().unwrap();
        fs::create_dir(own.path().join("inner")).unwrap();
        fs::write(own.path().join("inner/file"), b"").unwrap();
        let mut found = Vec::new();
        let folder = SearchedFolder::open(own.path()).unwrap();
        folder.walk(&mut |path, _| found.push(path)).unwrap();
        assert_eq!(found, ["inner", "inner/file"].map(PathBuf::from));
    }
}
