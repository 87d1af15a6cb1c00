//! Flat extents on the host's file system: space, counters and fragments as the host reports them, and filling and
//! punching during guest writes.

#![allow(clippy::unwrap_used)]

mod scratch;

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Access, IoMode, LocalFolder};
use layer::Layer;
use layer::flat::{self, Counters, FILE_BLOCK, Flat, FlatOptions, Provisioning};
use scratch::{Random, folder, read, run};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use work::NoProgress;

const MIB: u64 = FILE_BLOCK;
const ALL: [Provisioning; 3] = [Provisioning::Thin, Provisioning::ZeroedThick, Provisioning::EagerZeroedThick];

fn open(path: &Path, name: &str, mode: IoMode, thin: bool) -> Arc<Flat> {
    let directory = LocalDirectory::open(path, LocalQueues::Threads).unwrap();
    let file = directory.open_foreign(name, mode, Access::ReadWrite).unwrap();
    Flat::open(file, name, FlatOptions { offset: 0, capacity: None, writable: true, thin }).unwrap()
}

fn made(path: &Path, capacity: u64, provisioning: Provisioning) {
    let directory = LocalDirectory::open(path, LocalQueues::Threads).unwrap();
    flat::create_raw(&directory, "disk", capacity, provisioning, IoMode::Direct, &NoProgress).unwrap();
}

fn space(path: &Path) -> u64 {
    std::fs::metadata(path.join("disk")).unwrap().blocks() * 512
}

