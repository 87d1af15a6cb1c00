//! One suite that every implementation of the traits has to pass: the same random script, checked against a plain
//! vector of bytes, over local files (buffered and direct, io_uring and threads), the simulated device, and media
//! without a local part: a medium in memory, and an overlay that keeps changes in memory.

#![allow(clippy::unwrap_used)]

mod files;
mod memory;
mod queues;

use backend::local::{LocalDirectory, LocalQueues};
use backend::overlay::Overlay;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, Directory, IoMode, QueueKind};
use memory::MemoryMedium;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use testkit::Random;

/// The part of the file that the random script uses.
const SPAN: usize = 96 * BLOCK_SIZE;

/// A range within the span, in whole blocks for direct I/O.
fn range(random: &mut Random, mode: IoMode) -> (usize, usize) {
    let unit = if mode == IoMode::Direct || random.below(2) == 0 { BLOCK_SIZE } else { 1 };
    let start = random.index(SPAN / unit);
    let length = 1 + random.index((SPAN / unit - start).min(12 * BLOCK_SIZE / unit));
    (start * unit, length * unit)
}

/// Random bytes, none of which is zero.
fn fill(random: &mut Random, bytes: &mut [u8]) {
    let seed = random.next();
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = (seed.rotate_left((at / 512 % 64) as u32) as u8).wrapping_add((at % 251) as u8) | 1;
    }
}

/// A temporary folder, removed with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path =
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("conformance-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn open(&self, queues: LocalQueues) -> Arc<dyn Directory> {
        Arc::new(LocalDirectory::open(&self.0, queues).unwrap())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn simulated() -> Arc<dyn Directory> {
    SimulatedDisk::new(7, SimulatedOptions::default()).directory()
}

/// Runs all tests of the suite over one implementation.
fn conforms(directory: &Arc<dyn Directory>, mode: IoMode) {
    for seed in 0..6 {
        files::random_script_matches_bytes(directory.as_ref(), mode, seed);
    }
    files::names_behave(directory.as_ref(), mode);
    files::locks_exclude(directory.as_ref());
    files::past_the_end_is_zeros(directory.as_ref(), mode);
    if directory.create("probe", mode).unwrap().local().is_some() {
        files::reserved_and_written_are_told_apart(directory.as_ref(), mode);
        files::space_is_taken_and_given_back(directory.as_ref(), mode);
    }
    directory.remove("probe").unwrap();
    files::offsets_are_checked(directory.as_ref(), mode);
    for seed in 0..4 {
        queues::queued_script_matches_bytes(directory.as_ref(), mode, seed);
    }
    queues::many_slices_in_one_write(directory.as_ref(), mode);
    queues::queue_reports_errors(directory.as_ref());
    queues::polls_complete_once(directory.as_ref(), mode);
    queues::waits_end(directory.as_ref());
    queues::dropping_waits(directory.as_ref(), mode);
    queues::queue_moves_between_threads(directory.as_ref(), mode);
    let room = directory.room().unwrap();
    assert!(room.available <= room.total && room.total > 0);
}

#[test]
fn local_buffered_threads() {
    let folder = Folder::new();
    let directory = folder.open(LocalQueues::Threads);
    assert_eq!(directory.queue_kind(), QueueKind::Threads);
    conforms(&directory, IoMode::Buffered);
}

#[test]
fn local_direct_threads() {
    let folder = Folder::new();
    conforms(&folder.open(LocalQueues::Threads), IoMode::Direct);
}

// Where io_uring is forbidden, as in many containers, `Auto` runs the same suites over threads.
#[test]
fn local_buffered_auto() {
    let folder = Folder::new();
    conforms(&folder.open(LocalQueues::Auto), IoMode::Buffered);
}

#[test]
fn local_direct_auto() {
    let folder = Folder::new();
    conforms(&folder.open(LocalQueues::Auto), IoMode::Direct);
}

#[test]
fn a_request_for_io_uring_gives_it_or_an_error() {
    let folder = Folder::new();
    match LocalDirectory::open(&folder.0, LocalQueues::Uring) {
        Ok(directory) => assert_eq!(directory.queue_kind(), QueueKind::Uring),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert_eq!(folder.open(LocalQueues::Auto).queue_kind(), QueueKind::Threads);
        }
    }
}

#[test]
fn simulated_buffered() {
    conforms(&simulated(), IoMode::Buffered);
}

#[test]
fn simulated_direct() {
    conforms(&simulated(), IoMode::Direct);
}

#[test]
fn memory() {
    let medium = MemoryMedium::new(7);
    let directory = medium.connect();
    assert!(directory.local().is_none());
    conforms(&directory, IoMode::Buffered);
    files::space_follows_the_length(directory.as_ref());
    assert!(medium.overtaken() > 0, "operations completed in the order of submission");
}

#[test]
fn overlay() {
    let directory: Arc<dyn Directory> = Arc::new(Overlay::over(simulated()));
    conforms(&directory, IoMode::Buffered);
}

#[test]
fn a_revoked_owner_is_notified_and_fenced_and_flushed_data_stays() {
    let medium = MemoryMedium::new(7);
    let directory = medium.connect();
    let file = directory.create("file", IoMode::Buffered).unwrap();
    let lock = directory.lock("lock").unwrap();
    directory.sync().unwrap();
    let told = Arc::new(AtomicU32::new(0));
    let tell = || {
        let told = Arc::clone(&told);
        Box::new(move || {
            told.fetch_add(1, Ordering::SeqCst);
        })
    };
    lock.on_loss(tell());
    file.write_at(&[&[1; 100]], 0, false).unwrap();
    file.sync().unwrap();
    file.write_at(&[&[2; 200]], 50, false).unwrap();
    assert_eq!(told.load(Ordering::SeqCst), 0);
    medium.revoke();
    assert_eq!(told.load(Ordering::SeqCst), 1);
    lock.on_loss(tell());
    assert_eq!(told.load(Ordering::SeqCst), 2, "at once");
    assert!(lock.loss().unwrap().is_some());
    let changes = medium.changes();
    let mut queue = directory.queue(4).unwrap();
    queue.write(&file, 0, vec![Buffer::zeroed(1).into()], true, 1);
    queue.sync(&file, 2);
    let refused = queues::drain(queue.as_mut()).into_iter().map(|completion| completion.result);
    let others = [file.write_at(&[&[3]], 0, false), file.sync(), file.set_len(0), file.punch(0, 10), directory.sync()];
    let names = [directory.rename("file", "other"), directory.remove("file"), directory.lock("lock").map(|_| ())];
    for result in refused.chain(others).chain(names) {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
    assert_eq!(medium.changes(), changes);
    let next = medium.connect();
    let _lock = next.lock("lock").unwrap();
    drop(lock);
    assert_eq!(medium.connect().lock("lock").err().unwrap().kind(), ErrorKind::WouldBlock);
    let file = next.open("file", IoMode::Buffered).unwrap();
    let mut found = [9; 200];
    file.read_at(&mut found, 0).unwrap();
    assert!(found[..100] == [1; 100] && found[100..] == [0; 100] && file.len().unwrap() == 100);
}

#[test]
fn thread_queue_carries_files_without_descriptor() {
    use backend::portable::{PortableQueue, Workers};
    let directory = simulated();
    let file = directory.create("plain", IoMode::Buffered).unwrap();
    let mut queue = PortableQueue::new(Workers::new(), 8).unwrap();
    queues::run_queued_script(&mut queue, &file, IoMode::Buffered, 3);
}
