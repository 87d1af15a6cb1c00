//! A bound on the data that buffered writes of this process have left in the page cache.
//!
//! When more is dirty than the kernel permits, the kernel pauses every thread that writes, for up to 200 ms. So this
//! module starts write-out before, in a thread of its own, and slows down threads that write faster than the medium.
//! All files of a file system share one account ([`DirtyMedium`]). Its steps, as fractions of the bound:
//!
//! | dirty and not written | what happens |
//! |---|---|
//! | a half | the thread writes out everything that is dirty |
//! | a half | background work gets the more slowly, the more is dirty ([`DirtyMedium::background_rate`]) |
//! | three quarters | each write is followed by a pause that grows with what is dirty ([`pause`]) |
//!
//! 1. Bytes are counted from the end of the write until their write-out, or a flush of the file, has ended. No MiB of a
//!    file counts more than once, however often it is written meanwhile (`map.rs`). What was counted too much begins a
//!    write-out that soon ends, because it finds little to write.
//! 2. A write is counted after it was made. A write-out or flush may then find nothing to write, but leaves no data of
//!    the write uncounted.
//! 3. The code that takes counts from the map subtracts them from the account, exactly once.
//! 4. No write waits for the thread: the longest pause is [`PAUSE_MAX`], even if the medium does not answer.
//! 5. Errors of write-out belong to the file, and the next flush of the file reports them ([`WriteOut`]).
//!
//! Not counted: direct and durable writes, what a file leaves dirty when it is closed, and what other programs write.

mod map;

use map::{DirtyMap, REGION};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The least bound.
pub const BOUND_MIN: u64 = 4 << 20;
/// The greatest bound that [`DirtyLimit::Auto`] chooses: what a flush may have to write should not grow with memory.
const BOUND_AUTO_MAX: u64 = 4 << 30;
/// The bound where the kernel does not tell its own.
const BOUND_UNKNOWN: u64 = 128 << 20;
/// The thread is started when this much is dirty, and ends when less than [`REGION`] is.
const THREAD_AT: u64 = 8 << 20;
/// How often the thread compares the bound with the memory of the machine.
const TICK: Duration = Duration::from_secs(5);
/// The longest pause after a write: half of the kernel's.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Shorter pauses are not made: timers are not more exact.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// Background work keeps at least this rate in bytes per second, so that it ends.
const BACKGROUND_RATE_MIN: u64 = 1 << 20;
/// At most this much is on its way to the device at a time. A long device queue would delay reads, and appends to
/// journals.
const GOING_OUT_BYTES: u64 = 4 << 20;
/// The same limit as a number of requests.
const GOING_OUT_PARTS: usize = 16;
/// The speed of write-out is measured over at least this time.
const MEASURED: Duration = Duration::from_millis(50);
/// The speed that is assumed before the first measurement, and the least that is assumed, in bytes per second.
const SPEED_FIRST: u64 = 64 << 20;
const SPEED_MIN: u64 = 1 << 20;
/// Fractions of a step beyond which neither pauses grow nor rates fall.
const FULLNESS_MAX: f64 = 0.99;

/// How much may be dirty on each file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirtyLimit {
    /// A tenth less than the amount from which the kernel may pause writes, at most 4 GiB.
    #[default]
    Auto,
    /// Whatever the kernel permits.
    Off,
    /// This many bytes, at least [`BOUND_MIN`].
    Bytes(u64),
}

/// The limit of this process in bytes; 0 for none, `u64::MAX` for [`DirtyLimit::Auto`].
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);
/// The account of each file system, by the number of its device.
static MEDIA: Mutex<BTreeMap<u64, Arc<DirtyMedium>>> = Mutex::new(BTreeMap::new());

/// Sets the limit of this process, for file systems on which it has not written yet. One setting applies to the whole
/// process, because the kernel's limits apply to the whole machine.
pub fn set_limit(limit: DirtyLimit) {
    let value = match limit {
        DirtyLimit::Auto => u64::MAX,
        DirtyLimit::Off => 0,
        DirtyLimit::Bytes(bytes) => bytes.clamp(BOUND_MIN, u64::MAX - 1),
    };
    LIMIT.store(value, Ordering::Relaxed);
}

