//! Starts scrubs of a served datastore: at the intervals of its schedule, and to continue a scrub that ended with its
//! process. A scrub is a [job](crate::jobs), so that users can follow and cancel it.
//!
//! Invariants:
//! 1. A scrub that is due and cannot be started or fails is tried again only after [`RETRY_INTERVAL`].
//! 2. After [`ScrubScheduler::stop`] no scrub is started, and the running one ends soon.

use crate::dispatch::{Service, Target};
use crate::message::{Request, ScrubRequest};
use error::{Error, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The longest time between two readings of the clock, which may be set meanwhile.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);
/// Seconds after which a scrub that could not be started, or that failed, is tried again.
pub const RETRY_INTERVAL: u64 = 600;

#[derive(Default)]
struct SchedulerState {
    stopped: bool,
    /// Whether a change of the schedule or of the clock, or the end of a scrub, was reported.
    woken: bool,
    /// When the last scrub was due, and when it was started.
    last: Option<(u64, u64)>,
}

struct Shared {
    service: Service,
    state: Mutex<SchedulerState>,
    changed: Condvar,
}

/// The thread that starts scrubs.
pub struct ScrubScheduler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Shared {
    /// Starts a scrub if one is due at `now`.
    fn start_if_due(&self, now: u64) {
        let Some(due) = self.service.datastore.scrub_due().filter(|due| *due <= now) else { return };
        {
            let mut state = self.state.lock();
            // A scrub that has failed is due at once, like one that ended with its process.
            let again = |same: u64| same == due || due == 0;
            let tried = state.last.is_some_and(|(same, at)| again(same) && now < at.saturating_add(RETRY_INTERVAL));
            if tried || state.stopped {
                return;
            }
            state.last = Some((due, now));
        }
        let Some(jobs) = &self.service.jobs else { return };
        let request = Request::Scrub(ScrubRequest::Start { rate: None, restart: false });
        match jobs.start(Target::Open(self.service.clone()), request) {
            Ok(job) => tracing::info!(job = job.id, "a scrub begins"),
            Err(error) => tracing::warn!(%error, "a scrub that is due cannot be started, and is tried again later"),
        }
    }

    fn run(&self) {
        loop {
            let now = self.service.datastore.scrub_time();
            self.start_if_due(now);
            let due = self.service.datastore.scrub_due().filter(|due| *due > now);
            let wait = due.map_or(LOOK_INTERVAL, |due| Duration::from_secs(due - now).min(LOOK_INTERVAL));
            let mut state = self.state.lock();
            if !state.woken && !state.stopped {
                self.changed.wait_for(&mut state, wait);
            }
            if state.stopped {
                return;
            }
            state.woken = false;
        }
    }

    fn wake(&self) {
        self.state.lock().woken = true;
        self.changed.notify_all();
    }
}

impl ScrubScheduler {
    /// Begins to start the scrubs of a datastore that this process serves.
    pub fn start(service: Service) -> Result<Self> {
        let datastore = Arc::clone(&service.datastore);
        let shared = Arc::new(Shared { service, state: Mutex::default(), changed: Condvar::new() });
        let weak = Arc::downgrade(&shared);
        datastore.on_scrub_schedule(move || {
            if let Some(shared) = weak.upgrade() {
                shared.wake();
            }
        });
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("scrubs".into()).spawn(move || for_thread.run());
        let thread = thread.map_err(|error| Error::io("starting the thread that starts scrubs", error))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Reports that the clock has changed.
    pub fn wake(&self) {
        self.shared.wake();
    }

    /// Starts no further scrubs, and ends the running one: the next server continues it.
    pub fn stop(&mut self) {
        self.shared.service.datastore.suspend_scrubs();
        self.shared.state.lock().stopped = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for ScrubScheduler {
    fn drop(&mut self) {
        self.stop();
    }
}
