//! 4 KiB requests at snapshot depths up to 1,000, compared with depth 0, warm and directly after reopening.
//!
//! A disk of depth *n* is written in *n* + 1 parts, each a random share of its blocks, with a snapshot after every part
//! except the last, so that its data is spread over all levels. Disks of depth 0 are written in the same random order,
//! so that only the depth differs. There are two such disks; the difference between them is the noise of the machine.
//! After a run with writes, the disk is reverted to the newest snapshot and the last part is written again, so that at
//! the beginning of each run the same blocks are shared with snapshots.

use super::layout::snapshot_name;
use super::{BLOCK, Setting, layout, say, write_blocks};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::{self, Pattern};
use crate::process;
use crate::random::Random;
use crate::report::{Finding, Outcome};
use crate::statistics::{median, ratio};
use serde_json::{Value, json};

/// Name of the measured property in the report.
const PROPERTY: &str = "snapshot depth";

/// Least rate, as a share of the rate at depth 0.
const SHARE_MIN: f64 = 0.97;
/// Divisor of the planned disk size, because many disks exist at once.
const DISK_PART: u64 = 4;

const CELLS: [(&str, Pattern, u32); 4] = [
    ("randread-4k-qd1", Pattern::RandomRead, 1),
    ("randread-4k-qd16", Pattern::RandomRead, 16),
    ("randwrite-4k-qd1", Pattern::RandomWrite, 1),
    ("randwrite-4k-qd16", Pattern::RandomWrite, 16),
];

/// A disk with some number of snapshots.
struct Disk {
    name: String,
    depth: u32,
    /// The disk's blocks, in the order in which they were written.
    order: Vec<u32>,
}

impl Disk {
    /// The blocks that were written in level `level`.
    fn level(&self, level: u32) -> impl Iterator<Item = u64> {
        layout::level(&self.order, self.depth, level)
    }

    fn newest(&self) -> String {
        snapshot_name(self.depth - 1)
    }
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "depth")?;
    let serving = Serving::plain(plan.mode());
    let mut disks = Vec::new();
    for (number, depth) in [0, 0].into_iter().chain(plan.depths.iter().copied()).enumerate() {
        let blocks = u32::try_from(plan.disk_size / DISK_PART / BLOCK).unwrap_or(u32::MAX);
        let order = Random::new(plan.seed).order(blocks);
        disks.push(Disk { name: format!("disk-{number}-depth-{depth}"), depth, order });
    }
    for disk in &disks {
        datastore.create(&disk.name, plan.disk_size / DISK_PART)?;
    }
    let (mut server, _) = datastore.serve(&serving, &disks[0].name)?;
    for disk in &disks {
        say(&format!("writing a disk of depth {}", disk.depth));
        build(&datastore, disk)?;
    }
    let mut findings = Vec::new();
    let mut raw = Vec::new();
    for reopened in [false, true] {
        let state = if reopened { "reopened" } else { "warm" };
        for (name, pattern, depth) in CELLS {
            say(&format!("{state} {name}"));
            let mut rates = vec![Vec::new(); disks.len()];
            for run in 0..plan.runs as usize {
                for turn in 0..disks.len() {
                    let side = (turn + run) % disks.len();
                    let disk = &disks[side];
                    let mut job = setting.job(pattern, depth, plan.seed + run as u64);
                    job.size = plan.disk_size / DISK_PART;
                    if reopened {
                        // Nothing precedes the measured time, because the first requests after reopening are the ones
                        // to measure.
                        job.length = fio::Length::Time { seconds: plan.seconds, ramp: 0.0 };
                        server.service.stop()?;
                        setting.scratch.settle()?;
                        server = datastore.serve(&serving, &disk.name)?.0;
                    } else {
                        setting.scratch.settle()?;
                    }
                    rates[side].push(fio::run(&setting.scratch, &datastore.endpoint(&disk.name), &job)?.rate);
                    if pattern.writes() && disk.depth > 0 {
                        datastore.revert(&disk.name, &disk.newest())?;
                        write_blocks(&datastore.endpoint(&disk.name), disk.level(disk.depth), BLOCK)?;
                    }
                    process::go_on()?;
                }
            }
            let base = median(&rates[0]);
            findings.push(Finding::new(PROPERTY, format!("{state} {name} at depth 0"), base, "/s"));
            for (disk, rates) in disks.iter().zip(&rates).skip(1) {
                let share = ratio(median(rates), base);
                findings.push(if disk.depth == 0 {
                    Finding::new(PROPERTY, format!("{state} {name}, another disk of depth 0: share (noise)"), share, "")
                } else {
                    let what = format!("{state} {name} at depth {}: share of depth 0", disk.depth);
                    Finding::new(PROPERTY, what, share, "").at_least(SHARE_MIN)
                });
            }
            let sides: Vec<Value> =
                disks.iter().zip(&rates).map(|(d, r)| json!({ "depth": d.depth, "rates": r })).collect();
            raw.push(json!({ "state": state, "cell": name, "depths": sides }));
        }
    }
    server.service.stop()?;
    Ok(Outcome { findings, raw: Value::Array(raw) })
}

fn build(datastore: &Datastore, disk: &Disk) -> Result<()> {
    let endpoint = datastore.endpoint(&disk.name);
    for level in 0..=disk.depth {
        write_blocks(&endpoint, disk.level(level), BLOCK)?;
        if level < disk.depth {
            datastore.snapshot(&disk.name, &snapshot_name(level))?;
        }
    }
    Ok(())
}
