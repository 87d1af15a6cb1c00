//! Returns the space of free blocks to the file system, by punching holes.
//!
//! 1. A free block is punched only after a commit of the change that marks the block as not backed.
//! 2. Runs that cannot be punched are kept in memory, and are tried again. A block that is reserved meanwhile is left
//!    out.

use super::Engine;
use super::log::Cost;
use super::reserve::Unpunched;
use super::write::chunks;
use crate::journal::{Operation, RUN_MAX};
use crate::space::Run;
use crate::{IoContext, Result, is_lost};
use backend::BLOCK_SIZE;

impl Engine {
    /// Punches up to `most` blocks in free runs of at least `least` blocks, and leaves `keep` free blocks backed.
    /// Returns the number of punched blocks. The search begins at `region`, which is advanced, and is 0 after the last
    /// region. It may end earlier, even if it finds nothing ([`crate::space::Space::take_reclaimable`]).
    pub(super) fn punch_free(&self, region: &mut u64, least: u64, keep: u64, most: u64) -> Result<u64> {
        let mut unpunched = self.reserves.lock_punching();
        self.punch_failed(&mut unpunched)?;
        let mut refused = false;
        let _fetch = self.meta.bring_in(|meta| meta.data.survey_reclaim(&mut meta.pages, *region, least));
        let runs = {
            let mut guard = self.meta.lock();
            let meta = &mut *guard;
            let counts = meta.data.counts();
            let spare = counts.free.saturating_sub(keep + meta.catalog.reserved() + self.reserves.claims());
            if spare < least {
                *region = 0;
                return Ok(0);
            }
            if *region >= meta.data.regions() {
                *region = 0;
            }
            let mut runs = meta.data.take_reclaimable(&mut meta.pages, region, least, spare.min(most))?;
            self.update_headroom(meta);
            if self.reserves.claims() > self.reserves.headroom() {
                // A writer has claimed some of these blocks meanwhile.
                runs.into_iter().for_each(|run| meta.data.release(run));
                self.update_headroom(meta);
                return Ok(0);
            }
            let mut told = 0;
            for run in &runs {
                let parts: Vec<Run> = chunks(run.start..run.start + run.blocks, RUN_MAX).collect();
                let mut cost = Cost::default();
                for part in &parts {
                    cost += meta.cost(&Operation::Backed { run: *part, backed: false })?;
                }
                let Some(_grant) = self.log.admission.try_admit(cost) else { break };
                for run in parts {
                    self.carry_out(meta, Operation::Backed { run, backed: false }, 0)?;
                }
                told += 1;
            }
            // The runs for which the journal had no room are released; a later round finds them again.
            for run in runs.drain(told..) {
                meta.data.release(run);
                refused = true;
            }
            self.update_headroom(meta);
            if *region >= meta.data.regions() {
                *region = 0;
            }
            runs
        };
        let mut room = Ok(());
        if refused {
            *region = 0;
            room = self.make_journal_room();
        }
        if runs.is_empty() {
            return room.map(|()| 0);
        }
        // The journal must say that the space is not backed before the hole is punched.
        let mut punched = 0;
        let result = room.and_then(|()| self.commit_changes()).and_then(|()| {
            runs.iter().try_for_each(|run| {
                self.punch_run(*run)?;
                punched += 1;
                Ok(())
            })
        });
        let given = runs[..punched].iter().map(|run| run.blocks).sum();
        unpunched.failed.extend(&runs[punched..]);
        // The runs count as not backed even if punching failed. Nothing is written to them before their space is
        // reserved again.
        let mut meta = self.meta.lock();
        runs.into_iter().for_each(|run| meta.data.release(run));
        self.update_headroom(&meta);
        result.map(|()| given)
    }

    fn punch_run(&self, run: Run) -> Result<()> {
        let (file, offset) = self.files.locate(run)?;
        let length = run.blocks * BLOCK_SIZE as u64;
        file.punch(offset, length).during(|| format!("returning {length} bytes to the file system"))?;
        self.files.touch(run);
        Ok(())
    }

    /// Tries again to punch all runs that could not be punched. True if none remains.
    pub(super) fn return_rest(&self) -> bool {
        let mut unpunched = self.reserves.lock_punching();
        unpunched.try_again();
        if let Err(error) = self.punch_failed(&mut unpunched) {
            tracing::warn!(%error, "unused space is returned to the file system when the datastore is opened next");
        }
        unpunched.failed.is_empty() && unpunched.unreadable.is_empty()
    }

    /// Punches runs that could not be punched before, except blocks that were reserved again since.
    fn punch_failed(&self, unpunched: &mut Unpunched) -> Result<()> {
        let Unpunched { failed, unreadable } = unpunched;
        failed.append(&mut self.reserves.take_unreturned());
        if failed.is_empty() {
            return Ok(());
        }
        self.commit_changes()?;
        // Entries that are not in memory are read before reservations have to wait.
        let mut read = Ok(());
        failed.retain(|run| match self.unbacked(*run) {
            Err(error) if is_lost(&error) => {
                unreadable.push(*run);
                false
            }
            Err(error) => {
                read = Err(error);
                true
            }
            Ok(_) => true,
        });
        read?;
        // No space is reserved while this lock is held, so blocks that are not backed hold no data.
        let _extending = self.reserves.lock_extending();
        while let Some(run) = failed.last().copied() {
            match self.unbacked(run) {
                Err(error) if is_lost(&error) => unreadable.push(run),
                parts => parts?.into_iter().try_for_each(|part| self.punch_run(part))?,
            }
            failed.pop();
        }
        Ok(())
    }

    /// The parts of a run that are not backed.
    fn unbacked(&self, run: Run) -> Result<Vec<Run>> {
        let mut parts: Vec<Run> = Vec::new();
        for block in run.start..run.start + run.blocks {
            // A block past the last data table entry is not backed.
            if self.meta.look(|meta| Ok(block < meta.data.blocks() && meta.entry(block)?.backed))? {
                continue;
            }
            match parts.last_mut() {
                Some(last) if last.start + last.blocks == block => last.blocks += 1,
                _ => parts.push(Run { start: block, blocks: 1 }),
            }
        }
        Ok(parts)
    }
}
