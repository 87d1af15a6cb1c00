//! Pacing of background work: its total rate is as high as possible while clients' requests stay within a target
//! latency.
//!
//! While background work runs, sessions report how long requests take ([`Foreground::served`]). Each background
//! operation queries its rate and reports the bytes that it moves ([`work::Throttle`]). After every [`WINDOW`] the
//! common rate is adjusted by additive increase and multiplicative decrease, as in the congestion control of networks:
//!
//! | in the window | new rate |
//! |---|---|
//! | no request for [`IDLE`] | unlimited |
//! | over 1 % of the requests late, or all pending | [`DECREASE`] times the rate achieved, at least [`RATE_MIN`] |
//! | otherwise, if the work used its rate | [`INCREASE`] more, at least [`RATE_STEP`] more |
//!
//! [`RATE_MIN`] ensures that background work ends even on storage that cannot reach the target latency.
//!
//! The page cache hides a slow medium from requests, until it is full and the kernel pauses them all. So the rate is
//! also limited while much of what was written waits for its write-out ([`Foreground::limited_by`]).

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use work::{Progress, slower};

/// Default target: while background work runs, 99 % of clients' requests should have at most this latency.
pub const TARGET_DEFAULT: Duration = Duration::from_millis(2);
/// Time over which requests are counted before the rate is adjusted.
const WINDOW: Duration = Duration::from_millis(50);
/// Time without requests after which all clients count as idle.
const IDLE: Duration = Duration::from_millis(500);
/// Time without requests after which all clients count as idle, at the beginning of background work.
const IDLE_AT_FIRST: Duration = Duration::from_millis(100);
/// Initial rate in bytes per second; also the minimum of the first rate after clients become active.
const RATE_FIRST: f64 = (64 << 20) as f64;
/// Minimum of the common rate, in bytes per second.
const RATE_MIN: f64 = (8 << 20) as f64;
/// Minimum increase per window, in bytes per second.
const RATE_STEP: f64 = (4 << 20) as f64;
/// Rates of at least this many bytes per second count as unlimited.
const RATE_MAX: f64 = (16u64 << 30) as f64;
/// Increase per window, as a fraction of the rate.
const INCREASE: f64 = 1.0 / 16.0;
/// Factor applied to the rate achieved in a window with late requests.
const DECREASE: f64 = 0.7;

/// Latency of clients' requests, and the rate of background work that follows from it.
pub struct Foreground {
    /// Target latency in nanoseconds; 0 for none.
    target: AtomicU64,
    /// Number of background operations that are running.
    jobs: AtomicUsize,
    requests: AtomicU64,
    slow: AtomicU64,
    /// Total bytes that background operations have moved.
    moved: AtomicU64,
    /// Number of sessions that have unfinished requests.
    waiting: AtomicUsize,
    control: Mutex<Control>,
    /// The rate that the medium permits; `None` for no limit.
    medium_rate: Option<Box<dyn Fn() -> u64 + Send + Sync>>,
}

/// State of the rate controller. Its counters are the values of those in [`Foreground`] at the beginning of the window.
struct Control {
    began: Instant,
    requests: u64,
    slow: u64,
    moved: u64,
    /// Common rate in bytes per second; [`RATE_MAX`] for no limit.
    rate: f64,
    /// Time at which a request was last seen.
    active: Instant,
}

impl Control {
    fn new(now: Instant) -> Self {
        let active = now.checked_sub(IDLE - IDLE_AT_FIRST).unwrap_or(now);
        Self { began: now, requests: 0, slow: 0, moved: 0, rate: RATE_FIRST, active }
    }

    /// Ends a window with the current values of the counters; `waiting` says whether a session has unfinished requests.
    fn end_window(&mut self, now: Instant, requests: u64, slow: u64, moved: u64, waiting: bool) {
        let seconds = now.duration_since(self.began).as_secs_f64();
        let (served, late) = (requests - self.requests, slow - self.slow);
        let speed = (moved - self.moved) as f64 / seconds;
        // If requests are pending and none completes within a window, they count as late.
        let stuck = waiting && served == 0;
        if served > 0 || waiting {
            self.active = now;
        }
        if now.duration_since(self.active) >= IDLE {
            self.rate = RATE_MAX;
        } else if stuck || late * 100 > served {
            self.rate = (self.rate.min(speed) * DECREASE).max(RATE_MIN);
        } else if self.rate >= RATE_MAX {
            // Clients became active while background work had no limit.
            self.rate = speed.max(RATE_FIRST);
        } else if speed * 2.0 >= self.rate {
            self.rate += (self.rate * INCREASE).max(RATE_STEP);
        }
        (self.began, self.requests, self.slow, self.moved) = (now, requests, slow, moved);
    }
}

