//! One schedule: opens a prepared store, runs threads on it, cuts the power, and compares the content afterwards. A
//! seed determines all of it.

use crate::client::{Client, Habit, Share};
use crate::control::Control;
use crate::model::SECTORS;
use crate::reduction::Reduction;
use crate::scheduler::Chooser;
use crate::store::{Base, Checked, DISKS, End, Statistics, Store, count, options};
use crate::verify::{after_close, after_cut};
use backend::IoMode;
use backend::simulated::{Pace, Request, SimulatedOptions};
use scheduled_store::Engine;
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use testkit::Random;

/// Scheduling steps after which a schedule counts as endless.
const STEPS_MAX: usize = 2_000_000;
/// Stack of a thread.
const STACK: usize = 512 << 10;
/// The most operations of a client.
const OPERATIONS_MAX: u64 = 9;
/// Blocks of a disk that hot schedules write, in addition to the run for large writes.
const HOT_BLOCKS: usize = 3;
/// The number of requests to the medium before the power cut has at most this many bits.
const CUT_BITS: u32 = 8;
/// The percentage of schedules with a slow medium.
const SLOW_PERCENT: u64 = 25;
/// The percentage of schedules that compress and deduplicate.
const REDUCTION_PERCENT: u64 = 35;
/// The number of steps of other threads during a flush of a slow medium has at most this many bits.
const SLOW_SYNC_BITS: u32 = 6;
/// The most steps of other threads during any other request to a slow medium.
const SLOW_REQUEST_MAX: u64 = 4;

/// Runs `body` under the scheduler of `seed`. Returns its violation, or the message of its panic.
fn scheduled(
    seed: u64,
    statistics: &Statistics,
    body: impl Fn() -> Result<(), String> + Send + Sync + 'static,
) -> Result<(), String> {
    let mut config = Config::new();
    config.stack_size = STACK;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
    config.silence_warnings = true;
    let chooser = Chooser::new(seed, Arc::clone(&statistics.steps));
    let outcome = Arc::new(Mutex::new(Ok(())));
    let result = Arc::clone(&outcome);
    let run = catch_unwind(AssertUnwindSafe(|| {
        Runner::new(chooser, config).run(move || {
            let found = body();
            *result.lock().expect("held only to pass on the result") = found;
        })
    }));
    if let Err(panic) = run {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        return Err(format!("panic: {}", text.unwrap_or_default()));
    }
    std::mem::replace(&mut *outcome.lock().expect("held only to pass on the result"), Ok(()))
}

/// Prepares a store.
pub fn base(number: usize, statistics: &Statistics) -> Result<Base, String> {
    let made = Arc::new(Mutex::new(None));
    let out = Arc::clone(&made);
    scheduled(0, statistics, move || {
        let base = Base::new(number).map_err(|error| format!("making base {number}: {error}"))?;
        *out.lock().expect("held only to pass on the result") = Some(base);
        Ok(())
    })?;
    let base = made.lock().expect("held only to pass on the result").take();
    base.ok_or_else(|| "no base was made".into())
}

/// Runs the schedule of a seed.
pub fn run(seed: u64, bases: &Arc<Vec<Base>>, statistics: &Arc<Statistics>) -> Result<(), String> {
    let (bases, counted) = (Arc::clone(bases), Arc::clone(statistics));
    scheduled(seed, statistics, move || body(Random(!seed), &bases, &counted))
}

fn body(mut random: Random, bases: &[Base], statistics: &Arc<Statistics>) -> Result<(), String> {
    let base = random.pick(bases);
    let medium = SimulatedOptions {
        reorder: random.percent(50),
        unflushed_max: *random.pick(&[8, 64, 4096]),
        ..SimulatedOptions::default()
    };
    let disk = base.disk.copy_of_durable(random.next(), medium);
    let habit = *random.pick(&[Habit::Mixed, Habit::Mixed, Habit::Hot, Habit::Large, Habit::Large]);
    let mut options = options(&mut random);
    if habit == Habit::Large {
        options.mode = IoMode::Buffered;
    }
    let engine = Engine::open(disk.directory(), options).map_err(|error| format!("opening: {error}"))?;
    if random.percent(75) {
        disk.cut_changes_after(disk.operations() + scaled(&mut random, CUT_BITS));
    }
    if random.percent(SLOW_PERCENT) {
        disk.set_pace(slow(&mut random));
    }
    let reduces = random.percent(REDUCTION_PERCENT);
    let store = Arc::new(Store::new(engine, disk, base.model.clone(), Arc::clone(statistics), reduces));

    let mut outcome = work(&store, &mut random, habit, reduces);
    let closes = outcome.is_ok() && !store.disk.is_off() && random.percent(20);
    if outcome.is_ok() && closes && random.percent(50) {
        outcome = store.check();
    }
    count_cut(&store);
    store.note(|| format!("ends, {options:?}, power is off: {}", store.disk.is_off()));
    if !closes {
        store.disk.cut_changes_after(store.disk.operations());
    }
    let closed = store.engine.close();
    if closes && !store.disk.is_off() {
        closed.map_err(|error| format!("closing: {error}"))?;
    }
    statistics.checkpoints.fetch_add(store.engine.counters.checkpoints.load(Ordering::Relaxed), Ordering::Relaxed);
    let damaged = if store.disk.is_off() { 0 } else { store.engine.counters.checksum_errors.load(Ordering::Relaxed) };
    let (disk, model) = (store.disk.clone(), store.model().clone());
    drop(store);
    if let Err(End::Violation(violation)) = outcome {
        return Err(violation);
    }
    if damaged > 0 {
        return Err(format!("{damaged} blocks failed their checksums"));
    }
    if closes && !disk.is_off() {
        return after_close(disk, model, options);
    }
    after_cut(disk, model, options, &mut random, statistics)
}

