//! Disks that go to other datastores, and come from them: what a protocol between two datastores needs of each.
//!
//! ```text
//! outgoing    one point of a disk, held still: what it is made of, and what of it another datastore has already
//! incoming    disks that are being received: hidden until they are whole, kept while the sender is away
//! record      the file that says how far that is
//! ```
//!
//! 1. A snapshot keeps its identity wherever it goes; two snapshots of one identity have the same content. So two
//!    datastores find what both have by comparing identities.
//! 2. Content moves in segments ([`SEGMENT`]). A segment counts once its data is durable and the record says so; what
//!    was received of others is received again, which changes nothing.
//! 3. What was received is to be seen whole, or not at all: disks that came together appear together.

mod incoming;
mod outgoing;
mod record;

pub use incoming::{Incoming, NewArrival, NewReception, Opened, Reception, ReceptionInfo};
pub use outgoing::{Extent, Outgoing};
pub use record::SnapshotIdentity;
#[doc(hidden)]
pub use record::recode;

pub(crate) use incoming::recover;

/// A new identity, of a disk that is to be made elsewhere.
pub fn new_identity() -> error::Result<String> {
    crate::names::new_uuid().map(|uuid| crate::names::uuid_text(&uuid))
}

/// Bytes of a segment: the unit in which it is remembered what has arrived. Part of the protocol.
pub const SEGMENT: u64 = 16 << 20;

/// Most disks received together.
pub const DISKS_MAX: usize = 64;

/// Most snapshots that a sender names as known to it.
pub const BASES_MAX: usize = 1024;
