//! The files of a datastore: names, and the data files opened as they are needed.

use crate::buffer;
use crate::space::Run;
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{Directory, File, IoMode};
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The journal ring.
pub const JOURNAL_FILE: &str = "journal";
/// Two copies of the superblock.
pub const SUPERBLOCK_FILE: &str = "superblock";
/// Locked by the owner.
pub const LOCK_FILE: &str = "lock";

/// Name of data file `number`.
pub fn data_file_name(number: u64) -> String {
    format!("data.{number:04}")
}

struct DataFile {
    file: Arc<dyn File>,
    /// Written or reserved since it was last flushed.
    dirty: AtomicBool,
}

/// The data files.
pub struct DataFiles {
    directory: Arc<dyn Directory>,
    mode: IoMode,
    files: RwLock<Vec<DataFile>>,
}

impl DataFiles {
    pub fn open(directory: Arc<dyn Directory>, mode: IoMode) -> Result<Self> {
        let names = directory.list().during(|| "listing the datastore".into())?;
        let mut files = Vec::new();
        while names.contains(&data_file_name(files.len() as u64)) {
            let name = data_file_name(files.len() as u64);
            let file = directory.open(&name, mode).during(|| format!("opening {name}"))?;
            // What a process that was killed had written may still wait in the page cache, and recovery reads it.
            files.push(DataFile { file, dirty: AtomicBool::new(true) });
        }
        Ok(Self { directory, mode, files: RwLock::new(files) })
    }

    /// The data files, in order.
    pub fn all(&self) -> Vec<Arc<dyn File>> {
        self.files.read().iter().map(|file| Arc::clone(&file.file)).collect()
    }

    /// The file and byte offset of a run. Space is only ever described for files that exist.
    pub fn locate(&self, run: Run) -> Result<(Arc<dyn File>, u64)> {
        let (number, offset, _) = buffer::place(run);
        let files = self.files.read();
        let file = files.get(number as usize).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format!("{} is missing from the datastore", data_file_name(number)))
        })?;
        Ok((Arc::clone(&file.file), offset))
    }

    /// Makes sure that the file of a run exists.
    pub fn ensure(&self, run: Run) -> Result<()> {
        let (number, _, _) = buffer::place(run);
        let mut files = self.files.write();
        while files.len() as u64 <= number {
            let name = data_file_name(files.len() as u64);
            let file = self.directory.create(&name, self.mode).during(|| format!("creating {name}"))?;
            self.directory.sync().during(|| format!("creating {name}"))?;
            files.push(DataFile { file, dirty: AtomicBool::new(true) });
        }
        Ok(())
    }

    /// Notes that a run is being changed, before it is.
    pub fn touch(&self, run: Run) {
        let (number, _, _) = buffer::place(run);
        if let Some(file) = self.files.read().get(number as usize) {
            file.dirty.store(true, Ordering::Release);
        }
    }

    /// Makes all changes that finished before this call durable.
    pub fn sync(&self) -> Result<()> {
        let dirty: Vec<(usize, Arc<dyn File>)> = self
            .files
            .read()
            .iter()
            .enumerate()
            .filter(|(_, file)| file.dirty.swap(false, Ordering::AcqRel))
            .map(|(number, file)| (number, Arc::clone(&file.file)))
            .collect();
        for (number, file) in dirty {
            file.sync().during(|| format!("flushing {}", data_file_name(number as u64)))?;
        }
        Ok(())
    }

    /// Bytes that all data files take in the file system.
    pub fn allocated(&self) -> Result<u64> {
        let mut sum = 0;
        for file in self.files.read().iter() {
            sum += file.file.allocated().during(|| "measuring a data file".into())?;
        }
        Ok(sum)
    }
}
