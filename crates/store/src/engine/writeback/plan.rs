//! Plans to which blocks a batch is written.

use super::BATCH_STRIDE;
use super::packs::{BufferedPack, PackedEntries};
use crate::buffer::{Content, DirtyPiece};
use crate::engine::admit::batch_bytes;
use crate::engine::log::Cost;
use crate::engine::metadata::{Effects, Fetch, Meta, Touched};
use crate::engine::placement::{BlockState, Placement, place};
use crate::engine::reserve::Claim;
use crate::engine::{Engine, Head};
use crate::journal::Operation;
use crate::space::Run;
use crate::sync::MutexGuard;
use crate::tree::{self, Extent};
use crate::{Error, ErrorKind, Result};
use backend::{BLOCK_SIZE, SharedSlice};
use std::ops::Range;
use std::sync::Arc;

/// A run of blocks within one buffered entry, or the pack of several, and where it is written.
pub struct BlockWrite {
    pub placement: Placement,
    pub logical: Range<u64>,
    pub run: Run,
    pub data: SharedSlice,
    pub checksums: Vec<u32>,
    pub origin: Origin,
}

/// Where the data of a [`BlockWrite`] comes from.
pub enum Origin {
    /// From an entry with the stamp of this write.
    Entry(u64),
    /// From these parts of entries, which were packed.
    Packed(Arc<PackedEntries>),
}

impl BlockWrite {
    /// The checksums of the logical blocks.
    pub fn content_sums(&self) -> &[u32] {
        match &self.origin {
            Origin::Entry(_) => &self.checksums,
            Origin::Packed(entries) => &entries.checksums,
        }
    }
}

/// What a batch writes.
#[derive(Clone, Copy)]
pub struct Buffered<'a> {
    pub pieces: &'a [DirtyPiece],
    /// Packs of entries that may be among the pieces.
    pub packs: &'a [BufferedPack],
}

/// The plan of a batch. It must be ended with [`Plan::undo`] or [`Plan::end`].
#[derive(Default)]
pub struct Plan<'a> {
    homes: Vec<BlockWrite>,
    /// Discards and zeroes of the batch.
    others: Vec<DirtyPiece>,
    /// Runs to be overwritten in place, which are marked as in flight.
    claimed: Vec<Run>,
    /// Claims for blocks of entries without a claim. Held until the headroom is lowered.
    unclaimed: Option<Claim<'a>>,
}

impl Plan<'_> {
    /// The runs of the batch, in the order of its entries until [`Plan::sort`].
    pub fn homes(&self) -> &[BlockWrite] {
        &self.homes
    }

    /// Runs that are overwritten in place.
    pub fn in_place(&self) -> impl Iterator<Item = Run> + '_ {
        self.homes.iter().filter(|home| home.placement == Placement::InPlace).map(|home| home.run)
    }

    /// Sorts the runs by physical address, so that adjacent runs become one write.
    pub fn sort(&mut self) {
        self.homes.sort_unstable_by_key(|home| home.run.start);
    }

    /// Releases everything that the plan has allocated or marked, because nothing was written.
    pub fn undo(self, meta: &mut Meta) {
        for home in self.homes.iter().filter(|home| home.placement == Placement::New) {
            meta.data.release(home.run);
        }
        self.claimed.into_iter().for_each(|run| meta.in_flight.release(run));
    }

    /// Ends the plan after its data is written and in the map. Returns the discards and zeroes.
    pub fn end(self, meta: &mut Meta) -> Vec<DirtyPiece> {
        self.claimed.into_iter().for_each(|run| meta.in_flight.release(run));
        self.others
    }
}

