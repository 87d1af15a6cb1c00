//! ext2, ext3 and ext4: block groups with a bitmap each.
//!
//! Source: the Linux kernel's documentation of ext4's data structures (`Documentation/filesystems/ext4`).
//!
//! 1. Only the primary superblock and descriptors are read. With `metadata_csum` the checksums of superblock,
//!    descriptors and bitmaps are verified, with `uninit_bg` those of the descriptors.
//! 2. The number of clear bits of every group is the number of free blocks that its descriptor states.
//! 3. The metadata of all groups is known before the first bitmap is read, because with `flex_bg` a group contains
//!    metadata of other groups. A group in which metadata is free counts as in use.
//! 4. The bitmap of a group with BLOCK_UNINIT is not on the disk: everything but metadata is free. Such a group counts
//!    as in use if the descriptor of any group is damaged, because metadata of that group may be in it.

use crate::bitmap::{all_set, clear_runs, set};
use crate::fields::{byte, crc16, crc32c_register, le16, le32};
use crate::{EachFree, Outcome, Stop, Volume, refused};
use std::ops::Range;

/// Most block groups. A file system of 128 TiB with blocks of 4 KiB has as many.
const GROUPS_MAX: u64 = 1 << 20;
const SUPERBLOCK: u64 = 1024;
const SUPERBLOCK_LENGTH: u64 = 1024;
const SUPERBLOCK_CHECKSUM: usize = 0x3FC;
const DESCRIPTOR_CHECKSUM: usize = 0x1E;
/// Length of a descriptor without the feature `64bit`.
const DESCRIPTOR_SHORT: usize = 32;
/// Shortest descriptor with the upper half of the bitmap's checksum.
const DESCRIPTOR_WITH_HIGH: usize = 0x3A;

const STATE_VALID: u16 = 1;
const STATE_ERROR: u16 = 2;

const COMPAT_HAS_JOURNAL: u32 = 0x4;
const COMPAT_SPARSE_SUPER2: u32 = 0x200;

const INCOMPAT_RECOVER: u32 = 0x4;
const INCOMPAT_JOURNAL_DEVICE: u32 = 0x8;
const INCOMPAT_META_BG: u32 = 0x10;
const INCOMPAT_EXTENTS: u32 = 0x40;
const INCOMPAT_64BIT: u32 = 0x80;
const INCOMPAT_FLEX_BG: u32 = 0x200;
const INCOMPAT_CSUM_SEED: u32 = 0x2000;
/// filetype, meta_bg, extents, 64bit, mmp, flex_bg, ea_inode, csum_seed, largedir, inline_data, encrypt, casefold.
const INCOMPAT_KNOWN: u32 = 0x2
    | INCOMPAT_META_BG
    | INCOMPAT_EXTENTS
    | INCOMPAT_64BIT
    | 0x100
    | INCOMPAT_FLEX_BG
    | 0x400
    | INCOMPAT_CSUM_SEED
    | 0x4000
    | 0x8000
    | 0x1_0000
    | 0x2_0000;

const RO_COMPAT_SPARSE_SUPER: u32 = 0x1;
const RO_COMPAT_GDT_CSUM: u32 = 0x10;
const RO_COMPAT_BIGALLOC: u32 = 0x200;
const RO_COMPAT_METADATA_CSUM: u32 = 0x400;
const RO_COMPAT_ORPHAN_PRESENT: u32 = 0x1_0000;
/// sparse_super, large_file, dir_index, huge_file, uninit_bg, dir_nlink, extra_isize, quota, metadata_csum, read-only,
/// project, verity.
const RO_COMPAT_KNOWN: u32 = RO_COMPAT_SPARSE_SUPER
    | 0x2
    | 0x4
    | 0x8
    | RO_COMPAT_GDT_CSUM
    | 0x20
    | 0x40
    | 0x100
    | RO_COMPAT_METADATA_CSUM
    | 0x1000
    | 0x2000
    | 0x8000;

const BLOCK_UNINIT: u16 = 2;

