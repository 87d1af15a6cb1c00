//! Buffers that one session reuses, which saves zeroing and page faults for each read.
//!
//! Reused buffers have old contents, which never leave the session: a read overwrites its whole buffer before any byte
//! of it is used, and in the buffer of a write the device uses only the bytes that the client sent.

use super::limits::POOL_BYTES_MAX;
use backend::{BLOCK_SIZE, Buffer};
use disk::device::{ReadPlan, Segment};
use rustc_hash::FxHashMap;

/// Free buffers by their number of blocks.
#[derive(Default)]
pub struct Pool {
    free: FxHashMap<usize, Vec<Buffer>>,
    bytes: usize,
}

impl Pool {
    /// A buffer of `bytes` rounded up to whole blocks, with undefined content.
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

    /// Keeps a buffer for reuse, unless the kept buffers would exceed the limit. Otherwise all kept buffers are freed,
    /// because they have sizes that the client no longer requests.
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

    /// Keeps the buffers of a read for reuse.
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
