//! Replaying journals as ESXi leaves them, and refusing transactions that are not proven.

use super::super::DirtyJournal;
use super::*;
use crate::ErrorKind;

const SLOT: u64 = 25 * 512;
const JOURNAL: u64 = 2048 * 512;
const TABLE: u64 = 6144;
const VOLATILE: u64 = 512;

/// A sector of a table; its first entry names a grain.
fn table_sector(grain: u64) -> [u8; 512] {
    let mut sector = [0; 512];
    sector[..8].copy_from_slice(&(0x3000_0000_0000_0000u64 | grain << 48).to_le_bytes());
    sector
}

/// A transaction in a slot.
struct Slot {
    number: u64,
    sequence: u64,
    records: Vec<(u64, [u8; 512])>,
}

impl Slot {
    fn new(number: u64, sequence: u64, target: u64, grain: u64) -> Self {
        Self { number, sequence, records: vec![(target, table_sector(grain))] }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SLOT as usize];
        let words = [0x00c0_ffee, 1, self.number, 1 + self.records.len() as u64, 0x1234, self.sequence, u64::MAX, 99];
        for (index, word) in words.iter().enumerate() {
            bytes[index * 8..index * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        for (index, (target, payload)) in self.records.iter().enumerate() {
            let at = 128 + index * 16;
            bytes[at..at + 8].copy_from_slice(&target.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&1u64.to_le_bytes());
            bytes[512 + index * 512..1024 + index * 512].copy_from_slice(payload);
        }
        bytes
    }
}

/// An image with four grains of data. Its table lacks the entries that name them; only the journal may have these.
fn dirty(slots: &[Slot], next: u64) -> Arc<MemoryFile> {
    let disk = simulated(1);
    let layer = create(&disk, IoMode::Buffered, 100 * MIB, writing());
    for grain in 0..4 {
        layer.write(grain * GRAIN, &[&stamped(1, grain + 1)]).unwrap();
    }
    layer.close().unwrap();
    let file = disk.directory().open(NAME, IoMode::Buffered).unwrap();
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(&mut bytes, 0).unwrap();
    bytes[TABLE as usize * 512..TABLE as usize * 512 + 32].fill(0);
    let memory = MemoryFile::over(Arc::new(bytes));
    for slot in slots {
        memory.write_at(&[&slot.bytes()], JOURNAL + slot.number * SLOT, false).unwrap();
    }
    memory.write_at(&[&next.to_le_bytes(), &1u64.to_le_bytes()], VOLATILE + 16, false).unwrap();
    Arc::new(memory)
}

fn replayed(file: &Arc<MemoryFile>, write: bool) -> Result<SeSparse> {
    let options = Options { write, journal: DirtyJournal::Replay, ..Options::default() };
    SeSparse::open(Arc::clone(file) as Arc<dyn File>, NAME, options)
}

fn three() -> Vec<Slot> {
    vec![Slot::new(0, 7, TABLE, 0), Slot::new(1, 8, TABLE, 1), Slot::new(2, 9, TABLE + 1, 2)]
}

#[test]
fn a_dirty_journal_is_refused_unless_asked_for() {
    let file = dirty(&three(), 7);
    for write in [false, true] {
        let options = Options { write, ..Options::default() };
        let error = SeSparse::open(Arc::clone(&file) as Arc<dyn File>, NAME, options).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("journal"), "{error}");
    }
}

