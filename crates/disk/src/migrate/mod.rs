//! Moving a disk to another format, provisioning type or datastore while it is in use.
//!
//! ```text
//! work      which pieces of the disk are still to be looked at: a bit for each
//! pace      bytes per second, and stopping on request
//! mirror    the device between a disk's clients and its two copies, and the copier that makes the second one
//! native_layer  a native disk as the top layer of a chain: what a guest runs on while its image is brought in
//! ```

mod intent;
mod mirror;
mod native_layer;
mod pace;
mod tree;
mod work;

#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;

pub use mirror::{Base, Copied, MirrorDevice};
pub use native_layer::NativeLayer;
pub use pace::Pace;
pub(crate) use tree::{Node, Original, Replica};
