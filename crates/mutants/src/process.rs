//! Runs a command with a time limit, and ends a run of tests at the first failure.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Interval at which a process is polled.
const POLL: Duration = Duration::from_millis(20);

/// The longest time that one interval adds to the running time of a command.
const LONGEST_POLL: Duration = Duration::from_secs(1);

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The command succeeded.
    Well,
    /// The command failed.
    Badly,
    /// The command was killed after the time limit.
    TooLate,
}

/// Runs a command that writes into `log`. With `until_failure`, the command is killed when the name of a failed test is
/// in the log, unless the test program has child processes: these may have mounted file systems or started servers,
/// which they remove at the end of their test.
pub fn run(command: &mut Command, log: &Path, limit: Duration, until_failure: bool) -> Result<Ended, String> {
    let failed = |error: std::io::Error| format!("running cargo: {error}");
    // The command has its own process group, so that a test that hangs can be killed together with its child processes.
    let mut child = command.process_group(0).spawn().map_err(failed)?;
    let (mut spent, mut seen) = (Duration::ZERO, Instant::now());
    let mut watch = Watch { file: File::open(log).map_err(failed)?, rest: Vec::new(), failed: false };
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok(if status.success() { Ended::Well } else { Ended::Badly });
        }
        // A time in which this process was stopped (suspended) does not count, because the test was stopped too.
        spent += seen.elapsed().min(LONGEST_POLL);
        seen = Instant::now();
        if spent > limit {
            kill(&mut child).map_err(failed)?;
            return Ok(Ended::TooLate);
        }
        if until_failure && watch.sees_failure().map_err(failed)? && runs_nothing_else(child.id()) {
            kill(&mut child).map_err(failed)?;
            return Ok(Ended::Badly);
        }
        std::thread::sleep(POLL);
    }
}

/// Kills a process and its group, and waits for its end.
fn kill(child: &mut Child) -> std::io::Result<()> {
    let group = format!("-{}", child.id());
    Command::new("kill").args(["-KILL", "--", &group]).status()?;
    child.wait().map(drop)
}

/// Reads a log while it grows.
struct Watch {
    file: File,
    /// The beginning of the last line.
    rest: Vec<u8>,
    failed: bool,
}

impl Watch {
    fn sees_failure(&mut self) -> std::io::Result<bool> {
        let mut new = [0; 64 << 10];
        while !self.failed {
            let length = match self.file.read(&mut new) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.rest.extend_from_slice(&new[..length]);
            let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            self.failed = self.rest[..whole].split(|byte| *byte == b'\n').any(is_failure);
            self.rest.drain(..whole);
        }
        Ok(self.failed)
    }
}

/// Whether a line of the log says that a test has failed.
fn is_failure(line: &[u8]) -> bool {
    line.starts_with(b"test ") && line.ends_with(b" ... FAILED")
}

/// Whether all children of a process have no children themselves. False if the kernel does not report children.
fn runs_nothing_else(process: u32) -> bool {
    let has_none = |child: &u32| children(*child).is_some_and(|children| children.is_empty());
    children(process).is_some_and(|children| children.iter().all(has_none))
}

/// The children of all threads of a process.
fn children(process: u32) -> Option<Vec<u32>> {
    let mut out = Vec::new();
    for thread in fs::read_dir(format!("/proc/{process}/task")).ok()? {
        let list = fs::read_to_string(thread.ok()?.path().join("children")).ok()?;
        out.extend(list.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    /// Runs a shell script in place of cargo. Returns how the script ended, and its log.
    fn shell(name: &str, script: &str, limit: Duration) -> (Ended, String) {
        shell_until(name, script, limit, true)
    }

    fn shell_until(name: &str, script: &str, limit: Duration, until_failure: bool) -> (Ended, String) {
        let log = std::env::temp_dir().join(format!("lamina-mutants-{name}-{}", std::process::id()));
        let file = File::create(&log).expect("a log");
        let mut command = Command::new("bash");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(file);
        let ended = run(&mut command, &log, limit, until_failure).expect("it runs");
        let text = fs::read_to_string(&log).expect("a log");
        fs::remove_file(&log).expect("the log is there");
        (ended, text)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_command_ends_in_one_of_three_ways() {
        assert_eq!(shell("well", "echo 'test a ... ok'", LONG).0, Ended::Well);
        assert_eq!(shell("badly", "exit 1", LONG).0, Ended::Badly);
        assert_eq!(shell("late", "sleep 60 & sleep 60; true", Duration::from_millis(100)).0, Ended::TooLate);
    }

    #[test]
    fn a_run_ends_at_the_first_failure() {
        let began = Instant::now();
        let (ended, log) = shell("first", "echo 'test a ... FAILED'; sleep 50; echo end", LONG);
        assert_eq!(ended, Ended::Badly);
        assert!(!log.contains("end") && began.elapsed() < Duration::from_secs(30));
        let (ended, log) = shell_until("all", "echo 'test a ... FAILED'; sleep 0.3; echo end; exit 1", LONG, false);
        assert!(ended == Ended::Badly && log.contains("end"));
        assert_eq!(shell("text", "echo 'x test a ... FAILED'; echo test; sleep 0.3; exit 0", LONG).0, Ended::Well);
    }

    #[test]
    fn a_test_with_child_processes_is_not_interrupted() {
        let script = "bash -c \"echo 'test a ... FAILED'; bash -c 'sleep 0.5; echo unmounted'; true\"; exit 1";
        let (ended, log) = shell("children", script, LONG);
        assert_eq!(ended, Ended::Badly);
        assert!(log.contains("unmounted"), "{log}");
    }
}
