//! Reads stored blocks, to compare their content.

use super::Stored;
use crate::engine::Engine;
use crate::pack::{Index, Pack, SHORT_MAX, WHOLE_MAX};
use crate::space::Run;
use crate::tree::Packed;
use crate::{Result, checksum};
use backend::{BLOCK_SIZE, Buffer};
use std::ops::Range;

impl Engine {
    /// Reads blocks, of which the physical blocks have these checksums. `None` if one of them is damaged: it stays
    /// where it is, so that reads and checks report it.
    pub(in crate::engine) fn read_stored(
        &self,
        first: Stored,
        blocks: u64,
        checksums: &[u32],
    ) -> Result<Option<Buffer>> {
        let run = first.run(blocks);
        let Some(Packed { index, .. }) = first.packed else { return self.read_verified(run, checksums) };
        let indexes = usize::from(index)..usize::from(index) + blocks as usize;
        let read = match blocks <= SHORT_MAX && run.blocks > WHOLE_MAX {
            true => self.read_part_of_pack(run, indexes, checksums)?,
            false => self.read_verified(run, checksums)?.map(|stored| {
                let mut content = Buffer::recycled(indexes.len());
                Pack::decode(&stored)?.read(indexes, &mut content)?;
                Ok(content)
            }),
        };
        Ok(read.and_then(|content| match content {
            Ok(content) => Some(content),
            Err(error) => {
                tracing::warn!(%error, block = run.start, "blocks of a pack are not shared");
                None
            }
        }))
    }

    /// Reads the stored blocks that hold these blocks of a pack, and the first one, which has the index.
    fn read_part_of_pack(&self, pack: Run, indexes: Range<usize>, checksums: &[u32]) -> Result<Option<Result<Buffer>>> {
        let Some(first) = self.read_verified(Run { blocks: 1, ..pack }, &checksums[..1])? else { return Ok(None) };
        let length = pack.blocks as usize * BLOCK_SIZE;
        let index = match Index::decode(&first, length) {
            Ok(index) => index,
            Err(error) => return Ok(Some(Err(error))),
        };
        let mut content = Buffer::recycled(indexes.len());
        let place = index.place(&indexes).filter(|place| place.end <= length);
        let (stored, from) = match place {
            Some(place) if place.end > BLOCK_SIZE => {
                let held = place.start / BLOCK_SIZE..place.end.div_ceil(BLOCK_SIZE);
                let run = Run { start: pack.start + held.start as u64, blocks: held.len() as u64 };
                let Some(stored) = self.read_verified(run, &checksums[held.clone()])? else { return Ok(None) };
                (stored, held.start * BLOCK_SIZE)
            }
            _ => (first, 0),
        };
        Ok(Some(index.read(&stored, from, indexes, &mut content).map(|_| content)))
    }

    /// Reads physical blocks with these checksums. `None` if one of them is damaged.
    fn read_verified(&self, run: Run, checksums: &[u32]) -> Result<Option<Buffer>> {
        let (file, offset) = self.files.locate(run)?;
        let mut stored = Buffer::recycled(run.blocks as usize);
        if let Err(error) = file.read_at(&mut stored, offset) {
            tracing::warn!(%error, block = run.start, "blocks are not shared, because they cannot be read");
            return Ok(None);
        }
        Ok(stored.chunks_exact(BLOCK_SIZE).map(checksum).eq(checksums.iter().copied()).then_some(stored))
    }
}
