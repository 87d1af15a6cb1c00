//! The device that clients of the datastore have open. It passes requests to the disk's own device, which can be
//! exchanged while clients use it.
//!
//! ```text
//!   client ── SwitchedDevice ─┐
//!   client ── SwitchedDevice ─┼── Switch ── Held ── native device | chain | mirror of a migration
//!   client ── SwitchedDevice ─┘     │
//!                                 exchange
//! ```
//!
//! All clients of a disk (or of a snapshot) share one [`Switch`], so that an exchange takes effect for all at once.
//!
//! 1. A request uses one device from beginning to end: the current one when it began. A planned read is finished by the
//!    device that planned it, however long the client takes to fetch the data; the same holds for a flush.
//! 2. [`Switch::exchange`] never waits for a request, and no request waits for an exchange. A request that begins
//!    afterwards uses the new device. [`Before::wait_unused`] waits until no request uses the old device.
//! 3. While requests may use either device, acknowledged writes must be in both. The caller of the exchange ensures
//!    that; a migration uses a mirror of both.
//! 4. Whether a client may write is a property of the client ([`SwitchedDevice`]), not of the device.
//! 5. After acknowledged writes were lost, the first flush of each connected client fails, and so does its first write
//!    with FUA. A device reports a loss to one client only ([`Device::losses`]), and a new device has no record of
//!    writes that were lost with the previous one ([`Switch::note_loss`], called before the exchange).

use crate::device::{BaseIdentity, Device, DirtyExtent, FlushTicket, ReadPlan, StatusExtent, Verdict};
use crate::full::SpaceWait;
use crate::quota::{self, Gate};
use crate::settings::OpenDisk;
use backend::SharedSlice;
use error::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// Interval at which `wait_unused` checks whether the old device is still used.
const UNUSED_POLL: Duration = Duration::from_micros(200);

/// A device. The references to this value count the requests that use the device.
struct Held {
    device: Arc<dyn Device>,
    /// Whether the device is a temporary replacement of the disk's own device ([`Switch::suspend`]).
    stands_in: bool,
    /// The losses of the device that are included in the losses of the switch.
    noted: Mutex<u64>,
}

/// The current device of a disk or snapshot.
pub struct Switch {
    held: RwLock<Arc<Held>>,
    clients: AtomicU64,
    /// Number of those clients that are operations of the datastore.
    operations: AtomicU64,
    /// How often acknowledged writes may have been lost: by exchanges, and by the devices.
    losses: AtomicU64,
}

/// The device that was current before an exchange.
pub struct Before {
    held: Arc<Held>,
}

impl Switch {
    /// A switch whose current device is `device`.
    pub fn new(device: Arc<dyn Device>) -> Arc<Self> {
        let noted = Mutex::new(device.losses());
        let held = RwLock::new(Arc::new(Held { device, stands_in: false, noted }));
        Arc::new(Self { held, clients: AtomicU64::new(0), operations: AtomicU64::new(0), losses: AtomicU64::new(0) })
    }

    /// The current device. An exchange does not wait for callers that still use it.
    pub fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.enter().device)
    }

    /// Number of clients that have the disk or snapshot open.
    pub fn clients(&self) -> u64 {
        self.clients.load(Ordering::Acquire)
    }

    /// Makes `device` the current device for requests that begin from now on.
    pub fn exchange(&self, device: Arc<dyn Device>) -> Before {
        self.replace(device, false)
    }

    /// As [`Switch::exchange`], with a device that refuses requests until the disk's own device is available again.
    pub fn suspend(&self, device: Arc<dyn Device>) -> Before {
        self.replace(device, true)
    }

    /// Whether the current device was set by [`Switch::suspend`].
    pub fn is_suspended(&self) -> bool {
        self.held.read().stands_in
    }

    fn replace(&self, device: Arc<dyn Device>, stands_in: bool) -> Before {
        let mut held = self.held.write();
        self.losses(&held);
        // The new device may pass requests to the previous one. What it has lost beyond is not reported yet.
        let noted = Mutex::new(device.losses().min(*held.noted.lock()));
        Before { held: std::mem::replace(&mut *held, Arc::new(Held { device, stands_in, noted })) }
    }

    /// Undoes an exchange. The next exchange waits for the requests that still use the other device.
    pub fn restore(&self, before: Before) {
        *self.held.write() = before.held;
    }

    /// Records that writes which were acknowledged but not flushed may be lost. The caller calls this before an
    /// exchange.
    pub fn note_loss(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
    }

    /// The losses until now, including those of a device.
    fn losses(&self, held: &Held) -> u64 {
        let mut noted = held.noted.lock();
        let known = held.device.losses().max(*noted);
        let more = known - std::mem::replace(&mut *noted, known);
        self.losses.fetch_add(more, Ordering::SeqCst) + more
    }

    fn enter(&self) -> Arc<Held> {
        Arc::clone(&self.held.read())
    }
}

