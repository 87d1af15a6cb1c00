//! Plans: the segments of the disks that have to be sent.

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
    /// Number of all segments with data, including those received before.
    pub segments: u64,
    /// Bytes of data in all segments.
    pub bytes: u64,
}

impl DiskPlan {
    /// Creates the plan by reading the map of the disk once.
    pub fn of(outgoing: &Outgoing, known: &Known, stopped: &dyn Fn() -> bool) -> Result<Self> {
        let base = known.base.clone();
        let mut plan = Self { base, left: Vec::new(), left_bytes: 0, segments: 0, bytes: 0 };
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
                    plan.segments += 1;
                    while done.next_if(|(_, to)| *to <= segment).is_some() {}
                    there = done.peek().is_some_and(|(from, to)| (*from..*to).contains(&segment));
                    if !there {
                        plan.left.push(segment);
                    }
                }
                if !extent.zero {
                    plan.bytes += part;
                    plan.left_bytes += if there { 0 } else { part };
                }
                at += part;
            }
            Ok(())
        })?;
        let said: u64 = known.done.iter().map(|(from, to)| to - from).sum();
        if said != plan.segments - plan.left.len() as u64 || known.bytes != plan.bytes - plan.left_bytes {
            let text = format!(
                "the receiver says that it has {said} segments of '{}' with {} bytes, which is impossible",
                outgoing.name(),
                known.bytes
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(plan)
    }
}
