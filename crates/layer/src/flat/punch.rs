//! Punching blocks that hold only zeros (*punchzero*): the extent becomes thin, and all file blocks of zeros are freed.
//!
//! A block is first read without a lock, which excludes most blocks with data. A block that reads as zeros is locked
//! exclusively and read again before it is punched. A power cut leaves a block punched or not, and it reads as zeros in
//! both cases.

use super::blocks::BlockType;
use super::locks::ALONE_MAX;
use super::{Flat, Provisioning, interrupted};
use crate::{IoContext, Layer, Result};
use backend::{BLOCK_SIZE, Buffer};
use std::ops::Range;
use work::{Progress, Throttle};

/// Bytes read at a time: most blocks with data have a byte other than zero in the first part.
const PART: u64 = 64 << 10;

impl Flat {
    /// Makes the extent thin and punches every file block that holds only zeros, while the disk is in use. Returns the
    /// number of punched blocks. Durable on return.
    ///
    /// # Errors
    /// `Interrupted` when `progress` cancels: the extent is thin then, and the blocks that were already punched stay
    /// punched.
    pub fn punch_zeros(&self, progress: &dyn Progress) -> Result<u64> {
        let _work = self.begin_work()?;
        self.set_provisioning(Provisioning::Thin);
        let total = self.bytes.end - self.bytes.start;
        let throttle = Throttle::new(progress);
        let mut memory = Buffer::recycled(PART as usize / BLOCK_SIZE);
        let (mut given_back, mut moved) = (0, 0);
        let mut block = 0;
        while let Some(next) = self.blocks.next_with_space(block, self.blocks.count()) {
            let done = self.blocks.bytes_of(next..next + 1).start - self.bytes.start;
            if throttle.step(done, total, std::mem::take(&mut moved)).is_break() {
                self.flush()?;
                return Err(interrupted("freeing zeros of", &self.name));
            }
            let (end, punched) = match self.blocks.state(next) {
                BlockType::Unwritten => self.punch_unwritten(next)?,
                _ => {
                    let (punched, read) = self.punch_if_zero(next, &mut memory)?;
                    moved += read;
                    (next + 1, punched)
                }
            };
            given_back += punched;
            block = end;
        }
        self.flush()?;
        let _ = throttle.step(total, total, moved);
        Ok(given_back)
    }

    /// Punches a run of unwritten blocks from `first` on, at most the blocks of one step. Unwritten blocks need not be
    /// read.
    fn punch_unwritten(&self, first: u64) -> Result<(u64, u64)> {
        let end = self.blocks.count().min(first + ALONE_MAX);
        let _alone = self.locks.alone(first..end);
        let run = (first..end).take_while(|block| self.blocks.state(*block) == BlockType::Unwritten).count() as u64;
        if run > 0 {
            self.give_back(first..first + run, &self.blocks.bytes_of(first..first + run))?;
        }
        // The run is empty if a guest has just written the first block: the caller then reads that block in its next
        // step.
        Ok((first + run, run))
    }

    /// Punches a block if it holds only zeros. Returns the number of blocks punched, and of bytes read.
    fn punch_if_zero(&self, block: u64, memory: &mut Buffer) -> Result<(u64, u64)> {
        let bytes = self.blocks.bytes_of(block..block + 1);
        let zeros = self.leading_zeros(&bytes, memory)?;
        if zeros < bytes.end - bytes.start {
            return Ok((0, zeros + PART));
        }
        let _alone = self.locks.alone(block..block + 1);
        let again = self.leading_zeros(&bytes, memory)?;
        if again < bytes.end - bytes.start {
            return Ok((0, zeros + again + PART));
        }
        self.give_back(block..block + 1, &bytes)?;
        // The block may keep a page that the extent shares with another part of the file.
        Ok((u64::from(self.blocks.state(block) == BlockType::Hole), zeros + again))
    }

    /// How many bytes from the start of the range read as zeros, in whole parts.
    fn leading_zeros(&self, bytes: &Range<u64>, memory: &mut Buffer) -> Result<u64> {
        let mut at = bytes.start;
        while at < bytes.end {
            let part = at..bytes.end.min(at + PART);
            let content = &mut memory[..(part.end - part.start) as usize];
            self.file.read_at(content, part.start).during(|| self.while_reading(&part))?;
            if !all_zero(content) {
                break;
            }
            at = part.end;
        }
        Ok(at - bytes.start)
    }
}

/// Whether all bytes are zero. Within a page there is no early exit, so that the compiler can use wide registers.
fn all_zero(bytes: &[u8]) -> bool {
    bytes.chunks(BLOCK_SIZE).all(|page| page.iter().fold(0, |sum, byte| sum | byte) == 0)
}
