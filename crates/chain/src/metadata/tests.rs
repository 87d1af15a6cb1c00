//! Tests of a shard against a map of sectors, and of the cache's limits, prefetching and invalidation.

use super::entry::CachedExtent;
use super::shard::Shard;
use super::*;
use crate::mapping::To;
use testkit::Random;

fn data(start: u64, length: u64, level: u8, sector: u64) -> Mapping {
    let to = To::Data { level, file: 3, offset: sector * SECTOR };
    Mapping { start: start * SECTOR, length: length * SECTOR, to }
}

#[test]
fn an_encoded_entry_decodes_to_its_mapping() {
    for to in [
        To::Absent,
        To::Zero,
        To::Encoded { level: 255 },
        To::Data { level: 255, file: 8191, offset: ((1 << 39) - 20) * SECTOR },
        To::Data { level: 0, file: 0, offset: 0 },
    ] {
        let mapping = Mapping { start: ((1 << 37) - 10) * SECTOR, length: 10 * SECTOR, to };
        let mut entry = CachedExtent::new(&mapping).unwrap();
        entry.set_seen(true);
        entry.set_prefetched(true);
        assert_eq!(entry.mapping(), mapping);
        let part = entry.part(entry.start() + 3, entry.start() + 7);
        assert_eq!(part.mapping(), mapping.clipped(mapping.start + 3 * SECTOR, mapping.start + 7 * SECTOR));
        let (left, right) = (entry.part(entry.start(), entry.start() + 4), entry.part(entry.start() + 4, entry.end()));
        assert_eq!(left.joined(right), Some(entry));
        entry.set_seen(false);
        entry.set_prefetched(false);
        assert!(!entry.seen() && !entry.prefetched());
        assert_eq!(entry.mapping(), mapping);
    }
    let odd = |to| CachedExtent::new(&Mapping { start: 0, length: SECTOR, to }).is_none();
    assert!(odd(To::Data { level: 0, file: 8192, offset: 0 }));
    assert!(odd(To::Data { level: 0, file: 0, offset: 100 }));
    assert!(odd(To::Data { level: 0, file: 0, offset: SECTOR << 39 }));
    assert!(CachedExtent::new(&Mapping { start: 1, length: SECTOR, to: To::Zero }).is_none());
    assert!(CachedExtent::new(&Mapping { start: 0, length: SECTOR << 27, to: To::Zero }).is_none());
}

#[test]
fn a_shard_equals_a_model_by_sector() {
    const SECTORS: u64 = 4000;
    for seed in 0..30 {
        let mut random = Random(seed);
        let mut shard = Shard::default();
        let mut model: Vec<Option<To>> = vec![None; SECTORS as usize];
        for _ in 0..4000 {
            let start = random.below(SECTORS);
            let longest = if random.below(20) == 0 { 1000 } else { 8 };
            let length = (1 + random.below(longest)).min(SECTORS - start);
            let range = start as usize..(start + length) as usize;
            match random.below(10) {
                0..5 => {
                    let mapping = match random.below(4) {
                        0 => Mapping { to: To::Zero, ..data(start, length, 0, 0) },
                        // Adjacent extents of this kind are joined into one entry.
                        1 => data(start, length, 1, start + 77),
                        _ => data(start, length, random.below(4) as u8, random.below(1 << 30)),
                    };
                    shard.remove(start, start + length);
                    shard.insert(CachedExtent::new(&mapping).unwrap());
                    for (by, cell) in model[range].iter_mut().enumerate() {
                        *cell = Some(mapping.to.advanced(by as u64 * SECTOR));
                    }
                }
                5 => {
                    shard.remove(start, start + length);
                    model[range].fill(None);
                }
                6 => {
                    let free = model[range].iter().all(Option::is_none);
                    assert_eq!(shard.is_free(start, start + length), free);
                }
                7 if random.below(30) == 0 => {
                    shard.purge(2);
                    for cell in &mut model {
                        *cell = cell.filter(|to| to.level() != Some(2));
                    }
                }
                _ => {
                    let mut found = Vec::new();
                    let hit = shard.lookup(start, start + length, &mut found);
                    assert_eq!(hit, model[range].iter().all(Option::is_some));
                    for mapping in found {
                        for by in 0..mapping.length / SECTOR {
                            let expected = model[(mapping.start / SECTOR + by) as usize];
                            assert_eq!(Some(mapping.to.advanced(by * SECTOR)), expected);
                        }
                    }
                }
            }
            shard.check();
        }
        // A sweep removes whole entries; the remaining ones stay correct.
        while shard.entries > 10 {
            shard.sweep(7);
            shard.check();
            for start in 0..SECTORS {
                let mut found = Vec::new();
                if random.below(50) == 0 && shard.lookup(start, start + 1, &mut found) {
                    assert_eq!(Some(found[0].to), model[start as usize]);
                }
            }
        }
    }
}

