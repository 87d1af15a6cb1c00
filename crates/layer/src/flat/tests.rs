//! Flat extents on the simulated disk: against a model, through power cuts, with failures, and with guest writes during
//! filling and punching.

use super::*;
use crate::descriptor::tests::Random;
use crate::descriptor::{Adapter, Descriptor, storage};
use crate::proving::{Gated, Request};
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Access, Directory};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use testkit::steps;
use work::NoProgress;

mod meddling;

const MIB: u64 = FILE_BLOCK;

fn disk(seed: u64) -> SimulatedDisk {
    SimulatedDisk::new(seed, SimulatedOptions::default())
}

fn options(thin: bool) -> FlatOptions {
    FlatOptions { offset: 0, capacity: None, writable: true, thin }
}

fn open(directory: &dyn Directory, name: &str, mode: IoMode, options: FlatOptions) -> Result<Arc<Flat>> {
    let access = if options.writable { Access::ReadWrite } else { Access::Read };
    let file = directory.open_foreign(name, mode, access).map_err(|e| Error::io("opening", e))?;
    Flat::open(file, name, options)
}

/// Creates a raw file of this provisioning type.
fn made(directory: &dyn Directory, capacity: u64, provisioning: Provisioning) {
    create_raw(directory, "disk", capacity, provisioning, IoMode::Buffered, &NoProgress).unwrap();
}

/// Reads as a chain does: ranges that the map reports as zeros are not read.
fn read(flat: &Flat, start: u64, length: u64) -> Vec<u8> {
    let mut extents = Vec::new();
    let mut at = start;
    let mut bytes = vec![0u8; length as usize];
    while at < start + length {
        extents.clear();
        flat.map(at..start + length, 3, &mut extents).unwrap();
        for extent in &extents {
            assert!(extent.start == at && extent.length > 0 && at + extent.length <= start + length);
            let (from, to) = ((at - start) as usize, (at + extent.length - start) as usize);
            if let Content::Data { file, offset } = extent.content {
                let block = BLOCK_SIZE as u64;
                let first = offset / block * block;
                let mut memory = Buffer::with_bytes((offset + extent.length - first).next_multiple_of(block) as usize);
                flat.file(file).unwrap().read_at(&mut memory, first).unwrap();
                let skip = (offset - first) as usize;
                bytes[from..to].copy_from_slice(&memory[skip..skip + (to - from)]);
            }
            at += extent.length;
        }
    }
    bytes
}

/// The counters after a new opening.
fn recounted(directory: &dyn Directory, flat: &Flat) -> Counters {
    let options = FlatOptions {
        offset: flat.bytes.start,
        capacity: Some(flat.capacity()),
        writable: false,
        thin: flat.provisioning() == Provisioning::Thin,
    };
    open(directory, "disk", IoMode::Buffered, options).unwrap().counters()
}

fn filled(random: &mut Random, length: usize) -> Vec<u8> {
    if random.percent(15) {
        return vec![0; length];
    }
    let seed = random.next();
    (0..length).map(|at| (seed.rotate_left((at / 512 % 64) as u32) as u8).wrapping_add((at % 251) as u8)).collect()
}

/// A range to change, in grains of `unit`; sometimes whole blocks.
fn range(random: &mut Random, unit: u64, capacity: u64) -> Range<u64> {
    let unit = if random.percent(25) { MIB } else { unit };
    let grains = capacity.div_ceil(unit);
    let start = random.below(grains) * unit;
    let most = if random.percent(20) { 4 * MIB / unit } else { 32 };
    let end = start + (1 + random.below(most)) * unit;
    start..end.min(capacity)
}

