//! Quotas and reservations: limits of what disks, and all disks with a label, may occupy.
//!
//! What counts is what a disk maps: its ranges that are no holes in block status. So overwrites are never refused, and
//! the figure means the same for all formats. Clients' writes, and what clients map by growing a disk, are charged
//! before they reach the device ([`crate::switch`]); what the datastore itself does for users (clones, conversions,
//! migrations, resizing) is not limited.
//!
//! ```text
//!   write ── holes of its range ── Gate::charge ── quotas of disk and labels ── reservations of others ── device
//! ```
//!
//! 1. Without a limit that concerns a disk, a write costs one load of an atomic.
//! 2. A disk's use is counted before the first charge, and before the next one after a user has resized or reverted it.
//!    It is counted again before a refusal, if it may be too high: after discards, failed writes, and writes that were
//!    charged at the same time.
//! 3. The use is never too low, except by the blocks at the two ends of a zeroed range, and by the rest of a grain that
//!    is larger than a block. So the slack of a quota is two blocks, or a grain, for each request in flight. A disk of
//!    which a part of the map is damaged cannot be counted. Its use is what was known last and what was written since,
//!    because the damage must not fail writes of what is not damaged, and least of all those of other disks.
//! 4. `charges` is locked for additions only, never while a disk is counted or the file system is queried.

use crate::device::{Allocation, Device};
use error::text::size;
use error::{Error, ErrorKind, Result};
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const BLOCK: u64 = backend::BLOCK_SIZE as u64;
/// Most extents of one query of block status.
const EXTENTS: usize = 4096;

/// Limits of a disk, or of all disks with a label. All sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Most bytes that may be mapped.
    #[serde(default)]
    pub quota: Option<u64>,
    /// Bytes that can be mapped whatever other disks write.
    #[serde(default)]
    pub reservation: Option<u64>,
}

impl Limits {
    /// Whether there is no limit.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Limits with their use, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitInfo {
    /// The disk, or the label as `key=value`.
    pub name: String,
    /// Whether the limits are those of a label.
    pub is_label: bool,
    /// The limits.
    pub limits: Limits,
    /// Bytes that the disks map; `None` if there is no limit, or if the disks are not counted since the datastore was
    /// opened, or a user has resized or reverted one of them, or if the map of one of them is damaged.
    pub used: Option<u64>,
    /// Number of disks.
    pub disks: u64,
    /// Whether the last write that needed new space was refused because of the quota.
    pub exceeded: bool,
}

/// What a disk maps.
#[derive(Default)]
struct Use {
    bytes: AtomicU64,
    /// Bytes that were charged since the datastore was opened.
    charged: AtomicU64,
    /// How often the datastore itself has changed what the disk maps.
    changes: AtomicU64,
    /// One more than the number of `changes` that `bytes` includes; 0 before the first count.
    counted: AtomicU64,
    /// Whether `bytes` may be too high.
    stale: AtomicBool,
    /// Whether the last count failed.
    unknown: AtomicBool,
    in_flight: AtomicU64,
    /// Bytes that were charged for the writes in flight.
    under_way: AtomicU64,
    /// Held while the disk is counted.
    counting: Mutex<()>,
}

impl Use {
    fn is_counted(&self) -> bool {
        self.counted.load(Ordering::Acquire) == self.changes.load(Ordering::Acquire) + 1
    }
}

/// Limits of a disk or label.
struct Budget {
    name: String,
    is_label: bool,
    limits: Limits,
    /// The disks, by UUID.
    members: Vec<(String, Arc<Use>)>,
    exceeded: AtomicBool,
}

impl Budget {
    fn used(&self) -> u64 {
        self.members.iter().fold(0, |sum, (_, of)| sum.saturating_add(of.bytes.load(Ordering::Relaxed)))
    }

