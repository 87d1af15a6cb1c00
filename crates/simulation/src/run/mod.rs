//! Carries out operations on the datastore and on the model, and compares the results.
//!
//! 1. `model` is the state that the datastore must have between two operations.
//! 2. If an operation fails because of a power cut or a requested fault, the datastore is restarted ([`recover`]), and
//!    its content shows whether the operation took effect.
//! 3. Any other error is a failure of the run, except those that the model predicts (in use, no space).

mod control;
mod data;
mod recover;
mod reduction;

use crate::model::Model;
use crate::operation::{Operation, Profile};
use crate::random::Random;
use crate::regime::World;
use backend::IoMode;
use backend::simulated::{Fault, SimulatedDisk, SimulatedOptions};
use data::Held;
use disk::{Datastore, Device, InitOptions};
use error::ErrorKind;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use store::EngineOptions;
use store::engine::SharePass;

/// Operations recorded for the report of a failure.
const TRACE_MAX: usize = 400;
/// The smallest journal, so that the ring wraps often.
pub const JOURNAL_SIZE: u64 = 4 << 20;

/// The result of a comparison; the error describes a violation.
pub type Checked<T = ()> = Result<T, String>;

/// The result of an operation.
enum Outcome<T> {
    Done(T),
    /// An error that is no fault of the medium. The caller decides whether the model predicts it.
    Refused(error::Error),
    /// The power was cut or the process was killed, and the datastore is open again.
    Restarted,
}

/// Counts of the events of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Operations carried out.
    pub operations: u64,
    /// Power cuts and kills.
    pub restarts: u64,
    /// Power cuts at a request to the medium, including those in recovery.
    pub cuts: u64,
    /// Power cuts inside recovery.
    pub interrupted_recoveries: u64,
    /// Operations refused for lack of space.
    pub refused: u64,
    /// Requested failures of the medium; each may affect one request or many.
    pub faults: u64,
    /// Checkpoints made.
    pub checkpoints: u64,
    /// Blocks that became free by compression.
    pub packed: u64,
    /// Blocks that became free by deduplication.
    pub shared: u64,
    /// The most dirty metadata pages seen at a time.
    pub dirty_max: u64,
    /// The most map nodes seen at a time.
    pub nodes_max: u64,
}

impl std::ops::AddAssign for Statistics {
    fn add_assign(&mut self, other: Self) {
        self.operations += other.operations;
        self.restarts += other.restarts;
        self.cuts += other.cuts;
        self.interrupted_recoveries += other.interrupted_recoveries;
        self.refused += other.refused;
        self.faults += other.faults;
        self.checkpoints += other.checkpoints;
        self.packed += other.packed;
        self.shared += other.shared;
        self.dirty_max = self.dirty_max.max(other.dirty_max);
        self.nodes_max = self.nodes_max.max(other.nodes_max);
    }
}

/// A datastore, its medium, and its model.
pub struct SimulationRun {
    /// The medium of the datastore.
    pub disk: SimulatedDisk,
    options: EngineOptions,
    datastore: Option<Arc<Datastore>>,
    /// The expected state of the datastore.
    pub model: Model,
    devices: BTreeMap<String, Arc<dyn Device>>,
    held: Vec<Held>,
    random: Random,
    next_name: u64,
    /// Whether a requested fault of the medium is not triggered yet, or its effects are not repaired yet.
    faulty: bool,
    /// Whether the datastore was opened on a medium that failed, so that the first check may report pages that could
    /// not be read and were counted again.
    recounted: bool,
    /// Whether a flush of the medium may have failed: then the page cache may show data that the medium does not have.
    unsure: bool,
    /// Whether the file system may be full.
    full: bool,
    /// Whether blocks may be compressed or deduplicated.
    reduced: bool,
    /// The pass of deduplication that has not ended.
    pass: Option<SharePass>,
    cuts_in_recovery: VecDeque<u64>,
    /// The number of power cuts that may still be made.
    cuts_left: u64,
    thick_max: u64,
    trace: VecDeque<String>,
    /// Counts of events.
    pub statistics: Statistics,
}

impl SimulationRun {
    /// Creates a datastore on a new medium, in the usual world.
    pub fn new(seed: u64) -> Checked<Self> {
        Self::within(seed, World::of(Profile::Model, seed))
    }

