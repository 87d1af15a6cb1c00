//! Restoring a backup as a disk of a datastore.
//!
//! 1. A restored disk is received as a disk from another datastore is ([`disk::transfer`]): it is hidden until it is
//!    complete, and what was restored is kept and recorded, so that the same command continues after an interruption.
//! 2. The disk gets the snapshot that was backed up, with the same identity. So later backups of the restored disk can
//!    be based on the backups that exist.
//! 3. A block is written once, whatever the number of backups in the chain.

use crate::chain::{Blocks, Chain, SegmentPlan};
use crate::manifest::Description;
use backend::{BLOCK_SIZE, Buffer};
use disk::Datastore;
use disk::transfer::{NewArrival, NewReception, Opened, Reception, SEGMENT, new_identity};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use work::{Progress, Throttle, Throttled};

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Bytes of one write.
const WRITE: u64 = 256 << 10;
/// Restored data is recorded after this many bytes or after [`SAVE_INTERVAL`], whichever comes first.
const SAVE_BYTES: u64 = 1 << 30;
/// See [`SAVE_BYTES`].
const SAVE_INTERVAL: Duration = Duration::from_secs(2);

/// Options of a restore.
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    /// Name of the restored disk.
    pub name: String,
    /// Whether the backup updates an existing disk with this name: the disk must be unchanged since the state on which
    /// the backup is based.
    pub update: bool,
    /// Limit in bytes of data per second; 0 for none.
    pub rate: u64,
}

/// The result of a restore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Restored {
    /// The backup.
    pub id: String,
    /// The restored disk.
    pub disk: String,
    /// The snapshot that the disk has.
    pub snapshot: String,
    /// Capacity of the disk in bytes.
    pub capacity: u64,
    /// Bytes of data restored.
    pub data: u64,
    /// Bytes of data that an interrupted attempt had restored.
    pub resumed: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

fn stopped() -> Error {
    Error::new(ErrorKind::Interrupted, "stopped on request; the restored data is kept, and the same command continues")
}

/// What was restored so far.
#[derive(Default)]
struct Counts {
    segments: u64,
    bytes: u64,
    resumed: u64,
}

/// Restores a chain. If the newest level is an increment to a snapshot that the chain does not contain, `alone` is
/// true, and the datastore must have that snapshot.
pub fn restore(
    datastore: &Datastore,
    chain: &mut Chain,
    (description, alone): (&Description, bool),
    options: &RestoreOptions,
    progress: &dyn Progress,
) -> Result<Restored> {
    let begun = Instant::now();
    description.refuse_machine()?;
    let base = description.parent.as_ref().filter(|_| alone).map(|parent| &parent.point);
    let arrival = NewArrival {
        name: options.name.clone(),
        uuid: new_identity()?,
        capacity: description.capacity,
        provisioning: description.provisioning,
        point: description.point.clone(),
        keep: true,
        bases: base.map(|point| point.uuid.clone()).into_iter().collect(),
        update: options.update && base.is_some(),
    };
    let sender = format!("backup {}", description.id);
    let new = NewReception { sender, disks: vec![arrival], attachment: None, resume_only: false };
    let mut counts = Counts::default();
    if let Opened::Open(reception) = datastore.receive(&new)? {
        let progressed = reception.progress();
        let known = progressed.first().and_then(|disk| disk.base.clone());
        if let Some(point) = base.filter(|_| known.is_none()) {
            let id = reception.id();
            drop(reception);
            datastore.delete_reception(&id)?;
            let text = format!(
                "the backup has only the changes since snapshot '{}', which this datastore does not have: restore the \
                 backup of that snapshot first",
                point.name
            );
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let throttle = Throttle::new(Throttled { progress, rate: options.rate });
        let copying = Copying { reception: &reception, throttle, on_base: base.is_some() };
        let copied = copying.run(chain, &mut counts).and_then(|()| chain.finish());
        if let Err(error) = copied {
            if let Err(lost) = reception.save() {
                tracing::warn!("the last restored data of '{}' is not recorded: {lost}", options.name);
            }
            return Err(error);
        }
        reception.commit(&[(counts.segments, counts.bytes)])?;
        reception.complete()?;
    }
    Ok(Restored {
        id: description.id.clone(),
        disk: options.name.clone(),
        snapshot: description.point.name.clone(),
        capacity: description.capacity,
        data: counts.bytes - counts.resumed,
        resumed: counts.resumed,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

struct Copying<'a> {
    reception: &'a Arc<Reception>,
    throttle: Throttle<Throttled<'a>>,
    /// Whether the disk began as a clone, so that blocks that became zero have to be written too.
    on_base: bool,
}

impl Copying<'_> {
    fn run(&self, chain: &mut Chain, counts: &mut Counts) -> Result<()> {
        let done = self.reception.progress().into_iter().next().map(|disk| disk.done).unwrap_or_default();
        let mut buffer = Buffer::zeroed((SEGMENT / BLOCK) as usize);
        let (mut unsaved, mut saved) = (0, Instant::now());
        let progress = self.throttle.progress();
        for number in 0..chain.segments() {
            if progress.cancelled() {
                return Err(stopped());
            }
            let plan = chain.plan(number)?;
            if plan.is_empty() {
                continue;
            }
            let start = u64::from(number) * SEGMENT;
            let bytes = size(&plan.data, start, chain.capacity());
            if bytes == 0 && !self.on_base {
                continue;
            }
            counts.segments += 1;
            counts.bytes += bytes;
            if done.iter().any(|(from, to)| (*from..*to).contains(&u64::from(number))) {
                counts.resumed += bytes;
                continue;
            }
            chain.read(&plan, &mut buffer)?;
            self.write(&plan, &buffer, chain.capacity())?;
            self.reception.finish_segment(0, u64::from(number), bytes)?;
            unsaved += bytes;
            if unsaved >= SAVE_BYTES || saved.elapsed() >= SAVE_INTERVAL {
                self.reception.save()?;
                (unsaved, saved) = (0, Instant::now());
                progress.durable(start + SEGMENT);
            }
            progress.update((start + SEGMENT).min(chain.capacity()), chain.capacity());
        }
        Ok(())
    }

    fn write(&self, plan: &SegmentPlan, buffer: &[u8], capacity: u64) -> Result<()> {
        let start = u64::from(plan.number) * SEGMENT;
        for range in plan.data.ranges() {
            let (mut at, end) = (range.start * BLOCK, (range.end * BLOCK).min(capacity - start));
            while at < end {
                let length = (end - at).min(WRITE);
                if !self.throttle.wait(length) {
                    return Err(stopped());
                }
                self.reception.write(0, start + at, &buffer[at as usize..(at + length) as usize], None)?;
                at += length;
            }
        }
        for range in plan.zeros.ranges().iter().filter(|_| self.on_base) {
            let (at, end) = (range.start * BLOCK, (range.end * BLOCK).min(capacity - start));
            self.reception.zero(0, start + at, end - at)?;
        }
        Ok(())
    }
}

/// Bytes of blocks, of which the last may be shorter.
fn size(blocks: &Blocks, start: u64, capacity: u64) -> u64 {
    let length = |range: &std::ops::Range<u64>| (range.end * BLOCK).min(capacity - start) - range.start * BLOCK;
    blocks.ranges().iter().map(length).sum()
}
