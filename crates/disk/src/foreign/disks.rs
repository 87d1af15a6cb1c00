//! Creating, listing, showing, renaming and deleting disks, and their statistics and tunables.

use super::{Foreign, ForeignDisk};
use crate::info::{
    Counters, DiskFormat, DiskInfo, DiskStatistics, ImageDetails, ImageFile, ImageKind, LevelInfo, Provisioning, Tuning,
};
use error::{Error, ErrorKind, IoContext, Result};
use layer::image::Place;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use work::Progress;

/// The name of VMFS's flat disks in `lamina disk list`.
const VMDK: &str = "vmdk";

impl From<layer::flat::Provisioning> for Provisioning {
    fn from(provisioning: layer::flat::Provisioning) -> Self {
        match provisioning {
            layer::flat::Provisioning::Thin => Self::Thin,
            layer::flat::Provisioning::ZeroedThick => Self::ZeroedThick,
            layer::flat::Provisioning::EagerZeroedThick => Self::EagerZeroedThick,
        }
    }
}

impl ForeignDisk {
    /// The kind of the base image when the disk was created.
    pub fn kind(&self) -> Option<ImageKind> {
        self.disk.record().kind.parse().ok()
    }

    /// Capacity in bytes, read from the head's descriptor if possible, so that the images need not be opened.
    pub fn capacity(&self) -> Result<u64> {
        if let Some(device) = self.head.lock().upgrade() {
            return Ok(self.note_capacity(device.chain().capacity()));
        }
        if let Some(capacity) = self.described_capacity() {
            return Ok(capacity);
        }
        match (self.disk.chain(), self.capacity.load(Ordering::Relaxed)) {
            // The images of a disk that has stopped cannot be read, so the last known capacity is used.
            (Err(_), known) if known > 0 => Ok(known),
            (chain, _) => Ok(self.note_capacity(chain?.capacity())),
        }
    }

    /// Records the capacity for times when the images cannot be read.
    pub(super) fn note_capacity(&self, capacity: u64) -> u64 {
        self.capacity.store(capacity, Ordering::Relaxed);
        capacity
    }

    /// The path of the file by which other programs open the head.
    fn head_path(&self) -> String {
        let record = self.disk.record();
        let Ok(node) = record.node(record.head) else { return String::new() };
        let home = self.disk.home().path().map(|path| path.display().to_string());
        let folder = node.folder.clone().or(home).unwrap_or_default();
        format!("{folder}/{}", node.descriptor)
    }

    fn described_capacity(&self) -> Option<u64> {
        let record = self.disk.record();
        let node = record.node(record.head).ok()?;
        if node.folder.is_some() || node.format.is_some() {
            return None;
        }
        let place = Place { folder: self.disk.home().clone(), name: node.descriptor.clone() };
        let file = place.open(backend::IoMode::Buffered, backend::Access::Read).ok()?;
        let descriptor = layer::descriptor::storage::load(&*file, &place.label()).ok()?;
        descriptor.extents.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.sectors.checked_mul(512)?))
    }
}

impl Foreign {
    /// Creates a disk. After an error or a crash no file of the disk remains.
    pub fn create_disk(&self, new: &vmdk::NewDisk, progress: &dyn Progress) -> Result<DiskInfo> {
        let made = self.make(new, false, progress);
        let (folder, disk) = made.map_err(|error| error.context(format!("disk '{}' was not made", new.name)))?;
        self.info(&self.insert(folder, disk), false)
    }

    /// Creates an empty disk in a folder of its own. If `hidden`, recovery after a crash removes the folder.
    pub(super) fn make(
        &self,
        new: &vmdk::NewDisk,
        hidden: bool,
        progress: &dyn Progress,
    ) -> Result<(String, Arc<vmdk::Disk>)> {
        let (folder, home) = self.new_folder(&new.name, hidden)?;
        match vmdk::Disk::create(home, new, &self.options, progress) {
            Ok(disk) => Ok((folder, disk)),
            Err(error) => {
                if let Err(second) = self.remove_folder(&folder) {
                    tracing::warn!(%second, folder, "the next opening of the datastore removes an unfinished disk");
                }
                Err(error)
            }
        }
    }

    /// All disks by name. A disk that cannot be read is logged and left out.
    pub fn disks(&self) -> Vec<DiskInfo> {
        let mut all = Vec::new();
        for entry in self.entries() {
            match self.info(&entry, false) {
                Ok(info) => all.push(info),
                Err(error) => tracing::warn!(disk = entry.disk.name(), %error, "a disk cannot be listed"),
            }
        }
        all
    }

