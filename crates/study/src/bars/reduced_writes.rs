//! Writes and reads of disks whose new data is compressed, compared with stored data, or both when it is written,
//! against those of a disk with neither.
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

const PROPERTY: &str = "reduced writes";
const DISK: &str = "disk";
/// Bytes of each request of long writes.
const LONG: u32 = 512 << 10;
/// Part of each block, in percent, that disks are filled with before a cell.
const FILL: u32 = 50;

/// The most space, in relation to that of the packed disk, after it was overwritten and was idle.
const GROWTH_MOST: f64 = 1.2;

/// The settings of a disk.
struct Side {
    name: &'static str,
    compression: &'static str,
    dedup: &'static str,
}

const OFF: Side = Side { name: "off", compression: "off", dedup: "off" };
const SIDES: [Side; 3] = [
    Side { name: "lz4", compression: "lz4", dedup: "off" },
    Side { name: "dedup", compression: "off", dedup: "datastore" },
    Side { name: "both", compression: "lz4", dedup: "datastore" },
];

/// What a disk contains before a cell.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    /// Blocks that can be compressed by [`FILL`] percent.
    Data,
    /// The same block everywhere.
    OneBlock,
}

struct Cell {
    name: &'static str,
    pattern: Pattern,
    block: u32,
    depth: u32,
    /// Part of each block, in percent, that can be compressed.
    compressible: u32,
    before: Before,
    /// How often the disk is overwritten completely. 0 for a run of the plan's time.
    times: u64,
    /// Least rate of each of [`SIDES`] in relation to [`OFF`]; 0 if there is none.
    least: [f64; 3],
}

/// The results of one run.
struct Run {
    rate: f64,
    /// Bytes that the data files take afterwards.
    space: u64,
    /// The same after idle time in relation to what they took before, for cells that overwrite the disk completely.
    growth: Option<f64>,
}

const OVERWRITES: Cell = Cell {
    name: "random 4 KiB overwrites",
    pattern: Pattern::RandomWrite,
    block: BLOCK as u32,
    depth: 16,
    compressible: FILL,
    before: Before::Data,
    times: 0,
    least: [0.85, 0.7, 0.65],
};
const LONG_WRITES: Cell = Cell {
    name: "sequential 512 KiB, not compressible",
    pattern: Pattern::Write,
    block: LONG,
    depth: 4,
    compressible: 0,
    before: Before::Nothing,
    times: 0,
    least: [0.8, 0.8, 0.8],
};
const READS: Cell =
    Cell { name: "random 4 KiB reads", pattern: Pattern::RandomRead, least: [0.85, 0.85, 0.85], ..OVERWRITES };
