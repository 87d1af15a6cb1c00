//! The sending side.
//!
//! ```text
//!   connect -> hello -> offer -> plan ->+-> stream 1: segments -+-> finish -> committed
//!      ^                                +-> stream 2: segments -+
//!      |                                +-> ping ... -----------+
//!      +---- pause <---- a connection breaks
//! ```
//!
//! 1. A plan names every segment with data: the segments and their bytes follow from the disk's point and the base
//!    alone, so the plan is the same at every attempt.
//! 2. Each segment is sent over one connection, as a whole.
//! 3. A broken connection is made again, a limited number of times in a row; what the receiver refuses is not offered
//!    again.

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
    /// Its point.
    pub outgoing: Outgoing,
    /// The name there.
    pub name: String,
    /// The identity there.
    pub uuid: String,
}

/// Disks that are sent together.
pub struct Shipment {
    /// The disks.
    pub disks: Vec<ShippedDisk>,
    /// The attachment: the definition of a machine.
    pub attachment: Option<String>,
    /// Whether the points stay as snapshots there.
    pub keep: bool,
    /// Whether only differences from a common snapshot are sent, if there is one.
    pub incremental: bool,
    /// Whether an existing disk of that name is brought up to date.
    pub update: bool,
    /// Whether the receiver must have the beginning of an earlier transfer; `NotFound` otherwise.
    pub resume_only: bool,
}

/// Options of a transfer.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// Data connections.
    pub streams: usize,
    /// Most bytes of data a second; 0 for no limit.
    pub rate: u64,
    /// The client's certificate, and the authorities that sign servers.
    pub tls: ClientTls,
}

/// The result of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// Names of the disks, there.
    pub disks: Vec<String>,
    /// Sum of their capacities.
    pub capacity: u64,
    /// Bytes of data sent.
    pub data: u64,
    /// Bytes of data that an earlier attempt had sent.
    pub resumed: u64,
    /// Bytes on the wire, all connections together.
    pub wire: u64,
    /// Disks of which only the difference from a common snapshot was sent.
    pub incremental: u64,
    /// Connections broken and made again.
    pub reconnects: u64,
    /// Data connections.
    pub streams: u64,
    /// How long it took.
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
                    "given up after {fruitless} attempts in a row; what has arrived is kept, the same command goes on \
                     from there"
                )),
            });
        }
        tracing::warn!("{error}; trying again in {} ms", pause.as_millis());
        sent.reconnects += 1;
        wait(pause, progress)?;
        pause = (pause * 2).min(BACKOFF_MAX);
    };
    sent.disks = names;
    sent.capacity = shipment.disks.iter().map(|disk| disk.outgoing.capacity()).sum();
    sent.seconds = began.elapsed().as_secs_f64();
    Ok(sent)
}

/// The error of a sender that was stopped.
fn stopped() -> Error {
    Error::new(
        ErrorKind::Interrupted,
        "stopped on request; what has arrived is kept, the same command goes on from there",
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
