//! Write-back: buffered entries to their places on the medium, in order of address.
//!
//! A batch runs under the gate: plan (which blocks may be overwritten in place, which need new places), announce the
//! overwrites durably, write, and then, piece by piece as writes finish, change the map and take the piece out of the
//! buffer. Readers see the buffered copy until the map names the new one, both under the buffer's lock.

use super::admission::Cost;
use super::admit::{Touched, batch_bytes};
use super::apply::Effects;
use super::fetch::Fetch;
use super::placement::{BlockState, Placement, place};
use super::{Committer, Engine, Head, Meta};
use crate::buffer::{Content, Piece};
use crate::journal::{BatchKind, Operation, Writer};
use crate::space::Run;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::tree::{self, Aim, Extent};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::{BLOCK_SIZE, Completion, File, IoMode, Queue, SharedSlice};
use std::ops::Range;
use std::sync::Arc;

/// Blocks of data per batch: short enough that a flush does not wait long for the gate (a few milliseconds), long
/// enough that announcements are few.
fn batch_blocks(mode: IoMode) -> u64 {
    match mode {
        IoMode::Buffered => 1024,
        IoMode::Direct => 256,
    }
}

/// Runs of new places from this many bytes go to the medium at once, through the page cache as they may: left to the
/// next flush, they would make it, and every append to the journal beside it, wait for hundreds of megabytes.
const WRITE_OUT_MIN: u64 = 256 << 10;
/// Blocks in one write (1 MiB).
const GROUP_BLOCKS_MAX: u64 = 256;
/// Short writes that are brought into the map together.
const GROUPS_PER_FINISH: usize = 32;
/// Pieces brought into the map under one hold of the locks: readers and writers of the disk wait no longer than that.
const HOMES_PER_HOLD: usize = 64;
/// Slices per write: the kernel takes no more (`IOV_MAX`).
pub(super) const SLICES_MAX: usize = 1000;
/// Operations in flight of one lane.
pub(super) const LANE_DEPTH: u32 = 64;

/// Pages that a block written somewhere dirties, about ...
const PAGES_PER_BLOCK: u64 = 16;
/// ... and the smallest batch that is cut no further, in blocks.
const BATCH_MIN: u64 = 64;

/// What write-back keeps between batches.
pub struct Lane {
    pub(super) queue: Box<dyn Queue>,
    /// Disk served last.
    last: u64,
}

impl Lane {
    pub(super) fn new(queue: Box<dyn Queue>) -> Self {
        Self { queue, last: 0 }
    }
}

/// What became of a batch.
enum Batch {
    /// Nothing is buffered.
    Empty,
    /// Written.
    Done,
    /// Something of it is still buffered: there was no room for this.
    Refused(Cost),
}

impl Home {
    /// What bringing it into the map will need.
    fn survey(&self, meta: &mut Meta, disk: u64) {
        meta.survey_run(self.run);
        if self.placement != Placement::InPlace {
            meta.survey_disk(disk, self.logical..self.logical + self.run.blocks, Aim::Map);
        }
    }
}

/// What is to be planned.
pub(super) struct Attempt {
    pub pieces: Vec<Piece>,
    /// The journal has been waited for, and blocks that were held then no longer are.
    pub waited: bool,
}

/// A run of one piece with its place.
pub(super) struct Home {
    placement: Placement,
    logical: u64,
    run: Run,
    data: SharedSlice,
    checksums: Vec<u32>,
    stamp: u64,
}

impl Engine {
    /// Writes back one batch, of the disk that has waited longest. False when no buffer holds anything.
    pub(super) fn write_back_once(&self) -> Result<bool> {
        self.check_running()?;
        self.pace()?;
        let _fetch = self.bring_in_next();
        let appends = self.admit_append()?;
        let mut lane = self.gate.lock();
        let mut heads = self.existing_heads();
        let after = heads.partition_point(|head| head.id <= lane.last);
        heads.rotate_left(after);
        for head in heads {
            match self.write_back(&mut lane, &head)? {
                Batch::Empty => {}
                Batch::Done => {
                    lane.last = head.id;
                    self.written_back.store(head.id, Ordering::Relaxed);
                    MutexGuard::unlock_fair(lane);
                    return Ok(true);
                }
                Batch::Refused(cost) => {
                    lane.last = head.id;
                    self.written_back.store(head.id, Ordering::Relaxed);
                    MutexGuard::unlock_fair(lane);
                    drop(appends);
                    return self.make_room(cost).map(|()| true);
                }
            }
        }
        Ok(false)
    }

