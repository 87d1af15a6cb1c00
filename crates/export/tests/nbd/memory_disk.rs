//! A disk in memory whose reads have every form: zeros, memory or media, cached or not, and changed during the read.
//!
//! Blocks are stored in an in-memory file at their own offset. Random choices by a seed decide for each write whether
//! the block is returned as memory or as media, and for each access whether the simulated page cache has the block. So
//! all code paths of reads are used.

use backend::{BLOCK_SIZE, Buffer, File, IoMode, LocalFile, LocalPart, Queue, SharedSlice, portable};
use disk::device::{
    Allocation, BaseIdentity, Device, DirtyExtent, FlushTicket, Media, ReadPlan, Segment, StatusExtent, Verdict,
};
use error::{Error, ErrorKind, Result};
use export::exports::{ExportName, Exports};
use parking_lot::{Condvar, Mutex, RwLock};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
pub use testkit::Random;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The storage: an in-memory file whose simulated page cache misses at random.
struct MemoryFile {
    bytes: RwLock<Vec<u8>>,
    accesses: AtomicU64,
    /// Number of reads out of 8 that miss the page cache.
    misses_of_8: AtomicU32,
    delay: Mutex<Duration>,
    broken: Mutex<Option<Range<u64>>>,
}

impl File for MemoryFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes.read().len() as u64)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.bytes.write().resize(length as usize, 0);
        Ok(())
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        std::thread::sleep(*self.delay.lock());
        if let Some(encoded) = offset.checked_sub(ENCODED) {
            let block = encoded / (2 * BLOCK);
            let mut content = [0; BLOCK_SIZE];
            self.read_at(&mut content, block * BLOCK)?;
            buffer[..ENCODED_BYTES].copy_from_slice(&encode(block, &content));
            return Ok(());
        }
        if let Some(broken) = &*self.broken.lock()
            && offset < broken.end
            && offset + buffer.len() as u64 > broken.start
        {
            return Err(io::Error::other("medium error"));
        }
        buffer.copy_from_slice(&self.bytes.read()[offset as usize..offset as usize + buffer.len()]);
        Ok(())
    }
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        let mut random = Random(self.accesses.fetch_add(1, Ordering::Relaxed));
        if random.below(8) < u64::from(self.misses_of_8.load(Ordering::Relaxed)) {
            return Ok(false);
        }
        self.read_at(buffer, offset).map(|()| true)
    }
    fn write_at(&self, slices: &[&[u8]], offset: u64, _durable: bool) -> io::Result<()> {
        let mut bytes = self.bytes.write();
        let mut at = offset as usize;
        for slice in slices {
            bytes[at..at + slice.len()].copy_from_slice(slice);
            at += slice.len();
        }
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn punch(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }
    fn local(&self) -> Option<LocalPart<'_>> {
        Some(LocalPart { file: self, descriptor: None, mode: IoMode::Buffered })
    }
}

impl LocalFile for MemoryFile {
    fn reserve(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }
    fn next_allocated(&self, _offset: u64) -> io::Result<Option<Range<u64>>> {
        Ok(None)
    }
    fn allocated(&self) -> io::Result<u64> {
        self.len()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Zero,
    Memory,
    Media,
    /// The block is stored in an encoded form with another length ([`encode`]).
    Encoded,
}

/// Offset in the file of the encoded blocks. Each encoded block has space for two blocks.
const ENCODED: u64 = 1 << 40;
const ENCODED_BYTES: usize = BLOCK_SIZE + 16;
/// Only writes below this length are stored in encoded form.
const ENCODED_WRITES: u64 = 1 << 20;

fn encode(block: u64, content: &[u8]) -> Vec<u8> {
    let head = [block.to_le_bytes(), [0xaa; 8]].concat();
    head.into_iter().chain(content.iter().map(|byte| byte ^ 0x5a)).collect()
}

/// Content of a plan's guard: the expected version of each block in every media segment.
struct Proof {
    versions: Vec<Vec<(u64, u32)>>,
    _guard: Arc<()>,
}

struct DiskState {
    capacity: u64,
    blocks: BTreeMap<u64, Place>,
    dirty: BTreeSet<u64>,
    /// Number of writes to each block; replaces the checksums of a real store.
    versions: BTreeMap<u64, u32>,
    random: Random,
}

/// A method call that plans a read, with the offset of the read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planning {
    Try(u64),
    Load(u64),
    Plan(u64),
}

