//! Space that is occupied after discards, and after a whole disk was overwritten at random ten times.

use super::{BLOCK, Setting, fill, say, write_blocks};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::ratio;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Name of the measured property in the report.
const PROPERTY: &str = "space returned";

/// Least share of discarded runs of blocks that must be returned to the file system within [`RETURN_TIME_MAX`].
const RETURNED_MIN: f64 = 0.99;
/// Time after which discarded runs must be returned to the file system, and scattered discarded blocks must be
/// reusable.
const RETURN_TIME_MAX: Duration = Duration::from_secs(2);
/// Idle time within which scattered blocks may be returned to the file system.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);
/// Largest growth of the datastore when as much is written as was discarded before, as a share of the written bytes.
const GROWTH_MAX: f64 = 0.05;
/// Largest space of a datastore, relative to its live data.
const SPACE_MAX: f64 = 1.1;
const OVERWRITES: u32 = 10;

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut raw = serde_json::Map::new();
    for (name, part) in [("runs", runs as Part), ("scattered", scattered), ("overwritten", overwritten)] {
        let datastore = Datastore::init(&setting.lamina, &setting.scratch, name)?;
        let empty = scratch::allocated(datastore.path())?;
        for disk in [DISK, OTHER] {
            datastore.create(disk, setting.plan.disk_size)?;
        }
        let (server, _) = datastore.serve(&Serving::plain(setting.plan.mode()), DISK)?;
        say(&format!("filling a disk ({name})"));
        fill(&server.endpoint, setting.plan.disk_size)?;
        setting.scratch.rest(datastore.path())?;
        raw.insert(name.into(), part(setting, &datastore, empty, &mut outcome)?);
        server.service.stop()?;
        setting.scratch.remove(datastore.path())?;
    }
    outcome.raw = Value::Object(raw);
    Ok(outcome)
}

type Part = fn(&Setting, &Datastore, u64, &mut Outcome) -> Result<Value>;
const DISK: &str = "disk";
const OTHER: &str = "other";

/// Discards pieces of `bytes` bytes at the given indices, and flushes.
fn discard(endpoint: &Endpoint, indices: impl Iterator<Item = u64>, bytes: u64) -> Result<u64> {
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let requests = indices.map(|i| Request::Trim { offset: i * bytes, length: bytes as u32 });
    let count = client.run(16, requests, |_| ())?;
    client.flush()?;
    Ok(count * bytes)
}

/// Discards every second run of 64 KiB of one disk, and every second run of 1 MiB of another.
fn runs(setting: &Setting, datastore: &Datastore, _empty: u64, outcome: &mut Outcome) -> Result<Value> {
    let mut raw = Vec::new();
    fill(&datastore.endpoint(OTHER), setting.plan.disk_size)?;
    setting.scratch.rest(datastore.path())?;
    for (disk, bytes, shown) in [(DISK, 64 << 10, "64 KiB"), (OTHER, 1 << 20, "1 MiB")] {
        say(&format!("discarding every other {shown}"));
        let before = scratch::allocated(datastore.path())?;
        let pieces = setting.plan.disk_size / bytes;
        let discarded = discard(&datastore.endpoint(disk), (0..pieces).step_by(2), bytes)?;
        let wanted = before.saturating_sub((discarded as f64 * RETURNED_MIN) as u64);
        let (after, time) = scratch::wait_allocated(datastore.path(), wanted, RETURN_TIME_MAX)?;
        let returned = ratio(before.saturating_sub(after) as f64, discarded as f64);
        let what = format!("runs of {shown}: returned within 2 s");
        outcome.findings.push(Finding::new(PROPERTY, what, returned, "").at_least(RETURNED_MIN));
        raw.push(json!({
            "run": bytes, "discarded": discarded, "before": before, "after": after, "ms": time.as_secs_f64() * 1e3,
        }));
    }
    Ok(Value::Array(raw))
}

