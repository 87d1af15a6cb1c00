//! Clones: one or many, full, linked or instant.
//!
//! ```text
//! source     what is cloned: a machine as it is, or a snapshot of it
//! linked     deltas on snapshots of the parent's disks
//! full       independent copies
//! instant    the parent's disks and memory shared copy-on-write, running
//! progress   bytes of many copies as one figure
//! ```
//!
//! 1. A clone is created as a whole ([`crate::machines`]), and has an identity of its own: name, UUID, addresses of
//!    its network cards.
//! 2. A clone that cannot be made is reported by its name; the others are made all the same.
//! 3. All disks of a clone are of one point of its parent's life.

mod full;
mod instant;
mod linked;
mod progress;
mod source;

use source::Point;
pub use source::{PREFIX, Source};

use crate::definition::{CloneKind, Definition, Origin};
use crate::fleet;
use crate::host::Host;
use crate::lifecycle;
use crate::machines::{Making, OwnDisk, Snapshot};
use crate::quiet::Quiet;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;
use work::{Progress, Unreported};

/// What is to become of the identity inside the guest of an instant clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Inside {
    /// The guest's agent gives it a new one; if none answers, the clone is kept, its network unplugged.
    IfAgent,
    /// The guest's agent gives it a new one; a clone without one is not made.
    Required,
    /// The guest keeps thinking that it is its parent.
    Kept,
}

/// How clones are made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which kind.
    pub way: CloneKind,
    /// This many at a time.
    pub parallel: usize,
    /// The parent's file systems are frozen by its agent around the moment.
    pub quiesce: bool,
    /// They are started. Instant clones run in any case.
    pub start: bool,
    /// What becomes of the identity inside the guests of instant clones.
    pub inside: Inside,
}

/// A clone that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// Its name.
    pub name: String,
    /// How long it took from its beginning until its guest executed, where it does.
    pub running: Option<Duration>,
    /// Why its guest does not have a new identity, where it should.
    pub without_identity: Option<String>,
    /// Its guest's kernel could not be told to reseed its random numbers, and does so only within a minute.
    pub same_randomness: bool,
}

impl Made {
    fn plain(name: &str) -> Self {
        Self { name: name.to_owned(), running: None, without_identity: None, same_randomness: false }
    }
}

/// What became of all.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Those that were made, in the order of their names.
    pub made: Vec<Made>,
    /// Those that were not.
    pub failed: Vec<(String, Error)>,
    /// How quiet the parent was when its disks were taken; `None` where an existing snapshot was cloned.
    pub quiet: Option<Quiet>,
    /// How long the parent stood still.
    pub stun: Option<Duration>,
}

/// What is cloned, under which names and how.
#[derive(Clone, Copy)]
struct Task<'a> {
    host: &'a Host,
    source: &'a Source,
    names: &'a [String],
    options: &'a Options,
    progress: &'a dyn Progress,
}

impl Task<'_> {
    /// Takes what the clones need to be, and begins to make them: of what point of the source, and what they are.
    fn begin(&self, way: CloneKind) -> Result<(Point, Vec<Definition>, Making)> {
        let point = self.source.point(self.host)?;
        let definitions = clone_definitions(self.source, &point.definition, self.names, way)?;
        let temporary = if point.new { point.disks.clone() } else { Vec::new() };
        let own = |definition: &Definition| own_disks(definition, &point.disks, way);
        let making = self.host.machines().make(&definitions, own, temporary)?;
        Ok((point, definitions, making))
    }
}

/// Makes clones. `progress` is told how many are made; of full ones how many bytes are copied.
///
/// # Errors
/// When none can be made, for a reason that is the source's.
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
            // What is reported is how many bytes are copied.
            CloneKind::Full => start(host, &mut outcome, options, &Unreported(progress)),
            _ => start(host, &mut outcome, options, progress),
        }
    }
    outcome.failed.extend(failed);
    outcome.failed.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(outcome)
}

/// Starts what was made; one that cannot be started is there all the same, and told.
fn start(host: &Host, outcome: &mut Outcome, options: &Options, progress: &dyn Progress) {
    let names: Vec<String> = outcome.made.iter().map(|made| made.name.clone()).collect();
    let started = fleet::each(&names, options.parallel, progress, &|name| {
        let change = host.change(name)?;
        lifecycle::start(&change, host.machines(), host.images(), host.features()?, false)
    });
    for (name, error) in started.failed {
        outcome.failed.push((name, error.context("it was made, but not started")));
    }
}

/// Names that can be had, and those that cannot with the reason.
type Names = (Vec<String>, Vec<(String, Error)>);

/// The names that can be given, and the others with why not.
fn free_names(host: &Host, source: &Source, names: &[String]) -> Result<Names> {
    let count = source.definition(host)?.disks.len();
    let disks = host.disks().all()?;
    let (mut free, mut failed, mut seen) = (Vec::with_capacity(names.len()), Vec::new(), BTreeSet::new());
    for name in names {
        let exists = |what: String| Err(Error::new(ErrorKind::Exists, format!("there is {what} already")));
        let taken = (0..count).map(|index| crate::definition::disk_name(name, index)).find(|it| disks.contains_key(it));
        let good = crate::definition::check_name(name).and_then(|()| match taken {
            _ if host.machines().has(name) => exists(format!("a machine '{name}'")),
            _ if !seen.insert(name) => exists(format!("a clone '{name}' among those that are asked for")),
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

/// The definitions of clones.
fn clone_definitions(
    source: &Source,
    parent: &Definition,
    names: &[String],
    way: CloneKind,
) -> Result<Vec<Definition>> {
    let definition = |name: &String| {
        let origin = Origin { machine: source.machine.clone(), snapshot: source.snapshot.clone(), way };
        parent.for_clone(name, origin)
    };
    names.iter().map(definition).collect()
}

/// The disks that are made for a clone: of each, the snapshot that it stands on if it is a linked one.
fn own_disks(definition: &Definition, snapshots: &[Snapshot], way: CloneKind) -> Vec<OwnDisk> {
    let disks = definition.disks.iter().zip(snapshots);
    let own = disks.map(|(disk, snapshot)| OwnDisk {
        name: disk.name.clone(),
        origin: (way != CloneKind::Full).then(|| snapshot.clone()),
    });
    own.collect()
}

/// Makes the disks of clones on snapshots of the parent's: of all clones in one request for each snapshot.
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

/// Whether an error leaves open what was done: then the next command finds out.
fn is_uncertain(error: &Error) -> bool {
    error.kind() == ErrorKind::Io
}
