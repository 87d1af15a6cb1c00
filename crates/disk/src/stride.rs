//! How many bytes one query of a map covers, for callers that walk a whole map.
//!
//! The time of a query depends on the number of extents in the range, and a map of many terabytes may have one extent
//! or a billion. So the range doubles after each query that was answered quickly, and shrinks after a slow one: the map
//! of an empty disk takes few queries, and a caller that checks for cancellation between two queries never waits long.
//! A query that fails returns none of the extents before the damage. So the range shrinks to the smallest one, and a
//! caller that continues after damage finds these extents with few queries.

use error::Result;
use std::time::{Duration, Instant};

/// Bytes of the first query, and of a query after a slow one.
const FIRST: u64 = 1 << 30;
/// Bytes of a query after one that failed.
const LEAST: u64 = 64 << 10;
/// Most bytes of a query. The limit keeps the first query short that reaches a densely mapped range.
const MOST: u64 = 1 << 40;
/// A query that takes longer than this is slow.
const QUICK: Duration = Duration::from_millis(10);

/// The range of the next query.
pub(crate) struct Stride {
    bytes: u64,
}

impl Default for Stride {
    fn default() -> Self {
        Self { bytes: FIRST }
    }
}

impl Stride {
    /// Calls `query` with the number of bytes to ask for, at most `rest`.
    pub fn ask<T>(&mut self, rest: u64, query: impl FnOnce(u64) -> Result<T>) -> Result<T> {
        let begun = Instant::now();
        let answer = query(self.bytes.min(rest));
        match &answer {
            Ok(_) => self.learn(begun.elapsed()),
            Err(_) => self.bytes = LEAST,
        }
        answer
    }

    /// Adapts the range to the time that a query took.
    fn learn(&mut self, taken: Duration) {
        self.bytes = if taken > QUICK { self.bytes.min(FIRST) } else { (self.bytes * 2).min(MOST) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use error::{Error, ErrorKind};

    #[test]
    fn the_range_grows_after_quick_queries_and_shrinks_after_slow_and_failed_ones() {
        let mut stride = Stride::default();
        let mut asked = Vec::new();
        for _ in 0..12 {
            asked.push(stride.bytes);
            stride.learn(Duration::ZERO);
        }
        assert_eq!(asked[..3], [FIRST, 2 * FIRST, 4 * FIRST]);
        assert_eq!(asked[10..], [MOST, MOST]);
        stride.learn(QUICK * 2);
        assert_eq!(stride.ask(u64::MAX, Ok).unwrap(), FIRST);
        assert_eq!(stride.ask(700, Ok).unwrap(), 700);
        stride.ask(700, |_| Err::<(), Error>(Error::new(ErrorKind::Corrupt, "no map"))).unwrap_err();
        assert_eq!(stride.ask(u64::MAX, Ok).unwrap(), LEAST);
    }
}
