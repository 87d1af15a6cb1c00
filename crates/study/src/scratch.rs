//! The work folder of a run, and control over its files in the page cache.
//!
//! Invariants:
//!
//! 1. All files of all sides are in one folder on one file system. Only sockets are elsewhere, because a socket's path
//!    may not exceed 107 bytes.
//! 2. The folder is removed at the end of the run. The folder of a killed run is removed when the next run starts.

use crate::error::{Doing, Result};
use rustix::fs::{Advice, fadvise, syncfs};
use rustix::process::{Pid, test_kill_process};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Greatest depth of a folder tree that is processed.
const DEPTH_MAX: usize = 16;
const PREFIX: &str = "run-";

/// The work folder of this run.
#[derive(Debug)]
pub struct Scratch {
    root: PathBuf,
    sockets: PathBuf,
    keep: bool,
}

impl Scratch {
    /// Creates a folder for this process in `parent`.
    pub fn new(parent: &Path, keep: bool) -> Result<Scratch> {
        fs::create_dir_all(parent).doing(|| format!("creating {}", parent.display()))?;
        let parent = parent.canonicalize().doing(|| format!("resolving {}", parent.display()))?;
        remove_leftovers(&parent);
        let name = format!("{PREFIX}{}", std::process::id());
        let root = parent.join(&name);
        let sockets = std::env::temp_dir().join(format!("lamina-study-{name}"));
        for path in [&root, &sockets] {
            fs::create_dir_all(path).doing(|| format!("creating {}", path.display()))?;
        }
        Ok(Scratch { root, sockets, keep })
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a file or folder in the work folder. The file is not created.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The path of a socket with this name.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.join(name)
    }

    /// Removes a file or folder in the work folder.
    pub fn remove(&self, path: &Path) -> Result<()> {
        let done = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        done.doing(|| format!("removing {}", path.display()))
    }

    /// Writes back all dirty data of this file system, so that no run is slowed down by another run's writes.
    pub fn settle(&self) -> Result<()> {
        let root = File::open(&self.root).doing(|| format!("opening {}", self.root.display()))?;
        syncfs(&root).doing(|| format!("syncing {}", self.root.display()))
    }

    /// Syncs the work folder, and waits until background work on `path` has ended: until the space that `path` occupies
    /// has not changed for a second, but for ten seconds at most.
    pub fn rest(&self, path: &Path) -> Result<()> {
        self.settle()?;
        let mut last = allocated(path)?;
        for _ in 0..10 {
            crate::process::pause(Duration::from_secs(1))?;
            let now = allocated(path)?;
            if now == last {
                break;
            }
            last = now;
        }
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.sockets);
        if self.keep {
            eprintln!("kept {}", self.root.display());
        } else if let Err(e) = fs::remove_dir_all(&self.root) {
            eprintln!("cannot remove {}: {e}", self.root.display());
        }
    }
}

/// Removes the work folders of runs whose process has ended.
fn remove_leftovers(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let id = name.to_str().and_then(|n| n.strip_prefix(PREFIX)).and_then(|n| n.parse().ok());
        if let Some(pid) = id.and_then(Pid::from_raw)
            && test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
        {
            let _ = fs::remove_dir_all(entry.path());
            let _ = fs::remove_dir_all(std::env::temp_dir().join(format!("lamina-study-{PREFIX}{}", pid)));
        }
    }
}

fn visit(path: &Path, depth: usize, each: &mut dyn FnMut(&Path, &fs::Metadata) -> Result<()>) -> Result<()> {
    // A file that a server has removed since it was listed is ignored.
    let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
    each(path, &metadata)?;
    if metadata.is_dir() && depth < DEPTH_MAX {
        for entry in fs::read_dir(path).doing(|| format!("listing {}", path.display()))? {
            visit(&entry.doing(|| format!("listing {}", path.display()))?.path(), depth + 1, each)?;
        }
    }
    Ok(())
}

/// Bytes that a file or tree occupies, as `du` counts them.
pub fn allocated(path: &Path) -> Result<u64> {
    allocated_to(path, &|_| true)
}

