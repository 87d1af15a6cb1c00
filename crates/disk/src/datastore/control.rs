//! Control operations: each is passed to the native disks or to the disks in VMware's formats, depending on the disk's
//! format.

use super::Datastore;
use crate::compression::Compression;
use crate::deduplication::Deduplication;
use crate::foreign::ForeignDisk;
use crate::info::{
    Direction, DiskInfo, DiskStatistics, EachExtent, NewDisk, Point, Reclaimed, SnapshotInfo, SnapshotOptions, Tuning,
};
use crate::migrate::Overlay;
use crate::names;
use crate::native::{Taking, check_capacity};
use crate::quota::{LimitInfo, Limits};
use crate::settings::{LimitsChange, SettingsChange};
use crate::snapshot_group::{self, ImageSnapshot, UnderWay};
use error::{Error, ErrorKind, Result};
use std::sync::Arc;
use work::Progress;

impl Datastore {
    /// The disk `name`, for operations that only disks in VMware's formats support. For a native disk returns an error
    /// with the reason `what`.
    pub(super) fn image_disk(&self, name: &str, what: &str) -> Result<Arc<ForeignDisk>> {
        if let Some(entry) = self.foreign.find(name) {
            return Ok(entry);
        }
        self.native.find_disk(name)?;
        let text = format!("disk '{name}' is a native one: {what}");
        Err(Error::new(ErrorKind::Unsupported, text))
    }

    /// Creates a disk with the settings that are the defaults. Reports progress while a thick disk is zeroed.
    pub fn create_disk(&self, name: &str, new: &NewDisk, progress: &dyn Progress) -> Result<DiskInfo> {
        self.create_disk_with(name, new, &SettingsChange::default(), progress)
    }

    /// As [`Datastore::create_disk`], with settings. If these cannot be stored, the disk is removed. If a crash
    /// interrupts the creation, a disk with default settings may exist.
    pub fn create_disk_with(
        &self,
        name: &str,
        new: &NewDisk,
        settings: &SettingsChange,
        progress: &dyn Progress,
    ) -> Result<DiskInfo> {
        let _name = self.reserve(name)?;
        let settings = &self.settings_of_new(name, new, settings)?;
        let made = self.make_disk(name, new, progress)?;
        if *settings == SettingsChange::default() {
            return Ok(made);
        }
        if let Err(error) = self.native.settings.change(&made.uuid, settings) {
            self.delete_disk(name, false)?;
            return Err(error.context(format!("disk '{name}' was not made")));
        }
        self.disk_in_list(name)
    }

    /// Changes the settings of a disk, at once and durably, also while the disk is in use.
    pub fn edit_disk(&self, name: &str, change: &SettingsChange) -> Result<DiskInfo> {
        let _use = self.uses.share(name)?;
        let disk = self.disk_in_list(name)?;
        self.check_change(&disk, change)?;
        let changed = self.native.settings.change(&disk.uuid, change);
        changed.map_err(|error| error.context(format!("disk '{name}' was not changed")))?;
        // Labels decide with which disks a disk shares blocks.
        self.native.reduce_writes()?;
        self.disk_in_list(name)
    }

    /// Changes the limits of all disks with a label, at once and durably.
    pub fn limit_label(&self, label: &str, change: &LimitsChange) -> Result<()> {
        let changed = self.native.settings.change_label(label, change);
        changed.map_err(|error| error.context(format!("label '{label}' was not changed")))
    }

    /// The labels of disks, and those with limits, with their limits and use.
    pub fn labels(&self) -> Result<Vec<LimitInfo>> {
        let mut all = self.limits()?;
        all.retain(|one| one.is_label);
        for (name, disks) in self.native.settings.labels() {
            if !all.iter().any(|one| one.name == name) {
                let (limits, used) = (Limits::default(), None);
                all.push(LimitInfo { name, is_label: true, limits, used, disks, exceeded: false });
            }
        }
        all.sort_by(|one, two| one.name.cmp(&two.name));
        Ok(all)
    }

    /// The quotas and reservations of disks and labels, with their use. Counts disks that are not counted yet.
    pub fn limits(&self) -> Result<Vec<LimitInfo>> {
        self.native.settings.quotas().info(true)
    }

