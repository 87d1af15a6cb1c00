//! The record of clients: what the next owner of a datastore has to know about those of this one.
//!
//! The layout is in `docs/format/clients.md`. A record that cannot be read is logged and counts as none: it
//! protects against a mistake for a few minutes, and is no reason to keep a datastore closed.

use backend::Directory;
use connections::Peer;
use disk::sealed::{self, Kind};
use error::{IoContext, Result};
use serde::{Deserialize, Serialize};

/// The file, in the folder of the datastore.
pub const FILE: &str = "clients";
/// What it is: room for some thousand clients with the longest names.
const KIND: Kind = Kind { word: "clients", version: 1, length_max: 16 << 20 };

/// All clients of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Seconds for which a client counts after its connection ended.
    pub grace: u64,
    /// The clients.
    pub clients: Vec<Gone>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gone {
    /// What it had open: `disk` or `disk@snapshot`, by its present name.
    pub export: String,
    /// The name it asked for, where the disk has been renamed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// The client's process or address.
    pub peer: Peer,
    /// When it connected, in seconds since 1970.
    pub connected: u64,
    /// When its connection ended; `None` while it is there.
    pub ended: Option<u64>,
    /// The connection ended because the server did: the grace begins again with the next server.
    pub with_server: bool,
}

/// The bytes of a record.
pub fn encode(record: &Record) -> Result<Vec<u8>> {
    KIND.encode(record)
}

/// The record in some bytes.
pub fn decode(bytes: &[u8]) -> Result<Record> {
    KIND.decode(bytes)
}

/// The record of a datastore, if there is one that can be read.
pub(super) fn read(directory: &dyn Directory) -> Option<Record> {
    match KIND.read(directory, FILE).and_then(|bytes| bytes.as_deref().map(decode).transpose()) {
        Ok(record) => record,
        Err(error) => {
            tracing::warn!(%error, "clients of the last server are not known, and none of them is waited for");
            None
        }
    }
}

/// Writes it. Clients outlive a server that is killed; they seldom outlive the machine, and a flush for each that comes
/// or goes would slow down all others.
pub(super) fn write(directory: &dyn Directory, record: &Record) -> Result<()> {
    sealed::put_unflushed(directory, FILE, &encode(record)?).during(|| "recording the clients".to_owned())
}

/// Removes it.
pub(super) fn remove(directory: &dyn Directory) -> Result<()> {
    sealed::remove_if_there(directory, FILE).during(|| "removing the record of the clients".to_owned())
}
