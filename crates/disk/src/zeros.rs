//! Detection of zeros in the writes of clients.
//!
//! A write whose bytes are all zero can be carried out as a request to zero its range, which stores no data. Like
//! QEMU's `detect-zeroes`, the whole write is examined, and the disk's setting decides whether the range may lose its
//! space. Guests zero large ranges in large writes; a single block of zeros within data is stored as data.

use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Writes below this length are not examined: a request to zero such a range costs as much as the write.
const LENGTH_MIN: usize = backend::BLOCK_SIZE;

/// Whether writes of zeros become requests to zero their range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DetectZeroes {
    /// Zeros are written like other data.
    #[default]
    Off,
    /// The range is zeroed, and stays or becomes allocated.
    On,
    /// The range is zeroed, and is unmapped if the disk is thin.
    Unmap,
}

impl DetectZeroes {
    const ALL: [Self; 3] = [Self::Off, Self::On, Self::Unmap];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Unmap => "unmap",
        }
    }

    pub(crate) fn to_number(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }

    /// Whether to zero the range of a write instead of writing its bytes, and if so, whether the range must be
    /// allocated.
    pub(crate) fn zeroes(self, bytes: &[u8]) -> Option<bool> {
        match self {
            Self::Off => None,
            _ if bytes.len() < LENGTH_MIN || !is_zero(bytes) => None,
            Self::On => Some(true),
            Self::Unmap => Some(false),
        }
    }
}

impl fmt::Display for DetectZeroes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for DetectZeroes {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| {
            let text = format!("'{}' is none of off, on and unmap", text.escape_debug());
            Error::new(ErrorKind::Invalid, text)
        })
    }
}

/// Whether all bytes are zero. Stops at the first 64 bytes that are not all zeros.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Compares words explicitly, because the compiler does not combine comparisons of bytes.
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|word| word == &[0; 64]) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_byte_that_is_not_zero_is_found_at_every_position() {
        let mut bytes = vec![0; 4096 + 3];
        assert!(is_zero(&bytes) && is_zero(&[]));
        for at in [0, 1, 63, 64, 4095, 4096, 4098] {
            bytes[at] = 0x80;
            assert!(!is_zero(&bytes), "{at}");
            bytes[at] = 0;
        }
    }

    #[test]
    fn the_setting_decides_what_happens_to_zeros() {
        let (zeros, mut data) = (vec![0; 8192], vec![0; 8192]);
        data[8191] = 1;
        for (setting, of_zeros) in
            [(DetectZeroes::Off, None), (DetectZeroes::On, Some(true)), (DetectZeroes::Unmap, Some(false))]
        {
            assert_eq!(setting.zeroes(&zeros), of_zeros);
            assert_eq!(setting.zeroes(&data), None);
            assert_eq!(setting.zeroes(&zeros[..512]), None, "a part of a block");
            assert_eq!(DetectZeroes::from_number(setting.to_number()), setting);
            assert_eq!(setting.to_string().parse::<DetectZeroes>().unwrap(), setting);
        }
        assert_eq!("auto".parse::<DetectZeroes>().unwrap_err().kind(), ErrorKind::Invalid);
    }
}
