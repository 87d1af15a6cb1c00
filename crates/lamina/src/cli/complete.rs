//! Completion of names on the command line: disks and their labels, snapshots, machines and their snapshots, networks
//! and their cards, jobs, and backups.
//!
//! 1. A completion never opens a datastore, because opening writes to the datastore: the names of disks, labels,
//!    snapshots and jobs are queried from its server only. The names of machines are the names of their folders, and
//!    the addresses of cards are read from their definitions. A repository of backups is only read.
//! 2. A completion fails silently, because its output is read by a shell.

use super::address::absolute;
use super::definition;
use clap::Arg;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use control::socket::{self, Client};
use control::{BackupPlace, BackupRequest, DiskRequest, JobRequest, Reply, Request, SnapshotRequest, Target, dispatch};
use disk::{DiskInfo, Location, NoProgress};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use vm::machine::Machine;

/// Where the kernel lists the network devices of this host.
const NETWORK_DEVICES: &str = "/sys/class/net";
/// The flag of a tap device in its file `tun_flags` (`include/uapi/linux/if_tun.h` of Linux).
const IFF_TAP: u32 = 2;

/// What the value of an argument names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    /// A disk.
    Disk,
    /// A disk, followed by the name of a new snapshot.
    NewSnapshot,
    /// A snapshot of a disk.
    Snapshot,
    /// A disk or a snapshot.
    State,
    /// A machine.
    Machine,
    /// A machine, followed by the name of a new snapshot.
    NewMachineSnapshot,
    /// A snapshot of a machine.
    MachineSnapshot,
    /// A machine or a snapshot of it.
    MachineState,
    /// A job.
    Job,
    /// A label of disks, `KEY=VALUE`.
    Label,
    /// The key of a label of disks.
    LabelKey,
    /// A label of disks or its key.
    LabelOrKey,
    /// A network for a card.
    Network,
    /// A network for a card, or no card.
    NetworkOrNone,
    /// The address of a card of the machine that the command line names.
    CardAddress,
    /// A backup in the repository that the command line names.
    Backup,
}

impl Named {
    /// Whether several of these can be listed in one argument, separated by commas.
    fn can_be_listed(self) -> bool {
        let whole = [Self::Label, Self::LabelKey, Self::LabelOrKey, Self::Network, Self::NetworkOrNone];
        !whole.contains(&self)
    }
}

/// What an argument of the command `verbs` names.
fn named(verbs: &[&str], argument: &Arg) -> Option<Named> {
    let value = argument.get_value_names().and_then(|names| names.first()).map(|name| name.as_str());
    match (verbs, argument.get_id().as_str(), value) {
        (["disk", "create" | "edit"], "labels", _) | (["label", "limit"], "label", _) => Some(Named::Label),
        (["disk", "edit"], "remove_labels", _) => Some(Named::LabelKey),
        (["disk", "list"], "label", _) => Some(Named::LabelOrKey),
        (["vm", "edit"], _, Some("NETWORK")) => Some(Named::Network),
        (["vm", "create" | "import"], _, Some("NETWORK")) => Some(Named::NetworkOrNone),
        (["vm", "edit"], "remove_networks", _) => Some(Named::CardAddress),
        (["backup", ..], _, Some("BACKUP")) => Some(Named::Backup),
        (["disk", "create" | "import"], ..) => None,
        (["disk", ..], "name" | "names", _) | (["snapshot", "list"], "disk", _) | (["vm", ..], _, Some("DISK")) => {
            Some(Named::Disk)
        }
        (["snapshot", "create"], _, Some("DISK@SNAPSHOT")) => Some(Named::NewSnapshot),
        (_, _, Some("DISK@SNAPSHOT")) => Some(Named::Snapshot),
        (["vm", "create" | "import"], ..) | (["vm", "rename"], "to", _) => None,
        (["vm", "clone" | "export"] | ["vm", "backup", "create"], "source", _) => Some(Named::MachineState),
        (["vm", "backup", ..], _, Some("BACKUP")) => Some(Named::Backup),
        (["vm", "backup", ..], ..) => None,
        (["vm", "clone"], ..) => None,
        (["vm", ..], _, Some("VM")) => Some(Named::Machine),
        (["vm", "snapshot", "create"], _, Some("VM@SNAPSHOT")) => Some(Named::NewMachineSnapshot),
        (["vm", ..], _, Some("VM@SNAPSHOT")) => Some(Named::MachineSnapshot),
        (["clone" | "send" | "disk" | "snapshot", ..], "source" | "to", Some("SOURCE" | "STATE")) => Some(Named::State),
        (["backup", "create"], "source", _) => Some(Named::State),
        (["job", ..], _, Some("JOB")) => Some(Named::Job),
        _ => None,
    }
}

