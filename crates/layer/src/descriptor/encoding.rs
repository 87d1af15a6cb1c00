//! Encodings of a descriptor's text.
//!
//! lamina decodes only file names. They are decoded from UTF-8 and windows-1252. In the other encodings that VMware
//! writes (GBK, Big5, Shift_JIS and the names of code pages) only ASCII names are accepted, because their bytes are the
//! same in all these encodings. All other text is passed through as bytes.

use super::{Result, invalid, shown, unsupported};
use std::borrow::Cow;

/// The longest name of an encoding.
const NAME_MAX: usize = 64;

/// The encoding of names in a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// UTF-8, the default.
    Utf8,
    /// windows-1252.
    Windows1252,
    /// Another encoding, by its name in the descriptor: only ASCII is read and written.
    Other(String),
}

/// The characters of windows-1252 at 0x80 to 0x9f. The five unassigned codes are mapped to the control characters of
/// the same number, so that every byte has its own character.
const WINDOWS_1252: [char; 32] = [
    '\u{20ac}', '\u{81}', '\u{201a}', '\u{192}', '\u{201e}', '\u{2026}', '\u{2020}', '\u{2021}', '\u{2c6}', '\u{2030}',
    '\u{160}', '\u{2039}', '\u{152}', '\u{8d}', '\u{17d}', '\u{8f}', '\u{90}', '\u{2018}', '\u{2019}', '\u{201c}',
    '\u{201d}', '\u{2022}', '\u{2013}', '\u{2014}', '\u{2dc}', '\u{2122}', '\u{161}', '\u{203a}', '\u{153}', '\u{9d}',
    '\u{17e}', '\u{178}',
];

impl Encoding {
    /// The encoding with this name; `None` if the name is not valid.
    pub fn named(name: &str) -> Option<Self> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:+".contains(&byte);
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(plain) {
            return None;
        }
        Some(match name.to_ascii_lowercase().as_str() {
            "utf-8" | "utf8" | "us-ascii" | "ascii" => Self::Utf8,
            "windows-1252" | "cp1252" => Self::Windows1252,
            _ => Self::Other(name.to_owned()),
        })
    }

    /// The name of the encoding, as in the descriptor.
    pub fn name(&self) -> &str {
        match self {
            Self::Utf8 => "UTF-8",
            Self::Windows1252 => "windows-1252",
            Self::Other(name) => name,
        }
    }

    /// Decodes a name; `what` describes it in messages.
    pub fn decode(&self, bytes: &[u8], what: &str) -> Result<String> {
        if bytes.is_ascii() {
            return Ok(bytes.iter().map(|byte| char::from(*byte)).collect());
        }
        match self {
            Self::Utf8 => String::from_utf8(bytes.to_vec()).map_err(|_| {
                invalid(format!("{what} {} is not valid UTF-8, the encoding of its descriptor", shown(bytes)))
            }),
            Self::Windows1252 => Ok(bytes.iter().map(|byte| from_1252(*byte)).collect()),
            Self::Other(name) => Err(unsupported(format!(
                "{what} {} is written in {name}, of which only ASCII can be read; rename the file and its entry",
                shown(bytes)
            ))),
        }
    }

    /// Encodes a name.
    pub(super) fn encode<'a>(&self, text: &'a str) -> Result<Cow<'a, [u8]>> {
        if text.is_ascii() || *self == Self::Utf8 {
            return Ok(Cow::Borrowed(text.as_bytes()));
        }
        let encoded: Option<Vec<u8>> = match self {
            Self::Windows1252 => text.chars().map(to_1252).collect(),
            _ => None,
        };
        encoded.map(Cow::Owned).ok_or_else(|| {
            invalid(format!(
                "'{}' cannot be written in {}, the descriptor's encoding",
                text.escape_debug(),
                self.name()
            ))
        })
    }
}

fn from_1252(byte: u8) -> char {
    match byte {
        0x80..=0x9f => WINDOWS_1252[usize::from(byte - 0x80)],
        _ => char::from(byte),
    }
}

fn to_1252(character: char) -> Option<u8> {
    let number = u32::from(character);
    match WINDOWS_1252.iter().position(|known| *known == character) {
        Some(index) => u8::try_from(0x80 + index).ok(),
        None if (0x80..0xa0).contains(&number) => None,
        None => u8::try_from(number).ok(),
    }
}
