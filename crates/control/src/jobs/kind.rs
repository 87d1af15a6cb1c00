//! Which requests are jobs, and how jobs are named.

use crate::message::{
    BackupRequest, DiskRequest, ImageRequest, JobRequest, MachineVerb, Request, ScrubRequest, SnapshotRequest,
};
use disk::convert::Address;

/// Most names in the object of a job.
const NAMES_MAX: usize = 3;
/// Most bytes of the object of a job. A request may have a name of any length, and ended jobs stay in memory.
const OBJECT_MAX: usize = 1024;

/// The operation of a job, and the object of that operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The command, as on the command line.
    pub verb: &'static str,
    /// The name of a disk, a snapshot or a machine, or a path; empty for the datastore itself. For a deduplication by
    /// the settings of several disks `label:KEY=VALUE` or `datastore`.
    pub object: String,
}

/// The kind of a request that is a job: a long operation that changes something or reads a whole disk or datastore.
/// Queries are not jobs, nor are requests that only wait.
pub fn of(request: &Request) -> Option<Kind> {
    if !request.takes_long() {
        return None;
    }
    let (verb, object) = match request {
        Request::Status
        | Request::StatusSpace
        | Request::Scrub(ScrubRequest::Status | ScrubRequest::Cancel | ScrubRequest::Schedule { .. })
        | Request::ExportList
        | Request::Label(_)
        | Request::Settle
        | Request::Receive(_)
        | Request::Events
        | Request::Job(
            JobRequest::Start(_)
            | JobRequest::List
            | JobRequest::Show { .. }
            | JobRequest::Wait { .. }
            | JobRequest::Cancel { .. },
        ) => return None,
        Request::Check { .. } => ("check", String::new()),
        Request::Scrub(ScrubRequest::Start { .. }) => ("scrub", String::new()),
        Request::Disk(request) => disk(request)?,
        Request::Snapshot(request) => snapshot(request)?,
        Request::Clone { disk, .. } => ("clone", disk.clone()),
        Request::Convert(conversion) => ("convert", address(&conversion.to)),
        Request::ExportArchive(export) => ("export archive", export.path.display().to_string()),
        Request::Salvage(request) => ("salvage", request.datastore.to_string()),
        Request::Image(ImageRequest::Show { .. }) => return None,
        Request::Image(ImageRequest::Check { path, .. }) => ("image check", path.display().to_string()),
        Request::Image(ImageRequest::Create { new, .. }) => ("image create", new.path.display().to_string()),
        Request::Send(request) => ("disk send", names(request.disks.iter().map(|disk| disk.disk.as_str()))),
        Request::Backup(request) => backup(request)?,
        Request::Machine(request) => machine(&request.verb)?,
    };
    Some(Kind { verb, object: cut(object, OBJECT_MAX) })
}

/// The text, without what exceeds `most` bytes.
pub(super) fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
        text.truncate(end);
        text.shrink_to_fit();
        text.push_str(" ...");
    }
    text
}

fn names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = names.collect();
    let more = names.len().saturating_sub(NAMES_MAX);
    names.truncate(NAMES_MAX);
    match more {
        0 => names.join(" "),
        more => format!("{} and {more} more", names.join(" ")),
    }
}

fn address(address: &Address) -> String {
    match address {
        Address::Disk(name) => name.clone(),
        Address::Path(path) => path.display().to_string(),
    }
}

fn disk(request: &DiskRequest) -> Option<(&'static str, String)> {
    let (verb, name) = match request {
        DiskRequest::List
        | DiskRequest::Labelled { .. }
        | DiskRequest::Show { .. }
        | DiskRequest::WouldFree { .. }
        | DiskRequest::Defaults { .. }
        | DiskRequest::Space { .. } => {
            return None;
        }
        DiskRequest::Create { name, .. } => ("disk create", name),
        DiskRequest::Resize { name, .. } => ("disk resize", name),
        DiskRequest::Rename { name, .. } => ("disk rename", name),
        DiskRequest::Delete { name, .. } => ("disk delete", name),
        DiskRequest::Detach { name } => ("disk detach", name),
        DiskRequest::Stats { name } => ("disk stats", name),
        DiskRequest::Tune { name, .. } => ("disk tune", name),
        DiskRequest::Edit { name, .. } => ("disk edit", name),
        DiskRequest::Reopen { name } => ("disk reopen", name),
        DiskRequest::Inflate { name } => ("disk inflate", name),
        DiskRequest::PunchZero { name } => ("disk punchzero", name),
        DiskRequest::Wipe { name } => ("disk wipe", name),
        DiskRequest::Shrink { name } => ("disk shrink", name),
        DiskRequest::Reclaim { name, .. } => ("disk reclaim", name),
        DiskRequest::Reclaimable => return Some(("disk reclaim", String::new())),
        DiskRequest::Optimize { name, .. } => ("disk optimize", name),
        DiskRequest::Consolidate { name, .. } => ("disk consolidate", name),
        DiskRequest::Migrate { name, .. } => ("disk migrate", name),
        DiskRequest::Import { name, .. } => ("disk import", name),
    };
    Some((verb, name.clone()))
}

