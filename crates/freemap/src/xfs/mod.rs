//! XFS, version 5: allocation groups with a B+tree of free extents each.
//!
//! Source: "XFS Algorithms & Data Structures", in the documentation of xfsprogs.
//!
//! 1. The checksums of the superblock, of the headers of the free space (AGF) and of every block of the tree are
//!    verified, so version 4, which has none, is refused.
//! 2. The log must end with an unmount record ([`log`]).
//! 3. The extents ascend over the whole tree by block, so no block of the tree is visited twice, and no extents
//!    overlap. Their sum and the longest are as the AGF states. None touches the headers of the group, the blocks of
//!    the tree or the log.

mod log;

use crate::fields::{be16, be32, be64, byte, crc32c_without, has, le32};
use crate::{EachFree, Outcome, Volume, refused};
use std::ops::Range;

/// Most extents of one allocation group: they are kept in memory until the group is checked.
const EXTENTS_MAX: usize = 1 << 24;
/// Most levels of a tree.
const LEVELS_MAX: u32 = 9;
/// Most allocation groups.
const GROUPS_MAX: u64 = 1 << 20;
/// Sectors of the headers of a group: superblock, AGF, AGI and AGFL.
const HEADER_SECTORS: u64 = 4;

const SUPERBLOCK_CHECKSUM: usize = 0xE0;
const AGF_CHECKSUM: usize = 0xD8;
const TREE_HEADER: usize = 56;
const TREE_CHECKSUM: usize = 0x34;
/// Bytes of a record of a leaf, and of a key of a node: the first block and the number of blocks.
const RECORD: usize = 8;
/// Bytes of a pointer of a node.
const POINTER: usize = 4;

const INCOMPAT_META_UUID: u32 = 0x4;
const INCOMPAT_NEEDS_REPAIR: u32 = 0x10;
/// ftype, sparse inodes, meta_uuid, bigtime, large extent counters, exchange range, parent pointers.
const INCOMPAT_KNOWN: u32 = 0x1 | 0x2 | INCOMPAT_META_UUID | 0x8 | 0x20 | 0x40 | 0x80;
/// finobt, rmapbt, reflink, inobtcount.
const RO_COMPAT_KNOWN: u32 = 0xF;

/// A file system.
pub(crate) struct Xfs<'a> {
    volume: Volume<'a>,
    /// Bytes of a block.
    block: u64,
    /// Bytes of a sector.
    sector: u64,
    blocks: u64,
    group_blocks: u64,
    groups: u64,
    uuid: [u8; 16],
    /// The allocation group of the log, and the log's blocks in it.
    log: (u64, Range<u64>),
}

/// The header of a group's free space, as far as it is used.
struct Agf {
    blocks: u64,
    root: u64,
    levels: u32,
    free: u64,
    longest: u64,
}

/// The free extents of a group that were found so far, and the blocks of the tree.
#[derive(Default)]
struct Found {
    extents: Vec<Range<u64>>,
    tree: Vec<u64>,
}

