//! Requests on disks: reads, writes, discards, flushes, block status.

use super::{Checked, Outcome, SimulationRun};
use crate::image::{Block, compare, touched};
use crate::operation::Span;
use crate::random::{Random, pattern};
use backend::{BLOCK_SIZE, Buffer, SharedSlice};
use disk::{Allocation, Device, Provisioning, ReadPlan, Verdict};
use error::ErrorKind;
use std::sync::Arc;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// The most planned reads at a time.
const HELD_MAX: usize = 4;

/// A read that was planned and is carried out later.
pub(super) struct Held {
    title: String,
    device: Arc<dyn Device>,
    plan: ReadPlan,
    /// For each block of the plan, all contents that the block has had since the plan was made.
    versions: Vec<(u64, Vec<Block>)>,
}

impl SimulationRun {
    pub(super) fn write(&mut self, disk: u64, span: Span, fill: u64, again: bool, fua: bool) -> Checked {
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        self.write_to(&name, span, fill, again, fua)
    }

    fn write_to(&mut self, name: &str, span: Span, fill: u64, again: bool, fua: bool) -> Checked {
        let (offset, length) = span.fit(self.model.disks[name].capacity);
        let data =
            if again { self.model.disks[name].image.read(offset, length) } else { pattern(fill, length as usize) };
        let device = self.device(name)?;
        // Tests buffers with data that is aligned like the disk offset, and buffers with other alignments.
        let lead = (if fill.is_multiple_of(2) { offset } else { fill } % BLOCK) as usize;
        let mut buffer = Buffer::with_bytes(lead + length as usize);
        // Bytes of the buffer outside the data must not be written anywhere.
        buffer.fill(0xee);
        buffer[lead..lead + length as usize].copy_from_slice(&data);
        let bytes = SharedSlice::new(Arc::new(buffer), lead..lead + length as usize);
        let mut result = device.write(offset, bytes.clone(), fua);
        if let Err(error) = &result
            && error.kind() == ErrorKind::NoSpace
            && self.must_fit(name, &*device, offset, length)?
        {
            // A flush ends the claims of buffered writes, and background work frees blocks of deleted snapshots. After
            // both, an overwrite needs no space.
            let datastore = self.datastore()?;
            result = device.flush().and_then(|()| {
                while datastore.engine().pump()? {}
                device.write(offset, bytes, fua)
            });
            drop(datastore);
            if let Err(error) = &result
                && error.kind() == ErrorKind::NoSpace
            {
                return Err(format!("{name}: an overwrite of {length} bytes at {offset} found no space: {error}"));
            }
        }
        let before = self.model.disks[name].image.read(offset / BLOCK * BLOCK, padded(offset, length));
        self.image_mut(name).write(offset, &data);
        self.changed(name, offset, length);
        self.end_of_change(name, offset, length, fua, before, result)
    }

    /// Writes single blocks at places all over a disk, until the power is cut.
    pub(super) fn scatter(&mut self, disk: u64, places: u64, fill: u64) -> Checked {
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        let mut random = Random::new(fill);
        for _ in 0..places {
            let restarts = self.statistics.restarts;
            let span = Span { at: random.next() | 15, length: BLOCK, align: BLOCK };
            self.write_to(&name, span, random.next(), false, false)?;
            if self.statistics.restarts > restarts {
                break;
            }
        }
        self.measure();
        Ok(())
    }

    /// Discards whole blocks, up to the whole disk.
    pub(super) fn discard_large(&mut self, disk: u64, at: u64, length: u64) -> Checked {
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        let blocks = self.model.disks[&name].capacity / BLOCK;
        let count = length.div_ceil(BLOCK).min(blocks);
        let first = at % (blocks - count + 1);
        let result = self.device(&name)?.discard(first * BLOCK, count * BLOCK, false);
        self.image_mut(&name).zero_known(first..first + count);
        self.changed(&name, first * BLOCK, count * BLOCK);
        match self.judge(result, None)? {
            Outcome::Restarted | Outcome::Done(()) => Ok(()),
            Outcome::Refused(error) => Err(format!("{name}: discarding {count} blocks from {first}: {error}")),
        }
    }

    pub(super) fn zero(&mut self, disk: u64, span: Span, allocate: Option<bool>, fua: bool) -> Checked {
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        let (offset, length) = span.fit(self.model.disks[&name].capacity);
        let device = self.device(&name)?;
        let result = match allocate {
            Some(allocate) => device.write_zeroes(offset, length, allocate, fua),
            None => device.discard(offset, length, fua),
        };
        let thin = self.model.disks[&name].provisioning == Provisioning::Thin;
        let whole = offset % BLOCK == 0 && length % BLOCK == 0;
        if let Err(error) = &result
            && error.kind() == ErrorKind::NoSpace
            && (allocate.is_none() || allocate == Some(false) && whole && thin)
        {
            return Err(format!("{name}: a discard found no space: {error}"));
        }
        let before = self.model.disks[&name].image.read(offset / BLOCK * BLOCK, padded(offset, length));
        self.image_mut(&name).zero(offset, length);
        self.changed(&name, offset, length);
        if allocate.is_none() && !whole && result.is_ok() && self.full && !self.disk.is_off() {
            // If no space is left for zeroes, partial blocks keep their content.
            return self.after_refusal(&name, offset, length, &before);
        }
        self.end_of_change(&name, offset, length, fua, before, result)
    }

