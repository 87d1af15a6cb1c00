//! A state of the model: memory, journal, medium, and the contents that clients may find.

use super::metadata::*;
use super::*;
use std::collections::VecDeque;

/// A pending change.
#[derive(Clone)]
pub struct Waiting {
    pub op: Op,
    pub gate: u8,
    pub number: u64,
    /// Whether the change and the next one are appended in one batch.
    pub joined: bool,
    pub freed: Vec<usize>,
    pub held: Vec<usize>,
}

/// A block of the medium: its durable content, and the writes since the last flush in their order.
#[derive(Clone, Default)]
pub struct Cell {
    pub durable: Content,
    pub unflushed: Vec<Content>,
}

impl Cell {
    /// The content that a read returns while the machine runs.
    pub fn visible(&self) -> Content {
        self.unflushed.last().copied().unwrap_or(self.durable)
    }

    /// The contents that a power cut may leave: any write since the last flush, or a mixture of two by sectors.
    pub fn after_crash(&self) -> Vec<Content> {
        let mut out = vec![self.durable];
        for content in &self.unflushed {
            if !out.contains(content) {
                out.push(*content);
            }
        }
        if out.len() > 1 {
            out.push(Content(out[0].0, out[out.len() - 1].1));
        }
        out
    }
}

/// The write of one block in a batch of write-back.
#[derive(Clone, Copy)]
pub struct BlockWrite {
    pub logical: usize,
    pub placement: Placement,
    pub block: usize,
    pub value: Value,
    /// Whether the block is a pack.
    pub packed: bool,
}

/// A batch of write-back that is under way.
#[derive(Clone)]
pub struct Batch {
    pub disk: usize,
    /// Whether the overwrites are announced, and the writes are under way.
    pub going: bool,
    pub homes: Vec<BlockWrite>,
    /// Logical blocks that the batch discards.
    pub others: Vec<usize>,
}

/// A write under way that bypasses the buffer.
#[derive(Clone, Copy)]
pub struct Through {
    pub disk: usize,
    pub logical: usize,
    pub block: usize,
    pub new: bool,
    /// Whether the new block is a pack.
    pub packed: bool,
    pub value: Value,
}

/// A read of a client that has looked up its block and has not read it yet.
#[derive(Clone)]
pub struct Reader {
    pub disk: usize,
    pub logical: usize,
    pub block: usize,
    /// The values that the read may return: the one at its beginning, and those written since.
    pub allowed: Vec<Value>,
}

/// A flush of the data files under way.
#[derive(Clone)]
pub struct Sync {
    pub settled: usize,
    pub written: u8,
    /// For each block, the number of unflushed writes that the flush covers.
    pub covers: [usize; BLOCKS],
    /// Whether a checkpoint waits for the flush.
    pub checkpoint: bool,
    /// With [`Fault::PermitsSurvive`]: whether the permits have ended, and the journal head is not read yet.
    pub half: bool,
}

/// A flush that a client waits for.
#[derive(Clone)]
pub struct Flush {
    pub wanted: u8,
    /// For each block of each object, the number of older values that the flush makes obsolete.
    pub covers: [[usize; LOGICAL]; 3],
}

#[derive(Clone)]
pub struct Checkpoint {
    pub base: Metadata,
    pub tail: usize,
    pub payload: [Option<Value>; BLOCKS],
    pub synced: bool,
}

pub type Layer = [Option<Value>; LOGICAL];

