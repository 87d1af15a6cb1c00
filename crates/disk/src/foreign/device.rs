//! A chain of layers as a device: exports serve disks in VMware's formats by it, and native disks that are overlays
//! above an image.
//!
//! 1. Each segment of a read plan is one part of the chain's plan. The caller fetches the parts that are in files, in
//!    whole blocks if the file requires that. This module decodes encoded parts.
//! 2. The chain's plan is the guard of the read, and is dropped when the read is finished.
//! 3. Layers have no checksums, so a finished read is valid, unless a flush has failed meanwhile: then the file may
//!    have returned old data. A range that is written during the read may return old or new data, as on any disk.
//! 4. If many changes wait to be made durable, a thread of the device flushes the chain, so that no request of a client
//!    waits for that flush. It may outlive the device: closing the chain waits for the flush.

use crate::device::{
    Allocation, BaseIdentity, Device, DirtyExtent, FlushTicket, Media, ReadPlan, Segment, StatusExtent, Verdict,
};
use backend::{BLOCK_SIZE, Buffer, IoMode, SharedSlice};
use chain::{Chain, Condition, LevelKey, Part, Place, Plan};
use error::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// The pause after a flush that failed, before the next one for changes that wait.
const COMMIT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes that one step of a prefetch loads into the caches.
const PREFETCH_PIECE: u64 = 1 << 20;

/// An open chain.
pub struct ChainedDevice {
    chain: Arc<Chain>,
    name: String,
    /// Each snapshot, with the key of the level that was the newest of the chain when the snapshot was taken: every
    /// later write is in the levels above.
    bases: RwLock<Vec<(String, LevelKey)>>,
    /// The disk of which the chain is the head's. Its record has the present level of each snapshot.
    disk: Weak<vmdk::Disk>,
    committer: Committer,
}

/// Flushes a chain for changes that wait.
#[derive(Default)]
struct Committer {
    is_running: Arc<AtomicBool>,
}

/// Allows the next flush when it is dropped, also after a panic.
struct EndOfFlush(Arc<AtomicBool>);

impl Drop for EndOfFlush {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Committer {
    /// Begins a flush, unless one is under way.
    fn begin(&self, chain: &Arc<Chain>) {
        if self.is_running.swap(true, Ordering::SeqCst) {
            return;
        }
        let end = EndOfFlush(Arc::clone(&self.is_running));
        let chain = Arc::clone(chain);
        let work = move || {
            let _end = end;
            let flushed = chain.flush();
            drop(chain);
            if let Err(error) = flushed {
                tracing::debug!(%error, "changes that wait cannot be made durable");
                // After a lack of space the chain keeps the changes. After another failure it refuses writes.
                if error.kind() == ErrorKind::NoSpace {
                    std::thread::sleep(COMMIT_PAUSE);
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("commit".to_owned()).spawn(work) {
            tracing::debug!(%error, "no thread for a flush: a write makes the changes durable later");
        }
    }
}

impl ChainedDevice {
    /// A device for a chain, with the name `name`.
    pub fn new(name: impl Into<String>, chain: Arc<Chain>) -> Self {
        Self {
            chain,
            name: name.into(),
            bases: RwLock::new(Vec::new()),
            disk: Weak::new(),
            committer: Committer::default(),
        }
    }

    /// A device for the head of a disk, which can be compared with the disk's snapshots.
    pub(crate) fn of_head(disk: &Arc<vmdk::Disk>) -> Result<Self> {
        let device = Self { disk: Arc::downgrade(disk), ..Self::new(disk.name(), disk.chain()?) };
        device.set_bases(disk.bases()?);
        Ok(device)
    }

    /// The chain, for control operations and statistics.
    pub fn chain(&self) -> &Arc<Chain> {
        &self.chain
    }

    /// Sets the snapshots with which the device can be compared. The content of a snapshot is that of its level and the
    /// levels below.
    pub fn set_bases(&self, bases: Vec<(String, LevelKey)>) {
        *self.bases.write() = bases;
    }

    /// The level of a snapshot at present.
    fn base(&self, snapshot: &str) -> Option<LevelKey> {
        match self.disk.upgrade() {
            Some(disk) => disk.base_in(&self.chain, snapshot),
            None => self.bases.read().iter().find(|(name, _)| name == snapshot).map(|(_, key)| *key),
        }
    }

    fn segment(&self, part: &Part) -> Result<Segment> {
        Ok(match &part.place {
            Place::Zero => Segment::Zero { length: part.length },
            Place::Memory(slice) => Segment::Memory(slice.clone()),
            Place::Media { file, offset } => {
                let skip = if file.mode() == IoMode::Direct { (offset % BLOCK) as usize } else { 0 };
                let media = Media::new(Arc::clone(file), offset - skip as u64, skip + part.length);
                Segment::Media(Media { delivered: skip..skip + part.length, ..media })
            }
            Place::Encoded { .. } => {
                let mut buffer = Buffer::recycled(part.length.div_ceil(BLOCK_SIZE));
                part.read(0, &mut buffer[..part.length]).map_err(|error| error.context(&self.name))?;
                Segment::Memory(SharedSlice::new(Arc::new(buffer), 0..part.length))
            }
        })
    }

    /// Called after a change.
    fn finish(&self, fua: bool) -> Result<()> {
        if fua {
            return self.chain.flush();
        }
        if self.chain.is_commit_due() {
            self.committer.begin(&self.chain);
        }
        Ok(())
    }
}

impl Device for ChainedDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity(&self) -> u64 {
        self.chain.capacity()
    }

    fn read_only(&self) -> bool {
        self.chain.read_only()
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        let plan = self.chain.plan(offset, length)?;
        let segments = plan.parts.iter().map(|part| self.segment(part)).collect::<Result<Vec<_>>>()?;
        let skip = (offset - plan.start) as usize;
        Ok(ReadPlan { segments, skip, length, offset, guard: Some(Box::new(plan)) })
    }

    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        if let Some(guard) = plan.guard.take()
            && let Ok(planned) = guard.downcast::<Plan>()
        {
            self.chain.check_fetched(&planned)?;
            self.chain.keep(&planned, |index| plan.segments.get(index).map_or(&[], Segment::delivered));
        }
        Ok(Verdict::Good)
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        self.chain.write(offset, &data)?;
        self.finish(fua)
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.chain.discard(offset, length)?;
        self.finish(fua)
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        self.chain.zero(offset, length, allocate)?;
        self.finish(fua)
    }

    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        if self.chain.read_only() { Ok(()) } else { self.chain.flush() }
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.chain.status(offset, length, 1)?;
        let mut piece = Buffer::recycled((PREFETCH_PIECE / BLOCK) as usize);
        let mut at = offset;
        while at < offset + length {
            let step = PREFETCH_PIECE.min(offset + length - at);
            self.chain.read(at, &mut piece[..step as usize])?;
            at += step;
        }
        Ok(())
    }

