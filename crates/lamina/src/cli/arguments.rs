//! The arguments of each verb, and the request that each becomes.

use super::address::{CLONES_MAX, NamePattern, SnapshotAddress, StateAddress, parse_disk};
use super::size::{parse_memory, parse_size};
use crate::control::Request;
use clap::{Args, Subcommand, ValueEnum};
use disk::{Point, Provisioning};
use std::net::SocketAddr;
use std::path::PathBuf;

/// How `check` checks.
#[derive(Debug, Args)]
pub struct CheckArguments {
    /// Also read every data block and verify its checksum.
    #[arg(long)]
    pub data: bool,
    /// Repair what can be repaired.
    #[arg(long)]
    pub repair: bool,
}

impl CheckArguments {
    /// The request.
    pub fn request(&self) -> Request {
        Request::Check { data: self.data, repair: self.repair }
    }
}

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
        match self {
            Self::Create(create) => Request::DiskCreate {
                name: create.name.clone(),
                capacity: create.size.or(create.size_option).unwrap_or_default(),
                provisioning: create.provisioning.into(),
            },
            Self::List => Request::DiskList,
            Self::Show { name } => Request::DiskShow { name: name.clone() },
            Self::Resize { name, size, shrink } => {
                Request::DiskResize { name: name.clone(), capacity: *size, shrink: *shrink }
            }
            Self::Rename { name, to } => Request::DiskRename { name: name.clone(), to: to.clone() },
            Self::Delete { name, promote } => Request::DiskDelete { name: name.clone(), promote: *promote },
            Self::Detach { name } => Request::DiskDetach { name: name.clone() },
        }
    }
}

/// Verbs of snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take snapshots; several disks are taken at one point in time.
    Create {
        /// Disk and name of the new snapshot.
        #[arg(value_name = "DISK@SNAPSHOT", required = true)]
        snapshots: Vec<SnapshotAddress>,
    },
    /// List the snapshots of one disk, or of all, as a tree.
    List {
        /// The disk.
        #[arg(value_parser = parse_disk)]
        disk: Option<String>,
    },
    /// Show one snapshot.
    Show {
        /// The snapshot.
        #[arg(value_name = "DISK@SNAPSHOT")]
        snapshot: SnapshotAddress,
    },
    /// Delete a snapshot; newer and older states keep their data.
    Delete {
        /// The snapshot.
        #[arg(value_name = "DISK@SNAPSHOT")]
        snapshot: SnapshotAddress,
    },
    /// Make the disk as it was at a snapshot; what was written since is lost.
    Revert {
        /// The snapshot.
        #[arg(value_name = "DISK@SNAPSHOT")]
        snapshot: SnapshotAddress,
    },
    /// List the extents that changed between a snapshot and another state of the same disk.
    Diff {
        /// The earlier state.
        #[arg(value_name = "DISK@SNAPSHOT")]
        from: SnapshotAddress,
        /// The later state: DISK@SNAPSHOT, or DISK for now (default).
        #[arg(value_name = "STATE")]
        to: Option<StateAddress>,
    },
}

impl SnapshotCommand {
    /// The request, or what is wrong with the arguments taken together.
    pub fn request(&self) -> Result<Request, String> {
        let pair = |snapshot: &SnapshotAddress| (snapshot.disk.clone(), snapshot.name.clone());
        Ok(match self {
            Self::Create { snapshots } => Request::SnapshotCreate { of: snapshots.iter().map(pair).collect() },
            Self::List { disk } => Request::SnapshotList { disk: disk.clone() },
            Self::Show { snapshot } => {
                Request::SnapshotShow { disk: snapshot.disk.clone(), name: snapshot.name.clone() }
            }
            Self::Delete { snapshot } => {
                Request::SnapshotDelete { disk: snapshot.disk.clone(), name: snapshot.name.clone() }
            }
            Self::Revert { snapshot } => {
                Request::SnapshotRevert { disk: snapshot.disk.clone(), name: snapshot.name.clone() }
            }
            Self::Diff { from, to } => {
                if let Some(other) = to.as_ref().filter(|to| to.disk != from.disk) {
                    return Err(format!(
                        "'{}' and '{}' are different disks: a diff compares two states of one disk",
                        from.disk, other.disk
                    ));
                }
                Request::SnapshotDiff {
                    disk: from.disk.clone(),
                    from: Point::Snapshot(from.name.clone()),
                    to: to.as_ref().map_or(Point::Head, |to| to.at.clone()),
                }
            }
        })
    }
}

