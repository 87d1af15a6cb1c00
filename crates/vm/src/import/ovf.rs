//! Machines in an OVF descriptor (DSP0243, versions 1 and 2), with the additions of VMware and VirtualBox.
//!
//! A descriptor is a file next to its disks, or a member of an archive together with its disks.

use super::paths::Permitted;
use super::{Content, Effect, Foreign, ForeignCard, ForeignDisk, Format, models};
use crate::definition::{Bus, Chipset, Clock, Display, Firmware};
use crate::identity::Mac;
use ::ovf::xml::Element;
use ::ovf::{Capacity, Envelope, resource};
use error::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Where the disks of a descriptor are.
pub enum Files<'a> {
    /// In files in the folder of the descriptor.
    Beside(&'a Permitted),
    /// In the archive at this path.
    Archive(&'a Path),
}

/// Parses a descriptor.
pub fn read(path: &Path, bytes: &[u8], files: Files<'_>) -> Result<Vec<Foreign>> {
    let envelope = Envelope::parse(bytes, &path.display().to_string())?;
    let reader = Reader { path, envelope: &envelope, files };
    let systems = envelope.systems();
    if systems.is_empty() {
        return Err(envelope.wrong(envelope.root(), "it describes no machine"));
    }
    systems.into_iter().map(|system| reader.system(system)).collect()
}

struct Reader<'a> {
    path: &'a Path,
    envelope: &'a Envelope,
    files: Files<'a>,
}

/// The controllers and disks of a machine, which refer to each other.
#[derive(Default)]
struct Parts {
    /// Controllers by their instance id: the index, and the first unit of an IDE channel.
    controllers: BTreeMap<String, (usize, u32)>,
    /// Disks, each with the instance id of its controller.
    disks: Vec<(String, ForeignDisk)>,
    ide: Option<usize>,
    channels: u32,
}

