//! What the caches guarantee, tested from outside: walks, prefetches, limits, and files opened for direct I/O.

use crate::mock::{DirectFile, Manner, MemoryFile, Mock, Table};
use chain::{Chain, Condition, Options, Place, Span, Tunables};
use error::ErrorKind;
use layer::Layer;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use testkit::Random;
use work::NoProgress;

/// A chain of `depth` levels. Each level stores every `depth`-th grain.
fn striped(depth: u64, capacity: u64, options: Options) -> (Chain, Vec<Arc<Mock>>) {
    let layers: Vec<Arc<Mock>> = (0..depth).map(|_| Mock::new(Manner::new(capacity, 4096))).collect();
    for (index, layer) in (0..).zip(&layers) {
        for grain in (index..capacity / 4096).step_by(depth as usize) {
            layer.write(grain * 4096, &[&grain.to_le_bytes().repeat(512)]).unwrap();
        }
    }
    let chain = Chain::open("striped", layers.iter().map(|l| l.clone() as Arc<dyn Layer>).collect(), options).unwrap();
    (chain, layers)
}

fn check(chain: &Chain, grain: u64) {
    let mut out = [0; 4096];
    chain.read(grain * 4096, &mut out).unwrap();
    assert_eq!(out[..], grain.to_le_bytes().repeat(512));
}

#[test]
fn a_layer_is_read_only_for_ranges_absent_in_the_layers_above() {
    let (chain, layers) = striped(2, 1 << 20, Options::default());
    let whole = Mock::new(Manner::new(1 << 20, 4096));
    whole.write(0, &[&vec![1; 1 << 20]]).unwrap();
    chain.push(whole).unwrap();
    layers.iter().for_each(|layer| layer.maps.store(0, Ordering::SeqCst));
    chain.read(0, &mut vec![0; 1 << 20]).unwrap();
    assert!(layers.iter().all(|layer| layer.maps.load(Ordering::SeqCst) == 0));
    assert_eq!(chain.statistics().metadata.walk_levels_max, 1);
}

#[test]
fn a_stream_over_fragments_is_prefetched() {
    let (chain, _) = striped(32, 8 << 20, Options::default());
    for grain in 0..2048 {
        check(&chain, grain);
    }
    let statistics = chain.statistics().metadata;
    assert!(statistics.misses <= 2048 / 60, "{statistics:?}");
    assert_eq!(statistics.hits + statistics.misses, 2048);
    assert_eq!(statistics.walk_levels_max, 32);
    assert!(statistics.prefetched >= 1980 && statistics.prefetched_used == statistics.prefetched, "{statistics:?}");
    assert_eq!(statistics.entries, 2048);
    assert!(statistics.walk_levels_mean() > 31.0 && statistics.hit_rate() > 0.98);
}

#[test]
fn changed_tunables_take_effect_at_once() {
    let (chain, _) = striped(8, 4 << 20, Options::default());
    let off = Tunables { prefetch_bytes: 0, ..chain.tunables() };
    chain.set_tunables(off).unwrap();
    (0..100).for_each(|grain| check(&chain, grain));
    assert_eq!((chain.statistics().metadata.misses, chain.statistics().metadata.prefetched), (100, 0));
    chain.set_tunables(Tunables { prefetch_bytes: 64 << 10, prefetch_extents: 128, ..off }).unwrap();
    // The prefetch windows are aligned ranges of 16 grains.
    (112..208).for_each(|grain| check(&chain, grain));
    assert_eq!(chain.statistics().metadata.misses, 106);
    chain.set_tunables(Tunables { entries: 10, ..off }).unwrap();
    assert!(chain.statistics().metadata.entries <= 10);
    let statistics = chain.statistics().metadata;
    assert!(statistics.memory < 10_000, "{statistics:?}");
    assert!(chain.set_tunables(Tunables { prefetch_extents: 129, ..off }).is_err());
    (0..1024).for_each(|grain| check(&chain, grain));
}

