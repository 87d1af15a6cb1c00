//! Operations on a datastore, as values that a seed generates.
//!
//! An operation refers to its targets by arbitrary numbers, which are mapped to existing objects when the operation is
//! carried out. So every subsequence of a list of operations is a valid list too, which makes it simple to shorten a
//! failing run.

use crate::random::Random;
use backend::simulated::Fault;
use store::pack::Codec;

/// The number of failures of a medium that fails until it is replaced.
const FOR_EVER: u64 = u64::MAX;

/// The range and alignment of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Chooses the offset.
    pub at: u64,
    /// Length in bytes, which is limited by the size of the disk.
    pub length: u64,
    /// The offset is a multiple of this number.
    pub align: u64,
}

/// An operation. Numbers without a description choose among the existing objects.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Operation {
    /// Write data derived from `fill`; with `again`, write the current content again.
    Write { disk: u64, span: Span, fill: u64, again: bool, fua: bool },
    /// Write single blocks at this many places of a disk. Places and data are derived from `fill`.
    Scatter { disk: u64, places: u64, fill: u64 },
    /// Discard whole blocks, up to the whole disk.
    DiscardLarge { disk: u64, at: u64, length: u64 },
    /// Write zeroes to a range.
    WriteZeroes { disk: u64, span: Span, allocate: bool, fua: bool },
    /// Discard a range.
    Discard { disk: u64, span: Span, fua: bool },
    /// Read from a disk or snapshot.
    Read { title: u64, span: Span },
    /// Plan a read and keep the plan during other operations.
    BeginRead { title: u64, span: Span },
    /// Read and verify the planned reads.
    EndReads,
    /// Flush one disk.
    Flush { disk: u64 },
    /// Query the state of a range.
    Status { title: u64, span: Span },
    /// Compare two points of a disk.
    Diff { disk: u64, from: u64, to: u64 },
    /// Create a disk; `kind` chooses the provisioning type.
    Create { capacity: u64, kind: u64 },
    /// Change the capacity of a disk.
    Resize { disk: u64, capacity: u64, by_device: bool },
    /// Rename a disk.
    Rename { disk: u64 },
    /// Delete a disk.
    Delete { disk: u64, promote: bool },
    /// Take snapshots of several disks.
    Snapshot { disk: u64, disks: u64 },
    /// Delete a snapshot.
    DeleteSnapshot { snapshot: u64 },
    /// Revert to a snapshot.
    Revert { snapshot: u64 },
    /// Make linked clones of a snapshot, or of a head.
    CloneLinked { source: u64, head: bool, count: u64 },
    /// Make a full clone of a snapshot, or of a head; with `cancel`, cancel it half way.
    CloneFull { source: u64, head: bool, cancel: bool },
    /// Detach a clone.
    Detach { disk: u64 },
    /// Close the open devices.
    CloseDevices,
    /// Run background work.
    Pump { rounds: u64 },
    /// Make a checkpoint.
    Checkpoint,
    /// Punch free space.
    Reclaim,
    /// Compress blocks of a disk or snapshot from `at` on, in at most `steps` steps.
    Pack { object: u64, at: u64, steps: u64, codec: Codec },
    /// Make the next steps of a pass that stores equal blocks once.
    Share { steps: u64 },
    /// Run a check that verifies all data.
    Check,
    /// Compare the whole datastore with the model.
    Compare,
    /// Close and open the datastore.
    Reopen,
    /// Drop the engine without closing, keep the medium, and open again.
    Kill,
    /// Cut the power after `after` further requests to the medium; with `again`, cut it again after that number of
    /// requests of recovery.
    Cut { after: u64, again: Option<u64> },
    /// Cut off the next recovery after the first number of requests, the following recovery after the second number,
    /// and so on.
    CutRecoveries { after: Vec<u64> },
    /// Let the medium fail one request after `after` others.
    FailOperation { after: u64 },
    /// Fail the next flushes of the medium.
    FailSyncs { count: u64 },
    /// Let the medium fail `times` requests of one kind after `after` others.
    FailRequests { fault: Fault, after: u64, times: u64 },
    /// Leave this much free space in the file system.
    Room { bytes: u64 },
}

