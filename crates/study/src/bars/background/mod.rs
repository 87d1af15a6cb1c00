//! The effect of background work on a client with a steady load: 2,000 random 4 KiB writes per second to one disk,
//! alone and during each kind of work. lamina slows the work down depending on the client's latency. So the time of the
//! work is measured without the client, too.

pub mod endurance;

use super::load::{Load, latencies, worst};
use super::remote::Receiver;
use super::{BLOCK, Setting, fill, no_cell, say};
use crate::datastore::{Datastore, Keys, Serving};
use crate::error::Result;
use crate::nbd::{Client, Request};
use crate::peers::Server;
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::statistics::{percentile, ratio};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const PROPERTY: &str = "latency beside background work";
/// Rate of the load, in writes per second.
const RATE: u32 = 2000;
/// Limit of the 99th percentile of latency during background work, in milliseconds.
const P99_MAX_MS: f64 = 3.0;
/// Limit of the latency of each request during background work, in milliseconds.
const LONGEST_MAX_MS: f64 = 50.0;
/// How long the load runs alone.
const CALM: Duration = Duration::from_secs(5);
/// Number of snapshots, and the time between them.
const SNAPSHOTS_TAKEN: u32 = 40;
const SNAPSHOT_EVERY: Duration = Duration::from_millis(250);
/// Number of linked clones that are made and detached, and the time between them. There are many, because making and
/// detaching one clone takes less than 0.1 s, in which too few requests are completed for a 99th percentile.
const DETACHED: u32 = 40;
const DETACH_EVERY: Duration = Duration::from_millis(250);
const LEVELS: u32 = 3;
const RUN: u64 = 64 << 10;

/// Four disks: the client's disk, the disk of the background work, a disk with images, and a disk with images of which
/// half is discarded.
const BUSY: &str = "busy";
const DISK: &str = "disk";
const IMAGES: &str = "images";
const SPARSE: &str = "sparse";

/// A kind of background work: its name, and the commands that do it. The list of commands is empty if a function does
/// the work.
const WORK: [(&str, &[&[&str]]); 8] = [
    (SNAPSHOTS, &[]),
    ("full-clone", &[&["clone", DISK, "copy", "--full"]]),
    ("check", &[&["check", "--data"]]),
    (SEND, &[]),
    ("reclaim", &[&["disk", "wipe", SPARSE], &["disk", "shrink", SPARSE]]),
    ("consolidate", &[&["disk", "consolidate", IMAGES]]),
    ("migrate", &[&["disk", "migrate", IMAGES, "--format", "native"]]),
    (DETACH, &[]),
];
const SNAPSHOTS: &str = "snapshots";
const DETACH: &str = "detach";
const SEND: &str = "send";

/// The datastores of the study: one that is served and in which the work is done, and one that receives.
struct Stage {
    datastore: Datastore,
    server: Server,
    there: Datastore,
    receiver: Receiver,
}

impl Stage {
    /// Creates and fills the four disks.
    fn make(setting: &Setting, name: &str, random: &mut Random) -> Result<Stage> {
        let plan = &setting.plan;
        let datastore = Datastore::init(&setting.lamina, &setting.scratch, name)?;
        datastore.create(BUSY, plan.disk_size)?;
        datastore.create(DISK, plan.disk_size)?;
        for disk in [IMAGES, SPARSE] {
            datastore.create_vmdk(disk, plan.disk_size, "thin", Some("sesparse"))?;
        }
        datastore.snapshot(SPARSE, "below")?;
        let (server, _) = datastore.serve(&Serving::plain(plan.mode()), BUSY)?;
        say("filling four disks");
        for disk in [BUSY, DISK, IMAGES, SPARSE] {
            fill(&datastore.endpoint(disk), plan.disk_size)?;
        }
        let there = Datastore::init(&setting.lamina, &setting.scratch, "there")?;
        there.create("some", BLOCK)?;
        let receiver = Receiver::start(&there, Keys::make(&setting.scratch)?, "some")?;
        datastore.snapshot(DISK, "golden")?;
        let stage = Stage { datastore, server, there, receiver };
        for level in 0..LEVELS {
            stage.add_level(plan.disk_size, &format!("level-{level}"), random)?;
        }
        stage.discard_half(plan.disk_size, random)?;
        Ok(stage)
    }

