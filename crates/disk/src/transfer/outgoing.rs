//! A snapshot of a disk that is sent to another datastore.

use super::{BASES_MAX, SnapshotIdentity};
use crate::datastore::{Datastore, InUse};
use crate::device::{Allocation, Device, ReadPlan};
use crate::info::Provisioning;
use crate::names;
use crate::native::Native;
use crate::stride::Stride;
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;

/// Most extents that one query of the map returns.
const ASK_EXTENTS: usize = 1024;

/// A run of bytes that has to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Byte offset.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// True if the range reads as zeros, but does not in the base.
    pub zero: bool,
}

/// A snapshot that is sent. It cannot be deleted, and its disk cannot be migrated, until this value is dropped.
pub struct Outgoing {
    device: Arc<dyn Device>,
    provisioning: Provisioning,
    point: SnapshotIdentity,
    /// Identities of snapshots that the other datastore may have, the closest first.
    bases: Vec<String>,
    /// The numbers of these snapshots in the native store.
    base_ids: Vec<u64>,
    /// The store and the snapshot's number, for a native disk.
    native: Option<(Arc<Native>, u64)>,
    /// Prevents a migration of the disk: the map of the snapshot would change, and its bases would be deleted.
    _kept: InUse,
}

impl Datastore {
    /// Opens a snapshot of a disk for sending: `Busy` while the disk is migrated. The content of the snapshot, and of
    /// its bases, is durable afterwards.
    pub fn outgoing(&self, disk: &str, snapshot: &str) -> Result<Outgoing> {
        let kept = self.uses.share(disk)?;
        let device = self.device(&format!("{disk}@{snapshot}"), true)?;
        let info = self.disk(disk)?;
        if self.foreign.find(disk).is_some() {
            // Snapshots of disks in VMware's formats have no identity, so a new identity is created, which no other
            // datastore has.
            let uuid = names::uuid_text(&names::new_uuid()?);
            let taken = self.snapshots(Some(disk))?.into_iter().find(|known| known.name == snapshot);
            let created = taken.map_or(0, |taken| taken.created);
            let point = SnapshotIdentity { uuid, name: snapshot.to_owned(), created };
            return Ok(Outgoing {
                device,
                provisioning: Provisioning::Thin,
                point,
                bases: Vec::new(),
                base_ids: Vec::new(),
                native: None,
                _kept: kept,
            });
        }
        // The receiver keeps what it gets under the identity of the snapshot. After a power failure of this host the
        // snapshot must have the same content, or later increments leave out what differs.
        self.native.engine.flush().map_err(|error| error.context(format!("making '{disk}@{snapshot}' durable")))?;
        let identity = self.native.snapshot_identity(disk, snapshot)?;
        let bases = self.native.lineage(disk, snapshot, BASES_MAX)?;
        let id = self.native.find_snapshot(&self.native.find_disk(disk)?, snapshot)?.id;
        let uuid = names::uuid_text(&identity.uuid);
        Ok(Outgoing {
            device,
            provisioning: info.provisioning,
            point: SnapshotIdentity { uuid, name: snapshot.to_owned(), created: identity.created },
            bases: bases.iter().map(|(uuid, _)| names::uuid_text(uuid)).collect(),
            base_ids: bases.iter().map(|(_, id)| *id).collect(),
            native: Some((Arc::clone(&self.native), id)),
            _kept: kept,
        })
    }
}

impl Outgoing {
    /// The name `disk@snapshot`.
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// Capacity in bytes.
    pub fn capacity(&self) -> u64 {
        self.device.capacity()
    }

    /// Provisioning type of the disk.
    pub fn provisioning(&self) -> Provisioning {
        self.provisioning
    }

    /// Identity of the snapshot.
    pub fn point(&self) -> &SnapshotIdentity {
        &self.point
    }

    /// Identities of snapshots from which differences can be computed, the closest first.
    pub fn bases(&self) -> &[String] {
        &self.bases
    }

    /// Calls `each` for every extent of a range that has to be sent: all data, or the differences from one of
    /// [`Outgoing::bases`].
    pub fn extents(
        &self,
        base: Option<&str>,
        range: Range<u64>,
        each: &mut dyn FnMut(Extent) -> Result<()>,
    ) -> Result<()> {
        let range = range.start..range.end.min(self.capacity());
        match (base, &self.native) {
            (None, _) => self.data(range, each),
            (Some(base), Some((native, id))) => self.changes(native, *id, base, range, each),
            (Some(_), None) => Err(self.unknown_base()),
        }
    }

    fn unknown_base(&self) -> Error {
        let text = format!("'{}' cannot be compared with a snapshot that this datastore does not have", self.name());
        Error::new(ErrorKind::Invalid, text)
    }

    fn data(&self, range: Range<u64>, each: &mut dyn FnMut(Extent) -> Result<()>) -> Result<()> {
        let (mut at, mut stride) = (range.start, Stride::default());
        while at < range.end {
            let extents = stride.ask(range.end - at, |length| self.device.status(at, length, ASK_EXTENTS))?;
            if extents.is_empty() {
                let text = format!("'{}': the map returns no extent for byte {at}", self.name());
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            for extent in extents {
                if extent.allocation == Allocation::Data {
                    each(Extent { offset: at, length: extent.length, zero: false })?;
                }
                at += extent.length;
            }
        }
        Ok(())
    }

    fn changes(
        &self,
        native: &Native,
        id: u64,
        base: &str,
        range: Range<u64>,
        each: &mut dyn FnMut(Extent) -> Result<()>,
    ) -> Result<()> {
        let known = self.bases.iter().position(|known| known == base);
        let from = known.and_then(|index| self.base_ids.get(index)).ok_or_else(|| self.unknown_base())?;
        let block = BLOCK_SIZE as u64;
        let blocks = range.start / block..range.end.div_ceil(block);
        native
            .engine
            .diff(*from, id, blocks, &mut |changed| {
                let offset = (changed.logical * block).max(range.start);
                let end = ((changed.logical + changed.blocks) * block).min(range.end);
                if offset < end {
                    each(Extent { offset, length: end - offset, zero: changed.zero })?;
                }
                Ok(true)
            })
            .map_err(|error| error.context(format!("comparing '{}' with a snapshot", self.name())))
    }

    /// Reads a whole range and verifies its checksums.
    pub fn read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.device.read_plan(offset, length)
    }
}
