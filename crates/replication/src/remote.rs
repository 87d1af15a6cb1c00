//! Remote names `lamina://HOST:PORT/NAME`: a disk or machine on another server.

use std::fmt;
use std::str::FromStr;

const SCHEME: &str = "lamina://";

/// The target of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Name or address of the server, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// The name of the disk or machine on that server.
    pub name: String,
}

impl FromStr for Remote {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{}' is not written lamina://HOST:PORT/NAME", text.escape_debug());
        let rest = text.strip_prefix(SCHEME).ok_or_else(wrong)?;
        let (server, name) = rest.split_once('/').ok_or_else(wrong)?;
        let (host, port) = server.rsplit_once(':').ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match bare {
            Some(host) => host,
            // An IPv6 address must be in brackets, because otherwise the port is ambiguous.
            None if host.contains(':') => return Err(wrong()),
            None => host,
        };
        let port = port.parse().map_err(|_| wrong())?;
        let odd = |text: &str| text.is_empty() || text.chars().any(|c| c.is_control() || c.is_whitespace() || c == '/');
        if odd(host) || odd(name) || name.contains(['@', '?', '#']) {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), port, name: name.to_owned() })
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "{SCHEME}[{}]:{}/{}", self.host, self.port, self.name),
            false => write!(f, "{SCHEME}{}:{}/{}", self.host, self.port, self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_are_parsed_as_they_are_printed() {
        for text in ["lamina://backup:7311/web", "lamina://192.0.2.7:1/a-b", "lamina://[::1]:7311/größe"] {
            assert_eq!(text.parse::<Remote>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "backup:7311/web",
            "lamina://backup/web",
            "lamina://backup:7311",
            "lamina://backup:7311/",
            "lamina://:7311/web",
            "lamina://::1:7311/web",
            "lamina://backup:99999/web",
            "lamina://backup:7311/web@monday",
            "lamina://backup:7311/a/b",
        ] {
            assert!(text.parse::<Remote>().is_err(), "{text}");
        }
    }
}
