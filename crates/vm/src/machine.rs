//! A machine: its folder, its process, and its operations.
//!
//! ```text
//! NAME/machine.toml   the definition
//! NAME/run            link to the folder of its current process: run.1, run.2, ..
//! NAME/run.N/         pid file, sockets, logs, and `memory`, which names the guest's memory file
//! NAME/snapshots/     its snapshots
//! NAME/nvram          the variables of its UEFI, if it has UEFI
//! NAME/vnc-password   the password of VNC, if VNC listens on a TCP port
//! NAME/held           exists while a command has the guest paused: if it is killed, the next command resumes the guest
//! ```
//!
//! 1. A machine runs if the process of its folder `run` is alive. There is no other record of this state that could
//!    contradict it.
//! 2. A new process becomes the machine's process when the link is replaced, so that at every moment the machine has
//!    exactly one process.
//! 3. Changes of a machine are serialized ([`Machine::change`]); reading its state does not wait for a change.
//! 4. A process that the link does not name never executes the guest: it is a successor that did not take over, or the
//!    previous process, whose guest is paused. The next change of the machine ends such a process ([`Change::sweep`]).
//! 5. If a command that has paused a guest is killed, the next command resumes the guest.
//! 6. Root changes no machine of another user, and so neither starts nor ends processes of the machine.

use crate::agent::Agent;
use crate::busy::while_busy;
use crate::definition::{self, Definition};
use crate::durable;
use crate::held::HELD;
pub use crate::held::{Hold, Holding};
use crate::machines::FOLDER;
use crate::media;
use crate::nvram;
use crate::qemu::command::{self, Memory, RunFolder};
use crate::qemu::features::Features;
use crate::qemu::firmware::Uefi;
use crate::qemu::network;
use crate::qemu::passt::{self, Passt};
use crate::qemu::process::{Process, Starting};
use crate::qmp::Client;
use crate::{screen, seed, user};
use backend::{private, regular};
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the definition's file.
pub const DEFINITION: &str = "machine.toml";
/// Name of the link to the folder of the current process.
const RUN: &str = "run";
/// Longest path of a Unix socket on Linux, in bytes.
const SOCKET_PATH_MAX: usize = 107;
/// How long QEMU may take to answer after it was started.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Attempts to remove a folder while a process that is ending creates files in it.
const REMOVALS_MAX: u32 = 10;
/// How long QEMU's monitor may take to answer.
const MONITOR_PATIENCE: Duration = Duration::from_secs(20);

/// How long QEMU's monitor may take to answer when the states of all machines are listed. A busy monitor must not delay
/// the list.
const GLANCE_PATIENCE: Duration = Duration::from_millis(500);

/// The state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MachineState {
    /// The machine has no process.
    Stopped,
    /// The machine's guest executes.
    Running,
    /// The machine's guest is paused.
    Paused,
    /// The machine's process is waiting for a state to be loaded, or has failed.
    Other,
}

/// A machine.
#[derive(Clone, Debug)]
pub struct Machine {
    folder: PathBuf,
}

/// The memory of a process, as recorded in its run folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryRecord {
    /// Anonymous memory of the process.
    Private,
    /// A file that belongs to this machine and is removed together with the machine.
    Own(PathBuf),
    /// The memory image with that name, mapped copy-on-write.
    Image(String),
}

/// A machine that is locked for changes.
pub struct Change {
    machine: Machine,
    /// The lock, released when this value is dropped.
    _lock: fs::File,
}

/// Parameters of a new process.
pub struct Start<'a> {
    /// The QEMU to start.
    pub features: &'a Features,
    /// The NBD server that exports the machine's disks.
    pub nbd: &'a Path,
    /// The machine's memory.
    pub memory: Memory,
    /// The record of the memory in the run folder.
    pub record: MemoryRecord,
    /// Whether the process waits for a saved state to be loaded.
    pub incoming: bool,
    /// Whether passt may serve the user networks.
    pub passt: bool,
}

/// A process that is set up but is not the machine's current process yet.
pub struct Successor {
    /// The run folder of the process.
    pub run: RunFolder,
    /// A connection to the monitor of the process.
    pub monitor: Client,
    /// The process.
    pub process: Process,
}

