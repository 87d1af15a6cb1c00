//! Taking snapshots of a machine's disks at one point in time, with the guest's file systems frozen if the guest's
//! agent can freeze them.

use crate::agent::Agent;
use crate::disks::Disks;
use crate::machine::{Change, Hold, MachineState};
use error::{ErrorKind, Result};
use std::time::{Duration, Instant};

/// How long the agent may take to answer; after this time the guest counts as one without an agent.
const AGENT_PATIENCE: Duration = Duration::from_secs(3);

/// Consistency of a snapshot's file systems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quiet {
    /// The guest did not run, so its disks are complete.
    Stopped,
    /// The file systems were frozen. The snapshot is consistent for applications with a freeze hook.
    Frozen {
        /// Number of frozen file systems.
        file_systems: u64,
        /// How long the file systems were frozen.
        time: Duration,
    },
    /// The guest ran: its disks have the state that a power failure would have left.
    Running {
        /// Why the guest's file systems were not frozen, if freezing was requested.
        why: Option<String>,
    },
}

impl Quiet {
    /// The consistency as a sentence, for output that users read.
    pub fn sentence(&self) -> String {
        match self {
            Self::Stopped => "the machine did not run".into(),
            Self::Frozen { file_systems, time } => {
                let systems = if *file_systems == 1 { "file system was" } else { "file systems were" };
                format!("{file_systems} {systems} frozen by the guest's agent for {:.0} ms", millis(*time))
            }
            Self::Running { why: None } => "crash-consistent: the guest ran".into(),
            Self::Running { why: Some(why) } => format!("crash-consistent only: {why}"),
        }
    }

    /// The consistency as one word, for output that programs read.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Frozen { .. } => "quiesced",
            Self::Running { .. } => "crash-consistent",
        }
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Takes snapshots of disks at one point in time. With `quiesce`, the guest's file systems are frozen meanwhile if the
/// guest's agent answers. They are thawed in every case: if this command is killed or cannot thaw them, the next
/// command thaws them.
pub fn snapshot(change: &Change, disks: &dyn Disks, of: &[(String, String)], quiesce: bool) -> Result<Quiet> {
    let machine = change.machine();
    let state = machine.state()?;
    if state == MachineState::Stopped {
        disks.snapshot(of)?;
        return Ok(Quiet::Stopped);
    }
    let why = match quiesce {
        false => None,
        true if state != MachineState::Running => Some("the guest is paused and its agent cannot answer".to_owned()),
        true => match machine.agent(AGENT_PATIENCE)? {
            None => Some("the guest's agent does not answer".to_owned()),
            Some(agent) => match frozen(change, agent, disks, of)? {
                Ok(quiet) => return Ok(quiet),
                Err(why) => Some(why),
            },
        },
    };
    disks.snapshot(of)?;
    Ok(Quiet::Running { why })
}

/// Takes the snapshots with frozen file systems. The inner error has the reason why they could not be frozen; in this
/// case no snapshot was taken.
fn frozen(
    change: &Change,
    agent: Agent,
    disks: &dyn Disks,
    of: &[(String, String)],
) -> Result<std::result::Result<Quiet, String>> {
    let holding = change.hold(Hold { resume: false, thaw: true })?;
    let begun = Instant::now();
    let frozen = match agent.freeze() {
        Ok(frozen) => frozen,
        Err(error) => {
            // Without an answer, the agent may freeze the file systems later.
            if error.kind() == ErrorKind::Io {
                holding.keep();
            }
            return Ok(Err(format!("the guest's file systems could not be frozen: {error}")));
        }
    };
    let count = frozen.count;
    let taken = disks.snapshot(of);
    let thawed = frozen.thaw().inspect_err(|_| holding.keep());
    let time = begun.elapsed();
    taken?;
    Ok(Ok(match thawed {
        Ok((_, thawed)) if thawed >= count => Quiet::Frozen { file_systems: count, time },
        Ok((_, thawed)) => {
            let why = format!("the guest thawed {} of {count} file systems by itself meanwhile", count - thawed);
            Quiet::Running { why: Some(why) }
        }
        Err(error) => Quiet::Running {
            why: Some(format!("it is not known whether the guest's file systems were frozen: {error}")),
        },
    }))
}
