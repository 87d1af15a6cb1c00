//! `lamina-study`: the command line for the measurements, which the library implements.

#![forbid(unsafe_code)]

use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use study::bars::{self, Setting};
use study::machine::Machine;
use study::plan::{Options, Study};
use study::scratch::Scratch;
use study::{Error, Result, process, report};

const MISSED: u8 = 3;
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let options = Options::parse();
    if options.study == Study::Figures {
        return match study::figures::write(Path::new(".")) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("lamina-study: {error}");
                ExitCode::FAILURE
            }
        };
    }
    match measure(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(MISSED),
        Err(error) => {
            eprintln!("lamina-study: {error}");
            ExitCode::from(match error {
                Error::Interrupted => INTERRUPTED,
                Error::Usage(_) => 2,
                _ => 1,
            })
        }
    }
}

/// The lamina program that was built together with this program.
fn beside() -> PathBuf {
    let here = std::env::current_exe().ok().and_then(|p| p.parent().map(|folder| folder.join("lamina")));
    here.unwrap_or_else(|| PathBuf::from("lamina"))
}

/// Runs the requested studies. Returns whether every limit was met. If a study fails, the remaining studies are run,
/// and an error is returned at the end.
fn measure(options: &Options) -> Result<bool> {
    let settings = &options.settings;
    let plan = settings.plan().map_err(Error::Usage)?;
    process::watch()?;
    let scratch = Scratch::new(&settings.work, settings.keep)?;
    let machine = Machine::describe(scratch.root());
    println!(
        "{}, {} processors, {}, load {}",
        machine.processor, machine.processors, machine.file_system, machine.load
    );
    let lamina = settings.lamina.clone().unwrap_or_else(beside);
    let (baseline, results) = (settings.baseline.clone(), settings.results.clone());
    let mut setting = Setting { plan, scratch, lamina, baseline, results };
    let studies = if options.study == Study::All { Study::EACH.to_vec() } else { vec![options.study] };
    let mut all = Vec::new();
    let mut failed = None;
    for study in studies {
        println!("\n{}", study.word());
        match bars::measure(study, &setting) {
            Ok(outcome) => {
                let path = report::keep(&settings.results, study.word(), &machine, &setting.plan, &outcome)?;
                if !outcome.findings.is_empty() {
                    print!("{}", report::shown(&outcome.findings));
                }
                println!("raw results: {}", path.display());
                all.extend(outcome.findings);
            }
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => {
                eprintln!("lamina-study: {}: {error}", study.word());
                failed = Some(error);
            }
        }
        setting.scratch = renewed(setting.scratch, options)?;
    }
    let asked = all.iter().filter(|f| f.limit.is_some()).count();
    let missed: Vec<_> = all.iter().filter(|f| !f.met).cloned().collect();
    if !missed.is_empty() && options.study == Study::All {
        println!("\nmissed:\n{}", report::shown(&missed));
    }
    if asked > 0 {
        let quick = if setting.plan.quick { " (a quick run proves no limit)" } else { "" };
        println!("\n{} of {asked} figures meet what is asked{quick}", asked - missed.len());
    }
    failed.map_or(Ok(missed.is_empty()), Err)
}

/// Replaces the work folder by an empty one, so that files of one study do not affect the next.
fn renewed(old: Scratch, options: &Options) -> Result<Scratch> {
    drop(old);
    Scratch::new(&options.settings.work, options.settings.keep)
}
