//! Verification of data blocks, while the store is in use or while all requests wait: by checks, and by a scrub.
//!
//! The expected checksum is read from the table under the metadata lock; the block is read without the lock. If the
//! block does not match its checksum, it is only in doubt, because it may have been overwritten between the two reads.
//! Blocks in doubt are verified again a few times. Blocks that still differ are verified while no write to the data
//! files is under way (under `gate` and `through`, for the time of reading a few blocks). A block that differs then is
//! damaged.
//!
//! What must hold, so that no undamaged block is reported:
//!
//! 1. From the read of the table until the end of the read of the block, the block is not reused, because the check
//!    holds the epoch ([`super::metadata`]).
//! 2. Under `gate` and `through` the table describes what the medium holds, with two exceptions. One is journalled
//!    payload that is not written to the data files. The other is unwritten blocks. They are of two kinds: blocks
//!    without a checksum, which were freed and reserved again since the view was made, and blocks that are not read,
//!    because no tree of the view maps them as written.

use super::Engine;
use super::check::{Report, Steps, Window, check_catalog};
use super::metadata::Sight;
use super::scrub::DamagedPlace;
use crate::space::{BlockEntry, Run};
use crate::{FILE_BLOCKS, IoContext, Result, checksum};
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Blocks read at a time (1 MiB).
const VERIFY_BLOCKS: u64 = 256;
/// Blocks in doubt that are verified again together.
const DOUBTS_MAX: usize = 256;
/// How often blocks in doubt are verified without stopping writes.
const ROUNDS: u32 = 4;
/// The pause between these verifications: a batch of writes ends within a few milliseconds.
const PAUSE: Duration = Duration::from_millis(4);
/// Blocks verified while the locks that stop writes are held.
const BLOCKS_PER_HOLD: usize = 4;

/// Whether the store is in use during the check.
#[derive(Clone, Copy)]
pub(super) enum StoreActivity<'a> {
    /// Clients read and write.
    Running,
    /// All requests wait. The map is the journalled payload that is not written to the data files.
    Stopped(&'a BTreeMap<u64, SharedSlice>),
}

/// The expected content of a block.
#[derive(Clone, Copy)]
pub(super) enum Expected {
    /// The block is free, or its content on the medium has no meaning.
    Nothing,
    Checksum(u32),
    /// A crash may have cut off an overwrite of the block that was not acknowledged as durable: any content is valid.
    Any,
}

/// The result for a block.
pub(super) enum Found {
    Good,
    Unreadable(String),
    Differs { expected: u32, found: u32 },
}

/// Reads a run of data blocks into memory.
pub(super) type ReadRun<'a> = &'a dyn Fn(Run, &mut [u8]) -> Result<()>;

fn expected(entry: BlockEntry, logged: bool) -> Expected {
    match entry {
        _ if entry.references == 0 || logged => Expected::Nothing,
        _ if entry.suspect => Expected::Any,
        _ => Expected::Checksum(entry.checksum),
    }
}

fn compare(expected: u32, bytes: &[u8]) -> Found {
    match checksum(bytes) {
        found if found == expected => Found::Good,
        found => Found::Differs { expected, found },
    }
}

impl Engine {
    /// Reads and verifies the written blocks of a window.
    pub(super) fn verify_window(
        &self,
        sight: &mut Sight<'_>,
        standing: StoreActivity<'_>,
        window: &Window,
        report: &mut Report,
        steps: &mut Steps<'_>,
    ) -> Result<()> {
        let mut doubts = Vec::new();
        let mut at = window.range.clone();
        while let Some(run) = next_written(window, &mut at) {
            let differing = self.compare_run(sight, standing, run, report)?;
            match standing {
                StoreActivity::Running => doubts.extend(differing.into_iter().map(|(block, _)| block)),
                StoreActivity::Stopped(_) => self.report_blocks(sight, standing, differing, report)?,
            }
            if doubts.len() >= DOUBTS_MAX {
                self.settle_doubts(sight, &mut doubts, report)?;
            }
            steps.pass(run.blocks)?;
        }
        self.settle_doubts(sight, &mut doubts, report)
    }

