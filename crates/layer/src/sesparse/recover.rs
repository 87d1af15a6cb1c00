//! Opening for writing: finds the tables in use, and unused grains and tables left by a crash.
//!
//! The image needs no repair ([`super::commit`]): recovery only finds lost space. Tables are lost if they are allocated
//! and no slot of the directory names them. Grains are lost if they are allocated in a marked region
//! ([`super::touched`]) and the entry in the backmap does not name them. The backmap can be relied on, because lamina's
//! mark exists and an owner is durable before the entry is. But an owner may be damaged, so tables are searched for a
//! grain before it is freed.
//!
//! The time for the search is limited: regions beyond [`RECOUNT_PAGES`] stay marked, and a wipe finds their lost
//! grains.

use super::SeSparse;
use super::cache::{Kind, PageBytes, PageKey};
use super::entry::{Entry, GrainRun, Owner, Table, decode_slot};
use super::header::{PAGE_BITS, PAGE_ENTRIES};
use super::proof::gave_up;
use super::state::{backmap_page, by_bitmap_page, page_index};
use super::wipe::Holes;
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Buffer};
use rustc_hash::FxHashSet;

/// Pages of the directory read per call.
const DIRECTORY_PAGES: u64 = 64;
/// The most spare tables remembered.
const SPARE_MAX: usize = 4096;
/// The most pages of the bitmap recounted at the opening: 8 GiB of grains. One region is recounted in any case.
const RECOUNT_PAGES: u64 = 64;

/// The most tables read to check whether one names a grain that seems lost: 64 MiB of tables.
pub(super) const CONFIRM_TABLES: usize = 2048;

/// A set of tables that slots name, as a bitmap up to the highest; the table area limits its size.
#[derive(Clone, Default)]
pub(super) struct NamedTables {
    words: Vec<u64>,
    /// One more than the number of the highest table of the set.
    end: u64,
}

impl NamedTables {
    /// Adds a table; returns true if it was in the set before.
    pub(super) fn insert(&mut self, table: Table) -> bool {
        let (word, bit) = ((table.0 / 64) as usize, table.0 % 64);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let before = self.words[word] >> bit & 1 == 1;
        self.words[word] |= 1 << bit;
        self.end = self.end.max(u64::from(table.0) + 1);
        before
    }

    /// One more than the highest table of the set.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Number of tables.
    fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(super) fn contains(&self, table: u64) -> bool {
        self.words.get((table / 64) as usize).is_some_and(|word| word >> (table % 64) & 1 == 1)
    }
}

impl SeSparse {
    /// Reads the directory, and recounts the marked regions.
    pub(super) fn recover(&self) -> Result<()> {
        let (named, damaged) = self.read_directory(self.options.repair)?;
        self.state.lock().named_tables = named.clone();
        if damaged {
            // The directory is damaged: grains of tables that it no longer names must not be freed.
            return Ok(());
        }
        if !self.options.repair {
            self.refuse_truncated(&named)?;
        }
        let miscounted = {
            let mut state = self.state.lock();
            let miscounted = state.header.free_table < named.end;
            if state.header.free_table < named.end {
                state.header.free_table = named.end;
                state.header_dirty = true;
            }
            if state.touched.is_some() && !miscounted {
                let handed_out = 0..state.header.free_table;
                let spare = handed_out.filter(|table| !named.contains(*table)).take(SPARE_MAX);
                state.spare_tables = spare.map(|table| Table(table as u32)).collect();
            }
            miscounted
        };
        match miscounted || self.options.repair {
            // A repair determines lost grains from the tables themselves, because an owner may be damaged.
            //
            // A slot becomes durable only after the count of tables that includes its table. So if a slot names a table
            // that is not counted, the slot or the count is damaged. If the slot is damaged, the grains of its table
            // only seem lost. Their regions stay marked.
            true => Ok(()),
            false => self.recount(&named),
        }
    }

    /// Finds the tables that two slots name, in the readable part of the directory.
    pub(super) fn find_shared_tables(&self) {
        if let Err(error) = self.read_directory(true) {
            tracing::warn!(image = %self.name, %error, "the grain directory cannot be read completely");
        }
    }

