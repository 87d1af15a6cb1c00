//! Places: the disks, snapshots and logical blocks that map shared blocks and packs.
//!
//! A shared block can be packed, and a pack can be packed again, only if all leaves that map it are known, and they may
//! map it at any logical blocks. So before a pass packs a part of its work, it notes the shared blocks and packs there,
//! and then walks over all disks and snapshots to find where else they are mapped. The memory is limited: if the notes
//! of a part would exceed it, the part is smaller, and the walk is repeated for the rest.
//!
//! What was found is a hint and may be out of date. The plan of a pack verifies each place, and packs a block only if
//! it has found all its references.

use super::PackStep;
use crate::catalog::ObjectState;
use crate::engine::metadata::{LeafPart, PartOfLeaf, end_of_part};
use crate::engine::{Engine, Meta};
use crate::pack::Packer;
use crate::{Result, is_lost};
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;
use std::ops::Range;

/// The most references of a shared block that is packed. Blocks with more of them stay plain: the most that packing can
/// save is less than 1/64 of what sharing has saved.
const REFERENCES_MAX: u32 = 64;
/// Bytes of memory of a place.
const PLACE_BYTES: usize = size_of::<Place>();
/// Bytes of memory of a shared block with two places, as most of them have.
const WANTED_BYTES: usize = size_of::<u64>() + 2 * PLACE_BYTES;

/// What a pass of packing needs and remembers between its steps.
pub struct PackPass {
    pub(super) packer: Packer,
    pub(super) places: Places,
}

impl PackPass {
    /// A pass that compresses with `packer`. `memory` limits the notes on shared blocks, in bytes: with 0, they stay
    /// plain. `work` is what the pass will pack, in this order. If it is more or less than that, the pass only takes
    /// longer.
    pub fn new(packer: Packer, memory: usize, work: Vec<(u64, Range<u64>)>) -> Self {
        let places = Places { memory, work, ..Places::default() };
        Self { packer, places }
    }
}

#[cfg(test)]
impl PackPass {
    /// Whether the next step looks for places.
    pub fn finds_places(&self) -> bool {
        !matches!(self.places.phase, Phase::Ready)
    }
}

/// A place where a shared block is mapped, or the first logical block of an entry that maps a part of a pack.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Place {
    pub physical: u64,
    pub object: u64,
    pub logical: u64,
}

/// What the notes are for.
#[derive(Default)]
enum Phase {
    /// Nothing is noted.
    #[default]
    Begin,
    /// The shared blocks of the work from this entry and logical block on are noted.
    Note { entry: usize, at: u64 },
    /// The places of the noted blocks are looked for, in the tree with this number from this logical block on.
    Find { objects: Vec<(u64, u64)>, number: usize, at: u64 },
    /// The places are known.
    Ready,
}

/// The places of shared blocks.
#[derive(Default)]
pub(super) struct Places {
    memory: usize,
    work: Vec<(u64, Range<u64>)>,
    phase: Phase,
    /// For each object and first logical block the end of a range of which the shared blocks are noted.
    noted: BTreeMap<(u64, u64), u64>,
    /// The first physical block of each shared block, in ascending order once all are noted.
    wanted: Vec<u64>,
    /// In ascending order once all are found.
    found: Vec<Place>,
    /// Parts of leaves that several trees share, and that were visited.
    seen: FxHashSet<PartOfLeaf>,
}

