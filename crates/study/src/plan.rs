//! Options of the command line, and the sizes derived from them.

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;

const GIB: u64 = 1 << 30;

/// Measures lamina against its peers and its own limits.
#[derive(Debug, Parser)]
#[command(name = "lamina-study", version, about, after_help = EXIT_CODES)]
pub struct Options {
    /// What to measure
    #[command(subcommand)]
    pub study: Study,
    /// How to measure
    #[command(flatten)]
    pub settings: Settings,
}

const EXIT_CODES: &str = "Exit codes: 0 every limit met, 1 could not measure, 2 wrong usage, \
3 measured and a limit missed, 130 interrupted.";

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Study {
    /// Speed over NBD against nbdkit and qemu-nbd, raw and qcow2
    Speed,
    /// Writes to an empty thin disk against writes to a full one
    Thin,
    /// Reads and writes at snapshot depths up to 1,000
    Depth,
    /// Taking and deleting snapshots under load
    Snapshots,
    /// Thousands of linked clones, and a full clone against cp
    Clones,
    /// Scattered blocks over a 16 TiB disk: memory, opening, reads
    Wide,
    /// Space given back after discards and overwrites
    Reclaim,
    /// Scattered writes over 1 TiB against qcow2; opening after stops and kills amid large deletions
    Scattered,
    /// A steady load beside snapshots, clones, checks, merges and moves
    Background,
    /// An hour of mixed load beside every kind of background work: memory at the end
    Endurance,
    /// 8 and 16 connections, to one disk and to a disk each, against nbdkit: latency at one rate, fairness
    Connections,
    /// A cached disk's reads beside a disk whose reads miss the metadata cache
    Neighbour,
    /// Reads through 32 levels of VMware's formats against the flat base
    Chains,
    /// SEsparse and VMFSsparse against a thin flat disk, by size and pattern of requests
    Grains,
    /// Reads of chains against qemu-nbd on the same files
    PeersChain,
    /// Wiping and shrinking a half-empty SEsparse disk under load
    ReclaimSesparse,
    /// Reduction by deduplication and compression against the content that fio generated
    Reduction,
    /// Writes and reads of disks that are compressed and deduplicated when they are written against one without
    ReducedWrites,
    /// Desktop-like disks against the least space for their blocks, VDO's rule, and btrfs with a deduplicator
    Desktops,
    /// Consolidating a chain under random writes
    Consolidate,
    /// Moving a thick disk to thin and to native under random writes
    Migrate,
    /// Linked clones of machines by the hundred, on disks of 1 to 64 GiB
    VmLinked,
    /// Full clones of machines that are off and that run, against cp
    VmFull,
    /// Instant clones of frozen and running guests, and their parents' speed
    VmInstant,
    /// A clone at another server over TLS against one in the same datastore; a second one after 5 % change
    Remote,
    /// Run all studies
    All,
    /// Measure nothing: write docs/figures.md and the table of README.md from the result files in docs/figures
    Figures,
}

impl Study {
    /// Every study, in the order in which `all` runs them.
    pub const EACH: [Study; 25] = [
        Study::Speed,
        Study::Thin,
        Study::Depth,
        Study::Snapshots,
        Study::Clones,
        Study::Wide,
        Study::Reclaim,
        Study::Scattered,
        Study::Background,
        Study::Endurance,
        Study::Connections,
        Study::Neighbour,
        Study::Chains,
        Study::Grains,
        Study::PeersChain,
        Study::ReclaimSesparse,
        Study::Reduction,
        Study::ReducedWrites,
        Study::Desktops,
        Study::Consolidate,
        Study::Migrate,
        Study::VmLinked,
        Study::VmFull,
        Study::VmInstant,
        Study::Remote,
    ];

    /// Name of the study's subcommand.
    pub fn word(self) -> &'static str {
        match self {
            Study::Speed => "speed",
            Study::Thin => "thin",
            Study::Depth => "depth",
            Study::Snapshots => "snapshots",
            Study::Clones => "clones",
            Study::Wide => "wide",
            Study::Reclaim => "reclaim",
            Study::Scattered => "scattered",
            Study::Background => "background",
            Study::Endurance => "endurance",
            Study::Connections => "connections",
            Study::Neighbour => "neighbour",
            Study::Chains => "chains",
            Study::Grains => "grains",
            Study::PeersChain => "peers-chain",
            Study::ReclaimSesparse => "reclaim-sesparse",
            Study::Reduction => "reduction",
            Study::ReducedWrites => "reduced-writes",
            Study::Desktops => "desktops",
            Study::Consolidate => "consolidate",
            Study::Migrate => "migrate",
            Study::VmLinked => "vm-linked",
            Study::VmFull => "vm-full",
            Study::VmInstant => "vm-instant",
            Study::Remote => "remote",
            Study::All => "all",
            Study::Figures => "figures",
        }
    }
}

