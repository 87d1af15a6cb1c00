//! The simulated disk keeps its guarantees, causes every fault that it documents, and is determined by its seed.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Buffer, Directory, File, IoMode, SharedSlice};
use std::io::ErrorKind;
use std::sync::Arc;
use testkit::Random;

const SECTOR: u64 = 512;
const SECTORS: u64 = 256;
const PAGE: u64 = 4096;

/// What each sector may hold after a power cut. The content of a sector is identified by one number, repeated through
/// the sector; zero is a sector of zeros.
struct Model {
    possible: Vec<Vec<u64>>,
    length: u64,
    /// Bounds of the length after a power cut.
    length_min: u64,
    length_max: u64,
}

impl Model {
    fn new() -> Self {
        Self { possible: vec![vec![0]; SECTORS as usize], length: 0, length_min: 0, length_max: 0 }
    }

    fn write(&mut self, first: u64, stamps: &[u64], durable: bool) {
        let end = (first + stamps.len() as u64) * SECTOR;
        self.length = self.length.max(end);
        self.length_max = self.length_max.max(end);
        for (sector, stamp) in (first..).zip(stamps) {
            let possible = &mut self.possible[sector as usize];
            if durable {
                possible.clear();
            }
            possible.push(*stamp);
        }
        if durable {
            self.length_min = self.length_min.max(end);
        }
    }

    fn zero(&mut self, first: u64, end: u64) {
        self.possible[first as usize..end as usize].iter_mut().for_each(|possible| possible.push(0));
    }

    fn set_len(&mut self, sectors: u64) {
        self.zero(sectors, SECTORS);
        self.length = sectors * SECTOR;
        self.length_min = self.length_min.min(self.length);
        self.length_max = self.length_max.max(self.length);
    }

    fn sync(&mut self) {
        for possible in &mut self.possible {
            possible.drain(..possible.len() - 1);
        }
        self.length_min = self.length;
        self.length_max = self.length;
    }

    fn check_live(&self, file: &dyn File, context: &str) {
        assert_eq!(file.len().unwrap(), self.length, "{context}");
        for (sector, stamp) in stamps(file).into_iter().enumerate() {
            assert_eq!(Some(&stamp), self.possible[sector].last(), "{context} sector {sector}");
        }
    }

    fn check_crashed(&self, file: &dyn File, context: &str) {
        let length = file.len().unwrap();
        assert!((self.length_min..=self.length_max).contains(&length), "{context} length {length}");
        for (sector, stamp) in stamps(file).into_iter().enumerate() {
            assert!(stamp == 0 || (sector as u64) * SECTOR < length, "{context} sector {sector} lies past the end");
            let vanished = stamp == 0 && (sector as u64 + 1) * SECTOR > self.length_min;
            assert!(vanished || self.possible[sector].contains(&stamp), "{context} sector {sector} holds {stamp}");
        }
    }
}

/// The number in each sector; fails if a sector is torn.
fn stamps(file: &dyn File) -> Vec<u64> {
    let mut bytes = vec![0; (SECTORS * SECTOR) as usize];
    file.read_at(&mut bytes, 0).unwrap();
    let stamp_of = |sector: &[u8]| {
        let words: Vec<u64> = sector.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        assert!(words.iter().all(|word| *word == words[0]), "a sector with parts of two writes");
        words[0]
    };
    bytes.chunks(SECTOR as usize).map(stamp_of).collect()
}

fn bytes_of(stamps: &[u64]) -> Vec<u8> {
    stamps.iter().flat_map(|stamp| stamp.to_le_bytes().repeat(SECTOR as usize / 8)).collect()
}

/// A disk with one empty file, which has a durable name.
fn disk_with_file(seed: u64, options: SimulatedOptions) -> (SimulatedDisk, Arc<dyn Directory>, Arc<dyn File>) {
    let disk = SimulatedDisk::new(seed, options);
    let directory = disk.directory();
    let file = directory.create("file", IoMode::Buffered).unwrap();
    directory.sync().unwrap();
    (disk, directory, file)
}