impl Before {
    /// The device before the exchange.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.held.device
    }

    /// Waits until no request uses the device, and it does not flush. False if `cancelled` returns true first.
    pub fn wait_unused(&self, cancelled: &dyn Fn() -> bool) -> bool {
        while Arc::strong_count(&self.held) > 1 || self.held.device.is_flushing() {
            if cancelled() {
                return false;
            }
            std::thread::sleep(UNUSED_POLL);
        }
        true
    }
}

/// A client that is counted. The disk or snapshot cannot be deleted until this value is dropped.
pub(crate) struct Client {
    switch: Arc<Switch>,
    is_operation: bool,
}

impl Client {
    /// The switch that counts the client.
    pub fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    fn new(switch: Arc<Switch>) -> Self {
        switch.clients.fetch_add(1, Ordering::AcqRel);
        Self { switch, is_operation: false }
    }

    /// Marks the client as an operation of the datastore, which users do not see as a client of the disk.
    pub fn of_operation(mut self) -> Self {
        if !std::mem::replace(&mut self.is_operation, true) {
            self.switch.operations.fetch_add(1, Ordering::AcqRel);
        }
        self
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.is_operation {
            self.switch.operations.fetch_sub(1, Ordering::AcqRel);
        }
        self.switch.clients.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Identifies the disk or snapshot behind a switch, independent of its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Identity {
    /// A disk or snapshot of the native store.
    Native(u64),
    /// A disk in a VMware format or a snapshot of it.
    Foreign {
        /// The name of the disk's folder.
        folder: String,
        /// The snapshot; `None` for the head.
        snapshot: Option<String>,
    },
}

/// The switches of all open disks and snapshots.
#[derive(Default)]
pub(crate) struct Switches {
    open: Mutex<BTreeMap<Identity, Weak<Switch>>>,
}

impl Switches {
    /// The lock is held while a disk is opened, which locks the metadata.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Identity, Weak<Switch>>> {
        store::engine::assert_not_looking();
        self.open.lock()
    }

    /// Counts a client of a disk or snapshot. `open` is called if no other client has it open.
    pub fn attach(&self, identity: Identity, open: impl FnOnce() -> Result<Arc<dyn Device>>) -> Result<Client> {
        let mut all = self.lock();
        if let Some(switch) = all.get(&identity).and_then(Weak::upgrade) {
            return Ok(Client::new(switch));
        }
        all.retain(|_, switch| switch.strong_count() > 0);
        let switch = Switch::new(open()?);
        all.insert(identity, Arc::downgrade(&switch));
        Ok(Client::new(switch))
    }

    /// The switch of a disk or snapshot; `None` if no client has it open.
    pub fn get(&self, identity: &Identity) -> Option<Arc<Switch>> {
        self.lock().get(identity).and_then(Weak::upgrade)
    }

    /// Whether any disk or snapshot has a client.
    pub fn in_use(&self) -> bool {
        self.lock().values().filter_map(Weak::upgrade).any(|switch| switch.clients() > 0)
    }

    /// Number of clients that a disk or snapshot has, without operations of the datastore.
    pub fn clients(&self, identity: &Identity) -> u64 {
        self.get(identity).map_or(0, |switch| {
            let operations = switch.operations.load(Ordering::Acquire);
            switch.clients().saturating_sub(operations)
        })
    }

    /// After a disk was migrated: assigns its switch to a new identity, perhaps in another datastore.
    pub fn hand_over(&self, identity: &Identity, to: &Switches, new: Identity) {
        let switch = self.lock().remove(identity);
        if let Some(switch) = switch {
            to.lock().insert(new, switch);
        }
    }

    /// Returns `Busy` while clients have the disk or snapshot open.
    pub fn refuse_in_use(&self, identity: &Identity, what: &str) -> Result<()> {
        let Some(switch) = self.get(identity) else { return Ok(()) };
        let all = switch.clients();
        match all.saturating_sub(switch.operations.load(Ordering::Acquire)) {
            0 if all == 0 => Ok(()),
            0 => Err(Error::new(
                ErrorKind::Busy,
                format!("another operation uses {what}: wait until it ends; 'lamina job list' shows it"),
            )),
            count => Err(Error::new(
                ErrorKind::Busy,
                format!("{what} is in use by {count} client(s); disconnect them first"),
            )),
        }
    }
}

/// A disk or snapshot as opened by a client.
pub struct SwitchedDevice {
    name: String,
    read_only: bool,
    switch: Arc<Switch>,
    _client: Client,
    told: Told,
    /// What happens to the client's writes on a full file system, and their limits; `None` for a snapshot.
    open: Option<Arc<OpenDisk>>,
}

/// The losses that were reported to a client: the value of `losses` when the client connected, or when it last received
/// an error for a loss.
struct Told {
    by_flush: AtomicU64,
    /// The losses that were reported by FUA writes, counted separately: after a failed FUA write the client repeats
    /// only this write, so its next flush must fail too.
    by_fua: AtomicU64,
}

/// The guard of a planned read or of a flush: the device that planned the read or began the flush, and the guard of
/// that device.
struct Origin {
    held: Arc<Held>,
    guard: Option<Box<dyn Any + Send>>,
    /// The losses when the flush began.
    losses: u64,
}

impl Origin {
    /// The plan, with a guard that also refers to its device.
    fn hold(held: Arc<Held>, mut plan: ReadPlan) -> ReadPlan {
        let guard = plan.guard.take();
        plan.guard = Some(Box::new(Self { held, guard, losses: 0 }));
        plan
    }
}

impl SwitchedDevice {
    /// A new client of a switch, which is counted until it is dropped.
    pub fn new(name: impl Into<String>, read_only: bool, switch: Arc<Switch>) -> Self {
        Self::over(name, read_only, Client::new(switch))
    }

