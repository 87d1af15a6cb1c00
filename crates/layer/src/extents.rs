//! What every map does alike: checking the range asked for, and putting the answer together.

use crate::{Content, Error, ErrorKind, Extent, Result};
use std::ops::Range;

/// Most entries looked at for one answer: a lying image of many terabytes in a few entries does not hold a caller up.
const STEPS_MAX: u32 = 1 << 20;

/// Refuses a range that does not lie within `capacity`, or not on multiples of `unit` (the end of the layer counts).
pub(crate) fn check_range(image: &str, range: &Range<u64>, capacity: u64, unit: u64) -> Result<()> {
    let aligned = range.start.is_multiple_of(unit) && (range.end.is_multiple_of(unit) || range.end == capacity);
    if range.start > range.end || range.end > capacity || !aligned {
        let what = format!("{image}: bytes {} to {} are no range of whole {unit}-byte units", range.start, range.end);
        return Err(Error::new(ErrorKind::Invalid, format!("{what} within its {capacity} bytes")));
    }
    Ok(())
}

/// The answer to one question about a range: at most so many extents, neighbours of one kind merged.
pub(crate) struct Answer<'a> {
    out: &'a mut Vec<Extent>,
    first: usize,
    most: usize,
    steps: u32,
}

impl<'a> Answer<'a> {
    /// An answer of at most `most` extents, at least one, appended to `out`.
    pub(crate) fn new(out: &'a mut Vec<Extent>, most: usize) -> Self {
        let first = out.len();
        Self { out, first, most: most.max(1), steps: 0 }
    }

    /// True when nothing has been said yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.out.len() == self.first
    }

    /// Says what the next bytes are; false when there is no room for it any more, or it was enough.
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
