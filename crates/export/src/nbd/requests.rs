//! Checks of requests: from a request's header to an operation or an error reply.
//!
//! The check depends only on the header, the negotiated features and the state of the device. It refuses requests that
//! exceed the capacity, have unknown flags, or have more payload than advertised.

use super::limits::{BLOCK_BYTES_PREFERRED, PAYLOAD_BYTES_MAX};
use super::protocol::{Fields, RequestHead, command, command_flag as flag, errno};
use super::replies::Style;
use super::status::Context;
use crate::exports::ResizePolicy;
use error::ErrorKind;
use std::borrow::Cow;

/// State that decides whether a request is valid.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Negotiated headers and replies.
    pub style: Style,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Current capacity of the device.
    pub capacity: u64,
    /// Whether clients may resize the disk.
    pub resize: ResizePolicy,
    /// Whether metadata contexts are negotiated.
    pub contexts: bool,
}

/// A valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read a range.
    Read {
        /// Length in bytes.
        length: usize,
        /// Whether the reply may have more than one content chunk.
        fragments: bool,
    },
    /// Write the payload.
    Write {
        /// Length in bytes.
        length: usize,
        /// Whether the write must be durable before the reply (FUA).
        fua: bool,
    },
    /// Disconnect.
    Disconnect,
    /// Make writes durable.
    Flush,
    /// Discard a range.
    Trim {
        /// Length in bytes.
        length: u64,
        /// Whether the discard must be durable before the reply (FUA).
        fua: bool,
    },
    /// Prefetch a range.
    Cache {
        /// Length in bytes.
        length: u64,
    },
    /// Make a range read as zeros.
    Zero {
        /// Length in bytes.
        length: u64,
        /// Whether the space of the range must stay or become allocated.
        allocate: bool,
        /// Whether the zeros must be durable before the reply (FUA).
        fua: bool,
    },
    /// Report the block status of a range.
    Status {
        /// Length in bytes.
        length: u64,
        /// Whether the reply must have one extent for each context.
        only_one: bool,
    },
    /// Report the block status of a range that the payload describes.
    StatusPayload {
        /// Length of the payload.
        payload: usize,
        /// Whether the reply must have one extent for each context.
        only_one: bool,
    },
    /// Change the capacity.
    Resize {
        /// New capacity in bytes.
        capacity: u64,
    },
}

/// A refused request, with its error reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Error number.
    pub errno: u32,
    /// Message for users.
    pub message: Cow<'static, str>,
}

impl Refusal {
    /// A refusal with a fixed message.
    pub const fn new(errno: u32, message: &'static str) -> Self {
        Self { errno, message: Cow::Borrowed(message) }
    }
}

impl From<error::Error> for Refusal {
    fn from(error: error::Error) -> Self {
        let errno = match error.kind() {
            ErrorKind::NoSpace => errno::ENOSPC,
            // An error of a system call does not describe the request: for example, a file system that became read-only
            // after I/O errors does not make the export read-only. So the reply is EIO.
            _ if std::error::Error::source(&error).is_some() => errno::EIO,
            ErrorKind::ReadOnly | ErrorKind::Busy => errno::EPERM,
            // The protocol reserves ENOTSUP for requests with FAST_ZERO.
            ErrorKind::Invalid
            | ErrorKind::NotFound
            | ErrorKind::Exists
            | ErrorKind::Unsupported
            | ErrorKind::WrongState => errno::EINVAL,
            ErrorKind::Interrupted => errno::ESHUTDOWN,
            ErrorKind::Corrupt | ErrorKind::Io | ErrorKind::Stopped => errno::EIO,
        };
        Self { errno, message: Cow::Owned(error.to_string()) }
    }
}

