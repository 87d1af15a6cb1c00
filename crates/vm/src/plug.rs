//! Adding disks and network cards to a running machine, and removing them.
//!
//! QEMU cannot add devices to the root bus of a running machine. So a machine has empty PCI Express ports from its
//! start ([`Definition::ports`](crate::definition::Definition::ports)): a device that is added while the machine runs
//! is put into a port, and keeps this port when the machine is started again, because a saved state requires the same
//! addresses. The chipset i440fx has no ports: devices that are added while the machine runs are in slots of the root
//! bus. On a SCSI controller that takes disks while the machine runs
//! ([`Bus::takes_disks`](crate::definition::Bus::takes_disks)), a disk needs no port.
//!
//! 1. The definition names every device of the process: a device is added to the definition before it is added to the
//!    process, and removed from the definition after it is removed from the process. If the command is killed in
//!    between, or QEMU does not answer, repeating the command completes the change.
//! 2. A device is removed when the guest has released it (QEMU's event `DEVICE_DELETED`). Only then is the device's
//!    disk closed.

use crate::busy;
use crate::definition::{Chipset, Definition, Disk, Link, Network};
use crate::machine::{Machine, remove_if_there};
use crate::qemu::features::Features;
use crate::qemu::{command, drives, network, passt};
use crate::qmp::Client;
use error::{Error, ErrorKind, Result};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// Interval at which the request to release a device is repeated: a guest that is booting ignores requests.
const REQUEST_INTERVAL: Duration = Duration::from_secs(5);

/// Adds a disk. Without effect if the disk is already attached.
pub fn add_disk(monitor: &mut Client, nbd: &Path, definition: &Definition, disk: &Disk) -> Result<()> {
    let node = drives::disk_node(disk);
    if has_device(monitor, &drives::disk_device(disk))? {
        return Ok(());
    }
    // An earlier command may have been killed after it had added the block node and before it added the device.
    if has_node(monitor, &node)? {
        monitor.execute("blockdev-del", json!({ "node-name": node }))?;
    }
    monitor.execute("blockdev-add", drives::block_node(&node, &disk.name, nbd))?;
    monitor.execute("device_add", drives::added_device(definition, disk)).map(drop).inspect_err(|_| {
        let _ = monitor.execute("blockdev-del", json!({ "node-name": node }));
    })
}

/// Removes a disk once the guest has released it. Without effect if the disk is not attached.
pub fn remove_disk(monitor: &mut Client, disk: &Disk) -> Result<()> {
    let node = drives::disk_node(disk);
    remove_device(monitor, &drives::disk_device(disk))?;
    match has_node(monitor, &node)? {
        true => monitor.execute("blockdev-del", json!({ "node-name": node })).map(drop),
        false => Ok(()),
    }
}

/// Adds a network card. Without effect if the card is already attached.
pub fn add_network(
    monitor: &mut Client,
    machine: &Machine,
    features: &Features,
    chipset: Chipset,
    card: &Network,
) -> Result<()> {
    let (device, net) = (command::network_device(card), command::network_node(card));
    if has_device(monitor, &device)? {
        return Ok(());
    }
    // An earlier command may have been killed after it had added the network backend and before it added the card.
    let _ = monitor.execute("netdev_del", json!({ "id": net }));
    network::check_one(card)?;
    if !has_passt(monitor, machine, features, card)? {
        monitor.execute("netdev_add", network::backend(card, None))?;
    }
    let (key, place) = command::place(chipset, card.slot);
    let arguments = json!({ "driver": command::card(card.model), "id": device, "netdev": net, "mac": card.mac,
                            "romfile": "", key: place });
    monitor.execute("device_add", arguments).map(drop).inspect_err(|_| {
        let _ = monitor.execute("netdev_del", json!({ "id": net }));
    })
}

/// Adds the user network of a card by passt, if passt serves the machine's other cards; returns whether the user
/// network was added. If it cannot be added, QEMU's own user network is used instead. Saved states of the machine then
/// contain the state of QEMU's network, so the mark for passt is removed.
fn has_passt(monitor: &mut Client, machine: &Machine, features: &Features, card: &Network) -> Result<bool> {
    if !matches!(card.link, Link::User | Link::Forward(_)) || !machine.uses_passt() {
        return Ok(false);
    }
    let run = machine.run();
    let added = match passt::installed(features) {
        Ok(passt) if passt.serves(card) => monitor
            .execute("netdev_add", network::backend(card, Some((&passt, &run))))
            .and_then(|_| passt::connect(&passt, card, &run, None)),
        // passt does not serve this card because of its forwarded ports. A machine with forwarded ports has no saved
        // states, so the mark for passt may stay.
        Ok(_) => return Ok(false),
        Err(why) => Err(Error::new(ErrorKind::NotFound, why)),
    };
    let Err(error) = added else { return Ok(true) };
    let _ = monitor.execute("netdev_del", json!({ "id": command::network_node(card) }));
    tracing::warn!(machine = machine.name(), "QEMU's own user network is used: {error}");
    remove_if_there(&run.passt())?;
    Ok(false)
}

/// Removes a network card once the guest has released it. Without effect if the card is not attached.
pub fn remove_network(monitor: &mut Client, network: &Network) -> Result<()> {
    remove_device(monitor, &command::network_device(network))?;
    match monitor.execute("netdev_del", json!({ "id": command::network_node(network) })) {
        // The network backend is removed already.
        Err(error) if error.kind() == ErrorKind::Invalid => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Requests the guest to release a device, and waits until it has.
fn remove_device(monitor: &mut Client, device: &str) -> Result<()> {
    let deadline = Instant::now() + busy::DEVICE;
    while has_device(monitor, device)? {
        match monitor.execute("device_del", json!({ "id": device })) {
            // The guest has not yet answered an earlier request.
            Err(error) if error.kind() == ErrorKind::Invalid && error.to_string().contains("unplug") => {}
            outcome => drop(outcome?),
        }
        let again = deadline.min(Instant::now() + REQUEST_INTERVAL);
        while let Some(event) =
            monitor.wait_event(&["DEVICE_DELETED"], again.saturating_duration_since(Instant::now()))?
        {
            if event.data["device"] == device {
                return Ok(());
            }
        }
        if Instant::now() >= deadline {
            let text = format!(
                "the guest has not released '{device}' within {:?}: it may still be starting, or uses the device (a \
                 mounted file system); repeat the command",
                busy::DEVICE
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
    }
    Ok(())
}

fn has_device(monitor: &mut Client, device: &str) -> Result<bool> {
    let all = monitor.execute("qom-list", json!({ "path": "/machine/peripheral" }))?;
    Ok(all.as_array().is_some_and(|all| all.iter().any(|one| one["name"] == device)))
}

/// Whether QEMU has a block node of that name.
pub fn has_node(monitor: &mut Client, node: &str) -> Result<bool> {
    let all = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(all.as_array().is_some_and(|all| all.iter().any(|one| one["node-name"] == node)))
}