/// A write that the disk holds before it is carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeldWrite {
    #[default]
    None,
    /// The next write is held.
    Next,
    Held,
}

/// The disk.
pub struct MemoryDisk {
    name: String,
    read_only: bool,
    file: Arc<MemoryFile>,
    state: Mutex<DiskState>,
    pub flushes: AtomicU64,
    flushes_held: Mutex<bool>,
    flushes_released: Condvar,
    held_write: Mutex<HeldWrite>,
    write_moved: Condvar,
    pub fua_writes: AtomicU64,
    /// Every n-th read returns [`Verdict::Again`]; with 0, only if the range was changed.
    pub again_every: AtomicU32,
    verdicts: AtomicU32,
    /// Number of plans out of 8 that miss metadata.
    pub metadata_misses_of_8: AtomicU32,
    /// The calls that plan reads, in order, if they are recorded.
    pub planning: Mutex<Option<Vec<Planning>>>,
    /// The kind of error with which writes fail; `None` if they succeed.
    pub fail_writes: Mutex<Option<ErrorKind>>,
    pub prefetched: Mutex<Vec<Range<u64>>>,
    /// The disk has one reference, and each read plan that is not verified has another one.
    pub guards: Arc<()>,
    /// Buffers that were returned with reads.
    lent: Mutex<Vec<Weak<Buffer>>>,
}

impl MemoryDisk {
    pub fn new(name: &str, capacity: u64, seed: u64) -> Arc<Self> {
        Arc::new(Self::build(name, capacity, seed, false))
    }

    pub fn read_only(name: &str, capacity: u64) -> Arc<Self> {
        Arc::new(Self::build(name, capacity, 0, true))
    }

    fn build(name: &str, capacity: u64, seed: u64, read_only: bool) -> Self {
        let file = MemoryFile {
            bytes: RwLock::new(vec![0; capacity.next_multiple_of(BLOCK) as usize]),
            accesses: AtomicU64::new(seed),
            misses_of_8: AtomicU32::new(2),
            delay: Mutex::new(Duration::ZERO),
            broken: Mutex::new(None),
        };
        let state = DiskState {
            capacity,
            blocks: BTreeMap::new(),
            dirty: BTreeSet::new(),
            versions: BTreeMap::new(),
            random: Random(seed),
        };
        Self {
            name: name.to_owned(),
            read_only,
            file: Arc::new(file),
            state: Mutex::new(state),
            flushes: AtomicU64::new(0),
            flushes_held: Mutex::default(),
            flushes_released: Condvar::new(),
            held_write: Mutex::default(),
            write_moved: Condvar::new(),
            fua_writes: AtomicU64::new(0),
            again_every: AtomicU32::new(0),
            verdicts: AtomicU32::new(0),
            metadata_misses_of_8: AtomicU32::new(2),
            planning: Mutex::default(),
            fail_writes: Mutex::new(None),
            prefetched: Mutex::new(Vec::new()),
            guards: Arc::new(()),
            lent: Mutex::new(Vec::new()),
        }
    }

    /// Makes every read of the storage take this time, and disables the page cache.
    pub fn slow(&self, delay: Duration) {
        *self.file.delay.lock() = delay;
        self.file.misses_of_8.store(8, Ordering::Relaxed);
    }

