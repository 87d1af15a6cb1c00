//! Disks and snapshots: records of at most 508 bytes in the pages of the catalog, all of them in memory (about 300
//! bytes each).
//!
//! Slot layout (little-endian):
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 1 | state: 0 free, 1 disk, 2 snapshot, 3 snapshot not sealed, 4 trash |
//! | 1 | 1 | provisioning: 0 thin, 1 zeroed thick, 2 eager zeroed thick |
//! | 2 | 1 | flags: bit 0: the object is being made (removed at opening unless resumed) |
//! | 3 | 1 | length of the name in bytes |
//! | 8 | 8 | id |
//! | 16 | 8 | root node, all ones: none |
//! | 24 | 8 | capacity in bytes |
//! | 32 | 8 | disk that a snapshot belongs to |
//! | 40 | 8 | parent snapshot, 0: none |
//! | 48 | 8 | origin: the snapshot that a linked clone started from, 0: none |
//! | 56 | 8 | creation time, seconds since 1970 |
//! | 64 | 8 | blocks reserved for a thick disk |
//! | 72 | 16 | UUID |
//! | 88 | 255 | name, UTF-8 |

use crate::pages::{HEADER_SIZE, PageFile, PageKey, Pages, patiently};
use crate::tree::{LOGICAL_LIMIT, NodeId, PHYSICAL_LIMIT};
use crate::{Error, ErrorKind, Result, is_lost};
use backend::BLOCK_SIZE;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a slot of the catalog.
pub const SLOT_SIZE: usize = (BLOCK_SIZE - HEADER_SIZE) / SLOTS_PER_PAGE;
/// Slots of a page of the catalog.
pub const SLOTS_PER_PAGE: usize = 8;
/// The longest name, in bytes.
pub const NAME_MAX: usize = 255;
const NAME_AT: usize = 88;
const _: () = assert!(NAME_AT + NAME_MAX <= SLOT_SIZE);
const NO_ROOT: u64 = u64::MAX;
/// Ids are smaller than this.
const ID_LIMIT: u64 = 1 << 62;

/// The kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectState {
    /// A disk with a writable head.
    Disk,
    /// A snapshot.
    Snapshot,
    /// A snapshot with last writes that are still being moved from the buffer into the map.
    Unsealed,
    /// Deleted; its tree is being dropped.
    Trash,
}

/// When a disk allocates its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provisioning {
    /// Each block is allocated when it is first written.
    Thin,
    /// All blocks are reserved at creation, and each is zeroed when it is first written.
    ZeroedThick,
    /// All blocks are reserved and zeroed at creation.
    EagerZeroedThick,
}

/// A disk or snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Unique in the datastore, and never reused.
    pub id: u64,
    /// Whether the object is a disk, a snapshot, or deleted.
    pub state: ObjectState,
    /// Of a snapshot: the type of its disk.
    pub provisioning: Provisioning,
    /// Whether the content is not complete yet: a full clone or an eager zeroed disk that is still being written.
    pub incomplete: bool,
    /// Root of the object's tree.
    pub root: Option<NodeId>,
    /// Capacity in bytes.
    pub capacity: u64,
    /// Of a snapshot: the disk to which the snapshot belongs.
    pub disk: u64,
    /// The snapshot on which the object is based.
    pub parent: u64,
    /// Of a linked clone: the snapshot from which the clone was made.
    pub origin: u64,
    /// Creation time, in seconds since 1970.
    pub created: u64,
    /// Of a thick disk: blocks reserved for writes that need new blocks.
    pub reserved: u64,
    /// UUID of the object.
    pub uuid: [u8; 16],
    /// Name of the object.
    pub name: String,
}

impl Object {
    /// True for snapshots, sealed or not.
    pub fn is_snapshot(&self) -> bool {
        matches!(self.state, ObjectState::Snapshot | ObjectState::Unsealed)
    }

