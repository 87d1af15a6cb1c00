//! Writes a batch: announces overwrites, writes the blocks, and moves them into the map.

use super::plan::{BlockWrite, Origin, Plan};
use super::{BATCH_STRIDE, Lane};
use crate::buffer::Held;
use crate::engine::log::Committer;
use crate::engine::metadata::Meta;
use crate::engine::placement::Placement;
use crate::engine::{Engine, Head};
use crate::journal::{BatchKind, Operation, Writer};
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::tree::Aim;
use crate::{Error, IoContext, Result};
use backend::{Completion, File, IoMode};
use std::ops::Range;
use std::sync::Arc;

/// When a run of new blocks has at least this many bytes, it is written from the page cache to the device at once.
/// Otherwise the next flush would have to write hundreds of megabytes, which would delay it and every append to the
/// journal.
const WRITE_OUT_MIN: u64 = 256 << 10;
/// Blocks in one write (1 MiB).
const GROUP_BLOCKS_MAX: u64 = 256;
/// The most short writes after which their blocks are moved into the map together.
const GROUPS_PER_FINISH: usize = 32;
/// Slices per write: the limit of the kernel (`IOV_MAX`), rounded down.
pub const SLICES_MAX: usize = 1000;
/// The most operations that one lane has in flight.
pub const LANE_DEPTH: u32 = 64;

impl BlockWrite {
    /// Surveys the metadata that will be needed when the run is moved into the map.
    fn survey(&self, meta: &mut Meta, disk: u64) {
        meta.survey_run(self.run);
        if self.placement != Placement::InPlace {
            meta.survey_disk(disk, self.logical.clone(), Aim::Map);
        }
    }
}

impl Engine {
    /// Announces durably which blocks are about to be overwritten in place.
    pub(super) fn announce(&self, mut commit: MutexGuard<'_, Committer>, homes: &[BlockWrite]) -> Result<()> {
        let mut writer = Writer::default();
        for home in homes.iter().filter(|home| home.placement == Placement::InPlace) {
            writer.push(&Operation::Overwrite { run: home.run, checksums: home.checksums.clone() });
        }
        if writer.is_empty() {
            return Ok(());
        }
        self.log.begin_announced(&commit);
        let appended = self.append(&mut commit, BatchKind::Urgent, &writer.finish());
        // Passes the lock to a thread that waits for the journal, for a snapshot or a flush.
        MutexGuard::unlock_fair(commit);
        appended
    }

