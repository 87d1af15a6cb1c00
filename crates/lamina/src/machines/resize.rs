//! `lamina disk resize` of a disk that a running machine has: the machine sees the new size.

use crate::output::{self, Form};
use crate::{End, exit, follow};
use control::{DiskRequest, Reconnect, Reply, Request};
use error::{Error, Result};
use serde_json::json;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;
use vm::machine::{Change, Machine};
use vm::resize::Telling;

/// How long another command may work on the machine.
const CHANGE_PATIENCE: Duration = Duration::from_secs(30);

/// The machine that has a disk and runs, held against other commands.
pub struct Affected {
    _change: Change,
    telling: Telling,
    name: String,
}

/// The machine that is to be told of the new size of a disk.
pub fn affected(datastore: &Path, disk: &str) -> Result<Option<Affected>> {
    control::require_folder(datastore)?;
    let datastore = datastore.canonicalize().map_err(|e| Error::io(format!("finding '{}'", datastore.display()), e))?;
    let folder = datastore.join(vm::machines::FOLDER);
    let Some(name) = vm::machines::users_of_disks(&folder)?.remove(disk) else { return Ok(None) };
    let machine = Machine::at(folder.join(&name));
    if machine.process()?.is_none() {
        return Ok(None);
    }
    let change = machine.change_within(CHANGE_PATIENCE)?;
    let telling = Telling::begin(&change, disk)?;
    Ok(telling.map(|telling| Affected { _change: change, telling, name }))
}

/// Grows a disk and has the machine see it.
pub fn run(datastore: &Path, affected: Affected, request: Request, form: Form) -> std::result::Result<End, End> {
    let Affected { _change, telling, name } = affected;
    let request = match request {
        Request::Disk(DiskRequest::Resize { name, capacity, shrink, reconnect: Reconnect::NoClient }) => {
            let reconnect = Reconnect::Process(telling.pid());
            Request::Disk(DiskRequest::Resize { name, capacity, shrink, reconnect })
        }
        other => other,
    };
    let interrupted = follow::interruption(exit::INTERRUPTED)?;
    let watch = follow::Follow::new(&request, interrupted, None);
    let reply = control::ask(datastore, request.clone(), &watch);
    watch.finish();
    let Reply::Resized(mut resized) = reply? else {
        return Err(Error::new(error::ErrorKind::Invalid, "the datastore did not say how large the disk is").into());
    };
    let seen = resized.served;
    if seen {
        telling.finish(resized.disk.capacity)?;
    }
    let mut out = io::stdout().lock();
    // Its connection was ended and made again within this command.
    resized.reconnected = resized.reconnected.saturating_sub(1);
    resized.disk.machine = Some(name.clone());
    let reply = Reply::Resized(resized);
    match form {
        Form::Json => {
            let mut value = output::json_value(&reply);
            value["machine_sees_it"] = json!(seen);
            output::print_json(&mut out, &value)?;
        }
        Form::Text => {
            output::print(&mut out, form, &request, &reply)?;
            match seen {
                true => writeln!(out, "machine {name} sees the new size")?,
                false => writeln!(
                    out,
                    "machine {name} runs and the datastore is not served: when it is, repeat the command, and the \
                     machine sees the new size"
                )?,
            }
        }
    }
    Ok(End::Code(0))
}
