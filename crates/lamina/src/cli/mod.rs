//! The command line, defined once: help, completions, man pages and requests are derived from this definition.

pub mod address;
mod arguments;
pub mod complete;
pub mod format;
pub mod interval;
pub mod size;
pub mod usage;

pub use arguments::{
    BackupCommand, CheckArguments, CloneArguments, ConvertArguments, DiskCommand, ExportCommand, ImageCommand,
    JobCommand, LabelCommand, ReceiveCommand, SalvageArguments, ScrubArguments, ServeArguments, SnapshotCommand,
    VmArguments, VmCommand,
};

use address::location;
use clap::{CommandFactory, Parser, Subcommand};
use control::Request;
use disk::Location;
use std::path::PathBuf;

/// Meaning of the exit codes, shown by `lamina --help` and in lamina(1).
const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed
  2    wrong usage: an option, a size or a name that cannot be
  3    no datastore, disk or snapshot of that name
  4    in use: by clients, by clones or by another process
  5    no space
  6    corrupt, check found problems that are not repaired, or salvage or convert lost ranges
  7    a machine does not run, runs or is paused, and the command needs another state
  130  interrupted";

/// A virtual-disk datastore: native copy-on-write disks, snapshots and clones, served over NBD.
#[derive(Debug, Parser)]
#[command(name = "lamina", version, after_help = EXIT_CODES, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// Folder of the datastore.
    #[arg(short = 'D', long, global = true, value_name = "PATH", env = "LAMINA_DATASTORE", value_parser = location())]
    pub datastore: Option<Location>,

    /// The same option before the command, as in version 0.1.0. Behind some commands, `-d` is the format of a disk.
    #[arg(short = 'd', hide = true, value_name = "PATH", value_parser = location())]
    pub datastore_before: Option<Location>,

    /// Print JSON, with sizes in bytes and times in seconds since 1970.
    #[arg(long, global = true)]
    pub json: bool,

    /// Let the server do a long operation as a job, print the job and exit: the job continues without this command.
    #[arg(long, global = true)]
    pub background: bool,

    /// Log filter for stderr, such as `debug` or `export=trace`; also read from RUST_LOG.
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,

    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands, and groups of commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a datastore in an empty or missing folder.
    Init {
        /// Folder of the new datastore.
        #[arg(value_name = "PATH", value_parser = location())]
        location: Location,
        /// Size of the journal ring, from 4M to 4G.
        #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = size::parse_size)]
        journal_size: u64,
        /// Create the datastore even on a file system on which it may lose flushed writes or stop for lack of space,
        /// such as NFS, SMB, FUSE or ZFS.
        #[arg(long)]
        any_file_system: bool,
    },
    /// Show capacity, allocation, over-commitment and how the datastore is served.
    Status {
        /// Also count the space of all disks and snapshots: why the data takes the space that it takes, and how much
        /// more clients may need.
        #[arg(long)]
        space: bool,
    },
    /// Check all metadata and report problems.
    Check(CheckArguments),
    /// Read all metadata and data in the background, and report and restore what is damaged.
    Scrub(ScrubArguments),
    /// Extract disks and snapshots from a datastore that cannot be opened, or read a damaged image, without writing to
    /// either.
    Salvage(SalvageArguments),
    /// Create and manage disks.
    #[command(subcommand)]
    Disk(DiskCommand),
    /// List labels of disks, and limit all disks with a label.
    #[command(subcommand)]
    Label(LabelCommand),
    /// Take and manage snapshots.
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Make linked or full clones of a disk.
    Clone(CloneArguments),
    /// Convert a disk or image to a new disk or image of any format.
    Convert(ConvertArguments),
    /// Show, check and create images in VMware's formats and others, outside any datastore.
    #[command(subcommand)]
    Image(ImageCommand),
    /// Create, run and clone virtual machines on disks of the datastore.
    Vm(VmArguments),
    /// Serve every disk and snapshot over NBD, in the foreground, until SIGTERM or SIGINT.
    Serve(ServeArguments),
    /// Show the exports for NBD clients.
    #[command(subcommand)]
    Export(ExportCommand),
    /// Show and manage receptions from other servers.
    #[command(subcommand)]
    Receive(ReceiveCommand),
    /// Back up snapshots to a folder, an S3 bucket, a file or a pipe, and restore them.
    #[command(subcommand)]
    Backup(BackupCommand),
    /// Show, wait for and cancel jobs: long operations of the server.
    #[command(subcommand)]
    Job(JobCommand),
    /// Print every change of the datastore and of its jobs, one per line, until interrupted.
    Events,
    /// Print the completion script for a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the man pages, one per command, into a folder.
    Man {
        /// The folder; created if it does not exist.
        directory: PathBuf,
    },
}

impl Command {
    /// The request; `None` for commands without one.
    pub fn request(&self) -> Result<Option<Request>, String> {
        Ok(Some(match self {
            Self::Status { space: false } => Request::Status,
            Self::Status { space: true } => Request::StatusSpace,
            Self::Check(arguments) => arguments.request(),
            Self::Scrub(arguments) => arguments.request()?,
            Self::Salvage(arguments) => arguments.request()?,
            Self::Disk(command) => command.request()?,
            Self::Label(command) => command.request(),
            Self::Snapshot(command) => command.request()?,
            Self::Clone(arguments) => arguments.request()?,
            Self::Convert(arguments) => arguments.request()?,
            Self::Image(command) => command.request(),
            Self::Export(ExportCommand::List) => Request::ExportList,
            Self::Receive(command) => command.request(),
            Self::Backup(command) => command.request()?,
            Self::Vm(arguments) => arguments.request()?,
            Self::Job(command) => command.request(),
            Self::Events => Request::Events,
            Self::Init { .. } | Self::Serve(_) | Self::Completion { .. } | Self::Man { .. } => {
                return Ok(None);
            }
        }))
    }
}

/// The definition in the form that generates completions and man pages.
pub fn definition() -> clap::Command {
    Cli::command()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_definition_is_consistent() {
        super::definition().debug_assert();
    }
}
