//! The file that holds a disk's record.
//!
//! It is replaced, never written in place: the new text is durable under a temporary name, then it is renamed, then the
//! folder is made durable. So the record is the old one or the new one, each of them whole.

use crate::record::{RECORD_MAX, Record};
use crate::{Error, ErrorKind, Result};
use backend::{Access, Directory, IoContext, IoMode};

/// The file that holds it.
pub(crate) const RECORD_NAME: &str = "lamina.disk";
/// What its name is while it is being written.
pub(crate) const RECORD_NEW: &str = "lamina.disk.lamina-new";
/// Reads the record of a folder.
pub(crate) fn load(directory: &dyn Directory) -> Result<Record> {
    let file = match directory.open_foreign(RECORD_NAME, IoMode::Buffered, Access::Read) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let text = format!("there is no disk in this folder: it has no '{RECORD_NAME}'");
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        other => other.during(|| format!("opening '{RECORD_NAME}'"))?,
    };
    let length = file.len().during(|| format!("asking for the length of '{RECORD_NAME}'"))?;
    if length > RECORD_MAX {
        return Err(Error::new(ErrorKind::Corrupt, format!("'{RECORD_NAME}' has {length} bytes: too many")));
    }
    let mut bytes = vec![0; length as usize];
    file.read_at(&mut bytes, 0).during(|| format!("reading '{RECORD_NAME}'"))?;
    Record::decode(&bytes)
}

/// A replacement that failed.
pub(crate) struct NotStored {
    pub error: Error,
    /// Whether the new text may be what the medium has.
    pub uncertain: bool,
}

/// Puts a record in place of the one that is there, if any. Durable on return.
pub(crate) fn store(directory: &dyn Directory, record: &Record) -> std::result::Result<(), NotStored> {
    let before = |error: Error| NotStored { error: error.context("the disk's record"), uncertain: false };
    let bytes = record.encode().map_err(before)?;
    write_new(directory, RECORD_NEW, &bytes).map_err(before)?;
    let during = || format!("putting the new '{RECORD_NAME}' in its place");
    directory.rename(RECORD_NEW, RECORD_NAME).during(during).map_err(before)?;
    directory.sync().during(during).map_err(|error| NotStored { error, uncertain: true })
}

/// Writes a whole file of that name, durable but for the name.
pub(crate) fn write_new(directory: &dyn Directory, name: &str, bytes: &[u8]) -> Result<()> {
    match directory.remove(name) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io(format!("removing the unfinished '{name}'"), error));
        }
        _ => {}
    }
    let write = || {
        let file = directory.create(name, IoMode::Buffered)?;
        file.write_at(&[bytes], 0, false)?;
        file.sync()
    };
    // What is not whole takes room that others could use: on a full file system, all that is left.
    write().inspect_err(|_| drop(directory.remove(name))).during(|| format!("writing '{name}'"))
}
