//! Disks of a datastore, in any format, as sources and sinks of a conversion.

use super::copy::{Pieces, Sink, Source, SourceRun};
use crate::device::{Allocation, Device, StatusExtent};
use crate::stride::Stride;
use backend::{BLOCK_SIZE, SharedSlice};
use error::Result;
use std::collections::VecDeque;
use std::sync::Arc;
use work::Progress;

/// Most extents that one query of the map returns.
const ASK_EXTENTS: usize = 1024;

/// A device as a source, together with a value that must exist until the device is closed.
pub struct HoldingSource<H> {
    source: DeviceSource,
    _held: H,
}

impl<H> HoldingSource<H> {
    /// Reads from the device. `held` is dropped after the device.
    pub fn new(device: Arc<dyn Device>, held: H) -> Self {
        Self { source: DeviceSource::new(device), _held: held }
    }
}

impl<H: Send> Source for HoldingSource<H> {
    fn capacity(&self) -> u64 {
        self.source.capacity()
    }

    fn next(&mut self, start: u64) -> Result<SourceRun> {
        self.source.next(start)
    }

    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
        self.source.read(start, out)
    }
}

/// A device as a source, read sequentially.
pub struct DeviceSource {
    device: Arc<dyn Device>,
    /// The first byte of the first of `extents`.
    at: u64,
    extents: VecDeque<StatusExtent>,
    stride: Stride,
}

impl DeviceSource {
    /// Reads the current content of the device, which should not be written meanwhile.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, at: 0, extents: VecDeque::new(), stride: Stride::default() }
    }
}

impl Source for DeviceSource {
    fn capacity(&self) -> u64 {
        self.device.capacity()
    }

    fn next(&mut self, start: u64) -> Result<SourceRun> {
        while let Some(first) = self.extents.front()
            && self.at + first.length <= start
        {
            self.at += first.length;
            self.extents.pop_front();
        }
        if self.extents.is_empty() || self.at > start {
            let rest = self.capacity().saturating_sub(start);
            self.extents = self.stride.ask(rest, |length| self.device.status(start, length, ASK_EXTENTS))?.into();
            self.at = start;
        }
        let Some(first) = self.extents.front() else { return Ok(SourceRun { length: 0, zero: false }) };
        Ok(SourceRun { length: self.at + first.length - start, zero: first.allocation != Allocation::Data })
    }

    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
        let plan = self.device.read_plan(start, out.len())?;
        let mut rest = out;
        for slice in plan.slices() {
            let (part, behind) = rest.split_at_mut(slice.len());
            part.copy_from_slice(slice);
            rest = behind;
        }
        Ok(())
    }
}

/// Called after the device was filled (with true), or after filling it failed (with false).
pub type End = Box<dyn FnOnce(bool) -> Result<()> + Send>;

/// A device that reads as zeros, as a sink that is written sequentially.
pub struct DeviceSink {
    device: Arc<dyn Device>,
    end: End,
}

impl DeviceSink {
    /// A sink that fills the device. Afterwards `end` is called with the outcome; after a failure, `end` removes the
    /// device.
    pub fn new(device: Arc<dyn Device>, end: End) -> Self {
        Self { device, end }
    }
}

impl Sink for DeviceSink {
    fn unit(&self) -> u64 {
        BLOCK_SIZE as u64
    }

    fn fill(&mut self, pieces: &mut Pieces<'_>) -> Result<()> {
        let device = &self.device;
        let take = |piece: &super::CopyPiece| {
            piece.runs.iter().try_for_each(|run| {
                device.write(piece.start + run.start as u64, SharedSlice::copy_of(piece.bytes(run)), false)
            })
        };
        while pieces.next(take)? {}
        Ok(())
    }

    fn finish(self: Box<Self>, _: &dyn Progress) -> Result<()> {
        let Self { device, end } = *self;
        let flushed = device.flush();
        drop(device);
        match flushed {
            Ok(()) => end(true),
            Err(error) => {
                // The first error is returned, so an error of removing the device is ignored.
                let _ = end(false);
                Err(error)
            }
        }
    }

    fn abandon(self: Box<Self>) {
        let Self { device, end } = *self;
        drop(device);
        if let Err(error) = end(false) {
            tracing::error!("the target of a failed conversion was not removed: {error}");
        }
    }
}
