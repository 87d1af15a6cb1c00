//! VMware's text files with a machine's configuration (`.vmx`) and its snapshots (`.vmsd`):
//!
//! ```text
//! .encoding = "UTF-8"
//! # a comment
//! displayName = "web"
//! annotation = "a |22quoted|22 word"      a bar and two hexadecimal digits are a byte
//! ```
//!
//! 1. [`Dictionary::parse`] returns a dictionary or an error that names the line, for any bytes, in linear time.
//! 2. Keys are compared without regard to case. A key that occurs twice is an error, as it is for VMware.

use error::{Error, ErrorKind, Result};
use std::collections::BTreeMap;

/// Longest line, in bytes.
const LINE_MAX: usize = 64 << 10;
/// Most keys.
const KEYS_MAX: usize = 64 << 10;

/// The keys and values of a file.
pub struct Dictionary {
    origin: String,
    /// Values with their line numbers, by key in lower case.
    values: BTreeMap<String, (String, usize)>,
}

impl Dictionary {
    /// Parses a file; errors call it `origin`.
    pub fn parse(bytes: &[u8], origin: &str) -> Result<Self> {
        let text = decode(bytes, origin)?;
        let mut values: BTreeMap<String, (String, usize)> = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let number = index + 1;
            let wrong = |what: &str| {
                let text = format!("'{origin}', line {number}: {what}");
                Error::new(ErrorKind::Invalid, text)
            };
            let line = line.trim().trim_start_matches('\u{feff}');
            // The first line may be `#!` with the path of Workstation's program, which old versions for Linux wrote.
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if line.len() > LINE_MAX {
                return Err(wrong("it is too long"));
            }
            let (key, value) = line.split_once('=').ok_or_else(|| wrong("it is not KEY = \"VALUE\""))?;
            let (key, value) = (key.trim(), value.trim());
            if key.is_empty() || key.chars().any(|c| c.is_whitespace() || c == '"' || c.is_control()) {
                return Err(wrong("it is not KEY = \"VALUE\""));
            }
            let value = match value.strip_prefix('"') {
                Some(rest) => rest.strip_suffix('"').ok_or_else(|| wrong("the value has no closing quote"))?,
                // Files that were edited by hand may have numbers without quotes.
                None => value,
            };
            let value = unescape(value).ok_or_else(|| wrong("'|' is not followed by two hexadecimal digits"))?;
            if values.len() == KEYS_MAX {
                return Err(wrong("the file has too many keys"));
            }
            if let Some((_, before)) = values.insert(key.to_ascii_lowercase(), (value, number)) {
                return Err(wrong(&format!("'{}' is defined in line {before} already", key.escape_debug())));
            }
        }
        Ok(Self { origin: origin.to_owned(), values })
    }

    /// The value of a key; `None` if it is missing or empty.
    pub fn get(&self, key: &str) -> Option<&str> {
        let (value, _) = self.values.get(&key.to_ascii_lowercase())?;
        (!value.is_empty()).then_some(value.as_str())
    }

    /// A boolean; false if the key is missing.
    pub fn is_true(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| ["true", "yes", "1", "t", "y"].contains(&&*value.to_ascii_lowercase()))
    }

    /// A number; `None` if the key is missing.
    pub fn number(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number =
            value.trim().parse().map_err(|_| self.wrong(key, &format!("'{}' is no number", value.escape_debug())))?;
        Ok(Some(number))
    }

    /// The numbers N of the keys `PREFIXN.SUFFIX`, in ascending order.
    pub fn numbers(&self, prefix: &str, suffix: &str) -> Vec<u32> {
        let prefix = prefix.to_ascii_lowercase();
        let begun = self.values.range(prefix.clone()..).take_while(|(key, _)| key.starts_with(&prefix));
        let number = |key: &str| {
            let digits = key.strip_prefix(&prefix)?.strip_suffix(&suffix.to_ascii_lowercase())?.strip_suffix('.')?;
            let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
            digits.parse().ok().filter(|_| plain)
        };
        let mut all: Vec<u32> = begun.filter_map(|(key, _)| number(key)).collect();
        all.sort_unstable();
        all
    }

    /// An error about the value of a key, with the line.
    pub fn wrong(&self, key: &str, what: &str) -> Error {
        let line = self.values.get(&key.to_ascii_lowercase()).map_or(0, |(_, line)| *line);
        let text = format!("'{}', line {line}, {key}: {what}", self.origin);
        Error::new(ErrorKind::Invalid, text)
    }
}

