//! Repair by redundancy: a grain in use is recorded in three places, its table entry, its owner in the backmap, and its
//! bit in the bitmap. If one of these places is wrong and the two others agree, the wrong place is repaired:
//!
//! * An entry is wrong if it is invalid, names a grain that belongs to another entry by backmap and table, or names a
//!   grain that is free by bitmap and backmap. If the backmap gives exactly one allocated, unnamed grain to this entry,
//!   that grain is the right one. Otherwise the right value is unproven, and the entry is reported by grain of the
//!   disk. An unproven entry that names the data of another entry is replaced by a value that every reader refuses.
//! * If an entry is absent although the backmap gives an allocated grain to it, a crash has interrupted a write or a
//!   deletion, and the grain is free.
//! * A directory slot is wrong if it is invalid or names a table that was never allocated. If exactly one table without
//!   a slot is in use, according to its entries and the backmap, the table belongs to this slot. After a crash an image
//!   may have tables without a slot that are no damage; these are only reported. If two slots name one table, neither
//!   is proven.
//!
//! Absent entries and zero entries are recorded nowhere else, so they cannot be proven. A zero entry with a number in
//! it, which no program writes, is wrong if bitmap and backmap give a grain to it.

use super::SeSparse;
use super::cache::{Kind, PageKey};
use super::check::{CheckReport, says, tell};
use super::entry::{Entry, GRAIN, Grain, Owner, TABLE_ENTRIES, Table, encode_slot};
use super::header::{PAGE_ENTRIES, TABLE_PAGES};
use super::recover::NamedTables;
use super::relocate::names;
use super::state::{LayerState, Step, backmap_page, bitmap_page, page_index, table_page};
use crate::{Result, SECTOR};
use rustc_hash::{FxHashMap, FxHashSet};
use std::cmp::Ordering;

/// The most unnamed grains and suspect entries that are examined one by one; others are only counted.
const EVIDENCE_MAX: usize = 1 << 20;
/// The most tables without a slot that are read: tables are allocated in ascending order, so the lowest ones were in
/// use longest and are examined first.
const UNNAMED_MAX: usize = 1024;
/// Bits that make an entry invalid for every reader.
const REFUSED: u64 = 0xf << 60;

/// An entry that contradicts bitmap or backmap.
#[derive(Clone, Copy)]
pub(super) struct Suspect {
    pub slot: u64,
    pub owner: Owner,
    pub raw: u64,
}

/// Findings of a walk over all tables that may prove entries or slots.
#[derive(Default)]
pub(super) struct Evidence {
    pub suspects: Vec<Suspect>,
    /// Allocated grains that no table names, with their owners by the backmap.
    pub claims: Vec<(u64, Owner)>,
    /// Tables that undamaged slots name.
    pub named: NamedTables,
    /// Invalid slots, and slots with a table that another slot names, too.
    pub bad_slots: Vec<u64>,
    /// Slots with a table that was never allocated.
    pub beyond_slots: Vec<u64>,
}

impl Evidence {
    pub(super) fn suspect(&mut self, suspect: Suspect) {
        if self.suspects.len() < EVIDENCE_MAX {
            self.suspects.push(suspect);
        }
    }

    pub(super) fn claim(&mut self, grain: u64, owner: Owner) {
        if self.claims.len() < EVIDENCE_MAX {
            self.claims.push((grain, owner));
        }
    }

    pub(super) fn name(&mut self, slot: u64, uncounted: bool) {
        if uncounted {
            self.beyond_slots.push(slot);
        }
    }
}

/// The conclusions from the evidence.
#[derive(Default)]
pub(super) struct Proofs {
    /// Entries to be corrected, with their right content.
    entries: Vec<(Owner, u64)>,
    slots: Vec<(u64, Table)>,
    /// Wrong slots without a proof.
    doubted_slots: Vec<u64>,
    /// The repairs, as text.
    pub sentences: Vec<String>,
    /// The number of allocated grains that are kept although no table names them yet.
    pub kept: u64,
}

impl Proofs {
    /// Number of proven entries and slots.
    pub(super) fn proven(&self) -> u64 {
        let entries = self.entries.iter().filter(|(_, raw)| raw & REFUSED != REFUSED).count();
        (entries + self.slots.len()) as u64
    }
}