/// The kind of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Long, without faults: every operation, and every result compared exactly.
    Model,
    /// Power cuts.
    PowerCuts,
    /// Failing requests and flushes of the medium.
    Errors,
    /// A file system that fills up.
    Full,
    /// Power cuts, slow reads and hardly any free space, so that freed blocks are reused at once.
    Tight,
    /// Power cuts; writes scattered over 16 TiB, so that more metadata is dirty than the journal has room for.
    Scattered,
    /// Power cuts; maps larger than the metadata cache.
    Maps,
    /// Power cuts; disks of 16 TiB that shrink and grow, discards of terabytes.
    Wide,
    /// Power cuts; journals from the smallest to the default, and many flushes.
    Journals,
    /// Power cuts on a small file system that is mostly full.
    NearlyFull,
    /// Power cuts; disks that share blocks although the snapshot between them is deleted.
    Shared,
    /// Consecutive power cuts, also in recovery.
    Again,
    /// Power cuts while blocks are compressed and deduplicated.
    Reduced,
}

/// The most disks of a run. When there are as many, a disk is deleted instead of created.
pub const DISKS_MAX: usize = 8;
/// The most snapshots of all disks.
pub const SNAPSHOTS_MAX: usize = 24;

/// The next operation of a run.
pub fn generate(random: &mut Random, profile: Profile) -> Operation {
    let disk = random.next();
    let special = match profile {
        Profile::Model => 0,
        Profile::PowerCuts => 12,
        Profile::Tight => 20,
        Profile::Errors => 20,
        Profile::Full => 12,
        // The operations of these regimes contain their own power cuts.
        _ => 0,
    };
    if random.below(1000) < special {
        return match profile {
            Profile::Errors if random.percent(60) => Operation::FailRequests {
                fault: *random.pick(&Fault::ALL),
                after: random.below(30),
                times: *random.pick(&[1, 1, 3, 20, FOR_EVER]),
            },
            Profile::Errors if random.percent(30) => Operation::FailSyncs { count: random.between(1, 2) },
            Profile::Errors => Operation::FailOperation { after: random.below(30) },
            Profile::Full => {
                let most = *random.pick(&[0, 64 << 10, 1 << 20, 16 << 20, 1 << 30]);
                Operation::Room { bytes: random.below(most + 1) }
            }
            _ => {
                let again = random.percent(30).then(|| random.below(40));
                Operation::Cut { after: random.below(*random.clone().pick(&[3, 20, 200])), again }
            }
        };
    }
    if profile == Profile::Tight {
        return tight(random, disk);
    }
    match random.below(1000) {
        0..400 => Operation::Write {
            disk,
            span: span(random),
            fill: random.next(),
            again: random.percent(3),
            fua: random.percent(3),
        },
        400..600 => Operation::Read { title: disk, span: span(random) },
        600..640 => Operation::Discard { disk, span: span(random), fua: random.percent(5) },
        640..670 => {
            Operation::WriteZeroes { disk, span: span(random), allocate: random.percent(50), fua: random.percent(5) }
        }
        670..720 => Operation::Flush { disk },
        720..741 => Operation::BeginRead { title: disk, span: span(random) },
        741..745 => Operation::EndReads,
        745..775 => Operation::Status { title: disk, span: span(random) },
        775..785 => Operation::Diff { disk, from: random.next(), to: random.next() },
        785..797 => Operation::Create { capacity: capacity(random), kind: random.next() },
        797..812 => Operation::Resize { disk, capacity: capacity(random), by_device: random.percent(30) },
        812..817 => Operation::Rename { disk },
        817..827 => Operation::Delete { disk, promote: random.percent(60) },
        827..852 => Operation::Snapshot { disk, disks: random.between(1, 4) },
        852..872 => Operation::DeleteSnapshot { snapshot: disk },
        872..880 => Operation::Revert { snapshot: disk },
        880..892 => Operation::CloneLinked { source: disk, head: random.percent(40), count: random.between(1, 3) },
        892..898 => Operation::CloneFull { source: disk, head: random.percent(50), cancel: random.percent(20) },
        898..904 => Operation::Detach { disk },
        904..910 => Operation::CloseDevices,
        910..953 => Operation::Pump { rounds: random.between(1, 4) },
        953..959 => pack(random),
        959..965 => Operation::Share { steps: random.between(1, 200) },
        965..975 => Operation::Checkpoint,
        975..980 => Operation::Reclaim,
        980..984 => Operation::Check,
        984..988 => Operation::Compare,
        988..994 => Operation::Reopen,
        994..997 => Operation::Kill,
        _ => Operation::Flush { disk },
    }
}

