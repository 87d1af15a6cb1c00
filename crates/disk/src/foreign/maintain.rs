//! Long operations on disks in use (inflate, punch, wipe, shrink, consolidate), and the check of all disks.

use super::{Foreign, ForeignDisk};
use crate::info::{CheckReport, Finding, Reclaimed};
use error::{Error, ErrorKind, Result};
use layer::image::{self, Image, OpenOptions, Place, Signature};
use work::Progress;

impl From<vmdk::Freed> for Reclaimed {
    fn from(freed: vmdk::Freed) -> Self {
        Self { freed: freed.freed, returned: freed.returned, moved: freed.moved, ..Self::default() }
    }
}

impl Foreign {
    /// Allocates and zeroes all space of a flat base.
    pub fn inflate(&self, entry: &ForeignDisk, progress: &dyn Progress) -> Result<()> {
        entry.disk.inflate(progress)
    }

    /// Returns to the file system the blocks of a flat base that hold only zeros.
    pub fn punch_zeros(&self, entry: &ForeignDisk, progress: &dyn Progress) -> Result<Reclaimed> {
        Ok(entry.disk.punch_zeros(progress)?.into())
    }

    /// Finds grains that nothing references and frees them.
    pub fn wipe(&self, entry: &ForeignDisk, progress: &dyn Progress) -> Result<Reclaimed> {
        Ok(entry.disk.wipe(progress)?.into())
    }

    /// Returns free grains to the file system.
    pub fn shrink(&self, entry: &ForeignDisk, progress: &dyn Progress) -> Result<Reclaimed> {
        Ok(entry.disk.shrink(progress)?.into())
    }

    /// Merges the head's chain into its base. The snapshots of all merged images are deleted.
    pub fn consolidate(&self, entry: &ForeignDisk, progress: &dyn Progress) -> Result<()> {
        let outcome = entry.disk.consolidate(progress);
        // An interrupted consolidation has deleted some of the snapshots, so the bases are updated after it too.
        entry.tell_bases();
        outcome
    }

