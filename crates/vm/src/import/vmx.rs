//! Machines of ESXi, Workstation and Fusion: the configuration (`NAME.vmx`), and the list of snapshots (`NAME.vmsd`).
//!
//! VMware documents only some keys. The other keys were found in files that VMware's programs write.

use super::dictionary::Dictionary;
use super::paths::Permitted;
use super::{Content, Effect, Foreign, ForeignCard, ForeignDisk, ForeignSnapshot, Format, limits, models};
use crate::definition::{Bus, Chipset, Clock, Display, Firmware};
use backend::regular;
use error::{Error, ErrorKind, Result};
use std::path::Path;
use uuid::Uuid;

/// Memory, in MiB, of a machine whose configuration does not name the size.
const MEMORY_DEFAULT: u64 = 32;
/// The first version of virtual hardware whose guests read the first fields of the UUID in little-endian order (SMBIOS
/// 2.7).
const LITTLE_ENDIAN_SINCE: u64 = 13;
/// Why a file of UEFI variables is not used.
const OTHER_FORM: &str = "VMware's file of firmware variables has another format than QEMU's";

/// Parses a configuration, and searches the permitted folders for its files.
pub fn read(path: &Path, bytes: &[u8], permitted: &Permitted) -> Result<Foreign> {
    let file = Dictionary::parse(bytes, &path.display().to_string())?;
    let mut machine = Foreign::new(path, Format::Vmx);
    if file.get("config.version").is_none() && file.get("virtualHW.version").is_none() {
        return Err(machine.invalid("it is no configuration of a machine: virtualHW.version is missing"));
    }
    if file.get("encryption.keySafe").is_some() || file.get("encryption.data").is_some() {
        let text = format!("'{}': the machine is encrypted; decrypt it with VMware first", path.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let system = file.get("guestOS").unwrap_or_default().to_ascii_lowercase();
    if system.starts_with("arm") {
        let text = format!("'{}': its guest is for ARM processors ({system})", path.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    machine.name = file.get("displayName").map_or(stem, str::to_owned);
    machine.uuid = uuid(&file)?;
    machine.cpus = number(&file, "numvcpus", 1)?;
    machine.memory = u64::from(number(&file, "memSize", MEMORY_DEFAULT as u32)?) << 20;
    platform(&mut machine, &file, system.starts_with("win"))?;
    for kind in ["scsi", "sata", "nvme", "ide"] {
        controllers(&mut machine, &file, kind, permitted)?;
    }
    boot_first(&mut machine, file.get("bios.hddOrder"));
    for number in file.numbers("ethernet", "present") {
        card(&mut machine, &file, number)?;
    }
    others(&mut machine, &file);
    let lock = path.with_extension("vmx.lck");
    if lock.exists() {
        let reason =
            "the machine may be running in VMware, and a copy of a running machine is not consistent: shut it down";
        machine.note(format!("'{}'", lock.display()), Effect::Changed, reason);
    }
    // The list of snapshots is optional.
    if let Some(name) = path.with_extension("vmsd").file_name().and_then(|name| name.to_str())
        && path.with_extension("vmsd").exists()
    {
        let list = permitted.find(name)?;
        let bytes = regular::read_resolved(&list, limits::TEXT_MAX, "list of snapshots")?;
        snapshots(&mut machine, &bytes, &list)?;
    }
    Ok(machine)
}

/// A number of at most 32 bits.
fn number(file: &Dictionary, key: &str, default: u32) -> Result<u32> {
    match file.number(key)? {
        None => Ok(default),
        Some(number) => u32::try_from(number).map_err(|_| file.wrong(key, "the number is too large")),
    }
}

fn uuid(file: &Dictionary) -> Result<Option<Uuid>> {
    let Some(text) = file.get("uuid.bios") else { return Ok(None) };
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let plain = text.chars().all(|c| c.is_ascii_hexdigit() || c == ' ' || c == '-');
    let uuid = Uuid::try_parse(&digits).ok().filter(|_| plain && digits.len() == 32);
    let uuid = uuid.ok_or_else(|| file.wrong("uuid.bios", "it is no UUID"))?;
    // VMware stores the bytes in the order of the firmware's table, of which newer guests read the first fields in
    // little-endian order.
    let swapped = file.number("virtualHW.version")?.is_some_and(|version| version >= LITTLE_ENDIAN_SINCE);
    Ok(Some(if swapped { Uuid::from_bytes_le(*uuid.as_bytes()) } else { uuid }))
}

fn platform(machine: &mut Foreign, file: &Dictionary, windows: bool) -> Result<()> {
    let uefi = match file.get("firmware").map(str::to_ascii_lowercase).as_deref() {
        None | Some("bios") => false,
        Some("efi") => true,
        Some(_) => return Err(file.wrong("firmware", "neither bios nor efi")),
    };
    machine.platform.firmware = if uefi { Firmware::Uefi } else { Firmware::Bios };
    // VMware's machines with BIOS have an Intel 440BX.
    machine.platform.chipset = if uefi { Chipset::Q35 } else { Chipset::I440fx };
    machine.platform.secure_boot = uefi && file.is_true("uefi.secureBoot.enabled");
    machine.platform.clock = if windows { Clock::Local } else { Clock::Utc };
    machine.platform.display = Display::Vga;
    let cores = number(file, "cpuid.coresPerSocket", 1)?;
    models::cores(machine, "cpuid.coresPerSocket", cores);
    if let Some(nvram) = file.get("nvram").map(str::to_owned) {
        let then = if uefi {
            "the machine gets new ones, and starts \\EFI\\BOOT\\BOOTX64.EFI of its first disk"
        } else {
            "the settings of the BIOS are the defaults"
        };
        machine.note(format!("nvram '{nvram}'"), Effect::Changed, format!("{OTHER_FORM}: {then}"));
    }
    if file.get("checkpoint.vmState").is_some() {
        let reason = "the machine is suspended in VMware; in lamina it boots, and finds its disks as after a power cut";
        machine.note("checkpoint.vmState", Effect::LeftOut, reason);
    }
    Ok(())
}

/// Reads the controllers of a kind with their disks.
fn controllers(machine: &mut Foreign, file: &Dictionary, kind: &str, permitted: &Permitted) -> Result<()> {
    let numbers = match kind {
        // The chipset has two IDE channels, and both always exist.
        "ide" => vec![0, 1],
        _ => file.numbers(kind, "present"),
    };
    let mut ide = None;
    for number in numbers {
        let label = format!("{kind}{number}");
        if kind != "ide" && !file.is_true(&format!("{label}.present")) {
            continue;
        }
        let units = file.numbers(&format!("{label}:"), "present");
        let mut controller = ide;
        for unit in units {
            let device = format!("{label}:{unit}");
            if !file.is_true(&format!("{device}.present")) {
                continue;
            }
            let Some(content) = disk(machine, file, &device, permitted)? else { continue };
            let index = match controller {
                Some(index) => index,
                None => {
                    let bus = bus(machine, file, kind, &label)?;
                    let label = if kind == "ide" { "ide".to_owned() } else { label.clone() };
                    machine.add_controller(label, bus)?
                }
            };
            controller = Some(index);
            if kind == "ide" {
                ide = controller;
            }
            let unit = if kind == "ide" { number * 2 + unit.min(1) } else { unit };
            machine.add_disk(ForeignDisk { label: device, controller: index, unit, content, stated: None })?;
        }
    }
    Ok(())
}

fn bus(machine: &mut Foreign, file: &Dictionary, kind: &str, label: &str) -> Result<Bus> {
    let key = format!("{label}.virtualDev");
    let model = file.get(&key).map(str::to_ascii_lowercase);
    Ok(match (kind, model.as_deref()) {
        ("ide", _) => Bus::Ide,
        ("sata", _) => Bus::Sata,
        ("nvme", _) => Bus::Nvme,
        (_, Some("pvscsi")) => Bus::Pvscsi,
        (_, Some("lsisas1068")) => Bus::Lsisas,
        (_, Some("lsilogic") | None) => models::lsi_logic(machine, label),
        (_, Some("buslogic")) => models::bus_logic(machine, label),
        (_, Some(other)) => {
            let text = format!("'{}' is no controller that can be mapped", other.escape_debug());
            return Err(file.wrong(&key, &text));
        }
    })
}

/// The content of a disk; `None` if the device is not a disk.
fn disk(machine: &mut Foreign, file: &Dictionary, device: &str, permitted: &Permitted) -> Result<Option<Content>> {
    let key = format!("{device}.fileName");
    let name = file.get(&key).unwrap_or_default();
    let kind = file.get(&format!("{device}.deviceType")).unwrap_or_default().to_ascii_lowercase();
    let is_cd = kind.contains("cdrom") || (kind.is_empty() && name.to_ascii_lowercase().ends_with(".iso"));
    if is_cd {
        models::removable(machine, device, "cdrom", Some(name).filter(|name| !name.is_empty()));
        return Ok(None);
    }
    if !["", "disk", "harddisk", "scsi-harddisk", "ata-harddisk", "nvme-harddisk"].contains(&&*kind) {
        let text = format!("a device of the kind '{}' cannot be mapped", kind.escape_debug());
        return Err(file.wrong(&format!("{device}.deviceType"), &text));
    }
    if name.is_empty() {
        return Err(file.wrong(&format!("{device}.present"), "the device has no file"));
    }
    match file.get(&format!("{device}.mode")).map(str::to_ascii_lowercase).as_deref() {
        Some("independent-nonpersistent" | "nonpersistent" | "undoable") => {
            machine.note(
                device,
                Effect::Changed,
                "VMware discards the writes to this disk at power-off; in lamina they stay",
            );
        }
        Some("independent-persistent") => {
            machine.note(device, Effect::Changed, "VMware's snapshots do not include the disk; lamina's do");
        }
        _ => {}
    }
    let controller = device.split(':').next().unwrap_or(device);
    let is = |key: String, shared: &str| file.get(&key).is_some_and(|value| value.eq_ignore_ascii_case(shared));
    let shared_bus = ["virtual", "physical"].into_iter().any(|how| is(format!("{controller}.sharedBus"), how));
    if shared_bus || is(format!("{device}.sharing"), "multi-writer") {
        let reason = "several machines of VMware can use the disk at the same time; in lamina only one machine can";
        machine.note(device, Effect::Changed, reason);
    }
    let path = permitted
        .find(name)
        .map_err(|error| Error::new(error.kind(), file.wrong(&key, &error.to_string()).to_string()))?;
    Ok(Some(Content::Image { path, format: Some("vmdk".into()) }))
}

/// Moves the disk from which VMware boots to the front.
fn boot_first(machine: &mut Foreign, order: Option<&str>) {
    let Some(first) = order.and_then(|order| order.split(',').next()).map(str::trim) else { return };
    if let Some(index) = machine.disks.iter().position(|disk| disk.label.eq_ignore_ascii_case(first)) {
        let disk = machine.disks.remove(index);
        machine.disks.insert(0, disk);
    }
}

fn card(machine: &mut Foreign, file: &Dictionary, number: u32) -> Result<()> {
    let label = format!("ethernet{number}");
    let get = |name: &str| file.get(&format!("{label}.{name}"));
    if !file.is_true(&format!("{label}.present")) {
        return Ok(());
    }
    let model = get("virtualDev").map(str::to_ascii_lowercase);
    let model = models::card(machine, &label, model.as_deref().unwrap_or("flexible"));
    let is_static = get("addressType").is_some_and(|kind| kind.eq_ignore_ascii_case("static"));
    let address = match is_static {
        true => get("address"),
        false => get("generatedAddress").or(get("address")),
    };
    let mac = address.and_then(|text| text.to_ascii_lowercase().replace('-', ":").parse().ok());
    if let (Some(text), None) = (address, mac) {
        machine.note(
            &*label,
            Effect::Changed,
            format!("'{}' is no address of a card; the card gets a new one", text.escape_debug()),
        );
    }
    let network = get("networkName").or(get("vnet")).or(get("connectionType")).unwrap_or("bridged").to_owned();
    let connected = get("startConnected").is_none_or(|value| !value.eq_ignore_ascii_case("FALSE"));
    machine.add_card(ForeignCard { label, model, mac, network, connected })
}

/// Adds notes on devices that lamina's machines do not have.
fn others(machine: &mut Foreign, file: &Dictionary) {
    let several = [
        ("floppy", "machines have no floppy drives"),
        ("serial", "machines have one serial port, which is their console"),
        ("parallel", "machines have no parallel ports"),
        ("pciPassthru", "devices of the host cannot be passed to machines"),
        ("sharedFolder", "folders of the host cannot be shared with machines"),
    ];
    for (prefix, reason) in several {
        for number in file.numbers(prefix, "present") {
            let label = format!("{prefix}{number}");
            if file.is_true(&format!("{label}.present")) {
                machine.note(label, Effect::LeftOut, reason);
            }
        }
    }
    let single = [
        ("sound.present", "machines have no sound card"),
        ("usb.present", "machines have no USB; keyboard and mouse are PS/2"),
        ("ehci.present", "machines have no USB; keyboard and mouse are PS/2"),
        ("usb_xhci.present", "machines have no USB; keyboard and mouse are PS/2"),
        ("vmci0.present", "only VMware has this device"),
        (
            "vtpm.present",
            "machines have no TPM. Data that is sealed with a TPM cannot be opened: have BitLocker's key ready",
        ),
        ("vhv.enable", "nested virtualization depends on the host"),
    ];
    for (key, reason) in single {
        if file.is_true(key) {
            machine.note(key.split('.').next().unwrap_or(key), Effect::LeftOut, reason);
        }
    }
}

/// Reads a list of snapshots.
fn snapshots(machine: &mut Foreign, bytes: &[u8], path: &Path) -> Result<()> {
    let list = Dictionary::parse(bytes, &path.display().to_string())?;
    let count = number(&list, "snapshot.numSnapshots", 0)?;
    if count as usize > limits::SNAPSHOTS_MAX {
        return Err(list.wrong("snapshot.numSnapshots", "there are too many snapshots"));
    }
    for index in 0..count {
        let key = |name: &str| format!("snapshot{index}.{name}");
        // Old lists have gaps where entries were deleted.
        if list.get(&key("uid")).is_none() {
            continue;
        }
        let half = |name: &str| -> Result<u64> {
            let Some(text) = list.get(&key(name)) else { return Ok(0) };
            let value: i64 = text.parse().map_err(|_| list.wrong(&key(name), "it is no number"))?;
            Ok(u64::from(value as u32))
        };
        let micros = half("createTimeHigh")? << 32 | half("createTimeLow")?;
        let disks = number(&list, &key("numDisks"), 0)?.min(limits::DISKS_MAX as u32);
        let disks = (0..disks).filter_map(|disk| list.get(&key(&format!("disk{disk}.node"))).map(str::to_owned));
        let disks = disks.collect();
        let name = list.get(&key("displayName")).map_or_else(|| format!("snapshot-{index}"), str::to_owned);
        if let Some(state) = list.get(&key("filename")).filter(|_| list.get(&key("type")) == Some("1")) {
            let reason =
                format!("'{state}' may hold the guest's memory, which QEMU cannot load; its disks are imported");
            machine.note(format!("snapshot '{name}'"), Effect::Changed, reason);
        }
        machine.snapshots.push(ForeignSnapshot { name, created: micros / 1_000_000, disks });
    }
    Ok(())
}
