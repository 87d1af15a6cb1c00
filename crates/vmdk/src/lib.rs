//! Disks in VMware's formats as their owner sees them: a folder with images, a record of what they are to each other,
//! and every operation on them, live and safe against power cuts.
//!
//! ```text
//! record     what a disk is: images and their parents, snapshots, tunables, what is under way; one file, one commit
//! stored     the file that holds it
//! spare      room for a record that has to be written later
//! vmsd       VMware's list of snapshots: read when a folder is adopted, written beside the record
//! disk       opening, creating and removing; the head's chain
//! figures    what people see of a disk, and the tunables that they turn
//! adopt      a folder of another maker becomes a disk: its chain, and the whole tree of its snapshots
//! line       images from one of them down to the base, open as one chain
//! images     making, naming, editing and removing the files of one image
//! snapshot   the state of the head gets a name, of one disk or of several at one point
//! medium     reads show what the media hold: after an unclean end, files are flushed and forgotten by the cache
//! reopen     a disk whose medium failed goes on without a new process
//! owner      the locks of the process that has it open
//! revert     the head becomes a snapshot's state again
//! merge      snapshots and levels go: one image is merged into its neighbour while the disk is in use
//! clones     disks that begin as a snapshot of another
//! maintain   inflate, give back, wipe, shrink, check: on images in use
//! settle     what an operation that was committed still has to do, and what one that was not has left
//! ```
//!
//! [docs/format/vmdk-disk.md](../../../docs/format/vmdk-disk.md) has the record's fields. What must hold:
//!
//! 1. **The record decides.** Its replacement is the one commit point of every operation. What it names is complete and
//!    durable before it is named; what it no longer names is removed afterwards.
//! 2. **Nothing leaks.** Before the first file is made or changed, the record says so (`pending`); opening the disk
//!    finishes what was committed and takes back what was not.
//! 3. **Foreign images are not changed** unless they were adopted for writing.
//! 4. **Parents are those the children were made above.** Whenever an image's content changes, its CID does, and every
//!    child that is meant to stand on the new content is told (`settle`). Where a crash can come between, the record
//!    announces the step first.
//! 5. **What is read elsewhere does not change**: images below a linked clone, or in a snapshot that is open, are
//!    neither merged nor shrunk.
//!
//! Locks, in the order in which they are taken: `operation` (one change of the tree at a time; a second one fails with
//! `Busy`), `head` (while the chain is being opened), then those of the chain; `state` and a line's levels are
//! leaves and are never held during I/O.

#![forbid(unsafe_code)]

mod adopt;
mod clones;
mod disk;
mod figures;
mod images;
mod line;
mod maintain;
mod medium;
mod merge;
mod owner;
mod record;
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
pub use disk::{Disk, FolderFinder, NewDisk, Options};
pub use figures::{FileInfo, Info, Tuning};
pub use maintain::{Checked, Freed};
pub use merge::Direction;
pub use record::{DeltaFormat, ImageOwnership, Node, Record, SnapshotRecord};
pub use snapshot::{NewSnapshot, Snapshot, snapshot_group};

pub(crate) use error::{Error, ErrorKind, Result};
