//! Checking an image: compares the tables with bitmap, backmap and the file.
//!
//! The tables decide what a guest reads. Damage in them (locations past the end of the file, two entries for one grain,
//! invalid entries) is repaired first, where bitmap and backmap prove the right entry ([`super::proof`]). Then bitmap
//! and backmap are made equal to the tables. A grain that a table names is always marked as allocated and given its
//! owner; an allocated grain that no table names is freed only if the tables are undamaged.
//!
//! A check without repair runs while guests are active. It compares with the help of a [`super::wipe::Census`]: for a
//! grain that is not in the census, table, bitmap and backmap have not changed since the census began, so a difference
//! is damage. For a grain in the census, and for every suspicious entry, table, bitmap and backmap are compared again
//! under the lock of the state. Under this lock they agree unless they are damaged. A writer waits only for that lock,
//! while one table or one page of the bitmap is compared; the lock is not held while the file is read. Damage of a
//! grain that guests change at the same time may be found only by the next check.
//!
//! With `repair`, changes wait while the check runs, and reads continue. Memory is limited by the window of
//! [`GrainSet`], time by the number of tables that the file contains.

use super::SeSparse;
use super::cache::{Kind, PageBytes, PageKey};
use super::entry::{Entry, Grain, GrainRun, Owner, Table};
use super::header::{PAGE_BITS, PAGE_ENTRIES};
use super::maintain::Work;
use super::proof::{Evidence, Suspect};
use super::recover::NamedTables;
use super::relocate::names;
use super::state::{LayerState, Step, backmap_page, bitmap_page, page_index, table_page};
use super::wipe::{GrainSet, Holes};
use crate::{ErrorKind, Result};
use std::ops::Range;
use work::Progress;

/// Grains per window: 1 TiB of data, 32 MiB of memory.
const WINDOW: u64 = 1 << 28;
/// The most findings reported as text; all are counted.
const FINDINGS_MAX: usize = 64;

/// The result of a check. Counts are grains unless stated otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Tables that the directory names.
    pub tables: u64,
    /// Grains that tables name.
    pub named: u64,
    /// Invalid slots and entries, and tables named by two slots: damage.
    pub invalid: u64,
    /// Named grains past the end of the file: damage.
    pub outside: u64,
    /// Grains named by more than one entry: damage.
    pub overlapping: u64,
    /// Named grains that the bitmap marks as free: they might be allocated again.
    pub unallocated: u64,
    /// Grains with an owner in the backmap that is not the entry which names them.
    pub misowned: u64,
    /// Allocated grains that no table names: lost space.
    pub unnamed: u64,
    /// Tables in use that are counted as free. Opening for writing corrects the count.
    pub uncounted_tables: u64,
    /// Tables in use that no slot of the directory names: damage.
    pub lost_tables: u64,
    /// Wrong entries and slots without proof of the right content.
    pub unproven: u64,
    /// Wrong entries and slots with a proof of the right content, not repaired.
    pub provable: u64,
    /// Entries, slots, bits and owners that were repaired.
    pub repaired: u64,
    /// The first findings, as text.
    pub findings: Vec<String>,
    /// The first unproven findings, by grain of the disk, as text.
    pub doubts: Vec<String>,
    /// The first proven or repaired findings, as text.
    pub proven: Vec<String>,
}

impl CheckReport {
    /// Whether the tables are damaged: guests may read wrong data or get errors.
    pub fn is_damaged(&self) -> bool {
        self.invalid + self.outside + self.overlapping + self.lost_tables + self.unproven + self.provable > 0
    }

    /// Whether the image has no finding at all.
    pub fn is_clean(&self) -> bool {
        let repairable = self.unallocated + self.misowned + self.unnamed + self.uncounted_tables;
        !self.is_damaged() && repairable == 0
    }

    /// Whether the only findings are allocated grains that no table names, as after a crash.
    pub fn is_lost_space_only(&self) -> bool {
        !self.is_damaged() && self.unallocated + self.misowned + self.uncounted_tables == 0
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        tell(&mut self.findings, what);
    }
}

/// Adds a sentence to a list that has fewer than [`FINDINGS_MAX`] sentences.
pub(super) fn tell(sentences: &mut Vec<String>, what: impl FnOnce() -> String) {
    if sentences.len() < FINDINGS_MAX {
        sentences.push(what());
    }
}

/// Limits of a repair.
#[derive(Clone, Copy)]
struct Doubts {
    /// Whether grains that no table names stay allocated, because they may belong to a damaged entry.
    kept: bool,
}

/// A table being checked.
struct CheckedTable {
    slot: u64,
    table: Table,
    ours: bool,
    /// Whether other changes wait, so that only the check can change the image.
    alone: bool,
}

