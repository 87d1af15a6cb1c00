//! A machine from an image.

use super::image::Image;
use super::state;
use crate::definition::{Definition, Disk, Network};
use crate::identity::{Mac, Uuid};
use crate::machine::{Change, MemoryRecord, Start, Successor};
use crate::machines::{Machines, Making};
use crate::qemu::command::Memory;
use crate::qemu::features::Features;
use backend::Result;
use serde_json::json;

/// The definition of a child: the parent's devices at their places, and an identity of its own.
pub fn definition(image: &Image, name: &str) -> Result<Definition> {
    let parent = &image.record.machine;
    let disks = parent.disks.iter().enumerate();
    let mut networks = Vec::with_capacity(parent.networks.len());
    for network in &parent.networks {
        networks.push(Network { mac: Mac::new()?, ..network.clone() });
    }
    Ok(Definition {
        name: name.to_owned(),
        uuid: Uuid::new()?,
        disks: disks.map(|(index, disk)| Disk { name: disk_name(name, index), slot: disk.slot }).collect(),
        networks,
        ..parent.clone()
    })
}

/// What the disks of a child are called.
pub fn disk_name(machine: &str, index: usize) -> String {
    match index {
        0 => machine.to_owned(),
        _ => format!("{machine}-{}", index + 1),
    }
}

/// Makes the machine and its disks; it does not run yet.
pub fn make(machines: &Machines, image: &Image, name: &str) -> Result<Making> {
    let definition = definition(image, name)?;
    let disks: Vec<String> = definition.disks.iter().map(|disk| disk.name.clone()).collect();
    let making = machines.make(&definition, disks.clone())?;
    for (snapshot, disk) in image.record.snapshots.iter().zip(disks) {
        machines.disks().clone_linked(&snapshot.disk, &snapshot.snapshot, &[disk])?;
    }
    Ok(making)
}

/// Sets up its process with the state of the image; its guest stands still, its network cards unplugged.
pub fn set_up(change: &Change, machines: &Machines, image: &Image, features: &Features) -> Result<Successor> {
    let nbd = machines.disks().server()?;
    let mut successor = change.set_up(Start {
        features,
        nbd: &nbd,
        memory: Memory::CopyOnWrite(image.record.memory.clone()),
        record: MemoryRecord::Image(image.id.clone()),
        incoming: true,
    })?;
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
    for index in 0..image.record.machine.networks.len() {
        // Its guest has the parent's address until it has been told its own.
        successor.monitor.execute("set_link", json!({ "name": format!("nic{index}"), "up": false }))?;
    }
    Ok(())
}
