//! Memory images of a parent that continues to run.
//!
//! An image never changes, but a running guest changes its memory. So the guest continues in another process, its
//! successor, that maps the image copy-on-write as the process of a clone does. The successor is set up before the
//! guest is paused. The pause consists of: stopping the guest, taking disk snapshots and device state in parallel, and
//! loading the state into the successor.
//!
//! ```text
//! memory in its own file the file itself becomes the image's memory; no data is copied
//! memory of an image     the image's file is copied while the guest runs, then the pages that its process has
//!                       changed; pages that change meanwhile are copied again while the guest is paused. These pages
//!                       are few: a process has changed no page when it becomes the successor, so only the writes
//!                       since the last clone matter
//! ```
//!
//! 1. Until the successor executes the guest, the old process can continue: after an error, the old process is resumed.
//! 2. The image's record exists and the link to the successor's folder is replaced ([`Change::take_over`]) before the
//!    successor executes the guest. So at every moment only the machine's current process can change the disks, and its
//!    memory is named by a record.

use super::freeze::{Memories, Taken, at_once};
use super::image::{Image, Images};
use super::state;
use crate::definition::Vnc;
use crate::disks::Disks;
use crate::machine::{Change, Successor};
use crate::qemu::features::Features;
use crate::qmp::Client;
use error::{Error, ErrorKind, Result};
use serde_json::json;
use std::time::{Duration, Instant};

/// Takes an image of a running machine, which continues to run, and at the same point the snapshots `also` of its
/// disks. Returns the image, and how long the guest was paused.
pub fn take(
    change: &Change,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    also: &[(String, String)],
) -> Result<(Taken, Duration)> {
    let machine = change.machine();
    let process = machine.running()?;
    let definition = machine.definition()?;
    definition.check_savable()?;
    if let Some(Vnc::Tcp(address)) = definition.vnc {
        let name = machine.name();
        let text = format!(
            "machine '{name}' has VNC on {address}, where its process and the one that continues its guest cannot both \
             listen: freeze it, or use 'lamina vm edit {name} --vnc unix' while it is off"
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let nbd = disks.server()?;
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    let image = images.begin(machine.definition()?, None, machine.uses_passt())?;
    let outcome = Memories::prepare(machine.memory()?, images, &image, process.pid()).and_then(|memory| {
        let mut successor = change.set_up(image.start(features, &nbd))?;
        let outcome = state::prepare(&mut successor.monitor, features).and_then(|()| {
            Handover { change, images, disks, features, image: &image, also, memory }.run(&mut monitor, &mut successor)
        });
        if outcome.is_err() {
            let _ = successor.process.end();
        }
        outcome
    });
    let done = match outcome {
        Ok(done) => done,
        Err(error) => {
            // After any of these errors the old process is still the machine's process. Resuming a guest that is not
            // paused has no effect.
            monitor.execute("cont", json!({}))?;
            images.abandon(&image, disks);
            change.sweep()?;
            return Err(error);
        }
    };
    process.quit(Some(&mut monitor))?;
    images.settle(&image)?;
    change.sweep()?;
    Ok(done)
}

struct Handover<'a> {
    change: &'a Change,
    images: &'a Images,
    disks: &'a dyn Disks,
    features: &'a Features,
    image: &'a Image,
    also: &'a [(String, String)],
    memory: Memories,
}

impl Handover<'_> {
    fn run(self, old: &mut Client, successor: &mut Successor) -> Result<(Taken, Duration)> {
        let Self { change, images, disks, features, image, also, memory } = self;
        let file = image.state();
        let begun = Instant::now();
        old.execute("stop", json!({}))?;
        let stopped = Instant::now();
        let (snapshots, save) = at_once(disks, image, also, || memory.save(old, features, &file))?;
        state::load(&mut successor.monitor, features, &file)?;
        images.finish(image, features)?;
        change.take_over(successor)?;
        successor.monitor.execute("cont", json!({}))?;
        let stun = begun.elapsed();
        Ok((Taken { image: image.clone(), stop: stopped - begun, snapshots, save }, stun))
    }
}
