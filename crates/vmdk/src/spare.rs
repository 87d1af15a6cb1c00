//! Room for a record that has to be written later, so that an operation that has begun does not fail for lack of it.

use crate::disk::Disk;
use crate::record::Record;
use crate::stored::{self, RECORD_SPARE};
use crate::{ErrorKind, Result};

/// The most bytes by which identities may lengthen the record that is written over the measured one.
const SLACK: u64 = 256;

/// Room for a record, until this is dropped or a record uses it because it finds no other.
pub(crate) struct Spare<'a> {
    disk: &'a Disk,
    bytes: u64,
}

impl Disk {
    /// Reserves the room for the record that ends a merge; it is also enough for the record that announces the merge.
    pub(crate) fn set_aside(&self, announced: &Record, after: &Record) -> Result<Spare<'_>> {
        let bytes = announced.encode()?.len().max(after.encode()?.len()) as u64 + SLACK;
        let spare = Spare { disk: self, bytes };
        // A record may fit where a reservation does not: then the announcement is written, and its success returns the
        // room of the record before, which is reserved next.
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

    /// Reserves it again if a record has used it, as far as there is room: the record before has returned some.
    pub fn renew(&self) {
        if let Err(error) = self.take() {
            tracing::debug!(%error, disk = self.disk.name(), "no room can be set aside for the next record");
        }
    }
}

impl Drop for Spare<'_> {
    fn drop(&mut self) {
        let _ = self.disk.home.directory().remove(RECORD_SPARE);
    }
}
