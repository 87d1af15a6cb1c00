//! Regimes: conditions under which power cuts are tested, in addition to the usual small disks.
//!
//! A regime consists of a world (sizes of journal, caches and medium) and a mix of operations that keeps the datastore
//! in one condition: more dirty metadata than the journal holds, a map larger than the metadata cache, disks of 16 TiB,
//! journals of several sizes, a file system with hardly any free space, blocks shared without a snapshot, consecutive
//! power cuts, or compressed and deduplicated blocks. Model and comparison are the same as in every other run.

use crate::operation::{Operation, Profile, Span, generate, pack};
use crate::random::Random;
use crate::run::JOURNAL_SIZE;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
/// Capacity of a wide disk.
const WIDE: u64 = 16 * TIB;
/// The default journal of `lamina init`.
const JOURNAL_DEFAULT: u64 = 128 << 20;
/// The largest thick disk in the regime that needs a table of blocks larger than the journal.
const THICK_WIDE_MAX: u64 = 4 << 30;
/// The largest thick disk in the other regimes.
const THICK_MAX: u64 = 8 << 20;
/// The most consecutive power cuts in recovery.
const RECOVERY_CUTS_MAX: u64 = 5;

/// Parameters of the datastore of a run.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// Size of the journal in bytes.
    pub journal_size: u64,
    /// Sizes of the metadata cache in bytes, of which one is chosen.
    pub metadata_caches: [usize; 2],
    /// Size of the read cache in bytes.
    pub read_cache: usize,
    /// Size of the file system in bytes, if it is small.
    pub room: Option<u64>,
    /// Capacity of the largest thick disk.
    pub thick_max: u64,
}

impl World {
    /// The world of a run with this profile.
    pub fn of(profile: Profile, seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x776f_726c);
        let usual = Self {
            journal_size: JOURNAL_SIZE,
            metadata_caches: [1 << 20, 2 << 20],
            read_cache: 1 << 20,
            room: None,
            thick_max: THICK_MAX,
        };
        match profile {
            // The smaller cache causes frequent checkpoints; with the larger one many dirty pages accumulate.
            Profile::Scattered => Self { thick_max: THICK_WIDE_MAX, metadata_caches: [1 << 20, 32 << 20], ..usual },
            Profile::Maps => Self { metadata_caches: [256 << 10, 1 << 20], ..usual },
            Profile::Journals => {
                let journal_size = *random.pick(&[JOURNAL_SIZE, JOURNAL_SIZE, 8 * MIB, 32 * MIB, JOURNAL_DEFAULT]);
                Self { journal_size, ..usual }
            }
            Profile::NearlyFull => Self { room: Some(random.between(40, 96) * MIB), ..usual },
            _ => usual,
        }
    }
}

/// The first operations of a run of a regime; `None` for the usual disks.
pub(crate) fn beginning(random: &mut Random, profile: Profile) -> Option<Vec<Operation>> {
    let create = |capacity, kind| Operation::Create { capacity, kind };
    Some(match profile {
        Profile::Scattered => vec![
            create(WIDE, 7),
            create(THICK_WIDE_MAX, 0),
            scatter(random, 0, 600),
            // Each write needs another page of the table of blocks: together more pages than the journal has room for.
            scatter(random, 1, 1600),
        ],
        Profile::Maps => vec![create(TIB, 7), scatter(random, 0, 6000)],
        Profile::Wide => vec![create(WIDE, 7), create(WIDE - 512, 7), create(3 * MIB, 7)],
        Profile::Shared => vec![create(MIB, 7), create(MIB - 512, 7)],
        Profile::Reduced => vec![create(2 * MIB, 7), create(6 * MIB + 512, 7)],
        Profile::NearlyFull => vec![create(24 * MIB, 7), create(4 * MIB, random.below(2) * 7), create(64 * MIB, 7)],
        _ => return None,
    })
}

/// Appends the next operations of a run of a regime: one, or a few that belong together.
pub(crate) fn extend(random: &mut Random, profile: Profile, out: &mut Vec<Operation>) {
    match profile {
        Profile::Scattered => out.push(scattered(random)),
        Profile::Maps => out.push(maps(random)),
        Profile::Wide => out.push(wide(random)),
        Profile::Journals => out.push(journals(random)),
        Profile::NearlyFull => {
            let last = nearly_full(random, out);
            out.push(last);
        }
        Profile::Shared => shared(random, out),
        Profile::Again => again(random, out),
        Profile::Reduced => reduced(random, out),
        _ => out.push(generate(random, profile)),
    }
}

fn scatter(random: &mut Random, disk: u64, places: u64) -> Operation {
    Operation::Scatter { disk, places, fill: random.next() }
}

/// A power cut after a random number of requests: within a step, a batch or a checkpoint.
fn cut(random: &mut Random, farthest: &[u64]) -> Operation {
    let after = *random.pick(farthest);
    Operation::Cut { after: random.below(after), again: random.percent(30).then(|| random.below(60)) }
}

