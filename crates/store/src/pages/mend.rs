//! Restores a page that fails its checksum, if its content can be proven.
//!
//! There are two proofs:
//!
//! * The images of the last checkpoint: a page with an image there has not changed in its file since (invariant 1 of
//!   the [cache](super)), so the image is its content.
//! * The page's own checksum, if inverting one bit makes it match. CRC32C has a Hamming distance of 4 over all lengths
//!   used here. So inverting one bit yields at most one page with a valid checksum, and none if two bits are wrong.

use super::{PageKey, verify};
use crate::sync::Mutex;
use backend::{BLOCK_SIZE, Block, File};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Offset of the checksum in a page.
const CHECKSUM_AT: usize = 12;
/// The polynomial of CRC32C, bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ POLYNOMIAL } else { sum >> 1 };
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
}

/// What proves the content of a restored page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// An image of the last checkpoint.
    Image,
    /// The page's own checksum: one bit was inverted.
    Bit,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Image => "restored from the images of the last checkpoint",
            Self::Bit => "restored: one bit was inverted, which its checksum proves",
        })
    }
}

/// Corrects one inverted bit of `bytes`, which contain their CRC32C at offset `field`. Returns false and changes
/// nothing if inverting a single bit does not make the checksum match.
pub fn restore_bit(bytes: &mut [u8], field: usize) -> bool {
    let Some(Ok(stored)) = bytes.get(field..field + 4).map(<[u8; 4]>::try_from) else { return false };
    let found = checksums::checksum_without(bytes, field);
    let difference = u32::from_le_bytes(stored) ^ found;
    if difference.count_ones() == 1 {
        bytes[field..field + 4].copy_from_slice(&found.to_le_bytes());
        return true;
    }
    invert(bytes, difference, field..field + 4)
}

/// Corrects one inverted bit of `bytes`, given their correct checksum.
pub fn restore_bit_of(bytes: &mut [u8], stored: u32) -> bool {
    let difference = stored ^ crate::checksum(bytes);
    invert(bytes, difference, 0..0)
}

/// Inverts the single bit outside `not_in` that changes the checksum by `difference`. False if there is no such bit.
fn invert(bytes: &mut [u8], difference: u32, not_in: Range<usize>) -> bool {
    // The effect on the checksum of each bit of the last byte. The loop then computes the effect for each earlier byte.
    let mut adds: [u32; 8] = std::array::from_fn(|bit| TABLE[1 << bit]);
    for at in (0..bytes.len()).rev() {
        if !not_in.contains(&at)
            && let Some(bit) = adds.iter().position(|add| *add == difference)
        {
            bytes[at] ^= 1 << bit;
            return true;
        }
        adds = adds.map(|add| add >> 8 ^ TABLE[(add & 0xff) as usize]);
    }
    false
}

/// The pages of the last checkpoint, with their places in the images file.
pub struct ImageIndex {
    /// The images file.
    pub file: Arc<dyn File>,
    /// Byte offset of each page.
    pub places: FxHashMap<PageKey, u64>,
}

/// Restores damaged pages for a cache.
#[derive(Default)]
pub struct Mender {
    images: Option<ImageIndex>,
    mended: Mutex<BTreeMap<PageKey, Proof>>,
}

impl Mender {
    /// A mender that uses the images of the last checkpoint, if they are undamaged.
    pub fn new(images: Option<ImageIndex>) -> Self {
        Self { images, mended: Mutex::default() }
    }

    /// Whether the last checkpoint has an image of a page.
    pub fn has_image(&self, key: PageKey) -> bool {
        self.images.as_ref().is_some_and(|images| images.places.contains_key(&key))
    }

    /// The content of page `key` if it can be proven; `raw` are the bytes found in its place.
    pub fn restore(&self, key: PageKey, raw: Option<&Block>) -> Option<Block> {
        let (page, proof) = self.proven(key, raw)?;
        self.mended.lock().insert(key, proof);
        Some(page)
    }

    fn proven(&self, key: PageKey, raw: Option<&Block>) -> Option<(Block, Proof)> {
        if let Some(images) = &self.images
            && let Some(place) = images.places.get(&key)
        {
            let mut page = Block([0; BLOCK_SIZE]);
            let read = images.file.read_at(&mut page.0, *place).is_ok();
            // A page of zeros counts as never written, and is no image.
            if read && page.0[0..4] != [0; 4] && verify(&mut page, key).is_ok() {
                return Some((page, Proof::Image));
            }
        }
        let mut page = *raw?;
        (restore_bit(&mut page.0, CHECKSUM_AT) && verify(&mut page, key).is_ok()).then_some((page, Proof::Bit))
    }

    /// The pages restored since the last call, with their proofs.
    pub fn take_mended(&self) -> BTreeMap<PageKey, Proof> {
        std::mem::take(&mut self.mended.lock())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::pages::{PageFile, blank, sealed};

    #[test]
    fn one_inverted_bit_is_corrected_and_two_are_not() {
        let key = PageKey::new(PageFile::DataSummary, 5);
        let mut page = blank(key);
        (100..4000).for_each(|at| page.0[at] = (at * 7) as u8);
        let good = sealed(&page);
        for at in (0..64).chain([1000, 4095]) {
            for bit in 0..8 {
                let mut bad = good;
                bad.0[at] ^= 1 << bit;
                let raw = bad;
                assert!(restore_bit(&mut bad.0, CHECKSUM_AT), "byte {at} bit {bit}");
                assert_eq!(bad.0, good.0);
                assert_eq!(Mender::default().restore(key, Some(&raw)).unwrap().0, good.0);
                let mut worse = raw;
                worse.0[(at + 77) % BLOCK_SIZE] ^= 16;
                assert!(!restore_bit(&mut worse.0, CHECKSUM_AT), "byte {at} bit {bit} and another");
            }
        }
    }

    #[test]
    fn a_page_with_another_number_is_not_corrected() {
        // A page with another number, with one inverted bit.
        let mut page = sealed(&blank(PageKey::new(PageFile::DataSummary, 5)));
        page.0[2000] ^= 4;
        assert!(Mender::default().restore(PageKey::new(PageFile::DataSummary, 6), Some(&page)).is_none());
    }
}
