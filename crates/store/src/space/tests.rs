//! Compares [`Space`] with a simple model that has one record per block and counts all of them.

#![allow(clippy::unwrap_used)]

use super::{BlockEntry, ExtensionSearch, REGION_BLOCKS, REGION_PAGES, Run, Space, SpaceCounts, SpaceKind};
use crate::ErrorKind;
use crate::pages::{PageFile, Pages};
use crate::testbed::{Random, page_files, plain_disk, reopened};
use backend::simulated::Fault;
use backend::{File, IoMode};
use std::sync::Arc;

mod bounds;

const CACHE: usize = 256 * 4096;

#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Block {
    references: u32,
    backed: bool,
    /// Whether the run is allocated, or freed and not released yet.
    held: bool,
    checksum: u32,
}

struct World {
    random: Random,
    kind: SpaceKind,
    files: [Arc<dyn File>; PageFile::COUNT],
    pages: Pages,
    space: Space,
    blocks: Vec<Block>,
    /// Allocated and not adopted yet.
    allocated: Vec<Run>,
    /// Adopted: every block has a reference, or has lost its last one since.
    adopted: Vec<Run>,
    /// Freed and not released yet.
    freed: Vec<Run>,
}

fn blocks_of(run: Run) -> std::ops::Range<usize> {
    run.start as usize..(run.start + run.blocks) as usize
}

impl World {
    fn new(kind: SpaceKind, seed: u64) -> Self {
        let files = page_files();
        let mut pages = Pages::new(files.clone(), CACHE);
        let space = Space::open(kind, 0, 0, &mut pages).unwrap();
        let (blocks, allocated, adopted, freed) = Default::default();
        Self { random: Random(seed), kind, files, pages, space, blocks, allocated, adopted, freed }
    }

    fn counts(&self) -> SpaceCounts {
        let count = |what: &dyn Fn(&Block) -> bool| self.blocks.iter().filter(|block| what(block)).count() as u64;
        SpaceCounts {
            used: count(&|block| block.references > 0),
            backed: count(&|block| block.backed),
            free: count(&|block| block.backed && !block.held && block.references == 0),
        }
    }

    fn compare(&mut self) {
        assert_eq!(self.space.counts(), self.counts());
        for (number, block) in self.blocks.iter().enumerate() {
            let entry = self.space.entry(&mut self.pages, number as u64).unwrap();
            let known = (entry.references, entry.checksum);
            assert_eq!(known, (block.references, block.checksum), "block {number}");
            if self.kind == SpaceKind::Data {
                assert_eq!(entry.backed, block.backed, "block {number}");
            }
        }
    }

    fn extend(&mut self) {
        match self.kind {
            SpaceKind::Map => {
                let length = self.counts().backed + 1 + self.random.scaled(2 * REGION_BLOCKS);
                self.space.set_backed_length(length);
                self.blocks.resize(length as usize, Block::default());
                self.blocks.iter_mut().for_each(|block| block.backed = true);
            }
            SpaceKind::Data => {
                let want = 1 + self.random.scaled(3 * REGION_BLOCKS);
                let run = self.space.plan_extension(&mut self.pages, want, &mut ExtensionSearch::default()).unwrap();
                assert!(run.blocks >= 1 && run.blocks <= want);
                let end = (run.start + run.blocks) as usize;
                self.blocks.resize(self.blocks.len().max(end), Block::default());
                for block in &mut self.blocks[blocks_of(run)] {
                    let taken = block.backed || block.held || block.references > 0;
                    assert!(!std::mem::replace(&mut block.backed, true) && !taken, "{run:?} is not an empty hole");
                }
                self.space.set_backed(&mut self.pages, run, true).unwrap();
            }
        }
    }

