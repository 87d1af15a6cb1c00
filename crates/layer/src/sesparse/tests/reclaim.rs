//! Wipe and shrink during guest writes, with a power cut or a kill at any point: no flushed data is lost, and every
//! dead grain becomes free again.

use super::super::header::Layout;
use super::*;
use backend::local::{LocalDirectory, LocalQueues};
use std::process::{Command, Stdio};
use std::time::Duration;

const CAPACITY: u64 = 100 * MIB;
/// Grains of the disk in use, in each of three tables.
const GRAINS: u64 = 400;
const SLOTS: [u64; 3] = [0, 3, 6];

/// A disk in which every second grain was discarded, or overwritten with zeros. All of it is durable.
fn half_dead(layer: &SeSparse, random: &mut Random, model: &mut Model) {
    for slot in SLOTS {
        for part in (0..GRAINS).step_by(25) {
            let first = slot * 4096 + part;
            let stamp = random.next() | 1;
            layer.write(first * GRAIN, &[&stamped(25, stamp)]).unwrap();
            model.set(first, 25, stamp);
        }
    }
    for slot in SLOTS {
        for grain in (0..GRAINS).filter(|grain| grain % 2 == slot % 2) {
            let grain = slot * 4096 + grain;
            match random.once_in(3) {
                true => layer.write(grain * GRAIN, &[&stamped(1, 0)]).unwrap(),
                false => layer.zero(grain * GRAIN..(grain + 1) * GRAIN, false).unwrap(),
            }
            model.set(grain, 1, 0);
        }
    }
    layer.flush().unwrap();
    model.flushed();
}

/// The number of grains with data, as the guest sees it.
fn live(layer: &SeSparse) -> u64 {
    let mut live = 0;
    for slot in SLOTS {
        let found = stamps(layer, slot * 4096 * GRAIN, GRAINS * GRAIN).unwrap();
        let grains = found.chunks(SECTORS as usize);
        live += grains.filter(|grain| grain.iter().any(|stamp| !matches!(*stamp, 0 | ABSENT))).count() as u64;
    }
    live
}

/// Wipes and shrinks without guest activity; then the file has only its tables and live grains.
fn reclaim_all(layer: &SeSparse, file: &dyn File) {
    layer.wipe(true, &NoProgress).unwrap();
    layer.shrink(&NoProgress).unwrap();
    let live = live(layer);
    let usage = layer.usage().unwrap();
    assert_eq!((usage.mapped, usage.dead), (live * GRAIN, 0));
    let tables = Layout::for_capacity(CAPACITY / 512).grains.offset * 512;
    assert_eq!(file.len().unwrap(), tables + live * GRAIN, "every dead grain is returned");
    assert_clean(layer);
}

/// Changes by a guest between two steps of wiping or shrinking.
fn guest(random: &mut Random, layer: &SeSparse, model: &mut Model) {
    if random.once_in(12) && layer.flush().is_ok() {
        return model.flushed();
    }
    let count = 1 + random.below(6);
    let first = SLOTS[random.below(3) as usize] * 4096 + random.below(GRAINS - count);
    let stamp = if random.once_in(3) { 0 } else { random.next() | 1 };
    let operation = Operation { first, count, stamp, keep: random.once_in(4) };
    // The model permits the result of the operation even if it fails, because a part of it may have been done.
    model.set(first, count, stamp);
    let _ = operation.apply(layer);
}

