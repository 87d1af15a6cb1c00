//! Limits of the NBD server: how much memory and how many connections one client can occupy, and for how long.
//! [`crate::session::limits`] has the limits of requests under way.
//!
//! The protocol leaves sizes and counts to the server. Ordinary clients do not reach these limits. A client that
//! exceeds a limit gets an error reply if the protocol has a reply for this case, and is disconnected otherwise.

use std::time::Duration;

/// Largest payload of one request or reply: the size that, by the protocol, every server should accept, and that this
/// server advertises. The payload of a refused request is consumed up to this size. A request that announces more ends
/// the connection, as the protocol recommends, because consuming that payload would cost both sides more than a new
/// connection.
pub const PAYLOAD_BYTES_MAX: usize = 32 << 20;

/// Minimum block size that is advertised: the device accepts any byte range.
pub const BLOCK_BYTES_MIN: u32 = 1;

/// Preferred block size: the unit of access that needs no read-modify-write.
pub const BLOCK_BYTES_PREFERRED: u32 = backend::BLOCK_SIZE as u32;

/// Size of a connection's receive buffer, which also limits the bytes that one system call receives.
pub const INBOX_BYTES: usize = 256 << 10;

/// Payloads of at least this size are received directly into the memory that is passed to the device.
pub const DIRECT_PAYLOAD_BYTES_MIN: usize = 64 << 10;

/// Limit of one receive into the buffer while a client streams large writes. A small limit leaves most of the next
/// payload for the direct receive, so that little is copied out of the buffer.
pub const INBOX_BYTES_STREAMING: usize = 4 << 10;

/// Number of slices per send call (the kernel accepts at most 1,024).
pub const SEND_SLICES_MAX: usize = 512;

/// Number of replies that are collected before they are sent. It is large enough to save system calls, and small enough
/// that the client processes the first replies while the server works on the other requests.
pub const SEND_BATCH_REPLIES: usize = 8;

/// As [`SEND_BATCH_REPLIES`], in bytes.
pub const SEND_BATCH_BYTES: usize = 128 << 10;

/// Most extents in one block status chunk. The client has to query the rest of its range again.
pub const STATUS_EXTENTS_MAX: usize = 32 << 10;

/// The most bytes of a `CACHE` request that are loaded. The rest is ignored, as the protocol allows, because the time
/// for a range grows with its length, and other requests of the client wait.
pub const CACHE_BYTES_MAX: u64 = 64 << 20;

/// Most metadata contexts of one connection.
pub const CONTEXTS_MAX: usize = 64;

/// Most metadata queries in one option.
pub const QUERIES_MAX: usize = 1024;

/// Most information requests in one option.
pub const INFO_REQUESTS_MAX: usize = 256;

/// Longest string the protocol allows.
pub const STRING_BYTES_MAX: usize = 4096;

/// Longest message in an error reply.
pub const MESSAGE_BYTES_MAX: usize = 1024;

/// Longest option data that is decoded.
pub const OPTION_BYTES_MAX: usize = 64 << 10;

/// Longest option data that is read and discarded before an error reply; longer data ends the connection.
pub const OPTION_BYTES_SKIPPED_MAX: usize = 1 << 20;

/// Most options in one handshake. Clients that list exports send two for each export.
pub const OPTIONS_MAX: usize = 1 << 16;

/// Default limit of concurrent connections in each class: unix sockets, TCP with a client certificate, TCP without one.
pub const CONNECTIONS_DEFAULT: usize = 256;

/// Size of the send buffer that is requested for a unix socket: larger than the default of most systems. The kernel may
/// grant less.
pub const UNIX_SEND_BUFFER_BYTES: usize = 1 << 20;

/// Default time that running requests may take to finish when the server stops.
pub const STOP_GRACE_DEFAULT: Duration = Duration::from_secs(10);

/// How long a client may leave replies unread before they are copied out of memory shared with the device.
pub const UNREAD_PATIENCE: Duration = Duration::from_millis(200);

/// Interval at which a session that holds changes back, until those of an abandoned connection have ended, looks again.
pub const ABANDONED_LOOK: Duration = Duration::from_millis(1);
