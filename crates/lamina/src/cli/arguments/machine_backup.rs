//! Arguments of the commands about backups of machines.

use super::backup::{PlaceAddress, S3Server, Storing, Transfer};
use super::machine::{parse_machine, parse_source};
use crate::cli::address::absolute;
use clap::Subcommand;
use control::{BackupPlace, MachineBackup, MachineRestore, MachineVerb};
use std::path::{Path, PathBuf};
use vm::clone::Source;

/// Verbs of the backups of machines. Those that need no machine are verbs of `lamina backup`.
#[derive(Debug, Subcommand)]
pub enum VmBackupCommand {
    /// Back up a machine as one: its definition, its UEFI variables, and all disks at one snapshot. An interrupted
    /// backup continues when the command is repeated.
    Create {
        /// VM@SNAPSHOT; or VM to take a snapshot of the current state, which is kept for the next backup.
        #[arg(value_name = "SOURCE", value_parser = parse_source)]
        source: Source,
        /// The folder of a repository, created if it is missing, or s3://BUCKET/PREFIX.
        #[arg(value_name = "REPOSITORY")]
        target: PlaceAddress,
        /// Store all data of the disks, also if the repository has backups on which these can be based.
        #[arg(long)]
        full: bool,
        /// Freeze the guest's file systems through its agent while a snapshot is taken, if the agent answers.
        #[arg(long)]
        quiesce: bool,
        #[command(flatten)]
        storing: Storing,
    },
    /// Restore a machine with its disks. It gets a new UUID and new MAC addresses if a machine has those of the backup.
    Restore {
        /// The folder of the repository, or s3://BUCKET/PREFIX.
        #[arg(value_name = "REPOSITORY")]
        source: PlaceAddress,
        /// Name of the restored machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// The backup: an id or its beginning, VM for its newest backup, or VM@SNAPSHOT. Default: the newest backup of
        /// the machine with the same name as the restored machine.
        #[arg(long, value_name = "BACKUP")]
        backup: Option<String>,
        /// Make the disks usable at once. What has not arrived yet is read from the backup, and the server of the
        /// datastore copies it meanwhile.
        #[arg(long)]
        live: bool,
        /// Start the machine.
        #[arg(long)]
        start: bool,
        #[command(flatten)]
        transfer: Transfer,
    },
}

fn repository(address: &PlaceAddress, server: &S3Server) -> Result<BackupPlace, String> {
    if !address.is_repository() {
        return Err(
            "a machine has several backups, which only a repository has: give the folder or bucket of one".into()
        );
    }
    address.place(server)
}

impl VmBackupCommand {
    /// The request.
    pub fn verb(&self) -> Result<MachineVerb, String> {
        let key = |path: &Option<PathBuf>| path.as_deref().map(|path: &Path| absolute(path)).transpose();
        Ok(match self {
            Self::Create { source, target, full, quiesce, storing } => {
                if *quiesce && source.snapshot.is_some() {
                    return Err("--quiesce is for a snapshot that is taken now: give VM without a snapshot".into());
                }
                MachineVerb::BackUp(MachineBackup {
                    source: source.clone(),
                    place: repository(target, &storing.transfer.server)?,
                    full: *full,
                    quiesce: *quiesce,
                    level: storing.level,
                    rate: storing.transfer.rate,
                    key: key(&storing.transfer.key_file)?,
                })
            }
            Self::Restore { source, name, backup, live, start, transfer } => MachineVerb::Restore(MachineRestore {
                place: repository(source, &transfer.server)?,
                backup: backup.clone(),
                name: name.clone(),
                live: *live,
                start: *start,
                rate: transfer.rate,
                key: key(&transfer.key_file)?,
            }),
        })
    }
}