    /// Flushes wait, after they are counted, while `held` is true.
    pub fn hold_flushes(&self, held: bool) {
        *self.flushes_held.lock() = held;
        self.flushes_released.notify_all();
    }

    /// Holds the next write, and lets later ones pass, until it is released.
    pub fn hold_next_write(&self) {
        *self.held_write.lock() = HeldWrite::Next;
    }

    /// Waits until the write is held.
    pub fn await_held_write(&self) {
        let mut held = self.held_write.lock();
        while *held != HeldWrite::Held {
            self.write_moved.wait(&mut held);
        }
    }

    pub fn release_write(&self) {
        *self.held_write.lock() = HeldWrite::None;
        self.write_moved.notify_all();
    }

    /// Sets the number of reads out of 8 that miss the page cache.
    pub fn misses_of_8(&self, misses: u32) {
        self.file.misses_of_8.store(misses, Ordering::Relaxed);
        self.metadata_misses_of_8.store(misses, Ordering::Relaxed);
    }

    /// The content of the disk.
    pub fn contents(&self) -> Vec<u8> {
        let capacity = self.state.lock().capacity as usize;
        self.file.bytes.read()[..capacity].to_vec()
    }

    /// Makes reads of this range of the storage fail.
    pub fn break_medium(&self, range: Range<u64>) {
        *self.file.broken.lock() = Some(range);
    }

    /// Number of buffers that were returned with reads and are still in use.
    pub fn lent(&self) -> usize {
        let mut lent = self.lent.lock();
        lent.retain(|buffer| buffer.strong_count() > 0);
        lent.len()
    }

    /// Clears the record of changes, as a new snapshot does.
    pub fn take_snapshot(&self) {
        self.state.lock().dirty.clear();
    }

    /// Makes every block with data a block that is returned as media.
    pub fn settle(&self) {
        for place in self.state.lock().blocks.values_mut() {
            if *place == Place::Memory {
                *place = Place::Media;
            }
        }
    }

    fn check(&self, state: &DiskState, offset: u64, length: u64) -> Result<()> {
        match offset.checked_add(length) {
            Some(end) if end <= state.capacity => Ok(()),
            _ => Err(Error::new(ErrorKind::Invalid, format!("range beyond the end of disk {}", self.name))),
        }
    }

    fn change(&self, offset: u64, length: u64, fua: bool, make: impl Fn(&mut DiskState, u64)) -> Result<()> {
        if let Some(kind) = *self.fail_writes.lock() {
            return Err(Error::new(kind, format!("write to disk {} refused by the test", self.name)));
        }
        let mut state = self.state.lock();
        self.check(&state, offset, length)?;
        for block in offset / BLOCK..(offset + length).div_ceil(BLOCK) {
            make(&mut state, block);
            state.dirty.insert(block);
            *state.versions.entry(block).or_default() += 1;
        }
        self.fua_writes.fetch_add(u64::from(fua), Ordering::Relaxed);
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, fua: bool, place: Option<Place>) -> Result<()> {
        self.change(offset, length, fua, |state, block| {
            let (from, to) = (offset.max(block * BLOCK), (offset + length).min((block + 1) * BLOCK));
            self.file.bytes.write()[from as usize..to as usize].fill(0);
            let whole = to - from == BLOCK || (from == block * BLOCK && to == state.capacity);
            match place {
                _ if !whole => {}
                Some(place) => drop(state.blocks.insert(block, place)),
                None => drop(state.blocks.remove(&block)),
            }
        })
    }

    fn record(&self, planning: Planning) {
        if let Some(planned) = &mut *self.planning.lock() {
            planned.push(planning);
        }
    }

