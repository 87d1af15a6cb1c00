//! A running QEMU process.
//!
//! 1. QEMU is started in its own process group, with only the open files that its command line names. So neither a
//!    signal to the command that started it nor the end of that command affects it.
//! 2. QEMU keeps its pid file locked while it runs (`-pidfile`), and the kernel reports which process holds a lock. So
//!    the lock identifies the process even if an old pid in the file was reused after a kill.
//! 3. Signals are sent through a descriptor of the process (pidfd) that was opened before the lock is checked again, so
//!    that no signal is sent to a process that reused the pid.

use super::command::RunFolder;
use crate::qmp::Client;
use backend::private;
use error::{Error, ErrorKind, IoContext, Result};
use rustix::fs::{FlockOperation, OFlags, fcntl_lock};
use rustix::io::Errno;
use rustix::process::{
    Flock, FlockType, Pid, PidfdFlags, Resource, Rlimit, Signal, fcntl_getlk, pidfd_open, pidfd_send_signal, prlimit,
};
use serde_json::json;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which a process that is starting or ending is checked.
const POLL: Duration = Duration::from_millis(1);
/// How long a killed process may take to end.
const END_PATIENCE: Duration = Duration::from_secs(20);
/// Longest part of QEMU's error output in a message, in characters.
const COMPLAINT_MAX: usize = 2000;

/// A running process.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    file: PathBuf,
    descriptor: OwnedFd,
}

/// A process that was started and has not yet answered on its monitor.
pub struct Starting {
    child: Child,
    errors: PathBuf,
}

impl Starting {
    /// Starts `program`. Its error output is written to `errors`. With `limit`, the process gets at most this many
    /// bytes of private memory (heap, stacks, private mappings; `RLIMIT_DATA`).
    pub fn new(program: &Path, arguments: &[OsString], errors: &Path, limit: Option<u64>) -> Result<Self> {
        let log = private::create(errors).during(|| format!("making '{}'", errors.display()))?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // A process group of its own, so that signals of the terminal do not reach it.
        command.process_group(0);
        let child =
            private::spawn(&mut command).map_err(|e| Error::io(format!("starting '{}'", program.display()), e))?;
        let mut starting = Self { child, errors: errors.into() };
        if let Some(limit) = limit {
            let most = Rlimit { current: Some(limit), maximum: Some(limit) };
            if let Err(error) = prlimit(Some(Pid::from_child(&starting.child)), Resource::Data, most) {
                let _ = starting.child.kill();
                let _ = starting.child.wait();
                return Err(Error::io(format!("limiting the memory of QEMU to {limit} bytes"), error.into()));
            }
        }
        Ok(starting)
    }

    /// Waits until QEMU answers on its monitor; afterwards the process runs independently of the calling process.
    ///
    /// # Errors
    /// If QEMU ends instead; the error has its error output. After any error the process has ended, because its caller
    /// removes the pid file, without which no command would find the process.
    pub fn finish(mut self, run: &RunFolder, patience: Duration) -> Result<(Process, Client)> {
        let ready = self.answered(run, patience).inspect_err(|_| {
            let _ = self.child.kill();
            let _ = self.child.wait();
        })?;
        let mut child = self.child;
        // A thread waits for the child, so that it does not remain a zombie while this process lives.
        let waiter = thread::Builder::new().name(format!("qemu {}", child.id())).spawn(move || child.wait());
        if let Err(error) = waiter {
            ready.0.end()?;
            return Err(Error::io("starting a thread", error));
        }
        Ok(ready)
    }

