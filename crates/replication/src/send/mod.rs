//! The sender.
//!
//! ```text
//!   connect -> hello -> offer -> plan ->+-> stream 1: segments -+-> finish -> committed
//!      ^                                +-> stream 2: segments -+
//!      |                                +-> ping ... -----------+
//!      +---- pause <---- a connection breaks
//! ```
//!
//! 1. A plan lists every segment with data, or with differences from the base. It covers everything that differs in
//!    content, but not the same segments at every attempt: deduplication changes which equal blocks are differences.
//! 2. A segment is sent completely over one connection. What is sent of it is decided when its turn comes; a segment
//!    without differences by then is left out.
//! 3. `finish` has the numbers of what the receiver had before and of what was sent, not those of the plan.
//! 4. After a broken connection the transfer is retried, up to a limit of consecutive failures; after a refusal by the
//!    receiver the transfer fails at once.

mod attempt;
mod plan;

use crate::limits::{ATTEMPTS_MAX, BACKOFF_MAX, BACKOFF_MIN, STREAMS_MAX};
use crate::remote::Remote;
use attempt::{Attempt, Failed};
use connections::ClientTls;
use disk::transfer::Outgoing;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use work::Progress;

/// A disk to send.
pub struct ShippedDisk {
    /// The snapshot that is sent.
    pub outgoing: Outgoing,
    /// The disk's name on the receiver.
    pub name: String,
    /// The disk's identity on the receiver.
    pub uuid: String,
}

/// Disks that are sent together.
pub struct Shipment {
    /// The disks.
    pub disks: Vec<ShippedDisk>,
    /// The attachment: the definition of a machine.
    pub attachment: Option<String>,
    /// Whether the sent snapshots are kept as snapshots on the receiver.
    pub keep: bool,
    /// Whether to send only the differences from a common snapshot, if there is one.
    pub incremental: bool,
    /// Whether disks that the receiver already has under these names are updated.
    pub update: bool,
    /// Whether only to resume: `NotFound` if the receiver has no data of an earlier transfer.
    pub resume_only: bool,
}

/// Options of a transfer.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// Number of data connections.
    pub streams: usize,
    /// Limit in bytes of data per second; 0 for none.
    pub rate: u64,
    /// The client's certificate, and the authorities that sign server certificates.
    pub tls: ClientTls,
}

/// The result of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// Names of the disks on the receiver.
    pub disks: Vec<String>,
    /// Sum of the capacities of the disks.
    pub capacity: u64,
    /// Bytes of data sent.
    pub data: u64,
    /// Bytes of data that earlier attempts had sent.
    pub resumed: u64,
    /// Bytes sent on the wire by all connections.
    pub wire: u64,
    /// Number of disks of which only differences from a common snapshot were sent.
    pub incremental: u64,
    /// Number of reconnections after broken connections.
    pub reconnects: u64,
    /// Number of data connections.
    pub streams: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Sends disks, and returns when they are complete.
pub fn send(shipment: &Shipment, remote: &Remote, options: &SendOptions, progress: &dyn Progress) -> Result<Sent> {
    if options.streams == 0 || options.streams > STREAMS_MAX {
        let text = format!("{} streams: 1 to {STREAMS_MAX} can be used", options.streams);
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let began = Instant::now();
    let mut sent = Sent { streams: options.streams as u64, ..Sent::default() };
    let mut attempt = Attempt::new(shipment, remote, options, progress)?;
    let (mut fruitless, mut pause) = (0, BACKOFF_MIN);
    let names = loop {
        let before = attempt.arrived();
        let (error, again) = match attempt.run(&mut sent) {
            Ok(names) => break names,
            Err(Failed::Refused(error)) => (error, false),
            Err(Failed::Broken(error)) => (error, true),
        };
        if attempt.arrived() > before {
            (fruitless, pause) = (0, BACKOFF_MIN);
        }
        fruitless += 1;
        if !again || fruitless >= ATTEMPTS_MAX {
            return Err(match again {
                false => error,
                true => error.context(format!(
                    "given up after {fruitless} attempts in a row; the received data is kept, and the same command \
                     resumes the transfer"
                )),
            });
        }
        tracing::warn!("{error}; the transfer is tried again in {} ms", pause.as_millis());
        sent.reconnects += 1;
        wait(pause, progress)?;
        pause = (pause * 2).min(BACKOFF_MAX);
    };
    sent.disks = names;
    sent.capacity = shipment.disks.iter().map(|disk| disk.outgoing.capacity()).sum();
    sent.seconds = began.elapsed().as_secs_f64();
    Ok(sent)
}

/// The error of a cancelled transfer.
fn stopped() -> Error {
    Error::new(
        ErrorKind::Interrupted,
        "stopped on request; the received data is kept, and the same command resumes the transfer",
    )
}

fn wait(pause: Duration, progress: &dyn Progress) -> Result<()> {
    const STEP: Duration = Duration::from_millis(50);
    let end = Instant::now() + pause;
    while Instant::now() < end {
        if progress.cancelled() {
            return Err(stopped());
        }
        std::thread::sleep(STEP);
    }
    Ok(())
}
