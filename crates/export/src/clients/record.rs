//! The record of clients, which the next owner of the datastore reads.
//!
//! The layout is in `docs/format/clients.md`. If the record cannot be read, this is logged and ignored: without a
//! record, only the grace time of clients is lost.

use backend::Directory;
use connections::Peer;
use disk::sealed::{self, Kind};
use error::{IoContext, Result};
use serde::{Deserialize, Serialize};

/// Name of the file, in the folder of the datastore.
pub const FILE: &str = "clients";
/// The kind, the version and the longest length of the file. The length is sufficient for some thousand clients with
/// the longest names.
const KIND: Kind = Kind { word: "clients", version: 1, length_max: 16 << 20 };

/// All clients of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Seconds for which a client counts as a user after its connection ended.
    pub grace: u64,
    /// The clients.
    pub clients: Vec<Gone>,
}

/// A client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gone {
    /// The export that the client had open (`disk` or `disk@snapshot`), by its current name.
    pub export: String,
    /// The name that the client requested, if the disk has been renamed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// The client's process or address.
    pub peer: Peer,
    /// When the client connected, in seconds since 1970.
    pub connected: u64,
    /// When the client's connection ended; `None` if the client was connected when the record was written.
    pub ended: Option<u64>,
    /// Whether the connection ended because the server stopped: the grace time then begins again with the next server.
    pub with_server: bool,
}

/// Encodes a record.
pub fn encode(record: &Record) -> Result<Vec<u8>> {
    KIND.encode(record)
}

/// Decodes a record.
pub fn decode(bytes: &[u8]) -> Result<Record> {
    KIND.decode(bytes)
}

/// The record of a datastore; `None` if there is no record or it cannot be read.
pub(super) fn read(directory: &dyn Directory) -> Option<Record> {
    match KIND.read(directory, FILE).and_then(|bytes| bytes.as_deref().map(decode).transpose()) {
        Ok(record) => record,
        Err(error) => {
            tracing::warn!(%error, "the clients of the last server are not known, and none of them is in grace");
            None
        }
    }
}

/// Writes the record without a flush. The record has to survive a kill of the server, but not a crash of the host,
/// which clients rarely survive. A flush for every change would slow down all requests.
pub(super) fn write(directory: &dyn Directory, record: &Record) -> Result<()> {
    sealed::put_unflushed(directory, FILE, &encode(record)?).during(|| "recording the clients".to_owned())
}

/// Removes the record.
pub(super) fn remove(directory: &dyn Directory) -> Result<()> {
    sealed::remove_if_there(directory, FILE).during(|| "removing the record of the clients".to_owned())
}