    fn answered(&mut self, run: &RunFolder, patience: Duration) -> Result<(Process, Client)> {
        let deadline = Instant::now() + patience;
        loop {
            // QEMU locks the pid file first, then listens, then sets up the machine, then answers.
            if let Some(process) = Process::find(&run.pid_file())?
                && run.monitor().exists()
            {
                let connected = Client::connect(&run.monitor(), deadline.saturating_duration_since(Instant::now()));
                match connected {
                    Ok(client) => return Ok((process, client)),
                    Err(error) if process.alive()? => return Err(self.failed(&error.to_string())),
                    Err(_) => {}
                }
            }
            if let Some(status) = self.child.try_wait().during(|| "waiting for QEMU".into())? {
                return Err(self.failed(&format!("ended ({status})")));
            }
            if Instant::now() >= deadline {
                return Err(self.failed("its monitor did not answer in time"));
            }
            thread::sleep(POLL);
        }
    }

    fn failed(&self, what: &str) -> Error {
        Error::new(ErrorKind::Io, format!("QEMU did not start, {what}: {}", self.complaint()))
    }

    fn complaint(&self) -> String {
        let text = fs::read_to_string(&self.errors).unwrap_or_default();
        match text.trim() {
            "" => format!("it wrote no message to '{}'", self.errors.display()),
            text => text.chars().take(COMPLAINT_MAX).collect(),
        }
    }
}

impl Process {
    /// The process that holds a pid file locked.
    pub fn find(pid_file: &Path) -> Result<Option<Self>> {
        let Some(pid) = holder(pid_file)? else { return Ok(None) };
        let descriptor = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            Err(Errno::SRCH) => return Ok(None),
            Err(e) => return Err(Error::io(format!("looking for process {pid:?}"), e.into())),
        };
        let same = holder(pid_file)? == Some(pid);
        Ok(same.then(|| Self { pid, file: pid_file.into(), descriptor }))
    }

    /// Ends the process that holds a pid file locked, and then locks the file itself while the result exists: a QEMU
    /// that was just started ends when it cannot lock the file. [`Process::find`] must not be called for the file
    /// meanwhile, because closing any descriptor of the file releases the lock.
    pub fn claim(pid_file: &Path) -> Result<fs::File> {
        let opening = || format!("opening '{}'", pid_file.display());
        loop {
            if let Some(process) = Self::find(pid_file)? {
                process.end()?;
            }
            let file = private::open_or_create(pid_file).during(opening)?;
            match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::AGAIN | Errno::ACCESS) => {}
                Err(e) => return Err(Error::io(format!("locking '{}'", pid_file.display()), e.into())),
            }
        }
    }

    /// Whether QEMU runs with its filter of system calls.
    pub fn is_sandboxed(&self) -> bool {
        // A process that has ended has no status.
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]))
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Whether the process is still running.
    pub fn alive(&self) -> Result<bool> {
        Ok(holder(&self.file)? == Some(self.pid))
    }

    /// Kills the process without notifying the guest, like a power failure.
    pub fn kill(&self) -> Result<()> {
        match pidfd_send_signal(&self.descriptor, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(e) => Err(Error::io(format!("ending process {}", self.pid()), e.into())),
        }
    }

    /// Kills the process, and waits for its end.
    pub fn end(&self) -> Result<()> {
        self.kill()?;
        match self.wait(END_PATIENCE)? {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Busy, format!("process {} was killed and does not end", self.pid()))),
        }
    }

    /// Sends QEMU the command to quit, and kills QEMU if it does not end. QEMU completes requests to the disks before
    /// it quits. The guest is not notified.
    pub fn quit(&self, monitor: Option<&mut Client>) -> Result<()> {
        // The connection stays open until the end, because QEMU may drop a command whose connection is closed.
        let told = monitor.is_some_and(|monitor| monitor.send(&json!({ "execute": "quit" })).is_ok());
        match told && self.wait(END_PATIENCE)? {
            true => Ok(()),
            false => self.end(),
        }
    }

    /// Waits for the end of the process; false if it is still running after `patience`.
    pub fn wait(&self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        while self.alive()? {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            thread::sleep(POLL);
        }
        Ok(true)
    }
}

