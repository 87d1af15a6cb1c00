//! Disks of 64 TiB that are almost empty: the number of steps depends on the data, not on the capacity. If it depended
//! on the capacity, the tests of the copier would not end.

use super::super::{Base, MirrorDevice};
use crate::convert::{DeviceSource, Source};
use crate::device::{Allocation, Device, DirtyExtent, FlushTicket, ReadPlan, Segment, StatusExtent, Verdict};
use crate::{NoProgress, Progress};
use backend::{BLOCK_SIZE, SharedSlice};
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use testkit::Random;

const CAPACITY: u64 = 64 << 40;
const BLOCK: u64 = BLOCK_SIZE as u64;
/// Queries that cover the capacity with room for some slow ones. One query for each GiB would be 65536.
const QUERIES_MAX: u64 = 2000;

/// A disk in memory that has only the blocks with data. It counts queries of its map, and reads.
struct SparseDevice {
    blocks: Mutex<BTreeMap<u64, Vec<u8>>>,
    queries: AtomicU64,
    reads: AtomicU64,
}

impl SparseDevice {
    /// A disk with data in these blocks.
    fn with(blocks: &[u64]) -> Arc<Self> {
        let blocks = blocks.iter().map(|block| (*block, vec![*block as u8 | 1; BLOCK_SIZE])).collect();
        Arc::new(Self { blocks: Mutex::new(blocks), queries: AtomicU64::new(0), reads: AtomicU64::new(0) })
    }

    fn queries(&self) -> u64 {
        self.queries.load(Ordering::SeqCst)
    }
}

impl Device for SparseDevice {
    fn name(&self) -> &str {
        "sparse"
    }

    fn capacity(&self) -> u64 {
        CAPACITY
    }

    fn read_only(&self) -> bool {
        false
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        assert!(offset.is_multiple_of(BLOCK) && length.is_multiple_of(BLOCK_SIZE));
        self.reads.fetch_add(1, Ordering::SeqCst);
        let blocks = self.blocks.lock();
        let segments = (offset / BLOCK..offset / BLOCK + length as u64 / BLOCK)
            .map(|block| match blocks.get(&block) {
                Some(bytes) => Segment::Memory(SharedSlice::copy_of(bytes)),
                None => Segment::Zero { length: BLOCK_SIZE },
            })
            .collect();
        Ok(ReadPlan { segments, skip: 0, length, offset, guard: None })
    }

    fn finish_read(&self, _plan: &mut ReadPlan) -> Result<Verdict> {
        Ok(Verdict::Good)
    }

    fn write(&self, offset: u64, data: SharedSlice, _fua: bool) -> Result<()> {
        assert!(offset.is_multiple_of(BLOCK) && data.len().is_multiple_of(BLOCK_SIZE));
        let parts = data.chunks(BLOCK_SIZE).map(<[u8]>::to_vec);
        self.blocks.lock().extend((offset / BLOCK..).zip(parts));
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.write_zeroes(offset, length, false, fua)
    }

    fn write_zeroes(&self, offset: u64, length: u64, _allocate: bool, _fua: bool) -> Result<()> {
        let zeroed = offset / BLOCK..(offset + length) / BLOCK;
        self.blocks.lock().retain(|block, _| !zeroed.contains(block));
        Ok(())
    }

    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        Ok(())
    }

    fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    fn resize(&self, _capacity: u64) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "the size is fixed"))
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.queries.fetch_add(1, Ordering::SeqCst);
        let (mut at, end) = (offset, offset + length);
        let mut out = Vec::new();
        for (block, _) in self.blocks.lock().range(offset / BLOCK..end.div_ceil(BLOCK)) {
            let (start, stop) = ((block * BLOCK).max(offset), ((block + 1) * BLOCK).min(end));
            if at < start {
                out.push(StatusExtent { length: start - at, allocation: Allocation::Hole });
            }
            out.push(StatusExtent { length: stop - start, allocation: Allocation::Data });
            at = stop;
        }
        if at < end {
            out.push(StatusExtent { length: end - at, allocation: Allocation::Hole });
        }
        out.truncate(limit);
        Ok(out)
    }

    fn dirty_bases(&self) -> Vec<String> {
        Vec::new()
    }

    fn changed_since(&self, _base: &str, _offset: u64, length: u64, _limit: usize) -> Result<Vec<DirtyExtent>> {
        Ok(vec![DirtyExtent { length, dirty: true }])
    }
}

