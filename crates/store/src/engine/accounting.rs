//! The space of disks and snapshots: what they map, what only they use, and what deleting any set of them would free.
//!
//! Everything is counted in a view (`metadata/view.rs`): trees, reference counts and catalog as a checkpoint captured
//! them at one moment. So the figures are exact for this moment, whatever is written meanwhile, and the metadata lock
//! is not held while trees are walked ([0036](../../../../docs/adr/0036-space-in-a-view.md)).
//!
//! What must hold:
//!
//! 1. The view is of a moment after the call. A flush precedes the checkpoint, so the trees of the view contain all
//!    writes that were acknowledged before the call.
//! 2. A deleted tree that is not dropped yet still has references. Blocks that only deleted trees use become free in
//!    any case, so no other deletion frees them. Blocks that only deleted trees and the trees of a set use count for
//!    the set. The deleted trees are walked once: the walks for the sets begin with the references that are left.
//! 3. A deleted tree that cannot be read is not dropped. The tree counts as used, and the counts of other trees do not
//!    fail.
//! 4. The blocks that a tree maps and those in which they are stored differ by compressed blocks: a pack counts once
//!    for each tree that maps a part of it (`tree/mapped.rs`). A plain block that is shared because its content is the
//!    same counts for each place of the tree where it is mapped. What a deletion frees is exact in both cases.

mod distinct;

pub use distinct::{PackFill, SetSpace};

use super::Engine;
use super::inspect::StoreCounts;
use super::metadata::{Effects, View};
use crate::catalog::{Catalog, Object, ObjectState};
use crate::sync::MutexGuard;
use crate::tree::{self, Freed, Left, MappedCounter, NodeId, Repeats};
use crate::{Error, ErrorKind, Result, is_lost};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The number of nodes that a count visits between two calls of `go_on`.
pub const NODES_PER_QUESTION: u64 = 64;
/// The most views that are made for a count. A view is made again if it contains snapshots that are not sealed.
const VIEWS_MAX: usize = 4;

/// What deleting disks and snapshots would free, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WouldFree {
    /// Data blocks.
    pub data: u64,
    /// Nodes of the map.
    pub nodes: u64,
    /// Data blocks that are reserved for writes of thick disks. They contain no data, but no other disk may use them.
    pub reserved: u64,
}

/// The space of a disk or snapshot, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObjectSpace {
    /// Logical blocks that are mapped to data blocks.
    pub mapped: u64,
    /// The part of `mapped` that reads as zeros.
    pub unwritten: u64,
    /// The part of `mapped` that is compressed.
    pub packed: u64,
    /// Data blocks in which the logical blocks are stored. A block at several places of the disk counts several times.
    pub stored: u64,
    /// The part of `stored` in which the compressed blocks are stored, with parts of packs that are not in use.
    pub packs: u64,
    /// The part of `stored` that no other disk or snapshot uses: deleting this disk or snapshot alone frees it.
    pub exclusive: u64,
    /// Nodes of the map that no other disk or snapshot uses.
    pub nodes: u64,
    /// Data blocks that are reserved for writes of a thick disk.
    pub reserved: u64,
}

impl ObjectSpace {
    /// Data blocks that other disks or snapshots, or other places of the same disk, use too.
    pub fn shared(&self) -> u64 {
        self.stored.saturating_sub(self.exclusive)
    }
}

/// The trees of deleted disks and snapshots that will be dropped.
#[derive(Default)]
struct Deleted {
    roots: Vec<NodeId>,
    /// What dropping these trees will free.
    freed: Freed,
    /// The references that are left once these trees are dropped. `None` if these need too much memory: then the trees
    /// are walked again for each set.
    left: Option<Left>,
}

/// The space of the disks and snapshots at one moment. At most one `Accounts` of an engine exists at a time.
pub struct Accounts<'a> {
    engine: &'a Engine,
    view: View,
    go_on: &'a dyn Fn() -> bool,
    mapped: MappedCounter,
    repeats: Repeats,
    /// The deleted trees, once they are counted.
    deleted: Option<Arc<Deleted>>,
    /// What dropping single trees would free, for the trees that were counted.
    single: FxHashMap<NodeId, Freed>,
    _counting: MutexGuard<'a, ()>,
}

