//! Storing a native disk and its snapshots in less space while they are in use: equal blocks are stored once, and then
//! what is left is compressed.
//!
//! The disk is compressed first, then its snapshots, whose own blocks remain then. An interrupted pass keeps what it
//! has done, and a repeated one skips it, except packs of which most blocks were overwritten.

use super::{Native, bytes};
use crate::compression::Compression;
use crate::deduplication::Deduplication;
use crate::info::Reclaimed;
use crate::names;
use error::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::ops::{ControlFlow, Range};
use std::time::Duration;
use store::catalog::{Object, ObjectState, Provisioning};
use store::engine::{PRINT_BYTES, PackPass, SharePass};
use store::pack::Packer;
use work::{Progress, Throttle};

/// How often a deduplication that waits for another one checks whether it was cancelled.
const TURN_POLL: Duration = Duration::from_millis(100);
/// A step that only looks at the map counts as a read of one page of it, so that such steps are paced too.
const LOOK: u64 = 1;

/// Disks and snapshots, with the ends of their logical blocks.
pub(super) type Objects = Vec<(u64, u64)>;

/// The sum of their sizes in bytes. The sum of large disks may exceed the range of the type.
pub(super) fn sum(objects: &Objects) -> u64 {
    bytes(objects.iter().fold(0u64, |sum, (_, blocks)| sum.saturating_add(*blocks)))
}

/// Whether blocks of a disk or snapshot may be shared with others.
pub(super) fn is_thin(object: &Object) -> bool {
    object.provisioning == Provisioning::Thin && !object.incomplete
}

/// The id of the disk to which a snapshot belongs, or of the disk itself.
pub(super) fn disk_of(object: &Object) -> u64 {
    if object.is_snapshot() { object.disk } else { object.id }
}

/// The progress of the work.
pub(super) struct Steps<'a> {
    throttle: Throttle<&'a dyn Progress>,
    total: u64,
    /// The error of work that is cancelled.
    stopped: &'static str,
}

impl<'a> Steps<'a> {
    /// The progress of work on `total` bytes. `stopped` is the text of the error if it is cancelled.
    pub fn new(progress: &'a dyn Progress, total: u64, stopped: &'static str) -> Self {
        Self { throttle: Throttle::new(progress), total, stopped }
    }

    fn step(&mut self, done: u64, moved: u64) -> Result<()> {
        match self.throttle.step(done, self.total, moved) {
            ControlFlow::Break(()) => Err(Error::new(ErrorKind::Interrupted, self.stopped)),
            ControlFlow::Continue(()) => Ok(()),
        }
    }
}

/// The error of a pass that has failed. If space is lacking, it says what was done, and what to do.
fn ended_early(name: &str, error: Error, reclaimed: &Reclaimed) -> Error {
    if error.kind() != ErrorKind::NoSpace {
        return error.context(name);
    }
    let done = match reclaimed.shared + reclaimed.moved {
        0 => "nothing was changed".to_owned(),
        _ => format!(
            "the content is unchanged, and what was done stays so: {} bytes of equal data were removed, and {} bytes were \
             compressed",
            reclaimed.shared, reclaimed.moved
        ),
    };
    let text = format!("{name}: {error}; {done}; free space, and run the command again: it continues with the rest");
    Error::new(ErrorKind::NoSpace, text)
}

