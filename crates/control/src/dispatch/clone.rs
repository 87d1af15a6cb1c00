//! Clones.

use crate::message::Reply;
use disk::{Datastore, Point, Progress};
use error::Result;

/// The progress of one of several equal pieces of work.
struct Share<'a> {
    whole: &'a dyn Progress,
    index: u64,
    count: u64,
}

impl Progress for Share<'_> {
    fn update(&self, done: u64, total: u64) {
        let before = total.saturating_mul(self.index);
        self.whole.update(before.saturating_add(done), total.saturating_mul(self.count));
    }

    fn cancelled(&self) -> bool {
        self.whole.cancelled()
    }

    fn rate(&self) -> u64 {
        self.whole.rate()
    }

    fn moved(&self, bytes: u64) {
        self.whole.moved(bytes);
    }
}

/// Full copies one after another; a failure takes back those made before it.
pub fn full(datastore: &Datastore, disk: &str, at: &Point, names: &[String], progress: &dyn Progress) -> Result<Reply> {
    let mut made = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let share = Share { whole: progress, index: index as u64, count: names.len() as u64 };
        match datastore.clone_full(disk, at, name, &share) {
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