/// The account of the file system with this device number; `None` if nothing is limited.
pub(crate) fn medium_of(device: u64) -> Option<Arc<DirtyMedium>> {
    let limit = match LIMIT.load(Ordering::Relaxed) {
        0 => return None,
        u64::MAX => DirtyLimit::Auto,
        bytes => DirtyLimit::Bytes(bytes),
    };
    Some(Arc::clone(MEDIA.lock().entry(device).or_insert_with(|| Arc::new(DirtyMedium::new(limit)))))
}

/// A tenth less than what the kernel permits before it pauses writes: the mean of the amounts at which it starts
/// write-out and at which it stops writes (`domain_dirty_limits` and `dirty_freerun_ceiling` in mm/page-writeback.c).
/// Write-out starts at half of that, so it is late enough for data that is overwritten or deleted soon.
fn automatic(read: impl Fn(&str) -> Option<String>) -> u64 {
    let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
    let available = || {
        let memory = read("/proc/meminfo")?;
        let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kilobytes = available.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
        Some(kilobytes.saturating_mul(1024))
    };
    let amount = |kind: &str| match number(&format!("/proc/sys/vm/{kind}_bytes")) {
        Some(bytes @ 1..) => Some(bytes),
        _ => Some((available()? / 100).saturating_mul(number(&format!("/proc/sys/vm/{kind}_ratio"))?)),
    };
    let amounts = amount("dirty").and_then(|most| Some((most, amount("dirty_background")?)));
    amounts.map_or(BOUND_UNKNOWN, |(most, background)| {
        let background = if background >= most { most / 2 } else { background };
        ((most / 2 + background / 2) / 10 * 9).clamp(BOUND_MIN, BOUND_AUTO_MAX)
    })
}

/// How far `dirty` is between two steps, from 0 to [`FULLNESS_MAX`].
fn fullness(dirty: u64, from: u64, to: u64) -> f64 {
    (dirty.saturating_sub(from) as f64 / to.saturating_sub(from).max(1) as f64).min(FULLNESS_MAX)
}

/// The pause after a write of `bytes`: none below three quarters of the bound, the time that the medium takes for the
/// bytes halfway between that and the bound, and ever more towards the bound.
fn pause(dirty: u64, bound: u64, speed: u64, bytes: u64) -> Duration {
    let full = fullness(dirty, bound / 4 * 3, bound);
    let pause = Duration::from_secs_f64(bytes as f64 / speed.max(1) as f64 * full / (1.0 - full)).min(PAUSE_MAX);
    if pause < PAUSE_MIN { Duration::ZERO } else { pause }
}

/// The rate of all background work in bytes per second, 0 for no limit: the speed of the medium halfway between a half
/// and three quarters of the bound, where writes of clients begin to be delayed.
fn background_rate(dirty: u64, bound: u64, speed: u64) -> u64 {
    match fullness(dirty, bound / 2, bound / 4 * 3) {
        full if full > 0.0 => ((speed as f64 * (1.0 - full) / full) as u64).max(BACKGROUND_RATE_MIN),
        _ => 0,
    }
}

/// What [`DirtyMedium::used`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyUse {
    /// Bytes that this process wrote, and that are not known to be on the medium.
    pub dirty: u64,
    /// The bound.
    pub bound: u64,
    /// The time that writes were paused, of all threads together.
    pub waited: Duration,
}

/// The account of a file system.
pub struct DirtyMedium {
    limit: DirtyLimit,
    bound: AtomicU64,
    /// Negative for a moment if bytes are subtracted before the write that made them dirty has added them.
    dirty: AtomicI64,
    /// Bytes per second that write-out reaches.
    speed: AtomicU64,
    waited_nanoseconds: AtomicU64,
    /// A write that makes this much dirty wakes the thread.
    wake_at: AtomicU64,
    files: Mutex<Vec<Weak<DirtyFile>>>,
    /// Whether the thread runs.
    running: Mutex<bool>,
    work: Condvar,
}

