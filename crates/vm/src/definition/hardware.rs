//! The hardware that a guest sees: firmware, chipset, the controllers of disks, the models of network cards.
//!
//! Every field has a default, from the hardware of machines that lamina creates itself: virtio on a q35 chipset with
//! BIOS. So definitions from before these fields existed keep their meaning.

use serde::{Deserialize, Serialize};

/// PCI slot of the IDE controller, which is part of the chipset i440fx.
pub const IDE_SLOT: u8 = 1;

/// Whether a value is the default, so that it is left out of the definition.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The firmware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Firmware {
    /// BIOS: QEMU's SeaBIOS.
    #[default]
    Bios,
    /// UEFI: OVMF, with the machine's variables in a file of its own.
    Uefi,
}

impl Firmware {
    /// The firmware's name in definitions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bios => "bios",
            Self::Uefi => "uefi",
        }
    }
}

/// The chipset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Chipset {
    /// Intel Q35, with PCI Express.
    #[default]
    Q35,
    /// Intel 440FX, with PCI and IDE.
    I440fx,
}

impl Chipset {
    /// The chipset's name in definitions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q35 => "q35",
            Self::I440fx => "i440fx",
        }
    }
}

/// What the hardware clock shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// Universal time, which Unix-like guests expect.
    #[default]
    Utc,
    /// The host's local time, which Windows expects.
    Local,
}

/// The graphics card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Display {
    /// No card: the console is the serial port.
    #[default]
    None,
    /// A VGA card. Some boot loaders and Windows do not start without a VGA card.
    Vga,
}

/// What QEMU does when a write of the guest fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WriteErrors {
    /// If there is no space, QEMU pauses the guest, and repeats the write when the guest is resumed. Other errors are
    /// passed to the guest.
    #[default]
    Enospc,
    /// QEMU pauses the guest, and repeats the write when the guest is resumed.
    Stop,
    /// The error is passed to the guest.
    Report,
}

impl WriteErrors {
    /// The name in definitions. QEMU uses the same name in `werror`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Enospc => "enospc",
            Self::Stop => "stop",
            Self::Report => "report",
        }
    }
}

/// The hardware of a machine besides its processors, memory, disks and network cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Platform {
    /// The chipset.
    #[serde(default, skip_serializing_if = "is_default")]
    pub chipset: Chipset,
    /// The firmware.
    #[serde(default, skip_serializing_if = "is_default")]
    pub firmware: Firmware,
    /// Whether UEFI starts only signed boot loaders. Needs UEFI and the chipset q35.
    #[serde(default, skip_serializing_if = "is_default")]
    pub secure_boot: bool,
    /// Processors in each socket; `None` to let QEMU choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// The hardware clock.
    #[serde(default, skip_serializing_if = "is_default")]
    pub clock: Clock,
    /// The graphics card.
    #[serde(default, skip_serializing_if = "is_default")]
    pub display: Display,
}

/// The kind of controller by which a disk is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bus {
    /// virtio-blk: a PCI device for each disk.
    #[default]
    Virtio,
    /// A virtio SCSI controller.
    VirtioScsi,
    /// VMware's paravirtual SCSI controller.
    Pvscsi,
    /// A parallel SCSI controller, LSI 53C895A.
    Lsi,
    /// A SAS controller, LSI SAS 1068.
    Lsisas,
    /// The IDE controller of the chipset i440fx.
    Ide,
    /// An AHCI controller.
    Sata,
    /// An NVMe controller; each disk is a namespace.
    Nvme,
}

impl Bus {
    /// All kinds.
    pub const ALL: [Self; 8] =
        [Self::Virtio, Self::VirtioScsi, Self::Pvscsi, Self::Lsi, Self::Lsisas, Self::Ide, Self::Sata, Self::Nvme];

    /// The name of the kind in definitions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::VirtioScsi => "virtio-scsi",
            Self::Pvscsi => "pvscsi",
            Self::Lsi => "lsi",
            Self::Lsisas => "lsisas",
            Self::Ide => "ide",
            Self::Sata => "sata",
            Self::Nvme => "nvme",
        }
    }

    /// What the controller is, for display.
    pub fn description(self) -> &'static str {
        match self {
            Self::Virtio => "virtio-blk",
            Self::VirtioScsi => "Virtio SCSI",
            Self::Pvscsi => "VMware's paravirtual SCSI",
            Self::Lsi => "LSI 53C895A",
            Self::Lsisas => "LSI SAS 1068",
            Self::Ide => "IDE",
            Self::Sata => "AHCI",
            Self::Nvme => "NVMe",
        }
    }

    /// Whether a controller of this kind accepts disks while the machine runs, and reports them to the guest. With the
    /// other kinds, QEMU refuses the disk or the guest does not notice it.
    pub fn takes_disks(self) -> bool {
        matches!(self, Self::VirtioScsi | Self::Pvscsi)
    }

    /// Most disks on one controller of this kind in QEMU: units are numbered from 0.
    pub fn units(self) -> u8 {
        match self {
            Self::Virtio => 1,
            Self::VirtioScsi | Self::Pvscsi | Self::Nvme => 64,
            // The controller itself occupies one of the eight addresses.
            Self::Lsi => 7,
            Self::Lsisas => 8,
            Self::Ide => 4,
            Self::Sata => 6,
        }
    }
}

/// The model of a network card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Card {
    /// virtio-net.
    #[default]
    Virtio,
    /// VMware's paravirtual card.
    Vmxnet3,
    /// Intel 82540EM.
    E1000,
    /// Intel 82574L.
    E1000e,
    /// Realtek 8139.
    Rtl8139,
    /// AMD PCnet.
    Pcnet,
}

impl Card {
    /// All models.
    pub const ALL: [Self; 6] = [Self::Virtio, Self::Vmxnet3, Self::E1000, Self::E1000e, Self::Rtl8139, Self::Pcnet];

    /// The model's name in definitions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::Vmxnet3 => "vmxnet3",
            Self::E1000 => "e1000",
            Self::E1000e => "e1000e",
            Self::Rtl8139 => "rtl8139",
            Self::Pcnet => "pcnet",
        }
    }

    /// What the card is, for display.
    pub fn description(self) -> &'static str {
        match self {
            Self::Virtio => "virtio-net",
            Self::Vmxnet3 => "VMware's paravirtual card",
            Self::E1000 => "Intel 82540EM",
            Self::E1000e => "Intel 82574L",
            Self::Rtl8139 => "Realtek 8139",
            Self::Pcnet => "AMD PCnet",
        }
    }
}