impl Places {
    /// The places of a physical block.
    pub fn of(&self, physical: u64) -> impl Iterator<Item = Place> + '_ {
        let first = self.found.partition_point(|place| place.physical < physical);
        self.found[first..].iter().take_while(move |place| place.physical == physical).copied()
    }

    /// The end of the blocks of an object that can be packed now, from a logical block on: the places of the others are
    /// looked for when these are packed.
    pub fn end(&self, object: u64, at: u64) -> Option<u64> {
        let (_, end) = self.noted.range(..=(object, at)).next_back().filter(|((known, _), _)| *known == object)?;
        Some(*end).filter(|end| at < *end)
    }

    /// Begins with the notes on the shared blocks of an object from a logical block on. Returns what comes next.
    fn begin(&mut self, object: u64, range: &Range<u64>) -> Phase {
        self.noted.clear();
        self.wanted.clear();
        self.found.clear();
        self.seen.clear();
        let is_here = |(known, part): &(u64, Range<u64>)| *known == object && part.contains(&range.start);
        let entry = self.work.iter().position(is_here).unwrap_or_else(|| {
            self.work = vec![(object, range.clone())];
            0
        });
        Phase::Note { entry, at: range.start }
    }

    /// Whether further blocks can be noted. Blocks that snapshots share were noted for each of them.
    fn has_room(&mut self) -> bool {
        let most = (self.memory / WANTED_BYTES).max(1);
        if self.wanted.len() >= most {
            self.wanted.sort_unstable();
            self.wanted.dedup();
        }
        // If few were noted several times, the next notes would soon be sorted again.
        self.wanted.len() < most - most / 4 || self.wanted.is_empty()
    }

    /// Notes the shared blocks of a range of an object.
    fn note(&mut self, object: u64, range: Range<u64>, shared: Vec<u64>) {
        self.wanted.extend(shared);
        match self.noted.range_mut(..=(object, range.start)).next_back() {
            Some(((known, _), end)) if *known == object && *end == range.start => *end = range.end,
            _ => drop(self.noted.insert((object, range.start), range.end)),
        }
    }

    fn add(&mut self, places: Vec<Place>) {
        let room = self.memory.saturating_sub(size_of::<u64>() * self.wanted.len()) / PLACE_BYTES;
        let room = room.saturating_sub(self.found.len());
        // The blocks of places that are left out have fewer places than references, so they stay plain.
        self.found.extend(places.into_iter().take(room));
    }
}

/// What a step of a walk has found.
struct Visited<T> {
    /// The logical block with which the next step begins.
    next: u64,
    found: Vec<T>,
    /// The part of a leaf that was visited, if several trees share the leaf.
    part: Option<PartOfLeaf>,
}

impl Engine {
    /// Makes a step towards the places of the shared blocks of an object from `range.start` on. `None` if they are
    /// known, or are not needed.
    pub(super) fn find_places(&self, object: u64, range: &Range<u64>, places: &mut Places) -> Result<Option<PackStep>> {
        if places.memory < WANTED_BYTES || !self.log.has_shares() {
            return Ok(None);
        }
        places.phase = match std::mem::take(&mut places.phase) {
            Phase::Ready if places.end(object, range.start).is_some() => {
                places.phase = Phase::Ready;
                return Ok(None);
            }
            Phase::Begin | Phase::Ready => places.begin(object, range),
            Phase::Note { entry, at } => self.note_shared(entry, at, places)?,
            Phase::Find { objects, number, at } => self.find_in(objects, number, at, places)?,
        };
        Ok(Some(PackStep { next: range.start, ..PackStep::default() }))
    }

    /// Notes the shared blocks of the next part of the work. Returns what comes next.
    fn note_shared(&self, entry: usize, at: u64, places: &mut Places) -> Result<Phase> {
        let next = if places.has_room() { places.work.get(entry).cloned() } else { None };
        let Some((object, range)) = next else {
            places.wanted.sort_unstable();
            places.wanted.dedup();
            if places.wanted.is_empty() {
                return Ok(Phase::Ready);
            }
            return Ok(Phase::Find { objects: self.meta.lock().objects_with_ends(), number: 0, at: 0 });
        };
        let part = at.max(range.start)..range.end;
        let visited = self.visit(object, part.clone(), |meta| meta.shared_blocks(object, part.clone()))?;
        let next = visited.as_ref().map_or(range.end, |visited| visited.next);
        places.note(object, part.start..next, visited.map(|visited| visited.found).unwrap_or_default());
        Ok(if next < range.end { Phase::Note { entry, at: next } } else { Phase::Note { entry: entry + 1, at: 0 } })
    }

