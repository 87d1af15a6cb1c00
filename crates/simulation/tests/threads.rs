//! Threads on a real folder: writers that verify their data, with concurrent snapshots and deletions. Then the
//! datastore is opened again and compared.
#![allow(clippy::unwrap_used)]

use backend::{IoMode, SharedSlice};
use disk::{
    CheckOptions, Datastore, Device, InitOptions, NewDisk, NoProgress, OpenOptions, Point, Provisioning, QueueChoice,
    SnapshotOptions,
};
use simulation::image::Image;
use simulation::random::{Random, pattern};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const WRITERS: u64 = 4;
const CAPACITY: u64 = 24 << 20;
const TIME: Duration = Duration::from_secs(16);

/// The disk of one writer: its model, and its snapshots with their expected content.
struct Mine {
    name: String,
    image: Image,
    snapshots: Vec<(String, Image)>,
}

fn place(random: &mut Random) -> (u64, u64) {
    let length = match random.below(10) {
        0..6 => 4096,
        6 => 512,
        7 => random.between(1, 9000),
        8 => random.between(1, 64) * 4096,
        _ => random.between(32, 128) * 4096,
    };
    let align = *random.pick(&[4096, 4096, 4096, 512, 1]);
    (random.below(CAPACITY - length) / align * align, length)
}

fn compare(device: &dyn Device, image: &Image, offset: u64, length: u64) {
    let found = device.read(offset, length as usize).unwrap();
    assert!(found == image.read(offset, length), "{}: {length} bytes at {offset} are not as written", device.name());
}

fn compare_whole(device: &dyn Device, image: &Image) {
    for offset in (0..CAPACITY).step_by(1 << 20) {
        compare(device, image, offset, 1 << 20);
    }
}

/// Writes, reads and discards at random on its own disk, and takes, verifies and deletes snapshots of it.
fn write_and_verify(datastore: &Datastore, number: u64, until: Instant) -> Mine {
    let name = format!("w{number}");
    let mut random = Random::new(number);
    let mut mine = Mine { name: name.clone(), image: Image::default(), snapshots: Vec::new() };
    let device = datastore.device(&name, false).unwrap();
    let mut counter = 0;
    while Instant::now() < until {
        counter += 1;
        let (offset, length) = place(&mut random);
        match random.below(100) {
            0..60 => {
                let data = pattern(number << 32 | counter, length as usize);
                device.write(offset, SharedSlice::copy_of(&data), random.percent(2)).unwrap();
                mine.image.write(offset, &data);
            }
            60..88 => compare(&*device, &mine.image, offset, length),
            88..92 => {
                device.discard(offset, length, false).unwrap();
                mine.image.zero(offset, length);
            }
            92..94 => {
                device.write_zeroes(offset, length, random.percent(50), false).unwrap();
                mine.image.zero(offset, length);
            }
            94..97 => device.flush().unwrap(),
            _ if mine.snapshots.len() < 6 => {
                let snapshot = format!("s{counter}");
                datastore.create_snapshots(&[(name.clone(), snapshot.clone())], &SnapshotOptions::default()).unwrap();
                mine.snapshots.push((snapshot, mine.image.clone()));
            }
            _ => {
                let (snapshot, image) = mine.snapshots.swap_remove(random.below(6) as usize);
                let title = format!("{name}@{snapshot}");
                let reader = datastore.device(&title, true).unwrap();
                for _ in 0..20 {
                    let (offset, length) = place(&mut random);
                    compare(&*reader, &image, offset, length);
                }
                drop(reader);
                datastore.delete_snapshot(&name, &snapshot, None, &NoProgress).unwrap();
            }
        }
        // Older contents are not needed here, and would accumulate.
        mine.image.flush();
    }
    mine
}

/// Clones, copies and deletes disks while other threads write them.
fn stir(datastore: &Datastore, stop: &AtomicBool) {
    let mut random = Random::new(99);
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let source = format!("w{}", random.below(WRITERS));
        let clones = [format!("c{number}a"), format!("c{number}b")];
        let made = datastore.clone_linked(&source, &Point::Head, &clones, &NoProgress).unwrap();
        let clone = datastore.device(&made[0].name, false).unwrap();
        for block in 0..50 {
            let offset = random.below(CAPACITY / 4096) * 4096;
            clone.write(offset, SharedSlice::copy_of(&pattern(block, 4096)), false).unwrap();
            assert_eq!(clone.read(offset, 4096).unwrap(), pattern(block, 4096));
        }
        drop(clone);
        if random.percent(20) {
            let copy = format!("f{number}");
            datastore.clone_full(&source, &Point::Head, &copy, &NoProgress).unwrap();
            datastore.delete_disk(&copy, false).unwrap();
        }
        for clone in &clones {
            datastore.delete_disk(clone, false).unwrap();
        }
        datastore.delete_snapshot(&source, &format!("for-{}", clones[0]), None, &NoProgress).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn run(mode: IoMode) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("datastore");
    Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
    let options = OpenOptions {
        mode,
        queue: QueueChoice::Auto,
        metadata_cache: 2 << 20,
        write_buffer: 4 << 20,
        read_cache: Some(1 << 20),
    };
    let datastore = Datastore::open(&path, options).unwrap();
    for number in 0..WRITERS {
        datastore
            .create_disk(&format!("w{number}"), &NewDisk::native(CAPACITY, Provisioning::Thin), &NoProgress)
            .unwrap();
    }
    let until = Instant::now() + TIME / 2;
    let stop = Arc::new(AtomicBool::new(false));
    let mine: Vec<Mine> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|number| {
                scope.spawn({
                    let datastore = &datastore;
                    move || write_and_verify(datastore, number, until)
                })
            })
            .collect();
        let stirrer = scope.spawn(|| stir(&datastore, &stop));
        let mine = writers.into_iter().map(|writer| writer.join()).collect::<Vec<_>>();
        stop.store(true, Ordering::Relaxed);
        stirrer.join().unwrap();
        mine.into_iter().map(|mine| mine.unwrap()).collect()
    });
    datastore.close().unwrap();
    drop(datastore);
    let datastore = Datastore::open(&path, options).unwrap();
    for mine in &mine {
        compare_whole(&*datastore.device(&mine.name, true).unwrap(), &mine.image);
        for (snapshot, image) in &mine.snapshots {
            compare_whole(&*datastore.device(&format!("{}@{snapshot}", mine.name), true).unwrap(), image);
        }
    }
    let report = datastore.check(CheckOptions { data: true, repair: false }, &NoProgress).unwrap();
    assert_eq!(report.findings, vec![]);
    datastore.close().unwrap();
}

#[test]
fn concurrent_threads_lose_no_writes_buffered() {
    run(IoMode::Buffered);
}

#[test]
fn concurrent_threads_lose_no_writes_direct() {
    run(IoMode::Direct);
}
