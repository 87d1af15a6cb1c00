//! A running QEMU.
//!
//! 1. It is started in a session of its own, with nothing of ours but what its command line names, so that neither a
//!    signal to us nor our end reaches it.
//! 2. It is known by its pid **and** the time it started (`/proc/PID/stat`, field 22), written to a file before
//!    anybody relies on it: a pid alone may be somebody else's by now. Signals go through a descriptor of the process
//!    (pidfd), taken before the start time is compared.
//! 3. A process that ended is told apart from one that never started.

use backend::{Error, ErrorKind, IoContext, Result};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How often an ending process is looked at.
const POLL: Duration = Duration::from_millis(5);

/// Who a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since the system did.
    pub started: u64,
}

/// A process that was found alive.
#[derive(Debug)]
pub struct Process {
    identity: Identity,
    descriptor: OwnedFd,
}

impl Process {
    /// Starts `program`. What it complains about goes to `errors`.
    pub fn start(program: &Path, arguments: &[OsString], errors: &Path) -> Result<Self> {
        let log = fs::File::create(errors).during(|| format!("making '{}'", errors.display()))?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Away from our terminal's signals.
        command.process_group(0);
        let mut child = command.spawn().map_err(|e| Error::io(format!("starting '{}'", program.display()), e))?;
        let process = i32::try_from(child.id()).ok().and_then(|pid| Self::of_pid(pid).transpose());
        let pid = child.id();
        // Whoever waits for the child keeps it from staying a zombie while we live.
        thread::Builder::new()
            .name(format!("qemu {pid}"))
            .spawn(move || child.wait())
            .during(|| "starting a thread".into())?;
        process.unwrap_or_else(|| {
            let text = format!("'{}' ended at once; '{}' says why", program.display(), errors.display());
            Err(Error::new(ErrorKind::Io, text))
        })
    }

    /// The process of that identity if it is alive.
    pub fn find(identity: Identity) -> Result<Option<Self>> {
        Ok(Self::of_pid(identity.pid)?.filter(|process| process.identity == identity))
    }

    fn of_pid(pid: i32) -> Result<Option<Self>> {
        let Some(number) = Pid::from_raw(pid) else { return Ok(None) };
        let descriptor = match pidfd_open(number, PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(e) => return Err(Error::io(format!("looking for process {pid}"), e.into())),
        };
        match started(pid) {
            Ok(Some(started)) => Ok(Some(Self { identity: Identity { pid, started }, descriptor })),
            Ok(None) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(format!("looking at process {pid}"), e)),
        }
    }

    /// Who it is.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether it still runs.
    pub fn alive(&self) -> bool {
        matches!(Self::find(self.identity), Ok(Some(_)))
    }

    /// Ends it without asking the guest: as pulling the plug.
    pub fn kill(&self) -> Result<()> {
        match pidfd_send_signal(&self.descriptor, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(Error::io(format!("ending process {}", self.identity.pid), e.into())),
        }
    }

    /// Waits for its end; false when it still runs after `patience`.
    pub fn wait(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.alive() {
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(POLL);
        }
        true
    }
}

/// When a process started; `None` when all that is left of it is its exit status.
fn started(pid: i32) -> io::Result<Option<u64>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in parentheses, and may hold both.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = rest.split_whitespace();
    let state = fields.next().unwrap_or("X");
    if matches!(state, "Z" | "X") {
        return Ok(None);
    }
    Ok(fields.nth(18).and_then(|field| field.parse().ok()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn found_again_and_ended() {
        let folder = tempfile::tempdir().unwrap();
        let process = Process::start(Path::new("sleep"), &["1000".into()], &folder.path().join("log")).unwrap();
        let identity = process.identity();
        assert!(Process::find(identity).unwrap().is_some());
        let other = Identity { started: identity.started + 1, ..identity };
        assert!(Process::find(other).unwrap().is_none());
        assert!(!process.wait(Duration::from_millis(10)));
        process.kill().unwrap();
        assert!(process.wait(Duration::from_secs(10)));
        assert!(Process::find(identity).unwrap().is_none());
        process.kill().unwrap();
    }

    #[test]
    fn what_cannot_start_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let error = Process::start(Path::new("/nowhere/qemu"), &[], &folder.path().join("log")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }
}
