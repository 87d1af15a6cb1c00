//! Among which data equal blocks are found.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The data among which equal blocks are stored once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Deduplication {
    /// Equal blocks stay.
    #[default]
    Off,
    /// A disk and its snapshots.
    Disk,
    /// All thin native disks of the datastore and their snapshots.
    Datastore,
}

impl fmt::Display for Deduplication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Disk => "disk",
            Self::Datastore => "datastore",
        })
    }
}

impl FromStr for Deduplication {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "disk" => Ok(Self::Disk),
            "datastore" => Ok(Self::Datastore),
            _ => Err(format!("'{text}' is not one of off, disk, datastore")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_domain_is_read_as_it_is_shown() {
        for domain in [Deduplication::Off, Deduplication::Disk, Deduplication::Datastore] {
            assert_eq!(domain.to_string().parse(), Ok(domain));
            assert_eq!(serde_json::to_string(&domain).unwrap(), format!("\"{domain}\""));
        }
        assert!("vm".parse::<Deduplication>().unwrap_err().contains("vm"));
    }
}