/// One random change of file and model.
fn change(random: &mut Random, file: &dyn File, model: &mut Model, stamp: &mut u64) {
    let first = random.below(SECTORS);
    let count = 1 + random.below((SECTORS - first).min(24));
    match random.below(20) {
        0..12 => {
            let stamps: Vec<u64> = (0..count).map(|at| *stamp + at).collect();
            *stamp += count;
            let durable = random.below(4) == 0;
            file.write_at(&[&bytes_of(&stamps)], first * SECTOR, durable).unwrap();
            model.write(first, &stamps, durable);
        }
        12..14 => {
            let page = first / 8 * 8;
            file.punch(page * SECTOR, 2 * PAGE).unwrap();
            model.zero(page, (page + 16).min(SECTORS));
        }
        14 => {
            file.set_len(first * SECTOR).unwrap();
            model.set_len(first);
        }
        15 => {
            file.reserve(first * SECTOR, count * SECTOR).unwrap();
            model.length = model.length.max((first + count) * SECTOR);
            model.length_max = model.length_max.max(model.length);
        }
        16..18 => {
            file.sync().unwrap();
            model.sync();
        }
        _ => {}
    }
}

#[test]
fn a_crash_leaves_a_state_that_the_model_allows() {
    for seed in 0..400 {
        let options = SimulatedOptions { unflushed_max: if seed % 3 == 0 { 5 } else { 4096 }, ..Default::default() };
        let (mut disk, _, mut file) = disk_with_file(seed, options);
        let mut random = Random(seed ^ 0x5eed);
        let mut model = Model::new();
        let mut stamp = 1;
        for round in 0..4 {
            for step in 0..random.below(40) {
                change(&mut random, file.as_ref(), &mut model, &mut stamp);
                model.check_live(file.as_ref(), &format!("seed {seed} round {round} step {step}"));
            }
            for outcome in 0..3 {
                let after = disk.crash();
                let found = after.directory().open("file", IoMode::Buffered).unwrap();
                model.check_crashed(found.as_ref(), &format!("seed {seed} round {round} outcome {outcome}"));
                if outcome == 2 {
                    assert!(file.read_at(&mut [0; 8], 0).is_err() && file.sync().is_err());
                    (disk, file) = (after, found);
                }
            }
            // The next round starts with what was found, all of which is durable.
            model.possible = stamps(file.as_ref()).into_iter().map(|stamp| vec![stamp]).collect();
            model.length = file.len().unwrap();
            model.sync();
        }
    }
}

#[test]
fn power_cuts_cause_every_kind_of_loss() {
    let (mut whole, mut none, mut torn, mut overtaken, mut short, mut half_punched) = (0, 0, 0, 0, 0, 0);
    for seed in 0..300 {
        let (disk, _, file) = disk_with_file(seed, SimulatedOptions::default());
        file.write_at(&[&bytes_of(&[1; 64])], 0, false).unwrap();
        file.sync().unwrap();
        file.write_at(&[&bytes_of(&[2; 8])], 0, false).unwrap();
        file.write_at(&[&bytes_of(&[3; 8])], PAGE, false).unwrap();
        file.punch(2 * PAGE, 6 * PAGE).unwrap();
        file.write_at(&[&bytes_of(&[4; 8])], 64 * SECTOR, false).unwrap();
        let found = disk.crash().directory().open("file", IoMode::Buffered).unwrap();
        let after = stamps(found.as_ref());
        match after[..8].iter().filter(|stamp| **stamp == 2).count() {
            0 => none += 1,
            8 => whole += 1,
            _ => torn += 1,
        }
        overtaken += usize::from(after[..8] == [1; 8] && after[8..16] == [3; 8]);
        short += usize::from(found.len().unwrap() == 64 * SECTOR);
        let zeros = after[16..64].iter().filter(|stamp| **stamp == 0).count();
        half_punched += usize::from(zeros > 0 && zeros < 48);
    }
    assert!(whole > 20 && none > 20 && torn > 20 && overtaken > 5 && short > 20 && half_punched > 5);
}

