//! Background maintenance: write-back, commits after the commit interval, checkpoints, the dropping of deleted trees,
//! and the return of space to the file system.

use super::Engine;
use super::checkpoint::LOGGED_ROUND;
use super::read_again::ReadAgain;
use crate::journal::Operation;
use crate::sync::MutexGuard;
use crate::sync::time::Instant;
use crate::{IoContext, Result, is_lost};
use backend::{BLOCK_SIZE, IoMode};
use std::sync::Arc;
use std::time::Duration;

/// How often maintenance runs without a request.
const TICK: Duration = Duration::from_millis(100);
/// The journal gets a trailer when nothing was appended for this long.
const TRAILER_IDLE: Duration = Duration::from_millis(10);
/// How often the ownership of the datastore is checked while nothing is appended to the journal.
const OWNER_CHECK: Duration = Duration::from_secs(2);
/// How often buffer memory that was not needed since the last time is returned to the allocator.
const MEMORY_CHECK: Duration = Duration::from_secs(5);
/// The datastore counts as idle when nothing was written for this long. Nearly all free space is then punched.
const IDLE: Duration = Duration::from_millis(700);
/// When nothing was written for this long, even single blocks are punched. Each hole costs a journal entry of the file
/// system.
const LONG_IDLE: Duration = Duration::from_secs(4);
/// Freed blocks that are worth a commit of their own (64 MiB).
const FREEING_MAX: u64 = 16_384;
/// Steps of dropping a deleted tree while the metadata lock is held.
const DROP_STEPS: u32 = 1;
/// How often the metadata lock is taken to drop parts of trees before maintenance looks for other work.
const DROP_ROUNDS: usize = 256;
/// While clients write, punching uses the thread's time divided by this number, so that punching does not slow writes
/// down.
const BUSY_SHARE: u32 = 8;
/// How long a round searches for the unclaimed space that a crash left.
const SEARCH_ROUND: Duration = Duration::from_millis(20);
/// The shortest run that is punched while single blocks are not (64 KiB).
const PUNCH_RUN: u64 = 16;
/// Blocks punched per round in long runs: 256 MiB, and 16 MiB while clients write.
const PUNCH_BLOCKS: u64 = 1 << 16;
const PUNCH_BLOCKS_BUSY: u64 = 1 << 12;
/// Blocks punched per round in single blocks. Blocks cannot be allocated while they are being punched.
const PUNCH_SINGLES: u64 = 512;
/// Free backed blocks (blocks with space in the file system) that are not punched while the datastore is busy: the
/// number of used blocks divided by this number.
const SLACK_SHARE: u64 = 32;
/// The limits of the number of free backed blocks that are not punched.
const SLACK: std::ops::RangeInclusive<u64> = 256..=8192;
/// How long punching pauses after a failure, because the file system may always refuse it.
const PUNCH_RETRY: Duration = Duration::from_secs(10);
/// Free backed blocks that are not punched even when the datastore is idle (256 KiB).
const SLACK_IDLE: u64 = 64;

/// State that maintenance keeps between rounds.
pub(super) struct Watch {
    activity: u64,
    last_write: Instant,
    last_commit: Instant,
    region: u64,
    passes: Passes,
    /// Until when dropping and punching pause, so that writers get processor time and locks.
    rest: Instant,
    /// Until when punching pauses after a failure.
    punch_after: Instant,
    /// When [`Engine::load_unreadable`] is called next.
    read_again: ReadAgain,
}

impl Watch {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            activity: 0,
            last_write: now,
            last_commit: now,
            region: 0,
            passes: Passes::default(),
            rest: now,
            punch_after: now,
            read_again: ReadAgain::new(),
        }
    }
}

/// The first failure of the optional steps of a round. A failed step prevents neither another step nor the commit that
/// is due after the commit interval: otherwise a lasting failure would prevent the commit in every round.
struct Steps(Result<()>);

impl Steps {
    /// Notes the result of a step; `None` if it failed.
    fn note<T>(&mut self, step: Result<T>) -> Option<T> {
        let error = match step {
            Ok(done) => return Some(done),
            Err(error) => error,
        };
        if self.0.is_ok() {
            self.0 = Err(error);
        }
        None
    }
}

