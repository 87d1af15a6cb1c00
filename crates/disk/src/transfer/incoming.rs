//! Disks that are being received from another datastore.
//!
//! ```text
//!              begin: record, then hidden disks          commit: one change of the catalog       complete
//!   (nothing) ----------------------------------> under way ------------------------------> disks ---> no record
//!                                                  ^     |  \
//!                                         resume   +-----+   \-- delete: hidden disks, then the record
//! ```
//!
//! 1. One session at a time uses a reception ([`Reception`]). Between sessions the reception is kept, also after
//!    restarts.
//! 2. When the datastore is opened, a hidden disk without a record is removed. If some of a record's hidden disks are
//!    missing or have another capacity, the record is removed with those that exist: either the reception was only
//!    beginning, or its disks have become visible.
//! 3. A sender that offers the disks again learns that they have arrived only after [`Reception::complete`]. Between
//!    [`Reception::commit`] and that, a machine may be made with the disks, and an error deletes them again.
//! 4. A sender that resumes names the same disks and snapshots by their identities, so the data that was received
//!    before is part of the data to send.

use super::record::{self, Arriving, Found, RANGES_MAX, RECEPTIONS_MAX, Record, Records, Unlisted};
use super::{DISKS_MAX, SEGMENT, SnapshotIdentity};
use crate::datastore::{Datastore, Reservation};
use crate::info::{DiskInfo, Provisioning};
use crate::names;
use crate::native::{Arrived, Native, check_capacity};
use backend::{BLOCK_SIZE, Buffer, clock};
use checksums::Checksums;
use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use store::engine::DiskIdentity;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// A disk that a sender offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewArrival {
    /// The name of the disk in this datastore.
    pub name: String,
    /// The identity of the disk in this datastore.
    pub uuid: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// The disk's provisioning type.
    pub provisioning: Provisioning,
    /// The snapshot that is sent.
    pub point: SnapshotIdentity,
    /// Whether a snapshot with that identity is taken of the received disk.
    pub keep: bool,
    /// Identities of snapshots on which the received disk may be based, the best first.
    pub bases: Vec<String>,
    /// Whether an existing disk with the name of the received disk may be updated. Not with an attachment.
    pub update: bool,
}

/// Disks that a sender offers together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewReception {
    /// Name of the sender, for display.
    pub sender: String,
    /// The disks to be received.
    pub disks: Vec<NewArrival>,
    /// The definition of a virtual machine that is sent with the disks.
    pub attachment: Option<String>,
    /// Whether only to resume an earlier reception; `NotFound` if there is none.
    pub resume_only: bool,
}

/// A reception, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceptionInfo {
    /// The reception's identity.
    pub id: String,
    /// The sender's name.
    pub sender: String,
    /// When the reception began, in seconds since 1970.
    pub begun: u64,
    /// Names of the disks.
    pub disks: Vec<String>,
    /// Bytes of data that are durable.
    pub bytes: u64,
    /// Whether a sender is connected.
    pub active: bool,
    /// Whether the definition of a virtual machine is received too.
    pub machine: bool,
}

/// Outcome of an offer.
pub enum Opened {
    /// All disks were received before, but the sender did not receive the reply to its commit.
    Already(Vec<DiskInfo>),
    /// The reception is open, so the sender may send data.
    Open(Arc<Reception>),
}

/// State of one disk of a reception.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// Identity of the snapshot on which the received disk is based.
    pub base: Option<String>,
    /// Ranges of segments that are received and need not be sent again.
    pub done: Vec<(u64, u64)>,
    /// Bytes of data in the segments of `done`.
    pub bytes: u64,
}

/// An open reception. One sender uses it, from any number of threads.
pub struct Reception {
    datastore: Arc<Datastore>,
    records: Records,
    /// Numbers of the hidden disks.
    ids: Vec<u64>,
    state: Mutex<Record>,
    /// Locked while a thread writes or removes the record.
    saving: Mutex<Saving>,
    /// The names of new disks. They are kept until a machine with these disks is complete, because its creation
    /// deletes the disks by their names if it fails.
    names: Mutex<Vec<Reservation>>,
}