    /// Updates the model after a write or discard has returned. The model has recorded it before as not durable.
    fn end_of_change(
        &mut self,
        name: &str,
        offset: u64,
        length: u64,
        fua: bool,
        before: Vec<u8>,
        result: error::Result<()>,
    ) -> Checked {
        match self.judge(result, None)? {
            Outcome::Restarted => Ok(()),
            Outcome::Done(()) => {
                if fua {
                    self.image_mut(name).make_durable(offset, length);
                }
                Ok(())
            }
            Outcome::Refused(error) => {
                if !self.foretold(&error) {
                    return Err(format!("{name}: {length} bytes at {offset}: {error}"));
                }
                if self.model.disks[name].provisioning != Provisioning::Thin {
                    return Err(format!("{name} is thick and was refused space: {error}"));
                }
                self.refuse_without_need(length, &error)?;
                self.after_refusal(name, offset, length, &before)?;
                // Writes that were acknowledged before must still become durable.
                if ((offset + length) / BLOCK).is_multiple_of(4) { self.flush_of(name) } else { Ok(()) }
            }
        }
    }

    /// Checks that a write is refused only if the file system has no space.
    fn refuse_without_need(&self, length: u64, error: &error::Error) -> Checked {
        let room = self.disk.directory().room().map_err(|error| error.to_string())?;
        let enough = 2 * length + (2 << 20);
        if room.available >= enough {
            return Err(format!("refused for lack of space with {} bytes available: {error}", room.available));
        }
        Ok(())
    }

    /// A refused write may be carried out in part: each block has the old or the new content.
    fn after_refusal(&mut self, name: &str, offset: u64, length: u64, before: &[u8]) -> Checked {
        let device = self.device(name)?;
        let capacity = device.capacity();
        for (number, (block, _)) in touched(offset, length).enumerate() {
            let bytes = BLOCK.min(capacity - block * BLOCK) as usize;
            let read = device.read(block * BLOCK, bytes).map_err(|error| format!("after a refusal: {error}"))?;
            let mut found = [0; BLOCK_SIZE];
            found[..bytes].copy_from_slice(&read);
            let image = self.image_mut(name);
            if found[..] != before[number * BLOCK_SIZE..(number + 1) * BLOCK_SIZE] {
                compare(block, &found, image.block(block)).map_err(|error| format!("after a refusal: {error}"))?;
            }
            image.observe(block, &found, false)?;
        }
        self.changed(name, offset, length);
        Ok(())
    }

    /// True when a write only overwrites blocks that no other disk or snapshot shares.
    fn must_fit(&self, name: &str, device: &dyn Device, offset: u64, length: u64) -> Checked<bool> {
        let disk = &self.model.disks[name];
        // A detached clone may share blocks with any other disk.
        let detached = self.model.disks.values().any(|other| other.detached);
        if self.reduced || disk.parent.is_some() || disk.origin.is_some() || !disk.snapshots.is_empty() || detached {
            return Ok(false);
        }
        let status = device.status(offset, length, usize::MAX).map_err(|error| error.to_string())?;
        Ok(status.iter().all(|extent| extent.allocation == Allocation::Data))
    }

    pub(super) fn read(&mut self, title: u64, span: Span) -> Checked {
        let Some(title) = self.pick_title(title) else { return Ok(()) };
        let Some((_, capacity)) = self.model.image(&title) else { return Ok(()) };
        let (offset, length) = span.fit(capacity);
        let result = self.device(&title)?.read(offset, length as usize);
        match self.judge(result, None)? {
            Outcome::Restarted => Ok(()),
            Outcome::Refused(error) => Err(format!("reading {length} bytes at {offset} of {title}: {error}")),
            Outcome::Done(found) => self.compare_read(&title, offset, &found),
        }
    }

    fn compare_read(&self, title: &str, offset: u64, found: &[u8]) -> Checked {
        let Some((image, _)) = self.model.image(title) else { return Ok(()) };
        let mut at = 0;
        for (block, range) in touched(offset, found.len() as u64) {
            let length = range.len();
            compare(block, &found[at..at + length], &image.block(block)[range])
                .map_err(|error| format!("{title}: {error}"))?;
            at += length;
        }
        Ok(())
    }

