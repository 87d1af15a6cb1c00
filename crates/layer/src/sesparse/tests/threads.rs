//! Readers, writers, wipe, shrink and flushes at once, on a real file.

use super::super::entry::Table;
use super::super::state::table_page;
use super::*;
use crate::ErrorKind;
use backend::local::{LocalDirectory, LocalQueues};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const WRITERS: u64 = 3;
/// Grains per writer, spread over two tables.
const GRAINS: u64 = 1500;

fn place(writer: u64, grain: u64) -> u64 {
    (grain % 2 * 4096 + grain / 2 * WRITERS + writer) * GRAIN
}

/// Random changes of a writer's own grains, each of which is read back.
fn write(layer: &SeSparse, writer: u64, stop: &AtomicBool) -> Vec<u64> {
    let mut random = Random(writer);
    let mut model = vec![ABSENT; GRAINS as usize];
    while !stop.load(Ordering::Relaxed) {
        let grain = random.below(GRAINS);
        let at = place(writer, grain);
        let stamp = if random.once_in(3) { 0 } else { random.next() | 1 };
        match stamp {
            0 => layer.zero(at..at + GRAIN, random.once_in(4)).unwrap(),
            // Some grains are written with zeros, so that the wipe finds them.
            _ if random.once_in(8) => {
                layer.write(at, &[&stamped(1, 0)]).unwrap();
                model[grain as usize] = 0;
                continue;
            }
            _ => layer.write(at, &[&stamped(1, stamp)]).unwrap(),
        }
        model[grain as usize] = stamp;
        let other = random.below(GRAINS);
        assert_eq!(stamps(layer, place(writer, other), GRAIN).unwrap(), [model[other as usize]; 8], "grain {other}");
        if random.once_in(300) {
            layer.flush().unwrap();
        }
    }
    model
}

/// Reads continuously: no grain may be torn, even while it is written or moved.
fn read(layer: &SeSparse, stop: &AtomicBool) {
    let mut random = Random(99);
    while !stop.load(Ordering::Relaxed) {
        let epoch = layer.epoch();
        let start = random.below(2 * 4096 - 64) * GRAIN;
        let extents = map_all(layer, start, 64 * GRAIN).unwrap();
        if random.once_in(20) {
            std::thread::sleep(Duration::from_millis(3));
        }
        for extent in extents {
            if let Content::Data { file, offset } = extent.content {
                let mut buffer = Buffer::with_bytes(extent.length as usize);
                layer.file(file).unwrap().read_at(&mut buffer, offset).unwrap();
            }
        }
        drop(epoch);
    }
}

/// Stops the threads when it is dropped, also by a failure.
struct Stopped<'a>(&'a AtomicBool);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn run(mode: IoMode, punch: Option<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let file = directory.create(NAME, mode).unwrap();
    let options = Options { punch, cache: 0, ..writing() };
    let layer = SeSparse::create(file, NAME, 200 * MIB, options).unwrap();
    // On a host with much other load, the first shrinks may find nothing to move.
    let (begun, usual, longest) = (Instant::now(), Duration::from_millis(1500), Duration::from_secs(60));
    let stop = AtomicBool::new(false);
    let (mut rounds, mut moved) = (0, 0);
    let models: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let (layer, stop, stopped) = (&layer, &stop, Stopped(&stop));
        let writers: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || write(layer, writer, stop))).collect();
        scope.spawn(|| read(layer, stop));
        while begun.elapsed() < usual || (moved == 0 && begun.elapsed() < longest) {
            layer.wipe(true, &NoProgress).unwrap();
            moved += layer.shrink(&NoProgress).unwrap().moved;
            rounds += 1;
            assert_eq!(layer.check(false, &NoProgress).unwrap().findings, Vec::<String>::new());
        }
        drop(stopped);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    assert!(rounds > 0 && moved > 0, "{rounds} rounds, {moved} moved");
    let compare = |layer: &SeSparse| {
        for (writer, model) in models.iter().enumerate() {
            for (grain, stamp) in model.iter().enumerate() {
                let found = stamps(layer, place(writer as u64, grain as u64), GRAIN).unwrap();
                assert_eq!(found, [*stamp; 8], "writer {writer}, grain {grain}");
            }
        }
    };
    layer.wipe(true, &NoProgress).unwrap();
    layer.shrink(&NoProgress).unwrap();
    compare(&layer);
    assert_clean(&layer);
    let live = models.iter().flatten().filter(|stamp| !matches!(**stamp, 0 | ABSENT)).count() as u64;
    assert_eq!(layer.usage().unwrap().mapped, live * GRAIN);
    layer.close().unwrap();
    compare(&open(&directory, mode, Options::default()).unwrap());
}

#[test]
fn reads_writes_flushes_wipes_and_shrinks_at_once() {
    run(IoMode::Buffered, None);
    run(IoMode::Buffered, Some(GRAIN));
    run(IoMode::Direct, None);
}

