//! Reasons to refuse deleting, renaming or reverting a disk besides clients that have it open: disconnected clients
//! that may reconnect and expect the disk with its name and content unchanged, and virtual machines that use the disk.
//!
//! The datastore itself refuses these operations on a disk that connected clients have open, even with `--force`.
//! `--force` overrules the reasons in this module. A client that has closed its connection is no reason: the checks
//! first wait until the server has ended the client's session.

use super::Service;
use disk::{DiskInfo, DiskUser, Location};
use error::{Error, ErrorKind, Result};
use export::clients::limits::LEAVING_PATIENCE;
use export::clients::{Client, Clients};
use std::time::Duration;
use vm::instant::freeze;
use vm::machine::Machine;

/// Most clients that an error message names.
const CLIENTS_NAMED_MAX: usize = 5;

/// An operation on a disk that may affect its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed<'a> {
    /// Delete the disk with its snapshots.
    Delete,
    /// Rename the disk.
    Rename,
    /// Revert the disk to a snapshot.
    Revert,
    /// Delete one snapshot.
    DeleteSnapshot(&'a str),
    /// Replace the disk's content by data from another server.
    Replace,
    /// Give back what the disk's guest does not use.
    Reclaim,
}

impl Deed<'_> {
    /// Whether the operation removes or changes the export `export`, which is the disk or one of its snapshots.
    fn concerns(self, disk: &str, export: &str) -> bool {
        let snapshot = match export.strip_prefix(disk) {
            Some("") => None,
            Some(rest) if rest.starts_with('@') => rest.get(1..),
            _ => return false,
        };
        match self {
            Self::Delete | Self::Rename => true,
            Self::Revert | Self::Replace | Self::Reclaim => snapshot.is_none(),
            Self::DeleteSnapshot(name) => snapshot == Some(name),
        }
    }

    fn what(self) -> String {
        match self {
            Self::Delete => "delete the disk".into(),
            Self::Rename => "rename the disk".into(),
            Self::Revert => "revert the disk".into(),
            Self::DeleteSnapshot(name) => format!("delete the snapshot '{name}'"),
            Self::Replace => "replace the disk".into(),
            Self::Reclaim => "reclaim the disk's space".into(),
        }
    }
}

/// The machine that uses a disk. Only datastores in a local folder have machines.
pub fn machine_of(datastore: &Location, disk: &str) -> Result<Option<String>> {
    let Some(folder) = datastore.local_path() else { return Ok(None) };
    Ok(vm::machines::users_of_disks(&folder.join(vm::machines::FOLDER))?.remove(disk))
}

/// Returns `Busy` if a new disk would have a name with which a command about machines may delete a disk: the next
/// command, because an earlier one was interrupted, or a command that deletes machines now.
pub fn refuse_left(datastore: &Location, names: &[&str]) -> Result<()> {
    let Some(folder) = datastore.local_path() else { return Ok(()) };
    let left = vm::machines::disks_left(&folder.join(vm::machines::FOLDER))?;
    let Some(name) = names.iter().find(|name| left.contains(**name)) else { return Ok(()) };
    let text = format!(
        "no disk can get the name '{name}' now: a command about machines that was interrupted, or that still runs, has \
         a disk with that name to delete; run 'lamina -D {datastore} vm list', which completes what was interrupted, \
         and try again"
    );
    Err(Error::new(ErrorKind::Busy, text))
}

/// Returns `Busy` if clients or a machine are a reason to refuse the operation.
pub fn refuse(service: &Service, disk: &str, deed: Deed<'_>, force: bool) -> Result<()> {
    // Waits also with `--force`, because the datastore refuses these operations on a disk that clients have open.
    wait_left(&service.clients, disk, deed);
    if force {
        return Ok(());
    }
    // A disk that is being migrated has clients too, but the migration is the reason to report. Deletion is not refused
    // during the migration of a live import, because deletion ends that migration.
    if deed != Deed::Delete || !service.datastore.has_import_running(disk) {
        service.datastore.refuse_alone(disk)?;
    }
    let (mut reasons, connected) = about_clients(&service.clients, disk, deed);
    if !matches!(deed, Deed::DeleteSnapshot(_) | Deed::Replace)
        && let Some(machine) = machine_of(&service.location, disk)?
    {
        let remedy = match deed {
            Deed::Delete => format!("'lamina vm delete {machine}' deletes both"),
            Deed::Revert => "'lamina vm revert' reverts all disks of a machine with its definition".to_owned(),
            _ => format!("'lamina vm edit {machine} --remove-disk {disk}' removes it from the machine first"),
        };
        reasons.push(format!("disk '{disk}' belongs to machine '{machine}': {remedy}"));
    }
    if reasons.is_empty() || !service.datastore.disks()?.iter().any(|one| one.name == disk) {
        // If the disk does not exist, the operation itself reports that.
        return Ok(());
    }
    let mut text = reasons.join("; ");
    // Except for a rename, `--force` has no effect while clients are connected, so the message does not suggest it.
    if !connected || deed == Deed::Rename {
        text.push_str(&format!("; use --force to {} all the same", deed.what()));
    }
    Err(Error::new(ErrorKind::Busy, text))
}

/// Returns `Busy` if a machine uses a disk that is to migrate to the datastore `to`. Clients are no reason: they
/// continue to use the disk.
pub fn refuse_to_leave(service: &Service, disk: &str, to: &Location, force: bool) -> Result<()> {
    if force || to.resolved()? == service.location.resolved()? {
        return Ok(());
    }
    let Some(machine) = machine_of(&service.location, disk)? else { return Ok(()) };
    if !service.datastore.disks()?.iter().any(|one| one.name == disk) {
        // The migration itself reports that.
        return Ok(());
    }
    let text = format!(
        "disk '{disk}' belongs to machine '{machine}', which does not find it in another datastore: 'lamina vm edit \
         {machine} --remove-disk {disk}' removes it from the machine first; use --force to migrate the disk all the same"
    );
    Err(Error::new(ErrorKind::Busy, text))
}

