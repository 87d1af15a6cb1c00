//! A medium that does not answer reads of metadata: requests that need no such reads must not wait.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, Buffer, Directory, File, IoMode, SharedSlice};
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use store::catalog::Provisioning;
use store::engine::{InitParameters, NewDisk};
use store::{Engine, EngineOptions};

const BLOCKS: u64 = 2 * 8000;

#[derive(Default)]
struct Stall {
    /// True while reads of metadata are blocked.
    on: bool,
    waiting: usize,
}

#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<Stall>, Condvar)>);

impl Gate {
    fn set(&self, on: bool) {
        self.0.0.lock().unwrap().on = on;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let mut stall = self.0.0.lock().unwrap();
        stall.waiting += 1;
        self.0.1.notify_all();
        while stall.on {
            stall = self.0.1.wait(stall).unwrap();
        }
        stall.waiting -= 1;
    }

    /// Waits until this many reads are blocked.
    fn wait_for(&self, count: usize) {
        let mut stall = self.0.0.lock().unwrap();
        while stall.waiting < count {
            let (next, timeout) = self.0.1.wait_timeout(stall, Duration::from_secs(60)).unwrap();
            assert!(!timeout.timed_out(), "{} of {count} reads of metadata wait", next.waiting);
            stall = next;
        }
    }
}

/// Unblocks reads when dropped, so that a failing test ends.
struct Opened<'a>(&'a Gate);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

struct Stalling(Arc<dyn Directory>, Gate);
struct StallingFile(Arc<dyn File>, Gate);

impl Stalling {
    fn wrap(&self, name: &str, file: Arc<dyn File>) -> Arc<dyn File> {
        if name == "map" || name == "data.table" { Arc::new(StallingFile(file, self.1.clone())) } else { file }
    }
}

impl Directory for Stalling {
    backend::forward_directory!(0: remove, rename, list, sync, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(self.wrap(name, self.0.open(name, mode)?))
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(self.wrap(name, self.0.create(name, mode)?))
    }
}

impl File for StallingFile {
    backend::forward_file!(0: len, set_len, read_cached_at, write_at, sync, punch, local);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.1.pass();
        self.0.read_at(buffer, offset)
    }
}

fn write(engine: &Engine, disk: u64, block: u64, value: u8) {
    let mut buffer = Buffer::zeroed(1);
    buffer.fill(value);
    engine.write_blocks(&engine.head(disk), block, SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE)).unwrap();
}

fn value(engine: &Engine, disk: u64, block: u64) -> u8 {
    let head = engine.head(disk);
    engine.read_blocks("disk", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap()[0]
}

fn make(engine: &Engine, name: &str) -> u64 {
    let new = NewDisk {
        name: name.into(),
        capacity: BLOCKS * BLOCK_SIZE as u64,
        provisioning: Provisioning::Thin,
        uuid: [1; 16],
        incomplete: false,
    };
    engine.create_disk(new).unwrap()
}

#[test]
fn a_disk_with_cached_metadata_is_served_while_others_wait_for_metadata() {
    let medium = SimulatedDisk::new(1, SimulatedOptions { reorder: false, ..SimulatedOptions::default() });
    let gate = Gate::default();
    let directory: Arc<dyn Directory> = Arc::new(Stalling(medium.directory(), gate.clone()));
    Engine::init(&directory, InitParameters { uuid: [7; 16], journal_size: 4 << 20 }).unwrap();
    let options = EngineOptions { write_buffer: 4 << 20, ..EngineOptions::default() };
    let engine = Engine::open(Arc::clone(&directory), options).unwrap();
    let (hot, cold) = (make(&engine, "hot"), make(&engine, "cold"));
    (0..16).for_each(|block| write(&engine, hot, block, 1));
    engine.settle(&engine.head(hot)).unwrap();
    (0..BLOCKS).step_by(2).for_each(|block| write(&engine, cold, block, 2));
    engine.close().unwrap();
    drop(engine);

    let engine = Engine::open(directory, options).unwrap();
    let at_opening = engine.page_statistics().locked;
    assert!((0..16).all(|block| value(&engine, hot, block) == 1));
    // Loads the root of the other disk's map, but no leaf.
    value(&engine, cold, 0);
    // Loads the metadata for an overwrite of this block.
    write(&engine, hot, 0, 1);
    engine.flush().unwrap();
    gate.set(true);
    std::thread::scope(|scope| {
        let opened = Opened(&gate);
        // Two readers miss different pages, and a third one misses the page that the second is reading, and waits for
        // that read.
        let readers: Vec<_> = [BLOCKS / 2, BLOCKS - 2, BLOCKS - 2]
            .map(|block| {
                scope.spawn({
                    let engine = &engine;
                    move || value(engine, cold, block)
                })
            })
            .into_iter()
            .collect();
        gate.wait_for(2);
        for block in 0..16 {
            assert_eq!(value(&engine, hot, block), 1);
            write(&engine, hot, block, 3);
            assert_eq!(value(&engine, hot, block), 3);
        }
        engine.flush().unwrap();
        drop(opened);
        assert!(readers.into_iter().all(|reader| reader.join().unwrap() == 2));
    });
    assert_eq!(engine.page_statistics().locked, at_opening, "pages were read under the lock");
    assert!((0..BLOCKS).step_by(2).all(|block| value(&engine, cold, block) == 2));
    engine.close().unwrap();
}
