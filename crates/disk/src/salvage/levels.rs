//! A chain of images of which parts are lost, as the source of a conversion.
//!
//! 1. A range is looked up from the newest level down. A range that a level cannot map is lost: the levels below, whose
//!    content may be older, are not read.
//! 2. Data that cannot be read is lost in blocks of 4 KiB of the file, the unit in which the page cache reads. The rest
//!    of the range is read.
//! 3. Lost ranges read as zeros and are recorded to the byte.

use super::ByteRange;
use crate::convert::{Source, SourceRun};
use crate::{Error, ErrorKind, Result};
use backend::BLOCK_SIZE;
use layer::image::{Image, is_loss};
use layer::{Content, Extent, Layer, SECTOR};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use store::engine::merge_ranges;
use work::Progress;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// The range that is looked up at a time.
const WINDOW: u64 = 64 << 20;
/// The most extents that one query of a level returns.
const EXTENTS: usize = 1024;

/// Lost ranges, as they are found while the disk is read.
#[derive(Clone, Default)]
pub(crate) struct LostRanges(Arc<Mutex<Vec<Range<u64>>>>);

impl LostRanges {
    /// Adds a range of bytes.
    pub(crate) fn add(&self, range: Range<u64>) {
        let mut ranges = self.0.lock();
        match ranges.last_mut() {
            Some(last) if last.start <= range.start && range.start <= last.end => last.end = last.end.max(range.end),
            _ => ranges.push(range),
        }
    }

    /// All ranges in order; ranges that touch each other are merged.
    pub(crate) fn merged(&self) -> Vec<ByteRange> {
        let merged = merge_ranges(self.0.lock().clone()).into_iter();
        merged.map(|range| ByteRange { start: range.start, length: range.end - range.start }).collect()
    }
}

/// Where a range of the disk is.
#[derive(Clone, Copy)]
enum Located {
    /// The range reads as zeros.
    Zero,
    /// The location of the range is unknown.
    Lost,
    /// The range is at `offset` of file number `file` of a level.
    Data { level: usize, file: u16, offset: u64 },
    /// The range is in compressed grains of a level.
    Encoded { level: usize },
}

#[derive(Clone, Copy)]
struct LevelPiece {
    start: u64,
    end: u64,
    at: Located,
}

/// Images, newest first, as a source whose damaged ranges read as zeros, so that a copy does not fail.
pub(crate) struct LevelSource<'a> {
    images: Vec<Image>,
    capacity: u64,
    /// The pieces of the range that was looked up last, in order and without gaps.
    pieces: Vec<LevelPiece>,
    lost: LostRanges,
    progress: &'a dyn Progress,
}

impl<'a> LevelSource<'a> {
    /// Reads these images, of which there is at least one. Lost ranges are added to `lost`.
    pub(crate) fn new(images: Vec<Image>, lost: LostRanges, progress: &'a dyn Progress) -> Result<Self> {
        let newest = images.first().ok_or_else(|| Error::new(ErrorKind::Invalid, "a chain without images"))?;
        let capacity = newest.layer().capacity();
        Ok(Self { images, capacity, pieces: Vec::new(), lost, progress })
    }

    /// Looks up the whole disk, which finds the ranges whose location is unknown.
    pub(crate) fn survey(&mut self) -> Result<()> {
        let mut at = 0;
        while at < self.capacity {
            at = self.piece_at(at)?.end;
        }
        Ok(())
    }

    fn level(&self, number: usize) -> &Arc<dyn Layer> {
        self.images[number].layer()
    }

    /// The piece with byte `at`.
    fn piece_at(&mut self, at: u64) -> Result<LevelPiece> {
        let known = |pieces: &[LevelPiece]| {
            let piece = pieces.get(pieces.partition_point(|piece| piece.end <= at));
            piece.copied().filter(|piece| piece.start <= at)
        };
        if let Some(piece) = known(&self.pieces) {
            return Ok(piece);
        }
        let start = at / SECTOR * SECTOR;
        self.pieces = self.look_up(start..(start + WINDOW).min(self.capacity))?;
        for piece in self.pieces.iter().filter(|piece| matches!(piece.at, Located::Lost)) {
            self.lost.add(piece.start..piece.end);
        }
        let nothing = || Error::new(ErrorKind::Corrupt, format!("nothing is known of byte {at}"));
        known(&self.pieces).ok_or_else(nothing)
    }