    /// Reads a run with one request. Returns the blocks that fail their checksums or cannot be read.
    pub(super) fn compare_run(
        &self,
        sight: &mut Sight<'_>,
        standing: StoreActivity<'_>,
        run: Run,
        report: &mut Report,
    ) -> Result<Vec<(u64, Found)>> {
        let (wanted, _guard) = match standing {
            StoreActivity::Running => self.expected_now(run)?,
            StoreActivity::Stopped(logged) => {
                let mut wanted = Vec::with_capacity(run.blocks as usize);
                for block in run.start..run.start + run.blocks {
                    wanted.push(expected(sight.entry(block)?, logged.contains_key(&block)));
                }
                (wanted, Arc::default())
            }
        };
        let (file, offset) = self.files.locate(run)?;
        let mut bytes = Buffer::recycled(run.blocks as usize);
        let whole = file.read_at(&mut bytes, offset).is_ok();
        let mut differing = Vec::new();
        for ((block, content), wanted) in (run.start..).zip(bytes.chunks_exact(BLOCK_SIZE)).zip(wanted) {
            let Expected::Checksum(sum) = wanted else { continue };
            // If a sector of the run is unreadable, the blocks are read one by one.
            let found = if whole {
                compare(sum, content)
            } else {
                read_one(&|run, into| self.read_run(run, into), block, Some(sum))
            };
            match found {
                Found::Good => report.verified += 1,
                found => differing.push((block, found)),
            }
        }
        Ok(differing)
    }

    /// The current checksums of a run. While the returned guard exists, none of these blocks is reused.
    pub(super) fn expected_now(&self, run: Run) -> Result<(Vec<Expected>, Arc<()>)> {
        self.meta.look(|meta| {
            let mut wanted = Vec::with_capacity(run.blocks as usize);
            for block in run.start..run.start + run.blocks {
                wanted.push(expected(meta.entry(block)?, meta.logged.contains_key(&block)));
            }
            Ok((wanted, meta.freed.guard()))
        })
    }

    pub(super) fn read_run(&self, run: Run, bytes: &mut [u8]) -> Result<()> {
        let (file, offset) = self.files.locate(run)?;
        file.read_at(bytes, offset).during(|| format!("reading block {}", run.start))
    }

    /// Compares a block with its current checksum.
    pub(super) fn look_again(&self, read: ReadRun<'_>, block: u64) -> Result<Found> {
        let (wanted, _guard) = self.expected_now(Run { start: block, blocks: 1 })?;
        Ok(match wanted[..] {
            [Expected::Checksum(sum)] => read_one(read, block, Some(sum)),
            [Expected::Any] => read_one(read, block, None),
            _ => Found::Good,
        })
    }

    /// Returns those blocks in doubt that are damaged.
    pub(super) fn confirm(&self, read: ReadRun<'_>, mut doubts: Vec<u64>) -> Result<Vec<(u64, Found)>> {
        for round in 0..ROUNDS {
            if doubts.is_empty() {
                return Ok(Vec::new());
            }
            if round > 0 {
                crate::sync::thread::sleep(PAUSE * round);
            }
            let mut left = Vec::new();
            for block in doubts {
                if !matches!(self.look_again(read, block)?, Found::Good) {
                    left.push(block);
                }
            }
            doubts = left;
        }
        let mut damaged = Vec::new();
        for part in doubts.chunks(BLOCKS_PER_HOLD) {
            let _gate = self.writeback.lock();
            let _through = self.writeback.stop_through();
            for block in part {
                match self.look_again(read, *block)? {
                    Found::Good => {}
                    found => damaged.push((*block, found)),
                }
            }
        }
        Ok(damaged)
    }

