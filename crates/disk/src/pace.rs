//! The pace of background work: as fast as the requests of clients stay within a target of latency, shared by all work
//! under way.
//!
//! A session reports how long its requests take ([`Foreground::served`]), as long as there is background work at all.
//! Work asks for its rate, and reports what it moves ([`work::Throttle`]). In every [`WINDOW`] the rate of all work
//! together is set anew, as congestion control of a network does it (additive increase, multiplicative decrease):
//!
//! | in the window | rate |
//! |---|---|
//! | no request for [`IDLE`] | without limit |
//! | over 1 % of the requests late, or none answered | [`DECREASE`] of what was moved, at least [`RATE_MIN`] |
//! | else, where the work moved what it may | [`INCREASE`] more, at least [`RATE_STEP`] |
//!
//! [`RATE_MIN`] bounds the time of the work on a medium that cannot keep to the target at all.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use work::{Progress, slower};

/// Latency that 99 % of the requests of clients keep to while background work is under way, unless configured.
pub const TARGET_DEFAULT: Duration = Duration::from_millis(2);
/// Time over which requests are counted before the rate is adjusted.
const WINDOW: Duration = Duration::from_millis(50);
/// Time without requests after which no client counts as active.
const IDLE: Duration = Duration::from_millis(500);
/// Time without requests after which work that has just begun takes clients for idle.
const IDLE_AT_FIRST: Duration = Duration::from_millis(100);
/// Rate with which work begins, bytes per second.
const RATE_FIRST: f64 = (64 << 20) as f64;
/// Least rate of all work together, bytes per second.
const RATE_MIN: f64 = (8 << 20) as f64;
/// Least increase of a window, bytes per second.
const RATE_STEP: f64 = (4 << 20) as f64;
/// Rates from here on are no limit.
const RATE_MAX: f64 = (16u64 << 30) as f64;
/// Share of the rate that a window adds.
const INCREASE: f64 = 1.0 / 16.0;
/// Share of what was moved that is left after a window with slow requests.
const DECREASE: f64 = 0.7;

/// The requests of clients, and what background work may do beside them.
pub struct Foreground {
    /// Nanoseconds; 0 for no target.
    target: AtomicU64,
    /// Pieces of background work under way.
    jobs: AtomicUsize,
    requests: AtomicU64,
    slow: AtomicU64,
    /// Bytes that background work has moved.
    moved: AtomicU64,
    /// Sessions with requests that are not answered.
    waiting: AtomicUsize,
    control: Mutex<Control>,
}

/// The controller. Counters are as they were at the beginning of the window.
struct Control {
    began: Instant,
    requests: u64,
    slow: u64,
    moved: u64,
    /// Bytes per second of all work together; [`RATE_MAX`] for no limit.
    rate: f64,
    /// When a request was last seen.
    active: Instant,
}

impl Control {
    fn new(now: Instant) -> Self {
        let active = now.checked_sub(IDLE - IDLE_AT_FIRST).unwrap_or(now);
        Self { began: now, requests: 0, slow: 0, moved: 0, rate: RATE_FIRST, active }
    }

    /// Ends a window in which the counters reached these values; `waiting` with requests that are not answered.
    fn end_window(&mut self, now: Instant, requests: u64, slow: u64, moved: u64, waiting: bool) {
        let seconds = now.duration_since(self.began).as_secs_f64();
        let (served, late) = (requests - self.requests, slow - self.slow);
        let speed = (moved - self.moved) as f64 / seconds;
        // A request that is not answered within a window is late, whatever becomes of it.
        let stuck = waiting && served == 0;
        if served > 0 || waiting {
            self.active = now;
        }
        if now.duration_since(self.active) >= IDLE {
            self.rate = RATE_MAX;
        } else if stuck || late * 100 > served {
            self.rate = (self.rate.min(speed) * DECREASE).max(RATE_MIN);
        } else if self.rate >= RATE_MAX {
            // Clients have become active beside work at full speed.
            self.rate = speed.max(RATE_FIRST);
        } else if speed * 2.0 >= self.rate {
            self.rate += (self.rate * INCREASE).max(RATE_STEP);
        }
        (self.began, self.requests, self.slow, self.moved) = (now, requests, slow, moved);
    }
}

