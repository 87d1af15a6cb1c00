//! Reads disks and snapshots out of a store that cannot be opened, without writing to it.
//!
//! The store is opened over an [`Overlay`], which keeps all writes of recovery in memory. Damaged state that an
//! ordinary opening refuses is used as far as its content is proven, and the rest is reported (`open`). Pages are read
//! from their places or from the images of the last checkpoint; one inverted bit is corrected
//! ([`crate::pages::Mender`]). Lost tables are rebuilt from the trees (`../rebuild.rs`). Operations of the journal that
//! change damaged metadata are left out, and their ranges are reported (`../left_out.rs`).
//!
//! What must hold: content that is returned as good is what was written. A block is good if its checksum equals the
//! checksum in the table, and no left-out operation may have changed the block.

mod open;

use super::Engine;
use super::metadata::Effects;
use crate::catalog::{Object, ObjectState};
use crate::pack::Pack;
use crate::space::Run;
use crate::tree::{self, LOGICAL_LIMIT, NodeId, Packed};
use crate::{Error, Result, checksum};
use backend::{BLOCK_SIZE, Buffer, Directory};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// A damaged store, open for reading what can be read.
pub struct Salvage {
    engine: Arc<Engine>,
    /// Damage other than the lost ranges of single disks.
    notes: Vec<String>,
    /// Blocks of disks and snapshots that the left-out operations concern.
    left_out: BTreeMap<u64, Vec<Range<u64>>>,
    /// Objects with records from a damaged page of the catalog.
    unproven: BTreeSet<u64>,
    /// Whether a part of the journal is lost: then the content is older than the acknowledged content.
    behind: bool,
    /// Blocks with newer content in a part of the journal that cannot be replayed.
    outdated: BTreeSet<u64>,
}

/// A disk or snapshot that can be read.
#[derive(Clone, Debug)]
pub struct Salvaged {
    /// The catalog's record of the disk or snapshot.
    pub object: Object,
    /// False if the record is on a damaged page: name and size may be wrong.
    pub proven: bool,
}

/// The state of a run of blocks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SalvagedPiece {
    /// The blocks read as zeros.
    Zero,
    /// The blocks are in the data files, from this physical block on.
    Data(u64),
    /// The blocks are compressed.
    Packed {
        /// First physical block of the pack.
        physical: u64,
        /// Length of the pack in physical blocks.
        stored: u8,
        /// Index within the pack of the first block.
        index: u8,
    },
    /// The blocks cannot be found.
    Lost,
}

/// How reliable the content of a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The content is what was written.
    Good,
    /// The block was being overwritten when the store stopped, and no flush covered the overwrite. The content may be
    /// old, new, or a mixture.
    Unverified,
    /// The content is not what was written.
    Lost,
}

impl Salvage {
    /// Opens the store in a folder. No other process may write the store meanwhile.
    pub fn open(directory: Arc<dyn Directory>) -> Result<Self> {
        open::open(directory)
    }

    /// Damage of the store as a whole.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether acknowledged changes at the end of the journal are lost.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// Whether disks and snapshots may be missing: a page of the catalog is lost.
    pub fn is_incomplete(&self) -> bool {
        self.engine.with_catalog(|catalog| !catalog.lost().is_empty())
    }

    /// All disks and snapshots: disks by name, each followed by its snapshots.
    pub fn objects(&self) -> Vec<Salvaged> {
        let salvaged =
            |object: &Object| Salvaged { object: object.clone(), proven: !self.unproven.contains(&object.id) };
        self.engine.with_catalog(|catalog| {
            let mut out = Vec::new();
            for disk in catalog.disks().filter(|disk| !disk.incomplete) {
                out.push(salvaged(disk));
                out.extend(catalog.snapshots_of(disk.id).filter(|snapshot| !snapshot.incomplete).map(salvaged));
            }
            // The remaining snapshots belong to disks with lost records.
            let orphan = |object: &&Object| object.is_snapshot() && catalog.find(object.disk).is_none();
            let mut orphans: Vec<Salvaged> = catalog.objects().filter(orphan).map(salvaged).collect();
            orphans.sort_by_key(|orphan| orphan.object.id);
            out.extend(orphans);
            out
        })
    }

