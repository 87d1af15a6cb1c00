//! Requests about machines: calls of [`vm`] in the requesting process. Operations on their disks are requests to the
//! owner of the datastore.
//!
//! Every operation begins with recovery, which undoes or completes the work of killed processes.

mod backup;
mod clone;
mod disks;
mod export;
mod import;
mod resize;
mod send;
mod show;

pub use resize::resize;

use super::{Target, Watch};
use crate::message::{Failure, MachineReply, MachineRequest, MachineSnapshot, MachineVerb, NewMachine, Reply};
use disk::Location;
pub use disks::disks;
use error::{Error, ErrorKind, IoContext, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;
use vm::definition::{Boot, Definition};
use vm::host::{Host, Places};
use vm::identity::Mac;
use vm::lifecycle::{self, Stop};
use vm::machine::{Hold, MachineState};
use vm::machines::OwnDisk;
use vm::snapshots;

/// How long the guest agent may take to answer.
const AGENT_PATIENCE: Duration = Duration::from_secs(5);

/// Context of an operation on machines.
struct Work<'a> {
    target: &'a Target,
    host: Host,
    watch: &'a dyn Watch,
}

/// The location of the datastore, which is valid in every process.
fn location(target: &Target) -> Result<Location> {
    match target {
        Target::Files => Err(super::needs_datastore()),
        Target::At(location) => location.resolved(),
        Target::Open(service) => service.location.resolved(),
    }
}

/// Carries out a request about machines.
pub fn dispatch(target: &Target, request: MachineRequest, watch: &dyn Watch) -> Result<Reply> {
    let datastore = location(target)?.need_folder("virtual machines")?.to_path_buf();
    let MachineRequest { qemu, memory_folder, verb } = request;
    let places = Places { datastore, memory: memory_folder, qemu };
    let host = Host::open(&places, disks(target.clone()))?;
    host.recover()?;
    Work { target, host, watch }.run(verb).map(Reply::Machine)
}