    /// As [`SwitchedDevice::new`], for a client that is already counted.
    pub(crate) fn over(name: impl Into<String>, read_only: bool, client: Client) -> Self {
        let losses = client.switch.losses(&client.switch.enter());
        let told = Told { by_flush: losses.into(), by_fua: losses.into() };
        Self { name: name.into(), read_only, switch: Arc::clone(&client.switch), _client: client, told, open: None }
    }

    /// The client, whose writes follow the settings of its disk. The client keeps these settings when the device behind
    /// the switch is exchanged.
    pub(crate) fn with_settings(mut self, open: Arc<OpenDisk>) -> Self {
        self.open = Some(open);
        self
    }

    /// The limits of the client's writes.
    fn gate(&self) -> Option<Arc<Gate>> {
        self.open.as_ref().and_then(|open| open.gate.gate())
    }

    /// Makes a range read as zeros.
    fn zero(&self, held: &Held, (offset, length): (u64, u64), allocate: bool, fua: bool) -> Result<()> {
        // Without `allocate` holes stay holes, except in thick disks, whose blocks are all mapped.
        let charged = (offset, if allocate { length } else { 0 });
        self.charged(held, charged, !allocate, || held.device.write_zeroes(offset, length, allocate, fua))
    }

    /// Carries out a write after its new blocks were charged to the quotas of the disk. With `may_free`, the write may
    /// also free blocks.
    fn charged(
        &self,
        held: &Held,
        (offset, length): (u64, u64),
        may_free: bool,
        write: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Some(gate) = self.gate() else { return write() };
        // A range beyond the end is refused by the device.
        let is_inside = offset.checked_add(length).is_some_and(|end| end <= held.device.capacity());
        let new = if is_inside && length > 0 { quota::holes(&*held.device, offset, length)? } else { 0 };
        let charge = gate.charge(new).map_err(|error| error.context(&self.name))?;
        if may_free {
            gate.may_shrink();
        }
        write().inspect_err(|_| charge.failed())
    }

    fn writer(&self) -> Result<Arc<Held>> {
        let held = self.switch.enter();
        // If the device itself is read-only, its own error is more specific.
        if self.read_only && !held.device.read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open for reading only", self.name)));
        }
        Ok(held)
    }

    /// Carries out a change of the disk. With `fua`, also returns an error after a loss.
    fn change(&self, fua: bool, change: impl FnOnce(&Held) -> Result<()>) -> Result<()> {
        let held = self.writer()?;
        if !fua {
            return change(&held);
        }
        let losses = self.switch.losses(&held);
        let changed = change(&held);
        self.tell_loss(&held, &self.told.by_fua, losses, changed)
    }

    /// The outcome of a flush or durable write that has ended: an error if it succeeded and writes were lost since the
    /// client was told last, or since the request began, when there were `losses`. The request's own data may be among
    /// them, and the device may have reported the loss by another request.
    fn tell_loss(&self, held: &Held, told: &AtomicU64, losses: u64, outcome: Result<()>) -> Result<()> {
        let now = self.switch.losses(held);
        match outcome {
            Ok(()) if self.read_only => Ok(()),
            Ok(()) if told.fetch_max(now, Ordering::SeqCst) >= now && losses == now => Ok(()),
            Ok(()) => {
                let text = format!(
                    "{}: writes that were acknowledged before and not flushed may be lost, because the disk was opened \
                     again after a failure, or its map is damaged (see the log); this error is returned once, and \
                     later flushes are valid",
                    self.name
                );
                Err(Error::new(ErrorKind::Io, text))
            }
            Err(error) => {
                // The device itself has reported the loss.
                if error.kind() == ErrorKind::Corrupt {
                    told.fetch_max(now, Ordering::SeqCst);
                }
                Err(error)
            }
        }
    }
}

