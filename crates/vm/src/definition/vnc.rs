//! Where the screen of a machine is served by VNC.

use super::Definition;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// QEMU counts the ports of VNC from this one.
pub const FIRST_PORT: u16 = 5900;

/// Where VNC listens; written in the file as `unix` or `127.0.0.1:5901`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Vnc {
    /// On a Unix socket in the run folder of the machine.
    Unix,
    /// On a TCP port of this host, with a password.
    Tcp(SocketAddr),
}

/// Encryption of VNC on a TCP port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VncTls {
    /// The folder with the files [`VncTls::FILES`], as QEMU names them.
    pub folder: PathBuf,
    /// Whether only clients with a certificate of the authority are served.
    #[serde(default)]
    pub clients: bool,
}

impl VncTls {
    /// Certificate of the authority; certificate and private key of this host.
    pub const FILES: [&str; 3] = ["ca-cert.pem", "server-cert.pem", "server-key.pem"];
}

impl Definition {
    pub(super) fn check_vnc(&self) -> Result<()> {
        let invalid = |what: &str| Err(Error::new(ErrorKind::Invalid, what));
        match (&self.vnc, &self.vnc_tls) {
            (Some(Vnc::Tcp(address)), None) if !address.ip().is_loopback() => invalid(&format!(
                "VNC on {address} is not encrypted and its password is weak: use a loopback address, and a tunnel of SSH \
                 from elsewhere, or certificates (--vnc-tls)"
            )),
            (None | Some(Vnc::Unix), Some(_)) => invalid("certificates of VNC need VNC on an address and a port"),
            (_, Some(tls)) if !tls.folder.is_absolute() => {
                invalid("the folder of VNC's certificates has no absolute path")
            }
            _ => Ok(()),
        }
    }
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
        if address.port() < FIRST_PORT {
            return Err(invalid("the lowest port that QEMU supports is 5900"));
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
    fn places_are_read_as_they_are_written() {
        for (text, same) in [
            ("unix", "unix"),
            ("127.0.0.1:5900", "127.0.0.1:5900"),
            ("localhost:65535", "127.0.0.1:65535"),
            ("[::1]:5901", "[::1]:5901"),
            ("0.0.0.0:5901", "0.0.0.0:5901"),
        ] {
            assert_eq!(text.parse::<Vnc>().unwrap().to_string(), same);
        }
        for wrong in ["", "off", "127.0.0.1", "127.0.0.1:80", "localhost:x"] {
            assert_eq!(wrong.parse::<Vnc>().unwrap_err().kind(), ErrorKind::Invalid, "{wrong}");
        }
    }

    #[test]
    fn other_hosts_reach_it_only_with_certificates() {
        let mut machine = Definition::new("web", 1, 64 << 20).unwrap();
        let tls = VncTls { folder: "/etc/pki/qemu".into(), clients: true };
        for (place, open) in
            [("127.0.0.1:5901", false), ("0.0.0.0:5901", true), ("192.0.2.1:5901", true), ("[::]:5901", true)]
        {
            machine.set_vnc(Some(place.parse().unwrap()));
            assert_eq!(machine.check().is_err(), open, "{place}");
            machine.vnc_tls = Some(tls.clone());
            machine.check().unwrap();
            assert_eq!(Definition::parse(&machine.to_text().unwrap(), "web").unwrap(), machine);
            machine.vnc_tls = None;
        }
        machine.vnc_tls = Some(VncTls { folder: "pki".into(), ..tls.clone() });
        assert!(machine.check().is_err());
        machine.vnc_tls = Some(tls);
        machine.set_vnc(Some(Vnc::Unix));
        assert_eq!(machine.vnc_tls, None, "a socket of this host needs none");
    }
}
