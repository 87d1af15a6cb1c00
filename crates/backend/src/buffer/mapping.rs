//! Memory that the system hands out page by page: a page of a mapping is taken, and zeroed, when it is first used. The
//! allocator does not do that for memory with the alignment of blocks: it clears all of it at once, so that a request
//! would take what it announces instead of what has arrived of it.

use super::{Aligned, BLOCK_SIZE};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr::NonNull;

/// Blocks in a mapping of their own.
pub(super) struct Mapping {
    start: NonNull<Aligned>,
    blocks: usize,
}

// SAFETY: it owns its memory, which no thread is tied to.
unsafe impl Send for Mapping {}
// SAFETY: shared references only read.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `blocks` blocks of zeros. `None` for none, and where the system has no mapping left.
    pub fn new(blocks: usize) -> Option<Self> {
        let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the system chooses a place where nothing is mapped.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), blocks * BLOCK_SIZE, access, private) };
        Some(Self { start: NonNull::new(start.ok()?.cast())?, blocks })
    }

    pub fn blocks(&self) -> &[Aligned] {
        // SAFETY: the mapping is that long, begins with a page (4 KiB or more), and any bytes are valid blocks.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.blocks) }
    }

    pub fn blocks_mut(&mut self) -> &mut [Aligned] {
        // SAFETY: as in `blocks`; the mapping is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.blocks) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference to it is left.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.blocks * BLOCK_SIZE) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own: {unmapped:?}");
    }
}
