//! A handle of a simulated file.

use super::content::PAGE;
use super::world::{FileId, World};
use super::{Fault, Request, take_time};
use crate::validate::{check_alignment, check_range, check_slices};
use crate::{File, IoMode, LocalFile, LocalPart, Placement};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Placements per call: few, so that callers have to repeat the call.
const PLACEMENTS_MAX: usize = 8;

pub(super) struct SimulatedFile {
    world: Arc<Mutex<World>>,
    id: FileId,
    mode: IoMode,
}

impl SimulatedFile {
    /// A handle that [`World`] has counted already.
    pub(super) fn new(world: Arc<Mutex<World>>, id: FileId, mode: IoMode) -> Self {
        Self { world, id, mode }
    }

    fn read_now(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut world = self.world.lock();
        if world.does_fail(Fault::Read) {
            return Err(Errno::IO.into());
        }
        let file = world.file(self.id)?;
        if file.unreadable.next(offset).is_some_and(|range| range.start < offset + buffer.len() as u64) {
            return Err(Errno::IO.into());
        }
        file.live.read(buffer, offset);
        Ok(())
    }
}

impl Drop for SimulatedFile {
    fn drop(&mut self) {
        self.world.lock().close(self.id);
    }
}

impl File for SimulatedFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.world.lock().file(self.id)?.live.length())
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        check_range(length, 0)?;
        take_time(&self.world, Request::Space);
        self.world.lock().set_length(self.id, length)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        check_alignment(self.mode, offset, buffer)?;
        check_range(offset, buffer.len() as u64)?;
        take_time(&self.world, Request::Read);
        self.read_now(buffer, offset)
    }

    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        if self.mode == IoMode::Direct || !self.world.lock().is_cached(self.id) {
            // A caller that uses the buffer despite the refusal reads wrong data, which its test detects.
            buffer.fill(0xa5);
            return Ok(false);
        }
        check_range(offset, buffer.len() as u64)?;
        self.read_now(buffer, offset)?;
        Ok(true)
    }

    fn write_at(&self, slices: &[&[u8]], offset: u64, durable: bool) -> io::Result<()> {
        let total = check_slices(self.mode, slices, offset)?;
        if total == 0 {
            return Ok(());
        }
        take_time(&self.world, Request::Write);
        let bytes: Arc<[u8]> = slices.concat().into();
        self.world.lock().write(self.id, offset, bytes, durable)
    }

    fn sync(&self) -> io::Result<()> {
        take_time(&self.world, Request::Sync);
        self.world.lock().sync(self.id)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        check_range(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        take_time(&self.world, Request::Space);
        self.world.lock().punch(self.id, offset, length)
    }

    fn local(&self) -> Option<LocalPart<'_>> {
        Some(LocalPart { file: self, descriptor: None, mode: self.mode })
    }
}

impl LocalFile for SimulatedFile {
    fn forget_cached(&self) -> io::Result<()> {
        self.world.lock().forget_cached(self.id)
    }

    fn reserve(&self, offset: u64, length: u64) -> io::Result<()> {
        check_range(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        take_time(&self.world, Request::Space);
        self.world.lock().reserve(self.id, offset, length)
    }

    fn zero_range(&self, offset: u64, length: u64) -> io::Result<()> {
        check_range(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        take_time(&self.world, Request::Space);
        let mut world = self.world.lock();
        if offset + length > world.file(self.id)?.live.length() {
            return Err(Errno::INVAL.into());
        }
        world.zero_range(self.id, offset, length)
    }

    fn placements(&self, offset: u64) -> io::Result<Vec<Placement>> {
        let mut world = self.world.lock();
        let live = &world.file(self.id)?.live;
        let mut found = Vec::new();
        let mut page = offset / PAGE;
        while found.len() < PLACEMENTS_MAX
            && let Some((pages, written)) = live.next_alike(page)
        {
            page = pages.end;
            let range = (pages.start * PAGE).max(offset)..pages.end.saturating_mul(PAGE).min(live.length());
            if range.is_empty() {
                break;
            }
            found.push(Placement { range, physical: None, written });
        }
        Ok(found)
    }

    fn next_allocated(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let mut world = self.world.lock();
        let live = &world.file(self.id)?.live;
        let found = live.space().next(offset / PAGE).map(|pages| {
            let end = pages.end.saturating_mul(PAGE).min(live.length());
            (pages.start * PAGE).max(offset)..end
        });
        Ok(found.filter(|range| !range.is_empty()))
    }

    fn allocated(&self) -> io::Result<u64> {
        Ok(self.world.lock().file(self.id)?.live.space().total() * PAGE)
    }
}
