//! QEMU's command line for a machine.
//!
//! A saved state can be loaded only into a machine whose devices have the same addresses. So every device has a fixed
//! address, from this module or from the definition, and QEMU assigns none:
//!
//! ```text
//! pcie.0  4   serial port of the guest agent           8..15   disks
//!         5   random number device                     16..19  network cards
//!                                                      24      ports, for devices that are added while it runs
//! ```
//!
//! In QEMU's options a comma separates values and is doubled within a value. Disks are passed as JSON, in which commas
//! need no doubling.

use super::features::Features;
use crate::definition::{Definition, Disk, FIRST_PORT, Link, Network};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Slot of the serial bus with the guest agent's port.
const SERIAL_SLOT: u8 = 4;
/// Slot of the ports.
const PORTS_SLOT: u8 = 24;
/// Slot of the random number device.
const RANDOM_SLOT: u8 = 5;
/// Seconds after which the guest's requests fail if the server of a disk is unreachable; until then they wait, so that
/// the server can be restarted.
const RECONNECT_SECONDS: u32 = 300;

/// The memory of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Anonymous memory of the process.
    Private,
    /// A shared file that the guest writes: a frozen parent leaves it to its clones.
    Shared(PathBuf),
    /// A private mapping of a file, as for clones.
    CopyOnWrite(PathBuf),
}

/// Paths of the sockets and logs of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder(pub PathBuf);

impl RunFolder {
    /// Socket of QEMU's monitor.
    pub fn monitor(&self) -> PathBuf {
        self.0.join("qmp.sock")
    }

    /// Socket of the guest's console, which is its first serial port.
    pub fn console(&self) -> PathBuf {
        self.0.join("console.sock")
    }

    /// Log of the guest's console output.
    pub fn console_log(&self) -> PathBuf {
        self.0.join("console.log")
    }

    /// Socket of the guest's agent.
    pub fn agent(&self) -> PathBuf {
        self.0.join("agent.sock")
    }

    /// The file that QEMU keeps locked while it runs.
    pub fn pid_file(&self) -> PathBuf {
        self.0.join("pid")
    }

    /// Log of QEMU's error output.
    pub fn errors(&self) -> PathBuf {
        self.0.join("qemu.log")
    }
}

/// Parameters of the command line.
pub struct Machine<'a> {
    /// The definition of the machine.
    pub definition: &'a Definition,
    /// Its memory.
    pub memory: Memory,
    /// Its run folder.
    pub run: &'a RunFolder,
    /// The NBD server of its disks.
    pub nbd: &'a Path,
    /// Whether QEMU waits for a saved state to be loaded.
    pub incoming: bool,
}

/// The block node of a disk. Before 0.2.0, the number was the index of the disk, which is below any slot.
pub fn disk_node(disk: &Disk) -> String {
    format!("disk{}", disk.slot)
}

/// The device of a disk.
pub fn disk_device(disk: &Disk) -> String {
    format!("vd{}", disk.slot)
}

/// The network backend of a card.
pub fn network_node(network: &Network) -> String {
    format!("net{}", network.slot)
}

/// The device of a network card.
pub fn network_device(network: &Network) -> String {
    format!("nic{}", network.slot)
}

/// A hub without another port, so that the card is not connected.
pub fn hub(network: &Network) -> u32 {
    1000 + u32::from(network.slot)
}

/// The bus, or the address on the root bus, of a device with this slot.
pub fn place(slot: u8) -> Value {
    match slot.checked_sub(FIRST_PORT) {
        Some(port) => json!({ "bus": format!("port{port}") }),
        None => json!({ "addr": format!("{slot:x}.0") }),
    }
}

/// The same in a command line.
fn place_text(slot: u8) -> String {
    match slot.checked_sub(FIRST_PORT) {
        Some(port) => format!("bus=port{port}"),
        None => format!("addr={slot:x}.0"),
    }
}

