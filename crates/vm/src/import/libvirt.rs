//! Domains of libvirt, in the XML that `virsh dumpxml` prints.
//!
//! libvirt names disks by absolute paths, usually in another folder than the XML. The user has to permit that folder
//! with `--allow-folder`, because the XML may come from another host.

use super::paths::Permitted;
use super::xml_source::XmlSource;
use super::{Content, Effect, Foreign, ForeignCard, ForeignDisk, Format, models};
use crate::definition::{Boot, Bus, Chipset, Clock, Display, Firmware};
use error::{Error, Result};
use ovf::xml::{self, Element};
use std::collections::BTreeMap;
use std::path::Path;

/// Devices that the import leaves out and reports in notes, each with the reason.
const LEFT_OUT: [(&str, &str); 12] = [
    ("hostdev", "devices of the host cannot be passed to machines"),
    ("filesystem", "folders of the host cannot be shared with machines"),
    ("tpm", "machines have no TPM. Data that is sealed with a TPM cannot be opened"),
    ("sound", "machines have no sound card"),
    ("parallel", "machines have no parallel ports"),
    ("smartcard", "machines have no smart cards"),
    ("redirdev", "machines have no USB"),
    ("watchdog", "machines have no watchdog"),
    ("shmem", "machines have no shared memory"),
    ("vsock", "machines have no vsock"),
    ("panic", "machines have no panic device"),
    ("crypto", "machines have no crypto device"),
];

/// Properties of domains that machines do not have.
const OF_DOMAINS: [(&str, &str); 4] = [
    ("cputune", "the processors are neither pinned nor limited"),
    ("numatune", "the memory is not bound to nodes of the host"),
    ("memtune", "only 'lamina vm edit --qemu-memory' limits the memory of QEMU"),
    ("blkiotune", "the I/O of the disks is not limited"),
];

/// Properties of disks that the disks of machines do not have.
const OF_DISKS: [(&str, &str); 6] = [
    ("iotune", "the I/O of the disk is not limited"),
    ("readonly", "the guest can write to the disk"),
    ("shareable", "only one machine can have the disk"),
    ("transient", "writes to the disk stay"),
    ("serial", "the disk has no serial number, by which the guest may find it in /dev/disk/by-id"),
    ("wwn", "the disk has no world wide name, by which the guest may find it in /dev/disk/by-id"),
];

/// Properties of network cards that the cards of machines do not have.
const OF_CARDS: [(&str, &str); 3] = [
    ("vlan", "frames of the card get no VLAN tag: give the machine a bridge of that VLAN"),
    ("filterref", "packets of the card are not filtered"),
    ("bandwidth", "the bandwidth of the card is not limited"),
];

/// Parses the XML of a domain, and searches the permitted folders for its files.
pub fn read(path: &Path, bytes: &[u8], permitted: &Permitted) -> Result<Foreign> {
    let root = xml::parse(bytes, &path.display().to_string())?;
    let reader = Reader { source: XmlSource { path, permitted } };
    // In the XML of a snapshot or a backup, the element `domain` is inside another one.
    let domain = if root.name == "domain" { Some(&root) } else { root.child("domain") };
    let domain = domain.ok_or_else(|| reader.source.wrong(&root, "it is no domain of libvirt"))?;
    reader.domain(domain)
}

struct Reader<'a> {
    source: XmlSource<'a>,
}

