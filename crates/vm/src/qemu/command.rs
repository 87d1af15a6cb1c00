//! QEMU's command line for a machine.
//!
//! A saved state can be loaded only into a machine whose devices have the same addresses. So every device has a fixed
//! address, from this module or from the definition, and QEMU assigns none:
//!
//! ```text
//! pcie.0  1   IDE of the chipset i440fx                8..15   disks, or their controllers
//!         2   graphics card                            16..23  network cards
//!         4   serial port of the guest agent
//!         5   random number device                    24      ports, for devices that are added while it
//!                                                              runs; the chipset i440fx has no ports, and
//!                                                              such devices are in 24..31 themselves
//!                                                      25      the seed for cloud-init; in i440fx 31
//! ```
//!
//! In QEMU's options a comma separates values and is doubled within a value. Disks are passed as JSON, in which commas
//! need no doubling.

use super::boot;
use super::drives;
use super::features::Features;
use super::firmware::Uefi;
use super::network;
use super::passt::Passt;
use crate::definition::{
    BootDevice, Card, Chipset, Clock, Definition, Display, FIRST_PORT, Link, Network, VNC_FIRST_PORT, Vnc, VncTls,
};
use crate::seed;
use serde_json::json;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Slot of the graphics card.
const DISPLAY_SLOT: u8 = 2;
/// Slot of the serial bus with the guest agent's port.
const SERIAL_SLOT: u8 = 4;
/// Slot of the ports.
const PORTS_SLOT: u8 = 24;
/// Slot of the random number device.
const RANDOM_SLOT: u8 = 5;
/// Least and most MiB for translated code.
const TRANSLATED_MIB: [u64; 2] = [32, 128];
/// The id of the certificates of VNC.
const VNC_CERTIFICATES: &str = "vnc-tls";
/// QEMU's options to forbid itself obsolete system calls, starting other programs, changing its user, and changes of
/// scheduling.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// As [`SANDBOX`], but for a process that changes to another user itself, and so needs the calls that change the user.
/// After the change, the process cannot change its user again, and cannot start a program that changes its user.
const SANDBOX_OF_USER: &str = "on,obsolete=deny,spawn=deny,resourcecontrol=deny";

/// The memory of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Anonymous memory of the process.
    Private,
    /// A shared file to which the guest's memory is written, so that clones of a frozen machine can map it.
    Shared(PathBuf),
    /// A private (copy-on-write) mapping of a file, as clones have.
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

    /// Socket of VNC.
    pub fn vnc(&self) -> PathBuf {
        self.0.join("vnc.sock")
    }

    /// Socket on which QEMU waits for the network of a card.
    pub fn network(&self, slot: u8) -> PathBuf {
        self.0.join(format!("net{slot}.sock"))
    }

    /// The file that exists if passt serves the user networks of the process.
    pub fn passt(&self) -> PathBuf {
        self.0.join("passt")
    }

    /// The image of the seed for cloud-init.
    pub fn seed(&self) -> PathBuf {
        self.0.join("seed.img")
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
    /// The machine's memory.
    pub memory: Memory,
    /// The machine's UEFI; `None` for BIOS.
    pub uefi: Option<&'a Uefi>,
    /// The run folder of the process.
    pub run: &'a RunFolder,
    /// The NBD server that exports the machine's disks.
    pub nbd: &'a Path,
    /// The user that QEMU becomes once it has opened its files; `None` if it stays the user of this process.
    pub user: Option<&'a str>,
    /// The passt that serves user networks; `None` if QEMU serves all itself.
    pub passt: Option<&'a Passt>,
    /// Whether QEMU waits for a saved state to be loaded.
    pub incoming: bool,
}

/// The id of a card's network backend.
pub fn network_node(network: &Network) -> String {
    format!("net{}", network.slot)
}

/// The id of a card's device.
pub fn network_device(network: &Network) -> String {
    format!("nic{}", network.slot)
}

/// The number of a hub that has only the card's port, so that the card is not connected.
pub fn hub(network: &Network) -> u32 {
    1000 + u32::from(network.slot)
}

/// The property that places a device with this slot, as key and value: its bus, or its address on the root bus. With
/// the chipset i440fx, devices can be added to the root bus at run time, so its ports are slots.
pub fn place(chipset: Chipset, slot: u8) -> (&'static str, String) {
    match (chipset, slot.checked_sub(FIRST_PORT)) {
        (_, None) => ("addr", format!("{slot:x}.0")),
        (Chipset::Q35, Some(port)) => ("bus", format!("port{port}")),
        (Chipset::I440fx, Some(port)) => ("addr", format!("{:x}.0", PORTS_SLOT + port)),
    }
}

