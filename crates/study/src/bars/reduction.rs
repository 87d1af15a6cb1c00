//! Whether the reported reduction of data by deduplication and compression is what fio generated, and what the files of
//! the datastore take.

use super::{BLOCK, Setting, no_cell, say};
use crate::datastore::Datastore;
use crate::error::{Doing, Error, Result};
use crate::process;
use crate::report::{Finding, Outcome};
use crate::scratch;
use crate::statistics::ratio;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufReader, Read};
use std::path::Path;
use std::process::Command;

/// Name of the measured property in the report.
const PROPERTY: &str = "reduction";

/// Shares of blocks, in percent, that fio writes as repetitions.
const REPEATED: [u32; 5] = [0, 25, 50, 75, 90];
/// Shares of each block, in percent, that fio fills with a constant.
const COMPRESSIBLE: [u32; 3] = [0, 50, 75];
/// Largest difference between a reported and a generated share.
const DIFFERENCE_MAX: f64 = 0.02;
/// Largest difference between the reported bytes and the growth of the datastore's files, as a share of the bytes.
const SPACE_DIFFERENCE_MAX: f64 = 0.05;

const DISK: &str = "disk";
const SECOND: &str = "second";

/// Runs the study.
pub fn measure(setting: &Setting) -> Result<Outcome> {
    let all = COMPRESSIBLE.iter().flat_map(|compressible| REPEATED.map(|repeated| (repeated, *compressible)));
    let named: Vec<(String, (u32, u32))> =
        all.map(|cell| (format!("dedupe {} % compress {} %", cell.0, cell.1), cell)).collect();
    let wanted: Vec<_> = named.iter().filter(|(name, _)| setting.plan.wants(name)).collect();
    if wanted.is_empty() {
        return Err(no_cell(&setting.plan, &named.iter().map(|(name, _)| name).collect::<Vec<_>>()));
    }
    let mut outcome = Outcome::default();
    let mut raw = serde_json::Map::new();
    for (name, (repeated, compressible)) in wanted {
        say(name);
        raw.insert(name.clone(), cell(setting, name, *repeated, *compressible, &mut outcome)?);
    }
    outcome.raw = Value::Object(raw);
    Ok(outcome)
}

/// Writes two images with fio, imports them as two disks, reduces them, and compares.
fn cell(setting: &Setting, name: &str, repeated: u32, compressible: u32, outcome: &mut Outcome) -> Result<Value> {
    let datastore = Datastore::init(&setting.lamina, &setting.scratch, "datastore")?;
    let empty = scratch::data_allocated(datastore.path())?;
    let mut generated = Content::default();
    for disk in [DISK, SECOND] {
        let image = setting.scratch.path("image.raw");
        generate(&image, setting.plan.disk_size, repeated, compressible)?;
        generated.add(&image)?;
        let path = image.display().to_string();
        datastore.verb(&["disk", "import", "--from", "raw", &path, disk])?;
        setting.scratch.remove(&image)?;
    }
    // The first pass over a disk finds the equal blocks of both.
    for disk in [DISK, SECOND] {
        datastore.verb(&["disk", "optimize", disk, "--compression", "lz4", "--dedup", "datastore"])?;
    }
    setting.scratch.rest(datastore.path())?;
    let grown = scratch::data_allocated(datastore.path())?.saturating_sub(empty);
    let reported = datastore.ask(&["status", "--space"])?;
    let reduction = &reported["space"]["reduction"];
    let of = |field: &str| {
        let bytes = reduction[field].as_u64();
        bytes.ok_or_else(|| Error::Answer(format!("status --space: no '{field}' in {reported}")))
    };
    let (mapped, stored) = (of("mapped")? as f64, of("stored")? as f64);
    let shared = ratio((of("within_disks")? + of("between_disks")?) as f64, mapped);
    let compressed = of("compression")? as f64;
    let stored_once = mapped * (1.0 - shared);
    // What LZ4 leaves of each block, and the rounding of packs to blocks, are apart from what fio has generated.
    let loss = ratio(of("packing_loss")? as f64, stored_once);
    let difference = (shared - generated.repeated()).abs();
    outcome.findings.extend([
        Finding::new(PROPERTY, format!("{name}: equal blocks reported"), shared, ""),
        Finding::new(PROPERTY, format!("{name}: difference to those generated"), difference, "")
            .at_most(DIFFERENCE_MAX),
    ]);
    let space = ratio((grown as f64 - stored).abs(), stored);
    let wanted = f64::from(compressible) / 100.0;
    let saved = ratio(compressed, stored_once);
    let what = format!("{name}: saved by LZ4 of what is stored once");
    outcome.findings.push(match compressible {
        0 => Finding::new(PROPERTY, what, saved, "").at_most(DIFFERENCE_MAX),
        _ => Finding::new(PROPERTY, what, saved, "").at_least(wanted - DIFFERENCE_MAX),
    });
    outcome.findings.extend([
        Finding::new(PROPERTY, format!("{name}: loss by rounding to blocks"), loss, ""),
        Finding::new(PROPERTY, format!("{name}: difference of the files' space"), space, "")
            .at_most(SPACE_DIFFERENCE_MAX),
    ]);
    setting.scratch.remove(datastore.path())?;
    Ok(json!({
        "blocks": generated.blocks, "distinct": generated.distinct.len(), "grown": grown, "reduction": reduction,
    }))
}

/// Lets fio write an image whose blocks repeat and can be compressed.
fn generate(image: &Path, size: u64, repeated: u32, compressible: u32) -> Result<()> {
    let mut command = Command::new("fio");
    command.args(["--name=content", "--ioengine=psync", "--rw=write", "--bs=4k", "--randrepeat=0"]);
    command.arg(format!("--filename={}", image.display())).arg(format!("--size={size}"));
    command.arg(format!("--dedupe_percentage={repeated}"));
    // Without this option fio writes the same buffer again and again.
    command.arg("--refill_buffers");
    if compressible > 0 {
        command.arg(format!("--buffer_compress_percentage={compressible}"));
    }
    process::run(&mut command).map(drop)
}

/// The blocks of images.
#[derive(Default)]
struct Content {
    blocks: u64,
    distinct: HashSet<u64>,
}

impl Content {
    fn add(&mut self, image: &Path) -> Result<()> {
        let doing = || format!("reading {}", image.display());
        let mut reader = BufReader::with_capacity(1 << 20, File::open(image).doing(doing)?);
        let mut block = [0; BLOCK as usize];
        while reader.read_exact(&mut block).is_ok() {
            let mut hasher = DefaultHasher::new();
            hasher.write(&block);
            self.distinct.insert(hasher.finish());
            self.blocks += 1;
        }
        Ok(())
    }

    /// The share of blocks that repeat another one.
    fn repeated(&self) -> f64 {
        1.0 - ratio(self.distinct.len() as f64, self.blocks as f64)
    }
}
