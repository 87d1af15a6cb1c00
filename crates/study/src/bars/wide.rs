//! Random 4 KiB blocks scattered over a disk of 16 TiB, so that no two share an extent and few share a leaf of the map.
//!
//! The blocks that were written are read. The same reads with a metadata cache far larger than the map show the rate
//! with a fully cached map. All sides first read every block once, and are then measured in turn. With `--baseline`,
//! another lamina program also reads these blocks, with the small cache and without data in the page cache. Its 99th
//! percentile of latency is compared: it shows how long a read waits while other reads miss the metadata cache.

use super::{BLOCK, Setting, say, write_blocks};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{largest, median, percentile, ratio};
use serde_json::json;
use std::time::{Duration, Instant};

/// Name of the measured property in the report.
const PROPERTY: &str = "16 TiB map";

const CAPACITY: u64 = 16 << 40;
/// Limit of the process's memory with default options.
const RESIDENT_MAX: f64 = 256.0 * 1024.0 * 1024.0;
/// Limit of the time for opening, and of the time until the first block is read.
const OPEN_MAX_MS: f64 = 1000.0;
/// Least rate, relative to a fully cached map.
const SHARE_MIN: f64 = 0.8;
/// Size of a metadata cache that can contain the map of any planned number of blocks.
const AMPLE_CACHE: u64 = 4 << 30;
/// Size of a metadata cache that can contain only a small part of the map.
const TIGHT_CACHE: u64 = 16 << 20;
const READ_DEPTH: usize = 16;
/// Most 99th percentile of latency with the small cache, relative to that of the baseline.
const BASELINE_P99_MAX: f64 = 0.5;
const DISK: &str = "wide";

/// The blocks that are written, derived from a seed. Repetitions are rare and have no effect on the result.
fn places(seed: u64, count: u32) -> impl Iterator<Item = u64> {
    let mut random = Random::new(seed);
    (0..count).map(move |_| random.below(CAPACITY / BLOCK))
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "wide")?;
    datastore.create(DISK, CAPACITY)?;
    let plain = Serving::plain(plan.mode());
    say(&format!("writing {} blocks over 16 TiB", plan.blocks));
    let (server, _) = datastore.serve(&plain, DISK)?;
    let began = Instant::now();
    write_blocks(&server.endpoint, places(plan.seed, plan.blocks), BLOCK)?;
    let written = f64::from(plan.blocks) / began.elapsed().as_secs_f64();
    let (_, writing) = server.service.resident()?;
    server.service.stop()?;

    say("opening the datastore cold");
    let mut opened = Vec::new();
    for run in 0..plan.runs {
        setting.scratch.settle()?;
        scratch::drop_cached(datastore.path())?;
        let began = Instant::now();
        let (server, _) = datastore.serve(&plain, DISK)?;
        let place = places(plan.seed, run + 1).last().unwrap_or(0);
        let mut client = Client::connect(&server.endpoint.socket, DISK)?;
        client.run(1, [Request::Read { offset: place * BLOCK, length: BLOCK as u32 }], |_| ())?;
        opened.push(began.elapsed().as_secs_f64() * 1e3);
        drop(client);
        server.service.stop()?;
    }

    let baseline = setting.baseline.as_ref().map(|program| -> Result<Datastore> {
        say("writing the same blocks with the baseline");
        let datastore = Datastore::init(program, &setting.scratch, "baseline")?;
        datastore.create(DISK, CAPACITY)?;
        let (server, _) = datastore.serve(&plain, DISK)?;
        write_blocks(&server.endpoint, places(plan.seed, plan.blocks), BLOCK)?;
        server.service.stop()?;
        Ok(datastore)
    });
    let baseline = baseline.transpose()?;

    say("reading with the default cache, an ample and a tight one");
    let mut sides = vec![
        Side::new("default", &datastore, None),
        Side::new("ample", &datastore, Some(AMPLE_CACHE)),
        Side::new("tight", &datastore, Some(TIGHT_CACHE)),
    ];
    sides.extend(baseline.iter().map(|datastore| Side::new("baseline, tight", datastore, Some(TIGHT_CACHE))));
    let places: Vec<u64> = places(plan.seed, plan.blocks).collect();
    for run in 0..plan.runs as usize {
        for turn in 0..sides.len() {
            let number = (turn + run) % sides.len();
            sides[number].measure(setting, &places, run as u64)?;
        }
    }
    let [default, ample, tight] = [0, 1, 2].map(|i| median(&sides[i].rates));
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let resident = largest(&sides[0].residents).max(writing as f64);
    let mut findings = vec![
        Finding::new(PROPERTY, "random writes while the map grows", written, "/s"),
        Finding::new(PROPERTY, "most resident memory, writing and reading", mib(resident), "MiB")
            .at_most(mib(RESIDENT_MAX)),
        Finding::new(PROPERTY, "cold opening to the first block read", median(&opened), "ms").at_most(OPEN_MAX_MS),
        Finding::new(PROPERTY, "random reads, map fully cached", ample, "/s"),
        Finding::new(PROPERTY, "random reads, default cache: share of fully cached", ratio(default, ample), "")
            .at_least(SHARE_MIN),
        Finding::new(PROPERTY, "random reads, 16 MiB cache: share of fully cached", ratio(tight, ample), ""),
    ];
    for side in &sides {
        findings.push(Finding::new(PROPERTY, format!("random reads, {}: p99", side.name), median(&side.p99), "us"));
    }
    if let Some(baseline) = sides.get(3) {
        let share = ratio(median(&sides[2].p99), median(&baseline.p99));
        findings.push(
            Finding::new(PROPERTY, "p99 with a 16 MiB cache: ratio to the baseline's p99", share, "")
                .at_most(BASELINE_P99_MAX),
        );
    }
    let sides: Vec<_> = sides.iter().map(Side::described).collect();
    let raw = json!({
        "blocks": plan.blocks, "write_rate": written, "resident_writing": writing, "open_ms": opened,
        "sides": sides,
    });
    Ok(Outcome { findings, raw })
}

