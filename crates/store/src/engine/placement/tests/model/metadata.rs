//! The metadata of the model: trees of two levels, references, checksums. Recovery replays the journal with the rules
//! of the engine.

use super::step::Fault;
use super::*;
use crate::engine::placement::Doubts;

pub const LOGICAL: usize = 2;
pub const BLOCKS: usize = 6;
pub const NODES: usize = 10;

/// Disk 0, disk 1 (a clone), a snapshot of disk 0, and a deleted object.
pub const OBJECTS: usize = 4;
pub const DISKS: usize = 2;
pub const SNAPSHOT: usize = 2;
pub const TRASH: usize = 3;

/// The number of a client's write; 0 means zeros.
pub type Value = u8;

/// The content of a hole. A client reads zeros there, but a read of a block that had data must not find it.
pub const HOLE: Value = u8::MAX;

/// The content of a block of the medium: the values of its two halves, which differ in a torn block only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Content(pub Value, pub Value);

impl Content {
    pub fn of(value: Value) -> Self {
        Self(value, value)
    }
}

/// The checksum of a value in an announcement. Two contents of a block may have the same one, as with CRC32C.
fn checksum_of(_: Value) -> u32 {
    0
}

/// The operations of the journal. `Detach` makes disk 1 independent of its snapshot, `Revert` gives disk 0 the content
/// of the snapshot, and `Backed` notes whether a free block has space in the file system. `Unwritten` marks a block of
/// a thick disk as reading as zeros, and `Written` removes this mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Map { disk: usize, logical: usize, block: usize, value: Value },
    MapData { disk: usize, logical: usize, block: usize, value: Value },
    Overwrite { block: usize, value: Value },
    OverwriteData { block: usize, value: Value },
    Announce { block: usize },
    Checksums { block: usize, value: Value },
    Synced { position: usize },
    Unmap { disk: usize, logical: usize },
    Resolve { block: usize, content: Content },
    Put,
    Seal,
    Clone,
    Trash { object: usize },
    Drop,
    Detach,
    Revert,
    Backed { block: usize, backed: bool },
    Written { disk: usize, logical: usize, block: usize, value: Value },
    Unwritten { disk: usize, logical: usize, block: usize },
    MapPack { disk: usize, logical: usize, block: usize, value: Value },
    Pack { logical: usize, from: usize, to: usize, content: Content },
    Share { logical: usize, from: usize, to: usize },
    MapShared { disk: usize, logical: usize, block: usize },
    MapSharedPack { disk: usize, logical: usize, block: usize },
}

impl Op {
    /// Calls [`crate::journal::Operation::names`] for the engine's operation.
    pub fn names(self) -> Option<usize> {
        use crate::journal::Operation;
        let run = |block: usize| Run { start: block as u64, blocks: 1 };
        let (disk, logical, checksums, data) = (1, 0, Vec::new(), Vec::new());
        let operation = match self {
            Op::Map { block, .. } => Operation::Map { disk, logical, run: run(block), checksums },
            Op::MapData { block, .. } => Operation::MapData { disk, logical, run: run(block), data },
            Op::OverwriteData { block, .. } => Operation::OverwriteData { run: run(block), data },
            Op::Checksums { block, .. } => Operation::Checksums { run: run(block), checksums },
            Op::Resolve { block, .. } => Operation::Resolve { block: block as u64, checksum: 0 },
            Op::MapPack { block, .. } => {
                Operation::MapPack { disk, logical, blocks: 1, first: 0, run: run(block), checksums }
            }
            Op::MapShared { block, .. } => Operation::MapShared { disk, logical, run: run(block), checksums },
            Op::MapSharedPack { block, .. } => {
                Operation::MapSharedPack { disk, logical, blocks: 1, first: 0, run: run(block), checksums }
            }
            Op::Written { block, .. } => Operation::Written { disk, logical, run: run(block), checksums },
            Op::Unwritten { block, .. } => Operation::Unwritten { disk, logical, run: run(block), fresh: false },
            _ => return None,
        };
        operation.names().map(|run| run.start as usize)
    }
}

