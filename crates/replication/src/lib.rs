//! Sending disks to another lamina server: encrypted, over several connections, and resumable. Only data that the other
//! server lacks is sent.
//!
//! ```text
//! frame         the unit of transmission and its checks
//! message       messages other than data
//! stream        frames and messages over any stream of bytes
//! remote        lamina://HOST:PORT/NAME
//! send          the sender: plan, data connections, retries after a broken connection
//! receive       the receiver: listening, sessions, data connections
//! limits        all limits
//! ```
//!
//! Sockets, TLS and threads are in crate [`connections`].
//!
//! The protocol is described in `docs/protocol/replication.md`. Invariants:
//!
//! 1. No data is sent before TLS is established, and a client without an accepted certificate and name receives no
//!    reply.
//! 2. Bytes of a peer are decoded only by [`frame::Head::decode`] and [`message::Message::decode`]. Sizes in them are
//!    checked before they are used, and a message never occupies more memory than the bytes received for it.
//! 3. A session has a control connection, on which every request has one reply, and data connections, which carry data
//!    in one direction. The session ends when its control connection ends. Errors of data connections are also reported
//!    on the control connection.
//! 4. Data that was received and recorded is not sent again after any failure. A disk becomes visible completely or not
//!    at all.
//! 5. Every wait for a peer has a timeout. A peer that needs a long time for a reply sends keep-alives.

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
