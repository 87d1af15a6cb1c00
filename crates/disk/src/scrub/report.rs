//! The state of scrubs and the list of damage, as users see them.

use super::record::{DamageRecord, ScrubRecord, ScrubResult};
use super::{Running, ScrubRun};
use crate::Datastore;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use store::catalog::Catalog;

/// The state of the last scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScrubState {
    /// No scrub was started.
    #[default]
    Never,
    /// A scrub is running.
    Running,
    /// A scrub is running, and will end soon because it was cancelled.
    Cancelling,
    /// A scrub was cancelled: the next one continues it.
    Cancelled,
    /// A scrub ended with its process: the next server continues it.
    Interrupted,
    /// The last scrub reached its end.
    Done,
}

impl ScrubState {
    /// The state's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Never => "never run",
            Self::Running => "running",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
            Self::Interrupted => "interrupted",
            Self::Done => "done",
        }
    }
}

/// The state of scrubs, as a part of the status of a datastore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubSummary {
    /// The state of the last scrub.
    pub state: ScrubState,
    /// When the last scrub began, in seconds since 1970.
    pub started: Option<u64>,
    /// When a scrub last reached its end, in seconds since 1970.
    pub ended: Option<u64>,
    /// Bytes of the native store that the unfinished scrub has read.
    pub done: u64,
    /// Bytes of the native store that the unfinished scrub has to read; 0 if that is not known.
    pub total: u64,
    /// Damaged places that the last scrub has found.
    pub found: u64,
    /// The number of these that were restored from a good copy.
    pub repaired: u64,
    /// Damaged places that exist now, as far as scrubs have found them.
    pub damaged: u64,
    /// Seconds from the start of a scrub to the start of the next one; `None` without a schedule.
    pub every: Option<u64>,
    /// Bytes per second that scheduled scrubs may read; 0 for no limit.
    pub rate: u64,
    /// When a server starts the next scrub, in seconds since 1970; `None` if that is not planned.
    pub due: Option<u64>,
}

/// The part of a disk or snapshot that refers to a damaged place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamageReference {
    /// `disk` or `disk@snapshot`.
    pub name: String,
    /// Byte offset in the disk or snapshot.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl From<store::engine::Affected> for DamageReference {
    fn from(part: store::engine::Affected) -> Self {
        Self { name: part.name, offset: part.offset, length: part.length }
    }
}

/// A damaged place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubDamage {
    /// The file: of metadata, `data` for data blocks, or `images` for disks in VMware's formats.
    pub file: String,
    /// The number of the page or data block.
    pub number: u64,
    /// The disk of a damaged image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// What is wrong with the place.
    pub problem: String,
    /// When the damage was found, in seconds since 1970.
    pub found: u64,
    /// From what the place was restored; `None` if no good copy exists.
    pub repaired: Option<String>,
    /// The disks and snapshots that refer to the place.
    pub references: Vec<DamageReference>,
    /// Number of references beyond those listed.
    pub unlisted: u64,
}

/// A disk or snapshot that refers to damage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubTouched {
    /// `disk` or `disk@snapshot`.
    pub name: String,
    /// Number of damaged places to which it refers.
    pub places: u64,
}

/// The state of scrubs with the list of damage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubReport {
    /// The state of scrubs.
    pub summary: ScrubSummary,
    /// What the last scrub that reached its end has done.
    pub last: Option<ScrubResult>,
    /// Every disk and snapshot that refers to damage.
    pub touched: Vec<ScrubTouched>,
    /// The damaged places, in the order in which they were found.
    pub damage: Vec<ScrubDamage>,
    /// Number of damaged places beyond those listed.
    pub unlisted: u64,
}

