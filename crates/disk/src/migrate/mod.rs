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

mod away;
mod import;
mod intent;
mod mirror;
mod native_layer;
mod pace;
mod recover;
mod run;
mod tree;
mod work;

#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;

pub use import::{ImportOptions, ImportWay};
pub(crate) use import::{Imports, Overlay};
pub use mirror::{Base, Copied, MirrorDevice};
pub use native_layer::NativeLayer;
pub(crate) use recover::recover;
pub use run::MigrateOptions;
pub(crate) use tree::{Node, Original, Replica};
