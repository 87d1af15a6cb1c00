//! A disk whose map and data are cached, beside a disk whose reads miss the metadata cache.
//!
//! The busy disk gets random reads at queue depth 16 over blocks scattered over 16 TiB, with a metadata cache far
//! smaller than its map and nothing of the datastore in the page cache. The neighbour gets random reads of 64 MiB, one
//! at a time: as fast as they are answered, and at a steady rate. The same load on a few places, whose metadata stay
//! cached, shows what the processors alone cost the neighbour. With `--baseline` another lamina is measured in turn.

use super::load::{Load, latencies};
use super::{BLOCK, Setting, fill, say, write_blocks};
use crate::datastore::{Datastore, Serving};
use crate::error::{Error, Result};
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, percentile, ratio};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PROPERTY: &str = "neighbour";
const CAPACITY: u64 = 16 << 40;
const CACHE: u64 = 16 << 20;
const NEIGHBOUR: u64 = 64 << 20;
const DEPTH: usize = 16;
/// Places of the busy disk whose metadata stay cached.
const FEW: usize = 500;
/// Requests a second of a steady neighbour.
const STEADY: u32 = 1000;
/// Most of the neighbour's p99 alone.
const P99_MAX: f64 = 1.5;
const BUSY: &str = "busy";
const HOT: &str = "neighbour";

/// What goes on beside the neighbour.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    Hits,
    Misses,
}

const EACH: [Beside; 3] = [Beside::Nothing, Beside::Hits, Beside::Misses];

impl Beside {
    fn word(self) -> &'static str {
        match self {
            Beside::Nothing => "alone",
            Beside::Hits => "beside reads that hit the cache",
            Beside::Misses => "beside reads that miss the cache",
        }
    }
}

/// Microseconds of the neighbour's p99 in each run, by what is beside it: as fast as possible, and at a steady rate.
#[derive(Default)]
struct Figures {
    fast: [Vec<f64>; 3],
    steady: [Vec<f64>; 3],
    /// Requests a second of the busy disk.
    busy: [Vec<f64>; 3],
}

/// Measures it.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let mut random = Random::new(plan.seed);
    let places: Vec<u64> = (0..plan.blocks).map(|_| random.below(CAPACITY / BLOCK)).collect();
    let mut programs = vec![("lamina", &setting.lamina)];
    programs.extend(setting.baseline.iter().map(|program| ("baseline", program)));
    let mut sides = Vec::new();
    for (name, program) in programs {
        say(&format!("{name}: writing {} blocks over 16 TiB", plan.blocks));
        let datastore = Datastore::init(program, &setting.scratch, name)?;
        datastore.create(BUSY, CAPACITY)?;
        datastore.create(HOT, NEIGHBOUR)?;
        let (server, _) = datastore.serve(&Serving::plain(plan.mode()), BUSY)?;
        write_blocks(&server.endpoint, places.iter().copied(), BLOCK)?;
        fill(&datastore.endpoint(HOT), NEIGHBOUR)?;
        server.service.stop()?;
        sides.push((name, datastore, Figures::default()));
    }
    say("reading the neighbour alone and beside the busy disk");
    for run in 0..plan.runs as usize {
        for turn in 0..sides.len() {
            let number = (turn + run) % sides.len();
            let (_, datastore, figures) = &mut sides[number];
            one_run(setting, datastore, &places, run, figures)?;
        }
    }
    let mut outcome = Outcome::default();
    for (name, _, figures) in &sides {
        for (at, beside) in EACH.into_iter().enumerate() {
            let word = beside.word();
            let of = |what: &str| format!("{name}: {what}, {word}");
            outcome.findings.push(Finding::note(
                PROPERTY,
                of("p99, one after another"),
                median(&figures.fast[at]),
                "us",
            ));
            outcome.findings.push(Finding::note(
                PROPERTY,
                of("p99, 1,000 a second"),
                median(&figures.steady[at]),
                "us",
            ));
            if beside != Beside::Nothing {
                outcome.findings.push(Finding::note(PROPERTY, of("busy disk"), median(&figures.busy[at]), "/s"));
            }
        }
    }
    let (_, _, ours) = &sides[0];
    for (what, figures) in [("one after another", &ours.fast), ("1,000 a second", &ours.steady)] {
        let against = |other: usize| ratio(median(&figures[2]), median(&figures[other]));
        let alone = format!("p99 beside misses against alone, {what}");
        outcome.findings.push(Finding::at_most(PROPERTY, alone, against(0), P99_MAX, ""));
        let hits = format!("p99 beside misses against beside hits, {what}");
        outcome.findings.push(Finding::at_most(PROPERTY, hits, against(1), P99_MAX, ""));
    }
    outcome.raw = sides.iter().map(|(name, _, figures)| described(name, figures)).collect();
    Ok(outcome)
}

