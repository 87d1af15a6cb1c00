//! Child processes: commands that end on their own, and services that run until they are stopped.
//!
//! Invariants:
//!
//! 1. Every child is in [`CHILDREN`] from its start until just before it is reaped. Signals are sent and entries
//!    removed under one lock, and a child is reaped after its entry was removed. So signals for interruptions and
//!    deadlines are sent to every child, but never to another process that has the same pid later.
//! 2. When the study ends, all children have ended: a service is stopped when it is dropped, a command is ended at its
//!    deadline, and all children are ended on SIGINT, SIGTERM and SIGHUP.

use crate::error::{Doing, Error, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Default time limit of a command.
pub const COMMAND_TIME_MAX: Duration = Duration::from_secs(600);
/// Time that a service may take to stop.
pub const STOP_TIME_MAX: Duration = Duration::from_secs(60);
/// Interval at which deadlines are checked.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);
/// Most bytes of a child's standard error in an error message.
const LAST_WORDS_MAX: usize = 2000;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static CHILDREN: Mutex<BTreeMap<u32, Deadline>> = Mutex::new(BTreeMap::new());

struct Deadline {
    at: Option<Instant>,
    passed: bool,
}

fn children() -> MutexGuard<'static, BTreeMap<u32, Deadline>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn signal(id: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(id).ok().and_then(Pid::from_raw) {
        // An error is ignored: the child has just ended.
        let _ = kill_process(pid, signal);
    }
}

/// Starts watching for signals and deadlines. Called once, before the first child is started.
pub fn watch() -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals =
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).doing(|| "watching for signals".into())?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            INTERRUPTED.store(true, Ordering::SeqCst);
            for id in children().keys() {
                signal(*id, Signal::TERM);
            }
        }
    });
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(WATCH_INTERVAL);
            let now = Instant::now();
            for (id, deadline) in children().iter_mut() {
                if deadline.at.is_some_and(|at| at <= now) {
                    deadline.passed = true;
                    signal(*id, Signal::KILL);
                }
            }
        }
    });
    Ok(())
}

/// Returns an error if the user has requested an interruption.
pub fn go_on() -> Result<()> {
    if INTERRUPTED.load(Ordering::SeqCst) { Err(Error::Interrupted) } else { Ok(()) }
}

/// Sleeps for a time, but returns early at an interruption.
pub fn pause(time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    loop {
        go_on()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(50)));
    }
}

/// The command line as a user would type it.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

fn spawn(command: &mut Command, at: Option<Instant>) -> Result<Child> {
    go_on()?;
    let mut all = children();
    let child =
        command.spawn().doing(|| format!("starting {} (is it installed? see scripts/setup)", shown(command)))?;
    all.insert(child.id(), Deadline { at, passed: false });
    Ok(child)
}

/// Waits for the end of a child, then reaps it. Also returns whether the child was ended at its deadline.
fn reap(child: &mut Child) -> Result<(ExitStatus, bool)> {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // Waits without reaping, so that the pid stays reserved until the child is removed from the list.
        while let Err(e) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            if e != rustix::io::Errno::INTR {
                break;
            }
        }
    }
    let passed = children().remove(&child.id()).is_some_and(|d| d.passed);
    let status = child.wait().doing(|| "waiting for a child".into())?;
    Ok((status, passed))
}

/// Runs a command; returns its standard output.
pub fn run(command: &mut Command) -> Result<String> {
    run_within(command, COMMAND_TIME_MAX)
}

