//! One machine: its folder, its process, and its operations.
//!
//! ```text
//! NAME/machine.toml   the definition
//! NAME/run            link to the folder of the process that runs it: run.1, run.2, ..
//! NAME/run.N/         pid file, sockets, logs, and `memory`, which says where the guest's memory is
//! NAME/snapshots/     its snapshots
//! NAME/held           while a command holds its guest still: what to undo if the command is killed
//! ```
//!
//! 1. A machine runs if the process behind `run` lives; there is no second record of that which could disagree.
//! 2. Replacing the link is how one process takes over from another: at every instant exactly one is the machine's.
//! 3. One change of a machine at a time ([`Machine::change`]); reading its state does not wait for a change.
//! 4. A process that the link does not name never executes a guest: it is a successor that did not take over, or a
//!    predecessor whose guest is paused. The next change of the machine ends it ([`Change::sweep`]).
//! 5. A guest that a command has paused is resumed if that command is killed: by the next command at the latest.

use crate::agent::Agent;
use crate::busy::while_busy;
use crate::definition::Definition;
use crate::durable;
use crate::qemu::command::{self, Memory, RunFolder};
use crate::qemu::features::Features;
use crate::qemu::process::{Process, Starting};
use crate::qmp::Client;
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
/// The link to the folder of the process.
const RUN: &str = "run";
/// How long the agent of a frozen guest may take to answer.
const AGENT_PATIENCE: Duration = Duration::from_secs(5);
/// Longest path of a Unix socket on Linux, in bytes.
const SOCKET_PATH_MAX: usize = 107;
/// How long QEMU may take from being started to answering.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Attempts to remove a folder in which a process that is about to end creates files.
const REMOVALS_MAX: u32 = 10;
/// The file that records that a command has paused the guest.
const HELD: &str = "held";
/// How long its monitor may take to answer.
const MONITOR_PATIENCE: Duration = Duration::from_secs(20);

/// How long it may take if an early answer matters more than a certain one.
const GLANCE_PATIENCE: Duration = Duration::from_millis(500);

/// The state of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MachineState {
    /// It has no process.
    Stopped,
    /// Its guest executes.
    Running,
    /// Its guest is paused.
    Paused,
    /// It has a process that waits for a state to be loaded, or failed.
    Other,
}

/// A machine.
#[derive(Clone, Debug)]
pub struct Machine {
    folder: PathBuf,
}

/// The memory of a process, according to its run folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryRecord {
    /// Only in the process.
    Private,
    /// A file of this machine's own, removed with it.
    Own(PathBuf),
    /// The image of that name.
    Image(String),
}

/// A machine with the right to change it.
pub struct Change {
    machine: Machine,
    /// Held as long as this exists.
    _lock: fs::File,
}

/// How a process is started.
pub struct Start<'a> {
    /// The QEMU.
    pub features: &'a Features,
    /// The NBD server of its disks.
    pub nbd: &'a Path,
    /// Its memory.
    pub memory: Memory,
    /// The same, for the record.
    pub record: MemoryRecord,
    /// Whether it waits for a state.
    pub incoming: bool,
}

/// A process that is set up and not yet the machine's.
pub struct Successor {
    /// Its sockets.
    pub run: RunFolder,
    /// Its monitor.
    pub monitor: Client,
    /// The process.
    pub process: Process,
}

