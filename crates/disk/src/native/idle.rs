//! Compression by the setting of a disk: passes over the parts of the disk and its snapshots that were not written for
//! a while ([0045](../../../../docs/adr/0045-compression-by-setting.md)).
//!
//! 1. One pass runs at a time, and each disk rests between two passes.
//! 2. A pass holds no use of the disk, so it never makes a command fail. It ends as soon as an operation uses the disk
//!    exclusively, or the setting has changed. The next pass continues, because parts that were not processed stay
//!    recorded ([`Written`](store::engine::Written)).
//! 3. What is to be processed is in memory only. After a restart, each disk with the setting gets one whole pass, which
//!    skips what is compressed already.

use super::{Native, bytes, is_visible};
use crate::compression::Compression;
use crate::info::{CompressionState, CompressionStatus, Reclaimed};
use crate::names;
use backend::clock;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};
use store::catalog::Provisioning;
use store::pack::Packer;
use work::{Progress, Throttle};

/// How long a disk rests after a pass, as a multiple of the time after which its data counts as cold.
const REST_FACTOR: u32 = 6;

/// A disk of which cold data is to be compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdleDisk {
    /// Object id, which stays the same when the disk is renamed.
    id: u64,
    /// Name of the disk.
    pub name: String,
    uuid: String,
    compression: Compression,
}

/// What the passes over a disk have done.
#[derive(Default)]
struct PassesOfDisk {
    /// When the last pass ended, by both clocks.
    ended: Option<(Instant, u64)>,
    compressed: u64,
    saved: u64,
}

#[derive(Default)]
struct IdlePassesState {
    /// The disk of the pass that is running.
    running: Option<IdleDisk>,
    disks: BTreeMap<u64, PassesOfDisk>,
}

/// The passes of this process.
#[derive(Default)]
pub(crate) struct IdlePasses(Mutex<IdlePassesState>);

/// Ends a pass when this value is dropped.
struct EndOfPass<'a> {
    passes: &'a IdlePasses,
    disk: u64,
    reclaimed: Reclaimed,
}

impl Drop for EndOfPass<'_> {
    fn drop(&mut self) {
        let mut state = self.passes.0.lock();
        state.running = None;
        // The disk may have been deleted, or may have lost its setting.
        if let Some(of) = state.disks.get_mut(&self.disk) {
            of.ended = Some((Instant::now(), clock::seconds()));
            of.compressed += self.reclaimed.moved;
            of.saved += self.reclaimed.freed;
        }
    }
}

impl Native {
    /// The disks with the setting that can be compressed.
    fn idle_disks(&self) -> Vec<IdleDisk> {
        let compressed = self.settings.compressed();
        if compressed.is_empty() {
            return Vec::new();
        }
        self.engine.with_catalog(|catalog| {
            let disks = catalog.disks().filter(|disk| is_visible(disk) && disk.provisioning == Provisioning::Thin);
            let disks = disks.filter_map(|disk| {
                let uuid = names::uuid_text(&disk.uuid);
                let compression = *compressed.get(&uuid)?;
                Some(IdleDisk { id: disk.id, name: disk.name.clone(), uuid, compression })
            });
            disks.collect()
        })
    }

    /// The disk that was longest without a pass, of those with data that was not processed and not written in the last
    /// `after`. Also begins to record the writes of disks that have got the setting, and ends the records of others.
    /// `may` excludes disks by name.
    pub fn next_idle(&self, after: Duration, may: impl Fn(&str) -> bool) -> Result<Option<IdleDisk>> {
        let disks = self.idle_disks();
        let ids: BTreeSet<u64> = disks.iter().map(|disk| disk.id).collect();
        self.engine.keep_records_of_writes(|id| ids.contains(&id));
        let mut state = self.idle.0.lock();
        state.disks.retain(|id, _| ids.contains(id));
        let mut next: Option<(Option<Instant>, IdleDisk)> = None;
        for disk in disks {
            let written = match self.engine.record_writes(disk.id) {
                // The disk was deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                written => written?,
            };
            let ended = state.disks.entry(disk.id).or_default().ended.map(|(ended, _)| ended);
            let rests = ended.is_some_and(|ended| ended.elapsed() < after.saturating_mul(REST_FACTOR));
            if rests || !written.has_cold(after) || !may(&disk.name) {
                continue;
            }
            if next.as_ref().is_none_or(|(earliest, _)| ended < *earliest) {
                next = Some((ended, disk));
            }
        }
        Ok(next.filter(|_| state.running.is_none()).map(|(_, disk)| disk))
    }

