//! Checks of disks in use: they report no problem, whatever the guest does meanwhile.

use crate::world::{DELTAS, Random, options};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use vmdk::{Disk, NewDisk, NewSnapshot};
use work::NoProgress;

const CAPACITY: u64 = 64 << 20;
const GUESTS: u32 = 2;
/// Steps of a guest: so many that several checks run during them.
const STEPS: u32 = 1500;

fn guest(disk: &Disk, seed: u64) {
    let mut random = Random::new(seed);
    for step in 0..STEPS {
        let chain = disk.chain().unwrap();
        let start = random.below(CAPACITY / 4096 - 32) * 4096;
        let length = (1 + random.below(16)) * 4096 - *random.pick(&[0, 0, 512]);
        match random.below(3) {
            0 => chain.zero(start, length, random.percent(20)).unwrap(),
            _ => chain.write(start, &vec![step as u8; length as usize]).unwrap(),
        }
        if random.percent(5) {
            chain.flush().unwrap();
        }
    }
}

fn checked_beside_guests(seed: u64, kind: ImageKind, snapshots: u32) {
    let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
    let delta = Some(DELTAS[(seed % 3) as usize]);
    let new = NewDisk { name: "vm".into(), capacity: CAPACITY, kind, delta, adapter: Adapter::LsiLogic };
    let disk: Arc<Disk> = Disk::create(Folder::plain(machine.directory()), &new, &options(seed), &NoProgress).unwrap();
    let running = AtomicU32::new(GUESTS);
    let mut checks = 0;
    std::thread::scope(|scope| {
        for number in 0..GUESTS {
            let (disk, running) = (&disk, &running);
            scope.spawn(move || {
                guest(disk, seed * 10 + u64::from(number));
                running.fetch_sub(1, Ordering::AcqRel);
            });
        }
        while running.load(Ordering::Acquire) > 0 || checks < 2 * snapshots {
            if checks % 2 == 1 && checks / 2 < snapshots {
                disk.snapshot(&NewSnapshot::named(format!("s{checks}"))).unwrap();
            }
            let checked = disk.check(false, &NoProgress).unwrap();
            assert_eq!(checked.problems, Vec::<String>::new(), "{kind:?} {delta:?}, check {checks}");
            checks += 1;
        }
    });
    assert_eq!(disk.check(false, &NoProgress).unwrap().problem_count, 0);
}

#[test]
fn a_check_of_a_disk_in_use_reports_no_false_findings() {
    for seed in 0..3 {
        checked_beside_guests(seed, ImageKind::Thin, 3);
    }
}

#[test]
fn a_check_of_a_hosted_disk_in_use_reports_no_false_findings() {
    checked_beside_guests(1, ImageKind::MonolithicSparse, 0);
}
