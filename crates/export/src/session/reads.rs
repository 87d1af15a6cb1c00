//! Reads in progress: from a plan to verified bytes in memory.
//!
//! Each media segment is first read from the page cache with a non-blocking system call; a segment that is not cached
//! is read through the session's I/O queue. A read is finished when all its segments are in memory and the device has
//! verified them. If the range changed meanwhile, the read is planned again, a bounded number of times. A read whose
//! plan needs metadata from the medium is put off until all requests of its batch are submitted, so that the metadata
//! of all reads of one client is fetched concurrently. If a read fails of which the device may not need all blocks, its
//! blocks are read one by one on the session's thread. Invariants:
//!
//! 1. A slot belongs to one read from its first operation in flight until its last operation has completed, so that a
//!    token never refers to another read.
//! 2. The guard of a plan exists until the read is verified, but not while its reply waits for a slow client.
//! 3. The queue is dropped before the plans, and waits for operations in flight.
//! 4. When the session waits, no read is still put off.

use super::ahead::Ahead;
use super::limits::{QUEUE_DEPTH, READ_PLANS_MAX};
use super::pool::Pool;
use crate::exports::Exports;
use backend::{Completion, Queue};
use disk::device::{Device, ReadPlan, Segment, Verdict};
use error::{Error, ErrorKind, IoContext, Result};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of watched descriptors, distinct from those of reads: the socket, and the flush that was handed over.
const SOCKET_TOKEN: u64 = u64::MAX;
const FLUSH_TOKEN: u64 = u64::MAX - 1;

/// Number of reads that do not check the page cache after a miss. Each further miss doubles the number, up to the
/// maximum.
const CACHE_SKIP_MIN: u32 = 1;
const CACHE_SKIP_MAX: u32 = 32;

/// Number of attempts to plan the reads that were put off together; after that each is planned by itself. A plan needs
/// a path through a tree and a page of checksums, and the upper levels of a tree are rarely missing, so a few attempts
/// suffice.
const TRIES_TOGETHER_MAX: u32 = 4;

/// A read request.
pub struct Ask<T> {
    /// The tag with which the read was submitted.
    pub tag: T,
    /// Byte offset.
    pub offset: u64,
    /// Length in bytes.
    pub length: usize,
    /// Arrival time, if latency is measured.
    pub arrived: Option<Instant>,
}

/// A finished read.
pub struct Finished<T> {
    /// The request.
    pub ask: Ask<T>,
    /// The data, or the error.
    pub outcome: Result<ReadPlan>,
}

impl<T> Finished<T> {
    /// Bytes of data in the read.
    pub fn bytes(&self) -> usize {
        self.outcome.as_ref().map_or(0, |plan| plan.length)
    }
}

/// The watched descriptors that a wait found readable.
#[derive(Clone, Copy, Default)]
pub struct Readable {
    /// The socket.
    pub socket: bool,
    /// The descriptor that signals the end of a flush.
    pub flush: bool,
}

/// The bytes that are fetched for a read. A read of one block of a pack fetches the whole pack.
fn fetched_bytes(plan: &ReadPlan) -> usize {
    let fetched = |segment: &Segment| if let Segment::Media(media) = segment { media.length } else { 0 };
    plan.segments.iter().map(fetched).sum()
}

struct Pending<T> {
    ask: Ask<T>,
    plan: ReadPlan,
    /// The bytes for which the read counts until it is finished.
    held: usize,
    /// Number of plans made so far for the read.
    plans: u32,
    /// Number of segments in flight.
    missing: usize,
    failure: Option<io::Error>,
}

/// Whether checking the page cache first has recently succeeded. If nothing is cached, each check is a useless system
/// call. The queue also reads cached pages, but at a higher cost.
#[derive(Default)]
struct CacheLuck {
    skip: u32,
    backoff: u32,
}

impl CacheLuck {
    fn try_now(&mut self) -> bool {
        if self.skip == 0 {
            return true;
        }
        self.skip -= 1;
        false
    }
    fn hit(&mut self) {
        self.backoff = 0;
    }
    fn miss(&mut self) {
        self.backoff = (self.backoff * 2).clamp(CACHE_SKIP_MIN, CACHE_SKIP_MAX);
        self.skip = self.backoff;
    }
}