    /// Writes back everything that is buffered for a disk now.
    pub fn settle(&self, head: &Head) -> Result<()> {
        loop {
            self.check_running()?;
            self.pace()?;
            let _fetch = self.bring_in_batch(head);
            let appends = self.admit_append()?;
            let mut lane = self.gate.lock();
            let batch = self.write_back(&mut lane, head)?;
            MutexGuard::unlock_fair(lane);
            drop(appends);
            match batch {
                Batch::Empty => return Ok(()),
                Batch::Done => {}
                Batch::Refused(cost) => self.make_room(cost)?,
            }
        }
    }

    /// What the next batch will need of the metadata, before any lock is taken for it.
    fn bring_in_next(&self) -> Fetch {
        let heads = self.existing_heads();
        let after = heads.partition_point(|head| head.id <= self.written_back.load(Ordering::Relaxed));
        let (before, after) = heads.split_at(after);
        let next = after.iter().chain(before).find(|head| !head.buffer.lock().layers.is_empty());
        next.map(|head| self.bring_in_batch(head)).unwrap_or_default()
    }

    fn bring_in_batch(&self, head: &Head) -> Fetch {
        if self.meta.lock().pages.is_warm() {
            return Fetch::default();
        }
        let pieces = self.oldest_pieces(head, batch_blocks(self.options.mode));
        self.bring_in(|meta| meta.survey_pieces(head.id, &pieces))
    }

    /// One batch of one disk.
    fn write_back(&self, lane: &mut Lane, head: &Head) -> Result<Batch> {
        // Smaller where little room is left, so that it need not be cut.
        let batch = batch_blocks(self.options.mode).min((self.admission.pages_left() / PAGES_PER_BLOCK).max(BATCH_MIN));
        let mut commit = self.commit.lock();
        let mut pieces = {
            let mut buffer = head.buffer.lock();
            loop {
                let cursor = buffer.cursor;
                let (layer, closed) = buffer.layers.oldest();
                if layer.is_empty() {
                    if !closed {
                        return Ok(Batch::Empty);
                    }
                    self.seal_oldest(&mut buffer)?;
                    continue;
                }
                let pieces = layer.take(cursor, batch);
                break if pieces.is_empty() { layer.take(0, batch) } else { pieces };
            }
        };
        let (mut homes, mut others, mut claimed) = (Vec::new(), Vec::new(), Vec::new());
        let mut waited = false;
        let (mut meta, grant) = loop {
            let mut meta = self.meta.lock();
            let attempt = Attempt { pieces: pieces.clone(), waited };
            let planned = self
                .plan_homes(&mut meta, head, attempt, &mut homes, &mut others, &mut claimed)
                .and_then(|()| meta.cost_of_homes(head.id, &homes));
            // An announcement overtakes what is pending: of these blocks, checksums of older content.
            let overtakes = planned.is_ok() && meta.awaits_checksums(&homes);
            if let Ok(cost) = &planned
                && !overtakes
                && let Some(grant) = self.admission.try_admit(*cost)
            {
                break (meta, grant);
            }
            for home in homes.iter().filter(|home| home.placement == Placement::New) {
                meta.data.release(home.run);
            }
            claimed.drain(..).for_each(|run| meta.in_flight.release(run));
            self.update_headroom(&meta);
            drop(meta);
            let lacks = matches!(&planned, Err(error) if error.kind() == ErrorKind::NoSpace);
            if lacks && waited {
                // What holds it now came since. The journal takes it in order, and needs no place beside its own.
                let refused = self.log_batch(head, &pieces)?;
                self.sync_all_data()?;
                self.append_pending(&mut commit)?;
                return Ok(refused.map_or(Batch::Done, Batch::Refused));
            }
            // What is held needs a new place, and may be overwritten in place once the journal has what holds it.
            waited |= lacks;
            let cost = if lacks { Cost::default() } else { planned? };
            homes.clear();
            others.clear();
            if overtakes || lacks {
                self.sync_all_data()?;
                self.append_pending(&mut commit)?;
            } else if !shorten(&mut pieces, if self.admission.holds(cost) { BATCH_MIN } else { 1 }) {
                return Ok(Batch::Refused(cost));
            }
        };
        // Older payload of these must not go home beside or after what is written now. The journal still has it.
        for home in homes.iter().filter(|home| home.placement == Placement::InPlace) {
            meta.forget_logged(home.run);
        }
        drop(meta);
        self.announce(commit, &homes)?;
        let mut short = None;
        self.write_homes(lane, head, &mut homes, &mut short)?;
        self.announced.store(u64::MAX, Ordering::Release);
        {
            let mut meta = self.meta.lock();
            claimed.into_iter().for_each(|run| meta.in_flight.release(run));
        }
        // What data needed is counted where it is now.
        drop(grant);
        if let Some(error) = short {
            return Err(error);
        }
        let refused = self.finish_others(head, others)?;
        let mut buffer = head.buffer.lock();
        buffer.cursor = pieces.last().map_or(0, |piece| piece.logical + piece.entry.blocks);
        let (layer, closed) = buffer.layers.oldest();
        if closed && layer.is_empty() {
            self.seal_oldest(&mut buffer)?;
        }
        Ok(refused.map_or(Batch::Done, Batch::Refused))
    }

