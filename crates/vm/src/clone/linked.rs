//! Linked clones: a delta for each disk, based on snapshots of the parent's disks. One request per disk creates the
//! deltas of all clones.

use super::{Made, Outcome, Task, carry_nvram, make_disks};
use crate::definition::CloneKind;
use error::Result;

pub fn make(task: &Task<'_>) -> Result<Outcome> {
    let Task { host, source, names, options, progress } = *task;
    let (point, definitions, making) = task.begin(CloneKind::Linked)?;
    let outcome = source.take(host, &point, options.quiesce).and_then(|taken| {
        make_disks(host, &point.disks, &definitions, &making, progress)?;
        Ok(taken)
    });
    let (quiet, stun) = match outcome {
        Ok(taken) => taken,
        Err(error) => return Err(making.failed(error)),
    };
    let mut outcome = Outcome { quiet, stun, ..Outcome::default() };
    for name in names {
        match carry_nvram(host, source, &making, name).and_then(|()| making.finish(name)) {
            Ok(_) => outcome.made.push(Made::plain(name)),
            Err(error) => outcome.failed.push((name.clone(), error)),
        }
        progress.update((outcome.made.len() + outcome.failed.len()) as u64, names.len() as u64);
    }
    making.settle()?;
    Ok(outcome)
}
