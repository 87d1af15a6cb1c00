//! Disks like those of desktops: what deduplication and compression leave of them, against the least that is possible
//! for blocks of 4 KiB.
//!
//! Each disk is a copy of the same Debian, on which other packages were installed, and to which other logs were
//! written, after copying ([`disks`]). The least space is computed from the disks ([`optimum`]): each distinct block
//! once, compressed by itself without any rounding. lamina has to reach nearly that with each codec. VDO's rule,
//! simulated on the same blocks, and btrfs with compression and an offline deduplicator ([`btrfs`]) are reported beside
//! it.
//!
//! Choice and order of the packages and the logs depend on the seed. The times in the file systems do not, so runs
//! differ by some blocks.

mod btrfs;
mod disks;
mod optimum;

use super::{BLOCK, Setting, no_cell, say};
use crate::datastore::Datastore;
use crate::error::{Error, Result};
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::ratio;
use optimum::{Blocks, Codec};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Name of the measured property in the report.
const PROPERTY: &str = "desktops";

/// Least share of the least possible space in the space that is stored.
const SHARE_MIN: f64 = 0.95;

/// The codecs, by the names of lamina's option and of the cells.
const CODECS: [(&str, Codec); 2] = [("lz4", Codec::Lz4), ("zstd:3", Codec::Zstd)];
const VDO: &str = "vdo";
const BTRFS: &str = "btrfs";

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let plan = &setting.plan;
    let names: Vec<&str> = CODECS.iter().map(|(name, _)| *name).chain([VDO, BTRFS]).collect();
    if !names.iter().any(|name| plan.wants(name)) {
        return Err(no_cell(plan, &names));
    }
    let guest = setting.lamina.ancestors().nth(2).unwrap_or(&setting.lamina).join("guest");
    let images = disks::make(&setting.scratch, &guest, plan.disks, plan.seed)?;
    say("computing the least space");
    let mut blocks = Blocks::new()?;
    images.iter().try_for_each(|image| blocks.add(image))?;
    let mut outcome = Outcome::default();
    let mut raw = serde_json::Map::new();
    raw.insert("blocks".into(), content(&blocks, &mut outcome));
    for (name, codec) in CODECS.into_iter().filter(|(name, _)| plan.wants(name)) {
        raw.insert(name.into(), reduced(setting, &images, name, blocks.least(codec), &blocks, &mut outcome)?);
    }
    if plan.wants(VDO) {
        let space = blocks.vdo();
        let share = ratio(blocks.least(Codec::Lz4) as f64, space as f64);
        outcome.findings.extend([
            mib("VDO's rule: space", space),
            Finding::new(PROPERTY, "VDO's rule: share of the least space with LZ4", share, ""),
        ]);
        raw.insert(VDO.into(), json!(space));
    }
    if plan.wants(BTRFS) {
        raw.insert(BTRFS.into(), btrfs::measure(setting, &images, blocks.least(Codec::Zstd), &mut outcome)?);
    }
    outcome.raw = Value::Object(raw);
    Ok(outcome)
}

fn mib(what: impl Into<String>, bytes: u64) -> Finding {
    Finding::new(PROPERTY, what, bytes as f64 / f64::from(1 << 20), "MiB")
}

/// Reports what the disks contain.
fn content(blocks: &Blocks, outcome: &mut Outcome) -> Value {
    outcome.findings.extend([
        mib("data of all disks, without blocks of zeros", blocks.count * BLOCK),
        mib("least space: each distinct block once", blocks.distinct()),
        mib("least space: compressed by LZ4", blocks.least(Codec::Lz4)),
        mib("least space: compressed by Zstandard", blocks.least(Codec::Zstd)),
    ]);
    json!({
        "count": blocks.count, "distinct": blocks.distinct() / BLOCK,
        "least_lz4": blocks.least(Codec::Lz4), "least_zstd": blocks.least(Codec::Zstd),
    })
}