    /// The blocks of an object that cannot be found: ranges in ascending order, without overlaps.
    pub fn lost(&self, id: u64) -> Result<Vec<Range<u64>>> {
        let mut ranges = self.left_out.get(&id).cloned().unwrap_or_default();
        let mut meta = self.engine.meta.lock();
        let object = meta.catalog.get(id)?.clone();
        let mut effects = Effects::default();
        if let Some(root) = object.root {
            let mut lost = |_: NodeId, range: Range<u64>, _: Error| ranges.push(range);
            tree::walk_damaged(&mut meta.nodes(&mut effects), root, &mut |_| Ok(true), &mut lost)?;
        }
        let end = object.size_in_blocks();
        ranges.retain_mut(|range| {
            range.end = range.end.min(end);
            !range.is_empty()
        });
        Ok(merge_ranges(ranges))
    }

    /// The state of `range` of an object, in order and without gaps; `lost` is the result of [`Salvage::lost`].
    pub fn pieces(&self, id: u64, range: Range<u64>, lost: &[Range<u64>]) -> Result<Vec<(Range<u64>, SalvagedPiece)>> {
        let mut out = Vec::new();
        let mut at = range.start;
        let first = lost.partition_point(|lost| lost.end <= range.start);
        for hole in lost[first..].iter().take_while(|lost| lost.start < range.end) {
            if at < hole.start {
                self.pieces_between(id, at..hole.start, &mut out)?;
            }
            let end = hole.end.min(range.end);
            out.push((at.max(hole.start)..end, SalvagedPiece::Lost));
            at = end;
        }
        if at < range.end {
            self.pieces_between(id, at..range.end, &mut out)?;
        }
        Ok(out)
    }

    fn pieces_between(&self, id: u64, range: Range<u64>, out: &mut Vec<(Range<u64>, SalvagedPiece)>) -> Result<()> {
        let mut meta = self.engine.meta.lock();
        let mut extents = Vec::new();
        if let Some(root) = meta.catalog.get(id)?.root {
            let mut effects = Effects::default();
            tree::lookup(&mut meta.nodes(&mut effects), root, range.clone(), &mut extents)?;
        }
        let mut at = range.start;
        for extent in extents {
            if at < extent.logical {
                out.push((at..extent.logical, SalvagedPiece::Zero));
            }
            at = extent.logical + extent.blocks;
            let piece = match extent.packed {
                _ if extent.unwritten => SalvagedPiece::Zero,
                Some(Packed { index, stored }) => SalvagedPiece::Packed { physical: extent.physical, stored, index },
                None => SalvagedPiece::Data(extent.physical),
            };
            out.push((extent.logical..at, piece));
        }
        if at < range.end {
            out.push((at..range.end, SalvagedPiece::Zero));
        }
        Ok(())
    }

    /// Reads blocks of a piece from its block `from` on into `out`, and returns a verdict for each. Lost blocks read as
    /// zeros.
    pub fn read(&self, piece: SalvagedPiece, from: u64, out: &mut [u8]) -> Vec<Verdict> {
        match piece {
            SalvagedPiece::Data(physical) => self.read_run(physical + from, out),
            SalvagedPiece::Packed { physical, stored, index } => {
                self.read_pack(physical, usize::from(stored), usize::from(index) + from as usize, out)
            }
            SalvagedPiece::Zero | SalvagedPiece::Lost => {
                out.fill(0);
                let verdict = if piece == SalvagedPiece::Zero { Verdict::Good } else { Verdict::Lost };
                vec![verdict; out.len() / BLOCK_SIZE]
            }
        }
    }

