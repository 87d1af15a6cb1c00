//! The descriptor of an open image, and the rule that the CID changes before the content does.
//!
//! 1. Before the first change after an opening reaches any extent, a new CID is durable. A delta that was made above
//!    the old content, outside this chain, records the old CID, so it is never read above the new content.
//! 2. If the descriptor of an image cannot be written, the image cannot be changed.
//! 3. If a full file system has no space for a new descriptor, the digits of CID and parentCID are overwritten in place
//!    ([`storage::renumber`]): a change that has space for its payload is never refused because of the CID.
//! 4. The descriptor in memory equals the one in the file: it is changed after the file. After a failed write the file
//!    may have the old or the new descriptor, so the next update writes it even if nothing changes.
//! 5. A descriptor inside an extent is flushed together with the data of the extent. The file system reports a failed
//!    write-back to one flush only. So after a failed flush of such a descriptor the image takes no more changes, and
//!    no other flush runs beside it.

use super::{Entropy, Place};
use crate::descriptor::{Descriptor, storage};
use crate::{Error, ErrorKind, Extent, Layer, Result, Usage};
use backend::File;
use parking_lot::Mutex;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A descriptor with its location.
pub(super) struct StoredDescriptor {
    pub(super) place: Place,
    /// The extent that embeds the descriptor, and the byte range of the descriptor in that extent.
    pub(super) embedded: Option<(Arc<dyn File>, Range<u64>)>,
    pub(super) descriptor: Mutex<Descriptor>,
    pub(super) random: Entropy,
    renewed: AtomicBool,
    /// Whether the last write failed, so that the file may have the descriptor of that write.
    uncertain: AtomicBool,
    /// Held during each flush of the extent that embeds the descriptor.
    flushing: Mutex<()>,
    /// Whether a write or flush of the embedded descriptor has failed, so that data of the extent may be lost.
    failed: AtomicBool,
}

impl StoredDescriptor {
    pub(super) fn new(
        place: Place,
        descriptor: Descriptor,
        embedded: Option<(Arc<dyn File>, Range<u64>)>,
        random: Entropy,
    ) -> Self {
        // An unfinished image was created with a CID that no child records. Its descriptor must not be replaced either:
        // the process that creates the image holds a lock on that file.
        let renewed = AtomicBool::new(place.name.ends_with(storage::NEW_SUFFIX));
        let (uncertain, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        let (descriptor, flushing) = (Mutex::new(descriptor), Mutex::default());
        Self { place, embedded, descriptor, random, renewed, uncertain, flushing, failed }
    }

    /// Writes the embedded descriptor.
    fn embed<T>(&self, write: impl FnOnce() -> Result<T>) -> Result<T> {
        let _flushing = self.flushing.lock();
        write().inspect_err(|error| {
            if error.kind() == ErrorKind::Io {
                self.failed.store(true, Ordering::Release);
            }
        })
    }

    /// Fails after a failure of the embedded descriptor.
    fn check_written(&self) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let text = format!(
            "'{}': its descriptor could not be written, and data that was written before may be lost: open it again",
            self.place.label()
        );
        Err(Error::new(ErrorKind::Stopped, text))
    }

    /// Changes the descriptor, first in the file and then in memory.
    pub(super) fn update(&self, change: impl FnOnce(&mut Descriptor)) -> Result<()> {
        let mut current = self.descriptor.lock();
        let mut changed = current.clone();
        change(&mut changed);
        if changed == *current && !self.uncertain.load(Ordering::Acquire) {
            return Ok(());
        }
        self.uncertain.store(true, Ordering::Release);
        let directory = &**self.place.folder.directory();
        match &self.embedded {
            None => storage::replace_or_renumber(directory, &self.place.name, &current, &changed)?,
            Some((file, place)) => self.embed(|| storage::write_embedded(&**file, place.clone(), &changed))?,
        }
        *current = changed;
        self.uncertain.store(false, Ordering::Release);
        Ok(())
    }