/// The address of a device with this slot, or of the port that it is in, in the guest.
pub fn pci_address(slot: u8) -> String {
    match slot.checked_sub(FIRST_PORT) {
        Some(port) => format!("0000:00:{PORTS_SLOT:02x}.{port}"),
        None => format!("0000:00:{slot:02x}.0"),
    }
}

/// The block node of an export.
pub fn block_node(node: &str, export: &str, nbd: &Path) -> Value {
    json!({
        "driver": "nbd", "node-name": node, "export": export, "discard": "unmap",
        "reconnect-delay": RECONNECT_SECONDS, "server": { "type": "unix", "path": nbd },
    })
}

/// A value with its commas doubled.
fn value(text: impl AsRef<Path>) -> String {
    text.as_ref().display().to_string().replace(',', ",,")
}

/// The arguments, without the program's name.
pub fn arguments(machine: &Machine<'_>, features: &Features) -> Vec<OsString> {
    let Machine { definition, run, .. } = machine;
    let mut all: Vec<String> = Vec::new();
    let mut add = |option: &str, argument: String| all.extend([option.to_owned(), argument]);
    add("-name", format!("{0},process=lamina-{0}", definition.name));
    add("-uuid", definition.uuid.to_string());
    add("-machine", "q35,memory-backend=memory,vmport=off".into());
    match features.accelerator {
        super::features::Accelerator::Kvm => {
            add("-accel", "kvm".into());
            add("-cpu", "host".into());
        }
        super::features::Accelerator::Tcg => {
            // Each process allocates its whole translation buffer. 32 MiB are sufficient and affordable for a hundred
            // clones.
            add("-accel", "tcg,tb-size=32".into());
            add("-cpu", "max".into());
        }
    }
    add("-smp", definition.cpus.to_string());
    add("-m", format!("{}M", definition.memory >> 20));
    add("-object", memory(machine, features));
    // Makes a state begin with its devices, whichever way it was saved (see `instant::state`).
    add("-global", "migration.send-configuration=off".into());
    // Notifies a guest's kernel that has a driver for it that the guest is a copy, so that it reseeds its random number
    // generator.
    add("-device", "vmgenid,guid=auto".into());
    add("-display", "none".into());
    add("-pidfile", run.pid_file().display().to_string());
    add("-qmp", format!("unix:{},server=on,wait=off", value(run.monitor())));
    add(
        "-chardev",
        format!(
            "socket,id=console,path={},server=on,wait=off,logfile={},logappend=on",
            value(run.console()),
            value(run.console_log())
        ),
    );
    add("-serial", "chardev:console".into());
    add("-device", format!("virtio-serial-pci,id=serial,addr={SERIAL_SLOT:x}.0"));
    add("-chardev", format!("socket,id=agent,path={},server=on,wait=off", value(run.agent())));
    add("-device", "virtserialport,bus=serial.0,nr=1,chardev=agent,name=org.qemu.guest_agent.0".into());
    add("-device", format!("virtio-rng-pci,id=random,addr={RANDOM_SLOT:x}.0"));
    if let Some(boot) = &definition.boot {
        add("-kernel", boot.kernel.display().to_string());
        if let Some(initrd) = &boot.initrd {
            add("-initrd", initrd.display().to_string());
        }
        if !boot.append.is_empty() {
            add("-append", boot.append.clone());
        }
    }
    for port in 0..definition.ports {
        let chassis = port + 1;
        add(
            "-device",
            format!("pcie-root-port,id=port{port},addr={PORTS_SLOT:x}.{port},multifunction=on,chassis={chassis}"),
        );
    }
    for (index, disk) in definition.disks.iter().enumerate() {
        let (node, place) = (disk_node(disk), place_text(disk.slot));
        add("-blockdev", block_node(&node, &disk.name, machine.nbd).to_string());
        let boots = if index == 0 && definition.boot.is_none() { ",bootindex=0" } else { "" };
        add("-device", format!("virtio-blk-pci,id={},drive={node},{place},write-cache=on{boots}", disk_device(disk)));
    }
    for network in &definition.networks {
        let (net, place) = (network_node(network), place_text(network.slot));
        let backend = match &network.link {
            Link::User => format!("user,id={net}"),
            Link::Bridge(bridge) => format!("bridge,id={net},br={}", value(bridge)),
            Link::None => format!("hubport,id={net},hubid={}", hub(network)),
        };
        add("-netdev", backend);
        let card = network_device(network);
        add("-device", format!("virtio-net-pci,id={card},netdev={net},mac={},{place},romfile=", network.mac));
    }
    if machine.incoming {
        add("-incoming", "defer".into());
    }
    // The guest is paused until this process has become the machine's current one.
    all.extend(["-S", "-nodefaults", "-no-user-config"].map(String::from));
    all.extend(definition.arguments.iter().cloned());
    all.into_iter().map(OsString::from).collect()
}

