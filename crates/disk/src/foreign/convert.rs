//! Disks in VMware's formats as sources and targets of a conversion.

use super::snapshots::TEMPORARY;
use super::{Foreign, ForeignDisk, ForeignReplica};
use crate::convert::{CopyPiece, HoldingSource, Pieces, Sink, Source};
use crate::info::ImageKind;
use backend::BLOCK_SIZE;
use chain::Chain;
use error::Result;
use std::sync::Arc;
use work::{NoProgress, Progress};

/// Largest unit in which a target is filled. If a format has larger grains, the layer completes partial grains itself.
const UNIT_MAX: u64 = 1 << 20;

impl Foreign {
    /// A disk or snapshot as a source. A disk is read through a temporary snapshot. The snapshot is merged back when
    /// the source is dropped, or after a crash when the datastore is opened.
    pub(crate) fn conversion_source<'a>(
        &'a self,
        entry: &Arc<ForeignDisk>,
        snapshot: Option<&str>,
    ) -> Result<Box<dyn Source + 'a>> {
        let point = match snapshot {
            Some(_) => None,
            None => {
                let name = self.snapshot_for(entry, "converting", TEMPORARY)?;
                Some(Point { foreign: self, entry: Arc::clone(entry), name })
            }
        };
        let name = point.as_ref().map(|point| point.name.as_str()).or(snapshot);
        // The snapshot is closed before it is deleted.
        Ok(Box::new(HoldingSource::new(self.open_device(entry, name, true)?, point)))
    }

    /// A new disk as a target. The caller has reserved its name.
    pub(crate) fn conversion_target<'a>(
        &'a self,
        name: &str,
        kind: ImageKind,
        capacity: u64,
        progress: &dyn Progress,
    ) -> Result<Box<dyn Sink + 'a>> {
        let replica = self.replica(&vmdk::NewDisk::new(name, capacity, kind, None), progress)?;
        match replica.disk.chain() {
            Ok(chain) => Ok(Box::new(ForeignSink { foreign: self, replica, chain })),
            Err(error) => {
                self.remove_replica(replica);
                Err(error)
            }
        }
    }

    fn remove_replica(&self, replica: ForeignReplica) {
        if let Err(error) = self.remove_moved(&replica.folder, replica.disk) {
            let folder = &replica.folder;
            tracing::warn!(%error, folder, "the next opening of the datastore removes an unfinished disk");
        }
    }
}

/// A temporary snapshot that is deleted when this value is dropped.
struct Point<'a> {
    foreign: &'a Foreign,
    entry: Arc<ForeignDisk>,
    name: String,
}

impl Drop for Point<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.foreign.delete_snapshot(&self.entry, &self.name, None, &NoProgress) {
            let snapshot = &self.name;
            let text = "the snapshot of a conversion was not deleted; the next opening of the datastore deletes it";
            tracing::warn!(%error, snapshot, "{text}");
        }
    }
}

/// A new disk that is written sequentially and that clients cannot open yet.
struct ForeignSink<'a> {
    foreign: &'a Foreign,
    replica: ForeignReplica,
    chain: Arc<Chain>,
}

impl Sink for ForeignSink<'_> {
    fn unit(&self) -> u64 {
        let grain = self.chain.statistics().levels.first().map_or(BLOCK_SIZE as u64, |level| level.grain);
        if grain.is_power_of_two() { grain.min(UNIT_MAX) } else { BLOCK_SIZE as u64 }
    }

    fn fill(&mut self, pieces: &mut Pieces<'_>) -> Result<()> {
        let chain = &self.chain;
        let take = |piece: &CopyPiece| {
            piece.runs.iter().try_for_each(|run| chain.write(piece.start + run.start as u64, piece.bytes(run)))
        };
        while pieces.next(take)? {}
        Ok(())
    }

    fn finish(self: Box<Self>, _: &dyn Progress) -> Result<()> {
        let Self { foreign, replica, chain } = *self;
        let flushed = chain.flush();
        drop(chain);
        match flushed.and_then(|()| foreign.complete(&replica.folder)) {
            Ok(()) => {
                foreign.insert(replica.folder, replica.disk);
                Ok(())
            }
            Err(error) => {
                foreign.remove_replica(replica);
                Err(error)
            }
        }
    }

    fn abandon(self: Box<Self>) {
        let Self { foreign, replica, chain } = *self;
        drop(chain);
        foreign.remove_replica(replica);
    }
}