/// Returns `Busy` if a guest may use the disk: its free map is in the memory of the guest then, and blocks that are
/// free on the disk may be in use.
pub fn refuse_to_reclaim(service: &Service, disk: &str) -> Result<()> {
    wait_left(&service.clients, disk, Deed::Reclaim);
    let (mut reasons, _) = about_clients(&service.clients, disk, Deed::Reclaim);
    if let Some(folder) = service.location.local_path()
        && let Some(name) = machine_of(&service.location, disk)?
    {
        let machine = Machine::at(folder.join(vm::machines::FOLDER).join(&name));
        if machine.process()?.is_some() {
            reasons.push(format!("machine '{name}', which uses disk '{disk}', is running; stop it first"));
        } else if freeze::is_frozen(&machine) {
            reasons.push(format!(
                "machine '{name}', which uses disk '{disk}', is frozen, and its guest continues with the free map in its \
                 memory; start it and stop it first"
            ));
        }
    }
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Busy, reasons.join("; "))),
    }
}

/// Waits a limited time for the sessions of clients that have closed their connections: the server sees the end of a
/// connection a moment after the client, and then finishes its requests.
fn wait_left(clients: &Clients, disk: &str, deed: Deed<'_>) {
    if !clients.wait_left(|export| deed.concerns(disk, export), LEAVING_PATIENCE) {
        tracing::info!(disk, "requests of clients that have closed their connections are still under way");
    }
}

/// Returns `Busy` if a client uses the disk or may reconnect to it, because the disk must not be replaced then. The
/// error is sent to another server, so it does not name the clients; `lamina disk show` names them.
pub fn refuse_to_replace(clients: &Clients, disk: &str) -> Result<()> {
    wait_left(clients, disk, Deed::Replace);
    match about_clients(clients, disk, Deed::Replace) {
        (reasons, _) if reasons.is_empty() => Ok(()),
        (reasons, _) => Err(Error::new(ErrorKind::Busy, reasons.join("; "))),
    }
}

/// The reasons to refuse the operation that are due to clients, and whether any of these clients is connected. The
/// reasons to refuse [`Deed::Replace`] do not name the clients.
fn about_clients(clients: &Clients, disk: &str, deed: Deed<'_>) -> (Vec<String>, bool) {
    let all = clients.all().into_iter().filter(|client| deed.concerns(disk, &client.export));
    let (connected, gone): (Vec<Client>, Vec<Client>) = all.partition(|client| client.grace.is_none());
    let mut reasons = Vec::new();
    let count = |clients: &[Client]| format!("{} client(s)", clients.len());
    if !connected.is_empty() {
        let mut who = count(&connected);
        if deed != Deed::Replace {
            who.push_str(&format!(": {}", named(&connected)));
        }
        reasons.push(format!("disk '{disk}' is in use by {who}; disconnect them first"));
    }
    if let Some(longest) = gone.iter().filter_map(|client| client.grace).max() {
        reasons.push(format!(
            "disk '{disk}' counts as in use for another {} s: {} lost the connection without a disconnect request and \
             may reconnect",
            seconds(longest),
            if deed == Deed::Replace { count(&gone) } else { named(&gone) }
        ));
    }
    (reasons, !connected.is_empty())
}

fn named(clients: &[Client]) -> String {
    let mut names: Vec<String> = clients.iter().map(|client| client.peer.to_string()).collect();
    names.sort();
    names.dedup();
    let more = names.len().saturating_sub(CLIENTS_NAMED_MAX);
    names.truncate(CLIENTS_NAMED_MAX);
    let mut text = names.join(", ");
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

/// Rounded up, so that a client whose time has not ended is not reported with 0 seconds.
fn seconds(left: Duration) -> u64 {
    left.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX)
}

/// After the operation: removes the disconnected clients that may reconnect to exports that no longer exist.
pub fn forget(clients: &Clients, disk: &str, deed: Deed<'_>) {
    clients.forget(|export| deed.concerns(disk, export));
}

/// Adds to each disk the clients that use it.
pub fn show(disks: &mut [DiskInfo], clients: &Clients) {
    for client in clients.all() {
        let disk = client.export.split_once('@').map_or(client.export.as_str(), |(disk, _)| disk);
        if let Ok(at) = disks.binary_search_by(|one| one.name.as_str().cmp(disk)) {
            disks[at].users.push(DiskUser {
                client: client.peer.to_string(),
                grace: client.grace.map(seconds),
                export: client.export,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_concerns_the_exports_that_it_removes() {
        let concerns = |deed: Deed<'_>| ["a", "a@s", "a@t", "ab", "ab@s", ""].map(|export| deed.concerns("a", export));
        assert_eq!(concerns(Deed::Delete), [true, true, true, false, false, false]);
        assert_eq!(concerns(Deed::Rename), concerns(Deed::Delete));
        assert_eq!(concerns(Deed::Revert), [true, false, false, false, false, false]);
        assert_eq!(concerns(Deed::Reclaim), concerns(Deed::Revert));
        assert_eq!(concerns(Deed::DeleteSnapshot("s")), [false, true, false, false, false, false]);
    }

    #[test]
    fn remaining_grace_is_rounded_up_to_seconds() {
        assert_eq!([0, 1, 999, 1000, 1001].map(|ms| seconds(Duration::from_millis(ms))), [0, 1, 1, 1, 2]);
    }
}