#[test]
fn an_incomplete_last_transaction_is_not_replayed() {
    let layer = replayed(&dirty(&three(), 7), false).unwrap();
    let report = *layer.replayed().unwrap();
    assert_eq!((report.transactions, report.last, report.dropped), (2, 8, Some(9)));
    assert!(report.to_string().contains("number 9 left out"), "{report}");
    assert_eq!(stamps(&layer, 0, GRAIN).unwrap(), [2; 8], "the later transaction wins");
    assert_eq!(stamps(&layer, 64 * GRAIN, GRAIN).unwrap(), [ABSENT; 8]);

    // A header that counts the transaction proves that it is complete.
    let layer = replayed(&dirty(&three(), 10), false).unwrap();
    assert_eq!(layer.replayed().unwrap().dropped, None);
    assert_eq!(stamps(&layer, 64 * GRAIN, GRAIN).unwrap(), [3; 8]);

    // If the transaction's sectors are in place, they prove that it is complete, too.
    let file = dirty(&three(), 7);
    file.write_at(&[&table_sector(2)], (TABLE + 1) * 512, false).unwrap();
    let layer = replayed(&file, false).unwrap();
    assert_eq!(layer.replayed().unwrap().last, 9);
}

#[test]
fn a_replay_is_written_only_when_the_image_is_opened_for_writing() {
    let file = dirty(&three(), 10);
    let before = {
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    };
    drop(replayed(&file, false).unwrap());
    let mut after = vec![0; before.len()];
    file.read_at(&mut after, 0).unwrap();
    assert!(before == after);

    let layer = replayed(&file, true).unwrap();
    assert_eq!(stamps(&layer, 0, GRAIN).unwrap(), [2; 8]);
    layer.close().unwrap();
    let mut journal = vec![1; 1 << 20];
    file.read_at(&mut journal, JOURNAL).unwrap();
    assert!(journal.iter().all(|byte| *byte == 0), "the journal is empty afterwards");
    let layer = SeSparse::open(Arc::clone(&file) as Arc<dyn File>, NAME, Options::default()).unwrap();
    assert!(layer.replayed().is_none());
    assert_eq!(stamps(&layer, 64 * GRAIN, GRAIN).unwrap(), [3; 8]);
    let mut next = [0; 8];
    file.read_at(&mut next, VOLATILE + 16).unwrap();
    assert_eq!(u64::from_le_bytes(next), 10);
}

/// A power cut at every operation of a replay into the file, with several outcomes: another replay gives the same
/// content.
#[test]
fn a_replay_survives_a_power_cut_at_any_operation() {
    for (next, last) in [(10, 3), (7, ABSENT)] {
        let memory = dirty(&three(), next);
        let mut bytes = vec![0; memory.len().unwrap() as usize];
        memory.read_at(&mut bytes, 0).unwrap();
        for after in 0.. {
            let disk = simulated(after);
            let directory = disk.directory();
            let file = directory.create(NAME, IoMode::Buffered).unwrap();
            file.write_at(&[&bytes], 0, false).unwrap();
            file.sync().unwrap();
            directory.sync().unwrap();
            disk.cut_after(disk.operations() + after);
            let options = Options { journal: DirtyJournal::Replay, ..writing() };
            let done = open(&*directory, IoMode::Buffered, options).is_ok();
            for _ in 0..8 {
                let disk = disk.crash();
                for write in [false, true] {
                    let layer = open(&*disk.directory(), IoMode::Buffered, Options { write, ..options }).unwrap();
                    assert_eq!(stamps(&layer, 0, GRAIN).unwrap(), [2; 8], "cut after {after}");
                    assert_eq!(stamps(&layer, 64 * GRAIN, GRAIN).unwrap(), [last; 8], "cut after {after}");
                }
            }
            if done {
                assert!(after > 4);
                break;
            }
        }
    }
}

#[test]
fn transactions_of_older_sessions_and_a_wrapped_journal() {
    // Slots 2 and 3 are from an earlier session; the last session has only slots 0 and 1.
    let slots = [Slot::new(0, 36, TABLE, 1), Slot::new(1, 37, TABLE + 1, 2), Slot::new(2, 6, TABLE, 3)];
    let layer = replayed(&dirty(&slots, 38), false).unwrap();
    assert_eq!((layer.replayed().unwrap().transactions, layer.replayed().unwrap().last), (2, 37));
    assert_eq!(stamps(&layer, 0, GRAIN).unwrap(), [2; 8]);
    // A session that wrapped around: slots 80 and 79 come before slot 0.
    let mut slots: Vec<Slot> = (0..81).map(|slot| Slot::new(slot, 119 + slot, TABLE, 0)).collect();
    slots[0] = Slot::new(0, 200, TABLE + 1, 2);
    slots[80] = Slot::new(80, 199, TABLE, 3);
    let layer = replayed(&dirty(&slots, 201), false).unwrap();
    assert_eq!(layer.replayed().unwrap().transactions, 81);
    assert_eq!(
        (stamps(&layer, 0, GRAIN).unwrap(), stamps(&layer, 64 * GRAIN, GRAIN).unwrap()),
        (vec![4; 8], vec![3; 8])
    );
}

