//! The fields of a superblock that a checkpoint changes.

use crate::journal::Place;

/// The fields that the superblock has after a checkpoint: nine numbers of eight bytes. They are stored in the head of
/// the images file and, in version 1, at the end of a checkpoint in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointRecord {
    /// Position from which urgent batches are replayed. In version 1, the page images also follow it.
    pub tail: Place,
    /// Position from which batches of pending operations are replayed.
    pub ordered: Place,
    pub data_regions: u64,
    pub map_regions: u64,
    pub map_length: u64,
    pub catalog_slots: u64,
    pub next_id: u64,
}

impl CheckpointRecord {
    const WORDS: usize = 9;
    /// Bytes of the stored form.
    pub const SIZE: usize = 8 * Self::WORDS;

    /// The stored form of the fields.
    pub fn encode(&self) -> Vec<u8> {
        let words: [u64; Self::WORDS] = [
            self.tail.position,
            self.tail.sequence,
            self.ordered.position,
            self.ordered.sequence,
            self.data_regions,
            self.map_regions,
            self.map_length,
            self.catalog_slots,
            self.next_id,
        ];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Reads the stored form of the fields.
    pub fn decode(body: &[u8]) -> Option<Self> {
        if body.len() != Self::SIZE {
            return None;
        }
        let word = |i: usize| u64::from_le_bytes(body[8 * i..8 * i + 8].try_into().expect("eight bytes"));
        Some(Self {
            tail: Place { position: word(0), sequence: word(1) },
            ordered: Place { position: word(2), sequence: word(3) },
            data_regions: word(4),
            map_regions: word(5),
            map_length: word(6),
            catalog_slots: word(7),
            next_id: word(8),
        })
    }
}
