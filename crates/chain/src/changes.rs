//! Cache-fill invalidation: no lookup inserts a result into a cache that a write has made stale.
//!
//! A reader that misses a cache looks the range up in the layers, or reads it, without any lock, and then inserts the
//! result into the cache. A write may have begun and ended meanwhile. So the address space is divided into stripes,
//! each with a count of changes begun and of changes under way. The steps:
//!
//! ```text
//! reader  T  take the stripes' counts              writer  B  begin: increment both counts
//!         L  look up in the layers, without a lock         R  under the shard's lock: remove cached results
//!         C  under the shard's lock: insert, if the        W  change the layer
//!            counts are those of T and no change           P  under the shard's lock: insert the new result
//!            is under way                                  E  end: decrement the changes under way
//! ```
//!
//! Why no stale result stays in the cache: if C precedes R in the order of the shard's lock, R removes the result of C,
//! or P replaces it. If C follows R, it also follows B. Then C reads another count than T, unless T followed B. In that
//! case either T read that a change is under way, and C does not insert; or T followed E, so L read the layer after W.
//! A change of the stack (a snapshot, a merge) is detected by a check after T that the stack which L reads is current:
//! no write uses a new stack before it is current.
//!
//! Distant ranges share a stripe; a change in another range of the stripe only prevents a cache fill.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of address space per stripe.
const STRIPE: u64 = 64 << 10;
/// The number of stripes.
const STRIPES: u64 = 4096;
/// Adds one change under way. The low 16 bits of a count are the changes under way, the rest those begun.
const UNDER_WAY: u64 = 1;
const BEGUN: u64 = 1 << 16;

/// The counts of all stripes.
pub(crate) struct Changes {
    counts: Box<[AtomicU64]>,
}

/// The counts of a range's stripes at one point in time.
pub(crate) struct Token {
    first: u64,
    /// The first counts, stored inline, which is enough for most requests.
    few: [u64; FEW],
    more: Vec<u64>,
}

const FEW: usize = 2;
/// The value of the places of [`Token::few`] beyond the stripes of the range. No stripe has this count: it would mean
/// that a change is under way, and that none was begun.
const NONE: u64 = UNDER_WAY;

/// Stripe numbers of a range, each stripe once.
fn stripes(range: &Range<u64>) -> Range<u64> {
    let first = range.start / STRIPE;
    first..range.end.div_ceil(STRIPE).max(first).min(first + STRIPES)
}

impl Changes {
    pub fn new() -> Self {
        Self { counts: (0..STRIPES).map(|_| AtomicU64::new(0)).collect() }
    }

    fn count(&self, stripe: u64) -> &AtomicU64 {
        &self.counts[(stripe % STRIPES) as usize]
    }

    /// Called before the caches drop `range` and `range` is changed.
    pub fn begin(&self, range: &Range<u64>) {
        for stripe in stripes(range) {
            self.count(stripe).fetch_add(BEGUN + UNDER_WAY, Ordering::SeqCst);
        }
    }

    /// Called after the caches have the new result, or have dropped the range.
    pub fn end(&self, range: &Range<u64>) {
        for stripe in stripes(range) {
            self.count(stripe).fetch_sub(UNDER_WAY, Ordering::SeqCst);
        }
    }

    /// Takes the counts of a range. Called before any lookup in `range`.
    pub fn token(&self, range: &Range<u64>) -> Token {
        let stripes = stripes(range);
        let first = stripes.start;
        let mut counts = stripes.map(|stripe| self.count(stripe).load(Ordering::SeqCst));
        let few = std::array::from_fn(|_| counts.next().unwrap_or(NONE));
        Token { first, few, more: counts.collect() }
    }

    /// True if no change of `range`, a part of the token's range, has begun since the token was taken. The caller holds
    /// the lock under which the result is inserted.
    pub fn unchanged(&self, token: &Token, range: &Range<u64>) -> bool {
        stripes(range).all(|stripe| {
            let index = (stripe.saturating_sub(token.first) % STRIPES) as usize;
            let taken = token.few.get(index).or_else(|| token.more.get(index - FEW)).copied().unwrap_or(NONE);
            taken % BEGUN == 0 && taken == self.count(stripe).load(Ordering::SeqCst)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_invalidates_only_the_tokens_of_its_range() {
        let changes = Changes::new();
        let token = changes.token(&(0..1 << 20));
        changes.begin(&(70_000..70_512));
        assert!(!changes.unchanged(&token, &(65_536..65_537)));
        assert!(changes.unchanged(&token, &(0..65_536)));
        let during = changes.token(&(65_536..131_072));
        changes.end(&(70_000..70_512));
        assert!(!changes.unchanged(&token, &(65_536..65_537)));
        assert!(!changes.unchanged(&during, &(65_536..65_537)), "the token was taken during the change");
        let after = changes.token(&(65_536..131_072));
        assert!(changes.unchanged(&after, &(65_536..131_072)));
    }

    #[test]
    fn a_change_of_the_whole_disk_invalidates_every_token() {
        let changes = Changes::new();
        let token = changes.token(&((5 << 40)..(5 << 40) + 4096));
        changes.begin(&(0..64 << 40));
        changes.end(&(0..64 << 40));
        assert!(!changes.unchanged(&token, &((5 << 40)..(5 << 40) + 4096)));
        let wide = changes.token(&(0..64 << 40));
        assert!(changes.unchanged(&wide, &((7 << 40)..(7 << 40) + 4096)));
    }
}
