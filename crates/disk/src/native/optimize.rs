//! Compressing a native disk and its snapshots while they are in use.
//!
//! The disk is processed first, then its snapshots, whose own blocks remain then. An interrupted pass keeps what it has
//! compressed, and a repeated one skips it, except packs of which most blocks were overwritten.

use super::Native;
use crate::compression::Compression;
use crate::info::Reclaimed;
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, Result};
use std::ops::ControlFlow;
use store::catalog::ObjectState;
use store::pack::{Codec, Packer};
use work::{Progress, Throttle};

fn codec(compression: Compression) -> Codec {
    match compression {
        Compression::Lz4 => Codec::Lz4,
        Compression::Zstd(level) => Codec::Zstd(level),
    }
}

impl Native {
    /// Compresses the blocks of a disk and its snapshots that are not compressed yet, and that are worth it.
    pub fn optimize(&self, name: &str, compression: Compression, progress: &dyn Progress) -> Result<Reclaimed> {
        let bytes = |blocks: u64| blocks * BLOCK_SIZE as u64;
        let disk = self.find_disk(name)?.id;
        // What is buffered enters the map, and journalled content its blocks: others are not compressed.
        self.engine.flush()?;
        self.engine.checkpoint()?;
        let objects: Vec<(u64, u64)> = self.engine.with_catalog(|catalog| {
            let is_whole = |state| matches!(state, ObjectState::Disk | ObjectState::Snapshot);
            let own = |id: u64, of: u64| id == disk || of == disk;
            let objects = catalog.objects().filter(|object| is_whole(object.state) && own(object.id, object.disk));
            objects.map(|object| (object.id, object.capacity.div_ceil(BLOCK_SIZE as u64))).collect()
        });
        let total = bytes(objects.iter().map(|(_, blocks)| blocks).sum());
        let throttle = Throttle::new(progress);
        let mut packer = Packer::new(codec(compression))?;
        let (mut reclaimed, mut before) = (Reclaimed::default(), 0);
        for (object, blocks) in objects {
            let mut at = 0;
            while at < blocks {
                let step = match self.engine.pack_step(object, at..blocks, &mut packer) {
                    // The snapshot was deleted meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound && object != disk => break,
                    step => step.map_err(|error| error.context(name))?,
                };
                at = step.next;
                reclaimed.freed += bytes(step.packed.saturating_sub(step.stored));
                reclaimed.moved += bytes(step.packed);
                let moved = bytes(step.read + step.stored);
                if throttle.step(before + bytes(at.min(blocks)), total, moved) == ControlFlow::Break(()) {
                    return Err(Error::new(
                        ErrorKind::Interrupted,
                        format!("{name}: stopped; what was compressed stays compressed"),
                    ));
                }
            }
            before += bytes(blocks);
        }
        // The plain blocks become free when the packs are durable.
        self.engine.checkpoint()?;
        Ok(reclaimed)
    }
}
