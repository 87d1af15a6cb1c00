//! The definition of a virtual machine: the file `machine.toml`, which users may read and edit.
//!
//! ```toml
//! name = "web"
//! uuid = "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11"
//! cpus = 1
//! memory = "256M"
//! ports = 4                   # for devices that are added while it runs
//! autostart = true            # without it false
//! boot_order = ["cdrom", "disk"]
//! vnc = "unix"
//! run_as = "qemu"
//! qemu_arguments = ["-vga", "std"]
//! cpu_model = "Skylake-Server,+pcid"
//!
//! [boot]                      # default: the firmware boots the first disk
//! kernel = "/srv/guest/vmlinuz"
//! initrd = "/srv/guest/initrd"
//! append = "console=ttyS0"
//!
//! [seed]                      # for cloud-init in the guest
//! ssh_keys = ["ssh-ed25519 AAAA.. me"]
//!
//! [[disk]]
//! name = "web"                # a disk of the datastore
//! slot = 8                    # its PCI slot, which never changes
//!
//! [[cdrom]]
//! unit = 0
//! file = "/srv/install.iso"   # without it the drive is empty
//!
//! [[network]]
//! mac = "52:54:00:12:34:56"
//! link = "user"
//! slot = 16
//! ```
//!
//! The hardware that guests of other programs expect, such as UEFI or VMware's controllers, is in [`hardware`].
//!
//! 1. [`Definition::parse`] accepts any text: it returns a consistent definition, or an error that names the line or
//!    key.
//! 2. Every device gets its PCI slot when it is added. Saved states and instant clones require the same device
//!    addresses, so no address may depend on the number of devices.
//! 3. A definition file is replaced atomically.

mod cdroms;
mod check;
mod devices;
pub mod forward;
pub mod hardware;
mod memory;
mod seed;
mod vnc;

pub use cdroms::{BootDevice, Cdrom};
pub use check::check_name;
pub use forward::Forward;
pub use hardware::{Bus, Card, Chipset, Clock, Display, Firmware, IDE_SLOT, Platform, WriteErrors};
pub use seed::{KEYS_MAX, Seed, USER_DATA_MAX};
pub use vnc::{FIRST_PORT as VNC_FIRST_PORT, Vnc, VncTls};

use crate::identity::{Mac, new_uuid};
use error::{Error, ErrorKind, Result};
use hardware::is_default;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use uuid::Uuid;

/// The newest version of definitions.
pub const VERSION: u32 = 2;
/// Longest definition file that is read, in bytes.
pub const TEXT_MAX: usize = 1 << 20;
/// Longest name of a machine, which is used as a folder name and a host name.
pub const NAME_MAX: usize = 63;
/// Most virtual CPUs.
pub const CPUS_MAX: u32 = 255;
/// Least memory, in bytes.
pub const MEMORY_MIN: u64 = 16 << 20;
/// Most memory, in bytes.
pub const MEMORY_MAX: u64 = 4 << 40;
/// Slots for disks. The PCI bus has 32 slots, of which the lower ones are used by the chipset and by devices of every
/// machine.
pub const DISK_SLOTS: std::ops::Range<u8> = 8..16;
/// Slots for network cards.
pub const NETWORK_SLOTS: std::ops::Range<u8> = 16..24;
/// The end of the slots for network cards in definitions of version 1.
const FIRST_VERSION_SLOTS_END: u8 = 20;
/// The slot number of a device in the first port. A device in port N has this number plus N in place of a PCI slot.
pub const FIRST_PORT: u8 = 32;
/// Most ports for devices that are added while the machine runs.
pub const PORTS_MAX: u8 = 8;
/// Ports of a new machine.
pub const PORTS_DEFAULT: u8 = 4;
/// Lowest limit, in bytes, of the memory that QEMU uses besides the guest's memory. With a lower limit QEMU cannot
/// start a guest.
pub const QEMU_MEMORY_MIN: u64 = 256 << 20;
/// The value of `cpu_model` in requests that removes the model from the definition, so that the machine has the default
/// model.
pub const CPU_MODEL_USUAL: &str = "default";
/// Longest model of CPUs with its features, in bytes.
pub const CPU_MODEL_MAX: usize = 1024;
/// Most further arguments of QEMU.
pub const ARGUMENTS_MAX: usize = 256;