/// What may be done with the record of an open reception.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Saving {
    /// It may be written.
    Open,
    /// The disks are visible: it must no longer be written, and is removed last.
    Committed,
    /// It is removed.
    Complete,
}

/// Recovers the receptions of a datastore that is being opened; returns the hidden disks to keep.
pub(crate) fn recover(native: &Native) -> Result<BTreeSet<String>> {
    let records = Records::new(Arc::clone(native.engine.directory()));
    let mut kept = BTreeSet::new();
    records.sweep()?;
    for found in records.all()? {
        let (id, whole) = match &found {
            Found::Record(record) => {
                // A clone of a base with another capacity is made first, and resized then.
                let mut disks = record.disks.iter().enumerate();
                let whole =
                    disks.all(|(index, disk)| native.hidden_capacity(&record.hidden(index)) == Some(disk.capacity));
                (record.id.clone(), whole)
            }
            Found::Newer(id) => (id.clone(), true),
            Found::Damaged(id, error) => {
                tracing::error!("a reception failed and its data is removed: {error}");
                (id.clone(), false)
            }
        };
        match whole {
            true => kept.extend(native.hidden(&record::hidden_prefix(&id))),
            false => records.remove(&id)?,
        }
    }
    Ok(kept)
}

/// `Busy` if a session uses the reception.
fn refuse_active(active: &BTreeSet<String>, record: &Record) -> Result<()> {
    match active.contains(&record.id) {
        true => {
            let text = format!("disk '{}' is being received already", record::title(record));
            Err(Error::new(ErrorKind::Busy, text))
        }
        false => Ok(()),
    }
}

fn parse(uuid: &str) -> Result<[u8; 16]> {
    names::parse_uuid(uuid)
        .ok_or_else(|| Error::new(ErrorKind::Invalid, format!("'{}' is not a UUID", uuid.escape_debug())))
}

