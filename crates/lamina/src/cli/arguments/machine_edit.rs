//! Arguments of `lamina vm edit`.

use super::machine::parse_machine;
use super::machine_create::{
    BootArgument, NetworkArgument, ProcessorArguments, VncArgument, VncTlsArguments, WriteErrorsArgument,
};
use super::machine_devices::DeviceArguments;
use crate::cli::address::{absolute, parse_disk};
use crate::cli::size::parse_size;
use clap::{Args, ValueEnum};
use control::MachineVerb;
use std::path::PathBuf;
use vm::definition::{BootDevice, PORTS_MAX};
use vm::edit::Edit;
use vm::identity::Mac;

/// `lamina vm edit`.
#[derive(Debug, Args)]
pub struct VmEdit {
    /// The machine.
    #[arg(value_name = "VM", value_parser = parse_machine)]
    pub name: String,
    /// Virtual CPUs.
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// Model and sockets of the CPUs, and the clock.
    #[command(flatten)]
    pub processors: ProcessorArguments,
    /// Memory, in whole MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// A further argument of QEMU; may be repeated. All --qemu-arg together replace the present ones.
    #[arg(long = "qemu-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub arguments: Vec<String>,
    /// Remove the further arguments of QEMU.
    #[arg(long, conflicts_with = "arguments")]
    pub no_qemu_args: bool,
    /// Most memory of QEMU besides the memory of the guest, at least 256M; 0 for no limit.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub qemu_memory: Option<u64>,
    /// The user as which QEMU runs. Only root can choose it.
    #[arg(long, value_name = "USER")]
    pub run_as: Option<String>,
    /// Run QEMU as the default user of the datastore.
    #[arg(long, conflicts_with = "run_as")]
    pub no_run_as: bool,
    /// What QEMU does when a write of the guest fails. A paused guest repeats the write when it is resumed.
    #[arg(long, value_enum, value_name = "ACTION")]
    pub write_errors: Option<WriteErrorsArgument>,
    /// Whether 'start --autostart' starts the machine.
    #[arg(long, value_name = "on|off", value_parser = parse_switch)]
    pub autostart: Option<bool>,
    /// Ports for disks and cards that are added while the machine runs; a new machine has 4.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=i64::from(PORTS_MAX)))]
    pub ports: Option<u8>,
    /// Controller of the disks, and model of the network cards.
    #[command(flatten)]
    pub devices: DeviceArguments,
    /// Devices that the firmware tries, in this order. 'default' restores the usual order: disk,cdrom.
    #[arg(long = "boot", value_name = "DEVICE", value_delimiter = ',', value_parser = parse_boot)]
    pub boot_order: Vec<BootChoice>,
    /// Serve the screen by VNC: on a socket of the machine, or on ADDRESS:PORT of this host with a password. Addresses
    /// that other hosts reach need --vnc-tls.
    #[arg(long, value_name = "unix|ADDRESS:PORT|off", num_args = 0..=1, default_missing_value = "unix")]
    pub vnc: Option<VncArgument>,
    /// How VNC on a port is encrypted.
    #[command(flatten)]
    pub vnc_tls: VncTlsArguments,
    /// Switch the encryption of VNC off.
    #[arg(long, conflicts_with = "vnc_tls")]
    pub no_vnc_tls: bool,
    /// Insert an image into an empty CD-ROM drive; while the machine is off also into a new drive. May be repeated.
    #[arg(long = "cdrom", value_name = "FILE")]
    pub insert: Vec<PathBuf>,
    /// Eject an image, given by its path or its file name. The drive stays. May be repeated.
    #[arg(long, value_name = "FILE")]
    pub eject: Vec<PathBuf>,
    /// Eject also from a drive that the guest has locked.
    #[arg(long, requires = "eject")]
    pub force: bool,
    /// Remove all CD-ROM drives.
    #[arg(long, conflicts_with = "eject")]
    pub no_cdrom: bool,
    /// Add a disk of the datastore. May be repeated, and may list several disks separated by commas.
    #[arg(long = "add-disk", value_name = "DISK", value_delimiter = ',', value_parser = parse_disk)]
    pub add_disks: Vec<String>,
    /// Remove a disk, which stays in the datastore. May be repeated, and may list several disks.
    #[arg(long = "remove-disk", value_name = "DISK", value_delimiter = ',', value_parser = parse_disk)]
    pub remove_disks: Vec<String>,
    /// Add a network card on this network, given as for 'create': user, bridge=NAME, tap=NAME or unplugged. May be
    /// repeated.
    #[arg(long = "add-network", value_name = "NETWORK")]
    pub add_networks: Vec<NetworkArgument>,
    /// Remove the network card with this address, as 'show' prints it. May be repeated.
    #[arg(long = "remove-network", value_name = "ADDRESS", value_parser = parse_mac)]
    pub remove_networks: Vec<Mac>,
}

