//! `check`: walks all trees of the catalog, counts references, and compares the counts with the tables.
//!
//! Without `repair` the store stays in use. The check walks the metadata as the last checkpoint left it
//! (`metadata/view.rs`), so its findings describe that moment. Other requests wait for the check no longer than for a
//! checkpoint. Data blocks are verified with their current metadata ([`super::verify`]), and space reserved in the file
//! system is compared region by region.
//!
//! With `repair` all requests, reads included, wait until the last repair is done.
//!
//! Data blocks are counted window by window, so that memory does not grow with the size of the store; each window walks
//! the trees again.

use super::Engine;
use super::affected::{Affected, report_absent};
use super::checkpoint::Purpose;
use super::files::data_file_name;
use super::metadata::{Effects, Sight, View};
use super::rebuild::{Damaged, mender};
use super::scrub::{DamagedPlace, WHOLE_PACKS};
use super::verify::StoreActivity;
use crate::FILE_BLOCKS;
use crate::catalog::{Catalog, ObjectState};
use crate::pages::PageFile;
use crate::space::{BlockEntry, TABLE_ENTRIES};
use crate::tree::{self, NodeId, Visit};
use crate::{Error, ErrorKind, Result};
use backend::BLOCK_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;

/// Findings listed one by one; further ones are only counted.
const FINDINGS_MAX: usize = 1000;
/// Places that are listed for all findings; further ones are only counted.
const PLACES_MAX: usize = if cfg!(test) { 256 } else { 1 << 16 };
/// Data blocks counted in one pass, in whole pages of the table: 64 MiB of memory for 63.5 GiB of data. Tests have
/// small passes, so that they reach the second one.
const WINDOW_BLOCKS: u64 = if cfg!(test) { TABLE_ENTRIES << 2 } else { TABLE_ENTRIES << 15 };
/// Pages of the images file that repairs leave free for the last changes of a repair: summaries and the catalog.
const REPAIR_AHEAD: u64 = 64;
/// Marks a counted block that some tree maps as written.
const WRITTEN: u32 = 1 << 31;
/// How often deleted trees are dropped before a check begins. Under load the list of deleted trees may never become
/// empty.
const TRASH_ROUNDS: usize = 256;

/// What a check examines and changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// Whether to read every data block and verify its checksum.
    pub data: bool,
    /// Whether to repair what can be repaired.
    pub repair: bool,
}

/// A finding of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What is wrong, and where.
    pub problem: String,
    /// How the problem was repaired; `None` if it was not.
    pub repaired: Option<String>,
    /// The parts of disks and snapshots that the damage affects, as far as that is known.
    pub places: Vec<Affected>,
    /// Number of parts beyond those listed.
    pub unlisted: u64,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Metadata pages walked.
    pub pages: u64,
    /// Data blocks in use.
    pub blocks: u64,
    /// Data blocks read and verified.
    pub verified: u64,
    /// Bytes of blocks that nothing refers to.
    pub leaked: u64,
    /// The findings that are listed one by one.
    pub findings: Vec<Finding>,
    /// Number of findings beyond those listed.
    pub unlisted: u64,
    /// Number of places that are listed for all findings.
    pub(super) places: usize,
    /// Number of findings that were repaired, listed or not.
    pub(super) repairs: u64,
    /// Pages of `data.table` that were rebuilt. The checksums that remained readable in them must be compared with the
    /// blocks.
    pub(super) renewed: Vec<u64>,
    /// Whether a later check compares them, because the journal is not replayed yet.
    pub(super) compares_later: bool,
    /// Pages of the catalog that the next checkpoint must write from memory.
    pub(super) renewed_catalog: Vec<u64>,
}

impl Report {
    pub(super) fn add(&mut self, problem: String, repaired: Option<String>) {
        self.add_at(problem, repaired, Vec::new());
    }

    /// How many more findings the report can list.
    pub(super) fn room(&self) -> usize {
        FINDINGS_MAX - self.findings.len()
    }