/// Imports the disks, reduces them, and compares what is stored with the least space.
fn reduced(
    setting: &Setting,
    images: &[PathBuf],
    method: &str,
    least: u64,
    blocks: &Blocks,
    outcome: &mut Outcome,
) -> Result<Value> {
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "datastore")?;
    let empty = occupied(datastore.path())?;
    let names: Vec<String> = (0..images.len()).map(|number| format!("desktop{number}")).collect();
    say(&format!("importing the disks ({method})"));
    for (image, disk) in images.iter().zip(&names) {
        datastore.verb(&["disk", "import", "--from", "raw", &image.display().to_string(), disk])?;
    }
    setting.scratch.rest(datastore.path())?;
    let imported = reduction(&datastore)?;
    say(&format!("reducing the disks ({method})"));
    let mut seconds = Vec::new();
    for disk in &names {
        let words = ["disk", "optimize", disk.as_str(), "--compression", method, "--dedup", "datastore"];
        seconds.push(datastore.verb(&words)?.as_secs_f64());
    }
    setting.scratch.rest(datastore.path())?;
    let grown = occupied(datastore.path())?.map_with(empty, u64::saturating_sub);
    let reduction = reduction(&datastore)?;
    let of = |field: &str| {
        let bytes = reduction[field].as_u64();
        bytes.ok_or_else(|| Error::Answer(format!("status --space: no '{field}' in {reduction}")))
    };
    let (mapped, stored) = (of("mapped")?, of("stored")?);
    // Compression and packing loss are estimates if there are many packs. Their difference is exact.
    let (within, between) = (of("within_disks")?, of("between_disks")?);
    let (compression, loss) = (of("compression")?, of("packing_loss")?);
    let once = mapped.saturating_sub(within + between);
    let beyond = once.saturating_sub(compression + least);
    let finding = |what: &str, share: f64| Finding::new(PROPERTY, format!("{method}: {what}"), share, "");
    let share = |part: u64, of: u64| ratio(part as f64, of as f64);
    outcome.findings.extend([
        mib(format!("{method}: mapped"), mapped),
        mib(format!("{method}: shared within disks"), within),
        mib(format!("{method}: shared between disks"), between),
        mib(format!("{method}: saved by compression"), compression),
        mib(format!("{method}: packing loss"), loss),
        mib(format!("{method}: stored"), stored),
        mib(format!("{method}: growth of the data files"), grown.data),
        mib(format!("{method}: growth of all files"), grown.all),
        finding("share of the least space in what is stored", share(least, stored)).at_least(SHARE_MIN),
        finding("the same, by the growth of the data files", share(least, grown.data)),
        // The two parts of what is stored beyond the least space.
        finding("packing loss, of what is stored", share(loss, stored)),
        finding("not compressed as far, or stored again, of what is stored", share(beyond, stored)),
        mib(format!("{method}: equal blocks that are stored again"), once.saturating_sub(blocks.distinct())),
        Finding::new(PROPERTY, format!("{method}: time of all passes"), seconds.iter().sum(), "s"),
    ]);
    setting.scratch.remove(datastore.path())?;
    Ok(json!({
        "imported": imported, "reduction": reduction, "grown_data": grown.data, "grown": grown.all, "seconds": seconds,
    }))
}

/// What `status --space` says about the reduction of data.
fn reduction(datastore: &Datastore) -> Result<Value> {
    let mut status = datastore.ask(&["status", "--space"])?;
    Ok(status["space"]["reduction"].take())
}

/// Bytes that files of a datastore occupy.
struct Occupied {
    /// The data files.
    data: u64,
    /// All files, with the journal and the maps.
    all: u64,
}

impl Occupied {
    fn map_with(self, other: Occupied, with: fn(u64, u64) -> u64) -> Occupied {
        Occupied { data: with(self.data, other.data), all: with(self.all, other.all) }
    }
}

fn occupied(datastore: &Path) -> Result<Occupied> {
    Ok(Occupied { data: scratch::data_allocated(datastore)?, all: scratch::allocated(datastore)? })
}
