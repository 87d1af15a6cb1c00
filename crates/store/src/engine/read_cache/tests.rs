//! Places and changes in the shards of the read cache.

use super::*;
use crate::pack::{Codec, Packer};

fn content(byte: u8) -> Vec<u8> {
    vec![byte; BLOCK_SIZE]
}

fn keep(cache: &ReadCache, place: Place, byte: u8, planned: u64) {
    cache.keep(std::iter::once((place, &content(byte)[..])), planned);
}

fn held(cache: &ReadCache, run: Run) -> Vec<u64> {
    cache.plain(run).into_iter().map(|(block, _)| block).collect()
}

#[test]
fn the_cache_takes_at_most_its_memory() {
    for bytes in [0, 4096, 5000, 100 << 10, 4 << 20, 32 << 20] {
        let cache = ReadCache::new(bytes, Kept::All);
        (0..10_000).for_each(|block| keep(&cache, Place::plain(block * 7), 1, 0));
        let resident = cache.statistics().resident as usize;
        assert_eq!(held(&cache, Run { start: 0, blocks: 70_000 }).len() * BLOCK_SIZE, resident);
        assert!(resident <= bytes && resident >= bytes / 100 * 80 / BLOCK_SIZE * BLOCK_SIZE, "{resident} of {bytes}");
    }
}

#[test]
fn blocks_and_packs_are_forgotten_by_runs() {
    let cache = ReadCache::new(64 << 20, Kept::All);
    for block in 0..2000 {
        keep(&cache, Place::plain(block), 1, 0);
        keep(&cache, Place::packed(block, 255), 2, 0);
    }
    cache.forget(Run { start: 300, blocks: 700 });
    let left: Vec<u64> = (0..300).chain(1000..2000).collect();
    assert_eq!(held(&cache, Run { start: 0, blocks: 3000 }), left);
    let packed: Vec<u64> = (0..2000).filter(|block| !cache.packed(*block, 0..256).is_empty()).collect();
    assert_eq!(packed, left);
    assert_eq!(cache.statistics().resident, (2 * left.len() * BLOCK_SIZE) as u64);
}

#[test]
fn content_of_a_read_that_was_planned_before_a_change_is_refused() {
    let cache = ReadCache::new(1 << 20, Kept::All);
    let before = cache.changes();
    cache.forget(Run { start: 5, blocks: 2 });
    (4..8).for_each(|block| keep(&cache, Place::plain(block), 1, before));
    keep(&cache, Place::packed(6, 0), 1, before);
    assert!(held(&cache, Run { start: 0, blocks: 10 }) == [4, 7] && cache.packed(6, 0..1).is_empty());
    keep(&cache, Place::plain(6), 1, cache.changes());
    assert_eq!(held(&cache, Run { start: 0, blocks: 10 }), [4, 6, 7]);
}

#[test]
fn without_plain_blocks_only_packs_are_kept_apart_by_index() {
    let cache = ReadCache::new(1 << 20, Kept::Packed);
    assert!(!cache.holds_plain());
    (0..10).for_each(|index| keep(&cache, Place::packed(7, index), index as u8, 0));
    let found: Vec<(u64, u8)> = cache.packed(7, 3..6).into_iter().map(|(index, block)| (index, block[0])).collect();
    assert_eq!(found, [(3, 3), (4, 4), (5, 5)]);
    assert!(cache.packed(8, 0..256).is_empty());
    // Writes of plain blocks cost nothing.
    cache.forget_plain(Run { start: 7, blocks: 1 });
    assert_eq!((cache.changes(), cache.packed(7, 0..256).len()), (0, 10));
}

#[test]
fn the_shards_of_a_large_cache_stay_small() {
    for (bytes, shards) in
        [(64 << 20, 14), (256 << 20, 52), (8 << 30, 1638), (64 << 30, SHARDS_MAX), (usize::MAX, SHARDS_MAX)]
    {
        let cache = ReadCache::new(bytes, Kept::All);
        let found = cache.shards.len();
        assert!(found >= shards * 9 / 10 && found <= SHARDS_MAX, "{found} shards for {bytes} bytes");
        assert!(found == SHARDS_MAX || bytes / UNIT / found <= SHARD_UNITS_MAX);
    }
}

