//! Reverting: the head returns to the state of a snapshot.
//!
//! A new empty delta is made above the snapshot's image, the old head's chain is closed, and the record with the new
//! head is committed. Then the old head is removed, with the images that only the old head needed. Users of the disk
//! have to get the new chain from it.

use crate::Result;
use crate::disk::Disk;
use crate::record::Pending;

impl Disk {
    /// Returns the head to the state of the snapshot. Writes since the snapshot are lost. A chain that was returned
    /// before accepts no writes any more.
    pub fn revert(&self, name: &str) -> Result<()> {
        self.noting(|| {
            let _operation = self.begin("reverting")?;
            let record = self.record();
            self.check_writable(&record, "revert")?;
            let snapshot = record.snapshot(name)?.clone();
            let (below, capacity) = (snapshot.node, snapshot.capacity);
            let delta = record.delta.holding(capacity);
            let (image, node) = self.make_delta(&record, below, None, None, delta, capacity, "revert")?;
            let announced = self.record();
            // The next caller that gets the chain opens this image again, with those below it.
            image.layer().close()?;
            drop(image);
            // Writes of the old head that cannot be flushed are dropped. This failure stops the disk only if the commit
            // fails too.
            let failed = self.drop_head().and_then(|line| self.close_dropped_head(&line));
            let mut after = announced.clone();
            let head = node.id;
            after.nodes.push(node);
            after.head = head;
            let gone = after.take_unneeded();
            let gone = gone.iter().filter(|node| node.is_own()).flat_map(|node| self.files(&record, node)).collect();
            after.pending = Some(Pending { gone, ..Pending::new("revert") });
            self.commit(after).inspect_err(|_| self.stay_stopped(failed))?;
            // Another caller may have opened the chain of the old head meanwhile.
            if let Some(line) = self.drop_head() {
                self.close_dropped_head(&line);
            }
            self.finish_pending()
        })
    }
}
