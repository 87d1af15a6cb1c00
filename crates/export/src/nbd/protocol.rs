//! Constants and fixed-size messages of the NBD protocol.
//!
//! Pure encoding and decoding, without I/O. All numbers are big-endian on the wire. Names follow the protocol document,
//! without its `NBD_` prefix.

/// First eight bytes that a server sends.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Follows the greeting of newstyle negotiation; also the first bytes of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First bytes of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First bytes of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First bytes of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First bytes of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First bytes of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First bytes of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Flags of the server's greeting.
pub mod greeting {
    /// Options may be refused one by one.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The padding after `EXPORT_NAME` may be left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Flags of the client's answer.
pub mod client {
    /// The client supports fixed newstyle.
    pub const FIXED_NEWSTYLE: u32 = 1 << 0;
    /// The client does not need the padding.
    pub const NO_ZEROES: u32 = 1 << 1;
}

/// Option codes.
pub mod option {
    /// Choose an export; has no error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List all exports.
    pub const LIST: u32 = 3;
    /// Start TLS.
    pub const STARTTLS: u32 = 5;
    /// Get information about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and start transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod option_reply {
    /// Success.
    pub const ACK: u32 = 1;
    /// Name of an export.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Option not supported.
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    /// Option forbidden by the server's configuration.
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    /// Option data are malformed.
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    /// TLS is required first.
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    /// Export does not exist.
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    /// The server is stopping.
    pub const ERR_SHUTDOWN: u32 = (1 << 31) + 7;
    /// Request or reply too long.
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
    /// Extended headers are required, or negotiated already.
    pub const ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;
}

/// Kinds of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Description for users.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum sizes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod feature {
    /// Always set in the flags.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The export is read-only.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA flag is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF flag is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `RESIZE` is supported (resize extension).
    pub const SEND_RESIZE: u16 = 1 << 9;
    /// `CACHE` is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The FAST_ZERO flag is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// Block status accepts a payload that selects contexts.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Commands.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// Disconnect.
    pub const DISC: u16 = 2;
    /// Make writes durable.
    pub const FLUSH: u16 = 3;
    /// Discard.
    pub const TRIM: u16 = 4;
    /// Prefetch.
    pub const CACHE: u16 = 5;
    /// Zero.
    pub const WRITE_ZEROES: u16 = 6;
    /// Status of extents.
    pub const BLOCK_STATUS: u16 = 7;
    /// Change the size; the offset field has the new size.
    pub const RESIZE: u16 = 8;
}

/// Flags of commands.
pub mod command_flag {
    /// The request is durable before the reply.
    pub const FUA: u16 = 1 << 0;
    /// Zeroed space must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The reply must have at most one content chunk.
    pub const DF: u16 = 1 << 2;
    /// The reply has one extent per context.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail if zeroing is not faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length field has the length of a payload (extended headers).
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Flags of reply chunks.
pub mod reply_flag {
    /// Last chunk of a reply.
    pub const DONE: u16 = 1 << 0;
}

/// Types of reply chunks.
pub mod reply_type {
    /// No content.
    pub const NONE: u16 = 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents, 32-bit.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents, 64-bit.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Failure of the whole request.
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// Error numbers of replies.
pub mod errno {
    /// Not permitted.
    pub const EPERM: u32 = 1;
    /// Input/output error.
    pub const EIO: u32 = 5;
    /// Invalid argument.
    pub const EINVAL: u32 = 22;
    /// No space left.
    pub const ENOSPC: u32 = 28;
    /// Value too large.
    pub const EOVERFLOW: u32 = 75;
    /// Not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server is stopping.
    pub const ESHUTDOWN: u32 = 108;
}

/// Status flags of `base:allocation`.
pub mod allocation {
    /// The range occupies no space.
    pub const HOLE: u32 = 1 << 0;
    /// The range reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// Status flag of dirty contexts.
pub mod dirty {
    /// The range may differ.
    pub const DIRTY: u32 = 1 << 0;
}

/// Length of an option's header.
pub const OPTION_HEAD_BYTES: usize = 16;

/// Length of a compact request without payload.
pub const REQUEST_BYTES: usize = 28;

/// Length of an extended request without payload.
pub const EXTENDED_REQUEST_BYTES: usize = 32;

/// Decodes numbers from the front of a message. Methods return `None` once too few bytes are left.
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    /// A 16-bit number.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// A 32-bit number.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// A 64-bit number.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string preceded by its 32-bit length, as bytes.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let length = usize::try_from(self.u32()?).ok()?;
        self.bytes(length)
    }
}

/// Appends numbers to a message.
pub trait Put {
    /// A 16-bit number.
    fn put_u16(&mut self, value: u16);
    /// A 32-bit number.
    fn put_u32(&mut self, value: u32);
    /// A 64-bit number.
    fn put_u64(&mut self, value: u64);
}

impl Put for Vec<u8> {
    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_be_bytes());
    }
    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_be_bytes());
    }
    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_be_bytes());
    }
}

/// A decoded request that is not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// Command flags.
    pub flags: u16,
    /// Command.
    pub command: u16,
    /// The client's identifier of the request.
    pub cookie: u64,
    /// Byte offset.
    pub offset: u64,
    /// Length of the range or of the payload.
    pub length: u64,
}

impl RequestHead {
    /// Decodes a compact or extended request; `None` if the magic is wrong or `bytes` are too few.
    pub fn decode(bytes: &[u8], extended: bool) -> Option<Self> {
        let mut fields = Fields(bytes);
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if fields.u32()? != magic {
            return None;
        }
        Some(Self {
            flags: fields.u16()?,
            command: fields.u16()?,
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: if extended { fields.u64()? } else { u64::from(fields.u32()?) },
        })
    }

    /// Length of the payload that follows the request's header.
    ///
    /// A write always has a payload of `length` bytes. With extended headers the protocol requires the flag
    /// `PAYLOAD_LEN` for a write, but QEMU (10.0 among others) sends writes without the flag. So for a write the
    /// command alone decides. Every other command has a payload only with the flag, and only with extended headers.
    pub fn payload(&self, extended: bool) -> u64 {
        let flagged = extended && self.flags & command_flag::PAYLOAD_LEN != 0;
        if self.command == command::WRITE || flagged { self.length } else { 0 }
    }
}

/// The header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHead {
    /// Code.
    pub code: u32,
    /// Length of the option's data.
    pub length: u32,
}

impl OptionHead {
    /// Decodes an option's header; `None` if the magic is wrong.
    pub fn decode(bytes: &[u8; OPTION_HEAD_BYTES]) -> Option<Self> {
        let mut fields = Fields(bytes);
        if fields.u64()? != OPTION_MAGIC {
            return None;
        }
        Some(Self { code: fields.u32()?, length: fields.u32()? })
    }
}

/// Appends a reply to an option.
pub fn put_option_reply(out: &mut Vec<u8>, code: u32, kind: u32, data: &[u8]) {
    out.put_u64(OPTION_REPLY_MAGIC);
    out.put_u32(code);
    out.put_u32(kind);
    // The strings in `data` are within the protocol's limits, so the length always fits.
    out.put_u32(u32::try_from(data.len()).unwrap_or(u32::MAX));
    out.extend_from_slice(data);
}

/// Shortens a message to fit into a reply, at a character boundary.
pub fn clip_message(message: &str, bytes_max: usize) -> &str {
    let mut end = message.len().min(bytes_max);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}