impl DirtyMedium {
    fn new(limit: DirtyLimit) -> Self {
        let medium = Self {
            limit,
            bound: AtomicU64::new(0),
            dirty: AtomicI64::new(0),
            speed: AtomicU64::new(SPEED_FIRST),
            waited_nanoseconds: AtomicU64::new(0),
            wake_at: AtomicU64::new(0),
            files: Mutex::default(),
            running: Mutex::new(false),
            work: Condvar::new(),
        };
        medium.measure_memory();
        medium.wake_at.store(medium.start().min(THREAD_AT), Ordering::Relaxed);
        medium
    }

    /// What is dirty now, and how long writes have waited so far.
    pub fn used(&self) -> DirtyUse {
        let (dirty, bound) = (self.dirty(), self.bound.load(Ordering::Relaxed));
        DirtyUse { dirty, bound, waited: Duration::from_nanos(self.waited_nanoseconds.load(Ordering::Relaxed)) }
    }

    /// The rate in bytes per second that background work on this file system should not exceed now; 0 for none.
    pub fn background_rate(&self) -> u64 {
        let DirtyUse { dirty, bound, .. } = self.used();
        background_rate(dirty, bound, self.speed.load(Ordering::Relaxed))
    }

    fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed).max(0).cast_unsigned()
    }

    fn measure_memory(&self) {
        let bound = match self.limit {
            DirtyLimit::Auto => automatic(|path| std::fs::read_to_string(path).ok()),
            DirtyLimit::Bytes(bytes) => bytes,
            DirtyLimit::Off => u64::MAX,
        };
        self.bound.store(bound, Ordering::Relaxed);
    }

    /// The amount at which write-out starts.
    fn start(&self) -> u64 {
        self.bound.load(Ordering::Relaxed) / 2
    }

    /// Counts a write that has made `added` more bytes dirty, and returns the dirty bytes.
    fn add(self: &Arc<Self>, added: u64) -> u64 {
        let before = self.dirty.fetch_add(added.cast_signed(), Ordering::Relaxed);
        let dirty = before.saturating_add_unsigned(added).max(0).cast_unsigned();
        if dirty >= self.wake_at.load(Ordering::Relaxed) {
            self.wake();
        }
        dirty
    }

    fn subtract(&self, bytes: u64) {
        if bytes > 0 {
            self.dirty.fetch_sub(bytes.cast_signed(), Ordering::Relaxed);
        }
    }

    #[cold]
    fn wake(self: &Arc<Self>) {
        let mut running = self.running.lock();
        self.wake_at.store(u64::MAX, Ordering::Relaxed);
        if *running {
            self.work.notify_one();
            return;
        }
        let medium = Arc::clone(self);
        // Without a thread the kernel's own limits hold. A later write tries again.
        *running = std::thread::Builder::new().name("lamina-write-out".into()).spawn(move || medium.run()).is_ok();
        if !*running {
            self.wake_at.store(self.dirty() + THREAD_AT, Ordering::Relaxed);
        }
    }

    fn run(&self) {
        loop {
            self.measure_memory();
            if self.dirty() >= self.start() {
                if !self.write_out() {
                    // Flushes are writing everything.
                    std::thread::sleep(MEASURED);
                }
                continue;
            }
            let mut running = self.running.lock();
            self.wake_at.store(self.start(), Ordering::Relaxed);
            let idle = self.work.wait_for(&mut running, TICK).timed_out();
            if idle && self.dirty() < REGION {
                *running = false;
                self.wake_at.store(self.start().min(THREAD_AT), Ordering::Relaxed);
                return;
            }
        }
    }

    /// Writes out all that is dirty now, file by file in the order of offsets. False if there was nothing.
    fn write_out(&self) -> bool {
        let files = self.files.lock().clone();
        let mut going = GoingOut { medium: self, parts: VecDeque::new(), bytes: 0, done: 0, began: Instant::now() };
        let mut any = false;
        for file in files.iter().filter_map(Weak::upgrade) {
            file.map.take(|offset, bytes| {
                any = true;
                going.start(&file, offset, bytes);
            });
        }
        if any {
            going.end_all();
        }
        any
    }
}

/// A region that is being written out.
struct Part {
    /// Weak, so that a file that its owner drops meanwhile is closed at once.
    file: Weak<DirtyFile>,
    offset: u64,
    /// Bytes to subtract from the account at the end.
    bytes: u64,
}

