//! One table page: 508 entries of 8 bytes after the common head.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | CRC32C of the block |
//! | 4 | 4 | bits 0-27 reference count; bit 29 held; bit 30 suspect; bit 31 backed |

use crate::pages::HEADER_SIZE;
use backend::{BLOCK_SIZE, Block};

const ENTRY_SIZE: usize = 8;
/// Entries of a table page.
pub const TABLE_ENTRIES: u64 = ((BLOCK_SIZE - HEADER_SIZE) / ENTRY_SIZE) as u64;
const _: () = assert!(TABLE_ENTRIES == 508);

const HELD: u32 = 1 << 29;
const SUSPECT: u32 = 1 << 30;
const BACKED: u32 = 1 << 31;

/// The entry of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockEntry {
    /// CRC32C of the block's content.
    pub checksum: u32,
    /// For a data block, the number of leaf entries that map it. For a node, the number of parent entries and roots
    /// that refer to it.
    pub references: u32,
    /// Whether the file system has allocated space for the block.
    pub backed: bool,
    /// Whether an overwrite of the block was under way when the machine stopped: then the result of the overwrite is
    /// unknown.
    pub suspect: bool,
    /// Whether a pending operation concerns the block (`engine/placement`). The flag is ignored when a page is read,
    /// because checkpoints may store it.
    pub held: bool,
}

impl BlockEntry {
    /// The highest reference count. A data block may have more references than this. Its count then stays, so the block
    /// is neither freed nor overwritten in place until a repair has counted its references. If such a change failed
    /// instead, it would stop the store, because it is found in the middle of an operation.
    pub const REFERENCES_MAX: u32 = (1 << 28) - 1;

    /// Clears the checksum and the suspect mark of a freed block. The held flag stays until the operations that
    /// hold the block are durable.
    pub fn clear_notes(&mut self) {
        self.checksum = 0;
        self.suspect = false;
    }
}

fn offset(index: usize) -> usize {
    HEADER_SIZE + index * ENTRY_SIZE
}

/// Entry `index` of a page.
#[inline]
pub fn read(page: &Block, index: usize) -> BlockEntry {
    let at = offset(index);
    let raw = u64::from_le_bytes(page.0[at..at + ENTRY_SIZE].try_into().expect("eight bytes"));
    let word = (raw >> 32) as u32;
    BlockEntry {
        checksum: raw as u32,
        references: word & BlockEntry::REFERENCES_MAX,
        backed: word & BACKED != 0,
        suspect: word & SUSPECT != 0,
        held: word & HELD != 0,
    }
}

/// Clears the held flags, which have a meaning only for the process that wrote the page.
pub fn forget_holds(page: &mut Block) {
    for entry in page.0[HEADER_SIZE..].chunks_exact_mut(ENTRY_SIZE) {
        entry[7] &= !((HELD >> 24) as u8);
    }
}

/// Replaces entry `index` of a page.
#[inline]
pub fn write(page: &mut Block, index: usize, entry: BlockEntry) {
    let mut word = entry.references;
    if entry.backed {
        word |= BACKED;
    }
    if entry.suspect {
        word |= SUSPECT;
    }
    if entry.held {
        word |= HELD;
    }
    let raw = u64::from(word) << 32 | u64::from(entry.checksum);
    let at = offset(index);
    page.0[at..at + ENTRY_SIZE].copy_from_slice(&raw.to_le_bytes());
}