#[test]
fn the_data_cache_answers_without_the_layers_and_keeps_its_size() {
    let options = Options { data_cache: 2 << 20, ..Options::default() };
    let (chain, _) = striped(4, 8 << 20, options);
    for _ in 0..3 {
        (0..256).for_each(|grain| check(&chain, grain));
    }
    let plan = chain.plan(100, 20_000).unwrap();
    assert!(plan.parts.iter().all(|part| matches!(part.place, Place::Memory(_))));
    let statistics = chain.statistics().data;
    assert!(statistics.hits >= 512 && statistics.blocks == 256, "{statistics:?}");
    let mut random = Random::new(1);
    for _ in 0..10_000 {
        check(&chain, random.below(2048));
        let statistics = chain.statistics().data;
        assert!(statistics.memory <= 2 << 20);
    }
    chain.set_data_cache(0).unwrap();
    assert_eq!((chain.statistics().data.blocks, chain.statistics().data.memory), (0, 0));
    check(&chain, 5);
}

#[test]
fn a_read_after_a_write_returns_new_data_in_spite_of_caches() {
    let (chain, _) = striped(4, 1 << 20, Options { data_cache: 1 << 20, ..Options::default() });
    (0..256).for_each(|grain| check(&chain, grain));
    chain.write(4096 * 7 + 10, &[9; 100]).unwrap();
    let mut out = [0; 4096];
    chain.read(4096 * 7, &mut out).unwrap();
    let mut expected = 7u64.to_le_bytes().repeat(512);
    expected[10..110].fill(9);
    assert_eq!(out[..], expected);
    let misses = chain.statistics().metadata.misses;
    chain.zero(4096 * 8, 4096 * 2, false).unwrap();
    chain.read(4096 * 8, &mut out).unwrap();
    assert_eq!(out, [0; 4096]);
    assert_eq!(chain.statistics().metadata.misses, misses, "the cache had the extent");
}

#[test]
fn direct_io_files_are_read_in_whole_blocks() {
    let mut random = Random::new(2);
    let mut content = vec![0; 300 * 512];
    random.fill(&mut content);
    for (grain, data_cache) in [(512, 0), (4096, 0), (512, 1 << 20)] {
        let file = Arc::new(DirectFile(Arc::new(MemoryFile::default())));
        let layer = Mock::over(Manner::new(content.len() as u64, grain), file, Table::default());
        let options = Options { data_cache, ..Options::default() };
        let chain = Chain::open("direct", vec![layer as Arc<dyn Layer>], options).unwrap();
        for sector in [5usize, 3, 100, 101, 102, 299, 0, 1, 2] {
            chain.write(sector as u64 * 512, &content[sector * 512..][..512]).unwrap();
        }
        for start in (0..content.len() as u64).step_by(700) {
            let length = (content.len() as u64 - start).min(1500) as usize;
            let mut out = vec![0; length];
            chain.read(start, &mut out).unwrap();
            for (at, byte) in (start as usize..).zip(out) {
                let held = [0, 1, 2, 3, 5, 100, 101, 102, 299].contains(&(at / 512));
                assert_eq!(byte, if held { content[at] } else { 0 }, "{at}");
            }
        }
    }
}

#[test]
fn encoded_layers_are_read_through_their_decoder() {
    let mut content = vec![0; 100_000 / 512 * 512];
    Random::new(3).fill(&mut content);
    let plain = Mock::new(Manner::new(content.len() as u64, 65536));
    plain.write(0, &[&content]).unwrap();
    plain.flush().unwrap();
    let manner = Manner { encoded: true, writable: false, ..plain.manner() };
    for data_cache in [0, 1 << 20] {
        let base = Mock::over(manner, plain.file(0).unwrap().clone(), plain.durable());
        let top = Mock::new(Manner::new(content.len() as u64, 4096));
        let layers = vec![top as Arc<dyn Layer>, base];
        let chain = Chain::open("encoded", layers, Options { data_cache, ..Options::default() }).unwrap();
        chain.write(70_001, &[1; 3]).unwrap();
        let mut expected = content.clone();
        expected[70_001..70_004].fill(1);
        for _ in 0..2 {
            let mut out = vec![0; content.len()];
            chain.read(0, &mut out).unwrap();
            assert!(out == expected);
            let mut out = vec![0; 33];
            chain.read(65_530, &mut out).unwrap();
            assert!(out == expected[65_530..65_563]);
        }
        let keys = chain.keys();
        chain.merge_up(keys[0], keys[1], 0, &NoProgress, &mut || Ok(())).unwrap();
        let mut out = vec![0; content.len()];
        chain.read(0, &mut out).unwrap();
        assert!(out == expected);
    }
}

