//! Encryption of packs with a secret key that the user keeps in a file.
//!
//! ```text
//! stored body:  salt (16 bytes) | piece 0 and its tag | piece 1 and its tag | ...
//! ```
//!
//! 1. The body is cut into pieces of 64 KiB. Each piece is encrypted by ChaCha20-Poly1305 (RFC 8439), and followed by
//!    its tag of 16 bytes, so that any part of a pack can be read alone.
//! 2. Each pack has a key of its own, derived by HKDF (RFC 5869, SHA-256) from the secret and a random salt. The nonce
//!    is the number of the piece, so no nonce is used twice with a key.
//! 3. The authenticated data is the beginning of the head: a piece cannot be moved to another pack, and the lengths and
//!    places in the head cannot be changed.
//! 4. With a key, only encrypted packs are read, so that no pack can be replaced by one without encryption.
//! 5. The names and sizes in manifests are not encrypted.

use crate::hex;
use crate::pack::{HEAD, Head};
use backend::local::{LocalDirectory, LocalQueues};
use backend::replace::folder_of;
use backend::{Directory, IoMode, random, regular};
use error::{Error, ErrorKind, IoContext, Result};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Bytes of the random salt of a pack.
pub const SALT: usize = 16;
/// Bytes of a piece before encryption.
const PIECE: u64 = 64 << 10;
/// Bytes of the tag of a piece.
const TAG: u64 = 16;
/// Bytes of the head that are authenticated: all before the checksums.
const AUTHENTICATED: usize = 52;
/// The labels for HKDF: of the identity, which is derived from a secret, and of a pack's key, which is derived from a
/// secret and a salt.
const IDENTITY: &[&[u8]] = &[b"lamina backup key identity"];
const PACK: &[&[u8]] = &[b"lamina backup pack"];
/// Most bytes of a key file.
const LENGTH_MAX: u64 = 1024;
/// The beginning of a key file.
const BEGIN: &str = "lamina-backup-key-1 ";

/// A secret key.
pub struct Key {
    secret: [u8; 32],
    id: String,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.id)
    }
}

fn failed(what: &str) -> Error {
    Error::new(ErrorKind::Io, format!("{what} failed in the cryptographic library"))
}

impl Key {
    fn new(secret: [u8; 32]) -> Result<Self> {
        let mut id = [0; 32];
        let derived = Salt::new(HKDF_SHA256, &[]).extract(&secret);
        let filled = derived.expand(IDENTITY, HKDF_SHA256).and_then(|okm| okm.fill(&mut id));
        filled.map_err(|_| failed("deriving the identity of a key"))?;
        Ok(Self { secret, id: hex::encode(&id[..8]) })
    }

