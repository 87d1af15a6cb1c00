//! Clones: one or many, full, linked or instant.
//!
//! ```text
//! source     what is cloned: the current state of a machine, or a snapshot of it
//! linked     deltas on snapshots of the parent's disks
//! full       independent copies
//! instant    the parent's disks and memory shared copy-on-write, running
//! progress   the total progress of several copies
//! ```
//!
//! 1. A clone is created completely or not at all ([`crate::machines`]), with an identity of its own: name, UUID, MAC
//!    addresses.
//! 2. If one clone fails, its name is reported, and the other clones are made nevertheless.
//! 3. All disks of a clone are copies of the parent's disks at the same point in time.

mod full;
mod instant;
mod linked;
mod progress;
mod source;

pub(crate) use progress::Sum;
use source::Point;
pub use source::{PREFIX, Source};

use crate::definition::{CloneKind, Definition, NewIdentity, Origin, Seed};
use crate::fleet;
use crate::host::Host;
use crate::lifecycle;
use crate::machines::{Making, OwnDisk, Snapshot};
use crate::nvram;
use crate::quiet::Quiet;
use crate::snapshots;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;
use work::{Progress, Unreported};

/// How the identity inside the guest of a clone is changed: its host name, machine id, SSH host keys, network addresses
/// and random numbers. The identity of an instant clone is changed at once, that of another clone at its first start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Inside {
    /// The guest's agent changes the identity; without an agent, the clone is kept with its network disconnected.
    IfAgent,
    /// The guest's agent changes the identity; without an agent, an instant clone is not made, and a clone of another
    /// kind is stopped.
    Required,
    /// The guest keeps the parent's identity.
    Kept,
}

/// Options of clones.
#[derive(Clone, Debug)]
pub struct Options {
    /// Kind of the clones.
    pub way: CloneKind,
    /// How many clones are made at a time.
    pub parallel: usize,
    /// Whether the parent's file systems are frozen by its agent while the snapshot is taken.
    pub quiesce: bool,
    /// Whether the clones are started. Instant clones always run.
    pub start: bool,
    /// How the identity inside the guests is changed.
    pub inside: Inside,
    /// The configuration of cloud-init in the guests of full and linked clones, in place of the source's.
    pub seed: Option<Seed>,
}

/// A clone that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// The clone's name.
    pub name: String,
    /// Time from the beginning of the operation until the clone's guest executed, if the clone runs.
    pub running: Option<Duration>,
    /// Why the identity inside the clone's guest was not changed, although that was requested.
    pub without_identity: Option<String>,
    /// Whether the guest's kernel did not reseed its random number generator at once. The kernel then reseeds it within
    /// a minute.
    pub same_randomness: bool,
}

impl Made {
    fn plain(name: &str) -> Self {
        Self { name: name.to_owned(), running: None, without_identity: None, same_randomness: false }
    }
}

/// Result of making clones.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The clones that were made, in the order of the requested names.
    pub made: Vec<Made>,
    /// The clones that failed, with their errors.
    pub failed: Vec<(String, Error)>,
    /// Consistency of the parent's file systems; `None` if an existing snapshot was cloned.
    pub quiet: Option<Quiet>,
    /// How long the parent was paused.
    pub stun: Option<Duration>,
}

/// The source of clones, their names and options.
#[derive(Clone, Copy)]
struct Task<'a> {
    host: &'a Host,
    source: &'a Source,
    names: &'a [String],
    options: &'a Options,
    progress: &'a dyn Progress,
}

impl Task<'_> {
    /// Determines the state to clone and the definitions of the clones, and begins to create the clones.
    fn begin(&self, way: CloneKind) -> Result<(Point, Vec<Definition>, Making)> {
        let point = self.source.point(self.host)?;
        let definitions = clone_definitions(self, &point.definition, way)?;
        let temporary = if point.new { point.disks.clone() } else { Vec::new() };
        let own = |definition: &Definition| own_disks(definition, &point.disks, way);
        let making = self.host.machines().make(&definitions, own, temporary)?;
        Ok((point, definitions, making))
    }
}

/// Copies the UEFI variables of the source, if it has any, to a clone.
fn carry_nvram(host: &Host, source: &Source, making: &Making, name: &str) -> Result<()> {
    let from = host.machines().get(&source.machine)?;
    let from = match &source.snapshot {
        Some(snapshot) => snapshots::folder_of(&from, snapshot),
        None => from.folder().to_owned(),
    };
    nvram::carry(&from, making.machine(name).folder())
}

