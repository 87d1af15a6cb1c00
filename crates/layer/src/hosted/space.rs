//! Allocation of new grains, and reuse of old ones.
//!
//! Grains are appended. The file grows in large steps of unallocated space, and closing truncates it to
//! [`Space::used`]. A grain that no table names any more is *retired* ([`crate::retirement`]): when no table on the
//! device names it and no operation uses it, it is punched and becomes free, so that every free grain reads as zeros.
//! Grains that a crash leaves without an entry are found when the image is next opened for writing.

use crate::epochs::Epochs;
use crate::retirement::Retirement;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes by which the file grows at a time.
const GROWTH: u64 = 64 << 20;

/// The most runs of free grains remembered; others stay dead until the image is opened after a crash, or copied.
const FREE_RUNS_MAX: usize = 1 << 16;

/// The first sector that no 32-bit entry can name as the start of a grain; the largest number is reserved for damage.
const SECTORS_END: u64 = u32::MAX as u64;

/// The most runs of retired grains remembered; others stay dead until the image is opened after a crash, or copied.
const RETIRED_RUNS_MAX: usize = 1 << 20;

/// Consecutive sectors of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SectorRun {
    pub(super) start: u64,
    pub(super) sectors: u64,
}

struct SpaceState {
    /// The first sector that was never used.
    used: u64,
    /// Length of the file, in sectors.
    length: u64,
    free: BTreeMap<u64, u64>,
    /// Retired grains, in sectors.
    retirement: Retirement,
    /// The rest of the last allocation for tables.
    tables: SectorRun,
}

/// The allocation state of one file.
pub(super) struct Space {
    image: String,
    grain: u64,
    /// Held by each operation while it uses file locations from the tables.
    pub(super) epochs: Epochs,
    state: Mutex<SpaceState>,
}

impl Space {
    /// The state for a file that is used up to sector `used`.
    pub(super) fn new(image: &str, grain: u64, used: u64) -> Self {
        let used = used.next_multiple_of(grain);
        let state = SpaceState {
            used,
            length: 0,
            free: BTreeMap::new(),
            retirement: Retirement::new(RETIRED_RUNS_MAX),
            tables: SectorRun { start: 0, sectors: 0 },
        };
        Self { image: image.to_owned(), grain, epochs: Epochs::new(), state: Mutex::new(state) }
    }

    /// The first sector that was never used.
    pub(super) fn used(&self) -> u64 {
        self.state.lock().used
    }

    /// Truncates the file to its used part.
    pub(super) fn cut(&self, file: &dyn File) -> Result<()> {
        let mut state = self.state.lock();
        file.set_len(state.used * SECTOR).during(|| format!("{}: cannot truncate its unused end", self.image))?;
        state.length = state.used;
        Ok(())
    }

    /// Sectors free for reuse.
    pub(super) fn free(&self) -> u64 {
        self.state.lock().free.values().sum()
    }

