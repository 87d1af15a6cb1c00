//! Where a repository keeps its objects: named sequences of bytes that are written as a whole, and never changed.

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Access, Directory, IoMode, Lock, private, replace};
use error::{Error, ErrorKind, IoContext, Result};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The file that a writer of a folder locks.
const LOCK_FILE: &str = "lock";
/// Suffix of files that are being written.
const TEMPORARY: &str = ".new";

/// A place for objects. Errors name the object and the place.
pub trait Objects: Send + Sync {
    /// The place, for messages.
    fn place(&self) -> &str;

    /// Stores an object, replacing an object with the same name. On return the object is durable; an interruption
    /// leaves the object as it was before.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// A range of an object: `NotFound` if there is no such object, `Corrupt` if it is shorter.
    fn read(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>>;

    /// A whole object of at most `length_max` bytes; `None` if there is no such object, `Corrupt` if it is longer.
    fn whole(&self, name: &str, length_max: u64) -> Result<Option<Vec<u8>>> {
        match self.length(name)? {
            Some(length) if length > length_max => Err(too_long(name, self.place(), length)),
            Some(length) => self.read(name, 0..length).map(Some),
            None => Ok(None),
        }
    }

    /// Bytes of an object; `None` if there is no such object.
    fn length(&self, name: &str) -> Result<Option<u64>>;

    /// The names of all objects, sorted.
    fn list(&self) -> Result<Vec<String>>;

    /// Removes an object that may be missing.
    fn remove(&self, name: &str) -> Result<()>;

    /// Makes removals durable, and what interrupted writes have left.
    fn settle(&self) -> Result<()>;

    /// Removes what interrupted writes have left of the objects whose names `is_one` accepts. The caller has excluded
    /// other writers of these objects.
    fn sweep(&self, is_one: &dyn Fn(&str) -> bool) -> Result<()>;

    /// Excludes other writers until the result is dropped: `Busy` while there is another writer. `None` where writers
    /// cannot be excluded. Where a lock can be lost, changes fail from then on until the result is dropped.
    fn lock(&self) -> Result<Option<Box<dyn Lock>>>;
}

/// The error for an object that is longer than its kind can be.
pub(crate) fn too_long(name: &str, place: &str, length: u64) -> Error {
    let text = format!("'{name}' in '{place}' has {length} bytes, more than such a record can have");
    Error::new(ErrorKind::Corrupt, text)
}

/// A folder.
pub struct Folder {
    directory: Arc<dyn Directory>,
    place: String,
}

impl Folder {
    /// The objects in a folder that exists.
    pub fn open(path: &Path) -> Result<Self> {
        let place = path.display().to_string();
        match LocalDirectory::open(path, LocalQueues::Threads) {
            Ok(directory) => Ok(Self { directory: Arc::new(directory), place }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let text = format!("there is no repository of backups at '{place}': 'lamina backup create' makes one");
                Err(Error::new(ErrorKind::NotFound, text))
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                let text = format!("'{place}' is not a folder; a backup in one file is named file:{place}");
                Err(Error::new(ErrorKind::Invalid, text))
            }
            Err(error) => Err(Error::io(format!("opening the repository '{place}'"), error)),
        }
    }

    /// As [`Folder::open`]; creates a missing folder, which only its owner can access.
    pub fn open_or_create(path: &Path) -> Result<Self> {
        if !path.exists() {
            private::create_folders(path).during(|| format!("making the folder '{}'", path.display()))?;
        }
        Self::open(path)
    }

    /// The objects in a directory of any medium.
    pub fn of(directory: Arc<dyn Directory>, place: impl Into<String>) -> Self {
        Self { directory, place: place.into() }
    }

    fn file(&self, name: &str) -> io::Result<Arc<dyn backend::File>> {
        self.directory.open_foreign(name, IoMode::Buffered, Access::Read)
    }
}

impl Objects for Folder {
    fn place(&self) -> &str {
        &self.place
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        replace::durably(&*self.directory, name, &format!("{name}{TEMPORARY}"), bytes)
            .during(|| format!("writing '{name}' in '{}'", self.place))
    }

    fn read(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let during = || format!("reading '{name}' in '{}'", self.place);
        let file = self.file(name).during(during)?;
        let length = file.len().during(during)?;
        if range.end > length {
            let text = format!("'{name}' in '{}' has {length} bytes, and should have {}", self.place, range.end);
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_at(&mut bytes, range.start).during(during)?;
        Ok(bytes)
    }

    fn length(&self, name: &str) -> Result<Option<u64>> {
        match self.file(name).and_then(|file| file.len()) {
            Ok(length) => Ok(Some(length)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(format!("looking at '{name}' in '{}'", self.place), error)),
        }
    }

    fn list(&self) -> Result<Vec<String>> {
        let names = self.directory.list().during(|| format!("listing '{}'", self.place))?;
        Ok(names.into_iter().filter(|name| name != LOCK_FILE && !name.ends_with(TEMPORARY)).collect())
    }

    fn remove(&self, name: &str) -> Result<()> {
        replace::remove_if_there(&*self.directory, name).during(|| format!("removing '{name}' in '{}'", self.place))
    }

    fn sweep(&self, is_one: &dyn Fn(&str) -> bool) -> Result<()> {
        for name in self.directory.list().during(|| format!("listing '{}'", self.place))? {
            if name.strip_suffix(TEMPORARY).is_some_and(is_one) {
                self.remove(&name)?;
            }
        }
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        self.directory.sync().during(|| format!("flushing '{}'", self.place))
    }

    fn lock(&self) -> Result<Option<Box<dyn Lock>>> {
        match self.directory.lock(LOCK_FILE) {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let text =
                    format!("another command changes the repository '{}': wait until that command ends", self.place);
                Err(Error::new(ErrorKind::Busy, text))
            }
            Err(error) => Err(Error::io(format!("locking the repository '{}'", self.place), error)),
        }
    }
}
