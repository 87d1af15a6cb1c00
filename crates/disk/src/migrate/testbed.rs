//! Test helpers for migrations: random input, and a device in memory that can be slow and can fail.

use crate::device::{Allocation, Device, DirtyExtent, FlushTicket, ReadPlan, Segment, StatusExtent, Verdict};
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use testkit::Random;

/// A random range at any alignment, mostly short.
pub(super) fn range(random: &mut Random, capacity: u64, most: u64) -> (u64, u64) {
    let align = [1, 512, 4096][random.index(3)];
    let most = [8192, most, most / 8][random.index(3)].min(capacity);
    let length = (1 + random.below(most)).next_multiple_of(align).min(capacity);
    let start = random.below(capacity - length + 1) / align * align;
    (start, length)
}

/// A buffer that has `bytes` at offset `lead` within a block of memory, with other bytes around them.
pub(super) fn placed(lead: u64, bytes: &[u8]) -> SharedSlice {
    let at = lead as usize % BLOCK_SIZE;
    let mut buffer = Buffer::recycled((at + bytes.len()).div_ceil(BLOCK_SIZE).max(1));
    buffer.fill(0xee);
    buffer[at..at + bytes.len()].copy_from_slice(bytes);
    SharedSlice::new(Arc::new(buffer), at..at + bytes.len())
}

struct Content {
    live: Vec<u8>,
    /// The content that the last flush made durable.
    durable: Vec<u8>,
    /// Whether each block was written after it was last discarded.
    allocated: Vec<bool>,
}

/// A disk in memory.
pub(super) struct MemoryDevice {
    content: Mutex<Content>,
    /// How long a write takes.
    pub delay: Duration,
    /// Whether all further changes fail.
    pub failing: AtomicBool,
    /// Whether the first half of a change is made before it fails.
    pub partly: AtomicBool,
    /// Number of changes after which further changes fail.
    pub fail_after: AtomicU64,
    pub changes: AtomicU64,
    pub flushes: AtomicU64,
    /// The fill level of the write buffer that the device reports, and the number of queries of this level.
    pub pressure: AtomicU32,
    pub pressure_asked: AtomicU64,
}

impl MemoryDevice {
    pub fn new(content: Vec<u8>) -> Arc<Self> {
        Self::slow(content, Duration::ZERO)
    }

    pub fn slow(content: Vec<u8>, delay: Duration) -> Arc<Self> {
        let allocated = content.chunks(BLOCK_SIZE).map(|block| block.iter().any(|byte| *byte != 0)).collect();
        let content = Content { durable: content.clone(), live: content, allocated };
        Arc::new(Self {
            content: Mutex::new(content),
            delay,
            failing: AtomicBool::new(false),
            partly: AtomicBool::new(false),
            fail_after: AtomicU64::new(u64::MAX),
            changes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            pressure: AtomicU32::new(0),
            pressure_asked: AtomicU64::new(0),
        })
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.content.lock().live.clone()
    }

    pub fn durable(&self) -> Vec<u8> {
        self.content.lock().durable.clone()
    }

    fn change(&self, offset: u64, length: u64, data: Option<&[u8]>) -> Result<()> {
        if !self.delay.is_zero() {
            std::thread::sleep(self.delay);
        }
        let number = self.changes.fetch_add(1, Ordering::SeqCst);
        let fails = self.failing.load(Ordering::SeqCst) || number >= self.fail_after.load(Ordering::SeqCst);
        if fails && self.partly.load(Ordering::SeqCst) {
            let half = length / 2;
            self.carry_out(offset, half, data.map(|data| &data[..half as usize]));
        }
        if fails {
            return Err(Error::new(ErrorKind::NoSpace, "memory is full"));
        }
        self.carry_out(offset, length, data);
        Ok(())
    }

    fn carry_out(&self, offset: u64, length: u64, data: Option<&[u8]>) {
        let mut content = self.content.lock();
        let range = offset as usize..(offset + length) as usize;
        match data {
            Some(data) => content.live[range.clone()].copy_from_slice(data),
            None => content.live[range.clone()].fill(0),
        }
        for block in range.start / BLOCK_SIZE..range.end.div_ceil(BLOCK_SIZE) {
            let (from, to) = (block * BLOCK_SIZE, ((block + 1) * BLOCK_SIZE).min(content.live.len()));
            let whole = range.start <= from && to <= range.end;
            if data.is_some() || whole {
                content.allocated[block] = data.is_some();
            }
        }
    }
}

impl Device for MemoryDevice {
    fn name(&self) -> &str {
        "memory"
    }

    fn capacity(&self) -> u64 {
        self.content.lock().live.len() as u64
    }

    fn read_only(&self) -> bool {
        false
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        let content = self.content.lock();
        let bytes = content.live.get(offset as usize..offset as usize + length);
        let bytes = bytes.ok_or_else(|| Error::new(ErrorKind::Invalid, "past the end"))?;
        let buffer = Arc::new(Buffer::copy_of(bytes));
        let segments = vec![Segment::Memory(SharedSlice::new(buffer, 0..length))];
        Ok(ReadPlan { segments, skip: 0, length, offset, guard: None })
    }

    fn finish_read(&self, _plan: &mut ReadPlan) -> Result<Verdict> {
        Ok(Verdict::Good)
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        self.change(offset, data.len() as u64, Some(&data))?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn pressure(&self) -> u32 {
        self.pressure_asked.fetch_add(1, Ordering::SeqCst);
        self.pressure.load(Ordering::SeqCst)
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.write_zeroes(offset, length, false, fua)
    }

    fn write_zeroes(&self, offset: u64, length: u64, _allocate: bool, fua: bool) -> Result<()> {
        self.change(offset, length, None)?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        if self.failing.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Io, "memory cannot be flushed"));
        }
        self.flushes.fetch_add(1, Ordering::SeqCst);
        let mut content = self.content.lock();
        content.durable = content.live.clone();
        Ok(())
    }

    fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    fn resize(&self, _capacity: u64) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "memory keeps its size"))
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        let content = self.content.lock();
        let (mut at, end) = (offset, offset + length);
        let mut out: Vec<StatusExtent> = Vec::new();
        while at < end && out.len() <= limit {
            let block = at as usize / BLOCK_SIZE;
            let stop = ((block + 1) * BLOCK_SIZE).min(end as usize) as u64;
            let allocation = if content.allocated[block] { Allocation::Data } else { Allocation::Hole };
            match out.last_mut() {
                Some(last) if last.allocation == allocation => last.length += stop - at,
                _ => out.push(StatusExtent { length: stop - at, allocation }),
            }
            at = stop;
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
