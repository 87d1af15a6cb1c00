//! Linked clones: disks that begin with the content of another disk's snapshot, as a delta above its image.
//!
//! 1. The source's record names a clone before the clone exists. While the record names the clone, no image below it is
//!    merged, shrunk or removed.
//! 2. A clone refers to the source's images in their folders, as to any foreign images. Because of rule 1, these images
//!    do not change.
//! 3. The deletion of a clone does not change the source's record. Before an image of the source is changed, its clones
//!    are checked: a clone is removed from the source's record if its folder has no record, or the record of another
//!    disk.

use crate::create::{check_name, fresh_record};
use crate::disk::{Disk, Options};
use crate::owner::lock_is_free;
use crate::record::{self, CloneRecord, Fate, ImageOwnership, OriginRecord, Pending};
use crate::stored::{self, RECORD_NAME};
use crate::{Error, ErrorKind, Result};
use layer::descriptor::Adapter;
use layer::image::Folder;
use std::sync::Arc;

/// A linked clone of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneReference {
    /// The UUID of the clone.
    pub uuid: String,
    /// The name of the clone when it was created.
    pub name: String,
    /// The snapshot on which the clone is based; `None` if the snapshot has no name any more.
    pub snapshot: Option<String>,
}

/// The source of a linked clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The UUID of the source disk.
    pub uuid: String,
    /// The name of the source disk when the clone was made.
    pub disk: String,
    /// The name of the snapshot.
    pub snapshot: String,
}

impl Disk {
    /// Makes a disk that begins with the content of a snapshot of this disk, in a folder of its own.
    pub fn linked_clone(
        self: &Arc<Self>,
        snapshot: &str,
        home: Folder,
        name: &str,
        options: &Options,
    ) -> Result<Arc<Self>> {
        self.noting(|| {
            check_name("disk", name)?;
            let _operation = self.begin("a linked clone")?;
            let record = self.record();
            let snapshot = record.snapshot(snapshot)?.clone();
            let flushed = self.are_flushed(self.open_head().as_deref(), &record.line(snapshot.node)?);
            flushed.map_err(|error| error.context(format!("snapshot '{}'", snapshot.name)))?;
            let adapter = Adapter::named(&record.adapter).unwrap_or_default();
            let mut fresh = fresh_record(name, &record.kind, record.delta, adapter, options);
            let here = self.reference();
            // The images below, with their folders as seen from the clone.
            for id in record.line(snapshot.node)?.iter().rev() {
                let mut node = record.node(*id)?.clone();
                node.standing = ImageOwnership::Foreign;
                node.folder = Some(node.folder.unwrap_or_else(|| here.clone()));
                fresh.nodes.push(node);
            }
            fresh.head = snapshot.node;
            fresh.permitted = record.permitted.clone();
            fresh.tunables = record.tunables;
            fresh.origin = Some(OriginRecord {
                uuid: record.uuid.clone(),
                disk: record.name.clone(),
                snapshot: snapshot.name.clone(),
            });
            fresh.pending = Some(Pending { fate: Some(Fate::Creating), ..Pending::new("linked clone") });
            let clone = CloneRecord {
                uuid: fresh.uuid.clone(),
                name: name.to_owned(),
                folder: reference_of(&home, &fresh.uuid),
                node: snapshot.node,
            };
            let disk = Self::begin_new(home, fresh, options)?;
            let made = (|| {
                let mut known = record.clone();
                known.clones.push(clone);
                self.commit(known)?;
                let delta = record.delta.holding(snapshot.capacity);
                disk.begin_above(snapshot.node, delta, snapshot.capacity, "linked clone")
            })();
            let made = disk.end_new(made);
            if made.is_err() {
                // If the entry cannot be removed now, a later check of the clones removes it.
                let _ = self.drop_stale_clones();
            }
            made?;
            Ok(Arc::new(disk))
        })
    }

    /// The linked clones of this disk's snapshots.
    pub fn clones(&self) -> Vec<CloneReference> {
        let record = self.record();
        let named = |node| record.snapshot_of(node).map(|snapshot| snapshot.name.clone());
        let shown = self.live_clones(&record).map(|clone| CloneReference {
            uuid: clone.uuid.clone(),
            name: clone.name.clone(),
            snapshot: named(clone.node),
        });
        shown.collect()
    }

    /// The clones of a record that still exist.
    pub(crate) fn live_clones<'a>(&'a self, record: &'a record::Record) -> impl Iterator<Item = &'a CloneRecord> {
        record.clones.iter().filter(|clone| self.is_there(record, clone))
    }

    /// The snapshot of which this disk is a linked clone; `None` if it is no clone.
    pub fn origin(&self) -> Option<Origin> {
        let origin = self.record().origin?;
        Some(Origin { uuid: origin.uuid, disk: origin.disk, snapshot: origin.snapshot })
    }

    /// The reference by which other disks find this disk's folder.
    fn reference(&self) -> String {
        reference_of(&self.home, &self.uuid())
    }

    /// Fails with the names of the clones that depend on an image, if there are any.
    pub(crate) fn refuse_clones(&self, snapshot: &str, node: u32) -> Result<()> {
        self.drop_stale_clones()?;
        let record = self.record();
        let clones = record.clones.iter().filter(|clone| clone.node == node);
        let names: Vec<&str> = clones.map(|clone| clone.name.as_str()).collect();
        if names.is_empty() {
            return Ok(());
        }
        let text = format!("snapshot '{snapshot}' of disk '{}' has linked clones: {}", record.name, names.join(", "));
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Removes entries of clones that do not exist any more from the record.
    pub(crate) fn drop_stale_clones(&self) -> Result<()> {
        let record = self.record();
        if record.clones.is_empty() {
            return Ok(());
        }
        let mut kept = record.clone();
        kept.clones.retain(|clone| self.is_there(&record, clone));
        if kept.clones.len() == record.clones.len() {
            return Ok(());
        }
        self.commit(kept)
    }

    /// Whether a clone still exists as recorded. If this cannot be determined, the clone counts as existing.
    fn is_there(&self, record: &record::Record, clone: &CloneRecord) -> bool {
        let folder = match self.folder(record, Some(&clone.folder)) {
            Ok(folder) => folder,
            Err(error) => return error.kind() != ErrorKind::NotFound,
        };
        match stored::load(&**folder.directory()) {
            Ok(found) if found.uuid != clone.uuid => false,
            // A clone that is being created counts as existing while its process holds its lock. Without that lock, it
            // is the remnant of an interrupted creation.
            Ok(found) => {
                let fate = found.pending.as_ref().and_then(|pending| pending.fate);
                fate.is_none() || !lock_is_free(&folder)
            }
            Err(error) => {
                let there = error.kind() != ErrorKind::NotFound;
                if there {
                    tracing::warn!(%error, clone = clone.name, "'{RECORD_NAME}' of a linked clone cannot be read");
                }
                there
            }
        }
    }
}

fn reference_of(home: &Folder, uuid: &str) -> String {
    home.path().and_then(|path| path.to_str()).map_or_else(|| uuid.to_owned(), str::to_owned)
}
