//! Requests about sending to another server and receiving from one.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A disk to send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentDisk {
    /// The disk.
    pub disk: String,
    /// The disk's name on the other server.
    pub name: String,
}

/// The state of the disks that is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SendPoint {
    /// Existing snapshots, one of each disk.
    Snapshots(Vec<String>),
    /// The snapshot with this name that was taken of each disk for this transfer.
    Taken(String),
    /// The snapshot of an interrupted transfer; `NotFound` if no transfer was interrupted.
    Resume,
    /// The snapshot of an interrupted transfer if there is one, otherwise the current state of the disks.
    Now,
}

/// TLS configuration: PEM files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendTls {
    /// Authorities that sign servers.
    pub authorities: PathBuf,
    /// Certificate chain of this client.
    pub certificate: Option<PathBuf>,
    /// The private key of the certificate.
    pub key: Option<PathBuf>,
    /// The name in the server's certificate.
    pub server_name: Option<String>,
}

/// Disks, or a machine, to send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendRequest {
    /// The target: lamina://HOST:PORT/NAME.
    pub remote: String,
    /// The disks. On the receiver they become visible together.
    pub disks: Vec<SentDisk>,
    /// Which state of the disks is sent.
    pub point: SendPoint,
    /// The definition of the machine to which the disks belong on the other server.
    pub attachment: Option<String>,
    /// Options of the transfer.
    pub how: SendHow,
}

/// Options of a transfer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendHow {
    /// Send only the differences from a common snapshot, and keep the sent state as a snapshot.
    pub incremental: bool,
    /// Number of data connections.
    pub streams: u32,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
    /// TLS configuration.
    pub tls: SendTls,
}

/// Operations on receptions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ReceiveRequest {
    /// List all receptions.
    List,
    /// Delete a reception and its data.
    Delete {
        /// The reception's identity.
        id: String,
    },
}
