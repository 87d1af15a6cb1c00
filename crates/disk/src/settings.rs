//! Settings of disks: what users choose for a disk besides its content, the same for disks of all formats.
//!
//! All settings are in one small record of the datastore, under the UUIDs of the disks, because the record of a native
//! disk and that of a disk in VMware's formats have nothing in common. The layout is in `docs/format/settings.md`.
//!
//! 1. A change is durable before it takes effect.
//! 2. A disk without an entry has the default settings, and the file does not exist before the first change.
//! 3. A file that cannot be read is never replaced, except by a repair, which keeps it under another name.
//! 4. The record has a later version only while a setting of that version is in use, so that earlier programs read it
//!    again after the setting was removed.
//! 5. `state` is never locked during I/O, because requests of clients look up their disk's settings.

mod record;

use crate::compression::Compression;
use crate::deduplication::Domain;
use crate::full::{Notices, SpaceWait, WaitNotice};
use crate::info::{CheckReport, Finding, WaitingWrites};
use crate::quota::{GateSlot, LimitedDisk, Quotas, label_text};
use crate::sealed;
use crate::spare::Spare;
use crate::zeros::DetectZeroes;
use backend::Directory;
use error::{Error, ErrorKind, IoContext, Result};
use parking_lot::Mutex;
pub(crate) use record::check_label_key;
pub use record::{
    DefaultsChange, DiskDefaults, DiskSettings, Labels, LimitsChange, SettingsChange, has_label, parse_label,
};
use record::{KIND, SettingsRecord, decode_mending};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

/// Name of the file, in the folder of the datastore.
const FILE: &str = "settings";
/// The name that a damaged file gets by a repair.
const DAMAGED: &str = "settings.damaged";

fn put_in_force(quotas: &Quotas, record: &SettingsRecord) {
    let disks = record.disks.iter();
    let disks = disks.map(|(uuid, of)| LimitedDisk { uuid, labels: &of.labels, limits: of.limits });
    quotas.set(disks, &record.labels);
}

/// What clients that have a disk open share.
pub(crate) struct OpenDisk {
    /// What happens to writes without space.
    pub space: Arc<SpaceWait>,
    /// The limits of the disk's writes.
    pub gate: GateSlot,
    zeroes: AtomicU8,
}

impl OpenDisk {
    /// Whether writes of zeros become requests to zero their range.
    pub fn detect_zeroes(&self) -> DetectZeroes {
        DetectZeroes::from_number(self.zeroes.load(Ordering::Relaxed))
    }
}

#[derive(Default)]
struct SettingsState {
    record: SettingsRecord,
    /// Disks that clients have open.
    open: BTreeMap<String, Weak<OpenDisk>>,
    /// Why the record cannot be read.
    unreadable: Option<String>,
}

impl SettingsState {
    fn find_open(&self, uuid: &str) -> Option<Arc<OpenDisk>> {
        self.open.get(uuid).and_then(Weak::upgrade)
    }

    /// Puts the settings of a disk in force for the clients that have it open.
    fn apply_to_open(&self, uuid: &str, quotas: &Arc<Quotas>) {
        let Some(open) = self.find_open(uuid) else { return };
        let of = self.record.disks.get(uuid).cloned().unwrap_or_default();
        open.space.set_policy(of.on_full);
        open.zeroes.store(of.detect_zeroes.to_number(), Ordering::Relaxed);
        quotas.set_gate(uuid, &open.gate);
    }
}

/// The settings of all disks of a datastore.
pub(crate) struct Settings {
    directory: Arc<dyn Directory>,
    /// Serializes changes.
    changes: Mutex<()>,
    state: Mutex<SettingsState>,
    notices: Arc<Notices>,
    quotas: Arc<Quotas>,
}

impl Settings {
    /// Reads the settings. If the record cannot be read, all disks have the default settings, and no setting can be
    /// changed before a repair.
    pub fn open(directory: Arc<dyn Directory>) -> Arc<Self> {
        let read = KIND.read(&*directory, FILE).and_then(|bytes| match bytes {
            None => Ok(SettingsRecord::default()),
            Some(bytes) => {
                let (record, mended) = decode_mending(&bytes)?;
                if let Some(error) = mended {
                    tracing::warn!(%error, "one byte of the record of settings was damaged; its right value is known");
                }
                Ok(record)
            }
        });
        let mut state = SettingsState::default();
        match read {
            Ok(record) => state.record = record,
            Err(error) => {
                tracing::error!(%error, "the settings of disks cannot be read: all disks have the default settings");
                state.unreadable = Some(error.to_string());
            }
        }
        let quotas = Arc::<Quotas>::default();
        put_in_force(&quotas, &state.record);
        let (changes, state) = (Mutex::new(()), Mutex::new(state));
        Arc::new(Self { directory, changes, state, notices: Arc::default(), quotas })
    }

