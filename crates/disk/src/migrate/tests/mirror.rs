//! The mirror under clients that write, discard, zero and flush at any alignment during a copy.

use super::super::testbed::{MemoryDevice, placed, range};
use super::super::{Base, MirrorDevice};
use crate::{Device, NoProgress, Progress, Throttled};
use backend::{Buffer, SharedSlice};
use error::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use testkit::Random;

const CAPACITY: usize = (6 << 20) + 512;

fn at_rate(rate: u64) -> Throttled<'static> {
    Throttled { progress: &NoProgress, rate }
}

fn content(seed: u64, share: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes = vec![0; CAPACITY];
    for block in bytes.chunks_mut(4096) {
        if random.percent(share) {
            block.iter_mut().for_each(|byte| *byte = random.next() as u8);
        }
    }
    bytes
}

/// A client that uses its own part of the disk, and the content that it expects there.
struct Client<'a> {
    device: &'a dyn Device,
    random: Random,
    start: u64,
    model: Vec<u8>,
}

impl Client<'_> {
    fn step(&mut self) {
        let (at, length) = range(&mut self.random, self.model.len() as u64, 300 << 10);
        let offset = self.start + at;
        let part = at as usize..(at + length) as usize;
        let fua = self.random.percent(10);
        match self.random.below(10) {
            0 => {
                self.device.discard(offset, length, fua).unwrap();
                self.model[part].fill(0);
            }
            1 => {
                self.device.write_zeroes(offset, length, true, fua).unwrap();
                self.model[part].fill(0);
            }
            2 => self.device.flush().unwrap(),
            3 | 4 => assert_eq!(self.device.read(offset, length as usize).unwrap(), self.model[part]),
            _ => {
                let seed = self.random.next();
                let bytes: Vec<u8> = (0..length).map(|i| (seed.rotate_left(i as u32 % 64) ^ i) as u8).collect();
                self.device.write(offset, placed(seed, &bytes), fua).unwrap();
                self.model[part].copy_from_slice(&bytes);
            }
        }
    }
}

/// Runs clients on the mirror until `work` ends; returns the content that they expect of the whole disk.
fn under_load<T>(mirror: &MirrorDevice, start: &[u8], seed: u64, work: impl FnOnce() -> T) -> (T, Vec<u8>) {
    const CLIENTS: usize = 3;
    let stop = AtomicBool::new(false);
    let size = CAPACITY / CLIENTS;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let from = number * size;
                let to = if number + 1 == CLIENTS { CAPACITY } else { from + size };
                let model = start[from..to].to_vec();
                let mut client =
                    Client { device: mirror, random: Random(seed * 31 + number as u64), start: from as u64, model };
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        client.step();
                    }
                    client.model
                })
            })
            .collect();
        let outcome = work();
        stop.store(true, Ordering::Relaxed);
        (outcome, clients.into_iter().flat_map(|client| client.join().unwrap()).collect())
    })
}

#[test]
fn both_copies_are_equal_after_writes_during_the_copy() {
    for seed in 0..12 {
        let before = content(seed, 20 + seed % 3 * 40);
        let base = if seed % 2 == 0 { Base::Zeros } else { Base::State };
        let source = MemoryDevice::new(before.clone());
        let target = MemoryDevice::new(match base {
            Base::Zeros => vec![0; CAPACITY],
            // An earlier state of the disk, equal to the source for some seeds.
            Base::State => content(seed + if seed % 4 == 1 { 0 } else { 100 }, 50),
        });
        let mirror = MirrorDevice::new(source.clone(), target.clone(), base).unwrap();
        let ((), model) = under_load(&mirror, &before, seed, || {
            match base {
                Base::Zeros => mirror.mark_data(&NoProgress).unwrap(),
                Base::State => mirror.mark(0..CAPACITY as u64),
            }
            mirror.copy(&at_rate(if seed % 3 == 0 { 20 << 20 } else { 0 })).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            mirror.settle().unwrap();
            mirror.commit(|| Ok(())).unwrap();
        });
        assert!(source.bytes() == model, "seed {seed}: the source is what was written");
        assert!(target.bytes() == model, "seed {seed}: the target is what was written");
    }
}

#[test]
fn ranges_equal_to_the_base_are_not_written() {
    let base = content(1, 60);
    let mut now = base.clone();
    now[100_000] ^= 1;
    now[(1 << 20)..(1 << 20) + 8192].fill(0);
    let (source, target) = (MemoryDevice::new(now.clone()), MemoryDevice::new(base));
    let mirror = MirrorDevice::new(source, target.clone(), Base::State).unwrap();
    mirror.mark(90_000..110_000);
    mirror.mark(1 << 20..(1 << 20) + (1 << 19));
    let copied = mirror.copy(&NoProgress).unwrap();
    assert!(target.bytes() == now);
    assert_eq!(copied.written, 4096);
    assert!(copied.read < 600 << 10);
}

