//! Starting and stopping machines.

use crate::instant::image::Images;
use crate::instant::{child, freeze};
use crate::machine::{Change, MemoryRecord, Start, State, remove_if_there};
use crate::machines::Machines;
use crate::qemu::command::Memory;
use crate::qemu::features::Features;
use backend::{Error, ErrorKind, Result};
use serde_json::json;
use std::time::Duration;

/// How long QEMU itself may take to end once it is told to.
const QUIT_PATIENCE: Duration = Duration::from_secs(20);

/// How a machine is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The guest is asked to power itself off, and has that long.
    Ask(Duration),
    /// At once, as if the plug were pulled; what the guest had not flushed is lost.
    Now,
}

/// Starts a machine; a frozen one goes on where it stopped.
pub fn start(change: &Change, machines: &Machines, images: &Images, features: &Features) -> Result<()> {
    let machine = change.machine();
    if machine.process()?.is_some() {
        return Err(Error::new(ErrorKind::Exists, format!("machine '{}' runs already", machine.name())));
    }
    change.sweep()?;
    let nbd = machines.disks().server()?;
    for disk in machine.definition()?.disks {
        machines.disks().capacity(&disk.name).map_err(|e| e.context(format_args!("machine '{}'", machine.name())))?;
    }
    if let Some(id) = freeze::frozen(machine)? {
        let image = images.get(&id)?;
        let mut successor = child::set_up(change, machines, &image, features)?;
        change.take_over(&successor)?;
        successor.monitor.execute("cont", json!({}))?;
        // It is itself, not a copy of itself: its network is as it was.
        for index in 0..image.record.machine.networks.len() {
            successor.monitor.execute("set_link", json!({ "name": format!("nic{index}"), "up": true }))?;
        }
        return remove_if_there(&machine.folder().join("frozen"));
    }
    let file = images.new_memory()?;
    let start = Start {
        features,
        nbd: &nbd,
        memory: Memory::Shared(file.clone()),
        record: MemoryRecord::Own(file.clone()),
        incoming: false,
    };
    match change.set_up(start) {
        Ok(successor) => change.take_over(&successor),
        Err(error) => {
            remove_if_there(&file)?;
            Err(error)
        }
    }
}

/// Stops a machine.
///
/// # Errors
/// `Busy` when its guest does not power itself off in time: it runs on, and nothing was done to it.
pub fn stop(change: &Change, how: Stop) -> Result<()> {
    let machine = change.machine();
    let process = machine.running()?;
    match how {
        Stop::Now => {
            // Told to quit it lets its own requests to the disks end; a guest's caches are lost either way.
            let quit = machine.monitor().and_then(|mut monitor| monitor.send(&json!({ "execute": "quit" })));
            if quit.is_err() || !process.wait(QUIT_PATIENCE)? {
                process.kill()?;
                process.wait(QUIT_PATIENCE)?;
            }
        }
        Stop::Ask(patience) => {
            if machine.state()? == State::Paused {
                let text =
                    format!("the guest of machine '{}' is paused and cannot hear; resume it first", machine.name());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            match machine.agent(Duration::from_millis(300))? {
                Some(mut agent) => agent.shut_down()?,
                None => drop(machine.monitor()?.execute("system_powerdown", json!({}))?),
            }
            if !process.wait(patience)? {
                let text = format!(
                    "the guest of machine '{}' has not powered itself off within {patience:?}; it still runs; --force \
                     pulls the plug",
                    machine.name()
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
    }
    change.sweep()
}

/// Holds the guest still.
pub fn pause(change: &Change) -> Result<()> {
    change.machine().running()?;
    change.machine().monitor()?.execute("stop", json!({})).map(drop)
}

/// Lets it go on.
pub fn resume(change: &Change) -> Result<()> {
    change.machine().running()?;
    change.machine().monitor()?.execute("cont", json!({})).map(drop)
}
