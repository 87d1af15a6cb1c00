//! Freezing a machine: its process ends and leaves a memory image, from which the machine and its clones continue.

use super::image::{Image, Images};
use super::{pages, state};
use crate::disks::Disks;
use crate::durable;
use crate::machine::{Change, Holding, Machine, MachineState, MemoryRecord, remove_if_there};
use crate::qemu::features::Features;
use crate::qmp::Client;
use error::{Error, ErrorKind, IoContext, Result};
use serde_json::json;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Prefix of the disk snapshots that belong to an image; the image's name follows.
pub const PREFIX: &str = "instant-";
/// The file in a machine's folder that names the image from which it continues.
const FROZEN: &str = "frozen";
/// How long the guest's agent may take to answer.
const AGENT_PATIENCE: Duration = Duration::from_secs(5);

/// A new image, with the duration of each step.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The image.
    pub image: Image,
    /// Duration of pausing the guest.
    pub stop: Duration,
    /// Duration of the snapshots of the disks.
    pub snapshots: Duration,
    /// Duration of saving device state and memory, in parallel with the snapshots.
    pub save: Duration,
}

/// The image that a machine is frozen to.
pub fn frozen(machine: &Machine) -> Result<Option<String>> {
    Ok(durable::read(&machine.folder().join(FROZEN))?.map(|id| id.trim().to_owned()))
}

/// Whether the machine continues from an image. A server of root calls this in a datastore of another user, who could
/// have put a pipe in place of the file.
pub fn is_frozen(machine: &Machine) -> bool {
    machine.folder().join(FROZEN).exists()
}

/// Marks the machine as no longer frozen, before its disks change.
pub fn forget(machine: &Machine) -> Result<()> {
    remove_if_there(&machine.folder().join(FROZEN))
}

/// Freezes a running machine: its process ends, and the machine and its clones continue from the image. `holding`
/// states that the guest is paused meanwhile.
pub fn freeze(
    change: &Change,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    holding: &Holding,
) -> Result<Taken> {
    let machine = change.machine();
    let process = machine.running()?;
    let executes = match machine.state()? {
        MachineState::Running => true,
        MachineState::Paused => false,
        _ => {
            let text = format!("machine '{}' neither runs nor is paused", machine.name());
            return Err(Error::new(ErrorKind::WrongState, text));
        }
    };
    machine.definition()?.check_savable()?;
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    // The agent is queried before the guest is paused, because a paused guest cannot answer. A command that makes
    // clones waits for the clones' agents only if the source's agent answers.
    let agent = match executes {
        true => Some(machine.agent(AGENT_PATIENCE)?.is_some()),
        false => None,
    };
    let image = images.begin(machine.definition()?, agent, machine.uses_passt())?;
    let taken = Memories::prepare(machine.memory()?, images, &image, process.pid())
        .and_then(|memory| take(&mut monitor, images, disks, features, image.clone(), &memory))
        // From here on the machine continues from the image, and its process must not execute the guest any more.
        .and_then(|taken| {
            durable::write(&machine.folder().join(FROZEN), image.id.as_bytes())?;
            Ok(taken)
        });
    let taken = match taken {
        Ok(taken) => taken,
        Err(error) => {
            undo(machine, images, disks, &image, executes, holding, &mut monitor)?;
            return Err(error);
        }
    };
    process.quit(Some(&mut monitor))?;
    change.sweep()?;
    Ok(taken)
}

/// Restores the state that a machine had before it could not be frozen. Its guest is paused, and `executes` states
/// whether it executed before.
pub(crate) fn undo(
    machine: &Machine,
    images: &Images,
    disks: &dyn Disks,
    image: &Image,
    executes: bool,
    holding: &Holding,
    monitor: &mut Client,
) -> Result<()> {
    // If only the flush of its folder has failed, the file `FROZEN` exists already. While it exists, the guest must
    // not execute and the image must stay: the next command ends the process, and the machine continues from the image.
    forget(machine).inspect_err(|_| holding.keep())?;
    images.abandon(image, disks);
    match executes {
        true => holding.resume(monitor),
        false => Ok(()),
    }
}

/// The memory of a new image.
pub(crate) enum Memories {
    /// The image's memory file is complete, because the process maps that file itself.
    Whole,
    /// The memory file is a copy of the file of an older image. The process maps that older file copy-on-write. Pages
    /// that the process has changed since the copy are missing.
    Copy { pid: i32, mapped: PathBuf, copy: File, began: PathBuf },
}

impl Memories {
    /// Prepares the memory while the guest runs.
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
                // The pages that are changed now are copied, so that space for most pages is allocated before the guest
                // is paused.
                pages::copy_changed(pid, &mapped, &copy)?;
                Ok(Self::Copy { pid, mapped, copy, began: before.state() })
            }
            MemoryRecord::Private => Err(Error::new(
                ErrorKind::Unsupported,
                "its memory is in no file and cannot be shared; stop it and start it again",
            )),
        }
    }

    /// Saves the device state to `file` and copies the missing pages. The guest is paused.
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
    // QEMU completes requests under way and flushes the disks.
    monitor.execute("stop", json!({}))?;
    let stopped = Instant::now();
    let (snapshots, save) = at_once(disks, &image, &[], || memory.save(monitor, features, &image.state()))?;
    images.finish(&image, features)?;
    images.settle(&image)?;
    Ok(Taken { image, stop: stopped - begun, snapshots, save })
}

/// Takes the snapshots of the image's disks and the snapshots `also`, while `save` runs in parallel. The guest is
/// paused, so the snapshots and `save` record the same state. Returns the duration of the snapshots, and of `save`.
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
