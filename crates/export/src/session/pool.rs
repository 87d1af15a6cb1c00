//! Memory that one session uses again and again, so that reads do not pay for zeroing and page faults each time.
//!
//! Buffers come back with old contents. That is harmless where they go: a read overwrites all of its buffer before a
//! byte of it is looked at, and of a written buffer the device looks only at what the client sent.

use super::limits::POOL_BYTES_MAX;
use backend::{BLOCK_SIZE, Buffer};
use disk::device::{ReadPlan, Segment};
use std::collections::HashMap;

/// Free buffers by their number of blocks.
#[derive(Default)]
pub struct Pool {
    free: HashMap<usize, Vec<Buffer>>,
    bytes: usize,
}

impl Pool {
    /// A buffer of `bytes` rounded up to whole blocks, with any contents.
    pub fn take(&mut self, bytes: usize) -> Buffer {
        let blocks = bytes.div_ceil(BLOCK_SIZE);
        match self.free.get_mut(&blocks).and_then(Vec::pop) {
            Some(buffer) => {
                self.bytes -= buffer.len();
                buffer
            }
            None => Buffer::recycled(blocks),
        }
    }

    /// Keeps a buffer for later if there is room. When there is none, everything kept goes: it is of sizes that the
    /// client asks for no more.
    pub fn put(&mut self, buffer: Buffer) {
        if buffer.is_empty() || buffer.len() > POOL_BYTES_MAX {
            return;
        }
        if self.bytes + buffer.len() > POOL_BYTES_MAX {
            self.free.clear();
            self.bytes = 0;
        }
        self.bytes += buffer.len();
        self.free.entry(buffer.blocks()).or_default().push(buffer);
    }

    /// Keeps the memory of a read.
    pub fn put_plan(&mut self, plan: ReadPlan) {
        for segment in plan.segments {
            if let Segment::Media(media) = segment
                && let Some(buffer) = media.buffer
            {
                self.put(buffer);
            }
        }
    }
}
