//! Migrating a disk to another format, provisioning type or datastore while it is in use.
//!
//! ```text
//! away          migrating to another datastore
//! run           one migration, from start to the removal of the source
//! import        existing images: copied, used in place, or used while they are copied
//! live_source   content outside the datastore, as a layer below an overlay
//! arrive        disks that are used while their content arrives from a source
//! handover      the device of such a disk while its requests pass from the chain to the native disk
//! background    the threads of live imports and arrivals
//! intent        the record that says which of the two copies is the current disk
//! recover       completing or undoing interrupted migrations when the datastore is opened
//! tree          copying the snapshots, parents before children
//! mirror        the device that mirrors a disk to its copy, and the copier that fills the copy
//! work          which parts of the disk are still to be copied: a bitmap
//! pace          limiting the bytes per second, and stopping on request
//! native_layer  a native disk as the top layer of a chain: the overlay of a live import
//! ```
//!
//! A disk whose content arrives from a source is not copied: its overlay becomes the disk.
//!
//! 1. **There is one disk.** A single record, replaced atomically, says which of the two copies is the current disk.
//!    Marks, names and folders are then set to match the record, and are set again after a crash.
//! 2. **The migration is transparent to clients.** No request waits for more than one step of the copier, no request
//!    fails because the target fails before the commit, and writes that were durable before the commit are durable in
//!    both copies.
//! 3. **A migration completes or has no effect.** Each byte is copied once, whatever is written during the copy. Until
//!    the commit, a failure or a cancellation leaves the disk as it was.
//! 4. The migration accesses disks only as devices ([`crate::Device`]) and as snapshot trees (`tree::Original`,
//!    `tree::Replica`), which `native/moving.rs` and `foreign/moving.rs` implement.
//!
//! Order of locks: the use of the disk's name, `rename_lock` (of this datastore, then of the other one), the locks of
//! the native disks and of the disks in VMware's formats, the switches; within the mirror a range, then its state.

mod arrive;
mod away;
mod background;
mod handover;
mod import;
mod intent;
mod live_source;
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

pub use arrive::NewArrivingDisk;
pub(crate) use background::Imports;
pub use background::{Attempt, AttemptRunner};
pub(crate) use import::Overlay;
pub use import::{ImportMode, ImportOptions};
pub(crate) use intent::is_folder_recorded;
pub(crate) use live_source::SourceLayer;
pub use live_source::{DataRun, LiveSource, LiveSourceKind, LiveSourceRecord, register_live_source};
pub use mirror::{Base, Copied, MirrorDevice};
pub use native_layer::NativeLayer;
pub(crate) use recover::{problems, recover, recover_settings};
pub use run::MigrateOptions;
pub(crate) use tree::{Node, Original, Replica};
