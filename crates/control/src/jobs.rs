//! Jobs: long operations of a process that has a datastore open, visible to other requests.
//!
//! ```text
//!  dispatch --- attached ---> on the thread of the front end, cancelled when the client disconnects
//!          \--- start ------> on a thread of its own, continues when the client disconnects
//!  datastore -- of_datastore -> on a thread of the datastore: live imports and restores
//!  server ----- of_server --> on a thread of the server, without a request of a client
//! ```
//!
//! Invariants:
//! 1. A job is listed from before its operation begins until [`ENDED_MAX`] later started jobs have ended, or
//!    [`ATTACHED_ENDED_MAX`] later attached ones, or [`SERVER_ENDED_MAX`] later ones of the server. A job's outcome is
//!    set exactly once, also if its operation panics, and all requests that wait for the job are woken.
//! 2. The `cancelled()` of a job's progress returns true soon after [`Jobs::cancel`]; for an attached job also after
//!    its client has disconnected.
//! 3. After [`Jobs::stop`] no started job is running and none can be started. Jobs are kept in memory only: after a
//!    kill, the recovery of the datastore completes or undoes their operations.
//! 4. At most [`STARTED_MAX`] started jobs run at a time, and an outcome longer than [`OUTCOME_MAX`] is not kept.
//!
//! Locks: `state` is held to look up, add and end jobs. Only the events are locked while it is held, to publish the end
//! of a job.

pub mod kind;

use crate::dispatch::{Target, Watch, carry_out};
use crate::events::Events;
use crate::message::{Change, Failure, JobEnd, JobInfo, JobState, Part, Reply, Request};
use backend::clock;
use disk::transfer::new_identity;
use disk::{NoProgress, Progress};
use error::{Error, ErrorKind, Result};
use kind::Kind;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Most started jobs that run at a time.
pub const STARTED_MAX: usize = 64;
/// Most started jobs that are kept after they have ended.
pub const ENDED_MAX: usize = 256;
/// Most attached jobs that are kept after they have ended.
pub const ATTACHED_ENDED_MAX: usize = 64;
/// Most jobs of the server that are kept after they have ended, so that they do not displace those of users.
pub const SERVER_ENDED_MAX: usize = 32;
/// Longest outcome that is kept: bytes of the request and the reply as JSON.
pub const OUTCOME_MAX: usize = 256 << 10;

/// Most bytes of the error of an ended job.
const ERROR_MAX: usize = 8 << 10;
/// How long started jobs may continue after [`Jobs::stop`] before they are cancelled.
const GRACE: Duration = Duration::from_secs(5);
/// Interval at which a wait checks for cancellation and reports progress.
const WAIT_INTERVAL: Duration = Duration::from_millis(100);
/// Number of characters in a job id that identify the run of the process.
const RUN_LENGTH: usize = 6;

/// The jobs of one process, and the events of its datastore.
pub struct Jobs {
    /// Distinguishes the ids of jobs in this run of the process from those in other runs.
    run: String,
    events: Events,
    state: Mutex<JobsState>,
    ended: Condvar,
}

#[derive(Default)]
struct JobsState {
    last: u64,
    jobs: BTreeMap<u64, Arc<Job>>,
    stopping: bool,
}

/// What has begun a job.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// A client that waits for it.
    Attached,
    /// A client that does not wait.
    Started,
    /// The server.
    Server,
}

impl Origin {
    /// Most jobs that are kept after they have ended.
    fn kept(self) -> usize {
        match self {
            Self::Attached => ATTACHED_ENDED_MAX,
            Self::Started => ENDED_MAX,
            Self::Server => SERVER_ENDED_MAX,
        }
    }
}

struct Job {
    id: String,
    kind: Kind,
    /// The request, kept for started jobs only.
    request: Option<Request>,
    started: u64,
    origin: Origin,
    done: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
    end: OnceLock<End>,
}

