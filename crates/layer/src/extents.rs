//! Shared by the maps of all formats: checking the requested range, and building the result.

use crate::{Content, Error, ErrorKind, Extent, Result};
use std::ops::Range;

/// The most entries examined for one result. The limit keeps a call short for an image with a false capacity of many
/// terabytes.
const STEPS_MAX: u32 = 1 << 20;

/// Refuses a range that is not within `capacity`, or has a border that is neither a multiple of `unit` nor the end of
/// the layer.
pub(crate) fn check_range(image: &str, range: &Range<u64>, capacity: u64, unit: u64) -> Result<()> {
    let aligned = range.start.is_multiple_of(unit) && (range.end.is_multiple_of(unit) || range.end == capacity);
    if range.start > range.end || range.end > capacity || !aligned {
        let what = format!("{image}: bytes {} to {} are no range of whole {unit}-byte units", range.start, range.end);
        return Err(Error::new(ErrorKind::Invalid, format!("{what} within its {capacity} bytes")));
    }
    Ok(())
}

/// The result for a range: a limited number of extents, with adjacent ones of one kind merged.
pub(crate) struct Answer<'a> {
    out: &'a mut Vec<Extent>,
    first: usize,
    most: usize,
    steps: u32,
}

impl<'a> Answer<'a> {
    /// A result of at most `most` extents, at least one, appended to `out`.
    pub(crate) fn new(out: &'a mut Vec<Extent>, most: usize) -> Self {
        let first = out.len();
        Self { out, first, most: most.max(1), steps: 0 }
    }

    /// True while no extent was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.out.len() == self.first
    }

    /// Adds the content of the next `length` bytes. Returns false if there is no room for another extent, or if too
    /// many entries were examined.
    pub(crate) fn say(&mut self, start: u64, length: u64, content: Content) -> bool {
        if length == 0 {
            return true;
        }
        let said = self.out.len() - self.first;
        self.steps += 1;
        if said > 0 && self.steps > STEPS_MAX {
            return false;
        }
        if said > 0
            && let Some(last) = self.out.last_mut()
            && continues(last, content)
        {
            last.length += length;
            return true;
        }
        if said >= self.most {
            return false;
        }
        self.out.push(Extent { start, length, content });
        true
    }
}

fn continues(last: &Extent, content: Content) -> bool {
    match (last.content, content) {
        (Content::Data { file, offset }, Content::Data { file: next_file, offset: next }) => {
            file == next_file && offset + last.length == next
        }
        (last, next) => last == next,
    }
}
