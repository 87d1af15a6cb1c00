//! Long work on disks in use: inflate, punch, wipe, shrink, consolidate; and checking all of them.

use super::{Entry, Foreign};
use crate::info::{CheckReport, Finding, Reclaimed};
use crate::progress::{Progress, Watched};
use store::{ErrorKind, Result};

impl From<vmdk::Freed> for Reclaimed {
    fn from(freed: vmdk::Freed) -> Self {
        Self { freed: freed.freed, returned: freed.returned, moved: freed.moved }
    }
}

impl Foreign {
    /// Gives a flat base all its space, zeroed.
    pub fn inflate(&self, entry: &Entry, progress: &dyn Progress) -> Result<()> {
        entry.disk.inflate(&Watched(progress))
    }

    /// Gives back the blocks of a flat base that hold only zeros.
    pub fn punch_zeros(&self, entry: &Entry, progress: &dyn Progress) -> Result<Reclaimed> {
        Ok(entry.disk.punch_zeros(&Watched(progress))?.into())
    }

    /// Finds dead grains and frees them.
    pub fn wipe(&self, entry: &Entry, progress: &dyn Progress) -> Result<Reclaimed> {
        Ok(entry.disk.wipe(&Watched(progress))?.into())
    }

    /// Gives free grains back to the file system.
    pub fn shrink(&self, entry: &Entry, progress: &dyn Progress) -> Result<Reclaimed> {
        Ok(entry.disk.shrink(&Watched(progress))?.into())
    }

    /// Merges the head's chain into its base. The snapshots between go.
    pub fn consolidate(&self, entry: &Entry, progress: &dyn Progress) -> Result<()> {
        let outcome = entry.disk.consolidate(&Watched(progress));
        // Also after an interruption, some are gone.
        entry.tell_bases();
        outcome
    }

    /// Adds what is wrong with any disk to a report.
    pub fn check(&self, repair: bool, progress: &dyn Progress, report: &mut CheckReport) -> Result<()> {
        for (folder, why) in self.broken() {
            let problem = format!("the disk in folder images/{folder} cannot be opened: {why}");
            report.findings.push(Finding { problem, repaired: None });
        }
        for entry in self.entries() {
            let name = entry.disk.name();
            if let Some(why) = entry.disk.stopped() {
                let problem =
                    format!("disk '{name}' takes no writes ({why}); 'lamina disk reopen {name}' opens it again");
                report.findings.push(Finding { problem, repaired: None });
            }
            let found = match entry.disk.check(repair, &Watched(progress)) {
                Ok(found) => found,
                Err(error) if error.kind() == ErrorKind::Interrupted || error.kind() == ErrorKind::Busy => {
                    return Err(error.context(format!("checking disk '{name}'")));
                }
                Err(error) => {
                    let problem = format!("disk '{name}' cannot be checked: {error}");
                    report.findings.push(Finding { problem, repaired: None });
                    continue;
                }
            };
            report.images += found.images as u64;
            report.dead += found.dead;
            let listed = found.problems.len() as u64;
            // What was put right comes first in an image's list as well as in the sum.
            for (index, problem) in found.problems.into_iter().enumerate() {
                let repaired = (found.repaired >= found.problem_count || (index as u64) < found.repaired)
                    .then(|| "put right in the image".to_owned());
                report.findings.push(Finding { problem: format!("disk '{name}': {problem}"), repaired });
            }
            if found.problem_count > listed {
                let problem = format!("disk '{name}': {} more problems of these kinds", found.problem_count - listed);
                report.findings.push(Finding { problem, repaired: None });
            }
        }
        Ok(())
    }
}
