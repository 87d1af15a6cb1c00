//! Addresses of disks and snapshots on the command line: `DISK`, `DISK@SNAPSHOT`, and `disk:DISK` where an argument may
//! also be a path.
//!
//! This module only checks that an address is unambiguous; the datastore checks whether its names are allowed.

use clap::builder::{OsStringValueParser, TypedValueParser};
use disk::convert::Address;
use disk::{Location, Point};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The character between a disk and its snapshot.
const SEPARATOR: char = '@';

/// Parses the name of a disk or the own name of a snapshot: not empty, without `@` and control characters.
fn plain(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("a name cannot be empty".into());
    }
    if let Some(bad) = text.chars().find(|c| *c == SEPARATOR || *c == '/' || c.is_control()) {
        return Err(format!("a name cannot hold {bad:?}"));
    }
    Ok(text.into())
}

/// Parses the name of a disk.
pub fn parse_disk(text: &str) -> Result<String, String> {
    plain(text)
}

/// A snapshot: `DISK@SNAPSHOT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotAddress {
    /// The disk.
    pub disk: String,
    /// The snapshot's own name.
    pub name: String,
}

impl FromStr for SnapshotAddress {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (disk, name) =
            text.split_once(SEPARATOR).ok_or_else(|| "a snapshot is written DISK@SNAPSHOT".to_string())?;
        Ok(Self { disk: plain(disk)?, name: plain(name)? })
    }
}

impl fmt::Display for SnapshotAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{SEPARATOR}{}", self.disk, self.name)
    }
}

/// A state of a disk: `DISK` for the current state, or `DISK@SNAPSHOT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateAddress {
    /// The disk.
    pub disk: String,
    /// The state: the head or a snapshot.
    pub at: Point,
}

impl FromStr for StateAddress {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains(SEPARATOR) {
            let SnapshotAddress { disk, name } = text.parse()?;
            Ok(Self { disk, at: Point::Snapshot(name) })
        } else {
            Ok(Self { disk: plain(text)?, at: Point::Head })
        }
    }
}

/// Prefix of disk names where an argument may also be a path.
const DISK_PREFIX: &str = "disk:";

/// Source or target of a conversion: a path, `disk:DISK`, or `disk:DISK@SNAPSHOT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndAddress(pub Address);

impl FromStr for EndAddress {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix(DISK_PREFIX) {
            Some(state) => state.parse::<StateAddress>().map(|_| Self(Address::Disk(state.to_owned()))),
            None if text.is_empty() => Err("a path cannot be empty".into()),
            None => Ok(Self(Address::Path(text.into()))),
        }
    }
}

/// Parses the location of a datastore.
pub fn location() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(Location::parse)
}

/// An absolute path, which is valid in every process.
pub fn absolute(path: &Path) -> Result<PathBuf, String> {
    std::path::absolute(path).map_err(|error| format!("'{}' is no path: {error}", path.display()))
}

/// Most clones that one command makes.
pub const CLONES_MAX: u32 = 100_000;

/// Most digits that a name pattern may request.
const PATTERN_WIDTH_MAX: usize = 20;

/// A pattern for names as in printf: exactly one `%d` or `%0Nd`; `%%` is a percent sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    before: String,
    width: usize,
    after: String,
}

impl NamePattern {
    /// The pattern that is used if only a name and a count are given: `NAME-0001`, `NAME-0002`, ...
    pub fn numbered(name: &str) -> Self {
        Self { before: format!("{name}-"), width: 4, after: String::new() }
    }

    /// The name with that number.
    pub fn name(&self, number: u32) -> String {
        format!("{}{number:0width$}{}", self.before, self.after, width = self.width)
    }
}

impl FromStr for NamePattern {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is not a name pattern: it needs one %d or %04d for the number");
        let mut parts = [String::new(), String::new()];
        let mut width = None;
        let mut characters = text.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                parts[usize::from(width.is_some())].push(character);
                continue;
            }
            let mut spec = String::new();
            let end = loop {
                match characters.next() {
                    Some(digit) if digit.is_ascii_digit() && spec.len() < 3 => spec.push(digit),
                    Some(end) => break end,
                    None => return Err(wrong()),
                }
            };
            match end {
                '%' if spec.is_empty() => parts[usize::from(width.is_some())].push('%'),
                'd' if width.is_none() && (spec.is_empty() || spec.starts_with('0')) => {
                    let digits = if spec.is_empty() { 0 } else { spec.parse().map_err(|_| wrong())? };
                    if digits > PATTERN_WIDTH_MAX {
                        return Err(wrong());
                    }
                    width = Some(digits);
                }
                _ => return Err(wrong()),
            }
        }
        let [before, after] = parts;
        let pattern = Self { before, width: width.ok_or_else(wrong)?, after };
        plain(&pattern.name(1))?;
        Ok(pattern)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses() {
        let snapshot: SnapshotAddress = "vm1@before update".parse().unwrap();
        assert_eq!(snapshot.to_string(), "vm1@before update");
        assert_eq!("vm1".parse::<StateAddress>().unwrap().at, Point::Head);
        assert_eq!("vm1@a".parse::<StateAddress>().unwrap().at, Point::Snapshot("a".into()));
        for text in ["", "@", "vm1@", "@a", "vm1@a@b", "vm1", "a/b@c", "vm1@\n", "vm1@..\u{7f}"] {
            assert!(text.parse::<SnapshotAddress>().is_err(), "{text:?}");
        }
        for text in ["", "@", "vm1@", "a\0", "../vm"] {
            assert!(text.parse::<StateAddress>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn conversion_addresses_are_paths_or_disks() {
        let end = |text: &str| text.parse::<EndAddress>().unwrap().0;
        assert_eq!(end("vm.vmdk"), Address::Path("vm.vmdk".into()));
        assert_eq!(end("./disk:vm"), Address::Path("./disk:vm".into()));
        assert_eq!(end("disk:vm"), Address::Disk("vm".into()));
        assert_eq!(end("disk:vm@a"), Address::Disk("vm@a".into()));
        for text in ["", "disk:", "disk:@a", "disk:a/b"] {
            assert!(text.parse::<EndAddress>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn patterns() {
        let name = |pattern: &str, number| pattern.parse::<NamePattern>().unwrap().name(number);
        assert_eq!(name("vm-%04d", 7), "vm-0007");
        assert_eq!(name("vm-%04d", 12_345), "vm-12345");
        assert_eq!(name("%d.disk", 7), "7.disk");
        assert_eq!(name("50%%-%03d", 7), "50%-007");
        assert_eq!(NamePattern::numbered("vm").name(1), "vm-0001");
        for text in ["", "vm", "%", "%%", "%s", "%4d", "%d%d", "%0", "%099d", "%9999d", "a@%d", "%d/", "%00000001d"] {
            assert!(text.parse::<NamePattern>().is_err(), "{text}");
        }
    }
}