    fn planned(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        let state = self.state.lock();
        self.check(&state, offset, length as u64)?;
        let (mut segments, mut versions): (Vec<Segment>, Vec<Vec<(u64, u32)>>) = (Vec::new(), Vec::new());
        for block in offset / BLOCK..(offset + length as u64).div_ceil(BLOCK) {
            let version = state.versions.get(&block).copied().unwrap_or(0);
            let index = segments.len().saturating_sub(1);
            match (state.blocks.get(&block).copied().unwrap_or(Place::Zero), segments.last_mut()) {
                (Place::Zero, Some(Segment::Zero { length })) => {
                    *length += BLOCK_SIZE;
                    continue;
                }
                (Place::Zero, _) => segments.push(Segment::Zero { length: BLOCK_SIZE }),
                (Place::Media, Some(Segment::Media(media))) if media.offset < ENCODED => {
                    media.length += BLOCK_SIZE;
                    media.delivered = 0..media.length;
                    versions[index].push((block, version));
                    continue;
                }
                (Place::Media, _) => {
                    let file = Arc::clone(&self.file) as Arc<dyn File>;
                    segments.push(Segment::Media(Media::new(file, block * BLOCK, BLOCK_SIZE)));
                }
                (Place::Encoded, _) => {
                    let file = Arc::clone(&self.file) as Arc<dyn File>;
                    let media = Media::new(file, ENCODED + 2 * block * BLOCK, ENCODED_BYTES);
                    segments.push(Segment::Media(Media { delivered: 0..BLOCK_SIZE, ..media }));
                }
                (Place::Memory, _) => {
                    let at = (block * BLOCK) as usize;
                    let copy = Arc::new(Buffer::copy_of(&self.file.bytes.read()[at..at + BLOCK_SIZE]));
                    self.lent.lock().push(Arc::downgrade(&copy));
                    segments.push(Segment::Memory(SharedSlice::new(copy, 0..BLOCK_SIZE)));
                }
            }
            versions.push(vec![(block, version)]);
        }
        let guard: Option<Box<dyn std::any::Any + Send>> =
            Some(Box::new(Proof { versions, _guard: Arc::clone(&self.guards) }));
        Ok(ReadPlan { segments, skip: (offset % BLOCK) as usize, length, offset, guard })
    }
}

impl Device for MemoryDisk {
    fn name(&self) -> &str {
        &self.name
    }
    fn capacity(&self) -> u64 {
        self.state.lock().capacity
    }
    fn read_only(&self) -> bool {
        self.read_only
    }

    fn try_plan_read(&self, offset: u64, length: usize) -> Result<Option<ReadPlan>> {
        self.record(Planning::Try(offset));
        let missing = Random(self.file.accesses.fetch_add(1, Ordering::Relaxed)).below(8)
            < u64::from(self.metadata_misses_of_8.load(Ordering::Relaxed));
        if missing { Ok(None) } else { self.planned(offset, length).map(Some) }
    }

