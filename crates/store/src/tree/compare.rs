//! Differences between two trees: changed-block tracking, and the increments of a backup.
//!
//! Two cursors move through the trees in step, each over a sequence of extents. They open subtrees only when necessary.
//! If both cursors are at the same node, both skip it, because equal node numbers mean equal content. So the cost is
//! proportional to the nodes that are *not* shared. The trees may differ in height and in the boundaries of nodes:
//!
//! - A cursor is at an extent, at an unopened subtree with a lower bound, or at the end. All blocks before it are
//!   compared.
//! - An extent, or a part of it, that lies before the item of the other cursor is a difference.
//! - Otherwise a subtree is opened: the subtree of the higher level, so that nodes of one level are compared; of two
//!   subtrees on one level, the subtree that begins first. If one item is an extent, the other cursor opens its
//!   subtree, which may have extents at the same blocks.

use super::page::{self, LOGICAL_LIMIT};
use super::{LEVELS_MAX, Mapping, NodeId, NodeStore, corrupt};
use crate::Result;
use std::ops::Range;

/// A range that two trees map differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiffExtent {
    /// First logical block.
    pub logical: u64,
    /// Length in blocks.
    pub blocks: u64,
    /// Whether the second tree maps written data there; if not, the range reads as zeros in that tree.
    pub in_b: bool,
}

/// Calls `each` in order with the ranges within `range` that trees `a` and `b` map differently: another physical block,
/// another flag, or mapped in one of them only. `None` is an empty tree.
pub fn diff<S: NodeStore + ?Sized>(
    store: &mut S,
    a: Option<NodeId>,
    b: Option<NodeId>,
    range: Range<u64>,
    each: &mut dyn FnMut(DiffExtent) -> Result<()>,
) -> Result<()> {
    let range = range.start..range.end.min(LOGICAL_LIMIT);
    if range.is_empty() || a == b {
        return Ok(());
    }
    let mut report = Report { pending: None, each };
    let mut a = Cursor::new(store, a, range.clone())?;
    let mut b = Cursor::new(store, b, range)?;
    loop {
        match (a.head, b.head) {
            (Head::End, Head::End) => return report.flush(),
            (Head::Subtree(left), Head::Subtree(right)) => {
                if left.id == right.id {
                    a.advance(store)?;
                    b.advance(store)?;
                    continue;
                }
                if (right.level, left.lower) <= (left.level, right.lower) {
                    a.open(store, left)?;
                } else {
                    b.open(store, right)?;
                }
            }
            (Head::Extent(left), Head::Extent(right)) if left.logical == right.logical => {
                let blocks = left.blocks.min(right.blocks);
                if (left.physical, left.unwritten, left.packed) != (right.physical, right.unwritten, right.packed) {
                    report.add(left.logical, blocks, !right.unwritten)?;
                }
                a.pass(store, left, blocks)?;
                b.pass(store, right, blocks)?;
            }
            (Head::Extent(left), other) if left.logical < other.lower() => {
                let blocks = left.blocks.min(other.lower() - left.logical);
                report.add(left.logical, blocks, false)?;
                a.pass(store, left, blocks)?;
            }
            (other, Head::Extent(right)) if right.logical < other.lower() => {
                let blocks = right.blocks.min(other.lower() - right.logical);
                report.add(right.logical, blocks, !right.unwritten)?;
                b.pass(store, right, blocks)?;
            }
            (Head::Subtree(left), _) => a.open(store, left)?,
            (_, Head::Subtree(right)) => b.open(store, right)?,
            // The cases above handle an extent before another extent or before the end.
            (Head::Extent(_), _) | (_, Head::Extent(_)) => return report.flush(),
        }
    }
}

/// Joins adjacent differences.
struct Report<'a> {
    pending: Option<DiffExtent>,
    each: &'a mut dyn FnMut(DiffExtent) -> Result<()>,
}

impl Report<'_> {
    fn add(&mut self, logical: u64, blocks: u64, in_b: bool) -> Result<()> {
        if let Some(last) = &mut self.pending
            && last.logical + last.blocks == logical
            && last.in_b == in_b
        {
            last.blocks += blocks;
            return Ok(());
        }
        self.flush()?;
        self.pending = Some(DiffExtent { logical, blocks, in_b });
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.pending.take().map_or(Ok(()), |last| (self.each)(last))
    }
}