    /// Creates a datastore on a new medium, in the given world.
    pub fn within(seed: u64, world: World) -> Checked<Self> {
        let mut random = Random::new(seed);
        let options = EngineOptions {
            mode: if random.percent(50) { IoMode::Buffered } else { IoMode::Direct },
            metadata_cache: *random.pick(&world.metadata_caches),
            write_buffer: *random.pick(&[64 << 10, 256 << 10, 1 << 20]),
            read_cache: world.read_cache,
            cache_plain: true,
            commit_interval: Duration::from_secs(10),
            threads: false,
            write_through: random.percent(75),
        };
        let unflushed_max = *random.pick(&[16, 256, 4096]);
        let mut medium = SimulatedOptions { unflushed_max, reorder: true, ..SimulatedOptions::default() };
        medium.capacity = world.room.unwrap_or(medium.capacity);
        let disk = SimulatedDisk::new(random.next(), medium);
        let made = Datastore::init_in(disk.directory(), InitOptions { journal_size: world.journal_size });
        made.map_err(|error| format!("making the datastore: {error}"))?;
        let datastore =
            Datastore::open_in(disk.directory(), options).map_err(|error| format!("opening it: {error}"))?;
        Ok(Self {
            disk,
            options,
            datastore: Some(datastore),
            model: Model::default(),
            devices: BTreeMap::new(),
            held: Vec::new(),
            random,
            next_name: 0,
            faulty: false,
            recounted: false,
            unsure: false,
            full: world.room.is_some(),
            reduced: false,
            pass: None,
            cuts_in_recovery: VecDeque::new(),
            cuts_left: u64::MAX,
            thick_max: world.thick_max,
            trace: VecDeque::new(),
            statistics: Statistics::default(),
        })
    }

    /// Limits the number of further power cuts.
    pub fn limit_cuts(&mut self, most: u64) {
        self.cuts_left = most;
    }

    /// Updates the counts of metadata pages.
    fn measure(&mut self) {
        let Some(datastore) = &self.datastore else { return };
        let counts = datastore.engine().counts();
        self.statistics.dirty_max = self.statistics.dirty_max.max(counts.pages_dirty);
        self.statistics.nodes_max = self.statistics.nodes_max.max(counts.map.used);
    }

    /// Counts a power cut at a request to the medium.
    fn count_cut(&mut self) {
        self.statistics.cuts += 1;
        self.cuts_left = self.cuts_left.saturating_sub(1);
    }

    /// Schedules a power cut in the coming recovery, if one was requested.
    fn arm_recovery(&mut self) {
        if let Some(after) = self.cuts_in_recovery.pop_front().filter(|_| self.cuts_left > 0) {
            self.disk.cut_after(self.disk.operations() + after);
        }
    }

    /// The operations so far, the newest last.
    pub fn trace(&self) -> impl Iterator<Item = &str> {
        self.trace.iter().map(String::as_str)
    }

    fn note(&mut self, what: impl Into<String>) {
        if self.trace.len() >= TRACE_MAX {
            self.trace.pop_front();
        }
        self.trace.push_back(what.into());
    }

    /// The open datastore.
    pub fn datastore(&self) -> Checked<Arc<Datastore>> {
        self.datastore.clone().ok_or_else(|| "the datastore is not open".into())
    }

    /// Carries out one operation. An error describes a violation.
    pub fn step(&mut self, operation: &Operation) -> Checked {
        if self.disk.is_off() {
            self.note("the power is off");
            self.restart(None)?;
        }
        self.statistics.operations += 1;
        self.note(format!("{operation:?}"));
        self.carry_out(operation).map_err(|violation| format!("{violation}\n  in {operation:?}"))
    }

    fn carry_out(&mut self, operation: &Operation) -> Checked {
        match operation {
            Operation::Write { disk, span, fill, again, fua } => self.write(*disk, *span, *fill, *again, *fua),
            Operation::Scatter { disk, places, fill } => self.scatter(*disk, *places, *fill),
            Operation::DiscardLarge { disk, at, length } => self.discard_large(*disk, *at, *length),
            Operation::WriteZeroes { disk, span, allocate, fua } => self.zero(*disk, *span, Some(*allocate), *fua),
            Operation::Discard { disk, span, fua } => self.zero(*disk, *span, None, *fua),
            Operation::Read { title, span } => self.read(*title, *span),
            Operation::BeginRead { title, span } => self.begin_read(*title, *span),
            Operation::EndReads => self.end_reads(),
            Operation::Flush { disk } => self.flush(*disk),
            Operation::Status { title, span } => self.status(*title, *span),
            Operation::Diff { disk, from, to } => self.diff(*disk, *from, *to),
            Operation::Create { capacity, kind } => self.create(*capacity, *kind),
            Operation::Resize { disk, capacity, by_device } => self.resize(*disk, *capacity, *by_device),
            Operation::Rename { disk } => self.rename(*disk),
            Operation::Delete { disk, promote } => self.delete(*disk, *promote),
            Operation::Snapshot { disk, disks } => self.snapshot(*disk, *disks),
            Operation::DeleteSnapshot { snapshot } => self.delete_snapshot(*snapshot),
            Operation::Revert { snapshot } => self.revert(*snapshot),
            Operation::CloneLinked { source, head, count } => self.clone_linked(*source, *head, *count),
            Operation::CloneFull { source, head, cancel } => self.clone_full(*source, *head, *cancel),
            Operation::Detach { disk } => self.detach(*disk),
            Operation::CloseDevices => {
                self.end_reads()?;
                self.devices.clear();
                Ok(())
            }
            Operation::Pump { rounds } => self.background(|engine| {
                for _ in 0..*rounds {
                    engine.pump()?;
                }
                Ok(())
            }),
            Operation::Checkpoint => self.background(|engine| engine.checkpoint()),
            Operation::Reclaim => self.background(|engine| engine.reclaim().map(|_| ())),
            Operation::Pack { object, at, steps, codec } => self.pack(*object, *at, *steps, *codec),
            Operation::Share { steps } => self.share(*steps),
            Operation::Check => self.check(),
            Operation::Compare => self.compare_all(),
            Operation::Reopen => self.reopen(),
            Operation::Kill => self.restart(None),
            Operation::Cut { after, again } => {
                if self.cuts_left > 0 {
                    self.disk.cut_after(self.disk.operations() + after);
                }
                self.cuts_in_recovery = again.iter().copied().collect();
                Ok(())
            }
            Operation::CutRecoveries { after } => {
                self.cuts_in_recovery = after.iter().copied().collect();
                Ok(())
            }
            Operation::FailOperation { after } => {
                self.faulty = true;
                self.statistics.faults += 1;
                self.disk.fail_operation(self.disk.operations() + after);
                Ok(())
            }
            Operation::FailRequests { fault, after, times } => {
                self.faulty = true;
                self.unsure |= *fault == Fault::Sync;
                self.statistics.faults += 1;
                self.disk.fail_requests(*fault, *after, *times);
                Ok(())
            }
            Operation::FailSyncs { count } => {
                self.statistics.faults += 1;
                (self.faulty, self.unsure) = (true, true);
                self.disk.fail_syncs(*count as u32);
                Ok(())
            }
            Operation::Room { bytes } => {
                self.full = true;
                let room = self.disk.directory().room().map_err(|error| error.to_string())?;
                self.disk.set_capacity(room.total - room.available + bytes);
                Ok(())
            }
        }
    }