    /// One disk, without its block counts.
    pub(super) fn disk_in_list(&self, name: &str) -> Result<DiskInfo> {
        match self.foreign.find(name) {
            Some(entry) => self.foreign.info(&entry, false),
            None => self.native.disk_info(self.native.find_disk(name)?.id, false),
        }
    }

    /// The UUID of a disk, under which its settings are stored.
    pub fn uuid_of(&self, name: &str) -> Result<String> {
        match self.foreign.find(name) {
            Some(entry) => Ok(entry.disk.uuid()),
            None => self.native.find_disk(name).map(|disk| names::uuid_text(&disk.uuid)),
        }
    }

    /// The present name of the disk with that UUID.
    pub(super) fn named(&self, uuid: &str) -> Option<String> {
        let image = self.foreign.entries().into_iter().find(|entry| entry.disk.uuid() == uuid);
        let native = || self.native.name_of(&names::parse_uuid(uuid)?);
        image.map(|entry| entry.disk.name()).or_else(native)
    }

    /// The present name of the disk with that UUID, which had the name `name` before.
    pub fn name_of(&self, uuid: &str, name: &str) -> Result<String> {
        if self.uuid_of(name).is_ok_and(|there| there == uuid) {
            return Ok(name.to_owned());
        }
        self.named(uuid).ok_or_else(|| {
            let text = format!("disk '{name}' was deleted meanwhile");
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Gives the settings of a disk to clones of it that were just made. `source` is the UUID of the disk: while the
    /// clones were made, the disk may have been renamed, and another disk may have got its name.
    fn pass_on_settings(&self, disk: &str, source: &str, clones: &mut [DiskInfo]) {
        let settings = &self.native.settings;
        let uuids: Vec<String> = clones.iter().map(|clone| clone.uuid.clone()).collect();
        if let Err(error) = settings.inherit(source, &uuids) {
            tracing::warn!(
                disk, %error,
                "the clones have the default settings, not those of this disk; 'lamina disk edit' changes them"
            );
        }
        clones.iter_mut().for_each(|clone| clone.settings = settings.of(&clone.uuid));
    }

    fn make_disk(&self, name: &str, new: &NewDisk, progress: &dyn Progress) -> Result<DiskInfo> {
        match new.format.kind(new.provisioning) {
            Some(kind) => {
                check_capacity(name, new.capacity)?;
                self.foreign.create_disk(&vmdk::NewDisk::new(name, new.capacity, kind, new.delta), progress)
            }
            None if new.delta.is_some() => Err(Error::new(
                ErrorKind::Invalid,
                format!("disk '{name}': snapshots of a native disk are no images and have no format of their own"),
            )),
            None => self.native.create_disk(name, new.capacity, new.provisioning, progress),
        }
    }

    /// All disks by name, without their block counts.
    pub fn disks(&self) -> Result<Vec<DiskInfo>> {
        let mut disks = self.native.disks()?;
        disks.extend(self.foreign.disks());
        disks.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(disks)
    }

    /// One disk, with its block counts.
    pub fn disk(&self, name: &str) -> Result<DiskInfo> {
        match self.foreign.find(name) {
            Some(entry) => {
                let mut info = self.foreign.info(&entry, true)?;
                if let Some(image) = &mut info.image
                    && let Some(overlay) = Overlay::of(&entry.disk.record())?
                {
                    image.live = Some(self.live_progress(&info.uuid, &overlay));
                }
                Ok(info)
            }
            None => self.native.disk(name),
        }
    }

    /// Grows a disk, or shrinks it if `shrink` confirms that data at its end may be lost.
    pub fn resize_disk(&self, name: &str, capacity: u64, shrink: bool) -> Result<DiskInfo> {
        let _use = self.uses.share(name)?;
        let resized = match self.foreign.find(name) {
            Some(entry) => self.foreign.resize_disk(&entry),
            None => self.native.resize_disk(name, capacity, shrink),
        };
        self.recount(name);
        resized.map_err(|error| match error.kind() {
            ErrorKind::NoSpace => error.context(format!("disk '{name}' was not resized")),
            _ => error,
        })
    }

    /// Renames a disk.
    pub fn rename_disk(&self, name: &str, to: &str) -> Result<DiskInfo> {
        let _use = self.uses.share(name)?;
        let _name = self.reserve(to)?;
        let _new_use = self.uses.share(to)?;
        let renamed = match self.foreign.find(name) {
            Some(entry) => self.foreign.rename_disk(&entry, to),
            None => self.native.rename_disk(name, to),
        }?;
        self.uses.renamed(name, to);
        self.native.settings.renamed(&renamed.uuid, to);
        Ok(renamed)
    }

    /// Deletes a disk with its snapshots. `Busy` while clients have the disk open, and if linked clones are based on it
    /// (the error lists them). With `promote`, the snapshots that clones are based on are handed over to the clones
    /// instead. The background migration of a live import is ended first, and started again if the disk cannot be
    /// deleted.
    pub fn delete_disk(&self, name: &str, promote: bool) -> Result<()> {
        let was_imported = self.end_import(name);
        let deleted = self.delete_whole_disk(name, promote);
        if was_imported && deleted.is_err() {
            self.start_imports();
        }
        deleted
    }

    /// Deletes a disk that a request has made before it failed.
    ///
    /// # Errors
    /// `NotFound` if the disk was renamed or deleted since: its name may belong to another disk. `Busy` while another
    /// operation uses the disk.
    pub fn take_back(&self, made: &DiskInfo) -> Result<()> {
        self.end_whole_groups()?;
        // The disk is not renamed between the check and its deletion, because a rename needs a use too.
        let _use = self.uses.alone(&made.name, "deleted")?;
        if self.uuid_of(&made.name)? != made.uuid {
            let text = format!("disk '{}' is another disk now", made.name);
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        self.delete_used(&made.name, false)
    }

    fn delete_whole_disk(&self, name: &str, promote: bool) -> Result<()> {
        self.end_whole_groups()?;
        let _use = self.uses.share(name)?;
        self.delete_used(name, promote)
    }

    /// Deletes a disk of which the caller has a use.
    fn delete_used(&self, name: &str, promote: bool) -> Result<()> {
        let Some(entry) = self.foreign.find(name) else {
            let uuid = self.uuid_of(name)?;
            // A migration of the clone would delete the snapshots that are handed over to it.
            let mut clone_uses = Vec::new();
            self.native.delete_disk(name, promote, &mut |clone| {
                clone_uses.push(self.uses.share(clone)?);
                Ok(())
            })?;
            self.native.settings.forget(&uuid);
            return Ok(());
        };
        let (uuid, spare) = (entry.disk.uuid(), self.spare());
        let overlay = Overlay::of(&entry.disk.record()).ok().flatten();
        match self.foreign.delete_disk(&entry, promote) {
            // XFS may need space for the record's new name. The disk is unchanged after this error.
            Err(error)
                if error.kind() == ErrorKind::NoSpace && self.foreign.find(name).is_some() && spare.give_up() =>
            {
                let deleted = self.foreign.delete_disk(&entry, promote);
                spare.keep();
                deleted
            }
            outcome => outcome,
        }?;
        drop(entry);
        self.native.settings.forget(&uuid);
        if let Some(overlay) = overlay
            && let Err(error) = self.native.remove_hidden(&overlay.native)
        {
            tracing::warn!(%error, disk = name, "the writes to the deleted disk take space until the next start");
        }
        if let Err(error) = snapshot_group::forget(&**self.directory(), &uuid) {
            tracing::warn!(%error, disk = name, "a record of a snapshot group still names the deleted disk");
        }
        Ok(())
    }

    /// Takes snapshots of several disks at one point in time: (disk, snapshot name).
    pub fn create_snapshots(&self, of: &[(String, String)], options: &SnapshotOptions) -> Result<Vec<SnapshotInfo>> {
        self.end_groups()?;
        let _uses = of.iter().map(|(disk, _)| self.uses.share(disk)).collect::<Result<Vec<_>>>()?;
        let mut images = Vec::new();
        let mut native = Vec::new();
        for (disk, name) in of {
            names::check("snapshot", name)?;
            match self.foreign.find(disk) {
                Some(entry) => images.push((entry, name.clone())),
                None => native.push((disk.clone(), name.clone())),
            }
        }
        if options.is_special()
            && let Some((disk, _)) = native.first()
        {
            self.native.find_disk(disk)?;
            let text = format!("disk '{disk}' is a native one: its snapshots have no folder, format or description");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let mut taken = Vec::new();
        if native.is_empty() {
            self.snapshot_images(&images, None, options)?;
        } else {
            // The lock of the native disks is acquired before the images are opened: no write waits for that lock while
            // the images are opened.
            taken = self.native.create_snapshots(&native, &mut |taking| match images.is_empty() {
                true => taking.take(),
                false => self.snapshot_images(&images, Some(taking), options),
            })?;
        }
        for (entry, name) in &images {
            taken.extend(self.foreign.snapshots(entry).into_iter().filter(|snapshot| snapshot.name == *name));
        }
        let place = |info: &SnapshotInfo| of.iter().position(|(disk, name)| *disk == info.disk && *name == info.name);
        taken.sort_by_key(place);
        Ok(taken)
    }

    /// Takes snapshots of disks in VMware's formats, and calls `native` to take those of native disks. After a power
    /// cut either all of the snapshots exist or none.
    fn snapshot_images(
        &self,
        images: &[(Arc<ForeignDisk>, String)],
        mut native: Option<&mut Taking<'_>>,
        options: &SnapshotOptions,
    ) -> Result<()> {
        // Locked from before the snapshots' numbers are determined until the group ends, so that meanwhile every
        // snapshot with the name and number of one in the group belongs to the group.
        let _alone = images.iter().map(|(entry, _)| entry.begin_snapshot()).collect::<Result<Vec<_>>>()?;
        if images.len() < 2 && native.is_none() {
            return self.foreign.create_snapshots(images, None, options, &mut || Ok(()));
        }
        let image = |(entry, name): &(Arc<ForeignDisk>, String)| ImageSnapshot {
            disk: entry.disk.uuid(),
            folder: entry.folder.clone(),
            snapshot: name.clone(),
            uid: entry.disk.record().next_uid(),
        };
        let uuids = native.iter().flat_map(|native| native.wanted()).map(|new| new.uuid).collect::<Vec<_>>();
        let images_of: Vec<ImageSnapshot> = images.iter().map(image).collect();
        let uids: Vec<u32> = images_of.iter().map(|image| image.uid).collect();
        let mut group = UnderWay::new(self.directory(), &uuids, images_of)?;
        let outcome = group.begin().and_then(|()| {
            self.foreign.create_snapshots(images, Some(&uids), options, &mut || {
                let Some(native) = &mut native else { return Ok(()) };
                let taken = native.take();
                if taken.is_err() && !native.is_certain() {
                    // A failure of this write is ignored, because the record is written again below.
                    let _ = group.give_up();
                }
                taken
            })
        });
        let ended = match &outcome {
            Ok(()) => group.end(),
            Err(_) => {
                let native_gone = native.is_none_or(|native| native.take_back());
                group.take_back(&self.foreign, native_gone)
            }
        };
        if ended.is_err() {
            self.unended.lock().push(group);
        }
        outcome.and(ended)
    }

    /// Updates or removes the records of ended snapshot groups whose update failed before. Called before snapshots are
    /// created, because recovery could mistake a new snapshot for one of a group that has the same number.
    fn end_groups(&self) -> Result<()> {
        self.end_groups_but(|_| false)
    }

    /// Removes the records of complete groups before a snapshot is deleted, or gets another identity with its disk,
    /// because recovery compares the records with the snapshots that exist. Removing a record needs no space. The
    /// records of abandoned groups may be updated later.
    pub(crate) fn end_whole_groups(&self) -> Result<()> {
        self.end_groups_but(UnderWay::is_given_up)
    }

    fn end_groups_but(&self, may_wait: fn(&UnderWay) -> bool) -> Result<()> {
        let mut unended = self.unended.lock();
        let mut outcome = Ok(());
        unended.retain_mut(|group| match group.try_again(&self.foreign) {
            Ok(()) => false,
            Err(_) if may_wait(group) => true,
            Err(error) => {
                outcome = Err(error);
                true
            }
        });
        outcome
    }

    /// Snapshots of one disk, or of all disks, parents before children.
    pub fn snapshots(&self, disk: Option<&str>) -> Result<Vec<SnapshotInfo>> {
        match disk.map(|name| (name, self.foreign.find(name))) {
            Some((_, Some(entry))) => Ok(self.foreign.snapshots(&entry)),
            Some((name, None)) => self.native.snapshots(Some(name)),
            None => {
                let mut all = self.native.snapshots(None)?;
                all.extend(self.foreign.entries().iter().flat_map(|entry| self.foreign.snapshots(entry)));
                Ok(all)
            }
        }
    }

    /// Deletes a snapshot. `Busy` while clients have it open, and if linked clones are based on it (the error lists
    /// them). A snapshot that is an image is merged with a neighbouring image, in the given direction, or in the
    /// cheaper direction if none is given.
    pub fn delete_snapshot(
        &self,
        disk: &str,
        name: &str,
        direction: Option<Direction>,
        progress: &dyn Progress,
    ) -> Result<()> {
        self.end_whole_groups()?;
        let _use = self.uses.share(disk)?;
        match self.foreign.find(disk) {
            Some(entry) => self.foreign.delete_snapshot(&entry, name, direction, progress),
            None if direction.is_some() => {
                self.image_disk(disk, "deleting its snapshots merges nothing: omit --up and --down").map(|_| ())
            }
            None => self.native.delete_snapshot(disk, name),
        }
    }

    /// Reverts the head to a snapshot. `Busy` while clients have the disk open.
    pub fn revert(&self, disk: &str, name: &str) -> Result<DiskInfo> {
        let _use = self.uses.share(disk)?;
        match self.foreign.find(disk) {
            Some(entry) => self.foreign.revert(&entry, name),
            None => self.native.revert(disk, name),
        }
        .inspect(|_| self.recount(disk))
    }

    /// Lets the quotas count a disk again after an operation that may have mapped more or less of it.
    fn recount(&self, disk: &str) {
        if let Ok(uuid) = self.uuid_of(disk) {
            self.native.settings.quotas().has_changed(&uuid);
        }
    }

    /// Calls `each` for every extent that differs between two points of a disk, in order of offset.
    pub fn diff(&self, disk: &str, from: &Point, to: &Point, each: EachExtent<'_>) -> Result<()> {
        match self.foreign.find(disk) {
            Some(entry) => self.foreign.diff(&entry, from, to, each),
            None => self.native.diff(disk, from, to, each),
        }
    }

    /// Makes linked clones of a snapshot, or of the head through a new snapshot. Either all clones are made or none.
    pub fn clone_linked(
        &self,
        disk: &str,
        at: &Point,
        names: &[String],
        progress: &dyn Progress,
    ) -> Result<Vec<DiskInfo>> {
        let _use = self.uses.share(disk)?;
        let reserved = self.reserve_all(names);
        let _names = reserved.map_err(|error| Error::new(error.kind(), format!("{error}; no clone was made")))?;
        let source = self.uuid_of(disk)?;
        let mut clones = match self.foreign.find(disk) {
            Some(entry) => self.foreign.clone_linked(&entry, at, names, progress),
            None => self.native.clone_linked(disk, at, names, progress),
        }?;
        self.pass_on_settings(disk, &source, &mut clones);
        Ok(clones)
    }

    /// Makes an independent copy of the allocated data. An interrupted copy is removed.
    pub fn clone_full(&self, disk: &str, at: &Point, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        let _use = self.uses.share(disk)?;
        let _name = self.reserve(name)?;
        let source = self.uuid_of(disk)?;
        let mut clone = match self.foreign.find(disk) {
            Some(entry) => self.foreign.clone_full(&entry, at, name, progress),
            None => self.native.clone_full(disk, at, name, progress),
        }?;
        self.pass_on_settings(disk, &source, std::slice::from_mut(&mut clone));
        Ok(clone)
    }

    /// Makes a linked clone independent of its parent, while the clone is in use. The parent can be deleted afterwards.
    pub fn detach(&self, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        let _use = self.uses.share(name)?;
        match self.foreign.find(name) {
            Some(_) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("disk '{name}' needs its parent's images; 'lamina clone --full' makes an independent copy"),
            )),
            None => self.native.detach(name, progress),
        }
    }

    /// Statistics of the chain of a disk in VMware's formats.
    pub fn disk_statistics(&self, name: &str) -> Result<DiskStatistics> {
        self.foreign.statistics(&*self.image_disk(name, "it has no chain, and so no statistics of one")?)
    }

    /// Changes the tunables of a chain, at once and persistently.
    pub fn tune_disk(&self, name: &str, tuning: &Tuning) -> Result<DiskStatistics> {
        let _use = self.uses.share(name)?;
        self.foreign.tune(&*self.image_disk(name, "it has no chain to tune")?, tuning)
    }

    /// Opens a disk that stopped after an I/O error, while its clients stay connected. Has no effect on a disk that has
    /// not stopped.
    pub fn reopen_disk(&self, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        let _use = self.uses.alone(name, "opened again")?;
        if let Some(entry) = self.foreign.find(name) {
            return self.foreign.reopen(&entry, progress);
        }
        let info = self.native.disk(name)?;
        match &info.stopped {
            None => Ok(info),
            Some(why) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "disk '{name}' is a native one, and all native disks of the datastore have stopped ({why}); \
                     stop the server and start it again"
                ),
            )),
        }
    }

