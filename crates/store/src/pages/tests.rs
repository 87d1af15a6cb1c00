//! Compares the page cache with plain files.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::ErrorKind;
use crate::testbed::{Random, page_files, plain_disk, write_home};
use backend::IoMode;
use std::collections::BTreeMap;

const LIMIT: usize = 100;

fn word(page: &Block) -> u64 {
    u64::from_le_bytes(page.0[HEADER_SIZE..HEADER_SIZE + 8].try_into().unwrap())
}

fn set_word(page: &mut Block, value: u64) {
    page.0[HEADER_SIZE..HEADER_SIZE + 8].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn pages_keep_their_last_content_through_eviction_and_checkpoints() {
    for seed in 0..10 {
        let mut random = Random(seed);
        let files = page_files();
        let mut pages = Pages::new(files.clone(), LIMIT * BLOCK_SIZE);
        let mut model: BTreeMap<PageKey, u64> = BTreeMap::new();
        let mut most = 0;
        for _ in 0..5000 {
            let file = *random.pick(&[PageFile::DataSummary, PageFile::Catalog, PageFile::MapSummary]);
            let key = PageKey::new(file, random.below(200));
            let known = model.get(&key).copied().unwrap_or(0);
            match random.below(100) {
                0..60 => assert_eq!(word(pages.get(key).unwrap()), known, "{key}"),
                60..75 => {
                    let page = pages.get_mut(key).unwrap();
                    assert_eq!(word(page), known);
                    let value = random.next();
                    set_word(page, value);
                    model.insert(key, value);
                }
                75..85 => {
                    // Models a reallocation: the page loses its old content.
                    let page = pages.create(key).unwrap();
                    assert_eq!(word(page), 0);
                    model.insert(key, 0);
                }
                _ => {
                    if pages.dirty() > LIMIT / 2 || random.percent(3) {
                        let captured = pages.capture_now().all();
                        assert_eq!(pages.dirty(), 0);
                        assert!(captured.is_sorted_by_key(|(key, _)| *key));
                        // Later changes belong to the next checkpoint.
                        if let Some((key, page)) = captured.first() {
                            let before = word(page);
                            set_word(pages.get_mut(*key).unwrap(), !before);
                            assert_eq!(word(page), before);
                            model.insert(*key, !before);
                        }
                        write_home(&files, &captured);
                    }
                }
            }
            most = most.max(pages.cached() - pages.dirty().min(pages.cached()));
            if random.percent(1) {
                pages.drop_clean();
                assert_eq!(pages.cached(), pages.dirty());
            }
        }
        assert!(most <= LIMIT + 2, "{most} clean pages in a cache of {LIMIT}");
        assert!(pages.statistics().evictions > 100 && pages.statistics().hits > 100);
        write_home(&files, &pages.capture_now().all());
        for (key, value) in model {
            assert_eq!(word(&pages.read_home(key).unwrap()), value, "{key} in its file");
        }
    }
}

#[test]
fn a_forgotten_page_is_never_written() {
    let mut pages = Pages::new(page_files(), LIMIT * BLOCK_SIZE);
    let key = |number| PageKey::new(PageFile::Map, number);
    for round in 0..50 {
        for number in 0..300 {
            pages.create(key(number)).unwrap();
            pages.forget(key(number));
        }
        assert_eq!((pages.cached(), pages.dirty()), (0, 0));
        assert!(pages.queues.len() < 4 * LIMIT + 2048, "keys of forgotten pages accumulate: round {round}");
    }
    assert!(pages.capture_now().all().is_empty());
    // In the map, a page of zeros is an error.
    assert_eq!(pages.get(key(7)).err().unwrap().kind(), ErrorKind::Corrupt);
}

#[test]
fn every_flipped_bit_of_a_page_is_detected() {
    for file in [PageFile::MapTable, PageFile::DataSummary, PageFile::Catalog] {
        let disk = plain_disk();
        let directory = disk.directory();
        let files = PageFile::ALL.map(|file| directory.create(file.name(), IoMode::Buffered).unwrap());
        let mut pages = Pages::new(files.clone(), LIMIT * BLOCK_SIZE);
        let key = PageKey::new(file, 3);
        set_word(pages.get_mut(key).unwrap(), 42);
        write_home(&files, &pages.capture_now().all());
        for at in (0..64).chain([2000, 4095]) {
            disk.flip_bit(file.name(), key.offset() + at, (at % 8) as u8).unwrap();
            assert_eq!(pages.read_home(key).err().unwrap().kind(), ErrorKind::Corrupt, "byte {at}");
            disk.flip_bit(file.name(), key.offset() + at, (at % 8) as u8).unwrap();
        }
        assert_eq!(word(&pages.read_home(key).unwrap()), 42);
    }
}

#[test]
fn pages_with_another_number_kind_or_version_are_refused() {
    let key = PageKey::new(PageFile::DataTable, 3);
    let mut good = blank(key);
    good = sealed(&good);
    verify(&mut good.clone(), key).unwrap();
    let refused = |page: &Block, key: PageKey| verify(&mut page.clone(), key).unwrap_err();
    let misplaced = refused(&good, PageKey::new(PageFile::DataTable, 4));
    assert_eq!(misplaced.kind(), ErrorKind::Corrupt);
    assert!(misplaced.to_string().contains("wrong place"), "{misplaced}");
    assert_eq!(refused(&good, PageKey::new(PageFile::Catalog, 3)).kind(), ErrorKind::Corrupt);
    let mut newer = good;
    newer.0[4] = 2;
    newer = sealed(&newer);
    assert_eq!(refused(&newer, key).kind(), ErrorKind::Unsupported);
}

#[test]
fn stored_keys_name_a_page_or_nothing() {
    for file in PageFile::ALL {
        for number in [0, 1, (1 << 48) - 1] {
            let key = PageKey::new(file, number);
            let again = PageKey::from_raw(key.raw()).unwrap();
            assert_eq!((again.file(), again.number()), (file, number));
            assert_eq!(again.offset(), number * 4096);
        }
    }
    for raw in [u64::MAX, 6 << 56, 1 << 48, 5 << 56 | 1 << 55] {
        assert!(PageKey::from_raw(raw).is_none());
    }
}

#[test]
fn a_captured_page_is_not_read_from_its_file_before_it_is_written_there() {
    let files = page_files();
    let mut pages = Pages::new(files.clone(), LIMIT * BLOCK_SIZE);
    let key = |number| PageKey::new(PageFile::Catalog, number);
    for number in 0..20 {
        set_word(pages.create(key(number)).unwrap(), number + 1);
    }
    let captured = pages.capture_now().all();
    // Loads so many other pages that all pages without a reference are evicted.
    for number in 100..100 + 5 * LIMIT as u64 {
        pages.get(key(number)).unwrap();
    }
    for number in 0..20 {
        assert_eq!(word(pages.get(key(number)).unwrap()), number + 1);
    }
    write_home(&files, &captured);
    drop(captured);
    for number in 100..100 + 5 * LIMIT as u64 {
        pages.get(key(number)).unwrap();
    }
    assert!(pages.cached() <= LIMIT + 1, "{} pages stay", pages.cached());
    assert_eq!(word(pages.get(key(7)).unwrap()), 8);
}

/// Only nodes at places that were free at the last checkpoint may be written before the next one is committed. Recovery
/// from the last checkpoint does not read them.
#[test]
fn a_checkpoint_does_not_refer_to_nodes_at_places_that_were_free_then() {
    let files = page_files();
    let mut pages = Pages::new(files.clone(), LIMIT * BLOCK_SIZE);
    let node = |number| PageKey::new(PageFile::Map, number);
    let table = PageKey::new(PageFile::DataTable, 1);
    let keys = |list: &[(PageKey, Arc<Block>)]| list.iter().map(|(key, _)| *key).collect::<Vec<_>>();
    for number in 0..4 {
        pages.create(node(number)).unwrap();
    }
    pages.get_mut(table).unwrap();
    assert_eq!((pages.dirty(), pages.dirty_known()), (5, 1));
    // The node is created and freed between two checkpoints, which leaves no trace.
    pages.forget(node(3));
    pages.create(node(3)).unwrap();
    let first = pages.capture_now();
    assert_eq!(keys(&first.unknown), (0..4).map(node).collect::<Vec<_>>());
    assert_eq!(keys(&first.known), [table]);
    write_home(&files, &first.all());

    pages.get_mut(node(0)).unwrap();
    // The first checkpoint refers to this node: its place must not be written before the second one is committed.
    pages.forget(node(1));
    pages.create(node(1)).unwrap();
    pages.forget(node(2));
    pages.create(node(7)).unwrap();
    let second = pages.capture_now();
    assert_eq!(keys(&second.known), [node(0), node(1)]);
    assert_eq!(keys(&second.unknown), [node(7)]);
    write_home(&files, &second.all());

    // This node was free at the second checkpoint.
    pages.create(node(2)).unwrap();
    assert_eq!(pages.dirty_known(), 0);
    pages.forget(node(2));
    assert!(pages.capture_now().all().is_empty());
}

#[test]
fn a_page_read_without_the_lock_is_inserted_only_if_it_did_not_change() {
    let files = page_files();
    let mut pages = Pages::new(files.clone(), LIMIT * BLOCK_SIZE);
    let key = PageKey::new(PageFile::Catalog, 7);
    set_word(pages.get_mut(key).unwrap(), 1);
    write_home(&files, &pages.capture_now().all());
    let read = |key: PageKey| read_home(&*files[key.file() as usize], key, 1).remove(0);
    let outdated = |pages: &mut Pages, between: &dyn Fn(&mut Pages)| {
        pages.drop_clean();
        let (first, load) = pages.begin_load(key).unwrap();
        assert!(first && !pages.begin_load(key).unwrap().0, "one reads, others wait for it");
        let page = read(key);
        between(pages);
        assert!(pages.end_load(key, &load, page).unwrap().is_none() && load.wait().unwrap().is_none());
    };
    outdated(&mut pages, &|pages| set_word(pages.get_mut(key).unwrap(), 2));
    assert_eq!(word(pages.get(key).unwrap()), 2);
    write_home(&files, &pages.capture_now().all());
    outdated(&mut pages, &|pages| set_word(pages.create(key).unwrap(), 3));
    assert_eq!(word(pages.get(key).unwrap()), 3);
    write_home(&files, &pages.capture_now().all());
    outdated(&mut pages, &|pages| pages.forget(key));
    assert_eq!(pages.cached(), 0);
    // No other load or change of the page happens in between.
    let (_, load) = pages.begin_load(key).unwrap();
    let held = pages.end_load(key, &load, read(key)).unwrap().unwrap();
    assert!(pages.begin_load(key).is_none() && load.wait().unwrap().is_some());
    assert_eq!((word(&held), word(pages.get(key).unwrap())), (3, 3));
    // A deferred lookup returns the missing pages; a reference on a page keeps it in memory.
    pages.defer(Default::default());
    let other = PageKey::new(PageFile::Catalog, 9);
    assert!(pages.get(key).is_ok() && pages.get(other).is_err());
    assert_eq!(pages.undefer().0, [other]);
    for number in 100..1000 {
        pages.get(PageKey::new(PageFile::Catalog, number)).unwrap();
    }
    assert!(pages.peek(key).is_some());
}

fn summaries() -> Vec<PageKey> {
    (0..200).map(|number| PageKey::new(PageFile::DataSummary, number)).collect()
}

/// Changes all pages of [`summaries`], and writes them as a checkpoint does.
fn write_all(pages: &mut Pages, files: &[Arc<dyn File>; PageFile::COUNT], kept: &Kept, value: u64) {
    summaries().iter().for_each(|key| set_word(pages.get_mut(*key).unwrap(), value + key.number()));
    let captured = pages.capture_now().all();
    kept.keep(&*files[PageFile::DataSummary as usize], &mut captured.iter().map(|(key, _)| *key));
    write_home(files, &captured);
}

#[test]
fn kept_pages_have_the_content_of_the_time_at_which_a_reader_began() {
    let disk = plain_disk();
    let files = page_files();
    let kept = Kept::new(disk.directory());
    let mut pages = Pages::new(files.clone(), 1000 * BLOCK_SIZE);
    let keys = summaries();
    let put = |pages: &mut Pages, value: u64| write_all(pages, &files, &kept, value);
    put(&mut pages, 1000);
    for round in [2000, 4000] {
        let keeping = kept.begin();
        let before = word(pages.get(keys[0]).unwrap());
        let mut view = Pages::as_kept(files.clone(), 64 * BLOCK_SIZE, Arc::clone(keeping.pages()));
        put(&mut pages, round);
        put(&mut pages, round + 1000);
        // More pages than memory may hold: some are read from the overflow file, which has no name any more.
        keys.iter().for_each(|key| assert_eq!(word(view.get(*key).unwrap()), before + key.number()));
        assert_eq!(disk.directory().list().unwrap(), Vec::<String>::new());
        keeping.check().unwrap();
    }
    // If there is no room for a copy, every read through the view fails.
    let keeping = kept.begin();
    disk.set_capacity(0);
    put(&mut pages, 9000);
    let mut view = Pages::as_kept(files.clone(), 64 * BLOCK_SIZE, Arc::clone(keeping.pages()));
    assert!(keeping.check().is_err() && view.get(keys[0]).is_err());
}

#[test]
fn readers_that_began_after_different_checkpoints_have_their_own_copies() {
    let disk = plain_disk();
    let files = page_files();
    let kept = Kept::new(disk.directory());
    let mut pages = Pages::new(files.clone(), 1000 * BLOCK_SIZE);
    let keys = summaries();
    let put = |pages: &mut Pages, value: u64| write_all(pages, &files, &kept, value);
    let is = |keeping: &Keeping, value: u64| {
        let mut view = Pages::as_kept(files.clone(), 64 * BLOCK_SIZE, Arc::clone(keeping.pages()));
        keys.iter().for_each(|key| assert_eq!(word(view.get(*key).unwrap()), value + key.number()));
        keeping.check().unwrap();
    };
    put(&mut pages, 1000);
    let first = kept.begin();
    put(&mut pages, 2000);
    let second = kept.begin();
    is(&second, 2000);
    put(&mut pages, 3000);
    is(&first, 1000);
    is(&second, 2000);
    // The end of one reader does not end the others.
    let third = kept.begin();
    drop(first);
    put(&mut pages, 4000);
    is(&second, 2000);
    is(&third, 3000);
    assert_eq!(disk.directory().list().unwrap(), Vec::<String>::new());
}

/// While a checkpoint collects its pages in parts, requests change, free and create pages.
#[test]
fn a_checkpoint_collects_each_page_as_it_was_when_it_was_captured() {
    for seed in 0..200 {
        let mut random = Random(seed);
        let files = page_files();
        let mut pages = Pages::new(files.clone(), LIMIT * BLOCK_SIZE);
        let mut model: BTreeMap<PageKey, u64> = BTreeMap::new();
        let change = |pages: &mut Pages, model: &mut BTreeMap<PageKey, u64>, random: &mut Random| {
            let key = PageKey::new(PageFile::MapSummary, random.below(40));
            if !model.contains_key(&key) {
                pages.create(key).unwrap();
            } else if random.percent(20) {
                pages.forget(key);
                model.remove(&key);
                return;
            } else if random.percent(10) && !pages.is_new(key) {
                pages.replace(key);
            } else if random.percent(10) {
                pages.write_again(key);
            }
            let value = random.next();
            set_word(pages.get_mut(key).unwrap(), value);
            model.insert(key, value);
        };
        for _ in 0..20 {
            (0..random.below(60)).for_each(|_| change(&mut pages, &mut model, &mut random));
            let before = model.clone();
            let changed: Vec<PageKey> = pages.changes.dirty.iter().copied().collect();
            let new: Vec<PageKey> = changed.iter().copied().filter(|key| pages.is_new(*key)).collect();
            let captured = pages.capture().collect(|collect_part| {
                (0..random.below(4)).for_each(|_| change(&mut pages, &mut model, &mut random));
                // Reads of other pages evict what may be evicted.
                (0..random.below(40)).for_each(|number| {
                    pages.get(PageKey::new(PageFile::Catalog, number + random.below(400))).unwrap();
                });
                collect_part(&mut pages);
            });
            assert!(
                captured.known.is_sorted_by_key(|(key, _)| *key) && captured.unknown.is_sorted_by_key(|(key, _)| *key)
            );
            let got: BTreeMap<PageKey, u64> = captured.all().iter().map(|(key, page)| (*key, word(page))).collect();
            let expected = changed.iter().map(|key| (*key, before[key])).collect();
            assert_eq!(got, expected, "seed {seed}");
            let got: Vec<PageKey> = captured.unknown.iter().map(|(key, _)| *key).collect();
            assert_eq!(got.len(), new.len());
            assert!(new.iter().all(|key| got.contains(key)));
            write_home(&files, &captured.all());
            drop(captured);
            for (key, value) in &model {
                assert_eq!(word(pages.get(*key).unwrap()), *value, "{key}");
            }
        }
    }
}
