//! Filling: allocates and zeroes all of an extent. Thin and zeroed thick extents become eager zeroed thick (*inflate*).
//!
//! First all space is reserved, in one call, so that it is contiguous where possible, and so that a lack of space is
//! found before any change. Then each block is treated under its lock, by its state:
//!
//! ```text
//! hole, unwritten            zeros are written
//! written completely, as     nothing is done: the block has its space
//!   the file system reports
//! written in part            read and written back as it is
//! ```
//!
//! 1. From the beginning of the work, discards keep the space of their blocks. So a block found to be wholly written
//!    remains wholly written.
//! 2. Whether a block was ever written is read from the layer's own block sets. The file system's extent map lacks
//!    bytes that are still dirty in the page cache.
//! 3. Bytes are written back as they were read, so a power cut during the write changes no sector.
//! 4. After a cancellation, the extent has its old type and more space than before. Another call continues the work.

use super::blocks::BlockType;
use super::{FILE_BLOCK, Flat, Provisioning, interrupted};
use crate::{IoContext, Layer, Result};
use backend::{BLOCK_SIZE, Buffer, Placement};
use std::ops::Range;
use work::{Progress, Throttle};

/// Bytes written between two flushes: a guest's flush waits for no more than this.
const FLUSH_EVERY: u64 = 32 << 20;

impl Flat {
    /// Allocates and zeroes all of the extent, while the disk is in use. Durable on return.
    ///
    /// # Errors
    /// `NoSpace` with the extent unchanged; `Interrupted` when `progress` cancels.
    pub fn fill(&self, progress: &dyn Progress) -> Result<()> {
        let _work = self.begin_work()?;
        let before = self.provisioning();
        self.set_provisioning(Provisioning::EagerZeroedThick);
        // Waits for discards that began under the old provisioning type.
        drop(self.locks.alone(0..u64::MAX));
        let outcome = self.take_space().and_then(|()| self.fill_blocks(progress)).and_then(|()| self.flush());
        if outcome.is_err() {
            self.set_provisioning(before);
        }
        outcome
    }

    /// Reserves all space; on failure, frees what was reserved.
    fn take_space(&self) -> Result<()> {
        let length = self.bytes.end - self.bytes.start;
        let during = || format!("reserving {length} bytes of space for '{}'", self.name);
        let reserved = self.file.reserve(self.bytes.start, length).during(during);
        for block in 0..self.blocks.count() {
            if self.blocks.state(block) != BlockType::Hole {
                continue;
            }
            let _alone = self.locks.alone(block..block + 1);
            if self.blocks.state(block) == BlockType::Hole {
                match reserved {
                    Ok(()) => self.blocks.set(block, BlockType::Unwritten),
                    Err(_) => self.give_back(block..block + 1, &self.blocks.bytes_of(block..block + 1))?,
                }
            }
        }
        reserved
    }

    fn fill_blocks(&self, progress: &dyn Progress) -> Result<()> {
        let total = self.bytes.end - self.bytes.start;
        let throttle = Throttle::new(progress);
        let mut account = Account { flat: self, from: 0, known_to: 0, whole: Vec::new() };
        let mut memory = Buffer::default();
        let (mut unflushed, mut moved) = (0, 0);
        for block in 0..self.blocks.count() {
            let bytes = self.blocks.bytes_of(block..block + 1);
            let done = bytes.start - self.bytes.start;
            if throttle.step(done, total, std::mem::take(&mut moved)).is_break() {
                self.flush()?;
                return Err(interrupted("filling", &self.name));
            }
            if self.blocks.state(block) == BlockType::Written && account.is_whole(&bytes)? {
                continue;
            }
            let alone = self.locks.alone(block..block + 1);
            match self.blocks.state(block) {
                BlockType::Written => self.write_back(&bytes, &mut memory)?,
                _ => {
                    self.put_zeros(&bytes)?;
                    self.blocks.write(block..block + 1);
                }
            }
            drop(alone);
            moved += bytes.end - bytes.start;
            unflushed += bytes.end - bytes.start;
            if unflushed >= FLUSH_EVERY {
                self.flush()?;
                unflushed = 0;
            }
        }
        // At the end a cancellation has no effect any more.
        let _ = throttle.step(total, total, moved);
        Ok(())
    }

    /// Reads a block, which is locked exclusively, and writes the same bytes.
    fn write_back(&self, bytes: &Range<u64>, memory: &mut Buffer) -> Result<()> {
        if memory.is_empty() {
            *memory = Buffer::recycled(FILE_BLOCK as usize / BLOCK_SIZE);
        }
        let content = &mut memory[..(bytes.end - bytes.start) as usize];
        self.file.read_at(content, bytes.start).during(|| self.while_reading(bytes))?;
        self.put(bytes, &[content])
    }

    pub(super) fn while_reading(&self, range: &Range<u64>) -> String {
        let start = range.start - self.bytes.start;
        format!("reading {} bytes at {start} of '{}'", range.end - range.start, self.name)
    }
}

/// Which bytes are written, according to the file system. The information is loaded in parts as the work proceeds.
struct Account<'a> {
    flat: &'a Flat,
    /// The range for which `whole` is loaded.
    from: u64,
    known_to: u64,
    /// Runs of written bytes, merged, in order.
    whole: Vec<Range<u64>>,
}

impl Account<'_> {
    /// Whether every byte of `bytes` is written. Calls have to be in ascending order.
    fn is_whole(&mut self, bytes: &Range<u64>) -> Result<bool> {
        if bytes.start < self.from || bytes.end > self.known_to {
            self.ask(bytes.start)?;
        }
        let at = self.whole.partition_point(|run| run.end <= bytes.start);
        Ok(self.whole.get(at).is_some_and(|run| run.start <= bytes.start && bytes.end <= run.end))
    }

    fn ask(&mut self, from: u64) -> Result<()> {
        self.whole.clear();
        let flat = self.flat;
        let mut known_to = from;
        // If the loaded extents end within the block, the next part is loaded.
        while known_to < (from + FILE_BLOCK).min(flat.bytes.end) {
            let found: Vec<Placement> =
                flat.file.placements(known_to).during(|| format!("listing the allocated ranges of '{}'", flat.name))?;
            known_to = found.last().map_or(u64::MAX, |last| last.range.end.max(known_to + 1));
            for placement in found.into_iter().filter(|placement| placement.written) {
                match self.whole.last_mut() {
                    Some(run) if run.end == placement.range.start => run.end = placement.range.end,
                    _ => self.whole.push(placement.range),
                }
            }
        }
        (self.from, self.known_to) = (from, known_to);
        Ok(())
    }
}
