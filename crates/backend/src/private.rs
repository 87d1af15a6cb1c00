//! Files and folders that only their owner can access, whatever the umask of the process is.
//!
//! 1. What this module creates has its final permissions from the moment it exists. If permissions were removed
//!    afterwards, another process could open the file before that.
//! 2. What root creates in a folder of another user belongs to that user ([`crate::owner`]), except for
//!    [`create_folder_of_caller`].
//! 3. [`exposed`] and [`close`] concern only what is in the folder itself ([`crate::searched`]).

use crate::owner::Place;
use crate::regular;
use crate::searched::SearchedFolder;
use parking_lot::Mutex;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::FdFlags;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Permissions of group and others.
const OTHERS: u32 = 0o077;
/// The permissions of group and others that the folder of a datastore must not have. The permission to traverse the
/// folder without listing it is allowed, because a group reaches the server's sockets by it.
const LISTING: u32 = 0o066;

/// Held while the umask of the process is changed, so that two threads restore it in the right order, and while a
/// program is started, so that the program inherits only the open files that are meant for it.
static UMASK: Mutex<()> = Mutex::new(());

/// Creates a folder.
pub fn create_folder(path: &Path) -> io::Result<()> {
    Place::of_root(path)?.map_or_else(|| create_folder_of_caller(path), |place| place.create_folder())
}

/// Creates a folder that belongs to the user of this process, also in a folder of another user.
pub fn create_folder_of_caller(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

/// Creates a folder and its missing parents; an existing folder is not an error.
pub fn create_folders(path: &Path) -> io::Result<()> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    path.parent().map_or(Ok(()), create_folders)?;
    match create_folder(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        created => created,
    }
}

/// Creates a file that does not exist.
pub fn create_new(path: &Path) -> io::Result<File> {
    match Place::of_root(path)? {
        Some(place) => place.open(OFlags::RDWR | OFlags::CREATE | OFlags::EXCL),
        None => OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path),
    }
}

/// Opens a file for writing; creates it if it does not exist, and empties it otherwise.
pub fn create(path: &Path) -> io::Result<File> {
    open(path, true)
}

/// Opens a file for writing and keeps its content; creates the file if it does not exist.
pub fn open_or_create(path: &Path) -> io::Result<File> {
    open(path, false)
}

/// Opens a file for writing, and creates it if it does not exist. In a folder of another user, root does not follow a
/// symbolic link of this name.
fn open(path: &Path, truncate: bool) -> io::Result<File> {
    let Some(place) = Place::of_root(path)? else {
        return OpenOptions::new().write(true).create(true).truncate(truncate).mode(0o600).open(path);
    };
    let emptied = if truncate { OFlags::TRUNC } else { OFlags::empty() };
    place.open(OFlags::WRONLY | OFlags::CREATE | emptied)
}

/// Opens a file for reading, without waiting for the other end of a pipe. In a folder of another user, root does not
/// follow a symbolic link of this name.
pub(crate) fn open_to_read(path: &Path) -> io::Result<File> {
    match Place::of_root(path)? {
        Some(place) => place.open(OFlags::RDONLY | OFlags::NONBLOCK),
        None => regular::open(path),
    }
}

/// Replaces the content of a file, not atomically and not durably.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    create(path)?.write_all(bytes)
}

/// Starts a program. The files that it creates are private unless it changes their permissions itself.
///
/// The umask belongs to the process, so files that other threads create meanwhile have no more permissions than these.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    spawn_with(command, &[])
}

/// As [`spawn`]; the program also gets open files, with the numbers that they have in this process. Programs that other
/// threads start with these functions meanwhile do not get them.
pub fn spawn_with(command: &mut Command, files: &[BorrowedFd<'_>]) -> io::Result<Child> {
    let _alone = UMASK.lock();
    let inherit = |flags: FdFlags| files.iter().try_for_each(|file| rustix::io::fcntl_setfd(file, flags));
    inherit(FdFlags::empty())?;
    let before = rustix::process::umask(Mode::from_raw_mode(OTHERS));
    let child = command.spawn();
    rustix::process::umask(before);
    inherit(FdFlags::CLOEXEC)?;
    child
}

/// Whether all users may create files in a folder, and only their owners may remove them, as in `/tmp`.
pub fn is_shared_folder(path: &Path) -> bool {
    const SHARED: u32 = 0o1002;
    fs::metadata(path).is_ok_and(|metadata| metadata.mode() & SHARED == SHARED)
}

/// Removes the permissions of other users from a folder. Returns whether there were any.
pub fn close_folder(path: &Path) -> io::Result<bool> {
    let mode = fs::metadata(path)?.mode() & 0o7777;
    if mode & OTHERS == 0 {
        return Ok(false);
    }
    fs::set_permissions(path, Permissions::from_mode(mode & !OTHERS)).map(|()| true)
}

/// Permits a group, and other users too with `all`, to traverse a folder without listing it.
pub fn let_traverse(path: &Path, group: Option<u32>, all: bool) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    if let Some(group) = group.filter(|group| *group != metadata.gid()) {
        std::os::unix::fs::chown(path, None, Some(group))?;
    }
    let mode = metadata.mode() & 0o7777;
    let wanted = mode | if all { 0o011 } else { 0o010 };
    if wanted != mode {
        fs::set_permissions(path, Permissions::from_mode(wanted))?;
    }
    Ok(())
}