/// [`place`] as text for a command line.
pub fn place_text(chipset: Chipset, slot: u8) -> String {
    let (key, value) = place(chipset, slot);
    format!("{key}={value}")
}

/// The PCI address, in the guest, of a device with this slot, or of the port in which the device is.
pub fn pci_address(chipset: Chipset, slot: u8) -> String {
    match (chipset, slot.checked_sub(FIRST_PORT)) {
        (_, None) => format!("0000:00:{slot:02x}.0"),
        (Chipset::Q35, Some(port)) => format!("0000:00:{PORTS_SLOT:02x}.{port}"),
        (Chipset::I440fx, Some(port)) => format!("0000:00:{:02x}.0", PORTS_SLOT + port),
    }
}

/// A value with its commas doubled.
pub fn value(text: impl AsRef<Path>) -> String {
    text.as_ref().display().to_string().replace(',', ",,")
}

/// The arguments, without the program's name.
pub fn arguments(machine: &Machine<'_>, features: &Features) -> Vec<OsString> {
    let Machine { definition, run, .. } = machine;
    let mut all: Vec<String> = Vec::new();
    let mut add = |option: &str, argument: String| all.extend([option.to_owned(), argument]);
    add("-name", format!("{0},process=lamina-{0}", definition.name));
    add("-uuid", definition.uuid.to_string());
    for (option, argument) in platform(machine) {
        add(option, argument);
    }
    let (accelerator, usual_model) = match features.accelerator {
        super::features::Accelerator::Kvm => ("kvm".to_owned(), "host"),
        super::features::Accelerator::Tcg => (format!("tcg,tb-size={}", translated(machine)), "max"),
    };
    add("-accel", accelerator);
    add("-cpu", definition.cpu_model.clone().unwrap_or_else(|| usual_model.to_owned()));
    if is_sandboxed(definition, features) {
        add("-sandbox", if machine.user.is_some() { SANDBOX_OF_USER } else { SANDBOX }.into());
    }
    match machine.user {
        Some(user) if features.run_with_user => add("-run-with", format!("user={}", value(user))),
        Some(user) => add("-runas", user.to_owned()),
        None => {}
    }
    add("-smp", processors(definition));
    add("-m", format!("{}M", definition.memory >> 20));
    add("-object", memory(machine, features));
    // Without the configuration section, a state begins with its devices, whichever command of QEMU saved the state
    // (see `instant::state`).
    add("-global", "migration.send-configuration=off".into());
    // The VM generation id notifies a kernel with a driver for the id that the guest is a copy, so that the kernel
    // reseeds its random number generator.
    add("-device", "vmgenid,guid=auto".into());
    add("-display", "none".into());
    if let Some(tls) = &definition.vnc_tls {
        add("-object", certificates(tls));
    }
    if let Some(vnc) = definition.vnc {
        let encrypted = definition.vnc_tls.as_ref().map(|_| format!(",tls-creds={VNC_CERTIFICATES}"));
        add("-vnc", listening(vnc, run) + &encrypted.unwrap_or_default());
    }
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
    let chipset = definition.platform.chipset;
    for port in (0..definition.ports).filter(|_| chipset == Chipset::Q35) {
        let chassis = port + 1;
        add(
            "-device",
            format!("pcie-root-port,id=port{port},addr={PORTS_SLOT:x}.{port},multifunction=on,chassis={chassis}"),
        );
    }
    for (option, argument) in drives::arguments(definition, machine.nbd) {
        add(option, argument);
    }
    let more = boot::arguments(definition).into_iter().chain(seed::arguments(definition, &run.seed()));
    for (option, argument) in more {
        add(option, argument);
    }
    // Without the code for booting from a network, a card has the same state in every build of QEMU.
    let code = if boot::from_network(definition) { "" } else { ",romfile=" };
    for (number, network) in definition.networks.iter().enumerate() {
        let (net, place) = (network_node(network), place_text(chipset, network.slot));
        add("-netdev", network::argument(network, machine.passt.map(|passt| (passt, *run))));
        let (model, card) = (card(network.model), network_device(network));
        let boots = boot::index(definition, BootDevice::Network, number);
        add("-device", format!("{model},id={card},netdev={net},mac={},{place}{code}{boots}", network.mac));
    }
    if machine.incoming {
        add("-incoming", "defer".into());
    }
    // The guest stays paused until this process has become the machine's current one.
    all.extend(["-S", "-nodefaults", "-no-user-config"].map(String::from));
    all.extend(definition.arguments.iter().cloned());
    all.into_iter().map(OsString::from).collect()
}

