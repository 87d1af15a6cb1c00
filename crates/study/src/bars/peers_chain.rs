//! Reads of chains, served by lamina and by qemu-nbd from the same files.
//!
//! VMFSsparse and SEsparse chains are lamina's own disks, whose files qemu-nbd opens, because QEMU writes neither
//! format. Hosted sparse and qcow2 chains are created with qemu-img and written through qemu-nbd, and lamina serves
//! them in place. Both servers are read-only. Two layouts are measured: *runs* of 64 KiB, each in a random level, and
//! *scattered* blocks of 4 KiB, which formats with grains of 64 KiB cannot have, because every level would then contain
//! a copy of the disk.
//!
//! lamina reads sparse extents through the page cache in both modes, so the direct columns compare the servers with
//! empty caches, not direct I/O.

use super::layout::{Spread, snapshot_name};
use super::{BLOCK, Setting, no_cell, say};
use crate::datastore::{Datastore, Serving};
use crate::error::{Doing, Error, Result};
use crate::fio::{self, Job, Length, Pattern};
use crate::peers::{self, Server};
use crate::plan::{Mode, Plan};
use crate::report::{Finding, Outcome, figure, table};
use crate::statistics::{median, ratio};
use crate::{process, scratch};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const PROPERTY: &str = "chains against qemu-nbd";
/// Least rate, as a multiple of qemu-nbd's rate.
const MULTIPLE_MIN: f64 = 1.2;
/// Greatest depth that every format allows.
const DEPTH_MAX: u32 = 32;
/// Divisor of the planned disk size, because there are many chains.
const DISK_PART: u64 = 4;
const RUN: u64 = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Maker {
    /// Created by lamina: a disk with deltas of this format.
    Ours,
    /// Created by qemu-img.
    Qemu,
}

struct Format {
    name: &'static str,
    maker: Maker,
    /// QEMU's name of the format.
    driver: &'static str,
    /// Options for qemu-img create.
    options: &'static str,
}

const FORMATS: [Format; 4] = [
    Format { name: "vmfssparse", maker: Maker::Ours, driver: "vmdk", options: "" },
    Format { name: "sesparse", maker: Maker::Ours, driver: "vmdk", options: "" },
    Format { name: "hosted", maker: Maker::Qemu, driver: "vmdk", options: "subformat=monolithicSparse" },
    Format { name: "qcow2", maker: Maker::Qemu, driver: "qcow2", options: "" },
];

const CELLS: [(&str, Pattern, u32, u32); 4] = [
    ("randread-4k-qd1", Pattern::RandomRead, BLOCK as u32, 1),
    ("randread-4k-qd16", Pattern::RandomRead, BLOCK as u32, 16),
    ("read-512k-qd1", Pattern::Read, 512 << 10, 1),
    ("read-512k-qd4", Pattern::Read, 512 << 10, 4),
];

fn cell_name(format: &Format, spread: &Spread, cell: &str) -> String {
    format!("{}-{}-{}-{cell}", format.name, spread.word(), spread.depth)
}

/// The chains to measure.
fn chains(plan: &Plan) -> Vec<(&'static Format, Spread)> {
    let mut chains = Vec::new();
    for format in &FORMATS {
        for depth in plan.depths.iter().copied().filter(|depth| *depth <= DEPTH_MAX) {
            for piece in [RUN, BLOCK] {
                if piece == BLOCK && format.maker == Maker::Qemu {
                    continue;
                }
                let size = plan.disk_size / DISK_PART;
                chains.push((format, Spread { piece, size, depth, seed: plan.seed }));
            }
        }
    }
    chains
}

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let mut all = chains(plan);
    let names = |(format, spread): &(&Format, Spread)| CELLS.map(|cell| cell_name(format, spread, cell.0));
    let every: Vec<String> = all.iter().flat_map(&names).collect();
    all.retain(|chain| names(chain).iter().any(|name| plan.wants(name)));
    if all.is_empty() {
        return Err(no_cell(plan, &every));
    }
    let mut outcome = Outcome::default();
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for (format, spread) in all {
        say(&format!("writing {} {}, {} levels", format.name, spread.word(), spread.depth));
        let name = format!("{}-{}-{}", format.name, spread.word(), spread.depth);
        let chain = match format.maker {
            Maker::Ours => ours(setting, format, &spread, &name)?,
            Maker::Qemu => qemu(setting, format, &spread, &name)?,
        };
        for &mode in &plan.modes {
            let serving = Serving { read_only: true, ..Serving::plain(mode) };
            let lamina = chain.datastore.serve(&serving, DISK)?.0;
            let qemu = peers::start_image(&setting.scratch, &chain.head, format.driver, mode, false)?;
            let servers = [lamina, qemu];
            for cell in CELLS.iter().filter(|cell| plan.wants(&cell_name(format, &spread, cell.0))) {
                let cell_name = cell_name(format, &spread, cell.0);
                say(&format!("{} {cell_name}", mode.word()));
                let rates = measure_cell(setting, mode, cell, &spread, &servers, &chain.files)?;
                let medians = [median(&rates[0]), median(&rates[1])];
                let multiple = ratio(medians[0], medians[1]);
                let what = format!("{} {cell_name}: multiple of qemu-nbd", mode.word());
                outcome.findings.push(Finding::new(PROPERTY, what, multiple, "").at_least(MULTIPLE_MIN));
                let scale = f64::from(cell.2) / f64::from(1 << 20);
                let scale = if cell.1.random() { 1.0 } else { scale };
                let rate = |side: usize| figure(medians[side] * scale);
                rows.push(vec![cell_name.clone(), mode.word().into(), rate(0), rate(1), figure(multiple)]);
                raw.push(json!({ "cell": cell_name, "mode": mode, "lamina": rates[0], "qemu-nbd": rates[1] }));
            }
            for server in servers {
                server.service.stop()?;
            }
        }
        setting.scratch.remove(chain.datastore.path())?;
        if chain.files != chain.datastore.images(DISK) {
            setting.scratch.remove(&chain.files)?;
        }
    }
    let head = ["cell (requests/s, or MiB/s for 512k)", "mode", "lamina", "qemu-nbd", "multiple"];
    println!("{}", table(&head, &rows));
    outcome.raw = Value::Array(raw);
    Ok(outcome)
}

