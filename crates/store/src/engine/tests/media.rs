//! Reads of the medium for recovery and verification: cached data is dropped, even if the files of a datastore are
//! symbolic links; a block that changes while it is verified is not reported.

use super::*;
use crate::engine::ScrubPosition;
use crate::engine::files::ShowingData;
use backend::simulated::Fault;
use backend::{Directory, File, IoMode};
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder in which the data files are symbolic links: they can be opened, and the list of regular files leaves them
/// out.
struct Links {
    inner: Arc<dyn Directory>,
    opened: Mutex<Vec<String>>,
}

impl Directory for Links {
    backend::forward_directory!(inner: remove, rename, sync, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        let file = self.inner.open(name, mode)?;
        self.opened.lock().unwrap().push(name.to_owned());
        Ok(file)
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        self.inner.create(name, mode)
    }
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = self.inner.list()?;
        names.retain(|name| !name.starts_with("data.0"));
        Ok(names)
    }
}

#[test]
fn cached_data_is_dropped_from_data_files_that_are_symbolic_links() {
    let (disk, engine) = made();
    engine.close().unwrap();
    let inner = disk.directory();
    (0..2).for_each(|number| drop(inner.create(&files::data_file_name(number), IoMode::Buffered).unwrap()));
    let links = Arc::new(Links { inner: Arc::clone(&inner), opened: Mutex::default() });
    files::show_metadata(&*links).unwrap();
    let directory: Arc<dyn Directory> = links.clone();
    let data = files::DataFiles::open(directory, IoMode::Buffered).unwrap();
    ShowingData::begin(data.all(), true).unwrap().wait().unwrap();
    let opened = links.opened.lock().unwrap().clone();
    let missed: Vec<String> = inner.list().unwrap().into_iter().filter(|name| !opened.contains(name)).collect();
    assert_eq!(missed, ["lock"]);
}

/// The table is read before the block, so a block that a client overwrites in between differs from its checksum.
#[test]
fn a_block_is_damaged_only_if_it_also_differs_while_no_write_is_under_way() {
    let (_disk, engine) = made();
    write(&engine, 0, 1);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    let (place, _) = packed::place(&engine, 1, 0);
    for (overwritten, damaged) in [(1, 0), (4, 0), (u32::MAX, 1)] {
        let reads = AtomicU32::new(0);
        let read = |run: Run, into: &mut [u8]| {
            let (file, offset) = engine.files.locate(run)?;
            file.read_at(into, offset).unwrap();
            into[0] ^= u8::from(reads.fetch_add(1, Ordering::Relaxed) < overwritten);
            Ok(())
        };
        let found = engine.confirm(&read, vec![place.start]).unwrap();
        assert_eq!(found.len(), damaged, "overwritten before {overwritten} reads");
    }
}

/// Scrubs the whole store, and returns the damaged places.
fn scrub(engine: &Engine) -> Vec<DamagedPlace> {
    let (scrubber, mut at, mut found) = (engine.scrubber(), Some(ScrubPosition::START), Vec::new());
    while let Some(position) = at {
        let step = scrubber.step(position).unwrap();
        found.extend(step.damage.iter().map(|damage| damage.place));
        at = step.next;
    }
    found
}

/// A crash leaves blocks suspect that were announced for an overwrite, also those that the overwrite never reached.
#[test]
fn a_scrub_settles_suspect_blocks_so_that_later_damage_is_found() {
    let (disk, engine) = with_a_block(256);
    write(&engine, 1, 1);
    engine.settle(&engine.head(1)).unwrap();
    engine.flush().unwrap();
    let places = [0, 1].map(|block| packed::place(&engine, 1, block).0.start);
    {
        let mut guard = engine.meta.lock();
        let meta = &mut *guard;
        for start in places {
            meta.data.annotate(&mut meta.pages, Run { start, blocks: 1 }, |_, entry| entry.suspect = true).unwrap();
        }
    }
    let put = |engine: &Engine, start: u64, value: u8| {
        let (file, offset) = engine.files.locate(Run { start, blocks: 1 }).unwrap();
        file.write_at(&[&slice(value, 1)], offset, true).unwrap();
    };
    // The overwrite of the second block was carried out in part.
    put(&engine, places[1], 7);
    assert_eq!(scrub(&engine), []);
    engine.flush().unwrap();
    engine.checkpoint().unwrap();
    drop(engine);
    let engine = open(&disk).unwrap();
    assert_eq!([0, 1].map(|block| value(&engine, block).unwrap()), [1, 7]);
    places.iter().for_each(|start| put(&engine, *start, 9));
    assert_eq!(scrub(&engine), places.map(DamagedPlace::Block));
    (0..2).for_each(|block| assert_eq!(value(&engine, block).unwrap_err().kind(), ErrorKind::Corrupt));
}

/// A client gets an error if a read has to be planned 256 times.
#[test]
fn a_read_settles_all_its_suspect_blocks_at_once() {
    let (_disk, engine) = made();
    (0..300).for_each(|block| write(&engine, block, 1));
    packed::quiet(&engine);
    for block in 0..300 {
        let run = Run { start: packed::place(&engine, 1, block).0.start, blocks: 1 };
        {
            let mut guard = engine.meta.lock();
            let meta = &mut *guard;
            meta.data.annotate(&mut meta.pages, run, |_, entry| entry.suspect = true).unwrap();
        }
        // The overwrite of the block was carried out, and the store ended before it was acknowledged.
        let (file, offset) = engine.files.locate(run).unwrap();
        file.write_at(&[&slice(2, 1)], offset, true).unwrap();
    }
    let plans = std::cell::Cell::new(0);
    let head = engine.head(1);
    let found = engine.read_blocks("vm", 0..300, &|range| {
        plans.set(plans.get() + u64::from(range.end - range.start > 1));
        engine.plan_head(&head, range)
    });
    assert!(found.unwrap().iter().all(|byte| *byte == 2));
    assert_eq!(plans.get(), 2);
}

#[test]
fn a_write_that_needs_space_fails_while_the_whole_medium_fails() {
    let (disk, engine) = made();
    write(&engine, 0, 1);
    packed::quiet(&engine);
    // The table of the space is not in memory.
    engine.meta.lock().pages.drop_clean();
    for fault in [Fault::Read, Fault::Reserve] {
        disk.fail_requests(fault, 0, u64::MAX);
    }
    let error = (0..BLOCKS).find_map(|block| engine.write_blocks(&engine.head(1), block, slice(7, 1)).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    let regions = || engine.meta.lock().data.regions();
    let first = regions();
    assert!(first < 32, "{first} regions, although none can be used");
    // Neither do writes that are repeated add regions.
    let rewritten = |block| engine.write_blocks(&engine.head(1), block, slice(8, 1));
    let failed = (0..BLOCKS).cycle().take(300).filter(|block| rewritten(*block).is_err()).count();
    assert!(failed > 0 && regions() <= first + 1, "{failed} failed, {} regions", regions());
    disk.mend();
    engine.write_blocks(&engine.head(1), BLOCKS - 1, slice(9, 1)).unwrap();
}
