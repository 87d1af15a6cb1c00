//! A disk whose map and data are cached, beside another disk whose reads miss the metadata cache.
//!
//! The load on the busy disk is random reads at queue depth 16 of blocks scattered over 16 TiB. The metadata cache is
//! far smaller than the disk's map, and no data of the datastore is in the page cache. The load on the neighbour disk
//! is random reads within 64 MiB, one at a time: as fast as possible, or at a steady rate. For comparison, the busy
//! disk's load is also sent to a few blocks whose metadata stay cached, which shows how much of the effect is due to
//! processor time. With `--baseline`, another lamina program is measured in turn.

use super::load::{Load, latencies, rate};
use super::{BLOCK, Setting, fill, say, write_blocks};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Request};
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::{median, percentile, ratio};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PROPERTY: &str = "neighbour";
const CAPACITY: u64 = 16 << 40;
const CACHE: u64 = 16 << 20;
const NEIGHBOUR: u64 = 64 << 20;
const DEPTH: usize = 16;
/// Number of blocks of the busy disk whose metadata stay cached.
const FEW: usize = 500;
/// Rate of the neighbour's steady load, in requests per second.
const STEADY: u32 = 1000;
/// Largest increase of the neighbour's 99th percentile, as a factor.
const P99_MAX: f64 = 1.5;
const BUSY: &str = "busy";
const HOT: &str = "neighbour";

/// The load on the busy disk.
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

/// 99th percentiles of the neighbour's latency in microseconds, one for each run, by the load on the busy disk. The
/// neighbour reads as fast as possible, or at a steady rate.
#[derive(Default)]
struct Figures {
    fast: [Vec<f64>; 3],
    steady: [Vec<f64>; 3],
    /// Rate of the busy disk, in requests per second.
    busy: [Vec<f64>; 3],
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let mut random = Random::new(plan.seed);
    let places: Arc<[u64]> = (0..plan.blocks).map(|_| random.below(CAPACITY / BLOCK)).collect();
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
            outcome.findings.push(Finding::new(
                PROPERTY,
                of("p99, one after another"),
                median(&figures.fast[at]),
                "us",
            ));
            outcome.findings.push(Finding::new(PROPERTY, of("p99, 1,000 a second"), median(&figures.steady[at]), "us"));
            if beside != Beside::Nothing {
                outcome.findings.push(Finding::new(PROPERTY, of("busy disk"), median(&figures.busy[at]), "/s"));
            }
        }
    }
    let (_, _, ours) = &sides[0];
    for (what, figures) in [("one after another", &ours.fast), ("1,000 a second", &ours.steady)] {
        let against = |other: usize| ratio(median(&figures[2]), median(&figures[other]));
        let alone = format!("p99 beside misses relative to p99 alone, {what}");
        outcome.findings.push(Finding::new(PROPERTY, alone, against(0), "").at_most(P99_MAX));
        let hits = format!("p99 beside misses relative to p99 beside hits, {what}");
        outcome.findings.push(Finding::new(PROPERTY, hits, against(1), "").at_most(P99_MAX));
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

fn one_run(
    setting: &Setting,
    datastore: &Datastore,
    places: &Arc<[u64]>,
    run: usize,
    figures: &mut Figures,
) -> Result<()> {
    let plan = &setting.plan;
    let serving = Serving { metadata_cache: Some(CACHE), ..Serving::plain(plan.mode()) };
    let (server, _) = datastore.serve(&serving, BUSY)?;
    let hot = datastore.endpoint(HOT);
    let seed = plan.seed + 1 + run as u64;
    let few: Arc<[u64]> = places[..FEW.min(places.len())].into();
    for turn in 0..EACH.len() {
        let at = (turn + run) % EACH.len();
        for steady in [false, true] {
            if EACH[at] == Beside::Misses {
                setting.scratch.settle()?;
                scratch::drop_cached(datastore.path())?;
            }
            // After the page cache was dropped, the neighbour's map and data are read into the caches again.
            read_whole(&hot)?;
            let places = match EACH[at] {
                Beside::Nothing => None,
                Beside::Hits => Some(Arc::clone(&few)),
                Beside::Misses => Some(Arc::clone(places)),
            };
            let load = places.map(|places| {
                let place = move |random: &mut Random| places[random.below(places.len() as u64) as usize];
                Load::busy(&server.endpoint, DEPTH, seed, move |random| read(place(random)))
            });
            let load = load.transpose()?;
            process::pause(Duration::from_millis(200))?;
            let neighbour = match steady {
                true => Load::paced(std::slice::from_ref(&hot), STEADY, seed, hot_read)?,
                false => Load::busy(&hot, 1, seed, hot_read)?,
            };
            let from = Instant::now();
            process::pause(Duration::from_secs_f64(plan.seconds))?;
            let window = (from, Instant::now());
            let latencies = latencies(&neighbour.finish()?, window);
            let busy = load.map_or(Ok(0.0), |load| load.finish().map(|timings| rate(&timings, window)))?;
            let kind = if steady { &mut figures.steady } else { &mut figures.fast };
            kind[at].push(percentile(&latencies, 0.99) * 1e3);
            figures.busy[at].push(busy);
        }
    }
    server.service.stop()
}

fn read(block: u64) -> Request {
    Request::Read { offset: block * BLOCK, length: BLOCK as u32 }
}

fn hot_read(random: &mut Random) -> Request {
    read(random.below(NEIGHBOUR / BLOCK))
}

fn read_whole(endpoint: &Endpoint) -> Result<()> {
    let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
    client.run(DEPTH, (0..NEIGHBOUR / BLOCK).map(read), |_| ()).map(drop)
}