    fn load_for_read(&self, offset: u64, _length: usize) -> Result<()> {
        self.record(Planning::Load(offset));
        Ok(())
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.record(Planning::Plan(offset));
        self.planned(offset, length)
    }

    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        let every = self.again_every.load(Ordering::Relaxed);
        if every > 0 && self.verdicts.fetch_add(1, Ordering::Relaxed).is_multiple_of(every) {
            return Ok(Verdict::Again);
        }
        let state = self.state.lock();
        let proof =
            plan.guard.take().expect("the state that plan_read has stored").downcast::<Proof>().expect("our own");
        for (segment, versions) in plan.segments.iter_mut().zip(&proof.versions) {
            if let Segment::Media(media) = segment {
                assert_eq!(media.fetched().len(), media.length, "a finished read has all its bytes");
                if versions.iter().any(|(block, version)| state.versions.get(block).copied().unwrap_or(0) != *version) {
                    return Ok(Verdict::Again);
                }
                if media.offset >= ENCODED {
                    let decoded: Vec<u8> = media.fetched()[16..].iter().map(|byte| byte ^ 0x5a).collect();
                    assert_eq!(encode(versions[0].0, &decoded), media.fetched());
                    media.buffer = Some(Buffer::copy_of(&decoded));
                }
            }
        }
        Ok(Verdict::Good)
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        let length = data.len() as u64;
        let mut held = self.held_write.lock();
        if *held == HeldWrite::Next {
            *held = HeldWrite::Held;
            self.write_moved.notify_all();
            while *held == HeldWrite::Held {
                self.write_moved.wait(&mut held);
            }
        }
        drop(held);
        self.change(offset, length, fua, |state, block| {
            let (from, to) = (offset.max(block * BLOCK), (offset + length).min((block + 1) * BLOCK));
            let data = &data[(from - offset) as usize..(to - offset) as usize];
            self.file.bytes.write()[from as usize..to as usize].copy_from_slice(data);
            let place = match state.random.below(16) {
                0..5 => Place::Memory,
                // Large writes are not encoded, so that they form long runs: tests measure the memory of reads.
                5 if length < ENCODED_WRITES => Place::Encoded,
                _ => Place::Media,
            };
            state.blocks.insert(block, place);
        })
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.zero(offset, length, fua, None)
    }
    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        self.zero(offset, length, fua, allocate.then_some(Place::Zero))
    }
    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        let mut held = self.flushes_held.lock();
        while *held {
            self.flushes_released.wait(&mut held);
        }
        Ok(())
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.prefetched.lock().push(offset..offset + length);
        Ok(())
    }
    fn resize(&self, capacity: u64) -> Result<()> {
        if capacity > 1 << 30 {
            return Err(Error::new(ErrorKind::NoSpace, "memory disks end at 1 GiB"));
        }
        let mut state = self.state.lock();
        self.file.bytes.write().resize(capacity.next_multiple_of(BLOCK) as usize, 0);
        state.blocks.retain(|block, _| *block < capacity.div_ceil(BLOCK));
        state.capacity = capacity;
        Ok(())
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        let state = self.state.lock();
        self.check(&state, offset, length)?;
        let runs = runs(offset, length, limit, |block| match state.blocks.get(&block) {
            None => Allocation::Hole,
            Some(Place::Zero) => Allocation::Zero,
            Some(_) => Allocation::Data,
        });
        Ok(runs.into_iter().map(|(length, allocation)| StatusExtent { length, allocation }).collect())
    }
    fn dirty_bases(&self) -> Vec<String> {
        vec!["monday".to_owned(), "tuesday".to_owned()]
    }
    fn base_identity(&self, base: &str) -> Option<BaseIdentity> {
        let number = self.dirty_bases().iter().position(|known| known == base)?;
        Some(BaseIdentity { number: number as u64, created: 0 })
    }
    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        assert!(self.dirty_bases().iter().any(|known| known == base));
        let state = self.state.lock();
        self.check(&state, offset, length)?;
        let runs = runs(offset, length, limit, |block| state.dirty.contains(&block));
        Ok(runs.into_iter().map(|(length, dirty)| DirtyExtent { length, dirty }).collect())
    }
}

/// Runs of blocks of one kind within a range, at most `limit`.
fn runs<K: PartialEq>(offset: u64, length: u64, limit: usize, kind: impl Fn(u64) -> K) -> Vec<(u64, K)> {
    let mut runs: Vec<(u64, K)> = Vec::new();
    let mut at = offset;
    while at < offset + length {
        let end = ((at / BLOCK + 1) * BLOCK).min(offset + length);
        let this = kind(at / BLOCK);
        let full = runs.len() == limit;
        match runs.last_mut() {
            Some((length, last)) if *last == this => *length += end - at,
            _ if full => break,
            _ => runs.push((end - at, this)),
        }
        at = end;
    }
    runs
}

/// Memory disks by name.
pub struct Shelf {
    disks: Vec<Arc<MemoryDisk>>,
    workers: Arc<portable::Workers>,
    /// The names and capacities of the disks that clients have resized.
    pub resized: Mutex<Vec<(String, u64)>>,
}

