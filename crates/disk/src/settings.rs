//! Settings of disks: what users choose for a disk besides its content, the same for disks of all formats.
//!
//! All settings are in one small record of the datastore, under the UUIDs of the disks, because the record of a native
//! disk and that of a disk in VMware's formats have nothing in common. The layout is in `docs/format/settings.md`.
//!
//! 1. A change is durable before it takes effect.
//! 2. A disk without an entry has the default settings, and the file does not exist before the first change.
//! 3. A file that cannot be read is never replaced, except by a repair, which keeps it under another name.
//! 4. `state` is never locked during I/O, because requests of clients look up their disk's settings.

use crate::full::{Notices, OnFull, SpaceWait, WaitNotice};
use crate::info::{CheckReport, Finding, WaitingWrites};
use crate::names;
use crate::sealed::{self, Kind};
use crate::spare::Spare;
use backend::Directory;
use error::{Error, ErrorKind, IoContext, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// Name of the file, in the folder of the datastore.
const FILE: &str = "settings";
/// The name that a damaged file gets by a repair.
const DAMAGED: &str = "settings.damaged";
/// Kind of the file. The limit is sufficient for a hundred thousand disks.
const KIND: Kind = Kind { word: "settings", version: 1, length_max: 64 << 20 };

/// The settings of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSettings {
    /// What happens to writes that need space while there is none.
    #[serde(default)]
    pub on_full: OnFull,
}

/// Changes of settings; `None` leaves a setting unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingsChange {
    /// What happens to writes that need space while there is none.
    #[serde(default)]
    pub on_full: Option<OnFull>,
}

impl SettingsChange {
    fn apply(&self, settings: &mut DiskSettings) {
        settings.on_full = self.on_full.unwrap_or(settings.on_full);
    }
}

/// The record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SettingsRecord {
    /// The settings of each disk that has other settings than the defaults, by its UUID.
    disks: BTreeMap<String, DiskSettings>,
}

fn decode(bytes: &[u8]) -> Result<SettingsRecord> {
    let record: SettingsRecord = KIND.decode(bytes)?;
    match record.disks.keys().all(|uuid| names::parse_uuid(uuid).is_some()) {
        true => Ok(record),
        false => Err(KIND.corrupt("has a disk without a UUID")),
    }
}

#[derive(Default)]
struct State {
    disks: BTreeMap<String, DiskSettings>,
    /// Disks that clients have open.
    open: BTreeMap<String, Weak<SpaceWait>>,
    /// Why the record cannot be read.
    unreadable: Option<String>,
}

impl State {
    fn find_open(&self, uuid: &str) -> Option<Arc<SpaceWait>> {
        self.open.get(uuid).and_then(Weak::upgrade)
    }
}

/// The settings of all disks of a datastore.
pub(crate) struct Settings {
    directory: Arc<dyn Directory>,
    /// Serializes changes.
    changes: Mutex<()>,
    state: Mutex<State>,
    notices: Arc<Notices>,
}

impl Settings {
    /// Reads the settings. If the record cannot be read, all disks have the default settings, and no setting can be
    /// changed before a repair.
    pub fn open(directory: Arc<dyn Directory>) -> Arc<Self> {
        let read = KIND.read(&*directory, FILE).and_then(|bytes| match bytes {
            None => Ok(SettingsRecord::default()),
            Some(bytes) => {
                let (record, mended) = KIND.decode_mending(&bytes, decode)?;
                if let Some(error) = mended {
                    tracing::warn!(%error, "one byte of the record of settings was damaged; its right value is known");
                }
                Ok(record)
            }
        });
        let mut state = State::default();
        match read {
            Ok(record) => state.disks = record.disks,
            Err(error) => {
                tracing::error!(%error, "the settings of disks cannot be read: all disks have the default settings");
                state.unreadable = Some(error.to_string());
            }
        }
        Arc::new(Self { directory, changes: Mutex::new(()), state: Mutex::new(state), notices: Arc::default() })
    }

    /// Sets the receiver of notices about waiting writes.
    pub fn set_receiver(&self, receiver: impl Fn(WaitNotice) + Send + Sync + 'static) {
        self.notices.set(receiver);
    }

    /// The settings of a disk.
    pub fn of(&self, uuid: &str) -> DiskSettings {
        self.state.lock().disks.get(uuid).cloned().unwrap_or_default()
    }

    /// The policy and the waiting writes of a disk, for a client that opens the disk.
    pub fn open_disk(&self, uuid: &str, name: &str) -> Arc<SpaceWait> {
        let mut state = self.state.lock();
        if let Some(open) = state.find_open(uuid) {
            return open;
        }
        state.open.retain(|_, open| open.strong_count() > 0);
        let policy = state.disks.get(uuid).map(|settings| settings.on_full).unwrap_or_default();
        let open = SpaceWait::new(name, policy, Arc::clone(&self.notices));
        state.open.insert(uuid.to_owned(), Arc::downgrade(&open));
        open
    }

