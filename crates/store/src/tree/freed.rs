//! What dropping trees would free.
//!
//! A node *dies*, that is, it would be freed, if all its references come from the dropped roots and from dying nodes. A
//! data block would be freed if all leaf entries that map it are in dying leaves. The walk counts these references and
//! compares them with the reference counts in the tables. So it reads no other tree, and its cost depends on what would
//! be freed.
//!
//! The dying nodes are determined level by level, from the highest level down: a pass walks down the dying nodes and
//! counts their references to the nodes of one level. After that, passes count the references of the dying leaves to
//! data blocks.
//!
//! The counts that remain after a walk are the references that would be left. A later walk that starts from them counts
//! what dropping further trees would free, without another walk over the first ones.
//!
//! What must hold:
//!
//! 1. Before the references to the nodes of a level are counted, the dying nodes of all higher levels are known.
//! 2. A pass visits the entries of each dying node once, so that each entry counts once.
//! 3. Memory is limited: two bits for each node of the map, and [`COUNTED_PAGES_MAX`] pages of counts. If more nodes or
//!    blocks have several references, a pass counts those with low numbers, and further passes count the others. What
//!    remains after a walk is limited to as many pages; if it needs more, it is not kept.

use super::{LEVELS_MAX, NodeId, NodeStore, corrupt, page, references};
use crate::Result;
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Nodes or blocks in one page of counts.
const COUNTED_PER_PAGE: usize = 1024;
/// The most pages of counts: 64 MiB, for blocks with 64 GiB of data. Tests use fewer, so that they make several passes.
const COUNTED_PAGES_MAX: usize = if cfg!(test) { 3 } else { 16_384 };

/// Access to the reference counts of data blocks.
pub trait DataReferences: NodeStore {
    /// Calls `each` with every block of a run and the number of its references.
    fn data_references(&mut self, physical: u64, blocks: u64, each: &mut dyn FnMut(u64, u32)) -> Result<()>;
}

/// What dropping trees would free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Data blocks.
    pub data: u64,
    /// Nodes of the map.
    pub nodes: u64,
}

/// How often one tree may map a data block that is not part of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// At most once: no blocks were ever shared because they have the same content.
    Never,
    /// Any number of times.
    Possible,
}

