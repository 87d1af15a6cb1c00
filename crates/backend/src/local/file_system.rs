//! Which file system holds a folder, and whether its files are overwritten in place.

use crate::validate::check_name;
use std::io;
use std::path::Path;

/// The kinds of file systems that lamina distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext2, ext3 or ext4, which have one number in `statfs`.
    Ext,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
    /// ZFS.
    Zfs,
    /// tmpfs or ramfs: in memory.
    Memory,
    /// overlayfs, as in containers.
    Overlay,
    /// NFS.
    Nfs,
    /// SMB, by any of its clients.
    Smb,
    /// Another network file system: Ceph, 9P, AFS.
    Network,
    /// A user-space file system (FUSE).
    Fuse,
    /// Any other file system, by its number in `statfs`.
    Other(u64),
}

impl FileSystem {
    /// The kind with this number in `statfs` (from `linux/magic.h`; ZFS defines its own number).
    pub fn of_magic(magic: u64) -> Self {
        match magic {
            0xef53 => Self::Ext,
            0x5846_5342 => Self::Xfs,
            0x9123_683e => Self::Btrfs,
            0x2fc1_2fc1 => Self::Zfs,
            0x0102_1994 | 0x8584_58f6 => Self::Memory,
            0x794c_7630 => Self::Overlay,
            0x6969 => Self::Nfs,
            0xff53_4d42 | 0xfe53_4d42 | 0x517b => Self::Smb,
            0x00c3_6400 | 0x0102_1997 | 0x5346_414f | 0x6b41_4653 => Self::Network,
            0x6573_5546 => Self::Fuse,
            other => Self::Other(other),
        }
    }

    /// The file system of a folder or file.
    #[cfg(target_os = "linux")]
    pub fn of(path: &Path) -> io::Result<Self> {
        let found = rustix::io::retry_on_intr(|| rustix::fs::statfs(path))?;
        // Signed on some architectures, and of 32 bits in any case.
        Ok(Self::of_magic(found.f_type as u64 & 0xffff_ffff))
    }

    /// The file system of a folder or file: unknown on this operating system.
    #[cfg(not(target_os = "linux"))]
    pub fn of(_path: &Path) -> io::Result<Self> {
        Ok(Self::Other(0))
    }

    /// The name of the file system, for messages.
    pub fn name(self) -> String {
        match self {
            Self::Ext => "ext4".into(),
            Self::Xfs => "XFS".into(),
            Self::Btrfs => "btrfs".into(),
            Self::Zfs => "ZFS".into(),
            Self::Memory => "tmpfs".into(),
            Self::Overlay => "overlayfs".into(),
            Self::Nfs => "NFS".into(),
            Self::Smb => "SMB".into(),
            Self::Network => "a network file system".into(),
            Self::Fuse => "FUSE".into(),
            Self::Other(magic) => format!("unknown ({magic:#x})"),
        }
    }
}

/// The files of a folder that btrfs copies on write: an overwrite of them allocates new space. Only files that `wanted`
/// names are listed, and none on other file systems.
pub fn copied_on_write(folder: &Path, wanted: &dyn Fn(&str) -> bool) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    if FileSystem::of(folder)? != FileSystem::Btrfs {
        return Ok(names);
    }
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        // A file may be removed during the listing.
        if let Some(name) = name.to_str().filter(|name| wanted(name))
            && is_copied_on_write(folder, name).unwrap_or(false)
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(target_os = "linux")]
fn is_copied_on_write(folder: &Path, name: &str) -> io::Result<bool> {
    use rustix::fs::{IFlags, Mode, OFlags};
    check_name(name)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder.join(name), flags, Mode::empty())?;
    Ok(!rustix::fs::ioctl_getflags(&file)?.contains(IFlags::NOCOW))
}

#[cfg(not(target_os = "linux"))]
fn is_copied_on_write(_folder: &Path, name: &str) -> io::Result<bool> {
    check_name(name).map(|()| false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_recognised_by_their_numbers() {
        let known = [
            (0xef53, FileSystem::Ext),
            (0x5846_5342, FileSystem::Xfs),
            (0x9123_683e, FileSystem::Btrfs),
            (0x2fc1_2fc1, FileSystem::Zfs),
            (0x0102_1994, FileSystem::Memory),
            (0x6969, FileSystem::Nfs),
            (0xfe53_4d42, FileSystem::Smb),
            (0x6573_5546, FileSystem::Fuse),
            (0x794c_7630, FileSystem::Overlay),
            (0x00c3_6400, FileSystem::Network),
        ];
        for (magic, kind) in known {
            assert_eq!(FileSystem::of_magic(magic), kind);
        }
        assert_eq!(FileSystem::of_magic(0x1234).name(), "unknown (0x1234)");
    }

    #[test]
    fn tmpfs_is_recognised() {
        let folder = Path::new("/dev/shm");
        if folder.is_dir() {
            assert_eq!(FileSystem::of(folder).unwrap(), FileSystem::Memory);
            assert!(copied_on_write(folder, &|_| true).unwrap().is_empty());
        }
    }
}