impl Device for SwitchedDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity(&self) -> u64 {
        self.switch.enter().device.capacity()
    }

    fn read_only(&self) -> bool {
        self.read_only || self.switch.enter().device.read_only()
    }

    fn plan_read(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        let held = self.switch.enter();
        let plan = held.device.plan_read(offset, length)?;
        Ok(Origin::hold(held, plan))
    }

    fn try_plan_read(&self, offset: u64, length: usize) -> Result<Option<ReadPlan>> {
        let held = self.switch.enter();
        let plan = held.device.try_plan_read(offset, length)?;
        Ok(plan.map(|plan| Origin::hold(held, plan)))
    }

    fn load_for_read(&self, offset: u64, length: usize) -> Result<()> {
        self.switch.enter().device.load_for_read(offset, length)
    }

    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        match plan.guard.take().map(|guard| guard.downcast::<Origin>()) {
            Some(Ok(origin)) => {
                let Origin { held, guard, losses } = *origin;
                plan.guard = guard;
                let verdict = held.device.finish_read(plan);
                if plan.guard.is_some() {
                    let guard = plan.guard.take();
                    plan.guard = Some(Box::new(Origin { held, guard, losses }));
                }
                verdict
            }
            // The read was finished before, so no bytes have to be verified.
            Some(Err(guard)) => {
                plan.guard = Some(guard);
                self.switch.enter().device.finish_read(plan)
            }
            None => self.switch.enter().device.finish_read(plan),
        }
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        let range = (offset, data.len() as u64);
        let setting = self.open.as_ref().map(|open| open.detect_zeroes()).unwrap_or_default();
        self.change(fua, |held| match setting.zeroes(&data) {
            Some(allocate) => self.zero(held, range, allocate, fua),
            None => self.charged(held, range, false, || held.device.write(offset, data, fua)),
        })
    }

    fn space_wait(&self) -> Option<&Arc<SpaceWait>> {
        self.open.as_ref().map(|open| &open.space)
    }

    fn pressure(&self) -> u32 {
        self.switch.enter().device.pressure()
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        let discarded = self.change(fua, |held| held.device.discard(offset, length, fua));
        if let Some(gate) = self.gate() {
            gate.may_shrink();
        }
        discarded
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        self.change(fua, |held| self.zero(held, (offset, length), allocate, fua))
    }

    fn begin_flush(&self) -> Result<FlushTicket> {
        let held = self.switch.enter();
        let losses = self.switch.losses(&held);
        let mut ticket = held.device.begin_flush()?;
        ticket.of_reader = self.read_only;
        let guard = ticket.guard.take();
        ticket.guard = Some(Box::new(Origin { held, guard, losses }));
        Ok(ticket)
    }

    fn finish_flush(&self, mut ticket: FlushTicket) -> Result<()> {
        let origin = ticket.guard.take().and_then(|guard| guard.downcast::<Origin>().ok());
        let Origin { held, guard, losses } = *origin.ok_or_else(|| {
            Error::new(
                ErrorKind::Invalid,
                format!("{}: a flush was finished that this device did not begin", self.name),
            )
        })?;
        ticket.guard = guard;
        // Other clients may write a device that this client only reads. A device that is read-only has no writes.
        if held.device.read_only() {
            return Ok(());
        }
        let flushed = held.device.finish_flush(ticket);
        self.tell_loss(&held, &self.told.by_flush, losses, flushed)
    }

    fn losses(&self) -> u64 {
        self.switch.losses(&self.switch.enter())
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.switch.enter().device.prefetch(offset, length)
    }

    fn resize(&self, capacity: u64) -> Result<()> {
        let held = self.writer()?;
        let Some(gate) = self.gate() else { return held.device.resize(capacity) };
        let new = held.device.mapped_by_resize(capacity)?;
        let _charge = gate.charge(new).map_err(|error| error.context(&self.name))?;
        let resized = held.device.resize(capacity);
        // The disk may have shrunk, and a growth that failed has returned its new blocks.
        gate.may_shrink();
        resized
    }

    fn mapped_by_resize(&self, capacity: u64) -> Result<u64> {
        self.switch.enter().device.mapped_by_resize(capacity)
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.switch.enter().device.status(offset, length, limit)
    }

    fn dirty_bases(&self) -> Vec<String> {
        self.switch.enter().device.dirty_bases()
    }

    fn base_identity(&self, base: &str) -> Option<BaseIdentity> {
        self.switch.enter().device.base_identity(base)
    }

    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        self.switch.enter().device.changed_since(base, offset, length, limit)
    }

    fn read_plan(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.switch.enter().device.read_plan(offset, length)
    }
}
