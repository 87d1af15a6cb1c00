//! Passes that store equal blocks of the disks of a domain once.
//!
//! 1. A pass compares blocks of disks that have the setting for the domain when it begins, and of their snapshots.
//!    Disks that an operation uses exclusively then are left out, and their parts stay recorded.
//! 2. A pass compares all data of these disks, so it takes the records of all writes, also of recent ones. How long
//!    data was not written decides only when a pass begins.

use super::{Choice, End, IdlePass, IdlePassesState};
use crate::deduplication::{DEDUP_MEMORY_MIN, Domain};
use crate::info::{DeduplicationState, DeduplicationStatus, Reclaimed};
use crate::names;
use crate::native::Native;
use crate::native::optimize::{Steps, disk_of, is_thin, sum};
use backend::BLOCK_SIZE;
use error::{ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use store::catalog::{Object, ObjectState};
use store::engine::{ColdParts, Purpose};
use work::Progress;

/// How often a pass examines whether all its disks still belong to it. Steps are shorter, and domains may have many
/// disks.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// A disk of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    /// Object id, which stays the same when the disk is renamed.
    id: u64,
    name: String,
    uuid: String,
}

/// Disks among which equal blocks are to be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdleDomain {
    pub(super) domain: Domain,
    members: Vec<Member>,
}

impl IdleDomain {
    /// The name of the only disk, `label:KEY=VALUE` or `datastore`.
    pub(super) fn title(&self) -> String {
        match &self.domain {
            Domain::Disk(_) => self.members.first().map(|disk| disk.name.clone()).unwrap_or_default(),
            Domain::Label(key, value) => format!("label:{key}={value}"),
            Domain::Datastore => "datastore".to_owned(),
        }
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.members.iter().map(|disk| disk.name.clone()).collect()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = u64> {
        self.members.iter().map(|disk| disk.id)
    }
}

/// What the passes over a domain have done.
#[derive(Default)]
pub(super) struct Done {
    ended: End,
    shared: u64,
}

impl Done {
    pub fn note(&mut self, end: End, reclaimed: &Reclaimed) {
        self.ended = end;
        self.shared += reclaimed.shared;
    }
}

impl Native {
    /// The domains with disks that can be deduplicated.
    pub(super) fn domains(&self) -> Vec<IdleDomain> {
        let of = |id, name: &str, uuid, domain: &Domain| (domain.clone(), Member { id, name: name.to_owned(), uuid });
        let mut domains = BTreeMap::<Domain, Vec<Member>>::new();
        for (domain, disk) in self.idle_disks(&self.settings.deduplicated(), of) {
            domains.entry(domain).or_default().push(disk);
        }
        domains.into_iter().map(|(domain, members)| IdleDomain { domain, members }).collect()
    }

    /// The memory for hints, in bytes: half of that for deduplication.
    fn memory_of_hints(&self) -> usize {
        self.dedup_memory.load(Ordering::Relaxed).max(DEDUP_MEMORY_MIN) / 2
    }

    /// The memory for the prints of a pass, in bytes: without that of hints, as long as there are any.
    pub(in crate::native) fn memory_of_prints(&self) -> usize {
        let all = self.dedup_memory.load(Ordering::Relaxed);
        if self.engine.looks_for_writes() { all.saturating_sub(self.memory_of_hints()) } else { all }
    }

    /// Compares new data of the disks whose setting says so with stored data when it is written, and of no others.
    pub(super) fn deduplicate_writes(&self) {
        let disk = |id, _: &str, _, domain: &Domain| (id, domain.to_string());
        let disks = self.idle_disks(&self.settings.deduplicated_at_write_back(), disk);
        self.engine.share_writes_of(&disks, self.memory_of_hints());
    }

    /// As [`Native::deduplicate_writes`], for a thin disk that is being opened.
    pub(super) fn deduplicate_writes_to(&self, disk: &Object) {
        let uuid = names::uuid_text(&disk.uuid);
        if !self.settings.of(&uuid).dedup_at.is_idle()
            && let Some(domain) = self.settings.domain(&uuid)
        {
            self.engine.share_writes(&[(disk.id, domain.to_string())], self.memory_of_hints());
        }
    }