/// Whether, since the last write and the last freeing of blocks, a pass has found nothing to punch: among long runs,
/// and among single blocks.
#[derive(Clone, Copy, Default)]
struct Passes {
    runs: bool,
    singles: bool,
    /// Whether the present pass is for single blocks if clients write little: passes alternate then, so that free space
    /// between data in use is returned too.
    short: bool,
    /// Whether the present pass began at the first region, so that it covers all regions.
    whole: bool,
}

impl Passes {
    /// The shortest run to punch now. Long runs are punched first, because the cost of a hole hardly depends on its
    /// length.
    fn least(self, idle: Duration, calm: bool) -> u64 {
        let singles = if idle > LONG_IDLE { self.runs && !self.singles } else { calm && self.short };
        if singles { 1 } else { PUNCH_RUN }
    }

    /// Begins again after a write, or after the freeing of blocks.
    fn restart(&mut self) {
        *self = Self { short: self.short, ..Self::default() };
    }

    /// Notes that a pass begins or continues at `region`.
    fn goes_on(&mut self, region: u64) {
        self.whole |= region == 0;
    }

    /// Notes that a pass over runs of at least `least` blocks has reached the last region and found nothing. If it
    /// began at a later region than the first, another pass is necessary.
    fn end(&mut self, least: u64) {
        match least {
            _ if !std::mem::take(&mut self.whole) => {}
            1 => self.singles = true,
            _ => self.runs = true,
        }
    }
}

impl Engine {
    pub(super) fn start_threads(self: &Arc<Self>) -> Result<()> {
        for (name, body) in [
            ("lamina-writeback", Self::write_back_loop as fn(&Self)),
            ("lamina-maintain", Self::maintain_loop as fn(&Self)),
        ] {
            let engine = Arc::clone(self);
            let thread = crate::sync::thread::Builder::new()
                .name(name.into())
                .spawn(move || body(&engine))
                .during(|| format!("starting thread {name}"))?;
            self.running.add_thread(thread);
        }
        Ok(())
    }