fn span(random: &mut Random, blocks: u64) -> Span {
    Span { at: random.next(), length: 4096 * random.between(1, blocks), align: 4096 }
}

fn write(random: &mut Random, blocks: u64) -> Operation {
    let (disk, fill) = (random.next(), random.next());
    Operation::Write { disk, span: span(random, blocks), fill, again: false, fua: random.percent(10) }
}

fn discard_large(random: &mut Random) -> Operation {
    let most = *random.pick(&[MIB, 1 << 30, 200 << 30, 4 * TIB, WIDE]);
    Operation::DiscardLarge { disk: random.next(), at: random.next(), length: random.between(1, most) }
}

fn scattered(random: &mut Random) -> Operation {
    let number = random.next();
    match random.below(100) {
        0..34 => {
            let places = random.between(20, 500);
            scatter(random, number, places)
        }
        34..44 => write(random, 16),
        44..52 => Operation::Flush { disk: number },
        52..60 => discard_large(random),
        60..66 => Operation::Pump { rounds: random.between(1, 3) },
        66..69 => Operation::Checkpoint,
        69..74 => Operation::Snapshot { disk: number, disks: random.between(1, 2) },
        74..78 => Operation::DeleteSnapshot { snapshot: number },
        78..80 => Operation::CloneLinked { source: number, head: random.percent(50), count: 1 },
        80..82 => Operation::Create { capacity: random.between(MIB, THICK_WIDE_MAX) / 512 * 512, kind: number % 2 * 7 },
        82..86 => Operation::Delete { disk: number, promote: true },
        86 => Operation::Read { title: number, span: span(random, 16) },
        87 => Operation::Reopen,
        _ => cut(random, &[3, 30, 300, 3000]),
    }
}

fn maps(random: &mut Random) -> Operation {
    let number = random.next();
    match random.below(100) {
        0..34 => {
            let places = random.between(50, 400);
            scatter(random, number, places)
        }
        34..42 => write(random, 16),
        42..50 => Operation::Flush { disk: number },
        50..54 => discard_large(random),
        54..60 => Operation::Pump { rounds: random.between(1, 3) },
        60..63 => Operation::Checkpoint,
        63..70 => Operation::Snapshot { disk: number, disks: 1 },
        70..74 => Operation::DeleteSnapshot { snapshot: number },
        74..79 => Operation::CloneLinked { source: number, head: random.percent(50), count: 1 },
        79..81 => Operation::Revert { snapshot: number },
        81..83 => Operation::Delete { disk: number, promote: true },
        83..85 => Operation::Diff { disk: number, from: random.next(), to: random.next() },
        85..87 => Operation::Read { title: number, span: span(random, 64) },
        87 => Operation::Reopen,
        _ => cut(random, &[3, 30, 300, 2000]),
    }
}

fn wide(random: &mut Random) -> Operation {
    let number = random.next();
    let capacity = *random.pick(&[WIDE, WIDE - 512, WIDE / 2 + 4096, TIB, 100 << 30, 10_240]);
    match random.below(100) {
        0..10 => {
            let places = random.between(5, 60);
            scatter(random, number, places)
        }
        10..16 => discard_large(random),
        16..20 => Operation::Resize { disk: number, capacity, by_device: random.percent(30) },
        20..22 => Operation::Create { capacity, kind: 7 },
        22..27 => cut(random, &[3, 20, 200]),
        _ => generate(random, Profile::PowerCuts),
    }
}

fn journals(random: &mut Random) -> Operation {
    let number = random.next();
    match random.below(100) {
        // Data that is flushed before it is written back is appended to the journal as payload.
        0..30 => write(random, 64),
        30..48 => Operation::Flush { disk: number },
        48..53 => cut(random, &[3, 20, 200]),
        53..55 => Operation::Checkpoint,
        _ => generate(random, Profile::PowerCuts),
    }
}

fn nearly_full(random: &mut Random, out: &mut Vec<Operation>) -> Operation {
    let number = random.next();
    match random.below(100) {
        0..24 => write(random, 256),
        24..30 => Operation::Flush { disk: number },
        30..36 => Operation::Discard { disk: number, span: span(random, 512), fua: false },
        36..41 => cut(random, &[3, 20, 200]),
        // Another program uses the rest of the file system. Buffered writes must still become durable.
        58..61 => {
            out.push(Operation::Room { bytes: 0 });
            Operation::Flush { disk: number }
        }
        61..63 => {
            out.push(Operation::Room { bytes: 0 });
            Operation::Pump { rounds: random.between(1, 4) }
        }
        63..65 => Operation::Room { bytes: 32 * MIB },
        41..44 => {
            let most = *random.pick(&[0, 64 << 10, MIB, 16 * MIB]);
            Operation::Room { bytes: random.below(most + 1) }
        }
        44..47 => Operation::Delete { disk: number, promote: true },
        47..50 => Operation::Snapshot { disk: number, disks: 1 },
        50..55 => Operation::DeleteSnapshot { snapshot: number },
        55..58 => Operation::Pump { rounds: random.between(1, 4) },
        _ => generate(random, Profile::PowerCuts),
    }
}