/// All reads of one session.
pub struct Reads<'a, T> {
    queue: Option<Box<dyn Queue>>,
    /// Whether the queue could not be created, so that every read blocks in its own system call.
    no_queue: bool,
    device: Arc<dyn Device>,
    exports: &'a dyn Exports,
    slots: Vec<Option<Pending<T>>>,
    free: Vec<usize>,
    /// Reads whose plans miss metadata.
    put_off: Vec<Ask<T>>,
    pending: usize,
    held: usize,
    luck: CacheLuck,
    ahead: Ahead,
    completions: Vec<Completion>,
    armed: bool,
    flush_armed: bool,
}

impl<'a, T> Reads<'a, T> {
    /// An empty set of reads. The queue is created when the first read misses the page cache.
    pub fn new(device: Arc<dyn Device>, exports: &'a dyn Exports) -> Self {
        Self {
            queue: None,
            no_queue: false,
            device,
            exports,
            slots: Vec::new(),
            free: Vec::new(),
            put_off: Vec::new(),
            pending: 0,
            held: 0,
            luck: CacheLuck::default(),
            ahead: Ahead::default(),
            completions: Vec::new(),
            armed: false,
            flush_armed: false,
        }
    }

    /// Number of reads that are not finished.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Bytes requested by reads that are not finished, or fetched for them where these are more.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Whether the queue is watching the socket.
    pub fn armed(&self) -> bool {
        self.armed
    }

    /// Begins a read. Returns the read if it is finished at once.
    pub fn begin(&mut self, ask: Ask<T>, pool: &mut Pool) -> Option<Finished<T>> {
        self.ahead.saw(ask.offset, ask.length as u64);
        let finished = match self.device.try_plan_read(ask.offset, ask.length).transpose() {
            Some(planned) => self.carry_out(ask, planned, 1, pool),
            None => {
                self.pending += 1;
                self.held += ask.length;
                self.put_off.push(ask);
                None
            }
        };
        if finished.is_none() {
            self.ahead.missed();
        }
        self.read_ahead();
        finished
    }

    /// Begins the reads that were put off.
    pub fn begin_put_off(&mut self, pool: &mut Pool, finished: &mut Vec<Finished<T>>) {
        for _ in 0..TRIES_TOGETHER_MAX {
            if self.put_off.len() < 2 {
                break;
            }
            for ask in &self.put_off {
                // An error is ignored here, because the next plan of the read reports it.
                let _ = self.device.load_for_read(ask.offset, ask.length);
            }
            for ask in std::mem::take(&mut self.put_off) {
                match self.device.try_plan_read(ask.offset, ask.length).transpose() {
                    Some(planned) => finished.extend(self.resume(ask, planned, pool)),
                    None => self.put_off.push(ask),
                }
            }
        }
        for ask in std::mem::take(&mut self.put_off) {
            let planned = self.device.plan_read(ask.offset, ask.length);
            finished.extend(self.resume(ask, planned, pool));
        }
    }

    /// Continues a read that was put off, with its first plan.
    fn resume(&mut self, ask: Ask<T>, planned: Result<ReadPlan>, pool: &mut Pool) -> Option<Finished<T>> {
        self.pending -= 1;
        self.held -= ask.length;
        self.carry_out(ask, planned, 1, pool)
    }

    /// Loads the predicted next range into the page cache. If its location is reused for other data meanwhile, the
    /// read-ahead has no use, but does no harm.
    fn read_ahead(&mut self) {
        let Some(range) = self.ahead.wanted(self.device.capacity()) else { return };
        let Ok(plan) = self.device.plan_read(range.start, (range.end - range.start) as usize) else { return };
        for segment in &plan.segments {
            if let Segment::Media(media) = segment {
                media.file.will_need(media.offset, media.length as u64);
            }
        }
    }

    /// Makes the queue watch the socket as well.
    pub fn watch(&mut self, socket: RawFd) {
        if let Some(queue) = &mut self.queue
            && !self.armed
        {
            queue.poll_readable(socket, SOCKET_TOKEN);
            self.armed = true;
        }
    }

    /// Makes the queue watch for the end of a flush as well.
    pub fn watch_flush(&mut self, descriptor: RawFd) {
        if let Some(queue) = &mut self.queue
            && !self.flush_armed
        {
            queue.poll_readable(descriptor, FLUSH_TOKEN);
            self.flush_armed = true;
        }
    }