/// The superblock, as far as the place of metadata depends on it.
struct Geometry {
    /// Bytes of a block.
    block: u64,
    /// Number of blocks.
    blocks: u64,
    /// The first block of the first group.
    first: u64,
    per_group: u64,
    /// Blocks of an inode table.
    table: u64,
    descriptor: usize,
    groups: u64,
    /// Blocks of descriptors, without `meta_bg`.
    descriptor_blocks: u64,
    /// Blocks kept for the growth of the descriptors.
    kept: u64,
    first_meta_group: u64,
    /// The groups with copies of the superblock, with `sparse_super2`.
    copies: [u64; 2],
    compat: u32,
    incompat: u32,
    ro_compat: u32,
    uuid: [u8; 16],
    /// The register from which checksums begin.
    seed: u32,
}

/// What a descriptor states.
#[derive(Clone, Copy)]
struct Group {
    bitmap: u64,
    inode_bitmap: u64,
    table: u64,
    free: u64,
    flags: u16,
    checksum: u32,
}

/// A file system of the family.
pub(crate) struct Ext<'a> {
    volume: Volume<'a>,
    geometry: Geometry,
    /// `None` for a damaged descriptor.
    groups: Vec<Option<Group>>,
    /// Whether all descriptors are sound.
    is_whole: bool,
    /// All blocks of metadata at fixed places, in ascending ranges.
    metadata: Vec<Range<u64>>,
}