/// A grain for which bitmap and tables differ.
struct Difference {
    grain: u64,
    allocated: bool,
    /// Whether the grain is in the census, so that it may have changed during the comparison.
    moving: bool,
}

impl SeSparse {
    /// Checks the image and, with `repair`, corrects bitmap, backmap and the count of tables. Guests continue
    /// meanwhile, except that changes wait during a repair.
    pub fn check(&self, repair: bool, progress: &dyn Progress) -> Result<CheckReport> {
        let mut work = self.begin_work(progress, "checking")?;
        if repair {
            self.check_changeable()?;
        }
        let _no_changes = repair.then(|| self.gate.write());
        if self.options.write {
            // This commit frees the retired grains that no reader uses any more.
            self.commit_at_once()?;
        }
        let (mut report, evidence) = self.look(None, &mut work)?;
        let proofs = self.prove(&evidence, &mut report)?;
        if !repair {
            report.provable = proofs.proven();
            report.unnamed = report.unnamed.saturating_sub(proofs.kept);
            report.proven = proofs.sentences;
            return Ok(report);
        }
        self.apply(&proofs)?;
        self.commit_at_once()?;
        let doubts = Doubts { kept: report.lost_tables + report.unproven > 0 };
        let CheckReport { lost_tables, unproven, doubts: told, .. } = report;
        let (mut report, _) = self.look(Some(doubts), &mut work)?;
        report.repaired += proofs.proven();
        (report.lost_tables, report.unproven, report.doubts, report.proven) =
            (lost_tables, unproven, told, proofs.sentences);
        let headers = std::mem::take(&mut *self.mended.lock());
        report.repaired += headers.len() as u64;
        report.proven.extend(headers);
        if lost_tables > 0 {
            report.unnamed = report.unnamed.saturating_sub(proofs.kept);
        }
        self.commit_at_once()?;
        Ok(report)
    }

    /// For an image that is open for reading: uses, in memory only, what bitmap and backmap prove. Proven entries and
    /// slots are read as they must have been; reading those that are contradicted without such a proof fails. Returns
    /// the conclusions as text.
    pub fn prove_in_memory(&self, progress: &dyn Progress) -> Result<Vec<String>> {
        let mut work = self.begin_work(progress, "checking")?;
        let (mut report, evidence) = self.look(None, &mut work)?;
        let proofs = self.prove(&evidence, &mut report)?;
        self.apply_in_memory(&proofs)?;
        let mut told = std::mem::take(&mut *self.mended.lock());
        told.extend(proofs.sentences);
        told.extend(report.doubts);
        Ok(told)
    }

    /// Compares tables, bitmap and backmap; with `repair`, makes bitmap and backmap equal to the tables.
    fn look(&self, repair: Option<Doubts>, work: &mut Work<'_, '_>) -> Result<(CheckReport, Evidence)> {
        let mut report = CheckReport::default();
        let mut evidence = Evidence::default();
        let end = self.state.lock().readable.max(1);
        work.expect(self.layout.slots() * end.div_ceil(WINDOW));
        for start in (0..end).step_by(WINDOW as usize) {
            let window = start..(start + WINDOW).min(end.next_multiple_of(64));
            self.begin_census(window.clone());
            let looked = self
                .check_tables(&window, repair.is_some(), &mut report, &mut evidence, work)
                .and_then(|named| self.check_bitmap(&named, &window, repair, &mut report, &mut evidence, work));
            self.state.lock().census = None;
            looked?;
        }
        Ok((report, evidence))
    }

