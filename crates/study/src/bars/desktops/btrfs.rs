//! btrfs with Zstandard on the same disks, before and after an offline deduplicator.
//!
//! btrfs compresses up to 128 KiB together, so it may take less than the least space for blocks of 4 KiB. But it keeps
//! such an extent as long as one of its blocks is in use, and the deduplicator shares runs of blocks only.

use super::super::{BLOCK, Setting, say};
use super::optimum::LEVEL;
use super::{PROPERTY, mib};
use crate::error::{Doing, Error, Result};
use crate::process;
use crate::report::{Finding, Outcome};
use crate::statistics::ratio;
use crate::volume::Volume;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of the file system for each byte of the images. It is a sparse file.
const SIZE_FACTOR: u64 = 2;
/// Time limit of copying and of the deduplicator.
const TIME_MAX: Duration = Duration::from_secs(3 * 3600);

/// Copies the images to a new btrfs, deduplicates them there, and reports the space.
pub(super) fn measure(setting: &Setting, images: &[PathBuf], least: u64, outcome: &mut Outcome) -> Result<Value> {
    let length = |image: &PathBuf| Ok(fs::metadata(image).doing(|| format!("reading {}", image.display()))?.len());
    let size = images.iter().map(length).sum::<Result<u64>>()? * SIZE_FACTOR;
    let volume = Volume::btrfs(&setting.scratch, "btrfs", size, &format!("compress-force=zstd:{LEVEL}"))?;
    say("copying the disks to btrfs");
    for image in images {
        let mut copy = Command::new("cp");
        process::run_within(copy.arg("--sparse=always").arg(image).arg(volume.path()), TIME_MAX)?;
    }
    let before = used(volume.path())?;
    say("deduplicating the disks on btrfs");
    let began = Instant::now();
    let mut deduplicate = Command::new("duperemove");
    // Blocks within a file are compared too, and parts of extents, as lamina compares them.
    deduplicate.args(["-dr", "-q", "-b", &BLOCK.to_string(), "--dedupe-options=same,partial"]);
    deduplicate.arg("--hashfile").arg(setting.scratch.path("hashes"));
    process::run_within(deduplicate.arg(volume.path()), TIME_MAX)?;
    let seconds = began.elapsed().as_secs_f64();
    let after = used(volume.path())?;
    outcome.findings.extend([
        mib("btrfs: data before deduplication", before.data),
        mib("btrfs: data", after.data),
        mib("btrfs: metadata", after.metadata),
        Finding::new(
            PROPERTY,
            "btrfs: share of the least space in its data",
            ratio(least as f64, after.data as f64),
            "",
        ),
        Finding::new(PROPERTY, "btrfs: time of the deduplicator", seconds, "s"),
    ]);
    Ok(json!({
        "data_before": before.data, "metadata_before": before.metadata,
        "data": after.data, "metadata": after.metadata, "seconds": seconds,
    }))
}

struct Used {
    data: u64,
    /// Each copy of the metadata counts.
    metadata: u64,
}

/// Bytes in use, after everything was written.
fn used(folder: &Path) -> Result<Used> {
    process::run(Command::new("btrfs").args(["filesystem", "sync"]).arg(folder))?;
    let text = process::run(Command::new("btrfs").args(["filesystem", "df", "-b"]).arg(folder))?;
    let of = |kind: &str| {
        let line = text.lines().find(|line| line.starts_with(kind))?;
        let bytes: u64 = line.rsplit_once("used=")?.1.trim().parse().ok()?;
        Some(if line.contains("DUP") { 2 * bytes } else { bytes })
    };
    let both = of("Data").zip(of("Metadata"));
    let (data, metadata) = both.ok_or_else(|| Error::Answer(format!("btrfs filesystem df: {text}")))?;
    Ok(Used { data, metadata })
}