#[test]
fn a_journal_without_provable_order_is_refused() {
    let cases: Vec<(&str, Vec<Slot>, u64)> = vec![
        ("no transaction", vec![], 7),
        ("a gap", vec![Slot::new(0, 7, TABLE, 0), Slot::new(1, 9, TABLE, 1)], 10),
        ("a missing slot", vec![Slot::new(0, 7, TABLE, 0), Slot::new(2, 9, TABLE, 1)], 10),
        ("a missing end", three(), 12),
        ("a target outside", vec![Slot::new(0, 7, 3, 0), Slot::new(1, 8, TABLE, 1), Slot::new(2, 9, TABLE, 1)], 10),
        ("grain data", vec![Slot::new(0, 7, 12288, 0), Slot::new(1, 8, TABLE, 1)], 9),
        (
            "payload that is no table",
            vec![Slot { number: 0, sequence: 7, records: vec![(TABLE, [0xee; 512])] }, Slot::new(1, 8, TABLE, 1)],
            9,
        ),
        ("sequence numbers that overflow", vec![Slot::new(0, u64::MAX, TABLE, 0), Slot::new(1, 0, TABLE, 0)], 0),
    ];
    for (what, slots, next) in cases {
        let file = dirty(&slots, next);
        for write in [false, true] {
            match replayed(&file, write) {
                Ok(layer) => panic!("{what}: {:?}", layer.replayed()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}"),
            }
        }
        let mut flag = [0; 8];
        file.read_at(&mut flag, VOLATILE + 24).unwrap();
        assert_eq!(flag[0], 1, "{what}: still dirty");
    }
}

#[test]
fn an_invalid_last_transaction_is_not_replayed() {
    let mut slots = three();
    slots[2].records[0].1 = [0xee; 512];
    let layer = replayed(&dirty(&slots, 7), false).unwrap();
    assert_eq!(layer.replayed().unwrap().dropped, Some(9));
}

#[test]
fn mutated_journals_never_panic() {
    let mut random = Random(77);
    for _ in 0..3000 {
        let file = dirty_cached(&mut random);
        for _ in 0..1 + random.below(4) {
            let slot = random.below(3);
            let at = JOURNAL + slot * SLOT + random.below(30) * 8;
            let value = if random.once_in(2) { random.below(40) } else { random.next() >> random.below(64) };
            file.write_at(&[&value.to_le_bytes()], at, false).unwrap();
        }
        for write in [false, true] {
            if let Ok(layer) = replayed(&file, write) {
                let _ = layer.map(0..MIB, 10, &mut Vec::new());
                let _ = layer.close();
            }
        }
    }
}

/// As [`dirty`], with the same bytes each time.
fn dirty_cached(random: &mut Random) -> Arc<MemoryFile> {
    static BASE: std::sync::OnceLock<Arc<Vec<u8>>> = std::sync::OnceLock::new();
    let base = BASE.get_or_init(|| {
        let file = dirty(&three(), 7);
        let mut bytes = vec![0; file.len().unwrap() as usize];
        file.read_at(&mut bytes, 0).unwrap();
        Arc::new(bytes)
    });
    let file = MemoryFile::over(Arc::clone(base));
    file.write_at(&[&random.below(12).to_le_bytes()], VOLATILE + 16, false).unwrap();
    Arc::new(file)
}
