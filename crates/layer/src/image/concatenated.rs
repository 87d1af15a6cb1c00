//! Several extents as one layer: each begins where the one before it ends.
//!
//! 1. Parts are adjacent, and none is empty. Each is as long as its extent line says, even if its layer is longer.
//! 2. File number `n` of this layer is the only file of part `n`, so that offsets in files need no translation.
//! 3. Whole grains of the disk are whole grains in every part; otherwise the parts cannot be opened for writing
//!    together.

use crate::{Content, Error, ErrorKind, Extent, Layer, Result, SECTOR, Usage, read_only};
use backend::File;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// One extent of the disk.
pub(super) struct Part {
    /// Length in bytes.
    pub(super) length: u64,
    /// The layer of the extent; `None` for a zero extent, which cannot be written.
    pub(super) layer: Option<Arc<dyn Layer>>,
    /// The extent's name in messages.
    pub(super) name: String,
}

struct Placed {
    start: u64,
    part: Part,
}

/// A layer that joins extents.
pub(super) struct Concatenated {
    parts: Vec<Placed>,
    capacity: u64,
    grain: u64,
    writable: bool,
}

/// The part of a requested range that is in one extent.
struct ExtentPart<'a> {
    index: usize,
    placed: &'a Placed,
    within: Range<u64>,
}

impl Concatenated {
    /// Joins parts. With `writable`, the parts that their extent lines permit to be written can be written.
    pub(super) fn new(parts: Vec<Part>, writable: bool) -> Result<Self> {
        let grain = parts.iter().filter_map(|part| part.layer.as_ref()).map(|layer| layer.grain()).max();
        let grain = grain.unwrap_or(SECTOR);
        let mut capacity = 0u64;
        let mut placed = Vec::with_capacity(parts.len());
        for part in parts {
            if let Some(layer) = part.layer.as_ref().filter(|layer| writable && layer.writable()) {
                let own = layer.grain();
                let whole = part.length.is_multiple_of(own) || part.length == layer.capacity();
                if !capacity.is_multiple_of(own) || !own.is_power_of_two() || !whole {
                    let text = format!(
                        "'{}' begins or ends within a grain of {own} bytes; the disk can be read, not written",
                        part.name
                    );
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
            }
            let end = capacity.checked_add(part.length).filter(|end| *end <= crate::CAPACITY_MAX && part.length > 0);
            let end = end.ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, format!("'{}' makes the disk longer than any disk can be", part.name))
            })?;
            placed.push(Placed { start: capacity, part });
            capacity = end;
        }
        if placed.is_empty() || placed.len() > usize::from(u16::MAX) {
            return Err(Error::new(ErrorKind::Corrupt, "a disk has at least one extent"));
        }
        Ok(Self { parts: placed, capacity, grain, writable })
    }

    /// Cuts a range at the borders of the parts, in order.
    fn pieces(&self, range: Range<u64>) -> Result<impl Iterator<Item = ExtentPart<'_>>> {
        if range.start > range.end || range.end > self.capacity {
            let text = format!("bytes {} to {} reach past the end of the disk", range.start, range.end);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let first = self.parts.partition_point(|placed| placed.start + placed.part.length <= range.start);
        let placed = self.parts.iter().enumerate().skip(first);
        let end = range.end;
        let touched = placed.take_while(move |(_, placed)| placed.start < end);
        Ok(touched.filter_map(move |(index, placed)| {
            let from = range.start.max(placed.start) - placed.start;
            let to = range.end.min(placed.start + placed.part.length) - placed.start;
            (from < to).then_some(ExtentPart { index, placed, within: from..to })
        }))
    }

    fn layers(&self) -> impl Iterator<Item = &Arc<dyn Layer>> {
        self.parts.iter().filter_map(|placed| placed.part.layer.as_ref())
    }
}

