//! Consolidation of a chain of deltas into its base under random writes.
//!
//! The deltas together contain as much data as the capacity of the disk, in random runs of 64 KiB. The expected content
//! of every block is tracked (see [`super::load`]), and is compared at the end, before and after a restart of the
//! server.

use super::load::{Load, Pace, Versions, worst};
use super::{BLOCK, Setting, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::nbd::Timing;
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::ratio;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PROPERTY: &str = "consolidation";
/// Longest time of any request, if the load is not the full one.
const DELAY_MAX_MS: f64 = 50.0;
/// Under the full load, the longest time of any request beyond that without the operation.
const FULL_DELAY_MAX_MS: f64 = 100.0;
/// Least rate at which the data is moved, no matter what the guest writes meanwhile, so that the duration is bounded.
const BYTES_PER_SECOND_MIN: f64 = 20e6;
const LEVELS: u32 = 4;
const RUN: u64 = 64 << 10;
const DISK: &str = "disk";
/// How long the load runs alone, before and after.
const CALM: Duration = Duration::from_secs(10);
const FORMATS: [&str; 3] = ["sesparse", "vmfssparse", "vsansparse"];

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let mut outcome = Outcome::default();
    let mut raw = Vec::new();
    for format in FORMATS.into_iter().filter(|format| plan.wants(format)) {
        let datastore = Datastore::init(&setting.lamina, &setting.scratch, &format!("consolidate-{format}"))?;
        datastore.create_vmdk(DISK, plan.disk_size, "thin", Some(format))?;
        let (server, _) = datastore.serve(&Serving::plain(plan.mode()), DISK)?;
        let endpoint = datastore.endpoint(DISK);
        say(&format!("{format}: writing a base and {LEVELS} deltas"));
        let mut versions = Versions::fill(&endpoint, plan.disk_size)?;
        let mut random = Random::new(plan.seed);
        let runs = plan.disk_size / RUN;
        for level in 0..LEVELS {
            datastore.snapshot(DISK, &format!("level-{level}"))?;
            let order = random.order(u32::try_from(runs).unwrap_or(u32::MAX));
            let part = order[..order.len() / LEVELS as usize].iter();
            versions.rewrite(&endpoint, part.map(|run| (u64::from(*run) * RUN / BLOCK, RUN / BLOCK)))?;
        }
        setting.scratch.rest(datastore.path())?;
        say(&format!("{format}: consolidating under load"));
        let work = Work {
            datastore: &datastore,
            verb: &["disk", "consolidate", DISK],
            what: format,
            bytes: plan.disk_size,
            limit: None,
        };
        raw.push(watched(setting, &work, DISK, versions, &mut outcome)?);
        server.service.stop()?;
        setting.scratch.remove(datastore.path())?;
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// An operation on a disk in use.
pub(super) struct Work<'a> {
    pub(super) datastore: &'a Datastore,
    /// The command, which returns when the operation is complete.
    pub(super) verb: &'a [&'a str],
    /// The operation's name in findings.
    pub(super) what: &'a str,
    /// Bytes that the operation has to move.
    pub(super) bytes: u64,
    /// The highest rate of the load, in requests per second.
    pub(super) limit: Option<f64>,
}

