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
//! The protocol is described in `docs/protocol/replication.md`. Invariants:
//!
//! 1. Nothing is sent before TLS is up, and a client that the server's certificates and names do not admit gets no
//!    answer.
//! 2. Bytes of a peer are decoded in one place ([`frame::Head::decode`], [`message::Message::decode`]); no size in them
//!    is used before it is checked, and no message takes more memory than the bytes received for it.
//! 3. A session is a control connection, on which every request has one answer, and data connections, on which data
//!    goes one way. It ends with its control connection, on which errors of data connections are reported too.
//! 4. Data that has arrived and was recorded need not be sent again, whatever breaks. A disk appears completely or not
//!    at all.
//! 5. No wait is unlimited: every wait for a peer has a timeout, and a peer that works on an answer sends keep-alives.

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