    fn allocate(&mut self) {
        let want = 1 + self.random.scaled(2000);
        let whole = self.random.percent(30);
        let found = match whole {
            true => self.space.allocate_whole(&mut self.pages, want),
            false => self.space.allocate(&mut self.pages, want),
        };
        let Some(run) = found.unwrap() else {
            assert!(whole || self.counts().free == 0, "free blocks that allocate does not find");
            return;
        };
        assert!(run.blocks >= if whole { want } else { 1 } && run.blocks <= want);
        for block in &mut self.blocks[blocks_of(run)] {
            assert!(block.backed && !block.held && block.references == 0, "{run:?} was not free");
            block.held = true;
        }
        self.allocated.push(run);
    }

    fn adopt(&mut self) {
        if self.allocated.is_empty() {
            return;
        }
        let index = self.random.below(self.allocated.len() as u64) as usize;
        let run = self.allocated.swap_remove(index);
        if self.random.percent(10) {
            // Models a plan that is undone.
            self.space.release(run);
            self.blocks[blocks_of(run)].iter_mut().for_each(|block| block.held = false);
            return;
        }
        self.space.adopt(&mut self.pages, run).unwrap();
        let sum = self.random.next() as u32;
        self.space
            .annotate(&mut self.pages, run, |block, entry| entry.checksum = sum.wrapping_add(block as u32))
            .unwrap();
        for (number, block) in (run.start..).zip(&mut self.blocks[blocks_of(run)]) {
            *block = Block { references: 1, held: false, checksum: sum.wrapping_add(number as u32), ..*block };
        }
        self.adopted.push(run);
        // A second adoption is refused and changes nothing.
        assert_eq!(self.space.adopt(&mut self.pages, run).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    /// A part of an adopted run in which every block still has references.
    fn referenced_part(&mut self) -> Option<Run> {
        if self.adopted.is_empty() {
            return None;
        }
        let index = self.random.below(self.adopted.len() as u64) as usize;
        let whole = self.adopted[index];
        let first = self.random.below(whole.blocks);
        let run = Run { start: whole.start + first, blocks: 1 + self.random.below(whole.blocks - first) };
        if self.blocks[blocks_of(run)].iter().all(|block| block.references > 0) {
            return Some(run);
        }
        if self.blocks[blocks_of(whole)].iter().all(|block| block.references == 0) {
            self.adopted.swap_remove(index);
        }
        None
    }

    fn add(&mut self) {
        let Some(run) = self.referenced_part() else { return };
        self.space.add_references(&mut self.pages, run).unwrap();
        self.blocks[blocks_of(run)].iter_mut().for_each(|block| block.references += 1);
    }

    fn drop(&mut self) {
        let Some(run) = self.referenced_part() else { return };
        let mut freed = vec![Run { start: 0, blocks: 0 }];
        self.space.drop_references(&mut self.pages, run, &mut freed, &mut Vec::new()).unwrap();
        let mut expected = Vec::new();
        for number in blocks_of(run) {
            let block = &mut self.blocks[number];
            block.references -= 1;
            if block.references == 0 {
                *block = Block { held: true, checksum: 0, ..*block };
                expected.push(number);
            }
        }
        assert_eq!(freed.iter().flat_map(|run| blocks_of(*run)).collect::<Vec<_>>(), expected);
        self.freed.extend(freed.into_iter().filter(|run| run.blocks > 0));
    }

    fn release(&mut self) {
        for run in std::mem::take(&mut self.freed) {
            self.space.release(run);
            self.blocks[blocks_of(run)].iter_mut().for_each(|block| block.held = false);
        }
    }

    fn reclaim(&mut self) {
        if self.kind == SpaceKind::Map || self.space.regions() == 0 {
            return;
        }
        let least = *self.random.pick(&[1, 16, 300]);
        let most = 1 + self.random.scaled(2 * REGION_BLOCKS);
        let mut region = self.random.below(self.space.regions());
        let runs = self.space.take_reclaimable(&mut self.pages, &mut region, least, most).unwrap();
        let taken: u64 = runs.iter().map(|run| run.blocks).sum();
        assert!(taken <= most, "{taken} blocks taken and {most} asked for");
        for run in runs {
            assert!(run.blocks >= least);
            for block in &mut self.blocks[blocks_of(run)] {
                assert!(block.backed && !block.held && block.references == 0);
                block.backed = false;
            }
            self.space.set_backed(&mut self.pages, run, false).unwrap();
            // The run must not be allocated while its hole is being punched.
            self.space.release(run);
        }
    }

    /// Models a checkpoint and a restart: blocks without a reference in the table are free.
    fn reopen(&mut self) {
        self.space.store_summaries(&mut self.pages).unwrap();
        reopened(&self.files, &mut self.pages, CACHE);
        let length = if self.kind == SpaceKind::Map { self.counts().backed } else { 0 };
        let regions = self.space.regions();
        self.space = Space::open(self.kind, regions, length, &mut self.pages).unwrap();
        assert_eq!(self.space.regions(), regions);
        self.allocated.clear();
        self.freed.clear();
        self.blocks.iter_mut().for_each(|block| block.held = false);
    }

    /// Models replay: adopts blocks that were allocated before a restart, without bitmaps in memory.
    fn adopt_as_replay(&mut self) {
        let free = (0..self.blocks.len()).filter(|number| {
            let block = self.blocks[*number];
            block.backed && !block.held && block.references == 0
        });
        let free: Vec<usize> = free.take(500).collect();
        if free.is_empty() {
            return;
        }
        let run = Run { start: *self.random.pick(&free) as u64, blocks: 1 };
        self.space.adopt(&mut self.pages, run).unwrap();
        self.blocks[run.start as usize].references = 1;
        self.adopted.push(run);
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..4 => self.extend(),
            4..34 => self.allocate(),
            34..60 => self.adopt(),
            60..68 => self.add(),
            68..88 => self.drop(),
            88..93 => self.release(),
            93..96 => self.reclaim(),
            96..98 => self.adopt_as_replay(),
            98 => self.reopen(),
            _ => self.space.store_summaries(&mut self.pages).unwrap(),
        }
        assert_eq!(self.space.counts(), self.counts());
    }
}

fn random_steps_equal_the_model(kind: SpaceKind) {
    for seed in 0..6 {
        let mut world = World::new(kind, seed);
        for step in 0..600 {
            world.step();
            if step % 100 == 99 {
                world.compare();
            }
        }
        world.reopen();
        world.compare();
    }
}

#[test]
fn the_data_space_equals_a_naive_model() {
    random_steps_equal_the_model(SpaceKind::Data);
}

#[test]
fn the_map_space_equals_a_naive_model() {
    random_steps_equal_the_model(SpaceKind::Map);
}

#[test]
fn more_regions_than_cached_bitmaps() {
    let mut world = World::new(SpaceKind::Data, 1);
    for _ in 0..20 {
        let run = Run { start: world.space.blocks(), blocks: REGION_BLOCKS };
        world.space.set_backed(&mut world.pages, run, true).unwrap();
        world.blocks.resize((run.start + run.blocks) as usize, Block { backed: true, ..Block::default() });
    }
    world.compare();
    // Allocates everything in parts, so that every region is loaded and most bitmaps are removed again.
    while let Some(run) = world.space.allocate(&mut world.pages, 4096).unwrap() {
        world.space.adopt(&mut world.pages, run).unwrap();
        for block in &mut world.blocks[blocks_of(run)] {
            assert_eq!(block.references, 0);
            block.references = 1;
        }
        assert_eq!(world.space.counts(), world.counts());
    }
    assert_eq!(world.space.counts().free, 0);
    for _ in 0..200 {
        let blocks = 1 + world.random.below(5000);
        let run = Run { start: world.random.below(world.space.blocks() - blocks), blocks };
        if world.blocks[blocks_of(run)].iter().all(|block| block.references > 0) {
            let mut freed = Vec::new();
            world.space.drop_references(&mut world.pages, run, &mut freed, &mut Vec::new()).unwrap();
            freed.iter().for_each(|run| world.space.release(*run));
            world.blocks[blocks_of(run)].iter_mut().for_each(|block| block.references = 0);
        }
        assert_eq!(world.space.counts(), world.counts());
    }
    assert!(world.space.loaded <= super::allocation::LOADED_REGIONS_MAX);
    world.compare();
}

/// More regions than have bitmaps in memory, of which all blocks are in use.
fn full() -> World {
    let mut world = World::new(SpaceKind::Data, 1);
    for number in 0..super::allocation::LOADED_REGIONS_MAX as u64 + 2 {
        let run = Run { start: number * REGION_BLOCKS, blocks: REGION_BLOCKS };
        world.space.set_backed(&mut world.pages, run, true).unwrap();
    }
    while let Some(run) = world.space.allocate(&mut world.pages, REGION_BLOCKS).unwrap() {
        world.space.adopt(&mut world.pages, run).unwrap();
    }
    world
}

fn drop_and_expect_no_free_block(world: &mut World, run: Run, between: impl Fn(&mut World)) {
    let mut freed = Vec::new();
    world.space.drop_references(&mut world.pages, run, &mut freed, &mut Vec::new()).unwrap();
    assert_eq!(freed, [run]);
    between(world);
    let found = world.space.allocate(&mut world.pages, 1).unwrap();
    assert_eq!((found, world.space.counts().free), (None, 0), "the freeing is not durable");
    world.space.release(run);
    assert_eq!(world.space.counts().free, run.blocks);
    let found = world.space.allocate(&mut world.pages, run.blocks).unwrap();
    assert_eq!(found.map(|found| found.start), Some(run.start));
}

/// The bitmaps of the first region are removed from memory to load those of the second region.
#[test]
fn blocks_freed_in_two_regions_are_not_allocated_before_they_are_released() {
    let mut world = full();
    world.space.load(&mut world.pages, 0).unwrap();
    let loaded = |number: usize| world.space.regions[number].bitmaps.is_some();
    assert!(loaded(0) && !loaded(1) && world.space.loaded == super::allocation::LOADED_REGIONS_MAX);
    drop_and_expect_no_free_block(&mut world, Run { start: REGION_BLOCKS - 8, blocks: 16 }, |_| {});
}

/// The bitmaps of the first region are removed from memory while further regions are counted.
#[test]
fn blocks_freed_in_a_rebuilt_region_are_not_allocated_before_they_are_released() {
    let run = Run { start: 5, blocks: 8 };
    drop_and_expect_no_free_block(&mut full(), run, |world| {
        world.space.renew_table(&mut world.pages, 0, &mut |block, _| {
            let references = u32::from(!(run.start..run.start + run.blocks).contains(&block));
            BlockEntry { references, backed: true, ..BlockEntry::default() }
        });
        world.space.recount(&mut world.pages, std::iter::once(run)).unwrap();
    });
}

#[test]
fn reference_counts_below_zero_and_of_nodes_above_the_maximum_are_errors() {
    for kind in [SpaceKind::Data, SpaceKind::Map] {
        let mut world = World::new(kind, 1);
        world.extend();
        let run = Run { start: 0, blocks: 1 };
        let mut freed = Vec::new();
        let none = world.space.drop_references(&mut world.pages, run, &mut freed, &mut Vec::new()).unwrap_err();
        assert_eq!(none.kind(), ErrorKind::Corrupt);
        assert_eq!(world.space.add_references(&mut world.pages, run).unwrap_err().kind(), ErrorKind::Corrupt);
        world.space.adopt(&mut world.pages, run).unwrap();
        world.space.repair_references(&mut world.pages, 0, BlockEntry::REFERENCES_MAX).unwrap();
        let more = world.space.add_references(&mut world.pages, run);
        assert_eq!(more.map_err(|error| error.kind()).err(), (kind == SpaceKind::Map).then_some(ErrorKind::Corrupt));
        assert_eq!(world.space.entry(&mut world.pages, 0).unwrap().references, BlockEntry::REFERENCES_MAX);
    }
}

/// Otherwise the block would be free although something refers to it.
#[test]
fn a_data_block_whose_references_could_not_be_counted_is_never_freed() {
    let mut world = World::new(SpaceKind::Data, 1);
    world.extend();
    let run = Run { start: 0, blocks: 2 };
    world.space.adopt(&mut world.pages, run).unwrap();
    world.space.repair_references(&mut world.pages, 1, BlockEntry::REFERENCES_MAX - 1).unwrap();
    world.space.add_references(&mut world.pages, run).unwrap();
    let (mut freed, mut left) = (Vec::new(), Vec::new());
    world.space.drop_references(&mut world.pages, run, &mut freed, &mut left).unwrap();
    world.space.drop_references(&mut world.pages, run, &mut freed, &mut left).unwrap();
    assert_eq!((freed, left), (vec![Run { start: 0, blocks: 1 }], vec![run, Run { start: 1, blocks: 1 }]));
    assert_eq!(world.space.entry(&mut world.pages, 1).unwrap().references, BlockEntry::REFERENCES_MAX);
}

#[test]
fn runs_past_the_end_are_refused() {
    let mut world = World::new(SpaceKind::Data, 1);
    world.extend();
    let blocks = world.space.blocks();
    for run in [
        Run { start: blocks, blocks: 1 },
        Run { start: blocks - 1, blocks: 2 },
        Run { start: u64::MAX, blocks: 1 },
        Run { start: 1, blocks: u64::MAX },
        Run { start: (1 << 48) - 1, blocks: 1 },
    ] {
        let refused = |result: crate::Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::Corrupt, "{run:?}");
        refused(world.space.add_references(&mut world.pages, run));
        refused(world.space.drop_references(&mut world.pages, run, &mut Vec::new(), &mut Vec::new()));
        refused(world.space.annotate(&mut world.pages, run, |_, _| {}));
        if run.start > 1 << 40 {
            refused(world.space.adopt(&mut world.pages, run));
            refused(world.space.set_backed(&mut world.pages, run, true));
        }
    }
    assert_eq!(world.space.blocks(), blocks);
}

