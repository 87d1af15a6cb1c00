//! A file system that is larger than the storage: ext4 on a sparse file, mounted through a loop device. Hundreds of GiB
//! can be reserved on this file system, because only a small part of them is ever written.
//!
//! When a [`Volume`] is dropped, it is unmounted and its file is removed, also if a study fails or is interrupted.
//! Mounting needs root.

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
}

impl Volume {
    /// Creates and mounts a file system of `size` bytes.
    pub fn new(scratch: &Scratch, name: &str, size: u64) -> Result<Volume> {
        let (image, folder) = (scratch.path(&format!("{name}.img")), scratch.path(name));
        let doing = || format!("making {}", image.display());
        File::create(&image).doing(doing)?.set_len(size).doing(doing)?;
        fs::create_dir(&folder).doing(|| format!("creating {}", folder.display()))?;
        // The file system has few inodes, and their tables are not written, because a sparse file reads as zeros.
        let options = ["-q", "-F", "-m", "0", "-N", "65536", "-E", "lazy_itable_init=1,nodiscard"];
        process::run(Command::new("mkfs.ext4").args(options).arg(&image))?;
        let mounted = attach(&image).and_then(|device| {
            let mounted = process::run(Command::new("mount").arg(&device).arg(&folder));
            // The device is detached at the end of the mount.
            let detached = process::run(Command::new("losetup").arg("--detach").arg(&device));
            mounted.and(detached)
        });
        if let Err(error) = mounted {
            return Err(Error::Usage(format!(
                "{error}; without root choose a work folder (--work) whose file system has the space"
            )));
        }
        Ok(Volume { image, folder })
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
        let _ = fs::remove_file(&self.image);
    }
}

/// Bytes available to a user on the file system of a folder.
pub fn room(path: &Path) -> Result<u64> {
    let status = rustix::fs::statvfs(path).doing(|| format!("querying the free space at {}", path.display()))?;
    Ok(status.f_bavail * status.f_frsize)
}