    /// Creates a key in a new file that only its owner can read. On return the key is durable.
    pub fn create(path: &Path) -> Result<Self> {
        let during = || format!("writing the key '{}'", path.display());
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidFilename)).during(during)?;
        let folder = LocalDirectory::open(folder_of(path), LocalQueues::Threads).during(during)?.keep_owner();
        let key = Self::new(random::bytes()?)?;
        key.write(&folder, name).during(during)?;
        Ok(key)
    }

    /// Writes the key to a new file. The name of the file is durable too: with the key, all backups would be lost that
    /// were made with it.
    pub(crate) fn write(&self, directory: &dyn Directory, name: &str) -> io::Result<()> {
        let text = format!("{BEGIN}{}\n", hex::encode(&self.secret));
        let file = directory.create(name, IoMode::Buffered)?;
        let written = file.write_at(&[text.as_bytes()], 0, false).and_then(|()| file.sync());
        // A part of a key is no use, and would prevent the next attempt.
        written.and_then(|()| directory.sync()).inspect_err(|_| drop(directory.remove(name)))
    }

    /// Reads the key in a file.
    pub fn read(path: &Path) -> Result<Self> {
        // A pipe is refused: a job that waits for its other end cannot be cancelled.
        let bytes = regular::read(path, LENGTH_MAX, "key made by 'lamina backup key'")?;
        let text = String::from_utf8_lossy(&bytes);
        let secret = text.trim_end().strip_prefix(BEGIN).and_then(hex::decode);
        let secret = secret.and_then(|secret| secret.try_into().ok());
        Self::new(secret.ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("'{}' is not a key made by 'lamina backup key'", path.display()))
        })?)
    }

    /// The identity of the key, which does not reveal the key.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The key of one pack.
    fn of_pack(&self, salt: &[u8]) -> Result<LessSafeKey> {
        let derived: Prk = Salt::new(HKDF_SHA256, salt).extract(&self.secret);
        let okm = derived.expand(PACK, &CHACHA20_POLY1305);
        okm.map(|okm| LessSafeKey::new(UnboundKey::from(okm))).map_err(|_| failed("deriving the key of a pack"))
    }

    /// The stored form of a body.
    pub(crate) fn seal(&self, head: &Head, body: &[u8]) -> Result<Vec<u8>> {
        let salt: [u8; SALT] = random::bytes()?;
        let key = self.of_pack(&salt)?;
        let mut out = Vec::with_capacity(sealed_length(body.len() as u64) as usize);
        out.extend_from_slice(&salt);
        for (number, piece) in body.chunks(PIECE as usize).enumerate() {
            let start = out.len();
            out.extend_from_slice(piece);
            let tag = key.seal_in_place_separate_tag(nonce(number as u64), authenticated(head), &mut out[start..]);
            out.extend_from_slice(tag.map_err(|_| failed("encrypting"))?.as_ref());
        }
        Ok(out)
    }

    /// A range of the body, from the stored bytes of [`stored_range`].
    pub(crate) fn open(&self, head: &Head, salt: &[u8], range: &Range<u64>, stored: &[u8]) -> Result<Vec<u8>> {
        let key = self.of_pack(salt)?;
        let first = range.start / PIECE;
        let mut out = Vec::with_capacity(stored.len());
        for (number, piece) in (first..).zip(stored.chunks((PIECE + TAG) as usize)) {
            let mut piece = piece.to_vec();
            let plain = key.open_in_place(nonce(number), authenticated(head), &mut piece);
            let plain = plain.map_err(|_| {
                Error::new(
                    ErrorKind::Corrupt,
                    "the pack was changed after it was encrypted: it fails its authentication",
                )
            })?;
            out.extend_from_slice(plain);
        }
        let start = (range.start - first * PIECE) as usize;
        let part = out.get(start..start + (range.end - range.start) as usize).map(<[u8]>::to_vec);
        part.ok_or_else(|| Error::new(ErrorKind::Corrupt, "the pack ends within a piece"))
    }
}

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

fn authenticated(head: &Head) -> Aad<[u8; AUTHENTICATED]> {
    let head = head.encode();
    Aad::from(std::array::from_fn(|at| head[at]))
}

/// Bytes of the stored form of a body.
pub(crate) fn sealed_length(body: u64) -> u64 {
    SALT as u64 + body + body.div_ceil(PIECE) * TAG
}

/// The range of a pack that has the pieces with a range of the body.
pub(crate) fn stored_range(range: &Range<u64>, body: u64) -> Range<u64> {
    let place = |piece: u64| (HEAD + SALT) as u64 + piece * (PIECE + TAG);
    let end = place(range.end.div_ceil(PIECE)).min(HEAD as u64 + sealed_length(body));
    place(range.start / PIECE)..end
}

/// Reads parts of one pack, encrypted or not.
pub(crate) struct PackReader {
    /// The head.
    pub head: Head,
    /// The key, if the pack is encrypted.
    pub key: Option<Arc<Key>>,
    /// The salt, if the pack is encrypted.
    pub salt: Vec<u8>,
}

/// Reads stored bytes of a pack.
pub(crate) type Fetch<'a> = &'a mut dyn FnMut(Range<u64>) -> Result<Vec<u8>>;

