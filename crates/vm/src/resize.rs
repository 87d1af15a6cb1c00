//! Growing a disk while its machine runs.
//!
//! QEMU queries the size of an export when it connects to an NBD server, and refuses to grow a disk beyond that size.
//! So the datastore's server grows the disk and ends the machine's connection. QEMU reconnects at the next request
//! (because of its option `reconnect-delay`) and queries the new size. Then QEMU's command `block_resize` notifies the
//! guest.
//!
//! 1. The connection to QEMU's monitor is opened before the disk grows, so that a machine that cannot be notified keeps
//!    the old size.
//! 2. Each step can be repeated, so repeating an interrupted resize completes it.

use crate::machine::Change;
use crate::plug;
use crate::qemu::drives::disk_node;
use crate::qmp::Client;
use error::{Error, ErrorKind, Result};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// How long QEMU may take to reconnect and get the new size.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between attempts.
const INTERVAL: Duration = Duration::from_millis(50);

/// A running machine that has to be notified that a disk has grown.
pub struct Telling {
    machine: String,
    disk: String,
    node: String,
    pid: i32,
    monitor: Client,
}

impl Telling {
    /// Begins, if the machine runs and uses the disk.
    pub fn begin(change: &Change, disk: &str) -> Result<Option<Self>> {
        let machine = change.machine();
        let Some(process) = machine.process()? else { return Ok(None) };
        let definition = machine.definition()?;
        let Some(index) = definition.disks.iter().position(|one| one.name == disk) else { return Ok(None) };
        let mut monitor = machine.monitor()?;
        let mut node = disk_node(&definition.disks[index]);
        if !plug::has_node(&mut monitor, &node)? {
            // Version 0.1.0 started the process, and named the node after the index of the disk.
            node = format!("disk{index}");
        }
        Ok(Some(Self { machine: machine.name(), disk: disk.to_owned(), node, pid: process.pid(), monitor }))
    }

    /// The process whose connection to the disk has to be ended before [`Telling::finish`].
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Makes QEMU reconnect, and notifies the guest. The disk already has `capacity` bytes.
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

/// Makes a QEMU process, whose connection to the disk was ended, query the new size of a block node, and resizes the
/// node.
pub fn grow(monitor: &mut Client, node: &str, capacity: u64, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        // A read makes QEMU detect that the connection has ended. QEMU prints errors of this read on its standard
        // output; only the result of the next command matters.
        let read = format!("qemu-io {node} \"read -q 0 512\"");
        monitor.execute("human-monitor-command", json!({ "command-line": read }))?;
        match monitor.execute("block_resize", json!({ "node-name": node, "size": capacity })) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::Invalid && Instant::now() < deadline => thread::sleep(INTERVAL),
            Err(error) => return Err(Error::new(error.kind(), error.to_string())),
        }
    }
}