impl ExtentPart<'_> {
    /// The layer of the part, if it may be changed.
    fn changeable(&self) -> Result<&Arc<dyn Layer>> {
        let name = &self.placed.part.name;
        match &self.placed.part.layer {
            Some(layer) if layer.writable() => Ok(layer),
            Some(_) => Err(Error::new(ErrorKind::ReadOnly, format!("the extent '{name}' is read-only"))),
            None => Err(Error::new(ErrorKind::ReadOnly, "the range has no extent file and cannot be written")),
        }
    }

    /// Converts the extents in `out` from index `from` on, which the part's layer returned, to offsets and files of the
    /// whole disk. Extents before index `own` are not of this disk's result, and are not changed.
    fn translate(&self, out: &mut Vec<Extent>, from: usize, own: usize) -> Result<()> {
        for extent in &mut out[from..] {
            extent.start += self.placed.start;
            match &mut extent.content {
                Content::Data { file, .. } if *file == 0 => *file = self.index as u16,
                Content::Data { file, .. } => {
                    let text = format!("'{}' has data in a second file, number {file}", self.placed.part.name);
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
                _ => {}
            }
        }
        // Absent extents, or zeros, on both sides of a border are merged.
        if from > own
            && let (Some(last), Some(next)) = (out.get(from - 1).copied(), out.get(from).copied())
            && last.content == next.content
            && matches!(last.content, Content::Absent | Content::Zero)
        {
            out[from - 1].length += next.length;
            out.remove(from);
        }
        Ok(())
    }
}

impl Layer for Concatenated {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn grain(&self) -> u64 {
        self.grain
    }