#[derive(Clone, Default)]
pub struct ModelState {
    pub now: Metadata,
    pub held: [bool; BLOCKS],
    pub taken: [bool; BLOCKS],
    /// Blocks that were freed durably and cannot be reused yet, because a write of their journalled payload may be
    /// under way.
    pub limbo: [bool; BLOCKS],
    /// Blocks that were freed durably and cannot be reused yet, because the reader may refer to them.
    pub awaits_reader: [bool; BLOCKS],
    pub reader: Option<Reader>,
    /// Blocks without space in the file system.
    pub hole: [bool; BLOCKS],
    /// A block that is allocated until it is punched.
    pub punching: Option<usize>,
    /// Whether disk 0 is thick.
    pub thick: bool,
    pub holds: Holds,
    pub in_flight: InFlight,
    pub waiting: VecDeque<Waiting>,
    pub base: Metadata,
    pub journal: Vec<Record>,
    /// A batch whose append is under way: a power cut leaves it complete, or torn and thus not in the journal.
    pub appending: Vec<Record>,
    pub ordered: usize,
    pub cells: [Cell; BLOCKS],
    pub open: [Layer; DISKS],
    /// The layer of disk 0 that a snapshot closed.
    pub closed: Option<Layer>,
    pub batch: Option<Batch>,
    pub through: Option<Through>,
    pub packing: Option<packing::Packing>,
    pub sharing: Option<sharing::Sharing>,
    pub comparing: Option<equal::Comparing>,
    pub payload_home: Option<(usize, Value)>,
    pub permits: [bool; BLOCKS],
    pub written: u8,
    pub synced: u8,
    pub announced: Option<usize>,
    pub settled: usize,
    pub sync: Option<Sync>,
    pub flush: Option<Flush>,
    pub checkpoint: Option<Checkpoint>,
    pub captured: Option<usize>,
    pub ordered_next: Option<usize>,
    /// For each object and block: the value flushed last, and those written since.
    pub expected: [[Vec<Value>; LOGICAL]; 3],
    pub values: u8,
}

impl ModelState {
    /// Disk 0 with both blocks written and durable, each mapped by a leaf of its own.
    pub fn plain() -> Self {
        let mut state = Self { values: 2, ..Self::default() };
        let (now, entry) =
            (&mut state.now, |value| ModelEntry { references: 1, sum: Content::of(value), ..ModelEntry::default() });
        now.nodes[0] = Node { references: 1, level: 1, slots: [Some(1), Some(2)], ..Node::default() };
        now.nodes[1] = Node { references: 1, slots: [Some(0), None], ..Node::default() };
        now.nodes[2] = Node { references: 1, slots: [None, Some(1)], ..Node::default() };
        now.objects[0] = Object { kind: Kind::Live, root: Some(0), linked: false };
        (now.entries[0], now.entries[1]) = (entry(1), entry(2));
        for block in 0..2 {
            state.cells[block].durable = Content::of(block as Value + 1);
            state.taken[block] = true;
            state.expected[0][block] = vec![block as Value + 1];
        }
        state.base = state.now.clone();
        state
    }

    /// Like [`ModelState::plain`], with a clone that shares the whole tree, and without a snapshot.
    pub fn shared() -> Self {
        let mut state = Self::plain();
        state.now.nodes[0].references = 2;
        state.now.objects[1] = state.now.objects[0];
        state.expected[1] = state.expected[0].clone();
        state.base = state.now.clone();
        state
    }

    /// Like [`ModelState::shared`], but the trees share only blocks, no nodes.
    pub fn divided() -> Self {
        let mut state = Self::plain();
        for (node, slots) in [(3, [Some(4), Some(5)]), (4, [Some(0), None]), (5, [None, Some(1)])] {
            state.now.nodes[node] = Node { references: 1, level: u8::from(node == 3), slots, ..Node::default() };
        }
        state.now.objects[1] = Object { kind: Kind::Live, root: Some(3), linked: false };
        state.now.entries[..2].iter_mut().for_each(|entry| entry.references = 2);
        state.expected[1] = state.expected[0].clone();
        state.base = state.now.clone();
        state
    }

    /// Disk 0, its snapshot, and a linked clone of the snapshot. All three share the whole tree.
    pub fn linked() -> Self {
        let mut state = Self::shared();
        state.now.nodes[0].references = 3;
        state.now.objects[SNAPSHOT] = state.now.objects[0];
        state.now.objects[1].linked = true;
        state.expected[SNAPSHOT] = state.expected[0].clone();
        state.base = state.now.clone();
        state
    }

