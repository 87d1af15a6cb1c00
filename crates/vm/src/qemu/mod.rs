//! QEMU as it is found on this machine: what it can do, how it is started, and the process it becomes.
//!
//! ```text
//! features   what this QEMU and this machine offer, by asking, never by version
//! command    the arguments of one machine, every device at its fixed address
//! process    a running QEMU: started so that it outlives us, found again by its pid and start time
//! ```

pub mod command;
pub mod features;
pub mod process;
