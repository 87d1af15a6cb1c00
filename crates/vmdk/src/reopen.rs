//! Reopening a disk after an I/O failure, in the process that has it open.
//!
//! 1. Before an image is opened again, the old chain is stopped, and no request is inside it any more: its layers write
//!    nothing more. Reads that were planned through the old chain have to end before, too, because the new opening may
//!    reuse grains that they read. The caller waits for these reads.
//! 2. After a failed flush the page cache may differ from the device. Every file of the disk is flushed once more,
//!    which shows whether the device accepts writes again, and is then evicted from the page cache.
//! 3. The record is read again: a failed replacement may have left the old or the new one. Before that, its folder and
//!    the folder of each image are flushed. Otherwise a power cut could restore the other record after writes were
//!    acknowledged under the one that was read.
//! 4. Until all these steps have succeeded, the disk stays stopped, and reopening can be tried again.

use crate::disk::Disk;
use crate::medium::{Failing, sync_folder};
use crate::stored::{self, RECORD_NAME};
use crate::{Error, ErrorKind, Result};
use backend::{Access, IoMode};
use std::sync::Arc;

impl Disk {
    /// Why the disk accepts no writes; `None` while it accepts them, and after it was closed.
    pub fn stopped(&self) -> Option<String> {
        let state = self.state.lock();
        if state.closed {
            return None;
        }
        if let Some(why) = &state.stopped {
            return Some(why.clone());
        }
        if state.failed {
            return Some("its record could not be written, or its lock was removed".into());
        }
        drop(state);
        self.open_head().and_then(|line| line.chain.failure())
    }

    /// Opens a stopped disk again. No read may be under way through the old chain; users of the disk have to get the
    /// new chain from it. Writes acknowledged after the last successful flush may be lost; returns whether there were
    /// any such writes. Flushes of the new chain do not cover them, so the caller reports the loss to the users that
    /// rely on flushes.
    ///
    /// # Errors
    /// `Invalid` when the disk has not stopped; `Busy` while an operation is under way; `Stopped` when the process has
    /// to be restarted.
    pub fn reopen(&self) -> Result<bool> {
        let _operation = self.begin_reopening()?;
        let name = self.name();
        let Some(why) = self.stopped() else {
            let text = format!("disk '{name}' has not stopped, or is closed: there is nothing to reopen");
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        if !self.is_owner() {
            let text = format!(
                "disk '{name}': its lock was removed or replaced, and another process may have opened it since; start \
                 the server again"
            );
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        self.state.lock().stopped = Some(why);
        // Readers of a snapshot must not rely on the page cache either, until the reopening succeeds.
        self.mistrust();
        if let Some(line) = self.drop_head() {
            // The loss is recorded in the state, because the chain no longer exists at the next attempt.
            let lost = line.chain.abandon();
            self.state.lock().lost |= lost;
        }
        sync_folder(&self.home, RECORD_NAME)?;
        let record = stored::load(&**self.home.directory())?;
        if record.is_going() {
            let text = format!("disk '{name}' is being deleted: starting the server again finishes that");
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        let writable = self.writes_head(&record);
        self.show_media(&record, record.nodes.iter(), Failing::Now, &|node, place| {
            // A file opened for reading can be flushed; files that the disk only reads need not be writable.
            let access = if writable && node.id == record.head { Access::ReadWrite } else { Access::Read };
            place.open(IoMode::Buffered, access).map(Some)
        })?;
        {
            let mut state = self.state.lock();
            state.record = record;
            state.unrecorded = false;
            state.failed = false;
            state.stale.clear();
        }
        // After a failure here, the page cache may differ from the device again.
        self.noting(|| self.recover().and_then(|()| self.open_again()))?;
        let mut state = self.state.lock();
        state.doubtful = false;
        Ok(std::mem::take(&mut state.lost))
    }

    fn open_again(&self) -> Result<()> {
        let record = self.record();
        let writable = self.writes_head(&record);
        let line = self.open_line(&record, record.head, writable, &self.options.overlay)?;
        self.set_head(Arc::new(line));
        self.state.lock().stopped = None;
        tracing::info!(disk = record.name, "the disk was opened again and takes writes");
        Ok(())
    }
}