impl Engine {
    /// Counts what deleting these disks and snapshots would free. A disk in the set counts without its snapshots,
    /// except those in the set. `go_on` returns false to stop the count.
    pub fn would_free(&self, set: &[u64], go_on: &dyn Fn() -> bool) -> Result<WouldFree> {
        self.accounts(set, go_on)?.would_free(set)
    }

    /// Accounts of all objects. Waits first until those of `objects` that are snapshots are sealed, so that they have
    /// trees. `go_on` returns false to stop a count.
    pub fn accounts<'a>(&'a self, objects: &[u64], go_on: &'a dyn Fn() -> bool) -> Result<Accounts<'a>> {
        let counting = self.counting.lock();
        self.flush()?;
        for object in objects {
            if self.with_catalog(|catalog| catalog.whole(*object).map(Object::is_snapshot))? {
                self.wait_sealed(*object)?;
            }
        }
        let view = self.view_sealed()?;
        let (mapped, single) = Default::default();
        // Queried after the view was made, because the view may contain the first shares.
        let repeats = if self.log.has_shares() { Repeats::Possible } else { Repeats::Never };
        Ok(Accounts { engine: self, view, go_on, mapped, repeats, deleted: None, single, _counting: counting })
    }

    /// Makes a view in which all snapshots are sealed, because an unsealed snapshot has content but no tree yet. If
    /// snapshots are taken all the time, the last of [`VIEWS_MAX`] views may contain unsealed snapshots nevertheless.
    pub(super) fn view_sealed(&self) -> Result<View> {
        let mut view = self.view()?;
        for _ in 1..VIEWS_MAX {
            let unsealed = view.catalog().objects().filter(|object| object.state == ObjectState::Unsealed);
            let unsealed: Vec<u64> = unsealed.map(|object| object.id).collect();
            if unsealed.is_empty() {
                break;
            }
            // The view is dropped first, so that checkpoints copy no pages for this view while the snapshots are
            // sealed.
            drop(view);
            for snapshot in unsealed {
                match self.wait_sealed(snapshot) {
                    // The snapshot was deleted meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    sealed => sealed?,
                }
            }
            view = self.view()?;
        }
        Ok(view)
    }
}

