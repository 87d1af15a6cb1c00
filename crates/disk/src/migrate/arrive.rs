//! Disks that are used while their content arrives from a source outside the datastore, such as a backup.
//!
//! ```text
//!   overlay    native, hidden: writes of clients, and what has arrived
//!   source     read only: what has not arrived            merged up, then removed from the chain
//!   image      sparse, without data: makes the disk one in VMware's formats
//! ```
//!
//! 1. The disk exists once its overlay and its record are durable. Nothing of the source is read before.
//! 2. What has arrived is in the overlay and does not need the source any more, also after a restart. A range that a
//!    client has written is never filled from the source.
//! 3. The overlay becomes the disk by the record of a migration, which is committed when the overlay has all content
//!    durably. Before that, the disk can always be opened with its source; after a crash, the arrival continues.
//! 4. Damaged parts of the source are left out, however many they are, and all else arrives. While there are any, the
//!    disk keeps its source, and the error of the attempt says how much is missing.

use super::handover::Handover;
use super::import::{Overlay, Purpose};
use super::intent::{Copy, Intent, OVERLAY, Stage};
use super::live_source::{GRAIN, LiveSourceRecord};
use super::mirror::stopped;
use super::run::{Migration, Source, Target, Turned};
use crate::datastore::Datastore;
use crate::info::DiskInfo;
use crate::native::check_capacity;
use crate::switch::Client;
use chain::Chain;
use error::text::size;
use error::{Error, ErrorKind, Result};
use layer::image::ImageKind;
use layer::{Content, Layer};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use work::{NoProgress, Progress};

/// Bytes of one read that looks for damage.
const PROBE: u64 = 256 << 10;
/// Most extents of one query that looks for damage.
const EXTENTS: usize = 64;

/// A disk whose content will arrive.
#[derive(Clone, Debug)]
pub struct NewArrivingDisk {
    /// Name of the disk.
    pub name: String,
    /// Where the content is.
    pub source: LiveSourceRecord,
    /// Limit of the copy in bytes per second; 0 for none.
    pub rate: u64,
}

impl Datastore {
    /// The source from which the content of a disk arrives; `None` if there is none.
    pub fn arrival_source(&self, disk: &str) -> Result<Option<LiveSourceRecord>> {
        let Some(entry) = self.foreign.find(disk) else { return Ok(None) };
        Ok(Overlay::of(&entry.disk.record())?.and_then(|overlay| overlay.source().cloned()))
    }