/// `lamina clone`.
#[derive(Debug, Args)]
pub struct CloneArguments {
    /// The state to start from: DISK@SNAPSHOT, or DISK as it is now.
    #[arg(value_name = "SOURCE")]
    pub source: StateAddress,
    /// Name of the clone; with --count the start of the names (NAME-0001, ...).
    #[arg(value_parser = parse_disk, required_unless_present = "name_pattern")]
    pub name: Option<String>,
    /// Copy the allocated data: the clone is independent and shares nothing.
    #[arg(long)]
    pub full: bool,
    /// How many clones to make: all of them or none.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(CLONES_MAX)))]
    pub count: Option<u32>,
    /// Names of the clones, numbered from 1, such as 'vm-%04d'.
    #[arg(long, value_name = "PATTERN", conflicts_with = "name")]
    pub name_pattern: Option<NamePattern>,
}

impl CloneArguments {
    /// The request.
    pub fn request(&self) -> Result<Request, String> {
        let names = match (&self.name, &self.name_pattern, self.count) {
            (_, Some(pattern), count) => (1..=count.unwrap_or(1)).map(|number| pattern.name(number)).collect(),
            (Some(name), None, None) => vec![name.clone()],
            (Some(name), None, Some(count)) => {
                let pattern = NamePattern::numbered(name);
                (1..=count).map(|number| pattern.name(number)).collect()
            }
            (None, None, _) => return Err("a clone needs a name".into()),
        };
        Ok(Request::Clone { disk: self.source.disk.clone(), at: self.source.at.clone(), names, full: self.full })
    }
}

/// Verbs of exports.
#[derive(Debug, Subcommand)]
pub enum ExportCommand {
    /// List the export names with their NBD URIs.
    List,
}

/// How data files are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoModeArgument {
    /// Through the page cache.
    Buffered,
    /// Past the page cache.
    Direct,
}

impl From<IoModeArgument> for backend::IoMode {
    fn from(argument: IoModeArgument) -> Self {
        match argument {
            IoModeArgument::Buffered => Self::Buffered,
            IoModeArgument::Direct => Self::Direct,
        }
    }
}

/// What carries overlapping I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QueueArgument {
    /// io_uring where it works, threads where it does not.
    Auto,
    /// io_uring, or an error.
    #[value(name = "io_uring")]
    Uring,
    /// A pool of threads.
    Threads,
}

impl From<QueueArgument> for disk::QueueChoice {
    fn from(argument: QueueArgument) -> Self {
        match argument {
            QueueArgument::Auto => Self::Auto,
            QueueArgument::Uring => Self::Uring,
            QueueArgument::Threads => Self::Threads,
        }
    }
}

/// Reads permission bits as chmod takes them.
fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err(format!("'{text}' are not permission bits such as 600 or 660")),
    }
}

/// `lamina serve`.
#[derive(Debug, Args)]
pub struct ServeArguments {
    /// Folder of the datastore, when not given by --datastore.
    pub path: Option<PathBuf>,
    /// Unix socket for NBD clients; nbd.sock in the datastore by default.
    #[arg(long, value_name = "NBD_SOCKET")]
    pub socket: Option<PathBuf>,
    /// Permission bits of that socket, octal: who may connect.
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode)]
    pub socket_mode: u32,
    /// Also listen on TCP, such as 127.0.0.1:10809. Beyond loopback it needs TLS with client certificates.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp: Option<SocketAddr>,
    /// Certificate chain of this server, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of this server, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Certificates of the authorities that sign client certificates, PEM; clients must then have one.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
    /// Let anyone who reaches the TCP port read and write every disk, in clear text.
    #[arg(long, requires = "tcp")]
    pub insecure_tcp: bool,
    /// How data files are read and written.
    #[arg(long, value_enum, value_name = "MODE", default_value = "buffered")]
    pub io: IoModeArgument,
    /// What carries overlapping I/O.
    #[arg(long, value_enum, value_name = "ENGINE", default_value = "auto")]
    pub queue: QueueArgument,
    /// Most memory for cached metadata.
    #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = parse_memory)]
    pub metadata_cache: usize,
    /// Most memory for writes that are not at home yet.
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_memory)]
    pub write_buffer: usize,
    /// Refuse writes of NBD clients. Verbs of this command line still work.
    #[arg(long)]
    pub read_only: bool,
}
