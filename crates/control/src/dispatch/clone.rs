//! Clones of disks.

use crate::message::Reply;
use disk::{Datastore, Point, Progress};
use error::Result;
use work::{WorkPart, WorkPlace};

/// Makes full copies one after another, all of the same disk, also if the disk is renamed meanwhile. If a copy fails,
/// the copies made before are removed.
pub fn full(datastore: &Datastore, disk: &str, at: &Point, names: &[String], progress: &dyn Progress) -> Result<Reply> {
    let mut made = Vec::new();
    let source = datastore.uuid_of(disk)?;
    for (index, name) in names.iter().enumerate() {
        let place = WorkPlace::OneOf { index: index as u64, count: names.len() as u64 };
        let part = WorkPart { whole: progress, place };
        match datastore.name_of(&source, disk).and_then(|disk| datastore.clone_full(&disk, at, name, &part)) {
            Ok(info) => made.push(info),
            Err(error) => {
                for clone in &made {
                    // Since it was made, a user may have renamed it and given its name to another disk.
                    if let Err(undo) = datastore.take_back(clone) {
                        tracing::error!(disk = clone.name, "a clone of the failed request was not removed: {undo}");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(Reply::Disks(made))
}
