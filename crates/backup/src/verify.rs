//! Verification of backups without the datastore: every byte is read, and every chunk is decompressed.

use crate::level::check_head;
use crate::manifest::Manifest;
use crate::pack::{HEAD, Index, unpack};
use crate::repository::{Repository, pack_name};
use crate::seal::Key;
use crate::stream::{Next, StreamReader, open};
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::io::{BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use work::{Progress, Throttle};

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Number of backups.
    pub backups: u64,
    /// Number of packs.
    pub packs: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Bytes of data before compression.
    pub data: u64,
    /// What is damaged or missing.
    pub problems: Vec<String>,
}

fn stopped() -> Error {
    Error::new(ErrorKind::Interrupted, "stopped on request: not everything was verified")
}

/// Decompresses every chunk of a pack; returns the bytes of data.
fn unpack_all(index: &Index, body: &[u8]) -> Result<u64> {
    let mut data = 0;
    for chunk in index.values().flat_map(|content| &content.chunks) {
        let at = chunk.offset as usize - HEAD;
        data += unpack(chunk, &body[at..at + chunk.stored as usize])?.len() as u64;
    }
    Ok(data)
}

/// Whether an error means that a backup is damaged, and not that the verification failed.
fn is_damage(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unsupported)
}

impl Repository {
    /// Verifies backups, named as in [`Repository::find`], with all backups that they need; without names, all backups.
    ///
    /// # Errors
    /// `Invalid` without the key of an encrypted backup.
    pub fn verify(&self, which: &[String], key: Option<&Arc<Key>>, progress: &dyn Progress) -> Result<Verified> {
        let mut verified = Verified::default();
        let mut wanted: Vec<Manifest> = Vec::new();
        let mut add = |manifest: Manifest| {
            if !wanted.iter().any(|known| known.backup.id == manifest.backup.id) {
                wanted.push(manifest);
            }
        };
        if which.is_empty() {
            for found in self.found()? {
                match found.manifest {
                    Ok(manifest) => {
                        if let Err(error) = self.whole(manifest.clone()) {
                            verified.problems.push(error.to_string());
                        }
                        add(manifest);
                    }
                    Err(error) if is_damage(&error) => verified.problems.push(error.to_string()),
                    Err(error) => return Err(error),
                }
            }
        }
        for name in which {
            let manifest = self.find(name)?;
            match self.whole(manifest.clone()) {
                Ok(whole) => whole.into_iter().for_each(&mut add),
                Err(error) if is_damage(&error) => {
                    verified.problems.push(error.to_string());
                    add(manifest);
                }
                Err(error) => return Err(error),
            }
        }
        verified.problems.dedup();
        let total = wanted.iter().map(Manifest::stored).sum();
        let throttle = Throttle::new(progress);
        for manifest in &wanted {
            verified.backups += 1;
            let key = manifest.backup.choose_key(key)?;
            let mut data = 0;
            for number in 0..manifest.packs.len() {
                match self.verify_pack(manifest, number, key.as_deref()) {
                    Ok((length, plain)) => {
                        verified.bytes += length;
                        data += plain;
                        if throttle.step(verified.bytes, total, length).is_break() {
                            return Err(stopped());
                        }
                    }
                    Err(error) if is_damage(&error) => verified.problems.push(error.to_string()),
                    Err(error) => return Err(error),
                }
                verified.packs += 1;
            }
            if data != manifest.data && verified.problems.is_empty() {
                let text = format!("backup {} has {data} bytes of data, not {}", manifest.backup.id, manifest.data);
                verified.problems.push(text);
            }
            verified.data += data;
        }
        Ok(verified)
    }

    /// The bytes of a pack, and the bytes of data in it.
    fn verify_pack(&self, manifest: &Manifest, number: usize, key: Option<&Key>) -> Result<(u64, u64)> {
        let name = pack_name(&manifest.backup.id, number as u32);
        let objects = self.objects();
        let check = || {
            let record = &manifest.packs[number];
            let missing = || Error::new(ErrorKind::NotFound, "the pack is missing");
            let length = objects.length(&name)?.ok_or_else(missing)?;
            if length != record.length {
                let text = format!("the pack has {length} bytes, and should have {}", record.length);
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            let bytes = objects.read(&name, 0..length)?;
            let head = check_head(&manifest.packs, number, manifest.backup.id_bytes()?, &bytes)?;
            let (index, body) = head.decode_body(&bytes[HEAD..], key)?;
            Ok((length, unpack_all(&index, &body)?))
        };
        check().map_err(|error: Error| {
            let backup = format!("backup {} of '{}'", manifest.backup.id, manifest.backup.source());
            error.context(format!("{backup}, '{name}' in '{}'", objects.place()))
        })
    }
}

/// Verifies a stream; `total` is its length if it is known.
pub fn verify_stream(
    reader: impl Read,
    (name, total): (&str, u64),
    key: Option<&Arc<Key>>,
    progress: &dyn Progress,
) -> Result<Verified> {
    let mut verified = Verified { backups: 1, ..Verified::default() };
    let throttle = Throttle::new(progress);
    let read = || -> Result<()> {
        let mut stream = StreamReader::new(reader, name, key)?;
        loop {
            let Next::Pack(head, index, body) = stream.next()? else { return Ok(()) };
            let plain = unpack_all(&index, &body);
            verified.data += plain.map_err(|error| error.context(format!("pack {} of {name}", head.number)))?;
            verified.packs += 1;
            verified.bytes += head.length();
            if throttle.step(verified.bytes, total.max(verified.bytes), head.length()).is_break() {
                return Err(stopped());
            }
        }
    };
    match read() {
        Ok(()) => {}
        // A stream that was cut ends with an I/O error without a cause.
        Err(error) if is_damage(&error) || error.kind() == ErrorKind::Io => verified.problems.push(error.to_string()),
        Err(error) => return Err(error),
    }
    Ok(verified)
}

/// Verifies the backup in a file.
pub fn verify_file(path: &Path, key: Option<&Arc<Key>>, progress: &dyn Progress) -> Result<Verified> {
    let name = format!("'{}'", path.display());
    let file = open(path, &name)?;
    let length = file.metadata().during(|| format!("reading {name}"))?.len();
    verify_stream(BufReader::with_capacity(1 << 20, file), (&name, length), key, progress)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::Command;
    use std::sync::mpsc;
    use std::time::Duration;
    use work::NoProgress;

    /// A job that waits for the other end of a pipe cannot be cancelled, and its server does not stop.
    #[test]
    fn a_pipe_in_place_of_a_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let (ended, end) = mpsc::channel();
        std::thread::spawn(move || {
            let _ = ended.send(verify_file(&pipe, None, &NoProgress).map(drop));
            let _ = ended.send(Key::read(&pipe).map(drop));
        });
        for _ in 0..2 {
            let error = end.recv_timeout(Duration::from_secs(60)).expect("it waits for the pipe").unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("a pipe"), "{error}");
        }
    }
}
