//! Instant clones: they share disks and memory of a running parent copy-on-write, and continue from its current state.
//!
//! ```text
//! image    memory images: memory, device state and disk snapshots of one point in time, immutable
//! pages    pages that a process has changed in a copy-on-write mapping
//! state    saving and loading device state
//! freeze   a parent that stops and leaves an image
//! running  an image of a parent that continues to run
//! child    a machine created from an image
//! ```
//!
//! If the guest's memory is a shared file, QEMU can leave the memory out of a saved state, which then has only some
//! hundred kilobytes. Another QEMU process that maps the file and loads the state continues where the first one
//! stopped. The process of a child maps the file copy-on-write. Invariants:
//!
//! 1. An image is immutable: no process writes its memory file after its record exists, and its disks are snapshots. An
//!    image is removed when no machine refers to it ([`image::Images::sweep`]). References are searched for instead of
//!    counted, because a kill between a change and the update of a count would make the count wrong.
//! 2. Memory, device state and disk snapshots are of one point in time: the guest is paused before the first of them is
//!    taken, and resumed after the last.
//! 3. A child has the parent's devices at the same addresses; its name, UUID and MAC addresses are its own.

pub mod child;
pub mod freeze;
pub mod image;
pub mod pages;
pub mod running;
pub mod state;
