//! How much of each region of a file is dirty: a byte for each MiB.
//!
//! The bytes are in chunks, which are allocated when a write reaches them: 1 KiB for 1 GiB of the file. A region counts
//! the blocks that were written, at most as many as it has. So scattered and sequential writes are counted exactly; one
//! block that is written again and again counts as a whole region at most, and once it does, a write only reads a byte.
//!
//! A chunk is marked as touched after a count was raised, and unmarked before counts are taken: a count that is not
//! zero is in a chunk that is touched, will be touched, or is being taken.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

const BLOCK: u64 = crate::BLOCK_SIZE as u64;
/// Bytes of the file in a region.
pub(super) const REGION: u64 = 1 << 20;
/// Regions of a chunk, chunks of a group, and groups: 64 TiB in all. Writes beyond that are not counted.
const REGIONS: u64 = 4096;
const CHUNKS: u64 = 128;
const GROUPS: u64 = 128;

struct Chunk {
    touched: AtomicBool,
    counts: Box<[AtomicU8]>,
}

type Group = Box<[OnceLock<Chunk>]>;

#[derive(Default)]
pub(super) struct DirtyMap {
    groups: OnceLock<Box<[OnceLock<Group>]>>,
}

fn empty<T>(count: u64) -> Box<[OnceLock<T>]> {
    (0..count).map(|_| OnceLock::new()).collect()
}

impl DirtyMap {
    fn chunk(&self, region: u64) -> &Chunk {
        let (group, chunk) = (region / (REGIONS * CHUNKS), region / REGIONS % CHUNKS);
        let group = self.groups.get_or_init(|| empty(GROUPS))[group as usize].get_or_init(|| empty(CHUNKS));
        group[chunk as usize].get_or_init(|| Chunk {
            touched: AtomicBool::new(false),
            counts: (0..REGIONS).map(|_| AtomicU8::new(0)).collect(),
        })
    }

    /// Counts a write, and returns by how many bytes the count has grown.
    pub(super) fn mark(&self, mut offset: u64, length: u64) -> u64 {
        let end = offset.saturating_add(length).min(REGION * REGIONS * CHUNKS * GROUPS);
        let mut added = 0;
        while offset < end {
            let region = offset / REGION;
            let part = end.min((region + 1) * REGION);
            let blocks = u8::try_from(part.div_ceil(BLOCK) - offset / BLOCK).unwrap_or(u8::MAX);
            let chunk = self.chunk(region);
            let raise = |count: u8| (count < u8::MAX).then(|| count.saturating_add(blocks));
            let count = &chunk.counts[(region % REGIONS) as usize];
            if let Ok(before) = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, raise) {
                added += u64::from(before.saturating_add(blocks) - before) * BLOCK;
                chunk.touched.store(true, Ordering::Release);
            }
            offset = part;
        }
        added
    }

    /// Takes all counts: calls `taken` with the offset of each dirty region, and with its bytes.
    pub(super) fn take(&self, mut taken: impl FnMut(u64, u64)) {
        for (group, chunks) in (0..).zip(self.groups.get().into_iter().flatten()) {
            for (chunk, regions) in (0..).zip(chunks.get().into_iter().flatten()) {
                let Some(regions) = regions.get().filter(|all| all.touched.swap(false, Ordering::AcqRel)) else {
                    continue;
                };
                for (region, count) in ((group * CHUNKS + chunk) * REGIONS..).zip(&regions.counts) {
                    if count.load(Ordering::Relaxed) > 0 {
                        taken(region * REGION, u64::from(count.swap(0, Ordering::Relaxed)) * BLOCK);
                    }
                }
            }
        }
    }
}
