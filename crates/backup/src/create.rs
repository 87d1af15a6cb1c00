//! Making a backup: the segments with content are read, compressed and collected into packs, which a sink receives in
//! order.
//!
//! 1. The segments and their blocks depend only on the snapshot and the parent, so an interrupted backup continues at
//!    the segment after the last complete pack.
//! 2. A block of zeros is not stored: without a parent it is left out, with a parent it is an entry of the index.
//! 3. At most one segment and one pack are in memory, besides a chunk for each thread.

use crate::manifest::{Description, Manifest, PackRecord, Parent, segments};
use crate::pack::{BlockRun, Builder, CHUNK, CHUNK_BLOCKS, Chunk, Codec, Head, Index, PACK_FULL, Zeros};
use crate::seal::Key;
use backend::{BLOCK_SIZE, clock};
use checksums::checksum;
use disk::transfer::{Extent, Outgoing, SEGMENT, SnapshotIdentity, new_identity};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use work::{Progress, Throttle, Throttled};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes of one read: what fits into the processor's cache.
const READ: u64 = 256 << 10;
/// Most threads that read and compress.
const THREADS_MAX: usize = 8;

/// The level of zstd if the user chooses none.
pub const LEVEL_DEFAULT: i32 = 3;
/// The highest level of zstd that needs no more than a few megabytes of memory for each thread.
pub const LEVEL_MAX: i32 = 19;

/// Options of a backup.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions<'a> {
    /// Level of zstd, from 1 to [`LEVEL_MAX`].
    pub level: i32,
    /// Limit in bytes of data per second; 0 for none.
    pub rate: u64,
    /// A pack with this many bytes takes no further segment; at most [`PACK_FULL`].
    pub pack: usize,
    /// The key with which data is encrypted.
    pub key: Option<&'a Arc<Key>>,
}

impl Default for CreateOptions<'_> {
    fn default() -> Self {
        Self { level: LEVEL_DEFAULT, rate: 0, pack: PACK_FULL, key: None }
    }
}

/// The result of a backup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Created {
    /// The backup's identity.
    pub id: String,
    /// The disk.
    pub disk: String,
    /// The snapshot.
    pub snapshot: String,
    /// The snapshot on which the backup is based; `None` if it has all data.
    pub based_on: Option<String>,
    /// Capacity of the disk in bytes.
    pub capacity: u64,
    /// Bytes of data before compression.
    pub data: u64,
    /// Bytes that are zero in the snapshot, but not in the parent.
    pub zeros: u64,
    /// Bytes stored.
    pub stored: u64,
    /// Stored bytes that an interrupted attempt had written.
    pub resumed: u64,
    /// Whether the snapshot was backed up before, so that nothing was done.
    pub already: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Created {
    /// The result for a backup that exists.
    pub fn already(manifest: &Manifest) -> Self {
        Self { already: true, ..Self::of(manifest, 0, Instant::now()) }
    }

    fn of(manifest: &Manifest, resumed: u64, begun: Instant) -> Self {
        let backup = &manifest.backup;
        Self {
            id: backup.id.clone(),
            disk: backup.disk.clone(),
            snapshot: backup.point.name.clone(),
            based_on: backup.parent.as_ref().map(|parent| parent.point.name.clone()),
            capacity: backup.capacity,
            data: manifest.data,
            zeros: manifest.zeros,
            stored: manifest.stored(),
            resumed,
            already: false,
            seconds: begun.elapsed().as_secs_f64(),
        }
    }
}

