//! Full clones: copies of what the parent's disks hold, from snapshots that are gone again afterwards.

use super::progress::Sum;
use super::{Made, Options, Outcome, Source, heirs, is_uncertain, own_disks};
use crate::definition::{Definition, Way};
use crate::fleet::{self, Watch};
use crate::host::Host;
use crate::machines::{Making, Snapshot};
use backend::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

pub fn make(host: &Host, source: &Source, names: &[String], options: &Options, watch: &dyn Watch) -> Result<Outcome> {
    let point = source.point(host)?;
    let heirs = heirs(source, &point.definition, names, Way::Full)?;
    let temporary = if point.new { point.disks.clone() } else { Vec::new() };
    let making = host.machines().make(&heirs, |heir| own_disks(heir, &point.disks, Way::Full), temporary)?;
    let (quiet, stun) = match source.take(host, &point, options.quiesce) {
        Ok(taken) => taken,
        Err(error) => {
            if is_uncertain(&error) {
                making.leave();
            }
            return Err(error);
        }
    };
    let by_name: BTreeMap<&str, &Definition> = heirs.iter().map(|heir| (heir.name.as_str(), heir)).collect();
    let sum = Sum::new(names.len() * point.disks.len().max(1), watch);
    let uncertain = AtomicBool::new(false);
    let each = fleet::each(names, options.parallel, &sum, &|name| {
        let Some(heir) = by_name.get(name) else { return Err(Error::new(ErrorKind::Invalid, "it is not asked for")) };
        copy(host, heir, &point.disks, &making, &sum).and_then(|()| making.finish(name).map(drop)).inspect_err(
            |error| {
                uncertain.fetch_or(is_uncertain(error), Ordering::Relaxed);
            },
        )
    });
    // What is there is there, whatever became of the others.
    match uncertain.into_inner() {
        true => making.leave(),
        false => making.settle()?,
    }
    Ok(Outcome { made: each.made.iter().map(|name| Made::plain(name)).collect(), failed: each.failed, quiet, stun })
}

fn copy(host: &Host, heir: &Definition, from: &[Snapshot], making: &Making, sum: &Sum<'_>) -> Result<()> {
    for (disk, snapshot) in heir.disks.iter().zip(from) {
        let part = sum.part();
        host.disks().clone_full(&snapshot.disk, &snapshot.name, &disk.name, &|done, total| {
            part.update(done, total);
            !sum.cancelled()
        })?;
        making.made([disk.name.clone()]);
    }
    Ok(())
}