/// The definition of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The version of the definition, which decides whether an older program can read it. Definitions without a version
    /// have version 1; version 2 adds `platform`, `cpu_model`, `ports`, `autostart`, `qemu_arguments`, `run_as`,
    /// `write_errors`, `boot_order`, `vnc`, `vnc_tls`, `new_identity`, `cdrom` and `seed`; the fields `bus`, `unit` and
    /// `model` of disks and cards; and more slots.
    #[serde(default = "first_version", skip_serializing_if = "is_first_version")]
    pub version: u32,
    /// The machine's name, which is also the name of its folder and the host name of its guest.
    pub name: String,
    /// The machine's UUID, which the guest sees in its firmware tables.
    #[serde(with = "uuid::serde::hyphenated")]
    pub uuid: Uuid,
    /// Virtual CPUs.
    pub cpus: u32,
    /// QEMU's name for the model of the CPUs, with features; `None` for a CPU with all features that the host, or
    /// QEMU's emulation, supports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// Memory in bytes; written in the file as `256M`.
    #[serde(with = "memory")]
    pub memory: u64,
    /// Firmware, chipset, clock and display.
    #[serde(default, skip_serializing_if = "is_default")]
    pub platform: Platform,
    /// Ports for devices that are added while the machine runs; 0 in definitions of version 1.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ports: u8,
    /// Whether `start --autostart` starts the machine.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub autostart: bool,
    /// Further arguments of QEMU, added after those that lamina generates.
    #[serde(default, rename = "qemu_arguments", skip_serializing_if = "Vec::is_empty")]
    pub arguments: Vec<String>,
    /// Most memory that QEMU uses besides the memory of the guest, in bytes; `None` for no limit.
    #[serde(default, with = "memory::optional", skip_serializing_if = "Option::is_none")]
    pub qemu_memory: Option<u64>,
    /// The user as which QEMU runs after it has opened its files; `None` for the default of the datastore
    /// ([`crate::user`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_as: Option<String>,
    /// What QEMU does when a write of the guest to a disk fails.
    #[serde(default, skip_serializing_if = "is_default")]
    pub write_errors: WriteErrors,
    /// The devices that the firmware tries, in this order; empty for the usual order ([`BootDevice::USUAL`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub boot_order: Vec<BootDevice>,
    /// Where the machine's screen is served by VNC, which needs a graphics card.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnc: Option<Vnc>,
    /// How VNC on a TCP port is encrypted; without encryption only loopback addresses are possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnc_tls: Option<VncTls>,
    /// The kernel that QEMU starts; without a kernel, the firmware boots from a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Boot>,
    /// How the guest is given an identity of its own at the next start; `None` if the guest has an identity of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_identity: Option<NewIdentity>,
    /// The configuration of cloud-init in the guest. Without it, the machine has no disk for cloud-init.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<Seed>,
    /// The machine from which this one was cloned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// The machine's disks.
    #[serde(default, rename = "disk", skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// The machine's CD-ROM drives.
    #[serde(default, rename = "cdrom", skip_serializing_if = "Vec::is_empty")]
    pub cdroms: Vec<Cdrom>,
    /// The machine's network cards.
    #[serde(default, rename = "network", skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<Network>,
}

/// A kernel that is loaded without a boot loader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Boot {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub append: String,
}

/// Kind of a clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloneKind {
    /// The clone has independent copies of the disks.
    Full,
    /// The clone's disks are deltas on snapshots of the parent's disks.
    Linked,
    /// The clone runs, and shares the parent's disks and memory copy-on-write.
    Instant,
}

impl CloneKind {
    /// The kind's name in definitions and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Linked => "linked",
            Self::Instant => "instant",
        }
    }
}

/// How the guest of a clone that has not started yet is given an identity of its own, by its agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NewIdentity {
    /// Without an agent, the guest runs with its network unplugged.
    Auto,
    /// Without an agent, the machine is stopped again.
    Required,
}

/// The machine that a clone was made from, for information only: the machine may have been deleted since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The name of the machine.
    pub machine: String,
    /// The snapshot of the machine, if a snapshot was cloned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Kind of the clone.
    pub way: CloneKind,
}

/// A disk of the datastore in a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The name of the disk.
    pub name: String,
    /// The PCI slot of the disk or of its controller, one of [`DISK_SLOTS`]; for IDE [`IDE_SLOT`]. Disks with the same
    /// slot are on one controller. For a disk in a port: [`FIRST_PORT`] plus the number of the port.
    pub slot: u8,
    /// The kind of controller to which the disk is attached.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bus: Bus,
    /// The disk's address on the controller.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unit: u8,
}

/// The network that a network card is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// QEMU's user network, which allows outgoing connections only.
    User,
    /// Not connected.
    None,
    /// A bridge of the host, by name.
    Bridge(String),
    /// A tap device that exists on the host already, by name.
    Tap(String),
    /// QEMU's user network, with ports of the host that are forwarded to the guest.
    Forward(Vec<Forward>),
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// The card's MAC address.
    pub mac: Mac,
    /// The network to which the card is connected.
    pub link: Link,
    /// The card's PCI slot, one of [`NETWORK_SLOTS`], or [`FIRST_PORT`] plus the number of its port.
    pub slot: u8,
    /// The card's model.
    #[serde(default, skip_serializing_if = "is_default")]
    pub model: Card,
}

fn first_version() -> u32 {
    1
}

fn is_first_version(version: &u32) -> bool {
    *version == first_version()
}

