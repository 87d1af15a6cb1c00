//! The installed QEMU: its features, its command line, and its processes.
//!
//! ```text
//! features   what this QEMU and this machine offer, by asking, never by version
//! command    the arguments of one machine, every device at its fixed address
//! process    a running QEMU: started so that it outlives us, found again by its pid and start time
//! ```

pub mod command;
pub mod features;
pub mod process;
