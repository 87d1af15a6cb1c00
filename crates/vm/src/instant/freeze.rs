//! A parent that stops and leaves an image.

use super::image::{Image, Images};
use super::state;
use crate::disks::Disks;
use crate::durable;
use crate::machine::{Change, Machine, MemoryRecord, State};
use crate::qemu::features::Features;
use crate::qmp::Client;
use backend::{Error, ErrorKind, IoContext, Result};
use serde_json::json;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

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
    /// How long saving device state and memory took, at the same time.
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
    let executes = match machine.state()? {
        State::Running => true,
        State::Paused => false,
        _ => {
            let text = format!("machine '{}' neither runs nor is it paused", machine.name());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    };
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    let image = images.begin(machine.definition()?)?;
    let taken = take(&mut monitor, images, disks, features, image.clone(), memory)
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
    let quit = monitor.send(&json!({ "execute": "quit" }));
    if quit.is_err() || !process.wait(END_PATIENCE)? {
        process.kill()?;
        process.wait(END_PATIENCE)?;
    }
    change.sweep()?;
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
    monitor: &mut Client,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    image: Image,
    memory: PathBuf,
) -> Result<Taken> {
    let begun = Instant::now();
    // QEMU lets requests under way end, and flushes the disks.
    monitor.execute("stop", json!({}))?;
    let stopped = Instant::now();
    let (snapshots, save) = at_once(disks, &image, || {
        state::save(monitor, features, &image.state())?;
        fs::hard_link(&memory, &image.record.memory)
            .during(|| format!("keeping memory as '{}'", image.record.memory.display()))
    })?;
    images.finish(&image, features)?;
    images.settle(&image)?;
    Ok(Taken { image, stop: stopped - begun, snapshots, save })
}

/// Takes the disks' snapshots while `save` takes the rest: the guest stands still, and neither looks at the other. How
/// long each took.
pub(super) fn at_once(
    disks: &dyn Disks,
    image: &Image,
    save: impl FnOnce() -> Result<()>,
) -> Result<(Duration, Duration)> {
    let names: Vec<(String, String)> =
        image.record.snapshots.iter().map(|one| (one.disk.clone(), one.snapshot.clone())).collect();
    let died = |_| Err(Error::new(ErrorKind::Io, "a thread that takes snapshots has died"));
    thread::scope(|scope| {
        let snapshots = scope.spawn(|| {
            let begun = Instant::now();
            match names.is_empty() {
                true => Ok(Duration::ZERO),
                false => disks.snapshot(&names).map(|()| begun.elapsed()),
            }
        });
        let begun = Instant::now();
        let saved = save().map(|()| begun.elapsed());
        Ok((snapshots.join().unwrap_or_else(died)?, saved?))
    })
}