    /// The capacity in blocks, rounded up.
    pub fn size_in_blocks(&self) -> u64 {
        self.capacity.div_ceil(BLOCK_SIZE as u64)
    }

    /// The stored form of the object.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; NAME_AT + self.name.len()];
        out[0] = match self.state {
            ObjectState::Disk => 1,
            ObjectState::Snapshot => 2,
            ObjectState::Unsealed => 3,
            ObjectState::Trash => 4,
        };
        out[1] = match self.provisioning {
            Provisioning::Thin => 0,
            Provisioning::ZeroedThick => 1,
            Provisioning::EagerZeroedThick => 2,
        };
        out[2] = u8::from(self.incomplete);
        out[3] = self.name.len() as u8;
        let root = self.root.map_or(NO_ROOT, |node| node.0);
        let words = [self.id, root, self.capacity, self.disk, self.parent, self.origin, self.created, self.reserved];
        for (i, word) in words.into_iter().enumerate() {
            out[8 + 8 * i..16 + 8 * i].copy_from_slice(&word.to_le_bytes());
        }
        out[72..88].copy_from_slice(&self.uuid);
        out[NAME_AT..].copy_from_slice(self.name.as_bytes());
        out
    }

    /// Reads the stored form; `None` when the slot is free.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>> {
        let damaged = |what: &str| {
            Error::new(ErrorKind::Corrupt, format!("a catalog record has an impossible {what}; run 'lamina check'"))
        };
        if bytes.len() < NAME_AT {
            return Err(damaged("length"));
        }
        let state = match bytes[0] {
            0 => return Ok(None),
            1 => ObjectState::Disk,
            2 => ObjectState::Snapshot,
            3 => ObjectState::Unsealed,
            4 => ObjectState::Trash,
            _ => return Err(damaged("state")),
        };
        let provisioning = match bytes[1] {
            0 => Provisioning::Thin,
            1 => Provisioning::ZeroedThick,
            2 => Provisioning::EagerZeroedThick,
            _ => return Err(damaged("provisioning type")),
        };
        let word = |i: usize| {
            let at = 8 + 8 * i;
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
        };
        let root = (word(1) != NO_ROOT).then_some(NodeId(word(1)));
        if root.is_some_and(|root| root.0 >= PHYSICAL_LIMIT) {
            return Err(damaged("root"));
        }
        // Ids count up from 1: these limits keep every sum over them from overflowing.
        if word(0) == 0 || [0, 3, 4, 5].into_iter().any(|i| word(i) >= ID_LIMIT) {
            return Err(damaged("id"));
        }
        if word(2).div_ceil(BLOCK_SIZE as u64) > LOGICAL_LIMIT || word(7) > LOGICAL_LIMIT {
            return Err(damaged("size"));
        }
        let name = bytes.get(NAME_AT..NAME_AT + usize::from(bytes[3])).ok_or_else(|| damaged("name length"))?;
        let name = std::str::from_utf8(name).map_err(|_| damaged("name"))?;
        Ok(Some(Self {
            id: word(0),
            state,
            provisioning,
            incomplete: bytes[2] & 1 != 0,
            root,
            capacity: word(2),
            disk: word(3),
            parent: word(4),
            origin: word(5),
            created: word(6),
            reserved: word(7),
            uuid: bytes[72..88].try_into().expect("sixteen bytes"),
            name: name.to_owned(),
        }))
    }
}

#[derive(Clone)]
struct Held {
    object: Object,
    slot: u64,
}

/// All objects of a datastore.
#[derive(Clone, Default)]
pub struct Catalog {
    objects: FxHashMap<u64, Held>,
    disks: BTreeMap<String, u64>,
    snapshots: BTreeMap<(u64, String), u64>,
    trash: BTreeSet<u64>,
    /// Deleted objects that are not in `trash` for now, because the medium could not read their trees.
    left: BTreeSet<u64>,
    free_slots: BTreeSet<u64>,
    slots: u64,
    dirty: BTreeSet<u64>,
    next_id: u64,
    reserved: u64,
    /// Pages that could not be read, and why. Their records are unknown, and the pages are not overwritten.
    lost: BTreeMap<u64, String>,
    /// Records decoded from the bytes of pages that failed their checksum, with their slots.
    unproven: Vec<(u64, Object)>,
}