#[test]
fn holes_and_zeros_take_no_space_in_the_target() {
    let mut before = vec![0; CAPACITY];
    before[1 << 20..(1 << 20) + 5000].fill(7);
    let source = MemoryDevice::new(before.clone());
    // A range of zeros that were written, as on a disk that was zeroed at its creation.
    source.write(2 << 20, Buffer::zeroed(64).into(), false).unwrap();
    let target = MemoryDevice::new(vec![0; CAPACITY]);
    let mirror = MirrorDevice::new(source, target.clone(), Base::Zeros).unwrap();
    mirror.mark_data(&NoProgress).unwrap();
    let copied = mirror.copy(&NoProgress).unwrap();
    assert_eq!((copied.read, copied.written), (8192 + (64 << 12), 8192));
    assert!(target.bytes() == before);
    assert!(copied.written == 8192 && target.status(0, CAPACITY as u64, 10).unwrap().len() == 3);
}

#[test]
fn a_failing_target_ends_the_migration_and_fails_no_request() {
    for seed in 0..16 {
        let before = content(seed, 70);
        let source = MemoryDevice::new(before.clone());
        let target = MemoryDevice::slow(vec![0; CAPACITY], Duration::from_micros(300));
        target.fail_after.store(seed * 5, Ordering::SeqCst);
        let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::Zeros).unwrap();
        let (error, model) = under_load(&mirror, &before, seed, || {
            let outcome = mirror.mark_data(&NoProgress).and_then(|()| mirror.copy(&NoProgress)).and_then(|_| {
                // The copier has ended, so only writes of clients and the flush can fail on the target.
                target.failing.store(true, Ordering::SeqCst);
                mirror.settle()
            });
            mirror.give_up();
            std::thread::sleep(Duration::from_millis(3));
            outcome.unwrap_err()
        });
        assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Io), "{error}");
        assert!(source.bytes() == model, "seed {seed}");
    }
}

#[test]
fn a_full_source_is_copied_although_requests_are_refused() {
    let before = content(6, 60);
    let (source, target) = (MemoryDevice::new(before), MemoryDevice::new(vec![0; CAPACITY]));
    let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::Zeros).unwrap();
    source.failing.store(true, Ordering::SeqCst);
    source.partly.store(true, Ordering::SeqCst);
    let refused = |at: u64| {
        assert_eq!(mirror.write(at, placed(at, &[9; 300 << 10]), false).unwrap_err().kind(), ErrorKind::NoSpace);
        let zeroed = mirror.write_zeroes(at + (1 << 20), 8192, false, false);
        assert_eq!(zeroed.unwrap_err().kind(), ErrorKind::NoSpace);
        mirror.discard(at + (2 << 20), 1 << 20, false).unwrap();
    };
    // Before the copy, and after it.
    refused(512);
    mirror.mark_data(&NoProgress).unwrap();
    mirror.copy(&NoProgress).unwrap();
    assert!(target.bytes() == source.bytes());
    refused(8192);
    refused(3 << 20);
    source.failing.store(false, Ordering::SeqCst);
    mirror.settle().unwrap();
    mirror.commit(|| Ok(())).unwrap();
    assert!(target.bytes() == source.bytes());
}

#[test]
fn a_failing_target_fails_requests_after_the_commit() {
    let (source, target) = (MemoryDevice::new(content(1, 50)), MemoryDevice::new(vec![0; CAPACITY]));
    let mirror = MirrorDevice::new(source, target.clone(), Base::Zeros).unwrap();
    mirror.mark_data(&NoProgress).unwrap();
    mirror.copy(&NoProgress).unwrap();
    mirror.settle().unwrap();
    target.failing.store(true, Ordering::SeqCst);
    // No request has failed on the target yet, so the commit succeeds, and the target becomes the current disk.
    mirror.commit(|| Ok(())).unwrap();
    assert_eq!(mirror.write(0, Buffer::zeroed(1).into(), false).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(mirror.flush().unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn a_failed_commit_keeps_the_source() {
    let (source, target) = (MemoryDevice::new(content(1, 50)), MemoryDevice::new(vec![0; CAPACITY]));
    let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::Zeros).unwrap();
    mirror.mark_data(&NoProgress).unwrap();
    mirror.copy(&NoProgress).unwrap();
    mirror.settle().unwrap();
    let refused = mirror.commit(|| Err::<(), _>(error::Error::new(ErrorKind::Io, "no")));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Io);
    target.failing.store(true, Ordering::SeqCst);
    mirror.write(0, Buffer::zeroed(1).into(), true).unwrap();
    // A write has failed on the target, so the commit must be refused.
    assert!(mirror.commit(|| -> error::Result<()> { panic!("the target is not a copy any more") }).is_err());
    assert!(source.durable()[..4096] == [0; 4096]);
}

#[test]
fn a_flush_after_settling_covers_source_and_target() {
    let (source, target) = (MemoryDevice::new(content(1, 50)), MemoryDevice::new(vec![0; CAPACITY]));
    let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::Zeros).unwrap();
    mirror.mark_data(&NoProgress).unwrap();
    mirror.copy(&NoProgress).unwrap();
    mirror.write(512, placed(512, &[9; 100]), true).unwrap();
    let flushes = target.flushes.load(Ordering::SeqCst);
    assert!(target.durable()[512..612] != [9; 100], "before `settle`, a guest's flush does not wait for the target");
    mirror.settle().unwrap();
    assert!(target.flushes.load(Ordering::SeqCst) > flushes && target.durable()[512..612] == [9; 100]);
    mirror.write(5000, placed(0, &[8; 100]), true).unwrap();
    assert!(target.durable()[5000..5100] == [8; 100] && source.durable()[5000..5100] == [8; 100]);
}