impl Reader<'_> {
    fn domain(&self, domain: &Element) -> Result<Foreign> {
        let mut machine = Foreign::new(self.source.path, Format::Libvirt);
        let stem = self.source.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        machine.name = domain.text_of("name").map_or(stem, str::to_owned);
        machine.uuid = match domain.text_of("uuid") {
            Some(text) => Some(text.parse().map_err(|_| self.source.wrong(domain, "its uuid cannot be read"))?),
            None => None,
        };
        let cpus = domain.child("vcpu");
        let count = cpus.map_or("1", |it| it.attribute("current").unwrap_or(&it.text));
        machine.cpus =
            count.parse().map_err(|_| self.source.wrong(domain, "its number of processors cannot be read"))?;
        let memory = domain.child("memory").ok_or_else(|| self.source.wrong(domain, "it has no memory"))?;
        let unit = unit(memory.attribute("unit").unwrap_or("KiB"));
        let bytes = memory.text.parse::<u64>().ok().zip(unit).and_then(|(count, unit)| count.checked_mul(unit));
        // The memory of machines is a multiple of 1 MiB, so the size is rounded up.
        let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(1 << 20));
        machine.memory = bytes.ok_or_else(|| self.source.wrong(memory, "the amount of memory cannot be read"))?;
        topology(&mut machine, domain);
        processors(&mut machine, domain);
        self.firmware(&mut machine, domain)?;
        let devices = domain.child("devices").ok_or_else(|| self.source.wrong(domain, "it has no devices"))?;
        let model = |video: &Element| video.child("model").and_then(|it| it.attribute("type")).map(str::to_owned);
        if devices.all("video").any(|video| model(video).as_deref() != Some("none")) {
            machine.platform.display = Display::Vga;
        }
        self.disks(&mut machine, devices)?;
        self.cards(&mut machine, devices)?;
        for (name, reason) in LEFT_OUT {
            for device in devices.all(name) {
                let kind = device.attribute("model").or(device.attribute("type")).unwrap_or_default();
                machine.note(format!("{name} {kind}").trim(), Effect::LeftOut, reason);
            }
        }
        for (name, reason) in OF_DOMAINS.iter().filter(|(name, _)| domain.child(name).is_some()) {
            machine.note(*name, Effect::LeftOut, *reason);
        }
        if domain.child("commandline").is_some() {
            let reason = "'lamina vm edit --qemu-arg' adds arguments of QEMU";
            machine.note("commandline", Effect::LeftOut, reason);
        }
        for serial in devices.all("serial").skip(1) {
            let reason = "machines have one serial port, which is their console";
            machine.note(format!("serial, line {}", serial.line), Effect::LeftOut, reason);
        }
        Ok(machine)
    }

    fn firmware(&self, machine: &mut Foreign, domain: &Element) -> Result<()> {
        let Some(os) = domain.child("os") else { return Err(self.source.wrong(domain, "it has no <os>")) };
        let kind = os.child("type");
        let arch = kind.and_then(|it| it.attribute("arch")).unwrap_or("x86_64");
        if kind.is_none_or(|it| it.text != "hvm") || !["x86_64", "i686"].contains(&arch) {
            return Err(self
                .source
                .wrong(os, format!("only full virtualization of x86 can be imported, not '{arch}'")));
        }
        let board = kind.and_then(|it| it.attribute("machine")).unwrap_or("pc");
        machine.platform.chipset = if board.contains("q35") { Chipset::Q35 } else { Chipset::I440fx };
        let loader = os.child("loader");
        let uefi =
            os.attribute("firmware") == Some("efi") || loader.is_some_and(|it| it.attribute("type") == Some("pflash"));
        if uefi {
            machine.platform.firmware = Firmware::Uefi;
            let mut features = os.child("firmware").into_iter().flat_map(|it| it.all("feature"));
            let enrolled = features
                .any(|it| it.attribute("name") == Some("enrolled-keys") && it.attribute("enabled") == Some("yes"));
            let secure = loader.is_some_and(|it| it.attribute("secure") == Some("yes"));
            // A firmware build that can check signatures does so only if keys are enrolled. If the domain has a file of
            // variables, that file decides.
            machine.platform.secure_boot = secure && (enrolled || os.attribute("firmware").is_none());
            self.variables(machine, os)?;
        }
        if let Some(kernel) = os.text_of("kernel") {
            let initrd = os.text_of("initrd").map(|name| self.source.find(os, name)).transpose()?;
            let append = os.text_of("cmdline").unwrap_or_default().to_owned();
            machine.boot = Some(Boot { kernel: self.source.find(os, kernel)?, initrd, append });
        }
        machine.platform.clock = match domain.child("clock").and_then(|it| it.attribute("offset")) {
            Some("localtime") => Clock::Local,
            Some("timezone" | "variable" | "absolute") => {
                machine.note("clock", Effect::Changed, "the offset is not kept; the clock shows UTC");
                Clock::Utc
            }
            _ => Clock::Utc,
        };
        Ok(())
    }

    /// Finds the file with the UEFI variables.
    fn variables(&self, machine: &mut Foreign, os: &Element) -> Result<()> {
        let Some(nvram) = os.child("nvram") else { return Ok(()) };
        let name = nvram.child("source").and_then(|it| it.attribute("file")).unwrap_or(&nvram.text);
        if name.is_empty() {
            return Ok(());
        }
        if nvram.attribute("format").is_some_and(|format| format != "raw") {
            let reason = "the UEFI variables are not in a raw file; the machine gets new variables";
            machine.note(format!("nvram '{name}'"), Effect::Changed, reason);
            return Ok(());
        }
        machine.nvram = Some(self.source.find(nvram, name)?);
        Ok(())
    }

    fn disks(&self, machine: &mut Foreign, devices: &Element) -> Result<()> {
        let mut controllers: BTreeMap<(Bus, u32), usize> = BTreeMap::new();
        let mut ordered: Vec<(u32, ForeignDisk)> = Vec::new();
        for disk in devices.all("disk") {
            let target = disk.child("target").ok_or_else(|| self.source.wrong(disk, "a disk has no target"))?;
            let label = target.attribute("dev").unwrap_or("disk").to_owned();
            match disk.attribute("device").unwrap_or("disk") {
                "disk" => {}
                kind @ ("cdrom" | "floppy") => {
                    let image = disk.child("source").and_then(|it| it.attribute("file"));
                    models::removable(machine, &label, kind, image);
                    continue;
                }
                kind => {
                    let text = format!("disk '{label}' of the kind '{}' cannot be mapped", kind.escape_debug());
                    return Err(self.source.wrong(disk, text));
                }
            }
            let content = self.content(disk, &label)?;
            properties(machine, &label, disk, &OF_DISKS);
            let block = disk.child("blockio").and_then(|it| it.attribute("logical_block_size"));
            if let Some(size) = block.filter(|size| *size != "512") {
                let reason = format!(
                    "its logical blocks of {} bytes are blocks of 512 bytes here: a guest may not find its partitions",
                    size.escape_debug()
                );
                machine.note(&*label, Effect::Changed, reason);
            }
            let address = |name: &str| {
                disk.child("address").and_then(|it| it.attribute(name)).and_then(|text| text.parse::<u32>().ok())
            };
            let number = number_of(&label);
            let (bus, controller, unit) = match target.attribute("bus").unwrap_or("ide") {
                "virtio" => (Bus::Virtio, number, 0),
                "ide" => {
                    let unit = address("bus").unwrap_or(number / 2) * 2 + address("unit").unwrap_or(number % 2);
                    (Bus::Ide, 0, unit)
                }
                "sata" => {
                    (Bus::Sata, address("controller").unwrap_or(number / 6), address("unit").unwrap_or(number % 6))
                }
                "scsi" => {
                    let controller = address("controller").unwrap_or(number / 7);
                    let unit = address("target").filter(|target| *target > 0).or(address("unit")).unwrap_or(number % 7);
                    (self.scsi(machine, devices, controller, &controllers)?, controller, unit)
                }
                "nvme" => (Bus::Nvme, address("controller").unwrap_or(0), address("unit").unwrap_or(number)),
                other => {
                    let reason =
                        format!("there is no bus '{}'; the disk is on a SATA controller", other.escape_debug());
                    machine.note(&*label, Effect::Replaced, reason);
                    (Bus::Sata, u32::MAX, number % 6)
                }
            };
            let index = match controllers.get(&(bus, controller)) {
                Some(index) => *index,
                None => {
                    let index = machine.add_controller(format!("{} {controller}", bus.name()), bus)?;
                    controllers.insert((bus, controller), index);
                    index
                }
            };
            let order = disk.child("boot").and_then(|it| it.attribute("order")?.parse().ok()).unwrap_or(u32::MAX);
            ordered.push((order, ForeignDisk { label, controller: index, unit, content, stated: None }));
        }
        ordered.sort_by_key(|(order, _)| *order);
        ordered.into_iter().try_for_each(|(_, disk)| machine.add_disk(disk))
    }

    /// The model of a SCSI controller.
    fn scsi(
        &self,
        machine: &mut Foreign,
        devices: &Element,
        index: u32,
        known: &BTreeMap<(Bus, u32), usize>,
    ) -> Result<Bus> {
        let scsi = devices.all("controller").filter(|it| it.attribute("type") == Some("scsi"));
        let number = |it: &Element| it.attribute("index").and_then(|text| text.parse::<u32>().ok()).unwrap_or(0);
        let controller = scsi.into_iter().find(|it| number(it) == index);
        let model = controller.and_then(|it| it.attribute("model")).unwrap_or("lsilogic");
        let label = format!("scsi {index}");
        Ok(match model {
            "virtio-scsi" | "virtio-transitional" | "virtio-non-transitional" => Bus::VirtioScsi,
            "vmpvscsi" => Bus::Pvscsi,
            "lsisas1068" => Bus::Lsisas,
            // The controller that QEMU names lsi is called lsilogic by libvirt.
            "lsilogic" | "auto" => Bus::Lsi,
            "buslogic" if known.contains_key(&(Bus::Lsi, index)) => Bus::Lsi,
            "buslogic" => models::bus_logic(machine, &label),
            other => {
                if !known.contains_key(&(Bus::Sata, index)) {
                    let reason =
                        format!("'{}' cannot be mapped; a SATA controller takes its place", other.escape_debug());
                    machine.note(label, Effect::Replaced, reason);
                }
                Bus::Sata
            }
        })
    }

    fn content(&self, disk: &Element, label: &str) -> Result<Content> {
        let source = disk.child("source");
        let place = |name: &str| source.and_then(|it| it.attribute(name));
        let (kind, name) = match disk.attribute("type").unwrap_or("file") {
            "file" => ("file", place("file")),
            "block" => ("dev", place("dev")),
            other => {
                let text = format!(
                    "disk '{label}' is of the type '{}', which cannot be read: copy the disk into a file, and name \
                     the file in the XML",
                    other.escape_debug()
                );
                return Err(self.source.wrong(disk, text));
            }
        };
        let name = name.ok_or_else(|| self.source.wrong(disk, format!("disk '{label}' has no source {kind}")))?;
        let format = disk.child("driver").and_then(|it| it.attribute("type")).unwrap_or("raw");
        // The file contains other bytes than the guest's disk, and nothing in a raw file shows that.
        if let Some(encryption) = disk.child("encryption").or_else(|| source.and_then(|it| it.child("encryption"))) {
            let text = format!(
                "disk '{label}' is encrypted: decrypt it with 'qemu-img convert' into another file, name that in the XML, and \
                 remove <encryption>"
            );
            return Err(self.source.wrong(encryption, text));
        }
        if let Some(slices) = source.and_then(|it| it.child("slices")) {
            let text = format!(
                "disk '{label}' is a slice of its file: copy the slice into a file, name that in the XML, and remove <slices>"
            );
            return Err(self.source.wrong(slices, text));
        }
        if !["raw", "qcow2", "vmdk"].contains(&format) {
            let text = format!("disk '{label}' has the format '{}', which cannot be read", format.escape_debug());
            return Err(self.source.wrong(disk, text));
        }
        Ok(Content::Image { path: self.source.find(disk, name)?, format: Some(format.to_owned()) })
    }

    fn cards(&self, machine: &mut Foreign, devices: &Element) -> Result<()> {
        for (index, interface) in devices.all("interface").enumerate() {
            let label = format!("card {}", index + 1);
            let model = interface.child("model").and_then(|it| it.attribute("type")).unwrap_or("rtl8139");
            let model = models::card(machine, &label, model);
            properties(machine, &label, interface, &OF_CARDS);
            let mac = interface.child("mac").and_then(|it| it.attribute("address"));
            let mac = mac.map(|text| text.to_ascii_lowercase().parse()).transpose();
            let mac = mac.map_err(|error: Error| self.source.wrong(interface, error))?;
            let source = interface.child("source");
            let place = |name: &str| source.and_then(|it| it.attribute(name)).map(|value| format!("{name} {value}"));
            let network = place("bridge").or(place("network")).or(place("dev"));
            let network = network.unwrap_or_else(|| interface.attribute("type").unwrap_or_default().to_owned());
            let connected = interface.child("link").and_then(|it| it.attribute("state")) != Some("down");
            machine.add_card(ForeignCard { label, model, mac, network, connected })?;
        }
        Ok(())
    }
}