struct End {
    time: u64,
    /// The result, with the reply if it is short enough to be kept.
    outcome: std::result::Result<Option<Reply>, Failure>,
    cancelled: bool,
}

impl Job {
    fn info(&self) -> JobInfo {
        self.info_with(self.end.get())
    }

    fn info_with(&self, end: Option<&End>) -> JobInfo {
        let state = match end {
            None => JobState::Running,
            Some(End { outcome: Ok(_), .. }) => JobState::Done,
            Some(End { cancelled: true, .. }) => JobState::Cancelled,
            Some(_) => JobState::Failed,
        };
        JobInfo {
            id: self.id.clone(),
            kind: self.kind.verb.to_owned(),
            object: self.kind.object.clone(),
            background: self.origin != Origin::Attached,
            state,
            cancelling: end.is_none() && self.cancelled.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
            total: self.total.load(Ordering::Relaxed),
            started: self.started,
            ended: end.map(|end| end.time),
            error: end.and_then(|end| end.outcome.as_ref().err().cloned()),
        }
    }
}

/// The progress to which a job's operation reports.
struct Followed<'a> {
    job: &'a Job,
    /// The progress of the client that waits; `None` for a started job.
    client: Option<&'a dyn Watch>,
}

impl Progress for Followed<'_> {
    fn update(&self, done: u64, total: u64) {
        self.job.done.store(done, Ordering::Relaxed);
        self.job.total.store(total, Ordering::Relaxed);
        if let Some(client) = self.client {
            client.update(done, total);
        }
    }

    fn cancelled(&self) -> bool {
        self.job.cancelled.load(Ordering::Relaxed) || self.client.is_some_and(|client| client.cancelled())
    }

    fn rate(&self) -> u64 {
        self.client.map_or(0, |client| client.rate())
    }

    fn moved(&self, bytes: u64) {
        if let Some(client) = self.client {
            client.moved(bytes);
        }
    }
}

impl Watch for Followed<'_> {
    fn part(&self, part: Part) -> Result<()> {
        match self.client {
            Some(client) => client.part(part),
            None => Err(Error::new(ErrorKind::Invalid, "a job cannot send its reply in parts")),
        }
    }
}

/// Ends a job when this value is dropped, also if the operation panics.
struct Ending<'a> {
    jobs: &'a Jobs,
    job: &'a Job,
}

impl Ending<'_> {
    fn end(&self, outcome: &Result<Reply>) {
        let end = End {
            time: clock::seconds(),
            outcome: match outcome {
                Ok(reply) => Ok((self.job.request.is_some() && is_short(reply)).then(|| reply.clone())),
                // The text may repeat a name of any length.
                Err(error) => Err((&Error::new(error.kind(), kind::cut(error.to_string(), ERROR_MAX))).into()),
            },
            cancelled: matches!(outcome, Err(error) if error.kind() == ErrorKind::Interrupted),
        };
        self.jobs.end(self.job, end);
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if self.job.end.get().is_none() {
            let error = Error::new(ErrorKind::Stopped, "the server failed inside this job: see its log");
            self.end(&Err(error));
        }
    }
}

/// Whether a value is short enough to be kept with an ended job.
fn is_short<T: serde::Serialize>(value: &T) -> bool {
    serde_json::to_vec(value).is_ok_and(|text| text.len() <= OUTCOME_MAX)
}

impl Jobs {
    /// An empty list of jobs, for a process that has just opened a datastore.
    pub fn new() -> Result<Self> {
        let mut run = new_identity()?;
        run.truncate(RUN_LENGTH);
        Ok(Self { run, events: Events::default(), state: Mutex::default(), ended: Condvar::new() })
    }

