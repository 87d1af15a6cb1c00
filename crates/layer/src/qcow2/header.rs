//! The header of a qcow2 image with its extensions; all values are checked here.

use super::big_endian;
use crate::{CAPACITY_MAX, Error, ErrorKind, IoContext, Result};
use backend::File;

const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Length of the header in version 2, and the least length in version 3.
const HEADER_V2: usize = 72;
const HEADER_V3: usize = 104;

/// Log2 of the smallest and largest cluster: 512 bytes and 2 MiB, QEMU's limits.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Log2 of the smallest cluster with extended entries.
const CLUSTER_BITS_EXTENDED: u32 = 14;
/// The most entries of the L1 table: 32 MiB, QEMU's limit.
pub(super) const L1_ENTRIES_MAX: u64 = 4 << 20;
/// The longest name of a backing file or data file, in bytes.
const NAME_MAX: usize = 1023;

const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
const KNOWN: u64 = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;

const EXTENSION_END: u32 = 0;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
/// Bytes of one entry of the feature name table.
const FEATURE_NAME: usize = 48;

/// Compression of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    /// Raw deflate.
    Deflate,
    /// Zstandard frames.
    Zstd,
}

/// The backing file of an image, as the image names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// A path, relative to the image's folder or absolute, or a name that only QEMU can interpret.
    pub name: String,
    /// The format of the backing file, if the image states it. It is never guessed: the content of a raw image can look
    /// like another format.
    pub format: Option<String>,
}

/// A header with values within the limits.
#[derive(Clone, Debug)]
pub struct Header {
    version: u32,
    cluster_bits: u32,
    size: u64,
    l1_entries: u64,
    l1_offset: u64,
    features: u64,
    compression: Compression,
    backing: Option<Backing>,
    data_file: Option<String>,
    internal_snapshots: u32,
}

impl Header {
    /// Reads and checks the header of an image.
    pub fn read(file: &dyn File) -> Result<Self> {
        let length = file.len().during(|| "cannot find out the length".to_owned())?;
        let mut head = [0; HEADER_V3 + 8];
        file.read_at(&mut head, 0).during(|| "cannot read the header".to_owned())?;
        if head[..4] != MAGIC {
            return Err(Error::new(ErrorKind::Corrupt, "this is no qcow2 image: it does not begin with QFI"));
        }
        let version = u32_at(&head, 4);
        if !(2..=3).contains(&version) {
            return Err(unsupported(format!("its version is {version}, 2 and 3 can be read")));
        }
        let cluster_bits = u32_at(&head, 20);
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(corrupt(format!("its clusters have 2^{cluster_bits} bytes, 2^9 to 2^21 can be read")));
        }
        let (features, header_length) = match version {
            2 => (0, HEADER_V2),
            _ => (u64_at(&head, 72), u32_at(&head, 100) as usize),
        };
        let cluster = 1usize << cluster_bits;
        if header_length > cluster || !header_length.is_multiple_of(8) || (version > 2 && header_length < HEADER_V3) {
            return Err(corrupt(format!("its header claims {header_length} bytes")));
        }
        // The extensions and the backing file's name are in the first cluster.
        let mut first = vec![0; cluster];
        file.read_at(&mut first, 0).during(|| "cannot read the header".to_owned())?;
        let extensions = Extensions::read(&first, header_length)?;
        if features & !KNOWN != 0 {
            return Err(unsupported(extensions.unknown_features(features & !KNOWN)));
        }
        if u32_at(&head, 32) != 0 {
            return Err(unsupported("it is encrypted: decrypt it with qemu-img convert first"));
        }
        let compression = match (features & COMPRESSION_TYPE != 0, header_length > HEADER_V3, head[HEADER_V3]) {
            (false, _, _) => Compression::Deflate,
            (true, true, 1) => Compression::Zstd,
            (true, _, other) => return Err(unsupported(format!("its clusters are compressed by method {other}"))),
        };
        let mut header = Self {
            version,
            cluster_bits,
            size: u64_at(&head, 24),
            l1_entries: 0,
            l1_offset: u64_at(&head, 40),
            features,
            compression,
            backing: None,
            data_file: extensions.data_file,
            internal_snapshots: u32_at(&head, 60),
        };
        header.check_tables(u64::from(u32_at(&head, 36)), length)?;
        header.backing = read_backing(&first, u64_at(&head, 8), u32_at(&head, 16), extensions.backing_format)?;
        Ok(header)
    }

    fn check_tables(&mut self, l1_size: u64, length: u64) -> Result<()> {
        if self.size > CAPACITY_MAX {
            return Err(corrupt(format!("its capacity of {} bytes is beyond 64 TiB", self.size)));
        }
        if self.extended() && self.cluster_bits < CLUSTER_BITS_EXTENDED {
            return Err(corrupt(format!("its clusters of 2^{} bytes are too small to be divided", self.cluster_bits)));
        }
        let entry = if self.extended() { 16 } else { 8 };
        let coverage = self.cluster_size() / entry * self.cluster_size();
        self.l1_entries = self.size.div_ceil(coverage);
        if self.l1_entries > L1_ENTRIES_MAX || self.l1_entries > l1_size {
            let what = format!("its L1 table has {l1_size} entries and would need {}", self.l1_entries);
            return Err(corrupt(what));
        }
        let end = self.l1_offset.checked_add(self.l1_entries * 8);
        let outside = end.is_none_or(|end| end > length) || !self.l1_offset.is_multiple_of(self.cluster_size());
        if outside && self.l1_entries > 0 {
            return Err(corrupt("its L1 table lies outside the file or does not begin at a cluster"));
        }
        Ok(())
    }

    /// Version: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Capacity in bytes.
    pub fn capacity(&self) -> u64 {
        self.size
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The backing file, if any.
    pub fn backing(&self) -> Option<&Backing> {
        self.backing.as_ref()
    }

    /// Whether the clusters are in an external data file.
    pub fn external_data(&self) -> bool {
        self.features & EXTERNAL_DATA != 0
    }

    /// The name of the external data file, if the image states it.
    pub fn data_file(&self) -> Option<&str> {
        self.data_file.as_deref()
    }

    /// Number of snapshots inside the image, which this reader does not read.
    pub fn internal_snapshots(&self) -> u32 {
        self.internal_snapshots
    }

    /// Whether the image is marked as corrupt.
    pub fn marked_corrupt(&self) -> bool {
        self.features & CORRUPT != 0
    }

    pub(super) fn cluster_bits(&self) -> u32 {
        self.cluster_bits
    }

    pub(super) fn extended(&self) -> bool {
        self.features & EXTENDED_L2 != 0
    }

    pub(super) fn compression(&self) -> Compression {
        self.compression
    }

    pub(super) fn l1_entries(&self) -> u64 {
        self.l1_entries
    }

    pub(super) fn l1_offset(&self) -> u64 {
        self.l1_offset
    }
}

