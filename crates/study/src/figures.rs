//! Generates the pages of figures from stored result files, so that no figure is typed by hand: `docs/figures.md` has
//! every finding of the files in `docs/figures`. README.md has the findings of [`HEADLINES`], between two markers.
//!
//! A result file is written by a study to the results folder, and may have any name that ends with `.json`. Both pages
//! depend on the files only, and `tests/figures.rs` checks that the pages in the repository match the files.

use crate::error::{Doing, Error, Result};
use crate::plan::{Options, Study};
use crate::report::{Wanted, figure};
use crate::statistics::median;
use clap::CommandFactory;
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Folder of the result files, relative to the root of the repository.
pub const FOLDER: &str = "docs/figures";
/// The page with every finding.
pub const PAGE: &str = "docs/figures.md";
/// The page with the headlines.
pub const README: &str = "README.md";
/// Marks the beginning of the table of headlines.
pub const BEGIN: &str = "<!-- figures: begin; written by `lamina-study figures` -->";
/// Marks the end of the table.
pub const END: &str = "<!-- figures: end -->";

/// A row of the table in README.md.
struct Headline {
    study: Study,
    /// The beginning and the end of the finding's name. If several findings match, the last one is used.
    of: (&'static str, &'static str),
    /// The finding's name in README.md.
    called: &'static str,
}

const fn headline(study: Study, of: (&'static str, &'static str), called: &'static str) -> Headline {
    Headline { study, of, called }
}

const RAW: &str = ": share of the best raw server";
const QCOW2: &str = ": multiple of the best qcow2";

const HEADLINES: [Headline; 20] = [
    headline(
        Study::Speed,
        ("buffered randread-4k-qd16", RAW),
        "random 4 KiB reads, queue depth 16, buffered: rate against the best raw server",
    ),
    headline(
        Study::Speed,
        ("buffered randread-4k-qd16", QCOW2),
        "random 4 KiB reads, queue depth 16, buffered: rate against the best qcow2",
    ),
    headline(
        Study::Speed,
        ("buffered randwrite-4k-qd16", RAW),
        "random 4 KiB writes, queue depth 16, buffered: rate against the best raw server",
    ),
    headline(
        Study::Speed,
        ("buffered randwrite-4k-qd16", QCOW2),
        "random 4 KiB writes, queue depth 16, buffered: rate against the best qcow2",
    ),
    headline(
        Study::Speed,
        ("buffered flushed-write-4k-qd1", RAW),
        "4 KiB writes with a flush behind each, buffered: rate against the best raw server",
    ),
    headline(
        Study::Speed,
        ("direct randread-4k-qd16", RAW),
        "random 4 KiB reads, queue depth 16, direct: rate against the best raw server",
    ),
    headline(
        Study::Depth,
        ("warm randread-4k-qd16 at depth ", ""),
        "random reads below the deepest chain of snapshots measured: rate against a disk without snapshots",
    ),
    headline(Study::Snapshots, ("taking a snapshot, median", ""), "taking a snapshot under random writes, median"),
    headline(
        Study::Snapshots,
        ("taking a snapshot, p99", ""),
        "taking a snapshot under random writes, 99th percentile",
    ),
    headline(Study::Clones, ("", " linked clones"), "linked clones of a disk, taken by one command"),
    headline(Study::Clones, ("full clone: speed against cp", ""), "full clone: speed against `cp` and flush"),
    headline(
        Study::Wide,
        ("most resident memory", ""),
        "resident memory of a server with random blocks all over a disk of 16 TiB",
    ),
    headline(
        Study::Wide,
        ("cold opening to the first block read", ""),
        "opening that datastore cold, to the first block",
    ),
    headline(
        Study::Background,
        ("full clone: p99 of requests meanwhile", ""),
        "2,000 random writes a second beside a full clone: 99th percentile of their latency",
    ),
    headline(
        Study::Chains,
        ("", " levels of sesparse: share of the base"),
        "random reads through a chain of SEsparse images: rate against the flat base",
    ),
    headline(Study::VmLinked, ("100 linked clones", "16 GiB"), "100 linked clones of a machine"),
    headline(
        Study::VmInstant,
        ("running parent stands still, first clone", ""),
        "instant clone of a running machine: the parent stands still",
    ),
    headline(
        Study::VmInstant,
        ("instant clones per hour", ""),
        "instant clones in an hour, each with its own identity (QEMU without KVM)",
    ),
    headline(
        Study::Remote,
        ("remote clone: speed against a local one", ""),
        "clone at another server over TLS on loopback: speed against a full clone in the same datastore",
    ),
    headline(
        Study::Remote,
        ("second clone: data sent against data changed", ""),
        "a second clone after 5 % of the disk changed: data sent against data changed",
    ),
];

/// The parts of a result file that the pages use.
#[derive(Debug, Deserialize)]
pub struct Kept {
    /// Name of the file without `.json`.
    #[serde(skip)]
    pub name: String,
    study: String,
    command: String,
    machine: Host,
    plan: Asked,
    findings: Vec<Found>,
    raw: Value,
}

