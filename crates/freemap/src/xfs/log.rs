//! Whether the log of XFS is clean, so that the file system on the disk is up to date.
//!
//! Source: "XFS Algorithms & Data Structures", in the documentation of xfsprogs.
//!
//! Every basic block (512 bytes) of the log begins with the number of the cycle in which it was written, except for
//! the first block of a record, which begins with a magic number that the cycle follows. The log is written as a ring:
//! in front of the head all blocks have the current cycle, and from the head on all have the one before.
//!
//! 1. The log counts as clean only if all its blocks have this form, without an exception, and if the record that ends
//!    exactly at the head consists of one operation, which is an unmount. Other logs may be clean too: after some
//!    crashes blocks of other cycles remain behind the head. They count as dirty.
//! 2. A record with a checksum must match it.

use crate::fields::{be32, byte, crc32c_register, has, le32};
use crate::{Outcome, Volume, refused};

const BASIC: u64 = 512;
/// Bytes that are read at a time.
const PIECE: u64 = 1 << 20;
const MAGIC: [u8; 4] = [0xFE, 0xED, 0xBA, 0xBE];
/// Bytes of a record for each block of its header.
const HEADER_CYCLE: u32 = 32 << 10;
/// Most bytes of a record.
const RECORD_MAX: u32 = 256 << 10;
/// Bytes of a record's header that its checksum covers, and those of each further block of the header.
const HEADER_LENGTH: usize = 328;
const EXTENDED_LENGTH: usize = 260;
const CHECKSUM: usize = 32;
const UNMOUNT: u8 = 0x20;

/// The cycle of a basic block.
fn cycle(block: &[u8]) -> u32 {
    if has(block, 0, &MAGIC) { be32(block, 4) } else { be32(block, 0) }
}

/// The blocks of a log as a ring.
struct Ring<'a> {
    volume: &'a Volume<'a>,
    offset: u64,
    blocks: u64,
}

impl Ring<'_> {
    /// Reads `count` blocks from `from` on.
    fn read(&self, from: u64, count: u64) -> Outcome<Vec<u8>> {
        let first = count.min(self.blocks - from);
        let mut bytes = self.volume.read(self.offset + from * BASIC, first * BASIC)?;
        bytes.extend(self.volume.read(self.offset, (count - first) * BASIC)?);
        Ok(bytes)
    }

    /// The head: the first block that was not written in the current cycle.
    fn head(&self) -> Outcome<u64> {
        let (mut current, mut head) = (None, self.blocks);
        let mut at = 0;
        while at < self.blocks {
            let count = (PIECE / BASIC).min(self.blocks - at);
            let piece = self.volume.read(self.offset + at * BASIC, count * BASIC)?;
            for (index, block) in piece.chunks_exact(BASIC as usize).enumerate() {
                let found = cycle(block);
                let current = *current.get_or_insert(found);
                if head == self.blocks && found != current {
                    head = at + index as u64;
                }
                let expected = if head == self.blocks { Some(current) } else { current.checked_sub(1) };
                if Some(found) != expected {
                    return refused("its log does not end in one place, so it may be dirty");
                }
            }
            at += count;
        }
        match current {
            None | Some(0) => refused("its log is empty"),
            Some(_) => Ok(head % self.blocks),
        }
    }
}

/// Refuses a log that is not provably clean. `offset` and `length` are in bytes.
pub(super) fn check_clean(volume: &Volume<'_>, offset: u64, length: u64) -> Outcome<()> {
    let ring = Ring { volume, offset, blocks: length / BASIC };
    if ring.blocks < u64::from(RECORD_MAX) / BASIC {
        return refused("its log is too short");
    }
    let head = ring.head()?;
    // The last record may have up to `RECORD_MAX` bytes and as many blocks of header as they need.
    let farthest = u64::from(RECORD_MAX) / BASIC + u64::from(RECORD_MAX / HEADER_CYCLE);
    for back in 1..=farthest.min(ring.blocks) {
        let begin = (head + ring.blocks - back) % ring.blocks;
        let header = ring.read(begin, 1)?;
        if has(&header, 0, &MAGIC) {
            return check_unmount(&ring, begin, back, &header);
        }
    }
    refused("its log ends without a record, so it may be dirty")
}

/// Refuses the last record of a log if it is no unmount. The record occupies `blocks` blocks from `begin` on.
fn check_unmount(ring: &Ring<'_>, begin: u64, blocks: u64, header: &[u8]) -> Outcome<()> {
    let (version, length, size) = (be32(header, 8), be32(header, 12), be32(header, 320));
    let headers = match version {
        1 => 1,
        2 if size <= RECORD_MAX => u64::from(size.div_ceil(HEADER_CYCLE).max(1)),
        _ => return refused("the version of its log is not supported"),
    };
    let expected = headers + u64::from(length).div_ceil(BASIC);
    if length == 0 || length > RECORD_MAX || expected != blocks {
        return refused("it was not cleanly unmounted: the last record of its log is incomplete");
    }
    let bytes = ring.read(begin, blocks)?;
    let content = &bytes[(headers * BASIC) as usize..];
    let stored = le32(header, CHECKSUM);
    if stored != 0 {
        let mut parts: Vec<&[u8]> = vec![&header[..CHECKSUM], &[0; 4][..], &header[CHECKSUM + 4..HEADER_LENGTH]];
        let extended = bytes[BASIC as usize..(headers * BASIC) as usize].chunks_exact(BASIC as usize);
        parts.extend(extended.map(|block| &block[..EXTENDED_LENGTH]));
        parts.push(&content[..length as usize]);
        if !crc32c_register(!0, &parts) != stored {
            return refused("it was not cleanly unmounted: the last record of its log does not match its checksum");
        }
    }
    // The operation follows the header: transaction, length, client, flags.
    let (operations, flags) = (be32(header, 40), byte(content, 9));
    if operations != 1 || flags & UNMOUNT == 0 {
        return refused("it was not cleanly unmounted: its log needs recovery");
    }
    Ok(())
}
