//! Limits for clients in grace: times, and their number.

use std::time::Duration;

/// Default grace time: how long a client counts as a user of its export after its connection ended without
/// `NBD_CMD_DISC`. It is long enough for a restart of the server, and for clients that retry with growing intervals
/// (QEMU retries at least every 16 seconds).
pub const CLIENT_GRACE_DEFAULT: Duration = Duration::from_secs(120);

/// Maximum grace time, even if the record has a longer one.
pub const CLIENT_GRACE_MAX: Duration = Duration::from_secs(86_400);

/// Maximum number of clients in grace. If there are more, the oldest client in grace of the export with the most
/// clients in grace is removed.
pub const CLIENTS_GONE_MAX: usize = 1024;

/// Interval at which a session that waits for the end of other sessions checks whether it has to end itself, and
/// whether the client of another session has left.
pub const RETIRED_LOOK: Duration = Duration::from_millis(100);

/// How long changes of the list are collected before the record is written.
pub const RECORD_GATHER: Duration = Duration::from_millis(50);

/// Time after which a failed write of the record is retried.
pub const RECORD_RETRY: Duration = Duration::from_secs(30);

/// How long a client that opens an export waits for sessions of the export that are ending. It is shorter than
/// [`HANDSHAKE_TIMEOUT_DEFAULT`](connections::limits::HANDSHAKE_TIMEOUT_DEFAULT).
pub const RETIRED_PATIENCE: Duration = Duration::from_secs(25);

/// How long an operation that clients prevent waits for the sessions of clients that have closed their connections.
/// Such a session normally ends within milliseconds.
pub const LEAVING_PATIENCE: Duration = Duration::from_secs(1);

/// Interval at which the wait of [`LEAVING_PATIENCE`] checks for further clients that have closed their connections.
pub const LEAVING_LOOK: Duration = Duration::from_millis(20);
