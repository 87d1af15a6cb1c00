//! Compression and deduplication by the settings of disks: passes over data that was not written for a while
//! ([0045](../../../../docs/adr/0045-compression-by-setting.md),
//! [0052](../../../../docs/adr/0052-deduplication-by-setting.md)).
//!
//! ```text
//! compress     the parts of a disk and its snapshots that have become cold
//! deduplicate  the disks of a domain, once parts of one of them have become cold
//! ```
//!
//! 1. One pass runs at a time, and each disk or domain rests between two passes of a kind.
//! 2. A pass holds no use of its disks, so it never makes a command fail. It ends as soon as an operation uses one of
//!    them exclusively, or the setting has changed. The next pass continues, because parts that were not processed stay
//!    recorded ([`Written`](store::engine::Written)).
//! 3. What is to be processed is in memory only. After a restart, each disk and domain with a setting gets one whole
//!    pass, which skips what is compressed or shared already.
//! 4. A part of a disk with both settings is compressed only after it was deduplicated, because a share of a compressed
//!    block frees space only when most of its pack is shared.

mod compress;
mod deduplicate;

use super::{Native, is_visible};
use crate::info::Reclaimed;
use crate::names;
use backend::clock;
pub use compress::IdleDisk;
pub use deduplicate::IdleDomain;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use store::catalog::{Object, Provisioning};
use store::engine::Purpose;
use work::Progress;

/// How long a disk or domain rests after a pass, as a multiple of the time after which its data counts as cold.
const REST_FACTOR: u32 = 6;

/// A pass that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdlePass {
    /// Compresses cold data of a disk.
    Compress(IdleDisk),
    /// Finds equal blocks of the disks of a domain.
    Deduplicate(IdleDomain),
}

impl IdlePass {
    /// The name of the disk; of a domain with several disks `label:KEY=VALUE` or `datastore`.
    pub fn title(&self) -> String {
        match self {
            Self::Compress(disk) => disk.name.clone(),
            Self::Deduplicate(domain) => domain.title(),
        }
    }

    /// The names of the disks.
    pub fn disks(&self) -> Vec<String> {
        match self {
            Self::Compress(disk) => vec![disk.name.clone()],
            Self::Deduplicate(domain) => domain.names(),
        }
    }
}

/// When the last pass over a disk or domain ended, by both clocks.
type End = Option<(Instant, u64)>;

#[derive(Default)]
struct IdlePassesState {
    /// The pass that is running.
    running: Option<IdlePass>,
    disks: BTreeMap<u64, compress::Done>,
    domains: BTreeMap<crate::deduplication::Domain, deduplicate::Done>,
}

/// The passes of this process.
#[derive(Default)]
pub(crate) struct IdlePasses(Mutex<IdlePassesState>);

/// Ends a pass when this value is dropped.
struct EndOfPass<'a> {
    passes: &'a IdlePasses,
    reclaimed: Reclaimed,
}

impl Drop for EndOfPass<'_> {
    fn drop(&mut self) {
        let mut state = self.passes.0.lock();
        let end = Some((Instant::now(), clock::seconds()));
        // The disk may have been deleted, or the setting may have changed.
        match state.running.take() {
            Some(IdlePass::Compress(disk)) => {
                if let Some(of) = state.disks.get_mut(&disk.id) {
                    of.note(end, &self.reclaimed);
                }
            }
            Some(IdlePass::Deduplicate(domain)) => {
                if let Some(of) = state.domains.get_mut(&domain.domain) {
                    of.note(end, &self.reclaimed);
                }
            }
            None => {}
        }
    }
}

/// The pass that was chosen so far: of those that are due, the one whose last predecessor ended first.
struct Choice {
    after: Duration,
    chosen: Option<(Option<Instant>, IdlePass)>,
}

impl Choice {
    /// Whether a disk or domain rests after its last pass.
    fn rests(&self, end: End) -> bool {
        end.is_some_and(|(ended, _)| ended.elapsed() < self.after.saturating_mul(REST_FACTOR))
    }

    fn add(&mut self, end: End, pass: IdlePass) {
        let ended = end.map(|(ended, _)| ended);
        if self.chosen.as_ref().is_none_or(|(earliest, _)| ended < *earliest) {
            self.chosen = Some((ended, pass));
        }
    }
}

