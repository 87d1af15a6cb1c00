//! Small record files of a datastore: a header line with kind, version and checksum, followed by JSON.
//!
//! ```text
//! lamina KIND VERSION crc32c=XXXXXXXX
//! { ... }
//! ```
//!
//! 1. The checksum covers every byte after the first line, and its hexadecimal digits must match in upper or lower case
//!    too. Any input decodes to a record or an error.
//! 2. A file is replaced atomically ([`backend::replace`]).
//! 3. A file in which one byte is damaged can be read nevertheless, because the checksum identifies the right value of
//!    the byte ([`Kind::decode_mending`]).

pub use backend::replace::remove_if_there;
use backend::{Directory, File, IoMode, replace};
use checksums::{checksum, mend_one_byte};
use error::{Error, ErrorKind, IoContext, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;

/// Suffix of the temporary file that is renamed to the record.
pub const TEMPORARY: &str = ".new";

/// A kind of record.
pub struct Kind {
    /// The kind's name, in the header line and in errors.
    pub word: &'static str,
    /// The version that this program writes and reads.
    pub version: u32,
    /// Size limit of a file in bytes.
    pub length_max: u64,
}

impl Kind {
    /// The error for bytes that are not a record of this kind.
    pub fn corrupt(&self, what: &str) -> Error {
        Error::new(ErrorKind::Corrupt, format!("the {} record {what}", self.word))
    }

    /// Encodes a record.
    ///
    /// # Errors
    /// `Invalid` if the file would have more bytes than are read again.
    pub fn encode(&self, record: &impl Serialize) -> Result<Vec<u8>> {
        let Self { word, .. } = self;
        let mut body = serde_json::to_vec_pretty(record)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("a {word} record cannot be written: {error}")))?;
        body.push(b'\n');
        let mut bytes = self.first_line(checksum(&body));
        bytes.append(&mut body);
        if bytes.len() as u64 > self.length_max {
            let (length, most) = (bytes.len(), self.length_max);
            let text = format!("the {word} record cannot grow to {length} bytes: {most} bytes are the most");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(bytes)
    }

    fn first_line(&self, sum: u32) -> Vec<u8> {
        format!("lamina {} {} crc32c={sum:08x}\n", self.word, self.version).into_bytes()
    }

    /// Decodes the content of a file with `decode`. If one byte is damaged, mends it, and also returns the error that
    /// was mended.
    ///
    /// # Errors
    /// The error of `decode`, unless it is `Corrupt` and exactly one change of one byte gives bytes that `decode`
    /// accepts. A wrong version in the header is not mended, because a later version of the program may have written
    /// it.
    pub fn decode_mending<T>(&self, bytes: &[u8], decode: impl Fn(&[u8]) -> Result<T>) -> Result<(T, Option<Error>)> {
        match decode(bytes) {
            Ok(record) => Ok((record, None)),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                match mend_one_byte(bytes, |sum| self.first_line(sum), |bytes| decode(bytes).ok()) {
                    Some(record) => Ok((record, Some(error))),
                    None => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Decodes a record. The caller checks whether its fields are consistent.
    pub fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        let Self { word, version: own, .. } = self;
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or_else(|| self.corrupt("has no first line"))?;
        let (head, body) = (&bytes[..end], &bytes[end + 1..]);
        let head = std::str::from_utf8(head).map_err(|_| self.corrupt("has no first line"))?;
        let rest = head.strip_prefix("lamina ").and_then(|rest| rest.strip_prefix(word)?.strip_prefix(' '));
        let rest = rest.ok_or_else(|| self.corrupt("begins with something else"))?;
        let (version, sum) = rest.split_once(" crc32c=").ok_or_else(|| self.corrupt("has no checksum"))?;
        match version.parse::<u32>() {
            Ok(version) if version == *own => {}
            Ok(newer) => {
                let text = format!("the {word} record has version {newer}, and this program reads {own}");
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            Err(_) => return Err(self.corrupt("has no version")),
        }
        if *sum != format!("{:08x}", checksum(body)) {
            return Err(self.corrupt("fails its checksum"));
        }
        serde_json::from_slice(body).map_err(|error| self.corrupt(&format!("cannot be parsed: {error}")))
    }

    /// The content of a file; `None` if the file does not exist.
    pub fn read(&self, directory: &dyn Directory, name: &str) -> Result<Option<Vec<u8>>> {
        match directory.open(name, IoMode::Buffered) {
            Ok(file) => self.read_from(&*file, name).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(format!("reading the {} record '{name}'", self.word), error)),
        }
    }

    /// The content of the open file `name`.
    pub fn read_from(&self, file: &dyn File, name: &str) -> Result<Vec<u8>> {
        let during = || format!("reading the {} record '{name}'", self.word);
        let length = file.len().during(during)?;
        if length > self.length_max {
            let text = format!("'{name}' of {length} bytes is no {} record", self.word);
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let mut bytes = vec![0; length as usize];
        file.read_at(&mut bytes, 0).during(during)?;
        Ok(bytes)
    }

    /// Removes a file durably; a missing file is not an error.
    pub fn remove(&self, directory: &dyn Directory, name: &str) -> Result<()> {
        remove_if_there(directory, name)
            .and_then(|()| directory.sync())
            .during(|| format!("removing the {} record '{name}'", self.word))
    }
}

/// Writes a file durably, replacing an earlier one with that name.
pub fn put(directory: &dyn Directory, name: &str, bytes: &[u8]) -> io::Result<()> {
    replace::durably(directory, name, &format!("{name}{TEMPORARY}"), bytes)
}

/// As [`put`], without a flush: see [`replace::unflushed`].
pub fn put_unflushed(directory: &dyn Directory, name: &str, bytes: &[u8]) -> io::Result<()> {
    replace::unflushed(directory, name, &format!("{name}{TEMPORARY}"), bytes)
}
