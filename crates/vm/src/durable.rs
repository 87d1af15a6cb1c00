//! Files that are replaced whole or not at all.

use backend::{IoContext, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

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
pub fn sync_folder_of(path: &Path) -> std::io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}