/// Replaces `|XX` by the byte; `None` if the digits are missing or the bytes are not UTF-8.
fn unescape(value: &str) -> Option<String> {
    if !value.contains('|') {
        return Some(value.to_owned());
    }
    let mut parts = value.split('|');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

/// The text of a file, decoded from the encoding that the file names.
fn decode(bytes: &[u8], origin: &str) -> Result<String> {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return Ok(text.to_owned());
    }
    // The encoding's name is ASCII, so it can be found before the encoding is known.
    let plain: String = bytes.iter().map(|byte| char::from(*byte)).collect();
    let encoding = plain.lines().find_map(|line| line.trim().strip_prefix(".encoding")?.split('"').nth(1));
    let wrong = |line: usize| {
        let named = encoding.unwrap_or("UTF-8");
        let text = format!(
            "'{origin}', line {line}: it is not {named}, or {named} is not supported: convert the file to UTF-8, and \
             change .encoding"
        );
        Error::new(ErrorKind::Invalid, text)
    };
    let western = ["windows-1252", "iso-8859-1", "latin1"];
    let known = encoding.is_some_and(|name| western.contains(&&*name.to_ascii_lowercase()));
    for (index, line) in plain.lines().enumerate() {
        let strange = |c: char| !c.is_ascii() && (!known || ('\u{80}'..'\u{a0}').contains(&c));
        if line.contains(strange) {
            return Err(wrong(index + 1));
        }
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn keys_and_values() {
        let text =
            b"#!/usr/bin/vmware\n.encoding = \"UTF-8\"\r\n\nDisplayName = \"a |22b|22 = c\"\nscsi0:0.present=TRUE\n\
            ethernet0.present = \"TRUE\"\nethernet10.present = \"FALSE\"\nethernet2.present = \"TRUE\"\nempty = \"\"\n";
        let all = Dictionary::parse(text, "x").unwrap();
        assert_eq!(all.get("displayname"), Some("a \"b\" = c"));
        assert!(all.is_true("SCSI0:0.present") && !all.is_true("ethernet10.present") && !all.is_true("nothing"));
        assert_eq!((all.get("empty"), all.numbers("ethernet", "present")), (None, vec![0, 2, 10]));
        let error = all.number("displayName").unwrap_err().to_string();
        assert!(error.contains("'x', line 4, displayName"), "{error}");
    }

    #[test]
    fn wrong_lines_are_named() {
        for (text, line) in [
            (&b"a = \"1\"\nb\n"[..], 2),
            (b"a = \"1\nb = \"2\"", 1),
            (b"a = \"1\"\nA = \"2\"", 2),
            (b"a = \"x|2\"", 1),
            (b"a = \"x|+1\"", 1),
            (b"\n\n = \"x\"", 3),
            (b"a = \"1\"\nb = \"\xff\"", 2),
            (b".encoding = \"Shift_JIS\"\nb = \"\x93\xfa\"", 2),
        ] {
            let error = Dictionary::parse(text, "x").err().unwrap().to_string();
            assert!(error.starts_with(&format!("'x', line {line}: ")), "{error}");
        }
        let western = Dictionary::parse(b".encoding = \"windows-1252\"\na = \"\xfc\"", "x").unwrap();
        assert_eq!(western.get("a"), Some("\u{fc}"));
    }
}
