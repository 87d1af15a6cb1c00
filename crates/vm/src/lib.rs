//! Virtual machines: QEMU processes on disks of a datastore, and their clones.
//!
//! ```text
//! disks        the interface to the datastore
//! definition   the definition of a machine: machine.toml
//! identity     UUIDs and MAC addresses
//! qmp          the protocol of QEMU's monitor and of the guest agent
//! agent        the guest agent
//! qemu         the installed QEMU: features, command lines, processes; builds of UEFI
//! nvram        the variables of a machine's UEFI
//! machine      one machine: its folder, its process
//! held         the record that a command has paused a guest
//! machines     all machines: created completely or not at all
//! lifecycle    starting and stopping
//! busy         waiting until disks, devices and drives are released
//! durable      atomic replacement of files
//! quiet        snapshots of a machine's disks at one point, with the guest's file systems frozen
//! screen       the screen and keyboard of a running machine
//! seed         the disk for cloud-init in the guest
//! snapshots    a machine's snapshots
//! instant      memory images, and machines that continue from them
//! personality  giving a copy of a running guest its own identity
//! clone        clones of every kind
//! import       machines of other programs
//! backup       the files of a machine for a backup, and machines that are restored
//! resize       growing a disk while its machine runs
//! edit         changing a machine, also its name
//! media        images in CD-ROM drives
//! plug         adding devices to a running machine, and removing them
//! user         the users as which QEMU runs
//! fleet        operations on many machines
//! host         the environment of commands, locks, recovery
//! ```
//!
//! Invariants:
//!
//! 1. A machine's QEMU process is independent: it continues when the command that started it ends or is killed, and
//!    later commands find it by its pid file.
//! 2. A guest is started only by a command of the user: there is no automatic restart.
//! 3. Features of QEMU are queried, not derived from its version.

#![forbid(unsafe_code)]

pub mod agent;
pub mod backup;
mod busy;
pub mod clone;
pub mod definition;
pub mod disks;
mod durable;
pub mod edit;
pub mod fleet;
mod held;
pub mod host;
pub mod identity;
pub mod import;
pub mod instant;
pub mod lifecycle;
pub mod machine;
pub mod machines;
pub mod media;
pub mod nvram;
pub mod personality;
mod plug;
pub mod qemu;
pub mod qmp;
pub mod quiet;
pub mod resize;
pub mod screen;
mod seed;
pub mod snapshots;
pub mod user;
