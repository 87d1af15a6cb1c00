//! Zeroing a range: by punching, by zeroing in the file system, or by writing zeros.
//!
//! | | space freed | space kept |
//! |---|---|---|
//! | thin | punch | whole blocks unwritten again, parts of written ones zeroed |
//! | zeroed thick | as for space kept | whole blocks unwritten again, parts of written ones zeroed |
//! | eager zeroed thick | as for space kept | zeros written |
//!
//! The provisioning type is read again under the locks of each step, because filling or punching may have changed it.

use super::blocks::BlockType;
use super::locks::ALONE_MAX;
use super::{FILE_BLOCK, Flat, Provisioning, zeros};
use crate::{IoContext, Result};
use backend::BLOCK_SIZE;
use std::io;
use std::ops::Range;

impl Flat {
    /// Makes bytes of the file read as zeros.
    pub(super) fn zero_bytes(&self, bytes: &Range<u64>, keep: bool) -> Result<()> {
        let blocks = self.blocks.touched(bytes);
        let mut block = blocks.start;
        while block < blocks.end {
            if self.provisioning() == Provisioning::Thin && !keep {
                // Blocks without space read as zeros already: the loop continues at the next block with space.
                match self.blocks.next_with_space(block, blocks.end) {
                    Some(next) => block = next,
                    None => return Ok(()),
                }
            }
            let end = blocks.end.min(block + ALONE_MAX);
            let part = self.blocks.bytes_of(block..end);
            let part = part.start.max(bytes.start)..part.end.min(bytes.end);
            if !self.zero_alone(block..end, &part, keep)? {
                self.write_zeros(&part)?;
            }
            block = end;
        }
        Ok(())
    }

    /// Zeroes one step with the blocks locked exclusively. Returns false if zeros have to be written, for which shared
    /// locks are enough.
    fn zero_alone(&self, blocks: Range<u64>, part: &Range<u64>, keep: bool) -> Result<bool> {
        if self.provisioning() == Provisioning::EagerZeroedThick {
            return Ok(false);
        }
        let _alone = self.locks.alone(blocks.clone());
        match self.provisioning() {
            Provisioning::EagerZeroedThick => return Ok(false),
            Provisioning::Thin if !keep => self.give_back(blocks, part)?,
            _ => self.keep_zeroed(blocks, part)?,
        }
        Ok(true)
    }

    /// Punches a hole. The caller has locked the blocks exclusively.
    pub(super) fn give_back(&self, blocks: Range<u64>, part: &Range<u64>) -> Result<()> {
        let during = || format!("freeing {} bytes of '{}'", part.end - part.start, self.name);
        let pages = self.whole_pages(part);
        self.file.punch(pages.start, pages.end - pages.start).during(during)?;
        for block in blocks {
            let bytes = self.blocks.bytes_of(block..block + 1);
            let whole = part.start <= bytes.start && bytes.end <= part.end && in_pages(&self.whole_pages(&bytes));
            let left = match whole {
                true => BlockType::Hole,
                // Querying the file system is slow, because it first allocates space for all dirty pages; thin disks
                // rarely need this.
                false if self.blocks.may_be_mixed() => self.look(block).during(during)?,
                false => match self.file.next_allocated(bytes.start).during(during)? {
                    Some(run) if run.start < bytes.end => self.blocks.state(block),
                    _ => BlockType::Hole,
                },
            };
            self.blocks.set(block, left);
        }
        Ok(())
    }

    /// Zeroes a range and keeps its space, or allocates it. The caller has locked the blocks exclusively.
    fn keep_zeroed(&self, blocks: Range<u64>, part: &Range<u64>) -> Result<()> {
        for block in blocks {
            let bytes = self.blocks.bytes_of(block..block + 1);
            let range = bytes.start.max(part.start)..bytes.end.min(part.end);
            let state = self.blocks.state(block);
            match state {
                BlockType::Unwritten => {}
                // A block becomes unwritten only as a whole, so that its state in `blocks` agrees with the file system.
                BlockType::Written if range != bytes || !in_pages(&range) => self.put_zeros(&range)?,
                _ => match self.file.zero_range(range.start, range.end - range.start) {
                    Ok(()) if in_pages(&range) => self.blocks.set(block, BlockType::Unwritten),
                    // A part of a page is zeroed by writing, so the block may still be partly written.
                    Ok(()) => self.blocks.set(block, self.look(block).unwrap_or(BlockType::Written)),
                    Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                        self.put_zeros(&range)?;
                        self.blocks.write(block..block + 1);
                    }
                    Err(error) => return Err(error).during(|| self.while_writing(&range)),
                },
            }
        }
        Ok(())
    }

    /// Writes zeros with shared locks, as for a guest write.
    fn write_zeros(&self, range: &Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let part = at..range.end.min(at + FILE_BLOCK);
            self.write_shared(&part, &[&zeros()[..(part.end - part.start) as usize]])?;
            at = part.end;
        }
        Ok(())
    }

    /// Writes zeros within one block, which the caller has locked exclusively.
    pub(super) fn put_zeros(&self, range: &Range<u64>) -> Result<()> {
        self.put(range, &[&zeros()[..(range.end - range.start) as usize]])
    }
}

/// Whether a range consists of whole pages: only whole pages can be holes or unwritten.
fn in_pages(range: &Range<u64>) -> bool {
    range.start.is_multiple_of(BLOCK_SIZE as u64) && range.end.is_multiple_of(BLOCK_SIZE as u64)
}
