//! The verbs of `lamina vm`: arguments to calls of [`vm`], and what they say printed. Nothing is decided here.
//!
//! ```text
//! disks     the datastore, as machines need it
//! clones    clone
//! send      clone to another server
//! resize    disk resize, where a running machine has the disk
//! show      show, list
//! console   console, exec
//! follow    progress of many, Ctrl-C
//! ```
//!
//! Every verb begins with recovery: what a killed one has left is gone, or whole, before this one looks.

mod clones;
mod console;
mod disks;
mod follow;
pub mod resize;
mod send;
mod show;

use crate::End;
use crate::cli::{NetworkArgument, VmArguments, VmCommand, VmCreate, VmSnapshotCommand};
use crate::output::{self, Form};
pub use disks::Bound;
use error::{Error, ErrorKind, Result};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vm::definition::{Boot, Definition, Link};
use vm::host::{Host, Places};
use vm::identity::Mac;
use vm::lifecycle::{self, Stop};
use vm::machine::{Hold, MachineState};
use vm::machines::{OwnDisk, Snapshot};
use vm::snapshots;

/// Carries out one verb.
pub fn run(datastore: &Path, arguments: VmArguments, form: Form) -> std::result::Result<End, End> {
    control::require_folder(datastore)?;
    let datastore = datastore.canonicalize().map_err(|e| Error::io(format!("finding '{}'", datastore.display()), e))?;
    let places = Places { datastore: datastore.clone(), memory: arguments.memory_folder, qemu: arguments.qemu };
    let host = Host::open(&places, Arc::new(Bound::new(&datastore)))?;
    host.recover()?;
    let say = |text: String, value: Value| say(form, &text, &value);
    let each = |names: &[String], done: &str, work: &dyn Fn(&str) -> Result<()>| each(names, done, form, work);
    match arguments.command {
        VmCommand::Create(create) => {
            let definition = make(&host, &create)?;
            let text = format!("made machine {} ({})", definition.name, definition.uuid);
            say(text, show::definition(&definition))
        }
        VmCommand::Start { names, paused } => each(&names, "started", &|name| {
            let _working = host.work()?;
            lifecycle::start(&host.change(name)?, host.machines(), host.images(), host.features()?, paused)
        }),
        VmCommand::Stop { names, force, timeout } => each(&names, "stopped", &|name| {
            let how = if force { Stop::Now } else { Stop::Ask(Duration::from_secs(timeout)) };
            lifecycle::stop(&host.change(name)?, how)
        }),
        VmCommand::Pause { names } => each(&names, "paused", &|name| lifecycle::pause(&host.change(name)?)),
        VmCommand::Resume { names } => each(&names, "resumed", &|name| lifecycle::resume(&host.change(name)?)),
        VmCommand::Show { name } => show::one(&host, &name, form).map_err(Into::into),
        VmCommand::List => show::all(&host, form).map_err(Into::into),
        VmCommand::Delete { names, keep_disks, promote } => each(&names, "deleted", &|name| {
            let _working = host.work()?;
            delete(&host, name, keep_disks, promote)
        }),
        VmCommand::Snapshot(command) => snapshot(&host, command, form),
        VmCommand::Revert { snapshot, paused } => {
            let _working = host.work()?;
            let change = host.change(&snapshot.machine)?;
            let state = snapshots::revert(&host, &change, &snapshot.name, paused)?;
            let text = format!(
                "machine {} is as it was at {}{}",
                snapshot.machine,
                snapshot.name,
                if state == MachineState::Stopped { ", and off" } else { "" }
            );
            say(text, json!({ "name": snapshot.machine, "snapshot": snapshot.name, "state": state }))
        }
        VmCommand::Clone(clone) => match &clone.to {
            Some(remote) => send::run(&datastore, &host, &clone, remote, form),
            None => clones::run(&host, &clone, form),
        },
        VmCommand::Freeze { name } => freeze(&host, &name, form),
        VmCommand::Console { name, said, quiet } => {
            console::attach(&host.machines().get(&name)?, said, Duration::from_secs(quiet))
        }
        VmCommand::Exec { name, input, timeout, command } => {
            let machine = host.machines().get(&name)?;
            console::execute(&machine, &command, input, Duration::from_secs(timeout), form)
        }
    }
}

