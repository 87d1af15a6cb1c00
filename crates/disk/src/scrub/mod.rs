//! Scrubs: reading all metadata and data of a datastore beside its clients, at a limited rate, to find damage before it
//! is needed ([0038](../../../../docs/adr/0038-scrub.md)).
//!
//! ```text
//! native store            all metadata pages, then all data blocks, in the order of their places
//! images                  the tables of the disks in VMware's formats, disk by disk
//! ```
//!
//! Invariants:
//! 1. One scrub of a datastore runs at a time. Its position is in the record ([`record`]), so that a cancelled scrub,
//!    and one that ended with its process, continue from there.
//! 2. The record lists damage until the damage is gone: the place has new content, no disk or snapshot refers to it any
//!    more, or it is valid when it is read again.
//! 3. A record of a later version is never replaced.
//!
//! Locks: `state` is held while the state in memory is read or changed, and never during I/O on the disks. `writing` is
//! held while the record is written, so that an older record never replaces a newer one.

mod images;
mod record;
mod report;

pub use record::ScrubResult;
pub use report::{DamageReference, ScrubDamage, ScrubReport, ScrubState, ScrubSummary, ScrubTouched};

use crate::Datastore;
use crate::spare::Spare;
use backend::{BLOCK_SIZE, Directory, clock};
use error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use record::{DamageRecord, ScrubRecord, ScrubRun, ScrubSchedule};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use store::engine::{DamagedPlace, NODES_PER_QUESTION, Scrubber};
use work::{Progress, Throttle, Throttled};

/// How often the position of a running scrub is stored.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
/// How often a running scrub searches for the disks that refer to new damage.
const LOCATE_INTERVAL: Duration = Duration::from_secs(60);
/// Bytes of nodes that a search for owners reads between two checks of its rate.
const WALKED: u64 = NODES_PER_QUESTION * BLOCK_SIZE as u64;
/// Most damaged places that a status reads again.
const STATUS_READS_MAX: usize = 256;
/// How long a status may read them: a failing medium may need seconds for each. Servers show a status when they start.
const STATUS_TIME_MAX: Duration = Duration::from_secs(1);
/// How long a cancellation waits for the end of the scrub.
const CANCEL_PATIENCE: Duration = Duration::from_secs(5);
/// The shortest interval of a schedule, in seconds.
const EVERY_MIN: u64 = 1;
/// The longest interval of a schedule: ten years.
const EVERY_MAX: u64 = 10 * 366 * 86_400;

/// Options of a scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubOptions {
    /// Bytes per second; 0 for no limit. `None` for the rate of an interrupted scrub, or else of the schedule.
    pub rate: Option<u64>,
    /// Whether to begin again instead of continuing an interrupted scrub.
    pub restart: bool,
}

/// A scrub that is running.
#[derive(Default)]
struct Running {
    /// Whether the scrub has to end, and is continued only on request.
    cancelled: AtomicBool,
    done: AtomicU64,
    total: AtomicU64,
}

#[derive(Default)]
struct ScrubsState {
    record: ScrubRecord,
    running: Option<Arc<Running>>,
}

/// The scrubs of a datastore.
#[derive(Default)]
pub(crate) struct Scrubs {
    state: Mutex<ScrubsState>,
    ended: Condvar,
    writing: Mutex<()>,
    /// Why the record is not used and must not be replaced.
    refused: OnceLock<String>,
    /// Whether the server is stopping: then scrubs end, and the next server continues them.
    suspended: AtomicBool,
    /// Called after the schedule was changed, and after a scrub has ended: then the next one may be due.
    rescheduled: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// The clock, in seconds since 1970; that of the system if it is not set.
    clock: OnceLock<Box<dyn Fn() -> u64 + Send + Sync>>,
}

/// Ends a scrub when this value is dropped.
struct Ending<'a>(&'a Scrubs);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.state.lock().running = None;
        self.0.ended.notify_all();
        self.0.report_schedule();
    }
}

impl Scrubs {
    /// Reads the record of a datastore that is being opened.
    pub fn open(directory: &dyn Directory) -> Self {
        let scrubs = Self::default();
        match ScrubRecord::read(directory) {
            Ok(record) => scrubs.state.lock().record = record,
            Err(error) if error.kind() == ErrorKind::Corrupt => tracing::warn!(
                %error,
                "the schedule, the position and the results of scrubs are lost: set the schedule again with \
                 'lamina scrub --every'"
            ),
            Err(error) => {
                tracing::warn!(%error, "no scrub can run");
                let _ = scrubs.refused.set(error.to_string());
            }
        }
        scrubs
    }

