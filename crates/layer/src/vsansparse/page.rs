//! Encoding of map pages and root blocks: one block each, in two copies that are written in turn.
//!
//! A copy is valid if its checksum is right, and if it belongs to this object and location. Of two valid copies the one
//! with the greater sequence is current. A copy of zeros was never written. Any other copy is a torn write, which is
//! possible only for pages and root blocks of an interrupted checkpoint: these are replayed from the log and written
//! again before any other change. At any other time a copy that is neither valid nor zeros is damage. The remaining
//! copy may be out of date, so it must not be used instead.

use super::header::{is_sealed, seal, u64_at};
use super::layout::{BLOCK, COPIES, PAGE_GRAINS, ROOT_PAGES};
use crate::runs::{EntryRun, RunList};
use std::ops::Range;

const SIZE: usize = BLOCK as usize;
const MAGIC: [u8; 4] = *b"LVSM";
const OFFSET_CHECKSUM: usize = 4;
/// The first byte after the head.
const BODY: usize = 64;

/// Bytes of an entry: 38 bits of block number, 8 zero bits, 2 bits of state.
const ENTRY_SIZE: usize = 6;
const PLACE_MASK: u64 = (1 << 38) - 1;
const STATE_SHIFT: u32 = 46;

/// Run state: a block is reserved for the grain, which is still absent. Only in memory.
pub(super) const RESERVED: u8 = 0;
/// Entry or run state: the grain's data is at its block.
pub(super) const DATA: u8 = 1;
/// Entry or run state: zeros; a block may be reserved.
pub(super) const ZERO: u8 = 2;
/// Run state: zeros, with a reserved block that is not in the log yet. Only in memory.
pub(super) const ZERO_RESERVED: u8 = 3;

/// The kind of a metadata block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Page = 1,
    Root = 2,
}

/// The identity of a metadata block: object, kind and index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) id: [u8; 16],
    pub(super) kind: Kind,
    pub(super) index: u32,
}

/// The state of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The copy is valid.
    Whole {
        /// Greater in the newer of two copies.
        sequence: u64,
    },
    /// The copy was never written.
    Empty,
    /// The copy is torn, or damaged.
    Broken,
}

/// The head of a block, without the checksum.
fn head(identity: Identity, sequence: u64) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[8..24].copy_from_slice(&identity.id);
    bytes[24..28].copy_from_slice(&identity.index.to_le_bytes());
    bytes[28..32].copy_from_slice(&(identity.kind as u32).to_le_bytes());
    bytes[32..].copy_from_slice(&sequence.to_le_bytes());
    bytes
}

/// Encodes a block with this body.
pub(super) fn encode(identity: Identity, sequence: u64, body: &[u8]) -> [u8; SIZE] {
    let mut bytes = [0; SIZE];
    bytes[..40].copy_from_slice(&head(identity, sequence));
    bytes[BODY..BODY + body.len()].copy_from_slice(body);
    seal(&mut bytes, OFFSET_CHECKSUM);
    bytes
}

fn inspect(identity: Identity, bytes: &[u8]) -> Found {
    if bytes.iter().all(|byte| *byte == 0) {
        return Found::Empty;
    }
    let expected = head(identity, u64_at(bytes, 32));
    match bytes[..4] == expected[..4] && bytes[8..40] == expected[8..] && is_sealed(bytes, OFFSET_CHECKSUM) {
        true => Found::Whole { sequence: u64_at(bytes, 32) },
        false => Found::Broken,
    }
}

/// The choice of the current copy among the two copies of a block.
pub(super) struct Current<'a> {
    /// The index of the copy; `None` if neither is valid.
    pub(super) copy: Option<usize>,
    /// The body of the copy; empty if there is none.
    pub(super) body: &'a [u8],
    /// Whether one of the copies is torn or damaged.
    pub(super) broken: bool,
}

/// Chooses the current copy of a map page or root block.
pub(super) fn choose(identity: Identity, copies: &[u8]) -> Current<'_> {
    let mut current = Current { copy: None, body: &[], broken: false };
    let mut newest = 0;
    for (index, bytes) in copies.chunks_exact(SIZE).take(COPIES as usize).enumerate() {
        match inspect(identity, bytes) {
            Found::Whole { sequence } if current.copy.is_none() || sequence > newest => {
                newest = sequence;
                current.copy = Some(index);
                current.body = &bytes[BODY..];
            }
            Found::Broken => current.broken = true,
            _ => {}
        }
    }
    current
}

/// Encodes the body of a map page.
pub(super) fn encode_entries(list: &RunList) -> Vec<u8> {
    let mut body = vec![0; PAGE_GRAINS as usize * ENTRY_SIZE];
    for run in list.runs() {
        let (state, place) = match run.kind {
            DATA => (DATA, run.place),
            ZERO => (ZERO, run.place),
            // The block is not stored: it is not in the log, so after a crash it may be allocated for another grain.
            ZERO_RESERVED => (ZERO, 0),
            _ => continue,
        };
        let entries = body[run.first as usize * ENTRY_SIZE..].chunks_exact_mut(ENTRY_SIZE);
        for (at, entry) in (0..u64::from(run.count)).zip(entries) {
            let place = if place == 0 { 0 } else { place + at };
            let value = u64::from(state) << STATE_SHIFT | place;
            entry.copy_from_slice(&value.to_le_bytes()[..ENTRY_SIZE]);
        }
    }
    body
}

/// Decodes the body of a map page with `grains` entries. The blocks that they name must be in `valid`; `None` if an
/// entry is invalid.
pub(super) fn decode_entries(body: &[u8], grains: u32, valid: &Range<u64>) -> Option<RunList> {
    let mut list = RunList::new(1);
    for (first, entry) in (0..grains).zip(body.chunks_exact(ENTRY_SIZE)) {
        let mut field = [0; 8];
        field[..ENTRY_SIZE].copy_from_slice(entry);
        let value = u64::from_le_bytes(field);
        let (kind, place) = ((value >> STATE_SHIFT) as u8, value & PLACE_MASK);
        match kind {
            _ if value == 0 => continue,
            DATA if valid.contains(&place) => {}
            ZERO if place == 0 || valid.contains(&place) => {}
            _ => return None,
        }
        list.push(EntryRun { first, count: 1, kind, place });
    }
    list.shrink_to_fit();
    Some(list)
}

const _: () = assert!(BODY + PAGE_GRAINS as usize * ENTRY_SIZE <= SIZE);
const _: () = assert!(BODY + ROOT_PAGES as usize / 4 <= SIZE);
const _: () = assert!(PLACE_MASK == crate::runs::PLACE_MAX);