/// Makes clones. The progress counts the clones made; for full clones, the bytes copied.
///
/// # Errors
/// If no clone can be made for a reason that concerns the source.
pub fn make(
    host: &Host,
    source: &Source,
    names: &[String],
    options: &Options,
    progress: &dyn Progress,
) -> Result<Outcome> {
    let _working = host.work()?;
    let (names, failed) = free_names(host, source, names)?;
    let task = Task { host, source, names: &names, options, progress };
    let mut outcome = match (names.is_empty(), options.way) {
        (true, _) => Outcome::default(),
        (false, CloneKind::Linked) => linked::make(&task)?,
        (false, CloneKind::Full) => full::make(&task)?,
        (false, CloneKind::Instant) => instant::make(&task)?,
    };
    if options.start && options.way != CloneKind::Instant {
        match options.way {
            // The progress counts bytes copied, so the start of the clones must not add to it.
            CloneKind::Full => start(host, &mut outcome, options, &Unreported(progress)),
            _ => start(host, &mut outcome, options, progress),
        }
    }
    outcome.failed.extend(failed);
    outcome.failed.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(outcome)
}

/// Starts the clones that were made. A clone that cannot be started is kept, and reported as failed.
fn start(host: &Host, outcome: &mut Outcome, options: &Options, progress: &dyn Progress) {
    let names: Vec<String> = outcome.made.iter().map(|made| made.name.clone()).collect();
    let started = fleet::each(&names, options.parallel, progress, &|name| {
        let change = host.change(name)?;
        lifecycle::start(&change, host.machines(), host.images(), host.features()?, false)
    });
    for (name, error) in started.failed {
        outcome.failed.push((name, error.context("the clone was created, but not started")));
    }
}

/// Names that can be used, and the other names with their errors.
type Names = (Vec<String>, Vec<(String, Error)>);

/// Splits names into those that can be used for clones and the others, each with its error.
fn free_names(host: &Host, source: &Source, names: &[String]) -> Result<Names> {
    let count = source.definition(host)?.disks.len();
    let disks = host.disks().all()?;
    let (mut free, mut failed, mut seen) = (Vec::with_capacity(names.len()), Vec::new(), BTreeSet::new());
    for name in names {
        let exists = |what: String| Err(Error::new(ErrorKind::Exists, format!("there is {what} already")));
        let taken = (0..count).map(|index| crate::definition::disk_name(name, index)).find(|it| disks.contains_key(it));
        let good = crate::definition::check_name(name).and_then(|()| match taken {
            _ if host.machines().has(name) => exists(format!("a machine '{name}'")),
            _ if !seen.insert(name) => exists(format!("a clone '{name}' in this request")),
            Some(disk) => exists(format!("a disk '{disk}'")),
            None => Ok(()),
        });
        match good {
            Ok(()) => free.push(name.clone()),
            Err(error) => failed.push((name.clone(), error)),
        }
    }
    Ok((free, failed))
}

/// The definitions of the clones.
fn clone_definitions(task: &Task<'_>, parent: &Definition, way: CloneKind) -> Result<Vec<Definition>> {
    let Source { machine, snapshot } = task.source;
    let given = task.options.seed.as_ref();
    if task.names.len() > 1 && given.is_some_and(|given| given.hostname.is_some()) {
        return Err(Error::new(ErrorKind::Invalid, "several clones cannot have the same host name"));
    }
    let definition = |name: &String| {
        let origin = Origin { machine: machine.clone(), snapshot: snapshot.clone(), way };
        let seed = Seed::for_clone(parent.seed.as_ref(), given);
        let new_identity = match (way, task.options.inside) {
            (CloneKind::Instant, _) | (_, Inside::Kept) => parent.new_identity,
            (_, Inside::IfAgent) => Some(NewIdentity::Auto),
            (_, Inside::Required) => Some(NewIdentity::Required),
        };
        let clone = Definition { seed, new_identity, ..parent.for_clone(name, origin)? };
        clone.check()?;
        Ok(clone)
    };
    task.names.iter().map(definition).collect()
}

/// The disks that are created for a clone; for a linked clone, each with the snapshot on which it is based.
fn own_disks(definition: &Definition, snapshots: &[Snapshot], way: CloneKind) -> Vec<OwnDisk> {
    let disks = definition.disks.iter().zip(snapshots);
    let own = disks.map(|(disk, snapshot)| OwnDisk {
        name: disk.name.clone(),
        origin: (way != CloneKind::Full).then(|| snapshot.clone()),
    });
    own.collect()
}

/// Makes the linked disks of all clones, with one request for each snapshot.
fn make_disks(
    host: &Host,
    snapshots: &[Snapshot],
    definitions: &[Definition],
    making: &Making,
    progress: &dyn Progress,
) -> Result<()> {
    for (index, snapshot) in snapshots.iter().enumerate() {
        if progress.cancelled() {
            return Err(Error::new(ErrorKind::Interrupted, "stopped on request; no clone was made"));
        }
        let disks: Vec<String> = definitions.iter().map(|definition| definition.disks[index].name.clone()).collect();
        host.disks().clone_linked(&snapshot.disk, &snapshot.name, &disks)?;
        making.made(disks);
    }
    Ok(())
}
