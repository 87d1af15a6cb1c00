//! Records of NTFS: update sequences, attributes, and the runs of attributes that are stored in clusters.

use crate::fields::{byte, has, le16, le32, le64};
use crate::{Outcome, refused};

const STRIDE: usize = 512;
const ATTRIBUTE_LIST: u32 = 0x20;
const ATTRIBUTE_END: u32 = 0xFFFF_FFFF;
const ATTRIBUTE_INDEX_ROOT: u32 = 0x90;
const ATTRIBUTE_INDEX: u32 = 0xA0;

/// Consecutive clusters of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first cluster within the file.
    pub first: u64,
    /// The first cluster on the volume; `None` for a hole.
    pub place: Option<u64>,
    pub count: u64,
}

/// The content of an attribute.
pub(super) enum Attribute<'r> {
    /// In the record.
    Resident { value: &'r [u8] },
    /// In clusters.
    Runs {
        /// The encoded runs.
        bytes: &'r [u8],
        /// Length in bytes.
        length: u64,
        /// Bytes that were written; the others read as zeros.
        valid: u64,
    },
}

/// A structure with its update sequence applied: the last two bytes of each 512 bytes are stored at its beginning, and
/// in their place is a number that shows whether the structure was written completely.
pub(super) fn fixed(mut bytes: Vec<u8>, magic: &[u8]) -> Outcome<Vec<u8>> {
    let (at, count) = (usize::from(le16(&bytes, 4)), usize::from(le16(&bytes, 6)));
    let strides = bytes.len() / STRIDE;
    if !has(&bytes, 0, magic) || count != strides + 1 || at < 8 || at + 2 * count > STRIDE - 2 {
        return refused("a record is damaged");
    }
    for stride in 0..strides {
        let (end, saved) = ((stride + 1) * STRIDE, at + 2 * (stride + 1));
        if bytes[end - 2..end] != bytes[at..at + 2] {
            return refused("a record was not written completely");
        }
        bytes.copy_within(saved..saved + 2, end - 2);
    }
    Ok(bytes)
}

/// The first attribute of a kind without a name, or of an index with the name of the index of names. Refused if the
/// record has a list of attributes, because further parts may be in other records.
pub(super) fn find(record: &[u8], kind: u32) -> Outcome<Option<Attribute<'_>>> {
    let mut at = usize::from(le16(record, 0x14));
    let mut found = None;
    loop {
        let Some(rest) = record.get(at..).filter(|rest| rest.len() >= 4) else {
            return refused("the attributes of a record have no end");
        };
        let this = le32(rest, 0);
        if this == ATTRIBUTE_END {
            return Ok(found);
        }
        let length = le32(rest, 4) as usize;
        if this == ATTRIBUTE_LIST {
            return refused("a file has attributes in several records, which is not supported");
        }
        if !(0x18..=rest.len()).contains(&length) {
            return refused("an attribute is damaged");
        }
        let attribute = &rest[..length];
        if this == kind && found.is_none() && has_name(attribute, kind) {
            found = Some(decode(attribute)?);
        }
        at += length;
    }
}

/// Whether an attribute is the one of its kind that is meant.
fn has_name(attribute: &[u8], kind: u32) -> bool {
    let (letters, at) = (usize::from(byte(attribute, 9)), usize::from(le16(attribute, 10)));
    match kind {
        ATTRIBUTE_INDEX_ROOT | ATTRIBUTE_INDEX => letters == 4 && has(attribute, at, b"$\0I\x003\x000\0"),
        _ => letters == 0,
    }
}

fn decode(attribute: &[u8]) -> Outcome<Attribute<'_>> {
    if byte(attribute, 8) == 0 {
        let (length, at) = (le32(attribute, 0x10) as usize, usize::from(le16(attribute, 0x14)));
        return match at.checked_add(length).and_then(|end| attribute.get(at..end)) {
            Some(value) => Ok(Attribute::Resident { value }),
            None => refused("an attribute is damaged"),
        };
    }
    // Compressed, encrypted and sparse attributes are not expected here.
    let is_plain = attribute.len() >= 0x40 && le16(attribute, 0xC) == 0 && le64(attribute, 0x10) == 0;
    match attribute.get(usize::from(le16(attribute, 0x20))..) {
        Some(bytes) if is_plain => {
            Ok(Attribute::Runs { bytes, length: le64(attribute, 0x30), valid: le64(attribute, 0x38) })
        }
        _ => refused("an attribute is damaged or has an unexpected form"),
    }
}

/// Decodes runs, whose places must be within a volume of `clusters` clusters.
pub(super) fn runs(mut bytes: &[u8], clusters: u64) -> Outcome<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    let (mut first, mut place) = (0_u64, 0_i64);
    loop {
        let Some((head, rest)) = bytes.split_first() else { return refused("the runs of a file have no end") };
        if *head == 0 {
            return Ok(runs);
        }
        let (of_count, of_place) = (usize::from(head & 0xF), usize::from(head >> 4));
        if of_count == 0 || of_count > 8 || of_place > 8 || rest.len() < of_count + of_place {
            return refused("a run of a file is invalid");
        }
        let count = signed(&rest[..of_count]);
        let step = signed(&rest[of_count..of_count + of_place]);
        bytes = &rest[of_count + of_place..];
        let Some(count) = u64::try_from(count).ok().filter(|count| (1..=clusters).contains(count)) else {
            return refused("a run of a file is invalid");
        };
        let at = if of_place == 0 {
            None
        } else {
            let next = place.checked_add(step);
            let inside = |at: &u64| at.checked_add(count).is_some_and(|end| end <= clusters);
            let Some(at) = next.and_then(|at| u64::try_from(at).ok()).filter(inside) else {
                return refused("a run of a file is not within the volume");
            };
            place = at as i64;
            Some(at)
        };
        runs.push(Run { first, place: at, count });
        // Each run has at most as many clusters as the volume, and a record has few runs.
        first = first.saturating_add(count);
    }
}

/// A little-endian number with a sign.
fn signed(bytes: &[u8]) -> i64 {
    let fill = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xFF } else { 0 };
    let mut whole = [fill; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(whole)
}

/// The place of a cluster of a file, and the number of clusters of the run from there on.
pub(super) fn in_runs(runs: &[Run], cluster: u64) -> Option<(Option<u64>, u64)> {
    let run = runs.iter().find(|run| run.first <= cluster && cluster - run.first < run.count)?;
    let inside = cluster - run.first;
    Some((run.place.map(|place| place + inside), run.count - inside))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn runs_have_signed_steps_and_holes() {
        let bytes = [0x21, 0x18, 0x34, 0x56, 0x11, 0x02, 0xF0, 0x01, 0x05, 0x00, 0xAA];
        let found = runs(&bytes, 1 << 20).ok().unwrap();
        assert_eq!(
            found,
            [
                Run { first: 0, place: Some(0x5634), count: 0x18 },
                Run { first: 0x18, place: Some(0x5624), count: 2 },
                Run { first: 0x1A, place: None, count: 5 },
            ]
        );
        assert_eq!(in_runs(&found, 0x19), Some((Some(0x5625), 1)));
        assert_eq!(in_runs(&found, 0x1C), Some((None, 3)));
        assert_eq!(in_runs(&found, 0x1F), None);
        for bad in [&[0x21, 0x18, 0x34][..], &[0x11, 0x00, 0x01, 0], &[0x11, 0x01, 0xFF, 0], &[0x11, 0x01, 0x7F, 0]] {
            assert!(runs(bad, 0x7F).is_err(), "{bad:x?}");
        }
    }
}
