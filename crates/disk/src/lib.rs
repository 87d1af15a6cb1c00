//! Disks, snapshots and clones, as clients and users see them. They are stored in the native store or in chains of
//! VMware images.

#![forbid(unsafe_code)]

// `testbed.rs` names the crate as the tests in `tests` do.
#[cfg(test)]
extern crate self as disk;

mod compression;
pub mod convert;
pub mod datastore;
mod deduplication;
pub mod device;
pub mod file_system;
mod foreign;
pub mod full;
mod growth;
pub mod images;
pub mod info;
pub mod location;
pub mod migrate;
mod names;
mod native;
pub mod pace;
mod privacy;
mod quota;
mod reclaim;
mod reduce_at;
pub mod salvage;
mod scrub;
pub mod sealed;
mod settings;
mod snapshot_group;
mod space;
mod spare;
mod stride;
pub mod switch;
#[cfg(test)]
mod testbed;
pub mod transfer;
mod zeros;

pub use compression::Compression;
pub use datastore::{Datastore, InitOptions, OpenOptions, QueueChoice};
pub use deduplication::{DEDUP_MEMORY_DEFAULT, DEDUP_MEMORY_MIN, Deduplication};
pub use device::{
    Allocation, BaseIdentity, Device, DirtyExtent, FlushTicket, ReadPlan, Segment, StatusExtent, Verdict,
};
pub(crate) use error::{Error, ErrorKind, Result};
pub use file_system::FileSystemInfo;
pub use foreign::ChainedDevice;
pub use full::OnFull;
pub use growth::{Growth, GrowthRate};
pub use info::*;
pub use location::Location;
pub use native::{IdleDisk, IdleDomain, IdlePass};
pub use quota::{LimitInfo, Limits};
pub use reclaim::{ReclaimMethod, ReclaimPart, ReclaimReport};
pub use reduce_at::ReduceAt;
pub use scrub::{
    DamageReference, ScrubDamage, ScrubOptions, ScrubReport, ScrubResult, ScrubState, ScrubSummary, ScrubTouched,
};
pub use settings::{
    DefaultsChange, DiskDefaults, DiskSettings, Labels, LimitsChange, SettingsChange, has_label, parse_label,
};
pub use space::{
    CompressedSpace, DatastoreSpace, Deletion, DiskSpace, Ratio, Reduction, SnapshotSpace, SpaceUse, TotalSpace,
    WouldFree,
};
pub use switch::{Switch, SwitchedDevice};
pub use work::{NoProgress, Progress, RATE_MIN, Throttled};
pub use zeros::DetectZeroes;