impl Shelf {
    pub fn of(disks: &[&Arc<MemoryDisk>]) -> Arc<Self> {
        let disks = disks.iter().map(|disk| Arc::clone(disk)).collect();
        Arc::new(Self { disks, workers: portable::Workers::new(), resized: Mutex::default() })
    }
}

impl Exports for Shelf {
    fn names(&self) -> Vec<ExportName> {
        let name = |disk: &Arc<MemoryDisk>| ExportName {
            name: disk.name.clone(),
            description: format!("{} bytes in memory", disk.capacity()),
        };
        self.disks.iter().map(name).collect()
    }
    fn open(&self, name: &str, read_only: bool) -> Result<Arc<dyn Device>> {
        let disk = self.disks.iter().find(|disk| disk.name == name);
        let disk = disk.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no disk {name}")))?;
        if read_only && !disk.read_only {
            return Ok(Arc::new(ReadOnly(Arc::clone(disk))));
        }
        Ok(Arc::clone(disk) as Arc<dyn Device>)
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(portable::PortableQueue::new(Arc::clone(&self.workers), depth)?))
    }
    fn resized(&self, name: &str, capacity: u64) {
        self.resized.lock().push((name.to_owned(), capacity));
    }
}

/// Exports that change when a client queries a description, after it has opened an export: a rename during a handshake.
pub struct Changing {
    now: Mutex<Arc<Shelf>>,
    change: Mutex<Option<Change>>,
}

type Change = Box<dyn FnOnce() -> Arc<Shelf> + Send>;

impl Changing {
    pub fn new(first: Arc<Shelf>, change: impl FnOnce() -> Arc<Shelf> + Send + 'static) -> Arc<Self> {
        Arc::new(Self { now: Mutex::new(first), change: Mutex::new(Some(Box::new(change))) })
    }

    fn now(&self) -> Arc<Shelf> {
        Arc::clone(&self.now.lock())
    }
}

impl Exports for Changing {
    fn names(&self) -> Vec<ExportName> {
        self.now().names()
    }
    fn open(&self, name: &str, read_only: bool) -> Result<Arc<dyn Device>> {
        self.now().open(name, read_only)
    }
    fn queue(&self, depth: u32) -> io::Result<Box<dyn Queue>> {
        self.now().queue(depth)
    }
    fn description(&self, _name: &str) -> Option<String> {
        if let Some(change) = self.change.lock().take() {
            *self.now.lock() = change();
        }
        None
    }
}

/// A writable disk opened read-only.
struct ReadOnly(Arc<MemoryDisk>);

impl Device for ReadOnly {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn capacity(&self) -> u64 {
        self.0.capacity()
    }
    fn read_only(&self) -> bool {
        true
    }
    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.0.plan_read(offset, length)
    }
    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        self.0.finish_read(plan)
    }
    fn write(&self, _: u64, _: SharedSlice, _: bool) -> Result<()> {
        panic!("the server passed a write to a read-only device")
    }
    fn discard(&self, _: u64, _: u64, _: bool) -> Result<()> {
        panic!("the server passed a discard to a read-only device")
    }
    fn write_zeroes(&self, _: u64, _: u64, _: bool, _: bool) -> Result<()> {
        panic!("the server passed a write-zeroes to a read-only device")
    }
    fn finish_flush(&self, ticket: FlushTicket) -> Result<()> {
        self.0.finish_flush(ticket)
    }
    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.0.prefetch(offset, length)
    }
    fn resize(&self, _: u64) -> Result<()> {
        panic!("the server passed a resize to a read-only device")
    }
    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.0.status(offset, length, limit)
    }
    fn dirty_bases(&self) -> Vec<String> {
        self.0.dirty_bases()
    }
    fn base_identity(&self, base: &str) -> Option<BaseIdentity> {
        self.0.base_identity(base)
    }
    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        self.0.changed_since(base, offset, length, limit)
    }
}
