//! SEsparse and VMFSsparse compared with a thin flat disk, for several request sizes and patterns, on empty and on full
//! disks.
//!
//! A delta is based on an empty flat disk, as after the first snapshot of a new disk. Writes to an empty disk have a
//! fixed number of bytes, no block is written twice, and each run uses a new disk, so that all writes are first writes.
//! The rate including a final flush is also reported. Other cells are measured in short slices, with the formats in
//! turn. Random requests are sent 16 at a time, sequential ones 4 at a time, as a guest's read-ahead and write-back do.
//! Full disks are filled with the same requests through the same server, and all data is written back before a slice
//! begins.

use super::slices::{self, Slice, share};
use super::{Setting, fill, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::{Error, Result};
use crate::fio::Pattern;
use crate::nbd::Client;
use crate::plan::Mode;
use crate::report::{self, Finding, Outcome, figure, table};
use crate::statistics::median;
use crate::{process, scratch};
use serde_json::{Map, Value, json};
use std::time::Duration;

const PROPERTY: &str = "grain formats";
/// Least rate of sequential requests, as a share of the flat disk's rate.
const SEQUENTIAL_SHARE_MIN: f64 = 0.9;
/// Least rate of random requests, as a share of the flat disk's rate.
const RANDOM_SHARE_MIN: f64 = 0.8;
/// Least rate, as a share of VMFSsparse's rate. It is below 1, because even the rates of equal disks differ by noise.
const VMFSSPARSE_SHARE_MIN: f64 = 0.95;
/// Divisor of the disk's size for the bytes written to an empty disk.
const EMPTY_PART: u64 = 8;
/// Most requests written to an empty disk.
const EMPTY_REQUESTS_MAX: u64 = 16 << 10;

/// Pause between checks whether the server has detected that a client has disconnected, and the number of checks.
const LEAVING_PAUSE: Duration = Duration::from_millis(5);
const LEAVING_PAUSES: u32 = 200;

/// Suffix of the names of cells whose rate includes a flush.
const FLUSHED: &str = "with a flush";

/// Rates by side and round.
type Rates = Vec<Vec<f64>>;

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

    /// Whether each run needs a new disk.
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

/// Creates a disk: a flat one, or an empty delta based on an empty flat disk.
fn create(datastore: &Datastore, name: &str, side: usize, size: u64) -> Result<()> {
    let delta = SIDES[side].1;
    datastore.create_vmdk(name, size, "thin", delta)?;
    match delta {
        Some(_) => datastore.snapshot(name, "below").map(|_| ()),
        None => Ok(()),
    }
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let all = Cell::all();
    let cells: Vec<&Cell> = all.iter().filter(|cell| plan.wants(&cell.name)).collect();
    if cells.is_empty() {
        return Err(no_cell(plan, &all.iter().map(|cell| cell.name.as_str()).collect::<Vec<_>>()));
    }
    let raw = if plan.merge { report::earlier(&setting.results, "grains")? } else { run(setting, &cells)? };
    let mut outcome = Outcome::default();
    let mut rows = Vec::new();
    for cell in cells {
        let Some(found) = raw.iter().find(|found| found["cell"] == cell.name.as_str()) else {
            return Err(Error::Answer(format!("no results of {}: measure it first", cell.name)));
        };
        let rates = by_side(found);
        judge(cell, &rates, &mut outcome);
        if cell.first_writes() {
            let flushed = by_side(&found[FLUSHED]);
            let what = format!("{} with a flush: SEsparse's rate against flat", cell.name);
            outcome.findings.push(Finding::new(PROPERTY, what, share(&flushed[SESPARSE], &flushed[FLAT]), ""));
        }
        let mut row = vec![cell.name.clone()];
        row.extend(rates.iter().map(|rates| figure(median(rates) * f64::from(cell.block) / f64::from(1 << 20))));
        row.extend([VMFSSPARSE, SESPARSE].map(|side| figure(share(&rates[side], &rates[FLAT]))));
        row.push(figure(share(&rates[SESPARSE], &rates[VMFSSPARSE])));
        rows.push(row);
    }
    let head =
        ["cell (MiB/s)", "flat", "vmfssparse", "sesparse", "vmfssparse/flat", "sesparse/flat", "sesparse/vmfssparse"];
    println!("{}", table(&head, &rows));
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn by_side(found: &Value) -> [Vec<f64>; 3] {
    SIDES.map(|(word, _)| found[word].as_array().into_iter().flatten().filter_map(Value::as_f64).collect())
}

/// Measures the given cells for each side.
fn run(setting: &Setting, cells: &[&Cell]) -> Result<Vec<Value>> {
    let plan = &setting.plan;
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
    let mut raw = Vec::new();
    for cell in cells {
        say(&cell.name);
        let (rates, flushed) = match cell.first_writes() {
            true => measure_first_writes(setting, &datastore, cell)?,
            false => (measure_slices(setting, &datastore, mode, cell)?, Vec::new()),
        };
        let by_side = |rates: &[Vec<f64>]| {
            SIDES.iter().zip(rates).map(|((word, _), rates)| (word.to_string(), json!(rates))).collect::<Map<_, _>>()
        };
        let mut found = by_side(&rates);
        found.insert("cell".into(), json!(cell.name));
        found.insert(FLUSHED.into(), Value::Object(by_side(&flushed)));
        raw.push(Value::Object(found));
    }
    server.service.stop()?;
    Ok(raw)
}

/// Deletes a disk after the server has detected that its client has disconnected.
fn delete(datastore: &Datastore, name: &str) -> Result<()> {
    for _ in 0..LEAVING_PAUSES {
        if datastore.delete(name).is_ok() {
            return Ok(());
        }
        process::pause(LEAVING_PAUSE)?;
    }
    datastore.delete(name)
}

fn slice(setting: &Setting, cell: &Cell) -> Slice {
    Slice {
        pattern: cell.pattern,
        block: cell.block,
        depth: if cell.pattern.random() { 16 } else { 4 },
        flush_each: false,
        size: setting.plan.disk_size,
        seconds: slices::seconds(&setting.plan),
    }
}

/// Measures first writes, with a new disk for each run.
fn measure_first_writes(setting: &Setting, datastore: &Datastore, cell: &Cell) -> Result<(Rates, Rates)> {
    let plan = &setting.plan;
    let slice = slice(setting, cell);
    let bytes = (plan.disk_size / EMPTY_PART).min(EMPTY_REQUESTS_MAX * u64::from(cell.block));
    let (mut rates, mut flushed) = (vec![Vec::new(); SIDES.len()], vec![Vec::new(); SIDES.len()]);
    for run in 0..slices::rounds(plan) {
        for turn in 0..SIDES.len() {
            let side = (turn + run) % SIDES.len();
            create(datastore, "fresh", side, plan.disk_size)?;
            setting.scratch.settle()?;
            let mut client = connect(datastore, "fresh")?;
            let [without, with] = slice.run_once(&mut client, bytes, plan.seed + run as u64)?;
            rates[side].push(without);
            flushed[side].push(with);
            drop(client);
            delete(datastore, "fresh")?;
        }
    }
    Ok((rates, flushed))
}

fn measure_slices(setting: &Setting, datastore: &Datastore, mode: Mode, cell: &Cell) -> Result<Rates> {
    let plan = &setting.plan;
    let slice = slice(setting, cell);
    let names = [FLAT, VMFSSPARSE, SESPARSE].map(|side| disk(if cell.full { "full" } else { "empty" }, side));
    let mut clients = Vec::new();
    for name in &names {
        clients.push(connect(datastore, name)?);
        if mode == Mode::Buffered && !cell.pattern.writes() {
            scratch::warm(&datastore.images(name))?;
        }
    }
    setting.scratch.settle()?;
    let mut rates = vec![Vec::new(); SIDES.len()];
    // The first round is not counted, because it includes work that is done only once.
    for round in 0..=slices::rounds(plan) {
        for turn in 0..SIDES.len() {
            let side = (turn + round) % SIDES.len();
            if cell.pattern.writes() {
                setting.scratch.settle()?;
            }
            if mode == Mode::Direct {
                scratch::drop_cached(&datastore.images(&names[side]))?;
            }
            let rate = slice.run(&mut clients[side], plan.seed + round as u64)?;
            if round > 0 {
                rates[side].push(rate);
            }
        }
    }
    // Flushes, so that no data of this cell is written during the next one.
    clients.iter_mut().try_for_each(|client| if cell.pattern.writes() { client.flush() } else { Ok(()) })?;
    Ok(rates)
}

fn connect(datastore: &Datastore, name: &str) -> Result<Client> {
    let endpoint = datastore.endpoint(name);
    Client::connect(&endpoint.socket, &endpoint.export)
}

fn judge(cell: &Cell, rates: &[Vec<f64>; 3], outcome: &mut Outcome) {
    let share = |side: usize, of: usize| share(&rates[side], &rates[of]);
    outcome.findings.extend([
        Finding::new(PROPERTY, format!("{}: SEsparse's rate against flat", cell.name), share(SESPARSE, FLAT), "")
            .at_least(cell.share_min()),
        Finding::new(
            PROPERTY,
            format!("{}: SEsparse's rate against VMFSsparse", cell.name),
            share(SESPARSE, VMFSSPARSE),
            "",
        )
        .at_least(VMFSSPARSE_SHARE_MIN),
        Finding::new(PROPERTY, format!("{}: VMFSsparse's rate against flat", cell.name), share(VMFSSPARSE, FLAT), ""),
    ]);
}