#[test]
fn the_limit_of_levels_is_named_in_the_error() {
    let layer = || Mock::new(Manner::new(1 << 20, 4096)) as Arc<dyn Layer>;
    let options = Options { levels_max: 32, ..Options::default() };
    let chain = Chain::open("deep", (0..32).map(|_| layer()).collect(), options).unwrap();
    let error = chain.push(layer()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("33 levels is deeper than the limit of 32"), "{error}");
    assert!(Chain::open("deep", (0..33).map(|_| layer()).collect(), options).is_err());
    assert!(Chain::open("none", Vec::new(), options).is_err());
    assert!(Chain::open("much", vec![layer()], Options { levels_max: 129, ..options }).is_err());
    // In total, more levels are added and merged than there are level numbers.
    let chain = Chain::open("long", vec![layer()], Options::default()).unwrap();
    for round in 0..600u64 {
        chain.write(round * 512, &[round as u8; 512]).unwrap();
        chain.push(layer()).unwrap();
        let keys = chain.keys();
        if keys.len() > 3 {
            chain.merge_down(keys[1], keys[2], 0, &NoProgress, &mut || Ok(())).unwrap();
        }
        let mut out = [0; 512];
        chain.read(round / 2 * 512, &mut out).unwrap();
        assert_eq!(out, [(round / 2) as u8; 512]);
    }
}

#[test]
fn requests_past_the_end_and_writes_to_read_only_layers_are_refused() {
    let layer = Mock::new(Manner::new(1 << 20, 4096)) as Arc<dyn Layer>;
    let chain = Chain::open("small", vec![layer.clone()], Options::default()).unwrap();
    let invalid = |result: error::Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid);
    invalid(chain.read(1 << 20, &mut [0]));
    invalid(chain.read(u64::MAX, &mut [0; 512]));
    invalid(chain.write((1 << 20) - 1, &[0; 2]));
    invalid(chain.zero(u64::MAX, 2, false));
    invalid(chain.status(1, 1 << 20, 10).map(|_| ()));
    chain.read(1 << 20, &mut []).unwrap();
    chain.write(1 << 20, &[]).unwrap();
    chain.zero(1 << 20, 0, false).unwrap();
    let frozen = Chain::open("frozen", vec![layer], Options { read_only: true, ..Options::default() }).unwrap();
    assert_eq!(frozen.write(0, &[1]).unwrap_err().kind(), ErrorKind::ReadOnly);
    chain.write(0, &[1; 512]).unwrap();
    chain.close().unwrap();
    assert_eq!(chain.write(0, &[1]).unwrap_err().kind(), ErrorKind::Stopped);
    chain.read(0, &mut [0; 512]).unwrap();
}