    /// Splits pieces into runs and finds their places.
    pub(super) fn plan_homes(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        head: &Head,
        Attempt { pieces, waited }: Attempt,
        homes: &mut Vec<Home>,
        others: &mut Vec<Piece>,
        claimed: &mut Vec<Run>,
    ) -> Result<()> {
        let root = meta.catalog.get(head.id)?.root;
        let mut placements: Vec<(Range<u64>, Placement, u64)> = Vec::new();
        let (mut new_blocks, mut not_claimed) = (0, 0);
        let mut data = Vec::new();
        for piece in pieces {
            match &piece.entry.content {
                Content::Data(slice, sums) => data.push((slice.clone(), sums.clone(), piece)),
                Content::Unmapped | Content::Zero => others.push(piece),
            }
        }
        let mut plans = Vec::with_capacity(data.len());
        for (i, (_, _, piece)) in data.iter().enumerate() {
            if i % HOMES_PER_HOLD == HOMES_PER_HOLD - 1 {
                // Other threads may go between: what is planned so far is claimed, so no payload goes home over it and
                // no read resolves it.
                MutexGuard::bump(meta);
            }
            placements.clear();
            let range = piece.logical..piece.logical + piece.entry.blocks;
            meta.placements(root, range, &mut placements)?;
            let new = placements.iter().filter(|(_, placement, _)| *placement == Placement::New);
            let new: u64 = new.map(|(range, _, _)| range.end - range.start).sum();
            new_blocks += new;
            not_claimed += if piece.entry.claimed { 0 } else { new };
            for (range, _, start) in placements.iter().filter(|(_, placement, _)| *placement == Placement::InPlace) {
                let run = Run { start: *start, blocks: range.end - range.start };
                meta.in_flight.claim(run);
                claimed.push(run);
            }
            plans.push(placements.clone());
        }
        if not_claimed > 0 {
            // What is set aside for the disk is for blocks that are shared: what is only held takes none of it unless
            // waiting for the journal has not helped.
            let aside = if waited { meta.catalog.get(head.id)?.reserved } else { 0 };
            if not_claimed > self.unclaimed() + aside {
                return Err(Error::new(ErrorKind::NoSpace, "no free blocks beside what other writes count on"));
            }
        }
        let mut spare = Run { start: 0, blocks: 0 };
        for ((slice, sums, piece), plan) in data.into_iter().zip(plans) {
            for (range, placement, physical) in plan {
                let mut at = range.start;
                while at < range.end {
                    let mut run = Run { start: physical + (at - range.start), blocks: range.end - at };
                    if placement == Placement::New {
                        if spare.blocks == 0 {
                            spare = self.allocate(meta, new_blocks)?;
                        }
                        run = Run { start: spare.start, blocks: run.blocks.min(spare.blocks) };
                        spare = Run { start: spare.start + run.blocks, blocks: spare.blocks - run.blocks };
                        new_blocks -= run.blocks;
                    }
                    let (from, to) = ((at - piece.logical) as usize, (at - piece.logical + run.blocks) as usize);
                    homes.push(Home {
                        placement,
                        logical: at,
                        run,
                        data: slice.slice(from * BLOCK_SIZE..to * BLOCK_SIZE),
                        checksums: sums.as_slice()[from..to].to_vec(),
                        stamp: piece.entry.stamp,
                    });
                    at += run.blocks;
                }
            }
        }
        debug_assert_eq!((spare.blocks, new_blocks), (0, 0));
        Ok(())
    }

