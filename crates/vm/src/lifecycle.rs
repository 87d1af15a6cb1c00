//! Starting and stopping machines.

use crate::busy::DISK_OF_CLIENTS;
use crate::definition::{Definition, Network, NewIdentity};
use crate::disks::Disks;
use crate::instant::image::Images;
use crate::instant::{child, freeze};
use crate::machine::{Change, Hold, Holding, Machine, MachineState, MemoryRecord, Start, Successor, remove_if_there};
use crate::machines::Machines;
use crate::personality;
use crate::qemu::command::{Memory, RunFolder, network_device};
use crate::qemu::features::Features;
use crate::qmp::Client;
use error::{Error, ErrorKind, Result};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// How long a guest may take to start and to get its own identity, with all attempts.
const IDENTITY_PATIENCE: Duration = Duration::from_secs(600);
/// How long the guest's agent may take to answer. After this time the guest's power button is pressed instead.
const AGENT_PATIENCE: Duration = Duration::from_secs(2);
/// How long the guest's agent may take to answer before the guest's clock is left unchanged.
const CLOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which the clients of a disk are checked.
const RELEASE_INTERVAL: Duration = Duration::from_millis(20);

/// How to stop a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Request the guest to shut down, and wait up to this time.
    Ask(Duration),
    /// Power off at once, like a power failure; data that the guest has not flushed is lost.
    Now,
}

/// Starts a machine; a frozen machine continues from its saved state. With `paused`, the guest does not execute until
/// it is resumed.
pub fn start(change: &Change, machines: &Machines, images: &Images, features: &Features, paused: bool) -> Result<()> {
    let machine = change.machine();
    if machine.process()?.is_some() {
        return Err(Error::new(ErrorKind::WrongState, format!("machine '{}' runs already", machine.name())));
    }
    change.sweep()?;
    let definition = machine.definition()?;
    if paused && definition.new_identity.is_some() {
        let text = format!(
            "the guest of machine '{}' gets an identity of its own at this start, for which it must run: start it without \
             --paused",
            machine.name()
        );
        return Err(Error::new(ErrorKind::WrongState, text));
    }
    let nbd = machines.disks().server()?;
    wait_for_disks(machine, &**machines.disks())?;
    if let Some(id) = freeze::frozen(machine)? {
        let image = images.get(&id).map_err(|error| {
            error.context(format_args!(
                "machine '{}' cannot continue from its frozen state; 'lamina vm stop --force' discards that state, and \
                 its disks keep the content that they had then",
                machine.name()
            ))
        })?;
        // If this command is killed from here on, the next command ends the new process or resumes its guest.
        let holding = change.hold(Hold { resume: !paused, thaw: false })?;
        let successor = child::set_up(change, machines, &image, features, image.record.passt)?;
        // The machine itself continues, not a copy of it. So its network cards, which `child::set_up` disconnected, are
        // connected again, unless its guest has the identity of the machine from which it was cloned.
        let all = image.record.machine.networks.as_slice();
        let cards: &[Network] = if definition.new_identity.is_none() { all } else { &[] };
        let mut successor = hand_over(change, successor, cards, true)?;
        go(&holding, &mut successor, paused)?;
        if !paused
            && image.record.agent == Some(true)
            && let Err(why) = set_clock(machine)
        {
            tracing::warn!(
                machine = machine.name(),
                "the guest's clock was not set and still shows the time when the guest was frozen: {why}"
            );
        }
        return Ok(());
    }
    let file = images.new_memory()?;
    let start = Start {
        features,
        nbd: &nbd,
        memory: Memory::Shared(file.clone()),
        record: MemoryRecord::Own(file.clone()),
        incoming: false,
        passt: true,
    };
    // If this command is killed from here on, the next command ends the new process or resumes its guest.
    let holding = change.hold(Hold { resume: !paused, thaw: false })?;
    // A guest with the identity of its source has no network, also if the next command resumes it.
    let cards: &[Network] = if definition.new_identity.is_some() { definition.networks.as_slice() } else { &[] };
    let begun = change.set_up(start).and_then(|successor| hand_over(change, successor, cards, false));
    match begun {
        Ok(mut successor) => match definition.new_identity {
            None => go(&holding, &mut successor, paused),
            Some(how) => {
                go(&holding, &mut successor, false)?;
                drop(holding);
                give_identity(change, successor, definition, how)
            }
        },
        Err(error) => {
            remove_if_there(&file)?;
            Err(error)
        }
    }
}

