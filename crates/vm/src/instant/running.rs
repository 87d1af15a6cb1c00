//! Children of a parent that goes on running.
//!
//! An image never changes, and a running guest changes its memory: so the guest goes on in another process, its
//! successor, that maps the image copy-on-write like any child. The successor is set up before the guest has to stand
//! still, so that what the guest notices is: stop, then snapshots and device state at the same time, then that state
//! into the successor.
//!
//! ```text
//! memory of its own     the file itself becomes the image's: no memory moves
//! memory of an image    a copy of that file is made while the guest runs, and what its process has changed since is
//!                       put in; while it stands still, that is done once more, over pages that are there already. What
//!                       is changed is what the guest wrote since its last clone: the next one counts from this one
//! ```
//!
//! 1. Until the successor's guest executes the old process can go on as if nothing had been: an error resumes it.
//! 2. The image's record is there, and the link to the successor's folder ([`Change::take_over`]) is made, before the
//!    successor's guest executes: there is never a moment at which the machine's current process is not the one that
//!    may change the disks, or has memory that no record names.

use super::freeze::{Memories, Taken, at_once};
use super::image::{Image, Images};
use super::state;
use crate::disks::Disks;
use crate::machine::{Change, Successor};
use crate::qemu::features::Features;
use crate::qmp::Client;
use error::Result;
use serde_json::json;
use std::time::{Duration, Instant};

/// Takes an image of a running machine, which goes on, and `also` these snapshots of its disks, at the same point.
/// Gives the image, and how long the guest stood still.
pub fn take(
    change: &Change,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    also: &[(String, String)],
) -> Result<(Taken, Duration)> {
    let machine = change.machine();
    let process = machine.running()?;
    let nbd = disks.server()?;
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    let image = images.begin(machine.definition()?, None)?;
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
            // Whatever was reached, the old process is the machine; resuming a guest that runs does nothing.
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
