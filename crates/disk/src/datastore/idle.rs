//! Settings of compression: which disks may have them, new disks, and the passes that they request.

use super::Datastore;
use crate::info::{DiskFormat, DiskInfo, NewDisk, Provisioning, Reclaimed};
use crate::native::IdleDisk;
use crate::settings::{DefaultsChange, DiskDefaults, SettingsChange};
use error::{Error, ErrorKind, Result};
use std::time::Duration;
use work::Progress;

/// Refuses compression of a disk that is never compressed.
fn refuse_compression(name: &str, is_native: bool, provisioning: Provisioning) -> Result<()> {
    let why = match (is_native, provisioning) {
        (true, Provisioning::Thin) => return Ok(()),
        (true, _) => "is thick, and is not compressed: its space is reserved so that its writes never need new space",
        (false, _) => "is not a native one, so it is not compressed: 'lamina disk migrate' makes it native",
    };
    Err(Error::new(ErrorKind::Unsupported, format!("disk '{name}' {why}")))
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
        let refused = refuse_compression(name, is_native, new.provisioning);
        let mut settings = given.clone();
        match given.compression {
            Some(compression) if !compression.is_off() => refused?,
            Some(_) => settings.compression = None,
            None if refused.is_ok() => settings.compression = self.default_compression().compression,
            None => {}
        }
        Ok(settings)
    }

    /// The change that gives a new disk the defaults.
    fn default_compression(&self) -> SettingsChange {
        let compression = Some(self.defaults().compression).filter(|compression| !compression.is_off());
        SettingsChange { compression, ..SettingsChange::default() }
    }

    /// Refuses settings that have no effect on a disk.
    pub(super) fn check_change(&self, disk: &DiskInfo, change: &SettingsChange) -> Result<()> {
        match change.compression {
            Some(compression) if !compression.is_off() => {
                refuse_compression(&disk.name, disk.format == "native", disk.provisioning)
            }
            _ => Ok(()),
        }
    }

    /// Gives a disk that was made by a copy, an import or a reception the settings that are the defaults. A failure is
    /// only logged, because the disk exists already.
    pub(crate) fn give_defaults(&self, name: &str) {
        match self.disk_in_list(name) {
            Ok(disk) if self.check_change(&disk, &self.default_compression()).is_ok() => {
                self.give_defaults_to(&disk.uuid, name);
            }
            _ => {}
        }
    }

    /// As [`Datastore::give_defaults`], for a disk with that UUID that is or will be a thin native one.
    pub(crate) fn give_defaults_to(&self, uuid: &str, name: &str) {
        let change = self.default_compression();
        if change != SettingsChange::default()
            && let Err(error) = self.native.settings.change(uuid, &change)
        {
            tracing::warn!(disk = name, %error, "the new disk has no compression; 'lamina disk edit' sets it");
        }
    }

    /// A disk of which data is to be compressed that was not written in the last `after`; `None` if there is none now,
    /// or if a pass is running. The caller calls this again and again: the first call begins to record writes.
    pub fn next_idle(&self, after: Duration) -> Result<Option<IdleDisk>> {
        self.native.next_idle(after, |name| self.uses.may_be_shared(name))
    }

    /// Compresses data of the disk and its snapshots that was not written in the last `after`, while they are in use.
    /// Ends early, without an error, if another operation uses the disk exclusively, or if its setting was changed.
    ///
    /// # Errors
    /// `Interrupted` if the pass was cancelled. The next one continues it.
    pub fn compress_idle(&self, disk: &IdleDisk, after: Duration, progress: &dyn Progress) -> Result<Reclaimed> {
        self.native.compress_idle(disk, after, |name| self.uses.may_be_shared(name), &self.background(progress))
    }
}