impl Machine {
    /// The machine in an existing folder.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The machine's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The machine's definition. The error for a missing or wrong definition says what to do.
    pub fn definition(&self) -> Result<Definition> {
        self.read_definition().map_err(|error| match error.kind() {
            ErrorKind::Io => error,
            _ => {
                let text = format!(
                    "machine '{0}' is broken: {error}; correct the file, or delete the machine without its disks with \
                     'lamina vm delete {0} --force'",
                    self.name()
                );
                Error::new(error.kind(), text)
            }
        })
    }

    /// The machine's definition. Errors say only what is wrong with the definition.
    pub fn read_definition(&self) -> Result<Definition> {
        let path = self.folder.join(DEFINITION);
        let definition = Definition::parse(&definition_text(&path)?, &path.display().to_string())?;
        // If a rename was interrupted, the file still has the former name.
        Ok(Definition { name: self.name(), ..definition })
    }

    /// The disks that the text of the machine's definition names, even if the text is not a valid definition.
    pub fn named_disks(&self) -> Vec<String> {
        let text = definition_text(&self.folder.join(DEFINITION));
        text.map(|text| definition::named_disks(&text)).unwrap_or_default()
    }

    /// Locks the machine for changes; waits up to `patience` while another command has it locked.
    pub fn change_within(&self, patience: Duration) -> Result<Change> {
        while_busy(patience, || self.change())
    }

    /// Locks the machine for changes. `Busy` if another command has locked it; `Invalid` if this process is root and
    /// the machine belongs to another user.
    pub fn change(&self) -> Result<Change> {
        self.check_owner()?;
        let lock = fs::File::open(&self.folder).during(|| format!("opening '{}'", self.folder.display()))?;
        self.locked(lock)
    }

    /// Locks the machine by its open folder. `Busy` also if the folder was renamed or deleted since it was opened: the
    /// machine that has this name now is not locked then.
    pub(crate) fn locked(&self, lock: fs::File) -> Result<Change> {
        match lock.try_lock() {
            Ok(()) => {
                let looking = || format!("looking at '{}'", self.folder.display());
                let (locked, there) = (lock.metadata().during(looking)?, fs::metadata(&self.folder).during(looking)?);
                if (locked.dev(), locked.ino()) != (there.dev(), there.ino()) {
                    let text = format!("machine '{}' was just replaced by another machine; try again", self.name());
                    return Err(Error::new(ErrorKind::Busy, text));
                }
                Ok(Change { machine: self.clone(), _lock: lock })
            }
            Err(fs::TryLockError::WouldBlock) => {
                let text = format!("machine '{}' is being changed by another command; try again", self.name());
                Err(Error::new(ErrorKind::Busy, text))
            }
            Err(fs::TryLockError::Error(e)) => Err(Error::io(format!("locking machine '{}'", self.name()), e)),
        }
    }

