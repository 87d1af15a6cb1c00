//! Limits of a session: how much memory the requests of one client can occupy, over any protocol.

use std::time::Duration;

/// Most requests of one session that are accepted and not answered.
pub const OUTSTANDING_REQUESTS_MAX: usize = 128;

/// Limit of the bytes in the reads and unsent replies of a session; above it, the session accepts no further requests.
/// If a session has none of these bytes, one request is always accepted, so the actual bound is this limit or one
/// payload, whichever is larger.
pub const HELD_BYTES_MAX: usize = 48 << 20;

/// Most memory of finished reads that a session keeps for further reads.
pub const POOL_BYTES_MAX: usize = 8 << 20;

/// Most operations that a session has in flight on its [`backend::Queue`].
pub const QUEUE_DEPTH: u32 = 128;

/// How often a read whose range keeps changing is planned again before it fails.
pub const READ_PLANS_MAX: u32 = 256;

/// Most writes of one session that wait for space. While so many wait, the session accepts reads, flushes and discards
/// up to the next write of its client. QEMU has at most 16 requests in flight on a connection.
pub const WAITING_WRITES_MAX: usize = 128;

/// Most bytes of payload in the waiting writes of a session; one write may always wait.
pub const WAITING_BYTES_MAX: usize = 32 << 20;

/// Pause before the first retry of a write that waits for space.
pub const RETRY_MIN: Duration = Duration::from_millis(50);

/// Longest pause between two retries, unless retries take long themselves. Writes go on within this time after space
/// was freed.
pub const RETRY_MAX: Duration = Duration::from_millis(500);
