//! Builds a copy of the repository with its faults, and runs the tests that must detect them.

use crate::diagnostics::{self, Fault};
use crate::list::Mutant;
use crate::plan::Plan;
use crate::process::{self, Ended};
use crate::{switch, tree};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest time for building a mutant.
const BUILD_TIME: Duration = Duration::from_secs(1800);
/// After this number of failed builds, a build that fails removes all mutants in the files with errors.
const EXACT_BUILDS: usize = 12;
/// Options of `cargo test` that have a value and select what is built.
const SELECT: [&str; 7] = ["-p", "--package", "--test", "--bin", "--example", "--bench", "--features"];

/// The result of a mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The test failed.
    Killed,
    /// The test did not end in time.
    TimedOut,
    /// The test passed: it does not detect the fault.
    Survived,
    /// The mutant cannot be planted or built, or its test cannot be run.
    Broken(String),
}

impl Outcome {
    /// Whether the test detected the fault.
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

/// The purpose of a run of cargo.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose<'a> {
    /// Building. The messages of the compiler are written to a file as JSON.
    Build,
    /// Running the tests without a fault. All tests run to their end, because the log must explain a failure.
    Baseline,
    /// Running the tests up to the first failure, with a mutant that is switched on or planted.
    Judge(Option<&'a str>),
}

/// The copy of the repository in which faults are planted.
pub struct Scratch {
    tree: PathBuf,
    build: PathBuf,
    log: PathBuf,
    messages: PathBuf,
    /// The folder for temporary files of tests, which a killed test leaves there.
    temporary: PathBuf,
    /// The longest time for a test without a fault.
    time: Duration,
}

impl Scratch {
    /// Updates the copy of `root`, with the switches of the plan.
    pub fn make(root: &Path, folder: &Path, plan: &Plan, time: Duration) -> Result<Self, String> {
        let scratch = Self {
            tree: folder.join("tree"),
            build: folder.join("target"),
            log: folder.join("log.txt"),
            messages: folder.join("messages.json"),
            // This folder is not below the copy, because the path of a Unix socket has at most 108 bytes.
            temporary: std::env::temp_dir().join(format!("mutants-{}", std::process::id())),
            time,
        };
        tree::mirror(root, &scratch.tree, &plan.texts())?;
        scratch.link_tools()?;
        Ok(scratch)
    }

    /// Tests look for the programs that `scripts/setup` has built beside the output of cargo.
    fn link_tools(&self) -> Result<(), String> {
        let link = self.build.join("tools");
        if link.symlink_metadata().is_ok() {
            return Ok(());
        }
        let made = fs::create_dir_all(&self.build).and_then(|()| symlink("../../tools", &link));
        made.map_err(|error| format!("{}: {error}", link.display()))
    }