/// Runs the operation under random writes; measures the operation's duration and the latency of requests, and compares
/// every block afterwards.
pub(super) fn watched(
    setting: &Setting,
    work: &Work<'_>,
    disk: &str,
    versions: Versions,
    outcome: &mut Outcome,
) -> Result<Value> {
    let datastore = work.datastore;
    let endpoint = datastore.endpoint(disk);
    let start = |versions, pace| Load::verified(&endpoint, versions, setting.plan.seed, pace);
    let (pace, versions) = match setting.plan.load {
        100 => (Pace::Full, versions),
        percent => {
            let (rate, versions) = Load::rate(percent, || start(versions, Pace::Full), Load::finish_verified)?;
            (Pace::PerSecond(work.limit.map_or(rate, |limit| rate.min(limit))), versions)
        }
    };
    let load = start(versions, pace)?;
    process::pause(Duration::from_secs(2))?;
    let from = Instant::now();
    process::pause(CALM)?;
    let before = (from, Instant::now());
    let time = datastore.verb(work.verb)?;
    let during = (before.1, Instant::now());
    process::pause(CALM)?;
    let after = (during.1, Instant::now());
    let (timings, versions) = load.finish_verified()?;
    let allocated = scratch::allocated(datastore.path())?;
    say("comparing every block");
    let differences = versions.differences(&endpoint)?;

    let (calm, busy) = (worst(&timings, &[before, after]), worst(&timings, &[during]));
    let what = |text: &str| format!("{}: {text}", work.what);
    let speed = ratio(work.bytes as f64, time.as_secs_f64());
    let over = late(&timings, during).count();
    let calm_rate = super::load::rate(&timings, before);
    outcome.findings.extend([
        Finding::new(PROPERTY, what("time"), time.as_secs_f64(), "s"),
        Finding::new(PROPERTY, what("bytes moved per second"), speed / 1e6, "MB/s")
            .at_least(BYTES_PER_SECOND_MIN / 1e6),
        Finding::new(PROPERTY, what("blocks that differ"), differences as f64, "").at_most(0.0),
        Finding::new(PROPERTY, what("worst request in 20 s without it"), calm, "ms"),
        match pace {
            Pace::PerSecond(_) => {
                Finding::new(PROPERTY, what("worst request during it"), busy, "ms").at_most(DELAY_MAX_MS)
            }
            Pace::Full => {
                Finding::new(PROPERTY, what("worst request during it, beyond that"), (busy - calm).max(0.0), "ms")
                    .at_most(FULL_DELAY_MAX_MS)
            }
        },
        Finding::new(PROPERTY, what("rate of the load without it"), calm_rate, "/s"),
        Finding::new(PROPERTY, what("requests during it above 50 ms"), over as f64, ""),
        Finding::new(PROPERTY, what("rate during it against without"), share(&timings, during, before, after), ""),
    ]);
    Ok(json!({
        "what": work.what, "seconds": time.as_secs_f64(), "bytes": work.bytes, "differences": differences,
        "worst_calm_ms": calm, "worst_busy_ms": busy, "late": over,
        "stalls": stalls(&timings, during), "requests": timings.len(), "allocated": allocated,
    }))
}

/// Requests in flight during a window whose latency exceeds the limit.
fn late(timings: &[Timing], window: (Instant, Instant)) -> impl Iterator<Item = &Timing> {
    let inside = move |t: &&Timing| t.sent <= window.1 && t.answered >= window.0;
    timings.iter().filter(inside).filter(|t| t.microseconds() > DELAY_MAX_MS * 1e3)
}

/// Groups late requests that were delayed at the same time. For each group: seconds since the window began, longest
/// latency in milliseconds, number of requests.
fn stalls(timings: &[Timing], window: (Instant, Instant)) -> Vec<(f64, f64, u32)> {
    let mut stalls: Vec<(f64, f64, u32)> = Vec::new();
    let mut until = window.0;
    for one in late(timings, window) {
        let longest = one.microseconds() / 1e3;
        match stalls.last_mut() {
            Some(last) if one.sent < until => {
                last.1 = last.1.max(longest);
                last.2 += 1;
            }
            _ => stalls.push((one.sent.saturating_duration_since(window.0).as_secs_f64(), longest, 1)),
        }
        until = until.max(one.answered);
    }
    stalls
}

fn share(timings: &[Timing], during: (Instant, Instant), before: (Instant, Instant), after: (Instant, Instant)) -> f64 {
    let rate = |window| super::load::rate(timings, window);
    ratio(rate(during), (rate(before) + rate(after)) / 2.0)
}
