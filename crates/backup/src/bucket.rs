//! A repository in a bucket of an S3-compatible server.
//!
//! 1. An object is put by one request, which the server completes as a whole or not at all. The largest object is a
//!    manifest of 512 MiB, far below the 5 GiB that one request can put, so there are no multipart uploads, and
//!    interrupted requests leave nothing.
//! 2. The server verifies the SHA-256 of what it receives. What is read has checksums in the format of the repository.
//! 3. A successful put or removal is durable, and seen by all later requests.
//! 4. Writers exclude each other by the object `lock` ([`lease`]). Without certainty that the lock is held, the holder
//!    changes nothing.
//!
//! The reasons are in `docs/adr/0048-backups-in-buckets.md`.

mod address;
mod client;
mod lease;
mod sign;
#[cfg(test)]
mod tests;

pub use address::{BucketAddress, Credentials, SCHEME};
pub use lease::LockRecord;

use crate::objects::{Objects, too_long};
use backend::Lock;
use client::{Asked, Client, Method, Timing};
use error::{Error, ErrorKind, Result};
use lease::{LOCK, Lease};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Most bytes of one part of a listing: 1000 keys of 1024 bytes, each of which may be encoded by three characters, and
/// the other members of their elements.
const LISTING_MAX: u64 = 8 << 20;
/// Most parts of a listing.
const LISTINGS_MAX: usize = 100_000;
/// Most names of a listing: packs of 60 TiB.
const NAMES_MAX: usize = 4_000_000;

/// The objects of a repository in a bucket.
pub struct Bucket {
    client: Arc<Client>,
    /// Beginning of all keys: empty, or with a slash at its end.
    prefix: String,
    /// The lock, while it is held.
    lease: Mutex<Weak<Lease>>,
}

impl Bucket {
    /// The objects at an address. No request is sent.
    ///
    /// # Errors
    /// `Invalid` if a part of the address cannot be used, or there are no certificates of authorities.
    pub fn new(address: &BucketAddress, credentials: Option<Credentials>) -> Result<Self> {
        Self::timed(address, credentials, Timing::USUAL)
    }

    fn timed(address: &BucketAddress, credentials: Option<Credentials>, timing: Timing) -> Result<Self> {
        let prefix = if address.prefix.is_empty() { String::new() } else { format!("{}/", address.prefix) };
        let client = Arc::new(Client::new(address, credentials, timing)?);
        Ok(Self { client, prefix, lease: Mutex::default() })
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Succeeds unless this process has a lock that may be lost.
    fn may_change(&self) -> Result<()> {
        let lease = self.lease.lock().upgrade();
        lease.map_or(Ok(()), |lease| lease.may_change())
    }

    fn shorter(&self, name: &str, length: u64, wanted: u64) -> Error {
        let text = format!("'{name}' in '{}' has {length} bytes, and should have {wanted}", self.place());
        Error::new(ErrorKind::Corrupt, text)
    }
}

/// The length of the whole object, from the header of an answer with a part of it, and the first byte of the part.
fn whole_length(range: &str) -> Option<(u64, u64)> {
    let (part, length) = range.strip_prefix("bytes ")?.split_once('/')?;
    Some((part.split_once('-')?.0.parse().ok()?, length.parse().ok()?))
}

/// Decodes the percent-encoding of a listing.
fn decoded(text: &str) -> Option<String> {
    let (mut out, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, others)) = rest.split_first() {
        rest = others;
        match first {
            b'%' => {
                let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
                out.push(u8::from_str_radix(digits, 16).ok()?);
                rest = &rest[2..];
            }
            b'+' => out.push(b' '),
            byte => out.push(*byte),
        }
    }
    String::from_utf8(out).ok()
}

impl Objects for Bucket {
    fn place(&self) -> &str {
        &self.client.place
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let (key, doing) = (self.key(name), format!("writing '{name}' in '{}'", self.place()));
        let asked = Asked { body: bytes, ..Asked::new(Method::Put, &key) };
        let answer = self.client.send_while(&asked, &doing, &|| self.may_change())?;
        if answer.succeeded() { Ok(()) } else { Err(self.client.refusal(&answer, &doing)) }
    }

    fn read(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let doing = format!("reading '{name}' in '{}'", self.place());
        if range.is_empty() {
            // There is no header for a range without bytes.
            return match self.length(name)? {
                Some(length) if length >= range.end => Ok(Vec::new()),
                Some(length) => Err(self.shorter(name, length, range.end)),
                None => Err(Error::new(ErrorKind::NotFound, format!("{doing} failed: there is no such object"))),
            };
        }
        let wanted = range.end - range.start;
        let key = self.key(name);
        let headers = vec![("range", format!("bytes={}-{}", range.start, range.end - 1))];
        let answer =
            self.client.send(&Asked { headers, answer_max: wanted, ..Asked::new(Method::Get, &key) }, &doing)?;
        if answer.status == 416 {
            let length = self.length(name)?.unwrap_or(0);
            return Err(self.shorter(name, length, range.end));
        }
        if !answer.succeeded() {
            return Err(self.client.refusal(&answer, &doing));
        }
        let received = answer.body.len() as u64;
        let (first, length) = match answer.status {
            206 => answer.header("content-range").and_then(whole_length).unwrap_or((range.start, u64::MAX)),
            // The server has sent the whole object.
            _ => (0, received),
        };
        if first == range.start && received == wanted {
            return Ok(answer.body);
        }
        if length < range.end {
            return Err(self.shorter(name, length, range.end));
        }
        let text = format!("{doing} failed: the server has sent {received} bytes from {first} on instead of {range:?}");
        Err(Error::new(ErrorKind::Io, text))
    }