impl Engine {
    /// Splits entries into runs and decides where each is written. `waited` is true if the pending changes were made
    /// durable before this call, which ends their holds. After an error the caller undoes the plan ([`Plan::undo`]).
    /// `fetch` may have the reason of the error: see [`Fetch::require`].
    pub(crate) fn plan_batch<'a>(
        &'a self,
        meta: &mut MutexGuard<'_, Meta>,
        head: &Head,
        buffered: Buffered<'_>,
        waited: bool,
        plan: &mut Plan<'a>,
        fetch: &mut Fetch,
    ) -> Result<()> {
        let Buffered { pieces, packs } = buffered;
        let mut root = meta.catalog.get(head.id)?.root;
        let mut placements: Vec<(Range<u64>, Placement, u64)> = Vec::new();
        let (mut new_blocks, mut not_claimed, mut not_covered) = (0, 0, 0);
        let mut data = Vec::new();
        for piece in pieces {
            match &piece.entry.content {
                Content::Data(slice, sums) => data.push((slice, sums, piece)),
                Content::Unmapped | Content::Zero => plan.others.push(piece.clone()),
            }
        }
        let mut parts = Vec::with_capacity(data.len());
        for (i, (_, _, piece)) in data.iter().enumerate() {
            if i % BATCH_STRIDE == BATCH_STRIDE - 1 {
                // Releases the metadata lock for other threads. The runs planned so far are marked as in flight, so
                // meanwhile no journalled payload is written over them, and no read records their content as that of
                // suspect blocks.
                MutexGuard::bump(meta);
                // A write of the disk that bypasses the buffer may have changed the root. The node of the earlier root
                // is then free or belongs to another tree.
                root = meta.catalog.get(head.id)?.root;
            }
            let range = piece.logical..piece.end();
            fetch.require(meta, |meta| meta.placements(root, range, &mut placements))?;
            let new = placements.iter().filter(|(_, placement, _)| *placement == Placement::New);
            let new: u64 = new.map(|(range, _, _)| range.end - range.start).sum();
            new_blocks += new;
            not_claimed += if piece.entry.claimed { 0 } else { new };
            not_covered += if piece.entry.covered { 0 } else { new };
            for (range, _, start) in placements.iter().filter(|(_, placement, _)| *placement == Placement::InPlace) {
                let run = Run { start: *start, blocks: range.end - range.start };
                meta.in_flight.claim(run);
                plan.claimed.push(run);
            }
            parts.push(std::mem::take(&mut placements));
        }
        if not_covered > 0 {
            // A new place would need map nodes that are reserved for other writes.
            return Err(Error::new(ErrorKind::NoSpace, "all free map nodes are reserved for other writes"));
        }
        if not_claimed > 0 {
            // The blocks reserved for the disk are intended for overwrites of shared blocks. A block that is only held
            // may use a reserved block only if waiting for the journal has not ended the hold.
            let aside = if waited { meta.catalog.get(head.id)?.reserved } else { 0 };
            let claim = self.try_claim(not_claimed).or_else(|| self.try_claim(not_claimed.saturating_sub(aside)));
            if claim.is_none() {
                return Err(Error::new(ErrorKind::NoSpace, "all free blocks are reserved for other writes"));
            }
            plan.unclaimed = claim;
        }
        fetch.require_allocation(meta, new_blocks)?;
        let new = data.iter().zip(&parts).flat_map(|((_, _, piece), parts)| {
            let new = parts.iter().filter(|(_, placement, _)| *placement == Placement::New);
            new.map(|(range, _, _)| (range.clone(), piece.entry.stamp))
        });
        let new: Vec<(Range<u64>, u64)> = new.collect();
        let mut packed = Vec::new();
        for pack in packs.iter().filter(|pack| pack.is_of(&new)) {
            // Without adjacent blocks, the blocks are stored plainly.
            if let Some(run) = self.allocate_adjacent(meta, pack.stored())? {
                new_blocks -= pack.blocks.end - pack.blocks.start;
                packed.push(pack.blocks.clone());
                plan.homes.push(pack.write_to(run));
            }
        }
        let mut spare = Run { start: 0, blocks: 0 };
        for ((slice, sums, piece), parts) in data.into_iter().zip(parts) {
            for (range, placement, physical) in parts {
                let mut at = range.start;
                while at < range.end {
                    let next = packed.partition_point(|blocks| blocks.end <= at);
                    let next = packed.get(next).filter(|blocks| blocks.start < range.end);
                    if let Some(blocks) = next.filter(|blocks| blocks.start <= at) {
                        at = blocks.end.min(range.end);
                        continue;
                    }
                    let end = next.map_or(range.end, |blocks| blocks.start);
                    let mut run = Run { start: physical + (at - range.start), blocks: end - at };
                    if placement == Placement::New {
                        if spare.blocks == 0 {
                            spare = self.allocate(meta, new_blocks)?;
                        }
                        run = Run { start: spare.start, blocks: run.blocks.min(spare.blocks) };
                        spare = Run { start: spare.start + run.blocks, blocks: spare.blocks - run.blocks };
                        new_blocks -= run.blocks;
                    }
                    let (from, to) = ((at - piece.logical) as usize, (at - piece.logical + run.blocks) as usize);
                    plan.homes.push(BlockWrite {
                        placement,
                        logical: at..at + run.blocks,
                        run,
                        data: slice.slice(from * BLOCK_SIZE..to * BLOCK_SIZE),
                        checksums: sums.as_slice()[from..to].to_vec(),
                        origin: Origin::Entry(piece.entry.stamp),
                    });
                    at += run.blocks;
                }
            }
        }
        debug_assert_eq!((spare.blocks, new_blocks), (0, 0));
        Ok(())
    }
}

