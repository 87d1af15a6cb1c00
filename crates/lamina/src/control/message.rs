//! The messages of the control protocol and their encoding as lines of JSON.
//!
//! A change that an older or newer peer could misread raises [`VERSION`]; the version is looked at before anything
//! else of a line, so that peers of different age tell each other so instead of guessing.

use disk::{ChangedExtent, CheckReport, DiskInfo, Error, ErrorKind, Point, Provisioning, SnapshotInfo, Status};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Version of the protocol.
pub const VERSION: u32 = 1;

/// The longest line a client may send: room for the names of a hundred thousand clones.
pub const REQUEST_LINE_MAX: usize = 16 << 20;

/// The longest line a server may send: room for a list of a hundred thousand disks.
pub const REPLY_LINE_MAX: usize = 128 << 20;

/// Everything that can be asked of an open datastore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Capacity, allocation, over-commitment.
    Status,
    /// Walk all metadata.
    Check {
        /// Verify data too.
        data: bool,
        /// Repair what can be repaired.
        repair: bool,
    },
    /// Make a disk.
    DiskCreate {
        /// Its name.
        name: String,
        /// Its capacity in bytes.
        capacity: u64,
        /// How it takes its space.
        provisioning: Provisioning,
    },
    /// All disks.
    DiskList,
    /// One disk, blocks counted.
    DiskShow {
        /// The disk.
        name: String,
    },
    /// Change the capacity of a disk.
    DiskResize {
        /// The disk.
        name: String,
        /// New capacity in bytes.
        capacity: u64,
        /// Losing the end is meant.
        shrink: bool,
    },
    /// Rename a disk.
    DiskRename {
        /// The disk.
        name: String,
        /// Its new name.
        to: String,
    },
    /// Delete a disk.
    DiskDelete {
        /// The disk.
        name: String,
        /// Give the snapshots that clones stand on to the clones.
        promote: bool,
    },
    /// Make a linked clone independent.
    DiskDetach {
        /// The clone.
        name: String,
    },
    /// Take snapshots of several disks at one point.
    SnapshotCreate {
        /// Disk and snapshot name.
        of: Vec<(String, String)>,
    },
    /// Snapshots of one disk or all.
    SnapshotList {
        /// The disk.
        disk: Option<String>,
    },
    /// One snapshot.
    SnapshotShow {
        /// The disk.
        disk: String,
        /// The snapshot.
        name: String,
    },
    /// Delete a snapshot.
    SnapshotDelete {
        /// The disk.
        disk: String,
        /// The snapshot.
        name: String,
    },
    /// Make the head equal to a snapshot.
    SnapshotRevert {
        /// The disk.
        disk: String,
        /// The snapshot.
        name: String,
    },
    /// What changed between two states.
    SnapshotDiff {
        /// The disk.
        disk: String,
        /// Earlier state.
        from: Point,
        /// Later state.
        to: Point,
    },
    /// Make clones: all or none.
    Clone {
        /// The disk to clone.
        disk: String,
        /// The state of it to start from.
        at: Point,
        /// Names of the clones.
        names: Vec<String>,
        /// Independent copies instead of linked ones.
        full: bool,
    },
    /// What NBD clients can open.
    ExportList,
}

impl Request {
    /// True for what may take longer than a moment: it can be cancelled, and tells how far it is.
    pub fn takes_long(&self) -> bool {
        match self {
            Self::Status
            | Self::DiskList
            | Self::DiskRename { .. }
            | Self::SnapshotCreate { .. }
            | Self::SnapshotList { .. }
            | Self::SnapshotShow { .. }
            | Self::SnapshotDelete { .. }
            | Self::Clone { full: false, .. }
            | Self::ExportList => false,
            Self::Check { .. }
            | Self::DiskCreate { .. }
            | Self::DiskShow { .. }
            | Self::DiskResize { .. }
            | Self::DiskDelete { .. }
            | Self::DiskDetach { .. }
            | Self::SnapshotRevert { .. }
            | Self::SnapshotDiff { .. }
            | Self::Clone { full: true, .. } => true,
        }
    }
}

