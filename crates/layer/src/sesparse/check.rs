//! Checking an image: what the tables say against bitmap, backmap and the file itself.
//!
//! The tables are the truth: they alone decide what a guest reads. Damage in them (places beyond the file, two entries
//! with one grain, entries that cannot be) is told and left alone. Bitmap and backmap follow from the tables, so what
//! is wrong with them can be repaired: a named grain is marked as allocated and owned at any time, an allocated one
//! that nothing names is freed only where the tables are without damage.
//!
//! Changes wait while it runs; reads go on. Memory is bounded by the window of [`GrainSet`], time by the tables that
//! the file really holds.

use super::SeSparse;
use super::cache::{Kind, PageBytes, PageKey};
use super::entry::{Entry, Owner, Run, Table};
use super::header::{PAGE_BITS, PAGE_ENTRIES};
use super::maintain::Work;
use super::recover::NamedTables;
use super::state::{State, Step, backmap_page, bitmap_page};
use super::wipe::{GrainSet, Holes};
use crate::{ErrorKind, Result, Watch};
use std::ops::Range;

/// Grains of a window: 1 TiB, 32 MiB of memory.
const WINDOW: u64 = 1 << 28;
/// Findings told in words; all are counted.
const FINDINGS_MAX: usize = 64;

/// What a check found. Counts are grains unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Tables that the directory names.
    pub tables: u64,
    /// Grains that tables name.
    pub named: u64,
    /// Slots and entries that cannot be, and tables named by two slots: damage.
    pub invalid: u64,
    /// Named grains that the file does not have: damage.
    pub outside: u64,
    /// Grains named by more than one entry: damage.
    pub overlapping: u64,
    /// Named, and free in the bitmap: someone else may take them.
    pub unallocated: u64,
    /// Named by another entry than the backmap says.
    pub misowned: u64,
    /// Allocated, and named by nothing: lost space.
    pub unnamed: u64,
    /// Tables in use that are counted as free. Opening for writing counts them.
    pub uncounted_tables: u64,
    /// Bits and owners that were put right.
    pub repaired: u64,
    /// The first of them in words.
    pub findings: Vec<String>,
}

impl CheckReport {
    /// Whether the tables themselves are damaged: guests may read wrong data or none.
    pub fn is_damaged(&self) -> bool {
        self.invalid + self.outside + self.overlapping > 0
    }

    /// Whether nothing at all was found.
    pub fn is_clean(&self) -> bool {
        let repairable = self.unallocated + self.misowned + self.unnamed + self.uncounted_tables;
        !self.is_damaged() && repairable == 0
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(what());
        }
    }
}

impl SeSparse {
    /// Checks the image and, with `repair`, puts bitmap, backmap and the count of tables right.
    pub fn check(&self, repair: bool, watch: Watch<'_>) -> Result<CheckReport> {
        let mut work = self.begin_work(watch, "checking")?;
        if repair {
            self.check_changeable()?;
        }
        let _no_changes = self.gate.write();
        if self.options.write {
            // What waits to be free is free then, or held by a reader.
            self.commit_at_once()?;
        }
        let mut report = CheckReport::default();
        let end = self.state.lock().readable.max(1);
        work.expect(self.layout.slots() * end.div_ceil(WINDOW));
        for start in (0..end).step_by(WINDOW as usize) {
            let window = start..(start + WINDOW).min(end.next_multiple_of(64));
            let named = self.check_tables(&window, repair, &mut report, &mut work)?;
            self.check_bitmap(&named, &window, repair, &mut report)?;
        }
        if repair {
            self.commit_at_once()?;
        }
        Ok(report)
    }