/// Wipes and shrinks an image, with guest writes if `beside`, until the power is cut; then checks the image. Returns
/// whether wipe and shrink completed before the cut.
fn cut(seed: u64, after: u64, beside: bool) -> bool {
    let mut random = Random(seed);
    let disk = simulated(seed ^ after << 20);
    let mode = if seed.is_multiple_of(2) { IoMode::Buffered } else { IoMode::Direct };
    let punch = [None, Some(GRAIN)][(seed / 2 % 2) as usize];
    let options = Options { punch, cache: 0, ..writing() };
    let layer = create(&disk, mode, CAPACITY, options);
    let mut model = Model::default();
    half_dead(&layer, &mut random, &mut model);
    disk.cut_after(disk.operations() + after);
    let mut work = |shrink: bool| {
        let watch = steps(|_, _| {
            if beside && !disk.is_off() {
                guest(&mut random, &layer, &mut model);
            }
            true
        });
        match shrink {
            false => layer.wipe(true, &watch).is_ok(),
            true => layer.shrink(&watch).is_ok(),
        }
    };
    let done = work(false) && work(true);
    drop(layer);
    let disk = disk.crash();
    let reader = open(&*disk.directory(), mode, Options::default()).unwrap();
    model.clone().settle(&reader);
    let report = reader.check(false, &NoProgress).unwrap();
    assert!(!report.is_damaged() && report.unallocated + report.misowned == 0, "seed {seed}, {after}: {report:?}");
    drop(reader);
    let layer = open(&*disk.directory(), mode, options).unwrap();
    model.settle(&layer);
    assert_clean(&layer);
    reclaim_all(&layer, &*disk.directory().open(NAME, mode).unwrap());
    model.settle(&layer);
    layer.close().unwrap();
    done
}

#[test]
fn a_power_cut_at_every_operation() {
    // Two variants: buffered I/O without punching, and direct I/O with punching.
    for seed in [0, 3] {
        let mut after = 0;
        while !cut(seed, after, false) {
            after += 1;
        }
        assert!(after > 40, "{after} operations");
    }
}

#[test]
fn a_power_cut_at_any_operation_during_writes_of_a_guest() {
    let mut finished = 0;
    for seed in 100..1100 {
        let after = Random(seed).below(160);
        finished += u32::from(cut(seed, after, true));
    }
    assert!((1..900).contains(&finished), "{finished} of 1,000 ended before the power cut");
}

const CHILD: &str = "LAMINA_TEST_CHILD";

/// Wipes and shrinks during guest writes until the process is killed. The guest stamps each grain with its own number,
/// and prints what is flushed.
#[test]
#[ignore = "the child of the test below"]
fn child() {
    let Ok(folder) = std::env::var(CHILD) else { return };
    let directory = LocalDirectory::open(std::path::Path::new(&folder), LocalQueues::Threads).unwrap();
    let layer = open(&directory, IoMode::Buffered, writing()).unwrap();
    let mut random = Random(u64::from(std::process::id()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                let done = layer.wipe(true, &NoProgress).and_then(|_| layer.shrink(&NoProgress));
                if let Err(error) = done {
                    eprintln!("{error}");
                    std::process::exit(1);
                }
            }
        });
        loop {
            let slot = SLOTS[random.below(3) as usize];
            let grain = slot * 4096 + random.below(GRAINS);
            match random.once_in(2) {
                true => layer.zero(grain * GRAIN..(grain + 1) * GRAIN, false).unwrap(),
                false => layer.write(grain * GRAIN, &[&stamped(1, grain + 1)]).unwrap(),
            }
            if random.once_in(50) {
                layer.flush().unwrap();
            }
        }
    });
}

