//! Bar 8: random 4 KiB blocks scattered over a disk of 16 TiB, so that no two share an extent and hardly two a leaf of
//! the map.
//!
//! Reads go to blocks that were written. The same reads with a metadata cache far larger than the map are what a fully
//! cached map gives; both sides warm up first, and take turns.

use super::{BLOCK, Setting, say, write_blocks};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{largest, median, ratio};
use serde_json::json;
use std::time::{Duration, Instant};

const CAPACITY: u64 = 16 << 40;
/// Default bound of the process's memory.
const RESIDENT_MAX: f64 = 256.0 * 1024.0 * 1024.0;
/// Longest opening, and longest until the first block is read.
const OPEN_MAX_MS: f64 = 1000.0;
/// Least share of the rate with a fully cached map.
const SHARE_MIN: f64 = 0.8;
/// A metadata cache that holds the map of any planned number of blocks.
const AMPLE_CACHE: u64 = 4 << 30;
/// One that holds a small part of it: worth knowing.
const TIGHT_CACHE: u64 = 16 << 20;
const READ_DEPTH: usize = 16;
const DISK: &str = "wide";

/// The blocks that are written, by seed; a repetition among so many places is rare and does no harm.
fn places(seed: u64, count: u32) -> impl Iterator<Item = u64> {
    let mut random = Random::new(seed);
    (0..count).map(move |_| random.below(CAPACITY / BLOCK))
}

/// Measures it.
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

    say("opening it cold");
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

    say("reading with the default cache, an ample and a tight one");
    let caches = [None, Some(AMPLE_CACHE), Some(TIGHT_CACHE)];
    let places: Vec<u64> = places(plan.seed, plan.blocks).collect();
    let mut rates = [const { Vec::new() }; 3];
    let mut residents = [const { Vec::new() }; 3];
    for run in 0..plan.runs as usize {
        for turn in 0..caches.len() {
            let side = (turn + run) % caches.len();
            let serving = Serving { metadata_cache: caches[side], ..Serving::plain(plan.mode()) };
            let (server, _) = datastore.serve(&serving, DISK)?;
            // Every leaf of the map at least once, and the data with it.
            read(&server.endpoint, &places, plan.seed, None)?;
            let time = Duration::from_secs_f64(plan.seconds);
            rates[side].push(read(&server.endpoint, &places, plan.seed + 1 + run as u64, Some(time))?);
            residents[side].push(server.service.resident()?.1 as f64);
            server.service.stop()?;
        }
    }
    let [default, ample, tight] = [0, 1, 2].map(|i| median(&rates[i]));
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let resident = largest(&residents[0]).max(writing as f64);
    let findings = vec![
        Finding::note(8, "random writes while the map grows", written, "/s"),
        Finding::at_most(8, "most resident memory, writing and reading", mib(resident), mib(RESIDENT_MAX), "MiB"),
        Finding::at_most(8, "cold opening to the first block read", median(&opened), OPEN_MAX_MS, "ms"),
        Finding::note(8, "random reads, map fully cached", ample, "/s"),
        Finding::at_least(8, "random reads, default cache: share of that", ratio(default, ample), SHARE_MIN, ""),
        Finding::note(8, "random reads, 16 MiB cache: share of that", ratio(tight, ample), ""),
    ];
    let raw = json!({
        "blocks": plan.blocks, "write_rate": written, "resident_writing": writing, "open_ms": opened,
        "rates": { "default": rates[0], "ample": rates[1], "tight": rates[2] },
        "resident": { "default": residents[0], "ample": residents[1], "tight": residents[2] },
    });
    Ok(Outcome { findings, raw })
}

/// Reads all places once, or random ones for some time; requests per second.
fn read(endpoint: &Endpoint, places: &[u64], seed: u64, time: Option<Duration>) -> Result<f64> {
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let began = Instant::now();
    let request = |place: u64| Request::Read { offset: place * BLOCK, length: BLOCK as u32 };
    let done = match time {
        None => client.run(READ_DEPTH, places.iter().map(|p| request(*p)), |_| ())?,
        Some(time) => {
            let mut random = Random::new(seed);
            let requests = std::iter::from_fn(|| {
                let place = places[random.below(places.len() as u64) as usize];
                (began.elapsed() < time).then(|| request(place))
            });
            client.run(READ_DEPTH, requests, |_| ())?
        }
    };
    process::go_on()?;
    Ok(ratio(done as f64, began.elapsed().as_secs_f64()))
}