/// The regions that are being written out, and the measurement of their speed.
struct GoingOut<'a> {
    medium: &'a DirtyMedium,
    parts: VecDeque<Part>,
    bytes: u64,
    done: u64,
    began: Instant,
}

impl GoingOut<'_> {
    fn start(&mut self, file: &Arc<DirtyFile>, offset: u64, bytes: u64) {
        if file.closed.load(Ordering::Relaxed) {
            return self.medium.subtract(bytes);
        }
        file.target.write_out(offset, REGION, false);
        self.bytes += bytes;
        self.parts.push_back(Part { file: Arc::downgrade(file), offset, bytes });
        while self.parts.len() > GOING_OUT_PARTS || self.bytes > GOING_OUT_BYTES {
            self.end_first();
        }
    }

    fn end_first(&mut self) {
        let Some(part) = self.parts.pop_front() else { return };
        if let Some(file) = part.file.upgrade().filter(|file| !file.closed.load(Ordering::Relaxed)) {
            file.target.write_out(part.offset, REGION, true);
        }
        self.bytes -= part.bytes;
        self.done += part.bytes;
        self.medium.subtract(part.bytes);
        if self.began.elapsed() >= MEASURED {
            self.measure();
        }
    }

    fn end_all(&mut self) {
        while !self.parts.is_empty() {
            self.end_first();
        }
        self.measure();
    }

    fn measure(&mut self) {
        if self.done == 0 {
            return;
        }
        let seconds = self.began.elapsed().as_secs_f64().max(1e-6);
        let speed = (std::mem::take(&mut self.done) as f64 / seconds) as u64;
        let smoothed = self.medium.speed.load(Ordering::Relaxed) / 2 + speed / 2;
        self.medium.speed.store(smoothed.max(SPEED_MIN), Ordering::Relaxed);
        self.began = Instant::now();
    }
}

/// Carries out the write-out of a file.
pub(crate) trait WriteOut: Send + Sync {
    /// As [`crate::LocalFile::write_out`]: a failure is kept with the file, for its next flush.
    fn write_out(&self, offset: u64, length: u64, wait: bool);
}

/// The dirty data of one open file.
pub(crate) struct DirtyFile {
    medium: Arc<DirtyMedium>,
    target: Arc<dyn WriteOut>,
    map: DirtyMap,
    /// Set when the owner drops the file: its data is then left to the kernel, so that the file is closed soon.
    closed: AtomicBool,
}

impl DirtyFile {
    pub(crate) fn new(medium: Arc<DirtyMedium>, target: Arc<dyn WriteOut>) -> Arc<Self> {
        let file = Arc::new(Self { medium, target, map: DirtyMap::default(), closed: AtomicBool::new(false) });
        let mut files = file.medium.files.lock();
        files.retain(|file| file.strong_count() > 0);
        files.push(Arc::downgrade(&file));
        drop(files);
        file
    }

    /// Counts a buffered write that has been made, and pauses if the medium cannot keep up.
    pub(crate) fn wrote(&self, offset: u64, length: u64) {
        let added = self.map.mark(offset, length);
        if added == 0 {
            return;
        }
        let dirty = self.medium.add(added);
        let (bound, speed) = (self.medium.bound.load(Ordering::Relaxed), self.medium.speed.load(Ordering::Relaxed));
        let pause = pause(dirty, bound, speed, added.min(length));
        if !pause.is_zero() {
            std::thread::sleep(pause);
            let nanoseconds = u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX);
            self.medium.waited_nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        }
    }

    /// Calls `flush`, which makes clean what was dirty before. After a failure it is no longer counted either: a second
    /// write-out would not find it.
    pub(crate) fn flushed_by<T>(&self, flush: impl FnOnce() -> T) -> T {
        let mut taken = 0;
        self.map.take(|_, bytes| taken += bytes);
        let outcome = flush();
        self.medium.subtract(taken);
        outcome
    }

    /// Ends write-out of the file as soon as possible.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

impl Drop for DirtyFile {
    fn drop(&mut self) {
        self.map.take(|_, bytes| self.medium.subtract(bytes));
    }
}

#[cfg(test)]
mod tests;