#[test]
fn a_process_killed_at_random_moments_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
    let file = directory.create(NAME, IoMode::Buffered).unwrap();
    let layer = SeSparse::create(Arc::clone(&file), NAME, CAPACITY, writing()).unwrap();
    for slot in SLOTS {
        for grain in slot * 4096..slot * 4096 + GRAINS {
            layer.write(grain * GRAIN, &[&stamped(1, grain + 1)]).unwrap();
        }
    }
    layer.flush().unwrap();
    drop(layer);
    for round in 0..12 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "sesparse::tests::reclaim::child"])
            .env(CHILD, folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(60 + round * 37));
        assert!(child.try_wait().unwrap().is_none(), "the child runs until it is killed");
        child.kill().unwrap();
        child.wait().unwrap();
        let layer = open(&directory, IoMode::Buffered, writing()).unwrap();
        assert_clean(&layer);
        // The kernel keeps all writes of a killed process: each grain has its own stamp, or zeros.
        for slot in SLOTS {
            let found = stamps(&layer, slot * 4096 * GRAIN, GRAINS * GRAIN).unwrap();
            for (grain, sectors) in (slot * 4096..).zip(found.chunks(SECTORS as usize)) {
                let good = sectors.iter().all(|stamp| *stamp == grain + 1) || sectors.iter().all(|stamp| *stamp == 0);
                assert!(good, "grain {grain}: {sectors:x?}");
            }
        }
        if round % 3 == 2 {
            reclaim_all(&layer, &*file);
        }
        drop(layer);
    }
}

/// A reader holds an epoch so long that the layer drops retired grains from its list. The mark shows the regions of
/// these grains, even in a closed image.
#[test]
fn dead_grains_that_a_crash_left_are_found_at_the_next_opening() {
    for closed in [false, true] {
        let disk = simulated(5);
        let layer = create(&disk, IoMode::Buffered, CAPACITY, writing());
        for at in (0..64 * MIB).step_by(MIB as usize) {
            layer.write(at, &[&stamped(256, at + 1)]).unwrap();
        }
        layer.flush().unwrap();
        let reader = layer.epoch();
        let grains = 64 * MIB / GRAIN;
        assert!(grains / 2 > super::super::state::RETIRED_RUNS_MAX as u64);
        for grain in (0..grains).step_by(2) {
            layer.zero(grain * GRAIN..(grain + 1) * GRAIN, false).unwrap();
        }
        layer.flush().unwrap();
        drop(reader);
        if closed {
            layer.close().unwrap();
        }
        drop(layer);
        let layer = open(&*disk.directory(), IoMode::Buffered, writing()).unwrap();
        assert_clean(&layer);
        assert_eq!(layer.usage().unwrap().mapped, grains / 2 * GRAIN);
    }
}

/// Half of a disk is deleted, and at least 99 % of the dead grains are returned to the file system.
#[test]
fn discarding_half_of_the_disk_returns_its_space() {
    for contiguous in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let directory = LocalDirectory::open(folder.path(), LocalQueues::Threads).unwrap();
        let file = directory.create(NAME, IoMode::Buffered).unwrap();
        let layer = SeSparse::create(file, NAME, 256 * MIB, writing()).unwrap();
        for at in (0..128 * MIB).step_by(MIB as usize) {
            layer.write(at, &[&stamped(256, at + 1)]).unwrap();
        }
        layer.flush().unwrap();
        let full = layer.usage().unwrap();
        assert_eq!((full.mapped, full.dead), (128 * MIB, 0), "{full:?}");
        if contiguous {
            layer.zero(0..64 * MIB, false).unwrap();
        } else {
            for grain in (0..128 * MIB / GRAIN).step_by(2) {
                layer.zero(grain * GRAIN..(grain + 1) * GRAIN, false).unwrap();
            }
        }
        let usage = layer.usage().unwrap();
        assert_eq!((usage.mapped, usage.dead), (64 * MIB, 64 * MIB), "before the flush");
        layer.flush().unwrap();
        let usage = layer.usage().unwrap();
        assert_eq!((usage.mapped, usage.dead), (64 * MIB, 64 * MIB), "after the flush");
        layer.wipe(true, &NoProgress).unwrap();
        layer.shrink(&NoProgress).unwrap();
        let usage = layer.usage().unwrap();
        assert_eq!((usage.mapped, usage.dead), (64 * MIB, 0));
        let returned = full.allocated - usage.allocated;
        assert!(returned * 100 >= 64 * MIB * 99, "{returned} of {} bytes were returned to the file system", 64 * MIB);
    }
}
