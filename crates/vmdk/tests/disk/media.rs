//! Storage that fails: reads, writes, flushes and reservations fail once, for a time or for ever, under disks of every
//! format. Each sector must read as acknowledged, or not at all. After a restart it has the flushed content, or newer.
//! After a kill or a failed close, the page cache is kept, and content that a new process has read must not change
//! later.

use crate::world::{DELTAS, OTHER_BASES, Random, Sub, options};
use backend::simulated::{Fault, Request, SimulatedDisk, SimulatedOptions};
use layer::descriptor::Adapter;
use layer::image::{Folder, ImageKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use testkit::environment::number;
use vmdk::{DeltaFormat, Disk, NewDisk, NewSnapshot, Options};
use work::NoProgress;

const SECTOR: u64 = 512;
const CAPACITY: u64 = 24 << 20;
/// The number of places that are written, each of four blocks. They are so far apart that each has its own tables, and
/// its own part in the notes of unflushed ranges.
const PLACES: u64 = 64;
const PLACE_SECTORS: u64 = 32;
const SECTORS: u64 = PLACES * PLACE_SECTORS;
/// Sectors of an extent of a split disk: one of four.
const PIECE_SECTORS: u64 = CAPACITY / SECTOR / 4;

/// The values that a sector may have.
#[derive(Clone)]
struct Sector {
    /// The values now: the last value, and also the values of later writes that failed.
    now: Vec<u8>,
    /// The values after a restart.
    later: Vec<u8>,
}

fn add(values: &mut Vec<u8>, value: u8) {
    if !values.contains(&value) {
        values.push(value);
    }
}

struct World {
    machine: SimulatedDisk,
    disk: Arc<Disk>,
    random: Random,
    sectors: Vec<Sector>,
    /// Whether a fault was requested, so that errors are permitted.
    faulty: bool,
    what: String,
}

fn place(sector: u64) -> u64 {
    sector / PLACE_SECTORS * (CAPACITY / PLACES) + sector % PLACE_SECTORS * SECTOR
}

impl World {
    fn new(seed: u64, kind: ImageKind, delta: DeltaFormat) -> Self {
        let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
        let new =
            NewDisk { name: "vm".into(), capacity: CAPACITY, kind, delta: Some(delta), adapter: Adapter::LsiLogic };
        let options = Options { piece: Some(PIECE_SECTORS), ..options(seed) };
        let disk = Disk::create(Folder::plain(machine.directory()), &new, &options, &NoProgress).unwrap();
        let what = format!("seed {seed}, {kind:?}, {delta:?}");
        let sector = Sector { now: vec![0], later: vec![0] };
        let random = Random::new(seed);
        let mut world = Self { machine, disk, random, sectors: vec![sector; SECTORS as usize], faulty: false, what };
        world.steps(40);
        world.flush();
        if world.random.percent(70) {
            world.disk.snapshot(&NewSnapshot::named("s")).unwrap();
        }
        world.steps(40);
        world
    }

    fn range(&mut self) -> (u64, u64) {
        let first = self.random.below(SECTORS);
        let unit = *self.random.pick(&[1, 8]);
        let first = first / unit * unit;
        let most = (PLACE_SECTORS - first % PLACE_SECTORS) / unit;
        (first, unit * (1 + self.random.below(most)))
    }

    fn write(&mut self) {
        let (first, count) = self.range();
        let value = if self.random.percent(75) { 1 + self.random.below(255) as u8 } else { 0 };
        let chain = self.disk.chain().unwrap();
        let done = match value {
            0 => chain.zero(place(first), count * SECTOR, self.random.percent(50)),
            _ => chain.write(place(first), &vec![value; (count * SECTOR) as usize]),
        };
        if let Err(error) = &done {
            assert!(self.faulty, "{}: {error}", self.what);
        }
        for sector in &mut self.sectors[first as usize..(first + count) as usize] {
            if done.is_ok() {
                sector.now.clear();
            }
            add(&mut sector.now, value);
            add(&mut sector.later, value);
        }
    }

    fn flush(&mut self) {
        match self.disk.chain().unwrap().flush() {
            Ok(()) => self.sectors.iter_mut().for_each(|sector| sector.later = sector.now.clone()),
            Err(error) => assert!(self.faulty, "{}: {error}", self.what),
        }
    }

    fn steps(&mut self, count: u64) {
        for _ in 0..count {
            match self.random.below(100) {
                0..80 => self.write(),
                80..88 => self.flush(),
                _ => {
                    let sector = self.random.below(SECTORS);
                    self.check(sector, 1);
                }
            }
        }
    }

    /// Reads sectors and checks their values; returns how many could not be read.
    fn check(&mut self, first: u64, count: u64) -> u64 {
        let chain = self.disk.chain().unwrap();
        let mut failed = 0;
        for sector in first..first + count {
            let mut bytes = [0xee; SECTOR as usize];
            match chain.read(place(sector), &mut bytes) {
                Ok(()) => {
                    let allowed = &self.sectors[sector as usize].now;
                    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{}: sector {sector} is torn", self.what);
                    assert!(
                        allowed.contains(&bytes[0]),
                        "{}: {} at sector {sector}, not {allowed:?}",
                        self.what,
                        bytes[0]
                    );
                }
                Err(error) => {
                    assert!(self.faulty, "{}: {error}", self.what);
                    failed += 1;
                }
            }
        }
        failed
    }

    /// Requests a random fault in the next operations.
    fn fail(&mut self) {
        self.faulty = true;
        let soon = self.random.below(60);
        let times = *self.random.pick(&[1, 2, 5, 1 << 40]);
        match self.random.below(4) {
            3 => self.machine.fail_requests(*self.random.pick(&Fault::ALL), soon, times),
            0 => self.machine.fail_reads_after(soon, times),
            1 => self.machine.fail_syncs(times.min(1000) as u32),
            _ => (0..times.min(1000)).for_each(|i| self.machine.fail_operation(self.machine.operations() + soon + i)),
        }
    }

    /// Ends the faults, and reopens the disk in the same process. Content that is read then must not change later.
    fn reopen(&mut self) {
        self.machine.mend();
        self.faulty = false;
        let lost = self.disk.reopen().unwrap_or_else(|error| panic!("{}: {error}", self.what));
        assert_eq!(self.disk.stopped(), None);
        let chain = self.disk.chain().unwrap();
        for number in 0..SECTORS {
            let mut bytes = [0xee; SECTOR as usize];
            chain.read(place(number), &mut bytes).unwrap_or_else(|error| panic!("{}: {error}", self.what));
            let sector = &mut self.sectors[number as usize];
            assert!(sector.later.contains(&bytes[0]), "{}: {} at sector {number}", self.what, bytes[0]);
            let kept = sector.now.contains(&bytes[0]);
            assert!(lost || kept, "{}: sector {number} has lost a write without an error", self.what);
            *sector = Sector { now: vec![bytes[0]], later: vec![bytes[0]] };
        }
    }

    /// Ends the faults, cuts the power, and opens the disk again.
    fn restart(self) -> Self {
        let Self { machine, disk, random, mut sectors, what, .. } = self;
        drop(disk);
        let machine = machine.crash();
        let disk = Disk::open(Folder::plain(machine.directory()), &options(2));
        let disk = disk.unwrap_or_else(|error| panic!("{what}: {error}"));
        for sector in &mut sectors {
            sector.now.clone_from(&sector.later);
        }
        Self { machine, disk, random, sectors, faulty: false, what }
    }
}

impl World {
    /// Ends the faults, and opens the disk as another process would, after a kill or after a close that may have
    /// failed. The page cache is kept. Content that the new process has read must not change afterwards.
    fn exchange_process(self, closes: bool) -> Self {
        let Self { machine, disk, random, mut sectors, what, .. } = self;
        machine.mend();
        if closes {
            let _ = disk.close();
        }
        drop(disk);
        let disk = Disk::open(Folder::plain(machine.directory()), &options(3));
        let disk = disk.unwrap_or_else(|error| panic!("{what}: {error}"));
        let chain = disk.chain().unwrap_or_else(|error| panic!("{what}: {error}"));
        for (number, sector) in (0..).zip(&mut sectors) {
            let mut bytes = [0xee; SECTOR as usize];
            chain.read(place(number), &mut bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(sector.later.contains(&bytes[0]), "{what}: {} at sector {number}", bytes[0]);
            *sector = Sector { now: vec![bytes[0]], later: vec![bytes[0]] };
        }
        // A client that relies on content that it has read makes a flush first.
        chain.flush().unwrap_or_else(|error| panic!("{what}: {error}"));
        Self { machine, disk, random, sectors, faulty: false, what }
    }
}

/// After a failed flush the page cache may contain data that was never written to the device. Another process reads the
/// content of the device, and later reads return the same content.
#[test]
fn data_read_by_another_process_after_a_failed_flush_does_not_change() {
    let kinds = [ImageKind::Thin, ImageKind::ZeroedThick, ImageKind::MonolithicSparse];
    let kinds = [&kinds[..], &OTHER_BASES].concat();
    let mut stopped = 0;
    for seed in 0..84 {
        let mut world = World::new(seed, kinds[seed as usize / 3 % kinds.len()], DELTAS[(seed % 3) as usize]);
        world.faulty = true;
        match seed % 4 {
            0 => world.fail(),
            _ => world.machine.fail_syncs(1),
        }
        world.steps(30);
        stopped += u64::from(world.disk.stopped().is_some());
        let mut world = world.exchange_process(seed / 9 % 2 == 0);
        if seed % 5 > 0 {
            world.steps(20);
            world.flush();
            world.check(0, SECTORS);
        }
        let mut world = world.restart();
        assert_eq!(world.check(0, SECTORS), 0);
    }
    assert!(stopped > 42, "{stopped}");
}

/// A disk that was closed without a failure is opened without a flush; otherwise its files are flushed first.
#[test]
fn files_of_a_disk_are_flushed_at_opening_unless_it_was_closed() {
    const MARK: &str = "lamina.closed";
    let marked = |machine: &SimulatedDisk| machine.directory().list().unwrap().contains(&MARK.to_owned());
    let open = |machine: &SimulatedDisk| Disk::open(Folder::plain(machine.directory()), &options(2));
    for seed in 0..3 {
        let (machine, disk) = small(seed);
        assert!(!marked(&machine));
        disk.close().unwrap();
        drop(disk);
        assert!(marked(&machine), "seed {seed}");
        machine.fail_syncs(1);
        let disk = open(&machine).unwrap();
        assert!(!marked(&machine) && disk.stopped().is_none());
        // The requested failure of a flush is still to come.
        let chain = disk.chain().unwrap();
        chain.write(0, &[2; 4096]).unwrap_err();
        chain.write(0, &[2; 4096]).unwrap();
        machine.fail_syncs(1);
        chain.flush().unwrap_err();
        drop(chain);
        disk.close().unwrap();
        drop(disk);
        assert!(!marked(&machine), "seed {seed}: a disk that has stopped");
        // The device still fails: the disk is stopped before anything is read, and can be reopened later.
        machine.fail_requests(Fault::Sync, 2, 2);
        let disk = open(&machine).unwrap();
        let why = disk.stopped().unwrap_or_else(|| panic!("seed {seed}"));
        assert!(why.contains("still cannot be flushed"), "{why}");
        assert!(disk.chain().is_err());
        machine.mend();
        disk.reopen().unwrap();
        disk.chain().unwrap().write(0, &[3; 4096]).unwrap();
        disk.close().unwrap();
        drop(disk);
        assert!(marked(&machine));
        // The process is killed.
        drop(open(&machine).unwrap());
        assert!(!marked(&machine));
    }
}

/// If any flush in an operation fails, the disk gets no mark of a clean close.
#[test]
fn the_files_of_a_disk_are_flushed_at_opening_after_a_failed_operation() {
    let (mut trusted, mut failed) = (0, 0);
    for seed in 0..3 {
        for (step, by) in (0..60).flat_map(|step| [(step, 0), (step, 1), (step, 2)]) {
            let (machine, disk) = small(seed);
            disk.snapshot(&NewSnapshot::named("a")).unwrap();
            disk.chain().unwrap().write(0, &[2; 4096]).unwrap();
            disk.chain().unwrap().flush().unwrap();
            machine.fail_requests(Fault::Sync, step, 1);
            let done = match by {
                0 => disk.snapshot(&NewSnapshot::named("b")).map(drop),
                1 => disk.delete_snapshot("a", None, &NoProgress),
                _ => disk.revert("a"),
            };
            let came = done.is_err();
            machine.mend();
            let _ = disk.close();
            let marked = machine.directory().list().unwrap().contains(&"lamina.closed".to_owned());
            assert!(!(came && marked), "seed {seed}, flush {step}, operation {by}: {done:?}");
            failed += u64::from(came);
            trusted += u64::from(marked);
        }
    }
    assert!(trusted > 30 && failed > 30, "{trusted} {failed}");
}

/// Runs one case; returns how many sectors could not be read, and whether the disk stopped.
fn case(seed: u64, kind: ImageKind, delta: DeltaFormat) -> (u64, bool) {
    let mut world = World::new(seed, kind, delta);
    let mut failed = 0;
    for _ in 0..2 {
        world.fail();
        world.steps(60);
        failed += world.check(0, SECTORS);
    }
    let stopped = world.disk.chain().unwrap().flush().is_err();
    assert_eq!(world.disk.stopped().is_some(), stopped, "{}", world.what);
    if stopped && !seed.is_multiple_of(4) {
        world.reopen();
        // Some seeds make further writes after the disk was reopened.
        if seed % 4 > 1 {
            world.steps(40);
            world.flush();
            world.check(0, SECTORS);
        }
    }
    let mut world = world.restart();
    // A torn write leaves the old or the new value. After this read the model has the value that was found.
    assert_eq!(world.check(0, SECTORS), 0);
    world.steps(40);
    world.flush();
    world.check(0, SECTORS);
    (failed, stopped)
}

/// A disk with one written and flushed block, and its storage.
fn small(seed: u64) -> (SimulatedDisk, Arc<Disk>) {
    let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
    let disk = small_in(Folder::plain(machine.directory()), seed);
    (machine, disk)
}

fn small_in(home: Folder, seed: u64) -> Arc<Disk> {
    let new = NewDisk {
        name: "vm".into(),
        capacity: CAPACITY,
        kind: ImageKind::Thin,
        delta: Some(DELTAS[(seed % 3) as usize]),
        adapter: Adapter::LsiLogic,
    };
    let disk = Disk::create(home, &new, &options(seed), &NoProgress).unwrap();
    let chain = disk.chain().unwrap();
    chain.write(0, &[1; 4096]).unwrap();
    chain.flush().unwrap();
    disk
}

/// Takes snapshots with a failing operation until the disk has stopped. Returns false if none stops it.
fn stops_in_a_snapshot(machine: &SimulatedDisk, disk: &Disk) -> bool {
    (0..200).any(|step| {
        machine.fail_operation(machine.operations() + step);
        let _ = disk.snapshot(&NewSnapshot::named(format!("s{step}")));
        machine.mend();
        disk.stopped().is_some()
    })
}

/// The new chain has nothing to flush, so the attempt that succeeds reports the loss, even if earlier attempts failed.
#[test]
fn reopening_reports_whether_writes_may_be_lost() {
    for seed in 0..3 {
        let (machine, disk) = small(seed);
        disk.chain().unwrap().write(8192, &[2; 4096]).unwrap();
        machine.fail_syncs(1000);
        disk.chain().unwrap().flush().unwrap_err();
        for _ in 0..2 {
            disk.reopen().unwrap_err();
            assert!(disk.stopped().is_some());
        }
        machine.mend();
        assert!(disk.reopen().unwrap(), "seed {seed}");
        // The loss is reported once: at the next failure there are no unflushed writes.
        disk.chain().unwrap().write(16384, &[3; 4096]).unwrap();
        disk.chain().unwrap().flush().unwrap();
        assert!(stops_in_a_snapshot(&machine, &disk), "seed {seed}");
        assert!(!disk.reopen().unwrap(), "seed {seed}");
    }
}

/// After a replacement of the record that failed in its last step, a power cut may restore the old record, unless the
/// new one was made durable.
#[test]
fn the_record_that_a_reopening_found_is_kept() {
    let mut stopped = 0;
    for seed in 0..6 {
        for step in 0..60 {
            let (machine, disk) = small(seed);
            machine.fail_operation(machine.operations() + step);
            let _ = match seed {
                0..3 => disk.snapshot(&NewSnapshot::named("s")).map(drop),
                _ => disk.rename("other"),
            };
            machine.mend();
            if disk.stopped().is_none() {
                continue;
            }
            stopped += 1;
            disk.reopen().unwrap();
            let record = disk.record();
            for _ in 0..4 {
                let after = Disk::open(Folder::plain(machine.crash().directory()), &options(2)).unwrap().record();
                let [before, after] = [&record, &after].map(|record| (&record.name, record.head, &record.snapshots));
                assert_eq!(before, after, "seed {seed}, operation {step}");
            }
        }
    }
    assert!(stopped > 6, "{stopped}");
}

/// The opening fails while changes of names in the folder of the record, or of an image, cannot be made durable.
#[test]
fn reopening_fails_until_the_folders_can_be_flushed() {
    let (machine, disk) = small(0);
    machine.fail_syncs(1);
    disk.chain().unwrap().write(0, &[2; 4096]).unwrap();
    disk.chain().unwrap().flush().unwrap_err();
    for (operation, of) in ["lamina.disk", "vm.vmdk"].into_iter().enumerate() {
        machine.fail_operation(machine.operations() + operation as u64);
        let error = disk.reopen().unwrap_err().to_string();
        assert!(error.contains(&format!("the folder of '{of}' still cannot be flushed")), "{error}");
        assert!(disk.stopped().is_some());
    }
    disk.reopen().unwrap();
}

/// Only the head has to be writable, because only the head is written.
#[test]
fn a_disk_above_read_only_images_is_reopened() {
    for (seed, delta) in [(0, "vm-000001-delta.vmdk"), (1, "vm-000001-sesparse.vmdk"), (2, "vm-000001-vsan.vmdk")] {
        let machine = SimulatedDisk::new(seed, SimulatedOptions::default());
        let directory = machine.directory();
        small_in(Sub::folder(&directory, "d"), seed).snapshot(&NewSnapshot::named("s")).unwrap();
        let open =
            |read_only: &[&str]| Disk::open(Sub::folder_with(&directory, "d", read_only), &options(seed)).unwrap();
        let disk = open(&["vm.vmdk", "vm-flat.vmdk"]);
        disk.chain().unwrap().write(0, &[2; 4096]).unwrap();
        machine.fail_syncs(1);
        disk.chain().unwrap().flush().unwrap_err();
        disk.reopen().unwrap();
        disk.chain().unwrap().write(0, &[3; 4096]).unwrap();
        disk.chain().unwrap().flush().unwrap();
        drop(disk);
        assert!(open(&[delta]).chain().is_err());
    }
}

/// A full thin pool below the file system: acknowledged writes are lost, and waiting for space does not help.
#[test]
fn a_flush_without_space_stops_the_disk() {
    let kinds = [ImageKind::Thin, ImageKind::MonolithicSparse, ImageKind::SeSparse];
    let kinds = [&kinds[..], &OTHER_BASES].concat();
    for seed in 0..42 {
        let mut world = World::new(seed, kinds[seed as usize / 3 % kinds.len()], DELTAS[(seed % 3) as usize]);
        world.steps(20);
        world.write();
        world.faulty = true;
        world.machine.fail_syncs_for_room(1);
        world.flush();
        assert!(world.disk.stopped().is_some(), "{}", world.what);
        world.check(0, SECTORS);
        world.reopen();
    }
}

/// Delays a flush, so that other threads run during it.
fn slow_flush(request: Request) {
    if request == Request::Sync {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A caller requests the chain while the head is replaced. It may receive the old chain, which accepts no writes any
/// more. No later caller receives the old chain.
#[test]
fn a_chain_opened_during_a_revert_is_not_reused() {
    for seed in 0..6 {
        let (machine, disk) = small(seed);
        disk.snapshot(&NewSnapshot::named("s")).unwrap();
        disk.chain().unwrap().write(0, &[2; 4096]).unwrap();
        disk.chain().unwrap().flush().unwrap();
        machine.set_pace(Arc::new(slow_flush));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    drop(disk.chain());
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
            let reverted = disk.revert("s");
            done.store(true, Ordering::SeqCst);
            reverted.unwrap();
        });
        let first = |disk: &Disk| {
            let mut bytes = [0; 4096];
            disk.chain().unwrap().read(0, &mut bytes).unwrap();
            bytes[0]
        };
        assert_eq!(first(&disk), 1, "seed {seed}");
        disk.chain().unwrap().write(0, &[3; 4096]).unwrap();
        disk.chain().unwrap().flush().unwrap();
        drop(disk);
        let disk = Disk::open(Folder::plain(machine.directory()), &options(2)).unwrap();
        assert_eq!(first(&disk), 3, "seed {seed}: a flushed write is lost");
    }
}

/// A caller found the disk open, and requests its chain while the disk is being closed.
#[test]
fn a_closed_disk_opens_no_chain() {
    for seed in 0..6 {
        let (machine, disk) = small(seed);
        machine.set_pace(Arc::new(slow_flush));
        let (disk, open) = (&disk, AtomicBool::new(true));
        let late = std::thread::scope(|scope| {
            let callers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let mut last = None;
                        while open.load(Ordering::SeqCst) {
                            last = disk.chain().ok();
                        }
                        last
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(1));
            disk.close().unwrap();
            open.store(false, Ordering::SeqCst);
            let last = callers.into_iter().filter_map(|caller| caller.join().unwrap());
            last.filter(|chain| chain.write(0, &[4; 4096]).is_ok()).count()
        });
        assert_eq!((late, disk.is_head_open()), (0, false), "seed {seed}");
    }
}

#[test]
fn no_sector_reads_as_stale_data() {
    let kinds = [&[ImageKind::Thin, ImageKind::MonolithicSparse][..], &OTHER_BASES].concat();
    let cases = number("LAMINA_CASES", 200);
    let (mut unread, mut stopped) = (0, 0);
    for seed in 0..cases {
        let kind = kinds[seed as usize / 3 % kinds.len()];
        let (failed, stop) = case(seed, kind, DELTAS[(seed % 3) as usize]);
        unread += u64::from(failed > 0);
        stopped += u64::from(stop);
    }
    println!("{cases} cases: {unread} with sectors that could not be read, {stopped} in which the disk stopped");
    assert!(unread > cases / 20 && stopped > cases / 20);
}
