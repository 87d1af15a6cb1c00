//! Measures the delta formats: SEsparse, VMFSsparse and vsanSparse beside a thin flat disk, each as a chain of its own,
//! for all combinations of request sizes x {sequential, random} x {read, write} x {empty, full}.
//!
//! ```text
//! cargo run --release -p lamina-chain --example grains [WORD]...
//!
//! read write sequential random empty full      only these cells
//! flat sesparse vmfssparse vsansparse          only these formats
//! 4 8 16 32 64 128 256 512                     only these sizes, in KiB
//! direct                                       files are opened for direct I/O
//! flush                                        each run of writes ends with a flush, which is timed too
//! delta                                        each disk is a delta over an empty thin base, as after a snapshot
//! rounds=N threads=N mib=N capacity=N          rounds, threads, MiB moved by a run, MiB of a disk
//! fill=N                                       full disks are filled by writes of N KiB (default 1024)
//! folder=PATH                                  where the files are, instead of the system's temporary folder
//! ```
//!
//! All formats do the same requests in turn. The order of the formats changes from round to round; the first round
//! warms up and is not counted. A figure is the median of the rounds, a ratio the median of the ratios within a round.
//! No dirty pages remain when a round begins.
//!
//! Reads from the page cache depend on how a disk was filled: Linux keeps a file in folios as large as the writes that
//! made it, here up to 64 KiB.

#![allow(clippy::unwrap_used)]

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Buffer, Directory, File, IoMode};
use chain::{Chain, Options};
use layer::Layer;
use layer::flat::{Flat, FlatOptions};
use layer::sesparse::{self, SeSparse};
use layer::vmfssparse::{self, CreateOptions, OpenOptions, VmfsSparse};
use layer::vsansparse::{self, VsanSparse};
use std::sync::Arc;
use std::time::Instant;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const SIZES: [u64; 8] = [4, 8, 16, 32, 64, 128, 256, 512];
const FORMATS: [&str; 4] = ["flat", "sesparse", "vmfssparse", "vsansparse"];
/// The most requests of one run. With small requests, a run then moves less data, which saves time.
const REQUESTS_MAX: u64 = 8192;

/// The settings from the command line.
struct Plan {
    words: Vec<String>,
    rounds: usize,
    threads: u64,
    bytes: u64,
    capacity: u64,
    fill: u64,
    folder: std::path::PathBuf,
}

impl Plan {
    fn from_arguments() -> Self {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let value = |key: &str| words.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        let number = |key, otherwise| value(key).map_or(otherwise, |value| value.parse().unwrap());
        Self {
            rounds: number("rounds", 7) as usize,
            threads: number("threads", 1),
            bytes: number("mib", 48) * MIB,
            capacity: number("capacity", 1024) * MIB,
            fill: number("fill", 1024) * KIB,
            folder: value("folder").map_or_else(std::env::temp_dir, Into::into),
            words,
        }
    }

    fn has(&self, word: &str) -> bool {
        self.words.iter().any(|other| other == word)
    }

    /// Whether one of several choices is selected: all are, unless some are named.
    fn wants(&self, all: &[&str], one: &str) -> bool {
        self.has(one) || !all.iter().any(|other| self.has(other))
    }

    fn mode(&self) -> IoMode {
        if self.has("direct") { IoMode::Direct } else { IoMode::Buffered }
    }

    fn formats(&self) -> Vec<&'static str> {
        FORMATS.into_iter().filter(|format| self.wants(&FORMATS, format)).collect()
    }
}

/// One line of the table.
#[derive(Clone, Copy)]
struct Cell {
    full: bool,
    write: bool,
    random: bool,
    size: u64,
}

fn cells(plan: &Plan) -> Vec<Cell> {
    let mut cells = Vec::new();
    let sizes = SIZES.map(|size| size.to_string());
    let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
    for full in [false, true] {
        for write in [false, true] {
            for random in [false, true] {
                let named = plan.wants(&["empty", "full"], if full { "full" } else { "empty" })
                    && plan.wants(&["read", "write"], if write { "write" } else { "read" })
                    && plan.wants(&["sequential", "random"], if random { "random" } else { "sequential" });
                let wanted = sizes.iter().filter(|size| named && plan.wants(&sizes, size));
                cells.extend(wanted.map(|size| Cell { full, write, random, size: size.parse::<u64>().unwrap() * KIB }));
            }
        }
    }
    cells
}

/// A disk of one format.
struct Disk {
    chain: Chain,
    files: Vec<String>,
}

impl Disk {
    fn make(directory: &LocalDirectory, format: &str, plan: &Plan) -> Self {
        let flat = |name: &str| -> Arc<dyn Layer> {
            let file = directory.create(name, plan.mode()).unwrap();
            file.set_len(plan.capacity).unwrap();
            let options = FlatOptions { offset: 0, capacity: None, writable: true, thin: true };
            Flat::open(file, name, options).unwrap()
        };
        let parent = plan.has("delta") && format != "flat";
        let mut files = vec![format.to_owned()];
        let top: Arc<dyn Layer> = match format {
            "flat" => flat(format),
            "sesparse" => {
                let file = directory.create(format, plan.mode()).unwrap();
                Arc::new(SeSparse::create(file, format, plan.capacity, sesparse::Options::default()).unwrap())
            }
            "vsansparse" => {
                let file: Arc<dyn File> = directory.create(format, plan.mode()).unwrap();
                let made = vsansparse::CreateOptions { capacity: plan.capacity, id: [7; 16] };
                vsansparse::create(Arc::clone(&file), format, &made).unwrap();
                let options = vsansparse::OpenOptions { parent, ..vsansparse::OpenOptions::writing(format) };
                Arc::new(VsanSparse::open(file, &options).unwrap())
            }
            _ => {
                let file: Arc<dyn File> = directory.create(format, plan.mode()).unwrap();
                vmfssparse::create(Arc::clone(&file), format, &CreateOptions::new(plan.capacity)).unwrap();
                Arc::new(VmfsSparse::open(file, &OpenOptions { parent, ..OpenOptions::writing(format) }).unwrap())
            }
        };
        let mut layers = vec![top];
        if parent {
            files.push(format!("{format}-base"));
            layers.push(flat(&files[1]));
        }
        Self { chain: Chain::open(format, layers, Options::default()).unwrap(), files }
    }

