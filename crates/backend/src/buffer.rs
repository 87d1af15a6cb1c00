//! Memory for block I/O: aligned so that it can go to and from the medium without a copy.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// The unit of mapping, checksum and sharing, in bytes; also the alignment that direct I/O gets everywhere.
pub const BLOCK_SIZE: usize = 4096;

/// One block of memory, aligned for direct I/O.
#[repr(C, align(4096))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Block(pub [u8; BLOCK_SIZE]);

/// A run of whole blocks of memory, seen as bytes.
#[derive(Clone, Default)]
pub struct Buffer {
    blocks: Vec<Block>,
}

impl Buffer {
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
