//! The control side of a datastore: its requests, and how they reach the process that owns the datastore.
//!
//! Every verb is a [`Request`]; [`dispatch()`] is the only place that turns one into calls of [`disk::Datastore`] and a
//! [`Reply`]. The command line builds requests and prints replies. It is the same code whether the request is carried
//! out in its own process or by the owner of the datastore behind the control socket.
//!
//! ```text
//!  verb -> Request -> session --- no server -------> Datastore::open -> dispatch -> close
//!                        \------- control socket --> client ~~~ server -> dispatch
//! ```
//!
//! # Protocol
//!
//! A stream of lines over the unix socket `control.sock` in the datastore's folder, mode 0600, so that only
//! the owner of the files and root can connect. Each line is one JSON object with `version` and
//! `message`, which is one of:
//!
//! | from   | message    | meaning                                                                  |
//! |--------|------------|--------------------------------------------------------------------------|
//! | client | `request`  | a [`Request`]; the next one only after this one has ended                 |
//! | client | `cancel`   | stop the request that is under way; closing the connection does the same  |
//! | server | `progress` | `done` of `total`; at most a few a second, any number of times            |
//! | server | `extents`  | a batch of the answer to a diff, any number of times, in order            |
//! | server | `reply`    | the end of a request: a [`Reply`]                                         |
//! | server | `error`    | the other end of a request: kind and sentence                             |
//!
//! What holds:
//! 1. Every request ends with exactly one `reply` or `error`, unless the connection breaks.
//! 2. A line longer than its limit, not JSON, of another version or out of turn ends with an `error` and the end of the
//!    connection; nothing else is touched.
//! 3. A request whose client has gone is cancelled; what it began is undone as for any cancelled work.

mod client;
mod dispatch;
mod lines;
mod message;
mod server;
mod socket;

pub use client::Client;
pub use dispatch::claims::refuse_to_replace;
pub use dispatch::{Service, Watch, alone, dispatch, point_name};
pub use message::{
    DiskRequest, ImageRequest, ReceiveRequest, Reconnect, Reply, Request, Resized, SendPoint, SendRequest, SendTls,
    SentDisk, Serving, SnapshotRequest,
};
pub use server::Server;
pub use socket::{bind, connect, path, remove_stale};