    fn whole(&self, name: &str, length_max: u64) -> Result<Option<Vec<u8>>> {
        let (key, doing) = (self.key(name), format!("reading '{name}' in '{}'", self.place()));
        // One byte more than allowed distinguishes an object that is too long.
        let headers = vec![("range", format!("bytes=0-{length_max}"))];
        let asked = Asked { headers, answer_max: length_max + 1, ..Asked::new(Method::Get, &key) };
        let answer = self.client.send(&asked, &doing)?;
        match answer.status {
            404 if answer.code() != "NoSuchBucket" => Ok(None),
            // The object is empty.
            416 => Ok(Some(Vec::new())),
            _ if !answer.succeeded() => Err(self.client.refusal(&answer, &doing)),
            status => {
                let received = answer.body.len() as u64;
                let range = match status {
                    206 => answer.header("content-range").and_then(whole_length),
                    // The server has sent the whole object.
                    _ => Some((0, received)),
                };
                match range {
                    Some((0, length)) if length > length_max => Err(too_long(name, self.place(), length)),
                    Some((0, length)) if length == received => Ok(Some(answer.body)),
                    _ => {
                        let text = format!("{doing} failed: the server has sent {received} bytes of another number");
                        Err(Error::new(ErrorKind::Io, text))
                    }
                }
            }
        }
    }

    fn length(&self, name: &str) -> Result<Option<u64>> {
        let (key, doing) = (self.key(name), format!("looking at '{name}' in '{}'", self.place()));
        let answer = self.client.send(&Asked::new(Method::Head, &key), &doing)?;
        if answer.succeeded() {
            let length = answer.header("content-length").and_then(|length| length.parse().ok());
            let missing = || Error::new(ErrorKind::Io, format!("{doing} failed: the server has sent no length"));
            return length.map(Some).ok_or_else(missing);
        }
        // An answer to HEAD has no body, which would say whether the bucket or the object is missing, or why access is
        // denied.
        let headers = vec![("range", "bytes=0-0".to_owned())];
        let answer = self.client.send(&Asked { headers, answer_max: 1, ..Asked::new(Method::Get, &key) }, &doing)?;
        let length = answer.header("content-range").and_then(whole_length).map(|(_, length)| length);
        match (answer.status, length) {
            (404, _) if answer.code() != "NoSuchBucket" => Ok(None),
            (416, _) => Ok(Some(0)),
            // The object was put meanwhile.
            (206, Some(length)) => Ok(Some(length)),
            _ => Err(self.client.refusal(&answer, &doing)),
        }
    }

    fn list(&self) -> Result<Vec<String>> {
        let doing = format!("listing '{}'", self.place());
        let broken = |what: &str| Error::new(ErrorKind::Io, format!("{doing} failed: the answer {what}"));
        let (mut names, mut token) = (Vec::new(), None::<String>);
        for _ in 0..LISTINGS_MAX {
            let mut query = Vec::from([("delimiter", "/"), ("encoding-type", "url"), ("list-type", "2")]);
            query.push(("prefix", self.prefix.as_str()));
            query.extend(token.as_deref().map(|token| ("continuation-token", token)));
            query.sort_unstable();
            let asked = Asked { key: None, query: &query, answer_max: LISTING_MAX, ..Asked::new(Method::Get, "") };
            let answer = self.client.send(&asked, &doing)?;
            if !answer.succeeded() {
                return Err(self.client.refusal(&answer, &doing));
            }
            let root = ovf::xml::parse(&answer.body, "the list of objects").map_err(|error| error.context(&doing))?;
            if root.name != "ListBucketResult" {
                return Err(broken("is not a list of objects"));
            }
            let is_encoded = root.text_of("EncodingType") == Some("url");
            for key in root.all("Contents").filter_map(|object| object.text_of("Key")) {
                let key = if is_encoded { decoded(key) } else { Some(key.to_owned()) };
                let key = key.ok_or_else(|| broken("has a key that is not encoded correctly"))?;
                names.extend(key.strip_prefix(&self.prefix).filter(|name| !name.is_empty()).map(str::to_owned));
            }
            if names.len() > NAMES_MAX {
                return Err(broken("has too many names"));
            }
            if root.text_of("IsTruncated") != Some("true") {
                names.retain(|name| name != LOCK);
                names.sort_unstable();
                return Ok(names);
            }
            // What is not listed would be taken for missing.
            let next = root.text_of("NextContinuationToken").filter(|next| !next.is_empty());
            let next = next.ok_or_else(|| broken("is not complete, and does not say how it continues"))?;
            if token.as_deref() == Some(next) {
                return Err(broken("continues with itself"));
            }
            token = Some(next.to_owned());
        }
        Err(broken("has too many parts"))
    }

    fn remove(&self, name: &str) -> Result<()> {
        let (key, doing) = (self.key(name), format!("removing '{name}' in '{}'", self.place()));
        let answer = self.client.send_while(&Asked::new(Method::Delete, &key), &doing, &|| self.may_change())?;
        match answer.status {
            404 if answer.code() != "NoSuchBucket" => Ok(()),
            _ if answer.succeeded() => Ok(()),
            _ => Err(self.client.refusal(&answer, &doing)),
        }
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn sweep(&self, _: &dyn Fn(&str) -> bool) -> Result<()> {
        Ok(())
    }

    fn lock(&self) -> Result<Option<Box<dyn Lock>>> {
        let held = lease::take(&self.client, &self.key(LOCK))?;
        *self.lease.lock() = Arc::downgrade(held.lease());
        Ok(Some(Box::new(held)))
    }
}
