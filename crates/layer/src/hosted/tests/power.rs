//! Power cuts at any operation: flushed data is there, every other sector is old or new, and the image opens.

use super::*;
use crate::proving::killed_at_a_flush;
use std::sync::atomic::{AtomicU32, Ordering};

/// The permitted stamps of each sector: the last flushed one first, then every one written since.
struct Allowed(Vec<Vec<u64>>);

impl Allowed {
    fn put(&mut self, sector: u64, stamp: u64) {
        self.0[sector as usize].push(stamp);
    }

    fn flushed(&mut self) {
        for stamps in &mut self.0 {
            stamps.drain(..stamps.len() - 1);
        }
    }

    fn settle(&mut self, found: &[u8], context: &str) {
        for (sector, (stamps, bytes)) in self.0.iter_mut().zip(found.chunks(SECTOR as usize)).enumerate() {
            let stamp = stamp_of(bytes, context);
            assert!(stamps.contains(&stamp), "{context}: sector {sector} holds {stamp}, allowed are {stamps:?}");
            *stamps = vec![stamp];
        }
    }
}

fn sector_of(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(SECTOR as usize / 8)
}

fn stamp_of(bytes: &[u8], context: &str) -> u64 {
    let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes.chunks(8).all(|word| word == stamp.to_le_bytes()), "{context}: a torn sector");
    stamp
}

struct PowerTest {
    random: Random,
    capacity: u64,
    parent: Option<Vec<u8>>,
    allowed: Allowed,
    stamp: u64,
}

impl PowerTest {
    /// Makes random changes; returns true as soon as one fails.
    fn change(&mut self, layer: &Hosted, steps: u64) -> bool {
        for _ in 0..steps {
            let range = grains(&mut self.random, self.capacity, 8);
            let sectors = range.start / SECTOR..range.end / SECTOR;
            let result = match self.random.below(10) {
                0..5 => {
                    let mut bytes = Vec::new();
                    for sector in sectors {
                        self.stamp += 1;
                        self.allowed.put(sector, self.stamp);
                        bytes.extend(sector_of(self.stamp));
                    }
                    layer.write(range.start, &slices(&mut self.random, &bytes))
                }
                5..8 => {
                    sectors.for_each(|sector| self.allowed.put(sector, 0));
                    layer.zero(range, self.random.percent(30))
                }
                _ => layer.flush().map(|()| self.allowed.flushed()),
            };
            if result.is_err() {
                return true;
            }
        }
        false
    }
}

fn scenario(seed: u64) {
    let mut random = Random::new(seed);
    let unflushed_max = if seed.is_multiple_of(3) { 6 } else { 4096 };
    let mut disk = SimulatedDisk::new(seed, SimulatedOptions { unflushed_max, ..SimulatedOptions::default() });
    let capacity = 20 * GRAIN + random.below(60) * GRAIN + random.below(8) * SECTOR;
    let file = small(disk.directory().as_ref(), capacity, random.percent(50));
    if random.percent(50) {
        drop_tables(file.as_ref(), |_| random.percent(60));
    }
    let sectors = capacity / SECTOR;
    let parent = random.percent(50).then(|| (0..sectors).flat_map(|at| sector_of(1_000_000 + at)).collect::<Vec<_>>());
    let stamps = (0..sectors).map(|at| vec![if parent.is_some() { 1_000_000 + at } else { 0 }]).collect();
    let mut run = PowerTest { random, capacity, parent, allowed: Allowed(stamps), stamp: 0 };
    for round in 0..4 {
        let context = format!("seed {seed} round {round}");
        let file = disk.directory().open("disk.vmdk", IoMode::Buffered).unwrap();
        // The cut may come while the image is opened or closed.
        disk.cut_after(disk.operations() + run.random.below(60));
        if let Ok(layer) = open(&file, true, run.parent.is_some())
            && !run.change(&layer, 40)
            && layer.close().is_ok()
        {
            run.allowed.flushed();
        }
        let mut states = (0..3).map(|_| disk.crash()).collect::<Vec<_>>();
        // Each outcome of the cut is compared with its own copy of the permitted stamps.
        for after in &states[1..] {
            let file = after.directory().open("disk.vmdk", IoMode::Buffered).unwrap();
            let layer = open(&file, false, run.parent.is_some()).unwrap_or_else(|e| panic!("{context}: {e}"));
            let found = read_all(&layer, run.parent.as_deref());
            Allowed(run.allowed.0.clone()).settle(&found, &context);
        }
        disk = states.swap_remove(0);
        let file = disk.directory().open("disk.vmdk", IoMode::Buffered).unwrap();
        let reader = open(&file, false, run.parent.is_some()).unwrap_or_else(|e| panic!("{context}: {e}"));
        let found = read_all(&reader, run.parent.as_deref());
        run.allowed.settle(&found, &context);
        let writer = open(&file, true, run.parent.is_some()).unwrap();
        let check = writer.check().unwrap();
        assert!(check.is_sound() && check.dead == 0, "{context}: {check:?}");
        writer.repair().unwrap();
        assert_eq!(writer.check().unwrap().repaired, 0, "{context}: the check finds nothing to repair");
        assert_eq!(read_all(&writer, run.parent.as_deref()), found, "{context}: opening for writing changed it");
        writer.close().unwrap();
    }
}