impl Foreground {
    /// Requests of clients are to stay within `target`; zero for work without regard to them.
    pub fn new(target: Duration) -> Self {
        Self {
            target: AtomicU64::new(nanoseconds(target)),
            jobs: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            slow: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            control: Mutex::new(Control::new(Instant::now())),
        }
    }

    /// Sets the target.
    pub fn set_target(&self, target: Duration) {
        self.target.store(nanoseconds(target), Ordering::Relaxed);
    }

    /// When a request arrives: now, if background work is under way that measures how long requests take.
    pub fn arrived(&self) -> Option<Instant> {
        (self.jobs.load(Ordering::Relaxed) > 0).then(Instant::now)
    }

    /// A session has requests that are not answered, until what this gives is dropped.
    pub fn wait(self: &Arc<Self>) -> Waiting {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(Arc::clone(self))
    }

    /// This many requests that arrived then are answered.
    pub fn served(&self, arrived: Instant, count: u64) {
        self.requests.fetch_add(count, Ordering::Relaxed);
        if nanoseconds(arrived.elapsed()) > self.target.load(Ordering::Relaxed) {
            self.slow.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Pieces of background work under way, and the rate of all of them together in bytes per second; 0 for no limit.
    pub fn pace(&self) -> (usize, u64) {
        let rate = self.control.lock().rate;
        (self.jobs.load(Ordering::Relaxed), if rate >= RATE_MAX { 0 } else { rate as u64 })
    }

    fn begin(&self) {
        let mut control = self.control.lock();
        if self.jobs.fetch_add(1, Ordering::Relaxed) == 0 {
            // Nothing was counted since the last work ended.
            let counted = (self.requests.load(Ordering::Relaxed), self.slow.load(Ordering::Relaxed));
            *control = Control::new(Instant::now());
            (control.requests, control.slow) = counted;
            control.moved = self.moved.load(Ordering::Relaxed);
        }
    }

    /// Bytes per second that one of the pieces of work may move now; 0 for no limit.
    fn share(&self) -> u64 {
        if self.target.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let mut control = self.control.lock();
        let now = Instant::now();
        if now.duration_since(control.began) >= WINDOW {
            let slow = self.slow.load(Ordering::Relaxed);
            // After the slow ones, of which each is counted here first.
            let requests = self.requests.load(Ordering::Relaxed);
            let waiting = self.waiting.load(Ordering::Relaxed) > 0;
            control.end_window(now, requests, slow, self.moved.load(Ordering::Relaxed), waiting);
        }
        if control.rate >= RATE_MAX {
            return 0;
        }
        (control.rate / self.jobs.load(Ordering::Relaxed).max(1) as f64) as u64
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A session that has requests to answer.
pub struct Waiting(Arc<Foreground>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A piece of background work that gives way to clients. It counts as such once it asks for its rate.
pub struct Background<'a> {
    progress: &'a dyn Progress,
    foreground: Arc<Foreground>,
    begun: OnceLock<()>,
}

impl<'a> Background<'a> {
    /// Work watched by `progress`, beside these clients.
    pub fn new(progress: &'a dyn Progress, foreground: &Arc<Foreground>) -> Self {
        Self { progress, foreground: Arc::clone(foreground), begun: OnceLock::new() }
    }
}

impl Progress for Background<'_> {
    fn update(&self, done: u64, total: u64) {
        self.progress.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.progress.cancelled()
    }

    fn rate(&self) -> u64 {
        self.begun.get_or_init(|| self.foreground.begin());
        slower(self.progress.rate(), self.foreground.share())
    }

    fn moved(&self, bytes: u64) {
        self.foreground.moved.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Background<'_> {
    fn drop(&mut self) {
        if self.begun.get().is_some() {
            self.foreground.jobs.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