#[derive(Clone, Copy, Default)]
pub struct Node {
    pub references: u8,
    /// 0: a leaf, with blocks in its slots. 1: its slots are leaves, each for one logical block.
    pub level: u8,
    pub slots: [Option<u8>; LOGICAL],
    /// In a leaf: blocks that read as zeros, whatever the medium holds.
    pub unwritten: [bool; LOGICAL],
}

#[derive(Clone, Copy, Default)]
pub struct ModelEntry {
    pub references: u8,
    pub sum: Content,
    pub suspect: bool,
    /// Whether the block has no space in the file system.
    pub unbacked: bool,
    /// Whether the block is a pack.
    pub packed: bool,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    None,
    Live,
    Unsealed,
}

#[derive(Clone, Copy, Default)]
pub struct Object {
    pub kind: Kind,
    pub root: Option<u8>,
    /// Whether the object is a linked clone, which needs the snapshot.
    pub linked: bool,
}

#[derive(Clone, Default)]
pub struct Metadata {
    pub nodes: [Node; NODES],
    pub entries: [ModelEntry; BLOCKS],
    pub objects: [Object; OBJECTS],
    /// Journalled payload that is not written to its block.
    pub logged: [Option<Value>; BLOCKS],
    /// True if a block was allocated while the block was in use.
    pub given_twice: bool,
}

/// The side effects of an operation, like `Effects` of the engine.
#[derive(Default)]
pub struct Effects {
    pub freed: Vec<usize>,
    pub unshared: Vec<usize>,
    pub unshared_nodes: Vec<NodeId>,
    pub changed_nodes: Vec<NodeId>,
}

fn id(node: u8) -> NodeId {
    NodeId(u64::from(node))
}

impl Metadata {
    fn make_node(&mut self, node: Node, effects: &mut Effects) -> u8 {
        let free = self.nodes.iter().position(|node| node.references == 0).expect("the model has nodes enough");
        self.nodes[free] = Node { references: 1, ..node };
        effects.changed_nodes.push(id(free as u8));
        free as u8
    }

    /// A node that only this path refers to: the given node, or a copy of it.
    fn exclusive(&mut self, node: u8, effects: &mut Effects) -> u8 {
        let old = self.nodes[node as usize];
        if old.references == 1 {
            effects.changed_nodes.push(id(node));
            return node;
        }
        let copy = self.make_node(old, effects);
        for slot in old.slots.into_iter().flatten() {
            match old.level {
                0 => self.entries[slot as usize].references += 1,
                _ => self.nodes[slot as usize].references += 1,
            }
        }
        self.nodes[node as usize].references -= 1;
        effects.unshared_nodes.push(id(node));
        copy
    }

    fn drop_data(&mut self, block: u8, effects: &mut Effects) {
        let entry = &mut self.entries[block as usize];
        entry.references = entry.references.saturating_sub(1);
        match entry.references {
            0 => effects.freed.push(block as usize),
            _ => effects.unshared.push(block as usize),
        }
    }

    fn drop_node(&mut self, node: u8, effects: &mut Effects) {
        self.nodes[node as usize].references -= 1;
        let gone = self.nodes[node as usize];
        if gone.references > 0 {
            effects.unshared_nodes.push(id(node));
            return;
        }
        effects.changed_nodes.push(id(node));
        for slot in gone.slots.into_iter().flatten() {
            match gone.level {
                0 => self.drop_data(slot, effects),
                _ => self.drop_node(slot, effects),
            }
        }
    }

