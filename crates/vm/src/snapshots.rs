//! Snapshots of machines: all disks at one point in time, with or without the memory of that point.
//!
//! ```text
//! NAME/snapshots/SNAPSHOT/snapshot.toml   the record, with the machine's definition at that time
//! NAME/snapshots/SNAPSHOT/state, memory   device state and memory, if the snapshot has memory
//! NAME/snapshots/SNAPSHOT/nvram           the variables of the machine's UEFI at that time, if it had any
//! NAME/snapshots/.new-SNAPSHOT/           a snapshot that is being taken; .old-SNAPSHOT: one that is being deleted
//! NAME/reverting                          names the snapshot that the machine is being reverted to
//! ```
//!
//! 1. A snapshot exists, and is complete, if its folder has its final name. If a command is killed while it takes or
//!    deletes a snapshot, the next command removes the snapshot's folder, and the disk snapshots that the intent in the
//!    folder names. The intent is removed after the folder has received its final name.
//! 2. A guest is paused only while the disk snapshots and its device state are taken. Its memory is copied afterwards
//!    from a memory image, from which the guest continues (see `instant::running`).
//! 3. A revert that was interrupted is repeated, which gives the same result. Until the revert is complete, the machine
//!    is not started or changed: the repetition would discard what its guest has written since. The disks of the
//!    snapshot belong to the machine, so that no other machine gets them.

use crate::busy::{DISK_OF_ENDED_PROCESS, while_busy};
use crate::definition::Definition;
use crate::disks::Disks;
use crate::durable;
use crate::host::Host;
use crate::instant::freeze::{self, Memories};
use crate::instant::{pages, running, state};
use crate::lifecycle;
use crate::machine::{Change, Hold, Machine, MachineState, MemoryRecord, Start, remove_if_there};
use crate::machines::Snapshot;
use crate::nvram;
use crate::qemu::command::Memory;
use crate::quiet::{self, Quiet};
use backend::{clock, private, regular};
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const FOLDER: &str = "snapshots";
const RECORD: &str = "snapshot.toml";
const INTENT: &str = "intent.toml";
const REVERTING: &str = "reverting";
const NEW: &str = ".new-";
const OLD: &str = ".old-";
pub(crate) const VERSION: u32 = 1;
/// Most bytes of a record whose disks are listed. Besides a definition, a record names only snapshots.
const RECORD_MAX: u64 = 4 << 20;
/// Longest name of a snapshot.
pub(crate) const NAME_MAX: usize = 63;

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this record.
    pub version: u32,
    /// The snapshot's name.
    pub name: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// Consistency: `stopped`, `quiesced`, `crash-consistent`, or `memory` if the snapshot has the guest's memory.
    pub consistency: String,
    /// For a snapshot with memory: whether the guest can be continued with passt as its user network. Otherwise the
    /// snapshot contains the state of QEMU's own user network.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub passt: bool,
    /// The snapshots of the machine's disks, in the order of the disks.
    #[serde(default, rename = "disk")]
    pub disks: Vec<Snapshot>,
    /// The machine's definition when the snapshot was taken.
    pub machine: Definition,
}

/// What has to be removed if the process that takes the snapshot is killed.
#[derive(Serialize, Deserialize)]
struct Intent {
    begun: u64,
    #[serde(default, rename = "disk")]
    disks: Vec<Snapshot>,
}

/// Options of a new snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Whether to include the guest's memory.
    pub memory: bool,
    /// Whether to freeze the guest's file systems with its agent.
    pub quiesce: bool,
}

/// Result of taking a snapshot.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The snapshot.
    pub record: Record,
    /// Consistency of the file systems; `None` if the snapshot has memory.
    pub quiet: Option<Quiet>,
    /// How long the guest was paused, if its memory was captured.
    pub stun: Option<Duration>,
}

