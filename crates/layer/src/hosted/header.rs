//! The header of a sparse extent: one sector at the start of the file, and once more as the footer of a stream.
//!
//! A header that passes [`Header::decode`] has a capacity, grains and tables within the limits below. The locations of
//! its areas are checked when the areas are read.

use crate::{CAPACITY_MAX, Error, ErrorKind, Result, SECTOR};

/// The magic number of a sparse extent: `KDMV`.
pub const MAGIC: [u8; 4] = *b"KDMV";
/// The magic number that some writers use while the file is incomplete.
const MAGIC_UNFINISHED: [u8; 4] = *b"kdmv";

/// Bytes of a header.
pub const HEADER_SIZE: usize = 512;

/// Flag: the four newline characters are valid and can be checked.
pub const FLAG_NEWLINES: u32 = 1 << 0;
/// Flag: the redundant directory and its tables are valid.
pub const FLAG_REDUNDANT: u32 = 1 << 1;
/// Flag: entry 1 of a grain table means zeros.
pub const FLAG_ZERO_GRAINS: u32 = 1 << 2;
/// Flag: grains are compressed.
pub const FLAG_COMPRESSED: u32 = 1 << 16;
/// Flag: markers precede grains and tables.
pub const FLAG_MARKERS: u32 = 1 << 17;
/// Flags that a reader must support to read the file correctly.
const FLAGS_ESSENTIAL: u32 = 0xffff_0000;

/// Line ends and a space: a file transfer in text mode changes these bytes, so the damage is detected.
const NEWLINES: [u8; 4] = [0x0a, 0x20, 0x0d, 0x0a];

/// Value of the directory's sector in the header of a stream: the sector is stated in the footer instead.
pub const DIRECTORY_AT_END: u64 = u64::MAX;

/// The smallest grain, in sectors.
pub const GRAIN_SECTORS_MIN: u64 = 8;
/// The largest grain, in sectors: 1 MiB, eight times the maximum of VMware's own software.
pub const GRAIN_SECTORS_MAX: u64 = 2048;
/// The most entries of a grain table; every known writer uses 512.
pub const TABLE_ENTRIES_MAX: u32 = 512;
/// The most entries of a grain directory: 64 TiB with the usual grains, 8 MiB of memory.
pub const DIRECTORY_ENTRIES_MAX: u64 = 1 << 21;
/// The largest embedded descriptor, in sectors.
pub const DESCRIPTOR_SECTORS_MAX: u64 = 2048;

/// Offset of the `uncleanShutdown` byte.
pub(super) const UNCLEAN_OFFSET: usize = 72;

/// A header with values within the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version: 1, 2 or 3.
    pub version: u32,
    /// The flags of the extent.
    pub flags: u32,
    /// Capacity in sectors.
    pub capacity: u64,
    /// Grain in sectors: a power of two.
    pub grain: u64,
    /// First sector of the embedded descriptor; 0 when there is none.
    pub descriptor_offset: u64,
    /// Sectors of the embedded descriptor.
    pub descriptor_size: u64,
    /// Entries of a grain table.
    pub table_entries: u32,
    /// First sector of the redundant directory; 0 when there is none.
    pub redundant_offset: u64,
    /// First sector of the directory.
    pub directory_offset: u64,
    /// Sectors before the first grain.
    pub overhead: u64,
    /// Whether a writer has the file open, or did not close it.
    pub unclean: bool,
    /// Compression: 0 none, 1 deflate.
    pub compression: u16,
}