impl Accounts<'_> {
    /// The catalog at the moment of the accounts.
    pub fn catalog(&self) -> &Catalog {
        self.view.catalog()
    }

    /// Sizes of the store at the moment of the accounts.
    pub fn counts(&self) -> StoreCounts {
        self.view.counts
    }

    /// Counts what deleting these disks and snapshots would free.
    pub fn would_free(&mut self, set: &[u64]) -> Result<WouldFree> {
        let set: BTreeSet<u64> = set.iter().copied().collect();
        let mut roots = Vec::with_capacity(set.len());
        let mut reserved = 0;
        for id in set {
            let object = self.catalog().whole(id)?;
            reserved += object.reserved;
            roots.extend(object.root);
        }
        let Freed { data, nodes } = self.freed(&roots)?;
        Ok(WouldFree { data, nodes, reserved })
    }

    /// The space of a disk or snapshot.
    pub fn space_of(&mut self, id: u64) -> Result<ObjectSpace> {
        let object = self.catalog().whole(id)?;
        let (root, reserved) = (object.root, object.reserved);
        let Some(root) = root else { return Ok(ObjectSpace { reserved, ..ObjectSpace::default() }) };
        let mut effects = Effects::default();
        let mapped = {
            let mut sight = self.view.sight();
            let mut nodes = sight.nodes(&mut effects);
            self.mapped.count(&mut nodes, root, &mut questions(self.go_on))
        };
        let mapped = self.whole(mapped)?;
        let freed = self.freed(&[root])?;
        Ok(ObjectSpace {
            mapped: mapped.all,
            unwritten: mapped.unwritten,
            stored: mapped.all - mapped.packed + mapped.packs,
            packed: mapped.packed,
            packs: mapped.packs,
            exclusive: freed.data,
            nodes: freed.nodes,
            reserved,
        })
    }

    /// What dropping the trees of deleted disks and snapshots will free. Trees that cannot be read are left out.
    pub fn deleted(&mut self) -> Result<Freed> {
        self.count_deleted().map(|deleted| deleted.freed)
    }

    fn count_deleted(&mut self) -> Result<Arc<Deleted>> {
        if let Some(known) = &self.deleted {
            return Ok(Arc::clone(known));
        }
        let roots: Vec<NodeId> = self.catalog().trash().filter_map(|object| object.root).collect();
        let deleted = match self.drop_deleted(&roots) {
            Err(error) if is_lost(&error) => {
                // The medium may have lost a node, or the view may have lost a page. If the view has lost a page, no
                // count in the view is possible, and this check fails.
                self.view.check()?;
                self.readable_of(&roots)?
            }
            deleted => deleted?,
        };
        Ok(Arc::clone(self.deleted.insert(Arc::new(deleted))))
    }

    /// The trees of `roots` that can be dropped together. A node that two trees share is visited only if both are
    /// dropped, so each tree is tried together with the readable trees before it.
    fn readable_of(&mut self, roots: &[NodeId]) -> Result<Deleted> {
        let mut readable = Deleted { left: Some(Left::default()), ..Deleted::default() };
        for root in roots {
            match self.drop_deleted(&[readable.roots.as_slice(), &[*root]].concat()) {
                Err(error) if is_lost(&error) => {
                    tracing::debug!(%error, "a deleted disk or snapshot that cannot be read is not counted");
                }
                more => readable = more?,
            }
        }
        Ok(readable)
    }

    /// What dropping these trees would free, in addition to what dropping the deleted trees will free.
    fn freed(&mut self, roots: &[NodeId]) -> Result<Freed> {
        if let [root] = roots
            && let Some(known) = self.single.get(root)
        {
            return Ok(*known);
        }
        let deleted = self.count_deleted()?;
        let freed = match &deleted.left {
            Some(left) => self.drop_after(left, roots)?,
            None => {
                let (all, anyway) = (self.drop_all(&[roots, &deleted.roots].concat())?, deleted.freed);
                // If reference counts are damaged, the difference may be negative. A check reports the damage.
                let data = all.data.saturating_sub(anyway.data);
                Freed { data, nodes: all.nodes.saturating_sub(anyway.nodes) }
            }
        };
        if let [root] = roots {
            self.single.insert(*root, freed);
        }
        Ok(freed)
    }

    /// What dropping these deleted trees will free, and what is left after that.
    fn drop_deleted(&mut self, roots: &[NodeId]) -> Result<Deleted> {
        let mut effects = Effects::default();
        let counted = {
            let mut sight = self.view.sight();
            tree::freed_and_left(&mut sight.nodes(&mut effects), roots, self.repeats, &mut questions(self.go_on))
        };
        let (freed, left) = self.whole(counted)?;
        Ok(Deleted { roots: roots.to_vec(), freed, left })
    }

    /// What dropping these trees would free after the deleted trees.
    fn drop_after(&mut self, left: &Left, roots: &[NodeId]) -> Result<Freed> {
        let mut effects = Effects::default();
        let freed = {
            let mut sight = self.view.sight();
            tree::freed_after(&mut sight.nodes(&mut effects), left, roots, self.repeats, &mut questions(self.go_on))
        };
        self.whole(freed)
    }

    /// What dropping these trees would free.
    fn drop_all(&mut self, roots: &[NodeId]) -> Result<Freed> {
        let mut effects = Effects::default();
        let freed = {
            let mut sight = self.view.sight();
            tree::freed(&mut sight.nodes(&mut effects), roots, self.repeats, &mut questions(self.go_on))
        };
        self.whole(freed)
    }

    /// Returns `counted`, or an error if pages of the view were lost, because the count is meaningless then.
    fn whole<T>(&self, counted: Result<T>) -> Result<T> {
        self.view.check()?;
        counted
    }
}

/// A function that is called for each visited node, and fails after `go_on` has returned false.
fn questions(go_on: &dyn Fn() -> bool) -> impl FnMut() -> Result<()> {
    let mut visited = 0u64;
    move || {
        visited = visited.wrapping_add(1);
        if visited % NODES_PER_QUESTION != 1 || go_on() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Interrupted, "counting the space was stopped on request"))
    }
}
