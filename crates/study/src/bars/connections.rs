//! Many connections: 8 and 16 of them, to one disk or to one disk each, compared with nbdkit serving as many raw files.
//!
//! There are two limits. At a rate that both servers can sustain, the 99th percentile of lamina's latency must not be
//! higher than that of nbdkit. At full speed, the rate of the slowest connection must be nearly that of the fastest
//! one. The servers are measured alternately in each round, so that both are affected by the same state of the machine.
//!
//! Further cells measure a local client while clients without a certificate load the TCP port ([`strangers`]).

mod strangers;

use super::load::{Load, at_once, latencies, mixed};
use super::{BLOCK, Setting, fill, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::Endpoint;
use crate::nbd::{Client, Timing};
use crate::peers;
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::statistics::{largest, median, percentile, ratio};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PROPERTY: &str = "many connections";
const COUNTS: [usize; 2] = [8, 16];
/// The common rate, relative to the rate of the slower server at full speed.
const RATE_SHARE: f64 = 0.5;
/// Requests in flight on each connection at full speed.
const DEPTH: usize = 4;
/// The least time of a run at full speed, except in quick runs: the kernel needs seconds to spread the threads of
/// clients and server over the processors. Within one second, the slowest connection has 0.4 to 0.9 of the rate of the
/// fastest one, with every server.
const FAIR_SECONDS: f64 = 5.0;
/// Least rate of the slowest connection, relative to the fastest one.
const FAIRNESS_MIN: f64 = 0.8;

/// Whether all connections use one disk, or each connection uses a disk of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    OneDisk,
    DiskEach,
}

/// A server: its name, and an endpoint for each connection.
struct Side {
    name: &'static str,
    endpoints: Vec<Endpoint>,
    rates: Vec<f64>,
    fairness: Vec<f64>,
    p99: Vec<f64>,
    longest: Vec<f64>,
}

impl Side {
    fn new(name: &'static str, endpoints: Vec<Endpoint>) -> Side {
        Side { name, endpoints, rates: Vec::new(), fairness: Vec::new(), p99: Vec::new(), longest: Vec::new() }
    }
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let mut cells = Vec::new();
    for count in COUNTS {
        cells.push((format!("{count}-connections"), count, Shape::OneDisk));
        cells.push((format!("{count}-disks"), count, Shape::DiskEach));
    }
    let mut names: Vec<_> = cells.iter().map(|(name, _, _)| name.clone()).collect();
    names.extend(strangers::EACH.map(|kind| kind.cell().to_owned()));
    cells.retain(|(name, _, _)| setting.plan.wants(name));
    let beside: Vec<_> = strangers::EACH.into_iter().filter(|kind| setting.plan.wants(kind.cell())).collect();
    if cells.is_empty() && beside.is_empty() {
        return Err(no_cell(&setting.plan, &names));
    }
    let mut outcome = Outcome::default();
    let mut raw = Vec::new();
    for (name, count, shape) in cells {
        raw.push(cell(setting, &name, count, shape, &mut outcome)?);
    }
    if !beside.is_empty() {
        raw.extend(strangers::cells(setting, &beside, &mut outcome)?);
    }
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

fn cell(setting: &Setting, name: &str, count: usize, shape: Shape, outcome: &mut Outcome) -> Result<Value> {
    say(name);
    let plan = &setting.plan;
    let disks = if shape == Shape::OneDisk { 1 } else { count };
    let size = plan.disk_size / disks as u64 / BLOCK * BLOCK;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, name)?;
    let exports: Vec<String> = (0..disks).map(|number| format!("disk-{number:02}")).collect();
    for export in &exports {
        datastore.create(export, size)?;
    }
    let (ours, _) = datastore.serve(&Serving::plain(plan.mode()), &exports[0])?;
    let peer = peers::start_folder(&setting.scratch, &exports, size, plan.mode())?;
    let of = |socket: &std::path::Path| -> Vec<Endpoint> {
        let export = |i: usize| exports[i % disks].clone();
        (0..count).map(|i| Endpoint { socket: socket.into(), export: export(i) }).collect()
    };
    let mut sides = [Side::new("lamina", of(&ours.endpoint.socket)), Side::new("nbdkit", of(&peer.endpoint.socket))];
    for side in &sides {
        side.endpoints[..disks].iter().try_for_each(|endpoint| fill(endpoint, size))?;
    }
    for run in 0..plan.runs {
        for side in turns(&mut sides, run) {
            let seconds = if plan.quick { plan.seconds } else { plan.seconds.max(FAIR_SECONDS) };
            let counts = at_full_speed(side, size, seconds, plan.seed + u64::from(run))?;
            side.rates.push(counts.iter().sum::<f64>() / seconds);
            side.fairness.push(ratio(counts.iter().copied().fold(f64::MAX, f64::min), largest(&counts)));
        }
    }
    let rate = (sides.iter().map(|side| median(&side.rates)).fold(f64::MAX, f64::min) * RATE_SHARE) as u32;
    for run in 0..plan.runs {
        for side in turns(&mut sides, run) {
            let latencies = at_rate(side, size, rate, plan.seconds, plan.seed + u64::from(run))?;
            side.p99.push(percentile(&latencies, 0.99));
            side.longest.push(largest(&latencies));
        }
    }
    ours.service.stop()?;
    peer.service.stop()?;
    setting.scratch.remove(datastore.path())?;
    setting.scratch.remove(&peer.data)?;
    let [ours, peer] = &sides;
    let what = |text: &str| format!("{name}: {text}");
    let against = ratio(median(&ours.p99), median(&peer.p99));
    outcome.findings.extend([
        Finding::new(PROPERTY, what("requests a second, lamina"), median(&ours.rates), ""),
        Finding::new(PROPERTY, what("requests a second, nbdkit"), median(&peer.rates), ""),
        Finding::new(PROPERTY, what("slowest to fastest connection, lamina"), median(&ours.fairness), "")
            .at_least(FAIRNESS_MIN),
        Finding::new(PROPERTY, what("slowest to fastest connection, nbdkit"), median(&peer.fairness), ""),
        Finding::new(PROPERTY, what("common rate"), f64::from(rate), "/s"),
        Finding::new(PROPERTY, what("p99 at the common rate, lamina"), median(&ours.p99), "ms"),
        Finding::new(PROPERTY, what("p99 at the common rate, nbdkit"), median(&peer.p99), "ms"),
        Finding::new(PROPERTY, what("p99 against nbdkit's"), against, "").at_most(1.0),
    ]);
    let samples = |side: &Side| {
        json!({
            "server": side.name, "rates": side.rates, "fairness": side.fairness, "p99_ms": side.p99,
            "longest_ms": side.longest,
        })
    };
    Ok(json!({ "cell": name, "rate": rate, "servers": [samples(ours), samples(peer)] }))
}