#[test]
fn power_cuts_lose_nothing_that_was_flushed() {
    for seed in 0..600 {
        scenario(seed);
    }
}

#[test]
fn after_a_failed_write_all_further_writes_are_refused() {
    let mut tolerated = 0;
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        let capacity = 60 * GRAIN;
        let file = small(disk.directory().as_ref(), capacity, seed % 2 == 0);
        let stamps = vec![vec![0]; (capacity / SECTOR) as usize];
        let layer = open(&file, true, true).unwrap();
        let random_steps = random.below(40);
        let parent = Some(vec![0; capacity as usize]);
        let mut run = PowerTest { random, capacity, parent, allowed: Allowed(stamps), stamp: 0 };
        disk.fail_operation(disk.operations() + random_steps);
        if !run.change(&layer, 200) {
            // A failed punch is tolerated, because it only loses space.
            tolerated += 1;
            continue;
        }
        let before = disk.operations();
        let error = layer.write(0, &[&[0; GRAIN as usize]]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Stopped, "seed {seed}: {error}");
        assert!(layer.flush().is_err() && layer.close().is_err());
        assert_eq!(disk.operations(), before, "seed {seed}");
        let disk = disk.crash();
        let file = disk.directory().open("disk.vmdk", IoMode::Buffered).unwrap();
        let layer = open(&file, true, true).unwrap();
        run.allowed.settle(&read_all(&layer, run.parent.as_deref()), &format!("seed {seed}"));
        assert!(layer.check().unwrap().is_sound());
    }
    assert!(tolerated < 20, "{tolerated} failures went unnoticed");
}

/// A process is killed after a commit has written the tables, and before their flush. The device may still have the
/// older tables when the next process uses the freed grains for other data and the power is cut.
#[test]
fn grains_freed_in_unflushed_tables_are_not_reused_before_a_flush() {
    for (seed, first) in (0..40).flat_map(|seed| [(seed, 0), (seed, 4)]) {
        let disk = SimulatedDisk::new(seed, SimulatedOptions::default());
        let file = small(disk.directory().as_ref(), 20 * GRAIN, false);
        let layer = open(&file, true, false).unwrap();
        layer.write(0, &[&[1; 8 * GRAIN as usize]]).unwrap();
        layer.flush().unwrap();
        drop(layer);
        let left = Arc::new(AtomicU32::new(100));
        let layer = open(&killed_at_a_flush(Arc::clone(&file), Arc::clone(&left)), true, false).unwrap();
        layer.zero(first * GRAIN..(first + 4) * GRAIN, false).unwrap();
        left.store(1, Ordering::SeqCst);
        layer.flush().unwrap_err();
        drop(layer);
        let layer = open(&file, true, false).unwrap();
        layer.write(10 * GRAIN, &[&[2; 4 * GRAIN as usize]]).unwrap();
        drop(layer);
        for _ in 0..4 {
            let file = disk.crash().directory().open("disk.vmdk", IoMode::Buffered).unwrap();
            let found = read_all(&open(&file, false, false).unwrap(), None);
            for (grain, bytes) in found[..8 * GRAIN as usize].chunks(GRAIN as usize).enumerate() {
                let zeroed = (first..first + 4).contains(&(grain as u64));
                let allowed = |byte: &u8| *byte == 1 || (zeroed && *byte == 0);
                assert!(bytes.iter().all(allowed), "seed {seed}: grain {grain} holds {}", bytes[0]);
            }
        }
    }
}