    fn table_size(&self) -> (u64, u64) {
        let sizes = self.layers().map(|layer| layer.table_size());
        sizes.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1))).unwrap_or((u64::MAX, 0))
    }

    fn format(&self) -> &'static str {
        let mut formats = self.layers().map(|layer| layer.format());
        let first = formats.next().unwrap_or("zero");
        if formats.all(|format| format == first) { first } else { "custom" }
    }

    fn writable(&self) -> bool {
        self.writable
    }

    fn map(&self, range: Range<u64>, most: usize, out: &mut Vec<Extent>) -> Result<()> {
        let own = out.len();
        for piece in self.pieces(range)? {
            let left = most.max(1).saturating_sub(out.len() - own);
            if left == 0 {
                break;
            }
            let from = out.len();
            match &piece.placed.part.layer {
                Some(layer) => layer.map(piece.within.clone(), left, out)?,
                None => {
                    let length = piece.within.end - piece.within.start;
                    out.push(Extent { start: piece.within.start, length, content: Content::Zero });
                }
            }
            let reached = out[from..].last().map_or(0, |last| last.start + last.length);
            piece.translate(out, from, own)?;
            if reached < piece.within.end {
                break;
            }
        }
        Ok(())
    }

    fn damage_end(&self, at: u64) -> u64 {
        let Some(piece) = self.pieces(at..self.capacity).ok().and_then(|mut pieces| pieces.next()) else {
            return self.capacity;
        };
        let end = match &piece.placed.part.layer {
            Some(layer) => layer.damage_end(piece.within.start).min(piece.within.end),
            None => piece.within.end,
        };
        piece.placed.start + end
    }

    fn file(&self, index: u16) -> Result<&Arc<dyn File>> {
        match self.parts.get(usize::from(index)).and_then(|placed| placed.part.layer.as_ref()) {
            Some(layer) => layer.file(0),
            None => Err(Error::new(ErrorKind::Invalid, format!("the disk has no file {index}"))),
        }
    }

    fn epoch(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        let mut held: Vec<Arc<dyn Any + Send + Sync>> = self.layers().filter_map(|layer| layer.epoch()).collect();
        match held.len() {
            0 => None,
            1 => held.pop(),
            _ => Some(Arc::new(held)),
        }
    }

    fn read_encoded(&self, start: u64, out: &mut [u8]) -> Result<()> {
        let mut rest = out;
        for piece in self.pieces(start..start.saturating_add(rest.len() as u64))? {
            let (part, left) = rest.split_at_mut((piece.within.end - piece.within.start) as usize);
            match &piece.placed.part.layer {
                Some(layer) => layer.read_encoded(piece.within.start, part)?,
                None => part.fill(0),
            }
            rest = left;
        }
        Ok(())
    }

    fn write(&self, start: u64, slices: &[&[u8]]) -> Result<()> {
        if !self.writable {
            return Err(read_only(self.format()));
        }
        let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
        let mut rest = slices.to_vec();
        // If any part refuses the request, no part is written.
        for piece in self.pieces(start..start.saturating_add(length))? {
            piece.changeable()?;
        }
        for piece in self.pieces(start..start.saturating_add(length))? {
            let own = take_front(&mut rest, (piece.within.end - piece.within.start) as usize);
            piece.changeable()?.write(piece.within.start, &own)?;
        }
        Ok(())
    }

    fn overwrite(&self, start: u64, slices: &[&[u8]]) -> Result<bool> {
        let length: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
        let mut pieces = self.pieces(start..start.saturating_add(length))?;
        // With several extents, a later one could refuse its part after an earlier one was overwritten.
        match (self.writable, pieces.next(), pieces.next()) {
            (true, Some(piece), None) => piece.changeable()?.overwrite(piece.within.start, slices),
            _ => Ok(false),
        }
    }

    fn zero(&self, range: Range<u64>, keep: bool) -> Result<()> {
        if !self.writable {
            return Err(read_only(self.format()));
        }
        for piece in self.pieces(range)? {
            // A zero extent reads as zeros already.
            if piece.placed.part.layer.is_some() {
                piece.changeable()?.zero(piece.within.clone(), keep)?;
            }
        }
        Ok(())
    }

    fn discard(&self, range: Range<u64>) -> Result<bool> {
        if !self.writable {
            return Err(read_only(self.format()));
        }
        let mut whole = true;
        for piece in self.pieces(range)? {
            if piece.placed.part.layer.is_some() {
                whole &= piece.changeable()?.discard(piece.within.clone())?;
            }
        }
        Ok(whole)
    }

    fn room_needed(&self, range: Range<u64>) -> Result<u64> {
        let mut needed = 0;
        for piece in self.pieces(range)? {
            if let Some(layer) = &piece.placed.part.layer {
                needed += layer.room_needed(piece.within.clone())?;
            }
        }
        Ok(needed)
    }

    fn take_room(&self, range: Range<u64>) -> Result<()> {
        for piece in self.pieces(range)? {
            if let Some(layer) = &piece.placed.part.layer {
                layer.take_room(piece.within.clone())?;
            }
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.layers().filter(|layer| layer.writable()).try_for_each(|layer| layer.flush())
    }

    fn is_commit_due(&self) -> bool {
        self.layers().any(|layer| layer.is_commit_due())
    }

    fn has_stopped(&self) -> bool {
        self.layers().any(|layer| layer.has_stopped())
    }

    fn close(&self) -> Result<()> {
        // Every extent is closed, even if closing an earlier one fails.
        let outcomes: Vec<Result<()>> = self.layers().map(|layer| layer.close()).collect();
        outcomes.into_iter().collect()
    }

    fn usage(&self) -> Result<Usage> {
        let mut sum = Usage::default();
        for layer in self.layers() {
            let usage = layer.usage()?;
            sum.allocated = sum.allocated.saturating_add(usage.allocated);
            sum.mapped = sum.mapped.saturating_add(usage.mapped);
            sum.dead = sum.dead.saturating_add(usage.dead);
        }
        Ok(sum)
    }
}

/// Removes the first `length` bytes from a list of slices, and returns them.
fn take_front<'a>(slices: &mut Vec<&'a [u8]>, mut length: usize) -> Vec<&'a [u8]> {
    let mut taken = Vec::new();
    let mut used = 0;
    while length > 0
        && let Some(slice) = slices.get_mut(used)
    {
        let (part, rest) = slice.split_at(slice.len().min(length));
        taken.push(part);
        length -= part.len();
        *slice = rest;
        if rest.is_empty() {
            used += 1;
        }
    }
    slices.drain(..used);
    taken
}
