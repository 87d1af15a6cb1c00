//! What searches note about regions in which they found no run: never more than is true, and enough that regions
//! without bitmaps in memory are not loaded in vain again.

use super::super::allocation::{LOADED_REGIONS_MAX, SEARCH_REGIONS};
use super::super::backing::RECLAIM_REGIONS;
use super::super::region::{Bitmaps, Region};
use super::*;

const REGIONS: u64 = 2 * LOADED_REGIONS_MAX as u64;

/// Lengths of runs that searches look for.
const LENGTHS: [u64; 6] = [1, 2, 16, 100, 256, 3000];

impl World {
    /// The longest run of blocks of a region that satisfy a condition. Blocks after the last one of the model have
    /// never been used or reserved.
    fn longest(&self, region: u64, what: impl Fn(&Block) -> bool) -> u64 {
        let (mut longest, mut length) = (0, 0);
        for number in region * REGION_BLOCKS..(region + 1) * REGION_BLOCKS {
            let block = self.blocks.get(number as usize).copied().unwrap_or_default();
            length = if what(&block) { length + 1 } else { 0 };
            longest = longest.max(length);
        }
        longest
    }

    /// Searches as the allocation and the reservation do, and compares the results with the model. If a region is not
    /// loaded because of what an earlier search found, it must not have such a run.
    fn search_region(&mut self, region: u64) {
        let is_free = |block: &Block| !block.held && block.references == 0;
        let free = self.longest(region, |block| is_free(block) && block.backed);
        let unbacked = self.longest(region, |block| is_free(block) && !block.backed);
        let least = *self.random.pick(&LENGTHS);
        let number = region as usize;
        let mut found = false;
        if self.space.regions[number].may_have_free(least) {
            self.space.load(&mut self.pages, region).unwrap();
            found = self.space.regions[number].find_free(0, least, least).is_some();
        }
        assert_eq!(found, free >= least, "free: region {region}, {least} blocks, the longest run has {free}");
        if self.kind == SpaceKind::Map {
            return;
        }
        found = false;
        if self.space.regions[number].may_have_unbacked(least) {
            self.space.load(&mut self.pages, region).unwrap();
            found = self.space.regions[number].find_unbacked(least, least).is_some();
        }
        assert_eq!(found, unbacked >= least, "unbacked: region {region}, {least} blocks, the longest has {unbacked}");
    }
}

#[test]
fn searches_that_pass_over_regions_miss_no_run() {
    for kind in [SpaceKind::Data, SpaceKind::Map] {
        for seed in 0..4 {
            let mut world = World::new(kind, seed);
            for _ in 0..800 {
                world.step();
                for _ in 0..4.min(world.space.regions()) {
                    let region = world.random.below(world.space.regions());
                    world.search_region(region);
                }
            }
        }
    }
}

/// As above, for many short changes of one region, of which the first 256 blocks are changed and the others are used.
#[test]
fn a_region_finds_runs_that_become_longer_by_short_changes() {
    let mut random = Random(5);
    let mut region = Region::empty();
    region.bitmaps.insert(Box::new(Bitmaps::new())).set_used(256, REGION_BLOCKS - 256, true);
    let (mut used, mut backed) = ([false; 256], [false; 256]);
    let plain = |is_wanted: &dyn Fn(usize) -> bool, least: u64| {
        (0..=256 - least).any(|first| (first..first + least).all(|block| is_wanted(block as usize)))
    };
    for _ in 0..20_000 {
        let first = random.below(256);
        let count = 1 + random.below((256 - first).min(6));
        let (blocks, set) = (first as usize..(first + count) as usize, random.percent(50));
        let bitmaps = region.bitmaps.as_mut().unwrap();
        let of_used = random.percent(50);
        if of_used {
            bitmaps.set_used(first, count, set);
            used[blocks].fill(set);
        } else {
            bitmaps.set_backed(first, count, set);
            backed[blocks].fill(set);
        }
        if !(of_used && set) {
            region.review(first, count);
        }
        let least = 1 + random.below(12);
        let found = region.may_have_free(least) && region.find_free(0, least, least).is_some();
        assert_eq!(found, plain(&|block| backed[block] && !used[block], least), "{least} free blocks");
        let found = region.may_have_unbacked(least) && region.find_unbacked(least, least).is_some();
        assert_eq!(found, plain(&|block| !backed[block] && !used[block], least), "{least} unbacked blocks");
    }
}

