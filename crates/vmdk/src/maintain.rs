//! Long work on images in use: inflating and punching flat disks, wiping and shrinking deltas, checking.
//!
//! The image of the head is changed through its open layer. A lower level is opened for writing while the work runs.
//! Images that clones or open snapshots read are not changed, because those readers would not notice that grains were
//! moved.

use crate::disk::Disk;
use crate::line::{Level, Line};
use crate::record::Record;
use crate::{Error, ErrorKind, Result};
use layer::flat::FILE_BLOCK;
use layer::image::Image;
use work::Progress;

/// The result of a check of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Images checked.
    pub images: usize,
    /// The first remaining problems, as text.
    pub problems: Vec<String>,
    /// Number of remaining problems.
    pub problem_count: u64,
    /// The first repaired problems, as text.
    pub mended: Vec<String>,
    /// Bytes of files that nothing refers to: wiping and shrinking free them.
    pub dead: u64,
    /// Number of repaired problems.
    pub repaired: u64,
    /// Whether the opening of the disk has corrected a damaged byte of its record since the last check.
    pub record_mended: bool,
}

/// The result of wiping, shrinking or punching, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Bytes found dead or full of zeros, and now free for new data in the same files.
    pub freed: u64,
    /// Bytes returned to the file system.
    pub returned: u64,
    /// Bytes moved in order to return space.
    pub moved: u64,
}

impl Disk {
    /// Allocates and zeroes all of a flat base, while it is in use.
    pub fn inflate(&self, progress: &dyn Progress) -> Result<()> {
        self.noting(|| {
            let _operation = self.begin("inflating")?;
            self.drop_stale_clones()?;
            let base = self.base()?;
            self.on_image(base, "inflate", |image| image.inflate(progress))
        })
    }

    /// Makes a flat base thin, and punches its file blocks that hold only zeros, while it is in use.
    pub fn punch_zeros(&self, progress: &dyn Progress) -> Result<Freed> {
        self.noting(|| {
            let _operation = self.begin("giving back zeros")?;
            self.drop_stale_clones()?;
            let base = self.base()?;
            self.on_image(base, "punch", |image| {
                let blocks = image.punch_zeros(progress)?;
                Ok(Freed { returned: blocks * FILE_BLOCK, ..Freed::default() })
            })
        })
    }

    /// Frees dead grains, and grains full of zeros, in the SEsparse levels of the head's chain.
    pub fn wipe(&self, progress: &dyn Progress) -> Result<Freed> {
        self.each_level("wipe", Image::can_wipe, &mut |image, sum| {
            sum.freed += image.wipe(true, progress)?.freed;
            Ok(())
        })
    }

    /// Moves live grains in the head's chain to the front of their files, and returns the rest of the files to the file
    /// system.
    pub fn shrink(&self, progress: &dyn Progress) -> Result<Freed> {
        self.each_level("shrink", Image::can_shrink, &mut |image, sum| {
            let freed = image.shrink(progress)?;
            sum.returned += freed.cut;
            sum.moved += freed.moved;
            Ok(())
        })
    }

    /// Checks every image of the disk. With `repair`, also repairs the images of the head's chain, as far as possible.
    pub fn check(&self, repair: bool, progress: &dyn Progress) -> Result<Checked> {
        self.noting(|| {
            let _operation = self.begin("checking")?;
            match self.drop_stale_clones() {
                // The record still names clones that do not exist, which only keeps images from being changed.
                Err(error) if error.kind() == ErrorKind::NoSpace => {}
                dropped => dropped?,
            }
            let record = self.record();
            let line = self.head_line()?;
            let mut sum = Checked::default();
            for node in &record.nodes {
                let mut look = |image: &Image, repair| {
                    let found = image.check(repair, progress)?;
                    sum.images += 1;
                    sum.problems.extend(found.problems);
                    sum.problem_count += found.problem_count;
                    sum.mended.extend(found.mended);
                    sum.dead += found.dead;
                    sum.repaired += found.repaired;
                    Ok(())
                };
                match line.level(node.id) {
                    Some(_) if repair && self.may_change(&record, node.id) => {
                        self.on_image(node.id, "repair", |image| look(image, true))?;
                    }
                    Some(level) => look(&level.image, false)?,
                    None => look(&self.open_image(&record, node.id, false)?, false)?,
                }
            }
            sum.record_mended = std::mem::take(&mut self.state.lock().mended);
            Ok(sum)
        })
    }

    fn base(&self) -> Result<u32> {
        let record = self.record();
        let line = record.line(record.head)?;
        let base = line.last().copied();
        base.ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("disk '{}' has no images", record.name)))
    }

    /// Whether an image belongs to this disk, and no clone or open snapshot reads it.
    fn may_change(&self, record: &Record, id: u32) -> bool {
        record.node(id).is_ok_and(|node| node.is_own()) && !record.read_only && !record.pinned().contains(&id)
    }

    fn each_level(
        &self,
        what: &str,
        fits: fn(&Image) -> bool,
        work: &mut dyn FnMut(&Image, &mut Freed) -> Result<()>,
    ) -> Result<Freed> {
        self.noting(|| {
            let _operation = self.begin(what)?;
            self.drop_stale_clones()?;
            let record = self.record();
            let levels = self.head_line()?.levels();
            let mut sum = Freed::default();
            let fitting: Vec<u32> = levels.iter().filter(|level| fits(&level.image)).map(|level| level.node).collect();
            let Some(top) = levels.first() else { return Ok(sum) };
            if fitting.is_empty() {
                return Err(top.image.nothing_to(what));
            }
            drop(levels);
            let mut skipped = None;
            let mut done = 0;
            for node in fitting {
                if !self.may_change(&record, node) {
                    continue;
                }
                match self.on_image(node, what, |image| work(image, &mut sum)) {
                    Err(error) if error.kind() == ErrorKind::Busy => skipped = Some(error),
                    other => {
                        other?;
                        done += 1;
                    }
                }
            }
            match skipped {
                Some(error) if done == 0 => Err(error),
                _ => Ok(sum),
            }
        })
    }

    /// Runs work on an image of the head's chain. If the image is open for reading only, it is opened for writing
    /// during the work.
    fn on_image<T>(&self, node: u32, what: &str, work: impl FnOnce(&Image) -> Result<T>) -> Result<T> {
        let record = self.record();
        let line = self.head_line()?;
        let level = line.expect(node)?;
        if level.is_writing() {
            let result = line.chain.while_moving(level.key, || work(&level.image));
            return result.inspect_err(|error| stop_with(&line, &level, error));
        }
        if !self.may_change(&record, node) || !self.options.overlay.is_empty() {
            let text = format!("'{}' is only read by this disk: nothing to {what}", level.image.place().label());
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        drop(level);
        // Cached extents from the read-only opening stay valid until the work first moves a grain, and the chain drops
        // them before that move.
        let claim = self.claim(&[node])?;
        self.set_writing(&line, node)?;
        let result = line.expect(node).and_then(|level| {
            let result = line.chain.while_moving(level.key, || work(&level.image));
            result.inspect_err(|error| stop_with(&line, &level, error))
        });
        let closed = self.set_reading(&line, node);
        drop(claim);
        let result = result?;
        closed?;
        Ok(result)
    }
}

/// Stops the chain if a failure of work on a level has stopped that level: its tables in memory may refer to content
/// that the device does not have.
fn stop_with(line: &Line, level: &Level, error: &Error) {
    if level.image.layer().has_stopped() {
        line.chain.distrust(error);
    }
}