/// Two disks that share blocks after the snapshot between them is deleted, and writes to the same places of both.
fn shared(random: &mut Random, out: &mut Vec<Operation>) {
    let disk = random.next();
    if random.percent(40) {
        out.push(match random.below(10) {
            0..3 => Operation::Pump { rounds: random.between(1, 3) },
            3 => Operation::Checkpoint,
            4 => Operation::Delete { disk, promote: true },
            5 => Operation::Reopen,
            6 => Operation::Discard { disk, span: span(random, 16), fua: random.percent(20) },
            7 => Operation::Create { capacity: MIB, kind: 7 },
            _ => Operation::Read { title: disk, span: span(random, 16) },
        });
        return;
    }
    let place = span(random, 24);
    let at = |disk: u64, random: &mut Random| Operation::Write {
        disk,
        span: place,
        fill: random.next(),
        again: random.percent(5),
        fua: random.percent(10),
    };
    out.push(at(disk, random));
    if random.percent(50) {
        out.push(Operation::Flush { disk });
    }
    out.push(Operation::CloneLinked { source: disk, head: true, count: random.between(1, 2) });
    let mut cut_at = random.below(8);
    let mut step = |operation: Operation, random: &mut Random| {
        if cut_at == 0 {
            out.push(cut(random, &[2, 10, 40]));
        }
        cut_at = cut_at.wrapping_sub(1);
        out.push(operation);
    };
    step(Operation::Detach { disk: random.next() }, random);
    step(Operation::Detach { disk: random.next() }, random);
    for _ in 0..2 {
        step(Operation::DeleteSnapshot { snapshot: random.next() }, random);
    }
    if random.percent(40) {
        step(Operation::Pump { rounds: 2 }, random);
    }
    // Writes to random disks in any order.
    for _ in 0..random.between(2, 5) {
        let write = at(random.next(), random);
        step(write, random);
        if random.percent(25) {
            step(Operation::Flush { disk: random.next() }, random);
        }
        if random.percent(30) {
            step(Operation::Pump { rounds: 1 }, random);
        }
        if random.percent(30) {
            step(Operation::Read { title: random.next(), span: place }, random);
        }
    }
}

/// A power cut, reads, overwrites, a flush, and the next power cut. Recovery is cut off several times as well.
fn again(random: &mut Random, out: &mut Vec<Operation>) {
    let disk = random.next();
    for _ in 0..random.below(4) {
        out.push(generate(random, Profile::PowerCuts));
    }
    let place = span(random, 32);
    let write = |random: &mut Random| Operation::Write {
        disk,
        span: place,
        fill: random.next(),
        again: false,
        fua: random.percent(15),
    };
    out.push(write(random));
    if random.percent(60) {
        out.push(Operation::Flush { disk });
        out.push(write(random));
    }
    for _ in 0..random.between(1, 3) {
        out.push(Operation::Cut { after: random.below(12), again: None });
        if random.percent(50) {
            let after = (0..random.between(1, RECOVERY_CUTS_MAX)).map(|_| random.below(30)).collect();
            out.push(Operation::CutRecoveries { after });
        }
        out.push(write(random));
        out.push(Operation::Flush { disk });
        out.push(Operation::Pump { rounds: 2 });
        out.push(Operation::Kill);
        out.push(Operation::Read { title: 3 * (disk / 3) + 1, span: place });
        out.push(write(random));
        out.push(Operation::Flush { disk });
    }
}

/// Writes of a few contents, of which some can be compressed, and passes of data reduction between them.
fn reduced(random: &mut Random, out: &mut Vec<Operation>) {
    let disk = random.next();
    let few = |random: &mut Random, blocks: u64| Operation::Write {
        disk: random.next(),
        span: span(random, blocks),
        fill: 1 + random.below(12),
        again: random.percent(5),
        fua: random.percent(10),
    };
    match random.below(100) {
        0..24 => out.push(few(random, 4)),
        24..34 => out.push(few(random, 64)),
        // The same content is written to two disks, and both become durable.
        34..40 => {
            let (place, fill) = (span(random, 32), 1 + random.below(12));
            let at = |disk| Operation::Write { disk, span: place, fill, again: false, fua: false };
            out.extend([at(disk), at(disk + 1), Operation::Flush { disk }, Operation::Pump { rounds: 3 }]);
        }
        40..52 => out.push(pack(random)),
        52..62 => out.push(Operation::Share { steps: random.between(1, 400) }),
        62..68 => out.push(Operation::Flush { disk }),
        68..76 => out.push(cut(random, &[3, 20, 60, 200])),
        76..78 => out.push(Operation::Checkpoint),
        _ => out.push(generate(random, Profile::PowerCuts)),
    }
}