impl Definition {
    /// A machine without devices, with a new UUID.
    pub fn new(name: &str, cpus: u32, memory: u64) -> Result<Self> {
        let definition = Self {
            version: VERSION,
            name: name.to_owned(),
            uuid: new_uuid()?,
            cpus,
            cpu_model: None,
            memory,
            platform: Platform::default(),
            ports: PORTS_DEFAULT,
            autostart: false,
            arguments: Vec::new(),
            qemu_memory: None,
            run_as: None,
            write_errors: WriteErrors::default(),
            boot_order: Vec::new(),
            vnc: None,
            vnc_tls: None,
            boot: None,
            new_identity: None,
            seed: None,
            origin: None,
            disks: Vec::new(),
            cdroms: Vec::new(),
            networks: Vec::new(),
        };
        definition.check()?;
        Ok(definition)
    }

    /// The definition of a clone: the same devices in the same slots, with a new identity.
    pub fn for_clone(&self, name: &str, origin: Origin) -> Result<Self> {
        let disks = self.disks.iter().enumerate();
        let mut networks = Vec::with_capacity(self.networks.len());
        for network in &self.networks {
            networks.push(Network { mac: Mac::new()?, link: network.link.for_clone(), ..network.clone() });
        }
        let clone = Self {
            name: name.to_owned(),
            uuid: new_uuid()?,
            // Two processes cannot listen on one port.
            vnc: self.vnc.map(|_| Vnc::Unix),
            vnc_tls: None,
            seed: Seed::for_clone(self.seed.as_ref(), None),
            origin: Some(origin),
            autostart: false,
            disks: disks.map(|(index, disk)| Disk { name: disk_name(name, index), ..disk.clone() }).collect(),
            networks,
            ..self.clone()
        };
        clone.check()?;
        Ok(clone)
    }

    /// Sets where the machine's screen is served by VNC, and adds the graphics card that VNC needs; with `None`, VNC is
    /// switched off. Certificates are kept only if VNC is on a TCP port.
    pub fn set_vnc(&mut self, vnc: Option<Vnc>) {
        self.vnc = vnc;
        self.vnc_tls = self.vnc_tls.take().filter(|_| matches!(vnc, Some(Vnc::Tcp(_))));
        if vnc.is_some() {
            self.platform.display = Display::Vga;
        }
    }

    /// The names of the machine's disks.
    pub fn disk_names(&self) -> Vec<String> {
        self.disks.iter().map(|disk| disk.name.clone()).collect()
    }

    /// Parses a definition; errors call its file `origin`.
    pub fn parse(text: &str, origin: &str) -> Result<Self> {
        let invalid = |what: String| Error::new(ErrorKind::Invalid, format!("'{origin}': {what}"));
        if text.len() > TEXT_MAX {
            return Err(invalid(format!("{} bytes are too many for the definition of a machine", text.len())));
        }
        let definition: Self = toml::from_str(text).map_err(|e| invalid(e.to_string()))?;
        definition.check().map_err(|error| error.context(format!("'{origin}'")))?;
        Ok(definition)
    }

    /// The text of the definition.
    pub fn to_text(&self) -> Result<String> {
        toml::to_string(self)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("machine '{}' cannot be written: {e}", self.name)))
    }

    /// The lowest version that has every field whose value in this definition differs from the default.
    pub fn needed_version(&self) -> u32 {
        let plain = self.platform == Platform::default()
            && (self.ports, self.autostart, self.arguments.is_empty()) == (0, false, true)
            && self.qemu_memory.is_none()
            && self.cpu_model.is_none()
            && self.run_as.is_none()
            && self.new_identity.is_none()
            && self.write_errors == WriteErrors::default()
            && self.boot_order.is_empty()
            && self.cdroms.is_empty()
            && self.seed.is_none()
            && self.vnc.is_none()
            && self.disks.iter().all(|disk| disk.bus == Bus::Virtio)
            && self.networks.iter().all(|card| card.model == Card::Virtio && card.slot < FIRST_VERSION_SLOTS_END)
            && self.networks.iter().all(|card| !matches!(card.link, Link::Tap(_) | Link::Forward(_)));
        if plain { first_version() } else { VERSION }
    }
}

fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// The disks that the sections `[[disk]]` of a text name, even if the text is not a valid definition.
pub fn named_disks(text: &str) -> Vec<String> {
    let mut section = "";
    let mut names = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line.split('#').next().unwrap_or_default().trim();
        } else if let ("[[disk]]", Some((key, _))) = (section, line.split_once('='))
            && key.trim() == "name"
            && let Ok(pair) = toml::from_str::<toml::Table>(line)
            && let Some(name) = pair.get("name").and_then(toml::Value::as_str)
        {
            names.push(name.to_owned());
        }
    }
    names
}

/// The name of a disk that is created for a machine.
pub fn disk_name(machine: &str, index: usize) -> String {
    match index {
        0 => machine.to_owned(),
        _ => format!("{machine}-{}", index + 1),
    }
}

#[cfg(test)]
mod tests;
