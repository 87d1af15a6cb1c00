//! Damaged pages: finds them, reports which disks they affect, and rebuilds those that can be derived from other pages.
//!
//! Which pages can be rebuilt, and from what ([the format](../../../../docs/format/native.md#what-can-be-proven)):
//!
//! * A page of any kind from the images of the last checkpoint, or, if one bit is inverted, from its own checksum
//!   ([`crate::pages::Mender`]).
//! * Summaries from the tables, reference counts from the trees.
//! * Checksums in a damaged page of `data.table` from the blocks ([`super::renewed`]).
//! * Damaged pages of the catalog from memory, while the store is open.
//!
//! What must hold: no count is rebuilt while a tree cannot be walked completely or an object is unknown. A count that
//! is too low would free, or overwrite in place, blocks that another tree refers to.

use super::check::{Report, Root, Window};
use super::log::Unreported;
use super::metadata::{Meta, Sight, unreleased};
use super::scrub::{DamagedPlace, WHOLE_PACKS};
use super::{CheckOptions, Engine};
use crate::catalog::SLOTS_PER_PAGE;
use crate::engine::verify::StoreActivity;
use crate::pages::{Mender, PageFile, PageKey, emptied, has_no_entries};
use crate::space::{BlockEntry, SUMMARY_ENTRIES, TABLE_ENTRIES};
use crate::{Error, IoContext, Result, is_lost};
use backend::BLOCK_SIZE;
use std::collections::BTreeMap;

/// The finding for a damaged copy of the superblock.
pub(super) fn damaged_superblock(copy: u64) -> String {
    let from = copy * BLOCK_SIZE as u64;
    format!("copy {} of 2 of the superblock, at byte {from} of 'superblock', is damaged", copy + 1)
}

/// The findings of earlier openings, which no check has reported.
pub(super) fn note_unreported(unreported: &Unreported, report: &mut Report) {
    for copy in (0..2).filter(|copy| unreported.copies >> copy & 1 == 1) {
        report.add(damaged_superblock(copy), Some("rewritten by an earlier opening of the datastore".to_owned()));
    }
    if unreported.summaries > 0 {
        let pages = match unreported.summaries {
            1 => "1 page of summaries was damaged".to_owned(),
            more => format!("{more} pages of summaries were damaged"),
        };
        report.add(pages, Some("recounted by an earlier opening of the datastore".to_owned()));
    }
}

/// The finding for a damaged page of summaries.
pub(super) fn damaged_page(key: PageKey, error: &Error) -> String {
    let first = key.number() * SUMMARY_ENTRIES;
    format!("{key}, with the counts of regions {first} to {}, is damaged: {error}", first + SUMMARY_ENTRIES - 1)
}

impl Meta {
    /// Replaces damaged pages that lie past the end of the files at the last checkpoint by empty pages. The checkpoint
    /// wrote nothing to these pages, and the journal has all changes that they will contain. Called before replay.
    pub(super) fn blank_unused(&mut self) -> Result<Vec<PageKey>> {
        let summaries = |regions: u64| regions.div_ceil(SUMMARY_ENTRIES);
        let known = [
            (PageFile::MapTable, self.map.table_pages()),
            (PageFile::MapSummary, summaries(self.map.regions())),
            (PageFile::DataTable, self.data.table_pages()),
            (PageFile::DataSummary, summaries(self.data.regions())),
            (PageFile::Catalog, self.catalog.slots().div_ceil(SLOTS_PER_PAGE as u64)),
        ];
        let mut blanked = Vec::new();
        for (file, known) in known {
            let length = self.pages.file(file).len().during(|| format!("measuring {}", file.name()))?;
            for number in known..length / BLOCK_SIZE as u64 {
                let key = PageKey::new(file, number);
                if self.pages.get(key).is_err() {
                    self.pages.replace(key);
                    blanked.push(key);
                }
            }
        }
        Ok(blanked)
    }
}

/// Pages that cannot be read.
#[derive(Default)]
pub(super) struct Damaged {
    pub map_tables: BTreeMap<u64, String>,
    pub data_tables: BTreeMap<u64, String>,
    pub summaries: Vec<(PageKey, Error)>,
    pub catalog: Vec<(PageKey, Error)>,
}

