//! A backup as the source of a disk that is used while it is restored: any range can be read at any time, from any
//! thread.
//!
//! 1. Bytes are returned only after the chunks that contain them were verified, as by a restore.
//! 2. A backup is opened by its identity, and never changes. So a source that was opened again has the same content.
//! 3. A missing pack of a repository that is there is damage. A missing repository is not: it may come back.
//! 4. Memory is bounded: [`READERS`] readers with the indexes of one pack of each backup, and [`DECODED_MAX`] chunks.

use crate::bucket::BucketAddress;
use crate::chain::{Blocks, Chain, SegmentPlan, blocks_of};
use crate::manifest::Description;
use crate::pack::{CHUNK, SEGMENT_BLOCKS};
use crate::place::RepositoryPlace;
use crate::repository::Repository;
use crate::seal::Key;
use backend::BLOCK_SIZE;
use disk::migrate::{DataRun, LiveSource, LiveSourceKind, LiveSourceRecord, NewArrivingDisk};
use disk::transfer::SEGMENT;
use disk::{Datastore, DiskInfo};
use error::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name of the kind of source in records: a backup in a folder.
const KIND: &str = "backup";
/// The name of the kind of source in records: a backup in a bucket. Versions that do not know buckets do not know the
/// kind either, and say so.
const BUCKET_KIND: &str = "backup in a bucket";
/// Number of threads that can read at the same time.
const READERS: usize = 4;
/// Most decompressed chunks that are kept, so that small reads of a chunk decompress it once.
const DECODED_MAX: usize = 32;
/// Most segments that one query of the runs covers.
const SEGMENTS_MAX: u64 = 64;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Where a repository is, in the record of a disk: a text or an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum RecordedPlace {
    Folder(PathBuf),
    /// Credentials are not recorded.
    Bucket(BucketAddress),
}

impl RecordedPlace {
    fn kind(&self) -> &'static str {
        match self {
            Self::Folder(_) => KIND,
            Self::Bucket(_) => BUCKET_KIND,
        }
    }

    /// The place; for a bucket with the credentials in the environment of this process.
    fn place(&self) -> RepositoryPlace {
        match self {
            Self::Folder(path) => RepositoryPlace::Folder(path.clone()),
            Self::Bucket(address) => RepositoryPlace::Bucket(address.clone(), None),
        }
    }
}

/// Where a backup is, in the record of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BackupLocation {
    /// The repository.
    repository: RecordedPlace,
    /// Identity of the backup.
    backup: String,
    /// The file of the key, for an encrypted backup.
    key: Option<PathBuf>,
    /// The record in the repository that protects the backup from deletion; `None` if it could not be written.
    reader: Option<String>,
}

/// Options of a restore of a disk that is used at once.
#[derive(Clone, Debug)]
pub struct LiveRestoreOptions<'a> {
    /// The repository. Credentials come from the environment of the process, because a server that is started later
    /// has no others.
    pub repository: &'a RepositoryPlace,
    /// The backup, named as in [`Repository::find`].
    pub which: &'a str,
    /// The file of the key of an encrypted backup.
    pub key: Option<&'a Path>,
    /// Name of the disk.
    pub name: &'a str,
    /// Limit of the copy in bytes per second; 0 for none.
    pub rate: u64,
    /// The datastore, for messages to users of the repository.
    pub datastore: String,
}

/// A disk that can be used while its content arrives from a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRestored {
    /// Identity of the backup.
    pub id: String,
    /// The disk.
    pub disk: String,
    /// The snapshot that was backed up, with the disk's name at that time.
    pub source: String,
    /// Capacity of the disk in bytes.
    pub capacity: u64,
    /// Whether the disk existed already, and its content was arriving from this backup.
    pub known: bool,
    /// Whether a server copies the content.
    pub served: bool,
    /// Why the backup is not protected from deletion.
    pub unprotected: Option<String>,
}

/// A backup in a folder as a source, to be registered by [`disk::migrate::register_live_source`].
pub const LIVE_SOURCE: LiveSourceKind = LiveSourceKind { name: KIND, open, release };
/// As [`LIVE_SOURCE`]: a backup in a bucket.
pub const LIVE_BUCKET_SOURCE: LiveSourceKind = LiveSourceKind { name: BUCKET_KIND, open, release };

fn decode(place: &str) -> Result<BackupLocation> {
    serde_json::from_str(place)
        .map_err(|error| Error::new(ErrorKind::Corrupt, format!("the record of the backup cannot be read: {error}")))
}