    /// Records durably that the source of a disk's content, which was `from`, is at another place, and uses it there
    /// from now on. The caller has checked that the content is the same.
    ///
    /// # Errors
    /// `Busy` if the disk has another source, or none any more: nothing has changed.
    pub fn move_arrival_source(&self, disk: &str, from: &LiveSourceRecord, to: LiveSourceRecord) -> Result<()> {
        self.foreign.refuse_foreign_source(&to.title)?;
        if (&from.kind, from.capacity) != (&to.kind, to.capacity) {
            let text = format!("{} is not the content of disk '{disk}'", to.title);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let _only_one = self.imports.sources.lock();
        let other = || Error::new(ErrorKind::Busy, format!("the source of disk '{disk}' has changed: try again"));
        let entry = self.foreign.find(disk).ok_or_else(other)?;
        let overlay = Overlay::of(&entry.disk.record())?.filter(|overlay| overlay.source() == Some(from));
        let overlay = Overlay { purpose: Purpose::Arrival(to.clone()), ..overlay.ok_or_else(other)? };
        entry.disk.set_overlay(Some(overlay.encode()?))?;
        entry.move_source(to);
        Ok(())
    }

    /// Creates a disk that can be used at once, while its content arrives from a source. [`Datastore::start_imports`]
    /// starts the copy.
    ///
    /// # Errors
    /// `Exists` if there is a disk with the name; `Unsupported` if the datastore has no local folder. After `Stopped`
    /// the disk may exist, and may need its source.
    pub fn begin_arrival(&self, new: &NewArrivingDisk) -> Result<DiskInfo> {
        let name = &new.name;
        self.foreign.refuse_foreign_source(&new.source.title)?;
        let _name = self.reserve(name)?;
        check_capacity(name, new.source.capacity)?;
        let image = vmdk::NewDisk::new(name, new.source.capacity, ImageKind::Thin, None);
        let made = self.foreign.replica(&image, &NoProgress)?;
        let (folder, disk) = (made.folder.clone(), Arc::clone(&made.disk));
        drop(made);
        let above = self.put_overlay(&folder, &disk, new.rate, Purpose::Arrival(new.source.clone()));
        match above {
            Ok(()) => self.open_with_overlay(name, &folder, disk).map_err(|error| {
                let text = format!("disk '{name}' was made, and cannot be used until the datastore is opened again");
                Error::new(ErrorKind::Stopped, format!("{text}: {error}"))
            }),
            Err(error) => Err(self.undo_overlay(name, &folder, disk, error)),
        }
    }

    /// Copies all content that has not arrived into the overlay of a disk, and makes the overlay the disk.
    pub(super) fn arrive(&self, name: &str, overlay: &Overlay, progress: &dyn Progress) -> Result<DiskInfo> {
        self.end_whole_groups()?;
        let alone = self.uses.alone(name, "restored")?;
        let entry = self.disk_with_overlay(name, overlay)?;
        let head = || Ok(entry.head_device()? as Arc<dyn crate::Device>);
        let client = self.switches.attach(entry.identity(None), head)?.of_operation();
        let chain = entry.disk.chain()?;
        let original = Source::Foreign(self.foreign.original(entry)?);
        let identity = original.disk_identity()?;
        let intent = Intent {
            id: overlay.native.trim_start_matches(OVERLAY).to_owned(),
            stage: Stage::Committed,
            disk: name.to_owned(),
            source: Some(original.copy()),
            target: Copy::Overlay {},
            uuid: crate::names::uuid_text(&identity.uuid),
            created: identity.created,
            peer: None,
        };
        let target = Target::Native(self.native.hidden_replica(&overlay.native)?);
        let migration = Migration { home: self, away: None, name, source: original, target, intent, progress };
        match migration.complete_arrival(&client, &chain) {
            Ok(Turned::Committed) => {
                drop(client);
                drop(chain);
                migration.clean();
                drop(alone);
                self.disk(name)
            }
            Ok(Turned::Unnamed(error)) => Err(self.shut_unnamed(name, &error)),
            // The record of the migration may be durable. The disk must not be changed or deleted until the datastore
            // is opened again, because the record would then be applied to another disk with the name.
            Ok(Turned::Unknown(error)) => {
                alone.keep();
                Err(error)
            }
            Err(error) => Err(error),
        }
    }
}

impl Migration<'_> {
    /// Fills the overlay, commits the record and makes the overlay the disk.
    fn complete_arrival(&self, client: &Client, chain: &Arc<Chain>) -> Result<Turned> {
        // Opened first: after the commit nothing may fail but the name.
        let disk = self.target.replica().head()?;
        let mut unknown = None;
        let filled = fill(chain, self.name, self.progress, &mut || {
            let Err(error) = self.intents().put(&self.intent) else { return Ok(()) };
            if let Err(second) = self.intents().remove(&self.intent.id) {
                let text = format!(
                    "{error}, and then {second}: disk '{}' cannot be changed except by its clients until the datastore \
                     is opened again",
                    self.name
                );
                unknown = Some(Error::new(ErrorKind::Stopped, text));
            }
            Err(error)
        });
        if let Some(error) = unknown {
            return Ok(Turned::Unknown(error));
        }
        filled?;
        let beside = Arc::new(Handover::new(Arc::clone(chain), Arc::clone(&disk)));
        let named = self.take_place(client.switch(), beside, &[]);
        // No request uses the chain any more.
        client.switch().exchange(disk);
        Ok(named.map_or_else(Turned::Unnamed, |()| Turned::Committed))
    }
}

