//! Plants deliberate faults one at a time, and reports whether the test that must detect each fault fails.
//!
//! `lamina-mutants [--list] [--check] [--only NAME]... [--json] [--no-baseline] [--seconds N]`

#![forbid(unsafe_code)]

mod list;
mod run;

use list::Mutant;
use run::{Outcome, Scratch};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The longest time for the test of a mutant. A test that takes longer counts as hanging.
const TEST_SECONDS: u64 = 300;

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
    let mut mutants = list::read(&root.join("mutants"))?;
    mutants.retain(|mutant| wanted(mutant, &arguments.only));
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
    let scratch = Scratch::make(&root, &target.join("mutants"), arguments.time)?;
    judge_all(&scratch, &mutants, arguments)
}

/// Checks that every mutant can be planted, without building anything.
fn check(root: &Path, mutants: &[Mutant]) -> Result<bool, String> {
    let mut stale = 0;
    for mutant in mutants {
        let path = root.join(&mutant.file);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if let Err(why) = mutant.plant(&text) {
            println!("{}", why.explain(mutant));
            stale += 1;
        }
    }
    println!("{} mutants, {stale} whose text is not in the code any more", mutants.len());
    Ok(stale == 0)
}

fn judge_all(scratch: &Scratch, mutants: &[Mutant], arguments: &Arguments) -> Result<bool, String> {
    let began = Instant::now();
    let mut sound: BTreeMap<&[String], Result<(), String>> = BTreeMap::new();
    let mut outcomes: Vec<(&Mutant, Outcome, Duration)> = Vec::new();
    for mutant in mutants {
        if arguments.baseline && !sound.contains_key(mutant.test.as_slice()) {
            sound.insert(&mutant.test, scratch.baseline(&mutant.test));
        }
        let since = Instant::now();
        let outcome = match sound.get(mutant.test.as_slice()) {
            Some(Err(why)) => Outcome::Broken(why.clone()),
            _ => scratch.judge(mutant),
        };
        let took = since.elapsed();
        if arguments.json {
            let why = match &outcome {
                Outcome::Broken(why) => why.as_str(),
                _ => "",
            };
            let line = serde_json::json!({
                "name": mutant.name, "breaks": mutant.breaks, "file": mutant.file, "test": mutant.test.join(" "),
                "outcome": outcome.word(), "why": why, "seconds": took.as_secs_f64(),
            });
            println!("{line}");
        } else {
            println!("{:<14} {:>5} s  {}: {}", outcome.word(), took.as_secs(), mutant.name, mutant.breaks);
            if let Outcome::Broken(why) = &outcome {
                println!("{:24}{why}", "");
            }
        }
        outcomes.push((mutant, outcome, took));
    }
    let killed = outcomes.iter().filter(|(_, outcome, _)| outcome.is_killed()).count();
    let survived = outcomes.iter().filter(|(_, outcome, _)| *outcome == Outcome::Survived).count();
    let broken = outcomes.len() - killed - survived;
    let seconds = began.elapsed().as_secs();
    if arguments.json {
        let line = serde_json::json!({
            "mutants": outcomes.len(), "killed": killed, "survived": survived, "broken": broken, "seconds": seconds,
        });
        println!("{line}");
    } else {
        println!("{} mutants: {killed} killed, {survived} survived, {broken} broken, {seconds} s", outcomes.len());
    }
    Ok(killed == outcomes.len())
}
