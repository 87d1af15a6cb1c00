//! VMware's list of a machine's snapshots: `NAME.vmsd`.
//!
//! ```text
//! .encoding = "UTF-8"
//! snapshot.lastUID = "2"                      the last UID given
//! snapshot.current = "2"                      the snapshot from which the machine continues
//! snapshot0.uid = "1"
//! snapshot0.filename = "vm-Snapshot1.vmsn"    the machine's state, not a disk
//! snapshot0.displayName = "before the update"
//! snapshot0.createTimeHigh = "388745"         microseconds since 1970, in two halves,
//! snapshot0.createTimeLow = "1991180826"      the lower one signed
//! snapshot0.numDisks = "1"
//! snapshot0.disk0.fileName = "vm.vmdk"        the image with the disk's state
//! snapshot0.disk0.node = "scsi0:0"
//! snapshot.numSnapshots = "2"                 comes after the first snapshot
//! snapshot1.uid = "2"
//! snapshot1.parent = "1"
//! ...
//! ```
//!
//! 1. [`Vmsd::parse`] returns a list or an error for any bytes, in linear time, with memory within the limits below.
//!    Unknown keys are skipped.
//! 2. File names in a list are not trusted: the files are opened through [`layer::image::Folder`], which checks the
//!    names.
//! 3. The result of [`Vmsd::to_bytes`] parses to the same list.

mod parse;
#[cfg(test)]
mod tests;
mod write;

/// The longest list, in bytes. A snapshot needs some 400 bytes.
pub const TEXT_MAX: usize = 4 << 20;
/// The longest line of a list, in bytes.
pub const LINE_MAX: usize = 16 << 10;
/// The most snapshots of a list; VMware allows 496 in a tree.
pub const SNAPSHOTS_MAX: usize = 2048;
/// The most disks of a machine.
pub const DISKS_MAX: usize = 512;

/// A disk of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmsdDisk {
    /// The descriptor of the image with the disk's state, as a name or a path.
    pub file: String,
    /// The device of the disk in the machine, such as `scsi0:0`.
    pub node: String,
}

/// A snapshot of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmsdSnapshot {
    /// The snapshot's UID, unique in the list.
    pub uid: u32,
    /// The UID of the snapshot on which this one is based; `None` for the first one.
    pub parent: Option<u32>,
    /// The file with the machine's state.
    pub state: String,
    /// The name given by the user; not unique.
    pub name: String,
    /// The description given by the user.
    pub description: String,
    /// When the snapshot was taken: microseconds since 1970.
    pub created: u64,
    /// The snapshot's disks.
    pub disks: Vec<VmsdDisk>,
}

/// A list of snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vmsd {
    /// The last UID given.
    pub last_uid: u32,
    /// The snapshot from which the machine continues.
    pub current: Option<u32>,
    /// Whether there are images that no snapshot needs and that were not merged yet.
    pub need_consolidate: bool,
    /// The snapshots in the order of the list.
    pub snapshots: Vec<VmsdSnapshot>,
}
