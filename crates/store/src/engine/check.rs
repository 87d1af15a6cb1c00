//! `check`: walks everything the catalog reaches, counts references, and compares with what the tables say.
//!
//! The store is brought to a checkpoint first and nothing changes it meanwhile: writes wait in the buffer, reads of
//! other data go on between the steps. Pages are read from the medium, not from the cache. Data blocks are counted
//! window by window, so that memory does not grow with the size of the store; each window walks the trees again.

use super::apply::Effects;
use super::checkpoint::Purpose;
use super::{Engine, Meta};
use crate::catalog::State;
use crate::space::{Run, TABLE_ENTRIES};
use crate::tree::{self, NodeId, Visit};
use crate::{Error, ErrorKind, IoContext, Result, checksum};
use backend::{BLOCK_SIZE, Buffer};
use std::ops::Range;

/// Findings listed one by one; the rest is only counted.
const FINDINGS_MAX: usize = 1000;
/// Data blocks counted in one pass: 64 MiB of memory for 64 GiB of data.
const WINDOW_BLOCKS: u64 = 1 << 24;
/// Blocks read at a time when data is verified (1 MiB).
const VERIFY_BLOCKS: u64 = 256;
/// Pages kept for what a repair changes last: summaries and the catalog.
const REPAIR_AHEAD: u64 = 64;
/// Marks a counted block that some tree maps as written.
const WRITTEN: u32 = 1 << 31;

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
    fn add(&mut self, problem: String, repaired: Option<String>) {
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
struct Window {
    range: Range<u64>,
    counts: Vec<u32>,
}

impl Engine {
    /// Checks the store; `progress` gets (done, total) and returns false to stop.
    pub fn check(&self, options: CheckOptions, progress: &dyn Fn(u64, u64) -> bool) -> Result<Report> {
        let _control = self.control.lock();
        // A hole about to be punched is no leak.
        let _punching = self.punching.lock();
        self.commit_changes()?;
        while self.drop_all_trash()? {}
        let checkpoint = self.checkpoint.lock();
        self.checkpoint_locked(Purpose::GoOn)?;
        let _gate = self.gate.lock();
        let _commit = self.commit.lock();
        let _through = self.through.write();
        let mut report = Report::default();
        let mut meta = self.meta.lock();
        meta.pages.drop_clean();
        let roots = check_catalog(&meta, &mut report);
        let windows = meta.data.blocks().div_ceil(WINDOW_BLOCKS).max(1);
        let total = windows * roots.len() as u64 + if options.data { meta.data.counts().used } else { 0 };
        let mut done = 0;
        let mut step = |count: u64| -> Result<()> {
            done += count;
            if progress(done.min(total), total) {
                return Ok(());
            }
            Err(Error::new(ErrorKind::Interrupted, "the check was stopped; what it had not reported is as it was"))
        };
        let mut nodes: Vec<u32> = vec![0; meta.map.blocks() as usize];
        let mut readable = true;
        for number in 0..windows {
            let range = number * WINDOW_BLOCKS..((number + 1) * WINDOW_BLOCKS).min(meta.data.blocks());
            let mut window = Window { counts: vec![0; (range.end - range.start) as usize], range };
            let mut seen = vec![false; nodes.len()];
            for root in &roots {
                if let Err(error) = count_tree(&mut meta, root, number == 0, &mut nodes, &mut seen, &mut window) {
                    readable = false;
                    if number == 0 {
                        report.add(format!("{}: {error}", root.name), None);
                    }
                }
                step(1)?;
            }
            // A tree that cannot be read whole keeps what it refers to: nothing is called a leak then.
            let repair = options.repair && readable;
            if number == 0 {
                report.pages = seen.iter().filter(|seen| **seen).count() as u64;
                self.compare_nodes(&mut meta, &nodes, repair, &mut report)?;
            }
            self.compare_blocks(&mut meta, &window, repair, &mut report)?;
            if options.data {
                self.verify_window(&mut meta, &window, &mut report, &mut step)?;
            }
        }
        if report.findings.iter().any(|finding| finding.repaired.is_some()) {
            let meta = &mut *meta;
            meta.map.recount(&mut meta.pages)?;
            meta.data.recount(&mut meta.pages)?;
        }
        drop(meta);
        self.compare_room(options.repair, &mut report)?;
        drop(_through);
        drop(_commit);
        drop(_gate);
        if report.findings.iter().any(|finding| finding.repaired.is_some()) {
            self.checkpoint_locked(Purpose::GoOn)?;
        }
        drop(checkpoint);
        Ok(report)
    }

    /// Reads and verifies the written blocks of a window.
    fn verify_window(
        &self,
        meta: &mut Meta,
        window: &Window,
        report: &mut Report,
        step: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let written = |block: u64| window.counts[(block - window.range.start) as usize] & WRITTEN != 0;
        let mut at = window.range.start;
        while at < window.range.end {
            if !written(at) {
                at += 1;
                continue;
            }
            let mut end = at + 1;
            while end < window.range.end
                && end - at < VERIFY_BLOCKS
                && written(end)
                && !end.is_multiple_of(crate::space::FILE_BLOCKS)
            {
                end += 1;
            }
            let run = Run { start: at, blocks: end - at };
            let (file, offset) = self.files.locate(run)?;
            let mut bytes = Buffer::zeroed(run.blocks as usize);
            let whole = file.read_at(&mut bytes, offset);
            for (block, content) in (at..end).zip(bytes.chunks_exact_mut(BLOCK_SIZE)) {
                // One bad sector must not hide its neighbours.
                let read = match &whole {
                    Ok(()) => Ok(()),
                    Err(_) => self.files.locate(Run { start: block, blocks: 1 }).and_then(|(file, offset)| {
                        let mut one = Buffer::zeroed(1);
                        file.read_at(&mut one, offset).during(|| format!("reading block {block}"))?;
                        content.copy_from_slice(&one);
                        Ok(())
                    }),
                };
                if let Err(error) = read {
                    report.add(error.to_string(), None);
                    continue;
                }
                let entry = meta.entry(block)?;
                let found = checksum(content);
                if found != entry.checksum && !entry.suspect {
                    let owners = owners_of(meta, block)?;
                    report.add(
                        format!(
                            "data block {block} fails its checksum (expected {:08x}, found {found:08x}): {owners}",
                            entry.checksum
                        ),
                        None,
                    );
                }
                report.verified += 1;
            }
            step(run.blocks)?;
            at = end;
        }
        Ok(())
    }

    /// Space of the file system that no block claims.
    fn compare_room(&self, repair: bool, report: &mut Report) -> Result<()> {
        self.unclaimed_room(&mut |file, run| {
            let bytes = run.blocks * BLOCK_SIZE as u64;
            report.leaked += bytes;
            if repair {
                self.files.touch(run);
                super::room::punch(file, run)?;
            }
            report.add(
                format!("{bytes} bytes of the file system at data block {} belong to nothing", run.start),
                repair.then(|| "given back".to_owned()),
            );
            Ok(())
        })
    }

    /// Whether one more repaired page fits into the checkpoint that will make the repairs durable. Where the file
    /// system has no room for a larger one, the rest is left to the next check.
    fn has_room_for_repair(&self, meta: &Meta) -> bool {
        let wanted =
            meta.pages.dirty() as u64 + meta.data.changed_regions() + meta.map.changed_regions() + REPAIR_AHEAD;
        let larger = self.admission.capacity() * 2;
        wanted <= self.admission.capacity() || self.reserve_images(wanted.max(larger)).is_ok()
    }

    fn compare_nodes(&self, meta: &mut Meta, nodes: &[u32], repair: bool, report: &mut Report) -> Result<()> {
        for (id, counted) in (0u64..).zip(nodes) {
            let known = match meta.map.entry(&mut meta.pages, id) {
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
            if repair && self.has_room_for_repair(meta) {
                meta.map.repair_references(&mut meta.pages, id, *counted)?;
                done = Some(format!("set to {counted}"));
            }
            report.add(format!("map node {id} has {known} references in the table and {counted} in the trees"), done);
        }
        Ok(())
    }

    fn compare_blocks(&self, meta: &mut Meta, window: &Window, repair: bool, report: &mut Report) -> Result<()> {
        for (block, counted) in window.range.clone().zip(&window.counts) {
            let counted = counted & !WRITTEN;
            report.blocks += u64::from(counted > 0);
            let known = match meta.entry(block) {
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
            if repair && self.has_room_for_repair(meta) {
                meta.data.repair_references(&mut meta.pages, block, counted)?;
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
fn check_catalog(meta: &Meta, report: &mut Report) -> Vec<Root> {
    let mut roots = Vec::new();
    for object in meta.catalog.objects() {
        let name = match object.state {
            State::Disk => format!("disk '{}'", object.name),
            State::Snapshot | State::Unsealed => {
                let disk = meta.catalog.find(object.disk).map_or("?", |disk| disk.name.as_str());
                format!("snapshot '{disk}@{}'", object.name)
            }
            State::Trash => format!("deleted object {}", object.id),
        };
        if object.is_snapshot() && meta.catalog.find(object.disk).is_none() {
            report.add(format!("{name} belongs to a disk that does not exist"), None);
        }
        for (what, id) in [("parent snapshot", object.parent), ("origin", object.origin)] {
            if id != 0 && object.state != State::Trash && meta.catalog.find(id).is_none_or(|other| !other.is_snapshot())
            {
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
    meta: &mut Meta,
    root: &Root,
    first: bool,
    nodes: &mut [u32],
    seen: &mut [bool],
    window: &mut Window,
) -> Result<()> {
    let mut effects = Effects::default();
    let beyond = |id: u64| Error::new(ErrorKind::Corrupt, format!("map node {id} lies past the end of the map"));
    tree::walk(&mut meta.nodes(&mut effects), root.node, &mut |visit| match visit {
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
fn owners_of(meta: &mut Meta, block: u64) -> Result<String> {
    let mut report = Report::default();
    let mut names = Vec::new();
    for root in check_catalog(meta, &mut report) {
        let mut effects = Effects::default();
        let mut at = None;
        let walked = tree::walk(&mut meta.nodes(&mut effects), root.node, &mut |visit| {
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
