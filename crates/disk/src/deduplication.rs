//! Among which data equal blocks are found.

use crate::reduce_at::ReduceAt;
use crate::settings::{self, Labels};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use store::engine::{PRINT_BYTES, PRINTS_MAX, PRINTS_MIN};

/// Memory for the prints of a deduplication in bytes, unless another limit is set: 144 MiB. A print of 36 bytes for
/// each block of 4 KiB that is compared is 9 GiB for 1 TiB. With less memory, equal blocks are found in several rounds,
/// each of which reads the maps of the data again.
pub const DEDUP_MEMORY_DEFAULT: usize = PRINTS_MAX * PRINT_BYTES;
/// The lowest limit of this memory: 144 KiB.
pub const DEDUP_MEMORY_MIN: usize = PRINTS_MIN * PRINT_BYTES;

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

impl Deduplication {
    /// Whether equal blocks stay.
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }

    /// The data of which a disk with this setting is a part. `None` without deduplication, and for a disk that does not
    /// have the label.
    pub(crate) fn domain(&self, uuid: &str, labels: &Labels) -> Option<Domain> {
        match self {
            Self::Off => None,
            Self::Disk => Some(Domain::Disk(uuid.to_owned())),
            Self::Label(key) => Some(Domain::Label(key.clone(), labels.get(key)?.clone())),
            Self::Datastore => Some(Domain::Datastore),
        }
    }
}

/// Changes domain and time of deduplication; `None` leaves them as they are. Deduplication that is switched on is at
/// write-back, unless another time is given.
pub(crate) fn change_deduplication(
    new: Option<&Deduplication>,
    new_at: Option<ReduceAt>,
    dedup: &mut Deduplication,
    at: &mut ReduceAt,
) -> Result<(), error::Error> {
    let was_off = dedup.is_off();
    let time = at.changed([was_off, new.map_or(was_off, Deduplication::is_off)], new_at);
    *at = time.ok_or_else(|| {
        error::Error::new(
            error::ErrorKind::Invalid,
            "a time of deduplication is given, but deduplication is off: say among which disks too, such as \
             --dedup disk",
        )
    })?;
    new.into_iter().for_each(|new| dedup.clone_from(new));
    Ok(())
}

/// Data among which servers store equal blocks once. A disk belongs to it only by its own setting, so that no disk
/// shares blocks with others because of the setting of another disk.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Domain {
    /// The disk with this UUID and its snapshots.
    Disk(String),
    /// The disks with this setting and this label, and their snapshots.
    Label(String, String),
    /// The disks with this setting, and their snapshots.
    Datastore,
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(uuid) => write!(f, "disk:{uuid}"),
            Self::Label(key, value) => write!(f, "{LABEL}{key}={value}"),
            Self::Datastore => f.write_str("datastore"),
        }
    }
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
    fn a_disk_belongs_to_the_domain_of_its_own_setting_only() {
        let labels = |value: &str| [("tenant".to_owned(), value.to_owned())].into();
        let of_label = Deduplication::Label("tenant".into());
        let domain = |of: &Deduplication, uuid: &str, value: &str| of.domain(uuid, &labels(value)).unwrap();
        assert_eq!(domain(&of_label, "1", "a"), domain(&of_label, "2", "a"));
        assert_ne!(domain(&of_label, "1", "a"), domain(&of_label, "2", "b"));
        assert_ne!(domain(&Deduplication::Disk, "1", "a"), domain(&Deduplication::Disk, "2", "a"));
        assert_ne!(domain(&Deduplication::Datastore, "1", "a"), domain(&of_label, "1", "a"));
        assert_eq!(Deduplication::Off.domain("1", &labels("a")), None);
        assert_eq!(of_label.domain("1", &[("other".to_owned(), "a".to_owned())].into()), None);
    }

    #[test]
    fn a_time_is_read_as_it_is_shown() {
        for time in [ReduceAt::Idle, ReduceAt::WriteBack, ReduceAt::Inline] {
            assert_eq!(time.to_string().parse(), Ok(time));
            assert_eq!(serde_json::to_string(&time).unwrap(), format!("\"{time}\""));
        }
        assert!("noon".parse::<ReduceAt>().unwrap_err().contains("noon"));
    }

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