    /// Runs background work of the engine, which must not change any result.
    fn background(&mut self, act: impl FnOnce(&store::Engine) -> error::Result<()>) -> Checked {
        let datastore = self.datastore()?;
        let result = act(datastore.engine());
        drop(datastore);
        // Background work must succeed even on a full file system, because acknowledged writes have their space.
        match self.judge(result, None)? {
            Outcome::Refused(error) => Err(format!("background work failed: {error}")),
            _ => Ok(()),
        }
    }

    /// Classifies a result: done, refused, or the end of this process. `after` is the model if the operation took
    /// effect.
    fn judge<T>(&mut self, result: error::Result<T>, after: Option<Model>) -> Checked<Outcome<T>> {
        let error = match result {
            Ok(value) => return Ok(Outcome::Done(value)),
            Err(error) => error,
        };
        if self.disk.is_off() {
            self.note(format!("the power is cut: {error}"));
        } else if self.faulty && matches!(error.kind(), ErrorKind::Io | ErrorKind::Stopped) {
            self.note(format!("the medium fails: {error}"));
            self.unsure |= error.to_string().contains("flushing");
            if after.is_none() {
                // The writes change one model only.
                self.after_failure()?;
            }
        } else {
            return Ok(Outcome::Refused(error));
        }
        self.restart(after)?;
        Ok(Outcome::Restarted)
    }

    /// Whether the model predicts the error in every operation.
    fn foretold(&mut self, error: &error::Error) -> bool {
        let full = error.kind() == ErrorKind::NoSpace && self.full;
        self.statistics.refused += u64::from(full);
        full
    }

    /// The open device of a disk or snapshot.
    fn device(&mut self, title: &str) -> Checked<Arc<dyn Device>> {
        if let Some(device) = self.devices.get(title) {
            return Ok(Arc::clone(device));
        }
        let device = self.datastore()?.device(title, false).map_err(|error| format!("opening {title}: {error}"))?;
        self.devices.insert(title.to_owned(), Arc::clone(&device));
        Ok(device)
    }

    /// Closes the open devices of a disk and its snapshots.
    fn close_devices(&mut self, disk: &str) -> Checked {
        self.end_reads()?;
        let prefix = format!("{disk}@");
        self.devices.retain(|title, _| title != disk && !title.starts_with(&prefix));
        Ok(())
    }

    fn pick_disk(&self, number: u64) -> Option<String> {
        self.model.disks.keys().nth((number % self.model.disks.len().max(1) as u64) as usize).cloned()
    }

    /// Chooses a disk twice as often as a snapshot.
    fn pick_title(&self, number: u64) -> Option<String> {
        if !number.is_multiple_of(3) {
            return self.pick_disk(number / 3);
        }
        let titles = self.model.titles();
        titles.get((number / 3 % titles.len().max(1) as u64) as usize).cloned()
    }

    fn pick_snapshot(&self, number: u64) -> Option<(String, String)> {
        let mut snapshots = self.model.snapshots();
        let chosen = (number % snapshots.len().max(1) as u64) as usize;
        (chosen < snapshots.len()).then(|| snapshots.swap_remove(chosen))
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.next_name += 1;
        format!("{kind}{}", self.next_name)
    }
}
