//! The same writes to an empty thin disk and to a full disk.
//!
//! The number of bytes is fixed, not the time. No block is written twice, and the final flush is counted. So the writes
//! to both disks are the same, and all writes to the empty disk are first writes. Each run uses a new empty disk.

use super::speed::{Cell, cell};
use super::{Setting, fill, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::{self, Job, Length, Pattern};
use crate::plan::Mode;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::{Value, json};

/// Name of the measured property in the report.
const PROPERTY: &str = "first writes";

/// Least rate, relative to the rate of the full disk.
const SHARE_MIN: f64 = 0.95;

/// The loads, and the divisor of the disk's size for the bytes to write.
const CELLS: [(Cell, u64); 4] = [
    (cell("randwrite-4k-qd16", Pattern::RandomWrite, 4096, 16, false), 2),
    (cell("randwrite-4k-qd1", Pattern::RandomWrite, 4096, 1, false), 16),
    (cell("flushed-write-4k", Pattern::RandomWrite, 4096, 1, true), 128),
    (cell("write-512k-qd4", Pattern::Write, 512 << 10, 4, false), 1),
];

const FULL: &str = "full";
const EMPTY: &str = "empty";

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "thin")?;
    datastore.create(FULL, plan.disk_size)?;
    let mut findings = Vec::new();
    let mut raw = Vec::new();
    let mut filled = false;
    for &mode in &plan.modes {
        let (server, _) = datastore.serve(&Serving::plain(mode), FULL)?;
        if !filled {
            say("filling the full disk");
            fill(&server.endpoint, plan.disk_size)?;
            filled = true;
        }
        for (cell, part) in &CELLS {
            say(&format!("{} {}", mode.word(), cell.name));
            let (full, empty) = measure_cell(setting, &datastore, mode, cell, *part)?;
            let share = ratio(median(&empty), median(&full));
            let what = format!("{} {}: empty disk's share of the full one's rate", mode.word(), cell.name);
            findings.push(Finding::new(PROPERTY, what, share, "").at_least(SHARE_MIN));
            raw.push(json!({ "mode": mode, "cell": cell.name, "full": full, "empty": empty }));
        }
        server.service.stop()?;
    }
    Ok(Outcome { findings, raw: Value::Array(raw) })
}

fn measure_cell(
    setting: &Setting,
    datastore: &Datastore,
    mode: Mode,
    cell: &Cell,
    part: u64,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let plan = &setting.plan;
    let (mut full, mut empty) = (Vec::new(), Vec::new());
    for run in 0..plan.runs {
        datastore.create(EMPTY, plan.disk_size)?;
        let job = Job {
            pattern: cell.pattern,
            block: cell.block,
            depth: cell.depth,
            flush_each: cell.flush_each,
            length: Length::Bytes(plan.disk_size / part),
            size: plan.disk_size,
            seed: plan.seed + u64::from(run),
        };
        let mut sides = [(FULL, &mut full), (EMPTY, &mut empty)];
        if run % 2 == 1 {
            sides.reverse();
        }
        for (disk, samples) in sides {
            setting.scratch.settle()?;
            if mode == Mode::Direct {
                scratch::drop_cached(datastore.path())?;
            }
            samples.push(fio::run(&setting.scratch, &datastore.endpoint(disk), &job)?.rate);
        }
        datastore.delete(EMPTY)?;
    }
    Ok((full, empty))
}
