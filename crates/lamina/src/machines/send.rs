//! `lamina vm clone --to`: a full clone at another server.

use crate::cli::VmClone;
use crate::output::{self, Form};
use crate::{End, exit, follow};
use control::{Reply, Request, SendPoint, SendRequest, SentDisk};
use error::{Error, ErrorKind};
use replication::Remote;
use std::io::{self, Write};
use std::path::Path;
use vm::clone::Source;
use vm::definition::{CloneKind, Origin};
use vm::host::Host;
use vm::quiet;

/// Sends a machine: its disks at one point, and a definition with an identity of its own.
pub fn run(datastore: &Path, host: &Host, arguments: &VmClone, remote: &Remote, form: Form) -> Result<End, End> {
    let source = Source { machine: arguments.source.machine.clone(), snapshot: arguments.source.snapshot.clone() };
    let parent = source.definition(host)?;
    let origin = Origin { machine: source.machine.clone(), snapshot: source.snapshot.clone(), way: CloneKind::Full };
    let clone = parent.for_clone(&remote.name, origin)?;
    if parent.disks.is_empty() {
        let text = format!("machine '{}' has no disk, and so nothing to send", source.machine);
        return Err(Error::new(ErrorKind::Invalid, text).into());
    }
    let disks = parent.disk_names().into_iter().zip(clone.disk_names());
    let disks: Vec<SentDisk> = disks.map(|(disk, name)| SentDisk { disk, name }).collect();
    let request = |point: SendPoint| -> Result<SendRequest, End> {
        let request = arguments.how.request(remote, disks.clone(), point).map_err(End::Usage)?;
        Ok(SendRequest { attachment: Some(clone.to_text()?), ..request })
    };
    let interrupted = follow::interruption(exit::INTERRUPTED)?;
    let ask = |request: SendRequest| -> Result<(Request, Reply), End> {
        let request = Request::Send(Box::new(request));
        let watch = follow::Follow::new(&request, interrupted.clone(), None);
        let reply = control::ask(datastore, request.clone(), &watch);
        watch.finish();
        Ok((request, reply?))
    };
    let mut remark = None;
    let (request, reply) = if source.snapshot.is_some() {
        let snapshots = source.point(host)?.disks.into_iter().map(|snapshot| snapshot.name).collect();
        ask(request(SendPoint::Snapshots(snapshots))?)?
    } else {
        // What an earlier command was sending goes on; otherwise the machine as it is now.
        match ask(request(SendPoint::Resume)?) {
            Err(End::Failed(error)) if error.kind() == ErrorKind::NotFound => {
                let name = control::point_name(&remote.name, arguments.how.incremental)?;
                let of: Vec<_> = disks.iter().map(|disk| (disk.disk.clone(), name.clone())).collect();
                {
                    let change = host.change(&source.machine)?;
                    remark = Some(quiet::snapshot(&change, host.disks(), &of, arguments.quiesce)?.sentence());
                }
                ask(request(SendPoint::Taken(name))?)?
            }
            other => other?,
        }
    };
    let mut out = io::stdout().lock();
    output::print(&mut out, form, &request, &reply)?;
    if let (Form::Text, Some(remark)) = (form, remark) {
        writeln!(out, "machine {} is {} there; {remark}", source.machine, remote.name)?;
    }
    Ok(End::Code(0))
}