#[derive(Debug, Deserialize)]
struct Host {
    date: String,
    revision: String,
    processor: String,
    processors: usize,
    memory_kib: u64,
    kernel: String,
    file_system: String,
    tools: Vec<String>,
}

impl Host {
    /// Version of the kernel, without suffixes of its distributor.
    fn version(&self) -> &str {
        self.kernel.split('-').next().unwrap_or_default()
    }

    /// Type of the file system, without its device.
    fn file_system(&self) -> &str {
        self.file_system.split_whitespace().next().unwrap_or("unknown")
    }
}

#[derive(Debug, Deserialize)]
struct Asked {
    quick: bool,
    runs: u32,
}

#[derive(Debug, Deserialize)]
struct Found {
    what: String,
    measured: f64,
    unit: String,
    limit: Option<(Wanted, f64)>,
    met: bool,
}

impl Found {
    fn value(&self) -> String {
        format!("{} {}", figure(self.measured), self.unit).trim_end().into()
    }

    fn asked(&self) -> String {
        match self.limit {
            Some((Wanted::AtLeast, limit)) => format!("at least {}", figure(limit)),
            Some((Wanted::AtMost, limit)) => format!("at most {}", figure(limit)),
            None => String::new(),
        }
    }

    fn verdict(&self) -> &'static str {
        match (self.limit, self.met) {
            (None, _) => "",
            (_, true) => "met",
            (_, false) => "missed",
        }
    }
}

/// Reads the result files of a folder, ordered by study and then by name.
pub fn kept(folder: &Path) -> Result<Vec<Kept>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(folder).doing(|| format!("listing {}", folder.display()))? {
        let path = entry.doing(|| format!("listing {}", folder.display()))?.path();
        if path.extension().is_none_or(|ending| ending != "json") {
            continue;
        }
        let text = fs::read_to_string(&path).doing(|| format!("reading {}", path.display()))?;
        let unusable = |e| Error::Answer(format!("{} is no result file of this version: {e}", path.display()));
        let mut kept: Kept = serde_json::from_str(&text).map_err(unusable)?;
        kept.name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        out.push(kept);
    }
    out.sort_by_key(|kept| (place(&kept.study), kept.name.clone()));
    Ok(out)
}

/// Position of a study in the order of all studies.
fn place(study: &str) -> usize {
    Study::EACH.iter().position(|other| other.word() == study).unwrap_or(Study::EACH.len())
}

/// Writes both pages in the repository at `root`.
pub fn write(root: &Path) -> Result<()> {
    let kept = kept(&root.join(FOLDER))?;
    let put = |path: &str, text: String| {
        let path = root.join(path);
        fs::write(&path, text).doing(|| format!("writing {}", path.display()))
    };
    put(PAGE, page(&kept))?;
    let readme = root.join(README);
    let text = fs::read_to_string(&readme).doing(|| format!("reading {}", readme.display()))?;
    put(README, with_headlines(&text, &kept)?)
}

/// Generates `docs/figures.md`.
pub fn page(kept: &[Kept]) -> String {
    let mut out = String::from(
        "# Figures\n\n\
         <!-- Written by `lamina-study figures` from the result files in docs/figures: a change by hand does not last. -->\n\n\
         Every figure here is computed from a result file in [docs/figures](figures), which has every sample, the options\n\
         and the machine. [Measuring](manual/measuring.md) says what each study does and how to renew these pages.\n\
         A ratio has no unit. *Asked* is the limit for the figure. A study run with `--quick` gives a first\n\
         impression, and is too short to prove a limit.\n",
    );
    for kept in kept {
        let _ = write!(out, "\n## {}\n\n", kept.name);
        let _ = writeln!(out, "{}.\n", about(&kept.study));
        let _ = writeln!(out, "{}\n", provenance(kept));
        if kept.study == Study::Speed.word() {
            out += &rates(&kept.raw);
        }
        out += "| what | measured | asked | |\n|---|---:|---:|---|\n";
        for found in &kept.findings {
            let _ = writeln!(out, "| {} | {} | {} | {} |", found.what, found.value(), found.asked(), found.verdict());
        }
    }
    out
}

/// The description of a study on the command line.
fn about(study: &str) -> String {
    let command = Options::command();
    command.find_subcommand(study).and_then(|c| c.get_about()).map_or_else(|| study.into(), |text| text.to_string())
}

/// Machine, date and command of a result file.
fn provenance(kept: &Kept) -> String {
    let machine = &kept.machine;
    let quick = if kept.plan.quick { ", with `--quick`, so too short to prove a limit" } else { "" };
    format!(
        "{}, {} processors, {:.1} GiB of memory, kernel {}, {}; {}. {} of revision {}, {}{quick}:\n`{}`",
        machine.processor,
        machine.processors,
        machine.memory_kib as f64 / f64::from(1 << 20),
        machine.version(),
        machine.file_system(),
        machine.tools.iter().map(|tool| tool.trim()).collect::<Vec<_>>().join(", "),
        if kept.plan.runs == 1 { "One run".to_owned() } else { format!("{} runs", kept.plan.runs) },
        machine.revision,
        machine.date.split('T').next().unwrap_or_default(),
        kept.command,
    )
}

