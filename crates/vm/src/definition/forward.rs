//! Ports of the host that lead into a guest on QEMU's user network.

use error::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// Most forwarded ports of one network card.
pub const FORWARDS_MAX: usize = 64;

/// A port of the host that leads to a port of the guest, for TCP connections or UDP datagrams. Its text is
/// `[ADDRESS:]PORT:GUESTPORT[/udp]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Forward {
    /// The address of the host; loopback if none is given.
    pub address: Ipv4Addr,
    /// The port of the host.
    pub port: u16,
    /// The port of the guest.
    pub guest_port: u16,
    /// UDP instead of TCP.
    pub udp: bool,
}

impl Forward {
    /// The forwarded port in the syntax of QEMU's option `hostfwd`.
    pub fn rule(&self) -> String {
        let protocol = if self.udp { "udp" } else { "tcp" };
        format!("{protocol}:{}:{}-:{}", self.address, self.port, self.guest_port)
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.address != Ipv4Addr::LOCALHOST {
            write!(out, "{}:", self.address)?;
        }
        write!(out, "{}:{}{}", self.port, self.guest_port, if self.udp { "/udp" } else { "" })
    }
}

impl From<Forward> for String {
    fn from(forward: Forward) -> Self {
        forward.to_string()
    }
}

impl TryFrom<String> for Forward {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl FromStr for Forward {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parsed = || {
            let (ports, udp) = match text.split_once('/') {
                None | Some((_, "tcp")) => (text.split('/').next()?, false),
                Some((ports, "udp")) => (ports, true),
                Some(_) => return None,
            };
            let (before, guest_port) = ports.rsplit_once(':')?;
            let (address, port) = match before.rsplit_once(':') {
                Some((address, port)) => (address.parse().ok()?, port),
                None => (Ipv4Addr::LOCALHOST, before),
            };
            let number = |text: &str| text.parse::<u16>().ok().filter(|number| *number > 0);
            Some(Self { address, port: number(port)?, guest_port: number(guest_port)?, udp })
        };
        parsed().ok_or_else(|| {
            let text = format!(
                "'{}' is no forwarded port: [ADDRESS:]PORT:GUESTPORT[/udp], such as 2222:22, with an IPv4 address",
                text.escape_debug()
            );
            Error::new(ErrorKind::Invalid, text)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn forwarded_ports_are_read_as_they_are_written() {
        for (text, rule) in [
            ("2222:22", "tcp:127.0.0.1:2222-:22"),
            ("0.0.0.0:80:8080", "tcp:0.0.0.0:80-:8080"),
            ("5353:53/udp", "udp:127.0.0.1:5353-:53"),
        ] {
            let forward: Forward = text.parse().unwrap();
            assert_eq!((forward.to_string().as_str(), forward.rule().as_str()), (text, rule));
        }
        assert_eq!("127.0.0.1:1:2/tcp".parse::<Forward>().unwrap().to_string(), "1:2");
        for wrong in ["", "22", "0:22", "22:0", "22:", ":22", "a:22", "localhost:1:2", "1:2/sctp", "1:2,3:4", "70000:1"]
        {
            assert_eq!(wrong.parse::<Forward>().unwrap_err().kind(), ErrorKind::Invalid, "{wrong}");
        }
    }
}
