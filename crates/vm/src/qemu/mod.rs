//! The installed QEMU: its features, its command line, and its processes.
//!
//! ```text
//! features   features of this QEMU and this host, which are queried
//! command    the command line of a machine, with fixed device addresses
//! drives     its part for disks and controllers
//! boot       its part for CD-ROM drives, and the order in which the firmware tries the devices
//! network    what network cards are connected to, and what the host needs for it
//! passt      user networks by a process of their own
//! firmware   builds of UEFI on this host
//! process    a running QEMU, which outlives the command that started it and is found by its pid file
//! ```

pub mod boot;
pub mod command;
pub mod drives;
pub mod features;
pub mod firmware;
pub mod network;
pub mod passt;
pub mod process;
