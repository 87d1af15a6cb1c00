//! Storing a native disk and its snapshots in less space while they are in use: equal blocks are stored once, and then
//! what is left is compressed.
//!
//! The disk is compressed first, then its snapshots, whose own blocks remain then. An interrupted pass keeps what it
//! has done, and a repeated one skips it, except packs of which most blocks were overwritten.

use super::Native;
use crate::compression::Compression;
use crate::deduplication::Deduplication;
use crate::info::Reclaimed;
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, Result};
use std::ops::ControlFlow;
use store::catalog::{Object, ObjectState, Provisioning};
use store::engine::{PRINTS_MAX, SharePass};
use store::pack::{Codec, Packer};
use work::{Progress, Throttle};

/// Disks and snapshots, with the ends of their logical blocks.
type Objects = Vec<(u64, u64)>;

fn bytes(blocks: u64) -> u64 {
    blocks * BLOCK_SIZE as u64
}

fn sum(objects: &Objects) -> u64 {
    bytes(objects.iter().map(|(_, blocks)| blocks).sum())
}

/// The progress of both parts of the work.
struct Steps<'a> {
    name: &'a str,
    throttle: Throttle<&'a dyn Progress>,
    total: u64,
}

impl Steps<'_> {
    fn step(&mut self, done: u64, moved: u64) -> Result<()> {
        match self.throttle.step(done, self.total, moved) {
            ControlFlow::Break(()) => {
                Err(Error::new(ErrorKind::Interrupted, format!("{}: stopped; what was done so far is kept", self.name)))
            }
            ControlFlow::Continue(()) => Ok(()),
        }
    }
}

impl Native {
    /// Stores equal blocks of the chosen data once, and compresses the blocks of a disk and its snapshots that are not
    /// compressed yet, and that are worth it.
    pub fn optimize(
        &self,
        name: &str,
        compression: Compression,
        deduplication: Deduplication,
        progress: &dyn Progress,
    ) -> Result<Reclaimed> {
        let disk = self.find_disk(name)?;
        let codec = compression.codec();
        if codec.is_none() && deduplication == Deduplication::Off {
            let text = format!("{name}: neither compression nor deduplication is requested, so there is nothing to do");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if deduplication != Deduplication::Off && disk.provisioning != Provisioning::Thin {
            let text =
                format!("{name}: equal blocks of a thick disk stay, because its writes must never need new space");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        // What is buffered enters the map, and journalled content its blocks: others are neither compressed nor shared.
        self.engine.flush()?;
        self.engine.checkpoint()?;
        let own = self.objects(disk.id, &|object| object.id == disk.id || object.disk == disk.id);
        let domain = match deduplication {
            Deduplication::Off => Objects::new(),
            Deduplication::Disk => own.clone(),
            Deduplication::Datastore => {
                self.objects(disk.id, &|object| object.provisioning == Provisioning::Thin && !object.incomplete)
            }
        };
        let compressed = if codec.is_some() { sum(&own) } else { 0 };
        let mut steps = Steps { name, throttle: Throttle::new(progress), total: sum(&domain) + compressed };
        let mut reclaimed = Reclaimed::default();
        let before = sum(&domain);
        if !domain.is_empty() {
            self.deduplicate(domain, &mut steps, &mut reclaimed)?;
        }
        if let Some(codec) = codec {
            self.compress(disk.id, own, codec, before, &mut steps, &mut reclaimed)?;
        }
        // The old blocks become free when the changes are durable.
        self.engine.checkpoint()?;
        Ok(reclaimed)
    }

    /// The disks and snapshots that are `wanted`, beginning with `first`.
    fn objects(&self, first: u64, wanted: &dyn Fn(&Object) -> bool) -> Objects {
        let is_whole = |state| matches!(state, ObjectState::Disk | ObjectState::Snapshot);
        let mut objects: Objects = self.engine.with_catalog(|catalog| {
            let objects = catalog.objects().filter(|object| is_whole(object.state) && wanted(object));
            objects.map(|object| (object.id, object.capacity.div_ceil(BLOCK_SIZE as u64))).collect()
        });
        objects.sort_by_key(|(id, _)| (*id != first, *id));
        objects
    }

    fn deduplicate(&self, domain: Objects, steps: &mut Steps<'_>, reclaimed: &mut Reclaimed) -> Result<()> {
        let total = sum(&domain);
        let mut pass = SharePass::new(domain, PRINTS_MAX);
        loop {
            let step = self.engine.share_step(&mut pass).map_err(|error| error.context(steps.name))?;
            reclaimed.shared += bytes(step.shared);
            let done = u128::from(total) * u128::from(pass.position()) / u128::from(SharePass::PARTS);
            steps.step(done as u64, bytes(step.read))?;
            if step.ended {
                return Ok(());
            }
        }
    }

    fn compress(
        &self,
        disk: u64,
        objects: Objects,
        codec: Codec,
        mut before: u64,
        steps: &mut Steps<'_>,
        reclaimed: &mut Reclaimed,
    ) -> Result<()> {
        let mut packer = Packer::new(codec)?;
        for (object, blocks) in objects {
            let mut at = 0;
            while at < blocks {
                let step = match self.engine.pack_step(object, at..blocks, &mut packer) {
                    // The snapshot was deleted meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound && object != disk => break,
                    step => step.map_err(|error| error.context(steps.name))?,
                };
                at = step.next;
                reclaimed.freed += bytes(step.packed.saturating_sub(step.stored));
                reclaimed.moved += bytes(step.packed);
                steps.step(before + bytes(at.min(blocks)), bytes(step.read + step.stored))?;
            }
            before += bytes(blocks);
        }
        Ok(())
    }
}
