//! Memory of the server after an hour of mixed load with all kinds of background work.
//!
//! A steady load of random writes runs all the time. In parallel, all kinds of background work are done in turn, with
//! peak loads between them: many connections that write and read at once and then close. Afterwards, the server's
//! memory must not exceed the configured limits plus the amount that the manual states in addition.

use super::{BUSY, DISK, Stage, WORK};
use crate::bars::load::{Load, at_once, mixed};
use crate::bars::{BLOCK, Setting, say};
use crate::error::Result;
use crate::nbd::Client;
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::statistics::{largest, percentile};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PROPERTY: &str = "memory after an hour";
/// Rate of the steady load, in writes per second.
const RATE: u32 = 500;
/// A peak load: number of connections, requests on each, and queue depth.
const PEAK: u64 = 64;
const PEAK_REQUESTS: u64 = 2000;
const PEAK_DEPTH: usize = 16;
/// Default limits of `lamina serve`, as the manual states them.
const METADATA_CACHE: u64 = 128 << 20;
const WRITE_BUFFER: u64 = 64 << 20;
/// Memory that the manual states in addition to the metadata cache and the write buffer.
const BESIDE: u64 = 64 << 20;
const STATED: u64 = METADATA_CACHE + WRITE_BUFFER + BESIDE;
/// Most memory, as a multiple of the stated amount.
const SHARE_MAX: f64 = 1.1;
/// Time in which the memory has to shrink after the load has ended.
const CALM: Duration = Duration::from_secs(30);

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let mut random = Random::new(plan.seed);
    let stage = Stage::make(setting, "endurance", &mut random)?;
    let service = &stage.server.service;
    let load = Load::steady(&stage.datastore.endpoint(BUSY), plan.disk_size / BLOCK, RATE, plan.seed)?;
    let until = Instant::now() + Duration::from_secs_f64(plan.endurance);
    let (mut samples, mut rounds) = (Vec::new(), 0);
    while Instant::now() < until {
        for (name, verbs) in WORK {
            stage.work(name, verbs)?;
            undo(setting, &stage, name, rounds, &mut random)?;
            let (resident, highest) = service.resident()?;
            samples.push(json!({ "after": name, "resident": resident, "highest": highest }));
            if Instant::now() >= until {
                break;
            }
        }
        peak(setting, &stage, plan.seed + rounds)?;
        samples.push(json!({ "after": "peak", "resident": service.resident()?.0 }));
        rounds += 1;
        say(&format!("{rounds} rounds, {} MiB resident", service.resident()?.0 >> 20));
    }
    let timings = load.finish()?;
    process::pause(CALM)?;
    let (resident, highest) = service.resident()?;
    stage.datastore.verb(&["check"])?;
    stage.stop()?;
    let latencies: Vec<f64> = timings.iter().map(|timing| timing.microseconds() / 1e3).collect();
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let findings = vec![
        Finding::new(PROPERTY, "time", plan.endurance, "s"),
        Finding::new(PROPERTY, "rounds of all background work", rounds as f64, ""),
        Finding::new(PROPERTY, "writes of the steady load", timings.len() as f64, ""),
        Finding::new(PROPERTY, "their p99", percentile(&latencies, 0.99), "ms"),
        Finding::new(PROPERTY, "longest write of the steady load", largest(&latencies), "ms"),
        Finding::new(PROPERTY, "resident memory at its highest", mib(highest), "MiB"),
        Finding::new(PROPERTY, "resident memory stated", mib(STATED), "MiB"),
        Finding::new(PROPERTY, "resident memory at the end", mib(resident), "MiB").at_most(SHARE_MAX * mib(STATED)),
    ];
    Ok(Outcome { findings, raw: Value::Array(samples) })
}

/// Restores the state from before this kind of work, for the next round.
fn undo(setting: &Setting, stage: &Stage, name: &str, round: u64, random: &mut Random) -> Result<()> {
    let size = setting.plan.disk_size;
    match name {
        // The level for the next round is added after the migration.
        "consolidate" => Ok(()),
        "migrate" => {
            stage.prepare_again(size, name, random)?;
            stage.add_level(size, &format!("round-{round}"), random)
        }
        super::DETACH => super::delete_clones(&stage.datastore),
        _ => stage.prepare_again(size, name, random),
    }
}

/// A peak load of many connections: half of the requests are writes and half are reads.
fn peak(setting: &Setting, stage: &Stage, seed: u64) -> Result<()> {
    let endpoint = stage.datastore.endpoint(DISK);
    let blocks = setting.plan.disk_size / BLOCK;
    let connect = |_| Client::connect(&endpoint.socket, &endpoint.export);
    let clients = (0..PEAK).map(connect).collect::<Result<Vec<_>>>()?;
    let run = |number: u32, mut client: Client| {
        let mut random = Random::new(seed << 8 | u64::from(number));
        let requests = (0..PEAK_REQUESTS).map(|_| mixed(&mut random, blocks));
        client.run(PEAK_DEPTH, requests, |_| ())
    };
    at_once(clients, run).map(|_| ())
}
