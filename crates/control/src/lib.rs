//! The control side of a datastore: every verb as a typed request with its reply, and the one place that carries it
//! out.
//!
//! Every verb is a [`Request`]; [`dispatch()`] is the only place that turns one into calls of [`disk::Datastore`] and a
//! [`Reply`]. A face (the command line, the control socket) builds requests and shows replies; none is needed by this
//! crate. The same code runs whether a request is carried out in the process that asks or by the owner of the datastore
//! behind the control socket.
//!
//! ```text
//!  face -> Request -> ask --- no server -------> Datastore::open -> dispatch -> close
//!                        \--- control socket --> client ~~~ server -> dispatch
//! ```
//!
//! ```text
//! message    requests, replies, and their encoding as lines
//! dispatch   requests to calls; a file for each noun
//! owner      the process that owns a datastore: found, or become for one request
//! socket     requests of other processes
//! uri        under which URIs clients reach an export
//! ```

#![forbid(unsafe_code)]

mod dispatch;
pub mod message;
mod owner;
pub mod socket;
pub mod uri;

pub use dispatch::claims::refuse_to_replace;
pub use dispatch::{Service, Watch, alone, dispatch, point_name};
pub use message::{
    DiskRequest, ExportInfo, ImageRequest, ReceiveRequest, Reconnect, Reply, Request, Resized, SendPoint, SendRequest,
    SendTls, SentDisk, Serving, SnapshotRequest,
};
pub use owner::{OPEN_OPTIONS, ask, require_folder};