impl<'a> Xfs<'a> {
    /// Reads the superblock, and the log to find out whether it is clean.
    pub fn open(volume: Volume<'a>) -> Outcome<Self> {
        let head = volume.read(0, 512)?;
        if be16(&head, 0x64) & 0xF != 5 {
            return refused("its version has no checksums, which is not supported");
        }
        let (block, sector) = (u64::from(be32(&head, 0x4)), u64::from(be16(&head, 0x66)));
        if !block.is_power_of_two() || !(1024..=65_536).contains(&block) {
            return refused("the size of its blocks is invalid");
        }
        if !sector.is_power_of_two() || !(512..=32_768).contains(&sector) || sector > block {
            return refused("the size of its sectors is invalid");
        }
        let bytes = volume.read(0, sector)?;
        if crc32c_without(&bytes, SUPERBLOCK_CHECKSUM) != le32(&bytes, SUPERBLOCK_CHECKSUM) {
            return refused("the checksum of the superblock does not match");
        }
        let (ro_compat, incompat) = (be32(&bytes, 0xD4), be32(&bytes, 0xD8));
        if incompat & INCOMPAT_NEEDS_REPAIR != 0 {
            return refused("it needs a repair");
        }
        let unknown = (incompat & !INCOMPAT_KNOWN, ro_compat & !RO_COMPAT_KNOWN);
        if unknown != (0, 0) {
            return refused(format!(
                "it has features that are not supported (incompat {:#x}, ro_compat {:#x})",
                unknown.0, unknown.1
            ));
        }
        if byte(&bytes, 0x7E) != 0 {
            return refused("its creation was not completed");
        }
        let (blocks, group_blocks, groups) =
            (be64(&bytes, 0x8), u64::from(be32(&bytes, 0x54)), u64::from(be32(&bytes, 0x58)));
        if blocks.checked_mul(block).is_none_or(|bytes| bytes > volume.length()) {
            return refused(format!("its {blocks} blocks of {block} bytes reach beyond the volume"));
        }
        let group_order = u32::from(byte(&bytes, 0x7C));
        let is_valid = (1..=GROUPS_MAX).contains(&groups)
            && group_blocks * block > HEADER_SECTORS * sector
            && blocks.div_ceil(group_blocks) == groups
            && group_order < 32
            && group_blocks <= 1 << group_order;
        if !is_valid {
            return refused("its superblock is inconsistent");
        }
        let uuid_at = if incompat & INCOMPAT_META_UUID != 0 { 0xF8 } else { 0x20 };
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&bytes[uuid_at..uuid_at + 16]);
        let (log_start, log_blocks) = (be64(&bytes, 0x30), u64::from(be32(&bytes, 0x60)));
        if log_start == 0 {
            return refused("its log is on another device");
        }
        let (log_group, log_first) = (log_start >> group_order, log_start & ((1 << group_order) - 1));
        if log_group >= groups || log_first >= group_blocks || log_blocks == 0 || log_first + log_blocks > group_blocks
        {
            return refused("the place of its log is invalid");
        }
        let log = (log_group, log_first..log_first + log_blocks);
        let xfs = Self { volume, block, sector, blocks, group_blocks, groups, uuid, log };
        let log_at = (log_group * group_blocks + log_first) * block;
        log::check_clean(&xfs.volume, log_at, log_blocks * block)?;
        Ok(xfs)
    }

    pub fn size(&self) -> u64 {
        self.blocks * self.block
    }

    pub fn groups(&self) -> u64 {
        self.groups
    }

    /// The free ranges of an allocation group.
    pub fn free_of(&self, group: u64, each: EachFree<'_>) -> Outcome<()> {
        let agf = self.agf(group)?;
        let mut found = Found::default();
        self.walk(group, &agf, (agf.root, agf.levels - 1), None, &mut found)?;
        let free: u64 = found.extents.iter().map(|extent| extent.end - extent.start).sum();
        let longest = found.extents.iter().map(|extent| extent.end - extent.start).max().unwrap_or_default();
        if (free, longest) != (agf.free, agf.longest) {
            return refused(format!(
                "its tree has {free} free blocks, the longest extent {longest}; its header states {} and {}",
                agf.free, agf.longest
            ));
        }
        let is_free = |range: Range<u64>| {
            let at = found.extents.partition_point(|extent| extent.end <= range.start);
            found.extents.get(at).is_some_and(|extent| extent.start < range.end)
        };
        let headers = (HEADER_SECTORS * self.sector).div_ceil(self.block);
        let (log_group, log) = &self.log;
        let is_metadata_free = is_free(0..headers)
            || found.tree.iter().any(|block| is_free(*block..block + 1))
            || *log_group == group && is_free(log.clone());
        if is_metadata_free {
            return refused("its tree has metadata as free");
        }
        let begin = group * self.group_blocks;
        for extent in found.extents {
            each((begin + extent.start) * self.block..(begin + extent.end) * self.block)?;
        }
        Ok(())
    }

    fn agf(&self, group: u64) -> Outcome<Agf> {
        let begin = group * self.group_blocks;
        let blocks = self.group_blocks.min(self.blocks - begin);
        let bytes = self.volume.read(begin * self.block + self.sector, self.sector)?;
        if !has(&bytes, 0, b"XAGF") || be32(&bytes, 4) != 1 {
            return refused("its header is none");
        }
        if crc32c_without(&bytes, AGF_CHECKSUM) != le32(&bytes, AGF_CHECKSUM) {
            return refused("the checksum of its header does not match");
        }
        let agf = Agf {
            blocks,
            root: u64::from(be32(&bytes, 0x10)),
            levels: be32(&bytes, 0x1C),
            free: u64::from(be32(&bytes, 0x34)),
            longest: u64::from(be32(&bytes, 0x38)),
        };
        let is_valid = has(&bytes, 0x40, &self.uuid)
            && u64::from(be32(&bytes, 0x8)) == group
            && u64::from(be32(&bytes, 0xC)) == blocks
            && (1..=LEVELS_MAX).contains(&agf.levels);
        if is_valid { Ok(agf) } else { refused("its header is inconsistent") }
    }

    /// Adds the extents below the block `at` of a tree, which has the level `level`. `key` is the first record below
    /// the block, as the block's parent states it.
    fn walk(&self, group: u64, agf: &Agf, (at, level): (u64, u32), key: Option<u64>, found: &mut Found) -> Outcome<()> {
        if at == 0 || at >= agf.blocks {
            return refused("its tree refers to a block outside of it");
        }
        let place = (group * self.group_blocks + at) * self.block;
        let bytes = self.volume.read(place, self.block)?;
        if !has(&bytes, 0, b"AB3B") {
            return refused("a block of its tree is none");
        }
        if crc32c_without(&bytes, TREE_CHECKSUM) != le32(&bytes, TREE_CHECKSUM) {
            return refused("the checksum of a block of its tree does not match");
        }
        let is_leaf = level == 0;
        let entry = if is_leaf { RECORD } else { RECORD + POINTER };
        let (count, most) = (usize::from(be16(&bytes, 6)), (bytes.len() - TREE_HEADER) / entry);
        let is_valid = u32::from(be16(&bytes, 4)) == level
            && count <= most
            // Only a tree without any extent has an empty block.
            && (count > 0 || key.is_none() && is_leaf)
            && be64(&bytes, 0x10) == place / 512
            && has(&bytes, 0x20, &self.uuid)
            && u64::from(be32(&bytes, 0x30)) == group;
        if !is_valid {
            return refused("a block of its tree is inconsistent");
        }
        found.tree.push(at);
        for index in 0..count {
            let record = TREE_HEADER + index * RECORD;
            let first = u64::from(be32(&bytes, record));
            if index == 0 && key.is_some_and(|key| key != first) {
                return refused("a block of its tree is not the one to which its parent refers");
            }
            if is_leaf {
                let extent = first..first + u64::from(be32(&bytes, record + 4));
                let behind = found.extents.last().map_or(0, |last| last.end);
                if extent.is_empty() || extent.start < behind || extent.end > agf.blocks {
                    return refused("its free extents overlap or are not within it");
                }
                if found.extents.len() == EXTENTS_MAX {
                    return refused(format!("it has more than {EXTENTS_MAX} free extents"));
                }
                found.extents.push(extent);
            } else {
                // Ascending keys, together with the comparison in the child, let each leaf add an extent, so that a
                // tree with a cycle ends.
                if found.extents.last().is_some_and(|last| first < last.end) {
                    return refused("the keys of its tree do not ascend");
                }
                let pointer = TREE_HEADER + most * RECORD + index * POINTER;
                let child = u64::from(be32(&bytes, pointer));
                self.walk(group, agf, (child, level - 1), Some(first), found)?;
            }
        }
        Ok(())
    }
}