    fn write_back_loop(&self) {
        let low = (self.options.write_buffer / BLOCK_SIZE) as u64 / 8;
        let mut clock = 0;
        let mut last_write = Instant::now();
        while self.running.goes_on() {
            self.running.next_write_back(TICK);
            let now = self.log.clocks.acknowledged();
            if now != clock {
                (clock, last_write) = (now, Instant::now());
            }
            let idle = last_write.elapsed() > IDLE / 2;
            while self.running.goes_on() && (idle || self.buffers.blocks() > low || self.buffers.is_sealing()) {
                match self.write_back_once() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        tracing::warn!(%error, "write-back failed and is tried again");
                        crate::sync::thread::sleep(TICK);
                        break;
                    }
                }
                if self.writeback.is_flush_waiting() {
                    crate::sync::thread::yield_now();
                }
            }
        }
    }

    fn maintain_loop(&self) {
        let mut watch = Watch::new();
        let mut owner_seen = Instant::now();
        let mut memory_seen = Instant::now();
        let mut last_round = Instant::now();
        // While the journal has no trailer: the journal head at the last check, and the time since which the head is
        // unchanged.
        let mut trailing = None;
        while self.running.goes_on() {
            if owner_seen.elapsed() > OWNER_CHECK {
                owner_seen = Instant::now();
                if self.check_owner().is_err() {
                    return;
                }
            }
            if memory_seen.elapsed() > MEMORY_CHECK {
                memory_seen = Instant::now();
                backend::release_idle();
            }
            let time = if trailing.is_some() { TRAILER_IDLE } else { TICK };
            let (trailer, extend, round) = self.running.next_upkeep(time, |work| {
                let trailer = std::mem::take(&mut work.trailer);
                // Writers request space many times a second, so this request alone starts no full round.
                let extend = std::mem::take(&mut work.extend) && !(work.commit || work.checkpoint);
                (trailer, extend, work.commit || work.checkpoint || work.reclaim)
            });
            if trailer {
                trailing = Some((self.log.head(), Instant::now()));
            }
            trailing = trailing.and_then(|(head, since)| self.trail_when_idle(head, since));
            let done = if extend {
                self.extend_ahead()
            } else if round || last_round.elapsed() >= TICK {
                last_round = Instant::now();
                self.maintain(&mut watch)
            } else {
                Ok(())
            };
            if let Err(error) = done {
                tracing::warn!(%error, "maintenance failed and is tried again");
                crate::sync::thread::sleep(TICK);
            }
        }
    }

    /// Writes a trailer when the journal head has been at `head` long enough. Returns the head and time to compare with
    /// next, if there is no trailer yet.
    fn trail_when_idle(&self, head: u64, since: Instant) -> Option<(u64, Instant)> {
        if self.log.head() != head {
            return Some((self.log.head(), Instant::now()));
        }
        if since.elapsed() < TRAILER_IDLE {
            return Some((head, since));
        }
        // `Err` means that the store has stopped: it writes no trailer.
        (!self.trail_journal().unwrap_or(true)).then(|| (head, Instant::now()))
    }

    pub(super) fn maintain(&self, watch: &mut Watch) -> Result<()> {
        let mut steps = Steps(Ok(()));
        let clock = self.log.clocks.acknowledged();
        // Bulk writers are not counted as acknowledged writes, only as writes to the data files.
        let activity = clock + self.log.clocks.home();
        let writes = activity - watch.activity;
        if writes > 0 {
            (watch.activity, watch.last_write) = (activity, Instant::now());
            watch.passes.restart();
        }
        let idle = watch.last_write.elapsed();
        let wanted = self.running.take_work(|work| {
            let taken = *work;
            (work.reclaim, work.commit, work.checkpoint) = (false, false, false);
            taken
        });
        let (logged, pending, freeing) = {
            let meta = self.meta.lock();
            (meta.logged.len(), meta.pending.len(), meta.freed.freeing())
        };
        let checkpoint_due = self.is_checkpoint_due();
        let logged_limit = (self.log.ring() / 8 / BLOCK_SIZE as u64).min(4096) as usize;
        if logged > 0 && (logged > logged_limit || idle > IDLE) {
            let mut left = logged - if idle > IDLE { 0 } else { logged_limit / 2 };
            while left > 0 && self.running.goes_on() {
                let written = steps.note(self.write_logged(LOGGED_ROUND)).unwrap_or(0);
                left = if written == 0 { 0 } else { left.saturating_sub(written) };
            }
        }
        let wants_checkpoint = wanted.checkpoint || checkpoint_due || (idle > LONG_IDLE && self.log.used() > 1 << 20);
        if wants_checkpoint && steps.note(self.checkpoint_if_needed()).is_some() {
            watch.last_commit = Instant::now();
        }
        if writes > 0 {
            steps.note(self.extend_ahead());
        }
        // A commit flushes the data files, which slows concurrent buffered writes, so it is made only for one of the
        // reasons below.
        let undurable = pending > 0 || !self.log.clocks.is_durable(clock);
        let since = watch.last_commit.elapsed();
        let interval = match self.options.mode {
            IoMode::Buffered => self.options.commit_interval * 3,
            IoMode::Direct => self.options.commit_interval,
        };
        let quiet = writes < 64 || idle > TICK;
        if wanted.commit
            || undurable && (since > interval || idle > IDLE / 2)
            || freeing > 0 && since > IDLE && (quiet || freeing > FREEING_MAX)
        {
            // When the datastore is idle, or after the time limit, buffered data is flushed too.
            let committed = if undurable && (since > interval || idle > IDLE / 2) {
                if !quiet {
                    self.files.write_out();
                }
                self.flush()
            } else {
                self.commit_pending(!quiet)
            };
            if steps.note(committed).is_some() {
                watch.last_commit = Instant::now();
            }
        }
        let losses = {
            let mut meta = self.meta.lock();
            meta.release_freed();
            meta.losses()
        };
        if watch.read_again.is_due(Instant::now(), losses) {
            let began = Instant::now();
            let unread = self.load_unreadable();
            watch.read_again.end(Instant::now(), began.elapsed(), unread);
        }
        if !quiet && Instant::now() < watch.rest {
            return steps.0;
        }
        let began = Instant::now();
        if !self.return_unclaimed_room(true, || began.elapsed() < SEARCH_ROUND && self.running.goes_on()) {
            self.request(|work| work.reclaim = true);
        }
        let more = steps.note(self.drop_trash(DROP_ROUNDS)).unwrap_or(false);
        if more || freeing > 0 {
            watch.passes.restart();
        }
        if more {
            self.request(|work| work.commit |= work.reclaim);
        }
        self.meta.lock().release_freed();
        steps.note(self.give_space_back(watch, idle, quiet));
        watch.rest = Instant::now() + began.elapsed() * (BUSY_SHARE - 1);
        steps.0
    }

    /// Reads the tables of unreadable regions and the trees of deleted objects again, so that a failure of the medium
    /// that has ended does not keep their blocks unused. Returns the number of regions and objects that still cannot be
    /// read, plus the number of runs with entries that the next round reads again.
    pub(super) fn load_unreadable(&self) -> usize {
        let (left, data, map) = {
            let meta = self.meta.lock();
            (meta.catalog.left().collect::<Vec<u64>>(), meta.data.unreadable(), meta.map.unreadable())
        };
        // The pages are read without the lock. If a read fails, the object is not dropped, or the region stays unused.
        for object in left {
            let operation = Operation::Drop { object, steps: DROP_STEPS };
            let readable = self.meta.look(|meta| meta.check_readable(&operation));
            if readable.is_ok() {
                self.meta.lock().catalog.take_left_again(object);
            }
        }
        for number in data {
            let _ = self.meta.look(|meta| {
                // While changes are being appended or retired, the blocks that they freed are not known here. Their
                // freeing is not durable, or reads may refer to them. `retain_freed` would leave them allocatable.
                if !meta.pending.is_appending() {
                    meta.data.load_again(&mut meta.pages, number)?;
                    meta.retain_freed();
                }
                Ok(())
            });
        }
        for number in map {
            let _ = self.meta.look(|meta| meta.map.load_again(&mut meta.pages, number));
        }
        let mut unpunched = self.reserves.lock_punching();
        let runs = unpunched.unreadable.len();
        unpunched.try_again();
        drop(unpunched);
        let meta = self.meta.lock();
        self.update_headroom(&meta);
        runs + meta.catalog.left().count() + meta.data.unreadable().len() + meta.map.unreadable().len()
    }

    /// Drops parts of deleted trees. True while parts are left.
    fn drop_trash(&self, rounds: usize) -> Result<bool> {
        for _ in 0..rounds {
            let Some(object) = self.with_catalog(|catalog| catalog.first_trash()) else { return Ok(false) };
            let operation = Operation::Drop { object, steps: DROP_STEPS };
            let _fetch = self.meta.bring_in(|meta| meta.survey_operation(&operation));
            let mut meta = self.meta.lock();
            // Another thread may have dropped the last part.
            if meta.catalog.first_trash() != Some(object) {
                continue;
            }
            match meta.check_readable(&operation) {
                Err(error) if is_lost(&error) => {
                    tracing::error!(%error, "a deleted disk or snapshot is damaged: the rest of it is not freed");
                    meta.catalog.leave_trash(object, &error);
                    continue;
                }
                other => other?,
            }
            let refused = self.try_carry_out(&mut meta, operation, 0)?;
            let full = self.is_commit_due(&meta) || meta.freed.freeing() > FREEING_MAX;
            MutexGuard::unlock_fair(meta);
            if let Some(cost) = refused {
                self.make_room(cost)?;
            }
            if full {
                self.commit_changes()?;
            }
        }
        Ok(true)
    }

    /// Drops parts of all deleted trees, and makes that durable. True while parts are left.
    pub(super) fn drop_all_trash(&self) -> Result<bool> {
        self.make_journal_room()?;
        let more = self.drop_trash(DROP_ROUNDS)?;
        self.commit_changes()?;
        Ok(more)
    }

    /// Punches free runs: long ones soon, single blocks when the datastore is idle.
    fn give_space_back(&self, watch: &mut Watch, idle: Duration, calm: bool) -> Result<()> {
        let least = watch.passes.least(idle, calm);
        let keep = if idle > IDLE {
            SLACK_IDLE
        } else {
            let meta = self.meta.lock();
            (meta.data.counts().used / SLACK_SHARE).clamp(*SLACK.start(), *SLACK.end())
        };
        let most = match calm {
            true if least < PUNCH_RUN => PUNCH_SINGLES,
            true => PUNCH_BLOCKS,
            false => PUNCH_BLOCKS_BUSY,
        };
        if Instant::now() < watch.punch_after {
            return Ok(());
        }
        let began = Instant::now();
        watch.passes.goes_on(watch.region);
        let punched = self.punch_free(&mut watch.region, least, keep, most);
        if punched.is_err() {
            watch.punch_after = Instant::now() + PUNCH_RETRY;
        }
        let mut given = punched?;
        let quiet = || self.log.clocks.activity() == watch.activity;
        while given > 0 && began.elapsed() < TICK && quiet() && self.running.goes_on() {
            given = self.punch_free(&mut watch.region, least, keep, most)?;
        }
        if watch.region == 0 {
            if given == 0 {
                watch.passes.end(least);
            }
            watch.passes.short = least > 1;
        }
        Ok(())
    }

    /// Does one round of all background work on the calling thread, for stores opened without threads. True while work
    /// may be left.
    pub fn pump(&self) -> Result<bool> {
        let mut more = self.write_back_once()?;
        more |= self.write_logged(LOGGED_ROUND)? > 0;
        more |= self.drop_trash(8)?;
        if self.is_checkpoint_due() {
            self.checkpoint()?;
        }
        self.meta.lock().release_freed();
        self.trail_journal()?;
        Ok(more)
    }

    /// Returns to the file system what was freed since the store was opened, unless `goes_on` is false. For a process
    /// that closes the store after one command: the threads of a store that stays open do the same.
    pub fn return_freed(&self, goes_on: &dyn Fn() -> bool) -> Result<()> {
        let any = {
            let meta = self.meta.lock();
            meta.freed.any() || meta.catalog.first_trash().is_some()
        };
        if any { self.reclaim_while(goes_on).map(drop) } else { Ok(()) }
    }

    /// Punches all free blocks, and returns their number. For stores opened without threads, and before measurements.
    pub fn reclaim(&self) -> Result<u64> {
        self.reclaim_while(&|| true)
    }

    fn reclaim_while(&self, goes_on: &dyn Fn() -> bool) -> Result<u64> {
        self.flush()?;
        while goes_on() && self.drop_trash(DROP_ROUNDS)? {}
        self.commit_changes()?;
        let mut given = 0;
        for (least, most) in [(PUNCH_RUN, PUNCH_BLOCKS), (1, PUNCH_SINGLES)] {
            let mut region = 0;
            while goes_on() {
                let from = region;
                let now = self.punch_free(&mut region, least, 0, most)?;
                given += now;
                if now == 0 && region <= from {
                    break;
                }
            }
        }
        Ok(given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_blocks_are_punched_when_no_long_run_is_left() {
        let mut passes = Passes::default();
        let long = LONG_IDLE + TICK;
        assert_eq!(passes.least(long, true), PUNCH_RUN, "long runs first, however long nothing was written");
        passes.goes_on(0);
        passes.end(PUNCH_RUN);
        assert_eq!((passes.least(IDLE, true), passes.least(long, true)), (PUNCH_RUN, 1));
        passes.goes_on(0);
        passes.end(1);
        assert_eq!(passes.least(long, true), PUNCH_RUN);
    }

    /// Otherwise a guest that writes something every second would keep the space of freed single blocks for ever.
    #[test]
    fn passes_over_long_runs_and_single_blocks_alternate_while_clients_write_little() {
        let mut passes = Passes::default();
        assert_eq!(passes.least(TICK, true), PUNCH_RUN);
        passes.short = true;
        passes.restart();
        assert_eq!((passes.least(TICK, true), passes.least(TICK, false)), (1, PUNCH_RUN));
    }

    /// Blocks may have been freed in earlier regions when the pass had passed them.
    #[test]
    fn a_pass_that_began_at_a_later_region_is_not_the_last_one() {
        let mut passes = Passes::default();
        let long = LONG_IDLE + TICK;
        passes.goes_on(8);
        passes.end(PUNCH_RUN);
        assert_eq!(passes.least(long, true), PUNCH_RUN);
        for region in [0, 8, 16] {
            passes.goes_on(region);
        }
        passes.end(PUNCH_RUN);
        assert_eq!(passes.least(long, true), 1);
    }
}
