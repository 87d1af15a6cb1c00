//! `check`: walks everything the catalog reaches, counts references, and compares with what the tables say.
//!
//! Without `repair` the store goes on meanwhile: what is walked is the state that a checkpoint left
//! (`metadata/view.rs`), whole and exact, read from the medium. So a check reports what was wrong at that moment, and
//! nothing that changes look like; it stops others no longer than a checkpoint does. Data blocks are verified as they
//! are when they are read ([`super::verify`]), and the room of the file system region by region.
//!
//! With `repair` everything stands still from the first count to the last change: writes wait in the buffer, and reads
//! too.
//!
//! Data blocks are counted window by window, so that memory does not grow with the size of the store; each window walks
//! the trees again.

use super::Engine;
use super::checkpoint::Purpose;
use super::metadata::{Effects, Sight, View};
use super::verify::Standing;
use crate::catalog::{Catalog, State};
use crate::space::TABLE_ENTRIES;
use crate::tree::{self, NodeId, Visit};
use crate::{Error, ErrorKind, Result};
use backend::BLOCK_SIZE;
use std::ops::Range;

/// Findings listed one by one; the rest is only counted.
const FINDINGS_MAX: usize = 1000;
/// Data blocks counted in one pass: 64 MiB of memory for 64 GiB of data.
const WINDOW_BLOCKS: u64 = 1 << 24;
/// Pages kept for what a repair changes last: summaries and the catalog.
const REPAIR_AHEAD: u64 = 64;
/// Marks a counted block that some tree maps as written.
const WRITTEN: u32 = 1 << 31;
/// Rounds of dropping deleted trees before a check begins: under load there may always be another.
const TRASH_ROUNDS: usize = 256;

/// What `check` shall do.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// Read every data block and verify its checksum.
    pub data: bool,
    /// Repair what can be repaired.
    pub repair: bool,
}

/// One thing found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What is wrong, and where.
    pub problem: String,
    /// What was done about it.
    pub repaired: Option<String>,
}

/// What `check` did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Metadata pages walked.
    pub pages: u64,
    /// Data blocks referenced.
    pub blocks: u64,
    /// Data blocks read and verified.
    pub verified: u64,
    /// Bytes that nothing refers to.
    pub leaked: u64,
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// Findings beyond those listed.
    pub unlisted: u64,
}

impl Report {
    pub(super) fn add(&mut self, problem: String, repaired: Option<String>) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(Finding { problem, repaired });
        } else {
            self.unlisted += 1;
        }
    }
}

/// A tree to walk, and what to call it.
struct Root {
    name: String,
    node: NodeId,
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
}

/// Counts what is done, and asks whether to go on: (done, total).
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
        Err(Error::new(ErrorKind::Interrupted, "the check was stopped; what it had not reported is as it was"))
    }
}

impl Engine {
    /// Makes a checkpoint, and the view of what it left. One view at a time.
    fn view(&self) -> Result<View> {
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
        if options.repair { self.check_stopped(options, progress) } else { self.check_running_store(options, progress) }
    }

    /// Checks while the store goes on.
    fn check_running_store(&self, options: CheckOptions, progress: &dyn Fn(u64, u64) -> bool) -> Result<Report> {
        self.commit_changes()?;
        for _ in 0..TRASH_ROUNDS {
            if !self.drop_all_trash()? {
                break;
            }
        }
        let mut report = Report::default();
        let mut view = self.view()?;
        let used = view.used;
        let checked = self.check_sight(&mut view.sight(), Standing::Running, used, options, progress, &mut report);
        // A view that was lost says nothing, whatever it seemed to show.
        view.check()?;
        checked?;
        drop(view);
        self.compare_room(Standing::Running, false, &mut report)?;
        Ok(report)
    }