impl Machine {
    /// The machine in a folder, which exists.
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
        Definition::parse(&text, &path.display().to_string())
    }

    /// The right to change it; waits while another command has it.
    pub fn change_within(&self, patience: Duration) -> Result<Change> {
        while_busy(patience, || self.change())
    }

    /// The right to change it.
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

    /// Its name, which is that of its folder.
    pub fn name(&self) -> String {
        self.folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The sockets of its process, if it has one.
    pub fn run(&self) -> RunFolder {
        RunFolder(self.folder.join(RUN))
    }

    /// Its process.
    pub fn process(&self) -> Result<Option<Process>> {
        Process::find(&self.run().pid_file())
    }

    /// Its process; an error if it has none.
    pub fn running(&self) -> Result<Process> {
        let stopped = || Error::new(ErrorKind::Invalid, format!("machine '{}' does not run", self.name()));
        self.process()?.ok_or_else(stopped)
    }

    /// Its monitor.
    pub fn monitor(&self) -> Result<Client> {
        self.monitor_within(MONITOR_PATIENCE)
    }

    fn monitor_within(&self, patience: Duration) -> Result<Client> {
        Client::connect(&self.run().monitor(), patience)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// Its guest's agent; `None` if none answers in time.
    pub fn agent(&self, patience: Duration) -> Result<Option<Agent>> {
        self.running()?;
        Agent::connect(&self.run().agent(), patience)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// Its state, as far as it is available at once: `Other` while another command uses its monitor.
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
                // It ended between the two queries.
                Err(_) if self.process()?.is_none() => return Ok(MachineState::Stopped),
                Err(error) => return Err(error),
            };
        Ok(match status["status"].as_str() {
            Some("running") => MachineState::Running,
            Some("paused" | "suspended" | "prelaunch" | "postmigrate") => MachineState::Paused,
            _ => MachineState::Other,
        })
    }

    /// The folders of its processes, including ended ones.
    fn run_folders(&self) -> Result<Vec<PathBuf>> {
        let is_one = |name: &String| {
            let number = name.strip_prefix("run.").unwrap_or("");
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        let names = durable::names(&self.folder)?;
        Ok(names.into_iter().filter(is_one).map(|name| self.folder.join(name)).collect())
    }

    /// All its processes, including those that the link does not name.
    pub fn processes(&self) -> Result<Vec<Process>> {
        let mut all = Vec::new();
        for folder in self.run_folders()? {
            all.extend(Process::find(&RunFolder(folder).pid_file())?);
        }
        Ok(all)
    }

    /// Ends all its processes; no process starts in their folders while the result exists.
    pub fn end_processes(&self) -> Result<Vec<fs::File>> {
        let folders = self.run_folders()?.into_iter();
        folders.map(|folder| Process::claim(&RunFolder(folder).pid_file())).collect()
    }

    /// Removes the memory files that only its processes used.
    pub fn remove_own_memory(&self) -> Result<()> {
        self.run_folders()?.iter().try_for_each(|folder| remove_own_memory(folder))
    }

    /// Whether a command that had paused its guest may have been killed.
    pub fn is_held(&self) -> bool {
        self.folder.join(HELD).exists()
    }

    /// Where the memory of its process is.
    pub fn memory(&self) -> Result<MemoryRecord> {
        read_record(&self.run().0)
    }
}

/// Removes the folder of a process that the link does not name any more, and ends the process.
fn remove_run_folder(folder: &Path) -> Result<()> {
    let pid_file = RunFolder(folder.into()).pid_file();
    for left in (0..REMOVALS_MAX).rev() {
        // Until the folder is gone.
        let _claim = Process::claim(&pid_file)?;
        remove_own_memory(folder)?;
        match fs::remove_dir_all(folder) {
            // A process that was just started has created a file meanwhile, maybe its pid file.
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
        .map_err(|e| Error::new(ErrorKind::Corrupt, format!("'{}' is not what it should be: {e}", path.display())))
}

impl Change {
    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Writes its definition.
    pub fn define(&self, definition: &Definition) -> Result<()> {
        definition.check()?;
        durable::write(&self.machine.folder.join(DEFINITION), definition.to_text()?.as_bytes())
    }

    /// Sets up a process for it beside the present one, if any.
    pub fn set_up(&self, start: Start<'_>) -> Result<Successor> {
        let definition = self.machine.definition()?;
        let folder = self.next_run_folder()?;
        let result = self.set_up_in(&definition, RunFolder(folder.clone()), start);
        result.inspect_err(|_| {
            // The log stays for the user if there is only one machine: the error quotes it.
            let _ = fs::remove_dir_all(&folder);
        })
    }

    fn set_up_in(&self, definition: &Definition, run: RunFolder, start: Start<'_>) -> Result<Successor> {
        let longest = run.console().as_os_str().len();
        if longest > SOCKET_PATH_MAX {
            let text = format!(
                "the path of a socket, '{}', has {longest} bytes, and can have {SOCKET_PATH_MAX}: keep the datastore in a \
                 folder with a shorter path",
                run.console().display()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let record = serde_json::to_vec(&start.record)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("where memory is cannot be written: {e}")))?;
        fs::write(run.0.join("memory"), record).during(|| format!("writing to '{}'", run.0.display()))?;
        let machine =
            command::Machine { definition, memory: start.memory, run: &run, nbd: start.nbd, incoming: start.incoming };
        let arguments = command::arguments(&machine, start.features);
        let starting = Starting::new(&start.features.program, &arguments, &run.errors())?;
        let (process, monitor) = starting
            .finish(&run, START_PATIENCE)
            .map_err(|error| error.context(format_args!("machine '{}'", self.machine.name())))?;
        Ok(Successor { run, monitor, process })
    }

    /// Makes a process the machine's.
    pub fn take_over(&self, successor: &Successor) -> Result<()> {
        let name = successor.run.0.file_name().unwrap_or_default();
        let temporary = self.machine.folder.join("run.new");
        let _ = fs::remove_file(&temporary);
        symlink(name, &temporary)
            .and_then(|()| fs::rename(&temporary, self.machine.folder.join(RUN)))
            .during(|| format!("linking the process of machine '{}'", self.machine.name()))
    }

    /// A folder for the next process.
    fn next_run_folder(&self) -> Result<PathBuf> {
        let mut number = 1;
        loop {
            let folder = self.machine.folder.join(format!("run.{number}"));
            match fs::create_dir(&folder) {
                Ok(()) => return Ok(folder),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(Error::io(format!("making '{}'", folder.display()), e)),
            }
        }
    }

    /// Ends processes that the link does not name, and removes the files of ended ones, including memory files that
    /// only they used.
    pub fn sweep(&self) -> Result<()> {
        let current = fs::read_link(self.machine.folder.join(RUN)).ok();
        for folder in self.machine.run_folders()? {
            let counts = current.as_deref().map(Path::as_os_str) == folder.file_name();
            if !counts {
                remove_run_folder(&folder)?;
            } else if Process::find(&RunFolder(folder.clone()).pid_file())?.is_none() {
                // The last output of the guest and of QEMU stays for the user.
                remove_own_memory(&folder)?;
                remove_if_there(&folder.join("memory"))?;
            }
        }
        Ok(())
    }

    /// Records that the guest is about to be paused, so that it is resumed if this process is killed. The caller has
    /// checked whether it executes; ends when the result is dropped.
    pub fn hold(&self, hold: Hold) -> Result<Holding> {
        let path = self.machine.folder.join(HELD);
        let text = serde_json::to_vec(&hold)
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("'{}' cannot be written: {e}", path.display())))?;
        // Not durable: a power cut ends the guest too.
        fs::write(&path, text).during(|| format!("writing '{}'", path.display()))?;
        Ok(Holding { path })
    }

    /// Resumes a guest whose command was killed. Returns whether there was one.
    pub fn let_go_on(&self) -> Result<bool> {
        let path = self.machine.folder.join(HELD);
        let Some(text) = durable::read(&path)? else { return Ok(false) };
        // The command was killed before it paused the guest.
        let hold: Hold = serde_json::from_str(&text).unwrap_or_default();
        if crate::instant::freeze::frozen(&self.machine)?.is_some() {
            // The guest is an image now, and continues from there: its process would continue beside it.
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
    /// It executed, and has to execute again.
    pub resume: bool,
    /// Its file systems are frozen by its agent.
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

/// Removes a file that may not exist.
pub(crate) fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io(format!("removing '{}'", path.display()), e)),
        _ => Ok(()),
    }
}
