//! Opening a disk again whose medium failed, without the process that has it.
//!
//! 1. The old chain is stopped, and nothing is inside it any more, before an image is opened again: the layers below it
//!    write nothing from then on. Reads that were planned by it have to end before, too: the new opening may give
//!    their places to others. That is the caller's to wait for.
//! 2. After a failed flush the operating system's cache may show what the medium does not have. Every file of the disk
//!    is flushed once more, which tells whether the medium takes writes again, and then forgotten by the cache.
//! 3. The record is read again: a replacement that failed may have left the old one or the new one. The folder is
//!    flushed before, and so is that of each image: the name that was found may not be durable yet, and a power cut
//!    would bring the other record back, under writes that were acknowledged by this one.
//! 4. Until all of that has succeeded the disk stays stopped, and can be opened again another time.

use crate::disk::Disk;
use crate::medium::{Failing, sync_folder};
use crate::stored::{self, RECORD_NAME};
use crate::{Error, ErrorKind, Result};
use backend::{Access, IoMode};
use std::sync::Arc;

impl Disk {
    /// Why it takes no writes any more; `None` while it does, or was closed.
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

    /// Opens a stopped disk again. No read may be under way by its former chain; users of the disk ask for its chain
    /// again. What was acknowledged after the last flush that succeeded may be lost; says whether there was any. The
    /// flushes of the new chain do not cover it: the caller reports it to the users that rely on them.
    ///
    /// # Errors
    /// `Invalid` when it has not stopped; `Busy` while an operation is under way; `Stopped` when the process has to be
    /// started again.
    pub fn reopen(&self) -> Result<bool> {
        let _operation = self.begin_reopening()?;
        let name = self.name();
        let Some(why) = self.stopped() else {
            let text = format!("disk '{name}' takes writes, or was closed: there is nothing to open again");
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
        // Also for those who read a snapshot while this does not succeed.
        self.mistrust();
        if let Some(line) = self.drop_head() {
            // Kept: the next attempt finds no chain.
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
            // A flush needs no more; what the disk only reads may not be there for writing.
            let access = if writable && node.id == record.head { Access::ReadWrite } else { Access::Read };
            place.open(IoMode::Buffered, access).map(Some)
        })?;
        {
            let mut state = self.state.lock();
            state.record = record;
            state.failed = false;
            state.stale.clear();
        }
        self.recover()?;
        self.open_again()?;
        let mut state = self.state.lock();
        state.doubtful = false;
        Ok(std::mem::take(&mut state.lost))
    }

    fn open_again(&self) -> Result<()> {
        let record = self.record();
        let writable = self.writes_head(&record);
        let line = self.open_line(&record, record.head, writable, self.options.overlay.clone())?;
        self.set_head(Arc::new(line));
        self.state.lock().stopped = None;
        tracing::info!(disk = record.name, "the disk was opened again and takes writes");
        Ok(())
    }
}