    /// The part of the reservation that is not used yet; nothing if what a disk uses is unknown, because then all other
    /// disks would have to leave the whole reservation free.
    fn unused_reservation(&self) -> u64 {
        if self.members.iter().any(|(_, of)| of.unknown.load(Ordering::Relaxed)) {
            return 0;
        }
        self.limits.reservation.unwrap_or_default().saturating_sub(self.used())
    }

    fn has(&self, uuid: &str) -> bool {
        self.members.iter().any(|(member, _)| member == uuid)
    }

    /// The name of the label, or of the disk.
    fn title(&self, accounting: &dyn Accounting) -> String {
        let disk = if self.is_label { None } else { accounting.name(&self.name) };
        disk.unwrap_or_else(|| self.name.clone())
    }

    fn refusal(&self, accounting: &dyn Accounting, new: u64) -> Error {
        let quota = self.limits.quota.unwrap_or_default();
        let (what, edit) = match self.is_label {
            true => ("label", "lamina label limit"),
            false => ("disk", "lamina disk edit"),
        };
        let text = format!(
            "the quota of {what} '{}' is used up: {} of {}, and a write needs {} more; discard data in the guest, or \
             raise the quota with '{edit} --quota'",
            self.title(accounting),
            size(self.used()),
            size(quota),
            size(new)
        );
        Error::new(ErrorKind::NoSpace, text)
    }
}

/// What the quotas need from the datastore.
pub(crate) trait Accounting: Send + Sync {
    /// Counts the bytes that a disk maps.
    fn count(&self, uuid: &str) -> Result<u64>;

    /// Bytes that new data can take.
    fn free(&self) -> Result<u64>;

    /// The present name of a disk.
    fn name(&self, uuid: &str) -> Option<String>;

    /// The present names of all disks, by UUID.
    fn names(&self) -> BTreeMap<String, String>;
}

/// The limits that concern one disk; `None` if there are none.
#[derive(Default)]
pub(crate) struct GateSlot {
    limited: AtomicBool,
    gate: RwLock<Option<Arc<Gate>>>,
}

impl GateSlot {
    /// The gate, if the disk's writes are limited.
    pub fn gate(&self) -> Option<Arc<Gate>> {
        if !self.limited.load(Ordering::Relaxed) {
            return None;
        }
        self.gate.read().clone()
    }

    fn set(&self, gate: Option<Arc<Gate>>) {
        let limited = gate.is_some();
        *self.gate.write() = gate;
        self.limited.store(limited, Ordering::Relaxed);
    }
}

/// The limits of one disk's writes.
pub(crate) struct Gate {
    quotas: Arc<Quotas>,
    /// What the disk maps; `None` if no limit of its own or of its labels concerns it.
    own: Option<Arc<Use>>,
    /// Limits of the disk and its labels.
    budgets: Vec<Arc<Budget>>,
    /// Reservations of other disks and labels.
    reserved: Vec<Arc<Budget>>,
}

/// A charge for a write that is under way.
pub(crate) struct Charge {
    own: Option<Arc<Use>>,
    bytes: u64,
}

