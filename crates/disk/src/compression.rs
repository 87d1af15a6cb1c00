//! How data of native disks is compressed.

use crate::reduce_at::ReduceAt;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use store::pack::Codec;

/// A method of compression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compression {
    /// LZ4.
    Lz4,
    /// Zstandard with a level from 1 to 19.
    Zstd(u8),
    /// No compression.
    #[default]
    Off,
}

impl Compression {
    /// Whether nothing is compressed.
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }

    /// The codec, if there is one.
    pub(crate) fn codec(self) -> Option<Codec> {
        match self {
            Self::Lz4 => Some(Codec::Lz4),
            Self::Zstd(level) => Some(Codec::Zstd(level)),
            Self::Off => None,
        }
    }
}

/// Changes method and time of compression; `None` leaves them as they are. Compression that is switched on is at
/// write-back, unless another time is given.
pub(crate) fn change_compression(
    new: Option<Compression>,
    new_at: Option<ReduceAt>,
    compression: &mut Compression,
    at: &mut ReduceAt,
) -> Result<(), error::Error> {
    let method = new.unwrap_or(*compression);
    let time = at.changed([compression.is_off(), method.is_off()], new_at);
    *at = time.ok_or_else(|| {
        error::Error::new(
            error::ErrorKind::Invalid,
            "a time of compression is given, but compression is off: give a method too, such as --compression lz4",
        )
    })?;
    *compression = method;
    Ok(())
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
            Self::Off => f.write_str("off"),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is neither off, lz4 nor zstd, nor zstd:LEVEL with a level from 1 to 19");
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "lz4" => Ok(Self::Lz4),
            None if text == "zstd" => Ok(Self::Zstd(Codec::LEVEL_DEFAULT)),
            Some(("zstd", level)) => match level.parse() {
                Ok(level) if (1..=Codec::LEVEL_MAX).contains(&level) => Ok(Self::Zstd(level)),
                _ => Err(wrong()),
            },
            _ => Err(wrong()),
        }
    }
}

impl TryFrom<String> for Compression {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Compression> for String {
    fn from(compression: Compression) -> Self {
        compression.to_string()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_method_is_read_as_it_is_shown() {
        for method in [Compression::Lz4, Compression::Zstd(1), Compression::Zstd(19), Compression::Off] {
            assert_eq!(method.to_string().parse(), Ok(method));
        }
        assert_eq!("zstd".parse(), Ok(Compression::Zstd(3)));
        for wrong in ["", "zstd:0", "zstd:20", "zstd:", "lz4:1", "gzip", "off:1", "OFF"] {
            assert!(wrong.parse::<Compression>().unwrap_err().contains(wrong));
        }
    }
}
