//! Machines of VirtualBox, in the settings file `.vbox` in their folder.
//!
//! The file registers the media of the machine, and its controllers name media by UUID. A disk of a machine with
//! snapshots is a difference to a parent disk, which the disk's file does not name. Such disks, and disks in
//! VirtualBox's own formats, are refused; the error has the command of VirtualBox that converts the disk.

use super::ovf::mac;
use super::paths::Permitted;
use super::xml_source::XmlSource;
use super::{Content, Effect, Foreign, ForeignCard, ForeignDisk, Format, models};
use crate::definition::{Bus, Chipset, Clock, Display, Firmware};
use error::Result;
use ovf::xml::{self, Element};
use std::path::Path;
use uuid::Uuid;

/// Deepest chain of differences.
const DEPTH_MAX: usize = 64;

/// Parses the settings of a machine, and searches the permitted folders for its disks.
pub fn read(path: &Path, bytes: &[u8], permitted: &Permitted) -> Result<Foreign> {
    let root = xml::parse(bytes, &path.display().to_string())?;
    let reader = Reader { source: XmlSource { path, permitted } };
    let machine = root.child("Machine").filter(|_| root.name == "VirtualBox");
    reader.machine(machine.ok_or_else(|| reader.source.wrong(&root, "it is no machine of VirtualBox"))?)
}

struct Reader<'a> {
    source: XmlSource<'a>,
}

