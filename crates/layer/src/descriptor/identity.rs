//! Identifiers in a descriptor: the CID, which changes with the content, and the UUID of the disk, which stays.

use std::fmt;

/// The content ID of a disk (`CID`): a random number that changes on the first write after each opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentId(u32);

impl ContentId {
    /// The CID of a disk that was never written.
    pub const INITIAL: Self = Self(0xffff_fffe);
    /// The value of `parentCID` without a parent; no disk has this CID.
    const NONE: u32 = 0xffff_ffff;

    /// The CID with this number; `None` for the number that means no parent.
    pub fn new(number: u32) -> Option<Self> {
        (number != Self::NONE).then_some(Self(number))
    }

    /// A new CID: neither of the two reserved numbers, nor 0, which some readers treat as missing.
    pub fn random(random: &mut dyn FnMut() -> u64) -> Self {
        // Both halves of the random number are combined, because some generators hardly vary the low or the high bits.
        let drawn = random();
        let number = (drawn ^ (drawn >> 32)) as u32;
        Self(if matches!(number, 0 | 0xffff_fffe | Self::NONE) { 0x1a31_7a5e } else { number })
    }

    /// A new CID of at most `digits` hexadecimal digits, different from `old`, even if the generator repeats its
    /// numbers.
    pub(super) fn after(old: Self, digits: usize, random: &mut dyn FnMut() -> u64) -> Self {
        let mask = u32::MAX >> (32 - 4 * digits.clamp(1, 8));
        // If the random number is `old` or reserved, at least one of the other two candidates is usable: they differ
        // from `old` in one bit each.
        let candidates = [Self::random(random).0, old.0 ^ 2, old.0 ^ 4].map(|number| Self::new(number & mask));
        let fresh = |content: &Self| *content != old && *content != Self::INITIAL;
        candidates.into_iter().flatten().find(fresh).unwrap_or(old)
    }

    /// The CID as a number.
    pub fn number(self) -> u32 {
        self.0
    }
}

impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// The text of `parentCID`.
pub(super) fn parent_text(parent: Option<ContentId>) -> String {
    format!("{:08x}", parent.map_or(ContentId::NONE, ContentId::number))
}

/// Parses 1 to 8 hexadecimal digits; QEMU writes no leading zeros.
pub(super) fn parse_number(text: &str) -> Option<u32> {
    let fits = (1..=8).contains(&text.len()) && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    if fits { u32::from_str_radix(text, 16).ok() } else { None }
}

/// The text of `ddb.longContentID`: 32 digits that end with the CID.
pub(super) fn long_content(content: ContentId, random: &mut dyn FnMut() -> u64) -> String {
    format!("{:016x}{:08x}{content}", random(), random() as u32)
}

/// The UUID of a disk (`ddb.uuid`), in VMware's notation of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// A new UUID in VMware's range: it begins with 60 00 C2 9.
    pub fn random(random: &mut dyn FnMut() -> u64) -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&random().to_le_bytes());
        bytes[8..].copy_from_slice(&random().to_le_bytes());
        bytes[..3].copy_from_slice(&[0x60, 0x00, 0xc2]);
        bytes[3] = 0x90 | (bytes[3] & 0x0f);
        Self(bytes)
    }

    /// Parses a text such as `60 00 C2 9a 1d 7b 49 44-dc 53 e6 d3 e5 89 7b 0d`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 16];
        let mut parts = text.split([' ', '-']);
        for byte in &mut bytes {
            let digits = parts.next()?;
            if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return None;
            }
            *byte = u8::from_str_radix(digits, 16).ok()?;
        }
        parts.next().is_none().then_some(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            match index {
                0 => {}
                8 => f.write_str("-")?,
                _ => f.write_str(" ")?,
            }
            // VMware writes the byte C2 of its prefix in upper case and all other digits in lower case.
            match (index, byte) {
                (2, 0xc2) => f.write_str("C2")?,
                _ => write!(f, "{byte:02x}")?,
            }
        }
        Ok(())
    }
}
