//! Run lists against a plain table, and the cache of run lists.

use super::cache::RunCache;
use super::*;
use crate::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % bound
    }
}

type ModelRow = Option<(u8, u64)>;

fn check(list: &RunList, model: &[ModelRow], stride: u32) {
    let runs: Vec<EntryRun> = list.runs().collect();
    for pair in runs.windows(2) {
        assert!(pair[0].end() <= pair[1].first, "sorted and disjoint");
        assert!(!pair[0].is_continued_by(&pair[1], stride), "{pair:?} should be one run");
    }
    let mut seen = Vec::new();
    for piece in list.pieces(0..model.len() as u32) {
        assert_eq!(piece.first as usize, seen.len());
        for at in 0..u64::from(piece.count) {
            seen.push(
                piece.what.map(|(kind, place)| (kind, if place == 0 { 0 } else { place + at * u64::from(stride) })),
            );
        }
    }
    assert!(seen == model, "the table differs from the model");
}

#[test]
fn a_run_list_returns_the_entries_that_were_set() {
    for seed in 0..60 {
        let mut numbers = Numbers(seed);
        let stride = [1, 1, 8, 3][seed as usize % 4];
        let size = [16, 512, 4096][seed as usize % 3] as u32;
        let mut list = RunList::new(stride);
        let mut model: Vec<ModelRow> = vec![None; size as usize];
        let mut next = 100;
        for _ in 0..400 {
            let first = numbers.below(u64::from(size)) as u32;
            let count = (1 + numbers.below(1 + u64::from(size) / 8) as u32).min(size - first);
            let kind = 1 + numbers.below(3) as u8;
            if numbers.below(6) == 0 {
                list.clear(first..first + count);
                model[first as usize..(first + count) as usize].fill(None);
            } else {
                // Often a continuation of the entry to the left.
                let before = first.checked_sub(1).and_then(|left| model[left as usize]);
                let (kind, place) = match before {
                    Some((kind, place)) if place > 0 && numbers.below(2) == 0 => (kind, place + u64::from(stride)),
                    _ if kind == 3 => (kind, 0),
                    _ => {
                        next += 10_000;
                        (kind, next)
                    }
                };
                list.set(first..first + count, kind, place);
                for at in 0..count {
                    let place = if place == 0 { 0 } else { place + u64::from(at) * u64::from(stride) };
                    model[(first + at) as usize] = Some((kind, place));
                }
            }
            check(&list, &model, stride);
            let from = numbers.below(u64::from(size)) as u32;
            let part = list.pieces(from..size).map(|piece| piece.count).sum::<u32>();
            assert_eq!(part, size - from);
        }
    }
}

#[test]
fn the_largest_run_can_be_encoded() {
    let mut list = RunList::new(1);
    list.set(0..ENTRIES_MAX, 3, PLACE_MAX - u64::from(ENTRIES_MAX));
    assert_eq!(
        list.runs().collect::<Vec<_>>(),
        [EntryRun { first: 0, count: ENTRIES_MAX, kind: 3, place: PLACE_MAX - u64::from(ENTRIES_MAX) }]
    );
    assert!(list.heap_bytes() / size_of::<u64>() < 5);
}

fn table(index: u32) -> RunList {
    let mut list = RunList::new(1);
    for at in 0..64 {
        list.push(EntryRun { first: at * 2, count: 1, kind: 1, place: u64::from(index * 1000 + at + 1) });
    }
    list.shrink_to_fit();
    list
}

#[test]
fn the_cache_is_bounded_and_keeps_changed_pages() {
    let cache = RunCache::new(1 << 20);
    let place = |list: &RunList| list.pieces(0..1).next().unwrap().what.unwrap().1;
    cache.change(7, || Ok(table(7)), |list| (list.set(0..1, 1, 99), 1)).unwrap();
    let mut loads = 0;
    for index in 0..100_000u32 {
        let found = cache
            .read(
                index,
                || {
                    loads += 1;
                    Ok(table(index))
                },
                place,
            )
            .unwrap();
        assert_eq!(found, if index == 7 { 99 } else { u64::from(index * 1000 + 1) });
        assert!(cache.bytes() <= (1 << 20) + 16 * 1024, "{} bytes", cache.bytes());
    }
    assert_eq!(loads, 99_999);
    assert_eq!(cache.changed(), 1);
    let captured = cache.capture();
    assert_eq!((captured.len(), captured[0].index, captured[0].parts), (1, 7, 1));
    assert_eq!(cache.changed(), 0);
    // While a table is being written it stays cached, and may be changed again.
    cache.change(7, || unreachable!(), |list| (list.set(0..1, 1, 100), 2)).unwrap();
    assert_eq!(place(&captured[0].list), 99);
    cache.release(&captured);
    let again = cache.capture();
    assert_eq!((again[0].parts, place(&again[0].list)), (2, 100));
    cache.release(&again);
    for index in 0..100_000u32 {
        cache.read(index + 1000, || Ok(table(index)), place).unwrap();
    }
    assert_eq!(cache.read(7, || Ok(table(7)), place).unwrap(), 7001, "a written table could be evicted");
    let failed = cache.read(1 << 30, || Err(Error::new(ErrorKind::Io, "no")), place);
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
}

#[test]
fn concurrent_threads_read_and_write_one_table() {
    let cache = Arc::new(RunCache::new(64 << 10));
    let stored: Arc<Vec<parking_lot::Mutex<RunList>>> =
        Arc::new((0..64).map(|_| parking_lot::Mutex::new(RunList::new(1))).collect());
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (cache, stored) = (Arc::clone(&cache), Arc::clone(&stored));
            scope.spawn(move || {
                let mut numbers = Numbers(thread);
                for round in 0..20_000u64 {
                    let index = numbers.below(64) as u32;
                    let load = || Ok(stored[index as usize].lock().clone());
                    // Each thread changes its own entries in each table.
                    let own = (thread * 100 + numbers.below(100)) as u32;
                    cache.change(index, load, |list| (list.set(own..own + 1, 1, round + 1), 1)).unwrap();
                    let seen = cache.read(index, load, |list| list.pieces(own..own + 1).next().unwrap().what);
                    assert_eq!(seen.unwrap(), Some((1, round + 1)));
                    if thread == 0 && round % 50 == 0 {
                        let captured = cache.capture();
                        for table in &captured {
                            *stored[table.index as usize].lock() = (*table.list).clone();
                        }
                        cache.release(&captured);
                    }
                }
            });
        }
    });
}

#[test]
fn a_table_is_not_changed_while_a_scan_reads_it() {
    let cache = RunCache::new(1 << 20);
    let changed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let read = cache.peek_or_load(1, || {
            scope.spawn(|| {
                cache.change(1, || Ok(RunList::new(1)), |list| (list.set(0..1, 1, 9), 1)).unwrap();
                changed.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(!changed.load(Ordering::SeqCst));
            Ok(RunList::new(1))
        });
        assert_eq!(read.unwrap().runs().count(), 0);
    });
    let cached = cache.peek_or_load(1, || Err(Error::new(ErrorKind::Io, "the table is cached"))).unwrap();
    assert_eq!(cached.runs().count(), 1);
}