impl SeSparse {
    /// Draws the conclusions from the evidence. Unproven findings are counted and reported.
    pub(super) fn prove(&self, evidence: &Evidence, report: &mut CheckReport) -> Result<Proofs> {
        let mut proofs = Proofs::default();
        let mut claims: FxHashMap<Owner, Vec<u64>> = FxHashMap::default();
        let mut lost: FxHashMap<Table, u64> = FxHashMap::default();
        let ours = self.is_ours();
        for &(grain, owner) in &evidence.claims {
            match evidence.named.contains(u64::from(owner.table.0)) {
                true => claims.entry(owner).or_default().push(grain),
                false => {
                    let held = self.settle(|state| names(state, owner, Grain(grain)))?;
                    *lost.entry(owner.table).or_default() += u64::from(held && ours);
                }
            }
        }
        let shared = self.state.lock().shared_tables.clone();
        // A table without a slot is damage only if a slot is wrong, because a crash, too, leaves tables that no slot
        // names yet.
        let possible = !evidence.bad_slots.is_empty() || evidence.beyond_slots.len() == 1;
        lost.retain(|table, grains| *grains > 0 && possible && !shared.contains(table));
        let zeros = match evidence.bad_slots.is_empty() && lost.is_empty() {
            true => self.leads_past_zeros(evidence)?,
            false => false,
        };
        self.prove_slots(evidence, &lost, zeros, report, &mut proofs);
        // If the backmap disagrees with most entries, another program wrote it in another form, so it proves nothing.
        if !ours && report.misowned * 2 >= report.named {
            return Ok(proofs);
        }
        let mut judged: FxHashSet<Owner> = FxHashSet::default();
        for suspect in &evidence.suspects {
            if judged.insert(suspect.owner) {
                let claimed = claims.get(&suspect.owner).map_or(&[][..], Vec::as_slice);
                self.prove_entry(suspect, claimed, ours, report, &mut proofs)?;
            }
        }
        Ok(proofs)
    }

    fn prove_slots(
        &self,
        evidence: &Evidence,
        lost: &FxHashMap<Table, u64>,
        zeros: bool,
        report: &mut CheckReport,
        proofs: &mut Proofs,
    ) {
        let candidates = match evidence.bad_slots[..] {
            [] => &evidence.beyond_slots,
            _ => &evidence.bad_slots,
        };
        if let ([slot], 1, Some((table, grains))) = (&candidates[..], lost.len(), lost.iter().next())
            && self.is_recounted()
        {
            proofs.slots.push((*slot, *table));
            proofs.kept += grains;
            tell(&mut proofs.sentences, || {
                let number = table.0;
                format!("slot {slot} of the directory: {grains} grains prove that it names table {number}")
            });
            return;
        }
        for slot in candidates.iter().filter(|_| zeros || !lost.is_empty() || !evidence.bad_slots.is_empty()) {
            let span = TABLE_ENTRIES * GRAIN;
            proofs.doubted_slots.push(*slot);
            report.unproven += 1;
            tell(&mut report.doubts, || {
                let end = ((slot + 1) * span).min(self.layout.capacity * SECTOR);
                format!(
                    "slot {slot} of the directory is wrong, and nothing proves what is right: bytes {} to {end} of the disk",
                    slot * span
                )
            });
        }
        for (table, grains) in lost {
            report.lost_tables += 1;
            proofs.kept += grains;
            tell(&mut report.doubts, || {
                format!(
                    "table {} with {grains} grains is in use, and no slot names it: its data reads as absent",
                    table.0
                )
            });
        }
    }

