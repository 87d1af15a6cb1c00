//! Discards and zeroes on their way into the map, and the end of a layer that they may be the last of.

use super::apply::Effects;
use super::placement::Holds;
use super::write::chunks;
use super::{Engine, Head, Meta};
use crate::Result;
use crate::buffer::{Content, Piece};
use crate::journal::Operation;
use crate::tree;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Longest range of one unmap operation, in blocks (4 GiB).
pub(super) const UNMAP_MAX: u64 = 1 << 20;

/// What zeroing a range means for the map.
enum Zeroed {
    /// It has space that was never written.
    Already,
    /// It keeps its blocks, from this one on.
    Kept(u64),
    /// It needs blocks of its own.
    New,
}

impl Engine {
    /// Discards and zeroes of a batch: no data, only the map.
    pub(super) fn finish_others(&self, head: &Head, pieces: Vec<Piece>) -> Result<()> {
        for piece in pieces {
            let mut buffer = head.buffer.lock();
            let mut meta = self.meta.lock();
            self.apply_other(&mut meta, head.id, &piece)?;
            self.update_headroom(&meta);
            let (layer, _) = buffer.layers.oldest();
            let gone = layer.remove(piece.logical, piece.entry.blocks, piece.entry.stamp);
            drop(meta);
            drop(buffer);
            self.give_back(gone);
        }
        Ok(())
    }

    /// Brings a discard or zero entry into the map.
    pub(super) fn apply_other(&self, meta: &mut Meta, disk: u64, piece: &Piece) -> Result<()> {
        let range = piece.logical..piece.logical + piece.entry.blocks;
        if matches!(piece.entry.content, Content::Unmapped) {
            for part in chunks(range, UNMAP_MAX) {
                let operation = Operation::Unmap { disk, logical: part.start, blocks: part.blocks };
                self.carry_out(meta, operation, 0)?;
            }
            return Ok(());
        }
        for (range, zeroed) in meta.zeroed(disk, range)? {
            match zeroed {
                Zeroed::Already => {}
                Zeroed::Kept(physical) => {
                    for part in chunks(physical..physical + (range.end - range.start), crate::journal::RUN_MAX) {
                        let logical = range.start + (part.start - physical);
                        let operation = Operation::Unwritten { disk, logical, run: part, fresh: false };
                        // Until the journal says so, recovery expects the old content: nothing may be written there.
                        self.carry_out(meta, operation, 0)?;
                    }
                }
                Zeroed::New => {
                    let mut at = range.start;
                    while at < range.end {
                        let run = self.allocate(meta, (range.end - at).min(crate::journal::RUN_MAX))?;
                        let operation = Operation::Unwritten { disk, logical: at, run, fresh: true };
                        self.carry_out_new(meta, operation, 0)?;
                        at += run.blocks;
                    }
                }
            }
        }
        Ok(())
    }

    /// The oldest layer of a disk has reached the map: the snapshot that closed it is complete.
    pub(super) fn seal_oldest(&self, buffer: &mut super::Buffer) -> Result<()> {
        let Some(snapshot) = buffer.layers.retire() else { return Ok(()) };
        buffer.cursor = 0;
        let mut meta = self.meta.lock();
        let disk = meta.catalog.get(snapshot)?.disk;
        self.carry_out(&mut meta, Operation::Seal { snapshot }, 0)?;
        if buffer.layers.is_single()
            && let Some(object) = meta.surplus_aside(disk)?
        {
            // It was for what this layer held.
            self.carry_out(&mut meta, Operation::Put { record: object.encode() }, 0)?;
            self.update_headroom(&meta);
        }
        drop(meta);
        self.unsealed.fetch_sub(1, Ordering::AcqRel);
        let _guard = self.sealed.lock();
        self.sealed_ready.notify_all();
        Ok(())
    }
}

impl Meta {
    /// Cuts a range by what zeroing it means. Nothing is written, and the journal keeps the order: what matters is who
    /// shares the blocks now, not what holds them.
    fn zeroed(&mut self, disk: u64, range: Range<u64>) -> Result<Vec<(Range<u64>, Zeroed)>> {
        let mut extents = Vec::new();
        if let Some(root) = self.catalog.get(disk)?.root {
            let (none, mut effects) = (Holds::default(), Effects::default());
            tree::lookup_exclusive(&mut self.current_nodes(&none, &mut effects), root, range.clone(), &mut extents)?;
        }
        let mut out: Vec<(Range<u64>, Zeroed)> = Vec::new();
        let mut push = |range: Range<u64>, zeroed: Zeroed| {
            if let Some((last, known)) = out.last_mut()
                && last.end == range.start
            {
                let joins = match (&*known, &zeroed) {
                    (Zeroed::Already, Zeroed::Already) | (Zeroed::New, Zeroed::New) => true,
                    (Zeroed::Kept(start), Zeroed::Kept(next)) => start + (last.end - last.start) == *next,
                    _ => false,
                };
                if joins {
                    last.end = range.end;
                    return;
                }
            }
            if !range.is_empty() {
                out.push((range, zeroed));
            }
        };
        let mut at = range.start;
        for extent in extents {
            push(at..extent.logical.max(at), Zeroed::New);
            at = extent.logical + extent.blocks;
            for i in 0..extent.blocks {
                let zeroed = if extent.shared_path || self.entry(extent.physical + i)?.references != 1 {
                    Zeroed::New
                } else if extent.unwritten {
                    Zeroed::Already
                } else {
                    Zeroed::Kept(extent.physical + i)
                };
                push(extent.logical + i..extent.logical + i + 1, zeroed);
            }
        }
        push(at..range.end.max(at), Zeroed::New);
        Ok(out)
    }
}
