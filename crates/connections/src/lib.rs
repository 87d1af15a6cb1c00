//! Connections: sockets, TLS, limits and threads, for any protocol.
//!
//! ```text
//! listen        addresses to listen on: unix sockets with their files, TCP, and who may listen beyond loopback
//! group         groups of users, by name
//! peer          the other end of a connection
//! service       accepting, counting, refusing, a thread for each connection, and stopping
//! connection    one accepted connection, shared by its protocol and the service
//! transport     bytes in both directions; each call states whether it may block
//! polling       polling for a short time before sleeping
//! tls           certificates and keys; TLS over a transport, and over a blocking socket
//! limits        all limits
//! ```
//!
//! A protocol implements [`Protocol`]: it serves each connection on a thread of its own. This crate does not depend on
//! protocols, disks or datastores.

#![forbid(unsafe_code)]

pub mod connection;
mod group;
pub mod limits;
pub mod listen;
pub mod peer;
pub mod polling;
mod refusals;
pub mod service;
pub mod tls;
pub mod transport;

pub use connection::Connection;
pub use group::group_id;
pub use limits::Limits;
pub use listen::{Access, Address, Listen};
pub use peer::Peer;
pub use service::{Drain, Protocol, Refusal, Service, ServiceConfig};
pub use tls::{CertificateName, ClientTls, PeerCertificate, TlsConfig, TlsIdentity, TlsStream};