/// Checks a request.
pub fn judge(head: &RequestHead, rules: &Rules) -> Result<Action, Refusal> {
    let extended = rules.style == Style::Extended;
    let fua = head.flags & flag::FUA != 0;
    let allowed = flag::FUA
        | match head.command {
            command::READ if rules.style != Style::Simple => flag::DF,
            command::WRITE if extended => flag::PAYLOAD_LEN,
            command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS if extended => flag::REQ_ONE | flag::PAYLOAD_LEN,
            command::BLOCK_STATUS => flag::REQ_ONE,
            _ => 0,
        };
    if head.command == command::DISC {
        return Ok(Action::Disconnect);
    }
    if head.flags & !allowed != 0 {
        return Err(Refusal::new(errno::EINVAL, "the command does not take one of its flags"));
    }
    let only_one = head.flags & flag::REQ_ONE != 0;
    match head.command {
        command::READ => {
            let length = in_range(head, rules, errno::EINVAL)?;
            match usize::try_from(length) {
                Ok(length) if length <= PAYLOAD_BYTES_MAX => {
                    let fragments = rules.style != Style::Simple && head.flags & flag::DF == 0;
                    Ok(Action::Read { length, fragments })
                }
                _ => {
                    let errno = if rules.style == Style::Simple { errno::EINVAL } else { errno::EOVERFLOW };
                    Err(Refusal::new(errno, "the read is longer than the maximum payload of 32 MiB"))
                }
            }
        }
        command::WRITE => {
            writable(rules)?;
            let length = in_range(head, rules, errno::ENOSPC)?;
            let length = usize::try_from(length).ok().filter(|length| *length <= PAYLOAD_BYTES_MAX);
            let length =
                length.ok_or(Refusal::new(errno::EINVAL, "the write is longer than the maximum payload of 32 MiB"))?;
            Ok(Action::Write { length, fua })
        }
        command::FLUSH => match (head.offset, head.length) {
            (0, 0) => Ok(Action::Flush),
            _ => Err(Refusal::new(errno::EINVAL, "a flush takes no range")),
        },
        command::TRIM => {
            writable(rules)?;
            Ok(Action::Trim { length: in_range(head, rules, errno::EINVAL)?, fua })
        }
        command::CACHE => Ok(Action::Cache { length: in_range(head, rules, errno::EINVAL)? }),
        command::WRITE_ZEROES => zero(head, rules, fua),
        command::BLOCK_STATUS if !rules.contexts => {
            Err(Refusal::new(errno::EINVAL, "block status needs a metadata context, agreed on for this export"))
        }
        command::BLOCK_STATUS if head.flags & flag::PAYLOAD_LEN != 0 => match usize::try_from(head.length) {
            Ok(payload) if payload <= PAYLOAD_BYTES_MAX => Ok(Action::StatusPayload { payload, only_one }),
            _ => Err(Refusal::new(errno::EINVAL, "the payload is longer than 32 MiB")),
        },
        command::BLOCK_STATUS => Ok(Action::Status { length: in_range(head, rules, errno::EINVAL)?, only_one }),
        command::RESIZE => resize(head, rules),
        _ => Err(Refusal::new(errno::EINVAL, "the command is not known")),
    }
}

fn zero(head: &RequestHead, rules: &Rules, fua: bool) -> Result<Action, Refusal> {
    writable(rules)?;
    let length = in_range(head, rules, errno::ENOSPC)?;
    let allocate = head.flags & flag::NO_HOLE != 0;
    if head.flags & flag::FAST_ZERO != 0 {
        // Zeroing whole blocks by unmapping changes only the map, so it is faster than writing. Allocating space or
        // zeroing partial blocks may cost as much as writing, and the protocol requires a refusal unless zeroing is
        // known to be faster.
        let block = u64::from(BLOCK_BYTES_PREFERRED);
        let aligned = |position: u64| position.is_multiple_of(block) || position == rules.capacity;
        if allocate || !aligned(head.offset) || !aligned(head.offset.saturating_add(length)) {
            return Err(Refusal::new(errno::ENOTSUP, "zeroing this range may be no faster than writing it"));
        }
    }
    Ok(Action::Zero { length, allocate, fua })
}

fn resize(head: &RequestHead, rules: &Rules) -> Result<Action, Refusal> {
    writable(rules)?;
    match rules.resize {
        ResizePolicy::Never => Err(Refusal::new(errno::EPERM, "this server does not let clients resize disks")),
        ResizePolicy::Grow if head.offset < rules.capacity => {
            Err(Refusal::new(errno::EPERM, "this server lets clients grow disks, not shrink them"))
        }
        ResizePolicy::Grow | ResizePolicy::Any => Ok(Action::Resize { capacity: head.offset }),
    }
}

fn writable(rules: &Rules) -> Result<(), Refusal> {
    if rules.read_only { Err(Refusal::new(errno::EPERM, "the export is read-only")) } else { Ok(()) }
}

/// Checks that a range is not empty and lies within the capacity; returns its length. `beyond` is the error number for
/// a range that exceeds the capacity.
fn in_range(head: &RequestHead, rules: &Rules, beyond: u32) -> Result<u64, Refusal> {
    if head.length == 0 {
        return Err(Refusal::new(errno::EINVAL, "the range is empty"));
    }
    match head.offset.checked_add(head.length) {
        Some(end) if end <= rules.capacity => Ok(head.length),
        _ => Err(Refusal::new(beyond, "the range reaches beyond the end of the export")),
    }
}

/// Parses the payload of a block status request: the length of its range, and which of `contexts` it selects.
pub fn status_payload(
    head: &RequestHead,
    payload: &[u8],
    contexts: &[Context],
    rules: &Rules,
) -> Result<(u64, Vec<usize>), Refusal> {
    const FORM: Refusal = Refusal::new(errno::EINVAL, "the payload must be a length and distinct context numbers");
    let mut fields = Fields(payload);
    let length = fields.u64().ok_or(FORM)?;
    if fields.0.is_empty() || !fields.0.len().is_multiple_of(4) || fields.0.len() / 4 > contexts.len() {
        return Err(FORM);
    }
    let mut chosen = Vec::with_capacity(fields.0.len() / 4);
    while let Some(id) = fields.u32() {
        let index = contexts.iter().position(|context| context.id == id).ok_or(FORM)?;
        if chosen.contains(&index) {
            return Err(FORM);
        }
        chosen.push(index);
    }
    let length = in_range(&RequestHead { length, ..*head }, rules, errno::EINVAL)?;
    Ok((length, chosen))
}

#[cfg(test)]
mod tests;
