//! The definition of a virtual machine: the file `machine.toml`, which users may read and edit.
//!
//! ```toml
//! name = "web"
//! uuid = "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11"
//! cpus = 1
//! memory = "256M"
//! ports = 4                   # for devices that are added while the machine runs
//! autostart = true            # default: false
//! qemu_arguments = ["-vga", "std"]
//!
//! [boot]                      # default: the firmware boots the first disk
//! kernel = "/srv/guest/vmlinuz"
//! initrd = "/srv/guest/initrd"
//! append = "console=ttyS0"
//!
//! [[disk]]
//! name = "web"                # a disk of the datastore
//! slot = 8                    # its PCI slot, which never changes
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

mod devices;
pub mod hardware;

pub use hardware::{Bus, Card, Chipset, Clock, Display, Firmware, IDE_SLOT, Platform};

use crate::identity::{Mac, new_uuid};
use error::{Error, ErrorKind, Result};
use hardware::is_default;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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
/// The slot number that stands for the first port. Devices in ports have the numbers from here on, instead of slots.
pub const FIRST_PORT: u8 = 32;
/// Most ports for devices that are added while the machine runs.
pub const PORTS_MAX: u8 = 8;
/// Ports of a new machine.
pub const PORTS_DEFAULT: u8 = 4;
/// Most further arguments of QEMU.
pub const ARGUMENTS_MAX: usize = 256;