/// Parses `on` or `off`.
fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("'{text}' is neither on nor off")),
    }
}

/// A kind of device that the firmware boots, or `None` for the usual order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootChoice(Option<BootDevice>);

fn parse_boot(text: &str) -> Result<BootChoice, String> {
    if text == "default" {
        return Ok(BootChoice(None));
    }
    let device = BootArgument::from_str(text, false);
    device.map(|device| BootChoice(Some(device.into()))).map_err(|_| {
        let names = [BootDevice::Disk, BootDevice::Cdrom, BootDevice::Network].map(BootDevice::name);
        format!("'{text}' is none of {}, and not 'default'", names.join(", "))
    })
}

fn all_absolute(paths: &[PathBuf]) -> Result<Vec<PathBuf>, String> {
    paths.iter().map(|path| absolute(path)).collect()
}

fn parse_mac(text: &str) -> Result<Mac, String> {
    text.parse().map_err(|error: error::Error| error.to_string())
}

impl VmEdit {
    /// The request.
    pub fn verb(&self) -> Result<MachineVerb, String> {
        let mut add_networks = Vec::new();
        for network in &self.add_networks {
            match network {
                NetworkArgument::Card(link) => add_networks.push(link.clone()),
                NetworkArgument::None => return Err("'--add-network none' would add nothing".into()),
            }
        }
        let edit = Edit {
            cpus: self.cpus,
            cpu_model: self.processors.cpu_model.clone(),
            cores: self.processors.cores,
            clock: self.processors.clock.map(Into::into),
            memory: self.memory,
            arguments: (self.no_qemu_args || !self.arguments.is_empty()).then(|| self.arguments.clone()),
            qemu_memory: self.qemu_memory,
            run_as: self.run_as.clone(),
            no_run_as: self.no_run_as,
            write_errors: self.write_errors.map(Into::into),
            autostart: self.autostart,
            ports: self.ports,
            bus: self.devices.bus(),
            card: self.devices.card(),
            boot_order: self.boot_order()?,
            vnc: self.vnc.and_then(|vnc| vnc.0),
            no_vnc: self.vnc == Some(VncArgument(None)),
            vnc_tls: self.vnc_tls.certificates()?,
            no_vnc_tls: self.no_vnc_tls,
            no_cdroms: self.no_cdrom,
            eject: all_absolute(&self.eject)?,
            force_eject: self.force,
            insert: all_absolute(&self.insert)?,
            add_disks: self.add_disks.clone(),
            remove_disks: self.remove_disks.clone(),
            add_networks,
            remove_networks: self.remove_networks.clone(),
        };
        if edit == Edit::default() {
            return Err("nothing to change is given: see 'lamina vm edit --help'".into());
        }
        Ok(MachineVerb::Edit { name: self.name.clone(), edit })
    }
    /// The boot order, if it is to be changed.
    fn boot_order(&self) -> Result<Option<Vec<BootDevice>>, String> {
        let devices: Vec<BootDevice> = self.boot_order.iter().filter_map(|choice| choice.0).collect();
        match (self.boot_order.len(), devices.len()) {
            (0, _) => Ok(None),
            (1, 0) => Ok(Some(devices)),
            (all, given) if all == given => Ok(Some(devices)),
            _ => Err("'--boot default' excludes other devices".into()),
        }
    }
}