    /// One disk; with `details` its images are opened.
    pub fn info(&self, entry: &ForeignDisk, details: bool) -> Result<DiskInfo> {
        let record = entry.disk.record();
        let kind = entry.kind();
        let stopped = entry.disk.stopped();
        let full = match details.then(|| entry.disk.info()) {
            // The images of a stopped disk cannot be described until the disk is opened again.
            Some(Err(_)) if stopped.is_some() => None,
            info => info.transpose()?,
        };
        let provisioning = match &full {
            Some(info) => info.provisioning,
            None => kind.and_then(ImageKind::provisioning),
        };
        let flat = kind
            .is_some_and(|kind| matches!(kind, ImageKind::Thin | ImageKind::ZeroedThick | ImageKind::EagerZeroedThick));
        let capacity = match &full {
            Some(info) => info.capacity,
            None => entry.capacity()?,
        };
        let settings = &self.native.settings;
        Ok(DiskInfo {
            settings: settings.of(&record.uuid),
            waiting: settings.waiting(&record.uuid),
            compression: None,
            deduplication: None,
            capacity,
            provisioning: provisioning.map_or(Provisioning::Thin, Provisioning::from),
            format: if flat { VMDK.to_owned() } else { record.kind.clone() },
            parent_snapshot: record.current().map(|snapshot| snapshot.name.clone()),
            origin: self.origin_of(&record),
            snapshots: record.snapshots.len() as u64,
            blocks_allocated: None,
            blocks_to_be_zeroed: None,
            exclusive: None,
            clients: self.switches.clients(&entry.identity(None)),
            users: Vec::new(),
            machine: None,
            stopped,
            cache_hits: 0,
            cache_misses: 0,
            created: record.created,
            image: full.map(|info| Box::new(details_of(info, entry.head_path(), record.overlay.is_some()))),
            name: record.name,
            uuid: record.uuid,
        })
    }

    /// The snapshot on which a clone is based, under the current name of the snapshot's disk.
    fn origin_of(&self, record: &vmdk::Record) -> Option<String> {
        let origin = record.origin.as_ref()?;
        let source = self.entries().into_iter().find(|entry| entry.disk.uuid() == origin.uuid);
        let name = source.map_or_else(|| origin.disk.clone(), |entry| entry.disk.name());
        Some(format!("{name}@{}", origin.snapshot))
    }

    /// Renames a disk; its files keep their names.
    pub fn rename_disk(&self, entry: &Arc<ForeignDisk>, to: &str) -> Result<DiskInfo> {
        let from = entry.disk.name();
        entry.disk.rename(to)?;
        let mut disks = self.disks.write();
        disks.remove(&from);
        disks.insert(to.to_owned(), Arc::clone(entry));
        drop(disks);
        self.info(entry, false)
    }

