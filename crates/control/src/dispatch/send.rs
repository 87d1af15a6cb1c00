//! Sending disks to another server, and receptions from other servers.
//!
//! If the state to send is not a snapshot, the sender takes a snapshot, so that an interrupted transfer can be resumed.
//! The snapshot's name begins with `sending-NAME-`, and the snapshot is deleted after the transfer. With
//! `--incremental` its name begins with `sent-NAME-`, and it is kept until the next transfer is complete.

use super::{Service, Watch};
use crate::message::{Change, ReceiveRequest, Reply, SendPoint, SendRequest};
use connections::ClientTls;
use disk::transfer::new_identity;
use disk::{Datastore, NoProgress, Progress, SnapshotOptions};
use error::{Error, ErrorKind, Result};
use replication::{Remote, SendOptions, Sent, Shipment, ShippedDisk};

/// Number of random characters that make a snapshot's name unique.
const SUFFIX: usize = 8;

/// Carries out a request about receptions.
pub fn receive(datastore: &Datastore, request: ReceiveRequest) -> Result<Reply> {
    match request {
        ReceiveRequest::List => datastore.receptions().map(Reply::Receptions),
        ReceiveRequest::Delete { id } => {
            datastore.delete_reception(&id)?;
            Ok(Reply::Deleted(id))
        }
    }
}

/// Prefix of the names of snapshots that are taken for a transfer to the remote name `name`.
pub fn prefix(name: &str, incremental: bool) -> String {
    let verb = if incremental { "sent" } else { "sending" };
    format!("{verb}-{name}-")
}

/// A new name for a snapshot that is taken for a transfer to the remote name `name`.
pub fn point_name(name: &str, incremental: bool) -> Result<String> {
    let identity = new_identity()?;
    Ok(format!("{}{}", prefix(name, incremental), &identity[..SUFFIX]))
}

