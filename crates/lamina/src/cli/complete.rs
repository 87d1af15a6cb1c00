//! Completion of names on the command line: disks, snapshots, machines and their snapshots, and jobs.
//!
//! 1. A completion never opens a datastore, because opening writes to the datastore: the names of disks, snapshots and
//!    jobs are queried from its server only. The names of machines are the names of their folders.
//! 2. A completion fails silently, because its output is read by a shell.

use super::definition;
use clap::Arg;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use control::socket::{self, Client};
use control::{DiskRequest, JobRequest, Reply, Request, SnapshotRequest};
use disk::{Location, NoProgress};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::PathBuf;

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
}

/// What an argument of the command `verbs` names.
fn named(verbs: &[&str], argument: &Arg) -> Option<Named> {
    let value = argument.get_value_names().and_then(|names| names.first()).map(|name| name.as_str());
    match (verbs, argument.get_id().as_str(), value) {
        (["disk", "create" | "import"], ..) => None,
        (["disk", ..], "name" | "names", _) | (["snapshot", "list"], "disk", _) | (["vm", ..], _, Some("DISK")) => {
            Some(Named::Disk)
        }
        (["snapshot", "create"], _, Some("DISK@SNAPSHOT")) => Some(Named::NewSnapshot),
        (_, _, Some("DISK@SNAPSHOT")) => Some(Named::Snapshot),
        (["vm", "create" | "import"], ..) | (["vm", "rename"], "to", _) => None,
        (["vm", "clone" | "export"], "source", _) => Some(Named::MachineState),
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
    let (before, begun) = begun.rsplit_once(',').map_or(("", begun), |(before, _)| begun.split_at(before.len() + 1));
    let Some(location) = location(std::env::args_os()) else { return Vec::new() };
    let names = names(named, &location).unwrap_or_default();
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

fn names(named: Named, location: &Location) -> Option<Vec<String>> {
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
    })
}

fn ask(location: &Location, request: Request) -> Option<Reply> {
    let stream = socket::connect(location).ok()??;
    Client::new(stream).ok()?.ask(request, &NoProgress).ok()
}

fn disks(location: &Location) -> Option<Vec<String>> {
    match ask(location, Request::Disk(DiskRequest::List))? {
        Reply::Disks(disks) => Some(disks.into_iter().map(|disk| disk.name).collect()),
        _ => None,
    }
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
        for line in ["disk show", "disk delete", "disk migrate", "disk resize", "snapshot list", "vm create"] {
            assert_eq!(of(line), [Named::Disk], "{line}");
        }
        for line in ["disk create", "disk import", "disk list", "vm list", "vm import", "status"] {
            assert_eq!(
                of(line).iter().filter(|named| **named != Named::Disk || line == "disk create").count(),
                0,
                "{line}"
            );
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
        assert_eq!(of("backup create"), [Named::State]);
        assert_eq!((of("job wait"), of("job list")), (vec![Named::Job], Vec::new()));
    }
}
