//! The log: changes of the map since the last checkpoint, in batches, in a preallocated ring of blocks.
//!
//! A *position* counts blocks and only grows; the block in the ring is the position modulo its size. A batch is valid
//! if its checksum is right, it belongs to this object, is at the position that it states, has the next number, and an
//! incarnation not lower than that of the batch before. The first invalid batch ends the log. A batch is durable before
//! the next is begun, so only the last can be torn.

use super::header::{is_sealed, seal, u64_at};
use super::layout::{BLOCK, LOG_BLOCKS, LOG_START};
use crate::aligned::AlignedFile;
use crate::{IoContext, Result};

const SIZE: usize = BLOCK as usize;
const MAGIC: [u8; 4] = *b"LVSL";
const OFFSET_CHECKSUM: usize = 4;
/// The first byte after the head.
const BODY: usize = 64;
const RECORD_SIZE: usize = 16;

/// Blocks of the largest batch.
pub(super) const BATCH_BLOCKS_MAX: u64 = 16;
/// Records of the largest batch.
const BATCH_RECORDS_MAX: usize = (BATCH_BLOCKS_MAX as usize * SIZE - BODY) / RECORD_SIZE;

/// The most grains of one record: 64 GiB less one grain.
const RECORD_GRAINS_MAX: u64 = (1 << 24) - 1;

const GRAIN_MASK: u64 = (1 << 40) - 1;
const KIND_SHIFT: u32 = 56;
const KIND_DATA: u64 = 1;
const KIND_ZERO: u64 = 2;

/// A change of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The first grain of the record.
    pub(super) grain: u64,
    /// Number of grains.
    pub(super) count: u64,
    /// The block with the first grain's data; `None` for zeros.
    pub(super) place: Option<u64>,
}

impl Record {
    fn encode(&self) -> [u8; RECORD_SIZE] {
        let target = match self.place {
            Some(place) => KIND_DATA << KIND_SHIFT | place,
            None => KIND_ZERO << KIND_SHIFT,
        };
        let mut bytes = [0; RECORD_SIZE];
        bytes[..8].copy_from_slice(&(self.grain | self.count << 40).to_le_bytes());
        bytes[8..].copy_from_slice(&target.to_le_bytes());
        bytes
    }

    /// Decodes a record; `None` for a record of an unknown kind.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (range, target) = (u64_at(bytes, 0), u64_at(bytes, 8));
        let place = target & ((1 << KIND_SHIFT) - 1);
        let place = match target >> KIND_SHIFT {
            KIND_DATA => Some(place),
            KIND_ZERO if place == 0 => None,
            _ => return None,
        };
        Some(Self { grain: range & GRAIN_MASK, count: range >> 40, place })
    }
}

/// Changes that wait to be logged.
#[derive(Default)]
pub(super) struct Pending {
    records: Vec<Record>,
    /// Changes that have reserved room and may not be in `records` yet.
    pub(super) reserved: usize,
}

impl Pending {
    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    /// Adds a change after all others.
    pub(super) fn push(&mut self, record: Record) {
        if let Some(last) = self.records.last_mut()
            && last.grain + last.count == record.grain
            && last.place.map(|place| place + last.count) == record.place
            && last.count + record.count <= RECORD_GRAINS_MAX
        {
            last.count += record.count;
            return;
        }
        self.records.push(record);
    }

    pub(super) fn take(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.records)
    }
}

/// The number of blocks of a batch with this many records.
pub(super) const fn blocks_of(records: usize) -> u64 {
    let full = records / BATCH_RECORDS_MAX;
    let rest = records % BATCH_RECORDS_MAX;
    let rest = if rest > 0 { (BODY + rest * RECORD_SIZE).div_ceil(SIZE) } else { 0 };
    full as u64 * BATCH_BLOCKS_MAX + rest as u64
}

/// The positions of the log's end and of its oldest needed batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Log {
    pub(super) id: [u8; 16],
    pub(super) incarnation: u64,
    /// Position of the oldest needed batch.
    pub(super) tail: u64,
    /// Position of the next batch.
    pub(super) head: u64,
    /// Number of the next batch.
    pub(super) number: u64,
}