/// Median rates of every server in every cell of the study `speed`.
fn rates(raw: &Value) -> String {
    let mut out = String::new();
    let mut head: Vec<&String> = Vec::new();
    for cell in raw.as_array().into_iter().flatten() {
        let Some(sides) = cell["samples"].as_object() else { continue };
        let servers: Vec<&String> = sides.keys().collect();
        if servers != head {
            if !head.is_empty() {
                out += "\n";
            }
            let names: Vec<&str> = servers.iter().map(|name| name.as_str()).collect();
            let _ = writeln!(out, "| requests a second | {} |", names.join(" | "));
            let _ = writeln!(out, "|---|{}", "---:|".repeat(servers.len()));
            head = servers;
        }
        let medians = sides.values().map(|samples| {
            let rates = samples.as_array().into_iter().flatten().filter_map(|sample| sample["rate"].as_f64());
            figure(median(&rates.collect::<Vec<_>>()))
        });
        let name = [&cell["mode"], &cell["cell"]].map(|text| text.as_str().unwrap_or_default()).join(" ");
        let _ = writeln!(out, "| {name} | {} |", medians.collect::<Vec<_>>().join(" | "));
    }
    out + "\n"
}

/// Generates the table of README.md. A headline without a result file has no row.
fn headlines(kept: &[Kept]) -> String {
    let mut out = String::from("| what | measured | study |\n|---|---:|---|\n");
    for headline in &HEADLINES {
        let (begin, end) = headline.of;
        let files = kept.iter().filter(|kept| kept.study == headline.study.word());
        let mut all = files.flat_map(|kept| kept.findings.iter().map(move |found| (kept, found)));
        let found = all.rfind(|(_, found)| found.what.starts_with(begin) && found.what.ends_with(end));
        if let Some((kept, found)) = found {
            // The rest of the finding's name may be a count or a depth, which is added to the headline.
            let number = found.what.strip_prefix(begin).filter(|_| begin.ends_with(' ') || begin.is_empty());
            let number = number.and_then(|rest| rest.split([' ', ':']).find(|word| word.parse::<u64>().is_ok()));
            let detail = number.map(|number| format!(" ({number})")).unwrap_or_default();
            let _ = writeln!(
                out,
                "| {}{detail} | {} | [{}](docs/figures.md#{}) |",
                headline.called,
                found.value(),
                kept.study,
                kept.name
            );
        }
    }
    if let Some(kept) = kept.first() {
        let machine = &kept.machine;
        let _ = write!(
            out,
            "\nMeasured on {} processors ({}), {}, kernel {}, {}; every figure, with machine, revision and command:\n\
             [docs/figures.md](docs/figures.md).\n",
            machine.processors,
            machine.processor,
            machine.file_system(),
            machine.version(),
            machine.date.split('T').next().unwrap_or_default(),
        );
        if kept.plan.quick {
            out += "These figures are of short runs (`--quick`): they give a first impression and prove no limit.\n";
        }
    }
    out
}

/// Returns README.md with the table of the given files between its markers.
pub fn with_headlines(readme: &str, kept: &[Kept]) -> Result<String> {
    let parts = readme.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = parts.ok_or_else(|| Error::Answer(format!("{README} lacks the lines {BEGIN} and {END}")))?;
    Ok(format!("{before}{BEGIN}\n\n{}\n{END}{after}", headlines(kept)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn result(study: &str, measured: f64) -> Kept {
        serde_json::from_value(json!({
            "study": study, "command": "lamina-study x", "plan": { "quick": false, "runs": 5 }, "raw": null,
            "machine": { "date": "2026-01-02T03:04:05Z", "revision": "abc", "processor": "P", "processors": 2,
                "memory_kib": 1048576, "kernel": "6", "file_system": "ext4 /dev/x", "tools": [] },
            "findings": [{ "property": "p", "what": "10000 linked clones", "measured": measured, "unit": "s",
                "limit": ["at_most", 2.0], "met": true }],
        }))
        .unwrap()
    }

    #[test]
    fn both_pages_equal_their_generated_text() {
        let readme = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let kept = [Kept { name: "clones".into(), ..result("clones", 0.5) }];
        let new = with_headlines(&readme, &kept).unwrap();
        assert!(new.starts_with("before\n") && new.ends_with("\nafter\n") && !new.contains("old"), "{new}");
        assert!(new.contains("(10000) | 0.500 s | [clones](docs/figures.md#clones) |"), "{new}");
        assert_eq!(with_headlines(&new, &kept).unwrap(), new);
        assert!(page(&kept).contains("| 10000 linked clones | 0.500 s | at most 2.00 | met |"));
        let other = [Kept { name: "clones".into(), ..result("clones", 0.6) }];
        assert_ne!(with_headlines(&readme, &other).unwrap(), new);
        assert_ne!(page(&other), page(&kept));
        assert!(with_headlines("no markers", &kept).is_err());
    }

    #[test]
    fn every_headline_names_an_existing_study() {
        for headline in &HEADLINES {
            assert!(Study::EACH.contains(&headline.study), "{}", headline.called);
        }
    }
}