    fn look_up(&self, range: Range<u64>) -> Result<Vec<LevelPiece>> {
        let mut found = Vec::new();
        let mut gaps = Vec::from([range]);
        let mut visible = u64::MAX;
        for number in 0..self.images.len() {
            // Data of lower levels past the end of a level is not part of the disk.
            visible = visible.min(self.level(number).capacity());
            let mut below = Vec::new();
            for gap in gaps {
                let end = gap.end.min(visible).max(gap.start);
                if end < gap.end {
                    found.push(LevelPiece { start: end, end: gap.end, at: Located::Zero });
                }
                self.look_up_in_level(number, gap.start..end, &mut found, &mut below)?;
            }
            gaps = below;
            if gaps.is_empty() {
                break;
            }
        }
        found.extend(gaps.into_iter().map(|gap| LevelPiece { start: gap.start, end: gap.end, at: Located::Zero }));
        found.sort_unstable_by_key(|piece| piece.start);
        Ok(found)
    }

    /// Looks a range up in one level. Ranges that it does not store are added to `below`.
    fn look_up_in_level(
        &self,
        number: usize,
        gap: Range<u64>,
        found: &mut Vec<LevelPiece>,
        below: &mut Vec<Range<u64>>,
    ) -> Result<()> {
        let level = self.level(number);
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = gap.start;
        while at < gap.end {
            self.check_cancelled()?;
            extents.clear();
            let mut reached = at;
            match level.map(at..gap.end, EXTENTS, &mut extents) {
                Ok(()) => {}
                Err(error) if is_loss(&error) => extents.clear(),
                Err(error) => return Err(error),
            }
            for extent in &extents {
                let end = extent.start.saturating_add(extent.length);
                if extent.start != reached || extent.length == 0 || end > gap.end {
                    // The tables contradict each other from here on.
                    break;
                }
                let located = match extent.content {
                    Content::Absent => {
                        below.push(reached..end);
                        reached = end;
                        continue;
                    }
                    Content::Zero => Located::Zero,
                    Content::Data { file, offset } => Located::Data { level: number, file, offset },
                    Content::Encoded => Located::Encoded { level: number },
                };
                found.push(LevelPiece { start: reached, end, at: located });
                reached = end;
            }
            if reached == at {
                reached = level.damage_end(at).clamp(at + 1, gap.end);
                found.push(LevelPiece { start: at, end: reached, at: Located::Lost });
            }
            at = reached;
        }
        Ok(())
    }

    fn check_cancelled(&self) -> Result<()> {
        match self.progress.cancelled() {
            true => Err(Error::new(ErrorKind::Interrupted, "stopped while the images were read; no target is left")),
            false => Ok(()),
        }
    }

    /// Reads a part of the disk that begins at `start`, in one file of a level.
    fn read_data(&self, start: u64, level: usize, file: u16, offset: u64, out: &mut [u8]) -> Result<()> {
        let Ok(file) = self.level(level).file(file) else {
            out.fill(0);
            self.lost.add(start..start + out.len() as u64);
            return Ok(());
        };
        if file.read_at(out, offset).is_ok() {
            return Ok(());
        }
        let mut at = 0;
        while at < out.len() as u64 {
            self.check_cancelled()?;
            let end = (((offset + at) / BLOCK + 1) * BLOCK - offset).min(out.len() as u64);
            let part = &mut out[at as usize..end as usize];
            if file.read_at(part, offset + at).is_err() {
                part.fill(0);
                self.lost.add(start + at..start + end);
            }
            at = end;
        }
        Ok(())
    }

    /// Reads compressed grains.
    fn read_encoded(&self, start: u64, level: usize, out: &mut [u8]) -> Result<()> {
        let level = self.level(level);
        if level.read_encoded(start, out).is_ok() {
            return Ok(());
        }
        let end = start + out.len() as u64;
        let mut at = start;
        while at < end {
            self.check_cancelled()?;
            let until = level.damage_end(at).clamp(at + 1, end);
            let part = &mut out[(at - start) as usize..(until - start) as usize];
            if level.read_encoded(at, part).is_err() {
                part.fill(0);
                self.lost.add(at..until);
            }
            at = until;
        }
        Ok(())
    }
}

impl Source for LevelSource<'_> {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn next(&mut self, start: u64) -> Result<SourceRun> {
        let piece = self.piece_at(start)?;
        Ok(SourceRun { length: piece.end - start, zero: matches!(piece.at, Located::Zero | Located::Lost) })
    }

    fn read(&mut self, start: u64, out: &mut [u8]) -> Result<()> {
        let end = start + out.len() as u64;
        let mut at = start;
        while at < end {
            let piece = self.piece_at(at)?;
            let until = piece.end.min(end);
            let part = &mut out[(at - start) as usize..(until - start) as usize];
            match piece.at {
                Located::Zero | Located::Lost => part.fill(0),
                Located::Data { level, file, offset } => {
                    self.read_data(at, level, file, offset + (at - piece.start), part)?;
                }
                Located::Encoded { level } => self.read_encoded(at, level, part)?,
            }
            at = until;
        }
        Ok(())
    }
}
