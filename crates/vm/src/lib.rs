//! Virtual machines: QEMU processes on disks of a datastore, and their clones.
//!
//! ```text
//! disks        what machines need of a datastore
//! definition   what a machine is: machine.toml
//! identity     UUIDs and network addresses
//! qmp          the protocol to QEMU and to the guest agent
//! agent        the agent inside the guest
//! qemu         the QEMU found here: features, command lines, processes
//! machine      one machine: its folder, its process
//! machines     all of them: made whole or not at all
//! lifecycle    starting and stopping
//! busy         retries of operations that are `Busy` for a moment
//! durable      files that are replaced whole or not at all
//! quiet        the disks of a machine at one point, its guest frozen around it
//! snapshots    a machine's snapshots
//! instant      memory images, and machines that go on from them
//! personality  what gives a copy of a running guest an identity of its own
//! clone        clones of every kind, one or many
//! resize       a disk that gets larger while its machine runs
//! fleet        many at once
//! host         what commands work with: all of this, locks, recovery
//! ```
//!
//! What holds:
//!
//! 1. A machine's process is its own: it goes on when we end or are killed, and is found again.
//! 2. A guest is started only by a command of its user: there is no automatic restart.
//! 3. Features of QEMU are asked for, not concluded from versions.

#![forbid(unsafe_code)]

pub mod agent;
mod busy;
pub mod clone;
pub mod definition;
pub mod disks;
mod durable;
pub mod fleet;
pub mod host;
pub mod identity;
pub mod instant;
pub mod lifecycle;
pub mod machine;
pub mod machines;
pub mod personality;
pub mod qemu;
pub mod qmp;
pub mod quiet;
pub mod resize;
pub mod snapshots;
