//! Memory sizes in the definition file, such as `256M`.

use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serializer};

/// Encoding of a memory size that may be missing.
pub mod optional {
    use serde::{Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => super::serialize(bytes, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
        super::deserialize(deserializer).map(Some)
    }
}

const UNITS: [(char, u32); 3] = [('T', 40), ('G', 30), ('M', 20)];

pub fn serialize<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    let unit = UNITS.iter().find(|(_, shift)| *bytes != 0 && bytes.is_multiple_of(1 << shift));
    match unit {
        Some((letter, shift)) => serializer.serialize_str(&format!("{}{letter}", bytes >> shift)),
        None => serializer.serialize_str(&bytes.to_string()),
    }
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    let wrong = || D::Error::invalid_value(Unexpected::Str(&text), &"a size such as \"256M\" or \"2G\"");
    let (digits, shift) = match text.chars().last().and_then(|last| UNITS.iter().find(|(unit, _)| *unit == last)) {
        Some((unit, shift)) => (text.strip_suffix(*unit).ok_or_else(wrong)?, *shift),
        None => (text.as_str(), 0),
    };
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}