    fn fill(&self, size: u64) {
        let data = Buffer::with_bytes(size as usize);
        for at in (0..self.chain.capacity()).step_by(size as usize) {
            self.chain.write(at, &data).unwrap();
        }
        self.chain.flush().unwrap();
    }

    fn remove(self, directory: &LocalDirectory) {
        let Self { chain, files } = self;
        drop(chain);
        files.iter().for_each(|file| directory.remove(file).unwrap());
    }
}

/// The offsets of one run: sequential from the start, or a random order without repetition.
fn offsets(plan: &Plan, cell: Cell, seed: u64) -> Vec<u64> {
    let all = plan.capacity / cell.size;
    let count = (plan.bytes / cell.size).min(REQUESTS_MAX).min(all);
    let mut numbers: Vec<u64> = (0..all).collect();
    if cell.random {
        let mut random = testkit::Random(seed);
        for index in 0..count {
            let other = index + random.below(all - index);
            numbers.swap(index as usize, other as usize);
        }
    }
    numbers.truncate(count as usize);
    numbers.into_iter().map(|number| number * cell.size).collect()
}

/// Bytes per second.
fn run(disk: &Disk, plan: &Plan, cell: Cell, offsets: &[u64]) -> f64 {
    let share = offsets.len().div_ceil(plan.threads as usize).max(1);
    let mut buffers: Vec<Buffer> = (0..plan.threads).map(|_| Buffer::with_bytes(cell.size as usize)).collect();
    buffers.iter_mut().for_each(|buffer| buffer.fill(0x5a));
    let begun = Instant::now();
    let work = |offsets: &[u64], buffer: &mut Buffer| {
        for offset in offsets {
            match cell.write {
                true => disk.chain.write(*offset, buffer).unwrap(),
                false => disk.chain.read(*offset, buffer).unwrap(),
            }
        }
    };
    match &mut buffers[..] {
        [buffer] => work(offsets, buffer),
        buffers => std::thread::scope(|scope| {
            for (offsets, buffer) in offsets.chunks(share).zip(buffers) {
                scope.spawn(|| work(offsets, buffer));
            }
        }),
    }
    if cell.write && plan.has("flush") {
        disk.chain.flush().unwrap();
    }
    offsets.len() as f64 * cell.size as f64 / begun.elapsed().as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn measure(directory: &LocalDirectory, plan: &Plan, cell: Cell, kept: &[Disk]) -> Vec<Vec<f64>> {
    let formats = plan.formats();
    let mut figures = vec![Vec::new(); formats.len()];
    for round in 0..=plan.rounds {
        let offsets = offsets(plan, cell, round as u64);
        for turn in 0..formats.len() {
            let index = (turn + round) % formats.len();
            let made = (!cell.full).then(|| Disk::make(directory, formats[index], plan));
            let disk = made.as_ref().unwrap_or_else(|| &kept[index]);
            let figure = run(disk, plan, cell, &offsets);
            if round > 0 {
                figures[index].push(figure);
            }
            match made {
                Some(made) => made.remove(directory),
                None => disk.chain.flush().unwrap(),
            }
        }
    }
    figures
}

fn main() {
    let plan = Plan::from_arguments();
    let folder = tempfile::Builder::new().prefix("lamina-grains").tempdir_in(&plan.folder).unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let formats = plan.formats();
    let sesparse = formats.iter().position(|format| *format == "sesparse");
    println!("MiB/s, median of {}; sesparse against each of the others", plan.rounds);
    let mut kept: Vec<Disk> = Vec::new();
    for cell in cells(&plan) {
        if cell.full && kept.is_empty() {
            kept = formats.iter().map(|format| Disk::make(&directory, format, &plan)).collect();
            kept.iter().for_each(|disk| disk.fill(plan.fill));
        }
        let figures = measure(&directory, &plan, cell, &kept);
        let named = format!(
            "{:5} {:5} {:10} {:>3} KiB",
            if cell.full { "full" } else { "empty" },
            if cell.write { "write" } else { "read" },
            if cell.random { "random" } else { "sequential" },
            cell.size / KIB
        );
        let mut line = named;
        for (format, others) in formats.iter().zip(&figures) {
            line += &format!("  {format} {:6.0}", median(others.clone()) / MIB as f64);
            if let Some(ours) = sesparse.filter(|ours| formats[*ours] != *format) {
                let ratios = figures[ours].iter().zip(others).map(|(ours, other)| ours / other).collect();
                line += &format!(" x{:.2}", median(ratios));
            }
        }
        println!("{line}");
    }
    kept.into_iter().for_each(|disk| disk.remove(&directory));
}
