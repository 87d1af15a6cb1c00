//! Disks sent to another lamina server: encrypted, over several connections, resumable, and only what it lacks.
//!
//! ```text
//! frame         the unit on the wire, and what it may say
//! message       what the two sides tell each other besides data
//! stream        frames and messages over any stream of bytes
//! remote        lamina://HOST:PORT/NAME
//! send          the sending side: a plan, its streams, starting again after a broken connection
//! receive       the receiving side: listener, sessions, streams
//! limits        every bound
//! ```
//!
//! Sockets, TLS and the threads of connections are those of [`connections`].
//!
//! The protocol is described in `docs/protocol/replication.md`. What holds:
//!
//! 1. Nothing is said before TLS is up, and nothing by a client that the server's certificates and names don't admit.
//! 2. Everything from a peer is decoded in one place ([`frame::Head::decode`], [`message::Message::decode`]); no size
//!    that it sends is used before it is checked, and no message takes more memory than the bytes received for it.
//! 3. A session is a control connection, over which every request has one answer, and data connections, over which data
//!    goes one way. It ends with its control connection, over which errors of data connections are sent too.
//! 4. What has arrived and was recorded need not be sent again, whatever breaks. A disk appears whole or not at all.
//! 5. No wait is unbounded: every wait for a peer has a limit, and a peer that works on an answer sends keep-alives.

#![forbid(unsafe_code)]

pub mod frame;
pub mod limits;
pub mod message;
pub mod receive;
pub mod remote;
pub mod send;
pub mod stream;

pub use receive::{Attachments, Making, NoAttachments, Receiver, ReceiverConfig};
pub use remote::Remote;
pub use send::{SendOptions, Sent, Shipment, ShippedDisk, send};
