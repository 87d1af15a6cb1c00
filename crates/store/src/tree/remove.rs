//! Drops a tree, or a part of one.
//!
//! A tree of a large disk has more nodes than may be visited while a lock is held, so [`drop_step`] removes it in
//! portions, beginning at its right end. What remains after each portion is a valid tree. So the work can stop after
//! any step, a checkpoint can include the remaining tree, and after a crash the work continues from the root.

use super::page;
use super::{LEVELS_MAX, NodeId, NodeStore, corrupt, references};
use crate::Result;

/// Drops a part of a tree on which the caller has a reference: `budget` leaves and shared subtrees, at least one.
/// `root` becomes `None` when the whole tree is dropped.
///
/// Between the steps the tree maps fewer blocks than before, so no other code may read it.
pub fn drop_step<S: NodeStore + ?Sized>(store: &mut S, root: &mut Option<NodeId>, budget: usize) -> Result<()> {
    let Some(top) = *root else { return Ok(()) };
    if store.references(top)? > 1 {
        *root = None;
        store.drop_reference(top)?;
        return Ok(());
    }
    if usize::from(page::level(store.node(top)?)) >= LEVELS_MAX {
        return Err(corrupt(top, "a root of impossible level"));
    }
    // The exclusive nodes from the root down to the one that is being emptied. Each is the last child of the one
    // before.
    let mut path = [top; LEVELS_MAX];
    let mut depth = 0;
    let mut left = budget.max(1);
    while left > 0 && root.is_some() {
        let id = path[depth];
        let node = store.node(id)?;
        let (level, count) = (page::level(node), page::count(node));
        if level == 0 {
            depth = unlink(store, root, &path, depth)?;
            left -= 1;
            continue;
        }
        let last = page::slot(node, count.saturating_sub(1)).ok_or_else(|| corrupt(id, "no children"))?.child;
        if store.references(last)? == 1 {
            let found = page::level(store.node(last)?);
            if found != level - 1 {
                return Err(corrupt(last, format_args!("level {found} under a node of level {level}")));
            }
            depth += 1;
            path[depth] = last;
            continue;
        }
        page::remove_children(store.node_mut(id)?, count - 1..count);
        store.drop_reference(last)?;
        left -= 1;
        if count == 1 {
            depth = unlink(store, root, &path, depth)?;
        }
    }
    Ok(())
}

/// Fails if [`drop_step`] with a budget of 1 cannot read what it will change. Changes nothing.
pub fn check_drop<S: NodeStore + ?Sized>(store: &mut S, root: NodeId) -> Result<()> {
    let mut id = root;
    let mut above = None;
    loop {
        if references(store, id)? > 1 {
            // The node stays, and loses one reference.
            return Ok(());
        }
        let node = store.node(id)?;
        let (level, count) = (page::level(node), page::count(node));
        if above.is_some_and(|above: u8| level.checked_add(1) != Some(above)) || usize::from(level) >= LEVELS_MAX {
            return Err(corrupt(id, format_args!("level {level} is impossible there")));
        }
        if level == 0 {
            let runs = page::data_runs(node);
            return runs.into_iter().try_for_each(|run| store.check_data(run.physical, run.blocks));
        }
        above = Some(level);
        id = page::slot(node, count.saturating_sub(1)).ok_or_else(|| corrupt(id, "no children"))?.child;
    }
}

/// Removes the exclusive node at `depth` from the tree and frees it, and frees the parents that become empty, because
/// an internal node must have children. Returns the depth of the lowest node that remains; `root` becomes `None` if
/// none does.
fn unlink<S: NodeStore + ?Sized>(
    store: &mut S,
    root: &mut Option<NodeId>,
    path: &[NodeId; LEVELS_MAX],
    mut depth: usize,
) -> Result<usize> {
    loop {
        let id = path[depth];
        let node = store.node(id)?;
        let runs = if page::level(node) == 0 { page::data_runs(node) } else { Vec::new() };
        let mut parent_is_empty = false;
        match depth.checked_sub(1) {
            Some(above) => {
                let parent = store.node_mut(path[above])?;
                let count = page::count(parent);
                page::remove_children(parent, count.saturating_sub(1)..count);
                parent_is_empty = count <= 1;
            }
            None => *root = None,
        }
        for run in runs {
            store.drop_data_references(run.physical, run.blocks)?;
        }
        store.drop_reference(id)?;
        depth = depth.saturating_sub(1);
        if !parent_is_empty {
            return Ok(depth);
        }
    }
}

/// Drops one reference on a subtree that is no longer linked. Its root must have the given level.
pub(super) fn drop_subtree<S: NodeStore + ?Sized>(store: &mut S, id: NodeId, level: u8) -> Result<()> {
    if store.references(id)? > 1 {
        store.drop_reference(id)?;
        return Ok(());
    }
    let node = store.node(id)?;
    if page::level(node) != level {
        return Err(corrupt(id, format_args!("level {} instead of {level}", page::level(node))));
    }
    if level == 0 {
        for run in page::data_runs(node) {
            store.drop_data_references(run.physical, run.blocks)?;
        }
    } else {
        let children: Vec<NodeId> = page::children(node).collect();
        for child in children {
            drop_subtree(store, child, level - 1)?;
        }
    }
    store.drop_reference(id)?;
    Ok(())
}
