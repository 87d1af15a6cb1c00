//! One machine: its folder, its process, and what can be asked of it.
//!
//! ```text
//! NAME/machine.toml   the definition
//! NAME/run            link to the folder of the process that runs it: run.1, run.2, ..
//! NAME/run.N/         pid file, sockets, logs, and `memory`, which says where the guest's memory is
//! ```
//!
//! 1. A machine runs when the process behind `run` lives; nothing else says so, and nothing has to be kept in step.
//! 2. Exchanging the link is how one process takes over from another: at every instant there is one that counts.
//! 3. One change of a machine at a time ([`Machine::change`]); looking at it waits for nobody.

use crate::agent::Agent;
use crate::definition::Definition;
use crate::durable;
use crate::qemu::command::{self, Memory, RunFolder};
use crate::qemu::features::Features;
use crate::qemu::process::{Process, Starting};
use crate::qmp::Client;
use backend::{Error, ErrorKind, IoContext, Result};
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
/// Longest path of a Unix socket on Linux, in bytes.
const SOCKET_PATH_MAX: usize = 107;
/// How long QEMU may take from being started to answering.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How long its monitor may take to answer.
const MONITOR_PATIENCE: Duration = Duration::from_secs(20);

/// What a machine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It has no process.
    Stopped,
    /// Its guest executes.
    Running,
    /// Its guest stands still.
    Paused,
    /// It has a process that waits for a state to be loaded, or failed.
    Other,
}

/// A machine.
#[derive(Clone, Debug)]
pub struct Machine {
    folder: PathBuf,
}

/// Where the memory of a process is, as its run folder says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryRecord {
    /// Nowhere else.
    Private,
    /// A file of this machine's own, removed with it.
    Own(PathBuf),
    /// The image of that name.
    Image(String),
}

/// A machine with the right to change it.
pub struct Change {
    machine: Machine,
    /// Held for as long as this lives.
    _lock: fs::File,
}

/// How a process is started.
pub struct Start<'a> {
    /// The QEMU.
    pub features: &'a Features,
    /// The NBD server of its disks.
    pub nbd: &'a Path,
    /// Where its memory is.
    pub memory: Memory,
    /// The same, to be kept.
    pub record: MemoryRecord,
    /// It waits for a state.
    pub incoming: bool,
}

/// A process that is set up and not yet the machine's.
pub struct Successor {
    /// Where its sockets are.
    pub run: RunFolder,
    /// Its monitor.
    pub monitor: Client,
    /// Itself.
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

    /// The right to change it.
    pub fn change(&self) -> Result<Change> {
        let lock = fs::File::open(&self.folder).during(|| format!("opening '{}'", self.folder.display()))?;
        match lock.try_lock() {
            Ok(()) => Ok(Change { machine: self.clone(), _lock: lock }),
            Err(fs::TryLockError::WouldBlock) => {
                let text = format!("machine '{}' is being changed by somebody else; try again", self.name());
                Err(Error::new(ErrorKind::Busy, text))
            }
            Err(fs::TryLockError::Error(e)) => Err(Error::io(format!("locking machine '{}'", self.name()), e)),
        }
    }

    /// Its name, as its folder has it.
    pub fn name(&self) -> String {
        self.folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Where the sockets of its process are, if it has one.
    pub fn run(&self) -> RunFolder {
        RunFolder(self.folder.join(RUN))
    }

    /// Its process.
    pub fn process(&self) -> Result<Option<Process>> {
        Process::find(&self.run().pid_file())
    }

    /// Its process, which it must have.
    pub fn running(&self) -> Result<Process> {
        let stopped = || Error::new(ErrorKind::Invalid, format!("machine '{}' does not run", self.name()));
        self.process()?.ok_or_else(stopped)
    }

    /// Its monitor.
    pub fn monitor(&self) -> Result<Client> {
        Client::connect(&self.run().monitor(), MONITOR_PATIENCE)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// Its guest's agent; `None` when none answers in time.
    pub fn agent(&self, patience: Duration) -> Result<Option<Agent>> {
        self.running()?;
        Agent::connect(&self.run().agent(), patience)
            .map_err(|error| error.context(format_args!("machine '{}'", self.name())))
    }

    /// What it does.
    pub fn state(&self) -> Result<State> {
        if self.process()?.is_none() {
            return Ok(State::Stopped);
        }
        let status = match self.monitor().and_then(|mut monitor| monitor.execute("query-status", json!({}))) {
            Ok(status) => status,
            // It ended between the two questions.
            Err(_) if self.process()?.is_none() => return Ok(State::Stopped),
            Err(error) => return Err(error),
        };
        Ok(match status["status"].as_str() {
            Some("running") => State::Running,
            Some("paused" | "suspended") => State::Paused,
            _ => State::Other,
        })
    }

    /// Where the memory of its process is.
    pub fn memory(&self) -> Result<MemoryRecord> {
        read_record(&self.run().0)
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

    /// Sets up a process for it beside the one it may have.
    pub fn set_up(&self, start: Start<'_>) -> Result<Successor> {
        let definition = self.machine.definition()?;
        let folder = self.next_run_folder()?;
        let result = self.set_up_in(&definition, RunFolder(folder.clone()), start);
        result.inspect_err(|_| {
            // The log stays for the user where there is one machine to look at: the error quotes it.
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

    /// Removes the folders of processes that ended, and the memory files that were theirs alone.
    pub fn sweep(&self) -> Result<()> {
        let folder = &self.machine.folder;
        let current = fs::read_link(folder.join(RUN)).ok();
        for entry in fs::read_dir(folder).during(|| format!("listing '{}'", folder.display()))? {
            let entry = entry.during(|| format!("listing '{}'", folder.display()))?;
            let name = entry.file_name();
            let numbered = name.to_str().and_then(|name| name.strip_prefix("run.")).is_some_and(|rest| rest != "new");
            if !numbered || Process::find(&entry.path().join("pid"))?.is_some() {
                continue;
            }
            if let Ok(MemoryRecord::Own(file)) = read_record(&entry.path()) {
                remove_if_there(&file)?;
            }
            if current.as_deref() == Some(Path::new(&name)) {
                // What the guest last said, and what QEMU complained about, stay to be looked at.
                remove_if_there(&entry.path().join("memory"))?;
                continue;
            }
            fs::remove_dir_all(entry.path()).during(|| format!("removing '{}'", entry.path().display()))?;
        }
        Ok(())
    }
}

/// Removes a file that may be gone already.
pub(crate) fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io(format!("removing '{}'", path.display()), e)),
        _ => Ok(()),
    }
}
