//! Slow media: threads on a simulated medium that delays every request, with buffers and a journal that fill much
//! faster than the medium empties them. The power is cut at some point, and flushed data is compared.
//!
//! With a slow flush, write-back, checkpoints and flushes of several clients overlap for a long time. No request may
//! fail, and none may wait much longer than the medium needs for the requests before it.
#![allow(clippy::unwrap_used)]

use backend::simulated::{Request, SimulatedDisk, SimulatedOptions};
use backend::{BLOCK_SIZE, IoMode, SharedSlice};
use disk::{CheckOptions, Datastore, InitOptions, NewDisk, NoProgress, Provisioning, SnapshotOptions};
use simulation::image::Image;
use simulation::random::{Random, pattern};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use store::EngineOptions;

const WRITERS: u64 = 3;
const CAPACITY: u64 = 4 << 30;
const JOURNAL: u64 = 4 << 20;
/// How long a medium is written until its power is cut.
const TIME: Duration = Duration::from_millis(2500);
/// The longest time that a request may take. The slowest request of the media below takes tens of milliseconds.
const LONGEST: Duration = Duration::from_secs(20);

/// The time that a medium needs for a read or write, and for a flush.
#[derive(Clone, Copy, Debug)]
struct Medium {
    request: Duration,
    sync: Duration,
}

const MEDIA: [Medium; 3] = [
    // A disk with a queue: it accepts writes quickly, and flushes wait for the head to move.
    Medium { request: Duration::from_micros(50), sync: Duration::from_millis(40) },
    // A network: all requests take the same time.
    Medium { request: Duration::from_millis(2), sync: Duration::from_millis(2) },
    // A saturated device.
    Medium { request: Duration::from_millis(5), sync: Duration::from_millis(60) },
];

/// The disk of one writer: its expected content, and how long its requests took.
struct Mine {
    name: String,
    image: Image,
    requests: u64,
    longest: Duration,
}

fn write_and_flush(datastore: &Datastore, disk: &SimulatedDisk, number: u64) -> Mine {
    let name = format!("w{number}");
    let device = datastore.device(&name, false).unwrap();
    let mut random = Random::new(number);
    let mut mine = Mine { name, image: Image::default(), requests: 0, longest: Duration::ZERO };
    loop {
        mine.requests += 1;
        let blocks = *random.pick(&[1, 1, 1, 1, 16, 128]);
        // Half of the requests go to the same few blocks, the others anywhere.
        let places = if random.percent(50) { 64 } else { CAPACITY / BLOCK_SIZE as u64 - blocks };
        let (offset, length) = (random.below(places) * BLOCK_SIZE as u64, blocks * BLOCK_SIZE as u64);
        let began = Instant::now();
        let done = match random.below(100) {
            0..8 => device.flush().inspect(|()| mine.image.flush()),
            8..14 => {
                mine.image.zero(offset, length);
                device.discard(offset, length, false)
            }
            14..30 => match device.read(offset, length as usize) {
                Ok(found) => {
                    assert!(found == mine.image.read(offset, length), "{length} bytes at {offset} are not as written");
                    Ok(())
                }
                Err(error) => Err(error),
            },
            _ => {
                let data = pattern(number << 32 | mine.requests, length as usize);
                mine.image.write(offset, &data);
                device.write(offset, SharedSlice::copy_of(&data), false)
            }
        };
        if let Err(error) = done {
            assert!(disk.is_off(), "{}: {error}", mine.name);
            return mine;
        }
        mine.longest = mine.longest.max(began.elapsed());
        if disk.is_off() {
            return mine;
        }
    }
}

/// Takes and deletes snapshots until the power is cut.
fn snapshots(datastore: &Datastore, disk: &SimulatedDisk) {
    for number in 0u64.. {
        let (name, snapshot) = (format!("w{}", number % WRITERS), format!("s{number}"));
        let taken = datastore.create_snapshots(&[(name.clone(), snapshot.clone())], &SnapshotOptions::default());
        let done = taken.and_then(|_| datastore.delete_snapshot(&name, &snapshot, None, &NoProgress));
        if let Err(error) = done {
            assert!(disk.is_off(), "{name}@{snapshot}: {error}");
            return;
        }
        std::thread::sleep(Duration::from_millis(30));
    }
}

fn run(seed: u64, medium: Medium) {
    let disk = SimulatedDisk::new(seed, SimulatedOptions { unflushed_max: 256, ..SimulatedOptions::default() });
    let options = EngineOptions {
        mode: if seed.is_multiple_of(2) { IoMode::Buffered } else { IoMode::Direct },
        metadata_cache: 512 << 10,
        write_buffer: 1 << 20,
        read_cache: 1 << 20,
        cache_plain: true,
        commit_interval: Duration::from_millis(300),
        threads: true,
        write_through: true,
    };
    Datastore::init_in(disk.directory(), InitOptions { journal_size: JOURNAL }).unwrap();
    let datastore = Datastore::open_in(disk.directory(), options).unwrap();
    for number in 0..WRITERS {
        let new = NewDisk::native(CAPACITY, Provisioning::Thin);
        datastore.create_disk(&format!("w{number}"), &new, &NoProgress).unwrap();
    }
    let (ended, requests) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    disk.set_pace(Arc::new({
        let (ended, requests) = (Arc::clone(&ended), Arc::clone(&requests));
        move |request| {
            requests.fetch_add(1, Ordering::Relaxed);
            if !ended.load(Ordering::Relaxed) {
                std::thread::sleep(if request == Request::Sync { medium.sync } else { medium.request });
            }
        }
    }));
    let mine: Vec<Mine> = std::thread::scope(|scope| {
        let (datastore, disk) = (&datastore, &disk);
        let writers: Vec<_> =
            (0..WRITERS).map(|number| scope.spawn(move || write_and_flush(datastore, disk, number))).collect();
        let taker = scope.spawn(|| snapshots(datastore, disk));
        std::thread::sleep(TIME);
        disk.cut_changes_after(disk.operations() + seed % 50);
        let mine = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        taker.join().unwrap();
        mine
    });
    // The remaining steps are not timed.
    ended.store(true, Ordering::Relaxed);
    assert!(requests.load(Ordering::Relaxed) > 0);
    let _ = datastore.close();
    drop(datastore);

    let disk = disk.crash();
    let datastore = Datastore::open_in(disk.directory(), EngineOptions { threads: false, ..options }).unwrap();
    for mut mine in mine {
        println!("{medium:?}: {} made {} requests, the longest took {:?}", mine.name, mine.requests, mine.longest);
        assert!(mine.longest < LONGEST, "{medium:?}: a request took {:?}", mine.longest);
        let device = datastore.device(&mine.name, true).unwrap();
        for block in mine.image.known(0..CAPACITY / BLOCK_SIZE as u64) {
            let found = device.read(block * BLOCK_SIZE as u64, BLOCK_SIZE).unwrap();
            let found = found.as_slice().try_into().unwrap();
            mine.image.observe(block, found, true).unwrap_or_else(|lost| panic!("{medium:?}, {}: {lost}", mine.name));
        }
    }
    let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, vec![]);
    assert_eq!(report.leaked, 0);
    datastore.close().unwrap();
}

#[test]
fn with_slow_flushes_nothing_is_lost() {
    (0..2).for_each(|seed| run(seed, MEDIA[0]));
}

#[test]
fn with_a_slow_medium_nothing_is_lost() {
    (2..4).for_each(|seed| run(seed, MEDIA[1]));
}

#[test]
fn with_a_saturated_medium_nothing_is_lost() {
    (4..6).for_each(|seed| run(seed, MEDIA[2]));
}