    fn now(&self) -> u64 {
        self.clock.get().map_or_else(clock::seconds, |clock| clock())
    }

    fn check_usable(&self) -> Result<()> {
        match self.refused.get() {
            Some(why) => Err(Error::new(ErrorKind::Unsupported, format!("no scrub can run: {why}"))),
            None => Ok(()),
        }
    }

    /// Registers the only running scrub.
    fn begin(&self) -> Result<(Arc<Running>, Ending<'_>)> {
        self.check_usable()?;
        if self.suspended.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Busy, "the server of this datastore is stopping: try again"));
        }
        let mut state = self.state.lock();
        if state.running.is_some() {
            let text = "a scrub of this datastore is running already: 'lamina scrub status' shows it, 'lamina scrub \
                        cancel' stops it";
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let running = Arc::<Running>::default();
        state.running = Some(Arc::clone(&running));
        Ok((running, Ending(self)))
    }

    fn report_schedule(&self) {
        if let Some(rescheduled) = self.rescheduled.get() {
            rescheduled();
        }
    }

    /// Changes the record in memory.
    fn change<T>(&self, change: impl FnOnce(&mut ScrubRecord) -> T) -> T {
        change(&mut self.state.lock().record)
    }

    /// Writes the record.
    fn save(&self, directory: &dyn Directory) -> Result<()> {
        self.check_usable()?;
        let _writing = self.writing.lock();
        let record = self.state.lock().record.clone();
        record.write(directory)
    }

    /// Writes the record for an action of the owner. On a full file system, the space that the datastore reserves for
    /// its owner is used.
    fn save_action(&self, directory: &Arc<dyn Directory>) -> Result<()> {
        Spare::of(Arc::clone(directory)).lend(|| self.save(&**directory))
    }
}

/// The progress of a running scrub. Other requests can end the scrub.
struct Watched<'a> {
    progress: &'a dyn Progress,
    running: &'a Running,
    scrubs: &'a Scrubs,
}

impl Watched<'_> {
    /// Why the scrub has to end now; `None` if it continues.
    fn end(&self) -> Option<End> {
        if self.scrubs.suspended.load(Ordering::Relaxed) {
            return Some(End::Suspended);
        }
        let cancelled = self.running.cancelled.load(Ordering::Relaxed) || self.progress.cancelled();
        cancelled.then_some(End::Cancelled)
    }
}

impl Progress for Watched<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.progress)
    }

    fn update(&self, done: u64, total: u64) {
        self.running.done.store(done, Ordering::Relaxed);
        self.running.total.store(total, Ordering::Relaxed);
        self.progress.update(done, total);
    }

    fn cancelled(&self) -> bool {
        self.end().is_some()
    }
}

/// How a scrub ended.
enum End {
    Whole,
    /// The scrub ended on request, and is not continued by itself.
    Cancelled,
    /// The scrub ended with its server, and the next server continues it.
    Suspended,
}

/// What a running scrub needs.
struct Work<'a> {
    datastore: &'a Datastore,
    watched: &'a Watched<'a>,
    throttle: Throttle<Throttled<'a>>,
    tell: &'a dyn Fn(&[ScrubDamage]),
    /// Places whose references are not known yet.
    unlocated: Vec<DamagedPlace>,
    located: Option<Instant>,
    saved: Instant,
}

