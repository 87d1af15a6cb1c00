//! Arguments of `lamina vm create`.

use super::machine::parse_machine;
use super::machine_seed::SeedArguments;
use crate::cli::address::{absolute, parse_disk};
use crate::cli::size::parse_size;
use clap::{Args, ValueEnum};
use control::NewMachine;
use std::path::PathBuf;
use std::str::FromStr;
use vm::definition::{BootDevice, CPU_MODEL_USUAL, Clock, Firmware, Link, Platform, Vnc, VncTls, WriteErrors};

/// The network of a card, or no card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkArgument {
    /// No card.
    None,
    /// A card that is connected to this network.
    Card(Link),
}

impl FromStr for NetworkArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            None if text == "user" => Ok(Self::Card(Link::User)),
            None if text == "unplugged" => Ok(Self::Card(Link::None)),
            None if text == "none" => Ok(Self::None),
            Some(("user,forward", ports)) => {
                let ports: Result<_, _> = ports.split(",forward=").map(str::parse).collect();
                ports.map(|ports| Self::Card(Link::Forward(ports))).map_err(|error: error::Error| error.to_string())
            }
            Some(("tap", tap)) if !tap.is_empty() => Ok(Self::Card(Link::Tap(tap.to_owned()))),
            Some(("bridge", bridge)) if !bridge.is_empty() => Ok(Self::Card(Link::Bridge(bridge.to_owned()))),
            _ => Err(format!(
                "'{text}' is no network: user, user,forward=PORT:GUESTPORT, bridge=NAME, tap=NAME, unplugged, or none for \
                 no card at all"
            )),
        }
    }
}

/// A kind of device that the firmware boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BootArgument {
    /// The first disk.
    Disk,
    /// The CD-ROM drives.
    Cdrom,
    /// The network cards.
    Network,
}

impl From<BootArgument> for BootDevice {
    fn from(argument: BootArgument) -> Self {
        match argument {
            BootArgument::Disk => Self::Disk,
            BootArgument::Cdrom => Self::Cdrom,
            BootArgument::Network => Self::Network,
        }
    }
}

/// Where the screen is served; `None` for nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VncArgument(pub Option<Vnc>);

impl FromStr for VncArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            text => text.parse().map(|vnc| Self(Some(vnc))).map_err(|error: error::Error| error.to_string()),
        }
    }
}

/// Options for the encryption of VNC.
#[derive(Debug, Args)]
pub struct VncTlsArguments {
    /// Encrypt VNC on a port with the files ca-cert.pem, server-cert.pem and server-key.pem of this folder.
    #[arg(long, value_name = "FOLDER")]
    pub vnc_tls: Option<PathBuf>,
    /// Serve only viewers with a certificate that the authority in ca-cert.pem has signed.
    #[arg(long, requires = "vnc_tls")]
    pub vnc_verify: bool,
}

impl VncTlsArguments {
    /// The certificates; `None` if none are given.
    pub fn certificates(&self) -> Result<Option<VncTls>, String> {
        let folder = self.vnc_tls.as_deref().map(absolute).transpose()?;
        Ok(folder.map(|folder| VncTls { folder, clients: self.vnc_verify }))
    }
}

/// A firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FirmwareArgument {
    /// BIOS.
    Bios,
    /// UEFI, without Secure Boot.
    Uefi,
}

impl From<FirmwareArgument> for Firmware {
    fn from(argument: FirmwareArgument) -> Self {
        match argument {
            FirmwareArgument::Bios => Self::Bios,
            FirmwareArgument::Uefi => Self::Uefi,
        }
    }
}

/// What the hardware clock shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClockArgument {
    /// Universal time, which Unix-like guests expect.
    Utc,
    /// The host's local time, which Windows expects.
    Local,
}

impl From<ClockArgument> for Clock {
    fn from(argument: ClockArgument) -> Self {
        match argument {
            ClockArgument::Utc => Self::Utc,
            ClockArgument::Local => Self::Local,
        }
    }
}

/// Options for the model and the sockets of the CPUs, and for the clock.
#[derive(Debug, Args)]
pub struct ProcessorArguments {
    /// Model of the CPUs, as QEMU names it, with features: 'Skylake-Server,+pcid'. 'default' for all features of the
    /// host.
    #[arg(long, value_name = "MODEL")]
    pub cpu_model: Option<String>,
    /// CPUs in each socket, by which the number of CPUs is divisible; 0 to let QEMU choose.
    #[arg(long, value_name = "N")]
    pub cores: Option<u32>,
    /// What the hardware clock shows. Default: utc.
    #[arg(long, value_enum, value_name = "TIME")]
    pub clock: Option<ClockArgument>,
}

/// What QEMU does when a write of the guest fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WriteErrorsArgument {
    /// Pause the guest if there is no space; pass other errors to the guest.
    Enospc,
    /// Pause the guest.
    Stop,
    /// Pass the error to the guest.
    Report,
}

impl From<WriteErrorsArgument> for WriteErrors {
    fn from(argument: WriteErrorsArgument) -> Self {
        match argument {
            WriteErrorsArgument::Enospc => Self::Enospc,
            WriteErrorsArgument::Stop => Self::Stop,
            WriteErrorsArgument::Report => Self::Report,
        }
    }
}

