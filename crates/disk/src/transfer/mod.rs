//! Sending disks to other datastores and receiving them: the operations that a replication protocol needs.
//!
//! ```text
//! outgoing    a snapshot that is sent, and the parts of it that the other datastore has already
//! incoming    disks that are being received: hidden until complete, kept while the sender is disconnected
//! record      the file with the state of a reception
//! ```
//!
//! 1. A snapshot keeps its identity when it is sent, and two snapshots with the same identity have the same content. So
//!    two datastores find common snapshots by comparing identities.
//! 2. Content is sent in segments ([`SEGMENT`]). A segment counts as received once its data is durable and the record
//!    lists it. All other segments are sent again, which has no further effect.
//! 3. A received disk becomes visible only when it is complete, and disks that are sent together become visible
//!    together.

mod incoming;
mod outgoing;
mod record;
#[cfg(test)]
mod tests;

pub use incoming::{Incoming, NewArrival, NewReception, Opened, Reception, ReceptionInfo};
pub use outgoing::{Extent, Outgoing};
pub use record::SnapshotIdentity;
#[doc(hidden)]
pub use record::recode;

pub(crate) use incoming::recover;

/// A new identity for a disk that will be created in another datastore.
pub fn new_identity() -> error::Result<String> {
    crate::names::new_uuid().map(|uuid| crate::names::uuid_text(&uuid))
}

/// Bytes of a segment: the unit in which received data is recorded. The size is part of the protocol.
pub const SEGMENT: u64 = 16 << 20;

/// Most disks received together.
pub const DISKS_MAX: usize = 64;

/// Most snapshots that a sender offers as a base.
pub const BASES_MAX: usize = 1024;