    /// Waits for completions and for the watched descriptors.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        pool: &mut Pool,
        finished: &mut Vec<Finished<T>>,
    ) -> io::Result<Readable> {
        let mut readable = Readable::default();
        let Some(queue) = &mut self.queue else { return Ok(readable) };
        let mut completions = std::mem::take(&mut self.completions);
        queue.wait(&mut completions, timeout)?;
        for completion in completions.drain(..) {
            match completion.token {
                SOCKET_TOKEN => {
                    self.armed = false;
                    readable.socket = true;
                }
                FLUSH_TOKEN => {
                    self.flush_armed = false;
                    readable.flush = true;
                }
                _ => finished.extend(self.complete(completion, pool)),
            }
        }
        self.completions = completions;
        Ok(readable)
    }

    fn complete(&mut self, completion: Completion, pool: &mut Pool) -> Option<Finished<T>> {
        let (slot, index) = ((completion.token >> 32) as usize, (completion.token & 0xffff_ffff) as usize);
        let pending = self.slots.get_mut(slot)?.as_mut()?;
        pending.missing -= 1;
        let Completion { mut result, mut buffer, .. } = completion;
        if let Some(Segment::Media(media)) = pending.plan.segments.get_mut(index) {
            if let Err(error) = &result
                && media.may_lack_blocks
                && pending.failure.is_none()
            {
                // This blocks the thread, because it is rare.
                let mut again = buffer.take().unwrap_or_else(|| pool.take(media.length));
                result = media.read_again_into(&mut again, error);
                buffer = Some(again);
            }
            media.buffer = buffer;
        }
        if let Err(error) = result {
            pending.failure = Some(error);
        }
        if pending.missing > 0 {
            return None;
        }
        let Pending { ask, plan, held, plans, failure, .. } = self.slots[slot].take()?;
        self.free.push(slot);
        self.pending -= 1;
        self.held -= held;
        if let Some(error) = failure {
            pool.put_plan(plan);
            let what = format!("reading {} bytes at {} of {}", ask.length, ask.offset, self.device.name());
            let error = Error::io(what, error);
            tracing::error!(%error, "read failed");
            return Some(Finished { ask, outcome: Err(error) });
        }
        match self.verify(ask, plan, pool) {
            Ok(finished) => Some(finished),
            Err(again) => self.plan(again, plans, pool),
        }
    }

    /// Plans and fetches, until the read is finished (`Some`) or in flight (`None`).
    fn plan(&mut self, ask: Ask<T>, plans_before: u32, pool: &mut Pool) -> Option<Finished<T>> {
        if plans_before >= READ_PLANS_MAX {
            let message = "the range changed again and again while it was read";
            return Some(Finished { ask, outcome: Err(Error::new(ErrorKind::Io, message)) });
        }
        let planned = self.device.plan_read(ask.offset, ask.length);
        self.carry_out(ask, planned, plans_before + 1, pool)
    }

    /// Fetches the segments of a plan, which is the `plans`th plan of its read. If the range changed meanwhile, plans
    /// the read again.
    fn carry_out(
        &mut self,
        ask: Ask<T>,
        planned: Result<ReadPlan>,
        plans: u32,
        pool: &mut Pool,
    ) -> Option<Finished<T>> {
        let fetched = planned.and_then(|mut plan| self.fetch_cached(&mut plan, pool).map(|misses| (plan, misses)));
        let (plan, misses) = match fetched {
            Ok(fetched) => fetched,
            Err(error) => return Some(Finished { ask, outcome: Err(error) }),
        };
        if misses > 0 {
            let held = ask.length.max(fetched_bytes(&plan));
            self.fetch(Pending { ask, plan, held, plans, missing: misses, failure: None }, pool);
            return None;
        }
        match self.verify(ask, plan, pool) {
            Ok(finished) => Some(finished),
            Err(again) => self.plan(again, plans, pool),
        }
    }

    /// Reads the segments that are in the page cache; returns the number of the other segments.
    fn fetch_cached(&mut self, plan: &mut ReadPlan, pool: &mut Pool) -> Result<usize> {
        let mut misses = 0;
        for segment in &mut plan.segments {
            let Segment::Media(media) = segment else { continue };
            if misses == 0 && self.luck.try_now() {
                let mut buffer = pool.take(media.length);
                // An error is ignored here, because the read through the queue fails too and reports it.
                if media.file.read_cached_at(&mut buffer, media.offset).unwrap_or(false) {
                    self.luck.hit();
                    media.buffer = Some(buffer);
                    continue;
                }
                self.luck.miss();
                pool.put(buffer);
            }
            misses += 1;
        }
        if misses > 0 && self.queue.is_none() {
            self.open_queue();
        }
        if misses > 0 && self.no_queue {
            self.fetch_waiting(plan, pool)?;
            return Ok(0);
        }
        Ok(misses)
    }

    fn open_queue(&mut self) {
        if self.no_queue {
            return;
        }
        match self.exports.queue(QUEUE_DEPTH) {
            Ok(queue) => self.queue = Some(queue),
            Err(error) => {
                tracing::warn!(%error, "no I/O queue for this connection: its reads will not overlap");
                self.no_queue = true;
            }
        }
    }

    fn fetch_waiting(&mut self, plan: &mut ReadPlan, pool: &mut Pool) -> Result<()> {
        for segment in &mut plan.segments {
            let Segment::Media(media) = segment else { continue };
            if media.buffer.is_none() {
                let mut buffer = pool.take(media.length);
                let read = media.read_into(&mut buffer);
                read.during(|| format!("reading {} bytes for {}", media.length, self.device.name()))?;
                media.buffer = Some(buffer);
            }
        }
        Ok(())
    }

    fn fetch(&mut self, pending: Pending<T>, pool: &mut Pool) {
        let Some(queue) = &mut self.queue else { return };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        for (index, segment) in pending.plan.segments.iter().enumerate() {
            if let Segment::Media(media) = segment
                && media.buffer.is_none()
            {
                let token = (slot as u64) << 32 | index as u64;
                queue.read(&media.file, media.offset, pool.take(media.length), token);
            }
        }
        // Each read is submitted at once, although one system call could submit many. Reads that are submitted together
        // complete together, and then client and storage work alternately instead of in parallel (direct reads at queue
        // depth 16: 30,000/s together, 45,000/s one by one). An error is ignored here, because the next wait fails too
        // and reports it.
        if let Err(error) = queue.submit() {
            tracing::debug!(%error, "submitting a read");
        }
        self.pending += 1;
        self.held += pending.held;
        self.slots[slot] = Some(pending);
    }

    /// Lets the device verify the read. Returns the request if it must be planned again.
    fn verify(&mut self, ask: Ask<T>, mut plan: ReadPlan, pool: &mut Pool) -> std::result::Result<Finished<T>, Ask<T>> {
        let verdict = self.device.finish_read(&mut plan);
        plan.guard = None;
        let outcome = match verdict {
            Ok(Verdict::Good) if plan.length == ask.length && plan.is_whole() => Ok(plan),
            Ok(Verdict::Good) => {
                tracing::error!(
                    disk = self.device.name(),
                    offset = ask.offset,
                    "a read plan does not cover the request"
                );
                Err(Error::new(ErrorKind::Io, "the read could not be completed"))
            }
            Ok(Verdict::Again) => {
                pool.put_plan(plan);
                return Err(ask);
            }
            Err(error) => {
                pool.put_plan(plan);
                Err(error)
            }
        };
        Ok(Finished { ask, outcome })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::exports::ExportName;
    use backend::simulated::{SimulatedDisk, SimulatedOptions};
    use backend::{BLOCK_SIZE, Buffer, Directory, File, IoMode, SharedSlice};
    use disk::device::{DirtyExtent, FlushTicket, Media, StatusExtent};

    /// A device with one file, of which each read fetches a pack of a megabyte for one block. The pack may lack blocks.
    struct Packs(Arc<dyn File>, bool);

    /// The length of a pack.
    const PACK: usize = 1 << 20;

    impl Device for Packs {
        fn name(&self) -> &str {
            "packs"
        }
        fn capacity(&self) -> u64 {
            PACK as u64
        }
        fn read_only(&self) -> bool {
            true
        }
        fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
            let media = Media::new(Arc::clone(&self.0), 0, PACK);
            let media = Media { delivered: 0..length, may_lack_blocks: self.1, ..media };
            Ok(ReadPlan { segments: vec![Segment::Media(media)], skip: 0, length, offset, guard: None })
        }
        fn finish_read(&self, _: &mut ReadPlan) -> Result<Verdict> {
            Ok(Verdict::Good)
        }
        fn write(&self, _: u64, _: SharedSlice, _: bool) -> Result<()> {
            unreachable!()
        }
        fn discard(&self, _: u64, _: u64, _: bool) -> Result<()> {
            unreachable!()
        }
        fn write_zeroes(&self, _: u64, _: u64, _: bool, _: bool) -> Result<()> {
            unreachable!()
        }
        fn finish_flush(&self, _: FlushTicket) -> Result<()> {
            unreachable!()
        }
        fn prefetch(&self, _: u64, _: u64) -> Result<()> {
            unreachable!()
        }
        fn resize(&self, _: u64) -> Result<()> {
            unreachable!()
        }
        fn status(&self, _: u64, _: u64, _: usize) -> Result<Vec<StatusExtent>> {
            unreachable!()
        }
        fn dirty_bases(&self) -> Vec<String> {
            Vec::new()
        }
        fn changed_since(&self, _: &str, _: u64, _: u64, _: usize) -> Result<Vec<DirtyExtent>> {
            unreachable!()
        }
    }

    struct Queues(Arc<dyn Directory>);

    impl Exports for Queues {
        fn names(&self) -> Vec<ExportName> {
            Vec::new()
        }
        fn open(&self, _: &str, _: bool) -> Result<Arc<dyn Device>> {
            unreachable!()
        }
        fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
            self.0.queue(depth)
        }
    }

    #[test]
    fn the_bytes_that_reads_fetch_count_although_fewer_were_requested() {
        let directory = SimulatedDisk::new(1, SimulatedOptions::default()).directory();
        let file = directory.create("file", IoMode::Direct).unwrap();
        file.set_len(PACK as u64).unwrap();
        let exports = Queues(directory);
        let mut reads = Reads::new(Arc::new(Packs(file, true)), &exports);
        let (mut pool, mut finished) = (Pool::default(), Vec::new());
        for tag in 0..4 {
            let ask = Ask { tag, offset: 0, length: BLOCK_SIZE, arrived: None };
            assert!(reads.begin(ask, &mut pool).is_none());
        }
        assert_eq!((reads.pending(), reads.held()), (4, 4 * PACK));
        while reads.pending() > 0 {
            reads.wait(None, &mut pool, &mut finished).unwrap();
        }
        assert!(reads.held() == 0 && finished.len() == 4 && finished.iter().all(|read| read.outcome.is_ok()));
    }

    #[test]
    fn a_block_that_cannot_be_read_fails_a_read_unless_the_device_may_do_without_it() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let directory = disk.directory();
        let file = directory.create("file", IoMode::Direct).unwrap();
        let mut data = Buffer::zeroed(PACK / BLOCK_SIZE);
        data.fill(7);
        file.write_at(&[&data], 0, false).unwrap();
        let lost = 3 * BLOCK_SIZE..4 * BLOCK_SIZE;
        disk.fail_reads("file", lost.start as u64..lost.end as u64).unwrap();
        let exports = Queues(directory);
        for may_lack_blocks in [false, true] {
            let mut reads = Reads::new(Arc::new(Packs(Arc::clone(&file), may_lack_blocks)), &exports);
            let (mut pool, mut finished) = (Pool::default(), Vec::new());
            let ask = Ask { tag: 0, offset: 0, length: PACK, arrived: None };
            finished.extend(reads.begin(ask, &mut pool));
            while reads.pending() > 0 {
                reads.wait(None, &mut pool, &mut finished).unwrap();
            }
            let [Finished { outcome, .. }] = &finished[..] else { panic!("{} reads", finished.len()) };
            assert_eq!(outcome.is_ok(), may_lack_blocks);
            if let Ok(plan) = outcome {
                let content = plan.slices().concat();
                let wanted = |at: usize| if lost.contains(&at) { 0 } else { 7 };
                assert!(content.iter().enumerate().all(|(at, byte)| *byte == wanted(at)));
            }
        }
    }
}