/// As [`take_over`]; after an error the new process has ended.
fn hand_over(change: &Change, mut successor: Successor, cards: &[Network], up: bool) -> Result<Successor> {
    match take_over(change, &successor.run, &mut successor.monitor, cards, up) {
        Ok(()) => Ok(successor),
        Err(error) => {
            successor.process.end()?;
            Err(error)
        }
    }
}

/// Connects or disconnects network cards of a process whose guest does not execute yet, and makes it the machine's
/// process. The next command may resume its guest from then on. After an error a frozen machine is still frozen.
fn take_over(change: &Change, run: &RunFolder, monitor: &mut Client, cards: &[Network], up: bool) -> Result<()> {
    for card in cards {
        monitor.execute("set_link", json!({ "name": network_device(card), "up": up }))?;
    }
    change.link(run)?;
    // From here on the machine's disks may change, so it must not be started from the image again.
    freeze::forget(change.machine())
}

fn go(holding: &Holding, successor: &mut Successor, paused: bool) -> Result<()> {
    match paused {
        true => Ok(()),
        false => holding.resume(&mut successor.monitor),
    }
}

/// Plugs or unplugs all network cards.
fn connect(successor: &mut Successor, definition: &Definition, up: bool) -> Result<()> {
    definition.networks.iter().try_for_each(|network| {
        let arguments = json!({ "name": network_device(network), "up": up });
        successor.monitor.execute("set_link", arguments).map(drop)
    })
}

/// Changes the identity of a guest whose disks are a copy, and then connects its network. Until then the guest has the
/// identity of its source, also in a process that starts after a failure.
fn give_identity(change: &Change, mut successor: Successor, definition: Definition, how: NewIdentity) -> Result<()> {
    let machine = change.machine();
    let name = machine.name();
    let given =
        personality::give_within(&mut |patience| machine.agent(patience), &definition, Some(true), IDENTITY_PATIENCE);
    let none = || Error::new(ErrorKind::Unsupported, format!("no guest agent answers within {IDENTITY_PATIENCE:?}"));
    match given.and_then(|given| given.ok_or_else(none)) {
        Ok(_) => {
            connect(&mut successor, &definition, true)?;
            change.define(&Definition { new_identity: None, ..definition })
        }
        Err(error) if how == NewIdentity::Required => {
            successor.process.quit(Some(&mut successor.monitor))?;
            change.sweep()?;
            let what =
                format_args!("machine '{name}' was stopped again, because its guest has the identity of its source");
            Err(error.context(what))
        }
        Err(error) => {
            tracing::warn!(
                machine = name,
                "its network is unplugged, because its guest has the identity of its source: {error}; the next start \
                 tries again"
            );
            Ok(())
        }
    }
}