    pub(super) fn begin_read(&mut self, title: u64, span: Span) -> Checked {
        if self.held.len() >= HELD_MAX {
            self.end_reads()?;
        }
        let Some(title) = self.pick_title(title) else { return Ok(()) };
        let Some((image, capacity)) = self.model.image(&title) else { return Ok(()) };
        let (offset, length) = span.fit(capacity);
        let versions = touched(offset, length).map(|(block, _)| (block, vec![*image.block(block)])).collect();
        let device = self.device(&title)?;
        let result = device.plan_read(offset, length as usize);
        match self.judge(result, None)? {
            Outcome::Restarted => {}
            Outcome::Refused(error) => return Err(format!("planning a read of {title}: {error}")),
            Outcome::Done(plan) => self.held.push(Held { title, device, plan, versions }),
        }
        Ok(())
    }

    /// Records the new content of a range for the planned reads of the disk.
    fn changed(&mut self, name: &str, offset: u64, length: u64) {
        let Some((image, _)) = self.model.image(name) else { return };
        let range = offset / BLOCK..(offset + length).div_ceil(BLOCK);
        for held in self.held.iter_mut().filter(|held| held.title == name) {
            for (block, versions) in held.versions.iter_mut().filter(|(block, _)| range.contains(block)) {
                versions.push(*image.block(*block));
            }
        }
    }

    /// Carries out the planned reads. Each block must have, as a whole, a content that it had since the plan, or the
    /// device must report that the read has to be repeated.
    pub(super) fn end_reads(&mut self) -> Checked {
        for mut held in std::mem::take(&mut self.held) {
            let result = held.finish();
            let verdict = match self.judge(result, None)? {
                Outcome::Restarted => return Ok(()),
                Outcome::Refused(error) => return Err(format!("finishing a read of {}: {error}", held.title)),
                Outcome::Done(verdict) => verdict,
            };
            let Held { title, device, plan, versions } = held;
            if verdict == Verdict::Again {
                let result = device.read(plan.offset, plan.length);
                drop(device);
                match self.judge(result, None)? {
                    Outcome::Restarted => return Ok(()),
                    Outcome::Refused(error) => return Err(format!("repeating a read of {title}: {error}")),
                    Outcome::Done(found) => self.compare_read(&title, plan.offset, &found)?,
                }
                continue;
            }
            let found = plan.slices().concat();
            let mut at = 0;
            for ((block, range), (_, versions)) in touched(plan.offset, plan.length as u64).zip(&versions) {
                let part = &found[at..at + range.len()];
                at += range.len();
                if !versions.iter().any(|version| version[range.clone()] == *part) {
                    let first = versions.first().map_or(&[][..], |version| &version[range]);
                    let shown = compare(block, part, first).err().unwrap_or_default();
                    return Err(format!(
                        "a planned read of {title} returned a content that the block never had: {shown}"
                    ));
                }
            }
        }
        Ok(())
    }

    pub(super) fn flush(&mut self, disk: u64) -> Checked {
        let Some(name) = self.pick_disk(disk) else { return Ok(()) };
        self.flush_of(&name)
    }

    fn flush_of(&mut self, name: &str) -> Checked {
        let result = self.device(name)?.flush();
        match self.judge(result, None)? {
            Outcome::Restarted => {}
            Outcome::Refused(error) => return Err(format!("flushing {name}: {error}")),
            Outcome::Done(()) => self.model.flush(),
        }
        Ok(())
    }

    pub(super) fn status(&mut self, title: u64, span: Span) -> Checked {
        let Some(title) = self.pick_title(title) else { return Ok(()) };
        let Some((_, capacity)) = self.model.image(&title) else { return Ok(()) };
        // Long ranges: status is cheap, and walks parts of the tree that reads do not.
        let (offset, length) = Span { length: span.length * 16, ..span }.fit(capacity);
        let result = self.device(&title)?.status(offset, length, usize::MAX);
        let extents = match self.judge(result, None)? {
            Outcome::Restarted => return Ok(()),
            Outcome::Refused(error) => return Err(format!("status of {title}: {error}")),
            Outcome::Done(extents) => extents,
        };
        let Some((image, _)) = self.model.image(&title) else { return Ok(()) };
        let mut at = offset;
        for extent in extents {
            if extent.allocation != Allocation::Data && !image.is_zero(at, extent.length) {
                return Err(format!(
                    "{title}: {} bytes at {at} are said to be {:?} and hold data",
                    extent.length, extent.allocation
                ));
            }
            at += extent.length;
        }
        if at != offset + length {
            return Err(format!("{title}: status of {length} bytes at {offset} covers {} of them", at - offset));
        }
        Ok(())
    }

    pub(super) fn image_mut(&mut self, title: &str) -> &mut crate::image::Image {
        self.model.image_mut(title).unwrap_or_else(|| panic!("the model has {title}"))
    }
}

/// The length of the blocks that a range touches.
fn padded(offset: u64, length: u64) -> u64 {
    if length == 0 { 0 } else { (offset + length).next_multiple_of(BLOCK) - offset / BLOCK * BLOCK }
}

impl Held {
    fn finish(&mut self) -> error::Result<Verdict> {
        self.plan.fetch().map_err(|error| error::Error::io("fetching", error))?;
        self.device.finish_read(&mut self.plan)
    }
}