const CELLS: [Cell; 8] = [
    OVERWRITES,
    Cell { name: "random 4 KiB, overwritten five times", times: 5, least: [0.7; 3], ..OVERWRITES },
    Cell { name: "random 4 KiB, new blocks", before: Before::Nothing, ..OVERWRITES },
    LONG_WRITES,
    Cell { name: "sequential 512 KiB, 50 %", compressible: 50, least: [0.0; 3], ..LONG_WRITES },
    Cell { name: "sequential 512 KiB, 75 %", compressible: 75, least: [0.0; 3], ..LONG_WRITES },
    READS,
    Cell {
        name: "random 4 KiB reads of one block",
        depth: 128,
        before: Before::OneBlock,
        least: [0.0, 1.0, 0.0],
        ..READS
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
        let sides: Vec<&Side> = std::iter::once(&OFF).chain(&SIDES).collect();
        let (mut rates, mut growth) = (vec![Vec::new(); sides.len()], vec![Vec::new(); sides.len()]);
        let mut space = vec![0; sides.len()];
        for round in 0..setting.plan.runs {
            for (number, side) in sides.iter().enumerate() {
                say(&format!("{}: {}, run {}", cell.name, side.name, round + 1));
                let run = run(setting, cell, side, u64::from(round))?;
                say(&format!("  {:.0} requests a second", run.rate));
                rates[number].push(run.rate);
                growth[number].extend(run.growth);
                space[number] = run.space;
            }
        }
        for (number, side) in sides.iter().enumerate().skip(1) {
            let of = ratio(median(&rates[number]), median(&rates[0]));
            let finding = Finding::new(PROPERTY, format!("{}: {}, rate against off", cell.name, side.name), of, "");
            let least = cell.least[number - 1];
            outcome.findings.push(if least > 0.0 { finding.at_least(least) } else { finding });
            let saved = 1.0 - ratio(space[number] as f64, space[0] as f64);
            let what = format!("{}: {}, space saved", cell.name, side.name);
            outcome.findings.push(Finding::new(PROPERTY, what, saved, ""));
            if !growth[number].is_empty() {
                let what = format!("{}: {}, space after idle time against before", cell.name, side.name);
                let growth = Finding::new(PROPERTY, what, median(&growth[number]), "");
                outcome.findings.push(growth.at_most(GROWTH_MOST));
            }
        }
        let names: Vec<&str> = sides.iter().map(|side| side.name).collect();
        raw.push(json!({ "cell": cell.name, "sides": names, "rates": rates, "space": space, "growth": growth }));
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// One run of a cell on a new disk.
fn run(setting: &Setting, cell: &Cell, side: &Side, seed: u64) -> Result<Run> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "datastore")?;
    let size = plan.disk_size.to_string();
    let reduction = ["--compression", side.compression, "--dedup", side.dedup];
    datastore.verb(&[&["disk", "create", DISK, "--size", &size], &reduction[..]].concat())?;
    let job = |pattern, block, depth, length| Job {
        pattern,
        block,
        depth,
        flush_each: false,
        length,
        size: plan.disk_size,
        seed: plan.seed + seed,
    };
    let (mut server, _) = datastore.serve(&Serving::plain(plan.mode()), DISK)?;
    let endpoint = datastore.endpoint(DISK);
    if cell.before != Before::Nothing {
        let fill = job(Pattern::Write, LONG, 4, Length::Bytes(plan.disk_size));
        match cell.before {
            Before::OneBlock => fio::run_repeating(&setting.scratch, &endpoint, &fill)?,
            _ => fio::run_compressible(&setting.scratch, &endpoint, &fill, FILL)?,
        };
    }
    // What the passes of a server do in idle time.
    let idle = || -> Result<u64> {
        if side.compression != "off" || side.dedup != "off" {
            let dedup = if side.dedup == "off" { "off" } else { "disk" };
            datastore.verb(&["disk", "optimize", DISK, "--compression", side.compression, "--dedup", dedup])?;
        }
        scratch::data_allocated(datastore.path())
    };
    let mut packed = 0;
    if cell.times > 0 || cell.before == Before::OneBlock && side.dedup != "off" {
        server.service.stop()?;
        packed = idle()?;
        (server, _) = datastore.serve(&Serving::plain(plan.mode()), DISK)?;
    }
    setting.scratch.rest(datastore.path())?;
    let length = match (cell.before, cell.pattern) {
        _ if cell.times > 0 => Length::Bytes(cell.times * plan.disk_size),
        // A new disk is written once.
        (Before::Nothing, Pattern::Write) => Length::Bytes(plan.disk_size),
        _ => Length::Time { seconds: plan.seconds, ramp: 1.0 },
    };
    let measured = job(cell.pattern, cell.block, cell.depth, length);
    let sample = fio::run_compressible(&setting.scratch, &endpoint, &measured, cell.compressible)?;
    server.service.stop()?;
    let space = scratch::data_allocated(datastore.path())?;
    let growth = if cell.times > 0 { Some(idle()? as f64 / packed as f64) } else { None };
    setting.scratch.remove(datastore.path())?;
    Ok(Run { rate: sample.rate, space, growth })
}
