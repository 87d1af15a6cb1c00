//! The file systems on which a datastore can be created, and their restrictions.
//!
//! A datastore needs three things: a lock that excludes other processes for as long as its owner writes, flushes that
//! make writes durable, and space that stays reserved, also for overwrites. On a file system that lacks one of the
//! first two, or on which a lack of space stops the whole datastore, a datastore is neither created nor served unless
//! the user forces it. Other commands open an existing datastore on every file system, so that its disks can be moved
//! away.

use crate::foreign::IMAGES;
use crate::location::Location;
use backend::local::{FileSystem, copied_on_write};
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The suitability of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suitability {
    /// The file system is suitable.
    Good,
    /// The file system is usable, with this restriction.
    Limited(&'static str),
    /// A datastore on the file system may lose flushed writes, or stop for lack of space, for this reason.
    Unsuitable(&'static str),
}

/// The file system of a datastore, for messages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystemInfo {
    /// The file system's name.
    pub name: String,
    /// Restrictions; empty if there are none.
    pub warnings: Vec<String>,
}

/// The suitability of a file system; `docs/manual/file-systems.md` has the reasons.
pub fn suitability(kind: FileSystem) -> Suitability {
    use Suitability::{Good, Limited, Unsuitable};
    match kind {
        FileSystem::Ext | FileSystem::Xfs | FileSystem::Btrfs => Good,
        FileSystem::Memory => Limited("it is kept in memory, and nothing of it survives a restart of the machine"),
        FileSystem::Overlay => Limited(
            "it is deleted with its container, and flushes nothing if mounted with 'volatile'; use a host volume",
        ),
        FileSystem::Other(_) => Limited("lamina was not tested on it"),
        FileSystem::Zfs => Unsuitable(
            "it copies on write and does not keep reserved space free: once the pool is full, overwrites and flushes \
             fail, and the datastore stops until it is started again; lamina was not tested on it",
        ),
        FileSystem::Nfs => Unsuitable(
            "a lock there ends without notice when the server or the network is down for long, so that two owners may \
             write, and a write may fail for lack of space after it was reserved",
        ),
        FileSystem::Smb => {
            Unsuitable("its locks and its flushes depend on mount options and on the server, and it reserves no space")
        }
        FileSystem::Network => Unsuitable("its locks may end without notice, so that two owners may write"),
        FileSystem::Fuse => Unsuitable(
            "locks, flushes and reserved space depend on the program that implements it, which cannot be queried",
        ),
    }
}

/// Refuses a new datastore in a local folder if the file system there is unsuitable.
pub fn check_for_new(location: &Location) -> Result<()> {
    let Some(path) = location.local_path() else { return Ok(()) };
    // If the folder does not exist yet, the file system of its nearest existing parent folder is checked.
    let there = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let there = if there.as_os_str().is_empty() { Path::new(".") } else { there };
    let kind = FileSystem::of(there).during(|| format!("determining the file system of {}", there.display()))?;
    refuse_unsuitable(path, kind, "use ext4, XFS or btrfs, or allow it with --any-file-system")
}

/// Refuses to serve a datastore in a local folder if the file system there is unsuitable.
pub fn check_to_serve(location: &Location) -> Result<()> {
    let Some(path) = location.local_path().filter(|path| path.exists()) else { return Ok(()) };
    let kind = FileSystem::of(path).during(|| format!("determining the file system of {}", path.display()))?;
    refuse_unsuitable(
        path,
        kind,
        "move the datastore's folder to ext4, XFS or btrfs while nothing has it open, or serve it there with \
         --any-file-system",
    )
}

/// The refusal of an unsuitable file system; `advice` says what to do.
fn refuse_unsuitable(path: &Path, kind: FileSystem, advice: &str) -> Result<()> {
    match suitability(kind) {
        Suitability::Good | Suitability::Limited(_) => Ok(()),
        Suitability::Unsuitable(why) => {
            let text = format!("{} is on {}: {why}; {advice}", path.display(), kind.name());
            Err(Error::new(ErrorKind::Unsupported, text))
        }
    }
}

/// The file system of an open datastore; empty if the datastore is not in a local folder.
pub fn look_at(location: &Location) -> FileSystemInfo {
    let Some(path) = location.local_path() else { return FileSystemInfo::default() };
    let Ok(kind) = FileSystem::of(path) else { return FileSystemInfo::default() };
    let mut warnings = Vec::new();
    match suitability(kind) {
        Suitability::Good => {}
        Suitability::Limited(why) | Suitability::Unsuitable(why) => {
            warnings.push(format!("the datastore is on {}: {why}", kind.name()));
        }
    }
    let copied = copied_files(path);
    if let Some(first) = copied.first() {
        warnings.push(format!(
            "btrfs copies files of the datastore on write ({first}, {} in all): once it is full, overwrites and \
             flushes may fail; 'lamina disk migrate DISK --to PATH' moves disks to a datastore whose files are \
             overwritten in place",
            copied.len()
        ));
    }
    FileSystemInfo { name: kind.name(), warnings }
}

/// Files of the datastore that btrfs copies on write.
fn copied_files(path: &Path) -> Vec<String> {
    let own = |name: &str| {
        ["superblock", "journal", "checkpoint", "map", "map.table", "map.summary", "catalog"].contains(&name)
            || name.starts_with("data.")
    };
    let mut copied = copied_on_write(path, &own).unwrap_or_default();
    let folders = std::fs::read_dir(path.join(IMAGES)).into_iter().flatten().filter_map(|entry| entry.ok());
    for folder in folders {
        let images = copied_on_write(&folder.path(), &|name| name.ends_with(".vmdk")).unwrap_or_default();
        let folder = folder.file_name().display().to_string();
        copied.extend(images.into_iter().map(|name| format!("{IMAGES}/{folder}/{name}")));
    }
    copied
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn file_systems_with_unsafe_locks_flushes_or_reservations_are_refused_and_untested_ones_limited() {
        use FileSystem as Fs;
        for good in [Fs::Ext, Fs::Xfs, Fs::Btrfs] {
            assert_eq!(suitability(good), Suitability::Good);
        }
        for limited in [Fs::Memory, Fs::Overlay, Fs::Other(0x1234)] {
            assert!(matches!(suitability(limited), Suitability::Limited(_)), "{limited:?}");
        }
        for bad in [Fs::Zfs, Fs::Nfs, Fs::Smb, Fs::Network, Fs::Fuse] {
            assert!(matches!(suitability(bad), Suitability::Unsuitable(_)), "{bad:?}");
        }
        // The number that ZFS returns in `statfs`.
        let kind = Fs::of_magic(0x2fc1_2fc1);
        let refused = refuse_unsuitable(Path::new("/tank/store"), kind, "advice").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        let text = refused.to_string();
        assert!(text.contains("/tank/store is on ZFS") && text.contains("the pool is full"), "{text}");
        assert!(text.ends_with("; advice"), "{text}");
    }

    #[test]
    fn a_missing_folder_counts_as_on_the_file_system_of_its_parent() {
        let memory = Path::new("/dev/shm");
        if memory.is_dir() {
            check_for_new(&memory.join("no/such/folder").into()).unwrap();
            check_to_serve(&memory.into()).unwrap();
            // The opening reports a missing folder.
            check_to_serve(&memory.join("no/such/folder").into()).unwrap();
            let info = look_at(&memory.into());
            assert_eq!((info.name.as_str(), info.warnings.len()), ("tmpfs", 1));
        }
        // The path is not a folder.
        check_for_new(&Path::new("relative/that/is/not/there").into()).unwrap();
    }
}
