//! The scan of a pass: it collects the checksums of the blocks of disks and snapshots.
//!
//! The table has the checksum of each plain block. That of a block in a pack is in the index of the pack, so the first
//! block of each pack is read.

use super::prints::{KEPT_REFERENCES_MAX, Print};
use super::{SharePass, ShareStep};
use crate::engine::metadata::{PartOfLeaf, end_of_part};
use crate::engine::{Engine, Meta};
use crate::space::Run;
use crate::{IoContext, Result, is_lost, pack};
use backend::Buffer;
use rustc_hash::FxHashSet;

/// What a step of a scan has found.
struct Scanned {
    /// The logical block at which the scan of the object continues.
    next: u64,
    /// The leaf, if several trees share it.
    leaf: Option<PartOfLeaf>,
    blocks: Vec<Found>,
}

/// A block with references to spare.
struct Found {
    logical: u64,
    references: u32,
    content: Content,
}

enum Content {
    /// The checksum of a plain block.
    Plain(u32),
    /// The pack that has the block, and the index of the block in it.
    Packed(Run, u8),
}

/// The pack of which a scan has read the index last, and the checksums of its blocks.
#[derive(Default)]
struct LastPack {
    run: Option<Run>,
    checksums: Vec<Option<u32>>,
    /// Number of packs of which the index was read.
    read: u64,
}

impl Engine {
    /// Collects the prints of the next blocks.
    pub(super) fn scan_next(&self, pass: &mut SharePass) -> Result<ShareStep> {
        let (number, at) = pass.at;
        let Some((object, end)) = pass.objects.get(number).copied() else {
            pass.begin_sharing(false);
            return Ok(ShareStep::default());
        };
        let seen = &pass.seen;
        let scanned = match self.meta.look(|meta| meta.scan(object, at, end, seen)) {
            Err(error) if is_lost(&error) && self.running.goes_on() => {
                let next = end_of_part(&(at..end));
                tracing::debug!(%error, object, block = at, "equal blocks are not looked for");
                pass.at = (number, next);
                return Ok(ShareStep { lost: next - at, ..ShareStep::default() });
            }
            scanned => scanned?,
        };
        let Some(scanned) = scanned else {
            pass.at = (number + 1, 0);
            return Ok(ShareStep::default());
        };
        let (mut last, mut noted) = (LastPack::default(), Vec::new());
        for Found { logical, references, content } in scanned.blocks {
            let sum = match content {
                Content::Plain(sum) => Some(sum),
                Content::Packed(run, index) => self.checksum_in_pack(&mut last, run, index)?,
            };
            let Some(sum) = sum else { continue };
            noted.push((logical, sum));
            let print = Print::new(sum, number as u32, logical, references);
            let print = if matches!(content, Content::Packed(..)) { print.in_pack() } else { print };
            if !pass.prints.add(print) {
                // The blocks of this step are scanned again after those before.
                pass.begin_sharing(true);
                return Ok(ShareStep { read: last.read, ..ShareStep::default() });
            }
        }
        self.writeback.equal.note_found(object, noted.into_iter());
        pass.seen.extend(scanned.leaf);
        pass.at = (number, scanned.next);
        Ok(ShareStep { read: last.read, ..ShareStep::default() })
    }

    /// The checksum of a block in a pack. `None` if the pack was replaced since the look at the map, or is damaged:
    /// reads and checks report that.
    fn checksum_in_pack(&self, last: &mut LastPack, run: Run, index: u8) -> Result<Option<u32>> {
        if last.run != Some(run) {
            (last.run, last.checksums) = (Some(run), Vec::new());
            last.read += 1;
            let mut first = Buffer::recycled(1);
            let (file, offset) = self.files.locate(Run { blocks: 1, ..run })?;
            let read =
                file.read_at(&mut first, offset).during(|| format!("reading the index of a pack at {}", run.start));
            match read.and_then(|()| pack::checksums(&first, run.blocks)) {
                Ok(checksums) => last.checksums = checksums,
                Err(error) => tracing::debug!(%error, block = run.start, "equal blocks of a pack are not looked for"),
            }
        }
        Ok(last.checksums.get(usize::from(index)).copied().flatten())
    }
}

impl Meta {
    /// The blocks of the next part of an object, within one leaf. `None` if nothing is mapped from `at` to `end`, or if
    /// the object was deleted.
    fn scan(&mut self, object: u64, at: u64, end: u64, seen: &FxHashSet<PartOfLeaf>) -> Result<Option<Scanned>> {
        let Some(part) = self.next_part(object, at..end)? else { return Ok(None) };
        let mut scanned = Scanned { next: part.next, leaf: None, blocks: Vec::new() };
        if part.shared().is_some_and(|part| seen.contains(&part)) {
            return Ok(Some(scanned));
        }
        scanned.leaf = part.shared();
        for mapping in part.leaf.mappings.iter().filter(|mapping| !mapping.unwritten) {
            for within in 0..mapping.blocks {
                let (block, pack) = match mapping.packed {
                    None => (mapping.physical + within, None),
                    Some(packed) => {
                        (mapping.physical, Some((packed.stored, packed.index.saturating_add(within as u8))))
                    }
                };
                let entry = self.entry(block)?;
                // A block with all its references stays: it can neither replace other blocks nor be replaced.
                if !(1..KEPT_REFERENCES_MAX).contains(&entry.references) || entry.suspect {
                    continue;
                }
                let content = match pack {
                    None => Content::Plain(entry.checksum),
                    Some((stored, index)) => Content::Packed(Run { start: block, blocks: u64::from(stored) }, index),
                };
                let logical = mapping.logical + within;
                scanned.blocks.push(Found { logical, references: entry.references, content });
            }
        }
        Ok(Some(scanned))
    }
}
