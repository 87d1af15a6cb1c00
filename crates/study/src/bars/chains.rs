//! Random 4 KiB reads through 32 levels of deltas, compared with the flat base alone.
//!
//! Every block is in a random level, so that adjacent blocks are rarely in the same level. Each block then needs its
//! own entry of the metadata cache, which is the worst case. Two sizes of disk are measured: one whose entries all fit
//! into the cache, after the disk was read once, and one with several times as many blocks as the cache has entries.
//! Base and deltas have the same blocks in the page cache, so that only the lookups differ. Two equal bases are
//! measured; the difference between their rates is the noise of the machine.

use super::layout::{Spread, snapshot_name};
use super::slices::{self, Slice, share};
use super::{BLOCK, Setting, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::{Error, Result};
use crate::fio::Pattern;
use crate::nbd::{Client, Request};
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, ratio};
use serde_json::{Value, json};

const PROPERTY: &str = "deep chains";
/// Least rate with a warm cache, as a share of the base's rate.
const WARM_SHARE_MIN: f64 = 0.95;
/// Least rate with a cache that is too small, as a share of the base's rate.
const OVERFLOWING_SHARE_MIN: f64 = 0.6;
/// Most memory for each entry of the metadata cache, in bytes.
const ENTRY_MEMORY_MAX: f64 = 32.0;
/// Default size of the metadata cache of a disk, in entries.
const ENTRIES: u64 = 65_536;
const DEPTH: u32 = 32;

const FORMATS: [&str; 3] = ["vmfssparse", "sesparse", "vsansparse"];
/// Requests in flight.
const DEPTHS: [u32; 2] = [1, 16];

struct CacheShare {
    word: &'static str,
    /// Number of blocks of the disk, divided by half the number of cache entries.
    halves: u64,
    share_min: f64,
}

