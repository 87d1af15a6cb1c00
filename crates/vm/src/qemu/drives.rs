//! The arguments for disks and their controllers.
//!
//! 1. Disks of one controller have the controller's PCI slot; the controller is created before the first of them.
//! 2. The names do not depend on the way in which a disk is attached: block node `diskN`, device `vdN`.

use crate::definition::{Bus, Definition, Disk};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;

/// Seconds after which the guest's requests fail if the server of a disk is unreachable; until then they wait, so that
/// the server can be restarted.
const RECONNECT_SECONDS: u32 = 300;

/// The options for all disks, each with its value.
pub fn arguments(definition: &Definition, nbd: &Path) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    let mut controllers = BTreeSet::new();
    for (index, disk) in definition.disks.iter().enumerate() {
        let node = json!({
            "driver": "nbd", "node-name": format!("disk{index}"), "export": disk.name, "discard": "unmap",
            "reconnect-delay": RECONNECT_SECONDS, "server": { "type": "unix", "path": nbd },
        });
        all.push(("-blockdev", node.to_string()));
        if controllers.insert(disk.slot)
            && let Some(controller) = controller(disk)
        {
            all.push(("-device", controller));
        }
        let boots = if index == 0 && definition.boot.is_none() { ",bootindex=0" } else { "" };
        all.push(("-device", format!("{}{boots}", device(disk, index))));
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

fn device(disk: &Disk, index: usize) -> String {
    let (slot, unit) = (disk.slot, disk.unit);
    let of = |model: &str| format!("{model},id=vd{index},drive=disk{index}");
    let place = match disk.bus {
        Bus::Virtio => return format!("{},addr={slot:x}.0,write-cache=on", of("virtio-blk-pci")),
        Bus::VirtioScsi | Bus::Pvscsi | Bus::Lsi | Bus::Lsisas => {
            format!("{},bus=controller{slot}.0,scsi-id={unit},lun=0", of("scsi-hd"))
        }
        Bus::Sata => format!("{},bus=controller{slot}.{unit}", of("ide-hd")),
        Bus::Ide => format!("{},bus=ide.{},unit={}", of("ide-hd"), unit / 2, unit % 2),
        Bus::Nvme => format!("{},bus=controller{slot},nsid={}", of("nvme-ns"), u32::from(unit) + 1),
    };
    format!("{place},write-cache=on")
}
