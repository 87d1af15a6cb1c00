//! A simple NBD server as a model: the disk is a vector, and requests are read, checked and carried out one after
//! another. It follows the protocol document and shares no code with the server under test.
//!
//! If a request is invalid for several reasons, the document does not define which error is returned, so the model
//! accepts each of them.

use testkit::protocol::*;

/// Longest payload that the document requires every server to accept.
pub const PAYLOAD_MAX: u64 = 1 << 25;

/// The header of a request.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length: u64,
    /// Length of the header itself.
    pub bytes: usize,
    /// Length of the payload after the header.
    pub payload: u64,
}

/// The next part of a stream.
#[derive(Debug)]
pub enum Next {
    /// A complete request.
    Whole(Head),
    /// An incomplete request, of which at least this many bytes are missing.
    Part(u64),
    /// The boundary of the next request is unknown, because of a wrong magic number or a payload that is too long.
    Lost,
}

/// Reads the request at the beginning of `bytes`.
pub fn next(bytes: &[u8], mode: Mode) -> Next {
    let extended = mode == Mode::Extended;
    let size = if extended { 32 } else { 28 };
    if bytes.len() < size {
        return Next::Part((size - bytes.len()) as u64);
    }
    let number = |from: usize, to: usize| bytes[from..to].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    if number(0, 4) != if extended { 0x21e4_1c71 } else { 0x2560_9513 } {
        return Next::Lost;
    }
    let (flags, command) = (number(4, 6) as u16, number(6, 8) as u16);
    let length = number(24, size);
    // The document requires the flag for extended writes, but QEMU omits the flag, so a write always has a payload.
    let carries = command == CMD_WRITE || (extended && flags & PAYLOAD != 0);
    let payload = if carries { length } else { 0 };
    if payload > PAYLOAD_MAX {
        return Next::Lost;
    }
    let present = (bytes.len() - size) as u64;
    if present < payload {
        return Next::Part(payload - present);
    }
    Next::Whole(Head { flags, command, cookie: number(8, 16), offset: number(16, 24), length, bytes: size, payload })
}

/// The required reply to a request.
#[derive(Debug)]
pub enum Answer {
    Success,
    /// Success. The disk now has these bytes at the offset.
    Changed(Vec<u8>),
    Data(Vec<u8>),
    /// Success, with extents of the selected contexts.
    Status {
        length: u64,
        ids: Vec<u32>,
    },
    /// One of the contained errors.
    Errors(Vec<u32>),
}

/// A request, with the required reply.
#[derive(Debug)]
pub struct Served {
    pub head: Head,
    pub answer: Answer,
}

/// The model of a server.
pub struct Reference {
    pub mode: Mode,
    pub disk: Vec<u8>,
    pub read_only: bool,
    /// Largest size to which a client may grow the disk; `None` if clients may not grow it.
    pub grows_to: Option<u64>,
    /// Numbers of the negotiated contexts.
    pub contexts: Vec<u32>,
}

impl Reference {
    /// Serves a stream until the client disconnects, the stream ends, or the next request cannot be found.
    pub fn serve(&mut self, mut stream: &[u8]) -> Vec<Served> {
        let mut served = Vec::new();
        while let Next::Whole(head) = next(stream, self.mode) {
            let (request, rest) = stream.split_at(head.bytes + head.payload as usize);
            stream = rest;
            if head.command == CMD_DISC {
                break;
            }
            let answer = self.answer(&head, &request[head.bytes..]);
            served.push(Served { head, answer });
        }
        served
    }

    fn answer(&mut self, head: &Head, payload: &[u8]) -> Answer {
        let mut length = head.length;
        let mut ids = self.contexts.clone();
        let mut errors = Vec::new();
        let mut wrong = |is: bool, error: u32| {
            if is {
                errors.push(error);
            }
        };
        let payload_flag = if self.mode == Mode::Extended { PAYLOAD } else { 0 };
        // FUA is valid with every command.
        let known = FUA
            | match head.command {
                CMD_READ if self.mode != Mode::Simple => DF,
                CMD_WRITE => payload_flag,
                CMD_ZEROES => NO_HOLE | FAST_ZERO,
                CMD_STATUS => REQ_ONE | payload_flag,
                _ => 0,
            };
        wrong(head.flags & !known != 0, EINVAL);
        if head.command == CMD_STATUS && head.payload > 0 {
            match status_form(payload) {
                Some((asked, chosen)) if chosen.iter().all(|id| ids.contains(id)) => (length, ids) = (asked, chosen),
                _ => return Answer::Errors(vec![EINVAL]),
            }
        }
        let end = head.offset.checked_add(length);
        let outside = length == 0 || end.is_none_or(|end| end > self.disk.len() as u64);
        let changes = matches!(head.command, CMD_WRITE | CMD_TRIM | CMD_ZEROES | CMD_RESIZE);
        wrong(changes && self.read_only, EPERM);
        match head.command {
            CMD_READ => {
                wrong(outside, EINVAL);
                wrong(length > PAYLOAD_MAX, if self.mode == Mode::Simple { EINVAL } else { EOVERFLOW });
            }
            CMD_WRITE | CMD_ZEROES => {
                wrong(length == 0, EINVAL);
                wrong(length > 0 && outside, ENOSPC);
                // Zeroing is fast if it unmaps whole blocks; a partial last block counts as whole.
                let whole = |at: u64| at.is_multiple_of(4096) || at == self.disk.len() as u64;
                let slow = head.flags & NO_HOLE != 0 || !whole(head.offset) || !end.is_some_and(whole);
                wrong(head.command == CMD_ZEROES && head.flags & FAST_ZERO != 0 && slow, ENOTSUP);
            }
            CMD_TRIM | CMD_CACHE => wrong(outside, EINVAL),
            CMD_STATUS => wrong(outside || ids.is_empty(), EINVAL),
            CMD_FLUSH => wrong(head.offset != 0 || length != 0, EINVAL),
            CMD_RESIZE => {
                let most = self.grows_to.unwrap_or(0);
                wrong(head.offset < self.disk.len() as u64 || most == 0, EPERM);
                wrong(head.offset > most, ENOSPC);
            }
            _ => wrong(true, EINVAL),
        }
        if !errors.is_empty() {
            return Answer::Errors(errors);
        }
        let range = head.offset as usize..end.unwrap_or(0) as usize;
        match head.command {
            CMD_READ => return Answer::Data(self.disk[range].to_vec()),
            CMD_STATUS => return Answer::Status { length, ids },
            CMD_RESIZE => self.disk.resize(head.offset as usize, 0),
            CMD_WRITE => self.disk[range.clone()].copy_from_slice(payload),
            // The document leaves the content of trimmed bytes undefined; this server returns zeros.
            CMD_ZEROES | CMD_TRIM => self.disk[range.clone()].fill(0),
            _ => {}
        }
        match head.command {
            CMD_WRITE | CMD_ZEROES | CMD_TRIM => Answer::Changed(self.disk[range].to_vec()),
            _ => Answer::Success,
        }
    }
}

/// Parses the payload of block status: a length and at least one context number, each at most once.
fn status_form(payload: &[u8]) -> Option<(u64, Vec<u32>)> {
    let (length, ids) = payload.split_at_checked(8)?;
    if ids.is_empty() || ids.len() % 4 != 0 {
        return None;
    }
    let ids: Vec<u32> = ids.chunks(4).map(|id| u32::from_be_bytes(id.try_into().unwrap())).collect();
    let twice = ids.iter().enumerate().any(|(at, id)| ids[..at].contains(id));
    (!twice).then(|| (u64::from_be_bytes(length.try_into().unwrap()), ids))
}