impl Charge {
    /// Reverts the charge of a write that was not carried out.
    fn undo(&self) {
        if let Some(own) = &self.own {
            let less = |bytes: u64| Some(bytes.saturating_sub(self.bytes));
            let _ = own.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Called if the write has failed: it may have mapped fewer bytes than it was charged for.
    pub fn failed(&self) {
        if let Some(own) = &self.own {
            own.stale.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            own.in_flight.fetch_sub(1, Ordering::Relaxed);
            own.under_way.fetch_sub(self.bytes, Ordering::AcqRel);
        }
    }
}

impl Gate {
    /// Charges `new` bytes for a write, before it is carried out.
    ///
    /// # Errors
    /// `NoSpace` if a quota does not allow the bytes, or if they would use space reserved for other disks.
    pub fn charge(&self, new: u64) -> Result<Charge> {
        if new > 0 {
            for budget in self.budgets.iter().chain(&self.reserved) {
                self.quotas.count_members(budget, false)?;
            }
        }
        match self.try_charge(new) {
            Err(budget) => {
                // The use may be too high.
                self.quotas.count_members(&budget, true)?;
                let accounting = self.quotas.accounting()?;
                self.try_charge(new).map_err(|budget| {
                    let error = budget.refusal(accounting, new);
                    if !budget.exceeded.swap(true, Ordering::Relaxed) {
                        tracing::warn!(%error, "a quota is used up");
                    }
                    error
                })
            }
            Ok(charge) => Ok(charge),
        }
        .and_then(|charge| match self.check_reservations(new) {
            Ok(()) => Ok(charge),
            Err(error) => {
                charge.undo();
                Err(error)
            }
        })
    }

    /// Adds the bytes to the use of the disk. Returns the limits that do not allow them.
    fn try_charge(&self, new: u64) -> std::result::Result<Charge, Arc<Budget>> {
        let Some(own) = &self.own else { return Ok(Charge { own: None, bytes: 0 }) };
        let _charges = self.quotas.charges.lock();
        if new > 0 {
            let exceeded = |budget: &&Arc<Budget>| {
                budget.limits.quota.is_some_and(|quota| budget.used().saturating_add(new) > quota)
            };
            if let Some(budget) = self.budgets.iter().find(exceeded) {
                return Err(Arc::clone(budget));
            }
            self.budgets.iter().for_each(|budget| budget.exceeded.store(false, Ordering::Relaxed));
        }
        if own.in_flight.fetch_add(1, Ordering::Relaxed) > 0 {
            // Another write may be charged for the same holes.
            own.stale.store(true, Ordering::Relaxed);
        }
        own.bytes.fetch_add(new, Ordering::Relaxed);
        own.charged.fetch_add(new, Ordering::Relaxed);
        own.under_way.fetch_add(new, Ordering::Relaxed);
        Ok(Charge { own: Some(Arc::clone(own)), bytes: new })
    }

    /// Fails if `new` bytes would use space that is reserved for other disks.
    fn check_reservations(&self, new: u64) -> Result<()> {
        let unused = || self.reserved.iter().fold(0u64, |sum, budget| sum.saturating_add(budget.unused_reservation()));
        if new == 0 || unused() == 0 {
            return Ok(());
        }
        let free = self.quotas.accounting()?.free()?;
        if new.saturating_add(unused()) <= free {
            return Ok(());
        }
        for budget in &self.reserved {
            self.quotas.count_members(budget, true)?;
        }
        if new.saturating_add(unused()) <= free {
            return Ok(());
        }
        // The client of a disk may be another tenant, so the text has neither the names of other disks nor sizes.
        let text = "the rest of the datastore's free space is reserved for other disks: free some space, or reduce a \
                    reservation ('lamina status' lists them)";
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    /// Called when the disk may map fewer bytes than were counted.
    pub fn may_shrink(&self) {
        if let Some(own) = &self.own {
            own.stale.store(true, Ordering::Relaxed);
        }
    }
}

/// Bytes of the holes in a range, widened to whole blocks.
pub(crate) fn holes(device: &dyn Device, offset: u64, length: u64) -> Result<u64> {
    let start = offset / BLOCK * BLOCK;
    let end = offset.saturating_add(length).next_multiple_of(BLOCK).min(device.capacity());
    sum(device, start..end, |allocation| allocation == Allocation::Hole)
}

/// Bytes that a disk maps.
pub(crate) fn mapped(device: &dyn Device) -> Result<u64> {
    sum(device, 0..device.capacity(), |allocation| allocation != Allocation::Hole)
}

fn sum(device: &dyn Device, range: std::ops::Range<u64>, counts: impl Fn(Allocation) -> bool) -> Result<u64> {
    let (mut at, mut sum) = (range.start, 0);
    while at < range.end {
        let before = at;
        for extent in device.status(at, range.end - at, EXTENTS)? {
            sum += if counts(extent.allocation) { extent.length } else { 0 };
            at += extent.length;
        }
        if at == before {
            let text = format!("{}: block status has no extent at offset {at}", device.name());
            return Err(Error::new(ErrorKind::Io, text));
        }
    }
    Ok(sum)
}

/// The limits that are in force, with their disks.
#[derive(Default)]
struct Current {
    budgets: Vec<Arc<Budget>>,
    uses: BTreeMap<String, Arc<Use>>,
}

/// A disk with limits or labels.
pub(crate) struct LimitedDisk<'a> {
    pub uuid: &'a str,
    pub labels: &'a BTreeMap<String, String>,
    pub limits: Limits,
}

/// All limits of a datastore.
#[derive(Default)]
pub(crate) struct Quotas {
    current: Mutex<Current>,
    charges: Mutex<()>,
    accounting: OnceLock<Box<dyn Accounting>>,
}

/// The label `key=value`.
pub(crate) fn label_text((key, value): (&String, &String)) -> String {
    format!("{key}={value}")
}

impl Quotas {
    /// Sets the interface to the datastore. Only the first call has an effect.
    pub fn set_accounting(&self, accounting: Box<dyn Accounting>) {
        let _ = self.accounting.set(accounting);
    }

    fn accounting(&self) -> Result<&dyn Accounting> {
        let missing =
            || Error::new(ErrorKind::Stopped, "the datastore is being opened: its disks cannot be counted yet");
        self.accounting.get().map(|accounting| &**accounting).ok_or_else(missing)
    }

    /// Puts limits in force: those of disks, and those of labels.
    pub fn set<'a>(&self, disks: impl Iterator<Item = LimitedDisk<'a>>, labels: &BTreeMap<String, Limits>) {
        let mut current = self.current.lock();
        let old = std::mem::take(&mut *current);
        let use_of = |uuid: &str| old.uses.get(uuid).cloned().unwrap_or_default();
        let mut members: BTreeMap<&String, Vec<(String, Arc<Use>)>> =
            labels.keys().map(|label| (label, Vec::new())).collect();
        let make = |name: &str, is_label: bool, limits: Limits, members: Vec<(String, Arc<Use>)>| {
            let before = old.budgets.iter().find(|budget| budget.name == name && budget.is_label == is_label);
            let exceeded = before.is_some_and(|budget| budget.exceeded.load(Ordering::Relaxed));
            let name = name.to_owned();
            Arc::new(Budget { name, is_label, limits, members, exceeded: AtomicBool::new(exceeded) })
        };
        for disk in disks {
            let texts: Vec<String> = disk.labels.iter().map(label_text).collect();
            let limited = texts.iter().any(|text| labels.contains_key(text));
            if disk.limits.is_none() && !limited {
                continue;
            }
            let own = use_of(disk.uuid);
            current.uses.insert(disk.uuid.to_owned(), Arc::clone(&own));
            if !disk.limits.is_none() {
                let member = vec![(disk.uuid.to_owned(), Arc::clone(&own))];
                current.budgets.push(make(disk.uuid, false, disk.limits, member));
            }
            for text in &texts {
                if let Some(members) = members.get_mut(text) {
                    members.push((disk.uuid.to_owned(), Arc::clone(&own)));
                }
            }
        }
        for (label, members) in members {
            current.budgets.push(make(label, true, labels[label], members));
        }
    }

    /// Puts the limits in force that concern a disk, for clients that have it open.
    pub fn set_gate(self: &Arc<Self>, uuid: &str, slot: &GateSlot) {
        let current = self.current.lock();
        let (budgets, others): (Vec<_>, Vec<_>) = current.budgets.iter().cloned().partition(|budget| budget.has(uuid));
        let reserved: Vec<_> = others.into_iter().filter(|budget| budget.limits.reservation.is_some()).collect();
        let own = current.uses.get(uuid).cloned();
        drop(current);
        let gate = Gate { quotas: Arc::clone(self), own, budgets, reserved };
        slot.set((!gate.budgets.is_empty() || !gate.reserved.is_empty()).then(|| Arc::new(gate)));
    }

    /// Called after a disk was changed by the datastore itself: the disk is counted before the next charge.
    pub fn has_changed(&self, uuid: &str) {
        if let Some(of) = self.current.lock().uses.get(uuid) {
            of.changes.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Counts the disks of a budget that are not counted since their last change, or, with `again`, those whose use may
    /// be too high.
    fn count_members(&self, budget: &Budget, again: bool) -> Result<()> {
        for (uuid, of) in &budget.members {
            let wanted = || !of.is_counted() || again && of.stale.load(Ordering::Relaxed);
            if !wanted() {
                continue;
            }
            let _counting = of.counting.lock();
            if !wanted() {
                continue;
            }
            of.stale.store(false, Ordering::Relaxed);
            let changes = of.changes.load(Ordering::Acquire);
            let (before, under_way) = {
                let _charges = self.charges.lock();
                (of.charged.load(Ordering::Relaxed), of.under_way.load(Ordering::Acquire))
            };
            let accounting = self.accounting()?;
            let bytes = match accounting.count(uuid) {
                Ok(bytes) => Some(bytes),
                // The disk was deleted, and the limits are being changed.
                Err(error) if error.kind() == ErrorKind::NotFound => Some(0),
                Err(error) => {
                    if !of.unknown.load(Ordering::Relaxed) {
                        let disk = accounting.name(uuid).unwrap_or_else(|| uuid.clone());
                        tracing::error!(
                            disk, %error,
                            "what this disk maps cannot be counted: its limits apply to what was known"
                        );
                    }
                    None
                }
            };
            of.unknown.store(bytes.is_none(), Ordering::Relaxed);
            let Some(bytes) = bytes else {
                // It is counted again before a refusal, not for each write.
                of.stale.store(true, Ordering::Relaxed);
                of.counted.store(changes + 1, Ordering::Release);
                continue;
            };
            let _charges = self.charges.lock();
            // The count may or may not include bytes of the writes that were under way when it began, and of those that
            // were charged while it ran. These bytes are added, so that the use is never too low.
            let uncertain = of.charged.load(Ordering::Relaxed) - before + under_way;
            if uncertain > 0 {
                of.stale.store(true, Ordering::Relaxed);
            }
            of.bytes.store(bytes.saturating_add(uncertain), Ordering::Relaxed);
            of.counted.store(changes + 1, Ordering::Release);
        }
        Ok(())
    }

    /// All limits with their use. With `count`, counts the disks that were not counted yet, or whose use may be too
    /// high.
    pub fn info(&self, count: bool) -> Result<Vec<LimitInfo>> {
        let budgets = self.current.lock().budgets.clone();
        if budgets.is_empty() {
            return Ok(Vec::new());
        }
        let names = self.accounting()?.names();
        let mut all = Vec::new();
        for budget in budgets {
            if count {
                self.count_members(&budget, true)?;
            }
            let is_known = |of: &Use| of.is_counted() && !of.unknown.load(Ordering::Relaxed);
            let is_counted = budget.members.iter().all(|(_, of)| is_known(of));
            let name = match budget.is_label {
                true => Some(&budget.name),
                false => names.get(&budget.name),
            };
            // Without a name, the disk was deleted.
            let Some(name) = name else { continue };
            all.push(LimitInfo {
                name: name.clone(),
                is_label: budget.is_label,
                limits: budget.limits,
                used: is_counted.then(|| budget.used()),
                disks: budget.members.len() as u64,
                exceeded: budget.exceeded.load(Ordering::Relaxed),
            });
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests;
