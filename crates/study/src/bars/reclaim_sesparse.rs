//! Wiping and shrinking a SEsparse disk under load, after half of the disk's data was discarded.
//!
//! The load is random 4 KiB writes to the part of the disk that is not discarded. All grains of this part are
//! allocated, so the load allocates and frees no space. The rate of the load during the operations is compared with the
//! rates before and after. Random runs of 64 KiB from the rest of the disk are discarded, so that free grains are
//! spread over the whole file, and the grains in use behind them have to be moved.

use super::load::{Load, Pace, rate, worst};
use super::{BLOCK, Setting, fill, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::nbd::{Client, Request};
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::ratio;
use serde_json::json;
use std::time::{Duration, Instant};

const PROPERTY: &str = "SEsparse wipe and shrink";
/// Least share of the unreferenced grains that must be returned to the file system.
const RETURNED_MIN: f64 = 0.99;
/// Least rate of the load during the operations, as a share of its rate before and after.
const SHARE_MIN: f64 = 0.9;
/// Rates are measured over at least this time, because they vary from second to second.
const WINDOW: Duration = Duration::from_secs(5);
const RUN: u64 = 64 << 10;
const DISK: &str = "disk";

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "reclaim-sesparse")?;
    datastore.create_vmdk(DISK, plan.disk_size, "thin", Some("sesparse"))?;
    datastore.snapshot(DISK, "below")?;
    let (server, _) = datastore.serve(&Serving::plain(plan.mode()), DISK)?;
    let endpoint = datastore.endpoint(DISK);
    say("filling the disk");
    fill(&endpoint, plan.disk_size)?;

    say("discarding half of the disk");
    // The load writes the first eighth of the disk. Runs of the remaining part are discarded until half of the disk is
    // discarded.
    let busy = plan.disk_size / 8;
    let first = busy / RUN;
    let runs = u32::try_from(plan.disk_size / RUN - first).unwrap_or(u32::MAX);
    let chosen = Random::new(plan.seed).order(runs);
    let chosen = &chosen[..(plan.disk_size / 2 / RUN) as usize];
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let trims = chosen.iter().map(|run| Request::Trim { offset: (first + u64::from(*run)) * RUN, length: RUN as u32 });
    client.run(16, trims, |_| ())?;
    client.flush()?;
    let dead = chosen.len() as u64 * RUN;
    let files = datastore.images(DISK);
    setting.scratch.settle()?;
    let full = scratch::allocated(&files)?;

    say("wiping and shrinking under load");
    let load = Load::start(&endpoint, busy / BLOCK, plan.seed, Pace::Full)?;
    process::pause(Duration::from_secs(1))?;
    let from = Instant::now();
    process::pause(WINDOW)?;
    let before = (from, Instant::now());
    let mut times = Vec::new();
    let from = Instant::now();
    for verb in ["wipe", "shrink"] {
        times.push(datastore.verb(&["disk", verb, DISK])?.as_secs_f64());
    }
    let during = (from, Instant::now());
    process::pause(Duration::from_millis(500))?;
    let from = Instant::now();
    process::pause(WINDOW)?;
    let after = (from, Instant::now());
    let timings = load.finish()?;
    setting.scratch.settle()?;
    let left = scratch::allocated(&files)?;

    let calm = (rate(&timings, before) + rate(&timings, after)) / 2.0;
    let share = ratio(rate(&timings, during), calm);
    let returned = ratio(full.saturating_sub(left) as f64, dead as f64);
    let note = |what: &str, figure, unit| Finding::new(PROPERTY, what, figure, unit);
    server.service.stop()?;
    Ok(Outcome {
        findings: vec![
            Finding::new(PROPERTY, "wipe and shrink: space returned of what was dead", returned, "")
                .at_least(RETURNED_MIN),
            Finding::new(PROPERTY, "wipe and shrink: rate of writes against before and after", share, "")
                .at_least(SHARE_MIN),
            note("time of the wipe", times[0], "s"),
            note("time of the shrink", times[1], "s"),
            note("worst request before", worst(&timings, &[before]), "ms"),
            note("worst request meanwhile", worst(&timings, &[during]), "ms"),
        ],
        raw: json!({
            "dead": dead, "before": full, "after": left, "calm_rate": calm, "busy_rate": rate(&timings, during),
            "wipe_s": times[0], "shrink_s": times[1], "requests": timings.len(),
        }),
    })
}