    /// Returns an error, because disks in VMware's formats cannot be resized.
    pub fn resize_disk(&self, entry: &ForeignDisk) -> Result<DiskInfo> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "disk '{}' cannot be resized: its capacity is stored in its images and in those of its snapshots; \
                 'lamina disk migrate' to the native format makes a disk that can be resized",
                entry.disk.name()
            ),
        ))
    }

    /// Deletes a disk with its snapshots.
    pub fn delete_disk(&self, entry: &Arc<ForeignDisk>, promote: bool) -> Result<()> {
        let given_up = {
            let _clients = entry.clients.lock();
            self.refuse_delete(entry, promote, &[])?;
            let name = entry.disk.name();
            let outcome = entry.disk.give_up();
            if outcome.is_err() && !entry.disk.record().is_going() {
                // The deletion was refused before anything changed, so the disk stays in the list.
                return outcome;
            }
            self.forget(&name);
            outcome
        };
        given_up.and_then(|()| self.remove_given_up(&entry.folder, &entry.disk))
    }

    /// Fails if a disk cannot be deleted even once the disks in `before` are deleted.
    pub(super) fn refuse_delete(&self, entry: &ForeignDisk, promote: bool, before: &[String]) -> Result<()> {
        let name = entry.disk.name();
        self.switches.refuse_in_use(&entry.identity(None), &format!("disk '{name}'"))?;
        for snapshot in &entry.disk.record().snapshots {
            let identity = entry.identity(Some(&snapshot.name));
            self.switches.refuse_in_use(&identity, &format!("snapshot '{name}@{}'", snapshot.name))?;
        }
        let mut clones = self.clones_of(entry, None);
        clones.retain(|clone| !before.contains(clone));
        if !clones.is_empty() {
            let names = crate::native::list(clones.iter().map(String::as_str));
            let how = if promote {
                "images in this format belong to one disk and cannot be handed over; delete them first"
            } else {
                "delete them first"
            };
            return Err(Error::new(
                ErrorKind::Busy,
                format!("disk '{name}' is the parent of linked clones: {names}; {how}"),
            ));
        }
        Ok(())
    }

    /// Statistics of a disk's chain.
    pub fn statistics(&self, entry: &ForeignDisk) -> Result<DiskStatistics> {
        let statistics = entry.disk.chain()?.statistics();
        let record = entry.disk.record();
        let tunables = record.tunables;
        Ok(DiskStatistics {
            name: record.name.clone(),
            levels: statistics
                .levels
                .iter()
                .map(|level| LevelInfo {
                    format: level.format.to_owned(),
                    capacity: level.capacity,
                    grain: level.grain,
                    writable: level.writable,
                })
                .collect(),
            metadata: statistics.metadata,
            data: statistics.data,
            fills: statistics.fills,
            tunables: Tuning {
                metadata_entries: Some(tunables.metadata_entries as u64),
                prefetch: Some(tunables.prefetch),
                prefetch_extents: Some(tunables.prefetch_extents as u64),
                read_cache: Some(tunables.read_cache),
                levels_max: Some(tunables.levels_max as u64),
            },
        })
    }

    /// Changes the tunables of a disk's chain, at once and persistently.
    pub fn tune(&self, entry: &ForeignDisk, tuning: &Tuning) -> Result<DiskStatistics> {
        let number = |value: Option<u64>| value.map(|value| usize::try_from(value).unwrap_or(usize::MAX));
        entry.disk.tune(&vmdk::Tuning {
            metadata_entries: number(tuning.metadata_entries),
            prefetch: tuning.prefetch,
            prefetch_extents: number(tuning.prefetch_extents),
            read_cache: tuning.read_cache,
            levels_max: number(tuning.levels_max),
        })?;
        self.statistics(entry)
    }

    /// Totals over all disks: capacity, bytes in the file system, number of disks and of snapshots.
    pub fn sums(&self) -> Result<Sums> {
        let mut sums = Sums::default();
        for entry in self.entries() {
            sums.disks += 1;
            sums.snapshots += entry.disk.record().snapshots.len() as u64;
            // An unreadable disk counts as 0 here; `check` reports it.
            sums.provisioned = sums.provisioned.saturating_add(entry.capacity().unwrap_or(0));
            // Its folder may be deleted at this moment.
            sums.allocated += self.allocated(&entry).unwrap_or(0);
        }
        Ok(sums)
    }

    /// Bytes that the files of a disk occupy in the file system.
    pub fn allocated(&self, entry: &ForeignDisk) -> Result<u64> {
        let path = self.images()?.join(&entry.folder);
        let mut sum = 0;
        for file in fs::read_dir(&path).during(|| format!("listing {}", path.display()))? {
            // The metadata cannot be read if the file was deleted since the folder was listed.
            let metadata = file.and_then(|file| file.metadata());
            sum += metadata.map_or(0, |metadata| metadata.blocks() * 512);
        }
        Ok(sum)
    }
}

/// Totals over all disks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub disks: u64,
    pub snapshots: u64,
    pub provisioned: u64,
    pub allocated: u64,
}

impl DiskFormat {
    /// The kind of base image of a new disk in this format, if it is an image.
    pub(crate) fn kind(self, provisioning: Provisioning) -> Option<ImageKind> {
        match self {
            Self::Native => None,
            Self::Vmdk => Some(match provisioning {
                Provisioning::Thin => ImageKind::Thin,
                Provisioning::ZeroedThick => ImageKind::ZeroedThick,
                Provisioning::EagerZeroedThick => ImageKind::EagerZeroedThick,
            }),
            Self::Image(kind) => Some(kind),
        }
    }
}

fn details_of(info: vmdk::Info, head: String, importing: bool) -> ImageDetails {
    ImageDetails {
        kind: info.kind,
        delta: info.delta.name().to_owned(),
        counters: info.counters.map(|of| Counters { blocks: of.blocks, nb: of.nb, tbz: of.tbz }),
        fragments: info.fragments,
        levels: info.levels as u64,
        levels_max: info.levels_max as u64,
        formats: info.formats.into_iter().map(str::to_owned).collect(),
        head,
        files: info
            .files
            .into_iter()
            .map(|file| ImageFile {
                path: file.path,
                standing: match file.standing {
                    vmdk::ImageOwnership::Made => "made".into(),
                    vmdk::ImageOwnership::Adopted => "adopted".into(),
                    vmdk::ImageOwnership::Foreign => "foreign".into(),
                },
            })
            .collect(),
        allocated: info.usage.allocated,
        mapped: info.usage.mapped,
        dead: info.usage.dead,
        consolidation_needed: info.redundant > 0,
        importing,
        live: None,
    }
}
