//! Starts the passes of compression and deduplication that the settings of disks request
//! ([`Datastore::next_idle`](disk::Datastore)), one after another, on a thread of the server. Each pass is a
//! [job](crate::jobs), so that users can follow and cancel it.
//!
//! Invariants:
//! 1. A pass that has failed or was cancelled is continued only after its disks have rested, like one that has ended.
//! 2. After [`IdleScheduler::stop`] no pass is running, and none is started.

use crate::dispatch::{Service, Watch};
use crate::jobs::kind::Kind;
use crate::message::{Change, Part, Reply};
use disk::{IdlePass, Progress};
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Limits of the interval at which data is checked: a tenth of the time after which it is cold.
const LOOK_INTERVAL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(30));

/// Ends a pass when the server stops.
#[derive(Default)]
struct Stop {
    stopped: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Progress for Stop {
    fn cancelled(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

impl Watch for Stop {
    fn part(&self, _: Part) -> Result<()> {
        Err(Error::new(ErrorKind::Invalid, "a pass has no reply in parts"))
    }
}

impl Stop {
    /// Waits for this time, or until the server stops.
    fn wait(&self, time: Duration) {
        let mut guard = self.lock.lock();
        if !self.cancelled() {
            self.changed.wait_for(&mut guard, time);
        }
    }

    fn stop(&self) {
        let _guard = self.lock.lock();
        self.stopped.store(true, Ordering::Release);
        self.changed.notify_all();
    }
}

/// The thread that compresses and deduplicates cold data.
pub struct IdleScheduler {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

/// Processes what was not written in the last `after` since a pass has seen it, until the server stops.
fn run(service: &Service, after: Duration, stop: &Stop) {
    let interval = (after / 10).clamp(LOOK_INTERVAL.0, LOOK_INTERVAL.1);
    while !stop.cancelled() {
        match service.datastore.next_idle(after) {
            Ok(Some(next)) => pass(service, &next, after, stop),
            Ok(None) => stop.wait(interval),
            Err(error) => {
                tracing::debug!(%error, "no data is compressed or deduplicated now");
                stop.wait(interval);
            }
        }
    }
}

fn pass(service: &Service, pass: &IdlePass, after: Duration, stop: &Stop) {
    let Some(jobs) = &service.jobs else { return };
    let kind = Kind { verb: "disk optimize", object: pass.title() };
    let outcome = jobs.of_server(kind, stop, |watch| {
        let reclaimed = service.datastore.pass_idle(pass, after, watch)?;
        Ok(Reply::Reclaimed { name: pass.title(), reclaimed })
    });
    match outcome {
        Ok(Reply::Reclaimed { reclaimed, .. }) if reclaimed.moved + reclaimed.shared > 0 => {
            let changed = |disk| Change::DiskChanged { disk, by: "disk optimize".to_owned() };
            jobs.events().publish(pass.disks().into_iter().map(changed).collect());
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Interrupted => {
            tracing::debug!(of = pass.title(), "a pass over cold data was stopped");
        }
        Err(error) => {
            tracing::warn!(of = pass.title(), %error, "cold data was not processed, and the server tries again later");
            // Where no pass can begin, the next attempt would follow at once.
            stop.wait(LOOK_INTERVAL.1);
        }
    }
}

impl IdleScheduler {
    /// Begins to compress and deduplicate data of a datastore that this process serves, once it was not written for
    /// `after`.
    pub fn start(service: Service, after: Duration) -> Result<Self> {
        let stop = Arc::<Stop>::default();
        let for_thread = Arc::clone(&stop);
        let thread = thread::Builder::new().name("idle".into()).spawn(move || run(&service, after, &for_thread));
        let thread = thread.map_err(|error| Error::io("starting the thread that processes cold data", error))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the running pass, and starts no further one. The next server continues.
    pub fn stop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for IdleScheduler {
    fn drop(&mut self) {
        self.stop();
    }
}