impl Sight<'_> {
    /// Reads every page of the tables, the summaries and the catalog.
    pub(super) fn find_damaged(&mut self) -> Damaged {
        let mut damaged = Damaged::default();
        let summaries = |regions: u64| regions.div_ceil(SUMMARY_ENTRIES);
        let counts = [
            (PageFile::MapTable, self.map.table_pages()),
            (PageFile::MapSummary, summaries(self.map.regions())),
            (PageFile::DataTable, self.data.table_pages()),
            (PageFile::DataSummary, summaries(self.data.regions())),
            (PageFile::Catalog, self.catalog.slots().div_ceil(SLOTS_PER_PAGE as u64)),
        ];
        for (file, count) in counts {
            for number in 0..count {
                let key = PageKey::new(file, number);
                let Err(error) = self.pages.get(key) else { continue };
                match file {
                    PageFile::MapTable => drop(damaged.map_tables.insert(number, error.to_string())),
                    PageFile::DataTable => drop(damaged.data_tables.insert(number, error.to_string())),
                    PageFile::Catalog if self.catalog.lost().contains_key(&number) => {}
                    PageFile::Catalog => damaged.catalog.push((key, error)),
                    PageFile::MapSummary | PageFile::DataSummary => damaged.summaries.push((key, error)),
                    PageFile::Map => {}
                }
            }
        }
        damaged
    }

    /// Finds the pages of `data.table` in a window, and of `map.table` if `nodes` is not empty, that have no entries
    /// although trees refer to blocks or nodes that the pages describe. Marks them as damaged.
    fn find_emptied(&mut self, window: &Window, nodes: &[u32], damaged: &mut Damaged) -> Vec<PageKey> {
        let mut found = Vec::new();
        let pages = window.range.start / TABLE_ENTRIES..window.range.end.div_ceil(TABLE_ENTRIES);
        for page in pages {
            let mut blocks = page * TABLE_ENTRIES..((page + 1) * TABLE_ENTRIES).min(window.range.end);
            if blocks.any(|block| window.references(block) > 0) {
                found.push(PageKey::new(PageFile::DataTable, page));
            }
        }
        for (page, counts) in (0..).zip(nodes.chunks(TABLE_ENTRIES as usize)) {
            if counts.iter().any(|count| *count > 0) {
                found.push(PageKey::new(PageFile::MapTable, page));
            }
        }
        found.retain(|key| self.pages.get(*key).is_ok_and(|page| has_no_entries(&page.0)));
        for key in &found {
            self.pages.mark_emptied(*key);
            let tables = match key.file() {
                PageFile::MapTable => &mut damaged.map_tables,
                _ => &mut damaged.data_tables,
            };
            tables.insert(key.number(), emptied(*key));
        }
        found
    }

    /// Rebuilds a page of `map.table` from the counted references.
    pub(super) fn renew_nodes(&mut self, page: u64, nodes: &[u32]) {
        self.map.renew_table(self.pages, page, &mut |id, _| BlockEntry {
            references: nodes.get(id as usize).copied().unwrap_or(0),
            ..BlockEntry::default()
        });
    }

    /// Rebuilds a page of `data.table` from the counted references. `check --data` compares the remaining checksums
    /// with the blocks.
    pub(super) fn renew_blocks(&mut self, page: u64, window: &Window) {
        if !window.range.contains(&(page * TABLE_ENTRIES)) {
            return;
        }
        self.data.renew_table(self.pages, page, &mut |block, left| match window.references(block) {
            0 => BlockEntry::default(),
            references => BlockEntry { references, backed: true, checksum: left.checksum, ..BlockEntry::default() },
        });
    }
}

impl Engine {
    /// The findings of the opening, and those of earlier openings that no check has reported. The first check reports
    /// them.
    pub(super) fn take_found_first(&self) -> Report {
        std::mem::take(&mut self.found_first.lock())
    }

    /// Called after a check that did not fail has reported the findings of openings, so that no later check reports
    /// them again.
    pub(super) fn forget_found_first(&self) -> Result<()> {
        if self.running.is_stopped() {
            return Ok(());
        }
        self.take_found_first();
        let _checkpoint = self.log.lock_checkpoints();
        self.log.forget_unreported().map_err(|error| self.stop(error))
    }

    /// Examines both copies of the superblock before a checkpoint overwrites one of them.
    pub(super) fn check_superblock(&self, repair: bool, report: &mut Report) -> Result<()> {
        let _checkpoint = self.log.lock_checkpoints();
        if let Some(copy) = self.log.damaged_superblock(repair)? {
            report.add(damaged_superblock(copy), repair.then(|| "rewritten from memory".to_owned()));
        }
        Ok(())
    }

    /// As [`Sight::find_emptied`]. While the store is in use, the pages are marked for all requests too.
    pub(super) fn find_emptied(
        &self,
        sight: &mut Sight<'_>,
        standing: StoreActivity<'_>,
        window: &Window,
        nodes: &[u32],
        damaged: &mut Damaged,
    ) {
        let found = sight.find_emptied(window, nodes, damaged);
        if matches!(standing, StoreActivity::Running) && !found.is_empty() {
            let mut meta = self.meta.lock();
            found.into_iter().for_each(|key| meta.pages.mark_emptied(key));
        }
    }

    /// At the end of a repair that had nothing to repair: reports regions that have more blocks than their tables. What
    /// the tables have lost belongs to no disk, so the regions are counted again.
    pub(super) fn compare_regions(&self, meta: &mut Meta, report: &mut Report) -> Result<()> {
        if report.repairs > 0 {
            return Ok(());
        }
        for (space, file) in [(&meta.map, PageFile::MapTable), (&meta.data, PageFile::DataTable)] {
            for number in 0..space.regions() {
                let (missing, unread) = space.missing_in(&mut meta.pages, number)?;
                if missing > 0 && unread == 0 {
                    let text =
                        format!("{} has lost {missing} blocks of region {number} that nothing uses", file.name());
                    report.add(text, Some("counted again".to_owned()));
                }
            }
        }
        Ok(())
    }

