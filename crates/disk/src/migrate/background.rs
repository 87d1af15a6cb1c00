//! The background work of disks that are used before their content is in the datastore: live imports, and disks whose
//! content arrives from a source.
//!
//! 1. One thread at a time works on a disk, until the datastore is closed or the disk is deleted.
//! 2. An attempt that fails is repeated after a time that doubles, or at once when the disk's command is repeated. An
//!    attempt that was cancelled is not repeated before that.
//! 3. The process that serves the datastore decides how an attempt is shown ([`Datastore::run_attempts_by`]).

use super::import::{Overlay, Purpose};
use crate::datastore::Datastore;
use crate::foreign::deletions;
use crate::info::{DiskInfo, LiveProgress};
use error::{Error, ErrorKind, IoContext, Result};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use work::{NoProgress, Progress, Throttled};

/// How long failed background work waits before the next attempt: at first, and at most. And the interval at which it
/// checks during this time whether to stop or to begin at once.
const RETRY: Duration = Duration::from_secs(60);
const RETRY_MAX: Duration = Duration::from_secs(3600);
const LOOK: Duration = Duration::from_millis(100);

/// One attempt, which reports to the given progress.
pub type Attempt<'a> = &'a mut dyn FnMut(&dyn Progress) -> Result<()>;

/// Runs an attempt: gets the command that made the disk, the name of the disk, and the attempt.
pub type AttemptRunner = dyn Fn(&'static str, &str, Attempt<'_>) -> Result<()> + Send + Sync;

/// The background work of a datastore.
#[derive(Default)]
pub(crate) struct Imports {
    /// Whether the datastore is being closed, so that no further work begins.
    closed: AtomicBool,
    running: parking_lot::Mutex<Vec<Import>>,
    runner: OnceLock<Box<AttemptRunner>>,
    /// Overlays that are in use although their disks may not be in the list of disks.
    pub(super) kept: parking_lot::Mutex<BTreeSet<String>>,
    /// Locked while the place of a source is changed.
    pub(super) sources: parking_lot::Mutex<()>,
}

/// The background work of one disk.
struct Import {
    /// UUID of the disk. It identifies the disk: while the work waits for its next attempt, the disk may be renamed,
    /// and another disk may get the old name.
    uuid: String,
    shared: Background,
    thread: JoinHandle<()>,
}

/// What the work on a disk shares with the operations that end it.
#[derive(Clone, Default)]
pub(super) struct Background {
    /// Set when the disk is deleted or the datastore is closed.
    stop: Arc<AtomicBool>,
    /// Set when the next attempt should begin at once.
    hurry: Arc<AtomicBool>,
    /// The name of the disk during an attempt, which uses the disk exclusively.
    moving: Arc<parking_lot::Mutex<Option<String>>>,
    done: Arc<AtomicU64>,
    total: Arc<AtomicU64>,
    /// Why the last attempt has failed.
    failure: Arc<parking_lot::Mutex<Option<String>>>,
}

/// The progress of one attempt.
struct Watched<'a> {
    background: &'a Background,
    watch: &'a dyn Progress,
}

impl Progress for Watched<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.watch)
    }

    fn update(&self, done: u64, total: u64) {
        self.background.done.store(done, Ordering::Relaxed);
        self.background.total.store(total, Ordering::Relaxed);
        self.watch.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.background.is_stopped() || self.watch.cancelled()
    }
}

impl Background {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Waits before the next attempt; false if there is none.
    fn wait(&self, time: Duration) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < time && !self.hurry.swap(false, Ordering::SeqCst) {
            if self.is_stopped() {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        !self.is_stopped()
    }
}

impl Datastore {
    /// Sets the function that runs the attempts of background work, for example as jobs. Only the first call has an
    /// effect.
    pub fn run_attempts_by(
        &self,
        runner: impl Fn(&'static str, &str, Attempt<'_>) -> Result<()> + Send + Sync + 'static,
    ) {
        let _ = self.imports.runner.set(Box::new(runner));
    }

    /// Starts the background work of every disk whose content is not in the datastore yet. It runs until the datastore
    /// is closed. The process that serves the datastore calls this.
    pub fn start_imports(&self) {
        self.complete_deletions();
        let mut running = self.imports.running.lock();
        running.retain(|import| !import.thread.is_finished());
        for entry in self.foreign.entries() {
            let (name, uuid) = (entry.disk.name(), entry.disk.uuid());
            let overlay = match Overlay::of(&entry.disk.record()) {
                Ok(Some(overlay)) => overlay,
                Ok(None) => continue,
                Err(error) => {
                    tracing::error!("{error}");
                    continue;
                }
            };
            let known = running.iter().any(|import| import.uuid == uuid);
            if known || self.imports.closed.load(Ordering::SeqCst) {
                continue;
            }
            let Some(datastore) = self.this.upgrade() else { return };
            let (moving, shared) = (uuid.clone(), Background::default());
            let background = shared.clone();
            let thread = std::thread::Builder::new().name(format!("import {name}"));
            let begun = thread
                .spawn(move || datastore.move_in(&moving, &overlay, &background))
                .during(|| format!("starting to move disk '{name}'"));
            match begun {
                Ok(thread) => running.push(Import { uuid, shared, thread }),
                Err(error) => tracing::error!("{error}"),
            }
        }
    }