    /// Like [`ModelState::plain`], but disk 0 is thick, and its second block was never written.
    pub fn thick() -> Self {
        let mut state = Self { thick: true, ..Self::plain() };
        state.now.nodes[2].unwritten[1] = true;
        state.now.entries[1].sum = Content::default();
        state.cells[1].durable = Content::default();
        state.expected[0][1] = vec![0];
        state.base = state.now.clone();
        state
    }

    /// Disk 0 after a power cut that tore its first block: the block is suspect, and was not read since.
    pub fn torn() -> Self {
        let mut state = Self::plain();
        state.values = 3;
        state.now.entries[0].suspect = true;
        state.cells[0].durable = Content::of(3);
        state.expected[0][0] = vec![3];
        state.base = state.now.clone();
        state
    }

    pub fn next_value(&mut self) -> Value {
        self.values += 1;
        self.values
    }

    /// A client writes a value, which readers of the block may see from now on.
    pub fn write(&mut self, disk: usize, logical: usize, value: Value) {
        self.expected[disk][logical].push(value);
        if let Some(reader) = self.reader.as_mut().filter(|reader| (reader.disk, reader.logical) == (disk, logical)) {
            reader.allowed.push(value);
        }
    }

    /// Whether no thread has locked the journal: write-back does so from the plan to the announcement.
    pub fn is_journal_free(&self) -> bool {
        self.appending.is_empty() && self.batch.as_ref().is_none_or(|batch| batch.going)
    }

    pub fn is_writable(&self, disk: usize) -> bool {
        self.now.objects[disk].kind == Kind::Live
    }

    /// The layer from which write-back takes blocks.
    pub fn oldest(&self, disk: usize) -> Layer {
        self.closed.filter(|_| disk == 0).unwrap_or(self.open[disk])
    }

    pub fn oldest_mut(&mut self, disk: usize) -> &mut Layer {
        match &mut self.closed {
            Some(closed) if disk == 0 => closed,
            _ => &mut self.open[disk],
        }
    }

    pub fn is_buffered(&self, disk: usize, logical: usize) -> bool {
        self.open[disk][logical].is_some() || disk == 0 && self.closed.is_some_and(|layer| layer[logical].is_some())
    }

