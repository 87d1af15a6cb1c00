//! Moving a disk to another format, provisioning type or datastore while it is in use.
//!
//! ```text
//! away          moving to another datastore
//! run           one migration, from its first look at the disk to the removal of what it was
//! import        images that are there already: copied, used in place, or used while they are copied
//! intent        the record that says which of the two copies is the disk
//! recover       what opening the datastore does about interrupted ones
//! tree          copying the snapshots, parents before children
//! mirror        the device between a disk's clients and its two copies, and the copier that makes the second one
//! work          which pieces of the disk are still to be looked at: a bit for each
//! pace          bytes per second, and stopping on request
//! native_layer  a native disk as the top layer of a chain: what a guest runs on while its image is brought in
//! ```
//!
//! 1. **There is one disk.** Which of the two copies it is, says one record, replaced whole; every mark, name and
//!    folder follows from it, and can be made to follow again after a crash.
//! 2. **Clients notice nothing.** No request waits for more than one step of the copier, none fails for a failure of
//!    the copy before the record has turned, and what was acknowledged durable before it is durable in both.
//! 3. **It ends or it was not.** Each byte is passed once whatever is written meanwhile; until the record turns, a
//!    failure or a request to stop leaves the disk as it was.
//! 4. Formats are met as devices ([`crate::Device`]) and as trees of snapshots (`tree::Original`, `tree::Replica`), and
//!    not otherwise: `native/moving.rs` and `foreign/moving.rs` are the two kinds there are.
//!
//! Locks, in the order in which they are taken: the use of the disk's name, `rename_lock` (this datastore's, then the
//! other one's), those of the native and foreign disks, switches; in the mirror a range, then its state.

mod away;
mod import;
mod intent;
mod mirror;
mod native_layer;
mod recover;
mod run;
mod tree;
mod work;

#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;

pub use import::{ImportMode, ImportOptions};
pub(crate) use import::{Imports, Overlay};
pub use mirror::{Base, Copied, MirrorDevice};
pub use native_layer::NativeLayer;
pub(crate) use recover::recover;
pub use run::MigrateOptions;
pub(crate) use tree::{Node, Original, Replica};