fn encode(place: &BackupLocation) -> Result<String> {
    serde_json::to_string(place)
        .map_err(|error| Error::new(ErrorKind::Invalid, format!("the record cannot be written: {error}")))
}

fn open(place: &str) -> Result<Arc<dyn LiveSource>> {
    let place = decode(place)?;
    let repository = place.repository.place().open()?;
    let key = place.key.as_deref().map(|path| Key::read(path).map(Arc::new)).transpose()?;
    Ok(Arc::new(LiveBackup::open(repository, &place.backup, key.as_ref())?))
}

fn release(place: &str) -> Result<()> {
    let place = decode(place)?;
    let Some(reader) = &place.reader else { return Ok(()) };
    place.repository.place().open()?.remove_reader(reader)
}

/// Makes a disk that can be used at once, while its content arrives from a backup in a repository. The same call for a
/// disk that is being restored from this backup changes only where the repository and the file of the key are.
///
/// # Errors
/// `NotFound` if there is no such backup; `Invalid` without the key of an encrypted backup; `Exists` if there is
/// another disk with the name.
pub fn restore_live(datastore: &Datastore, options: &LiveRestoreOptions<'_>) -> Result<LiveRestored> {
    let place = recorded(options.repository);
    let repository = place.place().open().map_err(|error| match place {
        RecordedPlace::Folder(_) => error,
        RecordedPlace::Bucket(_) => {
            error.context("a live restore uses the credentials in the environment of the server of the datastore")
        }
    })?;
    let manifests = Chain::manifests(&repository, options.which)?;
    let key = options.key.map(|path| Key::read(path).map(Arc::new)).transpose()?;
    // Also checks the key.
    drop(Chain::stored(&repository, &manifests, key.as_ref())?);
    let backup = &manifests[0].backup;
    let title = format!("backup {} of '{}' in '{}'", backup.id, backup.source(), repository.place());
    let mut restored = LiveRestored {
        id: backup.id.clone(),
        disk: options.name.to_owned(),
        source: backup.source(),
        capacity: backup.capacity,
        known: true,
        served: false,
        unprotected: None,
    };
    let ids: Vec<&str> = manifests.iter().map(|manifest| manifest.backup.id.as_str()).collect();
    let protect = || match repository.add_reader(&ids, options.name, &options.datastore) {
        Ok(reader) => Ok((Some(reader), None)),
        // Another command may be deleting the backup.
        Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) => Err(error),
        // Nothing can be written to a repository on a medium that is only read, so nothing is deleted there either.
        Err(error) => Ok((None, Some(error.to_string()))),
    };
    if let Some((source, known)) = arriving(datastore, options.name, place.kind(), &backup.id)? {
        let place = BackupLocation { reader: known.reader.clone(), ..location(&place, options, backup) };
        if place != known {
            restored.unprotected = move_source(datastore, options.name, &repository, protect, (source, title, place))?;
        }
        return Ok(restored);
    }
    let (reader, unprotected) = protect()?;
    restored.unprotected = unprotected;
    let place = BackupLocation { reader: reader.clone(), ..location(&place, options, backup) };
    let made = begin(datastore, options, title, backup, &place);
    // A disk that was made and could not be opened needs the backup when the datastore is opened again.
    if let (Err(failed), Some(reader)) = (&made, &reader)
        && failed.kind() != ErrorKind::Stopped
        && let Err(error) = repository.remove_reader(reader)
    {
        tracing::warn!("'{}' keeps a record of a restore that has not begun: {error}", repository.place());
    }
    made?;
    restored.known = false;
    Ok(restored)
}

fn recorded(place: &RepositoryPlace) -> RecordedPlace {
    match place {
        RepositoryPlace::Folder(path) => RecordedPlace::Folder(path.clone()),
        RepositoryPlace::Bucket(address, _) => RecordedPlace::Bucket(address.clone()),
    }
}

/// Where the options say that the backup is.
fn location(place: &RecordedPlace, options: &LiveRestoreOptions<'_>, backup: &Description) -> BackupLocation {
    BackupLocation {
        repository: place.clone(),
        backup: backup.id.clone(),
        key: options.key.filter(|_| backup.key.is_some()).map(Path::to_owned),
        reader: None,
    }
}