    /// The events of the datastore.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Adds a job to the list.
    fn begin(&self, kind: Kind, origin: Origin, request: Option<Request>) -> Result<Arc<Job>> {
        let job = {
            let mut state = self.state.lock();
            if origin != Origin::Attached && state.stopping {
                return Err(Error::new(ErrorKind::Busy, "the server of this datastore is stopping: try again"));
            }
            if origin == Origin::Started && state.running().count() >= STARTED_MAX {
                let text = format!("{STARTED_MAX} jobs are under way already: try again later");
                return Err(Error::new(ErrorKind::Busy, text));
            }
            state.last += 1;
            let job = Arc::new(Job {
                id: format!("{}-{}", self.run, state.last),
                kind,
                request,
                started: clock::seconds(),
                origin,
                done: 0.into(),
                total: 0.into(),
                cancelled: false.into(),
                end: OnceLock::new(),
            });
            let number = state.last;
            state.jobs.insert(number, Arc::clone(&job));
            job
        };
        self.events.publish(vec![Change::JobStarted { job: Box::new(job.info()) }]);
        Ok(job)
    }

    fn end(&self, job: &Job, end: End) {
        let mut state = self.state.lock();
        // Published before anyone can see the end: a client that has waited for the job may look for the event, and
        // a stop closes the events when all jobs have ended.
        self.events.publish(vec![Change::JobEnded { job: Box::new(job.info_with(Some(&end))) }]);
        let _ = job.end.set(end);
        state.forget(job.origin);
        self.ended.notify_all();
    }

    /// Carries out an operation as a job of its client, on this thread.
    pub fn attached(
        &self,
        kind: Kind,
        client: &dyn Watch,
        work: impl FnOnce(&dyn Watch) -> Result<Reply>,
    ) -> Result<Reply> {
        self.carry_out(kind, Origin::Attached, client, work)
    }

    /// Carries out an operation that no client has requested, on this thread.
    pub fn of_server(
        &self,
        kind: Kind,
        watch: &dyn Watch,
        work: impl FnOnce(&dyn Watch) -> Result<Reply>,
    ) -> Result<Reply> {
        self.carry_out(kind, Origin::Server, watch, work)
    }

    fn carry_out(
        &self,
        kind: Kind,
        origin: Origin,
        watch: &dyn Watch,
        work: impl FnOnce(&dyn Watch) -> Result<Reply>,
    ) -> Result<Reply> {
        let job = self.begin(kind, origin, None)?;
        let ending = Ending { jobs: self, job: &job };
        let outcome = work(&Followed { job: &job, client: Some(watch) });
        ending.end(&outcome);
        outcome
    }

    /// Runs work that the datastore does by itself as a job, on this thread.
    pub fn of_datastore(
        &self,
        verb: &'static str,
        object: &str,
        work: &mut dyn FnMut(&dyn Progress) -> Result<()>,
    ) -> Result<()> {
        let kind = Kind { verb, object: object.to_owned() };
        let done = self.attached(kind, &NoProgress, |watch| {
            work(watch)?;
            Ok(Reply::Settled)
        });
        done.map(drop)
    }

