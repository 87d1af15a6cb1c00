//! Memory for block I/O: aligned so that it can go to and from the medium without a copy, and kept when it is dropped,
//! because fresh memory costs a page fault and a cleared page for each block.

use parking_lot::Mutex;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// The unit of mapping, checksum and sharing, in bytes; also the alignment that direct I/O gets everywhere.
pub const BLOCK_SIZE: usize = 4096;

/// One block of memory, aligned for direct I/O.
#[repr(C, align(4096))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Block(pub [u8; BLOCK_SIZE]);

/// Kept memory is sorted by size: class `n` holds buffers of `1 << n` blocks and more, up to the largest request.
const CLASSES: usize = 14;
/// Bytes kept in each class at the most.
const KEPT_PER_CLASS: usize = 16 << 20;

static KEPT: [Mutex<Vec<Vec<Block>>>; CLASSES] = [const { Mutex::new(Vec::new()) }; CLASSES];

/// A run of whole blocks of memory, seen as bytes.
#[derive(Clone, Default)]
pub struct Buffer {
    blocks: Vec<Block>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let capacity = self.blocks.capacity();
        if capacity == 0 {
            return;
        }
        let class = capacity.ilog2() as usize;
        if class >= CLASSES || !capacity.is_power_of_two() {
            return;
        }
        let mut kept = KEPT[class].lock();
        if (kept.len() + 1) * capacity * BLOCK_SIZE <= KEPT_PER_CLASS {
            kept.push(std::mem::take(&mut self.blocks));
        }
    }
}

impl Buffer {
    /// `blocks` blocks of memory that may hold anything this process had in memory before: for callers that overwrite
    /// all of it before anybody looks.
    pub fn recycled(blocks: usize) -> Self {
        let size = blocks.next_power_of_two();
        let class = size.ilog2() as usize;
        if blocks == 0 || class >= CLASSES {
            return Self::zeroed(blocks);
        }
        let kept = KEPT[class].lock().pop();
        let mut memory = kept.unwrap_or_else(|| Vec::with_capacity(size));
        // Memory from the pool keeps its length; only what is new, or was cut off, is zeroed.
        memory.resize(blocks, bytemuck::Zeroable::zeroed());
        Self { blocks: memory }
    }

    /// `blocks` blocks of zeros.
    pub fn zeroed(blocks: usize) -> Self {
        Self { blocks: bytemuck::allocation::zeroed_vec(blocks) }
    }

    /// A buffer of at least `bytes` bytes, rounded up to whole blocks, all zeros.
    pub fn with_bytes(bytes: usize) -> Self {
        Self::zeroed(bytes.div_ceil(BLOCK_SIZE))
    }

    /// A copy of `bytes`, padded with zeros to whole blocks.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::with_bytes(bytes.len());
        buffer[..bytes.len()].copy_from_slice(bytes);
        buffer
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.blocks)
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.blocks)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} blocks)", self.blocks.len())
    }
}

/// A part of a buffer that several owners read.
#[derive(Clone, Debug)]
pub struct SharedSlice {
    buffer: Arc<Buffer>,
    start: usize,
    end: usize,
}

impl SharedSlice {
    /// The bytes `range` of `buffer`.
    ///
    /// # Panics
    /// When `range` does not lie within the buffer: a bug of the caller.
    pub fn new(buffer: Arc<Buffer>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= buffer.len());
        Self { buffer, start: range.start, end: range.end }
    }

    /// A part of this slice.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len());
        Self { buffer: Arc::clone(&self.buffer), start: self.start + range.start, end: self.start + range.end }
    }
}

impl Deref for SharedSlice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }
}