#[test]
fn closing_ends_wipe_and_shrink() {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let file = directory.create(NAME, IoMode::Buffered).unwrap();
    let layer = SeSparse::create(file, NAME, 1 << 40, writing()).unwrap();
    layer.write(0, &[&stamped(100, 1)]).unwrap();
    std::thread::scope(|scope| {
        let wipe = scope.spawn(|| {
            loop {
                if let Err(error) = layer.wipe(true, &NoProgress) {
                    return error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(30));
        layer.close().unwrap();
        let kind = wipe.join().unwrap().kind();
        assert!(matches!(kind, ErrorKind::Interrupted | ErrorKind::ReadOnly), "{kind:?}");
    });
}

/// A client's flush of a chain may reach an image that is being closed, because a merge into it has ended.
#[test]
fn flushes_succeed_while_an_image_is_closed_and_afterwards() {
    let disk = simulated(1);
    let layer = create(&disk, IoMode::Buffered, 64 * MIB, writing());
    layer.write(0, &[&stamped(100, 1)]).unwrap();
    let closed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !closed.load(Ordering::SeqCst) {
                layer.flush().unwrap();
            }
        });
        let outcome = layer.close();
        closed.store(true, Ordering::SeqCst);
        outcome.unwrap();
    });
    layer.flush().unwrap();
    assert_eq!(layer.write(0, &[&stamped(1, 2)]).unwrap_err().kind(), ErrorKind::ReadOnly);
    drop(layer);
    let layer = open(&*disk.crash().directory(), IoMode::Buffered, Options::default()).unwrap();
    assert_eq!(stamps(&layer, 0, GRAIN).unwrap(), [1; SECTORS as usize]);
}

/// A file that calls a function once, when it has read at an offset.
struct Hooked {
    inner: Arc<dyn File>,
    at: u64,
    hook: parking_lot::Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl File for Hooked {
    backend::forward_file!(inner: len, set_len, write_at, sync, punch, local);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.inner.read_at(buffer, offset)?;
        let hook = (offset == self.at).then(|| self.hook.lock().take()).flatten();
        if let Some(hook) = hook {
            hook();
        }
        Ok(())
    }
}

/// After a crash, a shrink reads tables that owners in the backmap name and no slot does. A write may allocate such a
/// table meanwhile.
#[test]
fn a_table_that_is_allocated_while_its_page_is_read_keeps_its_entries() {
    let disk = simulated(1);
    let page = table_page(Table(0), 0);
    let at = create(&disk, IoMode::Buffered, 100 * MIB, writing()).page_offset(page);
    let inner = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    // Entries that a crash left in the table: zeros.
    inner.write_at(&[&stamped(1, 2 << 60)], at, true).unwrap();
    let hooked = Arc::new(Hooked { inner, at, hook: parking_lot::Mutex::default() });
    let layer = Arc::new(SeSparse::open(hooked.clone(), NAME, writing()).unwrap());
    let writer = Arc::clone(&layer);
    *hooked.hook.lock() = Some(Box::new(move || writer.write(0, &[&stamped(1, 7)]).unwrap()));
    layer.settle(|state| state.need(page)).unwrap();
    assert!(hooked.hook.lock().is_none());
    assert_eq!(stamps(&*layer, 0, GRAIN).unwrap(), [7; SECTORS as usize]);
    layer.flush().unwrap();
    drop((layer, hooked));
    let layer = open(&*disk.crash().directory(), IoMode::Buffered, Options::default()).unwrap();
    assert_eq!(stamps(&layer, 0, GRAIN).unwrap(), [7; SECTORS as usize]);
    assert_eq!(stamps(&layer, GRAIN, GRAIN).unwrap(), [ABSENT; SECTORS as usize]);
}

/// As before, but the new pages of the table are written and evicted before the read ends.
#[test]
fn a_table_that_is_allocated_and_evicted_while_its_page_is_read_keeps_its_entries() {
    const SPAN: u64 = 16 * MIB;
    const SLOTS: u64 = 128;
    let disk = simulated(1);
    let page = table_page(Table(0), 0);
    let at = create(&disk, IoMode::Buffered, SLOTS * SPAN, writing()).page_offset(page);
    let inner = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    inner.write_at(&[&stamped(1, 2 << 60)], at, true).unwrap();
    let hooked = Arc::new(Hooked { inner, at, hook: parking_lot::Mutex::default() });
    let layer = Arc::new(SeSparse::open(hooked.clone(), NAME, Options { cache: 0, ..writing() }).unwrap());
    let writer = Arc::clone(&layer);
    *hooked.hook.lock() = Some(Box::new(move || {
        for slot in 0..SLOTS {
            writer.write(slot * SPAN, &[&stamped(1, 7)]).unwrap();
        }
        writer.flush().unwrap();
        for _ in 0..8 {
            map_all(&*writer, SPAN, (SLOTS - 1) * SPAN).unwrap();
        }
        assert!(!writer.state.lock().cache.contains(page), "the page is evicted");
    }));
    layer.settle(|state| state.need(page)).unwrap();
    assert!(hooked.hook.lock().is_none());
    assert_eq!(stamps(&*layer, 0, GRAIN).unwrap(), [7; SECTORS as usize]);
    assert_eq!(stamps(&*layer, GRAIN, GRAIN).unwrap(), [ABSENT; SECTORS as usize]);
}
