//! Plans: the segments of the disks that have to be sent.
//!
//! A plan shows the map at the time of its creation. Deduplication changes the places of equal blocks while disks are
//! sent and between attempts, so a difference without a difference in content may disappear or appear.

use crate::message::Known;
use disk::transfer::{Outgoing, SEGMENT};
use error::{Error, ErrorKind, Result};

/// The plan of one disk.
pub struct DiskPlan {
    /// The snapshot from which differences are computed; `None` to send all data.
    pub base: Option<String>,
    /// Missing segments, in order.
    pub left: Vec<u64>,
    /// Bytes of data in the missing segments.
    pub left_bytes: u64,
}

impl DiskPlan {
    /// Creates the plan by reading the map of the disk once.
    pub fn of(outgoing: &Outgoing, known: &Known, stopped: &dyn Fn() -> bool) -> Result<Self> {
        check(outgoing, known)?;
        let mut plan = Self { base: known.base.clone(), left: Vec::new(), left_bytes: 0 };
        let mut last = None;
        let mut there = false;
        let mut done = known.done.iter().peekable();
        outgoing.extents(plan.base.as_deref(), 0..outgoing.capacity(), &mut |extent| {
            if stopped() {
                return Err(super::stopped());
            }
            let (mut at, end) = (extent.offset, extent.offset + extent.length);
            while at < end {
                let segment = at / SEGMENT;
                let part = end.min((segment + 1) * SEGMENT) - at;
                if last != Some(segment) {
                    last = Some(segment);
                    while done.next_if(|(_, to)| *to <= segment).is_some() {}
                    there = done.peek().is_some_and(|(from, to)| (*from..*to).contains(&segment));
                    if !there {
                        plan.left.push(segment);
                    }
                }
                if !extent.zero {
                    plan.left_bytes += if there { 0 } else { part };
                }
                at += part;
            }
            Ok(())
        })?;
        Ok(plan)
    }
}

/// Returns an error if the segments that the receiver says it has cannot be segments of this disk. They need not be in
/// the plan: what an earlier attempt has sent may not differ from the base any more.
fn check(outgoing: &Outgoing, known: &Known) -> Result<()> {
    let all = outgoing.capacity().div_ceil(SEGMENT);
    let (mut end, mut said) = (0, 0);
    for (from, to) in &known.done {
        if *from < end || from >= to || *to > all {
            let text = format!(
                "the receiver says that it has segments {from} to {to} of {all} of '{}', which is impossible",
                outgoing.name()
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        end = *to;
        said += to - from;
    }
    // At most `all` segments were counted, so the product is below the capacity plus one segment.
    if known.bytes > said * SEGMENT {
        let text = format!(
            "the receiver says that it has {said} segments of '{}' with {} bytes, which is impossible",
            outgoing.name(),
            known.bytes
        );
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    Ok(())
}
