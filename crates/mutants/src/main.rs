//! Plants deliberate faults (mutants), and reports for each fault whether the test that must detect it fails.
//!
//! `lamina-mutants [--list] [--check] [--only NAME]... [--json] [--no-baseline] [--seconds N]`
//!
//! Most faults are built together, each behind a switch, and then switched on one at a time. The others are built
//! alone.

#![forbid(unsafe_code)]

mod diagnostics;
mod list;
mod plan;
mod process;
mod run;
mod switch;
mod tree;

use list::Mutant;
use plan::Plan;
use run::{Outcome, Scratch};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The longest time for the test of a mutant. A test that takes longer counts as hanging.
const TEST_SECONDS: u64 = 300;
/// A test also counts as hanging if it takes this many times as long as without a fault, and this much longer.
const HANGING: (u32, Duration) = (10, Duration::from_secs(30));

struct Arguments {
    list: bool,
    check: bool,
    json: bool,
    baseline: bool,
    only: Vec<String>,
    time: Duration,
}

fn arguments() -> Result<Arguments, String> {
    let mut out = Arguments {
        list: false,
        check: false,
        json: false,
        baseline: true,
        only: Vec::new(),
        time: Duration::from_secs(TEST_SECONDS),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--list" => out.list = true,
            "--check" => out.check = true,
            "--json" => out.json = true,
            "--no-baseline" => out.baseline = false,
            "--only" => out.only.push(words.next().ok_or("--only needs a name, or the beginning of a name and *")?),
            "--seconds" => {
                let value = words.next().ok_or("--seconds needs a number")?;
                out.time = Duration::from_secs(value.parse().map_err(|error| format!("--seconds {value}: {error}"))?);
            }
            other => {
                return Err(format!("{other}: not --list, --check, --only, --json, --no-baseline or --seconds"));
            }
        }
    }
    Ok(out)
}

fn wanted(mutant: &Mutant, only: &[String]) -> bool {
    let matches = |pattern: &String| match pattern.strip_suffix('*') {
        Some(beginning) => mutant.name.starts_with(beginning),
        None => mutant.name == *pattern,
    };
    only.is_empty() || only.iter().any(matches)
}

fn main() -> ExitCode {
    match arguments().and_then(|arguments| work(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("lamina-mutants: {error}");
            ExitCode::from(2)
        }
    }
}

fn work(arguments: &Arguments) -> Result<bool, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root.canonicalize().map_err(|error| format!("{}: {error}", root.display()))?;
    let all = list::read(&root.join("mutants"))?;
    let mutants: Vec<Mutant> = all.iter().filter(|mutant| wanted(mutant, &arguments.only)).cloned().collect();
    if mutants.is_empty() {
        return Err("no mutant has such a name; --list shows them".into());
    }
    if arguments.list {
        mutants.iter().for_each(|mutant| println!("{:<44} {}", mutant.name, mutant.breaks));
        return Ok(true);
    }
    if arguments.check {
        return check(&root, &mutants);
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let target = std::path::absolute(&target).map_err(|error| format!("{}: {error}", target.display()))?;
    // The switches of all mutants are planted, even of those that are not tested in this run, so that the sources are
    // the same in each build.
    let mut plan = Plan::make(&root, &all);
    let scratch = Scratch::make(&root, &target.join("mutants"), &plan, arguments.time)?;
    judge_all(&scratch, &mut plan, mutants, arguments)
}

/// Checks that every mutant can be planted, without building anything.
fn check(root: &Path, mutants: &[Mutant]) -> Result<bool, String> {
    let mut stale = 0;
    for mutant in mutants {
        let path = root.join(&mutant.file);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if let Err(why) = mutant.change(&text) {
            println!("{}", why.explain(mutant));
            stale += 1;
        }
    }
    let plan = Plan::make(root, mutants);
    let mut alone = 0;
    for (mutant, why) in mutants.iter().filter_map(|mutant| plan.alone(mutant).map(|why| (mutant, why))) {
        println!("{}: planted alone: {why}", mutant.name);
        alone += 1;
    }
    println!("{} mutants, {stale} whose text is not in the code any more, {alone} planted alone", mutants.len());
    Ok(stale == 0)
}

