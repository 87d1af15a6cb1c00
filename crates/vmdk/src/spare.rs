//! Space reserved for a record that has to be written later, so that an operation does not fail half way for lack of
//! space.

use crate::disk::Disk;
use crate::record::Record;
use crate::stored::{self, RECORD_SPARE};
use crate::{ErrorKind, Result};

/// How many bytes longer than the measured record the written one may be, because it has other random identities.
const SLACK: u64 = 256;

/// Space reserved for a record. It is freed when this value is dropped, or used by a record that finds no other space.
pub(crate) struct Spare<'a> {
    disk: &'a Disk,
    bytes: u64,
}

impl Disk {
    /// Reserves space for the record that ends a merge. The space is also sufficient for the record that announces the
    /// merge.
    pub(crate) fn set_aside(&self, announced: &Record, after: &Record) -> Result<Spare<'_>> {
        let bytes = announced.encode()?.len().max(after.encode()?.len()) as u64 + SLACK;
        let spare = Spare { disk: self, bytes };
        // If the reservation fails for lack of space, the record that announces the operation may fit nevertheless. It
        // replaces the old record, and `renew` then reserves the space of the old record.
        match self.with_room(announced, || spare.take()) {
            Err(error) if error.kind() != ErrorKind::NoSpace => Err(error),
            _ => Ok(spare),
        }
    }
}

impl Spare<'_> {
    fn take(&self) -> Result<()> {
        stored::set_aside(&**self.disk.home.directory(), self.bytes)
    }

    /// Makes the reservation again if a record has used it. Errors are ignored: the replaced record has usually freed
    /// the space.
    pub fn renew(&self) {
        if let Err(error) = self.take() {
            tracing::debug!(%error, disk = self.disk.name(), "no space can be reserved for the next record");
        }
    }
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        let _ = self.disk.home.directory().remove(RECORD_SPARE);
    }
}