/// A file or folder that other users can access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// The path below the folder that was searched; empty for that folder itself.
    pub path: PathBuf,
    /// The permission bits of the file or folder.
    pub mode: u32,
    /// The permission bits that the file or folder should have.
    pub wanted: u32,
}

/// The files and folders in `folder` that other users can access, and `folder` itself if they can list it, sorted by
/// path. Sockets directly in the folder are left out, because users choose their permissions. Files that are removed
/// during the call are left out too, and so is the content of folders that this process may not list: such a folder
/// belongs to another user, which [`crate::owner::misowned`] reports.
pub fn exposed(folder: &SearchedFolder) -> io::Result<Vec<Exposed>> {
    let mut found = Vec::new();
    let mode = folder.stat().st_mode & 0o7777;
    if mode & LISTING != 0 {
        found.push(Exposed { path: PathBuf::new(), mode, wanted: mode & !LISTING });
    }
    folder.walk(&mut |path, stat| {
        let mode = stat.st_mode & 0o7777;
        if mode & OTHERS != 0 {
            found.push(Exposed { path, mode, wanted: mode & !OTHERS });
        }
    })?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Removes the permissions of other users. Returns false if the file no longer exists, or if a symbolic link has
/// replaced the file or a folder above it.
///
/// # Errors
/// `Unsupported` if the file has several names, and does not belong to the owner of the folder: the owner may have made
/// a hard link in the folder to a file that other users share in another folder.
pub fn close(folder: &SearchedFolder, exposed: &Exposed) -> io::Result<bool> {
    let Some((file, stat)) = folder.open_below(&exposed.path)? else { return Ok(false) };
    let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    if !is_folder && stat.st_nlink > 1 && stat.st_uid != folder.stat().st_uid {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the file has several names"));
    }
    change_mode(&file, exposed.wanted).map(|()| true)
}

/// Changes the permissions of an open file. `fchmod` refuses handles without access; the name that procfs gives a
/// handle leads to the file that was opened.
#[cfg(target_os = "linux")]
fn change_mode(file: &OwnedFd, mode: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    fs::set_permissions(format!("/proc/self/fd/{}", file.as_raw_fd()), Permissions::from_mode(mode))
}

#[cfg(not(target_os = "linux"))]
fn change_mode(file: &OwnedFd, mode: u32) -> io::Result<()> {
    Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn searched(folder: &Path) -> SearchedFolder {
        SearchedFolder::open(folder).unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn what_is_created_is_private_whatever_the_umask_is() {
        let folder = tempfile::tempdir().unwrap();
        close_folder(folder.path()).unwrap();
        let path = |name: &str| folder.path().join(name);
        create_folder(&path("a")).unwrap();
        create_folders(&path("b/c")).unwrap();
        write(&path("d"), b"d").unwrap();
        drop(create_new(&path("e")).unwrap());
        drop(open_or_create(&path("f")).unwrap());
        for name in ["a", "b", "b/c"] {
            assert_eq!(mode(&path(name)), 0o700, "{name}");
        }
        for name in ["d", "e", "f"] {
            assert_eq!(mode(&path(name)), 0o600, "{name}");
        }
        let mut command = Command::new("sh");
        command.args(["-c", "umask; echo content >g; mkdir h"]).current_dir(folder.path());
        assert!(spawn(&mut command).unwrap().wait().unwrap().success());
        assert_eq!((mode(&path("g")), mode(&path("h"))), (0o600, 0o700));
        assert!(exposed(&searched(folder.path())).unwrap().is_empty());
    }

    #[test]
    fn a_program_gets_the_files_that_are_given_to_it_and_no_others() {
        use std::os::fd::{AsFd, AsRawFd};
        let folder = tempfile::tempdir().unwrap();
        let [given, other] = ["given", "other"].map(|name| create_new(&folder.path().join(name)).unwrap());
        let mut command = Command::new("sh");
        let script = "echo content >&$1; [ ! -e /proc/self/fd/$2 ]";
        command.args(["-c", script, "sh", &given.as_raw_fd().to_string(), &other.as_raw_fd().to_string()]);
        assert!(spawn_with(&mut command, &[given.as_fd()]).unwrap().wait().unwrap().success());
        assert_eq!(fs::read(folder.path().join("given")).unwrap(), b"content\n");
        assert!(rustix::io::fcntl_getfd(&given).unwrap().contains(FdFlags::CLOEXEC));
    }

    #[test]
    fn a_file_of_another_owner_with_several_names_is_not_closed() {
        let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let shared = elsewhere.path().join("shared");
        fs::write(&shared, b"").unwrap();
        fs::set_permissions(&shared, Permissions::from_mode(0o664)).unwrap();
        fs::hard_link(&shared, folder.path().join("file")).unwrap();
        std::os::unix::fs::chown(folder.path(), Some(1234), Some(1234)).unwrap();
        let found = exposed(&searched(folder.path())).unwrap();
        let file = found.iter().find(|one| one.path == Path::new("file")).unwrap();
        let refused = close(&searched(folder.path()), file).unwrap_err();
        assert_eq!((refused.kind(), mode(&shared)), (io::ErrorKind::Unsupported, 0o664));
        // A file of the owner of the folder is closed.
        std::os::unix::fs::chown(&shared, Some(1234), Some(1234)).unwrap();
        assert!(close(&searched(folder.path()), file).unwrap());
    }

    #[test]
    fn what_others_can_access_is_found_and_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        create_folders(&path("machines/web")).unwrap();
        write(&path("machines/web/memory"), b"secret").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path("machines/link")).unwrap();
        drop(std::os::unix::net::UnixListener::bind(path("nbd.sock")).unwrap());
        let set = |name: &str, mode| fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
        set("nbd.sock", 0o666);
        // A group may traverse the folder of a datastore to reach its sockets.
        set("", 0o711);
        assert!(exposed(&searched(folder.path())).unwrap().is_empty());
        set("", 0o755);
        set("machines/web/memory", 0o640);
        set("machines", 0o711);
        let found = exposed(&searched(folder.path())).unwrap();
        let told: Vec<_> = found.iter().map(|one| (one.path.to_str().unwrap(), one.mode, one.wanted)).collect();
        assert_eq!(told, [("", 0o755, 0o711), ("machines", 0o711, 0o700), ("machines/web/memory", 0o640, 0o600)]);
        found.iter().for_each(|one| assert!(close(&searched(folder.path()), one).unwrap()));
        assert!(exposed(&searched(folder.path())).unwrap().is_empty());
        assert_eq!(mode(&path("machines/web/memory")), 0o600);
        // A socket that is not directly in the folder, and a file without permissions for its owner.
        drop(std::os::unix::net::UnixListener::bind(path("machines/qmp.sock")).unwrap());
        set("machines/qmp.sock", 0o666);
        set("machines/web/memory", 0o044);
        let found = exposed(&searched(folder.path())).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        found.iter().for_each(|one| assert!(close(&searched(folder.path()), one).unwrap()));
        assert_eq!((mode(&path("machines/qmp.sock")), mode(&path("machines/web/memory"))), (0o600, 0));
        set("", 0o755);
        assert!(close_folder(folder.path()).unwrap() && !close_folder(folder.path()).unwrap());
    }

    #[test]
    fn nothing_outside_the_folder_is_closed_through_a_link_that_replaced_a_part_of_the_path() {
        let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = |name: &str| folder.path().join(name);
        let foreign = outside.path().join("memory");
        write(&foreign, b"foreign").unwrap();
        fs::set_permissions(&foreign, Permissions::from_mode(0o644)).unwrap();
        create_folders(&path("machines/web")).unwrap();
        write(&path("machines/web/memory"), b"secret").unwrap();
        fs::set_permissions(path("machines/web/memory"), Permissions::from_mode(0o644)).unwrap();
        let found = exposed(&searched(folder.path())).unwrap();
        let file = found.iter().find(|one| one.path.ends_with("memory")).unwrap();
        // The file is replaced, then the folder above it.
        fs::remove_file(path("machines/web/memory")).unwrap();
        std::os::unix::fs::symlink(&foreign, path("machines/web/memory")).unwrap();
        assert!(!close(&searched(folder.path()), file).unwrap());
        fs::remove_dir_all(path("machines/web")).unwrap();
        std::os::unix::fs::symlink(outside.path(), path("machines/web")).unwrap();
        assert!(!close(&searched(folder.path()), file).unwrap());
        assert_eq!(mode(&foreign), 0o644);
        fs::remove_file(path("machines/web")).unwrap();
        assert!(!close(&searched(folder.path()), file).unwrap());
        let up = Exposed { path: "../memory".into(), mode: 0o644, wanted: 0o600 };
        assert!(close(&searched(folder.path()), &up).is_err());
    }
}