impl Record {
    /// Whether the snapshot has the guest's memory.
    pub fn has_memory(&self) -> bool {
        self.consistency == "memory"
    }
}

/// Checks that a name can be used for a snapshot.
pub fn check_name(name: &str) -> Result<()> {
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if name.is_empty() || name.len() > NAME_MAX || !plain || name.starts_with(['.', '-']) {
        let name = name.escape_debug();
        let text = format!("'{name}' cannot name a snapshot of a machine: use letters, digits, '-', '_' and '.'");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

fn folder(machine: &Machine) -> PathBuf {
    machine.folder().join(FOLDER)
}

/// The folder of a snapshot.
pub(crate) fn folder_of(machine: &Machine, name: &str) -> PathBuf {
    folder(machine).join(name)
}

/// A snapshot of a machine.
pub fn get(machine: &Machine, name: &str) -> Result<Record> {
    check_name(name)?;
    let path = folder(machine).join(name).join(RECORD);
    let Some(text) = durable::read(&path)? else {
        let text = format!("machine '{}' has no snapshot '{name}'", machine.name());
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    let origin = path.display().to_string();
    let record: Record =
        toml::from_str(&text).map_err(|e| Error::new(ErrorKind::Corrupt, format!("'{origin}': {e}")))?;
    let disks = record.disks.iter().map(|snapshot| &snapshot.disk);
    record.machine.check_record(&origin, (record.version, VERSION), disks)?;
    Ok(record)
}

/// All snapshots of a machine, the oldest first.
pub fn list(machine: &Machine) -> Result<Vec<Record>> {
    let mut all = Vec::new();
    for name in names(machine)? {
        if check_name(&name).is_ok() {
            all.push(get(machine, &name)?);
        }
    }
    all.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
    Ok(all)
}

/// The names in the folder of snapshots; empty if the folder does not exist.
fn names(machine: &Machine) -> Result<Vec<String>> {
    match durable::names(&folder(machine)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        names => names,
    }
}

/// The creation time of a disk's snapshot; `None` if the snapshot does not exist.
fn exists(disks: &dyn Disks, snapshot: &Snapshot) -> Result<Option<u64>> {
    match disks.snapshots(&snapshot.disk) {
        Ok(all) => Ok(all.into_iter().find(|one| one.name == snapshot.name).map(|one| one.created)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes a snapshot.
pub fn take(host: &Host, change: &Change, name: &str, options: Options) -> Result<Taken> {
    check_name(name)?;
    let machine = change.machine();
    let definition = machine.definition()?;
    let state = machine.state()?;
    if options.memory && !matches!(state, MachineState::Running | MachineState::Paused) {
        let text = format!("machine '{}' does not run: it has no memory to save", machine.name());
        return Err(Error::new(ErrorKind::WrongState, text));
    }
    if options.memory {
        definition.check_savable()?;
    }
    let (folder, disks) = (folder(machine), host.disks());
    if folder.join(name).exists() {
        let text = format!("machine '{}' has a snapshot '{name}' already", machine.name());
        return Err(Error::new(ErrorKind::Exists, text));
    }
    let of: Vec<Snapshot> =
        definition.disks.iter().map(|disk| Snapshot { disk: disk.name.clone(), name: name.to_owned() }).collect();
    for snapshot in &of {
        if exists(disks, snapshot)?.is_some() {
            let text = format!("disk '{}' of machine '{}' has a snapshot '{name}'", snapshot.disk, machine.name());
            return Err(Error::new(ErrorKind::Exists, text));
        }
    }
    let new = folder.join(format!("{NEW}{name}"));
    private::create_folders(&new).during(|| format!("making '{}'", new.display()))?;
    let intent = Intent { begun: clock::seconds(), disks: of.clone() };
    let taken = durable::write_toml(&new.join(INTENT), &intent)
        .and_then(|()| durable::sync(&folder))
        .and_then(|()| durable::sync(machine.folder()))
        .and_then(|()| take_in(host, change, name, options, definition, of, state, &new));
    let taken = match taken {
        Ok(taken) => taken,
        Err(error) => {
            let undone = match is_refused(&error) {
                true => remove_folder(&new),
                false => undo(disks, &new),
            };
            if let Err(second) = undone {
                tracing::warn!(
                    "removing the unfinished snapshot '{name}' failed and is repeated by the next command: {second}"
                );
            }
            return Err(error);
        }
    };
    let whole = folder.join(name);
    fs::rename(&new, &whole).during(|| format!("making '{}'", whole.display()))?;
    durable::sync(&folder)?;
    // Until the folder has its final name, the intent is needed to undo the snapshot.
    remove_if_there(&whole.join(INTENT))?;
    Ok(taken)
}

/// For a machine that is being created: records a snapshot whose disk snapshots exist already.
pub(crate) fn take_over(machine: &Machine, record: &Record) -> Result<()> {
    check_name(&record.name)?;
    let folder = folder(machine).join(&record.name);
    private::create_folders(&folder).during(|| format!("making '{}'", folder.display()))?;
    durable::write_toml(&folder.join(RECORD), record)?;
    durable::sync_folder_of(&folder).during(|| format!("making '{}'", folder.display()))
}

#[allow(clippy::too_many_arguments, reason = "a step of `take`, which has these values")]
fn take_in(
    host: &Host,
    change: &Change,
    name: &str,
    options: Options,
    definition: Definition,
    of: Vec<Snapshot>,
    state: MachineState,
    new: &Path,
) -> Result<Taken> {
    let pairs: Vec<(String, String)> = of.iter().map(|one| (one.disk.clone(), one.name.clone())).collect();
    let (quiet, stun) = match options.memory {
        true => (None, Some(with_memory(host, change, &pairs, state, new)?)),
        false => (Some(quiet::snapshot(change, host.disks(), &pairs, options.quiesce)?), None),
    };
    nvram::carry(change.machine().folder(), new)?;
    let record = Record {
        version: VERSION,
        name: name.to_owned(),
        created: clock::seconds(),
        passt: quiet.is_none() && change.machine().uses_passt(),
        consistency: quiet.as_ref().map_or("memory", Quiet::word).to_owned(),
        disks: of,
        machine: definition,
    };
    durable::write_toml(&new.join(RECORD), &record)?;
    Ok(Taken { record, quiet, stun })
}

/// Takes disk snapshots, device state and memory; returns how long the guest was paused.
fn with_memory(
    host: &Host,
    change: &Change,
    of: &[(String, String)],
    state: MachineState,
    new: &Path,
) -> Result<Duration> {
    let machine = change.machine();
    let features = host.features()?;
    if state == MachineState::Running {
        let holding = change.hold(Hold { resume: true, thaw: false })?;
        let (taken, stun) = running::take(change, host.images(), host.disks(), features, of, &holding)?;
        keep(&taken.image.record.memory, &new.join("memory"))?;
        keep(&taken.image.state(), &new.join("state"))?;
        return Ok(stun);
    }
    // The guest is already paused and stays paused.
    let process = machine.running()?;
    let mut monitor = machine.monitor()?;
    state::prepare(&mut monitor, features)?;
    let image = host.images().begin(machine.definition()?, None, machine.uses_passt())?;
    let saved = Memories::prepare(machine.memory()?, host.images(), &image, process.pid()).and_then(|memories| {
        host.disks().snapshot(of)?;
        memories.save(&mut monitor, features, &image.state())?;
        keep(&image.record.memory, &new.join("memory"))?;
        keep(&image.state(), &new.join("state"))
    });
    host.images().abandon(&image, host.disks());
    saved.map(|()| Duration::ZERO)
}

/// Makes a durable copy of a memory file.
fn keep(from: &Path, to: &Path) -> Result<()> {
    let copy = pages::copy_file(from, to)?;
    copy.sync_all().during(|| format!("writing '{}'", to.display()))
}

/// Whether the datastore has refused the snapshots of the disks, because a user has taken one with the same name since
/// the names were checked. Then none of them was taken. Errors of this process's files have a source.
fn is_refused(error: &Error) -> bool {
    error.kind() == ErrorKind::Exists && std::error::Error::source(error).is_none()
}

fn remove_folder(folder: &Path) -> Result<()> {
    fs::remove_dir_all(folder).during(|| format!("removing '{}'", folder.display()))
}

/// Removes a snapshot that could not be completed.
fn undo(disks: &dyn Disks, new: &Path) -> Result<()> {
    let intent: Option<Intent> = durable::read(&new.join(INTENT))?.and_then(|text| toml::from_str(&text).ok());
    for snapshot in intent.iter().flat_map(|intent| &intent.disks) {
        let begun = intent.as_ref().map_or(0, |intent| intent.begun);
        if exists(disks, snapshot)?.is_some_and(|created| created + 1 >= begun) {
            ignore_missing(disks.delete_snapshot(&snapshot.disk, &snapshot.name))?;
        }
    }
    remove_folder(new)
}

fn ignore_missing(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Deletes a snapshot.
///
/// # Errors
/// `Busy`, without effect, while clones are based on the snapshot, or a client has the snapshot of the machine's first
/// disk open. If a client has the snapshot of another disk open, a later command completes the deletion.
pub fn delete(host: &Host, change: &Change, name: &str) -> Result<()> {
    let machine = change.machine();
    let record = get(machine, name)?;
    for snapshot in &record.disks {
        let all = match host.disks().snapshots(&snapshot.disk) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            all => all?,
        };
        let clones = all.into_iter().filter(|one| one.name == snapshot.name).flat_map(|one| one.clones);
        let clones: Vec<String> = clones.collect();
        if !clones.is_empty() {
            let text = format!(
                "clones use snapshot '{name}' of machine '{}': {}; delete them first, or make them independent \
                 with 'lamina disk detach'",
                machine.name(),
                clones.join(", ")
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
    }
    let (folder, old) = (folder(machine), folder(machine).join(format!("{OLD}{name}")));
    let moved = |from: &Path, to: &Path| {
        fs::rename(from, to).and_then(|()| durable::sync_folder_of(to)).during(|| format!("deleting snapshot '{name}'"))
    };
    let listed = folder.join(name);
    moved(&listed, &old)?;
    let deleted = finish_deleting(host.disks(), &old, u64::MAX);
    if let Err(error) = &deleted
        && error.kind() == ErrorKind::Busy
        && all_exist(host.disks(), &record)?
    {
        // A client has a snapshot of a disk open, or a clone was made meanwhile. If the snapshot stayed incomplete,
        // every command would try to delete the rest.
        moved(&old, &listed)?;
    }
    deleted
}

/// Whether the snapshots of all disks exist of which a machine's snapshot consists.
pub fn is_whole(host: &Host, machine: &Machine, name: &str) -> Result<bool> {
    all_exist(host.disks(), &get(machine, name)?)
}

/// Whether the snapshots of all disks exist.
fn all_exist(disks: &dyn Disks, record: &Record) -> Result<bool> {
    for snapshot in &record.disks {
        if exists(disks, snapshot)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Deletes the snapshots of disks that are not younger than `latest`, and then the folder.
fn finish_deleting(disks: &dyn Disks, old: &Path, latest: u64) -> Result<()> {
    if let Ok(Some(text)) = durable::read(&old.join(RECORD))
        && let Ok(record) = toml::from_str::<Record>(&text)
    {
        for snapshot in record.disks {
            if exists(disks, &snapshot)?.is_some_and(|created| created <= latest) {
                ignore_missing(disks.delete_snapshot(&snapshot.disk, &snapshot.name))?;
            }
        }
    }
    remove_folder(old)
}

/// The state of a machine after a revert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reverted {
    /// Whether the machine runs.
    pub state: MachineState,
    /// For a guest that runs: whether its clock was set to the host's clock, or why not.
    pub clock: Option<std::result::Result<(), String>>,
}

/// Reverts a machine to a snapshot; its current state is lost. If the snapshot has memory, the guest continues from
/// that memory, unless `paused`, and its clock is set; otherwise the machine is stopped afterwards.
pub fn revert(host: &Host, change: &Change, name: &str, paused: bool) -> Result<Reverted> {
    let machine = change.machine();
    let record = get(machine, name)?;
    let claim = host.machines().claim_disks()?;
    check_revert(host, machine, &record)?;
    durable::write(&machine.folder().join(REVERTING), name.as_bytes())?;
    // From here on, the disks belong to the machine.
    drop(claim);
    revert_disks(host, change, &record)?;
    if !record.has_memory() {
        return Ok(Reverted { state: MachineState::Stopped, clock: None });
    }
    let features = host.features()?;
    let from = folder(machine).join(name);
    let file = host.images().new_memory()?;
    // If this process is killed from here on, the next command ends the new process or resumes its guest.
    let holding = change.hold(Hold { resume: !paused, thaw: false })?;
    let begun = pages::copy_file(&from.join("memory"), &file).and_then(|_| {
        let mut successor = change.set_up(Start {
            features,
            nbd: &host.disks().server()?,
            memory: Memory::Shared(file.clone()),
            record: MemoryRecord::Own(file.clone()),
            incoming: true,
            passt: record.passt,
        })?;
        let loaded = state::prepare(&mut successor.monitor, features)
            .and_then(|()| state::load(&mut successor.monitor, features, &from.join("state")))
            .and_then(|()| change.link(&successor.run));
        match loaded {
            Ok(()) => Ok(successor),
            Err(error) => {
                successor.process.kill()?;
                Err(error)
            }
        }
    });
    match begun {
        Ok(_) if paused => Ok(Reverted { state: MachineState::Paused, clock: None }),
        Ok(mut successor) => {
            holding.resume(&mut successor.monitor)?;
            Ok(Reverted { state: MachineState::Running, clock: Some(lifecycle::set_clock(machine)) })
        }
        Err(error) => {
            remove_if_there(&file)?;
            Err(error.context(format!("the disks of machine '{}' were reverted, and it is off", machine.name())))
        }
    }
}

/// Refuses a revert that cannot be completed, or that would change a disk of another machine, before it has any effect.
/// Both are possible because users also delete snapshots of single disks, and move disks from one machine to another.
fn check_revert(host: &Host, machine: &Machine, record: &Record) -> Result<()> {
    let (own, users) = (machine.name(), host.machines().users_of_disks()?);
    let refused = |kind, why: String| {
        let text = format!("machine '{own}' was not reverted to '{}': {why}", record.name);
        Err(Error::new(kind, text))
    };
    for Snapshot { disk, name } in &record.disks {
        if let Some(user) = users.get(disk).filter(|user| **user != own) {
            let remedy = format!("remove it from there with 'lamina vm edit {user} --remove-disk {disk}'");
            return refused(ErrorKind::Busy, format!("its disk '{disk}' belongs to machine '{user}' now: {remedy}"));
        }
        match exists(host.disks(), &Snapshot { disk: disk.clone(), name: name.clone() })? {
            None => return refused(ErrorKind::NotFound, format!("disk '{disk}' has no snapshot '{name}' any more")),
            // The memory of one state with the disk of another state would destroy file systems. The record was written
            // after the snapshots of the disks were taken. Times are rounded to seconds.
            Some(created) if record.has_memory() && created > record.created + 1 => {
                let why = format!(
                    "the snapshot '{name}' of disk '{disk}' was taken after the memory was saved, so it is not the one \
                     that belongs to the memory; 'lamina snapshot revert' reverts the disk alone"
                );
                return refused(ErrorKind::WrongState, why);
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// The disks that an incomplete revert of the machine will revert and give back to the machine.
pub(crate) fn disks_of_revert(machine: &Machine) -> Vec<String> {
    // A server of root reads these files in a datastore of another user, who could have put pipes or links there.
    let read = |path: &Path, most: u64| {
        let bytes = regular::read_own(path, most, "record of a revert").ok()?;
        String::from_utf8(bytes).ok()
    };
    let record = || {
        let text = read(&machine.folder().join(REVERTING), 2 * NAME_MAX as u64)?;
        let name = text.trim();
        check_name(name).ok()?;
        toml::from_str::<Record>(&read(&folder_of(machine, name).join(RECORD), RECORD_MAX)?).ok()
    };
    record().map_or_else(Vec::new, |record| record.disks.into_iter().map(|one| one.disk).collect())
}

/// The steps of a revert that are repeated after an interruption.
fn revert_disks(host: &Host, change: &Change, record: &Record) -> Result<()> {
    let machine = change.machine();
    if let Some(process) = machine.process()? {
        process.end()?;
    }
    freeze::forget(machine)?;
    change.sweep()?;
    for snapshot in &record.disks {
        // The process that had the disk open was just ended, and its connection may not be closed yet.
        while_busy(DISK_OF_ENDED_PROCESS, || host.disks().revert(&snapshot.disk, &snapshot.name))?;
    }
    nvram::restore(&folder(machine).join(&record.name), machine.folder())?;
    // The machine may have been renamed since the snapshot was taken.
    change.define(&Definition { name: machine.name(), ..record.machine.clone() })?;
    remove_if_there(&machine.folder().join(REVERTING))?;
    durable::sync(machine.folder())
}

/// Returns `WrongState` while a revert of the machine is incomplete.
pub(crate) fn refuse_half_reverted(machine: &Machine) -> Result<()> {
    let Some(name) = durable::read(&machine.folder().join(REVERTING))? else { return Ok(()) };
    let (machine, name) = (machine.name(), name.trim().escape_debug().to_string());
    let text = format!(
        "machine '{machine}' was reverted to '{name}' only in part: 'lamina vm revert {machine}@{name}' completes the \
         revert, or says why it fails; 'lamina vm snapshot delete {machine}@{name}' gives the revert up"
    );
    Err(Error::new(ErrorKind::WrongState, text))
}

/// Whether a killed command left a snapshot or a revert incomplete.
pub fn is_unfinished(machine: &Machine) -> bool {
    let half = |name: &String| name.starts_with(NEW) || name.starts_with(OLD);
    machine.folder().join(REVERTING).exists() || names(machine).is_ok_and(|names| names.iter().any(half))
}

/// Completes or removes the snapshot or the revert that a killed command left incomplete.
pub fn recover(change: &Change, host: &Host) -> Result<()> {
    let machine = change.machine();
    if !is_unfinished(machine) {
        return Ok(());
    }
    host.disks().settle()?;
    for name in names(machine)? {
        let path = folder(machine).join(&name);
        if name.starts_with(NEW) {
            undo(host.disks(), &path)?;
        } else if name.starts_with(OLD) {
            // The folder got its name when the deletion began. A user may have taken a snapshot of a disk since.
            let renamed = fs::symlink_metadata(&path).during(|| format!("looking at '{}'", path.display()))?.ctime();
            finish_deleting(host.disks(), &path, u64::try_from(renamed).unwrap_or(u64::MAX))?;
        }
    }
    let path = machine.folder().join(REVERTING);
    let Some(name) = durable::read(&path)? else { return Ok(()) };
    match get(machine, name.trim()) {
        Ok(record) => revert_disks(host, change, &record),
        Err(error) if error.kind() == ErrorKind::NotFound => remove_if_there(&path),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
pub(crate) mod tests;
