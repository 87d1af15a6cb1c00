//! Requests over NBD on a unix socket, compared with other servers, buffered and direct.
//!
//! With `--baseline`, another lamina program, for example a release, is one of the servers. The processor time per
//! request of each server is also reported.
//!
//! Every server has a full disk of random bytes. In each run of a cell each server is measured once, in a rotating
//! order. Before each measurement dirty pages are written back. Then the server's data is read once, because the
//! storage (in particular a virtual disk) may have caches. For direct servers, the data is then dropped from the page
//! cache. Depth 4 for sequential requests corresponds to a guest's read-ahead.

mod baseline;

use super::{BLOCK, Setting, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::Result;
use crate::fio::{self, Job, Length, Pattern, Sample};
use crate::peers::{self, Images, Kind, Server};
use crate::plan::Mode;
use crate::report::{Finding, Outcome, figure, table};
use crate::statistics::{median, ratio};
use crate::{process, scratch};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Name of the measured property in the report.
const PROPERTY: &str = "NBD speed";

/// Least rate, relative to the best server of a raw file.
const RAW_SHARE_MIN: f64 = 0.95;
/// Least rate, relative to the baseline's rate.
const BASELINE_SHARE_MIN: f64 = 0.97;
/// Least rate, as a multiple of the rate of the best qcow2 server; for random requests only.
const QCOW2_MULTIPLE_MIN: f64 = 1.5;

/// A kind of load that is measured.
pub(super) struct Cell {
    pub name: &'static str,
    pub pattern: Pattern,
    pub block: u32,
    pub depth: u32,
    pub flush_each: bool,
}

pub(super) const fn cell(name: &'static str, pattern: Pattern, block: u32, depth: u32, flush_each: bool) -> Cell {
    Cell { name, pattern, block, depth, flush_each }
}

const SMALL: u32 = BLOCK as u32;
const LARGE: u32 = 512 << 10;
const CELLS: [Cell; 9] = [
    cell("randread-4k-qd1", Pattern::RandomRead, SMALL, 1, false),
    cell("randread-4k-qd16", Pattern::RandomRead, SMALL, 16, false),
    cell("randwrite-4k-qd1", Pattern::RandomWrite, SMALL, 1, false),
    cell("randwrite-4k-qd16", Pattern::RandomWrite, SMALL, 16, false),
    cell("flushed-write-4k-qd1", Pattern::RandomWrite, SMALL, 1, true),
    cell("read-512k-qd1", Pattern::Read, LARGE, 1, false),
    cell("read-512k-qd4", Pattern::Read, LARGE, 4, false),
    cell("write-512k-qd1", Pattern::Write, LARGE, 1, false),
    cell("write-512k-qd4", Pattern::Write, LARGE, 4, false),
];

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let cells: Vec<&Cell> = CELLS.iter().filter(|cell| plan.wants(cell.name)).collect();
    if cells.is_empty() {
        return Err(no_cell(plan, &CELLS.map(|cell| cell.name)));
    }
    say("filling the disks");
    if plan.baseline_only {
        return baseline::measure(setting, &cells);
    }
    let images = Images::make(&setting.scratch, plan.disk_size, plan.seed)?;
    let ours = if plan.peers_only { None } else { Some(import(setting, &setting.lamina, "speed", &images)?) };
    let baseline =
        setting.baseline.as_ref().map(|program| import(setting, program, "baseline", &images)).transpose()?;
    let mut findings = Vec::new();
    let mut raw = Vec::new();
    for &mode in &plan.modes {
        let (mut servers, absent) = peers::start(&setting.scratch, &images, mode)?;
        absent.iter().for_each(|text| say(text));
        if let Some(datastore) = &ours {
            servers.push(datastore.serve(&Serving::plain(mode), DISK)?.0);
        }
        if let Some(datastore) = &baseline {
            let server = datastore.serve(&Serving::plain(mode), DISK)?.0;
            servers.push(Server { name: "baseline".into(), kind: Kind::Baseline, ..server });
        }
        let (mut rows, mut processor) = (Vec::new(), Vec::new());
        for cell in &cells {
            say(&format!("{} {}", mode.word(), cell.name));
            let samples = measure_cell(setting, mode, cell, &servers)?;
            judge(mode, cell, &servers, &samples, &mut findings);
            rows.push(row(mode, cell, &servers, &samples));
            processor.push(processor_row(mode, cell, &samples));
            raw.push(record(mode, cell, &servers, &samples));
        }
        let mut head = vec!["cell (requests/s, or MiB/s for 512k)", "mode"];
        head.extend(servers.iter().map(|s| s.name.as_str()));
        head.extend(["lamina/raw", "lamina/qcow2"]);
        println!("{}", table(&head, &rows));
        let mut head = vec!["processor time of the server, us/request", "mode"];
        head.extend(servers.iter().map(|s| s.name.as_str()));
        println!("{}", table(&head, &processor));
        for server in servers {
            server.service.stop()?;
        }
    }
    Ok(Outcome { findings, raw: Value::Array(raw) })
}

const DISK: &str = "disk";

/// Writes back dirty pages. Then the page cache gets the server's data, or is emptied of it, as the cell needs.
fn prepare(setting: &Setting, mode: Mode, cell: &Cell, server: &Server) -> Result<()> {
    process::go_on()?;
    setting.scratch.settle()?;
    if mode == Mode::Buffered || !cell.pattern.writes() {
        scratch::warm(&server.data)?;
    }
    if mode == Mode::Direct {
        scratch::drop_cached(&server.data)?;
    }
    Ok(())
}

