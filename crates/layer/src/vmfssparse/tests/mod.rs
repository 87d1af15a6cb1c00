//! Redo logs: the model tests that every format passes, and helpers for the tests of this format.

use super::*;
use crate::model::{Subject, Trial, run_threads};
use crate::proving::{ChangedInRead, Gated, Request, read};
use backend::IoMode;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{OnceLock, Weak};
use work::NoProgress;

mod bytes;
mod damage;
mod outside;
mod shrinking;

struct Cowd {
    capacity: u64,
    grain: u32,
    cache_bytes: usize,
}

impl Subject for Cowd {
    type Layer = VmfsSparse;

    fn create(&self, file: Arc<dyn File>) -> Result<()> {
        let options = CreateOptions { capacity: self.capacity * SECTOR, grain_sectors: self.grain };
        create(file, "image", &options)
    }

    fn open(&self, file: Arc<dyn File>, writable: bool) -> Result<VmfsSparse> {
        let options = OpenOptions { writable, cache_bytes: self.cache_bytes, ..OpenOptions::reading("image") };
        VmfsSparse::open(file, &options)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn maintain(&self, layer: &VmfsSparse, number: u64) -> Result<()> {
        // Allocates space that no table names, as a crash leaves it, sometimes directly before new tables.
        if !number.is_multiple_of(3) {
            let mut space = layer.writer()?.space.lock();
            space.take(layer.file.file().as_ref(), number / 3 % 300, 0)?;
            layer.tables.raise_limit(space.free());
        }
        if number.is_multiple_of(4) {
            layer.shrink(&NoProgress)?;
        }
        Ok(())
    }

    fn check(&self, layer: &VmfsSparse) {
        let check = layer.check().unwrap();
        assert_eq!(check.problems, Vec::<String>::new());
        assert_eq!(check.zero_entries, 0, "other readers differ from QEMU for this entry");
    }
}

const SUBJECTS: [Cowd; 5] = [
    Cowd { capacity: 3 * 4096 + 12, grain: 1, cache_bytes: CACHE_BYTES },
    Cowd { capacity: 5 * 4096 + 1, grain: 1, cache_bytes: 0 },
    Cowd { capacity: 8195, grain: 1, cache_bytes: CACHE_BYTES },
    Cowd { capacity: 4096 * 8 + 813, grain: 8, cache_bytes: 0 },
    Cowd { capacity: 4096 * 3 + 100, grain: 3, cache_bytes: CACHE_BYTES },
];

fn mode(seed: u64) -> IoMode {
    if seed.is_multiple_of(3) { IoMode::Direct } else { IoMode::Buffered }
}

#[test]
fn random_operations_equal_a_model_in_memory() {
    for seed in 0..60u64 {
        let subject = &SUBJECTS[seed as usize % SUBJECTS.len()];
        Trial::new(subject, seed, mode(seed)).run(400);
    }
}

const MANY_TABLES: Cowd = Cowd { capacity: 400 * 4096, grain: 1, cache_bytes: 0 };

#[test]
fn tables_created_during_a_commit_are_in_the_next_one() {
    for seed in 0..12u64 {
        run_threads(&MANY_TABLES, seed * 2, IoMode::Buffered, 400);
    }
}

#[test]
fn the_directory_names_no_table_that_was_added_while_a_commit_writes_it() {
    const SPAN: u64 = 4096 * SECTOR;
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions { capacity: 400 * SPAN, grain_sectors: 1 }).unwrap();
    let watched: Arc<OnceLock<Weak<VmfsSparse>>> = Arc::default();
    let (flushes, seen) = (AtomicU32::new(0), Arc::clone(&watched));
    // The first write after the first flush of the commit is that of a sector of the directory. At this write another
    // table is added, with its entry in a sector that the commit writes later.
    let gate = move |request: Request| -> std::io::Result<()> {
        let Some(layer) = seen.get().and_then(Weak::upgrade) else { return Ok(()) };
        match (request, flushes.load(Ordering::SeqCst)) {
            (Request::Sync, 0) => flushes.store(1, Ordering::SeqCst),
            (Request::Write, 1) => {
                flushes.store(2, Ordering::SeqCst);
                layer.write(257 * SPAN, &[&[7; SECTOR as usize]]).unwrap();
            }
            _ => {}
        }
        Ok(())
    };
    let gated = Arc::new(Gated { inner: Arc::clone(&file), gate });
    let layer = Arc::new(VmfsSparse::open(gated, &OpenOptions::writing("image")).unwrap());
    layer.write(0, &[&[1; SECTOR as usize]]).unwrap();
    layer.write(256 * SPAN, &[&[2; SECTOR as usize]]).unwrap();
    assert!(watched.set(Arc::downgrade(&layer)).is_ok());
    let named = |table: u64| {
        let mut entry = [0; 4];
        file.read_at(&mut entry, layer.header().directory_offset() * SECTOR + table * 4).unwrap();
        entry != [0; 4]
    };
    layer.flush().unwrap();
    assert!(named(0) && named(256));
    assert!(!named(257), "a power cut would leave an entry for a table that was never written");
    layer.flush().unwrap();
    assert!(named(257));
    assert_eq!(read(&*layer, 257 * SPAN..257 * SPAN + SECTOR, None).unwrap(), [7; SECTOR as usize]);
}