/// The program that makes a backup, for its description.
pub(crate) fn program() -> String {
    concat!("lamina ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// Describes a new backup of a snapshot.
pub fn describe(
    outgoing: &Outgoing,
    disk: &str,
    parent: Option<Parent>,
    options: CreateOptions<'_>,
) -> Result<Description> {
    Ok(Description {
        id: new_identity()?,
        disk: disk.to_owned(),
        capacity: outgoing.capacity(),
        provisioning: outgoing.provisioning(),
        point: outgoing.point().clone(),
        parent,
        key: options.key.map(|key| key.id().to_owned()),
        begun: clock::seconds(),
        number: 0,
        program: program(),
        machine: None,
    })
}

/// The packs that exist so far.
#[derive(Clone, Debug, Default)]
pub struct Written {
    /// The packs.
    pub packs: Vec<PackRecord>,
    /// Bytes of data in the packs before compression.
    pub data: u64,
    /// Bytes that the packs declare zero.
    pub zeros: u64,
}

impl Written {
    /// Adds a pack.
    pub(crate) fn add(&mut self, record: PackRecord, index: &Index) {
        self.packs.push(record);
        for content in index.values() {
            self.data += content.chunks.iter().map(|chunk| chunk.blocks() as u64 * BLOCK).sum::<u64>();
            self.zeros += content.zeros.iter().map(|zeros| u64::from(zeros.blocks) * BLOCK).sum::<u64>();
        }
    }

    /// The segment after the last pack.
    pub fn end(&self) -> u32 {
        self.packs.last().map_or(0, |pack| pack.end)
    }

    fn stored(&self) -> u64 {
        self.packs.iter().map(|pack| pack.length).sum()
    }
}

/// Receives the packs of a backup.
pub(crate) trait Sink {
    /// Stores the next pack.
    fn pack(&mut self, head: &Head, bytes: &[u8]) -> Result<()>;

    /// Completes the backup.
    fn finish(&mut self, manifest: &Manifest) -> Result<()>;
}

fn stopped() -> Error {
    Error::new(
        ErrorKind::Interrupted,
        "stopped on request; the same command continues the backup where that is possible",
    )
}

/// Reads a snapshot into a sink, from the first segment that `written` does not have.
pub(crate) fn run(
    outgoing: &Outgoing,
    description: &Description,
    mut written: Written,
    sink: &mut dyn Sink,
    options: CreateOptions<'_>,
    progress: &dyn Progress,
) -> Result<Created> {
    let begun = Instant::now();
    // A wrong level is refused before anything is read.
    compressor(options.level)?;
    let resumed = written.stored();
    let key = options.key.map(|key| &**key);
    let base = description.parent.as_ref().map(|parent| parent.point.uuid.as_str());
    let reader = Reader {
        outgoing,
        base,
        level: options.level,
        throttle: Throttle::new(Throttled { progress, rate: options.rate }),
    };
    let plan = Plan::of(outgoing, base, progress)?;
    let mut done = plan.bytes_before(written.end());
    let id = description.id_bytes()?;
    let all = segments(description.capacity);
    let mut builder = Builder::new(written.end());
    let left = plan.segments.iter().filter(|(segment, _)| *segment >= written.end()).copied().collect::<Vec<_>>();
    for (place, (segment, bytes)) in left.iter().copied().enumerate() {
        reader.segment(segment, &mut builder)?;
        done += bytes;
        progress.update(done, plan.bytes);
        if progress.cancelled() {
            return Err(stopped());
        }
        if builder.length() >= options.pack.min(PACK_FULL) && place + 1 < left.len() {
            let full = std::mem::replace(&mut builder, Builder::new(segment + 1));
            deliver(full, (id, segment + 1), key, &mut written, sink)?;
            progress.durable(done);
        }
    }
    if written.end() < all {
        deliver(builder, (id, all), key, &mut written, sink)?;
    }
    let Written { packs, data, zeros } = written;
    let backup = description.clone();
    let manifest = Manifest { backup, finished: clock::seconds(), data, zeros, packs, disks: Vec::new() };
    sink.finish(&manifest)?;
    Ok(Created::of(&manifest, resumed, begun))
}

fn deliver(
    builder: Builder,
    (id, end): ([u8; 16], u32),
    key: Option<&Key>,
    written: &mut Written,
    sink: &mut dyn Sink,
) -> Result<()> {
    let number = written.packs.len() as u32;
    let pack = builder.finish(id, number, end, key)?;
    sink.pack(&pack.head, &pack.bytes)?;
    written.add(crate::level::record_of(&pack.head, &pack.bytes), &pack.index);
    Ok(())
}

/// The segments with content, and the bytes of data in each.
struct Plan {
    segments: Vec<(u32, u64)>,
    bytes: u64,
}

impl Plan {
    /// Reads the map of the snapshot once.
    fn of(outgoing: &Outgoing, base: Option<&str>, progress: &dyn Progress) -> Result<Self> {
        let mut plan = Self { segments: Vec::new(), bytes: 0 };
        outgoing.extents(base, 0..outgoing.capacity(), &mut |extent| {
            let (mut at, end) = (extent.offset, extent.offset + extent.length);
            while at < end {
                let segment = (at / SEGMENT) as u32;
                let part = end.min((u64::from(segment) + 1) * SEGMENT) - at;
                let data = if extent.zero { 0 } else { part };
                match plan.segments.last_mut() {
                    Some((last, bytes)) if *last == segment => *bytes += data,
                    _ if progress.cancelled() => return Err(stopped()),
                    _ => plan.segments.push((segment, data)),
                }
                plan.bytes += data;
                at += part;
            }
            Ok(())
        })?;
        Ok(plan)
    }

    fn bytes_before(&self, end: u32) -> u64 {
        self.segments.iter().take_while(|(segment, _)| *segment < end).map(|(_, bytes)| bytes).sum()
    }
}

/// The blocks of a chunk that have to be read.
struct Job {
    number: u32,
    runs: Vec<BlockRun>,
}

/// A chunk that was read, with the blocks in it that are zero.
struct Made {
    chunk: Option<(Chunk, Vec<u8>)>,
    zeros: Vec<u64>,
}

struct Reader<'a> {
    outgoing: &'a Outgoing,
    base: Option<&'a str>,
    level: i32,
    throttle: Throttle<Throttled<'a>>,
}

impl Reader<'_> {
    /// Adds the content of a segment to a pack.
    fn segment(&self, segment: u32, builder: &mut Builder) -> Result<()> {
        let start = u64::from(segment) * SEGMENT;
        let (mut jobs, mut zeros) = (Vec::new(), Vec::new());
        self.outgoing.extents(self.base, start..start + SEGMENT, &mut |extent| {
            match extent.zero {
                true => zeros.extend(extent.offset / BLOCK..(extent.offset + extent.length).div_ceil(BLOCK)),
                false => add_jobs(&mut jobs, extent),
            }
            Ok(())
        })?;
        let mut made = self.make_all(&jobs)?;
        if self.base.is_some() {
            made.iter_mut().for_each(|made| zeros.append(&mut made.zeros));
        }
        for (chunk, stored) in made.iter().filter_map(|made| made.chunk.as_ref()) {
            builder.chunk(chunk, stored);
        }
        zeros.sort_unstable();
        for run in zeros.chunk_by(|a, b| a + 1 == *b) {
            builder.zeros(Zeros { first: run[0], blocks: run.len() as u32 });
        }
        Ok(())
    }

    /// Reads and compresses chunks on several threads; the results are in the order of the jobs.
    fn make_all(&self, jobs: &[Job]) -> Result<Vec<Made>> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = jobs.len().min(cores).min(THREADS_MAX);
        if threads <= 1 {
            let mut compressor = compressor(self.level)?;
            return jobs.iter().map(|job| self.make(job, &mut compressor)).collect();
        }
        let next = AtomicUsize::new(0);
        let work = || -> Result<Vec<(usize, Made)>> {
            let mut compressor = compressor(self.level)?;
            let mut made = Vec::new();
            loop {
                let place = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(place) else { return Ok(made) };
                made.push((place, self.make(job, &mut compressor)?));
            }
        };
        let mut all = std::thread::scope(|scope| {
            let mut threads_running = Vec::with_capacity(threads - 1);
            for number in 1..threads {
                let builder = std::thread::Builder::new().name(format!("backup-{number}"));
                let thread = builder.spawn_scoped(scope, work);
                threads_running.push(thread.map_err(|error| Error::io("starting a thread for a backup", error))?);
            }
            let mut all = work()?;
            for thread in threads_running {
                let part = thread.join().unwrap_or_else(|_| {
                    Err(Error::new(ErrorKind::Io, "a thread of the backup failed: see the log of the process"))
                });
                all.extend(part?);
            }
            Ok::<_, Error>(all)
        })?;
        all.sort_by_key(|(place, _)| *place);
        Ok(all.into_iter().map(|(_, made)| made).collect())
    }

    fn make(&self, job: &Job, compressor: &mut Compressor) -> Result<Made> {
        let start = u64::from(job.number) * CHUNK;
        let capacity = self.outgoing.capacity();
        let mut plain = Vec::with_capacity(job.runs.iter().map(|run| run.blocks() * BLOCK_SIZE).sum());
        for run in &job.runs {
            let mut at = start + u64::from(run.first) * BLOCK;
            let end = (start + (u64::from(run.last) + 1) * BLOCK).min(capacity);
            while at < end {
                let length = (end - at).min(READ);
                if !self.throttle.wait(length) {
                    return Err(stopped());
                }
                let read = self.outgoing.read(at, length as usize)?;
                read.slices().iter().for_each(|slice| plain.extend_from_slice(slice));
                at += length;
            }
        }
        // The last block of a disk may be shorter.
        plain.resize(plain.len().next_multiple_of(BLOCK_SIZE), 0);
        let (runs, zeros) = drop_zeros(job, &mut plain);
        if plain.is_empty() {
            return Ok(Made { chunk: None, zeros });
        }
        Ok(Made { chunk: Some(compress(job.number, runs, plain, compressor)?), zeros })
    }
}

