//! The journal: a ring of batches. Each append makes changes since the last checkpoint durable.
//!
//! A batch is a head of 64 bytes and a body, padded to 4 KiB, written with one durable write. Positions are byte
//! offsets that only grow. The batch at a position is stored at `position % size`, and may wrap around the end of the
//! file.
//!
//! What must hold:
//!
//! 1. A batch is valid only if head and body pass their checksum, it has its own position, its sequence number is the
//!    next one, and its incarnation (a number of the opening that appended it) is not lower than that of the batch
//!    before it. The first invalid batch ends the journal: neither it nor anything after it was acknowledged.
//! 2. Every opening that appends uses a higher incarnation than any batch found. So batches that remain past the point
//!    where a crash ended the journal are not mistaken for its continuation.
//! 3. The head never overtakes the tail. The tail moves only after a checkpoint has made everything before it
//!    unnecessary and the superblock has the new tail.
//! 4. A trailer is written at the head after everything before the head is durable, and does not move the head: the
//!    next batch overwrites it. So a valid trailer after an invalid batch proves that the batch is damaged, and not a
//!    torn append.

mod record;

pub use record::{Operation, PACK_OBJECTS_MAX, RUN_MAX, Reader, Writer};

use crate::pages::patiently;
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Buffer, File};
use std::cell::RefCell;
use std::sync::Arc;

const MAGIC: u32 = u32::from_le_bytes(*b"LMJB");
const VERSION: u16 = 1;
const HEAD_SIZE: usize = 64;
const CHECKSUM_AT: usize = 60;
/// Blocks read at a time when searching for batches (1 MiB): no ring is smaller.
const PIECE_BLOCKS: usize = 256;
/// No journal reaches this position in the lifetime of a device: a batch with a higher position is damaged.
const POSITION_MAX: u64 = 1 << 62;
/// The largest body of one batch.
pub const BODY_MAX: usize = 32 << 20;

/// The content of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchKind {
    /// Operations, in order.
    Operations,
    /// Operations appended ahead of pending ones, with which they commute.
    Urgent,
    /// Page images of a checkpoint under way (version 1).
    Pages,
    /// The end of a checkpoint: all its pages are in the journal (version 1). Body: a checkpoint record.
    Checkpoint,
    /// Not a batch: a trailer states that everything before it was durable when the trailer was written. A trailer has
    /// no body.
    Trailer,
}

impl BatchKind {
    fn code(self) -> u16 {
        match self {
            Self::Operations => 1,
            Self::Pages => 2,
            Self::Checkpoint => 3,
            Self::Urgent => 4,
            Self::Trailer => 5,
        }
    }

    fn from_code(code: u16) -> Option<Self> {
        [Self::Operations, Self::Pages, Self::Checkpoint, Self::Urgent, Self::Trailer]
            .into_iter()
            .find(|kind| kind.code() == code)
    }
}

/// A place in the journal: the position and sequence number of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Byte position, which only grows.
    pub position: u64,
    /// Sequence number of the batch.
    pub sequence: u64,
}

/// A batch that was read.
pub struct Batch {
    /// The place of the batch in the journal.
    pub place: Place,
    /// The place of the next batch.
    pub next: Place,
    /// The kind of the batch's body.
    pub kind: BatchKind,
    /// The incarnation under which the batch was written.
    pub incarnation: u64,
    /// The body of the batch.
    pub body: Vec<u8>,
}

/// The ring, open for appending at its head.
pub struct Journal {
    file: Arc<dyn File>,
    size: u64,
    salt: u64,
    incarnation: u64,
    tail: Place,
    head: Place,
    /// The place of the last trailer.
    trailed: Option<Place>,
    staging: Buffer,
    /// Whether batches with one inverted bit are corrected when they are read.
    mending: bool,
    /// Whether batches that the medium cannot read count as invalid.
    passing: bool,
    /// The part of the ring that was last read, if reads are in order. The next append ends this.
    ahead: Option<RefCell<Ahead>>,
}

/// A part of the ring.
#[derive(Default)]
struct Ahead {
    position: u64,
    bytes: Buffer,
    /// Before this position, no part is read ahead, because it could not be read.
    exact_to: u64,
}

impl Ahead {
    fn get(&self, position: u64, length: usize) -> Option<&[u8]> {
        let from = usize::try_from(position.checked_sub(self.position)?).ok()?;
        self.bytes.get(from..from.checked_add(length)?)
    }
}

impl Journal {
    /// A ring of `size` bytes. Its oldest needed batch is at `tail`. `salt` distinguishes it from rings of other
    /// datastores.
    pub fn new(file: Arc<dyn File>, size: u64, salt: u64, tail: Place) -> Self {
        Self {
            file,
            size,
            salt,
            incarnation: 0,
            tail,
            head: tail,
            trailed: None,
            staging: Buffer::default(),
            mending: false,
            passing: false,
            ahead: None,
        }
    }

