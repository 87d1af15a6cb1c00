//! What tells machines apart: UUIDs and network addresses, made from the system's randomness.

use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Bytes from the system's random number generator.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags)
            .map_err(std::io::Error::from)
            .during(|| "asking the system for random bytes".into())?;
    }
    Ok(bytes)
}

/// The identity of a machine (RFC 9562, version 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uuid([u8; 16]);

impl Uuid {
    /// A new, random one.
    pub fn new() -> Result<Self> {
        let mut bytes: [u8; 16] = random()?;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Uuid {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::new(ErrorKind::Invalid, format!("'{}' is no UUID", text.escape_debug()));
        let places = [8, 13, 18, 23];
        if text.len() != 36 || places.iter().any(|place| text.as_bytes()[*place] != b'-') {
            return Err(wrong());
        }
        let digits: Vec<u8> = text.bytes().enumerate().filter(|(at, _)| !places.contains(at)).map(|(_, b)| b).collect();
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = hex(pair).ok_or_else(wrong)?;
        }
        Ok(Self(bytes))
    }
}

/// The address of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mac([u8; 6]);

impl Mac {
    /// A new one under QEMU's prefix for locally administered addresses, 52:54:00.
    pub fn new() -> Result<Self> {
        let [a, b, c] = random()?;
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

/// Two hexadecimal digits.
fn hex(pair: &[u8]) -> Option<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    match pair {
        [high, low] => Some((digit(*high)? * 16 + digit(*low)?) as u8),
        _ => None,
    }
}

macro_rules! as_text {
    ($kind:ty) => {
        impl Serialize for $kind {
            fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

as_text!(Uuid);
as_text!(Mac);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn texts_read_back() {
        for _ in 0..100 {
            let (uuid, mac) = (Uuid::new().unwrap(), Mac::new().unwrap());
            assert_eq!(uuid.to_string().parse::<Uuid>().unwrap(), uuid);
            assert_eq!(mac.to_string().parse::<Mac>().unwrap(), mac);
            assert_eq!(uuid.to_string().as_bytes()[14], b'4');
        }
    }

    #[test]
    fn what_is_neither_is_refused() {
        for text in
            ["", "1d9e3a7c5b0e4a449d0f0f6f1c2f7a11", "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a1g", "ü".repeat(18).as_str()]
        {
            assert_eq!(text.parse::<Uuid>().unwrap_err().kind(), ErrorKind::Invalid, "{text}");
        }
        for text in
            ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "53:54:00:12:34:56", "5:54:00:12:34:56", "ü:54:00:12:34:56"]
        {
            assert_eq!(text.parse::<Mac>().unwrap_err().kind(), ErrorKind::Invalid, "{text}");
        }
    }
}