#[test]
fn concurrent_writes_are_not_lost() {
    for seed in 0..60u64 {
        let subject = &SUBJECTS[seed as usize % SUBJECTS.len()];
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

#[test]
fn space_is_needed_for_whole_file_system_blocks() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("f", IoMode::Buffered).unwrap();
    let subject = Cowd { capacity: 4096, grain: 1, cache_bytes: CACHE_BYTES };
    subject.create(Arc::clone(&file)).unwrap();
    let layer = subject.open(file, true).unwrap();
    layer.write(9 * SECTOR, &[&[7; SECTOR as usize]]).unwrap();
    assert_eq!(layer.room_needed(9 * SECTOR..10 * SECTOR).unwrap(), 0);
    assert_eq!(layer.room_needed(20 * SECTOR..21 * SECTOR).unwrap(), 4096);
    assert_eq!(layer.room_needed(7 * SECTOR..10 * SECTOR).unwrap(), 8192);
    assert_eq!(layer.room_needed(16 * SECTOR..32 * SECTOR).unwrap(), 8192);
}

#[test]
fn large_writes_are_aligned_to_large_boundaries_without_waste() {
    const PIECE: u64 = 64 << 10;
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("f", IoMode::Buffered).unwrap();
    let subject = Cowd { capacity: 32 * 4096, grain: 1, cache_bytes: CACHE_BYTES };
    subject.create(Arc::clone(&file)).unwrap();
    let layer = subject.open(Arc::clone(&file), true).unwrap();
    let bytes = vec![7; PIECE as usize];
    // Every second piece is written first, so that many tables lie between the pieces; then the other pieces, each
    // preceded by small writes.
    for start in (0..layer.capacity()).step_by(2 * PIECE as usize) {
        layer.write(start, &[&bytes]).unwrap();
    }
    for start in (PIECE..layer.capacity()).step_by(2 * PIECE as usize) {
        layer.write(start, &[&bytes[..4096]]).unwrap();
    }
    let mut found = Vec::new();
    layer.map(0..layer.capacity(), usize::MAX, &mut found).unwrap();
    for extent in found.iter().filter(|extent| extent.length >= PIECE) {
        let Content::Data { offset, .. } = extent.content else { continue };
        assert_eq!(offset % PIECE, extent.start % PIECE, "{extent:?}");
    }
    let data = layer.capacity() / 2 + layer.capacity() / (2 * PIECE) * 4096;
    let tables = 32 * 16 * 1024;
    assert!(
        layer.writer().unwrap().space.lock().free() * SECTOR <= data + tables + 2 * PIECE,
        "skipped sectors are used"
    );
}

/// A commit lacks space after it has written the directory entry of one of two new tables. If the next commit wrote
/// that table before the payload is durable, a power cut could leave entries for payload that was never written.
#[test]
fn a_table_that_a_refused_commit_has_named_is_written_after_its_payload() {
    const SPAN: u64 = 4096 * SECTOR;
    for killed_at_the_flush in [true, false] {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let file = disk.directory().create("image", IoMode::Buffered).unwrap();
        create(Arc::clone(&file), "image", &CreateOptions { capacity: 400 * SPAN, grain_sectors: 1 }).unwrap();
        disk.directory().sync().unwrap();
        let (left, killed) = (Arc::new(AtomicU32::new(u32::MAX)), Arc::new(AtomicBool::new(false)));
        let (permitted, is_killed) = (Arc::clone(&left), Arc::clone(&killed));
        let gate = move |request: Request| -> std::io::Result<()> {
            let take = |left: u32| left.checked_sub(1);
            match request {
                Request::Write if permitted.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_err() => {
                    Err(std::io::ErrorKind::StorageFull.into())
                }
                Request::Sync if is_killed.load(Ordering::SeqCst) => {
                    Err(std::io::Error::other("the process is killed"))
                }
                _ => Ok(()),
            }
        };
        let layer = VmfsSparse::open(Arc::new(Gated { inner: file, gate }), &OpenOptions::writing("image")).unwrap();
        layer.write(0, &[&[1; SECTOR as usize]]).unwrap();
        layer.write(256 * SPAN, &[&[1; SECTOR as usize]]).unwrap();
        // Both tables, and the sector of the directory for the first one.
        left.store(3, Ordering::SeqCst);
        assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::NoSpace);
        left.store(u32::MAX, Ordering::SeqCst);
        layer.write(4096, &[&[2; SECTOR as usize]]).unwrap();
        killed.store(killed_at_the_flush, Ordering::SeqCst);
        assert_eq!(layer.flush().is_err(), killed_at_the_flush);
        for _ in 0..200 {
            let file = disk.crash().directory().open("image", IoMode::Buffered).unwrap();
            let layer = VmfsSparse::open(file, &OpenOptions::reading("image")).unwrap();
            let read = |at: u64| read(&layer, at..at + SECTOR, Some(&[9; 8192])).unwrap();
            if !killed_at_the_flush {
                assert_eq!((read(0), read(256 * SPAN)), (vec![1; SECTOR as usize], vec![1; SECTOR as usize]));
            }
            let found = read(4096);
            let is_old = killed_at_the_flush && found == [9; SECTOR as usize];
            assert!(is_old || found == [2; SECTOR as usize], "content that was never written");
        }
    }
}