/// `lamina vm create`.
#[derive(Debug, Args)]
pub struct VmCreate {
    /// The machine's name: letters, digits and inner hyphens.
    #[arg(value_name = "VM", value_parser = parse_machine)]
    pub name: String,
    /// Virtual CPUs.
    #[arg(long, value_name = "N", default_value = "1")]
    pub cpus: u32,
    /// Model and sockets of the CPUs, and the clock.
    #[command(flatten)]
    pub processors: ProcessorArguments,
    /// Memory, in whole MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    pub memory: u64,
    /// A disk of the datastore. May be repeated, and may list several disks separated by commas.
    #[arg(long = "disk", value_name = "DISK", value_delimiter = ',', value_parser = parse_disk)]
    pub disks: Vec<String>,
    /// Create a thin disk of this size with the machine's name.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub disk_size: Option<u64>,
    /// Network of a card: user[,forward=PORT:GUESTPORT..], bridge=NAME, tap=NAME or unplugged; may be repeated. none
    /// for no card. Default: one card on user.
    #[arg(long = "network", value_name = "NETWORK")]
    pub networks: Vec<NetworkArgument>,
    /// An image for a CD-ROM drive, such as one that installs a system; may be repeated.
    #[arg(long = "cdrom", value_name = "FILE")]
    pub cdroms: Vec<PathBuf>,
    /// Devices that the firmware tries, in this order. Default: disk,cdrom.
    #[arg(long = "boot", value_name = "DEVICE", value_delimiter = ',', value_enum, conflicts_with = "kernel")]
    pub boot_order: Vec<BootArgument>,
    /// The firmware.
    #[arg(long, value_enum, value_name = "FIRMWARE", default_value = "bios")]
    pub firmware: FirmwareArgument,
    /// Let UEFI start only boot loaders that are signed.
    #[arg(long)]
    pub secure_boot: bool,
    /// What QEMU does when a write of the guest fails. A paused guest repeats the write when it is resumed.
    #[arg(long, value_enum, value_name = "ACTION", default_value = "enospc")]
    pub write_errors: WriteErrorsArgument,
    /// Serve the screen by VNC: on a socket of the machine, or on ADDRESS:PORT of this host with a password. Addresses
    /// that other hosts reach need --vnc-tls.
    #[arg(long, value_name = "unix|ADDRESS:PORT|off", num_args = 0..=1, default_missing_value = "unix")]
    pub vnc: Option<VncArgument>,
    /// How VNC on a port is encrypted.
    #[command(flatten)]
    pub vnc_tls: VncTlsArguments,
    /// The user as which QEMU runs. Only root can choose it. Default: the default of the datastore.
    #[arg(long, value_name = "USER")]
    pub run_as: Option<String>,
    /// A kernel to boot without a boot loader.
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk of the kernel.
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// The command line of the kernel.
    #[arg(long, value_name = "TEXT", requires = "kernel", allow_hyphen_values = true)]
    pub append: Option<String>,
    /// The configuration of cloud-init in the guest.
    #[command(flatten)]
    pub seed: SeedArguments,
    /// Start the machine.
    #[arg(long)]
    pub start: bool,
}

impl VmCreate {
    /// The machine to create.
    pub fn new_machine(&self) -> Result<NewMachine, String> {
        let cards = self.networks.iter().filter_map(|argument| match argument {
            NetworkArgument::Card(link) => Some(link.clone()),
            NetworkArgument::None => None,
        });
        let networks: Vec<Link> = if self.networks.is_empty() { vec![Link::User] } else { cards.collect() };
        if !networks.is_empty() && networks.len() < self.networks.len() {
            return Err("'--network none' means no card, and excludes other --network options".into());
        }
        let ProcessorArguments { cpu_model, cores, clock } = &self.processors;
        let platform = Platform {
            firmware: self.firmware.into(),
            secure_boot: self.secure_boot,
            cores: cores.filter(|cores| *cores > 0),
            clock: clock.map_or_else(Clock::default, Clock::from),
            ..Platform::default()
        };
        Ok(NewMachine {
            name: self.name.clone(),
            cpus: self.cpus,
            cpu_model: cpu_model.clone().filter(|model| model != CPU_MODEL_USUAL),
            memory: self.memory,
            disks: self.disks.clone(),
            disk_size: self.disk_size,
            networks,
            cdroms: self.cdroms.iter().map(|file| absolute(file)).collect::<Result<_, _>>()?,
            boot_order: self.boot_order.iter().copied().map(BootDevice::from).collect(),
            platform,
            write_errors: self.write_errors.into(),
            kernel: self.kernel.as_deref().map(absolute).transpose()?,
            initrd: self.initrd.as_deref().map(absolute).transpose()?,
            append: self.append.clone().unwrap_or_default(),
            vnc: self.vnc.and_then(|vnc| vnc.0),
            vnc_tls: self.vnc_tls.certificates()?,
            run_as: self.run_as.clone(),
            seed: self.seed.seed()?,
            start: self.start,
        })
    }
}
