//! Arguments of the commands about machines.

use super::machine_backup::VmBackupCommand;
use super::machine_create::VmCreate;
use super::machine_edit::VmEdit;
use super::machine_import::VmImport;
use super::machine_seed::SeedArguments;
use super::send::SendArguments;
use crate::cli::address::{CLONES_MAX, NamePattern, absolute};
use crate::cli::size::parse_rate;
use clap::{Args, Subcommand, ValueEnum};
use control::{CloneOptions, MachineRequest, MachineSnapshot, MachineVerb, Request};
use replication::Remote;
use std::io::Read;
use std::path::PathBuf;
use vm::clone::{Inside, Source};
use vm::definition::CloneKind;

/// Most bytes of standard input that are passed to a program in the guest.
const INPUT_MAX: u64 = 1 << 20;

/// Parses the name of a machine.
pub fn parse_machine(text: &str) -> Result<String, String> {
    vm::definition::check_name(text).map(|()| text.to_owned()).map_err(|error| error.to_string())
}

/// Parses a number of seconds.
fn parse_seconds(text: &str) -> Result<u64, String> {
    text.strip_suffix('s').unwrap_or(text).parse().map_err(|_| format!("'{text}' is no number of seconds"))
}

/// Parses a machine or a snapshot of one: `VM` or `VM@SNAPSHOT`.
pub fn parse_source(text: &str) -> Result<Source, String> {
    let Some((machine, snapshot)) = text.split_once('@') else {
        return Ok(Source { machine: parse_machine(text)?, snapshot: None });
    };
    vm::snapshots::check_name(snapshot).map_err(|error| error.to_string())?;
    Ok(Source { machine: parse_machine(machine)?, snapshot: Some(snapshot.to_owned()) })
}

/// Parses a snapshot of a machine: `VM@SNAPSHOT`.
fn parse_snapshot(text: &str) -> Result<MachineSnapshot, String> {
    match parse_source(text)? {
        Source { machine, snapshot: Some(name) } => Ok(MachineSnapshot { machine, name }),
        Source { snapshot: None, .. } => Err("a snapshot of a machine is written VM@SNAPSHOT".into()),
    }
}

/// `lamina vm`.
#[derive(Debug, Args)]
pub struct VmArguments {
    /// Path of the QEMU to use.
    #[arg(long, global = true, value_name = "PROGRAM", env = "LAMINA_QEMU", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// Folder for the memory files of machines, on a file system in memory. Default: /dev/shm.
    #[arg(long, global = true, value_name = "PATH", env = "LAMINA_MEMORY")]
    pub memory_folder: Option<PathBuf>,
    /// The command.
    #[command(subcommand)]
    pub command: VmCommand,
}

impl VmArguments {
    /// The request; an error if the arguments contradict each other.
    pub fn request(&self) -> Result<Request, String> {
        let verb = self.command.verb()?;
        Ok(Request::Machine(Box::new(MachineRequest {
            qemu: self.qemu.clone(),
            memory_folder: self.memory_folder.clone(),
            verb,
        })))
    }
}

/// Meaning of the exit codes of `vm exec`.
const EXEC_CODES: &str = "\
Exit codes:
  124      the program has not ended within --timeout
  125      lamina failed, or the agent lost a part of the program's output
  126      the program cannot be started in the guest
  127      the guest has no such program
  128 + N  signal N ended the program
  others   those of the program
With --json, the member 'exit_code' has the program's exit code, and is null if there is none.";