/// The source of a disk and its location, if the content of the disk arrives from this backup in a place of this kind.
fn arriving(
    datastore: &Datastore,
    disk: &str,
    kind: &str,
    backup: &str,
) -> Result<Option<(LiveSourceRecord, BackupLocation)>> {
    let Some(source) = datastore.arrival_source(disk)?.filter(|source| source.kind == kind) else { return Ok(None) };
    let known = decode(&source.place)?;
    Ok((known.backup == backup).then_some((source, known)))
}

/// Records another place of the source of a disk: the source as it was, its title and its place now. Returns why the
/// backup is not protected there from deletion. The former place is left as it is, because it may not answer.
fn move_source(
    datastore: &Datastore,
    disk: &str,
    repository: &Repository,
    protect: impl Fn() -> Result<(Option<String>, Option<String>)>,
    (source, title, mut place): (LiveSourceRecord, String, BackupLocation),
) -> Result<Option<String>> {
    // A repository that was moved has the reader's record, and a copy of the repository may lack it.
    let is_protected = place.reader.as_ref().is_some_and(|reader| repository.has_reader(reader));
    let (mut added, mut unprotected) = (None, None);
    if !is_protected {
        (added, unprotected) = protect()?;
        place.reader.clone_from(&added);
    }
    let to = LiveSourceRecord { title, place: encode(&place)?, ..source.clone() };
    let moved = datastore.move_arrival_source(disk, &source, to);
    // After any other error the record of the disk may name the new place.
    if let (Err(failed), Some(reader)) = (&moved, &added)
        && failed.kind() == ErrorKind::Busy
        && let Err(error) = repository.remove_reader(reader)
    {
        tracing::warn!("'{}' keeps a record of a restore that does not use it: {error}", repository.place());
    }
    moved.map(|()| unprotected)
}

fn begin(
    datastore: &Datastore,
    options: &LiveRestoreOptions<'_>,
    title: String,
    backup: &Description,
    place: &BackupLocation,
) -> Result<DiskInfo> {
    let kind = place.repository.kind().to_owned();
    let source = LiveSourceRecord { kind, title, place: encode(place)?, capacity: backup.capacity };
    datastore.begin_arrival(&NewArrivingDisk { name: options.name.to_owned(), source, rate: options.rate })
}

/// A chain, with the plan of the segment that was read last.
struct Reader {
    chain: Chain,
    planned: Option<Arc<SegmentPlan>>,
}

impl Reader {
    fn plan(&mut self, segment: u32) -> Result<Arc<SegmentPlan>> {
        if let Some(plan) = self.planned.as_ref().filter(|plan| plan.number == segment) {
            return Ok(Arc::clone(plan));
        }
        self.planned = None;
        let plan = Arc::new(self.chain.plan(segment)?);
        self.planned = Some(Arc::clone(&plan));
        Ok(plan)
    }
}

/// A chunk of a backup: position of the backup in the chain, and number of the chunk.
type ChunkKey = (usize, u32);

/// A backup that can be read at any place.
pub struct LiveBackup {
    repository: Repository,
    capacity: u64,
    readers: Vec<Mutex<Reader>>,
    /// Decompressed chunks, the one that was used last at the end.
    decoded: Mutex<VecDeque<(ChunkKey, Arc<Vec<u8>>)>>,
}

impl LiveBackup {
    /// Opens a backup of a repository, named as in [`Repository::find`].
    pub fn open(repository: Repository, which: &str, key: Option<&Arc<Key>>) -> Result<Self> {
        let manifests = Chain::manifests(&repository, which)?;
        let reader = || {
            let chain = Chain::stored(&repository, &manifests, key)?;
            Ok(Mutex::new(Reader { chain, planned: None }))
        };
        let readers = (0..READERS).map(|_| reader()).collect::<Result<Vec<_>>>()?;
        let capacity = manifests[0].backup.capacity;
        Ok(Self { repository, capacity, readers, decoded: Mutex::default() })
    }