#[test]
fn random_histories_match_a_plain_array() {
    for seed in 0..24 {
        let mut random = Random(seed);
        let mode = if seed % 3 == 0 { IoMode::Direct } else { IoMode::Buffered };
        let provisioning = Provisioning::ALL[seed as usize / 2 % 3];
        let world = disk(seed);
        let directory = world.directory();
        let tail = if mode == IoMode::Direct { 8192 } else { 3 * 512 };
        let offset = if seed % 4 == 1 { 5 * 4096 } else { 0 };
        let capacity = 9 * MIB + tail;
        let shared_tail = mode == IoMode::Buffered && seed % 2 == 1;
        made(&*directory, offset + capacity + 512 * u64::from(shared_tail), provisioning);
        let thin = provisioning == Provisioning::Thin;
        let options = FlatOptions { offset, capacity: Some(capacity), writable: true, thin };
        let mut flat = open(&*directory, "disk", mode, options).unwrap();
        let mut model = vec![0u8; capacity as usize];
        assert_eq!(flat.provisioning(), provisioning);
        assert_eq!(flat.counters().nb, if thin { 0 } else { flat.counters().blocks });
        let mut own = provisioning;
        for step in 0..160 {
            let touched = range(&mut random, flat.grain(), capacity);
            let bytes = touched.start as usize..touched.end as usize;
            match random.below(100) {
                0..45 => {
                    let data = filled(&mut random, bytes.len());
                    let cut = random.below(data.len() as u64 + 1) as usize;
                    flat.write(touched.start, &[&data[..cut], &[], &data[cut..]]).unwrap();
                    model[bytes].copy_from_slice(&data);
                }
                45..70 => {
                    flat.zero(touched, random.percent(40)).unwrap();
                    model[bytes].fill(0);
                }
                70..74 => flat.flush().unwrap(),
                74..78 => {
                    flat.flush().unwrap();
                    let thin = flat.provisioning() == Provisioning::Thin;
                    flat = open(&*directory, "disk", mode, FlatOptions { thin, ..options }).unwrap();
                    own = flat.provisioning();
                }
                78..80 => {
                    flat.fill(&NoProgress).unwrap();
                    own = Provisioning::EagerZeroedThick;
                    let counters = flat.counters();
                    assert_eq!((counters.nb, counters.tbz), (counters.blocks, 0));
                }
                80..83 => {
                    let before = flat.counters().nb;
                    let given_back = flat.punch_zeros(&NoProgress).unwrap();
                    own = Provisioning::Thin;
                    let counters = flat.counters();
                    assert_eq!((counters.nb + given_back, counters.tbz), (before, 0));
                    let held = |block: &u64| {
                        let bytes = flat.blocks.bytes_of(*block..block + 1);
                        let own = (bytes.start - offset) as usize..(bytes.end - offset) as usize;
                        model[own].iter().any(|byte| *byte != 0)
                    };
                    let needed = (0..counters.blocks).filter(held).count() as u64;
                    assert!(counters.nb == needed || shared_tail && counters.nb == needed + 1);
                }
                _ => {
                    let found = read(&flat, touched.start, touched.end - touched.start);
                    assert!(found == model[bytes], "seed {seed} step {step}");
                }
            }
            assert_eq!(flat.provisioning(), own, "seed {seed} step {step}");
            if step % 5 == 0 {
                assert_eq!(flat.counters(), recounted(&*directory, &flat), "seed {seed} step {step}");
            }
        }
        assert!(read(&flat, 0, capacity) == model, "seed {seed}");
        flat.close().unwrap();
        assert_eq!(flat.write(0, &[&[0; 4096]]).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

/// The possible contents of each sector after a power cut: the last flushed one, and any written since.
struct History {
    sectors: Vec<Vec<Vec<u8>>>,
}

impl History {
    fn new(capacity: u64) -> Self {
        Self { sectors: vec![vec![vec![0; 512]]; (capacity / 512) as usize] }
    }

    fn write(&mut self, start: u64, bytes: &[u8]) {
        for (index, sector) in bytes.chunks(512).enumerate() {
            self.sectors[(start / 512) as usize + index].push(sector.to_vec());
        }
    }

    fn flushed(&mut self) {
        for sector in &mut self.sectors {
            sector.drain(..sector.len() - 1);
        }
    }

    fn check(&self, found: &[u8], what: &str) {
        for (index, (sector, allowed)) in found.chunks(512).zip(&self.sectors).enumerate() {
            assert!(
                allowed.iter().any(|old| old == sector),
                "{what}: sector {index} has content that was never written"
            );
        }
    }
}

#[test]
fn flushed_data_survives_power_cuts_in_every_operation() {
    let mut cuts = 0;
    for seed in 0..300u64 {
        let mut random = Random(seed);
        let world = disk(seed);
        let directory = world.directory();
        let provisioning = Provisioning::ALL[(seed % 3) as usize];
        let capacity = 4 * MIB + 4096;
        made(&*directory, capacity, provisioning);
        let flat = open(&*directory, "disk", IoMode::Buffered, options(seed % 3 == 0)).unwrap();
        let mut history = History::new(capacity);
        world.cut_after(world.operations() + random.below(60));
        for _ in 0..80 {
            let touched = range(&mut random, 512, capacity);
            let outcome = match random.below(12) {
                0..6 => {
                    let data = filled(&mut random, (touched.end - touched.start) as usize);
                    history.write(touched.start, &data);
                    flat.write(touched.start, &[&data])
                }
                6..8 => {
                    history.write(touched.start, &vec![0; (touched.end - touched.start) as usize]);
                    flat.zero(touched, random.percent(50))
                }
                8 => flat.fill(&NoProgress).map(|()| history.flushed()),
                9 => flat.punch_zeros(&NoProgress).map(|_| history.flushed()),
                _ => flat.flush().map(|()| history.flushed()),
            };
            if outcome.is_err() {
                break;
            }
        }
        cuts += u32::from(world.is_off());
        for outcome in 0..3 {
            let after = world.crash();
            let flat = open(&*after.directory(), "disk", IoMode::Buffered, options(seed % 3 == 0)).unwrap();
            history.check(&read(&flat, 0, capacity), &format!("seed {seed} outcome {outcome}"));
            assert_eq!(flat.counters(), recounted(&*after.directory(), &flat));
            flat.fill(&NoProgress).unwrap();
        }
    }
    assert!(cuts > 200, "only {cuts} power cuts");
}

#[test]
fn a_crash_during_creation_leaves_a_complete_disk_or_none() {
    let kinds = [NewKind::Vmfs, NewKind::MonolithicFlat, NewKind::TwoGbMaxExtentFlat];
    let mut outcomes = [0, 0];
    for seed in 0..36u64 {
        for cut in 0..40 {
            let world = disk(seed * 100 + cut);
            let mut random = Random(seed);
            let new = NewDisk {
                name: "web.vmdk",
                capacity: if seed % 3 == 2 { (5 << 30) + 512 } else { 3 * MIB },
                kind: kinds[(seed % 3) as usize],
                provisioning: if seed % 3 == 2 {
                    Provisioning::Thin
                } else {
                    Provisioning::ALL[(seed / 3 % 3) as usize]
                },
                adapter: Adapter::LsiLogic,
                mode: IoMode::Buffered,
            };
            world.cut_after(cut);
            let finished = create(&*world.directory(), &new, &mut || random.next(), &NoProgress).is_ok();
            let after = world.crash();
            let directory = after.directory();
            storage::sweep(&*directory).unwrap();
            let names = directory.list().unwrap();
            outcomes[usize::from(names.is_empty())] += 1;
            assert!(!finished || !names.is_empty(), "seed {seed} cut {cut}: the disk was created and is missing");
            if !names.is_empty() {
                let file = directory.open("web.vmdk", IoMode::Buffered).unwrap();
                let descriptor = storage::load(&*file, "web.vmdk").unwrap();
                assert_eq!(descriptor.capacity(), new.capacity);
                assert_eq!(names.len(), 1 + descriptor.extents.len(), "{names:?}");
                for extent in &descriptor.extents {
                    let thin = descriptor.thin();
                    let options = FlatOptions { offset: 0, capacity: Some(extent.length()), writable: true, thin };
                    let flat = open(&*directory, extent.file.as_ref().unwrap(), IoMode::Buffered, options).unwrap();
                    assert_eq!(flat.provisioning(), new.provisioning);
                }
            }
            if finished {
                break;
            }
        }
    }
    assert!(outcomes[0] > 30 && outcomes[1] > 100, "{outcomes:?}");
}

#[test]
fn a_failed_or_interrupted_creation_leaves_no_files() {
    let new = |provisioning| NewDisk {
        name: "web.vmdk",
        capacity: 8 * MIB,
        kind: NewKind::Vmfs,
        provisioning,
        adapter: Adapter::Ide,
        mode: IoMode::Direct,
    };
    let world = SimulatedDisk::new(1, SimulatedOptions { capacity: 4 * MIB, ..SimulatedOptions::default() });
    let directory = world.directory();
    let mut random = Random(1);
    let error = create(&*directory, &new(Provisioning::ZeroedThick), &mut || random.next(), &NoProgress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(directory.list().unwrap().is_empty());
    let error = create_raw(&*directory, "raw", 8 * MIB, Provisioning::EagerZeroedThick, IoMode::Direct, &NoProgress);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(directory.list().unwrap().is_empty());
    world.set_capacity(64 * MIB);
    let stop = steps(|done, total| {
        assert_eq!(total, 8 * MIB);
        done < 3 * MIB
    });
    let error = create(&*directory, &new(Provisioning::EagerZeroedThick), &mut || random.next(), &stop);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Interrupted);
    assert!(directory.list().unwrap().is_empty());
    for number in 0..9 {
        world.fail_operation(world.operations() + number);
        if create(&*directory, &new(Provisioning::Thin), &mut || random.next(), &NoProgress).is_err() {
            storage::sweep(&*directory).unwrap();
            let names = directory.list().unwrap();
            // If only the last flush has failed, the disk is complete.
            assert!(names.is_empty() || names.len() == 2, "{number}: {names:?}");
        }
        for name in directory.list().unwrap() {
            directory.remove(&name).unwrap();
        }
    }
    for (name, capacity) in [("web", 512), ("web.vmdk", 0), ("web.vmdk", 511), ("web.vmdk", CAPACITY_MAX + 512)] {
        let disk = NewDisk { name, capacity, ..new(Provisioning::Thin) };
        let error = create(&*directory, &disk, &mut || 1, &NoProgress).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn file_names_and_descriptors_are_those_of_vmware_products() {
    let text = |kind, capacity| {
        let disk = NewDisk {
            name: "web.vmdk",
            capacity,
            kind,
            provisioning: Provisioning::Thin,
            adapter: Adapter::LsiLogic,
            mode: IoMode::Buffered,
        };
        String::from_utf8(disk.descriptor(&mut || 7).unwrap().to_bytes().unwrap()).unwrap()
    };
    let vmfs = text(NewKind::Vmfs, 40 << 30);
    assert!(vmfs.contains("createType=\"vmfs\"") && vmfs.contains("\nRW 83886080 VMFS \"web-flat.vmdk\"\n"), "{vmfs}");
    assert!(vmfs.contains("\nddb.thinProvisioned = \"1\"\n"));
    let flat = text(NewKind::MonolithicFlat, 1 << 30);
    assert!(flat.contains("createType=\"monolithicFlat\"") && flat.contains("\nRW 2097152 FLAT \"web-flat.vmdk\" 0\n"));
    let split = text(NewKind::TwoGbMaxExtentFlat, 5 << 30);
    assert!(split.contains(
        "\nRW 4192256 FLAT \"web-f001.vmdk\" 0\nRW 4192256 FLAT \"web-f002.vmdk\" 0\nRW 2101248 FLAT \"web-f003.vmdk\" 0\n"
    ));
    assert_eq!(Descriptor::parse(split.as_bytes()).unwrap().capacity(), 5 << 30);
}

#[test]
fn an_extent_beyond_the_file_is_refused() {
    let world = disk(1);
    let directory = world.directory();
    made(&*directory, 4 * MIB, Provisioning::Thin);
    let with = |offset, capacity, mode| {
        open(&*directory, "disk", mode, FlatOptions { offset, capacity, writable: false, thin: true })
    };
    let kind = |outcome: Result<Arc<Flat>>| outcome.err().unwrap().kind();
    assert_eq!(kind(with(0, Some(4 * MIB + 512), IoMode::Buffered)), ErrorKind::Corrupt);
    assert_eq!(kind(with(512, Some(4 * MIB), IoMode::Buffered)), ErrorKind::Corrupt);
    assert_eq!(kind(with(u64::MAX - 511, Some(1024), IoMode::Buffered)), ErrorKind::Corrupt);
    assert_eq!(kind(with(8 * MIB, None, IoMode::Buffered)), ErrorKind::Corrupt);
    assert_eq!(kind(with(0, Some(0), IoMode::Buffered)), ErrorKind::Corrupt);
    assert_eq!(kind(with(0, Some(u64::MAX), IoMode::Buffered)), ErrorKind::Corrupt);
    assert_eq!(kind(with(512, Some(MIB), IoMode::Direct)), ErrorKind::Invalid);
    assert_eq!(kind(with(4096, Some(512), IoMode::Direct)), ErrorKind::Invalid);
    let flat = with(512, Some(MIB), IoMode::Buffered).unwrap();
    assert_eq!((flat.capacity(), flat.counters().blocks), (MIB, 2));
    assert_eq!(flat.write(0, &[&[1; 512]]).unwrap_err().kind(), ErrorKind::ReadOnly);
    assert_eq!(flat.fill(&NoProgress).unwrap_err().kind(), ErrorKind::ReadOnly);
    assert!(flat.map(0..MIB + 512, 9, &mut Vec::new()).is_err());
    assert!(flat.map(u64::MAX - 1..u64::MAX, 9, &mut Vec::new()).is_err());
    let flat = open(&*directory, "disk", IoMode::Buffered, options(true)).unwrap();
    for (start, length) in [(1, 512), (512, 511), (4 * MIB, 512), (u64::MAX - 511, 512)] {
        assert_eq!(flat.write(start, &[&vec![1; length]]).unwrap_err().kind(), ErrorKind::Invalid);
        assert!(flat.zero(start..start.wrapping_add(length as u64), false).is_err());
    }
    assert_eq!(flat.usage().unwrap(), Usage::default());
    // A raw file that ends within a sector includes that whole sector.
    let file = directory.create("odd", IoMode::Buffered).unwrap();
    file.write_at(&[&[7; 700]], 0, false).unwrap();
    let flat = open(&*directory, "odd", IoMode::Buffered, options(true)).unwrap();
    assert_eq!(flat.capacity(), 1024);
    assert_eq!(read(&flat, 0, 1024), [vec![7; 700], vec![0; 324]].concat());
}

#[test]
fn after_a_failed_flush_changes_are_refused() {
    let world = disk(1);
    let directory = world.directory();
    made(&*directory, 4 * MIB, Provisioning::Thin);
    let flat = open(&*directory, "disk", IoMode::Buffered, options(true)).unwrap();
    flat.write(0, &[&[1; 4096]]).unwrap();
    world.fail_syncs(1);
    assert_eq!(flat.flush().unwrap_err().kind(), ErrorKind::Io);
    for outcome in
        [flat.flush(), flat.write(0, &[&[1; 512]]), flat.zero(0..512, false), flat.fill(&NoProgress), flat.close()]
    {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Stopped);
    }
    drop(flat);
    open(&*directory, "disk", IoMode::Buffered, options(true)).unwrap().flush().unwrap();
}

#[test]
fn a_flush_succeeds_after_the_image_was_closed() {
    let world = disk(1);
    let directory = world.directory();
    made(&*directory, 4 * MIB, Provisioning::Thin);
    let flat = open(&*directory, "disk", IoMode::Buffered, options(true)).unwrap();
    flat.write(0, &[&[1; 4096]]).unwrap();
    flat.close().unwrap();
    flat.flush().unwrap();
    assert!(!flat.has_stopped());
    assert_eq!(flat.write(0, &[&[2; 4096]]).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn a_failed_write_leaves_the_counters_correct() {
    for seed in 0..40 {
        let world = disk(seed);
        let directory = world.directory();
        made(&*directory, 8 * MIB, if seed % 2 == 0 { Provisioning::Thin } else { Provisioning::ZeroedThick });
        let flat = open(&*directory, "disk", IoMode::Buffered, options(seed % 2 == 0)).unwrap();
        flat.write(MIB, &[&[1; 4096]]).unwrap();
        world.fail_operation(world.operations());
        assert_eq!(flat.write(0, &[&vec![2; 4 << 20]]).unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(flat.counters(), recounted(&*directory, &flat), "seed {seed}");
        let mut straight = vec![0; 4 << 20];
        flat.file(0).unwrap().read_at(&mut straight, 0).unwrap();
        assert!(read(&flat, 0, 4 * MIB) == straight, "seed {seed}: the map lacks written data");
    }
}

#[test]
fn filling_without_space_changes_nothing() {
    let world = SimulatedDisk::new(1, SimulatedOptions { capacity: 6 * MIB, ..SimulatedOptions::default() });
    let directory = world.directory();
    made(&*directory, 8 * MIB, Provisioning::Thin);
    let flat = open(&*directory, "disk", IoMode::Buffered, options(true)).unwrap();
    flat.write(3 * MIB, &[&[9; 4096]]).unwrap();
    let before = flat.counters();
    assert_eq!(flat.fill(&NoProgress).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!((flat.counters(), flat.provisioning()), (before, Provisioning::Thin));
    assert_eq!(recounted(&*directory, &flat), before);
    world.set_capacity(16 * MIB);
    // If filling is cancelled, the extent stays thin with more space, and the next call continues at that point.
    let mut calls = 0;
    let stop = steps(|_, _| {
        calls += 1;
        calls <= 5
    });
    assert_eq!(flat.fill(&stop).unwrap_err().kind(), ErrorKind::Interrupted);
    assert_eq!(flat.provisioning(), Provisioning::Thin);
    assert_eq!(flat.counters(), Counters { blocks: 8, nb: 8, tbz: 3 });
    assert_eq!(flat.counters(), recounted(&*directory, &flat));
    let before = world.operations();
    flat.fill(&NoProgress).unwrap();
    assert_eq!(world.operations() - before, 1 + 3 + 1, "a reservation, three blocks, a flush");
    assert_eq!(flat.counters(), Counters { blocks: 8, nb: 8, tbz: 0 });
    assert_eq!(flat.provisioning(), Provisioning::EagerZeroedThick);
    let stop = steps(|done, _| done < 4 * MIB);
    assert_eq!(flat.punch_zeros(&stop).unwrap_err().kind(), ErrorKind::Interrupted);
    assert_eq!(flat.counters(), Counters { blocks: 8, nb: 5, tbz: 0 });
    assert_eq!(flat.punch_zeros(&NoProgress).unwrap(), 4);
    assert_eq!(flat.counters(), Counters { blocks: 8, nb: 1, tbz: 0 });
}

#[test]
fn filling_and_punching_exclude_each_other() {
    let world = disk(1);
    let directory = world.directory();
    made(&*directory, 4 * MIB, Provisioning::Thin);
    let flat = open(&*directory, "disk", IoMode::Buffered, options(true)).unwrap();
    let mut busy = None;
    let watch = steps(|_, _| {
        busy.get_or_insert_with(|| flat.punch_zeros(&NoProgress).unwrap_err().kind());
        true
    });
    flat.fill(&watch).unwrap();
    assert_eq!(busy, Some(ErrorKind::Busy));
}

#[test]
fn discards_of_holes_cost_no_io() {
    let world = disk(1);
    let directory = world.directory();
    let capacity = 1 << 40;
    made(&*directory, capacity, Provisioning::Thin);
    let flat = open(&*directory, "disk", IoMode::Buffered, options(true)).unwrap();
    flat.write(700 * MIB, &[&[1; 4096]]).unwrap();
    let before = world.operations();
    flat.zero(0..capacity, false).unwrap();
    assert_eq!(world.operations() - before, 1);
    assert_eq!(flat.counters().nb, 0);
    let mut extents = Vec::new();
    flat.map(0..capacity, 100, &mut extents).unwrap();
    assert_eq!(extents, [Extent { start: 0, length: capacity, content: Content::Zero }]);
}

/// Filling flushes the file beside the flushes of clients. The first of two concurrent flushes gets the report of lost
/// writes.
#[test]
fn a_flush_beside_one_that_fails_does_not_succeed() {
    let disk = disk(21);
    let directory = disk.directory();
    made(directory.as_ref(), MIB, Provisioning::Thin);
    let flags: [Arc<AtomicBool>; 2] = Default::default();
    let [first, second] = flags.clone();
    let gate = move |request| match request {
        Request::Sync if !first.swap(true, Ordering::SeqCst) => {
            let begun = Instant::now();
            while !second.load(Ordering::SeqCst) && begun.elapsed() < Duration::from_millis(200) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(std::io::Error::other("the device fails"))
        }
        Request::Sync => {
            second.store(true, Ordering::SeqCst);
            Ok(())
        }
        _ => Ok(()),
    };
    let inner = directory.open_foreign("disk", IoMode::Buffered, Access::ReadWrite).unwrap();
    let flat = Flat::open(Arc::new(Gated { inner, gate }), "disk", options(true)).unwrap();
    flat.write(0, &[&[1; 512]]).unwrap();
    std::thread::scope(|scope| {
        let failed = scope.spawn(|| flat.flush());
        while !flags[0].load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        assert_eq!(flat.flush().unwrap_err().kind(), ErrorKind::Stopped);
        assert_eq!(failed.join().unwrap().unwrap_err().kind(), ErrorKind::Io);
    });
}
