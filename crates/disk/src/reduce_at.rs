//! When new data of a disk is compressed, or compared with stored data.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// When new data of a disk is compressed, or compared with stored data. Servers do both with data that was not written
/// for a while in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReduceAt {
    /// Only once it was not written for a while.
    #[default]
    Idle,
    /// When it is written to the data files and needs new blocks; for compression, whole windows of 128 KiB of them.
    /// Clients do not wait for that: what they flush at once, and what they write faster than it is written to the data
    /// files, is stored as it is.
    WriteBack,
    /// As at write-back, and clients wait for it.
    Inline,
}

impl ReduceAt {
    /// Whether new data is stored as it is at first.
    pub fn is_idle(&self) -> bool {
        *self == Self::Idle
    }

    /// The time after a change of a setting that was off before the change, is off after it, and is given a new time.
    /// What is switched on is at write-back, unless another time is given. `None` if a time is given for what is off.
    pub(crate) fn changed(self, [was_off, is_off]: [bool; 2], new: Option<Self>) -> Option<Self> {
        match (is_off, new) {
            (true, Some(_)) => None,
            (true, None) => Some(Self::Idle),
            (false, Some(time)) => Some(time),
            (false, None) if was_off => Some(Self::WriteBack),
            (false, None) => Some(self),
        }
    }
}

impl fmt::Display for ReduceAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::WriteBack => "write-back",
            Self::Inline => "inline",
        })
    }
}

impl FromStr for ReduceAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "idle" => Ok(Self::Idle),
            "write-back" => Ok(Self::WriteBack),
            "inline" => Ok(Self::Inline),
            _ => Err(format!("'{text}' is neither inline nor write-back nor idle")),
        }
    }
}
