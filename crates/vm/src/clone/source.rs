//! What is cloned.

use crate::definition::Definition;
use crate::host::Host;
use crate::identity::new_uuid;
use crate::machines::Snapshot;
use crate::quiet::{self, Quiet};
use crate::snapshots;
use error::Result;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How the names of snapshots begin that are taken for clones: they go with the last of them.
pub const PREFIX: &str = "clone-";

/// A machine, or a snapshot of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The machine.
    pub machine: String,
    /// Its snapshot; as it is now if nothing is said.
    pub snapshot: Option<String>,
}

/// The point that disks are cloned from.
pub struct Point {
    /// The machine as it was.
    pub definition: Definition,
    /// The snapshots of its disks, in their order.
    pub disks: Vec<Snapshot>,
    /// They are to be taken, for these clones alone.
    pub new: bool,
}

impl Source {
    /// The machine as it is cloned.
    pub fn definition(&self, host: &Host) -> Result<Definition> {
        let machine = host.machines().get(&self.machine)?;
        match &self.snapshot {
            Some(name) => Ok(snapshots::get(&machine, name)?.machine),
            None => machine.definition(),
        }
    }

    /// Where the disks are cloned from: snapshots that are there, or names for new ones.
    pub fn point(&self, host: &Host) -> Result<Point> {
        let machine = host.machines().get(&self.machine)?;
        if let Some(name) = &self.snapshot {
            let record = snapshots::get(&machine, name)?;
            return Ok(Point { definition: record.machine, disks: record.disks, new: false });
        }
        let definition = machine.definition()?;
        let name = format!("{PREFIX}{}", new_uuid()?);
        let disks = definition.disks.iter().map(|disk| Snapshot { disk: disk.name.clone(), name: name.clone() });
        Ok(Point { disks: disks.collect(), definition, new: true })
    }

    /// Takes the snapshots of a point that needs them; how quiet the guest was, and for how long it was frozen.
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
