//! A native disk as the top layer of a chain: the overlay that receives the guest's writes during a live import.
//!
//! | the disk has         | the layer reports |
//! |----------------------|----------------|
//! | nothing              | [`Content::Absent`]: reads fall through to the image below |
//! | reserved space       | [`Content::Zero`]: the guest discarded the range, or wrote zeros |
//! | data                 | [`Content::Encoded`]: read through the disk, which verifies checksums |
//!
//! 1. The disk is thin and used only by this layer: reserved space of a thick disk would hide the image below.
//! 2. A range never becomes absent again, because a discard reserves space. So an outdated result of [`Layer::map`]
//!    never exposes the image below a range that the guest has written.
//! 3. The map returns no file locations, so no location has to stay valid for readers, and the layer needs no epochs.

use crate::device::{Allocation, Device};
use backend::{BLOCK_SIZE, Buffer, File, SharedSlice};
use error::{Error, ErrorKind, Result};
use layer::{Content, Extent, Layer, Usage};
use std::ops::Range;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Most extents that one query returns when a long range is examined.
const EXTENTS: usize = 1024;

/// The overlay layer.
pub struct NativeLayer {
    disk: Arc<dyn Device>,
}

impl NativeLayer {
    /// The layer of a thin native disk. From now on only this layer may change the disk.
    pub fn new(disk: Arc<dyn Device>) -> Self {
        Self { disk }
    }

    /// Whether the disk has data in the whole range.
    fn is_data(&self, start: u64, length: u64) -> Result<bool> {
        let found = self.disk.status(start, length, 1)?;
        Ok(matches!(found.as_slice(), [all] if all.length >= length && all.allocation == Allocation::Data))
    }
}

impl Layer for NativeLayer {
    fn capacity(&self) -> u64 {
        self.disk.capacity()
    }

    fn grain(&self) -> u64 {
        BLOCK
    }

    fn format(&self) -> &'static str {
        "native"
    }

    fn writable(&self) -> bool {
        !self.disk.read_only()
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        let mut at = range.start;
        for found in self.disk.status(range.start, range.end - range.start, most.max(1))? {
            let content = match found.allocation {
                Allocation::Data => Content::Encoded,
                Allocation::Zero => Content::Zero,
                Allocation::Hole => Content::Absent,
            };
            out.push(Extent { start: at, length: found.length, content });
            at += found.length;
        }
        Ok(())
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        Err(Error::new(ErrorKind::Invalid, format!("{}: a native disk has no file {index}", self.disk.name())))
    }

    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.disk.read(start, out.len())?);
        Ok(())
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        let skip = (start % BLOCK) as usize;
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        let blocks = (skip + length).div_ceil(BLOCK_SIZE);
        let mut data = Buffer::recycled(blocks);
        let mut at = skip;
        for slice in slices {
            data[at..at + slice.len()].copy_from_slice(slice);
            at += slice.len();
        }
        self.disk.write(start, SharedSlice::new(Arc::new(data), skip..skip + length), false)
    }

    fn overwrite(&self, start: u64, slices: &[&[u8]]) -> Result<bool> {
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        let whole = start / BLOCK * BLOCK..(start + length as u64).next_multiple_of(BLOCK).min(self.capacity());
        if !self.is_data(whole.start, whole.end - whole.start)? {
            return Ok(false);
        }
        self.write(start, slices)?;
        Ok(true)
    }

    fn zero(&self, range: Range<u64>, _keep: bool) -> Result<()> {
        // Reserved space hides the image below, so space is reserved even if `_keep` is false.
        self.disk.write_zeroes(range.start, range.end - range.start, true, false)
    }

    fn flush(&self) -> Result<()> {
        self.disk.flush()
    }

    fn usage(&self) -> Result<Usage> {
        let (mut usage, mut at) = (Usage::default(), 0);
        while at < self.capacity() {
            let found = self.disk.status(at, self.capacity() - at, EXTENTS)?;
            if found.is_empty() {
                break;
            }
            for extent in found {
                at += extent.length;
                match extent.allocation {
                    Allocation::Data => {
                        usage.allocated += extent.length;
                        usage.mapped += extent.length;
                    }
                    Allocation::Zero => usage.allocated += extent.length,
                    Allocation::Hole => {}
                }
            }
        }
        Ok(usage)
    }
}
