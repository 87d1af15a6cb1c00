//! Snapshots: a name for the state of the head, and a new delta for further writes.
//!
//! ```text
//! announce    the record names the delta's files
//! make        the head gets the CID that it keeps; the empty delta is made, with this CID as its parent CID
//! commit      the record has the snapshot, and the delta as head: the empty delta does not change the content
//! push        from now on writes are made in the delta
//! finish      the old head is opened for reading only
//! ```
//!
//! 1. A crash before the commit leaves the disk as it was; a crash after it leaves the snapshot taken.
//! 2. The head gets a new CID for this opening before the delta records it, so no later write changes the CID.
//! 3. To snapshot several disks at one point in time, every disk's record is committed first; then all disks are
//!    frozen, in one order, pushed, and released. A failure before the push is undone on all of them. Their records are
//!    separate files, so a power cut between the commits may leave some disks with the snapshot and others without; the
//!    deltas are empty in this case. The caller records which snapshots belong together.
//! 4. If the record cannot be restored, writes continue in the old head, and the restored record is the one in memory.
//!    It is written before the next operation, and when the disk is closed. If the process ends before that, the
//!    next opening finds the snapshot with the content that the head had at the end.

use crate::create::check_name;
use crate::disk::{Disk, Operation};
use crate::line::{Level, Line};
use crate::record::{ImageOwnership, Node, Pending, Record, SNAPSHOTS_MAX, SnapshotRecord};
use crate::{DeltaFormat, Error, ErrorKind, Result};
use backend::clock;
use layer::descriptor::{ContentId, CreateType, Descriptor};
use layer::image::{Image, NewImage, NewParent, OpenOptions, Place, create, parent_hint};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Parameters of a new snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewSnapshot {
    /// Name of the snapshot.
    pub name: String,
    /// Description of the snapshot.
    pub description: String,
    /// The folder of the new head; `None` for the folder of the record.
    pub folder: Option<PathBuf>,
    /// The format of the new head; `None` for the disk's usual one.
    pub delta: Option<DeltaFormat>,
    /// The UID of the snapshot; `None` for the next free UID. `Busy` if the next free UID differs from this UID.
    pub uid: Option<u32>,
    /// When the snapshot was taken, in seconds since 1970, for a copy of another snapshot; `None` for the present time.
    pub created: Option<u64>,
}

impl NewSnapshot {
    /// A snapshot with this name and default parameters.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }
}

/// Information about a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Name of the snapshot.
    pub name: String,
    /// The number of the snapshot in VMware's list of snapshots.
    pub uid: u32,
    /// The name of the snapshot on which this one is based.
    pub parent: Option<String>,
    /// When the snapshot was taken: seconds since 1970.
    pub created: u64,
    /// Capacity at that time, in bytes.
    pub capacity: u64,
    /// Whether the head is based on the snapshot.
    pub current: bool,
    /// Description of the snapshot.
    pub description: String,
    /// Names of the snapshot's linked clones.
    pub clones: Vec<String>,
}

/// A snapshot that is committed in the record, before the delta is pushed.
struct Prepared<'a> {
    disk: &'a Disk,
    line: Arc<Line>,
    before: Record,
    image: Arc<Image>,
    node: u32,
    _operation: Operation<'a>,
}

/// Takes a snapshot of each disk, all at one point in time: the snapshot of a disk includes no write that began after
/// that point in time on another disk. `between` is called while all writes wait, before the writes of any disk
/// continue in its new delta. If `between` fails, its error is returned, and no snapshot is taken.
pub fn snapshot_group(of: &[(Arc<Disk>, NewSnapshot)], between: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let mut order: Vec<&(Arc<Disk>, NewSnapshot)> = of.iter().collect();
    // The same order in every group prevents deadlocks between groups.
    order.sort_by_key(|(disk, _)| disk.uuid());
    let mut prepared = Vec::with_capacity(order.len());
    for (disk, new) in order {
        match disk.noting(|| disk.prepare(new)) {
            Ok(one) => prepared.push(one),
            Err(error) => {
                prepared.into_iter().for_each(Prepared::take_back);
                return Err(error);
            }
        }
    }
    let (keys, outcome) = take_point(&prepared, between);
    let mut outcome = outcome;
    let mut keys = keys.into_iter();
    let mut left = Vec::new();
    for one in prepared {
        match keys.next() {
            Some(key) => {
                let done = one.disk.noting(|| one.line.chain.flush());
                one.finish(key);
                outcome = outcome.and(done);
            }
            None => left.push(one),
        }
    }
    left.into_iter().for_each(Prepared::take_back);
    outcome
}