/// A random number below `1 << bits`. The number of bits is uniform, so small numbers are as likely as large ones.
pub fn scaled(random: &mut Random, bits: u32) -> u64 {
    let bits = random.below(u64::from(bits) + 1);
    random.below(1 << bits)
}

/// A slow medium: other threads run while a request is under way.
fn slow(random: &mut Random) -> Pace {
    let (sync, other) = (scaled(random, SLOW_SYNC_BITS), random.below(SLOW_REQUEST_MAX));
    Arc::new(move |request| {
        for _ in 0..if request == Request::Sync { sync } else { other } {
            shuttle::thread::yield_now();
        }
    })
}

fn count_cut(store: &Store) {
    if store.disk.is_off() {
        count(&store.statistics.cuts);
    }
}

/// Starts the threads, and waits for them.
fn work(store: &Arc<Store>, random: &mut Random, habit: Habit, reduces: bool) -> Checked {
    let clients = 1 + random.below(3) as usize;
    let mut threads = Vec::new();
    for shares in shares(clients, random, habit) {
        let most = if habit == Habit::Mixed { OPERATIONS_MAX } else { 2 * OPERATIONS_MAX };
        let operations = 1 + random.below(most);
        let client = Client { store: Arc::clone(store), shares, random: random.fork(), operations, habit };
        threads.push(shuttle::thread::spawn(move || client.run()));
    }
    if random.percent(if habit == Habit::Mixed { 85 } else { 30 }) {
        let operations = 1 + random.below(4);
        let control = Control { store: Arc::clone(store), random: random.fork(), operations, names: 0 };
        threads.push(shuttle::thread::spawn(move || control.run()));
    }
    if random.percent(if habit == Habit::Mixed { 25 } else { 80 }) {
        let (store, random) = (Arc::clone(store), random.fork());
        threads.push(shuttle::thread::spawn(move || upkeep(&store, random, habit)));
    }
    if reduces {
        let operations = 1 + random.below(5);
        let reduction = Reduction { store: Arc::clone(store), random: random.fork(), operations };
        threads.push(shuttle::thread::spawn(move || reduction.run()));
    }
    let mut outcome = Ok(());
    for thread in threads {
        // If a thread panics, `scheduled` ends the whole schedule.
        let Ok(end) = thread.join() else { continue };
        match (end, &outcome) {
            (Err(End::Violation(violation)), _) => outcome = Err(End::Violation(violation)),
            (Err(End::Off), Ok(())) => outcome = Err(End::Off),
            _ => {}
        }
    }
    outcome
}

/// The background work of a server while its clients run.
fn upkeep(store: &Store, mut random: Random, habit: Habit) -> Checked {
    let most = if habit == Habit::Mixed { 3 } else { 8 };
    for _ in 0..1 + random.below(most) {
        let engine = &store.engine;
        match random.below(if habit == Habit::Large { 2 } else { 4 }) {
            0 => engine.checkpoint().map_err(|error| store.judge(error, "checkpoint"))?,
            2 => engine.reclaim().map(drop).map_err(|error| store.judge(error, "giving space back"))?,
            1 => store.flush()?,
            _ => store.check()?,
        }
    }
    Ok(())
}

/// The sectors that each client writes: blocks of one client, blocks that two clients share by sectors, and a run for
/// large writes.
fn shares(clients: usize, random: &mut Random, habit: Habit) -> Vec<Vec<Share>> {
    let mut shares = vec![Vec::new(); clients];
    for (disk, blocks) in DISKS {
        let large_only = habit == Habit::Large;
        if large_only && blocks <= 32 {
            continue;
        }
        let mut runs: Vec<Vec<Range<usize>>> = vec![Vec::new(); clients];
        let mut give = |client: usize, sectors: Range<usize>| match runs[client].last_mut() {
            Some(last) if last.end == sectors.start => last.end = sectors.end,
            _ => runs[client].push(sectors),
        };
        let large = if blocks > 32 && (large_only || random.percent(70)) { blocks as usize - 4 } else { 0 };
        let mut owner = random.below(clients as u64) as usize;
        give(owner, 0..large * SECTORS);
        // A hot schedule writes only a few blocks.
        let end = if habit == Habit::Hot { large + HOT_BLOCKS } else { blocks as usize };
        for block in large..end {
            let sectors = block * SECTORS..(block + 1) * SECTORS;
            let next = random.below(clients as u64) as usize;
            if random.percent(30) {
                let middle = sectors.start + 1 + random.below(SECTORS as u64 - 1) as usize;
                give(owner, sectors.start..middle);
                give(next, middle..sectors.end);
            } else {
                give(owner, sectors);
            }
            if random.percent(40) {
                owner = next;
            }
        }
        for (share, mut runs) in shares.iter_mut().zip(runs) {
            runs.retain(|run| !run.is_empty());
            if !runs.is_empty() {
                share.push(Share { disk: disk.into(), runs });
            }
        }
    }
    shares.retain(|share| !share.is_empty());
    shares
}
