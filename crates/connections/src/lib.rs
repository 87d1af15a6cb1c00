//! Connections: everything between a socket and a protocol.
//!
//! ```text
//! listen        places to listen: unix sockets and their files, TCP and who may listen beyond loopback
//! peer          the other end of a connection
//! service       accepting, counting, refusing, a thread for each connection, and stopping
//! connection    one accepted connection: how its protocol and its service share it
//! transport     bytes in both directions, each call says whether it may wait
//! polling       looking again for a moment before sleeping
//! tls           certificates and keys; TLS over a transport, and over a blocking socket
//! limits        every bound
//! ```
//!
//! A protocol is a [`Protocol`]: it is given each connection on a thread of that connection. This crate knows no
//! protocol, no disk and no datastore.

#![forbid(unsafe_code)]

pub mod connection;
pub mod limits;
pub mod listen;
pub mod peer;
pub mod polling;
mod refusals;
pub mod service;
pub mod tls;
pub mod transport;

pub use connection::Connection;
pub use limits::Limits;
pub use listen::{Access, Address, Listen};
pub use peer::Peer;
pub use service::{Drain, Protocol, Refusal, Service, ServiceConfig};
pub use tls::{ClientTls, TlsConfig, TlsIdentity, TlsStream};
