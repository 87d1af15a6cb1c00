//! The content of a disk or snapshot according to the model, and the contents that a crash may leave.
//!
//! 1. `blocks` has the current content. A missing block was never written (or lies past an earlier end of the disk)
//!    and reads as zeros.
//! 2. `history` has, for each block written since it was last durable, all contents in order, from the durable to the
//!    current one. After a crash each sector of the block must equal the same sector of one of these contents. This
//!    content must not be older than the floor of the sector. A write with FUA raises the floor of the sectors that it
//!    covers.
//! 3. Two images share the `Arc` of a block only if neither has written the block since one image was copied from the
//!    other.

use backend::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The content of one block.
pub type Block = [u8; BLOCK_SIZE];

const BLOCK: u64 = BLOCK_SIZE as u64;
/// The unit that the medium writes atomically, in bytes.
const SECTOR: usize = 512;
const SECTORS: usize = BLOCK_SIZE / SECTOR;

static ZEROS: Block = [0; BLOCK_SIZE];

#[derive(Clone, Debug)]
struct History {
    /// `None` stands for a block that was never written.
    versions: Vec<Option<Arc<Block>>>,
    floor: [usize; SECTORS],
}

/// The content of a disk or snapshot.
#[derive(Clone, Debug, Default)]
pub struct Image {
    blocks: BTreeMap<u64, Arc<Block>>,
    history: BTreeMap<u64, History>,
}

fn bytes(version: &Option<Arc<Block>>) -> &Block {
    version.as_deref().unwrap_or(&ZEROS)
}

/// The blocks that a byte range touches, each with the bytes of the block that are touched.
pub fn touched(offset: u64, length: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    let end = offset + length;
    let blocks = if length == 0 { 0..0 } else { offset / BLOCK..end.div_ceil(BLOCK) };
    blocks.map(move |block| {
        let base = block * BLOCK;
        (block, (offset.max(base) - base) as usize..(end.min(base + BLOCK) - base) as usize)
    })
}

impl Image {
    /// The current content of a block.
    pub fn block(&self, block: u64) -> &Block {
        self.blocks.get(&block).map_or(&ZEROS, |block| block)
    }

    /// The current content of a block as a shared reference; `None` if the block was never written.
    pub fn version(&self, block: u64) -> Option<Arc<Block>> {
        self.blocks.get(&block).cloned()
    }

    /// The bytes of a range.
    pub fn read(&self, offset: u64, length: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(length as usize);
        for (block, range) in touched(offset, length) {
            out.extend_from_slice(&self.block(block)[range]);
        }
        out
    }

    /// True when a range reads as zeros.
    pub fn is_zero(&self, offset: u64, length: u64) -> bool {
        let blocks = self.blocks.range(offset / BLOCK..(offset + length).div_ceil(BLOCK));
        for (block, content) in blocks {
            let base = block * BLOCK;
            let from = (offset.max(base) - base) as usize;
            let to = ((offset + length).min(base + BLOCK) - base) as usize;
            if content[from..to].iter().any(|byte| *byte != 0) {
                return false;
            }
        }
        true
    }

    /// The blocks of a range that were written, or may have been written before a crash.
    pub fn known(&self, range: Range<u64>) -> Vec<u64> {
        let mut known: Vec<u64> = self.blocks.range(range.clone()).map(|(block, _)| *block).collect();
        known.extend(self.history.range(range).map(|(block, _)| *block));
        known.sort_unstable();
        known.dedup();
        known
    }

    fn put(&mut self, block: u64, content: Arc<Block>) {
        let before = self.blocks.insert(block, Arc::clone(&content));
        let history =
            self.history.entry(block).or_insert_with(|| History { versions: vec![before], floor: [0; SECTORS] });
        history.versions.push(Some(content));
    }