    /// Repairs what can be repaired before replay needs it.
    pub(super) fn repair_before_replay(&self) -> Result<()> {
        let mut report = self.take_found_first();
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        for key in meta.blank_unused()? {
            let problem = format!("{key} is damaged; it had no entries at the last checkpoint");
            report.add(problem, Some("rebuilt from the journal".to_owned()));
        }
        // All pages are examined now, because the checkpoint that ends recovery overwrites the images of the last
        // checkpoint.
        let standing = StoreActivity::Stopped(&BTreeMap::new());
        let options = CheckOptions { data: false, repair: true };
        let mut first = Report { compares_later: true, ..Report::default() };
        self.check_sight(&mut meta.sight(), standing, 0, options, &|_, _| true, &mut first)?;
        // The check that follows reports the findings that were not repaired.
        first.findings.retain(|finding| finding.repaired.is_some());
        if first.repairs > 0 {
            self.recount(meta)?;
        }
        report.repairs += first.repairs;
        report.findings.append(&mut first.findings);
        report.renewed.append(&mut first.renewed);
        drop(guard);
        *self.found_first.lock() = report;
        Ok(())
    }

    /// Counts the blocks of all regions again after a repair.
    pub(super) fn recount(&self, meta: &mut Meta) -> Result<()> {
        meta.map.recount(&mut meta.pages, std::iter::empty())?;
        let Meta { data, pages, pending, freed, .. } = meta;
        data.recount(pages, unreleased(pending, freed))
    }

    /// The last step of opening for a repair: reports the restored pages and marks them for the next checkpoint.
    pub(super) fn end_mending(&self) -> Result<()> {
        let mut report = self.take_found_first();
        let mut meta = self.meta.lock();
        self.note_mended(&mut meta, &mut report)?;
        meta.pages.set_mender(None);
        drop(meta);
        *self.found_first.lock() = report;
        Ok(())
    }

    /// Marks restored pages as changed, so that the next checkpoint writes them to their places.
    pub(super) fn note_mended(&self, meta: &mut Meta, report: &mut Report) -> Result<()> {
        let Some(mender) = meta.pages.mender().cloned() else { return Ok(()) };
        for (key, proof) in mender.take_mended() {
            if self.has_room_for_repair(&meta.sight()) {
                match meta.pages.get_mut(key).map(drop) {
                    Ok(()) => report.add(format!("{key} was damaged"), Some(proof.to_string())),
                    Err(error) if is_lost(&error) => {
                        report.add(format!("{key} is damaged, and cannot be restored: {error}"), None);
                    }
                    Err(error) => return Err(error),
                }
            } else {
                report.add(format!("{key} is damaged, and there is no room to restore it"), None);
            }
        }
        Ok(())
    }

    /// Reports damaged pages, and with `repair` rebuilds those that can be derived from memory.
    pub(super) fn report_damaged(&self, sight: &mut Sight<'_>, damaged: &Damaged, repair: bool, report: &mut Report) {
        for (number, why) in sight.catalog.lost() {
            let first = number * SLOTS_PER_PAGE as u64;
            let names: Vec<String> = sight.catalog.unproven().map(|object| format!("'{}'", object.name)).collect();
            let named = if names.is_empty() { String::new() } else { format!("; its bytes name {}", names.join(", ")) };
            report.add(
                format!(
                    "page {number} of catalog is damaged, and the disks and snapshots of slots {first} to {} are lost with \
                     it ({why}){named}; 'lamina salvage' reads out what can be read",
                    first + SLOTS_PER_PAGE as u64 - 1
                ),
                None,
            );
        }
        for (key, error) in &damaged.summaries {
            if repair {
                let space = if key.file() == PageFile::MapSummary { &mut *sight.map } else { &mut *sight.data };
                space.renew_summaries(sight.pages, key.number());
            }
            report.add(damaged_page(*key, error), repair.then(|| "recounted from the table".to_owned()));
        }
        for (key, error) in &damaged.catalog {
            report.add(format!("{key} is damaged: {error}"), repair.then(|| "rewritten from memory".to_owned()));
        }
    }

    /// Reports damaged nodes, and the parts of trees below them.
    pub(super) fn note_lost_nodes(
        &self,
        sight: &mut Sight<'_>,
        roots: &[Root],
        lost: &BTreeMap<u64, String>,
        report: &mut Report,
    ) -> Result<()> {
        let place = |number: &u64| DamagedPlace::Page { file: PageFile::Map, number: *number };
        let owners = sight.owners_of(roots, &lost.keys().map(place).collect::<Vec<_>>(), report.room(), WHOLE_PACKS)?;
        for ((id, why), owners) in lost.iter().zip(owners) {
            let named = owners.ranges();
            report.add_at(
                format!("page {id} of map is damaged ({why}); what lies below it cannot be read or written: {named}"),
                None,
                owners.places(),
            );
        }
        Ok(())
    }
}

/// A mender that uses the images of the last checkpoint.
pub(super) fn mender(engine: &Engine) -> std::sync::Arc<Mender> {
    std::sync::Arc::new(Mender::new(engine.log.image_index()))
}
