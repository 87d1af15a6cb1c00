//! The layout of a tree node: the 4096 bytes of its page.
//!
//! All numbers are little-endian.
//!
//! | offset | size | field |
//! |---:|---:|---|
//! | 0 | 4 | magic `LMND` |
//! | 4 | 2 | version, 1 |
//! | 6 | 1 | level, 0 = leaf |
//! | 7 | 1 | zero |
//! | 8 | 2 | count of entries, at most 254 |
//! | 10 | 2 | zero |
//! | 12 | 4 | CRC32C, which the page cache sets at write and verifies at load; this module ignores it |
//! | 16 | 8 | number of the node's own page |
//! | 24 | 8 | zero |
//! | 32 | 254 x 16 | entries; those past the count are zero |
//!
//! | entry | word | bits | field |
//! |---|---|---|---|
//! | leaf | 0 | 0-39 | first logical block |
//! | | | 40-47 | length in blocks, less 1 |
//! | | | 48-55 | packed: index of the first block within the pack; otherwise zero |
//! | | | 56-63 | zero |
//! | | 1 | 0-47 | first physical block; packed: first block of the pack |
//! | | | 48-55 | packed: blocks of the pack, 1 to 255; otherwise zero |
//! | | | 56-61 | zero |
//! | | | 62 | packed: the blocks are compressed |
//! | | | 63 | unwritten: allocated, reads as zeros |
//! | internal | 0 | 0-39 | first logical block below the child; 0 in entry 0, whose bound is the node's own |
//! | | 1 | 0-47 | node number of the child |
//! | | | 48-63 | zero |
//!
//! [`validate`] accepts any bytes. A page that it has accepted keeps invariants 4 and 6 of the [tree](super) as far as
//! a single page can show. All other functions require such a page. Bounds and levels, which several pages together
//! determine, are checked on each descent.

use super::{LEVELS_MAX, Mapping, NodeId, Packed, corrupt};
use crate::{Error, ErrorKind, FILE_BLOCKS, Result};
use backend::{BLOCK_SIZE, Block};
use std::ops::Range;

/// Entries of a full node.
pub const ENTRIES_MAX: usize = (BLOCK_SIZE - HEADER_BYTES) / ENTRY_BYTES;

/// The longest extent of one entry, in blocks.
pub const EXTENT_BLOCKS_MAX: u64 = 256;

/// Logical blocks are smaller than this: 4 PiB of disk.
pub const LOGICAL_LIMIT: u64 = 1 << 40;

/// Physical blocks are smaller than this.
pub const PHYSICAL_LIMIT: u64 = 1 << 48;

const HEADER_BYTES: usize = 32;
const ENTRY_BYTES: usize = 16;
const HEADER_PAIRS: usize = HEADER_BYTES / ENTRY_BYTES;
const MAGIC: [u8; 4] = *b"LMND";
const VERSION: u16 = 1;
const LENGTH_SHIFT: u32 = 40;
const INDEX_SHIFT: u32 = 48;
const STORED_SHIFT: u32 = 48;
const PACKED: u64 = 1 << 62;
const UNWRITTEN: u64 = 1 << 63;

const _: () = assert!(ENTRIES_MAX == 254);
const _: () = assert!(1 << LENGTH_SHIFT == LOGICAL_LIMIT && EXTENT_BLOCKS_MAX == 1 << 8);

/// An entry as stored: two little-endian words.
type RawEntry = [u64; 2];

/// Consecutive physical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PhysicalRun {
    /// First block.
    pub physical: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// Appends a run of physical blocks to a list, and joins it to the last run if it follows that run.
pub(super) fn push_run(runs: &mut Vec<PhysicalRun>, physical: u64, blocks: u64) {
    match runs.last_mut() {
        Some(last) if last.physical + last.blocks == physical => last.blocks += blocks,
        _ => runs.push(PhysicalRun { physical, blocks }),
    }
}

/// A child of an internal node, with its bounds.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub index: usize,
    pub child: NodeId,
    /// Lower bound of the child. `None` means the lower bound of the node.
    pub lower: Option<u64>,
    /// Upper bound of the child. `None` means the upper bound of the node.
    pub upper: Option<u64>,
}

/// The result of [`replace_in_leaf`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Edit {
    /// The change is made. `shrank` is true if the leaf has fewer entries than before.
    Done { shrank: bool },
    /// The entries do not fit, and nothing was changed.
    Full,
}

