//! Clones of disks.

use crate::message::Reply;
use disk::{Datastore, Point, Progress};
use error::Result;
use work::{WorkPart, WorkPlace};

/// Makes full copies one after another. If a copy fails, the copies made before are removed.
pub fn full(datastore: &Datastore, disk: &str, at: &Point, names: &[String], progress: &dyn Progress) -> Result<Reply> {
    let mut made = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let place = WorkPlace::OneOf { index: index as u64, count: names.len() as u64 };
        match datastore.clone_full(disk, at, name, &WorkPart { whole: progress, place }) {
            Ok(info) => made.push(info),
            Err(error) => {
                for clone in &made {
                    if let Err(undo) = datastore.delete_disk(&clone.name, false) {
                        tracing::error!(disk = clone.name, "a clone of the failed request was not removed: {undo}");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(Reply::Disks(made))
}
