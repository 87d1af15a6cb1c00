//! The scheduler of scrubs, with a clock that the test sets.

#![allow(clippy::unwrap_used)]

use backend::SharedSlice;
use control::jobs::Jobs;
use control::scrubs::{RETRY_INTERVAL, ScrubScheduler};
use control::{JobInfo, JobState, OPEN_OPTIONS, Service};
use disk::{Datastore, InitOptions, NewDisk, NoProgress, Provisioning, ScrubOptions, ScrubState, ScrubSummary};
use error::ErrorKind;
use export::clients::Clients;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EVERY: u64 = 1000;

fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(60), "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A served datastore whose clock the test sets.
struct World {
    datastore: Arc<Datastore>,
    jobs: Arc<Jobs>,
    time: Arc<AtomicU64>,
    scheduler: ScrubScheduler,
}

impl World {
    fn open(path: &Path, time: u64) -> Self {
        let datastore = Datastore::open(path, OPEN_OPTIONS).unwrap();
        let time = Arc::new(AtomicU64::new(time));
        let clock = Arc::clone(&time);
        datastore.set_scrub_clock(move || clock.load(Ordering::SeqCst));
        let jobs = Arc::new(Jobs::new().unwrap());
        let service = Service {
            clients: Arc::new(Clients::of_record(Arc::clone(datastore.directory()))),
            datastore: Arc::clone(&datastore),
            location: path.into(),
            served: None,
            jobs: Some(Arc::clone(&jobs)),
        };
        Self { scheduler: ScrubScheduler::start(service).unwrap(), datastore, jobs, time }
    }

    fn set(&self, time: u64) {
        self.time.store(time, Ordering::SeqCst);
        self.scheduler.wake();
    }

    /// The scrubs that were started, once all have ended.
    fn ended(&self) -> Vec<JobInfo> {
        let scrubs = || self.jobs.list().into_iter().filter(|job| job.kind == "scrub").collect::<Vec<_>>();
        until("all scrubs have ended", || scrubs().iter().all(|job| job.ended.is_some()));
        scrubs()
    }

    fn close(mut self) {
        self.scheduler.stop();
        self.jobs.stop();
        drop(self.scheduler);
        self.datastore.close().unwrap();
    }
}

fn made() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Datastore::init(&path, InitOptions { journal_size: 4 << 20 }).unwrap();
    (folder, path)
}

