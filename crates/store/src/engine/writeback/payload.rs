//! Writes journalled payload to the data files while no request waits for it. If a block was journalled several times,
//! only its newest payload is written.
//!
//! The journal protects the payload until the next checkpoint, so these writes need no announcement and no flush.
//! Payload must not be written before its record is in the journal.

use super::{LANE_DEPTH, SLICES_MAX};
use crate::engine::Engine;
use crate::space::Run;
use crate::{IoContext, Result};
use backend::{Queue, SharedSlice};

/// State that is kept between rounds.
pub struct LoggedLane {
    pub(crate) queue: Box<dyn Queue>,
    cursor: u64,
}

impl LoggedLane {
    pub(crate) fn new(queue: Box<dyn Queue>) -> Self {
        Self { queue, cursor: 0 }
    }
}

impl Engine {
    /// Writes up to `most` blocks of journalled payload to the data files, and returns their number. Payload with a
    /// record that is still pending is skipped: after a crash, recovery expects the older content.
    pub(crate) fn write_logged(&self, most: usize) -> Result<usize> {
        let mut lane = self.writeback.lock_logged();
        let (blocks, guard) = {
            let mut meta = self.meta.lock();
            let mut blocks: Vec<(u64, SharedSlice)> =
                meta.logged.range(lane.cursor..).take(most).map(|(block, slice)| (*block, slice.clone())).collect();
            if blocks.is_empty() {
                blocks = meta.logged.iter().take(most).map(|(block, slice)| (*block, slice.clone())).collect();
            }
            let last_seen = blocks.last().map_or(0, |(last, _)| *last + 1);
            let mut ready = Vec::with_capacity(blocks.len());
            for (block, slice) in blocks {
                if !meta.entry(block)?.held && !meta.in_flight.contains(block) {
                    ready.push((block, slice));
                }
            }
            // No block is claimed before all entries are read: after a failed read a claim would remain for ever.
            ready.iter().for_each(|(block, _)| meta.in_flight.claim(Run { start: *block, blocks: 1 }));
            lane.cursor = last_seen;
            if ready.is_empty() {
                return Ok(0);
            }
            (ready, meta.freed.guard())
        };
        let result = self.write_logged_blocks(&mut lane, &blocks);
        let mut meta = self.meta.lock();
        blocks.iter().for_each(|(block, _)| meta.in_flight.release(Run { start: *block, blocks: 1 }));
        if result.is_ok() {
            for (block, slice) in &blocks {
                // Newer payload of the block may have been journalled meanwhile.
                if meta.logged.get(block).is_some_and(|now| std::ptr::eq(now.as_ptr(), slice.as_ptr())) {
                    meta.logged.remove(block);
                }
            }
        }
        drop(meta);
        drop(guard);
        result.map(|()| blocks.len())
    }

    fn write_logged_blocks(&self, lane: &mut LoggedLane, blocks: &[(u64, SharedSlice)]) -> Result<()> {
        let mut completions = Vec::new();
        let mut at = 0;
        while at < blocks.len() || lane.queue.in_flight() > 0 {
            while at < blocks.len() && lane.queue.in_flight() < LANE_DEPTH as usize {
                let mut end = at + 1;
                while end < blocks.len() && blocks[end].0 == blocks[end - 1].0 + 1 && end - at < SLICES_MAX {
                    end += 1;
                }
                let mut run = Run { start: blocks[at].0, blocks: (end - at) as u64 };
                // A run never crosses from one data file into the next.
                let room = crate::FILE_BLOCKS - run.start % crate::FILE_BLOCKS;
                run.blocks = run.blocks.min(room);
                end = at + run.blocks as usize;
                let (file, offset) = self.files.locate(run).map_err(|error| self.stop(error))?;
                let slices = blocks[at..end].iter().map(|(_, slice)| slice.clone()).collect();
                lane.queue.write(&file, offset, slices, false, at as u64);
                at = end;
            }
            let waited = lane.queue.wait(&mut completions, None);
            waited.during(|| "writing journalled blocks".into()).map_err(|error| self.stop(error))?;
            for completion in completions.drain(..) {
                completion.result.during(|| "writing journalled blocks".into()).map_err(|error| self.stop(error))?;
            }
        }
        blocks.iter().for_each(|(block, _)| self.files.touch(Run { start: *block, blocks: 1 }));
        Ok(())
    }
}