fn summary(record: &ScrubRecord, running: Option<&Running>) -> ScrubSummary {
    let state = match (running, &record.run) {
        (Some(running), _) if running.cancelled.load(Ordering::Relaxed) => ScrubState::Cancelling,
        (Some(_), _) => ScrubState::Running,
        (None, Some(ScrubRun { cancelled: Some(_), .. })) => ScrubState::Cancelled,
        (None, Some(_)) => ScrubState::Interrupted,
        (None, None) if record.last.is_some() => ScrubState::Done,
        (None, None) => ScrubState::Never,
    };
    let run = record.run.as_ref().map(|run| &run.result);
    let newest = run.or(record.last.as_ref());
    let planned =
        record.schedule.is_some() && matches!(state, ScrubState::Never | ScrubState::Done | ScrubState::Cancelled);
    ScrubSummary {
        state,
        started: newest.map(|result| result.started),
        ended: record.last.as_ref().map(|last| last.ended),
        done: run.map_or(0, |run| run.read),
        total: running.map_or(0, |running| running.total.load(Ordering::Relaxed)),
        found: newest.map_or(0, |result| result.found),
        repaired: newest.map_or(0, |result| result.repaired),
        damaged: record.damage.iter().filter(|damage| damage.is_open()).count() as u64 + record.unlisted,
        every: record.schedule.as_ref().map(|schedule| schedule.every),
        rate: record.schedule.as_ref().map_or(0, |schedule| schedule.rate),
        due: if planned { record.due() } else { None },
    }
}

/// The name of a disk or snapshot.
fn name_of(catalog: &Catalog, id: u64) -> Option<String> {
    let object = catalog.find(id)?;
    match object.is_snapshot() {
        true => Some(format!("{}@{}", catalog.find(object.disk)?.name, object.name)),
        false => Some(object.name.clone()),
    }
}

impl Datastore {
    pub(super) fn summary(&self) -> ScrubSummary {
        let state = self.scrubs.state.lock();
        summary(&state.record, state.running.as_deref())
    }

    /// The state and the list, as they are in memory. `touched` has the number of damaged places by object; if it is
    /// empty, the number is counted in the list.
    pub(super) fn report(&self, touched: &BTreeMap<u64, u64>) -> ScrubReport {
        let (record, summary) = {
            let state = self.scrubs.state.lock();
            (state.record.clone(), summary(&state.record, state.running.as_deref()))
        };
        let mut counted = touched.clone();
        let open = record.damage.iter().filter(|damage| damage.is_open());
        if counted.is_empty() {
            for reference in open.clone().flat_map(|damage| &damage.references) {
                *counted.entry(reference.object).or_default() += 1;
            }
        }
        let names = self.names_of(counted.keys().copied());
        let mut by_name: BTreeMap<String, u64> = BTreeMap::new();
        for (object, places) in counted {
            if let Some(name) = names.get(&object) {
                *by_name.entry(name.clone()).or_default() += places;
            }
        }
        for disk in open.filter_map(|damage| damage.disk.clone()) {
            *by_name.entry(disk).or_default() += 1;
        }
        ScrubReport {
            summary,
            last: record.last,
            touched: by_name.into_iter().map(|(name, places)| ScrubTouched { name, places }).collect(),
            damage: self.damage_reports(&record.damage),
            unlisted: record.unlisted,
        }
    }

    /// Damage with the names of the disks and snapshots. Those that were deleted meanwhile are left out.
    pub(super) fn damage_reports(&self, damage: &[DamageRecord]) -> Vec<ScrubDamage> {
        let names = self.names_of(damage.iter().flat_map(|damage| &damage.references).map(|record| record.object));
        let report = |damage: &DamageRecord| {
            let mut references: Vec<DamageReference> = damage
                .references
                .iter()
                .filter_map(|record| {
                    let name = names.get(&record.object)?.clone();
                    Some(DamageReference { name, offset: record.offset, length: record.length })
                })
                .collect();
            references.sort_by(|a, b| a.name.cmp(&b.name));
            ScrubDamage {
                file: damage.file.clone(),
                number: damage.number,
                disk: damage.disk.clone(),
                problem: damage.problem.clone(),
                found: damage.found,
                repaired: damage.repaired.clone(),
                references,
                unlisted: damage.unlisted,
            }
        };
        damage.iter().map(report).collect()
    }

    /// The names of disks and snapshots by id. The hidden disk of a live import has the name of the imported disk.
    fn names_of(&self, objects: impl Iterator<Item = u64>) -> BTreeMap<u64, String> {
        let mut objects = objects.peekable();
        if objects.peek().is_none() {
            return BTreeMap::new();
        }
        let overlays: BTreeMap<String, String> = self
            .foreign
            .entries()
            .into_iter()
            .filter_map(|entry| Some((self.overlay_of(&entry)?, entry.disk.name())))
            .collect();
        self.native.engine.with_catalog(|catalog| {
            let named = objects.filter_map(|id| {
                let name = name_of(catalog, id)?;
                Some((id, overlays.get(&name).cloned().unwrap_or(name)))
            });
            named.collect()
        })
    }
}