/// Prints what was done.
fn say(form: Form, text: &str, value: &Value) -> std::result::Result<End, End> {
    let mut out = io::stdout().lock();
    match form {
        Form::Text => writeln!(out, "{text}")?,
        Form::Json => output::print_json(&mut out, value)?,
    }
    Ok(End::Code(0))
}

/// The same with each of several machines. One that fails keeps no other from its turn.
fn each(names: &[String], done: &str, form: Form, work: &dyn Fn(&str) -> Result<()>) -> std::result::Result<End, End> {
    let (mut good, mut failed) = (Vec::new(), Vec::new());
    for name in names {
        match work(name) {
            Ok(()) => good.push(name.clone()),
            Err(error) if names.len() == 1 => return Err(error.into()),
            Err(error) => failed.push((name.clone(), error)),
        }
    }
    if form == Form::Json {
        let failures: Vec<Value> = failed.iter().map(|(name, error)| failure(name, error)).collect();
        say(form, "", &json!({ done: good, "failed": failures }))?;
    } else if !good.is_empty() {
        say(form, &format!("{done} {}", good.join(", ")), &Value::Null)?;
    }
    Ok(told(&failed))
}

fn failure(name: &str, error: &Error) -> Value {
    json!({ "name": name, "error": error.to_string() })
}

/// Tells which failed, a line for each, on stderr; the exit code of the first.
fn told(failed: &[(String, Error)]) -> End {
    let mut err = io::stderr().lock();
    for (name, error) in failed {
        let line: Vec<String> = error.to_string().lines().map(|line| line.trim().to_owned()).collect();
        let _ = writeln!(err, "lamina: {name}: {}", line.join(" "));
    }
    End::Code(failed.first().map_or(0, |(_, error)| crate::exit::code(error.kind())))
}

fn make(host: &Host, create: &VmCreate) -> Result<Definition> {
    let _working = host.work()?;
    let mut definition = Definition::new(&create.name, create.cpus, create.memory)?;
    if let Some(kernel) = &create.kernel {
        definition.boot = Some(Boot {
            kernel: readable(kernel)?,
            initrd: create.initrd.as_deref().map(readable).transpose()?,
            append: create.append.clone().unwrap_or_default(),
        });
    }
    let mut own = Vec::new();
    if create.disk_size.is_some() {
        definition.add_disk(&create.name)?;
        own.push(OwnDisk { name: create.name.clone(), origin: None });
    }
    let (there, users) = (host.disks().all()?, host.machines().users_of_disks()?);
    if create.disk_size.is_some() && there.contains_key(&create.name) {
        return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{}' already", create.name)));
    }
    for disk in &create.disks {
        if !there.contains_key(disk) {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no disk '{disk}'")));
        }
        if let Some(user) = users.get(disk) {
            return Err(Error::new(ErrorKind::Busy, format!("disk '{disk}' is machine '{user}'s")));
        }
        definition.add_disk(disk)?;
    }
    for network in networks(&create.networks)? {
        definition.add_network(Mac::new()?, network)?;
    }
    let making = host.machines().make(std::slice::from_ref(&definition), |_| own.clone(), Vec::new())?;
    if let Some(size) = create.disk_size {
        host.disks().create(&create.name, size)?;
        making.made([create.name.clone()]);
    }
    making.finish(&create.name)?;
    making.settle()?;
    if create.start {
        lifecycle::start(&host.change(&create.name)?, host.machines(), host.images(), host.features()?, false)
            .map_err(|error| error.context("it was made, but not started"))?;
    }
    Ok(definition)
}