/// Keeps the last report.
#[derive(Default)]
struct Reported(Mutex<(u64, u64)>);

impl Progress for Reported {
    fn update(&self, done: u64, total: u64) {
        let mut last = self.0.lock();
        assert!(last.0 <= done && done <= total, "{done} of {total} after {last:?}");
        *last = (done, total);
    }
}

#[test]
fn an_almost_empty_disk_is_copied_in_few_steps() {
    let source = SparseDevice::with(&[0, 3 << 30, (5 << 30) + 77, CAPACITY / BLOCK - 1]);
    let target = SparseDevice::with(&[]);
    let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::Zeros).unwrap();
    let progress = Reported::default();
    mirror.mark_data(&progress).unwrap();
    let copied = mirror.copy(&progress).unwrap();
    mirror.settle().unwrap();
    assert!(*source.blocks.lock() == *target.blocks.lock());
    // On a disk of this capacity a mark covers 1 MiB.
    assert_eq!((copied.read, copied.written), (4 << 20, 4 * BLOCK));
    assert_eq!(*progress.0.lock(), (4 << 20, 4 << 20));
    assert!(source.queries() < QUERIES_MAX, "{} queries", source.queries());
    // Steps have 128 to 256 KiB.
    let reads = source.reads.load(Ordering::SeqCst);
    assert!(reads <= 32, "{reads} reads");
}

#[test]
fn marked_zeros_in_both_copies_are_passed_over_in_few_steps() {
    let source = SparseDevice::with(&[5, 3 << 30, CAPACITY / BLOCK - 1]);
    let target = SparseDevice::with(&[6, 3 << 30, 4 << 30]);
    let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::State).unwrap();
    mirror.mark(0..CAPACITY);
    let progress = Reported::default();
    let copied = mirror.copy(&progress).unwrap();
    mirror.settle().unwrap();
    assert!(*source.blocks.lock() == *target.blocks.lock());
    assert_eq!(copied.written, 2 * BLOCK);
    assert_eq!(*progress.0.lock(), (CAPACITY, CAPACITY));
    for device in [&source, &target] {
        let (queries, reads) = (device.queries(), device.reads.load(Ordering::SeqCst));
        assert!(queries < 5 * QUERIES_MAX && reads <= 20, "{queries} queries, {reads} reads");
    }
}

#[test]
fn an_empty_disk_is_copied_in_few_steps_while_a_client_writes() {
    let (source, target) = (SparseDevice::with(&[]), SparseDevice::with(&[]));
    let mirror = MirrorDevice::new(source.clone(), target.clone(), Base::Zeros).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random(5);
            for _ in 0..300 {
                let offset = random.below(CAPACITY / BLOCK) * BLOCK;
                let data = SharedSlice::copy_of(&[random.next() as u8 | 1; BLOCK_SIZE]);
                mirror.write(offset, data, false).unwrap();
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        mirror.mark_data(&NoProgress).unwrap();
        mirror.copy(&NoProgress).unwrap();
        mirror.settle().unwrap();
    });
    assert_eq!(source.blocks.lock().len(), 300);
    assert!(*source.blocks.lock() == *target.blocks.lock());
}

#[test]
fn a_conversion_finds_the_data_of_an_almost_empty_disk_with_few_queries() {
    let device = SparseDevice::with(&[9 << 30]);
    let mut source = DeviceSource::new(device.clone());
    let (mut at, mut data) = (0, Vec::new());
    while at < source.capacity() {
        let run = source.next(at).unwrap();
        if !run.zero {
            data.push((at, run.length));
        }
        at += run.length;
    }
    assert_eq!((at, data), (CAPACITY, vec![((9 << 30) * BLOCK, BLOCK)]));
    assert!(device.queries() < QUERIES_MAX, "{} queries", device.queries());
}
