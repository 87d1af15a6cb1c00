//! The command line, defined once: help, completions, man pages and the requests to the datastore follow from it.

pub mod address;
mod arguments;
pub mod format;
pub mod size;
pub mod usage;

pub use arguments::{
    CheckArguments, CloneArguments, ConvertArguments, DiskCommand, ExportCommand, ImageCommand, JobCommand,
    ReceiveCommand, SalvageArguments, ServeArguments, SnapshotCommand, VmArguments, VmCommand,
};

use address::location;
use clap::{CommandFactory, Parser, Subcommand};
use control::Request;
use disk::Location;
use std::path::PathBuf;

/// What the exit codes mean; shown by `lamina --help` and in lamina(1).
const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed
  2    wrong usage: an option, a size or a name that cannot be
  3    no datastore, disk or snapshot of that name
  4    in use: by clients, by clones or by another process
  5    no space
  6    corrupt, check found problems that are not repaired, or salvage lost ranges
  130  interrupted";

/// A virtual-disk datastore: native copy-on-write disks, snapshots and clones, served over NBD.
#[derive(Debug, Parser)]
#[command(name = "lamina", version, after_help = EXIT_CODES, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// Folder of the datastore.
    #[arg(short, long, global = true, value_name = "PATH", env = "LAMINA_DATASTORE", value_parser = location())]
    pub datastore: Option<Location>,

    /// Print JSON: sizes in bytes, times in seconds since 1970.
    #[arg(long, global = true)]
    pub json: bool,

    /// Have the server do long work as a job, print the job and end: the work goes on without this command.
    #[arg(long, global = true)]
    pub background: bool,

    /// What to log to stderr, such as `debug` or `export=trace`; also taken from RUST_LOG.
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs, and the nouns that have verbs of their own.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a datastore in an empty or missing folder.
    Init {
        /// The folder.
        #[arg(value_name = "PATH", value_parser = location())]
        location: Location,
        /// Size of the journal ring, from 4M to 4G.
        #[arg(long, value_name = "SIZE", default_value = "128M", value_parser = size::parse_size)]
        journal_size: u64,
        /// Make it even where the file system may lose flushed writes, such as NFS, SMB or FUSE.
        #[arg(long)]
        any_file_system: bool,
    },
    /// Show capacity, allocation, over-commitment and how the datastore is served.
    Status,
    /// Check all metadata and report what is wrong.
    Check(CheckArguments),
    /// Read disks and snapshots out of a datastore that cannot be opened, without writing to it.
    Salvage(SalvageArguments),
    /// Make and manage disks.
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Take and manage snapshots.
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Make disks that start as the state of another.
    Clone(CloneArguments),
    /// Make a disk or image of any format from the content of another.
    Convert(ConvertArguments),
    /// Show, check and make images: files of VMware's formats and others, outside any datastore.
    #[command(subcommand)]
    Image(ImageCommand),
    /// Make, run and clone virtual machines on disks of the datastore.
    Vm(VmArguments),
    /// Serve every disk and snapshot over NBD, in the foreground, until SIGTERM or SIGINT.
    Serve(ServeArguments),
    /// Show what NBD clients can open.
    #[command(subcommand)]
    Export(ExportCommand),
    /// Show and manage what other servers send here.
    #[command(subcommand)]
    Receive(ReceiveCommand),
    /// Show, wait for and cancel jobs: long work of the server.
    #[command(subcommand)]
    Job(JobCommand),
    /// Print every change of the datastore and of its jobs, a line each, until interrupted.
    Events,
    /// Print the completion script of a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the man pages, one per verb, into a folder.
    Man {
        /// The folder; made if missing.
        directory: PathBuf,
    },
}

impl Command {
    /// The request; `None` for verbs that are none.
    pub fn request(&self) -> Result<Option<Request>, String> {
        Ok(Some(match self {
            Self::Status => Request::Status,
            Self::Check(arguments) => arguments.request(),
            Self::Salvage(arguments) => arguments.request(),
            Self::Disk(command) => command.request()?,
            Self::Snapshot(command) => command.request()?,
            Self::Clone(arguments) => arguments.request()?,
            Self::Convert(arguments) => arguments.request()?,
            Self::Image(command) => command.request(),
            Self::Export(ExportCommand::List) => Request::ExportList,
            Self::Receive(command) => command.request(),
            Self::Vm(arguments) => arguments.request()?,
            Self::Job(command) => command.request(),
            Self::Events => Request::Events,
            Self::Init { .. } | Self::Serve(_) | Self::Completion { .. } | Self::Man { .. } => {
                return Ok(None);
            }
        }))
    }
}

/// The definitions as clap sees them, for completions and man pages.
pub fn definition() -> clap::Command {
    Cli::command()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_definitions_hold_together() {
        super::definition().debug_assert();
    }
}
