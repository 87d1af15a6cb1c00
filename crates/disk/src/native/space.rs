//! The space of native disks and their snapshots, and what deleting them would free.

use super::{Native, is_visible};
use crate::info::ReadCacheInfo;
use crate::space::{DatastoreSpace, DiskSpace, Ratio, SnapshotSpace, SpaceUse, TotalSpace, WouldFree};
use backend::BLOCK_SIZE;
use error::Result;
use store::catalog::{Object, ObjectState};
use store::engine::{Accounts, NODES_PER_QUESTION, ObjectSpace, ReadCacheStatistics};
use work::{Progress, Throttle};

fn bytes(blocks: u64) -> u64 {
    blocks * BLOCK_SIZE as u64
}

fn shown(object: &Object, space: ObjectSpace) -> SpaceUse {
    SpaceUse {
        provisioned: object.capacity,
        mapped: bytes(space.mapped),
        stored: bytes(space.stored),
        packed: bytes(space.packed),
        packs: bytes(space.packs),
        compression: Ratio::of(space.packed, space.packs),
        shared: Some(bytes(space.shared())),
        exclusive: Some(bytes(space.exclusive)),
        reserved: bytes(space.reserved),
    }
}

/// Limits a count to the rate of `progress`, so that its reads of metadata do not delay requests of clients.
fn paced(progress: &dyn Progress) -> impl Fn() -> bool {
    let throttle = Throttle::new(progress);
    move || throttle.wait(bytes(NODES_PER_QUESTION)) && !throttle.progress().cancelled()
}

impl Native {
    /// The state of the read cache; `None` if it is off.
    pub fn read_cache(&self) -> Option<ReadCacheInfo> {
        let limit = self.engine.options().read_cache as u64;
        let ReadCacheStatistics { resident, hits, misses } = self.engine.read_cache_statistics();
        (limit > 0).then_some(ReadCacheInfo { resident, limit, hits, misses })
    }

    /// Adds to `free` what deleting these disks and snapshots would free. A disk is deleted with its snapshots, except
    /// those that are handed over to clones. Fails for the reasons for which the deletion would fail. If disks with
    /// images are deleted together with these, `hidden` are the hidden native disks above the images.
    pub fn would_free(
        &self,
        disks: &[String],
        snapshots: &[(String, String)],
        hidden: &[String],
        promote: bool,
        free: &mut WouldFree,
        progress: &dyn Progress,
    ) -> Result<()> {
        let mut set = Vec::new();
        {
            let _changes = self.changes.lock();
            for name in disks {
                let deletable = self.deletable_disk(name, promote, disks)?;
                set.push(deletable.disk.id);
                for snapshot in &deletable.snapshots {
                    let title = format!("{name}@{}", snapshot.name);
                    if deletable.hands_over(snapshot) {
                        free.hands_over.push(title);
                        continue;
                    }
                    set.push(snapshot.id);
                    if !snapshot.incomplete {
                        free.with_disks.push(title);
                    }
                }
            }
            for (disk, name) in snapshots {
                set.push(self.deletable_snapshot(disk, name, disks)?.id);
            }
            let hidden = |catalog: &store::catalog::Catalog| {
                hidden.iter().filter_map(|name| catalog.disk(name)).map(|disk| disk.id).collect::<Vec<u64>>()
            };
            set.extend(self.engine.with_catalog(hidden));
        }
        let go_on = paced(progress);
        let mut accounts = self.engine.accounts(&set, &go_on)?;
        let freed = accounts.would_free(&set)?;
        free.data += bytes(freed.data);
        free.data_blocks += freed.data;
        free.metadata += bytes(freed.nodes);
        free.reserved += bytes(freed.reserved);
        free.held += bytes(accounts.counts().held + accounts.deleted()?.data);
        Ok(())
    }

    /// The space of one disk, or of all disks by name with their sums.
    pub fn space(&self, disk: Option<&str>, progress: &dyn Progress) -> Result<DatastoreSpace> {
        let only = disk.map(|name| self.find_disk(name)).transpose()?;
        let go_on = paced(progress);
        let mut accounts = self.engine.accounts(&[], &go_on)?;
        let disks: Vec<Object> = match &only {
            Some(disk) => vec![accounts.catalog().whole(disk.id)?.clone()],
            None => accounts.catalog().disks().filter(|disk| is_visible(disk)).cloned().collect(),
        };
        let total = disks.len() as u64;
        let mut all = Vec::with_capacity(disks.len());
        for (done, disk) in (0u64..).zip(&disks) {
            progress.update(done, total);
            all.push(space_of(&mut accounts, disk)?);
        }
        let total = if only.is_none() { Some(total_of(&mut accounts, &all)?) } else { None };
        Ok(DatastoreSpace { disks: all, total })
    }
}

/// The sums over all disks. The datastore may have further disks and snapshots: those that are being made or received.
fn total_of(accounts: &mut Accounts<'_>, disks: &[DiskSpace]) -> Result<TotalSpace> {
    let counts = accounts.counts();
    let deleted = accounts.deleted()?.data;
    let objects: Vec<u64> = accounts.catalog().objects().map(|object| object.id).collect();
    let mut exclusive = 0;
    for id in objects {
        if accounts.catalog().whole(id).is_ok() {
            exclusive += accounts.would_free(&[id])?.data;
        }
    }
    // If reference counts are damaged, the differences may be negative. A check reports the damage.
    let stored = counts.data.used.saturating_sub(deleted);
    let mut total = TotalSpace {
        stored: bytes(stored),
        shared: bytes(stored.saturating_sub(exclusive)),
        exclusive: bytes(exclusive),
        reserved: bytes(counts.reserved),
        held: bytes(counts.held + deleted),
        ..TotalSpace::default()
    };
    for disk in disks {
        total.provisioned += disk.space.provisioned;
        for space in std::iter::once(&disk.space).chain(disk.snapshots.iter().map(|snapshot| &snapshot.space)) {
            total.mapped += space.mapped;
            total.packed += space.packed;
            total.packs += space.packs;
        }
    }
    total.compression = Ratio::of(total.packed, total.packs);
    Ok(total)
}

fn space_of(accounts: &mut Accounts<'_>, disk: &Object) -> Result<DiskSpace> {
    let mut own: Vec<Object> = accounts.catalog().snapshots_of(disk.id).cloned().collect();
    own.sort_by_key(|snapshot| snapshot.id);
    let mut snapshots = Vec::new();
    // A snapshot that is not sealed in the view has no tree there, so its space is not known.
    let shown_now = |snapshot: &&Object| !snapshot.incomplete && snapshot.state != ObjectState::Unsealed;
    for snapshot in own.iter().filter(shown_now) {
        let space = shown(snapshot, accounts.space_of(snapshot.id)?);
        snapshots.push(SnapshotSpace { name: snapshot.name.clone(), space });
    }
    let mut set: Vec<u64> = own.iter().map(|snapshot| snapshot.id).collect();
    let used_by_snapshots = accounts.would_free(&set)?.data;
    set.push(disk.id);
    let reclaimable = accounts.would_free(&set)?.data;
    Ok(DiskSpace {
        growth: None,
        name: disk.name.clone(),
        space: shown(disk, accounts.space_of(disk.id)?),
        used_by_snapshots: Some(bytes(used_by_snapshots)),
        reclaimable: bytes(reclaimable),
        snapshots,
    })
}