impl Native {
    /// Compresses and deduplicates new data of the disks whose settings say so when it is written, and of no others.
    ///
    /// # Errors
    /// Those of writing the superblock.
    pub(crate) fn reduce_writes(&self) -> Result<()> {
        // A list that was made before the last change must not undo it.
        let _one = self.reducing_writes.lock();
        self.deduplicate_writes();
        let inline = self.idle_disks(&self.settings.reduced_inline(), |id, _, _, ()| id);
        self.engine.reduce_inline_of(&inline);
        self.compress_writes()
    }

    /// As [`Native::reduce_writes`], for a disk that is being opened.
    ///
    /// # Errors
    /// Those of writing the superblock.
    pub(crate) fn reduce_writes_to(&self, disk: &Object) -> Result<()> {
        let _one = self.reducing_writes.lock();
        if disk.provisioning == Provisioning::Thin {
            self.deduplicate_writes_to(disk);
            let uuid = names::uuid_text(&disk.uuid);
            if self.settings.of(&uuid).reduces_inline(&uuid) {
                self.engine.reduce_inline(disk.id);
            }
            self.compress_writes_to(disk)?;
        }
        Ok(())
    }

    /// The disks that passes may process and that have a setting, with their ids and names.
    fn idle_disks<S, D>(&self, set: &BTreeMap<String, S>, disk: impl Fn(u64, &str, String, &S) -> D) -> Vec<D> {
        if set.is_empty() {
            return Vec::new();
        }
        self.engine.with_catalog(|catalog| {
            let thin = catalog.disks().filter(|disk| is_visible(disk) && disk.provisioning == Provisioning::Thin);
            let disks = thin.filter_map(|object| {
                let uuid = names::uuid_text(&object.uuid);
                let setting = set.get(&uuid)?;
                Some(disk(object.id, &object.name, uuid, setting))
            });
            disks.collect()
        })
    }

    /// The pass that is next: of those over data that was not processed and not written in the last `after`, the one
    /// that was longest not made. `None` while a pass runs. Also begins to record the writes of disks that have got a
    /// setting, and ends the records of others. `may` excludes disks by name.
    pub fn next_idle(&self, after: Duration, may: impl Fn(&str) -> bool) -> Result<Option<IdlePass>> {
        // Disks may have been made, deleted or migrated since.
        self.reduce_writes()?;
        let (disks, domains) = (self.compressed_disks(), self.domains());
        let packed: BTreeSet<u64> = disks.iter().map(|disk| disk.id).collect();
        let shared: BTreeSet<u64> = domains.iter().flat_map(IdleDomain::ids).collect();
        self.engine.keep_records_of_writes(|id, purpose| match purpose {
            Purpose::Packing => packed.contains(&id),
            Purpose::Sharing => shared.contains(&id),
        });
        let mut state = self.idle.0.lock();
        state.disks.retain(|id, _| packed.contains(id));
        let known: BTreeSet<_> = domains.iter().map(|domain| &domain.domain).collect();
        state.domains.retain(|domain, _| known.contains(domain));
        let mut choice = Choice { after, chosen: None };
        // The records for deduplication exist before compression looks at them.
        self.choose_domain(domains, &may, &mut state, &mut choice)?;
        self.choose_disk(disks, &may, &mut state, &mut choice)?;
        Ok(choice.chosen.filter(|_| state.running.is_none()).map(|(_, pass)| pass))
    }

    /// Makes a pass over data that was not written in the last `after`. `may` is false for the name of a disk that an
    /// operation uses exclusively.
    ///
    /// # Errors
    /// `Interrupted` if the pass was cancelled; `Busy` if another pass is running.
    pub fn pass_idle(
        &self,
        pass: &IdlePass,
        after: Duration,
        may: impl Fn(&str) -> bool,
        progress: &dyn Progress,
    ) -> Result<Reclaimed> {
        {
            let mut state = self.idle.0.lock();
            if let Some(other) = &state.running {
                let text = format!("a pass over '{}' is running", other.title());
                return Err(Error::new(ErrorKind::Busy, text));
            }
            state.running = Some(pass.clone());
        }
        let mut end = EndOfPass { passes: &self.idle, reclaimed: Reclaimed::default() };
        let passed = match pass {
            IdlePass::Compress(disk) => self.compress_idle(disk, after, may, progress, &mut end.reclaimed),
            IdlePass::Deduplicate(domain) => self.deduplicate_idle(domain, may, progress, &mut end.reclaimed),
        };
        let reclaimed = end.reclaimed;
        drop(end);
        match passed {
            // The disk was deleted meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(reclaimed),
            passed => passed.map(|()| reclaimed),
        }
    }
}

#[cfg(test)]
mod tests;