/// Whether QEMU filters its system calls. QEMU does not filter them if the definition has an option `-sandbox` of its
/// own, or if QEMU has to start the helper program, which may be setuid root, for a bridge.
fn is_sandboxed(definition: &Definition, features: &Features) -> bool {
    let own = definition.arguments.iter().any(|one| one == "-sandbox" || one == "--sandbox");
    let helper = definition.networks.iter().any(|card| matches!(card.link, Link::Bridge(_)));
    features.sandbox && !own && !helper
}

/// Board, firmware, clock and graphics card.
fn platform(machine: &Machine<'_>) -> Vec<(&'static str, String)> {
    let platform = &machine.definition.platform;
    let board = match platform.chipset {
        Chipset::Q35 => "q35",
        Chipset::I440fx => "pc",
    };
    let mut board = format!("{board},memory-backend=memory,vmport=off");
    let mut all = Vec::new();
    if let Some(uefi) = machine.uefi {
        // QEMU's locks on the variables are switched off, because a process and its successor have the file open at the
        // same time.
        let file = |name: &str, path: &Path, read_only: bool| {
            let node = json!({
                "driver": "file", "node-name": name, "filename": path, "read-only": read_only, "locking": "off",
                "auto-read-only": false,
            });
            ("-blockdev", node.to_string())
        };
        all.extend([file("firmware", &uefi.code, true), file("variables", &uefi.variables, false)]);
        board.push_str(",pflash0=firmware,pflash1=variables");
    }
    if platform.secure_boot {
        // With `smm=on`, the guest can change the variables only in system management mode, where the firmware checks
        // signatures.
        board.push_str(",smm=on");
        all.push(("-global", "driver=cfi.pflash01,property=secure,value=on".into()));
        all.push(("-global", "ICH9-LPC.disable_s3=1".into()));
    }
    all.insert(0, ("-machine", board));
    if platform.clock == Clock::Local {
        all.push(("-rtc", "base=localtime".into()));
    }
    if platform.display == Display::Vga {
        all.push(("-device", format!("VGA,id=display,addr={DISPLAY_SLOT:x}.0")));
    }
    all
}

/// Size of the buffer for translated code, in MiB. When the buffer is full, QEMU drops all translated code. A guest
/// that boots needs more than 32 MiB: it boots twice as slowly with 32 MiB as with 128 MiB. A clone that continues a
/// guest translates little code, and there may be a hundred clones.
fn translated(machine: &Machine<'_>) -> u64 {
    match machine.memory {
        Memory::CopyOnWrite(_) => TRANSLATED_MIB[0],
        _ => (machine.definition.memory >> 21).clamp(TRANSLATED_MIB[0], TRANSLATED_MIB[1]),
    }
}

/// Where VNC listens. On a TCP port, VNC refuses every client until a password is set.
fn listening(vnc: Vnc, run: &RunFolder) -> String {
    match vnc {
        Vnc::Unix => format!("unix:{}", value(run.vnc())),
        Vnc::Tcp(address) => {
            let ip = match address.ip() {
                IpAddr::V4(ip) => ip.to_string(),
                IpAddr::V6(ip) => format!("[{ip}]"),
            };
            format!("{ip}:{},password=on", address.port() - VNC_FIRST_PORT)
        }
    }
}

/// The certificates of VNC.
fn certificates(tls: &VncTls) -> String {
    let verified = if tls.clients { "on" } else { "off" };
    let folder = value(&tls.folder);
    format!("tls-creds-x509,id={VNC_CERTIFICATES},dir={folder},endpoint=server,verify-peer={verified}")
}

fn processors(definition: &Definition) -> String {
    match definition.platform.cores {
        None => definition.cpus.to_string(),
        Some(cores) => format!("{},sockets={},cores={cores},threads=1", definition.cpus, definition.cpus / cores),
    }
}

