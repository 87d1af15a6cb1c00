//! Packs of blocks that are being written, for disks whose new blocks are compressed at write-back.
//!
//! Writes that need new blocks anyway may get a pack instead of plain blocks: all blocks of an aligned window at once,
//! so that a pack never has to be read for a write. Blocks that can be overwritten in place stay plain, and so does
//! what is not worth a pack, and windows with data that is mapped to stored blocks (`equal`).
//! [`crate::engine::packing`] describes packs, and packs the rest later.
//!
//! What must hold:
//!
//! 1. The superblock says that writes may go into packs before the first one does ([`VERSION_WRITTEN_PACKS`]).
//! 2. A pack replaces no block that a buffered write may overwrite in place without a claim on a free block. So a write
//!    that bypasses the buffer may use packs, because nothing of its range is buffered.
//! 3. Nothing is compressed under a lock that reads or other writes need.

use super::equal::EqualRuns;
use super::plan::{BlockWrite, Origin};
use crate::buffer::{Content, DirtyPiece};
use crate::engine::log::VERSION_WRITTEN_PACKS;
use crate::engine::metadata::Fetch;
use crate::engine::packing::{WINDOW, most_worth};
use crate::engine::placement::Placement;
use crate::engine::{Buffer as EngineBuffer, Engine, Head, Meta};
use crate::pack::{Codec, Index, Packer, WHOLE_MAX};
use crate::space::Run;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, RwLock};
use crate::{Result, checksum};
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;
use std::sync::Arc;

/// One of this many blocks of a window is compressed first. If none of these blocks shrinks, the others are not tried:
/// data that cannot be compressed is then written almost as fast as without compression.
const SAMPLE_STRIDE: u64 = 8;

/// A pack for blocks that are being written.
pub struct NewPack {
    /// The logical blocks.
    pub blocks: Range<u64>,
    /// The pack, in whole blocks.
    pub bytes: Buffer,
}

impl NewPack {
    /// Length in physical blocks.
    pub fn stored(&self) -> u64 {
        (self.bytes.len() / BLOCK_SIZE) as u64
    }

    /// The checksums of the physical blocks.
    pub fn checksums(&self) -> Vec<u32> {
        self.bytes.chunks_exact(BLOCK_SIZE).map(checksum).collect()
    }
}

/// Consecutive parts of buffered entries that are in one pack.
pub struct PackedEntries {
    /// The parts, each with the stamp of its write.
    pub parts: Vec<(Range<u64>, u64)>,
    /// The checksum of the content of each block.
    pub checksums: Vec<u32>,
}

/// A pack of buffered blocks.
pub struct BufferedPack {
    /// The logical blocks.
    pub blocks: Range<u64>,
    data: SharedSlice,
    checksums: Vec<u32>,
    entries: Arc<PackedEntries>,
}

impl BufferedPack {
    fn new(pack: NewPack, entries: PackedEntries) -> Self {
        let (checksums, length) = (pack.checksums(), pack.bytes.len());
        let data = SharedSlice::new(Arc::new(pack.bytes), 0..length);
        Self { blocks: pack.blocks, data, checksums, entries: Arc::new(entries) }
    }

    /// Length in physical blocks.
    pub fn stored(&self) -> u64 {
        self.checksums.len() as u64
    }

    /// Whether the pack is made of entries that are still the same, and whose blocks all need new places. `new` has
    /// these parts of the entries in ascending order, with the stamps of their writes.
    pub fn is_of(&self, new: &[(Range<u64>, u64)]) -> bool {
        self.entries.parts.iter().all(|(part, stamp)| {
            let at = new.partition_point(|(range, _)| range.end <= part.start);
            let of = new.get(at).filter(|(_, of)| of == stamp);
            of.is_some_and(|(range, _)| range.start <= part.start && part.end <= range.end)
        })
    }

    /// The write of the pack to newly allocated blocks.
    pub fn write_to(&self, run: Run) -> BlockWrite {
        BlockWrite {
            placement: Placement::New,
            logical: self.blocks.clone(),
            run,
            data: self.data.clone(),
            checksums: self.checksums.clone(),
            origin: Origin::Packed(Arc::clone(&self.entries)),
        }
    }
}

/// The compression of the writes to one disk.
pub struct WritePacker {
    codec: Codec,
    /// Packers that no write uses now.
    idle: Mutex<Vec<Packer>>,
    /// Set if a pack was not used: the next batch of write-back stores its blocks plainly, so that it makes progress
    /// whatever clients write meanwhile.
    plain: AtomicBool,
}