const DISK: &str = "disk";

/// A chain that both servers can serve.
struct Chain {
    datastore: Datastore,
    /// The newest image.
    head: PathBuf,
    /// The folder of all its images.
    files: PathBuf,
}

/// Creates a disk with snapshots whose files QEMU can read.
fn ours(setting: &Setting, format: &Format, spread: &Spread, name: &str) -> Result<Chain> {
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, name)?;
    datastore.create_vmdk(DISK, spread.size, "thin", Some(format.name))?;
    let (server, _) = datastore.serve(&Serving::plain(Mode::Buffered), DISK)?;
    for level in 0..=spread.depth {
        spread.write(&server.endpoint, level)?;
        if level < spread.depth {
            datastore.snapshot(DISK, &snapshot_name(level))?;
        }
    }
    server.service.stop()?;
    let files = datastore.images(DISK);
    let head = head(&files, DISK)?;
    Ok(Chain { datastore, head, files })
}

/// The descriptor of the newest image, which has the highest number.
fn head(folder: &Path, disk: &str) -> Result<PathBuf> {
    let listed = std::fs::read_dir(folder).doing(|| format!("listing {}", folder.display()))?;
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let number = |name: &String| {
        let digits = name.strip_prefix(disk)?.strip_prefix('-')?.strip_suffix(".vmdk")?;
        digits.parse::<u32>().ok().filter(|_| digits.len() == 6)
    };
    let newest = listed.filter_map(name).filter_map(|name| Some((number(&name)?, name))).max();
    let text = || Error::Answer(format!("no snapshot's descriptor in {}", folder.display()));
    Ok(folder.join(newest.ok_or_else(text)?.1))
}

/// Creates images with QEMU. lamina serves these images in place.
fn qemu(setting: &Setting, format: &Format, spread: &Spread, name: &str) -> Result<Chain> {
    let files = setting.scratch.path(&format!("{name}-files"));
    std::fs::create_dir_all(&files).doing(|| format!("creating {}", files.display()))?;
    let ending = if format.driver == "vmdk" { "vmdk" } else { "qcow2" };
    let image = |level: u32| files.join(format!("disk-{level:06}.{ending}"));
    for level in 0..=spread.depth {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format.driver]);
        if !format.options.is_empty() {
            command.args(["-o", format.options]);
        }
        if level > 0 {
            command.args(["-F", format.driver, "-b"]).arg(image(level - 1).file_name().unwrap_or_default());
        }
        command.arg(image(level)).arg(spread.size.to_string());
        process::run(&mut command)?;
        let server = peers::start_image(&setting.scratch, &image(level), format.driver, Mode::Buffered, true)?;
        spread.write(&server.endpoint, level)?;
        server.service.stop()?;
    }
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, name)?;
    let head = image(spread.depth);
    datastore.verb(&[
        &"disk".as_ref(),
        &"import".as_ref(),
        &head.as_os_str(),
        &DISK.as_ref(),
        &"--in-place".as_ref(),
    ])?;
    Ok(Chain { datastore, head, files })
}

fn measure_cell(
    setting: &Setting,
    mode: Mode,
    (_, pattern, block, depth): &(&str, Pattern, u32, u32),
    spread: &Spread,
    servers: &[Server],
    files: &Path,
) -> Result<Vec<Vec<f64>>> {
    let plan = &setting.plan;
    let mut rates = vec![Vec::new(); servers.len()];
    for run in 0..plan.runs as usize {
        for turn in 0..servers.len() {
            let side = (turn + run) % servers.len();
            process::go_on()?;
            setting.scratch.settle()?;
            scratch::warm(files)?;
            if mode == Mode::Direct {
                scratch::drop_cached(files)?;
            }
            let job = Job {
                pattern: *pattern,
                block: *block,
                depth: *depth,
                flush_each: false,
                length: Length::Time { seconds: plan.seconds, ramp: plan.ramp },
                size: spread.size,
                seed: plan.seed + run as u64,
            };
            rates[side].push(fio::run(&setting.scratch, &servers[side].endpoint, &job)?.rate);
        }
    }
    Ok(rates)
}