    fn replace(&mut self, disk: usize, logical: usize, with: Option<usize>, effects: &mut Effects) {
        let with = with.map(|block| block as u8);
        let root = match (self.objects[disk].root, with) {
            (None, None) => return,
            (None, Some(_)) => self.make_node(Node::default(), effects),
            (Some(root), _) => self.exclusive(root, effects),
        };
        self.objects[disk].root = Some(root);
        if self.nodes[root as usize].level == 0 {
            self.nodes[root as usize].unwritten[logical] = false;
            let old = std::mem::replace(&mut self.nodes[root as usize].slots[logical], with);
            old.into_iter().for_each(|block| self.drop_data(block, effects));
            return;
        }
        let leaf = match (self.nodes[root as usize].slots[logical], with) {
            (None, None) => return,
            (None, Some(_)) => self.make_node(Node::default(), effects),
            (Some(leaf), _) => self.exclusive(leaf, effects),
        };
        self.nodes[leaf as usize].unwritten[logical] = false;
        let old = std::mem::replace(&mut self.nodes[leaf as usize].slots[logical], with);
        old.into_iter().for_each(|block| self.drop_data(block, effects));
        self.nodes[root as usize].slots[logical] = Some(leaf);
        if with.is_none() {
            // The leaf is empty and is removed. The remaining child becomes the root.
            self.nodes[leaf as usize].references = 0;
            effects.changed_nodes.push(id(leaf));
            let only = self.nodes[root as usize].slots[1 - logical];
            self.nodes[root as usize] = Node::default();
            effects.changed_nodes.push(id(root));
            self.objects[disk].root = only;
            only.into_iter().for_each(|only| effects.changed_nodes.push(id(only)));
        }
    }

    /// Marks a mapped block as written or unwritten.
    fn mark(&mut self, disk: usize, logical: usize, unwritten: bool, effects: &mut Effects) {
        let Some(root) = self.objects[disk].root else { return };
        let mut node = self.exclusive(root, effects);
        self.objects[disk].root = Some(node);
        if let (1, Some(leaf)) = (self.nodes[node as usize].level, self.nodes[node as usize].slots[logical]) {
            let leaf = self.exclusive(leaf, effects);
            self.nodes[node as usize].slots[logical] = Some(leaf);
            node = leaf;
        }
        self.nodes[node as usize].unwritten[logical] = unwritten;
    }

    /// Maps another block in every leaf that maps a block at this logical block.
    fn redirect(&mut self, logical: usize, from: usize, to: usize, effects: &mut Effects) {
        let mut moved = 0;
        for node in self.nodes.iter_mut().filter(|node| node.references > 0 && node.level == 0) {
            if node.slots[logical] == Some(from as u8) {
                node.slots[logical] = Some(to as u8);
                moved += 1;
            }
        }
        self.entries[to].references += moved;
        (0..moved).for_each(|_| self.drop_data(from as u8, effects));
    }

    fn refer(&mut self, root: Option<u8>) {
        root.into_iter().for_each(|root| self.nodes[root as usize].references += 1);
    }

