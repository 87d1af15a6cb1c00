//! Settings of compression and deduplication: which disks may have them, new disks, and the passes that they request.

use super::Datastore;
use crate::info::{DiskFormat, DiskInfo, NewDisk, Provisioning, Reclaimed};
use crate::native::IdlePass;
use crate::settings::{DefaultsChange, DiskDefaults, SettingsChange};
use error::{Error, ErrorKind, Result};
use std::sync::atomic::Ordering;
use std::time::Duration;
use work::Progress;

/// Refuses settings that have no effect on a disk, of a disk that exists or is to be made (`new`).
fn refuse(name: &str, is_native: bool, provisioning: Provisioning, change: &SettingsChange, new: bool) -> Result<()> {
    // A time without a method or a domain has no effect on such a disk either, and it gets none of these.
    let compresses = change.compression.map_or(change.compress_at.is_some(), |compression| !compression.is_off());
    let shares = change.dedup.as_ref().map_or(change.dedup_at.is_some(), |dedup| !dedup.is_off());
    if !(compresses || shares) || is_native && provisioning == Provisioning::Thin {
        return Ok(());
    }
    let (what, options) = match compresses {
        true => ("compressed", "--compression and --compress-at"),
        false => ("deduplicated", "--dedup and --dedup-at"),
    };
    let text = match (is_native, new) {
        (true, false) => format!(
            "disk '{name}' is thick, and is not {what}: its space is reserved so that its writes never need new space"
        ),
        (true, true) => format!(
            "disk '{name}' was not made: a thick disk is not {what}, because its space is reserved so that its writes \
             never need new space; leave out {options}, or make a thin disk"
        ),
        (false, false) => {
            format!("disk '{name}' is not a native one, so it is not {what}: 'lamina disk migrate' makes it native")
        }
        (false, true) => format!(
            "disk '{name}' was not made: in this format it is not a native one, and only native disks are {what}; \
             leave out {options}, or --format"
        ),
    };
    Err(Error::new(ErrorKind::Unsupported, text))
}

impl Datastore {
    /// The settings that new disks get, unless others are given.
    pub fn defaults(&self) -> DiskDefaults {
        self.native.settings.defaults()
    }

    /// Changes the settings that new disks get, at once and durably.
    pub fn change_defaults(&self, change: &DefaultsChange) -> Result<()> {
        let changed = self.native.settings.change_defaults(change);
        changed.map_err(|error| error.context("the settings of new disks were not changed"))
    }

    /// Checks the settings of a new disk. Returns them with those that are the defaults.
    pub(super) fn settings_of_new(&self, name: &str, new: &NewDisk, given: &SettingsChange) -> Result<SettingsChange> {
        let is_native = new.format == DiskFormat::Native;
        refuse(name, is_native, new.provisioning, given, true)?;
        let mut settings = given.clone();
        if is_native && new.provisioning == Provisioning::Thin {
            let defaults = self.defaults();
            settings.compression = Some(given.compression.unwrap_or(defaults.compression));
            if given.compression.is_none() {
                settings.compress_at = given.compress_at.or(Some(defaults.compress_at));
            }
            if given.dedup.is_none() {
                settings.dedup_at = given.dedup_at.or(Some(defaults.dedup_at));
            }
            settings.dedup = Some(given.dedup.clone().unwrap_or(defaults.dedup));
        }
        settings.compression = settings.compression.filter(|compression| !compression.is_off());
        if settings.compression.is_none() {
            // A time without a method is refused when the settings are recorded.
            settings.compress_at = given.compress_at;
        }
        settings.dedup = settings.dedup.filter(|dedup| !dedup.is_off());
        if settings.dedup.is_none() {
            settings.dedup_at = given.dedup_at;
        }
        Ok(settings)
    }

    /// The change that gives a new disk the defaults.
    fn default_change(&self) -> SettingsChange {
        let DiskDefaults { compression, compress_at, dedup, dedup_at } = self.defaults();
        let compression = Some(compression).filter(|compression| !compression.is_off());
        let compress_at = compression.map(|_| compress_at);
        let dedup = Some(dedup).filter(|dedup| !dedup.is_off());
        let dedup_at = dedup.as_ref().map(|_| dedup_at);
        SettingsChange { compression, compress_at, dedup, dedup_at, ..SettingsChange::default() }
    }

    /// Refuses settings that have no effect on a disk.
    pub(super) fn check_change(&self, disk: &DiskInfo, change: &SettingsChange) -> Result<()> {
        refuse(&disk.name, disk.format == "native", disk.provisioning, change, false)
    }

    /// Gives a disk that was made by a copy, an import or a reception the settings that are the defaults. A failure is
    /// only logged, because the disk exists already.
    pub(crate) fn give_defaults(&self, name: &str) {
        match self.disk_in_list(name) {
            Ok(disk) if self.check_change(&disk, &self.default_change()).is_ok() => {
                self.give_defaults_to(&disk.uuid, name);
            }
            _ => {}
        }
    }

    /// As [`Datastore::give_defaults`], for a disk with that UUID that is or will be a thin native one.
    pub(crate) fn give_defaults_to(&self, uuid: &str, name: &str) {
        let change = self.default_change();
        if change != SettingsChange::default()
            && let Err(error) = self.native.settings.change(uuid, &change)
        {
            tracing::warn!(disk = name, %error, "the new disk has no settings; 'lamina disk edit' sets them");
        }
    }

    /// Sets the memory for the prints of a deduplication, in bytes, instead of
    /// [`DEDUP_MEMORY_DEFAULT`](crate::DEDUP_MEMORY_DEFAULT). With less memory a deduplication finds the same in more
    /// rounds. Less than [`DEDUP_MEMORY_MIN`](crate::DEDUP_MEMORY_MIN) counts as that. Half of it is for the hints of
    /// deduplication at write-back, as long as a disk has it: with less memory, it finds less.
    pub fn set_dedup_memory(&self, bytes: usize) {
        self.native.dedup_memory.store(bytes, Ordering::Relaxed);
    }

    /// The pass that the settings of disks request over data that was not written in the last `after`; `None` if there
    /// is none now, or if a pass is running. The caller calls this again and again: the first call begins to record
    /// writes.
    pub fn next_idle(&self, after: Duration) -> Result<Option<IdlePass>> {
        self.native.next_idle(after, |name| self.uses.may_be_shared(name))
    }

    /// Compresses data of a disk and its snapshots that was not written in the last `after`, or stores equal data of
    /// disks and their snapshots once, while they are in use. Ends early, without an error, if another operation uses
    /// one of the disks exclusively, or if a setting was changed.
    ///
    /// # Errors
    /// `Interrupted` if the pass was cancelled. The next one continues it.
    pub fn pass_idle(&self, pass: &IdlePass, after: Duration, progress: &dyn Progress) -> Result<Reclaimed> {
        self.native.pass_idle(pass, after, |name| self.uses.may_be_shared(name), &self.background(progress))
    }
}