/// A subtree that the cursor has not opened.
#[derive(Clone, Copy)]
struct Subtree {
    id: NodeId,
    level: u8,
    /// The lowest logical block that the subtree may map.
    lower: u64,
}

/// The item at which a cursor stands.
#[derive(Clone, Copy)]
enum Head {
    Extent(Mapping),
    Subtree(Subtree),
    End,
}

impl Head {
    /// The lowest block that the item, or any later one, may contain.
    fn lower(&self) -> u64 {
        match self {
            Head::Extent(mapping) => mapping.logical,
            Head::Subtree(subtree) => subtree.lower,
            Head::End => u64::MAX,
        }
    }
}

/// An opened node of the cursor's path.
#[derive(Clone, Copy)]
struct Frame {
    node: Subtree,
    /// The index of the next entry.
    next: usize,
}

struct Cursor {
    head: Head,
    frames: [Option<Frame>; LEVELS_MAX],
    depth: usize,
    range: Range<u64>,
}

impl Cursor {
    fn new<S: NodeStore + ?Sized>(store: &mut S, root: Option<NodeId>, range: Range<u64>) -> Result<Self> {
        let head = match root {
            Some(id) => {
                let level = page::level(store.node(id)?);
                if usize::from(level) >= LEVELS_MAX {
                    return Err(corrupt(id, "a root of impossible level"));
                }
                Head::Subtree(Subtree { id, level, lower: 0 })
            }
            None => Head::End,
        };
        Ok(Self { head, frames: [None; LEVELS_MAX], depth: 0, range })
    }

    /// Opens the subtree at the cursor and moves to its first entry within the range.
    fn open<S: NodeStore + ?Sized>(&mut self, store: &mut S, node: Subtree) -> Result<()> {
        let page = store.node(node.id)?;
        let found = page::level(page);
        if found != node.level {
            return Err(corrupt(node.id, format_args!("level {found} instead of {}", node.level)));
        }
        let start = self.range.start;
        let next = match node.level {
            0 => page::first_ending_after(page, start),
            _ => page::slot_for(page, start).ok_or_else(|| corrupt(node.id, "no children"))?.index,
        };
        // A child is one level below its parent, and roots have a level below LEVELS_MAX, so a frame is always free.
        self.frames[self.depth] = Some(Frame { node, next });
        self.depth += 1;
        self.advance(store)
    }

    /// Moves past the item at the cursor.
    fn advance<S: NodeStore + ?Sized>(&mut self, store: &mut S) -> Result<()> {
        self.head = Head::End;
        while let Some(above) = self.depth.checked_sub(1) {
            let Some(frame) = &mut self.frames[above] else { break };
            let page = store.node(frame.node.id)?;
            let head = match frame.node.level {
                0 => page::mapping(page, frame.next).map(Head::Extent),
                level => page::slot(page, frame.next).map(|slot| {
                    let lower = slot.lower.unwrap_or(frame.node.lower);
                    Head::Subtree(Subtree { id: slot.child, level: level - 1, lower })
                }),
            };
            frame.next += 1;
            if let Some(head) = head {
                if head.lower() < self.range.end {
                    self.head = self.clipped(head);
                }
                return Ok(());
            }
            self.depth = above;
        }
        Ok(())
    }

    fn clipped(&self, head: Head) -> Head {
        match head {
            Head::Extent(mapping) if mapping.end() > self.range.start => {
                Head::Extent(mapping.clipped(self.range.start, self.range.end))
            }
            other => other,
        }
    }

    /// Moves past the first `blocks` blocks of the extent at the cursor.
    fn pass<S: NodeStore + ?Sized>(&mut self, store: &mut S, extent: Mapping, blocks: u64) -> Result<()> {
        if blocks < extent.blocks {
            self.head = Head::Extent(extent.clipped(extent.logical + blocks, extent.end()));
            return Ok(());
        }
        self.advance(store)
    }
}