impl NewReception {
    /// Returns an error for offers that cannot be received.
    fn check(&self) -> Result<()> {
        if self.disks.is_empty() || self.disks.len() > DISKS_MAX {
            let text = format!("{} disks at once: 1 to {DISKS_MAX} can be received", self.disks.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.attachment.is_some() && self.disks.iter().any(|disk| disk.update) {
            // An existing disk may belong to another machine.
            let text = "disks of a machine that is sent are always new: no existing disk is updated with it";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut names = BTreeSet::new();
        for disk in &self.disks {
            names::check_existing("disk", &disk.name)?;
            names::check_existing("snapshot", &disk.point.name)?;
            check_capacity(&disk.name, disk.capacity)?;
            parse(&disk.uuid)?;
            parse(&disk.point.uuid)?;
            disk.bases.iter().try_for_each(|base| parse(base).map(drop))?;
            if disk.bases.len() > super::BASES_MAX || !names.insert(&disk.name) {
                let text = format!("disk '{}' is offered twice, or with too many snapshots", disk.name);
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        Ok(())
    }

    fn is_resumed_by(&self, record: &Record) -> bool {
        let same = |(new, known): (&NewArrival, &Arriving)| {
            new.name == known.name
                && new.point == known.point
                && new.capacity == known.capacity
                && new.keep == known.keep
                // An existing disk is only changed on request, also if an earlier attempt requested that.
                && (new.update || !known.update)
                && known.base.as_ref().is_none_or(|base| new.bases.contains(base))
        };
        self.attachment.is_some() == record.attachment.is_some()
            && self.disks.len() == record.disks.len()
            && self.disks.iter().zip(&record.disks).all(same)
    }
}

impl Datastore {
    fn records(&self) -> Records {
        Records::new(Arc::clone(self.native.engine.directory()))
    }

    fn known_receptions(&self) -> Result<Vec<Record>> {
        let whole = |found| match found {
            Found::Record(record) => Some(*record),
            Found::Newer(_) | Found::Damaged(..) => None,
        };
        Ok(self.records().all()?.into_iter().filter_map(whole).collect())
    }

    /// Begins or resumes a reception: `Busy` if another sender uses it.
    pub fn receive(&self, new: &NewReception) -> Result<Opened> {
        new.check()?;
        // The lock serializes the creation of receptions.
        let mut active = self.receptions.lock();
        let known = self.known_receptions()?;
        let resumed = known.iter().find(|record| new.is_resumed_by(record));
        if let Some(record) = resumed {
            refuse_active(&active, record)?;
            let reception = self.go_on(new, record.clone())?;
            active.insert(record.id.clone());
            return Ok(Opened::Open(reception));
        }
        if let Some(there) = self.all_there(new)? {
            return Ok(Opened::Already(there));
        }
        if new.resume_only {
            return Err(Error::new(ErrorKind::NotFound, "no reception of these disks has begun"));
        }
        for disk in &new.disks {
            let other = known.iter().find(|record| record.disks.iter().any(|other| other.name == disk.name));
            if let Some(other) = other {
                let text = format!(
                    "the unfinished reception of another state of disk '{}' is kept; 'lamina receive delete {}' on \
                     the receiver deletes it",
                    disk.name, other.id
                );
                return Err(Error::new(ErrorKind::Exists, text));
            }
        }
        if known.len() >= RECEPTIONS_MAX {
            let text = format!("{RECEPTIONS_MAX} receptions are kept already; 'lamina receive list' shows them");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let reception = self.begin(new)?;
        active.insert(reception.id());
        Ok(Opened::Open(reception))
    }

    /// The disks of an offer, if all of them exist in this datastore and have the offered state already. `Busy` while a
    /// session still completes them, because an error may delete them again.
    pub fn arrived_already(&self, new: &NewReception) -> Result<Option<Vec<DiskInfo>>> {
        new.check()?;
        let active = self.receptions.lock();
        if let Some(record) = self.known_receptions()?.iter().find(|record| new.is_resumed_by(record)) {
            refuse_active(&active, record)?;
        }
        self.all_there(new)
    }

    fn all_there(&self, new: &NewReception) -> Result<Option<Vec<DiskInfo>>> {
        let mut there = Vec::with_capacity(new.disks.len());
        for disk in &new.disks {
            let Some(object) = self.native.visible(&disk.name) else { return Ok(None) };
            let point = self.native.snapshot_of_uuid(&parse(&disk.point.uuid)?);
            let pointed = point.is_some_and(|point| point.disk == object.id && object.parent == point.id);
            let made = object.uuid == parse(&disk.uuid)?;
            if !(made || disk.update && disk.keep && !new.resume_only) || disk.keep && !pointed {
                return Ok(None);
            }
            there.push(self.native.disk_info(object.id, false)?);
        }
        Ok(Some(there))
    }

    fn this(&self) -> Result<Arc<Datastore>> {
        self.this.upgrade().ok_or_else(|| Error::new(ErrorKind::Stopped, "the datastore is being closed"))
    }

    fn begin(&self, new: &NewReception) -> Result<Arc<Reception>> {
        let mut record = Record {
            id: names::uuid_text(&names::new_uuid()?),
            sender: new.sender.clone(),
            begun: clock::seconds(),
            disks: Vec::with_capacity(new.disks.len()),
            attachment: new.attachment.clone(),
        };
        let mut names = Vec::new();
        let mut bases = Vec::new();
        for disk in &new.disks {
            let there = self.native.visible(&disk.name);
            let update = there.is_some() && disk.update;
            let base = match there.filter(|_| disk.update) {
                Some(there) => {
                    let base = self.native.unchanged_base(&there)?;
                    if !disk.bases.contains(&names::uuid_text(&base.uuid)) {
                        let text = format!(
                            "disk '{}' cannot be updated: the sender's disk is not based on its \
                             snapshot '{}'",
                            disk.name, base.name
                        );
                        return Err(Error::new(ErrorKind::Exists, text));
                    }
                    Some(base)
                }
                None => {
                    names.push(self.reserve(&disk.name)?);
                    let known = |base: &String| self.native.snapshot_of_uuid(&names::parse_uuid(base)?);
                    disk.bases.iter().find_map(known)
                }
            };
            if update && !disk.keep {
                let text =
                    format!("disk '{}' cannot be updated: the sender does not keep the snapshot sent", disk.name);
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            record.disks.push(Arriving {
                name: disk.name.clone(),
                uuid: disk.uuid.clone(),
                capacity: disk.capacity,
                provisioning: if base.is_some() { Provisioning::Thin } else { disk.provisioning },
                point: disk.point.clone(),
                keep: disk.keep,
                base: base.as_ref().map(|base| names::uuid_text(&base.uuid)),
                update,
                done: Vec::new(),
                bytes: 0,
                unlisted: Unlisted::default(),
            });
            bases.push(base);
        }
        let records = self.records();
        records.put(&record)?;
        let made = record.disks.iter().zip(&bases).enumerate().try_for_each(|(index, (disk, base))| {
            self.native.make_hidden(&record.hidden(index), disk.capacity, disk.provisioning, base.as_ref())
        });
        if let Err(error) = made {
            self.forget(&record)?;
            return Err(error);
        }
        self.open_reception(record, names)
    }

    fn go_on(&self, new: &NewReception, mut record: Record) -> Result<Arc<Reception>> {
        // The identities of the new offer are stored, because the sender uses them to find the disks if the reply to
        // the commit is lost.
        for (disk, new) in record.disks.iter_mut().zip(&new.disks) {
            disk.uuid.clone_from(&new.uuid);
        }
        record.attachment.clone_from(&new.attachment);
        let new = record.disks.iter().filter(|disk| !disk.update);
        let names = new.map(|disk| self.reserve(&disk.name)).collect::<Result<Vec<_>>>()?;
        self.open_reception(record, names)
    }

    fn open_reception(&self, record: Record, names: Vec<Reservation>) -> Result<Arc<Reception>> {
        let id_of = |index: usize| {
            let hidden = record.hidden(index);
            self.native
                .hidden_id(&hidden)
                .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("the received disk '{hidden}' is gone")))
        };
        let ids = (0..record.disks.len()).map(id_of).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Reception {
            datastore: self.this()?,
            records: self.records(),
            ids,
            state: Mutex::new(record),
            saving: Mutex::new(Saving::Open),
            names: Mutex::new(names),
        }))
    }

    /// Removes the hidden disks, then the record.
    fn forget(&self, record: &Record) -> Result<()> {
        for index in 0..record.disks.len() {
            self.native.remove_hidden(&record.hidden(index))?;
        }
        self.records().remove(&record.id)
    }

    /// All receptions, active or not.
    pub fn receptions(&self) -> Result<Vec<ReceptionInfo>> {
        let active = self.receptions.lock();
        let info = |record: Record| ReceptionInfo {
            active: active.contains(&record.id),
            disks: record.disks.iter().map(|disk| disk.name.clone()).collect(),
            bytes: record.disks.iter().map(|disk| disk.bytes).sum(),
            machine: record.attachment.is_some(),
            id: record.id,
            sender: record.sender,
            begun: record.begun,
        };
        Ok(self.known_receptions()?.into_iter().map(info).collect())
    }

    /// Deletes a reception and its data. `Busy` while a sender is connected.
    pub fn delete_reception(&self, id: &str) -> Result<()> {
        let active = self.receptions.lock();
        let known = self.known_receptions()?.into_iter().find(|record| record.id == id);
        let record = known.ok_or_else(|| {
            let text = format!("there is no reception '{}'; 'lamina receive list' lists them", id.escape_debug());
            Error::new(ErrorKind::NotFound, text)
        })?;
        if active.contains(id) {
            let text =
                format!("reception '{id}' of disk '{}' is under way: stop its sender first", record::title(&record));
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.forget(&record)
    }
}

impl Reception {
    /// The identity of the reception.
    pub fn id(&self) -> String {
        self.state.lock().id.clone()
    }

    /// The state of each disk.
    pub fn progress(&self) -> Vec<Incoming> {
        let of = |disk: &Arriving| Incoming { base: disk.base.clone(), done: disk.done.clone(), bytes: disk.bytes };
        self.state.lock().disks.iter().map(of).collect()
    }

    /// The definition of a virtual machine that is received with the disks.
    pub fn attachment(&self) -> Option<String> {
        self.state.lock().attachment.clone()
    }

    /// Names of the disks.
    pub fn disk_names(&self) -> Vec<String> {
        self.state.lock().disks.iter().map(|disk| disk.name.clone()).collect()
    }

    /// The capacity of a disk; `Invalid` if there is no disk with that index.
    pub fn capacity(&self, disk: usize) -> Result<u64> {
        self.state
            .lock()
            .disks
            .get(disk)
            .map(|disk| disk.capacity)
            .ok_or_else(|| Error::new(ErrorKind::Invalid, format!("disk {disk} is not being received")))
    }

    /// The blocks of a byte range, which must begin at a block and end at a block or at the end of the disk.
    fn blocks(&self, disk: usize, offset: u64, length: u64) -> Result<(u64, Range<u64>)> {
        let capacity = self.capacity(disk)?;
        let end = offset.checked_add(length).filter(|end| *end <= capacity && length > 0);
        match end {
            Some(end) if offset.is_multiple_of(BLOCK) && (end.is_multiple_of(BLOCK) || end == capacity) => {
                Ok((self.ids[disk], offset / BLOCK..end.div_ceil(BLOCK)))
            }
            _ => {
                let text = format!("{length} bytes at {offset} are not whole blocks of a disk of {capacity} bytes");
                Err(Error::new(ErrorKind::Invalid, text))
            }
        }
    }

    /// Writes data. `sums` are the checksums of its whole blocks; a partial block at the end has none.
    pub fn write(&self, disk: usize, offset: u64, bytes: &[u8], sums: Option<&Checksums>) -> Result<()> {
        let (id, blocks) = self.blocks(disk, offset, bytes.len() as u64)?;
        let native = &self.datastore.native;
        let whole = bytes.len() / BLOCK_SIZE * BLOCK_SIZE;
        match sums {
            Some(sums) if sums.as_slice().len() == whole / BLOCK_SIZE => {
                native.write_hidden(id, blocks.start, &bytes[..whole], sums)?;
            }
            _ if whole > 0 => {
                native.write_hidden(id, blocks.start, &bytes[..whole], &Checksums::of(&bytes[..whole]))?;
            }
            _ => {}
        }
        if whole < bytes.len() {
            let mut last = Buffer::zeroed(1);
            last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
            native.write_hidden(id, blocks.end - 1, &last, &Checksums::of(&last))?;
        }
        Ok(())
    }

    /// Makes a range read as zeros.
    pub fn zero(&self, disk: usize, offset: u64, length: u64) -> Result<()> {
        let (id, blocks) = self.blocks(disk, offset, length)?;
        self.datastore.native.discard_hidden(id, blocks)
    }

    /// Marks a segment with `bytes` of data as received. The next [`Reception::save`] records it, unless it would begin
    /// a further range beyond [`RANGES_MAX`].
    pub fn finish_segment(&self, disk: usize, segment: u64, bytes: u64) -> Result<()> {
        let all = self.capacity(disk)?.div_ceil(SEGMENT);
        if segment >= all {
            let text = format!("there is no segment {segment} of disk {disk}");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut state = self.state.lock();
        let Some(disk) = state.disks.get_mut(disk) else { return Ok(()) };
        let after = disk.done.partition_point(|(from, _)| *from <= segment);
        if after > 0 && segment < disk.done[after - 1].1 || disk.unlisted.has(segment) {
            return Err(Error::new(ErrorKind::Invalid, format!("segment {segment} was sent twice")));
        }
        let before = after > 0 && disk.done[after - 1].1 == segment;
        let behind = disk.done.get(after).is_some_and(|(from, _)| *from == segment + 1);
        match (before, behind) {
            (true, true) => {
                disk.done[after - 1].1 = disk.done[after].1;
                disk.done.remove(after);
            }
            (true, false) => disk.done[after - 1].1 = segment + 1,
            (false, true) => disk.done[after].0 = segment,
            // A disk with data in many separate places has a range for each of them.
            (false, false) if disk.done.len() >= RANGES_MAX => {
                disk.unlisted.add(segment, bytes, all);
                return Ok(());
            }
            (false, false) => disk.done.insert(after, (segment, segment + 1)),
        }
        disk.bytes += bytes;
        Ok(())
    }

    /// Makes the received data durable and writes the record. Has no effect once the disks are visible: a record that
    /// is written then would prevent the next reception.
    pub fn save(&self) -> Result<()> {
        let saving = self.saving.lock();
        if *saving != Saving::Open {
            return Ok(());
        }
        let record = self.state.lock().clone();
        self.commit_data()?;
        self.records.put(&record)
    }

    fn commit_data(&self) -> Result<()> {
        // All hidden disks share one journal, so one commit covers them.
        match self.ids.first() {
            Some(id) => self.datastore.native.commit_hidden(*id),
            None => Ok(()),
        }
    }

    /// Makes the disks visible. `expected` has the numbers of segments and bytes that the sender has sent for each
    /// disk. The caller ensures that no other thread still writes to the reception, and calls [`Reception::complete`]
    /// when everything that belongs to the disks is durable.
    pub fn commit(&self, expected: &[(u64, u64)]) -> Result<Vec<DiskInfo>> {
        let mut saving = self.saving.lock();
        let record = self.state.lock().clone();
        let here = |disk: &Arriving| {
            let listed = disk.done.iter().map(|(from, to)| to - from).sum::<u64>();
            (listed + disk.unlisted.segments, disk.bytes + disk.unlisted.bytes)
        };
        let received: Vec<(u64, u64)> = record.disks.iter().map(here).collect();
        if received != expected {
            let text = format!(
                "what was received is not what was sent: segments and bytes are {received:?}, and should be {expected:?}"
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        let native = &self.datastore.native;
        self.commit_data()?;
        let mut arrived = Vec::with_capacity(record.disks.len());
        for (index, disk) in record.disks.iter().enumerate() {
            let identity = DiskIdentity { uuid: parse(&disk.point.uuid)?, created: disk.point.created };
            let base = disk.base.as_deref().map(parse).transpose()?;
            arrived.push(Arrived {
                hidden: record.hidden(index),
                name: disk.name.clone(),
                uuid: parse(&disk.uuid)?,
                snapshot: disk.keep.then(|| (disk.point.name.clone(), identity)),
                update_from: base.filter(|_| disk.update),
                provisioning: disk.provisioning,
            });
        }
        native.arrive(&arrived, clock::seconds())?;
        *saving = Saving::Committed;
        record.disks.iter().filter(|disk| !disk.update).for_each(|disk| self.datastore.give_defaults(&disk.name));
        let info = |disk: &Arriving| native.disk_info(native.find_disk(&disk.name)?.id, false);
        record.disks.iter().map(info).collect()
    }

    /// Removes the record of disks that are visible. From now on, a sender that offers them again learns that they have
    /// arrived. If the process is killed before, the next opening of the datastore removes the record.
    pub fn complete(&self) -> Result<()> {
        let mut saving = self.saving.lock();
        if *saving == Saving::Committed {
            self.names.lock().clear();
            self.records.remove(&self.id())?;
            *saving = Saving::Complete;
        }
        Ok(())
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        // The names are free before the reception seems to be, because the next session reserves them at once.
        self.names.lock().clear();
        // After an error between the two steps. A record without hidden disks would prevent the next reception.
        if let Err(error) = self.complete() {
            tracing::error!("the record of a reception is not removed before the next opening: {error}");
        }
        let id = self.state.lock().id.clone();
        self.datastore.receptions.lock().remove(&id);
    }
}