/// Freezes all disks, and pushes their new tops. Returns the new levels of the disks that were pushed: all or none,
/// unless a push failed.
fn take_point(
    prepared: &[Prepared<'_>],
    between: &mut dyn FnMut() -> Result<()>,
) -> (Vec<chain::LevelKey>, Result<()>) {
    let mut keys = Vec::with_capacity(prepared.len());
    let mut push = || {
        let frozen = prepared.iter().map(|one| one.line.chain.freeze()).collect::<Result<Vec<_>>>()?;
        between()?;
        for (one, chain) in prepared.iter().zip(frozen) {
            keys.push(chain.push(Arc::clone(one.image.layer()))?.0);
        }
        Ok(())
    };
    let outcome = push();
    if let Err(error) = &outcome {
        prepared.iter().for_each(|one| one.disk.doubt(error));
    }
    (keys, outcome)
}

impl Disk {
    /// Takes a snapshot of the head. Returns how long writers had to wait.
    pub fn snapshot(&self, new: &NewSnapshot) -> Result<Duration> {
        self.noting(|| {
            let prepared = self.prepare(new)?;
            match prepared.line.chain.push_unflushed(Arc::clone(prepared.image.layer())) {
                Ok((key, pause)) => {
                    // If only this flush fails, writes go to the delta all the same, and the record is kept.
                    let flushed = self.noting(|| prepared.line.chain.flush());
                    prepared.finish(key);
                    flushed.map(|()| pause)
                }
                Err(error) => {
                    prepared.take_back();
                    Err(error)
                }
            }
        })
    }

    /// The snapshots, oldest first.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        let record = self.record();
        let current = record.current().map(|snapshot| snapshot.uid);
        let clones: Vec<_> = self.live_clones(&record).collect();
        let shown = record.snapshots.iter().map(|snapshot| Snapshot {
            name: snapshot.name.clone(),
            uid: snapshot.uid,
            parent: record.snapshot_before(snapshot).map(|before| before.name.clone()),
            created: snapshot.created / 1_000_000,
            capacity: snapshot.capacity,
            current: Some(snapshot.uid) == current,
            description: snapshot.description.clone(),
            clones: clones.iter().filter(|clone| clone.node == snapshot.node).map(|clone| clone.name.clone()).collect(),
        });
        shown.collect()
    }

    /// The steps of a snapshot before its point in time.
    fn prepare(&self, new: &NewSnapshot) -> Result<Prepared<'_>> {
        check_name("snapshot", &new.name)?;
        let operation = self.begin("a snapshot")?;
        let before = self.record();
        self.check_writable(&before, "snapshot")?;
        if before.snapshots.iter().any(|snapshot| snapshot.name == new.name) {
            let text = format!("disk '{}' has a snapshot '{}' already", before.name, new.name);
            return Err(Error::new(ErrorKind::Exists, text));
        }
        let uid = before.next_uid();
        if new.uid.is_some_and(|wanted| wanted != uid) {
            let text = format!("disk '{}' got another snapshot meanwhile; try again", before.name);
            return Err(Error::new(ErrorKind::Busy, text));
        }
        if before.snapshots.len() >= SNAPSHOTS_MAX {
            let text = format!("disk '{}' has {SNAPSHOTS_MAX} snapshots, which is the limit", before.name);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let line = self.head_line()?;
        let levels = line.levels().len();
        if levels >= before.tunables.levels_max {
            let text = format!(
                "disk '{}' has {levels} levels, and its limit is {}: delete snapshots, consolidate, or raise the limit",
                before.name, before.tunables.levels_max
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let folder = match &new.folder {
            None => None,
            Some(path) => {
                let text = || Error::new(ErrorKind::Invalid, format!("the path '{}' is not UTF-8", path.display()));
                let real = path.canonicalize();
                let real = real.map_err(|error| Error::io(format!("looking for '{}'", path.display()), error))?;
                let home = self.home.path().is_some_and(|home| home == real);
                if home { None } else { Some(real.to_str().ok_or_else(text)?.to_owned()) }
            }
        };
        let top = line.expect(before.head)?;
        top.image.renew_content()?;
        let capacity = line.chain.capacity();
        let format = new.delta.unwrap_or_else(|| before.delta.holding(capacity));
        let (image, node) =
            self.make_delta(&before, before.head, Some(&top.image), folder, format, capacity, "snapshot")?;
        let mut after = self.record();
        let id = node.id;
        after.pending = None;
        after.head = id;
        after.nodes.push(node);
        after.last_uid = before.last_uid.max(uid);
        after.snapshots.push(SnapshotRecord {
            name: new.name.clone(),
            listed: None,
            uid,
            node: before.head,
            created: new.created.map_or_else(clock::microseconds, |seconds| seconds.saturating_mul(1_000_000)),
            capacity,
            description: new.description.clone(),
        });
        let prepared = Prepared { disk: self, line, before, image: Arc::new(image), node: id, _operation: operation };
        match self.commit(after) {
            Ok(()) => Ok(prepared),
            Err(error) => {
                // The record still announces the files of the delta: see `settle`.
                prepared.take_back();
                Err(error)
            }
        }
    }

    /// Makes an empty delta above an image of a new disk, as its head, and ends the creation of the disk.
    pub(crate) fn begin_above(&self, below: u32, delta: DeltaFormat, capacity: u64, operation: &str) -> Result<()> {
        let (image, node) = self.make_delta(&self.record(), below, None, None, delta, capacity, operation)?;
        image.layer().close()?;
        drop(image);
        let mut after = self.record();
        after.head = node.id;
        after.nodes.push(node);
        after.pending = None;
        self.commit(after)
    }

    /// Makes an empty delta above an image, announced in the record, and opens it for writing. The caller then commits
    /// a record with the returned node.
    #[expect(clippy::too_many_arguments, reason = "every caller passes all of these")]
    pub(crate) fn make_delta(
        &self,
        record: &Record,
        parent: u32,
        open: Option<&Image>,
        folder: Option<String>,
        format: DeltaFormat,
        capacity: u64,
        operation: &str,
    ) -> Result<(Image, Node)> {
        let (name, made) = self.name_delta(record, folder.as_deref(), format)?;
        let mut announced = record.clone();
        let fate = record.pending.as_ref().and_then(|pending| pending.fate);
        announced.pending = Some(Pending { made, fate, ..Pending::new(operation) });
        self.commit(announced)?;
        let node = Node {
            id: record.next_id(),
            parent: Some(parent),
            folder,
            descriptor: name,
            format: None,
            standing: ImageOwnership::Made,
            accepted: None,
            replay: false,
        };
        match self.make_announced(record, parent, open, &node, format, capacity) {
            Ok(image) => Ok((image, node)),
            Err(error) => {
                if fate.is_none()
                    && let Err(second) = self.finish_pending()
                {
                    tracing::warn!(%second, "an unfinished image is removed when the disk is opened next");
                }
                Err(error)
            }
        }
    }

    fn make_announced(
        &self,
        record: &Record,
        parent: u32,
        open: Option<&Image>,
        node: &Node,
        format: DeltaFormat,
        capacity: u64,
    ) -> Result<Image> {
        let folder = self.folder(record, node.folder.as_deref())?;
        let below = self.place(record, record.node(parent)?)?;
        let descriptor = match open.and_then(Image::descriptor) {
            Some(descriptor) => Some(descriptor),
            None => self.descriptor_of(record, record.node(parent)?)?,
        };
        // An image without a descriptor has no CID. The child records the CID of a disk that was never written.
        let descriptor = descriptor.unwrap_or_else(|| {
            let mut none = Descriptor::base(CreateType::Other("custom".to_owned()), Vec::new());
            none.content = ContentId::INITIAL;
            none
        });
        let hint = parent_hint(&folder, &below);
        let image = NewImage::new(&node.descriptor, capacity, format.kind()).above(NewParent { descriptor, hint });
        let random = &mut || (self.options.random)();
        create(&folder, &image, random, &work::NoProgress)?;
        let options = OpenOptions { writable: true, ..self.open_options() };
        Image::open(Place { folder, name: node.descriptor.clone() }, &options)
    }
}

impl Record {
    /// The UID of the next snapshot: that after the last one given, or the lowest unused one if VMware's list has given
    /// the largest. A record with a UID twice could not be read.
    pub fn next_uid(&self) -> u32 {
        let is_unused = |uid: &u32| self.snapshots.iter().all(|snapshot| snapshot.uid != *uid);
        self.last_uid.checked_add(1).or_else(|| (1..=u32::MAX).find(is_unused)).unwrap_or(u32::MAX)
    }
}

impl Prepared<'_> {
    /// Completes a snapshot after the push: the old head is opened again, for reading only.
    fn finish(&self, key: chain::LevelKey) {
        self.line.pushed(Level { node: self.node, image: Arc::clone(&self.image), key, closed: false });
        if let Err(error) = self.disk.set_reading(&self.line, self.before.head) {
            // The snapshot is durable, and the old head stays readable through its present opening.
            self.disk.doubt(&error);
            tracing::warn!(%error, "the image below a snapshot could not be closed");
        }
        self.disk.write_list();
    }

    /// Undoes a snapshot before the push. What cannot be done now is done by the disk's next operation.
    fn take_back(self) {
        let disk = self.disk;
        if let Err(error) = disk.noting(|| self.undo()) {
            tracing::warn!(%error, disk = disk.name(), "a failed snapshot is not undone yet");
        }
    }

    /// Restores the record, and removes the delta.
    fn undo(self) -> Result<()> {
        let mut record = self.before.clone();
        let delta = self.disk.record().nodes.into_iter().find(|node| node.id == self.node);
        if let Some(node) = delta {
            let made = self.disk.files(&record, &node);
            record.pending = Some(Pending { made, ..Pending::new("snapshot") });
            if let Err(error) = self.disk.commit(record.clone()) {
                // A stopped chain changes nothing below the delta: the next opening finds the snapshot complete.
                if self.line.chain.failure().is_none() {
                    self.disk.leave_unrecorded(record);
                }
                return Err(error);
            }
        }
        drop(self.image);
        self.disk.finish_pending()
    }
}

impl Disk {
    /// Replaces the writable opening of a level below the top by a read-only one.
    pub(crate) fn set_reading(&self, line: &Line, node: u32) -> Result<()> {
        let old = line.expect(node)?;
        if !old.image.layer().writable() {
            return Ok(());
        }
        if !old.closed {
            line.close(&old)?;
        }
        let image = Arc::new(self.open_image(&self.record(), node, false)?);
        line.exchange(node, image)
    }
}
