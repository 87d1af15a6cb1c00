//! Aligned memory for block I/O, which direct I/O uses without a copy. Dropped buffers are kept for reuse, because
//! fresh memory costs a page fault and a cleared page for each block.

mod kept;
mod mapping;

use kept::Memory;
pub use kept::release_idle;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// The unit of mapping, checksums and sharing, in bytes; also the alignment of all direct I/O.
pub const BLOCK_SIZE: usize = 4096;

/// One block of memory that is never used for direct I/O. It is aligned only for the integers in it, because memory
/// with greater alignment takes up to twice its size from the allocator.
#[repr(C, align(16))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Block(pub [u8; BLOCK_SIZE]);

/// One block of a buffer, aligned for direct I/O.
#[repr(C, align(4096))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Aligned([u8; BLOCK_SIZE]);

/// Consecutive blocks of memory, accessed as bytes.
pub struct Buffer {
    memory: Memory,
    /// Number of blocks in use.
    length: usize,
}

impl Default for Buffer {
    fn default() -> Self {
        Self { memory: Memory::Own(Vec::new()), length: 0 }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let mut copy = Self::recycled(self.length);
        copy.copy_from_slice(self);
        copy
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        std::mem::replace(&mut self.memory, Memory::Own(Vec::new())).keep();
    }
}

impl Buffer {
    /// `blocks` blocks of memory with arbitrary old content of this process: for callers that overwrite all of it
    /// before they read it.
    pub fn recycled(blocks: usize) -> Self {
        let class = blocks.next_power_of_two().ilog2() as usize;
        if blocks == 0 || class >= kept::CLASSES {
            return Self { memory: Memory::zeroed(blocks), length: blocks };
        }
        let mut memory = Memory::of(class);
        if let Memory::Own(own) = &mut memory {
            if own.is_empty() {
                *own = bytemuck::allocation::zeroed_vec(1 << class);
                own.truncate(blocks);
            }
            // Kept memory holds old content; only the blocks by which it grows here are zeroed.
            own.resize(blocks, bytemuck::Zeroable::zeroed());
        }
        Self { memory, length: blocks }
    }

    /// `blocks` blocks of zeros.
    pub fn zeroed(blocks: usize) -> Self {
        if blocks == 0 || blocks.next_power_of_two().ilog2() as usize >= kept::SLAB_CLASSES {
            return Self { memory: Memory::zeroed(blocks), length: blocks };
        }
        let mut buffer = Self::recycled(blocks);
        buffer.fill(0);
        buffer
    }

    /// A buffer of at least `bytes` bytes, rounded up to whole blocks, all zeros.
    pub fn with_bytes(bytes: usize) -> Self {
        Self::zeroed(bytes.div_ceil(BLOCK_SIZE))
    }

    /// A copy of `bytes`, padded with zeros to whole blocks.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::recycled(bytes.len().div_ceil(BLOCK_SIZE));
        buffer[..bytes.len()].copy_from_slice(bytes);
        buffer[bytes.len()..].fill(0);
        buffer
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.length
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.memory.blocks()[..self.length])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.memory.blocks_mut()[..self.length])
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} blocks)", self.length)
    }
}

/// A part of a buffer, which several owners read.
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

    /// A copy of `bytes`, at the beginning of a block of memory.
    pub fn copy_of(bytes: &[u8]) -> Self {
        Self { buffer: Arc::new(Buffer::copy_of(bytes)), start: 0, end: bytes.len() }
    }

    /// How many bytes lie between the first byte and the beginning of its block.
    pub fn lead(&self) -> usize {
        self.start % BLOCK_SIZE
    }

    /// A part of this slice.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len());
        Self { buffer: Arc::clone(&self.buffer), start: self.start + range.start, end: self.start + range.end }
    }
}

impl From<Buffer> for SharedSlice {
    fn from(buffer: Buffer) -> Self {
        let end = buffer.len();
        Self { buffer: Arc::new(buffer), start: 0, end }
    }
}

impl Deref for SharedSlice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }
}
