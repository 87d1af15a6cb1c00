//! Creating a machine from a memory image.

use super::image::Image;
use super::state;
use crate::definition::{CloneKind, Definition, Origin};
use crate::machine::{Change, Start, Successor};
use crate::machines::Machines;
use crate::qemu::command::network_device;
use crate::qemu::features::Features;
use error::Result;
use serde_json::json;

/// The definition of a child: the parent's devices in the same slots, with a new identity.
pub fn definition(image: &Image, name: &str) -> Result<Definition> {
    let parent = &image.record.machine;
    parent.for_clone(name, Origin { machine: parent.name.clone(), snapshot: None, way: CloneKind::Instant })
}

/// Starts a process with the state of the image. The guest is paused, and its network cards are disconnected. If
/// `passt` is true, passt may serve the user networks of the guest.
pub fn set_up(
    change: &Change,
    machines: &Machines,
    image: &Image,
    features: &Features,
    passt: bool,
) -> Result<Successor> {
    let nbd = machines.disks().server()?;
    let mut successor = change.set_up(Start { passt, ..image.start(features, &nbd) })?;
    let outcome = load(&mut successor, image, features);
    if let Err(error) = outcome {
        let _ = successor.process.kill();
        return Err(error);
    }
    Ok(successor)
}

fn load(successor: &mut Successor, image: &Image, features: &Features) -> Result<()> {
    state::prepare(&mut successor.monitor, features)?;
    state::load(&mut successor.monitor, features, &image.state())?;
    for network in &image.record.machine.networks {
        // Until the guest's identity is changed, the guest has the parent's MAC address.
        successor.monitor.execute("set_link", json!({ "name": network_device(network), "up": false }))?;
    }
    Ok(())
}