    /// Takes up to `want` free blocks, reserving more from the file system if need be.
    pub(super) fn allocate(&self, meta: &mut Meta, want: u64) -> Result<Run> {
        for attempt in 0..3 {
            if let Some(run) = meta.data.allocate(&mut meta.pages, want)? {
                return Ok(run);
            }
            if attempt == 0 && meta.release_limbo() {
                continue;
            }
            self.extend_locked(meta, want)?;
        }
        Err(Error::new(ErrorKind::NoSpace, "no free blocks although the file system gave some; run 'lamina check'"))
    }

    /// Makes durable which blocks are about to be overwritten in place.
    fn announce(&self, mut commit: MutexGuard<'_, Committer>, homes: &[Home]) -> Result<()> {
        let mut writer = Writer::default();
        for home in homes.iter().filter(|home| home.placement == Placement::InPlace) {
            writer.push(&Operation::Overwrite { run: home.run, checksums: home.checksums.clone() });
        }
        if writer.is_empty() {
            return Ok(());
        }
        self.announced.store(commit.journal.head().position, Ordering::Release);
        let appended = self.append(&mut commit, BatchKind::Urgent, &writer.finish());
        // Somebody may be waiting to take a snapshot, or to flush.
        MutexGuard::unlock_fair(commit);
        appended
    }

    /// Appends a batch; a failure stops the datastore.
    pub(super) fn append(&self, commit: &mut Committer, kind: BatchKind, parts: &[&[u8]]) -> Result<()> {
        self.check_owner()?;
        commit.journal.append(kind, parts).map_err(|error| self.stop(error))?;
        commit.batches += u64::from(matches!(kind, BatchKind::Operations | BatchKind::Urgent));
        self.counters.journal_appends.fetch_add(1, Ordering::Relaxed);
        self.journal_head.store(commit.journal.head().position, Ordering::Release);
        self.admission.set_used(commit.journal.used());
        Ok(())
    }

    /// Writes a batch and brings it into the map. What the map has no room for stays buffered, and `short` says so: all
    /// that was announced has been written then.
    fn write_homes(&self, lane: &mut Lane, head: &Head, homes: &mut [Home], short: &mut Option<Error>) -> Result<()> {
        // Physical order: the medium likes it, and neighbours become one write.
        homes.sort_unstable_by_key(|home| home.run.start);
        let mut groups: Vec<Range<usize>> = Vec::new();
        let mut blocks = 0;
        for (i, home) in homes.iter().enumerate() {
            let joins = groups.last().is_some_and(|group| {
                let before = homes[i - 1].run;
                group.len() < SLICES_MAX
                    && blocks < GROUP_BLOCKS_MAX
                    && before.start + before.blocks == home.run.start
                    && before.start / crate::space::FILE_BLOCKS == home.run.start / crate::space::FILE_BLOCKS
            });
            match groups.last_mut() {
                Some(group) if joins => group.end = i + 1,
                _ => {
                    groups.push(i..i + 1);
                    blocks = 0;
                }
            }
            blocks += home.run.blocks;
        }
        match self.options.mode {
            IoMode::Buffered => self.write_into_cache(head, homes, &groups, short),
            IoMode::Direct => self.write_past_cache(lane, head, homes, &groups, short),
        }
    }

    fn write_into_cache(
        &self,
        head: &Head,
        homes: &[Home],
        groups: &[Range<usize>],
        short: &mut Option<Error>,
    ) -> Result<()> {
        let mut done = 0;
        let mut going_out: Option<(Arc<dyn File>, u64, u64)> = None;
        for (i, group) in groups.iter().enumerate() {
            let part = &homes[group.clone()];
            let (file, offset) = self.files.locate(part[0].run)?;
            let slices: Vec<&[u8]> = part.iter().map(|home| &*home.data).collect();
            file.write_at(&slices, offset, false)
                .during(|| format!("writing block {} home", part[0].run.start))
                .map_err(|error| self.stop(error))?;
            let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
            let long = length >= WRITE_OUT_MIN && part[0].placement == Placement::New;
            if long {
                file.write_out(offset, length, false);
            }
            if long || i + 1 - done >= GROUPS_PER_FINISH {
                self.finish_homes(head, homes, &groups[done..=i], short)?;
                done = i + 1;
            }
            // Not more than two at a time: see WRITE_OUT_MIN.
            if long && let Some((file, offset, length)) = going_out.replace((file, offset, length)) {
                file.write_out(offset, length, true);
            }
        }
        self.finish_homes(head, homes, &groups[done..], short)
    }

