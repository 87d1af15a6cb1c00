//! A disk that gets larger while a running machine has it: the machine sees the new size.

use super::{Target, Watch, location};
use crate::dispatch::dispatch;
use crate::message::{DiskRequest, MachineNotice, Reconnect, Reply, Request};
use error::Result;
use std::time::Duration;
use vm::machine::{Change, Machine};
use vm::resize::Telling;

/// How long another command may work on the machine.
const CHANGE_PATIENCE: Duration = Duration::from_secs(30);

/// The machine that has a disk and runs, held against other commands.
struct Affected {
    _change: Change,
    telling: Telling,
    name: String,
}

/// The machine that is to be told of the new size of a disk.
fn affected(target: &Target, disk: &str) -> Result<Option<Affected>> {
    let location = location(target)?;
    let Some(folder) = location.local_path() else { return Ok(None) };
    let folder = folder.join(vm::machines::FOLDER);
    let Some(name) = vm::machines::users_of_disks(&folder)?.remove(disk) else { return Ok(None) };
    let machine = Machine::at(folder.join(&name));
    if machine.process()?.is_none() {
        return Ok(None);
    }
    let change = machine.change_within(CHANGE_PATIENCE)?;
    let telling = Telling::begin(&change, disk)?;
    Ok(telling.map(|telling| Affected { _change: change, telling, name }))
}

/// Changes the capacity of a disk and has the machine see it that runs on it, if one does.
pub fn resize(
    target: &Target,
    name: String,
    capacity: u64,
    shrink: bool,
    reconnect: Reconnect,
    watch: &dyn Watch,
) -> Result<Reply> {
    // A disk that shrinks has no client, and so no running machine.
    let affected = if shrink { None } else { affected(target, &name)? };
    let reconnect = match (&affected, reconnect) {
        (Some(affected), Reconnect::NoClient) => Reconnect::Process(affected.telling.pid()),
        (_, reconnect) => reconnect,
    };
    let request = DiskRequest::Resize { name, capacity, shrink, reconnect, tell_machine: false };
    let reply = dispatch(target, Request::Disk(request), watch)?;
    Ok(match (affected, reply) {
        (Some(Affected { _change, telling, name }), Reply::Resized(mut resized)) => {
            let seen = resized.served;
            if seen {
                telling.finish(resized.disk.capacity)?;
            }
            // Its connection was ended and made again within this request.
            resized.reconnected = resized.reconnected.saturating_sub(1);
            resized.disk.machine = Some(name.clone());
            resized.machine = Some(MachineNotice { name, seen });
            Reply::Resized(resized)
        }
        (_, reply) => reply,
    })
}
