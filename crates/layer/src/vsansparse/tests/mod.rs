//! Delta objects: the model tests that every format passes, and helpers for the tests of this format.

use super::*;
use crate::ErrorKind;
use crate::model::{Subject, Trial, run_threads};
use crate::proving::ChangedInRead;
use crate::vsansparse::layout::{Layout, PAGE_GRAINS};
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

mod bytes;
mod damage;
mod recovery;

struct Vsan {
    capacity: u64,
    cache_bytes: usize,
}

impl Subject for Vsan {
    type Layer = VsanSparse;

    fn create(&self, file: Arc<dyn File>) -> Result<()> {
        create(file, "image", &CreateOptions { capacity: self.capacity * SECTOR, id: ID })
    }

    fn open(&self, file: Arc<dyn File>, writable: bool) -> Result<VsanSparse> {
        let options = OpenOptions { writable, cache_bytes: self.cache_bytes, ..OpenOptions::reading("image") };
        VsanSparse::open(file, &options)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn maintain(&self, layer: &VsanSparse, _: u64) -> Result<()> {
        layer.checkpoint()
    }

    fn check(&self, layer: &VsanSparse) {
        let check = layer.check().unwrap();
        assert_eq!(check.problems, Vec::<String>::new());
    }
}

const SUBJECTS: [Vsan; 4] = [
    Vsan { capacity: 5 * 4096 + 3, cache_bytes: CACHE_BYTES },
    Vsan { capacity: 7 * 4096, cache_bytes: 0 },
    Vsan { capacity: 4096, cache_bytes: 0 },
    Vsan { capacity: 5, cache_bytes: CACHE_BYTES },
];

fn mode(seed: u64) -> IoMode {
    if seed.is_multiple_of(3) { IoMode::Direct } else { IoMode::Buffered }
}

const ID: [u8; 16] = *b"0123456789abcdef";

/// An object of `capacity` bytes on its own simulated disk, open for writing.
fn object(capacity: u64) -> (SimulatedDisk, Arc<dyn File>, VsanSparse) {
    let disk = SimulatedDisk::new(capacity, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    disk.directory().sync().unwrap();
    create(Arc::clone(&file), "image", &CreateOptions { capacity, id: ID }).unwrap();
    let layer = VsanSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
    (disk, file, layer)
}

/// The object after a power cut.
fn after_cut(disk: &SimulatedDisk, writable: bool) -> Result<VsanSparse> {
    let file = disk.crash().directory().open("image", IoMode::Buffered).unwrap();
    VsanSparse::open(file, &OpenOptions { writable, ..OpenOptions::reading("image") })
}

/// The content at an offset, according to the first extent there.
fn content(layer: &VsanSparse, start: u64) -> Content {
    let mut extents = Vec::new();
    layer.map(start..start + BLOCK, 1, &mut extents).unwrap();
    extents[0].content
}

fn read(layer: &VsanSparse, start: u64) -> Option<[u8; BLOCK as usize]> {
    let Content::Data { offset, .. } = content(layer, start) else { return None };
    let mut bytes = [0; BLOCK as usize];
    layer.file.read_at(&mut bytes, offset).unwrap();
    Some(bytes)
}

#[test]
fn random_operations_equal_a_model_in_memory() {
    for seed in 0..60u64 {
        let subject = &SUBJECTS[seed as usize % SUBJECTS.len()];
        Trial::new(subject, seed, mode(seed)).run(400);
    }
}

#[test]
fn concurrent_writes_are_not_lost() {
    for seed in 0..60u64 {
        let subject = &SUBJECTS[seed as usize % 3];
        run_threads(subject, seed, mode(seed / 2), 300);
    }
}

#[test]
fn power_cuts_lose_nothing_that_was_flushed() {
    for seed in 0..600u64 {
        let subject = &SUBJECTS[seed as usize % SUBJECTS.len()];
        Trial::new(subject, seed, mode(seed)).run_with_cuts(60, 3);
    }
}

/// A closed object with two map pages, each with one grain.
fn two_pages() -> Arc<dyn File> {
    let (_disk, file, layer) = object(2 * PAGE_GRAINS * BLOCK);
    layer.write(0, &[&[1; BLOCK as usize]]).unwrap();
    layer.write(PAGE_GRAINS * BLOCK, &[&[1; BLOCK as usize]]).unwrap();
    layer.close().unwrap();
    file
}

/// An object that is open for writing, and the switch after which the next read of the second page is interrupted: once
/// `before` bytes are read, `change` is called.
fn changed_in_read(
    before: usize,
    change: impl Fn(&VsanSparse) + Send + Sync + 'static,
) -> (Arc<OnceLock<VsanSparse>>, Arc<AtomicBool>) {
    let (changed, armed): (Arc<OnceLock<VsanSparse>>, Arc<AtomicBool>) = Default::default();
    let start = Layout::new(2 * PAGE_GRAINS * BLOCK).unwrap().page_copies(1) * BLOCK;
    let seen = Arc::clone(&changed);
    let change = move || change(seen.get().unwrap());
    let file = ChangedInRead { inner: two_pages(), armed: Arc::clone(&armed), start, before, change };
    let _ = changed.set(VsanSparse::open(Arc::new(file), &OpenOptions::writing("image")).unwrap());
    (changed, armed)
}

/// Between the reads of two pages, grains of the first page get blocks.
#[test]
fn data_written_while_figures_are_counted_is_not_counted_as_dead() {
    let (layer, armed) = changed_in_read(0, |layer| layer.write(BLOCK, &[&[2; 9 * BLOCK as usize]]).unwrap());
    let layer = layer.get().unwrap();
    let dead = layer.usage().unwrap().dead;
    armed.store(true, Ordering::SeqCst);
    assert_eq!(layer.usage().unwrap().dead, dead);
    assert!(!armed.load(Ordering::SeqCst), "the second page was not read");
    assert_eq!(layer.usage().unwrap().mapped, 11 * BLOCK);
}

/// The second page is changed while it is read, and a checkpoint writes its second copy: the read returns the first
/// half of that copy from before, and the second half from after the checkpoint.
#[test]
fn a_page_that_a_checkpoint_writes_during_a_check_is_not_reported_as_damaged() {
    let (layer, armed) = changed_in_read((BLOCK + BLOCK / 2) as usize, |layer| {
        // Entries in both halves of the page.
        layer.write(PAGE_GRAINS * BLOCK, &[&[2; 400 * BLOCK as usize]]).unwrap();
        layer.checkpoint().unwrap();
    });
    let layer = layer.get().unwrap();
    armed.store(true, Ordering::SeqCst);
    let check = layer.check().unwrap();
    assert!(!armed.load(Ordering::SeqCst), "the second page was not read");
    assert_eq!((check.problems, check.grains), (Vec::new(), 401));
    layer.close().unwrap();
}

#[test]
fn a_commit_is_due_when_many_changes_wait() {
    let subject = Vsan { capacity: 32 * 4096, cache_bytes: CACHE_BYTES };
    let directory = SimulatedDisk::new(1, SimulatedOptions::default()).directory();
    let file = directory.create("image", IoMode::Buffered).unwrap();
    subject.create(Arc::clone(&file)).unwrap();
    let layer = subject.open(file, true).unwrap();
    for block in 0..5000 {
        assert!(block > 1000 || !layer.is_commit_due());
        layer.write(2 * block * BLOCK, &[&[1; BLOCK as usize]]).unwrap();
    }
    assert!(layer.is_commit_due());
    layer.flush().unwrap();
    assert!(!layer.is_commit_due());
}
