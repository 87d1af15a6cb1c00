//! Data connections: each frame is written to its disk when it is received.
//!
//! In addition to TLS buffers, a connection uses one buffer of the size of the largest frame.

use crate::frame::Kind;
use crate::limits::PIECE_MAX;
use crate::message::Message;
use crate::stream::{ByteStream, Conversation};
use backend::{BLOCK_SIZE, Buffer};
use disk::transfer::{Reception, SEGMENT};
use error::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU64, Ordering};

/// The segment that is being received, with the number of bytes received.
struct Segment {
    disk: u16,
    number: u64,
    bytes: u64,
}

/// Whether a range ends in the segment in which it begins.
fn is_inside(offset: u64, length: u64) -> bool {
    (offset % SEGMENT).checked_add(length).is_some_and(|end| end <= SEGMENT)
}

/// Receives until the sender has sent everything, and adds the received bytes to `total`.
pub fn take<S: ByteStream>(reception: &Reception, line: &mut Conversation<S>, total: &AtomicU64) -> Result<()> {
    let mut buffer = Buffer::recycled(PIECE_MAX / BLOCK_SIZE);
    let mut segment: Option<Segment> = None;
    let mut all = 0;
    loop {
        let head = line.head()?;
        let number = match head.kind {
            Kind::Segment => head.offset,
            _ => head.offset / SEGMENT,
        };
        let disk = usize::from(head.disk);
        let wrong = |what: &str| {
            let text = format!("a sender {what}: {:?} of disk {disk} at {}", head.kind, head.offset);
            Err(Error::new(ErrorKind::Invalid, text))
        };
        if matches!(head.kind, Kind::Data | Kind::Zero) {
            let current = segment.get_or_insert(Segment { disk: head.disk, number, bytes: 0 });
            if (current.disk, current.number) != (head.disk, number) {
                return wrong("left a segment before its end");
            }
        }
        match head.kind {
            Kind::Data => {
                let payload = &mut buffer[..head.length as usize];
                let sums = line.data(&head, payload)?;
                let length = u64::from(head.length);
                if !is_inside(head.offset, length) {
                    return wrong("sent data beyond its segment");
                }
                reception.write(disk, head.offset, payload, sums.as_ref())?;
                if let Some(segment) = &mut segment {
                    segment.bytes += length;
                }
                all += length;
                total.fetch_add(length, Ordering::Relaxed);
            }
            Kind::Zero => {
                let length = line.number(&head)?;
                if !is_inside(head.offset, length) {
                    return wrong("sent zeros beyond their segment");
                }
                reception.zero(disk, head.offset, length)?;
            }
            Kind::Segment => {
                let bytes = line.number(&head)?;
                let fits =
                    |segment: &Segment| (segment.disk, segment.number, segment.bytes) == (head.disk, number, bytes);
                if !segment.take().as_ref().is_some_and(fits) {
                    return wrong("ended a segment that it has not sent");
                }
                reception.finish_segment(disk, number, bytes)?;
            }
            Kind::End if segment.is_none() => return line.tell(&Message::Pong { bytes: all }),
            Kind::End => return wrong("ended within a segment"),
            Kind::Message => return wrong("sent a message where data was expected"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_at_the_end_of_all_numbers_are_judged_without_a_panic() {
        assert!(is_inside(0, SEGMENT) && is_inside(SEGMENT - 1, 1) && is_inside(u64::MAX - 4095, 4096));
        for (offset, length) in [(0, SEGMENT + 1), (SEGMENT - 1, 2), (1, u64::MAX), (u64::MAX, 2), (u64::MAX, u64::MAX)]
        {
            assert!(!is_inside(offset, length), "{offset} {length}");
        }
    }
}
