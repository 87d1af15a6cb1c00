//! Shrinking: finds dead space, moves live grains from the end of the file into it, and truncates the file. The extent
//! stays in use: reads continue, and writes wait for one step at a time, of at most 1 MiB.
//!
//! The steps of a round, with `target` as the end of the file without dead space:
//!
//! ```text
//! commit, and wait for readers that looked up locations before: then sectors that no table names are unused
//! find the holes below the target; from here on new grains are allocated there, too
//! step by step: copy grains and tables from above the target into holes, and enter the new locations
//! commit: copies are durable before the entries that name them
//! wait for readers that looked up the old locations, and truncate the file
//! ```
//!
//! After a crash a grain is at its old or its new location, and the other one is dead space. The next round moves
//! grains that writes appended meanwhile. It also moves grains and tables for which every hole was too small: its
//! target is higher by their size.

use super::VmfsSparse;
use super::commit::Writer;
use super::header::TABLE_SECTORS;
use super::space::{ALIGNMENT, Place};
use super::tables::{DATA, PARTS_ALL, parts_of};
use crate::runs::EntryRun;
use crate::runs::marks::{Marks, WINDOW};
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use rustc_hash::FxHashSet;
use std::time::{Duration, Instant};
use work::{Progress, Throttle};

/// Sectors moved while writes wait: 1 MiB, which takes a fraction of a millisecond.
const STEP_SECTORS: u64 = 2048;

/// The most rounds: each moves only what did not fit in the previous one, or was appended since.
const ROUNDS_MAX: usize = 8;

/// How long shrinking waits for the end of a read that may use old locations, before it fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// The pause between two checks for the end of such reads.
const PAUSE: Duration = Duration::from_micros(200);

/// The result of shrinking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// Length of the file before, in bytes.
    pub before: u64,
    /// Length of the file afterwards, in bytes.
    pub after: u64,
    /// Bytes moved.
    pub moved: u64,
}

/// The state of one round of shrinking.
struct Round<'a> {
    writer: &'a Writer,
    /// The end of the file after this round.
    target: u64,
    /// End of the last grain or table that could not be moved.
    left: u64,
    /// Sectors that could not be moved.
    unmoved: u64,
    moved: u64,
}

impl VmfsSparse {
    /// Returns dead space to the file system. `progress` is called at each step and can cancel the work
    /// ([`ErrorKind::Interrupted`]); completed steps stay done.
    pub fn shrink(&self, progress: &dyn Progress) -> Result<Shrunk> {
        let writer = self.writer()?;
        let Some(_shrinking) = writer.shrinking.try_lock() else {
            return Err(Error::new(ErrorKind::Busy, format!("{}: it is being shrunk already", self.image)));
        };
        let length = || self.file.file().len().during(|| format!("{}: cannot find out its length", self.image));
        let throttle = Throttle::new(progress);
        let mut shrunk = Shrunk { before: length()?, ..Shrunk::default() };
        let mut slack = 0;
        for _ in 0..ROUNDS_MAX {
            let (more, unmoved) = self.shrink_once(writer, slack, &mut shrunk.moved, &throttle)?;
            if !more && unmoved == 0 {
                break;
            }
            slack += 2 * unmoved;
        }
        shrunk.after = length()?;
        Ok(shrunk)
    }

    /// Performs one round. Returns whether writes appended data meanwhile, and how many sectors could not be moved.
    fn shrink_once(
        &self,
        writer: &Writer,
        slack: u64,
        moved: &mut u64,
        throttle: &Throttle<&dyn Progress>,
    ) -> Result<(bool, u64)> {
        self.settle(writer)?;
        // The gate is held exclusively, so that no write has allocated a grain and not entered it yet: such a grain
        // would look dead.
        let end = {
            let open = writer.gate.write();
            self.check_open(writer, *open)?;
            let mut space = writer.space.lock();
            space.forget_holes();
            space.free()
        };
        let target = self.target(end)? + slack;
        if target >= end {
            return Ok((self.cut(writer, end, end)?, 0));
        }
        let mut round = Round { writer, target, left: target, unmoved: 0, moved: 0 };
        let result = self.move_all(&mut round, *moved, throttle);
        *moved += round.moved * SECTOR;
        // A commit is made even after a cancellation, because the grains moved so far keep their new locations.
        self.settle(writer)?;
        result?;
        Ok((self.cut(writer, end, round.left)?, round.unmoved))
    }