impl WritePacker {
    fn new(codec: Codec) -> Self {
        Self { codec, idle: Mutex::default(), plain: AtomicBool::new(false) }
    }

    /// The windows of 128 KiB that lie in a range as a whole.
    pub fn windows(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let (first, end) = (range.start.div_ceil(WINDOW), range.end / WINDOW);
        (first..end).map(|window| window * WINDOW..(window + 1) * WINDOW)
    }

    /// Compresses the blocks of a window. `None` if the data is not worth a pack.
    fn pack(&self, packer: &mut Packer, window: Range<u64>, data: &[u8]) -> Option<NewPack> {
        let blocks: Vec<&[u8]> = data.chunks_exact(BLOCK_SIZE).collect();
        let mut sample = blocks.iter().step_by(SAMPLE_STRIDE as usize);
        if !sample.any(|block| packer.shrinks(block)) {
            return None;
        }
        let blocks: Vec<Option<&[u8]>> = blocks.into_iter().map(Some).collect();
        let pack = NewPack { blocks: window, bytes: Buffer::copy_of(&packer.pack(&blocks)) };
        (pack.stored() <= most_worth(WINDOW)).then_some(pack)
    }

    /// Compresses windows of consecutive blocks. `data` begins with logical block `first`. If the codec cannot be
    /// started, nothing is compressed.
    pub fn packs(&self, windows: impl Iterator<Item = Range<u64>>, first: u64, data: &[u8]) -> Vec<NewPack> {
        let idle = self.idle.lock().pop();
        let mut packer = match idle.map_or_else(|| Packer::new(self.codec), Ok) {
            Ok(packer) => packer,
            Err(error) => {
                tracing::warn!(%error, "writes are not compressed");
                return Vec::new();
            }
        };
        let part = |block: u64| (block - first) as usize * BLOCK_SIZE;
        let packs = windows.filter_map(|window| {
            let data = &data[part(window.start)..part(window.end)];
            self.pack(&mut packer, window, data)
        });
        let packs = packs.collect();
        self.idle.lock().push(packer);
        packs
    }
}

/// The disks whose writes are compressed.
#[derive(Default)]
pub struct PackedWrites {
    /// Whether there are any: otherwise writes only test this.
    any: AtomicBool,
    disks: RwLock<FxHashMap<u64, Arc<WritePacker>>>,
}

impl PackedWrites {
    /// The compression of the writes to a disk, if there is one.
    pub fn of(&self, disk: u64) -> Option<Arc<WritePacker>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        self.disks.read().get(&disk).cloned()
    }

    /// Compresses the writes to these disks, beside the others.
    fn add(&self, disks: &[(u64, Codec)]) {
        let mut set = self.disks.write();
        for (disk, codec) in disks {
            if set.get(disk).is_none_or(|packer| packer.codec != *codec) {
                set.insert(*disk, Arc::new(WritePacker::new(*codec)));
            }
        }
        self.any.store(!set.is_empty(), Ordering::Release);
    }

    /// Ends the compression of the writes to other disks.
    fn retain(&self, disks: &[(u64, Codec)]) {
        let kept: FxHashSet<u64> = disks.iter().map(|(disk, _)| *disk).collect();
        let mut set = self.disks.write();
        set.retain(|disk, _| kept.contains(disk));
        self.any.store(!set.is_empty(), Ordering::Release);
    }
}

impl Meta {
    /// Keeps the index of a pack that was mapped just now, so that the first short read of each block needs no read of
    /// the index.
    pub(super) fn keep_new_index(&self, pack: Run, bytes: &[u8]) {
        if pack.blocks > WHOLE_MAX
            && self.read_cache.holds_indexes()
            && let Ok(index) = Index::decode(bytes, bytes.len())
        {
            self.read_cache.keep_index(pack.start, Arc::new(index));
        }
    }
}