impl Work<'_> {
    fn scrubs(&self) -> &Scrubs {
        &self.datastore.scrubs
    }

    /// Why the scrub has to end now; `None` if it continues.
    fn end(&self) -> Option<End> {
        self.watched.end()
    }

    /// Updates the state of the run.
    fn advance(&self, change: impl FnOnce(&mut ScrubRecord, &mut ScrubRun)) {
        self.scrubs().change(|record| {
            if let Some(mut run) = record.run.take() {
                change(record, &mut run);
                run.result.ended = self.scrubs().now();
                record.run = Some(run);
            }
        });
    }

    /// Reads the native store.
    fn read_store(&mut self, scrubber: &Scrubber<'_>) -> Result<End> {
        let run = self.scrubs().change(|record| record.run.clone());
        let mut position = run.as_ref().and_then(ScrubRun::position);
        let mut done = run.map_or(0, |run| run.result.read);
        let mut total = done.max(scrubber.total());
        while let Some(at) = position {
            if let Some(end) = self.end() {
                return Ok(end);
            }
            let step = scrubber.step(at)?;
            position = step.next;
            done += step.read;
            total = total.max(done);
            let now = self.scrubs().now();
            let restored = step.damage.iter().filter(|damage| damage.repaired.is_some()).count() as u64;
            self.unlocated.extend(step.damage.iter().map(|damage| damage.place));
            self.advance(|record, run| {
                run.set_position(position);
                run.result.read = done;
                run.result.pages += step.pages;
                run.result.blocks += step.blocks;
                run.result.found += step.damage.len() as u64;
                run.result.repaired += restored;
                for damage in step.damage {
                    record.add(DamageRecord::of_place(damage.place, damage.problem, damage.repaired, now));
                }
            });
            let overdue = self.located.is_none_or(|time| time.elapsed() >= LOCATE_INTERVAL);
            if !self.unlocated.is_empty() && overdue {
                self.locate()?;
            }
            if self.saved.elapsed() >= SAVE_INTERVAL {
                self.save();
            }
            // A cancellation is checked at the beginning of the next round.
            let _ = self.throttle.step(done, total, step.read);
        }
        self.locate()?;
        Ok(End::Whole)
    }

    /// Writes the record. If that fails, the scrub goes on: only its position and the list after a crash are older.
    fn save(&mut self) {
        self.saved = Instant::now();
        if let Err(error) = self.scrubs().save(&**self.datastore.directory()) {
            tracing::warn!(%error, "the state of the running scrub is not stored");
        }
    }

    /// Finds which disks and snapshots refer to new damage, and reports it.
    fn locate(&mut self) -> Result<()> {
        if self.unlocated.is_empty() {
            return Ok(());
        }
        let places = std::mem::take(&mut self.unlocated);
        let located = self.datastore.locate(places.clone(), &|| self.throttle.wait(WALKED) && self.end().is_none());
        match located {
            Ok(_) => {}
            // The caller checks whether the scrub has ended. The places stay in the list, and are located when the
            // list is shown.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        self.located = Some(Instant::now());
        self.tell_of(&places);
        self.save();
        Ok(())
    }

    /// Reports new damage of these places.
    fn tell_of(&self, places: &[DamagedPlace]) {
        let places: BTreeSet<DamagedPlace> = places.iter().copied().collect();
        let of_these = |damage: &&DamageRecord| damage.place().is_some_and(|place| places.contains(&place));
        let damage = self.scrubs().change(|record| record.damage.iter().filter(of_these).cloned().collect::<Vec<_>>());
        if !damage.is_empty() {
            (self.tell)(&self.datastore.damage_reports(&damage));
        }
    }
}

impl Datastore {
    /// Scrubs the datastore: begins, or continues an interrupted scrub. `tell` is called with new damage.
    ///
    /// # Errors
    /// `Busy` if a scrub is running. `Interrupted` if the scrub was cancelled: the next one continues it.
    pub fn scrub(
        &self,
        options: ScrubOptions,
        tell: &dyn Fn(&[ScrubDamage]),
        progress: &dyn Progress,
    ) -> Result<ScrubReport> {
        let (running, ending) = self.scrubs.begin()?;
        let before = self.scrubs.change(|record| record.clone());
        let rate = self.begin_run(options);
        // A scrub that could not begin is not continued by the next server.
        self.scrubs.save_action(self.directory()).inspect_err(|_| {
            self.scrubs.change(|record| {
                (record.run, record.damage, record.unlisted) = (before.run, before.damage, before.unlisted);
            });
        })?;
        let watched = Watched { progress, running: &running, scrubs: &self.scrubs };
        let mut work = Work {
            datastore: self,
            watched: &watched,
            throttle: Throttle::new(Throttled { progress: &watched, rate }),
            tell,
            unlocated: Vec::new(),
            located: None,
            saved: Instant::now(),
        };
        let outcome = self.run_scrub(&mut work);
        let cancelled = matches!(outcome, Ok(End::Cancelled));
        if cancelled {
            work.advance(|_, run| run.cancelled = Some(self.scrubs.now()));
        }
        let unlocated = std::mem::take(&mut work.unlocated);
        work.tell_of(&unlocated);
        let saved = self.scrubs.save_action(self.directory());
        drop(ending);
        match outcome? {
            End::Whole => {}
            End::Cancelled => {
                saved?;
                let text = "the scrub was stopped; 'lamina scrub start' continues it";
                return Err(Error::new(ErrorKind::Interrupted, text));
            }
            End::Suspended => {
                saved?;
                let text = "the scrub was stopped with its server; the next server continues it";
                return Err(Error::new(ErrorKind::Interrupted, text));
            }
        }
        saved?;
        self.scrub_report(progress)
    }