/// A random load over more blocks than the cache has entries: each miss queries only the level that stores the block,
/// and reads return the latest content.
#[test]
fn with_a_full_cache_a_miss_reads_one_level_and_no_stale_data() {
    const GRAINS: u64 = 4096;
    const CAPACITY: u64 = 1 << 30;
    // The grains are spread over the disk, so that every shard has a part of the load.
    let place = |grain: u64| grain % 16 * (64 << 20) + grain / 16 * 4096;
    let tunables = Tunables { entries: 2000, prefetch_extents: 0, ..Tunables::default() };
    let options = Options { metadata: tunables, levels_max: 64, ..Options::default() };
    let layers: Vec<Arc<Mock>> = (0..16).map(|_| Mock::new(Manner::new(CAPACITY, 4096))).collect();
    let mut random = Random::new(12);
    for grain in 0..GRAINS {
        let layer = &layers[random.below(16) as usize];
        layer.write(place(grain), &[&grain.to_le_bytes().repeat(512)]).unwrap();
    }
    let layers = layers.into_iter().map(|layer| layer as Arc<dyn Layer>).collect();
    let chain = Chain::open("random", layers, options).unwrap();
    let mut content: Vec<u64> = (0..GRAINS).collect();
    let read = |grain: u64, content: &[u64]| {
        let mut out = [0; 4096];
        chain.read(place(grain), &mut out).unwrap();
        assert_eq!(out[..], content[grain as usize].to_le_bytes().repeat(512), "grain {grain}");
    };
    for round in 0..2 {
        let before = chain.statistics().metadata;
        (0..20_000).for_each(|_| read(random.below(GRAINS), &content));
        let now = chain.statistics().metadata;
        let (walks, levels) = (now.walks - before.walks, now.walk_levels - before.walk_levels);
        assert!(walks > 5000, "{now:?}");
        assert!(round == 0 || levels < walks * 5 / 4, "{levels} levels in {walks} walks");
    }
    for step in 0..60_000u64 {
        let grain = random.below(GRAINS);
        match random.below(1000) {
            0..60 => {
                content[grain as usize] = step | 1 << 40;
                chain.write(place(grain), &(step | 1 << 40).to_le_bytes().repeat(512)).unwrap();
            }
            // Zeroed ranges are few and short: adjacent zeros would be joined into one entry, and the test needs more
            // entries than the cache may have.
            60..70 => {
                let count = 1 + random.below(GRAINS / 16 - grain / 16).min(2);
                (0..count).for_each(|next| content[(grain + next * 16) as usize] = 0);
                chain.zero(place(grain), count * 4096, false).unwrap();
            }
            80 if chain.keys().len() < 40 => drop(chain.push(Mock::new(Manner::new(CAPACITY, 4096))).unwrap()),
            81 if step % 4 == 0 => {
                let keys = chain.keys();
                let upper = random.below(keys.len() as u64 - 1) as usize;
                let lower = upper + 1 + random.below(3.min(keys.len() as u64 - upper as u64 - 1)) as usize;
                match step % 8 {
                    0 => chain.merge_down(keys[upper], keys[lower], 0, &NoProgress, &mut || Ok(())).map(drop).unwrap(),
                    _ => chain.merge_up(keys[upper], keys[lower], 0, &NoProgress, &mut || Ok(())).map(drop).unwrap(),
                }
            }
            _ => read(grain, &content),
        }
    }
}

#[test]
fn the_status_of_long_ranges_of_one_kind_takes_few_queries() {
    const CAPACITY: u64 = 64 << 40;
    const GRAIN: u64 = 64 << 20;
    let layers = [Mock::new(Manner::new(CAPACITY, GRAIN)), Mock::new(Manner::new(CAPACITY, GRAIN))];
    let zeroed = 1000 * GRAIN..1003 * GRAIN;
    layers[1].zero(zeroed.clone(), false).unwrap();
    let stack = layers.iter().map(|layer| layer.clone() as Arc<dyn Layer>).collect();
    let chain = Chain::open("large", stack, Options::default()).unwrap();
    layers.iter().for_each(|layer| layer.maps.store(0, Ordering::SeqCst));
    let span = |start: u64, end: u64, condition| Span { start, length: end - start, condition };
    let expected = [
        span(0, zeroed.start, Condition::Absent),
        span(zeroed.start, zeroed.end, Condition::Zero),
        span(zeroed.end, CAPACITY, Condition::Absent),
    ];
    assert_eq!(chain.status(0, CAPACITY, 10).unwrap(), expected);
    // Windows of a fixed size of 64 MiB would take a million queries.
    let queries: u64 = layers.iter().map(|layer| layer.maps.load(Ordering::SeqCst)).sum();
    assert!(queries < 500, "{queries} queries");
}
