//! Measures how the load on one disk affects another disk. The metadata of a small disk is cached. The latencies of
//! this disk are measured without other load, during reads of a second disk that miss metadata pages, and during a
//! check. The last measurement is of 16 concurrent reads that all miss metadata pages.
//! ```text
//! cargo run --release -p lamina-store --example neighbour -- /path/of/an/empty/folder [GiB] [microseconds]
//! ```
//!
//! The large disk maps every second block with an extent of its own, so its metadata is many times the size of the
//! cache. Each read of a metadata page is delayed by the given number of microseconds, because otherwise the page cache
//! of the operating system would answer at once. The four readers also use processor time and wake up often. A run with
//! an ample metadata cache shows how much of the effect is not due to misses: in it the readers sleep for the same
//! number of microseconds.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

use backend::local::{LocalDirectory, LocalQueues};
use backend::{BLOCK_SIZE, Buffer, Directory, File, IoMode, SharedSlice};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use store::catalog::Provisioning;
use store::engine::{CheckOptions, InitParameters, NewDisk};
use store::{Engine, EngineOptions};
use testkit::Random;

const HOT_BLOCKS: u64 = 4096;
const READERS: u64 = 4;
const DEPTH: u64 = 16;
const MEASURED: Duration = Duration::from_secs(4);

/// A directory that delays reads of metadata pages.
struct Slow {
    inner: Arc<dyn Directory>,
    delay: Arc<AtomicU64>,
}

struct SlowFile {
    inner: Arc<dyn File>,
    delay: Arc<AtomicU64>,
}

impl Slow {
    fn wrap(&self, name: &str, file: Arc<dyn File>) -> Arc<dyn File> {
        if name == "map" || name.ends_with(".table") {
            Arc::new(SlowFile { inner: file, delay: Arc::clone(&self.delay) })
        } else {
            file
        }
    }
}

impl Directory for Slow {
    backend::forward_directory!(inner: remove, rename, list, sync, lock, room, queue, queue_kind);

    fn open(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(self.wrap(name, self.inner.open(name, mode)?))
    }
    fn create(&self, name: &str, mode: IoMode) -> io::Result<Arc<dyn File>> {
        Ok(self.wrap(name, self.inner.create(name, mode)?))
    }
}

impl File for SlowFile {
    backend::forward_file!(inner: len, set_len, read_cached_at, write_at, sync, punch, local);

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let delay = self.delay.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_micros(delay));
        }
        self.inner.read_at(buffer, offset)
    }
}

fn read(engine: &Engine, disk: u64, block: u64) {
    let head = engine.head(disk);
    engine.read_blocks("disk", block..block + 1, &|range| engine.plan_head(&head, range)).unwrap();
}

fn write(engine: &Engine, disk: u64, block: u64, value: u64) {
    let mut buffer = Buffer::zeroed(1);
    buffer[..8].copy_from_slice(&(value | 1).to_le_bytes());
    engine.write_blocks(&engine.head(disk), block, SharedSlice::new(Arc::new(buffer), 0..BLOCK_SIZE)).unwrap();
}

/// Runs `work` repeatedly, with a pause before each run, until `done` returns true, and prints the latencies of `work`.
fn measure(what: &str, pause: Duration, done: &dyn Fn(Instant) -> bool, work: impl FnMut()) {
    let began = Instant::now();
    let times = sample(pause, done, work);
    print(what, began.elapsed(), times);
}

/// The latencies of `work`, in nanoseconds.
fn sample(pause: Duration, done: &dyn Fn(Instant) -> bool, mut work: impl FnMut()) -> Vec<u64> {
    let began = Instant::now();
    let mut times = Vec::new();
    while !done(began) {
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        let at = Instant::now();
        work();
        times.push(at.elapsed().as_nanos() as u64);
    }
    times
}

fn print(what: &str, took: Duration, mut times: Vec<u64>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    println!(
        "{what:<44} {:>8}/s  p50 {:>8.1}  p99 {:>8.1}  p99.9 {:>8.1}  max {:>9.1} us",
        (times.len() as f64 / took.as_secs_f64()) as u64,
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    );
}

fn make(engine: &Engine, name: &str, blocks: u64) -> u64 {
    let new = NewDisk {
        name: name.into(),
        capacity: blocks * BLOCK_SIZE as u64,
        provisioning: Provisioning::Thin,
        uuid: [1; 16],
        incomplete: false,
    };
    engine.create_disk(new).unwrap()
}