    /// Reads all tables, and counts the grains of a window; findings about tables alone are reported in the first
    /// window.
    fn check_tables(
        &self,
        window: &Range<u64>,
        repair: bool,
        report: &mut CheckReport,
        evidence: &mut Evidence,
        work: &mut Work<'_, '_>,
    ) -> Result<GrainSet> {
        let mut named = GrainSet::new(window.clone());
        let mut tables = NamedTables::default();
        let mut holes = Holes::default();
        let first = window.start == 0;
        let ours = self.is_ours();
        let mut slot = 0;
        while self.find_slot(&mut slot, work)? {
            match self.read_table(slot, &mut holes) {
                Ok(None) if first => {
                    if let Some(table) = self.settle(|state| state.table_of(slot))? {
                        tables.insert(table);
                        evidence.name(slot, self.is_uncounted(table));
                    }
                }
                Ok(None) => {}
                Ok(Some((table, content))) => {
                    if first {
                        evidence.name(slot, self.is_uncounted(table));
                    }
                    let shared = tables.insert(table);
                    if first {
                        report.tables += 1;
                        report.invalid += u64::from(shared);
                    }
                    if shared && first {
                        report.tell(|| format!("table {} is named by slot {slot} and by another slot", table.0));
                    }
                    if !shared {
                        let checked = CheckedTable { slot, table, ours, alone: repair };
                        let owners = self.check_table(&checked, &content, &mut named, report, evidence)?;
                        self.check_owners(slot, &owners, repair, report, evidence)?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    if first {
                        evidence.bad_slots.push(slot);
                        report.invalid += 1;
                        report.tell(|| error.to_string());
                    }
                }
                Err(error) => return Err(error),
            }
            slot += 1;
            work.step(1)?;
        }
        // A count that is too low is corrected when the image is opened for writing.
        let counted = self.state.lock().header.free_table;
        if first && tables.end() > counted {
            report.uncounted_tables = tables.end() - counted;
            report.tell(|| format!("{counted} tables are counted, number {} is in use", tables.end() - 1));
        }
        if first {
            evidence.named = tables;
        }
        Ok(named)
    }

    /// Grains of a page of the bitmap for which bitmap and tables differ.
    fn compare_page(&self, page: u64, named: &GrainSet, limit: u64) -> Result<Vec<Difference>> {
        self.settle(|state| {
            let bytes = state.page(PageKey::new(Kind::Bitmap, page))?;
            let census = state.census.as_ref();
            let mut differences = Vec::new();
            for (first, bits) in (page * PAGE_BITS..limit).step_by(64).zip(bytes.words()) {
                let moving = census.map_or(0, |census| census.word(first));
                let mut differ = bits ^ (named.word(first) | moving & bits);
                while differ != 0 {
                    let bit = differ.trailing_zeros();
                    differ &= differ - 1;
                    let has = |bits: u64| bits >> bit & 1 == 1;
                    let grain = first + u64::from(bit);
                    differences.push(Difference { grain, allocated: has(bits), moving: has(moving) });
                }
            }
            differences.retain(|found| found.grain < limit);
            Ok(differences)
        })
    }

    /// Checks the entries of a table; returns its grains in the window with their owners, sorted by grain.
    fn check_table(
        &self,
        checked: &CheckedTable,
        content: &[PageBytes],
        named: &mut GrainSet,
        report: &mut CheckReport,
        evidence: &mut Evidence,
    ) -> Result<Vec<(u64, Owner)>> {
        let CheckedTable { slot, table, ours, alone } = *checked;
        let (readable, window) = (self.state.lock().readable, named.window());
        let first = window.start == 0;
        let mut owners = Vec::new();
        for (entry, raw) in (0..).zip(content.iter().flat_map(PageBytes::words)) {
            let suspect = Suspect { slot, owner: Owner { table, entry }, raw };
            let still_so = || self.settle(|state| says(state, suspect.owner, raw));
            match Entry::decode(raw) {
                Some(Entry::Data(grain)) if grain.0 >= readable && first && still_so()? => {
                    evidence.suspect(suspect);
                    report.outside += 1;
                    report.tell(|| {
                        format!("entry {entry} of table {} names grain {}, outside the file", table.0, grain.0)
                    });
                }
                Some(Entry::Data(grain)) if grain.0 < readable && window.contains(&grain.0) => {
                    report.named += 1;
                    let twice = named.insert(grain.0);
                    // Meanwhile the grain may have been moved or reused: an entry that was checked earlier named the
                    // grain at that time, and this entry names the grain now.
                    let damage = twice && (alone || !self.is_in_census(grain.0)) && still_so()?;
                    if damage {
                        evidence.suspect(suspect);
                        report.overlapping += 1;
                        report.tell(|| format!("entry {entry} of table {} names a grain of another entry", table.0));
                    } else {
                        owners.push((grain.0, Owner { table, entry }));
                    }
                }
                // Only ESXi writes zeros in this form, and it may have written the image before lamina did.
                Some(entry @ (Entry::Unmapped | Entry::Zero))
                    if first && ours && entry.encode() != raw && still_so()? =>
                {
                    evidence.suspect(suspect);
                }
                None if first && still_so()? => {
                    evidence.suspect(suspect);
                    report.invalid += 1;
                    report.tell(|| format!("entry {entry} of table {} is {raw:#018x}", table.0));
                }
                _ => {}
            }
        }
        owners.sort_unstable_by_key(|(grain, _)| *grain);
        Ok(owners)
    }

    fn is_in_census(&self, grain: u64) -> bool {
        self.state.lock().census.as_ref().is_some_and(|census| census.contains(grain))
    }

    /// Compares the backmap with the owners of grains, which are sorted by grain.
    fn check_owners(
        &self,
        slot: u64,
        owners: &[(u64, Owner)],
        repair: bool,
        report: &mut CheckReport,
        evidence: &mut Evidence,
    ) -> Result<()> {
        let limit = self.layout.grains_max();
        let mut rest = owners.iter().filter(|(grain, _)| *grain < limit).peekable();
        while rest.peek().is_some() {
            self.settle(|state| {
                // If the backmap page of an entry is not in memory, the closure runs again later: the entry stays first
                // in the list until then.
                while let Some((grain, owner)) = rest.peek() {
                    if !check_owner(state, *grain, *owner, repair, report)? {
                        let raw = Entry::Data(Grain(*grain)).encode();
                        evidence.suspect(Suspect { slot, owner: *owner, raw });
                    }
                    rest.next();
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn check_bitmap(
        &self,
        named: &GrainSet,
        window: &Range<u64>,
        repair: Option<Doubts>,
        report: &mut CheckReport,
        evidence: &mut Evidence,
        work: &mut Work<'_, '_>,
    ) -> Result<()> {
        let limit = window.end.min(self.state.lock().readable).min(self.layout.grains_max());
        let free_lost = repair.is_some_and(|doubts| !doubts.kept) && !report.is_damaged();
        let mut entered = repair.is_some() || !self.options.write;
        for page in window.start / PAGE_BITS..limit.div_ceil(PAGE_BITS) {
            let mut differences = self.compare_page(page, named, limit)?;
            if !entered && differences.iter().any(|found| found.allocated) {
                // A write may have allocated some of these grains before the census began, and not have entered them
                // yet.
                drop(self.announce(&[], work)?);
                entered = true;
                differences = self.compare_page(page, named, limit)?;
            }
            for Difference { grain, allocated, moving } in differences {
                if !allocated && moving && repair.is_none() && !self.settle(|state| is_unallocated(state, grain))? {
                    continue;
                }
                if allocated {
                    report.unnamed += 1;
                    if let Some(owner) = self.settle(|state| state.owner(grain))?
                        && u64::from(owner.table.0) < self.layout.tables_max()
                    {
                        evidence.claim(grain, owner);
                    }
                } else {
                    report.unallocated += 1;
                    report.tell(|| format!("grain {grain} is in use and free in the bitmap"));
                }
                if allocated && free_lost || !allocated && repair.is_some() {
                    self.settle(|state| repair_bit(state, grain, !allocated))?;
                    report.repaired += 1;
                }
            }
        }
        Ok(())
    }
}

/// Compares the backmap's owner of a grain with `owner`; returns whether it is right, or was repaired.
fn check_owner(state: &mut LayerState, grain: u64, owner: Owner, repair: bool, report: &mut CheckReport) -> Step<bool> {
    // A guest may have changed the entry since the table was read.
    if state.owner(grain)? == Some(owner) || !names(state, owner, Grain(grain))? {
        return Ok(true);
    }
    if repair {
        state.need_no_commit()?;
        state.need_backed(backmap_page(grain))?;
        state.set_owner(grain, Some(owner));
        report.repaired += 1;
    }
    report.misowned += 1;
    report.tell(|| format!("the backmap does not give grain {grain} to entry {} of its table", owner.entry));
    Ok(false)
}

/// Whether an entry still has the value that was read.
pub(super) fn says(state: &mut LayerState, owner: Owner, raw: u64) -> Step<bool> {
    let entry = u64::from(owner.entry);
    Ok(state.word(table_page(owner.table, entry), page_index(entry))? == raw)
}

/// Whether a grain is free by the bitmap although its owner by the backmap is an entry that names it.
fn is_unallocated(state: &mut LayerState, grain: u64) -> Step<bool> {
    let bit = grain % PAGE_BITS;
    if state.word(bitmap_page(grain), (bit / 64) as usize)? >> (bit % 64) & 1 == 1 {
        return Ok(false);
    }
    let owner = state.owner(grain)?.filter(|owner| u64::from(owner.table.0) < state.layout.tables_max());
    owner.map_or(Ok(false), |owner| names(state, owner, Grain(grain)))
}

fn repair_bit(state: &mut LayerState, grain: u64, allocated: bool) -> Step<()> {
    state.need_no_commit()?;
    let run = GrainRun { start: grain, count: 1 };
    if !allocated {
        return state.release(run);
    }
    state.need_backed(bitmap_page(grain))?;
    state.set_bits(run, true)
}

/// A window consists of whole pages of the bitmap, of the backmap and of tables.
const _: () = assert!(WINDOW.is_multiple_of(PAGE_BITS) && WINDOW.is_multiple_of(PAGE_ENTRIES));