/// One side: reads of one program with one cache size.
struct Side<'a> {
    name: &'static str,
    datastore: &'a Datastore,
    cache: Option<u64>,
    rates: Vec<f64>,
    /// The 99th percentile of latency in microseconds, for each run.
    p99: Vec<f64>,
    residents: Vec<f64>,
}

impl<'a> Side<'a> {
    fn new(name: &'static str, datastore: &'a Datastore, cache: Option<u64>) -> Self {
        Self { name, datastore, cache, rates: Vec::new(), p99: Vec::new(), residents: Vec::new() }
    }

    fn measure(&mut self, setting: &Setting, places: &[u64], run: u64) -> Result<()> {
        let plan = &setting.plan;
        let serving = Serving { metadata_cache: self.cache, ..Serving::plain(plan.mode()) };
        let (server, _) = self.datastore.serve(&serving, DISK)?;
        // The first read covers every leaf of the map at least once, and the data too.
        read(&server.endpoint, places, plan.seed, None)?;
        if self.cache == Some(TIGHT_CACHE) {
            // Pages of the map that the cache misses must be read from storage, not from the page cache.
            setting.scratch.settle()?;
            scratch::drop_cached(self.datastore.path())?;
        }
        let time = Duration::from_secs_f64(plan.seconds);
        let (rate, latencies) = read(&server.endpoint, places, plan.seed + 1 + run, Some(time))?;
        self.rates.push(rate);
        self.p99.push(percentile(&latencies, 0.99));
        self.residents.push(server.service.resident()?.1 as f64);
        server.service.stop()?;
        Ok(())
    }

    fn described(&self) -> serde_json::Value {
        json!({
            "name": self.name, "cache": self.cache, "rates": self.rates, "p99_us": self.p99, "resident": self.residents,
        })
    }
}

/// Reads all blocks once, or random blocks for some time. Returns requests per second, and the latency of each request
/// in microseconds.
fn read(endpoint: &Endpoint, places: &[u64], seed: u64, time: Option<Duration>) -> Result<(f64, Vec<f64>)> {
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let began = Instant::now();
    let mut latencies = Vec::new();
    let mut done = |timing: crate::nbd::Timing| latencies.push(timing.microseconds());
    let request = |place: u64| Request::Read { offset: place * BLOCK, length: BLOCK as u32 };
    let count = match time {
        None => client.run(READ_DEPTH, places.iter().map(|p| request(*p)), &mut done)?,
        Some(time) => {
            let mut random = Random::new(seed);
            let requests = std::iter::from_fn(|| {
                let place = places[random.below(places.len() as u64) as usize];
                (began.elapsed() < time).then(|| request(place))
            });
            client.run(READ_DEPTH, requests, &mut done)?
        }
    };
    process::go_on()?;
    Ok((ratio(count as f64, began.elapsed().as_secs_f64()), latencies))
}
