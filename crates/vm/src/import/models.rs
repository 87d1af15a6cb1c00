//! Devices of other programs, and QEMU's devices that replace them.

use super::{Effect, Foreign};
use crate::definition::{Bus, Card};

/// Advice for a guest that may lack a driver.
const CHOOSE: &str = "if the guest lacks it, choose another controller with --bus, or --virtio";

/// Removable drives that are not imported, because their images are not part of the machine. `kind` is the name of the
/// drive in the source, and `image` its image.
pub fn removable(machine: &mut Foreign, label: &str, kind: &str, image: Option<&str>) {
    let reason = match kind.to_ascii_lowercase().as_str() {
        "cdrom" | "dvd" | "cd" => {
            let image = image.map(|image| format!(" ('{}')", image.escape_debug())).unwrap_or_default();
            format!("it is a CD drive{image}; 'lamina vm edit --cdrom FILE' adds one")
        }
        _ => format!("machines have no {} drives", kind.to_ascii_lowercase()),
    };
    machine.note(label, Effect::LeftOut, reason);
}

/// Sets the number of cores in a socket. If the number does not divide that of the processors, which must be known, it
/// is not kept.
pub fn cores(machine: &mut Foreign, item: &str, cores: u32) {
    machine.platform.cores = (cores > 0 && machine.cpus.is_multiple_of(cores)).then_some(cores);
    if machine.platform.cores.is_none() {
        let reason = format!("{cores} cores in a socket do not divide the {} processors", machine.cpus);
        machine.note(item, Effect::Changed, reason);
    }
}

/// LSI Logic's parallel SCSI controller, 53C1030.
pub fn lsi_logic(machine: &mut Foreign, label: &str) -> Bus {
    let reason =
        format!("QEMU has no LSI 53C1030; an LSI 53C895A takes its place and needs the driver sym53c8xx: {CHOOSE}");
    machine.note(label, Effect::Replaced, reason);
    Bus::Lsi
}

/// BusLogic's parallel SCSI controller.
pub fn bus_logic(machine: &mut Foreign, label: &str) -> Bus {
    let reason = format!(
        "QEMU has no BusLogic controller; an LSI 53C895A takes its place and needs the driver sym53c8xx: {CHOOSE}"
    );
    machine.note(label, Effect::Replaced, reason);
    Bus::Lsi
}

/// The model of a network card, from the name that any of the programs uses for it.
pub fn card(machine: &mut Foreign, label: &str, name: &str) -> Card {
    let (card, same) = match name.to_ascii_lowercase().as_str() {
        "virtio" | "virtio-net" | "virtio-net-pci" | "virtio-transitional" | "virtio-non-transitional" => {
            (Card::Virtio, true)
        }
        "vmxnet3" => (Card::Vmxnet3, true),
        "e1000" | "82540em" => (Card::E1000, true),
        // VirtualBox's other Intel cards, which belong to the same family and have the same drivers.
        "82543gc" | "82545em" => (Card::E1000, true),
        "e1000e" | "82574l" => (Card::E1000e, true),
        "rtl8139" => (Card::Rtl8139, true),
        "pcnet" | "pcnet32" | "am79c970a" | "am79c973" | "vlance" | "flexible" => (Card::Pcnet, true),
        _ => (Card::E1000e, false),
    };
    if !same {
        let reason = format!(
            "QEMU has no '{}'; an e1000e takes its place and needs the driver e1000e: choose another model with \
             --card, or --virtio",
            name.escape_debug()
        );
        machine.note(label, Effect::Replaced, reason);
    }
    card
}
