//! Requests about virtual machines, and their replies.
//!
//! QEMU is started by the requesting process, never by the server of the datastore, so that a machine continues when
//! either process ends (`docs/adr/0015-machines-without-a-daemon.md`). So these requests are not sent over the control
//! socket; only the resulting requests about disks are sent over it.

use super::line::Failure;
use super::machine_backup::{BackedUpMachine, MachineBackup, MachineRestore, RestoredMachine};
use super::send::SendHow;
use replication::Sent;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use vm::agent::Execution;
use vm::clone::{Inside, Source};
use vm::definition::{BootDevice, CloneKind, Definition, Link, Platform, Seed, Vnc, VncTls, WriteErrors};
use vm::edit::Edit;
use vm::import::Note;
use vm::import::plan::Plan;
use vm::machine::MachineState;
use vm::snapshots::Record;

/// An operation on machines, with the paths that it needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRequest {
    /// Path of QEMU.
    pub qemu: PathBuf,
    /// Folder for the memory files of machines; the default one if `None`.
    pub memory_folder: Option<PathBuf>,
    /// The operation.
    pub verb: MachineVerb,
}

/// A snapshot of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSnapshot {
    /// The machine.
    pub machine: String,
    /// The snapshot's name.
    pub name: String,
}

/// Operations on machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum MachineVerb {
    /// Create a machine.
    Create(NewMachine),
    /// Import machines of other programs.
    Import(MachineImport),
    /// Change a machine.
    Edit {
        /// The machine's name.
        name: String,
        /// What to change.
        edit: Edit,
    },
    /// Rename a machine that is off.
    Rename {
        /// The machine's name.
        name: String,
        /// The machine's new name.
        to: String,
    },
    /// Write a machine that does not run, or a snapshot of one, into an archive.
    Export {
        /// The machine, or its snapshot.
        source: Source,
        /// Absolute path of the archive, `NAME.ova`.
        path: PathBuf,
        /// Limit in bytes per second; 0 for none.
        rate: u64,
    },
    /// Back up a machine to a repository.
    BackUp(MachineBackup),
    /// Restore a machine from a repository.
    Restore(MachineRestore),
    /// Start machines. A frozen machine continues where it was frozen.
    Start {
        /// The machines.
        names: Vec<String>,
        /// Start all machines that are marked to start with the host, instead of `names`.
        autostart: bool,
        /// Start with the guests paused.
        paused: bool,
    },
    /// Stop machines.
    Stop {
        /// The machines.
        names: Vec<String>,
        /// Stop all machines that run, instead of `names`.
        all: bool,
        /// Seconds that a guest has to shut down; `None` to power off at once.
        timeout: Option<u64>,
    },
    /// Pause guests.
    Pause {
        /// The machines.
        names: Vec<String>,
    },
    /// Resume paused guests.
    Resume {
        /// The machines.
        names: Vec<String>,
    },
    /// One machine.
    Show {
        /// The machine's name.
        name: String,
        /// Whether the front end prints all children of the machine, instead of their number and the first ones.
        children: bool,
    },
    /// All machines.
    List,
    /// Delete machines that do not run.
    Delete {
        /// The machines.
        names: Vec<String>,
        /// Keep the disks of the machines.
        keep_disks: bool,
        /// Hand over to linked clones the snapshots on which these clones are based.
        promote: bool,
        /// Delete machines whose definitions cannot be read, without their disks.
        force: bool,
    },
    /// Take a snapshot of all disks of a machine at one point in time.
    SnapshotCreate {
        /// The machine and the snapshot.
        snapshot: MachineSnapshot,
        /// Include the guest's memory.
        memory: bool,
        /// Freeze the guest's file systems through its agent, if the agent answers.
        quiesce: bool,
    },
    /// The snapshots of a machine.
    SnapshotList {
        /// The machine's name.
        name: String,
    },
    /// Delete a snapshot.
    SnapshotDelete {
        /// The snapshot.
        snapshot: MachineSnapshot,
    },
    /// Revert a machine to a snapshot.
    Revert {
        /// The snapshot.
        snapshot: MachineSnapshot,
        /// Leave the guest paused, if the snapshot has memory.
        paused: bool,
    },
    /// Make clones.
    Clone {
        /// The source of the clones.
        source: Source,
        /// Names of the clones.
        names: Vec<String>,
        /// Options of the clones.
        options: CloneOptions,
    },
    /// Make a full clone on another server.
    Send {
        /// The source of the clone.
        source: Source,
        /// The target: lamina://HOST:PORT/NAME.
        remote: String,
        /// Options of the transfer.
        how: SendHow,
        /// Freeze the guest's file systems through its agent while the snapshot is taken, if the agent answers.
        quiesce: bool,
    },
    /// Freeze a running machine: save its memory and stop its process.
    Freeze {
        /// The machine's name.
        name: String,
    },
    /// Query the location of the serial console.
    Console {
        /// The machine's name.
        name: String,
        /// Whether only the log of the console is needed; for the log, the machine need not run.
        log: bool,
    },
    /// Write a picture of a machine's screen to a file.
    Screenshot {
        /// The machine.
        name: String,
        /// Absolute path of the file, whose ending names the format: .png or .ppm.
        path: PathBuf,
    },
    /// Press keys of a machine's keyboard.
    SendKey {
        /// The machine.
        name: String,
        /// Keys or combinations such as ctrl-alt-delete, one after the other.
        keys: Vec<String>,
    },
    /// Type a text on a machine's keyboard.
    Type {
        /// The machine.
        name: String,
        /// The text.
        text: String,
    },
    /// Run a program in the guest through its agent.
    Execute {
        /// The machine's name.
        name: String,
        /// The program and its arguments.
        command: Vec<String>,
        /// Standard input of the program.
        input: Vec<u8>,
        /// Time limit of the program in seconds.
        timeout: u64,
    },
}

