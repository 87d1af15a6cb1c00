//! Complete runs from a seed, and reports of failures.

use crate::operation::{Operation, Profile};
use crate::random::Random;
use crate::regime::{self, World};
use crate::run::{SimulationRun, Statistics};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The most operations shown of a failing run.
const SHOWN_MAX: usize = 80;

/// A run with a violation.
#[derive(Debug)]
pub struct Failure {
    /// Description of the violation.
    pub violation: String,
    /// Seed of the run.
    pub seed: u64,
    /// Profile of the run.
    pub profile: Profile,
    /// The operations up to the violation.
    pub operations: Vec<Operation>,
    /// The operations carried out, with their actual targets.
    pub trace: Vec<String>,
    /// Limit on the power cuts of the run.
    pub cuts_max: Option<u64>,
}

impl Failure {
    /// The description of the violation up to its first digit. A shortened run must fail with the same text.
    fn kind(&self) -> String {
        self.violation.chars().take_while(|letter| !letter.is_ascii_digit()).take(60).collect()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:?} run of seed {}: {} operations, the last of them:",
            self.profile,
            self.seed,
            self.operations.len()
        )?;
        for line in &self.trace[self.trace.len().saturating_sub(SHOWN_MAX)..] {
            writeln!(f, "  {line}")?;
        }
        writeln!(f, "violation: {}", self.violation)?;
        write!(f, "again: lamina-soak {} --seed {}", self.profile.name(), self.seed)?;
        self.cuts_max.map_or(Ok(()), |most| write!(f, " --cuts {most}"))
    }
}

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 13] = [
        Self::Model,
        Self::PowerCuts,
        Self::Tight,
        Self::Errors,
        Self::Full,
        Self::Scattered,
        Self::Maps,
        Self::Wide,
        Self::Journals,
        Self::NearlyFull,
        Self::Shared,
        Self::Again,
        Self::Reduced,
    ];

    /// Whether runs of the profile cut the power.
    pub fn cuts(self) -> bool {
        !matches!(self, Self::Model | Self::Errors | Self::Full)
    }

    /// The name of the profile on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::PowerCuts => "power-cuts",
            Self::Errors => "errors",
            Self::Full => "full",
            Self::Tight => "tight",
            Self::Scattered => "scattered",
            Self::Maps => "maps",
            Self::Wide => "wide",
            Self::Journals => "journals",
            Self::NearlyFull => "nearly-full",
            Self::Shared => "shared",
            Self::Again => "again",
            Self::Reduced => "reduced",
        }
    }

    /// Number of operations of one run.
    pub fn length(self) -> usize {
        match self {
            Self::Model => 5000,
            Self::PowerCuts => 250,
            Self::Tight => 300,
            Self::Errors => 400,
            Self::Full => 800,
            Self::Scattered | Self::Maps => 120,
            Self::Wide | Self::Journals | Self::NearlyFull | Self::Reduced => 200,
            Self::Shared | Self::Again => 150,
        }
    }
}

/// The operations of a run.
pub fn operations(seed: u64, profile: Profile, count: usize) -> Vec<Operation> {
    let mut random = Random::new(seed ^ 0x6f70_6572);
    let mut operations = Vec::with_capacity(count + 8);
    while operations.len() < count {
        regime::extend(&mut random, profile, &mut operations);
    }
    operations.splice(0..0, beginning(&mut random, profile, seed));
    match profile {
        Profile::Tight => operations.insert(2, Operation::Room { bytes: random.between(256 << 10, 2 << 20) }),
        Profile::Full => operations.insert(2, Operation::Room { bytes: random.below(8 << 20) }),
        Profile::Model | Profile::Errors => {}
        _ => operations.push(Operation::Cut { after: 0, again: Some(random.below(20)) }),
    }
    operations.extend([Operation::Checkpoint, Operation::Compare, Operation::Check, Operation::Reopen]);
    operations
}

