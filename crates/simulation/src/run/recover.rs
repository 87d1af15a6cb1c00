//! Restarts of the datastore, and comparisons of the whole datastore.

use super::control::{differences, observed};
use super::{Checked, Outcome, SimulationRun};
use crate::image::{Block, compare, is_zero};
use crate::model::Model;
use backend::{BLOCK_SIZE, SharedSlice};
use disk::{Allocation, CheckOptions, Datastore, NoProgress};
use error::ErrorKind;
use std::sync::atomic::Ordering;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes read at a time.
const PIECE: u64 = 1 << 20;
/// The most consecutive openings that may fail because of requested faults.
const OPENINGS_MAX: u32 = 8;

/// How an image is compared with the model.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Each block must have its last content.
    Exact,
    /// Each block may have any content that a crash may leave. The model takes over the content found.
    AfterCrash,
}

impl SimulationRun {
    /// Tries a few operations after a failure of the medium: those that the datastore acknowledges must be right.
    pub(super) fn after_failure(&mut self) -> Checked {
        if self.random.percent(50) {
            return Ok(());
        }
        let Some(name) = self.pick_disk(self.random.clone().next()) else { return Ok(()) };
        let Some((_, capacity)) = self.model.image(&name) else { return Ok(()) };
        let Ok(device) = self.datastore()?.device(&name, false) else { return Ok(()) };
        for _ in 0..3 {
            let length = capacity.min(BLOCK);
            let offset = self.random.below(capacity - length + 1) / 512 * 512;
            let data = crate::random::pattern(self.random.next(), length as usize);
            let written = device.write(offset, SharedSlice::copy_of(&data), false);
            self.image_mut(&name).write(offset, &data);
            let flushed = device.flush();
            if written.is_ok() && flushed.is_ok() {
                // Unflushed writes from before the failure may be lost. Only the write above must be durable.
                self.note("  a flush after the failure succeeds");
                self.image_mut(&name).make_durable(offset, length);
            }
        }
        Ok(())
    }

    /// Ends the datastore by a power cut or a kill, and opens it again. `after` is the model if the interrupted
    /// operation took effect.
    pub(super) fn restart(&mut self, after: Option<Model>) -> Checked {
        self.statistics.restarts += 1;
        self.count_checkpoints();
        self.held.clear();
        self.pass = None;
        let power = self.disk.is_off() || self.unsure || self.faulty && self.random.percent(50);
        if self.disk.is_off() {
            self.count_cut();
        }
        if !power && self.random.percent(50) {
            // The requests in the queues are lost. Otherwise they are carried out before the process ends.
            self.disk = self.disk.kill();
        }
        self.devices.clear();
        self.datastore = None;
        if power {
            // A power cut ends the faults.
            self.disk = self.disk.crash();
            (self.faulty, self.unsure) = (false, false);
        } else {
            self.disk = self.disk.kill();
        }
        self.arm_recovery();
        self.open()?;
        self.settle_on(after)?;
        self.check()?;
        if self.random.percent(20) {
            // The content found must stay, even if the power is cut again at once.
            self.note("  the power is cut again at once");
            self.devices.clear();
            self.datastore = None;
            self.disk = self.disk.crash();
            self.open()?;
            self.compare_structure()?;
            self.compare_images(Manner::Exact)
                .map_err(|violation| format!("the content found after a restart did not stay: {violation}"))?;
        }
        Ok(())
    }

    fn count_checkpoints(&mut self) {
        if let Some(datastore) = &self.datastore {
            self.statistics.checkpoints += datastore.engine().counters.checkpoints.load(Ordering::Relaxed);
        }
    }

    /// Determines from the content whether the interrupted operation took effect: the datastore must equal the model
    /// before or after it.
    fn settle_on(&mut self, after: Option<Model>) -> Checked {
        let found = observed(&*self.datastore()?).map_err(|error| format!("listing disks: {error}"))?;
        let mut violations = Vec::new();
        let before = self.model.clone();
        for (name, model) in [("before", Some(before)), ("after", after)] {
            let Some(model) = model else { continue };
            let judged = differences(&found, &model.structure()).and_then(|()| {
                self.model = model;
                self.compare_images(Manner::AfterCrash)
            });
            match judged {
                Ok(()) => return Ok(()),
                Err(violation) => {
                    violations.push(format!("\n  differs from the state {name} the last operation: {violation}"))
                }
            }
        }
        Err(format!("after a restart:{}", violations.concat()))
    }

    fn open(&mut self) -> Checked {
        for opening in 0..OPENINGS_MAX {
            if opening == OPENINGS_MAX / 2 && self.faulty {
                // A medium with a permanent fault is replaced.
                self.disk.mend();
            }
            match Datastore::open_in(self.disk.directory(), self.options) {
                Ok(_) if !self.disk.is_off() && self.faulty => {
                    // The datastore lacks content that the medium could not read. All content must exist when the
                    // datastore is opened on a medium that works.
                    self.note("  opened on a failing medium, and again on one that works");
                    self.disk.mend();
                    (self.faulty, self.recounted) = (false, true);
                    continue;
                }
                Ok(datastore) if !self.disk.is_off() => {
                    self.datastore = Some(datastore);
                    return Ok(());
                }
                Ok(_) => {}
                Err(_) if self.disk.is_off() => {}
                Err(error) if self.faulty && matches!(error.kind(), ErrorKind::Io | ErrorKind::Stopped) => {
                    self.note(format!("  opening fails: {error}"));
                    continue;
                }
                Err(error) => return Err(format!("the datastore cannot be opened: {error}")),
            }
            self.note("  the power is cut during recovery");
            self.statistics.interrupted_recoveries += 1;
            self.count_cut();
            self.disk = self.disk.crash();
            self.arm_recovery();
        }
        Err("the datastore could not be opened".into())
    }

