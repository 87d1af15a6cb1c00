//! Snapshots are taken and deleted under random 4 KiB writes at queue depth 16.
//!
//! The study's own client sends the load, so that the same clock measures the times of requests and of snapshots. The
//! latencies of the requests in flight while a snapshot is taken show the delay that it causes; the same number of
//! windows of the same length without snapshots shows the noise of the machine. Snapshots are requested over the
//! control socket, because on a busy machine the start of a process takes longer than a snapshot is allowed to take.
//!
//! For deletion, the disk has two halves. The load writes only the first half, in which no block is shared with a
//! snapshot, so that the load allocates and frees no space. Areas of the second half were overwritten in runs of 64 KiB
//! between snapshots. So the study knows exactly how many bytes only one snapshot references: the deletion of the
//! snapshot must return them.
//!
//! Only the space of data blocks is compared, and only without load: before the load and after it. While clients write,
//! the engine keeps up to 32 MiB of free blocks for these writes, overwritten blocks become free with a later commit,
//! and the journal and its page images grow. None of this depends on the deletion. Under load, all space except
//! `KEPT_MAX` has to be returned.

use super::load::{Load, Pace, rate, worst};
use super::{BLOCK, Setting, fill, no_cell, say, write_blocks};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{largest, median, percentile, ratio};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Name of the measured property in the report.
const PROPERTY: &str = "snapshots under load";

/// Limit of the 99th percentile of the time to take a snapshot, in milliseconds.
const CREATE_P99_MAX_MS: f64 = 2.0;
/// Longest delay of a request due to a snapshot, in milliseconds.
const DELAY_MAX_MS: f64 = 10.0;
/// Least rate of the load while a snapshot is deleted, relative to the rates before and after.
const DELETE_SHARE_MIN: f64 = 0.9;
/// Least share of the unreferenced space that must be returned to the file system.
const RETURNED_MIN: f64 = 0.99;
/// Space that the engine may keep while clients write: 32 MiB of free blocks, and 64 MiB that become free with a later
/// commit.
const KEPT_MAX: u64 = 96 << 20;
/// Time without requests after which the engine has returned single free blocks too.
const REST: Duration = Duration::from_secs(5);
/// How long a deletion may continue in the background.
const RETURN_TIME_MAX: Duration = Duration::from_secs(60);

/// Rates are measured over at least this time, because they vary from second to second.
const WINDOW: Duration = Duration::from_secs(3);
const GAP: Duration = Duration::from_millis(50);
const RUN: u64 = 64 << 10;
const DISK: &str = "disk";
/// The two cells of the study.
const TAKE: &str = "take";
const DELETE: &str = "delete";
/// Number of snapshots that are taken with the command line, to measure the time that a script needs.
const COMMANDS: u32 = 20;

fn taken(number: u32) -> String {
    format!("taken-{number:06}")
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let (takes, deletes) = (setting.plan.wants(TAKE), setting.plan.wants(DELETE));
    if !takes && !deletes {
        return Err(no_cell(&setting.plan, &[TAKE, DELETE]));
    }
    let mut outcome = Outcome::default();
    let mut raw = serde_json::Map::new();
    if takes {
        let datastore = Datastore::init(&setting.lamina, &setting.scratch, "snapshots")?;
        datastore.create(DISK, setting.plan.disk_size)?;
        let (server, _) = datastore.serve(&Serving::plain(setting.plan.mode()), DISK)?;
        fill(&server.endpoint, setting.plan.disk_size)?;
        raw.insert(TAKE.to_owned(), take(setting, &datastore, &mut outcome)?);
        server.service.stop()?;
        setting.scratch.remove(datastore.path())?;
    }
    if deletes {
        raw.insert(DELETE.to_owned(), delete(setting, &mut outcome)?);
    }
    outcome.raw = Value::Object(raw);
    Ok(outcome)
}

