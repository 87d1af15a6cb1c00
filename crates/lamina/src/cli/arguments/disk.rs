//! Verbs of disks.

use crate::cli::address::parse_disk;
use crate::cli::size::parse_size;
use crate::control::{DiskRequest, Request};
use clap::{Args, Subcommand, ValueEnum};
use disk::Provisioning;

/// How a disk takes its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProvisioningArgument {
    /// On first write.
    Thin,
    /// Reserved at creation, zeroed on first write.
    #[value(name = "zeroedthick")]
    ZeroedThick,
    /// Reserved and zeroed at creation.
    #[value(name = "eagerzeroedthick")]
    EagerZeroedThick,
}

impl From<ProvisioningArgument> for Provisioning {
    fn from(argument: ProvisioningArgument) -> Self {
        match argument {
            ProvisioningArgument::Thin => Self::Thin,
            ProvisioningArgument::ZeroedThick => Self::ZeroedThick,
            ProvisioningArgument::EagerZeroedThick => Self::EagerZeroedThick,
        }
    }
}

/// `lamina disk create`.
#[derive(Debug, Args)]
pub struct DiskCreate {
    /// Name of the new disk.
    #[arg(value_parser = parse_disk)]
    pub name: String,
    /// Capacity, such as 10G; 512 bytes to 64T.
    #[arg(value_name = "SIZE", value_parser = parse_size, required_unless_present = "size_option")]
    pub size: Option<u64>,
    /// Capacity, when not given after the name.
    #[arg(id = "size_option", long = "size", value_name = "SIZE", value_parser = parse_size, conflicts_with = "size")]
    pub size_option: Option<u64>,
    /// How the disk takes its space.
    #[arg(long, value_enum, value_name = "TYPE", default_value = "thin")]
    pub provisioning: ProvisioningArgument,
}

/// Verbs of disks.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Make a disk.
    Create(DiskCreate),
    /// List all disks.
    List,
    /// Show one disk, its blocks counted.
    Show {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
    /// Grow a disk, or shrink it with --shrink. Clients see the new size at once.
    Resize {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// The new capacity.
        #[arg(value_parser = parse_size)]
        size: u64,
        /// Allow a smaller capacity: what lies beyond it is lost.
        #[arg(long)]
        shrink: bool,
    },
    /// Rename a disk.
    Rename {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// Its new name.
        #[arg(value_name = "NEW_NAME", value_parser = parse_disk)]
        to: String,
    },
    /// Delete a disk with its snapshots. Refused while linked clones stand on them.
    Delete {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        name: String,
        /// Give the snapshots that linked clones stand on to those clones, then delete.
        #[arg(long)]
        promote: bool,
    },
    /// Make a linked clone independent of its parent, while it is in use.
    Detach {
        /// The clone.
        #[arg(value_parser = parse_disk)]
        name: String,
    },
}

impl DiskCommand {
    /// The request.
    pub fn request(&self) -> Request {
        Request::Disk(match self {
            Self::Create(create) => DiskRequest::Create {
                name: create.name.clone(),
                capacity: create.size.or(create.size_option).unwrap_or_default(),
                provisioning: create.provisioning.into(),
            },
            Self::List => DiskRequest::List,
            Self::Show { name } => DiskRequest::Show { name: name.clone() },
            Self::Resize { name, size, shrink } => {
                DiskRequest::Resize { name: name.clone(), capacity: *size, shrink: *shrink }
            }
            Self::Rename { name, to } => DiskRequest::Rename { name: name.clone(), to: to.clone() },
            Self::Delete { name, promote } => DiskRequest::Delete { name: name.clone(), promote: *promote },
            Self::Detach { name } => DiskRequest::Detach { name: name.clone() },
        })
    }
}