#[test]
fn a_scrub_starts_at_each_interval() {
    let (_folder, path) = made();
    let world = World::open(&path, 5000);
    let summary = world.datastore.schedule_scrubs(Some(EVERY), Some(0)).unwrap();
    assert_eq!((summary.every, summary.due, summary.state), (Some(EVERY), Some(6000), ScrubState::Never));
    for (time, scrubs) in [(5999, 0), (6000, 1), (6100, 1), (6999, 1), (7000, 2), (9500, 3), (10_499, 3), (10_500, 4)] {
        world.set(time);
        until(&format!("{scrubs} scrubs at {time}"), || world.ended().len() >= scrubs);
        // The scheduler has time to read the clock and to start a scrub too many.
        std::thread::sleep(Duration::from_millis(20));
        let ended = world.ended();
        assert_eq!(ended.len(), scrubs, "at {time}: {ended:?}");
        assert!(ended.iter().all(|job| job.state == JobState::Done && job.background), "{ended:?}");
    }
    let summary = world.datastore.status().unwrap().scrub;
    assert_eq!((summary.state, summary.started, summary.due), (ScrubState::Done, Some(10_500), Some(11_500)));
    world.datastore.schedule_scrubs(None, None).unwrap();
    world.set(50_000);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(world.ended().len(), 4);
    world.close();
    // The schedule is stored with the datastore.
    let world = World::open(&path, 60_000);
    world.datastore.schedule_scrubs(Some(EVERY), Some(7)).unwrap();
    world.close();
    let world = World::open(&path, 60_999);
    let summary = world.datastore.status().unwrap().scrub;
    assert_eq!((summary.every, summary.rate, summary.due), (Some(EVERY), 7, Some(61_000)));
    let changed = world.datastore.schedule_scrubs(Some(EVERY + 1), None).unwrap();
    assert_eq!((changed.every, changed.rate, changed.due), (Some(EVERY + 1), 7, Some(62_000)));
    world.set(62_000);
    until("the scrub ends", || world.datastore.status().unwrap().scrub.state == ScrubState::Done);
    world.close();
    let error = {
        let datastore = Datastore::open(&path, OPEN_OPTIONS).unwrap();
        let error = datastore.schedule_scrubs(Some(0), None).unwrap_err();
        datastore.close().unwrap();
        error
    };
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn a_scrub_that_fails_is_tried_again_only_after_an_interval() {
    let (_folder, path) = made();
    let world = World::open(&path, 5000);
    world.datastore.schedule_scrubs(Some(EVERY), Some(0)).unwrap();
    // A scrub fails at its beginning, because its record cannot replace a folder.
    let record = path.join("scrub");
    std::fs::remove_file(&record).unwrap();
    std::fs::create_dir(&record).unwrap();
    let retry = 6000 + RETRY_INTERVAL;
    for (time, scrubs) in [(6000, 1), (6001, 1), (6002, 1), (retry - 1, 1), (retry, 2), (retry + 1, 2)] {
        world.set(time);
        until(&format!("{scrubs} scrubs at {time}"), || world.ended().len() >= scrubs);
        // The scheduler has time to read the clock and to start a scrub too many.
        std::thread::sleep(Duration::from_millis(50));
        let ended = world.ended();
        assert_eq!(ended.len(), scrubs, "at {time}: {ended:?}");
        assert!(ended.iter().all(|job| job.state == JobState::Failed), "{ended:?}");
    }
    std::fs::remove_dir(&record).unwrap();
    world.set(retry + RETRY_INTERVAL);
    until("the scrub ends", || world.datastore.status().unwrap().scrub.state == ScrubState::Done);
    world.close();
}

#[test]
fn an_interrupted_scrub_continues_and_a_cancelled_one_waits() {
    let (_folder, path) = made();
    let mut world = World::open(&path, 5000);
    let new = NewDisk::native(32 << 20, Provisioning::Thin);
    world.datastore.create_disk("vm", &new, &NoProgress).unwrap();
    let device = world.datastore.device("vm", false).unwrap();
    for at in 0..32u64 {
        let data = SharedSlice::copy_of(&vec![at as u8 + 1; 1 << 20]);
        device.write(at << 20, data, false).unwrap();
    }
    device.flush().unwrap();
    drop(device);
    let scrub = |world: &World, rate| {
        let datastore = Arc::clone(&world.datastore);
        let options = ScrubOptions { rate: Some(rate), restart: false };
        std::thread::spawn(move || datastore.scrub(options, &|damage| panic!("{damage:?}"), &NoProgress))
    };
    let state = |world: &World| world.datastore.status().unwrap().scrub;
    let running = scrub(&world, 4 << 20);
    // The data is read after the metadata.
    until("a part of the data is read", || {
        let ScrubSummary { done, total, .. } = state(&world);
        total > 0 && done + (29 << 20) > total
    });
    let error = world.datastore.scrub(ScrubOptions::default(), &|_| (), &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    // The server stops, and the next server continues the scrub.
    world.scheduler.stop();
    assert_eq!(running.join().unwrap().unwrap_err().kind(), ErrorKind::Interrupted);
    world.close();
    let world = World::open(&path, 5100);
    until("the scrub continues", || state(&world).state == ScrubState::Running);
    let before = state(&world).done;
    assert!(before > 1 << 20, "{before} bytes were read before");
    // A cancelled scrub is not continued by itself.
    assert_eq!(world.datastore.cancel_scrub().unwrap().state, ScrubState::Cancelled);
    assert_eq!(world.datastore.cancel_scrub().unwrap_err().kind(), ErrorKind::NotFound);
    world.close();
    let world = World::open(&path, 5100 + RETRY_INTERVAL);
    world.set(9_000_000);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((state(&world).state, world.ended().len()), (ScrubState::Cancelled, 0));
    let report = scrub(&world, 0).join().unwrap().unwrap();
    assert_eq!((report.summary.state, report.summary.damaged), (ScrubState::Done, 0));
    let last = report.last.unwrap();
    assert!(last.read > 32 << 20 && last.started == 5000, "{last:?}");
    assert_eq!(last.blocks, 32 << 8, "the blocks that were read before are not read again: {last:?}");
    world.close();
}