    /// Adds a finding that affects these parts of disks and snapshots.
    pub(super) fn add_at(&mut self, problem: String, repaired: Option<String>, mut places: Vec<Affected>) {
        self.repairs += u64::from(repaired.is_some());
        if self.findings.len() < FINDINGS_MAX {
            let listed = places.len().min(PLACES_MAX - self.places);
            let unlisted = (places.len() - listed) as u64;
            places.truncate(listed);
            self.places += listed;
            self.findings.push(Finding { problem, repaired, places, unlisted });
        } else {
            self.unlisted += 1;
        }
    }
}

/// A tree to walk, and its name in messages.
pub(super) struct Root {
    pub name: String,
    /// The name without an explanation: `disk` or `disk@snapshot`.
    pub short: String,
    pub node: NodeId,
    /// Blocks of the disk.
    blocks: u64,
}

impl Root {
    /// The bytes of the disk in a range of blocks.
    pub fn bytes(&self, range: &Range<u64>) -> Range<u64> {
        let byte = |block: u64| block.min(self.blocks) * BLOCK_SIZE as u64;
        byte(range.start)..byte(range.end)
    }
}

/// References counted in a window of data blocks.
pub(super) struct Window {
    pub range: Range<u64>,
    counts: Vec<u32>,
}

impl Window {
    /// Whether some tree maps a block as written.
    pub fn written(&self, block: u64) -> bool {
        self.counts[(block - self.range.start) as usize] & WRITTEN != 0
    }

    /// The ranges of all windows.
    pub fn all(blocks: u64) -> impl Iterator<Item = Range<u64>> {
        (0..blocks.div_ceil(WINDOW_BLOCKS))
            .map(move |number| number * WINDOW_BLOCKS..((number + 1) * WINDOW_BLOCKS).min(blocks))
    }

    /// References counted for a block.
    pub fn references(&self, block: u64) -> u32 {
        let at = block.checked_sub(self.range.start).and_then(|at| self.counts.get(at as usize));
        at.map_or(0, |count| count & !WRITTEN)
    }

    /// Excludes a range of blocks from the comparison.
    pub fn clear(&mut self, range: Range<u64>) {
        let end = range.end.min(self.range.end);
        (range.start.max(self.range.start)..end).for_each(|block| self.counts[(block - self.range.start) as usize] = 0);
    }
}

/// Reports progress (done, total), and fails if the caller requests a stop.
pub(super) struct Steps<'a> {
    done: u64,
    total: u64,
    progress: &'a dyn Fn(u64, u64) -> bool,
}

impl Steps<'_> {
    pub fn pass(&mut self, count: u64) -> Result<()> {
        self.done += count;
        if (self.progress)(self.done.min(self.total), self.total) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Interrupted, "the check was cancelled; only the reported repairs were made"))
    }
}

impl Engine {
    /// Makes a checkpoint and a view of the metadata that it wrote.
    pub(super) fn view(&self) -> Result<View> {
        let _checkpoint = self.log.lock_checkpoints();
        self.meta.lock().want_view();
        let captured = self.checkpoint_locked(Purpose::GoOn);
        let found = self.meta.lock().take_view();
        captured?;
        let superblock = self.log.lock().superblock();
        Ok(self.meta.view(&superblock, found))
    }

    /// Checks the store; `progress` gets (done, total) and returns false to stop.
    pub fn check(&self, options: CheckOptions, progress: &dyn Fn(u64, u64) -> bool) -> Result<Report> {
        let _checking = self.checking.lock();
        let report = match options.repair {
            true => self.check_stopped(options, progress)?,
            false => self.check_running_store(options, progress)?,
        };
        self.forget_found_first()?;
        Ok(report)
    }

    /// Checks the store while requests continue.
    fn check_running_store(&self, options: CheckOptions, progress: &dyn Fn(u64, u64) -> bool) -> Result<Report> {
        self.commit_changes()?;
        for _ in 0..TRASH_ROUNDS {
            if !self.drop_all_trash()? {
                break;
            }
        }
        let mut report = self.found_first.lock().clone();
        self.check_superblock(false, &mut report)?;
        let mut view = self.view()?;
        let used = view.counts.data.used;
        let checked = self.check_sight(&mut view.sight(), StoreActivity::Running, used, options, progress, &mut report);
        // If pages of the view were lost, its findings are meaningless.
        view.check()?;
        checked?;
        drop(view);
        self.compare_room(StoreActivity::Running, false, &mut report)?;
        Ok(report)
    }

