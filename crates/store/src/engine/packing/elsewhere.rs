//! The parts of a pack that are mapped at other logical blocks than its own, because they replace shared blocks.
//!
//! The same holds for parts of a pack that is packed again.
//!
//! What must hold:
//!
//! 1. A block is packed only if all its references were found, at its own logical block and at others. Each leaf entry
//!    is one reference, so a leaf counts once for each logical block, whatever trees share it.
//! 2. A block that a thick disk or a snapshot of one maps at any of these places is not packed.
//! 3. All operations of a pack are admitted together. If only some were carried out, blocks would be stored twice.

use super::leaves::PlannedLeaves;
use super::places::{Place, Places};
use super::plan::{Candidate, sources};
use super::repack::OldPack;
use crate::Result;
use crate::engine::Meta;
use crate::engine::metadata::{Effects, PACK_SPLITS_MAX};
use crate::journal::{Operation, PACK_OBJECTS_MAX};
use crate::space::Run;
use crate::tree::{self, Leaf, Mapping, NodeId, Packed, PhysicalRun, Source};
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// The most operations of one pack, beside the one for its own logical blocks.
const OPERATIONS_MAX: usize = 512;
/// The most leaves that these change: the cost of a pack must fit into the budget of any datastore.
const LEAVES_MAX: u64 = 1024;
/// The most places that are verified for one pack.
const PLACES_MAX: usize = 4096;
/// The most leaves that are split for one pack, beside those of its own logical blocks.
const SPLITS_MAX: u64 = 8 * PACK_SPLITS_MAX;
/// Logical blocks of a leaf that are looked up at once.
const LEAF_BLOCKS: u64 = 256;

/// A part of a pack, and a logical block at which objects map it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Elsewhere {
    pub logical: u64,
    /// The plain blocks that are mapped there, and their place in the pack.
    pub source: Source,
    /// Disks and snapshots with leaves of their own that map these blocks there.
    pub objects: Vec<u64>,
}

impl Elsewhere {
    /// The logical blocks.
    pub fn window(&self) -> Range<u64> {
        self.logical..self.logical + self.source.run.blocks
    }

    /// The operation that maps this part of a pack.
    pub fn operation(&self, run: Run, checksums: &[u32]) -> Operation {
        Operation::SharePack {
            logical: self.logical,
            source: self.source,
            run,
            checksums: checksums.to_vec(),
            objects: self.objects.clone(),
        }
    }
}

/// The other places of the blocks of a pack.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Others {
    pub parts: Vec<Elsewhere>,
    /// The number of leaves that change, and how many of them have to be split.
    pub leaves: u64,
    pub splits: u64,
}

/// A place where a candidate with this index may be mapped.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Claimed {
    object: u64,
    logical: u64,
    index: usize,
    physical: u64,
}

/// An entry that maps a part of a pack.
pub(super) struct Entry {
    object: u64,
    logical: u64,
    pub index: u8,
    pub blocks: u64,
}

/// Looks up leaves of several trees, of which consecutive ones are often the same.
#[derive(Default)]
struct LastLeaf(Option<(NodeId, Range<u64>, Leaf)>);

impl Meta {
    /// Completes the candidates of a window that are mapped at other logical blocks too, and returns these places. If
    /// they cannot be packed, they stay incomplete. `leaves` are those that map the window.
    pub(super) fn find_elsewhere(
        &mut self,
        window: &Range<u64>,
        candidates: &mut [Option<Candidate>],
        leaves: &PlannedLeaves,
        places: &Places,
    ) -> Result<Others> {
        let claimed = claimed_places(window, candidates, places);
        if claimed.is_empty() || claimed.len() > PLACES_MAX {
            return Ok(Others::default());
        }
        let before = candidates.to_vec();
        let found = self.verify_places(&claimed, candidates)?;
        let is_whole = |place: &Claimed| candidates[place.index].is_some_and(|candidate| candidate.left == 0);
        let parts = parts_of(found.into_iter().filter(is_whole));
        let is_small = parts.len() <= OPERATIONS_MAX && parts.iter().all(|part| part.objects.len() <= PACK_OBJECTS_MAX);
        let (sources, _) = sources(candidates);
        let here: Vec<(u64, Source)> =
            sources.into_iter().map(|source| (window.start + u64::from(source.index), source)).collect();
        let room = if is_small { self.room_for(&parts, &here, leaves)? } else { None };
        match room {
            Some((leaves, splits)) => Ok(Others { parts, leaves, splits }),
            None => {
                candidates.copy_from_slice(&before);
                Ok(Others::default())
            }
        }
    }

