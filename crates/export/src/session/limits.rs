//! Limits of a session: what the requests of one client can make it hold, over any protocol.

/// Requests of one session that are accepted but not answered.
pub const OUTSTANDING_REQUESTS_MAX: usize = 128;

/// Limit of the bytes held by reads and unsent replies of a session, above which it accepts no further requests. One
/// request is always accepted if nothing is held, so the actual bound is this or one payload, whichever is larger.
pub const HELD_BYTES_MAX: usize = 48 << 20;

/// Memory of finished reads that a session keeps for further reads.
pub const POOL_BYTES_MAX: usize = 8 << 20;

/// Operations that a session keeps in flight on its [`backend::Queue`].
pub const QUEUE_DEPTH: u32 = 128;

/// How often a read is planned again because its range keeps changing, before it fails.
pub const READ_PLANS_MAX: u32 = 256;