    /// Checks and repairs the store while all requests wait.
    fn check_stopped(&self, options: CheckOptions, progress: &dyn Fn(u64, u64) -> bool) -> Result<Report> {
        // A rebuilt page of the table describes blocks without references as holes, and their space is returned.
        let _bulk = self.writeback.stop_bulk();
        let _control = self.control.lock();
        // Punching is locked, because blocks that are about to be punched would be reported as leaks.
        let punching = self.reserves.lock_punching();
        self.commit_changes()?;
        while self.drop_all_trash()? {}
        let mut report = self.found_first.lock().clone();
        self.check_superblock(true, &mut report)?;
        let checkpoint = self.log.lock_checkpoints();
        self.checkpoint_locked(Purpose::GoOn)?;
        let mender = mender(self);
        let gate = self.writeback.lock();
        let commit = self.log.lock();
        let through = self.writeback.stop_through();
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        meta.pages.drop_clean();
        meta.pages.set_mender(Some(mender));
        let used = meta.data.counts().used;
        // The verification of data uses journalled payload instead of the blocks to which the payload is not written
        // yet.
        let logged = std::mem::take(&mut meta.logged);
        let standing = StoreActivity::Stopped(&logged);
        let checked = self.check_sight(&mut meta.sight(), standing, used, options, progress, &mut report);
        for number in std::mem::take(&mut report.renewed_catalog) {
            meta.catalog.renew_page(&mut meta.pages, number);
        }
        meta.logged = logged;
        let mended = self.note_mended(meta, &mut report);
        meta.pages.set_mender(None);
        let compared = self.compare_regions(meta, &mut report);
        let counted = if report.repairs > 0 { self.recount(meta) } else { Ok(()) };
        // A change that uses a repaired block must not be in the journal before the repair is durable. Only small
        // changes that were admitted before the check may be appended: announcements, reservations and resolved blocks.
        // Admission ends before the metadata is unlocked, because some changes need none of the other locks: a step of
        // sharing, and what reserves or discards a range of a new disk.
        let closed = self.log.admission.close();
        self.update_headroom(meta);
        drop(guard);
        let standing = StoreActivity::Stopped(&Default::default());
        let checked = checked.and(mended).and(compared).and(counted);
        let checked = checked.and_then(|()| self.compare_room(standing, true, &mut report));
        drop(through);
        drop(commit);
        drop(gate);
        // No record describes the repairs. Also after an interruption or a failure, later changes rely on them, and are
        // replayed on the state of the last checkpoint.
        if report.repairs > 0 {
            self.checkpoint_locked(Purpose::GoOn)?;
        }
        drop(closed);
        drop(checkpoint);
        drop(punching);
        if report.repairs > 0 {
            // The space of free blocks in a rebuilt page was returned, although acknowledged writes and thick disks may
            // need these blocks.
            self.extend_ahead()?;
        }
        checked.map(|()| report)
    }

