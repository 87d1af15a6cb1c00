//! Children of a parent that goes on running.
//!
//! An image never changes, and a running guest changes its memory: so the guest goes on in another process, its
//! successor, that maps the image copy-on-write like any child. The successor is set up before the guest has to stand
//! still, so that what the guest notices is: stop, snapshots, device state out of one process and into the other.
//!
//! ```text
//! memory of its own     the file itself becomes the image's
//! memory of an image    a copy of that file is made while the guest runs; while it stands still the pages that its
//!                       process has changed since are put in: they are as many as it wrote since its last clone
//! ```
//!
//! 1. Until the successor has loaded the state the old process can go on as if nothing had been: an error resumes it.
//! 2. The link to the successor's folder ([`Change::take_over`]) is made before the successor's guest executes: there is
//!    never a moment at which the process that counts is not the one that may change the disks.

use super::freeze::{PREFIX, Taken};
use super::image::{Images, Record, Snapshot};
use super::{pages, state};
use crate::disks::Disks;
use crate::machine::{Change, MemoryRecord, Start, Successor, remove_if_there};
use crate::qemu::command::Memory;
use crate::qemu::features::Features;
use crate::qmp::Client;
use backend::{Error, ErrorKind, IoContext, Result};
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long the old process may take to end.
const END_PATIENCE: Duration = Duration::from_secs(20);

/// Takes an image of a running machine, which goes on. Gives the image, and how long the guest stood still.
pub fn take(change: &Change, images: &Images, disks: &dyn Disks, features: &Features) -> Result<(Taken, Duration)> {
    let machine = change.machine();
    let process = machine.running()?;
    let nbd = disks.server()?;
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    let memory = Next::prepare(machine.memory()?, images, process.pid())?;
    let (id, file) = images.begin()?;
    let start = Start {
        features,
        nbd: &nbd,
        memory: Memory::CopyOnWrite(memory.file.clone()),
        record: MemoryRecord::Image(id.clone()),
        incoming: true,
    };
    let outcome = change.set_up(start).and_then(|mut successor| {
        let outcome = state::prepare(&mut successor.monitor, features).and_then(|()| {
            hand_over(change, &mut monitor, &mut successor, images, disks, features, (&id, &file), &memory)
        });
        if outcome.is_err() {
            let _ = successor.process.kill();
        }
        outcome
    });
    match outcome {
        Ok(done) => {
            if !process.wait(END_PATIENCE)? {
                process.kill()?;
            }
            change.sweep()?;
            Ok(done)
        }
        Err(error) => {
            images.abandon(&id);
            memory.abandon()?;
            // Whatever was reached, the old process is the machine; resuming a guest that runs does nothing.
            monitor.execute("cont", json!({}))?;
            Err(error)
        }
    }
}

/// The memory file of the image to be.
struct Next {
    file: PathBuf,
    /// Where the old process has it mapped copy-on-write, what it mapped, and the copy to complete.
    changed: Option<(i32, PathBuf, File)>,
}

impl Next {
    fn prepare(record: MemoryRecord, images: &Images, pid: i32) -> Result<Self> {
        match record {
            MemoryRecord::Own(file) => Ok(Self { file, changed: None }),
            MemoryRecord::Image(id) => {
                let mapped = images.get(&id)?.record.memory;
                let file = images.new_memory()?;
                let copy = pages::copy_file(&mapped, &file).inspect_err(|_| {
                    let _ = std::fs::remove_file(&file);
                })?;
                Ok(Self { file, changed: Some((pid, mapped, copy)) })
            }
            MemoryRecord::Private => Err(Error::new(
                ErrorKind::Unsupported,
                "its memory is in no file and cannot be left to others; stop it and start it again",
            )),
        }
    }

    /// With the guest standing still: puts in what it has changed.
    fn complete(&self) -> Result<()> {
        match &self.changed {
            Some((pid, mapped, copy)) => pages::copy_changed(*pid, mapped, copy).map(drop),
            None => Ok(()),
        }
    }

    fn abandon(&self) -> Result<()> {
        match self.changed {
            Some(_) => remove_if_there(&self.file),
            None => Ok(()),
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn hand_over(
    change: &Change,
    monitor: &mut Client,
    successor: &mut Successor,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    (id, file): (&str, &Path),
    memory: &Next,
) -> Result<(Taken, Duration)> {
    let definition = change.machine().definition()?;
    let names: Vec<(String, String)> =
        definition.disks.iter().map(|disk| (disk.name.clone(), format!("{PREFIX}{id}"))).collect();
    let begun = Instant::now();
    monitor.execute("stop", json!({}))?;
    let stopped = Instant::now();
    disks.snapshot(&names)?;
    let snapshots = Instant::now();
    state::save(monitor, features, file)?;
    memory.complete()?;
    let saved = Instant::now();
    state::load(&mut successor.monitor, features, file)?;
    change.take_over(successor)?;
    // The old one has let go of its disks: it stands still and is asked for nothing more.
    successor.monitor.execute("cont", json!({}))?;
    let stun = begun.elapsed();
    monitor.send(&json!({ "execute": "quit" }))?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    File::open(file).and_then(|file| file.sync_all()).during(|| format!("writing '{}'", file.display()))?;
    let record = Record {
        version: 1,
        created,
        memory: memory.file.clone(),
        snapshots: names.into_iter().map(|(disk, snapshot)| Snapshot { disk, snapshot }).collect(),
        machine: definition,
    };
    let image = images.finish(id, record)?;
    Ok((Taken { image, stop: stopped - begun, snapshots: snapshots - stopped, save: saved - snapshots }, stun))
}
