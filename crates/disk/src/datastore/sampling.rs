//! Samples of the growth of a datastore, taken by its server.

use super::Datastore;
use crate::growth::Reading;
use crate::names;
use backend::BLOCK_SIZE;
use error::Result;
use std::collections::BTreeMap;

impl Datastore {
    /// Takes a sample of the growth of the datastore and its disks; `now` is the time in seconds since 1970. Takes
    /// little time, because nothing is counted: the engine has counters, and the files of images have sizes.
    pub fn sample_growth(&self, now: u64) {
        let engine = &self.native.engine;
        let bytes = |blocks: u64| blocks * BLOCK_SIZE as u64;
        let counts = engine.counts();
        let mut used = bytes(counts.data.used).saturating_add(bytes(counts.map.used));
        let grown: BTreeMap<u64, i64> = engine.growth().into_iter().collect();
        let mut readings = BTreeMap::new();
        engine.with_catalog(|catalog| {
            for disk in catalog.disks().filter(|disk| crate::native::is_visible(disk)) {
                let blocks = grown.get(&disk.id).copied().unwrap_or_default();
                let reading = Reading { native: true, bytes: blocks.saturating_mul(BLOCK_SIZE as i64) };
                readings.insert(names::uuid_text(&disk.uuid), reading);
            }
        });
        for entry in self.foreign.entries() {
            // A disk may be deleted meanwhile.
            let allocated = self.foreign.allocated(&entry).unwrap_or_default();
            used = used.saturating_add(allocated);
            let bytes = i64::try_from(allocated).unwrap_or(i64::MAX);
            readings.insert(entry.disk.uuid(), Reading { native: false, bytes });
        }
        self.samples.add(now, used, readings);
    }

    /// Writes the samples, which the next server continues.
    pub fn write_growth(&self) -> Result<()> {
        self.samples.write()
    }
}