/// Discards a quarter of all blocks one by one, then writes as many blocks to another disk.
fn scattered(setting: &Setting, datastore: &Datastore, _empty: u64, outcome: &mut Outcome) -> Result<Value> {
    let plan = &setting.plan;
    let blocks = u32::try_from(plan.disk_size / BLOCK).unwrap_or(u32::MAX);
    // No two of the chosen blocks are adjacent, because adjacent blocks would form a run.
    let order = Random::new(plan.seed).order(blocks / 2);
    let chosen: Vec<u64> = order[..order.len() / 2].iter().map(|b| u64::from(*b) * 2).collect();
    let (reused, idle) = chosen.split_at(chosen.len() / 2);

    say("discarding scattered blocks and writing as many");
    let before = scratch::allocated(datastore.path())?;
    let discarded = discard(&datastore.endpoint(DISK), reused.iter().copied(), BLOCK)?;
    process::pause(RETURN_TIME_MAX)?;
    write_blocks(&datastore.endpoint(OTHER), 0..reused.len() as u64, BLOCK)?;
    let written = scratch::allocated(datastore.path())?;
    let growth = ratio(written.saturating_sub(before) as f64, discarded as f64);
    let what = "scattered blocks: growth when as much is written 2 s later";
    outcome.findings.push(Finding::new(PROPERTY, what, growth, "").at_most(GROWTH_MAX));

    say("discarding scattered blocks and waiting");
    setting.scratch.rest(datastore.path())?;
    let full = scratch::allocated(datastore.path())?;
    let left = discard(&datastore.endpoint(DISK), idle.iter().copied(), BLOCK)?;
    let wanted = full.saturating_sub((left as f64 * RETURNED_MIN) as u64);
    let (after, time) = scratch::wait_allocated(datastore.path(), wanted, IDLE_TIME_MAX)?;
    let returned = ratio(full.saturating_sub(after) as f64, left as f64);
    let what = "scattered blocks: returned in a minute of idle time";
    outcome.findings.push(Finding::new(PROPERTY, what, returned, "").at_least(RETURNED_MIN));
    outcome.findings.push(Finding::new(PROPERTY, "scattered blocks: time until returned", time.as_secs_f64(), "s"));
    Ok(json!({
        "discarded": discarded, "before": before, "after_writing": written,
        "discarded_idle": left, "before_idle": full, "after_idle": after, "idle_s": time.as_secs_f64(),
    }))
}

/// Writes random blocks, ten times as many as the disk has.
fn overwritten(setting: &Setting, datastore: &Datastore, empty: u64, outcome: &mut Outcome) -> Result<Value> {
    let plan = &setting.plan;
    let blocks = plan.disk_size / BLOCK;
    let mut random = Random::new(plan.seed);
    let (mut rates, mut space) = (Vec::new(), Vec::new());
    for pass in 0..OVERWRITES {
        say(&format!("overwriting at random, {} of {OVERWRITES}", pass + 1));
        let began = Instant::now();
        write_blocks(&datastore.endpoint(DISK), (0..blocks).map(|_| random.below(blocks)), BLOCK)?;
        rates.push(blocks as f64 / began.elapsed().as_secs_f64());
        space.push(scratch::allocated(datastore.path())?);
    }
    setting.scratch.rest(datastore.path())?;
    let after = scratch::allocated(datastore.path())?;
    let live = plan.disk_size as f64;
    // The space of the empty datastore is subtracted, because the journal is allocated from the beginning and does not
    // grow with the data.
    let grown = ratio(after.saturating_sub(empty) as f64, live);
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    outcome.findings.extend([
        Finding::new(PROPERTY, "overwritten ten times: space against live data", grown, "").at_most(SPACE_MAX),
        Finding::new(
            PROPERTY,
            "overwritten ten times: space including the empty datastore's",
            ratio(after as f64, live),
            "",
        ),
        Finding::new(PROPERTY, "slowest pass of random writes", slowest, "/s"),
        Finding::new(PROPERTY, "slowest pass against the first", ratio(slowest, rates[0]), ""),
    ]);
    Ok(json!({ "empty": empty, "after_each": space, "settled": after, "rates": rates }))
}