/// The first operations of a run, which create disks.
fn beginning(random: &mut Random, profile: Profile, seed: u64) -> Vec<Operation> {
    regime::beginning(random, profile).unwrap_or_else(|| {
        let tight = profile == Profile::Tight;
        let (small, large) = if tight { (1 << 20, 2 << 20) } else { (3 << 20, 40 << 20) };
        vec![
            Operation::Create { capacity: small, kind: 7 },
            Operation::Create { capacity: large + 512, kind: if tight { 7 } else { seed } },
        ]
    })
}

/// Carries out operations one after another. A panic counts as a violation.
pub fn carry_out(seed: u64, profile: Profile, operations: &[Operation]) -> Result<Statistics, Box<Failure>> {
    carry_out_within(seed, profile, operations, None)
}

/// Like [`carry_out`], with a limit on the power cuts.
fn carry_out_within(
    seed: u64,
    profile: Profile,
    operations: &[Operation],
    cuts_max: Option<u64>,
) -> Result<Statistics, Box<Failure>> {
    let fail = |violation: String, done: usize, trace: Vec<String>| {
        let operations = operations[..done].to_vec();
        Box::new(Failure { violation, seed, profile, operations, trace, cuts_max })
    };
    let made = SimulationRun::within(seed, World::of(profile, seed));
    let mut run = made.map_err(|violation| fail(violation, 0, Vec::new()))?;
    run.limit_cuts(cuts_max.unwrap_or(u64::MAX));
    for (number, operation) in operations.iter().enumerate() {
        let step = catch_unwind(AssertUnwindSafe(|| run.step(operation)));
        let violation = match step {
            Ok(Ok(())) => continue,
            Ok(Err(violation)) => violation,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
                format!("panic: {}", text.unwrap_or("without words"))
            }
        };
        let trace = run.trace().map(str::to_owned).collect();
        if violation.starts_with("panic") {
            // The thread that panicked may still hold locks.
            std::mem::forget(run);
        }
        return Err(fail(violation, number + 1, trace));
    }
    Ok(run.statistics)
}

/// A complete run of a seed.
pub fn run(seed: u64, profile: Profile) -> Result<Statistics, Box<Failure>> {
    run_within(seed, profile, None)
}

/// A complete run of a seed, with a limit on the power cuts.
pub fn run_within(seed: u64, profile: Profile, cuts_max: Option<u64>) -> Result<Statistics, Box<Failure>> {
    carry_out_within(seed, profile, &operations(seed, profile, profile.length()), cuts_max)
}

/// Shortens a failing list of operations, as far as possible in the given time.
pub fn shrink(mut failure: Box<Failure>, time: Duration) -> Box<Failure> {
    let began = Instant::now();
    let mut part = failure.operations.len() / 2;
    while part > 0 {
        let mut at = 0;
        while at < failure.operations.len() {
            if began.elapsed() > time {
                return failure;
            }
            let end = (at + part).min(failure.operations.len());
            let mut fewer = failure.operations.clone();
            fewer.drain(at..end);
            match carry_out_within(failure.seed, failure.profile, &fewer, failure.cuts_max) {
                Err(shorter) if shorter.kind() == failure.kind() => failure = shorter,
                _ => at = end,
            }
        }
        part /= 2;
    }
    failure
}

/// Runs all seeds of a range. Panics with the shortened operations of the first seed that fails; for tests.
///
/// # Panics
/// If a seed fails.
pub fn all(profile: Profile, seeds: std::ops::Range<u64>) -> Statistics {
    const SHRINK_TIME: Duration = Duration::from_secs(30);
    let mut sum = Statistics::default();
    for seed in seeds {
        match run(seed, profile) {
            Ok(statistics) => sum += statistics,
            Err(failure) => {
                let first = failure.violation.clone();
                panic!("{}\nbefore shortening: {first}", shrink(failure, SHRINK_TIME));
            }
        }
    }
    println!("{sum:?}");
    sum
}
