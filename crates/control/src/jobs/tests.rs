//! Jobs without a datastore: how they are listed, how they end, and their limits.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::message::{DiskRequest, ImageRequest};
use disk::convert::ImageOptions;

/// A client that can cancel its request.
#[derive(Default)]
struct Client {
    gone: AtomicBool,
}

impl Progress for Client {
    fn update(&self, _: u64, _: u64) {}
    fn cancelled(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

impl Watch for Client {
    fn part(&self, part: Part) -> Result<()> {
        panic!("{part:?} was not requested")
    }
}

fn kind() -> Kind {
    Kind { verb: "disk migrate", object: "vm1".into() }
}

#[test]
fn a_long_name_is_cut_in_the_list_and_in_the_error() {
    let name = "ä".repeat(1 << 20);
    let delete = DiskRequest::Delete { name: name.clone(), promote: false, force: false };
    let kind = kind::of(&Request::Disk(delete)).unwrap();
    assert!(kind.object.len() < 1100 && kind.object.ends_with("ä ..."), "{}", kind.object.len());
    let jobs = Jobs::new().unwrap();
    let refused = jobs.attached(kind, &Client::default(), |_| Err(Error::new(ErrorKind::NotFound, name.clone())));
    assert_eq!(refused.unwrap_err().to_string(), name, "the client gets the whole text");
    let listed = serde_json::to_string(&jobs.list()).unwrap();
    assert!(listed.len() < 20_000, "{}", listed.len());
}

/// Works until cancelled.
fn work(watch: &dyn Watch) -> Result<Reply> {
    while !watch.cancelled() {
        watch.update(7, 10);
        thread::sleep(Duration::from_millis(1));
    }
    Err(Error::new(ErrorKind::Interrupted, "stopped"))
}

/// Waits until a job is in the list.
fn first(jobs: &Jobs) -> JobInfo {
    loop {
        if let Some(job) = jobs.list().into_iter().find(|job| job.total > 0 || job.ended.is_some()) {
            return job;
        }
        thread::yield_now();
    }
}

#[test]
fn an_attached_job_can_be_listed_and_cancelled_by_other_clients() {
    let jobs = Jobs::new().unwrap();
    let client = Client::default();
    thread::scope(|scope| {
        let at_work = scope.spawn(|| jobs.attached(kind(), &client, work));
        let job = first(&jobs);
        assert_eq!((job.kind.as_str(), job.object.as_str(), job.state), ("disk migrate", "vm1", JobState::Running));
        assert_eq!((job.done, job.total, job.background), (7, 10, false));
        let cancelled = jobs.cancel(&job.id).unwrap();
        assert!(cancelled.cancelling || cancelled.ended.is_some());
        assert_eq!(jobs.wait(&job.id, &Client::default()).unwrap_err().kind(), ErrorKind::Interrupted);
        assert_eq!(at_work.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
        let job = jobs.show(&job.id).unwrap();
        assert_eq!((job.state, job.cancelling), (JobState::Cancelled, false));
        assert!(job.ended.is_some() && job.error.is_some());
    });
}

/// Otherwise a stop may close the events between the end and its event.
#[test]
fn the_end_of_a_job_is_published_before_it_can_be_seen() {
    let jobs = Jobs::new().unwrap();
    let step = std::sync::Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let work = |_: &dyn Watch| {
                step.wait();
                step.wait();
                Ok(Reply::Settled)
            };
            jobs.attached(kind(), &Client::default(), work).unwrap();
        });
        step.wait();
        let held = jobs.events.held();
        step.wait();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(100) {
            let state = jobs.state.try_lock();
            assert!(!state.is_some_and(|state| state.jobs.values().any(|job| job.end.get().is_some())));
            thread::sleep(Duration::from_millis(1));
        }
        drop(held);
    });
    assert_eq!(jobs.list()[0].state, JobState::Done);
}

#[test]
fn an_attached_job_ends_when_its_client_leaves_but_not_when_a_waiter_leaves() {
    let jobs = Jobs::new().unwrap();
    let client = Client::default();
    thread::scope(|scope| {
        let at_work = scope.spawn(|| jobs.attached(kind(), &client, work));
        let job = first(&jobs);
        let impatient = Client { gone: true.into() };
        assert_eq!(jobs.wait(&job.id, &impatient).unwrap_err().kind(), ErrorKind::Interrupted);
        assert_eq!(jobs.show(&job.id).unwrap().state, JobState::Running);
        client.gone.store(true, Ordering::Relaxed);
        assert!(at_work.join().unwrap().is_err());
    });
}