#[test]
fn adjacent_mappings_are_joined() {
    let mut shard = Shard::default();
    for start in [10, 30, 20, 0] {
        shard.insert(CachedExtent::new(&data(start, 10, 1, 500 + start)).unwrap());
    }
    assert_eq!(shard.entries, 1);
    shard.insert(CachedExtent::new(&data(40, 10, 2, 540)).unwrap());
    assert_eq!(shard.entries, 2, "an extent of another level is a separate entry");
    shard.remove(15, 16);
    assert_eq!(shard.entries, 3);
    let mut found = Vec::new();
    assert!(!shard.lookup(10, 20, &mut found));
    shard.insert(CachedExtent::new(&data(15, 1, 1, 515)).unwrap());
    assert_eq!(shard.entries, 2);
}

fn cache(entries: usize) -> MetadataCache {
    MetadataCache::new(Tunables { entries, ..Tunables::default() }).unwrap()
}

fn fill(cache: &MetadataCache, changes: &Changes, demand: Range<u64>, found: &[Mapping]) {
    let end = found.last().map_or(demand.end, Mapping::end);
    let token = changes.token(&(found.first().map_or(demand.start, |first| first.start)..end));
    cache.fill(changes, &token, &demand, found, 1);
}

#[test]
fn the_cache_keeps_its_limit_and_evicts_the_least_recently_used() {
    let (cache, changes) = (cache(1000), Changes::new());
    let mut random = Random(5);
    let of = |block: u64| data(block * 8, 8, 1, (block * 7919) % 100_003 * 16);
    for round in 0..20_000u64 {
        // Half of the reads are of few blocks, a tenth of the number in the cache; half are of random blocks among ten
        // times that number.
        let block = if round % 2 == 0 { random.below(100) * 91 } else { random.below(10_000) };
        let range = of(block).start..of(block).end();
        let mut found = Vec::new();
        if cache.lookup(&range, &mut found) {
            assert_eq!(found, [of(block)]);
        } else {
            fill(&cache, &changes, range, &[of(block)]);
        }
        assert!(cache.statistics().entries <= 1000);
    }
    let mut found = Vec::new();
    let hot = (0..100).filter(|block| cache.lookup(&(of(block * 91).start..of(block * 91).end()), &mut found)).count();
    assert!(hot > 95, "{hot} of 100");
    let statistics = cache.statistics();
    assert!(statistics.evictions > 5000 && statistics.hits > 9000);
    cache.set_tunables(Tunables { entries: 10, ..cache.tunables() }).unwrap();
    assert!(cache.statistics().entries <= 10);
    cache.set_tunables(Tunables { entries: 0, ..cache.tunables() }).unwrap();
    assert_eq!(cache.statistics().entries, 0);
    assert!(cache.set_tunables(Tunables { prefetch_extents: 129, ..Tunables::default() }).is_err());
    assert!(cache.set_tunables(Tunables { entries: usize::MAX, ..Tunables::default() }).is_err());
}

#[test]
fn extents_are_split_at_region_boundaries() {
    let (cache, changes) = (cache(1000), Changes::new());
    let whole = data(0, 5 * REGION / SECTOR, 1, 64);
    fill(&cache, &changes, 0..whole.length, &[whole]);
    assert_eq!(cache.statistics().entries, 5);
    let mut found = Vec::new();
    assert!(cache.lookup(&(REGION - 4096..3 * REGION + 512), &mut found));
    assert_eq!(found, [whole.clipped(REGION - 4096, 3 * REGION + 512)]);
    cache.forget(&(2 * REGION - 512..2 * REGION + 512));
    found.clear();
    assert!(!cache.lookup(&(REGION..3 * REGION), &mut found) && found.is_empty());
    assert!(cache.lookup(&(2 * REGION + 512..3 * REGION), &mut found));
}

