//! VMware's list of a machine's snapshots: `NAME.vmsd`.
//!
//! ```text
//! .encoding = "UTF-8"
//! snapshot.lastUID = "2"                      the last number given
//! snapshot.current = "2"                      what the machine stands on
//! snapshot0.uid = "1"
//! snapshot0.filename = "vm-Snapshot1.vmsn"    the machine's state, which is no disk
//! snapshot0.displayName = "before the update"
//! snapshot0.createTimeHigh = "388745"         microseconds since 1970, in two halves,
//! snapshot0.createTimeLow = "1991180826"      the lower one with a sign
//! snapshot0.numDisks = "1"
//! snapshot0.disk0.fileName = "vm.vmdk"        the image that holds the disk's state
//! snapshot0.disk0.node = "scsi0:0"
//! snapshot.numSnapshots = "2"                 stands behind the first snapshot
//! snapshot1.uid = "2"
//! snapshot1.parent = "1"
//! ...
//! ```
//!
//! 1. [`Vmsd::parse`] is total: any bytes give a list or an error, in time linear in their number, with memory within
//!    the limits below. Unknown keys are skipped.
//! 2. A list proves nothing about files: those that it names are opened through [`layer::image::Folder`], which checks
//!    them.
//! 3. The result of [`Vmsd::to_bytes`] parses to the same list.

mod parse;
#[cfg(test)]
mod tests;
mod write;

/// Longest list, in bytes. A snapshot takes some 400.
pub const TEXT_MAX: usize = 4 << 20;
/// Longest line.
pub const LINE_MAX: usize = 16 << 10;
/// Most snapshots of a list; VMware allows 496 in a tree.
pub const SNAPSHOTS_MAX: usize = 2048;
/// Most disks of a machine.
pub const DISKS_MAX: usize = 512;

/// A disk of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmsdDisk {
    /// The descriptor of the image with its state: a name, or a path.
    pub file: String,
    /// The device: `scsi0:0`.
    pub node: String,
}

/// A snapshot of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmsdSnapshot {
    /// Its number, unique in the list.
    pub uid: u32,
    /// The number of the one before it.
    pub parent: Option<u32>,
    /// The file with the machine's state.
    pub state: String,
    /// The name given by the user; not unique.
    pub name: String,
    /// The description given by the user.
    pub description: String,
    /// When it was taken: microseconds since 1970.
    pub created: u64,
    /// Its disks.
    pub disks: Vec<VmsdDisk>,
}

/// The list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vmsd {
    /// The last number given.
    pub last_uid: u32,
    /// The snapshot on which the machine is based.
    pub current: Option<u32>,
    /// Whether images are left that no snapshot needs and that were not merged yet.
    pub need_consolidate: bool,
    /// The snapshots in the order of the list.
    pub snapshots: Vec<VmsdSnapshot>,
}