/// Like [`generate`], for [`Profile::Tight`].
fn tight(random: &mut Random, disk: u64) -> Operation {
    match random.below(100) {
        0..44 => Operation::Write { disk, span: span(random), fill: random.next(), again: false, fua: false },
        44..56 => Operation::Discard { disk, span: span(random), fua: false },
        56..66 => Operation::BeginRead { title: disk, span: span(random) },
        66..68 => Operation::EndReads,
        68..82 => Operation::Pump { rounds: random.between(1, 3) },
        82..86 => Operation::Flush { disk },
        86..89 => Operation::Snapshot { disk, disks: 1 },
        89..93 => Operation::DeleteSnapshot { snapshot: disk },
        93 => Operation::Create { capacity: 512 * random.between(500, 3000), kind: 7 },
        94 => Operation::Delete { disk, promote: true },
        95 => Operation::CloneLinked { source: disk, head: true, count: 1 },
        96 => Operation::Revert { snapshot: disk },
        97 => Operation::Checkpoint,
        98 => Operation::Reclaim,
        _ => Operation::Read { title: disk, span: span(random) },
    }
}

/// Compression of a part of a disk or snapshot.
pub(crate) fn pack(random: &mut Random) -> Operation {
    Operation::Pack {
        object: random.next(),
        // The beginning has most of the data.
        at: if random.percent(50) { 0 } else { random.next() },
        steps: random.between(1, 60),
        codec: if random.percent(50) { Codec::Lz4 } else { Codec::Zstd(3) },
    }
}

fn span(random: &mut Random) -> Span {
    let align = match random.below(20) {
        0..13 => 4096,
        13..17 => 512,
        _ => 1,
    };
    let length = match random.below(40) {
        0..24 => 4096,
        24..28 => 512,
        28..32 => random.between(1, 16) * 4096,
        32..35 => random.between(1, 64) * 512,
        35..38 => random.between(1, 20_000),
        38 => random.between(1, 256) * 4096,
        _ => random.between(1, 1 << 20),
    };
    Span { at: random.next(), length, align }
}

fn capacity(random: &mut Random) -> u64 {
    match random.below(10) {
        0 => 512 * random.between(1, 40),
        1..6 => 512 * random.between(1000, 16_000),
        6..8 => 4096 * random.between(500, 4000),
        _ => 512 * random.between(100_000, 800_000),
    }
}

impl Span {
    /// The byte range on a disk of `capacity` bytes: often near one of a few places, so that requests overlap,
    /// otherwise anywhere.
    pub fn fit(&self, capacity: u64) -> (u64, u64) {
        let length = self.length.min(capacity);
        let room = capacity - length;
        let place = match self.at % 16 {
            0..12 => {
                let corner = (self.at % 4) * (capacity / 4);
                corner + (self.at >> 8) % (768 << 10)
            }
            12 => room,
            _ => (self.at >> 8) % (room + 1),
        };
        (place.min(room) / self.align * self.align, length)
    }
}