impl Catalog {
    /// Reads all records; `slots` is the number in the superblock. If a page is damaged or unreadable, only its own
    /// records are missing.
    pub fn open(pages: &mut Pages, slots: u64, next_id: u64) -> Result<Self> {
        let mut catalog = Self { slots, next_id, ..Self::default() };
        for first in (0..slots).step_by(SLOTS_PER_PAGE) {
            match patiently(|| whole_page(pages, first)) {
                Ok(()) => catalog.read_page(pages, first)?,
                Err(error) if is_lost(&error) => catalog.lose_page(pages, first, &error),
                Err(error) => return Err(error),
            }
        }
        Ok(catalog)
    }

    fn read_page(&mut self, pages: &mut Pages, first: u64) -> Result<()> {
        let page = pages.get(slot_page(first))?;
        for slot in first..(first + SLOTS_PER_PAGE as u64).min(self.slots) {
            match Object::decode(slot_bytes(page, slot))? {
                None => {
                    self.free_slots.insert(slot);
                }
                Some(object) => {
                    if object.id == 0 || object.id >= self.next_id || self.objects.contains_key(&object.id) {
                        return Err(Error::new(
                            ErrorKind::Corrupt,
                            format!("catalog slot {slot} has the impossible id {}; run 'lamina check'", object.id),
                        ));
                    }
                    self.index(&object);
                    self.objects.insert(object.id, Held { object, slot });
                }
            }
        }
        Ok(())
    }

    fn lose_page(&mut self, pages: &mut Pages, first: u64, error: &Error) {
        let key = slot_page(first);
        tracing::error!(%error, "a page of the catalog is damaged: its disks and snapshots are missing");
        self.lost.insert(key.number(), error.to_string());
        // No slot of the damaged page is used, not even a free one.
        self.slots = self.slots.max(first + SLOTS_PER_PAGE as u64);
        let Some(raw) = pages.read_raw(key) else { return };
        for slot in first..(first + SLOTS_PER_PAGE as u64).min(self.slots) {
            if let Ok(Some(object)) = Object::decode(slot_bytes(&raw, slot)) {
                self.unproven.push((slot, object));
            }
        }
    }

    /// Pages that could not be read, and why.
    pub fn lost(&self) -> &BTreeMap<u64, String> {
        &self.lost
    }

    /// Whether an object with this id may have had its record on a damaged page.
    pub fn may_have_lost(&self, id: u64, next_id: u64) -> bool {
        !self.lost.is_empty() && id < next_id && self.find(id).is_none()
    }

    /// The records decoded from the bytes of damaged pages.
    pub fn unproven(&self) -> impl Iterator<Item = &Object> {
        self.unproven.iter().map(|(_, object)| object)
    }

    /// Adds the record of an object from a damaged page, for reading only. False if the record conflicts with others.
    pub fn admit_unproven(&mut self, id: u64) -> bool {
        let Some((slot, object)) = self.unproven.iter().find(|(_, object)| object.id == id).cloned() else {
            return false;
        };
        if object.id >= self.next_id || self.objects.contains_key(&id) {
            return false;
        }
        self.index(&object);
        self.objects.insert(id, Held { object, slot });
        true
    }

    /// Number of slots, used or free, for the superblock.
    pub fn slots(&self) -> u64 {
        self.slots
    }

    /// The next id to assign, for the superblock.
    pub fn next_id(&self) -> u64 {
        self.next_id
    }

    /// A new id for an object.
    pub fn allocate_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Number of blocks reserved for all thick disks.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    fn index(&mut self, object: &Object) {
        self.reserved += object.reserved;
        match object.state {
            ObjectState::Disk => {
                self.disks.insert(object.name.clone(), object.id);
            }
            ObjectState::Snapshot | ObjectState::Unsealed => {
                self.snapshots.insert((object.disk, object.name.clone()), object.id);
            }
            ObjectState::Trash => {
                self.trash.insert(object.id);
            }
        }
    }