#[test]
fn the_result_of_a_started_job_is_kept() {
    let jobs = Arc::new(Jobs::new().unwrap());
    let image = |path: &str| {
        Request::Image(ImageRequest::Check { path: path.into(), repair: false, options: ImageOptions::default() })
    };
    let job = jobs.start(Target::Files, image("/nowhere/disk.vmdk")).unwrap();
    assert_eq!((job.kind.as_str(), job.object.as_str(), job.background), ("image check", "/nowhere/disk.vmdk", true));
    assert_eq!(jobs.wait(&job.id, &Client::default()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(jobs.show(&job.id).unwrap().state, JobState::Failed);
    let short = jobs.start(Target::Files, Request::Status).unwrap_err();
    assert_eq!(short.kind(), ErrorKind::Invalid, "a short request is not a job");
    jobs.stop();
    assert_eq!(
        jobs.start(Target::Files, image("/nowhere")).unwrap_err().kind(),
        ErrorKind::Busy,
        "no job starts after the end"
    );
}

#[test]
fn a_panic_ends_only_its_own_job() {
    let jobs = Jobs::new().unwrap();
    let work = || jobs.attached(kind(), &Client::default(), |_| panic!("a bug in the engine"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err());
    let job = first(&jobs);
    assert_eq!(job.state, JobState::Failed);
    assert_eq!(job.error.unwrap().kind(), ErrorKind::Stopped);
}

#[test]
fn ended_jobs_are_kept_up_to_a_limit_and_those_of_other_runs_are_unknown() {
    let jobs = Jobs::new().unwrap();
    let count = ATTACHED_ENDED_MAX + 3;
    for _ in 0..count {
        jobs.attached(kind(), &Client::default(), |_| Ok(Reply::Settled)).unwrap();
    }
    let list = jobs.list();
    assert_eq!(list.len(), ATTACHED_ENDED_MAX);
    assert_eq!(list.last().unwrap().id, format!("{}-{count}", jobs.run));
    let other = Jobs::new().unwrap();
    for id in [list[0].id.as_str(), "", "1", "-", "x-1", &format!("{}-99999", other.run)] {
        assert_eq!(other.show(id).unwrap_err().kind(), ErrorKind::NotFound, "{id}");
    }
    let oldest = format!("{}-1", jobs.run);
    assert_eq!(jobs.show(&oldest).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn jobs_of_the_server_continue_without_a_client_and_displace_no_others() {
    let jobs = Jobs::new().unwrap();
    jobs.attached(kind(), &Client::default(), |_| Ok(Reply::Settled)).unwrap();
    for _ in 0..ATTACHED_ENDED_MAX + 1 {
        jobs.of_server(kind(), &Client::default(), |_| Ok(Reply::Settled)).unwrap();
    }
    let list = jobs.list();
    assert_eq!(list.len(), 1 + SERVER_ENDED_MAX);
    assert!(!list[0].background && list[1..].iter().all(|job| job.background && job.state == JobState::Done));
    let stopped = Client::default();
    thread::scope(|scope| {
        let at_work = scope.spawn(|| jobs.of_server(kind(), &stopped, work));
        let running = |job: &JobInfo| job.state == JobState::Running && job.total > 0;
        let job = loop {
            if let Some(job) = jobs.list().into_iter().find(running) {
                break job;
            }
            thread::yield_now();
        };
        let cancelled = jobs.cancel(&job.id).unwrap();
        assert!(cancelled.cancelling || cancelled.ended.is_some());
        assert_eq!(at_work.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
    });
    jobs.stop();
    let refused = jobs.of_server(kind(), &Client::default(), |_| Ok(Reply::Settled)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "no job starts after the end");
}

#[test]
fn a_job_result_that_is_too_long_is_not_kept() {
    assert!(is_short(&"a".repeat(OUTCOME_MAX - 2)) && !is_short(&"a".repeat(OUTCOME_MAX)));
}
