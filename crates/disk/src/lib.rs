//! Disks over the native store: what a guest, a backup tool or a person sees of a datastore.

pub mod datastore;
pub mod device;
pub mod info;
pub mod progress;

pub use datastore::{Datastore, InitOptions, OpenOptions, QueueChoice};
pub use device::{Allocation, Device, ReadPlan, Segment, StatusExtent};
pub use info::*;
pub use progress::{NoProgress, Progress};
pub use store::{Error, ErrorKind, Result};