    /// Counts references, compares them with the tables, and verifies data blocks.
    pub(super) fn check_sight(
        &self,
        sight: &mut Sight<'_>,
        standing: StoreActivity<'_>,
        used: u64,
        options: CheckOptions,
        progress: &dyn Fn(u64, u64) -> bool,
        report: &mut Report,
    ) -> Result<()> {
        let roots = check_catalog(sight.catalog, report);
        let mut damaged = sight.find_damaged();
        self.report_damaged(sight, &damaged, options.repair, report);
        if options.repair {
            report.renewed_catalog.extend(damaged.catalog.iter().map(|(key, _)| key.number()));
        }
        let windows = sight.data.blocks().div_ceil(WINDOW_BLOCKS).max(1);
        let total = windows * roots.len() as u64 + if options.data { used } else { 0 };
        let mut steps = Steps { done: 0, total, progress };
        let mut nodes: Vec<u32> = vec![0; sight.map.blocks() as usize];
        let mut lost = BTreeMap::new();
        let mut missing: BTreeMap<u64, u64> = BTreeMap::new();
        for number in 0..windows {
            let range = number * WINDOW_BLOCKS..((number + 1) * WINDOW_BLOCKS).min(sight.data.blocks());
            let mut window = Window { counts: vec![0; (range.end - range.start) as usize], range };
            let mut seen = vec![false; nodes.len()];
            for root in &roots {
                count_tree(sight, root, number == 0, &mut nodes, &mut seen, &mut window, &mut lost)?;
                steps.pass(1)?;
            }
            // A tree that cannot be read completely may refer to any block, so nothing is reported as a leak.
            let whole = lost.is_empty() && sight.catalog.lost().is_empty();
            let repair = options.repair && whole;
            self.find_emptied(sight, standing, &window, if number == 0 { &nodes } else { &[] }, &mut damaged);
            if number == 0 {
                self.note_lost_nodes(sight, &roots, &lost, report)?;
                report.pages = seen.iter().filter(|seen| **seen).count() as u64;
                self.renew_node_tables(sight, &roots, &damaged, &nodes, repair, report);
                self.compare_nodes(sight, &nodes, repair, report)?;
            }
            self.renew_block_tables(sight, &roots, &damaged, &mut window, repair, report)?;
            self.compare_blocks(sight, &roots, &window, repair, report)?;
            let there = self.files.count() * FILE_BLOCKS;
            for block in window.range.start.max(there)..window.range.end {
                if window.counts[(block - window.range.start) as usize] > 0 {
                    *missing.entry(block / FILE_BLOCKS).or_default() += 1;
                }
            }
            if !report.compares_later {
                self.compare_renewed(sight, standing, &mut window, report, &mut steps)?;
            }
            if options.data {
                self.verify_window(sight, standing, &window, report, &mut steps)?;
            }
        }
        if !report.compares_later {
            report.renewed.clear();
        }
        for (file, blocks) in missing {
            let name = data_file_name(file);
            let text = format!("{name} is missing, with {blocks} blocks of data: restore the file from a backup");
            report.add(text, None);
        }
        Ok(())
    }

    /// Reports damaged pages of `map.table`, and with `repair` rebuilds them.
    fn renew_node_tables(
        &self,
        sight: &mut Sight<'_>,
        roots: &[Root],
        damaged: &Damaged,
        nodes: &[u32],
        repair: bool,
        report: &mut Report,
    ) {
        for (page, why) in &damaged.map_tables {
            let (first, last) = (page * TABLE_ENTRIES, (page + 1) * TABLE_ENTRIES - 1);
            let mut done = None;
            if repair && self.has_room_for_repair(sight) {
                sight.renew_nodes(*page, nodes);
                done = Some("recounted from the trees".to_owned());
            }
            let named: Vec<&str> = roots.iter().map(|root| root.name.as_str()).take(4).collect();
            let whose = if roots.len() > named.len() { ", and others" } else { "" };
            report.add(
                format!(
                    "page {page} of map.table is damaged. It has the reference counts of map nodes {first} to {last}, \
                     which belong to the trees of {}{whose}: {why}",
                    named.join(", ")
                ),
                done,
            );
        }
    }

    /// Reports damaged pages of `data.table`, and with `repair` rebuilds them.
    fn renew_block_tables(
        &self,
        sight: &mut Sight<'_>,
        roots: &[Root],
        damaged: &Damaged,
        window: &mut Window,
        repair: bool,
        report: &mut Report,
    ) -> Result<()> {
        let is_here = |page: u64| window.range.contains(&(page * TABLE_ENTRIES));
        let pages: Vec<(u64, &String)> =
            damaged.data_tables.iter().map(|(page, why)| (*page, why)).filter(|(page, _)| is_here(*page)).collect();
        let place = |(number, _): &(u64, &String)| DamagedPlace::Page { file: PageFile::DataTable, number: *number };
        let owners =
            sight.owners_of(roots, &pages.iter().map(place).collect::<Vec<_>>(), report.room(), WHOLE_PACKS)?;
        for ((page, why), owners) in pages.into_iter().zip(owners) {
            let blocks = page * TABLE_ENTRIES..(page + 1) * TABLE_ENTRIES;
            let mut done = None;
            if repair && self.has_room_for_repair(sight) {
                sight.renew_blocks(page, window);
                report.renewed.push(page);
                done = Some("recounted from the trees".to_owned());
            } else {
                window.clear(blocks.clone());
            }
            report.add_at(
                format!(
                    "page {page} of data.table is damaged. It has the reference counts and checksums of data blocks {} \
                     to {}, which contain {}: {why}",
                    blocks.start,
                    blocks.end - 1,
                    owners.ranges()
                ),
                done,
                owners.places(),
            );
        }
        Ok(())
    }