impl Reader<'_> {
    fn wrong(&self, element: &Element, what: impl std::fmt::Display) -> Error {
        self.envelope.wrong(element, what)
    }

    fn system(&self, system: &Element) -> Result<Foreign> {
        let format = match self.files {
            Files::Beside(_) => Format::Ovf,
            Files::Archive(_) => Format::Ova,
        };
        let mut machine = Foreign::new(self.path, format);
        let stem = self.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        machine.name = system.text_of("Name").or(system.attribute("id")).map_or(stem, str::to_owned);
        let Some(hardware) = system.child("VirtualHardwareSection") else {
            return Err(self.wrong(system, "the machine has no hardware"));
        };
        let mut parts = Parts::default();
        self.platform(&mut machine, system, hardware);
        // A disk may be listed before its controller, so all controllers are read first.
        for item in ::ovf::items(hardware) {
            self.controller(&mut machine, item, &mut parts)?;
        }
        for item in ::ovf::items(hardware) {
            self.item(&mut machine, item, &mut parts)?;
        }
        for (_, disk) in parts.disks {
            machine.add_disk(disk)?;
        }
        self.virtualbox(&mut machine, system);
        if machine.memory == 0 {
            return Err(self.wrong(hardware, "the machine has no memory"));
        }
        Ok(machine)
    }

    fn platform(&self, machine: &mut Foreign, system: &Element, hardware: &Element) {
        let settings = || hardware.all("Config").chain(hardware.all("ExtraConfig"));
        let setting =
            |key: &str| settings().find(|it| it.attribute("key") == Some(key)).and_then(|it| it.attribute("value"));
        let uefi = setting("firmware").is_some_and(|value| value.eq_ignore_ascii_case("efi"));
        let secure = ["uefi.secureBoot.enabled", "bootOptions.efiSecureBootEnabled"];
        let platform = &mut machine.platform;
        platform.firmware = if uefi { Firmware::Uefi } else { Firmware::Bios };
        platform.chipset = if uefi { Chipset::Q35 } else { Chipset::I440fx };
        platform.secure_boot =
            uefi && secure.iter().any(|key| setting(key).is_some_and(|value| value.eq_ignore_ascii_case("true")));
        platform.display = Display::Vga;
        let section = system.child("OperatingSystemSection");
        let names = section
            .into_iter()
            .flat_map(|it| [it.attribute("osType"), it.text_of("OSType"), it.text_of("Description")]);
        let windows =
            names.flatten().any(|name| name.to_ascii_lowercase().starts_with("win") || name.contains("Windows"));
        platform.clock = if windows { Clock::Local } else { Clock::Utc };
        if setting("nvram").is_some() {
            let reason = "VMware's file of firmware variables has another format than QEMU's";
            machine.note("nvram", Effect::LeftOut, reason);
        }
    }

    fn controller(&self, machine: &mut Foreign, item: &Element, parts: &mut Parts) -> Result<()> {
        let (label, subtype) = (label(item), item.text_of("ResourceSubType").unwrap_or_default().to_ascii_lowercase());
        let bus = match item.text_of("ResourceType").unwrap_or_default() {
            resource::IDE => Bus::Ide,
            resource::STORAGE if subtype.contains("nvme") => Bus::Nvme,
            resource::STORAGE if subtype.contains("ahci") || subtype.contains("sata") => Bus::Sata,
            resource::STORAGE if subtype.contains("virtio") => Bus::VirtioScsi,
            resource::SCSI => match subtype.as_str() {
                "virtualscsi" | "pvscsi" => Bus::Pvscsi,
                "lsilogicsas" | "lsisas1068" => Bus::Lsisas,
                "virtio-scsi" => Bus::VirtioScsi,
                "" | "lsilogic" => models::lsi_logic(machine, &label),
                "buslogic" => models::bus_logic(machine, &label),
                other => {
                    return Err(self.wrong(item, format!("controller '{}' cannot be mapped", other.escape_debug())));
                }
            },
            resource::STORAGE => {
                return Err(self.wrong(item, format!("controller '{}' cannot be mapped", subtype.escape_debug())));
            }
            _ => return Ok(()),
        };
        let instance = item.text_of("InstanceID").unwrap_or_default().to_owned();
        let entry = match (bus, parts.ide) {
            (Bus::Ide, known) => {
                let index = match known {
                    Some(index) => index,
                    None => machine.add_controller("IDE".into(), bus)?,
                };
                parts.ide = Some(index);
                parts.channels += 1;
                (index, (parts.channels - 1) * 2)
            }
            _ => (machine.add_controller(label, bus)?, 0),
        };
        if parts.controllers.insert(instance, entry).is_some() {
            return Err(self.wrong(item, "two devices have one InstanceID"));
        }
        Ok(())
    }

    fn item(&self, machine: &mut Foreign, item: &Element, parts: &mut Parts) -> Result<()> {
        let label = label(item);
        let quantity = || -> Result<u64> {
            let text = item.text_of("VirtualQuantity").unwrap_or_default();
            text.parse().map_err(|_| self.wrong(item, format!("'{}' is no quantity", text.escape_debug())))
        };
        match item.text_of("ResourceType").unwrap_or_default() {
            resource::PROCESSOR => {
                machine.cpus = u32::try_from(quantity()?).map_err(|_| self.wrong(item, "too many processors"))?;
                if let Some(cores) = item.text_of("CoresPerSocket") {
                    models::cores(machine, &label, cores.parse().unwrap_or(0));
                }
            }
            resource::MEMORY => {
                machine.memory =
                    ::ovf::memory(item).ok_or_else(|| self.wrong(item, "the amount of memory cannot be read"))?;
            }
            resource::DISK => {
                let parent = item.text_of("Parent").unwrap_or_default().to_owned();
                let Some((controller, first)) = parts.controllers.get(&parent).copied() else {
                    return Err(self.wrong(item, format!("disk '{}' has no controller", label.escape_debug())));
                };
                let unit = item.text_of("AddressOnParent").unwrap_or("0");
                let unit: u32 =
                    unit.parse().map_err(|_| self.wrong(item, format!("'{}' is no address", unit.escape_debug())))?;
                let unit = first.saturating_add(unit);
                let (content, stated) = self.content(item)?;
                parts.disks.push((parent, ForeignDisk { label, controller, unit, content, stated }));
            }
            resource::ETHERNET => {
                let name =
                    item.text_of("ResourceSubType").unwrap_or("E1000").split_whitespace().next().unwrap_or("E1000");
                let model = models::card(machine, &label, name);
                let mac =
                    item.text_of("Address").and_then(|text| text.to_ascii_lowercase().replace('-', ":").parse().ok());
                let network = item.text_of("Connection").unwrap_or_default().to_owned();
                let connected =
                    item.text_of("AutomaticAllocation").is_none_or(|text| !text.eq_ignore_ascii_case("false"));
                machine.add_card(ForeignCard { label, model, mac, network, connected })?;
            }
            resource::CD | resource::DVD => models::removable(machine, &label, "cd", None),
            resource::FLOPPY => models::removable(machine, &label, "floppy", None),
            resource::USB => {
                machine.note(label, Effect::LeftOut, "machines have no USB; keyboard and mouse are PS/2");
            }
            resource::SOUND => machine.note(label, Effect::LeftOut, "machines have no sound card"),
            resource::GRAPHICS => machine.note(label, Effect::Replaced, "a VGA card takes its place"),
            resource::IDE | resource::SCSI | resource::STORAGE => {}
            _ if item.attribute("required") == Some("false") => {}
            "1" if item.text_of("ResourceSubType").is_some_and(|it| it.eq_ignore_ascii_case("vmware.vmci")) => {
                machine.note(label, Effect::LeftOut, "only VMware has this device");
            }
            other => {
                let reason = format!("no device of the kind {} can be mapped", other.escape_debug());
                machine.note(label, Effect::LeftOut, reason);
            }
        }
        Ok(())
    }

    /// The content of a disk, and the capacity that the descriptor states besides an image.
    fn content(&self, item: &Element) -> Result<(Content, Option<Capacity>)> {
        let place = item.text_of("HostResource").unwrap_or_default();
        let (kind, id) =
            match place.strip_prefix("ovf:").unwrap_or(place).strip_prefix('/').and_then(|it| it.split_once('/')) {
                Some((kind @ ("disk" | "file"), id)) => (kind, id),
                _ => return Err(self.wrong(item, format!("'{}' is no disk of this descriptor", place.escape_debug()))),
            };
        if kind == "file" {
            return Ok((self.file(item, id, None)?, None));
        }
        let Some(disk) = self.envelope.disks().find(|disk| disk.attribute("diskId") == Some(id)) else {
            return Err(self.wrong(item, format!("there is no disk '{}'", id.escape_debug())));
        };
        if disk.attribute("parentRef").is_some_and(|parent| !parent.is_empty()) {
            return Err(self.wrong(disk, "the disk is a delta of another disk, which cannot be imported"));
        }
        match disk.attribute("fileRef") {
            // The capacity of the image decides. A capacity in the descriptor that is no number cannot be compared with
            // it.
            Some(file) => Ok((self.file(disk, file, disk.attribute("format"))?, self.envelope.capacity(disk).ok())),
            None => Ok((Content::Empty { capacity: self.envelope.capacity(disk)?.bytes }, None)),
        }
    }

    /// A file of the descriptor, found by its identifier.
    fn file(&self, from: &Element, id: &str, format: Option<&str>) -> Result<Content> {
        let Some(file) = self.envelope.files().find(|file| file.attribute("id") == Some(id)) else {
            return Err(self.wrong(from, format!("there is no file '{}'", id.escape_debug())));
        };
        let name = self.envelope.href(file)?;
        if name.is_empty() {
            return Err(self.wrong(file, "the file has no href"));
        }
        match self.files {
            Files::Archive(archive) => {
                let member = name.strip_prefix("./").unwrap_or(name).to_owned();
                Ok(Content::Member { archive: archive.to_owned(), member })
            }
            Files::Beside(permitted) => {
                let path = permitted.find(name).map_err(|error| {
                    let line = format!("'{}', line {}", self.path.display(), file.line);
                    error.context(line)
                })?;
                let format = format.map(str::to_ascii_lowercase);
                let vmdk = format.is_some_and(|format| format.contains("vmdk"));
                Ok(Content::Image { path, format: vmdk.then(|| "vmdk".to_owned()) })
            }
        }
    }

    /// Reads VirtualBox's extensions: firmware, chipset, clock and the addresses of cards.
    fn virtualbox(&self, machine: &mut Foreign, system: &Element) {
        let Some(settings) = system.child("Machine") else { return };
        let hardware = settings.child("Hardware");
        let part = |name: &str| hardware.and_then(|it| it.child(name)).or_else(|| settings.child(name));
        let uefi = part("Firmware").and_then(|it| it.attribute("type")).is_some_and(|kind| kind.starts_with("EFI"));
        let modern = part("Chipset").and_then(|it| it.attribute("type")).is_some_and(|kind| kind == "ICH9");
        if uefi {
            machine.platform.firmware = Firmware::Uefi;
        }
        machine.platform.chipset = if uefi || modern { Chipset::Q35 } else { Chipset::I440fx };
        let universal = part("RTC").and_then(|it| it.attribute("localOrUTC")).is_some_and(|it| it == "UTC");
        machine.platform.clock = if universal { Clock::Utc } else { Clock::Local };
        let adapters = part("Network").into_iter().flat_map(|network| network.all("Adapter"));
        let enabled = adapters.filter(|adapter| adapter.attribute("enabled") == Some("true"));
        for (card, adapter) in machine.cards.iter_mut().zip(enabled) {
            card.mac = card.mac.or_else(|| mac(adapter.attribute("MACAddress").unwrap_or_default()));
        }
    }
}

/// An address as VirtualBox writes it: twelve digits.
pub(super) fn mac(digits: &str) -> Option<Mac> {
    if digits.len() != 12 || !digits.is_ascii() {
        return None;
    }
    let pairs: Vec<&str> = (0..6).map(|at| &digits[at * 2..at * 2 + 2]).collect();
    pairs.join(":").to_ascii_lowercase().parse().ok()
}

/// The name of a device.
fn label(item: &Element) -> String {
    let name = item.text_of("ElementName").or(item.text_of("Caption")).or(item.text_of("Description"));
    name.map_or_else(|| format!("device {}", item.text_of("InstanceID").unwrap_or("?")), str::to_owned)
}
