//! Creating an empty extent: all metadata except the header, a flush, then the header. After a crash before the header
//! there is no extent.

use super::header::{
    DESCRIPTOR_SECTORS_MAX, FLAG_NEWLINES, FLAG_REDUNDANT, FLAG_ZERO_GRAINS, Header, TABLE_ENTRIES_MAX,
};
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;

/// Sectors reserved for an embedded descriptor, as by VMware and QEMU; for a longer text more are reserved.
const DESCRIPTOR_SECTORS: u64 = 20;

/// The usual grain in sectors: 64 KiB.
pub(crate) const GRAIN_SECTORS: u64 = 128;

/// Parameters of a new extent.
#[derive(Clone, Debug)]
pub struct CreateOptions<'a> {
    /// Capacity in bytes, a multiple of 512.
    pub capacity: u64,
    /// The descriptor to embed; `None` in the extents of a split disk.
    pub descriptor: Option<&'a [u8]>,
    /// Whether to use special entries for zero grains (version 2): zeros over a parent then take no space. QEMU reads
    /// these entries; whether Workstation does is not known.
    pub zero_grains: bool,
}

/// Creates an extent in an empty file. Durable on return.
pub fn create(file: &dyn File, image: &str, options: &CreateOptions<'_>) -> Result<()> {
    create_shaped(file, image, options, GRAIN_SECTORS, TABLE_ENTRIES_MAX)
}

/// As [`create`], with any sizes of grains and tables. Tests use small sizes, to get many tables in a small file.
pub(super) fn create_shaped(
    file: &dyn File,
    image: &str,
    options: &CreateOptions<'_>,
    grain: u64,
    table_entries: u32,
) -> Result<()> {
    let invalid = |what: String| Error::new(ErrorKind::Invalid, format!("{image}: {what}"));
    if options.capacity == 0 || !options.capacity.is_multiple_of(SECTOR) {
        return Err(invalid(format!("a capacity of {} bytes is no multiple of 512", options.capacity)));
    }
    let text = options.descriptor.unwrap_or_default();
    let mut header = Header {
        version: if options.zero_grains { 2 } else { 1 },
        flags: FLAG_NEWLINES | FLAG_REDUNDANT | if options.zero_grains { FLAG_ZERO_GRAINS } else { 0 },
        capacity: options.capacity / SECTOR,
        grain,
        descriptor_offset: 0,
        descriptor_size: 0,
        table_entries,
        redundant_offset: 0,
        directory_offset: 0,
        overhead: 0,
        unclean: false,
        compression: 0,
    };
    if options.descriptor.is_some() {
        header.descriptor_offset = 1;
        header.descriptor_size = DESCRIPTOR_SECTORS.max((text.len() as u64).div_ceil(SECTOR));
        if header.descriptor_size > DESCRIPTOR_SECTORS_MAX {
            return Err(invalid(format!("a descriptor of {} bytes is too long to embed", text.len())));
        }
    }
    let tables = header.directory_entries();
    let tables_size = tables * header.table_sectors();
    header.redundant_offset = 1 + header.descriptor_size;
    header.directory_offset = header.redundant_offset + header.directory_sectors() + tables_size;
    let end = header.directory_offset + header.directory_sectors() + tables_size;
    header.overhead = end.next_multiple_of(header.grain);
    // The sector of every grain must fit into 32 bits.
    let full = header.overhead.checked_add(header.capacity.next_multiple_of(header.grain));
    if full.is_none_or(|sectors| sectors > u64::from(u32::MAX)) {
        return Err(invalid(
            "a sparse extent ends below 2 TiB, because its sector numbers have 32 bits: choose 2gbsparse".to_owned(),
        ));
    }

    let context = || format!("{image}: cannot be made");
    file.set_len(header.overhead * SECTOR).during(context)?;
    for offset in [header.redundant_offset, header.directory_offset] {
        let first = offset + header.directory_sectors();
        let entries = (0..tables).map(|index| (first + index * header.table_sectors()) as u32);
        let bytes: Vec<u8> = entries.flat_map(u32::to_le_bytes).collect();
        file.write_at(&[&bytes], offset * SECTOR, false).during(context)?;
    }
    if !text.is_empty() {
        file.write_at(&[text], SECTOR, false).during(context)?;
    }
    file.sync().during(context)?;
    file.write_at(&[&header.encode()], 0, true).during(context)
}