    /// A key of the state: states with the same key pass the same checks and have the same future. Values and counters
    /// appear only by their order.
    pub fn key(&self) -> u128 {
        let mut key = Key { bytes: Vec::with_capacity(512), names: [u8::MAX; 256], named: 1 };
        key.names[0] = 0;
        key.metadata(&self.now);
        key.metadata(&self.base);
        for block in 0..BLOCKS {
            key.flags(&[self.held[block], self.taken[block], self.permits[block]]);
            key.flags(&[self.in_flight.contains(block as u64), self.limbo[block], self.awaits_reader[block]]);
            key.flags(&[self.hole[block], self.punching == Some(block)]);
            key.content(self.cells[block].durable);
            key.bytes.push(self.cells[block].unflushed.len() as u8);
            self.cells[block].unflushed.iter().for_each(|content| key.content(*content));
        }
        let durable = self.holds.durable;
        for held in [&self.holds.nodes, &self.holds.again] {
            let mut numbers: Vec<(u64, u64)> = held.iter().map(|(k, v)| (*k, v.saturating_sub(durable))).collect();
            numbers.retain(|(_, until)| *until > 0);
            numbers.sort_unstable();
            key.bytes.push(numbers.len() as u8);
            numbers.iter().for_each(|(of, until)| key.bytes.extend([*of as u8, *until as u8]));
        }
        key.bytes.push(self.waiting.len() as u8);
        for waiting in &self.waiting {
            key.op(waiting.op);
            key.bytes.extend([waiting.gate.saturating_sub(self.synced), waiting.freed.len() as u8]);
            key.flags(&[waiting.joined]);
        }
        key.bytes.extend([self.journal.len() as u8, self.ordered as u8]);
        for record in &self.journal {
            key.flags(&[record.urgent]);
            key.op(record.op);
        }
        key.bytes.push(self.appending.len() as u8);
        self.appending.iter().for_each(|record| key.op(record.op));
        if let Some(reader) = &self.reader {
            key.bytes.extend([7, reader.disk as u8, reader.logical as u8, reader.block as u8]);
            reader.allowed.iter().for_each(|value| key.value(*value));
        }
        for layer in self.open.into_iter().chain(self.closed) {
            layer.into_iter().for_each(|value| key.option(value));
        }
        key.flags(&[self.closed.is_some()]);
        if let Some(batch) = &self.batch {
            key.bytes.extend([1, batch.disk as u8, u8::from(batch.going), batch.homes.len() as u8]);
            for home in &batch.homes {
                key.bytes.extend([home.logical as u8, home.placement as u8, home.block as u8]);
                key.value(home.value);
                key.flags(&[home.packed]);
            }
            key.bytes.extend(batch.others.iter().map(|logical| *logical as u8));
        }
        if let Some(through) = self.through {
            key.bytes.extend([2, through.disk as u8, through.logical as u8, through.block as u8]);
            key.flags(&[through.new, through.packed]);
            key.value(through.value);
        }
        if let Some(packing) = self.packing {
            key.bytes.extend([8, packing.logical as u8, packing.from as u8, packing.to as u8, packing.references]);
            key.content(packing.content);
        }
        if let Some(sharing) = self.sharing {
            key.bytes.extend([9, sharing.logical as u8, sharing.from as u8, sharing.to as u8]);
            key.bytes.extend(sharing.packed.map(u8::from));
            key.content(sharing.content);
        }
        if let Some(equal::Comparing { disk, logical, block, value, packed, watch }) = self.comparing {
            key.bytes.extend([10, disk as u8, logical as u8, block as u8]);
            key.flags(&[self.in_flight.is_watched(watch), packed]);
            key.value(value);
        }
        if let Some((block, value)) = self.payload_home {
            key.bytes.extend([3, block as u8]);
            key.value(value);
        }
        key.bytes.extend([self.written - self.synced, self.announced.map_or(255, |at| at as u8), self.settled as u8]);
        if let Some(sync) = &self.sync {
            key.bytes.extend([4, sync.settled as u8, sync.written.saturating_sub(self.synced)]);
            key.bytes.extend(sync.covers.map(|count| count as u8));
            key.flags(&[sync.checkpoint, sync.half]);
        }
        if let Some(flush) = &self.flush {
            key.bytes.extend([5, flush.wanted.saturating_sub(self.synced)]);
            key.bytes.extend(flush.covers.iter().flatten().map(|count| *count as u8));
        }
        if let Some(checkpoint) = &self.checkpoint {
            key.bytes.extend([6, checkpoint.tail as u8, u8::from(checkpoint.synced)]);
            key.metadata(&checkpoint.base);
            checkpoint.payload.iter().for_each(|value| key.option(*value));
        }
        key.bytes.extend([self.captured.map_or(255, |left| left as u8), self.ordered_next.map_or(255, |at| at as u8)]);
        for values in self.expected.iter().flatten() {
            key.bytes.push(values.len() as u8);
            values.iter().for_each(|value| key.value(*value));
        }
        key.finish()
    }
}

struct Key {
    bytes: Vec<u8>,
    /// Values, renumbered in the order in which they occur.
    names: [u8; 256],
    named: u8,
}

impl Key {
    fn value(&mut self, value: Value) {
        if self.names[value as usize] == u8::MAX {
            self.names[value as usize] = self.named;
            self.named += 1;
        }
        self.bytes.push(self.names[value as usize]);
    }

    fn option(&mut self, value: Option<Value>) {
        match value {
            Some(value) => self.value(value),
            None => self.bytes.push(254),
        }
    }

    fn content(&mut self, content: Content) {
        self.value(content.0);
        self.value(content.1);
    }