    /// Allocates `grains` grains, in as few runs as possible. They read as zeros, and no table names them.
    pub(super) fn allocate(&self, file: &dyn File, grains: u64, out: &mut Vec<SectorRun>) -> Result<()> {
        let mut state = self.state.lock();
        let mut left = grains * self.grain;
        let before = out.len();
        while left > 0 {
            let Some((start, sectors)) = state.free.pop_first() else { break };
            let taken = sectors.min(left);
            if taken < sectors {
                state.free.insert(start + taken, sectors - taken);
            }
            left -= taken;
            push(out, SectorRun { start, sectors: taken });
        }
        if left > 0 {
            match self.append(&mut state, file, left) {
                Ok(run) => push(out, run),
                Err(error) => {
                    for run in out.drain(before..) {
                        insert_free(&mut state.free, run);
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Allocates `sectors` sectors, which read as zeros, for a table.
    pub(super) fn allocate_table(&self, file: &dyn File, sectors: u64) -> Result<u32> {
        let mut state = self.state.lock();
        if state.tables.sectors < sectors {
            // The size is rounded up to whole grains, so that later grains stay aligned.
            let size = sectors.next_multiple_of(self.grain);
            state.tables = self.append(&mut state, file, size)?;
        }
        let place = state.tables.start;
        state.tables.start += sectors;
        state.tables.sectors -= sectors;
        u32::try_from(place).map_err(|_| self.full())
    }

    /// Frees the sectors of a table if it was allocated last; the sectors of any other table stay unused.
    pub(super) fn give_table_back(&self, place: u32, sectors: u64) {
        let mut state = self.state.lock();
        if state.tables.start == u64::from(place) + sectors {
            state.tables.start -= sectors;
            state.tables.sectors += sectors;
        }
    }

    fn append(&self, state: &mut SpaceState, file: &dyn File, sectors: u64) -> Result<SectorRun> {
        let start = state.used;
        let end = start.checked_add(sectors).filter(|end| *end <= SECTORS_END).ok_or_else(|| self.full())?;
        if end > state.length {
            let length = (end * SECTOR).next_multiple_of(GROWTH);
            file.set_len(length).during(|| format!("{}: cannot grow", self.image))?;
            state.length = length / SECTOR;
        }
        state.used = end;
        Ok(SectorRun { start, sectors })
    }

    fn full(&self) -> Error {
        let what = format!("{}: the extent has reached 2 TiB, the limit of its 32-bit sector numbers", self.image);
        Error::new(ErrorKind::NoSpace, what)
    }

    /// Retires grains that no table in memory names any more.
    pub(super) fn retire(&self, places: impl Iterator<Item = u32>) {
        let mut state = self.state.lock();
        for place in places.map(u64::from) {
            give_up(&mut state.retirement, place..place + self.grain);
        }
    }

    /// Retires grains that were allocated and never named by a table. They may contain data, so they become free only
    /// after they were punched.
    pub(super) fn give_back(&self, runs: &[SectorRun]) {
        let mut state = self.state.lock();
        for run in runs {
            give_up(&mut state.retirement, run.start..run.start + run.sectors);
        }
    }

    /// Called when a commit begins, before it takes the tables.
    pub(super) fn begin_commit(&self) {
        self.state.lock().retirement.begin_commit(&self.epochs);
    }

    /// Called when the commit that began last is durable: punches and frees the retired grains that no operation uses
    /// any more. Calls do not overlap.
    pub(super) fn complete_commit(&self, file: &dyn File) {
        let mut ready: Vec<Range<u64>> = Vec::new();
        {
            let mut state = self.state.lock();
            state.retirement.complete_commit();
            while let Some(places) = state.retirement.next_ready(&self.epochs, u64::MAX) {
                ready.push(places);
            }
        }
        ready.sort_unstable_by_key(|places| places.start);
        let mut runs: Vec<SectorRun> = Vec::new();
        for places in ready {
            push(&mut runs, SectorRun { start: places.start, sectors: places.end - places.start });
        }
        runs.into_iter().for_each(|run| self.free_run(run, file));
        self.state.lock().retirement.released();
    }

    /// Punches and frees a run that no table names. If punching fails, the run stays dead: only space is lost.
    pub(super) fn free_run(&self, run: SectorRun, file: &dyn File) {
        if let Err(error) = file.punch(run.start * SECTOR, run.sectors * SECTOR) {
            tracing::warn!(image = self.image, sector = run.start, "cannot free space: {error}");
            return;
        }
        let mut state = self.state.lock();
        if state.free.len() < FREE_RUNS_MAX {
            insert_free(&mut state.free, run);
        }
    }
}

/// Retires grains. Those beyond the limit are dropped: they stay dead, and the next opening for writing finds them.
fn give_up(retirement: &mut Retirement, places: Range<u64>) {
    let _remembered = retirement.give_up(places);
}

/// Appends a run, joined with the last one if they are adjacent.
fn push(runs: &mut Vec<SectorRun>, run: SectorRun) {
    match runs.last_mut() {
        Some(last) if last.start + last.sectors == run.start => last.sectors += run.sectors,
        _ => runs.push(run),
    }
}

fn insert_free(free: &mut BTreeMap<u64, u64>, run: SectorRun) {
    let mut run = run;
    if let Some(after) = free.remove(&(run.start + run.sectors)) {
        run.sectors += after;
    }
    if let Some((_, before)) =
        free.range_mut(..run.start).next_back().filter(|(start, len)| *start + **len == run.start)
    {
        *before += run.sectors;
        return;
    }
    free.insert(run.start, run.sectors);
}
