//! Creating an empty redo log: the directory as a hole, a flush, then the header. After a crash before the header there
//! is no extent.

use super::header::{GRAIN_SECTORS_WRITTEN_MAX, HEADER_SIZE, Header};
use super::space::ALIGNMENT;
use crate::aligned::AlignedFile;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;
use std::sync::Arc;

/// Parameters of a new extent.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Capacity in bytes: a multiple of 512, less than 2 TiB.
    pub capacity: u64,
    /// Grain size in sectors; ESX and most readers support only 1.
    pub grain_sectors: u32,
}

impl CreateOptions {
    /// The parameters that ESX uses.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, grain_sectors: 1 }
    }
}

/// Creates an extent in an empty file. Durable on return.
pub fn create(file: Arc<dyn File>, image: &str, options: &CreateOptions) -> Result<()> {
    let invalid = |what: String| Error::new(ErrorKind::Invalid, format!("{image}: {what}"));
    if options.capacity == 0 || !options.capacity.is_multiple_of(SECTOR) {
        return Err(invalid(format!("a capacity of {} bytes is no multiple of 512", options.capacity)));
    }
    let Ok(capacity) = u32::try_from(options.capacity / SECTOR) else {
        return Err(invalid("VMFSsparse ends 512 bytes before 2 TiB: choose SEsparse".to_owned()));
    };
    if options.grain_sectors == 0 || options.grain_sectors > GRAIN_SECTORS_WRITTEN_MAX {
        return Err(invalid(format!("grains of {} sectors are not supported", options.grain_sectors)));
    }
    let mut header = Header::new(capacity, options.grain_sectors);
    let end = header.directory_offset() + header.directory_sectors();
    let free = end.next_multiple_of(ALIGNMENT);
    header.set_free_sector(free);

    let context = || format!("{image}: cannot be made");
    let file = AlignedFile::new(file);
    file.file().set_len(free * SECTOR).during(context)?;
    file.file().sync().during(context)?;
    // The magic number is written last, because the sectors of one write may become durable in any order.
    let (first, rest) = header.bytes().split_at(SECTOR as usize);
    file.write_at(&[rest], SECTOR, true).during(context)?;
    debug_assert_eq!(first.len() + rest.len(), HEADER_SIZE);
    file.write_at(&[first], 0, true).during(context)
}