fn pairs(page: &Block) -> &[RawEntry; BLOCK_SIZE / ENTRY_BYTES] {
    bytemuck::cast_ref(page)
}

fn pairs_mut(page: &mut Block) -> &mut [RawEntry; BLOCK_SIZE / ENTRY_BYTES] {
    bytemuck::cast_mut(page)
}

fn entries(page: &Block) -> &[RawEntry] {
    &pairs(page)[HEADER_PAIRS..HEADER_PAIRS + count(page)]
}

fn key_of(entry: &RawEntry) -> u64 {
    u64::from_le(entry[0]) & (LOGICAL_LIMIT - 1)
}

fn decode(entry: &RawEntry) -> Mapping {
    let (place, target) = (u64::from_le(entry[0]), u64::from_le(entry[1]));
    Mapping {
        logical: place & (LOGICAL_LIMIT - 1),
        physical: target & (PHYSICAL_LIMIT - 1),
        blocks: (place >> LENGTH_SHIFT) % EXTENT_BLOCKS_MAX + 1,
        unwritten: target & UNWRITTEN != 0,
        packed: (target & PACKED != 0)
            .then_some(Packed { index: (place >> INDEX_SHIFT) as u8, stored: (target >> STORED_SHIFT) as u8 }),
    }
}

fn encode(mapping: &Mapping) -> RawEntry {
    debug_assert!(mapping.blocks >= 1 && mapping.blocks <= EXTENT_BLOCKS_MAX);
    debug_assert!(mapping.end() <= LOGICAL_LIMIT && mapping.physical + mapping.stored().blocks <= PHYSICAL_LIMIT);
    let mut place = mapping.logical | (mapping.blocks - 1) << LENGTH_SHIFT;
    let mut target = mapping.physical | if mapping.unwritten { UNWRITTEN } else { 0 };
    if let Some(packed) = mapping.packed {
        debug_assert!(packed.stored > 0 && !mapping.unwritten);
        debug_assert!(u64::from(packed.index) + mapping.blocks <= EXTENT_BLOCKS_MAX);
        place |= u64::from(packed.index) << INDEX_SHIFT;
        target |= PACKED | u64::from(packed.stored) << STORED_SHIFT;
    }
    [place.to_le(), target.to_le()]
}

/// The level of a node; 0 is a leaf.
pub fn level(page: &Block) -> u8 {
    page.0[6]
}

/// Number of entries of a node.
pub fn count(page: &Block) -> usize {
    usize::from(u16::from_le_bytes([page.0[8], page.0[9]])).min(ENTRIES_MAX)
}

/// The page number stored in a node.
pub fn id(page: &Block) -> NodeId {
    NodeId(u64::from_le(pairs(page)[1][0]))
}

/// Checks that a loaded page can be node `expected`, as far as a single page shows. The page cache verifies the
/// checksum.
pub fn validate(page: &Block, expected: NodeId) -> Result<()> {
    if page.0[..4] != MAGIC {
        return Err(corrupt(expected, "it does not begin as a map node"));
    }
    let version = u16::from_le_bytes([page.0[4], page.0[5]]);
    if version != VERSION {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "map node {expected} has version {version}, this program supports version {VERSION}: use a newer one"
            ),
        ));
    }
    if id(page) != expected {
        return Err(corrupt(expected, format_args!("it is node {}, written to the wrong place", id(page))));
    }
    if usize::from(level(page)) >= LEVELS_MAX {
        return Err(corrupt(expected, format_args!("level {} of at most {}", level(page), LEVELS_MAX - 1)));
    }
    let stored = usize::from(u16::from_le_bytes([page.0[8], page.0[9]]));
    if stored > ENTRIES_MAX {
        return Err(corrupt(expected, format_args!("{stored} entries of at most {ENTRIES_MAX}")));
    }
    let unused = &pairs(page)[HEADER_PAIRS + stored..];
    if page.0[7] != 0 || page.0[10..12] != [0; 2] || page.0[24..32] != [0; 8] || unused.iter().any(|e| *e != [0; 2]) {
        return Err(corrupt(expected, "reserved bytes are not zero"));
    }
    if level(page) == 0 { validate_leaf(page, expected) } else { validate_internal(page, expected) }
}