    /// The entries that map parts of a pack at other logical blocks than those that begin with its first index, as far
    /// as they are known.
    pub(super) fn entries_elsewhere(&mut self, old: OldPack, places: &Places) -> Result<Vec<Entry>> {
        let mut known: Vec<(u64, u64)> =
            places.of(old.run.start).map(|place| (place.object, place.logical)).take(PLACES_MAX).collect();
        known.sort_unstable();
        let roots: Vec<(u64, u64, NodeId)> = known
            .into_iter()
            .filter_map(|(object, logical)| Some((object, logical, self.catalog.find(object)?.root?)))
            .collect();
        let (mut found, mut counted) = (Vec::new(), FxHashSet::default());
        let mut missing = None;
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        let of_pack = |leaf: &Leaf, logical: u64| {
            let mut entries = leaf.mappings.iter().filter(|mapping| mapping.physical == old.run.start);
            let entry = entries.find(|mapping| mapping.logical == logical)?;
            entry
                .packed
                .filter(|packed| u64::from(packed.stored) == old.run.blocks)
                .map(|packed| (packed.index, entry.blocks))
        };
        for (object, logical, root) in roots {
            let Some(leaf) = nodes.leaf_of(root, logical..logical + LEAF_BLOCKS, 1, &mut missing)? else { continue };
            let Some((index, blocks)) = of_pack(&leaf, logical) else { continue };
            if logical.checked_sub(u64::from(index)) == Some(old.logical) {
                continue;
            }
            if let (Some(before), Some(index)) = (logical.checked_sub(1), index.checked_sub(1)) {
                // A step of the walk may have begun within an entry.
                let same = nodes.leaf_of(root, before..logical, 1, &mut missing)?.filter(|other| other.id == leaf.id);
                if same.and_then(|leaf| of_pack(&leaf, before)).is_some_and(|(other, _)| other == index) {
                    continue;
                }
            }
            if counted.insert((leaf.id, logical)) {
                found.push(Entry { object, logical, index, blocks });
            }
        }
        missing.map_or(Ok(found), Err)
    }

    /// The places that still map the blocks, with leaves that are not counted yet. Removes candidates that a thick disk
    /// maps at one of these places.
    fn verify_places(&mut self, claimed: &[Claimed], candidates: &mut [Option<Candidate>]) -> Result<Vec<Claimed>> {
        let thick: FxHashMap<u64, NodeId> =
            self.trees(0).into_iter().filter(|tree| tree.thick).map(|tree| (tree.object, tree.root)).collect();
        let roots: Vec<(usize, NodeId)> = claimed
            .iter()
            .enumerate()
            .filter_map(|(number, place)| Some((number, self.catalog.find(place.object)?.root?)))
            .collect();
        let (mut found, mut counted) = (Vec::new(), FxHashSet::default());
        let (mut last, mut missing) = (LastLeaf::default(), None);
        // For each leaf that several trees share, whether a thick disk is one of them. A leaf of its own is a place of
        // its own.
        let mut reached = FxHashMap::<NodeId, bool>::default();
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        for (number, root) in roots {
            let place = claimed[number];
            let Some(leaf) = last.get(&mut nodes, root, place.logical, &mut missing)? else { continue };
            if !maps(&leaf.mappings, &place) || !counted.insert((leaf.id, place.logical)) {
                continue;
            }
            let mut is_thick = thick.contains_key(&place.object);
            if leaf.shared && !thick.is_empty() {
                let id = leaf.id;
                let known = reached.get(&id).copied();
                let mut of_thick = known.unwrap_or(false);
                if known.is_none() {
                    for root in thick.values() {
                        let range = place.logical..place.logical + 1;
                        let leaf = nodes.leaf_of(*root, range, 1, &mut missing)?;
                        of_thick |= leaf.is_some_and(|leaf| leaf.id == id);
                    }
                    reached.insert(id, of_thick);
                }
                is_thick |= of_thick;
            }
            let slot = &mut candidates[place.index];
            if is_thick {
                *slot = None;
            }
            if let Some(candidate) = slot.as_mut() {
                // A reference more than the block has would be an error of the count: the block stays then.
                candidate.left = candidate.left.checked_sub(1).unwrap_or(u32::MAX);
                found.push(place);
            }
        }
        missing.map_or(Ok(found), Err)
    }

    /// The number of leaves that get the entries of the parts, and how many of them have to be split. `None` if there
    /// is a leaf that cannot be split. The leaves `of_window` get the parts `here` too.
    fn room_for(
        &mut self,
        parts: &[Elsewhere],
        here: &[(u64, Source)],
        of_window: &PlannedLeaves,
    ) -> Result<Option<(u64, u64)>> {
        let mut leaves = FxHashMap::<NodeId, (bool, Vec<(u64, Source)>)>::default();
        let all: Vec<(NodeId, &Elsewhere)> = parts
            .iter()
            .flat_map(|part| part.objects.iter().map(move |object| (object, part)))
            .filter_map(|(object, part)| Some((self.catalog.find(*object)?.root?, part)))
            .collect();
        let mut missing = None;
        let mut effects = Effects::default();
        let mut nodes = self.nodes(&mut effects);
        for (root, part) in all {
            let Range { start: mut at, end } = part.window();
            while at < end {
                let Some(leaf) = nodes.leaf_of(root, at..end, 1, &mut missing)? else { break };
                let (_, parts) = leaves.entry(leaf.id).or_insert_with(|| {
                    let here = if of_window.contains(leaf.id) { here.to_vec() } else { Vec::new() };
                    (leaf.shared, here)
                });
                if parts.last() != Some(&(part.logical, part.source)) {
                    parts.push((part.logical, part.source));
                }
                at = leaf.upper;
            }
        }
        if let Some(error) = missing {
            return Err(error);
        }
        let (count, mut splits) = (leaves.len() as u64, 0);
        if count > LEAVES_MAX {
            return Ok(None);
        }
        for (leaf, (shared, parts)) in leaves {
            let most = if shared { 0 } else { SPLITS_MAX - splits };
            match tree::splits_for(&mut nodes, leaf, &parts, most)? {
                None => return Ok(None),
                Some(0) => {}
                // At run time the halves may have other sizes.
                Some(more) => splits = (splits + more + 1).min(SPLITS_MAX),
            }
        }
        Ok(Some((count, splits)))
    }
}

