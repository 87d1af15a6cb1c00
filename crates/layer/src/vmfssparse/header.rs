//! The header of a redo log: 2,048 bytes at the start of the file.
//!
//! A header that passes [`Header::decode`] has a capacity, a grain and a directory size within the limits below. The
//! location of the directory is checked when it is read. Fields that lamina does not use (names, generations) are
//! written back unchanged.

use crate::{Error, ErrorKind, Result, SECTOR};

/// The magic number of a redo log: `COWD`.
pub const MAGIC: [u8; 4] = *b"COWD";

/// Bytes of the header.
pub const HEADER_SIZE: usize = 2048;

/// Sectors of the header.
pub(super) const HEADER_SECTORS: u64 = HEADER_SIZE as u64 / SECTOR;

/// Entries of a grain table, which is a fixed number.
pub const TABLE_ENTRIES: u32 = 4096;

/// Bytes of a grain table.
pub(super) const TABLE_SIZE: usize = TABLE_ENTRIES as usize * 4;

/// Sectors of a grain table.
pub(super) const TABLE_SECTORS: u64 = TABLE_SIZE as u64 / SECTOR;

/// One more than the last sector that an entry can name: 2 TiB.
pub(super) const SECTORS_END: u64 = 1 << 32;

/// The largest grain in sectors: 1 GiB, QEMU's limit.
pub const GRAIN_SECTORS_MAX: u32 = 0x20_0000;

/// The largest grain in sectors for writing: 1 MiB, because partial grains are completed in memory.
pub const GRAIN_SECTORS_WRITTEN_MAX: u32 = 2048;

const VERSION: u32 = 1;
/// The flags "root" and "checkable", which ESX sets in every delta.
const FLAGS: u32 = 3;
/// Flag: the last writer found the extent inconsistent.
const FLAG_INCONSISTENT: u32 = 4;

const OFFSET_FREE: usize = 28;
const OFFSET_UNCLEAN: usize = 1648;

/// A header with values within the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    bytes: Box<[u8; HEADER_SIZE]>,
}

impl Header {
    /// The header of a new extent of `capacity` sectors.
    pub(super) fn new(capacity: u32, grain: u32) -> Self {
        let mut header = Self { bytes: Box::new([0; HEADER_SIZE]) };
        header.bytes[..4].copy_from_slice(&MAGIC);
        header.set(4, VERSION);
        header.set(8, FLAGS);
        header.set(12, capacity);
        header.set(16, grain);
        header.set(20, HEADER_SECTORS as u32);
        header.set(24, header.directory_entries() as u32);
        header
    }

    /// Decodes and checks a header; the error says what is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self> {
        if bytes[..4] != MAGIC {
            let what = "this is no VMFSsparse redo log: it does not begin with COWD";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let header = Self { bytes: Box::new(*bytes) };
        if header.get(4) != VERSION {
            let what = format!("version {} of COWD is not known, only {VERSION} is", header.get(4));
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if header.capacity() == 0 {
            return Err(corrupt("its capacity is 0".to_owned()));
        }
        if header.grain() == 0 || header.get(16) > GRAIN_SECTORS_MAX {
            return Err(corrupt(format!("grains of {} sectors are not supported", header.get(16))));
        }
        if header.directory_offset() < HEADER_SECTORS {
            let what = format!("its grain directory at sector {} lies in the header", header.directory_offset());
            return Err(corrupt(what));
        }
        if u64::from(header.get(24)) < header.directory_entries() {
            let (has, needs) = (header.get(24), header.directory_entries());
            return Err(corrupt(format!("its grain directory has {has} entries, its capacity needs {needs}")));
        }
        Ok(header)
    }

    /// The encoded header.
    pub(super) fn bytes(&self) -> &[u8; HEADER_SIZE] {
        &self.bytes
    }

    /// Capacity in sectors.
    pub fn capacity(&self) -> u64 {
        u64::from(self.get(12))
    }

    /// Sectors of a grain.
    pub fn grain(&self) -> u64 {
        u64::from(self.get(16))
    }

    /// First sector of the grain directory.
    pub fn directory_offset(&self) -> u64 {
        u64::from(self.get(20))
    }

    /// The number of directory entries that the capacity needs, at most 2^20. The file may have more.
    pub fn directory_entries(&self) -> u64 {
        self.capacity().div_ceil(u64::from(TABLE_ENTRIES) * self.grain())
    }

    /// The size of the directory in sectors, according to the header.
    pub(super) fn directory_sectors(&self) -> u64 {
        (u64::from(self.get(24)) * 4).div_ceil(SECTOR)
    }

    /// The next free sector according to the header, which may be out of date.
    pub fn free_sector(&self) -> u64 {
        u64::from(self.get(OFFSET_FREE))
    }

    pub(super) fn set_free_sector(&mut self, sector: u64) {
        self.set(OFFSET_FREE, u32::try_from(sector).unwrap_or(u32::MAX));
    }

    /// Whether the extent was not closed properly, or is open now.
    pub fn unclean(&self) -> bool {
        self.get(OFFSET_UNCLEAN) != 0 || self.get(8) & FLAG_INCONSISTENT != 0
    }

    pub(super) fn set_unclean(&mut self, unclean: bool) {
        self.set(OFFSET_UNCLEAN, u32::from(unclean));
        self.set(8, self.get(8) & !FLAG_INCONSISTENT);
    }

    fn get(&self, offset: usize) -> u32 {
        let mut field = [0; 4];
        field.copy_from_slice(&self.bytes[offset..offset + 4]);
        u32::from_le_bytes(field)
    }

    fn set(&mut self, offset: usize, value: u32) {
        self.bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    }
}

fn corrupt(what: String) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}