fn take(setting: &Setting, datastore: &Datastore, outcome: &mut Outcome) -> Result<Value> {
    let plan = &setting.plan;
    say(&format!("taking {} snapshots under load", plan.snapshots));
    let start = |pace| Load::start(&datastore.endpoint(DISK), plan.disk_size / BLOCK, plan.seed, pace);
    let pace = match plan.load {
        100 => Pace::Full,
        percent => Load::pace(percent, || start(Pace::Full), |load| Ok((load.finish()?, ())))?.0,
    };
    let load = start(pace)?;
    process::pause(Duration::from_secs(1))?;
    let (mut with, mut without, mut times) = (Vec::new(), Vec::new(), Vec::new());
    let mut control = datastore.control()?;
    for i in 0..plan.snapshots {
        process::pause(GAP)?;
        let from = Instant::now();
        times.push(control.snapshot(DISK, &taken(i))?.as_secs_f64() * 1e3);
        let to = Instant::now();
        with.push((from, to));
        process::pause(GAP)?;
        // The window has the duration of the snapshot, but no snapshot is taken in it.
        let now = Instant::now();
        without.push((now, now + to.duration_since(from)));
    }
    process::pause(GAP)?;
    // For comparison: the time of the whole command, including the start of its process.
    let mut commands = Vec::new();
    for i in plan.snapshots..plan.snapshots + COMMANDS {
        commands.push(datastore.snapshot(DISK, &taken(i))?.as_secs_f64() * 1e3);
    }
    let timings = load.finish()?;
    let (delayed, noise) = (worst(&timings, &with), worst(&timings, &without));
    let latencies: Vec<f64> = timings.iter().map(|t| t.microseconds() / 1000.0).collect();
    let note = |what: &str, figure| Finding::new(PROPERTY, what, figure, "ms");
    outcome.findings.extend([
        note("taking a snapshot, median", median(&times)),
        Finding::new(PROPERTY, "taking a snapshot, p99", percentile(&times, 0.99), "ms").at_most(CREATE_P99_MAX_MS),
        note("taking a snapshot by a command, median", median(&commands)),
        note("worst request in windows without a snapshot", noise),
        note("worst request in flight during a snapshot", delayed),
        Finding::new(PROPERTY, "worst delay by a snapshot (difference)", (delayed - noise).max(0.0), "ms")
            .at_most(DELAY_MAX_MS),
        note("request latency over all, p99.9", percentile(&latencies, 0.999)),
    ]);
    Ok(json!({
        "snapshot_ms": times, "command_ms": commands, "requests": timings.len(),
        "worst_request_ms": largest(&latencies), "worst_with_ms": delayed, "worst_without_ms": noise,
    }))
}

/// Content of each area of the second half at a point in time: the version is the number of times that the area was
/// overwritten.
type Versions = [u32; AREAS];
const AREAS: usize = 4;
/// Snapshots that are kept, oldest first; areas are overwritten between them.
const KEPT: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Number of areas for which only this snapshot references the data.
fn held_alone(name: &str, kept: &[(&str, Versions)], head: &Versions) -> u64 {
    let Some((_, own)) = kept.iter().find(|(other, _)| *other == name) else { return 0 };
    let elsewhere = |area: usize| {
        let others = kept.iter().filter(|(other, _)| *other != name).map(|(_, versions)| versions);
        others.chain(std::iter::once(head)).any(|versions| versions[area] == own[area])
    };
    (0..AREAS).filter(|area| !elsewhere(*area)).count() as u64
}