impl Work<'_> {
    fn run(&self, verb: MachineVerb) -> Result<MachineReply> {
        let host = &self.host;
        match verb {
            MachineVerb::Create(new) => create(host, &new).map(Box::new).map(MachineReply::Created),
            MachineVerb::Import(request) => import::run(host, &request, self.watch),
            MachineVerb::Export { source, path, rate } => self.export(&source, path, rate),
            MachineVerb::BackUp(request) => self.back_up(&request),
            MachineVerb::Restore(request) => self.restore(&request),
            MachineVerb::Edit { name, edit } => {
                let _working = host.work()?;
                vm::edit::edit(&host.change(&name)?, host, &edit).map(Box::new).map(MachineReply::Edited)
            }
            MachineVerb::Rename { name, to } => {
                let _working = host.work()?;
                let definition = vm::edit::rename(&host.change(&name)?, host, &to)?;
                Ok(MachineReply::Renamed { name, definition: Box::new(definition) })
            }
            MachineVerb::Start { names, autostart, paused } => {
                let names = if autostart { marked_for_start(host)? } else { names };
                self.each(names, &|name| {
                    let _working = host.work()?;
                    start(host, name, paused)
                })
            }
            MachineVerb::Stop { names, all, timeout } => {
                let how = timeout.map_or(Stop::Now, |seconds| Stop::Ask(Duration::from_secs(seconds)));
                let names = if all { running(host)? } else { names };
                self.each(names, &|name| lifecycle::stop(&host.change_reverted(name)?, how))
            }
            MachineVerb::Pause { names } => self.each(names, &|name| lifecycle::pause(&host.change(name)?)),
            MachineVerb::Resume { names } => self.each(names, &|name| lifecycle::resume(&host.change(name)?)),
            MachineVerb::Show { name, .. } => show::one(host, &name),
            MachineVerb::List => show::all(host),
            MachineVerb::Delete { names, keep_disks, promote, force } => self.each(names, &|name| {
                let _working = host.work()?;
                host.delete(name, keep_disks, promote, force)
            }),
            MachineVerb::SnapshotCreate { snapshot, memory, quiesce } => {
                take(host, snapshot, snapshots::Options { memory, quiesce })
            }
            MachineVerb::SnapshotList { name } => {
                let records = snapshots::list(&host.machines().get(&name)?)?;
                Ok(MachineReply::Snapshots { machine: name, records })
            }
            MachineVerb::SnapshotDelete { snapshot } => {
                let _working = host.work()?;
                snapshots::delete(host, &host.change_reverted(&snapshot.machine)?, &snapshot.name)?;
                Ok(MachineReply::SnapshotDeleted(snapshot))
            }
            MachineVerb::Revert { snapshot, paused } => {
                let _working = host.work()?;
                let change = host.change_reverted(&snapshot.machine)?;
                let reverted = snapshots::revert(host, &change, &snapshot.name, paused)?;
                Ok(MachineReply::Reverted { snapshot, state: reverted.state, clock: reverted.clock })
            }
            MachineVerb::Clone { source, names, options } => clone::make(host, &source, &names, &options, self.watch),
            MachineVerb::Send { source, remote, how, quiesce } => self.send(&source, &remote, &how, quiesce),
            MachineVerb::Freeze { name } => freeze(host, name),
            MachineVerb::Console { name, log } => {
                let machine = host.machines().get(&name)?;
                if !log {
                    machine.running()?;
                }
                let run = machine.run();
                let lock = run.0.join("console.lock");
                Ok(MachineReply::Console { name, socket: run.console(), lock, log: run.console_log() })
            }
            MachineVerb::Screenshot { name, path } => {
                vm::screen::shoot(&host.machines().get(&name)?, &path)?;
                Ok(MachineReply::Screenshot { name, path })
            }
            MachineVerb::SendKey { name, keys } => {
                vm::screen::press(&host.machines().get(&name)?, &keys)?;
                Ok(MachineReply::KeysSent { name })
            }
            MachineVerb::Type { name, text } => {
                vm::screen::write(&host.machines().get(&name)?, &text)?;
                Ok(MachineReply::KeysSent { name })
            }
            MachineVerb::Execute { name, command, input, timeout } => {
                execute(host, &name, &command, &input, Duration::from_secs(timeout))
            }
        }
    }

    /// Applies an operation to several machines. If it fails for one machine, it is applied to the others nevertheless.
    fn each(&self, names: Vec<String>, work: &dyn Fn(&str) -> Result<()>) -> Result<MachineReply> {
        let (mut done, mut failed) = (Vec::new(), Vec::new());
        let alone = names.len() == 1;
        for name in names {
            match work(&name) {
                Ok(()) => done.push(name),
                Err(error) if alone => return Err(error),
                Err(error) => failed.push((name, Failure::from(&error))),
            }
        }
        Ok(MachineReply::Each { done, failed })
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The machines that run.
fn running(host: &Host) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for machine in host.machines().list()? {
        if machine.process()?.is_some() {
            names.push(machine.name());
        }
    }
    Ok(names)
}

/// The machines that are marked for a start with the host and do not run.
fn marked_for_start(host: &Host) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for machine in host.machines().list()? {
        match machine.definition() {
            Ok(definition) if definition.autostart && machine.process()?.is_none() => names.push(definition.name),
            Ok(_) => {}
            Err(error) => tracing::warn!("{error}"),
        }
    }
    Ok(names)
}

fn start(host: &Host, name: &str, paused: bool) -> Result<()> {
    lifecycle::start(&host.change(name)?, host.machines(), host.images(), host.features()?, paused)
}

