//! What is sent to another server, and received from one.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A disk to send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentDisk {
    /// The disk.
    pub disk: String,
    /// Its name there.
    pub name: String,
}

/// Which state of the disks is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SendPoint {
    /// These snapshots, one of each disk.
    Snapshots(Vec<String>),
    /// The snapshot of this name, which was taken of each disk for this.
    Taken(String),
    /// The one that was being sent when an earlier command was broken off; `NotFound` when there is none.
    Resume,
    /// That one, or else what the disks are now.
    Now,
}

/// Certificates of both ends: PEM files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendTls {
    /// Authorities that sign servers.
    pub authorities: PathBuf,
    /// Certificate chain of this client.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// The name that the server's certificate is for.
    pub server_name: Option<String>,
}

/// Disks, or a machine, to send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendRequest {
    /// Where to: lamina://HOST:PORT/NAME.
    pub remote: String,
    /// The disks, which arrive together.
    pub disks: Vec<SentDisk>,
    /// Which state of them.
    pub point: SendPoint,
    /// The definition of the machine that they belong to there.
    pub attachment: Option<String>,
    /// How.
    pub how: SendHow,
}

/// How something is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendHow {
    /// Only what differs; and this state stays as a snapshot.
    pub incremental: bool,
    /// Data connections.
    pub streams: u32,
    /// Most bytes a second; 0 for as fast as it goes.
    pub rate: u64,
    /// Certificates of both ends.
    pub tls: SendTls,
}

/// Verbs of receptions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ReceiveRequest {
    /// All of them.
    List,
    /// Give one up.
    Delete {
        /// Its identity.
        id: String,
    },
}