fn validate_leaf(page: &Block, id: NodeId) -> Result<()> {
    let mut free_from = 0;
    for (index, entry) in entries(page).iter().enumerate() {
        let mapping = decode(entry);
        let known = match mapping.packed {
            None => u64::from_le(entry[0]) >> INDEX_SHIFT == 0 && u64::from_le(entry[1]) & !UNWRITTEN < PHYSICAL_LIMIT,
            Some(packed) => {
                u64::from_le(entry[0]) >> (INDEX_SHIFT + 8) == 0
                    && u64::from_le(entry[1]) & !PACKED < 1 << (STORED_SHIFT + 8)
                    && packed.stored > 0
                    && u64::from(packed.index) + mapping.blocks <= EXTENT_BLOCKS_MAX
            }
        };
        if !known {
            return Err(corrupt(id, format_args!("unknown flags in entry {index}")));
        }
        if mapping.logical < free_from {
            return Err(corrupt(id, format_args!("entry {index} overlaps or precedes the one before")));
        }
        if mapping.end() > LOGICAL_LIMIT || mapping.physical + mapping.stored().blocks > PHYSICAL_LIMIT {
            return Err(corrupt(id, format_args!("entry {index} reaches past the end of the address space")));
        }
        free_from = mapping.end();
    }
    Ok(())
}

fn validate_internal(page: &Block, id: NodeId) -> Result<()> {
    if entries(page).is_empty() {
        return Err(corrupt(id, "an internal node without children"));
    }
    let mut previous = None;
    for (index, entry) in entries(page).iter().enumerate() {
        let key = u64::from_le(entry[0]);
        if key >= LOGICAL_LIMIT || (index == 0) != (key == 0) || previous.is_some_and(|p| p >= key) {
            return Err(corrupt(id, format_args!("the key of entry {index} is out of order")));
        }
        let child = u64::from_le(entry[1]);
        if child == id.0 || child >= PHYSICAL_LIMIT {
            return Err(corrupt(id, format_args!("entry {index} has the invalid child {child}")));
        }
        previous = Some(key);
    }
    Ok(())
}

/// Makes a page an empty node.
pub(super) fn initialise(page: &mut Block, id: NodeId, level: u8) {
    page.0.fill(0);
    page.0[..4].copy_from_slice(&MAGIC);
    page.0[4..6].copy_from_slice(&VERSION.to_le_bytes());
    page.0[6] = level;
    set_id(page, id);
}

/// Changes the page number stored in a node.
pub(super) fn set_id(page: &mut Block, id: NodeId) {
    pairs_mut(page)[1][0] = id.0.to_le();
}

fn set_count(page: &mut Block, count: usize) {
    debug_assert!(count <= ENTRIES_MAX);
    page.0[8..10].copy_from_slice(&(count as u16).to_le_bytes());
}

/// The extent of entry `index` of a leaf.
pub(super) fn mapping(page: &Block, index: usize) -> Option<Mapping> {
    entries(page).get(index).map(decode)
}

/// The extents of a leaf that end after `position`, in order.
pub(super) fn mappings_from(page: &Block, position: u64) -> impl Iterator<Item = Mapping> + '_ {
    entries(page)[first_ending_after(page, position)..].iter().map(decode)
}

/// Index of the first entry of a leaf that ends after `position`.
pub(super) fn first_ending_after(page: &Block, position: u64) -> usize {
    entries(page).partition_point(|entry| decode(entry).end() <= position)
}

/// The physical blocks of a leaf, with adjacent runs joined. A pack is in the list once for each entry that maps a part
/// of it.
pub(super) fn data_runs(page: &Block) -> Vec<PhysicalRun> {
    let mut runs = Vec::new();
    for mapping in entries(page).iter().map(decode) {
        let stored = mapping.stored();
        push_run(&mut runs, stored.physical, stored.blocks);
    }
    runs
}

/// Whether a leaf maps a part of a pack.
pub(super) fn has_packs(page: &Block) -> bool {
    entries(page).iter().any(|entry| u64::from_le(entry[1]) & PACKED != 0)
}

/// The children of an internal node.
pub(super) fn children(page: &Block) -> impl Iterator<Item = NodeId> + '_ {
    entries(page).iter().map(|entry| NodeId(u64::from_le(entry[1])))
}

/// Child `index` of an internal node with its bounds.
pub(super) fn slot(page: &Block, index: usize) -> Option<Slot> {
    let entries = entries(page);
    let entry = entries.get(index)?;
    Some(Slot {
        index,
        child: NodeId(u64::from_le(entry[1])),
        lower: (index > 0).then(|| key_of(entry)),
        upper: entries.get(index + 1).map(key_of),
    })
}