    pub fn apply(&mut self, op: Op, effects: &mut Effects) {
        let first = effects.freed.len();
        match op {
            Op::Map { disk, logical, block, value }
            | Op::MapData { disk, logical, block, value }
            | Op::MapPack { disk, logical, block, value } => {
                self.given_twice |= self.entries[block].references > 0;
                let packed = matches!(op, Op::MapPack { .. });
                let sum = Content::of(value);
                self.entries[block] = ModelEntry { references: 1, sum, packed, ..ModelEntry::default() };
                if matches!(op, Op::MapData { .. }) {
                    self.logged[block] = Some(value);
                }
                self.replace(disk, logical, Some(block), effects);
            }
            Op::Overwrite { block, value } => {
                self.note(block, Content::of(value));
                self.entries[block].suspect = true;
            }
            Op::OverwriteData { block, value } => {
                self.logged[block] = Some(value);
                self.note(block, Content::of(value));
            }
            Op::Announce { block } => self.entries[block].suspect = true,
            Op::Checksums { block, value } => {
                self.logged[block] = None;
                self.note(block, Content::of(value));
            }
            Op::Synced { .. } => {}
            Op::Unmap { disk, logical } => self.replace(disk, logical, None, effects),
            Op::Resolve { block, content } => self.note(block, content),
            Op::Put => self.objects[SNAPSHOT] = Object { kind: Kind::Unsealed, ..Object::default() },
            Op::Seal => {
                let root = self.objects[0].root;
                self.refer(root);
                self.objects[SNAPSHOT] = Object { kind: Kind::Live, root, linked: false };
            }
            Op::Clone => {
                let root = self.objects[SNAPSHOT].root;
                self.refer(root);
                self.objects[1] = Object { kind: Kind::Live, root, linked: true };
            }
            Op::Detach => self.objects[1].linked = false,
            Op::Revert => {
                let root = self.objects[SNAPSHOT].root;
                self.refer(root);
                self.objects[TRASH] = self.objects[0];
                self.objects[0].root = root;
            }
            Op::Written { disk, logical, block, value } => {
                self.logged[block] = None;
                self.mark(disk, logical, false, effects);
                self.note(block, Content::of(value));
            }
            Op::Unwritten { disk, logical, block } => {
                self.logged[block] = None;
                self.mark(disk, logical, true, effects);
                self.entries[block].sum = Content::default();
            }
            Op::Backed { block, backed } => self.entries[block].unbacked = !backed,
            Op::Pack { logical, from, to, content } => {
                self.given_twice |= self.entries[to].references > 0;
                self.entries[to] = ModelEntry { sum: content, packed: true, ..ModelEntry::default() };
                self.redirect(logical, from, to, effects);
            }
            Op::Share { logical, from, to } => {
                self.given_twice |= self.entries[to].references == 0;
                self.redirect(logical, from, to, effects);
            }
            Op::MapShared { disk, logical, block } | Op::MapSharedPack { disk, logical, block } => {
                self.given_twice |= self.entries[block].references == 0;
                self.entries[block].references += 1;
                self.replace(disk, logical, Some(block), effects);
            }
            Op::Trash { object } => self.objects[TRASH] = std::mem::take(&mut self.objects[object]),
            Op::Drop => {
                let root = std::mem::take(&mut self.objects[TRASH]).root;
                root.into_iter().for_each(|root| self.drop_node(root, effects));
            }
        }
        for block in &effects.freed[first..] {
            self.logged[*block] = None;
        }
    }

    pub fn note(&mut self, block: usize, sum: Content) {
        self.entries[block].sum = sum;
        self.entries[block].suspect = false;
    }

    /// The block that an object maps, and the nodes on the path.
    pub fn lookup(&self, object: usize, logical: usize) -> (Option<usize>, Vec<NodeId>) {
        let Some(root) = self.objects[object].root else { return (None, Vec::new()) };
        let mut path = vec![id(root)];
        let mut node = self.nodes[root as usize];
        if node.level == 1 {
            let Some(leaf) = node.slots[logical] else { return (None, path) };
            path.push(id(leaf));
            node = self.nodes[leaf as usize];
        }
        (node.slots[logical].map(usize::from), path)
    }

    /// Whether an object maps a block that reads as zeros.
    pub fn is_unwritten(&self, object: usize, logical: usize) -> bool {
        let (block, path) = self.lookup(object, logical);
        block.is_some() && path.last().is_some_and(|leaf| self.nodes[leaf.0 as usize].unwritten[logical])
    }

    /// The content that a read of a block returns; `None` for a checksum error.
    pub fn read(&self, object: usize, logical: usize, medium: impl Fn(usize) -> Content) -> Option<Content> {
        let Some(block) = self.lookup(object, logical).0 else { return Some(Content::of(0)) };
        if self.is_unwritten(object, logical) {
            return Some(Content::of(0));
        }
        if let Some(value) = self.logged[block] {
            return Some(Content::of(value));
        }
        let (found, entry) = (medium(block), self.entries[block]);
        (found == entry.sum || entry.suspect).then_some(found)
    }

    /// Whether the snapshot of a linked clone exists.
    pub fn has_origin(&self) -> bool {
        let clone = self.objects[1];
        clone.kind == Kind::None || !clone.linked || self.objects[SNAPSHOT].kind != Kind::None
    }