    /// Makes later reads correct a batch with one inverted bit, which its checksum identifies
    /// ([`crate::pages::restore_bit`]): for repair and salvage.
    pub fn mend(&mut self) {
        self.mending = true;
    }

    /// Makes batches that the medium cannot read count as invalid, so that the journal ends before them: for repair and
    /// salvage, and for a store that was closed, which needs no batch.
    pub fn pass_over_unreadable(&mut self) {
        self.passing = true;
    }

    /// Makes later reads fetch large parts of the ring: for reads of all batches in order, before the next append.
    pub fn read_ahead(&mut self) {
        self.ahead = Some(RefCell::default());
    }

    /// Why the medium cannot read the batch at `place`; `None` if it can.
    pub fn unreadable(&self, place: Place, incarnation: u64) -> Option<Error> {
        self.read_patiently(place, incarnation).err()
    }

    /// Reads the batch at `place`. `None` at the end of the journal. A read error is returned as an error, except after
    /// [`Journal::pass_over_unreadable`].
    pub fn read(&self, place: Place, incarnation: u64) -> Result<Option<Batch>> {
        let found = self.read_any(place, incarnation)?;
        Ok(found.filter(|batch| batch.kind != BatchKind::Trailer))
    }

    /// Like [`Journal::read`], but returns trailers too.
    fn read_any(&self, place: Place, incarnation: u64) -> Result<Option<Batch>> {
        match self.read_patiently(place, incarnation) {
            Err(error) if self.passing && error.kind() == ErrorKind::Io => {
                tracing::error!(%error, position = place.position, "a part of the journal cannot be read");
                Ok(None)
            }
            other => other,
        }
    }

    fn read_patiently(&self, place: Place, incarnation: u64) -> Result<Option<Batch>> {
        patiently(|| self.read_once(place, incarnation))
    }

    fn read_once(&self, place: Place, incarnation: u64) -> Result<Option<Batch>> {
        if place.position > POSITION_MAX || place.sequence > POSITION_MAX {
            return Ok(None);
        }
        let mut first = Buffer::zeroed(1);
        self.read_ring(&mut first, place.position)?;
        let read = self.read_as(&first, place, incarnation, false)?;
        if read.is_some() || !self.mending {
            return Ok(read);
        }
        // The inverted bit may be in the head, which has the length of the body.
        for bit in 0..8 * HEAD_SIZE {
            first[bit / 8] ^= 1 << (bit % 8);
            if let Some(batch) = self.read_as(&first, place, incarnation, false)? {
                return Ok(Some(batch));
            }
            first[bit / 8] ^= 1 << (bit % 8);
        }
        self.read_as(&first, place, incarnation, true)
    }

    /// Reads the batch at `place`. `first` contains its head. With `mend`, one inverted bit of the body is corrected.
    fn read_as(&self, first: &[u8], place: Place, incarnation: u64, mend: bool) -> Result<Option<Batch>> {
        let Some(head) = Head::decode(first) else { return Ok(None) };
        if head.salt != self.salt
            || head.position != place.position
            || head.sequence != place.sequence
            || head.incarnation < incarnation
        {
            return Ok(None);
        }
        let padded = padded(head.length);
        if padded as u64 > self.size {
            return Ok(None);
        }
        let mut bytes = Buffer::with_bytes(padded);
        self.read_ring(&mut bytes, place.position)?;
        bytes[..HEAD_SIZE].copy_from_slice(&first[..HEAD_SIZE]);
        let whole = &mut bytes[..HEAD_SIZE + head.length];
        if Head::checksum(whole) != head.checksum && !(mend && crate::pages::restore_bit(whole, CHECKSUM_AT)) {
            return Ok(None);
        }
        Ok(Some(Batch {
            place,
            next: Place { position: place.position + padded as u64, sequence: place.sequence + 1 },
            kind: head.kind,
            incarnation: head.incarnation,
            body: bytes[HEAD_SIZE..HEAD_SIZE + head.length].to_vec(),
        }))
    }

