//! The allocation status of ranges, for NBD block status and changed-block tracking. The layers are queried directly,
//! so that the scan of a whole disk for a backup evicts no cached extent of the guest.

use crate::chain::Chain;
use crate::levels::{LevelKey, Levels};
use crate::mapping::To;
use crate::walk::Walk;
use crate::{Error, ErrorKind, Result};
use layer::SECTOR;
use std::ops::Range;
use std::sync::Arc;

/// The status of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Some level stores data.
    Data,
    /// A level records zeros.
    Zero,
    /// No level stores the range.
    Absent,
}

/// A range of bytes with one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Byte offset.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// The status of the range.
    pub condition: Condition,
}

/// Bytes after the position that a step always looks up, and the bytes that it looks up at first. The second number
/// doubles after each step that covered all of them, so that long ranges of one kind take few steps.
const STEP: u64 = 64 << 10;
const WINDOW: u64 = 64 << 20;
/// The most extents of a walk.
const EXTENTS: usize = 1024;

impl Chain {
    /// The status of a range: at most `limit` spans, which cover the whole range unless the limit is reached.
    pub fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<Span>> {
        let levels = self.levels();
        let all = 0..levels.stack.len();
        self.spans(levels, offset, length, limit, all)
    }

    /// The status of a range in the levels above level `below`. Ranges not written there are [`Condition::Absent`].
    pub fn changed_above(&self, below: LevelKey, offset: u64, length: u64, limit: usize) -> Result<Vec<Span>> {
        // The position is valid only in this stack: a snapshot would put another level above.
        let levels = self.levels();
        let position = levels.position(below).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("{}: the level to compare with is not in the chain", self.name))
        })?;
        self.spans(levels, offset, length, limit, 0..position)
    }

    fn spans(
        &self,
        levels: Arc<Levels>,
        offset: u64,
        length: u64,
        limit: usize,
        among: Range<usize>,
    ) -> Result<Vec<Span>> {
        self.check_range(levels.capacity(), offset, length)?;
        let _guard = Arc::clone(&levels).guard();
        let end = offset + length;
        // Layers are queried for whole sectors.
        let sectors_end = end.next_multiple_of(SECTOR).min(levels.capacity());
        let mut spans: Vec<Span> = Vec::new();
        let (mut at, mut reach) = (offset, WINDOW);
        while at < end && spans.len() <= limit {
            let start = at / SECTOR * SECTOR;
            let demand = start..(start + STEP).min(sectors_end);
            let window = start..demand.end.max(start.saturating_add(reach).min(sectors_end));
            let window_end = window.end.min(end);
            let mut walk = Walk { levels: &levels, among: among.clone(), demand, window, most: EXTENTS };
            let found = match walk.run() {
                // Damage beyond the part that is looked up in any case does not matter yet.
                Err(_) => {
                    (walk.window, walk.most) = (walk.demand.clone(), 0);
                    walk.run()
                }
                found => found,
            }
            .map_err(|error| error.context(&self.name))?;
            for mapping in found.mappings {
                if mapping.start > at {
                    break;
                }
                let stop = mapping.end().min(end);
                if stop <= at {
                    continue;
                }
                let condition = match mapping.to {
                    To::Absent => Condition::Absent,
                    To::Zero => Condition::Zero,
                    To::Data { .. } | To::Encoded { .. } => Condition::Data,
                };
                match spans.last_mut() {
                    Some(last) if last.condition == condition => last.length += stop - at,
                    _ => spans.push(Span { start: at, length: stop - at, condition }),
                }
                at = stop;
            }
            reach = if at >= window_end { reach.saturating_mul(2) } else { WINDOW };
        }
        spans.truncate(limit);
        Ok(spans)
    }
}