    /// The end that the file would have if its used part, up to sector `end`, had no dead space.
    fn target(&self, end: u64) -> Result<u64> {
        let mut used = self.tables.data_start();
        for index in 0..self.tables.count() {
            let Some(table) = self.tables.survey(&self.file, index)? else { continue };
            if self.tables.place(index) < end {
                used += TABLE_SECTORS;
            }
            let runs = table.runs().filter(|run| run.kind == DATA && run.place < end);
            used += runs.map(|run| u64::from(run.count) * self.header.grain()).sum::<u64>();
        }
        Ok(used.next_multiple_of(ALIGNMENT).min(end))
    }

    /// Makes all changes durable, and waits for operations that may use locations which no table names any more.
    fn settle(&self, writer: &Writer) -> Result<()> {
        self.flush_writes(writer)?;
        let (epoch, begun) = (writer.epochs.end(), Instant::now());
        while !writer.epochs.is_over(epoch) {
            if begun.elapsed() > PATIENCE {
                let what = format!("{}: reads have been under way for {} s", self.image, PATIENCE.as_secs());
                return Err(Error::new(ErrorKind::Busy, format!("{what}: shrink it later")));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn move_all(&self, round: &mut Round<'_>, before: u64, throttle: &Throttle<&dyn Progress>) -> Result<()> {
        let mut start = self.tables.data_start();
        while start < round.target {
            let mut marks = Marks::new(start..round.target.min(start + WINDOW));
            self.mark(&mut marks)?;
            {
                let mut space = round.writer.space.lock();
                for hole in marks.unmarked() {
                    if space.is_full() {
                        break;
                    }
                    space.give_back(Place { start: hole.start, sectors: hole.end - hole.start });
                }
            }
            start = marks.window.end;
            drop(marks);
            round.left = round.target;
            round.unmoved = 0;
            for index in 0..self.tables.count() {
                let mut told = round.moved;
                while self.move_step(round, index)? {
                    // Each moved byte is read and written.
                    let moved = 2 * (round.moved - std::mem::replace(&mut told, round.moved)) * SECTOR;
                    let done = before + round.moved * SECTOR;
                    if throttle.step(done, done, moved).is_break() {
                        let what = format!("{}: shrinking was stopped", self.image);
                        return Err(Error::new(ErrorKind::Interrupted, what));
                    }
                }
            }
            if round.unmoved == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Moves a part of table `index`; returns false if nothing more is to be moved, or no hole is large enough.
    fn move_step(&self, round: &mut Round<'_>, index: u32) -> Result<bool> {
        let Some(table) = self.tables.survey(&self.file, index)? else { return Ok(false) };
        let grain = self.header.grain();
        let target = round.target;
        let beyond = |run: &EntryRun| run.kind == DATA && run.place + u64::from(run.count) * grain > target;
        let table_beyond = self.tables.place(index) + TABLE_SECTORS > round.target;
        if !table_beyond && !table.runs().any(|run| beyond(&run)) {
            return Ok(false);
        }
        drop(table);
        self.back_table(round.writer, index)?;
        // While the gate is held exclusively there are no writes and no commits; reads continue.
        let open = round.writer.gate.write();
        self.check_open(round.writer, *open)?;
        let mut between_commits = round.writer.commits.turn();
        if table_beyond && self.move_table(round, index, &mut between_commits)? {
            round.moved += TABLE_SECTORS;
            return Ok(true);
        }
        let load = || self.tables.load(&self.file, index);
        let runs: Vec<EntryRun> = self.tables.cache.read(index, load, |table| table.runs().filter(beyond).collect())?;
        let before = round.moved;
        let mut unmoved = if table_beyond { TABLE_SECTORS } else { 0 };
        for run in runs {
            // A grain that begins below the target stays there.
            let stays = round.target.saturating_sub(run.place).div_ceil(grain).min(u64::from(run.count)) as u32;
            let mut at = stays;
            while at < run.count && round.moved - before < STEP_SECTORS {
                let place = run.place + u64::from(at) * grain;
                let wanted = u64::from(run.count - at) * grain;
                let taken = round.writer.space.lock().take_part(wanted.min(STEP_SECTORS.max(grain)), grain);
                let Some(taken) = taken else { break };
                self.copy(place, taken)?;
                let count = (taken.sectors / grain) as u32;
                let entries = run.first + at..run.first + at + count;
                let load = || self.tables.load(&self.file, index);
                self.tables.cache.change(index, load, |table| {
                    table.set(entries.clone(), DATA, taken.start);
                    ((), parts_of(&entries))
                })?;
                at += count;
                round.moved += taken.sectors;
            }
            let end_of = |count: u32| run.place + u64::from(count) * grain;
            if at < run.count && round.moved - before < STEP_SECTORS {
                round.left = round.left.max(end_of(run.count));
                unmoved += u64::from(run.count - at) * grain;
            } else if stays > 0 {
                round.left = round.left.max(end_of(stays));
            }
        }
        if round.moved == before {
            round.unmoved += unmoved;
        }
        Ok(round.moved > before)
    }

    /// Moves a table into a hole, if there is one that fits. `durable` are the tables that the next commit writes after
    /// the payload.
    fn move_table(&self, round: &mut Round<'_>, index: u32, durable: &mut FxHashSet<u32>) -> Result<bool> {
        let mut unnamed = round.writer.unnamed.lock();
        let old = self.tables.place(index);
        let Some(place) = round.writer.space.lock().take_hole(TABLE_SECTORS, 0) else {
            round.left = round.left.max(old + TABLE_SECTORS);
            return Ok(false);
        };
        if let Err(error) = self.back(round.writer, place, TABLE_SECTORS) {
            round.writer.space.lock().give_back(Place { start: place, sectors: TABLE_SECTORS });
            return Err(error);
        }
        // The next commit writes the whole table to its new location, then the directory.
        let load = || self.tables.load(&self.file, index);
        self.tables.cache.change(index, load, |_| ((), PARTS_ALL))?;
        unnamed.entry(index).or_insert(old as u32);
        durable.remove(&index);
        self.tables.set_place(index, place);
        Ok(true)
    }

    fn copy(&self, from: u64, to: Place) -> Result<()> {
        let mut bytes = vec![0; (to.sectors * SECTOR) as usize];
        let context = || format!("{}: cannot move sector {from} to {}", self.image, to.start);
        self.file.read_at(&mut bytes, from * SECTOR).during(context)?;
        self.file.write_at(&[&bytes], to.start * SECTOR, false).during(context)
    }

    /// Truncates the file at `left`, if its used part still ends at `end`. Otherwise punches the range from `left` to
    /// `end`, and returns true.
    fn cut(&self, writer: &Writer, end: u64, left: u64) -> Result<bool> {
        let open = writer.gate.write();
        self.check_open(writer, *open)?;
        let context = || format!("{}: cannot cut it", self.image);
        // `left` may be in the part that was appended after `end`; the range that is truncated or punched never extends
        // beyond `end`.
        let left = left.min(end);
        let mut space = writer.space.lock();
        writer.backing.forget(left * SECTOR..u64::MAX);
        if space.free() > end {
            drop(space);
            self.file.punch(left * SECTOR, (end - left) * SECTOR).during(context)?;
            return Ok(true);
        }
        self.file.file().set_len(left * SECTOR).during(context)?;
        space.cut(left);
        self.tables.set_limit(left);
        drop(space);
        self.write_end(writer, left)?;
        // The file system reports a failed write-back once. Without the stop, the next flush of a guest would succeed
        // although its data may be lost.
        self.file.file().sync().during(context).map_err(|error| writer.commits.stop_after(error))?;
        Ok(false)
    }
}
