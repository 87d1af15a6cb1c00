//! Clones of machines.

use super::{Watch, millis};
use crate::message::{CloneOptions, Cloned, ClonedMachine, Failure, MachineReply};
use error::Result;
use vm::clone::{self, Made, Options, Source};
use vm::host::Host;

/// Makes clones. If only one was requested and it fails, its error is returned.
pub fn make(
    host: &Host,
    source: &Source,
    names: &[String],
    options: &CloneOptions,
    watch: &dyn Watch,
) -> Result<MachineReply> {
    let kind = options.kind;
    let options = Options {
        way: kind,
        parallel: options.parallel as usize,
        quiesce: options.quiesce,
        start: options.start,
        inside: options.identity,
        seed: options.seed.clone(),
    };
    let mut outcome = clone::make(host, source, names, &options, watch)?;
    if names.len() == 1
        && outcome.made.is_empty()
        && let Some((_, error)) = outcome.failed.pop()
    {
        return Err(error);
    }
    let made = |one: Made| ClonedMachine {
        name: one.name,
        running_ms: one.running.map(millis),
        without_identity: one.without_identity,
        same_randomness: one.same_randomness,
    };
    Ok(MachineReply::Cloned(Box::new(Cloned {
        kind,
        made: outcome.made.into_iter().map(made).collect(),
        failed: outcome.failed.iter().map(|(name, error)| (name.clone(), Failure::from(error))).collect(),
        consistency: outcome.quiet.as_ref().map(|quiet| quiet.word().to_owned()),
        quiet: outcome.quiet.as_ref().map(|quiet| quiet.sentence()),
        stun_ms: outcome.stun.map(millis),
    })))
}