/// The number of a disk, from its name: 1 for `vdb`.
fn number_of(name: &str) -> u32 {
    let letters = name.trim_start_matches(|c: char| c != 'd').strip_prefix('d').unwrap_or_default();
    let letters = letters.trim_end_matches(|c: char| c.is_ascii_digit());
    let mut number: u32 = 0;
    for letter in letters.bytes().filter(u8::is_ascii_lowercase).take(3) {
        number = number * 26 + u32::from(letter - b'a') + 1;
    }
    number.saturating_sub(1)
}

/// Adds a note for each property that a device has in the source only.
fn properties(machine: &mut Foreign, label: &str, device: &Element, lost: &[(&str, &str)]) {
    for (name, reason) in lost.iter().filter(|(name, _)| device.child(name).is_some()) {
        machine.note(label, Effect::Changed, format!("it has <{name}> in the source; here {reason}"));
    }
}

/// Reads the sockets of the processors. Threads, dies and clusters become cores, so that the guest has as many sockets
/// as before: an operating system may use only some of them.
fn topology(machine: &mut Foreign, domain: &Element) {
    let Some(topology) = domain.at(&["cpu", "topology"]) else { return };
    let count = |name: &str| topology.attribute(name).and_then(|text| text.parse::<u32>().ok()).unwrap_or(1);
    let parts = ["cores", "threads", "dies", "clusters"].map(count);
    let cores = parts.iter().try_fold(1u32, |product, part| product.checked_mul(*part)).unwrap_or(0);
    models::cores(machine, "cpu topology", cores);
    if machine.platform.cores.is_some_and(|cores| cores != parts[0]) {
        let reason = format!("a socket has {cores} cores, without threads, dies and clusters");
        machine.note("cpu topology", Effect::Changed, reason);
    }
}

