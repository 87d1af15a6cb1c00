//! Linked clones: a delta for each disk, on snapshots of the parent's; all of them in one request for each disk.

use super::{Made, Options, Outcome, Source, clone_definitions, is_uncertain, make_disks, own_disks};
use crate::definition::CloneKind;
use crate::host::Host;
use error::Result;
use work::Progress;

pub fn make(
    host: &Host,
    source: &Source,
    names: &[String],
    options: &Options,
    progress: &dyn Progress,
) -> Result<Outcome> {
    let point = source.point(host)?;
    let definitions = clone_definitions(source, &point.definition, names, CloneKind::Linked)?;
    let temporary = if point.new { point.disks.clone() } else { Vec::new() };
    let making = host.machines().make(
        &definitions,
        |definition| own_disks(definition, &point.disks, CloneKind::Linked),
        temporary,
    )?;
    let outcome = source.take(host, &point, options.quiesce).and_then(|taken| {
        make_disks(host, &point.disks, &definitions, &making, progress)?;
        Ok(taken)
    });
    let (quiet, stun) = match outcome {
        Ok(taken) => taken,
        Err(error) => {
            if is_uncertain(&error) {
                making.leave();
            }
            return Err(error);
        }
    };
    let mut outcome = Outcome { quiet, stun, ..Outcome::default() };
    for name in names {
        match making.finish(name) {
            Ok(_) => outcome.made.push(Made::plain(name)),
            Err(error) => outcome.failed.push((name.clone(), error)),
        }
        progress.update((outcome.made.len() + outcome.failed.len()) as u64, names.len() as u64);
    }
    making.settle()?;
    Ok(outcome)
}
