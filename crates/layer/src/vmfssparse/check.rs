//! Checking all tables: used and dead space, and damage.
//!
//! A check reads each table once, bypassing the cache. Finding overlaps needs a bit per sector of the file. It is done
//! in windows, with one pass over all tables per 64 GiB of the file, to limit memory.

use super::VmfsSparse;
use super::header::{HEADER_SECTORS, TABLE_SECTORS};
use super::tables::{DATA, ZERO};
use crate::runs::marks::{Marks, WINDOW};
use crate::{Error, ErrorKind, Result, SECTOR};

/// The most problems that are listed; all are counted.
const PROBLEMS_MAX: usize = 32;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// Number of grain tables.
    pub tables: u64,
    /// Grains that a table names.
    pub grains: u64,
    /// Entries with the value 1: zeros for some readers, but not for QEMU.
    pub zero_entries: u64,
    /// Bytes to which no entry refers: shrinking frees them.
    pub dead: u64,
    /// Number of problems.
    pub problem_count: u64,
    /// The first problems, as text.
    pub problems: Vec<String>,
}

impl Check {
    fn complain(&mut self, count: u64, what: impl FnOnce() -> String) {
        if count > 0 && self.problems.len() < PROBLEMS_MAX {
            self.problems.push(what());
        }
        self.problem_count += count;
    }
}

/// Statistics of the used space, in sectors.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Survey {
    pub(super) tables: u64,
    pub(super) grains: u64,
    pub(super) zeros: u64,
    pub(super) damaged: u64,
    pub(super) used: u64,
    /// End of the last sector that an entry names.
    pub(super) end: u64,
    pub(super) dead: u64,
}

impl VmfsSparse {
    /// Checks the whole extent: entries past the end of the file, overlaps, and a header that contradicts the file.
    /// Reads every table once, and once again for each further 64 GiB of the file. The extent must not be shrunk
    /// meanwhile.
    pub fn check(&self) -> Result<Check> {
        let mut check = Check::default();
        let header = &self.header;
        if header.directory_offset() != HEADER_SECTORS {
            let offset = header.directory_offset();
            check.complain(1, || format!("the grain directory is at sector {offset} instead of {HEADER_SECTORS}"));
        }
        let limit = self.tables.limit();
        if self.writer.is_none() && !header.unclean() && header.free_sector() > limit {
            let free = header.free_sector();
            check.complain(1, || format!("its header states {free} used sectors, but the file ends at {limit}"));
        }
        let mut unreadable = 0;
        for index in 0..self.tables.count() {
            let place = self.tables.place(index);
            if place != 0 && !self.tables.is_in_file(place) {
                unreadable += 1;
                check.complain(1, || format!("grain table {index} at sector {place} lies outside the file"));
            }
        }
        if unreadable > 0 {
            return Ok(check);
        }
        // A million directory entries for the same table must not cause a million reads of it.
        if let Err(error) = self.check_table_places() {
            check.complain(1, || error.to_string());
            return Ok(check);
        }
        let survey = self.survey()?;
        check.tables = survey.tables;
        check.grains = survey.grains;
        check.zero_entries = survey.zeros;
        check.dead = survey.dead * SECTOR;
        check.complain(survey.damaged, || format!("{} grains lie outside the file", survey.damaged));
        let mut start = 0;
        while start < limit {
            let mut marks = Marks::new(start..limit.min(start + WINDOW));
            let overlaps = self.mark(&mut marks)?;
            let end = marks.window.end;
            check.complain(overlaps, || {
                format!("{overlaps} grains or tables overlap between sectors {start} and {end}")
            });
            start = end;
        }
        Ok(check)
    }

    /// Reads all tables once.
    pub(super) fn survey(&self) -> Result<Survey> {
        let grain = self.header.grain();
        let mut survey = Survey { used: self.tables.data_start(), end: self.tables.data_start(), ..Survey::default() };
        // The end is read before the tables: grains that are appended meanwhile may be named by a table that was read
        // already, and are not counted.
        let end = match &self.writer {
            Some(writer) => writer.space.lock().free(),
            None => self.tables.limit(),
        };
        let before_end = |start: u64, sectors: u64| end.min(start + sectors).saturating_sub(start);
        for index in 0..self.tables.count() {
            // Without the epoch, a shrink could move the table, or grains that it names, and truncate the file before
            // the table is read at its old place.
            let _epoch = self.writer.as_ref().map(|writer| writer.epochs.enter());
            let Some(table) = self.tables.survey(&self.file, index)? else { continue };
            let place = self.tables.place(index);
            survey.tables += 1;
            survey.used += before_end(place, TABLE_SECTORS);
            survey.end = survey.end.max(place + TABLE_SECTORS);
            for run in table.runs() {
                let count = u64::from(run.count);
                match run.kind {
                    DATA => {
                        survey.grains += count;
                        survey.used += before_end(run.place, count * grain);
                        survey.end = survey.end.max(run.place + count * grain);
                    }
                    ZERO => survey.zeros += count,
                    _ => survey.damaged += count,
                }
            }
        }
        survey.dead = end.saturating_sub(survey.used);
        Ok(survey)
    }

    /// Marks the used sectors in the window of `marks`; returns how many were marked already, which are overlaps.
    pub(super) fn mark(&self, marks: &mut Marks) -> Result<u64> {
        let grain = self.header.grain();
        let mut overlaps = u64::from(marks.mark(0..HEADER_SECTORS));
        let start = self.header.directory_offset();
        overlaps += u64::from(marks.mark(start..start + self.header.directory_sectors()));
        for index in 0..self.tables.count() {
            let Some(table) = self.tables.survey(&self.file, index)? else { continue };
            let place = self.tables.place(index);
            overlaps += u64::from(marks.mark(place..place + TABLE_SECTORS));
            for run in table.runs().filter(|run| run.kind == DATA) {
                overlaps += u64::from(marks.mark(run.place..run.place + u64::from(run.count) * grain));
            }
        }
        Ok(overlaps)
    }

    /// Refuses a directory with tables that are outside the file or overlap; returns the number of tables.
    pub(super) fn check_table_places(&self) -> Result<u64> {
        let places = (0..self.tables.count()).map(|index| self.tables.place(index));
        let mut places: Vec<u64> = places.filter(|place| *place != 0).collect();
        places.sort_unstable();
        let overlaps = places.windows(2).any(|pair| pair[1] - pair[0] < TABLE_SECTORS);
        if overlaps || places.iter().any(|place| !self.tables.is_in_file(*place)) {
            return Err(self.not_written("grain tables overlap or lie outside the file"));
        }
        Ok(places.len() as u64)
    }

    /// Refuses an extent with overlapping grains in its first 64 GiB, or with grains outside the file.
    pub(super) fn refuse_damage(&self, survey: &Survey) -> Result<()> {
        if survey.damaged > 0 {
            return Err(self.not_written("grains lie outside the file"));
        }
        let mut marks = Marks::new(0..survey.end.min(WINDOW));
        match self.mark(&mut marks)? {
            0 => Ok(()),
            _ => Err(self.not_written("grains overlap, so that writing one would change another")),
        }
    }

    fn not_written(&self, what: &str) -> Error {
        let advice = "it can be read, copied and checked, but not written";
        Error::new(ErrorKind::Corrupt, format!("{}: {what}: {advice}", self.image))
    }
}
