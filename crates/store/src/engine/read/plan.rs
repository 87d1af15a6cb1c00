//! Where the blocks of a range are: the lookup in the map and in the read cache.

use super::{Part, Parts, Stored};
use crate::Result;
use crate::engine::metadata::Effects;
use crate::engine::read_cache::worth_using;
use crate::engine::{DataFiles, Meta};
use crate::space::Run;
use crate::tree::{self, Aim, Extent, NodeId};
use backend::{BLOCK_SIZE, SharedSlice};
use std::ops::Range;

/// The pieces of a range of blocks: those in the read cache one by one, and the ranges between them.
fn pieces(
    range: Range<u64>,
    cached: Vec<(u64, SharedSlice)>,
) -> impl Iterator<Item = (Range<u64>, Option<SharedSlice>)> {
    let mut cached = cached.into_iter().peekable();
    let mut at = range.start;
    std::iter::from_fn(move || {
        let from = at;
        at = cached.peek().map_or(range.end, |(block, _)| *block);
        if from < at {
            return Some((from..at, None));
        }
        let (block, content) = cached.next()?;
        at = block + 1;
        Some((block..at, Some(content)))
    })
}

impl Meta {
    /// Appends the locations of `range` in the tree `root`. Parts of packs are fetched if the whole read is short.
    pub(super) fn plan(
        &mut self,
        files: &DataFiles,
        root: Option<NodeId>,
        range: Range<u64>,
        is_short: bool,
        out: &mut Parts,
    ) -> Result<()> {
        let planned = self.plan_walk(files, root, range.clone(), is_short, out);
        if planned.is_err() && self.pages.absent() > 0 {
            // Surveys the whole range, so that all missing pages are read at once.
            self.survey(root, range, Aim::Read);
        }
        planned
    }

    fn plan_walk(
        &mut self,
        files: &DataFiles,
        root: Option<NodeId>,
        range: Range<u64>,
        is_short: bool,
        out: &mut Parts,
    ) -> Result<()> {
        let mut extents: Vec<Extent> = Vec::with_capacity(1);
        if let Some(root) = root {
            let mut effects = Effects::default();
            tree::lookup(&mut self.nodes(&mut effects), root, range.clone(), &mut extents)?;
        }
        let mut at = range.start;
        for extent in extents {
            if at < extent.logical {
                out.push((at, Part::Zero { length: (extent.logical - at) as usize * BLOCK_SIZE }));
            }
            at = extent.logical + extent.blocks;
            if extent.unwritten {
                out.push((extent.logical, Part::Zero { length: extent.blocks as usize * BLOCK_SIZE }));
            } else if let Some(packed) = extent.packed {
                let stored = extent.stored();
                let run = Run { start: stored.physical, blocks: stored.blocks };
                let first = u64::from(packed.index);
                let indexes = first..first + extent.blocks;
                let cached = self.read_cache.packed(run.start, indexes.clone());
                for (piece, content) in pieces(indexes, cached) {
                    let part = match content {
                        Some(content) => Part::Cached(content),
                        None => Part::Packed(Box::new(self.plan_packed(files, run, piece.clone(), is_short)?)),
                    };
                    out.push((extent.logical + (piece.start - first), part));
                }
            } else {
                self.plan_run(files, extent.logical, Run { start: extent.physical, blocks: extent.blocks }, out)?;
            }
        }
        if at < range.end {
            out.push((at, Part::Zero { length: (range.end - at) as usize * BLOCK_SIZE }));
        }
        Ok(())
    }

    /// Where a run of blocks is stored, and the checksums that the table has of them.
    pub(super) fn stored(&mut self, files: &DataFiles, run: Run) -> Result<Stored> {
        let (file, offset) = files.locate(run)?;
        let mut checksums = Vec::with_capacity(run.blocks as usize);
        self.data.checksums(&mut self.pages, run, &mut checksums)?;
        Ok(Stored { file, offset, block: run.start, checksums })
    }

    /// Plans a run of data: from memory where journalled payload is not written to its block yet, elsewhere from the
    /// data file.
    fn plan_run(&mut self, files: &DataFiles, logical: u64, run: Run, out: &mut Parts) -> Result<()> {
        let mut block = run.start;
        let end = run.start + run.blocks;
        while block < end {
            let next = if self.logged.is_empty() {
                None
            } else {
                self.logged.range(block..end).next().map(|(at, slice)| (*at, slice.clone()))
            };
            let until = next.as_ref().map_or(end, |(at, _)| *at);
            let part = Run { start: block, blocks: until - block };
            let cached = worth_using(part, self.read_cache.plain(part));
            if cached.is_empty() {
                self.plan_stored(files, logical + (block - run.start), part, out)?;
            } else {
                for (piece, content) in pieces(block..until, cached) {
                    let at = logical + (piece.start - run.start);
                    match content {
                        Some(content) => out.push((at, Part::Cached(content))),
                        None => {
                            let piece = Run { start: piece.start, blocks: piece.end - piece.start };
                            self.plan_stored(files, at, piece, out)?;
                        }
                    }
                }
            }
            if let Some((at, slice)) = next {
                out.push((logical + (at - run.start), Part::Memory(slice)));
            }
            block = until + 1;
        }
        Ok(())
    }

    /// Plans a run of data from the data file; nothing if the run is empty.
    fn plan_stored(&mut self, files: &DataFiles, at: u64, run: Run, out: &mut Parts) -> Result<()> {
        if run.blocks == 0 {
            return Ok(());
        }
        let mut stored = self.stored(files, run)?;
        // Two extents that are adjacent on the medium become one read.
        if let Some((before, Part::Stored(last))) = out.last_mut()
            && *before + last.checksums.len() as u64 == at
            && last.block + last.checksums.len() as u64 == run.start
            && last.offset + last.length() as u64 == stored.offset
        {
            last.checksums.append(&mut stored.checksums);
        } else {
            out.push((at, Part::Stored(stored)));
        }
        Ok(())
    }
}
