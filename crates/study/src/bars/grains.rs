//! Bar 4 of VMware's formats: SEsparse and VMFSsparse against a thin flat disk, over sizes of requests, patterns, and
//! disks that are empty or full.
//!
//! A delta stands above an empty flat disk, as the first snapshot of a new disk leaves it. Writes to an empty disk are
//! a fixed number of bytes, no block twice, with a flush at the end that counts, each run to a fresh disk: every one of
//! them is a first write. The others last a set time. Random requests go 16 at a time, those in order 4 at a time,
//! which is what a guest's read-ahead and write-back keep up.

use super::{Setting, fill, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::{self, Job, Length, Pattern};
use crate::plan::Mode;
use crate::report::{Bar, Finding, Outcome, figure, table};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::{Value, json};

const BAR: Bar = Bar::Vmdk(4);
/// Least share of the flat disk's rate for requests in order ...
const SEQUENTIAL_SHARE_MIN: f64 = 0.9;
/// ... and for random ones.
const RANDOM_SHARE_MIN: f64 = 0.8;
/// "Never worse than VMFSsparse", as far as two equal disks can be told apart on a noisy machine.
const VMFSSPARSE_SHARE_MIN: f64 = 0.95;
/// The disk's size divided by this is written to an empty one.
const EMPTY_PART: u64 = 4;

const FLAT: usize = 0;
const VMFSSPARSE: usize = 1;
const SESPARSE: usize = 2;
const SIDES: [(&str, Option<&str>); 3] =
    [("flat", None), ("vmfssparse", Some("vmfssparse")), ("sesparse", Some("sesparse"))];
const BLOCKS_KIB: [u32; 8] = [4, 8, 16, 32, 64, 128, 256, 512];
const PATTERNS: [(Pattern, &str); 4] = [
    (Pattern::Read, "read"),
    (Pattern::RandomRead, "randread"),
    (Pattern::Write, "write"),
    (Pattern::RandomWrite, "randwrite"),
];

#[derive(Clone)]
struct Cell {
    name: String,
    pattern: Pattern,
    block: u32,
    full: bool,
}

impl Cell {
    fn all() -> Vec<Cell> {
        let mut cells = Vec::new();
        for (full, state) in [(false, "empty"), (true, "full")] {
            for (pattern, word) in PATTERNS {
                for kib in BLOCKS_KIB {
                    cells.push(Cell { name: format!("{state}-{word}-{kib}k"), pattern, block: kib << 10, full });
                }
            }
        }
        cells
    }

    /// A fresh disk for each run.
    fn first_writes(&self) -> bool {
        !self.full && self.pattern.writes()
    }

    fn share_min(&self) -> f64 {
        if self.pattern.random() { RANDOM_SHARE_MIN } else { SEQUENTIAL_SHARE_MIN }
    }
}

fn disk(state: &str, side: usize) -> String {
    format!("{state}-{}", SIDES[side].0)
}

/// Makes a disk: flat, or an empty delta above an empty flat one.
fn create(datastore: &Datastore, name: &str, side: usize, size: u64) -> Result<()> {
    let delta = SIDES[side].1;
    datastore.create_vmdk(name, size, "thin", delta)?;
    match delta {
        Some(_) => datastore.snapshot(name, "below").map(|_| ()),
        None => Ok(()),
    }
}

/// Measures it.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let all = Cell::all();
    let cells: Vec<&Cell> = all.iter().filter(|cell| plan.wants(&cell.name)).collect();
    if cells.is_empty() {
        return Err(no_cell(plan, &all.iter().map(|cell| cell.name.as_str()).collect::<Vec<_>>()));
    }
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "grains")?;
    for side in 0..SIDES.len() {
        create(&datastore, &disk("full", side), side, plan.disk_size)?;
        create(&datastore, &disk("empty", side), side, plan.disk_size)?;
    }
    let mode = plan.mode();
    let (server, _) = datastore.serve(&Serving::plain(mode), &disk("full", FLAT))?;
    if cells.iter().any(|cell| cell.full) {
        for (side, (word, _)) in SIDES.iter().enumerate() {
            say(&format!("filling a disk of {word}"));
            fill(&datastore.endpoint(&disk("full", side)), plan.disk_size)?;
        }
    }
    let mut outcome = Outcome::default();
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for cell in cells {
        say(&cell.name);
        let rates = measure_cell(setting, &datastore, mode, cell)?;
        let medians: Vec<f64> = rates.iter().map(|all| median(all)).collect();
        judge(cell, &medians, &mut outcome);
        let mut row = vec![cell.name.clone()];
        row.extend(medians.iter().map(|rate| figure(rate * f64::from(cell.block) / f64::from(1 << 20))));
        row.extend([VMFSSPARSE, SESPARSE].map(|side| figure(ratio(medians[side], medians[FLAT]))));
        row.push(figure(ratio(medians[SESPARSE], medians[VMFSSPARSE])));
        rows.push(row);
        raw.push(json!({ "cell": cell.name, "flat": rates[0], "vmfssparse": rates[1], "sesparse": rates[2] }));
    }
    let head =
        ["cell (MiB/s)", "flat", "vmfssparse", "sesparse", "vmfssparse/flat", "sesparse/flat", "sesparse/vmfssparse"];
    println!("{}", table(&head, &rows));
    server.service.stop()?;
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn measure_cell(setting: &Setting, datastore: &Datastore, mode: Mode, cell: &Cell) -> Result<Vec<Vec<f64>>> {
    let plan = &setting.plan;
    let mut rates = vec![Vec::new(); SIDES.len()];
    for run in 0..plan.runs as usize {
        for turn in 0..SIDES.len() {
            let side = (turn + run) % SIDES.len();
            let mut name = disk(if cell.full { "full" } else { "empty" }, side);
            let mut length = Length::Time { seconds: plan.seconds, ramp: plan.ramp };
            if cell.first_writes() {
                name = "fresh".to_string();
                create(datastore, &name, side, plan.disk_size)?;
                length = Length::Bytes(plan.disk_size / EMPTY_PART);
            }
            setting.scratch.settle()?;
            match mode {
                Mode::Direct => scratch::drop_cached(datastore.path())?,
                Mode::Buffered if cell.pattern.writes() => {}
                Mode::Buffered => scratch::warm(&datastore.images(&name))?,
            }
            let job = Job {
                pattern: cell.pattern,
                block: cell.block,
                depth: if cell.pattern.random() { 16 } else { 4 },
                flush_each: false,
                length,
                size: plan.disk_size,
                seed: plan.seed + run as u64,
            };
            rates[side].push(fio::run(&setting.scratch, &datastore.endpoint(&name), &job)?.rate);
            if cell.first_writes() {
                datastore.delete(&name)?;
            }
        }
    }
    Ok(rates)
}

fn judge(cell: &Cell, medians: &[f64], outcome: &mut Outcome) {
    let share = |side: usize, of: usize| ratio(medians[side], medians[of]);
    outcome.findings.extend([
        Finding::at_least(
            BAR,
            format!("{}: SEsparse's share of flat", cell.name),
            share(SESPARSE, FLAT),
            cell.share_min(),
            "",
        ),
        Finding::at_least(
            BAR,
            format!("{}: SEsparse's share of VMFSsparse", cell.name),
            share(SESPARSE, VMFSSPARSE),
            VMFSSPARSE_SHARE_MIN,
            "",
        ),
        Finding::note(BAR, format!("{}: VMFSsparse's share of flat", cell.name), share(VMFSSPARSE, FLAT), ""),
    ]);
}