impl LastLeaf {
    fn get(
        &mut self,
        nodes: &mut crate::engine::metadata::Nodes<'_>,
        root: NodeId,
        logical: u64,
        missing: &mut Option<crate::Error>,
    ) -> Result<Option<&Leaf>> {
        let is_last = self.0.as_ref().is_some_and(|(of, range, _)| *of == root && range.contains(&logical));
        if !is_last {
            let range = logical..logical + LEAF_BLOCKS;
            let leaf = nodes.leaf_of(root, range.clone(), 1, missing)?;
            self.0 = leaf.map(|leaf| (root, logical..range.end.min(leaf.upper), leaf));
        }
        Ok(self.0.as_ref().map(|(.., leaf)| leaf))
    }
}

/// The known places of the incomplete candidates at other logical blocks, in ascending order.
fn claimed_places(window: &Range<u64>, candidates: &[Option<Candidate>], places: &Places) -> Vec<Claimed> {
    let mut claimed = Vec::new();
    for (index, candidate) in candidates.iter().enumerate() {
        let Some(candidate) = candidate.filter(|candidate| candidate.left > 0) else { continue };
        let here = window.start + index as u64;
        let others = places.of(candidate.physical).filter(|place| place.logical != here);
        claimed.extend(others.map(|Place { physical, object, logical }| Claimed { object, logical, index, physical }));
    }
    claimed.sort_unstable();
    claimed
}

/// Whether a leaf maps a block at a place.
fn maps(mappings: &[Mapping], place: &Claimed) -> bool {
    mappings.iter().any(|mapping| {
        let within = place.logical.checked_sub(mapping.logical).filter(|within| *within < mapping.blocks);
        mapping.packed.is_none()
            && !mapping.unwritten
            && within.is_some_and(|within| mapping.physical + within == place.physical)
    })
}

/// The parts of a new pack that replace these entries of an old one, of which index `first` becomes index 0.
pub(super) fn moved(entries: &[Entry], first: u8, old: Run) -> Vec<Elsewhere> {
    let parts = entries.iter().map(|entry| {
        let packed = Some(Packed { index: entry.index, stored: old.blocks as u8 });
        let run = PhysicalRun { physical: old.start, blocks: entry.blocks };
        let source = Source { index: entry.index - first, run, packed };
        (entry.object, Elsewhere { logical: entry.logical, source, objects: vec![entry.object] })
    });
    joined(parts)
}

/// Joins adjacent places to parts, and the places of several objects at the same logical blocks.
fn parts_of(places: impl Iterator<Item = Claimed>) -> Vec<Elsewhere> {
    let mut runs = Vec::<(u64, Elsewhere)>::new();
    for place in places {
        match runs.last_mut() {
            Some((object, part))
                if *object == place.object
                    && part.logical + part.source.run.blocks == place.logical
                    && usize::from(part.source.index) + part.source.run.blocks as usize == place.index
                    && part.source.run.physical + part.source.run.blocks == place.physical =>
            {
                part.source.run.blocks += 1;
            }
            _ => {
                let run = PhysicalRun { physical: place.physical, blocks: 1 };
                let source = Source { index: place.index as u8, run, packed: None };
                runs.push((place.object, Elsewhere { logical: place.logical, source, objects: vec![place.object] }));
            }
        }
    }
    joined(runs.into_iter())
}

/// Joins the equal parts of several objects.
fn joined(all: impl Iterator<Item = (u64, Elsewhere)>) -> Vec<Elsewhere> {
    let mut parts = Vec::<Elsewhere>::new();
    let mut known = FxHashMap::<(u64, u8, u64, u64), usize>::default();
    for (object, part) in all {
        let source = &part.source;
        let key = (part.logical, source.index, source.run.physical, source.run.blocks);
        match known.get(&key) {
            Some(at) => parts[*at].objects.push(object),
            None => {
                known.insert(key, parts.len());
                parts.push(part);
            }
        }
    }
    parts
}
