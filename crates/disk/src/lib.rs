//! Disks over the native store: what a guest, a backup tool or a person sees of a datastore.

#![forbid(unsafe_code)]

mod clones;
pub mod datastore;
pub mod device;
mod disks;
pub mod info;
mod names;
mod native;
pub mod progress;
mod snapshots;

pub use datastore::{Datastore, InitOptions, OpenOptions, QueueChoice};
pub use device::{Allocation, Device, DirtyExtent, ReadPlan, Segment, StatusExtent, Verdict};
pub use info::*;
pub use progress::{NoProgress, Progress};
pub use store::{Error, ErrorKind, Result};