    /// Gives the image a new CID, only once for each opening.
    pub(super) fn renew(&self) -> Result<()> {
        self.check_written()?;
        if self.renewed.load(Ordering::Acquire) {
            return Ok(());
        }
        // The lock is held to the end: once a caller has read the CID, the CID does not change again during this
        // opening.
        let mut current = self.descriptor.lock();
        if self.renewed.load(Ordering::Acquire) {
            return Ok(());
        }
        let random = &mut || (self.random)();
        self.uncertain.store(true, Ordering::Release);
        match &self.embedded {
            None => {
                let mut changed = current.clone();
                changed.renew_content(random);
                let directory = &**self.place.folder.directory();
                match storage::replace(directory, &self.place.name, &changed) {
                    // Only without change tracking: the name of the change-tracking file would have to be removed,
                    // which is not possible in place.
                    Err(error) if error.kind() == ErrorKind::NoSpace && current.change_tracking.is_none() => {
                        changed = storage::renew_in_place(directory, &self.place.name, random)?;
                    }
                    outcome => outcome?,
                }
                *current = changed;
            }
            Some((file, place)) => {
                *current = self.embed(|| storage::renew_embedded(&**file, place.clone(), random))?;
            }
        }
        self.uncertain.store(false, Ordering::Release);
        self.renewed.store(true, Ordering::Release);
        Ok(())
    }
}

/// The extents of an image with a descriptor, opened for writing.
pub(super) struct Identified {
    pub(super) inner: Arc<dyn Layer>,
    pub(super) home: Arc<StoredDescriptor>,
}

impl Layer for Identified {
    fn capacity(&self) -> u64 {
        self.inner.capacity()
    }

    fn grain(&self) -> u64 {
        self.inner.grain()
    }

    fn table_size(&self) -> (u64, u64) {
        self.inner.table_size()
    }

    fn format(&self) -> &'static str {
        self.inner.format()
    }

    fn writable(&self) -> bool {
        self.inner.writable()
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        self.inner.map(range, most, out)
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        self.inner.file(index)
    }

    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.inner.epoch()
    }

    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        self.inner.read_encoded(start, out)
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        self.home.renew()?;
        self.inner.write(start, slices)
    }

    fn overwrite(&self, start: u64, slices: &[&[u8]]) -> Result<bool> {
        self.home.renew()?;
        self.inner.overwrite(start, slices)
    }

    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        self.home.renew()?;
        self.inner.zero(range, keep)
    }

    fn discard(&self, range: Range<u64>) -> Result<bool> {
        match self.home.renew() {
            Err(error) if error.kind() == ErrorKind::NoSpace => Ok(false),
            Err(error) => Err(error),
            Ok(()) => self.inner.discard(range),
        }
    }

    fn room_needed(&self, range: Range<u64>) -> Result<u64> {
        self.inner.room_needed(range)
    }

    fn take_room(&self, range: Range<u64>) -> Result<()> {
        self.inner.take_room(range)
    }

    fn flush(&self) -> Result<()> {
        let _flushing = self.home.flushing.lock();
        self.home.check_written()?;
        self.inner.flush()
    }

    fn is_commit_due(&self) -> bool {
        self.inner.is_commit_due()
    }

    fn has_stopped(&self) -> bool {
        self.home.failed.load(Ordering::Acquire) || self.inner.has_stopped()
    }

    fn close(&self) -> Result<()> {
        let _flushing = self.home.flushing.lock();
        self.home.check_written()?;
        self.inner.close()
    }

    fn usage(&self) -> Result<Usage> {
        self.inner.usage()
    }
}

#[cfg(test)]
mod tests {
    use crate::ErrorKind;
    use crate::image::{Folder, Image, ImageKind, NewImage, OpenOptions, Place, create};
    use backend::simulated::{SimulatedDisk, SimulatedOptions};
    use work::NoProgress;

    #[test]
    fn an_image_stops_if_the_descriptor_in_its_extent_cannot_be_flushed() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let folder = Folder::plain(disk.directory());
        let new = NewImage::new("vm.vmdk", 1 << 20, ImageKind::MonolithicSparse);
        create(&folder, &new, &mut || 7, &NoProgress).unwrap();
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let image = Image::open(Place { folder, name: "vm.vmdk".to_owned() }, &options).unwrap();
        let layer = image.layer();
        layer.write(0, &[&[1; 65_536]]).unwrap();
        disk.fail_syncs(1);
        let failed = image.update_descriptor(|descriptor| descriptor.renew_content(&mut || 9));
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
        assert!(layer.has_stopped());
        assert_eq!(layer.flush().unwrap_err().kind(), ErrorKind::Stopped, "the write before may be lost");
        assert_eq!(layer.write(0, &[&[2; 65_536]]).unwrap_err().kind(), ErrorKind::Stopped);
        assert_eq!(layer.close().unwrap_err().kind(), ErrorKind::Stopped);
    }
}
