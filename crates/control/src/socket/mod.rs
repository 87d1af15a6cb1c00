//! The control socket: the front end for requests of other processes to the owner of a datastore.
//!
//! ```text
//! path     the location of the socket, which process may bind it, and when it is stale
//! lines    lines of bounded length from a stream
//! client   sends requests
//! server   answers requests
//! ```
//!
//! # Protocol
//!
//! A stream of lines over the unix socket `control.sock` in the datastore's folder, mode 0600, so that only the owner
//! of the files and root can connect. Each line is one JSON object with `version` and `message`, which is one of:
//!
//! | from   | message    | meaning                                                                  |
//! |--------|------------|--------------------------------------------------------------------------|
//! | client | `request`  | a [`Request`](crate::Request); one at a time                        |
//! | client | `cancel`   | cancel the current request; closing the connection does the same       |
//! | server | `progress` | `done` of `total`; any number of times, a few per second at most           |
//! | server | `part`     | a part of the reply (extents, an event), any number of times, in order     |
//! | server | `reply`    | the request succeeded: a [`Reply`](crate::Reply)                           |
//! | server | `error`    | the request failed: kind and text of the error                             |
//!
//! Invariants:
//! 1. Every request ends with exactly one `reply` or `error`, unless the connection breaks.
//! 2. A line that exceeds its limit, is not JSON, has another version or is out of order is answered with an `error`,
//!    and the connection is closed. Other connections are not affected.
//! 3. If the client disconnects, its request is cancelled, and the work of the request is undone. An operation that has
//!    to continue is started as a job by one request; another request waits for the job.
//! 4. Requests about machines, and the resize of a disk that notifies a running machine, are not sent over the socket:
//!    the requesting process carries them out ([`Request::is_for_requesting_process`]).
//!
//! [`Request::is_for_requesting_process`]: crate::Request::is_for_requesting_process

mod client;
mod lines;
mod path;
mod server;

pub use client::Client;
pub use path::{connect, path, remove_stale};
pub use server::{Handler, Server};