    /// Closes the datastore cleanly and opens it again: nothing changes, and all writes are durable.
    pub(super) fn reopen(&mut self) -> Checked {
        self.end_reads()?;
        self.devices.clear();
        let datastore = self.datastore()?;
        let result = datastore.close();
        drop(datastore);
        self.count_checkpoints();
        match self.judge(result, None)? {
            Outcome::Restarted => return Ok(()),
            Outcome::Refused(error) => return Err(format!("closing: {error}")),
            Outcome::Done(()) => self.model.flush(),
        }
        self.pass = None;
        self.datastore = None;
        if self.random.percent(30) {
            self.disk = self.disk.crash();
        }
        if self.disk.is_off() {
            self.count_cut();
            self.disk = self.disk.crash();
        }
        self.open()?;
        self.compare_structure()?;
        for _ in 0..3 {
            let Some(title) = self.pick_title(self.random.clone().next()) else { break };
            self.random.next();
            self.compare_image(&title, Manner::Exact)?;
        }
        Ok(())
    }

    /// Compares the whole datastore with the model.
    pub fn compare_all(&mut self) -> Checked {
        self.compare_structure()?;
        self.compare_images(Manner::Exact)
    }

    fn compare_images(&mut self, manner: Manner) -> Checked {
        for title in self.model.titles() {
            self.compare_image(&title, manner).map_err(|violation| format!("{title}: {violation}"))?;
            if self.disk.is_off() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn compare_image(&mut self, title: &str, manner: Manner) -> Checked {
        let Some((_, capacity)) = self.model.image(title) else { return Ok(()) };
        let device = self.datastore()?.device(title, true).map_err(|error| format!("opening it: {error}"))?;
        if device.capacity() != capacity {
            return Err(format!("it has {} bytes instead of {capacity}", device.capacity()));
        }
        let result = device.status(0, capacity, usize::MAX);
        let Outcome::Done(extents) = self.compare_outcome(result, "querying its allocation")? else { return Ok(()) };
        let mut at = 0;
        for extent in extents {
            let end = at + extent.length;
            if extent.allocation == Allocation::Data {
                while at < end {
                    let length = PIECE.min(end - at);
                    let result = device.read(at, length as usize);
                    let Outcome::Done(found) = self.compare_outcome(result, "reading it")? else { return Ok(()) };
                    self.compare_blocks(title, at, &found, manner)?;
                    at += length;
                }
                continue;
            }
            let known = match self.model.image(title) {
                Some((image, _)) => image.known(at / BLOCK..end.div_ceil(BLOCK)),
                None => Vec::new(),
            };
            for block in known {
                self.compare_block(title, block, &[0; BLOCK_SIZE], manner)?;
            }
            let length = extent.length.min(64 << 10);
            let place = at + self.random.below(extent.length - length + 1);
            let result = device.read(place, length as usize);
            let Outcome::Done(found) = self.compare_outcome(result, "reading a range without data")? else {
                return Ok(());
            };
            if !is_zero(&found) {
                return Err(format!(
                    "{length} bytes at {place} are said to be {:?} and are not zeros",
                    extent.allocation
                ));
            }
            at = end;
        }
        if at != capacity {
            return Err(format!("its status covers {at} bytes of {capacity}"));
        }
        Ok(())
    }

    /// Classifies a result of the comparison. A requested power cut or fault may occur during the comparison, and ends
    /// it.
    fn compare_outcome<T>(&mut self, result: error::Result<T>, what: &str) -> Checked<Outcome<T>> {
        match self.judge(result, None)? {
            Outcome::Refused(error) => Err(format!("{what}: {error}")),
            outcome => Ok(outcome),
        }
    }

    fn compare_blocks(&mut self, title: &str, offset: u64, found: &[u8], manner: Manner) -> Checked {
        for (number, part) in (offset / BLOCK..).zip(found.chunks(BLOCK_SIZE)) {
            let mut block = [0; BLOCK_SIZE];
            block[..part.len()].copy_from_slice(part);
            self.compare_block(title, number, &block, manner)?;
        }
        Ok(())
    }

    fn compare_block(&mut self, title: &str, number: u64, found: &Block, manner: Manner) -> Checked {
        let Some((image, _)) = self.model.image(title) else { return Ok(()) };
        if manner == Manner::Exact || image.is_settled() {
            return compare(number, found, image.block(number));
        }
        self.image_mut(title).observe(number, found, true)
    }

    /// Runs a check that counts all references and verifies all checksums: it must find nothing.
    pub(super) fn check(&mut self) -> Checked {
        let datastore = self.datastore()?;
        let check = || datastore.check(CheckOptions { data: true, repair: false }, &NoProgress);
        let mut result = check();
        if self.faulty && result.as_ref().is_ok_and(|report| !report.findings.is_empty()) {
            // Content that cannot be read is reported. When the medium works again, nothing may be damaged.
            self.disk.mend();
            result = check();
        }
        // A check that fails has reported nothing: the next one reports the recounted pages.
        let recounted = result.is_ok() && std::mem::take(&mut self.recounted);
        if recounted && result.as_ref().is_ok_and(|report| report.findings.iter().all(|found| found.repaired.is_some()))
        {
            result = check();
        }
        drop(datastore);
        match self.judge(result, None)? {
            Outcome::Refused(error) if self.foretold(&error) => Ok(()),
            Outcome::Refused(error) => Err(format!("check failed: {error}")),
            Outcome::Done(report) if !report.findings.is_empty() || report.leaked > 0 => {
                Err(format!("check finds: {:#?}, {} bytes leaked", report.findings, report.leaked))
            }
            _ => Ok(()),
        }
    }
}
