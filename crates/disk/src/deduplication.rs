//! Among which data equal blocks are found.

use crate::settings;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The data among which equal blocks are stored once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Deduplication {
    /// Equal blocks stay.
    #[default]
    Off,
    /// A disk and its snapshots.
    Disk,
    /// The thin native disks that have the same value of this label's key as the named disk, and their snapshots.
    Label(String),
    /// All thin native disks of the datastore and their snapshots.
    Datastore,
}

impl fmt::Display for Deduplication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Disk => f.write_str("disk"),
            Self::Label(key) => write!(f, "{LABEL}{key}"),
            Self::Datastore => f.write_str("datastore"),
        }
    }
}

/// Precedes the key of a label.
const LABEL: &str = "label:";

impl From<Deduplication> for String {
    fn from(domain: Deduplication) -> Self {
        domain.to_string()
    }
}

impl TryFrom<String> for Deduplication {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Deduplication {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "disk" => Ok(Self::Disk),
            "datastore" => Ok(Self::Datastore),
            _ => match text.strip_prefix(LABEL) {
                Some(key) => {
                    settings::check_label_key(key).map(|()| Self::Label(key.into())).map_err(|e| e.to_string())
                }
                None => Err(format!("'{text}' is not one of off, disk, label:KEY, datastore")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_domain_is_read_as_it_is_shown() {
        let of_label = Deduplication::Label("tenant".into());
        for domain in [Deduplication::Off, Deduplication::Disk, of_label, Deduplication::Datastore] {
            assert_eq!(domain.to_string().parse(), Ok(domain.clone()));
            let text = serde_json::to_string(&domain).unwrap();
            assert_eq!(text, format!("\"{domain}\""));
            assert_eq!(serde_json::from_str::<Deduplication>(&text).unwrap(), domain);
        }
        for (text, told) in [("vm", "label:KEY"), ("label:", "label"), ("label:tenant=a", "contains '='")] {
            assert!(text.parse::<Deduplication>().unwrap_err().contains(told), "{text}");
        }
    }
}
