//! The superblock: two copies of 4 KiB, written alternately. The valid copy with the higher sequence number counts.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | magic `LAMINADS` |
//! | 8 | 4 | format version: 2 to 8, by what was used; version 1 is read, without the fields from 144 on |
//! | 12 | 4 | CRC32C of the copy with this field zero |
//! | 16 | 16 | UUID of the datastore |
//! | 32 | 8 | sequence number of the copy |
//! | 40 | 8 | size of the journal ring in bytes |
//! | 48 | 8 | position of the oldest journal batch needed |
//! | 56 | 8 | its sequence number |
//! | 64 | 8 | regions of the data |
//! | 72 | 8 | regions of the map |
//! | 80 | 8 | reserved length of the map file in blocks |
//! | 88 | 8 | slots of the catalog |
//! | 96 | 8 | next object id |
//! | 104 | 8 | creation time, seconds since 1970 |
//! | 112 | 1 | 1: closed cleanly, the journal is empty |
//! | 120 | 8 | incarnation: the last opening that appended to the journal |
//! | 128 | 8 | position from which batches of pending operations are replayed: the pages contain those before it |
//! | 136 | 8 | its sequence number |
//! | 144 | 8 | number of the last checkpoint |
//! | 152 | 8 | page images of that checkpoint that recovery has to write to their places, 0: none |
//! | 160 | 4 | CRC32C of the head of the images file |
//! | 164 | 1 | copies of the superblock that openings rewrote and no check has reported: bits 0 and 1 |
//! | 168 | 4 | pages of summaries that openings recounted, and no check has reported |

use super::CheckpointRecord;
use crate::journal::Place;
use crate::{Error, ErrorKind, IoContext, Result, checksum};
use backend::{BLOCK_SIZE, Buffer, File};

const MAGIC: &[u8; 8] = b"LAMINADS";
const CHECKSUM_AT: usize = 12;
/// The version that is written, unless the datastore needs a later one.
pub const FORMAT_VERSION: u32 = 2;
/// The version of a datastore that may have packs.
pub const VERSION_PACKS: u32 = 3;
/// The version of a datastore in which several logical blocks may map one block, and which may have packs too.
pub const VERSION_SHARES: u32 = 4;
/// The version of a datastore whose writes may go into packs at once, with everything that the versions before have.
pub const VERSION_WRITTEN_PACKS: u32 = 5;
/// The version of a datastore in which several logical blocks may map one block of a pack, with everything that the
/// versions before have.
pub const VERSION_SHARED_PACKS: u32 = 6;
/// The version of a datastore whose writes may be mapped to blocks that are in use already, with everything that the
/// versions before have.
pub const VERSION_SHARED_WRITES: u32 = 7;
/// The version of a datastore whose writes may be mapped to blocks in packs that are in use already, with everything
/// that the versions before have.
pub const VERSION_WRITES_TO_PACKS: u32 = 8;
/// Every version up to this one can be read.
const VERSION_LAST: u32 = VERSION_WRITES_TO_PACKS;
/// The version without an images file.
const VERSION_RING_IMAGES: u32 = 1;

/// The page images that recovery has to write to their places before it reads metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedImages {
    /// Number of images.
    pub count: u64,
    /// CRC32C of the head of the images file.
    pub checksum: u32,
}

/// Damage that openings found and repaired, until a check has reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unreported {
    /// Copies of the superblock: bits 0 and 1.
    pub copies: u8,
    /// Number of pages of summaries.
    pub summaries: u32,
}

/// The superblock: what opening reads first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The version of the copy that was read. Copies are written with [`FORMAT_VERSION`] or a later one.
    pub version: u32,
    pub uuid: [u8; 16],
    pub sequence: u64,
    pub journal_size: u64,
    /// What the last checkpoint has changed.
    pub record: CheckpointRecord,
    pub created: u64,
    pub clean: bool,
    pub incarnation: u64,
    /// Number of the last checkpoint that was committed.
    pub checkpoint: u64,
    /// The images of that checkpoint, until all their pages are durable at their places.
    pub images: Option<NamedImages>,
    /// Repairs of openings that no check has reported.
    pub unreported: Unreported,
}

impl Superblock {
    /// True when the datastore has an images file.
    pub fn has_images_file(&self) -> bool {
        self.version > VERSION_RING_IMAGES
    }

    /// Whether a flush returned only when the record of the overwrites that it had settled was in the journal. Programs
    /// that wrote version 1 did not wait for this record.
    pub fn tells_settled_overwrites(&self) -> bool {
        self.version > VERSION_RING_IMAGES
    }

    /// Whether several logical blocks may map one block of the datastore.
    pub fn has_shares(&self) -> bool {
        self.version >= VERSION_SHARES
    }

    /// Whether writes of the datastore may have gone into packs at once.
    pub fn has_written_packs(&self) -> bool {
        self.version >= VERSION_WRITTEN_PACKS
    }

    /// A datastore that has used packs or shares stays at their version, because snapshots may keep them.
    fn version_written(&self) -> u32 {
        self.version.max(FORMAT_VERSION)
    }