    /// Starts a request as a job, on a thread of its own.
    pub fn start(self: &Arc<Self>, target: Target, request: Request) -> Result<JobInfo> {
        let Some(kind) = kind::of(&request) else {
            let text = "this is not a long operation and cannot be a job: repeat it without --background";
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        let kept = is_short(&request).then(|| request.clone());
        let job = self.begin(kind, Origin::Started, kept)?;
        let info = job.info();
        let (jobs, for_thread) = (Arc::clone(self), Arc::clone(&job));
        let thread = thread::Builder::new().name(format!("job-{}", info.id)).spawn(move || {
            let job = &*for_thread;
            let ending = Ending { jobs: &jobs, job };
            let outcome = carry_out(&target, request, &Followed { job, client: None });
            // The target is dropped before the end of the job is reported: a process that stops closes the datastore
            // once all jobs have ended.
            drop(target);
            if let Err(error) = &outcome {
                tracing::info!(job = job.id, kind = job.kind.verb, "the job ended: {error}");
            }
            ending.end(&outcome);
        });
        match thread {
            Ok(_) => Ok(info),
            Err(e) => {
                let outcome = Err(Error::io("starting a job", e));
                Ending { jobs: self, job: &job }.end(&outcome);
                outcome.map(|_| info)
            }
        }
    }

    fn find(&self, id: &str) -> Result<Arc<Job>> {
        let number = id.strip_prefix(self.run.as_str()).and_then(|rest| rest.strip_prefix('-')?.parse().ok());
        let job = number.and_then(|number: u64| self.state.lock().jobs.get(&number).cloned());
        job.ok_or_else(|| {
            let text = format!(
                "there is no job '{}': a job ends with the server that runs it, and only the newest ones are kept after \
                 their end",
                id.escape_debug()
            );
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// All jobs, the oldest first.
    pub fn list(&self) -> Vec<JobInfo> {
        self.state.lock().jobs.values().map(|job| job.info()).collect()
    }

    /// One job.
    pub fn show(&self, id: &str) -> Result<JobInfo> {
        self.find(id).map(|job| job.info())
    }

    /// Cancels a job; returns its current state.
    pub fn cancel(&self, id: &str) -> Result<JobInfo> {
        let job = self.find(id)?;
        job.cancelled.store(true, Ordering::Relaxed);
        Ok(job.info())
    }

    /// Waits until a job ends.
    ///
    /// # Errors
    /// The job's error, if it failed; `Interrupted` if `watch` is cancelled.
    pub fn wait(&self, id: &str, watch: &dyn Watch) -> Result<JobEnd> {
        let job = self.find(id)?;
        loop {
            {
                let mut state = self.state.lock();
                if job.end.get().is_none() {
                    self.ended.wait_for(&mut state, WAIT_INTERVAL);
                }
            }
            if let Some(end) = job.end.get() {
                let reply = end.outcome.clone().map_err(Error::from)?;
                return Ok(JobEnd { job: job.info(), outcome: job.request.clone().zip(reply) });
            }
            if watch.cancelled() {
                return Err(Error::new(
                    ErrorKind::Interrupted,
                    format!("stopped waiting for job {id}, which continues"),
                ));
            }
            match job.total.load(Ordering::Relaxed) {
                0 => {}
                total => watch.update(job.done.load(Ordering::Relaxed), total),
            }
        }
    }

    /// Refuses further jobs, lets started jobs finish, and cancels those that take longer than [`GRACE`]. Then ends all
    /// event subscriptions. Attached jobs are ended by their front ends.
    pub fn stop(&self) {
        let mut state = self.state.lock();
        state.stopping = true;
        if !self.ended_within(&mut state, GRACE) {
            let jobs = state.running().count();
            tracing::info!(jobs, "cancelling jobs that are still under way");
            state.running().for_each(|job| job.cancelled.store(true, Ordering::Relaxed));
            while state.running().next().is_some() {
                self.ended.wait(&mut state);
            }
        }
        drop(state);
        self.events.close();
    }

    fn ended_within(&self, state: &mut MutexGuard<'_, JobsState>, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        while state.running().next().is_some() {
            if self.ended.wait_until(state, deadline).timed_out() {
                return state.running().next().is_none();
            }
        }
        true
    }
}

impl JobsState {
    /// Started jobs that are running.
    fn running(&self) -> impl Iterator<Item = &Arc<Job>> {
        self.jobs.values().filter(|job| job.origin == Origin::Started && job.end.get().is_none())
    }

    /// Removes the oldest ended jobs of an origin beyond the number that is kept.
    fn forget(&mut self, origin: Origin) {
        let kept = origin.kept();
        let ended = self.jobs.iter().filter(|(_, job)| job.origin == origin && job.end.get().is_some());
        let ended: Vec<u64> = ended.map(|(number, _)| *number).collect();
        for number in &ended[..ended.len().saturating_sub(kept)] {
            self.jobs.remove(number);
        }
    }
}

#[cfg(test)]
mod tests;
