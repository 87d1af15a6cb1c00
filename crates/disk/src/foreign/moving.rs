//! Disks in VMware's formats as source and target of a migration.
//!
//! The target's folder is marked as incomplete until the target replaces the source; from then on the source's folder
//! is marked. So opening the datastore removes the folder of the copy that is not the current disk.

use super::{ChainedDevice, Foreign, ForeignDisk};
use crate::device::Device;
use crate::migrate::{Node, Original, Replica};
use crate::stride::Stride;
use crate::switch::Identity;
use chain::{Chain, Condition};
use error::{Error, ErrorKind, Result};
use layer::image::Place;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Weak};
use work::{NoProgress, Progress};

/// Most spans that one query of the map returns.
const SPANS: usize = 1024;

/// A disk that is the source of a migration.
pub(crate) struct ForeignOriginal {
    pub entry: Arc<ForeignDisk>,
}

/// A disk that is being created as the target of a migration.
pub(crate) struct ForeignReplica {
    pub folder: String,
    pub disk: Arc<vmdk::Disk>,
    /// The device of the head as it was opened last, which clients use.
    head: Mutex<Weak<ChainedDevice>>,
}

impl Foreign {
    /// A disk as the source of a migration. `Busy` if it has linked clones.
    pub fn original(&self, entry: Arc<ForeignDisk>) -> Result<ForeignOriginal> {
        let clones: Vec<String> = entry.disk.clones().into_iter().map(|clone| clone.name).collect();
        if !clones.is_empty() {
            let (name, clones) = (entry.disk.name(), crate::native::list(clones.iter().map(String::as_str)));
            let text = format!("disk '{name}' is the parent of linked clones: {clones}; delete them first");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Ok(ForeignOriginal { entry })
    }

    /// Adopts existing images as a disk that clients cannot open yet. Recovery after a crash removes the disk's folder
    /// until [`Foreign::complete`] is called.
    pub fn adopt(
        &self,
        name: &str,
        what: &Place,
        how: vmdk::Adopt,
        options: &vmdk::Options,
    ) -> Result<ForeignOriginal> {
        let (folder, home) = self.new_folder(name, true)?;
        // The record is made here, of images that the user of this process has named.
        let folders = self.folders.clone();
        let named: vmdk::FolderFinder = Arc::new(move |reference: &str| folders.find_named(reference));
        let options = vmdk::Options { folders: options.folders.as_ref().map(|_| named), ..options.clone() };
        match vmdk::Disk::adopt(home, name, what, how, &options) {
            Ok(disk) => Ok(ForeignOriginal { entry: ForeignDisk::new(folder, disk) }),
            Err(error) => {
                if let Err(second) = self.remove_folder(&folder) {
                    tracing::warn!(%second, folder, "the next opening of the datastore removes an unfinished disk");
                }
                Err(error)
            }
        }
    }

    /// Creates an empty disk in a folder that recovery after a crash removes.
    pub fn replica(&self, new: &vmdk::NewDisk, progress: &dyn Progress) -> Result<ForeignReplica> {
        let (folder, disk) = self.make(new, true, progress)?;
        Ok(ForeignReplica { folder, disk, head: Mutex::default() })
    }

    /// Adds a target to the list of the datastore's disks. From now on its device is updated when the list of snapshots
    /// changes.
    pub fn insert_replica(&self, replica: &ForeignReplica) {
        let entry = self.insert(replica.folder.clone(), Arc::clone(&replica.disk));
        *entry.head.lock() = replica.head.lock().clone();
    }

    /// Removes the source of a completed migration, or an unfinished target, with its folder.
    pub fn remove_moved(&self, folder: &str, disk: Arc<vmdk::Disk>) -> Result<()> {
        disk.give_up()?;
        self.remove_given_up(folder, &disk)
    }
}

impl ForeignOriginal {
    fn chain_of(&self, snapshot: Option<&str>) -> Result<Arc<Chain>> {
        match snapshot {
            Some(name) => self.entry.disk.snapshot_chain(name),
            None => self.entry.disk.chain(),
        }
    }
}

impl Original for ForeignOriginal {
    fn nodes(&self) -> Result<Vec<Node>> {
        let snapshots = self.entry.disk.snapshots();
        let mut nodes: Vec<Node> = Vec::with_capacity(snapshots.len());
        let mut stack: Vec<Option<&str>> = vec![None];
        let mut seen = BTreeSet::new();
        while let Some(above) = stack.pop() {
            if let Some(found) = snapshots.iter().find(|snapshot| Some(snapshot.name.as_str()) == above) {
                if !seen.insert(&found.name) {
                    continue;
                }
                nodes.push(Node {
                    name: found.name.clone(),
                    parent: found.parent.clone(),
                    capacity: found.capacity,
                    created: found.created,
                    uuid: None,
                    description: found.description.clone(),
                });
            }
            let children = snapshots.iter().rev().filter(|snapshot| snapshot.parent.as_deref() == above);
            stack.extend(children.map(|child| Some(child.name.as_str())));
        }
        Ok(nodes)
    }

