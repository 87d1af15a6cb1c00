//! The source of clones.

use crate::definition::Definition;
use crate::host::Host;
use crate::identity::new_uuid;
use crate::machines::Snapshot;
use crate::quiet::{self, Quiet};
use crate::snapshots;
use error::Result;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Prefix of snapshots that are taken for clones. Such a snapshot is deleted with the last clone based on it.
pub const PREFIX: &str = "clone-";

/// A machine, or a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The name of the machine.
    pub machine: String,
    /// The snapshot; `None` for the machine's current state.
    pub snapshot: Option<String>,
}

/// The state from which disks are cloned.
pub struct Point {
    /// The definition of the machine in that state.
    pub definition: Definition,
    /// The snapshots of the machine's disks, in the order of the disks.
    pub disks: Vec<Snapshot>,
    /// Whether the snapshots still have to be taken, for these clones only.
    pub new: bool,
}

impl Source {
    /// The definition of the machine in the state that is cloned.
    pub fn definition(&self, host: &Host) -> Result<Definition> {
        let machine = host.machines().get(&self.machine)?;
        match &self.snapshot {
            Some(name) => Ok(snapshots::get(&machine, name)?.machine),
            None => machine.definition(),
        }
    }

    /// The state from which disks are cloned: existing snapshots, or names for snapshots that [`Source::take`] takes.
    pub fn point(&self, host: &Host) -> Result<Point> {
        let machine = host.machines().get(&self.machine)?;
        if let Some(name) = &self.snapshot {
            let record = snapshots::get(&machine, name)?;
            return Ok(Point { definition: record.machine, disks: record.disks, new: false });
        }
        // Checked before the clones are begun: root could not remove what was begun in a datastore of another user.
        machine.check_owner()?;
        let definition = machine.definition()?;
        let name = format!("{PREFIX}{}", new_uuid()?);
        let disks = definition.disks.iter().map(|disk| Snapshot { disk: disk.name.clone(), name: name.clone() });
        Ok(Point { disks: disks.collect(), definition, new: true })
    }

    /// Takes the snapshots that a point names but that do not exist yet. Returns the consistency of the file systems,
    /// and how long they were frozen.
    pub fn take(&self, host: &Host, point: &Point, quiesce: bool) -> Result<(Option<Quiet>, Option<Duration>)> {
        if !point.new || point.disks.is_empty() {
            return Ok((None, None));
        }
        let change = host.change(&self.machine)?;
        let of: Vec<(String, String)> = point.disks.iter().map(|one| (one.disk.clone(), one.name.clone())).collect();
        let quiet = quiet::snapshot(&change, host.disks(), &of, quiesce)?;
        let stun = match &quiet {
            Quiet::Frozen { time, .. } => Some(*time),
            _ => None,
        };
        Ok((Some(quiet), stun))
    }
}
