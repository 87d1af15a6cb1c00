//! A machine: its folder, its process, and its operations.
//!
//! ```text
//! NAME/machine.toml   the definition
//! NAME/run            link to the folder of its current process: run.1, run.2, ..
//! NAME/run.N/         pid file, sockets, logs, and `memory`, which names the guest's memory file
//! NAME/snapshots/     its snapshots
//! NAME/nvram          the variables of its UEFI, if it has that
//! NAME/held           exists while a command has the guest paused: what to undo if the command is killed
//! ```
//!
//! 1. A machine runs if the process behind `run` is alive; no other record of its state can disagree.
//! 2. Another process takes over by replacing the link: at every moment exactly one process is the machine's.
//! 3. Changes of a machine are serialized ([`Machine::change`]); reading its state does not wait for a change.
//! 4. A process that the link does not name never executes the guest: it is a successor that did not take over, or a
//!    predecessor whose guest is paused. The next change of the machine ends it ([`Change::sweep`]).
//! 5. If a command that has paused a guest is killed, the next command resumes the guest.

use crate::agent::Agent;
use crate::busy::while_busy;
use crate::definition::{self, Definition};
use crate::durable;
use crate::nvram;
use crate::qemu::command::{self, Memory, RunFolder};
use crate::qemu::features::Features;
use crate::qemu::process::{Process, Starting};
use crate::qmp::Client;
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The definition's file.
pub const DEFINITION: &str = "machine.toml";
/// The link to the folder of the current process.
const RUN: &str = "run";
/// How long the agent may take to answer when file systems are thawed during recovery.
const AGENT_PATIENCE: Duration = Duration::from_secs(5);
/// Longest path of a Unix socket on Linux, in bytes.
const SOCKET_PATH_MAX: usize = 107;
/// How long QEMU may take to answer after it was started.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Attempts to remove a folder while a process that is ending creates files in it.
const REMOVALS_MAX: u32 = 10;
/// The file that records that a command has paused the guest.
const HELD: &str = "held";
/// How long QEMU's monitor may take to answer.
const MONITOR_PATIENCE: Duration = Duration::from_secs(20);

/// How long QEMU's monitor may take when a quick answer matters more than a reliable one.
const GLANCE_PATIENCE: Duration = Duration::from_millis(500);

/// The state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MachineState {
    /// The machine has no process.
    Stopped,
    /// Its guest executes.
    Running,
    /// Its guest is paused.
    Paused,
    /// Its process is waiting for a state to be loaded, or has failed.
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
    /// A file that belongs to this machine and is removed with it.
    Own(PathBuf),
    /// The image with that name.
    Image(String),
}

/// A machine that is locked for changes.
pub struct Change {
    machine: Machine,
    /// The lock, held until this is dropped.
    _lock: fs::File,
}

/// Parameters of a new process.
pub struct Start<'a> {
    /// The QEMU to start.
    pub features: &'a Features,
    /// The NBD server of its disks.
    pub nbd: &'a Path,
    /// Its memory.
    pub memory: Memory,
    /// Its memory, as recorded in the run folder.
    pub record: MemoryRecord,
    /// Whether the process waits for a saved state to be loaded.
    pub incoming: bool,
}

/// A process that is set up but is not the machine's current process yet.
pub struct Successor {
    /// Its run folder.
    pub run: RunFolder,
    /// A connection to its monitor.
    pub monitor: Client,
    /// The process.
    pub process: Process,
}

