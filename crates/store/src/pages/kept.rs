//! Pages as a checkpoint left them, for readers that continue while later checkpoints overwrite them.
//!
//! Between two checkpoints the page files hold the complete state that the first one captured. For a reader that needs
//! this state for longer, the old content of every page is copied here before a later checkpoint overwrites the page.
//!
//! What must hold:
//!
//! 1. A page is copied before it is overwritten. A reader reads the file first and looks for a copy afterwards. If
//!    there is no copy then, the page was not overwritten before the read. Each reader has copies of its own, because
//!    readers may begin after different checkpoints.
//! 2. One checkpoint runs at a time, and writes no page in place before [`Kept::keep`] has returned.
//! 3. Copies in memory are limited. Further copies are written to an unnamed file, which the file system frees when the
//!    process ends. If that file cannot be written, the checkpoint continues and the reader fails.

use super::PageKey;
use crate::sync::Mutex;
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Block, Directory, File, IoMode};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The most copies of a reader in memory (32 MiB). Fewer in tests, so that the file is used.
const MEMORY_MAX: usize = if cfg!(test) { 64 } else { 8192 };
/// The file for further pages. Its name is removed as soon as it is open.
const OVERFLOW_FILE: &str = "check.pages";

enum Image {
    Memory(Box<Block>),
    /// Number of the copy in the overflow file.
    Overflow(u64),
    /// The page could not be read for copying.
    Unreadable(String),
}

#[derive(Default)]
struct KeptState {
    images: FxHashMap<PageKey, Image>,
    in_memory: usize,
    overflow: Option<Arc<dyn File>>,
    overflowed: u64,
    failure: Option<String>,
}

/// Copies of pages that later checkpoints have overwritten.
pub struct Kept {
    directory: Arc<dyn Directory>,
    readers: Mutex<Vec<Arc<KeptPages>>>,
}

/// The copies for one reader.
pub struct KeptPages {
    directory: Arc<dyn Directory>,
    state: Mutex<KeptState>,
}

/// A reader's registration: checkpoints copy pages for the reader until this value is dropped.
pub struct Keeping {
    kept: Arc<Kept>,
    pages: Arc<KeptPages>,
}

impl Kept {
    /// An empty set of copies.
    pub fn new(directory: Arc<dyn Directory>) -> Arc<Self> {
        Arc::new(Self { directory, readers: Mutex::default() })
    }

    /// Begins to copy pages for a reader. Called between two checkpoints.
    pub fn begin(self: &Arc<Self>) -> Keeping {
        let pages = Arc::new(KeptPages { directory: Arc::clone(&self.directory), state: Mutex::default() });
        self.readers.lock().push(Arc::clone(&pages));
        Keeping { kept: Arc::clone(self), pages }
    }

    /// Copies pages that are about to be overwritten, for every reader. Pages with a copy are skipped.
    pub fn keep(&self, file: &dyn File, keys: &mut dyn Iterator<Item = PageKey>) {
        let readers = self.readers.lock().clone();
        if readers.is_empty() {
            return;
        }
        let mut page = Block([0; BLOCK_SIZE]);
        for key in keys {
            let mut lacking = readers.iter().filter(|pages| pages.lacks(key)).peekable();
            if lacking.peek().is_some() {
                let read = file.read_at(&mut page.0, key.offset());
                lacking.for_each(|pages| pages.keep(key, &page, &read));
            }
        }
    }
}

impl KeptPages {
    fn lacks(&self, key: PageKey) -> bool {
        let state = self.state.lock();
        state.failure.is_none() && !state.images.contains_key(&key)
    }

    /// Stores the content of a page, or the error of its read.
    fn keep(&self, key: PageKey, page: &Block, read: &std::io::Result<()>) {
        let mut state = self.state.lock();
        let image = match read {
            Err(error) => Image::Unreadable(error.to_string()),
            Ok(()) if state.in_memory < MEMORY_MAX => {
                state.in_memory += 1;
                Image::Memory(Box::new(Block(page.0)))
            }
            Ok(()) => match self.overflow(&mut state, page) {
                Ok(number) => Image::Overflow(number),
                Err(error) => {
                    tracing::warn!(%error, "a check or count of space will fail: a page cannot be copied for it");
                    state.failure = Some(error.to_string());
                    return;
                }
            },
        };
        state.images.insert(key, image);
    }

    fn overflow(&self, state: &mut KeptState, page: &Block) -> Result<u64> {
        let file = match &state.overflow {
            Some(file) => Arc::clone(file),
            None => {
                // A process that was killed before it removed the name may have left the file.
                let _ = self.directory.remove(OVERFLOW_FILE);
                let create = || format!("creating {OVERFLOW_FILE}");
                let file = self.directory.create(OVERFLOW_FILE, IoMode::Buffered).during(create)?;
                self.directory.remove(OVERFLOW_FILE).during(|| format!("removing {OVERFLOW_FILE}"))?;
                Arc::clone(state.overflow.insert(file))
            }
        };
        let number = state.overflowed;
        file.write_at(&[&page.0], number * BLOCK_SIZE as u64, false).during(|| "keeping a page for a check".into())?;
        state.overflowed += 1;
        Ok(number)
    }

    /// Reads a page as it was when the reader began.
    pub(super) fn read(&self, file: &dyn File, key: PageKey) -> Result<Block> {
        let mut page = Block([0; BLOCK_SIZE]);
        // The file is read before the search for a copy: see invariant 1.
        let now = file.read_at(&mut page.0, key.offset());
        let what = || format!("reading {key} of the datastore's metadata");
        let state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(lost(failure));
        }
        match state.images.get(&key) {
            None => now.during(what).map(|()| page),
            Some(Image::Memory(kept)) => Ok(**kept),
            Some(Image::Unreadable(error)) => Err(Error::new(ErrorKind::Io, format!("{}: {error}", what()))),
            Some(Image::Overflow(number)) => {
                let offset = number * BLOCK_SIZE as u64;
                let file = state.overflow.clone();
                drop(state);
                if let Some(file) = file {
                    file.read_at(&mut page.0, offset).map_err(|error| {
                        self.state.lock().failure = Some(error.to_string());
                        lost(&error.to_string())
                    })?;
                }
                Ok(page)
            }
        }
    }
}

impl Keeping {
    /// The copies for the reader.
    pub fn pages(&self) -> &Arc<KeptPages> {
        &self.pages
    }

    /// Fails if a page could not be copied or read again: the pages that the reader has seen may be of different
    /// states.
    pub fn check(&self) -> Result<()> {
        match &self.pages.state.lock().failure {
            Some(failure) => Err(lost(failure)),
            None => Ok(()),
        }
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        self.kept.readers.lock().retain(|pages| !Arc::ptr_eq(pages, &self.pages));
    }
}

fn lost(failure: &str) -> Error {
    Error::new(
        ErrorKind::Io,
        format!(
            "the copy of a metadata page that a write has replaced cannot be made or read ({failure}); free space in \
             the file system, or try again when fewer writes are made"
        ),
    )
}
