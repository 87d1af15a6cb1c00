//! Opening a disk that stopped after an I/O error, while its clients stay connected.
//!
//! 1. While the disk is opened again, its clients have a device that fails every request with the reason.
//! 2. No request uses the former chain when the images are opened again: neither a write, nor a planned read whose
//!    bytes are still being fetched.
//! 3. Writes that were acknowledged but not flushed may be lost, even if no flush of their client has failed. The new
//!    chain has no record of these writes, so the first flush of each client must fail to report the loss.
//! 4. If opening fails, the disk stays stopped, and its clients use the failing device until a later attempt succeeds.

use super::{Foreign, ForeignDisk};
use crate::device::{Device, DirtyExtent, FlushTicket, ReadPlan, StatusExtent, Verdict};
use crate::info::DiskInfo;
use backend::SharedSlice;
use error::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};
use work::Progress;

/// How long to wait for requests that use the former chain, which the storage may never complete.
const REQUESTS_WAIT: Duration = Duration::from_secs(60);

impl Foreign {
    /// Opens the disk again if it has stopped.
    pub fn reopen(&self, entry: &ForeignDisk, progress: &dyn Progress) -> Result<DiskInfo> {
        let _clients = entry.clients.lock();
        let switch = self.switches.get(&entry.identity(None));
        let Some(why) = entry.disk.stopped() else {
            // An earlier attempt has opened the disk, but failed before its clients were switched to the new device.
            if let Some(switch) = switch.filter(|switch| switch.is_suspended()) {
                switch.exchange(entry.head_device()?);
            }
            return self.info(entry, true);
        };
        let name = entry.disk.name();
        let Some(switch) = switch else {
            // Records the capacity, so that it stays known if the images cannot be opened.
            let _ = entry.capacity();
            entry.disk.reopen()?;
            return self.info(entry, true);
        };
        let capacity = entry.note_capacity(switch.device().capacity());
        let before = switch.suspend(Arc::new(StoppedDevice { name: name.clone(), capacity, why }));
        let began = Instant::now();
        if !before.wait_unused(&|| progress.cancelled() || began.elapsed() > REQUESTS_WAIT) {
            // The former device is restored, so that the next attempt waits for the same requests.
            switch.restore(before);
            let text = format!("disk '{name}' still has requests under way that the medium does not answer; try again");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        drop(before);
        if entry.disk.reopen()? {
            switch.note_loss();
        }
        switch.exchange(entry.head_device()?);
        self.info(entry, true)
    }
}

/// The device that clients use while the disk is stopped.
struct StoppedDevice {
    name: String,
    capacity: u64,
    why: String,
}

impl StoppedDevice {
    fn refuse<T>(&self) -> Result<T> {
        let Self { name, why, .. } = self;
        let text = format!("disk '{name}' has stopped ({why}); 'lamina disk reopen {name}' opens it again");
        Err(Error::new(ErrorKind::Stopped, text))
    }
}

impl Device for StoppedDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn read_only(&self) -> bool {
        false
    }

    fn plan_read(&self, _offset: u64, _length: usize) -> Result<ReadPlan> {
        self.refuse()
    }

    fn finish_read(&self, _plan: &mut ReadPlan) -> Result<Verdict> {
        self.refuse()
    }

    fn write(&self, _offset: u64, _data: SharedSlice, _fua: bool) -> Result<()> {
        self.refuse()
    }

    fn discard(&self, _offset: u64, _length: u64, _fua: bool) -> Result<()> {
        self.refuse()
    }

    fn write_zeroes(&self, _offset: u64, _length: u64, _allocate: bool, _fua: bool) -> Result<()> {
        self.refuse()
    }

    fn finish_flush(&self, _ticket: FlushTicket) -> Result<()> {
        self.refuse()
    }

    fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        self.refuse()
    }

    fn resize(&self, _capacity: u64) -> Result<()> {
        self.refuse()
    }

    fn status(&self, _offset: u64, _length: u64, _limit: usize) -> Result<Vec<StatusExtent>> {
        self.refuse()
    }

    fn dirty_bases(&self) -> Vec<String> {
        Vec::new()
    }

    fn changed_since(&self, _base: &str, _offset: u64, _length: u64, _limit: usize) -> Result<Vec<DirtyExtent>> {
        self.refuse()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::datastore::{Datastore, InitOptions, QueueChoice};
    use crate::testbed::options;
    use layer::image::ImageKind;
    use work::NoProgress;

    const BLOCK: usize = 4096;

    /// A progress that is cancelled from the start, so that no operation waits.
    struct Impatient;

    impl Progress for Impatient {
        fn update(&self, _done: u64, _total: u64) {}
        fn cancelled(&self) -> bool {
            true
        }
    }

    /// A datastore with a disk `vm` in a VMware format, and a client of it.
    fn made() -> (tempfile::TempDir, Arc<Datastore>, Arc<ForeignDisk>, Arc<dyn Device>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ds");
        Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
        let datastore = Datastore::open(&path, options(QueueChoice::Auto)).unwrap();
        datastore.foreign.create_disk(&vmdk::NewDisk::new("vm", 8 << 20, ImageKind::Thin, None), &NoProgress).unwrap();
        let entry = datastore.foreign.find("vm").unwrap();
        let client = datastore.device("vm", false).unwrap();
        (dir, datastore, entry, client)
    }

    #[test]
    fn clients_of_a_suspended_disk_get_the_reopened_disk() {
        let (_dir, datastore, entry, client) = made();
        let write = || client.write(0, SharedSlice::copy_of(&[0; BLOCK]), false).map_err(|error| error.kind());
        let switch = datastore.foreign.switches.get(&entry.identity(None)).unwrap();
        switch.suspend(Arc::new(StoppedDevice { name: "vm".into(), capacity: 8 << 20, why: "a test".into() }));
        assert_eq!(write(), Err(ErrorKind::Stopped));
        datastore.foreign.reopen(&entry, &NoProgress).unwrap();
        assert_eq!(write(), Ok(()));
        // Opening a disk that has not stopped leaves its device unchanged.
        let device = switch.device();
        datastore.foreign.reopen(&entry, &NoProgress).unwrap();
        assert!(Arc::ptr_eq(&device, &switch.device()));
    }

    #[test]
    fn each_attempt_waits_for_unanswered_requests() {
        let (dir, datastore, entry, client) = made();
        let mut plan = client.plan_read(0, BLOCK).unwrap();
        // Stops the disk without an I/O error: the lock file is removed, so that the next snapshot fails.
        std::fs::remove_file(dir.path().join("ds/images/vm").join(super::super::LOCK_NAME)).unwrap();
        entry.disk.snapshot(&vmdk::NewSnapshot::named("s")).unwrap_err();
        assert!(entry.disk.stopped().is_some());
        let reopen = || datastore.foreign.reopen(&entry, &Impatient).err().unwrap().kind();
        assert_eq!([reopen(), reopen()], [ErrorKind::Busy; 2]);
        assert!(client.finish_read(&mut plan).unwrap() == Verdict::Good);
        drop(plan);
        assert_eq!(reopen(), ErrorKind::Stopped);
    }
}