#[test]
fn a_summary_with_too_large_counts_is_refused() {
    let mut world = World::new(SpaceKind::Data, 1);
    world.extend();
    world.space.store_summaries(&mut world.pages).unwrap();
    let key = crate::pages::PageKey::new(PageFile::DataSummary, 0);
    let page = world.pages.get_mut(key).unwrap();
    page.0[crate::pages::HEADER_SIZE..][..2].copy_from_slice(&u16::MAX.to_le_bytes());
    let refused = Space::open(SpaceKind::Data, 1, 0, &mut world.pages);
    assert_eq!(refused.err().unwrap().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_lost_summary_is_rebuilt_from_the_table() {
    for kind in [SpaceKind::Data, SpaceKind::Map] {
        let mut world = World::new(kind, 11);
        for _ in 0..300 {
            world.step();
        }
        world.reopen();
        // A missing summary page reads as zeros, as if it had never been written.
        let file = if kind == SpaceKind::Data { PageFile::DataSummary } else { PageFile::MapSummary };
        world.files[file as usize].set_len(0).unwrap();
        world.pages = Pages::new(world.files.clone(), CACHE);
        let length = if kind == SpaceKind::Map { world.counts().backed } else { 0 };
        let regions = world.space.regions();
        world.space = Space::open(kind, regions, length, &mut world.pages).unwrap();
        // The first use of a region corrects its counts.
        for number in 0..regions {
            world.space.load(&mut world.pages, number).unwrap();
        }
        assert_eq!(world.space.counts(), world.counts());
        while world.referenced_part().is_some() || !world.adopted.is_empty() {
            world.drop();
        }
        world.release();
        world.reopen();
        world.compare();
        assert_eq!(world.counts().used, 0);
    }
}

/// The summary of a region is damaged, and the medium fails the read of the first page of its table once. The region
/// then counts none of the blocks that this page describes.
#[test]
fn a_region_that_counts_too_few_blocks_counts_none_below_zero() {
    let (disk, mut files) = (plain_disk(), page_files());
    let name = PageFile::DataTable.name();
    files[PageFile::DataTable as usize] = disk.directory().create(name, IoMode::Buffered).unwrap();
    let mut pages = Pages::new(files.clone(), CACHE);
    let mut space = Space::open(SpaceKind::Data, 0, 0, &mut pages).unwrap();
    let all = Run { start: 0, blocks: REGION_BLOCKS };
    space.set_backed(&mut pages, all, true).unwrap();
    space.adopt(&mut pages, Run { start: 10, blocks: 30 }).unwrap();
    reopened(&files, &mut pages, CACHE);
    // The bytes of the page of summaries are no page.
    let summary = &files[PageFile::DataSummary as usize];
    summary.write_at(&[&[7; 4096]], 0, false).unwrap();
    disk.fail_requests(Fault::Read, 0, 1);
    let mut space = Space::open(SpaceKind::Data, 1, 0, &mut pages).unwrap();
    assert_eq!((space.counts().used, space.unreadable()), (0, vec![0]));
    // The region stays excluded from allocation until its table is read again.
    let freed = Run { start: 10, blocks: 20 };
    space.drop_references(&mut pages, freed, &mut Vec::new(), &mut Vec::new()).unwrap();
    space.set_backed(&mut pages, all, false).unwrap();
    space.set_backed(&mut pages, Run { start: 0, blocks: 40 }, true).unwrap();
    assert_eq!((space.counts().used, space.counts().backed), (0, 40));
    space.load_again(&mut pages, 0).unwrap();
    assert_eq!(space.counts(), SpaceCounts { used: 10, backed: 40, free: 30 });
    space.store_summaries(&mut pages).unwrap();
    reopened(&files, &mut pages, CACHE);
    let space = Space::open(SpaceKind::Data, 1, 0, &mut pages).unwrap();
    assert_eq!((space.counts().used, space.counts().backed), (10, 40));
}

#[test]
fn blocks_of_a_lost_table_page_are_not_free() {
    let mut world = World::new(SpaceKind::Data, 12);
    let run = Run { start: 0, blocks: 2 * REGION_BLOCKS };
    world.space.set_backed(&mut world.pages, run, true).unwrap();
    world.space.adopt(&mut world.pages, Run { start: 10, blocks: 30 }).unwrap();
    world.space.store_summaries(&mut world.pages).unwrap();
    reopened(&world.files, &mut world.pages, CACHE);
    world.files[PageFile::DataTable as usize].punch(0, 4096).unwrap();
    let mut space = Space::open(SpaceKind::Data, 2, 0, &mut world.pages).unwrap();
    // All other free blocks are allocated, but none of the region that lost a page.
    while let Some(run) = space.allocate(&mut world.pages, 1000).unwrap() {
        assert!(run.start >= REGION_BLOCKS, "{run:?}");
        space.adopt(&mut world.pages, run).unwrap();
    }
    assert_eq!((space.counts().free, space.counts().used), (0, REGION_BLOCKS + 30));
    let refused =
        space.drop_references(&mut world.pages, Run { start: 10, blocks: 1 }, &mut Vec::new(), &mut Vec::new());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Corrupt);
    let planned = space.plan_extension(&mut world.pages, 300, &mut ExtensionSearch::default()).unwrap();
    assert!(planned.start >= 2 * REGION_BLOCKS);
    // The references that a check counts in the trees are restored, with the counts of the region.
    for block in 10..40 {
        space.repair_references(&mut world.pages, block, 1).unwrap();
    }
    space.recount(&mut world.pages, std::iter::empty()).unwrap();
    let lost = 508 - 30;
    let counts = space.counts();
    assert_eq!((counts.used, counts.backed), (REGION_BLOCKS + 30, 2 * REGION_BLOCKS - lost));
    assert_eq!(counts.free, counts.backed - counts.used);
    space.drop_references(&mut world.pages, Run { start: 10, blocks: 1 }, &mut Vec::new(), &mut Vec::new()).unwrap();
}

#[test]
fn a_search_excludes_at_most_one_region_that_the_medium_cannot_read() {
    let (disk, mut files) = (plain_disk(), page_files());
    let name = PageFile::DataTable.name();
    files[PageFile::DataTable as usize] = disk.directory().create(name, IoMode::Buffered).unwrap();
    let mut pages = Pages::new(files.clone(), CACHE);
    let mut space = Space::open(SpaceKind::Data, 0, 0, &mut pages).unwrap();
    for region in 0..4 {
        let run = Run { start: region * REGION_BLOCKS, blocks: REGION_BLOCKS / 2 };
        space.set_backed(&mut pages, run, true).unwrap();
    }
    space.store_summaries(&mut pages).unwrap();
    reopened(&files, &mut pages, CACHE);
    let mut space = Space::open(SpaceKind::Data, 4, 0, &mut pages).unwrap();
    let free = space.counts().free;
    disk.fail_requests(Fault::Read, 0, u64::MAX);
    assert_eq!(space.allocate(&mut pages, 64).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(space.unreadable(), [0]);
    // A reservation chooses a new region then, whose table needs no read.
    let planned = space.plan_extension(&mut pages, 300, &mut ExtensionSearch::default()).unwrap();
    assert_eq!((planned.start, space.unreadable()), (4 * REGION_BLOCKS, vec![0, 1]));
    disk.mend();
    for number in space.unreadable() {
        space.load_again(&mut pages, number).unwrap();
    }
    assert_eq!((space.unreadable(), space.counts().free), (Vec::new(), free));
    assert!(space.allocate(&mut pages, 64).unwrap().is_some());
}

/// A space in which all blocks were used. Then every fourth block of the first region is freed, and after that 1024
/// adjacent blocks of the second region, one after another.
fn fragmented() -> World {
    let mut world = World::new(SpaceKind::Data, 3);
    let all = Run { start: 0, blocks: 2 * REGION_BLOCKS };
    world.space.set_backed(&mut world.pages, all, true).unwrap();
    while let Some(run) = world.space.allocate(&mut world.pages, 4096).unwrap() {
        world.space.adopt(&mut world.pages, run).unwrap();
    }
    let free = |world: &mut World, block: u64| {
        let (run, mut freed) = (Run { start: block, blocks: 1 }, Vec::new());
        world.space.drop_references(&mut world.pages, run, &mut freed, &mut Vec::new()).unwrap();
        world.space.release(run);
    };
    (0..REGION_BLOCKS).step_by(4).for_each(|block| free(&mut world, block));
    // The search finds only single blocks.
    assert_eq!(world.space.allocate(&mut world.pages, 64).unwrap().unwrap().blocks, 1);
    (0..1024).for_each(|block| free(&mut world, REGION_BLOCKS + 500 + block));
    world
}

#[test]
fn a_survey_finds_the_entries_of_the_long_run_that_is_allocated_next() {
    let mut world = fragmented();
    drop(world.pages.capture_now());
    world.pages.drop_clean();
    drop(world.pages.take_absent());
    world.space.survey_allocation(&mut world.pages, 64);
    let absent: Vec<u64> = world.pages.take_absent().into_iter().map(|key| key.number()).collect();
    assert_eq!(absent, [REGION_PAGES, REGION_PAGES + 1]);
    let run = world.space.allocate(&mut world.pages, 64).unwrap().unwrap();
    assert_eq!((run.start, run.blocks), (REGION_BLOCKS + 500, 64));
}

#[test]
fn long_runs_that_grow_from_single_blocks_are_allocated_before_short_ones() {
    let mut world = fragmented();
    let (mut runs, mut blocks) = (0, 0);
    while blocks < 1024 {
        blocks += world.space.allocate(&mut world.pages, 64).unwrap().unwrap().blocks;
        runs += 1;
    }
    println!("1024 blocks in {runs} runs");
    assert!(runs <= 20, "{runs}");
}