    fn unindex(&mut self, object: &Object) {
        self.reserved -= object.reserved;
        match object.state {
            ObjectState::Disk => {
                self.disks.remove(&object.name);
            }
            ObjectState::Snapshot | ObjectState::Unsealed => {
                self.snapshots.remove(&(object.disk, object.name.clone()));
            }
            ObjectState::Trash => {
                self.trash.remove(&object.id);
                self.left.remove(&object.id);
            }
        }
    }

    /// The object with an id.
    pub fn get(&self, id: u64) -> Result<&Object> {
        self.find(id).ok_or_else(|| Error::new(ErrorKind::NotFound, format!("object {id} does not exist any more")))
    }

    /// The object with an id, unless the object was deleted, because the tree of a deleted object is dropped part by
    /// part.
    pub fn whole(&self, id: u64) -> Result<&Object> {
        let object = self.get(id)?;
        if object.state == ObjectState::Trash {
            return Err(Error::new(ErrorKind::NotFound, "the disk or snapshot was deleted meanwhile"));
        }
        Ok(object)
    }

    /// The object with an id, if it exists.
    pub fn find(&self, id: u64) -> Option<&Object> {
        self.objects.get(&id).map(|held| &held.object)
    }

    /// A disk by name.
    pub fn disk(&self, name: &str) -> Option<&Object> {
        self.disks.get(name).and_then(|id| self.find(*id))
    }

    /// A snapshot by name.
    pub fn snapshot(&self, disk: u64, name: &str) -> Option<&Object> {
        self.snapshots.get(&(disk, name.to_owned())).and_then(|id| self.find(*id))
    }

    /// All disks by name.
    pub fn disks(&self) -> impl Iterator<Item = &Object> {
        self.disks.values().filter_map(|id| self.find(*id))
    }

    /// The snapshots of a disk by name.
    pub fn snapshots_of(&self, disk: u64) -> impl Iterator<Item = &Object> {
        self.snapshots.range((disk, String::new())..(disk + 1, String::new())).filter_map(|(_, id)| self.find(*id))
    }

