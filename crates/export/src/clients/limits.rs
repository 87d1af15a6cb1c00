//! The bounds of what is known of clients: how long one that is gone counts, and how long others wait for it.

use std::time::Duration;

/// How long a client counts as a user of its export after its connection ended without `NBD_CMD_DISC`, unless
/// configured. It is long enough for a restart of the server and for clients whose attempts become rarer (QEMU tries
/// at least every 16 seconds).
pub const CLIENT_GRACE_DEFAULT: Duration = Duration::from_secs(120);

/// Longest such time, also of a record that says more.
pub const CLIENT_GRACE_MAX: Duration = Duration::from_secs(86_400);

/// Clients in grace at a time. Of more, the oldest of the export that has the most are forgotten.
pub const CLIENTS_GONE_MAX: usize = 1024;

/// How often a connection that waits for another one to end looks whether it is told to end itself.
pub const RETIRED_LOOK: Duration = Duration::from_millis(100);

/// How long changes of the set of clients are gathered before they are recorded.
pub const RECORD_GATHER: Duration = Duration::from_millis(50);

/// When the record is tried again after it could not be written.
pub const RECORD_RETRY: Duration = Duration::from_secs(30);

/// How long a client that opens an export waits for connections to it that are told to end: within
/// [`HANDSHAKE_TIMEOUT_DEFAULT`](connections::limits::HANDSHAKE_TIMEOUT_DEFAULT).
pub const RETIRED_PATIENCE: Duration = Duration::from_secs(25);