const STATES: [CacheShare; 2] = [
    CacheShare { word: "warm", halves: 1, share_min: WARM_SHARE_MIN },
    CacheShare { word: "overflowing", halves: 8, share_min: OVERFLOWING_SHARE_MIN },
];

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let name = |state: &CacheShare, depth: u32| format!("{}-randread-4k-qd{depth}", state.word);
    let all: Vec<String> = STATES.iter().flat_map(|state| DEPTHS.map(|depth| name(state, depth))).collect();
    if !all.iter().any(|cell| plan.wants(cell)) {
        return Err(no_cell(plan, &all));
    }
    let mut outcome = Outcome::default();
    let mut raw = Vec::new();
    for state in STATES.iter().filter(|state| DEPTHS.iter().any(|depth| plan.wants(&name(state, *depth)))) {
        // A short run uses half as many blocks, which are still too many for the cache.
        let halves = if plan.quick { state.halves.div_ceil(2) } else { state.halves };
        let size = ENTRIES * BLOCK * halves / 2;
        let datastore = Datastore::init(&setting.lamina, &setting.scratch, &format!("chains-{}", state.word))?;
        let disks = build(setting, &datastore, state, size)?;
        // The server is restarted, so that its caches are empty of data from the time when the levels were written.
        let (server, _) = datastore.serve(&Serving::plain(plan.mode()), &disks[0].0)?;
        for (disk, _) in &disks {
            if disk != BASE && disk != OTHER_BASE {
                datastore.verb(&["disk", "tune", disk, "--metadata-entries", &ENTRIES.to_string()])?;
            }
            read_all(&datastore, disk, size)?;
        }
        scratch::warm(datastore.path())?;
        for depth in DEPTHS.into_iter().filter(|depth| plan.wants(&name(state, *depth))) {
            let cell = name(state, depth);
            say(&cell);
            let rates = measure_cell(setting, &datastore, &disks, size, depth)?;
            judge(state, &cell, &disks, &rates, &mut outcome);
            raw.push(json!({ "cell": cell, "disks": disks.iter().map(|d| &d.1).collect::<Vec<_>>(), "rates": rates }));
        }
        for (disk, format) in disks.iter().skip(2) {
            let statistics = datastore.statistics(disk)?;
            memory(state, format, &statistics, &mut outcome)?;
            raw.push(json!({ "state": state.word, "format": format, "statistics": statistics }));
        }
        server.service.stop()?;
        setting.scratch.remove(datastore.path())?;
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

const BASE: &str = "base";
const OTHER_BASE: &str = "other-base";

/// Creates two flat disks, and one with 32 levels for each format, all with the same content; returns names and
/// formats.
fn build(setting: &Setting, datastore: &Datastore, state: &CacheShare, size: u64) -> Result<Vec<(String, String)>> {
    let mut disks = vec![(BASE.to_string(), "flat".to_string()), (OTHER_BASE.to_string(), "flat".to_string())];
    for (disk, _) in &disks {
        datastore.create_vmdk(disk, size, "thin", None)?;
    }
    for format in FORMATS {
        disks.push((format!("deep-{format}"), format.to_string()));
        datastore.create_vmdk(&format!("deep-{format}"), size, "thin", Some(format))?;
    }
    let (server, _) = datastore.serve(&Serving::plain(setting.plan.mode()), BASE)?;
    for (disk, format) in &disks {
        say(&format!("{}: writing {format}", state.word));
        let depth = if format == "flat" { 0 } else { DEPTH };
        let spread = Spread { piece: BLOCK, size, depth, seed: setting.plan.seed };
        for level in 0..=depth {
            spread.write(&datastore.endpoint(disk), level)?;
            if level < depth {
                datastore.snapshot(disk, &snapshot_name(level))?;
            }
        }
    }
    server.service.stop()?;
    Ok(disks)
}

/// Reads a disk sequentially.
fn read_all(datastore: &Datastore, disk: &str, size: u64) -> Result<()> {
    const STEP: u64 = 1 << 20;
    let endpoint = datastore.endpoint(disk);
    let requests =
        (0..size.div_ceil(STEP)).map(|i| Request::Read { offset: i * STEP, length: STEP.min(size - i * STEP) as u32 });
    Client::connect(&endpoint.socket, &endpoint.export)?.run(4, requests, |_| ()).map(|_| ())
}

fn measure_cell(
    setting: &Setting,
    datastore: &Datastore,
    disks: &[(String, String)],
    size: u64,
    depth: u32,
) -> Result<Vec<Vec<f64>>> {
    let plan = &setting.plan;
    let slice = Slice {
        pattern: Pattern::RandomRead,
        block: BLOCK as u32,
        depth,
        flush_each: false,
        size,
        seconds: slices::seconds(plan),
    };
    let connect = |(disk, _): &(String, String)| {
        let endpoint = datastore.endpoint(disk);
        Client::connect(&endpoint.socket, &endpoint.export)
    };
    let mut clients = disks.iter().map(connect).collect::<Result<Vec<_>>>()?;
    let mut rates = vec![Vec::new(); disks.len()];
    for round in 0..slices::rounds(plan) {
        for turn in 0..disks.len() {
            let side = (turn + round) % disks.len();
            rates[side].push(slice.run(&mut clients[side], plan.seed + round as u64)?);
        }
    }
    Ok(rates)
}

fn judge(state: &CacheShare, cell: &str, disks: &[(String, String)], rates: &[Vec<f64>], outcome: &mut Outcome) {
    outcome.findings.push(Finding::new(PROPERTY, format!("{cell} of the flat base"), median(&rates[0]), "/s"));
    for ((disk, format), of) in disks.iter().zip(rates).skip(1) {
        let share = share(of, &rates[0]);
        outcome.findings.push(if disk == OTHER_BASE {
            Finding::new(PROPERTY, format!("{cell}, another flat disk: share (noise)"), share, "")
        } else {
            let what = format!("{cell}, {DEPTH} levels of {format}: share of the base");
            Finding::new(PROPERTY, what, share, "").at_least(state.share_min)
        });
    }
}

/// Memory per entry, according to the statistics of the cache.
fn memory(state: &CacheShare, format: &str, statistics: &Value, outcome: &mut Outcome) -> Result<()> {
    let metadata = &statistics["metadata"];
    let field = |name: &str| {
        metadata[name].as_f64().ok_or_else(|| Error::Answer(format!("disk stats has no metadata.{name}: {statistics}")))
    };
    let (entries, bytes) = (field("entries")?, field("memory")?);
    let (hits, misses) = (field("hits")?, field("misses")?);
    let what = |text: &str| format!("{} {format}: {text}", state.word);
    outcome.findings.extend([
        Finding::new(PROPERTY, what("hit rate"), ratio(hits, hits + misses), ""),
        Finding::new(PROPERTY, what("entries"), entries, ""),
        Finding::new(PROPERTY, what("memory of an entry"), ratio(bytes, entries), "bytes").at_most(ENTRY_MEMORY_MAX),
    ]);
    Ok(())
}