fn networks(arguments: &[NetworkArgument]) -> Result<Vec<Link>> {
    if arguments.is_empty() {
        return Ok(vec![Link::User]);
    }
    let cards = arguments.iter().filter_map(|argument| match argument {
        NetworkArgument::Card(link) => Some(link.clone()),
        NetworkArgument::None => None,
    });
    let cards: Vec<Link> = cards.collect();
    if !cards.is_empty() && cards.len() < arguments.len() {
        return Err(Error::new(ErrorKind::Invalid, "'--network none' is for no card at all, and there are others"));
    }
    Ok(cards)
}

/// A file that is there, by a path that means the same to QEMU.
fn readable(path: &Path) -> Result<std::path::PathBuf> {
    path.canonicalize().map_err(|e| Error::io(format!("looking for '{}'", path.display()), e))
}

/// Deletes a machine; the snapshots that were taken for its clones go with the last of them.
fn delete(host: &Host, name: &str, keep_disks: bool, promote: bool) -> Result<()> {
    let machine = host.machines().get(name)?;
    let disks = if keep_disks { Vec::new() } else { machine.definition()?.disk_names() };
    let there = host.disks().all()?;
    let origins = disks.iter().filter_map(|disk| there.get(disk)?.origin.clone());
    let snapshots = origins
        .filter(|(_, snapshot)| host.is_only_for_clones(snapshot))
        .map(|(disk, name)| Snapshot { disk, name })
        .collect();
    host.machines().delete(name, &disks, snapshots, promote)
}

fn freeze(host: &Host, name: &str, form: Form) -> std::result::Result<End, End> {
    let _working = host.work()?;
    let change = host.change(name)?;
    let features = host.features()?;
    let resume = change.machine().state()? == MachineState::Running;
    let taken = {
        let _holding = change.hold(Hold { resume, thaw: false })?;
        vm::instant::freeze::freeze(&change, host.images(), host.disks(), features)?
    };
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let text = format!(
        "froze {name} to image {} (stop {:.1} ms, disks {:.1} ms, state {:.1} ms)",
        taken.image.id,
        millis(taken.stop),
        millis(taken.snapshots),
        millis(taken.save)
    );
    let value = json!({
        "name": name, "image": taken.image.id, "stop_ms": millis(taken.stop), "disks_ms": millis(taken.snapshots),
        "state_ms": millis(taken.save),
    });
    say(form, &text, &value)
}

fn snapshot(host: &Host, command: VmSnapshotCommand, form: Form) -> std::result::Result<End, End> {
    match command {
        VmSnapshotCommand::Create { snapshot, memory, quiesce } => {
            let _working = host.work()?;
            let change = host.change(&snapshot.machine)?;
            let taken = snapshots::take(host, &change, &snapshot.name, snapshots::Options { memory, quiesce })?;
            let stun = taken.stun.map(|time| time.as_secs_f64() * 1e3);
            let how = match (&taken.quiet, stun) {
                (Some(quiet), _) => quiet.sentence(),
                (None, stun) => format!("with memory; the guest was paused for {:.1} ms", stun.unwrap_or(0.0)),
            };
            let mut value = show::snapshot(&snapshot.machine, &taken.record);
            value["stun_ms"] = json!(stun);
            value["remark"] = json!(how);
            say(form, &format!("took {}@{}: {how}", snapshot.machine, snapshot.name), &value)
        }
        VmSnapshotCommand::List { name } => Ok(show::snapshots(host, &name, form)?),
        VmSnapshotCommand::Delete { snapshot } => {
            let _working = host.work()?;
            snapshots::delete(host, &host.change(&snapshot.machine)?, &snapshot.name)?;
            let name = format!("{}@{}", snapshot.machine, snapshot.name);
            say(form, &format!("deleted {name}"), &json!({ "deleted": name }))
        }
    }
}