impl Meta {
    /// An upper limit of the cost of announcing, writing and mapping these runs.
    pub fn cost_of_homes(&mut self, disk: u64, homes: &[BlockWrite]) -> Result<Cost> {
        let (mut announced, mut bytes, mut touched) = (0, 0, Touched::default());
        for home in homes {
            let record = 32 + 4 * home.run.blocks;
            if home.placement == Placement::InPlace {
                announced += record as usize;
                touched.touch_run(home.run);
            } else {
                bytes += record;
                self.touch_mapping(disk, home.logical.clone(), home.run, &mut touched)?;
            }
        }
        if announced > 0 {
            bytes += batch_bytes(announced);
        }
        Ok(Cost { bytes, pages: self.pages_of(&touched) })
    }

    /// True when pending checksums concern a block that is about to be overwritten in place.
    pub fn awaits_checksums(&self, homes: &[BlockWrite]) -> bool {
        // Skips the search in the usual case that no checksums are pending.
        if !self.pending.has_checksums() {
            return false;
        }
        let mut in_place: Vec<Run> =
            homes.iter().filter(|home| home.placement == Placement::InPlace).map(|home| home.run).collect();
        in_place.sort_unstable_by_key(|run| run.start);
        self.pending.iter().any(|pending| {
            let Operation::Checksums { run, .. } = &pending.operation else { return false };
            let next = in_place.partition_point(|other| other.start + other.blocks <= run.start);
            in_place.get(next).is_some_and(|other| other.start < run.start + run.blocks)
        })
    }

    /// Splits a range by whether it may be overwritten in place: (range, first physical block). `None` for parts that
    /// need new blocks.
    pub fn places(&mut self, root: Option<tree::NodeId>, range: Range<u64>) -> Result<Vec<(Range<u64>, Option<u64>)>> {
        let mut placements = Vec::new();
        self.placements(root, range, &mut placements)?;
        let place = |placement, physical| (placement == Placement::InPlace).then_some(physical);
        Ok(placements.into_iter().map(|(range, placement, physical)| (range, place(placement, physical))).collect())
    }

    /// Decides where one block of an extent is written.
    pub fn placement(&mut self, extent: &Extent, block: u64) -> Result<Placement> {
        let entry = self.entry(block)?;
        Ok(place(BlockState {
            references: entry.references,
            shared_path: extent.shared_path,
            held: entry.held,
            in_flight: self.in_flight.contains(block),
            unwritten: extent.unwritten,
        }))
    }

    /// Splits a logical range by placement: (range, placement, physical block if it is overwritten in place or filled).
    pub fn placements(
        &mut self,
        root: Option<tree::NodeId>,
        range: Range<u64>,
        out: &mut Vec<(Range<u64>, Placement, u64)>,
    ) -> Result<()> {
        let mut extents: Vec<Extent> = Vec::new();
        if let Some(root) = root {
            let mut effects = Effects::default();
            tree::lookup_exclusive(&mut self.nodes(&mut effects), root, range.clone(), &mut extents)?;
        }
        let mut at = range.start;
        for extent in extents {
            if at < extent.logical {
                push_placement(out, at..extent.logical, Placement::New, 0);
            }
            at = extent.logical + extent.blocks;
            if extent.shared_path {
                push_placement(out, extent.logical..at, Placement::New, 0);
                continue;
            }
            for i in 0..extent.blocks {
                let block = extent.physical + i;
                let placement = self.placement(&extent, block)?;
                let logical = extent.logical + i;
                push_placement(out, logical..logical + 1, placement, block);
            }
        }
        if at < range.end {
            push_placement(out, at..range.end, Placement::New, 0);
        }
        Ok(())
    }
}

fn push_placement(out: &mut Vec<(Range<u64>, Placement, u64)>, range: Range<u64>, placement: Placement, physical: u64) {
    if let Some((last, last_placement, start)) = out.last_mut()
        && last.end == range.start
        && *last_placement == placement
        && (placement == Placement::New
            || *start + (last.end - last.start) == physical && !physical.is_multiple_of(crate::FILE_BLOCKS))
    {
        last.end = range.end;
        return;
    }
    out.push((range, placement, physical));
}