fn memory(machine: &Machine<'_>, features: &Features) -> String {
    let size = machine.definition.memory >> 20;
    match &machine.memory {
        Memory::Private => format!("memory-backend-ram,id=memory,size={size}M"),
        Memory::Shared(file) => {
            format!("memory-backend-file,id=memory,size={size}M,mem-path={},share=on", value(file))
        }
        Memory::CopyOnWrite(file) => {
            let readonly = if features.memory_from_readonly_file { ",readonly=on,rom=off" } else { "" };
            // No swap space is reserved, because most of a clone's memory is never written.
            format!(
                "memory-backend-file,id=memory,size={size}M,mem-path={},share=off,reserve=off{readonly}",
                value(file)
            )
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::qemu::features::Accelerator;

    fn features(accelerator: Accelerator) -> Features {
        Features {
            program: "qemu-system-x86_64".into(),
            version: "7.2.0".into(),
            accelerator,
            why_not_kvm: None,
            memory_from_readonly_file: false,
            migrate_to_file: false,
            ignore_shared: true,
            save_devices: true,
        }
    }

    fn text(memory: Memory, features: &Features, incoming: bool) -> String {
        let mut definition = Definition {
            name: "web".into(),
            uuid: "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11".parse().unwrap(),
            cpus: 1,
            memory: 256 << 20,
            ports: 2,
            autostart: false,
            arguments: Vec::new(),
            boot: None,
            origin: None,
            disks: Vec::new(),
            networks: Vec::new(),
        };
        definition.add_disk("web,a").unwrap();
        definition.add_network("52:54:00:12:34:56".parse().unwrap(), Link::User).unwrap();
        let run = RunFolder("/run/a,b".into());
        let machine = Machine { definition: &definition, memory, run: &run, nbd: Path::new("/nbd"), incoming };
        let all = arguments(&machine, features);
        all.iter().map(|one| one.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn command_lines_of_parent_and_child_differ_only_in_memory() {
        let features = features(Accelerator::Tcg);
        let parent = text(Memory::Shared("/m".into()), &features, false);
        let child = text(Memory::CopyOnWrite("/m".into()), &features, true);
        let devices = |text: &str| {
            let words: Vec<String> = text.split(' ').map(String::from).collect();
            words.windows(2).filter(|pair| pair[0] == "-device").map(|pair| pair[1].clone()).collect::<Vec<_>>()
        };
        assert_eq!(devices(&parent), devices(&child));
        assert!(devices(&parent).iter().filter(|device| device.contains("pci")).all(|device| device.contains("addr=")));
        assert!(parent.contains("share=on") && child.contains("share=off,reserve=off"));
        assert!(child.ends_with("-incoming defer -S -nodefaults -no-user-config"));
        let newer = Features { memory_from_readonly_file: true, ..features };
        assert!(text(Memory::CopyOnWrite("/m".into()), &newer, true).contains("readonly=on,rom=off"));
    }

    #[test]
    fn commas_in_names_are_escaped() {
        let all = text(Memory::Private, &features(Accelerator::Kvm), false);
        assert!(all.contains("/run/a,,b/qmp.sock") && all.contains("\"export\":\"web,a\""), "{all}");
        assert!(all.contains("-accel kvm") && all.contains("bootindex=0"), "{all}");
    }
}
