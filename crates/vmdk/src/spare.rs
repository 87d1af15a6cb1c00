//! Room for a record that has to be written later: an operation that has begun does not fail for the lack of it.

use crate::disk::Disk;
use crate::record::Record;
use crate::stored::{self, RECORD_SPARE};
use crate::{ErrorKind, Result};

/// What identities may be longer in the record that is written than in the one that was measured.
const SLACK: u64 = 256;

/// Room for a record, until it is dropped or taken by a record that finds no other.
pub(crate) struct Spare<'a> {
    disk: &'a Disk,
    bytes: u64,
}

impl Disk {
    /// Takes the room for the record that ends a merge down, and is as good for the one that announces it.
    pub(crate) fn set_aside(&self, announced: &Record, sources: &[u32], target: u32) -> Result<Spare<'_>> {
        let after = self.merged_down(announced, sources, target)?.encode()?.len();
        let bytes = announced.encode()?.len().max(after) as u64 + SLACK;
        let spare = Spare { disk: self, bytes };
        // A record may fit where a reservation does not: the announcement decides, and gives back the room of the
        // record before it, which is then set aside.
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

    /// Takes it again if a record has taken it, as far as there is room: the record before has given some back.
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