    /// Checks and repairs while everything stands still.
    fn check_stopped(&self, options: CheckOptions, progress: &dyn Fn(u64, u64) -> bool) -> Result<Report> {
        let _control = self.control.lock();
        // A hole about to be punched is no leak.
        let _punching = self.reserves.lock_punching();
        self.commit_changes()?;
        while self.drop_all_trash()? {}
        let checkpoint = self.log.lock_checkpoints();
        self.checkpoint_locked(Purpose::GoOn)?;
        let gate = self.writeback.lock();
        let commit = self.log.lock();
        let through = self.writeback.stop_through();
        let mut report = Report::default();
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        meta.pages.drop_clean();
        let used = meta.data.counts().used;
        // Payload that flushes have put into the journal since: it is not home.
        let logged = std::mem::take(&mut meta.logged);
        let standing = Standing::Stopped(&logged);
        let checked = self.check_sight(&mut meta.sight(), standing, used, options, progress, &mut report);
        meta.logged = logged;
        let repaired = report.findings.iter().any(|finding| finding.repaired.is_some());
        if repaired {
            meta.map.recount(&mut meta.pages)?;
            meta.data.recount(&mut meta.pages)?;
        }
        checked?;
        drop(guard);
        self.compare_room(Standing::Stopped(&Default::default()), true, &mut report)?;
        drop(through);
        drop(commit);
        drop(gate);
        if report.findings.iter().any(|finding| finding.repaired.is_some()) {
            self.checkpoint_locked(Purpose::GoOn)?;
        }
        drop(checkpoint);
        Ok(report)
    }

    /// Counts, compares and verifies.
    fn check_sight(
        &self,
        sight: &mut Sight<'_>,
        standing: Standing<'_>,
        used: u64,
        options: CheckOptions,
        progress: &dyn Fn(u64, u64) -> bool,
        report: &mut Report,
    ) -> Result<()> {
        let roots = check_catalog(sight.catalog, report);
        let windows = sight.data.blocks().div_ceil(WINDOW_BLOCKS).max(1);
        let total = windows * roots.len() as u64 + if options.data { used } else { 0 };
        let mut steps = Steps { done: 0, total, progress };
        let mut nodes: Vec<u32> = vec![0; sight.map.blocks() as usize];
        let mut readable = true;
        for number in 0..windows {
            let range = number * WINDOW_BLOCKS..((number + 1) * WINDOW_BLOCKS).min(sight.data.blocks());
            let mut window = Window { counts: vec![0; (range.end - range.start) as usize], range };
            let mut seen = vec![false; nodes.len()];
            for root in &roots {
                if let Err(error) = count_tree(sight, root, number == 0, &mut nodes, &mut seen, &mut window) {
                    readable = false;
                    if number == 0 {
                        report.add(format!("{}: {error}", root.name), None);
                    }
                }
                steps.pass(1)?;
            }
            // A tree that cannot be read whole keeps what it refers to: nothing is called a leak then.
            let repair = options.repair && readable;
            if number == 0 {
                report.pages = seen.iter().filter(|seen| **seen).count() as u64;
                self.compare_nodes(sight, &nodes, repair, report)?;
            }
            self.compare_blocks(sight, &window, repair, report)?;
            if options.data {
                self.verify_window(sight, standing, &window, report, &mut steps)?;
            }
        }
        Ok(())
    }

    /// Space of the file system that no block claims.
    fn compare_room(&self, standing: Standing<'_>, repair: bool, report: &mut Report) -> Result<()> {
        self.unclaimed_room(matches!(standing, Standing::Running), &mut |file, run| {
            let bytes = run.blocks * BLOCK_SIZE as u64;
            report.leaked += bytes;
            if repair {
                self.files.touch(run);
                crate::engine::reserve::punch(file, run)?;
            }
            report.add(
                format!("{bytes} bytes of the file system at data block {} belong to nothing", run.start),
                repair.then(|| "given back".to_owned()),
            );
            Ok(())
        })
    }
}

impl Engine {
    /// Whether one more repaired page fits into the checkpoint that will make the repairs durable. Where the file
    /// system has no room for a larger one, the rest is left to the next check.
    fn has_room_for_repair(&self, sight: &Sight<'_>) -> bool {
        let wanted =
            sight.pages.dirty() as u64 + sight.data.changed_regions() + sight.map.changed_regions() + REPAIR_AHEAD;
        let larger = self.log.admission.capacity() * 2;
        wanted <= self.log.admission.capacity() || self.reserve_images(wanted.max(larger)).is_ok()
    }

