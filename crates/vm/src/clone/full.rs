//! Full clones: copies of the parent's disks. The copies are read from snapshots, which are deleted afterwards.

use super::progress::Sum;
use super::{Made, Outcome, Task, carry_nvram};
use crate::definition::{CloneKind, Definition};
use crate::fleet;
use crate::host::Host;
use crate::machines::{Making, Snapshot, is_uncertain};
use error::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use work::Unreported;

pub fn make(task: &Task<'_>) -> Result<Outcome> {
    let Task { host, source, names, options, progress } = *task;
    let (point, definitions, making) = task.begin(CloneKind::Full)?;
    making.begin_disks(&[])?;
    let (quiet, stun) = match source.take(host, &point, options.quiesce) {
        Ok(taken) => taken,
        Err(error) => return Err(making.failed(error)),
    };
    let by_name: BTreeMap<&str, &Definition> =
        definitions.iter().map(|definition| (definition.name.as_str(), definition)).collect();
    let sum = Sum::new(names.len() * point.disks.len().max(1), progress);
    let uncertain = AtomicBool::new(false);
    let each = fleet::each(names, options.parallel, &Unreported(progress), &|name| {
        let Some(definition) = by_name.get(name) else {
            return Err(Error::new(ErrorKind::Invalid, "this clone was not requested"));
        };
        let copied = copy(host, definition, &point.disks, &making, &sum)
            .and_then(|()| carry_nvram(host, source, &making, name))
            .and_then(|()| making.finish(name).map(drop));
        copied.inspect_err(|error| {
            uncertain.fetch_or(is_uncertain(error), Ordering::Relaxed);
        })
    });
    // Finished clones are kept, even if others failed.
    match uncertain.into_inner() {
        true => making.leave(),
        false => making.settle()?,
    }
    Ok(Outcome { made: each.made.iter().map(|name| Made::plain(name)).collect(), failed: each.failed, quiet, stun })
}

fn copy(host: &Host, definition: &Definition, from: &[Snapshot], making: &Making, sum: &Sum<'_>) -> Result<()> {
    for (disk, snapshot) in definition.disks.iter().zip(from) {
        making.begin_disks(&[disk.name.as_str()])?;
        host.disks().clone_full(&snapshot.disk, &snapshot.name, &disk.name, &sum.part())?;
        making.made([disk.name.clone()]);
    }
    Ok(())
}