    /// The tables that the directory names, and whether it is damaged. Only a `tolerant` opening accepts damage, such
    /// as two slots that name one table: a write through one slot would change data of the other.
    fn read_directory(&self, tolerant: bool) -> Result<(NamedTables, bool)> {
        let corrupt = |what: String| {
            let text = format!("{}: {what}; check the image, with --repair to correct proven damage", self.name);
            Error::new(ErrorKind::Corrupt, text)
        };
        let counted = self.state.lock().header.free_table;
        let mut damaged = false;
        let mut named = NamedTables::default();
        let mut holes = Holes::default();
        let pages = self.layout.slots().div_ceil(PAGE_ENTRIES);
        for first in (0..pages).step_by(DIRECTORY_PAGES as usize) {
            let count = DIRECTORY_PAGES.min(pages - first);
            let offset = self.page_offset(PageKey::new(Kind::Directory, first));
            let range = offset..offset + count * BLOCK_SIZE as u64;
            if holes.contain(&*self.file, range).during(|| format!("looking for holes in {}", self.name))? {
                continue;
            }
            let mut buffer = Buffer::zeroed(count as usize);
            self.read_metadata(&mut buffer, offset)?;
            let slots = (first * PAGE_ENTRIES..self.layout.slots()).zip(buffer.as_chunks().0);
            for (slot, raw) in slots {
                let raw = u64::from_le_bytes(*raw);
                match decode_slot(raw) {
                    Some(None) => {}
                    Some(Some(table)) if u64::from(table.0) < self.layout.tables_max() => {
                        if u64::from(table.0) >= counted {
                            self.state.lock().uncounted_tables.insert(table);
                        }
                        if named.insert(table) {
                            if !tolerant {
                                return Err(corrupt(format!("two slots of its directory name table {}", table.0)));
                            }
                            damaged = true;
                            self.state.lock().shared_tables.insert(table);
                        }
                    }
                    _ if tolerant => damaged = true,
                    _ => return Err(corrupt(format!("slot {slot} of its directory is {raw:#018x}"))),
                }
            }
        }
        Ok((named, damaged))
    }

    /// Refuses an image with grains in use after the end of the file. If the file grew again, lost grains would read as
    /// zeros, and new grains would get their locations.
    ///
    /// A crash leaves grains after the end that are allocated and that no entry names: both the length of the file and
    /// the data are durable before the entry.
    fn refuse_truncated(&self, named: &NamedTables) -> Result<()> {
        let (held, limit) = (self.state.lock().readable, self.layout.grains_max());
        let mut holes = Holes::default();
        for page in held / PAGE_BITS..limit.div_ceil(PAGE_BITS) {
            let offset = self.page_offset(PageKey::new(Kind::Bitmap, page));
            let hole = holes.contain(&*self.file, offset..offset + BLOCK_SIZE as u64);
            if hole.during(|| format!("looking for holes in {}", self.name))? {
                continue;
            }
            let (start, end) = (held.max(page * PAGE_BITS), limit.min((page + 1) * PAGE_BITS));
            let (owned, allocated) = self.held(GrainRun { start, count: end - start })?;
            let lost = match self.is_ours() {
                true => owned.iter().any(|held| named.contains(u64::from(held.owner.table.0))),
                // Another program may have written the backmap in another form, so the tables decide.
                false if allocated > 0 => return self.refuse_entries_from(held),
                false => false,
            };
            if lost {
                return Err(self.truncated());
            }
        }
        Ok(())
    }

    /// Reads all tables; refuses an image in which one names a grain from `held` on.
    fn refuse_entries_from(&self, held: u64) -> Result<()> {
        let mut holes = Holes::default();
        let mut slot = self.next_slot(0)?;
        while slot < self.layout.slots() {
            if let Some((_, content)) = self.read_table(slot, &mut holes)? {
                let mut entries = content.iter().flat_map(PageBytes::words).filter_map(Entry::decode);
                if entries.any(|entry| matches!(entry, Entry::Data(grain) if grain.0 >= held)) {
                    return Err(self.truncated());
                }
            }
            slot = self.next_slot(slot + 1)?;
        }
        Ok(())
    }

    fn truncated(&self) -> Error {
        let text = "the file was truncated: grains in use lie after its end; the image can be read, and converted to a \
                    new image with --skip-damaged, which lists the lost parts";
        Error::new(ErrorKind::Corrupt, format!("{}: {text}", self.name))
    }

