//! File systems in files, mounted through a loop device: a new ext4 or btrfs on a sparse file, or that of a disk image.
//! A new one may be larger than the storage: hundreds of GiB can be reserved, because only a small part of them is ever
//! written.
//!
//! When a [`Volume`] is dropped, it is unmounted, also if a study fails or is interrupted. The file of a new file
//! system is then removed. Mounting needs root.

use crate::error::{Doing, Error, Result};
use crate::process;
use crate::scratch::Scratch;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Attempts to unmount. More than one attempt may be needed, because a killed server may have files open for a moment.
const UNMOUNT_TRIES: u32 = 50;

/// A mounted file system.
#[derive(Debug)]
pub struct Volume {
    image: PathBuf,
    folder: PathBuf,
    /// Whether the file stays when the value is dropped.
    keep: bool,
}

impl Volume {
    /// Creates and mounts an ext4 of `size` bytes.
    pub fn new(scratch: &Scratch, name: &str, size: u64) -> Result<Volume> {
        // The file system has few inodes, and their tables are not written, because a sparse file reads as zeros.
        let options = ["-q", "-F", "-m", "0", "-N", "65536", "-E", "lazy_itable_init=1,nodiscard"];
        Self::make(scratch, name, size, Command::new("mkfs.ext4").args(options), "defaults")
    }

    /// Creates and mounts a btrfs of `size` bytes with these mount options.
    pub fn btrfs(scratch: &Scratch, name: &str, size: u64, options: &str) -> Result<Volume> {
        Self::make(scratch, name, size, Command::new("mkfs.btrfs").args(["-q", "--nodiscard"]), options)
    }

    /// Mounts the file system of a disk image that has no partitions. The image stays when the value is dropped.
    pub fn open(scratch: &Scratch, name: &str, image: &Path, options: &str) -> Result<Volume> {
        Self::mount(image.into(), scratch.path(name), true, options)
    }

    fn make(scratch: &Scratch, name: &str, size: u64, format: &mut Command, options: &str) -> Result<Volume> {
        let image = scratch.path(&format!("{name}.img"));
        let doing = || format!("making {}", image.display());
        File::create(&image).doing(doing)?.set_len(size).doing(doing)?;
        process::run(format.arg(&image))?;
        Self::mount(image, scratch.path(name), false, options)
    }

    fn mount(image: PathBuf, folder: PathBuf, keep: bool, options: &str) -> Result<Volume> {
        fs::create_dir(&folder).doing(|| format!("creating {}", folder.display()))?;
        let mounted = attach(&image).and_then(|device| {
            let mounted = process::run(Command::new("mount").args(["-o", options]).arg(&device).arg(&folder));
            // The device is detached at the end of the mount.
            let detached = process::run(Command::new("losetup").arg("--detach").arg(&device));
            mounted.and(detached)
        });
        if let Err(error) = mounted {
            return Err(Error::Usage(format!(
                "{error}; without root choose a work folder (--work) whose file system has the space"
            )));
        }
        Ok(Volume { image, folder, keep })
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.folder
    }
}

/// Makes a loop device of a file. The device bypasses the page cache if the file can. Otherwise all data would be
/// cached twice, and each flush would also write what the file system above has written out long before, unlike with a
/// disk.
fn attach(image: &Path) -> Result<PathBuf> {
    let attach = |direct: &str| {
        let mut command = Command::new("losetup");
        process::run(command.args(["--find", "--show", direct]).arg(image))
    };
    let device = attach("--direct-io=on").or_else(|_| attach("--direct-io=off"))?;
    Ok(PathBuf::from(device.trim()))
}

impl Drop for Volume {
    fn drop(&mut self) {
        // The command is run directly, because `process` starts no further children after an interruption.
        let unmount = || {
            let mut command = Command::new("umount");
            command.arg(&self.folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        let done = (0..UNMOUNT_TRIES).any(|_| {
            let done = unmount();
            if !done {
                std::thread::sleep(Duration::from_millis(100));
            }
            done
        });
        if !done {
            eprintln!("cannot unmount {}", self.folder.display());
        }
        // The folder is removed only if it is empty, because another volume may be mounted in it.
        let _ = fs::remove_dir(&self.folder);
        if !self.keep {
            let _ = fs::remove_file(&self.image);
        }
    }
}

/// Bytes available to a user on the file system of a folder.
pub fn room(path: &Path) -> Result<u64> {
    let status = rustix::fs::statvfs(path).doing(|| format!("querying the free space at {}", path.display()))?;
    Ok(status.f_bavail * status.f_frsize)
}