    /// Every object, in unspecified order.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.values().map(|held| &held.object)
    }

    /// One of the deleted objects that wait to be dropped.
    pub fn first_trash(&self) -> Option<u64> {
        self.trash.first().copied()
    }

    /// The deleted objects that wait to be dropped, without those of [`Catalog::left`].
    pub fn trash(&self) -> impl Iterator<Item = &Object> {
        self.trash.iter().filter_map(|id| self.find(*id))
    }

    /// Stops dropping a deleted object, because its tree cannot be read. After an I/O error a later read may succeed,
    /// so the object waits for [`Catalog::take_left_again`]; otherwise it stays until the datastore is opened again.
    pub fn leave_trash(&mut self, id: u64, error: &Error) {
        if self.trash.remove(&id) && error.kind() == ErrorKind::Io {
            self.left.insert(id);
        }
    }

    /// The deleted objects that are not dropped for now, because the medium could not read their trees.
    pub fn left(&self) -> impl Iterator<Item = u64> {
        self.left.iter().copied()
    }

    /// Continues to drop a deleted object whose tree can be read again.
    pub fn take_left_again(&mut self, id: u64) {
        if self.left.remove(&id) {
            self.trash.insert(id);
        }
    }

    /// Adds or replaces an object.
    pub fn put(&mut self, object: Object) {
        self.next_id = self.next_id.max(object.id + 1);
        let slot = match self.objects.remove(&object.id) {
            Some(held) => {
                self.unindex(&held.object);
                held.slot
            }
            None => self.free_slots.pop_first().unwrap_or_else(|| {
                self.slots += 1;
                self.slots - 1
            }),
        };
        self.index(&object);
        self.dirty.insert(slot);
        self.objects.insert(object.id, Held { object, slot });
    }

    /// Changes an object.
    pub fn update(&mut self, id: u64, change: impl FnOnce(&mut Object)) -> Result<()> {
        let mut object = self.get(id)?.clone();
        change(&mut object);
        self.put(object);
        Ok(())
    }

    /// Sets a root without updating the indexes by name: this is the most frequent change.
    pub fn set_root(&mut self, id: u64, root: Option<NodeId>) {
        if let Some(held) = self.objects.get_mut(&id)
            && held.object.root != root
        {
            held.object.root = root;
            self.dirty.insert(held.slot);
        }
    }

    /// Removes an object.
    pub fn remove(&mut self, id: u64) {
        if let Some(held) = self.objects.remove(&id) {
            self.unindex(&held.object);
            self.dirty.insert(held.slot);
            self.free_slots.insert(held.slot);
        }
    }

    /// Number of records changed since the last checkpoint.
    pub fn changed(&self) -> u64 {
        self.dirty.len() as u64
    }

    /// Records which pages [`Catalog::store`] will need, so that they can be read ahead.
    pub fn survey_store(&self, pages: &mut Pages) {
        for slot in &self.dirty {
            pages.peek(slot_page(*slot));
        }
    }

    /// Has the next checkpoint write all records of a damaged page from memory.
    pub fn renew_page(&mut self, pages: &mut Pages, number: u64) {
        pages.replace(PageKey::new(PageFile::Catalog, number));
        let first = number * SLOTS_PER_PAGE as u64;
        self.dirty.extend(first..(first + SLOTS_PER_PAGE as u64).min(self.slots));
    }

    /// Copies the changed records into their cached pages, as a step of a checkpoint.
    pub fn store(&mut self, pages: &mut Pages) -> Result<()> {
        if self.dirty.is_empty() {
            return Ok(());
        }
        let by_slot: FxHashMap<u64, u64> = self.objects.values().map(|held| (held.slot, held.object.id)).collect();
        // A record stays marked as changed until its page is updated: if the page has another version, this fails, and
        // a later checkpoint tries it again. A lost page marks further records.
        while let Some(slot) = self.dirty.first().copied() {
            let page = match pages.get_mut(slot_page(slot)) {
                Ok(page) => page,
                // All records of the page are in memory.
                Err(error) if is_lost(&error) => {
                    tracing::error!(%error, "a lost page of the catalog is rewritten from memory");
                    self.renew_page(pages, slot_page(slot).number());
                    continue;
                }
                Err(error) => return Err(error),
            };
            let at = slot_offset(slot);
            page.0[at..at + SLOT_SIZE].fill(0);
            if let Some(held) = by_slot.get(&slot).and_then(|id| self.objects.get(id)) {
                let bytes = held.object.encode();
                page.0[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            self.dirty.remove(&slot);
        }
        Ok(())
    }
}

/// Fails if the page of a slot cannot be read or was never written.
fn whole_page(pages: &mut Pages, slot: u64) -> Result<()> {
    let key = slot_page(slot);
    pages.get(key)?;
    if !pages.is_unwritten(key) {
        return Ok(());
    }
    // The superblock counts the slots of this page, so a page of zeros is damage.
    let text = format!("{key} holds zeros only; run 'lamina check --repair' on the datastore");
    Err(Error::new(ErrorKind::Corrupt, text))
}

fn slot_page(slot: u64) -> PageKey {
    PageKey::new(PageFile::Catalog, slot / SLOTS_PER_PAGE as u64)
}

fn slot_offset(slot: u64) -> usize {
    HEADER_SIZE + (slot % SLOTS_PER_PAGE as u64) as usize * SLOT_SIZE
}

fn slot_bytes(page: &backend::Block, slot: u64) -> &[u8] {
    let at = slot_offset(slot);
    &page.0[at..at + SLOT_SIZE]
}

#[cfg(test)]
mod tests;