/// The definition of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The version of the definition: a program refuses versions newer than its own. Definitions without a version have
    /// version 1. Version 2 adds `platform`, `ports`, `autostart` and `qemu_arguments`, `bus`, `unit` and `model` of
    /// devices, and more slots.
    #[serde(default = "first_version", skip_serializing_if = "is_first_version")]
    pub version: u32,
    /// The machine's name, which is also the name of its folder and the host name of its guest.
    pub name: String,
    /// The machine's UUID, which the guest sees in its firmware tables.
    #[serde(with = "uuid::serde::hyphenated")]
    pub uuid: Uuid,
    /// Virtual CPUs.
    pub cpus: u32,
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
    /// The kernel to boot; `None` if the firmware boots from the first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Boot>,
    /// The machine from which this machine was cloned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// The machine's disks.
    #[serde(default, rename = "disk", skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
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
            memory,
            platform: Platform::default(),
            ports: PORTS_DEFAULT,
            autostart: false,
            arguments: Vec::new(),
            boot: None,
            origin: None,
            disks: Vec::new(),
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
            networks.push(Network { mac: Mac::new()?, ..network.clone() });
        }
        let clone = Self {
            name: name.to_owned(),
            uuid: new_uuid()?,
            origin: Some(origin),
            autostart: false,
            disks: disks.map(|(index, disk)| Disk { name: disk_name(name, index), ..disk.clone() }).collect(),
            networks,
            ..self.clone()
        };
        clone.check()?;
        Ok(clone)
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

    /// Checks a record that contains the definition of a machine: that its version is supported, and that it names one
    /// snapshot for each disk. `version` has the record's version and the newest supported one; errors call the record
    /// `origin`.
    pub(crate) fn check_record<'a>(
        &self,
        origin: &str,
        (version, known): (u32, u32),
        disks: impl Iterator<Item = &'a String>,
    ) -> Result<()> {
        if version != known {
            let text = format!("'{origin}' has version {version}, this program supports {known}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, format!("'{origin}': {what}"));
        self.check().map_err(|error| corrupt(error.to_string()))?;
        match disks.eq(self.disks.iter().map(|disk| &disk.name)) {
            true => Ok(()),
            false => Err(corrupt("its snapshots do not match its disks".into())),
        }
    }

    /// The lowest version that has every field in which this definition differs from the defaults.
    pub fn needed_version(&self) -> u32 {
        let plain = self.platform == Platform::default()
            && (self.ports, self.autostart, self.arguments.is_empty()) == (0, false, true)
            && self.disks.iter().all(|disk| disk.bus == Bus::Virtio)
            && self.networks.iter().all(|card| card.model == Card::Virtio && card.slot < FIRST_VERSION_SLOTS_END);
        if plain { first_version() } else { VERSION }
    }

    /// Why the state of a running guest with this hardware cannot be saved; `None` if it can.
    pub fn unsavable(&self) -> Option<&'static str> {
        if self.platform.firmware == Firmware::Uefi {
            return Some("the variables of UEFI are not part of saved states");
        }
        let nvme = self.disks.iter().any(|disk| disk.bus == Bus::Nvme);
        nvme.then_some("QEMU cannot save the state of NVMe controllers")
    }

    /// Checks that the guest's state can be saved and loaded, as snapshots with memory, freezing and instant clones
    /// require.
    pub fn check_savable(&self) -> Result<()> {
        match self.unsavable() {
            None => Ok(()),
            Some(why) => {
                let text = format!(
                    "the state of machine '{}' cannot be saved with its memory: {why}; snapshots without memory, and \
                     full and linked clones work",
                    self.name
                );
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Checks that the definition is consistent.
    pub fn check(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        if self.version == 0 || self.version > VERSION {
            let text = format!("the definition has version {}, this program supports up to {VERSION}", self.version);
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        check_name(&self.name)?;
        self.check_platform()?;
        if self.cpus == 0 || self.cpus > CPUS_MAX {
            return invalid(format!("a machine has 1 to {CPUS_MAX} CPUs, not {}", self.cpus));
        }
        let whole = self.memory.is_multiple_of(1 << 20);
        if !(MEMORY_MIN..=MEMORY_MAX).contains(&self.memory) || !whole {
            return invalid(format!("{} bytes of memory: whole MiB from 16 MiB to 4 TiB", self.memory));
        }
        if self.ports > PORTS_MAX {
            return invalid(format!("a machine has at most {PORTS_MAX} ports, not {}", self.ports));
        }
        if self.arguments.len() > ARGUMENTS_MAX || self.arguments.iter().any(|one| one.is_empty() || one.contains('\0'))
        {
            return invalid(format!("arguments of QEMU: at most {ARGUMENTS_MAX}, not empty, without NUL"));
        }
        let ports = FIRST_PORT..FIRST_PORT + self.ports;
        let mut slots: BTreeMap<u8, (Bus, BTreeSet<u8>)> = BTreeMap::new();
        let mut disks = BTreeSet::new();
        for disk in &self.disks {
            let right = match disk.bus {
                Bus::Ide => disk.slot == IDE_SLOT && self.platform.chipset == Chipset::I440fx,
                Bus::Virtio => DISK_SLOTS.contains(&disk.slot) || ports.contains(&disk.slot),
                _ => DISK_SLOTS.contains(&disk.slot),
            };
            let (bus, units) = slots.entry(disk.slot).or_insert((disk.bus, BTreeSet::new()));
            if !right || *bus != disk.bus || disk.unit >= disk.bus.units() || !units.insert(disk.unit) {
                return invalid(format!(
                    "disk '{}': slot {} with unit {} is in use, or not for disks on {}",
                    disk.name,
                    disk.slot,
                    disk.unit,
                    disk.bus.name()
                ));
            }
            if !disks.insert(&disk.name) {
                return invalid(format!("disk '{}' is named twice", disk.name));
            }
        }
        for network in &self.networks {
            let right = NETWORK_SLOTS.contains(&network.slot) || ports.contains(&network.slot);
            let taken = slots.insert(network.slot, (Bus::Virtio, BTreeSet::new())).is_some();
            if !right || taken {
                return invalid(format!(
                    "network {}: slot {} is in use or not for network cards",
                    network.mac, network.slot
                ));
            }
        }
        Ok(())
    }

    fn check_platform(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let platform = &self.platform;
        if platform.secure_boot && (platform.firmware != Firmware::Uefi || platform.chipset != Chipset::Q35) {
            return invalid("secure_boot needs firmware \"uefi\" and chipset \"q35\"".into());
        }
        match platform.cores {
            Some(cores) if cores == 0 || !self.cpus.is_multiple_of(cores) => {
                invalid(format!("{} CPUs cannot be divided into sockets of {cores} cores", self.cpus))
            }
            _ => Ok(()),
        }
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

/// Checks that a name can be used for a machine: a host name (RFC 1123) without dots.
pub fn check_name(name: &str) -> Result<()> {
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if name.is_empty() || name.len() > NAME_MAX || !plain || name.starts_with('-') || name.ends_with('-') {
        let name = name.escape_debug();
        let text = format!("'{name}' cannot name a machine: use letters, digits and inner hyphens, at most {NAME_MAX}");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

/// Memory sizes in the file, such as `256M`.
mod memory {
    use serde::de::{Error, Unexpected};
    use serde::{Deserialize, Deserializer, Serializer};

    const UNITS: [(char, u32); 3] = [('T', 40), ('G', 30), ('M', 20)];

    pub fn serialize<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        let unit = UNITS.iter().find(|(_, shift)| *bytes != 0 && bytes.is_multiple_of(1 << shift));
        match unit {
            Some((letter, shift)) => serializer.serialize_str(&format!("{}{letter}", bytes >> shift)),
            None => serializer.serialize_str(&bytes.to_string()),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = || D::Error::invalid_value(Unexpected::Str(&text), &"a size such as \"256M\" or \"2G\"");
        let (digits, shift) = match text.chars().last().and_then(|last| UNITS.iter().find(|(unit, _)| *unit == last)) {
            Some((unit, shift)) => (text.strip_suffix(*unit).ok_or_else(wrong)?, *shift),
            None => (text.as_str(), 0),
        };
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        number.checked_mul(1 << shift).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn machine() -> Definition {
        let mut machine = Definition {
            version: 1,
            name: "web".into(),
            uuid: "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11".parse().unwrap(),
            cpus: 2,
            memory: 256 << 20,
            platform: Platform::default(),
            ports: 2,
            autostart: true,
            arguments: vec!["-device".into(), "usb-tablet, \"x\"".into()],
            origin: Some(Origin { machine: "base".into(), snapshot: None, way: CloneKind::Linked }),
            boot: Some(Boot { kernel: "/k".into(), initrd: Some("/i".into()), append: "console=ttyS0".into() }),
            disks: Vec::new(),
            networks: Vec::new(),
        };
        machine.add_disk("web").unwrap();
        machine.add_disk("data").unwrap();
        machine.add_network("52:54:00:12:34:56".parse().unwrap(), Link::User).unwrap();
        machine.add_network("52:54:00:12:34:57".parse().unwrap(), Link::Bridge("br0".into())).unwrap();
        machine
    }

    #[test]
    fn definitions_are_decoded_as_encoded() {
        let machine = machine();
        let text = machine.to_text().unwrap();
        assert!(text.contains("memory = \"256M\""), "{text}");
        assert_eq!(Definition::parse(&text, "web").unwrap(), machine);
    }

    #[test]
    fn inconsistent_definitions_are_refused() {
        let good = machine().to_text().unwrap();
        for (from, to) in [
            ("cpus = 2", "cpus = 0"),
            ("cpus = 2", "cpus = 256"),
            ("cpus = 2", "cpu = 2"),
            ("256M", "256K"),
            ("256M", "+256M"),
            ("256M", "15M"),
            ("256M", "99999999T"),
            ("slot = 9", "slot = 8"),
            ("slot = 9", "slot = 34"),
            ("ports = 2", "ports = 9"),
            ("\"-device\"", "\"\""),
            ("slot = 9", "slot = 16"),
            ("slot = 17", "slot = 9"),
            ("name = \"data\"", "name = \"web\""),
            ("name = \"web\"", "name = \"../web\""),
            ("52:54:00:12:34:56", "52:54:00:12:34"),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from}");
            let error = Definition::parse(&text, "web").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{to}");
        }
    }

    /// A machine as an import from another program defines it.
    fn foreign() -> Definition {
        let mut machine = machine();
        machine.version = VERSION;
        machine.platform = Platform {
            chipset: Chipset::I440fx,
            firmware: Firmware::Uefi,
            cores: Some(2),
            clock: Clock::Local,
            display: Display::Vga,
            ..Platform::default()
        };
        machine.disks[0] = Disk { name: "web".into(), slot: 8, bus: Bus::Pvscsi, unit: 0 };
        machine.disks[1] = Disk { name: "data".into(), slot: 8, bus: Bus::Pvscsi, unit: 15 };
        machine.disks.push(Disk { name: "old".into(), slot: IDE_SLOT, bus: Bus::Ide, unit: 2 });
        machine.networks[0].model = Card::Vmxnet3;
        machine
    }

    #[test]
    fn the_hardware_of_other_programs_survives_encoding_and_cloning() {
        let machine = foreign();
        let text = machine.to_text().unwrap();
        assert!(
            text.contains("version = 2") && text.contains("bus = \"pvscsi\"") && text.contains("unit = 15"),
            "{text}"
        );
        assert_eq!(Definition::parse(&text, "web").unwrap(), machine);
        let with_defaults = Definition { ports: 0, autostart: false, arguments: Vec::new(), ..super::tests::machine() };
        assert_eq!((machine.needed_version(), with_defaults.needed_version()), (2, 1));
        let origin = Origin { machine: "web".into(), snapshot: None, way: CloneKind::Full };
        let clone = machine.for_clone("copy", origin).unwrap();
        assert_eq!((clone.platform, clone.version), (machine.platform, 2));
        let places = |machine: &Definition| {
            machine.disks.iter().map(|disk| (disk.slot, disk.bus, disk.unit)).collect::<Vec<_>>()
        };
        assert_eq!(places(&clone), places(&machine));
        assert_eq!(clone.networks[0].model, Card::Vmxnet3);
        assert!(machine.check_savable().is_err() && super::tests::machine().check_savable().is_ok());
    }

    #[test]
    fn hardware_that_does_not_go_together_is_refused() {
        let good = foreign().to_text().unwrap();
        for (from, to) in [
            ("version = 2", "version = 0"),
            ("chipset = \"i440fx\"", "chipset = \"q35\""),
            ("chipset = \"i440fx\"", "chipset = \"i440fx\"\nsecure_boot = true"),
            ("cores = 2", "cores = 3"),
            ("cores = 2", "cores = 0"),
            ("unit = 15", "unit = 64"),
            ("unit = 15\n", ""),
            ("bus = \"pvscsi\"", "bus = \"lsi\""),
            ("bus = \"pvscsi\"", "bus = \"scsi\""),
            ("slot = 1\n", "slot = 9\n"),
            ("model = \"vmxnet3\"", "model = \"vmxnet2\""),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from}");
            assert!(Definition::parse(&text, "web").is_err(), "{to}");
        }
        let newer = good.replacen("version = 2", "version = 3", 1);
        assert_eq!(Definition::parse(&newer, "web").unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn the_disks_of_a_broken_definition_are_found() {
        let good = machine().to_text().unwrap();
        let names = ["web", "data"].map(String::from);
        assert_eq!(named_disks(&good), names);
        for (from, to) in [("cpus = 2", "cpus = two"), ("[boot]", "[boot"), ("slot = 9", "slot ="), ("uuid", "uuit")] {
            let text = good.replacen(from, to, 1);
            assert!(Definition::parse(&text, "web").is_err(), "{to}");
            assert_eq!(named_disks(&text), names, "{to}");
        }
        assert!(named_disks("name = \"web\"\n[[network]]\nname = \"x\"\n[[disk]]\nnames = \"x\"\nname = x").is_empty());
    }

    #[test]
    fn disks_and_network_cards_beyond_the_pci_slots_are_refused() {
        let mut machine = machine();
        for number in 2..DISK_SLOTS.len() {
            machine.add_disk(&format!("d{number}")).unwrap();
        }
        assert_eq!(machine.add_disk("one-more").unwrap_err().kind(), ErrorKind::Invalid);
        machine.plug_disk("plugged").unwrap();
        machine.plug_network("52:54:00:12:34:58".parse().unwrap(), Link::User).unwrap();
        machine.check().unwrap();
        assert!(machine.plug_disk("one-more").unwrap_err().to_string().contains("all 2 ports"));
        assert!(machine.set_ports(1).is_err() && machine.set_ports(9).is_err());
        machine.set_ports(8).unwrap();
        assert!(machine.disks.pop().unwrap().is_in_port() && machine.networks.pop().unwrap().is_in_port());
        machine.disks.remove(3);
        machine.add_disk("again").unwrap();
        machine.check().unwrap();
        assert_eq!(machine.disks.last().unwrap().slot, DISK_SLOTS.start + 3);
    }
}
