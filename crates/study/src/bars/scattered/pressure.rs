//! Times of requests while scattered writes fill the smallest journal: the server then slows writers down and makes
//! checkpoints without a pause.
//!
//! The load rises in steps, up to as many writes as the server takes. During the load, three kinds of requests are sent
//! at fixed low rates: writes of a client that are buffered, discards of another client, and snapshots of a quiet disk.
//! These snapshots change the catalog and nothing else. The times of these requests may rise with the load, but no
//! request may suddenly be delayed for as long as a checkpoint takes.

use super::{CAPACITY, DEPTH, PROPERTY};
use crate::bars::load::Load;
use crate::bars::{BLOCK, Setting, say};
use crate::datastore::{Control, Datastore, Serving};
use crate::error::{Error, Result};
use crate::nbd::{Request, Timing};
use crate::process;
use crate::random::Random;
use crate::report::Finding;
use crate::statistics::{largest, percentile};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The load: its name, and its writes per second; `None` for as many as the server takes.
const LOADS: [(&str, Option<u32>); 4] = [
    ("1,000 writes/s", Some(1000)),
    ("4,000 writes/s", Some(4000)),
    ("8,000 writes/s", Some(8000)),
    ("full load", None),
];
/// Requests per second of the observed clients.
const WRITES: u32 = 100;
const DISCARDS: u32 = 20;
const SNAPSHOTS: u32 = 10;
/// Size of a discard.
const DISCARD: u64 = 1 << 20;
/// Part of the planned time for each load, and the bounds of this time.
const PART: f64 = 0.05;
const MIN_S: f64 = 2.0;
const MAX_S: f64 = 30.0;
/// Limit of the p99 of each kind of request.
const P99_MAX_MS: f64 = 50.0;
const LOADED: &str = "loaded";
const OBSERVED: &str = "observed";
const QUIET: &str = "quiet";

/// Runs this part of the study.
pub(super) fn measure(setting: &Setting, findings: &mut Vec<Finding>) -> Result<Value> {
    let path = setting.scratch.path("pressure");
    let datastore = Datastore::init_at(&setting.lamina, &setting.scratch, "pressure", path, Some("4M"))?;
    for disk in [LOADED, OBSERVED] {
        datastore.create(disk, CAPACITY)?;
    }
    datastore.create(QUIET, DISCARD)?;
    let (server, _) = datastore.serve(&Serving::plain(setting.plan.mode()), LOADED)?;
    let mut control = datastore.control()?;
    let time = Duration::from_secs_f64((setting.plan.lasting * PART).clamp(MIN_S, MAX_S));
    let mut raw = Vec::new();
    for (number, (name, rate)) in (0..).zip(LOADS) {
        process::go_on()?;
        say(&format!("journal of 4 MiB, {name}"));
        let seed = setting.plan.seed + number * 100;
        let writes = observe(&datastore, &mut control, rate, seed, time)?;
        for (what, times) in &writes.observed {
            let what = format!("journal of 4 MiB, {name}: {what}");
            let p99 = percentile(times, 0.99);
            findings.push(Finding::new(PROPERTY, format!("{what}, p99"), p99, "ms").at_most(P99_MAX_MS));
            findings.push(Finding::new(PROPERTY, format!("{what}, longest"), largest(times), "ms"));
        }
        let written = writes.load as f64 / time.as_secs_f64();
        findings.push(Finding::new(PROPERTY, format!("journal of 4 MiB, {name}: writes"), written, "/s"));
        let shown = writes.observed.iter().map(|(what, times)| {
            json!({
                "requests": what, "count": times.len(), "median_ms": percentile(times, 0.5),
                "p99_ms": percentile(times, 0.99), "longest_ms": largest(times),
            })
        });
        raw.push(json!({ "load": name, "writes": writes.load, "observed": shown.collect::<Vec<_>>() }));
    }
    server.service.stop()?;
    datastore.verb(&["check"])?;
    setting.scratch.remove(datastore.path())?;
    Ok(raw.into())
}

struct Observed {
    /// Number of writes of the load.
    load: usize,
    /// Times of each kind of request in milliseconds.
    observed: [(&'static str, Vec<f64>); 3],
}

/// Runs the load and the observed clients for this time.
fn observe(
    datastore: &Datastore,
    control: &mut Control,
    rate: Option<u32>,
    seed: u64,
    time: Duration,
) -> Result<Observed> {
    let write =
        |random: &mut Random| Request::Write { offset: random.below(CAPACITY / BLOCK) * BLOCK, length: BLOCK as u32 };
    let discard = |random: &mut Random| Request::Trim {
        offset: random.below(CAPACITY / DISCARD) * DISCARD,
        length: DISCARD as u32,
    };
    let (loaded, observed) = (datastore.endpoint(LOADED), datastore.endpoint(OBSERVED));
    let load = match rate {
        Some(rate) => Load::paced(&vec![loaded.clone(); DEPTH], rate, seed, write)?,
        None => Load::busy(&loaded, DEPTH, seed, write)?,
    };
    let writes = Load::paced(&[observed], WRITES, seed + 50, write)?;
    let discards = Load::paced(&[loaded], DISCARDS, seed + 60, discard)?;
    let (begun, mut snapshots) = (Instant::now(), Vec::new());
    let mut failed = Ok(());
    while begun.elapsed() < time && failed.is_ok() {
        let name = format!("s{seed}-{}", snapshots.len());
        match control.snapshot(QUIET, &name) {
            Ok(taken) => snapshots.push(taken.as_secs_f64() * 1e3),
            Err(error) => failed = Err(error),
        }
        let due = begun + Duration::from_secs(1) * snapshots.len() as u32 / SNAPSHOTS;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    let times = |load: Load| -> Result<Vec<f64>> {
        Ok(load.finish()?.iter().map(|timing: &Timing| timing.microseconds() / 1e3).collect())
    };
    let (writes, discards, load) = (times(writes), times(discards), times(load));
    failed?;
    let load = load?.len();
    let observed = [("buffered writes", writes?), ("discards", discards?), ("snapshots of another disk", snapshots)];
    match observed.iter().find(|(_, times)| times.is_empty()) {
        Some((what, _)) => Err(Error::Answer(format!("no answers to {what}"))),
        None => Ok(Observed { load, observed }),
    }
}