impl Geometry {
    fn decode(bytes: &[u8], length: u64) -> Outcome<Self> {
        let has_features = le32(bytes, 0x4C) > 0;
        let feature = |at| if has_features { le32(bytes, at) } else { 0 };
        let (compat, incompat, ro_compat) = (feature(0x5C), feature(0x60), feature(0x64));
        check_features(incompat, ro_compat)?;
        check_state(bytes)?;
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[0x68..0x78]);
        if ro_compat & RO_COMPAT_METADATA_CSUM != 0 {
            if byte(bytes, 0x175) != 1 {
                return refused("its checksums are of an unknown type");
            }
            let sum = crc32c_register(!0, &[&bytes[..SUPERBLOCK_CHECKSUM]]);
            if sum != le32(bytes, SUPERBLOCK_CHECKSUM) {
                return refused("the checksum of the superblock does not match");
            }
        }
        let is_wide = incompat & INCOMPAT_64BIT != 0;
        let (order, per_group, inodes) = (le32(bytes, 0x18), u64::from(le32(bytes, 0x20)), le32(bytes, 0x28));
        if order > 6 {
            return refused("the size of its blocks is invalid");
        }
        let block = 1024_u64 << order;
        let blocks = u64::from(le32(bytes, 0x4)) | if is_wide { u64::from(le32(bytes, 0x150)) << 32 } else { 0 };
        let first = u64::from(le32(bytes, 0x14));
        if blocks.checked_mul(block).is_none_or(|bytes| bytes > length) {
            return refused(format!("its {blocks} blocks of {block} bytes reach beyond the volume"));
        }
        let inode = if has_features { u64::from(le16(bytes, 0x58)) } else { 128 };
        let descriptor = if is_wide { usize::from(le16(bytes, 0xFE)) } else { DESCRIPTOR_SHORT };
        let is_valid = first == u64::from(block == 1024)
            && first < blocks
            && (1..=8 * block).contains(&per_group)
            && per_group.is_multiple_of(8)
            && (1..=8 * block).contains(&u64::from(inodes))
            && inode.is_power_of_two()
            && (128..=block).contains(&inode)
            && descriptor.is_power_of_two()
            && (if is_wide { 64 } else { 32 }..=1024).contains(&descriptor);
        if !is_valid {
            return refused("its superblock is inconsistent");
        }
        let groups = (blocks - first).div_ceil(per_group);
        if groups > GROUPS_MAX {
            return refused(format!("it has {groups} block groups, more than {GROUPS_MAX}"));
        }
        let descriptor_blocks = groups.div_ceil(block / descriptor as u64);
        let (kept, first_meta_group) = (u64::from(le16(bytes, 0xCE)), u64::from(le32(bytes, 0x104)));
        if groups * u64::from(inodes) != u64::from(le32(bytes, 0)) || first_meta_group > descriptor_blocks {
            return refused("its superblock is inconsistent");
        }
        let seed = match incompat & INCOMPAT_CSUM_SEED {
            0 => crc32c_register(!0, &[&uuid]),
            _ => le32(bytes, 0x270),
        };
        Ok(Self {
            block,
            blocks,
            first,
            per_group,
            table: (u64::from(inodes) * inode).div_ceil(block),
            descriptor,
            groups,
            descriptor_blocks,
            kept: if has_features { kept } else { 0 },
            first_meta_group,
            copies: [le32(bytes, 0x24C), le32(bytes, 0x250)].map(u64::from),
            compat,
            incompat,
            ro_compat,
            uuid,
            seed,
        })
    }

    fn has_meta_groups(&self) -> bool {
        self.incompat & INCOMPAT_META_BG != 0
    }

    fn is_summed(&self) -> bool {
        self.ro_compat & RO_COMPAT_METADATA_CSUM != 0
    }

    /// Whether descriptors have checksums, and so may have flags.
    fn has_flags(&self) -> bool {
        self.ro_compat & (RO_COMPAT_METADATA_CSUM | RO_COMPAT_GDT_CSUM) != 0
    }

    fn descriptors_in_block(&self) -> u64 {
        self.block / self.descriptor as u64
    }

    fn blocks_of(&self, group: u64) -> Range<u64> {
        let begin = self.first + group * self.per_group;
        begin..(begin + self.per_group).min(self.blocks)
    }

    /// Whether a group begins with a copy of the superblock.
    fn has_superblock(&self, group: u64) -> bool {
        let is_power = |base: u64| {
            let mut power = base;
            while power < group {
                power *= base;
            }
            power == group
        };
        if group == 0 {
            return true;
        }
        if self.compat & COMPAT_SPARSE_SUPER2 != 0 {
            return self.copies.contains(&group);
        }
        self.ro_compat & RO_COMPAT_SPARSE_SUPER == 0 || group == 1 || [3, 5, 7].into_iter().any(is_power)
    }

    /// The block of the descriptors with a number.
    fn descriptor_block(&self, number: u64) -> u64 {
        if !self.has_meta_groups() || number < self.first_meta_group {
            return self.first + 1 + number;
        }
        let group = number * self.descriptors_in_block();
        self.first + group * self.per_group + u64::from(self.has_superblock(group))
    }

    /// The blocks at the beginning of a group for the superblock and the descriptors.
    fn head_of(&self, group: u64) -> Range<u64> {
        let begin = self.blocks_of(group).start;
        let superblock = u64::from(self.has_superblock(group));
        let in_block = self.descriptors_in_block();
        let length = if self.has_meta_groups() && group / in_block >= self.first_meta_group {
            superblock + u64::from([0, 1, in_block - 1].contains(&(group % in_block)))
        } else if superblock == 0 {
            0
        } else {
            let old = if self.has_meta_groups() { self.first_meta_group } else { self.descriptor_blocks };
            superblock + old + self.kept
        };
        begin..begin + length
    }

    /// Decodes a descriptor; `None` if it is damaged.
    fn group(&self, number: u64, bytes: &[u8]) -> Option<Group> {
        let is_wide = self.descriptor >= 64;
        let high = |at| if is_wide { u64::from(le32(bytes, at)) << 32 } else { 0 };
        let place = |at, above| u64::from(le32(bytes, at)) | high(above);
        let group = Group {
            bitmap: place(0, 0x20),
            inode_bitmap: place(4, 0x24),
            table: place(8, 0x28),
            free: u64::from(le16(bytes, 0xC)) | if is_wide { u64::from(le16(bytes, 0x2C)) << 16 } else { 0 },
            flags: le16(bytes, 0x12),
            checksum: u32::from(le16(bytes, 0x18))
                | if self.descriptor >= DESCRIPTOR_WITH_HIGH { u32::from(le16(bytes, 0x38)) << 16 } else { 0 },
        };
        let (before, behind) = (bytes.get(..DESCRIPTOR_CHECKSUM)?, bytes.get(DESCRIPTOR_CHECKSUM + 2..)?);
        let number_bytes = (number as u32).to_le_bytes();
        let sum = if self.is_summed() {
            Some(crc32c_register(self.seed, &[&number_bytes, before, &[0; 2], behind]) as u16)
        } else if self.has_flags() {
            let sum = crc16(crc16(crc16(!0, &self.uuid), &number_bytes), before);
            Some(if is_wide { crc16(sum, behind) } else { sum })
        } else {
            None
        };
        // Without flex_bg, the metadata of a group is in the group.
        let allowed = match self.incompat & INCOMPAT_FLEX_BG {
            0 => self.blocks_of(number),
            _ => self.first..self.blocks,
        };
        let is_inside = |place: u64, length: u64| {
            allowed.contains(&place) && place.checked_add(length).is_some_and(|end| end <= allowed.end)
        };
        let is_sound = sum.is_none_or(|sum| sum == le16(bytes, DESCRIPTOR_CHECKSUM))
            && is_inside(group.bitmap, 1)
            && is_inside(group.inode_bitmap, 1)
            && is_inside(group.table, self.table);
        is_sound.then_some(group)
    }
}

