//! Replies to the client: headers, chunks, and payload sent without a copy.
//!
//! [`Outbox`] is a queue of pieces: header bytes, segments of finished reads, and zeros. One send call gathers pieces
//! from the front of the queue without copying them. Invariants:
//!
//! 1. Pieces are sent in order, one complete reply after another: only the end of the connection interrupts a reply.
//! 2. A read is added only when all its bytes are in memory and verified, so that no announced chunk can fail.
//! 3. [`Outbox::held`] counts the payload and header bytes that are not sent; above a limit the session accepts no
//!    further requests.
//! 4. The memory of a read is returned to the session when the read's last piece is sent.

use super::limits::{MESSAGE_BYTES_MAX, SEND_SLICES_MAX};
use super::protocol::{
    EXTENDED_REPLY_MAGIC, Put, RequestHead, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, clip_message, reply_flag,
    reply_type,
};
use super::requests::Refusal;
use backend::BLOCK_SIZE;
use disk::device::{ReadPlan, Segment};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::rc::Rc;

/// The negotiated headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests and replies.
    Extended,
}

/// Zeros that are sent for ranges without data.
static ZEROS: [u8; 16 * BLOCK_SIZE] = [0; 16 * BLOCK_SIZE];

/// Size at which a piece of header bytes is closed, so that further headers are appended to a new piece.
const HEADERS_BYTES: usize = 4096;

enum Piece {
    Bytes(Vec<u8>),
    Zeros(usize),
    Segment { plan: Rc<ReadPlan>, index: usize, range: Range<usize> },
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Zeros(length) => *length,
            Piece::Segment { range, .. } => range.len(),
        }
    }
}

/// The part of a segment that a reply sends: index of the segment and range of bytes in it.
type Part = (usize, Range<usize>);

fn is_zero(plan: &ReadPlan, index: usize) -> bool {
    matches!(plan.segments[index], Segment::Zero { .. })
}

/// Replies waiting to be sent.
pub struct Outbox {
    style: Style,
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that were sent already.
    sent: usize,
    held: usize,
    replies: usize,
    spare: Vec<Vec<u8>>,
}

impl Outbox {
    /// An empty outbox.
    pub fn new(style: Style) -> Self {
        Self { style, pieces: VecDeque::new(), sent: 0, held: 0, replies: 0, spare: Vec::new() }
    }

    /// True when everything is sent.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes not sent yet.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Replies added since the outbox was last empty.
    pub fn replies(&self) -> usize {
        self.replies
    }

    /// A successful reply without payload.
    pub fn success(&mut self, head: &RequestHead) {
        // A simple reply is allowed here even with structured replies, and is shorter.
        match self.style {
            Style::Simple | Style::Structured => self.simple(head, 0),
            Style::Extended => self.chunk(head, reply_flag::DONE, reply_type::NONE, 0),
        }
        self.replies += 1;
    }

    /// An error reply.
    pub fn failure(&mut self, head: &RequestHead, refusal: &Refusal) {
        self.replies += 1;
        if self.style == Style::Simple {
            return self.simple(head, refusal.errno);
        }
        let message = clip_message(&refusal.message, MESSAGE_BYTES_MAX);
        self.chunk(head, reply_flag::DONE, reply_type::ERROR, 6 + message.len());
        self.header(|out| {
            out.put_u32(refusal.errno);
            out.put_u16(message.len() as u16);
            out.extend_from_slice(message.as_bytes());
        });
    }

    /// The chunks of a block status reply.
    pub fn status(&mut self, head: &RequestHead, chunks: Vec<Vec<u8>>) {
        let extended = self.style == Style::Extended;
        let kind = if extended { reply_type::BLOCK_STATUS_EXT } else { reply_type::BLOCK_STATUS };
        let last = chunks.len().saturating_sub(1);
        for (index, chunk) in chunks.into_iter().enumerate() {
            let flags = if index == last { reply_flag::DONE } else { 0 };
            self.chunk(head, flags, kind, chunk.len());
            self.held += chunk.len();
            self.pieces.push_back(Piece::Bytes(chunk));
        }
        self.replies += 1;
    }

    /// The reply to a finished read, which covers the requested range. With `fragments`, runs of zeros of at least a
    /// block become hole chunks.
    pub fn read(&mut self, head: &RequestHead, plan: ReadPlan, fragments: bool) {
        self.replies += 1;
        let plan = Rc::new(plan);
        let only = plan.parts().next().filter(|_| plan.segments.len() == 1);
        let several: Vec<Part>;
        let parts = match &only {
            // Most reads have one part, which needs no memory of its own.
            Some(part) => std::slice::from_ref(part),
            None => {
                several = plan.parts().collect();
                &several
            }
        };
        if self.style == Style::Simple {
            self.simple(head, 0);
            for part in parts {
                self.payload(&plan, part);
            }
            return;
        }
        let is_hole = |(index, range): &Part| fragments && is_zero(&plan, *index) && range.len() >= BLOCK_SIZE;
        let mut offset = plan.offset;
        let mut rest = parts;
        while let Some(first) = rest.first() {
            let hole = is_hole(first);
            let run = rest.iter().position(|part| is_hole(part) != hole).unwrap_or(rest.len());
            let (chunk, after) = rest.split_at(run);
            let length: usize = chunk.iter().map(|(_, range)| range.len()).sum();
            let flags = if after.is_empty() { reply_flag::DONE } else { 0 };
            if hole {
                self.chunk(head, flags, reply_type::OFFSET_HOLE, 12);
                self.header(|out| {
                    out.put_u64(offset);
                    out.put_u32(length as u32);
                });
            } else {
                self.chunk(head, flags, reply_type::OFFSET_DATA, 8 + length);
                self.header(|out| out.put_u64(offset));
                for part in chunk {
                    self.payload(&plan, part);
                }
            }
            offset += length as u64;
            rest = after;
        }
    }

