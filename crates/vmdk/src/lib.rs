//! Disks in VMware's formats: a folder with images, a record of how these depend on each other, and all operations on
//! them. The operations run while the disk is in use, and are safe against power cuts.
//!
//! ```text
//! record     images and their parents, snapshots, tunables, the pending operation; one file, one commit
//! stored     the file with the record
//! spare      space reserved for a record that has to be written later
//! vmsd       VMware's list of snapshots: read when images are adopted, written beside the record
//! disk       opening, creating and removing; the head's chain
//! figures    statistics for users, and tunables
//! adopt      images made by another program become a disk, with the whole tree of their snapshots
//! line       an image and those below it down to the base, open as one chain
//! images     making, naming, editing and removing the files of one image
//! snapshot   naming the state of the head, for one disk or for several at one point in time
//! medium     after an unclean end, files are flushed and evicted from the page cache before they are read
//! reopen     opening a disk again after an I/O failure, in the same process
//! owner      the locks of the process that has the disk open
//! revert     returning the head to the state of a snapshot
//! merged     what merges and removed snapshot names do to the images and snapshots of a record
//! merge      removing snapshots and levels: an image is merged into its neighbour while the disk is in use
//! preview    what a deletion would free, without deleting
//! remains    what is left of a disk that cannot be opened, for reading
//! clones     linked clones: disks that begin with the content of another disk's snapshot
//! maintain   inflate, punch zeros, wipe, shrink, check: on images in use
//! settle     finishing committed operations, and undoing operations that were not committed
//! ```
//!
//! [docs/format/vmdk-disk.md](../../../docs/format/vmdk-disk.md) describes the record's fields. Invariants:
//!
//! 1. **The record decides.** Its replacement is the only commit point of every operation. Files are complete and
//!    durable before the record names them, and are removed only after a record without them is durable.
//! 2. **No file leaks.** Before the first file is made or changed, the record announces it (`pending`). Opening the
//!    disk finishes a committed operation, and undoes one that was not committed.
//! 3. **Foreign images are not changed** unless they were adopted for writing.
//! 4. **A child's recorded parent CID matches its parent.** When the content of an image changes, its CID changes too,
//!    and the parent CID in every child that remains above the new content is corrected (`settle`). A crash may
//!    interrupt these steps, so the disk's record announces them first.
//! 5. **Images that other readers use do not change**: images below a linked clone, or in an open snapshot, are neither
//!    merged nor shrunk.
//!
//! Locks, in the order in which they are taken: `operation` (one change of the tree at a time; a second one fails with
//! `Busy`), `head` (while the chain is opened), then those of the chain. `state` and the levels of a line come last and
//! are never held during I/O.

#![forbid(unsafe_code)]

mod adopt;
mod clones;
mod create;
mod disk;
mod figures;
mod images;
mod line;
mod maintain;
mod medium;
mod merge;
mod merged;
mod owner;
mod preview;
mod record;
mod remains;
mod reopen;
mod revert;
mod settle;
mod snapshot;
mod spare;
mod stored;
#[cfg(test)]
mod tests;
pub mod vmsd;

pub use adopt::Adopt;
pub use clones::{CloneReference, Origin};
pub use create::NewDisk;
pub use disk::{Disk, FolderFinder, Options};
pub use figures::{FileInfo, Info, Tuning};
pub use maintain::{Checked, Freed};
pub use merge::Direction;
pub use preview::Preview;
pub use record::{DeltaFormat, ImageOwnership, Node, Record, SnapshotRecord};
pub use remains::Remains;
pub use snapshot::{NewSnapshot, Snapshot, snapshot_group};

pub(crate) use error::{Error, ErrorKind, Result};
