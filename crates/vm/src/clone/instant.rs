//! Instant clones: one memory image for all clones, one request for their disks, then a process for each clone.
//!
//! A clone exists once its guest has its own identity. An error before that removes the clone with its process.

use super::{Inside, Made, Options, Outcome, Task, is_uncertain, make_disks, own_disks};
use crate::agent::Agent;
use crate::definition::{CloneKind, Definition};
use crate::fleet;
use crate::host::Host;
use crate::instant::image::Image;
use crate::instant::{child, freeze, running};
use crate::machine::{Hold, Machine, MachineState};
use crate::machines::{Making, Snapshot};
use crate::personality::{self, Given};
use crate::qemu::command::network_device;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the agent of a clone may take to answer, if the parent's agent answered.
const AGENT_PATIENCE: Duration = Duration::from_secs(30);
/// How long the agent of a clone may take to answer, if the parent may have none.
const UNKNOWN_PATIENCE: Duration = Duration::from_secs(10);
/// How long the parent's agent may take to answer; it is already running.
const PARENT_PATIENCE: Duration = Duration::from_secs(3);

pub fn make(task: &Task<'_>) -> Result<Outcome> {
    let Task { host, source, names, options, progress } = *task;
    if let Some(snapshot) = &source.snapshot {
        let text = format!(
            "an instant clone has the present state of its parent, not that of snapshot '{snapshot}': revert to it and \
             freeze, or make linked clones of it"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    // The parent's lock is released as soon as the image exists: no other command removes the image while this one
    // runs.
    let (image, agent, stun) = image(host, &host.change(&source.machine)?, options)?;
    let definitions: Vec<Definition> =
        names.iter().map(|name| child::definition(&image, name)).collect::<Result<_>>()?;
    let snapshots: Vec<Snapshot> = image.record.snapshots.iter().map(Into::into).collect();
    let making = host.machines().make(
        &definitions,
        |definition| own_disks(definition, &snapshots, CloneKind::Instant),
        Vec::new(),
    )?;
    if let Err(error) = make_disks(host, &snapshots, &definitions, &making, progress) {
        if is_uncertain(&error) {
            making.leave();
        }
        return Err(error);
    }
    let by_name: BTreeMap<&str, &Definition> =
        definitions.iter().map(|definition| (definition.name.as_str(), definition)).collect();
    let made = Mutex::new(BTreeMap::new());
    let each = fleet::each(names, options.parallel, progress, &|name| {
        let Some(definition) = by_name.get(name) else {
            return Err(Error::new(ErrorKind::Invalid, "this clone was not requested"));
        };
        let one = run(host, &image, definition, &making, agent, options)?;
        making.finish(name)?;
        made.lock().insert(name.to_owned(), one);
        Ok(())
    });
    making.settle()?;
    let mut made = made.into_inner();
    let made = each.made.iter().filter_map(|name| made.remove(name)).collect();
    Ok(Outcome { made, failed: each.failed, quiet: None, stun })
}

/// The memory image for the clones, whether their guests have an agent (if known), and how long the parent was paused.
fn image(
    host: &Host,
    change: &crate::machine::Change,
    options: &Options,
) -> Result<(Image, Option<bool>, Option<Duration>)> {
    let machine = change.machine();
    if let Some(id) = freeze::frozen(machine)? {
        let image = host.images().get(&id)?;
        let agent = image.record.agent;
        return Ok((image, agent, None));
    }
    match machine.state()? {
        MachineState::Running => {}
        MachineState::Stopped => {
            let text = format!(
                "machine '{}' does not run, so there is no memory to share: start it first, or make linked clones",
                machine.name()
            );
            return Err(Error::new(ErrorKind::WrongState, text));
        }
        _ => {
            let text = format!("machine '{}' is paused: resume it, or freeze it, then clone it", machine.name());
            return Err(Error::new(ErrorKind::WrongState, text));
        }
    }
    let agent = match options.inside {
        Inside::Kept => None,
        _ => Some(machine.agent(PARENT_PATIENCE)?.is_some()),
    };
    if options.inside == Inside::Required && agent == Some(false) {
        return Err(Error::new(ErrorKind::Invalid, no_agent(&machine.name())));
    }
    let _holding = change.hold(Hold { resume: true, thaw: false })?;
    let (taken, stun) = running::take(change, host.images(), host.disks(), host.features()?, &[])?;
    Ok((taken.image, agent, Some(stun)))
}

fn no_agent(machine: &str) -> String {
    format!(
        "the guest of '{machine}' has no agent that answers (qemu-guest-agent): it cannot be given its own identity"
    )
}

/// Creates one clone, from its folder and disks until its guest has its own identity.
fn run(
    host: &Host,
    image: &Image,
    definition: &Definition,
    making: &Making,
    agent: Option<bool>,
    options: &Options,
) -> Result<Made> {
    let begun = Instant::now();
    let machine = making.machine(&definition.name);
    let change = machine.change()?;
    let mut successor = child::set_up(&change, host.machines(), image, host.features()?)?;
    change.take_over(&successor)?;
    successor.monitor.execute("cont", json!({}))?;
    let mut made = Made { running: Some(begun.elapsed()), ..Made::plain(&definition.name) };
    if options.inside != Inside::Kept {
        let given = match agent {
            Some(false) => None,
            agent => assign_guest_identity(&machine, definition, agent)?,
        };
        let Some(given) = given else {
            if options.inside == Inside::Required {
                return Err(Error::new(ErrorKind::Invalid, no_agent(&definition.name)));
            }
            made.without_identity = Some("no guest agent answers; its network is unplugged".into());
            return Ok(made);
        };
        made.same_randomness = !given.reseeded;
    }
    for network in &definition.networks {
        successor.monitor.execute("set_link", json!({ "name": network_device(network), "up": true }))?;
    }
    Ok(made)
}

/// Gives the guest its own identity; `None` if it has no agent.
fn assign_guest_identity(machine: &Machine, definition: &Definition, agent: Option<bool>) -> Result<Option<Given>> {
    let patience = if agent == Some(true) { AGENT_PATIENCE } else { UNKNOWN_PATIENCE };
    let agent: Option<Agent> = machine.agent(patience)?;
    match agent {
        Some(mut agent) => personality::give(&mut agent, definition).map(Some),
        None => Ok(None),
    }
}
