//! What can be asked of virtual machines, and how it ends.
//!
//! A machine's QEMU is started by the process that asks, never by the server of the datastore, so that it depends on
//! neither (`docs/adr/0015-machines-without-a-daemon.md`). These requests do not cross the control socket; what they
//! need of disks does.

use super::line::Failure;
use super::send::SendHow;
use replication::Sent;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use vm::clone::{Inside, Source};
use vm::definition::{CloneKind, Definition, Link};
use vm::machine::MachineState;
use vm::snapshots::Record;

/// A verb of machines, and what it works with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRequest {
    /// The QEMU to run machines with.
    pub qemu: PathBuf,
    /// Folder for the memory of machines; the default one if nothing is said.
    pub memory_folder: Option<PathBuf>,
    /// What to do.
    pub verb: MachineVerb,
}

/// A snapshot of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSnapshot {
    /// The machine.
    pub machine: String,
    /// Its snapshot.
    pub name: String,
}

/// What is done with machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum MachineVerb {
    /// Make a machine.
    Create(NewMachine),
    /// Start machines; a frozen one resumes where it stopped.
    Start {
        /// The machines.
        names: Vec<String>,
        /// Their guests do not execute yet.
        paused: bool,
    },
    /// Stop machines.
    Stop {
        /// The machines.
        names: Vec<String>,
        /// Seconds that a guest has to power itself off; `None` for power off at once.
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
        /// The machine.
        name: String,
    },
    /// All machines.
    List,
    /// Delete machines that do not run.
    Delete {
        /// The machines.
        names: Vec<String>,
        /// Their disks stay.
        keep_disks: bool,
        /// Give the snapshots that clones stand on to the clones.
        promote: bool,
    },
    /// Take a snapshot of all disks at one point.
    SnapshotCreate {
        /// The machine and the snapshot.
        snapshot: MachineSnapshot,
        /// With the guest's memory.
        memory: bool,
        /// With the guest's file systems frozen by its agent, if that answers.
        quiesce: bool,
    },
    /// The snapshots of a machine.
    SnapshotList {
        /// The machine.
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
        /// A guest whose memory the snapshot has stays paused.
        paused: bool,
    },
    /// Make clones.
    Clone {
        /// What is cloned.
        source: Source,
        /// Names of the clones.
        names: Vec<String>,
        /// How.
        options: CloneOptions,
    },
    /// Make a full clone at another server.
    Send {
        /// What is cloned.
        source: Source,
        /// Where to: lamina://HOST:PORT/NAME.
        remote: String,
        /// How it is sent.
        how: SendHow,
        /// With the guest's file systems frozen by its agent around the moment, if that answers.
        quiesce: bool,
    },
    /// Freeze a running machine.
    Freeze {
        /// The machine.
        name: String,
    },
    /// Where the serial console is.
    Console {
        /// The machine.
        name: String,
        /// Only what the console has written so far is wanted: the machine need not run.
        log: bool,
    },
    /// Run a program in the guest, through its agent.
    Execute {
        /// The machine.
        name: String,
        /// The program and its arguments.
        command: Vec<String>,
        /// What the program reads from its standard input.
        input: Vec<u8>,
        /// Seconds that it may take.
        timeout: u64,
    },
}

/// A machine to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewMachine {
    /// Its name.
    pub name: String,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// Disks of the datastore that it gets.
    pub disks: Vec<String>,
    /// Capacity in bytes of a thin disk that is made for it, with its name.
    pub disk_size: Option<u64>,
    /// Its network cards.
    pub networks: Vec<Link>,
    /// A kernel to boot without a boot loader: an absolute path, as for its initial RAM disk.
    pub kernel: Option<PathBuf>,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub append: String,
    /// Start it.
    pub start: bool,
}

/// How clones are made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneOptions {
    /// Which kind.
    pub kind: CloneKind,
    /// So many at a time.
    pub parallel: u32,
    /// The parent's file systems are frozen by its agent around the moment.
    pub quiesce: bool,
    /// They are started. Instant clones run in any case.
    pub start: bool,
    /// What becomes of the identity inside the guests of instant clones.
    pub identity: Inside,
}

