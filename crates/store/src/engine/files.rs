//! The files of a datastore: their names, and the data files, opened when they are first needed.

use super::log::IMAGES_FILE;
use crate::FILE_BLOCKS;
use crate::buffer;
use crate::pages::PageFile;
use crate::space::Run;
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Directory, File, IoMode};
use std::sync::Arc;

/// The journal ring.
pub const JOURNAL_FILE: &str = "journal";
/// Two copies of the superblock.
pub const SUPERBLOCK_FILE: &str = "superblock";
/// Locked by the process that owns the datastore.
pub const LOCK_FILE: &str = "lock";

/// Name of data file `number`.
pub fn data_file_name(number: u64) -> String {
    format!("data.{number:04}")
}

/// Drops cached data of the metadata, so that recovery reads what is on the medium.
///
/// After a failed flush the page cache may return data that was never written to the medium, until the kernel reuses
/// the memory. If recovery relied on such data, clients would later read older data.
pub fn show_metadata(directory: &dyn Directory) -> Result<()> {
    for name in PageFile::ALL.map(PageFile::name).into_iter().chain([SUPERBLOCK_FILE, JOURNAL_FILE, IMAGES_FILE]) {
        show_medium(directory, name)?;
    }
    Ok(())
}

/// A thread that drops cached data of the data files. A process that was killed may leave gigabytes in the page cache,
/// and recovery reads the journal meanwhile. When this value is dropped, the thread has ended.
pub struct ShowingData(Option<JoinHandle<Result<()>>>);

impl ShowingData {
    /// Starts the thread for the data files, in order. Without `beside`, they are done on return. The files are those
    /// that the store uses then: a flush of one that was opened later could report the failure again that is passed
    /// over here.
    pub fn begin(files: Vec<Arc<dyn File>>, beside: bool) -> Result<Self> {
        let show_all = move || {
            let mut files = (0..).map(data_file_name).zip(&files);
            files.try_for_each(|(name, file)| show(&**file, &name))
        };
        if !beside {
            return show_all().map(|()| Self(None));
        }
        let thread = thread::Builder::new().name("lamina-recover".into());
        let thread = thread.spawn(show_all);
        thread.map(|thread| Self(Some(thread))).during(|| "starting thread lamina-recover".into())
    }

    /// Waits until no cached data is left. Nothing may read or write the data files before.
    pub fn wait(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let panicked = |_| Err(Error::new(ErrorKind::Stopped, "the thread that flushes the data files panicked"));
        self.0.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(panicked))
    }
}

impl Drop for ShowingData {
    fn drop(&mut self) {
        // The opening has failed by another error already.
        let _ = self.end();
    }
}

/// As [`show`], if there is such a file. The file is opened by its name and not looked up in the folder's list, which
/// leaves out symbolic links.
fn show_medium(directory: &dyn Directory, name: &str) -> Result<()> {
    match directory.open(name, IoMode::Buffered) {
        Ok(file) => show(&*file, name),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io(format!("opening {name}"), error)),
    }
}

/// Drops cached data of one file.
pub fn show(file: &dyn File, name: &str) -> Result<()> {
    // Cached data that is not written yet is kept if it can be written now. The first flush may report a failure from
    // before this opening. The data of the failed writes is dropped.
    file.sync().or_else(|_| file.sync()).during(|| format!("flushing {name} before recovery"))?;
    file.forget_cached().during(|| format!("reading {name} again"))
}

/// Data files are written out in parts of this many bytes. Small parts keep the device queue short. Without them, an
/// append to the journal is delayed, by about a millisecond at 64 requests of 4 KiB, and so is the flush that waits for
/// the append.
const WRITE_OUT_PIECE: u64 = 256 << 10;
/// Dirty ranges are tracked in parts of this many bytes.
const PART: u64 = 1 << 20;

struct DataFile {
    file: Arc<dyn File>,
    /// Whether the file was written or reserved since it was last flushed.
    dirty: AtomicBool,
    /// One bit for each part that was written since the file was last written out.
    written: Box<[AtomicU64]>,
}

impl DataFile {
    fn new(file: Arc<dyn File>) -> Self {
        let parts = (FILE_BLOCKS * BLOCK_SIZE as u64).div_ceil(PART * 64);
        let written = (0..parts).map(|_| AtomicU64::new(0)).collect();
        // Writes of a process that was killed may still be in the page cache only, and recovery reads them.
        Self { file, dirty: AtomicBool::new(true), written }
    }