    /// Adds the domains of which a disk has cold data that was not processed.
    pub(super) fn choose_domain(
        &self,
        domains: Vec<IdleDomain>,
        may: &impl Fn(&str) -> bool,
        state: &mut IdlePassesState,
        choice: &mut Choice,
    ) -> Result<()> {
        for domain in domains {
            let mut is_due = false;
            for disk in &domain.members {
                let written = match self.engine.record_writes(disk.id, Purpose::Sharing) {
                    // The disk was deleted meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    written => written?,
                };
                is_due = is_due || written.has_cold(choice.after, None) && may(&disk.name);
            }
            let ended = state.domains.entry(domain.domain.clone()).or_default().ended;
            if is_due && !choice.rests(ended) {
                choice.add(ended, IdlePass::Deduplicate(domain));
            }
        }
        Ok(())
    }

    /// Whether a disk still belongs to the domain, and no operation uses it exclusively. `None` for a deleted disk,
    /// which has nothing to share.
    fn belongs(&self, disk: &Member, domain: &Domain, may: &impl Fn(&str) -> bool) -> Option<bool> {
        let name = self.engine.with_catalog(|catalog| {
            let disk = catalog.find(disk.id).filter(|disk| disk.state == ObjectState::Disk);
            disk.map(|disk| disk.name.clone())
        })?;
        Some(self.settings.domain(&disk.uuid).as_ref() == Some(domain) && may(&name))
    }

    /// Stores equal blocks of the disks of a domain and their snapshots once.
    pub(super) fn deduplicate_idle(
        &self,
        of: &IdleDomain,
        may: impl Fn(&str) -> bool,
        progress: &dyn Progress,
        reclaimed: &mut Reclaimed,
    ) -> Result<()> {
        let belongs = |disk: &&Member| self.belongs(disk, &of.domain, &may);
        let members: Vec<&Member> = of.members.iter().filter(|disk| belongs(disk) == Some(true)).collect();
        let mut taken: Vec<ColdParts> = Vec::new();
        for disk in &members {
            match self.engine.record_writes(disk.id, Purpose::Sharing) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                written => taken.push(written?.take_cold(Duration::ZERO, None)),
            }
        }
        // What is buffered enters the map, and journalled content its blocks: others are not shared. The parts were
        // taken before, so a write that is not in the map afterwards makes its part count as written again.
        self.engine.flush()?;
        self.engine.checkpoint()?;
        let ids: BTreeSet<u64> = members.iter().map(|disk| disk.id).collect();
        let objects = self.objects(0, &|object| is_thin(object) && ids.contains(&disk_of(object)));
        let stopped = "stopped; what was shared stays shared, and the server continues later";
        let mut steps = Steps::new(progress, sum(&objects), stopped);
        let mut looked = Instant::now();
        let mut goes_on = || {
            if looked.elapsed() < LOOK_INTERVAL {
                return true;
            }
            looked = Instant::now();
            members.iter().all(|disk| belongs(disk) != Some(false))
        };
        let memory = self.memory_of_prints();
        let done = self.deduplicate(objects, memory, &mut steps, reclaimed, &mut goes_on);
        let is_whole = done.map_err(|error| error.context(of.title()))?;
        if is_whole {
            taken.into_iter().for_each(ColdParts::all_processed);
        }
        // The old blocks become free when the changes are durable.
        if reclaimed.shared > 0 {
            self.engine.checkpoint()?;
        }
        Ok(())
    }

    /// What passes have done for the domain of a disk, and what they have still to do for the disk; `None` for a disk
    /// without passes.
    pub fn deduplication_state(&self, disk: u64, uuid: &str) -> Option<DeduplicationState> {
        let domain = self.settings.domain(uuid)?;
        let pending = self.unprocessed(disk, Purpose::Sharing)?;
        let state = self.idle.0.lock();
        let of = state.domains.get(&domain)?;
        Some(DeduplicationState { pending, ended: of.ended.map(|(_, time)| time), shared: of.shared })
    }

    /// What passes have done for all domains.
    pub fn deduplication_status(&self) -> DeduplicationStatus {
        let domains = self.domains();
        let pending = domains.iter().flat_map(IdleDomain::ids).filter_map(|id| self.unprocessed(id, Purpose::Sharing));
        let pending = pending.sum();
        let state = self.idle.0.lock();
        DeduplicationStatus {
            new_disks: self.settings.defaults().dedup,
            disks: domains.iter().map(|domain| domain.members.len() as u64).sum(),
            domains: domains.len() as u64,
            running: match &state.running {
                Some(IdlePass::Deduplicate(domain)) => Some(domain.title()),
                _ => None,
            },
            pending,
            shared: state.domains.values().map(|of| of.shared).sum::<u64>()
                + self.engine.shared_writes() * BLOCK_SIZE as u64,
        }
    }
}

#[cfg(test)]
mod tests;
