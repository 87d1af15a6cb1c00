//! The numbers on which quotas and reservations depend: how much each disk maps, and the free space.

use super::Datastore;
use crate::foreign::ChainedDevice;
use crate::names;
use crate::quota::{Accounting, mapped};
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, IoContext, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// The datastore, as far as it is still open.
pub(super) struct DatastoreAccounting(pub Weak<Datastore>);

impl DatastoreAccounting {
    fn datastore(&self) -> Result<Arc<Datastore>> {
        self.0.upgrade().ok_or_else(|| Error::new(ErrorKind::Stopped, "the datastore is being closed"))
    }
}

impl Accounting for DatastoreAccounting {
    fn count(&self, uuid: &str) -> Result<u64> {
        let datastore = self.datastore()?;
        let entries = datastore.foreign.entries();
        if let Some(entry) = entries.iter().find(|entry| entry.disk.uuid() == uuid) {
            return mapped(&ChainedDevice::new(entry.disk.name(), entry.disk.chain()?));
        }
        datastore.native.mapped(uuid)
    }

    fn free(&self) -> Result<u64> {
        let datastore = self.datastore()?;
        let engine = &datastore.native.engine;
        let room = engine.directory().room().during(|| "querying the free space of the file system".into())?;
        Ok(room.available.saturating_add(engine.counts().data.free * BLOCK_SIZE as u64))
    }

    fn names(&self) -> BTreeMap<String, String> {
        let Some(datastore) = self.0.upgrade() else { return BTreeMap::new() };
        let entries = datastore.foreign.entries();
        let images: Vec<(String, String)> =
            entries.iter().map(|entry| (entry.disk.uuid(), entry.disk.name())).collect();
        datastore.native.engine.with_catalog(|catalog| {
            let disks = catalog.disks().filter(|disk| crate::native::is_visible(disk));
            disks.map(|disk| (names::uuid_text(&disk.uuid), disk.name.clone())).chain(images).collect()
        })
    }

    fn name(&self, uuid: &str) -> Option<String> {
        self.0.upgrade()?.named(uuid)
    }
}