/// Whether servers use the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Through the page cache
    Buffered,
    /// With direct I/O
    Direct,
}

impl Mode {
    /// The mode's name on command lines.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Buffered => "buffered",
            Mode::Direct => "direct",
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err("a size is a number, then nothing or K, M, G or T".into()),
    };
    let number: u64 = digits.parse().map_err(|e| format!("{e}"))?;
    number.checked_mul(1 << shift).filter(|s| *s > 0).ok_or_else(|| "out of range".into())
}

/// How to measure.
#[derive(Clone, Debug, Args)]
pub struct Settings {
    /// Shorter and fewer runs, smaller disks: a first impression, too short to prove a limit
    #[arg(long, global = true)]
    pub quick: bool,
    /// The lamina program to measure [default: next to this program]
    #[arg(long, global = true, value_name = "PROGRAM")]
    pub lamina: Option<PathBuf>,
    /// speed, wide, neighbour: another lamina program to measure in the same run, for example a release
    #[arg(long, global = true, value_name = "PROGRAM")]
    pub baseline: Option<PathBuf>,
    /// Work folder; its file system is measured
    #[arg(long, global = true, value_name = "FOLDER", default_value = "target/bench")]
    pub work: PathBuf,
    /// Folder for the raw results
    #[arg(long, global = true, value_name = "FOLDER", default_value = "bench-results")]
    pub results: PathBuf,
    /// Keep the work folder
    #[arg(long, global = true)]
    pub keep: bool,
    /// Seed of layouts and loads
    #[arg(long, global = true, default_value_t = 1)]
    pub seed: u64,
    /// Runs of each cell [default: 5, quick 3]; chains and grains make N runs of 2 N - 1 rounds of short slices
    #[arg(long, global = true, value_parser = clap::value_parser!(u32).range(1..=101))]
    pub runs: Option<u32>,
    /// Seconds of each run [default: 2.5, quick 1]; in chains, grains and speed --baseline-only, of all slices of a
    /// cell together; in scattered, of the whole load on each side [default: 600, quick 20]; in endurance, of the whole
    /// load [default: 3600, quick 60]
    #[arg(long, global = true)]
    pub seconds: Option<f64>,
    /// Only this mode [default: both, if the study has two]
    #[arg(long, global = true)]
    pub mode: Option<Mode>,
    /// Size of the disks [default: 2G, quick 512M]
    #[arg(long, global = true, value_parser = size)]
    pub disk_size: Option<u64>,
    /// speed: only the other servers, without lamina
    #[arg(long, global = true)]
    pub peers_only: bool,
    /// speed: only lamina and the baseline, in many short slices that alternate; a share is the median of the ratios of
    /// the rounds
    #[arg(long, global = true, requires = "baseline", conflicts_with = "peers_only")]
    pub baseline_only: bool,
    /// Only cells whose name contains PART; the cells of consolidate are the formats of the deltas, those of migrate
    /// the target formats (may be given several times)
    #[arg(long, global = true, value_name = "PART")]
    pub cell: Vec<String>,
    /// grains: measure nothing; take the latest figures of each cell from the results folder, where runs with --cell
    /// left them
    #[arg(long, global = true)]
    pub merge: bool,
    /// depth, peers-chain: snapshot depths in addition to 0; peers-chain uses those up to 32 [default: 1,8,32,256,1000,
    /// quick 1,8,32]
    #[arg(long, global = true, value_delimiter = ',')]
    pub depths: Vec<u32>,
    /// snapshots: how many to take under load [default: 300, quick 100]
    #[arg(long, global = true)]
    pub snapshots: Option<u32>,
    /// snapshots, consolidate, migrate: the rate of the load, in percent of the possible rate, which is measured first
    /// [default: 100, without a measurement]
    #[arg(long, global = true, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub load: Option<u32>,
    /// clones: how many [default: 10000, quick 1000]
    #[arg(long, global = true)]
    pub clones: Option<u32>,
    /// desktops: how many disks [default: 20, quick 3]
    #[arg(long, global = true, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub disks: Option<u32>,
    /// wide, neighbour: blocks written [default: 2000000, quick 200000]
    #[arg(long, global = true)]
    pub blocks: Option<u32>,
}