/// A space with more regions than have bitmaps in memory, as after a start. In each region, the blocks `backed` of each
/// group of `group` blocks have space.
fn sparse(group: u64, backed: std::ops::Range<u64>) -> World {
    let mut world = World::new(SpaceKind::Data, 1);
    for start in (0..REGIONS * REGION_BLOCKS).step_by(group as usize) {
        let run = Run { start: start + backed.start, blocks: backed.end - backed.start };
        world.space.set_backed(&mut world.pages, run, true).unwrap();
    }
    world.space.store_summaries(&mut world.pages).unwrap();
    reopened(&world.files, &mut world.pages, CACHE);
    world.space = Space::open(SpaceKind::Data, REGIONS, 0, &mut world.pages).unwrap();
    world
}

impl World {
    /// Runs `search`, and returns its result with the number of table pages that it has read.
    fn reads<T>(&mut self, search: impl FnOnce(&mut Space, &mut Pages) -> T) -> (T, u64) {
        let before = self.pages.statistics().misses;
        let found = search(&mut self.space, &mut self.pages);
        (found, self.pages.statistics().misses - before)
    }

    fn plan(&mut self) -> (Run, u64) {
        self.reads(|space, pages| space.plan_extension(pages, 1024, &mut ExtensionSearch::default()).unwrap())
    }
}

#[test]
fn short_holes_are_read_once_and_a_few_regions_at_a_time() {
    // Holes of 253 blocks.
    let mut world = sparse(254, 0..1);
    let mut read = 0;
    for _ in 0..REGIONS / SEARCH_REGIONS {
        let end = world.space.blocks();
        let (run, reads) = world.plan();
        assert_eq!((run.start, reads), (end, SEARCH_REGIONS * REGION_PAGES), "one search reads a few regions");
        read += reads;
        // The new region is used up.
        world.space.set_backed(&mut world.pages, Run { start: end, blocks: REGION_BLOCKS }, true).unwrap();
    }
    assert_eq!(read, REGIONS * REGION_PAGES, "each region is read once");
    let end = world.space.blocks();
    let (run, reads) = world.plan();
    assert_eq!((run.start, reads), (end, 0), "no region is read in vain again");
    world.space.set_backed(&mut world.pages, Run { start: end, blocks: REGION_BLOCKS }, true).unwrap();
    // Two holes become one.
    let returned = Run { start: 9 * REGION_BLOCKS + 254, blocks: 1 };
    world.space.set_backed(&mut world.pages, returned, false).unwrap();
    let (run, _) = world.plan();
    assert_eq!(run, Run { start: 9 * REGION_BLOCKS + 1, blocks: 507 });
}

#[test]
fn scattered_free_blocks_are_read_once_and_a_few_regions_at_a_time() {
    let mut world = sparse(16, 0..15);
    let pass = |world: &mut World| {
        let (mut region, mut all) = (0, 0);
        while region < REGIONS {
            let search = |space: &mut Space, pages: &mut Pages| space.take_reclaimable(pages, &mut region, 16, 1 << 20);
            let (runs, reads) = world.reads(search);
            assert_eq!(runs.unwrap(), []);
            assert!(reads <= RECLAIM_REGIONS as u64 * REGION_PAGES, "{reads} pages are read");
            all += reads;
        }
        all
    };
    assert_eq!((pass(&mut world), pass(&mut world)), (REGIONS * REGION_PAGES, 0));
    let (found, reads) = world.reads(|space, pages| space.allocate_whole(pages, 16).unwrap());
    assert_eq!((found, reads), (None, 0), "an allocation does not read them either");
    // Two short runs become one of 31 blocks.
    let start = 9 * REGION_BLOCKS + 160;
    world.space.set_backed(&mut world.pages, Run { start: start + 15, blocks: 1 }, true).unwrap();
    let taken = world.space.take_reclaimable(&mut world.pages, &mut 0, 16, 1 << 20).unwrap();
    assert_eq!(taken, [Run { start, blocks: 31 }]);
    // The longest run ends when a part of it is used, and returns with this part.
    world.space.release(taken[0]);
    let used = Run { start: start + 15, blocks: 1 };
    world.space.retain(used);
    assert_eq!(world.space.take_reclaimable(&mut world.pages, &mut 0, 16, 1 << 20).unwrap(), []);
    world.space.release(used);
    assert_eq!(world.space.take_reclaimable(&mut world.pages, &mut 0, 16, 1 << 20).unwrap(), taken);
}