    /// Reports those blocks in doubt that are damaged.
    fn settle_doubts(&self, sight: &mut Sight<'_>, doubts: &mut Vec<u64>, report: &mut Report) -> Result<()> {
        let examined = doubts.len();
        let damaged = self.confirm(&|run, into| self.read_run(run, into), std::mem::take(doubts))?;
        report.verified += (examined - damaged.len()) as u64;
        let mut still = Vec::new();
        for (block, found) in damaged {
            // Otherwise the block was freed since the view was made, and reserved again without being written.
            if !matches!(found, Found::Differs { expected: 0, .. }) || sight.entry(block)?.checksum == 0 {
                still.push((block, found));
            }
        }
        self.report_blocks(sight, StoreActivity::Running, still, report)
    }

    /// Reports damaged blocks, with the disks and snapshots that have content in them.
    fn report_blocks(
        &self,
        sight: &mut Sight<'_>,
        standing: StoreActivity<'_>,
        blocks: Vec<(u64, Found)>,
        report: &mut Report,
    ) -> Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let roots = check_catalog(sight.catalog, &mut Report::default());
        let places: Vec<DamagedPlace> = blocks.iter().map(|(block, _)| DamagedPlace::Block(*block)).collect();
        // Findings that are left out need no room, so all places are searched for if there is any.
        let searched = if report.room() > 0 { places.len() } else { 0 };
        let owners = sight.owners_of(&roots, &places, searched, &|pack| self.read_index(pack))?;
        for ((block, found), owners) in blocks.into_iter().zip(owners) {
            // The block belongs to a pack, and all contents in this part of the pack were replaced. The place may have
            // got another pack since the view was made, whose index was read then: its damage is reported.
            let is_unused = owners.are_none() && self.is_as_in(sight, standing, block)?;
            let what = match found {
                Found::Good => {
                    report.verified += 1;
                    continue;
                }
                Found::Unreadable(error) => error,
                Found::Differs { expected, found } => {
                    report.verified += 1;
                    format!("data block {block} fails its checksum (expected {expected:08x}, found {found:08x})")
                }
            };
            if !is_unused {
                report.add_at(format!("{what}: {}", owners.offsets()), None, owners.places());
            }
        }
        Ok(())
    }

    /// Whether a block has the checksum that it has in a view, so that it was not reused since.
    fn is_as_in(&self, sight: &mut Sight<'_>, standing: StoreActivity<'_>, block: u64) -> Result<bool> {
        match standing {
            StoreActivity::Running => {
                let now = self.meta.look(|meta| Ok(meta.entry(block)?.checksum))?;
                Ok(sight.entry(block)?.checksum == now)
            }
            // The metadata, which is locked, is the view itself.
            StoreActivity::Stopped(_) => Ok(true),
        }
    }
}

/// The next blocks of a range that trees map as written, as many as are read at a time. Advances the range.
pub(super) fn next_written(window: &Window, range: &mut Range<u64>) -> Option<Run> {
    let start = range.find(|block| window.written(*block))?;
    let goes_on = |block: u64| {
        block < range.end
            && block - start < VERIFY_BLOCKS
            && window.written(block)
            && !block.is_multiple_of(FILE_BLOCKS)
    };
    let end = (start + 1..).find(|block| !goes_on(*block)).unwrap_or(range.end);
    range.start = end;
    Some(Run { start, blocks: end - start })
}

/// Reads a block, and compares it with a checksum if there is one.
pub(super) fn read_one(read: ReadRun<'_>, block: u64, sum: Option<u32>) -> Found {
    let mut one = Buffer::zeroed(1);
    match read(Run { start: block, blocks: 1 }, &mut one) {
        Ok(()) => sum.map_or(Found::Good, |sum| compare(sum, &one)),
        Err(error) => Found::Unreadable(error.to_string()),
    }
}