    /// Reads blocks of a pack. The first block of the pack has the checksums of all blocks in it, so if that block is
    /// undamaged, it proves the content of each of them.
    fn read_pack(&self, physical: u64, stored: usize, index: usize, out: &mut [u8]) -> Vec<Verdict> {
        let mut bytes = Buffer::zeroed(stored);
        self.read_medium(physical, &mut bytes);
        let is_proved = self.verdict(physical, &bytes[..BLOCK_SIZE]) == Verdict::Good;
        let pack = Pack::decode(&bytes).ok().filter(|_| is_proved);
        let read = |(number, block): (usize, &mut [u8])| {
            let at = index + number;
            if pack.as_ref().is_some_and(|pack| pack.read(at..at + 1, block).is_ok()) {
                return Verdict::Good;
            }
            block.fill(0);
            Verdict::Lost
        };
        out.chunks_exact_mut(BLOCK_SIZE).enumerate().map(read).collect()
    }

    /// Reads physical blocks.
    fn read_run(&self, physical: u64, out: &mut [u8]) -> Vec<Verdict> {
        let read = self.read_medium(physical, out);
        let mut verdicts = Vec::with_capacity(read.len());
        for ((number, block), read) in (physical..).zip(out.chunks_exact_mut(BLOCK_SIZE)).zip(read) {
            let verdict = if read { self.verdict(number, block) } else { Verdict::Lost };
            if verdict == Verdict::Lost {
                block.fill(0);
            }
            verdicts.push(verdict);
        }
        verdicts
    }

    /// Reads physical blocks without verification. Returns which of them the medium can read.
    fn read_medium(&self, physical: u64, out: &mut [u8]) -> Vec<bool> {
        let run = Run { start: physical, blocks: (out.len() / BLOCK_SIZE) as u64 };
        let located = self.engine.files.locate(run).ok();
        let whole = located.as_ref().is_some_and(|(file, offset)| file.read_at(out, *offset).is_ok());
        // If a sector of the run is unreadable, the other blocks are read one by one.
        let read = |(number, block): (u64, &mut [u8])| {
            whole
                || located.as_ref().is_some_and(|(file, offset)| {
                    file.read_at(block, offset + (number - physical) * BLOCK_SIZE as u64).is_ok()
                })
        };
        (physical..).zip(out.chunks_exact_mut(BLOCK_SIZE)).map(read).collect()
    }

    fn verdict(&self, number: u64, content: &[u8]) -> Verdict {
        if self.outdated.contains(&number) {
            return Verdict::Lost;
        }
        match self.engine.meta.lock().entry(number) {
            Ok(entry) if entry.references > 0 && entry.checksum == checksum(content) => Verdict::Good,
            // If part of the journal is lost, the block may have been reused for another disk.
            Ok(entry) if entry.references > 0 && entry.suspect && !self.behind => Verdict::Unverified,
            _ => Verdict::Lost,
        }
    }

    /// The content of each block of an object, or `None` where it is lost: for tests.
    pub fn contents(&self, id: u64, range: Range<u64>) -> Result<Vec<Option<Vec<u8>>>> {
        let mut out = Vec::new();
        for (range, piece) in self.pieces(id, range, &self.lost(id)?)? {
            for block in range.clone() {
                out.push(match piece {
                    SalvagedPiece::Zero => Some(vec![0; BLOCK_SIZE]),
                    SalvagedPiece::Lost => None,
                    SalvagedPiece::Data(_) | SalvagedPiece::Packed { .. } => {
                        let mut content = vec![0; BLOCK_SIZE];
                        let verdict = self.read(piece, block - range.start, &mut content);
                        (verdict[0] != Verdict::Lost).then_some(content)
                    }
                });
            }
        }
        Ok(out)
    }
}

/// All blocks of a disk.
const EVERYTHING: Range<u64> = 0..LOGICAL_LIMIT;

/// Whether an object can be read: it is neither deleted nor an unsealed snapshot.
fn is_readable(object: &Object) -> bool {
    matches!(object.state, ObjectState::Disk | ObjectState::Snapshot)
}

/// Sorts ranges and joins those that overlap.
pub fn merge_ranges(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}
