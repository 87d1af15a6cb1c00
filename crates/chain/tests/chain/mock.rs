//! A mock layer over any file. It shows every behaviour that the trait permits: grains of any size, grains that stay in
//! place or move at each write, freed grains reused as soon as no epoch holds them, answers that stop early, failures
//! on demand, and a durable state that a crash restores.

use backend::{File, IoMode};
use error::{Error, ErrorKind, IoContext, Result};
use layer::{Content, Extent, Layer, Usage};
use parking_lot::{Condvar, Mutex, RwLock};
use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ABSENT: u32 = 0;
const ZERO: u32 = 1;
/// From this value on, a table entry is the number of a grain in the file.
const FIRST: u32 = 2;

/// A file in memory.
#[derive(Default)]
pub struct MemoryFile(RwLock<Vec<u8>>);

impl File for MemoryFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.read().len() as u64)
    }
    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.write().resize(length as usize, 0);
        Ok(())
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = self.0.read();
        let from = (offset as usize).min(bytes.len());
        let to = (from + buffer.len()).min(bytes.len());
        buffer[..to - from].copy_from_slice(&bytes[from..to]);
        buffer[to - from..].fill(0);
        Ok(())
    }
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        self.read_at(buffer, offset).map(|()| true)
    }
    fn write_at(&self, slices: &[&[u8]], offset: u64, _durable: bool) -> io::Result<()> {
        let mut bytes = self.0.write();
        let mut at = offset as usize;
        for slice in slices {
            if bytes.len() < at + slice.len() {
                bytes.resize(at + slice.len(), 0);
            }
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
}

/// The behaviour of a mock layer.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    pub capacity: u64,
    pub grain: u64,
    /// Whether a write is made in a new grain of the file, and the old grain is reused.
    pub moves: bool,
    /// Whether a freed grain is not reused before a flush, so that a crash finds its old content.
    pub frees_at_flush: bool,
    /// Whether single sectors of allocated grains can be overwritten.
    pub overwrites: bool,
    /// Whether data is reported as [`Content::Encoded`].
    pub encoded: bool,
    pub writable: bool,
}

impl Manner {
    pub fn new(capacity: u64, grain: u64) -> Self {
        Self { capacity, grain, moves: false, frees_at_flush: false, overwrites: false, encoded: false, writable: true }
    }
}

/// The durable table of the layer: the state after a crash.
#[derive(Clone, Default)]
pub struct Table {
    places: Vec<u32>,
    next: u32,
}

#[derive(Default)]
struct MockState {
    table: Table,
    epoch: Arc<()>,
    /// Freed grains in order, each with the epoch that must be over before the grain is reused.
    freed: VecDeque<(u32, Arc<()>)>,
    /// Grains freed since the last flush.
    unflushed: Vec<(u32, Arc<()>)>,
}

/// Makes writes wait until a test lets them continue, one after the other in the order of their beginnings.
#[derive(Default)]
pub struct Halt {
    state: Mutex<Halted>,
    changed: Condvar,
}

#[derive(Default)]
struct Halted {
    on: bool,
    /// Writes that have come here since the halt began, and those of them that may continue.
    begun: u64,
    passed: u64,
}

/// The longest time for which a test waits for something that happens soon on every machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

impl Halt {
    /// From now on, writes wait.
    pub fn begin(&self) {
        *self.state.lock() = Halted { on: true, ..Halted::default() };
    }

    /// Waits until this number of writes has come here.
    pub fn wait_for(&self, writes: u64) {
        let mut state = self.state.lock();
        while state.begun < writes {
            assert!(!self.changed.wait_for(&mut state, PATIENCE).timed_out(), "no write has begun");
        }
    }

    /// Lets this number of writes continue.
    pub fn pass(&self, writes: u64) {
        self.state.lock().passed = writes;
        self.changed.notify_all();
    }

    /// Lets all writes continue.
    pub fn end(&self) {
        self.state.lock().on = false;
        self.changed.notify_all();
    }

