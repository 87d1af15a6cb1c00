//! The file with a disk's record.
//!
//! The file is replaced, never overwritten ([`backend::replace`]), in two steps: the new file is prepared, and renamed
//! later. Between these steps, the operation makes its other files.
//!
//! A disk is deleted by renaming its record: this needs no space, so it works on a full file system.
//!
//! A record in which one byte is damaged is read nevertheless, because the checksum identifies the right value of the
//! byte.

use crate::record::{Fate, Pending, RECORD_MAX, Record, first_line};
use crate::{Error, ErrorKind, Result};
use backend::{Access, Directory, IoMode, replace};
use checksums::mend_one_byte;
use error::IoContext;

/// The file with the record.
pub(crate) const RECORD_NAME: &str = "lamina.disk";
/// The record's file while it is written.
pub(crate) const RECORD_NEW: &str = "lamina.disk.lamina-new";
/// Space reserved for a record: see [`set_aside`].
pub(crate) const RECORD_SPARE: &str = "lamina.spare.lamina-new";
/// The record's file while the disk is being deleted.
pub(crate) const RECORD_GONE: &str = "lamina.gone";

/// Reads the record in a folder, and whether the disk is being deleted.
pub(crate) fn load(directory: &dyn Directory) -> Result<Record> {
    load_mending(directory).map(|(record, _)| record)
}

/// As [`load`]. The flag tells whether a byte of the file is damaged.
pub(crate) fn load_mending(directory: &dyn Directory) -> Result<(Record, bool)> {
    if let Some(loaded) = load_from(directory, RECORD_NAME)? {
        return Ok(loaded);
    }
    match load_from(directory, RECORD_GONE)? {
        Some((mut record, mended)) => {
            record.pending.get_or_insert_with(|| Pending::new("delete")).fate = Some(Fate::Deleting);
            Ok((record, mended))
        }
        None => {
            let text = format!("there is no disk in this folder: it has no '{RECORD_NAME}'");
            Err(Error::new(ErrorKind::NotFound, text))
        }
    }
}

fn load_from(directory: &dyn Directory, name: &str) -> Result<Option<(Record, bool)>> {
    let file = match directory.open_foreign(name, IoMode::Buffered, Access::Read) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other.during(|| format!("opening '{name}'"))?,
    };
    let length = file.len().during(|| format!("determining the length of '{name}'"))?;
    if length > RECORD_MAX {
        return Err(Error::new(ErrorKind::Corrupt, format!("'{name}' has {length} bytes: too many")));
    }
    let mut bytes = vec![0; length as usize];
    file.read_at(&mut bytes, 0).during(|| format!("reading '{name}'"))?;
    decode_mending(&bytes).map(Some)
}

/// Decodes the content of the record's file. Mends one damaged byte, if exactly one change of one byte gives a record.
fn decode_mending(bytes: &[u8]) -> Result<(Record, bool)> {
    let error = match Record::decode(bytes) {
        Err(error) if error.kind() == ErrorKind::Corrupt => error,
        decoded => return Ok((decoded?, false)),
    };
    let Some(record) = mend_one_byte(bytes, first_line, |bytes| Record::decode(bytes).ok()) else { return Err(error) };
    tracing::warn!(%error, disk = record.name, "one damaged byte of the disk's record is corrected");
    Ok((record, true))
}

/// A failed replacement of the record.
pub(crate) struct NotStored {
    pub error: Error,
    /// Whether it is unknown which record is durable.
    pub uncertain: bool,
}

/// Writes a record to the file that [`replace`] renames. Only this step of a commit needs space. If there is none, the
/// reserved file is used.
pub(crate) fn prepare(directory: &dyn Directory, bytes: &[u8]) -> Result<()> {
    let written = replace::prepare(directory, RECORD_NEW, bytes).during(|| format!("writing '{RECORD_NEW}'"));
    let written = written.or_else(|error| match error.kind() {
        ErrorKind::NoSpace if fill_spare(directory, bytes).is_ok_and(|filled| filled) => Ok(()),
        _ => Err(error),
    });
    written.map_err(|error| error.context("the disk's record"))
}

/// Reserves space for a record of this many bytes, until the file is removed.
pub(crate) fn set_aside(directory: &dyn Directory, bytes: u64) -> Result<()> {
    // Reserved space can be written once without an allocation, even on a copy-on-write file system.
    let take = || {
        let file = directory.create(RECORD_SPARE, IoMode::Buffered)?;
        // No more than the record's length is reserved: a nearly full file system with small blocks may not have more.
        file.reserve(0, bytes)?;
        file.sync()
    };
    match take() {
        Err(error) if error::lacks_space(&error) => {
            // A partial reservation would occupy the last free space.
            let _ = directory.remove(RECORD_SPARE);
            Err(Error::io("taking room for the disk's record", error))
        }
        // Other failures are ignored here: if they persist, writing the record fails. A file reserved by an earlier
        // operation can be used, too.
        _ => Ok(()),
    }
}

/// Writes a record into the reserved file, and renames that to the new record. Returns false if the record does not
/// fit.
fn fill_spare(directory: &dyn Directory, bytes: &[u8]) -> std::io::Result<bool> {
    let file = directory.open(RECORD_SPARE, IoMode::Buffered)?;
    if file.len()? < bytes.len() as u64 {
        return Ok(false);
    }
    file.write_at(&[bytes], 0, false)?;
    file.set_len(bytes.len() as u64)?;
    file.sync()?;
    directory.rename(RECORD_SPARE, RECORD_NEW)?;
    Ok(true)
}

/// Renames the prepared file over the record, if there is one. Durable on return.
pub(crate) fn replace(directory: &dyn Directory) -> std::result::Result<(), NotStored> {
    rename(directory, RECORD_NEW, RECORD_NAME)
}

/// Renames the record to that of a disk being deleted. Durable on return.
pub(crate) fn give_up(directory: &dyn Directory) -> std::result::Result<(), NotStored> {
    rename(directory, RECORD_NAME, RECORD_GONE)
}

fn rename(directory: &dyn Directory, from: &str, to: &str) -> std::result::Result<(), NotStored> {
    let during = || format!("renaming the disk's record '{from}' to '{to}'");
    directory.rename(from, to).during(during).map_err(|error| NotStored { error, uncertain: false })?;
    directory.sync().during(during).map_err(|error| NotStored { error, uncertain: true })
}