impl Machine {
    /// The machine in an existing folder.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its definition.
    pub fn definition(&self) -> Result<Definition> {
        let path = self.folder.join(DEFINITION);
        let length = fs::metadata(&path).during(|| format!("looking at '{}'", path.display()))?.len();
        if length > crate::definition::TEXT_MAX as u64 {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("'{}' is no definition: {length} bytes", path.display()),
            ));
        }
        let text = fs::read_to_string(&path).during(|| format!("reading '{}'", path.display()))?;
        let definition = Definition::parse(&text, &path.display().to_string())?;
        // After a rename that was interrupted, the file has the former name.
        Ok(Definition { name: self.name(), ..definition })
    }

    /// The disks that the text of its definition names, also if it is not a valid definition.
    pub fn named_disks(&self) -> Vec<String> {
        fs::read_to_string(self.folder.join(DEFINITION)).map(|text| definition::named_disks(&text)).unwrap_or_default()
    }

    /// Locks the machine for changes; waits up to `patience` while another command has it locked.
    pub fn change_within(&self, patience: Duration) -> Result<Change> {
        while_busy(patience, || self.change())
    }

    /// Locks the machine for changes; `Busy` if another command has it locked.
    pub fn change(&self) -> Result<Change> {
        let lock = fs::File::open(&self.folder).during(|| format!("opening '{}'", self.folder.display()))?;
        match lock.try_lock() {
            Ok(()) => Ok(Change { machine: self.clone(), _lock: lock }),
            Err(fs::TryLockError::WouldBlock) => {
                let text = format!("machine '{}' is being changed by another command; try again", self.name());
                Err(Error::new(ErrorKind::Busy, text))
            }
            Err(fs::TryLockError::Error(e)) => Err(Error::io(format!("locking machine '{}'", self.name()), e)),
        }
    }

    /// Its name, which is the name of its folder.
    pub fn name(&self) -> String {
        self.folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The run folder of its current process.
    pub fn run(&self) -> RunFolder {
        RunFolder(self.folder.join(RUN))
    }

    /// Its current process, if it is running.
    pub fn process(&self) -> Result<Option<Process>> {
        Process::find(&self.run().pid_file())
    }

    /// Its current process; an error if it is not running.
    pub fn running(&self) -> Result<Process> {
        let stopped = || {
            let text = format!("machine '{0}' does not run; 'lamina vm start {0}' starts it", self.name());
            Error::new(ErrorKind::WrongState, text)
        };
        self.process()?.ok_or_else(stopped)
    }

    /// A connection to its monitor.
    pub fn monitor(&self) -> Result<Client> {
        self.monitor_within(MONITOR_PATIENCE)
    }

    fn monitor_within(&self, patience: Duration) -> Result<Client> {
        Client::connect(&self.run().monitor(), patience)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// A connection to the guest's agent; `None` if it does not answer in time.
    pub fn agent(&self, patience: Duration) -> Result<Option<Agent>> {
        self.running()?;
        Agent::connect(&self.run().agent(), patience)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// Its state without a long wait: `Other` while another command uses its monitor.
    pub fn glance(&self) -> Result<MachineState> {
        match self.process()? {
            None => Ok(MachineState::Stopped),
            Some(_) => Ok(self.state_within(GLANCE_PATIENCE).unwrap_or(MachineState::Other)),
        }
    }

    /// Its state.
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
                // The process ended between the two queries.
                Err(_) if self.process()?.is_none() => return Ok(MachineState::Stopped),
                Err(error) => return Err(error),
            };
        Ok(match status["status"].as_str() {
            Some("running") => MachineState::Running,
            Some("paused" | "suspended" | "prelaunch" | "postmigrate") => MachineState::Paused,
            _ => MachineState::Other,
        })
    }

    /// The run folders of its processes, including those that have ended.
    fn run_folders(&self) -> Result<Vec<PathBuf>> {
        let is_one = |name: &String| {
            let number = name.strip_prefix("run.").unwrap_or("");
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        let names = durable::names(&self.folder)?;
        Ok(names.into_iter().filter(is_one).map(|name| self.folder.join(name)).collect())
    }

    /// All its running processes, including those that the link does not name.
    pub fn processes(&self) -> Result<Vec<Process>> {
        let mut all = Vec::new();
        for folder in self.run_folders()? {
            all.extend(Process::find(&RunFolder(folder).pid_file())?);
        }
        Ok(all)
    }

    /// Ends all its processes. No process can start in their folders while the result exists.
    pub fn end_processes(&self) -> Result<Vec<fs::File>> {
        let folders = self.run_folders()?.into_iter();
        folders.map(|folder| Process::claim(&RunFolder(folder).pid_file())).collect()
    }

    /// Removes memory files that only this machine used.
    pub fn remove_own_memory(&self) -> Result<()> {
        self.run_folders()?.iter().try_for_each(|folder| remove_own_memory(folder))
    }

    /// Whether a command that paused the guest may have been killed.
    pub fn is_held(&self) -> bool {
        self.folder.join(HELD).exists()
    }

    /// The memory of its current process.
    pub fn memory(&self) -> Result<MemoryRecord> {
        read_record(&self.run().0)
    }
}

/// Removes the run folder of a process that the link does not name, and ends the process.
fn remove_run_folder(folder: &Path) -> Result<()> {
    let pid_file = RunFolder(folder.into()).pid_file();
    for left in (0..REMOVALS_MAX).rev() {
        // Held until the folder is removed, so that no process starts in it.
        let _claim = Process::claim(&pid_file)?;
        remove_own_memory(folder)?;
        match fs::remove_dir_all(folder) {
            // A process that was just started may have created a file meanwhile, such as its pid file.
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

    /// Writes its definition.
    pub fn define(&self, definition: &Definition) -> Result<()> {
        define(&self.machine.folder, definition)
    }

    /// Starts a process in addition to the current one, if any.
    pub fn set_up(&self, start: Start<'_>) -> Result<Successor> {
        let definition = self.machine.definition()?;
        let folder = self.next_run_folder()?;
        let result = self.set_up_in(&definition, RunFolder(folder.clone()), start);
        result.inspect_err(|_| {
            // The log is kept if the machine has no other process, because the error refers to it.
            let _ = fs::remove_dir_all(&folder);
        })
    }

    fn set_up_in(&self, definition: &Definition, run: RunFolder, start: Start<'_>) -> Result<Successor> {
        let longest = run.console().as_os_str().len();
        if longest > SOCKET_PATH_MAX {
            let text = format!(
                "the path of a socket, '{}', has {longest} bytes, at most {SOCKET_PATH_MAX} work: keep the datastore in a \
                 folder with a shorter path",
                run.console().display()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let record = serde_json::to_vec(&start.record)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("the record of the memory cannot be encoded: {e}")))?;
        private::write(&run.0.join("memory"), &record).during(|| format!("writing to '{}'", run.0.display()))?;
        let uefi = nvram::prepare(&self.machine.folder, definition)?;
        let machine = command::Machine {
            definition,
            memory: start.memory,
            uefi: uefi.as_ref(),
            run: &run,
            nbd: start.nbd,
            incoming: start.incoming,
        };
        let arguments = command::arguments(&machine, start.features);
        let starting = Starting::new(&start.features.program, &arguments, &run.errors())?;
        let (process, monitor) = starting
            .finish(&run, START_PATIENCE)
            .map_err(|error| error.context(format_args!("machine '{}'", self.machine.name())))?;
        Ok(Successor { run, monitor, process })
    }

    /// Makes a process the machine's current process.
    pub fn take_over(&self, successor: &Successor) -> Result<()> {
        let name = successor.run.0.file_name().unwrap_or_default();
        let temporary = self.machine.folder.join("run.new");
        let _ = fs::remove_file(&temporary);
        symlink(name, &temporary)
            .and_then(|()| fs::rename(&temporary, self.machine.folder.join(RUN)))
            .during(|| format!("linking the process of machine '{}'", self.machine.name()))
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
    /// that only they used.
    pub fn sweep(&self) -> Result<()> {
        let current = fs::read_link(self.machine.folder.join(RUN)).ok();
        for folder in self.machine.run_folders()? {
            let counts = current.as_deref().map(Path::as_os_str) == folder.file_name();
            if !counts {
                remove_run_folder(&folder)?;
            } else if Process::find(&RunFolder(folder.clone()).pid_file())?.is_none() {
                // The last output of the guest and of QEMU is kept for the user.
                remove_own_memory(&folder)?;
                remove_if_there(&folder.join("memory"))?;
            }
        }
        Ok(())
    }

    /// Records that the guest is about to be paused, so that the next command resumes it if this process is killed. The
    /// caller has checked whether the guest is running. The record is removed when the result is dropped.
    pub fn hold(&self, hold: Hold) -> Result<Holding> {
        let path = self.machine.folder.join(HELD);
        let text = serde_json::to_vec(&hold)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("'{}' cannot be written: {e}", path.display())))?;
        // The file is not made durable, because a power cut ends the guest too.
        private::write(&path, &text).during(|| format!("writing '{}'", path.display()))?;
        Ok(Holding { path })
    }

    /// Resumes the guest after a command that paused it was killed. Returns whether there was such a command.
    pub fn let_go_on(&self) -> Result<bool> {
        let path = self.machine.folder.join(HELD);
        let Some(text) = durable::read(&path)? else { return Ok(false) };
        // If the file is empty, the command was killed before it paused the guest.
        let hold: Hold = serde_json::from_str(&text).unwrap_or_default();
        if crate::instant::freeze::frozen(&self.machine)?.is_some() {
            // The machine is frozen and continues from its image, so its old process must not continue too.
            for process in self.machine.processes()? {
                process.end()?;
            }
        }
        self.sweep()?;
        if self.machine.process()?.is_some() {
            if hold.resume {
                self.machine.monitor()?.execute("cont", json!({}))?;
            }
            if hold.thaw
                && let Some(mut agent) = self.machine.agent(AGENT_PATIENCE)?
            {
                agent.thaw()?;
            }
        }
        remove_if_there(&path)?;
        Ok(true)
    }
}

/// What has to be undone for a paused guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// Whether the guest was running and has to be resumed.
    pub resume: bool,
    /// Whether the guest's agent has frozen its file systems, which have to be thawed.
    pub thaw: bool,
}

/// While this exists, the guest may be paused.
pub struct Holding {
    path: PathBuf,
}

impl Drop for Holding {
    fn drop(&mut self) {
        if let Err(error) = remove_if_there(&self.path) {
            tracing::warn!("{error}");
        }
    }
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
