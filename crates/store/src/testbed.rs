//! Shared parts of the unit tests of this crate: a seeded generator, and page files on a simulated disk.

use crate::pages::{PageFile, PageKey, Pages};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Block, File, IoMode};
use std::sync::Arc;
pub use testkit::Random;

/// A simulated disk that does not reorder writes.
pub fn plain_disk() -> SimulatedDisk {
    SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() })
}

/// A file on its own simulated disk.
pub fn plain_file(name: &str) -> Arc<dyn File> {
    plain_disk().directory().create(name, IoMode::Buffered).unwrap()
}

/// Empty files for every kind of page.
pub fn page_files() -> [Arc<dyn File>; PageFile::COUNT] {
    PageFile::ALL.map(|file| plain_file(file.name()))
}

/// Writes captured pages to their files, as a checkpoint does.
pub fn write_home(files: &[Arc<dyn File>; PageFile::COUNT], captured: &[(PageKey, Arc<Block>)]) {
    for (key, page) in captured {
        files[key.file() as usize].write_at(&[&crate::pages::sealed(page).0], key.offset(), false).unwrap();
    }
}

/// Writes the dirty pages and starts with an empty cache, as a restart after a checkpoint does.
pub fn reopened(files: &[Arc<dyn File>; PageFile::COUNT], pages: &mut Pages, limit: usize) {
    write_home(files, &pages.capture_now().all());
    *pages = Pages::new(files.clone(), limit);
}