#[test]
fn a_power_cut_loses_the_last_name_changes_first_and_each_completely() {
    let (mut all, mut nothing, mut some) = (0, 0, 0);
    for seed in 0..200 {
        let (disk, directory, file) = disk_with_file(seed, SimulatedOptions::default());
        file.write_at(&[b"old"], 0, true).unwrap();
        let new = directory.create("new", IoMode::Buffered).unwrap();
        new.write_at(&[b"new"], 0, false).unwrap();
        new.sync().unwrap();
        directory.rename("new", "file").unwrap();
        directory.create("later", IoMode::Buffered).unwrap();
        let after = disk.crash().directory();
        let mut content = [0; 3];
        after.open("file", IoMode::Buffered).unwrap().read_at(&mut content, 0).unwrap();
        let names = after.list().unwrap();
        match names.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["file"] if &content == b"old" => nothing += 1,
            ["file"] | ["file", "new"] => some += 1,
            ["file", "later"] => {
                assert_eq!(&content, b"new");
                all += 1;
            }
            _ => panic!("seed {seed}: {names:?}"),
        }
        if names.contains(&"new".to_owned()) {
            assert_eq!(&content, b"old");
        }
    }
    assert!(all > 10 && nothing > 10 && some > 10);
    // After a flush of the folder nothing is lost, and a removed name does not return.
    for seed in 0..50 {
        let (disk, directory, _file) = disk_with_file(seed, SimulatedOptions::default());
        directory.create("brief", IoMode::Buffered).unwrap();
        directory.remove("brief").unwrap();
        directory.create("second", IoMode::Buffered).unwrap();
        directory.remove("file").unwrap();
        directory.sync().unwrap();
        assert_eq!(disk.crash().directory().list().unwrap(), ["second"]);
        assert_eq!(disk.crash().directory().list().unwrap(), ["second"]);
    }
}

/// A fixed sequence of operations.
fn work(disk: &SimulatedDisk) -> std::io::Result<()> {
    let directory = disk.directory();
    let log = directory.create("log", IoMode::Buffered)?;
    directory.sync()?;
    for round in 0..6u64 {
        let stamps: Vec<u64> = (0..12).map(|at| 1 + round * 12 + at).collect();
        log.write_at(&[&bytes_of(&stamps)], round * 12 * SECTOR, round % 2 == 0)?;
        log.punch(0, PAGE)?;
        if round % 3 == 2 {
            log.sync()?;
        }
        directory.create(&format!("file-{round}"), IoMode::Buffered)?.reserve(0, PAGE)?;
    }
    directory.sync()
}

fn dump(disk: &SimulatedDisk) -> Vec<(String, u64, Vec<u64>)> {
    let directory = disk.directory();
    let names = directory.list().unwrap();
    let entry = |name: String| {
        let file = directory.open(&name, IoMode::Buffered).unwrap();
        (name, file.len().unwrap(), stamps(file.as_ref()))
    };
    names.into_iter().map(entry).collect()
}

#[test]
fn a_power_cut_at_any_operation_is_repeatable() {
    let whole = SimulatedDisk::new(1, SimulatedOptions::default());
    work(&whole).unwrap();
    let count = whole.operations();
    assert!(count > 20);
    let mut outcomes = std::collections::BTreeSet::new();
    for cut in 0..=count {
        let run = || {
            let disk = SimulatedDisk::new(cut, SimulatedOptions::default());
            disk.cut_after(cut);
            let result = work(&disk);
            assert_eq!(result.is_ok(), cut == count);
            assert_eq!(disk.is_off(), cut < count);
            assert_eq!(disk.operations(), cut);
            if cut < count {
                assert!(disk.directory().list().is_err());
            }
            dump(&disk.crash())
        };
        let first = run();
        assert_eq!(first, run(), "cut {cut}");
        outcomes.insert(first);
    }
    assert!(outcomes.len() > 10);
}

