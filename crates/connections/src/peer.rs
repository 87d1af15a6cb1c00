//! The other end of a connection.

use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::AsFd;

/// The other end of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Peer {
    /// A process on this host, over a unix socket.
    Process {
        /// Process id.
        pid: i32,
        /// User id.
        user: u32,
    },
    /// A TCP address.
    Address(SocketAddr),
    /// The system does not report an identity of the peer.
    #[default]
    Unknown,
}

impl Peer {
    /// The peer of a connected socket.
    pub fn of(socket: impl AsFd) -> Self {
        let address = rustix::net::getpeername(&socket).ok().flatten();
        if let Some(Ok(address)) = address.map(SocketAddr::try_from) {
            return Self::Address(address);
        }
        match sockopt::socket_peercred(&socket) {
            Ok(peer) => Self::Process { pid: peer.pid.as_raw_nonzero().get(), user: peer.uid.as_raw() },
            Err(_) => Self::Unknown,
        }
    }

    /// Whether a connection from `other` may belong to the same client: from the same process, or from the same host
    /// with any port. A process of root may have changed to another user meanwhile. Two unknown peers count as
    /// different clients.
    pub fn may_be(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unknown, _) | (_, Self::Unknown) => false,
            (Self::Address(one), Self::Address(two)) => one.ip().to_canonical() == two.ip().to_canonical(),
            (Self::Process { pid: one, user: 0 }, Self::Process { pid: two, .. }) => one == two,
            _ => self == other,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, user } => write!(out, "process {pid} of user {user}"),
            Self::Address(address) => write!(out, "{address}"),
            Self::Unknown => write!(out, "unknown"),
        }
    }
}