impl Log {
    /// Number of blocks between tail and head.
    pub(super) fn used(&self) -> u64 {
        self.head - self.tail
    }

    /// Appends records, for which there must be room. Durable on return.
    pub(super) fn append(&mut self, file: &AlignedFile, records: &[Record]) -> Result<()> {
        for part in records.chunks(BATCH_RECORDS_MAX) {
            let length = (BODY + part.len() * RECORD_SIZE).next_multiple_of(SIZE);
            let mut buffer = backend::Buffer::zeroed(length / SIZE);
            buffer[..4].copy_from_slice(&MAGIC);
            buffer[8..24].copy_from_slice(&self.id);
            let numbers = [self.incarnation, self.number, self.head, part.len() as u64];
            for (field, number) in buffer[24..].chunks_exact_mut(8).zip(numbers) {
                field.copy_from_slice(&number.to_le_bytes());
            }
            for (field, record) in buffer[BODY..].chunks_exact_mut(RECORD_SIZE).zip(part) {
                field.copy_from_slice(&record.encode());
            }
            seal(&mut buffer, OFFSET_CHECKSUM);
            // A batch at the end of the ring continues at its beginning.
            let start = self.head % LOG_BLOCKS;
            let cut = ((LOG_BLOCKS - start) as usize * SIZE).min(length);
            for (offset, bytes) in [(start, &buffer[..cut]), (0, &buffer[cut..])] {
                if !bytes.is_empty() {
                    let context = || "cannot write the log".to_owned();
                    file.write_at(&[bytes], (LOG_START + offset) * BLOCK, true).during(context)?;
                }
            }
            self.head += (length / SIZE) as u64;
            self.number += 1;
        }
        Ok(())
    }

    /// Passes the records from the tail on to `apply`, which refuses invalid ones, and finds the end of the log.
    pub(super) fn replay(&mut self, file: &AlignedFile, mut apply: impl FnMut(Record) -> Result<()>) -> Result<()> {
        self.head = self.tail;
        let mut incarnation = 0;
        while let Some((batch, records)) = self.next_batch(file, incarnation)? {
            for record in &records {
                apply(*record)?;
            }
            incarnation = batch.incarnation;
            self.head = batch.head;
            self.number += 1;
        }
        Ok(())
    }

    /// The batch at the head, if it is valid.
    fn next_batch(&self, file: &AlignedFile, incarnation: u64) -> Result<Option<(Log, Vec<Record>)>> {
        let left = LOG_BLOCKS - self.used();
        if left == 0 {
            return Ok(None);
        }
        let read = |position: u64, out: &mut [u8]| {
            let offset = (LOG_START + position % LOG_BLOCKS) * BLOCK;
            file.read_at(out, offset).during(|| "cannot read the log".to_owned())
        };
        let mut bytes = vec![0; SIZE];
        read(self.head, &mut bytes)?;
        let number = |index: usize| u64_at(&bytes, 24 + index * 8);
        let found = number(0);
        let is_next = number(1) == self.number && number(2) == self.head;
        let is_current = found >= incarnation && found <= self.incarnation;
        if bytes[..4] != MAGIC || bytes[8..24] != self.id || !is_next || !is_current {
            return Ok(None);
        }
        let count = usize::try_from(number(3)).unwrap_or(usize::MAX);
        if count == 0 || count > BATCH_RECORDS_MAX {
            return Ok(None);
        }
        let blocks = (BODY + count * RECORD_SIZE).div_ceil(SIZE);
        if blocks as u64 > left {
            return Ok(None);
        }
        bytes.resize(blocks * SIZE, 0);
        for (position, block) in (self.head..).zip(bytes.chunks_exact_mut(SIZE)).skip(1) {
            read(position, block)?;
        }
        if !is_sealed(&bytes, OFFSET_CHECKSUM) {
            return Ok(None);
        }
        let records = bytes[BODY..].chunks_exact(RECORD_SIZE).take(count).map(Record::decode);
        let records: Option<Vec<Record>> = records.collect();
        let batch = Log { incarnation: found, head: self.head + blocks as u64, ..*self };
        Ok(records.map(|records| (batch, records)))
    }
}