impl MachineVerb {
    /// True for what may take longer than a moment.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Show { .. } | Self::List | Self::SnapshotList { .. } | Self::Console { .. } => false,
            Self::Create(_)
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

/// The good end of a request about machines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineReply {
    /// Of `Create`.
    Created(Definition),
    /// Of what is done to each of several machines.
    Each {
        /// Those with which it was done.
        done: Vec<String>,
        /// The others, and why not.
        failed: Vec<(String, Failure)>,
    },
    /// Of `Show`.
    Machine(Box<MachineInfo>),
    /// Of `List`.
    Machines(Vec<MachineSummary>),
    /// Of `SnapshotCreate`.
    SnapshotTaken {
        /// The machine.
        machine: String,
        /// The snapshot.
        record: Record,
        /// How long its guest stood still for its memory's sake, in milliseconds.
        stun_ms: Option<f64>,
        /// How quiet the guest was; `None` where its memory was taken.
        quiet: Option<String>,
    },
    /// Of `SnapshotList`, the oldest first.
    Snapshots {
        /// The machine.
        machine: String,
        /// Its snapshots.
        records: Vec<Record>,
    },
    /// Of `SnapshotDelete`.
    SnapshotDeleted(MachineSnapshot),
    /// Of `Revert`.
    Reverted {
        /// The snapshot.
        snapshot: MachineSnapshot,
        /// What the machine does now.
        state: MachineState,
    },
    /// Of `Clone`.
    Cloned(Box<Cloned>),
    /// Of `Send`.
    Sent {
        /// The machine.
        machine: String,
        /// Its name there.
        name: String,
        /// How it went.
        sent: Sent,
        /// How quiet the guest was, where its disks were taken for this.
        quiet: Option<String>,
    },
    /// Of `Freeze`.
    Frozen {
        /// The machine.
        name: String,
        /// The image that it resumes from.
        image: String,
        /// How long stopping took, in milliseconds.
        stop_ms: f64,
        /// How long the snapshots of the disks took.
        disks_ms: f64,
        /// How long saving device state and memory took.
        state_ms: f64,
    },
    /// Of `Console`.
    Console {
        /// The machine.
        name: String,
        /// The socket of its serial port, which takes one connection at a time.
        socket: PathBuf,
        /// The file that is locked while a process is connected to the socket.
        lock: PathBuf,
        /// What the port has written since the machine was started; absent before its first start.
        log: PathBuf,
    },
    /// Of `Execute`.
    Executed {
        /// The exit code; `None` when a signal ended the program.
        code: Option<i64>,
        /// What it wrote to its standard output.
        output: Vec<u8>,
        /// What it wrote to its standard error.
        errors: Vec<u8>,
    },
}

/// What a machine does, with what the process alone does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineActivity {
    /// It has no process.
    Stopped,
    /// It has no process, and an image that it resumes from.
    Frozen,
    /// Its guest executes.
    Running,
    /// Its guest stands still.
    Paused,
    /// Its process waits for a state to be loaded, failed, or does not answer.
    Busy,
}

impl MachineActivity {
    /// The word for it.
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
    /// What it is.
    pub definition: Definition,
    /// What it does.
    pub state: MachineActivity,
}

/// Where the memory of a running machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineMemory {
    /// In its process.
    Private,
    /// In a file of its own.
    OwnFile,
    /// Copy-on-write above an image that it shares.
    Shared,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// What it is.
    pub definition: Definition,
    /// What it does.
    pub state: MachineActivity,
    /// Its process.
    pub pid: Option<i32>,
    /// Version of the QEMU found here; `None` where there is none that can be used.
    pub qemu: Option<String>,
    /// What executes guests.
    pub accelerator: String,
    /// Why that is not KVM.
    pub why_not_kvm: Option<String>,
    /// Socket of its serial console, while it runs.
    pub console: Option<PathBuf>,
    /// Socket of QEMU's monitor, while it runs.
    pub monitor: Option<PathBuf>,
    /// Socket of the guest's agent, while it runs.
    pub agent: Option<PathBuf>,
    /// What the console has written.
    pub console_log: PathBuf,
    /// What QEMU has written.
    pub log: PathBuf,
    /// Capacity of each disk that is there.
    pub capacities: Vec<(String, u64)>,
    /// Where its memory is, while it runs.
    pub memory: Option<MachineMemory>,
    /// Its snapshots.
    pub snapshots: Vec<Record>,
    /// The image that it was frozen to.
    pub frozen: Option<String>,
    /// The image that it resumes from, or that its memory is above.
    pub image: Option<String>,
    /// Snapshots of its disks, and what are linked clones of them.
    pub children: Vec<(String, String)>,
    /// Its folder.
    pub folder: PathBuf,
}

/// A clone that was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClonedMachine {
    /// Its name.
    pub name: String,
    /// How long it took until its guest executed, in milliseconds, where it does.
    pub running_ms: Option<f64>,
    /// Why its guest does not have a new identity, where it should.
    pub without_identity: Option<String>,
    /// Its guest's kernel could not be told to reseed its random numbers, and does so only within a minute.
    pub same_randomness: bool,
}

/// What became of clones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cloned {
    /// Which kind.
    pub kind: CloneKind,
    /// Those that were made.
    pub made: Vec<ClonedMachine>,
    /// Those that were not, and why.
    pub failed: Vec<(String, Failure)>,
    /// In a word, how quiet the source was when its disks were taken; `None` where an existing snapshot was cloned.
    pub consistency: Option<String>,
    /// The same as a sentence.
    pub quiet: Option<String>,
    /// How long the source stood still, in milliseconds.
    pub stun_ms: Option<f64>,
}
