//! Every bound of the service in one place.

use std::time::Duration;

/// How many connections of each class may be open at a time. Each class has its own places, so that connections of one
/// class never keep out those of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections over unix sockets.
    pub unix: usize,
    /// TCP connections whose clients have proven by a certificate who they are.
    pub authenticated: usize,
    /// All other TCP connections: those without client certificates, and those whose handshake is not that far.
    pub unauthenticated: usize,
}

impl Limits {
    /// The same limit for each class.
    pub const fn each(limit: usize) -> Self {
        Self { unix: limit, authenticated: limit, unauthenticated: limit }
    }
}

/// Connections that the kernel keeps until they are accepted.
pub const BACKLOG: i32 = 128;

/// The same for the socket of a folder's owner: of many short commands at once, most wait until they are accepted
/// instead of being refused.
pub const BACKLOG_OWNED: i32 = 16;

/// Pause before accepting again when the process or the system has no descriptor left.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// How long a client may take from connecting to the end of its handshake, TLS included, unless configured.
pub const HANDSHAKE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// How long a closed connection may go on sending before it is reset.
pub const CLOSE_PATIENCE: Duration = Duration::from_millis(500);

/// Bytes read at a time, and discarded, from a connection that is closed.
pub const CLOSE_READ_BYTES: usize = 16 << 10;

/// Refusals of one cause are logged once in this time, with their number.
pub const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// How often it is looked whether another client has gone while connections of gone clients are waited for.
pub const SETTLE_LOOK: Duration = Duration::from_millis(100);

/// Plaintext and ciphertext that rustls may hold of one connection on their way out.
pub const TLS_BUFFER_BYTES_MAX: usize = 512 << 10;

/// Ciphertext that a [`TlsStream`](crate::TlsStream) receives at a time.
pub const RECEIVE_BYTES: usize = 512 << 10;

/// Ciphertext that it gathers before it sends.
pub const SEND_BYTES: usize = 512 << 10;

/// Plaintext that it encrypts at a time: it is sent soon after. Whole TLS records.
pub const ENCRYPT_BYTES: usize = 256 << 10;
