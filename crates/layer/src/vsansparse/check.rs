//! Checking the whole map: used and dead space, and damage.

use super::VsanSparse;
use super::page::DATA;
use crate::runs::EntryRun;
use crate::runs::marks::{Marks, WINDOW};
use crate::{ErrorKind, Result};

/// The most problems that are listed; all are counted.
const PROBLEMS_MAX: usize = 32;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Check {
    /// Number of map pages.
    pub pages: u64,
    /// Number of grains with data.
    pub grains: u64,
    /// Blocks that were allocated and belong to no grain: space lost by crashes.
    pub dead: u64,
    /// Number of problems.
    pub problem_count: u64,
    /// The first problems, as text.
    pub problems: Vec<String>,
}

/// Statistics of the used space, in blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Survey {
    pages: u64,
    pub(super) grains: u64,
    pub(super) dead: u64,
}

impl VsanSparse {
    /// Checks the whole map: each page must have a valid copy, its entries must name blocks of the units, and no block
    /// may be named twice. Reads every page once, and once again for each 512 GiB of units.
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
            // Writes continue: blocks that were allocated since the check began are past the end that was known at its
            // beginning.
            beyond += u64::from(end > next && end > self.next());
        })?;
        for (count, what) in [(twice, "more than one grain has"), (beyond, "a grain has, outside the allocated units")]
        {
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

    /// Passes all runs with a location to the caller, page by page.
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
        // The end is read before the pages: blocks that are allocated meanwhile may belong to a page that was read
        // already, and are not counted.
        let end = self.next();
        survey.pages = self.each_run(|run| {
            placed += end.min(run.place + u64::from(run.count)).saturating_sub(run.place);
            if run.kind == DATA {
                survey.grains += u64::from(run.count);
            }
        })?;
        survey.dead = (end - self.map.layout.data).saturating_sub(placed);
        Ok(survey)
    }
}