    fn compare_nodes(&self, sight: &mut Sight<'_>, nodes: &[u32], repair: bool, report: &mut Report) -> Result<()> {
        for (id, counted) in (0u64..).zip(nodes) {
            let known = match sight.map.entry(sight.pages, id) {
                Ok(entry) => entry.references,
                Err(error) => {
                    if id % TABLE_ENTRIES == 0 {
                        report.add(error.to_string(), None);
                    }
                    continue;
                }
            };
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

    fn compare_blocks(&self, sight: &mut Sight<'_>, window: &Window, repair: bool, report: &mut Report) -> Result<()> {
        for (block, counted) in window.range.clone().zip(&window.counts) {
            let counted = counted & !WRITTEN;
            report.blocks += u64::from(counted > 0);
            let known = match sight.entry(block) {
                Ok(entry) => entry.references,
                Err(error) => {
                    if block % TABLE_ENTRIES == 0 {
                        report.add(error.to_string(), None);
                    }
                    continue;
                }
            };
            if known == counted {
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
            report.add(
                format!("data block {block} has {known} references in the table and {counted} in the trees"),
                done,
            );
        }
        Ok(())
    }
}

/// Objects must refer to objects that exist.
fn check_catalog(catalog: &Catalog, report: &mut Report) -> Vec<Root> {
    let mut roots = Vec::new();
    for object in catalog.objects() {
        let name = match object.state {
            State::Disk => format!("disk '{}'", object.name),
            State::Snapshot | State::Unsealed => {
                let disk = catalog.find(object.disk).map_or("?", |disk| disk.name.as_str());
                format!("snapshot '{disk}@{}'", object.name)
            }
            State::Trash => format!("deleted object {}", object.id),
        };
        if object.is_snapshot() && catalog.find(object.disk).is_none() {
            report.add(format!("{name} belongs to a disk that does not exist"), None);
        }
        for (what, id) in [("parent snapshot", object.parent), ("origin", object.origin)] {
            if id != 0 && object.state != State::Trash && catalog.find(id).is_none_or(|other| !other.is_snapshot()) {
                report.add(format!("{name} has a {what} that does not exist"), None);
            }
        }
        if let Some(node) = object.root {
            roots.push(Root { name, node });
        }
    }
    roots.sort_by(|a, b| a.name.cmp(&b.name));
    roots
}

/// Adds the references of one tree. Nodes are counted in the first pass; leaves met before are not entered again.
fn count_tree(
    sight: &mut Sight<'_>,
    root: &Root,
    first: bool,
    nodes: &mut [u32],
    seen: &mut [bool],
    window: &mut Window,
) -> Result<()> {
    let mut effects = Effects::default();
    let beyond = |id: u64| Error::new(ErrorKind::Corrupt, format!("map node {id} lies past the end of the map"));
    tree::walk(&mut sight.nodes(&mut effects), root.node, &mut |visit| match visit {
        Visit::Node { id, .. } => {
            let at = id.0 as usize;
            if first {
                *nodes.get_mut(at).ok_or_else(|| beyond(id.0))? += 1;
            }
            let known = seen.get_mut(at).ok_or_else(|| beyond(id.0))?;
            Ok(!std::mem::replace(known, true))
        }
        Visit::Extent(mapping) => {
            let from = mapping.physical.max(window.range.start);
            let to = (mapping.physical + mapping.blocks).min(window.range.end);
            for block in from..to {
                let count = &mut window.counts[(block - window.range.start) as usize];
                *count += 1;
                if !mapping.unwritten {
                    *count |= WRITTEN;
                }
            }
            Ok(true)
        }
    })
}

/// Who maps a data block: for the message about a damaged one.
pub(super) fn owners_of(sight: &mut Sight<'_>, block: u64) -> Result<String> {
    let mut report = Report::default();
    let mut names = Vec::new();
    for root in check_catalog(sight.catalog, &mut report) {
        let mut effects = Effects::default();
        let mut at = None;
        let walked = tree::walk(&mut sight.nodes(&mut effects), root.node, &mut |visit| {
            if let Visit::Extent(mapping) = visit
                && (mapping.physical..mapping.physical + mapping.blocks).contains(&block)
            {
                at = Some((mapping.logical + (block - mapping.physical)) * BLOCK_SIZE as u64);
            }
            Ok(at.is_none())
        });
        if let (Ok(()), Some(offset)) = (walked, at) {
            names.push(format!("{} at offset {offset}", root.name));
        }
        if names.len() >= 4 {
            names.push("and more".into());
            break;
        }
    }
    Ok(names.join(", "))
}
