//! Looking at the whole map: what is used, what is dead, what is wrong.

use super::VsanSparse;
use super::page::DATA;
use crate::runs::EntryRun;
use crate::runs::marks::{Marks, WINDOW};
use crate::{ErrorKind, Result};

/// Most problems that are listed; more are counted.
const PROBLEMS_MAX: usize = 32;

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// Map pages.
    pub pages: u64,
    /// Grains with data.
    pub grains: u64,
    /// Blocks that were handed out and that no grain has: what crashes have cost.
    pub dead: u64,
    /// How many problems there are.
    pub problem_count: u64,
    /// The first of them, as sentences.
    pub problems: Vec<String>,
}

/// What is used, in blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Survey {
    pages: u64,
    pub(super) grains: u64,
    pub(super) dead: u64,
}

impl VsanSparse {
    /// Checks the whole map: each page is whole and names blocks of the units, no block is named twice. Reads every
    /// page, and once more for each 512 GiB of units.
    pub fn check(&self) -> Result<Check> {
        let mut check = Check::default();
        for index in 0..self.map.layout.pages {
            match self.map.survey(&self.file, index) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    check.problem_count += 1;
                    if check.problems.len() < PROBLEMS_MAX {
                        check.problems.push(error.to_string());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if check.problem_count > 0 {
            return Ok(check);
        }
        let next = self.next();
        let mut start = self.map.layout.data;
        let mut twice = 0;
        while start < next {
            let mut marks = Marks::new(start..next.min(start + WINDOW));
            self.each_run(|run| twice += u64::from(marks.mark(run.place..run.place + u64::from(run.count))))?;
            start = marks.window.end;
        }
        let mut beyond = 0;
        self.each_run(|run| {
            let end = run.place + u64::from(run.count);
            // Writes go on: what was handed out since the check began has a place behind where it ended then.
            beyond += u64::from(end > next && end > self.next());
        })?;
        for (count, what) in [(twice, "more than one grain has"), (beyond, "a grain has, but no unit handed out")] {
            if count > 0 {
                check.problems.push(format!("{count} runs of blocks that {what}"));
                check.problem_count += count;
            }
        }
        let survey = self.survey()?;
        (check.pages, check.grains, check.dead) = (survey.pages, survey.grains, survey.dead);
        Ok(check)
    }

    fn next(&self) -> u64 {
        self.writer.as_ref().map_or(self.header.next, |writer| writer.space.lock().next())
    }

    /// Hands out the runs that have places, page by page.
    fn each_run(&self, mut look: impl FnMut(EntryRun)) -> Result<u64> {
        let mut pages = 0;
        for index in 0..self.map.layout.pages {
            let Some(page) = self.map.survey(&self.file, index)? else { continue };
            pages += 1;
            page.runs().filter(|run| run.place != 0).for_each(&mut look);
        }
        Ok(pages)
    }

    /// Reads all pages once.
    pub(super) fn survey(&self) -> Result<Survey> {
        let mut survey = Survey::default();
        let mut placed = 0;
        survey.pages = self.each_run(|run| {
            placed += u64::from(run.count);
            if run.kind == DATA {
                survey.grains += u64::from(run.count);
            }
        })?;
        survey.dead = (self.next() - self.map.layout.data).saturating_sub(placed);
        Ok(survey)
    }
}