    /// Goes through all tables, for the grains of a window; what concerns tables alone is told in the first.
    fn check_tables(
        &self,
        window: &Range<u64>,
        repair: bool,
        report: &mut CheckReport,
        work: &mut Work,
    ) -> Result<GrainSet> {
        let mut named = GrainSet::new(window.clone());
        let mut tables = NamedTables::default();
        let mut holes = Holes::default();
        let first = window.start == 0;
        let (slots, mut slot) = (self.layout.slots(), 0);
        while slot < slots {
            let begun = slot;
            slot = self.next_slot(slot)?;
            if slot > begun {
                work.step(slot - begun)?;
                continue;
            }
            match self.read_table(slot, &mut holes) {
                Ok(None) => {}
                Ok(Some((table, content))) => {
                    let shared = tables.insert(table);
                    if first {
                        report.tables += 1;
                        report.invalid += u64::from(shared);
                    }
                    if shared && first {
                        report.tell(|| format!("table {} is named by slot {slot} and another one", table.0));
                    }
                    if !shared {
                        let owners = self.check_table(table, &content, &mut named, report);
                        self.check_owners(&owners, repair, report)?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    if first {
                        report.invalid += 1;
                        report.tell(|| error.to_string());
                    }
                }
                Err(error) => return Err(error),
            }
            slot += 1;
            work.step(1)?;
        }
        // Opening for writing puts it right.
        let counted = self.state.lock().header.free_table;
        if first && tables.end() > counted {
            report.uncounted_tables = tables.end() - counted;
            report.tell(|| format!("{counted} tables are counted, number {} is in use", tables.end() - 1));
        }
        Ok(named)
    }

    /// Looks at the entries of a table; returns the grains of the window with their owners, by grain.
    fn check_table(
        &self,
        table: Table,
        content: &[PageBytes],
        named: &mut GrainSet,
        report: &mut CheckReport,
    ) -> Vec<(u64, Owner)> {
        let (readable, window) = (self.state.lock().readable, named.window());
        let first = window.start == 0;
        let mut owners = Vec::new();
        for (entry, raw) in (0..).zip(content.iter().flat_map(PageBytes::words)) {
            match Entry::decode(raw) {
                Some(Entry::Data(grain)) if grain.0 >= readable && first => {
                    report.outside += 1;
                    report.tell(|| format!("entry {entry} of table {} names grain {}", table.0, grain.0));
                }
                Some(Entry::Data(grain)) if grain.0 < readable && window.contains(&grain.0) => {
                    report.named += 1;
                    if named.insert(grain.0) {
                        report.overlapping += 1;
                        report.tell(|| format!("entry {entry} of table {} names a grain of another", table.0));
                    } else {
                        owners.push((grain.0, Owner { table, entry }));
                    }
                }
                None if first => {
                    report.invalid += 1;
                    report.tell(|| format!("entry {entry} of table {} is {raw:#018x}", table.0));
                }
                _ => {}
            }
        }
        owners.sort_unstable_by_key(|(grain, _)| *grain);
        owners
    }

    /// Compares the backmap with the owners of grains, which are sorted.
    fn check_owners(&self, owners: &[(u64, Owner)], repair: bool, report: &mut CheckReport) -> Result<()> {
        let limit = self.layout.grains_max();
        let mut rest = owners.iter().filter(|(grain, _)| *grain < limit).peekable();
        while rest.peek().is_some() {
            self.settle(|state| {
                // One that lacks its page stays at the front.
                while let Some((grain, owner)) = rest.peek() {
                    check_owner(state, *grain, *owner, repair, report)?;
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
        repair: bool,
        report: &mut CheckReport,
    ) -> Result<()> {
        let mut waiting = GrainSet::new(window.clone());
        let limit = {
            let state = self.state.lock();
            for run in state.retirement.waiting() {
                for grain in run.start..run.end() {
                    waiting.insert(grain);
                }
            }
            window.end.min(state.readable).min(self.layout.grains_max())
        };
        let free_lost = repair && !report.is_damaged();
        for page in window.start / PAGE_BITS..limit.div_ceil(PAGE_BITS) {
            let differences = self.settle(|state| {
                let bytes = state.page(PageKey::new(Kind::Bitmap, page))?;
                let mut differences = Vec::new();
                for (first, bits) in (page * PAGE_BITS..limit).step_by(64).zip(bytes.words()) {
                    let mut differ = bits ^ (named.word(first) | waiting.word(first) & bits);
                    while differ != 0 {
                        let bit = differ.trailing_zeros();
                        differ &= differ - 1;
                        differences.push((first + u64::from(bit), bits >> bit & 1 == 1));
                    }
                }
                Ok(differences)
            })?;
            for (grain, allocated) in differences.into_iter().filter(|(grain, _)| *grain < limit) {
                if allocated {
                    report.unnamed += 1;
                } else {
                    report.unallocated += 1;
                    report.tell(|| format!("grain {grain} is in use and free in the bitmap"));
                }
                if allocated && free_lost || !allocated && repair {
                    self.settle(|state| repair_bit(state, grain, !allocated))?;
                    report.repaired += 1;
                }
            }
        }
        Ok(())
    }
}

fn check_owner(state: &mut State, grain: u64, owner: Owner, repair: bool, report: &mut CheckReport) -> Step<()> {
    state.need_no_commit()?;
    if state.owner(grain)? == Some(owner) {
        return Ok(());
    }
    if repair {
        state.need_backed(backmap_page(grain))?;
        state.set_owner(grain, Some(owner));
        report.repaired += 1;
    }
    report.misowned += 1;
    report.tell(|| format!("the backmap does not have grain {grain} with entry {} of its table", owner.entry));
    Ok(())
}

fn repair_bit(state: &mut State, grain: u64, allocated: bool) -> Step<()> {
    state.need_no_commit()?;
    let run = Run { start: grain, count: 1 };
    if !allocated {
        return state.release(run);
    }
    state.need_backed(bitmap_page(grain))?;
    state.set_bits(run, true)
}

/// Pages of the backmap and of tables count alike.
const _: () = assert!(WINDOW.is_multiple_of(PAGE_BITS) && WINDOW.is_multiple_of(PAGE_ENTRIES));
