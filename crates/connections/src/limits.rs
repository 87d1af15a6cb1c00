//! Limits of the service.

use std::time::Duration;

/// How many connections of each class may be open at a time. Each class has its own limit, so that connections of one
/// class never prevent connections of another class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections over unix sockets.
    pub unix: usize,
    /// TCP connections whose clients have presented a valid certificate.
    pub authenticated: usize,
    /// All other TCP connections: those without client certificates, and those that have not completed the TLS
    /// handshake.
    pub unauthenticated: usize,
}

impl Limits {
    /// Limits each class to `limit` connections.
    pub const fn each(limit: usize) -> Self {
        Self { unix: limit, authenticated: limit, unauthenticated: limit }
    }
}

/// Connections that the kernel keeps until they are accepted.
pub const BACKLOG: i32 = 128;

/// Length of the backlog of an [`Owned`](crate::Listen::Owned) socket. If more short commands connect at once, they
/// wait until the backlog has room instead of being refused.
pub const BACKLOG_OWNED: i32 = 16;

/// Pause before accepting again if the process or the system has no descriptor left.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Pause before accepting further TCP connections after [`REFUSALS_AT_ONCE`] were refused. Each wake-up of the
/// accepting thread can delay a request of a local client, so the thread wakes rarely and refuses several connections
/// each time.
pub const REFUSAL_PAUSE: Duration = Duration::from_millis(100);

/// TCP connections that are refused without a pause between them.
pub const REFUSALS_AT_ONCE: u32 = 10;

/// Default time that a client may take from connecting to the end of its handshake, including TLS.
pub const HANDSHAKE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// How long the bytes that the peer still sends are read after a connection was closed. After this time the connection
/// is reset.
pub const CLOSE_PATIENCE: Duration = Duration::from_millis(500);

/// Bytes that one read discards while a connection is closed.
pub const CLOSE_READ_BYTES: usize = 16 << 10;

/// Interval at which refusals with the same cause are logged together, with their number.
pub const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Interval at which a wait for connections of disconnected clients checks whether further clients have disconnected.
pub const SETTLE_LOOK: Duration = Duration::from_millis(100);

/// Limit of the outgoing plaintext and ciphertext that rustls buffers for one connection.
pub const TLS_BUFFER_BYTES_MAX: usize = 512 << 10;

/// Most ciphertext that a [`TlsStream`](crate::TlsStream) receives at once.
pub const RECEIVE_BYTES: usize = 512 << 10;

/// Amount of ciphertext that a [`TlsStream`](crate::TlsStream) collects before it sends.
pub const SEND_BYTES: usize = 512 << 10;

/// Most plaintext that a [`TlsStream`](crate::TlsStream) encrypts at once, and sends soon after. It is a multiple of
/// the size of TLS records.
pub const ENCRYPT_BYTES: usize = 256 << 10;