/// The child of an internal node that has `position` within its bounds. `None` only for a node without children.
pub(super) fn slot_for(page: &Block, position: u64) -> Option<Slot> {
    let entries = entries(page);
    slot(page, entries.get(1..)?.partition_point(|entry| key_of(entry) <= position))
}

/// Changes the child of entry `index` of an internal node.
pub(super) fn set_child(page: &mut Block, index: usize, child: NodeId) {
    debug_assert!(index < count(page));
    if let Some(entry) = pairs_mut(page).get_mut(HEADER_PAIRS + index) {
        entry[1] = child.0.to_le();
    }
}

/// Inserts a child at `index` of an internal node that is not full. The key of the first child is stored as 0.
pub(super) fn insert_child(page: &mut Block, index: usize, key: u64, child: NodeId) {
    splice(page, index..index, &[[key.to_le(), child.0.to_le()]]);
    clear_first_key(page);
}

/// Removes the children in `range` from an internal node.
pub(super) fn remove_children(page: &mut Block, range: Range<usize>) {
    splice(page, range, &[]);
    clear_first_key(page);
}

fn clear_first_key(page: &mut Block) {
    if count(page) > 0 {
        pairs_mut(page)[HEADER_PAIRS][0] = 0;
    }
}

/// Moves the entries from `index` on to `right`, an empty node of the same level. Returns the key of the first moved
/// entry.
pub(super) fn move_tail(page: &mut Block, index: usize, right: &mut Block) -> u64 {
    let tail = &entries(page)[index.min(count(page))..];
    let key = tail.first().map_or(0, key_of);
    splice(right, 0..0, tail);
    if level(page) > 0 {
        clear_first_key(right);
    }
    let end = count(page);
    splice(page, index.min(end)..end, &[]);
    key
}

/// Appends all entries of `right` to its left neighbour, where they must fit. `key` is the lower bound of `right`.
pub(super) fn append(page: &mut Block, right: &Block, key: u64) {
    let at = count(page);
    splice(page, at..at, entries(right));
    if level(page) > 0 && count(page) > at {
        pairs_mut(page)[HEADER_PAIRS + at][0] = key.to_le();
    }
}

/// Replaces the entries in `range` by `new`. Entries that do not fit would be a bug in the caller, and are dropped.
fn splice(page: &mut Block, range: Range<usize>, new: &[RawEntry]) {
    let old_count = count(page);
    debug_assert!(range.start <= range.end && range.end <= old_count);
    debug_assert!(old_count - range.len() + new.len() <= ENTRIES_MAX);
    let (start, end) = (range.start.min(old_count), range.end.min(old_count));
    let tail = old_count - end;
    let new = &new[..new.len().min(ENTRIES_MAX - start - tail)];
    let new_count = start + new.len() + tail;
    let slots = &mut pairs_mut(page)[HEADER_PAIRS..];
    if new_count != old_count {
        slots.copy_within(end..old_count, start + new.len());
        if new_count < old_count {
            slots[new_count..old_count].fill([0; 2]);
        }
    }
    slots[start..start + new.len()].copy_from_slice(new);
    set_count(page, new_count);
}

/// The two extents joined, if the second continues the first.
fn joined(left: &Mapping, right: &Mapping) -> Option<Mapping> {
    continues(left, right).then(|| Mapping { blocks: left.blocks + right.blocks, ..*left })
}

/// The result of [`pack_in_leaf`] and [`share_in_leaf`].
pub(super) enum Redirect {
    /// The change is made: the leaf has a reference more on each run of `added`, and one less on each run of `removed`.
    /// `added` has a run once for each reference. Both are empty if the leaf maps none of the blocks.
    Done { added: Vec<PhysicalRun>, removed: Vec<PhysicalRun> },
    /// The entries do not fit, and nothing was changed.
    Full,
}