/// Remembers how far a merge has come.
struct Position<'a> {
    progress: &'a dyn Progress,
    at: AtomicU64,
}

impl Progress for Position<'_> {
    fn next(&self) -> Option<&dyn Progress> {
        Some(self.progress)
    }

    fn update(&self, done: u64, total: u64) {
        self.at.store(done, Ordering::Relaxed);
        self.progress.update(done, total);
    }
}

/// Copies what the top level of a chain lacks from the levels below, and removes these levels from the chain after
/// `commit` has succeeded. Leaves out damaged parts; if there are any, `commit` is not called.
fn fill(chain: &Chain, name: &str, progress: &dyn Progress, commit: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let keys = chain.keys();
    let [top, source, .., base] = keys[..] else {
        return Err(Error::new(ErrorKind::Corrupt, format!("disk '{name}' has no source of its content")));
    };
    let below = chain.layer(source).ok_or_else(stopped)?;
    let (mut from, mut damage): (u64, Option<Damage>) = (0, None);
    loop {
        let position = Position { progress, at: AtomicU64::new(from) };
        let merged = chain.merge_up(top, base, from, &position, &mut || match &damage {
            Some(damage) => Err(damage.error.repeated()),
            None => commit(),
        });
        let Err(error) = merged else { return Ok(()) };
        let reached = position.at.into_inner();
        let is_at_end = reached >= chain.capacity();
        match &damage {
            Some(damage) if is_at_end && error.kind() == ErrorKind::Corrupt => return Err(damage.describe(name)),
            _ if is_at_end || error.kind() != ErrorKind::Corrupt => return Err(error),
            _ => {}
        }
        let Some(part) = damaged_part(&*below, reached) else { return Err(error) };
        // The top gets whole grains, so the rest of a grain with damage cannot arrive either.
        let end = part.end.next_multiple_of(GRAIN).min(chain.capacity());
        if end <= from {
            return Err(error);
        }
        from = end;
        let damage = damage.get_or_insert(Damage { at: part.start, error, parts: 0, bytes: 0 });
        damage.parts += 1;
        damage.bytes += end - part.start;
    }
}

/// What an attempt had to leave out. Only sums are kept, so their number needs no limit.
struct Damage {
    /// The first damaged byte.
    at: u64,
    /// Why it cannot be read.
    error: Error,
    /// Number of damaged parts.
    parts: u64,
    bytes: u64,
}

impl Damage {
    /// The error of an arrival that had to leave this out.
    fn describe(&self, name: &str) -> Error {
        let (bytes, at) = (size(self.bytes), self.at);
        let parts = match self.parts {
            1 => format!("at byte {at}"),
            parts => format!("the first of {parts} parts at byte {at}"),
        };
        let text = format!(
            "{bytes} of disk '{name}' cannot be read from its source and gives errors until it is written; the rest \
             has arrived; {parts}: {}",
            self.error
        );
        Error::new(ErrorKind::Corrupt, text)
    }
}

/// The first unreadable part of a layer at or after `at`, if the next data there cannot be read.
fn damaged_part(layer: &dyn Layer, at: u64) -> Option<Range<u64>> {
    let (mut at, mut extents) = (at, Vec::new());
    let data = loop {
        if at >= layer.capacity() {
            return None;
        }
        extents.clear();
        layer.map(at..layer.capacity(), EXTENTS, &mut extents).ok()?;
        match extents.iter().find(|extent| extent.content == Content::Encoded) {
            Some(data) => break data.start..data.start + data.length.min(PROBE),
            None => at = extents.last().map(|last| last.start + last.length).filter(|end| *end > at)?,
        }
    };
    let mut at = data.start;
    while at < data.end {
        let unit_end = layer.damage_end(at);
        let mut buffer = vec![0; (unit_end.min(data.end) - at) as usize];
        if layer.read_encoded(at, &mut buffer).is_err() {
            return Some(at..unit_end);
        }
        at = unit_end;
    }
    None
}
