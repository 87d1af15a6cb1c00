//! Measures the cost of chain depth: random 4 KiB reads through 32 deltas of each format over a flat base, compared
//! with reads of that base alone; with a warm metadata cache, and with a working set that overflows the cache.
//!
//! ```text
//! cargo run --release -p lamina-chain --example depth [FOLDER] [FORMAT] [SET]
//! ```
//!
//! Each grain of the disk lies in a random level, so each 4 KiB is an extent of its own: the worst case. Files are in
//! FOLDER (default: the system's folder for temporary files). They are read in two ways: from the page cache, one read
//! after another, which measures every cost except that of the device; and from the device, 32 reads at a time. The
//! deltas are closed after they were written and opened again for reading. Both chains are measured in turn; figures
//! are medians, ratios are medians of the ratios in each round. Reads from the page cache are measured in processor
//! time, which other load on the machine disturbs less.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../tests/chain/formats.rs"]
mod formats;

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Buffer, Directory, File, IoMode};
use chain::{Chain, Options, Place};
use formats::Format;
use layer::Layer;
use std::sync::Arc;
use std::time::Instant;
use testkit::Random;

const GRAIN: u64 = 4096;
const DEPTH: u64 = 32;
const ROUNDS: usize = 7;
const READS: u64 = 100_000;
/// The number of reads from the device; below, how many are in flight.
const MEDIUM_READS: u64 = 20_000;
const IN_FLIGHT: usize = 32;
/// Working sets in grains. The cache has 65,536 entries.
const SETS: [(&str, u64); 3] =
    [("warm", 60_000), ("twice the size of the cache", 2 * 65_536), ("four times", 4 * 65_536)];

/// Two chains over a flat disk of `grains` grains, one buffered and one for direct I/O. Each has `DEPTH` deltas with
/// each grain in a random level, or no delta for `None`.
fn build(directory: &LocalDirectory, grains: u64, deltas: Option<Format>) -> [Chain; 2] {
    let capacity = grains * GRAIN;
    let mut random = Random::new(7);
    let depth = if deltas.is_some() { DEPTH } else { 0 };
    let formats: Vec<Format> = (0..depth).filter_map(|_| deltas).chain([Format::Flat]).collect();
    let name = |level: usize| format!("{}-{level}", deltas.map_or("alone", |_| "deep"));
    let new =
        |(level, format): (usize, &Format)| format.create(directory, &name(level), capacity, IoMode::Buffered).unwrap();
    let layers: Vec<Arc<dyn Layer>> = formats.iter().enumerate().map(new).collect();
    let mut block = vec![0; GRAIN as usize];
    for grain in 0..grains {
        block[..8].copy_from_slice(&grain.to_le_bytes());
        layers[random.below(layers.len() as u64) as usize].write(grain * GRAIN, &[&block]).unwrap();
    }
    layers.iter().for_each(|layer| layer.close().unwrap());
    drop(layers);
    [IoMode::Buffered, IoMode::Direct].map(|mode| {
        let open = |(level, format): (usize, &Format)| {
            // The top level of the buffered chain is opened for writing, as in a disk in use.
            format.open(directory, &name(level), mode, level == 0 && mode == IoMode::Buffered).unwrap()
        };
        Chain::open("depth", formats.iter().enumerate().map(open).collect(), Options::default()).unwrap()
    })
}

/// Nanoseconds of processor time of this thread.
fn running() -> f64 {
    // The kernel updates the thread's processor time when it schedules.
    std::thread::yield_now();
    let figures = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    figures.split_whitespace().next().unwrap().parse().unwrap()
}

/// Nanoseconds to look up 4 KiB, without reading them.
fn find(chain: &Chain, grains: u64) -> f64 {
    let mut random = Random::new(5);
    let begun = running();
    for _ in 0..READS {
        let plan = chain.plan(random.below(grains) * GRAIN, GRAIN as usize).unwrap();
        assert_eq!(plan.parts.len(), 1);
    }
    (running() - begun) / READS as f64
}

/// The file and offset of each grain.
fn places(chain: &Chain, grains: u64) -> Vec<(Arc<dyn File>, u64)> {
    let place = |grain: u64| match &chain.plan(grain * GRAIN, GRAIN as usize).unwrap().parts[0].place {
        Place::Media { file, offset } => (Arc::clone(file), *offset),
        _ => panic!("every grain has data"),
    };
    (0..grains).map(place).collect()
}

/// Nanoseconds of a read at a known location: the cost of the same files without a chain.
fn bare(places: &[(Arc<dyn File>, u64)]) -> f64 {
    let (mut random, mut buffer) = (Random::new(3), Buffer::zeroed(1));
    let begun = running();
    for _ in 0..READS {
        let grain = random.below(places.len() as u64);
        let (file, offset) = &places[grain as usize];
        file.read_at(&mut buffer, *offset).unwrap();
        assert_eq!(buffer[..8], grain.to_le_bytes());
    }
    (running() - begun) / READS as f64
}

