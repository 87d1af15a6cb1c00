//! Time limits and bounds for clients in grace.

use std::time::Duration;

/// How long a client counts as a user of its export after its connection ended without `NBD_CMD_DISC`, unless
/// configured. It is long enough for a restart of the server, and for clients that retry with growing intervals (QEMU
/// retries at least every 16 seconds).
pub const CLIENT_GRACE_DEFAULT: Duration = Duration::from_secs(120);

/// Maximum grace time, also if the record has a longer one.
pub const CLIENT_GRACE_MAX: Duration = Duration::from_secs(86_400);

/// Maximum number of clients in grace. Beyond it, the oldest client of the export with the most clients in grace is
/// removed.
pub const CLIENTS_GONE_MAX: usize = 1024;

/// How often a session that waits for another one checks whether it is told to end itself.
pub const RETIRED_LOOK: Duration = Duration::from_millis(100);

/// How long changes of the list are collected before the record is written.
pub const RECORD_GATHER: Duration = Duration::from_millis(50);

/// Time after which a failed write of the record is retried.
pub const RECORD_RETRY: Duration = Duration::from_secs(30);

/// How long a client that opens an export waits for sessions that were told to end. It is shorter than
/// [`HANDSHAKE_TIMEOUT_DEFAULT`](connections::limits::HANDSHAKE_TIMEOUT_DEFAULT).
pub const RETIRED_PATIENCE: Duration = Duration::from_secs(25);

/// How long an operation that clients prevent waits for the sessions of clients that have closed their connections.
/// Such a session normally ends within milliseconds.
pub const LEAVING_PATIENCE: Duration = Duration::from_secs(1);

/// How often that wait looks for further clients that have closed their connections.
pub const LEAVING_LOOK: Duration = Duration::from_millis(20);