    /// Allocates and zeroes all space of a thin or zeroed thick flat disk, while the disk is in use.
    pub fn inflate_disk(&self, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        let _use = self.uses.share(name)?;
        let entry = self.image_disk(name, "'lamina clone --full' makes copies of other provisioning types")?;
        self.foreign.inflate(&entry, progress)?;
        self.foreign.info(&entry, true)
    }

    /// Returns to the file system the blocks of a flat disk that hold only zeros, while the disk is in use.
    pub fn punch_zeros(&self, name: &str, progress: &dyn Progress) -> Result<Reclaimed> {
        let _use = self.uses.share(name)?;
        self.foreign.punch_zeros(
            &*self.image_disk(name, "discarded blocks return to the file system without a command")?,
            progress,
        )
    }

    /// Compresses a native disk and its snapshots, and stores equal blocks of the chosen data once, while clients use
    /// them. `dedup_memory` limits the memory for the prints of the blocks, in bytes, as in
    /// [`Datastore::set_dedup_memory`]; `None` for the limit that is set there.
    pub fn optimize_disk(
        &self,
        name: &str,
        compression: Compression,
        deduplication: Deduplication,
        dedup_memory: Option<usize>,
        progress: &dyn Progress,
    ) -> Result<Reclaimed> {
        let _use = self.uses.share(name)?;
        if self.foreign.find(name).is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "disk '{name}' is not a native one, so it is neither compressed nor deduplicated: 'lamina disk \
                     migrate' makes it native"
                ),
            ));
        }
        self.native.optimize(name, compression, deduplication, dedup_memory, &self.background(progress))
    }

    /// Finds grains of a disk's deltas that nothing references and frees them, while the disk is in use.
    pub fn wipe_disk(&self, name: &str, progress: &dyn Progress) -> Result<Reclaimed> {
        let _use = self.uses.share(name)?;
        self.foreign
            .wipe(&*self.image_disk(name, "freed blocks return to the file system without a command")?, progress)
    }

    /// Returns free grains of a disk's deltas to the file system, while the disk is in use.
    pub fn shrink_disk(&self, name: &str, progress: &dyn Progress) -> Result<Reclaimed> {
        let _use = self.uses.share(name)?;
        self.foreign
            .shrink(&*self.image_disk(name, "freed blocks return to the file system without a command")?, progress)
    }

    /// Merges the chain of a disk into its base, while the disk is in use. The snapshots of all merged images are
    /// deleted.
    pub fn consolidate_disk(&self, name: &str, progress: &dyn Progress) -> Result<DiskInfo> {
        self.end_whole_groups()?;
        let _use = self.uses.share(name)?;
        let entry = self.image_disk(name, "it has no chain to consolidate")?;
        self.foreign.consolidate(&entry, progress)?;
        self.foreign.info(&entry, true)
    }
}