impl Reader<'_> {
    /// A number in an attribute.
    fn number(&self, element: &Element, name: &str) -> Result<u32> {
        let text = element.attribute(name).unwrap_or_default();
        text.parse().map_err(|_| self.source.wrong(element, format!("{name}: '{}' is no number", text.escape_debug())))
    }

    fn uuid(&self, element: &Element, name: &str) -> Result<Uuid> {
        let text = element.attribute(name).unwrap_or_default();
        text.parse().map_err(|_| self.source.wrong(element, format!("{name}: '{}' is no UUID", text.escape_debug())))
    }

    fn machine(&self, settings: &Element) -> Result<Foreign> {
        let mut machine = Foreign::new(self.source.path, Format::Vbox);
        let stem = self.source.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        machine.name = settings.attribute("name").map_or(stem, str::to_owned);
        let hardware = settings.child("Hardware").ok_or_else(|| self.source.wrong(settings, "it has no hardware"))?;
        let kind = |name: &str| hardware.child(name).and_then(|it| it.attribute("type"));
        let owner = if hardware.attribute("uuid").is_some() { hardware } else { settings };
        let uuid = self.uuid(owner, "uuid")?;
        // In guests of machines that older versions of VirtualBox created, the bytes of the first fields of the UUID
        // are reversed.
        let plain = hardware.child("SmbiosUuidLittleEndian").and_then(|it| it.attribute("enabled")) == Some("true");
        machine.uuid = Some(if plain { uuid } else { Uuid::from_bytes(uuid.to_bytes_le()) });
        machine.cpus = match hardware.child("CPU").filter(|cpu| cpu.attribute("count").is_some()) {
            Some(cpu) => self.number(cpu, "count")?,
            None => 1,
        };
        let memory = hardware.child("Memory").ok_or_else(|| self.source.wrong(hardware, "it has no memory"))?;
        machine.memory = u64::from(self.number(memory, "RAMSize")?) << 20;
        machine.platform.display = Display::Vga;
        let uefi = kind("Firmware").is_some_and(|kind| kind.starts_with("EFI"));
        if uefi {
            machine.platform.firmware = Firmware::Uefi;
            let stored = settings.child("NVRAM").or(hardware.child("NVRAM")).and_then(|it| it.attribute("path"));
            if let Some(stored) = stored {
                let reason = "its variables are in a format of VirtualBox; the machine gets new ones";
                machine.note(stored, Effect::Changed, reason);
            }
        }
        let modern = uefi || kind("Chipset") == Some("ICH9");
        machine.platform.chipset = if modern { Chipset::Q35 } else { Chipset::I440fx };
        let universal = hardware.child("RTC").and_then(|it| it.attribute("localOrUTC")) == Some("UTC");
        machine.platform.clock = if universal { Clock::Utc } else { Clock::Local };
        let controllers = hardware.child("StorageControllers").or(settings.child("StorageControllers"));
        for controller in controllers.into_iter().flat_map(|it| it.all("StorageController")) {
            self.controller(&mut machine, settings, controller)?;
        }
        self.cards(&mut machine, hardware)?;
        let mut saved = Vec::new();
        collect_snapshots(settings, 0, &mut saved);
        for name in saved {
            machine.note(format!("snapshot '{name}'"), Effect::LeftOut, "snapshots of VirtualBox cannot be read");
        }
        for (name, reason) in [
            ("AudioAdapter", "machines have no sound card"),
            ("TrustedPlatformModule", "machines have no TPM. Data that is sealed with a TPM cannot be opened"),
        ] {
            let enabled = |it: &Element| {
                it.attribute("enabled") == Some("true")
                    || it.attribute("type").is_some_and(|kind| kind.starts_with('v'))
            };
            if hardware.child(name).is_some_and(enabled) {
                machine.note(name, Effect::LeftOut, reason);
            }
        }
        for folder in hardware.child("SharedFolders").into_iter().flat_map(|it| it.all("SharedFolder")) {
            let name = folder.attribute("name").unwrap_or("shared folder");
            machine.note(name, Effect::LeftOut, "folders of the host cannot be shared with machines");
        }
        Ok(machine)
    }

    fn controller(&self, machine: &mut Foreign, settings: &Element, controller: &Element) -> Result<()> {
        let label = controller.attribute("name").unwrap_or("controller").to_owned();
        let mut added = None;
        for device in controller.all("AttachedDevice") {
            let port = self.number(device, "port")?;
            let place = format!("{label} port {port}");
            match device.attribute("type").unwrap_or_default() {
                "HardDisk" => {}
                kind => {
                    models::removable(machine, &place, kind, None);
                    continue;
                }
            }
            let index = match added {
                Some(index) => index,
                None => {
                    let bus = self.bus(machine, controller, &label)?;
                    *added.insert(machine.add_controller(label.clone(), bus)?)
                }
            };
            let unit = match machine.controllers[index].bus {
                Bus::Ide => port.saturating_mul(2).saturating_add(self.number(device, "device")?),
                _ => port,
            };
            let image = device.child("Image").ok_or_else(|| self.source.wrong(device, "the disk has no image"))?;
            let content = self.content(settings, image)?;
            machine.add_disk(ForeignDisk { label: place, controller: index, unit, content, stated: None })?;
        }
        Ok(())
    }

    fn bus(&self, machine: &mut Foreign, controller: &Element, label: &str) -> Result<Bus> {
        Ok(match controller.attribute("type").unwrap_or_default() {
            "PIIX3" | "PIIX4" | "ICH6" => Bus::Ide,
            "AHCI" | "IntelAhci" => Bus::Sata,
            "LsiLogicSas" => Bus::Lsisas,
            "LsiLogic" => models::lsi_logic(machine, label),
            "BusLogic" => models::bus_logic(machine, label),
            "NVMe" => Bus::Nvme,
            "VirtioSCSI" => Bus::VirtioScsi,
            other => {
                let text = format!("disks on a controller '{}' cannot be imported", other.escape_debug());
                return Err(self.source.wrong(controller, text));
            }
        })
    }

    /// The image of a disk, from the list of media.
    fn content(&self, settings: &Element, image: &Element) -> Result<Content> {
        let uuid = self.uuid(image, "uuid")?;
        let disks = settings.at(&["MediaRegistry", "HardDisks"]);
        let found = disks.and_then(|disks| registered(disks, uuid, 0));
        let (medium, is_difference) =
            found.ok_or_else(|| self.source.wrong(image, format!("no disk with the UUID {uuid} is registered")))?;
        let name = medium.attribute("location").unwrap_or_default();
        let kind = medium.attribute("format").unwrap_or_default();
        let format = match kind.to_ascii_uppercase().as_str() {
            _ if is_difference => {
                let text = format!(
                    "disk '{0}' is a difference of a snapshot, and only VirtualBox can find its parent: make a whole \
                     disk with 'VBoxManage clonemedium disk \"{0}\" NEW.vmdk --format VMDK', or delete the snapshots",
                    name.escape_debug()
                );
                return Err(self.source.wrong(medium, text));
            }
            "VMDK" => "vmdk",
            "RAW" => "raw",
            _ => {
                let text = format!(
                    "disk '{0}' has the format '{1}', which cannot be read: convert it with 'VBoxManage clonemedium disk \
                     \"{0}\" NEW.vmdk --format VMDK'",
                    name.escape_debug(),
                    kind.escape_debug()
                );
                return Err(self.source.wrong(medium, text));
            }
        };
        Ok(Content::Image { path: self.source.find(medium, name)?, format: Some(format.to_owned()) })
    }

    fn cards(&self, machine: &mut Foreign, hardware: &Element) -> Result<()> {
        let adapters = hardware.child("Network").into_iter().flat_map(|network| network.all("Adapter"));
        for adapter in adapters.filter(|adapter| adapter.attribute("enabled") == Some("true")) {
            let label = format!("adapter {}", adapter.attribute("slot").unwrap_or("?"));
            let model = models::card(machine, &label, adapter.attribute("type").unwrap_or("Am79C973"));
            let digits = adapter.attribute("MACAddress").unwrap_or_default();
            // Besides the network in use, the file contains the networks that were configured before.
            let network = adapter.children.iter().find(|child| child.name != "DisabledModes");
            let network = network.map_or(String::new(), |it| match it.attribute("name") {
                Some(name) => format!("{} {name}", it.name),
                None => it.name.clone(),
            });
            let connected = adapter.attribute("cable") != Some("false");
            machine.add_card(ForeignCard { label, model, mac: mac(digits), network, connected })?;
        }
        Ok(())
    }
}

/// The registered disk with a UUID, and whether the disk is a difference to another disk.
fn registered(disks: &Element, uuid: Uuid, depth: usize) -> Option<(&Element, bool)> {
    disks.all("HardDisk").find_map(|disk| {
        let same = disk.attribute("uuid").and_then(|text| text.parse().ok()) == Some(uuid);
        let inner = || if depth < DEPTH_MAX { registered(disk, uuid, depth + 1) } else { None };
        if same { Some((disk, depth > 0)) } else { inner() }
    })
}

/// Adds the names of the snapshots in an element.
fn collect_snapshots(element: &Element, depth: usize, names: &mut Vec<String>) {
    let children = element.child("Snapshots").into_iter().flat_map(|it| it.all("Snapshot"));
    for snapshot in element.all("Snapshot").chain(children) {
        names.push(snapshot.attribute("name").unwrap_or_default().to_owned());
        if depth < DEPTH_MAX {
            collect_snapshots(snapshot, depth + 1, names);
        }
    }
}