/// QEMU's name for a card.
pub fn card(model: Card) -> &'static str {
    match model {
        Card::Virtio => "virtio-net-pci",
        other => other.name(),
    }
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
    use crate::definition::{Bus, Disk, Firmware, IDE_SLOT, Platform, WriteErrors};
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
            sandbox: true,
            run_with_user: false,
            stream_network: true,
            save_devices: true,
        }
    }

    fn text(memory: Memory, features: &Features, incoming: bool) -> String {
        let mut definition = Definition {
            version: 1,
            name: "web".into(),
            uuid: "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11".parse().unwrap(),
            cpus: 1,
            cpu_model: None,
            memory: 256 << 20,
            platform: Platform::default(),
            ports: 2,
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
        definition.add_disk("web,a").unwrap();
        definition.add_network("52:54:00:12:34:56".parse().unwrap(), Link::User).unwrap();
        let run = RunFolder("/run/a,b".into());
        line(
            &Machine {
                definition: &definition,
                memory,
                uefi: None,
                run: &run,
                nbd: Path::new("/nbd"),
                user: None,
                passt: None,
                incoming,
            },
            features,
        )
    }

    fn line(machine: &Machine<'_>, features: &Features) -> String {
        let all = arguments(machine, features);
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
        assert!(parent.contains("tb-size=128 ") && child.contains("tb-size=32 "), "of a machine with 256 MiB");
        assert!(parent.contains("share=on") && child.contains("share=off,reserve=off"));
        assert!(child.ends_with("-incoming defer -S -nodefaults -no-user-config"));
        let newer = Features { memory_from_readonly_file: true, ..features };
        assert!(text(Memory::CopyOnWrite("/m".into()), &newer, true).contains("readonly=on,rom=off"));
    }

    /// The arguments for the hardware of imported machines.
    #[test]
    fn hardware_is_as_the_definition_says() {
        let mut definition = Definition::new("web", 4, 256 << 20).unwrap();
        definition.platform =
            Platform { cores: Some(2), clock: Clock::Local, display: Display::Vga, ..Platform::default() };
        let disks = [
            (
                Bus::Pvscsi,
                8,
                0,
                "scsi-hd,id=vd8-0,drive=disk8-0,bus=controller8.0,scsi-id=0,lun=0,write-cache=on,bootindex=0",
            ),
            (Bus::Pvscsi, 8, 15, "scsi-hd,id=vd8-15,drive=disk8-15,bus=controller8.0,scsi-id=15,lun=0,write-cache=on"),
            (Bus::Lsi, 9, 1, "scsi-hd,id=vd9-1,drive=disk9-1,bus=controller9.0,scsi-id=1,lun=0,write-cache=on"),
            (Bus::Lsisas, 10, 0, "scsi-hd,id=vd10-0,drive=disk10-0,bus=controller10.0,scsi-id=0,lun=0,write-cache=on"),
            (
                Bus::VirtioScsi,
                11,
                3,
                "scsi-hd,id=vd11-3,drive=disk11-3,bus=controller11.0,scsi-id=3,lun=0,write-cache=on",
            ),
            (Bus::Sata, 12, 5, "ide-hd,id=vd12-5,drive=disk12-5,bus=controller12.5,write-cache=on"),
            (Bus::Nvme, 13, 1, "nvme-ns,id=vd13-1,drive=disk13-1,bus=controller13,nsid=2,write-cache=on"),
            (Bus::Virtio, 14, 0, "virtio-blk-pci,id=vd14,drive=disk14,addr=e.0,write-cache=on"),
            (Bus::Ide, IDE_SLOT, 3, "ide-hd,id=vd1-3,drive=disk1-3,bus=ide.1,unit=1,write-cache=on"),
        ];
        for (index, (bus, slot, unit, _)) in disks.iter().enumerate() {
            definition.disks.push(Disk { name: format!("d{index}"), slot: *slot, bus: *bus, unit: *unit });
        }
        for model in Card::ALL {
            definition.add_network(crate::identity::Mac::new().unwrap(), Link::None).unwrap();
            definition.networks.last_mut().unwrap().model = model;
        }
        let (run, features) = (RunFolder("/run".into()), features(Accelerator::Tcg));
        let of = |definition: &Definition, uefi: Option<&Uefi>| {
            let nbd = Path::new("/nbd");
            let (memory, user, passt) = (Memory::Private, None, None);
            line(&Machine { definition, memory, uefi, run: &run, nbd, user, passt, incoming: false }, &features)
        };
        let all = of(&definition, None);
        for (.., device) in disks {
            assert_eq!(all.matches(&format!("-device {device} ")).count(), 1, "{device}: {all}");
        }
        for controller in ["pvscsi", "lsi53c895a", "mptsas1068", "virtio-scsi-pci", "ich9-ahci", "nvme"] {
            assert_eq!(all.matches(&format!("-device {controller},id=controller")).count(), 1, "{controller}: {all}");
        }
        for card in ["virtio-net-pci", "vmxnet3", "e1000", "e1000e", "rtl8139", "pcnet"] {
            assert!(all.contains(&format!("-device {card},id=nic")), "{card}: {all}");
        }
        for part in
            ["-machine q35,", "-smp 4,sockets=2,cores=2,threads=1", "-rtc base=localtime", "VGA,id=display,addr=2.0"]
        {
            assert!(all.contains(part), "{part}: {all}");
        }
        assert!(all.contains(" -cpu max "), "{all}");
        definition.cpu_model = Some("max,hv_time,hv_spinlocks=0x1fff".into());
        assert!(of(&definition, None).contains(" -cpu max,hv_time,hv_spinlocks=0x1fff "));
        for (vnc, option) in [
            ("unix", "unix:/run/vnc.sock"),
            ("127.0.0.1:5901", "127.0.0.1:1,password=on"),
            ("[::1]:5900", "[::1]:0,password=on"),
        ] {
            definition.set_vnc(Some(vnc.parse().unwrap()));
            assert!(of(&definition, None).contains(&format!("-vnc {option} ")), "{vnc}");
        }
        definition.vnc_tls = Some(VncTls { folder: "/etc/pki,x".into(), clients: true });
        let all = of(&definition, None);
        assert!(all.contains("-vnc [::1]:0,password=on,tls-creds=vnc-tls "), "{all}");
        let object = "-object tls-creds-x509,id=vnc-tls,dir=/etc/pki,,x,endpoint=server,verify-peer=on ";
        assert!(all.contains(object), "{all}");
        definition.set_vnc(None);
        let uefi = Uefi { code: "/code".into(), variables: "/vars".into() };
        definition.platform = Platform { firmware: Firmware::Uefi, secure_boot: true, ..Platform::default() };
        let all = of(&definition, Some(&uefi));
        assert!(
            all.contains(",pflash0=firmware,pflash1=variables,smm=on") && all.contains("ICH9-LPC.disable_s3=1"),
            "{all}"
        );
        assert!(all.contains(r#""filename":"/vars""#), "{all}");
        definition.platform = Platform { chipset: Chipset::I440fx, ..Platform::default() };
        assert!(of(&definition, None).contains("-machine pc,memory-backend=memory,vmport=off "));
    }

    #[test]
    fn a_process_denies_itself_system_calls_unless_it_needs_them() {
        let features = features(Accelerator::Tcg);
        let mut definition = Definition::new("web", 1, 256 << 20).unwrap();
        let of = |definition: &Definition, features: &Features| {
            let (memory, run, nbd) = (Memory::Private, RunFolder("/run".into()), Path::new("/nbd"));
            let (user, passt) = (definition.run_as.as_deref(), None);
            line(&Machine { definition, memory, uefi: None, run: &run, nbd, user, passt, incoming: false }, features)
        };
        assert!(of(&definition, &features).contains("-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny"));
        assert!(!of(&definition, &Features { sandbox: false, ..features.clone() }).contains("-sandbox"));
        definition.run_as = Some("nobody".into());
        let all = of(&definition, &features);
        assert!(all.contains("-sandbox on,obsolete=deny,spawn=deny") && all.contains(" -runas nobody "), "{all}");
        assert!(
            of(&definition, &Features { run_with_user: true, ..features.clone() }).contains("-run-with user=nobody ")
        );
        definition.run_as = None;
        definition.arguments = ["-sandbox", "off"].map(String::from).into();
        assert_eq!(of(&definition, &features).matches("-sandbox").count(), 1);
        definition.arguments.clear();
        definition.add_network("52:54:00:12:34:56".parse().unwrap(), Link::Bridge("br0".into())).unwrap();
        assert!(!of(&definition, &features).contains("-sandbox"));
    }

    #[test]
    fn commas_in_names_are_escaped() {
        let all = text(Memory::Private, &features(Accelerator::Kvm), false);
        assert!(all.contains("/run/a,,b/qmp.sock") && all.contains("\"export\":\"web,a\""), "{all}");
        assert!(all.contains("-accel kvm") && all.contains("bootindex=0"), "{all}");
    }
}