impl Native {
    /// Stores equal blocks of the chosen data once, and compresses the blocks of a disk and its snapshots that are not
    /// compressed yet, and that are worth it. `memory` limits the prints of the deduplication, in bytes; `None` for the
    /// limit of this process.
    pub fn optimize(
        &self,
        name: &str,
        compression: Compression,
        deduplication: Deduplication,
        memory: Option<usize>,
        progress: &dyn Progress,
    ) -> Result<Reclaimed> {
        let disk = self.find_disk(name)?;
        let codec = compression.codec();
        if codec.is_none() && deduplication == Deduplication::Off {
            let text = format!("{name}: neither compression nor deduplication is requested, so there is nothing to do");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let of_label = match &deduplication {
            Deduplication::Label(key) => self.with_same_label(&disk, key)?,
            _ => BTreeSet::new(),
        };
        if deduplication != Deduplication::Off && disk.provisioning != Provisioning::Thin {
            let text =
                format!("{name}: equal blocks of a thick disk stay, because its writes must never need new space");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        // What is buffered enters the map, and journalled content its blocks: others are neither compressed nor shared.
        self.engine.flush()?;
        self.engine.checkpoint()?;
        let own = self.own_objects(disk.id);
        let domain = match deduplication {
            Deduplication::Off => Objects::new(),
            Deduplication::Disk => own.clone(),
            Deduplication::Label(_) => {
                self.objects(disk.id, &|object| is_thin(object) && of_label.contains(&disk_of(object)))
            }
            Deduplication::Datastore => self.objects(disk.id, &is_thin),
        };
        let compressed = if codec.is_some() { sum(&own) } else { 0 };
        let total = sum(&domain).saturating_add(compressed);
        let mut steps = Steps::new(progress, total, "stopped; what was done so far is kept");
        let mut reclaimed = Reclaimed::default();
        let before = sum(&domain);
        let memory = memory.unwrap_or_else(|| self.memory_of_prints());
        let reduce = || {
            if !domain.is_empty() {
                let _only = loop {
                    if let Some(only) = self.deduplicating.try_lock_for(TURN_POLL) {
                        break only;
                    }
                    steps.step(0, 0)?;
                };
                self.deduplicate(domain, memory, &mut steps, &mut reclaimed, &mut || true)?;
            }
            if let Some(codec) = codec {
                let work = own.iter().map(|(object, blocks)| (*object, 0..*blocks)).collect();
                let mut pass = PackPass::new(Packer::new(codec)?, memory, work);
                self.compress(disk.id, own, &mut pass, before, &mut steps, &mut reclaimed)?;
            }
            Ok(())
        };
        let reduced: Result<()> = reduce();
        // The old blocks become free when the changes are durable, also those of a pass that has failed.
        let durable = self.engine.checkpoint();
        reduced.map_err(|error| ended_early(name, error, &reclaimed))?;
        durable?;
        Ok(reclaimed)
    }

    /// The disks that have the same value of a label's key as `disk`.
    fn with_same_label(&self, disk: &Object, key: &str) -> Result<BTreeSet<u64>> {
        let value_of = |disk: &Object| self.settings.of(&names::uuid_text(&disk.uuid)).labels.get(key).cloned();
        let Some(value) = value_of(disk) else {
            let text = format!(
                "{0}: the disk has no label '{1}', so no other disk belongs to it; 'lamina disk edit {0} --label \
                 {1}=VALUE' sets one",
                disk.name,
                key.escape_debug()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        let disks: Vec<Object> = self.engine.with_catalog(|catalog| catalog.disks().cloned().collect());
        Ok(disks.iter().filter(|disk| value_of(disk).as_ref() == Some(&value)).map(|disk| disk.id).collect())
    }

    /// The disk and its snapshots, each with its number of blocks.
    pub(super) fn own_objects(&self, disk: u64) -> Objects {
        self.objects(disk, &|object| object.id == disk || object.disk == disk)
    }

    /// The disks and snapshots that are `wanted`, beginning with `first`.
    pub(super) fn objects(&self, first: u64, wanted: &dyn Fn(&Object) -> bool) -> Objects {
        let is_whole = |state| matches!(state, ObjectState::Disk | ObjectState::Snapshot);
        let mut objects: Objects = self.engine.with_catalog(|catalog| {
            let objects = catalog.objects().filter(|object| is_whole(object.state) && wanted(object));
            objects.map(|object| (object.id, object.size_in_blocks())).collect()
        });
        objects.sort_by_key(|(id, _)| (*id != first, *id));
        objects
    }

    /// Stores equal blocks of these objects once. `memory` limits the prints, in bytes. Returns false if `goes_on` was
    /// false before all blocks were compared.
    pub(super) fn deduplicate(
        &self,
        domain: Objects,
        memory: usize,
        steps: &mut Steps<'_>,
        reclaimed: &mut Reclaimed,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool> {
        let total = sum(&domain);
        let mut pass = SharePass::new(domain, memory / PRINT_BYTES);
        while goes_on() {
            let step = self.engine.share_step(&mut pass)?;
            reclaimed.shared += bytes(step.freed);
            reclaimed.lost += bytes(step.lost);
            let done = u128::from(total) * u128::from(pass.position()) / u128::from(SharePass::PARTS);
            steps.step(done as u64, bytes(step.read.max(LOOK)))?;
            if step.ended {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn compress(
        &self,
        disk: u64,
        objects: Objects,
        pass: &mut PackPass,
        mut before: u64,
        steps: &mut Steps<'_>,
        reclaimed: &mut Reclaimed,
    ) -> Result<()> {
        for (object, blocks) in objects {
            let mut pace = |at: u64, moved: u64| steps.step(before.saturating_add(bytes(at)), bytes(moved));
            match self.pack(object, 0..blocks, pass, reclaimed, &mut pace) {
                // The snapshot was deleted meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound && object != disk => {}
                packed => packed?,
            }
            before = before.saturating_add(bytes(blocks));
        }
        Ok(())
    }

    /// Compresses blocks of a disk or snapshot. `pace` is called after each step, with the block that was reached and
    /// the blocks that were read and stored; its error ends the work.
    pub(super) fn pack(
        &self,
        object: u64,
        blocks: Range<u64>,
        pass: &mut PackPass,
        reclaimed: &mut Reclaimed,
        pace: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let mut at = blocks.start;
        while at < blocks.end {
            let step = self.engine.pack_step(object, at..blocks.end, pass)?;
            at = step.next;
            reclaimed.freed += bytes(step.packed.saturating_sub(step.stored));
            reclaimed.moved += bytes(step.packed);
            reclaimed.lost += bytes(step.lost);
            pace(at.min(blocks.end), (step.read + step.stored).max(LOOK))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::BLOCK_SIZE;

    #[test]
    fn the_error_of_a_full_file_system_says_what_was_done_and_what_to_do() {
        let full = || Error::new(ErrorKind::NoSpace, "the file system is full");
        let of =
            |shared, moved| ended_early("vm", full(), &Reclaimed { shared, moved, ..Reclaimed::default() }).to_string();
        let nothing = of(0, 0);
        assert!(nothing.starts_with("vm: the file system is full; nothing was changed; free space"), "{nothing}");
        let some = of(8192, 4096);
        assert!(some.contains("8192 bytes of equal data were removed, and 4096 bytes were compressed"), "{some}");
        assert!(some.ends_with("run the command again: it continues with the rest"), "{some}");
        let other = ended_early("vm", Error::new(ErrorKind::Io, "broken"), &Reclaimed::default());
        assert_eq!((other.kind(), other.to_string()), (ErrorKind::Io, "vm: broken".into()));
    }

    #[test]
    fn a_sum_beyond_the_range_of_the_type_is_the_highest_number() {
        let objects = |blocks: u64| (1..=4).map(|id| (id, blocks)).collect();
        assert_eq!(sum(&objects(1 << 50)), u64::MAX, "four times 2^62 bytes");
        assert_eq!(sum(&objects(1 << 62)), u64::MAX, "four times 2^62 blocks");
        assert_eq!(sum(&objects(3)), 12 * BLOCK_SIZE as u64);
    }
}