    /// Writes `data` at `offset`. The write is not durable.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let mut at = 0;
        for (block, range) in touched(offset, data.len() as u64) {
            let mut content = *self.block(block);
            content[range.clone()].copy_from_slice(&data[at..at + range.len()]);
            at += range.len();
            self.put(block, Arc::new(content));
        }
    }

    /// Makes a range read as zeros. The change is not durable.
    pub fn zero(&mut self, offset: u64, length: u64) {
        let zeros = Arc::new(ZEROS);
        for (block, range) in touched(offset, length) {
            if range.len() == BLOCK_SIZE {
                self.put(block, Arc::clone(&zeros));
            } else {
                let mut content = *self.block(block);
                content[range].fill(0);
                self.put(block, Arc::new(content));
            }
        }
    }

    /// Makes whole blocks read as zeros; the change is not durable. Blocks that were never written are not recorded, so
    /// the range may have terabytes.
    pub fn zero_known(&mut self, blocks: Range<u64>) {
        let zeros = Arc::new(ZEROS);
        for block in self.known(blocks) {
            self.put(block, Arc::clone(&zeros));
        }
    }

    /// True when all writes are durable.
    pub fn is_settled(&self) -> bool {
        self.history.is_empty()
    }

    /// Marks all writes as durable.
    pub fn flush(&mut self) {
        self.history.clear();
    }

    /// Marks the current content of a range as durable.
    pub fn make_durable(&mut self, offset: u64, length: u64) {
        for (block, range) in touched(offset, length) {
            let Some(history) = self.history.get_mut(&block) else { continue };
            let last = history.versions.len() - 1;
            for sector in range.start.div_ceil(SECTOR)..range.end / SECTOR {
                history.floor[sector] = last;
            }
            if history.floor.iter().all(|floor| *floor == last) {
                self.history.remove(&block);
            }
        }
    }

    /// Removes the content past a smaller capacity. The change is durable, as every change of a capacity is.
    pub fn truncate(&mut self, capacity: u64) {
        let end = capacity.div_ceil(BLOCK);
        self.blocks.split_off(&end);
        self.history.split_off(&end);
        let tail = (capacity % BLOCK) as usize;
        if tail > 0 && self.blocks.contains_key(&(capacity / BLOCK)) {
            let mut content = *self.block(capacity / BLOCK);
            content[tail..].fill(0);
            self.blocks.insert(capacity / BLOCK, Arc::new(content));
            // Older contents may reappear only in the part of the block that still exists.
            if let Some(history) = self.history.get_mut(&(capacity / BLOCK)) {
                for version in &mut history.versions {
                    let mut content = *bytes(version);
                    content[tail..].fill(0);
                    *version = Some(Arc::new(content));
                }
                history.versions.push(Some(Arc::new(content)));
            }
        }
    }

    /// Clears the rest of the last block, which becomes visible when the disk grows from `capacity`.
    pub fn extend(&mut self, capacity: u64) {
        if !capacity.is_multiple_of(BLOCK) && self.blocks.contains_key(&(capacity / BLOCK)) {
            let content = *self.block(capacity / BLOCK);
            self.put(capacity / BLOCK, Arc::new(content));
        }
    }

    /// Compares a block found after a crash or a failed write with the contents that it may have. Then the found
    /// content becomes the current content of the block and, with `for_good`, its durable content.
    pub fn observe(&mut self, block: u64, found: &Block, for_good: bool) -> Result<(), String> {
        let Some(history) = self.history.get_mut(&block) else {
            return compare(block, found, bytes(&self.blocks.get(&block).cloned()));
        };
        for sector in 0..SECTORS {
            let range = sector * SECTOR..(sector + 1) * SECTOR;
            let admitted = history.versions[history.floor[sector]..].iter();
            if !admitted.clone().any(|version| bytes(version)[range.clone()] == found[range.clone()]) {
                let age = history.versions.iter().rposition(|old| bytes(old)[range.clone()] == found[range.clone()]);
                let what = match age {
                    Some(age) => format!("version {age} of {}, made durable since", history.versions.len()),
                    None => "a content that was never written there".into(),
                };
                return Err(format!(
                    "sector {sector} of block {block} holds {what}: found {}, last written {}",
                    excerpt(&found[range.clone()]),
                    excerpt(&bytes(history.versions.last().unwrap_or(&None))[range])
                ));
            }
        }
        let mut same = history.versions.iter().filter(|version| bytes(version) == found);
        let content = match (same.next(), same.next()) {
            // If exactly one version matches, its `Arc` is kept.
            (Some(version), None) => version.clone(),
            _ => Some(Arc::new(*found)),
        };
        match &content {
            Some(content) => self.blocks.insert(block, Arc::clone(content)),
            None => self.blocks.remove(&block),
        };
        if for_good {
            self.history.remove(&block);
        } else {
            history.versions.push(content);
        }
        Ok(())
    }

    /// The blocks that may differ between two images: those written in at least one image since they were equal.
    pub fn written_apart<'a>(&'a self, other: &'a Image) -> impl Iterator<Item = u64> + 'a {
        let mut blocks: Vec<u64> = self.blocks.keys().chain(other.blocks.keys()).copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.into_iter().filter(|block| match (self.blocks.get(block), other.blocks.get(block)) {
            (Some(a), Some(b)) => !Arc::ptr_eq(a, b),
            (None, None) => false,
            _ => true,
        })
    }
}

/// True when all bytes are zeros.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Compares whole blocks, because most blocks on a large disk are holes.
    bytes.chunks(BLOCK_SIZE).all(|part| *part == ZEROS[..part.len()])
}

/// Describes the difference between two contents of a block.
pub fn compare(block: u64, found: &[u8], expected: &[u8]) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    match found.iter().zip(expected).position(|(a, b)| a != b) {
        None if found.len() == expected.len() => Ok(()),
        None => Err(format!("block {block}: {} bytes instead of {}", found.len(), expected.len())),
        Some(at) => Err(format!(
            "block {block} differs from byte {at} on: found {}, expected {}",
            excerpt(&found[at..]),
            excerpt(&expected[at..])
        )),
    }
}

fn excerpt(bytes: &[u8]) -> String {
    bytes.iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_versions_since_the_last_flush_are_accepted() {
        let mut image = Image::default();
        image.write(0, &[1; BLOCK_SIZE]);
        image.flush();
        image.write(0, &[2; BLOCK_SIZE]);
        image.write(512, &[3; 512]);
        let mut found = [1; BLOCK_SIZE];
        found[512..1024].fill(3);
        found[4000..].fill(1);
        image.clone().observe(0, &found, true).unwrap();
        found[700] = 9;
        image.clone().observe(0, &found, true).unwrap_err();
        found[512..1024].fill(2);
        image.clone().observe(0, &found, true).unwrap();
        // The sector is durable on its own: older contents are refused.
        image.make_durable(512, 512);
        image.observe(0, &found, true).unwrap_err();
    }

    #[test]
    fn content_found_after_a_crash_does_not_change() {
        let mut image = Image::default();
        image.write(0, &[1; BLOCK_SIZE]);
        image.observe(0, &[0; BLOCK_SIZE], true).unwrap();
        assert!(image.is_zero(0, 4096));
        image.observe(0, &[1; BLOCK_SIZE], true).unwrap_err();
    }
}
