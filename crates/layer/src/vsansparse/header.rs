//! The header: the state that opening needs first. There are two copies of one block each; a new header is written over
//! the older copy, with one durable write, so that a torn write leaves the other copy.

use super::layout::{BLOCK, COPIES, Layout};
use crate::aligned::AlignedFile;
use crate::{Error, ErrorKind, IoContext, Result};
use checksums::checksum_without;

/// The first bytes of a vsanSparse file.
pub const MAGIC: [u8; 8] = *b"LMVSANSP";

const VERSION: u32 = 1;
const SIZE: usize = BLOCK as usize;
const OFFSET_CHECKSUM: usize = 12;

/// A header that has passed its checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Identifies this object.
    pub id: [u8; 16],
    /// Greater in the newer of two copies.
    pub sequence: u64,
    /// Capacity of the disk in bytes.
    pub capacity: u64,
    /// How often the object was opened for writing.
    pub incarnation: u64,
    /// Position of the oldest batch of the log that is needed, in blocks.
    pub tail: u64,
    /// The number of the batch at `tail`.
    pub tail_number: u64,
    /// The first block that was never allocated.
    pub next: u64,
    /// Whether the object was closed properly, so that no log has to be replayed.
    pub clean: bool,
}

impl Header {
    /// Encodes the header as a block.
    pub(super) fn encode(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id);
        let numbers =
            [self.sequence, self.capacity, self.incarnation, self.tail, self.tail_number, self.next, self.clean.into()];
        for (field, number) in bytes[32..].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        seal(&mut bytes, OFFSET_CHECKSUM);
        bytes
    }

    /// Decodes a copy; `None` if it is torn or damaged.
    fn decode(bytes: &[u8; SIZE]) -> Result<Option<Self>> {
        if bytes[..8] != MAGIC || !is_sealed(bytes, OFFSET_CHECKSUM) {
            return Ok(None);
        }
        let mut field = [0; 4];
        field.copy_from_slice(&bytes[8..12]);
        if u32::from_le_bytes(field) != VERSION {
            let what = format!("version {} of the format is not known, only {VERSION} is", u32::from_le_bytes(field));
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[16..32]);
        let number = |index: usize| u64_at(bytes, 32 + index * 8);
        let header = Self {
            id,
            sequence: number(0),
            capacity: number(1),
            incarnation: number(2),
            tail: number(3),
            tail_number: number(4),
            next: number(5),
            clean: number(6) == 1,
        };
        header.check()?;
        Ok(Some(header))
    }

    fn check(&self) -> Result<()> {
        let layout = Layout::new(self.capacity)?;
        // These counters only grow, and in practice never reach the limits. The limits exclude an overflow of sums.
        let counters = [self.sequence, self.tail, self.tail_number];
        let reached = counters.iter().any(|counter| *counter > 1 << 60) || self.incarnation > 1 << 30;
        // Every grain has at most one location, and crashes leave only few other blocks unreferenced.
        let most = layout.data + 2 * layout.grains + (1 << 30);
        if reached || self.next < layout.data || self.next > most {
            return Err(Error::new(ErrorKind::Corrupt, "its header holds invalid numbers"));
        }
        Ok(())
    }

    /// Reads the newer valid copy.
    pub(super) fn read(file: &AlignedFile) -> Result<Self> {
        let mut bytes = vec![0; SIZE * COPIES as usize];
        file.read_at(&mut bytes, 0).during(|| "cannot read the header".to_owned())?;
        let mut newest: Option<Self> = None;
        for copy in bytes.chunks_exact(SIZE) {
            let mut block = [0; SIZE];
            block.copy_from_slice(copy);
            if let Some(header) = Self::decode(&block)?
                && newest.as_ref().is_none_or(|newest| newest.sequence < header.sequence)
            {
                newest = Some(header);
            }
        }
        let what = "this is no vsanSparse object: neither copy of its header is valid";
        newest.ok_or_else(|| Error::new(ErrorKind::Invalid, what))
    }

    /// Writes the next header over the older copy. Durable on return.
    pub(super) fn write(&mut self, file: &AlignedFile) -> Result<()> {
        self.sequence += 1;
        let offset = self.sequence % COPIES * BLOCK;
        file.write_at(&[&self.encode()], offset, true).during(|| "cannot write the header".to_owned())
    }
}

/// Sets the checksum in its field.
pub(super) fn seal(bytes: &mut [u8], field: usize) {
    let sum = checksum_without(bytes, field);
    bytes[field..field + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Whether the checksum is right.
pub(super) fn is_sealed(bytes: &[u8], field: usize) -> bool {
    bytes[field..field + 4] == checksum_without(bytes, field).to_le_bytes()
}

/// A number in a structure.
pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[offset..offset + 8]);
    u64::from_le_bytes(field)
}