    fn run_scrub(&self, work: &mut Work<'_>) -> Result<End> {
        let scrubber = self.native.engine.scrubber();
        self.forget_gone(&scrubber, usize::MAX, Duration::MAX)?;
        match work.read_store(&scrubber)? {
            End::Whole => {}
            end => return Ok(end),
        }
        match self.scrub_images(work)? {
            End::Whole => {}
            end => return Ok(end),
        }
        // Restored pages are written by this checkpoint, so that what was found is not found again.
        self.native.engine.checkpoint()?;
        self.scrubs.change(|record| {
            if let Some(run) = record.run.take() {
                record.last = Some(ScrubResult { ended: self.scrubs.now(), ..run.result });
            }
        });
        Ok(End::Whole)
    }

    /// Sets the run in the record. Returns its rate.
    fn begin_run(&self, options: ScrubOptions) -> u64 {
        self.scrubs.change(|record| {
            let planned = record.schedule.as_ref().map_or(0, |schedule| schedule.rate);
            let run = match record.run.take() {
                Some(run) if !options.restart => {
                    let rate = options.rate.unwrap_or(run.rate);
                    ScrubRun { cancelled: None, rate, ..run }
                }
                _ => {
                    // Places that earlier scrubs restored are removed from the list.
                    record.damage.retain(DamageRecord::is_open);
                    record.unlisted = 0;
                    ScrubRun::new(self.scrubs.now(), options.rate.unwrap_or(planned))
                }
            };
            record.run.insert(run).rate
        })
    }

    /// Finds which disks and snapshots refer to damaged places, and updates the list. Returns the number of places for
    /// each disk and snapshot, by id.
    fn locate(&self, mut places: Vec<DamagedPlace>, go_on: &dyn Fn() -> bool) -> Result<BTreeMap<u64, u64>> {
        places.sort_unstable();
        places.dedup();
        if places.is_empty() {
            return Ok(BTreeMap::new());
        }
        let located = self.native.engine.locate_damage(&places, go_on)?;
        // Damage whose references may be in a lost part of a map stays in the list as it is.
        let is_known = |(_, references): &(_, Vec<_>)| located.is_whole || !references.is_empty();
        let by_place = places.into_iter().zip(located.references).filter(is_known).collect();
        self.scrubs.change(|record| record.set_references(&by_place));
        Ok(located.objects)
    }

    /// Removes damage from the list that does not exist any more, of the first `most` entries, as far as they can be
    /// read in this time. Returns whether the list has changed.
    fn forget_gone(&self, scrubber: &Scrubber<'_>, most: usize, within: Duration) -> Result<bool> {
        let began = Instant::now();
        let listed: Vec<(DamagedPlace, u64)> = self.scrubs.change(|record| {
            let open = record.damage.iter().filter(|damage| damage.is_open());
            open.filter_map(|damage| Some((damage.place()?, damage.found))).take(most).collect()
        });
        let mut gone = BTreeSet::new();
        for (place, found) in listed {
            if began.elapsed() >= within {
                break;
            }
            if !scrubber.is_still_damaged(place)? {
                gone.insert((place, found));
            }
        }
        let has = |name: &str| self.foreign.find(name).is_some();
        Ok(self.scrubs.change(|record| {
            let before = record.damage.len();
            record.damage.retain(|damage| match (damage.place(), &damage.disk) {
                (Some(place), _) => !damage.is_open() || !gone.contains(&(place, damage.found)),
                (None, Some(disk)) => has(disk),
                (None, None) => true,
            });
            record.damage.len() < before
        }))
    }

    /// Stops the running scrub, and waits a few seconds for its end. The next scrub continues it.
    ///
    /// # Errors
    /// `NotFound` if no scrub is running or interrupted.
    pub fn cancel_scrub(&self) -> Result<ScrubSummary> {
        self.scrubs.check_usable()?;
        {
            let mut guard = self.scrubs.state.lock();
            let state = &mut *guard;
            match (&state.running, &mut state.record.run) {
                (Some(running), _) => running.cancelled.store(true, Ordering::Relaxed),
                // A scrub that ended with its process is no longer continued by the next server.
                (None, Some(run)) if run.cancelled.is_none() => run.cancelled = Some(self.scrubs.now()),
                _ => {
                    let text = "no scrub is running: 'lamina scrub status' shows when the last one ended";
                    return Err(Error::new(ErrorKind::NotFound, text));
                }
            }
            let deadline = Instant::now() + CANCEL_PATIENCE;
            while guard.running.is_some() && !self.scrubs.ended.wait_until(&mut guard, deadline).timed_out() {}
        }
        self.scrubs.save_action(self.directory())?;
        Ok(self.summary())
    }

