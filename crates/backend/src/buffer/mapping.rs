//! Memory that the kernel allocates page by page: a page of a mapping is allocated and zeroed at its first use. The
//! allocator, however, clears memory with the alignment of blocks when it is allocated. So a request would occupy
//! memory for its whole announced payload, instead of only for the part that has arrived.

use super::{Aligned, BLOCK_SIZE};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr::NonNull;

/// Blocks in a mapping of their own.
pub(super) struct Mapping {
    start: NonNull<Aligned>,
    blocks: usize,
}

// SAFETY: the value owns its memory, which is not tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: shared references only read.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `blocks` blocks of zeros. `None` if `blocks` is 0, or if the system refuses the mapping.
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
