//! All limits of the protocol.

use std::time::Duration;

/// Most data in one frame.
pub const PIECE_MAX: usize = 1 << 20;

/// Data that is sent in one frame. It fits into the processor's cache while it is read, verified, encrypted and sent,
/// or received, decrypted and verified. 256 KiB was 3 to 6 % faster than 1 MiB or 128 KiB.
pub const PIECE_SENT: usize = 256 << 10;

/// Longest message: an offer of many disks with many snapshots, or with the definition of a machine.
pub const MESSAGE_MAX: usize = 4 << 20;

/// Most memory that is allocated for a message before its bytes arrive.
pub const MESSAGE_STEP: usize = 64 << 10;

/// Longest program name and version that a peer sends, in bytes.
pub const PROGRAM_MAX: usize = 256;

/// Most data connections of one session.
pub const STREAMS_MAX: usize = 16;

/// Default number of data connections.
pub const STREAMS_DEFAULT: usize = 4;

/// Most connections of each class at a time.
pub const CONNECTIONS_MAX: usize = 96;

/// Limit of the time to connect.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval at which the sender sends a ping.
pub const PING_INTERVAL: Duration = Duration::from_millis(500);

/// Interval at which a receiver that has not finished its reply sends a keep-alive (`Working`).
pub const WORKING_INTERVAL: Duration = Duration::from_secs(1);

/// Time without a message after which a peer counts as disconnected.
pub const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long an earlier session may take to release a reception that a new session needs.
pub const TAKEOVER_MAX: Duration = Duration::from_secs(15);

/// How long data connections may take to end after the receiver has confirmed that it received everything.
pub const LEAVE_MAX: Duration = Duration::from_secs(5);

/// Received data is recorded after this time or after [`SAVE_BYTES`], whichever comes first.
pub const SAVE_INTERVAL: Duration = Duration::from_secs(2);

/// Received data is recorded after this many bytes or after [`SAVE_INTERVAL`], whichever comes first.
pub const SAVE_BYTES: u64 = 1 << 30;

/// Pause before the first retry after a broken connection. Each further retry doubles the pause.
pub const BACKOFF_MIN: Duration = Duration::from_millis(250);

/// Longest pause between two attempts.
pub const BACKOFF_MAX: Duration = Duration::from_secs(8);

/// Most consecutive attempts without progress.
pub const ATTEMPTS_MAX: u32 = 8;

/// How long sessions may take to end when the server stops.
pub const STOP_GRACE: Duration = Duration::from_secs(10);
