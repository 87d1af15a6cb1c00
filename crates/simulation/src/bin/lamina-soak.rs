//! Random runs without end: power cuts, failing media, full file systems, plain use. Prints the seed that fails.
//!
//! `lamina-soak [PROFILE] [--seed N] [--runs N] [--from N]`

#![forbid(unsafe_code)]

use simulation::operation::Profile;
use simulation::run::Statistics;
use simulation::scenario;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time spent on making a failing run shorter.
const SHRINK_TIME: Duration = Duration::from_secs(60);
/// How often progress is told.
const TELL: Duration = Duration::from_secs(10);

struct Arguments {
    profiles: Vec<Profile>,
    from: u64,
    runs: u64,
}

fn arguments() -> Result<Arguments, String> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let mut out = Arguments { profiles: Profile::ALL.to_vec(), from: since << 20, runs: u64::MAX };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || {
            let value = words.next().ok_or_else(|| format!("{word} wants a number"))?;
            value.parse::<u64>().map_err(|error| format!("{word} {value}: {error}"))
        };
        match word.as_str() {
            "--seed" => (out.from, out.runs) = (number()?, 1),
            "--from" => out.from = number()?,
            "--runs" => out.runs = number()?,
            name => match Profile::ALL.into_iter().find(|profile| profile.name() == name) {
                Some(profile) => out.profiles = vec![profile],
                None => {
                    return Err(format!(
                        "{name}: not model, power-cuts, tight, errors, full, --seed, --from or --runs"
                    ));
                }
            },
        }
    }
    Ok(out)
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("lamina-soak: {error}");
            return ExitCode::from(2);
        }
    };
    let began = Instant::now();
    let mut told = began;
    let mut sum = Statistics::default();
    for run in 0..arguments.runs {
        let seed = arguments.from.wrapping_add(run);
        for profile in &arguments.profiles {
            match scenario::run(seed, *profile) {
                Ok(statistics) => sum += statistics,
                Err(failure) => {
                    println!("{failure}\n\nmaking it shorter ...\n");
                    println!("{}", scenario::shrink(failure, SHRINK_TIME));
                    return ExitCode::FAILURE;
                }
            }
        }
        if told.elapsed() > TELL {
            told = Instant::now();
            let seconds = began.elapsed().as_secs();
            println!("{seconds} s: seed {seed}, no violation, {sum:?}");
        }
    }
    println!("no violation, {sum:?}");
    ExitCode::SUCCESS
}