    /// Searches past the end of the journal for a batch that can only be its continuation: undamaged, later, and not of
    /// an earlier incarnation. A crash leaves no such batch, because only the last batch can be torn. So if one is
    /// found, either the batches in between were damaged later, or the superblock that named the tail is outdated. A
    /// trailer counts as a batch too, except a trailer exactly at the end, which proves that nothing is missing. Blocks
    /// that the medium cannot read prove nothing. Returns the place of the batch found.
    pub fn continuation(&self, end: Place, incarnation: u64) -> Result<Option<Place>> {
        if end.position > POSITION_MAX {
            return Ok(None);
        }
        let reach = (padded(BODY_MAX) as u64 + BLOCK_SIZE as u64).min(self.size);
        let mut piece = Buffer::zeroed(PIECE_BLOCKS);
        let mut ahead = 0;
        while ahead < reach {
            self.read_piece(&mut piece, end.position + ahead);
            for (i, block) in piece.chunks_exact(BLOCK_SIZE).enumerate() {
                let offset = (end.position + ahead + (i * BLOCK_SIZE) as u64) % self.size;
                if let Some(head) = Head::decode(block)
                    && head.salt == self.salt
                    && head.incarnation >= incarnation
                    && head.position >= end.position
                    && head.position % self.size == offset
                    && head.sequence >= end.sequence
                {
                    let place = Place { position: head.position, sequence: head.sequence };
                    let ends_here = head.kind == BatchKind::Trailer && place.sequence == end.sequence;
                    if !ends_here && self.read_any(place, incarnation)?.is_some() {
                        return Ok(Some(place));
                    }
                }
            }
            ahead += piece.len() as u64;
        }
        Ok(None)
    }

    /// Reads a piece of the ring. Blocks that the medium cannot read become zeros.
    fn read_piece(&self, piece: &mut Buffer, position: u64) {
        if self.read_ring(piece, position).is_ok() {
            return;
        }
        let mut block = Buffer::zeroed(1);
        for (i, out) in piece.chunks_exact_mut(BLOCK_SIZE).enumerate() {
            match self.read_ring(&mut block, position + (i * BLOCK_SIZE) as u64) {
                Ok(()) => out.copy_from_slice(&block),
                Err(error) => {
                    tracing::warn!(%error, "a block behind the end of the journal cannot be read");
                    out.fill(0);
                }
            }
        }
    }