    /// Finds space of the data files that no block in the table accounts for.
    fn compare_room(&self, standing: StoreActivity<'_>, repair: bool, report: &mut Report) -> Result<()> {
        let running = matches!(standing, StoreActivity::Running);
        if running {
            // Returns to the file system the unclaimed space (not counted as backed) that a crash left, and the space
            // that could not be punched earlier: neither is a leak.
            self.return_unclaimed_room(true, || self.running.goes_on());
            self.return_rest();
        }
        self.unclaimed_room(running, &mut |file, run| {
            let bytes = run.blocks * BLOCK_SIZE as u64;
            report.leaked += bytes;
            if repair {
                self.files.touch(run);
                crate::engine::reserve::punch(file, run)?;
            }
            report.add(
                format!("{bytes} bytes of the file system at data block {} are unreferenced", run.start),
                repair.then(|| "given back".to_owned()),
            );
            Ok(())
        })
    }
}

impl Engine {
    /// Whether one more repaired page fits into the checkpoint that will make the repairs durable. If the file system
    /// has no room for a larger checkpoint, the next check repairs the rest.
    pub(super) fn has_room_for_repair(&self, sight: &Sight<'_>) -> bool {
        let wanted =
            sight.pages.dirty() as u64 + sight.data.changed_regions() + sight.map.changed_regions() + REPAIR_AHEAD;
        let larger = self.log.admission.capacity() * 2;
        wanted <= self.log.admission.capacity() || self.reserve_images(wanted.max(larger)).is_ok()
    }

    fn compare_nodes(&self, sight: &mut Sight<'_>, nodes: &[u32], repair: bool, report: &mut Report) -> Result<()> {
        for (id, counted) in (0u64..).zip(nodes) {
            // A damaged page of the table is reported by `renew_node_tables`.
            let Ok(BlockEntry { references: known, .. }) = sight.map.entry(sight.pages, id) else { continue };
            if known == *counted {
                continue;
            }
            if *counted == 0 {
                report.leaked += BLOCK_SIZE as u64;
            }
            let mut done = None;
            if repair && self.has_room_for_repair(sight) {
                sight.map.repair_references(sight.pages, id, *counted)?;
                done = Some(format!("set to {counted}"));
            }
            report.add(format!("map node {id} has {known} references in the table and {counted} in the trees"), done);
        }
        Ok(())
    }

    fn compare_blocks(
        &self,
        sight: &mut Sight<'_>,
        roots: &[Root],
        window: &Window,
        repair: bool,
        report: &mut Report,
    ) -> Result<()> {
        let mut absent = Vec::new();
        for (block, counted) in window.range.clone().zip(&window.counts) {
            let counted = counted & !WRITTEN;
            report.blocks += u64::from(counted > 0);
            let Ok(BlockEntry { references: known, checksum, suspect, .. }) = sight.entry(block) else { continue };
            // A repair that was interrupted, or one of an earlier version, has left a written block without a checksum.
            if repair && checksum == 0 && !suspect && window.written(block) {
                report.renewed.push(block / TABLE_ENTRIES);
            }
            // A block that has had more references than the table can count is no damage while something maps it.
            let uncounted = known == BlockEntry::REFERENCES_MAX && counted > 0 && !repair;
            if known == counted || uncounted {
                continue;
            }
            if counted == 0 {
                report.leaked += BLOCK_SIZE as u64;
            }
            let mut done = None;
            if repair && self.has_room_for_repair(sight) {
                sight.data.repair_references(sight.pages, block, counted)?;
                done = Some(format!("set to {counted}"));
            }
            if known == 0 {
                absent.push((block, done));
                continue;
            }
            let text = format!("data block {block} has {known} references in the table and {counted} in the trees");
            report.add(text, done);
        }
        report_absent(sight, roots, absent, report)
    }
}