/// Maps to a new pack those blocks of `range` that `index_of` says are in it: it returns for the mapping of one block
/// the index within the pack.
pub(super) fn pack_in_leaf(
    page: &mut Block,
    range: Range<u64>,
    pack: PhysicalRun,
    index_of: &dyn Fn(&Mapping) -> Option<u8>,
) -> Redirect {
    let first = first_ending_after(page, range.start);
    let entries = entries(page);
    let overlapping = entries[first..].iter().take_while(|entry| key_of(entry) < range.end).count();
    // The entries beside the range may continue the new ones.
    let (first, last) = (first.saturating_sub(1), (first + overlapping + 1).min(entries.len()));
    let (mut new, mut added, mut divided, mut removed) = (Vec::<Mapping>::new(), Vec::new(), Vec::new(), Vec::new());
    let mut changed = false;
    // The entry from which the last block was taken; none if the block is in the new pack.
    let mut origin = Some(u64::MAX);
    for mapping in entries[first..last].iter().map(decode) {
        // The number of entries that map what stays of this one.
        let mut kept = 0;
        // An entry that maps a part of the pack already may continue a new one, and be continued by one.
        let of_pack = mapping.packed.filter(|packed| {
            mapping.physical == pack.physical && u64::from(packed.stored) == pack.blocks && !mapping.unwritten
        });
        for logical in mapping.logical..mapping.end() {
            let one = mapping.clipped(logical, logical + 1);
            let has_content = !one.unwritten && range.contains(&logical);
            let index = if has_content { index_of(&one) } else { None };
            changed |= index.is_some();
            let index = index.or_else(|| of_pack.and(one.packed).map(|packed| packed.index));
            let piece = match index {
                Some(index) => {
                    if one.packed.is_none() {
                        push_run(&mut removed, one.physical, 1);
                    }
                    let packed = Some(Packed { index, stored: pack.blocks as u8 });
                    Mapping { logical, physical: pack.physical, blocks: 1, unwritten: false, packed }
                }
                None => one,
            };
            // Two entries that map parts of another pack stay two entries, because each has a reference on it.
            let from = if index.is_some() { None } else { Some(mapping.logical) };
            match new.last_mut() {
                Some(before) if (from == origin || piece.packed.is_none()) && continues(before, &piece) => {
                    before.blocks += 1;
                }
                _ => {
                    added.extend(index.map(|_| pack));
                    kept += usize::from(index.is_none());
                    new.push(piece);
                }
            }
            origin = from;
        }
        if mapping.packed.is_some() {
            // The reference on the pack belongs to the entry.
            let stored = mapping.stored();
            match kept {
                0 => push_run(&mut removed, stored.physical, stored.blocks),
                _ => divided.extend(std::iter::repeat_n(stored, kept - 1)),
            }
        }
    }
    if !changed {
        return Redirect::Done { added: Vec::new(), removed: Vec::new() };
    }
    // A part of another pack is an entry of its own only beside an entry of the new pack.
    added.append(&mut divided);
    redirect_entries(page, first..last, &new, added, removed)
}

/// Maps the blocks of `range` for which `to_of` returns another physical block to that block. The function gets the
/// first logical and physical block of a part of an entry within the range, and the result applies to the whole part.
pub(super) fn share_in_leaf(page: &mut Block, range: Range<u64>, to_of: &dyn Fn(u64, u64) -> Option<u64>) -> Redirect {
    let entries = entries(page);
    let first = first_ending_after(page, range.start);
    let overlapping = entries[first..].iter().take_while(|entry| key_of(entry) < range.end).count();
    // The entries beside the range may continue the new ones.
    let (first, last) = (first.saturating_sub(1), (first + overlapping + 1).min(entries.len()));
    let (mut new, mut added, mut removed) = (Vec::<Mapping>::new(), Vec::new(), Vec::new());
    for mapping in entries[first..last].iter().map(decode) {
        let (start, end) = (mapping.logical.max(range.start), mapping.end().min(range.end));
        let mut pieces = [Some(mapping), None, None];
        if start < end && mapping.packed.is_none() && !mapping.unwritten {
            let part = mapping.clipped(start, end);
            if let Some(physical) = to_of(part.logical, part.physical) {
                push_run(&mut removed, part.physical, part.blocks);
                push_run(&mut added, physical, part.blocks);
                let left = (mapping.logical < start).then(|| mapping.clipped(mapping.logical, start));
                let right = (end < mapping.end()).then(|| mapping.clipped(end, mapping.end()));
                pieces = [left, Some(Mapping { physical, ..part }), right];
            }
        }
        for piece in pieces.into_iter().flatten() {
            // Two entries that map parts of a pack stay two entries, because each has a reference on it.
            let before = new.last_mut().filter(|_| piece.packed.is_none());
            match before.and_then(|before| Some((joined(before, &piece)?, before))) {
                Some((whole, before)) => *before = whole,
                None => new.push(piece),
            }
        }
    }
    if added.is_empty() {
        return Redirect::Done { added, removed };
    }
    redirect_entries(page, first..last, &new, added, removed)
}