impl PackReader {
    /// A reader of the pack with that head. `key` is the key of the backup, if the backup is encrypted.
    pub fn new(head: Head, key: Option<&Arc<Key>>, fetch: Fetch<'_>) -> Result<Self> {
        head.check_sealed(key.is_some())?;
        let salt = if head.sealed { fetch(HEAD as u64..(HEAD + SALT) as u64)? } else { Vec::new() };
        Ok(Self { head, key: key.cloned(), salt })
    }

    /// Bytes of the pack, by the offsets that they have without encryption.
    pub fn read(&self, range: Range<u64>, fetch: Fetch<'_>) -> Result<Vec<u8>> {
        let Some(key) = self.key.as_ref().filter(|_| self.head.sealed) else { return fetch(range) };
        let plain = range.start - HEAD as u64..range.end - HEAD as u64;
        if plain.is_empty() {
            return Ok(Vec::new());
        }
        let stored = fetch(stored_range(&plain, u64::from(self.head.body)))?;
        key.open(&self.head, &self.salt, &plain, &stored)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use testkit::Random;

    fn head(body: u32) -> Head {
        Head { backup: [3; 16], number: 1, first: 0, end: 1, index: 0, body, body_sum: 7, index_sum: 8, sealed: true }
    }

    #[test]
    fn every_range_is_opened_and_every_change_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let key = Arc::new(Key::create(&path).unwrap());
        assert_eq!(Key::read(&path).unwrap().id(), key.id());
        assert_eq!(Key::create(&path).unwrap_err().kind(), ErrorKind::Exists);
        let mut random = Random::new(1);
        for length in [0, 1, 65_535, 65_536, 65_537, 300_000] {
            let body = random.bytes(length);
            let head = head(length as u32);
            let sealed = key.seal(&head, &body).unwrap();
            assert_eq!(sealed.len() as u64, sealed_length(length as u64));
            let whole = [&[0; HEAD][..], &sealed].concat();
            let mut fetch = |range: Range<u64>| Ok(whole[range.start as usize..range.end as usize].to_vec());
            let reader = PackReader::new(head, Some(&key), &mut fetch).unwrap();
            for _ in 0..40 {
                let start = random.index(length + 1);
                let end = start + random.index(length + 1 - start);
                let range = (HEAD + start) as u64..(HEAD + end) as u64;
                assert!(reader.read(range, &mut fetch).unwrap() == body[start..end], "{start}..{end} of {length}");
            }
            let all = 0..length as u64;
            for _ in 0..if length > 0 { 20 } else { 0 } {
                let mut bad = sealed.clone();
                let at = random.index(bad.len());
                bad[at] ^= 1 << random.below(8);
                let opened = key.open(&head, &bad[..SALT], &all, &bad[SALT..]);
                assert_eq!(opened.unwrap_err().kind(), ErrorKind::Corrupt, "byte {at} of {length}");
            }
            if length > 0 {
                let other = Head { number: 2, ..head };
                assert!(key.open(&other, &sealed[..SALT], &all, &sealed[SALT..]).is_err());
                let other = Key::create(&folder.path().join(format!("{length}"))).unwrap();
                assert!(other.open(&head, &sealed[..SALT], &all, &sealed[SALT..]).is_err());
            }
        }
        assert!(PackReader::new(head(1), None, &mut |_| Ok(Vec::new())).is_err());
    }

    #[test]
    fn damaged_key_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        Key::create(&path).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        for bad in ["", "\n", &good[..good.len() - 2], &good.replace("key-1", "key-2"), &format!("{good}0")] {
            std::fs::write(&path, bad).unwrap();
            assert_eq!(Key::read(&path).unwrap_err().kind(), ErrorKind::Invalid, "{bad:?}");
        }
        std::fs::write(&path, good.trim_end()).unwrap();
        Key::read(&path).unwrap();
    }
}