/// Reports records that refer to objects which do not exist. Returns the trees to walk.
pub(super) fn check_catalog(catalog: &Catalog, report: &mut Report) -> Vec<Root> {
    let mut roots = Vec::new();
    for object in catalog.objects() {
        let short = match object.state {
            ObjectState::Disk => object.name.clone(),
            ObjectState::Snapshot | ObjectState::Unsealed => {
                let disk = catalog.find(object.disk).map_or("?", |disk| disk.name.as_str());
                format!("{disk}@{}", object.name)
            }
            ObjectState::Trash => format!("deleted object {}", object.id),
        };
        let name = match object.state {
            ObjectState::Disk => format!("disk '{short}'"),
            ObjectState::Snapshot | ObjectState::Unsealed => format!("snapshot '{short}'"),
            ObjectState::Trash => short.clone(),
        };
        if object.is_snapshot() && catalog.find(object.disk).is_none() {
            report.add(format!("{name} belongs to a disk that does not exist"), None);
        }
        for (what, id) in [("parent snapshot", object.parent), ("origin", object.origin)] {
            if id != 0
                && object.state != ObjectState::Trash
                && catalog.find(id).is_none_or(|other| !other.is_snapshot())
            {
                report.add(format!("{name} has a {what} that does not exist"), None);
            }
        }
        if let Some(node) = object.root {
            roots.push(Root { name, short, node, blocks: object.size_in_blocks() });
        }
    }
    roots.sort_by(|a, b| a.name.cmp(&b.name));
    roots
}

/// Counts the references of all trees to the blocks of a range. Nodes are counted too if `nodes` holds only zeros.
pub(super) fn count_trees(sight: &mut Sight<'_>, range: Range<u64>, nodes: &mut [u32]) -> Result<Window> {
    let roots = check_catalog(sight.catalog, &mut Report::default());
    let first = nodes.iter().all(|count| *count == 0);
    let mut window = Window { counts: vec![0; (range.end - range.start) as usize], range };
    let mut seen = vec![false; nodes.len()];
    for root in &roots {
        count_tree(sight, root, first, nodes, &mut seen, &mut window, &mut BTreeMap::new())?;
    }
    Ok(window)
}

/// Adds the references of one tree. Nodes are counted in the first pass only. A leaf that was visited before is
/// skipped.
fn count_tree(
    sight: &mut Sight<'_>,
    root: &Root,
    first: bool,
    nodes: &mut [u32],
    seen: &mut [bool],
    window: &mut Window,
    lost: &mut BTreeMap<u64, String>,
) -> Result<()> {
    let mut effects = Effects::default();
    let mut visit = |visit: Visit| match visit {
        Visit::Node { id, .. } => {
            // A node number beyond the end of the map cannot be read: the walk reports it as damaged.
            let Some(known) = seen.get_mut(id.0 as usize) else { return Ok(true) };
            if first {
                nodes[id.0 as usize] += 1;
            }
            Ok(!std::mem::replace(known, true))
        }
        Visit::Extent(mapping) => {
            let stored = mapping.stored();
            let from = stored.physical.max(window.range.start);
            let to = (stored.physical + stored.blocks).min(window.range.end);
            for block in from..to {
                let count = &mut window.counts[(block - window.range.start) as usize];
                // The table counts no further either.
                *count += u32::from(*count & !WRITTEN < BlockEntry::REFERENCES_MAX);
                if !mapping.unwritten {
                    *count |= WRITTEN;
                }
            }
            Ok(true)
        }
    };
    let mut damaged = |id: NodeId, _: Range<u64>, error: Error| drop(lost.insert(id.0, error.to_string()));
    tree::walk_damaged(&mut sight.nodes(&mut effects), root.node, &mut visit, &mut damaged)
}