/// Bytes that the files and folders selected by `wanted` occupy.
fn allocated_to(path: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<u64> {
    let mut sum = 0;
    visit(path, 0, &mut |path, m| {
        if wanted(path) {
            sum += m.blocks() * 512;
        }
        Ok(())
    })?;
    Ok(sum)
}

/// Drops the clean pages of a file or tree from the page cache. Dirty pages have to be written back before
/// ([`Scratch::settle`]).
pub fn drop_cached(path: &Path) -> Result<()> {
    visit(path, 0, &mut |p, m| {
        if m.is_file() {
            let file = File::open(p).doing(|| format!("opening {}", p.display()))?;
            fadvise(&file, 0, None, Advice::DontNeed).doing(|| format!("dropping the cache of {}", p.display()))?;
        }
        Ok(())
    })
}

/// Reads all allocated data of a file or tree, so that it is in the page cache.
pub fn warm(path: &Path) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    visit(path, 0, &mut |p, m| {
        if m.is_file() { warm_file(p, &mut buffer) } else { Ok(()) }
    })
}

fn warm_file(path: &Path, buffer: &mut [u8]) -> Result<()> {
    let doing = || format!("reading {}", path.display());
    let mut file = File::open(path).doing(doing)?;
    let mut at = 0;
    while let Ok(from) = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
        let to = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(from)).doing(doing)?;
        file.seek(SeekFrom::Start(from)).doing(doing)?;
        let mut left = to.saturating_sub(from);
        while left > 0 {
            let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let got = file.read(&mut buffer[..want]).doing(doing)?;
            if got == 0 {
                break;
            }
            left -= got as u64;
        }
        crate::process::go_on()?;
        at = to;
    }
    Ok(())
}

/// Writes `size` random bytes to a new file and flushes it.
pub fn random_file(path: &Path, size: u64, seed: u64) -> Result<()> {
    use std::io::Write;
    let doing = || format!("writing {}", path.display());
    let mut random = crate::random::Random::new(seed);
    let mut buffer = vec![0; 1 << 20];
    let mut file = File::create(path).doing(doing)?;
    let mut left = size;
    while left > 0 {
        crate::process::go_on()?;
        random.fill(&mut buffer);
        let part = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        file.write_all(&buffer[..part]).doing(doing)?;
        left -= part as u64;
    }
    file.sync_all().doing(doing)
}

/// Bytes that the blocks of a datastore's native disks occupy, without its journal and tables.
pub fn data_allocated(datastore: &Path) -> Result<u64> {
    allocated_to(datastore, &|path| {
        let number = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("data."));
        number.is_some_and(|number| number.bytes().all(|digit| digit.is_ascii_digit()))
    })
}

/// Waits until a file or tree occupies at most `bytes`, but at most for `time`. Returns the occupied bytes and the time
/// taken.
pub fn wait_allocated(path: &Path, bytes: u64, time: Duration) -> Result<(u64, Duration)> {
    wait_until(&|| allocated(path), bytes, time)
}

/// Waits until the blocks of a datastore's native disks occupy at most `bytes`, but at most for `time`. Returns the
/// bytes that they occupy, and the time taken.
pub fn wait_data_allocated(datastore: &Path, bytes: u64, time: Duration) -> Result<(u64, Duration)> {
    wait_until(&|| data_allocated(datastore), bytes, time)
}

fn wait_until(space: &dyn Fn() -> Result<u64>, bytes: u64, time: Duration) -> Result<(u64, Duration)> {
    let began = std::time::Instant::now();
    loop {
        let now = space()?;
        if now <= bytes || began.elapsed() >= time {
            return Ok((now, began.elapsed()));
        }
        crate::process::pause(Duration::from_millis(20))?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_run_removes_its_files_and_those_of_killed_runs() {
        let parent = std::env::temp_dir().join(format!("study-scratch-{}", std::process::id()));
        // This pid is above the kernel's limit, so there is no such process.
        fs::create_dir_all(parent.join("run-2000000000")).unwrap();
        let scratch = Scratch::new(&parent, false).unwrap();
        assert!(!parent.join("run-2000000000").exists());
        let file = scratch.path("file");
        random_file(&file, 3 << 20, 1).unwrap();
        scratch.settle().unwrap();
        let store = scratch.path("store");
        fs::create_dir(&store).unwrap();
        for name in ["data.0000", "data.0012", "data.table", "journal"] {
            random_file(&store.join(name), 1 << 20, 2).unwrap();
        }
        assert_eq!(data_allocated(&store).unwrap(), 2 << 20);
        warm(scratch.root()).unwrap();
        drop_cached(scratch.root()).unwrap();
        assert!(allocated(scratch.root()).unwrap() >= 3 << 20);
        assert_eq!(fs::metadata(&file).unwrap().len(), 3 << 20);
        let (root, sockets) = (scratch.root().to_path_buf(), scratch.socket("s"));
        assert!(sockets.as_os_str().len() < 100);
        drop(scratch);
        assert!(!root.exists() && !sockets.exists());
        fs::remove_dir(parent).unwrap();
    }
}