    /// Writes a batch and moves it into the map. Extents that cannot enter the map, because of missing room or
    /// unreadable metadata, stay buffered; the error is returned after all announced blocks are written.
    pub(super) fn write_homes(&self, lane: &mut Lane, head: &Head, plan: &mut Plan) -> Result<Option<Error>> {
        plan.sort();
        let homes = plan.homes();
        let mut groups: Vec<Range<usize>> = Vec::new();
        let mut blocks = 0;
        for (i, home) in homes.iter().enumerate() {
            let joins = groups.last().is_some_and(|group| {
                let before = homes[i - 1].run;
                group.len() < SLICES_MAX
                    && blocks < GROUP_BLOCKS_MAX
                    && before.start + before.blocks == home.run.start
                    && before.start / crate::FILE_BLOCKS == home.run.start / crate::FILE_BLOCKS
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
            IoMode::Buffered => self.write_into_cache(head, homes, &groups),
            IoMode::Direct => self.write_past_cache(lane, head, homes, &groups),
        }
    }

    fn write_into_cache(&self, head: &Head, homes: &[BlockWrite], groups: &[Range<usize>]) -> Result<Option<Error>> {
        let (mut done, mut short) = (0, None);
        let mut going_out: Option<(Arc<dyn File>, u64, u64)> = None;
        for (i, group) in groups.iter().enumerate() {
            let part = &homes[group.clone()];
            let (file, offset) = self.files.locate(part[0].run).map_err(|error| self.stop(error))?;
            let slices: Vec<&[u8]> = part.iter().map(|home| &*home.data).collect();
            file.write_at(&slices, offset, false)
                .during(|| format!("writing data block {}", part[0].run.start))
                .map_err(|error| self.stop(error))?;
            let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
            let long = length >= WRITE_OUT_MIN && part[0].placement == Placement::New;
            if long {
                file.write_out(offset, length, false);
            }
            if long || i + 1 - done >= GROUPS_PER_FINISH {
                short = self.finish_homes(head, homes, &groups[done..=i])?.or(short);
                done = i + 1;
            }
            // At most two runs are being written out at a time, see [`WRITE_OUT_MIN`].
            if long && let Some((file, offset, length)) = going_out.replace((file, offset, length)) {
                file.write_out(offset, length, true);
            }
        }
        Ok(self.finish_homes(head, homes, &groups[done..])?.or(short))
    }

    fn write_past_cache(
        &self,
        lane: &mut Lane,
        head: &Head,
        homes: &[BlockWrite],
        groups: &[Range<usize>],
    ) -> Result<Option<Error>> {
        let mut completions: Vec<Completion> = Vec::new();
        let (mut next, mut short) = (0, None);
        while next < groups.len() || lane.queue.in_flight() > 0 {
            while next < groups.len() && lane.queue.in_flight() < LANE_DEPTH as usize {
                let group = &homes[groups[next].clone()];
                let (file, offset) = self.files.locate(group[0].run).map_err(|error| self.stop(error))?;
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
                completion.result.during(|| "writing data blocks".into()).map_err(|error| self.stop(error))?;
                finished.push(groups[completion.token as usize].clone());
            }
            short = self.finish_homes(head, homes, &finished)?.or(short);
        }
        Ok(short)
    }

    /// Moves the written blocks into the map, and removes them from the buffer.
    fn finish_homes(&self, head: &Head, homes: &[BlockWrite], groups: &[Range<usize>]) -> Result<Option<Error>> {
        let mut short = None;
        let done: Vec<&BlockWrite> = groups.iter().flat_map(|group| &homes[group.clone()]).collect();
        // The files are marked after the writes and before the counter grows, because a flush during the writes may
        // have cleared the mark.
        done.iter().for_each(|home| self.files.touch(home.run));
        let gate = self.log.clocks.wrote_home();
        for part in done.chunks(BATCH_STRIDE) {
            let _fetch = self.meta.bring_in(|meta| part.iter().for_each(|home| home.survey(meta, head.id)));
            let mut buffer = head.lock();
            let mut meta = self.meta.lock();
            let mut gone = Held::default();
            for home in part {
                match self.finish_home(&mut meta, &mut buffer, head.id, home, gate) {
                    Ok(held) => gone += held,
                    Err(error) if self.running.is_stopped() => return Err(error),
                    Err(error) => short = Some(error),
                }
            }
            self.update_headroom(&meta);
            self.count_changes(&meta);
            let commit_wanted = self.is_commit_due(&meta);
            MutexGuard::unlock_fair(meta);
            MutexGuard::unlock_fair(buffer);
            self.give_back(gone);
            if commit_wanted {
                self.request(|work| work.commit = true);
            }
        }
        let stored = done.iter().map(|home| (home.logical.start, home.content_sums()));
        self.writeback.equal.note(head.id, stored);
        Ok(short)
    }

    /// Moves one written extent into the map and removes it from the buffer. Returns what was reserved for it.
    fn finish_home(
        &self,
        meta: &mut Meta,
        buffer: &mut crate::engine::Buffer,
        disk: u64,
        home: &BlockWrite,
        gate: u64,
    ) -> Result<Held> {
        let (checksums, logical) = (home.checksums.clone(), home.logical.start);
        if let Origin::Packed(entries) = &home.origin
            && !self.may_use_pack(disk, buffer, &home.logical, entries)
        {
            self.release_new(meta, Some(home.run));
            return Ok(Held::default());
        }
        let operation = match home.placement {
            Placement::InPlace => {
                // The announcement ends with the batch. Without the new checksums, recovery would take the content for
                // damaged.
                meta.note_written(home.run, &checksums).map_err(|error| self.stop(error))?;
                None
            }
            Placement::Fill => Some(Operation::Written { disk, logical, run: home.run, checksums }),
            Placement::New => Some(match &home.origin {
                Origin::Entry(_) => Operation::Map { disk, logical, run: home.run, checksums },
                Origin::Packed(_) => {
                    let blocks = home.logical.end - logical;
                    Operation::MapPack { disk, logical, blocks, first: 0, run: home.run, checksums }
                }
            }),
        };
        if let Some(operation) = operation {
            self.carry_out_new(meta, operation, gate)?;
        }
        if let Origin::Packed(_) = &home.origin {
            meta.keep_new_index(home.run, &home.data);
        }
        self.counters.blocks_written.fetch_add(home.run.blocks, Ordering::Relaxed);
        let (layer, _) = buffer.layers.oldest();
        let mut held = Held::default();
        match &home.origin {
            Origin::Entry(stamp) => held += layer.remove(logical, home.run.blocks, *stamp),
            Origin::Packed(entries) => {
                for (part, stamp) in &entries.parts {
                    held += layer.remove(part.start, part.end - part.start, *stamp);
                }
            }
        }
        Ok(held)
    }
}