/// Whether [`point_name`] has made the name of a snapshot, with this prefix. The names for another remote name may
/// begin with the prefix too: `sent-web-` is the beginning of `sent-web-2-`.
fn is_point(snapshot: &str, prefix: &str) -> bool {
    let suffix = snapshot.strip_prefix(prefix);
    suffix.is_some_and(|suffix| suffix.len() == SUFFIX && suffix.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Sends disks.
pub fn send(service: &Service, request: &SendRequest, watch: &dyn Watch) -> Result<Reply> {
    let remote: Remote = request.remote.parse().map_err(|text: String| Error::new(ErrorKind::Invalid, text))?;
    let sending = Sending { service, datastore: &service.datastore, request, remote, progress: watch };
    let sent = match &request.point {
        SendPoint::Snapshots(names) => sending.ship(names, true, false)?,
        SendPoint::Taken(name) => sending.taken(name)?,
        SendPoint::Resume => sending.resume()?,
        SendPoint::Now => match sending.resume() {
            Err(error) if error.kind() == ErrorKind::NotFound => sending.taken(&sending.take()?)?,
            outcome => outcome?,
        },
    };
    Ok(Reply::Sent(Box::new(sent)))
}

struct Sending<'a> {
    service: &'a Service,
    datastore: &'a Datastore,
    request: &'a SendRequest,
    remote: Remote,
    progress: &'a dyn Progress,
}

impl Sending<'_> {
    /// Takes a snapshot of each disk at one point in time; returns the name of the snapshots.
    fn take(&self) -> Result<String> {
        let name = point_name(&self.remote.name, self.request.how.incremental)?;
        let of: Vec<_> = self.request.disks.iter().map(|disk| (disk.disk.clone(), name.clone())).collect();
        self.datastore.create_snapshots(&of, &SnapshotOptions::default())?;
        let created = |(disk, snapshot)| Change::SnapshotCreated { disk, snapshot };
        self.service.publish(|| of.into_iter().map(created).collect());
        Ok(name)
    }

    /// Names of snapshots taken for this transfer that every disk has, the newest last.
    fn left(&self) -> Result<Vec<String>> {
        let prefix = prefix(&self.remote.name, self.request.how.incremental);
        let mut common: Option<Vec<String>> = None;
        for disk in &self.request.disks {
            let all = self.datastore.snapshots(Some(&disk.disk))?;
            let names = all.into_iter().map(|snapshot| snapshot.name).filter(|name| is_point(name, &prefix));
            let names: Vec<String> = names.collect();
            common = Some(match common {
                None => names,
                Some(before) => before.into_iter().filter(|name| names.contains(name)).collect(),
            });
        }
        Ok(common.unwrap_or_default())
    }

    /// Resumes the transfer of an earlier command, if the receiver has kept the data of that transfer.
    fn resume(&self) -> Result<Sent> {
        let none = || Error::new(ErrorKind::NotFound, "no unfinished transfer was found");
        let name = self.left()?.pop().ok_or_else(none)?;
        let names = vec![name.clone(); self.request.disks.len()];
        let outcome = self.ship(&names, self.request.how.incremental, true);
        match &outcome {
            Err(error) if error.kind() == ErrorKind::NotFound && !self.request.how.incremental => self.forget(&name),
            Ok(_) => self.arrived(&name),
            Err(_) => {}
        }
        outcome.map_err(|error| match error.kind() {
            // The earlier transfer may be complete, and its command was killed before it deleted its snapshots.
            ErrorKind::Exists if !self.request.how.incremental => {
                let kept = self.request.disks.iter().map(|disk| format!("{}@{name}", disk.disk)).collect::<Vec<_>>();
                let text = format!(
                    "{error}; the snapshots of an interrupted transfer are kept, and if that transfer was complete, \
                     'lamina snapshot delete' deletes them: {}",
                    kept.join(", ")
                );
                Error::new(ErrorKind::Exists, text)
            }
            _ => error,
        })
    }

    /// Sends the snapshots that were taken for this transfer.
    fn taken(&self, name: &str) -> Result<Sent> {
        let names = vec![name.to_owned(); self.request.disks.len()];
        let outcome = self.ship(&names, self.request.how.incremental, false);
        match &outcome {
            Ok(_) => self.arrived(name),
            // The snapshots are kept, so that the same command can resume the transfer.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Io | ErrorKind::Busy | ErrorKind::Stopped | ErrorKind::Interrupted | ErrorKind::NoSpace
                ) => {}
            Err(_) => self.forget(name),
        }
        outcome
    }

    /// After a transfer: deletes its snapshots. With `--incremental`, keeps these snapshots and deletes the snapshots
    /// of earlier transfers.
    fn arrived(&self, name: &str) {
        if !self.request.how.incremental {
            return self.forget(name);
        }
        let older = self.left().unwrap_or_default();
        older.iter().filter(|other| *other != name).for_each(|other| self.forget(other));
    }

    fn forget(&self, name: &str) {
        for disk in &self.request.disks {
            let (disk, snapshot) = (disk.disk.clone(), name.to_owned());
            match self.datastore.delete_snapshot(&disk, name, None, &NoProgress) {
                Ok(_) => self.service.publish(|| vec![Change::SnapshotDeleted { disk, snapshot }]),
                Err(error) => tracing::warn!("the temporary snapshot '{disk}@{name}' could not be deleted: {error}"),
            }
        }
    }

    /// Sends a snapshot of each disk; with `keep` the snapshots are kept on the receiver.
    fn ship(&self, snapshots: &[String], keep: bool, resume_only: bool) -> Result<Sent> {
        let request = self.request;
        let mut disks = Vec::with_capacity(request.disks.len());
        for (disk, snapshot) in request.disks.iter().zip(snapshots) {
            let outgoing = self.datastore.outgoing(&disk.disk, snapshot)?;
            disks.push(ShippedDisk { outgoing, name: disk.name.clone(), uuid: new_identity()? });
        }
        let shipment = Shipment {
            disks,
            attachment: request.attachment.clone(),
            keep,
            incremental: request.how.incremental,
            update: request.how.incremental && request.attachment.is_none(),
            resume_only,
        };
        let how = &request.how;
        let tls = &how.tls;
        let options = SendOptions {
            streams: how.streams as usize,
            rate: how.rate,
            tls: ClientTls {
                authorities: tls.authorities.clone(),
                identity: tls.certificate.clone().zip(tls.key.clone()),
                server_name: tls.server_name.clone(),
            },
        };
        replication::send(&shipment, &self.remote, &options, self.progress)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn snapshots_for_other_remote_names_are_distinguished() {
        for incremental in [false, true] {
            let point = |name: &str| point_name(name, incremental).unwrap();
            let is_for_web = |snapshot: &str| is_point(snapshot, &prefix("web", incremental));
            assert!(is_for_web(&point("web")));
            assert!(!is_for_web(&point("web-2")) && !is_for_web(&point("web-12345678")) && !is_for_web(&point("we")));
        }
    }
}