    /// Completes the deletions that the opening has left, each in a thread of its own: a source may not answer.
    fn complete_deletions(&self) {
        for (folder, record) in self.foreign.take_unreleased() {
            let datastore = self.this.clone();
            let work = move || -> Result<()> {
                deletions::release(&record)?;
                // Not held before, because nothing ends the wait for the source.
                match datastore.upgrade().filter(|datastore| !datastore.imports.closed.load(Ordering::SeqCst)) {
                    Some(datastore) => datastore.foreign.open_released(&folder),
                    None => Ok(()),
                }
            };
            let logged = move || {
                if let Err(error) = work() {
                    tracing::warn!("the deletion of a disk is completed by the next server: {error}");
                }
            };
            if let Err(error) = std::thread::Builder::new().name("deletion".into()).spawn(logged) {
                tracing::error!("starting to complete the deletion of a disk: {error}");
            }
        }
    }

    /// As [`Datastore::start_imports`]; if the work on the disk waits for its next attempt, that begins at once.
    pub fn hurry_import(&self, disk: &str) {
        self.start_imports();
        let uuid = self.uuid_of(disk).ok();
        let running = self.imports.running.lock();
        let of_disk = running.iter().filter(|import| import.is_of(disk, uuid.as_deref()));
        of_disk.for_each(|import| import.shared.hurry.store(true, Ordering::SeqCst));
    }

    /// Whether background work runs for a disk.
    pub fn has_import_running(&self, disk: &str) -> bool {
        let uuid = self.uuid_of(disk).ok();
        let running = self.imports.running.lock();
        running.iter().any(|import| import.is_of(disk, uuid.as_deref()) && !import.thread.is_finished())
    }

    /// The progress of the background work of a disk with an overlay.
    pub(crate) fn live_progress(&self, uuid: &str, overlay: &Overlay) -> LiveProgress {
        let running = self.imports.running.lock();
        let import = running.iter().find(|import| import.uuid == uuid);
        let number =
            |of: fn(&Background) -> &AtomicU64| import.map_or(0, |import| of(&import.shared).load(Ordering::Relaxed));
        LiveProgress {
            source: overlay.source().map(|source| source.title.clone()),
            done: number(|shared| &shared.done),
            total: number(|shared| &shared.total),
            running: import.is_some_and(|import| !import.thread.is_finished()),
            error: import.and_then(|import| import.shared.failure.lock().clone()),
        }
    }

    /// Ends the background work of a disk that is about to be deleted; false if none is running.
    pub(crate) fn end_import(&self, disk: &str) -> bool {
        let uuid = self.uuid_of(disk).ok();
        let mut running = self.imports.running.lock();
        let Some(at) = running.iter().position(|import| import.is_of(disk, uuid.as_deref())) else { return false };
        let import = running.remove(at);
        drop(running);
        import.end();
        true
    }

    fn move_in(&self, uuid: &str, overlay: &Overlay, background: &Background) {
        let mut retry = RETRY;
        while let Some(moved) = self.move_in_once(uuid, overlay, background) {
            match moved {
                Ok(info) => {
                    tracing::info!(disk = info.name, "the disk is in the datastore and no longer needs its source");
                    return;
                }
                Err(error) => {
                    *background.failure.lock() = Some(error.to_string());
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::NotFound) {
                        return;
                    }
                    tracing::warn!("moving a disk into the datastore failed and is tried again: {error}");
                }
            }
            if !background.wait(retry) {
                return;
            }
            retry = (2 * retry).min(RETRY_MAX);
        }
    }

    /// One attempt to make a disk with an overlay independent of its images or its source. `None` if the disk was
    /// deleted or does not need them any more.
    pub(super) fn move_in_once(
        &self,
        uuid: &str,
        overlay: &Overlay,
        background: &Background,
    ) -> Option<Result<DiskInfo>> {
        let entry = self.foreign.entries().into_iter().find(|entry| entry.disk.uuid() == uuid)?;
        self.overlay_of(&entry)?;
        let name = entry.disk.name();
        drop(entry);
        *background.moving.lock() = Some(name.clone());
        let mut info = None;
        let mut attempt = |watch: &dyn Progress| {
            let watched = Watched { background, watch };
            // Only an attempt has a share of the background rate, not the wait for the next attempt.
            let paced = self.background(&watched);
            let progress = Throttled { progress: &paced, rate: overlay.rate };
            info = Some(match &overlay.purpose {
                Purpose::Import(target) => self.migrate_import(&name, overlay, target, &progress)?,
                Purpose::Arrival(_) => self.arrive(&name, overlay, &progress)?,
            });
            Ok(())
        };
        let command = match &overlay.purpose {
            Purpose::Import(_) => "disk import --live",
            Purpose::Arrival(_) => "backup restore --live",
        };
        let moved = match self.imports.runner.get() {
            Some(run) => run(command, &name, &mut attempt),
            None => attempt(&NoProgress),
        };
        *background.moving.lock() = None;
        let missing = || Error::new(ErrorKind::Stopped, format!("no attempt was made to move disk '{name}'"));
        Some(moved.and_then(|()| info.ok_or_else(missing)))
    }

    /// Stops the background work of all disks.
    pub(crate) fn stop_imports(&self) {
        self.imports.closed.store(true, Ordering::SeqCst);
        let running = std::mem::take(&mut *self.imports.running.lock());
        // The flag is set for all disks before the end of the first work is awaited, so that they end concurrently.
        running.iter().for_each(|import| import.shared.stop.store(true, Ordering::SeqCst));
        running.into_iter().for_each(Import::end);
    }
}

impl Import {
    /// Whether this is the work on the disk with that name and UUID. At the end of an attempt, the disk may have a new
    /// UUID.
    fn is_of(&self, disk: &str, uuid: Option<&str>) -> bool {
        uuid == Some(self.uuid.as_str()) || self.shared.moving.lock().as_deref() == Some(disk)
    }

    fn end(self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        let is_own = self.thread.thread().id() == std::thread::current().id();
        if !is_own && self.thread.join().is_err() {
            tracing::error!(uuid = self.uuid, "the thread that moved the disk into the datastore has panicked");
        }
    }
}