/// Builds the tests, runs the test of each mutant, and reports. Returns whether all mutants are detected.
fn judge_all(
    scratch: &Scratch,
    plan: &mut Plan,
    mut mutants: Vec<Mutant>,
    arguments: &Arguments,
) -> Result<bool, String> {
    let began = Instant::now();
    let tests: Vec<Vec<String>> = mutants.iter().map(|mutant| mutant.test.clone()).collect();
    let failures = scratch.build(plan, tests.iter().map(Vec::as_slice))?;
    // Mutants that are planted alone are tested last, and those of the same file one after another, because each
    // changes the files that are built.
    mutants.sort_by_cached_key(|mutant| match plan.alone(mutant) {
        None => (false, String::new(), mutant.test.clone()),
        Some(_) => (true, mutant.file.clone(), mutant.test.clone()),
    });
    let alone = mutants.iter().filter(|mutant| plan.alone(mutant).is_some()).count();
    let switched = mutants.len() - alone;
    eprintln!("{switched} mutants behind switches, {alone} alone, tests built in {} s", began.elapsed().as_secs());

    let mut sound: BTreeMap<&[String], Result<Duration, String>> =
        failures.into_iter().map(|(test, why)| (test, Err(why))).collect();
    let (mut killed, mut survived) = (0, 0);
    for mutant in &mutants {
        if arguments.baseline && !sound.contains_key(mutant.test.as_slice()) {
            sound.insert(&mutant.test, scratch.baseline(&mutant.test));
        }
        let since = Instant::now();
        let alone = plan.alone(mutant);
        let limit = match sound.get(mutant.test.as_slice()) {
            Some(Ok(usual)) => Ok(arguments.time.min(*usual * HANGING.0 + HANGING.1)),
            Some(Err(why)) => Err(why.clone()),
            None => Ok(arguments.time),
        };
        let outcome = match (limit, &alone) {
            (Err(why), _) => Outcome::Broken(why),
            (Ok(limit), None) => scratch.judge_switched(mutant, limit),
            (Ok(limit), Some(_)) => scratch.judge_alone(mutant, plan, limit),
        };
        report(mutant, &outcome, alone, since.elapsed(), arguments.json);
        killed += usize::from(outcome.is_killed());
        survived += usize::from(outcome == Outcome::Survived);
    }
    let broken = mutants.len() - killed - survived;
    let seconds = began.elapsed().as_secs();
    if arguments.json {
        let line = serde_json::json!({
            "mutants": mutants.len(), "killed": killed, "survived": survived, "broken": broken, "seconds": seconds,
            "switched": switched,
        });
        println!("{line}");
    } else {
        println!("{} mutants: {killed} killed, {survived} survived, {broken} broken, {seconds} s", mutants.len());
    }
    Ok(killed == mutants.len())
}

/// Prints the result of a mutant on one line. `alone` is the reason why it was not behind a switch.
fn report(mutant: &Mutant, outcome: &Outcome, alone: Option<String>, took: Duration, json: bool) {
    if json {
        let why = match outcome {
            Outcome::Broken(why) => why.as_str(),
            _ => "",
        };
        let line = serde_json::json!({
            "name": mutant.name, "breaks": mutant.breaks, "file": mutant.file, "test": mutant.test.join(" "),
            "outcome": outcome.word(), "why": why, "seconds": took.as_secs_f64(), "alone": alone,
        });
        println!("{line}");
        return;
    }
    println!("{:<14} {:>5} s  {}: {}", outcome.word(), took.as_secs(), mutant.name, mutant.breaks);
    if let Outcome::Broken(why) = outcome {
        println!("{:24}{why}", "");
    } else if let Some(alone) = alone {
        println!("{:24}planted alone: {alone}", "");
    }
}
