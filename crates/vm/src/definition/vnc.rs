//! Where the screen of a machine is served by VNC.

use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// QEMU counts the ports of VNC from this one.
pub const FIRST_PORT: u16 = 5900;

/// Where VNC listens; in the file as `unix` or `127.0.0.1:5901`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Vnc {
    /// On a Unix socket in the run folder of the machine.
    Unix,
    /// On a TCP port of this host, with a password.
    Tcp(SocketAddr),
}

impl FromStr for Vnc {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |what: &str| Error::new(ErrorKind::Invalid, format!("VNC on '{}': {what}", text.escape_debug()));
        if text == "unix" {
            return Ok(Self::Unix);
        }
        let address = match text.strip_prefix("localhost:") {
            Some(port) => port.parse().map(|port| (Ipv4Addr::LOCALHOST, port).into()).ok(),
            None => text.parse::<SocketAddr>().ok(),
        };
        let address = address.ok_or_else(|| invalid("use 'unix', or an address and a port such as 127.0.0.1:5901"))?;
        if !address.ip().is_loopback() {
            return Err(invalid(
                "it is not encrypted and its password is weak: use a loopback address, and a tunnel of SSH from elsewhere",
            ));
        }
        if address.port() < FIRST_PORT {
            return Err(invalid("QEMU has ports from 5900 on"));
        }
        Ok(Self::Tcp(address))
    }
}

impl fmt::Display for Vnc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix => f.write_str("unix"),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

impl TryFrom<String> for Vnc {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Vnc> for String {
    fn from(vnc: Vnc) -> Self {
        vnc.to_string()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_places_that_other_hosts_cannot_reach_are_accepted() {
        for (text, same) in [
            ("unix", "unix"),
            ("127.0.0.1:5900", "127.0.0.1:5900"),
            ("localhost:65535", "127.0.0.1:65535"),
            ("[::1]:5901", "[::1]:5901"),
        ] {
            assert_eq!(text.parse::<Vnc>().unwrap().to_string(), same);
        }
        for wrong in
            ["", "off", "127.0.0.1", "127.0.0.1:80", "localhost:x", "0.0.0.0:5901", "[::]:5901", "192.0.2.1:5901"]
        {
            assert_eq!(wrong.parse::<Vnc>().unwrap_err().kind(), ErrorKind::Invalid, "{wrong}");
        }
    }
}
