//! Limits of a session: how much memory the requests of one client can occupy, over any protocol.

/// Most requests of one session that are accepted and not answered.
pub const OUTSTANDING_REQUESTS_MAX: usize = 128;

/// Limit of the bytes in the reads and unsent replies of a session; above it, the session accepts no further requests.
/// One request is always accepted if there are no such bytes, so the actual bound is this limit or one payload,
/// whichever is larger.
pub const HELD_BYTES_MAX: usize = 48 << 20;

/// Most memory of finished reads that a session keeps for further reads.
pub const POOL_BYTES_MAX: usize = 8 << 20;

/// Most operations that a session has in flight on its [`backend::Queue`].
pub const QUEUE_DEPTH: u32 = 128;

/// How often a read whose range keeps changing is planned again before it fails.
pub const READ_PLANS_MAX: u32 = 256;