    /// Has servers scrub the datastore every `every` seconds, at a rate in bytes per second; 0 for no limit, and `None`
    /// for the rate of the present schedule. Without an interval they start no scrubs.
    pub fn schedule_scrubs(&self, every: Option<u64>, rate: Option<u64>) -> Result<ScrubSummary> {
        if let Some(every) = every
            && !(EVERY_MIN..=EVERY_MAX).contains(&every)
        {
            let text = format!("a scrub every {every} seconds is not possible: give an interval from 1s to 3660d");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        self.scrubs.check_usable()?;
        let since = self.scrubs.now();
        let before = self.scrubs.change(|record| {
            let before = record.schedule.clone();
            let rate = rate.unwrap_or_else(|| record.schedule.as_ref().map_or(0, |schedule| schedule.rate));
            record.schedule = every.map(|every| ScrubSchedule { every, rate, since });
            before
        });
        self.scrubs
            .save_action(self.directory())
            .inspect_err(|_| self.scrubs.change(|record| record.schedule = before))?;
        self.scrubs.report_schedule();
        Ok(self.summary())
    }

    /// Sets a function that is called after each change of the schedule, and after each scrub. Only the first call has
    /// an effect.
    pub fn on_scrub_schedule(&self, rescheduled: impl Fn() + Send + Sync + 'static) {
        let _ = self.scrubs.rescheduled.set(Box::new(rescheduled));
    }

    /// Replaces the clock of schedules and records, for tests that control the time. Only the first call has an effect.
    pub fn set_scrub_clock(&self, clock: impl Fn() -> u64 + Send + Sync + 'static) {
        let _ = self.scrubs.clock.set(Box::new(clock));
    }

    /// The time by which scrubs are due, in seconds since 1970.
    pub fn scrub_time(&self) -> u64 {
        self.scrubs.now()
    }

    /// When a server has to start a scrub, in seconds since 1970: 0 for an interrupted scrub. `None` if there is no
    /// interrupted scrub and no schedule, or while a scrub is running.
    pub fn scrub_due(&self) -> Option<u64> {
        let state = self.scrubs.state.lock();
        let usable = state.running.is_none() && self.scrubs.refused.get().is_none();
        if usable { state.record.due() } else { None }
    }

    /// Ends the running scrub because the server stops; the next server continues it. No further scrub begins.
    pub fn suspend_scrubs(&self) {
        self.scrubs.suspended.store(true, Ordering::Relaxed);
    }

    /// The state of scrubs, for a status. Reads a few listed places again.
    pub(crate) fn scrub_summary(&self) -> ScrubSummary {
        // If a place cannot be examined now, it stays in the list.
        let _ = self.forget_gone(&self.native.engine.scrubber(), STATUS_READS_MAX, STATUS_TIME_MAX);
        self.summary()
    }

    /// The state of scrubs and the list of damage. Reads every listed place again, and searches for the disks and
    /// snapshots that refer to them now.
    pub fn scrub_report(&self, progress: &dyn Progress) -> Result<ScrubReport> {
        self.scrubs.check_usable()?;
        let scrubber = self.native.engine.scrubber();
        let mut changed = self.forget_gone(&scrubber, usize::MAX, Duration::MAX)?;
        let places: Vec<DamagedPlace> = self.scrubs.change(|record| {
            let open = record.damage.iter().filter(|damage| damage.is_open());
            open.filter_map(DamageRecord::place).collect()
        });
        changed |= !places.is_empty();
        let throttle = Throttle::new(progress);
        let touched = match self.locate(places, &|| throttle.wait(WALKED) && !progress.cancelled()) {
            Ok(touched) => touched,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "the list of damage has the disks and snapshots of the last search");
                BTreeMap::new()
            }
        };
        // Only the list is lost if the record cannot be written, and it is computed again.
        if changed && let Err(error) = self.scrubs.save(&**self.directory()) {
            tracing::warn!(%error, "the list of damage is not stored");
        }
        Ok(self.report(&touched))
    }
}