    /// Finds the places of the noted blocks in the next part of an object. Returns what comes next.
    fn find_in(&self, objects: Vec<(u64, u64)>, number: usize, at: u64, places: &mut Places) -> Result<Phase> {
        let Some((object, end)) = objects.get(number).copied() else {
            places.found.sort_unstable();
            places.seen.clear();
            return Ok(Phase::Ready);
        };
        let (wanted, seen) = (&places.wanted, &places.seen);
        let visited = self.visit(object, at..end, |meta| meta.places_of(object, at..end, wanted, seen))?;
        let Some(Visited { next, found, part }) = visited else {
            return Ok(Phase::Find { objects, number: number + 1, at: 0 });
        };
        places.seen.extend(part);
        places.add(found);
        Ok(Phase::Find { objects, number, at: next })
    }

    /// Makes a step of a walk over an object. Blocks that a lost page describes are left out.
    fn visit<T>(
        &self,
        object: u64,
        range: Range<u64>,
        step: impl FnMut(&mut Meta) -> Result<Option<Visited<T>>>,
    ) -> Result<Option<Visited<T>>> {
        match self.meta.look(step) {
            Err(error) if is_lost(&error) && self.running.goes_on() => {
                tracing::debug!(%error, object, block = range.start, "shared blocks are not looked for");
                let next = end_of_part(&range);
                Ok(Some(Visited { next, found: Vec::new(), part: None }))
            }
            visited => visited,
        }
    }
}

impl Meta {
    /// All disks and snapshots, with the ends of their logical blocks.
    fn objects_with_ends(&self) -> Vec<(u64, u64)> {
        let is_whole = |state| matches!(state, ObjectState::Disk | ObjectState::Snapshot);
        let objects = self.catalog.objects().filter(|object| is_whole(object.state));
        objects.map(|object| (object.id, object.size_in_blocks())).collect()
    }

    /// The plain blocks, and the first blocks of packs, with a few references in the next part of an object.
    fn shared_blocks(&mut self, object: u64, range: Range<u64>) -> Result<Option<Visited<u64>>> {
        let Some(LeafPart { leaf, next, .. }) = self.next_part(object, range)? else { return Ok(None) };
        let mut found = Vec::new();
        for mapping in leaf.mappings.iter().filter(|mapping| !mapping.unwritten) {
            let blocks = if mapping.packed.is_some() { 1 } else { mapping.blocks };
            for physical in mapping.physical..mapping.physical + blocks {
                if (2..=REFERENCES_MAX).contains(&self.entry(physical)?.references) {
                    found.push(physical);
                }
            }
        }
        Ok(Some(Visited { next, found, part: None }))
    }

    /// The places of the wanted blocks in the next part of an object.
    fn places_of(
        &mut self,
        object: u64,
        range: Range<u64>,
        wanted: &[u64],
        seen: &FxHashSet<PartOfLeaf>,
    ) -> Result<Option<Visited<Place>>> {
        let Some(step) = self.next_part(object, range)? else { return Ok(None) };
        let (part, next) = (step.shared(), step.next);
        let mut found = Vec::new();
        if part.is_some_and(|part| seen.contains(&part)) {
            return Ok(Some(Visited { next, found, part: None }));
        }
        for mapping in step.leaf.mappings.iter().filter(|mapping| !mapping.unwritten) {
            // An entry of a pack is one place, whichever part of the pack it maps.
            let blocks = if mapping.packed.is_some() { 1 } else { mapping.blocks };
            let first = wanted.partition_point(|physical| *physical < mapping.physical);
            let within = wanted[first..].iter().take_while(|physical| **physical < mapping.physical + blocks);
            found.extend(within.map(|physical| {
                let logical = mapping.logical + (physical - mapping.physical);
                Place { physical: *physical, object, logical }
            }));
        }
        Ok(Some(Visited { next, found, part }))
    }
}