/// The header extensions that this reader uses.
#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file: Option<String>,
    feature_names: Vec<u8>,
}

impl Extensions {
    fn read(first: &[u8], header_length: usize) -> Result<Self> {
        let mut found = Self::default();
        let mut at = header_length;
        // The loop ends: each step advances by at least the extension's header, up to the end of the cluster.
        while let Some(head) = first.get(at..at + 8) {
            let (kind, length) = (u32_at(head, 0), u32_at(head, 4) as usize);
            if kind == EXTENSION_END {
                break;
            }
            let Some(data) = first.get(at + 8..).and_then(|rest| rest.get(..length)) else {
                return Err(corrupt(format!("header extension {kind:#x} claims {length} bytes")));
            };
            match kind {
                EXTENSION_BACKING_FORMAT => found.backing_format = Some(name(data, "the backing file's format")?),
                EXTENSION_DATA_FILE => found.data_file = Some(name(data, "the data file")?),
                EXTENSION_FEATURE_NAMES => found.feature_names = data.to_vec(),
                _ => {}
            }
            at += 8 + length.next_multiple_of(8);
        }
        Ok(found)
    }

    /// Names unknown features with the help of the image's feature name table.
    fn unknown_features(&self, features: u64) -> String {
        let named = |bit: u32| {
            let mut entries = self.feature_names.chunks_exact(FEATURE_NAME);
            let entry = entries.find(|entry| entry[0] == 0 && u32::from(entry[1]) == bit)?;
            let text: String = String::from_utf8_lossy(&entry[2..]).chars().filter(|c| !c.is_control()).collect();
            (!text.is_empty()).then_some(text)
        };
        let bits = (0..64).filter(|bit| features >> bit & 1 == 1);
        let names: Vec<String> = bits.map(|bit| named(bit).unwrap_or_else(|| format!("bit {bit}"))).collect();
        format!("it needs features unknown here: {}", names.join(", "))
    }
}

fn read_backing(first: &[u8], offset: u64, size: u32, format: Option<String>) -> Result<Option<Backing>> {
    if offset == 0 {
        return Ok(None);
    }
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let bytes = first.get(start..).and_then(|rest| rest.get(..size as usize));
    let bytes = bytes.ok_or_else(|| corrupt("the name of its backing file lies outside the first cluster"))?;
    Ok(Some(Backing { name: name(bytes, "its backing file")?, format }))
}

fn name(bytes: &[u8], of: &str) -> Result<String> {
    if bytes.is_empty() || bytes.len() > NAME_MAX {
        return Err(corrupt(format!("the name of {of} has {} bytes", bytes.len())));
    }
    match std::str::from_utf8(bytes) {
        Ok(name) if !name.contains('\0') => Ok(name.to_owned()),
        _ => Err(unsupported(format!("the name of {of} is not UTF-8"))),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    big_endian(&bytes[at..at + 8])[0]
}

fn corrupt(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the header is damaged: {what}"))
}

fn unsupported(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Unsupported, format!("the image cannot be used: {what}"))
}