    fn write_past_cache(
        &self,
        lane: &mut Lane,
        head: &Head,
        homes: &[Home],
        groups: &[Range<usize>],
        short: &mut Option<Error>,
    ) -> Result<()> {
        let mut completions: Vec<Completion> = Vec::new();
        let mut next = 0;
        while next < groups.len() || lane.queue.in_flight() > 0 {
            while next < groups.len() && lane.queue.in_flight() < LANE_DEPTH as usize {
                let group = &homes[groups[next].clone()];
                let (file, offset) = self.files.locate(group[0].run)?;
                let slices = group.iter().map(|home| home.data.clone()).collect();
                lane.queue.write(&file, offset, slices, false, next as u64);
                next += 1;
            }
            lane.queue
                .wait(&mut completions, None)
                .during(|| "waiting for write-back".into())
                .map_err(|error| self.stop(error))?;
            let mut finished = Vec::with_capacity(completions.len());
            for completion in completions.drain(..) {
                completion.result.during(|| "writing blocks home".into()).map_err(|error| self.stop(error))?;
                finished.push(groups[completion.token as usize].clone());
            }
            self.finish_homes(head, homes, &finished, short)?;
        }
        Ok(())
    }

    /// Lets the map name what has been written, and the buffer forget it.
    fn finish_homes(
        &self,
        head: &Head,
        homes: &[Home],
        groups: &[Range<usize>],
        short: &mut Option<Error>,
    ) -> Result<()> {
        let done: Vec<&Home> = groups.iter().flat_map(|group| &homes[group.clone()]).collect();
        // After the writes and before the clock says so: a flush in between may have cleared the mark.
        done.iter().for_each(|home| self.files.touch(home.run));
        let gate = self.written.fetch_add(1, Ordering::AcqRel) + 1;
        for part in done.chunks(HOMES_PER_HOLD) {
            let _fetch = self.bring_in(|meta| part.iter().for_each(|home| home.survey(meta, head.id)));
            let mut buffer = head.buffer.lock();
            let mut meta = self.meta.lock();
            let mut gone = (0, 0);
            for home in part {
                match self.finish_home(&mut meta, &mut buffer, head.id, home, gate) {
                    Ok((claimed, data)) => gone = (gone.0 + claimed, gone.1 + data),
                    Err(error) if error.kind() == ErrorKind::NoSpace => *short = Some(error),
                    Err(error) => return Err(error),
                }
            }
            self.update_headroom(&meta);
            self.count_changes(&meta);
            let commit_wanted = meta.pending_bytes > self.pending_limit();
            MutexGuard::unlock_fair(meta);
            MutexGuard::unlock_fair(buffer);
            self.give_back(gone);
            if commit_wanted {
                self.request(|work| work.commit = true);
            }
        }
        Ok(())
    }

    /// One piece that is at home: into the map, out of the buffer. Returns what the buffer had set aside for it.
    fn finish_home(
        &self,
        meta: &mut Meta,
        buffer: &mut super::Buffer,
        disk: u64,
        home: &Home,
        gate: u64,
    ) -> Result<(u64, u64)> {
        let checksums = home.checksums.clone();
        let operation = match home.placement {
            Placement::InPlace => {
                meta.note_overwritten(home.run, &checksums)?;
                None
            }
            Placement::Fill => Some(Operation::Written { disk, logical: home.logical, run: home.run, checksums }),
            Placement::New => Some(Operation::Map { disk, logical: home.logical, run: home.run, checksums }),
        };
        if let Some(operation) = operation {
            self.carry_out_new(meta, operation, gate)?;
        }
        self.counters.blocks_written.fetch_add(home.run.blocks, Ordering::Relaxed);
        let (layer, _) = buffer.layers.oldest();
        Ok(layer.remove(home.logical, home.run.blocks, home.stamp))
    }
}

/// Makes a batch about half as long; false when it is one piece of `least` blocks.
fn shorten(pieces: &mut Vec<Piece>, least: u64) -> bool {
    if pieces.len() > 1 {
        pieces.truncate(pieces.len() / 2);
        return true;
    }
    let Some(piece) = pieces.first_mut().filter(|piece| piece.entry.blocks > least) else { return false };
    *piece = piece.first(piece.entry.blocks / 2);
    true
}