fn backup(request: &BackupRequest) -> Option<(&'static str, String)> {
    let several = |all: &[String]| names(all.iter().map(String::as_str));
    Some(match request {
        BackupRequest::List { .. } | BackupRequest::Key { .. } | BackupRequest::PrepareMachine { .. } => return None,
        BackupRequest::CreateMachine(create) => ("vm backup create", create.point.machine.clone()),
        BackupRequest::Create(create) => ("backup create", create.disk.clone()),
        BackupRequest::Restore(restore) => ("backup restore", restore.name.clone()),
        BackupRequest::Verify { backups, .. } => ("backup verify", several(backups)),
        BackupRequest::Delete { backups, .. } => ("backup delete", several(backups)),
        BackupRequest::Prune { .. } => ("backup prune", String::new()),
    })
}

fn snapshot(request: &SnapshotRequest) -> Option<(&'static str, String)> {
    let (verb, disk, name) = match request {
        SnapshotRequest::Create { .. }
        | SnapshotRequest::List { .. }
        | SnapshotRequest::Show { .. }
        | SnapshotRequest::Diff { .. } => return None,
        SnapshotRequest::Delete { disk, name, .. } => ("snapshot delete", disk, name),
        SnapshotRequest::Revert { disk, name, .. } => ("snapshot revert", disk, name),
    };
    Some((verb, format!("{disk}@{name}")))
}

fn machine(verb: &MachineVerb) -> Option<(&'static str, String)> {
    let several = |all: &[String]| names(all.iter().map(String::as_str));
    Some(match verb {
        MachineVerb::Show { .. }
        | MachineVerb::List
        | MachineVerb::SnapshotList { .. }
        | MachineVerb::Console { .. }
        | MachineVerb::Screenshot { .. }
        | MachineVerb::SendKey { .. }
        | MachineVerb::Type { .. } => return None,
        MachineVerb::Create(new) => ("vm create", new.name.clone()),
        MachineVerb::Import(import) => ("vm import", import.source.display().to_string()),
        MachineVerb::Edit { name, .. } => ("vm edit", name.clone()),
        MachineVerb::Rename { name, .. } => ("vm rename", name.clone()),
        MachineVerb::Export { source, .. } => ("vm export", source.machine.clone()),
        MachineVerb::BackUp(backup) => ("vm backup create", backup.source.machine.clone()),
        MachineVerb::Restore(restore) => ("vm backup restore", restore.name.clone()),
        MachineVerb::Start { names, .. } => ("vm start", several(names)),
        MachineVerb::Stop { names, .. } => ("vm stop", several(names)),
        MachineVerb::Pause { names } => ("vm pause", several(names)),
        MachineVerb::Resume { names } => ("vm resume", several(names)),
        MachineVerb::Delete { names, .. } => ("vm delete", several(names)),
        MachineVerb::SnapshotCreate { snapshot, .. } => {
            ("vm snapshot create", format!("{}@{}", snapshot.machine, snapshot.name))
        }
        MachineVerb::SnapshotDelete { snapshot } => {
            ("vm snapshot delete", format!("{}@{}", snapshot.machine, snapshot.name))
        }
        MachineVerb::Revert { snapshot, .. } => ("vm revert", format!("{}@{}", snapshot.machine, snapshot.name)),
        MachineVerb::Clone { source, .. } | MachineVerb::Send { source, .. } => ("vm clone", source.machine.clone()),
        MachineVerb::Freeze { name } => ("vm freeze", name.clone()),
        MachineVerb::Execute { name, .. } => ("vm exec", name.clone()),
    })
}
