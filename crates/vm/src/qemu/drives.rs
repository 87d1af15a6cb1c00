//! The arguments for disks and their controllers.
//!
//! 1. Disks of one controller have the controller's PCI slot; the argument for the controller precedes those of its
//!    disks.
//! 2. The names of a disk's block node and device follow from its address, and so stay the same when other disks are
//!    added or removed.
//! 3. Disks in ports, and those on controllers that take disks while the machine runs ([`Bus::takes_disks`]), can be
//!    added and removed in the running process ([`crate::plug`]).

use super::boot;
use super::command::{place, place_text};
use crate::definition::{BootDevice, Bus, Chipset, Definition, Disk, WriteErrors};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// Seconds after which the guest's requests fail if the NBD server of a disk is unreachable. Until then the requests
/// wait, so that the server can be restarted.
const RECONNECT_SECONDS: u32 = 300;

/// The name of a disk's block node, with the disk's address. Version 0.1.0 used the index of the disk in place of the
/// address. An index is lower than any slot of a disk that is a PCI device itself, so the names do not collide.
pub fn disk_node(disk: &Disk) -> String {
    format!("disk{}", address(disk))
}

/// The id of a disk's device.
pub fn disk_device(disk: &Disk) -> String {
    format!("vd{}", address(disk))
}

/// The slot of a disk, and its unit if its controller has several units.
fn address(disk: &Disk) -> String {
    match disk.bus {
        Bus::Virtio => disk.slot.to_string(),
        _ => format!("{}-{}", disk.slot, disk.unit),
    }
}

/// The block node for an export, in QEMU's JSON syntax.
pub fn block_node(node: &str, export: &str, nbd: &Path) -> Value {
    json!({
        "driver": "nbd", "node-name": node, "export": export, "discard": "unmap",
        "reconnect-delay": RECONNECT_SECONDS, "server": { "type": "unix", "path": nbd },
    })
}

/// The device of a disk, as it is added to a running process. The disk is in a port or on a controller that takes
/// disks.
pub fn added_device(definition: &Definition, disk: &Disk) -> Value {
    let (slot, id, node) = (disk.slot, disk_device(disk), disk_node(disk));
    let mut device = match disk.bus {
        Bus::Virtio => {
            let (key, value) = place(definition.platform.chipset, slot);
            json!({ "driver": "virtio-blk-pci", "id": id, "drive": node, "write-cache": "on", key: value })
        }
        _ => json!({ "driver": "scsi-hd", "id": id, "drive": node, "write-cache": "on",
                     "bus": format!("controller{slot}.0"), "scsi-id": disk.unit, "lun": 0 }),
    };
    if definition.write_errors != WriteErrors::default() {
        device["werror"] = definition.write_errors.name().into();
    }
    device
}

/// The options for all disks, each with its value.
pub fn arguments(definition: &Definition, nbd: &Path) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    let mut controllers = BTreeSet::new();
    for (index, disk) in definition.disks.iter().enumerate() {
        all.push(("-blockdev", block_node(&disk_node(disk), &disk.name, nbd).to_string()));
        if controllers.insert(disk.slot)
            && let Some(controller) = controller(disk)
        {
            all.push(("-device", controller));
        }
        let boots = boot::index(definition, BootDevice::Disk, index);
        let errors = match definition.write_errors {
            // QEMU's default, which is not written, so that the command lines of existing machines do not change.
            WriteErrors::Enospc => String::new(),
            other => format!(",werror={}", other.name()),
        };
        all.push(("-device", format!("{}{errors}{boots}", device(definition.platform.chipset, disk))));
    }
    all
}

/// The controller of a disk, unless the disk is a PCI device itself or the controller is part of the chipset.
fn controller(disk: &Disk) -> Option<String> {
    let slot = disk.slot;
    let model = match disk.bus {
        Bus::Virtio | Bus::Ide => return None,
        Bus::VirtioScsi => "virtio-scsi-pci",
        Bus::Pvscsi => "pvscsi",
        Bus::Lsi => "lsi53c895a",
        Bus::Lsisas => "mptsas1068",
        Bus::Sata => "ich9-ahci",
        Bus::Nvme => return Some(format!("nvme,id=controller{slot},addr={slot:x}.0,serial=lamina-{slot}")),
    };
    Some(format!("{model},id=controller{slot},addr={slot:x}.0"))
}

fn device(chipset: Chipset, disk: &Disk) -> String {
    let (slot, unit) = (disk.slot, disk.unit);
    let of = |model: &str| format!("{model},id={},drive={}", disk_device(disk), disk_node(disk));
    let place = match disk.bus {
        Bus::Virtio => return format!("{},{},write-cache=on", of("virtio-blk-pci"), place_text(chipset, slot)),
        Bus::VirtioScsi | Bus::Pvscsi | Bus::Lsi | Bus::Lsisas => {
            format!("{},bus=controller{slot}.0,scsi-id={unit},lun=0", of("scsi-hd"))
        }
        Bus::Sata => format!("{},bus=controller{slot}.{unit}", of("ide-hd")),
        Bus::Ide => format!("{},bus=ide.{},unit={}", of("ide-hd"), unit / 2, unit % 2),
        Bus::Nvme => format!("{},bus=controller{slot},nsid={}", of("nvme-ns"), u32::from(unit) + 1),
    };
    format!("{place},write-cache=on")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_disk_has_the_chosen_action_for_write_errors() {
        let mut machine = Definition::new("web", 1, 256 << 20).unwrap();
        machine.disks.push(Disk { name: "a".into(), slot: 8, bus: Bus::Virtio, unit: 0 });
        machine.disks.push(Disk { name: "b".into(), slot: 9, bus: Bus::VirtioScsi, unit: 0 });
        machine.disks.push(Disk { name: "c".into(), slot: 10, bus: Bus::Sata, unit: 0 });
        let devices = |machine: &Definition| -> Vec<String> {
            let all = arguments(machine, Path::new("/nbd")).into_iter().map(|(_, value)| value);
            all.filter(|value| value.contains("drive=disk")).collect()
        };
        assert!(devices(&machine).iter().all(|device| !device.contains("werror")), "QEMU's default is not written");
        assert_eq!(added_device(&machine, &machine.disks[0]).get("werror"), None);
        for errors in [WriteErrors::Stop, WriteErrors::Report] {
            machine.write_errors = errors;
            machine.check().unwrap();
            let wanted = format!(",werror={}", errors.name());
            let devices = devices(&machine);
            assert_eq!(devices.len(), 3);
            assert!(devices.iter().all(|device| device.contains(&wanted)), "{devices:?}");
            for disk in &machine.disks[..2] {
                assert_eq!(added_device(&machine, disk)["werror"], errors.name());
            }
        }
        machine.disks[2].bus = Bus::Nvme;
        assert!(machine.check().unwrap_err().to_string().contains("NVMe"));
    }
}