    /// The waiting writes of a disk.
    pub fn waiting(&self, uuid: &str) -> Option<WaitingWrites> {
        // The lock is released before the disk's own lock is acquired.
        let open = self.state.lock().find_open(uuid)?;
        open.waiting()
    }

    /// The waiting writes of all disks, by the names of the disks.
    pub fn all_waiting(&self) -> Vec<WaitingWrites> {
        let open: Vec<Arc<SpaceWait>> = self.state.lock().open.values().filter_map(Weak::upgrade).collect();
        let mut all: Vec<WaitingWrites> = open.iter().filter_map(|open| open.waiting()).collect();
        all.sort_by(|one, two| one.disk.cmp(&two.disk));
        all
    }

    /// A disk has another name now.
    pub fn renamed(&self, uuid: &str, name: &str) {
        let open = self.state.lock().find_open(uuid);
        if let Some(open) = open {
            open.rename(name);
        }
    }

    /// Changes the settings of a disk.
    pub fn change(&self, uuid: &str, change: &SettingsChange) -> Result<()> {
        self.update(|disks| change.apply(disks.entry(uuid.to_owned()).or_default()))
    }

    /// Gives the settings of a disk to its clones.
    pub fn inherit(&self, from: &str, clones: &[String]) -> Result<()> {
        let settings = self.of(from);
        if settings == DiskSettings::default() {
            return Ok(());
        }
        self.update(|disks| disks.extend(clones.iter().map(|uuid| (uuid.clone(), settings.clone()))))
    }

    /// Takes over the settings of a disk that is migrated from another datastore together with its clients.
    pub fn adopt(&self, uuid: &str, from: &Settings) -> Result<()> {
        let settings = from.of(uuid);
        let open = from.state.lock().find_open(uuid);
        if let Some(open) = open {
            self.state.lock().open.insert(uuid.to_owned(), Arc::downgrade(&open));
        }
        if settings == self.of(uuid) {
            return Ok(());
        }
        self.update(|disks| drop(disks.insert(uuid.to_owned(), settings)))
    }

    /// Removes the settings of a disk that does not exist any more. A failure is only logged: without its disk, an
    /// entry has no effect, and the next change removes it.
    pub fn forget(&self, uuid: &str) {
        if !self.state.lock().disks.contains_key(uuid) {
            return;
        }
        if let Err(error) = self.update(|disks| drop(disks.remove(uuid))) {
            self.state.lock().disks.remove(uuid);
            tracing::info!(%error, uuid, "the settings of a disk that is gone stay in the record until its next change");
        }
    }

    /// Changes the record, and then the policies of open disks.
    fn update(&self, change: impl FnOnce(&mut BTreeMap<String, DiskSettings>)) -> Result<()> {
        let _changes = self.changes.lock();
        let mut record = {
            let state = self.state.lock();
            if let Some(why) = &state.unreadable {
                let text = format!(
                    "the settings of disks cannot be changed: {why}; 'lamina check --repair' puts that record aside, \
                     and all disks then have the default settings"
                );
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            SettingsRecord { disks: state.disks.clone() }
        };
        change(&mut record.disks);
        record.disks.retain(|_, settings| *settings != DiskSettings::default());
        self.write(&record)?;
        let mut state = self.state.lock();
        state.disks = record.disks;
        for (uuid, open) in &state.open {
            if let Some(open) = open.upgrade() {
                open.set_policy(state.disks.get(uuid).map(|settings| settings.on_full).unwrap_or_default());
            }
        }
        Ok(())
    }

    /// Writes the record durably. On a full file system, the space that the datastore reserves for its owner is used.
    fn write(&self, record: &SettingsRecord) -> Result<()> {
        let bytes = KIND.encode(record)?;
        let put =
            || sealed::put(&*self.directory, FILE, &bytes).during(|| "recording the settings of disks".to_owned());
        let spare = Spare::of(Arc::clone(&self.directory));
        match put() {
            Err(error) if error.kind() == ErrorKind::NoSpace && spare.give_up() => {
                let again = put();
                spare.keep();
                again
            }
            outcome => outcome,
        }
    }

    /// Reports a record that cannot be read; with `repair`, renames the file, so that settings can be changed again.
    pub fn check(&self, repair: bool, report: &mut CheckReport) -> Result<()> {
        let _changes = self.changes.lock();
        let Some(why) = self.state.lock().unreadable.clone() else { return Ok(()) };
        let mut repaired = None;
        if repair {
            let renamed = self.directory.rename(FILE, DAMAGED).and_then(|()| self.directory.sync());
            renamed.during(|| "putting the damaged settings of disks aside".to_owned())?;
            self.state.lock().unreadable = None;
            repaired = Some(format!("the record is '{DAMAGED}' now, and all disks have the default settings"));
        }
        report.findings.push(Finding { problem: why, repaired });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