impl Header {
    /// Decodes and checks a header; the error says what is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self> {
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic == MAGIC_UNFINISHED {
            return Err(corrupt("its writer never finished it"));
        }
        if magic != MAGIC {
            return Err(Error::new(ErrorKind::Corrupt, "this is no sparse extent: it does not begin with KDMV"));
        }
        let header = Self {
            version: u32_at(bytes, 4),
            flags: u32_at(bytes, 8),
            capacity: u64_at(bytes, 12),
            grain: u64_at(bytes, 20),
            descriptor_offset: u64_at(bytes, 28),
            descriptor_size: u64_at(bytes, 36),
            table_entries: u32_at(bytes, 44),
            redundant_offset: u64_at(bytes, 48),
            directory_offset: u64_at(bytes, 56),
            overhead: u64_at(bytes, 64),
            unclean: bytes[UNCLEAN_OFFSET] != 0,
            compression: u16::from_le_bytes([bytes[77], bytes[78]]),
        };
        header.check()?;
        if header.has(FLAG_NEWLINES) && bytes[73..77] != NEWLINES {
            return Err(corrupt("its newline characters were changed: it was transferred as text, copy it again"));
        }
        Ok(header)
    }

    fn check(&self) -> Result<()> {
        if !(1..=3).contains(&self.version) {
            return Err(unsupported(format!("its version is {}, 1 to 3 can be read", self.version)));
        }
        let unknown = self.flags & FLAGS_ESSENTIAL & !(FLAG_COMPRESSED | FLAG_MARKERS);
        if unknown != 0 {
            return Err(unsupported(format!("it needs features unknown here (flags {unknown:#x})")));
        }
        match (self.has(FLAG_COMPRESSED), self.compression) {
            (false, 0) if !self.has(FLAG_MARKERS) => {}
            (true, 1) => {}
            (false, 0) => return Err(corrupt("it claims markers without compression")),
            (_, other) => return Err(unsupported(format!("its grains are compressed by algorithm {other}"))),
        }
        if self.capacity == 0 {
            return Err(corrupt("its capacity is 0"));
        }
        if self.capacity > CAPACITY_MAX / SECTOR {
            return Err(corrupt(format!("its capacity of {} sectors is beyond 64 TiB", self.capacity)));
        }
        let grains = GRAIN_SECTORS_MIN..=GRAIN_SECTORS_MAX;
        if !self.grain.is_power_of_two() || !grains.contains(&self.grain) {
            return Err(corrupt(format!("its grain of {} sectors is no power of two from 8 to 2048", self.grain)));
        }
        if self.table_entries == 0 || self.table_entries > TABLE_ENTRIES_MAX {
            return Err(corrupt(format!("its tables have {} entries, 1 to 512 can be read", self.table_entries)));
        }
        if self.directory_entries() > DIRECTORY_ENTRIES_MAX {
            return Err(corrupt(format!("its directory would have {} entries", self.directory_entries())));
        }
        if self.descriptor_offset != 0 && self.descriptor_size > DESCRIPTOR_SECTORS_MAX {
            return Err(corrupt(format!("its descriptor would take {} sectors", self.descriptor_size)));
        }
        Ok(())
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(4, &self.version.to_le_bytes());
        put(8, &self.flags.to_le_bytes());
        put(12, &self.capacity.to_le_bytes());
        put(20, &self.grain.to_le_bytes());
        put(28, &self.descriptor_offset.to_le_bytes());
        put(36, &self.descriptor_size.to_le_bytes());
        put(44, &self.table_entries.to_le_bytes());
        put(48, &self.redundant_offset.to_le_bytes());
        put(56, &self.directory_offset.to_le_bytes());
        put(64, &self.overhead.to_le_bytes());
        put(UNCLEAN_OFFSET, &[u8::from(self.unclean)]);
        put(73, &NEWLINES);
        put(77, &self.compression.to_le_bytes());
        bytes
    }

    /// Whether a flag is set.
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Sectors that one grain table covers.
    pub fn table_coverage(&self) -> u64 {
        self.grain * u64::from(self.table_entries)
    }

    /// Number of entries of the grain directory.
    pub fn directory_entries(&self) -> u64 {
        self.capacity.div_ceil(self.table_coverage())
    }

    /// Sectors of one grain table.
    pub fn table_sectors(&self) -> u64 {
        (u64::from(self.table_entries) * 4).div_ceil(SECTOR)
    }

    /// Sectors of the grain directory.
    pub fn directory_sectors(&self) -> u64 {
        (self.directory_entries() * 4).div_ceil(SECTOR)
    }

    /// Number of grains of the extent; the capacity may cut the last one.
    pub fn grains(&self) -> u64 {
        self.capacity.div_ceil(self.grain)
    }
}

fn u32_at(bytes: &[u8; HEADER_SIZE], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; HEADER_SIZE], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn corrupt(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the header is damaged: {what}"))
}

fn unsupported(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Unsupported, format!("the image cannot be used: {what}"))
}