    fn head_parent(&self) -> Result<Option<String>> {
        Ok(self.entry.disk.record().current().map(|snapshot| snapshot.name.clone()))
    }

    fn snapshot(&self, name: &str) -> Result<Arc<dyn Device>> {
        let title = format!("{}@{name}", self.entry.disk.name());
        Ok(Arc::new(ChainedDevice::new(title, self.entry.disk.snapshot_chain(name)?)))
    }

    fn identity(&self, snapshot: Option<&str>) -> Result<Identity> {
        Ok(self.entry.identity(snapshot))
    }

    fn changes(&self, from: &str, to: Option<&str>, each: &mut dyn FnMut(Range<u64>)) -> Result<()> {
        let (below, above) = (self.chain_of(Some(from))?, self.chain_of(to)?);
        let (levels, keys) = (below.keys().len(), above.keys());
        // The levels of a parent are the lowest levels of its child, so the changes are in the levels above them.
        let Some(key) = keys.len().checked_sub(levels).and_then(|first| keys.get(first)) else {
            each(0..above.capacity());
            return Ok(());
        };
        let capacity = above.capacity();
        let (mut at, mut stride) = (0, Stride::default());
        while at < capacity {
            let spans = stride.ask(capacity - at, |length| above.changed_above(*key, at, length, SPANS))?;
            for span in &spans {
                if span.condition != Condition::Absent {
                    each(span.start..span.start + span.length);
                }
                at = span.start + span.length;
            }
            if spans.is_empty() {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("the source's map returns no extent for byte {at}"),
                ));
            }
        }
        let smaller = below.capacity().min(capacity);
        if smaller < capacity {
            each(smaller..capacity);
        }
        Ok(())
    }
}

impl Replica for ForeignReplica {
    fn head(&self) -> Result<Arc<dyn Device>> {
        let device = Arc::new(ChainedDevice::of_head(&self.disk)?);
        *self.head.lock() = Arc::downgrade(&device);
        Ok(device)
    }

    fn snapshot(&self, name: &str) -> Result<Arc<dyn Device>> {
        let title = format!("{}@{name}", self.disk.name());
        Ok(Arc::new(ChainedDevice::new(title, self.disk.snapshot_chain(name)?)))
    }

    fn identity(&self, snapshot: Option<&str>) -> Result<Identity> {
        Ok(Identity::Foreign { folder: self.folder.clone(), snapshot: snapshot.map(str::to_owned) })
    }

    fn take(&self, node: &Node) -> Result<()> {
        let new = vmdk::NewSnapshot {
            name: node.name.clone(),
            description: node.description.clone(),
            created: Some(node.created),
            ..vmdk::NewSnapshot::default()
        };
        self.disk.snapshot(&new).map(|_| ())
    }

    fn go_back(&self, snapshot: &str) -> Result<()> {
        self.disk.revert(snapshot)
    }

    fn forget(&self, snapshot: &str) -> Result<()> {
        self.disk.delete_snapshot(snapshot, None, &NoProgress)
    }

    fn resize(&self, capacity: u64) -> Result<()> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "a disk in VMware's formats has one capacity, and this disk had others: its snapshots differ in size \
                 from {capacity} bytes; migrate it to the native format, or delete those snapshots"
            ),
        ))
    }
}
