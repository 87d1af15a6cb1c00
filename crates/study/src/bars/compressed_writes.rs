//! Writes and reads of a disk whose new data is compressed at write-back, against those of a disk without compression.
//!
//! The sides take turns, each with a new disk in a datastore of its own, and each cell compares their medians.

use super::{BLOCK, Setting, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::{self, Job, Length, Pattern};
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::{Value, json};

const PROPERTY: &str = "compressed writes";
const DISK: &str = "disk";
const SIDES: [&str; 2] = ["off", "lz4"];
/// Bytes of each request of long writes.
const LONG: u32 = 512 << 10;
/// Part of each block, in percent, that the disks are filled with before a cell.
const FILL: u32 = 50;

struct Cell {
    name: &'static str,
    pattern: Pattern,
    block: u32,
    depth: u32,
    /// Part of each block, in percent, that can be compressed.
    compressible: u32,
    /// Whether the disk is written before.
    filled: bool,
    /// Least rate in relation to that without compression.
    least: Option<f64>,
}

const CELLS: [Cell; 5] = [
    Cell {
        name: "random 4 KiB overwrites",
        pattern: Pattern::RandomWrite,
        block: BLOCK as u32,
        depth: 16,
        compressible: 50,
        filled: true,
        least: Some(0.85),
    },
    Cell {
        name: "sequential 512 KiB, not compressible",
        pattern: Pattern::Write,
        block: LONG,
        depth: 4,
        compressible: 0,
        filled: false,
        least: Some(0.8),
    },
    Cell {
        name: "sequential 512 KiB, 50 %",
        pattern: Pattern::Write,
        block: LONG,
        depth: 4,
        compressible: 50,
        filled: false,
        least: None,
    },
    Cell {
        name: "sequential 512 KiB, 75 %",
        pattern: Pattern::Write,
        block: LONG,
        depth: 4,
        compressible: 75,
        filled: false,
        least: None,
    },
    Cell {
        name: "random 4 KiB reads",
        pattern: Pattern::RandomRead,
        block: BLOCK as u32,
        depth: 16,
        compressible: 50,
        filled: true,
        least: Some(0.85),
    },
];

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let cells: Vec<&Cell> = CELLS.iter().filter(|cell| setting.plan.wants(cell.name)).collect();
    if cells.is_empty() {
        return Err(no_cell(&setting.plan, &CELLS.map(|cell| cell.name)));
    }
    let mut outcome = Outcome::default();
    let mut raw = Vec::new();
    for cell in cells {
        let (mut rates, mut space) = ([Vec::new(), Vec::new()], [0, 0]);
        for round in 0..setting.plan.runs {
            for (side, method) in SIDES.into_iter().enumerate() {
                say(&format!("{}: {method}, run {}", cell.name, round + 1));
                let (rate, allocated) = run(setting, cell, method, u64::from(round))?;
                rates[side].push(rate);
                space[side] = allocated;
            }
        }
        let of = ratio(median(&rates[1]), median(&rates[0]));
        let finding = Finding::new(PROPERTY, format!("{}: rate against off", cell.name), of, "");
        outcome.findings.push(match cell.least {
            Some(least) => finding.at_least(least),
            None => finding,
        });
        let saved = 1.0 - ratio(space[1] as f64, space[0] as f64);
        outcome.findings.push(Finding::new(PROPERTY, format!("{}: space saved", cell.name), saved, ""));
        raw.push(json!({ "cell": cell.name, "off": rates[0], "lz4": rates[1], "space": space }));
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// The rate of one run, and the bytes that the data files take afterwards.
fn run(setting: &Setting, cell: &Cell, method: &str, seed: u64) -> Result<(f64, u64)> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "datastore")?;
    let size = plan.disk_size.to_string();
    datastore.verb(&["disk", "create", DISK, "--size", &size, "--compression", method])?;
    let (server, _) = datastore.serve(&Serving::plain(plan.mode()), DISK)?;
    let endpoint = datastore.endpoint(DISK);
    let job = |pattern, block, depth, length| Job {
        pattern,
        block,
        depth,
        flush_each: false,
        length,
        size: plan.disk_size,
        seed: plan.seed + seed,
    };
    if cell.filled {
        let fill = job(Pattern::Write, LONG, 4, Length::Bytes(plan.disk_size));
        fio::run_compressible(&setting.scratch, &endpoint, &fill, FILL)?;
        setting.scratch.rest(datastore.path())?;
    }
    // A new disk is written once.
    let length = match cell.filled {
        true => Length::Time { seconds: plan.seconds, ramp: 1.0 },
        false => Length::Bytes(plan.disk_size),
    };
    let measured = job(cell.pattern, cell.block, cell.depth, length);
    let sample = fio::run_compressible(&setting.scratch, &endpoint, &measured, cell.compressible)?;
    server.service.stop()?;
    let allocated = scratch::data_allocated(datastore.path())?;
    setting.scratch.remove(datastore.path())?;
    Ok((sample.rate, allocated))
}