    fn encode(&self) -> Buffer {
        let mut out = Buffer::zeroed(1);
        out[0..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&self.version_written().to_le_bytes());
        out[16..32].copy_from_slice(&self.uuid);
        let words = [
            self.sequence,
            self.journal_size,
            self.record.tail.position,
            self.record.tail.sequence,
            self.record.data_regions,
            self.record.map_regions,
            self.record.map_length,
            self.record.catalog_slots,
            self.record.next_id,
            self.created,
        ];
        for (i, word) in words.into_iter().enumerate() {
            out[32 + 8 * i..40 + 8 * i].copy_from_slice(&word.to_le_bytes());
        }
        out[112] = u8::from(self.clean);
        out[120..128].copy_from_slice(&self.incarnation.to_le_bytes());
        out[128..136].copy_from_slice(&self.record.ordered.position.to_le_bytes());
        out[136..144].copy_from_slice(&self.record.ordered.sequence.to_le_bytes());
        out[144..152].copy_from_slice(&self.checkpoint.to_le_bytes());
        if let Some(images) = self.images {
            out[152..160].copy_from_slice(&images.count.to_le_bytes());
            out[160..164].copy_from_slice(&images.checksum.to_le_bytes());
        }
        out[164] = self.unreported.copies;
        out[168..172].copy_from_slice(&self.unreported.summaries.to_le_bytes());
        let sum = checksum(&out);
        out[12..16].copy_from_slice(&sum.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Result<Option<Self>> {
        if bytes[0..8] != *MAGIC {
            return Ok(None);
        }
        let mut zeroed = bytes.to_vec();
        zeroed[12..16].fill(0);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if bytes[12..16] != checksum(&zeroed).to_le_bytes() {
            return Ok(None);
        }
        let version = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
        if !(VERSION_RING_IMAGES..=VERSION_LAST).contains(&version) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the datastore has format version {version}; this lamina reads versions {VERSION_RING_IMAGES} to \
                     {VERSION_LAST}"
                ),
            ));
        }
        let since_2 = |value: u64| if version > VERSION_RING_IMAGES { value } else { 0 };
        let count = since_2(word(152));
        let checksum = u32::from_le_bytes(bytes[160..164].try_into().expect("four bytes"));
        let summaries = u32::from_le_bytes(bytes[168..172].try_into().expect("four bytes"));
        let superblock = Self {
            version,
            uuid: bytes[16..32].try_into().expect("sixteen bytes"),
            sequence: word(32),
            journal_size: word(40),
            record: CheckpointRecord {
                tail: Place { position: word(48), sequence: word(56) },
                ordered: Place { position: word(128), sequence: word(136) },
                data_regions: word(64),
                map_regions: word(72),
                map_length: word(80),
                catalog_slots: word(88),
                next_id: word(96),
            },
            created: word(104),
            clean: bytes[112] != 0,
            incarnation: word(120),
            checkpoint: since_2(word(144)),
            images: (count > 0).then_some(NamedImages { count, checksum }),
            unreported: Unreported { copies: bytes[164], summaries },
        };
        let sane = superblock.journal_size >= crate::engine::JOURNAL_SIZE_MIN
            && superblock.journal_size <= crate::engine::JOURNAL_SIZE_MAX
            && superblock.journal_size.is_multiple_of(BLOCK_SIZE as u64)
            && superblock.record.tail.position.is_multiple_of(BLOCK_SIZE as u64)
            && superblock.record.tail.position < 1 << 62
            && superblock.record.tail.sequence < 1 << 62
            && superblock.record.ordered.position < 1 << 62
            && superblock.record.ordered.sequence < 1 << 62
            && superblock.record.ordered >= superblock.record.tail
            && superblock.incarnation < 1 << 62
            && superblock.sequence < 1 << 62
            && superblock.checkpoint < 1 << 62
            && count < super::images::COUNT_LIMIT
            && superblock.unreported.copies < 1 << 2
            && superblock.record.next_id < 1 << 62
            && superblock.record.data_regions < 1 << 32
            && superblock.record.map_regions < 1 << 32
            && superblock.record.map_length < 1 << 48
            && superblock.record.catalog_slots < 1 << 32;
        if !sane {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "the superblock passes its checksum but holds impossible sizes",
            ));
        }
        Ok(Some(superblock))
    }

    /// Reads copy 0 or 1. The medium may fail a single read only, so a failed read is tried again.
    fn read_copy(file: &dyn File, copy: u64) -> Result<Buffer> {
        crate::pages::patiently(|| {
            let mut bytes = Buffer::zeroed(1);
            let read = file.read_at(&mut bytes, copy * BLOCK_SIZE as u64);
            read.during(|| format!("reading copy {} of 2 of the superblock", copy + 1)).map(|()| bytes)
        })
    }

    /// Reads the newer of the two copies. The boolean is true if the other copy is unreadable or fails its checksum, so
    /// that it may have been newer.
    pub fn read(file: &dyn File) -> Result<(Self, bool)> {
        let mut newest: Option<Self> = None;
        let (mut refused, mut unread) = (None, None);
        let mut lost = false;
        for copy in 0..2 {
            let bytes = match Self::read_copy(file, copy) {
                Ok(bytes) => bytes,
                Err(error) => {
                    (lost, unread) = (true, Some(error));
                    continue;
                }
            };
            match Self::decode(&bytes) {
                Ok(Some(found)) if newest.is_none_or(|best| found.sequence > best.sequence) => newest = Some(found),
                Ok(Some(_)) => {}
                Ok(None) => lost = true,
                Err(error) => refused = Some(error),
            }
        }
        match (newest, refused, unread) {
            (Some(found), None, _) => Ok((found, lost)),
            (_, Some(error), _) => Err(error),
            (None, None, Some(error)) => Err(error.context(
                "neither copy of the superblock can be used; mend the medium, or read out what can be read with 'lamina \
                 salvage'",
            )),
            (None, None, None) => Err(Error::new(
                ErrorKind::Corrupt,
                "neither copy of the superblock can be read: this is not a datastore, or both copies are damaged; 'lamina \
                 salvage' reads out what can be read",
            )),
        }
    }

    /// Like [`Superblock::read`], but corrects one inverted bit in each copy.
    pub fn read_mended(file: &dyn File) -> Result<(Self, bool)> {
        let mut newest: Option<Self> = None;
        let mut lost = false;
        for copy in 0..2 {
            let Ok(mut bytes) = Self::read_copy(file, copy) else {
                lost = true;
                continue;
            };
            let mut decoded = Self::decode(&bytes);
            if matches!(decoded, Ok(None)) && crate::pages::restore_bit(&mut bytes, CHECKSUM_AT) {
                decoded = Self::decode(&bytes);
            }
            match decoded {
                Ok(Some(found)) if newest.is_none_or(|best| found.sequence > best.sequence) => newest = Some(found),
                Ok(Some(_)) => {}
                // A copy of a later version is no damage.
                Err(error) if error.kind() == ErrorKind::Unsupported => return Err(error),
                Ok(None) | Err(_) => lost = true,
            }
        }
        match newest {
            Some(found) => Ok((found, lost)),
            None => Self::read(file),
        }
    }

    /// Finds which copy in the file, 0 or 1, is damaged while the other equals this superblock.
    pub fn damaged_copy(&self, file: &dyn File) -> Result<Option<u64>> {
        let other = (self.sequence + 1) % 2;
        let Ok(bytes) = Self::read_copy(file, other) else { return Ok(Some(other)) };
        // A new datastore has one copy only, the one with sequence number 1.
        let never_written = self.sequence == 1 && bytes.iter().all(|byte| *byte == 0);
        let whole = matches!(Self::decode(&bytes), Ok(Some(_)));
        Ok((!whole && !never_written).then_some(other))
    }

    /// Writes the superblock durably over the older copy, with the next sequence number. After an error the next write
    /// goes to the same copy, because the other one may be the only good one.
    pub fn write(&mut self, file: &dyn File) -> Result<()> {
        let next = Self { sequence: self.sequence + 1, version: self.version_written(), ..*self };
        file.write_at(&[&next.encode()], next.sequence % 2 * BLOCK_SIZE as u64, true)
            .during(|| "writing the superblock".into())?;
        *self = next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use backend::IoMode;
    use backend::simulated::{Fault, SimulatedDisk, SimulatedOptions};

    fn superblock() -> Superblock {
        Superblock {
            version: FORMAT_VERSION,
            uuid: [7; 16],
            sequence: 9,
            journal_size: crate::engine::JOURNAL_SIZE_MIN,
            record: CheckpointRecord {
                tail: Place { position: 8 << 12, sequence: 3 },
                ordered: Place { position: 9 << 12, sequence: 4 },
                data_regions: 2,
                map_regions: 1,
                map_length: 5 << 12,
                catalog_slots: 6,
                next_id: 11,
            },
            created: 12,
            clean: true,
            incarnation: 13,
            checkpoint: 14,
            images: Some(NamedImages { count: 3, checksum: 15 }),
            unreported: Unreported { copies: 2, summaries: 16 },
        }
    }

    #[test]
    fn a_superblock_copy_with_a_wrong_byte_is_not_used() {
        let superblock = superblock();
        let mut bytes = superblock.encode();
        let decoded = Superblock::decode(&bytes).unwrap().unwrap();
        assert_eq!((decoded.encode()[..] == bytes[..], decoded.unreported), (true, superblock.unreported));
        for at in 0..bytes.len() {
            bytes[at] ^= 0x10;
            assert!(matches!(Superblock::decode(&bytes), Ok(None)), "byte {at}");
            bytes[at] ^= 0x10;
        }
    }

    #[test]
    fn after_a_failed_write_the_good_copy_is_not_overwritten() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let file = disk.directory().create("superblock", IoMode::Buffered).unwrap();
        let mut superblock = superblock();
        superblock.write(&*file).unwrap();
        let good = superblock;
        disk.fail_requests(Fault::Write, 0, 1);
        superblock.write(&*file).unwrap_err();
        superblock.write(&*file).unwrap();
        let kept = Superblock::read_copy(&*file, good.sequence % 2).unwrap();
        assert!(kept[..] == good.encode()[..] && superblock.sequence == good.sequence + 1);
    }
}