/// Nanoseconds of a read.
fn measure(chain: &Chain, grains: u64, round: u64) -> f64 {
    let (mut random, mut buffer) = (Random::new(round), Buffer::zeroed(1));
    let begun = running();
    for _ in 0..READS {
        let grain = random.below(grains);
        let plan = chain.plan(grain * GRAIN, GRAIN as usize).unwrap();
        for part in &plan.parts {
            match &part.place {
                Place::Media { file, offset } => file.read_at(&mut buffer, *offset).unwrap(),
                _ => panic!("every grain has data"),
            }
        }
        assert_eq!(buffer[..8], grain.to_le_bytes());
    }
    (running() - begun) / READS as f64
}

/// Reads per second from the device.
fn measure_medium(directory: &LocalDirectory, chain: &Chain, grains: u64, round: u64) -> f64 {
    let mut random = Random::new(round);
    let mut queue = directory.queue(IN_FLIGHT as u32).unwrap();
    let mut completions = Vec::new();
    let mut plans: Vec<Option<(u64, chain::Plan)>> = (0..IN_FLIGHT).map(|_| None).collect();
    let begun = Instant::now();
    let mut left = MEDIUM_READS;
    while left > 0 || queue.in_flight() > 0 {
        for (token, slot) in plans.iter_mut().enumerate().filter(|(_, slot)| slot.is_none()) {
            if left == 0 {
                break;
            }
            left -= 1;
            let grain = random.below(grains);
            let plan = chain.plan(grain * GRAIN, GRAIN as usize).unwrap();
            match &plan.parts[0].place {
                Place::Media { file, offset } => queue.read(file, *offset, Buffer::recycled(1), token as u64),
                _ => panic!("every grain has data"),
            }
            *slot = Some((grain, plan));
        }
        completions.clear();
        queue.wait(&mut completions, None).unwrap();
        for completion in &completions {
            let (grain, _) = plans[completion.token as usize].take().unwrap();
            assert_eq!(completion.buffer.as_ref().unwrap()[..8], grain.to_le_bytes());
        }
    }
    MEDIUM_READS as f64 / begun.elapsed().as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn compare(directory: &LocalDirectory, format: Format, what: &str, grains: u64) {
    let (flat, deep) = (build(directory, grains, None), build(directory, grains, Some(format)));
    let known = [places(&flat[0], grains), places(&deep[0], grains)];
    let mut figures: [Vec<(f64, f64)>; 3] = Default::default();
    for round in 0..=ROUNDS as u64 {
        let cached = (measure(&flat[0], grains, round), measure(&deep[0], grains, round));
        let without = (bare(&known[0]), bare(&known[1]));
        let medium = |chains: &[Chain; 2]| measure_medium(directory, &chains[1], grains, round);
        let medium = (medium(&deep), medium(&flat));
        // The first round warms the caches.
        if round > 0 {
            figures.iter_mut().zip([cached, without, medium]).for_each(|(all, figure)| all.push(figure));
        }
    }
    let ratio = |of: &[(f64, f64)]| median(of.iter().map(|(flat, deep)| flat / deep).collect());
    let one = |of: &[(f64, f64)], deep: bool| median(of.iter().map(|of| if deep { of.1 } else { of.0 }).collect());
    let [cached, without, medium] = &figures;
    let statistics = deep[0].statistics().metadata;
    println!(
        "{:10}  {what:15}  {:5.3}  {:5.0} {:5.0} ns  {:4.0} {:4.0} ns  {:5.0} {:5.0} ns {:5.3}   {:5.3} {:4.0} {:4.0} k/s          {:6} {:4.1} {:5.3} {:4.1}",
        format!("{format:?}"),
        ratio(cached),
        one(cached, false),
        one(cached, true),
        find(&flat[0], grains),
        find(&deep[0], grains),
        one(without, false),
        one(without, true),
        ratio(without),
        ratio(medium),
        one(medium, true) / 1000.0,
        one(medium, false) / 1000.0,
        statistics.entries,
        statistics.memory as f64 / statistics.entries as f64,
        statistics.hit_rate(),
        statistics.walk_levels_mean(),
    );
    for file in directory.list().unwrap() {
        directory.remove(&file).unwrap();
    }
}

fn main() {
    let parent = std::env::args().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let wanted = std::env::args().nth(2);
    let set = std::env::args().nth(3);
    let folder = tempfile::Builder::new().prefix("lamina-depth").tempdir_in(parent).unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Auto).unwrap();
    println!(
        "format      working set      ratio  flat, deep      to find       without a chain        from the device      \
         entries bytes hits levels a walk"
    );
    for format in Format::DELTAS {
        if wanted.as_ref().is_none_or(|wanted| format!("{format:?}").eq_ignore_ascii_case(wanted)) {
            let sets = SETS.iter().filter(|(what, _)| set.as_ref().is_none_or(|set| set == what));
            sets.for_each(|(what, grains)| compare(&directory, format, what, *grains));
        }
    }
}
