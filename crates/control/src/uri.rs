//! URIs by which NBD clients reach an export (schemes of the NBD URI specification).

use crate::message::Serving;
use std::fmt::Write;

/// Percent-encodes characters that a path segment or a query value must not contain.
fn encode(text: &[u8], also: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(byte) || also.contains(byte) {
            out.push(char::from(*byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// One URI for each way to reach the export; for an empty name the URIs of the server itself.
pub fn of_export(serving: &Serving, name: &str) -> Vec<String> {
    use std::os::unix::ffi::OsStrExt;
    let name = encode(name.as_bytes(), b"@");
    let mut out = Vec::new();
    if let Some(socket) = &serving.socket {
        out.push(format!("nbd+unix:///{name}?socket={}", encode(socket.as_os_str().as_bytes(), b"/")));
    }
    if let Some(address) = serving.tcp {
        let scheme = if serving.tls { "nbds" } else { "nbd" };
        out.push(format!("{scheme}://{address}/{name}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris() {
        let serving = Serving {
            pid: 1,
            version: String::new(),
            socket: Some("/var/lib/my store/nbd.sock".into()),
            tcp: Some(([0, 0, 0, 0, 0, 0, 0, 1], 10809).into()),
            tls: true,
            receive: None,
            read_only: false,
        };
        assert_eq!(
            of_export(&serving, "vm 1@a?b"),
            ["nbd+unix:///vm%201@a%3Fb?socket=/var/lib/my%20store/nbd.sock", "nbds://[::1]:10809/vm%201@a%3Fb"]
        );
    }
}
