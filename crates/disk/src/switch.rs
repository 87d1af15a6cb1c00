//! What every client of the datastore holds: a device that can be exchanged for another while it is in use.
//!
//! ```text
//!   client ── SwitchedDevice ─┐
//!   client ── SwitchedDevice ─┼── Switch ── Held ── native device | chain | mirror of a migration
//!   client ── SwitchedDevice ─┘     │
//!                                 exchange
//! ```
//!
//! One [`Switch`] stands behind all clients of a disk (or of a snapshot), so that an exchange is seen by all at once.
//!
//! 1. A request goes to one device from its beginning to its end: the one that was current when it began. A read that
//!    was planned by a device is finished by that device, however long the client takes to fetch the data; so is a
//!    flush.
//! 2. [`Switch::exchange`] never waits for a request, and no request waits for an exchange: a request that begins
//!    after it goes to the new device. [`Before::wait_unused`] waits until no request is inside the old one.
//! 3. What is acknowledged must be in both devices while requests may be inside both: the caller of the exchange
//!    ensures that (a migration puts a mirror between).
//! 4. Whether a client may write is a matter of the client ([`SwitchedDevice`]), not of the device.
//! 5. A new device knows nothing of writes that were lost with the one before, and would answer a flush with success.
//!    After [`Switch::note_loss`], called before the exchange, the first flush of each client that was connected
//!    answers an error.

use crate::device::{Device, DirtyExtent, FlushTicket, ReadPlan, StatusExtent, Verdict};
use backend::SharedSlice;
use error::{Error, ErrorKind, Result};
use parking_lot::{Mutex, RwLock};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// How often it is looked whether an old device is still used.
const UNUSED_POLL: Duration = Duration::from_micros(200);

/// A device; its references count the requests that are inside it.
struct Held {
    device: Arc<dyn Device>,
    /// It stands in for the disk's own device ([`Switch::suspend`]).
    stands_in: bool,
}

/// The place where the current device of a disk stands.
pub struct Switch {
    held: RwLock<Arc<Held>>,
    clients: AtomicU64,
    /// How often acknowledged writes may have been lost with a device.
    losses: AtomicU64,
}

/// The device that was current before an exchange.
pub struct Before {
    held: Arc<Held>,
}

impl Switch {
    /// A switch to that device.
    pub fn new(device: Arc<dyn Device>) -> Arc<Self> {
        let held = RwLock::new(Arc::new(Held { device, stands_in: false }));
        Arc::new(Self { held, clients: AtomicU64::new(0), losses: AtomicU64::new(0) })
    }

    /// The current device. An exchange does not wait for callers that still use it.
    pub fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.enter().device)
    }

    /// Clients that have it open.
    pub fn clients(&self) -> u64 {
        self.clients.load(Ordering::Acquire)
    }

    /// Sends requests that begin from now on to another device.
    pub fn exchange(&self, device: Arc<dyn Device>) -> Before {
        self.replace(Held { device, stands_in: false })
    }

    /// As [`Switch::exchange`], to a device that refuses requests until the disk's own one comes.
    pub fn suspend(&self, device: Arc<dyn Device>) -> Before {
        self.replace(Held { device, stands_in: true })
    }

    /// Whether the current device is one that [`Switch::suspend`] put there.
    pub fn is_suspended(&self) -> bool {
        self.held.read().stands_in
    }

    fn replace(&self, held: Held) -> Before {
        Before { held: std::mem::replace(&mut *self.held.write(), Arc::new(held)) }
    }

    /// Undoes an exchange. Requests that have been inside the device since before count as such for the next one.
    pub fn restore(&self, before: Before) {
        *self.held.write() = before.held;
    }

    /// Acknowledged writes that were not flushed may be lost with the current device. To call before an exchange.
    pub fn note_loss(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
    }

    fn enter(&self) -> Arc<Held> {
        Arc::clone(&self.held.read())
    }
}

impl Before {
    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.held.device
    }

    /// Waits until no request is inside it; false when `cancelled` said so before.
    pub fn wait_unused(&self, cancelled: &dyn Fn() -> bool) -> bool {
        while Arc::strong_count(&self.held) > 1 {
            if cancelled() {
                return false;
            }
            std::thread::sleep(UNUSED_POLL);
        }
        true
    }
}

