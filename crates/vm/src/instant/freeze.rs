//! A parent that stops and leaves an image.

use super::image::{Image, Images};
use super::{pages, state};
use crate::disks::Disks;
use crate::durable;
use crate::machine::{Change, Machine, MachineState, MemoryRecord, remove_if_there};
use crate::qemu::features::Features;
use crate::qmp::Client;
use error::{Error, ErrorKind, IoContext, Result};
use serde_json::json;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How the names of the disks' snapshots of an image begin; its name follows.
pub const PREFIX: &str = "instant-";
/// The file in a machine's folder that names the image it was frozen to.
const FROZEN: &str = "frozen";
/// How long the guest's agent may take to answer.
const AGENT_PATIENCE: Duration = Duration::from_secs(5);

/// How a moment was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The image.
    pub image: Image,
    /// How long stopping took.
    pub stop: Duration,
    /// How long the snapshots of the disks took.
    pub snapshots: Duration,
    /// How long saving device state and memory took, at the same time.
    pub save: Duration,
}

/// The image that a machine was frozen to.
pub fn frozen(machine: &Machine) -> Result<Option<String>> {
    Ok(durable::read(&machine.folder().join(FROZEN))?.map(|id| id.trim().to_owned()))
}

/// The machine is frozen no more: its disks may move on from here.
pub fn forget(machine: &Machine) -> Result<()> {
    remove_if_there(&machine.folder().join(FROZEN))
}

/// Freezes a running machine: it ends, and its children and itself begin where it stopped.
pub fn freeze(change: &Change, images: &Images, disks: &dyn Disks, features: &Features) -> Result<Taken> {
    let machine = change.machine();
    let process = machine.running()?;
    let executes = match machine.state()? {
        MachineState::Running => true,
        MachineState::Paused => false,
        _ => {
            let text = format!("machine '{}' neither runs nor is paused", machine.name());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    // Asked now, because a guest that stands still cannot answer: whether to wait for the agents of its children.
    let agent = match executes {
        true => Some(machine.agent(AGENT_PATIENCE)?.is_some()),
        false => None,
    };
    let image = images.begin(machine.definition()?, agent)?;
    let taken = Memories::prepare(machine.memory()?, images, &image, process.pid())
        .and_then(|memory| take(&mut monitor, images, disks, features, image.clone(), &memory))
        // From here on the machine is this file, and its process has nothing more to say.
        .and_then(|taken| {
            durable::write(&machine.folder().join(FROZEN), image.id.as_bytes())?;
            Ok(taken)
        });
    let taken = match taken {
        Ok(taken) => taken,
        Err(error) => {
            images.abandon(&image, disks);
            // As it was before.
            if executes {
                monitor.execute("cont", json!({}))?;
            }
            return Err(error);
        }
    };
    process.quit(Some(&mut monitor))?;
    change.sweep()?;
    Ok(taken)
}

/// The memory of the image to be.
pub(crate) enum Memories {
    /// It is there: the old process maps nothing else.
    Whole,
    /// It is a copy of what the old process maps copy-on-write, and lacks what that has changed.
    Copy { pid: i32, mapped: PathBuf, copy: File, began: PathBuf },
}

impl Memories {
    /// While the guest runs.
    pub(crate) fn prepare(record: MemoryRecord, images: &Images, image: &Image, pid: i32) -> Result<Self> {
        let file = &image.record.memory;
        match record {
            MemoryRecord::Own(own) => {
                fs::hard_link(&own, file).during(|| format!("keeping memory as '{}'", file.display()))?;
                Ok(Self::Whole)
            }
            MemoryRecord::Image(id) => {
                let before = images.get(&id)?;
                let mapped = before.record.memory.clone();
                let copy = pages::copy_file(&mapped, file)?;
                // Puts pages where there were none, so that what is left for later is to overwrite.
                pages::copy_changed(pid, &mapped, &copy)?;
                Ok(Self::Copy { pid, mapped, copy, began: before.state() })
            }
            MemoryRecord::Private => Err(Error::new(
                ErrorKind::Unsupported,
                "its memory is in no file and cannot be shared; stop it and start it again",
            )),
        }
    }

    /// While it stands still: the state of its devices to `file`, and what memory of the image still lacks.
    pub(crate) fn save(&self, monitor: &mut Client, features: &Features, file: &Path) -> Result<()> {
        match self {
            Self::Whole => state::save(monitor, features, file),
            Self::Copy { pid, mapped, copy, began } => {
                state::save_above(monitor, features, began, file)?;
                pages::copy_changed(*pid, mapped, copy).map(drop)
            }
        }
    }
}

fn take(
    monitor: &mut Client,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    image: Image,
    memory: &Memories,
) -> Result<Taken> {
    let begun = Instant::now();
    // QEMU lets requests under way end, and flushes the disks.
    monitor.execute("stop", json!({}))?;
    let stopped = Instant::now();
    let (snapshots, save) = at_once(disks, &image, &[], || memory.save(monitor, features, &image.state()))?;
    images.finish(&image, features)?;
    images.settle(&image)?;
    Ok(Taken { image, stop: stopped - begun, snapshots, save })
}

/// Takes the disks' snapshots, and `also` these, while `save` takes the rest: the guest stands still, and neither looks
/// at the other. How long each took.
pub(super) fn at_once(
    disks: &dyn Disks,
    image: &Image,
    also: &[(String, String)],
    save: impl FnOnce() -> Result<()>,
) -> Result<(Duration, Duration)> {
    let names: Vec<(String, String)> =
        image.record.snapshots.iter().map(|one| (one.disk.clone(), one.snapshot.clone())).collect();
    let died = |_| Err(Error::new(ErrorKind::Io, "a thread that takes snapshots has panicked"));
    thread::scope(|scope| {
        let snapshots = scope.spawn(|| {
            let begun = Instant::now();
            match names.is_empty() {
                true => Ok(Duration::ZERO),
                false => {
                    disks.snapshot(&names)?;
                    disks.snapshot(also)?;
                    Ok(begun.elapsed())
                }
            }
        });
        let begun = Instant::now();
        let saved = save().map(|()| begun.elapsed());
        Ok((snapshots.join().unwrap_or_else(died)?, saved?))
    })
}