    /// A reader that no other thread uses, if there is one: the one that has read the segment last, if possible.
    fn reader(&self, segment: u32) -> MutexGuard<'_, Reader> {
        let first = segment as usize % READERS;
        let order = (0..READERS).map(|place| &self.readers[(first + place) % READERS]);
        order.clone().find_map(|reader| reader.try_lock()).unwrap_or_else(|| self.readers[first].lock())
    }

    fn cached(&self, wanted: ChunkKey) -> Option<Arc<Vec<u8>>> {
        let mut decoded = self.decoded.lock();
        let at = decoded.iter().position(|(key, _)| *key == wanted)?;
        let found = decoded.remove(at)?;
        let blocks = Arc::clone(&found.1);
        decoded.push_back(found);
        Some(blocks)
    }

    fn keep(&self, key: ChunkKey, blocks: &Arc<Vec<u8>>) {
        let mut decoded = self.decoded.lock();
        if decoded.len() >= DECODED_MAX {
            decoded.pop_front();
        }
        decoded.push_back((key, Arc::clone(blocks)));
    }

    /// Reads whole blocks of one segment; `blocks` are their numbers in the segment.
    fn read_blocks(&self, segment: u32, blocks: Range<u64>, out: &mut [u8]) -> Result<()> {
        let mut reader = self.reader(segment);
        let plan = reader.plan(segment)?;
        out.fill(0);
        let mut filled = Blocks::default();
        for take in plan.takes() {
            let wanted = |block: u64| blocks.contains(&block) && plan.data.has(block);
            if !blocks_of(&take.chunk).any(|block| wanted(block) && !filled.has(block)) {
                continue;
            }
            let key = (take.level, take.chunk.number);
            let plain = match self.cached(key) {
                Some(plain) => plain,
                None => {
                    let plain = Arc::new(reader.chain.unpack(take)?);
                    self.keep(key, &plain);
                    plain
                }
            };
            for (block, content) in blocks_of(&take.chunk).zip(plain.chunks_exact(BLOCK_SIZE)) {
                if wanted(block) && !filled.has(block) {
                    filled.add(block);
                    let at = (block - blocks.start) as usize * BLOCK_SIZE;
                    out[at..at + BLOCK_SIZE].copy_from_slice(content);
                }
            }
        }
        Ok(())
    }

    /// Tells a missing pack from a missing repository.
    fn explained(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::NotFound if self.repository.is_there() => Error::new(ErrorKind::Corrupt, error.to_string()),
            _ => error,
        }
    }

    fn runs_of(&self, segment: u32, range: &Range<u64>, out: &mut Vec<DataRun>) -> Result<()> {
        let plan = self.reader(segment).plan(segment)?;
        let start = u64::from(segment) * SEGMENT;
        let end = range.end.min(start + SEGMENT);
        let mut at = range.start.max(start);
        let mut add = |length: u64, data: bool| match out.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.data == data => last.length += length,
            _ => out.push(DataRun { length, data }),
        };
        for run in plan.data.ranges() {
            let (from, to) = ((start + run.start * BLOCK).clamp(at, end), (start + run.end * BLOCK).clamp(at, end));
            add(from - at, false);
            add(to - from, true);
            at = to;
        }
        add(end - at, false);
        Ok(())
    }
}

impl LiveSource for LiveBackup {
    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn runs(&self, range: Range<u64>, most: usize) -> Result<Vec<DataRun>> {
        let mut runs = Vec::new();
        let first = range.start / SEGMENT;
        for segment in first..range.end.div_ceil(SEGMENT).min(first + SEGMENTS_MAX) {
            match self.runs_of(segment as u32, &range, &mut runs) {
                Ok(()) if runs.len() >= most => break,
                Ok(()) => {}
                // What is known so far is returned; the next query begins with this segment.
                Err(_) if !runs.is_empty() => break,
                Err(error) => return Err(self.explained(error)),
            }
        }
        runs.truncate(most.max(1));
        Ok(runs)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.capacity);
        let end = end.ok_or_else(|| Error::new(ErrorKind::Invalid, "a read past the end of the backup"))?;
        let (mut at, mut whole) = (offset, Vec::new());
        while at < end {
            let stop = ((at / CHUNK + 1) * CHUNK).min(end);
            let (segment, first) = (at / SEGMENT, at / SEGMENT * SEGMENT_BLOCKS);
            let blocks = at / BLOCK - first..stop.div_ceil(BLOCK) - first;
            whole.resize((blocks.end - blocks.start) as usize * BLOCK_SIZE, 0);
            self.read_blocks(segment as u32, blocks, &mut whole).map_err(|error| self.explained(error))?;
            let skip = (at % BLOCK) as usize;
            let length = (stop - at) as usize;
            let into = (at - offset) as usize;
            out[into..into + length].copy_from_slice(&whole[skip..skip + length]);
            at = stop;
        }
        Ok(())
    }

    fn unit_end(&self, at: u64) -> u64 {
        ((at / CHUNK + 1) * CHUNK).min(self.capacity)
    }
}

#[cfg(test)]
mod tests;
