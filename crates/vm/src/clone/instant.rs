//! Instant clones: one memory image for all clones, one request for their disks, then a process for each clone.
//!
//! A clone exists once its guest has its own identity. After an error before that, the clone and its process are
//! removed.

use super::{Inside, Made, Options, Outcome, Task, make_disks, own_disks};
use crate::definition::{CloneKind, Definition};
use crate::fleet;
use crate::host::Host;
use crate::instant::image::Image;
use crate::instant::{child, freeze, running};
use crate::machine::{Hold, MachineState};
use crate::machines::{Making, Snapshot};
use crate::personality;
use crate::qemu::command::network_device;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a guest may take to get its own identity, with all attempts.
const IDENTITY_PATIENCE: Duration = Duration::from_secs(180);
/// How long the parent's agent may take to answer: shorter, because the agent is already running.
const PARENT_PATIENCE: Duration = Duration::from_secs(3);

pub fn make(task: &Task<'_>) -> Result<Outcome> {
    let Task { host, source, names, options, progress } = *task;
    if let Some(snapshot) = &source.snapshot {
        let text = format!(
            "an instant clone has the present state of its parent, not the state of snapshot '{snapshot}': revert to \
             the snapshot and freeze the machine, or make linked clones of the snapshot"
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    // The parent's lock is released as soon as the image exists: no other command removes the image while this command
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
        return Err(making.failed(error));
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
    let holding = change.hold(Hold { resume: true, thaw: false })?;
    let (taken, stun) = running::take(change, host.images(), host.disks(), host.features()?, &[], &holding)?;
    Ok((taken.image, agent, Some(stun)))
}

fn no_agent(machine: &str) -> String {
    format!(
        "the guest of '{machine}' has no agent that answers (qemu-guest-agent): it cannot be given its own identity"
    )
}

/// Creates one clone: its folder, its disks, its process, and its guest's own identity.
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
    let mut successor = child::set_up(&change, host.machines(), image, host.features()?, false)?;
    change.link(&successor.run)?;
    successor.monitor.execute("cont", json!({}))?;
    let mut made = Made { running: Some(begun.elapsed()), ..Made::plain(&definition.name) };
    if options.inside != Inside::Kept {
        let given = match agent {
            Some(false) => Ok(None),
            agent => {
                personality::give_within(&mut |patience| machine.agent(patience), definition, agent, IDENTITY_PATIENCE)
            }
        };
        let given = match given {
            Ok(None) if options.inside != Inside::Required => {
                Err(Error::new(ErrorKind::Unsupported, "no guest agent answers"))
            }
            Ok(None) => Err(Error::new(ErrorKind::Invalid, no_agent(&definition.name))),
            Ok(Some(given)) => Ok(given),
            Err(error) => Err(error),
        };
        match given {
            Ok(given) => made.same_randomness = !given.reseeded,
            Err(error) if options.inside == Inside::Required => return Err(error),
            // The clone is complete except that its guest still has its parent's identity.
            Err(error) => {
                made.without_identity = Some(format!("{error}; its network is unplugged"));
                return Ok(made);
            }
        }
    }
    for network in &definition.networks {
        successor.monitor.execute("set_link", json!({ "name": network_device(network), "up": true }))?;
    }
    Ok(made)
}