fn described(name: &str, figures: &Figures) -> Value {
    let each = EACH.into_iter().enumerate().map(|(at, beside)| {
        json!({
            "beside": beside.word(), "p99_us_one_after_another": figures.fast[at], "p99_us_steady": figures.steady[at],
            "busy_rates": figures.busy[at],
        })
    });
    json!({ "server": name, "each": each.collect::<Vec<_>>() })
}

fn one_run(setting: &Setting, datastore: &Datastore, places: &[u64], run: usize, figures: &mut Figures) -> Result<()> {
    let plan = &setting.plan;
    let serving = Serving { metadata_cache: Some(CACHE), ..Serving::plain(plan.mode()) };
    let (server, _) = datastore.serve(&serving, BUSY)?;
    let hot = datastore.endpoint(HOT);
    let seed = plan.seed + 1 + run as u64;
    for turn in 0..EACH.len() {
        let at = (turn + run) % EACH.len();
        for steady in [false, true] {
            if EACH[at] == Beside::Misses {
                setting.scratch.settle()?;
                scratch::drop_cached(datastore.path())?;
            }
            // The neighbour's map and data are cached, whatever was dropped or evicted.
            read_whole(&hot)?;
            let stop = AtomicBool::new(false);
            let (latencies, busy) = std::thread::scope(|scope| -> Result<_> {
                let places = match EACH[at] {
                    Beside::Nothing => &[],
                    Beside::Hits => &places[..FEW.min(places.len())],
                    Beside::Misses => places,
                };
                let load = scope.spawn(|| read_until(&server.endpoint, places, seed, &stop));
                let read = process::pause(Duration::from_millis(200)).and_then(|()| match steady {
                    true => read_steadily(&hot, plan.seconds, seed),
                    false => read_in_turn(&hot, plan.seconds, seed),
                });
                stop.store(true, Ordering::Relaxed);
                let busy = load.join().map_err(|_| Error::Answer("the load ended by a panic".into()))??;
                Ok((read?, busy))
            })?;
            let kind = if steady { &mut figures.steady } else { &mut figures.fast };
            kind[at].push(percentile(&latencies, 0.99));
            figures.busy[at].push(busy);
        }
    }
    server.service.stop()
}

/// Random reads of these places at queue depth 16; how many a second. Without places none.
fn read_until(endpoint: &Endpoint, places: &[u64], seed: u64, stop: &AtomicBool) -> Result<f64> {
    if places.is_empty() {
        return Ok(0.0);
    }
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let mut random = Random::new(seed);
    let began = Instant::now();
    let requests = std::iter::from_fn(|| {
        let place = places[random.below(places.len() as u64) as usize];
        let more = !stop.load(Ordering::Relaxed);
        more.then_some(Request::Read { offset: place * BLOCK, length: BLOCK as u32 })
    });
    let count = client.run(DEPTH, requests, |_| ())?;
    Ok(ratio(count as f64, began.elapsed().as_secs_f64()))
}

fn read_whole(endpoint: &Endpoint) -> Result<()> {
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let requests = (0..NEIGHBOUR / BLOCK).map(|block| Request::Read { offset: block * BLOCK, length: BLOCK as u32 });
    client.run(DEPTH, requests, |_| ()).map(drop)
}

fn random_read(random: &mut Random) -> Request {
    Request::Read { offset: random.below(NEIGHBOUR / BLOCK) * BLOCK, length: BLOCK as u32 }
}

/// One read after another for some time: the microseconds of each.
fn read_in_turn(endpoint: &Endpoint, seconds: f64, seed: u64) -> Result<Vec<f64>> {
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    let mut random = Random::new(seed);
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let requests = std::iter::from_fn(|| (Instant::now() < until).then(|| random_read(&mut random)));
    let mut latencies = Vec::new();
    client.run(1, requests, |timing| latencies.push(timing.microseconds()))?;
    process::go_on()?;
    Ok(latencies)
}

/// Reads at a steady rate for some time: the microseconds of each.
fn read_steadily(endpoint: &Endpoint, seconds: f64, seed: u64) -> Result<Vec<f64>> {
    let load = Load::paced(std::slice::from_ref(endpoint), STEADY, seed, random_read)?;
    let from = Instant::now();
    process::pause(Duration::from_secs_f64(seconds))?;
    let window = (from, Instant::now());
    Ok(latencies(&load.finish()?, window).into_iter().map(|milliseconds| milliseconds * 1e3).collect())
}
