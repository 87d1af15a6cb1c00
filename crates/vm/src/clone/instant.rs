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
use crate::machine::{Hold, MachineState};
use crate::machines::{Making, Snapshot};
use crate::personality::{self, Given};
use crate::qemu::command::network_device;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

/// How long a guest may take to get its own identity, with all attempts.
const IDENTITY_PATIENCE: Duration = Duration::from_secs(180);
/// How long the agent of a clone may take to answer in one attempt, if the parent's agent answered.
const AGENT_PATIENCE: Duration = Duration::from_secs(30);
/// Pause after an attempt that failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// How long the agent of a clone may take to answer, if it is not known whether the parent has an agent.
const UNKNOWN_PATIENCE: Duration = Duration::from_secs(10);
/// How long the parent's agent may take to answer: shorter, because the agent is already running.
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
    change.take_over(&successor)?;
    successor.monitor.execute("cont", json!({}))?;
    let mut made = Made { running: Some(begun.elapsed()), ..Made::plain(&definition.name) };
    if options.inside != Inside::Kept {
        let given = match agent {
            Some(false) => Ok(None),
            agent => {
                assign_guest_identity(&mut |patience| machine.agent(patience), definition, agent, IDENTITY_PATIENCE)
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

/// Connects to the agent of a guest; `None` if the agent does not answer in time.
type Connect<'a> = dyn FnMut(Duration) -> Result<Option<Agent>> + 'a;

/// Gives the guest its own identity; `None` if the guest has no agent. On a loaded host the agent may answer late, or
/// after its connection was given up, so the attempt is repeated until `patience` is over.
fn assign_guest_identity(
    connect: &mut Connect<'_>,
    definition: &Definition,
    agent: Option<bool>,
    patience: Duration,
) -> Result<Option<Given>> {
    let deadline = Instant::now() + patience;
    let known = agent == Some(true);
    loop {
        let left = || deadline.saturating_duration_since(Instant::now());
        let attempt = connect(left().min(if known { AGENT_PATIENCE } else { UNKNOWN_PATIENCE }))
            .and_then(|agent| agent.map(|mut agent| personality::give(&mut agent, definition, left())).transpose());
        match attempt {
            Ok(None) if known && !left().is_zero() => {}
            Err(error) if error.kind() == ErrorKind::Io && !left().is_zero() => {
                tracing::debug!(machine = definition.name, "{error}; trying again");
                thread::sleep(RETRY_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::qmp::Client;
    use serde_json::Value;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    /// Reaction of a simulated agent to the request to run the script.
    #[derive(Clone, Copy)]
    enum Act {
        /// The agent disconnects.
        Vanish,
        /// The agent runs the script, and answers after this time.
        Run(Duration),
        /// The agent reports that the script failed.
        Fail,
    }

    fn agent(act: Act) -> Agent {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut lines = BufReader::new(theirs.try_clone().unwrap()).split(b'\n');
            let mut theirs = theirs;
            while let Some(Ok(line)) = lines.next() {
                let text = line.strip_prefix(&[0xff]).unwrap_or(&line);
                let request: Value = serde_json::from_slice(text).unwrap();
                let answer = match (request["execute"].as_str().unwrap(), act) {
                    ("guest-sync-delimited", _) => request["arguments"]["id"].clone(),
                    ("guest-exec", Act::Vanish) => return,
                    ("guest-exec", Act::Run(after)) => {
                        thread::sleep(after);
                        json!({ "pid": 1 })
                    }
                    ("guest-exec", Act::Fail) => json!({ "pid": 1 }),
                    (_, Act::Fail) => json!({ "exited": true, "exitcode": 1 }),
                    _ => json!({ "exited": true, "exitcode": 0 }),
                };
                let _ = writeln!(theirs, "{}", json!({ "return": answer, "id": request["id"] }));
            }
        });
        let client = Client::over(ours, Path::new("agent"), Duration::from_secs(5)).unwrap();
        Agent::over(client, Duration::from_secs(5)).unwrap().unwrap()
    }

    /// Runs the acts, one in each attempt; `None` for an agent that does not answer.
    fn assign(acts: &[Option<Act>], known: Option<bool>, patience: Duration) -> (Result<Option<Given>>, usize) {
        let definition = Definition::new("web", 1, 64 << 20).unwrap();
        let mut count = 0;
        let outcome = assign_guest_identity(
            &mut |_| {
                count += 1;
                Ok(acts.get(count - 1).copied().flatten().map(agent))
            },
            &definition,
            known,
            patience,
        );
        (outcome, count)
    }

    #[test]
    fn a_slow_agent_or_one_that_vanishes_gets_further_attempts() {
        let minute = Duration::from_secs(60);
        let good = Some(Act::Run(Duration::ZERO));
        // 11 seconds are more than the limit of one command of the agent without this patience.
        let slow = Some(Act::Run(Duration::from_secs(11)));
        for (acts, attempts) in [(vec![good], 1), (vec![Some(Act::Vanish), None, good], 3), (vec![slow], 1)] {
            let (outcome, count) = assign(&acts, Some(true), minute);
            assert_eq!((outcome.unwrap(), count), (Some(Given { reseeded: true }), attempts));
        }
        assert_eq!(assign(&[None, good], None, minute).0.unwrap(), None, "a guest that may have no agent");
    }

    #[test]
    fn attempts_end_with_the_patience_and_with_a_refusal() {
        let (outcome, count) = assign(&[Some(Act::Fail), None], Some(true), Duration::from_secs(60));
        assert_eq!((outcome.unwrap_err().kind(), count), (ErrorKind::Unsupported, 1));
        let vanishing = vec![Some(Act::Vanish); 1000];
        let begun = Instant::now();
        let (outcome, count) = assign(&vanishing, Some(true), Duration::from_secs(1));
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Io);
        assert!(count > 1 && begun.elapsed() < Duration::from_secs(20), "{count}");
    }
}