fn check_features(incompat: u32, ro_compat: u32) -> Outcome<()> {
    if incompat & INCOMPAT_JOURNAL_DEVICE != 0 {
        return refused("it is the journal of another file system");
    }
    if incompat & INCOMPAT_RECOVER != 0 {
        return refused("it was not cleanly unmounted: its journal needs recovery");
    }
    if ro_compat & RO_COMPAT_BIGALLOC != 0 {
        return refused("it allocates clusters (bigalloc), which is not supported");
    }
    if ro_compat & RO_COMPAT_ORPHAN_PRESENT != 0 {
        return refused("it was not cleanly unmounted: deleted files are not removed yet");
    }
    let unknown = (incompat & !INCOMPAT_KNOWN, ro_compat & !RO_COMPAT_KNOWN);
    if unknown != (0, 0) {
        return refused(format!(
            "it has features that are not supported (incompat {:#x}, ro_compat {:#x})",
            unknown.0, unknown.1
        ));
    }
    Ok(())
}

fn check_state(bytes: &[u8]) -> Outcome<()> {
    let state = le16(bytes, 0x3A);
    if state & STATE_ERROR != 0 {
        return refused("it has errors: let its guest check it");
    }
    if state & STATE_VALID == 0 {
        return refused("it was not cleanly unmounted");
    }
    if le32(bytes, 0xE8) != 0 {
        return refused("it was not cleanly unmounted: deleted files are not removed yet");
    }
    Ok(())
}

impl<'a> Ext<'a> {
    /// Reads the superblock and all descriptors.
    pub fn open(volume: Volume<'a>) -> Outcome<Self> {
        let geometry = Geometry::decode(&volume.read(SUPERBLOCK, SUPERBLOCK_LENGTH)?, volume.length())?;
        let mut groups = Vec::with_capacity(geometry.groups as usize);
        for number in 0..geometry.descriptor_blocks {
            let at = geometry.descriptor_block(number).saturating_mul(geometry.block);
            let block = match volume.read(at, geometry.block) {
                Ok(block) => block,
                Err(Stop::Refused(_)) => Vec::new(),
                Err(failed) => return Err(failed),
            };
            for index in 0..geometry.descriptors_in_block() {
                let group = groups.len() as u64;
                if group == geometry.groups {
                    break;
                }
                let from = index as usize * geometry.descriptor;
                let bytes = block.get(from..from + geometry.descriptor);
                groups.push(bytes.and_then(|bytes| geometry.group(group, bytes)));
            }
        }
        let metadata = metadata(&geometry, &groups)?;
        let is_whole = groups.iter().all(Option::is_some);
        Ok(Self { volume, geometry, groups, is_whole, metadata })
    }