    fn stop(self) -> Result<()> {
        self.receiver.serving.service.stop()?;
        self.server.service.stop()
    }

    /// Does one kind of work.
    fn work(&self, name: &str, verbs: &[&[&str]]) -> Result<()> {
        match name {
            SNAPSHOTS => take_snapshots(&self.datastore),
            DETACH => detach_clones(&self.datastore),
            SEND => self.datastore.verb(&self.receiver.verb(&format!("{DISK}@golden"), "copy")).map(|_| ()),
            _ => verbs.iter().try_for_each(|verb| self.datastore.verb(verb).map(|_| ())),
        }
    }

    /// Restores the state from before this kind of work, so that the work can be done again.
    fn prepare_again(&self, disk_size: u64, name: &str, random: &mut Random) -> Result<()> {
        match name {
            "full-clone" => self.datastore.delete("copy"),
            SEND => self.there.delete("copy"),
            "reclaim" => {
                fill(&self.datastore.endpoint(SPARSE), disk_size)?;
                self.discard_half(disk_size, random)
            }
            "consolidate" => {
                (0..LEVELS).try_for_each(|level| self.add_level(disk_size, &format!("again-{level}"), random))
            }
            "migrate" => {
                let back = ["disk", "migrate", IMAGES, "--format", "thin", "--delta", "sesparse"];
                self.datastore.verb(&back).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Takes a snapshot of the disk with images, and writes an eighth of the disk again after it.
    fn add_level(&self, disk_size: u64, snapshot: &str, random: &mut Random) -> Result<()> {
        self.datastore.snapshot(IMAGES, snapshot)?;
        let order = random.order(u32::try_from(disk_size / RUN).unwrap_or(u32::MAX));
        let part = order[..order.len() / 8].iter().map(|run| u64::from(*run));
        super::write_blocks(&self.datastore.endpoint(IMAGES), part, RUN)
    }

    /// Discards random ranges that make up half of the disk. Wiping and shrinking return their space.
    fn discard_half(&self, disk_size: u64, random: &mut Random) -> Result<()> {
        let runs = u32::try_from(disk_size / RUN).unwrap_or(u32::MAX);
        let order = random.order(runs);
        let endpoint = self.datastore.endpoint(SPARSE);
        let mut client = Client::connect(&endpoint.socket, &endpoint.export)?;
        let chosen = order[..order.len() / 2].iter();
        let trims = chosen.map(|run| Request::Trim { offset: u64::from(*run) * RUN, length: RUN as u32 });
        client.run(16, trims, |_| ())?;
        client.flush()
    }
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let work: Vec<_> = WORK.into_iter().filter(|(name, _)| plan.wants(name)).collect();
    if work.is_empty() {
        return Err(no_cell(plan, &WORK.map(|(name, _)| name)));
    }
    let mut random = Random::new(plan.seed);
    let stage = Stage::make(setting, "background", &mut random)?;
    let mut outcome = Outcome::default();
    let mut raw = Vec::new();
    for (name, verbs) in work {
        setting.scratch.rest(stage.datastore.path())?;
        let mut idle = None;
        // Snapshots and detached clones are made at a fixed rate, so their time is always the same.
        if !matches!(name, SNAPSHOTS | DETACH) {
            say(&format!("{name} without other load"));
            let begun = Instant::now();
            stage.work(name, verbs)?;
            idle = Some(begun.elapsed().as_secs_f64());
            stage.prepare_again(plan.disk_size, name, &mut random)?;
            setting.scratch.rest(stage.datastore.path())?;
        }
        let mut doing = || stage.work(name, verbs);
        raw.push(beside(setting, &stage.datastore, name, idle, &mut doing, &mut outcome)?);
    }
    stage.stop()?;
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

/// Measures one kind of work, which took `idle` seconds without the load.
fn beside(
    setting: &Setting,
    datastore: &Datastore,
    name: &str,
    idle: Option<f64>,
    work: &mut dyn FnMut() -> Result<()>,
    outcome: &mut Outcome,
) -> Result<Value> {
    say(&format!("{RATE} writes a second beside: {name}"));
    let plan = &setting.plan;
    let load = Load::steady(&datastore.endpoint(BUSY), plan.disk_size / BLOCK, RATE, plan.seed)?;
    process::pause(Duration::from_secs(1))?;
    let from = Instant::now();
    process::pause(CALM)?;
    let calm = (from, Instant::now());
    work()?;
    let busy = (calm.1, Instant::now());
    let timings = load.finish()?;
    let seconds = busy.1.duration_since(busy.0).as_secs_f64();
    let p99 = |window| percentile(&latencies(&timings, window), 0.99);
    let (alone, beside) = (p99(calm), p99(busy));
    let longest = worst(&timings, &[busy]);
    let what = |text: &str| format!("{name}: {text}");
    outcome.findings.extend([
        Finding::new(PROPERTY, what("p99 without it"), alone, "ms"),
        Finding::new(PROPERTY, what("p99 of requests meanwhile"), beside, "ms").at_most(P99_MAX_MS),
        Finding::new(PROPERTY, what("longest without it"), worst(&timings, &[calm]), "ms"),
        Finding::new(PROPERTY, what("longest request meanwhile"), longest, "ms").at_most(LONGEST_MAX_MS),
        Finding::new(PROPERTY, what("time"), seconds, "s"),
    ]);
    if let Some(idle) = idle {
        outcome.findings.extend([
            Finding::new(PROPERTY, what("time without the load"), idle, "s"),
            Finding::new(PROPERTY, what("multiple of the time without the load"), ratio(seconds, idle), ""),
        ]);
    }
    Ok(json!({
        "work": name, "p99_alone_ms": alone, "p99_beside_ms": beside, "longest_ms": longest, "seconds": seconds,
        "idle_seconds": idle, "requests": timings.len(),
    }))
}

/// Takes snapshots at a steady rate, and deletes each of them later.
fn take_snapshots(datastore: &Datastore) -> Result<()> {
    const KEPT: u32 = 4;
    let name = |number: u32| format!("taken-{number:03}");
    let begun = Instant::now();
    for number in 0..SNAPSHOTS_TAKEN + KEPT {
        if number < SNAPSHOTS_TAKEN {
            datastore.snapshot(BUSY, &name(number))?;
        }
        if let Some(old) = number.checked_sub(KEPT) {
            datastore.delete_snapshot(BUSY, &name(old))?;
        }
        process::pause((SNAPSHOT_EVERY * (number + 1)).saturating_sub(begun.elapsed()))?;
    }
    Ok(())
}

/// The name of a linked clone.
fn linked(number: u32) -> String {
    format!("linked-{number:03}")
}

/// Makes linked clones and detaches them, at a steady rate.
fn detach_clones(datastore: &Datastore) -> Result<()> {
    let begun = Instant::now();
    for number in 0..DETACHED {
        let name = linked(number);
        datastore.verb(&["clone", &format!("{DISK}@golden"), &name])?;
        datastore.verb(&["disk", "detach", &name])?;
        process::pause((DETACH_EVERY * (number + 1)).saturating_sub(begun.elapsed()))?;
    }
    Ok(())
}

/// Deletes the clones of [`detach_clones`].
fn delete_clones(datastore: &Datastore) -> Result<()> {
    (0..DETACHED).try_for_each(|number| datastore.delete(&linked(number)))
}
