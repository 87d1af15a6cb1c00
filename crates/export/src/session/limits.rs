//! The bounds of a session: what the requests of one client can make it hold, whatever the protocol.

/// Requests of one session that have been taken up and not been answered yet.
pub const OUTSTANDING_REQUESTS_MAX: usize = 128;

/// Bytes that one session's reads and unsent replies hold before no further request of it is taken up. A single
/// request is always taken up when nothing is held, so the true bound is this or one payload, whichever is more.
pub const HELD_BYTES_MAX: usize = 48 << 20;

/// Memory of finished reads that one session keeps for its next ones.
pub const POOL_BYTES_MAX: usize = 8 << 20;

/// Operations a session keeps in flight on its [`backend::Queue`].
pub const QUEUE_DEPTH: u32 = 128;

/// How often one read is planned again because its range kept changing, before it fails.
pub const READ_PLANS_MAX: u32 = 256;
