//! All limits of the protocol.

use std::time::Duration;

/// Most data in one frame.
pub const PIECE_MAX: usize = 1 << 20;

/// Data sent in one frame: it is read, verified, encrypted and sent, received, decrypted and verified again, and stays
/// in the processor's cache from step to step. 256 KiB was 3 to 6 % faster than 1 MiB or 128 KiB.
pub const PIECE_SENT: usize = 256 << 10;

/// Longest message: an offer of many disks with many snapshots, or with the definition of a machine.
pub const MESSAGE_MAX: usize = 4 << 20;

/// Memory allocated for a message before its bytes arrive.
pub const MESSAGE_STEP: usize = 64 << 10;

/// Longest description of itself that a peer gives, in bytes.
pub const PROGRAM_MAX: usize = 256;

/// Most data connections of one session.
pub const STREAMS_MAX: usize = 16;

/// Data connections, unless configured.
pub const STREAMS_DEFAULT: usize = 4;

/// Connections of each class at a time.
pub const CONNECTIONS_MAX: usize = 96;

/// How long connecting may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often the sender sends a ping.
pub const PING_INTERVAL: Duration = Duration::from_millis(500);

/// How often a receiver that works on an answer sends a keep-alive (`Working`).
pub const WORKING_INTERVAL: Duration = Duration::from_secs(1);

/// Silence after which a peer counts as gone.
pub const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long an earlier session may take to release a reception that a new session opens.
pub const TAKEOVER_MAX: Duration = Duration::from_secs(15);

/// How long data connections may take to end after the sender has heard that everything has arrived.
pub const LEAVE_MAX: Duration = Duration::from_secs(5);

/// Arrived data is recorded after this time.
pub const SAVE_INTERVAL: Duration = Duration::from_secs(2);

/// And after this many bytes.
pub const SAVE_BYTES: u64 = 1 << 30;

/// Pause before the first new attempt after a broken connection; it doubles with each further one.
pub const BACKOFF_MIN: Duration = Duration::from_millis(250);

/// Longest pause between two attempts.
pub const BACKOFF_MAX: Duration = Duration::from_secs(8);

/// Attempts in a row without progress, at most.
pub const ATTEMPTS_MAX: u32 = 8;

/// How long sessions may take to end when the server stops.
pub const STOP_GRACE: Duration = Duration::from_secs(10);