    /// The quotas and reservations.
    pub fn quotas(&self) -> &Arc<Quotas> {
        &self.quotas
    }

    /// Sets the receiver of notices about waiting writes.
    pub fn set_receiver(&self, receiver: impl Fn(WaitNotice) + Send + Sync + 'static) {
        self.notices.set(receiver);
    }

    /// The settings of a disk.
    pub fn of(&self, uuid: &str) -> DiskSettings {
        self.state.lock().record.disks.get(uuid).cloned().unwrap_or_default()
    }

    /// What clients of a disk share, for a client that opens the disk.
    pub fn open_disk(&self, uuid: &str, name: &str) -> Arc<OpenDisk> {
        let mut state = self.state.lock();
        if let Some(open) = state.find_open(uuid) {
            return open;
        }
        state.open.retain(|_, open| open.strong_count() > 0);
        let settings = state.record.disks.get(uuid);
        let policy = settings.map(|settings| settings.on_full).unwrap_or_default();
        let zeroes = settings.map(|settings| settings.detect_zeroes).unwrap_or_default();
        let space = SpaceWait::new(name, policy, Arc::clone(&self.notices));
        let zeroes = AtomicU8::new(zeroes.to_number());
        let open = Arc::new(OpenDisk { space, gate: GateSlot::default(), zeroes });
        self.quotas.set_gate(uuid, &open.gate);
        state.open.insert(uuid.to_owned(), Arc::downgrade(&open));
        open
    }

    /// The waiting writes of a disk.
    pub fn waiting(&self, uuid: &str) -> Option<WaitingWrites> {
        // The lock is released before the disk's own lock is acquired.
        let open = self.state.lock().find_open(uuid)?;
        open.space.waiting()
    }

    /// The waiting writes of all disks, by the names of the disks.
    pub fn all_waiting(&self) -> Vec<WaitingWrites> {
        let open: Vec<Arc<OpenDisk>> = self.state.lock().open.values().filter_map(Weak::upgrade).collect();
        let mut all: Vec<WaitingWrites> = open.iter().filter_map(|open| open.space.waiting()).collect();
        all.sort_by(|one, two| one.disk.cmp(&two.disk));
        all
    }

    /// Records the new name of a disk, for clients that have it open.
    pub fn renamed(&self, uuid: &str, name: &str) {
        let open = self.state.lock().find_open(uuid);
        if let Some(open) = open {
            open.space.rename(name);
        }
    }

    /// Changes the settings of a disk.
    pub fn change(&self, uuid: &str, change: &SettingsChange) -> Result<()> {
        self.update(|record| change.apply(record.disks.entry(uuid.to_owned()).or_default()))
    }

    /// The settings that new disks get.
    pub fn defaults(&self) -> DiskDefaults {
        self.state.lock().record.new_disks.clone()
    }

    /// Changes the settings that new disks get.
    pub fn change_defaults(&self, change: &DefaultsChange) -> Result<()> {
        self.update(|record| change.apply(&mut record.new_disks))
    }

    /// The disks for which servers compress data, by UUID.
    pub fn compressed(&self) -> BTreeMap<String, Compression> {
        let state = self.state.lock();
        let set = state.record.disks.iter().filter(|(_, settings)| !settings.compression.is_off());
        set.map(|(uuid, settings)| (uuid.clone(), settings.compression)).collect()
    }

    /// The disks whose new data is compressed at write-back, by UUID.
    pub fn compressed_at_write_back(&self) -> BTreeMap<String, Compression> {
        let state = self.state.lock();
        let set = state.record.disks.iter().filter(|(_, settings)| settings.compresses_writes());
        set.map(|(uuid, settings)| (uuid.clone(), settings.compression)).collect()
    }

    /// The disks of which servers find equal data, by UUID, with the disks among which they do.
    pub fn deduplicated(&self) -> BTreeMap<String, Domain> {
        let state = self.state.lock();
        let disks = state.record.disks.iter();
        let of = disks.filter_map(|(uuid, of)| Some((uuid.clone(), of.dedup.domain(uuid, &of.labels)?)));
        of.collect()
    }

    /// Those of [`Settings::deduplicated`] whose new data is compared at write-back.
    pub fn deduplicated_at_write_back(&self) -> BTreeMap<String, Domain> {
        let mut of = self.deduplicated();
        let state = self.state.lock();
        of.retain(|uuid, _| state.record.disks.get(uuid).is_some_and(|settings| !settings.dedup_at.is_idle()));
        of
    }