/// Replaces a range of entries by others, if these fit.
fn redirect_entries(
    page: &mut Block,
    range: Range<usize>,
    new: &[Mapping],
    added: Vec<PhysicalRun>,
    removed: Vec<PhysicalRun>,
) -> Redirect {
    if count(page) - range.len() + new.len() > ENTRIES_MAX {
        return Redirect::Full;
    }
    let new: Vec<RawEntry> = new.iter().map(encode).collect();
    splice(page, range, &new);
    Redirect::Done { added, removed }
}

/// Whether an extent continues another one logically, and physically in the same data file or in its pack, and one
/// entry can hold both.
fn continues(before: &Mapping, next: &Mapping) -> bool {
    let follows = match (before.packed, next.packed) {
        (None, None) => before.physical + before.blocks == next.physical && !next.physical.is_multiple_of(FILE_BLOCKS),
        (Some(left), Some(right)) => {
            before.physical == next.physical
                && left.stored == right.stored
                && u64::from(left.index) + before.blocks == u64::from(right.index)
        }
        _ => false,
    };
    follows
        && before.end() == next.logical
        && before.unwritten == next.unwritten
        && before.blocks + next.blocks <= EXTENT_BLOCKS_MAX
}

/// Unmaps `range` in a leaf, and maps it to `with`, if given, which covers exactly the range. Adds to `removed` the
/// physical blocks on which the leaf has one reference less, and to `added` the packs on which it has one more. The
/// reference on plain blocks of `with` is already counted.
pub(super) fn replace_in_leaf(
    page: &mut Block,
    range: Range<u64>,
    with: Option<Mapping>,
    added: &mut Vec<PhysicalRun>,
    removed: &mut Vec<PhysicalRun>,
) -> Edit {
    let entries = entries(page);
    let mut first = first_ending_after(page, range.start);
    let overlapping = entries[first..].iter().take_while(|entry| key_of(entry) < range.end).count();
    let mut last = first + overlapping;
    let overlapped = first..last;

    // At each end of the range: the remaining part of the extent that the range cuts there. If it cuts none, the
    // neighbour that a new extent may continue.
    let cut_left = entries[overlapped.clone()].first().map(decode).filter(|m| m.logical < range.start);
    let cut_right = entries[overlapped.clone()].last().map(decode).filter(|m| m.end() > range.end);
    let mut left = cut_left.map(|m| m.clipped(m.logical, range.start));
    let mut right = cut_right.map(|m| m.clipped(range.end, m.end()));
    let mut middle = with;
    // The number of entries that become one entry with the new one.
    let mut joins = 0;
    if let Some(mut new) = with {
        let before = left.or_else(|| first.checked_sub(1).and_then(|i| mapping(page, i)));
        if let Some(whole) = before.and_then(|before| joined(&before, &new)) {
            if left.take().is_none() {
                first -= 1;
            }
            new = whole;
            joins += 1;
        }
        let after = right.or_else(|| mapping(page, last));
        if let Some(whole) = after.and_then(|after| joined(&new, &after)) {
            if right.take().is_none() {
                last += 1;
            }
            new = whole;
            joins += 1;
        }
        middle = Some(new);
    }

    let mut new = [[0; 2]; 3];
    let mut new_count = 0;
    for mapping in [left, middle, right].into_iter().flatten() {
        new[new_count] = encode(&mapping);
        new_count += 1;
    }
    if entries.len() - (last - first) + new_count > ENTRIES_MAX {
        return Edit::Full;
    }
    if let Some(new) = with.filter(|new| new.packed.is_some()) {
        // Each entry that maps a part of a pack has one reference on it.
        match joins {
            0 => added.push(new.stored()),
            1 => {}
            _ => removed.push(new.stored()),
        }
    }
    for mapping in entries[overlapped].iter().map(decode) {
        let gone = if mapping.packed.is_some() {
            // The reference on the pack belongs to the entry, of which a part may remain at each end of the range.
            let stored = mapping.stored();
            match (mapping.logical < range.start, mapping.end() > range.end) {
                (false, false) => stored,
                (true, true) => {
                    added.push(stored);
                    continue;
                }
                _ => continue,
            }
        } else {
            mapping.clipped(range.start, range.end).stored()
        };
        push_run(removed, gone.physical, gone.blocks);
    }
    splice(page, first..last, &new[..new_count]);
    Edit::Done { shrank: new_count < last - first }
}
