//! Names and identities.

use error::text::is_hidden;
use error::{Error, ErrorKind, Result};
use uuid::fmt::Hyphenated;
use uuid::{Builder, Uuid};

/// The longest name of a disk or snapshot, in bytes.
const NAME_MAX: usize = 200;

/// Checks the name of a new disk or snapshot: it must be usable unquoted in shells, URIs and NBD export names, and
/// must not contain invisible characters, because two names could look alike.
pub fn check(what: &str, name: &str) -> Result<()> {
    check_existing(what, name)?;
    match name.chars().find(|c| is_hidden(*c)) {
        Some(bad) => Err(refused(what, name, &format!("must not contain the invisible character '{}'", escape(bad)))),
        None => Ok(()),
    }
}

/// As [`check`], for the name of a disk or snapshot that may have been created by an older version, which permitted
/// invisible characters.
pub fn check_existing(what: &str, name: &str) -> Result<()> {
    let refuse = |why: &str| Err(refused(what, name, why));
    if name.is_empty() {
        return refuse("is empty");
    }
    if name.len() > NAME_MAX {
        return refuse(&format!("is longer than {NAME_MAX} bytes"));
    }
    if name.starts_with(['-', '.']) {
        return refuse("must not begin with '-' or '.'");
    }
    if let Some(bad) = name.chars().find(|c| c.is_control() || c.is_whitespace() || "@/\\?#%&\"'`$*<>|;:".contains(*c))
    {
        return refuse(&format!("must not contain '{}'", bad.escape_debug()));
    }
    Ok(())
}

fn refused(what: &str, name: &str, why: &str) -> Error {
    let name: String = name.chars().map(escape).collect();
    Error::new(ErrorKind::Invalid, format!("{what} name '{name}' {why}"))
}

fn escape(character: char) -> String {
    match is_hidden(character) {
        true => character.escape_unicode().to_string(),
        false => character.escape_debug().to_string(),
    }
}

/// A new random identity (RFC 9562, version 4).
pub fn new_uuid() -> Result<[u8; 16]> {
    Ok(Builder::from_random_bytes(backend::random::bytes()?).into_uuid().into_bytes())
}

/// The usual text form of an identity.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    Uuid::from_bytes(*uuid).to_string()
}

/// Parses the usual text form of an identity; other forms give `None`.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    Some(text.parse::<Hyphenated>().ok()?.into_uuid().into_bytes())
}

/// `wanted`, or, if that is taken, `wanted` with the lowest number from 2 on that makes it free.
pub fn free(wanted: &str, mut is_taken: impl FnMut(&str) -> bool) -> String {
    let mut name = wanted.to_owned();
    let mut number = 2;
    while is_taken(&name) {
        name = format!("{wanted}-{number}");
        number += 1;
    }
    name
}

/// Splits `disk@snapshot` into its two names.
pub fn split(target: &str) -> (&str, Option<&str>) {
    match target.split_once('@') {
        Some((disk, snapshot)) => (disk, Some(snapshot)),
        None => (target, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_ambiguous_characters_are_refused() {
        for bad in ["", "-x", ".hidden", "a@b", "a/b", "a b", "a\n", "a%20", &"x".repeat(NAME_MAX + 1)] {
            assert!(check("disk", bad).is_err(), "{bad:?}");
        }
        for good in ["a", "web-01", "vm_7.root", "größe", &"x".repeat(NAME_MAX)] {
            assert!(check("disk", good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn invisible_characters_are_refused_in_new_names_only() {
        for bad in ["a\u{202e}b", "\u{200b}a", "a\u{ad}", "web\u{3164}"] {
            let why = check("disk", bad).unwrap_err().to_string();
            assert!(why.contains("must not contain the invisible character '\\u{"), "{why}");
            assert!(!why.contains(bad), "{why}");
            assert!(check_existing("disk", bad).is_ok());
        }
    }

    #[test]
    fn identities_differ_and_have_the_usual_form() {
        let (a, b) = (new_uuid().unwrap(), new_uuid().unwrap());
        assert_ne!(a, b);
        let text = uuid_text(&a);
        assert_eq!(text.len(), 36);
        assert_eq!(&text[14..15], "4");
        assert_eq!(parse_uuid(&text), Some(a));
        for other in ["4", &text.replace('-', ""), &format!("{{{text}}}"), &text.replacen('-', "", 1), &text[1..]] {
            assert_eq!(parse_uuid(other), None, "{other}");
        }
        let bytes = std::array::from_fn(|index| 0x11 * index as u8);
        assert_eq!(uuid_text(&bytes), "00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(parse_uuid("00112233-4455-6677-8899-AABBCCDDEEFF"), Some(bytes));
    }
}
