//! Reverting: the head becomes equal to a snapshot.
//!
//! A new empty delta is made above the snapshot's image, the old head's chain is closed, and the record gets the new
//! head: that is the commit. The old head, and the images that only it needed, are removed then. Users of the chain
//! have to ask for it again.

use crate::Result;
use crate::disk::Disk;
use crate::record::Pending;

impl Disk {
    /// Makes the head equal to the snapshot. Writes since then are lost. The chain that was returned before takes no
    /// writes any more: ask for it again.
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
            // The next caller that asks for the chain opens it again, above the head of that time.
            image.layer().close()?;
            drop(image);
            // Writes that cannot be flushed are dropped, if the record can be written.
            let failed = self.drop_head().and_then(|line| self.lay_down(&line));
            let mut after = announced.clone();
            let head = node.id;
            after.nodes.push(node);
            after.head = head;
            let gone = after.take_unneeded();
            let gone = gone.iter().filter(|node| node.is_own()).flat_map(|node| self.files(&record, node)).collect();
            after.pending = Some(Pending { gone, ..Pending::new("revert") });
            self.commit(after).inspect_err(|_| self.stay_stopped(failed))?;
            // Another caller may have opened the chain of before meanwhile.
            if let Some(line) = self.drop_head() {
                self.lay_down(&line);
            }
            self.finish_pending()
        })
    }
}
