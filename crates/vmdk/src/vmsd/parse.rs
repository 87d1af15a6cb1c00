//! Parsing a list of snapshots. Lines are `key = "value"`; keys compare without regard to case; a character that cannot
//! stand between quotes is encoded as `|` and two hexadecimal digits.

use super::{DISKS_MAX, LINE_MAX, SNAPSHOTS_MAX, TEXT_MAX, Vmsd, VmsdDisk, VmsdSnapshot};
use crate::{Error, ErrorKind, Result};
use layer::descriptor::Encoding;
use std::collections::{BTreeMap, HashSet};

/// One snapshot while its lines are read.
#[derive(Default)]
struct Raw {
    uid: Option<u32>,
    parent: Option<u32>,
    state: String,
    name: String,
    description: String,
    high: i64,
    low: i64,
    disks: BTreeMap<usize, VmsdDisk>,
}

impl Vmsd {
    /// Reads a list of snapshots.
    ///
    /// # Errors
    /// `Corrupt` if the list is too long, contains NUL bytes, or has a UID twice.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > TEXT_MAX {
            return Err(corrupt(format!("the list of snapshots has {} bytes: too many", bytes.len())));
        }
        if bytes.contains(&0) {
            return Err(corrupt("the list of snapshots is no text"));
        }
        let encoding = encoding_of(bytes);
        let mut list = Self::default();
        let mut raw: BTreeMap<usize, Raw> = BTreeMap::new();
        for line in bytes.split(|byte| *byte == b'\n') {
            let Some((key, value)) = split_line(line)? else { continue };
            let value = || unescape(value, encoding.as_ref());
            match key.as_str() {
                "snapshot.lastuid" => list.last_uid = number(&value()).unwrap_or(0),
                "snapshot.current" => list.current = number(&value()).filter(|uid| *uid != 0),
                "snapshot.needconsolidate" => list.need_consolidate = value().eq_ignore_ascii_case("true"),
                _ => {
                    let Some((index, rest)) = indexed(&key, "snapshot") else { continue };
                    if index >= SNAPSHOTS_MAX {
                        return Err(corrupt(format!("the list has more than {SNAPSHOTS_MAX} snapshots")));
                    }
                    raw.entry(index).or_default().take(rest, &value())?;
                }
            }
        }
        let mut seen = HashSet::new();
        for raw in raw.into_values() {
            // An entry without a UID is the remnant of a deleted snapshot.
            let Some(uid) = raw.uid else { continue };
            if !seen.insert(uid) {
                return Err(corrupt(format!("two snapshots of the list have the number {uid}")));
            }
            let halves = u64::try_from(raw.high).unwrap_or(0).checked_mul(1 << 32);
            let created = halves.map_or(0, |high| high | u64::from(raw.low as u32));
            list.snapshots.push(VmsdSnapshot {
                uid,
                parent: raw.parent.filter(|parent| *parent != 0),
                state: raw.state,
                name: raw.name,
                description: raw.description,
                created,
                disks: raw.disks.into_values().filter(|disk| !disk.file.is_empty()).collect(),
            });
        }
        Ok(list)
    }
}

impl Raw {
    fn take(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            ".uid" => self.uid = number(value),
            ".parent" => self.parent = number(value),
            ".filename" => self.state = value.to_owned(),
            ".displayname" => self.name = value.to_owned(),
            ".description" => self.description = value.to_owned(),
            ".createtimehigh" => self.high = value.trim().parse().unwrap_or(0),
            ".createtimelow" => self.low = value.trim().parse().unwrap_or(0),
            _ => {
                let Some((index, rest)) = indexed(key, ".disk") else { return Ok(()) };
                if index >= DISKS_MAX {
                    return Err(corrupt(format!("a snapshot of the list has more than {DISKS_MAX} disks")));
                }
                match rest {
                    ".filename" => self.disks.entry(index).or_default().file = value.to_owned(),
                    ".node" => self.disks.entry(index).or_default().node = value.to_owned(),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// The encoding named in the list; UTF-8 if the list names none.
fn encoding_of(bytes: &[u8]) -> Option<Encoding> {
    let lines = bytes.split(|byte| *byte == b'\n').take(64);
    let mut named = lines.filter_map(|line| split_line(line).ok().flatten());
    let (_, name) = named.find(|(key, _)| key == ".encoding")?;
    Encoding::named(std::str::from_utf8(name).ok()?)
}

/// The lower-case key and the value of a line; `None` for other lines.
fn split_line(line: &[u8]) -> Result<Option<(String, &[u8])>> {
    if line.len() > LINE_MAX {
        return Err(corrupt(format!("the list of snapshots has a line of more than {LINE_MAX} bytes")));
    }
    let line = line.trim_ascii();
    let Some(equals) = line.iter().position(|byte| *byte == b'=') else { return Ok(None) };
    let (key, value) = (line[..equals].trim_ascii(), line[equals + 1..].trim_ascii());
    if key.starts_with(b"#") {
        return Ok(None);
    }
    let Ok(key) = std::str::from_utf8(key) else { return Ok(None) };
    let value = value.strip_prefix(b"\"").unwrap_or(value);
    let value = value.strip_suffix(b"\"").unwrap_or(value);
    Ok(Some((key.to_ascii_lowercase(), value)))
}

/// The number after a word, and the text after the number.
fn indexed<'a>(key: &'a str, word: &str) -> Option<(usize, &'a str)> {
    let rest = key.strip_prefix(word)?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    // A number with too many digits counts as an index beyond every limit.
    let index = if end > 9 { usize::MAX } else { rest[..end].parse().ok()? };
    Some((index, &rest[end..]))
}

fn number(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

/// Decodes `|` with two hexadecimal digits, and the character encoding.
fn unescape(value: &[u8], encoding: Option<&Encoding>) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut at = 0;
    while at < value.len() {
        let digits = (value[at] == b'|').then(|| value.get(at + 1..at + 3)).flatten();
        let digits = digits.filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let byte = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        match byte {
            Some(byte) => {
                bytes.push(byte);
                at += 3;
            }
            None => {
                bytes.push(value[at]);
                at += 1;
            }
        }
    }
    let decoded = encoding.and_then(|encoding| encoding.decode(&bytes, "a name").ok());
    decoded.unwrap_or_else(|| String::from_utf8_lossy(&bytes).into_owned())
}

fn corrupt(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, message)
}
