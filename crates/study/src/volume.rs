//! A file system that is larger than the medium: ext4 on a sparse file, mounted through a loop device. Reservations of
//! hundreds of GiB fit on it although nothing of that size is ever written.
//!
//! What must hold: it is unmounted and its file removed when the value is dropped, also when a study fails or is
//! interrupted. Mounting needs root.

use crate::error::{Doing, Error, Result};
use crate::process;
use crate::scratch::Scratch;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Tries of unmounting: a server that was killed may not be gone from the kernel's lists at once.
const UNMOUNT_TRIES: u32 = 50;

/// The mounted file system.
#[derive(Debug)]
pub struct Volume {
    image: PathBuf,
    folder: PathBuf,
}

impl Volume {
    /// Makes and mounts one of `size` bytes.
    pub fn new(scratch: &Scratch, name: &str, size: u64) -> Result<Volume> {
        let (image, folder) = (scratch.path(&format!("{name}.img")), scratch.path(name));
        let doing = || format!("making {}", image.display());
        File::create(&image).doing(doing)?.set_len(size).doing(doing)?;
        fs::create_dir(&folder).doing(|| format!("creating {}", folder.display()))?;
        // Few inodes, and their tables left as they are: a sparse file reads as zeros.
        let options = ["-q", "-F", "-m", "0", "-N", "65536", "-E", "lazy_itable_init=1,nodiscard"];
        process::run(Command::new("mkfs.ext4").args(options).arg(&image))?;
        let mounted = process::run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&folder));
        if let Err(error) = mounted {
            return Err(Error::Usage(format!(
                "{error}; without root choose a work folder (--work) whose file system has the room"
            )));
        }
        Ok(Volume { image, folder })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Not by `process`, which starts nothing more after an interruption.
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
        // The folder only once it is empty: another volume may take its place.
        let _ = fs::remove_dir(&self.folder);
        let _ = fs::remove_file(&self.image);
    }
}

/// Bytes that a user may still write to the file system of a folder.
pub fn room(path: &Path) -> Result<u64> {
    let status = rustix::fs::statvfs(path).doing(|| format!("asking for the room at {}", path.display()))?;
    Ok(status.f_bavail * status.f_frsize)
}