#[test]
fn prefetched_entries_are_evicted_first_and_replace_no_newer_entry() {
    let (cache, changes) = (cache(64), Changes::new());
    let newer = data(8, 8, 9, 4096);
    fill(&cache, &changes, newer.start..newer.end(), &[newer]);
    let found: Vec<Mapping> = (0..64).map(|block| data(block * 8, 8, 1, block * 1000)).collect();
    fill(&cache, &changes, 0..4096, &found);
    let statistics = cache.statistics();
    assert_eq!((statistics.prefetched, statistics.entries), (62, 64));
    let mut out = Vec::new();
    assert!(cache.lookup(&(newer.start..newer.end()), &mut out));
    assert_eq!(out, [newer]);
    assert!(cache.lookup(&(20 * 4096..21 * 4096), &mut out));
    assert_eq!(cache.statistics().prefetched_used, 1);
    // A used entry stays, entries that were only prefetched are evicted.
    for block in 100..140 {
        fill(&cache, &changes, block * 4096..block * 4096 + 4096, &[data(block * 8, 8, 2, block * 500)]);
    }
    out.clear();
    assert!(cache.lookup(&(newer.start..newer.end()), &mut out));
    assert!(cache.lookup(&(20 * 4096..21 * 4096), &mut out));
}

#[test]
fn prefetching_stops_when_its_entries_are_unused_and_resumes() {
    let (cache, changes) = (cache(2000), Changes::new());
    let mut random = Random(9);
    let of = |block: u64| data(block * 8, 8, 1, (block * 7919) % 1_000_003 * 16);
    let read = |block: u64| {
        let demand = block * 4096..block * 4096 + 4096;
        let mut out = Vec::new();
        if !cache.lookup(&demand, &mut out) {
            let (window, most) = cache.window(&demand, 1 << 40);
            let along = window.start / 4096..window.end / 4096;
            let found: Vec<Mapping> = (block..(block + 1 + most as u64).min(along.end)).map(of).collect();
            fill(&cache, &changes, demand, &found);
            return most;
        }
        0
    };
    let mut late = 0;
    for round in 0..100_000 {
        let most = read(random.below(100_000));
        late += if round > 50_000 { most } else { 0 };
    }
    assert!(late < 50_000, "{late} extents were prefetched and never used");
    let mut most = 0;
    for block in 0..200_000 {
        most = most.max(read(200_000 + block));
    }
    assert!(most >= 32, "a sequential stream is prefetched again, {most} extents at a time");
}

#[test]
fn a_lookup_that_a_change_overtook_is_not_cached() {
    let (cache, changes) = (cache(1000), Changes::new());
    let (old, new) = (data(0, 256, 1, 0), data(0, 8, 2, 77));
    let token = changes.token(&(0..old.length));
    changes.begin(&(0..4096));
    cache.replace(&(0..4096), &[new]);
    changes.end(&(0..4096));
    cache.fill(&changes, &token, &(0..old.length), &[old], 1);
    let mut out = Vec::new();
    assert!(cache.lookup(&(0..4096), &mut out));
    assert_eq!(out, [new]);
}

#[test]
fn a_merge_redirects_the_cache_entries_of_its_sources() {
    let (cache, changes) = (cache(1000), Changes::new());
    let old = [data(0, 8, 1, 0), data(8, 8, 2, 0), data(16, 8, 1, 900)];
    fill(&cache, &changes, 0..24 * SECTOR, &old);
    let mut from = Numbers::default();
    from.insert(1);
    cache.retarget(&(4 * SECTOR..20 * SECTOR), from, &[data(4, 16, 7, 5000)]);
    let mut out = Vec::new();
    assert!(cache.lookup(&(0..24 * SECTOR), &mut out));
    let expected = [data(0, 4, 1, 0), data(4, 4, 7, 5000), data(8, 8, 2, 0), data(16, 4, 7, 5012), data(20, 4, 1, 904)];
    assert_eq!(out, expected);
}
