//! Taking the snapshots of a machine's disks at one point: quiet, if the guest's agent can make it so.

use crate::agent::Agent;
use crate::disks::Disks;
use crate::machine::{Change, Hold, MachineState};
use error::Result;
use std::time::{Duration, Instant};

/// How long the agent may take to answer before the guest counts as one without.
const AGENT_PATIENCE: Duration = Duration::from_secs(3);

/// How quiet the guest was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quiet {
    /// It did not run: what is on its disks is all there is.
    Stopped,
    /// Its file systems were frozen, with what its hooks did: consistent for applications that have one.
    Frozen {
        /// How many file systems.
        file_systems: u64,
        /// For how long.
        time: Duration,
    },
    /// It ran: what is on its disks is what the end of power would have left.
    Running {
        /// Why it was not frozen, if that was asked for.
        why: Option<String>,
    },
}

impl Quiet {
    /// For people.
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

    /// For programs.
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

/// Takes snapshots of disks at one point. With `quiesce`, the guest's file systems are frozen around it if its agent
/// answers; they are thawed whatever happens, by the next command if this one is killed.
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

/// With the guest's file systems frozen; the inner error says why they could not be, and then nothing was taken.
fn frozen(
    change: &Change,
    agent: Agent,
    disks: &dyn Disks,
    of: &[(String, String)],
) -> Result<std::result::Result<Quiet, String>> {
    let _holding = change.hold(Hold { resume: false, thaw: true })?;
    let begun = Instant::now();
    let frozen = match agent.freeze() {
        Ok(frozen) => frozen,
        Err(error) => return Ok(Err(format!("the guest's file systems could not be frozen: {error}"))),
    };
    let count = frozen.count;
    let taken = disks.snapshot(of);
    let thawed = frozen.thaw();
    let time = begun.elapsed();
    taken?;
    Ok(Ok(match thawed {
        Ok((_, thawed)) if thawed >= count => Quiet::Frozen { file_systems: count, time },
        Ok((_, thawed)) => {
            let why = format!("the guest thawed {} of {count} file systems by itself meanwhile", count - thawed);
            Quiet::Running { why: Some(why) }
        }
        Err(error) => Quiet::Running { why: Some(format!("it is not known whether the guest was frozen: {error}")) },
    }))
}