/// Subcommands of `lamina vm`.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Create a machine.
    Create(VmCreate),
    /// Create machines from machines of VMware, VirtualBox and libvirt, or from a disk image, with the hardware of the
    /// source.
    Import(VmImport),
    /// Change a machine. Disks, network cards and images in CD-ROM drives can be changed while the machine runs, the
    /// rest while it is off.
    Edit(VmEdit),
    /// Rename a machine that is off. Its disks and snapshots keep their names.
    Rename {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// New name of the machine.
        #[arg(value_name = "NEW_NAME", value_parser = parse_machine)]
        to: String,
    },
    /// Write a machine that does not run, or a snapshot of a machine, into an OVA archive for other programs.
    Export {
        /// The machine, VM, or its snapshot, VM@SNAPSHOT.
        #[arg(value_name = "SOURCE", value_parser = parse_source)]
        source: Source,
        /// The archive, which does not exist yet: NAME.ova.
        #[arg(value_name = "FILE")]
        path: PathBuf,
        /// Limit of read bytes per second, such as 100M.
        #[arg(long, value_name = "SIZE", value_parser = parse_rate, default_value = "0")]
        rate: u64,
    },
    /// Back up machines to a repository, and restore them. 'lamina backup' lists, verifies and deletes the backups.
    #[command(subcommand)]
    Backup(VmBackupCommand),
    /// Start machines. A frozen machine continues where it was frozen.
    Start {
        /// The machines.
        #[arg(required_unless_present = "autostart", value_name = "VM", value_parser = parse_machine)]
        names: Vec<String>,
        /// Start all machines that 'edit --autostart on' has marked and that do not run, as after a start of the host.
        #[arg(long, conflicts_with = "names")]
        autostart: bool,
        /// Start with the guest paused; 'resume' runs the guest.
        #[arg(long)]
        paused: bool,
    },
    /// Stop machines: their guests are requested to shut down.
    Stop {
        /// The machines.
        #[arg(required_unless_present = "all", value_name = "VM", value_parser = parse_machine)]
        names: Vec<String>,
        /// Stop all machines that run.
        #[arg(long, conflicts_with = "names")]
        all: bool,
        /// Power off at once; data that guests have not flushed is lost.
        #[arg(long)]
        force: bool,
        /// Seconds that a guest has to shut down.
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "60", conflicts_with = "force")]
        timeout: u64,
    },
    /// Pause guests.
    Pause {
        /// The machines.
        #[arg(required = true, value_name = "VM", value_parser = parse_machine)]
        names: Vec<String>,
    },
    /// Resume paused guests.
    Resume {
        /// The machines.
        #[arg(required = true, value_name = "VM", value_parser = parse_machine)]
        names: Vec<String>,
    },
    /// Show one machine: definition, state, process and clones.
    Show {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// Print all clones that are based on the machine, instead of the first ten.
        #[arg(long)]
        children: bool,
    },
    /// List all machines.
    List,
    /// Delete machines that do not run, with their disks.
    Delete {
        /// The machines.
        #[arg(required = true, value_name = "VM", value_parser = parse_machine)]
        names: Vec<String>,
        /// Keep the disks in the datastore.
        #[arg(long)]
        keep_disks: bool,
        /// Hand over to linked clones the snapshots on which these clones are based.
        #[arg(long, conflicts_with = "keep_disks")]
        promote: bool,
        /// Delete also a machine whose definition is missing or cannot be read. Its disks stay.
        #[arg(long)]
        force: bool,
    },
    /// Take and manage snapshots of machines.
    #[command(subcommand)]
    Snapshot(VmSnapshotCommand),
    /// Revert a machine to a snapshot. Its current state is lost.
    Revert {
        /// The snapshot, VM@SNAPSHOT.
        #[arg(value_name = "VM@SNAPSHOT", value_parser = parse_snapshot)]
        snapshot: MachineSnapshot,
        /// If the snapshot has memory: keep the guest paused until 'resume'.
        #[arg(long)]
        paused: bool,
    },
    /// Clone a machine from its current state or from a snapshot.
    Clone(VmClone),
    /// Freeze a running machine: its process ends, and instant clones and the machine itself continue from this state.
    Freeze {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
    },
    /// Attach to the serial console; Ctrl-] detaches.
    Console {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// Print the console's output so far, and exit.
        #[arg(long)]
        said: bool,
        /// Exit after this many seconds without output, if input is not a terminal and has ended.
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "3")]
        quiet: u64,
    },
    /// Write a picture of the screen to a file. The machine needs a graphics card, which 'edit --vnc' adds.
    Screenshot {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// The file, named .png or .ppm.
        #[arg(value_name = "FILE")]
        path: PathBuf,
    },
    /// Press keys on the keyboard of a machine.
    SendKey {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// Keys and combinations, such as ctrl-alt-delete, f2 or ret, one after the other.
        #[arg(required = true, value_name = "KEYS")]
        keys: Vec<String>,
    },
    /// Type a text on the keyboard of a machine. The keyboard has the layout of the USA.
    Type {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// The text.
        #[arg(value_name = "TEXT", allow_hyphen_values = true)]
        text: String,
        /// Press Return at the end.
        #[arg(long)]
        enter: bool,
    },
    /// Run a program in the guest through its agent. Exits with the program's exit code.
    #[command(after_help = EXEC_CODES)]
    Exec {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
        /// Pass standard input to the program.
        #[arg(short, long)]
        input: bool,
        /// Time limit of the program in seconds.
        #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "60")]
        timeout: u64,
        /// The program and its arguments, after '--'.
        #[arg(required = true, last = true, value_name = "COMMAND")]
        command: Vec<String>,
    },
}