/// What keeps a disk or snapshot from being deleted: counted until dropped.
pub(crate) struct Client {
    switch: Arc<Switch>,
}

impl Client {
    /// Where it is connected.
    pub fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    fn new(switch: Arc<Switch>) -> Self {
        switch.clients.fetch_add(1, Ordering::AcqRel);
        Self { switch }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.switch.clients.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What is behind a switch, whatever its name is now.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Identity {
    /// A disk or snapshot of the native store.
    Native(u64),
    /// A disk of another maker's format by its folder, or a snapshot of it.
    Foreign {
        /// The folder.
        folder: String,
        /// The snapshot; `None` for the head.
        snapshot: Option<String>,
    },
}

/// The switches of everything that is open.
#[derive(Default)]
pub(crate) struct Switches {
    open: Mutex<BTreeMap<Identity, Weak<Switch>>>,
}

impl Switches {
    /// Counts a client of what `identity` names; `open` opens it when no client has it open.
    pub fn attach(&self, identity: Identity, open: impl FnOnce() -> Result<Arc<dyn Device>>) -> Result<Client> {
        let mut all = self.open.lock();
        if let Some(switch) = all.get(&identity).and_then(Weak::upgrade) {
            return Ok(Client::new(switch));
        }
        all.retain(|_, switch| switch.strong_count() > 0);
        let switch = Switch::new(open()?);
        all.insert(identity, Arc::downgrade(&switch));
        Ok(Client::new(switch))
    }

    /// The switch of what `identity` names, if a client has it open.
    pub fn get(&self, identity: &Identity) -> Option<Arc<Switch>> {
        self.open.lock().get(identity).and_then(Weak::upgrade)
    }

    /// True while anything has clients.
    pub fn in_use(&self) -> bool {
        self.open.lock().values().filter_map(Weak::upgrade).any(|switch| switch.clients() > 0)
    }

    /// How many clients it has.
    pub fn clients(&self, identity: &Identity) -> u64 {
        self.get(identity).map_or(0, |switch| switch.clients())
    }

    /// What was behind one identity is behind another from now on, perhaps in another datastore: a disk that moved.
    pub fn hand_over(&self, identity: &Identity, to: &Switches, new: Identity) {
        let switch = self.open.lock().remove(identity);
        if let Some(switch) = switch {
            to.open.lock().insert(new, switch);
        }
    }

    /// Refuses with `Busy` while clients have it open.
    pub fn refuse_in_use(&self, identity: &Identity, what: &str) -> Result<()> {
        match self.clients(identity) {
            0 => Ok(()),
            count => Err(Error::new(
                ErrorKind::Busy,
                format!("{what} is in use by {count} client(s); disconnect them first"),
            )),
        }
    }
}

/// A disk or snapshot as a client has it open.
pub struct SwitchedDevice {
    name: String,
    read_only: bool,
    switch: Arc<Switch>,
    _client: Client,
    told: Told,
}

/// Which losses a client was told of: how many there were when it attached or got the last error for one.
struct Told {
    by_flush: AtomicU64,
    /// Apart from flushes: a client that repeats a failed request of this kind takes only that request for lost.
    by_fua: AtomicU64,
}

/// What the plan of a read or the ticket of a flush keeps: the device that made it, and what that device keeps.
struct Origin {
    held: Arc<Held>,
    guard: Option<Box<dyn Any + Send>>,
}

impl SwitchedDevice {
    /// A client's view of what is behind a switch.
    pub fn new(name: impl Into<String>, read_only: bool, switch: Arc<Switch>) -> Self {
        Self::over(name, read_only, Client::new(switch))
    }

    /// The same for a client that is counted already.
    pub(crate) fn over(name: impl Into<String>, read_only: bool, client: Client) -> Self {
        let losses = || AtomicU64::new(client.switch.losses.load(Ordering::SeqCst));
        let told = Told { by_flush: losses(), by_fua: losses() };
        Self { name: name.into(), read_only, switch: Arc::clone(&client.switch), _client: client, told }
    }

    fn writer(&self) -> Result<Arc<Held>> {
        let held = self.switch.enter();
        // A device that refuses by itself says better why.
        if self.read_only && !held.device.read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open for reading only", self.name)));
        }
        Ok(held)
    }

    /// As [`SwitchedDevice::writer`], for a request that may ask to be durable on return.
    fn durable_writer(&self, fua: bool) -> Result<Arc<Held>> {
        let held = self.writer()?;
        if fua {
            self.tell_loss(&self.told.by_fua)?;
        }
        Ok(held)
    }

    /// An error, once, after acknowledged writes may have been lost. Called inside the device that the request goes to:
    /// asked before, it would miss a loss that is noted until the request gets there.
    fn tell_loss(&self, told: &AtomicU64) -> Result<()> {
        let losses = self.switch.losses.load(Ordering::SeqCst);
        if self.read_only || told.swap(losses, Ordering::SeqCst) == losses {
            return Ok(());
        }
        let text = format!(
            "{}: the disk was opened again after a failure, and writes that were acknowledged before and not flushed \
             may be lost; said once, later flushes count",
            self.name
        );
        Err(Error::new(ErrorKind::Io, text))
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
        let mut plan = held.device.plan_read(offset, length)?;
        let guard = plan.guard.take();
        plan.guard = Some(Box::new(Origin { held, guard }));
        Ok(plan)
    }

    fn finish_read(&self, plan: &mut ReadPlan) -> Result<Verdict> {
        match plan.guard.take().map(|guard| guard.downcast::<Origin>()) {
            Some(Ok(origin)) => {
                let Origin { held, guard } = *origin;
                plan.guard = guard;
                let verdict = held.device.finish_read(plan);
                if plan.guard.is_some() {
                    let guard = plan.guard.take();
                    plan.guard = Some(Box::new(Origin { held, guard }));
                }
                verdict
            }
            // Finished before: there is nothing left to verify against.
            Some(Err(guard)) => {
                plan.guard = Some(guard);
                self.switch.enter().device.finish_read(plan)
            }
            None => self.switch.enter().device.finish_read(plan),
        }
    }

    fn write(&self, offset: u64, data: SharedSlice, fua: bool) -> Result<()> {
        self.durable_writer(fua)?.device.write(offset, data, fua)
    }

    fn pressure(&self) -> u32 {
        self.switch.enter().device.pressure()
    }

    fn discard(&self, offset: u64, length: u64, fua: bool) -> Result<()> {
        self.durable_writer(fua)?.device.discard(offset, length, fua)
    }

    fn write_zeroes(&self, offset: u64, length: u64, allocate: bool, fua: bool) -> Result<()> {
        self.durable_writer(fua)?.device.write_zeroes(offset, length, allocate, fua)
    }

    fn begin_flush(&self) -> Result<FlushTicket> {
        let held = self.switch.enter();
        self.tell_loss(&self.told.by_flush)?;
        let mut ticket = held.device.begin_flush()?;
        let guard = ticket.guard.take();
        ticket.guard = Some(Box::new(Origin { held, guard }));
        Ok(ticket)
    }

    fn finish_flush(&self, mut ticket: FlushTicket) -> Result<()> {
        let origin = ticket.guard.take().and_then(|guard| guard.downcast::<Origin>().ok());
        let Origin { held, guard } = *origin.ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("{}: a flush was finished that was not asked for here", self.name))
        })?;
        ticket.guard = guard;
        held.device.finish_flush(ticket)
    }

    fn prefetch(&self, offset: u64, length: u64) -> Result<()> {
        self.switch.enter().device.prefetch(offset, length)
    }

    fn resize(&self, capacity: u64) -> Result<()> {
        self.writer()?.device.resize(capacity)
    }

    fn status(&self, offset: u64, length: u64, limit: usize) -> Result<Vec<StatusExtent>> {
        self.switch.enter().device.status(offset, length, limit)
    }

    fn dirty_bases(&self) -> Vec<String> {
        self.switch.enter().device.dirty_bases()
    }

    fn changed_since(&self, base: &str, offset: u64, length: u64, limit: usize) -> Result<Vec<DirtyExtent>> {
        self.switch.enter().device.changed_since(base, offset, length, limit)
    }

    fn read_plan(&self, offset: u64, length: usize) -> Result<ReadPlan> {
        self.switch.enter().device.read_plan(offset, length)
    }
}