/// Otherwise most reads of a slow medium end too late to be kept while other blocks are written.
#[test]
fn a_change_of_another_group_of_the_shard_does_not_refuse_content() {
    let cache = ReadCache::new(256 << 20, Kept::All);
    let apart = GROUP * cache.shards.len() as u64;
    let before = cache.changes();
    cache.forget(Run { start: 5, blocks: 1 });
    (1..SLOTS / GROUP).for_each(|group| keep(&cache, Place::plain(5 + group * apart), 1, before));
    (0..GROUP).for_each(|block| keep(&cache, Place::plain(block), 1, before));
    let kept = held(&cache, Run { start: 0, blocks: SLOTS * cache.shards.len() as u64 });
    let expected = (0..GROUP).filter(|block| *block != 5).chain((1..SLOTS / GROUP).map(|group| 5 + group * apart));
    assert_eq!(kept, expected.collect::<Vec<u64>>());
}

#[test]
fn a_few_blocks_in_the_middle_of_a_run_do_not_divide_its_read() {
    let run = Run { start: 100, blocks: 100 };
    let used = |cached: &[(u64, u64)]| -> Vec<u64> {
        let one = SharedSlice::copy_of(&content(1));
        let cached = cached.iter().flat_map(|(from, to)| *from..*to).map(|block| (block, one.clone())).collect();
        worth_using(run, cached).into_iter().map(|(block, _)| block).collect()
    };
    assert_eq!(used(&[(100, 103), (110, 115), (117, 118), (198, 200)]), [100, 101, 102, 198, 199]);
    assert_eq!(used(&[(120, 152)]), (120..152).collect::<Vec<u64>>());
    assert!(used(&[(120, 151)]).is_empty() && used(&[]).is_empty());
    assert_eq!(used(&[(100, 200)]), (100..200).collect::<Vec<u64>>());
}

#[test]
fn blocks_of_packs_that_cost_little_are_kept_when_they_are_read_again() {
    let cache = ReadCache::new(4 << 20, Kept::PackedAgain);
    let kept = |cache: &ReadCache| (0..100).filter(|block| !cache.packed(*block, 0..32).is_empty()).count();
    let read = |cache: &ReadCache| (0..100).for_each(|block| keep(cache, Place::packed(block, 7), 1, 0));
    read(&cache);
    assert!(kept(&cache) < 3);
    read(&cache);
    assert!(kept(&cache) > 95);
}

#[test]
fn indexes_are_kept_beside_blocks_and_forgotten_with_their_packs() {
    let bytes = Packer::new(Codec::Lz4).unwrap().pack(&[Some(&content(1)), Some(&content(2))]);
    let index = Arc::new(Index::decode(&bytes, bytes.len()).unwrap());
    for kept in [Kept::All, Kept::Packed, Kept::PackedAgain] {
        let cache = ReadCache::new(1 << 20, kept);
        (0..100).for_each(|block| cache.keep_index(block, Arc::clone(&index)));
        cache.forget(Run { start: 60, blocks: 4 });
        let held = |cache: &ReadCache| (0..200).filter(|block| cache.index(*block).is_some()).collect::<Vec<u64>>();
        assert_eq!(held(&cache), (0..60).chain(64..100).collect::<Vec<u64>>());
        assert_eq!(cache.statistics().resident, (96 * index.memory()) as u64);
        assert!(cache.packed(3, 0..256).is_empty() && cache.plain(Run { start: 0, blocks: 100 }).is_empty());
        cache.forget(Run { start: 10, blocks: 5 });
        assert_eq!(held(&cache), (0..10).chain(15..60).chain(64..100).collect::<Vec<u64>>());
        // Seven indexes take the memory of one block.
        (200..4000).for_each(|block| cache.keep_index(block, Arc::clone(&index)));
        let count = (0..4000).filter(|block| cache.index(*block).is_some()).count();
        assert!((1400..=(1 << 20) / UNIT).contains(&count), "{count}");
    }
    assert!(!ReadCache::new(INDEXES_MIN - 1, Kept::All).holds_indexes());
}