    /// Whether the only slot that names a never allocated table may belong to a table of zero entries without a slot.
    /// Such a table names no grain, so no record shows its slot. A crash, too, leaves tables without a slot.
    fn leads_past_zeros(&self, evidence: &Evidence) -> Result<bool> {
        let &[slot] = &evidence.beyond_slots[..] else { return Ok(false) };
        let Some(beyond) = self.settle(|state| state.table_of(slot))? else { return Ok(false) };
        if self.says_something(beyond)? {
            return Ok(false);
        }
        // Opening for writing has raised the count beyond this table, so all lower tables count as allocated, too.
        let unnamed = (0..beyond.0).filter(|table| !evidence.named.contains(u64::from(*table)));
        for table in unnamed.take(UNNAMED_MAX) {
            if self.says_something(Table(table))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether any entry of a table is not absent.
    fn says_something(&self, table: Table) -> Result<bool> {
        for page in 0..TABLE_PAGES {
            let key = table_page(table, page * PAGE_ENTRIES);
            if self.settle(|state| Ok(state.page(key)?.words().any(|raw| raw != 0)))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn prove_entry(
        &self,
        suspect: &Suspect,
        claimed: &[u64],
        ours: bool,
        report: &mut CheckReport,
        proofs: &mut Proofs,
    ) -> Result<()> {
        let Suspect { slot, owner, raw } = *suspect;
        let verdict = self.settle(|state| match says(state, owner, raw)? {
            true => judge(state, owner, raw),
            // A guest has changed the entry meanwhile.
            false => Ok(Verdict::Right),
        })?;
        if verdict == Verdict::Right || !ours && verdict == Verdict::NamesFree {
            return Ok(());
        }
        let mut ambiguous = false;
        if let Verdict::Unowned(owned) = verdict {
            // Two explanations are possible: the owner of the named grain is damaged, and a crash has left the claimed
            // grain; or the entry is damaged. The explanation with fewer wrong bytes is more likely.
            let nearest = claimed.iter().map(|grain| unlike(raw, Entry::Data(Grain(*grain)).encode())).min();
            match nearest.map(|nearest| nearest.cmp(&unlike(owned, owner.encode()))) {
                None | Some(Ordering::Greater) => return Ok(()),
                Some(order) => ambiguous = order.is_eq(),
            }
        }
        if let [grain] = claimed
            && !ambiguous
            && is_like(raw, Entry::Data(Grain(*grain)))
        {
            proofs.entries.push((owner, Entry::Data(Grain(*grain)).encode()));
            proofs.kept += 1;
            tell(&mut proofs.sentences, || {
                let place = self.place_of(slot, owner);
                format!("{place}: its entry is {raw:#018x}, bitmap and backmap prove grain {grain} of the file")
            });
            return Ok(());
        }
        if verdict == Verdict::Odd && !claimed.iter().any(|grain| hides(raw, Grain(*grain))) {
            // No other record contradicts that this entry means zeros.
            return Ok(());
        }
        proofs.kept += claimed.len() as u64;
        report.unproven += 1;
        let refused = verdict != Verdict::Impossible;
        tell(&mut report.doubts, || {
            let place = self.place_of(slot, owner);
            let why = match verdict {
                Verdict::NamesFree => "names a grain that is free in bitmap and backmap",
                Verdict::NamesOther => "names a grain that belongs to another entry by the backmap",
                Verdict::Unowned(_) => {
                    "names a grain that the backmap gives to another entry, while it gives this entry a different grain"
                }
                Verdict::Odd => "means zeros, while bitmap and backmap give a grain to it",
                _ => "is invalid",
            };
            format!("{place}: its entry {raw:#018x} {why}, and nothing proves what is right")
        });
        if refused {
            proofs.entries.push((owner, raw | REFUSED));
        }
        Ok(())
    }

    /// Writes proven entries and slots into the tables; the next commit makes them durable.
    pub(super) fn apply(&self, proofs: &Proofs) -> Result<()> {
        for &(slot, table) in &proofs.slots {
            self.settle(|state| {
                let key = PageKey::new(Kind::Directory, slot / PAGE_ENTRIES);
                state.need_no_commit()?;
                state.need_backed(key)?;
                state.cache.set(key, (slot % PAGE_ENTRIES) as usize, encode_slot(table));
                Ok(())
            })?;
        }
        for &(owner, raw) in &proofs.entries {
            self.settle(|state| {
                let key = table_page(owner.table, u64::from(owner.entry));
                state.need_no_commit()?;
                state.need_backed(key)?;
                // The grain in the wrong entry is not freed, because it belongs to another entry or is free.
                state.cache.set(key, page_index(u64::from(owner.entry)), raw);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Uses the proofs in memory, in an image that is open for reading: nothing is ever written. A slot or entry
    /// without a proof is refused, because the data that it names may belong to another part of the disk.
    pub(super) fn apply_in_memory(&self, proofs: &Proofs) -> Result<()> {
        let proven = proofs.slots.iter().map(|(slot, table)| (*slot, encode_slot(*table)));
        for (slot, raw) in proven.chain(proofs.doubted_slots.iter().map(|slot| (*slot, REFUSED))) {
            let key = PageKey::new(Kind::Directory, slot / PAGE_ENTRIES);
            self.settle(|state| {
                state.need(key)?;
                state.cache.set(key, (slot % PAGE_ENTRIES) as usize, raw);
                Ok(())
            })?;
        }
        for &(owner, raw) in &proofs.entries {
            let key = table_page(owner.table, u64::from(owner.entry));
            self.settle(|state| {
                state.need(key)?;
                state.cache.set(key, page_index(u64::from(owner.entry)), raw);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Whether a slot named this table at the opening although the header did not count it as allocated.
    pub(super) fn is_uncounted(&self, table: Table) -> bool {
        self.state.lock().uncounted_tables.contains(&table)
    }

    /// Whether all grains left by a crash were found and freed. Otherwise, the only table without a slot may be one
    /// that was never flushed.
    fn is_recounted(&self) -> bool {
        self.state.lock().suspect.as_ref().is_none_or(|left| left.regions().next().is_none())
    }

    /// Whether lamina wrote bitmap and backmap.
    pub(super) fn is_ours(&self) -> bool {
        self.ours || self.state.lock().touched.is_some()
    }

    fn place_of(&self, slot: u64, owner: Owner) -> String {
        let grain = slot * TABLE_ENTRIES + u64::from(owner.entry);
        let end = ((grain + 1) * GRAIN).min(self.layout.capacity * SECTOR);
        format!("grain {grain} of the disk (bytes {} to {end})", grain * GRAIN)
    }
}

/// Whether a damaged entry differs in fewer bytes from a value that names a grain than from one that names none. After
/// a crash, grains that a deletion has dropped may still be allocated. Then only this comparison shows whether the
/// undamaged entry named a grain.
fn is_like(raw: u64, entry: Entry) -> bool {
    let unlike = |other: Entry| unlike(raw, other.encode());
    let same_place = raw << 4 == entry.encode() << 4 && raw << 4 != 0;
    same_place || unlike(entry) < unlike(Entry::Absent).min(unlike(Entry::Zero))
}

/// Whether a zero entry with a number is a damaged entry of a grain that bitmap and backmap give to it. ESXi writes the
/// number of a former grain only into the entry of a discarded grain, and an interrupted write may then have allocated
/// another grain for it. So such an entry is damaged only if a single byte differs.
fn hides(raw: u64, grain: Grain) -> bool {
    Entry::decode(raw) == Some(Entry::Zero) || unlike(raw, Entry::Data(grain).encode()) == 1
}

/// Number of bytes in which two words differ.
fn unlike(one: u64, other: u64) -> usize {
    (one ^ other).to_le_bytes().into_iter().filter(|byte| *byte != 0).count()
}

/// The result of comparing a suspect entry with bitmap and backmap.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The entry is right, and the backmap is wrong.
    Right,
    /// The entry is invalid.
    Impossible,
    /// A form of zero entry that lamina does not write.
    Odd,
    /// The entry names a grain of another entry.
    NamesOther,
    /// The entry names a free grain.
    NamesFree,
    /// The backmap gives the entry's grain to another entry, which does not name the grain. This word encodes that
    /// other entry.
    Unowned(u64),
}

fn judge(state: &mut LayerState, owner: Owner, raw: u64) -> Step<Verdict> {
    let grain = match Entry::decode(raw) {
        Some(Entry::Data(grain)) if grain.0 < state.readable.min(state.layout.grains_max()) => grain,
        Some(Entry::Unmapped | Entry::Zero) => return Ok(Verdict::Odd),
        Some(Entry::Absent) => return Ok(Verdict::Right),
        _ => return Ok(Verdict::Impossible),
    };
    let words = state.page(bitmap_page(grain.0))?;
    let bit = grain.0 % super::header::PAGE_BITS;
    let allocated = words.word((bit / 64) as usize) >> (bit % 64) & 1 == 1;
    let owned = state.word(backmap_page(grain.0), page_index(grain.0))?;
    Ok(match Owner::decode(owned).filter(|other| u64::from(other.table.0) < state.layout.tables_max()) {
        Some(other) if other == owner => Verdict::Right,
        Some(other) if names(state, other, grain)? => Verdict::NamesOther,
        _ if !allocated && owned == 0 => Verdict::NamesFree,
        // A crash cannot leave an invalid owner, so the backmap is damaged.
        Some(_) if allocated => Verdict::Unowned(owned),
        _ => Verdict::Right,
    })
}

/// Whether an entry that now names another grain has released this grain by a normal change; a damaged entry has not.
pub(super) fn gave_up(state: &mut LayerState, owner: Owner, grain: Grain) -> Step<bool> {
    let raw = state.word(table_page(owner.table, u64::from(owner.entry)), page_index(u64::from(owner.entry)))?;
    Ok(match Entry::decode(raw) {
        Some(Entry::Data(named)) if named == grain => false,
        Some(Entry::Data(named)) if named.0 < state.layout.grains_max() => state.owner(named.0)? == Some(owner),
        Some(Entry::Data(_)) | None => false,
        Some(entry) => raw == entry.encode(),
    })
}
