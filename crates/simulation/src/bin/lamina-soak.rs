//! Random runs without end: power cuts in every regime, failing media, full file systems, runs without faults. Prints
//! the seed of a run that fails. With `--cuts N` the program makes exactly N power cuts, divided evenly over all
//! regimes (or the named ones), and prints counts for each regime.
//!
//! `lamina-soak [PROFILE ...] [--seed N] [--runs N] [--from N] [--cuts N] [--jobs N]`

#![forbid(unsafe_code)]

use simulation::operation::Profile;
use simulation::run::Statistics;
use simulation::scenario;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest time for shortening a failing run.
const SHRINK_TIME: Duration = Duration::from_secs(60);
/// How often progress is printed.
const TELL: Duration = Duration::from_secs(10);
/// The most regimes that run at the same time.
const JOBS_MAX: u64 = 64;

struct Arguments {
    profiles: Vec<Profile>,
    from: u64,
    runs: u64,
    cuts: Option<u64>,
    jobs: u64,
}

fn arguments() -> Result<Arguments, String> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let jobs = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let mut out = Arguments { profiles: Vec::new(), from: since << 20, runs: u64::MAX, cuts: None, jobs };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || {
            let value = words.next().ok_or_else(|| format!("{word} needs a number"))?;
            value.parse::<u64>().map_err(|error| format!("{word} {value}: {error}"))
        };
        match word.as_str() {
            "--seed" => (out.from, out.runs) = (number()?, 1),
            "--from" => out.from = number()?,
            "--runs" => out.runs = number()?,
            "--cuts" => out.cuts = Some(number()?),
            "--jobs" => out.jobs = number()?,
            name => match Profile::ALL.into_iter().find(|profile| profile.name() == name) {
                Some(profile) => out.profiles.push(profile),
                None => {
                    let names = Profile::ALL.map(Profile::name).join(", ");
                    return Err(format!("{name}: not {names}, --seed, --from, --runs, --cuts or --jobs"));
                }
            },
        }
    }
    if let Some(profile) = out.profiles.iter().find(|profile| out.cuts.is_some() && !profile.cuts()) {
        return Err(format!("--cuts: {} cuts no power", profile.name()));
    }
    if !(1..=JOBS_MAX).contains(&out.jobs) {
        return Err(format!("--jobs is from 1 to {JOBS_MAX}"));
    }
    if out.profiles.is_empty() {
        out.profiles = Profile::ALL.into_iter().filter(|profile| out.cuts.is_none() || profile.cuts()).collect();
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
    let clean = match arguments.cuts {
        Some(cuts) => count_cuts(&arguments, cuts),
        None => run_on(&arguments),
    };
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints a failing run, then shortens it and prints the shorter one.
fn tell(failure: Box<scenario::Failure>) {
    println!("{failure}\n\nmaking it shorter ...\n");
    println!("{}", scenario::shrink(failure, SHRINK_TIME));
}

/// Runs every profile with one seed after the other.
fn run_on(arguments: &Arguments) -> bool {
    let began = Instant::now();
    let mut told = began;
    let mut sum = Statistics::default();
    for run in 0..arguments.runs {
        let seed = arguments.from.wrapping_add(run);
        for profile in &arguments.profiles {
            match scenario::run(seed, *profile) {
                Ok(statistics) => sum += statistics,
                Err(failure) => {
                    tell(failure);
                    return false;
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
    true
}

/// The counts of a regime.
struct Counted {
    profile: Profile,
    runs: u64,
    sum: Statistics,
    seconds: u64,
    failed: Option<Box<scenario::Failure>>,
}

/// Makes exactly `cuts` power cuts, divided evenly over the regimes, and prints the table of counts.
fn count_cuts(arguments: &Arguments, cuts: u64) -> bool {
    let regimes = arguments.profiles.len() as u64;
    let shares = (0..regimes).map(|number| cuts / regimes + u64::from(number < cuts % regimes));
    let waiting = Mutex::new(arguments.profiles.iter().copied().zip(shares).collect::<Vec<_>>());
    let counted = Mutex::new(Vec::new());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.min(regimes) {
            scope.spawn(|| {
                while let Some((profile, share)) = waiting.lock().ok().and_then(|mut waiting| waiting.pop()) {
                    let done = cut_often(arguments, profile, share, &stop);
                    println!("{}", row(&done));
                    if let Ok(mut counted) = counted.lock() {
                        counted.push(done);
                    }
                }
            });
        }
    });
    let Ok(mut counted) = counted.into_inner() else { return false };
    counted.sort_by_key(|done: &Counted| arguments.profiles.iter().position(|profile| *profile == done.profile));
    println!("\n{}", HEAD.map(|word| format!("{word:>12}")).concat());
    counted.iter().for_each(|done| println!("{}", row(done)));
    let failed: Vec<_> = counted.iter_mut().filter_map(|done| done.failed.take()).collect();
    let sum = |of: fn(&Statistics) -> u64| counted.iter().map(|done| of(&done.sum)).sum::<u64>();
    println!(
        "{} power cuts, {} of them in recovery: {} violations",
        sum(|sum| sum.cuts),
        sum(|sum| sum.interrupted_recoveries),
        failed.len()
    );
    let clean = failed.is_empty();
    failed.into_iter().for_each(tell);
    clean
}

const HEAD: [&str; 9] =
    ["regime", "runs", "operations", "cuts", "in recovery", "restarts", "checkpoints", "refused", "seconds"];

fn row(done: &Counted) -> String {
    let Statistics { operations, cuts, interrupted_recoveries, restarts, checkpoints, refused, .. } = done.sum;
    let name = format!("{:>12}", done.profile.name());
    let figures = [done.runs, operations, cuts, interrupted_recoveries, restarts, checkpoints, refused, done.seconds];
    let verdict = if done.failed.is_some() { "  VIOLATION" } else { "" };
    figures.iter().fold(name, |text, figure| format!("{text}{figure:>12}")) + verdict
}

/// Runs one seed after the other until this number of power cuts is reached.
fn cut_often(arguments: &Arguments, profile: Profile, cuts: u64, stop: &AtomicBool) -> Counted {
    let began = Instant::now();
    let mut done = Counted { profile, runs: 0, sum: Statistics::default(), seconds: 0, failed: None };
    while done.sum.cuts < cuts && done.runs < arguments.runs && !stop.load(Ordering::Relaxed) {
        let seed = arguments.from.wrapping_add(done.runs);
        done.runs += 1;
        match scenario::run_within(seed, profile, Some(cuts - done.sum.cuts)) {
            Ok(statistics) => done.sum += statistics,
            Err(failure) => {
                stop.store(true, Ordering::Relaxed);
                done.failed = Some(failure);
            }
        }
    }
    done.seconds = began.elapsed().as_secs();
    done
}
