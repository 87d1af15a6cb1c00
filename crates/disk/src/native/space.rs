//! The space of native disks and their snapshots, and what deleting them would free.

use super::{Native, bytes, is_visible};
use crate::info::ReadCacheInfo;
use crate::space::{
    CompressedSpace, DatastoreSpace, DiskSpace, Ratio, Reduction, SnapshotSpace, SpaceUse, TotalSpace, WouldFree,
};
use error::Result;
use store::catalog::{Object, ObjectState};
use store::engine::{Accounts, NODES_PER_QUESTION, ObjectSpace, ReadCacheStatistics, SetSpace};
use work::{Progress, Throttle};

/// The most packs that a request examines. Each needs a read of one block.
const PACKS_EXAMINED: usize = 4096;

fn shown(object: &Object, space: ObjectSpace) -> SpaceUse {
    SpaceUse {
        provisioned: object.capacity,
        mapped: bytes(space.mapped),
        stored: bytes(space.stored),
        compressed: CompressedSpace::new(bytes(space.packed), bytes(space.packs)),
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

    /// The space of one disk, or of all disks by name with their sums. With `explain`, the sums say why the data takes
    /// the space that it takes. For one disk this is always said.
    pub fn space(&self, disk: Option<&str>, explain: bool, progress: &dyn Progress) -> Result<DatastoreSpace> {
        let only = disk.map(|name| self.find_disk(name)).transpose()?;
        let go_on = paced(progress);
        let mut accounts = self.engine.accounts(&[], &go_on)?;
        if let Some(disk) = only {
            let disk = accounts.catalog().whole(disk.id)?.clone();
            let (mut space, family) = space_of(&mut accounts, &disk)?;
            let together = accounts.distinct(&family.set(), PACKS_EXAMINED)?;
            space.shared_with_disks = Some(bytes(together.blocks.stored()).saturating_sub(space.reclaimable));
            space.reduction = Some(reduction(family.sums, &together, 0));
            return Ok(DatastoreSpace { disks: vec![space], total: None });
        }
        // Hidden disks are included in the sums.
        let disks: Vec<Object> = accounts.catalog().disks().cloned().collect();
        let (mut all, mut families) = (Vec::with_capacity(disks.len()), Vec::with_capacity(disks.len()));
        for (done, disk) in (0u64..).zip(&disks) {
            progress.update(done, disks.len() as u64);
            let (space, family) = space_of(&mut accounts, disk)?;
            all.extend(is_visible(disk).then_some(space));
            families.push(family);
        }
        let mut total = total_of(&mut accounts, &all, &families)?;
        if explain {
            explain_total(&mut accounts, &families, &mut total)?;
        }
        Ok(DatastoreSpace { disks: all, total: Some(total) })
    }
}

/// The head and the snapshots of a disk.
struct Family {
    disk: u64,
    snapshots: Vec<u64>,
    /// Size of the head, in blocks.
    blocks: u64,
    sums: Sums,
}

impl Family {
    fn set(&self) -> Vec<u64> {
        self.snapshots.iter().copied().chain([self.disk]).collect()
    }
}

/// Sums over heads and snapshots.
#[derive(Clone, Copy, Default)]
struct Sums {
    states: u64,
    capacity: u64,
    /// Blocks that they map.
    mapped: u64,
}

/// Why `together` takes less space than the sums. `between_disks` are the blocks that several disks map.
fn reduction(sums: Sums, together: &SetSpace, between_disks: u64) -> Reduction {
    let SetSpace { blocks, fill } = together;
    let (mapped, stored) = (bytes(sums.mapped), bytes(blocks.stored()));
    let (packed, packs) = (bytes(blocks.packed), bytes(blocks.packs));
    // Compressed blocks take no more space than their content.
    let packing_loss = together.packing_loss().max(packs.saturating_sub(packed));
    Reduction {
        states: sums.states,
        capacity: sums.capacity,
        unmapped: sums.capacity.saturating_sub(mapped),
        mapped,
        within_disks: bytes(sums.mapped.saturating_sub(blocks.mapped() + between_disks)),
        between_disks: bytes(between_disks),
        compression: packed.saturating_add(packing_loss).saturating_sub(packs),
        packing_loss,
        packs: fill.packs,
        packs_examined: fill.examined,
        stored,
        zeros: bytes(blocks.unwritten),
        ratio: Ratio::of(mapped, stored),
    }
}

/// Adds a disk to the sums. Thin disks may have any capacity, so the sums may exceed the range of the type.
fn add(total: &mut TotalSpace, disk: &DiskSpace) {
    total.provisioned = total.provisioned.saturating_add(disk.space.provisioned);
    for space in std::iter::once(&disk.space).chain(disk.snapshots.iter().map(|snapshot| &snapshot.space)) {
        total.mapped = total.mapped.saturating_add(space.mapped);
        total.compressed = total.compressed.plus(space.compressed);
    }
}

/// The sums over all disks. The datastore may have further disks and snapshots than `disks`: those that are being made
/// or received.
fn total_of(accounts: &mut Accounts<'_>, disks: &[DiskSpace], families: &[Family]) -> Result<TotalSpace> {
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
    let snapshots: Vec<u64> = families.iter().flat_map(|family| &family.snapshots).copied().collect();
    let all: Vec<u64> = families.iter().flat_map(Family::set).collect();
    let mut total = TotalSpace {
        stored: bytes(stored),
        shared: bytes(stored.saturating_sub(exclusive)),
        exclusive: bytes(exclusive),
        reserved: bytes(counts.reserved),
        held: bytes(counts.held + deleted),
        used_by_snapshots: bytes(accounts.would_free(&snapshots)?.data),
        reclaimable: bytes(accounts.would_free(&all)?.data),
        ..TotalSpace::default()
    };
    disks.iter().for_each(|disk| add(&mut total, disk));
    Ok(total)
}

/// Adds to the sums over all disks why the data takes the space that it takes, and what clients may need. Disks with
/// snapshots are walked again, each whole.
fn explain_total(accounts: &mut Accounts<'_>, families: &[Family], total: &mut TotalSpace) -> Result<()> {
    let (mut sums, mut sizes, mut in_disks) = (Sums::default(), 0u64, 0);
    for family in families {
        sums.states += family.sums.states;
        sums.capacity = sums.capacity.saturating_add(family.sums.capacity);
        sums.mapped = sums.mapped.saturating_add(family.sums.mapped);
        sizes = sizes.saturating_add(family.blocks);
        in_disks += accounts.distinct_blocks(&family.set())?.mapped();
    }
    let all: Vec<u64> = families.iter().flat_map(Family::set).collect();
    let together = accounts.distinct(&all, PACKS_EXAMINED)?;
    let heads: Vec<u64> = families.iter().map(|family| family.disk).collect();
    let overwritten = accounts.distinct(&heads, 0)?.blocks.own;
    let reserved = accounts.counts().reserved;
    total.reduction = Some(reduction(sums, &together, in_disks.saturating_sub(together.blocks.mapped())));
    total.may_need = Some(bytes(sizes.saturating_sub(overwritten + reserved)));
    Ok(())
}

/// The space of a disk, without its reduction.
fn space_of(accounts: &mut Accounts<'_>, disk: &Object) -> Result<(DiskSpace, Family)> {
    let mut own: Vec<Object> = accounts.catalog().snapshots_of(disk.id).cloned().collect();
    own.sort_by_key(|snapshot| snapshot.id);
    let mut sums = Sums::default();
    let mut count = |accounts: &mut Accounts<'_>, object: &Object| {
        let space = accounts.space_of(object.id)?;
        sums.states += 1;
        sums.capacity = sums.capacity.saturating_add(object.capacity);
        sums.mapped = sums.mapped.saturating_add(space.mapped);
        Ok::<_, error::Error>(shown(object, space))
    };
    let head = count(accounts, disk)?;
    let mut snapshots = Vec::new();
    for snapshot in &own {
        // A snapshot that is not sealed in the view has no tree there, so its space is not known.
        if snapshot.state == ObjectState::Unsealed {
            continue;
        }
        let space = count(accounts, snapshot)?;
        if !snapshot.incomplete {
            snapshots.push(SnapshotSpace { name: snapshot.name.clone(), reclaimable: space.exclusive, space });
        }
    }
    let snapshots_of = own.iter().map(|snapshot| snapshot.id).collect();
    let family = Family { disk: disk.id, snapshots: snapshots_of, blocks: disk.size_in_blocks(), sums };
    let used_by_snapshots = accounts.would_free(&family.snapshots)?.data;
    let reclaimable = accounts.would_free(&family.set())?.data;
    let space = DiskSpace {
        growth: None,
        name: disk.name.clone(),
        space: head,
        used_by_snapshots: Some(bytes(used_by_snapshots)),
        reclaimable: bytes(reclaimable),
        shared_with_disks: None,
        reduction: None,
        snapshots,
    };
    Ok((space, family))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_beyond_the_range_of_the_type_are_the_highest_number() {
        let compressed = CompressedSpace::new(1 << 62, 1 << 62);
        let space = SpaceUse { provisioned: 1 << 62, mapped: 1 << 62, compressed, ..SpaceUse::default() };
        let disk = DiskSpace {
            name: "vm".into(),
            space,
            used_by_snapshots: None,
            reclaimable: 0,
            shared_with_disks: None,
            reduction: None,
            growth: None,
            snapshots: Vec::new(),
        };
        let mut total = TotalSpace::default();
        (0..3).for_each(|_| add(&mut total, &disk));
        let all = |of: &TotalSpace| [of.provisioned, of.mapped, of.compressed.packed, of.compressed.packs];
        assert_eq!(all(&total), [3 << 62; 4]);
        add(&mut total, &disk);
        assert_eq!(all(&total), [u64::MAX; 4]);
        assert_eq!(bytes(1 << 52), u64::MAX);
    }
}
