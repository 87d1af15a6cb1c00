//! The parts of disks and snapshots that damage affects, for the findings of a check.
//!
//! One walk over all trees finds them for several damaged places. A text names a limited number of them, and the
//! finding lists all, up to a limit for each disk.

use super::check::{Report, Root};
use super::metadata::Sight;
use super::salvage::merge_ranges;
use super::scrub::{DamagedPlace, ReadIndex, Spans, WHOLE_PACKS, Wanted};
use crate::Result;
use crate::space::TABLE_ENTRIES;
use std::collections::BTreeSet;
use std::ops::Range;

/// Places of a finding in one disk or snapshot. The last one contains all further ones.
const SPANS_MAX: usize = 16;
/// Places of one block in one disk or snapshot that are told apart when blocks are counted.
const SPANS_COUNTED: usize = 1 << 12;
/// Blocks in use without references in the table that a check reports one by one.
const ABSENT_LISTED: usize = 8;
/// Disks and snapshots that the text of a finding names, and places in each; further ones are counted.
const NAMED_MAX: usize = 8;

/// A part of a disk or snapshot that damage affects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Affected {
    /// `disk` or `disk@snapshot`. What a deletion has not freed yet is `deleted object` and its number.
    pub name: String,
    /// The first byte.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
}

/// The parts of disks and snapshots that refer to a damaged place.
#[derive(Default)]
pub(super) struct Owners<'a> {
    parts: Vec<(&'a Root, Vec<Range<u64>>)>,
    /// Whether all disks and snapshots were searched, and could be read.
    is_whole: bool,
}

impl Owners<'_> {
    /// Whether it is certain that nothing refers to the place.
    pub fn are_none(&self) -> bool {
        self.parts.is_empty() && self.is_whole
    }

    /// All parts, as far as a finding lists them.
    pub fn places(&self) -> Vec<Affected> {
        let mut places = Vec::new();
        for (root, spans) in &self.parts {
            let listed = spans.len().min(SPANS_MAX);
            places.extend(spans[..listed].iter().map(|span| affected(root, span)));
            if let (Some(last), Some(end)) = (places.last_mut(), spans[listed..].last()) {
                last.length = root.bytes(end).end - last.offset;
            }
        }
        places
    }

    /// Names the first disks and snapshots, each by the bytes that contain all its parts.
    pub fn ranges(&self) -> String {
        self.named(|root, spans| {
            let start = spans.iter().map(|span| root.bytes(span).start).min().unwrap_or(0);
            let end = spans.iter().map(|span| root.bytes(span).end).max().unwrap_or(0);
            format!("{} bytes {start} to {end}", root.name)
        })
    }

    /// Names the first disks and snapshots, each with its first places.
    pub fn offsets(&self) -> String {
        self.named(|root, spans| {
            let first = spans.iter().take(NAMED_MAX).map(|span| root.bytes(span).start.to_string()).collect::<Vec<_>>();
            let (plural, more) = (if spans.len() > 1 { "s" } else { "" }, spans.len() - first.len());
            let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{} at offset{plural} {}{rest}", root.name, first.join(", "))
        })
    }

    /// Names the first disks and snapshots, each with the number of blocks of its parts.
    pub fn blocks(&self) -> String {
        self.named(|root, spans| {
            let blocks: u64 = spans.iter().map(|span| span.end - span.start).sum();
            format!("{blocks} of {}", root.name)
        })
    }

    fn named(&self, describe: impl Fn(&Root, &[Range<u64>]) -> String) -> String {
        if self.parts.is_empty() {
            let text = if self.is_whole {
                "nothing that is in use"
            } else {
                "unknown, because a part of the maps cannot be read"
            };
            return text.to_owned();
        }
        let named: Vec<String> = self.parts.iter().take(NAMED_MAX).map(|(root, spans)| describe(root, spans)).collect();
        let more = self.parts.len() - named.len();
        let rest = if more > 0 { format!(", and {more} more disks and snapshots") } else { String::new() };
        format!("{}{rest}", named.join(", "))
    }
}