    fn enter(&self) {
        let mut state = self.state.lock();
        state.begun += 1;
        let mine = state.begun;
        self.changed.notify_all();
        // The limit is for tests that have failed, and whose threads are joined.
        let until = Instant::now() + 2 * PATIENCE;
        while state.on && state.passed < mine && !self.changed.wait_until(&mut state, until).timed_out() {}
    }
}

/// Failures and delays that a test requests.
#[derive(Default)]
pub struct Faults {
    pub map: AtomicBool,
    pub write: AtomicBool,
    pub flush: AtomicBool,
    /// Whether a flush fails for lack of space, and keeps the data in memory.
    pub flush_room: AtomicBool,
    /// From the write with this number on, counted from 1, writes fail for lack of space; 0 for none.
    pub write_in: AtomicU64,
    /// Whether zeros cannot be recorded for lack of space.
    pub zero_room: AtomicBool,
    /// Zeros cannot be recorded past this byte for lack of space; 0 for no limit.
    pub zero_end: AtomicU64,
    /// Closing fails, or fails for lack of space.
    pub close: AtomicBool,
    pub close_room: AtomicBool,
    /// A map call that touches this sector fails (0: none).
    pub map_at: AtomicU64,
    /// Where writes can be made to wait.
    pub writes: Halt,
    /// Delays in microseconds.
    pub write_delay: AtomicU64,
    pub map_delay: AtomicU64,
}

/// The mock layer.
pub struct Mock {
    manner: Manner,
    file: Arc<dyn File>,
    state: RwLock<MockState>,
    durable: Mutex<Table>,
    pub faults: Faults,
    pub maps: AtomicU64,
    pub flushes: AtomicU64,
    pub written: AtomicU64,
    pub closed: AtomicBool,
    read_only: AtomicBool,
}

impl Mock {
    pub fn new(manner: Manner) -> Arc<Self> {
        Self::over(manner, Arc::new(MemoryFile::default()), Table::default())
    }

    pub fn over(manner: Manner, file: Arc<dyn File>, mut table: Table) -> Arc<Self> {
        table.places.resize(manner.capacity.div_ceil(manner.grain) as usize, ABSENT);
        table.next = table.next.max(FIRST);
        Arc::new(Self {
            manner,
            file,
            durable: Mutex::new(table.clone()),
            state: RwLock::new(MockState { table, ..MockState::default() }),
            faults: Faults::default(),
            maps: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            written: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            read_only: AtomicBool::new(!manner.writable),
        })
    }

    /// The table after a crash, for the file of the crashed disk.
    pub fn durable(&self) -> Table {
        self.durable.lock().clone()
    }

    pub fn manner(&self) -> Manner {
        self.manner
    }

    /// Refuses changes from now on, like an image that belongs to a snapshot.
    pub fn seal(&self) {
        self.read_only.store(true, Ordering::SeqCst);
    }

    /// The number of grains with data.
    pub fn held(&self) -> usize {
        self.state.read().table.places.iter().filter(|place| **place >= FIRST).count()
    }

    fn offset(&self, place: u32) -> u64 {
        u64::from(place - FIRST) * self.manner.grain
    }

    fn allocate(&self, state: &mut MockState) -> u32 {
        if self.manner.moves
            && let Some((place, epoch)) = state.freed.pop_front()
        {
            if Arc::strong_count(&epoch) == 1 {
                return place;
            }
            state.freed.push_front((place, epoch));
        }
        state.table.next += 1;
        state.table.next - 1
    }

    fn release(&self, state: &mut MockState, place: u32) {
        if place < FIRST || !self.manner.moves {
            return;
        }
        // Every reader that may have looked up this grain holds this epoch or an older one, so the grain waits for the
        // end of this epoch. The queue is in order of epochs.
        let freed = (place, std::mem::take(&mut state.epoch));
        if self.manner.frees_at_flush { state.unflushed.push(freed) } else { state.freed.push_back(freed) }
    }

