//! Messages on the control socket: requests, progress, replies and errors as lines of JSON.
//!
//! [`VERSION`] is incremented when the messages change in a way that an older or newer peer could misread. The version
//! of a line is checked before its message, so that peers of different versions report the difference instead of
//! misreading each other.

use super::{Event, Reply, Request};
use disk::ChangedExtent;
use error::{Error, ErrorKind};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the protocol.
pub const VERSION: u32 = 4;

/// The longest line a client may send: room for the names of a hundred thousand clones.
pub const REQUEST_LINE_MAX: usize = 16 << 20;

/// The longest line a server may send: room for a list of a hundred thousand disks.
pub const REPLY_LINE_MAX: usize = 128 << 20;

/// Progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressReport {
    /// Bytes or objects processed so far.
    pub done: u64,
    /// Bytes or objects in total.
    pub total: u64,
}

/// An error as transmitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    kind: String,
    message: String,
}

impl Failure {
    /// The error's kind.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::from_name(&self.kind)
    }

    /// The error's text.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        Self { kind: error.kind().name().into(), message: error.to_string() }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::new(ErrorKind::from_name(&failure.kind), failure.message)
    }
}

/// A message of the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromClient {
    /// Carry out this request.
    Request(Request),
    /// Cancel the current request.
    Cancel,
}

/// A message of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromServer {
    /// Progress of the request.
    Progress(ProgressReport),
    /// A part of a reply that is too long for one message, or that is unlimited.
    Part(Part),
    /// The request succeeded.
    Reply(Box<Reply>),
    /// The request failed.
    Error(Failure),
}

/// A part of a reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The next extents of a diff.
    Extents(Vec<ChangedExtent>),
    /// The next event.
    Event(Box<Event>),
}

/// The version, which lines of every protocol version have.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// A line of the protocol: the version and the message.
#[derive(Serialize, Deserialize)]
struct Line<M> {
    version: u32,
    message: M,
}

/// Encodes a message as one line, including the line end; `Invalid` if the line is longer than `limit`.
pub fn encode<M: Serialize>(message: &M, limit: usize) -> error::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(&Line { version: VERSION, message })
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("a control message cannot be encoded: {e}")))?;
    if line.len() >= limit {
        let sentence = format!(
            "a control message of {} bytes is over the limit of {limit}: request fewer objects at a time",
            line.len()
        );
        return Err(Error::new(ErrorKind::Invalid, sentence));
    }
    line.push(b'\n');
    Ok(line)
}

/// Decodes one line without its line end. `Unsupported` for another version, `Invalid` for a malformed message.
pub fn decode<M: DeserializeOwned>(line: &[u8]) -> error::Result<M> {
    let malformed = |e: serde_json::Error| Error::new(ErrorKind::Invalid, format!("malformed control message: {e}"));
    let Versioned { version } = serde_json::from_slice(line).map_err(malformed)?;
    if version != VERSION {
        let sentence = format!(
            "the peer uses control protocol {version}, this is lamina {} with protocol {VERSION}: \
             use the program that serves the datastore, or restart the server",
            env!("CARGO_PKG_VERSION")
        );
        return Err(Error::new(ErrorKind::Unsupported, sentence));
    }
    let line: Line<M> = serde_json::from_slice(line).map_err(malformed)?;
    Ok(line.message)
}

#[cfg(test)]
mod tests;
