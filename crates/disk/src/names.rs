//! Names and identities.

use error::{Error, ErrorKind, Result};

/// The longest name of a disk or snapshot, in bytes.
const NAME_MAX: usize = 200;

/// Checks the name of a disk or snapshot: it has to survive shells, URIs and export names.
pub fn check(what: &str, name: &str) -> Result<()> {
    let refuse =
        |why: &str| Err(Error::new(ErrorKind::Invalid, format!("{what} name '{}' {why}", name.escape_debug())));
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

/// A new random identity (RFC 9562, version 4).
pub fn new_uuid() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        let count = rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::io("asking the kernel for random bytes", e.into()))?;
        filled += count;
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(bytes)
}

/// The usual text form of an identity.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Reads the usual text form of an identity.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let hex: String = text.split('-').collect();
    if hex.len() != 32 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    Some(u128::from_str_radix(&hex, 16).ok()?.to_be_bytes())
}

/// Splits `disk@snapshot`.
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
    fn names_that_could_mislead_are_refused() {
        for bad in ["", "-x", ".hidden", "a@b", "a/b", "a b", "a\n", "a%20", &"x".repeat(NAME_MAX + 1)] {
            assert!(check("disk", bad).is_err(), "{bad:?}");
        }
        for good in ["a", "web-01", "vm_7.root", "größe", &"x".repeat(NAME_MAX)] {
            assert!(check("disk", good).is_ok(), "{good:?}");
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
        assert_eq!(parse_uuid("4"), None);
    }
}