    /// Fails if this process is root and the machine belongs to another user. This user decides what QEMU opens, and
    /// can replace the run folders by links, so that a QEMU of root would write to any file, or root would end any
    /// process.
    pub(crate) fn check_owner(&self) -> Result<()> {
        // The folder of the machine, the folder in which the machine is created or deleted, the folder of all machines,
        // and the datastore's folder. A machine can have the name of the folder of all machines.
        let between = self.folder.ancestors().skip(1).position(|folder| folder.ends_with(FOLDER)).unwrap_or(0);
        let Some((folder, user)) = of_another_user(self.folder.ancestors().take(between + 3))? else { return Ok(()) };
        let text = format!(
            "machine '{}' cannot be changed by root, because '{}' belongs to user {user}: run the command as this \
             user, for example with `sudo -u '#{user}'`",
            self.name(),
            folder.display()
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// The machine's name, which is the name of its folder.
    pub fn name(&self) -> String {
        self.folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The run folder of the machine's current process.
    pub fn run(&self) -> RunFolder {
        RunFolder(self.folder.join(RUN))
    }

    /// The machine's current process; `None` if it is not running.
    pub fn process(&self) -> Result<Option<Process>> {
        Process::find(&self.run().pid_file())
    }

    /// The machine's current process; an error if it is not running.
    pub fn running(&self) -> Result<Process> {
        let stopped = || {
            let text = format!("machine '{0}' does not run; 'lamina vm start {0}' starts it", self.name());
            Error::new(ErrorKind::WrongState, text)
        };
        self.process()?.ok_or_else(stopped)
    }

    /// A connection to QEMU's monitor.
    pub fn monitor(&self) -> Result<Client> {
        self.monitor_within(MONITOR_PATIENCE)
    }

    fn monitor_within(&self, patience: Duration) -> Result<Client> {
        Client::connect(&self.run().monitor(), patience)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// A connection to the guest's agent; `None` if the agent does not answer in time.
    pub fn agent(&self, patience: Duration) -> Result<Option<Agent>> {
        self.running()?;
        Agent::connect(&self.run().agent(), patience)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// The machine's state, without a long wait: `Other` while another command uses QEMU's monitor.
    pub fn glance(&self) -> Result<MachineState> {
        match self.process()? {
            None => Ok(MachineState::Stopped),
            Some(_) => Ok(self.state_within(GLANCE_PATIENCE).unwrap_or(MachineState::Other)),
        }
    }

    /// The machine's state.
    pub fn state(&self) -> Result<MachineState> {
        self.state_within(MONITOR_PATIENCE)
    }

    fn state_within(&self, patience: Duration) -> Result<MachineState> {
        if self.process()?.is_none() {
            return Ok(MachineState::Stopped);
        }
        let status =
            match self.monitor_within(patience).and_then(|mut monitor| monitor.execute("query-status", json!({}))) {
                Ok(status) => status,
                // The process ended after it was found and before its monitor answered.
                Err(_) if self.process()?.is_none() => return Ok(MachineState::Stopped),
                Err(error) => return Err(error),
            };
        Ok(match status["status"].as_str() {
            Some("running") => MachineState::Running,
            // In the state `io-error`, a write has failed, and the guest repeats it when it is resumed.
            Some("paused" | "suspended" | "prelaunch" | "postmigrate" | "io-error") => MachineState::Paused,
            _ => MachineState::Other,
        })
    }

    /// The run folders of the machine's processes, including those that have ended.
    fn run_folders(&self) -> Result<Vec<PathBuf>> {
        let is_one = |name: &String| {
            let number = name.strip_prefix("run.").unwrap_or("");
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        let names = durable::names(&self.folder)?;
        Ok(names.into_iter().filter(is_one).map(|name| self.folder.join(name)).collect())
    }

    /// All running processes of the machine, including those that the link does not name.
    pub fn processes(&self) -> Result<Vec<Process>> {
        let mut all = Vec::new();
        for folder in self.run_folders()? {
            all.extend(Process::find(&RunFolder(folder).pid_file())?);
        }
        Ok(all)
    }

    /// Ends all processes of the machine. Refused for root as [`Machine::change`] is. While the caller keeps the
    /// result, no process can start in their folders.
    pub fn end_processes(&self) -> Result<Vec<fs::File>> {
        let folders = self.run_folders()?;
        if !folders.is_empty() {
            self.check_owner()?;
        }
        folders.into_iter().map(|folder| Process::claim(&RunFolder(folder).pid_file())).collect()
    }

    /// Removes memory files that only this machine used.
    pub fn remove_own_memory(&self) -> Result<()> {
        self.run_folders()?.iter().try_for_each(|folder| remove_own_memory(folder))
    }

    /// Whether passt serves the user networks of the machine's current process.
    pub fn uses_passt(&self) -> bool {
        self.run().passt().exists()
    }

    /// Whether a command that paused the guest may have been killed since.
    pub fn is_held(&self) -> bool {
        self.folder.join(HELD).exists()
    }

    /// The memory of the machine's current process.
    pub fn memory(&self) -> Result<MemoryRecord> {
        read_record(&self.run().0)
    }
}

/// If this process is root, the first of the given folders that belongs to another user, and this user. The owner of a
/// folder can replace what the folder contains.
pub(crate) fn of_another_user<'a>(folders: impl Iterator<Item = &'a Path>) -> Result<Option<(&'a Path, u32)>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    for folder in folders.filter(|folder| !folder.as_os_str().is_empty()) {
        let looking = || format!("looking for the owner of '{}'", folder.display());
        let (link, found) = (fs::symlink_metadata(folder).during(looking)?, fs::metadata(folder).during(looking)?);
        if let Some(user) = [link.uid(), found.uid()].into_iter().find(|user| *user != 0) {
            return Ok(Some((folder, user)));
        }
    }
    Ok(None)
}

/// Removes the run folder of a process that the link does not name, and ends the process.
fn remove_run_folder(folder: &Path) -> Result<()> {
    let pid_file = RunFolder(folder.into()).pid_file();
    for left in (0..REMOVALS_MAX).rev() {
        // While this claim exists, no process starts in the folder.
        let _claim = Process::claim(&pid_file)?;
        remove_own_memory(folder)?;
        match fs::remove_dir_all(folder) {
            // A process that was just started may have created a file after the removal began, such as its pid file.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && left > 0 => {}
            outcome => return outcome.during(|| format!("removing '{}'", folder.display())),
        }
    }
    Ok(())
}

/// Removes the memory file that only the process of this folder used.
fn remove_own_memory(folder: &Path) -> Result<()> {
    match read_record(folder) {
        Ok(MemoryRecord::Own(file)) => remove_if_there(&file),
        _ => Ok(()),
    }
}

fn read_record(run: &Path) -> Result<MemoryRecord> {
    let path = run.join("memory");
    let text = fs::read(&path).during(|| format!("reading '{}'", path.display()))?;
    serde_json::from_slice(&text)
        .map_err(|e| Error::new(ErrorKind::Corrupt, format!("'{}' cannot be parsed: {e}", path.display())))
}

impl Change {
    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Writes the machine's definition.
    pub fn define(&self, definition: &Definition) -> Result<()> {
        define(&self.machine.folder, definition)
    }

    /// Starts a process in addition to the current one, if there is one.
    pub fn set_up(&self, start: Start<'_>) -> Result<Successor> {
        let definition = self.machine.definition()?;
        let folder = self.next_run_folder()?;
        let result = self.set_up_in(&definition, RunFolder(folder.clone()), start);
        result.inspect_err(|_| {
            // The process has ended, so that nothing needs its pid file.
            let _ = fs::remove_dir_all(&folder);
        })
    }

    fn set_up_in(&self, definition: &Definition, run: RunFolder, start: Start<'_>) -> Result<Successor> {
        let longest = run.console().as_os_str().len();
        if longest > SOCKET_PATH_MAX {
            let text = format!(
                "the path of a socket, '{}', has {longest} bytes, at most {SOCKET_PATH_MAX} are allowed: keep the \
                 datastore in a folder with a shorter path",
                run.console().display()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let record = serde_json::to_vec(&start.record)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("the record of the memory cannot be encoded: {e}")))?;
        private::write(&run.0.join("memory"), &record).during(|| format!("writing to '{}'", run.0.display()))?;
        network::check(definition).map_err(|error| error.context(format_args!("machine '{}'", self.machine.name())))?;
        media::check(definition)?;
        screen::check(definition)?;
        seed::write(definition, &run.seed())?;
        let user = user::of(&self.machine, definition, start.nbd)?;
        let uefi = nvram::prepare(&self.machine.folder, definition)?;
        let launch = |passt| self.launch(definition, &run, &start, uefi.as_ref(), user.as_deref(), passt);
        let Some(passt) = start.passt.then(|| passt::find(start.features, definition).ok()).flatten() else {
            return launch(None);
        };
        let successor = launch(Some(&passt))?;
        let marked = passt::connect_all(&passt, definition, &run, user.as_deref())
            .and_then(|()| private::write(&run.passt(), b"").during(|| format!("writing to '{}'", run.0.display())));
        match marked {
            Ok(()) => Ok(successor),
            Err(error) => {
                successor.process.end()?;
                tracing::warn!(machine = self.machine.name(), "QEMU's own user network is used: {error}");
                launch(None)
            }
        }
    }

    /// Starts a process in its run folder, which is prepared.
    fn launch(
        &self,
        definition: &Definition,
        run: &RunFolder,
        start: &Start<'_>,
        uefi: Option<&Uefi>,
        user: Option<&str>,
        passt: Option<&Passt>,
    ) -> Result<Successor> {
        let private = if matches!(start.memory, Memory::Shared(_)) { 0 } else { definition.memory };
        let limit = definition.qemu_memory.map(|own| own + private);
        let machine = command::Machine {
            definition,
            memory: start.memory.clone(),
            uefi,
            run,
            nbd: start.nbd,
            user,
            passt,
            incoming: start.incoming,
        };
        let arguments = command::arguments(&machine, start.features);
        let starting = Starting::new(&start.features.program, &arguments, &run.errors(), limit)?;
        let (process, mut monitor) = starting
            .finish(run, START_PATIENCE)
            .map_err(|error| error.context(format_args!("machine '{}'", self.machine.name())))?;
        if let Err(error) = screen::set_password(&self.machine, definition.vnc, &mut monitor) {
            process.end()?;
            return Err(error);
        }
        Ok(Successor { run: run.clone(), monitor, process })
    }

    /// Makes the process of a run folder the machine's current process.
    pub(crate) fn link(&self, run: &RunFolder) -> Result<()> {
        let name = run.0.file_name().unwrap_or_default();
        let temporary = self.machine.folder.join("run.new");
        let _ = fs::remove_file(&temporary);
        symlink(name, &temporary)
            .and_then(|()| fs::rename(&temporary, self.machine.folder.join(RUN)))
            .during(|| format!("linking the process of machine '{}'", self.machine.name()))
    }

    /// The run folder of the machine's current process, without the link.
    pub(crate) fn linked(&self) -> Result<RunFolder> {
        let link = self.machine.folder.join(RUN);
        let name = fs::read_link(&link).during(|| format!("reading '{}'", link.display()))?;
        Ok(RunFolder(self.machine.folder.join(name)))
    }

    /// A new run folder.
    fn next_run_folder(&self) -> Result<PathBuf> {
        let mut number = 1;
        loop {
            let folder = self.machine.folder.join(format!("run.{number}"));
            match private::create_folder(&folder) {
                Ok(()) => return Ok(folder),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(Error::io(format!("making '{}'", folder.display()), e)),
            }
        }
    }

    /// Ends processes that the link does not name, and removes the files of ended processes, including memory files
    /// that no other process used.
    pub fn sweep(&self) -> Result<()> {
        let current = fs::read_link(self.machine.folder.join(RUN)).ok();
        for folder in self.machine.run_folders()? {
            let counts = current.as_deref().map(Path::as_os_str) == folder.file_name();
            if !counts {
                remove_run_folder(&folder)?;
            } else if Process::find(&RunFolder(folder.clone()).pid_file())?.is_none() {
                // The log files with the last output of the guest and of QEMU stay for the user.
                remove_own_memory(&folder)?;
                remove_if_there(&folder.join("memory"))?;
            }
        }
        Ok(())
    }
}

/// The text of a definition, which need not be a valid one.
fn definition_text(path: &Path) -> Result<String> {
    let bytes = regular::read_own(path, definition::TEXT_MAX as u64, "definition of a machine")?;
    String::from_utf8(bytes).map_err(|_| {
        let text = format!("'{}' is not UTF-8: that is no definition of a machine", path.display());
        Error::new(ErrorKind::Invalid, text)
    })
}

/// Writes the definition of the machine in a folder that the caller has locked.
pub(crate) fn define(folder: &Path, definition: &Definition) -> Result<()> {
    definition.check()?;
    let version = definition.version.max(definition.needed_version());
    let definition = Definition { version, ..definition.clone() };
    durable::write(&folder.join(DEFINITION), definition.to_text()?.as_bytes())
}

/// Removes a file; a missing file is not an error.
pub(crate) fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io(format!("removing '{}'", path.display()), e)),
        _ => Ok(()),
    }
}
