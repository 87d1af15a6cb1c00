//! The disks in VMware's formats: their formats have no checksums of data, so a scrub examines the tables, and restores
//! those of which the format has a second copy.

use super::record::DamageRecord;
use super::{End, Work};
use crate::Datastore;
use crate::foreign::ForeignDisk;
use error::{ErrorKind, Result};
use std::sync::Arc;
use work::Unreported;

/// Most problems of one disk that are listed.
const PROBLEMS_MAX: usize = 100;

impl Datastore {
    /// Examines the disks by name, from the one after the disk at which an interrupted scrub ended.
    pub(super) fn scrub_images(&self, work: &mut Work<'_>) -> Result<End> {
        let begun = self.scrubs.change(|record| record.run.as_ref().map_or(0, |run| run.result.started));
        let last = self.scrubs.change(|record| record.run.as_ref().map(|run| run.disk.clone())).unwrap_or_default();
        if last.is_empty() {
            for (folder, why) in self.foreign.broken() {
                let problem = format!("the disk in folder images/{folder} cannot be opened: {why}");
                self.add_image_damage(work, None, vec![(problem, None)], 0);
            }
        }
        let mut entries: Vec<(String, Arc<ForeignDisk>)> =
            self.foreign.entries().into_iter().map(|entry| (entry.disk.name(), entry)).collect();
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        for (name, entry) in entries.into_iter().filter(|(name, _)| *name > last) {
            if let Some(end) = work.end() {
                return Ok(end);
            }
            match self.scrub_image(work, &name, &entry) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {
                    return Ok(work.end().unwrap_or(End::Cancelled));
                }
                Err(error) if error.kind() == ErrorKind::Busy => {
                    work.advance(|_, run| run.result.skipped.push(name.clone()));
                }
                Err(error) => {
                    let problem = format!("disk '{name}' cannot be examined: {error}");
                    self.add_image_damage(work, Some(&name), vec![(problem, None)], 0);
                }
                Ok(()) => {}
            }
            work.advance(|_, run| run.disk.clone_from(&name));
            work.save();
        }
        // Damage of images that this scrub has not found again is gone.
        self.scrubs.change(|record| {
            let skipped = record.run.as_ref().map_or(Vec::new(), |run| run.result.skipped.clone());
            record.damage.retain(|damage| {
                let examined = !damage.disk.as_ref().is_some_and(|disk| skipped.contains(disk));
                damage.place().is_some() || damage.found >= begun || !examined
            });
        });
        Ok(End::Whole)
    }

    fn scrub_image(&self, work: &Work<'_>, name: &str, entry: &ForeignDisk) -> Result<()> {
        let progress = Unreported(work.throttle.progress());
        let mut found = entry.disk.check(false, &progress)?;
        let images = found.images as u64;
        if found.problem_count > 0 {
            found = entry.disk.check(true, &progress)?;
        }
        let named = |problem: String| format!("disk '{name}': {problem}");
        let repaired = Some("restored from the second copy in the image".to_owned());
        let mended = found.mended.into_iter().map(|problem| (named(problem), repaired.clone()));
        let problems = mended.chain(found.problems.into_iter().map(|problem| (named(problem), None)));
        let mut problems: Vec<(String, Option<String>)> = problems.collect();
        let all = (problems.len() as u64).max(found.problem_count + found.repaired);
        problems.truncate(PROBLEMS_MAX);
        let unlisted = all - problems.len() as u64;
        work.advance(|_, run| run.result.images += images);
        self.add_image_damage(work, Some(name), problems, unlisted);
        Ok(())
    }

    /// Adds problems of a disk to the list, and reports them.
    fn add_image_damage(
        &self,
        work: &Work<'_>,
        disk: Option<&str>,
        problems: Vec<(String, Option<String>)>,
        unlisted: u64,
    ) {
        if problems.is_empty() {
            return;
        }
        let now = self.scrubs.now();
        let damage: Vec<DamageRecord> = problems
            .into_iter()
            .map(|(problem, repaired)| DamageRecord::of_image(disk.map(str::to_owned), problem, repaired, now))
            .collect();
        work.advance(|record, run| {
            run.result.found += damage.len() as u64 + unlisted;
            run.result.repaired += damage.iter().filter(|damage| !damage.is_open()).count() as u64;
            record.unlisted += unlisted;
            damage.iter().cloned().for_each(|damage| record.add(damage));
        });
        (work.tell)(&self.damage_reports(&damage));
    }
}
