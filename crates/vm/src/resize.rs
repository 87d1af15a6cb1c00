//! Growing a disk while its machine runs.
//!
//! QEMU asks an NBD server for the size of an export when it connects, and refuses to grow a disk beyond that size. So
//! the datastore's server grows the disk and ends the machine's connection to it; QEMU connects again with the next
//! request (by its `reconnect-delay`) and learns the size; then `block_resize` tells the guest.
//!
//! 1. The monitor is connected before the disk grows: without it the resize is not begun.
//! 2. Each step may be repeated, so repeating an interrupted resize completes it.

use crate::machine::Change;
use crate::qmp::Client;
use error::{Error, ErrorKind, Result};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to connect again and to learn the size.
const PATIENCE: Duration = Duration::from_secs(30);
/// Number of attempts.
const INTERVAL: Duration = Duration::from_millis(50);

/// A machine that is about to be told that one of its disks has grown.
pub struct Telling {
    machine: String,
    disk: String,
    node: String,
    pid: i32,
    monitor: Client,
}

impl Telling {
    /// Begins, if the machine runs and has that disk.
    pub fn begin(change: &Change, disk: &str) -> Result<Option<Self>> {
        let machine = change.machine();
        let Some(process) = machine.process()? else { return Ok(None) };
        let Some(index) = machine.definition()?.disks.iter().position(|one| one.name == disk) else { return Ok(None) };
        Ok(Some(Self {
            machine: machine.name(),
            disk: disk.to_owned(),
            // The name in its command line.
            node: format!("disk{index}"),
            pid: process.pid(),
            monitor: machine.monitor()?,
        }))
    }

    /// The process whose connection to the disk has to be ended before [`Telling::finish`].
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Makes QEMU connect again, and tells the guest. The disk has `capacity` bytes already.
    pub fn finish(mut self, capacity: u64) -> Result<()> {
        grow(&mut self.monitor, &self.node, capacity, PATIENCE).map_err(|error| {
            error.context(format_args!(
                "disk '{}' has {capacity} bytes now, but the guest of machine '{}' does not see them yet; repeat the \
                 command",
                self.disk, self.machine
            ))
        })
    }
}

/// Makes a QEMU whose connection was ended learn the size of a block node, and resizes that.
pub fn grow(monitor: &mut Client, node: &str, capacity: u64, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        // A request makes QEMU notice that the connection has ended. QEMU prints errors of this request on its standard
        // output; the result of the next command is what counts.
        let read = format!("qemu-io {node} \"read -q 0 512\"");
        monitor.execute("human-monitor-command", json!({ "command-line": read }))?;
        match monitor.execute("block_resize", json!({ "node-name": node, "size": capacity })) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Invalid && Instant::now() < deadline => thread::sleep(INTERVAL),
            Err(error) => return Err(Error::new(error.kind(), error.to_string())),
        }
    }
}
