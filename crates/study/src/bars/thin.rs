//! The same writes to an empty thin disk and to a full one.
//!
//! Bytes are fixed rather than time, no block is written twice, and the flush at the end counts: so both disks get
//! exactly the same writes, and every one of those to the empty disk is a first write. Each run has a fresh empty disk.

use super::{Setting, fill, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::{self, Job, Length, Pattern};
use crate::plan::Mode;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::{Value, json};

/// What the findings are about.
const PROPERTY: &str = "first writes";

/// Least share of the full disk's rate.
const SHARE_MIN: f64 = 0.95;

struct Cell {
    name: &'static str,
    pattern: Pattern,
    block: u32,
    depth: u32,
    flush_each: bool,
    /// The disk's size divided by this is written.
    part: u64,
}

const CELLS: [Cell; 4] = [
    Cell {
        name: "randwrite-4k-qd16",
        pattern: Pattern::RandomWrite,
        block: 4096,
        depth: 16,
        flush_each: false,
        part: 2,
    },
    Cell {
        name: "randwrite-4k-qd1",
        pattern: Pattern::RandomWrite,
        block: 4096,
        depth: 1,
        flush_each: false,
        part: 16,
    },
    Cell {
        name: "flushed-write-4k",
        pattern: Pattern::RandomWrite,
        block: 4096,
        depth: 1,
        flush_each: true,
        part: 128,
    },
    Cell { name: "write-512k-qd4", pattern: Pattern::Write, block: 512 << 10, depth: 4, flush_each: false, part: 1 },
];

const FULL: &str = "full";
const EMPTY: &str = "empty";

/// Measures it.
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
        for cell in &CELLS {
            say(&format!("{} {}", mode.word(), cell.name));
            let (full, empty) = measure_cell(setting, &datastore, mode, cell)?;
            let share = ratio(median(&empty), median(&full));
            let what = format!("{} {}: empty disk's share of the full one's rate", mode.word(), cell.name);
            findings.push(Finding::at_least(PROPERTY, what, share, SHARE_MIN, ""));
            raw.push(json!({ "mode": mode, "cell": cell.name, "full": full, "empty": empty }));
        }
        server.service.stop()?;
    }
    Ok(Outcome { findings, raw: Value::Array(raw) })
}

fn measure_cell(setting: &Setting, datastore: &Datastore, mode: Mode, cell: &Cell) -> Result<(Vec<f64>, Vec<f64>)> {
    let plan = &setting.plan;
    let (mut full, mut empty) = (Vec::new(), Vec::new());
    for run in 0..plan.runs {
        datastore.create(EMPTY, plan.disk_size)?;
        let job = Job {
            pattern: cell.pattern,
            block: cell.block,
            depth: cell.depth,
            flush_each: cell.flush_each,
            length: Length::Bytes(plan.disk_size / cell.part),
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