    /// The first pieces as slices of one send call.
    pub fn gather(&self) -> Vec<IoSlice<'_>> {
        let mut slices = Vec::with_capacity(self.pieces.len().min(SEND_SLICES_MAX));
        let mut skip = self.sent;
        for piece in &self.pieces {
            match piece {
                Piece::Bytes(bytes) => slices.push(IoSlice::new(&bytes[skip..])),
                Piece::Segment { plan, index, range } => {
                    let bytes = plan.segments[*index].delivered();
                    slices.push(IoSlice::new(&bytes[range.start + skip..range.end]));
                }
                Piece::Zeros(length) => {
                    let mut left = length - skip;
                    while left > 0 && slices.len() < SEND_SLICES_MAX {
                        let part = left.min(ZEROS.len());
                        slices.push(IoSlice::new(&ZEROS[..part]));
                        left -= part;
                    }
                }
            }
            skip = 0;
            if slices.len() >= SEND_SLICES_MAX {
                break;
            }
        }
        slices
    }

    /// Removes `bytes` sent bytes from the front; `recycle` receives the memory of completely sent reads.
    pub fn advance(&mut self, mut bytes: usize, recycle: &mut dyn FnMut(ReadPlan)) {
        self.held -= bytes;
        while let Some(front) = self.pieces.front() {
            let left = front.len() - self.sent;
            if bytes < left {
                self.sent += bytes;
                return;
            }
            bytes -= left;
            self.sent = 0;
            if let Some(piece) = self.pieces.pop_front() {
                self.retire(piece, recycle);
            }
        }
        self.replies = 0;
    }

    /// Copies replies out of memory shared with the device. A client that does not read its replies then occupies only
    /// memory of its own session.
    pub fn unshare(&mut self, recycle: &mut dyn FnMut(ReadPlan)) {
        for index in 0..self.pieces.len() {
            let piece = &mut self.pieces[index];
            let Piece::Segment { plan, index, range } = piece else { continue };
            if plan.segments.iter().any(|segment| matches!(segment, Segment::Memory(_))) {
                let copy = plan.segments[*index].delivered()[range.clone()].to_vec();
                let old = std::mem::replace(piece, Piece::Bytes(copy));
                self.retire(old, recycle);
            }
        }
    }

    fn retire(&mut self, piece: Piece, recycle: &mut dyn FnMut(ReadPlan)) {
        match piece {
            Piece::Bytes(mut bytes) => {
                if bytes.capacity() <= 2 * HEADERS_BYTES && self.spare.len() < 8 {
                    bytes.clear();
                    self.spare.push(bytes);
                }
            }
            Piece::Zeros(_) => {}
            Piece::Segment { plan, .. } => {
                if let Some(plan) = Rc::into_inner(plan) {
                    recycle(plan);
                }
            }
        }
    }

    fn payload(&mut self, plan: &Rc<ReadPlan>, (index, range): &Part) {
        self.held += range.len();
        self.pieces.push_back(if is_zero(plan, *index) {
            Piece::Zeros(range.len())
        } else {
            Piece::Segment { plan: Rc::clone(plan), index: *index, range: range.clone() }
        });
    }

    fn simple(&mut self, head: &RequestHead, errno: u32) {
        self.header(|out| {
            out.put_u32(SIMPLE_REPLY_MAGIC);
            out.put_u32(errno);
            out.put_u64(head.cookie);
        });
    }

    fn chunk(&mut self, head: &RequestHead, flags: u16, kind: u16, length: usize) {
        let extended = self.style == Style::Extended;
        self.header(|out| {
            out.put_u32(if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC });
            out.put_u16(flags);
            out.put_u16(kind);
            out.put_u64(head.cookie);
            if extended {
                out.put_u64(head.offset);
                out.put_u64(length as u64);
            } else {
                out.put_u32(length as u32);
            }
        });
    }

    /// Appends header bytes to the last piece, or to a new one.
    fn header(&mut self, put: impl FnOnce(&mut Vec<u8>)) {
        if !matches!(self.pieces.back(), Some(Piece::Bytes(bytes)) if bytes.len() < HEADERS_BYTES) {
            let bytes = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(64));
            self.pieces.push_back(Piece::Bytes(bytes));
        }
        if let Some(Piece::Bytes(bytes)) = self.pieces.back_mut() {
            let before = bytes.len();
            put(bytes);
            self.held += bytes.len() - before;
        }
    }
}
