//! Creating an empty object: its areas, a flush, then the header. After a crash before the header there is no object.

use super::header::Header;
use super::layout::{BLOCK, LOG_BLOCKS, LOG_START, Layout};
use crate::aligned::AlignedFile;
use crate::{IoContext, Result};
use backend::{Buffer, File};
use std::sync::Arc;

/// Parameters of a new object.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Capacity in bytes: a multiple of 512, at most 64 TiB.
    pub capacity: u64,
    /// A number that is unique among objects.
    pub id: [u8; 16],
}

/// Creates an object in an empty file. Durable on return.
pub fn create(file: Arc<dyn File>, image: &str, options: &CreateOptions) -> Result<()> {
    let layout = Layout::new(options.capacity).map_err(|error| error.context(image))?;
    let context = || format!("{image}: cannot be made");
    let file = AlignedFile::new(file);
    file.file().set_len(layout.data * BLOCK).during(context)?;
    // The log has no holes, so that appending changes only its own blocks. The root's space is allocated, too.
    let zeros = Buffer::zeroed(LOG_BLOCKS as usize);
    file.write_at(&[&zeros], LOG_START * BLOCK, false).during(context)?;
    let root = layout.root_copies(0)..layout.root_copies(layout.root_blocks);
    file.file().reserve(root.start * BLOCK, (root.end - root.start) * BLOCK).during(context)?;
    file.file().sync().during(context)?;
    let mut header = Header {
        id: options.id,
        sequence: 0,
        capacity: options.capacity,
        incarnation: 0,
        tail: 0,
        tail_number: 1,
        next: layout.data,
        clean: true,
    };
    for _ in 0..2 {
        header.write(&file).map_err(|error| error.context(image))?;
    }
    Ok(())
}
