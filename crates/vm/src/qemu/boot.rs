//! The order in which the firmware tries the devices, and the arguments for CD-ROM drives.
//!
//! Each device that may boot has a `bootindex`, which BIOS and UEFI read from QEMU. Without an order in the definition
//! the firmware may try other devices afterwards; with an order it tries only the devices of the order.

use crate::definition::{BootDevice, Cdrom, Chipset, Definition};
use serde_json::{Value, json};
use std::path::Path;

/// The property of a device that sets its place in the order of booting; empty if the firmware does not boot it.
/// `number` is the index of the device among those of its kind.
pub fn index(definition: &Definition, device: BootDevice, number: usize) -> String {
    let count = |device: BootDevice| match device {
        BootDevice::Disk => definition.disks.len().min(1),
        BootDevice::Cdrom => definition.cdroms.len(),
        BootDevice::Network => definition.networks.len(),
    };
    let order = definition.boot_devices();
    match order.iter().position(|one| *one == device) {
        Some(at) if number < count(device) => {
            let before: usize = order[..at].iter().map(|one| count(*one)).sum();
            format!(",bootindex={}", before + number)
        }
        _ => String::new(),
    }
}

/// Whether network cards need the code with which BIOS boots from a network.
pub fn from_network(definition: &Definition) -> bool {
    definition.boot_devices().contains(&BootDevice::Network)
}

/// The block node of the image in a CD-ROM drive.
pub fn cdrom_node(cdrom: &Cdrom) -> String {
    format!("cdrom{}", cdrom.unit)
}

/// The device of a CD-ROM drive.
pub fn cdrom_device(cdrom: &Cdrom) -> String {
    format!("cd{}", cdrom.unit)
}

/// The block node of an image.
pub fn image(node: &str, file: &Path) -> Value {
    json!({ "driver": "file", "node-name": node, "filename": file, "read-only": true })
}

/// QEMU's options for the order and for all CD-ROM drives, each with its value.
pub fn arguments(definition: &Definition) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    if !definition.boot_order.is_empty() {
        all.push(("-boot", "strict=on".into()));
    }
    for (number, cdrom) in definition.cdroms.iter().enumerate() {
        let mut drive = String::new();
        if let Some(file) = &cdrom.file {
            let node = cdrom_node(cdrom);
            all.push(("-blockdev", image(&node, file).to_string()));
            drive = format!(",drive={node}");
        }
        let bus = match definition.platform.chipset {
            Chipset::Q35 => format!("bus=ide.{}", cdrom.unit),
            Chipset::I440fx => format!("bus=ide.{},unit={}", cdrom.unit / 2, cdrom.unit % 2),
        };
        let boots = index(definition, BootDevice::Cdrom, number);
        all.push(("-device", format!("ide-cd,id={},{bus}{drive}{boots}", cdrom_device(cdrom))));
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::{Boot, Link};
    use crate::identity::Mac;

    fn machine(order: &[BootDevice]) -> Definition {
        let mut machine = Definition::new("web", 1, 64 << 20).unwrap();
        for disk in ["web", "data"] {
            machine.add_disk(disk).unwrap();
        }
        machine.add_cdrom(Some("/srv/a,b.iso".into())).unwrap();
        machine.add_cdrom(None).unwrap();
        machine.add_network(Mac::new().unwrap(), Link::User).unwrap();
        machine.boot_order = order.to_vec();
        machine.check().unwrap();
        machine
    }

    #[test]
    fn devices_are_numbered_in_the_order_of_the_definition() {
        use BootDevice::{Cdrom, Disk, Network};
        // The first and second disk, the first and second drive, the card.
        for (order, expected) in [
            (&[][..], ["0", "-", "1", "2", "-"]),
            (&[Cdrom, Disk], ["2", "-", "0", "1", "-"]),
            (&[Network, Disk, Cdrom], ["1", "-", "2", "3", "0"]),
            (&[Cdrom], ["-", "-", "0", "1", "-"]),
        ] {
            let machine = machine(order);
            let of = |device, number| {
                let text = index(&machine, device, number);
                text.strip_prefix(",bootindex=").map_or("-".to_owned(), str::to_owned)
            };
            let all = [of(Disk, 0), of(Disk, 1), of(Cdrom, 0), of(Cdrom, 1), of(Network, 0)];
            assert_eq!(all, expected, "{order:?}");
            let strict = arguments(&machine).contains(&("-boot", "strict=on".to_owned()));
            assert_eq!(strict, !order.is_empty());
            assert_eq!(from_network(&machine), order.contains(&Network));
        }
        let mut machine = machine(&[]);
        machine.boot = Some(Boot { kernel: "/k".into(), initrd: None, append: String::new() });
        assert_eq!(index(&machine, Disk, 0) + &index(&machine, Cdrom, 0), "");
        machine.boot_order = vec![Disk];
        assert!(machine.check().is_err());
    }

    #[test]
    fn drives_are_on_the_controller_of_the_chipset() {
        let mut machine = machine(&[]);
        let all = arguments(&machine);
        let devices: Vec<&str> = all.iter().filter(|it| it.0 == "-device").map(|it| it.1.as_str()).collect();
        assert_eq!(
            devices,
            ["ide-cd,id=cd0,bus=ide.0,drive=cdrom0,bootindex=1", "ide-cd,id=cd1,bus=ide.1,bootindex=2"]
        );
        assert!(all[0].1.contains(r#""filename":"/srv/a,b.iso""#) && all[0].1.contains(r#""read-only":true"#));
        machine.platform.chipset = Chipset::I440fx;
        machine.cdroms[1].unit = 3;
        assert!(arguments(&machine)[2].1.contains("bus=ide.1,unit=1"));
    }
}
