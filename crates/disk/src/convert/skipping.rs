//! A source whose damaged and unreadable ranges become zeros.

use super::copy::{Source, SourceRun};
use crate::salvage::LostRanges;
use backend::BLOCK_SIZE;
use error::Result;
use layer::image::is_loss;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// If the map of the source cannot be read somewhere, ranges of this size are read instead.
const UNMAPPED: u64 = 64 << 10;

/// Reads another source, and skips what cannot be read, in blocks of 4 KiB.
pub(super) struct SkippingSource<'a> {
    inner: Box<dyn Source + 'a>,
    lost: LostRanges,
}

impl<'a> SkippingSource<'a> {
    /// Adds the skipped ranges to `lost`.
    pub(super) fn new(inner: Box<dyn Source + 'a>, lost: LostRanges) -> Self {
        Self { inner, lost }
    }
}

impl Source for SkippingSource<'_> {
    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }

    fn next(&mut self, start: u64) -> Result<SourceRun> {
        match self.inner.next(start) {
            Err(error) if is_loss(&error) => {
                let end = ((start / UNMAPPED + 1) * UNMAPPED).min(self.capacity());
                Ok(SourceRun { length: end - start, zero: false })
            }
            found => found,
        }
    }

    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
        match self.inner.read(start, out) {
            Err(error) if is_loss(&error) => {}
            done => return done,
        }
        let end = start + out.len() as u64;
        if end <= (start / BLOCK + 1) * BLOCK {
            out.fill(0);
            self.lost.add(start..end);
            return Ok(());
        }
        // Each half is a whole number of blocks, except at the ends.
        let middle = (start / BLOCK + 1).max((start + (end - start) / 2) / BLOCK) * BLOCK;
        let (first, second) = out.split_at_mut((middle - start) as usize);
        self.read(start, first)?;
        self.read(middle, second)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use error::{Error, ErrorKind};

    /// Ones, with some blocks that cannot be read, and a map that fails in some places.
    struct Damaged;

    const BAD: [u64; 3] = [0, 37, 64];

    impl Source for Damaged {
        fn capacity(&self) -> u64 {
            64 * BLOCK + 700
        }

        fn next(&mut self, start: u64) -> Result<SourceRun> {
            match start / UNMAPPED {
                2 => Err(Error::new(ErrorKind::Corrupt, "no map")),
                part => Ok(SourceRun { length: (part + 1) * UNMAPPED - start, zero: false }),
            }
        }

        fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
            let blocks = start / BLOCK..(start + out.len() as u64).div_ceil(BLOCK);
            if BAD.iter().any(|block| blocks.contains(block)) {
                return Err(Error::new(ErrorKind::Io, "unreadable"));
            }
            out.fill(1);
            Ok(())
        }
    }

    #[test]
    fn exactly_the_unreadable_blocks_are_skipped() {
        let lost = LostRanges::default();
        let mut source = SkippingSource::new(Box::new(Damaged), lost.clone());
        let capacity = source.capacity();
        let mut content = vec![7; capacity as usize];
        let mut at = 0;
        while at < capacity {
            let run = source.next(at).unwrap();
            let end = (at + run.length).min(capacity);
            source.read(at, &mut content[at as usize..end as usize]).unwrap();
            at = end;
        }
        for (number, block) in (0..).zip(content.chunks(BLOCK_SIZE)) {
            let expected = u8::from(!BAD.contains(&number));
            assert!(block.iter().all(|byte| *byte == expected), "block {number}");
        }
        let ranges: Vec<(u64, u64)> = lost.merged().iter().map(|range| (range.start, range.length)).collect();
        assert_eq!(ranges, [(0, BLOCK), (37 * BLOCK, BLOCK), (64 * BLOCK, 700)]);
    }
}
