//! What merges and removed snapshot names do to the images and snapshots of a record. The operations commit the result,
//! and [`preview`](crate::preview) counts with it, so that a count and the deletion always agree.
//!
//! These functions change the record only. They read no image, and leave [`Record::pending`] to their callers.

use crate::record::{Node, Record};

impl Record {
    /// Removes the snapshots that lose their state when `sources`, newest first, are merged into `target`: the
    /// snapshots of `target` and of all sources except the newest.
    pub(crate) fn drop_overwritten(&mut self, sources: &[u32], target: u32) {
        let newest = sources.first();
        self.snapshots.retain(|snapshot| {
            snapshot.node != target && (Some(&snapshot.node) == newest || !sources.contains(&snapshot.node))
        });
    }

    /// Merges `sources`, newest first, into the image below them, which takes the place of the newest one. Returns the
    /// images that are gone.
    pub(crate) fn merge_down(&mut self, sources: &[u32], target: u32) -> Vec<Node> {
        let Some(newest) = sources.first().copied() else { return Vec::new() };
        self.drop_overwritten(sources, target);
        self.nodes.iter_mut().filter(|node| node.parent == Some(newest)).for_each(|node| node.parent = Some(target));
        self.snapshots.iter_mut().filter(|one| one.node == newest).for_each(|snapshot| snapshot.node = target);
        if self.head == newest {
            self.head = target;
        }
        sources.iter().filter_map(|source| self.take_node(*source)).collect()
    }

    /// Merges image `source` into `target`, the image above it, which takes the place of the source. The snapshots of
    /// the source are removed. Returns the images that are gone, including those that are not needed any more, such as
    /// a foreign base below the merged image.
    pub(crate) fn merge_up(&mut self, target: u32, source: u32) -> Vec<Node> {
        let Some(merged) = self.take_node(source) else { return Vec::new() };
        self.nodes.iter_mut().filter(|node| node.id == target).for_each(|node| node.parent = merged.parent);
        self.snapshots.retain(|snapshot| snapshot.node != source);
        let mut gone = vec![merged];
        gone.extend(self.take_unneeded());
        gone
    }

    /// Removes the name of a snapshot. Returns the images that are not needed any more.
    pub(crate) fn drop_snapshot(&mut self, name: &str) -> Vec<Node> {
        self.snapshots.retain(|snapshot| snapshot.name != name);
        self.take_unneeded()
    }

    /// Removes and returns an image.
    fn take_node(&mut self, id: u32) -> Option<Node> {
        let index = self.nodes.iter().position(|node| node.id == id)?;
        Some(self.nodes.remove(index))
    }

    /// Removes and returns the images that are not needed: without a snapshot, without children, and not the head.
    pub(crate) fn take_unneeded(&mut self) -> Vec<Node> {
        let mut taken = Vec::new();
        loop {
            let needless = self.nodes.iter().position(|node| {
                node.id != self.head && self.snapshot_of(node.id).is_none() && self.children(node.id).is_empty()
            });
            match needless {
                Some(index) => taken.push(self.nodes.remove(index)),
                None => return taken,
            }
        }
    }
}