/// The settings, in which every missing option has its default.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Whether the run is a short one (`--quick`).
    pub quick: bool,
    /// Seed of layouts and loads.
    pub seed: u64,
    /// Runs of each cell.
    pub runs: u32,
    /// Seconds of each run.
    pub seconds: f64,
    /// Seconds of the load in `scattered`.
    pub lasting: f64,
    /// Seconds of the mixed load in `endurance`.
    pub endurance: f64,
    /// Seconds before each run that are not counted.
    pub ramp: f64,
    /// The modes that are measured.
    pub modes: Vec<Mode>,
    /// Bytes of each disk.
    pub disk_size: u64,
    /// Whether to measure without lamina.
    pub peers_only: bool,
    /// Whether to measure only lamina and the baseline.
    pub baseline_only: bool,
    /// Parts of the names of the cells to measure; empty for all.
    pub cells: Vec<String>,
    /// Whether to measure nothing and to merge the results of earlier runs.
    pub merge: bool,
    /// Snapshot depths in addition to 0.
    pub depths: Vec<u32>,
    /// Number of snapshots taken under load.
    pub snapshots: u32,
    /// The rate of the load in percent of the possible rate.
    pub load: u32,
    /// Number of linked clones.
    pub clones: u32,
    /// Number of desktop-like disks.
    pub disks: u32,
    /// Blocks of the disk of 16 TiB.
    pub blocks: u32,
}

/// Smallest disk that is sufficient for the layouts of all studies.
const DISK_SIZE_MIN: u64 = 64 << 20;

impl Settings {
    /// Determines the settings from the options and the defaults.
    pub fn plan(&self) -> Result<Plan, String> {
        let quick = self.quick;
        let pick = |full: u32, short: u32| if quick { short } else { full };
        let seconds = self.seconds.unwrap_or(if quick { 1.0 } else { 2.5 });
        if !(0.1..=3600.0).contains(&seconds) {
            return Err("--seconds must be from 0.1 to 3600".into());
        }
        let disk_size = self.disk_size.unwrap_or(if quick { GIB / 2 } else { 2 * GIB });
        if disk_size < DISK_SIZE_MIN || !disk_size.is_multiple_of(1 << 20) {
            return Err("--disk-size must be 64M or more, in whole MiB".into());
        }
        let depths = match (self.depths.is_empty(), quick) {
            (false, _) => self.depths.clone(),
            (true, true) => vec![1, 8, 32],
            (true, false) => vec![1, 8, 32, 256, 1000],
        };
        if depths.iter().any(|d| *d == 0 || *d > 10_000) {
            return Err("--depths are from 1 to 10000; 0 is always measured".into());
        }
        Ok(Plan {
            quick,
            seed: self.seed,
            runs: self.runs.unwrap_or(pick(5, 3)),
            seconds,
            lasting: self.seconds.unwrap_or(if quick { 20.0 } else { 600.0 }),
            endurance: self.seconds.unwrap_or(if quick { 60.0 } else { 3600.0 }),
            ramp: (seconds / 2.0).min(0.5),
            modes: self.mode.map_or_else(|| vec![Mode::Buffered, Mode::Direct], |m| vec![m]),
            disk_size,
            peers_only: self.peers_only,
            baseline_only: self.baseline_only,
            cells: self.cell.clone(),
            merge: self.merge,
            depths,
            snapshots: self.snapshots.unwrap_or(pick(300, 100)).clamp(10, 100_000),
            load: self.load.unwrap_or(100),
            clones: self.clones.unwrap_or(pick(10_000, 1_000)).clamp(1, 1_000_000),
            disks: self.disks.unwrap_or(pick(20, 3)),
            blocks: self.blocks.unwrap_or(pick(2_000_000, 200_000)).clamp(1_000, 100_000_000),
        })
    }
}

impl Plan {
    /// Whether a cell with this name has to be measured.
    pub fn wants(&self, cell: &str) -> bool {
        self.cells.is_empty() || self.cells.iter().any(|part| cell.contains(part.as_str()))
    }

    /// The mode of studies that use only one: the first requested mode.
    pub fn mode(&self) -> Mode {
        self.modes.first().copied().unwrap_or(Mode::Buffered)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_sizes_are_read() {
        Options::command().debug_assert();
        assert_eq!(size("3G"), Ok(3 * GIB));
        assert_eq!(size("512"), Ok(512));
        for bad in ["", "G", "0", "1X", "99999999999999T", "-1"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        let options = Options::try_parse_from(["lamina-study", "speed", "--quick", "--runs", "1"]).unwrap();
        let plan = options.settings.plan().unwrap();
        assert_eq!((options.study, plan.runs, plan.depths.len()), (Study::Speed, 1, 3));
        for bad in [["--seconds", "0"], ["--disk-size", "1M"], ["--depths", "0"]] {
            let options = Options::try_parse_from(["lamina-study", "depth", bad[0], bad[1]]).unwrap();
            assert!(options.settings.plan().is_err(), "{bad:?}");
        }
    }
}
