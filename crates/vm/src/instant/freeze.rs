//! A parent that stops and leaves an image.

use super::image::{Image, Images, Record, Snapshot};
use super::state;
use crate::disks::Disks;
use crate::durable;
use crate::machine::{Change, Machine, MemoryRecord, State};
use crate::qemu::features::Features;
use backend::{Error, ErrorKind, IoContext, Result};
use serde_json::json;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How the names of the disks' snapshots of an image begin; its name follows.
pub const PREFIX: &str = "instant-";
/// The file in a machine's folder that names the image it was frozen to.
const FROZEN: &str = "frozen";
/// How long QEMU may take to end.
const END_PATIENCE: Duration = Duration::from_secs(20);

/// How a moment was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The image.
    pub image: Image,
    /// How long stopping took.
    pub stop: Duration,
    /// How long the snapshots of the disks took.
    pub snapshots: Duration,
    /// How long saving the device state took.
    pub save: Duration,
}

/// The image that a machine was frozen to.
pub fn frozen(machine: &Machine) -> Result<Option<String>> {
    let path = machine.folder().join(FROZEN);
    match fs::read_to_string(&path) {
        Ok(id) => Ok(Some(id.trim().to_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("reading '{}'", path.display()), e)),
    }
}

/// Freezes a running machine: it ends, and its children and itself begin where it stopped.
pub fn freeze(change: &Change, images: &Images, disks: &dyn Disks, features: &Features) -> Result<Taken> {
    let machine = change.machine();
    let process = machine.running()?;
    let memory = own_memory(machine)?;
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    let (id, file) = images.begin()?;
    let outcome = take(machine, &mut monitor, images, disks, features, (&id, file), memory);
    let taken = match outcome {
        Ok(taken) => taken,
        Err(error) => {
            images.abandon(&id);
            // As it was before.
            monitor.execute("cont", json!({}))?;
            return Err(error);
        }
    };
    durable::write(&machine.folder().join(FROZEN), id.as_bytes())?;
    monitor.send(&json!({ "execute": "quit" }))?;
    if !process.wait(END_PATIENCE)? {
        process.kill()?;
    }
    Ok(taken)
}

/// The memory file of a machine whose memory can become an image.
fn own_memory(machine: &Machine) -> Result<PathBuf> {
    match machine.memory()? {
        MemoryRecord::Own(file) => Ok(file),
        MemoryRecord::Image(_) | MemoryRecord::Private => {
            let text = format!(
                "the memory of machine '{}' is its own process's alone: it cannot be left to others; stop and start it, \
                 or clone the one it came from",
                machine.name()
            );
            Err(Error::new(ErrorKind::Unsupported, text))
        }
    }
}

fn take(
    machine: &Machine,
    monitor: &mut crate::qmp::Client,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    (id, file): (&str, PathBuf),
    memory: PathBuf,
) -> Result<Taken> {
    let definition = machine.definition()?;
    if machine.state()? == State::Other {
        let text = format!("machine '{}' neither runs nor is it paused", machine.name());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let begun = Instant::now();
    // QEMU lets requests under way end, and flushes the disks.
    monitor.execute("stop", json!({}))?;
    let stopped = Instant::now();
    let names: Vec<(String, String)> =
        definition.disks.iter().map(|disk| (disk.name.clone(), format!("{PREFIX}{id}"))).collect();
    disks.snapshot(&names)?;
    let snapshots = Instant::now();
    state::save(monitor, features, &file)?;
    let saved = Instant::now();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    fs::File::open(&file).and_then(|file| file.sync_all()).during(|| format!("writing '{}'", file.display()))?;
    let record = Record {
        version: 1,
        created,
        memory,
        snapshots: names.into_iter().map(|(disk, snapshot)| Snapshot { disk, snapshot }).collect(),
        machine: definition,
    };
    Ok(Taken {
        image: images.finish(id, record)?,
        stop: stopped - begun,
        snapshots: snapshots - stopped,
        save: saved - snapshots,
    })
}