#[test]
fn each_provisioning_type_allocates_the_expected_space() {
    for provisioning in ALL {
        let folder = folder();
        made(folder.path(), 16 * MIB, provisioning);
        let thick = provisioning != Provisioning::Thin;
        let wanted = if thick { 16 * MIB..17 * MIB } else { 0..MIB };
        assert!(wanted.contains(&space(folder.path())), "{provisioning:?}: {}", space(folder.path()));
        let flat = open(folder.path(), "disk", IoMode::Buffered, !thick);
        let tbz = if provisioning == Provisioning::ZeroedThick { 16 } else { 0 };
        assert_eq!(flat.counters(), Counters { blocks: 16, nb: if thick { 16 } else { 0 }, tbz });
        assert_eq!(flat.provisioning(), provisioning);
        let found = run(folder.path(), "filefrag", &["disk"]);
        let extents: u64 = found.rsplit(": ").next().unwrap().split(' ').next().unwrap().parse().unwrap();
        assert_eq!(flat.fragments().unwrap(), Some(extents), "{found}");
        assert!(read(&*flat, 0, 16 * MIB).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn block_counters_equal_those_of_vmware() {
    for (seed, mode) in [IoMode::Buffered, IoMode::Direct, IoMode::Buffered, IoMode::Direct].into_iter().enumerate() {
        for provisioning in ALL {
            let folder = folder();
            let mut random = Random(seed as u64);
            let capacity = 24 * MIB + 4096;
            made(folder.path(), capacity, provisioning);
            let thin = provisioning == Provisioning::Thin;
            let flat = open(folder.path(), "disk", mode, thin);
            let mut model = vec![0u8; capacity as usize];
            for step in 0..60 {
                let unit = if random.below(3) == 0 { MIB } else { 4096 };
                let start = random.below(capacity / unit) * unit;
                let end = (start + (1 + random.below(40)) * unit.min(128 << 10)).min(capacity);
                let bytes = start as usize..end as usize;
                match random.below(10) {
                    0..6 => {
                        let data = random.bytes(bytes.len());
                        flat.write(start, &[&data]).unwrap();
                        model[bytes].copy_from_slice(&data);
                    }
                    _ => {
                        flat.zero(start..end, random.below(3) == 0).unwrap();
                        model[bytes].fill(0);
                    }
                }
                if step % 10 == 9 {
                    flat.flush().unwrap();
                    let again = open(folder.path(), "disk", mode, thin);
                    assert_eq!(flat.counters(), again.counters(), "seed {seed} {provisioning:?} step {step}");
                }
            }
            assert!(read(&*flat, 0, capacity) == model, "seed {seed} {provisioning:?}");
            assert!(std::fs::read(folder.path().join("disk")).unwrap() == model, "seed {seed} {provisioning:?}");
            flat.fill(&NoProgress).unwrap();
            assert_eq!(flat.counters(), Counters { blocks: 25, nb: 25, tbz: 0 });
            assert_eq!(open(folder.path(), "disk", mode, false).counters(), flat.counters());
            flat.punch_zeros(&NoProgress).unwrap();
            assert_eq!(open(folder.path(), "disk", mode, true).counters(), flat.counters());
            assert!(space(folder.path()) <= flat.counters().nb * MIB + MIB);
            assert!(std::fs::read(folder.path().join("disk")).unwrap() == model, "seed {seed} {provisioning:?}");
        }
    }
}

/// Guests write, zero and flush their own blocks while the disk is filled and punched repeatedly.
#[test]
fn inflating_and_punching_during_writes_change_no_data() {
    const GUESTS: u64 = 4;
    const BLOCKS: u64 = 24 * MIB / 4096;
    for mode in [IoMode::Buffered, IoMode::Direct] {
        let folder = folder();
        made(folder.path(), BLOCKS * 4096, Provisioning::Thin);
        let flat = open(folder.path(), "disk", mode, true);
        let done = AtomicBool::new(false);
        let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let guests: Vec<_> = (0..GUESTS)
                .map(|guest| {
                    let (flat, done) = (&flat, &done);
                    scope.spawn(move || {
                        let mut random = Random(guest);
                        // The last content of each block of this guest: a byte value, or zeros.
                        let mut model = vec![0u8; BLOCKS as usize];
                        while !done.load(Ordering::Relaxed) {
                            let block = random.below(BLOCKS / GUESTS) * GUESTS + guest;
                            let fill = random.next() as u8;
                            match random.below(10) {
                                0..7 => {
                                    flat.write(block * 4096, &[&[fill; 4096]]).unwrap();
                                    model[block as usize] = fill;
                                }
                                7..9 => {
                                    let range = block * 4096..block * 4096 + 4096;
                                    flat.zero(range, fill > 128).unwrap();
                                    model[block as usize] = 0;
                                }
                                _ => {
                                    let found = read(&**flat, block * 4096, 4096);
                                    assert!(found == vec![model[block as usize]; 4096], "block {block}");
                                }
                            }
                        }
                        model
                    })
                })
                .collect();
            for _ in 0..6 {
                flat.fill(&NoProgress).unwrap();
                assert_eq!(flat.counters(), Counters { blocks: 24, nb: 24, tbz: 0 });
                flat.punch_zeros(&NoProgress).unwrap();
                flat.zero(0..0, false).unwrap();
            }
            done.store(true, Ordering::Relaxed);
            guests.into_iter().map(|guest| guest.join().unwrap()).collect()
        });
        flat.flush().unwrap();
        let mut wanted = vec![0u8; (BLOCKS * 4096) as usize];
        for block in 0..BLOCKS as usize {
            wanted[block * 4096..][..4096].fill(models[block % GUESTS as usize][block]);
        }
        assert!(read(&*flat, 0, BLOCKS * 4096) == wanted);
        assert!(std::fs::read(folder.path().join("disk")).unwrap() == wanted);
        assert_eq!(open(folder.path(), "disk", mode, true).counters(), flat.counters());
    }
}

#[test]
fn direct_writes_accept_buffers_of_any_alignment() {
    let folder = folder();
    made(folder.path(), 8 * MIB, Provisioning::Thin);
    let flat = open(folder.path(), "disk", IoMode::Direct, true);
    let mut random = Random(1);
    let data = random.bytes(5 << 20);
    let cuts = [0, 1, 4097, 70_000, (2 << 20) + 3, data.len()];
    let slices: Vec<&[u8]> = cuts.windows(2).map(|cut| &data[cut[0]..cut[1]]).collect();
    flat.write(MIB, &slices).unwrap();
    assert!(read(&*flat, MIB, data.len() as u64) == data);
}