#[test]
fn a_close_that_lacks_space_can_be_repeated() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions { capacity: 1 << 20, grain_sectors: 1 }).unwrap();
    disk.directory().sync().unwrap();
    let full = Arc::new(AtomicBool::new(false));
    let is_full = Arc::clone(&full);
    let gate = move |request| match request {
        Request::Write if is_full.load(Ordering::SeqCst) => Err(std::io::ErrorKind::StorageFull.into()),
        _ => Ok(()),
    };
    let layer = VmfsSparse::open(Arc::new(Gated { inner: file, gate }), &OpenOptions::writing("image")).unwrap();
    layer.write(0, &[&[7; 4096]]).unwrap();
    full.store(true, Ordering::SeqCst);
    assert_eq!(layer.close().unwrap_err().kind(), ErrorKind::NoSpace);
    full.store(false, Ordering::SeqCst);
    layer.close().unwrap();
    assert_eq!(layer.write(0, &[&[8; 512]]).unwrap_err().kind(), ErrorKind::ReadOnly);
    let file = disk.crash().directory().open("image", IoMode::Buffered);
    let layer = VmfsSparse::open(file.unwrap(), &OpenOptions::reading("image")).unwrap();
    assert!(!layer.header().unclean() && read(&layer, 0..4096, None).unwrap() == [7; 4096]);
}

