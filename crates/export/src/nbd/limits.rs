//! Every bound of the NBD server in one place: what one client can make it hold, and for how long. Those of requests
//! under way are the session's ([`crate::session::limits`]).
//!
//! The protocol leaves sizes and counts to the server. A client that stays within what ordinary clients do never meets
//! these; one that does not is answered with an error where the protocol has one, and disconnected where it has none.

use std::time::Duration;

/// Largest payload of one request or reply; what the protocol asks every server to take, and what we advertise. The
/// payload of a refused request is consumed up to this size. A request that announces more ends the connection, as the
/// protocol recommends: consuming it would cost the client and the server more than connecting again.
pub const PAYLOAD_BYTES_MAX: usize = 32 << 20;

/// Smallest unit of access we advertise: the device takes any byte range.
pub const BLOCK_BYTES_MIN: u32 = 1;

/// Unit of access that costs no read-modify-write.
pub const BLOCK_BYTES_PREFERRED: u32 = backend::BLOCK_SIZE as u32;

/// Receive buffer of one connection: how much one system call can bring.
pub const INBOX_BYTES: usize = 256 << 10;

/// Payloads from this size go from the socket into the memory that the device gets, past the receive buffer.
pub const DIRECT_PAYLOAD_BYTES_MIN: usize = 64 << 10;

/// What is received at most into the receive buffer while a client streams large writes, so that little of the next
/// payload lands where it has to be copied from.
pub const INBOX_BYTES_STREAMING: usize = 4 << 10;

/// Parts of one message to the socket (the kernel takes at most 1,024).
pub const SEND_SLICES_MAX: usize = 512;

/// Answers that may pile up, while requests that have arrived are worked through, before they are sent: large enough
/// to save system calls, small enough that the client works on the first ones while we work on the rest.
pub const SEND_BATCH_REPLIES: usize = 8;

/// As [`SEND_BATCH_REPLIES`], in bytes.
pub const SEND_BATCH_BYTES: usize = 128 << 10;

/// Extents in one block status chunk; the client asks again for what is left.
pub const STATUS_EXTENTS_MAX: usize = 32 << 10;

/// Metadata contexts of one connection.
pub const CONTEXTS_MAX: usize = 64;

/// Metadata queries in one option.
pub const QUERIES_MAX: usize = 1024;

/// Information requests in one option.
pub const INFO_REQUESTS_MAX: usize = 256;

/// Longest string the protocol allows.
pub const STRING_BYTES_MAX: usize = 4096;

/// Longest message we put into an error reply.
pub const MESSAGE_BYTES_MAX: usize = 1024;

/// Longest option data that is looked at.
pub const OPTION_BYTES_MAX: usize = 64 << 10;

/// Longest option data that is read and thrown away before an error reply; the connection is closed beyond it.
pub const OPTION_BYTES_SKIPPED_MAX: usize = 1 << 20;

/// Options of one handshake. Clients that list a server ask two for every export.
pub const OPTIONS_MAX: usize = 1 << 16;

/// Connections of each class at a time, unless configured.
pub const CONNECTIONS_DEFAULT: usize = 256;

/// Send buffer of a unix socket: asks for more than systems grant by default, and takes what it gets.
pub const UNIX_SEND_BUFFER_BYTES: usize = 1 << 20;

/// How long running requests may take to finish when the server stops, unless configured.
pub const STOP_GRACE_DEFAULT: Duration = Duration::from_secs(10);

/// How long a client may leave replies unread before they are copied out of memory that they share with the device.
pub const UNREAD_PATIENCE: Duration = Duration::from_millis(200);