#[test]
fn the_operation_during_a_power_cut_may_be_partly_done() {
    let (mut torn, mut named) = (0, 0);
    for seed in 0..100 {
        let (disk, _, file) = disk_with_file(seed, SimulatedOptions::default());
        file.write_at(&[&bytes_of(&[1; 8])], 0, true).unwrap();
        disk.cut_after(disk.operations());
        assert!(file.write_at(&[&bytes_of(&[2; 8])], 0, true).is_err());
        let found = disk.crash().directory().open("file", IoMode::Buffered).unwrap();
        let after = stamps(found.as_ref());
        torn += usize::from(after[..8].contains(&1) && after[..8].contains(&2));

        let (disk, directory, _) = disk_with_file(seed, SimulatedOptions::default());
        disk.cut_after(disk.operations());
        assert!(directory.create("new", IoMode::Buffered).is_err());
        let after = disk.crash().directory();
        if after.list().unwrap().contains(&"new".to_owned()) {
            assert_eq!(after.open("new", IoMode::Buffered).unwrap().len().unwrap(), 0);
            named += 1;
        }
    }
    assert!(torn > 10 && named > 10);
}

#[test]
fn a_queue_may_reorder_its_operations() {
    let run = |seed, reorder| {
        let (_disk, directory, file) = disk_with_file(seed, SimulatedOptions { reorder, ..Default::default() });
        let mut queue = directory.queue(8).unwrap();
        for stamp in 1..=3 {
            let slice = SharedSlice::new(Arc::new(Buffer::copy_of(&bytes_of(&[stamp; 8]))), 0..4096);
            queue.write(&file, 0, vec![slice], false, stamp);
        }
        let mut completions = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(&mut completions, None).unwrap();
        }
        (stamps(file.as_ref())[0], completions.iter().map(|completion| completion.token).collect::<Vec<_>>())
    };
    let outcomes: std::collections::BTreeSet<_> = (0..60).map(|seed| run(seed, true)).collect();
    assert_eq!(outcomes.len(), 6);
    assert!((0..10).all(|seed| run(seed, false) == (3, vec![1, 2, 3])));
    assert!((0..10).all(|seed| run(seed, true) == run(seed, true)));
}

#[test]
fn requested_faults_fail_one_operation_each() {
    let (disk, directory, file) = disk_with_file(1, SimulatedOptions::default());
    let before = bytes_of(&[1; 64]);
    file.write_at(&[&before], 0, false).unwrap();
    file.sync().unwrap();
    let mut torn = 0;
    for _ in 0..20 {
        disk.fail_operation(disk.operations());
        let error = file.write_at(&[&bytes_of(&[2; 64])], 0, true).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
        let found = stamps(file.as_ref());
        assert!(found[..64].iter().all(|stamp| [1, 2].contains(stamp)));
        torn += usize::from(found.contains(&1) && found.contains(&2));
        file.write_at(&[&before], 0, false).unwrap();
    }
    assert!(torn > 10);
    disk.fail_operation(disk.operations());
    assert!(directory.create("other", IoMode::Buffered).is_err());
    assert_eq!(directory.list().unwrap(), ["file"]);
    directory.create("other", IoMode::Buffered).unwrap();
}