/// A machine to create.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewMachine {
    /// The machine's name.
    pub name: String,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Model of the CPUs with its features; `None` for the default model.
    pub cpu_model: Option<String>,
    /// Memory in bytes.
    pub memory: u64,
    /// Existing disks of the datastore for the machine.
    pub disks: Vec<String>,
    /// Capacity in bytes of a thin disk that is created with the machine's name.
    pub disk_size: Option<u64>,
    /// The machine's network cards, by the networks to which they are connected.
    pub networks: Vec<Link>,
    /// Absolute paths of images, each for a CD-ROM drive of its own.
    pub cdroms: Vec<PathBuf>,
    /// The devices that the firmware tries, in this order; empty for the usual order.
    pub boot_order: Vec<BootDevice>,
    /// The machine's firmware, the sockets of its CPUs, and its clock.
    pub platform: Platform,
    /// What QEMU does when a write of the guest fails.
    pub write_errors: WriteErrors,
    /// Absolute path of a kernel to boot without a boot loader.
    pub kernel: Option<PathBuf>,
    /// Absolute path of the initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub append: String,
    /// Where the machine's screen is served by VNC.
    pub vnc: Option<Vnc>,
    /// The certificates with which VNC is encrypted.
    pub vnc_tls: Option<VncTls>,
    /// The user as which QEMU runs; `None` for the default of the datastore.
    pub run_as: Option<String>,
    /// The configuration of cloud-init in the guest.
    pub seed: Option<Seed>,
    /// Whether to start the machine.
    pub start: bool,
}

/// Machines to import.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineImport {
    /// Absolute path of the description of a machine, of an image, or of a folder with descriptions.
    pub source: PathBuf,
    /// How the machines differ from their descriptions.
    pub options: vm::import::Options,
    /// Only report what would be done.
    pub dry_run: bool,
    /// Start the machines at once; the server copies their disks meanwhile.
    pub live: bool,
    /// Start the machines.
    pub start: bool,
    /// Limit of copied bytes per second; 0 for none.
    pub rate: u64,
}

/// Options of clones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneOptions {
    /// Kind of the clones.
    pub kind: CloneKind,
    /// How many clones are made at a time.
    pub parallel: u32,
    /// Freeze the parent's file systems through its agent while the snapshot is taken.
    pub quiesce: bool,
    /// Start the clones. Instant clones always run.
    pub start: bool,
    /// How the identity inside the guests is changed: of instant clones at once, of others at their first start.
    pub identity: Inside,
    /// The configuration of cloud-init in the guests of full and linked clones, in place of the source's.
    pub seed: Option<Seed>,
}