    fn check(&self, fault: &AtomicBool, what: &str) -> Result<()> {
        if fault.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Io, format!("{what} refused by the test")));
        }
        Ok(())
    }

    fn check_write(&self) -> Result<()> {
        let delay = self.faults.write_delay.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        self.faults.writes.enter();
        if self.read_only.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::ReadOnly, "this image is sealed"));
        }
        self.check(&self.faults.write, "write")?;
        match self.faults.write_in.load(Ordering::SeqCst) {
            0 => Ok(()),
            1 => Err(Error::new(ErrorKind::NoSpace, "the test permits no space")),
            left => {
                self.faults.write_in.store(left - 1, Ordering::SeqCst);
                Ok(())
            }
        }
    }

    fn grains(&self, range: &Range<u64>) -> Range<usize> {
        let Manner { grain, capacity, .. } = self.manner;
        assert!(range.start.is_multiple_of(grain) && range.end <= capacity, "{range:?} of {capacity}");
        assert!(range.end.is_multiple_of(grain) || range.end == capacity, "{range:?} in grains of {grain}");
        (range.start / grain) as usize..range.end.div_ceil(grain) as usize
    }
}

impl Layer for Mock {
    fn capacity(&self) -> u64 {
        self.manner.capacity
    }
    fn grain(&self) -> u64 {
        self.manner.grain
    }
    fn format(&self) -> &'static str {
        "mock"
    }
    fn writable(&self) -> bool {
        !self.read_only.load(Ordering::SeqCst)
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        self.maps.fetch_add(1, Ordering::Relaxed);
        self.check(&self.faults.map, "map")?;
        let bad = self.faults.map_at.load(Ordering::Relaxed) * 512;
        if bad > 0 && range.contains(&bad) {
            return Err(Error::new(ErrorKind::Corrupt, "the test damages this table"));
        }
        let Manner { grain, capacity, .. } = self.manner;
        assert!(range.start < range.end && range.end <= capacity && range.start.is_multiple_of(512));
        assert!(range.end.is_multiple_of(512) || range.end == capacity, "the formats refuse parts of sectors");
        {
            let state = self.state.read();
            let mut at = range.start;
            let mut last: Option<Extent> = None;
            while at < range.end {
                let index = (at / grain) as usize;
                let end = ((at / grain + 1) * grain).min(range.end);
                let content = match state.table.places[index] {
                    ABSENT => Content::Absent,
                    ZERO => Content::Zero,
                    _ if self.manner.encoded => Content::Encoded,
                    place => Content::Data { file: 0, offset: self.offset(place) + at % grain },
                };
                match &mut last {
                    Some(extent) if goes_on(extent, content) => extent.length += end - at,
                    _ => {
                        if let Some(done) = last.replace(Extent { start: at, length: end - at, content }) {
                            out.push(done);
                            if out.len() >= most {
                                last = None;
                                break;
                            }
                        }
                    }
                }
                at = end;
            }
            out.extend(last);
        }
        let delay = self.faults.map_delay.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        Ok(())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        assert_eq!(index, 0);
        Ok(&self.file)
    }

    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.manner.moves.then(|| Arc::clone(&self.state.read().epoch) as Arc<dyn Any + Send + Sync>)
    }

    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        let grain = self.manner.grain;
        let mut at = start;
        let mut rest = out;
        while !rest.is_empty() {
            let step = ((grain - at % grain) as usize).min(rest.len());
            let (part, after) = rest.split_at_mut(step);
            let place = self.state.read().table.places[(at / grain) as usize];
            assert!(self.manner.encoded && place >= FIRST);
            self.file.read_at(part, self.offset(place) + at % grain).during(|| "reading".to_owned())?;
            at += step as u64;
            rest = after;
        }
        Ok(())
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        self.check_write()?;
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        let data = slices.concat();
        self.written.fetch_add(length as u64, Ordering::Relaxed);
        let grains = self.grains(&(start..start + length as u64));
        let mut places = Vec::with_capacity(grains.len());
        {
            let mut state = self.state.write();
            for grain in grains.clone() {
                let now = state.table.places[grain];
                places.push(if now >= FIRST && !self.manner.moves { now } else { self.allocate(&mut state) });
            }
        }
        let size = self.manner.grain as usize;
        let mut index = 0;
        while index < places.len() {
            let mut run = 1;
            while index + run < places.len() && places[index + run] == places[index] + run as u32 {
                run += 1;
            }
            let bytes = &data[index * size..((index + run) * size).min(data.len())];
            self.file.write_at(&[bytes], self.offset(places[index]), false).during(|| "writing".to_owned())?;
            index += run;
        }
        let mut state = self.state.write();
        for (grain, place) in grains.zip(places) {
            let old = std::mem::replace(&mut state.table.places[grain], place);
            if old != place {
                self.release(&mut state, old);
            }
        }
        Ok(())
    }

    fn overwrite(&self, start: u64, slices: &[&[u8]]) -> Result<bool> {
        if !self.manner.overwrites || self.manner.moves {
            return Ok(false);
        }
        self.check_write()?;
        let data = slices.concat();
        let (grain, end) = (self.manner.grain, start + data.len() as u64);
        assert!(start.is_multiple_of(512) && end.is_multiple_of(512));
        let places: Vec<u32> =
            self.state.read().table.places[(start / grain) as usize..end.div_ceil(grain) as usize].to_vec();
        if places.iter().any(|place| *place < FIRST) {
            return Ok(false);
        }
        let mut at = start;
        for place in places {
            let stop = ((at / grain + 1) * grain).min(end);
            let bytes = &data[(at - start) as usize..(stop - start) as usize];
            self.file.write_at(&[bytes], self.offset(place) + at % grain, false).during(|| "writing".to_owned())?;
            at = stop;
        }
        Ok(true)
    }

    fn zero(&self, range: Range<u64>, _keep: bool) -> Result<()> {
        self.check_write()?;
        let limit = self.faults.zero_end.load(Ordering::SeqCst);
        if self.faults.zero_room.load(Ordering::SeqCst) || (limit > 0 && range.end > limit) {
            return Err(Error::new(ErrorKind::NoSpace, "the test permits no space for zeros"));
        }
        let grains = self.grains(&range);
        let mut state = self.state.write();
        for grain in grains {
            let old = std::mem::replace(&mut state.table.places[grain], ZERO);
            self.release(&mut state, old);
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.check(&self.faults.flush, "flush")?;
        if self.faults.flush_room.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::NoSpace, "the test permits no space for a flush"));
        }
        self.flushes.fetch_add(1, Ordering::Relaxed);
        let (table, freed) = {
            let mut state = self.state.write();
            (state.table.clone(), std::mem::take(&mut state.unflushed))
        };
        self.file.sync().during(|| "flushing".to_owned())?;
        *self.durable.lock() = table;
        self.state.write().freed.extend(freed);
        Ok(())
    }

    fn close(&self) -> Result<()> {
        self.check(&self.faults.close, "close")?;
        if self.faults.close_room.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::NoSpace, "the test permits no space for closing"));
        }
        self.flush()?;
        self.closed.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn usage(&self) -> Result<Usage> {
        Ok(Usage { mapped: self.held() as u64 * self.manner.grain, ..Usage::default() })
    }
}

fn goes_on(last: &Extent, next: Content) -> bool {
    match (last.content, next) {
        (Content::Data { offset, .. }, Content::Data { offset: other, .. }) => offset + last.length == other,
        (last, next) => last == next,
    }
}

/// A file for direct I/O over a buffered one: refuses what O_DIRECT refuses.
pub struct DirectFile(pub Arc<dyn File>);

impl File for DirectFile {
    backend::forward_file!(0: len, set_len, write_at, sync, punch);

    fn mode(&self) -> IoMode {
        IoMode::Direct
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        assert!(offset.is_multiple_of(4096) && buffer.len().is_multiple_of(4096));
        assert!((buffer.as_ptr() as usize).is_multiple_of(4096));
        self.0.read_at(buffer, offset)
    }
}