/// The servers in the order of a round, which alternates.
fn turns(sides: &mut [Side; 2], round: u32) -> Vec<&mut Side> {
    let mut turns: Vec<_> = sides.iter_mut().collect();
    if round % 2 == 1 {
        turns.reverse();
    }
    turns
}

/// Number of requests that each connection completes within a time: random 4 KiB reads and writes, half of each.
fn at_full_speed(side: &Side, size: u64, seconds: f64, seed: u64) -> Result<Vec<f64>> {
    let connect = |endpoint: &Endpoint| Client::connect(&endpoint.socket, &endpoint.export);
    let clients = side.endpoints.iter().map(connect).collect::<Result<Vec<_>>>()?;
    let from = Instant::now() + Duration::from_millis(100);
    let until = from + Duration::from_secs_f64(seconds);
    let run = |number: u32, mut client: Client| {
        let mut random = Random::new(seed << 8 | u64::from(number));
        let mut answered = 0_u64;
        let requests = std::iter::from_fn(|| (Instant::now() < until).then(|| mixed(&mut random, size / BLOCK)));
        let within = |timing: &Timing| timing.answered >= from && timing.answered < until;
        client.run(DEPTH, requests, |timing| answered += u64::from(within(&timing)))?;
        Ok(answered as f64)
    };
    at_once(clients, run)
}

/// Latencies in milliseconds at a common rate. All connections send requests at the same share of this rate.
fn at_rate(side: &Side, size: u64, rate: u32, seconds: f64, seed: u64) -> Result<Vec<f64>> {
    let load = Load::paced(&side.endpoints, rate, seed, move |random| mixed(random, size / BLOCK))?;
    process::pause(Duration::from_millis(200))?;
    let from = Instant::now();
    process::pause(Duration::from_secs_f64(seconds))?;
    let window = (from, Instant::now());
    Ok(latencies(&load.finish()?, window))
}
