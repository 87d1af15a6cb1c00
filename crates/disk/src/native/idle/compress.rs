//! Passes that compress the cold parts of a disk and its snapshots.

use super::{Choice, End, IdlePass, IdlePassesState};
use crate::compression::Compression;
use crate::info::{CompressionState, CompressionStatus, Reclaimed};
use crate::names;
use crate::native::{Native, bytes};
use error::{Error, ErrorKind, Result};
use std::ops::ControlFlow;
use std::time::Duration;
use store::catalog::Object;
use store::engine::{PackPass, Purpose};
use store::pack::Packer;
use work::{Progress, Throttle};

/// A disk of which cold data is to be compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdleDisk {
    /// Object id, which stays the same when the disk is renamed.
    pub(super) id: u64,
    /// Name of the disk.
    pub name: String,
    uuid: String,
    compression: Compression,
}

/// What the passes over a disk have done.
#[derive(Default)]
pub(super) struct Done {
    ended: End,
    compressed: u64,
    saved: u64,
}

impl Done {
    pub fn note(&mut self, end: End, reclaimed: &Reclaimed) {
        self.ended = end;
        self.compressed += reclaimed.moved;
        self.saved += reclaimed.freed;
    }
}

impl Native {
    /// The disks with the setting that can be compressed.
    pub(super) fn compressed_disks(&self) -> Vec<IdleDisk> {
        let of = |id, name: &str, uuid, compression: &Compression| IdleDisk {
            id,
            name: name.to_owned(),
            uuid,
            compression: *compression,
        };
        self.idle_disks(&self.settings.compressed(), of)
    }

    /// Compresses new data of the disks whose setting says so when it is written, and of no others.
    ///
    /// # Errors
    /// Those of writing the superblock.
    pub(super) fn compress_writes(&self) -> Result<()> {
        let disk = |id, _: &str, _, compression: &Compression| compression.codec().map(|codec| (id, codec));
        let disks = self.idle_disks(&self.settings.compressed_at_write_back(), disk);
        self.engine.pack_writes_of(&disks.into_iter().flatten().collect::<Vec<_>>())
    }

    /// Compresses new data of a thin disk that is being opened when it is written, if its setting says so.
    ///
    /// # Errors
    /// Those of writing the superblock.
    pub(super) fn compress_writes_to(&self, disk: &Object) -> Result<()> {
        let settings = self.settings.of(&names::uuid_text(&disk.uuid));
        match settings.compression.codec() {
            Some(codec) if settings.compresses_writes() => self.engine.pack_writes(&[(disk.id, codec)]),
            _ => Ok(()),
        }
    }

    /// Adds the disks with cold data that was not processed. Data of a disk that is also deduplicated counts only after
    /// that.
    pub(super) fn choose_disk(
        &self,
        disks: Vec<IdleDisk>,
        may: &impl Fn(&str) -> bool,
        state: &mut IdlePassesState,
        choice: &mut Choice,
    ) -> Result<()> {
        for disk in disks {
            let written = match self.engine.record_writes(disk.id, Purpose::Packing) {
                // The disk was deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                written => written?,
            };
            let first = self.engine.recorded_writes(disk.id, Purpose::Sharing);
            let ended = state.disks.entry(disk.id).or_default().ended;
            if !choice.rests(ended) && written.has_cold(choice.after, first.as_deref()) && may(&disk.name) {
                choice.add(ended, IdlePass::Compress(disk));
            }
        }
        Ok(())
    }

    /// Compresses the parts of a disk and its snapshots that were not written in the last `after`.
    pub(super) fn compress_idle(
        &self,
        disk: &IdleDisk,
        after: Duration,
        may: impl Fn(&str) -> bool,
        progress: &dyn Progress,
        reclaimed: &mut Reclaimed,
    ) -> Result<()> {
        let Some(codec) = disk.compression.codec() else { return Ok(()) };
        let first = self.engine.recorded_writes(disk.id, Purpose::Sharing);
        let mut parts = self.engine.record_writes(disk.id, Purpose::Packing)?.take_cold(after, first.as_deref());
        let before = self.settings.of(&disk.uuid);
        // What is buffered enters the map, and journalled content its blocks: others are not compressed. The parts were
        // taken before, so a write that is not in the map afterwards makes its part count as written again.
        self.engine.flush()?;
        self.engine.checkpoint()?;
        let objects = self.own_objects(disk.id);
        let blocks = objects.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0);
        let work = parts.all(blocks).flat_map(|part| {
            let of_object = move |(object, end): &(u64, u64)| (*object, part.start.min(*end)..part.end.min(*end));
            objects.iter().map(of_object)
        });
        let memory = self.memory_of_prints();
        let mut pass = PackPass::new(Packer::new(codec)?, memory, work.collect());
        let (mut done, total) = (0, bytes(parts.blocks(blocks)));
        let throttle = Throttle::new(progress);
        while let Some(part) = parts.first(blocks) {
            let name = self.engine.with_catalog(|catalog| catalog.get(disk.id).map(|disk| disk.name.clone()))?;
            let now = self.settings.of(&disk.uuid);
            if now.compression != disk.compression || now.dedup != before.dedup || !may(&name) {
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
                match self.pack(*object, within, &mut pass, reclaimed, &mut pace) {
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
        let pending = self.unprocessed(disk, Purpose::Packing)?;
        let state = self.idle.0.lock();
        let of = state.disks.get(&disk)?;
        Some(CompressionState {
            pending,
            ended: of.ended.map(|(_, time)| time),
            compressed: of.compressed,
            saved: of.saved,
        })
    }

    /// Bytes of the parts of a disk that passes have still to process; `None` if its writes are not recorded.
    pub(super) fn unprocessed(&self, disk: u64, purpose: Purpose) -> Option<u64> {
        let written = self.engine.recorded_writes(disk, purpose)?;
        let blocks = self.engine.with_catalog(|catalog| catalog.find(disk).map(|disk| disk.size_in_blocks()))?;
        Some(bytes(written.unprocessed(blocks)))
    }

    /// What passes have done for all disks.
    pub fn compression_status(&self) -> CompressionStatus {
        let disks = self.compressed_disks();
        let states = disks.iter().filter_map(|disk| self.compression_state(disk.id));
        let running = match &self.idle.0.lock().running {
            Some(IdlePass::Compress(disk)) => Some(disk.name.clone()),
            _ => None,
        };
        let mut status = CompressionStatus {
            new_disks: self.settings.defaults().compression,
            disks: disks.len() as u64,
            running,
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