    pub fn name(&self) -> &'static str {
        let geometry = &self.geometry;
        if geometry.incompat & (INCOMPAT_EXTENTS | INCOMPAT_64BIT | INCOMPAT_FLEX_BG) != 0 {
            "ext4"
        } else if geometry.compat & COMPAT_HAS_JOURNAL != 0 {
            "ext3"
        } else {
            "ext2"
        }
    }

    pub fn size(&self) -> u64 {
        self.geometry.blocks * self.geometry.block
    }

    pub fn groups(&self) -> u64 {
        self.geometry.groups
    }

    /// The free ranges of a group.
    pub fn free_of(&self, number: u64, each: EachFree<'_>) -> Outcome<()> {
        let Some(group) = self.groups.get(number as usize).copied().flatten() else {
            return refused("its descriptor is damaged");
        };
        let geometry = &self.geometry;
        let blocks = geometry.blocks_of(number);
        let map = self.map_of(&group, &blocks)?;
        for range in self.metadata_in(&blocks) {
            if !all_set(&map, range.start - blocks.start..range.end - blocks.start) {
                return refused("its bitmap has metadata as free");
            }
        }
        let runs = clear_runs(&map, blocks.end - blocks.start);
        let free: u64 = runs.iter().map(|run| run.end - run.start).sum();
        if free != group.free {
            return refused(format!("its bitmap has {free} free blocks, its descriptor states {}", group.free));
        }
        for run in runs {
            each((blocks.start + run.start) * geometry.block..(blocks.start + run.end) * geometry.block)?;
        }
        Ok(())
    }

    /// The bitmap of a group.
    fn map_of(&self, group: &Group, blocks: &Range<u64>) -> Outcome<Vec<u8>> {
        let geometry = &self.geometry;
        let length = (geometry.per_group / 8) as usize;
        if geometry.has_flags() && group.flags & BLOCK_UNINIT != 0 {
            if !self.is_whole {
                return refused("its bitmap is not initialised, and the descriptor of another group is damaged");
            }
            let mut map = vec![0; length];
            for range in self.metadata_in(blocks) {
                set(&mut map, range.start - blocks.start..range.end - blocks.start);
            }
            return Ok(map);
        }
        let mut map = self.volume.read(group.bitmap.saturating_mul(geometry.block), geometry.block)?;
        map.truncate(length);
        if geometry.is_summed() {
            let sum = crc32c_register(geometry.seed, &[&map]);
            let sum = if geometry.descriptor >= DESCRIPTOR_WITH_HIGH { sum } else { sum & 0xFFFF };
            if sum != group.checksum {
                return refused("the checksum of its bitmap does not match");
            }
        }
        Ok(map)
    }

    /// The parts of metadata that are in a range of blocks.
    fn metadata_in(&self, blocks: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let (start, end) = (blocks.start, blocks.end);
        let from = self.metadata.partition_point(|range| range.end <= start);
        let inside = self.metadata[from..].iter().take_while(move |range| range.start < end);
        inside.map(move |range| range.start.max(start)..range.end.min(end))
    }
}

/// The metadata of all groups in ascending ranges; refused if two structures overlap.
fn metadata(geometry: &Geometry, groups: &[Option<Group>]) -> Outcome<Vec<Range<u64>>> {
    let mut all = Vec::with_capacity(groups.len() * 3);
    for (number, group) in groups.iter().enumerate() {
        all.push(geometry.head_of(number as u64));
        if let Some(group) = group {
            all.extend([group.bitmap..group.bitmap + 1, group.inode_bitmap..group.inode_bitmap + 1]);
            all.push(group.table..group.table + geometry.table);
        }
    }
    all.retain(|range| !range.is_empty());
    all.sort_by_key(|range| range.start);
    if all.windows(2).any(|two| two[0].end > two[1].start) {
        return refused("its metadata overlaps");
    }
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in all {
        match merged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => merged.push(range),
        }
    }
    Ok(merged)
}
