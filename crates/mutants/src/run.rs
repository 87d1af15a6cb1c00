//! Plants one fault and runs the test that must detect it.
//!
//! All work is done in a copy of the repository below `target/mutants` with its own build folder, so the repository is
//! never changed and builds are incremental.

use crate::list::Mutant;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest time for building a mutant.
const BUILD_TIME: Duration = Duration::from_secs(1800);
/// How often a process is polled.
const POLL: Duration = Duration::from_millis(50);
/// Folders that are not copied.
const LEFT_OUT: [&str; 3] = ["target", ".git", "bench-results"];

/// The result of a mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The test failed.
    Killed,
    /// The test did not end in time.
    TimedOut,
    /// The test passed: it does not detect the fault.
    Survived,
    /// The mutant cannot be planted, built or judged.
    Broken(String),
}

impl Outcome {
    /// True when the test detected the fault.
    pub fn is_killed(&self) -> bool {
        matches!(self, Outcome::Killed | Outcome::TimedOut)
    }

    /// The result in one word.
    pub fn word(&self) -> &'static str {
        match self {
            Outcome::Killed => "killed",
            Outcome::TimedOut => "killed (time)",
            Outcome::Survived => "SURVIVED",
            Outcome::Broken(_) => "BROKEN",
        }
    }
}

enum Ended {
    Well,
    Badly,
    TooLate,
}

/// The copy in which faults are planted.
pub struct Scratch {
    tree: PathBuf,
    build: PathBuf,
    log: PathBuf,
    /// The longest time for a test.
    time: Duration,
}

impl Scratch {
    /// Updates the copy of `root`. Unchanged files keep their times, so that they are not built again.
    pub fn make(root: &Path, folder: &Path, time: Duration) -> Result<Self, String> {
        let scratch =
            Self { tree: folder.join("tree"), build: folder.join("target"), log: folder.join("log.txt"), time };
        mirror(root, &scratch.tree)?;
        Ok(scratch)
    }

    /// Runs a test command without any fault. After an error, a failure of the test would prove nothing.
    pub fn baseline(&self, test: &[String]) -> Result<(), String> {
        let command = test.join(" ");
        if !matches!(self.cargo(test, true, BUILD_TIME)?, Ended::Well) {
            return Err(format!("'cargo test {command}' does not build without any fault; see {}", self.log.display()));
        }
        match self.cargo(test, false, self.time)? {
            Ended::Well if self.ran_nothing() => Err(format!("'cargo test {command}' names no test")),
            Ended::Well => Ok(()),
            Ended::Badly => Err(format!("'cargo test {command}' fails without any fault; see {}", self.log.display())),
            Ended::TooLate => Err(format!("'cargo test {command}' takes more than {} s", self.time.as_secs())),
        }
    }

    /// Plants a fault, runs its test, and removes the fault.
    pub fn judge(&self, mutant: &Mutant) -> Outcome {
        let path = self.tree.join(&mutant.file);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => return Outcome::Broken(format!("{}: {}: {error}", mutant.name, mutant.file)),
        };
        let planted = match mutant.plant(&text) {
            Ok(planted) => planted,
            Err(stale) => return Outcome::Broken(stale.explain(mutant)),
        };
        let outcome = fs::write(&path, planted)
            .map_err(|error| format!("{}: {error}", path.display()))
            .and_then(|()| self.judge_planted(mutant));
        let restored = fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()));
        outcome.and_then(|outcome| restored.map(|()| outcome)).unwrap_or_else(Outcome::Broken)
    }

    fn judge_planted(&self, mutant: &Mutant) -> Result<Outcome, String> {
        if !matches!(self.cargo(&mutant.test, true, BUILD_TIME)?, Ended::Well) {
            return Err(format!("{} does not build; see {}", mutant.name, self.log.display()));
        }
        Ok(match self.cargo(&mutant.test, false, self.time)? {
            Ended::Badly => Outcome::Killed,
            Ended::TooLate => Outcome::TimedOut,
            Ended::Well => Outcome::Survived,
        })
    }

    /// True when the last test command ran no test at all.
    fn ran_nothing(&self) -> bool {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        !log.lines().any(|line| line.starts_with("test result: ok.") && !line.contains(" 0 passed"))
    }

    fn cargo(&self, test: &[String], only_build: bool, time: Duration) -> Result<Ended, String> {
        let failed = |error: std::io::Error| format!("running cargo: {error}");
        let log = File::create(&self.log).map_err(failed)?;
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.arg("test").current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.build);
        // Variables of the surrounding cargo must not influence the build.
        for name in ["CARGO_MANIFEST_DIR", "RUSTFLAGS", "RUSTC_WRAPPER"] {
            command.env_remove(name);
        }
        if only_build {
            command.arg("--no-run");
        }
        command.args(test);
        command.stdin(Stdio::null()).stdout(log.try_clone().map_err(failed)?).stderr(log);
        // With a process group of its own, a test that hangs is killed together with its child processes.
        let mut child = command.process_group(0).spawn().map_err(failed)?;
        let began = Instant::now();
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(if status.success() { Ended::Well } else { Ended::Badly });
            }
            if began.elapsed() > time {
                let group = format!("-{}", child.id());
                Command::new("kill").args(["-KILL", "--", &group]).status().map_err(failed)?;
                child.wait().map_err(failed)?;
                return Ok(Ended::TooLate);
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Makes `to` a copy of `from`, and removes all other files from `to`.
fn mirror(from: &Path, to: &Path) -> Result<(), String> {
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(to).map_err(|error| failed(to, error))?;
    let mut kept = Vec::new();
    for entry in fs::read_dir(from).map_err(|error| failed(from, error))? {
        let entry = entry.map_err(|error| failed(from, error))?;
        let (name, path) = (entry.file_name(), entry.path());
        let kind = entry.file_type().map_err(|error| failed(&path, error))?;
        if LEFT_OUT.iter().any(|left_out| name == *left_out) {
            continue;
        }
        let target = to.join(&name);
        if kind.is_dir() {
            mirror(&path, &target)?;
        } else if kind.is_file() {
            let content = fs::read(&path).map_err(|error| failed(&path, error))?;
            if fs::read(&target).ok().as_ref() != Some(&content) {
                fs::copy(&path, &target).map_err(|error| failed(&target, error))?;
            }
        } else {
            continue;
        }
        kept.push(name);
    }
    for entry in fs::read_dir(to).map_err(|error| failed(to, error))? {
        let entry = entry.map_err(|error| failed(to, error))?;
        let path = entry.path();
        if kept.contains(&entry.file_name()) || LEFT_OUT.iter().any(|left_out| entry.file_name() == *left_out) {
            continue;
        }
        let gone = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        gone.map_err(|error| failed(&path, error))?;
    }
    Ok(())
}
