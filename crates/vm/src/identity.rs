//! Identities of machines: random UUIDs and MAC addresses.

use backend::random;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use uuid::{Builder, Uuid};

/// A new identity (RFC 9562, version 4).
pub(crate) fn new_uuid() -> Result<Uuid> {
    Ok(Builder::from_random_bytes(random::bytes()?).into_uuid())
}

/// A MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac([u8; 6]);

impl Mac {
    /// A random address with QEMU's prefix for locally administered addresses, 52:54:00.
    pub fn new() -> Result<Self> {
        let [a, b, c] = random::bytes()?;
        Ok(Self([0x52, 0x54, 0, a, b, c]))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::new(ErrorKind::Invalid, format!("'{}' is no network address", text.escape_debug()));
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            *byte =
                parts.next().filter(|part| part.len() == 2).and_then(|part| hex(part.as_bytes())).ok_or_else(wrong)?;
        }
        if parts.next().is_some() || bytes[0] & 1 != 0 {
            return Err(wrong());
        }
        Ok(Self(bytes))
    }
}

/// Parses two hexadecimal digits.
fn hex(pair: &[u8]) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    match pair {
        [high, low] => Some((digit(*high)? * 16 + digit(*low)?) as u8),
        _ => None,
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn new_machine_identities_are_random() {
        let (one, other) = (new_uuid().unwrap(), new_uuid().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.get_version(), Some(uuid::Version::Random));
    }

    #[test]
    fn addresses_are_parsed_as_they_are_printed() {
        for _ in 0..100 {
            let mac = Mac::new().unwrap();
            assert_eq!(mac.to_string().parse::<Mac>().unwrap(), mac);
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for text in
            ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "53:54:00:12:34:56", "5:54:00:12:34:56", "ü:54:00:12:34:56"]
        {
            assert_eq!(text.parse::<Mac>().unwrap_err().kind(), ErrorKind::Invalid, "{text}");
        }
    }
}