/// Counts what dropping one reference on each of these roots would free. `go_on` is called for each visited node; its
/// error ends the count.
pub fn freed<S: DataReferences + ?Sized>(
    store: &mut S,
    roots: &[NodeId],
    repeats: Repeats,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Freed> {
    Dropping::new(store, roots, repeats, go_on)?.count()
}

/// As [`freed`], and returns the references that would be left, for [`freed_after`]. `None` if they need too much
/// memory.
pub fn freed_and_left<S: DataReferences + ?Sized>(
    store: &mut S,
    roots: &[NodeId],
    repeats: Repeats,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<(Freed, Option<Left>)> {
    let mut dropping = Dropping::new(store, roots, repeats, go_on)?;
    dropping.left = Some(Left::default());
    Ok((dropping.count()?, dropping.left))
}

/// As [`freed`], but other trees are dropped first: those for which [`freed_and_left`] returned `before`. Counts only
/// what is freed in addition.
pub fn freed_after<S: DataReferences + ?Sized>(
    store: &mut S,
    before: &Left,
    roots: &[NodeId],
    repeats: Repeats,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Freed> {
    let mut dropping = Dropping::new(store, roots, repeats, go_on)?;
    dropping.before = Some(before);
    dropping.count()
}

pub(super) fn root_level<S: NodeStore + ?Sized>(store: &mut S, root: NodeId) -> Result<u8> {
    match page::level(store.node(root)?) {
        level if usize::from(level) < LEVELS_MAX => Ok(level),
        _ => Err(corrupt(root, "a root of impossible level")),
    }
}

/// The page of a node, which must have this level.
pub(super) fn node_of_level<S: NodeStore + ?Sized>(store: &mut S, id: NodeId, level: u8) -> Result<&backend::Block> {
    let found = page::level(store.node(id)?);
    if found != level {
        return Err(corrupt(id, format_args!("level {found} instead of {level}")));
    }
    store.node(id)
}

/// A set of nodes.
#[derive(Default)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    pub fn contains(&self, id: NodeId) -> bool {
        self.0.get((id.0 / 64) as usize).is_some_and(|word| word >> (id.0 % 64) & 1 == 1)
    }

    /// Adds a node. The caller has read its reference count, so `id` is within the table of nodes, and the set cannot
    /// become larger than the table. False if the set already contained the node.
    pub fn insert(&mut self, id: NodeId) -> bool {
        let (word, bit) = ((id.0 / 64) as usize, 1 << (id.0 % 64));
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        let new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        new
    }

    pub fn clear(&mut self) {
        self.0.fill(0);
    }
}

/// For the number of each node or block: the references that were not counted yet, plus one; 0 if no reference was
/// counted.
type CountPages = FxHashMap<u64, Box<[u32; COUNTED_PER_PAGE]>>;

/// The page and the index of a node or block.
fn place(number: u64) -> (u64, usize) {
    (number / COUNTED_PER_PAGE as u64, (number % COUNTED_PER_PAGE as u64) as usize)
}

/// The references that nodes and blocks have after trees were dropped. Contains only nodes and blocks that had several
/// references and to which the dropped trees refer.
#[derive(Default)]
pub struct Left {
    nodes: CountPages,
    blocks: CountPages,
}

/// The references that are left to node or block `number`. In the table it still has `references`.
fn left(pages: &CountPages, number: u64, references: u32) -> u32 {
    let (page, index) = place(number);
    match pages.get(&page).map_or(0, |page| page[index]) {
        0 => references,
        left => left - 1,
    }
}

/// Counted references to nodes or blocks, for those that have several references.
struct Counts {
    pages: CountPages,
    /// The numbers that this pass counts.
    window: Range<u64>,
}

impl Counts {
    fn new(from: u64) -> Self {
        Self { pages: FxHashMap::default(), window: from..u64::MAX }
    }

    /// Counts one reference to node or block `number`, which has `references` references in the table.
    fn count(&mut self, number: u64, references: u32) {
        if !self.window.contains(&number) {
            return;
        }
        let (page, index) = place(number);
        let page = self.pages.entry(page).or_insert_with(|| Box::new([0; COUNTED_PER_PAGE]));
        page[index] = match page[index] {
            0 => references,
            left => (left - 1).max(1),
        };
        if self.pages.len() > COUNTED_PAGES_MAX {
            self.narrow();
        }
    }

    /// Leaves the upper half of the counted numbers to the next pass.
    fn narrow(&mut self) {
        let mut numbers: Vec<u64> = self.pages.keys().copied().collect();
        let middle = numbers.len() / 2;
        let (_, first_left_out, _) = numbers.select_nth_unstable(middle);
        let first_left_out = *first_left_out;
        self.pages.retain(|page, _| *page < first_left_out);
        self.window.end = first_left_out * COUNTED_PER_PAGE as u64;
    }

    /// The nodes or blocks, by number, of which every reference was counted.
    fn complete(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().flat_map(|(page, left)| {
            let numbers = page * COUNTED_PER_PAGE as u64..;
            numbers.zip(left.iter()).filter(|(_, left)| **left == 1).map(|(number, _)| number)
        })
    }

    /// Whether this pass counts all numbers.
    fn is_whole(&self) -> bool {
        self.window == (0..u64::MAX)
    }

    /// The counts of the next pass; `None` if this pass was the last.
    fn next(&self) -> Option<Self> {
        (self.window.end < u64::MAX).then(|| Self::new(self.window.end))
    }
}

/// The trees that would be dropped.
struct Dropping<'a, S: ?Sized> {
    store: &'a mut S,
    /// Roots with their levels.
    tops: Vec<(NodeId, u8)>,
    repeats: Repeats,
    /// The references that are left after an earlier walk, which has counted other trees as dropped.
    before: Option<&'a Left>,
    /// What is left after this walk, if the caller requested it and it fits into memory so far.
    left: Option<Left>,
    /// Dying nodes with several references. A node with one reference dies if the walk reaches it.
    dying: Bits,
    /// Nodes with several references that the current pass has visited.
    entered: Bits,
    go_on: &'a mut dyn FnMut() -> Result<()>,
}

/// What a pass does with the nodes that it reaches.
enum Pass {
    /// Counts the references to the nodes of this level.
    Nodes(u8),
    /// Counts the references to data blocks. The first of these passes also counts dying nodes, and blocks with one
    /// reference.
    Blocks { first: bool },
}

impl<'a, S: DataReferences + ?Sized> Dropping<'a, S> {
    fn new(
        store: &'a mut S,
        roots: &[NodeId],
        repeats: Repeats,
        go_on: &'a mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let mut tops = Vec::with_capacity(roots.len());
        for root in roots {
            tops.push((*root, root_level(store, *root)?));
        }
        let (dying, entered) = Default::default();
        Ok(Self { store, tops, repeats, before: None, left: None, dying, entered, go_on })
    }

    fn count(&mut self) -> Result<Freed> {
        let highest = self.tops.iter().map(|(_, level)| *level).max().unwrap_or(0);
        for level in (0..=highest).rev() {
            self.decide(level)?;
        }
        self.sum()
    }

