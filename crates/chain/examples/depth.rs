//! What depth costs: random 4 KiB reads through a chain of 32 levels against one level, with a warm cache and with a
//! working set that overflows it.
//!
//! ```text
//! cargo run --release -p lamina-chain --example depth [FOLDER]
//! ```
//!
//! Every grain of the disk lies in a level of its own choice, so each 4 KiB is an extent of its own: the worst there
//! is. Files are in FOLDER (default: the system's folder for temporary files), read through the page cache. Both
//! chains are measured in turn, nine times; the figures are medians.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../tests/chain/mock.rs"]
mod mock;
#[allow(dead_code)]
#[path = "../tests/chain/random.rs"]
mod random;

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Buffer, Directory, IoMode};
use chain::{Chain, Options, Place};
use layer::Layer;
use mock::{Manner, Mock, Table};
use random::Random;
use std::sync::Arc;
use std::time::Instant;

const GRAIN: u64 = 4096;
const DEPTH: u64 = 32;
const ROUNDS: usize = 9;
const RESOLVES: u64 = 400_000;

/// A disk of `grains`, spread over `depth` levels.
fn build(directory: &LocalDirectory, name: &str, grains: u64, depth: u64) -> Chain {
    let capacity = grains * GRAIN;
    let mut random = Random::new(7);
    let layers: Vec<Arc<Mock>> = (0..depth)
        .map(|level| {
            let file = directory.create(&format!("{name}-{level}"), IoMode::Buffered).unwrap();
            Mock::over(Manner::new(capacity, GRAIN), file, Table::default())
        })
        .collect();
    let mut block = vec![0; GRAIN as usize];
    for grain in 0..grains {
        block[..8].copy_from_slice(&grain.to_le_bytes());
        layers[random.below(depth) as usize].write(grain * GRAIN, &[&block]).unwrap();
    }
    let layers = layers.into_iter().map(|layer| layer as Arc<dyn Layer>).collect();
    Chain::open(name, layers, Options::default()).unwrap()
}

/// Nanoseconds to find 4 KiB, without reading them.
fn resolve(chain: &Chain, grains: u64) -> f64 {
    let mut random = Random::new(5);
    let begun = Instant::now();
    for _ in 0..RESOLVES {
        let plan = chain.plan(random.below(grains) * GRAIN, GRAIN as usize).unwrap();
        assert_eq!(plan.parts.len(), 1);
    }
    begun.elapsed().as_nanos() as f64 / RESOLVES as f64
}

/// What the same files give without a chain: every place known beforehand.
fn bare(chain: &Chain, grains: u64, reads: u64) -> f64 {
    let place = |grain: u64| match &chain.plan(grain * GRAIN, GRAIN as usize).unwrap().parts[0].place {
        Place::Media { file, offset } => (Arc::clone(file), *offset),
        _ => panic!("every grain has data"),
    };
    let places: Vec<_> = (0..grains).map(place).collect();
    let (mut random, mut buffer) = (Random::new(reads), Buffer::zeroed(1));
    let begun = Instant::now();
    for _ in 0..reads {
        let grain = random.below(grains);
        let (file, offset) = &places[grain as usize];
        file.read_at(&mut buffer, *offset).unwrap();
        assert_eq!(buffer[..8], grain.to_le_bytes());
    }
    reads as f64 / begun.elapsed().as_secs_f64()
}

/// Reads per second of `threads` threads.
fn measure(chain: &Chain, grains: u64, reads: u64, threads: u64) -> f64 {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut random = Random::new(reads + thread);
                let mut buffer = Buffer::zeroed(1);
                for _ in 0..reads / threads {
                    let grain = random.below(grains);
                    let plan = chain.plan(grain * GRAIN, GRAIN as usize).unwrap();
                    for part in &plan.parts {
                        match &part.place {
                            Place::Media { file, offset } => {
                                file.read_at(&mut buffer, *offset).unwrap();
                            }
                            _ => panic!("every grain has data"),
                        }
                    }
                    assert_eq!(buffer[..8], grain.to_le_bytes());
                }
            });
        }
    });
    reads as f64 / begun.elapsed().as_secs_f64()
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn compare(directory: &LocalDirectory, what: &str, grains: u64, threads: u64) {
    let name = format!("{grains}-{threads}");
    let flat = build(directory, &format!("{name}-flat"), grains, 1);
    let deep = build(directory, &format!("{name}-deep"), grains, DEPTH);
    let reads = 400_000;
    let (mut one, mut many) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let figures = (measure(&flat, grains, reads, threads), measure(&deep, grains, reads, threads));
        // The first round warms the caches.
        if round > 0 {
            one.push(figures.0);
            many.push(figures.1);
        }
    }
    let ratio = median(one.iter().zip(&many).map(|(one, many)| many / one).collect());
    let statistics = deep.statistics().metadata;
    let bare = (bare(&flat, grains, reads), bare(&deep, grains, reads));
    let alone = (resolve(&flat, grains), resolve(&deep, grains));
    println!(
        "{what}, {threads} thread(s): depth 1 {:.0} k/s, depth {DEPTH} {:.0} k/s, ratio {ratio:.3}; {} entries, \
         {:.1} bytes each, hit rate {:.3}, {:.1} levels a walk, {} of {} prefetched used; to find 4 KiB alone {:.0} \
         and {:.0} ns; the files without a chain {:.0} and {:.0} k/s",
        median(one) / 1000.0,
        median(many) / 1000.0,
        statistics.entries,
        statistics.memory as f64 / statistics.entries as f64,
        statistics.hit_rate(),
        statistics.walk_levels_mean(),
        statistics.prefetched_used,
        statistics.prefetched,
        alone.0,
        alone.1,
        bare.0 / 1000.0,
        bare.1 / 1000.0,
    );
    for file in directory.list().unwrap() {
        directory.remove(&file).unwrap();
    }
}

fn main() {
    let parent = std::env::args().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let folder = tempfile::Builder::new().prefix("lamina-depth").tempdir_in(parent).unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    for threads in [1, 2] {
        compare(&directory, "warm, 60,000 extents", 60_000, threads);
        compare(&directory, "overflowing, 131,072 extents", 2 * 65_536, threads);
        compare(&directory, "overflowing, 262,144 extents", 4 * 65_536, threads);
    }
}
