//! Reclaiming of one disk, which no client may open meanwhile.

use super::Datastore;
use crate::foreign::ForeignDisk;
use crate::info::Provisioning;
use crate::quota::mapped;
use crate::reclaim::{Reclaim, ReclaimReport};
use crate::switch::Identity;
use backend::BLOCK_SIZE;
use error::{Error, ErrorKind, Result};
use work::Progress;

impl Datastore {
    /// Gives back the blocks of a disk that its guest does not use; with `dry_run` only counts them. `Busy` while
    /// clients have the disk open. `refuse` may return further reasons to refuse, and is called when no client can open
    /// the disk any more.
    pub fn reclaim(
        &self,
        name: &str,
        dry_run: bool,
        refuse: &dyn Fn() -> Result<()>,
        progress: &dyn Progress,
    ) -> Result<ReclaimReport> {
        let _use = match dry_run {
            true => self.uses.share(name)?,
            false => self.uses.alone_without_clients(name, "reclaimed")?,
        };
        let entry = self.foreign.find(name);
        let device = {
            // A client that found the disk open before the use began is counted when this lock is acquired.
            let _opening = self.rename_lock.write();
            self.refuse_clients(name, entry.as_deref())?;
            match (&entry, dry_run) {
                // A machine starts only if its disks have no clients.
                (Some(entry), true) => self.foreign.open_for_operation(entry)?,
                (None, true) => self.native.open_for_operation(name)?,
                (Some(entry), false) => self.foreign.open_device(entry, None, false)?,
                (None, false) => self.native.open_device(name, None, false)?,
            }
        };
        refuse()?;
        let info = match &entry {
            // The provisioning type of a flat base changes when it is inflated or punched.
            Some(entry) => self.foreign.info(entry, true)?,
            None => self.disk_in_list(name)?,
        };
        if info.provisioning != Provisioning::Thin {
            let text = format!(
                "disk '{name}' is thick: its space stays reserved for it; 'lamina disk migrate {name} -d native' makes \
                 it thin first"
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let unit = match &entry {
            Some(entry) => entry.disk.chain()?.grain().max(BLOCK_SIZE as u64),
            None => BLOCK_SIZE as u64,
        };
        let before = mapped(&*device)?;
        let (scheme, parts) = Reclaim::new(&*device, unit, dry_run, progress).run()?;
        Ok(ReclaimReport {
            disk: name.to_owned(),
            dry_run,
            capacity: device.capacity(),
            mapped: before,
            scheme,
            reclaimed: parts.iter().map(|part| part.reclaimed).sum(),
            parts,
            snapshots: info.snapshots,
            origin: info.origin,
        })
    }

    /// `Busy` while clients have a disk open.
    fn refuse_clients(&self, name: &str, entry: Option<&ForeignDisk>) -> Result<()> {
        let identity = match entry {
            Some(entry) => entry.identity(None),
            None => Identity::Native(self.native.find_disk(name)?.id),
        };
        self.switches.refuse_in_use(&identity, &format!("disk '{name}'"))
    }
}
