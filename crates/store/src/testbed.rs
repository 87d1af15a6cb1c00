//! What the unit tests of this crate stand on: a seeded generator, and page files on a simulated disk.

use crate::pages::{PageFile, PageKey, Pages};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Block, File, IoMode};
use std::sync::Arc;

/// A small seeded generator (SplitMix64): the same seed, the same test.
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True `percent` times of 100.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A number below `limit`, small ones as likely as large ones.
    pub fn scaled(&mut self, limit: u64) -> u64 {
        let bits = 64 - limit.leading_zeros() as u64;
        (self.next() >> (64 - bits).min(63) >> self.below(bits)) % limit
    }

    /// Bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    /// One of the items.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}

/// A disk that does what it is told, in order.
pub fn plain_disk() -> SimulatedDisk {
    SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() })
}

/// A file on a disk of its own.
pub fn plain_file(name: &str) -> Arc<dyn File> {
    plain_disk().directory().create(name, IoMode::Buffered).unwrap()
}

/// Empty files for every kind of page.
pub fn page_files() -> [Arc<dyn File>; PageFile::COUNT] {
    PageFile::ALL.map(|file| plain_file(file.name()))
}

/// Puts captured pages into their files, as a checkpoint does.
pub fn write_home(files: &[Arc<dyn File>; PageFile::COUNT], captured: &[(PageKey, Arc<Block>)]) {
    for (key, page) in captured {
        files[key.file() as usize].write_at(&[&crate::pages::sealed(page).0], key.offset(), false).unwrap();
    }
}

/// The page cache as it is after a restart.
pub fn reopened(files: &[Arc<dyn File>; PageFile::COUNT], pages: &mut Pages, limit: usize) {
    write_home(files, &pages.capture().all());
    *pages = Pages::new(files.clone(), limit);
}
