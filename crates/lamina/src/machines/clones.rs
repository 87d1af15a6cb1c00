//! `lamina vm clone`.

use super::follow::Follow;
use super::{failure, say, told};
use crate::cli::{IdentityArgument, VmClone};
use crate::output::{Form, human};
use crate::{End, exit, follow};
use error::ErrorKind;
use serde_json::{Value, json};
use std::io::Write;
use vm::clone::{self, Inside, Made, Options, Outcome, Source};
use vm::definition::CloneKind;
use vm::host::Host;

/// Names told one by one when many machines are made at once.
const NAMES_TOLD_MAX: usize = 5;

/// Makes clones.
pub fn run(host: &Host, arguments: &VmClone, form: Form) -> Result<End, End> {
    let names = arguments.names().map_err(End::Usage)?;
    let way = match (arguments.full, arguments.instant) {
        (true, _) => CloneKind::Full,
        (_, true) => CloneKind::Instant,
        _ => CloneKind::Linked,
    };
    let options = Options {
        way,
        parallel: arguments.parallel as usize,
        quiesce: arguments.quiesce,
        start: arguments.start,
        inside: match arguments.identity {
            IdentityArgument::Auto => Inside::IfAgent,
            IdentityArgument::Required => Inside::Required,
            IdentityArgument::Keep => Inside::Kept,
        },
    };
    let source = Source { machine: arguments.source.machine.clone(), snapshot: arguments.source.snapshot.clone() };
    let template = if way == CloneKind::Full { follow::BYTES } else { follow::THINGS };
    let watch = Follow::new("cloning", template, follow::interruption(exit::INTERRUPTED)?);
    let outcome = clone::make(host, &source, &names, &options, &watch);
    watch.finish();
    let mut outcome = outcome?;
    if names.len() == 1 && outcome.made.is_empty() && outcome.failed.len() == 1 {
        return outcome.failed.pop().map_or(Ok(End::Code(1)), |(_, error)| Err(error.into()));
    }
    report(outcome, way, form)
}

fn report(outcome: Outcome, way: CloneKind, form: Form) -> Result<End, End> {
    let millis = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    if form == Form::Json {
        let made = |one: &Made| {
            json!({
                "name": one.name, "running_ms": one.running.map(millis), "without_identity": one.without_identity,
                "same_randomness": one.same_randomness,
            })
        };
        let value = json!({
            "made": outcome.made.iter().map(made).collect::<Vec<Value>>(),
            "failed": outcome.failed.iter().map(|(name, error)| failure(name, error)).collect::<Vec<Value>>(),
            "way": way.name(),
            "consistency": outcome.quiet.as_ref().map(|quiet| quiet.word()),
            "remark": outcome.quiet.as_ref().map(|quiet| quiet.sentence()),
            "stun_ms": outcome.stun.map(millis),
        });
        say(form, "", &value)?;
    } else if !outcome.made.is_empty() {
        let mut text = format!(
            "made {}: {}",
            human::count(outcome.made.len() as u64, &format!("{} clone", way.name())),
            names(&outcome.made)
        );
        if let Some(stun) = outcome.stun {
            text.push_str(&format!(" (the source was paused for {:.1} ms)", millis(stun)));
        }
        if let Some(quiet) = &outcome.quiet {
            text.push_str(&format!("; {}", quiet.sentence()));
        }
        say(form, &text, &Value::Null)?;
    }
    // Said about the first of them: what is true of one is true of all from the same guest.
    let without = outcome.made.iter().filter(|one| one.without_identity.is_some()).count();
    if let Some(why) = outcome.made.iter().find_map(|one| one.without_identity.as_ref()) {
        let _ = writeln!(
            std::io::stderr(),
            "lamina: {without} of {} still have their parent's identity: {why}",
            outcome.made.len()
        );
    }
    let same = outcome.made.iter().filter(|one| one.same_randomness).count();
    if same > 0 {
        let _ = writeln!(
            std::io::stderr(),
            "lamina: {same} of {} may draw their parent's random numbers for up to a minute: their guests have neither \
             reseed-kernel nor Perl nor Python to have the kernel start over",
            outcome.made.len()
        );
    }
    // Those that were interrupted before they were begun are one fact, not many.
    let (stopped, failed): (Vec<_>, Vec<_>) =
        outcome.failed.into_iter().partition(|(_, error)| error.kind() == ErrorKind::Interrupted);
    if !stopped.is_empty() {
        let _ = writeln!(std::io::stderr(), "lamina: stopped on request; {} were not made", stopped.len());
    }
    Ok(match told(&failed) {
        End::Code(0) if !stopped.is_empty() => End::Code(exit::INTERRUPTED),
        end => end,
    })
}

fn names(made: &[Made]) -> String {
    match made {
        [first, .., last] if made.len() > NAMES_TOLD_MAX => format!("{} to {}", first.name, last.name),
        _ => made.iter().map(|one| one.name.as_str()).collect::<Vec<_>>().join(", "),
    }
}