impl Sight<'_> {
    /// Finds the parts of disks and snapshots that refer to each of the first `room` of these places, which have room
    /// in the report. The others are only counted there. `read_index` is needed for damaged blocks of packs only.
    pub(super) fn owners_of<'a>(
        &mut self,
        roots: &'a [Root],
        places: &[DamagedPlace],
        room: usize,
        read_index: ReadIndex<'_>,
    ) -> Result<Vec<Owners<'a>>> {
        let mut owners: Vec<Owners<'a>> = places.iter().map(|_| Owners::default()).collect();
        let places = &places[..places.len().min(room)];
        if !places.is_empty() {
            let trees: Vec<&Root> = roots.iter().collect();
            let mut found = |root: &&'a Root, spans: Spans| {
                spans.into_iter().for_each(|(place, spans)| owners[place].parts.push((*root, spans)));
            };
            let wanted = Wanted { places, spans_max: SPANS_MAX, read_index };
            let is_whole = self.search_trees(wanted, &trees, |root| root.node, &|| true, &mut found)?;
            owners[..places.len()].iter_mut().for_each(|owners| owners.is_whole = is_whole);
        }
        Ok(owners)
    }

    /// Finds the parts of disks and snapshots that refer to any of these blocks.
    pub(super) fn owners_of_blocks<'a>(
        &mut self,
        roots: &'a [Root],
        blocks: impl Iterator<Item = u64>,
    ) -> Result<Owners<'a>> {
        let places: Vec<DamagedPlace> = blocks.map(DamagedPlace::Block).collect();
        let trees: Vec<&Root> = roots.iter().collect();
        let mut owners = Owners::default();
        let mut found = |root: &&'a Root, spans: Spans| {
            if !spans.is_empty() {
                owners.parts.push((*root, merge_ranges(spans.into_values().flatten().collect())));
            }
        };
        let wanted = Wanted { places: &places, spans_max: SPANS_COUNTED, read_index: WHOLE_PACKS };
        owners.is_whole = self.search_trees(wanted, &trees, |root| root.node, &|| true, &mut found)?;
        Ok(owners)
    }
}

/// Reports blocks that trees refer to and that have no references in the table, with what a repair did for each. If
/// there are many, pages of the table have lost entries, as when recovery has written to a page that the medium returns
/// as zeros.
pub(super) fn report_absent(
    sight: &mut Sight<'_>,
    roots: &[Root],
    absent: Vec<(u64, Option<String>)>,
    report: &mut Report,
) -> Result<()> {
    let (Some((first, _)), Some((last, _))) = (absent.first(), absent.last()) else { return Ok(()) };
    if absent.len() <= ABSENT_LISTED {
        for (block, done) in absent {
            let text = format!("data block {block}, which is in use, has no references in the table");
            report.add(text, done);
        }
        return Ok(());
    }
    let owners = sight.owners_of_blocks(roots, absent.iter().map(|(block, _)| *block))?;
    let pages: BTreeSet<u64> = absent.iter().map(|(block, _)| block / TABLE_ENTRIES).collect();
    let text = format!(
        "{} data blocks between {first} and {last}, which are in use, have no references in data.table ({} of its pages, \
         from {} on): blocks of 4 KiB: {}",
        absent.len(),
        pages.len(),
        first / TABLE_ENTRIES,
        owners.blocks()
    );
    let done = absent.iter().all(|(_, done)| done.is_some()).then(|| "counted from the trees".to_owned());
    report.add_at(text, done, owners.places());
    Ok(())
}

/// The bytes of a disk in a range of blocks.
fn affected(root: &Root, span: &Range<u64>) -> Affected {
    let Range { start, end } = root.bytes(span);
    Affected { name: root.short.clone(), offset: start, length: end - start }
}