impl VmCommand {
    fn verb(&self) -> Result<MachineVerb, String> {
        Ok(match self {
            Self::Create(create) => MachineVerb::Create(create.new_machine()?),
            Self::Import(import) => MachineVerb::Import(import.request()?),
            Self::Export { source, path, rate } => {
                MachineVerb::Export { source: source.clone(), path: absolute(path)?, rate: *rate }
            }
            Self::Backup(command) => command.verb()?,
            Self::Edit(edit) => edit.verb()?,
            Self::Rename { name, to } => MachineVerb::Rename { name: name.clone(), to: to.clone() },
            Self::Start { names, autostart, paused } => {
                MachineVerb::Start { names: names.clone(), autostart: *autostart, paused: *paused }
            }
            Self::Stop { names, all, force, timeout } => {
                MachineVerb::Stop { names: names.clone(), all: *all, timeout: (!*force).then_some(*timeout) }
            }
            Self::Pause { names } => MachineVerb::Pause { names: names.clone() },
            Self::Resume { names } => MachineVerb::Resume { names: names.clone() },
            Self::Show { name, children } => MachineVerb::Show { name: name.clone(), children: *children },
            Self::List => MachineVerb::List,
            Self::Delete { names, keep_disks, promote, force } => {
                MachineVerb::Delete { names: names.clone(), keep_disks: *keep_disks, promote: *promote, force: *force }
            }
            Self::Snapshot(command) => command.verb(),
            Self::Revert { snapshot, paused } => MachineVerb::Revert { snapshot: snapshot.clone(), paused: *paused },
            Self::Clone(clone) => clone.verb()?,
            Self::Freeze { name } => MachineVerb::Freeze { name: name.clone() },
            Self::Console { name, said, .. } => MachineVerb::Console { name: name.clone(), log: *said },
            Self::Screenshot { name, path } => MachineVerb::Screenshot { name: name.clone(), path: absolute(path)? },
            Self::SendKey { name, keys } => MachineVerb::SendKey { name: name.clone(), keys: keys.clone() },
            Self::Type { name, text, enter } => {
                MachineVerb::Type { name: name.clone(), text: format!("{text}{}", if *enter { "\n" } else { "" }) }
            }
            Self::Exec { name, input, timeout, command } => MachineVerb::Execute {
                name: name.clone(),
                command: command.clone(),
                input: if *input { read_input()? } else { Vec::new() },
                timeout: *timeout,
            },
        })
    }
}

fn read_input() -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().take(INPUT_MAX + 1).read_to_end(&mut bytes);
    read.map(|_| bytes).map_err(|error| format!("reading the input: {error}"))
}

/// Verbs of a machine's snapshots.
#[derive(Debug, Subcommand)]
pub enum VmSnapshotCommand {
    /// Take a snapshot of all disks at one point in time.
    Create {
        /// The machine and the snapshot, VM@SNAPSHOT.
        #[arg(value_name = "VM@SNAPSHOT", value_parser = parse_snapshot)]
        snapshot: MachineSnapshot,
        /// Include the guest's memory: after a revert to the snapshot, the guest continues with that memory.
        #[arg(long, conflicts_with = "quiesce")]
        memory: bool,
        /// Freeze the guest's file systems through its agent while the snapshot is taken, if the agent answers.
        #[arg(long)]
        quiesce: bool,
    },
    /// List the snapshots of a machine.
    List {
        /// The machine.
        #[arg(value_name = "VM", value_parser = parse_machine)]
        name: String,
    },
    /// Delete a snapshot. Refused if clones are based on the snapshot.
    Delete {
        /// The snapshot, VM@SNAPSHOT.
        #[arg(value_name = "VM@SNAPSHOT", value_parser = parse_snapshot)]
        snapshot: MachineSnapshot,
    },
}

impl VmSnapshotCommand {
    fn verb(&self) -> MachineVerb {
        match self {
            Self::Create { snapshot, memory, quiesce } => {
                MachineVerb::SnapshotCreate { snapshot: snapshot.clone(), memory: *memory, quiesce: *quiesce }
            }
            Self::List { name } => MachineVerb::SnapshotList { name: name.clone() },
            Self::Delete { snapshot } => MachineVerb::SnapshotDelete { snapshot: snapshot.clone() },
        }
    }
}

