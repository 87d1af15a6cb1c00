//! Linked clones: a delta for each disk, on snapshots of the parent's; all of them in one request for each disk.

use super::{Made, Options, Outcome, Source, heirs, is_uncertain, make_disks, own_disks};
use crate::definition::Way;
use crate::fleet::Watch;
use crate::host::Host;
use backend::Result;

pub fn make(host: &Host, source: &Source, names: &[String], options: &Options, watch: &dyn Watch) -> Result<Outcome> {
    let point = source.point(host)?;
    let heirs = heirs(source, &point.definition, names, Way::Linked)?;
    let temporary = if point.new { point.disks.clone() } else { Vec::new() };
    let making = host.machines().make(&heirs, |heir| own_disks(heir, &point.disks, Way::Linked), temporary)?;
    let outcome = source.take(host, &point, options.quiesce).and_then(|taken| {
        make_disks(host, &point.disks, &heirs, &making, watch)?;
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
        watch.update(outcome.made.len() + outcome.failed.len(), names.len());
    }
    making.settle()?;
    Ok(outcome)
}