/// The good end of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Of `Status`.
    Status {
        /// The datastore.
        status: Status,
        /// How it is served, if it is.
        serving: Option<Serving>,
    },
    /// Of `Check`.
    Check(CheckReport),
    /// Of what makes or changes one disk, and of `DiskShow`.
    Disk(DiskInfo),
    /// Of `DiskList` and `Clone`.
    Disks(Vec<DiskInfo>),
    /// Of `SnapshotShow`.
    Snapshot(SnapshotInfo),
    /// Of `SnapshotCreate` and `SnapshotList`.
    Snapshots(Vec<SnapshotInfo>),
    /// Of what deletes: the name that is gone.
    Deleted(String),
    /// Of `SnapshotDiff`, after all extents.
    Diff {
        /// How many extents were sent.
        extents: u64,
        /// Sum of their lengths.
        bytes: u64,
    },
    /// Of `ExportList`.
    Exports(Vec<ExportInfo>),
}

/// What serves a datastore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Serving {
    /// Process id.
    pub pid: u32,
    /// Version of the program.
    pub version: String,
    /// Unix socket of the NBD server.
    pub socket: Option<PathBuf>,
    /// TCP address of the NBD server.
    pub tcp: Option<SocketAddr>,
    /// TCP is encrypted.
    pub tls: bool,
    /// Writes of NBD clients are refused.
    pub read_only: bool,
}

/// One thing that NBD clients can open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExportInfo {
    /// `disk` or `disk@snapshot`.
    pub name: String,
    /// Writes are refused.
    pub read_only: bool,
    /// Where it is served, one URI for each listener; empty while nobody serves.
    pub uris: Vec<String>,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressReport {
    /// Bytes or objects finished.
    pub done: u64,
    /// Of how many.
    pub total: u64,
}

/// An error on its way through the socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    kind: String,
    message: String,
}

/// The names of the kinds on the wire; each kind once.
const KINDS: [(ErrorKind, &str); 11] = [
    (ErrorKind::NotFound, "not_found"),
    (ErrorKind::Exists, "exists"),
    (ErrorKind::Invalid, "invalid"),
    (ErrorKind::Busy, "busy"),
    (ErrorKind::NoSpace, "no_space"),
    (ErrorKind::ReadOnly, "read_only"),
    (ErrorKind::Corrupt, "corrupt"),
    (ErrorKind::Io, "io"),
    (ErrorKind::Unsupported, "unsupported"),
    (ErrorKind::Interrupted, "interrupted"),
    (ErrorKind::Stopped, "stopped"),
];

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let kind = KINDS.iter().find(|(kind, _)| *kind == error.kind()).map_or("io", |(_, name)| name);
        Self { kind: kind.into(), message: error.to_string() }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let kind = KINDS.iter().find(|(_, name)| *name == failure.kind).map_or(ErrorKind::Io, |(kind, _)| *kind);
        Self::new(kind, failure.message)
    }
}

/// What a client says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromClient {
    /// Do this.
    Request(Request),
    /// Stop doing it.
    Cancel,
}

/// What a server says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromServer {
    /// So far.
    Progress(ProgressReport),
    /// A part of a diff.
    Extents(Vec<ChangedExtent>),
    /// Done.
    Reply(Box<Reply>),
    /// Failed.
    Error(Failure),
}

/// What every line has, whatever its version.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// A line: the version and the message.
#[derive(Serialize, Deserialize)]
struct Line<M> {
    version: u32,
    message: M,
}

/// One line, its end included; `Invalid` when it is longer than `limit`.
pub fn encode<M: Serialize>(message: &M, limit: usize) -> disk::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(&Line { version: VERSION, message })
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("a control message cannot be encoded: {e}")))?;
    if line.len() >= limit {
        let sentence = format!("a control message of {} bytes is over the limit of {limit}: ask for less", line.len());
        return Err(Error::new(ErrorKind::Invalid, sentence));
    }
    line.push(b'\n');
    Ok(line)
}

