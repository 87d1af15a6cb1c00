//! Atomic replacement and durable creation of small files.

use backend::local::{LocalDirectory, LocalQueues};
use backend::replace::folder_of;
pub use backend::replace::sync_folder_of;
use backend::{private, replace};
use error::{Error, ErrorKind, IoContext, Result};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of files that are synced concurrently: the file system combines overlapping syncs into one commit of its
/// journal.
const SYNCED_AT_ONCE: usize = 16;

/// Replaces the content of `path` atomically by `bytes`. The new content is durable on return.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let work = || {
        let name = path.file_name().and_then(|name| name.to_str()).ok_or(io::ErrorKind::InvalidFilename)?;
        let folder = LocalDirectory::open(folder_of(path), LocalQueues::Threads)?.keep_owner();
        replace::durably(&folder, name, &format!("{name}.new"), bytes)
    };
    work().during(|| format!("writing '{}'", path.display()))
}

/// As [`write`], with a value that is encoded as TOML.
pub fn write_toml(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = toml::to_string(value)
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("'{}' cannot be written: {e}", path.display())))?;
    write(path, text.as_bytes())
}

/// The text of a file; `None` if the file does not exist.
pub fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("reading '{}'", path.display()), e)),
    }
}

/// The names in a folder. Names that are not UTF-8 are left out.
pub fn names(folder: &Path) -> Result<Vec<String>> {
    let listing = || format!("listing '{}'", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).during(listing)? {
        names.extend(entry.during(listing)?.file_name().into_string());
    }
    Ok(names)
}

/// Makes the content of a file, or the names in a folder, durable.
pub fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).during(|| format!("writing '{}'", path.display()))
}

/// Writes new files and makes them and their names durable, several at a time.
pub fn write_many(files: &[(PathBuf, String)]) -> Result<()> {
    let next = AtomicUsize::new(0);
    let one = |(path, text): &(PathBuf, String)| {
        let work = || {
            let mut file = private::create(path)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            sync_folder_of(path)
        };
        work().during(|| format!("writing '{}'", path.display()))
    };
    let worker = || -> Result<()> {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            one(file)?;
        }
        Ok(())
    };
    if files.len() <= 1 {
        return worker();
    }
    thread::scope(|scope| {
        let workers: Vec<_> = (0..SYNCED_AT_ONCE.min(files.len())).map(|_| scope.spawn(worker)).collect();
        let panicked = |_| Err(Error::new(ErrorKind::Io, "a thread that wrote files has panicked"));
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(panicked))
    })
}
