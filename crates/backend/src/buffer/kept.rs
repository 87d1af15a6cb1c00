//! Memory of dropped buffers: kept for reuse, and returned to the kernel after it was not needed for a while.
//!
//! Each size class is a stack: buffers are taken from its top and put back there. The least length of the stack between
//! two calls of [`release_idle`] is therefore the number of buffers at its bottom that were not needed in that time.

use super::mapping::Mapping;
use super::{Aligned, BLOCK_SIZE};
use parking_lot::Mutex;
use rustix::mm::{Advice, madvise};

/// Kept memory is sorted by size: class `n` holds buffers of `1 << n` blocks and more, up to the largest request.
pub(super) const CLASSES: usize = 14;
/// The most bytes kept in each class of single allocations.
const KEPT_PER_CLASS: usize = 16 << 20;
/// Buffers of the first classes, up to 16 KiB, are cut from slabs. All slabs are kept: their number is bounded by the
/// limits on data in flight, in write buffers and in the read cache.
pub(super) const SLAB_CLASSES: usize = 3;
/// Memory from this class on (1 MiB) is mapped, so that a request with a long payload takes memory only as bytes
/// arrive.
const MAPPED_CLASS: usize = 8;
/// Blocks in a slab (1 MiB).
const SLAB_BLOCKS: usize = 256;
/// The most parts of slabs that are released before the lock is released and acquired again.
const RELEASED_AT_ONCE: usize = 64;

static KEPT: [Mutex<Kept>; CLASSES] = [const { Mutex::new(Kept::new()) }; CLASSES];

/// The kept memory of one class.
struct Kept {
    stack: Vec<Memory>,
    /// The least length of the stack since memory was last released.
    least: usize,
    /// Number of buffers at the bottom of the stack with pages that were returned to the kernel.
    released: usize,
}

impl Kept {
    const fn new() -> Self {
        Self { stack: Vec::new(), least: 0, released: 0 }
    }

    fn pop(&mut self) -> Option<Memory> {
        let memory = self.stack.pop();
        self.least = self.least.min(self.stack.len());
        self.released = self.released.min(self.stack.len());
        memory
    }
}

/// Where a buffer's bytes are.
pub(super) enum Memory {
    /// The bytes are in an allocation of their own, of which the first blocks are in use.
    Own(Vec<Aligned>),
    /// The bytes are in a mapping of their own.
    Mapped(Mapping),
    /// The bytes are in a part of a slab. Slabs are never freed, their parts are used again.
    Part(&'static mut [Aligned]),
}

impl Memory {
    pub fn blocks(&self) -> &[Aligned] {
        match self {
            Self::Own(blocks) => blocks,
            Self::Mapped(mapping) => mapping.blocks(),
            Self::Part(blocks) => blocks,
        }
    }

    pub fn blocks_mut(&mut self) -> &mut [Aligned] {
        match self {
            Self::Own(blocks) => blocks,
            Self::Mapped(mapping) => mapping.blocks_mut(),
            Self::Part(blocks) => blocks,
        }
    }

    /// New memory, all zeros.
    pub fn zeroed(blocks: usize) -> Self {
        let mapping = if blocks >> MAPPED_CLASS > 0 { Mapping::new(blocks) } else { None };
        mapping.map_or_else(|| Self::Own(bytemuck::allocation::zeroed_vec(blocks)), Self::Mapped)
    }

    /// Memory of `class`, kept or new.
    pub fn of(class: usize) -> Self {
        let mut kept = KEPT[class].lock();
        if let Some(memory) = kept.pop() {
            return memory;
        }
        let size = 1 << class;
        if class >= MAPPED_CLASS {
            // The lock is released first, because an allocation by the system may take long.
            drop(kept);
            return Self::zeroed(size);
        }
        if class >= SLAB_CLASSES {
            return Self::Own(Vec::with_capacity(size));
        }
        let slab = bytemuck::allocation::zeroed_vec::<Aligned>(SLAB_BLOCKS).leak();
        kept.stack.extend(slab.chunks_exact_mut(size).map(Self::Part));
        kept.stack.pop().expect("a slab has at least one part")
    }

    /// Keeps the memory for another buffer, if there is room.
    pub fn keep(self) {
        let capacity = match self {
            Self::Part(blocks) => return KEPT[blocks.len().ilog2() as usize].lock().stack.push(Self::Part(blocks)),
            Self::Own(ref blocks) => blocks.capacity(),
            Self::Mapped(ref mapping) => mapping.blocks().len(),
        };
        let class = if capacity.is_power_of_two() { capacity.ilog2() as usize } else { return };
        if (SLAB_CLASSES..CLASSES).contains(&class) {
            let mut kept = KEPT[class].lock();
            if (kept.stack.len() + 1) * capacity * BLOCK_SIZE <= KEPT_PER_CLASS {
                kept.stack.push(self);
            }
        }
    }

    /// Returns the pages of a slab's part to the kernel. The part reads as zeros afterwards, and its memory is
    /// allocated again when it is used.
    fn release(&mut self) {
        if let Self::Part(blocks) = self {
            // SAFETY: the range is whole pages (blocks are aligned to 4 KiB), borrowed for writing, and holds plain
            // bytes: any content is valid afterwards. Where pages are larger than 4 KiB, the call fails and changes
            // nothing.
            let given = unsafe { madvise(blocks.as_mut_ptr().cast(), size_of_val(*blocks), Advice::LinuxDontNeed) };
            // A failure is harmless: the pages stay allocated.
            let _ = given;
        }
    }
}

/// Returns to the kernel the memory that no buffer has needed since the last call. To be called every few seconds.
pub fn release_idle() {
    let mut any = false;
    for kept in &KEPT {
        loop {
            let freed: Vec<Memory> = {
                let mut kept = kept.lock();
                let idle = kept.least;
                if !matches!(kept.stack.first(), Some(Memory::Part(_))) {
                    kept.least -= idle;
                    kept.stack.drain(..idle).collect()
                } else {
                    let from = kept.released;
                    let to = idle.min(from + RELEASED_AT_ONCE);
                    if from < to {
                        kept.stack[from..to].iter_mut().for_each(Memory::release);
                        kept.released = to;
                        any = true;
                        continue;
                    }
                    Vec::new()
                }
            };
            // Frees the memory outside the lock, because freeing takes time.
            any |= !freed.is_empty();
            drop(freed);
            break;
        }
        let mut kept = kept.lock();
        kept.least = kept.stack.len();
    }
    if any {
        // The heap is trimmed only when buffers were released, so that a process with a steady load does not trim it
        // repeatedly.
        release_heap();
    }
}

/// Returns unused pages of the heap to the kernel: glibc keeps them between allocations.
#[cfg(target_env = "gnu")]
fn release_heap() {
    // SAFETY: the function takes no pointer, and may be called by any thread at any time.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn release_heap() {}
