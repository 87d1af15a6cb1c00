//! Replay: carrying out again what the journal holds behind the last checkpoint.
//!
//! The order of the journal is the order in which changes were made, but for announcements, which overtake the changes
//! that are pending: a block may be announced before the journal tells what an earlier write left there. So what has
//! been announced stays in doubt until the journal says that a flush of the data files has settled it, whatever is said
//! of the block meanwhile.
//!
//! What must hold at the end: the entry of each block in use has the checksum of what is on the medium, or is suspect.
//! Suspect blocks were being overwritten by a write of which nobody was told that it is durable: what is found there is
//! their content.

use super::apply::Effects;
use super::{Engine, Meta};
use crate::journal::{Batch, BatchKind, Operation, Place, Reader};
use crate::space::Run;
use crate::{Error, ErrorKind, IoContext, Result, checksum};
use backend::Buffer;
use rustc_hash::FxHashMap;

/// What is in doubt, by block.
#[derive(Default)]
struct Replay {
    /// Overwrites that were announced: position, and the checksum of what was to be written.
    overwritten: FxHashMap<u64, (u64, u32)>,
    /// Permits to overwrite with anything: position.
    permitted: FxHashMap<u64, u64>,
}

impl Replay {
    /// The journal tells what is in these blocks after any overwrite that it has announced before. Permits go on: they
    /// end with a flush only.
    fn told(&mut self, run: &Run) {
        for block in blocks(run) {
            self.overwritten.remove(&block);
        }
    }

    fn in_doubt(&self, block: u64) -> bool {
        self.overwritten.contains_key(&block) || self.permitted.contains_key(&block)
    }
}

fn blocks(run: &Run) -> std::ops::Range<u64> {
    run.start..run.start + run.blocks
}

impl Engine {
    /// Carries out the operations from `from` to `end` again: urgent ones all, others from `ordered` on.
    pub(super) fn replay(&self, from: Place, ordered: Place, end: Place) -> Result<u64> {
        let mut replay = Replay::default();
        let mut count = 0;
        let mut place = from;
        while place != end {
            let batch = {
                let commit = self.commit.lock();
                commit.journal.read(place, 0)?
            };
            let Some(Batch { kind, body, next, .. }) = batch else {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("the journal could be read a moment ago and cannot now, at {}", place.position),
                ));
            };
            // What was pending when the checkpoint captured its pages is in them already.
            if kind == BatchKind::Urgent || kind == BatchKind::Operations && place >= ordered {
                let mut reader = Reader::new(&body);
                while let Some(operation) = reader.next_operation()? {
                    self.replay_one(&mut replay, &operation, place.position).map_err(|error| {
                        error.context(format!("replaying the journal at {} failed", place.position))
                    })?;
                    count += 1;
                }
            }
            place = next;
        }
        self.put_payload_home(&replay)?;
        Ok(count)
    }

    fn replay_one(&self, replay: &mut Replay, operation: &Operation, position: u64) -> Result<()> {
        let mut guard = self.meta.lock();
        let meta = &mut *guard;
        self.ensure_nodes(meta, super::apply::NODES_PER_OPERATION)?;
        match operation {
            Operation::Overwrite { run, checksums } => {
                replay.overwritten.extend(blocks(run).zip(checksums.iter().map(|sum| (position, *sum))));
            }
            Operation::Announce { run } => replay.permitted.extend(blocks(run).map(|block| (block, position))),
            Operation::Synced { position: settled } => meta.settle(replay, *settled)?,
            _ => {}
        }
        let mut effects = Effects::default();
        meta.apply(operation, &mut effects)?;
        for run in effects.freed {
            replay.told(&run);
            meta.data.release(run);
        }
        match operation {
            Operation::Map { run, .. }
            | Operation::MapData { run, .. }
            | Operation::Written { run, .. }
            | Operation::OverwriteData { run, .. }
            | Operation::Checksums { run, .. } => {
                replay.told(run);
                meta.doubt(replay, *run)
            }
            // Read while it was being overwritten: what was found then need not be there any more.
            Operation::Resolve { block, .. } => meta.doubt(replay, Run { start: *block, blocks: 1 }),
            _ => Ok(()),
        }
    }

    /// Writes journalled payload to its place, unless a later announced overwrite is found whole there.
    fn put_payload_home(&self, replay: &Replay) -> Result<()> {
        let logged = std::mem::take(&mut self.meta.lock().logged);
        for (block, slice) in logged {
            let run = Run { start: block, blocks: 1 };
            let (file, offset) = self.files.locate(run)?;
            if let Some((_, announced)) = replay.overwritten.get(&block) {
                let mut found = Buffer::zeroed(1);
                file.read_at(&mut found, offset).during(|| format!("reading block {block}"))?;
                if checksum(&found) == *announced {
                    continue;
                }
            }
            file.write_at(&[&slice], offset, false).during(|| format!("writing journalled block {block} home"))?;
            self.files.touch(run);
            let mut guard = self.meta.lock();
            let Meta { data, pages, .. } = &mut *guard;
            let sum = checksum(&slice);
            data.annotate(pages, run, |_, entry| {
                entry.checksum = sum;
                entry.suspect = false;
            })?;
        }
        self.files.sync()
    }
}

impl Meta {
    /// A flush of the data files covered what was announced before `settled`.
    fn settle(&mut self, replay: &mut Replay, settled: u64) -> Result<()> {
        let mut done = Vec::new();
        replay.overwritten.retain(|block, (at, _)| {
            let keep = *at >= settled;
            if !keep {
                done.push((*block, true));
            }
            keep
        });
        replay.permitted.retain(|block, at| {
            let keep = *at >= settled;
            if !keep {
                done.push((*block, false));
            }
            keep
        });
        for (block, written) in done {
            let run = Run { start: block, blocks: 1 };
            // What was overwritten is durable at home: older payload must not come over it. What was only permitted to
            // be overwritten has said by its checksums whether it was.
            if written {
                self.forget_logged(run);
            }
            if !replay.in_doubt(block) {
                self.data.annotate(&mut self.pages, run, |_, entry| entry.suspect = false)?;
            }
        }
        Ok(())
    }

    /// Marks what is in doubt of a run whose checksums have just been noted.
    fn doubt(&mut self, replay: &Replay, run: Run) -> Result<()> {
        for block in blocks(&run).filter(|block| replay.in_doubt(*block)) {
            self.data.annotate(&mut self.pages, Run { start: block, blocks: 1 }, |_, entry| entry.suspect = true)?;
        }
        Ok(())
    }
}