impl Foreground {
    /// Keeps clients' requests within `target`; zero disables pacing.
    pub fn new(target: Duration) -> Self {
        Self {
            target: AtomicU64::new(nanoseconds(target)),
            jobs: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            slow: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            control: Mutex::new(Control::new(Instant::now())),
            medium_rate: None,
        }
    }

    /// Also limits the common rate to what `rate` returns, in bytes per second; 0 for no limit.
    pub fn limited_by(self, rate: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self { medium_rate: Some(Box::new(rate)), ..self }
    }

    /// Sets the target latency.
    pub fn set_target(&self, target: Duration) {
        self.target.store(nanoseconds(target), Ordering::Relaxed);
    }

    /// The arrival time of a request; `None` if no background work is running, because latency is then not measured.
    pub fn arrived(&self) -> Option<Instant> {
        (self.jobs.load(Ordering::Relaxed) > 0).then(Instant::now)
    }

    /// Counts a session as one with unfinished requests until the result is dropped.
    pub fn wait(self: &Arc<Self>) -> Waiting {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(Arc::clone(self))
    }

    /// Reports that `count` requests, which arrived at `arrived`, are completed.
    pub fn served(&self, arrived: Instant, count: u64) {
        self.requests.fetch_add(count, Ordering::Relaxed);
        if nanoseconds(arrived.elapsed()) > self.target.load(Ordering::Relaxed) {
            self.slow.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Number of background operations that are running, and their common rate in bytes per second; 0 for no limit.
    pub fn pace(&self) -> (usize, u64) {
        let rate = self.control.lock().rate;
        let rate = if rate >= RATE_MAX { 0 } else { rate as u64 };
        (self.jobs.load(Ordering::Relaxed), slower(rate, self.medium_rate()))
    }

    fn medium_rate(&self) -> u64 {
        self.medium_rate.as_ref().map_or(0, |rate| rate())
    }

    fn begin(&self) {
        let mut control = self.control.lock();
        if self.jobs.fetch_add(1, Ordering::Relaxed) == 0 {
            // Requests from before the background work must not affect the new rate.
            let counted = (self.requests.load(Ordering::Relaxed), self.slow.load(Ordering::Relaxed));
            *control = Control::new(Instant::now());
            (control.requests, control.slow) = counted;
            control.moved = self.moved.load(Ordering::Relaxed);
        }
    }

    /// Bytes per second that one background operation may move now; 0 for no limit.
    fn share(&self) -> u64 {
        let of_medium = match self.medium_rate() {
            0 => 0,
            rate => (rate / self.jobs.load(Ordering::Relaxed).max(1) as u64).max(1),
        };
        slower(of_medium, self.share_beside_requests())
    }

    fn share_beside_requests(&self) -> u64 {
        if self.target.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let mut control = self.control.lock();
        let now = Instant::now();
        if now.duration_since(control.began) >= WINDOW {
            let slow = self.slow.load(Ordering::Relaxed);
            // `requests` is read after `slow`, so that every late request is also counted in `requests`.
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

/// Exists while a session has unfinished requests.
pub struct Waiting(Arc<Foreground>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A background operation that is paced. It counts as running once it has queried its rate.
pub struct Background<'a> {
    progress: &'a dyn Progress,
    foreground: Arc<Foreground>,
    begun: OnceLock<()>,
}

impl<'a> Background<'a> {
    /// A background operation with progress `progress`, paced by the latency in `foreground`.
    pub fn new(progress: &'a dyn Progress, foreground: &Arc<Foreground>) -> Self {
        Self { progress, foreground: Arc::clone(foreground), begun: OnceLock::new() }
    }
}

impl Progress for Background<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.progress)
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