fn create(host: &Host, new: &NewMachine) -> Result<Definition> {
    let _working = host.work()?;
    let mut definition = Definition::new(&new.name, new.cpus, new.memory)?;
    if let Some(kernel) = &new.kernel {
        definition.boot = Some(Boot {
            kernel: readable(kernel)?,
            initrd: new.initrd.as_deref().map(readable).transpose()?,
            append: new.append.clone(),
        });
    }
    definition.platform = new.platform;
    definition.cpu_model.clone_from(&new.cpu_model);
    definition.boot_order.clone_from(&new.boot_order);
    definition.write_errors = new.write_errors;
    definition.set_vnc(new.vnc);
    definition.vnc_tls.clone_from(&new.vnc_tls);
    definition.run_as.clone_from(&new.run_as);
    definition.seed.clone_from(&new.seed);
    definition.check()?;
    for image in &new.cdroms {
        definition.add_cdrom(Some(vm::media::readable(image)?))?;
    }
    let mut own = Vec::new();
    if new.disk_size.is_some() {
        definition.add_disk(&new.name)?;
        own.push(OwnDisk { name: new.name.clone(), origin: None });
    }
    let claim = host.machines().claim_disks()?;
    let (there, users) = (host.disks().all()?, host.machines().users_of_disks()?);
    if new.disk_size.is_some() && there.contains_key(&new.name) {
        return Err(Error::new(ErrorKind::Exists, format!("there is a disk '{}' already", new.name)));
    }
    for disk in &new.disks {
        if !there.contains_key(disk) {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no disk '{disk}'")));
        }
        if let Some(user) = users.get(disk) {
            return Err(Error::new(ErrorKind::Busy, format!("disk '{disk}' belongs to machine '{user}'")));
        }
        definition.add_disk(disk)?;
    }
    for network in &new.networks {
        definition.add_network(Mac::new()?, network.clone())?;
    }
    let making = host.machines().make(std::slice::from_ref(&definition), |_| own.clone(), Vec::new())?;
    // From here on, the disks belong to the machine that is being created.
    drop(claim);
    if let Some(size) = new.disk_size {
        if let Err(error) = host.disks().create(&new.name, size) {
            return Err(making.failed(error));
        }
        making.made([new.name.clone()]);
    }
    making.finish(&new.name)?;
    making.settle()?;
    if new.start {
        start(host, &new.name, false).map_err(|error| error.context("the machine was created, but not started"))?;
    }
    Ok(definition)
}

/// The absolute path of an existing file, for QEMU.
fn readable(path: &Path) -> Result<PathBuf> {
    path.canonicalize().during(|| format!("looking for '{}'", path.display()))
}

fn take(host: &Host, snapshot: MachineSnapshot, options: snapshots::Options) -> Result<MachineReply> {
    let _working = host.work()?;
    let MachineSnapshot { machine, name } = snapshot;
    let taken = snapshots::take(host, &host.change(&machine)?, &name, options)?;
    Ok(MachineReply::SnapshotTaken {
        machine,
        record: Box::new(taken.record),
        stun_ms: taken.stun.map(millis),
        quiet: taken.quiet.map(|quiet| quiet.sentence()),
    })
}

fn freeze(host: &Host, name: String) -> Result<MachineReply> {
    let _working = host.work()?;
    let change = host.change(&name)?;
    let features = host.features()?;
    let resume = change.machine().state()? == MachineState::Running;
    let taken = {
        let holding = change.hold(Hold { resume, thaw: false })?;
        vm::instant::freeze::freeze(&change, host.images(), host.disks(), features, &holding)?
    };
    Ok(MachineReply::Frozen {
        name,
        image: taken.image.id,
        stop_ms: millis(taken.stop),
        disks_ms: millis(taken.snapshots),
        state_ms: millis(taken.save),
    })
}

fn execute(host: &Host, name: &str, command: &[String], input: &[u8], timeout: Duration) -> Result<MachineReply> {
    let machine = host.machines().get(name)?;
    let Some((program, arguments)) = command.split_first() else {
        return Err(Error::new(ErrorKind::Invalid, format!("no program to run in machine '{name}' is given")));
    };
    let Some(mut agent) = machine.agent(AGENT_PATIENCE)? else {
        let text =
            format!("no agent answers in the guest of machine '{name}': it is not up yet, or has no qemu-guest-agent");
        return Err(Error::new(ErrorKind::Unsupported, text));
    };
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let execution = agent.run(program, &arguments, input, timeout)?;
    Ok(MachineReply::Executed { name: name.to_owned(), execution })
}