/// Runs a command with a time limit.
pub fn run_within(command: &mut Command, time: Duration) -> Result<String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = spawn(command, Some(Instant::now() + time))?;
    let errors = child.stderr.take();
    let errors = std::thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut pipe) = errors {
            let _ = pipe.read_to_end(&mut text);
        }
        text
    });
    let mut output = Vec::new();
    if let Some(mut pipe) = child.stdout.take() {
        // An error of reading is ignored, because the command's status or its output shows the failure below.
        let _ = pipe.read_to_end(&mut output);
    }
    let errors = errors.join().unwrap_or_default();
    let (status, passed) = reap(&mut child)?;
    go_on()?;
    if passed {
        let detail = format!("still running after {} s, ended", time.as_secs());
        return Err(Error::Command { command: shown(command), detail });
    }
    if !status.success() {
        let words = String::from_utf8_lossy(&errors[errors.len().saturating_sub(LAST_WORDS_MAX)..]).trim().to_string();
        return Err(Error::Command { command: shown(command), detail: format!("{status}: {words}") });
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// Clock ticks per second in `/proc`, which is 100 on all common architectures.
const CLOCK_TICKS: u32 = 100;

/// A process that runs until it is stopped.
#[derive(Debug)]
pub struct Service {
    child: Option<Child>,
    command: String,
    log: std::path::PathBuf,
}

impl Service {
    /// Starts the service; its output is written to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Service> {
        let out = File::create(log).doing(|| format!("creating {}", log.display()))?;
        let err = out.try_clone().doing(|| format!("opening {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let child = spawn(command, None)?;
        Ok(Service { child: Some(child), command: shown(command), log: log.to_path_buf() })
    }

    /// The pid of the service.
    pub fn id(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Processor time that all threads of the service have used so far.
    pub fn processor_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.id());
        let text = std::fs::read_to_string(&path).doing(|| format!("reading {path}"))?;
        // The program's name is in parentheses and may contain any character; user and system time are fields 14 and
        // 15.
        let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
        let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(Duration::from_secs(ticks) / CLOCK_TICKS)
    }

    /// Whether the service has ended.
    pub fn ended(&self) -> bool {
        let Some(pid) = i32::try_from(self.id()).ok().and_then(Pid::from_raw) else { return true };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        !matches!(waitid(WaitId::Pid(pid), options), Ok(None))
    }

    /// Whether the service has printed a line with this prefix.
    pub fn has_said(&self, start: &str) -> bool {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log).lines().any(|line| line.starts_with(start))
    }

    /// An error about the service, with the end of its log.
    pub fn failure(&self, what: &str) -> Error {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let words = String::from_utf8_lossy(&log[log.len().saturating_sub(LAST_WORDS_MAX)..]).trim().to_string();
        Error::Command { command: self.command.clone(), detail: format!("{what}: {words}") }
    }

    /// Current and maximum resident memory, in bytes.
    pub fn resident(&self) -> Result<(u64, u64)> {
        let path = format!("/proc/{}/status", self.id());
        let text = std::fs::read_to_string(&path).doing(|| format!("reading {path}"))?;
        let field = |name: &str| {
            let line = text.lines().find(|l| l.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
        };
        field("VmRSS:").zip(field("VmHWM:")).ok_or_else(|| Error::Answer(format!("{path} has no VmRSS")))
    }

    /// Stops the service with SIGTERM and waits for its end. If it has not ended after [`STOP_TIME_MAX`], it is killed,
    /// and an error is returned.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    /// Kills the service, like a crash, and waits for its end.
    pub fn kill(mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        signal(child.id(), Signal::KILL);
        reap(&mut child).map(|_| ())
    }

    fn end(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        {
            let mut all = children();
            if let Some(entry) = all.get_mut(&child.id()) {
                entry.at = Some(Instant::now() + STOP_TIME_MAX);
            }
            signal(child.id(), Signal::TERM);
        }
        let (_, passed) = reap(&mut child)?;
        if passed { Err(self.failure("did not stop on SIGTERM")) } else { Ok(()) }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_command_returns_its_output_or_the_end_of_its_stderr() {
        assert_eq!(run(Command::new("echo").arg("hello")).unwrap(), "hello\n");
        let error = run(Command::new("sh").args(["-c", "echo broken >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains('3'), "{error}");
        let error = run(&mut Command::new("no-such-program-here")).unwrap_err().to_string();
        assert!(error.contains("no-such-program-here"), "{error}");
    }

    #[test]
    fn a_command_past_its_deadline_is_ended() {
        watch().unwrap();
        let began = Instant::now();
        let error = run_within(Command::new("sleep").arg("60"), Duration::from_millis(300)).unwrap_err();
        assert!(error.to_string().contains("still running"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_service_stops_when_dropped() {
        let log = std::env::temp_dir().join(format!("study-service-{}", std::process::id()));
        let service = Service::start(Command::new("sleep").arg("60"), &log).unwrap();
        let id = service.id();
        assert!(!service.ended() && service.resident().unwrap().0 > 0);
        drop(service);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
        std::fs::remove_file(log).unwrap();
    }
}