/// A redo log with two tables, of which the second is read from the file at the returned place.
fn two_tables() -> (Arc<dyn File>, u64) {
    const SPAN: u64 = 4096 * SECTOR;
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let file = disk.directory().create("image", IoMode::Buffered).unwrap();
    create(Arc::clone(&file), "image", &CreateOptions { capacity: 2 * SPAN, grain_sectors: 1 }).unwrap();
    let layer = VmfsSparse::open(Arc::clone(&file), &OpenOptions::writing("image")).unwrap();
    layer.write(0, &[&[1; SECTOR as usize]]).unwrap();
    layer.write(SPAN, &[&[1; SECTOR as usize]]).unwrap();
    layer.close().unwrap();
    (file, layer.tables.place(1) * SECTOR)
}

/// Between the reads of two tables, grains of the first table are appended to the file.
#[test]
fn data_written_while_figures_are_counted_is_not_counted_as_dead() {
    let (file, start) = two_tables();
    let changed: Arc<OnceLock<VmfsSparse>> = Arc::default();
    let armed = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&changed);
    let change = move || seen.get().unwrap().write(SECTOR, &[&[2; 64 * SECTOR as usize]]).unwrap();
    let file = ChangedInRead { inner: file, armed: Arc::clone(&armed), start, before: 0, change };
    let open = || VmfsSparse::open(Arc::new(file), &OpenOptions::writing("image")).unwrap();
    let layer = changed.get_or_init(open);
    let dead = layer.usage().unwrap().dead;
    armed.store(true, Ordering::SeqCst);
    assert_eq!(layer.usage().unwrap().dead, dead);
    assert!(!armed.load(Ordering::SeqCst), "the second table was not read");
    assert_eq!(layer.usage().unwrap().mapped, 66 * SECTOR);
}

/// A shrink truncates the file when the epoch that it ends is over.
#[test]
fn no_shrink_truncates_the_file_while_figures_are_counted() {
    let (file, start) = two_tables();
    let changed: Arc<OnceLock<VmfsSparse>> = Arc::default();
    let (armed, truncated) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (seen, done) = (Arc::clone(&changed), Arc::clone(&truncated));
    let change = move || {
        let epochs = &seen.get().unwrap().writer.as_ref().unwrap().epochs;
        done.store(epochs.is_over(epochs.end()), Ordering::SeqCst);
    };
    let file = ChangedInRead { inner: file, armed: Arc::clone(&armed), start, before: 0, change };
    let open = || VmfsSparse::open(Arc::new(file), &OpenOptions::writing("image")).unwrap();
    let layer = changed.get_or_init(open);
    armed.store(true, Ordering::SeqCst);
    layer.usage().unwrap();
    assert!(!armed.load(Ordering::SeqCst), "the second table was not read");
    assert!(!truncated.load(Ordering::SeqCst));
    let epochs = &layer.writer.as_ref().unwrap().epochs;
    assert!(epochs.is_over(epochs.end()), "an epoch is still held");
}

#[test]
fn a_commit_is_due_when_many_tables_have_changed() {
    let subject = Cowd { capacity: 2100 * 4096, grain: 1, cache_bytes: CACHE_BYTES };
    let directory = SimulatedDisk::new(1, SimulatedOptions::default()).directory();
    let file = directory.create("image", IoMode::Buffered).unwrap();
    subject.create(Arc::clone(&file)).unwrap();
    let layer = subject.open(file, true).unwrap();
    for table in 0..2100 {
        assert!(table > 1000 || !layer.is_commit_due());
        layer.write(table * 4096 * SECTOR, &[&[1; SECTOR as usize]]).unwrap();
    }
    assert!(layer.is_commit_due());
    layer.flush().unwrap();
    assert!(!layer.is_commit_due());
}