#[test]
fn the_copy_ends_although_the_buffer_of_the_target_stays_full() {
    let (source, target) = (MemoryDevice::new(content(4, 100)), MemoryDevice::new(vec![0; CAPACITY]));
    let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::Zeros).unwrap();
    target.pressure.store(100, Ordering::SeqCst);
    mirror.mark_data(&NoProgress).unwrap();
    mirror.copy(&NoProgress).unwrap();
    assert!(target.bytes() == source.bytes());
    assert!(
        target.pressure_asked.load(Ordering::SeqCst) > 0,
        "the migration did not query the target's write pressure"
    );
    // Also after a cancellation, the copier must not wait until the target's buffer has room.
    let mirror = MirrorDevice::new(source, target, Base::Zeros).unwrap();
    mirror.mark_data(&NoProgress).unwrap();
    let stopped = mirror.copy(&Throttled { progress: &CancelAfter(AtomicU64::new(4)), rate: 0 });
    assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Interrupted);
}

/// A progress that is cancelled after a number of calls.
struct CancelAfter(AtomicU64);

impl Progress for CancelAfter {
    fn update(&self, done: u64, total: u64) {
        assert!(done <= total);
    }
    fn cancelled(&self) -> bool {
        self.0.fetch_sub(1, Ordering::SeqCst) == 0
    }
}

#[test]
fn a_copy_that_waits_for_its_rate_is_cancelled_at_once() {
    let source = MemoryDevice::new(content(3, 100));
    let mirror = MirrorDevice::new(source, MemoryDevice::new(vec![0; CAPACITY]), Base::Zeros).unwrap();
    let begun = Instant::now();
    mirror.mark_data(&NoProgress).unwrap();
    let error = mirror.copy(&Throttled { progress: &CancelAfter(AtomicU64::new(3)), rate: 10_000 }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_copy_keeps_to_its_rate() {
    let source = MemoryDevice::new(content(3, 100));
    let mirror = MirrorDevice::new(source, MemoryDevice::new(vec![0; CAPACITY]), Base::Zeros).unwrap();
    mirror.mark_data(&NoProgress).unwrap();
    let begun = Instant::now();
    mirror.copy(&at_rate(12 << 20)).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(300), "{:?} for 6 MiB", begun.elapsed());
}

#[test]
fn a_request_waits_for_one_step_and_not_for_the_copier() {
    // Each change of the target takes 10 ms, so that the copier uses the smallest step: about thirty steps in total.
    const LARGE: usize = 4 << 20;
    let source = MemoryDevice::new(vec![7; LARGE]);
    let target = MemoryDevice::slow(vec![0; LARGE], Duration::from_millis(10));
    let mirror = MirrorDevice::new(source, target.clone(), Base::Zeros).unwrap();
    let changes = || target.changes.load(Ordering::SeqCst);
    let done = AtomicBool::new(false);
    let worst = std::thread::scope(|scope| {
        scope.spawn(|| {
            mirror.mark_data(&NoProgress).unwrap();
            mirror.copy(&NoProgress).unwrap();
            done.store(true, Ordering::SeqCst);
        });
        let mut random = Random(5);
        let mut worst = 0;
        while !done.load(Ordering::SeqCst) {
            let before = changes();
            let offset = random.below(LARGE as u64 / 4096) * 4096;
            // The data is not zeros, because the copier does not write zeros.
            mirror.write(offset, SharedSlice::copy_of(&[9; 4096]), false).unwrap();
            worst = worst.max(changes() - before);
        }
        worst
    });
    // A request waits for at most one step of the copier and its own change. The bound is higher, because the machine
    // may be busy.
    assert!(worst < changes() / 3, "{worst} of {} changes while one request waited", changes());
}

#[test]
fn a_target_of_another_size_and_a_resize_during_migration_are_refused() {
    let source = MemoryDevice::new(vec![0; 8192]);
    let other = MirrorDevice::new(source.clone(), MemoryDevice::new(vec![0; 4096]), Base::Zeros);
    assert_eq!(other.err().unwrap().kind(), ErrorKind::Invalid);
    let mirror = MirrorDevice::new(source, MemoryDevice::new(vec![0; 8192]), Base::Zeros).unwrap();
    assert_eq!(mirror.resize(16384).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(mirror.write(4097, Buffer::zeroed(1).into(), false).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(mirror.discard(u64::MAX, 2, false).unwrap_err().kind(), ErrorKind::Invalid);
    let _unused: Arc<dyn Device> = Arc::new(mirror);
}