/// Creates a datastore with one disk that has the content of the images.
fn import(setting: &Setting, program: &Path, name: &str, images: &Images) -> Result<Datastore> {
    let datastore = Datastore::init(program, &setting.scratch, name)?;
    datastore.create(DISK, setting.plan.disk_size)?;
    let (server, _) = datastore.serve(&Serving::plain(Mode::Buffered), DISK)?;
    process::run(Command::new("nbdcopy").arg("--flush").arg(&images.raw).arg(server.endpoint.uri()))?;
    server.service.stop()?;
    Ok(datastore)
}

fn measure_cell(setting: &Setting, mode: Mode, cell: &Cell, servers: &[Server]) -> Result<Vec<Vec<Sample>>> {
    let plan = &setting.plan;
    let mut samples = vec![Vec::new(); servers.len()];
    for run in 0..plan.runs as usize {
        for turn in 0..servers.len() {
            let side = (turn + run) % servers.len();
            let server = &servers[side];
            prepare(setting, mode, cell, server)?;
            let job = Job {
                pattern: cell.pattern,
                block: cell.block,
                depth: cell.depth,
                flush_each: cell.flush_each,
                length: Length::Time { seconds: plan.seconds, ramp: plan.ramp },
                size: plan.disk_size,
                seed: plan.seed + run as u64,
            };
            let before = server.service.processor_time()?;
            let mut sample = fio::run(&setting.scratch, &server.endpoint, &job)?;
            let used = server.service.processor_time()?.saturating_sub(before);
            sample.server_cpu_us = Some(used.as_secs_f64() * 1e6 / (sample.rate * (plan.seconds + plan.ramp)));
            samples[side].push(sample);
        }
    }
    Ok(samples)
}

fn rate(samples: &[Sample]) -> f64 {
    median(&samples.iter().map(|s| s.rate).collect::<Vec<_>>())
}

/// The best median rate of servers of this kind.
fn best(kind: Kind, servers: &[Server], samples: &[Vec<Sample>]) -> f64 {
    let rates = servers.iter().zip(samples).filter(|(s, _)| s.kind == kind).map(|(_, all)| rate(all));
    rates.fold(0.0, f64::max)
}

fn judge(mode: Mode, cell: &Cell, servers: &[Server], samples: &[Vec<Sample>], findings: &mut Vec<Finding>) {
    let ours = best(Kind::Ours, servers, samples);
    if ours == 0.0 {
        return;
    }
    let name = format!("{} {}", mode.word(), cell.name);
    let to_raw = ratio(ours, best(Kind::Raw, servers, samples));
    let to_qcow2 = ratio(ours, best(Kind::Qcow2, servers, samples));
    findings.push(
        Finding::new(PROPERTY, format!("{name}: share of the best raw server"), to_raw, "").at_least(RAW_SHARE_MIN),
    );
    if mode == Mode::Direct {
        // nbdkit is left out here, because it acknowledges writes when they are in the page cache.
        let rates = servers.iter().zip(samples).filter(|(s, _)| s.kind == Kind::Raw && s.name != "nbdkit");
        let direct = rates.map(|(_, all)| rate(all)).fold(0.0, f64::max);
        findings.push(Finding::new(
            PROPERTY,
            format!("{name}: share of the best raw server that bypasses the page cache"),
            ratio(ours, direct),
            "",
        ));
    }
    let baseline = best(Kind::Baseline, servers, samples);
    if baseline > 0.0 {
        let what = format!("{name}: share of the baseline");
        findings.push(Finding::new(PROPERTY, what, ratio(ours, baseline), "").at_least(BASELINE_SHARE_MIN));
    }
    let what = format!("{name}: multiple of the best qcow2");
    findings.push(if cell.pattern.random() {
        Finding::new(PROPERTY, what, to_qcow2, "").at_least(QCOW2_MULTIPLE_MIN)
    } else {
        Finding::new(PROPERTY, what, to_qcow2, "")
    });
}

fn row(mode: Mode, cell: &Cell, servers: &[Server], samples: &[Vec<Sample>]) -> Vec<String> {
    let scale = if cell.block == LARGE { f64::from(LARGE) / f64::from(1 << 20) } else { 1.0 };
    let mut row = vec![cell.name.to_string(), mode.word().to_string()];
    row.extend(samples.iter().map(|all| figure(rate(all) * scale)));
    let ours = best(Kind::Ours, servers, samples);
    for kind in [Kind::Raw, Kind::Qcow2] {
        let other = best(kind, servers, samples);
        row.push(if ours > 0.0 { figure(ratio(ours, other)) } else { "-".into() });
    }
    row
}

fn processor_row(mode: Mode, cell: &Cell, samples: &[Vec<Sample>]) -> Vec<String> {
    let time = |all: &Vec<Sample>| median(&all.iter().filter_map(|sample| sample.server_cpu_us).collect::<Vec<_>>());
    let mut row = vec![cell.name.to_string(), mode.word().to_string()];
    row.extend(samples.iter().map(|all| figure(time(all))));
    row
}

fn record(mode: Mode, cell: &Cell, servers: &[Server], samples: &[Vec<Sample>]) -> Value {
    let sides: serde_json::Map<String, Value> =
        servers.iter().zip(samples).map(|(s, all)| (s.name.clone(), json!(all))).collect();
    json!({ "mode": mode, "cell": cell.name, "samples": sides })
}