/// Waits until no client uses the disks of a machine, because two clients that write to one disk destroy its content.
fn wait_for_disks(machine: &Machine, disks: &dyn Disks) -> Result<()> {
    let definition = machine.definition()?;
    let deadline = Instant::now() + DISK_OF_CLIENTS;
    loop {
        let all = disks.all()?;
        let mut used = None;
        for disk in &definition.disks {
            match all.get(&disk.name) {
                None => {
                    let text = format!("machine '{}': its disk '{}' does not exist", machine.name(), disk.name);
                    return Err(Error::new(ErrorKind::NotFound, text));
                }
                Some(facts) if facts.clients > 0 => used = Some((&disk.name, facts.clients)),
                Some(_) => {}
            }
        }
        match used {
            None => return Ok(()),
            Some((disk, clients)) if Instant::now() >= deadline => {
                let text = format!(
                    "machine '{}': its disk '{disk}' is in use by {clients} other client(s); two writers \
                     destroy its content",
                    machine.name()
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
            Some(_) => thread::sleep(RELEASE_INTERVAL),
        }
    }
}

/// Stops a machine.
///
/// # Errors
/// `Busy` if the guest does not shut down in time; the machine then continues to run unchanged.
pub fn stop(change: &Change, how: Stop) -> Result<()> {
    let machine = change.machine();
    if how == Stop::Now && machine.process()?.is_none() && freeze::frozen(machine)?.is_some() {
        // The frozen state is discarded: either it cannot be resumed, or the user has requested to stop the machine.
        freeze::forget(machine)?;
        return change.sweep();
    }
    let Some(process) = machine.process()? else {
        let text = format!("machine '{}' does not run: there is nothing to stop", machine.name());
        return Err(Error::new(ErrorKind::WrongState, text));
    };
    match how {
        Stop::Now => process.quit(machine.monitor().ok().as_mut())?,
        Stop::Ask(patience) => {
            if machine.state()? == MachineState::Paused {
                let text =
                    format!("the guest of machine '{}' is paused and cannot react; resume it first", machine.name());
                return Err(Error::new(ErrorKind::WrongState, text));
            }
            // The connection to the agent stays open until the guest is off.
            let mut agent = machine.agent(AGENT_PATIENCE)?;
            match &mut agent {
                Some(agent) => agent.shut_down()?,
                None => drop(machine.monitor()?.execute("system_powerdown", json!({}))?),
            }
            if !process.wait(patience)? {
                let text = format!(
                    "the guest of machine '{}' has not powered itself off within {patience:?}; it still runs; --force \
                     ends it at once",
                    machine.name()
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
    }
    change.sweep()
}

/// Sets the clock of a guest that continues from a saved state to the host's clock, through the guest's agent. The
/// error says why the clock could not be set.
pub fn set_clock(machine: &Machine) -> std::result::Result<(), String> {
    match machine.agent(CLOCK_PATIENCE) {
        Ok(Some(mut agent)) => agent.set_time().map_err(|error| error.to_string()),
        Ok(None) => Err("no guest agent answers".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// Pauses the guest.
pub fn pause(change: &Change) -> Result<()> {
    change.machine().running()?;
    change.machine().monitor()?.execute("stop", json!({})).map(drop)
}

/// Resumes the guest.
pub fn resume(change: &Change) -> Result<()> {
    change.machine().running()?;
    // A start from an image may have been killed before its last step, which removes the machine's mark as frozen. That
    // step is made here, because the resumed guest changes the disks.
    freeze::forget(change.machine())?;
    change.machine().monitor()?.execute("cont", json!({})).map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::Link;
    use crate::identity::Mac;
    use std::fs;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;

    /// Otherwise the guest of a frozen machine could stay paused or without its network, and a guest with the identity
    /// of its source could be resumed with a network.
    #[test]
    fn a_process_becomes_the_process_of_its_machine_after_its_network_is_set() {
        let folder = tempfile::tempdir().unwrap();
        let change = Machine::at(folder.path()).change().unwrap();
        let mut definition = Definition::new("web", 1, 64 << 20).unwrap();
        definition.add_network(Mac::new().unwrap(), Link::User).unwrap();
        let run = RunFolder(folder.path().join("run.1"));
        for answer in ["{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n", "{\"return\": {}}\n"] {
            let up = answer.contains("error");
            fs::write(folder.path().join("frozen"), "image").unwrap();
            let (own, peer) = UnixStream::pair().unwrap();
            let qemu = thread::spawn(move || {
                let command = BufReader::new(peer.try_clone().unwrap()).lines().next().unwrap().unwrap();
                (&peer).write_all(answer.as_bytes()).unwrap();
                command
            });
            let mut monitor = Client::over(own, folder.path(), Duration::from_secs(5)).unwrap();
            let connected = take_over(&change, &run, &mut monitor, &definition.networks, up).is_ok();
            assert!(qemu.join().unwrap().contains(&format!("\"up\":{up}")));
            assert_eq!(connected, answer.contains("return"));
            assert_eq!(freeze::frozen(change.machine()).unwrap().is_none(), connected);
            assert_eq!(change.linked().is_ok(), connected);
        }
    }
}
