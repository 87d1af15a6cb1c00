//! What speaks against deleting, renaming or reverting a disk beside open devices: clients that may come back to it
//! under the name and with the content that they left, and virtual machines that have it.
//!
//! A disk that is open is refused by the datastore itself, whatever is forced: no client loses its disk while it is
//! connected. What is said here can be overruled with `--force`.

use super::Service;
use disk::{DiskInfo, DiskUser, Location};
use error::{Error, ErrorKind, Result};
use export::clients::{Client, Clients};
use std::time::Duration;

/// Clients that an error names.
const CLIENTS_NAMED_MAX: usize = 5;

/// What is about to be done to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed<'a> {
    /// Delete it with its snapshots.
    Delete,
    /// Give it another name.
    Rename,
    /// Make it as it was at a snapshot.
    Revert,
    /// Delete one snapshot.
    DeleteSnapshot(&'a str),
    /// Replace its content with what another server sends.
    Replace,
}

impl Deed<'_> {
    /// Whether it takes that export of the disk away, or changes it.
    fn concerns(self, disk: &str, export: &str) -> bool {
        let snapshot = match export.strip_prefix(disk) {
            Some("") => None,
            Some(rest) if rest.starts_with('@') => rest.get(1..),
            _ => return false,
        };
        match self {
            Self::Delete | Self::Rename => true,
            Self::Revert | Self::Replace => snapshot.is_none(),
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
        }
    }
}

/// The machine that has a disk. There are machines only in a local folder.
pub fn machine_of(datastore: &Location, disk: &str) -> Result<Option<String>> {
    let Some(folder) = datastore.local_path() else { return Ok(None) };
    Ok(vm::machines::users_of_disks(&folder.join(vm::machines::FOLDER))?.remove(disk))
}

/// Refuses with `Busy` what clients or a machine speak against.
pub fn refuse(service: &Service, disk: &str, deed: Deed<'_>, force: bool) -> Result<()> {
    if force {
        return Ok(());
    }
    // A disk that moves is in use by its clients as well; that it moves is what has to end first.
    service.datastore.refuse_alone(disk)?;
    let (mut reasons, connected) = about_clients(&service.clients, disk, deed);
    if !matches!(deed, Deed::DeleteSnapshot(_) | Deed::Replace)
        && let Some(machine) = machine_of(&service.location, disk)?
    {
        reasons.push(format!("disk '{disk}' belongs to machine '{machine}'"));
    }
    if reasons.is_empty() || !service.datastore.disks()?.iter().any(|one| one.name == disk) {
        // What is not there is told as such by what follows.
        return Ok(());
    }
    let mut text = reasons.join("; ");
    // The datastore deletes and reverts nothing that is open, whatever is forced.
    if !connected || deed == Deed::Rename {
        text.push_str(&format!("; use --force to {} all the same", deed.what()));
    }
    Err(Error::new(ErrorKind::Busy, text))
}

/// Refuses with `Busy` to replace a disk that a client may come back to.
pub fn refuse_to_replace(clients: &Clients, disk: &str) -> Result<()> {
    match about_clients(clients, disk, Deed::Replace) {
        (reasons, _) if reasons.is_empty() => Ok(()),
        (reasons, _) => Err(Error::new(ErrorKind::Busy, reasons.join("; "))),
    }
}

/// What clients speak against a deed, and whether any of them is connected.
fn about_clients(clients: &Clients, disk: &str, deed: Deed<'_>) -> (Vec<String>, bool) {
    let all = clients.all().into_iter().filter(|client| deed.concerns(disk, &client.export));
    let (connected, gone): (Vec<Client>, Vec<Client>) = all.partition(|client| client.grace.is_none());
    let mut reasons = Vec::new();
    if !connected.is_empty() {
        let count = connected.len();
        let text =
            format!("disk '{disk}' is in use by {count} client(s): {}; disconnect them first", named(&connected));
        reasons.push(text);
    }
    if let Some(longest) = gone.iter().filter_map(|client| client.grace).max() {
        reasons.push(format!(
            "disk '{disk}' counts as in use for another {} s: {} lost the connection without a disconnect request and \
             may come back",
            seconds(longest),
            named(&gone)
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

/// Rounded up: what still counts does not say 0.
fn seconds(left: Duration) -> u64 {
    left.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX)
}

/// After a deed: no client comes back to what is not there any more.
pub fn forget(clients: &Clients, disk: &str, deed: Deed<'_>) {
    clients.forget(|export| deed.concerns(disk, export));
}

/// Says of disks which clients they have.
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
    fn deeds_concern_what_they_take_away() {
        let concerns = |deed: Deed<'_>| ["a", "a@s", "a@t", "ab", "ab@s", ""].map(|export| deed.concerns("a", export));
        assert_eq!(concerns(Deed::Delete), [true, true, true, false, false, false]);
        assert_eq!(concerns(Deed::Rename), concerns(Deed::Delete));
        assert_eq!(concerns(Deed::Revert), [true, false, false, false, false, false]);
        assert_eq!(concerns(Deed::DeleteSnapshot("s")), [false, true, false, false, false, false]);
    }

    #[test]
    fn what_still_counts_is_more_than_nothing() {
        assert_eq!([0, 1, 999, 1000, 1001].map(|ms| seconds(Duration::from_millis(ms))), [0, 1, 1, 1, 2]);
    }
}
