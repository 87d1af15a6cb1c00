//! What a definition must satisfy: its devices have addresses of their own that exist, and its values are in range.

use super::{
    ARGUMENTS_MAX, Bus, CPU_MODEL_MAX, CPUS_MAX, Chipset, DISK_SLOTS, Definition, Display, FIRST_PORT, Firmware,
    IDE_SLOT, Link, MEMORY_MAX, MEMORY_MIN, NAME_MAX, NETWORK_SLOTS, PORTS_MAX, QEMU_MEMORY_MIN, VERSION, WriteErrors,
};
use crate::user;
use error::text::size;
use error::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};

impl Definition {
    /// Checks a record that contains the definition of a machine: its version is supported, and it names one snapshot
    /// for each disk. `version` has the record's version and the supported one; errors name the record `origin`.
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

    /// Why the running guest's state cannot be saved; `None` if the state can be saved.
    pub fn unsavable(&self) -> Option<&'static str> {
        if self.platform.firmware == Firmware::Uefi {
            return Some("the variables of UEFI are not part of saved states");
        }
        if self.disks.iter().any(|disk| disk.bus == Bus::Nvme) {
            return Some("QEMU cannot save the state of NVMe controllers");
        }
        let alone = self.networks.iter().any(|card| matches!(card.link, Link::Tap(_) | Link::Forward(_)));
        alone.then_some("a second process, which continues the guest, cannot have its tap device or forwarded ports")
    }

    /// Checks that the guest's state can be saved and continued: for snapshots with memory, freezing, instant clones.
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
        self.run_as.as_deref().map_or(Ok(()), user::check_name)?;
        self.check_platform()?;
        self.check_vnc()?;
        self.check_cdroms()?;
        self.check_seed()?;
        if self.cpus == 0 || self.cpus > CPUS_MAX {
            return invalid(format!("a machine has 1 to {CPUS_MAX} CPUs, not {}", self.cpus));
        }
        self.cpu_model.as_deref().map_or(Ok(()), check_cpu_model)?;
        let whole = self.memory.is_multiple_of(1 << 20);
        if !(MEMORY_MIN..=MEMORY_MAX).contains(&self.memory) || !whole {
            return invalid(format!(
                "a machine has whole MiB of memory from 16 MiB to 4 TiB, not {}",
                size(self.memory)
            ));
        }
        if self.qemu_memory.is_some_and(|limit| !(QEMU_MEMORY_MIN..=MEMORY_MAX).contains(&limit)) {
            return invalid("QEMU's own memory is limited to 256 MiB or more".into());
        }
        if self.write_errors != WriteErrors::default()
            && let Some(disk) = self.disks.iter().find(|disk| disk.bus == Bus::Nvme)
        {
            let (errors, disk) = (self.write_errors.name(), &disk.name);
            return invalid(format!(
                "disk '{disk}': QEMU's NVMe controller does not support write_errors = \"{errors}\""
            ));
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
            network.link.check().map_err(|error| error.context(format_args!("network {}", network.mac)))?;
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
            return invalid("Secure Boot needs UEFI and the chipset q35: firmware \"uefi\", chipset \"q35\"".into());
        }
        if self.vnc.is_some() && platform.display == Display::None {
            return invalid("vnc needs a graphics card: display \"vga\"".into());
        }
        match platform.cores {
            Some(cores) if cores == 0 || !self.cpus.is_multiple_of(cores) => {
                invalid(format!("{} CPUs cannot be divided into sockets of {cores} cores", self.cpus))
            }
            _ => Ok(()),
        }
    }
}

/// Checks the form of a model of CPUs: the name that QEMU has for it, and features, separated by commas. QEMU checks at
/// its start whether it supports the model and the features.
fn check_cpu_model(model: &str) -> Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+=,:".contains(&byte);
    let named = model.starts_with(|first: char| first.is_ascii_alphanumeric()) && model != "help";
    if !named || model.len() > CPU_MODEL_MAX || !model.bytes().all(plain) {
        let text = format!(
            "'{}' is no CPU model: use a name that 'qemu-system-x86_64 -cpu help' lists, with features such as ',+pcid' if \
             needed",
            model.escape_debug()
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
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
