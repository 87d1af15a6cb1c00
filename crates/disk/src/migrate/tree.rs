//! Copying the snapshots of a disk, parents before children, so that the copied snapshots share the same blocks as the
//! original ones.
//!
//! ```text
//!   for each snapshot:   the target's head is reverted to the copy of its parent
//!                        the differences from the parent are copied
//!                        the snapshot is taken
//!   then the head:       is reverted to the copy of its parent; the mirror copies the differences
//! ```
//!
//! A disk may have several snapshots without a parent, after their parents were deleted. To copy these, the target has
//! a temporary snapshot of its initial zeros, which is deleted after the last of them is copied.

use super::mirror::{Base, MirrorDevice};
use crate::device::Device;
use crate::switch::Identity;
use error::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use work::Progress;

/// Name of the temporary snapshot of zeros; dashes are appended if the name is taken. The name is valid for every kind
/// of disk.
const ZEROS: &str = "zeros-of-a-migration";

/// A snapshot to copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    /// The snapshot's name.
    pub name: String,
    /// Name of the snapshot's parent.
    pub parent: Option<String>,
    /// Capacity of the disk at the time of the snapshot.
    pub capacity: u64,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// The snapshot's identity, if it has one.
    pub uuid: Option<[u8; 16]>,
    /// The snapshot's description.
    pub description: String,
}

/// The source of a migration. Its snapshots do not change during the migration.
pub(crate) trait Original: Send + Sync {
    /// Snapshots, parents before children.
    fn nodes(&self) -> Result<Vec<Node>>;

    /// The snapshot on which the head is based.
    fn head_parent(&self) -> Result<Option<String>>;

    /// Opens a snapshot for reading.
    fn snapshot(&self, name: &str) -> Result<Arc<dyn Device>>;

    /// The identity of the disk or of a snapshot in the table of switches.
    fn identity(&self, snapshot: Option<&str>) -> Result<Identity>;

    /// Calls `each` for every range that may differ between snapshot `from` and a later snapshot, or the head.
    fn changes(&self, from: &str, to: Option<&str>, each: &mut dyn FnMut(Range<u64>)) -> Result<()>;
}

/// The target of a migration. Until the commit, only the migration uses it.
pub(crate) trait Replica: Send + Sync {
    /// The head of the copy. The caller opens it again after [`Replica::go_back`] and [`Replica::resize`].
    fn head(&self) -> Result<Arc<dyn Device>>;

    /// Opens a snapshot for reading.
    fn snapshot(&self, name: &str) -> Result<Arc<dyn Device>>;

    /// The identity that the disk or a snapshot has in the table of switches.
    fn identity(&self, snapshot: Option<&str>) -> Result<Identity>;

    /// Takes a snapshot, and makes it durable together with its content.
    fn take(&self, node: &Node) -> Result<()>;

    /// Reverts the head to a snapshot.
    fn go_back(&self, snapshot: &str) -> Result<()>;

    /// Removes a snapshot.
    fn forget(&self, snapshot: &str) -> Result<()>;

    /// Changes the capacity.
    fn resize(&self, capacity: u64) -> Result<()>;
}

/// Copies the snapshots of one disk to another.
pub(crate) struct TreeCopy<'a> {
    original: &'a dyn Original,
    replica: &'a dyn Replica,
    nodes: Vec<Node>,
    head_parent: Option<String>,
    /// The snapshot to which the replica's head is equal.
    at: Option<String>,
    /// Name of the temporary snapshot of zeros.
    zeros: String,
    keeps_zeros: bool,
}

impl<'a> TreeCopy<'a> {
    /// Copies no snapshots yet; `replica` must read as zeros.
    pub fn new(original: &'a dyn Original, replica: &'a dyn Replica) -> Result<Self> {
        let nodes = original.nodes()?;
        let head_parent = original.head_parent()?;
        let mut seen = BTreeSet::new();
        for node in &nodes {
            let ordered = node.parent.as_ref().is_none_or(|parent| seen.contains(parent.as_str()));
            if !ordered || !seen.insert(node.name.as_str()) {
                let text = format!("snapshot '{}' has no parent in the tree of snapshots", node.name.escape_debug());
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
        }
        if let Some(parent) = head_parent.as_ref().filter(|parent| !seen.contains(parent.as_str())) {
            let text = format!("there is no snapshot '{}', which the disk is based on", parent.escape_debug());
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let mut zeros = ZEROS.to_owned();
        while seen.contains(zeros.as_str()) {
            zeros.push('-');
        }
        Ok(Self { original, replica, nodes, head_parent, at: None, zeros, keeps_zeros: false })
    }

    /// The snapshots, parents before children.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Copies all snapshots. [`TreeCopy::head`] then prepares the copy of the head.
    pub fn snapshots(&mut self, progress: &dyn Progress) -> Result<()> {
        let roots = self.nodes.iter().filter(|node| node.parent.is_none()).count();
        if roots + usize::from(self.head_parent.is_none()) > 1 {
            let capacity = self.replica.head()?.capacity();
            self.replica.take(&Node {
                name: self.zeros.clone(),
                parent: None,
                capacity,
                created: 0,
                uuid: None,
                description: String::new(),
            })?;
            (self.at, self.keeps_zeros) = (Some(self.zeros.clone()), true);
        }
        for node in self.nodes.clone() {
            let source = self.original.snapshot(&node.name)?;
            let mirror = self.prepare(node.parent.as_deref(), source)?;
            self.mark(&mirror, node.parent.as_deref(), Some(&node.name), progress)?;
            mirror.copy(progress)?;
            mirror.target().flush()?;
            self.replica.take(&node)?;
            self.at = Some(node.name);
        }
        Ok(())
    }

    /// The mirror for the head, without marks. [`TreeCopy::mark_head`] sets the marks once clients use the mirror.
    pub fn head(&mut self, source: Arc<dyn Device>) -> Result<MirrorDevice> {
        let parent = self.head_parent.clone();
        let mirror = self.prepare(parent.as_deref(), source)?;
        if std::mem::take(&mut self.keeps_zeros) {
            self.replica.forget(&self.zeros)?;
        }
        Ok(mirror)
    }

    /// Marks the ranges of the head that have to be copied.
    pub fn mark_head(&self, mirror: &MirrorDevice, progress: &dyn Progress) -> Result<()> {
        self.mark(mirror, self.head_parent.as_deref(), None, progress)
    }

    /// Creates a mirror whose target has the content of the parent snapshot.
    fn prepare(&mut self, parent: Option<&str>, source: Arc<dyn Device>) -> Result<MirrorDevice> {
        let wanted = parent.or(self.keeps_zeros.then_some(self.zeros.as_str()));
        if let Some(wanted) = wanted
            && self.at.as_deref() != Some(wanted)
        {
            self.replica.go_back(wanted)?;
            self.at = Some(wanted.to_owned());
        }
        let mut head = self.replica.head()?;
        if head.capacity() != source.capacity() {
            drop(head);
            self.replica.resize(source.capacity())?;
            head = self.replica.head()?;
        }
        MirrorDevice::new(source, head, if parent.is_some() { Base::State } else { Base::Zeros })
    }

    fn mark(
        &self,
        mirror: &MirrorDevice,
        parent: Option<&str>,
        of: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<()> {
        match parent {
            Some(parent) => self.original.changes(parent, of, &mut |range| mirror.mark(range)),
            None => mirror.mark_data(progress),
        }
    }
}