    fn touch(&self, offset: u64, length: u64) {
        self.dirty.store(true, Ordering::Release);
        for part in offset / PART..=(offset + length.max(1) - 1) / PART {
            if let Some(word) = self.written.get((part / 64) as usize) {
                word.fetch_or(1 << (part % 64), Ordering::Relaxed);
            }
        }
    }

    fn write_out(&self) {
        for (i, word) in self.written.iter().enumerate() {
            let mut bits = match word.load(Ordering::Relaxed) {
                0 => continue,
                _ => word.swap(0, Ordering::Relaxed),
            };
            while bits != 0 {
                let offset = (i as u64 * 64 + u64::from(bits.trailing_zeros())) * PART;
                bits &= bits - 1;
                for piece in 0..PART / WRITE_OUT_PIECE {
                    self.file.write_out(offset + piece * WRITE_OUT_PIECE, WRITE_OUT_PIECE, true);
                }
            }
        }
    }
}

/// The data files.
pub struct DataFiles {
    directory: Arc<dyn Directory>,
    mode: IoMode,
    files: RwLock<Vec<Arc<DataFile>>>,
}

/// Opens a file that every datastore has. `Corrupt` if it is missing.
pub fn open_present(directory: &dyn Directory, name: &str, mode: IoMode) -> Result<Arc<dyn File>> {
    directory.open(name, mode).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::new(
            ErrorKind::Corrupt,
            format!(
                "{name} is missing from the datastore: restore the file from a backup, or read out what is whole with \
                 'lamina salvage'"
            ),
        ),
        _ => Error::io(format!("opening {name} of the datastore"), error),
    })
}

impl DataFiles {
    pub fn open(directory: Arc<dyn Directory>, mode: IoMode) -> Result<Self> {
        let mut files = Vec::new();
        loop {
            // Opened by name, like all files of a datastore: each of them may be a symbolic link to a file.
            let name = data_file_name(files.len() as u64);
            match directory.open(&name, mode) {
                Ok(file) => files.push(Arc::new(DataFile::new(file))),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
                Err(error) => return Err(Error::io(format!("opening {name}"), error)),
            }
        }
        Ok(Self { directory, mode, files: RwLock::new(files) })
    }

    /// The number of data files.
    pub fn count(&self) -> u64 {
        self.files.read().len() as u64
    }

    /// The data files, in order.
    pub fn all(&self) -> Vec<Arc<dyn File>> {
        self.files.read().iter().map(|file| Arc::clone(&file.file)).collect()
    }

    /// The file and byte offset of a run, which is in one file. The file exists, because the metadata describes only
    /// space of existing files.
    pub fn locate(&self, run: Run) -> Result<(Arc<dyn File>, u64)> {
        let (number, offset, _) = buffer::place(run);
        if run.start % FILE_BLOCKS + run.blocks > FILE_BLOCKS {
            let text = format!("blocks {} to {} are in two data files", run.start, run.start + run.blocks - 1);
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let files = self.files.read();
        let file = files.get(number as usize).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format!("{} is missing from the datastore", data_file_name(number)))
        })?;
        Ok((Arc::clone(&file.file), offset))
    }

    /// Creates the file of a run, durably, if it is missing. Calls `stop` if the sync of the folder fails.
    pub fn ensure(&self, run: Run, stop: &dyn Fn(Error) -> Error) -> Result<()> {
        let (number, _, _) = buffer::place(run);
        let mut files = self.files.write();
        while files.len() as u64 <= number {
            let name = data_file_name(files.len() as u64);
            let file = self.directory.create(&name, self.mode).during(|| format!("creating {name}"))?;
            self.directory.sync().during(|| format!("creating {name}")).map_err(stop)?;
            files.push(Arc::new(DataFile::new(file)));
        }
        Ok(())
    }

    /// Marks a run as written since the last flush.
    pub fn touch(&self, run: Run) {
        let (number, offset, length) = buffer::place(run);
        if let Some(file) = self.files.read().get(number as usize) {
            file.touch(offset, length);
        }
    }

    /// Has the kernel write cached data to the device in small parts, and waits for each. [`DataFiles::sync`] then has
    /// less to write and delays concurrent requests less.
    pub fn write_out(&self) {
        if self.mode == IoMode::Buffered {
            let files = self.files.read().clone();
            files.iter().for_each(|file| file.write_out());
        }
    }

    /// Makes all writes that ended before this call durable.
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

    /// Bytes that all data files occupy in the file system.
    pub fn allocated(&self) -> Result<u64> {
        let mut sum = 0;
        for file in self.files.read().iter() {
            sum += file.file.allocated().during(|| "measuring a data file".into())?;
        }
        Ok(sum)
    }
}
