//! Growing a disk while a running machine uses it, so that the guest sees the new size.

use super::{Target, Watch, location};
use crate::dispatch::dispatch;
use crate::message::{DiskRequest, MachineNotice, Reconnect, Reply, Request};
use error::Result;
use std::time::Duration;
use vm::machine::{Change, Machine};
use vm::resize::Telling;

/// How long to wait for another command that uses the machine.
const CHANGE_PATIENCE: Duration = Duration::from_secs(30);

/// A running machine that uses a disk, locked against other commands.
struct Affected {
    _change: Change,
    telling: Telling,
    name: String,
}

/// The running machine that has to be notified of the new size of a disk, if there is one.
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

/// Changes the capacity of a disk, and notifies the running machine that uses it, if any.
pub fn resize(
    target: &Target,
    name: String,
    capacity: u64,
    shrink: bool,
    reconnect: Reconnect,
    watch: &dyn Watch,
) -> Result<Reply> {
    // A disk that shrinks must have no clients, and so is not used by a running machine.
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
            // The machine's own connection was ended by this request and has reconnected already, so it is not counted.
            resized.reconnected = resized.reconnected.saturating_sub(1);
            resized.disk.machine = Some(name.clone());
            resized.machine = Some(MachineNotice { name, seen });
            Reply::Resized(resized)
        }
        (_, reply) => reply,
    })
}