/// Runs `work` while readers read every second block of a disk, in no order, with a pause before each read.
fn beside_readers(engine: &Engine, disk: u64, written: u64, pause: Duration, work: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..READERS {
            let stop = &stop;
            scope.spawn(move || {
                let mut random = Random(seed + 2);
                while !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(pause);
                    read(engine, disk, 2 * random.below(written));
                }
            });
        }
        work();
        stop.store(true, Ordering::Relaxed);
    });
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("a folder");
    let gigabytes: u64 = arguments.next().map_or(1, |word| word.parse().unwrap());
    let micros: u64 = arguments.next().map_or(100, |word| word.parse().unwrap());
    let cold_blocks = gigabytes << 18;
    let delay = Arc::new(AtomicU64::new(0));
    let inner = LocalDirectory::open(&path, LocalQueues::Auto).unwrap();
    let directory: Arc<dyn Directory> = Arc::new(Slow { inner: Arc::new(inner), delay: Arc::clone(&delay) });
    let (hot, cold) = (1, 2);
    if !std::path::Path::new(&path).join("superblock").exists() {
        Engine::init(&directory, InitParameters { uuid: [7; 16], journal_size: 128 << 20 }).unwrap();
        let engine = Engine::open(Arc::clone(&directory), EngineOptions::default()).unwrap();
        assert_eq!((make(&engine, "hot", HOT_BLOCKS), make(&engine, "cold", 2 * cold_blocks)), (hot, cold));
        (0..HOT_BLOCKS).for_each(|block| write(&engine, hot, block, block));
        (0..cold_blocks).for_each(|block| write(&engine, cold, 2 * block, block));
        engine.close().unwrap();
    }
    let for_a_while = |began: Instant| began.elapsed() > MEASURED;
    let back_to_back = Duration::ZERO;
    let paced = Duration::from_micros(100);

    // The effect of four readers that miss no metadata page.
    let ample = EngineOptions { metadata_cache: 1 << 30, ..EngineOptions::default() };
    let engine = Engine::open(Arc::clone(&directory), ample).unwrap();
    (0..HOT_BLOCKS).for_each(|block| read(&engine, hot, block));
    (0..cold_blocks).for_each(|block| read(&engine, cold, 2 * block));
    beside_readers(&engine, cold, cold_blocks, Duration::from_micros(micros), || {
        let mut random = Random(1);
        measure("reads beside 4 readers that miss nothing", paced, &for_a_while, || {
            read(&engine, hot, random.below(HOT_BLOCKS));
        });
    });
    engine.close().unwrap();
    drop(engine);

    let options = EngineOptions { metadata_cache: 2 << 20, ..EngineOptions::default() };
    let engine = Engine::open(directory, options).unwrap();
    (0..HOT_BLOCKS).for_each(|block| read(&engine, hot, block));
    let mut random = Random(1);
    measure("reads of a cached disk, one after another", back_to_back, &for_a_while, || {
        read(&engine, hot, random.below(HOT_BLOCKS));
    });
    measure("reads of a cached disk, paced", paced, &for_a_while, || read(&engine, hot, random.below(HOT_BLOCKS)));
    delay.store(micros, Ordering::Relaxed);
    beside_readers(&engine, cold, cold_blocks, Duration::ZERO, || {
        measure("reads beside 4 readers that miss metadata", paced, &for_a_while, || {
            read(&engine, hot, random.below(HOT_BLOCKS));
        });
        measure("another reader that misses metadata", back_to_back, &for_a_while, || {
            read(&engine, cold, 2 * random.below(cold_blocks))
        });
    });
    let began = Instant::now();
    let times = std::thread::scope(|scope| {
        let engine = &engine;
        let readers: Vec<_> = (0..DEPTH)
            .map(|seed| {
                let mut random = Random(seed + 20);
                scope.spawn(move || {
                    sample(back_to_back, &for_a_while, || read(engine, cold, 2 * random.below(cold_blocks)))
                })
            })
            .collect();
        readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect()
    });
    print("16 readers that miss metadata", began.elapsed(), times);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (engine, stop) = (&engine, &stop);
        scope.spawn(move || {
            let mut random = Random(9);
            while !stop.load(Ordering::Relaxed) {
                write(engine, cold, 2 * random.below(cold_blocks), random.below(1 << 30));
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        measure("reads beside a writer that misses metadata", paced, &for_a_while, || {
            read(engine, hot, random.below(HOT_BLOCKS));
        });
        stop.store(true, Ordering::Relaxed);
    });
    delay.store(0, Ordering::Relaxed);

    let durable = |engine: &Engine, random: &mut Random| {
        let value = random.below(1 << 30);
        write(engine, hot, random.below(HOT_BLOCKS), value);
        engine.flush().unwrap();
    };
    let mut random = Random(3);
    measure("writes and flushes, alone", paced, &for_a_while, || durable(&engine, &mut random));
    for data in [false, true] {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (engine, done) = (&engine, &done);
            scope.spawn(move || {
                let began = Instant::now();
                let report = engine.check(CheckOptions { data, repair: false }, &|_, _| true);
                done.store(true, Ordering::Release);
                let report = report.unwrap();
                println!(
                    "check, data {data}: {:.2} s, {} pages, {} blocks verified, {} findings",
                    began.elapsed().as_secs_f64(),
                    report.pages,
                    report.verified,
                    report.findings.len() as u64 + report.unlisted
                );
                if let Some(finding) = report.findings.first() {
                    println!("  {}", finding.problem);
                }
            });
            let what = if data { "writes and flushes beside check --data" } else { "writes and flushes beside check" };
            measure(what, paced, &|_| done.load(Ordering::Acquire), || durable(engine, &mut random));
        });
    }
    engine.close().unwrap();
}