    /// Whether the reference counts equal the references in the trees.
    pub fn is_consistent(&self) -> bool {
        let (mut nodes, mut blocks) = ([0; NODES], [0; BLOCKS]);
        self.objects.iter().filter_map(|object| object.root).for_each(|root| nodes[root as usize] += 1);
        for node in self.nodes.iter().filter(|node| node.references > 0) {
            for slot in node.slots.into_iter().flatten() {
                match node.level {
                    0 => blocks[slot as usize] += 1,
                    _ => nodes[slot as usize] += 1,
                }
            }
        }
        !self.given_twice
            && (0..NODES).all(|node| self.nodes[node].references == nodes[node])
            && (0..BLOCKS).all(|block| self.entries[block].references == blocks[block])
    }
}

/// A record of the journal, in a batch of its own.
#[derive(Clone, Copy)]
pub struct Record {
    pub urgent: bool,
    pub op: Op,
}

/// The metadata that replay produces, and the blocks in doubt. Models `Engine::replay`.
pub fn replay(base: &Metadata, journal: &[Record], ordered: usize, fault: Fault) -> (Metadata, Doubts) {
    let (mut now, mut doubts) = (base.clone(), Doubts::default());
    for (position, record) in journal.iter().enumerate() {
        if record.urgent || position >= ordered {
            replay_one(&mut now, &mut doubts, record.op, position as u64, fault);
        }
    }
    (now, doubts)
}

fn replay_one(now: &mut Metadata, doubts: &mut Doubts, op: Op, position: u64, fault: Fault) {
    match op {
        Op::Overwrite { block, value } => {
            doubts.announced(block as u64, position, checksum_of(value), now.logged[block].is_some());
        }
        Op::Announce { block } => doubts.permitted(block as u64, position, now.entries[block].suspect),
        Op::Synced { position } => {
            for one in doubts.settle(position as u64) {
                if one.overwritten {
                    now.logged[one.block as usize] = None;
                }
                if one.certain {
                    now.entries[one.block as usize].suspect = false;
                }
            }
        }
        Op::Map { block, .. } | Op::MapPack { block, .. } | Op::Pack { to: block, .. } => now.logged[block] = None,
        Op::Share { to, .. } if fault != Fault::SharedKeepsPayload => now.logged[to] = None,
        Op::MapShared { block, .. } if fault != Fault::MappedKeepsPayload => now.logged[block] = None,
        Op::MapSharedPack { block, .. } => now.logged[block] = None,
        _ => {}
    }
    let mut effects = Effects::default();
    now.apply(op, &mut effects);
    effects.freed.into_iter().for_each(|block| doubts.told(block as u64));
    let told = match op {
        Op::Map { block, .. }
        | Op::MapData { block, .. }
        | Op::MapPack { block, .. }
        | Op::Written { block, .. }
        | Op::OverwriteData { block, .. }
        | Op::Checksums { block, .. }
        | Op::Pack { to: block, .. } => {
            doubts.told(block as u64);
            block
        }
        Op::Resolve { block, .. } => {
            doubts.resolved(block as u64);
            block
        }
        _ => return,
    };
    if doubts.contains(told as u64) {
        now.entries[told].suspect = true;
    }
}

/// The payload that recovery writes to its blocks. Models `Engine::put_payload_home`.
pub fn payload_of(now: &Metadata, doubts: &Doubts, medium: &[Content; BLOCKS], fault: Fault) -> Vec<(usize, Value)> {
    let seems_whole = |block: usize| {
        let Content(first, second) = medium[block];
        let whole = first == second && doubts.awaited(block as u64).contains(&checksum_of(first));
        fault == Fault::PayloadLeftForChecksum && whole
    };
    (0..BLOCKS).filter(|block| !seems_whole(*block)).filter_map(|block| Some((block, now.logged[block]?))).collect()
}