    fn recount(&self, named: &NamedTables) -> Result<()> {
        let Some(mut suspect) = self.state.lock().suspect.clone() else { return Ok(()) };
        let (mut dead, mut counted, mut done) = (Vec::new(), 0, Vec::new());
        let regions: Vec<u64> = suspect.regions().collect();
        for region in regions {
            let pages = suspect.pages(region);
            if counted > 0 && counted + (pages.end - pages.start) > RECOUNT_PAGES {
                continue;
            }
            counted += pages.end - pages.start;
            for page in pages.start..pages.end.min(self.layout.grains_max().div_ceil(PAGE_BITS)) {
                self.find_dead(page, named, &mut dead)?;
            }
            done.push(region);
        }
        match self.named_elsewhere(&dead, named) {
            Ok(Some(kept)) => {
                if !kept.is_empty() {
                    tracing::warn!(
                        image = %self.name, grains = kept.len(),
                        "the backmap has other owners for grains that table entries name; check the image"
                    );
                }
                dead.retain(|(grain, _)| !kept.contains(grain));
                self.free(&dead)?;
                done.into_iter().for_each(|region| suspect.remove(region));
                if !dead.is_empty() {
                    tracing::info!(image = %self.name, grains = dead.len(), "freed grains that a crash left allocated");
                }
            }
            // Too many tables would have to be read: the regions stay marked, and a wipe reads all tables.
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(image = %self.name, %error, "grains that a crash left allocated are not freed")
            }
        }
        let mut state = self.state.lock();
        if suspect.regions().next().is_some() {
            tracing::warn!(image = %self.name, "a crash left more marked regions than an opening examines; wipe it");
        }
        state.suspect = Some(suspect);
        Ok(())
    }

    /// Finds allocated grains of a page of the bitmap that the entries of their owners do not name.
    fn find_dead(&self, page: u64, named: &NamedTables, dead: &mut Vec<(u64, Option<Owner>)>) -> Result<()> {
        let grains = page * PAGE_BITS..((page + 1) * PAGE_BITS).min(self.layout.grains_max());
        let run = GrainRun { start: grains.start, count: grains.end - grains.start };
        let mut owners = self.settle(|state| state.owners(run))?;
        // Sorted by owner, because consecutive entries of a table share its pages.
        owners.sort_unstable_by_key(|(_, owner)| *owner);
        for (grain, owner) in owners {
            let known = owner.filter(|owner| named.contains(u64::from(owner.table.0)));
            let live = match (known, owner) {
                (Some(owner), _) => !self.settle(|state| gave_up(state, owner, grain))?,
                (None, Some(_)) => false,
                // A crash leaves grains without an owner, but none with an invalid owner. So a table may name a grain
                // with an invalid owner.
                (None, None) => self.settle(|state| state.word(backmap_page(grain.0), page_index(grain.0)))? != 0,
            };
            if !live {
                dead.push((grain.0, owner));
            }
        }
        Ok(())
    }

    /// The grains among `dead` that a table names although their owner does not: the owner is wrong. Searches all
    /// tables if there are few, otherwise only tables with a number that differs in at most one byte from the number in
    /// an owner; `None` if these are too many.
    fn named_elsewhere(&self, dead: &[(u64, Option<Owner>)], named: &NamedTables) -> Result<Option<FxHashSet<u64>>> {
        let mut kept = FxHashSet::default();
        if dead.is_empty() {
            return Ok(Some(kept));
        }
        let wanted = match named.count() > CONFIRM_TABLES {
            false => None,
            true => match tables_near(dead, named) {
                Some(wanted) => Some(wanted),
                None => return Ok(None),
            },
        };
        let grains: FxHashSet<u64> = dead.iter().map(|(grain, _)| *grain).collect();
        let mut holes = Holes::default();
        let (slots, mut slot) = (self.layout.slots(), 0);
        loop {
            slot = self.next_slot(slot)?;
            if slot >= slots {
                return Ok(Some(kept));
            }
            let table = self.settle(|state| state.table_of(slot))?;
            if table.is_some_and(|table| wanted.as_ref().is_none_or(|wanted| wanted.contains(&table)))
                && let Some((_, content)) = self.read_table(slot, &mut holes)?
            {
                let entries = content.iter().flat_map(PageBytes::words).filter_map(Entry::decode);
                let named = entries.filter_map(|entry| match entry {
                    Entry::Data(grain) => Some(grain.0),
                    _ => None,
                });
                kept.extend(named.filter(|grain| grains.contains(grain)));
            }
            slot += 1;
        }
    }

    fn free(&self, dead: &[(u64, Option<Owner>)]) -> Result<()> {
        let mut dead: Vec<u64> = dead.iter().map(|(grain, _)| *grain).collect();
        dead.sort_unstable();
        for run in dead.chunk_by(|one, other| one + 1 == *other) {
            for part in by_bitmap_page(GrainRun { start: run[0], count: run.len() as u64 }) {
                self.settle(|state| {
                    state.need_no_commit()?;
                    state.release(part)
                })?;
            }
        }
        Ok(())
    }
}

/// Named tables with a number that differs in at most one byte from the number in an owner. `None` if these are too
/// many.
fn tables_near(dead: &[(u64, Option<Owner>)], named: &NamedTables) -> Option<FxHashSet<Table>> {
    let owners: FxHashSet<Table> = dead.iter().map(|(_, owner)| owner.map_or(Table(0), |owner| owner.table)).collect();
    let mut wanted = FxHashSet::default();
    for owner in owners {
        for (byte, value) in (0..4).flat_map(|byte| (0..=0xff).map(move |value| (byte, value))) {
            let near = Table(owner.0 & !(0xff << (8 * byte)) | value << (8 * byte));
            if named.contains(u64::from(near.0)) {
                wanted.insert(near);
            }
        }
        if wanted.len() > CONFIRM_TABLES {
            return None;
        }
    }
    Some(wanted)
}
