//! The control socket: the face through which another process asks the owner of a datastore.
//!
//! ```text
//! path     where the socket is, which process may bind it, what a stale one is
//! lines    lines of bounded length from a stream
//! client   the asking end
//! server   the answering end
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
//! | client | `request`  | a [`Request`](crate::Request); the next one only after this one has ended |
//! | client | `cancel`   | stop the request that is under way; closing the connection does the same  |
//! | server | `progress` | `done` of `total`; at most a few a second, any number of times            |
//! | server | `part`     | a part of the answer (extents, an event), any number of times, in order   |
//! | server | `reply`    | the end of a request: a [`Reply`](crate::Reply)                           |
//! | server | `error`    | the other end of a request: kind and sentence                             |
//!
//! What holds:
//! 1. Every request ends with exactly one `reply` or `error`, unless the connection breaks.
//! 2. A line longer than its limit, not JSON, of another version or out of turn ends with an `error` and the end of the
//!    connection; nothing else is touched.
//! 3. A request whose client has gone is cancelled; what it began is undone as for any cancelled work. Work that is to
//!    go on is started as a job, and waited for by another request.
//! 4. Requests about machines do not cross: the process that asks carries them out ([`Request::is_of_asking_process`]).
//!
//! [`Request::is_of_asking_process`]: crate::Request::is_of_asking_process

mod client;
mod lines;
mod path;
mod server;

pub use client::Client;
pub use path::{connect, path, remove_stale};
pub use server::{Handler, Server};