/// Adds notes on properties of the CPUs that the machine does not have.
fn processors(machine: &mut Foreign, domain: &Element) {
    if let Some(model) = domain.child("cpu").and_then(|cpu| cpu.text_of("model")) {
        let features = domain.child("cpu").into_iter().flat_map(|cpu| cpu.all("feature"));
        let features = features.filter_map(|feature| {
            let sign = match feature.attribute("policy") {
                Some("disable" | "forbid") => '-',
                _ => '+',
            };
            Some(format!(",{sign}{}", feature.attribute("name")?))
        });
        let model: String = std::iter::once(model.to_owned()).chain(features).collect();
        let reason = format!(
            "the guest has all features of this host's CPU; 'lamina vm edit --cpu-model {}' restricts the guest to the \
             features of the source's CPU",
            model.escape_debug()
        );
        machine.note("cpu", Effect::Changed, reason);
    }
    if domain.at(&["features", "hyperv"]).is_some() {
        let reason = "Windows runs slower without the interfaces of Hyper-V; 'lamina vm edit --cpu-model \
                      max,hv_relaxed,hv_vapic,hv_spinlocks=0x1fff,hv_time' adds the usual interfaces";
        machine.note("hyperv", Effect::LeftOut, reason);
    }
}

/// The number of bytes of a unit in libvirt's XML.
fn unit(text: &str) -> Option<u64> {
    Some(match text {
        "b" | "bytes" => 1,
        "KB" => 1000,
        "k" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_numbered_by_their_letters() {
        assert_eq!(["vda", "hdb", "sdz", "sdaa", "vdb1", "x", ""].map(number_of), [0, 1, 25, 26, 1, 0, 0]);
        assert_eq!((unit("KiB"), unit("GB"), unit("?")), (Some(1024), Some(1_000_000_000), None));
    }
}