/// How the identity inside the guest is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IdentityArgument {
    /// Change the identity if the guest's agent answers; otherwise the clone's network stays disconnected.
    Auto,
    /// Change the identity, or fail to make the clone or to start it.
    Required,
    /// Keep the parent's identity.
    Keep,
}

/// `lamina vm clone`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("way"))]
pub struct VmClone {
    /// State to clone: VM for its current state, or VM@SNAPSHOT.
    #[arg(value_name = "SOURCE", value_parser = parse_source)]
    pub source: Source,
    /// Name of the clone; with --count the prefix of the names (NAME-0001, ...).
    #[arg(value_name = "VM", required_unless_present_any = ["name_pattern", "to"])]
    pub name: Option<String>,
    /// Make a full clone on another server, lamina://HOST:PORT/NAME, with the --tls options for that server.
    #[arg(
        long,
        value_name = "TARGET",
        conflicts_with_all = ["name", "name_pattern", "count", "linked", "instant", "start"]
    )]
    pub to: Option<Remote>,
    /// Options of the transfer to another server.
    #[command(flatten)]
    pub how: SendArguments,
    /// Make linked clones, whose disks are deltas on a snapshot of the source's disks (default).
    #[arg(long, group = "way")]
    pub linked: bool,
    /// Make full clones, with independent copies of the source's disks.
    #[arg(long, group = "way")]
    pub full: bool,
    /// Make instant clones, which run and share the source's disks and memory copy-on-write.
    #[arg(long, group = "way")]
    pub instant: bool,
    /// Number of clones.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(CLONES_MAX)))]
    pub count: Option<u32>,
    /// Number of full clones that are copied at a time, or of other clones that are started at a time.
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub parallel: u32,
    /// Names of the clones, numbered from 1, such as 'web-%03d'.
    #[arg(long, value_name = "PATTERN", conflicts_with = "name")]
    pub name_pattern: Option<NamePattern>,
    /// Start the clones. Instant clones always run.
    #[arg(long)]
    pub start: bool,
    /// Freeze the source's file systems through its agent while its state is captured, if the agent answers.
    #[arg(long, conflicts_with = "instant")]
    pub quiesce: bool,
    /// Whether the guest's agent gives each clone a new host name, machine id and SSH host keys: instant clones at once
    /// (default: auto), others at their first start (default: keep).
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with = "to")]
    pub identity: Option<IdentityArgument>,
    /// The configuration of cloud-init in the guests of the clones, in place of the source's configuration.
    #[command(flatten)]
    pub seed: SeedArguments,
}

impl VmClone {
    fn verb(&self) -> Result<MachineVerb, String> {
        let source = self.source.clone();
        let seed = self.seed.seed()?;
        if seed.is_some() && (self.instant || self.to.is_some()) {
            return Err(
                "--user-data, --ssh-key and --hostname are for linked and full clones on this server: an instant \
                        clone continues a guest that has started"
                    .into(),
            );
        }
        if let Some(remote) = &self.to {
            let how = self.how.how()?;
            return Ok(MachineVerb::Send { source, remote: remote.to_string(), how, quiesce: self.quiesce });
        }
        let options = CloneOptions {
            kind: match (self.full, self.instant) {
                (true, _) => CloneKind::Full,
                (_, true) => CloneKind::Instant,
                _ => CloneKind::Linked,
            },
            parallel: self.parallel,
            quiesce: self.quiesce,
            start: self.start,
            identity: match self.identity {
                None if self.instant => Inside::IfAgent,
                Some(IdentityArgument::Auto) => Inside::IfAgent,
                Some(IdentityArgument::Required) => Inside::Required,
                None | Some(IdentityArgument::Keep) => Inside::Kept,
            },
            seed,
        };
        Ok(MachineVerb::Clone { source, names: self.names()?, options })
    }

    /// The names of the clones.
    fn names(&self) -> Result<Vec<String>, String> {
        match (&self.name, &self.name_pattern, self.count) {
            (_, Some(pattern), count) => Ok((1..=count.unwrap_or(1)).map(|number| pattern.name(number)).collect()),
            (Some(name), None, None) => parse_machine(name).map(|name| vec![name]),
            (Some(name), None, Some(count)) => {
                let pattern = NamePattern::numbered(name);
                Ok((1..=count).map(|number| pattern.name(number)).collect())
            }
            (None, None, _) => Err("a clone needs a name".into()),
        }
    }
}