    fn flags(&mut self, flags: &[bool]) {
        self.bytes.push(flags.iter().fold(0, |bits, flag| bits << 1 | u8::from(*flag)));
    }

    fn metadata(&mut self, metadata: &Metadata) {
        self.flags(&[metadata.given_twice]);
        for node in &metadata.nodes {
            self.bytes.extend([node.references, node.level]);
            self.flags(&node.unwritten);
            self.bytes.extend(node.slots.map(|slot| slot.unwrap_or(255)));
        }
        for (entry, logged) in metadata.entries.iter().zip(metadata.logged) {
            self.bytes.push(entry.references | u8::from(entry.unbacked) << 7);
            // The table entry of a free block has no influence on later steps.
            if entry.references > 0 {
                self.content(entry.sum);
                self.flags(&[entry.suspect, entry.packed]);
                self.option(logged);
            }
        }
        for object in &metadata.objects {
            self.bytes.extend([object.kind as u8 | u8::from(object.linked) << 7, object.root.unwrap_or(255)]);
        }
    }

    fn op(&mut self, op: Op) {
        let (code, a, b, c, value) = match op {
            Op::Map { disk, logical, block, value } => (0, disk, logical, block, value),
            Op::MapData { disk, logical, block, value } => (1, disk, logical, block, value),
            Op::Overwrite { block, value } => (2, block, 0, 0, value),
            Op::OverwriteData { block, value } => (3, block, 0, 0, value),
            Op::Announce { block } => (4, block, 0, 0, 0),
            Op::Checksums { block, value } => (5, block, 0, 0, value),
            Op::Synced { position } => (6, position, 0, 0, 0),
            Op::Unmap { disk, logical } => (7, disk, logical, 0, 0),
            Op::Resolve { block, content } => {
                self.value(content.1);
                (8, block, 0, 0, content.0)
            }
            Op::Put => (9, 0, 0, 0, 0),
            Op::Seal => (10, 0, 0, 0, 0),
            Op::Clone => (11, 0, 0, 0, 0),
            Op::Trash { object } => (12, object, 0, 0, 0),
            Op::Drop => (13, 0, 0, 0, 0),
            Op::Detach => (14, 0, 0, 0, 0),
            Op::Revert => (15, 0, 0, 0, 0),
            Op::Backed { block, backed } => (16, block, usize::from(backed), 0, 0),
            Op::Written { disk, logical, block, value } => (17, disk, logical, block, value),
            Op::Unwritten { disk, logical, block } => (18, disk, logical, block, 0),
            Op::Pack { logical, from, to, content } => {
                self.value(content.1);
                (19, from, to, logical, content.0)
            }
            Op::Share { logical, from, to } => (20, logical, from, to, 0),
            Op::MapPack { disk, logical, block, value } => (21, disk, logical, block, value),
            Op::MapShared { disk, logical, block } => (22, disk, logical, block, 0),
            Op::MapSharedPack { disk, logical, block } => (23, disk, logical, block, 0),
        };
        self.bytes.extend([code, a as u8, b as u8, c as u8]);
        self.value(value);
    }

    /// Two hashes of 64 bits, which fold the products of 128 bits as wyhash does. A search hashes every state that it
    /// reaches, and most of them several times, so the hash must be fast. It need not resist chosen keys.
    fn finish(self) -> u128 {
        let fold = |left: u64, right: u64| {
            let product = u128::from(left) * u128::from(right);
            product as u64 ^ (product >> 64) as u64
        };
        let mut hashes = [0xa076_1d64_78bd_642f ^ self.bytes.len() as u64, 0xe703_7ed1_a0b4_28db];
        for chunk in self.bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let word = u64::from_le_bytes(word);
            hashes = [
                fold(hashes[0] ^ word, 0x8ebc_6af0_9c88_c6e3),
                fold(hashes[1].rotate_left(29) ^ word, 0x5899_65cc_7537_4cc3),
            ];
        }
        u128::from(hashes[0]) << 64 | u128::from(hashes[1])
    }
}