#[test]
fn a_flush_after_a_failed_flush_does_not_save_lost_writes() {
    let (mut lost, mut seen) = (0, 0);
    for seed in 0..60 {
        let (disk, _, file) = disk_with_file(seed, SimulatedOptions::default());
        file.write_at(&[&bytes_of(&[1; 8])], 0, false).unwrap();
        disk.fail_syncs(1);
        assert!(file.sync().is_err());
        file.write_at(&[&bytes_of(&[2; 8])], PAGE, false).unwrap();
        file.sync().unwrap();
        // Reads may still return the lost data from the page cache, or not.
        let cached = stamps(file.as_ref());
        assert_eq!(cached[8..16], [2; 8]);
        let found = disk.crash().directory().open("file", IoMode::Buffered).unwrap();
        let after = stamps(found.as_ref());
        assert_eq!(after[8..16], [2; 8]);
        lost += usize::from(after[..8] != [1; 8]);
        seen += usize::from(after[..8] != [1; 8] && cached[..8] == [1; 8]);
    }
    assert!(lost > 10 && seen > 3 && seen < lost);
}

#[test]
fn a_full_disk_refuses_operations_that_need_space() {
    let (disk, directory, file) =
        disk_with_file(1, SimulatedOptions { capacity: 16 * PAGE, ..SimulatedOptions::default() });
    let page = vec![7; PAGE as usize];
    file.reserve(0, 8 * PAGE).unwrap();
    assert_eq!(directory.room().unwrap().available, 8 * PAGE);
    for at in 8..16 {
        file.write_at(&[&page], at * PAGE, false).unwrap();
    }
    assert_eq!(directory.room().unwrap().available, 0);
    assert!(error::lacks_space(&file.write_at(&[&page], 16 * PAGE, false).unwrap_err()));
    assert!(error::lacks_space(&file.reserve(15 * PAGE, 2 * PAGE).unwrap_err()));
    assert_eq!(file.len().unwrap(), 16 * PAGE);
    // Space that was reserved or written before takes no new space.
    file.write_at(&[&page], 3 * PAGE, true).unwrap();
    file.write_at(&[&page], 9 * PAGE, false).unwrap();
    file.punch(PAGE + 1, 3 * PAGE).unwrap();
    assert_eq!(directory.room().unwrap().available, 2 * PAGE);
    file.write_at(&[&page], 16 * PAGE, false).unwrap();
    let other = directory.create("other", IoMode::Buffered).unwrap();
    other.write_at(&[b"x"], 0, false).unwrap();
    assert!(error::lacks_space(&other.write_at(&[b"x"], PAGE, false).unwrap_err()));
    directory.remove("other").unwrap();
    assert_eq!(directory.room().unwrap().available, 0);
    drop(other);
    assert_eq!(directory.room().unwrap().available, PAGE);
    file.set_len(4 * PAGE).unwrap();
    assert_eq!(directory.room().unwrap().available, 14 * PAGE);
    disk.set_capacity(PAGE);
    assert_eq!(directory.room().unwrap().available, 0);
    file.write_at(&[&page], 0, false).unwrap();
    file.sync().unwrap();
    let room = disk.crash().directory().room().unwrap();
    assert_eq!((room.total, room.available), (PAGE, 0));
}

#[test]
fn flipped_bits_stay_and_a_write_restores_an_unreadable_sector() {
    let (disk, _, file) = disk_with_file(1, SimulatedOptions::default());
    file.write_at(&[&[0u8; 8192]], 0, false).unwrap();
    disk.flip_bit("file", 4097, 3).unwrap();
    let mut bytes = [0; 2];
    file.read_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [0, 8]);
    file.sync().unwrap();
    let after = disk.crash();
    let file = after.directory().open("file", IoMode::Buffered).unwrap();
    file.read_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [0, 8]);
    assert_eq!(after.flip_bit("none", 0, 0).unwrap_err().kind(), ErrorKind::NotFound);

    after.fail_reads("file", 512..1024).unwrap();
    assert!(file.read_at(&mut [0; 513], 0).is_err());
    assert!(file.read_at(&mut [0; 1], 1023).is_err());
    file.read_at(&mut [0; 512], 0).unwrap();
    file.write_at(&[&[1; 512]], 512, false).unwrap();
    file.read_at(&mut [0; 2048], 0).unwrap();
}
