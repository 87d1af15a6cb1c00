//! The manifest: one line per member, `SHA256(name)= digits`.

use super::MEMBERS_MAX;
use super::archive::plain_name;
use super::digest::{Algorithm, hex, unhex};
use crate::{Error, ErrorKind, Result};

/// Digests by name.
pub(super) struct Manifest(Vec<(String, Algorithm, Vec<u8>)>);

impl Manifest {
    pub(super) fn parse(text: &[u8]) -> Result<Self> {
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, format!("the manifest is damaged: {what}"));
        let text = std::str::from_utf8(text).map_err(|_| corrupt("it is no text".to_owned()))?;
        let mut entries: Vec<(String, Algorithm, Vec<u8>)> = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim_matches([' ', '\t', '\r', '\0']);
            if line.is_empty() {
                continue;
            }
            let wrong = || corrupt(format!("line {number} is not of the form SHA256(name)= digits"));
            let (algorithm, rest) = line.split_once('(').ok_or_else(wrong)?;
            // A name may contain brackets itself, so the last bracket is the closing one.
            let (name, digits) = rest.rsplit_once(')').ok_or_else(wrong)?;
            let digits = digits.trim_start().strip_prefix('=').ok_or_else(wrong)?.trim();
            let Some(algorithm) = Algorithm::named(algorithm.trim()) else {
                let what = format!("the manifest uses {:?}; SHA1, SHA256 and SHA512 can be checked", algorithm.trim());
                return Err(Error::new(ErrorKind::Unsupported, what));
            };
            let digest = unhex(digits).filter(|digest| digest.len() == algorithm.length()).ok_or_else(wrong)?;
            let name = plain_name(name.strip_prefix("./").unwrap_or(name))?;
            if entries.len() == MEMBERS_MAX || entries.iter().any(|(own, ..)| own == name) {
                return Err(corrupt(format!("line {number} repeats a name, or exceeds {MEMBERS_MAX} names")));
            }
            entries.push((name.to_owned(), algorithm, digest));
        }
        Ok(Self(entries))
    }

    /// All entries, in their order.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, Algorithm, &[u8])> {
        self.0.iter().map(|(name, algorithm, digest)| (name.as_str(), *algorithm, digest.as_slice()))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries().map(|(name, ..)| name)
    }

    /// The digest of a member.
    pub(super) fn digest(&self, name: &str) -> Option<(Algorithm, &[u8])> {
        self.entries().find(|(own, ..)| *own == name).map(|(_, algorithm, digest)| (algorithm, digest))
    }

    /// A line of a manifest. Its length depends on name and algorithm only.
    pub(super) fn line(name: &str, algorithm: Algorithm, digest: &[u8]) -> String {
        format!("{algorithm}({name})= {}\n", hex(digest))
    }
}