    fn resize(&self, _capacity: u64) -> Result<()> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("{}: a disk in this format cannot be resized; convert it to a format whose disks can", self.name),
        ))
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        let spans = self.chain.status(offset, length, limit)?;
        let mut out: Vec<StatusExtent> = Vec::with_capacity(spans.len());
        for span in spans {
            let allocation = match span.condition {
                Condition::Data => Allocation::Data,
                // A grain that is marked as zeros occupies almost no space.
                Condition::Zero | Condition::Absent => Allocation::Hole,
            };
            match out.last_mut() {
                Some(last) if last.allocation == allocation => last.length += span.length,
                _ => out.push(StatusExtent { length: span.length, allocation }),
            }
        }
        Ok(out)
    }

    fn is_flushing(&self) -> bool {
        self.committer.is_running.load(Ordering::SeqCst)
    }

    fn dirty_bases(&self) -> Vec<String> {
        self.bases.read().iter().map(|(name, _)| name.clone()).collect()
    }

    fn base_identity(&self, base: &str) -> Option<BaseIdentity> {
        let (number, created) = self.disk.upgrade()?.snapshot_identity(base)?;
        Some(BaseIdentity { number: number.into(), created })
    }

    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        let spans = loop {
            let key = self.base(base).ok_or_else(|| {
                Error::new(ErrorKind::NotFound, format!("{}: there is no snapshot '{base}' to compare with", self.name))
            })?;
            let spans = self.chain.changed_above(key, offset, length, limit);
            // A merge may have given this level the content of levels above it. The record has lost the snapshot
            // before, or has it at another level now.
            if self.base(base) == Some(key) {
                break spans?;
            }
        };
        let mut out: Vec<DirtyExtent> = Vec::with_capacity(spans.len());
        for span in spans {
            let dirty = span.condition != Condition::Absent;
            match out.last_mut() {
                Some(last) if last.dirty == dirty => last.length += span.length,
                _ => out.push(DirtyExtent { length: span.length, dirty }),
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use backend::File;
    use backend::simulated::{SimulatedDisk, SimulatedOptions};
    use chain::Options;
    use layer::Layer;
    use layer::flat::{Flat, FlatOptions};
    use parking_lot::Mutex;
    use std::ops::Range;
    use std::sync::atomic::AtomicU64;

    const FAR: u64 = 2 << 20;

    #[test]
    fn reads_that_were_planned_before_a_failed_flush_return_no_old_data() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let file: Arc<dyn File> = disk.directory().create("base", IoMode::Buffered).unwrap();
        file.set_len(2 * FAR).unwrap();
        let options = FlatOptions { offset: 0, capacity: None, writable: true, thin: true };
        let base: Arc<dyn Layer> = Flat::open(file, "base", options).unwrap();
        let chain = Arc::new(Chain::open("vm", vec![base], Options::default()).unwrap());
        let device = ChainedDevice::new("vm", Arc::clone(&chain));
        let write = |at: u64, byte: u8| device.write(at, SharedSlice::copy_of(&[byte; BLOCK_SIZE]), false).unwrap();
        write(0, 1);
        write(FAR, 1);
        device.flush().unwrap();
        write(0, 2);
        let mut unflushed = device.plan_read(0, BLOCK_SIZE).unwrap();
        let mut flushed = device.plan_read(FAR, BLOCK_SIZE).unwrap();
        disk.fail_syncs(1);
        device.flush().unwrap_err();
        unflushed.fetch().unwrap();
        assert_eq!(device.finish_read(&mut unflushed).unwrap_err().kind(), ErrorKind::Io);
        flushed.fetch().unwrap();
        assert!(device.finish_read(&mut flushed).unwrap() == Verdict::Good);
        assert_eq!(flushed.slices().concat(), [1; BLOCK_SIZE]);
    }

    /// A layer in which changes wait, and whose flushes end only while `held` is free.
    struct Waiting {
        layer: Arc<dyn Layer>,
        due: AtomicBool,
        begun: AtomicU64,
        ended: AtomicU64,
        held: Mutex<()>,
    }

    impl Layer for Waiting {
        fn capacity(&self) -> u64 {
            self.layer.capacity()
        }
        fn grain(&self) -> u64 {
            self.layer.grain()
        }
        fn format(&self) -> &'static str {
            self.layer.format()
        }
        fn writable(&self) -> bool {
            self.layer.writable()
        }
        fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<layer::Extent>) -> Result<()> {
            self.layer.map(range, most, out)
        }
        fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
            self.layer.file(index)
        }
        fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
            self.layer.write(start, slices)
        }
        fn overwrite(&self, start: u64, slices: &[&[u8]]) -> Result<bool> {
            self.layer.overwrite(start, slices)
        }
        fn flush(&self) -> Result<()> {
            self.begun.fetch_add(1, Ordering::SeqCst);
            let _held = self.held.lock();
            self.due.store(false, Ordering::SeqCst);
            self.layer.flush()?;
            self.ended.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
        fn is_commit_due(&self) -> bool {
            self.due.load(Ordering::SeqCst)
        }
        fn usage(&self) -> Result<layer::Usage> {
            self.layer.usage()
        }
    }

    #[test]
    fn no_request_waits_for_the_flush_of_changes_that_wait() {
        let disk = SimulatedDisk::new(1, SimulatedOptions::default());
        let file: Arc<dyn File> = disk.directory().create("base", IoMode::Buffered).unwrap();
        file.set_len(FAR).unwrap();
        let options = FlatOptions { offset: 0, capacity: None, writable: true, thin: true };
        let base: Arc<dyn Layer> = Flat::open(file, "base", options).unwrap();
        let due = AtomicBool::new(true);
        let layer = Waiting { layer: base, due, begun: 0.into(), ended: 0.into(), held: Mutex::new(()) };
        let layer = Arc::new(layer);
        let chain = Chain::open("vm", vec![Arc::clone(&layer) as Arc<dyn Layer>], Options::default()).unwrap();
        let device = ChainedDevice::new("vm", Arc::new(chain));
        let write = |at: u64| device.write(at, SharedSlice::copy_of(&[1; BLOCK_SIZE]), false).unwrap();
        let held = layer.held.lock();
        (0..100).for_each(|block| write(block * BLOCK));
        testkit::process::until("a flush has begun", || layer.begun.load(Ordering::SeqCst) > 0);
        (0..100).for_each(|block| write(block * BLOCK));
        assert_eq!((layer.begun.load(Ordering::SeqCst), layer.ended.load(Ordering::SeqCst)), (1, 0));
        assert!(device.is_flushing());
        drop(held);
        testkit::process::until("the flush has ended", || !device.is_flushing());
        assert_eq!(layer.ended.load(Ordering::SeqCst), 1);
        drop(device);
        assert_eq!(Arc::strong_count(&layer), 1);
    }
}
