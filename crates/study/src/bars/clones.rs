//! Thousands of linked clones of a disk with data, opening a datastore that has them, and a full clone.
//!
//! A clone command returns when its clones are durable, so the time of `cp` includes a flush. Both commands read a
//! source that is in the page cache.

use super::{Setting, fill, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::plan::Mode;
use crate::process;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::json;
use std::process::Command;
use std::time::{Duration, Instant};

/// Name of the measured property in the report.
const PROPERTY: &str = "linked clones";

/// Longest time per clone, from a limit for 10,000 clones.
const SECONDS_PER_CLONE_MAX: f64 = 10.0 / 10_000.0;
/// Most bytes per clone.
const BYTES_PER_CLONE_MAX: f64 = 4096.0;
/// Longest time for opening the datastore.
const OPEN_MAX_MS: f64 = 1000.0;
/// Least speed of a full clone, relative to cp.
const COPY_SHARE_MIN: f64 = 0.9;

const DISK: &str = "disk";

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "clones")?;
    datastore.create(DISK, plan.disk_size)?;
    let serving = Serving::plain(Mode::Buffered);
    let (server, _) = datastore.serve(&serving, DISK)?;
    fill(&server.endpoint, plan.disk_size)?;
    datastore.snapshot(DISK, "golden")?;
    let mut outcome = Outcome::default();
    let copies = full(setting, &datastore)?;
    let (ours, cp): (Vec<f64>, Vec<f64>) = copies.iter().copied().unzip();
    outcome.findings.extend([
        Finding::new(PROPERTY, "full clone", median(&ours), "s"),
        Finding::new(PROPERTY, "cp --sparse=always and flush", median(&cp), "s"),
        Finding::new(PROPERTY, "full clone: speed against cp", ratio(median(&cp), median(&ours)), "")
            .at_least(COPY_SHARE_MIN),
    ]);

    say(&format!("taking {} linked clones", plan.clones));
    setting.scratch.settle()?;
    let before = scratch::allocated(datastore.path())?;
    let (count, source) = (plan.clones.to_string(), format!("{DISK}@golden"));
    let time = datastore.verb(&["clone", &source, "clone", "--count", &count])?;
    // The size of the clones is measured after a stop of the server, when everything is written back.
    server.service.stop()?;
    setting.scratch.settle()?;
    let after = scratch::allocated(datastore.path())?;
    let clones = f64::from(plan.clones);
    let bytes = after.saturating_sub(before) as f64 / clones;
    let what = format!("{} linked clones", plan.clones);
    outcome.findings.extend([
        Finding::new(PROPERTY, &what, time.as_secs_f64(), "s").at_most(clones * SECONDS_PER_CLONE_MAX),
        Finding::new(PROPERTY, format!("{what}: space each"), bytes, "bytes").at_most(BYTES_PER_CLONE_MAX),
    ]);
    say("opening the datastore");
    let mut opened = Vec::new();
    for _ in 0..plan.runs {
        scratch::drop_cached(datastore.path())?;
        // The time includes listing 10,000 names, which precedes the first reply.
        let (server, time) = datastore.serve(&serving, DISK)?;
        opened.push(time.as_secs_f64() * 1e3);
        server.service.stop()?;
    }
    outcome.findings.push(
        Finding::new(PROPERTY, "opening a datastore with the clones, cold", median(&opened), "ms").at_most(OPEN_MAX_MS),
    );
    outcome.raw = json!({
        "full_and_cp_s": copies, "clones": plan.clones, "clones_s": time.as_secs_f64(),
        "allocated_before": before, "allocated_after": after, "open_ms": opened,
    });
    Ok(outcome)
}

/// Seconds of a full clone and of a cp, for each run.
fn full(setting: &Setting, datastore: &Datastore) -> Result<Vec<(f64, f64)>> {
    let plan = &setting.plan;
    say("full clones against cp");
    let (raw, copy) = (setting.scratch.path("disk.raw"), setting.scratch.path("copy.raw"));
    process::run(Command::new("nbdcopy").arg(datastore.endpoint(DISK).uri()).arg(&raw))?;
    let mut times = Vec::new();
    for run in 0..plan.runs {
        let ours = || -> Result<Duration> {
            prepare(setting, datastore)?;
            let time = datastore.verb(&["clone", &format!("{DISK}@golden"), "full", "--full"])?;
            datastore.delete("full")?;
            Ok(time)
        };
        let cp = || -> Result<Duration> {
            prepare(setting, datastore)?;
            let began = Instant::now();
            process::run(Command::new("cp").arg("--sparse=always").arg(&raw).arg(&copy))?;
            process::run(Command::new("sync").arg(&copy))?;
            let time = began.elapsed();
            setting.scratch.remove(&copy)?;
            Ok(time)
        };
        let (ours, cp) = if run % 2 == 0 {
            let first = ours()?;
            (first, cp()?)
        } else {
            let first = cp()?;
            (ours()?, first)
        };
        times.push((ours.as_secs_f64(), cp.as_secs_f64()));
    }
    setting.scratch.remove(&raw)?;
    Ok(times)
}

/// Waits until the space of the previous clone is returned, so that it does not disturb the next measurement.
fn prepare(setting: &Setting, datastore: &Datastore) -> Result<()> {
    setting.scratch.rest(datastore.path())?;
    scratch::warm(&setting.scratch.path("disk.raw"))?;
    scratch::warm(datastore.path())
}
