//! The whole memory of the metadata cache, counted by the allocator: at most 32 bytes per entry at 65,536 entries, for
//! any order of insertion.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "chain/mock.rs"]
mod mock;

use chain::{Chain, Options, Tunables};
use layer::Layer;
use mock::{Manner, Mock};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use testkit::Random;

/// Rounds sizes up as glibc does: 8 bytes of header, multiples of 16.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

fn cost(size: usize) -> usize {
    (size + 8).next_multiple_of(16).max(32)
}

// SAFETY: every call is passed on to the system's allocator unchanged; besides that, only a counter changes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(cost(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller keeps the same contract that `System` requires.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(cost(layout.size()), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ENTRIES: usize = 65_536;

/// Reads grains in the order of `reads`, with the levels in turn, so that no two grains are one extent.
fn measure(name: &str, grains: u64, reads: impl Iterator<Item = u64>, discards: bool) {
    let capacity = grains * 4096;
    let layers: Vec<Arc<dyn Layer>> = (0..8u64)
        .map(|level| {
            let layer = Mock::new(Manner::new(capacity, 4096));
            for grain in (level..grains).step_by(8) {
                layer.write(grain * 4096, &[&[1; 4096]]).unwrap();
            }
            layer as Arc<dyn Layer>
        })
        .collect();
    let chain = Chain::open("memory", layers, Options::default()).unwrap();
    assert_eq!(chain.tunables(), Tunables { entries: ENTRIES, ..Tunables::default() });
    let before = LIVE.load(Ordering::Relaxed);
    for (index, grain) in reads.enumerate() {
        if discards && index % 4 == 0 {
            chain.zero(grain * 4096, 4096, false).unwrap();
        }
        chain.plan(grain * 4096, 4096).unwrap();
    }
    let taken = LIVE.load(Ordering::Relaxed) - before;
    let statistics = chain.statistics().metadata;
    let own = std::mem::size_of::<Chain>();
    let entries = statistics.entries as usize;
    println!(
        "{name}: {entries} entries, {:.1} bytes each ({:.1} as the statistics count them)",
        taken as f64 / entries as f64,
        statistics.memory as f64 / entries as f64
    );
    assert!(entries > ENTRIES * 9 / 10 && entries <= ENTRIES, "{entries}");
    // The memory of the empty chain is included.
    assert!(taken + own <= 32 * entries, "{name}: {taken} bytes for {entries} entries");
    let (counted, told) = (taken as f64, statistics.memory as f64);
    assert!(told > counted * 0.8 && told < counted * 1.2, "the statistics report {told}, not {counted}");
}

#[test]
fn a_cache_entry_takes_at_most_32_bytes() {
    let mut random = Random::new(1);
    let full = ENTRIES as u64;
    measure("in order", full, 0..full, false);
    let mut shuffled: Vec<u64> = (0..full).collect();
    for at in (1..shuffled.len()).rev() {
        shuffled.swap(at, random.below(at as u64 + 1) as usize);
    }
    measure("at random", full, shuffled.iter().copied(), false);
    let (mut one, mut two) = (Random::new(2), Random::new(3));
    measure("four times the capacity inserted", 4 * full, (0..4 * full).map(|_| one.below(4 * full)), false);
    measure(
        "more than the capacity inserted, with discards",
        4 * full,
        (0..3 * full).map(|_| two.below(4 * full)),
        true,
    );
}
