//! The common head of a metadata page, its checksum and its identity.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | magic, by kind of page |
//! | 4 | 2 | version, 1 |
//! | 6 | 6 | specific to the kind of page (tree: level and count) |
//! | 12 | 4 | CRC32C of the page with this field zero |
//! | 16 | 8 | page number within its file |
//! | 24 | 8 | specific to the kind of page |

use crate::{Error, ErrorKind, Result, tree};
use backend::{BLOCK_SIZE, Block};
use std::fmt;

/// Bytes of the common head.
pub const HEADER_SIZE: usize = 32;
const VERSION: u16 = 1;

/// The files that hold metadata pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PageFile {
    /// Nodes of the trees.
    Map = 0,
    /// Reference counts of the nodes.
    MapTable = 1,
    /// Used and backed counts of the regions of the map.
    MapSummary = 2,
    /// Checksums and reference counts of the data blocks.
    DataTable = 3,
    /// Used and backed counts of the regions of the data.
    DataSummary = 4,
    /// Disks and snapshots.
    Catalog = 5,
}

impl PageFile {
    /// Number of files.
    pub const COUNT: usize = 6;
    /// All files, in the order of their numbers.
    pub const ALL: [PageFile; Self::COUNT] =
        [Self::Map, Self::MapTable, Self::MapSummary, Self::DataTable, Self::DataSummary, Self::Catalog];

    /// Name of the file in the datastore.
    pub fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::MapTable => "map.table",
            Self::MapSummary => "map.summary",
            Self::DataTable => "data.table",
            Self::DataSummary => "data.summary",
            Self::Catalog => "catalog",
        }
    }

    fn magic(self) -> [u8; 4] {
        match self {
            Self::Map => *b"LMND",
            Self::MapTable | Self::DataTable => *b"LMTB",
            Self::MapSummary | Self::DataSummary => *b"LMSM",
            Self::Catalog => *b"LMCT",
        }
    }
}

/// Identifies a page: its file, and its number in the file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageKey(u64);

const NUMBER_BITS: u32 = 56;

impl PageKey {
    /// Page `number` of `file`.
    pub fn new(file: PageFile, number: u64) -> Self {
        debug_assert!(number < 1 << NUMBER_BITS);
        Self((file as u64) << NUMBER_BITS | number)
    }

    /// Decodes the stored form of a key. `None` if no such file exists, or the number exceeds the limit.
    pub fn from_raw(raw: u64) -> Option<Self> {
        let key = Self(raw);
        ((raw >> NUMBER_BITS) < PageFile::COUNT as u64 && key.number() < tree::PHYSICAL_LIMIT).then_some(key)
    }

    /// The stored form of the key.
    pub fn raw(self) -> u64 {
        self.0
    }

    /// The file of the page.
    pub fn file(self) -> PageFile {
        PageFile::ALL[(self.0 >> NUMBER_BITS) as usize]
    }

    /// The number of the page within its file.
    pub fn number(self) -> u64 {
        self.0 & ((1 << NUMBER_BITS) - 1)
    }

    /// The byte offset of the page in its file.
    pub fn offset(self) -> u64 {
        self.number() * BLOCK_SIZE as u64
    }
}

impl fmt::Display for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {} of {}", self.number(), self.file().name())
    }
}

/// A page with a head and no entries.
pub fn blank(key: PageKey) -> Block {
    let mut page = Block([0; BLOCK_SIZE]);
    page.0[0..4].copy_from_slice(&key.file().magic());
    page.0[4..6].copy_from_slice(&VERSION.to_le_bytes());
    page.0[16..24].copy_from_slice(&key.number().to_le_bytes());
    page
}

/// Whether a page has no entries: it was never written, or has lost its content.
pub fn has_no_entries(page: &[u8]) -> bool {
    page[HEADER_SIZE..].iter().all(|&byte| byte == 0)
}

fn page_checksum(page: &Block) -> u32 {
    checksums::checksum_without(&page.0, 12)
}

/// A copy of a page with its checksum, as it is written to the file.
pub fn sealed(page: &Block) -> Block {
    let mut copy = *page;
    let sum = page_checksum(page);
    copy.0[12..16].copy_from_slice(&sum.to_le_bytes());
    copy
}

/// Verifies a page read from its file. A page of zeros, which was never written, becomes a page without entries.
pub fn verify(page: &mut Block, key: PageKey) -> Result<()> {
    let corrupt = |what: &str| {
        Err(Error::new(ErrorKind::Corrupt, format!("{key} {what}; run 'lamina check --repair' on the datastore")))
    };
    if key.file() != PageFile::Map && page.0.iter().all(|&b| b == 0) {
        *page = blank(key);
        return Ok(());
    }
    let stored = u32::from_le_bytes(page.0[12..16].try_into().expect("four bytes"));
    if stored != page_checksum(page) {
        return corrupt("fails its checksum");
    }
    if page.0[0..4] != key.file().magic() {
        return corrupt("is of another kind");
    }
    let version = u16::from_le_bytes(page.0[4..6].try_into().expect("two bytes"));
    if version != VERSION {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{key} has version {version}; this lamina reads version {VERSION}"),
        ));
    }
    if page.0[16..24] != key.number().to_le_bytes() {
        return corrupt("has the number of another page: it was written to the wrong place");
    }
    if key.file() == PageFile::Map {
        tree::validate(page, tree::NodeId(key.number()))?;
    }
    Ok(())
}