/// The definition of the command line, extended by the completion of names.
pub fn definition_with_names() -> clap::Command {
    with_names(definition(), &mut Vec::new())
}

fn with_names(command: clap::Command, verbs: &mut Vec<String>) -> clap::Command {
    let path: Vec<&str> = verbs.iter().map(String::as_str).collect();
    let mut command = command.mut_args(|argument| match named(&path, &argument) {
        Some(named) => argument.add(ArgValueCompleter::new(move |begun: &OsStr| candidates(named, begun))),
        None => argument,
    });
    let names: Vec<String> = command.get_subcommands().map(|one| one.get_name().to_owned()).collect();
    for name in names {
        verbs.push(name.clone());
        command = command.mut_subcommand(name, |one| with_names(one, verbs));
        verbs.pop();
    }
    command
}

fn candidates(named: Named, begun: &OsStr) -> Vec<CompletionCandidate> {
    let Some(begun) = begun.to_str() else { return Vec::new() };
    // Only the last of several names that are separated by commas is completed.
    let last = begun.rsplit_once(',').filter(|_| named.can_be_listed());
    let (before, begun) = last.map_or(("", begun), |(before, _)| begun.split_at(before.len() + 1));
    let words: Vec<OsString> = std::env::args_os().collect();
    let names = names(named, &words).unwrap_or_default();
    let names = names.into_iter().filter(|name| name.starts_with(begun));
    names.map(|name| CompletionCandidate::new(format!("{before}{name}"))).collect()
}

/// The datastore that the command line names, or, if it names none, the environment.
fn location(arguments: impl IntoIterator<Item = OsString>) -> Option<Location> {
    let mut given = std::env::var_os("LAMINA_DATASTORE");
    let mut arguments = arguments.into_iter();
    while let Some(word) = arguments.next() {
        if word == "--datastore" || word == "-D" {
            given = arguments.next();
        } else if let Some(path) = word.to_str().and_then(|word| word.strip_prefix("--datastore=")) {
            given = Some(path.into());
        }
    }
    Location::parse(given.filter(|path| !path.is_empty())?).ok()
}

/// The names of all that an argument of the command line `words` can name.
fn names(named: Named, words: &[OsString]) -> Option<Vec<String>> {
    // These need no datastore.
    match named {
        Named::Network => return Some(networks(Path::new(NETWORK_DEVICES))),
        Named::NetworkOrNone => {
            let none = "none".to_owned();
            return Some([vec![none], networks(Path::new(NETWORK_DEVICES))].concat());
        }
        Named::Backup => return backups(words),
        _ => {}
    }
    names_in(named, &location(words.iter().cloned())?, words)
}

fn names_in(named: Named, location: &Location, words: &[OsString]) -> Option<Vec<String>> {
    let with_at = |names: Vec<String>| names.into_iter().map(|name| format!("{name}@")).collect();
    Some(match named {
        Named::Disk => disks(location)?,
        Named::NewSnapshot => with_at(disks(location)?),
        Named::Snapshot => snapshots(location)?,
        Named::State => [disks(location)?, snapshots(location)?].concat(),
        Named::Machine => machines(location)?,
        Named::NewMachineSnapshot => with_at(machines(location)?),
        Named::MachineSnapshot => machine_snapshots(location)?,
        Named::MachineState => [machines(location)?, machine_snapshots(location)?].concat(),
        Named::Job => jobs(location)?,
        Named::Label => labels(location)?,
        Named::LabelKey => label_keys(location)?,
        Named::LabelOrKey => [label_keys(location)?, labels(location)?].concat(),
        Named::CardAddress => card_addresses(location, words)?,
        Named::Network | Named::NetworkOrNone | Named::Backup => return None,
    })
}

fn ask(location: &Location, request: Request) -> Option<Reply> {
    let stream = socket::connect(location).ok()??;
    Client::new(stream).ok()?.ask(request, &NoProgress).ok()
}