impl Engine {
    /// Compresses those windows of a batch of write-back that are buffered as a whole and are mapped nowhere
    /// yet, or only to blocks that other trees share, and have no data that is `equal` to stored blocks, if
    /// [`Engine::reduces_batch`].
    pub(in crate::engine) fn packs_of_batch(
        &self,
        head: &Head,
        pieces: &[DirtyPiece],
        equal: &EqualRuns<'_>,
    ) -> Vec<BufferedPack> {
        let Some(packer) = self.writeback.packed.of(head.id) else { return Vec::new() };
        if packer.plain.swap(false, Ordering::AcqRel) || !self.reduces_batch(head.id) {
            return Vec::new();
        }
        let mut packs = Vec::new();
        // Runs of adjacent entries with data.
        for run in pieces.chunk_by(|left, right| left.is_data() && right.is_data() && left.end() == right.logical) {
            let (Some(first), Some(last)) = (run.first().filter(|first| first.is_data()), run.last()) else { continue };
            for window in self.windows_to_write(head, first.logical..last.end(), equal) {
                let inside = run.iter().filter(|piece| piece.logical < window.end && window.start < piece.end());
                let inside =
                    inside.map(|piece| piece.part(piece.logical.max(window.start)..piece.end().min(window.end)));
                let inside: Vec<DirtyPiece> = inside.collect();
                let (mut data, mut checksums) = (Vec::with_capacity(WINDOW as usize * BLOCK_SIZE), Vec::new());
                for piece in &inside {
                    if let Content::Data(slice, sums) = &piece.entry.content {
                        data.extend_from_slice(slice);
                        checksums.extend_from_slice(sums.as_slice());
                    }
                }
                let parts = inside.iter().map(|piece| (piece.logical..piece.end(), piece.entry.stamp)).collect();
                let pack = packer.packs(std::iter::once(window.clone()), window.start, &data).pop();
                packs.extend(pack.map(|pack| BufferedPack::new(pack, PackedEntries { parts, checksums })));
            }
        }
        packs
    }

    /// The windows in a range of a disk of which all blocks need new places, and none is `equal` to a stored one. Pages
    /// of the map that are not in memory are not read: their windows are left out. So are those of a disk that was
    /// deleted meanwhile, and after an error, which the write itself reports.
    pub(super) fn windows_to_write(&self, head: &Head, range: Range<u64>, equal: &EqualRuns<'_>) -> Vec<Range<u64>> {
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        let Some(root) = meta.catalog.find(head.id).map(|object| object.root) else { return Vec::new() };
        let (mut fetch, mut places) = (Fetch::default(), Vec::new());
        if fetch.require(meta, |meta| meta.placements(root, range, &mut places)).is_err() {
            return Vec::new();
        }
        let new = places.into_iter().filter(|(_, placement, _)| *placement == Placement::New);
        let windows = new.flat_map(|(range, _, _)| WritePacker::windows(&range));
        windows.filter(|window| !equal.concern(window)).collect()
    }

    /// Called when a pack of buffered blocks is written, with the buffer locked: whether the map may refer to it. It
    /// may not if other writes to the blocks are buffered that may have no claim on free blocks.
    pub(super) fn may_use_pack(
        &self,
        disk: u64,
        buffer: &EngineBuffer,
        blocks: &Range<u64>,
        of: &PackedEntries,
    ) -> bool {
        let mut others = buffer.layers.iter().flat_map(|layer| layer.pieces(blocks)).filter(|piece| {
            !of.parts.iter().any(|(part, stamp)| piece.entry.stamp == *stamp && part.contains(&piece.logical))
        });
        let may = others.all(|piece| {
            matches!(piece.entry.content, Content::Unmapped) || piece.entry.claimed && piece.entry.covered
        });
        if !may && let Some(packer) = self.writeback.packed.of(disk) {
            packer.plain.store(true, Ordering::Release);
        }
        may
    }

    /// Compresses new blocks of these disks, of which none may be thick, when they are written.
    ///
    /// # Errors
    /// Those of writing the superblock, which says from then on that the datastore may have such packs.
    pub fn pack_writes(&self, disks: &[(u64, Codec)]) -> Result<()> {
        if !disks.is_empty() && !self.log.has_written_packs() {
            self.require_version(VERSION_WRITTEN_PACKS)?;
        }
        self.writeback.packed.add(disks);
        Ok(())
    }

    /// As [`Engine::pack_writes`], for these disks, and for no other disk.
    ///
    /// # Errors
    /// Those of [`Engine::pack_writes`].
    pub fn pack_writes_of(&self, disks: &[(u64, Codec)]) -> Result<()> {
        self.pack_writes(disks)?;
        self.writeback.packed.retain(disks);
        Ok(())
    }
}