/// Reads one line without its end. Of another version: `Unsupported`; not a message of this one: `Invalid`.
pub fn decode<M: DeserializeOwned>(line: &[u8]) -> disk::Result<M> {
    let malformed = |e: serde_json::Error| Error::new(ErrorKind::Invalid, format!("malformed control message: {e}"));
    let Versioned { version } = serde_json::from_slice(line).map_err(malformed)?;
    if version != VERSION {
        let sentence = format!(
            "the peer speaks control protocol {version}, this is lamina {} with protocol {VERSION}: \
             use the program that serves the datastore, or restart the server",
            env!("CARGO_PKG_VERSION")
        );
        return Err(Error::new(ErrorKind::Unsupported, sentence));
    }
    let line: Line<M> = serde_json::from_slice(line).map_err(malformed)?;
    Ok(line.message)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn requests() -> Vec<Request> {
        let name = || String::from("a \"quoted\" näme\u{1F4BE}");
        vec![
            Request::Status,
            Request::Check { data: true, repair: false },
            Request::DiskCreate { name: name(), capacity: u64::MAX, provisioning: Provisioning::EagerZeroedThick },
            Request::DiskList,
            Request::DiskDelete { name: name(), promote: true },
            Request::SnapshotCreate { of: vec![(name(), name()), (name(), "b".into())] },
            Request::SnapshotList { disk: None },
            Request::SnapshotDiff { disk: name(), from: Point::Snapshot(name()), to: Point::Head },
            Request::Clone { disk: name(), at: Point::Head, names: vec![name()], full: false },
            Request::ExportList,
        ]
    }

    #[test]
    fn a_request_crosses_unchanged_on_one_line() {
        for request in requests() {
            let line = encode(&FromClient::Request(request.clone()), REQUEST_LINE_MAX).unwrap();
            assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
            assert_eq!(decode::<FromClient>(&line[..line.len() - 1]).unwrap(), FromClient::Request(request));
        }
    }

    #[test]
    fn every_kind_crosses_unchanged() {
        for (kind, _) in KINDS {
            let error: Error = Failure::from(&Error::new(kind, "why")).into();
            assert_eq!((error.kind(), error.to_string().as_str()), (kind, "why"));
        }
    }

    #[test]
    fn another_version_is_told_so_even_if_the_rest_is_unknown() {
        let error = decode::<FromClient>(br#"{"version":2,"message":{"request":{"teleport":{}}}}"#).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("protocol 2"), "{error}");
    }

    #[test]
    fn malformed_lines_are_invalid() {
        for line in [
            &b""[..],
            b"{}",
            b"null",
            b"[1]",
            b"\xff\xfe",
            br#"{"version":1}"#,
            br#"{"version":-1,"message":"cancel"}"#,
            br#"{"version":1,"message":"cancel"} x"#,
            br#"{"version":1,"message":{"request":"format_disk"}}"#,
            br#"{"version":1,"message":{"request":{"disk_show":{}}}}"#,
            br#"{"version":1,"message":{"request":{"disk_show":{"name":"a","force":true}}}}"#,
            br#"{"version":1,"message":{"request":{"disk_resize":{"name":"a","capacity":-1,"shrink":false}}}}"#,
        ] {
            assert_eq!(decode::<FromClient>(line).unwrap_err().kind(), ErrorKind::Invalid);
        }
        let deep = format!(r#"{{"version":1,"message":{}"#, "[".repeat(1 << 20));
        assert_eq!(decode::<FromClient>(deep.as_bytes()).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn no_damage_to_a_line_panics() {
        let mut state = 7u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let lines: Vec<_> =
            requests().into_iter().map(|r| encode(&FromClient::Request(r), REQUEST_LINE_MAX).unwrap()).collect();
        for _ in 0..20_000 {
            let mut line = lines[next() % lines.len()].clone();
            for _ in 0..1 + next() % 4 {
                let at = next() % line.len();
                match next() % 3 {
                    0 => line[at] ^= 1 << (next() % 8),
                    1 => drop(line.drain(at..)),
                    _ => line.insert(at, next() as u8),
                }
                if line.is_empty() {
                    break;
                }
            }
            let _ = decode::<FromClient>(&line);
        }
    }

    #[test]
    fn a_message_over_the_limit_is_not_sent() {
        let request = FromClient::Request(Request::DiskShow { name: "a".repeat(100) });
        assert_eq!(encode(&request, 100).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