    fn read_ring(&self, buffer: &mut Buffer, position: u64) -> Result<()> {
        let Some(ahead) = &self.ahead else { return self.read_exact(buffer, position) };
        let mut ahead = ahead.borrow_mut();
        if ahead.get(position, buffer.len()).is_none() {
            // If a part cannot be read, only the reads that need it fail.
            if position < ahead.exact_to || buffer.len() > PIECE_BLOCKS * BLOCK_SIZE {
                return self.read_exact(buffer, position);
            }
            let mut bytes = std::mem::take(&mut ahead.bytes);
            if bytes.is_empty() {
                bytes = Buffer::zeroed(PIECE_BLOCKS);
            }
            if self.read_exact(&mut bytes, position).is_err() {
                ahead.exact_to = position + bytes.len() as u64;
                return self.read_exact(buffer, position);
            }
            (ahead.position, ahead.bytes) = (position, bytes);
        }
        if let Some(bytes) = ahead.get(position, buffer.len()) {
            buffer.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn read_exact(&self, buffer: &mut Buffer, position: u64) -> Result<()> {
        let at = position % self.size;
        let until_wrap = ((self.size - at) as usize).min(buffer.len());
        let (before, after) = buffer.split_at_mut(until_wrap);
        self.file.read_at(before, at).during(|| format!("reading the journal at {at}"))?;
        if !after.is_empty() {
            self.file.read_at(after, 0).during(|| "reading the journal at 0".into())?;
        }
        Ok(())
    }

    /// The salt in the first batch, for a datastore that never made a checkpoint.
    pub fn first_salt(file: &dyn File) -> Option<u64> {
        let mut first = Buffer::zeroed(1);
        file.read_at(&mut first, 0).ok()?;
        Head::decode(&first).filter(|head| (head.position, head.sequence) == (0, 1)).map(|head| head.salt)
    }

    /// Sets the head after the last batch found. Later batches are appended under `incarnation`.
    pub fn resume(&mut self, head: Place, incarnation: u64) {
        self.head = head;
        self.incarnation = incarnation;
    }

    /// The place of the next batch.
    pub fn head(&self) -> Place {
        self.head
    }

    /// The place of the oldest batch that is still needed.
    pub fn tail(&self) -> Place {
        self.tail
    }

    /// The incarnation under which batches are appended.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Bytes between tail and head.
    pub fn used(&self) -> u64 {
        self.head.position - self.tail.position
    }

    /// Size of the ring in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Makes the ring space before `tail` free for new batches.
    pub fn release(&mut self, tail: Place) {
        debug_assert!(tail >= self.tail && tail <= self.head);
        self.tail = tail;
    }

    /// The bytes of the ring that a batch with a body of this length takes.
    pub fn footprint(body: usize) -> u64 {
        padded(body) as u64
    }

    /// Appends one durable batch. Its body consists of `parts`. After an error nothing more may be appended, because
    /// the content of the file is unknown.
    pub fn append(&mut self, kind: BatchKind, parts: &[&[u8]]) -> Result<()> {
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        let padded = padded(length);
        if length > BODY_MAX || self.used() + padded as u64 > self.size {
            return Err(Error::new(ErrorKind::NoSpace, format!("the journal has no room for {length} bytes")));
        }
        self.stage(kind, parts, length);
        let offset = self.head.position % self.size;
        let until_wrap = ((self.size - offset) as usize).min(padded);
        let doing = || format!("appending {padded} bytes to the journal");
        self.file.write_at(&[&self.staging[..until_wrap]], offset, true).during(doing)?;
        if until_wrap < padded {
            self.file.write_at(&[&self.staging[until_wrap..padded]], 0, true).during(doing)?;
        }
        self.head = Place { position: self.head.position + padded as u64, sequence: self.head.sequence + 1 };
        if self.staging.len() > 4 << 20 {
            self.staging = Buffer::default();
        }
        Ok(())
    }

    /// Builds a batch for the head in `staging`.
    fn stage(&mut self, kind: BatchKind, parts: &[&[u8]], length: usize) {
        self.ahead = None;
        let padded = padded(length);
        if self.staging.len() < padded {
            self.staging = Buffer::with_bytes(padded.next_power_of_two());
        }
        let mut at = HEAD_SIZE;
        for part in parts {
            self.staging[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        self.staging[at..padded].fill(0);
        let head = Head {
            kind,
            salt: self.salt,
            incarnation: self.incarnation,
            sequence: self.head.sequence,
            position: self.head.position,
            length,
            checksum: 0,
        };
        head.encode(&mut self.staging[..HEAD_SIZE]);
        let sum = Head::checksum(&self.staging[..at]);
        self.staging[60..64].copy_from_slice(&sum.to_le_bytes());
    }

    /// Writes a trailer at the head, without a flush, unless one is there, the journal is empty, or the ring has no
    /// room. Everything before the head is durable, because appends are. A failed write leaves no valid trailer, and
    /// the next batch overwrites the place.
    pub fn trail(&mut self) -> Result<()> {
        if self.trailed == Some(self.head) || self.used() == 0 || self.used() + BLOCK_SIZE as u64 > self.size {
            return Ok(());
        }
        // The trailer is not written again before the next batch, even after a failure.
        self.trailed = Some(self.head);
        self.stage(BatchKind::Trailer, &[], 0);
        let offset = self.head.position % self.size;
        self.file
            .write_at(&[&self.staging[..BLOCK_SIZE]], offset, false)
            .during(|| "writing the trailer of the journal".into())
    }
}

fn padded(body: usize) -> usize {
    (HEAD_SIZE + body).next_multiple_of(BLOCK_SIZE)
}

/// The head of a batch.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | magic `LMJB` |
/// | 4 | 2 | version, 1 |
/// | 6 | 2 | kind: 1 operations, 2 pages, 3 checkpoint, 4 urgent, 5 trailer |
/// | 8 | 8 | salt: first half of the datastore's UUID |
/// | 16 | 8 | incarnation |
/// | 24 | 8 | sequence number |
/// | 32 | 8 | position |
/// | 40 | 4 | length of the body in bytes |
/// | 44 | 16 | zero |
/// | 60 | 4 | CRC32C of head and body with this field zero |
struct Head {
    kind: BatchKind,
    salt: u64,
    incarnation: u64,
    sequence: u64,
    position: u64,
    length: usize,
    checksum: u32,
}

impl Head {
    fn encode(&self, out: &mut [u8]) {
        out.fill(0);
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&self.kind.code().to_le_bytes());
        out[8..16].copy_from_slice(&self.salt.to_le_bytes());
        out[16..24].copy_from_slice(&self.incarnation.to_le_bytes());
        out[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        out[32..40].copy_from_slice(&self.position.to_le_bytes());
        out[40..44].copy_from_slice(&(self.length as u32).to_le_bytes());
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"));
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if u32_at(0) != MAGIC || u16_at(4) != VERSION {
            return None;
        }
        let length = u32_at(40) as usize;
        (length <= BODY_MAX).then_some(())?;
        Some(Self {
            kind: BatchKind::from_code(u16_at(6))?,
            salt: u64_at(8),
            incarnation: u64_at(16),
            sequence: u64_at(24),
            position: u64_at(32),
            length,
            checksum: u32_at(60),
        })
    }

    /// The checksum over head and body, with the checksum field taken as zero.
    fn checksum(bytes: &[u8]) -> u32 {
        checksums::checksum_without(bytes, HEAD_SIZE - 4)
    }
}

#[cfg(test)]
mod tests;