    /// Builds the test programs of all commands. Removes mutants that do not compile from the plan. Returns the
    /// commands that cannot be built, each with the reason.
    pub fn build<'a>(
        &self,
        plan: &mut Plan,
        tests: impl Iterator<Item = &'a [String]>,
    ) -> Result<BTreeMap<&'a [String], String>, String> {
        let (mut built, mut failures) = (BTreeMap::<Vec<String>, Option<String>>::new(), BTreeMap::new());
        let mut failed = 0;
        for test in tests {
            let selection = selection(test);
            while !built.contains_key(&selection) {
                let result = match self.build_switched(&selection)? {
                    None => None,
                    Some(faults) => {
                        failed += 1;
                        let out = plan.take_out(&faults, failed > EXACT_BUILDS);
                        if !out.is_empty() {
                            let names = out.into_iter().collect::<Vec<_>>().join(", ");
                            eprintln!("planted alone, because they do not compile behind a switch: {names}");
                            for (path, text) in plan.texts() {
                                tree::write(&self.tree.join(path), text.as_bytes())?;
                            }
                            // The sources of the programs that are built already have changed, so these programs are
                            // built again.
                            built.retain(|_, result| result.is_some());
                            continue;
                        }
                        Some(format!("'cargo test {}' does not build; see {}", selection.join(" "), self.log.display()))
                    }
                };
                built.insert(selection.clone(), result);
            }
            if let Some(Some(why)) = built.get(&selection) {
                failures.insert(test, why.clone());
            }
        }
        Ok(failures)
    }

    /// Builds the programs of one selection. If this fails, returns the places of the errors.
    fn build_switched(&self, selection: &[String]) -> Result<Option<Vec<Fault>>, String> {
        if self.cargo(selection, Purpose::Build, BUILD_TIME)? == Ended::Well {
            return Ok(None);
        }
        let messages = fs::read_to_string(&self.messages).map_err(|error| format!("messages of rustc: {error}"))?;
        Ok(Some(diagnostics::faults(&messages)))
    }

    /// Runs a test command without a fault, and returns its duration. If it fails, its failure with a fault would prove
    /// nothing, so an error is returned.
    pub fn baseline(&self, test: &[String]) -> Result<Duration, String> {
        let command = test.join(" ");
        if self.cargo(test, Purpose::Build, BUILD_TIME)? != Ended::Well {
            return Err(format!("'cargo test {command}' does not build without any fault; see {}", self.log.display()));
        }
        let began = Instant::now();
        match self.cargo(test, Purpose::Baseline, self.time)? {
            Ended::Well if self.ran_nothing() => Err(format!("'cargo test {command}' names no test")),
            Ended::Well => Ok(began.elapsed()),
            Ended::Badly => Err(format!("'cargo test {command}' fails without any fault; see {}", self.log.display())),
            Ended::TooLate => Err(format!("'cargo test {command}' takes more than {} s", self.time.as_secs())),
        }
    }

    /// Runs the test of a mutant that is behind a switch. After `limit` the test counts as hanging.
    pub fn judge_switched(&self, mutant: &Mutant, limit: Duration) -> Outcome {
        let ended = self.cargo(&mutant.test, Purpose::Judge(Some(&mutant.name)), limit);
        self.outcome(mutant, ended).unwrap_or_else(Outcome::Broken)
    }

    /// Plants a fault, runs its test, and removes the fault. All other files have their switches.
    pub fn judge_alone(&self, mutant: &Mutant, plan: &Plan, limit: Duration) -> Outcome {
        let judge = || {
            let (original, switched) = plan.file(mutant)?;
            let planted = mutant.plant(original).map_err(|stale| stale.explain(mutant))?;
            let path = self.tree.join(&mutant.file);
            let outcome = tree::write(&path, planted.as_bytes()).and_then(|()| self.judge_planted(mutant, limit));
            tree::write(&path, switched.as_bytes())?;
            outcome
        };
        judge().unwrap_or_else(Outcome::Broken)
    }

    fn judge_planted(&self, mutant: &Mutant, limit: Duration) -> Result<Outcome, String> {
        if self.cargo(&mutant.test, Purpose::Build, BUILD_TIME)? != Ended::Well {
            return Err(format!("{} does not build; see {}", mutant.name, self.log.display()));
        }
        let ended = self.cargo(&mutant.test, Purpose::Judge(None), limit);
        self.outcome(mutant, ended)
    }

    fn outcome(&self, mutant: &Mutant, ended: Result<Ended, String>) -> Result<Outcome, String> {
        Ok(match ended? {
            Ended::Badly if self.log_has(|line| line.starts_with("error: could not compile")) => {
                return Err(format!("{} does not build; see {}", mutant.name, self.log.display()));
            }
            Ended::Badly => Outcome::Killed,
            Ended::TooLate => Outcome::TimedOut,
            Ended::Well => Outcome::Survived,
        })
    }

    /// Whether the last test command ran no test at all.
    fn ran_nothing(&self) -> bool {
        !self.log_has(|line| line.starts_with("test result: ok.") && !line.contains(" 0 passed"))
    }

    fn log_has(&self, what: impl Fn(&str) -> bool) -> bool {
        let log = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log).lines().any(what)
    }

    fn cargo(&self, test: &[String], purpose: Purpose, time: Duration) -> Result<Ended, String> {
        let failed = |error: std::io::Error| format!("running cargo: {error}");
        let log = File::create(&self.log).map_err(failed)?;
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.arg("test").current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.build);
        // Variables that cargo has set for this program must not influence the build.
        for name in ["CARGO_MANIFEST_DIR", "RUSTFLAGS", "RUSTC_WRAPPER", switch::VARIABLE] {
            command.env_remove(name);
        }
        let output = match purpose {
            Purpose::Build => {
                command.args(["--no-run", "--message-format=json"]);
                File::create(&self.messages).map_err(failed)?
            }
            Purpose::Baseline | Purpose::Judge(_) => {
                fs::create_dir_all(&self.temporary).map_err(failed)?;
                command.env("TMPDIR", &self.temporary);
                log.try_clone().map_err(failed)?
            }
        };
        if let Purpose::Judge(Some(mutant)) = purpose {
            command.env(switch::VARIABLE, mutant);
        }
        command.args(test).stdin(Stdio::null()).stdout(output).stderr(log);
        let ended = process::run(&mut command, &self.log, time, matches!(purpose, Purpose::Judge(_)));
        if purpose == Purpose::Build {
            let messages = fs::read_to_string(&self.messages).map_err(failed)?;
            let mut log = File::options().append(true).open(&self.log).map_err(failed)?;
            log.write_all(diagnostics::rendered(&messages).as_bytes()).map_err(failed)?;
        }
        // Files that cannot be removed do not affect the next test.
        let _ = fs::remove_dir_all(&self.temporary);
        ended
    }
}

/// The part of a test command that selects what is built: without the names of tests and without arguments of the test
/// program.
fn selection(test: &[String]) -> Vec<String> {
    let mut out = Vec::new();
    let mut words = test.iter().take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if word.starts_with('-') {
            out.push(word.clone());
            if SELECT.contains(&word.as_str()) {
                out.extend(words.next().cloned());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests;
