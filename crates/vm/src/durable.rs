//! Files that are replaced whole or not at all.

use backend::{Error, ErrorKind, IoContext, Result};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

/// Files synced at once: the file system gathers what comes together into one commit of its journal.
const SYNCED_AT_ONCE: usize = 16;

/// Puts `bytes` in the place of what `path` holds. Durable on return; before that, the old content stands.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    let work = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_folder_of(path)
    };
    work().during(|| format!("writing '{}'", path.display()))
}

/// Makes the names in the folder of `path` durable.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

/// Makes the names in a folder durable.
pub fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).during(|| format!("writing '{}'", path.display()))
}

/// Writes new files and makes them and their names durable, many at once.
pub fn write_many(files: &[(PathBuf, String)]) -> Result<()> {
    let next = AtomicUsize::new(0);
    let one = |(path, text): &(PathBuf, String)| {
        let work = || {
            let mut file = File::create(path)?;
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
        let panicked = |_| Err(Error::new(ErrorKind::Io, "a thread that wrote has panicked"));
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(panicked))
    })
}

/// The time, in seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