impl MachineVerb {
    /// Whether the request may take long.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Show { .. }
            | Self::List
            | Self::SnapshotList { .. }
            | Self::Console { .. }
            | Self::Screenshot { .. }
            | Self::SendKey { .. }
            | Self::Type { .. } => false,
            Self::Create(_)
            | Self::Import(_)
            | Self::Edit { .. }
            | Self::Rename { .. }
            | Self::Export { .. }
            | Self::BackUp(_)
            | Self::Restore(_)
            | Self::Start { .. }
            | Self::Stop { .. }
            | Self::Pause { .. }
            | Self::Resume { .. }
            | Self::Delete { .. }
            | Self::SnapshotCreate { .. }
            | Self::SnapshotDelete { .. }
            | Self::Revert { .. }
            | Self::Clone { .. }
            | Self::Send { .. }
            | Self::Freeze { .. }
            | Self::Execute { .. } => true,
        }
    }
}

/// Successful replies to requests about machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineReply {
    /// Reply to `Create`.
    Created(Box<Definition>),
    /// Reply to `Import`.
    Imported {
        /// The machines that were imported, or, in a dry run, would be.
        machines: Vec<ImportedMachine>,
        /// The descriptions or machines that failed, with their errors.
        failed: Vec<(String, Failure)>,
        /// Whether nothing was done.
        dry_run: bool,
    },
    /// Reply to `Edit`.
    Edited(Box<Definition>),
    /// Reply to `Rename`.
    Renamed {
        /// The former name.
        name: String,
        /// The definition with the new name.
        definition: Box<Definition>,
    },
    /// Reply to `Export`.
    Exported {
        /// The machine.
        machine: String,
        /// The archive.
        archive: PathBuf,
        /// Capacity of the machine's disks in bytes, in total.
        capacity: u64,
        /// Differences between the archive and the machine.
        notes: Vec<Note>,
    },
    /// Reply to `BackUp`.
    BackedUp(Box<BackedUpMachine>),
    /// Reply to `Restore`.
    Restored(Box<RestoredMachine>),
    /// Reply to operations on several machines.
    Each {
        /// Machines on which the operation succeeded.
        done: Vec<String>,
        /// Machines on which the operation failed, with the errors.
        failed: Vec<(String, Failure)>,
    },
    /// Reply to `Show`.
    Machine(Box<MachineInfo>),
    /// Reply to `List`.
    Machines(Vec<MachineSummary>),
    /// Reply to `SnapshotCreate`.
    SnapshotTaken {
        /// The machine.
        machine: String,
        /// The snapshot.
        record: Box<Record>,
        /// How long the guest was paused while its memory was captured, in milliseconds.
        stun_ms: Option<f64>,
        /// Consistency of the file systems in the snapshot; `None` if the snapshot has memory.
        quiet: Option<String>,
    },
    /// Reply to `SnapshotList`, oldest first.
    Snapshots {
        /// The machine.
        machine: String,
        /// The snapshots of the machine.
        records: Vec<Record>,
    },
    /// Reply to `SnapshotDelete`.
    SnapshotDeleted(MachineSnapshot),
    /// Reply to `Revert`.
    Reverted {
        /// The snapshot.
        snapshot: MachineSnapshot,
        /// The state of the machine after the revert.
        state: MachineState,
        /// For a guest that runs: whether its clock was set to the host's clock, or why not.
        clock: Option<Result<(), String>>,
    },
    /// Reply to `Clone`.
    Cloned(Box<Cloned>),
    /// Reply to `Send`.
    Sent {
        /// The machine.
        machine: String,
        /// The machine's name on the other server.
        name: String,
        /// Statistics of the transfer.
        sent: Sent,
        /// Consistency of the file systems, if a snapshot was taken for the transfer.
        quiet: Option<String>,
    },
    /// Reply to `Freeze`.
    Frozen {
        /// The machine's name.
        name: String,
        /// The memory image from which the machine resumes.
        image: String,
        /// How long stopping took, in milliseconds.
        stop_ms: f64,
        /// How long the snapshots of the disks took, in milliseconds.
        disks_ms: f64,
        /// How long saving device state and memory took, in milliseconds.
        state_ms: f64,
    },
    /// Reply to `Console`.
    Console {
        /// The machine's name.
        name: String,
        /// The socket of the machine's serial port, which accepts one connection at a time.
        socket: PathBuf,
        /// The file that is locked while a process is connected to the socket.
        lock: PathBuf,
        /// Output of the port since the machine was started; the file does not exist before the machine's first start.
        log: PathBuf,
    },
    /// Reply to `Screenshot`.
    Screenshot {
        /// The machine.
        name: String,
        /// The file.
        path: PathBuf,
    },
    /// Reply to `SendKey` and `Type`.
    KeysSent {
        /// The machine.
        name: String,
    },
    /// Reply to `Execute`.
    Executed {
        /// The machine's name.
        name: String,
        /// The outcome of running the program.
        execution: Execution,
    },
}