fn all_disks(location: &Location) -> Option<Vec<DiskInfo>> {
    match ask(location, Request::Disk(DiskRequest::List))? {
        Reply::Disks(disks) => Some(disks),
        _ => None,
    }
}

fn disks(location: &Location) -> Option<Vec<String>> {
    Some(all_disks(location)?.into_iter().map(|disk| disk.name).collect())
}

/// The labels that disks have. The request for labels with their limits would count the blocks of disks.
fn labels(location: &Location) -> Option<Vec<String>> {
    let labels = all_disks(location)?.into_iter().flat_map(|disk| disk.settings.labels);
    let labels: BTreeSet<String> = labels.map(|(key, value)| format!("{key}={value}")).collect();
    Some(labels.into_iter().collect())
}

fn label_keys(location: &Location) -> Option<Vec<String>> {
    let keys = all_disks(location)?.into_iter().flat_map(|disk| disk.settings.labels.into_keys());
    Some(keys.collect::<BTreeSet<String>>().into_iter().collect())
}

fn snapshots(location: &Location) -> Option<Vec<String>> {
    match ask(location, Request::Snapshot(SnapshotRequest::List { disk: None }))? {
        Reply::Snapshots(all) => Some(all.into_iter().map(|one| format!("{}@{}", one.disk, one.name)).collect()),
        _ => None,
    }
}

fn jobs(location: &Location) -> Option<Vec<String>> {
    match ask(location, Request::Job(JobRequest::List))? {
        Reply::Jobs(jobs) => Some(jobs.into_iter().map(|job| job.id).collect()),
        _ => None,
    }
}

/// The identities and the other names of the backups in the repository that a command about backups names.
fn backups(words: &[OsString]) -> Option<Vec<String>> {
    let of_command = words.iter().skip_while(|word| *word != "backup").skip(2);
    let (mut ids, mut others) = (Vec::new(), BTreeSet::new());
    for backup in of_command.filter(|word| !word.is_empty()).find_map(|word| backups_in(Path::new(word)))? {
        ids.push(backup.id);
        if backup.finished.is_some() {
            let prefix = if backup.machine.is_some() { "machine:" } else { "" };
            others.insert(format!("{prefix}{}@{}", backup.disk, backup.snapshot));
            others.insert(format!("{prefix}{}", backup.disk));
        }
    }
    ids.extend(others);
    Some(ids)
}

fn backups_in(repository: &Path) -> Option<Vec<backup::BackupInfo>> {
    let place = BackupPlace::Folder(absolute(repository).ok()?);
    match dispatch(&Target::Files, Request::Backup(BackupRequest::List { place }), &NoProgress).ok()? {
        Reply::Backups(backups) => Some(backups),
        _ => None,
    }
}

/// The networks that a card can have, with the bridges and tap devices of this host.
fn networks(devices: &Path) -> Vec<String> {
    let mut named = Vec::new();
    for device in fs::read_dir(devices).into_iter().flatten().flatten() {
        let path = device.path();
        let kind = match (path.join("bridge").exists(), is_tap(&path)) {
            (true, _) => "bridge",
            (_, true) => "tap",
            _ => continue,
        };
        named.extend(device.file_name().into_string().ok().map(|name| format!("{kind}={name}")));
    }
    named.sort();
    named.extend(["unplugged", "user", "user,forward="].map(str::to_owned));
    named
}

/// Whether a network device is a tap device. A tun device, which carries no Ethernet frames, has the same file.
fn is_tap(device: &Path) -> bool {
    let flags = fs::read_to_string(device.join("tun_flags")).unwrap_or_default();
    u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).is_ok_and(|flags| flags & IFF_TAP != 0)
}

/// The addresses of the cards of every machine whose name is a word of the command line.
fn card_addresses(location: &Location, words: &[OsString]) -> Option<Vec<String>> {
    let folder = machines_folder(location)?;
    let named = machines(location)?.into_iter().filter(|name| words.iter().any(|word| word == name.as_str()));
    let definitions = named.filter_map(|name| Machine::at(folder.join(name)).definition().ok());
    Some(definitions.flat_map(|one| one.networks).map(|network| network.mac.to_string()).collect())
}

