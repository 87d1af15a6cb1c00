//! Disks over the native store, and over chains of foreign images: what a guest, a backup tool or a person sees.

#![forbid(unsafe_code)]

mod chained;
mod clones;
pub mod datastore;
pub mod device;
mod disks;
pub mod info;
pub mod migrate;
mod names;
mod native;
pub mod progress;
mod snapshots;

pub use chained::ChainedDevice;
pub use datastore::{Datastore, InitOptions, OpenOptions, QueueChoice};
pub use device::{Allocation, Device, DirtyExtent, ReadPlan, Segment, StatusExtent, Verdict};
pub use info::*;
pub use progress::{NoProgress, Progress};
pub use store::{Error, ErrorKind, Result};