/// A machine that was imported, or, in a dry run, would be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImportedMachine {
    /// The plan of the machine.
    pub plan: Plan,
    /// The snapshots that were imported; in a dry run, the snapshots of the source.
    pub snapshots: Vec<String>,
    /// Whether the machine was started.
    pub started: bool,
}

/// State of a machine, including states that cannot be seen from its process alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineActivity {
    /// The machine has no process.
    Stopped,
    /// The machine has no process, but a saved memory image from which it can continue.
    Frozen,
    /// The machine's guest executes.
    Running,
    /// The machine's guest is paused.
    Paused,
    /// The machine's process is waiting for a saved state to be loaded, has failed, or does not answer.
    Busy,
}

impl MachineActivity {
    /// The state's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Frozen => "frozen",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Busy => "busy",
        }
    }
}

/// A machine in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineSummary {
    /// The machine's name.
    pub name: String,
    /// The machine's definition, or why it cannot be read.
    pub definition: Result<Definition, Failure>,
    /// The machine's state.
    pub state: MachineActivity,
}

/// Where the memory of a running machine is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineMemory {
    /// In anonymous memory of the machine's QEMU process.
    Private,
    /// In a file that only this machine uses.
    OwnFile,
    /// In a memory image that is shared with other machines and mapped copy-on-write.
    Shared,
}

/// All information about one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// The machine's definition.
    pub definition: Definition,
    /// The machine's state.
    pub state: MachineActivity,
    /// Process id of the machine's QEMU.
    pub pid: Option<i32>,
    /// Version of the installed QEMU; `None` if no usable one is found.
    pub qemu: Option<String>,
    /// The accelerator that executes guests.
    pub accelerator: String,
    /// Why KVM is not used.
    pub why_not_kvm: Option<String>,
    /// Socket of the serial console, while the machine runs.
    pub console: Option<PathBuf>,
    /// Socket of VNC, while the machine runs and has VNC on a socket.
    pub vnc: Option<PathBuf>,
    /// The file with the password of VNC, if the machine has VNC on a TCP port.
    pub vnc_password: Option<PathBuf>,
    /// Socket of QEMU's monitor, while the machine runs.
    pub monitor: Option<PathBuf>,
    /// Socket of the guest's agent, while the machine runs.
    pub agent: Option<PathBuf>,
    /// The log of the console.
    pub console_log: PathBuf,
    /// The log of QEMU.
    pub log: PathBuf,
    /// Capacity of each of the machine's disks that exists.
    pub capacities: Vec<(String, u64)>,
    /// Where the machine's memory is stored, while it runs.
    pub memory: Option<MachineMemory>,
    /// Whether passt provides the user networks of the running machine, or would provide the user networks if the
    /// machine started now; otherwise an error with the reason. `None` if the machine has no user network.
    pub passt: Option<Result<(), String>>,
    /// The machine's snapshots.
    pub snapshots: Vec<Record>,
    /// The memory image to which the machine was frozen.
    pub frozen: Option<String>,
    /// The memory image from which the machine continues, or whose pages its memory shares.
    pub image: Option<String>,
    /// Snapshots of the machine's disks, each with a linked clone that is based on it.
    pub children: Vec<(String, String)>,
    /// The machine's folder.
    pub folder: PathBuf,
}

/// A clone that was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClonedMachine {
    /// The clone's name.
    pub name: String,
    /// Time until the clone's guest executed, in milliseconds, if the clone runs.
    pub running_ms: Option<f64>,
    /// Why the identity inside the clone's guest was not changed, although that was requested.
    pub without_identity: Option<String>,
    /// Whether lamina could not request the guest's kernel to reseed its random number generator. The kernel does so on
    /// its own within a minute.
    pub same_randomness: bool,
}

/// Result of cloning a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cloned {
    /// Kind of the clones.
    pub kind: CloneKind,
    /// The clones that were made.
    pub made: Vec<ClonedMachine>,
    /// Clones that were not made, with the errors.
    pub failed: Vec<(String, Failure)>,
    /// Consistency of the source's file systems, as one word; `None` if an existing snapshot was cloned.
    pub consistency: Option<String>,
    /// Consistency of the source's file systems, as a sentence.
    pub quiet: Option<String>,
    /// How long the source was paused, in milliseconds.
    pub stun_ms: Option<f64>,
}