fn machines_folder(location: &Location) -> Option<PathBuf> {
    Some(location.local_path()?.join(vm::machines::FOLDER))
}

/// The names of the folders in a folder, without hidden ones.
fn folders(folder: PathBuf) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

fn machines(location: &Location) -> Option<Vec<String>> {
    Some(folders(machines_folder(location)?))
}

fn machine_snapshots(location: &Location) -> Option<Vec<String>> {
    let folder = machines_folder(location)?;
    let of = |machine: String| {
        let snapshots = folders(folder.join(&machine).join("snapshots"));
        snapshots.into_iter().map(move |snapshot| format!("{machine}@{snapshot}"))
    };
    Some(machines(location)?.into_iter().flat_map(of).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// What the arguments of a command name.
    fn of(line: &str) -> Vec<Named> {
        let verbs: Vec<&str> = line.split(' ').collect();
        let mut command = &definition();
        for verb in &verbs {
            let Some(next) = command.find_subcommand(verb) else { panic!("{line}: no {verb}") };
            command = next;
        }
        command.get_arguments().filter_map(|argument| named(&verbs, argument)).collect()
    }

    #[test]
    fn arguments_that_name_something_that_exists_are_completed() {
        for line in ["disk show", "disk delete", "disk migrate", "disk resize", "snapshot list"] {
            assert_eq!(of(line), [Named::Disk], "{line}");
        }
        for line in ["disk import", "vm list", "status", "backup list", "backup prune", "label list"] {
            assert!(of(line).is_empty(), "{line}");
        }
        assert_eq!(of("disk create"), [Named::Label]);
        assert_eq!(of("disk list"), [Named::LabelOrKey]);
        assert_eq!(of("disk edit"), [Named::Disk, Named::Label, Named::LabelKey]);
        assert_eq!(of("label limit"), [Named::Label]);
        for (line, expected) in [
            ("vm create", vec![Named::Disk, Named::NetworkOrNone]),
            ("vm import", vec![Named::NetworkOrNone]),
            ("vm edit", vec![Named::Machine, Named::Disk, Named::Network, Named::CardAddress]),
        ] {
            let found = of(line);
            assert!(expected.iter().all(|named| found.contains(named)), "{line}: {found:?}");
        }
        for line in ["backup verify", "backup restore", "backup delete"] {
            assert_eq!(of(line), [Named::Backup], "{line}");
        }
        for line in ["vm start", "vm show", "vm exec", "vm snapshot list", "vm freeze", "vm screenshot", "vm send-key"]
        {
            assert_eq!(of(line), [Named::Machine], "{line}");
        }
        assert_eq!(of("snapshot create"), [Named::NewSnapshot]);
        assert_eq!(of("snapshot revert"), [Named::Snapshot]);
        assert_eq!(of("snapshot diff"), [Named::Snapshot, Named::State]);
        assert_eq!(of("clone"), [Named::State]);
        assert_eq!(of("vm revert"), [Named::MachineSnapshot]);
        assert_eq!(of("vm snapshot create"), [Named::NewMachineSnapshot]);
        assert_eq!(of("vm clone"), [Named::MachineState]);
        assert_eq!(of("vm export"), [Named::MachineState]);
        assert_eq!(of("vm backup create"), [Named::MachineState]);
        assert_eq!(of("vm backup restore"), [Named::Backup]);
        assert_eq!(of("backup create"), [Named::State]);
        assert_eq!((of("job wait"), of("job list")), (vec![Named::Job], Vec::new()));
    }

    #[test]
    fn networks_are_the_bridges_and_tap_devices_of_the_host() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(networks(&folder.path().join("none")), ["unplugged", "user", "user,forward="]);
        fs::create_dir_all(folder.path().join("br0/bridge")).unwrap();
        fs::create_dir_all(folder.path().join("eth0")).unwrap();
        fs::create_dir_all(folder.path().join("tap0")).unwrap();
        fs::create_dir_all(folder.path().join("tun0")).unwrap();
        fs::write(folder.path().join("tap0/tun_flags"), "0x1002\n").unwrap();
        fs::write(folder.path().join("tun0/tun_flags"), "0x1001\n").unwrap();
        let all = ["bridge=br0", "tap=tap0", "unplugged", "user", "user,forward="];
        assert_eq!(networks(folder.path()), all);
    }
}