    /// Adds the problems of every disk to a report.
    pub fn check(&self, repair: bool, progress: &dyn Progress, report: &mut CheckReport) -> Result<()> {
        for (folder, why) in self.broken() {
            let mended = match repair {
                true => self.mend_folder(&folder, progress, report)?,
                false => false,
            };
            let problem = format!("the disk in folder images/{folder} cannot be opened: {why}");
            let repaired = mended.then(|| "its images were repaired, and the disk was opened".to_owned());
            report.findings.push(Finding::new(problem, repaired));
        }
        for entry in self.entries() {
            let name = entry.disk.name();
            if let Some(why) = entry.disk.stopped() {
                let problem =
                    format!("disk '{name}' takes no writes ({why}); 'lamina disk reopen {name}' opens it again");
                report.findings.push(Finding::new(problem, None));
            }
            let mut found = entry.disk.check(repair, progress);
            if repair
                && !entry.disk.is_head_open()
                && found.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt)
            {
                // Opening the image for writing failed, so no client has it open, and it can be repaired.
                self.mend_images(&entry.folder, progress, report)?;
                found = entry.disk.check(repair, progress);
            }
            let found = match found {
                Ok(found) => found,
                Err(error) if error.kind() == ErrorKind::Interrupted || error.kind() == ErrorKind::Busy => {
                    return Err(error.context(format!("checking disk '{name}'")));
                }
                Err(error) => {
                    let problem = format!("disk '{name}' cannot be checked: {error}");
                    report.findings.push(Finding::new(problem, None));
                    continue;
                }
            };
            report.images += found.images as u64;
            report.dead += found.dead;
            if found.record_mended {
                let problem = format!("disk '{name}': one byte of its record was damaged");
                let repaired = Some("the byte was corrected when the disk was opened".to_owned());
                report.findings.push(Finding::new(problem, repaired));
            }
            for problem in found.mended {
                let repaired = Some("repaired in the image".to_owned());
                report.findings.push(Finding::new(format!("disk '{name}': {problem}"), repaired));
            }
            let listed = found.problems.len() as u64;
            for problem in found.problems {
                report.findings.push(Finding::new(format!("disk '{name}': {problem}"), None));
            }
            if found.problem_count > listed {
                let problem = format!("disk '{name}': {} more problems of these kinds", found.problem_count - listed);
                report.findings.push(Finding::new(problem, None));
            }
        }
        Ok(())
    }

    /// Repairs the images of a disk that could not be opened, as far as the right content can be proven, and then opens
    /// the disk. Returns whether the disk is open.
    fn mend_folder(&self, folder: &str, progress: &dyn Progress, report: &mut CheckReport) -> Result<bool> {
        self.mend_images(folder, progress, report)?;
        match self.open_folder(folder) {
            Ok(()) => {
                self.broken.lock().remove(folder);
                Ok(true)
            }
            Err(error) => {
                tracing::warn!(folder, %error, "a disk cannot be opened although its images were repaired");
                Ok(false)
            }
        }
    }

    /// Repairs the images in the folder of a disk that is not open.
    fn mend_images(&self, folder: &str, progress: &dyn Progress, report: &mut CheckReport) -> Result<()> {
        let home = self.folders.home(folder)?;
        let listing = |error| Error::io(format!("listing the folder of disk '{folder}'"), error);
        let names = home.directory().list().map_err(listing)?;
        // Each image is locked while it is repaired: a client may open the disk meanwhile, as soon as its images can be
        // opened. An image that is open for writing already is skipped.
        let options = OpenOptions::default();
        for name in names.into_iter().filter(|name| name.ends_with(".vmdk")) {
            let place = Place { folder: home.clone(), name };
            // Extents without a descriptor of their own are checked together with the image whose descriptor names
            // them.
            if !matches!(Image::probe(&place), Ok(Signature::Descriptor | Signature::HostedSparse)) {
                continue;
            }
            let label = place.label();
            // An image that cannot be checked is skipped. Opening the disk then fails, and the error of the opening
            // reports what is wrong with the image.
            for checked in image::check::check(&place, &options, true, progress).unwrap_or_default() {
                if checked.repaired > 0 {
                    for note in checked.notes {
                        let repaired = Some("repaired in the image".to_owned());
                        report.findings.push(Finding::new(format!("'{label}': {note}"), repaired));
                    }
                }
                let open = checked.problems.into_iter().map(|problem| format!("'{label}': {problem}"));
                report.findings.extend(open.map(|problem| Finding::new(problem, None)));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::datastore::{Datastore, InitOptions, QueueChoice};
    use crate::testbed::options;
    use layer::image::ImageKind;
    use work::NoProgress;

    #[test]
    fn an_image_that_was_opened_for_writing_meanwhile_is_not_repaired() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ds");
        Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
        let datastore = Datastore::open(&path, options(QueueChoice::Threads)).unwrap();
        let foreign = &datastore.foreign;
        let new = vmdk::NewDisk::new("vm", 8 << 20, ImageKind::MonolithicSparse, None);
        foreign.create_disk(&new, &NoProgress).unwrap();
        let chain = foreign.find("vm").unwrap().disk.chain().unwrap();
        chain.write(0, &[1; 65_536]).unwrap();
        let file = path.join("images/vm/vm.vmdk");
        let before = std::fs::read(&file).unwrap();
        foreign.mend_images("vm", &NoProgress, &mut CheckReport::default()).unwrap();
        assert!(std::fs::read(&file).unwrap() == before, "the grain is not in a durable table yet");
        chain.flush().unwrap();
        let mut content = [0; 4096];
        chain.read(4096, &mut content).unwrap();
        assert_eq!(content, [1; 4096]);
        drop(chain);
        datastore.close().unwrap();
    }
}
