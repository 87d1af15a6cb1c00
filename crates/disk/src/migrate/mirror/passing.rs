//! Ranges that the copier passes over without reading them: ranges without marks, and ranges that are zeros in both
//! copies.
//!
//! The cursor moves only while the range is locked, as for a copied step. A long range is locked only if that needs no
//! wait: a long request that waits would make all later requests in its range wait too. The length of such a range
//! doubles while there are no requests in it, so that an empty disk of any capacity takes few steps.

use super::{Base, MirrorDevice, STEP_MAX};
use crate::device::{Allocation, Device};
use backend::BLOCK_SIZE;
use error::Result;
use std::sync::atomic::Ordering;

/// Bytes by which the cursor is moved at once over ranges without marks while requests of clients are in them.
const PASS: u64 = 64 << 20;
/// Most bytes of zeros that are passed over at once. The maps are queried while the range is locked, and a native disk
/// looks up each GiB of it.
const ZEROS_MAX: u64 = 64 << 30;

/// How far the next step may pass.
pub(super) struct Reaches {
    unmarked: u64,
    zeros: u64,
}

impl Default for Reaches {
    fn default() -> Self {
        Self { unmarked: PASS, zeros: STEP_MAX }
    }
}

impl MirrorDevice {
    /// Moves the cursor over a range without marks, and returns it. The search for marks ends with the reach, so that
    /// all calls together read the bitmap a few times at most.
    pub(super) fn pass(&self, at: u64, reaches: &mut Reaches) -> u64 {
        let reach = &mut reaches.unmarked;
        let end = self.work.first_marked(at, at.saturating_add(*reach));
        if end <= at {
            return at;
        }
        let (_held, end) = match self.ranges.try_lock(at..end) {
            Some(held) => {
                *reach = reach.saturating_mul(2);
                (held, end)
            }
            None => {
                *reach = PASS;
                let end = end.min(at + PASS);
                (self.ranges.lock(at..end), end)
            }
        };
        // Before the range was locked, a write may have marked a part of it.
        let end = self.work.first_marked(at, end);
        self.cursor.store(end, Ordering::SeqCst);
        end
    }

    /// Moves the cursor over a marked range that reads as zeros in both copies, according to their maps. Returns the
    /// new position, which is `at` if there is no such range. Only a base with an earlier state has such marks, for
    /// example where a snapshot records terabytes of zeros.
    pub(super) fn pass_zeros(&self, at: u64, reaches: &mut Reaches) -> Result<u64> {
        if self.base == Base::Zeros {
            return Ok(at);
        }
        let end = self.work.first_unmarked(at, at.saturating_add(reaches.zeros));
        let held = self.ranges.try_lock(at..end);
        // The first query covers little, because a query of a long range of data takes long. A query that begins with
        // zeros ends with them.
        let mut passed = at;
        if held.is_some() {
            for most in [STEP_MAX, reaches.zeros] {
                let asked = most.min(end - at);
                let zeros = zeros_at(&*self.source, at, asked)?;
                let zeros = if zeros > 0 { zeros_at(&*self.target, at, zeros)? } else { 0 };
                passed = at + zeros;
                if zeros < asked {
                    break;
                }
            }
        }
        reaches.zeros = if held.is_some() && passed == end { (reaches.zeros * 2).min(ZEROS_MAX) } else { STEP_MAX };
        if passed < self.capacity {
            // Steps begin at blocks. `at` is the beginning of a block.
            passed -= passed % BLOCK_SIZE as u64;
        }
        if passed > at {
            self.cursor.store(passed, Ordering::SeqCst);
        }
        Ok(passed)
    }
}

/// Length of the zeros at `at`, at most `length`, according to the map.
fn zeros_at(device: &dyn Device, at: u64, length: u64) -> Result<u64> {
    let found = device.status(at, length, 1)?;
    Ok(found.first().map_or(0, |first| if first.allocation == Allocation::Data { 0 } else { first.length }))
}
