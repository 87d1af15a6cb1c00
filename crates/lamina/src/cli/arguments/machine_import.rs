//! Arguments of `lamina vm import`.

use super::machine::parse_machine;
use super::machine_create::NetworkArgument;
use super::machine_devices::DeviceArguments;
use crate::cli::address::absolute;
use crate::cli::size::{parse_rate, parse_size};
use clap::{Args, ValueEnum};
use control::MachineImport;
use std::path::PathBuf;
use vm::definition::{Firmware, Link};
use vm::import::Options;

/// Firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FirmwareArgument {
    /// BIOS
    Bios,
    /// UEFI
    Uefi,
}

/// `lamina vm import`.
#[derive(Debug, Args)]
pub struct VmImport {
    /// A .vmx, .ovf, .ova or .vbox file, the .xml of a libvirt domain, an image of a disk, or a folder: then all
    /// machines in the folder and its subfolders.
    #[arg(value_name = "SOURCE")]
    pub source: PathBuf,
    /// Name of the machine. Default: derived from the name in the source.
    #[arg(long, value_name = "VM", value_parser = parse_machine)]
    pub name: Option<String>,
    /// Only report what would be made, and what would differ from the source.
    #[arg(long)]
    pub dry_run: bool,
    /// Start the machine at once on the images of its source; the server copies their blocks meanwhile. Keep the source
    /// until the copy is complete.
    #[arg(long)]
    pub live: bool,
    /// Start the machine when it is imported.
    #[arg(long)]
    pub start: bool,
    /// Controller of the disks, and model of the network cards.
    #[command(flatten)]
    pub devices: DeviceArguments,
    /// Firmware. Default: as in the source; bios for an image.
    #[arg(long, value_enum, value_name = "FIRMWARE")]
    pub firmware: Option<FirmwareArgument>,
    /// Network of all cards: user, bridge=NAME or unplugged.
    #[arg(long, value_name = "NETWORK", default_value = "user")]
    pub network: NetworkArgument,
    /// Virtual CPUs. Default: as in the source; 1 for an image.
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// Memory, in whole MiB. Default: as in the source; 1G for an image.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Another folder in which disks and their parents may be. May be repeated.
    #[arg(long, value_name = "DIR")]
    pub allow_folder: Vec<PathBuf>,
    /// Limit of copied bytes per second, such as 100M.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
    pub rate: u64,
}

impl VmImport {
    /// The request, with absolute paths, because the server has another working directory.
    pub fn request(&self) -> Result<MachineImport, String> {
        let link = match &self.network {
            NetworkArgument::Card(Link::Tap(_) | Link::Forward(_)) => {
                let text = "'--network' is for all cards, and a tap device or a forwarded port is for one card: import \
                            with '--network user', and add this card with 'lamina vm edit --add-network'";
                return Err(text.into());
            }
            NetworkArgument::Card(link) => link.clone(),
            NetworkArgument::None => Link::None,
        };
        Ok(MachineImport {
            source: absolute(&self.source)?,
            options: Options {
                name: self.name.clone(),
                permitted: self.allow_folder.iter().map(|folder| absolute(folder)).collect::<Result<_, _>>()?,
                link,
                bus: self.devices.bus(),
                card: self.devices.card(),
                firmware: self.firmware.map(|firmware| match firmware {
                    FirmwareArgument::Bios => Firmware::Bios,
                    FirmwareArgument::Uefi => Firmware::Uefi,
                }),
                cpus: self.cpus,
                memory: self.memory,
            },
            dry_run: self.dry_run,
            live: self.live,
            start: self.start,
            rate: self.rate,
        })
    }
}