    /// The most references that a node can have and still be freed by these trees, because one tree refers to it at
    /// most once. The same applies to a block without [`Repeats`]. If the caller wants the references that are left,
    /// all references are counted.
    fn most(&self) -> u32 {
        let trees = u32::try_from(self.tops.len()).unwrap_or(u32::MAX);
        if self.left.is_some() { u32::MAX } else { trees }
    }

    /// Keeps what is left after a pass, if there is space for it.
    fn keep(&mut self, of: fn(&mut Left) -> &mut CountPages, counts: Counts) {
        let Some(left) = &mut self.left else { return };
        let is_whole = counts.is_whole();
        let kept = of(left);
        for (page, counted) in counts.pages {
            let kept = kept.entry(page).or_insert_with(|| Box::new([0; COUNTED_PER_PAGE]));
            // The passes of two levels count different nodes.
            kept.iter_mut().zip(counted.iter()).filter(|(_, new)| **new > 0).for_each(|(kept, new)| *kept = *new);
        }
        if !is_whole || left.nodes.len() + left.blocks.len() > COUNTED_PAGES_MAX {
            self.left = None;
        }
    }

    /// Determines the dying nodes of a level.
    fn decide(&mut self, level: u8) -> Result<()> {
        let mut counts = Some(Counts::new(0));
        while let Some(mut now) = counts {
            self.walk(&Pass::Nodes(level), &mut now, &mut Freed::default())?;
            for id in now.complete() {
                self.dying.insert(NodeId(id));
            }
            counts = now.next();
            self.keep(|left| &mut left.nodes, now);
        }
        Ok(())
    }

    /// Counts the dying nodes and the blocks that they free.
    fn sum(&mut self) -> Result<Freed> {
        let mut freed = Freed::default();
        let mut first = true;
        let mut counts = Some(Counts::new(0));
        while let Some(mut now) = counts {
            self.walk(&Pass::Blocks { first }, &mut now, &mut freed)?;
            freed.data += now.complete().count() as u64;
            first = false;
            counts = now.next();
            self.keep(|left| &mut left.blocks, now);
        }
        Ok(freed)
    }

    fn walk(&mut self, pass: &Pass, counts: &mut Counts, freed: &mut Freed) -> Result<()> {
        self.entered.clear();
        for at in 0..self.tops.len() {
            let (root, level) = self.tops[at];
            self.reach(root, level, pass, counts, freed)?;
        }
        Ok(())
    }

    /// Called for each reference that would be dropped: once for each root, and for each reference of a dying node.
    /// Recursive, with one call for each level of the tree.
    fn reach(&mut self, id: NodeId, level: u8, pass: &Pass, counts: &mut Counts, freed: &mut Freed) -> Result<()> {
        let mut references = references(self.store, id)?;
        if let Some(before) = self.before {
            references = left(&before.nodes, id.0, references);
            if references == 0 {
                // Only damaged counts let a tree refer to a node that was freed before.
                return Ok(());
            }
        }
        let wanted = match pass {
            Pass::Nodes(wanted) => Some(*wanted),
            Pass::Blocks { .. } => None,
        };
        if wanted.is_some_and(|wanted| wanted >= level) {
            // A root may be below the level of the pass. A node dies if its only reference would be dropped, so it
            // needs no count.
            if wanted == Some(level) && (2..=self.most()).contains(&references) {
                counts.count(id.0, references);
            }
            return Ok(());
        }
        if references > 1 && (!self.dying.contains(id) || !self.entered.insert(id)) {
            return Ok(());
        }
        (self.go_on)()?;
        let node = node_of_level(self.store, id, level)?;
        let Pass::Blocks { first } = pass else {
            let children: Vec<NodeId> = page::children(node).collect();
            return children.into_iter().try_for_each(|child| self.reach(child, level - 1, pass, counts, freed));
        };
        if *first {
            freed.nodes += 1;
        }
        if level > 0 {
            let children: Vec<NodeId> = page::children(node).collect();
            return children.into_iter().try_for_each(|child| self.reach(child, level - 1, pass, counts, freed));
        }
        // One tree may map a pack by several entries.
        let several_each = self.repeats == Repeats::Possible || page::has_packs(node);
        for run in page::data_runs(node) {
            let (mut start, mut end) = (run.physical, run.physical + run.blocks);
            if !first {
                (start, end) = (start.max(counts.window.start), end.min(counts.window.end));
            }
            let (most, before) = (if several_each { u32::MAX } else { self.most() }, self.before);
            if start < end {
                self.store.data_references(start, end - start, &mut |block, references| match before
                    .map_or(references, |before| left(&before.blocks, block, references))
                {
                    1 => freed.data += u64::from(*first),
                    several if (2..=most).contains(&several) => counts.count(block, several),
                    _ => {}
                })?;
            }
        }
        Ok(())
    }
}
