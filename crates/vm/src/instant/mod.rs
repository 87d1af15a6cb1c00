//! Instant clones: children that share disks and memory of a parent copy-on-write and begin in the middle of its life.
//!
//! ```text
//! image    what children start from: memory, device state and disk snapshots of one moment, never changed again
//! pages    what a child has changed in the memory it was given
//! state    device state out of a QEMU and into another
//! freeze   a parent stops and leaves an image
//! running  an image of a parent that goes on
//! child    a machine from an image
//! ```
//!
//! Memory that lies in a file is left out of a saved state, so the state has some hundred kilobytes. A QEMU that maps
//! the file and loads the state goes on where the other stopped. A child maps it copy-on-write. What holds:
//!
//! 1. An image is immutable: no process writes its memory file once its record is there, its disks are snapshots. It
//!    goes when no machine refers to it ([`image::Images::sweep`]); references are found, not counted, so that a kill
//!    between a change and its count cannot make a count wrong.
//! 2. Memory, device state and disks are of one moment: the guest stands still from before the first is taken until
//!    the last is.
//! 3. A child has the parent's devices at the parent's addresses; everything else about it is its own.

pub mod child;
pub mod freeze;
pub mod image;
pub mod pages;
pub mod running;
pub mod state;