    /// Compresses the parts of a disk and its snapshots that were not written in the last `after`. `may` is false for
    /// the name of a disk that an operation uses exclusively.
    ///
    /// # Errors
    /// `Interrupted` if the pass was cancelled; `Busy` if another pass is running.
    pub fn compress_idle(
        &self,
        disk: &IdleDisk,
        after: Duration,
        may: impl Fn(&str) -> bool,
        progress: &dyn Progress,
    ) -> Result<Reclaimed> {
        {
            let mut state = self.idle.0.lock();
            if let Some(other) = &state.running {
                let text = format!("a pass over disk '{}' is running", other.name);
                return Err(Error::new(ErrorKind::Busy, text));
            }
            state.running = Some(disk.clone());
        }
        let mut end = EndOfPass { passes: &self.idle, disk: disk.id, reclaimed: Reclaimed::default() };
        let passed = self.pass(disk, after, may, progress, &mut end.reclaimed);
        let reclaimed = end.reclaimed;
        drop(end);
        match passed {
            // The disk was deleted meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(reclaimed),
            passed => passed.map(|()| reclaimed),
        }
    }

    fn pass(
        &self,
        disk: &IdleDisk,
        after: Duration,
        may: impl Fn(&str) -> bool,
        progress: &dyn Progress,
        reclaimed: &mut Reclaimed,
    ) -> Result<()> {
        let Some(codec) = disk.compression.codec() else { return Ok(()) };
        let mut packer = Packer::new(codec)?;
        let mut parts = self.engine.record_writes(disk.id)?.take_cold(after);
        // What is buffered enters the map, and journalled content its blocks: others are not compressed. The parts were
        // taken before, so a write that is not in the map afterwards makes its part count as written again.
        self.engine.flush()?;
        self.engine.checkpoint()?;
        let objects = self.own_objects(disk.id);
        let blocks = objects.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0);
        let (mut done, total) = (0, bytes(parts.blocks(blocks)));
        let throttle = Throttle::new(progress);
        while let Some(part) = parts.first(blocks) {
            let name = self.engine.with_catalog(|catalog| catalog.get(disk.id).map(|disk| disk.name.clone()))?;
            if self.settings.of(&disk.uuid).compression != disk.compression || !may(&name) {
                break;
            }
            for (object, end) in &objects {
                let within = part.start.min(*end)..part.end.min(*end);
                let first = within.start;
                let mut pace = |at: u64, moved: u64| match throttle.step(done + bytes(at - first), total, bytes(moved))
                {
                    ControlFlow::Continue(()) => Ok(()),
                    ControlFlow::Break(()) => {
                        let text = "stopped; what was compressed stays compressed, and the server continues later";
                        Err(Error::new(ErrorKind::Interrupted, text))
                    }
                };
                match self.pack(*object, within, &mut packer, reclaimed, &mut pace) {
                    // The snapshot was deleted meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound && *object != disk.id => {}
                    Err(error) => return Err(error.context(name)),
                    Ok(()) => {}
                }
            }
            done += bytes(part.end - part.start);
            parts.processed();
        }
        // The plain blocks become free when the packs are durable.
        if reclaimed.moved > 0 {
            self.engine.checkpoint()?;
        }
        Ok(())
    }

    /// What passes have done for a disk, and what they have still to do; `None` for a disk without passes.
    pub fn compression_state(&self, disk: u64) -> Option<CompressionState> {
        let written = self.engine.recorded_writes(disk)?;
        let blocks = self.engine.with_catalog(|catalog| catalog.find(disk).map(|disk| disk.size_in_blocks()))?;
        let state = self.idle.0.lock();
        let of = state.disks.get(&disk)?;
        Some(CompressionState {
            pending: bytes(written.unprocessed(blocks)),
            ended: of.ended.map(|(_, time)| time),
            compressed: of.compressed,
            saved: of.saved,
        })
    }

    /// What passes have done for all disks.
    pub fn compression_status(&self) -> CompressionStatus {
        let disks = self.idle_disks();
        let states = disks.iter().filter_map(|disk| self.compression_state(disk.id));
        let mut status = CompressionStatus {
            new_disks: self.settings.defaults().compression,
            disks: disks.len() as u64,
            running: self.idle.0.lock().running.as_ref().map(|disk| disk.name.clone()),
            ..CompressionStatus::default()
        };
        for state in states {
            status.pending += state.pending;
            status.compressed += state.compressed;
            status.saved += state.saved;
        }
        status
    }
}

#[cfg(test)]
mod tests;