impl Meta {
    /// What announcing, writing and mapping these costs at most.
    fn cost_of_homes(&mut self, disk: u64, homes: &[Home]) -> Result<Cost> {
        let (mut announced, mut bytes, mut touched) = (0, 0, Touched::default());
        for home in homes {
            let record = 32 + 4 * home.run.blocks;
            if home.placement == Placement::InPlace {
                announced += record as usize;
                touched.touch_run(home.run);
            } else {
                bytes += record;
                self.touch_mapping(disk, home.logical, home.run, &mut touched)?;
            }
        }
        if announced > 0 {
            bytes += batch_bytes(announced);
        }
        Ok(Cost { bytes, pages: self.pages_of(&touched) })
    }

    pub(super) fn note_overwritten(&mut self, run: Run, checksums: &[u32]) -> Result<()> {
        self.data.annotate(&mut self.pages, run, |block, entry| {
            entry.checksum = checksums[(block - run.start) as usize];
            entry.suspect = false;
        })
    }

    /// True when checksums are pending of a block that is about to be overwritten in place.
    fn awaits_checksums(&self, homes: &[Home]) -> bool {
        // The list is long when much was written to new places, and then holds no checksums as a rule.
        if self.pending_checksums == 0 {
            return false;
        }
        let mut in_place: Vec<Run> =
            homes.iter().filter(|home| home.placement == Placement::InPlace).map(|home| home.run).collect();
        in_place.sort_unstable_by_key(|run| run.start);
        self.pending.iter().any(|pending| {
            let Operation::Checksums { run, .. } = &pending.operation else { return false };
            let next = in_place.partition_point(|other| other.start + other.blocks <= run.start);
            in_place.get(next).is_some_and(|other| other.start < run.start + run.blocks)
        })
    }

    /// Where a range may be overwritten in place: (range, first physical block), `None` for what needs new places.
    pub(super) fn places(
        &mut self,
        root: Option<tree::NodeId>,
        range: Range<u64>,
    ) -> Result<Vec<(Range<u64>, Option<u64>)>> {
        let mut placements = Vec::new();
        self.placements(root, range, &mut placements)?;
        let place = |placement, physical| (placement == Placement::InPlace).then_some(physical);
        Ok(placements.into_iter().map(|(range, placement, physical)| (range, place(placement, physical))).collect())
    }

    /// Where a write of one block of an extent goes.
    pub(super) fn placement(&mut self, extent: &Extent, block: u64) -> Result<Placement> {
        let entry = self.entry(block)?;
        Ok(place(BlockState {
            references: entry.references,
            shared_path: extent.shared_path,
            held: entry.held,
            in_flight: self.in_flight.contains(block),
            unwritten: extent.unwritten,
        }))
    }

    /// Cuts a logical range by where its parts go: (range, placement, physical block for in place and fill).
    pub(super) fn placements(
        &mut self,
        root: Option<tree::NodeId>,
        range: Range<u64>,
        out: &mut Vec<(Range<u64>, Placement, u64)>,
    ) -> Result<()> {
        let mut extents: Vec<Extent> = Vec::new();
        if let Some(root) = root {
            let mut effects = Effects::default();
            tree::lookup_exclusive(&mut self.nodes(&mut effects), root, range.clone(), &mut extents)?;
        }
        let mut at = range.start;
        for extent in extents {
            if at < extent.logical {
                push_placement(out, at..extent.logical, Placement::New, 0);
            }
            at = extent.logical + extent.blocks;
            if extent.shared_path {
                push_placement(out, extent.logical..at, Placement::New, 0);
                continue;
            }
            for i in 0..extent.blocks {
                let block = extent.physical + i;
                let placement = self.placement(&extent, block)?;
                let logical = extent.logical + i;
                push_placement(out, logical..logical + 1, placement, block);
            }
        }
        if at < range.end {
            push_placement(out, at..range.end, Placement::New, 0);
        }
        Ok(())
    }
}

fn push_placement(out: &mut Vec<(Range<u64>, Placement, u64)>, range: Range<u64>, placement: Placement, physical: u64) {
    if let Some((last, last_placement, start)) = out.last_mut()
        && last.end == range.start
        && *last_placement == placement
        && (placement == Placement::New || *start + (last.end - last.start) == physical)
    {
        last.end = range.end;
        return;
    }
    out.push((range, placement, physical));
}