/// The deletion is measured in a separate datastore, in which no other space is being freed.
fn delete(setting: &Setting, outcome: &mut Outcome) -> Result<Value> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "deletion")?;
    datastore.create(DISK, plan.disk_size)?;
    let (server, _) = datastore.serve(&Serving::plain(plan.mode()), DISK)?;
    let endpoint = datastore.endpoint(DISK);
    fill(&endpoint, plan.disk_size)?;
    let half = plan.disk_size / 2;
    say("writing between snapshots");
    let runs = half / RUN / AREAS as u64;
    let mut head: Versions = [0; AREAS];
    let mut kept = Vec::new();
    for (turn, name) in KEPT.iter().enumerate() {
        let area = turn % AREAS;
        let first = half / RUN + area as u64 * runs;
        // The blocks are written once before the snapshot and once after it, so that only the snapshot references the
        // first version.
        write_blocks(&endpoint, first..first + runs, RUN)?;
        head[area] += 1;
        datastore.snapshot(DISK, name)?;
        kept.push((*name, head));
        write_blocks(&endpoint, first..first + runs, RUN)?;
        head[area] += 1;
    }
    let blocks = half / BLOCK;
    write_blocks(&endpoint, Random::new(plan.seed).order(blocks as u32).into_iter().map(u64::from), BLOCK)?;
    let mut raw = Vec::new();
    for (what, name) in [("one in the middle", "c"), ("the oldest", "a"), ("the newest", "e")] {
        say(&format!("deleting {what} under load"));
        let held = held_alone(name, &kept, &head) * runs * RUN;
        kept.retain(|(other, _)| *other != name);
        process::pause(REST)?;
        setting.scratch.rest(datastore.path())?;
        let before = scratch::data_allocated(datastore.path())?;
        let load = Load::start(&endpoint, blocks, plan.seed, Pace::Full)?;
        process::pause(WINDOW + Duration::from_secs_f64(plan.ramp))?;
        let calm_before = (Instant::now() - WINDOW, Instant::now());
        let began = Instant::now();
        let command = datastore.delete_snapshot(DISK, name)?;
        let wanted = before.saturating_sub((held as f64 * RETURNED_MIN) as u64);
        let wait = |bytes| scratch::wait_data_allocated(datastore.path(), bytes, RETURN_TIME_MAX);
        let (_, time) = wait(wanted + KEPT_MAX)?;
        process::pause(WINDOW.saturating_sub(began.elapsed()))?;
        let busy = (began, Instant::now());
        // Random writes slow down over time, so the rate during a deletion is compared with the rates before and after.
        process::pause(WINDOW)?;
        let calm_after = (Instant::now() - WINDOW, Instant::now());
        let timings = load.finish()?;
        let (after, rest) = wait(wanted)?;
        let calm = (rate(&timings, calm_before) + rate(&timings, calm_after)) / 2.0;
        let busy = rate(&timings, busy);
        let returned = ratio(before.saturating_sub(after) as f64, held as f64);
        outcome.findings.extend([
            Finding::new(PROPERTY, format!("deleting {what}: rate against before and after"), ratio(busy, calm), "")
                .at_least(DELETE_SHARE_MIN),
            Finding::new(PROPERTY, format!("deleting {what}: space returned of held"), returned, "")
                .at_least(RETURNED_MIN),
            Finding::new(
                PROPERTY,
                format!("deleting {what}: time until all space except the writers' was returned"),
                time.as_secs_f64() * 1e3,
                "ms",
            ),
            Finding::new(
                PROPERTY,
                format!("deleting {what}: time until the rest was returned, after the load"),
                rest.as_secs_f64() * 1e3,
                "ms",
            ),
        ]);
        raw.push(json!({
            "snapshot": name, "held": held, "before": before, "after": after, "calm_rate": calm, "busy_rate": busy,
            "command_ms": command.as_secs_f64() * 1e3, "returned_ms": time.as_secs_f64() * 1e3,
            "rest_returned_ms": rest.as_secs_f64() * 1e3,
        }));
    }
    server.service.stop()?;
    Ok(Value::Array(raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_held_by_one_snapshot_alone_is_computed() {
        let head = [4, 2, 2, 2];
        let kept = [("a", [1, 0, 0, 0]), ("b", [2, 1, 0, 0]), ("c", [2, 2, 1, 0]), ("e", [3, 2, 2, 2])];
        let held = |name| held_alone(name, &kept, &head);
        assert_eq!((held("a"), held("b"), held("c"), held("e"), held("x")), (2, 1, 1, 1, 0));
    }
}
