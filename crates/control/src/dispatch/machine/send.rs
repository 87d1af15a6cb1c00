//! A full clone of a machine on another server.

use super::Work;
use crate::dispatch::{dispatch, point_name};
use crate::message::{MachineReply, Reply, Request, SendHow, SendPoint, SendRequest, SentDisk};
use error::{Error, ErrorKind, Result};
use replication::{Remote, Sent};
use vm::clone::Source;
use vm::definition::{CloneKind, Origin};
use vm::quiet;

impl Work<'_> {
    /// Sends a machine: its disks at one point in time, and its definition with a new identity.
    pub fn send(&self, source: &Source, remote: &str, how: &SendHow, quiesce: bool) -> Result<MachineReply> {
        let host = &self.host;
        let name = remote.parse::<Remote>().map_err(|text| Error::new(ErrorKind::Invalid, text))?.name;
        let parent = source.definition(host)?;
        let origin =
            Origin { machine: source.machine.clone(), snapshot: source.snapshot.clone(), way: CloneKind::Full };
        let mut clone = parent.for_clone(&name, origin)?;
        // The images are files of this host.
        clone.eject_all();
        if parent.disks.is_empty() {
            let text = format!("machine '{}' has no disk, and so nothing to send", source.machine);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let disks = parent.disk_names().into_iter().zip(clone.disk_names());
        let disks: Vec<SentDisk> = disks.map(|(disk, name)| SentDisk { disk, name }).collect();
        let attachment = Some(clone.to_text()?);
        let ask = |point: SendPoint| -> Result<Sent> {
            let request = SendRequest {
                remote: remote.to_owned(),
                disks: disks.clone(),
                point,
                attachment: attachment.clone(),
                how: how.clone(),
            };
            match dispatch(self.target, Request::Send(Box::new(request)), self.watch)? {
                Reply::Sent(sent) => Ok(*sent),
                other => Err(super::disks::unexpected(&other)),
            }
        };
        let mut quiet = None;
        let sent = if source.snapshot.is_some() {
            let snapshots = source.point(host)?.disks.into_iter().map(|snapshot| snapshot.name).collect();
            ask(SendPoint::Snapshots(snapshots))?
        } else {
            // Resumes an interrupted transfer; otherwise sends the current state of the machine.
            match ask(SendPoint::Resume) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let point = point_name(&name, how.incremental)?;
                    let of: Vec<_> = disks.iter().map(|disk| (disk.disk.clone(), point.clone())).collect();
                    {
                        let change = host.change(&source.machine)?;
                        quiet = Some(quiet::snapshot(&change, host.disks(), &of, quiesce)?.sentence());
                    }
                    ask(SendPoint::Taken(point))?
                }
                outcome => outcome?,
            }
        };
        Ok(MachineReply::Sent { machine: source.machine.clone(), name, sent, quiet })
    }
}