/// The process that holds the lock on a file. A symbolic link is not followed, because it may lead to a file that a
/// process other than the machine's QEMU has locked.
fn holder(file: &Path) -> Result<Option<Pid>> {
    let not_followed = OFlags::NOFOLLOW.bits().cast_signed();
    let opened = match fs::OpenOptions::new().read(true).write(true).custom_flags(not_followed).open(file) {
        Ok(opened) => opened,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(format!("opening '{}'", file.display()), e)),
    };
    let lock = fcntl_getlk(&opened, &Flock::from(FlockType::WriteLock))
        .map_err(|e| Error::io(format!("determining which process has locked '{}'", file.display()), e.into()))?;
    Ok(lock.and_then(|lock| lock.pid))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn begin(run: &RunFolder, machine: &str) -> Result<Starting> {
        let monitor = format!("unix:{},server=on,wait=off", run.monitor().display());
        let pid = run.pid_file().display().to_string();
        let arguments = ["-machine", machine, "-nodefaults", "-display", "none", "-pidfile", &pid, "-qmp", &monitor];
        let arguments: Vec<OsString> = arguments.into_iter().map(OsString::from).collect();
        Starting::new(Path::new("qemu-system-x86_64"), &arguments, &run.errors(), None)
    }

    fn start(run: &RunFolder, machine: &str) -> Result<Process> {
        begin(run, machine)?.finish(run, PATIENCE).map(|(process, _)| process)
    }

    #[test]
    fn a_link_in_place_of_a_pid_file_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, b"").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(Process::find(&file).unwrap().is_none());
        assert!(Process::find(&link).is_err());
        assert!(Process::claim(&link).is_err());
    }

    #[test]
    fn a_running_process_is_found_and_ended() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder(folder.path().into());
        assert!(Process::find(&run.pid_file()).unwrap().is_none());
        let process = start(&run, "none").unwrap();
        let again = Process::find(&run.pid_file()).unwrap().unwrap();
        assert_eq!(again.pid(), process.pid());
        assert!(!process.wait(Duration::from_millis(5)).unwrap());
        again.kill().unwrap();
        assert!(process.wait(PATIENCE).unwrap());
        assert!(Process::find(&run.pid_file()).unwrap().is_none());
        process.kill().unwrap();
    }

    #[test]
    fn a_process_started_during_a_claim_does_not_run() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder(folder.path().into());
        // A claim ends the process that holds the lock on the pid file.
        start(&run, "none").unwrap();
        let claim = Process::claim(&run.pid_file()).unwrap();
        let mut late = begin(&run, "none").unwrap();
        assert!(!late.child.wait().unwrap().success());
        assert!(late.complaint().contains("pid file"), "{}", late.complaint());
        drop(claim);
        start(&run, "none").unwrap().end().unwrap();
    }

    #[test]
    fn a_process_whose_start_fails_for_another_reason_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder(folder.path().into());
        // A link in place of the pid file is not followed.
        let script = format!("ln -s nowhere '{}'; exec sleep 600", run.pid_file().display());
        let arguments: [OsString; 2] = ["-c".into(), script.into()];
        let starting = Starting::new(Path::new("/bin/sh"), &arguments, &run.errors(), None).unwrap();
        let process = PathBuf::from(format!("/proc/{}", starting.child.id()));
        assert!(process.exists());
        assert!(starting.finish(&run, PATIENCE).is_err());
        assert!(!process.exists(), "nothing would find the process without its pid file");
    }

    #[test]
    fn the_error_of_a_failed_start_contains_the_message_of_qemu() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder(folder.path().into());
        let error = start(&run, "perpetuum-mobile").unwrap_err();
        assert!(error.to_string().contains("unsupported machine type"), "{error}");
        let nowhere = Starting::new(Path::new("/nowhere/qemu"), &[], &run.errors(), None);
        assert_eq!(nowhere.err().unwrap().kind(), ErrorKind::NotFound);
    }
}
