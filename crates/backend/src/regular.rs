//! Reading of files that others may have written, or whose names users give, such as descriptions and lists of rules.
//! Such a name may be that of a pipe or a device, and reading it may never end.

use crate::local::LocalDirectory;
use crate::{private, replace};
use error::{Error, ErrorKind, IoContext, Result};
use rustix::fs::{Mode, OFlags};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Reads a regular file of at most `most` bytes. `what` is what the file should be, for the error.
///
/// # Errors
/// `Invalid` for another kind of file and for a longer file, and errors of the system. All of them name the file.
pub fn read(path: &Path, most: u64, what: &str) -> Result<Vec<u8>> {
    read_opened(open(path), path, most, what)
}

/// As [`read`], for a file of a datastore. Root does not follow a symbolic link of another user.
pub fn read_own(path: &Path, most: u64, what: &str) -> Result<Vec<u8>> {
    read_opened(private::open_to_read(path), path, most, what)
}

/// As [`read`], for a canonical path (as [`std::fs::canonicalize`] gives it): a link that was put there after the path
/// was resolved is not followed.
pub fn read_resolved(path: &Path, most: u64, what: &str) -> Result<Vec<u8>> {
    read_opened(open_resolved(path), path, most, what)
}

/// Opens a file by its canonical path, component by component, and follows no link.
fn open_resolved(path: &Path) -> io::Result<File> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
    let folder = LocalDirectory::open_resolved(replace::folder_of(path))?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder.handle(), name, flags, Mode::empty())?.into())
}

/// Opens a file for reading, without waiting for the other end of a pipe.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    // The flag has no effect on a regular file.
    OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)
}

fn read_opened(opened: io::Result<File>, path: &Path, most: u64, what: &str) -> Result<Vec<u8>> {
    let reading = || format!("reading '{}'", path.display());
    let wrong = |why: String| Error::new(ErrorKind::Invalid, format!("'{}' {why}: that is no {what}", path.display()));
    let file = opened.during(reading)?;
    let metadata = file.metadata().during(reading)?;
    if !metadata.is_file() {
        return Err(wrong("is a folder, a pipe or a device".into()));
    }
    if metadata.len() > most {
        return Err(wrong(format!("has {} bytes, and at most {most} are read", metadata.len())));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes).during(reading)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn pipes_folders_and_long_files_are_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let long = folder.path().join("long");
        std::fs::write(&long, "12345").unwrap();
        assert_eq!(read(&long, 5, "list").unwrap(), b"12345");
        for (path, why) in [
            (&*pipe, "is a folder, a pipe or a device: that is no list"),
            (folder.path(), "is a folder, a pipe or a device: that is no list"),
            (&*long, "has 5 bytes, and at most 4 are read: that is no list"),
            (Path::new("/dev/zero"), "is a folder, a pipe or a device: that is no list"),
        ] {
            let error = read(path, 4, "list").unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.to_string().ends_with(why), "{error}");
        }
        assert_eq!(read(&folder.path().join("nothing"), 4, "list").unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn no_link_in_a_resolved_path_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("own")).unwrap();
        std::fs::write(root.join("own/file"), "own").unwrap();
        assert_eq!(read_resolved(&root.join("own/file"), 5, "list").unwrap(), b"own");
        std::os::unix::fs::symlink(root.join("own/file"), root.join("link")).unwrap();
        std::os::unix::fs::symlink(root.join("own"), root.join("linked")).unwrap();
        for path in ["link", "linked/file"] {
            assert!(read(&root.join(path), 5, "list").is_ok());
            assert!(read_resolved(&root.join(path), 5, "list").is_err(), "{path}");
        }
    }
}