pub(crate) type Compressor = zstd::bulk::Compressor<'static>;

pub(crate) fn compressor(level: i32) -> Result<Compressor> {
    if !(1..=LEVEL_MAX).contains(&level) {
        let text = format!("the level of compression is {level}: 1 to {LEVEL_MAX} can be used");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Compressor::new(level).map_err(|error| Error::io("starting the compressor", error))
}

/// The chunk of the blocks `plain`, which are the given runs of the chunk's range, with its stored bytes.
pub(crate) fn compress(
    number: u32,
    runs: Vec<BlockRun>,
    plain: Vec<u8>,
    compressor: &mut Compressor,
) -> Result<(Chunk, Vec<u8>)> {
    let compressed = compressor.compress(&plain);
    let compressed = compressed.map_err(|error| Error::io("compressing data of a backup", error))?;
    let plain_sum = checksum(&plain);
    let (codec, stored) =
        if compressed.len() < plain.len() { (Codec::Zstd, compressed) } else { (Codec::Plain, plain) };
    let stored_sum = if codec == Codec::Plain { plain_sum } else { checksum(&stored) };
    let chunk = Chunk { number, runs, codec, stored: stored.len() as u32, stored_sum, plain_sum, offset: 0 };
    Ok((chunk, stored))
}

/// Adds the blocks of an extent, which may begin and end within a block, to the jobs of its segment.
fn add_jobs(jobs: &mut Vec<Job>, extent: Extent) {
    let (mut block, end) = (extent.offset / BLOCK, (extent.offset + extent.length).div_ceil(BLOCK));
    while block < end {
        let number = (block / CHUNK_BLOCKS) as u32;
        let last = (end - 1).min((u64::from(number) + 1) * CHUNK_BLOCKS - 1);
        let (first, last_in) = ((block % CHUNK_BLOCKS) as u8, (last % CHUNK_BLOCKS) as u8);
        if jobs.last().is_none_or(|job| job.number != number) {
            jobs.push(Job { number, runs: Vec::new() });
        }
        if let Some(job) = jobs.last_mut() {
            // The previous extent may end in the block in which this extent begins.
            match job.runs.last_mut() {
                Some(run) if usize::from(run.last) + 1 >= usize::from(first) => run.last = run.last.max(last_in),
                _ => job.runs.push(BlockRun { first, last: last_in }),
            }
        }
        block = last + 1;
    }
}

/// Removes blocks of zeros. Returns the runs of the other blocks, and the removed blocks by their numbers on the disk.
fn drop_zeros(job: &Job, plain: &mut Vec<u8>) -> (Vec<BlockRun>, Vec<u64>) {
    let blocks = job.runs.iter().flat_map(|run| run.first..=run.last);
    let (mut runs, mut zeros): (Vec<BlockRun>, Vec<u64>) = (Vec::new(), Vec::new());
    let mut kept = 0;
    for (place, block) in blocks.enumerate() {
        let bytes = place * BLOCK_SIZE..(place + 1) * BLOCK_SIZE;
        if plain[bytes.clone()].iter().all(|byte| *byte == 0) {
            zeros.push(u64::from(job.number) * CHUNK_BLOCKS + u64::from(block));
            continue;
        }
        if bytes.start != kept {
            plain.copy_within(bytes, kept);
        }
        kept += BLOCK_SIZE;
        match runs.last_mut() {
            Some(run) if usize::from(run.last) + 1 == usize::from(block) => run.last = block,
            _ => runs.push(BlockRun { first: block, last: block }),
        }
    }
    plain.truncate(kept);
    (runs, zeros)
}

/// Whether a description belongs to a backup of the given snapshot with the given options.
pub(crate) fn is_same(
    description: &Description,
    outgoing: &Outgoing,
    parent: Option<&SnapshotIdentity>,
    options: CreateOptions<'_>,
) -> bool {
    description.point == *outgoing.point()
        && description.capacity == outgoing.capacity()
        && description.key.as_deref() == options.key.map(|key| key.id())
        && description.parent.as_ref().map(|parent| &parent.point.uuid) == parent.map(|parent| &parent.uuid)
}