    /// The disks whose clients wait until new data is compressed and compared, by UUID.
    pub fn reduced_inline(&self) -> BTreeMap<String, ()> {
        let state = self.state.lock();
        let set = state.record.disks.iter().filter(|(uuid, settings)| settings.reduces_inline(uuid));
        set.map(|(uuid, _)| (uuid.clone(), ())).collect()
    }

    /// As [`Settings::deduplicated`], for one disk.
    pub fn domain(&self, uuid: &str) -> Option<Domain> {
        let state = self.state.lock();
        let of = state.record.disks.get(uuid)?;
        of.dedup.domain(uuid, &of.labels)
    }

    /// Changes the limits of a label.
    pub fn change_label(&self, label: &str, change: &LimitsChange) -> Result<()> {
        let (key, value) = parse_label(label)?;
        self.update(|record| change.apply(record.labels.entry(label_text((&key, &value))).or_default()))
    }

    /// The labels that disks have or that have limits, with the number of disks.
    pub fn labels(&self) -> BTreeMap<String, u64> {
        let state = self.state.lock();
        let mut all: BTreeMap<String, u64> = state.record.labels.keys().map(|label| (label.clone(), 0)).collect();
        for label in state.record.disks.values().flat_map(|settings| settings.labels.iter()) {
            *all.entry(label_text(label)).or_default() += 1;
        }
        all
    }

    /// Gives the settings of a disk to its clones, except the reservation.
    pub fn inherit(&self, from: &str, clones: &[String]) -> Result<()> {
        let mut settings = self.of(from);
        settings.limits.reservation = None;
        if settings == DiskSettings::default() {
            return Ok(());
        }
        self.update(|record| {
            record.disks.extend(clones.iter().map(|uuid| (uuid.clone(), settings.clone())));
            Ok(())
        })
    }

    /// Stores the settings of a disk that is being migrated from another datastore. They have no effect before
    /// [`Settings::take_over`].
    pub fn adopt(&self, uuid: &str, from: &Settings) -> Result<()> {
        let settings = from.of(uuid);
        if settings == self.of(uuid) {
            return Ok(());
        }
        self.update(|record| {
            record.disks.insert(uuid.to_owned(), settings);
            Ok(())
        })
    }

    /// After a migration: the disk that had the UUID `old` in the datastore with the settings `from` has the UUID `new`
    /// here. Its settings, which are stored here under `old`, and the clients that have it open get the new UUID. A
    /// failure is only logged, because the disk has its new UUID already.
    pub fn take_over(&self, new: &str, from: &Settings, old: &str) {
        if std::ptr::eq(self, from) && old == new {
            return;
        }
        let open = from.state.lock().open.remove(old);
        let is_stored = {
            let mut state = self.state.lock();
            if let Some(open) = open {
                state.open.insert(new.to_owned(), open);
            }
            old != new && state.record.disks.contains_key(old)
        };
        if !is_stored {
            return self.state.lock().apply_to_open(new, &self.quotas);
        }
        let moved = self.update(|record| {
            if let Some(settings) = record.disks.remove(old) {
                record.disks.insert(new.to_owned(), settings);
            }
            Ok(())
        });
        if let Err(error) = moved {
            tracing::warn!(%error, uuid = new, "a migrated disk has the default settings");
        }
    }

    /// Removes the settings of a disk that does not exist any more. A failure is only logged: without its disk, an
    /// entry has no effect, and the next change removes it.
    pub fn forget(&self, uuid: &str) {
        if !self.state.lock().record.disks.contains_key(uuid) {
            return;
        }
        let removed = self.update(|record| {
            record.disks.remove(uuid);
            Ok(())
        });
        if let Err(error) = removed {
            self.state.lock().record.disks.remove(uuid);
            tracing::info!(%error, uuid, "the settings of a deleted disk stay in the record until its next change");
        }
    }

    /// Changes the record, and then the policies and limits of open disks.
    fn update(&self, change: impl FnOnce(&mut SettingsRecord) -> Result<()>) -> Result<()> {
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
            state.record.clone()
        };
        change(&mut record)?;
        record.disks.retain(|_, settings| *settings != DiskSettings::default());
        record.labels.retain(|_, limits| !limits.is_none());
        self.write(&record)?;
        put_in_force(&self.quotas, &record);
        let mut state = self.state.lock();
        state.record = record;
        for uuid in state.open.keys() {
            state.apply_to_open(uuid, &self.quotas);
        }
        Ok(())
    }

    /// Writes the record durably. On a full file system, the space that the datastore reserves for its owner is used.
    fn write(&self, record: &SettingsRecord) -> Result<()> {
        let bytes = record.kind().encode(record)?;
        Spare::of(Arc::clone(&self.directory)).lend(|| {
            sealed::put(&*self.directory, FILE, &bytes).during(|| "recording the settings of disks".to_owned())
        })
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
        report.findings.push(Finding::new(why, repaired));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
