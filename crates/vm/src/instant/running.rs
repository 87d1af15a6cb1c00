//! Memory images of a parent that continues to run.
//!
//! An image never changes, but a running guest changes its memory. So the guest continues in another process, its
//! successor, that maps the image copy-on-write as the process of a clone does. The successor is set up before the
//! guest is paused. The pause consists of: stopping the guest, taking disk snapshots and device state in parallel, and
//! loading the state into the successor.
//!
//! ```text
//! memory in its own file   the file itself becomes the image's memory; no data is copied
//! memory of an image       the image's file is copied while the guest runs, then the pages that its process has
//!                          changed; pages that change meanwhile are copied again while the guest is paused. These
//!                          pages are few: a process has changed no page when it becomes the successor, so only the
//!                          writes since the last clone matter
//! ```
//!
//! 1. Until the successor executes the guest, the old process can continue: after an error, the old process is resumed.
//!    If it is unknown whether the successor executes the guest, the old process ends.
//! 2. The image's record exists and the link to the successor's folder is replaced ([`Change::take_over`]) before the
//!    successor executes the guest. So at every moment only the machine's current process can change the disks, and its
//!    memory is named by a record.

use super::freeze::{Memories, Taken, at_once};
use super::image::{Image, Images};
use super::state;
use crate::definition::Vnc;
use crate::disks::Disks;
use crate::machine::{Change, Holding, Successor};
use crate::qemu::command::RunFolder;
use crate::qemu::features::Features;
use crate::qmp::Client;
use error::{Error, ErrorKind, Result};
use serde_json::json;
use std::time::{Duration, Instant};

/// Takes an image of a running machine, which continues to run, and at the same point the snapshots `also` of its
/// disks. `holding` states that the guest is paused meanwhile. Returns the image, and how long the guest was paused.
pub fn take(
    change: &Change,
    images: &Images,
    disks: &dyn Disks,
    features: &Features,
    also: &[(String, String)],
    holding: &Holding,
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
    let (done, unknown) = match outcome {
        Ok(done) => done,
        Err(error) => {
            // After any of these errors the old process is still the machine's process. Resuming a guest that is not
            // paused has no effect.
            holding.resume(&mut monitor)?;
            images.abandon(&image, disks);
            change.sweep()?;
            return Err(error);
        }
    };
    if unknown.is_some() {
        holding.keep();
    }
    process.quit(Some(&mut monitor))?;
    images.settle(&image)?;
    change.sweep()?;
    match unknown {
        Some(error) => Err(error.context(format!(
            "the guest of machine '{}' may be paused, and the next command about machines resumes it",
            machine.name()
        ))),
        None => Ok(done),
    }
}

/// Makes the successor the machine's process and lets it execute the guest. After an error the former process is still
/// the machine's process. Returns an error as a value if the successor is the machine's process, but has not confirmed
/// that it executes the guest. The former process must not execute the guest then, because the successor may have
/// changed the disks.
fn execute(change: &Change, run: &RunFolder, successor: &mut Client) -> Result<Option<Error>> {
    let former = change.linked()?;
    change.link(run)?;
    let Err(error) = successor.execute("cont", json!({})) else { return Ok(None) };
    // QEMU has refused the command, unless the connection has failed or there is no reply in time.
    if error.kind() == ErrorKind::Io || change.link(&former).is_err() {
        return Ok(Some(error));
    }
    Err(error)
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
    /// Returns the image, how long the guest was paused, and the error of [`execute`], if it failed.
    fn run(self, old: &mut Client, successor: &mut Successor) -> Result<((Taken, Duration), Option<Error>)> {
        let Self { change, images, disks, features, image, also, memory } = self;
        let file = image.state();
        let begun = Instant::now();
        old.execute("stop", json!({}))?;
        let stopped = Instant::now();
        let (snapshots, save) = at_once(disks, image, also, || memory.save(old, features, &file))?;
        state::load(&mut successor.monitor, features, &file)?;
        images.finish(image, features)?;
        let unknown = execute(change, &successor.run, &mut successor.monitor)?;
        let stun = begun.elapsed();
        Ok(((Taken { image: image.clone(), stop: stopped - begun, snapshots, save }, stun), unknown))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::machine::Machine;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    /// The result of [`execute`] with a successor that replies with `answer`, or disconnects, and the run folder of the
    /// machine's process afterwards.
    fn executed(answer: Option<&'static str>) -> (Result<Option<Error>>, String) {
        let folder = tempfile::tempdir().unwrap();
        let change = Machine::at(folder.path()).change().unwrap();
        let run = |number: u32| RunFolder(folder.path().join(format!("run.{number}")));
        change.link(&run(1)).unwrap();
        let (own, peer) = UnixStream::pair().unwrap();
        let qemu = std::thread::spawn(move || {
            let mut lines = BufReader::new(peer.try_clone().unwrap()).lines();
            lines.next().unwrap().unwrap();
            if let Some(answer) = answer {
                (&peer).write_all(answer.as_bytes()).unwrap();
            }
        });
        let mut successor = Client::over(own, folder.path(), Duration::from_secs(5)).unwrap();
        let outcome = execute(&change, &run(2), &mut successor);
        qemu.join().unwrap();
        let linked = change.linked().unwrap().0.file_name().unwrap().to_string_lossy().into_owned();
        (outcome, linked)
    }

    #[test]
    fn the_former_process_continues_only_if_the_successor_has_refused() {
        let (outcome, linked) = executed(Some("{\"return\": {}}\n"));
        assert!(outcome.unwrap().is_none() && linked == "run.2");
        let (outcome, linked) = executed(Some("{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n"));
        assert!(outcome.is_err() && linked == "run.1");
        let (outcome, linked) = executed(None);
        assert!(outcome.unwrap().is_some() && linked == "run.2");
    }
}
